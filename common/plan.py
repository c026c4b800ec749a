"""What a run would be and take, worked out and printed before it is one: lengths, packing, memory and disk against
what there is, and problems.

Plain numbers and arrays in, lines of text and lists of problems out; nothing is allocated, written or loaded here.
"""
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, recomputation, tensor_files
from common.distributed import UserError, problem_text
from common.flags import local_ranks
from common.memory import GIB
from common.text import counted

USABLE = 0.95               # of a GPU's memory, as long as no estimate has been compared with a GPU
MARGIN = "5 % of it left for fragmentation"
INDENT = "\n           "


@dataclass(frozen=True)
class Setup:
    """How a run computes, as its flags say; None where the trainer has no such flag."""
    ranks: int
    parallel: str               # ddp, fsdp or hsdp
    bf16: bool
    recompute: str | None       # of flags.MODES, or None
    accumulation: int           # micro-steps of an optimizer step
    batch_size: int             # samples or rows of a micro-step, without a budget
    budget: int = 0             # tokens that every pack is filled to, 0: none
    reshard: bool | None = None     # fsdp: a layer is freed after its forward
    offload: bool | None = None     # fsdp: shards and moments are in host memory
    adapters: bool | None = None    # only they are trained
    shard_size: int = 0         # hsdp: GPUs that weights are sharded over, 0: those of a node

    @property
    def fsdp(self):
        """Whether weights are sharded."""
        return self.parallel != "ddp"

    @property
    def shards(self):
        """GPUs that weights are sharded over, where they are; else all."""
        return self.shard_size or local_ranks(self.ranks) if self.parallel == "hsdp" else self.ranks


@dataclass(frozen=True)
class Limits:
    """What a run has to fit into, and the checkpoints that it leaves there, as its flags say."""
    output_dir: str
    save_steps: int             # optimizer steps between checkpoints, 0: at the end
    eval_steps: int             # and between validations
    save_total_limit: int       # newest checkpoints kept, 0: all
    save_minutes: float = 0     # after which a checkpoint comes as well, 0: never
    gpu_memory: float | None = None         # GiB of one GPU, None: what it has here
    host_memory: float | None = None        # GiB of a node, None: what is free here


def setup_of(args, ranks):
    """Setup of the parsed flags of a trainer with token budgets and adapters. ranks: how many processes train."""
    return Setup(
        ranks=ranks, parallel=args.parallel, bf16=args.bf16, recompute=args.gradient_checkpointing,
        accumulation=args.gradient_accumulation_steps, batch_size=args.per_device_train_batch_size,
        budget=args.max_tokens_per_batch, reshard=args.reshard_after_forward, offload=args.cpu_offload,
        adapters=args.use_lora, shard_size=args.shard_size)


def room_of(args):
    """Limits of a trainer's parsed flags."""
    return Limits(
        output_dir=args.output_dir, save_steps=args.save_steps, eval_steps=args.eval_steps,
        save_total_limit=args.save_total_limit, save_minutes=args.save_minutes, gpu_memory=args.gpu_memory,
        host_memory=args.host_memory)


# ---------------------------------------------------------------------------------------------------------------------
# Problems


class Checks:
    """Calls functions that may raise UserError. A run ends at the first one; a dry run notes them all and goes on.

    check(work, ...) -> what work(...) returns; in a dry run None where it fails, and where a positional argument is
    None, since what made that has failed already.
    """

    def __init__(self, dry):
        self.dry, self.problems = dry, []
        self.scratch = tempfile.TemporaryDirectory() if dry else None

    def __call__(self, work, *args, **options):
        if not self.dry:
            return work(*args, **options)
        try:
            return None if any(value is None for value in args) else work(*args, **options)
        except UserError as error:
            self.problems.append(str(error))

    def folder(self, path):
        """Where to write what belongs into `path`: a dry run has a temporary folder for it, and writes nowhere else."""
        return self.scratch.name if self.dry else path

    def settle(self):
        """Raise UserError with all problems so far, if there are any."""
        if self.problems:
            raise UserError(all_problems(list(dict.fromkeys(self.problems))))

    def finish(self):
        """The end of a dry run."""
        self.settle()
        print("dry run ok")


