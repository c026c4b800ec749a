"""Audio files -> codec codes: decode, encode each clip once, and cache the codes for all runs.

A file is decoded to mono, cut, resampled to 24 kHz and encoded clip by clip, as padding in a batch
would change codes. Codes are stored in append-only shards under CACHE/<codec fingerprint>. A shard
has int16 codes, their lengths, a content key per clip, and the key of each (path, size, date, cut),
so later runs only check file dates. Each clip's codes have a CRC-32, checked when a run starts and
at each read. The other columns have a SHA-256. Only one run at a time can fill a cache; other runs
wait for it.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from core import checkpoint, packing, tensor_io, watchdog
from core.cli import UserError, first_line, require, require_package
from core.dist import all_gather, rank0
from speech.choices import LONGEST_CLIP_S
from speech.conversations import MIN_REFERENCE_S

SAMPLE_RATE = 24_000
FRAME_RATE = 25                 # codec frames per second: 24 kHz / hop 960
MIN_SAMPLES = 960               # one codec frame
CODES = 1024                    # values of a code: 0 to 1023
SAVED = ".npy"                  # codes of generate_tts.py --save_codes: used unchanged
BLOCK = 2**20                   # samples decoded at a time
COMPLETE_SHARE = 0.99                    # a file with less of its header's samples is cut off
CUT_TOLERANCE_S = 0.3                    # seconds by which a cut may exceed its recording
LOUDEST = 10.0                  # highest peak; full scale is 1, mp3 and float files may exceed it
MEASURES = ("seconds", "peak", "rms", "clipped", "dc")      # clipped: share at full scale; dc: mean
PIPELINE = b"mono-mean soxr-HQ 24k v2"      # in the fingerprint: rename it if waveforms change
COLUMNS = ("lengths", "keys", "files", "file_keys", "checksums", "measures")    # besides the codes
SHARD_CLIPS, SHARD_SECONDS = 4096, 60.0     # a crash loses at most this much work
REMEDY = ("delete it and start again, and its clips are encoded again (of a prepared folder: by "
          "prepare_tts.py)")


# ---- Decoding. A faulty file is a ValueError with the reason.


def decode_audio(path, cuts):
    """(sha256 hex of a file, [mono float32 waveform (n,) at 24 kHz of each cut]); cuts: [(offset,
    duration)] in seconds or None."""
    digest, rate, cut_samples = decode_file(path, cuts)
    return digest, [resample(samples, rate, *cut)[0] for samples, cut in zip(cut_samples, cuts)]


def decode_file(path, cuts):
    """(sha256 hex of a file, its rate in Hz, [mono float32 samples (n,) of each cut])."""
    with open_bytes(path) as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
        with open_sound(data) as file:
            rate, promised, log = file.samplerate, file.frames, file.extra_info
            if all(cut == (None, None) for cut in cuts):
                check_seconds(max(promised / rate, 1))      # before it is decoded
            # a recording may last hours: keep only slightly more than check_seconds accepts
            longest = LONGEST_CLIP_S * rate + 1
            starts = [round((offset or 0) * rate) for offset, _ in cuts]
            stops = [start + (min(longest, round(duration * rate)) if duration else longest)
                     for start, (_, duration) in zip(starts, cuts)]
            blocks, total = [[np.empty(0, np.float32)] for _ in cuts], 0
            # read from the start: seeking in an mp3 may be off by a frame
            while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
                with np.errstate(over="ignore", invalid="ignore"):      # resample() refuses them
                    mono = block.mean(axis=1)
                for cut, start, stop in zip(blocks, starts, stops):
                    if start < total + len(mono) and stop > total:
                        cut.append(mono[max(0, start - total):stop - total])
                total += len(mono)
    # a WAV's `frames` counts existing ones; its header says 2 GiB if it was written to a pipe
    sizes = re.search(r"(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", log)
    if sizes and int(sizes[1]) < 0x7FFF0000:
        promised = max(promised, total * int(sizes[1]) / max(1, int(sizes[2])))
    if total < COMPLETE_SHARE * promised:
        raise ValueError(f"is cut off: its header promises {promised / rate:.2f} s, "
                         f"{total / rate:.2f} s are there")
    return digest, rate, [np.concatenate(cut) for cut in blocks]


@contextlib.contextmanager
def open_bytes(path):
    """Open a file; errors of libsndfile or the system in this context become ValueErrors."""
    import soundfile
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ValueError("is an empty file")
            yield file
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})")
    except soundfile.SoundFileError as error:
        why = str(error).rpartition(": ")[2].strip().rstrip(".")        # without the buffer's name
        raise ValueError(f"is not readable audio ({why}); wav, flac, mp3 and ogg are read; convert "
                         "others: ffmpeg -i FILE NEW.flac")


def open_sound(file):
    """soundfile.SoundFile of a binary file. ValueError if its header has no length, as after
    writing to a pipe; libsndfile would guess an MP3's length from its first frames."""
    import soundfile
    file.seek(0)
    head, has_length = file.read(10), True
    if head[:3] == b"ID3" or head[:1] == b"\xff":
        # an ID3v2 tag comes first; its size has 7 bits a byte
        tag_size = sum(byte << 7 * (9 - i) for i, byte in enumerate(head[6:], 6))
        file.seek(10 + tag_size if head[:3] == b"ID3" else 0)
        has_length = re.match(
            rb"fLaC|.*VBRI|.*(Xing|Info)...[\x01\x03\x05\x07\x09\x0b\x0d\x0f](?!\0{4})",
            file.read(200), re.S)
    file.seek(0)
    sound = soundfile.SoundFile(file)
    if not has_length or sound.frames == 2**63 - 1:
        raise ValueError("does not say how long it is, as programs write into a pipe; write it "
                         "again: ffmpeg -i FILE -c copy NEW for mp3, ffmpeg -i FILE NEW for flac")
    return sound


