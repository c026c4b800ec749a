"""GSM8K, chat and HDP problems -> documents of numbered blocks -> rows -> batches.

A document is a problem as tokens, each with the number of its block: the model sees clean blocks
before the one that it denoises. gsm8k and chat: prompt and answer, cut into blocks of block_size;
hdp: the question is block 0, plan blocks follow, then execution blocks.
The end token (`<|endoftext|>`; in hdp `<|pad|>` at the end of plan and execution) is repeated up to
the block boundary and trained there, since a sampler always fills whole blocks. Nothing else is
padded: rows of several problems (--pack) give the same loss as rows of one.
"""
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from core import dist, loading
from core.cli import UserError, require
from core.packing import best_fit
from core.problems import problem as bad_problem
from core.problems import settle
from diffusion import dit
from diffusion.choices import CHECKS, EXECUTION, FILL, PLAN, QUESTION, Layout
from diffusion.noise import Blocks
from diffusion.problems import read_chats, read_problems

# ---- Problems -> documents of numbered blocks

# what a document holds, numbers that add up over rows and steps. clean: tokens, its slots in a row;
# noisy: tokens with a noisy copy, those of blocks with a target; tokens: of text and markers,
# without the fill; targets: tokens in the loss; text: those of them that are no fill; groups:
# blocks with targets; pairs: of query and key that may attend
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

    def name(self, d):
        """Where document d is in the user's files."""
        return self.problems[d].name


def pieces(problem, layout):
    """The texts of a problem that are tokenised apart, between special tokens."""
    if layout.prompt:
        return [layout.prompt.replace("{question}", problem.question), problem.solution]
    if layout.system != "hdp":
        return [f"Question: {problem.question}\nAnswer:", f" {problem.solution}"]
    return [problem.question, f" {problem.plan}", f" {problem.solution} ", f" {problem.answer}"]


def regions_of(ids, tokens, layout):
    """Ids of a problem's pieces -> [(region, ids, how many of them are given, not generated)]."""
    if layout.system != "hdp":
        head = prompt_ids(ids[0], tokens, layout)
        return [(PLAN, head + ids[1] + [tokens.end], len(head))]
    execution = [tokens.execution, *ids[2], tokens.answer, *ids[3], tokens.end]
    return [(QUESTION, ids[0], len(ids[0])), (PLAN, [tokens.plan, *ids[1], tokens.end], 1),
            (EXECUTION, execution, 1)]


def prompt_ids(ids, tokens, layout):
    """Ids of a gsm8k problem before its answer; a chat template begins as it likes."""
    return list(ids) if layout.prompt else [tokens.bos, *ids]


def too_long(regions, layout):
    """The regions that are longer than their budgets, in words, or ""."""
    return ", ".join(
        f"it{f's {flag[:-7]}' * (layout.system == 'hdp')} has {len(ids)} tokens, markers and end "
        f"token included, more than --{flag} {most}" for region, ids, _ in regions
        for flag, most, _ in [layout.regions[region]] if len(ids) > most)


def make_document(regions, tokens, layout):
    """regions_of -> ((6, n) int64: ids, position, block, target, region, group; its COUNTS)."""
    parts, next_block = [], 0
    for region, ids, pinned in regions:
        size = layout.regions[region][2] or len(ids)
        filled = np.array([*ids, *[tokens.end] * (-len(ids) % size)])
        at = np.arange(len(filled))
        block = next_block + at // size
        next_block = block[-1] + 1
        target, what = at >= pinned, np.where(at < len(ids), region, FILL)
        if layout.system != "hdp":
            what[:pinned] = QUESTION
        if layout.loss_on_question:
            target |= (what == QUESTION) & (filled != tokens.bos)
        parts.append(np.stack([filled, at + layout.start(region), block, target, what]))
    document = np.concatenate(parts, axis=1)
    block, target, text = document[2], document[3] > 0, document[4] != FILL
    trained, sizes = np.unique(block[target]), np.bincount(block)
    group = np.where(np.isin(block, trained), np.searchsorted(trained, block), -1)
    seen = sizes * sizes.cumsum()       # a block sees itself and the clean ones before
    return np.concatenate([document, group[None]]), [
        len(block), (group >= 0).sum(), text.sum(), target.sum(), (target & text).sum(),
        len(trained), seen.sum() + seen[trained].sum()]


