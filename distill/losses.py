"""Losses of a student's logits, computed for a few rows at a time to save memory."""
import torch
import torch.nn.functional as F


def loss_sums(logits, targets):
    """(cross-entropy, number of correct argmaxes): 0-d fp32 sums over logits (R, V) fp32 and
    targets (R,)."""
    right = (logits.detach().argmax(-1) == targets).sum().float()
    return F.cross_entropy(logits, targets, reduction="sum"), right


def chunked_loss(hidden, head, targets, chunk, function=loss_sums, more=()):
    """function(logits, targets, *more) of rows hidden (R, H) under a head (weight (V, H), bias (V,)
    or None), `chunk` rows at a time. Only the loss, the first sum, has gradients, for hidden and
    the head; its backward runs once. more: tensors (R, ...), such as a teacher's rows."""
    return _LinearLoss.apply(function, chunk, torch.is_grad_enabled(), hidden, *head, targets,
                             *more)


class _LinearLoss(torch.autograd.Function):
    """The forward pass also computes the gradients, so no chunk runs twice.

    The head's gradient is summed over the chunks in fp32, whatever the weight is stored or computed
    in, and rounded once: summed in bfloat16 it would be 1 % off after 64 chunks."""

    @staticmethod
    def forward(ctx, function, chunk, trained, hidden, weight, bias, *rows):
        wanted = [trained and need for need in ctx.needs_input_grad[3:6]]
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.grads = [torch.empty_like(hidden) if wanted[0] else None]
        ctx.grads += [torch.zeros(t.shape, dtype=torch.float32, device=t.device) if need else None
                      for t, need in zip((weight, bias), wanted[1:])]
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            sums = [_chunk(function, slice(first, first + chunk), hidden, matrix, offset, rows,
                           ctx.grads) for first in range(0, max(1, len(hidden)), chunk)]
        loss, *others = (value.clone() for value in torch.stack(sums).sum(0))
        ctx.mark_non_differentiable(*others)
        return loss, *others

    @staticmethod
    def backward(ctx, scale, *_):
        grads, ctx.grads = ctx.grads, None      # scaled in place: once
        scaled = [grad if grad is None else grad.mul_(scale) for grad in grads]
        return None, None, None, *scaled, *[None] * (len(ctx.needs_input_grad) - 6)


def _chunk(function, chunk, hidden, matrix, offset, rows, grads):
    """The stacked sums of `function` over a chunk of rows; adds its gradients to grads."""
    of_hidden, of_weight, of_bias = grads
    trained = any(grad is not None for grad in grads)
    inputs = hidden[chunk].to(matrix.dtype)
    logits = F.linear(inputs, matrix, offset).requires_grad_(trained)
    with torch.set_grad_enabled(trained):
        values = function(logits.float(), *(t[chunk] for t in rows))
    sums = torch.stack([value.detach() for value in values])
    if not trained:
        return sums
    grad, = torch.autograd.grad(values[0], logits)
    del values, logits       # before the products, one of which is as large as the weight
    if of_hidden is not None:
        of_hidden[chunk] = grad @ matrix
    if of_weight is not None and grad.dtype is torch.float16:
        # --fp16 scales later: sums over rows must not overflow
        grad, inputs = grad.float(), inputs.float()
    if of_weight is not None and grad.dtype == of_weight.dtype:
        of_weight.addmm_(grad.t(), inputs)
    elif of_weight is not None:
        of_weight.add_(grad.t() @ inputs)
    if of_bias is not None:
        of_bias.add_(grad.sum(0, dtype=torch.float32))
    return sums
