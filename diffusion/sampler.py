"""Blockwise sampling: one block after the other is unmasked behind the cached keys and values of
clean tokens.

Many problems at a time, each with its own context; those that reach their end token leave the
batch. Orders of unmasking: one random token a pass (first hitting, as BD3-LM samples), the k
surest, or all that are sure enough.
"""
from typing import NamedTuple

import numpy as np
import torch


class Generated(NamedTuple):
    """What generate wrote for one problem."""
    # whole blocks, pinned ids first; the last one holds the end token, or uses up the room
    ids: list
    # network passes until its last token was there (NFE); passes that fill the cache not counted
    forwards: int
    ended: bool         # whether the end token came


class Sampling(NamedTuple):
    """How blocks are filled."""
    # a pass fills a random token; "top_k": the surest; "confidence": all sure ones
    order: str = "first_hitting"
    tokens_per_step: int = 1        # top_k: tokens a pass
    # confidence: probability that a token must have; the surest is always taken
    threshold: float = 0.9
    temperature: float = 1.0        # 0: the likeliest token
    # draw from the fewest likeliest tokens that together reach this probability
    top_p: float = 1.0
    use_cache: bool = True          # False: compute the context again for every pass


def prefill(model, tokens, position, block, known):
    """[(keys, values)] of clean context. tokens, position, block: (B, P) ints; known: bool."""
    device, config = tokens.device, model.config
    dtype = model.embed.weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    size = len(tokens), config.kv_heads, 0, config.head_size
    empty = torch.zeros(size, device=device, dtype=dtype)
    past = [(empty, empty)] * config.layers
    if not tokens.shape[1]:
        return past
    seen = (block[:, :, None] >= block[:, None, :]) & known[:, None, :]
    seen |= torch.eye(tokens.shape[1], dtype=torch.bool, device=device)
    return model.extend(tokens, position, seen[:, None], past)[1]


def pick(logits, how, generator):
    """Draw one token from each row of logits (n, V) -> (ids (n,), probability of each under the
    logits (n,)).

    how: Sampling. generator: on the device of the logits, or None.
    """
    logits = logits.double()
    plain = logits.softmax(-1)
    if how.temperature == 0:
        ids = logits.argmax(-1)
    else:
        probabilities = (logits / how.temperature).softmax(-1)
        if how.top_p < 1:
            ordered, index = probabilities.sort(-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered >= how.top_p] = 0
            probabilities = torch.zeros_like(probabilities).scatter(-1, index, ordered)
        ids = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return ids, plain.gather(-1, ids[:, None])[:, 0]


def unmask(model, hidden, tokens, masked, how, generator):
    """One step: put tokens at some of the masked positions, at least at one in each row that has
    any; in place.

    hidden (B, T, H), tokens (B, T), masked (B, T) bool.
    """
    if how.order == "first_hitting":
        chance = torch.rand(tokens.shape, generator=generator, device=tokens.device)
        chance.masked_fill_(~masked, -1)
        chosen = masked & (chance == chance.amax(1, keepdim=True))
        tokens[chosen] = pick(model.logits(hidden[chosen]), how, generator)[0]
    else:
        proposed, sure = tokens.clone(), torch.full_like(tokens, -1, dtype=torch.float64)
        proposed[masked], sure[masked] = pick(model.logits(hidden[masked]), how, generator)
        rank = sure.argsort(1, descending=True).argsort(1)
        if how.order == "top_k":
            chosen = rank < how.tokens_per_step
        else:
            chosen = (rank < 1) | (sure >= how.threshold)
        chosen &= masked
        tokens[chosen] = proposed[chosen]
    masked &= ~chosen


def keep(rows, tensors, past):
    """(tensors, past [(keys, values)]) with these rows of the batch alone, a list of numbers."""
    rows = torch.tensor(rows, dtype=torch.int64, device=tensors[0].device)
    return [t[rows] for t in tensors], [(k[rows], v[rows]) for k, v in past]


@torch.no_grad()
def generate(model, states, rooms, block_size, end, how=Sampling(), generator=None, progress=None):
    """Generate blocks for every problem until `end` comes or its room is used up -> list of
    Generated.

    model: DiT in eval mode. states: (context, (pinned, first)) of each problem. context: (3, n)
    ints, ids, positions and block numbers of clean tokens. pinned: ids that the first block begins
    with, fewer than block_size; first: its position. rooms: blocks each may have. generator: on the
    model's device. progress(number, ids): called behind every block of a problem with all ids it
    has so far.
    """
    contexts, pinned = zip(*states)
    device, config = model.embed.weight.device, model.config
    number, width = len(contexts), max((c.shape[1] for c in contexts), default=0)
    padded = np.zeros((4, number, width), np.int64)         # ids, position, block, known
    for row, context in enumerate(contexts):
        padded[:3, row, :context.shape[1]], padded[3, row, :context.shape[1]] = context, 1
    tokens, position, block, known = torch.from_numpy(padded).to(device)
    known = known.bool()
    following = torch.tensor([c[2].max(initial=-1) + 1 for c in contexts], device=device)
    starts = torch.tensor([first for _, first in pinned], device=device)
    active = [i for i in range(number) if rooms[i] > 0]
    written, forwards, ended = [[] for _ in contexts], [0] * number, [False] * number
    past = prefill(model, tokens, position, block, known)
    (tokens, position, block, known), past = keep(active, (tokens, position, block, known), past)
    done = 0
    while active:
        rows = torch.tensor(active, device=device)
        new = torch.full((len(active), block_size), config.mask_id, device=device)
        if done == 0:
            for row, i in enumerate(active):
                given = pinned[i][0]
                new[row, :len(given)] = torch.tensor(given, dtype=torch.int64, device=device)
        masked = new == config.mask_id
        given = ~masked
        at = starts[rows, None] + done * block_size + torch.arange(block_size, device=device)
        seen = torch.cat([known, torch.ones_like(masked)], 1)
        seen = seen[:, None, None].expand(-1, -1, block_size, -1)
        while masked.any():
            for row, waits in enumerate(masked.any(1).tolist()):
                forwards[active[row]] += waits
            if not how.use_cache:
                past = prefill(model, tokens, position, block, known)
            hidden, _ = model.extend(new, at, seen, past)
            unmask(model, hidden, new, masked, how, generator)
        done += 1
        stop = ((new == end) & ~given).any(1).tolist()
        left = []
        for row, i in enumerate(active):
            written[i] += new[row].tolist()
            ended[i] = stop[row]
            if progress:
                progress(i, written[i])
            if not stop[row] and done < rooms[i]:
                left.append(row)
        # the finished block once more, now clean, for its keys and values
        if left and how.use_cache:
            own = model.extend(new, at, seen, past)[1]
            past = [(torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))
                    for (k, v), (new_k, new_v) in zip(past, own)]
        tokens, position = torch.cat([tokens, new], 1), torch.cat([position, at], 1)
        block = torch.cat([block, (following[rows, None] + done - 1).expand_as(new)], 1)
        known = torch.cat([known, torch.ones_like(given)], 1)
        (tokens, position, block, known), past = keep(left, (tokens, position, block, known), past)
        active = [active[row] for row in left]
    return [Generated(*parts) for parts in zip(written, forwards, ended)]
