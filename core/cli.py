"""Flags of the scripts, errors of one line, and safe printing of text from users' files.

Imports the standard library only, so --help and mistakes are answered before torch is imported.
"""
import argparse
import contextlib
import faulthandler
import gc
import importlib.util
import io
import json
import math
import os
import re
import sys
import time
from functools import partial
from pathlib import Path

from core import lifetime

TRACKERS = ("tensorboard", "wandb")      # of --report_to
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
BOOLEAN = dict.fromkeys(TRUE, True) | dict.fromkeys(FALSE, False)
CONFIG = "run.yaml"     # in OUTPUT_DIR: the flags that repeat a run
RANK0_REPORT_S = 5          # seconds that other ranks wait while rank 0 reports the same mistake

# {flag of Hugging Face's scripts, ms-swift and earlier trainers: our name}. A script that has our
# flag accepts the other name too, but --help does not show it.
OLD_NAMES = {
    "--model_name_or_path": "--model_path", "--lora_r": "--lora_rank", "--deepspeed": "--parallel",
    "--train_data": "--train_data_file", "--train_data_dir": "--train_data_file",
    "--eval_data": "--eval_data_file", "--eval_data_dir": "--eval_data_file",
    "--dataloader_num_workers": "--num_workers", "--lr_scheduler_type": "--lr_scheduler",
    "--disable_evaluation": "--disable_eval", "--resume_from_checkpoint": "--resume",
    "--torch_compile": "--compile"}
# {flag that is accepted without effect: (script must have this flag, accepted values)}
WITHOUT_EFFECT = {
    "--optim": ("--weight_decay", ("adamw_torch_fused", "adamw_torch")),
    "--dataloader_pin_memory": ("--num_workers", TRUE),
    "--freeze_audio_tower": ("--freeze_llm", BOOLEAN),
    "--freeze_audio_encoder_proj": ("--freeze_llm", BOOLEAN),
    "--enable_strategic_logging": ("--freeze_llm", BOOLEAN),
    "--strategic_logging_steps": ("--freeze_llm", None)}
# Control characters, line separators, marks of text direction, and halves of surrogate pairs
HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
                    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]")
PASSWORD = re.compile(r"(?<=://)[^/?#\s]*(?=@)")        # http://user:password@host
SECRETS = re.compile(r"(?<=://)[^/?#\s]*@|"
                     r"(?<=[?&])[\w-]*(?:key|token|secret|password)[\w-]*=[^&#\s]*", re.IGNORECASE)


class UserError(Exception):
    """A mistake in flags, files or data. Rank 0 prints it as one line and all processes exit."""


def require(condition, message):
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)


# ---- Text. A name in a data file may hold line feeds and terminal escapes, or megabytes.


def one_line(text, limit=500):
    """str(text) as one line of about `limit` characters without control characters or passwords."""
    text = PASSWORD.sub("***", str(text))       # before the cut, which may remove the "@"
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}[... {len(text) - 2 * half:,} characters ...]{text[-half:]}"
    return HIDDEN.sub(lambda match: repr(match[0])[1:-1], text)


def error_text(message):
    """A message for the terminal, with one_line applied to each line; later lines are indented."""
    lines = (one_line(line, 2000) for line in str(message).split("\n"))
    return "\n  ".join(line.removeprefix("  ") for line in lines)


