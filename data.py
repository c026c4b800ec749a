"""Conversations and codec codes -> labelled, packed batches for Higgs-Audio V2.

Rank 0 tokenises every sample once into a table of flat arrays on disk; all ranks and loader workers map that table, so
memory does not grow with ranks or workers. A worker turns a list of sample numbers into one PackedBatch: delay pattern,
labels (shifted by one already) and every index the GPU needs. Nothing is padded per sample.

Labels follow boson-ai/higgs-audio's collator: a clip of T frames takes T + 9 rows, codebook k is delayed by k rows, its
T codes and one end-of-stream are trained, begin-of-stream and the fill never. A trained assistant turn's text,
<|audio_out_bos|>, <|audio_eos|> and <|eot_id|> are text targets.

No worker imports the model or touches CUDA. Copy with it: conversations.py, codes.py, loading.py, indexing.py,
parallel.py, checkpoint.py, watchdog.py.
"""
import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
import time
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from common import loading, parallel
from common.indexing import Column, Lists, in_order, token_lists
from common.parallel import UserError
from common.watchdog import ignore_in_worker
from speech.codes import FRAME_RATE, CodeReader, ensure_codes
from speech.conversations import Clip, read_chunks

IGNORE = -100
PAD_LENGTH = 128        # padding comes in samples this short: attention costs the square of a sample's length
CHUNK = 2048            # entries of a file that are tokenised together
ROWS = 2**18            # samples whose columns are in memory together
CONTROL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                  "<|eom_id|>", "<|audio_bos|>", "<|audio_eos|>", "<|audio_out_bos|>", "<|AUDIO|>", "<|AUDIO_OUT|>")


@dataclass
class TokenIds:
    """Ids the trainer needs, from the tokenizer and the model's config."""
    audio: int              # <|AUDIO_OUT|>, stands for one row of codes
    delay: int              # marks the last num_codebooks - 1 rows of a clip
    pad: int
    num_codebooks: int
    stream_bos: int
    stream_eos: int


def token_ids(tokenizer, config):
    """TokenIds of a native Higgs config; raises UserError when tokenizer and model do not belong together."""
    for name in CONTROL_TOKENS:
        if tokenizer.convert_tokens_to_ids(name) in (None, tokenizer.unk_token_id):
            raise UserError(f"the tokenizer in --model_path has no token {name}: it is not Higgs-Audio's")
    audio = tokenizer.convert_tokens_to_ids("<|AUDIO_OUT|>")
    if audio != config.audio_token_id or len(tokenizer) > config.vocab_size:
        raise UserError(f"tokenizer and model disagree: <|AUDIO_OUT|> is {audio} and {config.audio_token_id}, "
                        f"{len(tokenizer)} tokens and {config.vocab_size}")
    return TokenIds(audio, config.audio_delay_token_id, config.pad_token_id, config.num_codebooks,
                    config.audio_stream_bos_id, config.audio_stream_eos_id)


# ---------------------------------------------------------------------------------------------------------------------
# Delay pattern and labels


def delay_rows(codes, bos, eos):
    """(T, K) codes -> (T + K + 1, K) model inputs: [BOS, codes, EOS] with codebook k shifted down by k rows."""
    frames, books = codes.shape
    rows = np.full((frames + books + 1, books), eos, np.int64)
    for k in range(books):
        rows[:k + 1, k] = bos
        rows[k + 1:k + 1 + frames, k] = codes[:, k]
    return rows


def delay_labels(codes, eos):
    """(T, K) codes -> (T + K + 1, K) labels aligned with delay_rows: T codes and one EOS per codebook, else -100."""
    frames, books = codes.shape
    labels = np.full((frames + books + 1, books), IGNORE, np.int64)
    for k in range(books):
        labels[k + 1:k + 1 + frames, k] = codes[:, k]
        labels[k + 1 + frames, k] = eos
    return labels


# ---------------------------------------------------------------------------------------------------------------------
# Sample table


