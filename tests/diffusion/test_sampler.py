"""Sampling block by block: with and without a cache, counted passes, ends, temperature."""
import numpy as np
import pytest
import torch

from diffusion import sample_bd3lm
from tests.helpers.block_rows import MASK, chi_square, network


def questions():
    """Contexts, pinned ids and rooms of three problems of different lengths, one of them without a context."""
    rng = np.random.default_rng(0)
    contexts = [np.stack([rng.integers(0, MASK, n), np.arange(n), np.arange(n) // 4]) for n in (8, 0, 4)]
    return contexts, [([3, 4], 8), ([], 0), ([5], 4)], [3, 2, 3]


@pytest.mark.parametrize("how", [
    sample_bd3lm.Sampling(), sample_bd3lm.Sampling("confidence", 1.0, 0), sample_bd3lm.Sampling("confidence", 0.12)], ids=str)
def test_every_order_fills_its_room_and_counts_its_passes(how):
    model, (contexts, pinned, rooms) = network().eval(), questions()
    found = sample_bd3lm.generate(model, zip(contexts, pinned), rooms, 4, 99, how, torch.Generator().manual_seed(1))
    for i, result in enumerate(found):
        given, free = len(pinned[i][0]), 4 * rooms[i] - len(pinned[i][0])
        assert result.ids[:given] == pinned[i][0] and len(result.ids) == 4 * rooms[i] and not result.ended
        assert MASK not in result.ids and rooms[i] <= result.forwards <= free
        assert how.threshold < 0.5 or result.forwards == free


def test_one_sure_pass_a_block_and_none_without_room():
    model, (contexts, pinned, _) = network().eval(), questions()
    results = sample_bd3lm.generate(model, zip(contexts, pinned), [3, 0, 1], 4, 99,
                               sample_bd3lm.Sampling("confidence", threshold=0.0))
    assert [r.forwards for r in results] == [3, 0, 1] and [len(r.ids) for r in results] == [12, 0, 4]


def test_a_problem_ends_with_its_end_token_and_the_others_go_on():
    model, (contexts, pinned, _) = network().eval(), questions()
    how = sample_bd3lm.Sampling("confidence", 1.0, 0)
    free = sample_bd3lm.generate(model, zip(contexts, pinned), [3] * 3, 4, 99, how)
    end = free[0].ids[5]        # in the second block of the first problem
    ended = sample_bd3lm.generate(model, zip(contexts, pinned), [3] * 3, 4, end, how)
    for i, (whole, cut) in enumerate(zip(free, ended)):
        own = whole.ids[len(pinned[i][0]):]
        at = own.index(end) + len(pinned[i][0]) if end in own else None
        assert cut.ended == (at is not None)
        assert cut.ids == (whole.ids if at is None else whole.ids[:at // 4 * 4 + 4])
    assert len(ended[0].ids) <= 8


def test_a_block_that_was_given_is_like_one_that_was_written():
    """Places, block numbers, keys and values of later blocks: one call for two blocks writes what two calls do."""
    model, how = network().eval(), sample_bd3lm.Sampling("confidence", 1.0, 0)
    context = np.stack([np.arange(8), np.arange(8), np.arange(8) // 4])
    whole, = sample_bd3lm.generate(model, [(context, ([], 8))], [2], 4, 99, how)
    first, = sample_bd3lm.generate(model, [(context, ([], 8))], [1], 4, 99, how)
    assert whole.ids[:4] == first.ids
    block = np.stack([first.ids, np.arange(8, 12), np.full(4, 2)])
    second, = sample_bd3lm.generate(model, [(np.concatenate([context, block], 1), ([], 12))], [1], 4, 99, how)
    assert whole.ids[4:] == second.ids


def test_an_end_token_that_was_given_ends_nothing():
    model = network().eval()
    context = np.stack([np.arange(8), np.arange(8), np.arange(8) // 4])
    result, = sample_bd3lm.generate(model, [(context, ([3, 4], 8))], [1], 4, 4, sample_bd3lm.Sampling("confidence", 1.0, 0))
    assert result.ids[:2] == [3, 4] and 4 not in result.ids[2:] and not result.ended


def test_temperature():
    torch.manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    many = p.log().expand(20000, -1)

    ids, sure = sample_bd3lm.pick(many, 1.0, None)
    assert chi_square(np.bincount(ids, minlength=5), p.numpy().astype(float)) < 0
    torch.testing.assert_close(sure.float(), p[ids])
    ids, _ = sample_bd3lm.pick(many, 0.5, None)
    assert chi_square(np.bincount(ids, minlength=5), (p**2 / (p**2).sum()).numpy().astype(float)) < 0
    assert (sample_bd3lm.pick(many, 0, None)[0] == 0).all()
