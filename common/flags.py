"""Flags that the trainers share, checks of their values, and one line for a mistake in them.

Standard library only, and scripts parse before they import torch: --help and a mistake in a flag
answer at once.
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

from common.text import UserError, counted, error_text, need, print_error, without_secrets
from core import lifetime

TRACKERS = ("tensorboard", "wandb", "trackio")                  # of --report_to
MODES = ("all", "selective")                                    # of --gradient_checkpointing
PARALLEL = ("ddp", "fsdp", "hsdp")
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
CONFIG = "run.yaml"     # in OUTPUT_DIR
CONFIG_FLAG = re.compile("--config(=|$)")
OVERRIDE = re.compile(r"\+{0,2}[a-z]\w*(\.[a-z]\w*)+=[^/]*$")   # trainer.precision=bf16, as Hydra
GIVE_WAY_S = 5      # seconds other ranks leave rank 0 to say what is wrong, before torchrun ends it

# Flags that a trainer's --help shows, beside those of Parser(usual=...); --help all shows all.
USUAL = """help config dry_run model_path train_data_file eval_data_file validation_split
    use_lora lora_rank lora_alpha max_length drop_bad num_train_epochs max_steps learning_rate
    per_device_train_batch_size max_tokens_per_batch gradient_accumulation_steps global_batch_size
    auto parallel bf16 compile gradient_checkpointing output_dir report_to eval_steps save_steps
    resume"""

# Flags of launch lines that people have, which no --help shows: of Hugging Face's scripts, of
# ms-swift and of earlier trainers. Those with a like here, taken for it:
OLD_NAMES = {
    "--model_name_or_path": "--model_path", "--lora_r": "--lora_rank",
    "--train_data": "--train_data_file", "--eval_data": "--eval_data_file",
    "--dataloader_num_workers": "--num_workers", "--lr_scheduler_type": "--lr_scheduler",
    "--deepspeed": "--parallel", "--torch_compile": "--compile",
    "--disable_evaluation": "--disable_eval", "--resume_from_checkpoint": "--resume"}
# and those that change nothing: {flag: (beside which flag of ours, the values it may have)}
WITHOUT_EFFECT = {
    "--optim": ("--weight_decay", ("adamw_torch_fused", "adamw_torch")),
    "--dataloader_pin_memory": ("--num_workers", TRUE),
    "--freeze_audio_tower": ("--freeze_llm", TRUE + FALSE),
    "--freeze_audio_encoder_proj": ("--freeze_llm", TRUE + FALSE)}


def need_package(name, purpose, install=None):
    """UserError that says how to install a package that is missing. purpose: what needs it."""
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{purpose}: the package {name} is missing: pip install {install or name}")


def usable_cpus():
    """How many cores this process may use: of a job's share, not of the whole node."""
    return len(os.sched_getaffinity(0))


# --------------------------------------------------------------------------------------------------
# Parsing


class Help(argparse.HelpFormatter):
    """Adds a flag's default to its help, unless it has none or the help says it in words."""

    def _get_help_string(self, action):
        nothing = action.default in (None, False, argparse.SUPPRESS)
        if action.required or not action.option_strings or nothing or "default:" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


class ShowHelp(argparse.Action):
    """--help and --help all."""

    def __call__(self, parser, namespace, value, option_string=None):
        parser.everything = parser.usual is None or value == "all"
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """ArgumentParser without abbreviations, which change meaning with each new flag.

    usual: names of flags that --help shows beside those of USUAL; None: --help shows all.
    """

    def __init__(self, description=None, usual=None, **more):
        super().__init__(description=description, usage="%(prog)s [--flag value ...]",
                         allow_abbrev=False, formatter_class=Help, add_help=False, **more)
        self.usual = None if usual is None else {*USUAL.split(), *usual.split()}
        self.everything = usual is None
        self.add_argument("-h", "--help", nargs="?", choices=("all",), action=ShowHelp,
                          default=argparse.SUPPRESS, help="show the usual flags, or all")

    def format_help(self):
        formatter, hidden = self._get_formatter(), 0
        formatter.add_usage(self.usage, self._actions, ())
        formatter.add_text(self.description)
        for group in self._action_groups:
            named = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            shown = [action for action in named if self.everything or action.dest in self.usual]
            hidden += len(named) - len(shown)
            formatter.start_section(group.title)
            formatter.add_arguments(shown)
            formatter.end_section()
        formatter.add_text(f"--help all shows {hidden} more flags" if hidden else "")
        return formatter.format_help()

    def error(self, message):
        raise UserError(message.removeprefix("argument "))


