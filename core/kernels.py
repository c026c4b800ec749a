"""Fast layers: fused operations, attention inside packed documents, recomputation of layers.

As transformers writes them, a norm is 8 kernels forward and 12 backward, a rotary embedding 5 and 8
for q and the same for k, a SwiGLU 2 and 4, each a pass over memory as wide as the layer. Here a
norm is torch's own, and the others, with cross-entropy, are one kernel each way, which
torch.compile makes of a function of a few lines. They round once, at the end, and keep only their
inputs. On a CPU, and in compiled layers, which fuse by themselves, transformers' code runs.

Recomputation: "all" keeps a layer's input and computes the layer again. "selective" also keeps the
outputs of attention (not FlexAttention) and of products, but for the wide ones of adapters, cheap
for their size. Gradients are the same bits.
"""
import functools
import inspect
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective_contexts

from core.cli import UserError, notice, printable

# What a class or function of transformers must contain to be replaced, by the code of its modules
NORM = """variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)"""
HALVES = "x1 = x[..., : x.shape[-1] // 2]"
ROTATED = """q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed"""
SWIGLU = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
FLASH = (torch.bfloat16, torch.float16)     # of packed attention on GPUs; optim.Scaler may empty it
RECOMPILE = 32      # shapes a function is compiled for; beyond it dynamo silently runs it eagerly


def wanted(x):
    """True if the kernels here can take x."""
    return x.is_cuda and not torch.compiler.is_compiling()


@functools.cache
def _compiled(function):
    # sizes are symbolic once they have changed; were all, Triton could not prove that rows are
    # aligned, and would read 2 bytes at a time instead of 16 (tests/gpu/test_kernels.py)
    torch._dynamo.config.recompile_limit = max(RECOMPILE, torch._dynamo.config.recompile_limit)
    return torch.compile(function)


@functools.cache
def compiles(kind):
    """True if torch.compile can build for devices of a kind; one small kernel is tried."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=kind))
    except Exception as error:      # no compiler, a broken one, or no headers
        why = str(getattr(error, "inner_exception", error)).strip().partition("\n")[0]
        notice(f"torch.compile fails here ({printable(why, 80)}), so nothing is compiled; it needs "
               f"a {'C++' if kind == 'cpu' else 'C'} compiler and Python.h")
        return False
    return True


def kernel(function, *args):
    """function(*args), on a GPU as one kernel."""
    compiled = args[0].is_cuda and has_triton() and compiles("cuda")
    return (_compiled(function) if compiled else function)(*args)


def define_operator(name, schema, function, fake):
    """torch.ops.flat_trainers.NAME, which compiled layers call as a whole. fake: its outputs
    without their values. torch.library.custom_op would check each call, three times its cost.
    """
    operators, full = torch.ops.flat_trainers, f"flat_trainers::{name}"
    if not hasattr(operators, name):        # another copy of this file may have defined it
        torch.library.define(full, schema)
        torch.library.impl(full, ("cpu", "cuda"), function)
        torch.library.register_fake(full, fake)
    return getattr(operators, name)


# ---- Functions


def stream_dtype(x):
    """dtype of hidden states x between layers: autocast's, which embeddings in fp32 ignore."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rms_norm(x, weight, eps):
    """x (..., H) divided by its root mean square, times weight (H,); like x. Sums are fp32."""
    with torch.autocast(x.device.type, enabled=False):      # which would make it fp32
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def outputs(x, *layers):
    """[layer(x)] of linear layers; those under adapters.AddingLinear are computed together."""
    together = getattr(layers[0], "together", None)
    return together(x, *layers) if together else [layer(x) for layer in layers]


class _Fused(torch.autograd.Function):
    """The first of kernels[0](*inputs). Gradients of the first inputs are kernels[1](gradient,
    *inputs from number `kept` on, *the kernel's other results). Kernels return tuples.
    """
    @staticmethod
    def forward(ctx, kernels, kept, *inputs):
        out, *others = kernel(kernels[0], *inputs)
        ctx.save_for_backward(*inputs[kept:], *others)
        ctx.gradients, ctx.inputs = kernels[1], len(inputs)
        return out

    @staticmethod
    def backward(ctx, grad):
        found = kernel(ctx.gradients, grad, *ctx.saved_tensors)
        return None, None, *found, *[None] * (ctx.inputs - len(found))


