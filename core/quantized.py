"""Frozen linear layers of a LoRA run in fewer bits: --base_dtype nf4 and --float8.

NF4 (QLoRA, arXiv 2305.14314): 64 neighbouring values share a scale, of eight bits, and 256 scales a
float32: 4.13 bits a value. A layer is one tensor of bytes, made when its weight is read, so that
only one weight is whole. Forward and backward make it again, multiply, and drop it. The arithmetic
is that of bitsandbytes.

Float8: both matrix products of a layer, forward and input gradient, in e4m3 (arXiv 2209.05433). A
frozen weight is rounded once, unlike torchao's: a copy for the forward product and a turned one for
the backward, together as large as in bfloat16. Each row of weights, inputs and gradients has a
scale, so no result depends on the other samples of the pack.
"""
import math

import torch
from torch import nn

from core import kernels
from core.cli import require

BLOCK, SCALES = 64, 256     # values a scale, scales a second scale
FLOAT8 = torch.float8_e4m3fn
MULTIPLE = 16       # of a float8 layer's width and height; the GPU's kernels know no others


def frozen_linears(layers):
    """The frozen linear layers inside decoder layers."""
    return [module for layer in layers for module in layer.modules() if type(module) is nn.Linear
            and not module.weight.requires_grad]


class FrozenLinear(nn.Linear):
    """A frozen nn.Linear whose product() takes flat rows."""

    def forward(self, x):
        out = self.product(x.flatten(0, -2))
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        # flat rows are not a view: an adapter adds to them in place
        return out if x.dim() == 2 else out.unflatten(0, x.shape[:-1])


# ---- NF4


