"""Learning from a teacher that scores the same tokens: how far a student's next token is from its teacher's.

Both are distributions over the same vocabulary, p the teacher's and q the student's, so the divergence is exact:

    forward   KL(p || q) = sum_i p_i log(p_i / q_i)         covers all that the teacher would say
    reverse   KL(q || p)                                    keeps the student to what the teacher would say
    js        b KL(p || m) + (1 - b) KL(q || m),  m = b p + (1 - b) q       (generalised Jensen-Shannon, Lin 1991)

With top-k both are first summed up to the teacher's k likeliest tokens and one bucket for everything else. By the
log-sum inequality that is never more than the divergence over the vocabulary, and zero where the two agree.

The loss of a token is (1 - w) CE + w divergence, CE that of the given answer. No gradient goes into the teacher.
"""
import math

import torch

from distill.choices import DIVERGENCES

FLOOR = -1e4        # least log-probability, whose exponential is 0: logits of -inf would give nan


def log_probs(logits, ids=None):
    """(R, V) fp32 log-probabilities of logits (R, V); with ids (R, K): (R, K + 1) fp64, the last
    one of all others.
    """
    if ids is None:
        return logits.log_softmax(-1).clamp(min=FLOOR)
    rest = logits.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
    # these few numbers are normalised in fp64: a divergence is a small difference of logarithms, and
    # an error of 1e-7 in their total would stand in it undiminished
    return torch.cat([logits.gather(1, ids), rest], 1).double().log_softmax(-1).clamp(min=FLOOR)


def divergence(student, teacher, kind, beta=0.5, k=0):
    """(R,) divergence of student logits (R, V) from teacher logits (R, V), both fp32; fp64 of top-k.

    teacher may be (ids (R, k), log-probabilities (R, k + 1) as log_probs gives them).
    kind: of DIVERGENCES; beta: b of js, between 0 and 1; k: of top-k, below V; 0: over the whole vocabulary.
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"no divergence {kind!r}")
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


def prompted_loss(logits, targets, teacher, share, kind, beta, k):
    """(loss, sum of cross-entropies, sum of divergences, number of rows), 0-d fp32; only the loss has gradients.

    logits (R, V), teacher (R, W) fp32; targets (R,) int64; share: w of the top of this file, above 0, up to 1.
    """
    ce = logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0]
    own = logits
    if not isinstance(teacher, tuple):      # embeddings that are padded otherwise: the ids that both have
        own, teacher = logits[:, :teacher.shape[1]], teacher[:, :logits.shape[1]]
    apart = divergence(own, teacher, kind, beta, k).float()
    loss = ((1 - share) * ce + share * apart).sum()
    return loss, ce.detach().sum(), apart.detach().sum(), torch.full_like(loss.detach(), len(targets))
