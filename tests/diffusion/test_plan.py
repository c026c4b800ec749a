"""--dry_run of the block diffusion trainer plans the peak memory of a real step."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core import memory
from diffusion import blocks, dit, plan
from tests.helpers.live_bytes import check_plan, run_flags

LENGTH, NOISY = 96, 64


def inputs_of(rows, masked):
    """blocks.Blocks of `rows` rows with one document each; the first `masked` places of the first rows are masked."""
    places = torch.cat([torch.arange(NOISY), torch.arange(LENGTH)]).expand(rows, -1)
    doc = torch.zeros(rows, NOISY + LENGTH, dtype=torch.int32)
    index = torch.arange(masked)
    return blocks.Blocks(places % 290, places, doc, (places // 16).int(), NOISY, rows=index, labels=index % 290,
                         weights=torch.ones(masked))


def test_validation_counts(monkeypatch):
    """It takes more rows than a training step, without gradients."""
    plans, args = [], run_flags(attn_backend="sdpa", t_range=(0.0, 1.0), per_device_train_batch_size=1)
    monkeypatch.setattr(memory, "end_dry_run", lambda args, needed, *_: plans.append(needed))
    rows = SimpleNamespace(length=LENGTH, noisy_length=NOISY, table={"targets": np.array([40])})
    for rows_at_once in (1, 4096):
        args.per_device_eval_batch_size = rows_at_once
        plan.plan_memory(args, None, dit.config_of("tiny", 300, 299, 0.1), rows, SimpleNamespace(sums=lambda n: n))
    assert plans[0].pop("activations") < plans[1].pop("activations") and plans[0] == plans[1]


@pytest.mark.slow
@pytest.mark.parametrize("bf16, recompute, masked, pieces", [(True, "all", 40, 8192), (False, "all", 1000, 800)])
def test_planned_memory_is_the_peak_of_a_real_step(bf16, recompute, masked, pieces, monkeypatch):
    """The logits of many masked tokens are computed in pieces."""
    monkeypatch.setattr(dit, "HEAD_ROWS", pieces)
    config = dit.config_of("tiny", 300, 299, 0.1)
    model, args = dit.DiT(config, "sdpa", recompute).train(), run_flags(1, "ddp", bf16, recompute)
    empty = dit.DiT(config, "sdpa").to("meta")
    check_plan(empty, plan.loss, args, (16, LENGTH, NOISY, masked), model, inputs_of(16, masked),
               lambda model, inputs: model(inputs).sum())
