"""Plans and choices of the trainer: memory (--dry_run, --auto), the range of noise levels
(--clip_search_widths).
"""
import functools

import numpy as np
import torch

from core import dist, memory
from diffusion import blocks, dit, elbo
from diffusion.choices import FULL, range_fits

SEARCH_BATCHES = 4  # batches per search of the noise range


def setups(args, setup, rows, row_tokens):
    """Setups of `rows` rows per step on all ranks, fastest (fewest micro-steps) first."""
    splits = [(max(1, round(rows / setup.ranks)), 1)]
    while splits[-1][0] > 1 and splits[-1][0] * row_tokens > memory.LARGE:
        accumulation = 2 * splits[-1][1]
        splits.append((max(1, round(rows / setup.ranks / accumulation)), accumulation))
    if args.named & {"per_device_train_batch_size", "problems_per_batch",
                            "gradient_accumulation_steps"}:
        splits = [(setup.per_device_train_batch_size, setup.gradient_accumulation_steps)]
    return [way._replace(per_device_train_batch_size=each, gradient_accumulation_steps=accumulation)
            for way in memory.list_ways(args, setup) for each, accumulation in splits]


def step_of(config, backend):
    """memory.Step of a network with a Config. backend: --attn_backend, None: the GPU's default."""
    def loss(model, rows, length, n_noisy, masked):
        sizes, tiles = ((rows, length + n_noisy), (masked,)), -(-(length + n_noisy) // dit.TILE)
        dense, few = (torch.zeros(size, dtype=torch.int64) for size in sizes)
        inputs = blocks.Blocks(dense, dense.clone(), dense.int(), dense.int(), n_noisy, rows=few,
                               labels=few.clone(), weights=torch.ones(masked),
                               tiles=torch.zeros(rows, tiles, tiles, dtype=torch.int8))
        return (model(inputs) * inputs.weights).sum()
    with torch.device("meta"):
        model = config.network(config, backend or "flex")
    return memory.Step(model, lambda model: model.layers, loss, average=True, kernels=lambda live: (
        (dit, "sparse_attention", lambda q, k, v, mask: memory.FakeKernel.apply(
            live, lambda q, *_: torch.empty_like(q), q, k, v)),
        (dit, "on_gpu", lambda x: True),
        (dit, "losses_of", functools.partial(
            memory.FakeKernel.apply, live, dit.cross_entropies))))


def plan_memory(args, world, ranks, config, rows, order=None, left=0):
    """With --auto, set unset flags. With an order (PackOrder of rows), print the plan of a run
    of `left` steps; UserError if GPU or disk are too small."""
    step, frozen = (step_of(config, args.attn_backend) for _ in range(2))
    frozen.model.requires_grad_(False)      # for validation
    setup, size = memory.setup_of(args, ranks), (rows.length, rows.noisy_length)

    def estimate(setup, targets):
        masked = round(sum(args.t_range) / 2 * targets)
        few, many = setup.per_device_train_batch_size, args.per_device_eval_batch_size
        parts = memory.estimate(step, setup, [(few, *size, masked)])
        forward = memory.step_bytes(frozen, setup._replace(gradient_checkpointing=None),
                                    (many, *size, round(masked * many / few)))
        parts["activations"] = max(parts["activations"], forward)
        return parts
    if order:
        needed = estimate(setup, order.sums(rows.table["targets"]).max())
        memory.print_plan(args, needed, step.model, [], left)
        return
    most = np.sort(rows.table["targets"])[::-1].cumsum()
    tried = setups(args, setup, args.global_batch_size / rows.table["samples"].mean(), sum(size))
    memory.choose(args, world, ranks, [(way, most[:way.per_device_train_batch_size][-1])
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
