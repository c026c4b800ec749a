"""Memory that a run needs on each GPU: --auto chooses settings by it, --dry_run prints it.

One step runs on fake tensors, which have shapes but no memory, and the bytes alive are counted:
this needs no GPU and no weights. The peak was within 0.94 GiB of the real one in 6 of 6 runs on an
H200. Weights, gradients, Adam's moments, what FSDP2 gathers, and a guess for the CUDA context,
cuBLAS and NCCL are added; for FSDP2 the sum is an upper bound. Fragmentation is not modelled.
"""
import contextlib
import copy
import functools
import itertools
import os
import shutil
import weakref
from pathlib import Path
from typing import Callable, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import checkpoint, dist, kernels, metrics
from core.cli import plural, require
from core.packing import PackOrder

GIB = 2**30
FIXED = 1.0 * GIB       # CUDA context and workspaces; NCCL's buffers take as much again
USABLE = 0.95           # of a GPU's memory; the rest is left for fragmentation
# what --auto sets
FLAGS = ("parallel", "max_tokens_per_batch", "per_device_train_batch_size",
         "gradient_checkpointing", "gradient_accumulation_steps")


class Setup(NamedTuple):
    """Flags of a run that change its memory."""
    ranks: int
    parallel: str = "ddp"
    bf16: bool = True               # or fp16
    gradient_checkpointing: str | None = None
    gradient_accumulation_steps: int = 1
    per_device_train_batch_size: int = 1
    max_tokens_per_batch: int = 0   # every pack is filled to it
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    shard_size: int = 0             # hsdp: GPUs that weights are sharded over
    compile: object = "auto"        # False: layers run eagerly

    @property
    def fsdp(self):
        return self.parallel != "ddp"

    @property
    def shards(self):
        return {"ddp": 1, "fsdp": self.ranks, "hsdp": self.shard_size}[self.parallel]

    @property
    def counts_gradients(self):
        """False if gradients only exist in the backward pass, where they replace activations."""
        return self.fsdp or self.ranks > 1 or self.gradient_accumulation_steps > 1


def setup_of(args, ranks):
    """Setup of a trainer's flags, of which not every trainer has all."""
    flags = {name: getattr(args, name) for name in Setup._fields if name in args}
    return Setup(**flags | {"ranks": ranks, "bf16": args.bf16 or getattr(args, "fp16", False)})


# ---- A step on tensors without memory


class Step(NamedTuple):
    """A trainer's micro-step."""
    model: nn.Module        # the module that training calls, on any device, also meta
    layers: Callable        # (model) -> its decoder layers
    loss: Callable          # (model, *pack) -> loss of a pack; the numbers in `pack` are its size
    # (LiveBytes) -> ((module, name, function), ...): functions to replace as a GPU would
    kernels: Callable = lambda live: ()
    average: bool = False   # True if trained weights have a moving average


class LiveBytes(TorchDispatchMode):
    """Counts bytes of tensors that operators make in this context: now, and at the peak."""

    def __init__(self, known):      # tensors that are not counted
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now, self.peak, self.in_kernel = 0, 0, False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        return out if self.in_kernel else self.note(out)

    def note(self, results):
        """Count new tensors among results until they are freed; return results."""
        for tensor in tree_leaves(results):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata)
        self.peak = max(self.peak, self.now)
        return results

    def forget(self, key):
        self.now -= self.sizes.pop(key)


class FakeKernel(torch.autograd.Function):
    """function(*inputs) as one GPU kernel: it allocates only its output, and saves its inputs, a
    number per row and, of attention, the output. live: LiveBytes."""

    @staticmethod
    def forward(ctx, live, function, *inputs):
        numbers = inputs[0].new_empty(inputs[0].shape[:-1], dtype=torch.float32)
        live.in_kernel = True
        out = function(*inputs)
        live.in_kernel = False
        ctx.save_for_backward(*inputs, numbers, out if len(inputs) == 3 else None)
        return live.note(out)

    @staticmethod
    def backward(ctx, grad):
        return None, None, *(torch.empty_like(t) if needed else None
                             for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:]))


