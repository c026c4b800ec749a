"""Flags of the scripts, errors of one line, and safe printing of text from users' files.

Imports the standard library only, so --help and mistakes are answered before torch is imported.
"""
import argparse
import contextlib
import ctypes
import faulthandler
import importlib.util
import json
import math
import os
import re
import signal
import sys
import time
import traceback
from argparse import SUPPRESS
from pathlib import Path

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
CONFIG = "run.yaml"     # in OUTPUT_DIR: the flags that repeat a run
CPUS = len(os.sched_getaffinity(0))     # cores of this job, which may be a share of the node

# {name of a flag in Hugging Face's scripts, ms-swift or earlier trainers: ours}; not in --help
OLD_NAMES = {
    "--model_name_or_path": "--model_path", "--lora_r": "--lora_rank", "--deepspeed": "--parallel",
    "--train_data": "--train_data_file", "--train_data_dir": "--train_data_file",
    "--eval_data": "--eval_data_file", "--eval_data_dir": "--eval_data_file",
    "--dataloader_num_workers": "--num_workers", "--lr_scheduler_type": "--lr_scheduler",
    "--disable_evaluation": "--disable_eval", "--resume_from_checkpoint": "--resume",
    "--torch_compile": "--compile"}
# {flag that a trainer accepts without effect: its values, None = any}
WITHOUT_EFFECT = {
    "--optim": ("adamw_torch_fused", "adamw_torch"), "--dataloader_pin_memory": TRUE,
    "--freeze_audio_tower": TRUE + FALSE, "--freeze_audio_encoder_proj": TRUE + FALSE,
    "--enable_strategic_logging": TRUE + FALSE, "--strategic_logging_steps": None}
# in http://user:password@host?api_key=...
SECRETS = re.compile(r"(?i)(?<=://)[^/?#\s]*(?=@)|"
                     r"(?<=[?&])(?=[\w-]*=)[\w-]*(?:key|token|secret|password)[\w-]*=[^&#\s]*")


class UserError(Exception):
    """A mistake in flags, files or data. Rank 0 prints it as one line and all processes exit."""


def require(condition, message):
    if not condition:
        raise UserError(message)


# ---- Text. A name in a data file may hold line feeds and terminal escapes, or megabytes.


def one_line(text, limit=500):
    """str(text) as one line of about `limit` characters without control characters or passwords."""
    text = SECRETS.sub("***", str(text))        # before the cut, which may remove the "@"
    if len(text) > limit:
        cut = f"[... {len(text) - limit:,} characters ...]"
        text = text[:limit // 2] + cut + text[-limit // 2:]
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def print_error(text):
    """Print why this process exits; later lines are indented. torchrun repeats the last line."""
    lines = [one_line(line, 2000).removeprefix("  ") for line in str(text).strip().split("\n")]
    print("\n  ".join(lines), file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": lines[-1].strip(), "extraInfo": {"timestamp": int(time.time())}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": report}))


def report_error(kind, error, trace):
    """sys.excepthook: one line for Ctrl-C, a UserError, or an OSError that names its file."""
    if kind is KeyboardInterrupt:
        print_error("interrupted")
    elif isinstance(error, UserError) or isinstance(error, OSError) and error.filename:
        print_error(f"error: {error}")
    else:
        lines = traceback.format_exception(kind, error, trace)
        print_error(f"rank {os.environ.get('RANK', '0')} failed:\n{''.join(lines)}")


@contextlib.contextmanager
def error_names_file(path):
    """Context whose OSErrors become UserErrors about `path`: that of a full disk names no file."""
    try:
        yield
    except OSError as error:        # safetensors' and numpy's have a text only
        raise UserError(f"{path} cannot be read or written ({error.strerror or error})")