def swiglu_kernel(gate, up):
    return (F.silu(gate.float()) * up.float()).to(up.dtype),


def swiglu_gradient_kernel(grad, gate, up):
    wide, grad = gate.float(), grad.float()
    share = wide.sigmoid()
    return ((grad * up.float() * share * (1 + wide * (1 - share))).to(gate.dtype),
            (grad * wide * share).to(up.dtype))


def swiglu(gate, up):
    """silu(gate) * up, all of one shape."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return _Fused.apply((swiglu_kernel, swiglu_gradient_kernel), 0, gate, up)


def rotate_kernel(x, cos, sin):
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = (t.float().chunk(2, dim=-1) for t in (x, cos, sin))
    return torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b], dim=-1).to(x.dtype),


def rotate_gradient_kernel(grad, cos, sin):
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = (t.float().chunk(2, dim=-1) for t in (grad, cos, sin))
    return torch.cat([a * cos_a + b * sin_b, b * cos_b - a * sin_a], dim=-1).to(grad.dtype),


def rotate(x, cos, sin):
    """Rotary embedding of the halves of x (..., D); cos, sin (..., D) broadcast; like x."""
    return _Fused.apply((rotate_kernel, rotate_gradient_kernel), 1, x, cos, sin)


def layer_norm(x, weight, bias, eps):
    """Layer norm of x (..., H) with weight and bias (H,), like x. Sums are fp32."""
    with torch.autocast(x.device.type, enabled=False):      # which would make it fp32
        return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps)


def cross_entropies_kernel(logits, labels):
    wide = logits.float()
    log_sum = wide.logsumexp(-1)
    return log_sum - wide.gather(-1, labels[:, None])[:, 0], log_sum


def cross_entropies_gradient_kernel(grad, logits, labels, log_sum):
    hit = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    share = (logits.float() - log_sum[:, None]).exp()
    return (grad[:, None] * (share - hit.float())).to(logits.dtype),


def cross_entropies(logits, labels):
    """Cross-entropies (R,) float32 of logits (R, V), maybe -inf, at labels (R,) int64."""
    kernels = cross_entropies_kernel, cross_entropies_gradient_kernel
    return _Fused.apply(kernels, 0, logits, labels)


# ---- transformers' models


def use(model):
    """Have a model of transformers use these on a GPU, wherever its code is the same; returns it.
    Rotary embeddings are functions of transformers' modules: replaced for all models of a kind.
    """
    some = torch.linspace(-1, 1, 9, device="cpu")
    for module in model.modules():
        kind, place = type(module), sys.modules[type(module).__module__]
        if not kind.__module__.startswith("transformers."):
            continue
        if NORM in code_of(kind):
            module.__class__ = replaced(kind, norm_forward)
        elif SWIGLU in code_of(kind) and torch.equal(module.act_fn(some), F.silu(some)):
            # compiled, too: adapters of gate and up are computed together
            module.__class__ = replaced(kind, mlp_forward, True)
        plain = getattr(place, "apply_rotary_pos_emb", None)
        known = plain and not hasattr(plain, "plain") and ROTATED in code_of(plain)
        if known and HALVES in code_of(place.rotate_half):
            place.apply_rotary_pos_emb = rotary(plain)
    return model


code_of = functools.cache(inspect.getsource)


def norm_forward(norm, x):
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def mlp_forward(mlp, x):
    return mlp.down_proj(swiglu(*outputs(x, mlp.gate_proj, mlp.up_proj)))


@functools.cache
def replaced(kind, forward, compiled_too=False):
    """A class like `kind` with another forward on a GPU."""
    def either(self, x):
        ours = wanted(x) or compiled_too and x.is_cuda
        return forward(self, x) if ours else kind.forward(self, x)
    return type(kind.__name__, (kind,), {"forward": either, "__module__": kind.__module__})


def rotary(plain):
    """apply_rotary_pos_emb of a module of transformers, on a GPU by rotate()."""
    @functools.wraps(plain)
    def either(q, k, cos, sin, unsqueeze_dim=1):
        if not wanted(q) or cos.shape[-1] != q.shape[-1]:       # a part of each head is rotated
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)
    either.plain = plain
    return either


# ---- Attention inside each packed document

# torch 2.11 takes fewer key heads without this flag
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_documents():
    """attn_implementation of a transformers model whose forward runs on one flat axis that holds
    many documents; the caller passes cu_seq_lens_q and max_length_q along.
    """
    from transformers import AttentionInterface     # takes a second; not every run needs it
    AttentionInterface.register("packed_documents", packed_attention)
    return "packed_documents"


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                     sliding_window=None, cu_seq_lens_q=None, max_length_q=None, **_):
    """Causal attention inside each document, as transformers calls it; (1, S, heads, D), None.
    query (1, heads, S, D), key and value (1, kv_heads, S, D); cu_seq_lens_q (B + 1,) int32.
    sliding_window: how many places a token sees, itself included. CUDA in half precision: torch's
    variable-length flash attention. Elsewhere SDPA document by document, same result.
    """
    if cu_seq_lens_q is None:
        raise UserError(f"{type(module).__name__} does not get the ends of documents: this "
                        "architecture cannot be packed")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))       # (S, heads, D)
    if q.is_cuda and v.dtype in FLASH:
        q, k = q.to(v.dtype), k.to(v.dtype)     # autocast: rotary embedding leaves them in fp32
        window = (sliding_window - 1 if sliding_window else -1, 0)
        out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
                          scale=scaling, window_size=window, **GROUPED)
    else:
        out = _attention_by_document(q.to(v.dtype), k.to(v.dtype), v, cu_seq_lens_q, scaling,
                                     sliding_window)
    return out[None], None


@torch.compiler.disable     # a graph per list of document lengths would be compiled otherwise
def _attention_by_document(q, k, v, cu_seqlens, scaling, window):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    lengths, out = cu_seqlens.diff().tolist(), []
    # a slice's gradient is as long as t
    for length, *parts in zip(lengths, *(t.split(lengths) for t in (q, k, v))):
        parts = (part.transpose(0, 1)[None] for part in parts)
        if window and length > window:
            place = torch.arange(length, device=q.device)
            distance = place[:, None] - place
            masked = {"attn_mask": (distance >= 0) & (distance < window)}
        else:
            masked = {"is_causal": True}
        out.append(F.scaled_dot_product_attention(*parts, scale=scaling,
                                                  **masked)[0].transpose(0, 1))
    return torch.cat(out)


# ---- Recomputation for the backward pass

NOTES = {None: "", "all": ", recomputed by layer",
         "selective": ", all but products and attention recomputed"}
ATTENTION_OPS = {torch.ops.torch_attn._varlen_attn.default, *(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default for kind in (
        "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"))}
# place of the first matrix; _grouped_mm: of experts
PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1,
            torch.ops.aten._scaled_mm.default: 0, torch.ops.aten._grouped_mm.default: 0}
# a product is kept unless its rows grow by more: an adapter's second half, rank to width, does
WIDER = 8


def keeps(op, args):
    """True if selective checkpointing keeps the output of an operator with these arguments."""
    if op not in PRODUCTS:
        return op in ATTENTION_OPS
    inner, outer = args[PRODUCTS[op] + 1].shape[-2:]
    return outer <= WIDER * inner


def set_mode(model, layers, mode):
    """Have a model's layers be called as `mode`, "all", "selective" or None, wants it. layers: of
    transformers, or the model calls them by model.call.
    """
    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if keeps(op, args) else CheckpointPolicy.PREFER_RECOMPUTE
    contexts = functools.partial(selective_contexts, policy)
    more = {"context_fn": contexts} if mode == "selective" else {}

    def call(layer, *args, **kwargs):
        if not mode:
            return layer(*args, **kwargs)
        return checkpoint(layer, *args, use_reentrant=False, **more, **kwargs)
    for module in model.modules():      # adapters.AddingLinear must not change products that stay
        if mode == "selective" and hasattr(module, "adds_in_place"):
            module.adds_in_place = False
    if hasattr(model, "call"):
        model.call = call
        return
    for layer in layers:        # transformers' own switch
        layer.gradient_checkpointing = bool(mode)
        layer._gradient_checkpointing_func = call