def conversation_pieces(sample):
    """[(text or Clip, labelled)] in the order of the token stream: the official template, turn by turn."""
    pieces = [("<|begin_of_text|>", False)]
    for number, turn in enumerate(sample.turns):
        pieces.append((f"<|start_header_id|>{turn.role}<|end_header_id|>\n\n", False))
        text = ""
        for part in turn.parts:
            if isinstance(part, Clip):
                text += " " if turn.role == "system" else ""        # as the native template puts a scene's clip
                if text:
                    pieces.append((text, turn.trained))
                text = ""
                pieces += [("<|audio_out_bos|>", turn.trained), (part, turn.trained), ("<|audio_eos|>", turn.trained)]
            else:
                text += part
        if text:
            pieces.append((text, turn.trained))
        followed = number + 1 < len(sample.turns) and sample.turns[number + 1].role == "assistant"
        pieces.append(("<|eom_id|>" if turn.role == "assistant" and followed else "<|eot_id|>", turn.trained))
    return pieces


class Clips:
    """Sequence of the distinct clips of a TableBuilder in order of first use; a Clip is made when it is asked for.

    numbers: (n,) of each entry, which is a clip of one chunk, the number of its clip.
    """

    def __init__(self, paths, cuts, digests):
        self.paths, self.ends, self.cuts = paths.values.array(), paths.offsets.array(), cuts.array()
        digests = digests.array()
        order, new = np.lexsort((digests[:, 1], digests[:, 0])), np.ones(len(digests), bool)
        high, low = digests[:, 0][order], digests[:, 1][order]      # equal ones stand side by side, the earliest first
        new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        first = np.empty(len(order), np.int32)
        first[order] = order[new][np.cumsum(new) - 1]
        del order, new, high, low
        own = first == np.arange(len(first), dtype=np.int32)
        self.entries = np.flatnonzero(own).astype(np.int32)
        self.numbers = (np.cumsum(own, dtype=np.int32) - 1)[first]

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, i):
        """Clip i, or the list of Clips of a slice."""
        if not isinstance(i, slice):
            i = range(len(self))[i]
            return self[i:i + 1][0]
        entries = self.entries[i]
        cuts, starts, stops = (values.tolist() for values in (
            self.cuts[entries], self.ends[entries], self.ends[entries + 1]))
        return [Clip(os.fsdecode(self.paths[start:stop].tobytes()), *_unpacked(*cut))
                for start, stop, cut in zip(starts, stops, cuts)]


def _packed(clip):
    """Clip -> (offset, duration, seconds, whole numbers among the first two) as floats; None is NaN."""
    offset, duration = (math.nan if value is None else float(value) for value in (clip.offset, clip.duration))
    return offset, duration, clip.seconds, isinstance(clip.offset, int) + 2 * isinstance(clip.duration, int)


def _unpacked(offset, duration, seconds, whole):
    """(offset, duration, seconds) of a Clip: code_cache tells 3 from 3.0."""
    offset, duration = (None if math.isnan(value) else int(value) if int(whole) & bit else value
                        for value, bit in ((offset, 1), (duration, 2)))
    return offset, duration, seconds


def _clip_digest(path, cut):
    """128 bits of what makes a clip: the same for clips that are equal."""
    return hashlib.blake2b(path + f"\0{cut[0]}+{cut[1]}".encode() * (cut[0] == cut[0]), digest_size=16).digest()


