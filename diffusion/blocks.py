"""GSM8K and HDP problems -> documents of numbered blocks -> rows -> batches.

A document is a problem as tokens, each with the number of its block: the model sees clean blocks before the one that it
denoises. Three systems share everything behind that:
- gsm8k: `<|endoftext|> Question: ... \\nAnswer: ... #### N <|endoftext|>`, cut into blocks of block_size; chat: alike;
- hdp: question, plan, execution. Hierarchical: the question is block 0, plan blocks follow, then execution blocks.
  Flat: the regions padded to their budgets and cut into blocks of one size, which gives the shape and the effective
  mask of ngocbao220/hdp-diffusion; unlike there nobody sees the padding, and the loss is as below.
The end token (`<|endoftext|>`; in hdp `<|pad|>` at the end of plan and execution) is repeated up to the block boundary
and trained there, since a sampler always fills whole blocks. Nothing else is padded: rows of several problems (--pack)
give the same loss as rows of one.
"""
import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from common import distributed
from common.distributed import UserError
from common.problems import problem as bad_problem
from common.problems import settle
from core import loading
from core.packing import best_fit
from diffusion import dit
from diffusion.choices import CHECKS, EXECUTION, FILL, PLAN, QUESTION, Layout
from diffusion.noise import Blocks, attended_pairs
from diffusion.problems import read_problems

# ---------------------------------------------------------------------------------------------------------------------
# Problems -> documents of numbered blocks


@dataclass
class Documents:
    """Tokenised problems, flat: document d is [offsets[d]:offsets[d + 1]] of every token array."""
    layout: Layout
    ids: np.ndarray         # (T,) int64
    position: np.ndarray    # (T,) int64 inside the document
    block: np.ndarray       # (T,) int64 block number inside the document
    target: np.ndarray      # (T,) bool: may be masked, and is in the loss
    region: np.ndarray      # (T,) int64
    live: np.ndarray        # (T,) bool: False on the padding inside flat documents
    group: np.ndarray       # (T,) int64 number of the block among the document's blocks with targets, else -1
    offsets: np.ndarray     # (n + 1,) int64
    problems: list          # Problem of each document
    pad: int                # id on padding, which `live` marks, and doc -1 in a batch
    dropped: int            # problems left out, as they are too long or hold a special token

    def __len__(self):
        return len(self.problems)

    def per_document(self, mask):
        """(n,) int64: how many tokens of each document `mask` (T,) holds for."""
        return np.diff(np.concatenate([[0], np.cumsum(mask)])[self.offsets])

    @functools.cached_property
    def lengths(self):
        """(n,) slots of each document in a row."""
        return np.diff(self.offsets)

    @functools.cached_property
    def n_targets(self):
        """(n,) tokens in the loss."""
        return self.per_document(self.target)

    @functools.cached_property
    def noisy_lengths(self):
        """(n,) tokens that need a noisy copy: those of blocks with a target."""
        return self.per_document(self.group >= 0)

    @functools.cached_property
    def tokens(self):
        """(n,) tokens of text and markers: neither padding nor what follows an end token."""
        return self.per_document(self.live & (self.region != FILL))

    @functools.cached_property
    def n_groups(self):
        """(n,) blocks with targets."""
        return np.array([self.group[a:b].max(initial=-1) + 1 for a, b in zip(self.offsets[:-1], self.offsets[1:])])

    def name(self, d):
        """Where document d stands in the user's files."""
        return self.problems[d].name

    def fingerprint(self, numbers=None):
        """Hash of the documents with these numbers (default: all), for recognising the same data on resume."""
        digest = hashlib.sha256()
        for d in range(len(self)) if numbers is None else numbers:
            for array in (self.ids, self.position, self.block, self.target, self.region):
                digest.update(array[self.offsets[d]:self.offsets[d + 1]].tobytes())
        return digest.hexdigest()[:16]


def pieces(problem, layout):
    """The texts of a problem that are tokenised on their own, between special tokens."""
    if layout.prompt:
        return [layout.prompt.replace("{question}", problem.question), problem.solution]
    if layout.system != "hdp":
        return [f"Question: {problem.question}\nAnswer:", f" {problem.solution}"]
    return [problem.question, f" {problem.plan}", f" {problem.solution} ", f" {problem.answer}"]


def regions_of(ids, tokens, layout):
    """Token ids of a problem's pieces -> [(region, ids, pinned)]: the first `pinned` ids are given, not generated.

    An end token follows every generated region; the fill behind it is not there yet.
    """
    if layout.system != "hdp":
        head = head_of(ids[0], tokens, layout)
        return [(PLAN, head + ids[1] + [tokens.end], len(head))]
    execution = [tokens.execution, *ids[2], tokens.answer, *ids[3], tokens.end]
    return [(QUESTION, ids[0], len(ids[0])), (PLAN, [tokens.plan, *ids[1], tokens.end], 1), (EXECUTION, execution, 1)]


