"""What --dry_run prints and --auto chooses by: a run's packs, its memory and disk.

Memory of one GPU, for W weight values of which T are trained, sharded over N GPUs (1 under DDP):

    weights      stored dtype x W / N
    gradients    4 T / N, and under FSDP2 4 T whole between the micro-steps of a step
    optimizer    8 T / N (Adam, fp32); average, where there is one, 4 T / N
    copies       FSDP2 gathers the root unit, a layer at work, the next one and a buffer
    activations  no formula: step_bytes runs the step on tensors that have shapes but no memory, and
                 counts what is alive: logits, casts of weights, gradients as they come included
    fixed        CUDA context, cuBLAS, NCCL: a guess

--cpu_offload keeps shards, gradients and moments on the host. Fragmentation is not modelled.
"""
import contextlib
import copy
import functools
import importlib.util
import os
import re
import shutil
import sysconfig
import tempfile
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import (
    checkpoint,
    document_attention,
    fused,
    metrics,
    recomputation,
    resume,
    tensor_files,
)
from common.distributed import UserError, rank0_first
from common.flags import local_ranks, named, need
from common.packing import pack_order
from common.problems import collect
from common.text import GIB, counted, size

# FLOP/s of large bf16 products, as docs/speed.md assumes them
RATES = (("an H200", 790e12), ("an RTX 3090", 71e12))
USABLE = 0.95           # of a GPU's memory, as long as no estimate has been compared with a GPU
MARGIN = "5 % of it left for fragmentation"
FIXED = 1.0 * GIB       # CUDA context and workspaces: about this much on current GPUs
FIXED_NCCL = 1.0 * GIB  # NCCL's buffers and channels beside it: a guess
INDENT = "\n           "
INSTALL = "compiler   no {} here, which a GPU's kernels need: apt-get install gcc python3-dev\n"
ROUNDED = 1.4           # pinned memory of a tensor is a power of two; of Qwen3 4B's, all together
PINNED = "pinned_max_round_threshold_mb"    # the allocator's option against that, in torch 2.13
STAGES = "the heads", "a layer's backward", "the embedding's backward", "the last reduction"


@dataclass(frozen=True)
class Setup:
    """How a run computes, as its flags say; None where the trainer has no such flag."""
    ranks: int
    parallel: str = "ddp"           # ddp, fsdp or hsdp
    bf16: bool = True
    recompute: str | None = None    # of flags.MODES, or None
    accumulation: int = 1           # micro-steps of an optimizer step
    batch_size: int = 1             # samples or rows of a micro-step, without a budget
    budget: int = 0                 # tokens that every pack is filled to, 0: none
    reshard: bool | None = None     # fsdp: a layer is freed after its forward
    offload: bool | None = None     # fsdp: shards and moments are in host memory
    adapters: bool | None = None    # only they are trained
    shard_size: int = 0             # hsdp: GPUs that weights are sharded over, 0: those of a node
    base_dtype: str | None = None   # nf4: frozen layers in four bits; None, bf16: as computed

    @property
    def fsdp(self):
        return self.parallel != "ddp"

    @property
    def shards(self):
        if self.parallel == "hsdp":
            return self.shard_size or local_ranks(self.ranks)
        return self.ranks if self.fsdp else 1

    @property
    def fresh(self):
        """Whether gradients come while activations go; else they stand all the time."""
        return self.accumulation == 1 and (self.fsdp or self.ranks == 1)


def setup_of(args, ranks):
    """Setup of a trainer's parsed flags. ranks: how many processes train."""
    found = {field: getattr(args, flag) for flag, field in FLAGS.items() if hasattr(args, flag)}
    half = args.bf16 or getattr(args, "fp16", False)        # fp16 takes the same memory
    return Setup(ranks, bf16=half, reshard=getattr(args, "reshard_after_forward", None),
                 adapters=args.use_lora, shard_size=args.shard_size, **found)


# --------------------------------------------------------------------------------------------------
# A step on tensors without memory


