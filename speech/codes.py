"""Audio files -> codec codes: decode, encode each clip once, and cache the codes for all runs.

    folder, shards, where, *_ = codes.ensure_codes(world, clips, codes.Encoding(codec, cache, 8))
    codes.CodeReader(folder, shards).codes(*where[0].tolist())      # (T, 8) int16 of the first clip

A file is decoded to mono, cut, resampled to 24 kHz and encoded clip by clip, as padding in a batch
would change codes. Codes are stored in append-only shards under CACHE/<codec fingerprint>. A shard
has int16 codes, their lengths, a content key per clip, and the key of each (path, size, date, cut),
so later runs only check file dates. Each clip's codes have a CRC-32, checked when a run starts and
at each read. The other columns have a SHA-256. Only one run at a time can fill a cache; other runs
wait for it.
"""
import contextlib
import hashlib
import os
import re
import sys
import time
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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
from speech.conversations import FILLED_S

SAMPLE_RATE = 24_000
FRAME_RATE = 25                 # codec frames per second: 24 kHz / hop 960
MIN_SAMPLES = 960               # one codec frame
CODES = 1024                    # values of a code: 0 to 1023
SAVED = ".npy"                  # codes of generate_tts.py --save_codes: used unchanged
PIECE = 2**20                   # samples decoded at a time
WHOLE = 0.99                    # least share of the samples in the header; else it is cut off
PAST_S = 0.3                    # seconds by which a cut may exceed its recording
LOUDEST = 10.0                  # peak; full scale is 1, mp3 and float files may go beyond a little
MEASURES = ("seconds", "peak", "rms", "clipped", "dc")      # the share at full scale, the mean
PIPELINE = b"mono-mean soxr-HQ 24k v2"      # in the fingerprint: rename it if waveforms change
KEY = "S16"                     # 128 bits of SHA-256, compared as bytes
COLUMNS = ("lengths", "keys", "files", "file_keys", "checksums", "measures")    # besides the codes
SHARD_CLIPS, SHARD_SECONDS = 4096, 60.0     # a crash loses at most this much work
REMEDY = ("delete it and start again, and its clips are encoded again (of a prepared folder: by "
          "prepare_tts.py)")


# ---- Decoding. A faulty file is a ValueError with the reason.


def decode_audio(path, cuts):
    """(sha256 hex of a file, [mono float32 waveform (n,) at 24 kHz of each cut]); cuts: [(offset,
    duration)] in seconds or None."""
    digest, rate, parts = decode_file(path, cuts)
    return digest, [cut_wave(part, rate, *cut)[0] for part, cut in zip(parts, cuts)]


def decode_file(path, cuts):
    """(sha256 hex of a file, its rate in Hz, [mono float32 samples (n,) of each cut])."""
    parts, total = [[np.empty(0, np.float32)] for _ in cuts], 0
    with readable(path) as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
        with open_sound(data) as file:
            rate, promised, log = file.samplerate, file.frames, file.extra_info
            if all(cut == (None, None) for cut in cuts):
                check_seconds(max(promised / rate, 1))      # before it is decoded
            # a recording may last hours: keep only slightly more than check_seconds accepts
            most = LONGEST_CLIP_S * rate + 1
            starts = [round((offset or 0) * rate) for offset, _ in cuts]
            stops = [start + (min(most, round(length * rate)) if length else most)
                     for start, (_, length) in zip(starts, cuts)]
            # read from the start: seeking in an mp3 may be off by a frame
            while len(piece := file.read(PIECE, dtype="float32", always_2d=True)):
                with np.errstate(over="ignore", invalid="ignore"):      # cut_wave refuses them
                    mono = piece.mean(axis=1)
                for part, start, stop in zip(parts, starts, stops):
                    if start < total + len(mono) and stop > total:
                        part.append(mono[max(0, start - total):stop - total])
                total += len(mono)
    # a WAV's `frames` counts existing ones; its header says 2 GiB if it was written to a pipe
    sizes = re.search(r"(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", log)
    if sizes and int(sizes[1]) < 0x7FFF0000:
        promised = max(promised, total * int(sizes[1]) / max(1, int(sizes[2])))
    if total < WHOLE * promised:
        raise ValueError(f"is cut off: its header promises {promised / rate:.2f} s, "
                         f"{total / rate:.2f} s are there")
    return digest, rate, [np.concatenate(part) for part in parts]


