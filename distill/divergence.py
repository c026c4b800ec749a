"""Losses with a teacher that scores the same tokens: (1 - w) CE + w divergence of p, the teacher's
distribution over the vocabulary, and q, the student's:
    forward   KL(p || q) = sum_i p_i log(p_i / q_i)     mode-covering
    reverse   KL(q || p)                                mode-seeking
    js        b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q: Jensen-Shannon (Lin 1991)

With top-k, p and q are first reduced to the teacher's k likeliest tokens and one bucket for all
others. By the log-sum inequality the result is never more than the divergence over the vocabulary,
and zero where both agree.
"""
import math

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


def teacher_sums(prompted, weight, bias):
    """losses.loss_sums with a teacher: sums(logits, targets, *the teacher's rows) -> (loss,
    correct argmaxes, cross-entropy, divergence). prompted: (w, kind, beta, k). weight, bias: of the
    teacher's head, if its rows are (R, H'); they may be ids and log-probabilities instead."""
    share, kind, beta, k = prompted

    def sums(logits, targets, *teacher):
        right = (logits.detach().argmax(-1) == targets).sum().float()
        ce = logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0]
        student = logits
        if len(teacher) == 1:
            with torch.no_grad():
                teacher = F.linear(teacher[0].to(weight.dtype), weight, bias).float()
            # embeddings may be padded differently: use the ids that both have
            student, teacher = logits[:, :teacher.shape[1]], teacher[:, :logits.shape[1]]
        kl = divergence(student, teacher, kind, beta, k).float()
        return ((1 - share) * ce + share * kl).sum(), right, ce.detach().sum(), kl.detach().sum()
    return sums
