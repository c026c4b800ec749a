"""Which samples train together, in which order: the same answer on every rank, for every world
size.

The order of packs is a function of (seed, epoch) alone. Micro-step m of an optimizer step on rank r
takes pack `first + m * world_size + r`, where `first` is the position stored in a checkpoint. So a
run can stop on 16 GPUs and go on with 8 (accumulation doubled) and see the same data, and loader
workers change nothing. The tail of an epoch is topped up with empty packs, which weigh nothing, so
every rank runs the same number of steps.
"""
import bisect
from array import array
from dataclasses import dataclass

import numpy as np

# With length grouping, packs that run side by side should be equally long, whatever the number of
# ranks. So blocks of up to 512 packs that follow each other by length are shuffled, and blocks of
# one node's 8 within each of those. An epoch has at least 64 of the large ones, or long samples
# would come first or last.
LARGE, SMALL, LEAST = 512, 8, 64
SORT_WINDOW = LEAST * LARGE     # packs sorted by length together
# share of its length by which a sample may be sorted wrongly: other neighbours in each epoch
JITTER = 0.01


@dataclass
class EpochPlan:
    """Packs of one epoch: pack p holds samples[offsets[p]:offsets[p + 1]]; indices beyond the last
    pack are empty.
    """
    samples: np.ndarray     # (n_samples,) int64
    offsets: np.ndarray     # (n_packs + 1,) int64

    def __len__(self):
        return len(self.offsets) - 1

    def pack(self, p):
        """Sample indices (n,) of pack p; empty for the zero-weight packs after the last one."""
        if p >= len(self):
            return self.samples[:0]
        return self.samples[self.offsets[p]:self.offsets[p + 1]]


def best_fit(lengths, order, budget):
    """Yield packs, lists of sample indices of at most `budget` tokens.

    lengths (n,) tokens; order (n,) sample indices to pack, in each window of 4096 longest first.
    ValueError: a sample is longer than the budget.
    """
    for start in range(0, len(order), 4096):
        window = order[start:start + 4096]
        # long samples first: short ones then fill what those leave
        window = window[np.argsort(-lengths[window], kind="stable")]
        # the last two: remaining tokens, ascending, and whose they are
        bins, free, open_bins = [], [], []
        for i, n in zip(window.tolist(), lengths[window].tolist()):
            if n > budget:
                raise ValueError(f"sample {i} has {n} tokens, more than the {budget} of a pack")
            # the fullest pack that still has room, or a new one
            at = bisect.bisect_left(free, n)
            if at < len(free):
                room, b = free.pop(at) - n, open_bins.pop(at)
                bins[b].append(i)
            else:
                room, b = budget - n, len(bins)
                bins.append([i])
            # back among the others, so that `free` stays sorted
            at = bisect.bisect_left(free, room)
            free.insert(at, room)
            open_bins.insert(at, b)
        yield from bins


def _reordered(plan, packs):
    """EpochPlan of the packs (n_packs,) of another one, in this order."""
    sizes = np.diff(plan.offsets)[packs]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    # the place of each sample of the new order in the old one, without a loop over millions of them
    places = np.arange(offsets[-1]) + np.repeat(plan.offsets[packs] - offsets[:-1], sizes)
    return EpochPlan(plan.samples[places], offsets)


def _shuffled(packs, size, rng):
    """Packs (n,) in blocks of `size` that are shuffled; a short last block stays last, or it would
    shift the others.
    """
    full = len(packs) // size
    blocks = packs[:full * size].reshape(full, size)[rng.permutation(full)]
    return np.concatenate([blocks.ravel(), packs[full * size:]])


