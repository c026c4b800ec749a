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
            out = x @ whole(base, (len(up), x.shape[1]), dtype).t()
            add = out.addmm_ if in_place else out.addmm
            outputs.append(add(low, up.to(dtype).t(), alpha=scale))
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
            d_x = grads[0] @ whole(bases[0], shapes[0], dtype)
            for grad, base, shape in zip(grads[1:], bases[1:], shapes[1:]):
                d_x.addmm_(grad, whole(base, shape, dtype))
            down = torch.cat(downs).to(dtype)
            if rate:
                d_x.addcmul_(d_low @ down, *mask, value=1 / (1 - rate))
            else:
                d_x.addmm_(d_low, down)
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
