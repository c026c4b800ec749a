"""Quantized frozen linear layers of a LoRA run: --base_dtype nf4 and --float8.

NF4 (QLoRA, arXiv 2305.14314): 64 neighbouring values share an eight-bit scale, and 256 scales share
a float32 one: 4.13 bits per value. A weight is quantized as soon as it is read; the products are
bitsandbytes', which keep no whole weight for the backward pass.

Float8: both matrix products of a layer, forward and input gradient, use e4m3 (arXiv 2209.05433).
Unlike in torchao, a frozen weight is rounded once: a copy for the forward product and a transposed
one for the backward, together as large as one bfloat16 weight. Each row of weights, inputs and
gradients has a separate scale, so no result depends on the other samples of the pack.
"""
import functools

import torch
from torch import nn

from core import kernels
from core.cli import require

FLOAT8 = torch.float8_e4m3fn


def frozen_linears(layers, flag, multiple=1):
    """Frozen linear layers in decoder layers, width and height multiples of a number. UserError."""
    linears = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear
               and not module.weight.requires_grad
               and not any(n % multiple for n in module.weight.shape)]
    require(linears, f"{flag}: no frozen linear layer of this model can be rounded")
    return linears


# ---- NF4

def quantize(weight):
    """bitsandbytes' NF4 values and QuantState of a float weight (out, in), on its device."""
    from bitsandbytes.functional import quantize_4bit
    return quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")


class NF4Linear(nn.Linear):
    """A linear layer of a weight in NF4: quantize()'s values are in `weight`."""
    nf4, state = True, None         # nf4: read by tensor_io.load_base

    def forward(self, x):
        from bitsandbytes import functional, matmul_4bit
        x = x.to(kernels.stream_dtype(x))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        state = self.state or functional.QuantState(       # a plan's, whose weights are not loaded
            x.new_empty(0, dtype=torch.float32), (self.out_features, self.in_features),
            blocksize=64, quant_type="nf4", dtype=x.dtype)
        return matmul_4bit(x, self.weight.t(), state, bias=bias)

    def fill(self, weight):
        """Take a float weight (out, in)."""
        self.weight.data, self.state = quantize(weight)
        self.state.dtype = self.dtype       # of the copy that the backward pass makes


def to_nf4(layers):
    """Make the frozen linear layers of decoder layers NF4Linear, weights unset. UserError."""
    for module in frozen_linears(layers, "--base_dtype nf4"):
        module.__class__, module.dtype = NF4Linear, module.weight.dtype
        size = int(module.weight.numel() * 4.13 / 8)    # of the values with their scales
        weight = module.weight.new_empty(size, dtype=torch.uint8)
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
    torch.library.impl("flat_trainers::rounded", "cpu", rounded_kernel)
    torch.library.impl("flat_trainers::rounded", "cuda", lambda rows: compiled_kernel()(rows))
    torch.library.register_fake("flat_trainers::rounded", rounded_kernel)
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


class Float8Linear(nn.Linear):
    """A linear layer with a float8 weight and bfloat16 output."""

    def forward(self, x):
        out = _Float8Product.apply(x.bfloat16().flatten(0, -2), self.weight, self.scales,
                                   self.turned, self.turned_scales).unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias.to(out.dtype)


def to_float8(layers):
    """Round the loaded frozen linear layers of decoder layers. UserError."""
    linears = frozen_linears(layers, "--float8", 16)    # as the GPU's kernels need
    able = not linears[0].weight.is_cuda or torch.cuda.get_device_capability() >= (8, 9)
    require(able, "--float8: this GPU has no float8 products; drop the flag")
    for module in linears:
        weight, module.scales = rounded(module.weight)
        # the memory layout that the GPU's kernels need
        module.turned, module.turned_scales = rounded(module.weight.t().contiguous())
        # uint8, as DDP cannot broadcast float8; in place, as the caller may hold the parameter
        module.__class__, module.weight.data = Float8Linear, weight.view(torch.uint8)
