"""What a run would take, worked out and printed before it takes it: lengths, packing, memory of GPU and host, disk.

Plain numbers and arrays in, lines of text and lists of problems out; nothing is allocated, written or loaded here.

Memory of one GPU, in bytes, for a model of W weight values of which T are trained, on N GPUs:

    part          ddp                        fsdp (fully_shard per layer; / N each, on the host under CPU offload)
    weights       stored dtype x W           stored dtype x W / N
    gradients     4 T (DDP: bucket views)    4 T / N, and 4 T whole while accumulation goes without reducing
    optimizer     8 T (Adam, fp32)           8 T / N
    copies        2 x fp32 matrices, while   c x (root unit, the layer at work, the next one and the buffer it is
                  autocast caches its casts  gathered in; or all W, when layers are not freed after their forward)
    reduction     none (in the buckets)      (c + 4) x T of a layer, c x T of the root, whose turn comes last

c is the bytes of a compute value: FSDP2 gathers in the compute dtype and reduces in fp32.

On top come activations and logits, which only the model knows. They are not there all at once: peak_stages adds up what
is alive in each stage of a step. "fixed" covers the CUDA context, cuBLAS and NCCL; fragmentation is not modelled.

Shared module: copy parallel.py (UserError, problem_text) with it.
"""
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from common.parallel import UserError, problem_text

GIB = 2**30
FIXED = 1.0 * GIB           # CUDA context and library workspaces: about this much on current GPUs
FIXED_NCCL = 1.0 * GIB      # NCCL's buffers and channels beside it: a guess
USABLE = 0.95               # of a GPU's memory, as long as no estimate has been compared with a GPU
MARGIN = "5 % of it left for fragmentation"
BACKWARD = 1.2              # a recomputed layer with the gradients that pass through it, over what the layer keeps


# ---------------------------------------------------------------------------------------------------------------------
# Problems


def attempt(problems, work, *args):
    """work(*args), or None when it raises UserError, whose text goes to the list `problems`."""
    try:
        return work(*args)
    except UserError as error:
        problems.append(str(error))
        return None


def all_problems(texts):
    """Several UserErrors' texts as one; those that are lists themselves (parallel.problem_text) are taken apart."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def memory_parts(units, *, world=1, sharded=False, offload=False, reshard=True, compute=4, casts=0, whole=False):
    """What stands in one GPU's memory beside activations and logits -> {part: bytes}; see the top of the file.

    units: [(values, stored bytes, trained values)] of the root (all outside the layers) first, then of each layer.
    compute: bytes of the compute dtype. casts: bytes of autocast's weight copies (ddp). reshard: a layer is freed after
    its forward. whole: gradients stay unsharded between micro-steps. "host": what offload puts into host memory.
    """
    values, stored, trained = (sum(column) for column in zip(*units))
    shards = world if sharded else 1
    state = {"weights": stored / shards, "gradients": 4 * trained / shards, "optimizer": 8 * trained / shards}
    parts = {**(dict.fromkeys(state, 0) if offload else state), "copies": casts, "reduction": 0, "last reduction": 0,
             "fixed": FIXED + FIXED_NCCL * (world > 1 or sharded), "host": sum(state.values()) if offload else 0}
    if sharded:
        root, layers = units[0], units[1:]
        in_flight = root[0] + sum(sorted(layer[0] for layer in layers)[-3:])
        parts["copies"] = compute * (in_flight if reshard else values)
        parts["gradients"] += 4 * trained * whole
        parts["reduction"] = (compute + 4) * max(layer[2] for layer in layers) + compute * root[2]
        parts["last reduction"] = (compute + 4) * root[2]
    return parts


def peak_stages(parts, activations, layer, logits, recompute):
    """Bytes alive on one GPU in the stages of a step -> {stage: bytes}; the largest is the peak.

    parts: of memory_parts. activations: kept from forward to backward; layer: of one layer; logits: peak of the heads'.
    Numbers or arrays over packs.
    """
    standing = sum(parts[name] for name in ("weights", "gradients", "optimizer", "copies", "fixed"))
    work = (BACKWARD if recompute else BACKWARD - 1) * layer
    return {"the heads": standing + activations + logits,
            "a layer's backward": standing + activations + work + parts["reduction"],
            "the last reduction": standing + parts["last reduction"] + 0 * layer}


def local_ranks(ranks):
    """How many of `ranks` processes run on one node: what torchrun says, else up to 8."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 8)))