def print_error(text, short=""):
    """Print why this process exits. torchrun repeats it, or `short` if given, when it ends."""
    print(text, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": short or text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):      # renamed: torchrun fails on an incomplete file
            Path(f"{path}.new").write_text(json.dumps(
                {"message": {"message": short or text, "extraInfo": extra}}))
            os.replace(f"{path}.new", path)


def fail(message, status=1):
    """Exit with one line of error, printed by rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print_error(error_text(f"error: {message}"))
    else:
        time.sleep(RANK0_REPORT_S)
    sys.exit(status)


def notice(text):
    """Print a notice on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice     {text}", flush=True)


def first_line(error):
    """The first line of an error's text, or its class where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def plural(number, noun):
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number} {noun if number == 1 else noun + 's'}"


def problem_text(lines, shown=20, total=None):
    """One message with the first `shown` lines and the number of problems, `total` or all lines."""
    total = total or len(lines)
    more = [f"... and {total - shown} more"] if total > shown else []
    return lines[0] if total == 1 else "\n  ".join([f"{total} problems:", *lines[:shown], *more])


def require_package(name, purpose, install=None):
    """UserError that says how to install a package if it is missing. purpose: what needs it."""
    require(importlib.util.find_spec(name),
            f"{purpose}: the package {name} is missing: pip install {install or name}")


def remove_secrets(value):
    """A JSON value whose URLs have lost user names, passwords and keys."""
    if isinstance(value, dict):
        return {name: remove_secrets(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [remove_secrets(item) for item in value]
    return SECRETS.sub("", value) if isinstance(value, str) and "://" in value else value


# ---- Parsing


class Help(argparse.HelpFormatter):
    def _get_help_string(self, action):
        """Append the default to a flag's help, unless it is empty or the help names it already."""
        default = action.default
        if not default or default == argparse.SUPPRESS or "default:" in action.help:
            return action.help
        return f"{action.help} (default: {default[0] if isinstance(default, list) else default})"


class Parser(argparse.ArgumentParser):
    """ArgumentParser without abbreviations, whose meaning would change with each new flag."""

    def __init__(self, description, **options):
        super().__init__(description=description, usage="%(prog)s [--flag value ...]",
                         allow_abbrev=False, formatter_class=Help, **options)

    def flag(self, name, default, help, **options):
        """add_argument() whose type is that of the default, unless options have a type."""
        if isinstance(default, (int, float)) and "action" not in options:
            options = {"type": type(default), **options}
        self.add_argument(name, default=default, help=help, **options)

    def switch(self, name, help):
        """Add a flag that is off by default. Its forms are --bf16, --bf16 true and --bf16 false."""
        self.add_argument(name, nargs="?", type=boolean, const=True, default=False,
                          metavar="true|false", help=help)

    def hide(self, *names):
        """Leave these flags out of --help; they are still accepted."""
        for action in self._actions:
            if action.dest in names:
                action.help = argparse.SUPPRESS

    def error(self, message):
        raise UserError(message.removeprefix("argument "))


class Args(argparse.Namespace):
    """Parsed flags. Two attributes are not in vars(): `given`, the flags as parsed, before checks
    derive values; and `named`, the set of flags that the command line or --config names."""
    __slots__ = ("given", "named")


def named_flags(args):
    return getattr(args, "named", set())


def safe_flags(args):
    """{name: value} of all flags without passwords, for files, TensorBoard and W&B."""
    return remove_secrets(vars(args))


def parse(parser, check=None, argv=None):
    """Parse a command line (default: the process's) -> Args. check(args, world_size): raises
    UserError. A mistake prints one line on rank 0 and exits, with status 2 if parsing failed and 1
    if check() did. From here on this process ends with its torchrun, and in a trainer's run SIGTERM
    and SIGUSR1 are only recorded, for lifetime.stop_requested()."""
    words, status = sys.argv[1:] if argv is None else list(argv), 2
    lifetime.end_with_torchrun()        # before the imports, which take seconds
    if argv is None:
        prepare_process(words)
    accept_old_names(parser)
    try:
        known = parser._option_string_actions
        for word in words:      # before argparse complains of missing flags
            # "--" ends a list, and a word with a space is a value: --text "-- well"
            flag = word.split("=")[0]
            require(flag in known or flag == "--" or flag[:2] != "--" or " " in word,
                    f"{flag}: no such flag; --help lists all")
        # later words count, so flags of the command line override the file's
        words = read_config(parser, words) + words
        args = parser.parse_args(words, Args())
        args.given, status = safe_flags(args), 1
        args.named = {known[name].dest for word in words if (name := word.split("=")[0]) in known}
        if check:
            check(args, count_ranks(args))
    except UserError as error:
        fail(error, status)
    if os.environ.get("CHECK_FLAGS"):       # set by launch/slurm.sh for DRY_RUN=1
        sys.exit(0)
    planned = getattr(args, "dry_run", False)       # False: no trainer; None: a run; else GPUs
    if planned is None:
        lifetime.catch_signals()
    elif planned is not False and os.environ.get("RANK", "0") != "0":
        sys.exit(0)     # one process plans for all
    return args


def prepare_process(words):
    """Set up a script's process before its imports. words: its command line."""
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):      # stderr may be no file
        faulthandler.enable()       # a crash in native code prints the stack of each thread
    if sys.stdout:      # a log file shows each line at once
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    sys.argv[1:] = map(remove_secrets, words)      # W&B stores the command line of a run
    gc.disable()        # imports take a quarter less time; dist.init() enables it again
    sys.excepthook = report_interrupt
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        # common launch lines write max_split_size_mb=128, but torch wants a colon
        if "=" in (value := os.environ.get(name, "")):
            os.environ[name] = value.replace("=", ":")
            notice(f"{name}={value} is read as {os.environ[name]}")


