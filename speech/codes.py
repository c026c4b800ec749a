"""Audio files -> codec codes: decode, encode each clip once. Only runs with new audio import this.

A file is decoded to mono, cut, resampled to 24 kHz and encoded clip by clip, as padding in a batch
would change codes. The codes go into the cache of speech/dataset.py, which one run at a time fills;
others wait.
"""
import contextlib
import hashlib
import os
import re
import sys
import time
import uuid
import zlib
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch.distributed import HashStore

from core import checkpoint, packing, run, tensor_io
from core.cli import UserError, first_line, require, require_package, stop_requested
from core.dist import all_gather, rank0
from speech.conversations import FRAME_RATE, LONGEST_CLIP_S
from speech.dataset import digest_columns, file_key, key_of, look_up, problem_of, read_index

SAMPLE_RATE = 24_000
MIN_REFERENCE_S = 1.0           # shorter references of TTS 3 are padded, as by its servers
MIN_SAMPLES = 960               # one codec frame
SHORTEST_REFERENCE = round(MIN_REFERENCE_S * SAMPLE_RATE)
CODES = 1024                    # values of a code: 0 to 1023
SAVED = ".npy"                  # codes of generate_tts.py --save_codes: used unchanged
BLOCK = 2**20                   # samples decoded at a time
MP3_LENGTH = re.compile(rb"VBRI\0\x01|(Xing|Info)\0{3}[\x01\x03\x05\x07\x09\x0b\x0d\x0f](?!\0{4})")
COMPLETE_SHARE = 0.99           # a file with less of its header's samples is cut off
CUT_TOLERANCE_S = 0.3           # seconds by which a cut may exceed its recording
LOUDEST = 10.0                  # highest peak; full scale is 1, mp3 and float files may exceed it
MEASURES = ("seconds", "peak", "rms", "clipped", "dc")      # clipped: share at full scale; dc: mean
SHARD_CLIPS, SHARD_SECONDS = 4096, 60.0     # a crash loses at most this much work


# ---- Decoding. A faulty file is a ValueError with the reason.


def decode_clips(clips):
    """[(file key, content key, waveform, MEASURES), or the error as a string] of Clips of one file.
    Waveforms are mono float32 (n,) at 24 kHz; of saved codes these (T, K) int16."""
    try:
        keys = list(map(file_key, clips))       # before it is read: it may change
        digest, rate, cuts = read_file(clips[0].path, clips)
    except (OSError, ValueError) as error:
        return [str(error)] * len(clips)

    def decode(key, clip, samples):
        try:
            wave, measures = check_cut(samples, rate, clip), [np.nan] * len(MEASURES)
            if wave.ndim == 1:      # saved codes stay as they are
                wave, measures = resample(wave, rate)
        except ValueError as error:
            return str(error)
        missing = max(0, SHORTEST_REFERENCE - len(wave)) * (clip.filled and wave.ndim == 1)
        wave = np.pad(wave, (0, missing))
        # a clip that needs no padding has the key of the unpadded clip
        return key, key_of(clip, missing > 0, digest), wave, measures

    return list(map(decode, keys, clips, cuts))


