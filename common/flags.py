"""Flags that the trainers share, checks of their values, and one line for a flag that does not exist.

Standard library only, and scripts parse before they import torch: --help and a mistake in a flag answer at once.
"""
import argparse
import difflib
import faulthandler
import gc
import importlib.util
import json
import math
import os
import re
import sys
import time
from pathlib import Path

from common import lifetime
from common.text import error_text, without_secrets

TRACKERS = ("tensorboard", "wandb", "trackio")                  # of --report_to
MODES = ("all", "selective")                                    # of --gradient_checkpointing
SCHEDULERS = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
CONFIG = "run.yaml"     # in OUTPUT_DIR
OVERRIDE = re.compile(r"\+{0,2}[a-z]\w*(\.[a-z]\w*)+=[^/]*$")      # trainer.precision=bf16-mixed, as Hydra has it
GIVE_WAY_S = 5      # seconds other ranks leave rank 0 to say what is wrong, before torchrun ends it because of them


class UserError(Exception):
    """A mistake in flags, files or data. Shown as text without a traceback; str() is what the user reads."""


def need_package(name, purpose, install=None):
    """Raise UserError that says how to install a package which is not there. purpose: the flag, or what needs it."""
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{purpose}: the package {name} is missing: pip install {install or name}")


def usable_cpus():
    """How many cores this process may use: of a job's share, not of the whole node."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------------------------------
# Parsing


class Help(argparse.HelpFormatter):
    """Adds a flag's default to its help, unless it has none or the help says it in words."""

    def _get_help_string(self, action):
        silent = action.required or not action.option_strings or action.default in (None, False, argparse.SUPPRESS)
        return action.help if silent or "default:" in action.help else f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """ArgumentParser without abbreviations, which change meaning with each new flag, and with one line for an error."""

    def __init__(self, description=None, **more):
        super().__init__(description=description, usage="%(prog)s [--flag value ...]", allow_abbrev=False,
                         formatter_class=Help, **more)

    def error(self, message):
        raise UserError(message.removeprefix("argument "))


def spellings(parser):
    """Every flag, in all its spellings, of a parser and its subcommands."""
    below = [command for action in parser._actions if isinstance(action, argparse._SubParsersAction)
             for command in action.choices.values()]
    return {*parser._option_string_actions}.union(*map(spellings, below))


class Args(argparse.Namespace):
    """Parsed flags. Not in vars(): given, the same as they were before a script's check filled in what derives; named,
    those that the command line or its file names.
    """
    __slots__ = ("given", "named")


def stored(args):
    """{name: value} of all flags, as every file, board and page gets them: without passwords and keys in URLs."""
    return {name: without_secrets(value) for name, value in vars(args).items()}


def parse(parser, check=None, argv=None):
    """The namespace of a command line, argv or the process's own. check(args, world_size) may raise UserError.

    A mistake ends the process with one line, printed by rank 0: status 2 for a flag that is not one, 1 for a value.
    Of the process's own, garbage is not collected from here until distributed.one_clear_error.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    lifetime.end_with_torchrun()        # here, because every script parses before its imports, which take seconds
    if argv is None:
        if sys.stderr:
            faulthandler.enable()       # a crash in native code prints where each Python thread was
        sys.argv[1:] = map(without_secrets, words)      # W&B keeps the command line of a run
        gc.disable()                    # a quarter of that time; hardly anything that imports make is garbage
    status, known = 2, sorted(spellings(parser))
    try:
        allocator_setting()
        for word in words:                  # before argparse complains of what is missing
            # to argparse "--" alone ends a list, and a word with a space is a value: --text "-- well, no"
            name = word.split("=")[0]
            need(not OVERRIDE.match(word), f"{word}: key=value is not read here; give the flag, --help shows all")
            if name.startswith("--") and name not in (*known, "--") and " " not in word:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
                raise UserError(f"{name}: no such flag; the nearest one is {near}, --help shows all")
        if "--config" in known:
            words = config_words(parser, words) + words     # what stands later counts
        args = parser.parse_args(words, Args())
        args.given = stored(args)
        actions = (parser._option_string_actions.get(word.split("=")[0]) for word in words)
        args.named = frozenset(action.dest for action in actions if action)
        status = 1
        if check:
            check(args, getattr(args, "dry_run", None) or int(os.environ.get("WORLD_SIZE", "1")))
        if os.environ.get("CHECK_FLAGS"):       # set by launch/slurm.sh for DRY_RUN=1
            sys.exit(0)
        return args
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(error_text(f"error: {error}"), file=sys.stderr, flush=True)
        else:
            time.sleep(GIVE_WAY_S)
        sys.exit(status)


def allocator_setting():
    """Spell the allocator's setting as torch reads it: notes have max_split_size_mb=128 where torch wants a colon."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if "=" in value:
            os.environ[name] = value.replace("=", ":")
            notice(f"{name}={value} is read as {os.environ[name]}")


