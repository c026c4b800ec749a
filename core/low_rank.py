"""Frozen linear layers of one input under LoRA adapters, as one operation with its gradient.

Layer by layer, autograd makes the gradient of the input once for each frozen weight and once for
each adapter, and adds them up, a pass over memory as wide as the layer each time. Here each product
adds to what is there already, and the adapters' halves that read the input lie one behind the
other, so that the input and its gradient are read once for all of them. Same sums but for rounding.
Dropout draws one mask for all adapters of an input, where PEFT draws one each: each adapter drops
as much of its input, but all drop the same.
"""
import torch
from torch import nn


def define_operator(name, schema, function, fake):
    """torch.ops.flat_trainers.NAME, which compiled layers call as a whole.

    fake: its outputs without their values. torch.library.custom_op would check each call, which
    takes three times as long on the host as the call.
    """
    operators = torch.ops.flat_trainers
    if not hasattr(operators, name):        # another copy of this file may have defined it
        torch.library.define(f"flat_trainers::{name}", schema)
        torch.library.impl(f"flat_trainers::{name}", ("cpu", "cuda"), function)
        torch.library.register_fake(f"flat_trainers::{name}", fake)
    return getattr(operators, name)


def add_products(lefts, rights):
    """lefts[0] @ rights[0] + lefts[1] @ rights[1] + ...; 2-d, one dtype.

    Each product is added to the sum by the kernel that computes it.
    """
    out = lefts[0] @ rights[0]
    for left, right in zip(lefts[1:], rights[1:]):
        out.addmm_(left, right)
    return out


# One operator in compiled layers: torch 2.11's compiler gives no gradient to an output of an
# autograd.Function that was changed in place, and Inductor copies what a product is added to.
compiled_add_products = define_operator(
    "add_products", "(Tensor[] lefts, Tensor[] rights) -> Tensor", add_products,
    lambda lefts, rights: lefts[0].new_empty(lefts[0].shape[0], rights[0].shape[1]))


def sum_products(lefts, rights):
    """add_products, eager or compiled."""
    add = compiled_add_products if torch.compiler.is_compiling() else add_products
    return add(lefts, rights)


class _Outputs(torch.autograd.Function):
    """x W_i^T + scale dropout(x) A_i^T B_i^T of n layers. x (rows, in), W_i (out_i, in),
    A_i (rank_i, in), B_i (out_i, rank_i).
    """

    @staticmethod
    def forward(ctx, x, dtype, scale, rate, in_place, *weights):
        """weights: all W, all A, all B. dtype: computed in. rate: of the dropout."""
        n = len(weights) // 3
        bases, downs, ups = weights[:n], weights[n:2 * n], [up.to(dtype) for up in weights[2 * n:]]
        x, down = x.to(dtype), torch.cat(downs).to(dtype)
        rows, *mask = torch.native_dropout(x, rate, True) if rate else (x,)
        lows = (rows @ down.t() * scale).split([len(part) for part in downs], dim=1)
        outputs = []
        for base, up, low in zip(bases, ups, lows):
            base = whole(base, (len(up), x.shape[1]), dtype).t()
            outputs.append(sum_products([x, low], [base, up.t()]) if in_place
                           else (x @ base).addmm(low, up.t()))
        ctx.settings = scale, rate, downs[0].dtype
        ctx.save_for_backward(*bases, *ups, *lows, down, rows, *mask)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        (scale, rate, dtype), saved, n = ctx.settings, ctx.saved_tensors, len(grads)
        bases, ups, lows = (saved[i * n:(i + 1) * n] for i in range(3))
        down, rows, *mask = saved[3 * n:]
        d_ups = [(grad.t() @ low).to(dtype) for grad, low in zip(grads, lows)]
        d_low = torch.cat([grad @ up for grad, up in zip(grads, ups)], dim=1) * scale
        d_downs = (d_low.t() @ rows).to(dtype).split([low.shape[1] for low in lows])
        d_x = None
        if ctx.needs_input_grad[0]:     # the first layer's input has none: embeddings are frozen
            wholes = [whole(base, (len(up), rows.shape[1]), down.dtype)
                      for base, up in zip(bases, ups)]
            if not rate:
                d_x = sum_products([*grads, d_low], [*wholes, down])
            else:
                d_x = sum_products(grads, wholes)
                d_x = d_x.addcmul(d_low @ down, *mask, value=1 / (1 - rate))
        return d_x, None, None, None, None, *(None for _ in bases), *d_downs, *d_ups


def whole(weight, shape, dtype):
    """A frozen weight in the dtype computed in; one of nf4.py is bytes."""
    if weight.dtype != torch.uint8:
        return weight.to(dtype)
    from core import nf4
    return nf4.whole(weight, shape, dtype)


def joins(layer):
    """Whether a layer's adapter and frozen weight can be computed here."""
    base = getattr(layer, "base_layer", None)
    return (hasattr(layer, "adds_in_place") and not (layer.disable_adapters or layer.merged)
            and (type(base) is nn.Linear or hasattr(base, "nf4")) and base.bias is None
            and not base.weight.requires_grad)


def outputs(x, *layers):
    """[layer(x)] of linear layers; those under adapters.AddingLinear are computed together."""
    if not all(map(joins, layers)) or len({layer.scaling["default"] for layer in layers}) > 1:
        return [layer(x) for layer in layers]
    first, kind, rows = layers[0], x.device.type, x.flatten(0, -2)
    rate = getattr(first.lora_dropout["default"], "p", 0.0) * first.training
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    found = _Outputs.apply(
        rows, dtype, first.scaling["default"], rate, first.adds_in_place,
        *(layer.base_layer.weight for layer in layers),
        *(layer.lora_A["default"].weight for layer in layers),
        *(layer.lora_B["default"].weight for layer in layers))
    return [out.view(*x.shape[:-1], out.shape[-1]) for out in found]
