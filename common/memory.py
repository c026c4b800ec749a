"""What a training step keeps in one GPU's memory, found by running the model's forward on shapes without memory.

Bytes, for a model of W weight values of which T are trained, on N GPUs:

    part          ddp                        fsdp (fully_shard per layer; / N each, on the host under CPU offload)
    weights       stored dtype x W           stored dtype x W / N
    gradients     4 T (DDP: bucket views)    4 T / N, and 4 T whole while accumulation goes without reducing
    optimizer     8 T (Adam, fp32)           8 T / N
    average       4 T, where there is one    4 T / N
    copies        2 x fp32 matrices, while   c x (root unit, the layer at work, the next one and the buffer it is
                  autocast caches its casts  gathered in; or all W, when layers are not freed after their forward).
                                             At the heads the root alone; before the first layer twice the root and
                                             that layer, with the buffers they are gathered in
    reduction     none (in the buckets)      (c + 4) x T of a layer, c x T of the root, whose turn comes last and which
                                             is freed before; of a table that is the head, too, three gradients

c is the bytes of a compute value: FSDP2 gathers in the compute dtype and reduces in fp32.

On top come activations and logits. Activations are no formula: row_bytes runs the model itself. Logits are copies of
one fp32 tensor, whose number each loss knows. They are not there all at once: peak_stages adds up what is alive in each
stage of a step. "fixed" covers the CUDA context, cuBLAS and NCCL; fragmentation is not modelled.
"""
import contextlib
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import fused, recomputation

GIB = 2**30
FIXED = 1.0 * GIB           # CUDA context and library workspaces: about this much on current GPUs
FIXED_NCCL = 1.0 * GIB      # NCCL's buffers and channels beside it: a guess
BACKWARD = 1.3              # a recomputed layer with the gradients that pass through it, over what the layer keeps
TRIAL = 64                  # rows of each kind in a trial


# ---------------------------------------------------------------------------------------------------------------------
# Activations


class Kernel(NamedTuple):
    """An attention kernel of the GPU that the CPU lacks: which function stands in for it here, and what it keeps."""
    owner: object           # module with that function of (q, k, v, ...), heads second, keys like values
    name: str
    grouped: bool           # it takes fewer key than query heads as they are; else they are repeated
    selected: bool          # selective checkpointing keeps its output


class _KeptByAttention(torch.autograd.Function):
    """What flash attention keeps for its backward pass, without its work."""

    @staticmethod
    def forward(ctx, q, k, v):
        """q (..., heads, ..., D), k and v with fewer heads or as many -> like q."""
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))     # the last: log-sum-exp
        return out


class _KeptByNorm(torch.autograd.Function):
    """What the GPU's kernel of F.rms_norm keeps for its backward pass, without its work."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))        # the last: its quotient
        return torch.empty_like(x)


class _KeptByExperts(torch.autograd.Function):
    """What F.grouped_mm keeps for its backward pass, without its work; torch knows its shapes in bfloat16 alone."""

    @staticmethod
    def forward(ctx, rows, weights):
        """rows (n, inner), weights (experts, inner, outer) -> (n, outer)."""
        ctx.save_for_backward(*([rows] if ctx.needs_input_grad[1] else []), weights)
        return rows.new_empty(len(rows), weights.shape[-1])


class _Selected(TorchDispatchMode):
    """Calls note with what selective checkpointing keeps of the operators' outputs."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if recomputation.keeps(op, args):
            self.note(tree_leaves(out)[0])
        return out


class _DropoutOfGPUs(TorchFunctionMode):
    """Dropout as on a GPU, whose kernel keeps a byte a value and not a factor."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.dropout:
            return function(*args, **(kwargs or {}))

        def dropout(x, p=0.5, training=True, inplace=False):
            return torch.native_dropout(x, p, training)[0] if p and training else x
        return dropout(*args, **(kwargs or {}))


@contextlib.contextmanager
def swapped(*changes):
    """Within this context attributes have other values. changes: (owner, name, value)."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for change in before:
            setattr(*change)


