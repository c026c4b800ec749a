"""Merge a trained adapter into Higgs-Audio, or export a checkpoint for other code:

    python lora.py merge --model_path BASE --adapter out/checkpoint-500 --output_dir merged
    python lora.py export --model_path BASE --adapter out/checkpoint-500 --output_dir served
    python lora.py export --model_path full/checkpoint-500 --output_dir served

merge folds an adapter into its base and writes a native checkpoint. export writes the layout that
other code serves: V2's of 2025, or the one layout of Higgs TTS 3. Adapters have PEFT's format.
"""
from core import cli
from core.cli import require

p = cli.Parser("Merge an adapter into Higgs-Audio, or export a checkpoint for other code.")
p.add_argument("command", choices=["merge", "export"],
               help="merge: adapter and base into a native checkpoint; export: for other code")
p.flag("--model_path", None, "base model, or checkpoint of a full fine-tuning", required=True)
p.flag("--adapter", None, "folder with adapter_model.safetensors; required for merge")
p.flag("--output_dir", None, "new folder for the checkpoint", required=True)
p.flag("--format", None, "layout to write: native (default of merge), or 2025 for boson-ai's "
       "code (default of export)", choices=("native", "2025"))
p.flag("--dtype", None, "dtype of the weights (default: float32 with an adapter, else the "
       "source's)", choices=("float32", "bfloat16"))
p.flag("--base_dtype", None, "nf4: round the base as the adapter's run did (default: as in the "
       "adapter's run)", choices=("bf16", "nf4"))
p.flag("--audio_tokenizer_path", None, "codec, folder or hub name, that the native processor "
       "refers to (default: the base's); for TTS 3: the codec to include")


def check_flags(args, world_size):
    """Raise UserError for conflicting flags; fill in --format."""
    args.format = args.format or ("native" if args.command == "merge" else "2025")
    require(args.command == "export" or args.adapter, "merge needs --adapter FOLDER")
    require(args.base_dtype != "nf4" or args.adapter, "--base_dtype nf4 needs --adapter")


# parsed before torch is imported: --help and wrong flags answer at once
args = cli.parse(p, check_flags) if __name__ == "__main__" else None

import math
from functools import partial
from pathlib import Path

import torch

from core import adapters, checkpoint, tensor_io
from speech import layout_2025, speak, weights
from speech.conversations import SETTINGS

# for the model card
TERMS_V2 = """The base is under the Boson Higgs Audio 2 Community License Agreement, which is built
on the Llama 3 licence: pass on both licence texts and their notice ("Built with Higgs Materials
licensed from Boson AI USA, Inc. ...")."""
TERMS_TTS3 = """For research and non-commercial use only: the base is under the Boson Higgs TTS 3
Research and Non-Commercial License, which goes with derived models. No voice may be cloned
without its owner's consent."""

# ---- Export. Memory holds at most one output file and the largest tensor in fp32. The folder
# appears only when it is complete.


