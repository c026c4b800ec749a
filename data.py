"""Your files -> labelled, packed batches of conversations and codec codes.

Rank 0 tokenises every sample once into a table on disk (speech/dataset.py); clips are encoded once
into a cache (speech/codes.py). A thread turns a list of sample numbers into one PackedBatch:
delay pattern, labels (shifted by one) and every index the GPU needs.
"""
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from core import packing
from core.cli import plural, require
from core.dist import rank0
from core.json_files import Problems
from speech.conversations import FRAME_RATE
from speech.dataset import (CodeReader, ensure_codes, is_prepared, last_clips, new_builder,
                            problem_of, read_all)
from speech.labels import IGNORE

PAD_LENGTH = 128        # tokens of a padding sample: few, as attention costs grow with the square


class Table:
    """Memory-mapped sample table: numpy arrays named as in TableBuilder.write, and sources,
    [{path, weight, held_out, first, stop}], whose samples follow each other."""

    def __init__(self, folder):
        for path in Path(folder).glob("*.npy"):
            setattr(self, path.stem, np.load(path, mmap_mode="r"))
        codes = json.loads((Path(folder) / "codes.json").read_text())
        cache = os.path.normpath(os.path.join(folder, codes["folder"]))
        self.reader, self.sources = CodeReader(cache, codes["shards"]), codes["sources"]

    def __len__(self):
        return len(self.lengths)

    def fingerprint(self, numbers):
        """Short hash of tokens, labels, clip lengths and relative numbers of (sorted) samples,
        then " audio " and a hash of the codes' checksums."""
        if not len(numbers):
            return ""
        first, stop = numbers[0], numbers[-1] + 1
        tokens = slice(self.token_offsets[first], self.token_offsets[stop])
        where = self.where[self.clips[self.clip_offsets[first]:self.clip_offsets[stop]]]
        frames, checksums = where[:, 2], where[where[:, 2] > 0, 3]
        digest = hashlib.sha256()
        for values in (self.tokens[tokens], self.labelled[tokens], frames, numbers - first):
            digest.update(np.ascontiguousarray(values))
        if (checksums < 0).any():       # incomplete in a dry run
            return digest.hexdigest()[:16]
        return f"{digest.hexdigest()[:16]} audio {hashlib.sha256(checksums).hexdigest()[:16]}"

    def name(self, i):
        """Place of sample i in the user's files."""
        return bytes(self.names[self.name_offsets[i]:self.name_offsets[i + 1]]).decode()


def make_table(world, tokenizer, ids, sources, encoding, output_dir, dry=False):
    """Table of the samples of Sources, on every rank. Rank 0 reads them, all ranks encode new
    clips, rank 0 writes the table, and all map it. A folder of prepare_tts.py is only mapped. dry:
    file headers give the frames of new clips, and output_dir gets no list of bad samples."""
    if any(is_prepared(path) for path, *_ in sources.files):
        from speech.prepare_tts import check_prepared   # an option that is off imports nothing
        table = Table(rank0(world, check_prepared, sources, tokenizer, ids, encoding.codec_dir))
        for source in table.sources:
            source["weight"] *= sources.files[0][1]
        return table
    require(not is_prepared(output_dir), f"--output_dir {output_dir}: is a folder of "
            "prepare_tts.py; give another one")
    of_rows, of_audio = (Problems(sources.drop, None if dry else output_dir) for _ in range(2))

    def report(problems):
        if dropped := problems.settle():
            print(f"data       dropped: {dropped}", flush=True)

    def read():
        read_all(builder, sources, of_rows, Path(output_dir) / "data")
        if not dry:
            report(of_rows)     # before hours of encoding

    def write():
        problems = of_rows if dry else of_audio     # a dry run reports both together
        if codes.errors or ids.min_frames > 1:      # of TTS 3, any clip may be too short
            from speech.codes import find_bad_audio
            problems.add(find_bad_audio(builder, codes))
        report(problems)
        # absolute: the table takes a relative path as relative to its folder
        builder.write(os.path.abspath(codes.folder), codes.shards, codes.where)
        return builder.folder

    with new_builder(world, tokenizer, ids, output_dir) as (builder, clips):
        rank0(world, read)
        if dry:
            from speech.codes import plan_codes     # an option that is off imports nothing
            codes = plan_codes(clips, encoding)
        else:
            codes = ensure_codes(world, clips, encoding)
        return Table(rank0(world, write))