def _trial(model, layers, inputs, bf16, sharded, plain, kernel, gpu):
    """Bytes of one forward pass -> as row_bytes, with constants inside, and "layer": (layers,) of each of them."""
    saved, given, selected, bounds, held, times = {}, {}, {}, [], [], Counter()     # {storage: its bytes}

    def note(tensor, where=saved):
        storage = tensor.untyped_storage()
        held.append(tensor)                             # so that its place is not reused
        times[storage._cdata] += where is given
        where[storage._cdata] = storage.nbytes()
        return tensor

    def total(where):
        return sum(where.values())

    def select(tensor):
        note(tensor, selected)

    def enter(_, args, kwargs):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in {t.untyped_storage()._cdata: t for t in tensors}.values():
            note(tensor, given)
        leave()

    def leave(*_):
        bounds.append((total(saved), total(dict(saved.items() - given.items()))))

    def attention(q, k, v, *_):
        if not (gpu and kernel.grouped) and k.shape[1] < q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out = _KeptByAttention.apply(q, k, v)
        if kernel.selected:
            select(out)
        return out if gpu else torch.cat([out[:1], out[1:]])        # the CPU's goes document by document

    def norm(x, weight, _):
        return _KeptByNorm.apply(x, weight.to(x.dtype))

    def experts(rows, weights, **_):
        out = _KeptByExperts.apply(rows, weights)
        if recomputation.keeps_product(*weights.shape[1:]):
            select(out)
        return out

    changes = [*plain, (F, "grouped_mm", experts), *([(kernel.owner, kernel.name, attention)] if kernel else []),
               *([(fused, "wanted", lambda x: True), (fused, "rms_norm", norm)] if gpu else [])]
    handles = [handle for layer in layers for handle in (layer.register_forward_pre_hook(enter, with_kwargs=True),
                                                         layer.register_forward_hook(leave))]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), swapped(*changes), \
                torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), \
                torch.autocast("cpu", torch.bfloat16, enabled=bf16), _Selected(select), \
                _DropoutOfGPUs() if gpu else contextlib.nullcontext():
            tensors = {name: torch.empty(p.shape, dtype=torch.bfloat16 if bf16 and sharded else p.dtype,
                                         requires_grad=p.requires_grad) for name, p in model.named_parameters()}
            tensors |= {name: torch.empty(b.shape, dtype=b.dtype) for name, b in model.named_buffers()}
            torch.func.functional_call(model, tensors, *inputs())
    finally:
        for handle in handles:
            handle.remove()
    of_layers, own = np.subtract(bounds[1::2], bounds[::2]).T
    shared = {key: size for key, size in given.items() if times[key] > 1}      # the model holds them for all its layers
    return {"layers": of_layers.sum(), "inputs": total(given), "selected": total(selected),
            "ends": total(saved | shared) - of_layers.sum(), "layer": own}


def row_bytes(model, layers, inputs, kinds=1, *, bf16, sharded, plain=(), kernel=None, gpu=True):
    """Bytes that autograd keeps of one row from forward to backward -> {"layers", "inputs", "selected", "ends",
    "layer": (kinds,) float64}.

    layers: of all of them; inputs: of what they are called with, which is all that recomputation keeps; selected: what
    the selective kind keeps beside it; ends: of what stands outside them; layer: of the largest, beside its inputs. A
    row is whatever memory grows with: a token, a token of one modality, a sequence. The heads are to get nothing to do:
    logits are counted elsewhere. Not counted either: casts of weights (cast_bytes).

    model: what training calls, in training mode, with dtypes and requires_grad as trained, on any device, meta as well;
    layers: those of it that recomputation takes. inputs(*numbers of rows of each kind): (args, kwargs) of its forward,
    asked for under FakeTensorMode. sharded: FSDP2, which computes on weights in bfloat16 where autocast only casts
    them. plain: (owner, name, value) of attributes with which no layer is recomputed. kernel: Kernel, where the CPU's
    attention is another one. gpu=False: what the CPU's kernels keep instead.

    Not a formula: the model's own forward runs on tensors that have shapes but no memory, and every storage that
    autograd saves is noted once: with TRIAL rows of each kind, and for each kind with TRIAL more. What is there either
    way, such as weights and their casts, drops out.
    """
    def trial(*rows):
        return _trial(model, layers, lambda: inputs(*rows), bf16, sharded, plain, kernel, gpu)
    base = trial(*[TRIAL] * kinds)
    more = [trial(*(TRIAL * (1 + (kind == grown)) for kind in range(kinds))) for grown in range(kinds)]
    row = {name: np.stack([np.subtract(found[name], base[name]) / TRIAL for found in more], axis=-1) for name in base}
    return row | {"layer": row["layer"][row["layer"].sum(1).argmax()]}