def length_hint(bad):
    """Remedy for problems of too many tokens."""
    hint = "\nfix: shorten them, raise the limit, or pass --drop_too_long"
    return hint * any(p.check == "too_long" for p in bad)


def make_documents(problems, tokens, layout, bad, path=""):
    """Documents of a list of Problems of the file `path`; UserError if none can be used.

    bad: a list that takes problems that are too long or hold a special token (core's
    problems.Problem).
    """
    texts = [[] if p.ids else pieces(p, layout) for p in problems]
    encoded = iter(tokens.tokenizer.encode_batch([text for group in texts for text in group],
                                                 add_special_tokens=False))
    kept, parts, counts = [], [], []
    for p, group in zip(problems, texts):
        ids = [next(encoded).ids for _ in group]
        regions = [(PLAN, p.ids, p.given)] if p.ids else regions_of(ids, tokens, layout)
        if token := tokens.find_control_token(p.question, p.plan, p.solution, p.answer):
            why = f"its text holds the special token {token}; remove it"
            bad.append(bad_problem(p.name, "control_token", why, path))
        elif excess := too_long(regions, layout):
            bad.append(bad_problem(p.name, "too_long", excess, path))
        else:
            kept.append(p)
            part, count = make_document(regions, tokens, layout)
            parts.append(part)
            counts.append(count)
    first = f", the first one being {bad[0]}{length_hint(bad)}" if bad else ""
    require(parts, f"{path or 'data'}: none of {len(bad)} problems can be used{first}")
    ids, position, block, target, region, group = np.concatenate(parts, axis=1)
    counts = dict(zip(COUNTS, np.array(counts).T))
    offsets = np.concatenate([[0], counts["clean"].cumsum()])
    return Documents(layout, ids, position, block, target > 0, region, group, offsets, counts,
                     kept, tokens.pad)


def split_validation(n, share, seed):
    """(train, validation) numbers: a seeded shuffle. At least one each when share > 0 and n > 1."""
    held_out = min(max(1, round(n * share)), n - 1) if share > 0 else 0
    order = np.random.default_rng((seed, 2)).permutation(n)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


# ---- Documents -> rows -> batches


class Rows(Dataset):
    """Rows of whole documents (members), of `length` tokens and noisy_length copies.

    table: {name of COUNTS or "samples": (n_rows,) ints}, to add up over the rows of a step.
    """

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

    def __getitem__(self, r):
        return self.documents, self.members[r]


