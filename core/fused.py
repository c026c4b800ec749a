"""Norms, rotary embedding, SwiGLU and cross-entropy in fewer passes over a GPU's memory.

Written as transformers has them, a norm is 8 kernels forward and 12 backward, a rotary embedding 5 and 8 for q and as
many for k, a SwiGLU 2 and 4, each a pass over memory as wide as the layer. Here a norm is F.rms_norm or F.layer_norm,
and the others are one kernel each way, which torch.compile makes of a function of a few lines (plainly run where it
cannot: without Triton). They round once, at the end, and keep only their inputs for the backward pass.

On a CPU, and in layers that torch.compile sees whole, transformers' own code runs, and our own networks' plain one.
"""
import functools
import inspect
import math
import sys

import torch
import torch.nn.functional as F
from torch.utils._triton import has_triton

from core import cli

SWIGLU = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"     # of transformers' MLPs
ROTARY = "apply_rotary_pos_emb"         # of transformers' modules
FLASH = (torch.bfloat16, torch.float16)     # in which GPUs have packed attention; fp16.py looks
RECOMPILE = 32      # shapes a function is compiled for; beyond it dynamo runs it eagerly, in silence


def wanted(x):
    """Whether x is for the kernels here."""
    return x.is_cuda and not torch.compiler.is_compiling()


@functools.cache
def _compiled(function):
    # a size is symbolic once it has changed; were all of them, Triton could not prove that rows are
    # aligned, and would read 2 bytes at a time instead of 16 (tests/gpu/test_kernels.py)
    torch._dynamo.config.recompile_limit = max(RECOMPILE, torch._dynamo.config.recompile_limit)
    return torch.compile(function)


@functools.cache
def compiles(kind):
    """Whether torch.compile can build for devices of a kind; one small kernel is tried, and a
    notice says what is missing. Triton's launcher wants a C compiler and Python.h, a CPU's code C++.
    """
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=kind))
    except Exception as error:      # of a compiler that is not there, is broken, or lacks headers
        error = getattr(error, "inner_exception", error)
        why = cli.printable(str(error).strip().partition("\n")[0], 80)
        language = "C++" if kind == "cpu" else "C"
        cli.notice(f"torch.compile fails here ({why}), so nothing is compiled; it needs a "
                     f"{language} compiler and Python.h")
        return False
    return True


def kernel(function, *args):
    """function(*args), on a GPU as one kernel."""
    compiled = args[0].is_cuda and has_triton() and compiles("cuda")
    return (_compiled(function) if compiled else function)(*args)


# ---------------------------------------------------------------------------------------------------------------------
# Functions


def stream_dtype(x):
    """dtype that hidden states x shall have between layers: what autocast computes in, or their own.

    Embeddings in fp32 would make all that is added to them fp32, twice the bytes of each norm, addition and gradient.
    """
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def rms_norm(x, weight, eps):
    """x (..., H) divided by its root mean square, times weight (H,); like x. Mean and quotient are fp32."""
    with torch.autocast(x.device.type, enabled=False):      # which would make it fp32
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def outputs(x, *layers):
    """[layer(x)] of linear layers; those under adapters are computed together."""
    if hasattr(layers[0], "adds_in_place"):
        from core import low_rank
        return low_rank.outputs(x, *layers)
    return [layer(x) for layer in layers]


def swiglu_kernel(gate, up):
    return (F.silu(gate.float()) * up.float()).to(up.dtype)


def swiglu_gradient_kernel(grad, gate, up):
    wide, grad = gate.float(), grad.float()
    share = wide.sigmoid()
    return ((grad * up.float() * share * (1 + wide * (1 - share))).to(gate.dtype), (grad * wide * share).to(up.dtype))


class _SwiGLU(torch.autograd.Function):

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return kernel(swiglu_kernel, gate, up)

    @staticmethod
    def backward(ctx, grad):
        return kernel(swiglu_gradient_kernel, grad, *ctx.saved_tensors)


def swiglu(gate, up):
    """silu(gate) * up, all of one shape."""
    return F.silu(gate) * up if torch.compiler.is_compiling() else _SwiGLU.apply(gate, up)


def rotate_kernel(x, cos, sin):
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = (t.float().chunk(2, dim=-1) for t in (x, cos, sin))
    return torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b], dim=-1).to(x.dtype)


def rotate_gradient_kernel(grad, cos, sin):
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = (t.float().chunk(2, dim=-1) for t in (grad, cos, sin))
    return torch.cat([a * cos_a + b * sin_b, b * cos_b - a * sin_a], dim=-1).to(grad.dtype)