def config_words(parser, words):
    """The words of a command line for the YAML file that --config names there, if it does. Raises UserError.

    Values are taken as they are written, so on, 5e-5 and 007 stay what they are; an empty one or null gives no flag.
    """
    files = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--config"] + [
        word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    if not files:
        return []
    need(len(files) == 1, "--config is given twice")
    import yaml  # comes with transformers

    file, found, made = files[0], set(), []
    try:
        tree = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"--config {file}: cannot be read ({error.strerror})")
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {file}: is no YAML ({' '.join(str(error).split())})")
    need(tree is None or isinstance(tree, yaml.MappingNode), f"--config {file}: must be lines of flag: value")
    for key, value in tree.value if tree else ():
        where = f"--config {file} line {key.start_mark.line + 1}"
        action = parser._option_string_actions.get(f"--{key.value}")
        if action is None or action.dest in ("config", "help"):
            known = [name.removeprefix("--") for name in sorted(spellings(parser) - {"--config", "--help"})]
            near = difflib.get_close_matches(str(key.value), known, n=1, cutoff=0)[0]
            raise UserError(f"{where}: {key.value}: no such flag; the nearest one is {near}")
        need(action.dest not in found, f"{where}: {key.value} is there twice")
        found.add(action.dest)
        several = isinstance(value, yaml.SequenceNode)
        items = value.value if several else [value]
        need(all(isinstance(item, yaml.ScalarNode) for item in items), f"{where}: {key.value} takes a value or a list")
        need(not several or action.nargs not in (None, 0, "?"), f"{where}: {key.value} takes one value, not a list")
        texts = [item.value for item in items]
        if not several and value.style is None and texts[0] in ("", "~", "null"):
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            made.append(f"--{'' if boolean(texts[0]) else 'no-'}{key.value}")
        elif several:
            made += [f"--{key.value}", *texts]
        else:       # one word: the value may begin with a dash
            made.append(f"--{key.value}={texts[0]}")
    return made


def write_config(path, given, script):
    """Write the flags `given` as the YAML file that --config of the script takes. JSON's values are YAML's."""
    lines = [f"# {Path(script).name} --config {CONFIG} repeats this run; flags behind it count more"]
    lines += [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in given.items()
              if value is not None and name not in ("config", "dry_run")]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def boolean(text):
    """true or false from the command line, as Hugging Face's scripts take them."""
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def switch(group, *names, help):
    """A flag that is off by default: --bf16, --bf16 true, --bf16 false."""
    group.add_argument(*names, nargs="?", type=boolean, const=True, default=False, metavar="true|false", help=help)


def recomputation(text):
    """Value of --gradient_checkpointing: a mode, or true or false as in Hugging Face's scripts -> mode or None."""
    if text in MODES:
        return text
    try:
        return "all" if boolean(text) else None
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither {', '.join(MODES)}, true nor false")