@contextlib.contextmanager
def readable(path):
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
    head, says = file.read(10), True
    if head[:3] == b"ID3" or head[:1] == b"\xff":
        # after an ID3v2 tag, whose size has 7 bits a byte
        size = sum(byte << 7 * (9 - i) for i, byte in enumerate(head[6:], 6))
        file.seek(10 + size if head[:3] == b"ID3" else 0)
        says = re.match(rb"fLaC|.*VBRI|.*(Xing|Info)...[\x01\x03\x05\x07\x09\x0b\x0d\x0f](?!\0{4})",
                        file.read(200), re.S)
    file.seek(0)
    sound = soundfile.SoundFile(file)
    if not says or sound.frames == 2**63 - 1:
        raise ValueError("does not say how long it is, as programs write into a pipe; write it "
                         "again: ffmpeg -i FILE -c copy NEW for mp3, ffmpeg -i FILE NEW for flac")
    return sound


def cut_wave(part, rate, offset=None, length=None):
    """((m,) float32 waveform at 24 kHz, (5,) float32 MEASURES) of one part from decode_file."""
    import soxr
    check_seconds(len(part) / rate, offset, length)
    loud, where = np.abs(part), f" from offset {offset} s" if offset else ""
    if not np.isfinite(part).all():
        raise ValueError(f"contains samples that are not finite numbers{where}")
    if loud.max() > LOUDEST:
        raise ValueError(f"peaks at {loud.max():.3g}{where}, not about 1: it has another scale")
    if part.min() == part.max():
        raise ValueError(f"is silent: every sample{where} is {part[0]:g}")
    measures = [len(part) / rate, loud.max(), np.sqrt(np.mean(np.square(part, dtype=np.float64))),
                np.mean(loud >= 0.999), part.mean(dtype=np.float64)]
    wave = soxr.resample(part, rate, SAMPLE_RATE, quality="HQ")
    return np.ascontiguousarray(wave, np.float32), np.array(measures, np.float32)


def check_seconds(there, offset=None, length=None):
    """ValueError if the `there` seconds found for a cut are too many or too few."""
    where = f" from offset {offset} s" if offset else ""
    if there > LONGEST_CLIP_S:
        raise ValueError(f"lasts {there:.0f} s{where}, {LONGEST_CLIP_S} are decoded: cut it")
    if length and there and length - there > PAST_S:
        raise ValueError(f"ends {length - there:.2f} s before the cut from {offset:g} to "
                         f"{offset + length:g} s: times of another recording, or not seconds")
    if round(there * SAMPLE_RATE) < MIN_SAMPLES:
        raise ValueError(f"is too short: {there:.3f} s{where}; a clip needs 0.04 s")


def filled(wave):
    """A waveform at 24 kHz, padded with zeros to FILLED_S seconds."""
    return np.pad(wave, (0, max(0, round(FILLED_S * SAMPLE_RATE) - len(wave))))