def first_line(error):
    """The first line of an error's text, or its class where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def plural(number, noun):
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number} {noun if number == 1 else noun + 's'}"


def problem_text(problems):
    """One message with the first 20 problems and the number of all."""
    more = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
    lines = [f"{len(problems)} problems:", *map(str, problems[:20]), *more]
    return str(problems[0]) if len(problems) == 1 else "\n  ".join(lines)


def require_package(name, purpose, install=None):
    """UserError that says how to install a package if it is missing. purpose: what needs it."""
    require(importlib.util.find_spec(name),
            f"{purpose}: the package {name} is missing: pip install {install or name}")


def remove_secrets(value):
    """A JSON value, such as vars(args), whose URLs have *** for user names, passwords and keys."""
    if isinstance(value, dict):
        return {name: remove_secrets(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [remove_secrets(item) for item in value]
    return SECRETS.sub("***", value) if isinstance(value, str) else value


# ---- Parsing

# Limits of a number: words for a message, and the test
ZERO_OR_MORE = "be 0 or more", lambda v: v >= 0
COUNT = "be at least 1", lambda v: v >= 1
ABOVE_0 = "be above 0", lambda v: v > 0
BELOW_1 = "be at least 0 and below 1", lambda v: 0 <= v < 1
SHARE = "lie between 0 and 1", lambda v: 0 <= v <= 1
PROBABILITY = "be above 0 and at most 1", lambda v: 0 < v <= 1
SEED = "be below 2**62, and 0 or more", lambda v: 0 <= v < 2**62


class Parser(argparse.ArgumentParser):
    """ArgumentParser without abbreviations, whose meaning would change with each new flag."""

    def __init__(self, description):
        super().__init__(None, "%(prog)s [--flag value ...]", description, allow_abbrev=False)

    def flag(self, name, default, help, limits=ZERO_OR_MORE, **options):
        """add_argument() with the type of the default, and the default in the help. A number must
        be finite and within `limits`."""
        words, is_good = limits
        kind = options.get("type", type(default))

        def number(text):
            value = kind(text)
            require(abs(value) < math.inf and is_good(value), f"{name} is {value}; it must {words}")
            return value

        if kind in (int, float):
            number.__name__ = kind.__name__     # in argparse's messages
            options["type"] = number
        if default and "default:" not in help and help != SUPPRESS:
            help += " (default: %(default)s)"
        self.add_argument(name, default=default, help=help, **options)

    def switch(self, name, help, default=False, on=True):
        """Add a flag of the forms --bf16, --bf16 true, --bf16 false, --no-bf16. on: its value for
        true."""
        values = dict.fromkeys(TRUE, on) | dict.fromkeys(FALSE, False)
        self.add_argument(name, nargs="?", type=alias(**values), choices=(on, False, default),
                          const=on, default=default, metavar="true|false", help=help)
        self.add_argument(f"--no-{name[2:]}", dest=name[2:], action="store_false", help=SUPPRESS)

    def error(self, message):
        raise UserError(message.removeprefix("argument "))


class Args(argparse.Namespace):
    """Parsed flags. Not in vars(): `given`, the flags before checks derive values; `named`, the set
    of flags that the user names; `ranks`, the number of ranks: N of --dry_run N, or torchrun's."""
    __slots__ = ("given", "named", "ranks")


def parse(parser, check=None, argv=None):
    """Parse a command line (default: the process's) -> Args. check(args, world_size): UserError.
    A mistake prints one line on rank 0 and exits, with status 2, or 1 if check() found it. From
    here on this process ends with its torchrun, and a trainer only records SIGTERM and SIGUSR1."""
    words, status = sys.argv[1:] if argv is None else list(argv), 2
    is_main = os.environ.get("RANK", "0") == "0"
    if "TORCHELASTIC_RUN_ID" in os.environ:     # torchrun's ranks end with it
        end_with_parent()
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")   # no stack traces of a lost store
    if argv is None:
        faulthandler.enable(2)      # a crash in native code prints the stack of each thread
        # a log file shows each line at once
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
        sys.argv = remove_secrets(sys.argv)     # W&B stores the command line of a run
        sys.excepthook = report_error
    if setting := os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):    # many write =, torch wants a colon
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = setting.replace("=", ":")
    known = parser._option_string_actions
    known |= {old: known[new] for old, new in OLD_NAMES.items() if new in known} | known
    try:
        # later words count, so flags of the command line override the file's
        words = read_config(parser, words) + words
        args = parser.parse_args(words, Args())
        args.given, status = remove_secrets(vars(args)), 1
        args.named = {known[name].dest for word in words if (name := word.split("=")[0]) in known}
        dry_run = getattr(args, "dry_run", False)   # False: no trainer; None: a run; else GPUs
        args.ranks = int(dry_run or os.environ.get("WORLD_SIZE", "1"))
        if check:
            check(args, args.ranks)
    except UserError as error:
        # the others wait while rank 0 reports the same mistake
        print_error(f"error: {error}") if is_main else time.sleep(5)
        sys.exit(status)
    # CHECK_FLAGS: set by launch/slurm.sh for DRY_RUN=1; one process plans for all
    if os.environ.get("CHECK_FLAGS") or dry_run and not is_main:
        sys.exit(0)
    if dry_run is None:
        catch_signals()
    return args


