"""--dry_run of the block diffusion trainer: its memory is the peak of a real step."""
import pytest
import torch

from core.memory import Setup, step_bytes
from diffusion import blocks, dit, plan
from tests.helpers.live_bytes import real_peak

LENGTH, NOISY = 96, 64


def step_of(backend, size="tiny", vocabulary=300):
    return plan.step_of(dit.config_of(size, vocabulary, vocabulary - 1, 0.1), backend)


def inputs_of(rows, masked):
    """blocks.Inputs of rows with one document each, whose first places of all rows together are masked."""
    places = torch.cat([torch.arange(NOISY), torch.arange(LENGTH)]).expand(rows, -1)
    doc = torch.zeros(rows, NOISY + LENGTH, dtype=torch.int32)
    at = torch.arange(masked)
    return blocks.Inputs(tokens=places % 290, position=places, doc=doc, block=(places // 16).int(), rows=at,
                        labels=at % 290, weights=torch.ones(masked), group=at, tiles=None,
                        n_noisy=NOISY)


@pytest.mark.slow
@pytest.mark.parametrize("bf16, recompute, masked, pieces", [(True, "selective", 40, 8192), (False, "all", 1000, 800)])
def test_planned_memory_is_the_peak_of_a_real_step(bf16, recompute, masked, pieces, monkeypatch):
    """Within 3 %. The logits of many masked tokens are computed in pieces."""
    monkeypatch.setattr(dit, "HEAD_ROWS", pieces)
    model = dit.DiT(dit.config_of("tiny", 300, 299, 0.1), "sdpa", recompute).train()
    peak = real_peak(model, inputs_of(16, masked), lambda model, inputs: model(inputs).sum(), bf16)
    found = step_bytes(step_of("sdpa"), Setup(1, bf16=bf16, recompute=recompute), (16, LENGTH, NOISY, masked), gpu=False)
    assert max(found.values()) == pytest.approx(peak, rel=0.03)