def deepspeed(text):
    """Value of --deepspeed -> that of --parallel: stage 3 shards what FSDP2 shards. No other stage has a like here."""
    if "zero3" in text.lower():
        return "fsdp"
    raise argparse.ArgumentTypeError(f"{text!r}: DeepSpeed is not used; zero3 is --parallel fsdp, the nearest to zero2 "
                                     "--parallel fsdp --no-reshard_after_forward, to none of both --parallel ddp")


def lora_targets(text):
    """Value of --lora_target_modules; ALL, as ms-swift has it, is all-linear."""
    return "all-linear" if text.lower() == "all" else text


def resumption(text):
    """Value of --resume: auto, none or a folder; true and false as in Hugging Face's scripts."""
    return {"true": "auto", "false": "none"}.get(text.lower(), text)


# ---------------------------------------------------------------------------------------------------------------------
# Shared flags, by group of --help


def before_the_run(parser):
    g = parser.add_argument_group("before the run")
    g.add_argument("--config", metavar="FILE",
                   help="YAML file of lines `flag: value`; flags of the command line count more. Every run leaves the "
                        "file that repeats it, OUTPUT_DIR/run.yaml")
    g.add_argument("--dry_run", nargs="?", type=int, const=0, metavar="GPUS",
                   help="check everything, print what the run will be and take, and stop; needs no GPU. GPUS: plan for "
                        "so many (default: the processes of this launch)")
    g.add_argument("--gpu_memory", type=float, metavar="GIB",
                   help="dry run, --auto: memory of one GPU (default: of the GPU here, else 80)")
    g.add_argument("--host_memory", type=float, metavar="GIB",
                   help="dry run: free memory of a node (default: what is free here, or the Slurm job's share)")


def lora(group, rank, alpha, dropout, targets, targets_help):
    """Flags of adapters; the defaults are the script's."""
    switch(group, "--use_lora", help="train adapters on a frozen base instead of all weights")
    group.add_argument("--lora_rank", "--lora_r", type=int, default=rank, help="adapter rank")
    group.add_argument("--lora_alpha", type=int, default=alpha,
                       help="adapter scale: the update is multiplied by alpha / rank")
    group.add_argument("--lora_dropout", type=float, default=dropout, help="dropout on adapter inputs, 0 to 1")
    group.add_argument("--lora_target_modules", type=lora_targets, default=targets, help=targets_help)
    switch(group, "--use_rslora", help="PEFT's rsLoRA: the update is multiplied by alpha / sqrt(rank) instead")
    switch(group, "--use_dora", help="PEFT's DoRA: the length of each row of a weight is trained apart; slower, every "
                                     "forward makes the whole updated weight")


def loading(group, num_workers):
    """Flags of the loader processes."""
    group.add_argument("--num_workers", "--dataloader_num_workers", type=int, default=num_workers,
                       help="loader processes per rank, 0 = in the trainer")
    group.add_argument("--prefetch_factor", "--dataloader_prefetch_factor", type=int, default=4,
                       help="batches each loader process prepares ahead")
    group.add_argument("--dataloader_pin_memory", nargs="?", type=boolean, const=True, default=True,
                       metavar="true|false", help="Hugging Face's; only true: a GPU's batches come from pinned memory")


def bad_samples(group, checks):
    """Flags about samples that cannot be used; checks: names of what finds them."""
    group.add_argument("--drop_bad", nargs="*", metavar="CHECK",
                       help="drop and count samples that cannot be used instead of stopping, or only those that these "
                            f"checks find: {', '.join(checks)}; OUTPUT_DIR/problems.jsonl lists all")
    switch(group, "--drop_too_long", help="the same as --drop_bad too_long")


