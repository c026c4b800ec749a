"""Which flags --float8, --fp16 and --base_dtype go with. Standard library only."""
import importlib.util

from core.cli import require


def check(args):
    """Raise UserError for a combination that cannot be computed."""
    ddp, kind = args.parallel == "ddp", args.base_dtype
    if args.float8:
        require(args.compile, "--float8 needs --compile: alone it reads and writes more than it "
                              "saves")
        require(args.use_lora, "--float8 needs --use_lora: only frozen weights are rounded")
        require(not args.use_dora, "--float8 does not go with --use_dora: that needs the weights")
        require(args.bf16, "--float8 needs --bf16")
        require(ddp, "--float8 needs --parallel ddp: rounded weights cannot be sharded")
    require(not (args.fp16 and args.bf16), "give one of --bf16 and --fp16")
    require(ddp or not args.fp16, "--fp16 needs --parallel ddp: FSDP2 computes in bfloat16 here")
    require(kind is None or args.use_lora, f"--base_dtype {kind} needs --use_lora")
    require(kind is None or args.bf16 or kind == "nf4" and args.fp16,
            f"--base_dtype {kind} needs --bf16{' or --fp16' * (kind == 'nf4')}")
    if kind == "nf4":
        require(ddp, "--base_dtype nf4 needs --parallel ddp: FSDP2 casts what it gathers")
        for flag, why in {"use_dora": "needs the weights", "float8": "is another storage",
                          "compile": "may keep whole weights for the backward pass"}.items():
            require(getattr(args, flag) is not True,
                    f"--base_dtype nf4 does not go with --{flag}, which {why}")
        require(importlib.util.find_spec("bitsandbytes"),
                "--base_dtype nf4: the package bitsandbytes is missing: pip install bitsandbytes")
