"""--base_dtype nf4: frozen linear layers in four bits a value (QLoRA, arXiv 2305.14314).

64 neighbouring values share a scale, of eight bits, and 256 scales a float32: 4.13 bits a value in
all. A layer is one tensor of bytes, made when its weight is read from the file, so that never more
than one weight is whole. Forward and backward make the weight again in the dtype they compute in,
multiply, and drop it. The arithmetic is that of the package bitsandbytes, on CPU and CUDA.
"""
import math

import bitsandbytes.functional  # registers torch.ops.bitsandbytes, too
import torch
from torch import nn

from core.cli import UserError

BLOCK, SCALES, TABLE = 64, 256, 256     # values a scale, scales a second scale, values of a byte
PLACE = 256                             # a part begins at a multiple of these bytes


def sizes(values):
    """Bytes of a weight's parts: values, scales, what their bytes mean, scales of scales, mean."""
    scales = -(-values // BLOCK)
    parts = -(-values // 2), scales, 4 * TABLE, 4 * -(-scales // SCALES), 4
    return [-(-part // PLACE) * PLACE for part in parts]


@torch.no_grad()
def pack(weight):
    """A float weight (out, in) as uint8 (sum(sizes),), on its device."""
    values, about = bitsandbytes.functional.quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    packed = values.new_zeros(sum(sizes(weight.numel())))
    parts = values, about.absmax, about.state2.code, about.state2.absmax, about.offset
    for place, part in zip(packed.split(sizes(weight.numel())), parts, strict=True):
        part = part.reshape(-1).view(torch.uint8)
        place[:len(part)] = part
    return packed


def whole(packed, shape, dtype):
    """The weight of a shape (out, in) that pack() made bytes of, in a float dtype."""
    ops = torch.ops.bitsandbytes
    values, scales, table, outer, mean = packed.split(sizes(math.prod(shape)))
    scales = scales[:-(-math.prod(shape) // BLOCK)]
    outer = outer.view(torch.float32)[:-(-len(scales) // SCALES)]
    scales = ops.dequantize_blockwise(scales, outer, table.view(torch.float32), SCALES,
                                      torch.float32) + mean.view(torch.float32)[0]
    values = values[:-(-math.prod(shape) // 2), None]
    return ops.dequantize_4bit(values, scales, BLOCK, "nf4", shape, dtype)


def rounded(change=None):
    """A function of a weight that rounds it to NF4 and back, and then changes it."""
    def of(weight):
        weight = whole(pack(weight), weight.shape, weight.dtype)
        return change(weight) if change else weight
    return of


class _Product(torch.autograd.Function):
    """x W^T of rows x (n, in); only the bytes of W are kept."""

    @staticmethod
    def forward(ctx, x, packed, width):
        ctx.save_for_backward(packed)
        ctx.shape = width, x.shape[1]
        return x @ whole(packed, ctx.shape, x.dtype).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ whole(*ctx.saved_tensors, ctx.shape, grad.dtype), None, None


class NF4Linear(nn.Linear):
    """A frozen nn.Linear after convert; its weight is the bytes of pack()."""
    nf4 = True          # asked by core/low_rank.py

    def forward(self, x):
        kind, rows = x.device.type, x.flatten(0, -2)
        if torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))
        out = _Product.apply(rows, self.weight, self.out_features)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        # flat rows are no view: an adapter adds to them in place
        return out if x.dim() == 2 else out.unflatten(0, x.shape[:-1])


def convert(layers):
    """Make the frozen linear layers inside decoder layers NF4Linear, bytes unset. Raises
    UserError.
    """
    found = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear
             and not module.weight.requires_grad]
    if not found:
        raise UserError("--base_dtype nf4: this model has no frozen linear layers")
    for module in found:
        module.__class__ = NF4Linear
        number = sum(sizes(module.in_features * module.out_features))
        weight = torch.empty(number, dtype=torch.uint8, device=module.weight.device)
        module.weight = nn.Parameter(weight, requires_grad=False)


def load_weights(model, load, weights, parts, world):
    """load(weights, parts, world) that reads one weight at a time, and packs those of NF4Linear.
    weights: {name: parameter} of the base in `model`. load: the system's own load_weights.
    """
    layers = {module.weight: module for module in model.modules() if isinstance(module, NF4Linear)}
    for name, parameter in weights.items():
        layer = layers.get(parameter)
        if layer is None:
            load({name: parameter}, parts, world)
            continue
        read = torch.empty(layer.out_features, layer.in_features, device=parameter.device)
        load({name: read}, parts, world)
        parameter.copy_(pack(read))
