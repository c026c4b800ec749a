"""Frozen linear layers in float8: both matrix products of a layer under an adapter, forward and
input gradient.

A frozen weight is rounded once, when it has been loaded: one copy for the forward product and one,
turned, for the backward product, a byte a value each, so together as large as the bfloat16 weight
that they replace. Rows are rounded when they come, each with one scale, and so is each row of the
weights: what a row gives does not depend on what else is in the pack. All is e4m3 (arXiv
2209.05433), gradients too: with a scale for each row they keep more of their digits than in e5m2. A
frozen weight has no gradient; torchao's training API computes one all the same and rounds the
weight again in every step, so it is not used.
"""
import torch
from torch import nn

from core import fused, low_rank
from core.cli import UserError

FLOAT8 = torch.float8_e4m3fn
MULTIPLE = 16           # of a layer's width and height; the GPU's kernels know no others


def rounded_kernel(rows):
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(FLOAT8).max
    return (rows / scales).to(FLOAT8), scales


# rows (n, width) -> (the same in float8, each divided by its scale so that its largest value fits;
# (n, 1) scales in float32, tiny ones of rows of zeros). A separate operator: fused with the ones
# before it in a compiled layer, whose packs have other numbers of rows, Inductor cannot split its
# loops (CantSplit; pytorch issue 183696).
rounded = low_rank.define_operator(
    "rounded", "(Tensor rows) -> (Tensor, Tensor)",
    lambda rows: fused.kernel(rounded_kernel, rows),
    lambda rows: (torch.empty_like(rows, dtype=FLOAT8),
                  rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)))


def product(rows, weight, scales):
    """rows (n, width) times the transpose of weight (m, width), float8 as uint8, with (m, 1)
    scales; bf16 (n, m).
    """
    (rows, row_scales), weight = rounded(rows.contiguous()), weight.view(FLOAT8)
    # adding in fewer digits, without which scales by rows are slow on Hopper
    if rows.is_cuda and len(rows):
        return torch._scaled_mm(rows, weight.t(), scale_a=row_scales, scale_b=scales.t(),
                                out_dtype=torch.bfloat16, use_fast_accum=True)
    with torch.autocast(rows.device.type, enabled=False):
        return (rows.float() @ weight.float().t() * row_scales * scales.t()).bfloat16()


class _Product(torch.autograd.Function):
    """product, and as its gradient the product with the turned weight."""

    @staticmethod
    def forward(ctx, rows, weight, scales, turned, turned_scales):
        ctx.save_for_backward(turned, turned_scales)
        return product(rows, weight, scales)

    @staticmethod
    def backward(ctx, grad):
        return product(grad, *ctx.saved_tensors), None, None, None, None


class Float8Linear(nn.Linear):
    """A frozen nn.Linear after convert; its output is bfloat16."""

    def forward(self, x):
        rows = x.bfloat16().flatten(0, -2)
        out = _Product.apply(rows, self.weight, self.scales, self.turned, self.turned_scales)
        if self.bias is not None:
            out = out + self.bias.bfloat16()
        # no view: an adapter adds to it in place
        return out if x.dim() == 2 else out.unflatten(0, x.shape[:-1])


def convert(layers):
    """Round the frozen linear layers inside decoder layers, whose weights are loaded -> how many.
    Raises UserError.
    """
    found = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear
             and not module.weight.requires_grad
             and not any(n % MULTIPLE for n in module.weight.shape)]
    if not found:
        raise UserError("--float8: no frozen linear layer of this model is a multiple of "
                        f"{MULTIPLE} wide and high")
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
