"""LoRA on Higgs-Audio V2: which layers get adapters, saving, loading, merging; the files are PEFT's own format.

    python lora.py merge --model_path BASE --adapter out/checkpoint-500 --output_dir merged     # a native checkpoint
    python lora.py export --model_path BASE --adapter out/checkpoint-500 --output_dir served    # the 2025 layout
    python lora.py export --model_path full/checkpoint-500 --output_dir served                  # of a full fine-tuning

Copy with it: higgs_export.py, higgs_io.py and what those name.
"""
import argparse
import copy
import json
import math
import warnings
from pathlib import Path

import torch

import higgs_export
import higgs_io
import tensor_files
from parallel import UserError, one_clear_error

# after higgs_io, which explains a broken torchaudio
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict  # isort: skip

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {
    "attention": ATTENTION,
    "attention+audio_mlp": [*ATTENTION, "audio_mlp.gate_proj", "audio_mlp.up_proj", "audio_mlp.down_proj"],
    "all-linear": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],        # both FFNs, no head, no embedding
}


def add_lora(model, rank, alpha, dropout, targets, base_name):
    """Wrap a native model in fp32 adapters; the base is frozen.

    targets: a name in TARGETS, or comma-separated module name endings. base_name: written into the adapter's config.
    Raises UserError when a target matches nothing.
    """
    names = TARGETS.get(targets) or [t.strip() for t in targets.split(",") if t.strip()]
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for name in names or [targets]:     # nothing but commas is a target that matches nothing
        if not any(n == name or n.endswith("." + name) for n in linear):
            raise UserError(f"--lora_target_modules {name!r} matches no linear layer; use one of {', '.join(TARGETS)} "
                            f"or endings such as q_proj, mlp.gate_proj, audio_mlp.gate_proj")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, bias="none")
    wrapped = _wrap(model, config)
    config.base_model_name_or_path = base_name      # now: get_peft_model overwrites it with the local folder
    for module in wrapped.modules():        # autocast picks the compute dtype; PEFT need not cast inputs to fp32 first
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    return wrapped


def add_saved(model, adapter):
    """Wrap a native model in the adapters of a PEFT folder, their weights not yet loaded. Raises UserError."""
    path = Path(adapter) / "adapter_config.json"
    if not path.is_file():
        raise UserError(f"--adapter {adapter}: no such folder, or no adapter_config.json in it")
    try:
        saved = json.loads(path.read_text())
        if saved["peft_type"] != "LORA":
            raise UserError(f"{path}: is a {saved['peft_type']!r} adapter; only those of peft_type 'LORA' are read")
        missing = [key for key in ("r", "lora_alpha", "target_modules") if key not in saved]
        if missing:
            raise UserError(f"{path}: has no {' and no '.join(missing)}")
        config = LoraConfig.from_pretrained(adapter)
        config.base_model_name_or_path = None
        return _wrap(model, config)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is no LoRA configuration for this model ({repr(error)[:200]})")


def _wrap(model, config):
    with warnings.catch_warnings():     # peft asks transformers in a way that newer transformers finds old
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, config)


def base_weights(model):
    """{native name: parameter} of the base inside a PeftModel."""
    named = model.get_base_model().named_parameters()
    return {name.replace(".base_layer.", "."): parameter for name, parameter in named if ".lora_" not in name}


def adapter_weights(model):
    """{name in adapter_model.safetensors: parameter}."""
    trained = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    return get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False)