class PackOrder:
    """Deterministic packs of every epoch.

    lengths: (n,) tokens per sample. tokens_per_pack > 0: whole samples up to a token budget; which
    samples share a pack is then fixed by the seed and epochs shuffle the packs. Else
    samples_per_pack > 0 decides, a fixed count. group_by_length: packs of similar lengths (fixed
    count only), shuffled in blocks so that ranks stay balanced. shuffle=False keeps the file's
    order, for validation.
    """

    def __init__(self, lengths, *, samples_per_pack=0, tokens_per_pack=0, seed=0,
                 group_by_length=False, shuffle=True):
        if max(samples_per_pack, tokens_per_pack) <= 0:
            raise ValueError("give samples_per_pack or tokens_per_pack")
        self.lengths = np.asarray(lengths)
        self.samples_per_pack, self.seed, self.shuffle = samples_per_pack, seed, shuffle
        self.group_by_length = group_by_length
        self._plans = {}
        self._bins = None
        if tokens_per_pack:
            order = np.arange(len(self.lengths))
            # once, by the seed alone: packing is slow, and each epoch shuffles these packs
            if shuffle:
                order = np.random.default_rng((seed, 0)).permutation(order)
            samples, offsets = array("q"), array("q", [0])
            for pack in best_fit(self.lengths, order, tokens_per_pack):
                samples.extend(pack)
                offsets.append(len(samples))
            self._bins = EpochPlan(np.asarray(samples), np.asarray(offsets))
        self.packs_per_epoch = (len(self._bins) if self._bins
                                else -(-len(self.lengths) // samples_per_pack))

    def epoch(self, epoch):
        """EpochPlan of `epoch`. The last two are kept: the loader reads ahead into the next one."""
        plan = self._plans.get(epoch)
        if plan is None:
            # another generator: no epoch's order depends on which others were asked for
            plan = self._plan(np.random.default_rng((self.seed, epoch, 1)))
            self._plans = {e: p for e, p in self._plans.items() if e >= epoch - 1} | {epoch: plan}
        return plan

    def _plan(self, rng):
        if self._bins is not None:
            return _reordered(self._bins,
                              rng.permutation(len(self._bins))) if self.shuffle else self._bins
        n, size = len(self.lengths), self.samples_per_pack
        order = rng.permutation(n) if self.shuffle else np.arange(n)
        if self.group_by_length:
            window = size * SORT_WINDOW
            parts = [order[a:a + window] for a in range(0, n, window)]
            # lengths are varied a little, or the same samples would share a pack in every epoch
            keys = -self.lengths * rng.uniform(1, 1 + JITTER * self.shuffle, n)
            order = np.concatenate([part[np.argsort(keys[part], kind="stable")] for part in parts])
        plan = EpochPlan(order, np.minimum(np.arange(self.packs_per_epoch + 1) * size, n))
        if self.group_by_length and self.shuffle:
            large = next(size for size in (LARGE, 256, 128, 64, 32, 16, SMALL)
                         if size == SMALL or len(plan) >= LEAST * size)
            # blocks, and blocks within blocks: ranks that run side by side keep equal lengths
            packs = _shuffled(np.arange(len(plan)), large, rng)
            parts = [_shuffled(packs[a:a + large], SMALL, rng) for a in range(0, len(packs), large)]
            plan = _reordered(plan, np.concatenate(parts))
        return plan

    def largest(self):
        """Sample indices (n,) of the pack with the most tokens."""
        plan = self.epoch(0)
        return max(map(plan.pack, range(len(plan))), key=lambda pack: self.lengths[pack].sum())

    def window(self, epoch, first, count):
        """Sample indices (n,) of the `count` packs from `first` on: one optimizer step over all
        ranks.
        """
        plan = self.epoch(epoch)
        stop = min(first + count, len(plan))        # the last step of an epoch may have fewer
        return plan.samples[plan.offsets[min(first, len(plan))]:plan.offsets[stop]]


def rank_packs(order, rank, world_size, accumulation, epochs, epoch=0, first=0):
    """Yield this rank's packs (lists of sample indices) from position (epoch, first) to the end of
    `epochs` epochs.

    Every rank gets the same number of packs; empty lists are zero-weight packs. Feed it to a
    DataLoader as its batch_sampler.
    """
    per_step = world_size * accumulation
    while epoch < epochs:
        plan = order.epoch(epoch)
        for step in range(first, len(plan), per_step):
            # side by side on the ranks, one after the other in the micro-steps: the same packs make
            # a step whatever their numbers
            for micro in range(accumulation):
                yield plan.pack(step + micro * world_size + rank).tolist()
        epoch, first = epoch + 1, 0         # only the first epoch may begin in its middle


def run_length(packs_per_epoch, per_step, epochs, max_steps, position):
    """(optimizer steps per epoch, optimizer steps when the run ends).

    per_step: packs per optimizer step, of all ranks. max_steps: ends the run instead of `epochs`, 0
    = by epochs. position: {"step", "epoch", "first"} to start from, as a checkpoint has them.
    """
    steps_per_epoch = -(-packs_per_epoch // per_step)
    # the epoch that was left in its middle, then whole ones
    left = -(-max(0, packs_per_epoch - position["first"]) // per_step)
    left += (epochs - position["epoch"] - 1) * steps_per_epoch
    return steps_per_epoch, max_steps or position["step"] + max(0, left)
