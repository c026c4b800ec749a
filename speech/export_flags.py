"""Flags of lora.py's commands, which training has not. Imports no torch: flags are parsed first."""
from common import flags
from common.flags import need
from speech import choices
from speech.choices import DTYPES, HUB_CODEC, LAYOUTS


def build_parser():
    p = flags.Parser("Write a Higgs-Audio V2 checkpoint with its adapter folded in, or a folder "
                     "for the hub.")
    p.usage = "%(prog)s {merge,export,push} [--flag value ...]"
    p.add_argument("command", choices=["merge", "export", "push"],
                   help="merge: adapter and base into a native checkpoint; export: for other code, "
                        "adapter or not; push: an adapter or a full checkpoint as it is, with a "
                        "model card, to the hub")
    p.add_argument("--model_path", help="base model or full fine-tuning's checkpoint, or hub name")
    p.add_argument("--adapter", help="folder with adapter_model.safetensors; merge needs one")
    p.add_argument("--output_dir", required=True, help="new folder for the checkpoint")
    p.add_argument("--format", choices=LAYOUTS, help="layout to write: native (default of "
                   "merge), or 2025 for boson-ai's own code (default of export)")
    p.add_argument("--dtype", choices=DTYPES, help="of the weights; default float32 with an "
                   "adapter (bfloat16 halves the size and rounds part of the update away), else "
                   "the source's")
    choices.base_dtype(p, "nf4 rounds the base as the adapter's run did, so that the merged model is what it trained")
    p.add_argument("--max_shard_gb", type=float, default=5.0,
                   help="largest weight file in GB, so also the memory this takes")
    p.add_argument("--audio_tokenizer_path", help="folder or hub name that the native processor "
                   f"shall name as its codec (default: what the base names, else {HUB_CODEC})")
    g = p.add_argument_group("push")
    g.add_argument("--repo_id", metavar="OWNER/NAME", help="on the hub; made if it is not there")
    flags.switch(g, "--dry_run", help="write the folder with its card, upload nothing")
    flags.switch(g, "--private", help="make a repository that only its owner sees")
    g.add_argument("--base_model", metavar="OWNER/NAME",
                   help="hub name of the base for the card (default: the run's --model_path)")
    g.add_argument("--language", nargs="+", default=[], metavar="CODE",
                   help="languages for the card")
    return p


def check_push(args):
    """check_flags of the command push, which takes one checkpoint as it is."""
    need(bool(args.adapter) != bool(args.model_path),
         "push: give the checkpoint, as one of --adapter and --model_path")
    need(args.repo_id and args.repo_id.count("/") == 1, "push needs --repo_id OWNER/NAME")
    need(not (args.format or args.dtype or args.base_dtype or args.audio_tokenizer_path
              or args.max_shard_gb != 5.0),
         "--format, --dtype, --base_dtype, --max_shard_gb and --audio_tokenizer_path: push changes no weights; "
         "merge or export first")


def check_flags(args, world_size):
    """Raise UserError for combinations that do not go together; fill in --format."""
    if args.command == "push":
        return check_push(args)
    need(args.model_path, f"{args.command} needs --model_path")
    need(not (args.repo_id or args.dry_run or args.private or args.base_model or args.language),
         "--repo_id, --dry_run, --private, --base_model and --language are for push")
    args.format = args.format or {"merge": "native", "export": "2025"}[args.command]
    need(args.command == "export" or args.adapter,
         "merge needs --adapter FOLDER; to convert a checkpoint without one: lora.py export")
    choices.check_base_dtype(args)
    need(args.max_shard_gb > 0, f"--max_shard_gb {args.max_shard_gb}: must be positive")
