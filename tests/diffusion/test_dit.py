"""The network equals independent slow formulas: attention mask, loss and gradients."""
import dataclasses
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from diffusion import blocks, dit
from tests.helpers.block_rows import (CONFIG, MASK, MIXED, assert_close, clean_half, document, gradients, loss_of,
                                      make_blocks, network, noised, sampled_hidden, seen_by)


def test_dropout_is_on_both_branches():
    """With dropout 1, every layer is the identity."""
    model = network(dataclasses.replace(CONFIG, dropout=1.0)).train()
    inputs = noised(make_blocks([[document([4, 4])]], 12, 8))
    assert torch.equal(model.hidden_states(inputs), model.embed(inputs.tokens)[:, :inputs.n_noisy])


@pytest.mark.parametrize("q,p,e,plan,execution", [(3, 4, 4, 2, 2), (5, 6, 4, 3, 1), (1, 4, 8, 4, 8), (4, 2, 3, 1, 3)])
def test_mask_of_the_hierarchy_follows_its_table(q, p, e, plan, execution):
    noisy = [("P", i // plan) for i in range(p)] + [("E", i // execution) for i in range(e)]
    clean = [("Q", 0)] * q + noisy
    number = {"Q": 0, "P": 1, "E": 1 + -(-p // plan)}
    spare = 2       # unused copies and padding follow each half; another problem comes last
    half = [[number[region] + b for region, b in tokens] + [0] * spare for tokens in (noisy, clean)]
    doc = torch.tensor([([0] * len(noisy) + [-1] * spare) + ([0] * len(clean) + [-1] * spare) + [1] * 3])
    block = torch.tensor([half[0] + half[1] + [0, 0, 1]])
    full = seen_by(doc, block, len(noisy) + spare)[0]
    kinds = [("t", *x) for x in noisy] + [None] * spare + [("0", *x) for x in clean] + [None] * spare
    for i, j in product(range(len(kinds) + 3), repeat=2):
        query, key = (kinds[x] if x < len(kinds) else "other" for x in (i, j))
        if query is None or key is None:
            expected = i == j
        elif "other" in (query, key):
            expected = query == key and not (i < len(kinds) + 2 and j == len(kinds) + 2)
        else:
            (q_half, q_region, q_block), (k_half, k_region, k_block) = query, key
            if q_region == "Q":
                expected = k_region == "Q"
            elif k_region == "Q" or (q_region == "E" and k_region == "P" and k_half == "0"):
                expected = True
            elif q_region != k_region:
                expected = False
            elif q_half == "t":
                expected = k_block == q_block if k_half == "t" else k_block < q_block
            else:
                expected = k_half == "0" and k_block <= q_block
        assert full[i, j] == expected, (query, key)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_and_sdpa_agree():
    """The last tile of noisy copies is not whole; fewer copies than a tile get dense masks."""
    batch = make_blocks(MIXED, 26, dit.TILE + 2)
    inputs = noised(batch)
    with torch.no_grad():
        torch.testing.assert_close(network(backend="flex")(inputs), network()(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("system", ["gsm8k", "hdp", "random"])
def test_tiles_are_those_of_create_block_mask(system):
    """Ragged documents, padding, full and partial tiles; the last tile of noisy copies also serves clean queries."""
    rng = np.random.default_rng(len(system))
    for n_noisy, n_clean in [(384, 512), (80, 112), (256, 384), (208, 640), (512, 256)]:
        doc, block = np.full((3, n_noisy + n_clean), -1), np.zeros((3, n_noisy + n_clean), np.int64)
        for r in range(3):
            for first, last in ((0, n_noisy), (n_noisy, n_noisy + n_clean)):
                start = first
                for number in range(rng.integers(0, 5)):
                    sizes = {"gsm8k": [16] * rng.integers(1, 20),
                             "hdp": [rng.integers(1, 130), *[16] * rng.integers(1, 8), *[32] * rng.integers(1, 4)],
                             "random": rng.integers(1, 300, 4)}[system]
                    own = np.repeat(np.arange(len(sizes)), sizes)[:last - start]
                    doc[r, start:start + len(own)], block[r, start:start + len(own)] = number, own
                    start = min(last, start + len(own) + rng.integers(0, 3))
        states = dit.tile_states(doc, block, n_noisy)
        doc, block = torch.from_numpy(doc), torch.from_numpy(block)
        rule, both = dit.attends(doc, block, n_noisy), n_noisy + n_clean
        references = [create_block_mask(rule, 3, None, queries, both, device="cpu") for queries in (n_noisy, both)]
        masks = dit.attention_masks(doc, block, n_noisy, states)
        for actual, expected in list(zip(masks, references, strict=True))[n_noisy % dit.TILE > 0:]:
            for a, b in zip(actual.as_tuple(), expected.as_tuple(), strict=True):
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else callable(a) or a == b


def slow_loss(model, batch, inputs, t_of_group):
    """The papers' SUBS loss, block by block: log-probabilities, one-hot at unmasked tokens, times -1/t."""
    total = 0
    for row, doc, number in {(r, int(batch.doc[r, i]), int(batch.block[r, i])) for r, i in
                             (batch.group >= 0).nonzero().tolist()}:     # noisy copies come first
        hidden, copies = sampled_hidden(model, batch, inputs, row, doc, number)
        shift, scale = model.modulation(model.condition()).chunk(2, -1)
        normed = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], model.norm.weight)
        logits = model.head(normed * (1 + scale) + shift)
        logits[:, MASK] += -1e6
        log_p = logits - logits.logsumexp(-1, keepdim=True)
        for i, copy in enumerate(copies):
            if inputs.tokens[row, copy] != MASK:
                log_p = log_p.index_fill(0, torch.tensor(i), -1e6)
                log_p[i, inputs.tokens[row, copy]] = 0
            if batch.target[row, copy]:
                total = total - log_p[i, batch.tokens[row, copy]] / t_of_group[batch.group[row, copy]]
    return total / batch.target.sum()


def test_loss_and_gradients_equal_the_slow_formula():
    """The last row has noisy copies of two documents, then padding."""
    short = [document([4, 3], seed=3), document([4, 3], seed=4)]
    batch, model = make_blocks([*MIXED, short], 26, 24), network()
    draws = blocks.draw(3, "train", 0, batch.n_groups, *clean_half(batch).shape[1:])
    inputs = blocks.diffuse(batch, draws, MASK)
    t = 1e-3 + (1 - 1e-3) * draws.levels
    assert 5 < len(inputs.rows) < batch.target.sum()
    fused, slow = loss_of(model, inputs, batch.target.sum()), slow_loss(model, batch, inputs, t)
    torch.testing.assert_close(fused, slow, rtol=1e-5, atol=1e-5)
    assert_close(gradients(model, fused), gradients(model, slow))


@pytest.mark.parametrize("pieces", [dit.HEAD_ROWS, 24])
def test_padded_rows_pieces_and_recomputation_change_nothing(monkeypatch, pieces):
    """On a GPU the head pads masked tokens to a multiple of ROW_STEP, here 16; id 0 of the padding is the mask."""
    batch, sizes, results = make_blocks(MIXED, 26, 24), set(), []
    batch = dataclasses.replace(batch, tokens=batch.tokens.clamp(min=1))
    plain = dit.DiT.row_losses
    monkeypatch.setattr(dit.DiT, "row_losses", lambda model, x, labels: sizes.add(len(x)) or plain(model, x, labels))
    monkeypatch.setattr(dit, "on_gpu", lambda x: True)
    for step, recompute in ((1, None), (16, "all")):
        sizes.clear()
        monkeypatch.setattr(dit, "ROW_STEP", step)
        monkeypatch.setattr(dit, "HEAD_ROWS", pieces if recompute else dit.HEAD_ROWS)
        model = network(dataclasses.replace(CONFIG, mask_id=0), recompute=recompute)
        loss = loss_of(model, inputs := noised(batch, t_range=(0.6, 1.0)), batch.target.sum())
        results.append([loss, *gradients(model, loss)])
    assert len(inputs.rows) % 16 and all(size % 8 == 0 for size in sizes) and results[0][0].isfinite(), sizes
    assert_close(*results, rtol=1e-6)