def resample(samples, rate, offset=None, duration=None):
    """((m,) float32 waveform at 24 kHz, (5,) float32 MEASURES) of one cut from decode_file."""
    import soxr
    check_seconds(len(samples) / rate, offset, duration)
    loudness, where = np.abs(samples), f" from offset {offset} s" if offset else ""
    if not np.isfinite(samples).all():
        raise ValueError(f"contains samples that are not finite numbers{where}")
    if loudness.max() > LOUDEST:
        raise ValueError(f"peaks at {loudness.max():.3g}{where}, not about 1: it has another scale")
    if samples.min() == samples.max():
        raise ValueError(f"is silent: every sample{where} is {samples[0]:g}")
    measures = [len(samples) / rate, loudness.max(),
                np.sqrt(np.mean(np.square(samples, dtype=np.float64))),
                np.mean(loudness >= 0.999), samples.mean(dtype=np.float64)]
    wave = soxr.resample(samples, rate, SAMPLE_RATE, quality="HQ")
    return np.ascontiguousarray(wave, np.float32), np.array(measures, np.float32)


def check_seconds(there, offset=None, duration=None):
    """ValueError if a file has too many or too few seconds, `there`, for a cut."""
    where = f" from offset {offset} s" if offset else ""
    if there > LONGEST_CLIP_S:
        raise ValueError(f"lasts {there:.0f} s{where}, {LONGEST_CLIP_S} are decoded: cut it")
    if duration and there and duration - there > CUT_TOLERANCE_S:
        raise ValueError(f"ends {duration - there:.2f} s before the cut from {offset:g} to "
                         f"{offset + duration:g} s: times of another recording, or not seconds")
    if round(there * SAMPLE_RATE) < MIN_SAMPLES:
        raise ValueError(f"is too short: {there:.3f} s{where}; a clip needs 0.04 s")


def pad_wave(wave):
    """A waveform at 24 kHz, padded with zeros to MIN_REFERENCE_S seconds."""
    return np.pad(wave, (0, max(0, round(MIN_REFERENCE_S * SAMPLE_RATE) - len(wave))))