def read_file(path, clips):
    """(SHA-256 of a file, its rate in Hz, [mono float32 samples (n,) of each Clip]); of saved codes
    the rate is FRAME_RATE and they are (T, K) int16. Of hours of sound only the clips are kept."""
    with open(path, "rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
        if path.endswith(SAVED):
            codes = read_codes(data)
            return digest, FRAME_RATE, [codes[span(clip, FRAME_RATE)] for clip in clips]
        with open_sound(data) as file:
            rate, promised, log = file.samplerate, file.frames, file.extra_info
            total, cuts = 0, [([np.empty(0, np.float32)], span(clip, rate)) for clip in clips]
            # from the start: seeking in an mp3 may be off by a frame
            while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
                with np.errstate(over="ignore", invalid="ignore"):      # resample() refuses them
                    mono = block.mean(axis=1)
                for pieces, window in cuts:
                    if window.start < total + len(mono) and window.stop > total:
                        pieces.append(mono[max(0, window.start - total):window.stop - total])
                total += len(mono)
    # a WAV's `frames` counts existing ones; its header says 2 GiB if it was written to a pipe
    sizes = re.search(r"(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", log)
    if sizes and int(sizes[1]) < 0x7FFF0000:
        promised = max(promised, total * int(sizes[1]) / max(1, int(sizes[2])))
    if total < COMPLETE_SHARE * promised:
        raise ValueError(f"is cut off: its header promises {promised / rate:.2f} s, "
                         f"{total / rate:.2f} s are there")
    return digest, rate, [np.concatenate(pieces) for pieces, _ in cuts]


@contextlib.contextmanager
def open_sound(file):
    """soundfile.SoundFile of a binary file, whose errors become ValueErrors. It is refused if its
    header has no length; libsndfile would guess an MP3's length from its first frames."""
    import soundfile
    file.seek(0)
    head = file.read(2**24 if file.read(3) == b"ID3" else 200)      # a tag may hold pictures
    file.seek(0)
    try:
        with soundfile.SoundFile(file) as sound:
            guessed = sound.format == "MP3" and not MP3_LENGTH.search(head)
            if guessed or sound.frames == 2**63 - 1:
                raise ValueError("does not say how long it is; write it again: ffmpeg -i FILE NEW")
            yield sound
    except soundfile.SoundFileError as error:
        raise ValueError(f"is not readable audio ({error}); convert it: ffmpeg -i FILE NEW.flac")


def read_codes(file):
    """(T, K) int16 codes of a .npy file that generate_tts.py --save_codes wrote."""
    file.seek(0)
    try:
        codes = np.load(file, allow_pickle=False)
        valid = codes.dtype.kind in "iu" and codes.ndim == 2
        valid = valid and 0 <= codes.min() and codes.max() < CODES
    except Exception as error:      # numpy raises many kinds
        raise ValueError(f"cannot be read ({error})")
    if not valid:
        raise ValueError(f"not (frames, codebooks) whole numbers from 0 to {CODES - 1}")
    return codes.astype(np.int16)


def span(clip, rate):
    """slice() of a Clip's samples, at most slightly more than check_cut accepts."""
    start = round((clip.offset or 0) * rate)
    return slice(start, start + round(min(clip.duration or np.inf, LONGEST_CLIP_S + 1) * rate))


def check_cut(samples, rate, clip):
    """The samples of a Clip. ValueError if they are too many or too few."""
    seconds = len(samples) / rate
    if seconds > LONGEST_CLIP_S:
        raise ValueError(f"lasts {seconds:.0f} s or more, {LONGEST_CLIP_S} are decoded: cut it")
    if round(seconds * SAMPLE_RATE) < MIN_SAMPLES:
        raise ValueError(f"is too short: {seconds:.3f} s; a clip needs 0.04 s")
    short = (clip.duration or 0) - seconds
    if short > CUT_TOLERANCE_S:
        raise ValueError(f"ends {short:.2f} s before the cut from {clip.offset:g} to "
                         f"{clip.offset + clip.duration:g} s: of another recording, or not seconds")
    return samples


def resample(samples, rate):
    """((m,) float32 waveform at 24 kHz, MEASURES) of a cut."""
    import soxr
    loudness = np.abs(samples)
    if not loudness.max() <= LOUDEST:       # or NaN
        raise ValueError(f"peaks at {loudness.max():.3g}, not about 1: it has another scale")
    if samples.min() == samples.max():
        raise ValueError(f"is silent: every sample is {samples[0]:g}")
    measures = [len(samples) / rate, loudness.max(),
                np.sqrt(np.mean(np.square(samples, dtype=np.float64))),
                np.mean(loudness >= 0.999), samples.mean(dtype=np.float64)]
    wave = soxr.resample(samples, rate, SAMPLE_RATE, quality="HQ")
    return np.ascontiguousarray(wave, np.float32), measures


# ---- Encoding


def load_codec(codec_dir, device, num_codebooks):
    """(codec in eval mode on the device, kbit/s that give num_codebooks). Raises UserError."""
    require_package("torchaudio", "encoding new audio needs torchaudio", "torchaudio==2.11.0")
    try:
        from transformers import HiggsAudioV2TokenizerModel     # which imports torchaudio
        codec, info = HiggsAudioV2TokenizerModel.from_pretrained(
            codec_dir, dtype=torch.float32, output_loading_info=True)
    except Exception as error:
        raise UserError(f"{codec_dir}: codec cannot be loaded ({first_line(error)})")
    if lost := sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]):
        raise UserError(f"{codec_dir}: {len(lost)} missing or unexpected weights, first {lost[:5]}")
    for name, weight in codec.named_parameters():
        require(tensor_io.is_finite(weight), f"{codec_dir}: {name} holds NaN or infinity")
    config = codec.config
    bandwidth = num_codebooks * FRAME_RATE * config.codebook_nbits / 1000
    require((config.sample_rate, config.frame_rate) == (SAMPLE_RATE, FRAME_RATE)
            and bandwidth in config.target_bandwidths, f"{codec_dir}: is not a codec of "
            f"{SAMPLE_RATE} Hz, {FRAME_RATE} frames/s and {num_codebooks} codebooks")
    return codec.to(device).eval(), bandwidth