class TableBuilder:
    """Tokenised samples in columns on disk; clips holds each distinct clip once, in order of first use.

    folder: an empty one, which write() makes the table; None: a temporary one.
    """

    def __init__(self, tokenizer, ids, folder=None):
        self.tokenizer, self.ids, self.lists = tokenizer, ids, token_lists(tokenizer)
        self.control = {tokenizer.convert_tokens_to_ids(t): t for t in CONTROL_TOKENS}
        self.control[ids.delay] = tokenizer.convert_ids_to_tokens(ids.delay)
        self._known, self._spelled, self._clips = {}, {}, None
        self.folder = Path(folder or tempfile.mkdtemp())
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        (self.folder / "clips").mkdir(parents=True)
        self.tokens = Lists(self.folder, "tokens", "token_offsets", np.int32)
        self.labelled = Column(self.folder / "labelled.npy", bool)
        self.names = Lists(self.folder, "names", "name_offsets", np.uint8)
        self.text_targets = Column(self.folder / "text_targets.npy", np.int64)
        # clips are entries, a distinct one a chunk, until all are known
        self.entries = Lists(self.folder / "clips", "entries", "offsets", np.int32)     # of the samples' clips
        self.trained = Column(self.folder / "clips" / "trained.npy", bool)
        self.paths = Lists(self.folder / "clips", "paths", "path_offsets", np.uint8)
        self.cuts = Column(self.folder / "clips" / "cuts.npy", np.float64, 4)
        self.digests = Column(self.folder / "clips" / "digests.npy", np.uint64, 2)

    def __len__(self):
        return len(self.tokens)

    def add(self, samples, problems):
        """Tokenise a list of Samples; one that smuggles control tokens in its text goes to the list `problems`."""
        self.append(self.chunk(samples, problems))

    def chunk(self, samples, problems):
        """{name: array} of Samples, for `append`, which may be that of another process's builder."""
        good = []
        for sample in samples:
            if smuggled := self._smuggled(sample):
                problems.append(f"{sample.name}: text contains the control token {smuggled}; remove it")
            else:
                good.append(sample)
        streams = [conversation_pieces(sample) for sample in good]
        pieces, labels = zip(*itertools.chain.from_iterable(streams)) if good else ((), ())
        starts = np.cumsum([0, *map(len, streams)])[:-1]
        new = list({text for text in pieces if type(text) is str and text not in self._known})
        known = {**self._known, **dict(zip(new, self.lists(new)))}
        for text in new:        # template pieces repeat in every sample, the samples' own text does not
            if text.startswith("<|"):
                self._known[text] = known[text]
        hole = [self.ids.audio]
        parts = [known[piece] if type(piece) is str else hole for piece in pieces]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        spoken = np.array([type(piece) is Clip for piece in pieces], bool)
        labels = np.array(labels, bool)
        clips = {}
        entries = [clips.setdefault(clip, len(clips)) for clip in itertools.compress(pieces, spoken)]
        paths, cuts = [os.fsencode(clip.path) for clip in clips], [_packed(clip) for clip in clips]
        digests, names = b"".join(map(_clip_digest, paths, cuts)), [s.name.encode("utf-8", "backslashreplace")
                                                                    for s in good]

        def per_sample(values):
            return np.add.reduceat(values, starts, dtype=np.int64) if good else np.empty(0, np.int64)

        return {"tokens": np.fromiter(itertools.chain.from_iterable(parts), np.int32, lengths.sum()),
                "token_counts": per_sample(lengths), "labelled": np.repeat(labels, lengths),
                "text_targets": per_sample(lengths * (labels & ~spoken)),
                "entries": np.array(entries, np.int32), "entry_counts": per_sample(spoken), "trained": labels[spoken],
                "names": _bytes(names), "name_counts": _sizes(names), "paths": _bytes(paths),
                "path_counts": _sizes(paths), "cuts": np.array(cuts).reshape(-1, 4),
                "digests": np.frombuffer(digests, np.uint64).reshape(-1, 2)}

    def append(self, chunk):
        """Add a chunk to the columns."""
        self.tokens.append(chunk["tokens"], chunk["token_counts"])
        self.labelled.append(chunk["labelled"])
        self.names.append(chunk["names"], chunk["name_counts"])
        self.text_targets.append(chunk["text_targets"])
        self.entries.append(chunk["entries"] + len(self.paths), chunk["entry_counts"])
        self.trained.append(chunk["trained"])
        self.paths.append(chunk["paths"], chunk["path_counts"])
        self.cuts.append(chunk["cuts"])
        self.digests.append(chunk["digests"])
        self._clips = None

    def _smuggled(self, sample):
        """The control token that a turn's own text spells, "" if none."""
        for turn in sample.turns:
            text = turn.text
            if "<|" in text:
                if text not in self._spelled:
                    if len(self._spelled) >= 1000:
                        self._spelled.clear()
                    found = [self.control[token] for token in self.lists([text])[0] if token in self.control]
                    self._spelled[text] = found[0] if found else ""
                if self._spelled[text]:
                    return self._spelled[text]
        return ""

    @property
    def clips(self):
        """Clips of all samples."""
        if self._clips is None:
            self._clips = Clips(self.paths, self.cuts, self.digests)
        return self._clips

    def clips_of(self, i):
        """Numbers of sample i's clips."""
        return self.clips.numbers[self.entries[i]]

    def write(self, folder, cache_folder, shards, where):
        """Make the table in `folder`; ends the builder. where: (n_clips, 3) int64 of code_cache, in order of clips."""
        folder, books, numbers = Path(folder), self.ids.num_codebooks, self.clips.numbers
        folder.mkdir(parents=True, exist_ok=True)
        entries, trained, offsets = self.entries.values.array(), self.trained.array(), self.entries.offsets.array()
        columns = {name: Column(self.folder / f"{name}.npy", kind) for name, kind in (
            ("clips", np.int32), ("lengths", np.int64), ("frames", np.int64), ("audio_targets", np.int64))}
        for start in range(0, len(self), ROWS):
            stop = min(start + ROWS, len(self))
            bounds = offsets[start:stop + 1]
            part = slice(bounds[0], bounds[-1])
            clips, bounds = numbers[entries[part]], bounds - bounds[0]
            frames = where[clips, 2]

            def per_sample(values, bounds=bounds):      # of its clips; it may have none
                return np.diff(np.concatenate([[0], np.cumsum(values)])[bounds])

            columns["clips"].append(clips)
            columns["lengths"].append(np.diff(self.tokens.offsets.array()[start:stop + 1]) + per_sample(frames + books))
            columns["frames"].append(per_sample(frames))
            columns["audio_targets"].append(per_sample(np.where(trained[part], books * (frames + 1), 0)))
        for column in (*columns.values(), self.tokens.values, self.tokens.offsets, self.labelled, self.names.values,
                       self.names.offsets, self.text_targets):
            column.close()
        shutil.copyfile(self.entries.offsets.path, self.folder / "clip_offsets.npy")
        np.save(self.folder / "where.npy", where)
        (self.folder / "codes.json").write_text(json.dumps({"folder": str(cache_folder), "shards": shards}))
        shutil.rmtree(self.folder / "clips", ignore_errors=True)        # still mapped, which NFS minds
        if folder != self.folder:
            for path in self.folder.iterdir():
                shutil.move(path, folder / path.name)


