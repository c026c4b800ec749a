"""Your files -> labelled, packed batches of conversations and codec codes.

Rank 0 tokenises every sample once into a table on disk (speech/dataset.py); clips are encoded once
into a cache (speech/codes.py). A loader worker turns a list of sample numbers into one PackedBatch:
delay pattern, labels (shifted by one) and every index the GPU needs. No worker touches CUDA.
"""
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from core import packing
from core.cli import require
from core.dist import rank0
from core.problems import Problems
from speech.codes import ensure_codes, plan_codes
from speech.dataset import (Table, find_bad_audio, is_prepared, new_builder, open_prepared,
                            read_all)
from speech.labels import IGNORE, PackedBatch

PAD_LENGTH = 128        # tokens of a padding sample: few, as attention costs grow with the square


def make_table(world, tokenizer, ids, sources, encoding, output_dir, dry=False):
    """Table of the samples of Sources, on every rank. Rank 0 reads them, all ranks encode new
    clips, rank 0 writes the table, and all map it. A folder of prepare_tts.py is only mapped. dry:
    file headers give the frames of new clips, and output_dir gets no list of bad samples."""
    if any(is_prepared(path) for path, *_ in sources.all()):
        return open_prepared(world, sources, tokenizer, ids, encoding.codec_dir, output_dir)
    require(not is_prepared(output_dir), f"--output_dir {output_dir}: is a folder of "
            "prepare_tts.py; give another one to the trainer")
    of_rows = Problems(sources.drop, None if dry else output_dir)
    # a dry run raises bad rows and bad audio together; a run stops before it encodes
    of_audio = of_rows if dry else Problems(sources.drop, output_dir, more=True)

    def settle(problems):
        if dropped := problems.settle():
            print(f"data       dropped: {dropped}", flush=True)

    def read():
        read_all(builder, sources, of_rows, Path(output_dir) / "data")
        if not dry:
            settle(of_rows)

    def write():
        of_audio.add(find_bad_audio(builder, codes))
        settle(of_audio)
        # absolute: the table takes a relative path as relative to its folder
        builder.write(os.path.abspath(codes.folder), codes.shards, codes.where)
        return builder.folder

    with new_builder(world, tokenizer, ids, output_dir) as (builder, clips):
        rank0(world, read)
        codes = plan_codes(clips, encoding) if dry else ensure_codes(world, clips, encoding)
        folder = rank0(world, write)
    return Table(folder)


class SpeechSamples(Dataset):
    """Dataset of the samples of a Table, assembled on demand as dicts of numpy arrays."""

    def __init__(self, table, ids):
        self.table, self.ids = table, ids

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i):
        t = self.table
        tokens = slice(t.token_offsets[i], t.token_offsets[i + 1])
        clips = t.clips[t.clip_offsets[i]:t.clip_offsets[i + 1]]
        codes = [t.reader.codes(*t.where[clip].tolist()) for clip in clips]
        return {"number": i, **self.ids.assemble(
            t.tokens[tokens].astype(np.int64), t.labelled[tokens], codes)}


def padding_sample(n, ids):
    none = np.empty((0, ids.num_codebooks), np.int64)
    return {"number": None, "input_ids": np.full(n, ids.pad), "is_audio": np.zeros(n, bool),
            "text_labels": np.full(n, IGNORE), "audio_ids": none, "audio_at": none[:, 0],
            "audio_targets": none}


def collate(samples, ids, pad_to=0):
    """List of sample dicts -> PackedBatch. pad_to: pad the flat sequence to this many tokens.

    An empty list gives a batch of padding with zero weight, as every rank runs every step."""
    total = sum(len(sample["input_ids"]) for sample in samples)
    padding = max(pad_to - total, 0 if samples else 1)
    samples = [*samples, *(padding_sample(min(PAD_LENGTH, padding - start), ids)
                           for start in range(0, padding, PAD_LENGTH))]

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


def make_loader(table, ids, packs, *, num_workers, prefetch_factor, pad_to=0):
    """DataLoader of PackedBatches over `packs`, an iterable of lists of sample numbers."""
    return packing.pack_loader(SpeechSamples(table, ids), packs, lambda samples: collate(
        samples, ids, pad_to), num_workers, prefetch_factor)
