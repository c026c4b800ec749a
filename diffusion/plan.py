"""--dry_run and --auto of the block diffusion trainer, for core/memory.py."""
from dataclasses import replace

import numpy as np
import torch

from core import memory as plans
from core.cli import named
from diffusion import dit, noise


def loss(model, rows, length, n_noisy, masked):
    """Loss of a network on rows of `length` clean tokens and n_noisy copies, so many masked."""
    every, tiles = length + n_noisy, -(-(length + n_noisy) // dit.TILE)
    dense, few = (torch.zeros(size, dtype=torch.int64) for size in ((rows, every), (masked,)))
    inputs = noise.Inputs(
        tokens=dense, position=dense.clone(), doc=dense.int(), block=dense.int(), rows=few,
        labels=few.clone(), weights=torch.ones(masked), places=few.clone(), n_noisy=n_noisy,
        tiles=torch.zeros(rows, tiles, tiles, dtype=torch.int8), layout=None)
    return (model(inputs) * inputs.weights).sum()


def step_of(config, backend):
    """memory.Step of a network of a Config. backend: --attn_backend, None for that of GPUs."""
    with torch.device("meta"):
        model = config.network(config, backend or "flex")
    attention = dit, "sparse_attention", lambda q, k, v, mask: plans.Kept.apply(q, k, v)
    return plans.Step(model, lambda model: model.layers, loss, (attention,), average=True)


def memory(args, step, setup, rows, eval_rows, targets):
    """memory.Memory of micro-steps with so many targets, of which a share is masked."""
    masked = sum(args.t_range) / 2 * targets
    size = rows.length, rows.noisy_length
    evaluated = args.per_device_eval_batch_size
    held_out = evaluated, *size, round(masked * evaluated / setup.batch_size)
    pack = setup.batch_size, *size, round(masked)
    return plans.estimate(step, setup, pack, held_out if eval_rows else None)


def by_rows(args, setup, rows, row_tokens):
    """Setups with micro-steps of so many rows of an optimizer step, of all ranks, the fastest first:
    as few as fit. row_tokens: that a row is computed on.
    """
    splits = [(max(1, round(rows / setup.ranks)), 1)]
    while splits[-1][0] > 1 and splits[-1][0] * row_tokens > plans.LARGE:
        accumulation = 2 * splits[-1][1]
        splits.append((max(1, round(rows / setup.ranks / accumulation)), accumulation))
    if named(args) & {"per_device_train_batch_size", "problems_per_batch",
                      "gradient_accumulation_steps"}:
        splits = [(setup.batch_size, setup.accumulation)]
    return [replace(way, batch_size=each, accumulation=accumulation)
            for way in plans.ways(args, setup) for each, accumulation in splits]


def choose(args, world, ranks, config, rows, eval_rows, table):
    """--auto: set the open flags. table: blocks.row_table of rows."""
    problems, most = table["samples"].mean(), np.sort(table["targets"])[::-1].cumsum()
    step = step_of(config, args.attn_backend)
    setups = by_rows(args, plans.setup_of(args, ranks), args.global_batch_size / problems,
                     rows.length + rows.noisy_length)
    plans.choose(args, world, ranks, setups, lambda setup: memory(
        args, step, setup, rows, eval_rows, most[min(setup.batch_size, len(most)) - 1]))


def print_plan(args, ranks, config, rows, eval_rows, table, order, left):
    """Print the plan of a run; UserError with all that it will not fit into. table:
    blocks.row_table of rows. order: PackOrder of them. left: steps to go.
    """
    setup, step = plans.setup_of(args, ranks), step_of(config, args.attn_backend)
    targets = plans.pack_sums(order, [0], table["targets"]).max()
    found = memory(args, step, setup, rows, eval_rows, targets)
    plans.print_plan(args, setup, found, f"{setup.batch_size} rows", step.model, [], left,
                     bool(eval_rows))
