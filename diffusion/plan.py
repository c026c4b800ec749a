"""--dry_run of the block diffusion trainer: the memory of its step, and of the guide's presets beside the guide's own
figures.
"""
import functools

import numpy as np
import torch

from common import memory, plan, recomputation
from diffusion import dit, noise, weights

# Problems of a micro-step -> GB of an H200 that the guide of ngocbao220/hdp-diffusion gives for them. Its rows hold one
# problem each, padded to 512 tokens, and its head computes logits of every place.
GUIDE = {"conservative": (64, 40, 50), "recommended": (128, 60, 80), "aggressive": (192, 90, 110),
         "extreme": (256, 110, 130)}
LOGIT_COPIES = 3        # of a CPU, fp32: log-softmax and two gradients; a GPU has logits and one gradient


def row_bytes(model, length, n_noisy, bf16, sharded, gpu=True):
    """memory.row_bytes of a row of `length` clean tokens and n_noisy copies in a DiT; bf16, sharded, gpu as there."""
    def inputs(rows):
        def numbers(n):
            return torch.zeros(rows, n, dtype=torch.int64)
        every, none = length + n_noisy, torch.zeros(0, dtype=torch.int64)
        tiles = torch.zeros(rows, *[-(-every // dit.TILE)] * 2, dtype=torch.int8)
        return (noise.Inputs(tokens=numbers(every), position=numbers(every), doc=numbers(every).int(),
                             block=numbers(every).int(), rows=none, labels=none, weights=none.float(), places=none,
                             tiles=tiles, n_noisy=n_noisy,
                             layout=None),), {}
    kernel = memory.Kernel(dit, "sparse_attention", False, False) if model.backend == "flex" else None
    return memory.row_bytes(model, model.layers, inputs, bf16=bf16, sharded=sharded, gpu=gpu, kernel=kernel,
                            plain=[(model, "call", recomputation.caller(None)), (model, "_masks", (None, None))])


def head_bytes(config, masked, bf16=False, gpu=True):
    """Bytes of the head at its peak, for so many masked tokens: of all their rows, and of a piece's logits."""
    piece, logit = np.minimum(masked, dit.HEAD_ROWS), (4 if bf16 else 8) if gpu else LOGIT_COPIES * 4
    return 4 * config.hidden_size * masked + piece * (logit * config.vocab_size + 10 * config.hidden_size)


def memory_stages(model, row, rows, masked, *, ranks, sharded, bf16, recompute, accumulation, eval_rows=0):
    """(parts, stages): bytes of one GPU, as memory has them, with micro-steps of `rows` rows and masked tokens.

    model: the empty DiT. row: of row_bytes. eval_rows: of a validation batch, of whose tokens the same share is masked.
    """
    casts = (0, 0) if sharded or not bf16 else memory.cast_bytes(
        model, model.layers, recompute, **weights.module_of(model.config).OWN_CASTS)
    parts = memory.memory_parts(memory.unit_sizes(model, model.layers), world=ranks, sharded=sharded,
                                compute=2 if bf16 else 4, casts=casts, accumulation=accumulation, average=True,
                                **memory.table_of(model))
    (kept,), (layer,) = memory.kept_bytes(row, len(model.layers), recompute)
    given = (np.array([rows * kept]), np.array([rows * layer]), np.array([head_bytes(model.config, masked, bf16)]))
    _, parts, stages = memory.worst_pack(parts, *given, recompute)
    if eval_rows:       # no gradients: one layer's work, and logits beside their log-softmax
        head = head_bytes(model.config, masked * eval_rows / rows, bf16)
        stages["validation"] = stages["the heads"] - parts["activations"] - parts["logits"] + (
            eval_rows * float(row["layer"][0]) + head)
    return parts, stages


def peaks(config, table, rows, eval_rows, masked_share, *, backend, eval_batch_size):
    """Function of a plan.Setup -> bytes of one GPU at the peak of a micro-step whose rows have the most targets.

    config, table, ...: of print_plan.
    """
    with torch.device("meta"):
        model = weights.module_of(config).Model(config, backend or "flex")
    row_of = functools.cache(lambda *how: row_bytes(model, rows.length, rows.noisy_length, *how))
    most = np.sort(table["targets"])[::-1].cumsum()

    def peak(setup):
        masked = masked_share * most[min(setup.batch_size, len(most)) - 1]
        return max(memory_stages(
            model, row_of(setup.bf16, setup.fsdp), setup.batch_size, masked, ranks=setup.shards, sharded=setup.fsdp,
            bf16=setup.bf16, recompute=setup.recompute, accumulation=setup.accumulation,
            eval_rows=eval_batch_size if eval_rows else 0)[1].values())
    return peak


def presets_text(peak_of, per_row):
    """The presets' memory beside the guide's. peak_of(rows): bytes at the peak; per_row: problems of a row."""
    lines = ["presets    rows that hold the problems, peak estimate; the guide's figure for padded rows and all logits"]
    for name, (problems, low, high) in GUIDE.items():
        rows = max(1, round(problems / per_row))
        lines.append(f"{name:<13}  {problems:>3} problems {rows:>4} rows  {peak_of(rows) / memory.GIB:7.2f} GiB   "
                     f"guide {low}-{high} GB")
    return plan.INDENT.join(lines)


def print_plan(check, config, table, rows, eval_rows, order, masked_share, steps, *, setup, room, backend,
               eval_batch_size):
    """Print what a run takes; what it will not fit into is a problem of `check`.

    config: dit.Config. table: blocks.row_table of rows. order: PackOrder of them. masked_share: of the targets, on
    average; noise is spread evenly over a step. steps: still to go. setup, room: plan.Setup, plan.Limits. backend:
    --attn_backend, None for that of GPUs.
    """
    with torch.device("meta"):
        model = weights.module_of(config).Model(config, backend or "flex", setup.recompute)
    row = row_bytes(model, rows.length, rows.noisy_length, setup.bf16, setup.fsdp)

    def stages_of(batch_rows, masked):
        return memory_stages(model, row, batch_rows, masked, ranks=setup.shards, sharded=setup.fsdp, bf16=setup.bf16,
                             recompute=setup.recompute, accumulation=setup.accumulation,
                             eval_rows=eval_batch_size if eval_rows else 0)
    parts, stages = stages_of(setup.batch_size, masked_share * plan.epoch_sums(order, [0], table["targets"]).max())
    text = plan.memory_text(setup, parts, stages, f"{setup.batch_size} rows",
                            "of a piece of the masked tokens, at their peak")
    print(plan.lengths_text(np.concatenate([rows.documents.tokens[m] for m in rows.members])))
    plan.print_room(check, setup, room, text, parts, stages, memory.checkpoint_bytes(model, True, average=True), steps,
                    bool(eval_rows))
    if not isinstance(config, dit.Config):      # the guide is for DiTs
        return
    print(presets_text(lambda n: max(stages_of(n, masked_share * n * table["targets"].mean())[1].values()),
                       table["samples"].mean()))
