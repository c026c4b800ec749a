"""Audio files -> codec codes: decode, encode each clip once, and cache the codes for all runs.

A file is decoded to mono, cut, resampled to 24 kHz and encoded clip by clip, as padding in a batch
would change codes. Codes are stored in append-only shards under CACHE/<codec fingerprint>. A shard
has int16 codes, their lengths, a content key per clip, and the key of each (path, size, date, cut),
so later runs only check file dates. Each clip's codes have a CRC-32, checked when a run starts and
at each read. The other columns have a SHA-256. One run at a time fills a cache; others wait.
"""
import contextlib
import hashlib
import itertools
import os
import re
import sys
import time
import uuid
import zlib
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from core import checkpoint, packing, run, tensor_io
from core.cli import UserError, first_line, require, stop_requested
from core.dist import all_gather, rank0
from speech.choices import LONGEST_CLIP_S
from speech.conversations import FRAME_RATE, MIN_REFERENCE_S, SAMPLE_RATE
from speech.weights import load_codec

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
PIPELINE = b"mono-mean soxr-HQ 24k v2"      # in the fingerprint: rename it if waveforms change
COLUMNS = ("lengths", "keys", "files", "file_keys", "checksums", "measures")    # besides the codes
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


# ---- The cache


class Encoding(NamedTuple):
    codec_dir: Path
    cache_dir: Path
    num_codebooks: int
    processes: int = 0                  # decoding processes on this node
    wait_limit_s: float = 6 * 3600      # for another run that fills the cache

    def folder(self):       # of the codec's shards
        return Path(self.cache_dir) / codec_fingerprint(self.codec_dir)


class ClipCodes(NamedTuple):
    """Where the codes of a list of clips are, with measures and errors of the clips."""
    folder: Path            # of the shards
    shards: list            # file names
    where: np.ndarray       # (n, 4) int64: shard, first row, frames, checksum; shard -1: no codes
    measures: np.ndarray    # (n, 5) float32 MEASURES; NaN: unknown
    errors: dict            # {number of a clip without codes: its file and the reason}

    def missing(self):      # numbers of the clips without codes
        return np.flatnonzero(self.where[:, 0] < 0).tolist()


def codec_fingerprint(codec_dir):
    """16 hex digits of the codec's config and weights and of PIPELINE. Raises UserError."""
    digest, weights = hashlib.sha256(PIPELINE), sorted(Path(codec_dir).glob("*.safetensors"))
    require(weights, f"{codec_dir}: holds no *.safetensors weights; take the native codec")
    for path in sorted([*weights, *Path(codec_dir).glob("config.json")]):
        digest.update(path.name.encode() + bytes.fromhex(checkpoint.sha256(path)))
    return digest.hexdigest()[:16]


def key_of(clip, filled, *recording):
    """16-byte key of a Clip's cut; `recording` identifies the file by content, or path and date."""
    cut = "" if clip.offset is None else f"{clip.offset}+{clip.duration}"
    text = "\0".join(map(str, (*recording, f"{cut} filled" if filled else cut)))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:16]


def file_key(clip):
    """Key of a Clip by path, size and date of its file."""
    stat = os.stat(clip.path)
    return key_of(clip, clip.filled, clip.path, stat.st_size, stat.st_mtime_ns)


def digest_columns(columns):
    return hashlib.sha256(b"".join(columns[name].tobytes() for name in COLUMNS)).hexdigest()


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


@contextlib.contextmanager
def explain_damage(path):
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({error}); delete it and start again, and its clips "
                        "are encoded again (of a prepared folder: by prepare_tts.py)")