def read_codes(path):
    """(sha256 hex, (T, K) codes) of a .npy file that generate_tts.py --save_codes wrote."""
    with readable(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        try:
            found = np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:      # numpy raises many kinds
            raise ValueError(f"cannot be read ({error})")
    if found.dtype.kind not in "iu" or found.ndim != 2:
        raise ValueError("not (frames, codebooks) whole numbers, as --save_codes writes them")
    return digest, found


def check_codes(found, offset, num_codebooks, size):
    """ValueError unless saved codes are (T, num_codebooks) from 0 to size - 1, without a cut."""
    if offset is not None:
        raise ValueError("a part of saved codes cannot be taken: drop offset and duration")
    if found.shape[1] != num_codebooks:
        raise ValueError(f"has codes of {found.shape[1]} codebooks, not of {num_codebooks}")
    if not len(found) or found.min() < 0 or found.max() >= size:
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
        found = codec.encode(wave, bandwidth=bandwidth).audio_codes[0]
    assert found.shape[0] == num_codebooks, f"codec gave {found.shape[0]} codebooks"
    low, high, size = found.min().item(), found.max().item(), codec.config.codebook_size
    if low < 0 or high >= size:
        raise ValueError(f"the codec gives codes from {low} to {high}, its codebooks have {size}")
    return found.T.to(torch.int16).contiguous().cpu().numpy()


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


def codec_fingerprint(codec_dir):
    """16 hex digits of the codec's config and weights and of PIPELINE. Raises UserError."""
    digest, weights = hashlib.sha256(PIPELINE), sorted(Path(codec_dir).glob("*.safetensors"))
    require(weights, f"{codec_dir}: holds no *.safetensors weights; take the native codec")
    for path in sorted([*weights, *Path(codec_dir).glob("config.json")]):
        digest.update(path.name.encode() + bytes.fromhex(checkpoint.sha256(path)))
    return digest.hexdigest()[:16]


def key_of(clip, filled, *parts):
    """16-byte key of a Clip's cut and of `parts`, which identify its recording."""
    cut = "" if clip.offset is None else f"{clip.offset}+{clip.duration}"
    text = "\0".join(map(str, (*parts, f"{cut} filled" if filled else cut)))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:16]


def file_keys(clips):
    """((n, 2) int64 size and date in ns, (n,) keys) of clips; OSError for a missing file."""
    stats = [(about.st_size, about.st_mtime_ns) for about in (os.stat(c.path) for c in clips)]
    keys = [key_of(c, c.filled, c.path, *about) for c, about in zip(clips, stats)]
    return np.array(stats, np.int64).reshape(-1, 2), np.array(keys, KEY)


def digest_columns(columns):
    """SHA-256 in hex of a shard's columns except the codes."""
    return hashlib.sha256(b"".join(columns[name].tobytes() for name in COLUMNS)).hexdigest()


def write_shard(folder, encoded, files):
    """Write a shard of {content key: ((T, K) codes, (5,) MEASURES)}, {file key: content key}."""
    def raw(keys):
        return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
    # contiguous: safetensors writes raw memory
    codes = [np.ascontiguousarray(one) for one, _ in encoded.values()]
    columns = {
        "lengths": np.array(list(map(len, codes)), np.int32), "keys": raw(encoded),
        "files": raw(files), "file_keys": raw(files.values()),
        "checksums": np.array(list(map(zlib.crc32, codes)), np.uint32),
        "measures": np.array([known for _, known in encoded.values()], np.float32).reshape(-1, 5)}
    about = {"sha256": digest_columns(columns)}
    tensors = {"codes": np.concatenate(codes or [np.empty((0, 0), np.int16)]), **columns}
    checkpoint.write_atomically(Path(folder) / f"codes-{uuid.uuid4().hex}.safetensors",
                                lambda path: tensor_io.save(tensors, path, about, save_file))


def read_shard(path, with_codes=False):
    """{name: array} of COLUMNS of a shard; UserError if these, or its codes, are damaged."""
    try:
        # open() gives the reason, safe_open does not
        with open(path, "rb"), safe_open(path, "np") as file:
            found = {name: file.get_tensor(name) for name in COLUMNS}
            codes = file.get_tensor("codes") if with_codes else None
            digest = (file.metadata() or {}).get("sha256")
        if digest_columns(found) != digest:
            raise ValueError("its columns have another checksum than when they were written")
        if with_codes:
            ends = np.cumsum(found["lengths"], dtype=np.int64).tolist()
            for start, stop, checksum in zip([0, *ends], ends, found["checksums"].tolist()):
                check_clip(codes[start:stop], checksum)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({error}); {REMEDY}")
    return found