def head_of(ids, tokens, layout):
    """Ids of a gsm8k problem before its answer; a chat template begins as it likes."""
    return list(ids) if layout.prompt else [tokens.bos, *ids]


def too_long(regions, layout):
    """What is longer than its budget, in words, or ""."""
    if layout.system != "hdp":
        budgets = {PLAN: ("it has", "max_length")}
    else:
        budgets = {QUESTION: ("its question has", "question_budget"), PLAN: ("its plan has", "plan_budget"),
                   EXECUTION: ("its execution has", "execution_budget")}
    over = [f"{words} {len(ids)} tokens, markers and end token included, more than --{flag} {getattr(layout, flag)}"
            for region, ids, _ in regions for words, flag in [budgets[region]] if len(ids) > getattr(layout, flag)]
    return ", ".join(over)


def make_document(regions, tokens, layout):
    """regions_of -> (6, n) int64: ids, position, block, target, region, live."""
    parts, next_block = [], 0
    for region, ids, pinned in regions:
        slots, fill = region_slots(region, len(ids), layout)
        at, n = np.arange(slots), len(ids) + fill
        padded = np.full(slots, tokens.pad)
        padded[:n] = ids + [tokens.end] * fill
        position = at + (layout.start(region) if layout.system == "hdp" else 0)
        if layout.flat:
            block = position // layout.block_size
        elif region == QUESTION:
            block = np.zeros(slots, np.int64)
        else:
            block = next_block + at // layout.region_block(region)
        next_block = block[-1] + 1
        target, what = (at >= pinned) & (at < n), np.full(slots, region)
        what[len(ids):n] = FILL
        if layout.system != "hdp":
            what[:pinned] = QUESTION
        if layout.loss_on_question:
            target |= (what == QUESTION) & (at < n) & (padded != tokens.bos)
        parts.append(np.stack([padded, position, block, target, what, at < n]))
    return np.concatenate(parts, axis=1)


def region_slots(region, n, layout):
    """(slots, fill) of a region of n tokens: the slots it takes in a document, the end tokens added behind its end."""
    if region == QUESTION:
        return (layout.question_budget if layout.flat else n), 0
    fill = -n % layout.region_block(region)
    if layout.flat:
        return {PLAN: layout.plan_budget, EXECUTION: layout.execution_budget}[region], fill
    return n + fill, fill


def hint(bad):
    """What helps against problems of too many tokens."""
    return "\nfix: shorten them, raise the limit, or pass --drop_too_long" \
        if any(p.check == "too_long" for p in bad) else ""


def make_documents(problems, tokens, layout, bad=None, path=""):
    """Documents of a list of Problems of the file `path`.

    bad: a list that takes what is too long or holds a special token (common's problems.Problem); None: UserError with
    all of them.
    """
    texts = [[] if p.ids else pieces(p, layout) for p in problems]
    encoded = iter(tokens.tokenizer.encode_batch([text for group in texts for text in group],
                                                 add_special_tokens=False))
    kept, parts, wrong = [], [], []
    for problem, group in zip(problems, texts):
        ids = [next(encoded).ids for _ in group]
        if token := tokens.smuggled(problem.question, problem.plan, problem.solution, problem.answer):
            wrong.append(bad_problem(problem.name, "control_token", f"its text holds the special token {token}; remove "
                                     "it", path))
            continue
        regions = [(PLAN, problem.ids, problem.given)] if problem.ids else regions_of(ids, tokens, layout)
        if excess := too_long(regions, layout):
            wrong.append(bad_problem(problem.name, "too_long", excess, path))
            continue
        kept.append(problem)
        parts.append(make_document(regions, tokens, layout))
    if bad is None:
        settle(wrong, hint=hint(wrong))
    else:
        bad += wrong
    if not parts:
        raise UserError(f"none of {len(wrong)} problems can be used, the first one being {wrong[0]}{hint(wrong)}")
    ids, position, block, target, region, live = np.concatenate(parts, axis=1)
    offsets = np.cumsum([0] + [part.shape[1] for part in parts])
    group = number_groups(block, target, live, offsets)
    return Documents(layout, ids, position, block, target > 0, region, live > 0, group, offsets, kept, tokens.pad,
                     len(wrong))