def export(source, output_dir, layout="native", dtype=None, shard_bytes=5 * 10**9, adapter=None,
           codec=None, base_dtype=None):
    """Write the checkpoint `source` (folder or hub name, either layout) and return lines to print.

    layout: native or 2025. dtype: a name. None keeps the dtypes of the files, but writes float32
    where an adapter is folded in, since bf16 rounds most of a small update away. codec: see
    layout_2025.save_config. base_dtype nf4: round the base as in the adapter's run. UserError."""
    from huggingface_hub import split_state_dict_into_shards_factory
    folder, config = weights.find_model(source)
    version, tts3 = weights.module(config), weights.is_tts3(config["model_type"])
    original = layout == "2025" and not tts3
    require(not (codec and original), "--audio_tokenizer_path: the 2025 layout names no codec")
    tokenizer, parts = version.load_tokenizer(folder), version.weight_parts(folder, config)
    model = version.empty_model(config, torch.float32)
    weights.check_weights(model, parts, folder)
    folds = find_folds(version.empty_model(config, torch.float32), adapter) if adapter else {}
    updated = len(folds)
    if base_dtype == "nf4":
        folds |= {name: partial(rounded_nf4, folds.get(name))
                  for name, weight in model.named_parameters()
                  if ".layers." in name and weight.ndim == 2}
    if folds and not tts3:
        dtype = dtype or "float32"
    # {name: (slice, dtype to write, function that adds the adapter's update)}
    tensors = {name: (parts[name], getattr(torch, dtype) if dtype else parts[name][:1].dtype,
                      folds.get(name)) for name, _ in model.named_parameters()}
    if tts3:
        tensors = version.whole_files(tensors, folder, codec)
    else:
        model.config.dtype = tensors["model.embed_tokens.weight"][1]
    if original:        # the inverse of weight_parts; split tensors stay joined
        tensors = {next(old + name.removeprefix(new) for old, new in layout_2025.NAMES
                        if name.startswith(new)): entry for name, entry in tensors.items()}
    sizes = {name: math.prod(rows.get_shape()) * kind.itemsize
             for name, (rows, kind, _) in tensors.items()}
    plan = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes)
    with checkpoint.new_folder(output_dir) as building:
        for file, names in plan.filename_to_tensors.items():
            written = {}
            for name in names:
                rows, kind, fold = tensors[name]
                tensor = fold(rows[:].float()) if fold else rows[:]
                written[name] = tensor.to(kind).contiguous()
                # an update may overflow
                require(tensor_io.is_finite(written[name]), f"{name} holds NaN or infinity, in "
                        f"{source} or with its adapter")
            tensor_io.save(written, building / file)
        if plan.is_sharded:
            checkpoint.write_json(building / "model.safetensors.index.json", {
                "metadata": plan.metadata,
                "weight_map": dict(sorted(plan.tensor_to_filename.items()))})
        if original:
            layout_2025.save_original_config(model.config, tokenizer, building, config)
        else:
            version.save_config(model, tokenizer, building, folder, codec)
        if setting := speak.saved_setting(adapter or folder):
            checkpoint.write_json(building / SETTINGS, {"normalize_text": setting})
        (building / "README.md").write_text(        # a model card, which the hub requires
            "---\nlicense: other\npipeline_tag: text-to-speech\n---\n\n"
            f"# {Path(output_dir).name}\n\nFine-tuned from `{Path(source).name}` with "
            f"`train_v2_ddp.py`.\n\n{TERMS_TTS3 if tts3 else TERMS_V2}\n", encoding="utf-8")
    return [f"{len(tensors)} tensors, {updated} of them with an adapter's update, "
            f"{sum(sizes.values()) / 1e9:.3f} GB", *filter(None, [version.LICENCE]),
            f"to publish: hf upload OWNER/NAME {output_dir}"]


def rounded_nf4(fold, weight):
    """A weight rounded to NF4 and back, with an adapter's update if there is one."""
    from bitsandbytes.functional import dequantize_4bit
    from core import quantized
    weight = dequantize_4bit(*quantized.quantize(weight))
    return fold(weight) if fold else weight


def find_folds(model, adapter):
    """{weight name: function that adds the adapter's update to that weight in fp32}. The model is
    on the meta device and gets the adapter's layers. UserError unless the adapter's files match it
    exactly: PeftModel.from_pretrained would only warn about missing weights."""
    whole = weights.module(model.config).WHOLE_MODULES
    net = adapters.add_saved_lora(model, adapter, whole=whole)
    # on the meta device this compares names and shapes and copies nothing
    adapters.load_adapters(net, adapter)
    stored = tensor_io.open_tensors([Path(adapter) / "adapter_model.safetensors"])

    def fold(name, scaling, weight):
        a, b = (stored[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        weight = torch.addmm(weight, b[:].float(), a[:].float(), alpha=scaling)
        magnitude = stored.get(f"base_model.model.{name}.{adapters.MAGNITUDE}")
        if magnitude:       # DoRA (Liu et al. 2024, eq. 5): times the direction of the rows
            weight *= (magnitude[:].float() / torch.linalg.norm(weight, dim=1))[:, None]
        return weight

    folds = {f"{name}.weight": partial(fold, name, layer.scaling["default"])
             for name, layer in net.get_base_model().named_modules() if hasattr(layer, "lora_A")}
    for name in whole:      # trained in full: the table replaces the base's
        if table := stored.get(f"base_model.model.{name}.weight"):
            folds[f"{name}.weight"] = lambda weight, table=table: table[:].float().clone()
    return folds


if __name__ == "__main__":
    speak.check_base_dtype(args)
    print(f"checkpoint: {args.output_dir}", *export(
        args.model_path, args.output_dir, args.format, args.dtype, adapter=args.adapter,
        codec=args.audio_tokenizer_path, base_dtype=args.base_dtype), sep="\n  ")
