"""Validation of block diffusion: the likelihood bound with its sampling error, and the search for a noise range.

Every rank takes equally many batches, the last ones perhaps of padding only. A batch gets the same noise at every
validation and on any number of ranks, so bounds of different steps and runs compare.
"""
import math

import numpy as np
import torch

from common import distributed, watchdog
from common.packing import PackOrder, rank_packs
from diffusion import blocks, noise
from diffusion.choices import FULL, bound_range, range_fits

REGIONS = {"gsm8k": ("question", "answer", "execution", "fill"), "hdp": ("question", "plan", "execution", "fill")}
PLACES = 32         # block numbers reported one by one; the last stands for all later ones


def share_of_batches(world, rows, batch_rows, most=None):
    """Yield (number, Blocks) of this rank's part of the first `most` batches of rows (blocks.Rows), in order.

    Every rank gets equally many; the last ones may hold padding only.
    """
    order = PackOrder(np.ones(len(rows)), samples_per_pack=batch_rows, shuffle=False)
    most = min(most or order.packs_per_epoch, order.packs_per_epoch)
    packs = [pack if i * world.size + world.rank < most else []
             for i, pack in enumerate(rank_packs(order, world.rank, world.size, 1, epochs=1)) if i * world.size < most]
    loader = blocks.make_loader(rows, packs, batch_rows, rows.noisy_length, num_workers=0, prefetch_factor=None)
    for number, batch in enumerate(loader):
        yield number * world.size + world.rank, batch


def asked_to_stop(world):
    """True on all ranks when any of them was asked to stop. Collective."""
    return bool(distributed.any_rank(world, watchdog.stop_requested()).item())


def weighted_losses(model, inputs, device, bf16):
    """(R,) float64 weighted losses of noised inputs, on the device."""
    inputs = inputs.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        losses = model(inputs)
    return losses.double() * inputs.weights


@torch.no_grad()
def bound(world, model, rows, mask_id, check, *, batch_rows, repeats, seed, bf16):
    """Bound on the negative log-likelihood of rows (blocks.Rows) -> {"eval/...": float}, or None when asked to stop.

    check(): called before every batch of batch_rows rows; may raise. repeats: draws of the noise.

    eval/loss: nats per target. eval/nll: the same sum per token of text (targets without fill); eval/stderr: its
    standard error. eval/nll_REGION, eval/nll_block_NN: nats per target of one region or block number.
    Noise is loglinear whatever schedule is trained on. The bound is the same under every schedule, but under the others
    more of it comes from levels below FULL, which are never drawn. The standard error is that of the noise alone,
    from how the draws of each block differ; low levels are rare and weigh much (1/t), so with few blocks it is rough.
    """
    layout = rows.documents.layout
    sums = torch.zeros(repeats, 4 * PLACES, dtype=torch.float64, device=world.device)
    variance = torch.zeros((), dtype=torch.float64, device=world.device)        # of the mean of the repeats' sums
    for number, batch in share_of_batches(world, rows, batch_rows):
        check()
        if asked_to_stop(world):
            return None
        cell = (batch.region * PLACES + batch.block.clamp(max=PLACES - 1)).flatten()
        of_block = torch.zeros(repeats, batch.n_groups, dtype=torch.float64, device=world.device)
        for repeat in range(repeats):
            draws = noise.draw(seed, "validation", (number, repeat), batch.n_groups, *batch.doc.shape)
            inputs = noise.diffuse(batch, draws, mask_id, bound_range(layout))
            losses = weighted_losses(model, inputs, world.device, bf16)
            sums[repeat].index_add_(0, cell[inputs.places].to(world.device), losses)
            of_block[repeat].index_add_(0, batch.group.flatten()[inputs.places].to(world.device), losses)
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
    """Sums of losses (repeats, 4 * PLACES), variance of their mean over repeats, and numbers of targets (4 * PLACES,)
    -> {"eval/...": float}.
    """
    per_cell, counts = sums.mean(0).reshape(4, PLACES), counts.reshape(4, PLACES)
    text = max(1, counts[:blocks.FILL].sum())
    nll = per_cell.sum() / text
    values = {"loss": per_cell.sum() / max(1, counts.sum()), "nll": nll, "bits_per_token": nll / math.log(2),
              "perplexity": math.exp(min(700.0, nll))}
    if len(sums) > 1:
        values["stderr"] = math.sqrt(variance) / text
    for name, loss, n in zip(regions, per_cell.sum(1), counts.sum(1)):
        if n:
            values[f"nll_{name}"] = loss / n
    for place, (loss, n) in enumerate(zip(per_cell.sum(0), counts.sum(0))):
        if n:
            values[f"nll_block_{place:02d}"] = loss / n
    return {f"eval/{name}": float(value) for name, value in values.items()}


def candidates(widths, block_sizes):
    """Ranges to try, [(low, high)]: all of (0, 1], and for each width those that start at 0, 0.05, 0.10 and so on.

    Ranges without a possible number of masked tokens in a full block are left out.
    """
    found = [FULL]
    for width in widths:
        steps = int(round((1 - width) / 0.05, 6)) + 1
        found += [(max(round(0.05 * i, 2), FULL[0]), round(0.05 * i + width, 6)) for i in range(steps)]
    return list(dict.fromkeys(t_range for t_range in found
                              if all(range_fits(t_range, size) for size in block_sizes)))


@torch.no_grad()
def search_range(world, model, rows, mask_id, check, *, widths, batches, schedule, weighting, batch_rows, seed, bf16):
    """(low, high) of the candidate under which losses of blocks vary least, or None when asked to stop.

    As in the paper (var_min): less variance between blocks means less noise in gradients. Costs one forward pass for
    each candidate and each of the first `batches` batches. All candidates get the same random numbers. check,
    batch_rows: as in bound; schedule, weighting: as in noise.diffuse.
    """
    layout = rows.documents.layout
    sizes = {layout.region_block(blocks.PLAN), layout.region_block(blocks.EXECUTION)}
    tried = candidates(widths, sizes)
    moments = torch.zeros(len(tried), 3, dtype=torch.float64, device=world.device)      # sum, sum of squares, number
    for number, batch in share_of_batches(world, rows, batch_rows, batches):
        check()
        if asked_to_stop(world):
            return None
        draws = noise.draw(seed, "search", number, batch.n_groups, *batch.doc.shape)
        sizes = torch.bincount(batch.group[batch.target], minlength=batch.n_groups).to(world.device)
        for index, t_range in enumerate(tried):
            inputs = noise.diffuse(batch, draws, mask_id, t_range, schedule, weighting)
            losses = weighted_losses(model, inputs, world.device, bf16)
            per_block = torch.zeros(batch.n_groups, dtype=torch.float64, device=world.device)
            per_block.index_add_(0, batch.group.flatten()[inputs.places].to(world.device), losses)
            per_block /= sizes
            moments[index] += torch.stack([per_block.sum(), per_block.square().sum(),
                                           torch.full_like(losses.sum(), batch.n_groups)])
    total, squares, n = distributed.all_sum(world, moments).T
    return tried[int((squares / n - (total / n).square()).argmin())]