# ---- Split into training and validation samples


def split_validation(n, share, seed):
    """(train, validation) numbers of n samples, drawn by the seed: at least one each when n > 1.

    share: default 0.5 %, or in a small set 5 %, at most 16: enough to choose a best checkpoint."""
    if share is None:
        share = max(0.005, min(0.05, 16 / max(1, n)))
    held_out = min(max(1, round(n * share)), n - 1) if share > 0 else 0
    order = np.random.default_rng((seed, 2)).permutation(n)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def split_samples(table, share, seed):
    """(train, validation) sample numbers, sorted. share, seed: as in split_validation, which is
    used if there is no validation data. Weight 2 repeats each number of a source; weight 0.3
    draws that share of them by the seed."""
    is_held_out = np.zeros(len(table), bool)
    for source in table.sources:
        is_held_out[source["first"]:source["stop"]] = source["held_out"]
    train, held_out = (np.flatnonzero(table.audible & (is_held_out == wanted))
                       for wanted in (False, True))
    if not len(held_out):
        of_train, of_held_out = split_validation(len(train), share, seed)
        train, held_out = train[of_train], train[of_held_out]
    mixed = []
    for i, source in enumerate(table.sources):
        samples = train[(train >= source["first"]) & (train < source["stop"])]
        whole, fraction = divmod(source["weight"], 1)
        order = np.random.default_rng((seed, 3, i)).permutation(samples)
        mixed += [*[samples] * int(whole), order[:round(fraction * len(samples))]]
    return np.sort(np.concatenate(mixed)), held_out


def usable_samples(table, train, held_out, *, max_length, max_tokens, drop, say=print,
                   output_dir=None):
    """(training, validation) numbers of usable samples: short enough, and no audio in both parts.

    max_length: --max_length, or by default the model's positions. max_tokens:
    --max_tokens_per_batch, 0 = no limit. drop: leave longer samples out; otherwise raise UserError.
    say: prints how many are used and dropped. output_dir: where to list them; None: nowhere."""
    _, audio = last_clips(table.clips, table.clip_offsets, table.where)
    twice = np.isin(audio[train], audio[held_out])
    if twice.any():
        say(f"data       dropped from training: {plural(twice.sum(), 'sample')} whose audio is in "
            "the validation data")
    train = train[~twice]
    limit, flag = min((value, name) for value, name in (
        (max_length, "--max_length"), (max_tokens or np.inf, "--max_tokens_per_batch")))
    numbers = np.union1d(train, held_out)
    too_long = Problems(("too_long",) if drop else (), output_dir).add([problem_of(
        table, i, "too_long", f"{table.lengths[i]} tokens ({table.frames[i] / FRAME_RATE:.1f} s "
        f"of audio), more than {flag} {limit}") for i in numbers[table.lengths[numbers] > limit]])
    if dropped := too_long.settle("\nfix: shorten them, raise the limit, or pass --drop_too_long"):
        say(f"data       dropped: {dropped}")
    train, held_out = (numbers[table.lengths[numbers] <= limit] for numbers in (train, held_out))
    require(len(train), "no training samples are left that can be used")
    lengths, hours = table.lengths[train], table.frames[train].sum() / FRAME_RATE / 3600
    say(f"samples    {len(train)} to train, {len(held_out)} to validate; tokens mean "
        f"{lengths.mean():.0f} max {lengths.max()}; {hours:.2f} h of audio")
    return train, held_out


# ---- Batches


