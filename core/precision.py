"""Which flags --float8, --fp16 and --base_dtype go with. Standard library only, as flags.py."""
import importlib.util

from core.cli import require


def check(args):
    """Raise UserError for a combination that cannot be computed."""
    if args.float8:
        require(args.compile, "--float8 needs --compile: alone it reads and writes more than it saves")
        require(args.use_lora, "--float8 needs --use_lora: only frozen weights are rounded")
        require(not args.use_dora,
             "--float8 does not go with --use_dora: that needs the weights themselves")
        require(args.bf16, "--float8 needs --bf16")
        require(args.parallel == "ddp",
             "--float8 needs --parallel ddp: rounded weights cannot be sharded")
    require(not (args.fp16 and args.bf16), "give one of --bf16 and --fp16")
    require(not args.fp16 or args.parallel == "ddp", "--fp16 needs --parallel ddp: FSDP2 computes in "
         "bfloat16 here")
    kind = args.base_dtype
    require(kind is None or args.use_lora, f"--base_dtype {kind} needs --use_lora: that freezes a base")
    require(kind is None or args.bf16 or kind == "nf4" and args.fp16,
         f"--base_dtype {kind} needs --bf16{' or --fp16' * (kind == 'nf4')}")
    if kind == "nf4":
        require(args.parallel == "ddp", "--base_dtype nf4 needs --parallel ddp: FSDP2 casts what it "
             "gathers, and four-bit weights are bytes")
        for flag, why in {"use_dora": "needs the weights themselves",
                          "float8": "is another storage",
                          "compile": "may keep whole weights for the backward pass"}.items():
            require(not getattr(args, flag),
                 f"--base_dtype nf4 does not go with --{flag}, which {why}")
        require(importlib.util.find_spec("bitsandbytes"), "--base_dtype nf4: the package bitsandbytes "
             "is missing: pip install bitsandbytes")