def check_clip(codes, checksum):
    """ValueError unless codes match their checksum and lie within the embedding's rows."""
    if codes.size and (codes.min() < 0 or codes.max() >= CODES):
        raise ValueError(f"codes beyond 0 to {CODES - 1}")
    if zlib.crc32(codes) != checksum:
        raise ValueError("codes with another checksum than when they were written")


def read_index(folder):
    """(shard names, {column: array} of all their clips and files). "where", (n, 4) int64, has each
    clip's shard, first row, frames and checksum. The last row of each column means not found."""
    parts, names = [], os.listdir(folder) if os.path.exists(folder) else ()
    shards = sorted(name for name in names if re.fullmatch(r"codes-\w+\.safetensors", name))
    for number, name in enumerate(shards):
        part = read_shard(Path(folder) / name)
        lengths = part["lengths"].astype(np.int64)
        part |= {name: part[name].view(KEY).reshape(-1) for name in ("keys", "files", "file_keys")}
        part["where"] = np.stack([np.full(len(lengths), number), np.cumsum(lengths) - lengths,
                                  lengths, part["checksums"]], axis=1, dtype=np.int64)
        parts.append(part)
    parts.append({"keys": np.zeros(1, KEY), "files": np.zeros(1, KEY),
                  "file_keys": np.zeros(1, KEY), "where": np.full((1, 4), -1),
                  "measures": np.full((1, 5), np.nan, np.float32)})
    return shards, {name: np.concatenate([part.pop(name) for part in parts])
                    for name in list(parts[-1])}


def find(keys, wanted):
    """(n,) indices of wanted keys in keys; the last index means not found."""
    order = np.argsort(keys, kind="stable")
    at = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return np.where(keys[at] == wanted, at, len(keys) - 1)


def look_up(folder, clips):
    """(shard names, (n, 4) "where" of clips, (n, 5) float32 MEASURES, (m, 3) int64 number, size
    and date of missing clips). First checks the codes of all shards in use."""
    with ThreadPoolExecutor(16) as pool:        # bound by the file system
        stats, wanted = map(np.concatenate, zip(file_keys([]), *pool.map(
            lambda start: file_keys(clips[start:start + 8192]), range(0, len(clips), 8192))))
        shards, index = read_index(folder)
        at = find(index["keys"], index["file_keys"][find(index["files"], wanted)])
        where = index["where"][at]
        for _ in pool.map(lambda i: read_shard(Path(folder) / shards[i], with_codes=True),
                          np.unique(where[where[:, 0] >= 0, 0])):
            pass
    new = np.flatnonzero(where[:, 0] < 0)
    return shards, where, index["measures"][at], np.column_stack([new, stats[new]])


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
            found = self.open_shards[shard].get_slice("codes")[start:start + frames]
            check_clip(found, checksum)
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{path}: is damaged ({error}); {REMEDY}")
        return found

    def __getstate__(self):
        return {**self.__dict__, "open_shards": {}}


# ---- Filling the cache, all ranks together