def report_interrupt(kind, *error):
    """sys.excepthook during the imports: Ctrl-C prints one line, on rank 0."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *error)
    elif os.environ.get("RANK", "0") == "0":
        print_error("interrupted")


def accept_old_names(parser):
    """Let a parser accept the flags of OLD_NAMES and WITHOUT_EFFECT that apply to it."""
    known = parser._option_string_actions
    for old, new in OLD_NAMES.items():
        if new in known:
            known.setdefault(old, known[new])
    for old, (required, values) in WITHOUT_EFFECT.items():
        if required in known and old not in known:
            parser.add_argument(old, nargs="?", type=str.lower, choices=values,
                                default=argparse.SUPPRESS, help=argparse.SUPPRESS)


# ---- --config FILE and OUTPUT_DIR/run.yaml


def read_config(parser, words):
    """Flags of the YAML file that --config names, as words of a command line; [] without --config.
    Values stay as written (on, 5e-5, 007); an empty value or null gives no flag. UserError."""
    flags = parser._option_string_actions
    finder = Parser("", add_help=False)
    finder.add_argument("--config")
    file = finder.parse_known_args(words)[0].config
    if not file or "--config" not in flags:
        return []
    import yaml  # comes with transformers
    require(os.path.isfile(file), f"--config {file}: no such file")     # a pipe would block
    try:
        tree = yaml.compose(Path(file).read_text(encoding="utf-8"), yaml.BaseLoader)
    except (OSError, yaml.YAMLError, RecursionError, UnicodeError) as error:
        raise UserError(f"--config {file}: cannot be read as YAML ({' '.join(str(error).split())})")
    require(tree is None or isinstance(tree, yaml.MappingNode),
            f"--config {file}: must be lines of flag: value")
    file_words, seen = [], set()
    for key_node, node in tree.value if tree else ():
        key, value = key_node.value, node.value
        flag, name = f"--{key}", f"--config {file}: {key}"
        require(flag in flags and key not in ("config", "help"),
                f"{name}: no such flag; delete the line (--help lists all flags)")
        action = flags[flag]
        require(action.dest not in seen, f"{name} is there twice")      # maybe by its other name
        seen.add(action.dest)
        is_list = isinstance(node, yaml.SequenceNode)
        require(all(isinstance(item, yaml.ScalarNode) for item in (value if is_list else [node])),
                f"{name} takes a value or a list")
        if is_list:
            file_words += [flag, *(item.value for item in value)]
        elif isinstance(action, argparse.BooleanOptionalAction):
            require(value.lower() in BOOLEAN, f"{name}: {value} is neither true nor false")
            file_words.append(flag if BOOLEAN[value.lower()] else f"--no-{key}")
        elif node.style or value not in ("", "~", "null"):      # a quoted null is a text
            file_words.append(f"{flag}={value}")    # one word, as it may begin with a dash
    return file_words


def config_text(args, script):
    """YAML of the flags as given, for --config of the script."""
    lines = [f"# {Path(script).name} --config {CONFIG} repeats this run; later flags override it"]
    for name, value in args.given.items():
        if value is not None and name not in ("config", "dry_run"):     # JSON's values are YAML's
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


# ---- Flags and values


def choice(names, wrong):
    """type= of a flag. names: {lower-case text: value}. wrong: error text, "is neither a nor b"."""
    def parse_choice(text):
        if text.lower() not in names:
            raise argparse.ArgumentTypeError(f"{text!r} {wrong}")
        return names[text.lower()]
    return parse_choice


# true or false as Hugging Face's scripts take them
boolean = choice(BOOLEAN, "is neither true nor false")
# of --gradient_checkpointing: its mode, or None
recomputation = choice({"all": "all", "selective": "selective"} | dict.fromkeys(TRUE, "all")
                       | dict.fromkeys(FALSE), "is neither all, selective, true nor false")


def trainer_flags(p):
    """Add the flags of every trainer with train_v2_ddp.py's defaults, which others may replace."""
    flag, switch = p.flag, p.switch
    # before the run
    flag("--config", None, "YAML file of flags, such as OUTPUT_DIR/run.yaml", metavar="FILE")
    flag("--dry_run", None, "check all, print the plan for N GPUs (default: as launched) and stop",
         nargs="?", type=int, const=0, metavar="N")
    # adapters
    switch("--use_lora", "train adapters on a frozen base instead of all weights")
    flag("--lora_rank", 16, "adapter rank")
    flag("--lora_alpha", 32, "updates are multiplied by alpha / rank")
    flag("--lora_dropout", 0.0, "dropout on adapter inputs, 0 to 1")
    switch("--use_rslora", "PEFT's rsLoRA: multiply updates by alpha / sqrt(rank) instead")
    switch("--use_dora", "PEFT's DoRA: train the magnitude of each weight row separately; slower")
    # optimization
    flag("--lr_scheduler", "cosine", "after warm-up", choices=("cosine", "linear", "constant"),
         type=alias(constant_with_warmup="constant"))
    flag("--weight_decay", 0.01, "AdamW decay of matrices, not embeddings")
    flag("--adam_beta2", 0.999, "AdamW decay of the variance")
    flag("--max_grad_norm", 1.0, "clip the global gradient norm, 0 = off")
    flag("--max_bad_steps", 5, "stop after this many non-finite steps in a row")
    flag("--seed", 42, "seed of weights, data order, hold-out, noise and dropout")
    # speed and memory
    switch("--auto", "choose batches, --gradient_checkpointing and --parallel to fit memory")
    flag("--gpu_memory", None, "GiB per GPU for the plan (default: this GPU's, or 80)", type=float)
    flag("--parallel", "ddp", "one replica per GPU, or shards over all GPUs, a node, or N GPUs",
         type=sharding, metavar="ddp|fsdp|hsdp|hsdp:N")
    switch("--bf16", "bfloat16 compute; a frozen base is stored in bfloat16")
    switch("--tf32", "TF32 for float32 matrix products on CUDA")
    flag("--gradient_checkpointing", None, "recompute layers in backward: all, or selective (all "
         "but attention and matmuls)", nargs="?", const="all", type=recomputation, metavar="WHAT")
    flag("--num_workers", 2, "loader processes per rank, 0 = in the trainer")
    flag("--collective_timeout", 600, "seconds until a hanging rank is named and the run aborts")
    flag("--wait_timeout", 21600, argparse.SUPPRESS)    # in data preparation, validation and saves
    # logging and checkpoints
    flag("--output_dir", "./output", "folder for all output; shared by all nodes")
    flag("--logging_dir", "./logs", "parent folder of TensorBoard files")
    flag("--logging_steps", 10, "optimizer steps between log lines")
    flag("--save_total_limit", 3, "newest checkpoints to keep besides the best, 0 = all")
    flag("--report_to", ["tensorboard"], f"{', '.join(TRACKERS)}, none", nargs="+", metavar="NAME")
    flag("--wandb_project", "flat-trainers", "project at W&B")
    flag("--resume", "auto", "auto (newest intact checkpoint), none, or the folder of a checkpoint",
         type=alias(true="auto", false="none"))