def sizes(values):
    """Bytes of values, scales, their meanings, scales of scales, mean; each a multiple of 256."""
    scales = -(-values // BLOCK)
    parts = -(-values // 2), scales, 4 * 256, 4 * -(-scales // SCALES), 4
    return [-(-part // 256) * 256 for part in parts]


@torch.no_grad()
def pack(weight):
    """A float weight (out, in) as uint8 (sum(sizes),), on its device."""
    from bitsandbytes.functional import quantize_4bit
    values, about = quantize_4bit(weight.contiguous(), blocksize=BLOCK, compress_statistics=True,
                                  quant_type="nf4")
    parts = values, about.absmax, about.state2.code, about.state2.absmax, about.offset
    parts = (part.reshape(-1).view(torch.uint8) for part in parts)
    return torch.cat([nn.functional.pad(part, (0, size - len(part)))
                      for part, size in zip(parts, sizes(weight.numel()), strict=True)])


def whole(packed, shape, dtype):
    """The weight of a shape (out, in) that pack() made bytes of, in a float dtype."""
    ops, number = torch.ops.bitsandbytes, math.prod(shape)
    values, scales, *others = packed.split(sizes(number))
    table, outer, mean = (part.view(torch.float32) for part in others)
    scales = scales[:-(-number // BLOCK)]
    outer = outer[:-(-len(scales) // SCALES)]
    scales = ops.dequantize_blockwise(scales, outer, table, SCALES, torch.float32) + mean[0]
    return ops.dequantize_4bit(values[:-(-number // 2), None], scales, BLOCK, "nf4", shape, dtype)


def rounded_nf4(change=None):
    """A function of a weight that rounds it to NF4 and back, and then changes it."""
    change = change or (lambda weight: weight)
    return lambda weight: change(whole(pack(weight), weight.shape, weight.dtype))


class _NF4Product(torch.autograd.Function):
    """x W^T of rows x (n, in); only the bytes of W are kept."""
    @staticmethod
    def forward(ctx, x, packed, width):
        ctx.save_for_backward(packed)
        ctx.shape = width, x.shape[1]
        return x @ whole(packed, ctx.shape, x.dtype).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ whole(*ctx.saved_tensors, ctx.shape, grad.dtype), None, None


class NF4Linear(FrozenLinear):
    """Its weight is the bytes of pack()."""
    nf4 = True          # asked for where layers are joined or counted

    def product(self, rows):
        rows = rows.to(kernels.stream_dtype(rows))
        return _NF4Product.apply(rows, self.weight, self.out_features)


def to_nf4(layers):
    """Make the frozen linear layers inside decoder layers NF4Linear, bytes unset. UserError."""
    import bitsandbytes.functional  # noqa: F401  registers torch.ops.bitsandbytes
    found = frozen_linears(layers)
    require(found, "--base_dtype nf4: this model has no frozen linear layers")
    for module in found:
        module.__class__ = NF4Linear
        weight = module.weight.new_empty(sum(sizes(module.weight.numel())), dtype=torch.uint8)
        module.weight = nn.Parameter(weight, requires_grad=False)


def load_nf4(model, load, weights, parts, world):
    """load(weights, parts, world) that reads one weight at a time, and packs those of NF4Linear.
    weights: {name: parameter} of the base in `model`. load: the system's own load_weights.
    """
    layers = {module.weight: module for module in model.modules() if isinstance(module, NF4Linear)}
    for name, parameter in weights.items():
        read, layer = parameter, layers.get(parameter)
        if layer:
            read = torch.empty(layer.out_features, layer.in_features, device=parameter.device)
        load({name: read}, parts, world)
        if layer:
            parameter.copy_(pack(read))


# ---- Float8


def rounded_kernel(rows):
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    scales = largest.clamp(min=1e-12) / torch.finfo(FLOAT8).max
    return (rows / scales).to(FLOAT8), scales


# rows (n, width) -> (the same in float8, each divided by its scale so that its largest value fits;
# (n, 1) scales, float32, tiny for a row of zeros). A separate operator: fused with the ones before
# it in a compiled layer, whose packs have other numbers of rows, Inductor cannot split its loops
# (CantSplit; pytorch issue 183696).
rounded = kernels.define_operator(
    "rounded", "(Tensor rows) -> (Tensor, Tensor)",
    lambda rows: kernels.kernel(rounded_kernel, rows),
    lambda rows: (torch.empty_like(rows, dtype=FLOAT8),
                  rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)))


def product(rows, weight, scales):
    """bf16 (n, m) = rows (n, width) @ weight (m, width).T, float8 as uint8, scales (m, 1)."""
    (rows, row_scales), weight = rounded(rows.contiguous()), weight.view(FLOAT8)
    # adding in fewer digits, without which scales by rows are slow on Hopper
    if rows.is_cuda and len(rows):
        return torch._scaled_mm(rows, weight.t(), scale_a=row_scales, scale_b=scales.t(),
                                out_dtype=torch.bfloat16, use_fast_accum=True)
    with torch.autocast(rows.device.type, enabled=False):
        return (rows.float() @ weight.float().t() * row_scales * scales.t()).bfloat16()


class _Float8Product(torch.autograd.Function):
    """product, and as its gradient the product with the turned weight."""
    @staticmethod
    def forward(ctx, rows, weight, scales, turned, turned_scales):
        ctx.save_for_backward(turned, turned_scales)
        return product(rows, weight, scales)

    @staticmethod
    def backward(ctx, grad):
        return product(grad, *ctx.saved_tensors), None, None, None, None


class Float8Linear(FrozenLinear):
    """Its output is bfloat16."""

    def product(self, rows):
        return _Float8Product.apply(rows.bfloat16(), self.weight, self.scales, self.turned,
                                    self.turned_scales)


def to_float8(layers):
    """Round the frozen linear layers inside decoder layers, already loaded -> how many."""
    found = [module for module in frozen_linears(layers)
             if not any(n % MULTIPLE for n in module.weight.shape)]
    require(found, f"--float8: no frozen linear layer of this model is a multiple of {MULTIPLE} "
                   "wide and high")
    for module in found:
        weight, scales = rounded(module.weight)
        # as the GPU's kernels want it to lie
        turned, turned_scales = rounded(module.weight.t().contiguous())
        module.__class__ = Float8Linear
        # uint8, since DDP's first broadcast knows no float8; in place: a caller may hold parameters
        module.weight.data = weight.view(torch.uint8)
        module.register_buffer("turned", turned.view(torch.uint8), persistent=False)
        module.register_buffer("scales", scales, persistent=False)
        module.register_buffer("turned_scales", turned_scales, persistent=False)
    return len(found)
