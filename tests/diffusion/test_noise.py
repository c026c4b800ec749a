"""Noise: strata, clipped masking, splits of a step, counted pairs."""
import math

import numpy as np
import pytest
import torch

from core.cli import UserError
from diffusion import blocks
from diffusion.choices import FULL, Layout, check_range
from tests.helpers.block_rows import MASK, MIXED, chi_square, document, make_blocks, noised


def test_strata_are_covered_and_unbiased_for_every_block():
    n = 12
    levels = np.stack([blocks.draw(0, "train", step, n, 0, 0).levels for step in range(3000)])
    assert (np.sort((levels * n).astype(int), axis=1) == np.arange(n)).all()     # every stratum once
    assert abs(levels.mean(0) - 0.5).max() < 4.5 * math.sqrt(1 / 12 / 3000)       # every group the same mean,
    assert levels.min(0).max() < 0.01 and levels.max(0).min() > 0.99              # and the full range
    assert not np.array_equal(blocks.draw(0, "validation", 0, n, 0, 0).levels, levels[0])
    assert not np.array_equal(blocks.draw(1, "train", 0, n, 0, 0).levels, levels[0])


def test_any_split_of_the_rows_gets_the_same_noise():
    rows = [[document([4, 4, 3], given=5, seed=s)] for s in range(4)]
    draws = blocks.draw(0, "train", 7, 8, 4, 12)             # two groups a row: the first block has no target
    for t_range in (FULL, (0.3, 0.8)):
        whole = blocks.diffuse(make_blocks(rows, 12, 8), draws, MASK, t_range)
        parts = [blocks.diffuse(make_blocks(rows[r:r + 2], 12, 8), draws.part(r, 2, 2 * r, 4), MASK, t_range)
                 for r in (0, 2)]
        for name in ("tokens", "labels", "weights"):
            assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts])), name


@pytest.mark.parametrize("size,low,high,t", [(16, 0.3, 0.8, 0.35), (4, 0.45, 0.95, 0.6), (7, 1e-3, 0.5, 0.4),
                                             (5, 0.5, 1.0, 0.99)])
def test_clipped_masking_is_the_truncated_binomial(size, low, high, t):
    groups, batch = 4000, make_blocks([[document([size] * 40)] for _ in range(100)], 40 * size, 40 * size)
    draws = blocks.draw(0, "train", 0, groups, 100, 40 * size)
    masked = blocks.choose_masked(batch, torch.full((groups,), t, dtype=torch.float64), draws, (low, high))
    masked = masked.view(groups, size).numpy()
    k = np.arange(size + 1)
    inside = ((k / size >= low) | (low == 1e-3)) & ((k / size <= high) | (high == 1))
    pmf = np.array([math.comb(size, i) * t**i * (1 - t)**(size - i) for i in k]) * inside
    assert chi_square(np.bincount(masked.sum(1), minlength=size + 1), pmf / pmf.sum()) < 0
    assert chi_square(masked.sum(0), np.full(size, 1 / size)) < 0         # any place in the block is as likely


def test_unclipped_masking_is_independent_for_every_token():
    batch = make_blocks([[document([8] * 50)] for _ in range(20)], 400, 400)
    draws = blocks.draw(0, "train", 0, 1000, 20, 400)
    masked = blocks.choose_masked(batch, torch.full((1000,), 0.3, dtype=torch.float64), draws, FULL)
    k = np.arange(9)
    pmf = np.array([math.comb(8, i) * 0.3**i * 0.7**(8 - i) for i in k])
    assert chi_square(np.bincount(masked.view(1000, 8).sum(1), minlength=9), pmf) < 0


def test_ranges_without_a_count_end_or_are_refused():
    with pytest.raises(UserError, match="no number of masked tokens out of 4 lies in it"):
        check_range((0.3, 0.45), Layout(block_size=4))
    for bad in ((0.8, 0.3), (0.0, 0.5), (0.5, 1.1)):
        with pytest.raises(UserError, match="lower end first"):
            check_range(bad, Layout(block_size=4))
    for good, size in (((0.3, 0.8), 16), ((0.45, 0.95), 4), ((1.0, 1.0), 1), (FULL, 1), ((0.3, 0.5), 4)):
        check_range(good, Layout(block_size=size))
    batch = make_blocks([[document([1, 2, 3])] for _ in range(200)], 6, 6)     # too short for any share in [0.4, 0.45]
    draws = blocks.draw(0, "train", 0, batch.n_groups, 200, 6)
    masked = blocks.choose_masked(batch, torch.full((600,), 0.42, dtype=torch.float64), draws, (0.4, 0.45)).view(200, 6)
    assert set(masked[:, :1].sum(1).tolist()) == {0, 1} and set(masked[:, 1:3].sum(1).tolist()) == {0, 1}
    assert set(masked[:, 3:].sum(1).tolist()) == {1, 2}
    masked = blocks.choose_masked(batch, torch.full((600,), 0.3, dtype=torch.float64), draws, (1e-3, 0.45)).view(200, 6)
    assert set(masked[:, 0].tolist()) == {True, False}      # a lone token is masked at times


def test_only_targets_are_masked_and_weighted():
    batch = make_blocks(MIXED, 26, 24)
    for options in ({}, {"t_range": (0.3, 0.8)}, {"t_range": (0.6, 1.0)}, {"weighting": "ce"}):
        draws = blocks.draw(1, "train", 0, batch.n_groups, *batch.doc.shape)
        inputs = blocks.diffuse(batch, draws, MASK, **options)
        low, high = options.get("t_range", FULL)
        t = (low + (high - low) * draws.levels)[inputs.group]
        at = batch.noisy.flatten()[inputs.rows] + inputs.rows // inputs.n_noisy * batch.target.shape[1]
        assert batch.target.flatten()[at].all() and torch.equal(batch.input_ids.flatten()[at], inputs.labels)
        assert torch.equal(batch.group.flatten()[at], inputs.group)
        assert (inputs.tokens[:, :24].flatten()[inputs.rows] == MASK).all()
        assert (inputs.tokens == MASK).sum() == len(inputs.rows)
        plain = low > 0.5 or "weighting" in options
        np.testing.assert_allclose(inputs.weights, np.ones_like(t) if plain else 1 / t, rtol=1e-6)
    noisy = batch.noisy.clone()
    noisy[1, :8] = -1
    with pytest.raises(ValueError, match="no noisy copy"):
        noised(batch._replace(noisy=noisy), t_range=(1.0, 1.0))
