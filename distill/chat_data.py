"""Tokenised conversations as flat arrays on disk, the held-out split, and packed batches.

Rank 0 tokenises once; all ranks map the arrays. Samples are not padded.
"""
import hashlib
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from core import checkpoint, dist, json_files, packing
from core.chat import question, read_lines, read_records, to_json
from core.cli import UserError, require
from core.packing import Column, map_chunks
from core.json_files import Problem, Problems

PAD_LENGTH = 128        # length of padding documents: attention costs grow with its square
CHUNK = 1024            # lines tokenised together
HELD_OUT, HELD_OUT_FIELDS = "held_out.jsonl", ("tools", "teacher_messages", "trained_as")
# ids of create_data.py: digest of the input file x IDS_PER_FILE + line number; below JSON's 2**53
IDS_PER_FILE = 2**28
# columns of a table and their types
COLUMNS = {"tokens": np.int32, "trained": bool, **dict.fromkeys((
    "lengths", "targets", "lines", "keys", "sources", "offsets", "asked", "own"), np.int64)}

# ---- Sample table


def encode_chunk(path, encoder, limit, lines):
    """Tokenise numbered lines -> ({column of the table: array}, [Problem])."""
    problems, chunk = [], {name: [] for name in COLUMNS}
    for line, record in read_records(path, problems, lines):
        try:
            samples = encoder.encode(record)
        except UserError as error:
            problems.append(Problem(f"{path}:{line}", "template", error, path))
            continue
        for ids, mask, *own in samples:
            if len(ids) > limit:
                why = f"{len(ids)} tokens, more than {limit}"
                problems.append(Problem(f"{path}:{line}", "too_long", why, path))
                continue
            own, key = own[0] if own else len(ids), record.get("id")
            values = {"tokens": ids, "trained": mask, "lengths": [len(ids)], "own": [own],
                      # a sample's first token is not predicted
                      "targets": [sum(mask[:own]) - mask[0]], "lines": [line],
                      "keys": [key if type(key) is int and 0 <= key < 2**63 else -1],
                      "asked": [question_hash(record["messages"])]}
            for name in values:
                chunk[name] += values[name]
    return {name: np.array(chunk[name], kind) for name, kind in COLUMNS.items()}, problems


def question_hash(messages):
    """Hash of the last user message's text, ignoring white space; 0 without one."""
    words = " ".join(question(messages).split()).encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:7]) if words else 0


def write_table(folder, paths, encoder, limit, drop=(), processes=0, output_dir=None):
    """Tokenise files into a table in `folder`. Returns ([number of samples per file], text with the
    number of samples that each check of `drop` dropped). UserError lists all other unusable
    samples. encoder: chat.Encoder or teaching.PairEncoder. limit: most tokens of a sample.
    processes: to start for large files. output_dir: folder for the full list."""
    ends, samples = set(), []
    problems, folder = Problems(drop, output_dir), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    columns = {name: Column(folder / f"{name}.npy", kind) for name, kind in COLUMNS.items()}
    columns["offsets"].append([0])
    for source, path in enumerate(paths):
        first = len(columns["lengths"].array)
        encode = partial(encode_chunk, path, encoder, limit)
        for chunk, bad in map_chunks(encode, enumerate(read_lines(path), 1), CHUNK, processes):
            problems.add(bad)
            is_end = chunk["trained"] & ~np.append(chunk["trained"][1:], False)
            ends.update(chunk["tokens"][is_end].tolist())
            chunk["offsets"] = len(columns["tokens"].array) + np.cumsum(chunk["lengths"])
            chunk["sources"] = np.full(len(chunk["lengths"]), source)
            for name, column in columns.items():
                column.append(chunk[name])
        samples.append(len(columns["lengths"].array) - first)
        first_lines = {}        # {id: line}; a line may give several samples
        for line, key in zip(*(columns[name].array[first:].tolist()
                               for name in ("lines", "keys"))):
            same = line if key < 0 else first_lines.setdefault(key, line)
            require(same == line, f"{path}:{line}: has the same id {key} as {path}:{same}; give it "
                    "another id, or join files that create_data.py made of different inputs")
        if not samples[-1] and not problems.fatal:
            raise UserError(f"{path}: holds no usable conversations; {problems.settle()}")
    hint = "\nfix: shorten them, raise --max_length, or give --drop_bad too_long"
    dropped = problems.settle(hint * bool(problems.counts["too_long"]))
    checkpoint.write_json(folder / "sources.json",
                          {"paths": list(map(str, paths)), "ends": sorted(ends)})
    return samples, dropped


