"""Which flags --float8, --fp16 and --base_dtype go with. Standard library only, as flags.py."""
import importlib.util

from common.text import need


def check(args):
    """Raise UserError for a combination that cannot be computed."""
    if args.float8:
        need(args.compile, "--float8 needs --compile: alone it reads and writes more than it saves")
        need(args.use_lora, "--float8 needs --use_lora: only frozen weights are rounded")
        need(not args.use_dora,
             "--float8 does not go with --use_dora: that needs the weights themselves")
        need(args.bf16, "--float8 needs --bf16")
        need(args.parallel == "ddp",
             "--float8 needs --parallel ddp: rounded weights cannot be sharded")
    need(not (args.fp16 and args.bf16), "give one of --bf16 and --fp16")
    need(not args.fp16 or args.parallel == "ddp", "--fp16 needs --parallel ddp: FSDP2 computes in "
         "bfloat16 here")
    kind = args.base_dtype
    need(kind is None or args.use_lora, f"--base_dtype {kind} needs --use_lora: that freezes a base")
    need(kind is None or args.bf16 or kind == "nf4" and args.fp16,
         f"--base_dtype {kind} needs --bf16{' or --fp16' * (kind == 'nf4')}")
    if kind == "nf4":
        need(args.parallel == "ddp", "--base_dtype nf4 needs --parallel ddp: FSDP2 casts what it "
             "gathers, and four-bit weights are bytes")
        for flag, why in {"use_dora": "needs the weights themselves",
                          "float8": "is another storage",
                          "compile": "may keep whole weights for the backward pass"}.items():
            need(not getattr(args, flag),
                 f"--base_dtype nf4 does not go with --{flag}, which {why}")
        need(importlib.util.find_spec("bitsandbytes"), "--base_dtype nf4: the package bitsandbytes "
             "is missing: pip install bitsandbytes")
