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
import sys
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import checkpoint, dist, kernels
from core.cli import plural, require
from core.packing import PackOrder

GIB = 2**30
FIXED = 1.0 * GIB       # CUDA context and workspaces; NCCL's buffers take as much again
USABLE = 0.95           # of a GPU's memory; the rest is left for fragmentation
# what --auto sets
FLAGS = ("parallel", "max_tokens_per_batch", "per_device_train_batch_size",
         "gradient_checkpointing", "gradient_accumulation_steps")


# ---- A step on tensors without memory


def layers_of(model):
    """Layers of a network, which kernels.recompute() has marked."""
    return [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]


class LiveBytes(TorchDispatchMode):
    """Counts bytes of tensors that operators make in this context."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = weakref.WeakKeyDictionary(), 0      # sizes: of living storages

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        results = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes[storage] = storage.nbytes()
        # .data: values() of a weak dictionary takes longer than the step
        self.peak = max(self.peak, sum(self.sizes.data.values()))
        return results


class FakeKernel(torch.autograd.Function):
    """One GPU kernel: it allocates only its output, function(*inputs), and saves its inputs, a
    number per row and, of attention, the output."""

    @staticmethod
    def forward(ctx, function, *inputs):
        numbers = inputs[0].new_empty(inputs[0].shape[:-1], dtype=torch.float32)
        out = function(*inputs)
        ctx.save_for_backward(*inputs, numbers, out if len(inputs) == 3 else None)
        return out

    @staticmethod
    def backward(ctx, grad):
        return None, *(torch.empty_like(t) if needed else None
                       for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:]))


def fuse_layers(model):
    """Let norms and MLPs of a transformers model keep the tensors that compiled ones keep."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = lambda x, norm=module: FakeKernel.apply(
                torch.mul, x, norm.weight.to(x.dtype))
        elif hasattr(module, "act_fn") and hasattr(module, "gate_proj"):
            module.forward = lambda x, mlp=module: mlp.down_proj(FakeKernel.apply(
                torch.mul, mlp.gate_proj(x), mlp.up_proj(x)))


@contextlib.contextmanager
def gpu_kernels():
    """In this context a step keeps the tensors that a GPU's kernels keep."""
    def dropout(x, p=0.5, training=True, inplace=False):        # keeps a byte per value
        return torch.native_dropout(x, p, training)[0] if p and training else x

    def attention(q, k, v, *_):
        ends = q.new_empty(2, dtype=torch.int32)
        return varlen_attn(q, k, v, ends, ends, len(q), len(q), window_size=(-1, 0),
                           **kernels.GROUPED)
    with mock.patch.object(kernels, "_attention_by_document", attention), mock.patch.multiple(
            F, dropout=dropout, grouped_mm=lambda x, weights, **_: x @ weights[0]):
        yield