class Step(NamedTuple):
    """What a trainer computes in a micro-step."""
    model: nn.Module        # what training calls, on any device, meta as well
    layers: Callable        # (model) -> those that recomputation and FSDP2 take
    loss: Callable          # (model, *pack) -> its loss of a pack, whose size some numbers say
    kernels: tuple = ()     # (module, name, function) of what a GPU computes otherwise than the CPU
    average: bool = False   # trained weights have an average


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operators make in this context: now, and most in each stage."""

    def __init__(self, known):      # tensors that do not count
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now, self.stage = 0, STAGES[0]
        self.peaks, self.in_kernel = Counter(), False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if not self.in_kernel:
            self.note(out)
        return out

    def note(self, made):
        """Count what is new, until it is gone."""
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata)
        self.peaks[self.stage] = max(self.peaks[self.stage], self.now)

    def gone(self, key):
        self.now -= self.sizes.pop(key)

    def kernel(self, function, *args):
        """fused.kernel: one kernel of the GPU, of which only the results are tensors."""
        self.in_kernel = True
        out = function(*args)
        self.in_kernel = False
        self.note(out)
        return out


class Kept(torch.autograd.Function):
    """A kernel of the GPU without its work: keeps inputs, a number a row, attention its output."""

    @staticmethod
    def forward(ctx, x, *others):
        out = torch.empty_like(x)
        ctx.given = 1 + len(others)
        ctx.save_for_backward(x, *others, x.new_empty(x.shape[:-1], dtype=torch.float32),
                              out if others[0].ndim == x.ndim else None)
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:ctx.given])


def varlen(q, k, v, *_):
    """torch's attention of packed documents: q (S, heads, D), k, v (S, kv_heads, D)."""
    grouped = {"enable_gqa": True} if document_attention.VARLEN_GQA else {}
    if not grouped:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    ends = q.new_empty(2, dtype=torch.int32)
    return varlen_attn(q, k, v, ends, ends, len(q), len(q), window_size=(-1, 0), **grouped)


def dropout(x, p=0.5, training=True, inplace=False):
    """F.dropout of a GPU, which keeps a byte a value and not a factor."""
    return torch.native_dropout(x, p, training)[0] if p and training else x


def gpu_kernels(live):
    """(module, name, function) of what a GPU computes otherwise than the CPU, in all trainers."""
    return ((fused, "wanted", lambda x: True), (fused, "kernel", live.kernel),
            (fused, "rms_norm", lambda x, weight, _: Kept.apply(x, weight.to(x.dtype))),
            (F, "dropout", dropout),
            (F, "grouped_mm", lambda rows, weights, **_: rows @ weights[0]),    # bf16 alone on CPUs
            (document_attention, "_attention_by_document", varlen))


