"""Memory of a GPU: what --auto chooses by, what --dry_run prints. Needs no GPU and no weights.

One step runs on fake tensors, which have shapes but no memory, and the bytes alive are counted. The
peak was within 0.94 GiB of the real one in 6 of 6 runs on an H200. W weights, T of them trained, on
N GPUs that share them (1 under DDP), take on each W / N in their stored dtype, 4 T / N of gradients
(under FSDP2 4 T more where they accumulate), 8 T / N of Adam's moments and 4 T / N of a moving
average; --cpu_offload keeps all that on the host. To that add what FSDP2 gathers, the activations,
and a guess for the CUDA context, cuBLAS and NCCL. Fragmentation is not modelled.
"""
import contextlib
import copy
import functools
import shutil
import tempfile
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
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

from core import checkpoint, dist, json_files, kernels, metrics
from core.cli import UserError, plural, local_ranks, named_flags, require
from core.packing import PackOrder
from core.problems import collect

GIB = 2**30
FIXED = 1.0 * GIB       # CUDA context and workspaces; NCCL's buffers take as much again
USABLE = 0.95           # of a GPU's memory; the rest is left for fragmentation
RATES = {"an H200": 790e12, "an RTX 3090": 71e12}   # FLOP/s of large bf16 products, docs/speed.md
STAGES = "the heads", "a layer's backward", "the embedding's backward", "the last reduction"
FLAGS = {"parallel": "parallel", "max_tokens_per_batch": "budget",
         "per_device_train_batch_size": "batch_size", "gradient_checkpointing": "recompute",
         "gradient_accumulation_steps": "accumulation"}     # {what --auto sets: field of Setup}


@dataclass(frozen=True)
class Setup:
    """Settings of a run that change its memory."""
    ranks: int
    parallel: str = "ddp"           # ddp, fsdp or hsdp
    bf16: bool = True               # or fp16
    recompute: str | None = None    # None, all or selective
    accumulation: int = 1           # micro-steps of an optimizer step
    batch_size: int = 1             # samples or rows of a micro-step, without a budget
    budget: int = 0                 # tokens that every pack is filled to, 0: none
    reshard: bool | None = None     # fsdp: a layer is freed after its forward
    offload: bool | None = None     # fsdp: shards and moments are in host memory
    shard_size: int = 0             # hsdp: GPUs that weights are sharded over

    @property
    def fsdp(self):
        return self.parallel != "ddp"

    @property
    def shards(self):
        group = self.shard_size or local_ranks(self.ranks)
        return {"ddp": 1, "fsdp": self.ranks, "hsdp": group}[self.parallel]

    @property
    def fresh(self):
        """Gradients come while activations go; else they are there all the time."""
        return self.accumulation == 1 and (self.fsdp or self.ranks == 1)


def setup_of(args, ranks):
    """Setup of a trainer's flags. ranks: how many processes train."""
    flags = vars(args)      # not every trainer has all of them
    return Setup(ranks, bf16=bool(args.bf16 or flags.get("fp16")), shard_size=args.shard_size,
                 reshard=flags.get("reshard_after_forward"), offload=flags.get("cpu_offload"),
                 **{field: flags[flag] for flag, field in FLAGS.items() if flag in flags})


# ---- A step on tensors without memory


