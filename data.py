"""Your files -> batches: labelled, packed batches of conversations and codec codes for Higgs-Audio V2.

Rank 0 tokenises every sample once into a table on disk (speech/dataset.py); clips are encoded once into a cache
(speech/code_cache.py). A loader worker turns a list of sample numbers into one PackedBatch: delay pattern, labels (shifted
by one) and every index the GPU needs. Nothing is padded per sample. No worker imports the model or touches CUDA.
"""
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from core import checkpoint, dist
from core.problems import Problems
from core import loading
from speech import choices
from speech.builder import TableBuilder
from speech.dataset import TABLE, Encoding, Table, ensure_codes, is_prepared, keep_prepared, new_table
from speech.rows import Reading, Sources, read_all
from speech.labels import IGNORE, PackedBatch, audio_targets

PAD_LENGTH = 128        # padding comes in samples this short: attention costs the square of a sample's length


def prepare_table(world, tokenizer, ids, args, codec_dir, work_dir):
    """All between the user's files and training, on every rank: read, encode what is new, write and
    map the table -> Table. Folders of prepare_tts.py are only mapped.

    args: the trainer's flags. Others: see make_table.
    """
    sources = Sources(*choices.sources(args), Reading(
        **choices.reading(args), lone_reference=ids.lone_reference), args.preprocess_num_proc, args.drop_bad)
    encoding = Encoding(codec_dir, args.code_cache or Path(args.output_dir) / "codes", ids.num_codebooks,
                        args.preprocess_num_proc, args.wait_timeout)
    return make_table(world, tokenizer, ids, sources, encoding, work_dir, args.dry_run is not None)


def make_table(world, tokenizer, ids, sources, encoding, output_dir, dry=False):
    """prepare_table. ids: TokenIds. sources: rows.Sources. encoding: dataset.Encoding. output_dir: where the table is
    written, and the list of samples that cannot be used. dry: clips that the cache lacks get the
    number of their frames from their headers, and no codes; nothing is listed. Returns the Table.
    """
    if any(is_prepared(path) for path, *_ in sources.all()):
        from speech.prepared import open_prepared
        return open_prepared(world, sources, tokenizer, ids, encoding.codec_dir, output_dir)
    builder, parts = None, []
    start, bad = time.monotonic(), {}        # bad: clips that cannot be used, on rank 0
    folder = new_table(output_dir)       # the other ranks learn rank 0's from write()
    problems = Problems(sources.drop, None if dry else output_dir)

    def settle(found):
        if said := found.settle():
            print(f"data       dropped: {said}", flush=True)

    def read():
        nonlocal builder, parts
        keep_prepared(output_dir)
        # a running job keeps what it has mapped
        checkpoint.remove_named(output_dir, TABLE)
        builder = TableBuilder(tokenizer, ids, folder)
        parts = read_all(builder, sources, problems, folder=os.path.join(output_dir, "data"))
        # a dry run names bad rows and bad audio at once, a run ends at bad rows before it encodes
        if not dry:
            settle(problems)
        n_train = sum(s["stop"] - s["first"] for s in parts if not s["held_out"])
        print(f"data       {n_train} training samples, {len(builder) - n_train or 'no'} separate "
              f"validation samples, {len(builder.clips)} distinct clips (read in "
              f"{time.monotonic() - start:.1f} s)", flush=True)

    def write():
        cache, shards, where = codes
        bad.update(builder.shorter_than(ids.min_frames, where))
        found = problems if dry else Problems(sources.drop, output_dir, more=True)
        found.add(builder.without_audio(bad, parts) if bad else [])
        settle(found)
        # a relative path is the table's own
        builder.write(folder, os.path.abspath(cache), shards, where, parts)
        return folder

    try:
        dist.rank0(world, read)
        if dry:
            from speech.encode import plan_codes
            codes = plan_codes(builder.clips, encoding, bad)
        else:
            codes = ensure_codes(world, builder.clips if builder else [], encoding, bad)
        return Table(dist.rank0(world, write))
    except BaseException:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        raise


class SpeechSamples(Dataset):
    """Samples of a Table, assembled on demand: numpy arrays of one sample by its number in the table."""

    def __init__(self, table, ids):
        self.table, self.ids = table, ids

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i):
        """The sample's number and what the layout of ids makes of it."""
        t = self.table
        tokens = slice(t.token_offsets[i], t.token_offsets[i + 1])
        clips = t.clips[t.clip_offsets[i]:t.clip_offsets[i + 1]]
        codes = [t.reader.codes(*t.where[clip].tolist()) for clip in clips]
        return {"number": i, **self.ids.assemble(t.tokens[tokens].astype(np.int64), t.labelled[tokens], codes)}


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
    joined = {key: np.concatenate([s[key] for s in samples])
              for key in ("input_ids", "is_audio", "text_labels", "audio_ids")}
    is_audio, next_text = joined["is_audio"], np.append(joined["text_labels"][1:], IGNORE)
    next_text[np.cumsum(seqlens) - 1] = IGNORE                          # a sample's last token predicts nothing
    found, starts = [audio_targets(s) for s in samples], np.cumsum([0, *seqlens])
    audio_at = np.concatenate([at + start for (at, _), start in zip(found, starts)])
    targets = np.concatenate([rows for _, rows in found])
    text_pos, audio_pos = np.flatnonzero(~is_audio), np.flatnonzero(is_audio)
    seq_index = np.empty(len(is_audio), np.int64)
    seq_index[np.concatenate([text_pos, audio_pos])] = np.arange(len(is_audio))
    text_at = np.flatnonzero(next_text != IGNORE)
    numbers = tuple(s["number"] for s in samples if s["number"] is not None)
    counts = {"tokens": total, "samples": len(numbers), "padding": padding,
              "audio_targets": int((targets != IGNORE).sum()), "text_targets": len(text_at)}
    tensors = [joined["input_ids"], np.concatenate([np.arange(n) for n in seqlens]), starts.astype(np.int32),
               joined["audio_ids"], audio_pos, text_pos, seq_index, seq_index[audio_at], targets, seq_index[text_at],
               next_text[text_at]]
    return PackedBatch(*map(torch.from_numpy, tensors), -(-max(seqlens) // 128) * 128, tuple(seqlens), numbers, counts)


def make_loader(table, ids, packs, *, num_workers, prefetch_factor, pad_to=0):
    """DataLoader of PackedBatches over `packs`, an iterable of lists of sample numbers."""
    return loading.over_packs(SpeechSamples(table, ids), packs, lambda samples: collate(samples, ids, pad_to),
                              num_workers, prefetch_factor)