# ---- --config FILE and OUTPUT_DIR/run.yaml


def read_config(parser, words):
    """Flags of the YAML file that --config names, as words of a command line; [] without --config.
    Values stay as written (on, 5e-5, 007); null gives no flag. UserError."""
    texts = [text for word in words for text in re.split("(?<=^--config)=", word)]
    file = dict(zip(texts, texts[1:])).get("--config")      # the last one counts
    if not file:
        return []
    import yaml  # comes with transformers
    try:
        text = Path(file).read_text(encoding="utf-8")
        values = yaml.load(text, yaml.BaseLoader) or {}
    except (OSError, yaml.YAMLError, UnicodeError) as error:
        raise UserError(f"--config {file}: cannot be read as YAML ({' '.join(str(error).split())})")
    require(isinstance(values, dict), f"--config {file}: must be lines of flag: value")
    file_words, flags = [], parser._option_string_actions.keys() - {"--config", "--help"}
    for name, value in values.items():
        flag, where = f"--{name}", f"--config {file}: {name}"
        require(flag in flags, f"{where}: no such flag")
        require(len(re.findall(rf"^{name}:", text, re.M)) < 2, f"{where} is there twice")
        require(not isinstance(value, dict), f"{where} takes a value or a list")
        if isinstance(value, list):
            file_words += [flag, *map(str, value)]
        elif value not in ("~", "null"):
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


def alias(**names):
    """type= of a flag that also accepts other texts for a value. names: {lower-case text: value}"""
    return lambda text: names.get(text.lower(), text)


