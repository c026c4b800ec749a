"""LoRA on Higgs-Audio V2: which layers get adapters; the files are PEFT's own format. And commands:

    python lora.py merge --model_path BASE --adapter out/checkpoint-500 --output_dir merged
    python lora.py export --model_path BASE --adapter out/checkpoint-500 --output_dir served
    python lora.py export --model_path full/checkpoint-500 --output_dir served
    python lora.py push --adapter out/checkpoint-500 --output_dir card --repo_id me/voice --dry_run

merge writes a native checkpoint, export one of an adapter or of a full fine-tuning in the 2025
layout, push uploads to the hub (speech/export.py, card.py).
"""
from common import flags
from speech.choices import LORA_TARGETS


def build_parser():
    """The flags of the commands. Training, which adds adapters, has none of them."""
    from speech import export_flags
    return export_flags.build_parser()


def check_flags(args, world_size):
    from speech import export_flags
    export_flags.check_flags(args, world_size)


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import torch

from common.distributed import UserError, one_clear_error
from speech import versions

# after speech.weights, which explains a torchaudio that breaks every transformers import
from core import adapters  # isort: skip
from peft import LoraConfig  # isort: skip


def add_lora(model, rank, alpha, dropout, targets, base_name, table=False, **kinds):
    """Wrap a native model in fp32 adapters and freeze it, but with `table` TTS 3's audio table.

    targets: a name in LORA_TARGETS, or comma-separated module name endings. base_name: written into
    the adapter's config. kinds: use_rslora, use_dora of PEFT's LoraConfig. Raises UserError when a
    target matches nothing.
    """
    whole = versions.module(model.config).WHOLE_MODULES
    if table and not whole:
        raise UserError("--train_audio_table is for Higgs TTS 3; of V2 --freeze_llm trains audio "
                        "embedding and head")
    names = LORA_TARGETS.get(targets) or [t.strip() for t in targets.split(",") if t.strip()]
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for name in names or [targets]:     # nothing but commas is a target that matches nothing
        if not any(n == name or n.endswith("." + name) for n in linear):
            raise UserError(f"--lora_target_modules {name!r} matches no linear layer; use one of "
                            f"{', '.join(LORA_TARGETS)} or endings such as audio_mlp.gate_proj")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names,
                        bias="none", modules_to_save=list(whole) if table else None, **kinds)
    net = adapters.attach(model, config, base_name)
    if table:       # one copy, embedding and head alike
        model.audio_embedding.modules_to_save.float()
    return net


def merge(model_path, adapter, output_dir, dtype="float32", shard_bytes=5 * 10**9, layout="native",
          codec=None, base_dtype=None):
    """Fold an adapter, or none, into its base and write a plain checkpoint: export.export."""
    from speech import export
    return export.export(model_path, output_dir, layout, dtype, shard_bytes, adapter, codec, base_dtype)


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    with one_clear_error():
        if args.command == "push":
            from speech import card
            notes = card.write(args.adapter or args.model_path, args.output_dir, args.repo_id,
                               args.base_model, args.language)
            print(f"{args.repo_id}: {args.output_dir}", *notes, sep="\n  ")
            if not args.dry_run:
                print(f"uploaded: {card.upload(args.output_dir, args.repo_id, args.private)}")
            return
        notes = merge(args.model_path, args.adapter, args.output_dir, args.dtype,
                      int(args.max_shard_gb * 1e9), args.format, args.audio_tokenizer_path,
                      args.base_dtype)
        print(f"checkpoint: {args.output_dir}", *notes, sep="\n  ")


if __name__ == "__main__":
    main()