def optimisation(parser, learning_rate, learning_rate_help, lr_scheduler, min_lr_ratio, weight_decay, adam_beta2,
                 decayed="matrices, not embeddings"):
    """The group; the defaults are the script's. Returns it, for the script's own."""
    g = parser.add_argument_group("optimisation")
    g.add_argument("--learning_rate", type=float, default=learning_rate, help=learning_rate_help)
    g.add_argument("--lr_scheduler", "--lr_scheduler_type", type=lambda name: SCHEDULERS.get(name, name),
                   choices=("cosine", "linear", "constant"), default=lr_scheduler, help="after warm-up")
    g.add_argument("--min_lr_ratio", type=float, default=min_lr_ratio, help="final rate as a share of the peak")
    g.add_argument("--optim", choices=("adamw_torch_fused", "adamw_torch"), default="adamw_torch_fused",
                   help="AdamW, the only optimizer; always torch's fused one")
    g.add_argument("--weight_decay", type=float, default=weight_decay, help=f"AdamW decay of {decayed}")
    g.add_argument("--adam_beta1", type=float, default=0.9, help="AdamW decay of the mean")
    g.add_argument("--adam_beta2", type=float, default=adam_beta2, help="AdamW decay of the variance")
    g.add_argument("--max_grad_norm", type=float, default=1.0, help="clip the global gradient norm, 0 = off")
    g.add_argument("--max_bad_steps", type=int, default=5, help="stop after this many non-finite steps in a row")
    g.add_argument("--seed", type=int, default=42, help="of weights, data order, hold-out, noise and dropout")
    return g


def speed(parser, parallel, bf16_help):
    """The group. parallel: the default way to use several GPUs, None: the script says. Returns it, for the script's
    own.
    """
    g = parser.add_argument_group("speed and memory")
    switch(g, "--auto", help="choose what no flag names by the memory plan, and print why: batches, "
                             "--gradient_checkpointing, --parallel; a resumed run keeps its choice")
    g.add_argument("--parallel", choices=("ddp", "fsdp", "hsdp"), default=parallel,
                   help="a whole model on every GPU; weights, gradients, optimizer sharded over all GPUs (FSDP2), or "
                        "over those of a node, with a copy on every node (HSDP)"
                        + ("" if parallel else " (default: ddp on one GPU, else fsdp)"))
    g.add_argument("--shard_size", type=int, default=0, help="hsdp: GPUs that weights are sharded over, 0 = a node's")
    g.add_argument("--reduce_dtype", choices=("fp32", "bf16"), default="fp32",
                   help="fsdp, hsdp: gradients are summed over the GPUs in; bf16 halves that traffic and rounds")
    g.add_argument("--deepspeed", dest="parallel", type=deepspeed, default=argparse.SUPPRESS, metavar="zero3",
                   help="as Hugging Face's scripts: zero3 (or ms-swift's default-zero3) is --parallel fsdp")
    switch(g, "--bf16", help=bf16_help)
    switch(g, "--tf32", help="TF32 for float32 matrix products on CUDA")
    g.add_argument("--gradient_checkpointing", nargs="?", const="all", type=recomputation, metavar="all|selective",
                   help="compute layers again in the backward pass: all of them, or (selective) all but attention and "
                        "matrix products, which costs less time and more memory; the flag alone means all")
    switch(g, "--compile", "--torch_compile", help="torch.compile each layer")
    g.add_argument("--collective_timeout", type=int, default=600,
                   help="seconds a step may take, or a rank be silent, before it is named and all stop")
    g.add_argument("--wait_timeout", type=int, default=21600,
                   help="seconds to wait for data preparation, validation, saving")
    return g


def sharding(group):
    """Flags of FSDP2 for models that need it."""
    group.add_argument("--reshard_after_forward", action=argparse.BooleanOptionalAction, default=True,
                       help="fsdp, hsdp: free each layer's gathered weights until the backward pass; no-: faster, more "
                            "memory")
    switch(group, "--cpu_offload", help="fsdp, hsdp: keep shards and optimizer in host memory (slow)")
    switch(group, "--float8", help="lora with --compile: products with frozen weights in float8; not yet run on a GPU")