def accept_old(parser):
    """Have a parser take the flags of OLD_NAMES and WITHOUT_EFFECT that suit it. Returns it."""
    known = parser._option_string_actions
    for old, ours in OLD_NAMES.items():
        if ours in known:
            known[old] = known[ours]
    for old, (ours, values) in WITHOUT_EFFECT.items():
        if ours in known:
            parser.add_argument(old, nargs="?", type=str.lower, choices=values,
                                default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def spellings(parser):
    """Every flag, in all its spellings, of a parser and its subcommands."""
    found = {*parser._option_string_actions}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(spellings, action.choices.values()))
    return found


def nearest(name, known):
    """The flag that was meant by `name`: of those that go on where it ends, else of all."""
    current = [flag for flag in sorted(known)
               if f"--{flag.removeprefix('--')}" not in {*OLD_NAMES, *WITHOUT_EFFECT}]
    longer = [flag for flag in current if flag.startswith(name)]
    return difflib.get_close_matches(name, longer or current, n=1, cutoff=0)[0]


class Args(argparse.Namespace):
    """Parsed flags. Not in vars(): given, as they were before a script's check filled in what
    derives; named, those that the command line or its file names.
    """
    __slots__ = ("given", "named")


def stored(args):
    """{name: value} of all flags, as every file, board and page gets them: without passwords."""
    return {name: without_secrets(value) for name, value in vars(args).items()}


def parse(parser, check=None, argv=None):
    """The namespace of a command line, argv or the process's own.

    check(args, world_size) may raise UserError. A mistake ends the process with one line, printed
    by rank 0: status 2 for a flag that is not one, 1 for a value. Of the process's own, garbage is
    not collected from here until distributed.one_clear_error.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    lifetime.end_with_torchrun()        # here: every script parses before its imports, seconds long
    if argv is None:
        if sys.stderr:
            faulthandler.enable()       # a crash in native code prints where each thread was
        sys.argv[1:] = map(without_secrets, words)      # W&B keeps the command line of a run
        gc.disable()        # a quarter of that time; hardly anything that imports make is garbage
        sys.excepthook = explain
    status = 2
    try:
        allocator_setting()
        check_names(parser, words)      # before argparse complains of what is missing
        if "--config" in parser._option_string_actions and any(map(CONFIG_FLAG.match, words)):
            from common import config_file
            known = spellings(parser)
            # what stands later counts
            words = config_file.words_of(parser, words, known, nearest, boolean) + words
        args = parser.parse_args(words, Args())
        args.given = stored(args)
        actions = (parser._option_string_actions.get(word.split("=")[0]) for word in words)
        args.named = frozenset(action.dest for action in actions if action)
        status = 1
        if check:
            check(args, getattr(args, "dry_run", None) or int(os.environ.get("WORLD_SIZE", "1")))
        if getattr(args, "dry_run", 0) is None:     # a trainer: now, as its imports take a minute
            lifetime.catch_signals()
        if os.environ.get("CHECK_FLAGS"):       # set by launch/slurm.sh for DRY_RUN=1
            sys.exit(0)
        return args
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print_error(error_text(f"error: {error}"))
        else:
            time.sleep(GIVE_WAY_S)
        sys.exit(status)


def explain(kind, *at):
    """sys.excepthook until the imports are done: Ctrl-C is one line, of rank 0."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *at)
    elif os.environ.get("RANK", "0") == "0":
        print_error("interrupted")


