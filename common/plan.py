"""What --dry_run prints and --auto chooses by: a run's packs, memory (step_memory.py) and disk."""
import functools
import importlib.util
import os
import re
import shutil
import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, resume, tensor_files
from common.distributed import UserError, rank0_first
from common.flags import local_ranks, named, need
from core.problems import collect
from common.step_memory import Setup
from common.text import GIB, counted, size
from core import metrics, recomputation
from core.packing import PackOrder

# FLOP/s of large bf16 products, as docs/speed.md assumes them
RATES = (("an H200", 790e12), ("an RTX 3090", 71e12))
USABLE = 0.95           # of a GPU's memory, as long as no estimate has been compared with a GPU
MARGIN = "5 % of it left for fragmentation"
INDENT = "\n           "
INSTALL = "compiler   no {} here, which a GPU's kernels need: apt-get install gcc python3-dev\n"
ROUNDED = 1.4           # pinned memory of a tensor is a power of two; of Qwen3 4B's, all together
PINNED = "pinned_max_round_threshold_mb"    # the allocator's option against that, in torch 2.13
FLAGS = {"parallel": "parallel", "max_tokens_per_batch": "budget",
         "per_device_train_batch_size": "batch_size", "gradient_checkpointing": "recompute",
         "gradient_accumulation_steps": "accumulation", "base_dtype": "base_dtype",
         "cpu_offload": "offload"}      # {flag: of Setup}


def setup_of(args, ranks):
    """Setup of a trainer's parsed flags. ranks: how many processes train."""
    found = {field: getattr(args, flag) for flag, field in FLAGS.items() if hasattr(args, flag)}
    fp16 = getattr(args, "fp16", False)     # takes the memory of bf16
    whole = fp16 or getattr(args, "float8", False) or found.get("base_dtype") == "nf4"
    return Setup(ranks, bf16=args.bf16 or fp16, fp16=fp16, whole=whole, may_round=may_round(args),
                 reshard=getattr(args, "reshard_after_forward", None), adapters=args.use_lora,
                 shard_size=args.shard_size, **found)


def may_round(args):
    """Whether the other flags let frozen layers be kept in four bits."""
    other = ("compile", "float8", "use_dora", "cpu_offload")
    return (getattr(args, "base_dtype", "") is None and args.use_lora and (args.bf16 or args.fp16)
            and not any(getattr(args, flag, False) for flag in other))


def can_round():
    """Whether the package that does so is there."""
    return importlib.util.find_spec("bitsandbytes") is not None


# --------------------------------------------------------------------------------------------------
# Memory of one GPU


def memory_text(setup, found, pack):
    """The table of one GPU's memory. pack: how large the worst one is."""
    worst = f"worst pack, {pack}{recomputation.NOTES[setup.recompute]}"
    notes = {"weights": "a shard" if setup.fsdp else "whole on every GPU",
             "gradients": "fp32", "optimizer": "two fp32 moments", "average": "fp32",
             "teacher": "frozen, a shard" if setup.fsdp else "frozen, whole on every GPU",
             "copies": "gathered layers", "activations": f"{worst}; logits, casts, gradients too",
             "fixed": "CUDA context and libraries: a guess",
             "peak estimate": f"reached in {max(found.stages, key=found.stages.get)}; "
                              "parts come and go"}
    rows = found.parts | {"peak estimate": found.peak}
    return INDENT.join(f"{name:<13}  {rows[name] / GIB:9.2f} GiB  {note}"
                       for name, note in notes.items() if rows.get(name))


def gpu_memory(gib=None):
    """Bytes of one GPU: --gpu_memory, or what the GPU here has, or 80 GiB."""
    if not gib and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return (gib or 80) * GIB


def refuse(what, helps):
    """Raise UserError. helps: {text: whether it would help}."""
    left = ", ".join(text for text, use in helps.items() if use)
    raise UserError(f"{what}; what helps: {left or 'shorter samples'}")


