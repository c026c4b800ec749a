"""Losses of a student's logits, computed for a few rows at a time to save memory.

Without a teacher, a token's loss is cross-entropy. With a teacher that scores the same tokens, it
is (1 - w) CE + w divergence of p, the teacher's distribution over the vocabulary, and q, the
student's:
    forward   KL(p || q) = sum_i p_i log(p_i / q_i)     mode-covering
    reverse   KL(q || p)                                mode-seeking
    js        b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q: Jensen-Shannon (Lin 1991)

With top-k, p and q are first reduced to the teacher's k likeliest tokens and one bucket for all
others. By the log-sum inequality the result is never more than the divergence over the vocabulary,
and zero where both agree. The teacher gets no gradient.
"""
import math
from functools import partial

import torch
import torch.nn.functional as F

FLOOR = -1e4        # least log-probability, with exponential 0: logits of -inf would give nan


def log_probs(logits, ids=None):
    """(R, V) fp32 log-probabilities; with ids (R, K): (R, K + 1) fp64, the last for all others."""
    if ids is None:
        return logits.log_softmax(-1).clamp(min=FLOOR)
    rest = logits.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
    # normalised in fp64: a divergence is a small difference of logarithms, which would keep an
    # error of 1e-7 in their total
    return torch.cat([logits.gather(1, ids), rest], 1).double().log_softmax(-1).clamp(min=FLOOR)


def divergence(student, teacher, kind, beta=0.5, k=0):
    """(R,) divergence of student logits (R, V) from teacher logits (R, V), fp32; fp64 for top-k.

    teacher may be (ids (R, k), log-probabilities (R, k + 1) as from log_probs).
    kind: forward, reverse or js. beta: b of js. k: for top-k, below V; 0: the whole vocabulary."""
    if isinstance(teacher, tuple):
        ids, p = teacher
    else:
        ids = teacher.topk(k, -1).indices if k else None
        p = log_probs(teacher, ids)
    q = log_probs(student, ids)
    if kind == "forward":
        return (p.exp() * (p - q)).sum(-1)
    if kind == "reverse":
        return (q.exp() * (q - p)).sum(-1)
    m = torch.logaddexp(p + math.log(beta), q + math.log(1 - beta))
    return beta * (p.exp() * (p - m)).sum(-1) + (1 - beta) * (q.exp() * (q - m)).sum(-1)


def loss_sums(teaching, logits, targets, *teacher):
    """(loss, number of correct argmaxes), with a teacher also (cross-entropy, divergence): 0-d fp32
    sums over logits (R, V) fp32 and targets (R,). Only the loss has gradients.

    teaching: None, or (w, kind, beta, k, function: the teacher's rows -> divergence's input)."""
    right = (logits.detach().argmax(-1) == targets).sum().float()
    if not teacher:
        return F.cross_entropy(logits, targets, reduction="sum"), right
    weight, kind, beta, k, logits_of = teaching
    ce = logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0]
    student, teacher = logits, logits_of(*teacher)
    # embeddings may be padded differently: use the ids that both have
    if not isinstance(teacher, tuple):
        student, teacher = logits[:, :teacher.shape[1]], teacher[:, :logits.shape[1]]
    kl = divergence(student, teacher, kind, beta, k).float()
    return ((1 - weight) * ce + weight * kl).sum(), right, ce.detach().sum(), kl.detach().sum()


# ---- Without the logits of a whole batch


def chunked_loss(hidden, head, targets, chunk, teacher=(), prompted=None, teacher_head=None):
    """loss_sums of rows hidden (R, H) under a head (weight (V, H), bias (V,) or None), `chunk` rows
    at a time. Only the loss has gradients, for hidden and the head; its backward runs once.

    teacher: its rows (R, H'), or its ids and log-probabilities. prompted: (w, kind, beta, k).
    teacher_head: the teacher's head; None: the student's."""
    weight, bias = teacher_head or head

    @torch.no_grad()
    def logits_of(*rows):
        if len(rows) > 1:       # top-k of a server
            return rows
        return F.linear(rows[0].to(weight.dtype), weight, bias).float()
    function = partial(loss_sums, prompted and (*prompted, logits_of))
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad
                   for t in (hidden, *head))
    return _LinearLoss.apply(function, chunk, wanted, hidden, *head, targets, *teacher)


class _LinearLoss(torch.autograd.Function):
    """The forward pass also computes the gradients, so no chunk runs twice.

    The head's gradient is summed over the chunks in fp32, whatever the weight is stored or computed
    in, and rounded once: summed in bfloat16 it would be 1 % off after 64 chunks."""

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