def make_rows(documents, numbers, row_length, pack, seed=0):
    """Rows of the documents with these numbers: one each, or several (pack), as the seed decides.

    Packed rows get the room for noisy copies (a multiple of 128, of 16 in rows below 512) that
    makes all rows together smallest. Raises UserError when a document does not fit.
    """
    numbers, lengths, noisy = np.asarray(numbers), *map(documents.counts.get, ("clean", "noisy"))
    longest = numbers[lengths[numbers].argmax()]
    require(lengths[longest] <= row_length,
            f"--row_length {row_length}: {documents.name(longest)} takes {lengths[longest]} slots; "
            "raise it to that or more")
    step = 128 if row_length >= 512 else 16
    needed = min(row_length, -(-int(noisy[numbers].max(initial=1)) // step) * step)
    if not pack:
        return Rows(documents, [[n] for n in numbers.tolist()], row_length, needed)
    order = numbers[np.random.default_rng((seed, 0)).permutation(len(numbers))]
    packings = {}
    for copies in range(needed, row_length + 1, step):
        # slots or copies run out first
        share = np.maximum(lengths, -(-noisy * row_length // copies))
        packings[copies] = list(best_fit(share, order, row_length))
    best = min(packings, key=lambda copies: len(packings[copies]) * (row_length + copies))
    return Rows(documents, packings[best], row_length, best)


def read_any(path, split, layout, tokenizer, tokens):
    """(Problems of a file of the Layout's system, [problems with it]). tokenizer: of chats."""
    bad = []
    if layout.system == "chat":
        return read_chats(path, tokenizer, tokens, bad), bad
    return read_problems(path, split, layout.system, layout.strip_calculator, bad), bad


def prepare_rows(world, layout, tokens, args, output_dir=None):
    """(training Rows, validation Rows or None) of the trainer's flags; rank 0 reads files first.
    UserError when a problem cannot be used, unless --drop_bad leaves out those of its check.

    output_dir: where rank 0 lists all that cannot be used, None: nowhere.
    """
    bad, folder = [], output_dir if world.is_main else None

    def documents(path, split):
        problems, found = dist.rank0(world, read_any, path, split, layout, args.tokenizer, tokens)
        bad.extend(found)           # on every rank, so that all end alike
        try:
            return make_documents(problems, tokens, layout, bad, path)
        except UserError:           # none is left; the list is written all the same
            settle(bad, CHECKS, folder)
            raise

    train = evaluation = documents(args.train_data_file, "train")
    numbers, held_out = np.arange(len(train)), []
    if args.eval_data_file:
        evaluation = documents(args.eval_data_file, "test")
        held_out = np.arange(len(evaluation))
    dropped = settle(bad, args.drop_bad, folder, length_hint(bad))
    if dropped and world.is_main:
        print(f"data       dropped: {dropped}", flush=True)
    if args.validation_split and not args.eval_data_file:
        names = {}      # answers of one chat have one name, and stay together
        chat = [names.setdefault(problem.name, len(names)) for problem in train.problems]
        parts = split_validation(len(names), args.validation_split, args.seed)
        numbers, held_out = (np.flatnonzero(np.isin(chat, part)) for part in parts)
    how = args.row_length, args.pack, args.seed
    rows = make_rows(train, numbers, *how)
    return rows, make_rows(evaluation, held_out, *how) if len(held_out) else None


def data_lines(rows, eval_rows):
    """Two lines about the training data."""
    table, held_out = rows.table, eval_rows.table["samples"].sum() if eval_rows else 0
    return (f"problems   {table['samples'].sum()} to train, {held_out} to validate; "
            f"{table['tokens'].sum() / table['samples'].sum():.0f} tokens each",
            f"rows       {len(rows)} of {rows.length} clean and {rows.noisy_length} noisy tokens, "
            f"{table['clean'].mean() / rows.length:.1%} of the clean ones filled, "
            f"{table['samples'].mean():.2f} problems each")


def collate(rows, batch_rows, length, noisy_length, pad):
    """List of items of Rows -> Blocks of batch_rows rows, topped up with empty ones."""
    fields = {"ids": pad, "position": 0, "block": 0, "target": False, "group": -1}
    joined = {name: np.full((batch_rows, length), value)
              for name, value in (fields | {"doc": -1}).items()}
    noisy, groups = np.full((batch_rows, noisy_length), -1), 0
    for r, (d, members) in enumerate(rows):
        at = 0
        for number, document in enumerate(members):
            part = slice(*d.offsets[document:document + 2])
            to = r, slice(at, at + part.stop - part.start)
            for name in fields:
                joined[name][to] = getattr(d, name)[part]
            joined["doc"][to] = number
            joined["group"][to] += np.where(d.group[part] >= 0, groups, 0)
            at, groups = to[1].stop, groups + int(d.counts["groups"][document])
        places = np.flatnonzero(joined["group"][r] >= 0)
        noisy[r, :len(places)] = places
    at = noisy.clip(min=0)
    doc, block = (np.take_along_axis(joined[key], at, 1) for key in ("doc", "block"))
    tiles = dit.tile_states(np.concatenate([np.where(noisy >= 0, doc, -1), joined["doc"]], 1),
                            np.concatenate([block, joined["block"]], 1), noisy_length)
    tensors = {key: torch.from_numpy(array) for key, array in joined.items()}
    return Blocks(input_ids=tensors.pop("ids"), noisy=torch.from_numpy(noisy), n_groups=groups,
                  n_targets=int(joined["target"].sum()), tiles=tiles, **tensors)


def make_loader(rows, packs, batch_rows, **options):
    """DataLoader of Blocks over `packs`, lists of at most batch_rows row numbers; [] is padding."""
    return loading.over_packs(
        rows, packs, lambda some: collate(some, batch_rows, rows.length, rows.noisy_length,
                                          rows.documents.pad), **options)
