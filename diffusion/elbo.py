"""Averaged weights and their validation: likelihood bound with sampling error. A batch gets the
same noise at every validation and on any number of ranks, so different steps and runs compare.
"""
import math
from typing import NamedTuple

import torch

from core import dist, tensor_io
from diffusion import blocks
from diffusion.choices import bound_range
from diffusion.dit import trained_parameters


class Average:
    """EMA of a model's trained weights; its decay at update n is min(decay, (1 + n) / (10 + n))."""

    def __init__(self, model, decay):
        self.decay, self.parameters = decay, trained_parameters(model)
        self.shadow = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.updates = torch.zeros((), device=next(model.parameters()).device)

    def _pairs(self):
        return zip(*([tensor_io.local_rows(t.detach())[0] for t in tensors.values()]
                     for tensors in (self.parameters, self.shadow)))

    @torch.no_grad()
    def update(self, skip=0.0):
        """Update the average, unless skip (number or 0-d tensor) is 1; no host sync."""
        self.updates += 1 - skip
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        share = (1 - decay) * (1 - skip)
        for weight, shadow in self._pairs():        # one pass; _foreach_lerp_ takes no 0-d tensor
            shadow.lerp_(weight, share)

    @torch.no_grad()
    def swap(self):
        """Swap the model's weights and the averaged ones in place. FSDP2: reshard first."""
        for weight, shadow in self._pairs():
            kept = weight.clone()
            weight.copy_(shadow)
            shadow.copy_(kept)


class Eval(NamedTuple):
    """The data and settings of a validation."""
    rows: blocks.Rows
    tokens: object          # problems.Tokens
    batch_rows: int         # rows per batch
    repeats: int            # draws of the noise
    seed: int
    bf16: bool
    widths: tuple = ()      # widths of the ranges that plan.search_range tries
    weighting: str = "elbo"
    asked: int = 0          # problems to answer, for accuracy


def validate(world, model, average, task, t_range, asked_to_stop):
    """(values, t range for training) of the averaged weights; None if stopped. Collective."""
    dist.reshard(model)
    average.swap()
    model.eval()
    values = bound(world, model, task, asked_to_stop)
    if values and task.widths:
        from diffusion import plan
        t_range = plan.search_range(world, model, task, asked_to_stop)
    if values and t_range and task.asked:
        from diffusion import sample_bd3lm
        values |= sample_bd3lm.accuracy(world, model, task)
    model.train()
    dist.reshard(model)     # the forward passes left the averaged weights gathered
    average.swap()
    return (values, t_range) if values and t_range else None


def share_of_batches(world, rows, batch_rows, most=None):
    """Yield (number, Blocks) of this rank's batches among the first `most`, or among all. All ranks
    get equally many batches; the last ones may be padding only."""
    batches = min(most or len(rows), -(-len(rows) // batch_rows))
    for number in range(world.rank, -(-batches // world.size) * world.size, world.size):
        first = number * batch_rows if number < batches else len(rows)
        yield number, blocks.collate(rows.members[first:first + batch_rows], batch_rows, rows)


def losses_of_draw(model, task, batch, purpose, number, t_range, device):
    """(groups,) float64 sums of the weighted losses of each group of Blocks. task: Eval"""
    rows, length = batch.tokens.shape
    draws = blocks.draw(
        task.seed, purpose, number, batch.n_groups, rows, length - batch.n_noisy)
    weighting = task.weighting if purpose == "search" else "elbo"
    inputs = blocks.diffuse(batch, draws, task.tokens.mask, t_range, weighting).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=task.bf16):
        losses = model(inputs)
    sums = torch.zeros(batch.n_groups, dtype=torch.float64, device=device)
    groups = inputs.group.flatten()[inputs.rows]
    return sums.index_add_(0, groups, losses.double() * inputs.weights)


@torch.no_grad()
def bound(world, model, task, asked_to_stop):
    """Bound on the negative log-likelihood of an Eval's rows -> {"eval/...": float}, or None if
    asked to stop. asked_to_stop(): collective, called before every batch.
    eval/loss: nats per target. eval/nll: the same sum per token of text (targets without fill).
    eval/stderr: standard error of eval/nll due to the noise, from the draws of each block."""
    rows, repeats, device = task.rows, task.repeats, world.device
    t_range = bound_range(rows.documents.layout)
    # the sum of each draw, then the variance of the mean of the sums
    sums = torch.zeros(repeats + 1, dtype=torch.float64, device=device)
    for number, batch in share_of_batches(world, rows, task.batch_rows):
        if asked_to_stop():
            return None
        of_block = torch.stack([
            losses_of_draw(model, task, batch, "validation", (number, repeat), t_range, device)
            for repeat in range(repeats)])      # (repeats, groups)
        sums[:-1] += of_block.sum(1)
        if repeats > 1 and batch.n_groups:      # 0 groups: padding batch
            sums[-1] += of_block.var(0).sum() / repeats
    *losses, variance = dist.all_reduce(world, sums).tolist()
    total, targets, text = sum(losses) / repeats, *(
        int(rows.table[name].sum()) for name in ("targets", "text"))
    nll = total / text
    values = {"eval/loss": total / targets, "eval/nll": nll, "eval/bits_per_token": nll /
              math.log(2), "eval/perplexity": math.exp(min(700.0, nll))}
    return values | ({"eval/stderr": math.sqrt(variance) / text} if repeats > 1 else {})


def update_best(best, values):
    """Update `best`, {name: least value}, with a bound and accuracy; True if one is better. With a
    non-finite bound neither is better."""
    nll, right = values["eval/nll"], values.get("eval/accuracy", -math.inf)
    better = {name: value for name, value in (("nll", nll), ("wrong", 1 - right))
              if math.isfinite(nll) and value < best.get(name, math.inf)}
    best.update(better)
    return bool(better)