def check_memory(found, limit, setup):
    """Raise UserError when a Memory leaves no margin below a limit in bytes."""
    if found.peak <= USABLE * limit:
        return
    # what no pack changes is too much already?
    smaller = found.peak - found.parts["activations"] <= USABLE * limit
    samples = "max_tokens_per_batch" if setup.budget else "per_device_train_batch_size"
    shards = not (setup.fsdp or setup.whole)
    refuse(f"memory: about {size(found.peak)} needed on each GPU, which has {size(limit)}, "
           f"{MARGIN}",
           {"--gradient_checkpointing": smaller and not setup.recompute,
            "--gradient_checkpointing all": smaller and setup.recompute == "selective",
            f"a smaller --{samples}": smaller and (setup.budget or setup.batch_size > 1),
            f"--bf16{' (T4, V100: --fp16)' * (setup.adapters is not None)}": not setup.bf16,
            f"--base_dtype nf4{'' if can_round() else ' (pip install bitsandbytes)'}":
            setup.may_round and setup.base_dtype is None and not setup.fsdp,
            "--parallel fsdp": shards and setup.ranks > 1,
            "--gradient_accumulation_steps 1": setup.fsdp and setup.accumulation > 1,
            "--reshard_after_forward": setup.fsdp and setup.reshard is False,
            "--cpu_offload": setup.fsdp and setup.offload is False,
            "--parallel fsdp --cpu_offload": shards and setup.offload is False,
            "--use_lora": setup.adapters is False})


# --------------------------------------------------------------------------------------------------
# Host and disk


def host_memory(meminfo="/proc/meminfo"):
    """Bytes of host memory that are free here, or what Slurm gives the job, if that is less."""
    free = 1024 * int(re.search(r"MemAvailable: +(\d+) kB", Path(meminfo).read_text())[1])
    return min(free, 2**20 * int(os.environ.get("SLURM_MEM_PER_NODE", 0)) or free)  # 0: all of it


def checkpoint_bytes(model, trained_only, average=False):
    """(weights, moments) bytes of a checkpoint. trained_only: adapters. average: saved as well."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(p.nbytes for p in (trained if trained_only else model.parameters()))
    return weights * (1 + average), 8 * sum(p.numel() for p in trained)


def staged_bytes(setup, weights, moments):
    """Bytes of pinned memory that a save takes on the node of rank 0, which copies most.

    Of checkpoint_bytes. Under DDP rank 0 copies all that is saved, else each writer its own, but
    rank 0 all adapters.
    """
    writers, here = tensor_files.writers(setup.ranks), 1
    if setup.fsdp:
        here = sum(rank < local_ranks(setup.ranks) for rank in writers) / len(writers)
    allocator = [os.environ.get(f"PYTORCH_{name}ALLOC_CONF", "") for name in ("CUDA_", "")]
    rounded = 1 if PINNED in (allocator[0] or allocator[1]) else ROUNDED
    return rounded * (weights * (1 if setup.adapters else here) + moments * here)


def check_host(needed, limit, setup):
    """Raise UserError when a node needs more host memory than a limit, both in bytes."""
    helps = {"a node or Slurm job with more (--host_memory GIB plans for another machine)": True,
             "no --cpu_offload": setup.offload, "more nodes": setup.fsdp,
             "--parallel fsdp on several nodes": not setup.fsdp,
             "--use_lora": setup.adapters is False}
    if needed > limit:
        refuse(f"host memory: about {size(needed)} needed by the {local_ranks(setup.ranks)} ranks "
               f"of a node, which has {size(limit)}", helps)


def lacking():
    """What this machine has not that Triton builds a kernel's launcher with, in words, or ""."""
    there = {"C compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
             "Python.h": Path(sysconfig.get_path("include"), "Python.h").exists()}
    return " and no ".join(what for what, found in there.items() if not found)


def existing_folder(path):
    """The folder itself, or the nearest one above it that exists."""
    path = Path(path).absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_writable(path, flag):
    """Raise UserError unless a folder is there and can be written, or can be made."""
    try:
        with tempfile.TemporaryFile(dir=existing_folder(path)):
            pass
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror})")


def free_disk(path):
    """Bytes free on the disk that `path` is or will be on."""
    return shutil.disk_usage(existing_folder(path)).free