@contextlib.contextmanager
def swapped(*changes):
    """Within this context attributes have other values. changes: (owner, name, value)."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@functools.cache
def step_bytes(step, setup, pack, train=True, gpu=True):
    """{stage of STAGES: most bytes of tensors} that a micro-step makes of one pack, or, without
    `train`, a validation batch. gpu=False: with the kernels of the CPU. Of many layers, all of
    which but the last are alike, 2 and then 4 are run.
    """
    count = len(step.layers(step.model))
    if count <= 4:
        return run_layers(step, setup, pack, count, train, gpu)
    two, four = (run_layers(step, setup, pack, few, train, gpu) for few in (2, 4))
    return {stage: four[stage] + (four[stage] - two[stage]) / 2 * (count - 4) for stage in four}


def run_layers(step, setup, pack, count, train, gpu):
    """step_bytes of a model that has lost all but `count` of its layers."""
    dropped = step.layers(step.model)[count - 1:-1]
    model = copy.deepcopy(step.model, {id(layer): layer for layer in dropped})
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            left = [part for part in module if not any(part is layer for layer in dropped)]
            module._modules = {str(number): part for number, part in enumerate(left)}
    layers = step.layers(model)
    recomputation.set_mode(model, layers, setup.recompute)
    model.train(train)
    with FakeTensorMode(allow_non_fake_inputs=True):
        give_shapes(model, torch.bfloat16 if setup.bf16 and setup.fsdp else None)
        trained = [p for p in model.parameters() if p.requires_grad] if train else []
        for parameter in [] if setup.fresh or setup.fsdp else trained:
            parameter.grad = torch.empty_like(parameter)
        standing = [p.grad for p in trained if p.grad is not None]
        live = LiveBytes([*model.parameters(), *model.buffers(), *standing])
        if train:
            follow(live, layers)
        if setup.fsdp:
            reduce_gradients(live, trained, layers, setup)
        with live, swapped(*(*gpu_kernels(live), *step.kernels) if gpu else ()):
            with torch.autocast("cpu", torch.bfloat16, enabled=setup.bf16):
                with torch.set_grad_enabled(train):
                    loss = step.loss(model, *pack)
            if train:
                loss.backward()
    return dict(live.peaks)


def give_shapes(model, dtype):
    """Give a module new tensors of the same shapes; parameters of a dtype, or of their own."""
    made = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p not in made:
                tensor = torch.empty(p.shape, dtype=dtype or p.dtype)
                made[p] = nn.Parameter(tensor, p.requires_grad)
            module._parameters[name] = made.get(p)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def follow(live, layers):
    """Change the stage where gradients come to the last layer, and where they leave the first."""
    def enter(stage, tensors):
        tensor = next(leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
        if tensor.requires_grad:
            tensor.register_hook(lambda _: setattr(live, "stage", stage))
    layers[-1].register_forward_hook(lambda _, given, out: enter(STAGES[1], out))
    layers[0].register_forward_pre_hook(
        lambda _, given, named: enter(STAGES[2], (given, named)), with_kwargs=True)


def reduce_gradients(live, trained, layers, setup):
    """Have gradients go as under FSDP2: when a unit has all of its own they are summed in fp32,
    until the next unit has; then there are shards. The root, all outside the layers, comes last.
    With accumulation there are no shards yet, with offload they are on the host: counted elsewhere.
    """
    unit_of = {p: number for number, layer in enumerate(layers) for p in layer.parameters()}
    wanted, waiting = Counter(unit_of.get(p) for p in trained), {}
    reducing, shards = [], []

    def arrived(parameter):
        unit = unit_of.get(parameter)
        waiting.setdefault(unit, []).append(parameter.grad)
        parameter.grad = None
        if len(waiting[unit]) < wanted[unit]:
            return
        if unit is None:
            live.stage = STAGES[3]
        values = sum(gradient.numel() for gradient in waiting.pop(unit))
        reducing.clear()
        reducing.append(torch.empty(values * (parameter.element_size() + 4), dtype=torch.uint8))
        if setup.fresh and not setup.offload:
            shards.append(torch.empty(-(-values // setup.shards)))
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(arrived)


# --------------------------------------------------------------------------------------------------
# Memory of one GPU


class Memory(NamedTuple):
    """Of one GPU with its worst pack, in bytes."""
    parts: dict         # {part: bytes}, which come and go
    stages: dict        # {stage of a run: what is there}
    host: float         # what one rank offloads

    @property
    def peak(self):
        return max(self.stages.values())


@functools.cache
def in_four_bits(step):
    """The Step with the frozen layers in NF4; the same one where they are."""
    if any(hasattr(module, "nf4") for module in step.model.modules()):
        return step
    from common import nf4
    model = copy.deepcopy(step.model)
    nf4.convert(step.layers(model))
    return step._replace(model=model)


def memory(step, setup, pack, held_out=None):
    """Memory with a pack, and with one of the validation, each the worst."""
    if setup.base_dtype == "nf4":
        step = in_four_bits(step)
    def values_of(module):
        return sum(p.numel() for p in module.parameters())
    model, layers = step.model, [values_of(layer) for layer in step.layers(step.model)]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    state = {"weights": sum(p.nbytes for p in model.parameters()), "gradients": 4 * trained,
             "optimizer": 8 * trained, "average": 4 * trained * step.average}
    host = sum(state.values()) / setup.shards if setup.offload else 0
    parts = {name: 0 if setup.offload else of / setup.shards for name, of in state.items()}
    if setup.fsdp and setup.accumulation > 1:
        parts["gradients"] += 4 * trained
    parts["fixed"] = FIXED + FIXED_NCCL * (setup.ranks > 1 or setup.fsdp)
    standing = sum(parts.values()) - parts["gradients"] * setup.fresh

    gathered = dict.fromkeys((*STAGES, "the first layer"), 0)
    if setup.fsdp:
        root, value = values_of(model) - sum(layers), 2 if setup.bf16 else 4
        work = root + sum(sorted(layers)[-3 if len(layers) > 2 else -1:])
        kept = [values_of(model)] * 3 if setup.reshard is False else [root, work, root]
        gathered = dict(zip(gathered, (value * n for n in (*kept, 0, 2 * (root + layers[0])))))
    made = step_bytes(step, setup, pack) | {"the first layer": 0}
    stages = {stage: standing + gathered[stage] + of for stage, of in made.items()}
    if held_out:
        alone = replace(setup, recompute=None, accumulation=1, batch_size=1, budget=0)
        work = step_bytes(step, alone, held_out, train=False)[STAGES[0]]
        stages["validation"] = standing + gathered[STAGES[0]] + work
    parts |= {"copies": gathered[STAGES[1]], "activations": max(made.values())}
    return Memory(parts, stages, host)


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
    refuse(f"memory: about {size(found.peak)} needed on each GPU, which has {size(limit)}, "
           f"{MARGIN}",
           {"--gradient_checkpointing": smaller and not setup.recompute,
            "--gradient_checkpointing all": smaller and setup.recompute == "selective",
            f"a smaller --{samples}": smaller and (setup.budget or setup.batch_size > 1),
            "--bf16": not setup.bf16,
            "--base_dtype nf4": setup.adapters and setup.bf16 and setup.base_dtype != "nf4"
            and not setup.fsdp,
            "--parallel fsdp": not setup.fsdp and setup.ranks > 1,
            "--gradient_accumulation_steps 1": setup.fsdp and setup.accumulation > 1,
            "--reshard_after_forward": setup.fsdp and setup.reshard is False,
            "--cpu_offload": setup.fsdp and setup.offload is False,
            "--parallel fsdp --cpu_offload": not setup.fsdp and setup.offload is False,
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
    return min(steps + 1 if args.save_minutes else saves, limit + 1 + validates)


def print_room(args, setup, found, pack, saved, steps, validates):
    """Print what a run takes of GPU, host and disk; UserError with all that it will not fit into.

    found: Memory; pack: how large the worst one is. saved: of checkpoint_bytes. steps: to go.
    """
    local, one, limit = local_ranks(setup.ranks), sum(saved), gpu_memory(args.gpu_memory)
    offloaded, staged = found.host * local, staged_bytes(setup, *saved)
    host_limit = args.host_memory * GIB if args.host_memory else host_memory()
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
            f"{'bf16' if setup.bf16 else 'fp32'}\n"
            f"{metrics.model_text(model, setup.adapters)}; the weight files have them all")


def with_keep(args, lines):
    """Lines of a plan, and what it leaves out with --keep."""
    more = ["keep       its packs are not counted: rows longer than the training's need more memory"]
    return [*lines[:-1], *more * bool(args.keep), lines[-1]]


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

FLAGS = {"parallel": "parallel", "max_tokens_per_batch": "budget",
         "per_device_train_batch_size": "batch_size", "gradient_checkpointing": "recompute",
         "gradient_accumulation_steps": "accumulation", "base_dtype": "base_dtype",
         "cpu_offload": "offload"}      # {flag: of Setup}
BUDGETS = (16384, 8192, 4096, 2048, 1024)       # tokens of a pack
LARGE = 4096        # tokens of a micro-step that keep the GPU, not the host, busy
EPOCH_STEPS = 10    # optimizer steps that an epoch has at least, where no flag says their size
MODES = {None: "no recomputation", "selective": "cheap parts recomputed",
         "all": "layers recomputed"}    # from the fastest on


def ways(args, setup):
    """Setups with other recomputation and sharding, from the fastest on, where flags leave them."""
    modes = [None, "all"] if args.compile else MODES
    if "gradient_checkpointing" in named(args):
        modes = [setup.recompute]
    group = setup.shard_size or local_ranks(setup.ranks)
    nodes = setup.ranks > group and setup.ranks % group == 0    # sharding inside each comes first
    kinds = ["ddp", *(["hsdp"] if nodes else []), "fsdp"]
    packed = getattr(args, "float8", False) or setup.base_dtype == "nf4"
    if "parallel" in named(args) or setup.ranks == 1 or packed:
        kinds = [setup.parallel]
    return [replace(setup, recompute=mode, parallel=kind) for mode in modes for kind in kinds]


def by_tokens(args, setup, lengths, order_of):
    """Setups with packs of tokens, the fastest first: what costs time alone, then a base in four
    bits, which costs accuracy as well; at last with the state on the host.

    lengths: (n,) tokens of the samples. order_of(budget): PackOrder. A step has the samples of
    --global_batch_size, or an epoch at least EPOCH_STEPS steps.
    """
    samples, counted = args.global_batch_size, "gradient_accumulation_steps" in named(args)
    step = samples * lengths.mean() if samples else lengths.sum() / EPOCH_STEPS
    each = step / (setup.ranks * (setup.accumulation if counted else 1))
    longest = int(lengths.max())
    room = [budget for budget in BUDGETS if budget >= longest] or [-(-longest // 1024) * 1024]
    budgets = [budget for budget in room if budget <= each] or room[-1:]
    if named(args) & {"max_tokens_per_batch", "per_device_train_batch_size"}:
        budgets = [setup.budget]
    large = [budget for budget in budgets if budget >= LARGE] or budgets[:1]
    tried = [replace(way, budget=budget) for way in ways(args, setup) for budget in large]
    tried += [replace(tried[-1], budget=budget) for budget in budgets if budget not in large]
    last = tried[-1]
    if may_round(args):
        tried += [replace(way, base_dtype="nf4") for way in tried if not way.fsdp]
    packed = getattr(args, "float8", False) or setup.base_dtype == "nf4"
    if setup.offload is False and not (packed or named(args) & {"parallel", "cpu_offload"}):
        tried.append(replace(last, parallel="fsdp", offload=True))
    for way in tried:
        if samples and way.budget and not counted:
            packs = order_of(way.budget).packs_per_epoch * samples / len(lengths)
            way = replace(way, accumulation=max(1, round(packs / setup.ranks)))
        yield way


def may_round(args):
    """Whether --auto may keep the frozen layers in four bits."""
    other = ("compile", "float8", "use_dora", "cpu_offload")
    return (getattr(args, "base_dtype", "") is None and args.use_lora
            and (args.bf16 or args.fp16)
            and not any(getattr(args, flag, False) for flag in other)
            and importlib.util.find_spec("bitsandbytes") is not None)


def choose_packs(args, world, ranks, lengths, memory_of):
    """decide() with packs of tokens. lengths: (n,) of the samples. memory_of(setup, PackOrder)."""
    @functools.cache
    def order_of(budget):
        return pack_order(lengths, tokens_per_pack=budget, seed=args.seed,
                          samples_per_pack=args.per_device_train_batch_size,
                          group_by_length=getattr(args, "group_by_length", False))
    setups = by_tokens(args, setup_of(args, ranks), lengths, order_of)
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
        parts.append("weights and gradients cross the bus in each step")
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