def check_names(parser, words):
    """Raise UserError for a flag that is not one, and for an override as Hydra has them."""
    known = spellings(parser)
    for word in words:
        name = word.split("=")[0]
        need(not OVERRIDE.match(word),
             f"{word}: key=value is not read here; give the flag, --help all shows all")
        # to argparse "--" alone ends a list, and a word with a space is a value: --text "-- well"
        if name.startswith("--") and name not in (*known, "--") and " " not in word:
            raise UserError(f"{name}: no such flag; the nearest one is {nearest(name, known)}, "
                            "--help all shows all")


def allocator_setting():
    """Spell the allocator's setting as torch reads it: notes have = where torch wants a colon."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if "=" in value:
            os.environ[name] = value.replace("=", ":")
            notice(f"{name}={value} is read as {os.environ[name]}")


def config_text(given, script):
    """The flags `given` as the YAML that --config of the script takes."""
    lines = [f"# {Path(script).name} --config {CONFIG} repeats this run; flags after it count more"]
    for name, value in given.items():
        if value is not None and name not in ("config", "dry_run"):     # JSON's values are YAML's
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------
# Values


def boolean(text):
    """true or false from the command line, as Hugging Face's scripts take them."""
    if text.lower() not in TRUE + FALSE:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in TRUE


def switch(group, *names, help):
    """A flag that is off by default: --bf16, --bf16 true, --bf16 false."""
    group.add_argument(*names, nargs="?", type=boolean, const=True, default=False,
                       metavar="true|false", help=help)


def recomputation(text):
    """Value of --gradient_checkpointing: a mode, or true or false -> mode or None."""
    if text.lower() not in (*MODES, *TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"{text!r} is neither {', '.join(MODES)}, true nor false")
    if text.lower() in MODES:
        return text.lower()
    return "all" if boolean(text) else None


def sharding_way(text):
    """Value of --parallel, or of DeepSpeed's flag: its stage 3 shards what FSDP2 shards."""
    if "zero3" in text.lower():
        return "fsdp"
    if text not in PARALLEL:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ddp, fsdp or hsdp; of DeepSpeed's stages zero3 is fsdp, the nearest "
            "to zero2 fsdp --no-reshard_after_forward, to none of both ddp")
    return text


def alias(**names):
    """type= of a flag some of whose values have other names elsewhere: {theirs: ours}."""
    return lambda text: names.get(text.lower(), text)


# --------------------------------------------------------------------------------------------------
# Shared flags, by group of --help; each function returns its group, for the script's own flags


def before_the_run(parser):
    g = parser.add_argument_group("before the run")
    add = g.add_argument
    add("--config", metavar="FILE",
        help="YAML file of lines `flag: value`; flags of the command line count more. Every run "
             "leaves the file that repeats it, OUTPUT_DIR/run.yaml")
    add("--dry_run", nargs="?", type=int, const=0, metavar="GPUS",
        help="check everything, print what the run will be and take, and stop; needs "
             "no GPU. GPUS: plan for so many (default: the processes of this launch)")
    add("--gpu_memory", type=float, metavar="GIB",
        help="dry run, --auto: memory of one GPU (default: of the GPU here, else 80)")
    add("--host_memory", type=float, metavar="GIB",
        help="dry run: free memory of a node (default: what is free here, or the job's share)")


