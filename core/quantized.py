"""Quantized frozen linear layers of a LoRA run: --base_dtype nf4 and --float8.

NF4 (QLoRA, arXiv 2305.14314): 64 neighbouring values share an eight-bit scale, and 256 scales share
a float32 one: 4.13 bits per value. A weight is packed into one tensor of bytes as soon as it is
read; forward and backward unpack it, multiply, and free it. The arithmetic is bitsandbytes'.

Float8: both matrix products of a layer, forward and input gradient, use e4m3 (arXiv 2209.05433).
Unlike in torchao, a frozen weight is rounded once: a copy for the forward product and a transposed
one for the backward, together as large as one bfloat16 weight. Each row of weights, inputs and
gradients has a separate scale, so no result depends on the other samples of the pack.
"""
import functools
import math

import torch
from torch import nn

from core import kernels
from core.cli import require

BLOCK, SCALES = 64, 256     # values per scale, scales per second-level scale
FLOAT8 = torch.float8_e4m3fn
MULTIPLE = 16       # the GPU's float8 kernels need widths and heights that are multiples of it


def frozen_linears(layers):
    """The frozen linear layers inside decoder layers."""
    return [module for layer in layers for module in layer.modules() if type(module) is nn.Linear
            and not module.weight.requires_grad]


class FrozenLinear(nn.Linear):
    """A frozen nn.Linear that calls product() on flat rows."""

    def forward(self, x):
        out = self.product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias.to(out.dtype)


# ---- NF4


