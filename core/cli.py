"""Flags of a script, one line for a mistake in them, and safe printing of users' files.

Imports the standard library only: --help and a mistake answer before torch is imported.
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
GIVE_WAY_S = 5          # seconds other ranks leave rank 0 to report a mistake

# Flags of launch lines that people have, of Hugging Face's scripts, ms-swift and earlier trainers.
# Each is accepted where the script has ours; no --help shows them.
OLD_NAMES = {
    "--model_name_or_path": "--model_path", "--lora_r": "--lora_rank", "--deepspeed": "--parallel",
    "--train_data": "--train_data_file", "--train_data_dir": "--train_data_file",
    "--eval_data": "--eval_data_file", "--eval_data_dir": "--eval_data_file",
    "--dataloader_num_workers": "--num_workers", "--lr_scheduler_type": "--lr_scheduler",
    "--disable_evaluation": "--disable_eval", "--resume_from_checkpoint": "--resume",
    "--torch_compile": "--compile"}
# Accepted without effect, where the script has our flag: {flag: (our flag, its values)}
WITHOUT_EFFECT = {
    "--optim": ("--weight_decay", ("adamw_torch_fused", "adamw_torch")),
    "--dataloader_pin_memory": ("--num_workers", TRUE),
    "--freeze_audio_tower": ("--freeze_llm", BOOLEAN),
    "--freeze_audio_encoder_proj": ("--freeze_llm", BOOLEAN),
    "--enable_strategic_logging": ("--freeze_llm", BOOLEAN),
    "--strategic_logging_steps": ("--freeze_llm", None),
    "--too_long": ("--group_size", ("stop",))}      # in run.yaml of older chat runs
# In run.yaml of older runs: {flag that is gone: the value that every run has now; None: any}
RETIRED = {"host_memory": None, "asr_time_limit": None, "sample_time_limit": None,
           "save_minutes": None, "replay_every": None, "eval_ranks": None, "reduce_dtype": "fp32",
           "audio_loss_reduction": "mean", "noise_schedule": "loglinear", "refresh_steps": "1",
           "hdp_layout": "hierarchical", "official_t_order": "false", "init_ema": "true"}
# Control characters, line separators, marks that turn the direction of text, halves of characters
HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
                    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]")
PASSWORD = re.compile(r"(?<=://)[^/?#\s]*(?=@)")        # http://user:password@host
SECRETS = re.compile(r"(?<=://)[^/?#\s]*@|"
                     r"(?<=[?&])[\w-]*(?:key|token|secret|password)[\w-]*=[^&#\s]*", re.IGNORECASE)


class UserError(Exception):
    """A mistake in flags, files or data: rank 0 prints str() as one line, all processes exit."""


def require(condition, message):
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)


# ---- Text: a name in a data file may hold line feeds and terminal escapes, and be megabytes long


def one_line(text, limit=500):
    """str(text) as one line of about `limit` characters, no control characters, no passwords."""
    text = PASSWORD.sub("***", str(text))       # first: the cut may remove the sign that ends one
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}[... {len(text) - 2 * half:,} characters ...]{text[-half:]}"
    return HIDDEN.sub(lambda found: repr(found[0])[1:-1], text)


def error_text(message):
    """A message for the terminal: each line printable, all but the first indented."""
    lines = (one_line(line, 2000) for line in str(message).split("\n"))
    return "\n  ".join(line.removeprefix("  ") for line in lines)


def print_error(text, short=""):
    """Print why this process exits; torchrun, which repeats it at its end, gets it or `short`."""
    print(text, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"py_callstack": short or text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):      # torchrun fails at half a file
            Path(f"{path}.new").write_text(json.dumps(
                {"message": {"message": short or text, "extraInfo": about}}))
            os.replace(f"{path}.new", path)


def fail(message, status=1):
    """End this process with one line, which rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        print_error(error_text(f"error: {message}"))
    else:
        time.sleep(GIVE_WAY_S)
    sys.exit(status)


def notice(text):
    """Say something about the run once, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice     {text}", flush=True)


def first_line(error):
    """The first line of an error's text, or its class where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def plural(number, noun):
    """1 rank, 2 ranks."""
    return f"{number} {noun if number == 1 else noun + 's'}"