class _Rotate(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return kernel(rotate_kernel, x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        return kernel(rotate_gradient_kernel, grad, *ctx.saved_tensors), None, None


def rotate(x, cos, sin):
    """Rotary embedding of x (..., D): its halves as the two coordinates; cos, sin (..., D) broadcast; like x."""
    return _Rotate.apply(x, cos, sin)


def layer_norm(x, weight, bias, eps):
    """Layer norm of x (..., H) with weight and bias (H,), rounded to the dtype of x, like x; sums are fp32."""
    with torch.autocast(x.device.type, enabled=False):      # which would make it fp32
        return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps)


def cross_entropies_kernel(logits, labels):
    wide = logits.float()
    log_sum = wide.logsumexp(-1)
    return log_sum - wide.gather(-1, labels[:, None])[:, 0], log_sum


def cross_entropies_gradient_kernel(grad, logits, labels, log_sum):
    hit = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    return (grad[:, None] * ((logits.float() - log_sum[:, None]).exp() - hit.float())).to(logits.dtype)


class _CrossEntropies(torch.autograd.Function):

    @staticmethod
    def forward(ctx, logits, labels):
        losses, log_sum = kernel(cross_entropies_kernel, logits, labels)
        ctx.save_for_backward(logits, labels, log_sum)
        return losses

    @staticmethod
    def backward(ctx, grad):
        return kernel(cross_entropies_gradient_kernel, grad, *ctx.saved_tensors), None


def cross_entropies(logits, labels):
    """Cross-entropies (R,) float32 of logits (R, V), some of which may be -inf, at labels (R,) int64."""
    return _CrossEntropies.apply(logits, labels)


# ---------------------------------------------------------------------------------------------------------------------
# transformers' models


def use(model):
    """Have a model of transformers use these on a GPU, wherever its own code computes the same; returns the model.

    Rotary embeddings are functions of transformers' modules, and replaced there, for each model of that kind.
    """
    for module in model.modules():
        kind, place = type(module), sys.modules[type(module).__module__]
        if _is_plain_norm(kind):
            module.__class__ = _with(kind, lambda norm, x: rms_norm(x, norm.weight, norm.variance_epsilon))
        elif _is_plain_mlp(kind) and _is_silu(module.act_fn):
            module.__class__ = _with(kind, lambda mlp, x: mlp.down_proj(
                swiglu(*outputs(x, mlp.gate_proj, mlp.up_proj))), compiled_too=True)
        plain = getattr(place, ROTARY, None)
        if plain and not hasattr(plain, "plain") and _is_plain_rotary(plain):
            setattr(place, ROTARY, _rotary(plain))
    return model


def _with(kind, forward, compiled_too=False):
    """The class with another forward for what is wanted here."""
    if (kind, forward.__code__) not in _made:
        def chosen(self, x):
            ours = wanted(x) or compiled_too and x.is_cuda
            return forward(self, x) if ours else kind.forward(self, x)
        _made[kind, forward.__code__] = type(kind.__name__, (kind,), {"forward": chosen, "__module__": kind.__module__})
    return _made[kind, forward.__code__]


_made = {}      # so that a class is made once


def _rotary(plain):
    @functools.wraps(plain)
    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        if not wanted(q) or cos.shape[-1] != q.shape[-1]:       # a part of each head is rotated
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)
    rotary.plain = plain
    return rotary


def _numbers(*shape):
    """Some float32 numbers from -1 to 1; the generator of the training is not asked."""
    return torch.arange(1.0, 1 + math.prod(shape), device="cpu").sin().view(shape)


@functools.cache
def _is_plain_norm(kind):
    """Whether a class is a norm with a weight alone, as F.rms_norm computes it."""
    if not kind.__name__.endswith("RMSNorm") or "variance_epsilon" not in inspect.getsource(kind):
        return False
    with torch.no_grad(), torch.device("cpu"):
        norm, x = kind(6, eps=0.25), _numbers(5, 6)
        norm.weight.copy_(_numbers(6))
        return torch.allclose(norm(x), rms_norm(x, norm.weight, 0.25), rtol=1e-5, atol=1e-6)


@functools.cache
def _is_plain_mlp(kind):
    """Whether a class is an MLP of three projections and one activation."""
    return kind.__module__.startswith("transformers.") and SWIGLU in inspect.getsource(kind)


def _is_silu(function):
    return torch.equal(function(_numbers(9)), F.silu(_numbers(9)))


def _is_plain_rotary(function):
    """Whether a function of transformers rotates the halves of each head."""
    q, k = _numbers(1, 4, 5, 6), _numbers(1, 2, 5, 6)
    cos, sin = _numbers(1, 5, 6), _numbers(1, 5, 6).square()
    if list(inspect.signature(function).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    return all(torch.allclose(theirs, rotate(x, cos[:, None], sin[:, None]), rtol=1e-5, atol=1e-6)
               for theirs, x in zip(function(q, k, cos, sin), (q, k)))