def fuse_layers(model, live):
    """Let norms and MLPs of a transformers model keep the tensors that compiled ones keep."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = lambda x, norm=module: FakeKernel.apply(
                live, torch.mul, x, norm.weight.to(x.dtype))
        elif hasattr(module, "act_fn") and hasattr(module, "gate_proj"):
            module.forward = lambda x, mlp=module: mlp.down_proj(FakeKernel.apply(
                live, lambda gate, up: mlp.act_fn(gate) * up, mlp.gate_proj(x), mlp.up_proj(x)))


@contextlib.contextmanager
def gpu_kernels(live, more):
    """In this context a step keeps the tensors that a GPU's kernels keep. more: Step.kernels."""
    def dropout(x, p=0.5, training=True, inplace=False):        # keeps a byte per value
        return torch.native_dropout(x, p, training)[0] if p and training else x

    def attention(q, k, v, *_):
        ends = q.new_empty(2, dtype=torch.int32)
        return varlen_attn(q, k, v, ends, ends, len(q), len(q), window_size=(-1, 0),
                           **kernels.GROUPED)
    with contextlib.ExitStack() as stack:
        for owner, name, function in (
                (F, "dropout", dropout), (F, "grouped_mm", lambda x, weights, **_: x @ weights[0]),
                (kernels, "_attention_by_document", attention), *more(live)):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def step_bytes(step, setup, pack):
    """Peak bytes of a micro-step with one pack: activations and, in a single process, gradients;
    only a forward pass if no weight is trained."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_copy(step.model, torch.bfloat16 if setup.bf16 and setup.fsdp else None)
        kernels.recompute(step.layers(model), setup.gradient_checkpointing)
        trained = [p for p in model.parameters() if p.requires_grad]
        model.train(bool(trained))
        known = [*model.parameters(), *model.buffers()]
        if setup.counts_gradients:
            for p in trained:       # estimate() counts them; FSDP2 frees a layer's at once
                p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        live = LiveBytes(known)
        if setup.compile:
            fuse_layers(model, live)
        with live, gpu_kernels(live, step.kernels):
            with torch.autocast("cpu", torch.bfloat16, enabled=setup.bf16):
                loss = step.loss(model, *pack)
            if trained:
                loss.backward()
    return live.peak


def fake_copy(model, dtype=None):
    """A copy of a model, under FakeTensorMode. dtype: of its parameters, None: as they are."""
    copies = {id(buffer): torch.empty(buffer.shape, dtype=buffer.dtype)
              for buffer in model.buffers()}
    for p in model.parameters():
        copies[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=dtype or p.dtype), p.requires_grad)
    return copy.deepcopy(model, copies)


def count_values(module):
    return sum(p.numel() for p in module.parameters())


def estimate(step, setup, packs):
    """{part: bytes} that one GPU needs for a run whose largest packs are `packs`."""
    model, layers = step.model, step.layers(step.model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    state = {"weights": sum(p.nbytes for p in model.parameters()), "optimizer": 8 * trained,
             "average": 4 * trained * step.average,
             "gradients": 4 * trained * setup.counts_gradients}
    parts = {name: 0 if setup.cpu_offload else n / setup.shards for name, n in state.items()}
    parts["fixed"] = FIXED * (2 if setup.ranks > 1 or setup.fsdp else 1)
    if setup.fsdp:      # whole weights: the layer in use, the next one and the one being freed
        sizes = sorted(map(count_values, layers))
        whole = count_values(model) - sum(sizes[:-3] if setup.reshard_after_forward else [])
        width = 2 if setup.bf16 else 4
        reduced = max(sum(p.numel() for p in layer.parameters() if p.requires_grad)
                      for layer in layers)
        parts["copies"] = whole * width + reduced * (width + 4)     # and its sum in fp32
        if setup.gradient_accumulation_steps > 1:       # reduced in the last micro-step
            parts["gradients"] += 4 * trained
    parts["activations"] = max(step_bytes(step, setup, pack) for pack in packs)
    return parts


# ---- --auto: rank 0 tries setups, the fastest first, and takes the first that fits. Flags that the
# user gave stay. A run that resumes takes the choice of its checkpoint, whatever memory there is.

BUDGETS = (16384, 8192, 4096, 2048, 1024)       # tokens of a pack
LARGE = 4096        # tokens of a micro-step that keep the GPU, not the host, busy
EPOCH_STEPS = 10    # least optimizer steps of an epoch, if no flag gives the size of a step


def list_ways(args, setup):
    """Setups with every recomputation and sharding that the flags allow, the fastest first."""
    modes, kinds = [None, "all"], ["ddp", "fsdp"]
    if "gradient_checkpointing" in args.named:
        modes = [setup.gradient_checkpointing]
    needs_ddp = any(getattr(args, name, None) for name in ("fp16", "float8", "base_dtype"))
    if needs_ddp or setup.ranks == 1 or "parallel" in args.named:
        kinds = [setup.parallel]
    return [setup._replace(gradient_checkpointing=mode, parallel=kind)
            for mode in modes for kind in kinds]


def pack_setups(args, ranks, lengths, longest=0):
    """Yield (Setup, PackOrder): large packs in all of list_ways(), smaller ones in the last.
    lengths: (n,) tokens of samples; longest: of others."""
    setup, longest = setup_of(args, ranks), max(longest, int(lengths.max()))
    step_samples = args.global_batch_size or len(lengths) / EPOCH_STEPS
    most = step_samples * lengths.mean() / ranks / setup.gradient_accumulation_steps
    budgets = [budget for budget in BUDGETS if longest <= budget <= most] or [
        -(-longest // 1024) * 1024]
    if args.named & {"max_tokens_per_batch", "per_device_train_batch_size"}:
        budgets = [setup.max_tokens_per_batch]
    order_of = functools.cache(lambda budget: PackOrder(
        lengths, tokens_per_pack=budget, samples_per_pack=args.per_device_train_batch_size,
        seed=args.seed, group_by_length=getattr(args, "group_by_length", False)))
    ways = list_ways(args, setup)
    for way, budget in itertools.product(ways, budgets):
        if budget < min(LARGE, budgets[0]) and way != ways[-1]:
            continue
        order = order_of(budget)
        if args.global_batch_size and budget and "gradient_accumulation_steps" not in args.named:
            packs = order.packs_per_epoch * step_samples / len(lengths)
            way = way._replace(gradient_accumulation_steps=max(1, round(packs / ranks)))
        yield way._replace(max_tokens_per_batch=budget), order


def choose(args, world, ranks, setups, memory_of):
    """Set the FLAGS that the user did not give, alike on all ranks. setups: (Setup, data), the
    fastest first. memory_of(setup, data): {part: bytes}. UserError if none fits; a dry run takes
    the last one, and print_plan refuses it."""
    def choose_flags():
        if flags := read_choice(args, ranks):
            return flags, "as the run that is resumed began"
        for setup, data in setups:
            needed = memory_of(setup, data)
            if fits(needed, args):
                break
        if args.dry_run is None:
            check_memory(needed, args)
        flags = {flag: getattr(setup, flag) for flag in FLAGS if flag in args}
        flags["packs_per_step"] = ranks * setup.gradient_accumulation_steps
        return flags, size(sum(needed.values()))
    flags, reason = dist.rank0(world, choose_flags)
    vars(args).update(flags)
    if world.is_main:
        settings = (f"--{flag} {flags[flag]}" for flag in FLAGS if flags.get(flag))
        print("auto      ", *settings, f"({reason})")


def read_choice(args, ranks):
    """{flag: value} that --auto chose for the run that is resumed, or {}."""
    _, state = checkpoint.find_newest(args.output_dir, args.resume)
    earlier = state.get("args", {})
    flags = {flag: earlier[flag] for flag in FLAGS if flag in earlier.keys() - args.named}
    packs = earlier.get("packs_per_step")
    if packs and "gradient_accumulation_steps" not in args.named:
        require(packs % ranks == 0,
                f"--auto: this run has {packs} packs a step, not a multiple of {ranks} ranks; "
                "take another number of ranks, or give --gradient_accumulation_steps")
        flags |= {"gradient_accumulation_steps": packs // ranks, "packs_per_step": packs}
    return flags


# ---- --dry_run


def size(n):
    return f"{n / GIB:,.2f} GiB" if n >= GIB / 10 else f"{n / 2**20:,.2f} MiB"


def gpu_memory(args):
    """Bytes of one GPU: --gpu_memory, else the memory of the GPU here, else 80 GiB."""
    here = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory
    return (args.gpu_memory or 0) * GIB or here or 80 * GIB


def fits(needed, args):
    return sum(needed.values()) <= USABLE * gpu_memory(args)


def check_memory(needed, args):
    require(fits(needed, args), f"memory: about {size(sum(needed.values()))} needed on each GPU, "
            f"which has {size(gpu_memory(args))}, 5 % of it left for fragmentation; try --auto or "
            "--use_lora")


def check_disk(path, needed, purpose):
    """UserError unless a folder can be written, or made, and its disk has `needed` bytes free."""
    path = Path(path).absolute()
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    require(folder.is_dir() and os.access(folder, os.W_OK), f"{purpose} {path}: cannot be written")
    free = shutil.disk_usage(folder).free
    require(needed <= free,
            f"{path}: {size(needed)} needed for {purpose}, its disk has {size(free)} free")


def largest_pack(order, rows, budget=0, columns=1):
    """Numbers of rows of each kind in the pack with the largest sum over its first `columns` kinds;
    others at their most in any pack. rows: (samples, kinds). The first kind fills the budget."""
    packs = order.sums(rows)
    packs[:, 0] = np.maximum(packs[:, 0], budget - packs[:, 1:columns].sum(1))
    largest = packs[packs[:, :columns].sum(1).argmax(), :columns]
    return *largest.tolist(), *packs[:, columns:].max(0).tolist()


def print_plan(args, needed, model, lines, steps, flops=0):
    """Print a headline, `lines` and the plan of a run; UserError if GPU or disk are too small.
    needed: of estimate(). model: as trained. steps: to go. flops: of the run, 0: unknown."""
    limit = gpu_memory(args)
    # FLOP/s of large bf16 products, docs/speed.md
    gpu, rate = ("an RTX 3090", 71e12) if limit <= 24.5 * GIB else ("an H200", 790e12)
    dtype = "fp16" if getattr(args, "fp16", False) else "bf16" if args.bf16 else "fp32"
    time = f" · at least {metrics.duration(flops / rate)} on {gpu}" if flops else ""
    print(f"{'FITS' if fits(needed, args) else 'TOO LARGE'} {sum(needed.values()) / GIB:.1f} of "
          f"{limit / GIB:.1f} GiB · {plural(steps, 'step')}{time}",
          f"plan       {plural(args.ranks, 'GPU')}, {args.parallel}, {dtype}",
          *lines, sep="\n")
    parts = " + ".join(f"{name} {used / GIB:,.2f}" for name, used in needed.items() if used)
    print(f"memory     {parts} GiB")

    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(p.nbytes for p in (trained if args.use_lora else model.parameters()))
    copies = 2 if needed.get("average") else 1
    saved = weights * copies + 8 * sum(p.numel() for p in trained)      # with Adam's moments
    most = 1 + max(0, steps) // args.save_steps if args.save_steps else 1
    if args.save_total_limit:       # besides them the best and the one being written
        most = min(most, args.save_total_limit + 2)
    print(f"disk       {size(saved)} a checkpoint, at most {most} at once")
    more = most - len(checkpoint.list_checkpoints(args.output_dir))
    check_memory(needed, args)
    check_disk(args.output_dir, saved * more, plural(more, "checkpoint"))