def all_problems(texts):
    """Several UserErrors' texts as one; those that are lists themselves (distributed.problem_text) are taken apart."""
    if len(texts) == 1:
        return texts[0]
    lines = []
    for first, *rest in map(str.splitlines, texts):
        lines += [line.strip() for line in rest] if first.endswith(" problems:") else ["\n    ".join([first, *rest])]
    return problem_text(lines)


def existing_folder(path):
    """The folder itself, or the nearest one above it that exists."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return path


def check_writable(path, flag):
    """Raise UserError unless a folder is there and can be written, or can be made. Leaves nothing behind."""
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
    if needed > free_disk(path):
        raise UserError(f"{path}: {what} need {size(needed)}, its disk has {size(free_disk(path))} free")


def folder_bytes(path):
    """Bytes of all files below a folder."""
    return sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(path) for name in names)


def checkpoints_at_once(steps, save_steps, eval_steps, limit, timed=False):
    """Most checkpoints that stand on disk together in a run of `steps` optimizer steps, one being written included.

    limit: --save_total_limit. eval_steps: None without validation, which saves the best. timed: more may come at any
    step; without a limit they are not counted.
    """
    saves = steps + 1 if timed and limit else 1 + sum(steps // every for every in (save_steps, eval_steps) if every)
    return min(saves, limit + 1 + (eval_steps is not None)) if limit else saves


# ---------------------------------------------------------------------------------------------------------------------
# Lengths and packing


def histogram(lengths, bins=8, width=40):
    """Lines of an aligned histogram of lengths (n,) in tokens; bins are equally wide and end on round numbers."""
    low, high = int(lengths.min()), int(lengths.max())
    step = max(1, -(-(high - low + 1) // bins))
    unit = 10 ** max(0, len(str(step)) - 1)
    step = -(-step // unit) * unit                          # one leading digit
    edges = np.arange(low // step * step, high + step + 1, step)
    counts, _ = np.histogram(lengths, edges)
    digits, count_digits = len(f"{edges[-1]:,}"), len(f"{counts.max():,}")
    return [f"{a:>{digits},} - {b - 1:<{digits},} {n:>{count_digits},} {'#' * -(-width * n // counts.max())}".rstrip()
            for a, b, n in zip(edges, edges[1:], counts) if a <= high]


def packing_report(tokens, ranks, accumulation=1, budget=0):
    """How full and how even an epoch's packs are -> {"useful", "balance"}: shares, 1 is best.

    tokens: (n,) of each pack in order; every `ranks` neighbours run side by side. useful: tokens over slots, where a
    pack has `budget` slots, or, when that is 0, as many as tokens, but one at least: empty packs fill the last step.
    balance: mean over max of the ranks' tokens, averaged over the micro-steps: what waiting for the slowest leaves.
    """
    per_step = ranks * accumulation
    packs = np.zeros(-(-len(tokens) // per_step) * per_step, np.int64)
    packs[:len(tokens)] = tokens
    slots = len(packs) * budget or np.maximum(packs, 1).sum()
    side_by_side = np.maximum(packs, budget or 1).reshape(-1, ranks)
    return {"useful": tokens.sum() / slots, "balance": (side_by_side.mean(1) / side_by_side.max(1)).mean()}


def pack_sums(plan, values):
    """Sum of values (n_samples,) over each pack of a packing.EpochPlan -> (n_packs,) int64."""
    sums = np.concatenate([[0], np.cumsum(values[plan.samples], dtype=np.int64)])
    return sums[plan.offsets[1:]] - sums[plan.offsets[:-1]]


def epoch_sums(order, epochs, values):
    """pack_sums of some epochs of a packing.PackOrder, one behind the other."""
    return np.concatenate([pack_sums(order.epoch(epoch), values) for epoch in epochs])


def lengths_text(lengths):
    """How long samples are. lengths: (n,) tokens."""
    return (f"lengths    {lengths.sum():,} tokens an epoch; tokens a sample and how many samples have them:{INDENT}"
            + INDENT.join(histogram(np.asarray(lengths))))


def packs_text(setup, order, lengths, about):
    """How many packs an epoch has, how full and how even they are. about: what an average one holds."""
    report = packing_report(pack_sums(order.epoch(0), lengths), setup.ranks, setup.accumulation, setup.budget)
    return (f"packs      {order.packs_per_epoch:,} an epoch; {about}{INDENT}"
            f"{report['useful'] * 100:.1f}% of slots hold tokens; balance of the ranks (mean over max of their slots) "
            f"{report['balance'] * 100:.0f}%")


# ---------------------------------------------------------------------------------------------------------------------
# Memory and disk, against what there is


def host_memory(meminfo="/proc/meminfo"):
    """Bytes of host memory that are free on this machine, or what Slurm gives the job, if that is less."""
    free = 1024 * int(re.search(r"MemAvailable: +(\d+) kB", Path(meminfo).read_text())[1])
    given = 2**20 * int(os.environ.get("SLURM_MEM_PER_NODE", 0))        # 0: all that the node has
    return min(free, given or free)


def gpu_memory(gib=None):
    """Bytes of one GPU: --gpu_memory, or what the GPU here has, or 80 GiB."""
    if gib:
        return gib * GIB
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80 * GIB


def check_memory(peak, limit, helps):
    """Raise UserError when a peak leaves no margin below a limit, both in bytes. helps: {flag: whether it would}."""
    if peak <= USABLE * limit:
        return
    left = ", ".join(flag for flag, use in helps.items() if use) or "shorter samples"
    raise UserError(f"memory: about {size(peak)} needed on each GPU, which has {size(limit)}, "
                    f"{MARGIN}; what helps: {left}")


def helps(setup):
    """check_memory's {flag: whether it would help} for a Setup; a flag that the trainer lacks would not."""
    return {"--gradient_checkpointing": not setup.recompute,
            "--gradient_checkpointing all": setup.recompute == "selective", "--bf16": not setup.bf16,
            "a smaller --max_tokens_per_batch": setup.budget > 0,
            "a smaller --per_device_train_batch_size": not setup.budget and setup.batch_size > 1,
            "--parallel fsdp": setup.parallel != "fsdp",
            "--gradient_accumulation_steps 1": setup.fsdp and setup.accumulation > 1,
            "--reshard_after_forward": setup.reshard is False, "--cpu_offload": setup.fsdp and setup.offload is False,
            "--use_lora": setup.adapters is False}