class Step(NamedTuple):
    """The computation of a trainer's micro-step."""
    model: nn.Module        # what training calls, on any device, meta as well
    layers: Callable        # (model) -> its decoder layers
    loss: Callable          # (model, *pack) -> the loss of a pack, whose size is some numbers
    kernels: tuple = ()     # (module, name, function): what a GPU computes otherwise than a CPU
    average: bool = False   # trained weights have a moving average


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operators make in this context: now, and most in each stage."""

    def __init__(self, known):      # tensors that do not count
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now, self.stage, self.peaks, self.in_kernel = 0, STAGES[0], Counter(), False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        return out if self.in_kernel else self.note(out)

    def note(self, made):
        """Count new tensors until they are freed; returns them."""
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata)
        self.peaks[self.stage] = max(self.peaks[self.stage], self.now)
        return made

    def forget(self, key):
        self.now -= self.sizes.pop(key)

    def kernel(self, function, *args):
        """kernels.kernel: one kernel of the GPU, of which only the results are tensors."""
        self.in_kernel = True
        out = function(*args)
        self.in_kernel = False
        return self.note(out)

    def begin(self, stage, tensors):
        """Begin a stage when a gradient of the first of these tensors comes."""
        tensor = next(leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
        if tensor.requires_grad:
            tensor.register_hook(lambda _: setattr(self, "stage", stage))


class Kept(torch.autograd.Function):
    """A GPU kernel without its work: keeps inputs, a number a row, and attention its output."""

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
    """torch's attention of packed documents: q (S, heads, D), k and v (S, kv_heads, D)."""
    ends = q.new_empty(2, dtype=torch.int32)
    return varlen_attn(q, k, v, ends, ends, len(q), len(q), window_size=(-1, 0),
                       **kernels.GROUPED)


@contextlib.contextmanager
def gpu_kernels(live, more):
    """In this context a CPU keeps what a GPU would. more: Step.kernels."""
    def dropout(x, p=0.5, training=True, inplace=False):        # a byte a value, not a factor
        return torch.native_dropout(x, p, training)[0] if p and training else x
    with contextlib.ExitStack() as stack:
        for owner, name, function in (
                (kernels, "wanted", lambda x: True), (kernels, "kernel", live.kernel),
                (kernels, "rms_norm", lambda x, weight, _: Kept.apply(x, weight.to(x.dtype))),
                (F, "dropout", dropout), (F, "grouped_mm", lambda x, weights, **_: x @ weights[0]),
                (kernels, "_attention_by_document", varlen), *more):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


@functools.cache
def step_bytes(step, setup, pack, train=True, gpu=True, count=None):
    """{stage: most bytes} of a micro-step with one pack, or, without `train`, of a validation.
    gpu=False: with a CPU's kernels. Of many layers, all alike but the last, `count` are run.
    """
    every = len(step.layers(step.model))
    if not count and every > 4:     # run 2, then 4; each other layer adds as much
        two, four = (step_bytes(step, setup, pack, train, gpu, few) for few in (2, 4))
        return {stage: four[stage] + (four[stage] - two[stage]) / 2 * (every - 4) for stage in four}
    model = with_layers(step, count or every)
    layers = step.layers(model)
    kernels.set_mode(model, layers, setup.recompute)
    model.train(train)
    with FakeTensorMode(allow_non_fake_inputs=True):
        give_shapes(model, torch.bfloat16 if setup.bf16 and setup.fsdp else None)
        trained = [p for p in model.parameters() if p.requires_grad] if train else []
        known = [*model.parameters(), *model.buffers()]
        if not setup.fresh and not setup.fsdp:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
                known.append(parameter.grad)
        live = LiveBytes(known)
        if train:       # gradients reach the last layer, leave the first
            layers[-1].register_forward_hook(lambda _, given, out: live.begin(STAGES[1], out))
            layers[0].register_forward_pre_hook(
                lambda _, *given: live.begin(STAGES[2], given), with_kwargs=True)
        if setup.fsdp:
            reduce_gradients(live, trained, layers, setup)
        with live, gpu_kernels(live, step.kernels) if gpu else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=setup.bf16), \
                    torch.set_grad_enabled(train):
                loss = step.loss(model, *pack)
            if train:
                loss.backward()
    return dict(live.peaks)


def with_layers(step, count):
    """A copy of a Step's model with `count` of its layers, the last among them."""
    dropped = step.layers(step.model)[count - 1:-1]
    model = copy.deepcopy(step.model, {id(layer): layer for layer in dropped})
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            left = [part for part in module if not any(part is layer for layer in dropped)]
            module._modules = {str(number): part for number, part in enumerate(left)}
    return model


