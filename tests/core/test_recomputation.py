"""Activation checkpointing of the three model classes: same bits, less memory."""
import pytest
import torch

from diffusion import dit
from tests.distill.test_plan import batch_of, built
from tests.helpers import block_rows
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.small_speech import pack_of, small_model


def speech(recompute, targets):
    _, model = small_model(targets, torch.bfloat16 if targets else torch.float32, recompute)
    batch = pack_of(2, 20, 50, 20)
    return model, batch, lambda: sum(loss.sum() for loss in model(batch)[:2])


def student(recompute, lora):
    _, model = built("qwen", lora, lora, False, recompute, dropout=0.1)
    batch = batch_of(2, 60, 10)
    return model, batch, lambda: model(batch)[0]


def blocks(recompute):
    config = dit.Config(block_rows.CONFIG.vocab_size, block_rows.MASK, 64, 4, 4, 16, dropout=0.1)
    batch = block_rows.make_blocks(block_rows.MIXED * 3, 26, 24)
    model, inputs = block_rows.network(config, recompute=recompute), block_rows.noised(batch)
    return model.train(), inputs, lambda: block_rows.loss_of(model, inputs, batch.target.sum())


MODELS = {"speech, full": (speech, ""), "speech, LoRA in bf16": (speech, "all-linear"),
          "student, full": (student, False), "student, LoRA in bf16": (student, True), "block diffusion": (blocks,)}


@pytest.mark.parametrize("kind", MODELS)
def test_recomputation_keeps_less_and_changes_no_bit(kind):
    """Adapters have dropout; recomputation must draw the same masks."""
    make, *more = MODELS[kind]
    results = []
    for recompute in (None, "all"):
        torch.manual_seed(0)
        model, batch, loss_of = make(recompute, *more)
        parameters = [p for p in model.parameters() if p.requires_grad]
        torch.manual_seed(1)
        with LiveBytes(model, batch) as work:
            with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in kind):
                loss = loss_of()
            kept = work.now
            results.append([kept, loss, *torch.autograd.grad(loss, parameters)])
    (all_kept, *plain), (kept, *recomputed) = results
    assert kept < 0.6 * all_kept
    assert all(torch.equal(a, b) for a, b in zip(recomputed, plain, strict=True))