def number_groups(block, target, live, offsets):
    """(T,) number of each token's block among its document's blocks that hold a target, -1 in the others."""
    group = np.full(len(block), -1)
    for a, b in zip(offsets[:-1], offsets[1:]):
        trained = np.unique(block[a:b][target[a:b] > 0])
        at = np.searchsorted(trained, block[a:b])
        inside = at < len(trained)
        inside[inside] = trained[at[inside]] == block[a:b][inside]
        group[a:b][inside] = at[inside]
    return np.where(live, group, -1)


def split_validation(n, share, seed):
    """(train, validation) document numbers: a seeded shuffle. At least one each when share > 0 and n > 1."""
    held_out = min(max(1, round(n * share)), n - 1) if share > 0 else 0
    order = np.random.default_rng((seed, 2)).permutation(n)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


# ---------------------------------------------------------------------------------------------------------------------
# Documents -> rows -> batches


def padding(shape, pad):
    """{name: array of this shape} of a row or a batch without any token."""
    nothing = {"ids": pad, "position": 0, "doc": -1, "block": 0, "target": False, "region": 0, "group": -1}
    return {name: np.full(shape, value) for name, value in nothing.items()}


class Rows(Dataset):
    """Fixed-length rows of whole documents; item r is a dict of (L,) int64 arrays: a row before it meets its batch."""

    def __init__(self, documents, members, length, noisy_length):
        """members: a list of document numbers for each row. A row has `length` tokens and noisy_length noisy copies."""
        self.documents, self.members = documents, [list(m) for m in members]
        self.length, self.noisy_length = length, noisy_length

    def __len__(self):
        return len(self.members)

    def per_row(self, per_document):
        """(n_rows,) int64 sums of a (n_documents,) array over the documents of each row."""
        return np.array([per_document[m].sum() for m in self.members], np.int64)

    def fingerprint(self):
        """Hash of the documents in the order of the rows, for recognising the same data on resume."""
        return self.documents.fingerprint(document for members in self.members for document in members)

    @functools.cached_property
    def n_targets(self):
        return self.per_row(self.documents.n_targets)

    @functools.cached_property
    def tokens(self):
        return self.per_row(self.documents.tokens)

    def __getitem__(self, r):
        d, length = self.documents, self.length
        row = padding(length, d.pad)
        at = groups = 0
        for number, document in enumerate(self.members[r]):
            a, b = d.offsets[document:document + 2]
            to = slice(at, at + b - a)
            row["ids"][to], row["position"][to], row["block"][to] = d.ids[a:b], d.position[a:b], d.block[a:b]
            row["target"][to], row["region"][to] = d.target[a:b], d.region[a:b]
            row["doc"][to] = np.where(d.live[a:b], number, -1)
            row["group"][to] = np.where(d.group[a:b] >= 0, d.group[a:b] + groups, -1)
            at, groups = to.stop, groups + int(d.n_groups[document])
        row["n_groups"], row["documents"] = groups, len(self.members[r])
        return row