def host_parts(parallel, ranks, offloaded, weights, moments, adapters=False):
    """(bytes offloaded, bytes a save stages, ranks) of the node of rank 0, which stages most; see tensor_files.stage.

    offloaded: bytes of each rank; weights, moments: of a checkpoint; adapters: the weights are those. Under DDP rank 0
    copies all that is saved, under FSDP2 and HSDP each writer what it owns, but rank 0 all adapters.
    """
    local, writers = local_ranks(ranks), tensor_files.writers(ranks)
    share = sum(rank < local for rank in writers) / len(writers) if parallel != "ddp" else 1
    return offloaded * local, weights * (1 if adapters else share) + moments * share, local


def check_host(needed, limit, local, parallel, offload=False, adapters=None):
    """Raise UserError when a node needs more host memory than a limit, both in bytes, naming what helps.

    local: ranks of a node. offload, adapters: --cpu_offload and --use_lora; None: there is no such flag.
    """
    if needed <= limit:
        return
    fsdp = parallel != "ddp"
    found = {"a node or Slurm job with more (--host_memory GIB plans for another machine)": True,
             "no --cpu_offload": offload, "more nodes": fsdp, "--parallel fsdp on several nodes": not fsdp,
             "--use_lora": adapters is False}
    raise UserError(f"host memory: about {size(needed)} needed by the {counted(local, 'rank')} of a node, which has "
                    f"{size(limit)}; what helps: {', '.join(text for text, use in found.items() if use)}")


def size(n):
    """Bytes as text."""
    return f"{n / GIB:,.2f} GiB" if n >= GIB / 10 else f"{n / 2**20:,.2f} MiB"