@torch.no_grad()
def encode_clip(codec, wave, bandwidth, num_codebooks):
    """Mono float32 waveform (n,) at 24 kHz -> (T, num_codebooks) int16 codes, numpy. Saved codes
    stay as they are; ValueError if they have other codebooks."""
    codes = wave
    if wave.ndim == 1:
        # without TF32: cached codes must not depend on the flags of a run
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            wave = torch.from_numpy(wave)[None, None].to(codec.device)
            codes = codec.encode(wave, bandwidth=bandwidth).audio_codes[0].T
        codes = codes.to(torch.int16).contiguous().cpu().numpy()
    if codes.shape[1] != num_codebooks:
        raise ValueError(f"has codes of {codes.shape[1]} codebooks, not of {num_codebooks}")
    return codes


# ---- Filling the cache, all ranks together


def write_shard(folder, encoded, files):
    """Write a shard of {content key: ((T, K) codes, (5,) MEASURES)}, {file key: content key}."""
    def key_bytes(keys):
        return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
    codes, measures = zip(*encoded.values()) if encoded else ((), ())
    codes = list(map(np.ascontiguousarray, codes))      # safetensors writes raw memory
    columns = {
        "lengths": np.array(list(map(len, codes)), np.int32), "keys": key_bytes(encoded),
        "files": key_bytes(files), "file_keys": key_bytes(files.values()),
        "checksums": np.array(list(map(zlib.crc32, codes)), np.uint32),
        "measures": np.array(measures, np.float32).reshape(-1, 5)}
    tensors = {"codes": np.concatenate(codes or [np.empty((0, 0), np.int16)]), **columns}
    checkpoint.write_atomically(
        Path(folder) / f"codes-{uuid.uuid4().hex}.safetensors", lambda path: tensor_io.save(
            tensors, path, {"sha256": digest_columns(columns)}, save_file))


def fill_cache(world, clips, encoding):
    """ClipCodes of unique Clips on rank 0, of which some have to be encoded. Collective; only rank
    0 needs `clips`."""
    known = None        # on rank 0: ClipCodes

    def plan():
        """(cache folder, [jobs of each rank]); jobs are None if the run has to stop. A job is
        {number: Clip} of a file from which clips are encoded."""
        nonlocal known
        folder = encoding.folder()
        held = checkpoint.lock_folder(folder, "--code_cache", wait_s=0.9 * encoding.wait_limit_s,
                                      give_up=stop_requested)
        if not held:
            return folder, None
        lock.enter_context(held)
        checkpoint.remove_named(folder, r"\.codes-[0-9a-f]{32}\.safetensors\.tmp.*")    # of a kill
        known = look_up(folder, clips)      # another run may have filled it
        jobs = {}
        for i in known.missing():
            jobs.setdefault(clips[i].path, {})[i] = clips[i]
        # largest first: ranks would wait for one that starts a long file last
        order = sorted(jobs, key=os.path.getsize, reverse=True)
        return folder, [[jobs[path] for path in order[rank::world.size]]
                        for rank in range(world.size)]

    with contextlib.ExitStack() as lock:
        folder, jobs = rank0(world, plan)
        errors, stop = {}, jobs is None
        if jobs:
            share = encode_jobs(world, jobs, folder, encoding)
            torch.cuda.empty_cache()        # free the codec's memory
            for rank_errors, asked in all_gather(world, (share, bool(stop_requested()))):
                errors |= rank_errors
                stop = stop or asked
        if stop:
            raise run.Stopped("asked to stop while audio was being encoded")
        if not world.is_main:
            return None
        known = look_up(folder, clips)
    for i in known.missing():
        known.errors[i] = errors.get(i) or f"{clips[i].path}: changed while it was being read"
    return known


