"""LoRA on Higgs-Audio V2: which layers get adapters, merging, export; the files are PEFT's own format.

    python lora.py merge --model_path BASE --adapter out/checkpoint-500 --output_dir merged     # a native checkpoint
    python lora.py export --model_path BASE --adapter out/checkpoint-500 --output_dir served    # the 2025 layout
    python lora.py export --model_path full/checkpoint-500 --output_dir served                  # of a full fine-tuning
"""
from common import flags
from common.flags import need
from speech.choices import DTYPES, HUB_CODEC, LAYOUTS, LORA_TARGETS


def build_parser():
    p = flags.Parser("Write a Higgs-Audio V2 checkpoint with its adapter folded in.")
    p.usage = "%(prog)s {merge,export} [--flag value ...]"
    p.add_argument("command", choices=["merge", "export"],
                   help="merge: adapter and base into a native checkpoint; export: for other code, adapter or not")
    p.add_argument("--model_path", required=True, help="base model or full fine-tuning's checkpoint, or hub name")
    p.add_argument("--adapter", help="folder with adapter_model.safetensors; merge needs one")
    p.add_argument("--output_dir", required=True, help="new folder for the checkpoint")
    p.add_argument("--format", choices=LAYOUTS, help="layout to write: native (default of merge), or 2025 for "
                   "boson-ai's own code (default of export)")
    p.add_argument("--dtype", choices=DTYPES, help="of the weights; default float32 with an adapter (bfloat16 halves "
                   "the size and rounds part of the update away), else the source's")
    p.add_argument("--max_shard_gb", type=float, default=5.0,
                   help="largest weight file in GB, so also the memory this takes")
    p.add_argument("--audio_tokenizer_path", help="folder or hub name that the native processor shall name as its "
                   f"codec (default: what the base names, else {HUB_CODEC})")
    return p


def check_flags(args, world_size):
    """Raise UserError for combinations that do not go together; fill in --format."""
    args.format = args.format or {"merge": "native", "export": "2025"}[args.command]
    need(args.command == "export" or args.adapter,
         "merge needs --adapter FOLDER; to convert a checkpoint without one: lora.py export")
    need(args.max_shard_gb > 0, f"--max_shard_gb {args.max_shard_gb}: must be positive")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

from pathlib import Path

import torch

from common import tensor_files
from common.parallel import UserError, one_clear_error
from speech import export

# after speech.weights, which explains a torchaudio that breaks every transformers import
from common import adapters  # isort: skip
from peft import LoraConfig  # isort: skip


def add_lora(model, rank, alpha, dropout, targets, base_name):
    """Wrap a native model in fp32 adapters; the base is frozen.

    targets: a name in LORA_TARGETS, or comma-separated module name endings. base_name: written into the adapter's
    config. Raises UserError when a target matches nothing.
    """
    names = LORA_TARGETS.get(targets) or [t.strip() for t in targets.split(",") if t.strip()]
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for name in names or [targets]:     # nothing but commas is a target that matches nothing
        if not any(n == name or n.endswith("." + name) for n in linear):
            raise UserError(f"--lora_target_modules {name!r} matches no linear layer; use one of "
                            f"{', '.join(LORA_TARGETS)} or endings such as q_proj, mlp.gate_proj, audio_mlp.gate_proj")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, bias="none")
    return adapters.attach(model, config, base_name)


def folds(model, adapter):
    """{weight name: function that adds the adapter's update to that weight in fp32}; model: native, on the meta device.

    Raises UserError when the adapter's files and the model do not fit together exactly: PeftModel.from_pretrained would
    only warn about weights that are missing.
    """
    net = adapters.add_saved(model, adapter, ("use_dora",))
    stored = tensor_files.open_tensors([Path(adapter) / "adapter_model.safetensors"])
    if other := [name for name in stored if not name.endswith((".lora_A.weight", ".lora_B.weight"))]:
        raise UserError(f"--adapter {adapter}: only plain LoRA can be folded in, this has {min(other)}")
    adapters.load_adapters(net, adapter)     # onto the meta device nothing is copied: names and shapes are compared
    tensor_files.check_finite({name: part[:] for name, part in stored.items()}, f"--adapter {adapter}")

    def fold(name, scaling):
        a, b = (stored[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        return lambda weight: torch.addmm(weight, b[:].float(), a[:].float(), alpha=scaling)
    return {f"{name}.weight": fold(name, module.scaling["default"])
            for name, module in net.get_base_model().named_modules() if hasattr(module, "lora_A")}


def merge(model_path, adapter, output_dir, dtype="float32", shard_bytes=5 * 10**9, layout="native", codec=None):
    """Fold an adapter, or none, into its base in fp32 and write a plain checkpoint; see speech/export.py."""
    return export.export(model_path, output_dir, layout, dtype, shard_bytes,
                         (lambda model: folds(model, adapter)) if adapter else None, codec, adapter)


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    with one_clear_error():
        notes = merge(args.model_path, args.adapter, args.output_dir, args.dtype, int(args.max_shard_gb * 1e9),
                      args.format, args.audio_tokenizer_path)
        print(f"{args.format} checkpoint: {args.output_dir}", *notes, sep="\n  ")


if __name__ == "__main__":
    main()