def ensure_codes(world, clips, how):
    """Encode missing clips. Collective; only rank 0 needs `clips` (unique Clips). It gets (folder,
    shard names, (n, 4) "where" of clips, (n, 5) MEASURES with NaN for unknown sound, {number of a
    clip without codes: file and reason}); such a clip's row has 0 frames.

    A cache with all clips is only read. how: Encoding."""
    found = None

    def waiting():
        if watchdog.stop_requested():
            raise watchdog.Stopped("")

    def plan():
        nonlocal found
        folder = Path(how.cache_dir) / codec_fingerprint(how.codec_dir)
        found = look_up(folder, clips)
        if not len(found[-1]):
            return folder, []
        checkpoint.prepare_folder(how.cache_dir, "--code_cache")
        folder.mkdir(exist_ok=True)
        try:
            lock.enter_context(checkpoint.lock_folder(
                folder, "--code_cache", wait_s=0.9 * how.wait_limit_s, waiting=waiting))
        except watchdog.Stopped:
            return folder, None
        checkpoint.remove_named(folder, checkpoint.TEMPORARY)
        found = look_up(folder, clips)      # another run may have filled it
        files = {}
        for i, *about in found[-1].tolist():
            files.setdefault(clips[i].path, (clips[i].path, tuple(about), {}))[2][i] = clips[i]
        # largest first: ranks would wait for one that starts a long file last
        jobs = sorted(files.values(), key=lambda job: (-job[1][0], job[0]))
        return folder, [jobs[rank::world.size] for rank in range(world.size)]

    with contextlib.ExitStack() as lock:
        folder, work = rank0(world, plan)
        shares = [({}, work is None)]
        if work:
            failed = encode_share(world, work, folder, how)
            torch.cuda.empty_cache()        # free the codec's memory
            shares = all_gather(world, (failed, bool(watchdog.stop_requested())))
        if any(stop for _, stop in shares):
            raise watchdog.Stopped("asked to stop while audio was being encoded; finished clips "
                                   "stay in the code cache")
        if not world.is_main:
            return None
        shards, where, measures, missing = look_up(folder, clips) if work else found
    bad = {i: why for failed, _ in shares for i, why in failed.items()}
    for i in missing[:, 0].tolist():
        bad.setdefault(i, f"{clips[i].path}: changed while it was being read, or is a copy of one "
                          "that cannot be used")
    where[missing[:, 0], 2] = 0
    return folder, shards, where, measures, bad


def decode_job(job):
    """For each cut of a file (content key, wave (n,) or saved codes (T, K), measures), or the
    reason for failure. job: (path, (size, date), {number: clip})."""
    path, _, cuts = job
    try:
        if path.endswith(SAVED):
            digest, found = read_codes(path)
            seconds = np.array([len(found) / FRAME_RATE, *[np.nan] * 4], np.float32)
            return [(key_of(clip, False, digest), found, seconds) for clip in cuts.values()]
        digest, rate, parts = decode_file(path, [(c.offset, c.duration) for c in cuts.values()])
    except ValueError as error:
        return [str(error)] * len(cuts)
    sounds = []
    for part, clip in zip(parts, cuts.values()):
        try:        # numpy: tensors would use /dev/shm, which is small in containers
            wave, measures = cut_wave(part, rate, clip.offset, clip.duration)
            # a clip that needs no padding has the key of the unpadded clip
            padded = clip.filled and measures[0] < FILLED_S
            wave = filled(wave) if padded else wave
            sounds.append((key_of(clip, padded, digest), wave, measures))
        except ValueError as error:
            sounds.append(str(error))
    return sounds