def kept_bytes(row, layers, recompute):
    """Of row_bytes' dict -> (kinds,) bytes (kept from forward to backward, that a layer at work adds to them).

    layers: how many. recompute: of flags.MODES, or None.
    """
    selected = row["selected"] if recompute == "selective" else 0
    kept = row["inputs"] + selected if recompute else row["layers"]
    return kept + row["ends"], row["layer"] - selected / layers     # a layer computed again takes over what it had kept


def cast_bytes(model, layers, recompute, heads=(), freed=(".lora_B.",), never=()):
    """Bytes of the bf16 copies of fp32 matrices that autocast makes -> (kept to the backward pass, to its beginning).

    heads: embeddings that are heads as well, so that their matrices are cast, too. Recomputed layers' copies go with
    the forward pass, and one layer's at a time come back. Parts of names: freed, what a layer casts itself, as the B of
    an adapter, so that its recomputation frees that copy at once; never, what is used in fp32.
    """
    def copies(module):
        found = {parameter: name for place, part in module.named_modules()
                 if not isinstance(part, nn.Embedding) or part in heads
                 for name, parameter in part.named_parameters(place, recurse=False)}
        left = (".experts.", *never, *(freed if recompute else ()))      # experts are left as stored
        return 2 * sum(p.numel() for p, name in found.items() if p.dtype == torch.float32 and p.ndim > 1
                       and not any(part in name for part in left))
    inside = [copies(layer) for layer in layers] if recompute else [0]
    return copies(model) - sum(inside) + max(inside), sum(inside) - max(inside)


# ---------------------------------------------------------------------------------------------------------------------
# All parts


def unit_sizes(model, layers):
    """[(values, stored bytes, trained values)] of everything outside the layers first, then of each layer."""
    def size(parameters):
        sizes = [(p.numel(), p.nbytes, p.numel() * p.requires_grad) for p in parameters]
        return [sum(column) for column in zip(*sizes)]
    units = [size(layer.parameters()) for layer in layers]
    return [[whole - sum(part) for whole, part in zip(size(model.parameters()), zip(*units))], *units]


def table_of(model):
    """{"table": trained values of a model's largest embedding, "tied": whether it is a head, too}: of memory_parts."""
    table = max((part.weight for part in model.modules() if isinstance(part, nn.Embedding)), key=torch.numel)
    return {"table": table.numel() * table.requires_grad,
            "tied": any(part.weight is table for part in model.modules() if isinstance(part, nn.Linear))}