class ChatTable:
    """Memory-mapped samples: tokens, trained (n_tokens,); offsets (n + 1,). Per sample: lengths
    (tokens), targets (trained tokens), lines (in the file, from 1), keys (the record's id or -1),
    sources, asked (question_hash), own (the student's tokens); if the teacher's version follows
    them, the table is prompted. table[i]: (i, ids (n,) int64, trained (n,) bool), and own if
    prompted. paths: of the files. ends: ids that trained turns end with."""

    def __init__(self, folder):
        for path in Path(folder).glob("*.npy"):
            setattr(self, path.stem, np.load(path, mmap_mode="r"))
        vars(self).update(json_files.read_object(Path(folder) / "sources.json"))
        self.prompted = bool(self.own[0] < self.lengths[0])

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        tokens = slice(self.offsets[i], self.offsets[i + 1])
        sample = i, self.tokens[tokens].astype(np.int64), self.trained[tokens]
        return (*sample, int(self.own[i])) if self.prompted else sample

    def name(self, i):
        """The file and line of sample i."""
        return f"{self.paths[self.sources[i]]}:{self.lines[i]}"

    def fingerprint(self, numbers):
        """Short hash of the samples from the first to the last of these numbers; "" of none."""
        if not len(numbers):
            return ""
        tokens = slice(self.offsets[numbers[0]], self.offsets[numbers[-1] + 1])
        digest = hashlib.sha256()
        for values in (self.tokens[tokens], self.trained[tokens], np.asarray(numbers - numbers[0])):
            digest.update(np.ascontiguousarray(values))
        return digest.hexdigest()[:16]


def prepare_table(world, output_dir, paths, *settings):
    """Write a table below output_dir on rank 0, map it on every rank. Returns (ChatTable, number of
    samples in the first file). settings: write_table's, from `encoder` on."""
    def build():
        # a running job keeps its mapped files
        checkpoint.remove_named(output_dir, r"table-[0-9a-f]{8}")
        folder = Path(output_dir) / f"table-{uuid.uuid4().hex[:8]}"
        samples, dropped = write_table(folder, paths, *settings)
        if dropped:
            print(f"data       dropped: {dropped}", flush=True)
        return folder, samples[0]

    folder, n_train = dist.rank0(world, build)
    return ChatTable(folder), n_train


def samples_line(table, train_ids, eval_ids):
    """Log line with the number of samples, their lengths and their trained tokens."""
    lengths, targets = table.lengths[train_ids], table.targets[train_ids]
    return (f"samples    {len(train_ids)} to train, {len(eval_ids)} to validate; tokens mean "
            f"{lengths.mean():.1f} max {lengths.max()}; {targets.mean():.1f} of them trained")


# ---- Held-out conversations


