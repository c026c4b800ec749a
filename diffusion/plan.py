"""--dry_run and --auto of the block diffusion trainer, for core/memory.py."""
import numpy as np
import torch

from core import memory
from diffusion import blocks, dit


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
        sizes = (rows, length + n_noisy), (masked,)
        dense, few = (torch.zeros(size, dtype=torch.int64) for size in sizes)
        inputs = blocks.Inputs(
            tokens=dense, position=dense.clone(), doc=dense.int(), block=dense.int(), rows=few,
            labels=few.clone(), weights=torch.ones(masked), group=few, n_noisy=n_noisy)
        return (model(inputs) * inputs.weights).sum()
    with torch.device("meta"):
        model = config.network(config, backend or "flex")
    return memory.Step(model, lambda model: model.layers, loss, average=True, kernels=((
        dit, "sparse_attention", lambda q, k, v, mask: memory.FakeKernel.apply(None, q, k, v)),))


def plan_memory(args, world, ranks, config, rows, order=None, left=0):
    """With --auto, set unset flags. With an order (PackOrder of rows), print the plan of a run
    of `left` steps; UserError if GPU or disk are too small."""
    step, frozen = (step_of(config, args.attn_backend) for _ in range(2))
    frozen.model.requires_grad_(False)      # for validation
    setup, size = memory.setup_of(args, ranks), (rows.length, rows.noisy_length)

    def estimate(setup, targets):
        masked = round(sum(args.t_range) / 2 * targets)
        few, many = setup.per_device_train_batch_size, args.per_device_eval_batch_size
        needed = memory.estimate(step, setup, (few, *size, masked))
        forward = memory.step_bytes(frozen, setup._replace(gradient_checkpointing=None),
                                    (many, *size, round(masked * many / few)))
        needed.stages["validation"] = needed.standing + max(forward.values())
        return needed
    if order:
        needed = estimate(setup, order.sums(rows.table["targets"]).max())
        memory.print_plan(args, needed, step.model, [], left)
        return
    most = np.sort(rows.table["targets"])[::-1].cumsum()
    tried = setups(args, setup, args.global_batch_size / rows.table["samples"].mean(), sum(size))
    memory.choose(args, world, ranks, tried, lambda setup: estimate(
        setup, most[min(setup.per_device_train_batch_size, len(most)) - 1]))