def init_adapters(model, seed):
    """Fill new adapters: A as PEFT does (Kaiming uniform), B with zeros. The same for any sharding of the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_weights(model).items():
        whole = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        tensor_files.fill(parameter, whole)


def save_config(model, folder):
    """adapter_config.json; beside adapter_weights in adapter_model.safetensors PeftModel.from_pretrained loads it."""
    config = copy.copy(model.peft_config["default"])
    config.inference_mode = True
    config.save_pretrained(folder)


def load_lora_weights(model, folder):
    """Copy a saved adapter into a freshly wrapped model, sharded or not; raises UserError when it does not fit."""
    saved = json.loads((Path(folder) / "adapter_config.json").read_text())
    ours = model.peft_config["default"]
    for key, value in (("r", ours.r), ("lora_alpha", ours.lora_alpha), ("target_modules", ours.target_modules)):
        stored = set(saved[key]) if key == "target_modules" else saved[key]
        if stored != (set(value) if key == "target_modules" else value):
            raise UserError(f"{folder}: adapter has {key} {saved[key]}, this run {value}; give the same LoRA flags or "
                            "another --output_dir")
    weights, found = adapter_weights(model), tensor_files.open_tensors([Path(folder) / "adapter_model.safetensors"])
    found = {name: [part] for name, part in found.items()}
    if problem := tensor_files.compare({name: p.shape for name, p in weights.items()}, found):
        raise UserError(f"{folder}: the adapter does not fit this model: {problem}")
    for name, parameter in weights.items():
        tensor_files.read_into(parameter.detach(), found[name])


def folds(model, adapter):
    """{weight name: function that adds the adapter's update to that weight in fp32}; model: native, on the meta device.

    Raises UserError when the adapter's files and the model do not fit together exactly: PeftModel.from_pretrained would
    only warn about weights that are missing.
    """
    net = add_saved(model, adapter)
    stored = tensor_files.open_tensors([Path(adapter) / "adapter_model.safetensors"])
    if other := [name for name in stored if not name.endswith((".lora_A.weight", ".lora_B.weight"))]:
        raise UserError(f"--adapter {adapter}: only plain LoRA can be folded in, this has {min(other)}")
    load_lora_weights(net, adapter)     # onto the meta device: nothing but the comparison is left of it

    def fold(name, scaling):
        a, b = (stored[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        return lambda weight: torch.addmm(weight, b[:].float(), a[:].float(), alpha=scaling)
    return {f"{name}.weight": fold(name, module.scaling["default"])
            for name, module in net.get_base_model().named_modules() if hasattr(module, "lora_A")}


def merge(model_path, adapter, output_dir, dtype="float32", shard_bytes=5 * 10**9, layout="native", codec=None):
    """Fold an adapter, or none, into its base in fp32 and write a plain checkpoint; see higgs_export.export."""
    return higgs_export.export(model_path, output_dir, layout, dtype, shard_bytes,
                               (lambda model: folds(model, adapter)) if adapter else None, codec)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Write a Higgs-Audio V2 checkpoint with its adapter folded in.")
    parser.add_argument("command", choices=["merge", "export"],
                        help="merge: adapter and base into a native checkpoint; export: for other code, adapter or not")
    parser.add_argument("--model_path", required=True, help="base model or full fine-tuning's checkpoint, or hub name")
    parser.add_argument("--adapter", help="folder with adapter_model.safetensors; merge needs one")
    parser.add_argument("--output_dir", required=True, help="new folder for the checkpoint")
    parser.add_argument("--format", choices=higgs_export.LAYOUTS, help="layout to write: native (default of merge), or "
                        "2025 for boson-ai's own code (default of export)")
    parser.add_argument("--dtype", choices=list(higgs_export.DTYPES), help="of the weights; default float32 with an "
                        "adapter (bfloat16 halves the size and rounds part of the update away), else the source's")
    parser.add_argument("--max_shard_gb", type=float, default=5.0, help="largest weight file in GB, so also the memory "
                        "this takes")
    parser.add_argument("--audio_tokenizer_path", help="folder or hub name that the native processor shall name as its "
                        f"codec (default: what the base names, else {higgs_io.HUB_CODEC})")
    args = parser.parse_args(argv)
    layout = args.format or {"merge": "native", "export": "2025"}[args.command]
    with one_clear_error():
        if args.command == "merge" and not args.adapter:
            raise UserError("merge needs --adapter FOLDER; to convert a checkpoint without one: lora.py export")
        if layout == "2025" and args.audio_tokenizer_path:
            raise UserError("--audio_tokenizer_path: the 2025 layout names no codec; drop it")
        if args.max_shard_gb <= 0:
            raise UserError(f"--max_shard_gb {args.max_shard_gb}: must be positive")
        notes = merge(args.model_path, args.adapter, args.output_dir, args.dtype, int(args.max_shard_gb * 1e9), layout,
                      args.audio_tokenizer_path)
        print(f"{layout} checkpoint: {args.output_dir}", *notes, sep="\n  ")


if __name__ == "__main__":
    main()
