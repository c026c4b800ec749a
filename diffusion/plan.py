"""Plans and choices of the trainer: memory (--dry_run, --auto), the range of noise levels
(--clip_search_widths).
"""
import copy
from functools import partial
from unittest import mock

import numpy as np
import torch

from core import dist, memory
from diffusion import blocks, dit, elbo
from diffusion.choices import FULL, range_fits

SEARCH_BATCHES = 4  # batches per search of the noise range


def ways(args, rows, row_tokens):
    """[{flag: value}] for `rows` rows per step on all ranks, fastest (fewest micro-steps) first."""
    each, splits, n = rows / args.ranks, [], 1
    while not splits or splits[-1][0] > 1 and splits[-1][0] * row_tokens > memory.LARGE:
        splits.append((max(1, round(each / n)), n))
        n *= 2
    if args.named & {"per_device_train_batch_size", "problems_per_batch",
                     "gradient_accumulation_steps"}:
        splits = [(args.per_device_train_batch_size, args.gradient_accumulation_steps)]
    return [way | {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
            for way in memory.list_ways(args) for size, accumulation in splits]


def loss(model, rows, length, n_noisy, masked):
    """Loss of a dit.Network on `rows` rows with `masked` masked tokens."""
    sizes, tiles = ((rows, length + n_noisy), (masked,)), -(-(length + n_noisy) // dit.TILE)
    dense, few = (torch.zeros(size, dtype=torch.int64) for size in sizes)
    inputs = blocks.Blocks(dense, dense.clone(), dense.int(), dense.int(), n_noisy, rows=few,
                           labels=few.clone(), weights=torch.ones(masked),
                           tiles=torch.zeros(rows, tiles, tiles, dtype=torch.int8))
    return (model(inputs) * inputs.weights).sum()


# dit's functions as one kernel each, as on a GPU
KERNELS = {
    "on_gpu": lambda x: True,
    "sparse_attention": lambda q, k, v, mask: memory.FakeKernel.apply(
        lambda q, *_: torch.empty_like(q), q, k, v),
    "losses_of": partial(memory.FakeKernel.apply, lambda logits, labels: torch.empty(len(labels)))}


def plan_memory(args, world, config, rows, order=None, left=0):
    """With --auto, set unset flags. With an order (PackOrder of rows), print the plan of a run
    of `left` steps and exit; UserError if GPU or disk are too small."""
    with torch.device("meta"):
        model = config.network(config, args.attn_backend or "flex")
    frozen = copy.deepcopy(model).requires_grad_(False)     # for validation
    size = rows.length, rows.noisy_length

    def estimate(args, targets):
        masked = round(sum(args.t_range) / 2 * targets)
        few, many = args.per_device_train_batch_size, args.per_device_eval_batch_size
        with mock.patch.multiple(dit, **KERNELS):
            parts = memory.estimate(model, loss, args, [(few, *size, masked)])
            forward = memory.step_bytes(
                frozen, loss, args, (many, *size, round(masked * many / few)))
        parts["activations"] = max(parts["activations"], forward)
        return parts | {"average": parts["optimizer"] / 2}      # of the trained weights
    if order:
        needed = estimate(args, order.sums(rows.table["targets"]).max())
        return memory.end_dry_run(args, needed, model, [], left)
    most = np.sort(rows.table["targets"])[::-1].cumsum()
    tried = ways(args, args.global_batch_size / rows.table["samples"].mean(), sum(size))
    memory.choose(args, world, [(way, most[:way["per_device_train_batch_size"]][-1])
                                for way in tried], estimate)


def candidates(widths, block_sizes):
    """[(low, high)] to try: (0, 1], and for each width the ranges that start at 0, 0.05, ..."""
    ranges = [FULL, *((max(round(0.05 * i, 2), FULL[0]), round(0.05 * i + width, 6))
                      for width in widths for i in range(int(round((1 - width) / 0.05, 6)) + 1))]
    return list(dict.fromkeys(t_range for t_range in ranges
                              if all(range_fits(t_range, size) for size in block_sizes)))


@torch.no_grad()
def search_range(world, model, task, asked_to_stop):
    """(low, high) of the candidate with the least variance of block losses (BD3-LM's var_min). Runs
    each candidate on the first SEARCH_BATCHES batches; None if asked to stop."""
    device = world.device
    tried = candidates(task.widths, task.rows.documents.layout.block_sizes)
    # sum, sum of squares, number
    moments = torch.zeros(len(tried), 3, dtype=torch.float64, device=device)
    for number, batch in elbo.share_of_batches(world, task.rows, task.batch_rows, SEARCH_BATCHES):
        if asked_to_stop():
            return None
        sizes = torch.bincount(batch.group[batch.target], minlength=batch.n_groups).to(device)
        for index, t_range in enumerate(tried):     # with the same random numbers
            losses = elbo.losses_of_draw(
                model, task, batch, "search", number, t_range, device) / sizes
            moments[index] += torch.stack([losses, losses**2, torch.ones_like(losses)]).sum(1)
    total, squares, n = dist.all_reduce(world, moments).T
    return tried[int((squares / n - (total / n).square()).argmin())]