def _bytes(texts):
    return np.frombuffer(b"".join(texts), np.uint8)


def _sizes(texts):
    return np.array([len(text) for text in texts], np.int64)


class Table:
    """Memory-mapped sample table; every attribute is a numpy array named as in TableBuilder.write."""

    def __init__(self, folder):
        for path in Path(folder).glob("*.npy"):
            empty = path.stat().st_size <= 128      # a header alone; an empty array cannot be mapped
            setattr(self, path.stem, np.load(path, mmap_mode=None if empty else "r"))
        codes = json.loads((Path(folder) / "codes.json").read_text())
        self.reader = CodeReader(codes["folder"], codes["shards"])

    def __len__(self):
        return len(self.lengths)

    def fingerprint(self, numbers):
        """Short hash of what these (sorted) samples are to the model: tokens, labels, clip lengths, their numbers."""
        if not len(numbers):
            return ""
        first, stop = numbers[0], numbers[-1] + 1
        tokens = slice(self.token_offsets[first], self.token_offsets[stop])
        frames = self.where[self.clips[self.clip_offsets[first]:self.clip_offsets[stop]], 2]
        digest = hashlib.sha256()
        for values in (self.tokens[tokens], self.labelled[tokens], frames, numbers - first):
            digest.update(np.ascontiguousarray(values))
        return digest.hexdigest()[:16]

    def name(self, i):
        """Where sample i stands in the user's files."""
        return bytes(self.names[self.name_offsets[i]:self.name_offsets[i + 1]]).decode()