def problem_text(lines, shown=20, total=None):
    """Problems as one message: the first `shown`, and how many there are of `total` or of these."""
    total = total or len(lines)
    more = [f"... and {total - shown} more"] * (total > shown)
    return lines[0] if total == 1 else "\n  ".join([f"{total} problems:", *lines[:shown], *more])


def require_package(name, purpose, install=None):
    """UserError that says how to install a package that is missing. purpose: what needs it."""
    require(importlib.util.find_spec(name),
            f"{purpose}: the package {name} is missing: pip install {install or name}")


def remove_secrets(value):
    """A JSON value as it may be stored: URLs in it lose names, passwords and keys."""
    if isinstance(value, dict):
        return {name: remove_secrets(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [remove_secrets(part) for part in value]
    return SECRETS.sub("", value) if isinstance(value, str) and "://" in value else value


# ---- Parsing


class Help(argparse.HelpFormatter):
    def _get_help_string(self, action):
        """A flag's help with its default, unless there is none or the help has it in words."""
        if not action.default or action.default == argparse.SUPPRESS or "default:" in action.help:
            return action.help
        listed = isinstance(action.default, list)
        return f"{action.help} (default: {action.default[0] if listed else '%(default)s'})"


def switch(parser, name, help):
    """A flag that is off by default: --bf16, --bf16 true, --bf16 false."""
    parser.add_argument(name, nargs="?", type=boolean, const=True, default=False,
                        metavar="true|false", help=help)


class Parser(argparse.ArgumentParser):
    """ArgumentParser without abbreviations, which change meaning with each new flag."""

    def __init__(self, description, **options):
        super().__init__(description=description, usage="%(prog)s [--flag value ...]",
                         allow_abbrev=False, formatter_class=Help, **options)

    def flag(self, name, default, help, **options):
        """add_argument; the value has the type of the default, or of options["type"]."""
        if isinstance(default, (int, float)) and "action" not in options:
            options = {"type": type(default), **options}
        self.add_argument(name, default=default, help=help, **options)

    switch = switch

    def hide(self, *names):
        """These flags are accepted, but --help does not show them."""
        for action in self._actions:
            if action.dest in names:
                action.help = argparse.SUPPRESS

    def error(self, message):
        raise UserError(message.removeprefix("argument "))


class Args(argparse.Namespace):
    """Parsed flags. Not in vars(): given, before check_flags derived values; named, by the user."""
    __slots__ = ("given", "named")


def named_flags(args):
    return getattr(args, "named", set())


def safe_flags(args):
    """{name: value} of all flags, without passwords: what every file and board gets."""
    return remove_secrets(vars(args))


def parse(parser, check=None, argv=None):
    """Args of a command line, argv or the process's own. check(args, world_size) may raise
    UserError. A mistake ends the process with one line, printed by rank 0: status 2 for a flag that
    does not exist, 1 for a value. From here on SIGTERM and SIGUSR1 are noted instead of killing
    (lifetime.stop_requested), and a rank dies with torchrun.
    """
    words, status = sys.argv[1:] if argv is None else list(argv), 2
    lifetime.end_with_torchrun()        # first: imports take seconds
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
            check(args, getattr(args, "dry_run", None) or int(os.environ.get("WORLD_SIZE", "1")))
    except UserError as error:
        fail(error, status)
    if os.environ.get("CHECK_FLAGS"):       # set by launch/slurm.sh for DRY_RUN=1
        sys.exit(0)
    planned = getattr(args, "dry_run", False)       # a trainer's: a number of GPUs, or None
    if planned is None:
        lifetime.catch_signals()
    elif planned is not False and os.environ.get("RANK", "0") != "0":
        sys.exit(0)     # one process plans for all
    return args


def prepare_process(words):
    """Prepare a script's process before its imports. words: its command line."""
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):      # stderr may be no file
        faulthandler.enable()       # a crash in native code prints where each thread was
    if sys.stdout:      # a log file shows each line at once
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    sys.argv[1:] = map(remove_secrets, words)      # W&B keeps the command line of a run
    gc.disable()        # a quarter of the time of imports; dist.init() turns it on again
    sys.excepthook = report_interrupt
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        # notes have it where torch wants a colon
        if "=" in (value := os.environ.get(name, "")):
            os.environ[name] = value.replace("=", ":")
            notice(f"{name}={value} is read as {os.environ[name]}")


def report_interrupt(kind, *error):
    """sys.excepthook until the imports are done: Ctrl-C is one line, of rank 0."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *error)
    elif os.environ.get("RANK", "0") == "0":
        print_error("interrupted")


def accept_old_names(parser):
    """Have a parser take the flags of OLD_NAMES and WITHOUT_EFFECT that suit it."""
    known = parser._option_string_actions
    for old, ours in OLD_NAMES.items():
        if ours in known:
            known.setdefault(old, known[ours])
    for old, (ours, values) in WITHOUT_EFFECT.items():
        if ours in known and old not in known:
            parser.add_argument(old, nargs="?", type=str.lower, choices=values,
                                default=argparse.SUPPRESS, help=argparse.SUPPRESS)


# ---- --config FILE and OUTPUT_DIR/run.yaml


def read_config(parser, words):
    """The command line for the YAML file of `flag: value` lines that --config names. Values stay
    as they are written (on, 5e-5, 007); an empty one or null gives no flag. UserError.
    """
    finder, known, made, found = Parser("", add_help=False), parser._option_string_actions, [], []
    finder.add_argument("--config")
    file = finder.parse_known_args(words)[0].config
    if not file or "--config" not in known:
        return []
    import yaml  # comes with transformers
    require(os.path.isfile(file), f"--config {file}: no such file")     # a pipe would block
    try:
        tree = yaml.compose(Path(file).read_text(encoding="utf-8"), yaml.BaseLoader)
    except (OSError, yaml.YAMLError, RecursionError, UnicodeError) as error:
        raise UserError(f"--config {file}: cannot be read as YAML ({' '.join(str(error).split())})")
    require(tree is None or isinstance(tree, yaml.MappingNode),
            f"--config {file}: must be lines of flag: value")
    for node, part in tree.value if tree else ():
        key, value = node.value, part.value
        flag, name = f"--{key}", f"--config {file}: {key}"
        if key in RETIRED and RETIRED[key] in (None, value):
            notice(f"{name}: is no longer a flag, and ignored")
            continue
        require(flag in known and key not in ("config", "help"),
                f"{name}: no such flag; --help lists all")
        require(known[flag].dest not in found, f"{name} is there twice")
        found.append(known[flag].dest)
        items = value if isinstance(part, yaml.SequenceNode) else [part]
        require(all(isinstance(item, yaml.ScalarNode) for item in items),
                f"{name} takes a value or a list")
        if items is value:
            made += [flag, *(item.value for item in items)]
        elif isinstance(known[flag], argparse.BooleanOptionalAction):
            require(value.lower() in BOOLEAN, f"{name}: {value} is neither true nor false")
            made.append(flag if BOOLEAN[value.lower()] else f"--no-{key}")
        elif part.style or value not in ("", "~", "null"):      # a quoted one is a value
            made.append(f"{flag}={value}")      # one word: it may begin with a dash
    return made


def config_text(args, script):
    """The flags as given, as the YAML that --config of the script takes."""
    lines = [f"# {Path(script).name} --config {CONFIG} repeats this run; later flags override it"]
    for name, value in args.given.items():
        if value is not None and name not in ("config", "dry_run"):     # JSON's values are YAML's
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


# ---- Flags and values


def choice(names, wrong):
    """type= of a flag with the values {text in lower case: value}. wrong: "is neither a nor b"."""
    def of(text):
        if text.lower() not in names:
            raise argparse.ArgumentTypeError(f"{text!r} {wrong}")
        return names[text.lower()]
    return of


# true or false as Hugging Face's scripts take them
boolean = choice(BOOLEAN, "is neither true nor false")
# of --gradient_checkpointing: its mode, or None
recomputation = choice({"all": "all", "selective": "selective"} | dict.fromkeys(TRUE, "all")
                       | dict.fromkeys(FALSE), "is neither all, selective, true nor false")


def trainer_flags(p):
    """Flags of every trainer, with train_v2_ddp.py's defaults; the others call p.set_defaults."""
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
    flag("--parallel", "ddp", "replicas, or shards over all GPUs, in each node, or in groups of N",
         type=sharding, metavar="ddp|fsdp|hsdp|hsdp:N")
    flag("--shard_size", 0, argparse.SUPPRESS)          # the N of --parallel hsdp:N
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


def compile_flag(parser):
    """--compile of a trainer; dist.choose_compile turns auto into True or False."""
    parser.flag("--compile", "auto", "torch.compile each layer; auto: on GPUs, where it can",
                type=choice({"auto": "auto"} | BOOLEAN, "is neither auto, true nor false"),
                nargs="?", const=True, metavar="auto|true|false")


def alias(**names):
    """type= of a flag some of whose values have other names elsewhere: {theirs: ours}."""
    return lambda text: names.get(text.lower(), text)


def sharding(text):
    """type= of --parallel, and of DeepSpeed's flag: its stage 3 shards what FSDP2 shards."""
    if "zero3" in text.lower():
        return "fsdp"
    if not re.fullmatch(r"ddp|fsdp|hsdp(:\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ddp, fsdp or hsdp; of DeepSpeed's stages zero3 is fsdp")
    return text


def usable_cpus():
    """Number of cores that this process may use: the job's share, not the whole node."""
    return len(os.sched_getaffinity(0))


def cpus_per_rank():
    """usable_cpus of each process of this node, at least 1."""
    return max(1, usable_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def local_ranks(ranks):
    """Number of `ranks` processes on one node: torchrun's setting, else up to 8."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 8)))


# ---- Checks; all raise UserError


def check_values(args, names, good, words):
    """Check that the flags of `names` (a string) which are set are good(value)."""
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
    """Values and combinations of the flags that trainers share, where a trainer has them."""
    at_least_one(args, "per_device_train_batch_size per_device_eval_batch_size num_train_epochs "
                 "logging_steps max_bad_steps collective_timeout wait_timeout lora_rank lora_alpha "
                 "gradient_accumulation_steps")
    zero_or_more(args, "max_tokens_per_batch global_batch_size max_steps warmup_steps eval_steps "
                 "save_steps save_total_limit num_workers preprocess_num_proc max_length shard_size"
                 " scale_lr_from_batch weight_decay max_grad_norm learning_rate seed dry_run")
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
    """--parallel and what goes with it; fills in --shard_size."""
    args.parallel, _, size = args.parallel.partition(":")
    args.shard_size, hsdp = int(size or args.shard_size), args.parallel == "hsdp"
    require(hsdp or not args.shard_size, "--shard_size needs --parallel hsdp")
    require(args.parallel != "ddp" or getattr(args, "reshard_after_forward", True)
            and not getattr(args, "cpu_offload", False),
            "--no-reshard_after_forward and --cpu_offload need --parallel fsdp or hsdp")
    require(args.gradient_checkpointing != "selective" or args.compile is not True,
            "--gradient_checkpointing selective does not go with --compile; drop one of the two")
    if hsdp:
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
            f"--base_dtype {kind} needs --use_lora and --bf16{' or --fp16' * nf4}")
    if nf4:
        require(ddp and not args.use_dora and not args.float8 and args.compile is not True,
                "--base_dtype nf4 needs --parallel ddp, and no --use_dora, --float8 or --compile")
        require_package("bitsandbytes", "--base_dtype nf4")


def check_drop_bad(args, checks):
    """Make args.drop_bad the tuple of the checks whose samples are dropped."""
    names = {name for value in args.drop_bad or () for name in value.split(",") if name}
    for name in names - {*checks}:
        raise UserError(f"--drop_bad {name}: no such check; there are {', '.join(checks)}")
    names |= {*checks} if args.drop_bad == [] else {"too_long"} if args.drop_too_long else set()
    args.drop_bad = tuple(name for name in checks if name in names)


def set_intervals(args, total_steps, before, validates, **own):
    """Set the intervals that no flag names, by the length of the run -> lines that show them.
    before: the flags of the checkpoint to resume, or {}: that run's intervals stay, however long
    this one is. own: {flag: steps} of a trainer with other defaults. validates: whether there is
    anything to validate.
    """
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
    for flag, what in late.items():
        if getattr(args, flag, 0) > total_steps:
            lines.append(f"note       --{flag} {getattr(args, flag)} is longer than the run of "
                         f"{total_steps} steps: {what}")
    return "\n".join(lines)