def memory_text(setup, parts, stages, pack, logits="worst pack, at their peak"):
    """The table of one GPU's memory. parts, stages: of memory.worst_pack. pack: how large the worst one is."""
    fsdp = setup.fsdp
    where = "on the host" if parts["host"] else "a shard" if fsdp else "whole on every GPU"
    spread = ", not sharded between micro-steps" * (fsdp and setup.accumulation > 1)
    notes = {"weights": where, "gradients": f"fp32{spread}", "optimizer": "two fp32 moments",
             "average": "averaged weights in fp32",
             "copies": f"gathered in {'bf16' if setup.bf16 else 'fp32'}" if fsdp else "bf16 casts of fp32 weights",
             "reduction": "gradients being summed over the GPUs",
             "activations": f"worst pack, {pack}{recomputation.NOTES[setup.recompute]}", "logits": logits,
             "fixed": "CUDA context and libraries: a guess", "peak estimate":
             f"reached in {max(stages, key=stages.get)}; parts come and go"}
    found = parts | {"copies": parts["copies"] + parts["forward copies"],
                     "reduction": max(parts["reduction"], parts["last reduction"]),
                     "peak estimate": max(stages.values())}
    return INDENT.join(f"{name:<13}  {found[name] / GIB:9.2f} GiB  {note}" for name, note in notes.items()
                       if found[name])


def print_room(check, setup, room, table, parts, stages, checkpoint_size, steps, validates):
    """Print what a run takes of GPU, host and disk; what it will not fit into is a problem of `check`.

    setup, room: Setup, Limits. table: of memory_text. checkpoint_size: of memory.checkpoint_bytes. steps: still to go.
    """
    offloaded, staged, local = host_parts(setup.parallel, setup.ranks, parts["host"], *checkpoint_size, setup.adapters)
    limit, host_limit = gpu_memory(room.gpu_memory), room.host_memory * GIB if room.host_memory else host_memory()
    one, have = sum(checkpoint_size), sum(folder_bytes(path) for _, path in checkpoint.checkpoints(room.output_dir))
    most = checkpoints_at_once(max(0, steps), room.save_steps, room.eval_steps if validates else None,
                               room.save_total_limit, room.save_minutes > 0)
    print(f"memory     estimate for one GPU; it has {size(limit)}, {MARGIN}{INDENT}{table}\n"
          f"host       {size(offloaded + staged)} for the {counted(local, 'rank')} of a node: {size(offloaded)} offloaded, "
          f"{size(staged)} copied by a save; it has {size(host_limit)}\n"
          f"disk       {size(one)} a checkpoint, at most {most} at once: {size(one * most)}; "
          f"{size(free_disk(room.output_dir))} free for --output_dir")
    check(check_memory, max(stages.values()), limit, helps(setup))
    check(check_host, offloaded + staged, host_limit, local, setup.parallel, offload=setup.offload,
          adapters=setup.adapters)
    check(check_disk, room.output_dir, one * most - have, f"{most} checkpoints")


# ---------------------------------------------------------------------------------------------------------------------
# The printed plan


def head_text(setup, units):
    """What runs where, and the model. units: of memory.unit_sizes."""
    values, _, trained = (sum(column) for column in zip(*units))
    return (f"plan       {counted(setup.ranks, 'GPU')}, {setup.parallel}, {'bf16' if setup.bf16 else 'fp32'}\n"
            f"model      {values / 1e6:,.1f} M parameters, {trained / 1e6:,.3f} M trainable "
            f"({'LoRA' if setup.adapters else 'full'}); the weight files have them all")


def steps_text(total, per_epoch, ranks, accumulation, about):
    """The length of the run in optimizer steps."""
    return (f"steps      {total} ({per_epoch} an epoch), {ranks * accumulation} packs a step = "
            f"{counted(ranks, 'rank')} x {accumulation} micro-steps; {about}")


def start_text(step, resume, new="base model"):
    """Where the run starts. resume: checkpoint folder or None."""
    return f"start      step {step}, {f'resumed from {resume}' if resume else new}"