def split_validation(n, share, seed):
    """(train, validation) sample numbers: a seeded shuffle, never the file's tail. At least one each when n > 1."""
    held_out = min(max(1, round(n * share)), n - 1) if share > 0 else 0
    order = np.random.default_rng((seed, 2)).permutation(n)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def split_samples(args, n_train, n):
    """(train, validation) sample numbers of n samples, of which those from n_train on came as validation data."""
    if args.disable_eval:
        return np.arange(n_train), np.arange(0)
    if n > n_train:
        return np.arange(n_train), np.arange(n_train, n)
    return split_validation(n_train, args.validation_split, args.seed)


def within_length(table, numbers, limits, drop):
    """Sample numbers that fit every limit {flag: tokens}. Longer ones are dropped, or raise UserError naming them."""
    flag, limit = min(limits.items(), key=lambda item: item[1])
    long = numbers[table.lengths[numbers] > limit]
    if len(long) and not drop:
        lines = [f"{table.name(i)}: {table.lengths[i]} tokens ({table.frames[i] / FRAME_RATE:.1f} s of audio), more "
                 f"than {flag} {limit}" for i in long]
        raise UserError(parallel.problem_text(lines) + "\nfix: shorten them, raise the limit, or pass --drop_too_long")
    return numbers[table.lengths[numbers] <= limit]


# ---------------------------------------------------------------------------------------------------------------------
# From the user's files to the table


def read_all(train, held_out, tokenizer, ids, task_type, ref_in_system, folder=None, processes=0):
    """Read and tokenise the training and the (optional) validation source: (TableBuilder, number of training samples).

    folder: of TableBuilder. processes: beside this one, for sources of many samples. Raises UserError with every sample
    that cannot be used, or when a source is empty.
    """
    builder, problems, counts = TableBuilder(tokenizer, ids, folder), [], []
    for source in (train, held_out):
        before = len(builder)

        def chunks(first, step, source=source):
            for samples, wrong in read_chunks(source, CHUNK, first, step, task_type, ref_in_system):
                yield builder.chunk(samples, wrong), wrong

        def take(part):
            builder.append(part[0])
            problems.extend(part[1])

        if source:
            in_order(chunks, processes, take)
            if not problems and len(builder) == before:
                raise UserError(f"{source}: holds no samples")
        counts.append(len(builder) - before)
    if problems:
        raise UserError(parallel.problem_text(problems))
    return builder, counts[0]


def prepare_table(world, args, tokenizer, ids, codec_dir):
    """All between the user's files and training, on every rank: read, encode what is new, write and map the table.

    args: the trainer's flags. Returns (Table, numbers of the training samples, numbers of the validation samples).
    """
    builder, start = None, time.monotonic()
    folder = Path(args.output_dir) / f"table-{uuid.uuid4().hex[:8]}"        # rank 0's counts

    def read():
        nonlocal builder
        for old in Path(args.output_dir).glob("table-*"):       # a running job keeps what it has mapped
            shutil.rmtree(old, ignore_errors=True)
        builder, n_train = read_all(args.train_data_file or args.train_data_dir,
                                    args.eval_data_file or args.eval_data_dir, tokenizer, ids, args.task_type,
                                    args.ref_audio_in_system_message, folder, args.preprocess_num_proc)
        print(f"data       {n_train} training samples, {len(builder) - n_train or 'no'} separate validation samples, "
              f"{len(builder.clips)} distinct clips (read in {time.monotonic() - start:.1f} s)", flush=True)
        return n_train, len(builder)

    def write():
        builder.write(folder, *codes)
        return folder

    try:
        n_train, n = parallel.rank0_first(world, read)
        codes = ensure_codes(world, builder.clips if builder else [], codec_dir,
                             args.code_cache or Path(args.output_dir) / "codes", ids.num_codebooks,
                             args.preprocess_num_proc, args.wait_timeout)
        table = Table(parallel.rank0_first(world, write))
    except BaseException:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return table, *split_samples(args, n_train, n)