def trainer_flags(p, checks):
    """Add the flags of every trainer with train_v2_ddp.py's defaults, which others may replace.
    checks: the names of what may be wrong with a sample."""
    flag, switch = p.flag, p.switch
    for name, values in WITHOUT_EFFECT.items():
        flag(name, SUPPRESS, SUPPRESS, nargs="?", type=str.lower, choices=values)
    # before the run
    flag("--config", None, "YAML file of flags, such as OUTPUT_DIR/run.yaml", metavar="FILE")
    flag("--dry_run", None, "check all, print the plan for N GPUs (default: as launched) and stop",
         COUNT, nargs="?", type=int, const=int(os.environ.get("WORLD_SIZE", "1")), metavar="N")
    # data
    flag("--eval_data_file", None, "validation data; without it --validation_split is held out")
    flag("--drop_bad", None, f"leave out bad samples, all or of some checks: {', '.join(checks)}",
         nargs="*", metavar="CHECK")
    switch("--drop_too_long", SUPPRESS)        # --drop_bad too_long
    # adapters
    switch("--use_lora", "train adapters on a frozen base instead of all weights")
    flag("--lora_rank", 16, "adapter rank", COUNT)
    flag("--lora_alpha", 32, "updates are multiplied by alpha / rank", COUNT)
    flag("--lora_dropout", 0.0, "dropout on adapter inputs, 0 to 1", BELOW_1)
    switch("--use_rslora", "PEFT's rsLoRA: multiply updates by alpha / sqrt(rank) instead")
    switch("--use_dora", "PEFT's DoRA: train the magnitude of each weight row separately; slower")
    # optimization
    flag("--lr_scheduler", "cosine", "after warm-up", choices=("cosine", "linear", "constant"),
         type=alias(constant_with_warmup="constant"))
    flag("--weight_decay", 0.01, "AdamW decay of matrices, not embeddings")
    flag("--adam_beta2", 0.999, "AdamW decay of the variance", BELOW_1)
    flag("--max_grad_norm", 1.0, "clip the global gradient norm, 0 = off")
    flag("--max_bad_steps", 5, "stop after this many non-finite steps in a row", COUNT)
    flag("--seed", 42, "seed of weights, data order, hold-out, noise and dropout", SEED)
    # speed and memory
    switch("--auto", "choose batches, --gradient_checkpointing and --parallel to fit memory")
    flag("--gpu_memory", None, "GiB per GPU (default: this GPU's, or 80)", ABOVE_0, type=float)
    flag("--parallel", "ddp", "one replica per GPU, or shards over all GPUs, a node, or N GPUs "
         "(default: ddp; chats on several GPUs: fsdp)", metavar="ddp|fsdp|hsdp|hsdp:N",
         type=lambda text: "fsdp" if "zero3" in text else text)     # DeepSpeed's, shards the same
    switch("--bf16", "bfloat16 compute; a frozen base is stored in bfloat16")
    switch("--tf32", "TF32 for float32 matrix products on CUDA")
    switch("--gradient_checkpointing", "recompute all layers in backward: less memory", on="all")
    # dist.set_compute turns auto into True or False
    switch("--compile", "torch.compile each layer; auto: on GPUs, where it can", default="auto")
    flag("--num_workers", 2, "threads per rank that load data, 0 = in the trainer")
    flag("--collective_timeout", 600, "seconds until a hanging rank is named and all end", COUNT)
    flag("--wait_timeout", 21600, SUPPRESS, COUNT)      # of data preparation, validation, saves
    # logging and checkpoints
    flag("--output_dir", "./output", "folder for all output; shared by all nodes")
    flag("--logging_dir", "./logs", "parent folder of TensorBoard files")
    flag("--logging_steps", 10, "optimizer steps between log lines", COUNT)
    flag("--per_device_eval_batch_size", 1, "samples per validation batch", COUNT)
    flag("--save_total_limit", 3, "newest checkpoints to keep besides the best, 0 = all")
    flag("--report_to", ["tensorboard"], "tensorboard, wandb, none (default: tensorboard)",
         nargs="+", metavar="NAME", choices=("tensorboard", "wandb", "none"))
    flag("--wandb_project", "flat-trainers", "project at W&B")
    flag("--resume", "auto", "auto (newest intact checkpoint), none, or the folder of a checkpoint",
         type=alias(true="auto", false="none"))


def packing_flags(p):
    """Add the flags that only the trainers of speech and chats share; defaults as above."""
    flag, switch = p.flag, p.switch
    flag("--base_dtype", None, "lora: nf4 keeps the base in four bits", choices=("nf4",))
    flag("--preprocess_num_proc", min(8, CPUS), "processes per node that prepare data")
    flag("--per_device_train_batch_size", 4, "samples per micro-step and rank", COUNT)
    flag("--gradient_accumulation_steps", 1, "micro-steps (default: by the batch, or 1)", COUNT)
    flag("--global_batch_size", 0, "samples per step; derives the accumulation (chats: 128)")
    flag("--learning_rate", 5e-5, "peak (default: 5e-5; chats: 2e-5, with LoRA 2e-4)")
    flag("--max_tokens_per_batch", 0, "pack whole samples up to this many tokens instead; 0 = off")
    flag("--max_length", 0, "most tokens of a sample, 0 = the model's maximum positions")
    flag("--num_train_epochs", 3, "passes over the training samples", COUNT)
    flag("--max_steps", 0, "stop after this many optimizer steps, 0 = use --num_train_epochs")
    flag("--eval_steps", None, "steps between validations, 0 = at the end (default: 1/5)", type=int)
    flag("--save_steps", None, "steps between saves, 0 = at the end (default: 1/10)", type=int)
    switch("--reshard_after_forward", "fsdp: free gathered weights until backward", default=True)
    switch("--cpu_offload", "fsdp, hsdp: keep shards and optimizer in host memory (slow)")
    switch("--fp16", "float16 compute with a scaled loss, for GPUs without bfloat16")
    switch("--float8", "lora, compiled: multiply by frozen weights in float8")


# ---- Checks; all raise UserError