def read_codes(path):
    """(sha256 hex, (T, K) codes) of a .npy file that generate_tts.py --save_codes wrote."""
    with open_bytes(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        try:
            codes = np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:      # numpy raises many kinds
            raise ValueError(f"cannot be read ({error})")
    if codes.dtype.kind not in "iu" or codes.ndim != 2:
        raise ValueError("not (frames, codebooks) whole numbers, as --save_codes writes them")
    return digest, codes


def check_codes(codes, offset, num_codebooks, size):
    """ValueError unless saved codes are (T, num_codebooks) from 0 to size - 1, without a cut."""
    if offset is not None:
        raise ValueError("a part of saved codes cannot be taken: drop offset and duration")
    if codes.shape[1] != num_codebooks:
        raise ValueError(f"has codes of {codes.shape[1]} codebooks, not of {num_codebooks}")
    if not len(codes) or codes.min() < 0 or codes.max() >= size:
        raise ValueError(f"has codes beyond 0 to {size - 1}, or none")


# ---- The codec


def codec_config(codec_dir, num_codebooks):
    """(HiggsAudioV2TokenizerConfig, kbit/s that give num_codebooks); needs no torchaudio."""
    from transformers import HiggsAudioV2TokenizerConfig
    try:
        config = HiggsAudioV2TokenizerConfig.from_pretrained(codec_dir)
        rates = config.sample_rate, config.frame_rate
    except Exception as error:
        raise UserError(f"{codec_dir}: codec cannot be loaded ({first_line(error)})")
    require(rates == (SAMPLE_RATE, FRAME_RATE), f"{codec_dir}: codec runs at {rates[0]} Hz and "
            f"{rates[1]} frames/s, not at {SAMPLE_RATE} and {FRAME_RATE}")
    bandwidth = num_codebooks * config.frame_rate * config.codebook_nbits / 1000
    require(bandwidth in config.target_bandwidths, f"{codec_dir}: {num_codebooks} codebooks need "
            f"bandwidth {bandwidth}, the codec has {list(config.target_bandwidths)}")
    return config, bandwidth


def load_codec(codec_dir, device, num_codebooks):
    """(codec in eval mode on the device, kbit/s that give num_codebooks). Raises UserError."""
    require_package("torchaudio", "encoding new audio needs torchaudio", "torchaudio==2.11.0")
    _, bandwidth = codec_config(codec_dir, num_codebooks)
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
    return codec.to(device).eval(), bandwidth


@torch.no_grad()
def encode_clip(codec, wave, bandwidth, num_codebooks):
    """Mono float32 waveform (n,) at 24 kHz -> (T, num_codebooks) int16 codes, numpy. ValueError for
    codes outside the codec's codebooks."""
    # without TF32: cached codes must not depend on the flags of a run
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        wave = torch.from_numpy(wave)[None, None].to(codec.device)
        codes = codec.encode(wave, bandwidth=bandwidth).audio_codes[0]
    assert codes.shape[0] == num_codebooks, f"codec gave {codes.shape[0]} codebooks"
    low, high, size = codes.min().item(), codes.max().item(), codec.config.codebook_size
    if low < 0 or high >= size:
        raise ValueError(f"the codec gives codes from {low} to {high}, its codebooks have {size}")
    return codes.T.to(torch.int16).contiguous().cpu().numpy()


def codec_frames(samples, config):
    """Codec frames of `samples` at 24 kHz, as in the semantic branch: 16 kHz with 160 zeros at both
    ends, HuBERT's unpadded convolutions, then every semantic_downsample_factor-th vector."""
    n = -(-samples * config.semantic_sample_rate // config.sample_rate) + 2 * 160
    hubert = config.semantic_model_config
    for kernel, stride in zip(hubert.conv_kernel, hubert.conv_stride):
        n = (n - kernel) // stride + 1
    return -(-n // config.semantic_downsample_factor)


# ---- The cache


@dataclass(frozen=True)
class Encoding:
    """Settings of encoding clips."""
    codec_dir: Path
    cache_dir: Path
    num_codebooks: int
    processes: int = 0                  # decoding processes on this node
    wait_limit_s: float = 6 * 3600      # for another run that fills the cache


class ClipCodes(NamedTuple):
    """Where the codes of a list of clips are, with measures and errors of the clips."""
    folder: Path            # of the shards
    shards: list            # file names
    where: np.ndarray       # (n, 4) int64: shard, first row, frames (0: no codes), checksum
    measures: np.ndarray    # (n, 5) float32 MEASURES; NaN: unknown
    errors: dict            # {number of a clip without codes: its file and the reason}


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


def file_keys(clips):
    """[(size, date in ns, key)] of the files of clips; OSError for a missing one."""
    stats = [(stat.st_size, stat.st_mtime_ns) for stat in (os.stat(clip.path) for clip in clips)]
    return [(*stat, key_of(clip, clip.filled, clip.path, *stat))
            for clip, stat in zip(clips, stats)]


def digest_columns(columns):
    """SHA-256 in hex of a shard's columns except the codes."""
    return hashlib.sha256(b"".join(columns[name].tobytes() for name in COLUMNS)).hexdigest()


def write_shard(folder, encoded, files):
    """Write a shard of {content key: ((T, K) codes, (5,) MEASURES)}, {file key: content key}."""
    def key_bytes(keys):
        return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
    # contiguous: safetensors writes raw memory
    codes = [np.ascontiguousarray(clip_codes) for clip_codes, _ in encoded.values()]
    measures = [clip_measures for _, clip_measures in encoded.values()]
    columns = {
        "lengths": np.array(list(map(len, codes)), np.int32), "keys": key_bytes(encoded),
        "files": key_bytes(files), "file_keys": key_bytes(files.values()),
        "checksums": np.array(list(map(zlib.crc32, codes)), np.uint32),
        "measures": np.array(measures, np.float32).reshape(-1, 5)}
    metadata = {"sha256": digest_columns(columns)}
    tensors = {"codes": np.concatenate(codes or [np.empty((0, 0), np.int16)]), **columns}
    checkpoint.write_atomically(Path(folder) / f"codes-{uuid.uuid4().hex}.safetensors",
                                lambda path: tensor_io.save(tensors, path, metadata, save_file))


def read_shard(path):
    """{name: array} of COLUMNS of a shard; UserError if these are damaged."""
    try:
        # open() gives the reason, safe_open does not
        with open(path, "rb"), safe_open(path, "np") as file:
            columns = {name: file.get_tensor(name) for name in COLUMNS}
            digest = (file.metadata() or {}).get("sha256")
        if digest_columns(columns) != digest:
            raise ValueError("its columns have another checksum than when they were written")
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({error}); {REMEDY}")
    return columns


def read_index(folder):
    """(shard names, {file key: content key}, {content key: row}, "where" and measures of the rows
    as in ClipCodes). Row -1, the last one, is that of an unknown clip."""
    names = os.listdir(folder) if os.path.exists(folder) else ()
    shards = sorted(name for name in names if re.fullmatch(r"codes-\w+\.safetensors", name))
    contents, rows, where, measures = {}, {}, [], []
    for number, shard in enumerate(shards):
        columns = read_shard(Path(folder) / shard)
        contents.update(zip(map(bytes, columns["files"]), map(bytes, columns["file_keys"])))
        rows.update(zip(map(bytes, columns["keys"]), itertools.count(sum(map(len, where)))))
        lengths = columns["lengths"].astype(np.int64)
        where.append(np.stack([np.full(len(lengths), number), np.cumsum(lengths) - lengths, lengths,
                               columns["checksums"]], axis=1, dtype=np.int64))
        measures.append(columns["measures"])
    where.append(np.full((1, 4), -1))
    measures.append(np.full((1, 5), np.nan, np.float32))
    return shards, contents, rows, np.concatenate(where), np.concatenate(measures)


def look_up(folder, clips):
    """(shard names, (n, 4) "where" of clips, (n, 5) float32 MEASURES, {number of a missing clip:
    size and date of its file}). Checks the codes that are there."""
    chunks = [clips[start:start + 8192] for start in range(0, len(clips), 8192)]
    with ThreadPoolExecutor(16) as pool:        # bound by the file system
        files = [file for chunk in pool.map(file_keys, chunks) for file in chunk]
    shards, contents, rows, where, measures = read_index(folder)
    numbers = np.array([rows.get(contents.get(key), -1) for *_, key in files], np.int64)
    reader, where = CodeReader(folder, shards), where[numbers]
    for row in sorted(where[where[:, 0] >= 0].tolist()):
        reader.codes(*row)
    missing = {i: files[i][:2] for i in np.flatnonzero(where[:, 0] < 0).tolist()}
    return shards, where, measures[numbers], missing


class CodeReader:
    """Reads codes from shards; each process opens them separately."""

    def __init__(self, folder, shards):
        self.folder, self.shards, self.open_shards = str(folder), shards, {}

    def codes(self, shard, start, frames, checksum):
        """(frames, 8) int16 codes. UserError if their checksum does not match."""
        path = os.path.join(self.folder, self.shards[shard])
        try:
            if shard not in self.open_shards:
                self.open_shards[shard] = safe_open(path, "np").__enter__()
            codes = self.open_shards[shard].get_slice("codes")[start:start + frames]
            if zlib.crc32(codes) != checksum:
                raise ValueError("codes with another checksum than when they were written")
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{path}: is damaged ({error}); {REMEDY}")
        return codes


# ---- Filling the cache, all ranks together


class Job(NamedTuple):
    """A file from which clips are encoded."""
    path: str
    stat: tuple     # size and date
    clips: dict     # {number: Clip}


def ensure_codes(world, clips, encoding):
    """Encode missing clips. Collective; only rank 0 needs `clips` (unique Clips) and gets their
    ClipCodes. A cache with all clips is only read."""
    known = None        # on rank 0: look_up's result, whose last item has the missing clips

    def check_stop():
        if watchdog.stop_requested():
            raise watchdog.Stopped("")

    def plan():
        """(cache folder, [jobs of each rank]); jobs are None if the run has to stop."""
        nonlocal known
        folder = Path(encoding.cache_dir) / codec_fingerprint(encoding.codec_dir)
        known = look_up(folder, clips)
        if not known[-1]:
            return folder, []
        checkpoint.prepare_folder(encoding.cache_dir, "--code_cache")
        folder.mkdir(exist_ok=True)
        try:
            lock.enter_context(checkpoint.lock_folder(
                folder, "--code_cache", wait_s=0.9 * encoding.wait_limit_s, waiting=check_stop))
        except watchdog.Stopped:
            return folder, None
        checkpoint.remove_named(folder, checkpoint.TEMPORARY)
        known = look_up(folder, clips)      # another run may have filled it
        jobs = {}
        for i, stat in known[-1].items():
            jobs.setdefault(clips[i].path, Job(clips[i].path, stat, {})).clips[i] = clips[i]
        # largest first: ranks would wait for one that starts a long file last
        order = sorted(jobs.values(), key=lambda job: (-job.stat[0], job.path))
        return folder, [order[rank::world.size] for rank in range(world.size)]

    with contextlib.ExitStack() as lock:
        folder, jobs = rank0(world, plan)
        errors, stop = {}, jobs is None
        if jobs:
            share = encode_jobs(world, jobs, folder, encoding)
            torch.cuda.empty_cache()        # free the codec's memory
            for rank_errors, asked in all_gather(world, (share, bool(watchdog.stop_requested()))):
                errors |= rank_errors
                stop = stop or asked
        if stop:
            raise watchdog.Stopped("asked to stop while audio was being encoded; finished clips "
                                   "stay in the code cache")
        if not world.is_main:
            return None
        shards, where, measures, missing = look_up(folder, clips) if jobs else known
    where[list(missing), 2] = 0
    for i in missing:
        errors.setdefault(i, f"{clips[i].path}: changed while it was being read, or is a copy of "
                             "one that cannot be used")
    return ClipCodes(folder, shards, where, measures, errors)


def decode_job(job):
    """For each clip of a Job (content key, wave (n,) or saved codes (T, K), measures), or the
    reason for failure."""
    clips = job.clips.values()
    try:
        if job.path.endswith(SAVED):
            digest, codes = read_codes(job.path)
            measures = np.array([len(codes) / FRAME_RATE, *[np.nan] * 4], np.float32)
            return [(key_of(clip, False, digest), codes, measures) for clip in clips]
        digest, rate, cuts = decode_file(job.path, [(c.offset, c.duration) for c in clips])
    except ValueError as error:
        return [str(error)] * len(clips)
    results = []
    for samples, clip in zip(cuts, clips):
        try:        # numpy: tensors would use /dev/shm, which is small in containers
            wave, measures = resample(samples, rate, clip.offset, clip.duration)
            # a clip that needs no padding has the key of the unpadded clip
            filled = clip.filled and measures[0] < MIN_REFERENCE_S
            wave = pad_wave(wave) if filled else wave
            results.append((key_of(clip, filled, digest), wave, measures))
        except ValueError as error:
            results.append(str(error))
    return results


def encode_jobs(world, jobs, folder, encoding):
    """Encode this rank's part of `jobs`, [jobs of each rank] -> {number of a clip: its error}."""
    from tqdm import tqdm
    mine, total = jobs[world.rank], sum(len(job.clips) for share in jobs for job in share)
    if not mine:
        return {}
    codec, bandwidth = load_codec(encoding.codec_dir, world.device, encoding.num_codebooks)
    cached, store = read_index(folder)[2], world.store or HashStore()
    errors, encoded, files, start, flushed = {}, {}, {}, time.monotonic(), time.monotonic()
    workers = min(len(mine), -(-encoding.processes // world.local_size))
    loader = DataLoader(mine, batch_size=None, num_workers=workers, collate_fn=decode_job,
                        worker_init_fn=watchdog.init_loader,
                        multiprocessing_context="fork" if workers else None)

    def count(name, n):
        """Add n to a counter of all ranks -> its value."""
        return store.add(f"encoding audio/{name}", n)

    with tqdm(total=total, unit="clip", desc="encoding audio", disable=not world.is_main,
              mininterval=0.1 if sys.stderr.isatty() else 30) as bar:
        for results, job in zip(packing.iterate(loader), mine):
            seconds = 0.0
            for (number, clip), result in zip(job.clips.items(), results):
                if isinstance(result, str):
                    errors[number] = f"{job.path}: {result}"
                    continue
                key, wave, measures = result
                seconds += float(measures[0])
                files[key_of(clip, clip.filled, job.path, *job.stat)] = key
                # for equal content under two paths, the first rank to claim it encodes it
                if key in cached or count(key.hex(), 1) > 1:
                    continue
                try:
                    if wave.ndim == 2:
                        codes = wave
                        check_codes(codes, clip.offset, encoding.num_codebooks,
                                    codec.config.codebook_size)
                    else:
                        codes = encode_clip(codec, wave, bandwidth, encoding.num_codebooks)
                    encoded[key] = codes.astype(np.int16), measures
                except torch.OutOfMemoryError:
                    errors[number] = f"{job.path}: is too long to encode on this device"
                except ValueError as error:
                    errors[number] = f"{job.path}: {error}"
            done = count("clips", len(job.clips))
            speed = count("milliseconds", round(1000 * seconds)) / 1000 / (time.monotonic() - start)
            bar.set_postfix_str(f"{speed:,.0f} x real time", refresh=False)
            bar.update(done - bar.n)
            if count("stop", int(bool(watchdog.stop_requested()))):
                break
            if len(files) >= SHARD_CLIPS or time.monotonic() - flushed > SHARD_SECONDS:
                write_shard(folder, encoded, files)
                encoded, files, flushed = {}, {}, time.monotonic()
    if files:
        write_shard(folder, encoded, files)
    return errors


# ---- A dry run: lengths from headers, no codes


def header_frames(clip, config, num_codebooks):
    """Codec frames of a Clip, read from the file header only; other damage is found later."""
    if clip.path.endswith(SAVED):
        codes = read_codes(clip.path)[1]
        check_codes(codes, clip.offset, num_codebooks, config.codebook_size)
        return len(codes)
    with open_bytes(clip.path) as file, open_sound(file) as audio:
        rate, stop = audio.samplerate, audio.frames
    start = round((clip.offset or 0) * rate)
    if clip.duration:
        stop = min(stop, start + round(clip.duration * rate))
    samples = (2 * max(0, stop - start) * SAMPLE_RATE + rate) // (2 * rate)   # soxr rounds half up
    check_seconds(samples / SAMPLE_RATE, clip.offset, clip.duration)
    return codec_frames(max(samples, round(MIN_REFERENCE_S * SAMPLE_RATE) * clip.filled), config)


def plan_codes(clips, encoding):
    """The ClipCodes of ensure_codes without encoding; "where" of a new clip is -1, -1, frames."""
    config, _ = codec_config(encoding.codec_dir, encoding.num_codebooks)
    folder, errors = Path(encoding.cache_dir) / codec_fingerprint(encoding.codec_dir), {}
    *_, where, measures, missing = look_up(folder, clips)

    def frames(i):
        try:
            return header_frames(clips[i], config, encoding.num_codebooks)
        except ValueError as error:
            errors[i] = f"{clips[i].path}: {error}"
            return 0

    with ThreadPoolExecutor(16) as pool:
        where[list(missing), 2] = list(pool.map(frames, missing))
    if missing:
        require_package("torchaudio", "encoding new audio needs torchaudio", "torchaudio==2.11.0")
    return ClipCodes(folder, [], where, measures, errors)