def logging(parser, logging_steps, save_total_limit, eval_steps="a fifth of the run", save_steps="a tenth of the run"):
    """The group; the defaults are the script's. eval_steps, save_steps: theirs in words, see run.intervals. Returns it,
    for the script's own.
    """
    g = parser.add_argument_group("logging, validation, checkpoints")
    g.add_argument("--output_dir", default="./output", help="everything written goes here; shared by all nodes")
    g.add_argument("--logging_dir", default="./logs", help="TensorBoard files go to a folder in here")
    g.add_argument("--logging_steps", type=int, default=logging_steps, help="optimizer steps between log lines")
    g.add_argument("--report_to", nargs="+", default=["tensorboard"], metavar="NAME",
                   help=f"one or more of {', '.join(TRACKERS)}, or none, beside metrics.jsonl")
    g.add_argument("--wandb_project", default="flat-trainers", help="project at W&B and trackio")
    g.add_argument("--eval_steps", type=int,
                   help=f"optimizer steps between validations, 0 = at the end (default: {eval_steps})")
    g.add_argument("--save_steps", type=int,
                   help=f"optimizer steps between checkpoints, 0 = at the end (default: {save_steps})")
    g.add_argument("--save_minutes", type=float,
                   help="save as well when the last checkpoint is so many minutes old, 0 = never (default: 30 without "
                        "--save_steps, never with it)")
    g.add_argument("--save_total_limit", type=int, default=save_total_limit,
                   help="newest checkpoints kept besides the best, 0 = all")
    g.add_argument("--resume", "--resume_from_checkpoint", type=resumption, default="auto",
                   help="auto (newest whole checkpoint in OUTPUT_DIR), none, or a folder")
    return g