@dataclass
class PackedBatch(packing.Batch):
    """B samples on one flat axis of S tokens, A of them audio rows. Tensors are int64 unless noted.

    V2 keeps hidden states in modality order (text rows first, then audio rows), so that each FFN
    works on one contiguous slice; attention permutes to sequence order and back."""
    input_ids: torch.Tensor         # (S,) sequence order; audio rows hold native placeholders
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
    longest: int                    # longest sample, rounded up to a multiple of 128
    seqlens: tuple                  # B python ints: sample lengths, for attention sample by sample
    samples: tuple                  # sample numbers in the table, for error messages
    counts: dict                    # ints: tokens, samples, padding, audio_targets, text_targets


class SpeechSamples:
    """Data set of the samples of a Table, assembled on demand as dicts of numpy arrays."""

    def __init__(self, table, ids):
        self.table, self.ids = table, ids

    def __getitem__(self, i):
        t = self.table
        tokens = slice(t.token_offsets[i], t.token_offsets[i + 1])
        clips = t.clips[t.clip_offsets[i]:t.clip_offsets[i + 1]]
        codes = [t.reader.codes(*t.where[clip].tolist()) for clip in clips]
        return {"number": i, **self.ids.assemble(
            t.tokens[tokens].astype(np.int64), t.labelled[tokens], codes)}


def collate(samples, ids, pad_to=0):
    """List of sample dicts -> PackedBatch. pad_to: pad the flat sequence to this many tokens.

    An empty list gives a batch of padding with zero weight, as every rank runs every step."""
    total = sum(len(sample["input_ids"]) for sample in samples)
    padding = max(pad_to - total, 0 if samples else 1)
    none = np.empty((0, ids.num_codebooks), np.int64)
    for n in (min(PAD_LENGTH, padding - start) for start in range(0, padding, PAD_LENGTH)):
        samples = [*samples, {
            "number": None, "input_ids": np.full(n, ids.pad), "is_audio": np.zeros(n, bool),
            "text_labels": np.full(n, IGNORE), "audio_ids": none, "audio_at": none[:, 0],
            "audio_targets": none}]

    def join(name):
        return np.concatenate([sample[name] for sample in samples])

    is_audio, next_text = join("is_audio"), np.append(join("text_labels")[1:], IGNORE)
    seqlens = [len(sample["input_ids"]) for sample in samples]
    starts = np.cumsum([0, *seqlens])
    next_text[starts[1:] - 1] = IGNORE          # a sample's last token predicts nothing
    audio_at = np.concatenate([s["audio_at"] + start for s, start in zip(samples, starts)])
    targets = join("audio_targets")
    # all text rows first, then all audio rows: each FFN reads one contiguous slice
    text_pos, audio_pos = np.flatnonzero(~is_audio), np.flatnonzero(is_audio)
    seq_index = np.empty(len(is_audio), np.int64)
    seq_index[np.concatenate([text_pos, audio_pos])] = np.arange(len(is_audio))
    text_at = np.flatnonzero(next_text != IGNORE)
    numbers = tuple(sample["number"] for sample in samples if sample["number"] is not None)
    counts = {"tokens": total, "samples": len(numbers), "padding": padding,
              "audio_targets": int((targets != IGNORE).sum()), "text_targets": len(text_at)}
    tensors = [join("input_ids"), np.concatenate([np.arange(n) for n in seqlens]),
               starts.astype(np.int32), join("audio_ids"), audio_pos, text_pos, seq_index,
               seq_index[audio_at], targets, seq_index[text_at], next_text[text_at]]
    return PackedBatch(*map(torch.from_numpy, tensors), -(-max(seqlens) // 128) * 128,
                       tuple(seqlens), numbers, counts)


def make_loader(table, ids, packs, num_workers, pad_to=0):
    """Iterator over PackedBatches of `packs`, an iterable of lists of sample numbers."""
    samples = SpeechSamples(table, ids)
    return packing.run_ahead(
        lambda pack: collate([samples[i] for i in pack], ids, pad_to), packs, num_workers)