# ---------------------------------------------------------------------------------------------------------------------
# Packed batches


@dataclass
class PackedBatch:
    """B samples of S tokens in all, A of them audio rows, on one flat axis. All tensors int64 unless said.

    The model keeps hidden states in modality order (text rows first, then audio rows), so that each FFN works on one
    contiguous slice; attention permutes to sequence order and back.
    """
    input_ids: torch.Tensor         # (S,) sequence order; audio rows hold the placeholder ids of the native processor
    position_ids: torch.Tensor      # (S,) position within its sample
    cu_seqlens: torch.Tensor        # (B + 1,) int32 sample boundaries
    audio_ids: torch.Tensor         # (A, 8) delayed codes
    audio_pos: torch.Tensor         # (A,) sequence positions of audio rows
    text_pos: torch.Tensor          # (S - A,) sequence positions of text rows
    seq_index: torch.Tensor         # (S,) modality-order row of each sequence position
    audio_rows: torch.Tensor        # (R,) modality-order rows that predict audio
    audio_targets: torch.Tensor     # (R, 8) next row's codes, -100 where not trained
    text_rows: torch.Tensor         # (Q,) modality-order rows that predict text
    text_targets: torch.Tensor      # (Q,)
    longest: int                    # longest sample, rounded up to 128 so that compiled code sees few values
    seqlens: tuple                  # B python ints: sample lengths, for attention without a variable-length kernel
    samples: tuple                  # sample numbers in the table, for naming them in errors
    counts: dict                    # python ints: tokens, frames, samples, padding, audio_targets, text_targets

    __reduce__ = loading.reduce
    to = loading.to


class SpeechSamples(Dataset):
    """Samples of a Table, assembled on demand: numpy arrays of one sample by its number in the table."""

    def __init__(self, table, ids):
        self.table, self.ids = table, ids

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i):
        """The sample's number and what assemble makes of it."""
        t = self.table
        tokens = slice(t.token_offsets[i], t.token_offsets[i + 1])
        clips = t.clips[t.clip_offsets[i]:t.clip_offsets[i + 1]]
        codes = [t.reader.codes(*t.where[clip].tolist()) for clip in clips]
        return {"number": i, **assemble(t.tokens[tokens].astype(np.int64), t.labelled[tokens], codes, self.ids)}


def assemble(tokens, labelled, codes, ids):
    """One sample as the model sees it: each of its clips takes the place of its <|AUDIO_OUT|>, in delayed rows.

    tokens (t,) int64, labelled (t,) bool, codes: one (T, 8) array a clip. Returns a dict of input_ids (n,), is_audio
    (n,), text_labels (n,), audio_ids (a, 8), audio_labels (a, 8).
    """
    holes = np.flatnonzero(tokens == ids.audio)
    repeats = np.ones(len(tokens), np.int64)
    rows, labels, placeholders = [], [], []
    for hole, clip in zip(holes, codes):
        rows.append(delay_rows(clip, ids.stream_bos, ids.stream_eos))
        labels.append(delay_labels(clip, ids.stream_eos) if labelled[hole] else np.full_like(rows[-1], IGNORE))
        repeats[hole] = len(rows[-1])
        placeholders.append(np.full(len(rows[-1]), ids.audio))
        placeholders[-1][-(ids.num_codebooks - 1):] = ids.delay
    is_audio = np.repeat(tokens == ids.audio, repeats)
    input_ids = np.repeat(tokens, repeats)
    text_labels = np.where(np.repeat(labelled, repeats) & ~is_audio, input_ids, IGNORE)
    empty = np.empty((0, ids.num_codebooks), np.int64)
    if placeholders:
        input_ids[is_audio] = np.concatenate(placeholders)
    return {"input_ids": input_ids, "is_audio": is_audio, "text_labels": text_labels,
            "audio_ids": np.concatenate([empty, *rows]), "audio_labels": np.concatenate([empty, *labels])}