def notice(text):
    """Say something about the flags once, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice     {text}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Checks; all raise UserError


def need(good, message):
    """UserError(message) unless good."""
    if not good:
        raise UserError(message)


def values(args, names):
    """(name, value) of the flags among names that the script has and that are set."""
    return [(name, getattr(args, name)) for name in names if getattr(args, name, None) is not None]


def at_least_one(args, *names):
    for name, value in values(args, names):
        need(value >= 1, f"--{name} is {value}; it must be at least 1")


def zero_or_more(args, *names):
    for name, value in values(args, names):
        need(0 <= value < math.inf, f"--{name} is {value}; it must be 0 or more and finite")


def below_one(args, *names):
    for name, value in values(args, names):
        need(0 <= value < 1, f"--{name} is {value}; it must be at least 0 and below 1")


def share(args, *names):
    for name, value in values(args, names):
        need(0 <= value <= 1, f"--{name} is {value}; it must lie between 0 and 1")


def above_zero(args, *names):
    for name, value in values(args, names):
        need(0 < value < math.inf, f"--{name} is {value}; it must be above 0 and finite")


def check_shared(args):
    """Values and combinations of the shared flags that would fail, or do nothing, later."""
    at_least_one(args, "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "logging_steps",
                 "max_bad_steps", "prefetch_factor", "collective_timeout", "wait_timeout", "lora_rank", "lora_alpha")
    zero_or_more(args, "max_tokens_per_batch", "global_batch_size", "max_steps", "warmup_steps", "eval_steps",
                 "dry_run", "save_steps", "save_minutes", "save_total_limit", "num_workers", "preprocess_num_proc",
                 "max_length", "scale_lr_from_batch", "weight_decay", "max_grad_norm", "learning_rate", "seed")
    below_one(args, "lora_dropout", "dropout", "validation_split", "adam_beta1", "adam_beta2")
    share(args, "min_lr_ratio", "warmup_ratio")
    above_zero(args, "gpu_memory", "host_memory")
    need(args.seed < 2**62, f"--seed is {args.seed}; it must be below 2**62")
    for name, _ in values(args, ("gpu_memory", "host_memory")):
        auto = name == "gpu_memory" and getattr(args, "auto", False)
        need(args.dry_run is not None or auto, f"--{name} needs --dry_run")
    need(not (args.compile and args.gradient_checkpointing == "selective"),
         "--gradient_checkpointing selective does not go with --compile: inside a compiled layer nothing can be picked "
         "out; drop one of the two")
    names = list(dict.fromkeys(name for word in args.report_to for name in word.split(",") if name))
    need("none" not in names or names == ["none"], "--report_to none goes with no other")
    args.report_to = [name for name in names if name != "none"]
    for name in args.report_to:
        need(name in TRACKERS, f"--report_to {name}: no such one; there are {', '.join(TRACKERS)} and none")
        need(importlib.util.find_spec(name), f"--report_to {name}: pip install {name}, or --report_to none")


def named(args):
    """The flags that the command line or its file names."""
    return getattr(args, "named", frozenset())


def counts_samples(args):
    """Whether a micro-step has so many samples; else packs of tokens, as --max_tokens_per_batch or --auto has them."""
    return not args.max_tokens_per_batch and (not args.auto or "per_device_train_batch_size" in named(args))


def check_loading(args, parser):
    """The flags of loading(). Loader processes of all ranks of a node are at most its CPUs, or the script's default."""
    need(args.dataloader_pin_memory, "--dataloader_pin_memory false: batches for a GPU always come from pinned memory")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = max(usable_cpus() // ranks, parser.get_default("num_workers"))
    if args.num_workers > limit and getattr(args, "dry_run", None) is None:
        notice(f"--num_workers {args.num_workers}: {ranks} ranks on {usable_cpus()} CPUs get {limit} each")
        args.num_workers = limit


def check_bad_samples(args, checks):
    """The flags of bad_samples(); makes args.drop_bad the tuple of checks whose samples are dropped."""
    names = [name for word in args.drop_bad or () for name in word.split(",") if name]
    for name in names:
        need(name in checks, f"--drop_bad {name}: no such check; there are {', '.join(checks)}")
    if args.drop_bad == []:
        names = checks
    args.drop_bad = tuple(name for name in checks if name in names or (name == "too_long" and args.drop_too_long))


def local_ranks(ranks):
    """How many of `ranks` processes run on one node: what torchrun says, else up to 8."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 8)))


def check_parallel(args, world_size):
    """--parallel with --shard_size, which is filled in, and --reduce_dtype."""
    zero_or_more(args, "shard_size")
    auto = args.auto and "parallel" not in named(args)
    need(auto or args.parallel == "hsdp" or not args.shard_size, "--shard_size needs --parallel hsdp")
    need(auto or args.parallel != "ddp" or args.reduce_dtype == "fp32",
         "--reduce_dtype bf16 needs --parallel fsdp or hsdp")
    size = args.shard_size or local_ranks(world_size)
    need(args.parallel != "hsdp" or world_size % size == 0,
         f"--parallel hsdp: {world_size} ranks are no whole number of groups of {size} (--shard_size)")


def check_sharding(args):
    """The flags of sharding()."""
    need(args.parallel != "ddp" or (args.reshard_after_forward and not args.cpu_offload),
         "--no-reshard_after_forward and --cpu_offload need --parallel fsdp or hsdp")
    if args.float8:
        need(args.compile, "--float8 needs --compile: alone it reads and writes more than it saves")
        need(args.use_lora, "--float8 needs --use_lora: only frozen weights are rounded")
        need(not args.use_dora, "--float8 does not go with --use_dora: that needs the weights themselves")
        need(args.bf16, "--float8 needs --bf16")
        need(args.parallel == "ddp", "--float8 needs --parallel ddp: rounded weights cannot be sharded")


def check_lora(args, parser):
    """No flag of an adapter without --use_lora, where it would do nothing."""
    for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora"):
        need(args.use_lora or getattr(args, name) == parser.get_default(name), f"--{name} needs --use_lora")