def host_memory(meminfo="/proc/meminfo"):
    """Bytes of host memory that are free on this machine, or what Slurm gives the job, if that is less."""
    free = 1024 * int(re.search(r"MemAvailable: +(\d+) kB", Path(meminfo).read_text())[1])
    given = 2**20 * int(os.environ.get("SLURM_MEM_PER_NODE", 0))        # 0: all that the node has
    return min(free, given or free)


def gpu_memory(args):
    """Bytes of one GPU: --gpu_memory, or what the GPU here has, or 80 GiB."""
    if args.gpu_memory:
        return args.gpu_memory * GIB
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80 * GIB


def check_memory(args, peak, limit):
    """Raise UserError when a peak leaves no margin below a limit, both in bytes; names the flags left to help."""
    if peak <= USABLE * limit:
        return
    fsdp, many = args.parallel == "fsdp", args.gradient_accumulation_steps > 1
    helps = {"--gradient_checkpointing": not args.gradient_checkpointing,
             "--gradient_checkpointing all": args.gradient_checkpointing == "selective", "--bf16": not args.bf16,
             "a smaller --max_tokens_per_batch": args.max_tokens_per_batch > 0,
             "a smaller --per_device_train_batch_size":
                 not args.max_tokens_per_batch and args.per_device_train_batch_size > 1,
             "--parallel fsdp": not fsdp, "--gradient_accumulation_steps 1": fsdp and many,
             "--reshard_after_forward": not args.reshard_after_forward, "--cpu_offload": fsdp and not args.cpu_offload,
             "--use_lora": not args.use_lora}
    left = ", ".join(flag for flag, use in helps.items() if use) or "shorter samples"
    raise UserError(f"memory: about {size(peak)} needed on each GPU, which has {size(limit)}, "
                    f"{MARGIN}; what helps: {left}")


def host_parts(args, ranks, offloaded, weights, moments):
    """(bytes offloaded, bytes a save stages, ranks) of the node of rank 0, which stages most; see tensor_files.stage.

    offloaded: bytes of each rank; weights, moments: of a checkpoint. Under DDP rank 0 copies all that is saved, under
    FSDP2 each rank what it owns, but rank 0 all adapters.
    """
    local = local_ranks(ranks)
    share = local / ranks if args.parallel == "fsdp" else 1
    return offloaded * local, weights * (1 if args.use_lora else share) + moments * share, local


def check_host(args, needed, limit, local):
    """Raise UserError when a node needs more host memory than a limit, both in bytes, naming what helps."""
    if needed <= limit:
        return
    fsdp = args.parallel == "fsdp"
    helps = {"a node or Slurm job with more (--host_memory GIB plans for another machine)": True,
             "no --cpu_offload": args.cpu_offload, "more nodes": fsdp, "--parallel fsdp on several nodes": not fsdp,
             "--use_lora": not args.use_lora}
    raise UserError(f"host memory: about {size(needed)} needed by the {local} ranks of a node, which has "
                    f"{size(limit)}; what helps: {', '.join(text for text, use in helps.items() if use)}")


def size(n):
    """Bytes as text."""
    return f"{n / GIB:,.2f} GiB" if n >= GIB / 10 else f"{n / 2**20:,.2f} MiB"


def memory_table(rows):
    """Aligned lines of [(name, bytes, note)], in GiB."""
    wide = max(len(name) for name, _, _ in rows)
    return [f"{name:<{wide}}  {size / GIB:9.2f} GiB  {note}".rstrip() for name, size, note in rows]
