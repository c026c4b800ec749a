"""LoRA on Higgs-Audio: which layers get adapters, and two commands for trained checkpoints:

    python lora.py merge --model_path BASE --adapter out/checkpoint-500 --output_dir merged
    python lora.py export --model_path BASE --adapter out/checkpoint-500 --output_dir served
    python lora.py export --model_path full/checkpoint-500 --output_dir served

merge folds an adapter into its base and writes a native checkpoint. export writes the layout that
other code serves: V2's of 2025, or the one layout of Higgs TTS 3. Adapters have PEFT's format.
"""
from core import cli
from core.cli import require
from speech import conversations

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA_TARGETS = {        # endings of module names
    "attention": ATTENTION,
    "attention+audio_mlp": [*ATTENTION, "audio_mlp.gate_proj", "audio_mlp.up_proj",
                            "audio_mlp.down_proj"],
    # both FFNs, no head, no embedding
    "all-linear": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}


def add_lora(model, rank, alpha, dropout, targets, base_name, table=False, **kinds):
    """adapters.add_lora for a native model; with `table`, TTS 3's audio table is trained in full.

    targets: a name in LORA_TARGETS, or comma-separated module name endings. kinds: rslora, dora."""
    from core import adapters       # late: these import torch, which --help does not need
    from speech import weights
    whole = weights.module(model.config).WHOLE_MODULES
    require(whole or not table, "--train_audio_table is for Higgs TTS 3; V2 has --freeze_llm")
    names = ",".join(LORA_TARGETS.get(targets, [targets]))
    net = adapters.add_lora(model, [model], rank, alpha, dropout, names, base_name, task_type=None,
                            modules_to_save=list(whole) if table else None, **kinds)
    if table:       # trained, so in fp32; this one copy is both embedding and head
        model.audio_embedding.modules_to_save.float()
    return net


def check_flags(args, world_size):
    """Raise UserError for conflicting flags; fill in --format and --base_dtype."""
    args.format = args.format or ("native" if args.command == "merge" else "2025")
    require(args.command == "export" or args.adapter,
            "merge needs --adapter FOLDER; to convert a checkpoint without one: lora.py export")
    conversations.check_base_dtype(args)
    require(not args.base_dtype or args.adapter, "--base_dtype nf4 needs --adapter")


def main():
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
    args = cli.parse(p, check_flags)
    from speech.export import export        # the trainer needs add_lora only
    print(f"checkpoint: {args.output_dir}", *export(
        args.model_path, args.output_dir, args.format, args.dtype, adapter=args.adapter,
        codec=args.audio_tokenizer_path, base_dtype=args.base_dtype), sep="\n  ")


if __name__ == "__main__":
    main()