def encode_share(world, work, folder, how):
    """Encode this rank's part of `work`, the jobs of all ranks -> {number of a bad clip: why}."""
    from tqdm import tqdm
    jobs, total = work[world.rank], sum(len(cuts) for share in work for *_, cuts in share)
    if not jobs:
        return {}
    books = how.num_codebooks
    codec, bandwidth = load_codec(how.codec_dir, world.device, books)
    known, store = np.sort(read_index(folder)[1]["keys"]), world.store or HashStore()
    bad, encoded, files, start, flushed = {}, {}, {}, time.monotonic(), time.monotonic()
    workers = min(len(jobs), max(1, how.processes // world.local_size) if how.processes else 0)
    loader = DataLoader(jobs, batch_size=None, num_workers=workers, collate_fn=decode_job,
                        worker_init_fn=watchdog.init_loader,
                        multiprocessing_context="fork" if workers else None)

    def count(name, n):     # over all ranks, for a bar on rank 0
        return store.add(f"encoding audio/{name}", n)

    with tqdm(total=total, unit="clip", desc="encoding audio", disable=not world.is_main,
              mininterval=0.1 if sys.stderr.isatty() else 30) as bar:
        for sounds, (path, about, cuts) in zip(packing.iterate(loader), jobs):
            heard = 0.0
            for (number, clip), sound in zip(cuts.items(), sounds):
                if isinstance(sound, str):
                    bad[number] = f"{path}: {sound}"
                    continue
                key, wave, measures = sound
                heard += float(measures[0])
                files[key_of(clip, clip.filled, path, *about)] = key
                at = np.searchsorted(known, name := np.array([key], KEY))
                # for equal content under two paths, the first rank to claim it encodes it
                if (known[at % len(known)] == name).any() or count(key.hex(), 1) > 1:
                    continue
                try:
                    if wave.ndim == 2:
                        check_codes(wave, clip.offset, books, codec.config.codebook_size)
                    else:
                        wave = encode_clip(codec, wave, bandwidth, books)
                    encoded[key] = wave.astype(np.int16), measures
                except torch.OutOfMemoryError:
                    bad[number] = f"{path}: is too long to encode on this device"
                except ValueError as error:
                    bad[number] = f"{path}: {error}"
            done = count("clips", len(cuts))
            hours = count("milliseconds", round(1000 * heard)) / 3.6e6
            speed = 3600 * hours / (time.monotonic() - start)
            bar.set_postfix_str(f"{hours:.2f} h of audio, {speed:,.0f} x real time", refresh=False)
            bar.update(done - bar.n)
            if count("stop", int(bool(watchdog.stop_requested()))):
                break
            if len(files) >= SHARD_CLIPS or time.monotonic() - flushed > SHARD_SECONDS:
                write_shard(folder, encoded, files)
                encoded, files, flushed = {}, {}, time.monotonic()
    if files:
        write_shard(folder, encoded, files)
    return bad


# ---- A dry run: lengths from headers, no codes


def header_frames(clip, config, num_codebooks):
    """Codec frames of a Clip, read from the file header only; other damage is found later."""
    if clip.path.endswith(SAVED):
        found = read_codes(clip.path)[1]
        check_codes(found, clip.offset, num_codebooks, config.codebook_size)
        return len(found)
    with readable(clip.path) as file, open_sound(file) as audio:
        rate, stop = audio.samplerate, audio.frames
    start = round((clip.offset or 0) * rate)
    if clip.duration:
        stop = min(stop, start + round(clip.duration * rate))
    samples = (2 * max(0, stop - start) * SAMPLE_RATE + rate) // (2 * rate)   # soxr rounds half up
    check_seconds(samples / SAMPLE_RATE, clip.offset, clip.duration)
    return codec_frames(max(samples, round(FILLED_S * SAMPLE_RATE) * clip.filled), config)


def plan_codes(clips, how):
    """The result of ensure_codes without encoding; "where" of a new clip is -1, -1, frames."""
    config, _ = codec_config(how.codec_dir, how.num_codebooks)
    folder, bad = Path(how.cache_dir) / codec_fingerprint(how.codec_dir), {}
    *_, where, measures, missing = look_up(folder, clips)

    def frames(i):
        try:
            return header_frames(clips[i], config, how.num_codebooks)
        except ValueError as error:
            bad[i] = f"{clips[i].path}: {error}"
            return 0

    with ThreadPoolExecutor(16) as pool:
        where[missing[:, 0], 2] = list(pool.map(frames, missing[:, 0].tolist()))
    if len(missing):
        require_package("torchaudio", "encoding new audio needs torchaudio", "torchaudio==2.11.0")
    return folder, [], where, measures, bad
