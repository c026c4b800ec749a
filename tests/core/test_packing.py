"""Each epoch has every sample once, in an order that depends on seed and epoch alone; packs fill their budget."""
import gc
import weakref
import zlib

import numpy as np
import pytest

from core.packing import PackOrder, best_fit, packs_in_order, rank_packs, run_length

KINDS = [{"samples_per_pack": 3}, {"samples_per_pack": 1}, {"samples_per_pack": 3, "group_by_length": True},
         {"tokens_per_pack": 2048}]
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def speech_lengths(n, seed=0):
    """Token counts as speech data has them: lognormal, 25 frames a second plus text."""
    return np.clip(np.random.default_rng(seed).lognormal(5.0, 0.6, n), 20, 2000).astype(np.int64)


def packs(order, epoch):
    return [order.window(epoch, p).tolist() for p in range(order.packs_per_epoch)]


def global_sequence(order, world_size, accumulation, epochs, epoch=0, first=0):
    """Packs of all ranks in the order that they enter the sum of gradients; all ranks give the same number."""
    ranks = [list(rank_packs(order, r, world_size, accumulation, epochs, epoch, first)) for r in range(world_size)]
    assert len({len(r) for r in ranks}) == 1
    assert len(ranks[0]) % accumulation == 0        # whole optimizer steps only
    return [pack for together in zip(*ranks) for pack in together]


@kinds
@pytest.mark.parametrize("n", [1, 3, 101])
def test_every_sample_once_an_epoch(kind, n):
    order = PackOrder(speech_lengths(n), **kind, seed=3)
    for epoch in (0, 1, 5):
        flat = [i for pack in packs(order, epoch) for i in pack]
        assert sorted(flat) == list(range(n))
        assert len(packs(order, epoch)) == order.packs_per_epoch
        assert all(packs(order, epoch))             # no pack is empty


@kinds
@pytest.mark.parametrize("n", [1, 5, 331])
def test_any_number_of_ranks_takes_the_same_packs(kind, n):
    """The packs are equal from the start and from a checkpoint's position."""
    order = PackOrder(speech_lengths(n), **kind, seed=3)
    for epoch, first in ((0, 0), (1, 0), (1, 4), (1, 20)):
        expected = [*packs(order, epoch)[first:], *(pack for e in range(epoch + 1, 3) for pack in packs(order, e))]
        eight = [global_sequence(order, w, 8 // w, 3, epoch, first) for w in (1, 2, 4, 8)]
        assert eight[0] == eight[1] == eight[2] == eight[3]         # empty packs included
        for world_size in (1, 2, 4, 8):
            for accumulation in (1, 2, 3):
                sequence = global_sequence(order, world_size, accumulation, 3, epoch, first)
                assert [pack for pack in sequence if pack] == expected


@pytest.mark.parametrize("epoch, first, step", [(0, 0, 0), (0, 12, 2), (1, 0, 6), (1, 30, 11), (2, 36, 18),
                                                (2, 40, 18)])
def test_a_run_has_as_many_steps_as_its_ranks_have_packs(epoch, first, step):
    """A checkpoint may have any position, also one after an epoch's last pack."""
    order, world_size, accumulation, epochs = PackOrder(np.ones(100), samples_per_pack=3), 3, 2, 3
    left = len(list(rank_packs(order, 0, world_size, accumulation, epochs, epoch, first))) // accumulation
    position = {"step": step, "epoch": epoch, "first": first}
    assert run_length(order.packs_per_epoch, world_size * accumulation, epochs, 0, position) == (6, step + left)
    assert run_length(order.packs_per_epoch, world_size * accumulation, epochs, 5, position) == (6, 5)


@kinds
def test_the_window_holds_the_samples_of_one_step(kind):
    """The trainer counts targets from the window; a wrong window would scale the loss wrongly."""
    order = PackOrder(speech_lengths(100), np.arange(100) * 2 + 7, **kind, seed=3)
    world_size, accumulation = 4, 2
    ranks = [list(rank_packs(order, r, world_size, accumulation, 2)) for r in range(world_size)]
    steps = -(-order.packs_per_epoch // 8)
    for epoch in range(2):
        for step in range(steps):
            start = (epoch * steps + step) * accumulation
            taken = sorted(i for r in ranks for pack in r[start:start + accumulation] for i in pack)
            assert taken == sorted(order.window(epoch, step * 8, 8).tolist()) and all(i % 2 for i in taken)
    assert len(order.window(0, order.packs_per_epoch, 8)) == len(order.window(0, order.packs_per_epoch + 99, 8)) == 0


def test_best_fit_keeps_the_budget_and_takes_the_fullest_bin_that_fits():
    lengths, order = speech_lengths(6000), np.random.default_rng(0).permutation(6000)
    assert all(0 < lengths[b].sum() <= 2048 for b in best_fit(lengths, order, 2048))
    assert sorted(map(sorted, best_fit(np.array([6, 5, 4, 3, 2]), np.arange(5), 10))) == [[0, 2], [1, 3, 4]]
    assert list(best_fit(np.array([10, 10]), np.arange(2), 10)) == [[0], [1]]
    with pytest.raises(ValueError, match="sample 1 has 11 tokens, more than the 10"):
        list(best_fit(np.array([10, 11]), np.arange(2), 10))


@pytest.mark.parametrize("kind, known", [
    ({"samples_per_pack": 3}, {95: 401404353, 5000: 2829845490}),
    ({"tokens_per_pack": 2048}, {95: 1329289399, 5000: 2820802701}),
    ({"samples_per_pack": 4, "group_by_length": True}, {95: 2893330776, 5000: 1086063456})], ids=str)
@pytest.mark.parametrize("n", [95, 5000])
def test_the_order_is_the_known_one(kind, known, n):
    """A checkpoint's position means the same packs in every version. known: CRC of epochs 0 and 2."""
    order = PackOrder(np.random.default_rng(n).integers(20, 2000, n), seed=3, **kind)
    assert zlib.crc32(repr([packs(order, epoch) for epoch in (0, 2)]).encode()) == known[n]


def test_sums_over_packs():
    order, lengths = PackOrder(np.arange(1, 8), samples_per_pack=3, seed=1), np.arange(1, 8)
    sums = [sum(lengths[pack]) for epoch in range(20) for pack in packs(order, epoch)]
    assert sorted(order.sums(lengths)) == sorted(sums)
    assert max(order.sums(lengths, 1)) == max(sums[:3])


@pytest.mark.parametrize("n", [0, 1, 6, 7, 24, 25])
def test_ranks_validate_every_sample_once_in_order(n):
    numbers = np.arange(n) * 2
    for world_size in (1, 2, 4):
        ranks = [packs_in_order(numbers, 3, rank, world_size) for rank in range(world_size)]
        assert {len(packs) for packs in ranks} == {-(-n // (3 * world_size))}
        assert [i for together in zip(*ranks) for pack in together for i in pack] == numbers.tolist()


def test_plans_of_old_epochs_are_freed():
    """A plan holds a number for each sample. The loader reads one epoch ahead, so two plans stay."""
    order = PackOrder(np.full(40, 10), tokens_per_pack=30)
    plans = [weakref.ref(order.epoch(number)[0]) for number in range(5)]
    gc.collect()
    assert [plan() is not None for plan in plans] == [False, False, False, True, True]