def packing_flags(p):
    """Add the flags that only the trainers of speech and chats share; defaults as above."""
    flag, switch = p.flag, p.switch
    flag("--base_dtype", None, "lora: nf4 keeps the base in four bits", choices=("bf16", "nf4"))
    flag("--preprocess_num_proc", min(8, usable_cpus()), "processes per node that prepare data")
    flag("--per_device_train_batch_size", 4, "samples per micro-step and rank")
    flag("--max_tokens_per_batch", 0, "pack whole samples up to this many tokens instead; 0 = off")
    flag("--per_device_eval_batch_size", 1, "samples per validation batch")
    flag("--num_train_epochs", 3, "passes over the training samples")
    flag("--max_steps", 0, "stop after this many optimizer steps, 0 = use --num_train_epochs")
    flag("--eval_steps", None, "steps between validations, 0 = at the end (default: 1/5)", type=int)
    flag("--save_steps", None, "steps between saves, 0 = at the end (default: 1/10)", type=int)
    flag("--reshard_after_forward", True, "fsdp: free gathered weights until backward; "
         "--no-reshard_after_forward is faster", action=argparse.BooleanOptionalAction)
    switch("--cpu_offload", "fsdp, hsdp: keep shards and optimizer in host memory (slow)")
    switch("--fp16", "float16 compute with a scaled loss, for GPUs without bfloat16")
    switch("--float8", "lora, compiled: multiply by frozen weights in float8")
    # dist.choose_compile turns auto into True or False
    flag("--compile", "auto", "torch.compile each layer; auto: on GPUs, where it can",
         type=choice({"auto": "auto"} | BOOLEAN, "is neither auto, true nor false"),
         nargs="?", const=True, metavar="auto|true|false")