def lora(group, rank, alpha, dropout, targets, targets_help):
    """Flags of adapters; the defaults are the script's."""
    add = group.add_argument
    switch(group, "--use_lora", help="train adapters on a frozen base instead of all weights")
    add("--lora_rank", type=int, default=rank, help="adapter rank")
    add("--lora_alpha", type=int, default=alpha,
        help="adapter scale: the update is multiplied by alpha / rank")
    add("--lora_dropout", type=float, default=dropout, help="dropout on adapter inputs, 0 to 1")
    # ALL, as ms-swift has it
    add("--lora_target_modules", type=alias(all="all-linear"), default=targets, help=targets_help)
    switch(group, "--use_rslora",
           help="PEFT's rsLoRA: the update is multiplied by alpha / sqrt(rank) instead")
    switch(group, "--use_dora",
           help="PEFT's DoRA: the length of each row of a weight is trained apart; slower")


def loading(group, num_workers):
    """Flags of the loader processes."""
    group.add_argument("--num_workers", type=int, default=num_workers,
                       help="loader processes per rank, 0 = in the trainer")


def bad_samples(group, checks):
    """Flags about samples that cannot be used; checks: names of what finds them."""
    group.add_argument("--drop_bad", nargs="*", metavar="CHECK",
                       help="drop and count samples that cannot be used instead of stopping, or "
                            f"only those that these checks find: {', '.join(checks)}; "
                            "OUTPUT_DIR/problems.jsonl lists all")
    switch(group, "--drop_too_long", help="the same as --drop_bad too_long")


def optimisation(parser, learning_rate, learning_rate_help, lr_scheduler, min_lr_ratio,
                 weight_decay, adam_beta2, decayed="matrices, not embeddings"):
    """The group; the defaults are the script's."""
    g = parser.add_argument_group("optimisation")
    add = g.add_argument
    add("--learning_rate", type=float, default=learning_rate, help=learning_rate_help)
    # warm-up is a flag of its own here
    add("--lr_scheduler", type=alias(constant_with_warmup="constant"), default=lr_scheduler,
        choices=("cosine", "linear", "constant"), help="after warm-up")
    add("--min_lr_ratio", type=float, default=min_lr_ratio,
        help="final rate as a share of the peak")
    add("--weight_decay", type=float, default=weight_decay, help=f"AdamW decay of {decayed}")
    add("--adam_beta2", type=float, default=adam_beta2, help="AdamW decay of the variance")
    add("--max_grad_norm", type=float, default=1.0, help="clip the global gradient norm, 0 = off")
    add("--max_bad_steps", type=int, default=5,
        help="stop after this many non-finite steps in a row")
    add("--seed", type=int, default=42, help="of weights, data order, hold-out, noise and dropout")
    return g


def speed(parser, parallel, bf16_help):
    """The group. parallel: the default way to use several GPUs, None: the script says."""
    g = parser.add_argument_group("speed and memory")
    add = g.add_argument
    unless_given = "" if parallel else " (default: ddp on one GPU, else fsdp)"
    switch(g, "--auto",
           help="choose what no flag names by the memory plan, and print why: "
                "batches, --gradient_checkpointing, --parallel; a resumed run keeps its choice")
    add("--parallel", type=sharding_way, choices=PARALLEL, default=parallel,
        help="a whole model on every GPU; weights, gradients, optimizer sharded over all GPUs "
             f"(FSDP2), or over those of a node, with a copy on every node (HSDP){unless_given}")
    add("--shard_size", type=int, default=0,
        help="hsdp: GPUs that weights are sharded over, 0 = a node's")
    add("--reduce_dtype", choices=("fp32", "bf16"), default="fp32",
        help="fsdp, hsdp: gradients are summed in; bf16 halves that traffic and rounds")
    switch(g, "--bf16", help=bf16_help)
    switch(g, "--tf32", help="TF32 for float32 matrix products on CUDA")
    add("--gradient_checkpointing", nargs="?", const="all", type=recomputation,
        metavar="all|selective",
        help="compute layers again in the backward pass: all of them, or (selective) "
             "all but attention and matrix products, which costs less time and more "
             "memory; the flag alone means all")
    switch(g, "--compile", help="torch.compile each layer")
    add("--collective_timeout", type=int, default=600,
        help="seconds a step may take, or a rank be silent, before it is named and all stop")
    add("--wait_timeout", type=int, default=21600,
        help="seconds to wait for data preparation, validation, saving")
    return g