def make_rows(documents, numbers, row_length, pack, seed=0):
    """Rows of the documents with these numbers: one document each, or several (pack), which the seed alone decides.

    Packed rows get the room for noisy copies (a multiple of 128, of 16 in rows below 512) that makes all rows together
    smallest; the flat layout keeps as many as slots, like its source. Raises UserError when a document does not fit.
    """
    numbers = np.asarray(numbers)
    longest = int(documents.lengths[numbers].max(initial=0))
    if longest > row_length:
        name = documents.name(numbers[documents.lengths[numbers].argmax()])
        raise UserError(f"--row_length {row_length}: {name} takes {longest} slots; raise it to {longest} or more")
    flat, noisy = documents.layout.flat, documents.noisy_lengths
    step = 128 if row_length >= 512 else 16
    needed = row_length if flat else min(row_length, -(-int(noisy[numbers].max(initial=1)) // step) * step)
    if not pack:
        return Rows(documents, [[n] for n in numbers.tolist()], row_length, needed)
    order = numbers[np.random.default_rng((seed, 0)).permutation(len(numbers))]
    packings = {}
    for copies in range(needed, row_length + 1, step):
        share = np.maximum(documents.lengths, -(-noisy * row_length // copies))     # slots or copies run out first
        packings[copies] = best_fit(share, order, row_length)
    best = min(packings, key=lambda copies: len(packings[copies]) * (row_length + copies))
    return Rows(documents, packings[best], row_length, best)


def prepare_rows(world, layout, tokens, args, output_dir=None):
    """(training Rows, validation Rows or None) of the trainer's flags; rank 0 reads the files first.

    Without --eval_data_file the share --validation_split of the training problems is held out. UserError when a problem
    cannot be used, unless --drop_bad leaves out those of its check. output_dir: where rank 0 lists all that cannot be
    used, None: nowhere.
    """
    bad = []

    def read(path, split):
        found = []
        if layout.system == "chat":
            from diffusion import chats
            return chats.read(path, args.tokenizer, tokens, found), found
        return read_problems(path, split, layout.system, layout.strip_calculator, found), found

    def documents(path, split):
        problems, found = distributed.rank0_first(world, read, path, split)
        bad.extend(found)           # on every rank, so that all end alike
        try:
            return make_documents(problems, tokens, layout, bad, path)
        except UserError:           # none is left; the list is written all the same
            settle(bad, CHECKS, output_dir if world.is_main else None)
            raise

    train = evaluation = documents(args.train_data_file, "train")
    numbers, held_out = np.arange(len(train)), []
    if args.eval_data_file:
        evaluation = documents(args.eval_data_file, "test")
        held_out = np.arange(len(evaluation))
    said = settle(bad, args.drop_bad, output_dir if world.is_main else None, hint(bad))
    if said and world.is_main:
        print(f"data       dropped: {said}", flush=True)
    if args.validation_split and not args.eval_data_file:
        seen = {}       # answers of one chat have one name, and stay together
        chat = [seen.setdefault(problem.name, len(seen)) for problem in train.problems]
        parts = split_validation(len(seen), args.validation_split, args.seed)
        numbers, held_out = (np.flatnonzero(np.isin(chat, part)) for part in parts)
    how = args.row_length, args.pack, args.seed
    rows = make_rows(train, numbers, *how)
    return rows, make_rows(evaluation, held_out, *how) if len(held_out) else None


def collate(rows, batch_rows, length, noisy_length, pad):
    """List of row dicts -> Blocks of batch_rows rows, topped up with empty ones."""
    joined = padding((batch_rows, length), pad)
    noisy, groups = np.full((batch_rows, noisy_length), -1), 0
    for r, row in enumerate(rows):
        for key, array in joined.items():
            array[r] = row[key]
        joined["group"][r][row["group"] >= 0] += groups
        groups += row["n_groups"]
        places = np.flatnonzero(row["group"] >= 0)
        noisy[r, :len(places)] = places
    copied, at = noisy >= 0, noisy.clip(min=0)
    doc, block = (np.take_along_axis(joined[key], at, 1) for key in ("doc", "block"))
    tiles = dit.tile_states(np.concatenate([np.where(copied, doc, -1), joined["doc"]], 1),
                            np.concatenate([block, joined["block"]], 1), noisy_length)
    tensors = {key: torch.from_numpy(array) for key, array in joined.items()}
    tokens = int(((joined["doc"] >= 0) & (joined["region"] != FILL)).sum())
    return Blocks(input_ids=tensors["ids"], position=tensors["position"], doc=tensors["doc"], block=tensors["block"],
                  target=tensors["target"], region=tensors["region"], noisy=torch.from_numpy(noisy),
                  group=tensors["group"], n_groups=groups, n_targets=int(joined["target"].sum()),
                  documents=sum(row["documents"] for row in rows), tokens=tokens, tiles=tiles)


def make_loader(rows, packs, batch_rows, noisy_length, *, num_workers, prefetch_factor):
    """DataLoader of Blocks over `packs`, an iterable of lists of at most batch_rows row numbers; [] is all padding."""
    def batch(some):
        return collate(some, batch_rows, rows.length, noisy_length, rows.documents.pad)
    return loading.over_packs(rows, packs, batch, num_workers, prefetch_factor)


def row_table(rows):
    """What each row holds -> {name: (n_rows,) ints}, of which a trainer adds up those of its optimizer steps.

    targets_0 to targets_3: in the loss, of each region; targets: of all. groups: blocks with targets. tokens: of text.
    noisy, clean: copies and tokens without padding. samples: problems. pairs: (query, key) that may attend.
    """
    documents = rows.documents
    table = {f"targets_{region}": rows.per_row(documents.per_document(documents.target & (documents.region == region)))
             for region in range(4)}
    pairs = [attended_pairs(collate([rows[r]], 1, rows.length, rows.noisy_length, documents.pad))
             for r in range(len(rows))]
    return table | {"targets": rows.n_targets, "groups": rows.per_row(documents.n_groups), "tokens": rows.tokens,
                    "noisy": rows.per_row(documents.noisy_lengths),
                    "clean": rows.per_row(documents.per_document(documents.live)),
                    "samples": np.array([len(m) for m in rows.members]), "pairs": np.array(pairs)}