def sizes(values):
    """Bytes of the values, their scales, the table of the scales' code, the second-level scales and
    the mean; each padded to a multiple of 256."""
    scales = -(-values // BLOCK)
    needed = -(-values // 2), scales, 4 * 256, 4 * -(-scales // SCALES), 4
    return [-(-size // 256) * 256 for size in needed]


@torch.no_grad()
def pack(weight):
    """Quantize a float weight (out, in) to uint8 (sum(sizes),), on its device."""
    from bitsandbytes.functional import quantize_4bit
    values, state = quantize_4bit(weight.contiguous(), blocksize=BLOCK, compress_statistics=True,
                                  quant_type="nf4")
    fields = values, state.absmax, state.state2.code, state.state2.absmax, state.offset
    fields = (field.reshape(-1).view(torch.uint8) for field in fields)
    return torch.cat([nn.functional.pad(field, (0, size - len(field)))
                      for field, size in zip(fields, sizes(weight.numel()), strict=True)])


def unpack(packed, shape, dtype):
    """The weight (out, in) of pack()'s bytes in a float dtype."""
    ops, number = torch.ops.bitsandbytes, math.prod(shape)
    values, scales, *floats = packed.split(sizes(number))
    table, outer, mean = (field.view(torch.float32) for field in floats)
    scales = scales[:-(-number // BLOCK)]
    outer = outer[:-(-len(scales) // SCALES)]
    scales = ops.dequantize_blockwise(scales, outer, table, SCALES, torch.float32) + mean[0]
    return ops.dequantize_4bit(values[:-(-number // 2), None], scales, BLOCK, "nf4", shape, dtype)


def rounded_nf4(change=None):
    """A function that rounds a weight to NF4 and back, and then applies `change`."""
    change = change or (lambda weight: weight)
    return lambda weight: change(unpack(pack(weight), weight.shape, weight.dtype))


class _NF4Product(torch.autograd.Function):
    """x W^T of rows x (n, in); only the packed W is kept for the backward pass."""
    @staticmethod
    def forward(ctx, x, packed, width):
        ctx.save_for_backward(packed)
        ctx.shape = width, x.shape[1]
        return x @ unpack(packed, ctx.shape, x.dtype).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ unpack(*ctx.saved_tensors, ctx.shape, grad.dtype), None, None


class NF4Linear(FrozenLinear):
    """A linear layer whose weight is packed by pack()."""
    nf4 = True          # read by tensor_io.load_base

    def product(self, rows):
        rows = rows.to(kernels.stream_dtype(rows))
        return _NF4Product.apply(rows, self.weight, self.out_features)

    def fill(self, weight):
        """Take a float weight (out, in)."""
        self.weight.copy_(pack(weight))


def to_nf4(layers):
    """Make the frozen linear layers of decoder layers NF4Linear, weights unset. UserError."""
    import bitsandbytes.functional  # noqa: F401  registers torch.ops.bitsandbytes
    linears = frozen_linears(layers)
    require(linears, "--base_dtype nf4: this model has no frozen linear layers")
    for module in linears:
        module.__class__ = NF4Linear
        weight = module.weight.new_empty(sum(sizes(module.weight.numel())), dtype=torch.uint8)
        module.weight = nn.Parameter(weight, requires_grad=False)


# ---- Float8


def rounded_kernel(rows):
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    scales = largest.clamp(min=1e-12) / torch.finfo(FLOAT8).max
    return (rows / scales).to(FLOAT8), scales


compiled_kernel = functools.cache(lambda: torch.compile(rounded_kernel))     # late: it is slow

# rows (n, width) -> (rows in float8, each divided by its scale; (n, 1) float32 scales, tiny for a
# row of zeros). A separate operator: fused with earlier operators of a compiled layer, Inductor
# cannot split its loops when the number of rows changes (CantSplit, pytorch issue 183696). A
# custom_op costs three times as much per call.
if not hasattr(torch.ops.flat_trainers, "rounded"):     # a second copy of this file may be imported
    torch.library.define("flat_trainers::rounded", "(Tensor rows) -> (Tensor, Tensor)")
    torch.library.impl("flat_trainers::rounded", ("cpu", "cuda"),
                       lambda rows: (compiled_kernel() if rows.is_cuda else rounded_kernel)(rows))
    torch.library.register_fake("flat_trainers::rounded", lambda rows: (
        torch.empty_like(rows, dtype=FLOAT8),
        rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)))
rounded = torch.ops.flat_trainers.rounded


def product(rows, weight, scales):
    """rows (n, width) @ weight.T -> bf16 (n, m). weight: float8 as uint8; scales: (m, 1)."""
    (rows, row_scales), weight = rounded(rows.contiguous()), weight.view(FLOAT8)
    # use_fast_accum has less precision, but scaling by rows is slow on Hopper without it
    if rows.is_cuda and len(rows):
        return torch._scaled_mm(rows, weight.t(), scale_a=row_scales, scale_b=scales.t(),
                                out_dtype=torch.bfloat16, use_fast_accum=True)
    with torch.autocast(rows.device.type, enabled=False):
        return (rows.float() @ weight.float().t() * row_scales * scales.t()).bfloat16()


class _Float8Product(torch.autograd.Function):
    """product(), whose gradient is the product with the transposed weight."""
    @staticmethod
    def forward(ctx, rows, weight, scales, turned, turned_scales):
        ctx.save_for_backward(turned, turned_scales)
        return product(rows, weight, scales)

    @staticmethod
    def backward(ctx, grad):
        return product(grad, *ctx.saved_tensors), None, None, None, None


class Float8Linear(FrozenLinear):
    """A linear layer with a float8 weight and bfloat16 output."""

    def product(self, rows):
        return _Float8Product.apply(rows.bfloat16(), self.weight, self.scales, self.turned,
                                    self.turned_scales)


def to_float8(layers):
    """Round the loaded frozen linear layers of decoder layers -> their number. UserError."""
    linears = [module for module in frozen_linears(layers)
               if not any(n % MULTIPLE for n in module.weight.shape)]
    require(linears, f"--float8: no frozen linear layer of this model is a multiple of {MULTIPLE} "
                     "wide and high")
    if linears[0].weight.is_cuda:
        require(torch.cuda.get_device_capability() >= (8, 9), f"--float8: "
                f"{torch.cuda.get_device_name()} has no float8 products; drop the flag")
    for module in linears:
        weight, scales = rounded(module.weight)
        # the memory layout that the GPU's kernels need
        turned, turned_scales = rounded(module.weight.t().contiguous())
        module.__class__ = Float8Linear
        # uint8, as DDP cannot broadcast float8; in place, as the caller may hold the parameter
        module.weight.data = weight.view(torch.uint8)
        module.register_buffer("turned", turned.view(torch.uint8), persistent=False)
        module.register_buffer("scales", scales, persistent=False)
        module.register_buffer("turned_scales", turned_scales, persistent=False)
    return len(linears)