def sharding(group):
    """Flags of FSDP2 for models that need it."""
    add = group.add_argument
    add("--reshard_after_forward", action=argparse.BooleanOptionalAction, default=True,
        help="fsdp, hsdp: free gathered weights until the backward pass; no-: faster, more memory")
    switch(group, "--cpu_offload",
           help="fsdp, hsdp: keep shards and optimizer in host memory (slow)")
    switch(group, "--float8", help="lora with --compile: products with frozen weights in float8; "
                                   "not yet run on a GPU")
    switch(group, "--fp16", help="float16 compute with a scaled loss, for GPUs without bfloat16 "
                                 "(T4, V100); a frozen base is stored in float16")
    add("--base_dtype", choices=("bf16", "nf4"),
        help="lora: nf4 keeps frozen layers in four bits, as QLoRA (default: off; --auto may)")


def logging(parser, logging_steps, save_total_limit, eval_steps="a fifth of the run",
            save_steps="a tenth of the run"):
    """The group; the defaults are the script's. eval_steps, save_steps: theirs in words."""
    g = parser.add_argument_group("logging, validation, checkpoints")
    add = g.add_argument
    add("--output_dir", default="./output",
        help="everything written goes here; shared by all nodes")
    add("--logging_dir", default="./logs", help="TensorBoard files go to a folder in here")
    add("--logging_steps", type=int, default=logging_steps,
        help="optimizer steps between log lines")
    add("--report_to", nargs="+", default=["tensorboard"], metavar="NAME",
        help=f"one or more of {', '.join(TRACKERS)}, or none, beside metrics.jsonl")
    add("--wandb_project", default="flat-trainers", help="project at W&B and trackio")
    add("--eval_steps", type=int,
        help=f"optimizer steps between validations, 0 = at the end (default: {eval_steps})")
    add("--save_steps", type=int,
        help=f"optimizer steps between checkpoints, 0 = at the end (default: {save_steps})")
    add("--save_minutes", type=float,
        help="save as well when the last checkpoint is so many minutes old, 0 = never "
             "(default: 30 without --save_steps, never with it)")
    add("--save_total_limit", type=int, default=save_total_limit,
        help="newest checkpoints kept besides the best, 0 = all")
    add("--resume", type=alias(true="auto", false="none"), default="auto",
        help="auto (newest whole checkpoint in OUTPUT_DIR), none, or a folder")
    return g