def encode_jobs(world, jobs, folder, encoding):
    """Encode this rank's part of `jobs`, [jobs of each rank] -> {number of a clip: its error}."""
    from tqdm import tqdm
    mine, total = jobs[world.rank], sum(len(job) for share in jobs for job in share)
    if not mine:
        return {}
    codec, bandwidth = load_codec(encoding.codec_dir, world.device, encoding.num_codebooks)
    cached, store = read_index(folder)[2], world.store or HashStore()
    errors, encoded, files, flushed = {}, {}, {}, time.monotonic()
    workers = min(len(mine), -(-encoding.processes // world.local_size))
    decoded = packing.run_ahead(lambda job: decode_clips(list(job.values())), mine, workers,
                                fork=True)

    with tqdm(total=total, unit="clip", desc="encoding audio", disable=not world.is_main,
              mininterval=0.1 if sys.stderr.isatty() else 30) as bar:
        for results, job in zip(decoded, mine):
            for (number, clip), result in zip(job.items(), results):
                if isinstance(result, str):
                    errors[number] = f"{clip.path}: {result}"
                    continue
                file, key, wave, measures = result
                files[file] = key
                if key in cached or key in encoded:     # equal content under two paths
                    continue
                try:
                    encoded[key] = encode_clip(codec, wave, bandwidth,
                                               encoding.num_codebooks), measures
                except (ValueError, torch.OutOfMemoryError) as error:
                    errors[number] = f"{clip.path}: {first_line(error)}"
            bar.update(store.add("encoded clips", len(job)) - bar.n)
            if store.add("stop encoding", int(bool(stop_requested()))):
                break
            if len(files) >= SHARD_CLIPS or time.monotonic() - flushed > SHARD_SECONDS:
                write_shard(folder, encoded, files)
                encoded, files, flushed = {}, {}, time.monotonic()
    if files:
        write_shard(folder, encoded, files)
    return errors


# ---- Clips without codes


def samples_with(builder, clips):
    """[(sample number, the first of `clips` in it)] of the samples that use one of `clips`, numbers
    of a TableBuilder's clips."""
    used, offsets = builder.array("clips"), builder.array("clip_offsets")
    uses = np.flatnonzero(np.isin(used, clips))
    samples, first = np.unique(np.searchsorted(offsets, uses, "right") - 1, return_index=True)
    return list(zip(samples.tolist(), used[uses[first]].tolist()))


def find_bad_audio(builder, codes):
    """[Problem] of samples with a clip without codes in ClipCodes. A trained clip that is too short
    for the model loses its codes."""
    errors, where, least = codes.errors, codes.where, builder.ids.min_frames
    for clip in np.unique(builder.array("clips")[builder.array("trained")]).tolist():
        if 0 < where[clip, 2] < least:
            errors[clip] = (
                f"{builder.clips[clip].path}: gives {where[clip, 2]} codec frames; this model "
                f"needs {least} ({least / FRAME_RATE:g} s) to end a clip")
            where[clip, 2] = 0
    return [problem_of(builder, i, "audio", f"its audio {errors[clip]}")
            for i, clip in samples_with(builder, list(errors))]


# ---- Lengths of clips from file headers


def codec_frames(samples):
    """Codec frames of `samples` at 24 kHz: at 16 kHz, with 160 zeros at both ends, HuBERT gives a
    vector for 400 samples and for each 320 more, and the codec takes every second one."""
    vectors = (-(-2 * samples // 3) + 2 * 160 - 400) // 320 + 1
    return -(-vectors // 2)


def header_frames(clip):
    """Codec frames of a Clip, read from the file header only; other damage is found later."""
    with open(clip.path, "rb") as file:
        if clip.path.endswith(SAVED):
            return len(check_cut(read_codes(file)[span(clip, FRAME_RATE)], FRAME_RATE, clip))
        with open_sound(file) as sound:
            rate, samples = sound.samplerate, range(sound.frames)
    samples = check_cut(samples[span(clip, rate)], rate, clip)
    n = (2 * len(samples) * SAMPLE_RATE + rate) // (2 * rate)       # soxr rounds half up
    return codec_frames(max(n, SHORTEST_REFERENCE * clip.filled))


def plan_codes(clips, encoding):
    """The ClipCodes of ensure_codes without encoding; "where" of a new clip is -1, -1, frames."""
    known = look_up(encoding.folder(), clips)

    def measure(i):
        try:
            known.where[i, 2] = header_frames(clips[i])
        except (OSError, ValueError) as error:
            known.errors[i] = f"{clips[i].path}: {error}"

    with ThreadPool(16) as pool:
        pool.map(measure, known.missing())
    return known._replace(shards=[])
