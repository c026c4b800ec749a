"""Causal attention inside each packed document, for transformers' models: registered under the name
ATTENTION.

A model built with attn_implementation=ATTENTION runs its forward on one flat axis that holds many
documents; the caller passes cu_seq_lens_q and max_length_q along.
"""
import inspect

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from core import fused
from core.cli import UserError

# torch 2.11 takes fewer key heads without this flag
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
ATTENTION = "packed_documents"


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
    if q.is_cuda and v.dtype in fused.FLASH:
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


AttentionInterface.register(ATTENTION, packed_attention)
