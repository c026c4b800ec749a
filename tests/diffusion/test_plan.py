"""--dry_run of the block diffusion trainer: its estimate of memory against what a real step leaves alive."""
import pytest
import torch

from common import memory
from diffusion import dit, noise, plan
from tests.helpers.live_bytes import LiveBytes

LENGTH, NOISY = 96, 64


def model_of(backend, recompute, size="nano", dropout=0.1, device="cpu", vocabulary=300):
    with torch.device(device):
        return dit.DiT(dit.config_of(size, vocabulary, vocabulary - 1, dropout), backend, recompute).train()


def inputs_of(rows, masked):
    """noise.Inputs of rows with one document each, whose first places of all rows together are masked."""
    places = torch.cat([torch.arange(NOISY), torch.arange(LENGTH)]).expand(rows, -1)
    doc = torch.zeros(rows, NOISY + LENGTH, dtype=torch.int32)
    at = torch.arange(masked)
    return noise.Inputs(tokens=places % 290, position=places, doc=doc, block=(places // 16).int(), rows=at,
                        labels=at % 290, weights=torch.ones(masked), places=at, tiles=None,
                        n_noisy=NOISY, layout=b"one")


def real_step(model, inputs, bf16):
    """(bytes alive at the end of the forward pass, peak of both passes) beside weights and batch."""
    known = [*model.parameters(), *(tensor for tensor in inputs if isinstance(tensor, torch.Tensor))]
    with LiveBytes(known) as found:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            losses = model(inputs)
            kept = found.now
        losses.sum().backward()
    return kept, found.peak


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("recompute", [None, "all", "selective"])
def test_activations_are_what_a_step_keeps(bf16, recompute):
    """Within 5 %, and the peak of the whole step from the stages that are printed."""
    model, rows, masked = model_of("sdpa", recompute, "tiny"), 16, 40
    kept, peak = real_step(model, inputs_of(rows, masked), bf16)
    row = plan.row_bytes(model_of("sdpa", recompute, "tiny", device="meta"), LENGTH, NOISY, bf16, False, gpu=False)
    (a_row,), (layer,) = memory.kept_bytes(row, len(model.layers), recompute)
    casts = memory.cast_bytes(model, model.layers, recompute, **dit.OWN_CASTS) if bf16 else (0, 0)
    assert rows * a_row == pytest.approx(kept - sum(casts) - masked * 4 * 300, rel=0.05)
    parts = memory.memory_parts([(0, 0, 0)], casts=casts) | {"fixed": 0}
    stages = memory.peak_stages(parts, rows * a_row, rows * layer, plan.head_bytes(model.config, masked, gpu=False),
                                recompute)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert max(stages.values()) * 0.9 < peak < (max(stages.values()) + gradients) * 1.05


@pytest.mark.parametrize("masked", [700, 1000])
def test_logits_are_the_peak_of_many_masked_tokens(masked, monkeypatch):
    """Whole, and in pieces of which one at a time has logits."""
    monkeypatch.setattr(dit, "HEAD_ROWS", 800)
    model = model_of("sdpa", "all", vocabulary=4000)
    _, peak = real_step(model, inputs_of(16, masked), False)
    row = plan.row_bytes(model, LENGTH, NOISY, False, False, gpu=False)
    estimate = 16 * (row["inputs"] + row["ends"])[0] + plan.head_bytes(model.config, masked, gpu=False)
    assert estimate == pytest.approx(peak, rel=0.1)


def test_counting_leaves_the_model_as_it_was():
    model, inputs = model_of("sdpa", "all", dropout=0.0), inputs_of(3, 20)
    with torch.no_grad():
        before = model(inputs).sum().item()
        plan.row_bytes(model, 40, 24, True, True)
        assert model(inputs).sum().item() == before
    assert not any(layer._forward_hooks for layer in model.layers) and model._masks[0] == b"one"


def test_flex_keeps_no_masks():
    """Dense masks are as large as the scores of one head, each layer's sum twice; tiles are not."""
    flex, dense = (plan.row_bytes(model_of(backend, None, device="meta"), LENGTH, dit.TILE, True, False)["layers"][0]
                   for backend in ("flex", "sdpa"))
    assert dense - flex > 2 * (dit.TILE * (dit.TILE + LENGTH) + LENGTH * LENGTH)


@pytest.mark.slow
def test_the_guides_recommended_micro_step():
    """128 problems in 43 rows of the 170 M model: 16.1 GiB are counted by bench/roofline.py under fake CUDA tensors."""
    model = model_of("flex", None, "small", device="meta", vocabulary=50258)

    def peak(recompute, ranks=1, sharded=False):
        row = plan.row_bytes(model, 512, 384, True, sharded)
        parts, stages = plan.memory_stages(model, row, 43, 6417, ranks=ranks, sharded=sharded, bf16=True,
                                           recompute=recompute, accumulation=1)
        return (max(stages.values()) - parts["fixed"]) / memory.GIB, parts
    found, parts = peak(None)
    assert found == pytest.approx(16.1, rel=0.03)
    assert parts["average"] == parts["weights"] == parts["optimizer"] / 2 == 4 * 169_627_218
    assert peak("all")[0] < peak("selective")[0] < found
    assert peak(None, 8, True)[1]["average"] == parts["average"] / 8