def collate(samples, ids, pad_to=0):
    """List of sample dicts -> PackedBatch. pad_to: fill the flat sequence to this many tokens with padding samples.

    An empty list gives a batch of padding that has no targets and weighs nothing.
    """
    total = sum(len(s["input_ids"]) for s in samples)
    padding = max(pad_to - total, 0 if samples else 1)
    none = np.empty((0, ids.num_codebooks), np.int64)
    for start in range(0, padding, PAD_LENGTH):
        n = min(PAD_LENGTH, padding - start)
        samples = [*samples, {"number": None, "input_ids": np.full(n, ids.pad), "is_audio": np.zeros(n, bool),
                              "text_labels": np.full(n, IGNORE), "audio_ids": none, "audio_labels": none}]
    seqlens = [len(s["input_ids"]) for s in samples]
    joined = {key: np.concatenate([s[key] for s in samples]) for key in samples[0] if key != "number"}
    is_audio, next_text = joined["is_audio"], np.append(joined["text_labels"][1:], IGNORE)
    next_text[np.cumsum(seqlens) - 1] = IGNORE                          # a sample's last token predicts nothing
    # row 0 of a clip is never a label, so shifting the joined rows cannot reach into the next clip
    next_audio = np.concatenate([joined["audio_labels"][1:], np.full((1, ids.num_codebooks), IGNORE)])
    next_audio = next_audio[:len(joined["audio_labels"])]
    text_pos, audio_pos = np.flatnonzero(~is_audio), np.flatnonzero(is_audio)
    seq_index = np.empty(len(is_audio), np.int64)
    seq_index[np.concatenate([text_pos, audio_pos])] = np.arange(len(is_audio))
    text_at, audio_at = np.flatnonzero(next_text != IGNORE), np.flatnonzero((next_audio != IGNORE).any(axis=1))
    numbers = tuple(s["number"] for s in samples if s["number"] is not None)
    clips = int((joined["audio_ids"] == ids.stream_bos).all(axis=1).sum())      # one all-BOS row opens each clip
    counts = {"tokens": total, "samples": len(numbers), "padding": padding,
              "frames": len(audio_pos) - clips * (ids.num_codebooks + 1),
              "audio_targets": int((next_audio != IGNORE).sum()), "text_targets": len(text_at)}
    tensors = [joined["input_ids"], np.concatenate([np.arange(n) for n in seqlens]),
               np.cumsum([0, *seqlens], dtype=np.int32), joined["audio_ids"], audio_pos, text_pos, seq_index,
               audio_at + len(text_pos), next_audio[audio_at], seq_index[text_at], next_text[text_at]]
    return PackedBatch(*map(torch.from_numpy, tensors), -(-max(seqlens) // 128) * 128, tuple(seqlens), numbers, counts)


def make_loader(table, ids, packs, *, num_workers, prefetch_factor, pad_to=0):
    """DataLoader of PackedBatches over `packs`, an iterable of lists of sample numbers."""
    return DataLoader(SpeechSamples(table, ids), batch_sampler=packs, num_workers=num_workers,
                      collate_fn=lambda samples: collate(samples, ids, pad_to),
                      prefetch_factor=prefetch_factor if num_workers else None, persistent_workers=num_workers > 0,
                      multiprocessing_context="fork" if num_workers else None,      # workers share the mapped table
                      worker_init_fn=ignore_in_worker,
                      generator=torch.Generator())      # else each loader would draw from the generator of the dropout