def checkpoint_bytes(model, trained_only, average=False):
    """(weights, optimizer) bytes of a checkpoint; the rest is small. trained_only: adapters. average: saved as well."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(parameter.nbytes for parameter in (trained if trained_only else model.parameters()))
    return weights * (1 + average), 8 * sum(parameter.numel() for parameter in trained)


def memory_parts(units, *, world=1, sharded=False, offload=False, reshard=True, compute=4, casts=(0, 0), accumulation=1,
                 average=False, table=0, tied=False):
    """What stands in one GPU's memory beside activations and logits -> {part: bytes}; see the top of the file.

    units: of unit_sizes. compute: bytes of the compute dtype. casts: of cast_bytes (ddp). reshard: a layer is freed
    after its forward. accumulation: micro-steps of a step, between which gradients stay, unsharded. average: trained
    weights have one. table: trained values of the input embedding; tied: it is the head, too. "host": what offload puts
    into host memory; "fresh": gradients that come while activations go, "late": those of them behind all layers.
    """
    values, stored, trained = (sum(column) for column in zip(*units))
    shards = world if sharded else 1
    state = {"weights": stored / shards, "gradients": 4 * trained / shards, "optimizer": 8 * trained / shards,
             "average": 4 * trained * average / shards}
    parts = {**(dict.fromkeys(state, 0) if offload else state), "host": sum(state.values()) if offload else 0,
             "copies": casts[0], "forward copies": casts[1], "copies at the heads": casts[0], "first copies": 0,
             "reduction": 0, "last reduction": 0, "ends": 0, "fresh": 0, "late": 0,
             "fixed": FIXED + FIXED_NCCL * (world > 1 or sharded)}
    if accumulation == 1 and (sharded or world == 1):       # else they stand in DDP's buckets, or from before
        parts["fresh"] = parts["gradients"]
        parts["late"] = 4 * units[0][2] / shards if sharded else 0 if tied else 4 * table
    if sharded:
        root, layers = units[0], units[1:]
        in_flight = root[0] + sum(sorted(layer[0] for layer in layers)[-3 if len(layers) > 2 else -1:])
        parts["copies"] = compute * (in_flight if reshard else values)
        parts["copies at the heads"] = compute * (root[0] if reshard else values)
        parts["first copies"] = compute * 2 * (root[0] + layers[0][0])
        parts["gradients"] += 4 * trained * (accumulation > 1)
        parts["reduction"] = (compute + 4) * max(layer[2] for layer in layers) + compute * (
            root[2] - table * (not tied))       # the gradient of a table that is no head comes last
        parts["last reduction"] = (compute + 4) * root[2]
        parts["ends"] = compute * (root[0] + root[2] + 2 * table * tied) + 4 * max(layer[2] for layer in layers)
    return parts


def peak_stages(parts, activations, layer, logits, recompute):
    """Bytes alive on one GPU in the stages of a step -> {stage: bytes}; the largest is the peak.

    parts: of memory_parts. activations: kept from forward to backward; layer: of one layer; logits: peak of the heads'.
    Numbers or arrays over packs.
    """
    standing = sum(parts[name] for name in ("weights", "gradients", "optimizer", "average", "fixed")) - parts["fresh"]
    work = (BACKWARD if recompute else BACKWARD - 1) * layer
    forward = parts["forward copies"] + 2 / 3 * logits      # logits beside their log-softmax, one gradient less
    early = parts["fresh"] - parts["late"]                  # gradients of the layers
    passed = layer if np.any(parts["reduction"]) and not recompute else 0       # whose gradients are being summed
    last = max(parts["last reduction"], parts["ends"]) or parts["late"]     # the shards of them come when these go
    return {"the first layer": standing + parts["first copies"] + 0 * layer,
            "the heads": standing + parts["copies at the heads"] + activations + np.maximum(logits, forward),
            "a layer's backward": standing + parts["copies"] + np.maximum(activations - passed, early) + work
            + parts["reduction"],
            "the last reduction": standing + early + last + 0 * layer}


def worst_pack(parts, activations, layer, logits, recompute):
    """(number of the pack with the highest peak, parts with its activations and logits, its peak_stages).

    activations, layer, logits: (packs,) bytes, as in peak_stages.
    """
    stages = peak_stages(parts, activations, layer, logits, recompute)
    worst = int(np.maximum(stages["the heads"], stages["a layer's backward"]).argmax())     # what depends on the pack
    parts = parts | {"activations": activations[worst], "layer": layer[worst], "logits": logits[worst]}
    return worst, parts, {name: values[worst] for name, values in stages.items()}
