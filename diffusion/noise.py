"""Block diffusion: noise on blocks, and the weights that make the loss a bound on their likelihood.

A batch (Blocks) becomes what the network is fed (Inputs) here, on the CPU, from random numbers that
depend on the seed and the step alone, so any split of a step over ranks and micro-steps trains the
same.

    -log p(x) <= sum over blocks of
                 E_t E_mask [ 1 / t * sum over masked tokens of -log p(token | noisy block, past) ]

Each target of a block is masked with probability t in (0, 1] (the loglinear schedule, whose weight
is 1 / t). SUBS: other tokens have no loss and the mask token no probability. Sources: BD3-LM (arXiv
2503.09573) and its code (github.com/kuleshov-group/bd3lms), MDLM (arXiv 2406.07524).
"""
from typing import NamedTuple

import numpy as np
import torch

from core import loading
from diffusion.choices import FULL, enforced

NOISE = {"train": 1, "validation": 2, "search": 3}      # purposes of random numbers


class Blocks(NamedTuple):
    """Rows of documents cut into numbered blocks; everything on the CPU."""
    input_ids: torch.Tensor     # (B, L) int64   clean tokens, anything on padding
    position: torch.Tensor      # (B, L) int64   rotary position in the document
    doc: torch.Tensor           # (B, L) int64   document in the row, -1 on padding
    block: torch.Tensor         # (B, L) int64   block in the document
    target: torch.Tensor        # (B, L) bool    may be masked, and is in the loss
    noisy: torch.Tensor         # (B, N) int64   places 0..L-1 that get a noisy copy, -1: none
    group: torch.Tensor         # (B, L) int64   number of the (document, block), which share a t
    n_groups: int
    n_targets: int
    tiles: torch.Tensor         # (B, tiles, tiles) int8   dit.tile_states: what flex may skip

    __reduce__ = loading.reduce


class Inputs(NamedTuple):
    """One noised batch: what DiT.forward takes."""
    tokens: torch.Tensor        # (B, N + L) int64   noisy copies, then clean tokens
    position: torch.Tensor      # (B, N + L) int64
    doc: torch.Tensor           # (B, N + L) int32
    block: torch.Tensor         # (B, N + L) int32
    rows: torch.Tensor          # (R,) int64     masked targets, in the flat (B * N) noisy copies
    labels: torch.Tensor        # (R,) int64     their clean tokens
    weights: torch.Tensor       # (R,) float32   factor of their cross-entropy
    group: torch.Tensor         # (R,) int64     as in Blocks, of each
    tiles: torch.Tensor         # as in Blocks
    n_noisy: int                # N

    to = loading.to


# ---- Random numbers and noise


class Draws(NamedTuple):
    """Uniform random numbers for some rows."""
    levels: np.ndarray      # (G,) stratified over all groups drawn together: becomes t
    counts: np.ndarray      # (G,) how many tokens of a group are masked, under a clipped range
    tokens: np.ndarray      # (B, L) which tokens are masked

    def part(self, first_row, rows, first_group, groups):
        """The numbers of some of the rows and of their groups."""
        groups = slice(first_group, first_group + groups)
        return Draws(self.levels[groups], self.counts[groups],
                     self.tokens[first_row:first_row + rows])


def draw(seed, purpose, number, groups, rows, length):
    """Draws for `rows` rows of `length` tokens with `groups` groups together.

    purpose: a key of NOISE; number: of the step or batch (an int or a tuple of ints). Each of the
    strata [i / groups, (i + 1) / groups) gives one level, to a random group.
    """
    number = number if isinstance(number, tuple) else (number,)
    rng = np.random.default_rng((seed, NOISE[purpose], *number))
    levels = (rng.permutation(groups) + rng.random(groups)) / max(1, groups)
    return Draws(levels, rng.random(groups), rng.random((rows, length)))


def truncated_counts(n, rate, t_range, uniform):
    """Masked tokens (G,) of blocks with n (G,) targets: binomial(n, rate) given that the share lies
    in t_range, as where a block is drawn again until it does. rate, uniform: (G,) float64.

    Blocks too short to have any share inside, or only 0, get the nearest numbers on both sides, so
    that every token is masked at times.
    """
    n, (low, high) = n.double(), enforced(t_range)
    ends = torch.ceil(low * n - 1e-9).long(), torch.floor(high * n + 1e-9).long()
    fewest, most = torch.minimum(*ends), torch.maximum(*ends).clamp(min=1)
    k = torch.arange(int(n.max()) + 1, dtype=torch.float64)
    left, rate = (n[:, None] - k).clamp(min=0), rate.clamp(max=1 - 1e-12)[:, None]
    log_pmf = torch.lgamma(n[:, None] + 1) - torch.lgamma(k + 1) - torch.lgamma(left + 1) \
        + k * rate.log() + left * (-rate).log1p()
    inside = (k >= fewest[:, None]) & (k <= most[:, None])
    cdf = log_pmf.masked_fill(~inside, -torch.inf).softmax(1).cumsum(1)
    counts = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(1)
    return torch.minimum(counts, most)


def choose_masked(batch, rate, draws, t_range):
    """(T,) bool over the targets of Blocks in flat order: which are masked. rate: (G,) float64."""
    group, uniform = batch.group[batch.target], torch.from_numpy(draws.tokens)[batch.target]
    if enforced(t_range) == (0.0, 1.0) or not len(group):
        return uniform <= rate[group]
    n = torch.bincount(group, minlength=batch.n_groups)
    counts = truncated_counts(n, rate, t_range, torch.from_numpy(draws.counts))
    order = uniform.argsort()
    order = order[group[order].argsort(stable=True)]        # by group, random inside
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order)) - (n.cumsum(0) - n)[group[order]]
    return rank < counts[group]


def diffuse(batch, draws, mask_id, t_range=FULL, weighting="elbo"):
    """Noise a batch (Blocks) with random numbers (Draws) -> Inputs.

    t_range: t is uniform in it; a clipped one also clips the masked share of every block.
    weighting: "elbo" (1 / t; 1 when the range starts above 0.5, as in the official code) or "ce"
    (1). Raises ValueError when a target has no noisy copy or no group.
    """
    low, high = t_range
    t = low + (high - low) * torch.from_numpy(draws.levels)
    masked = torch.zeros(batch.target.shape, dtype=torch.bool)
    masked[batch.target] = choose_masked(batch, t, draws, t_range)

    copied, at = batch.noisy >= 0, batch.noisy.clamp(min=0)
    clean, group = batch.input_ids.gather(1, at), batch.group.gather(1, at)
    hidden = masked.gather(1, at) & copied
    if hidden.sum() != masked.sum() or (batch.group[batch.target] < 0).any():
        raise ValueError("a target has no noisy copy or no group")
    weights = torch.ones(int(hidden.sum()))
    if weighting == "elbo" and low <= 0.5:
        weights = (1 / t)[group[hidden]].float()
    doc = torch.cat([batch.doc.gather(1, at).masked_fill(~copied, -1), batch.doc], 1).int()
    block, position = (torch.cat([numbers.gather(1, at), numbers], 1)
                       for numbers in (batch.block, batch.position))
    return Inputs(torch.cat([clean.masked_fill(hidden, mask_id), batch.input_ids], 1), position,
                  doc, block.int(), hidden.flatten().nonzero()[:, 0], clean[hidden], weights,
                  group[hidden], batch.tiles, at.shape[1])
