"""GSM8K, chat and HDP problems -> documents of numbered blocks -> rows -> batches -> noise.

A document is a tokenised problem, each token with a block number. The model denoises a block given
the clean blocks before it. gsm8k and chat: prompt and answer are cut into blocks of block_size.
hdp: the question is block 0, then plan blocks follow, then execution blocks. The end token (hdp:
`<|pad|>`, after plan and execution) is repeated up to the end of its block and trained there, since
a sampler fills whole blocks. Rows of several problems give the same loss as rows of one.

A batch (Blocks) is masked on the CPU by random numbers that depend on the seed and the step alone,
so any split of a step over ranks and micro-steps trains the same.

    -log p(x) <= sum over blocks of
                 E_t E_mask [ 1 / t * sum over masked tokens of -log p(token | noisy block, past) ]

Each target of a block is masked with probability t in (0, 1] (the loglinear schedule, whose weight
is 1 / t). SUBS: other tokens have no loss and the mask token no probability. Sources: BD3-LM (arXiv
2503.09573) and its code (github.com/kuleshov-group/bd3lms), MDLM (arXiv 2406.07524).
"""
import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch.distributions import Binomial

from core import dist, packing
from core.cli import require
from core.json_files import Problem as BadProblem
from core.json_files import Problems
from diffusion import dit
from diffusion.choices import EXECUTION, FILL, FULL, PLAN, QUESTION, Layout, enforced_limits
from diffusion.problems import read_problems

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


def prompt_ids(question, tokens, layout):
    """Ids of a problem before its answer (hdp: its plan)."""
    if layout.prompt:       # a chat template, which has its start token itself
        return tokens.encode(layout.prompt.replace("{question}", question))
    if layout.system == "hdp":
        return tokens.encode(question)
    return [tokens.bos, *tokens.encode(f"Question: {question}\nAnswer:")]


def regions_of(problem, tokens, layout):
    """[(region, ids, number of them that are given and not generated)] of a Problem."""
    if problem.ids:
        return [(PLAN, problem.ids, problem.prompt_length)]
    head, encode = prompt_ids(problem.question, tokens, layout), tokens.encode
    if layout.system == "hdp":
        steps, answer = encode(f" {problem.solution} "), encode(f" {problem.answer}")
        return [(QUESTION, head, len(head)),
                (PLAN, [tokens.plan, *encode(f" {problem.plan}"), tokens.end], 1),
                (EXECUTION, [tokens.execution, *steps, tokens.answer, *answer, tokens.end], 1)]
    space = "" if layout.prompt else " "
    return [(PLAN, [*head, *encode(space + problem.solution), tokens.end], len(head))]


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
    kept, arrays, counts = [], [], []
    for p in problems:
        regions, fault = regions_of(p, tokens, layout), None
        for region, ids, _ in regions:
            flag, most, _ = layout.regions[region]
            if len(ids) > most:
                fault = "too_long", (f"has {len(ids)} tokens with markers and end token, more than "
                                     f"--{flag} {most}; raise it, or pass --drop_too_long")
        if token := tokens.find_control_token(p.question, p.plan, p.solution, p.answer):
            fault = "control_token", f"its text holds the special token {token}; remove it"
        if fault:
            bad.append(BadProblem(p.name, *fault, path))
            continue
        document, count = make_document(regions, tokens, layout)
        kept.append(p)
        arrays.append(document)
        counts.append(count)
    require(kept, f"{path or 'data'}: none of {len(bad)} problems can be used, the first one being "
                  f"{''.join(map(str, bad[:1]))}")
    ids, position, block, target, region, group = np.concatenate(arrays, axis=1)
    counts = dict(zip(COUNTS, np.array(counts).T))
    offsets = np.concatenate([[0], counts["clean"].cumsum()])
    return Documents(layout, ids, position, block, target > 0, region, group, offsets, counts,
                     kept, tokens.end)