def split_samples(table, n_train, group_size, share, seed):
    """(train, held out) sample numbers. Samples from n_train on are from a validation file. Without
    one, a seeded shuffle holds out a share of the groups, at least one: group_size neighbours by
    id, or by line if ids are missing. UserError."""
    if len(table) > n_train or not share:
        return np.arange(n_train), np.arange(n_train, len(table))
    keys, groups = table.keys, (table.lines - 1) // group_size
    if (keys >= 0).all():       # neighbours of the same input file: see IDS_PER_FILE
        groups = keys // IDS_PER_FILE * IDS_PER_FILE + keys % IDS_PER_FILE // group_size
    names = np.unique(groups)
    require(len(names) > 1, "all samples are one group, so none can be held out; give "
            "--eval_data_file, a smaller --group_size, or --validation_split 0")
    n = min(max(1, round(len(names) * share)), len(names) - 1)
    out = np.isin(groups, np.random.default_rng((seed, 2)).permutation(names)[:n])
    return np.flatnonzero(~out), np.flatnonzero(out)


def write_held_out(output_dir, table, train, held_out, prompt=None):
    """Write the samples `held_out` (numbers) to OUTPUT_DIR/held_out.jsonl, each line once. "id" is
    the line from 0 if ids are missing; "trained_as" a sample of `train` with the same question.
    Returns {"hash" of the file or "", "trained": number, "prompt": the teacher's}."""
    facts = {"hash": "", "trained": len(train), "prompt": prompt and list(prompt)}
    if not len(held_out):
        return facts
    ids = table.keys if (table.keys[held_out] >= 0).all() else table.lines - 1
    twins = {int(table.asked[i]): table.name(i) for i in reversed(train) if table.asked[i]}
    once = {int(table.lines[i]): i for i in reversed(held_out)}     # of one file
    text = ""
    path = table.paths[table.sources[held_out[0]]]
    lines = (numbered for numbered in enumerate(read_lines(path), 1) if numbered[0] in once)
    for line, record in read_records(path, [], lines):
        i = once[line]
        record["trained_as"] = twins.get(int(table.asked[i]))
        row = {"id": int(ids[i]), "messages": record["messages"]}
        text += to_json(row | {name: record[name] for name in HELD_OUT_FIELDS
                               if record.get(name)}) + "\n"
    checkpoint.write_text(Path(output_dir) / HELD_OUT, text)
    return facts | {"hash": hashlib.sha256(text.encode()).hexdigest()}


# ---- Packed batches


@dataclass
class PackedChats(packing.Batch):
    """B conversations of S tokens in all on one flat axis; tensors int64, cu_seqlens int32."""
    input_ids: torch.Tensor         # (S,)
    position_ids: torch.Tensor      # (S,) position within its conversation
    cu_seqlens: torch.Tensor        # (B + 1,) boundaries
    rows: torch.Tensor              # (R,) positions that predict a trained token
    targets: torch.Tensor           # (R,) the tokens they predict
    longest: int                    # longest conversation, rounded up to a multiple of 128
    samples: tuple                  # sample numbers in the table, for error messages
    teacher: object = None          # PackedChats of the same R targets in the teacher's version
    kept: bool = False              # True for --keep: the base scores it


def collate(samples, pad_to=0, pad_id=0):
    """List of samples -> PackedChats; an empty list gives one padding token without targets.
    pad_to: tokens of the flat axis."""
    numbers = tuple(number for number, _, _ in samples)
    padding = max(pad_to - sum(len(ids) for _, ids, _ in samples), 0 if samples else 1)
    for start in range(0, padding, PAD_LENGTH):
        n = min(PAD_LENGTH, padding - start)
        samples = [*samples, (None, np.full(n, pad_id, np.int64), np.zeros(n, bool))]
    seqlens = [len(ids) for _, ids, _ in samples]
    bounds = np.cumsum([0, *seqlens])
    ids, trained = (np.concatenate(column) for column in list(zip(*samples))[1:])
    trained[bounds[:-1]] = False        # a sample's first token is not predicted
    rows = np.flatnonzero(trained) - 1
    positions = np.arange(len(ids)) - np.repeat(bounds[:-1], seqlens)
    tensors = (ids, positions, bounds.astype(np.int32), rows, ids[rows + 1])
    return PackedChats(*map(torch.from_numpy, tensors), -(-max(seqlens) // 128) * 128, numbers)