def check_trainer(args, world_size, parser, checks):
    """Check combinations of the flags of trainer_flags; --drop_bad becomes a tuple of `checks`."""
    names = ",".join(["too_long" * args.drop_too_long, *(args.drop_bad or ())]).split(",")
    require({*names} <= {"", *checks}, f"--drop_bad: there are the checks {', '.join(checks)}")
    args.drop_bad = tuple(name for name in checks if name in names or args.drop_bad == [])
    args.report_to = [name for name in args.report_to if name != "none"]
    for name in args.report_to:
        require_package(name, f"--report_to {name}")
    for name, value in vars(args).items():
        if re.match("lora_|use_rslora|use_dora|train_audio", name) and not args.use_lora:
            require(value == parser.get_default(name), f"--{name} needs --use_lora")
    # hsdp:N becomes parallel and shard_size
    require(re.fullmatch(r"ddp|fsdp|hsdp(:[1-9]\d*)?", args.parallel),
            f"--parallel {args.parallel}: there are ddp, fsdp, hsdp, hsdp:N and DeepSpeed's zero3")
    args.parallel, _, size = args.parallel.partition(":")
    usual_size = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", 8)))    # a node
    args.shard_size = int(size or usual_size) if args.parallel == "hsdp" else 0
    require(not args.shard_size or world_size % args.shard_size == 0, f"--parallel hsdp: "
            f"{plural(world_size, 'rank')} cannot be cut into groups of {args.shard_size}")


def check_packing(args, world_size, parser, checks, usual=0):
    """Check combinations of the flags of trainer_flags and packing_flags. Unless it is given,
    derive --gradient_accumulation_steps from --global_batch_size or `usual` samples per step; for
    packs of tokens only the plan of --auto can do so."""
    check_trainer(args, world_size, parser, checks)
    ddp, lora = args.parallel == "ddp", args.use_lora and not args.use_dora
    require(not ddp or args.reshard_after_forward and not args.cpu_offload,
            "--no-reshard_after_forward and --cpu_offload need --parallel fsdp or hsdp")
    require(not args.float8 or args.compile and lora and args.bf16 and ddp,
            "--float8 needs --compile, --use_lora, --bf16 and --parallel ddp, and no --use_dora")
    require(not (args.fp16 and args.bf16), "give --bf16 or --fp16, not both")
    require(ddp or not args.fp16, "--fp16 needs --parallel ddp: FSDP2 computes in bfloat16 here")
    if args.base_dtype == "nf4":
        require(lora and ddp and (args.bf16 or args.fp16) and args.compile is not True
                and not args.float8, "--base_dtype nf4 needs --use_lora, --bf16 or --fp16 and "
                "--parallel ddp, and no --use_dora, --float8 or --compile")
        require_package("bitsandbytes", "--base_dtype nf4")
        args.compile = False
    # a pack is limited by tokens, not by samples; --auto prefers that
    packs_tokens = args.max_tokens_per_batch > 0 or (
        args.auto and "per_device_train_batch_size" not in args.named)
    is_set = args.gradient_accumulation_steps != parser.get_default("gradient_accumulation_steps")
    require(not (is_set and args.global_batch_size),
            "give one of --global_batch_size and --gradient_accumulation_steps")
    counts = args.global_batch_size and not args.auto or getattr(args, "group_by_length", False)
    require(not (counts and packs_tokens), "--global_batch_size, without --auto, and "
            "--group_by_length count samples: not with packs of tokens")
    if is_set:
        return
    samples = args.global_batch_size or usual
    per_micro_step = args.per_device_train_batch_size * world_size
    require(packs_tokens or samples % per_micro_step == 0, f"--global_batch_size {samples} is not "
            f"a multiple of {per_micro_step}, the samples of a micro-step on all ranks")
    args.gradient_accumulation_steps = 1 if packs_tokens else max(1, samples // per_micro_step)
    if packs_tokens and args.auto:
        args.global_batch_size = samples


# ---- Signals that ask a run to stop; a rank ends with its torchrun

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)      # save and stop

_requested = []     # names of received SIGNALS


def catch_signals():
    """From now on SIGNALS are recorded and do not end the process."""
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _requested.append(signal.Signals(number).name))


def stop_requested():
    """Name of the first signal that asked this process to stop, or None."""
    return _requested[0] if _requested else None


def end_with_parent():
    """From now on the kernel kills this process when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # PR_SET_PDEATHSIG