def check_disk(path, needed, what):
    """Raise UserError when the disk of `path` has fewer than `needed` bytes free."""
    need(needed <= free_disk(path), f"{path}: {what} need {size(needed)}, its disk has "
                                    f"{size(free_disk(path))} free")


def folder_bytes(path):
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def checkpoints_at_once(args, steps, validates):
    """Most checkpoints that stand on disk together in a run of `steps` steps, with the one being
    written. --save_minutes may save at any step; without --save_total_limit that is not counted.
    """
    limit = args.save_total_limit
    intervals = [args.save_steps, args.eval_steps if validates else 0]
    saves = 1 + sum(steps // interval for interval in intervals if interval)
    if not limit:
        return saves
    return min(steps + 1 if getattr(args, "save_minutes", 0) else saves, limit + 1 + validates)


def print_room(args, setup, found, pack, saved, steps, validates):
    """Print what a run takes of GPU, host and disk; UserError with all that it will not fit into.

    found: Memory; pack: how large the worst one is. saved: of checkpoint_bytes. steps: to go.
    """
    local, one, limit = local_ranks(setup.ranks), sum(saved), gpu_memory(args.gpu_memory)
    offloaded, staged = found.host * local, staged_bytes(setup, *saved)
    host_limit = getattr(args, "host_memory", None) * GIB if getattr(args, "host_memory", None) else host_memory()
    lacks = "" if torch.cuda.is_available() else lacking()      # run.start tries a kernel there
    most = checkpoints_at_once(args, max(0, steps), validates)
    have = sum(folder_bytes(path) for _, path in checkpoint.checkpoints(args.output_dir))
    print(f"memory     estimate for one GPU; it has {size(limit)}, {MARGIN}{INDENT}"
          f"{memory_text(setup, found, pack)}\n"
          f"host       {size(offloaded + staged)} for the {counted(local, 'rank')} of a node: "
          f"{size(offloaded)} offloaded, {size(staged)} copied by a save; it has "
          f"{size(host_limit)}\n"
          f"{lacks and INSTALL.format(lacks)}"
          f"disk       {size(one)} a checkpoint, at most {most} at once: {size(one * most)}; "
          f"{size(free_disk(args.output_dir))} free for --output_dir")
    collect(True, lambda: check_memory(found, limit, setup),
            lambda: check_host(offloaded + staged, host_limit, setup),
            lambda: check_disk(args.output_dir, one * most - have, f"{most} checkpoints"))


# --------------------------------------------------------------------------------------------------
# Model and packs


def head_text(setup, model):
    """What runs where, and the model."""
    return (f"plan       {counted(setup.ranks, 'GPU')}, {setup.parallel}, "
            f"{'fp16' if setup.fp16 else 'bf16' if setup.bf16 else 'fp32'}\n"
            f"{metrics.model_text(model, setup.adapters)}; the weight files have them all")


def time_text(flops, shares):
    """The least that training steps of so many FLOPs on each GPU take. shares: for each of RATES, the
    most of its rate that such steps reach by count (bench/roofline.py).
    """
    times = [f"{metrics.duration(flops / rate / share)} on {gpu}" for (gpu, rate), share in zip(RATES, shares)]
    return (f"time       at least {' or '.join(times)}, by count of the steps' kernels; encoding,"
            f"{INDENT}loading, validation and saves come on top")


def epoch_sums(order, epochs, values):
    """Sums (packs,) int64 of values (n_samples,) over each pack of some epochs of a PackOrder."""
    found = []
    for plan in map(order.epoch, epochs):
        sums = np.concatenate([[0], np.cumsum(values[plan.samples], dtype=np.int64)])
        found.append(sums[plan.offsets[1:]] - sums[plan.offsets[:-1]])
    return np.concatenate(found)


def packs_text(setup, order, lengths, about):
    """How long samples are, how many packs an epoch has, how full and how even they are.

    lengths: (n,) tokens of the samples. about: what an average pack holds. One of fewer tokens than
    the budget is filled up to it; packs of one empty slot fill the last step.
    """
    low, middle, high = np.quantile(lengths, (0.05, 0.5, 0.95)).round().astype(int)
    tokens, per_step = epoch_sums(order, [0], lengths), setup.ranks * setup.accumulation
    slots = np.full(-(-len(tokens) // per_step) * per_step, setup.budget or 1)
    slots[:len(tokens)] = np.maximum(tokens, setup.budget)
    side_by_side = slots.reshape(-1, setup.ranks)
    balance = (side_by_side.mean(1) / side_by_side.max(1)).mean()
    return (f"lengths    {lengths.sum():,} tokens an epoch; of a sample {lengths.min():,} at "
            f"least, {middle:,} in the middle, {low:,} to {high:,} for nine of ten, "
            f"{lengths.max():,} at most\n"
            f"packs      {order.packs_per_epoch:,} an epoch; {about}{INDENT}"
            f"{tokens.sum() / slots.sum() * 100:.1f}% of slots hold tokens; balance of the ranks "
            f"(mean over max of their slots) {balance * 100:.0f}%")


# --------------------------------------------------------------------------------------------------
# --auto: rank 0 tries setups from the fastest on and takes the first that fits. What a flag names
# stays. A run that resumes takes the choice of its checkpoint, whatever memory there is now.

BUDGETS = (16384, 8192, 4096, 2048, 1024)       # tokens of a pack
LARGE = 4096        # tokens of a micro-step that keep the GPU, not the host, busy
EPOCH_STEPS = 10    # optimizer steps that an epoch has at least, where no flag says their size
MODES = {None: "no recomputation", "selective": "cheap parts recomputed",
         "all": "layers recomputed"}    # from the fastest on


def ways(args, setup):
    """Setups with other recomputation and sharding, from the fastest on, where flags leave them."""
    modes = [None, "all"] if args.compile is True else MODES
    if "gradient_checkpointing" in named(args):
        modes = [setup.recompute]
    group = setup.shard_size or local_ranks(setup.ranks)
    nodes = setup.ranks > group and setup.ranks % group == 0    # sharding inside each comes first
    kinds = ["ddp", *(["hsdp"] if nodes else []), "fsdp"]
    if "parallel" in named(args) or setup.ranks == 1 or setup.whole:
        kinds = [setup.parallel]
    return [replace(setup, recompute=mode, parallel=kind) for mode in modes for kind in kinds]


def by_tokens(args, setup, lengths, order_of, longest=0):
    """Setups with packs of tokens, the fastest first: what costs time alone, then a base in four
    bits, which costs accuracy as well; at last with the state on the host.

    lengths: (n,) tokens of the samples. order_of(budget): PackOrder. longest: tokens of one outside
    of them. A step has the samples of --global_batch_size, or an epoch at least EPOCH_STEPS steps.
    """
    samples, counted = args.global_batch_size, "gradient_accumulation_steps" in named(args)
    step = samples * lengths.mean() if samples else lengths.sum() / EPOCH_STEPS
    each = step / (setup.ranks * (setup.accumulation if counted else 1))
    longest = max(longest, int(lengths.max()))
    room = [budget for budget in BUDGETS if budget >= longest] or [-(-longest // 1024) * 1024]
    budgets = [budget for budget in room if budget <= each] or room[-1:]
    if named(args) & {"max_tokens_per_batch", "per_device_train_batch_size"}:
        budgets = [setup.budget]
    large = [budget for budget in budgets if budget >= LARGE] or budgets[:1]
    tried = [replace(way, budget=budget) for way in ways(args, setup) for budget in large]
    tried += [replace(tried[-1], budget=budget) for budget in budgets if budget not in large]
    last = tried[-1]
    if setup.may_round and can_round():
        tried += [replace(way, base_dtype="nf4") for way in tried if not way.fsdp]
    if setup.offload is False and not (setup.whole or named(args) & {"parallel", "cpu_offload"}):
        tried.append(replace(last, parallel="fsdp", offload=True))
    for way in tried:
        if samples and way.budget and not counted:
            packs = order_of(way.budget).packs_per_epoch * samples / len(lengths)
            way = replace(way, accumulation=max(1, round(packs / setup.ranks)))
        yield way


def choose_packs(args, world, ranks, lengths, memory_of, longest=0):
    """decide() with packs of tokens. lengths, longest: of by_tokens. memory_of(setup, PackOrder)."""
    @functools.cache
    def order_of(budget):
        return PackOrder(lengths, tokens_per_pack=budget, seed=args.seed,
                         samples_per_pack=args.per_device_train_batch_size,
                         group_by_length=getattr(args, "group_by_length", False))
    setups = by_tokens(args, setup_of(args, ranks), lengths, order_of, longest)
    return decide(args, world, setups, lambda setup: memory_of(setup, order_of(setup.budget)),
                  lambda setup: len(lengths) / order_of(setup.budget).packs_per_epoch)


def decide(args, world, setups, memory_of, samples_of):
    """Set the flags FLAGS that are open, the same on every rank -> whether any has changed.

    setups: the fastest first. memory_of(setup): Memory; samples_of(setup): of an average micro-step
    of a rank. UserError when none fits; a dry run takes the last one, and finds that later.
    """
    chosen, lines = rank0_first(world, choice, args, iter(setups), memory_of, samples_of)
    changed = any(getattr(args, flag, value) != value for flag, value in chosen.items())
    for flag, value in chosen.items():
        setattr(args, flag, value)
    if world.is_main:
        print(f"auto       {INDENT.join(lines)}")
    return changed


def choice(args, setups, memory_of, samples_of):
    """({flag: value}, lines of text) of decide."""
    if earlier := resume.last_args(args.output_dir, args.resume):
        return earlier_choice(args, next(setups).ranks, earlier)
    limit, lines = gpu_memory(args.gpu_memory), []
    for setup in setups:
        found = memory_of(setup)
        fits = found.peak <= USABLE * limit
        pack = f"{setup.budget:,} tokens" if setup.budget else f"batches of {setup.batch_size:,}"
        how = (MODES[setup.recompute] + ", NF4" * (setup.base_dtype == "nf4")
               + ", offloaded" * bool(setup.offload))
        lines.append(f"{setup.parallel:<5}{pack:>15}  {how:<28} {found.peak / GIB:8.2f} GiB  "
                     f"{'taken' if fits else 'too much'}")
        if fits:
            break
    if args.dry_run is None:
        check_memory(found, limit, setup)
    packs = setup.ranks * setup.accumulation
    chosen = {flag: getattr(setup, field) for flag, field in FLAGS.items() if hasattr(args, flag)}
    return chosen | {"packs_per_step": packs}, [
        f"{'the first' if fits else 'none'} that fits one GPU's {size(limit)}, {MARGIN}, from the "
        "fastest on:", *lines, f"cost: {cost_text(setup)}",
        f"a step: {counted(setup.ranks, 'rank')} x {counted(setup.accumulation, 'micro-step')}, "
        f"about {packs * samples_of(setup):,.0f} samples"]


def cost_text(setup):
    """What a Setup costs beside the fastest one, in time by count of products."""
    found = {"selective": "cheap parts of layers computed twice",
             "all": f"{50 if setup.adapters else 33} % more products, layers being computed again"}
    parts = [found[setup.recompute]] if setup.recompute else []
    if setup.base_dtype == "nf4":
        parts.append("a base rounded to four bits, made again in each forward and backward")
    if setup.offload:
        other = " (pip install bitsandbytes: --auto would take a base in four bits instead)"
        parts.append("weights and gradients cross the bus in each step"
                     + other * (setup.may_round and not can_round()))
    return "; ".join(parts) or "nothing"


def earlier_choice(args, ranks, earlier):
    """choice of the run whose flags `earlier` are."""
    chosen = {flag: earlier[flag] for flag in FLAGS if hasattr(args, flag) and flag in earlier
              and flag not in named(args)}
    packs = earlier.get("packs_per_step")
    if packs and "gradient_accumulation_steps" not in named(args):
        need(packs % ranks == 0,
             f"--auto: this run has {packs} packs a step, which {ranks} ranks cannot share out; "
             "take another number of ranks, or give --gradient_accumulation_steps")
        chosen |= {"gradient_accumulation_steps": packs // ranks, "packs_per_step": packs}
    return chosen, ["as the run that is resumed began: " + ", ".join(
        f"--{flag} {chosen[flag] or 'off'}" for flag in FLAGS if chosen.get(flag) is not None)]
