"""What the data comes to, without encoding: clips' frames from audio headers, and the table a run would train on.

The counterpart of code_cache.ensure_codes and data.prepare_table for a dry run. Writes nothing but a temporary table.

Copy with it: data.py, code_cache.py, and what those name.
"""
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from code_cache import SAMPLE_RATE, CacheIndex, check_length, codec_config, codec_fingerprint, file_keys
from data import Table, read_all, split_samples


def wave_samples(frames, rate):
    """Samples at 24 kHz that soxr makes of `frames` samples at `rate` Hz: the exact length, rounded half up."""
    return (2 * frames * SAMPLE_RATE + rate) // (2 * rate)


def codec_frames(samples, config):
    """Codec frames of a waveform of `samples` at 24 kHz; config: of codec_config.

    The semantic branch decides and the acoustic one is padded to fit: 24 -> 16 kHz, 160 zeros at both ends, HuBERT's
    unpadded convolutions, then every semantic_downsample_factor-th vector (transformers' encode).
    """
    n = -(-samples * config.semantic_sample_rate // config.sample_rate) + 2 * 160
    for kernel, stride in zip(config.semantic_model_config.conv_kernel, config.semantic_model_config.conv_stride):
        n = (n - kernel) // stride + 1
    return -(-n // config.semantic_downsample_factor)


def header_frames(path, cuts, config):
    """Codec frames of each cut of a file, from its header alone -> [int]; the counterpart of decode_audio.

    Raises ValueError with the reason. A file damaged behind its header is only found when it is decoded.
    """
    import soundfile
    try:
        if not os.path.getsize(path):
            raise ValueError("is an empty file")
        info = soundfile.info(path)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})")
    except soundfile.SoundFileError as error:
        why = str(error).rpartition(": ")[2].strip().rstrip(".")
        raise ValueError(f"is not readable audio ({why}); wav, flac, mp3 and ogg are read")
    found = []
    for offset, length in cuts:
        start = round((offset or 0) * info.samplerate)
        stop = min(info.frames, start + round(length * info.samplerate)) if length else info.frames
        samples = wave_samples(max(0, stop - start), info.samplerate)
        check_length(samples, offset)
        found.append(codec_frames(samples, config))
    return found


def plan_codes(clips, codec_dir, cache_dir, num_codebooks, problems):
    """What ensure_codes would give for clips, without encoding, writing or locking -> (folder, (n, 3) int64).

    The (n, 3) holds -1, -1, frames for a clip that is not cached yet. What cannot be used goes to the list `problems`,
    and has 0 frames.
    """
    config, _ = codec_config(codec_dir, num_codebooks)
    folder = Path(cache_dir) / codec_fingerprint(codec_dir)
    where = CacheIndex(folder).find_files(file_keys(clips)[1])
    missing, files = np.flatnonzero(where[:, 0] < 0), {}
    for i in missing:
        files.setdefault(clips[i].path, []).append(i)

    def frames(path):
        try:
            return header_frames(path, [(clips[i].offset, clips[i].duration) for i in files[path]], config)
        except ValueError as error:
            problems.append(f"{path}: {error}")
            return 0

    with ThreadPoolExecutor(16) as pool:        # waits for the file system, not for the processor
        for numbers, values in zip(files.values(), pool.map(frames, files)):
            where[numbers, 2] = values
    return folder, where


def plan_table(args, tokenizer, ids, codec_dir, scratch, problems):
    """prepare_table without encoding -> (Table, training and validation sample numbers, clips to encode, their frames).

    args: the trainer's flags. scratch: an empty folder for the table's arrays. Bad samples raise UserError, clips that
    cannot be used go to the list `problems`.
    """
    builder, n_train = read_all(args.train_data_file or args.train_data_dir, args.eval_data_file or args.eval_data_dir,
                                tokenizer, ids, args.task_type, args.ref_audio_in_system_message)
    folder, where = plan_codes(builder.clips, codec_dir, args.code_cache or Path(args.output_dir) / "codes",
                                        ids.num_codebooks, problems)
    builder.write(scratch, folder, [], where)
    new = where[:, 0] < 0
    return Table(scratch), *split_samples(args, n_train, len(builder)), int(new.sum()), int(where[new, 2].sum())


def rows_by_kind(table, ids):
    """Rows of each sample -> {"text", "audio", "audio_rows", "text_rows"}: (n,) int64 each, named as in PackedBatch.

    text and audio are all rows of either kind; audio_rows and text_rows those that predict something.
    """
    n = len(table)
    holes = table.tokens == ids.audio
    sample = np.repeat(np.arange(n), np.diff(table.token_offsets))
    trained_clips = np.bincount(sample[holes & table.labelled], minlength=n)
    audio = table.frames + (ids.num_codebooks + 1) * np.diff(table.clip_offsets)
    # codebook k of a clip with T frames is trained on rows k + 1 to k + 1 + T
    audio_rows = table.audio_targets // ids.num_codebooks + (ids.num_codebooks - 1) * trained_clips
    return {"text": table.lengths - audio, "audio": audio, "audio_rows": audio_rows, "text_rows": table.text_targets}
