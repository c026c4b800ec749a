"""GSM8K, chat and HDP problems -> documents of numbered blocks -> rows -> batches -> noise.

A document is a tokenised problem, each token with a block number. The model denoises a block given
the clean blocks before it. gsm8k and chat: prompt and answer are cut into blocks of block_size.
hdp: the question is block 0, then plan blocks follow, then execution blocks. The end token (hdp:
`<|pad|>`, after plan and execution) is repeated up to the end of its block and trained there, since
a sampler fills whole blocks. Rows of several problems give the same loss as rows of one.

A batch (Blocks) becomes the network's Inputs on the CPU, from random numbers that depend on the
seed and the step alone, so any split of a step over ranks and micro-steps trains the same.

    -log p(x) <= sum over blocks of
                 E_t E_mask [ 1 / t * sum over masked tokens of -log p(token | noisy block, past) ]

Each target of a block is masked with probability t in (0, 1] (the loglinear schedule, whose weight
is 1 / t). SUBS: other tokens have no loss and the mask token no probability. Sources: BD3-LM (arXiv
2503.09573) and its code (github.com/kuleshov-group/bd3lms), MDLM (arXiv 2406.07524).
"""
import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from core import dist, packing
from core.cli import UserError, require
from core.packing import best_fit
from core.json_files import problem as bad_problem
from core.json_files import settle
from diffusion import dit
from diffusion.choices import EXECUTION, FILL, FULL, PLAN, QUESTION, Layout, enforced_limits
from diffusion.problems import read_chats, read_problems

# counts of a document, which add up over rows and steps. clean: all tokens (slots in a row); noisy:
# tokens of blocks with a target, which have a noisy copy; tokens: without fill; targets: tokens in
# the loss; text: targets without fill; groups: blocks with targets; pairs: that may attend
COUNTS = ("clean", "noisy", "tokens", "targets", "text", "groups", "pairs")


@dataclass
class Documents:
    """Tokenised problems, flat: document d is [offsets[d]:offsets[d + 1]] of every token array."""
    layout: Layout
    ids: np.ndarray         # (T,) int64
    position: np.ndarray    # (T,) int64 inside the document
    block: np.ndarray       # (T,) int64 block number inside the document
    target: np.ndarray      # (T,) bool: may be masked, and is in the loss
    region: np.ndarray      # (T,) int64
    group: np.ndarray       # (T,) int64 number of the block among those with targets, else -1
    offsets: np.ndarray     # (n + 1,) int64
    counts: dict            # {name of COUNTS: (n,) int64}
    problems: list          # Problem of each document
    pad: int                # id on padding, which has doc -1 in a batch

    def __len__(self):
        return len(self.problems)


def pieces(problem, layout):
    """The texts of a problem that are tokenised separately, between special tokens."""
    if layout.prompt:
        return [layout.prompt.replace("{question}", problem.question), problem.solution]
    if layout.system != "hdp":
        return [f"Question: {problem.question}\nAnswer:", f" {problem.solution}"]
    return [problem.question, f" {problem.plan}", f" {problem.solution} ", f" {problem.answer}"]


def prompt_ids(ids, tokens, layout):
    """Ids of a gsm8k problem before its answer; a chat template has its start token itself."""
    return list(ids) if layout.prompt else [tokens.bos, *ids]


def make_document(regions, tokens, layout):
    """[(region, ids, number of given ids)] -> ((6, n) int64: ids, position, block, target, region,
    group; its COUNTS)."""
    arrays, next_block = [], 0
    for region, ids, pinned in regions:
        size = layout.regions[region][2] or len(ids)
        filled = np.array([*ids, *[tokens.end] * (-len(ids) % size)])
        offset = np.arange(len(filled))
        block = next_block + offset // size
        next_block = block[-1] + 1
        target, token_region = offset >= pinned, np.where(offset < len(ids), region, FILL)
        if layout.system != "hdp":
            token_region[:pinned] = QUESTION
        if layout.loss_on_question:
            target |= (token_region == QUESTION) & (filled != tokens.bos)
        arrays.append(np.stack(
            [filled, offset + layout.start(region), block, target, token_region]))
    document = np.concatenate(arrays, axis=1)
    block, target, text = document[2], document[3] > 0, document[4] != FILL
    trained, sizes = np.unique(block[target]), np.bincount(block)
    group = np.where(np.isin(block, trained), np.searchsorted(trained, block), -1)
    seen = sizes * sizes.cumsum()       # a block sees itself and the clean ones before
    return np.concatenate([document, group[None]]), [
        len(block), (group >= 0).sum(), text.sum(), target.sum(), (target & text).sum(),
        len(trained), seen.sum() + seen[trained].sum()]


