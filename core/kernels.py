"""Attention inside packed documents, recomputation of layers, and whether torch.compile works."""
import functools
import inspect
import os

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from core.cli import UserError, one_line

FLASH = (torch.bfloat16, torch.float16)     # of packed attention on GPUs; see optim.loss_scaler


@functools.cache
def compiles(kind):
    """True if torch.compile works for a kind of device; compiles one small function."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=kind))
    except Exception as error:      # no compiler, a broken one, or no headers
        why = getattr(error, "inner_exception", error)
        if os.environ.get("RANK", "0") == "0":
            print(f"notice     torch.compile fails ({one_line(why, 80)}); it needs g++, Python.h")
        return False
    return True


def stream_dtype(x):
    """dtype for hidden states x between layers: autocast's, which embeddings do not apply."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# ---- Attention inside each packed document

# torch 2.11 has no such flag, and accepts fewer key heads without it
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_documents():
    """attn_implementation of a transformers model whose forward runs on one flat axis with many
    documents. The caller passes cu_seq_lens_q and max_length_q to the model."""
    from transformers import AttentionInterface     # a slow import that not every run needs
    AttentionInterface.register("packed_documents", packed_attention)
    return "packed_documents"


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                     sliding_window=None, cu_seq_lens_q=None, max_length_q=None, **_):
    """Causal attention inside each document, as transformers calls it -> (1, S, heads, D), None.

    query (1, heads, S, D), key and value (1, kv_heads, S, D); cu_seq_lens_q (B + 1,) int32.
    sliding_window: number of positions that a token attends to, with itself. On CUDA in half
    precision torch's variable-length flash attention; else SDPA for each document, same result."""
    if cu_seq_lens_q is None:
        raise UserError(f"{type(module).__name__} does not get the ends of documents: this "
                        "architecture cannot be packed")
    # (S, heads, D); the gradient of squeeze() is a view, that of [0] a copy. Under autocast the
    # rotary embedding gives fp32
    q, k, v = (t.squeeze(0).transpose(0, 1).to(value.dtype) for t in (query, key, value))
    if q.is_cuda and v.dtype in FLASH:
        window = (sliding_window - 1 if sliding_window else -1, 0)
        out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
                          scale=scaling, window_size=window, **GROUPED)
    else:
        out = _attention_by_document(q, k, v, cu_seq_lens_q, scaling, sliding_window)
    return out[None], None


@torch.compiler.disable     # else one graph per list of document lengths would be compiled
def _attention_by_document(q, k, v, cu_seqlens, scaling, window):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    lengths, out = cu_seqlens.diff().tolist(), []
    # split: the gradient of a slice would be as long as the whole tensor
    documents = zip(*(t.transpose(0, 1)[None].split(lengths, dim=2) for t in (q, k, v)))
    for length, document in zip(lengths, documents):
        mask = None
        if window and length > window:
            mask = q.new_ones(length, length, dtype=torch.bool).tril().triu(1 - window)
        out.append(F.scaled_dot_product_attention(
            *document, attn_mask=mask, is_causal=mask is None, scale=scaling))
    return torch.cat(out, dim=2).squeeze(0).transpose(0, 1)


# ---- Recomputation for the backward pass


def recompute(layers, enabled):
    """Let layers keep only their input for the backward pass, which computes them again. It is
    transformers' switch of a decoder layer. Gradients are bit-equal."""
    for layer in layers:
        layer.gradient_checkpointing = bool(enabled)
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