def notice(text):
    """Say something about the flags once, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice     {text}", flush=True)


# --------------------------------------------------------------------------------------------------
# Checks; all raise UserError


def check_values(args, names, good, words):
    """UserError for a flag among names that is set, but not good(value). words: what it must do."""
    for name in names:
        value = getattr(args, name, None)
        need(value is None or good(value), f"--{name} is {value}; it must {words}")


def at_least_one(args, *names):
    check_values(args, names, lambda value: value >= 1, "be at least 1")


def zero_or_more(args, *names):
    check_values(args, names, lambda value: 0 <= value < math.inf, "be 0 or more and finite")


def below_one(args, *names):
    check_values(args, names, lambda value: 0 <= value < 1, "be at least 0 and below 1")


def share(args, *names):
    check_values(args, names, lambda value: 0 <= value <= 1, "lie between 0 and 1")


def above_zero(args, *names):
    check_values(args, names, lambda value: 0 < value < math.inf, "be above 0 and finite")


def check_shared(args):
    """Values and combinations of the shared flags that would fail, or do nothing, later."""
    at_least_one(args, "per_device_train_batch_size", "per_device_eval_batch_size",
                 "num_train_epochs", "logging_steps", "max_bad_steps", "collective_timeout",
                 "wait_timeout", "lora_rank", "lora_alpha")
    zero_or_more(args, "max_tokens_per_batch", "global_batch_size", "max_steps", "warmup_steps",
                 "eval_steps", "dry_run", "save_steps", "save_minutes", "save_total_limit",
                 "num_workers", "preprocess_num_proc", "max_length", "scale_lr_from_batch",
                 "weight_decay", "max_grad_norm", "learning_rate", "seed")
    below_one(args, "lora_dropout", "dropout", "validation_split", "adam_beta2")
    share(args, "min_lr_ratio", "warmup_ratio")
    above_zero(args, "gpu_memory", "host_memory")
    check_values(args, ("seed",), lambda seed: seed < 2**62, "be below 2**62")
    need(args.dry_run is not None or args.auto or not args.gpu_memory,
         "--gpu_memory needs --dry_run")
    need(args.dry_run is not None or not args.host_memory, "--host_memory needs --dry_run")
    need(not (args.compile and args.gradient_checkpointing == "selective"),
         "--gradient_checkpointing selective does not go with --compile: inside a compiled layer "
         "nothing can be picked out; drop one of the two")
    names = list(dict.fromkeys(words_of(args.report_to)))
    need("none" not in names or names == ["none"], "--report_to none goes with no other")
    args.report_to = [name for name in names if name != "none"]
    for name in args.report_to:
        need(name in TRACKERS,
             f"--report_to {name}: no such one; there are {', '.join(TRACKERS)} and none")
        need(importlib.util.find_spec(name),
             f"--report_to {name}: pip install {name}, or --report_to none")


def words_of(values):
    """The names in a list of values, several of which a comma may join."""
    return [name for value in values or () for name in value.split(",") if name]


def named(args):
    """The flags that the command line or its file names."""
    return getattr(args, "named", frozenset())


def counts_samples(args):
    """Whether a micro-step has so many samples; else packs of tokens."""
    if args.max_tokens_per_batch:
        return False
    return not args.auto or "per_device_train_batch_size" in named(args)


def check_loading(args, parser):
    """Loader processes of all ranks of a node are at most its CPUs, or the script's default."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = max(usable_cpus() // ranks, parser.get_default("num_workers"))
    if args.num_workers > limit and getattr(args, "dry_run", None) is None:
        notice(f"--num_workers {args.num_workers}: {counted(ranks, 'rank')} on {usable_cpus()} "
               f"CPUs, so {limit} each")
        args.num_workers = limit


def check_bad_samples(args, checks):
    """Make args.drop_bad the tuple of checks whose samples are dropped."""
    names = words_of(args.drop_bad)
    for name in names:
        need(name in checks, f"--drop_bad {name}: no such check; there are {', '.join(checks)}")
    if args.drop_bad == []:
        names = list(checks)
    if args.drop_too_long:
        names.append("too_long")
    args.drop_bad = tuple(name for name in checks if name in names)


def local_ranks(ranks):
    """How many of `ranks` processes run on one node: what torchrun says, else up to 8."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 8)))


def check_parallel(args, world_size):
    """--parallel with --shard_size, which is filled in, and --reduce_dtype."""
    zero_or_more(args, "shard_size")
    auto = args.auto and "parallel" not in named(args)
    need(auto or args.parallel == "hsdp" or not args.shard_size,
         "--shard_size needs --parallel hsdp")
    need(auto or args.parallel != "ddp" or args.reduce_dtype == "fp32",
         "--reduce_dtype bf16 needs --parallel fsdp or hsdp")
    size = args.shard_size or local_ranks(world_size)
    need(args.parallel != "hsdp" or world_size % size == 0,
         f"--parallel hsdp: {counted(world_size, 'rank')} cannot be cut into groups of {size} "
         "(--shard_size)")


def check_lora(args, parser):
    """No flag of an adapter without --use_lora, where it would do nothing."""
    for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora",
                 "use_dora"):
        need(args.use_lora or getattr(args, name) == parser.get_default(name),
             f"--{name} needs --use_lora")
