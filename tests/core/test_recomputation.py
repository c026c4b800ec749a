"""Activation checkpointing of the three model classes: same bits, less memory; selective repeats little work."""
from collections import Counter

import pytest
import torch

from core import kernels
from diffusion import dit
from tests.distill.test_plan import batch_of, built
from tests.helpers import block_rows
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.small_speech import pack_of, small_model


class Executed(LiveBytes):
    """LiveBytes that also counts executed matrix products and attentions."""

    def __init__(self, model, batch):
        super().__init__(model, batch)
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        product = torch.ops.aten.addmm.default if op == torch.ops.aten.addmm_.default else op     # adapters, in place
        self.counts["products"] += product in kernels.PRODUCTS
        self.counts["kept products"] += product in kernels.PRODUCTS and kernels.keeps(product, args)
        self.counts["attention"] += op in kernels.ATTENTION_OPS
        return super().__torch_dispatch__(op, types, args, kwargs)


def speech(mode, targets):
    _, model = small_model(targets, torch.bfloat16 if targets else torch.float32, mode)
    batch = pack_of(2, 20, 50, 20)
    return model, batch, lambda: sum(loss.sum() for loss in model(batch)[:2])


def student(mode, lora):
    _, model = built("qwen", lora, lora, False, mode, dropout=0.1)
    batch = batch_of(2, 60, 10)
    return model, batch, lambda: model(batch)[0]


def blocks(mode):
    config = dit.Config(block_rows.CONFIG.vocab_size, block_rows.MASK, 64, 4, 4, 16, dropout=0.1)
    batch = block_rows.make_blocks(block_rows.MIXED * 3, 26, 24)
    model, inputs = block_rows.network(config, recompute=mode), block_rows.noised(batch)
    return model.train(), inputs, lambda: block_rows.loss_of(model, inputs, batch.target.sum())


MODELS = {"speech, full": (speech, ""), "speech, LoRA in bf16": (speech, "all-linear"),
          "student, full": (student, False), "student, LoRA in bf16": (student, True), "block diffusion": (blocks,)}


@pytest.mark.parametrize("kind", MODELS)
def test_selective_is_between_nothing_and_all_in_memory_and_in_work(kind):
    """Adapters have dropout; recomputation must draw the same masks."""
    make, *more = MODELS[kind]
    results = {}
    for mode in (None, "selective", "all"):
        torch.manual_seed(0)
        model, batch, loss_of = make(mode, *more)
        parameters = [p for p in model.parameters() if p.requires_grad]
        torch.manual_seed(1)
        with Executed(model, batch) as work:
            with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in kind):
                loss = loss_of()
            kept, forward = work.now, Counter(work.counts)
            gradients = torch.autograd.grad(loss, parameters)
        results[mode] = loss, gradients, kept, forward, work.counts - forward
    plain, selective, whole = results.values()
    for other in (selective, whole):
        assert torch.equal(other[0], plain[0]) and other[3] == plain[3]
        assert all(torch.equal(a, b) for a, b in zip(other[1], plain[1], strict=True))
    assert whole[2] < 0.75 * selective[2] and selective[2] < 0.75 * plain[2]
    again = {name: (selective[4] - plain[4])[name] for name in plain[4]}
    assert whole[4]["attention"] == plain[3]["attention"] > 0 == selective[4]["attention"]
    assert again["kept products"] == 0 < (whole[4] - plain[4])["kept products"]
    assert (again["products"] > 0) == ("full" not in kind)      # wide halves of adapters, adaLN's modulation of one row