def give_shapes(model, dtype):
    """Give a module fake tensors of the same shapes; parameters of a dtype, None: as they are."""
    made = {None: None}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p not in made:
                made[p] = nn.Parameter(torch.empty(p.shape, dtype=dtype or p.dtype),
                                       p.requires_grad)
            module._parameters[name] = made[p]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def reduce_gradients(live, trained, layers, setup):
    """Reduce gradients as FSDP2 does: a layer that has all gradients sums them in fp32, until the
    next one does; then shards are left, unless they accumulate or go to the host, which estimate()
    counts. The root, all outside the layers, comes last.
    """
    unit_of = {p: number for number, layer in enumerate(layers) for p in layer.parameters()}
    wanted, waiting = Counter(unit_of.get(p) for p in trained), defaultdict(list)
    buffers, shards = [], []

    def arrived(parameter):
        unit = unit_of.get(parameter)
        waiting[unit].append(parameter.grad)
        parameter.grad = None
        if len(waiting[unit]) == wanted[unit]:
            live.stage = STAGES[3] if unit is None else live.stage
            values = sum(gradient.numel() for gradient in waiting.pop(unit))
            buffers.clear()     # of the unit before, freed first
            buffers.append(torch.empty(values * (parameter.element_size() + 4), dtype=torch.uint8))
            if setup.fresh and not setup.offload:
                shards.append(torch.empty(-(-values // setup.shards)))
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(arrived)


class Memory(NamedTuple):
    """Memory of one GPU with its worst pack, in bytes."""
    parts: dict         # {part: bytes}, which come and go
    stages: dict        # {stage of a run: bytes}

    @property
    def peak(self):
        return max(self.stages.values())


def values_of(module):
    return sum(p.numel() for p in module.parameters())


def estimate(step, setup, pack, held_out=None):
    """Memory with the worst pack, and the worst one of the validation."""
    model, layers = step.model, [values_of(layer) for layer in step.layers(step.model)]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    state = {"weights": sum(p.nbytes for p in model.parameters()), "gradients": 4 * trained,
             "optimizer": 8 * trained, "average": 4 * trained * step.average}
    parts = {name: 0 if setup.offload else of / setup.shards for name, of in state.items()}
    if setup.fsdp and setup.accumulation > 1:
        parts["gradients"] += 4 * trained
    parts["fixed"] = FIXED * (2 if setup.ranks > 1 or setup.fsdp else 1)
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
    return Memory(parts, stages)


# ---- --auto: rank 0 tries setups from the fastest on and takes the first that fits. What a flag
# names stays. A run that resumes takes the choice of its checkpoint, whatever memory there is now.

BUDGETS = (16384, 8192, 4096, 2048, 1024)       # tokens of a pack
LARGE = 4096        # tokens of a micro-step that keep the GPU, not the host, busy
EPOCH_STEPS = 10    # optimizer steps that an epoch has at least, where no flag says their size


def ways(args, setup):
    """Setups with other recomputation and sharding, from the fastest on, where flags leave them."""
    modes, flags = [None, "selective", "all"], vars(args)
    if args.compile is True:        # not auto; nothing can be picked out of a compiled layer
        modes.remove("selective")
    if "gradient_checkpointing" in named_flags(args):
        modes = [setup.recompute]
    fixed = setup.ranks == 1 or "parallel" in named_flags(args) or any(
        flags.get(name) for name in ("fp16", "float8", "base_dtype"))       # these need ddp
    kinds = [setup.parallel] if fixed else ["ddp", "fsdp"]
    return [replace(setup, recompute=mode, parallel=kind) for mode in modes for kind in kinds]


def choose_packs(args, world, ranks, lengths, memory_of, longest=0):
    """choose() among packs of tokens: large ones in all ways(), then smaller ones in the last way.
    A step has the samples of --global_batch_size, or an epoch at least EPOCH_STEPS steps.

    lengths: (n,) tokens of the samples. memory_of(setup, PackOrder): Memory. longest: tokens of a
    sample that is not among them.
    """
    setup, given = setup_of(args, ranks), named_flags(args)
    samples = args.global_batch_size or len(lengths) / EPOCH_STEPS      # of a step
    fixed = "gradient_accumulation_steps" in given
    most = samples * lengths.mean() / (ranks * (setup.accumulation if fixed else 1))
    longest = max(longest, int(lengths.max()))
    room = [budget for budget in BUDGETS if budget >= longest] or [-(-longest // 1024) * 1024]
    budgets = [budget for budget in room if budget <= most] or room[-1:]
    if given & {"max_tokens_per_batch", "per_device_train_batch_size"}:
        budgets = [setup.budget]
    large = [budget for budget in budgets if budget >= LARGE] or budgets[:1]
    tried = [replace(way, budget=budget) for way in ways(args, setup) for budget in large]
    tried += [replace(tried[-1], budget=budget) for budget in budgets[len(large):]]

    @functools.cache
    def order_of(budget):
        return PackOrder(lengths, tokens_per_pack=budget, seed=args.seed,
                         samples_per_pack=args.per_device_train_batch_size,
                         group_by_length=getattr(args, "group_by_length", False))

    def accumulated(way):
        if fixed or not (args.global_batch_size and way.budget):
            return way
        packs = order_of(way.budget).packs_per_epoch * samples / len(lengths)
        return replace(way, accumulation=max(1, round(packs / ranks)))
    return choose(args, world, ranks, map(accumulated, tried),
                  lambda setup: memory_of(setup, order_of(setup.budget)))


def choose(args, world, ranks, setups, memory_of):
    """Set the flags FLAGS that are open, alike on all ranks; True if any has changed.

    setups: the fastest first. memory_of(setup): Memory. UserError when none fits; a dry run takes
    the last one, and print_plan refuses it.
    """
    def first_that_fits():
        if chosen := earlier_choice(args, ranks):
            return chosen, "as the run that is resumed began"
        for setup in setups:
            found = memory_of(setup)
            if found.peak <= USABLE * gpu_memory(args):
                break
        if args.dry_run is None:
            check_memory(found, args)
        chosen = {flag: getattr(setup, field) for flag, field in FLAGS.items() if flag in args}
        return chosen | {"packs_per_step": ranks * setup.accumulation}, size(found.peak)
    chosen, why = dist.rank0(world, first_that_fits)
    changed = any(getattr(args, flag, value) != value for flag, value in chosen.items())
    vars(args).update(chosen)
    if world.is_main:
        words = (f"--{flag} {chosen[flag]}" for flag in FLAGS if chosen.get(flag))
        print("auto      ", *words, f"({why})")
    return changed


def earlier_choice(args, ranks):
    """FLAGS of the newest readable checkpoint of --resume, where none is named, or {}."""
    folders = [path for _, path in reversed(checkpoint.list_checkpoints(args.output_dir))]
    earlier = {}
    for folder in folders if args.resume in ("auto", "none") else [Path(args.resume)]:
        with contextlib.suppress(UserError, OSError, KeyError):     # nothing is hashed:
            earlier = json_files.read_object(folder / checkpoint.STATE / "state.json")["args"]
            break       # these flags are alike in all checkpoints of a run
    # --auto chose these as well, once
    for flag, value, words in ("cpu_offload", True, ""), ("base_dtype", "nf4", " nf4"):
        require(earlier.get(flag) != value or getattr(args, flag, None) == value,
                f"--auto: give --{flag}{words}, as in the run that is resumed")
    chosen = {flag: earlier[flag] for flag in FLAGS if flag in earlier.keys() - named_flags(args)}
    packs = earlier.get("packs_per_step")
    if packs and "gradient_accumulation_steps" not in named_flags(args):
        require(packs % ranks == 0,
                f"--auto: this run has {packs} packs a step, not a multiple of {ranks} ranks; "
                "take another number of ranks, or give --gradient_accumulation_steps")
        chosen |= {"gradient_accumulation_steps": packs // ranks, "packs_per_step": packs}
    return chosen


# ---- --dry_run: too little of anything is a UserError


def size(n):
    """Bytes as text."""
    return f"{n / GIB:,.2f} GiB" if n >= GIB / 10 else f"{n / 2**20:,.2f} MiB"


def gpu_memory(args):
    """Bytes of one GPU: --gpu_memory, or what the GPU here has, or 80 GiB."""
    here = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory
    return (args.gpu_memory or 0) * GIB or here or 80 * GIB


def check_memory(found, args):
    """A Memory must leave a margin on the GPU."""
    require(found.peak <= USABLE * gpu_memory(args),
            f"memory: about {size(found.peak)} needed on each GPU, which has "
            f"{size(gpu_memory(args))}, 5 % of it left for fragmentation; what helps: --auto, "
            "--bf16 (T4, V100: --fp16), --use_lora, then --base_dtype nf4 (pip install "
            "bitsandbytes), shorter samples, more GPUs, --parallel fsdp --cpu_offload")


def check_disk(path, needed, what):
    """A folder must be writable, or possible to make, and its disk have `needed` bytes free."""
    path = Path(path).absolute()
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UserError(f"{what} {path}: cannot be written ({error.strerror})")
    free = shutil.disk_usage(place).free
    require(needed <= free,
            f"{path}: {size(needed)} needed for {what}, its disk has {size(free)} free")


def pack_sums(order, epochs, values):
    """Sums (packs,) int64 of values (n_samples,) over each pack of some epochs of a PackOrder."""
    return np.concatenate([np.add.reduceat(values[plan.samples].astype(np.int64), plan.offsets[:-1])
                           for plan in map(order.epoch, epochs)])


def data_lines(args, setup, model, order, lengths):
    """[line] on what runs where, the model, and packs of samples of lengths (n,), in tokens."""
    dtype = "fp16" if getattr(args, "fp16", False) else "bf16" if setup.bf16 else "fp32"
    return [f"plan       {plural(setup.ranks, 'GPU')}, {setup.parallel}, {dtype}",
            metrics.model_text(model, args.use_lora),
            f"packs      {order.packs_per_epoch:,} an epoch, {lengths.sum():,} tokens, "
            f"{len(lengths) / order.packs_per_epoch:.1f} samples a pack; longest sample "
            f"{lengths.max():,} tokens"]


def print_plan(args, setup, found, pack, model, lines, steps, flops=0, checks=()):
    """Print a headline, then the plan; UserError with all that the run will not fit into.
    found: Memory; pack: the size of the worst one, in words. model: as trained. lines: of the plan.
    steps: to go. flops: a lower bound on RATES' GPUs, 0: unknown. checks: more of them, functions.
    """
    limit = gpu_memory(args)
    gpu = "an RTX 3090" if limit <= 24.5 * GIB else "an H200"
    seconds = flops / RATES[gpu]
    time = f"{seconds:.0f} s" if seconds < 120 else metrics.duration(seconds)
    parts = " + ".join(f"{name} {of / GIB:,.2f}" for name, of in found.parts.items() if of)
    trained = [p for p in model.parameters() if p.requires_grad]
    saved = sum(p.nbytes for p in (trained if args.use_lora else model.parameters()))
    saved = saved * (2 if found.parts["average"] else 1) + 8 * sum(p.numel() for p in trained)
    saves = 1 + max(0, steps) // args.save_steps if args.save_steps else 1
    # the newest, the best and the one being written
    most = min(saves, args.save_total_limit + 2) if args.save_total_limit else saves
    have = sum(file.stat().st_size for _, path in checkpoint.list_checkpoints(args.output_dir)
               for file in path.rglob("*") if file.is_file())
    print(f"{'FITS' if found.peak <= USABLE * limit else 'TOO LARGE'} {found.peak / GIB:.1f} of "
          f"{limit / GIB:.1f} GiB · {plural(steps, 'step')}"
          + f" · at least {time} on {gpu}" * bool(flops), *lines,
          f"memory     {parts} GiB; worst pack, {pack}{kernels.NOTES[setup.recompute]}; the peak "
          f"comes in {max(found.stages, key=found.stages.get)}",
          f"disk       {size(saved)} a checkpoint, at most {most} at once", sep="\n")
    collect(True, lambda: check_memory(found, args), *checks,
            lambda: check_disk(args.output_dir, saved * most - have, f"{most} checkpoints"))
