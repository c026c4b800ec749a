"""LoRA on Higgs-Audio V2: which layers get adapters, saving, loading, merging; the files are PEFT's own format.

    python lora.py merge --model_path BASE --adapter out/checkpoint-500 --output_dir merged    # plain native checkpoint

Copy with it: higgs_io.py and what that file names.
"""
import argparse
import copy
import json
import math
import warnings
from pathlib import Path

import torch

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


def merge(model_path, adapter, output_dir):
    """Fold an adapter into its base in fp32 and write a plain native checkpoint (bf16 would lose small deltas)."""
    folder, config = higgs_io.find_model(model_path)
    if not (Path(adapter) / "adapter_config.json").is_file():
        raise UserError(f"--adapter {adapter}: no such folder, or no adapter_config.json in it")
    adapter_config = LoraConfig.from_pretrained(adapter)
    adapter_config.base_model_name_or_path = None
    model = _wrap(higgs_io.load_model(folder, config, torch.float32), adapter_config)
    load_lora_weights(model, adapter)       # PeftModel.from_pretrained would only warn about weights that are missing
    higgs_io.save_model(model.merge_and_unload(safe_merge=True), higgs_io.load_tokenizer(folder), output_dir, folder)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Work with Higgs-Audio V2 adapters.")
    parser.add_argument("command", choices=["merge"], help="merge: fold the adapter into the base weights")
    parser.add_argument("--model_path", required=True, help="base model, folder or hub name")
    parser.add_argument("--adapter", required=True, help="folder with adapter_model.safetensors")
    parser.add_argument("--output_dir", required=True, help="where the merged native checkpoint is written")
    args = parser.parse_args(argv)
    with one_clear_error():
        merge(args.model_path, args.adapter, args.output_dir)
        print(f"merged {args.adapter} into {args.model_path}: {args.output_dir}")


if __name__ == "__main__":
    main()