def read_index(folder):
    """(shard names, {file key: content key}, {content key: row}, "where" and measures of the rows
    as in ClipCodes). Row -1, the last one, is that of an unknown clip."""
    names = os.listdir(folder) if os.path.exists(folder) else ()    # glob() hides a refused access
    shards = sorted(name for name in names if re.fullmatch(r"codes-\w+\.safetensors", name))
    contents, rows, where, measures = {}, {}, [], []
    for number, shard in enumerate(shards):
        path = Path(folder) / shard
        with explain_damage(path), safe_open(path, "np") as file:
            columns = {name: file.get_tensor(name) for name in COLUMNS}
            if digest_columns(columns) != (file.metadata() or {}).get("sha256"):
                raise ValueError("its columns have another checksum than when they were written")
        contents.update(zip(map(bytes, columns["files"]), map(bytes, columns["file_keys"])))
        rows.update(zip(map(bytes, columns["keys"]), itertools.count(sum(map(len, where)))))
        lengths = columns["lengths"].astype(np.int64)
        where.append(np.stack([np.full(len(lengths), number), np.cumsum(lengths) - lengths, lengths,
                               columns["checksums"]], axis=1, dtype=np.int64))
        measures.append(columns["measures"])
    where.append(np.array([[-1, -1, 0, -1]]))
    measures.append(np.full((1, 5), np.nan, np.float32))
    return shards, contents, rows, np.concatenate(where), np.concatenate(measures)


def look_up(folder, clips):
    """ClipCodes of a folder of shards, which may miss some clips. Checks the codes."""
    with ThreadPool(16) as pool:        # bound by the file system
        files = pool.map(file_key, clips, 4096)
    shards, contents, rows, where, measures = read_index(folder)
    numbers = np.array([rows.get(contents.get(key), -1) for key in files], np.int64)
    reader, where = CodeReader(folder, shards), where[numbers]
    for row in sorted(where[where[:, 0] >= 0].tolist()):
        reader.codes(*row)
    return ClipCodes(folder, shards, where, measures[numbers], {})


class CodeReader:
    """Reads codes from shards; each process opens them separately."""

    def __init__(self, folder, shards):
        self.folder, self.shards, self.open_shards = Path(folder), shards, {}

    def codes(self, shard, start, frames, checksum):
        """(frames, 8) int16 codes. UserError if their checksum does not match."""
        path = self.folder / self.shards[shard]
        with explain_damage(path):
            if shard not in self.open_shards:
                self.open_shards[shard] = safe_open(path, "np").__enter__()
            codes = self.open_shards[shard].get_slice("codes")[start:start + frames]
            if zlib.crc32(codes) != checksum:
                raise ValueError("codes with another checksum than when they were written")
        return codes


# ---- Filling the cache, all ranks together


def ensure_codes(world, clips, encoding):
    """Encode missing clips. Collective; only rank 0 needs `clips` (unique Clips) and gets their
    ClipCodes. A cache with all clips is only read."""
    known = None        # on rank 0: ClipCodes

    def check_stop():
        if stop_requested():
            raise run.Stopped("")

    def plan():
        """(cache folder, [jobs of each rank]); jobs are None if the run has to stop. A job is
        {number: Clip} of a file from which clips are encoded."""
        nonlocal known
        folder = encoding.folder()
        known = look_up(folder, clips)
        if not known.missing():
            return folder, []
        checkpoint.prepare_folder(encoding.cache_dir, "--code_cache")
        folder.mkdir(exist_ok=True)
        try:
            lock.enter_context(checkpoint.lock_folder(
                folder, "--code_cache", wait_s=0.9 * encoding.wait_limit_s, waiting=check_stop))
        except run.Stopped:
            return folder, None
        checkpoint.remove_named(folder, checkpoint.TEMPORARY)
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
        known = look_up(folder, clips) if jobs else known
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
    # numpy: tensors would use /dev/shm, which is small in containers
    loader = DataLoader(mine, batch_size=None, num_workers=workers,
                        collate_fn=lambda job: decode_clips(list(job.values())),
                        worker_init_fn=run.init_loader,
                        multiprocessing_context="fork" if workers else None)

    with tqdm(total=total, unit="clip", desc="encoding audio", disable=not world.is_main,
              mininterval=0.1 if sys.stderr.isatty() else 30) as bar:
        for results, job in zip(packing.iterate(loader), mine):
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
