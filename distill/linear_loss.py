"""A loss over the logits of a large output head without the logits: a few rows at a time, gradients in the same pass.

The logits of a piece of rows are made, its loss and the gradient at its logits taken, and both products of the backward
pass done at once; so no piece is computed twice. The head's gradient is summed over the pieces in fp32, whatever the
weight is stored or computed in, and rounded once: summed in bfloat16 it would be 1 % off after 64 pieces.
"""
import torch
import torch.nn.functional as F


class _LinearLoss(torch.autograd.Function):

    @staticmethod
    def forward(ctx, function, chunk, wanted, hidden, weight, bias, *rows):
        """wanted: (bool, bool, bool), which of hidden, weight and bias have gradients."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.grads = [torch.empty_like(hidden) if wanted[0] else None]
        ctx.grads += [torch.zeros(t.shape, dtype=torch.float32, device=t.device) if need else None
                      for t, need in zip((weight, bias), wanted[1:])]
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            sums = [_piece(function, slice(first, first + chunk), hidden, matrix, offset, rows, ctx.grads)
                    for first in range(0, max(1, len(hidden)), chunk)]
        loss, *others = (value.clone() for value in torch.stack(sums).sum(0))
        ctx.mark_non_differentiable(*others)
        return loss, *others

    @staticmethod
    def backward(ctx, scale, *_):
        grads, ctx.grads = ctx.grads, None      # scaled in place: once
        return None, None, None, *(grad if grad is None else grad.mul_(scale) for grad in grads), *[None] * (
            len(ctx.needs_input_grad) - 6)


def _piece(function, piece, hidden, matrix, offset, rows, grads):
    """function's sums over a piece of the rows, stacked; what it gives to the gradients is added to them."""
    of_hidden, of_weight, of_bias = grads
    trained = any(grad is not None for grad in grads)
    part = hidden[piece].to(matrix.dtype)
    logits = F.linear(part, matrix, offset).requires_grad_(trained)
    with torch.set_grad_enabled(trained):
        found = function(logits.float(), *(t[piece] for t in rows))
    sums = torch.stack([value.detach() for value in found])
    if not trained:
        return sums
    grad, = torch.autograd.grad(found[0], logits)
    del found, logits       # before the products, of which one is as large as the weight
    if of_hidden is not None:
        of_hidden[piece] = grad @ matrix
    if of_weight is not None and grad.dtype is torch.float16:
        # --fp16's scale comes later: no sum over rows may overflow
        grad, part = grad.float(), part.float()
    if of_weight is not None and grad.dtype == of_weight.dtype:
        of_weight.addmm_(grad.t(), part)
    elif of_weight is not None:
        of_weight.add_(grad.t() @ part)
    if of_bias is not None:
        of_bias.add_(grad.sum(0, dtype=torch.float32))
    return sums


def linear_loss(function, hidden, weight, bias, chunk, *rows):
    """Sums over all rows of function(logits, *rows) of `chunk` rows each, 0-d fp32; the first is the loss, which alone
    has gradients, to hidden, weight and bias (or None); its backward runs once.

    hidden (R, H), weight (V, H), bias (V,), each of rows (R, ...). function: (logits (n, V) fp32, *rows) -> tuple of
    0-d fp32 sums over the n rows. No rows give what function makes of none.
    """
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    return _LinearLoss.apply(function, chunk, wanted, hidden, weight, bias, *rows)