def make_documents(problems, tokens, layout, bad, path=""):
    """Documents of a list of Problems from the file `path`; UserError if none is usable. Adds
    problems that are too long or hold a special token to bad (as json_files.Problem)."""
    texts = [[] if p.ids else pieces(p, layout) for p in problems]
    encoded = iter(tokens.tokenizer.encode_batch([text for group in texts for text in group],
                                                 add_special_tokens=False))
    kept, arrays, counts = [], [], []
    for p, group in zip(problems, texts):
        ids = [next(encoded).ids for _ in group]
        # (region, ids, number of ids that are given and not generated)
        if p.ids:
            regions = [(PLAN, p.ids, p.prompt_length)]
        elif layout.system == "hdp":
            execution = [tokens.execution, *ids[2], tokens.answer, *ids[3], tokens.end]
            regions = [(QUESTION, ids[0], len(ids[0])),
                       (PLAN, [tokens.plan, *ids[1], tokens.end], 1), (EXECUTION, execution, 1)]
        else:
            head = prompt_ids(ids[0], tokens, layout)
            regions = [(PLAN, head + ids[1] + [tokens.end], len(head))]
        limits = [(len(ids), *layout.regions[region]) for region, ids, _ in regions]
        too_long = [f"has {n} tokens with markers and end token, more than --{flag} {most}"
                    for n, flag, most, _ in limits if n > most]
        if token := tokens.find_control_token(p.question, p.plan, p.solution, p.answer):
            why = f"its text holds the special token {token}; remove it"
            bad.append(bad_problem(p.name, "control_token", why, path))
        elif too_long:
            why = ", ".join(too_long) + "; raise the limit, or pass --drop_too_long"
            bad.append(bad_problem(p.name, "too_long", why, path))
        else:
            kept.append(p)
            document, count = make_document(regions, tokens, layout)
            arrays.append(document)
            counts.append(count)
    if not kept:
        raise UserError(f"{path or 'data'}: none of {len(bad)} problems can be used, the first one "
                        f"being {bad[0]}")
    ids, position, block, target, region, group = np.concatenate(arrays, axis=1)
    counts = dict(zip(COUNTS, np.array(counts).T))
    offsets = np.concatenate([[0], counts["clean"].cumsum()])
    return Documents(layout, ids, position, block, target > 0, region, group, offsets, counts,
                     kept, tokens.end)


class Rows(Dataset):
    """Rows of whole documents (members), with room for `length` tokens and noisy_length copies.
    table: {name of COUNTS or "samples": (n_rows,) ints}, to be summed over the rows of a step."""

    def __init__(self, documents, members, length, noisy_length):
        self.documents, self.members = documents, [list(m) for m in members]
        self.length, self.noisy_length = length, noisy_length
        self.table = {name: np.array([counts[m].sum() for m in self.members], np.int64)
                      for name, counts in documents.counts.items()}
        self.table["samples"] = np.array([len(m) for m in self.members])

    def __len__(self):
        return len(self.members)

    def __getitem__(self, r):
        return self.members[r]

    def fingerprint(self):
        """Hash of the documents in the order of the rows, to recognise the same data on resume."""
        digest, d = hashlib.sha256(), self.documents
        for number in (number for members in self.members for number in members):
            for array in (d.ids, d.position, d.block, d.target, d.region):
                digest.update(array[d.offsets[number]:d.offsets[number + 1]].tobytes())
        return digest.hexdigest()[:16]


