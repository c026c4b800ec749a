"""Write a checkpoint again, an adapter folded in or not: native, or the layout that servers read.

Higgs-Audio V2 has two layouts: transformers' native one, and that of 2025, which boson-ai's own
code serves. Higgs TTS 3 has one, with its codec and both copies of the tied tables inside, which
sglang-omni and vllm-omni serve. Weights go from file to file tensor by tensor, so no more than one
output file (and the largest tensor in fp32) is ever in memory. The folder appears whole or not at
all.
"""
import json
import math
from pathlib import Path

import torch

from core import adapters, tensor_io
from core.cli import UserError
from core.checkpoint import new_folder
from speech import layout_2025, text_normalization, versions, weights


def export(source, output_dir, layout="native", dtype=None, shard_bytes=5 * 10**9, adapter=None,
           codec=None, base_dtype=None):
    """Write the checkpoint `source` (folder or hub name, either layout) -> lines to print.

    layout: native or 2025. dtype: a name, or None: as the files have it, but float32 where an
    adapter is folded in, since bf16 rounds away most of what a small update changed. shard_bytes:
    limit of one weight file. adapter: folder or None. codec: see weights.save_config. base_dtype
    nf4: the base is rounded as an adapter of such a run has seen it. Raises UserError, also when
    output_dir holds something.
    """
    folder, config = weights.find_model(source)
    version, third = versions.module(config), versions.is_third(config["model_type"])
    original = layout == "2025" and not third
    if codec and original:
        raise UserError("--audio_tokenizer_path: the 2025 layout names no codec; drop it")
    tokenizer, parts = version.load_tokenizer(folder), version.weight_parts(folder, config)
    model = version.empty_model(config, torch.float32, folder)
    weights.check_weights(model, parts, folder)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    layers = {module for layer in version.layers(model) for module in layer.modules()}
    in_layers = [f"{name}.weight" for name in linear if model.get_submodule(name) in layers]
    folds = find_folds(model, adapter) if adapter else {}
    updated = len(folds)
    if base_dtype == "nf4":
        from core import nf4
        folds |= {name: nf4.rounded(folds.get(name)) for name in in_layers}
    wanted = "float32" if dtype is None and folds and not third else dtype
    dtypes = {name: getattr(torch, wanted) if wanted else parts[name][0][:1].dtype
              for name in shapes}
    # name in the files: (Slices to join, dtype, what an adapter adds)
    names = layout_2025.original_names(shapes) if original else {name: name for name in shapes}
    tensors = {names[name]: (parts[name], dtypes[name], folds.get(name)) for name in shapes}
    if third:
        tensors = version.whole_files(tensors, folder, codec)
    sizes = {name: math.prod(tensor_io.shape_of(found)) * kind.itemsize
             for name, (found, kind, _) in tensors.items()}
    files, total, made = plan_files(sizes, shard_bytes), sum(sizes.values()), {}
    with new_folder(output_dir, total) as building:
        for file, inside in files.items():
            written = {name: read(*tensors[name]) for name in inside}
            weights.check_finite(written, f"{source}, with its adapter," if folds else source)
            tensor_io.save(written, building / file)
        if len(files) > 1:
            places = {name: file for file, inside in files.items() for name in inside}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (building / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        if not third:
            model.config.dtype = dtypes["model.embed_tokens.weight"]
        if original:
            layout_2025.save_original_config(model.config, tokenizer, building, config)
        else:
            made = version.save_config(model, tokenizer, building, folder, codec)
        if setting := text_normalization.saved_setting(adapter or folder):
            text_normalization.save_setting(building / text_normalization.FILE, setting)
        if not (building / "README.md").exists():
            (building / "README.md").write_text(card(source, output_dir, version), encoding="utf-8")
    kinds = sorted({str(kind).removeprefix("torch.") for kind in dtypes.values()})
    lines = [f"{len(tensors)} tensors, {updated} of them with an adapter's update, "
             f"{total / 1e9:.3f} GB of {' and '.join(kinds)} in {len(files)} "
             f"file{'s'[:len(files) > 1]}"]
    if joined := sum(len(found) > 1 for found in parts.values()):
        lines.append(f"{joined} tensors that the source splits into a frozen and a trainable part "
                     "are joined")
    return [*lines, *[version.LICENCE] * bool(version.LICENCE),
            *(f"{name}: {what}" for name, what in made.items()),
            f"to publish: hf upload OWNER/NAME {output_dir}"]


def card(source, output_dir, version):
    """The model card README.md of an export: what the hub asks for, and the licence."""
    on_hub = str(source).count("/") == 1 and not Path(source).exists()
    base = f"base_model: {source}\n" if on_hub else ""
    return (f"---\nlicense: other\n{base}pipeline_tag: text-to-speech\n---\n\n"
            f"# {Path(output_dir).name}\n\nFine-tuned from `{Path(source).name}` with "
            f"`train_v2_ddp.py`.\n\n{version.TERMS}\n")


def find_folds(model, adapter):
    """{weight name: function that adds the adapter's update to that weight in fp32}.

    model: on the meta device. Raises UserError when the adapter's files and the model do not fit
    together exactly: PeftModel.from_pretrained would only warn about weights that are missing.
    """
    whole = versions.module(model.config).WHOLE_MODULES
    net = adapters.add_saved(model, adapter, whole=whole)
    stored = tensor_io.open_tensors([Path(adapter) / "adapter_model.safetensors"])
    tables = {f"{name}.weight": f"base_model.model.{name}.weight" for name in whole}
    known = (".lora_A.weight", ".lora_B.weight", f".{adapters.MAGNITUDE}", *tables.values())
    if other := [name for name in stored if not name.endswith(known)]:
        raise UserError(f"--adapter {adapter}: only LoRA, rsLoRA and DoRA can be folded in, this "
                        f"has {min(other)}")
    # onto the meta device nothing is copied: names and shapes are compared
    adapters.load_adapters(net, adapter)
    weights.check_finite({name: part[:] for name, part in stored.items()}, f"--adapter {adapter}")

    def fold(name, scaling):
        a, b = (stored[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        length = stored.get(f"base_model.model.{name}.{adapters.MAGNITUDE}")

        def update(weight):
            weight = torch.addmm(weight, b[:].float(), a[:].float(), alpha=scaling)
            # DoRA (Liu et al. 2024, eq. 5): the rows' direction, times a trained length
            if length is not None:
                weight *= (length[:].float() / torch.linalg.norm(weight, dim=1))[:, None]
            return weight
        return update
    found = {name: lambda weight, table=table: stored[table][:].float().clone()
             for name, table in tables.items() if table in stored}
    return found | {f"{name}.weight": fold(name, module.scaling["default"])
                    for name, module in net.get_base_model().named_modules()
                    if hasattr(module, "lora_A")}


def plan_files(sizes, limit):
    """{file: [names]}: in order, each file up to `limit` bytes, or one larger tensor."""
    files = [{}]
    for name, size in sizes.items():
        if files[-1] and sum(files[-1].values()) + size > limit:
            files.append({})
        files[-1][name] = size
    if len(files) == 1:
        return {"model.safetensors": list(files[0])}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": list(inside)
            for number, inside in enumerate(files, 1)}


def read(parts, dtype, fold):
    """One whole tensor from its Slices, in `dtype`; fold works on it in fp32."""
    tensor = torch.cat([part[:] for part in parts]) if len(parts) > 1 else parts[0][:]
    return (fold(tensor.float()) if fold else tensor).to(dtype).contiguous()