def alias(**names):
    """type= of a flag that also accepts other tools' names of values. names: {other: ours}."""
    return lambda text: names.get(text.lower(), text)


def sharding(text):
    """type= of --parallel. DeepSpeed's stage 3 shards the same tensors as FSDP2."""
    if "zero3" in text.lower():
        return "fsdp"
    if not re.fullmatch(r"ddp|fsdp|hsdp(:\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ddp, fsdp or hsdp; of DeepSpeed's stages zero3 is fsdp")
    return text


def usable_cpus():
    """Number of cores that this process may use: its job's share of the node."""
    return len(os.sched_getaffinity(0))


def cpus_per_rank():
    """Usable cores per process of this node, at least 1."""
    return max(1, usable_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def count_ranks(args):
    """Number of ranks: N of --dry_run N, or torchrun's."""
    return getattr(args, "dry_run", None) or int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks(ranks):
    """Number of ranks on one node: torchrun's setting, else at most 8."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 8)))


# ---- Checks; all raise UserError


def check_values(args, names, good, words):
    """Check good(value) of each flag in `names`, a string, that is set. words: the requirement."""
    for name in names.split():
        value = getattr(args, name, None)
        require(value is None or good(value), f"--{name} is {value}; it must {words}")


at_least_one = partial(check_values, good=lambda value: value >= 1, words="be at least 1")
zero_or_more = partial(check_values, good=lambda value: 0 <= value < math.inf,
                       words="be 0 or more and finite")
above_zero = partial(check_values, good=lambda value: 0 < value < math.inf,
                     words="be above 0 and finite")
below_one = partial(check_values, good=lambda value: 0 <= value < 1,
                    words="be at least 0 and below 1")
share = partial(check_values, good=lambda value: 0 <= value <= 1, words="lie between 0 and 1")


def check_trainer(args, world_size, parser):
    """Check values and combinations of the flags of trainer_flags and packing_flags."""
    at_least_one(args, "per_device_train_batch_size per_device_eval_batch_size num_train_epochs "
                 "logging_steps max_bad_steps collective_timeout wait_timeout lora_rank lora_alpha "
                 "gradient_accumulation_steps")
    zero_or_more(args, "max_tokens_per_batch global_batch_size max_steps warmup_steps eval_steps "
                 "save_steps save_total_limit num_workers preprocess_num_proc max_length "
                 "scale_lr_from_batch weight_decay max_grad_norm learning_rate seed dry_run")
    below_one(args, "lora_dropout dropout validation_split adam_beta2")
    share(args, "min_lr_ratio warmup_ratio")
    check_values(args, "seed", lambda seed: seed < 2**62, "be below 2**62")
    args.report_to = [] if args.report_to == ["none"] else args.report_to
    for name in args.report_to:
        require(name in TRACKERS, f"--report_to {name}: there are {', '.join(TRACKERS)} and none")
        require_package(name, f"--report_to {name}")
    check_parallel(args, world_size)
    above_zero(args, "gpu_memory")
    require(args.auto or args.dry_run is not None or not args.gpu_memory,
            "--gpu_memory needs --dry_run or --auto")
    for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora",
                 "use_dora"):
        usual = getattr(args, name, None) == parser.get_default(name)
        require(usual or args.use_lora, f"--{name} needs --use_lora")
    limit = max(cpus_per_rank(), parser.get_default("num_workers"))
    if args.num_workers > limit and args.dry_run is None:
        notice(f"--num_workers {args.num_workers}: {plural(local_ranks(world_size), 'rank')} on "
               f"{usable_cpus()} CPUs, so {limit} each")
        args.num_workers = limit


def check_parallel(args, world_size):
    """Check --parallel and flags that depend on it; split hsdp:N into parallel and shard_size."""
    args.parallel, _, size = args.parallel.partition(":")
    args.shard_size = int(size or 0)
    require(args.parallel != "ddp" or getattr(args, "reshard_after_forward", True)
            and not getattr(args, "cpu_offload", False),
            "--no-reshard_after_forward and --cpu_offload need --parallel fsdp or hsdp")
    require(args.gradient_checkpointing != "selective" or args.compile is not True,
            "--gradient_checkpointing selective does not go with --compile; drop one of the two")
    if args.parallel == "hsdp":
        args.shard_size = args.shard_size or local_ranks(world_size)
        require(world_size % args.shard_size == 0, f"--parallel hsdp: {plural(world_size, 'rank')}"
                f" cannot be cut into groups of {args.shard_size}")


def check_precision(args):
    """Check the flags that --float8, --fp16 and --base_dtype need or exclude."""
    ddp, kind, nf4 = args.parallel == "ddp", args.base_dtype, args.base_dtype == "nf4"
    require(not args.float8 or args.compile and args.use_lora and args.bf16 and ddp
            and not args.use_dora,
            "--float8 needs --compile, --use_lora, --bf16 and --parallel ddp, and no --use_dora")
    require(not (args.fp16 and args.bf16), "give --bf16 or --fp16, not both")
    require(ddp or not args.fp16, "--fp16 needs --parallel ddp: FSDP2 computes in bfloat16 here")
    require(kind is None or args.use_lora and (args.bf16 or nf4 and args.fp16),
            f"--base_dtype {kind} needs --use_lora and --bf16{' or --fp16' if nf4 else ''}")
    if nf4:
        require(ddp and not args.use_dora and not args.float8 and args.compile is not True,
                "--base_dtype nf4 needs --parallel ddp, and no --use_dora, --float8 or --compile")
        require_package("bitsandbytes", "--base_dtype nf4")


def packs_tokens(args):
    """True if a pack is limited by tokens, not by samples; --auto prefers that."""
    return args.max_tokens_per_batch > 0 or (
        args.auto and "per_device_train_batch_size" not in named_flags(args))


def set_accumulation(args, world_size, parser, usual=0):
    """Derive --gradient_accumulation_steps, unless it is given, from --global_batch_size or `usual`
    samples per step. For packs of tokens only the plan of --auto can do so."""
    is_set = args.gradient_accumulation_steps != parser.get_default("gradient_accumulation_steps")
    require(not (is_set and args.global_batch_size),
            "give one of --global_batch_size and --gradient_accumulation_steps")
    require(args.auto or not (args.global_batch_size and packs_tokens(args)),
            "--global_batch_size counts samples: not with packs of tokens, unless --auto is given")
    if is_set:
        return
    args.gradient_accumulation_steps = 1
    samples = args.global_batch_size or usual
    if not packs_tokens(args):
        per_micro_step = args.per_device_train_batch_size * world_size
        require(samples % per_micro_step == 0,
                f"--global_batch_size {samples} is not a multiple of {per_micro_step}, "
                f"--per_device_train_batch_size times {plural(world_size, 'rank')}; or give "
                "--gradient_accumulation_steps")
        args.gradient_accumulation_steps = max(1, samples // per_micro_step)
    elif args.auto:
        args.global_batch_size = samples


def check_drop_bad(args, checks):
    """Turn args.drop_bad into the tuple of checks whose samples are dropped."""
    names = {name for value in args.drop_bad or () for name in value.split(",") if name}
    for name in names - {*checks}:
        raise UserError(f"--drop_bad {name}: no such check; there are {', '.join(checks)}")
    if args.drop_too_long:
        names.add("too_long")
    args.drop_bad = tuple(name for name in checks if name in names or args.drop_bad == [])


def set_intervals(args, total_steps, before, validates, **own):
    """Derive intervals that no flag sets from the length of the run; return lines that show them.
    before: flags of the checkpoint to resume, or {}, as a resumed run keeps its intervals. own:
    {flag: steps}, other defaults of a trainer. validates: False if there is nothing to validate."""
    usual = {"save_steps": max(1, total_steps // 10), "eval_steps": max(1, total_steps // 5),
             "warmup_steps": min(100, round(0.05 * total_steps)), **own}
    for flag, steps in usual.items():
        if getattr(args, flag, 0) is None:
            setattr(args, flag, before.get(flag, steps))
    saves, evals = (f"every {plural(steps, 'step')}" if steps else "at the end"
                    for steps in (args.save_steps, args.eval_steps))
    lines = [f"intervals  checkpoints {saves}" + f"; validation {evals}" * validates]
    late = {"warmup_steps": "the learning rate never reaches its peak",
            "save_steps": "no checkpoint before the end"}
    if validates:
        late["eval_steps"] = "no validation before the end"
    for flag, effect in late.items():
        if getattr(args, flag, 0) > total_steps:
            lines.append(f"note       --{flag} {getattr(args, flag)} is longer than the run of "
                         f"{total_steps} steps: {effect}")
    return "\n".join(lines)