def make_rows(documents, numbers, row_length, pack, seed=0):
    """Rows of the documents with these numbers: one each, or several (pack), by the seed. The room
    for noisy copies in packed rows (a multiple of 128, or of 16 in rows below 512) minimises the
    total size of all rows. Raises UserError if a document does not fit."""
    numbers = np.asarray(numbers)
    lengths, noisy = documents.counts["clean"], documents.counts["noisy"]
    longest = numbers[lengths[numbers].argmax()]
    require(lengths[longest] <= row_length,
            f"--row_length {row_length}: {documents.problems[longest].name} takes "
            f"{lengths[longest]} slots")
    step = 128 if row_length >= 512 else 16
    needed = min(row_length, -(-int(noisy[numbers].max(initial=1)) // step) * step)
    if not pack:
        return Rows(documents, [[n] for n in numbers.tolist()], row_length, needed)
    order = numbers[np.random.default_rng((seed, 0)).permutation(len(numbers))]
    packings = {}
    for copies in range(needed, row_length + 1, step):
        # slots or copies may run out first
        share = np.maximum(lengths, -(-noisy * row_length // copies))
        packings[copies] = list(best_fit(share, order, row_length))
    best = min(packings, key=lambda copies: len(packings[copies]) * (row_length + copies))
    return Rows(documents, packings[best], row_length, best)


def read_data(path, split, layout, tokenizer, tokens):
    """(Problems of a file for the Layout's system, [unusable problems])."""
    bad = []
    if layout.system == "chat":
        return read_chats(path, tokenizer, tokens, bad), bad
    return read_problems(path, split, layout.system, layout.strip_calculator, bad), bad


def prepare_rows(world, layout, tokens, args, output_dir):
    """(training Rows, validation Rows or None) for the trainer's flags. Rank 0 reads the files and
    lists unusable problems in output_dir. UserError for those that --drop_bad does not drop."""
    bad, folder = [], output_dir if world.is_main else None

    def read_documents(path, split):
        problems, wrong = dist.rank0(world, read_data, path, split, layout, args.tokenizer, tokens)
        bad.extend(wrong)           # on every rank, so that all exit
        return make_documents(problems, tokens, layout, bad, path)

    train = evaluation = read_documents(args.train_data_file, "train")
    numbers, held_out = np.arange(len(train)), []
    if args.eval_data_file:
        evaluation = read_documents(args.eval_data_file, "test")
        held_out = np.arange(len(evaluation))
    dropped = settle(bad, args.drop_bad, folder)
    if dropped and world.is_main:
        print(f"data       dropped: {dropped}", flush=True)
    if args.validation_split and not args.eval_data_file:
        names = {}      # answers of one chat share a name and stay together
        chat = [names.setdefault(problem.name, len(names)) for problem in train.problems]
        n = min(max(1, round(len(names) * args.validation_split)), len(names) - 1)
        chosen = np.random.default_rng((args.seed, 2)).permutation(len(names))[:n]
        is_held_out = np.isin(chat, chosen)
        numbers, held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    how = args.row_length, args.pack, args.seed
    rows = make_rows(train, numbers, *how)
    return rows, (make_rows(evaluation, held_out, *how) if len(held_out) else None)


@dataclass
class Blocks(packing.Batch):
    """Rows of documents cut into numbered blocks; everything on the CPU."""
    input_ids: torch.Tensor     # (B, L) int64   clean tokens, anything on padding
    position: torch.Tensor      # (B, L) int64   rotary position in the document
    doc: torch.Tensor           # (B, L) int64   document in the row, -1 on padding
    block: torch.Tensor         # (B, L) int64   block in the document
    target: torch.Tensor        # (B, L) bool    may be masked, and is in the loss
    noisy: torch.Tensor         # (B, N) int64   positions 0..L-1 with a noisy copy, -1: none
    group: torch.Tensor         # (B, L) int64   number of the (document, block), which shares one t
    n_groups: int
    n_targets: int
    tiles: torch.Tensor         # (B, tiles, tiles) int8   dit.tile_states: what flex may skip


def collate(items, batch_rows, rows):
    """List of items of Rows -> Blocks of batch_rows rows, padded with empty rows."""
    d, noisy_length = rows.documents, rows.noisy_length
    fields = {"ids": d.pad, "position": 0, "block": 0, "target": False, "group": -1}
    joined = {name: np.full((batch_rows, rows.length), value)
              for name, value in (fields | {"doc": -1}).items()}
    noisy, groups = np.full((batch_rows, noisy_length), -1), 0
    for r, members in enumerate(items):
        start = 0
        for number, document in enumerate(members):
            source = slice(*d.offsets[document:document + 2])
            target = r, slice(start, start + source.stop - source.start)
            for name in fields:
                joined[name][target] = getattr(d, name)[source]
            joined["doc"][target] = number
            joined["group"][target] += np.where(d.group[source] >= 0, groups, 0)
            start, groups = target[1].stop, groups + int(d.counts["groups"][document])
        copied = np.flatnonzero(joined["group"][r] >= 0)
        noisy[r, :len(copied)] = copied
    places = noisy.clip(min=0)
    doc, block = (np.take_along_axis(joined[key], places, 1) for key in ("doc", "block"))
    tiles = dit.tile_states(np.concatenate([np.where(noisy >= 0, doc, -1), joined["doc"]], 1),
                            np.concatenate([block, joined["block"]], 1), noisy_length)
    tensors = {key: torch.from_numpy(array) for key, array in joined.items()}
    return Blocks(input_ids=tensors.pop("ids"), noisy=torch.from_numpy(noisy), n_groups=groups,
                  n_targets=int(joined["target"].sum()), tiles=tiles, **tensors)


NOISE = {"train": 1, "validation": 2, "search": 3}      # purposes of random numbers


@dataclass
class Inputs(packing.Batch):
    """One noised batch: what DiT.forward takes."""
    tokens: torch.Tensor        # (B, N + L) int64   noisy copies, then clean tokens
    position: torch.Tensor      # (B, N + L) int64
    doc: torch.Tensor           # (B, N + L) int32
    block: torch.Tensor         # (B, N + L) int32
    rows: torch.Tensor          # (R,) int64     masked targets, in the flat (B * N) noisy copies
    labels: torch.Tensor        # (R,) int64     their clean tokens
    weights: torch.Tensor       # (R,) float32   factor of their cross-entropy
    group: torch.Tensor         # (R,) int64     their groups, as in Blocks
    tiles: torch.Tensor         # as in Blocks
    n_noisy: int                # N


class Draws(NamedTuple):
    """Uniform random numbers for some rows."""
    levels: np.ndarray      # (G,) stratified over all groups drawn together: becomes t
    counts: np.ndarray      # (G,) for the number of masked tokens of a group, if t is clipped
    tokens: np.ndarray      # (B, L) for the choice of masked tokens

    def part(self, first, rows, first_group, groups):
        """The Draws of some of the rows and of their groups."""
        groups = slice(first_group, first_group + groups)
        return Draws(self.levels[groups], self.counts[groups], self.tokens[first:first + rows])


def draw(seed, purpose, number, groups, rows, length):
    """Draws for `rows` rows of `length` tokens with `groups` groups in total. purpose: a key of
    NOISE. number: of the step or batch (an int or a tuple of ints). Each of the strata
    [i / groups, (i + 1) / groups) gives one level to a random group."""
    rng = np.random.default_rng((seed, NOISE[purpose], *np.atleast_1d(number)))
    levels = (rng.permutation(groups) + rng.random(groups)) / max(1, groups)
    return Draws(levels, rng.random(groups), rng.random((rows, length)))


def choose_masked(batch, rate, draws, t_range):
    """(T,) bool, True for masked targets of Blocks in flat order. rate: (G,) float64.

    Under a clipped range the number of masked tokens of a block of n targets is binomial(n, rate),
    conditioned on a share within the range (as by rejection sampling). If no number above 0 gives
    such a share, as in short blocks, the nearest are used, so every token is sometimes masked."""
    group, uniform = batch.group[batch.target], torch.from_numpy(draws.tokens)[batch.target]
    low, high = enforced_limits(t_range)
    if (low, high) == (0.0, 1.0) or not len(group):
        return uniform <= rate[group]
    n = torch.bincount(group, minlength=batch.n_groups)
    ends = torch.ceil(low * n.double() - 1e-9).long(), torch.floor(high * n.double() + 1e-9).long()
    fewest, most = torch.minimum(*ends), torch.maximum(*ends).clamp(min=1)
    k, wide = torch.arange(int(n.max()) + 1, dtype=torch.float64), n.double()[:, None]
    left, rate = (wide - k).clamp(min=0), rate.clamp(max=1 - 1e-12)[:, None]
    log_pmf = (torch.lgamma(wide + 1) - torch.lgamma(k + 1) - torch.lgamma(left + 1)
               + k * rate.log() + left * (-rate).log1p())
    inside = (k >= fewest[:, None]) & (k <= most[:, None])
    cdf = log_pmf.masked_fill(~inside, -torch.inf).softmax(1).cumsum(1)
    counts = (cdf <= torch.from_numpy(draws.counts)[:, None] * cdf[:, -1:]).sum(1)
    counts = torch.minimum(counts, most)
    order = uniform.argsort()
    order = order[group[order].argsort(stable=True)]        # by group, random inside
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order)) - (n.cumsum(0) - n)[group[order]]
    return rank < counts[group]


def diffuse(batch, draws, mask_id, t_range=FULL, weighting="elbo"):
    """Noise a batch (Blocks) with random numbers (Draws) -> Inputs. t is uniform in t_range; a
    clipped range also clips the masked share of every block. weighting: "elbo" (1 / t; 1 if the
    range starts above 0.5, as in the official code) or "ce" (1)."""
    low, high = t_range
    t = low + (high - low) * torch.from_numpy(draws.levels)
    masked = torch.zeros(batch.target.shape, dtype=torch.bool)
    masked[batch.target] = choose_masked(batch, t, draws, t_range)

    is_copy, places = batch.noisy >= 0, batch.noisy.clamp(min=0)
    clean, group = batch.input_ids.gather(1, places), batch.group.gather(1, places)
    hidden = masked.gather(1, places) & is_copy
    if hidden.sum() != masked.sum() or (batch.group[batch.target] < 0).any():
        raise ValueError("a target has no noisy copy or no group")
    weights = torch.ones(int(hidden.sum()))
    if weighting == "elbo" and low <= 0.5:
        weights = (1 / t)[group[hidden]].float()
    doc = torch.cat([batch.doc.gather(1, places).masked_fill(~is_copy, -1), batch.doc], 1).int()
    block, position = (torch.cat([numbers.gather(1, places), numbers], 1)
                       for numbers in (batch.block, batch.position))
    return Inputs(torch.cat([clean.masked_fill(hidden, mask_id), batch.input_ids], 1), position,
                  doc, block.int(), hidden.flatten().nonzero()[:, 0], clean[hidden], weights,
                  group[hidden], batch.tiles, places.shape[1])
