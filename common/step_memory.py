"""Memory of one GPU, of W weight values of which T are trained, sharded over N GPUs (1 under DDP):

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
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.flags import local_ranks
from common.text import GIB
from core import document_attention, fused, recomputation

FIXED = 1.0 * GIB       # CUDA context and workspaces: about this much on current GPUs
FIXED_NCCL = 1.0 * GIB  # NCCL's buffers and channels beside it: a guess
STAGES = "the heads", "a layer's backward", "the embedding's backward", "the last reduction"


@dataclass(frozen=True)
class Setup:
    """How a run computes, as its flags say; None where the trainer has no such flag."""
    ranks: int
    parallel: str = "ddp"           # ddp, fsdp or hsdp
    bf16: bool = True               # or fp16
    recompute: str | None = None    # of flags.MODES, or None
    accumulation: int = 1           # micro-steps of an optimizer step
    batch_size: int = 1             # samples or rows of a micro-step, without a budget
    budget: int = 0                 # tokens that every pack is filled to, 0: none
    reshard: bool | None = None     # fsdp: a layer is freed after its forward
    offload: bool | None = None     # fsdp: shards and moments are in host memory
    adapters: bool | None = None    # only they are trained
    shard_size: int = 0             # hsdp: GPUs that weights are sharded over, 0: those of a node
    base_dtype: str | None = None   # nf4: frozen layers in four bits; None, bf16: as computed
    fp16: bool = False              # which bf16 stands for as well
    whole: bool = False             # weights that FSDP2 cannot shard
    may_round: bool = False         # nf4 is open

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
    ends = q.new_empty(2, dtype=torch.int32)
    return varlen_attn(q, k, v, ends, ends, len(q), len(q), window_size=(-1, 0),
                       **document_attention.GROUPED)


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
    from core import nf4
    model = copy.deepcopy(step.model)
    nf4.convert(step.layers(model))
    return step._replace(model=model)


def estimate(step, setup, pack, held_out=None):
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
