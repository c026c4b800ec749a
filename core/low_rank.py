"""Frozen linear layers of one input under LoRA adapters, as one operation with a gradient of its own.

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


def add_products(lefts, rights, alpha):
    """lefts[0] @ rights[0] + lefts[1] @ rights[1] + ..., the last times alpha; 2-d, one dtype.

    Each product is added to the sum by the kernel that computes it.
    """
    out = lefts[0] @ rights[0]
    for left, right in zip(lefts[1:-1], rights[1:-1]):
        out.addmm_(left, right)
    return out.addmm_(lefts[-1], rights[-1], alpha=alpha)


# One operator in compiled layers: torch 2.11's compiler gives no gradient to an output of an
# autograd.Function that was changed in place, and Inductor copies what a product is added to.
compiled_add_products = define_operator(
    "add_products", "(Tensor[] lefts, Tensor[] rights, float alpha) -> Tensor", add_products,
    lambda lefts, rights, alpha: lefts[0].new_empty(lefts[0].shape[0], rights[0].shape[1]))


def sum_products(lefts, rights, alpha=1.0):
    """add_products, eager or compiled."""
    add = compiled_add_products if torch.compiler.is_compiling() else add_products
    return add(lefts, rights, float(alpha))


class _Outputs(torch.autograd.Function):
    """x W_i^T + scale_i dropout(x) A_i^T B_i^T of n layers. x (rows, in), W_i (out_i, in),
    A_i (rank_i, in), B_i (out_i, rank_i).
    """

    @staticmethod
    def forward(ctx, x, dtype, scales, rate, in_place, *weights):
        """weights: all W, all A, all B. dtype: computed in. rate: of the dropout."""
        n = len(scales)
        x, bases, downs, ups = x.to(dtype), weights[:n], weights[n:2 * n], weights[2 * n:]
        rows, *mask = torch.native_dropout(x, rate, True) if rate else (x,)
        low = rows @ torch.cat(downs).to(dtype).t()
        lows = low.split([len(down) for down in downs], dim=1)
        outputs = []
        for base, up, low, scale in zip(bases, ups, lows, scales):
            base, up = whole(base, (len(up), x.shape[1]), dtype).t(), up.to(dtype).t()
            outputs.append(sum_products([x, low], [base, up], scale) if in_place
                           else (x @ base).addmm(low, up, alpha=scale))
        ctx.settings = dtype, scales, rate
        ctx.save_for_backward(*weights, *lows, rows, *mask)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        (dtype, scales, rate), n = ctx.settings, len(ctx.settings[1])
        saved = ctx.saved_tensors
        bases, downs, ups, lows = (saved[i * n:(i + 1) * n] for i in range(4))
        rows, *mask = saved[4 * n:]
        d_ups = [(grad.t() @ low).to(up.dtype) * scale
                 for grad, low, up, scale in zip(grads, lows, ups, scales)]
        d_low = torch.cat([grad @ (up * scale).to(dtype)
                           for grad, up, scale in zip(grads, ups, scales)], dim=1)
        d_downs = (d_low.t() @ rows).to(downs[0].dtype).split([len(down) for down in downs])
        d_x = None
        if ctx.needs_input_grad[0]:     # the first layer's input has none: embeddings are frozen
            shapes = [(len(up), rows.shape[1]) for up in ups]
            wholes = [whole(base, shape, dtype) for base, shape in zip(bases, shapes)]
            down = torch.cat(downs).to(dtype)
            if not rate:
                d_x = sum_products([*grads, d_low], [*wholes, down])
            else:
                d_x = sum_products(grads, wholes) if n > 1 else grads[0] @ wholes[0]
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
    if not all(map(joins, layers)):
        return [layer(x) for layer in layers]
    rate = layers[0].lora_dropout["default"].p if layers[0].training and isinstance(
        layers[0].lora_dropout["default"], nn.Dropout) else 0.0
    kind, rows = x.device.type, x.flatten(0, -2)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    found = _Outputs.apply(
        rows, dtype, tuple(layer.scaling["default"] for layer in layers), rate,
        layers[0].adds_in_place, *(layer.base_layer.weight for layer in layers),
        *(layer.lora_A["default"].weight for layer in layers),
        *(layer.lora_B["default"].weight for layer in layers))
    return [out.view(*x.shape[:-1], out.shape[-1]) for out in found]
