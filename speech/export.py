"""Writes a checkpoint once more: native or in the 2025 layout, with an adapter folded in or not.

The 2025 layout is the one boson-ai's own code serves. Higgs TTS 3 has one layout, with its codec and both copies of the
tied tables inside, which sglang-omni and vllm-omni serve. Weights go from file to file tensor by tensor, so no more
than one output file (and the largest tensor in fp32) is ever in memory. The folder appears whole or not at all.
"""
import math
from pathlib import Path

import torch

from common import tensor_files
from common.distributed import UserError
from core.new_folder import new_folder
from core import adapters
from speech import text_normalization, versions, weights


def export(source, output_dir, layout="native", dtype=None, shard_bytes=5 * 10**9, adapter=None,
           codec=None, base_dtype=None):
    """Write the checkpoint `source` (folder or hub name, either layout) into output_dir; returns
    notes to print.

    layout: of choices.LAYOUTS. dtype: of choices.DTYPES, or None: as the files have it, but float32
    where an adapter is folded in, since bf16 rounds away most of what a small update changed.
    shard_bytes: limit of one weight file. adapter: folder, or None; its text_normalization.FILE
    comes along, without one the source's. codec: see weights.save_config. base_dtype nf4: the base
    is rounded as an adapter of such a run has seen it. Raises UserError, also when output_dir holds
    something.
    """
    folder, config = weights.find_model(source)
    model_module, third = versions.module(config), versions.is_third(config["model_type"])
    if codec and layout == "2025" and not third:
        raise UserError("--audio_tokenizer_path: the 2025 layout names no codec; drop it")
    tokenizer = model_module.load_tokenizer(folder)
    parts = model_module.weight_parts(folder, config)
    model = model_module.empty_model(config, torch.float32, folder)
    weights.check_weights(model, parts, folder)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    layers = {layer for part in model_module.layers(model) for layer in part.modules()}
    linear = [f"{name}.weight" for name, layer in model.named_modules()
              if layer in layers and type(layer) is torch.nn.Linear]
    folds = find_folds(model, adapter) if adapter else {}
    if base_dtype == "nf4":
        from core import nf4
        folds |= {name: nf4.rounded(folds.get(name)) for name in linear}
    wanted = "float32" if dtype is None and folds and not third else dtype
    dtypes = {name: getattr(torch, wanted) if wanted else parts[name][0][:1].dtype
              for name in shapes}
    names = {name: name for name in shapes}
    if layout == "2025" and not third:
        from speech import layout_2025
        names = layout_2025.original_names(shapes)
    # name in the files: (slice handles, dtype, what an adapter adds)
    tensors = {names[name]: (parts[name], dtypes[name], folds.get(name)) for name in shapes}
    if third:
        tensors = model_module.whole_files(tensors, folder, codec)
    sizes = {name: math.prod(tensor_files.shape_of(found)) * kind.itemsize
             for name, (found, kind, _) in tensors.items()}
    files, total = plan_files(sizes, shard_bytes), sum(sizes.values())
    with new_folder(output_dir, total) as building:
        for number, file in enumerate(files):
            written = {name: read(*tensors[name]) for name in file}
            tensor_files.check_finite(written, f"{source}, with its adapter," if folds else source)
            name = tensor_files.file_name("model", number, len(files))
            tensor_files.save(written, building / name)
        if len(files) > 1:
            places = {name: tensor_files.file_name("model", number, len(files))
                      for number, file in enumerate(files) for name in file}
            tensor_files.write_index(building / "model.safetensors.index.json", places, total)
        if not third:
            model.config.dtype = dtypes["model.embed_tokens.weight"]
        if third or layout == "native":
            made = model_module.save_config(model, tokenizer, building, folder, codec)
        else:
            made = layout_2025.save_original_config(model.config, tokenizer, building, folder,
                                                    config)
        if setting := text_normalization.saved_setting(adapter or folder):
            text_normalization.save_setting(building / text_normalization.FILE, setting)
    kinds = sorted({str(kind).removeprefix("torch.") for kind in dtypes.values()})
    notes = [f"{len(tensors)} tensors, {len(folds)} of them with an adapter's update, "
             f"{total / 1e9:.3f} GB of {' and '.join(kinds)} in {len(files)} file{'s'[:len(files) > 1]}"]
    joined = sum(len(found) > 1 for found in parts.values())
    if joined:
        notes.append(f"{joined} tensors that the source splits into a frozen and a trainable part "
                     "are joined")
    licence = [model_module.LICENCE] if model_module.LICENCE else []
    return notes + licence + [f"{name}: {what}" for name, what in made.items()]


def find_folds(model, adapter):
    """{weight name: function that adds the adapter's update to that weight in fp32}; model: native,
    on the meta device.

    Raises UserError when the adapter's files and the model do not fit together exactly:
    PeftModel.from_pretrained would only warn about weights that are missing.
    """
    whole = versions.module(model.config).WHOLE_MODULES
    net = adapters.add_saved(model, adapter, whole=whole)
    stored = tensor_files.open_tensors([Path(adapter) / "adapter_model.safetensors"])
    tables = {f"{name}.weight": f"base_model.model.{name}.weight" for name in whole}
    known = (".lora_A.weight", ".lora_B.weight", f".{adapters.MAGNITUDE}", *tables.values())
    if other := [name for name in stored if not name.endswith(known)]:
        raise UserError(f"--adapter {adapter}: only LoRA, rsLoRA and DoRA can be folded in, this "
                        f"has {min(other)}")
    # onto the meta device nothing is copied: names and shapes are compared
    adapters.load_adapters(net, adapter)
    values = {name: part[:] for name, part in stored.items()}
    tensor_files.check_finite(values, f"--adapter {adapter}")

    def fold(name, scaling):
        a, b = (stored[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        length = stored.get(f"base_model.model.{name}.{adapters.MAGNITUDE}")

        def updated(weight):
            weight = torch.addmm(weight, b[:].float(), a[:].float(), alpha=scaling)
            # DoRA (Liu et al. 2024, eq. 5): the rows' direction, times a trained length
            if length is not None:
                weight *= (length[:].float() / torch.linalg.norm(weight, dim=1))[:, None]
            return weight
        return updated
    found = {name: lambda weight, table=table: stored[table][:].float().clone()
             for name, table in tables.items() if table in stored}
    return found | {f"{name}.weight": fold(name, module.scaling["default"])
                    for name, module in net.get_base_model().named_modules()
                    if hasattr(module, "lora_A")}


def plan_files(sizes, limit):
    """[{name: bytes}] of each file: in order, each up to `limit` bytes; a larger tensor gets a file of its own."""
    files = [{}]
    for name, size in sizes.items():
        if files[-1] and sum(files[-1].values()) + size > limit:
            files.append({})
        files[-1][name] = size
    return files


def read(parts, dtype, fold):
    """One whole tensor from its slice handles, in `dtype`; fold works on it in fp32."""
    tensor = torch.cat([part[:] for part in parts]) if len(parts) > 1 else parts[0][:]
    return (fold(tensor.float()) if fold else tensor).to(dtype).contiguous()