class Rows:
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
    require(lengths[longest] <= row_length, f"--row_length {row_length}: "
            f"{documents.problems[longest].name} takes {lengths[longest]} slots")
    step = 128 if row_length >= 512 else 16
    needed = min(row_length, -(-int(noisy[numbers].max(initial=1)) // step) * step)
    if not pack:
        return Rows(documents, [[n] for n in numbers.tolist()], row_length, needed)
    order = numbers[np.random.default_rng((seed, 0)).permutation(len(numbers))]
    packings = {}
    for copies in range(needed, row_length + 1, step):
        # slots or copies may run out first
        share = np.maximum(lengths, -(-noisy * row_length // copies))
        packings[copies] = list(packing.best_fit(share, order, row_length))
    best = min(packings, key=lambda copies: len(packings[copies]) * (row_length + copies))
    return Rows(documents, packings[best], row_length, best)


def read_data(path, split, layout, tokenizer, tokens):
    """(Problems of a file for the Layout's system, [unusable problems])."""
    bad = []
    if layout.system == "chat":
        from diffusion import published
        return published.read_chats(path, tokenizer, tokens, bad), bad
    return read_problems(path, split, layout.system, layout.strip_calculator, bad), bad


def prepare_rows(world, layout, tokens, args, output_dir):
    """(training Rows, validation Rows or None) for the trainer's flags. Rank 0 reads the files and
    lists unusable problems in output_dir. UserError for those that --drop_bad does not drop."""
    bad = []

    def read_documents(path, split):
        problems, wrong = dist.rank0(world, read_data, path, split, layout, args.tokenizer, tokens)
        bad.extend(wrong)           # on every rank, so that all exit
        return make_documents(problems, tokens, layout, bad, path)

    train = evaluation = read_documents(args.train_data_file, "train")
    if args.eval_data_file:
        evaluation = read_documents(args.eval_data_file, "test")
    unusable = Problems(args.drop_bad, output_dir if world.is_main else None)
    dropped = unusable.add(bad).settle()
    if dropped and world.is_main:
        print(f"data       dropped: {dropped}", flush=True)
    numbers, held_out = np.arange(len(train)), []
    if args.eval_data_file:
        held_out = np.arange(len(evaluation))
    elif args.validation_split:
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
    """A batch of rows: N noisy copies, of all tokens in blocks with a target, then L clean tokens.
    diffuse() masks some of the copies; then this is what DiT.forward takes."""
    tokens: torch.Tensor            # (B, N + L) int64   anything on padding
    position: torch.Tensor          # (B, N + L) int64   rotary position in the document
    doc: torch.Tensor               # (B, N + L) int32   document in the row, -1 on padding
    block: torch.Tensor             # (B, N + L) int32   block in the document
    n_noisy: int                    # N
    copied: torch.Tensor = None     # (B, N) int64   clean token of each copy, 0 to L - 1
    target: torch.Tensor = None     # (B, N) bool    may be masked, and is in the loss
    group: torch.Tensor = None      # (B, N) int64   the (document, block), which shares one t
    n_groups: int = 0
    rows: torch.Tensor = None       # (R,) int64     masked copies, in the flat (B * N) ones
    labels: torch.Tensor = None     # (R,) int64     their clean tokens
    weights: torch.Tensor = None    # (R,) float32   factor of their cross-entropy
    tiles: torch.Tensor = None      # (B, tiles, tiles) int8   dit.tile_states: what flex may skip


def collate(items, batch_rows, rows):
    """items: some of rows.members -> Blocks of batch_rows rows, padded with empty rows."""
    d, n_noisy, groups = rows.documents, rows.noisy_length, 0
    shape, half = (batch_rows, n_noisy + rows.length), (batch_rows, n_noisy)
    tokens, position = np.full(shape, d.pad), np.zeros(shape, np.int64)
    doc, block = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    copied, target, group = np.zeros(half, np.int64), np.zeros(half, bool), np.full(half, -1)
    for r, members in enumerate(items):
        start, copies = n_noisy, 0
        for number, document in enumerate(members):
            source = slice(*d.offsets[document:document + 2])
            chosen = np.flatnonzero(d.group[source] >= 0)
            clean = r, slice(start, start + source.stop - source.start)
            noisy = r, slice(copies, copies + len(chosen))
            for array, values in ((tokens, d.ids), (position, d.position), (block, d.block)):
                array[clean], array[noisy] = values[source], values[source][chosen]
            doc[clean] = doc[noisy] = number
            copied[noisy] = start - n_noisy + chosen
            target[noisy], group[noisy] = d.target[source][chosen], d.group[source][chosen] + groups
            start, copies = clean[1].stop, noisy[1].stop
            groups += int(d.counts["groups"][document])
    halves = map(torch.from_numpy, (copied, target, group))
    return Blocks(*map(torch.from_numpy, (tokens, position, doc, block)), n_noisy, *halves, groups,
                  tiles=dit.tile_states(doc, block, n_noisy))


NOISE = {"train": 1, "validation": 2, "search": 3}      # purposes of random numbers


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
    group = batch.group[batch.target]
    uniform = torch.from_numpy(draws.tokens).gather(1, batch.copied)[batch.target]
    low, high = enforced_limits(t_range)
    if (low, high) == (0.0, 1.0) or not len(group):
        return uniform <= rate[group]
    n = torch.bincount(group, minlength=batch.n_groups)
    ends = torch.ceil(low * n.double() - 1e-9).long(), torch.floor(high * n.double() + 1e-9).long()
    fewest, most = torch.minimum(*ends), torch.maximum(*ends).clamp(min=1)
    k = torch.arange(int(n.max()) + 1, dtype=torch.float64)
    log_pmf = Binomial(n.double()[:, None], rate[:, None], validate_args=False).log_prob(k)
    inside = (k >= fewest[:, None]) & (k <= most[:, None])
    cdf = log_pmf.masked_fill(~inside, -torch.inf).softmax(1).cumsum(1)
    counts = (cdf <= torch.from_numpy(draws.counts)[:, None] * cdf[:, -1:]).sum(1)
    by_group = torch.from_numpy(np.lexsort((uniform, group)))       # in random order inside
    rank = by_group.argsort() - (n.cumsum(0) - n)[group]
    return rank < torch.minimum(counts, most)[group]


def diffuse(batch, draws, mask_id, t_range=FULL, weighting="elbo"):
    """Blocks with masked copies, by random numbers (Draws). t is uniform in t_range; a clipped
    range also clips the masked share of every block. weighting: "elbo" (1 / t; 1 if the range
    starts above 0.5, as in the official code) or "ce" (1)."""
    low, high = t_range
    t = low + (high - low) * torch.from_numpy(draws.levels)
    masked = torch.zeros_like(batch.target)
    masked[batch.target] = choose_masked(batch, t, draws, t_range)
    tokens = batch.tokens.clone()
    tokens[:, :batch.n_noisy][masked] = mask_id
    weights = torch.ones(int(masked.sum()))
    if weighting == "elbo" and low <= 0.5:
        weights = (1 / t)[batch.group[masked]].float()
    return replace(batch, tokens=tokens, rows=masked.flatten().nonzero()[:, 0],
                   labels=batch.tokens[:, :batch.n_noisy][masked], weights=weights)