def step_bytes(model, loss, args, pack, gradients=True):
    """Peak bytes of loss(model, *pack) and its backward pass: activations, gradients; only a
    forward pass if no weight is trained. model: on any device, also meta. pack: numbers.
    gradients: False frees each at once."""
    half, sharded = args.bf16 or getattr(args, "fp16", False), args.parallel != "ddp"
    dtype = torch.bfloat16 if args.bf16 and sharded else None       # of FSDP2's copies
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live, gpu_kernels():
        fakes = {id(b): torch.empty(b.shape, dtype=b.dtype) for b in model.buffers()}
        fakes |= {id(p): nn.Parameter(torch.empty(p.shape, dtype=dtype or p.dtype), p.requires_grad)
                  for p in model.parameters()}
        model, weights = copy.deepcopy(model, fakes), live.peak
        kernels.recompute(layers_of(model), args.gradient_checkpointing)
        trained = [p for p in model.parameters() if p.requires_grad]
        model.train(bool(trained))
        if not gradients:
            for p in trained:
                p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        if args.compile:
            fuse_layers(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            total = loss(model, *pack)
        if trained:
            total.backward()
    return live.peak - weights


def count_values(module, trained=False):
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def estimate(model, loss, args, packs, others=()):
    """{part: bytes} that one GPU needs for a run whose largest packs are `packs`. model, loss: of
    step_bytes(). others: frozen models."""
    layers, ranks = layers_of(model), args.ranks
    trained = count_values(model, trained=True)
    # else gradients only exist in the backward pass, where they replace activations
    lasting = args.parallel != "ddp" or ranks > 1 or args.gradient_accumulation_steps > 1
    state = {"weights": sum(p.nbytes for p in model.parameters()), "optimizer": 8 * trained,
             "gradients": 4 * trained * lasting,
             "teacher": sum(p.nbytes for other in others for p in other.parameters())}
    shards = {"ddp": 1, "fsdp": ranks, "hsdp": args.shard_size}[args.parallel]
    parts = {name: 0 if getattr(args, "cpu_offload", False) else n / shards
             for name, n in state.items()}
    parts["fixed"] = FIXED * (1 if args.parallel == "ddp" and ranks == 1 else 2)
    if args.parallel != "ddp":      # whole weights: the layer in use, the next, the one being freed
        whole = count_values(model)
        if getattr(args, "reshard_after_forward", True):
            whole -= sum(sorted(map(count_values, layers))[:-3])
        width = 2 if args.bf16 else 4
        reduced = max(count_values(layer, trained=True) for layer in layers)
        parts["copies"] = whole * width + reduced * (width + 4)     # and its sum in fp32
        if args.gradient_accumulation_steps > 1:        # reduced in the last micro-step
            parts["gradients"] += 4 * trained
    parts["activations"] = max(step_bytes(model, loss, args, pack, not lasting) for pack in packs)
    return parts


# ---- --auto: rank 0 tries setups, the fastest first, and takes the first that fits. Flags that the
# user gave stay. A run that resumes takes the choice of its checkpoint, whatever memory there is.

BUDGETS = (16384, 8192, 4096, 2048, 1024)       # tokens of a pack
LARGE = 4096        # tokens of a micro-step that keep the GPU, not the host, busy
EPOCH_STEPS = 10    # least optimizer steps of an epoch, if no flag gives the size of a step


def list_ways(args):
    """[{flag: value}]: every recomputation and sharding that the flags allow, the fastest first."""
    modes, kinds = [None, "all"], ["ddp", "fsdp"]
    if "gradient_checkpointing" in args.named:
        modes = [args.gradient_checkpointing]
    needs_ddp = any(getattr(args, name, None) for name in ("fp16", "float8", "base_dtype"))
    if needs_ddp or args.ranks == 1 or "parallel" in args.named:
        kinds = [args.parallel]
    return [{"gradient_checkpointing": mode, "parallel": kind} for mode in modes for kind in kinds]


def pack_ways(args, lengths, longest=0):
    """Yield ({flag: value}, PackOrder): large packs in all of list_ways(), smaller ones in the
    last. lengths: (n,) tokens of samples; longest: of others."""
    ranks, longest = args.ranks, int(max(longest, lengths.max()))
    step_samples = args.global_batch_size or len(lengths) / EPOCH_STEPS
    most = step_samples * lengths.mean() / ranks / args.gradient_accumulation_steps
    budgets = [n for n in BUDGETS if longest <= n <= most] or [-(-longest // 1024) * 1024]
    if args.named & {"max_tokens_per_batch", "per_device_train_batch_size"}:
        budgets = [args.max_tokens_per_batch]
    order_of = functools.cache(lambda budget: PackOrder(
        lengths, tokens_per_pack=budget, samples_per_pack=args.per_device_train_batch_size,
        seed=args.seed, group_by_length=getattr(args, "group_by_length", False)))
    ways, micro_steps = list_ways(args), args.gradient_accumulation_steps
    for way, budget in itertools.product(ways, budgets):
        if budget < min(LARGE, budgets[0]) and way != ways[-1]:
            continue
        order = order_of(budget)
        if args.global_batch_size and budget and "gradient_accumulation_steps" not in args.named:
            packs = order.packs_per_epoch * step_samples / len(lengths)
            micro_steps = max(1, round(packs / ranks))
        yield way | {"max_tokens_per_batch": budget,
                     "gradient_accumulation_steps": micro_steps}, order


def choose(args, world, ways, memory_of):
    """Set the FLAGS that the user did not give, alike on all ranks. ways: ({flag: value}, data),
    the fastest first. memory_of(args, data): {part: bytes}. UserError if none fits; a dry run takes
    the last one, and end_dry_run refuses it."""
    def choose_flags():
        _, state = checkpoint.find_newest(args.output_dir, args.resume)
        earlier, ranks = state.get("args", {}), args.ranks
        flags = {flag: earlier[flag] for flag in FLAGS if flag in earlier.keys() - args.named}
        packs = earlier.get("packs_per_step")
        if packs and "gradient_accumulation_steps" not in args.named:
            require(packs % ranks == 0, f"--auto: this run has {packs} packs a step, not a "
                    f"multiple of {ranks} ranks; take another number of ranks")
            flags |= {"gradient_accumulation_steps": packs // ranks, "packs_per_step": packs}
        if flags:
            return flags, "as the run that is resumed began"
        for flags, data in ways:
            vars(args).update(flags)
            needed = memory_of(args, data)
            if fits(needed, args):
                break
        if args.dry_run is None:
            check_memory(needed, args)
        packs = ranks * args.gradient_accumulation_steps
        return flags | {"packs_per_step": packs}, size(sum(needed.values()))
    flags, reason = dist.rank0(world, choose_flags)
    vars(args).update(flags)
    if world.is_main:
        words = (f"--{flag} {getattr(args, flag)}" for flag in FLAGS if getattr(args, flag, None))
        print("auto      ", *words, f"({reason})")


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


def end_dry_run(args, needed, model, lines, steps, time=""):
    """Print a headline, `lines` and the plan of a run, and exit; UserError if GPU or disk are too
    small. needed: of estimate(). model: as trained. steps: to go. time: text after them."""
    dtype = "fp16" if getattr(args, "fp16", False) else "bf16" if args.bf16 else "fp32"
    parts = " + ".join(f"{name} {used / GIB:,.2f}" for name, used in needed.items() if used)
    weights = sum(p.nbytes for p in model.parameters() if p.requires_grad or not args.use_lora)
    copies = 2 if needed.get("average") else 1
    saved = weights * copies + 8 * count_values(model, trained=True)    # with Adam's moments
    most = 1 + max(0, steps) // args.save_steps if args.save_steps else 1
    if args.save_total_limit:       # besides them the best and the one being written
        most = min(most, args.save_total_limit + 2)
    print(f"{'FITS' if fits(needed, args) else 'TOO LARGE'} {sum(needed.values()) / GIB:.1f} of "
          f"{gpu_memory(args) / GIB:.1f} GiB · {plural(steps, 'step')}{time}",
          f"plan       {plural(args.ranks, 'GPU')}, {args.parallel}, {dtype}", *lines,
          f"memory     {parts} GiB",
          f"disk       {size(saved)} a checkpoint, at most {most} at once", sep="\n")
    check_memory(needed, args)
    more = most - len(checkpoint.list_checkpoints(args.output_dir))
    check_disk(args.output_dir, saved * more, plural(more, "checkpoint"))
    print("dry run ok")
    sys.exit(0)
