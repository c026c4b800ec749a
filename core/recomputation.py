"""Activation checkpointing of decoder layers: which of a layer's tensors are kept for the backward
pass.

"all" keeps a layer's input and computes the whole layer again. "selective" also keeps the expensive
ones: the outputs of attention and of the matrix products; norms, activations, rotary embedding,
dropout, casts, and the wide outputs of adapters (cheap for their size) are computed again, and so
is FlexAttention, which is compiled by itself and cannot be looked into. Gradients are the same bits
either way.
"""
import functools

import torch
from torch.nn.attention import varlen  # noqa: F401  (registers the operator named below)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

NOTES = {None: "", "all": ", recomputed by layer",
         "selective": ", all but products and attention recomputed"}
ATTENTION = {torch.ops.torch_attn._varlen_attn.default,
             *(getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default
               for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention",
                            "cudnn_attention"))}
# place of the first matrix
PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1,
            # the last: of experts
            torch.ops.aten._scaled_mm.default: 0, torch.ops.aten._grouped_mm.default: 0}
# a product is kept unless its rows grow by more: an adapter's second half, rank to width, does
WIDER = 8


def keeps(op, args):
    """Whether selective checkpointing keeps the output of an operator with these arguments."""
    if op not in PRODUCTS:
        return op in ATTENTION
    inner, outer = args[PRODUCTS[op] + 1].shape[-2:]
    return outer <= WIDER * inner


def _policy(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if keeps(op, args) else CheckpointPolicy.PREFER_RECOMPUTE


def set_mode(model, layers, mode):
    """Have a model's layers be called as `mode` of flags.MODES wants it; None: plainly. layers: of
    transformers, or the model calls them by model.call.
    """
    for module in model.modules():      # adapters.AddingLinear must not change products that stay
        if mode == "selective" and hasattr(module, "adds_in_place"):
            module.adds_in_place = False
    if hasattr(model, "call"):
        model.call = caller(mode)
        return
    for layer in layers:        # transformers' own switch
        layer.gradient_checkpointing = bool(mode)
        layer._gradient_checkpointing_func = caller(mode)


def caller(mode):
    """A function of (layer, its arguments) that calls the layer as `mode` of flags.MODES wants it;
    None: plainly.
    """
    if not mode:
        return lambda layer, *args, **kwargs: layer(*args, **kwargs)
    selective = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}
    return functools.partial(checkpoint, use_reentrant=False,
                             **(selective if mode == "selective" else {}))
