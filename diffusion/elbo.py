"""Validation of block diffusion: the likelihood bound with its sampling error.

Every rank takes equally many batches, the last ones perhaps of padding only. A batch gets the same
noise at every validation and on any number of ranks, so bounds of different steps and runs compare.
"""
import math
from typing import NamedTuple

import numpy as np
import torch

from common import distributed
from core import watchdog
from core.packing import PackOrder, rank_packs
from diffusion import blocks, noise
from diffusion.choices import bound_range

ANSWERS = "question", "answer", "execution", "fill"
REGIONS = {"gsm8k": ANSWERS, "chat": ANSWERS, "hdp": ("question", "plan", "execution", "fill")}
PLACES = 32         # block numbers reported one by one; the last stands for all later ones


class Eval(NamedTuple):
    """What a validation is on, and how it goes."""
    rows: blocks.Rows
    mask_id: int
    batch_rows: int     # of a batch
    repeats: int        # draws of the noise
    seed: int
    bf16: bool


def share_of_batches(world, rows, batch_rows, most=None):
    """Yield (number, Blocks) of this rank's part of the first `most` batches of rows (blocks.Rows),
    in order.

    Every rank gets equally many; the last ones may hold padding only.
    """
    order = PackOrder(np.ones(len(rows)), samples_per_pack=batch_rows, shuffle=False)
    most = min(most or order.packs_per_epoch, order.packs_per_epoch)
    packs = [pack if i * world.size + world.rank < most else []
             for i, pack in enumerate(rank_packs(order, world.rank, world.size, 1, epochs=1))
             if i * world.size < most]
    loader = blocks.make_loader(rows, packs, batch_rows, rows.noisy_length, num_workers=0,
                                prefetch_factor=None)
    for number, batch in enumerate(loader):
        yield number * world.size + world.rank, batch


def asked_to_stop(world):
    """True on all ranks when any of them was asked to stop. Collective."""
    return bool(distributed.largest(world, bool(watchdog.stop_requested())).item())


def weighted_losses(model, inputs, device, bf16):
    """(R,) float64 weighted losses of noised inputs, on the device."""
    inputs = inputs.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        losses = model(inputs)
    return losses.double() * inputs.weights


@torch.no_grad()
def bound(world, model, how, check):
    """Bound on the negative log-likelihood of an Eval's rows -> {"eval/...": float}, or None when
    asked to stop.

    check(): called before every batch; may raise.

    eval/loss: nats per target. eval/nll: the same sum per token of text (targets without fill);
    eval/stderr: its standard error. eval/nll_REGION, eval/nll_block_NN: nats per target of one
    region or block number. Noise is loglinear whatever schedule is trained on. The bound is the
    same under every schedule, but under the others more of it comes from levels below FULL, which
    are never drawn. The standard error is that of the noise alone, from how the draws of each block
    differ; low levels are rare and weigh much (1/t), so with few blocks it is rough.
    """
    rows, repeats, device = how.rows, how.repeats, world.device
    layout = rows.documents.layout
    sums = torch.zeros(repeats, 4 * PLACES, dtype=torch.float64, device=device)
    # of the mean of the repeats' sums
    variance = torch.zeros((), dtype=torch.float64, device=device)
    for number, batch in share_of_batches(world, rows, how.batch_rows):
        check()
        if asked_to_stop(world):
            return None
        cell = (batch.region * PLACES + batch.block.clamp(max=PLACES - 1)).flatten()
        of_block = torch.zeros(repeats, batch.n_groups, dtype=torch.float64, device=device)
        for repeat in range(repeats):
            draws = noise.draw(how.seed, "validation", (number, repeat), batch.n_groups,
                               *batch.doc.shape)
            inputs = noise.diffuse(batch, draws, how.mask_id, bound_range(layout))
            losses = weighted_losses(model, inputs, device, how.bf16)
            sums[repeat].index_add_(0, cell[inputs.places].to(device), losses)
            of_block[repeat].index_add_(0, batch.group.flatten()[inputs.places].to(device), losses)
        if repeats > 1 and batch.n_groups:      # none: what tops up the last round of ranks
            variance += of_block.var(0).sum() / repeats
    sums, variance = distributed.all_sum(world, sums), distributed.all_sum(world, variance)
    return report(sums.cpu().numpy(), float(variance), target_counts(rows), REGIONS[layout.system])


def target_counts(rows):
    """(4 * PLACES,) targets of each region and block number in all rows."""
    documents, counts = rows.documents, np.zeros(4 * PLACES, np.int64)
    for number in (n for members in rows.members for n in members):
        part = slice(*documents.offsets[number:number + 2])
        cell = documents.region[part] * PLACES + np.minimum(documents.block[part], PLACES - 1)
        counts += np.bincount(cell[documents.target[part]], minlength=4 * PLACES)
    return counts


def report(sums, variance, counts, regions):
    """Sums of losses (repeats, 4 * PLACES), variance of their mean over repeats, and numbers of
    targets (4 * PLACES,) -> {"eval/...": float}.
    """
    per_cell, counts = sums.mean(0).reshape(4, PLACES), counts.reshape(4, PLACES)
    text = max(1, counts[:blocks.FILL].sum())
    nll = per_cell.sum() / text
    values = {"loss": per_cell.sum() / max(1, counts.sum()), "nll": nll,
              "bits_per_token": nll / math.log(2), "perplexity": math.exp(min(700.0, nll))}
    if len(sums) > 1:
        values["stderr"] = math.sqrt(variance) / text
    for name, loss, n in zip(regions, per_cell.sum(1), counts.sum(1)):
        if n:
            values[f"nll_{name}"] = loss / n
    for place, (loss, n) in enumerate(zip(per_cell.sum(0), counts.sum(0))):
        if n:
            values[f"nll_block_{place:02d}"] = loss / n
    return {f"eval/{name}": float(value) for name, value in values.items()}


def improved(best, values):
    """Whether a validation has a better bound or accuracy than any before; `best`, {name: value},
    takes them over.

    Bounds rise while answers still get better, when a model becomes too sure of itself; so either
    counts.
    """
    news = {"nll": values["eval/nll"]}
    if "eval/accuracy" in values:
        news["wrong"] = 1 - values["eval/accuracy"]
    better = {name: value for name, value in news.items() if value < best.get(name, math.inf)}
    best.update(better)
    return bool(better)
