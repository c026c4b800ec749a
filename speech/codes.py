"""Audio files -> codec codes, each clip once, ever: decode, encode, and the cache that runs share.

    folder, shards, where = codes.ensure_codes(world, clips, codes.Encoding(codec, cache, 8))
    codes.CodeReader(folder, shards).codes(*where[0].tolist())      # (T, 8) int16 of the first clip

A file is hashed and decoded piece by piece, averaged to mono, cut, and resampled to 24 kHz. Each
distinct content is encoded once, clip by clip: zeros after the shorter ones of a batch would
change codes. Codes lie in append-only shards under CACHE/<codec fingerprint>/: int16 codes, their
lengths, a content key for each clip, and for each (path, size, date, cut) the key it had, so that
later runs look at file dates alone. Shards appear whole, under unique names; one run at a time
fills a cache. Each clip's codes have a CRC-32, compared when a run starts and whenever they are
read; the other columns have a SHA-256. The codec is imported only when a clip is missing.
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

from core import checkpoint, json_files, packing, tensor_io, watchdog
from core.cli import UserError, problem_text
from core.dist import all_gather, rank0
from core.packing import parallel_map_ordered
from speech.choices import LONGEST_CLIP_S
from speech.conversations import AUDIO_FILES, FILLED_S

SAMPLE_RATE = 24_000
FRAME_RATE = 25                 # codec frames per second: 24 kHz / hop 960
MIN_SAMPLES = 960               # one codec frame
CODES = 1024                    # values of a code: 0 to 1023
SAVED = ".npy"                  # codes of generate_tts.py --save_codes: taken as they are
PIECE = 2**20                   # samples that are decoded at a time
WHOLE = 0.99                    # of the samples that a header promises; with fewer it is cut off
PAST_S = 0.3                    # that a cut may reach past the end of its recording
LOUDEST = 10.0                  # peak; full scale is 1, mp3 and float files may go beyond a little
MEASURES = ("seconds", "peak", "rms", "clipped", "dc")      # of measure()
PIPELINE = b"mono-mean soxr-HQ 24k v2"      # of the fingerprint: another name for other waveforms
KEY = "S16"                     # 128 bits of SHA-256, compared as bytes
BLOCK = 8192                    # clips whose file dates are asked for together
COLUMNS = ("lengths", "keys", "files", "file_keys", "checksums", "measures")    # besides the codes
SHARD_CLIPS, SHARD_SECONDS = 4096, 60.0     # a crash loses at most this much encoding


# ---- Decoding. A faulty file is a ValueError with the reason.


def decode_audio(path, cuts):
    """(sha256 hex of a file, [mono float32 waveform (n,) at 24 kHz of each cut]); cuts: [(offset,
    duration)] in seconds or None.
    """
    digest, rate, parts = decode_file(path, cuts)
    return digest, [cut_wave(part, rate, *cut) for part, cut in zip(parts, cuts)]


def decode_file(path, cuts):
    """(sha256 hex of a file, its rate in Hz, [mono float32 samples (n,) of each cut])."""
    with readable(path) as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
        with open_sound(data) as file:
            rate, promised, share = file.samplerate, file.frames, promised_share(file.extra_info)
            if all(cut == (None, None) for cut in cuts):
                check_seconds(max(promised / rate, 1))      # before it fills the memory
            # a recording may last for hours: no more is kept than check_seconds refuses
            most = LONGEST_CLIP_S * rate + 1
            starts = [round((offset or 0) * rate) for offset, _ in cuts]
            wanted = [(start, start + (min(most, round(length * rate)) if length else most))
                      for start, (_, length) in zip(starts, cuts)]
            parts, total = read_parts(file, wanted)
    promised = max(promised, total * share)
    if total < WHOLE * promised:
        raise ValueError(f"is cut off: its header promises {promised / rate:.2f} s, "
                         f"{total / rate:.2f} s are there")
    return digest, rate, parts


@contextlib.contextmanager
def readable(path):
    """An open file; what libsndfile and the system say about it is a ValueError."""
    import soundfile
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ValueError("is an empty file")
            yield file
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})")
    except soundfile.SoundFileError as error:
        why = str(error).rpartition(": ")[2].strip().rstrip(".")        # without a buffer's name
        name = os.path.basename(path)
        raise ValueError(f"is not readable audio ({why}); wav, flac, mp3 and ogg are read; convert "
                         f"others: ffmpeg -i {name} {os.path.splitext(name)[0]}.flac")


def open_sound(file):
    """soundfile.SoundFile of a binary file. ValueError for one that does not say how long it is, as
    programs write into a pipe: of an MP3 the length would be guessed from its first frames.
    """
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


def promised_share(log):
    """Bytes of sound that a header promises over those there, by libsndfile's log; 1 for pipes'."""
    found = re.search(r"(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", log)
    promised, there = map(int, found.groups()) if found else (1, 1)
    return 1.0 if promised >= 0x7FFF0000 else max(1.0, promised / max(1, there))


def read_parts(file, wanted):
    """([mono float32 samples (n,) of each range], samples in all) of an open SoundFile."""
    parts, total, size = [[np.empty(0, np.float32)] for _ in wanted], 0, PIECE
    while size == PIECE:        # from its start: seeks in an mp3 may miss by a frame
        piece = file.read(PIECE, dtype="float32", always_2d=True)
        size = len(piece)
        with np.errstate(over="ignore", invalid="ignore"):      # cut_wave refuses what comes of it
            mono = piece.mean(axis=1)
        for part, (start, stop) in zip(parts, wanted):
            if start < total + size and stop > total:
                part.append(mono[max(0, start - total):stop - total])
        total += size
    return [np.concatenate(part) for part in parts], total


def cut_wave(part, rate, offset=None, length=None):
    """Waveform (m,) float32 at 24 kHz of one part of decode_file's."""
    import soxr
    check_seconds(len(part) / rate, offset, length)
    where, low, high = place_of(offset), float(part.min()), float(part.max())
    if not np.isfinite(part).all():
        raise ValueError(f"contains samples that are not finite numbers{where}")
    if max(-low, high) > LOUDEST:
        raise ValueError(f"peaks at {max(-low, high):.3g}{where}; full scale is 1, so its samples "
                         "have another scale")
    if low == high:
        raise ValueError(f"is silent: every sample{where} is {low:g}")
    return np.ascontiguousarray(soxr.resample(part, rate, SAMPLE_RATE, quality="HQ"), np.float32)


def place_of(offset):
    return f" from offset {offset} s" if offset else ""


def check_seconds(there, offset=None, length=None):
    """Refuse a cut of which `there` seconds are in its recording: too many, too few, or not all."""
    if there > LONGEST_CLIP_S:
        raise ValueError(f"lasts {there / 60:.1f} minutes, of which at most "
                         f"{LONGEST_CLIP_S / 60:.1f} are decoded: cut it")
    if length and there and length - there > PAST_S:
        raise ValueError(f"ends {length - there:.2f} s before the cut from {offset:g} to "
                         f"{offset + length:g} s: times of another recording, or not seconds")
    if round(there * SAMPLE_RATE) < MIN_SAMPLES:
        raise ValueError(f"is too short: {there:.3f} s{place_of(offset)}; a clip needs "
                         f"{MIN_SAMPLES / SAMPLE_RATE} s")


def filled(wave):
    """A waveform at 24 kHz with zeros after it up to FILLED_S seconds."""
    return np.pad(wave, (0, max(0, round(FILLED_S * SAMPLE_RATE) - len(wave))))


def measure(part, rate):
    """(5,) float32 of MEASURES of mono samples (n,): seconds; the largest and the root mean square
    amplitude, full scale is 1; the share of samples at full scale; the mean.
    """
    loud = np.abs(part)
    return np.array([
        len(part) / rate, loud.max(), np.sqrt(np.mean(np.square(part, dtype=np.float64))),
        np.mean(loud >= 0.999), part.mean(dtype=np.float64)], np.float32)


def holds_codes(path):
    """True if a file holds saved codes, by its first bytes."""
    if path.endswith(AUDIO_FILES):      # these are opened once, to be decoded
        return False
    with readable(path) as file:
        return file.read(6) == b"\x93NUMPY"


def read_codes(path):
    """(sha256 hex, (T, K) codes) of a .npy file that generate_tts.py --save_codes wrote."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            found = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:      # numpy has many
        raise ValueError(f"cannot be read ({getattr(error, 'strerror', None) or error})")
    if found.dtype.kind not in "iu" or found.ndim != 2:
        raise ValueError("not (frames, codebooks) whole numbers, as --save_codes writes them")
    return digest, found


def check_codes(found, offset, num_codebooks, size):
    """Refuse saved codes that are not (T, num_codebooks) from 0 to size - 1, or are to be cut."""
    if offset is not None:
        raise ValueError("a part of saved codes cannot be taken: drop offset and duration")
    if found.shape[1] != num_codebooks:
        raise ValueError(f"has codes of {found.shape[1]} codebooks, not of {num_codebooks}")
    if not len(found) or found.min() < 0 or found.max() >= size:
        raise ValueError(f"has codes beyond 0 to {size - 1}, or none")


# ---- Lengths from headers, for a dry run


def codec_frames(samples, config):
    """Codec frames of a waveform of `samples` at 24 kHz; config: of codec_config.

    The semantic branch decides: 24 -> 16 kHz, 160 zeros at both ends, HuBERT's unpadded
    convolutions, then every semantic_downsample_factor-th vector (transformers' encode).
    """
    n = -(-samples * config.semantic_sample_rate // config.sample_rate) + 2 * 160
    hubert = config.semantic_model_config
    for kernel, stride in zip(hubert.conv_kernel, hubert.conv_stride):
        n = (n - kernel) // stride + 1
    return -(-n // config.semantic_downsample_factor)


def header_frames(clip, config, num_codebooks):
    """Codec frames of a Clip from its file's header alone; damage after it is found later."""
    if holds_codes(clip.path):
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


# ---- The codec


def codec_config(codec_dir, num_codebooks):
    """(HiggsAudioV2TokenizerConfig, kbit/s that give num_codebooks); needs no torchaudio."""
    from transformers import HiggsAudioV2TokenizerConfig
    try:
        config = HiggsAudioV2TokenizerConfig.from_pretrained(codec_dir)
        rates = (config.sample_rate, config.frame_rate)
    except Exception as error:
        raise UserError(f"{codec_dir}: codec cannot be loaded ({str(error).splitlines()[0]})")
    if rates != (SAMPLE_RATE, FRAME_RATE):
        raise UserError(f"{codec_dir}: codec runs at {rates[0]} Hz and {rates[1]} frames/s, not at "
                        f"{SAMPLE_RATE} and {FRAME_RATE}")
    bandwidth = num_codebooks * config.frame_rate * config.codebook_nbits / 1000
    if bandwidth not in config.target_bandwidths:
        raise UserError(f"{codec_dir}: {num_codebooks} codebooks need bandwidth {bandwidth}, "
                        f"the codec has {list(config.target_bandwidths)}")
    return config, bandwidth


def check_encoder():
    """UserError unless all that encoding new audio imports is there."""
    try:
        import torchaudio  # noqa: F401  (the codec resamples with it; transformers says less)
    except ImportError:
        raise UserError("encoding new audio needs torchaudio, which is not installed: run "
                        "launch/setup.sh or pip install torchaudio==2.11.0")


def load_codec(codec_dir, device, num_codebooks):
    """(codec in eval mode on the device, kbit/s that give num_codebooks). Raises UserError."""
    check_encoder()
    from transformers import HiggsAudioV2TokenizerModel
    _, bandwidth = codec_config(codec_dir, num_codebooks)
    try:
        codec, info = HiggsAudioV2TokenizerModel.from_pretrained(
            codec_dir, dtype=torch.float32, output_loading_info=True)
    except Exception as error:
        raise UserError(f"{codec_dir}: codec cannot be loaded ({str(error).splitlines()[0]})")
    if lost := sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]):
        raise UserError(f"{codec_dir}: {len(lost)} missing or unexpected weights, first {lost[:5]}")
    for name, weight in codec.named_parameters():
        if not tensor_io.is_finite(weight):
            raise UserError(f"{codec_dir}: {name} holds NaN or infinity; it cannot be used")
    return codec.to(device).eval(), bandwidth


@torch.no_grad()
def encode_clip(codec, wave, bandwidth, num_codebooks):
    """Mono float32 waveform (n,) at 24 kHz -> (T, num_codebooks) int16 codes, numpy.

    Never in TF32: a cached code must not depend on the flags of the run that made it. ValueError
    for codes that the codec's codebooks do not have.
    """
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        wave = torch.from_numpy(wave)[None, None].to(codec.device)
        found = codec.encode(wave, bandwidth=bandwidth).audio_codes[0]
    assert found.shape[0] == num_codebooks, f"codec gave {found.shape[0]} codebooks"
    low, high, size = found.min().item(), found.max().item(), codec.config.codebook_size
    if low < 0 or high >= size:
        raise ValueError(f"the codec gives codes from {low} to {high}, its codebooks have {size}")
    return found.T.to(torch.int16).contiguous().cpu().numpy()


# ---- The cache: keys, shards, their index


@dataclass(frozen=True)
class Encoding:
    """Settings of encoding clips, and its folder. processes: that decode, on this node.
    wait_limit_s: seconds to wait for another run that fills the cache.
    """
    codec_dir: Path
    cache_dir: Path
    num_codebooks: int
    processes: int = 0
    wait_limit_s: float = 6 * 3600


def codec_fingerprint(codec_dir):
    """16 hex digits of the codec's config and weights and of PIPELINE. Raises UserError."""
    digest = hashlib.sha256(PIPELINE)
    weights = sorted(Path(codec_dir).glob("*.safetensors"))
    if not weights:
        raise UserError(f"{codec_dir}: holds no *.safetensors weights; take the native codec, "
                        "bosonai/higgs-audio-v2-tokenizer, not model.pth of 2025")
    for path in sorted([*weights, *Path(codec_dir).glob("config.json")]):
        digest.update(path.name.encode())
        with json_files.open_file(path) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def key_of(*parts):
    text = "\0".join(map(str, parts)).encode("utf-8", "backslashreplace")
    return hashlib.sha256(text).digest()[:16]


def cut_text(clip, filled):
    text = "" if clip.offset is None else f"{clip.offset}+{clip.duration}"
    return f"{text} filled" if filled else text


def content_key(file_digest, clip, filled=False):
    """16 bytes of a file's content (its SHA-256 in hex digits) and a Clip's cut of it. filled:
    zeros were added; a clip that is long enough has the key of the plain one.
    """
    return key_of(file_digest, cut_text(clip, filled))


def file_key(clip, size, mtime_ns):
    """16 bytes of path, size, date and cut: the same as long as nobody touches the file."""
    return key_of(clip.path, size, mtime_ns, cut_text(clip, clip.filled))


def file_keys(clips):
    """((n, 2) int64 of size and date in ns, (n,) keys) of clips; UserError for a file now gone."""
    stats, keys = [], []
    for clip in clips:
        try:
            about = os.stat(clip.path)
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read any more ({error.strerror})")
        stats.append((about.st_size, about.st_mtime_ns))
        keys.append(file_key(clip, *stats[-1]))
    return np.array(stats, np.int64).reshape(-1, 2), np.array(keys, KEY)


class Batch:
    """A shard before it is written."""

    def __init__(self, folder, num_codebooks):
        self.folder, self.num_codebooks = Path(folder), num_codebooks
        self.codes, self.keys, self.measures, self.files, self.file_keys = [], [], [], [], []

    def add_codes(self, key, codes, measures=None):
        """measures: of measure(), None where the sound is not at hand."""
        self.keys.append(key)
        self.codes.append(codes)
        self.measures.append(np.full(len(MEASURES), np.nan) if measures is None else measures)

    def add_file(self, file, key):
        self.files.append(file)
        self.file_keys.append(key)

    def write(self):
        """Write and empty the shard, if there is anything in it. UserError where that fails."""
        if not self.files:
            return

        def raw(keys):
            return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
        codes = np.concatenate(self.codes or [np.empty((0, self.num_codebooks), np.int16)])
        sums = [zlib.crc32(np.ascontiguousarray(one)) for one in self.codes]
        columns = {"measures": np.array(self.measures, np.float32).reshape(-1, len(MEASURES)),
                   "lengths": np.array(list(map(len, self.codes)), np.int32),
                   "keys": raw(self.keys), "files": raw(self.files),
                   "file_keys": raw(self.file_keys), "checksums": np.array(sums, np.uint32)}
        about = {"sha256": digest_columns(columns)}
        tensors = {"codes": np.ascontiguousarray(codes), **columns}     # written as memory lies
        try:
            checkpoint.write_atomically(
                self.folder / f"codes-{uuid.uuid4().hex}.safetensors",
                lambda path: tensor_io.save(tensors, path, about, save_file))
        except Exception as error:
            remedy = "; free disk space" if "No space left" in str(error) else ""
            raise UserError(f"{self.folder}: code cache shard cannot be written ({error}){remedy}")
        self.__init__(self.folder, self.num_codebooks)


def digest_columns(columns):
    """SHA-256, in hex digits, of a shard's columns besides the codes."""
    digest = hashlib.sha256()
    for name in COLUMNS:
        digest.update(np.ascontiguousarray(columns[name]))
    return digest.hexdigest()


def shard_names(folder):
    names = os.listdir(folder) if os.path.exists(folder) else []
    return sorted(name for name in names if re.fullmatch(r"codes-\w+\.safetensors", name))


def read_shard(path, with_codes=False):
    """{name: array} of COLUMNS of a shard, and of "codes" if asked for. ValueError when it is
    damaged; UserError when it cannot be read, which says nothing about it.
    """
    try:
        # open() names the reason: to safe_open all are the same
        with open(path, "rb"), safe_open(path, "np") as file:
            found = {name: file.get_tensor(name) for name in COLUMNS}
            codes = file.get_tensor("codes") if with_codes else None
            digest = (file.metadata() or {}).get("sha256")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})")
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"it is not a shard: {error}")
    if digest_columns(found) != digest:
        raise ValueError("its columns have another checksum than when they were written")
    for name in ("keys", "files", "file_keys"):
        found[name] = found[name].view(KEY).reshape(-1)
    if with_codes:
        check_range(codes)
        ends = np.cumsum(found["lengths"], dtype=np.int64).tolist()
        for number, (start, stop) in enumerate(zip([0, *ends], ends)):
            if zlib.crc32(codes[start:stop]) != found["checksums"][number]:
                raise ValueError(f"clip {number} of it has another checksum than when it was "
                                 "written")
    return found


def check_range(codes):
    """ValueError unless all are of a codebook: others would be looked up beyond the embeddings."""
    if codes.size and (codes.min() < 0 or codes.max() >= CODES):
        raise ValueError(f"it has codes beyond 0 to {CODES - 1}")


def search(haystack, needles):
    """(place of each needle in a sorted array, whether it is there)."""
    if not len(haystack):
        return np.zeros(len(needles), np.int64), np.zeros(len(needles), bool)
    at = np.minimum(np.searchsorted(haystack, needles), len(haystack) - 1)
    return at, haystack[at] == needles


class CacheIndex:
    """Where every cached clip is: sorted keys in numpy arrays, no Python object per clip."""

    def __init__(self, folder, damaged=()):
        """damaged: {shard: its damage} of those known to be; self.damaged has all."""
        self.shards, self.damaged, parts = [], dict(damaged), []
        for name in shard_names(folder):
            if name in self.damaged:
                continue
            try:
                part = read_shard(Path(folder) / name)
            except FileNotFoundError:       # set aside by another run since
                continue
            except ValueError as why:
                self.damaged[name] = str(why)
                continue
            ends = np.cumsum(part["lengths"], dtype=np.int64)
            parts.append(part | {"start": ends - part["lengths"],
                                 "shard": np.full(len(ends), len(self.shards))})
            self.shards.append(name)

        def joined(name, dtype=np.int64):
            return np.concatenate([np.empty(0, dtype), *(part.pop(name) for part in parts)])
        keys, files = joined("keys", KEY), joined("files", KEY)
        order, by_file = np.argsort(keys, kind="stable"), np.argsort(files, kind="stable")
        self.keys, self.files = keys[order], files[by_file]
        self.file_keys = joined("file_keys", KEY)[by_file]
        columns = map(joined, ("shard", "start", "lengths", "checksums"))
        self.where = np.stack(list(columns), axis=1)[order]

    def has(self, key):
        """True if this content key (16 bytes) has codes."""
        return bool(search(self.keys, np.array([key], KEY))[1][0])

    def find_files(self, file_keys):
        """(n,) file keys -> (n, 4) int64: shard, first row, frames, checksum; -1 where unknown."""
        at, known = search(self.files, file_keys)
        found = np.full((len(file_keys), 4), -1, np.int64)
        if known.any():
            row, there = search(self.keys, self.file_keys[at[known]])
            found[np.flatnonzero(known)[there]] = self.where[row[there]]
        return found

    def find_clips(self, clips, processes=0):
        """((n, 4) of find_files, (m, 3) int64 of number, size and date in ns of those unknown).

        clips: a sequence that gives lists for slices. processes: that help to ask for file dates.
        """
        found, unknown = [np.empty((0, 4), np.int64)], [np.empty((0, 3), np.int64)]

        def keys(first, step):
            for start in range(first * BLOCK, len(clips), step * BLOCK):
                yield start, *file_keys(clips[start:start + BLOCK])

        def take(part):
            start, stats, keys = part
            found.append(self.find_files(keys))
            new = np.flatnonzero(found[-1][:, 0] < 0)
            unknown.append(np.column_stack([start + new, stats[new]]))

        parallel_map_ordered(keys, processes, take)
        return np.concatenate(found), np.concatenate(unknown)


def look_up(folder, clips, processes=0):
    """(CacheIndex, *its find_clips(clips)); used shards' codes are compared with their sums."""
    index = CacheIndex(folder)
    found, unknown = index.find_clips(clips, processes)
    used = [index.shards[i] for i in np.unique(found[:, 0]) if i >= 0]
    damaged = dict(index.damaged)

    def check(first, step):
        for name in used[first::step]:
            try:
                read_shard(Path(folder) / name, with_codes=True)
            except ValueError as why:
                yield name, str(why)

    parallel_map_ordered(check, processes, lambda part: damaged.update([part]))
    if len(damaged) > len(index.damaged):
        index = CacheIndex(folder, damaged)
        found, unknown = index.find_clips(clips, processes)
    return index, found, unknown


class CodeReader:
    """Reads codes from shards, which each process opens for itself."""

    def __init__(self, folder, shards):
        self.folder, self.shards, self.open_shards = str(folder), shards, {}

    def codes(self, shard, start, frames, checksum=-1):
        """(frames, 8) int16 codes. UserError when they are not those that were written."""
        path = os.path.join(self.folder, self.shards[shard])
        try:
            if shard not in self.open_shards:
                self.open_shards[shard] = safe_open(path, "np").__enter__()
            found = self.open_shards[shard].get_slice("codes")[start:start + frames]
            check_range(found)
            if checksum >= 0 and zlib.crc32(found) != checksum:
                raise ValueError("it has another checksum")
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{path}: a clip in it cannot be read ({error}); start the same "
                            "command again (for a prepared folder prepare_tts.py), and its clips "
                            "are encoded again")
        return found

    def __getstate__(self):
        return {**self.__dict__, "open_shards": {}}


def measures_of(folder, shards, where):
    """(n, 5) float32 of MEASURES of clips whose codes lie at `where`; NaN without their sound."""
    found = np.full((len(where), len(MEASURES)), np.nan, np.float32)
    for number, name in enumerate(shards):
        mine = np.flatnonzero(where[:, 0] == number)
        if len(mine):
            try:
                columns = read_shard(Path(folder) / name)
            except ValueError as error:
                raise UserError(f"{Path(folder) / name}: is damaged ({error}); rerun the command")
            starts = np.cumsum(columns["lengths"], dtype=np.int64) - columns["lengths"]
            found[mine] = columns["measures"][np.searchsorted(starts, where[mine, 1])]
    return found


# ---- Filling the cache, all ranks together


def ensure_codes(world, clips, how, bad=None):
    """Encode missing clips. On every rank; `clips` (unique Clips) matters on rank 0 alone.

    -> on rank 0 (folder, shard names, (n, 4) of find_files), else None. A cache that has all clips
    is only read; damaged shards are set aside, and their clips encoded again. how: Encoding. bad: a
    dict that on rank 0 takes {number of a clip that has no codes: file and reason}, whose row says
    0 frames; without it these are a UserError.
    """
    folder = index = found = unknown = None     # on rank 0
    unusable = {} if bad is None else bad

    def plan():
        nonlocal folder, index, found, unknown
        folder = Path(how.cache_dir) / codec_fingerprint(how.codec_dir)
        index, found, unknown = look_up(folder, clips, how.processes)
        if not len(unknown) and not index.damaged:
            return folder, []
        try:
            cleanup.enter_context(lock_cache(folder, 0.9 * how.wait_limit_s))
        except OSError as error:
            raise UserError(f"--code_cache {how.cache_dir}: {len(unknown)} of {len(clips)} "
                            f"clips are missing, and it cannot be written ({error.strerror})")
        except watchdog.Stopped:
            return folder, None
        # another run was filling it meanwhile
        if shard_names(folder) != sorted([*index.shards, *index.damaged]):
            index, found, unknown = look_up(folder, clips, how.processes)
        for name, why in index.damaged.items():     # so that nobody takes them for codes
            checkpoint.move_aside(folder / name, f"is damaged ({why})")
        if index.damaged:
            print("data       damaged shards of the code cache, now set aside: "
                  f"{len(index.damaged)}; clips to encode: {len(unknown)}", flush=True)
        return folder, share_work(clips, unknown, world.size) if len(unknown) else []

    with contextlib.ExitStack() as cleanup:
        place, work = rank0(world, plan)
        if work is None:
            raise watchdog.Stopped("asked to stop while another run was filling the code cache")
        if any(work):
            for part in all_gather(world, encode_share(world, work, place, how)):
                unusable.update(part)
            if any(all_gather(world, watchdog.stop_requested())):
                raise watchdog.Stopped("asked to stop while audio was being encoded; finished "
                                       "clips stays in the code cache")
            if world.is_main:
                index = CacheIndex(folder)
                found, unknown = index.find_clips(clips, how.processes)
                for i in unknown[:, 0].tolist():
                    unusable.setdefault(i, f"{clips[i].path}: changed while it was being read, or "
                                           "is a copy of one that cannot be used")
                found[unknown[:, 0], 2] = 0
    if bad is None and unusable and world.is_main:
        raise UserError(problem_text(list(dict.fromkeys(unusable.values()))))
    return (folder, index.shards, found) if world.is_main else None


def lock_cache(folder, wait_s):
    """The lock of a cache folder, which is made if need be. Stopped when asked to stop."""
    def waiting():
        if watchdog.stop_requested():
            raise watchdog.Stopped("")
    folder.mkdir(parents=True, exist_ok=True)
    lock = checkpoint.lock_folder(folder, "--code_cache", wait_s=wait_s, waiting=waiting)
    checkpoint.remove_named(folder, checkpoint.TEMPORARY)
    return lock


def share_work(clips, unknown, world_size):
    """Per rank, the list of (path, (size, date), {number: clip}) to encode."""
    files = {}
    for i, *about in unknown.tolist():
        files.setdefault(clips[i].path, (tuple(about), {}))[1][i] = clips[i]
    # largest first: a rank that begins a long file last would keep the others waiting
    paths = sorted(files, key=lambda path: (-files[path][0][0], path))
    return [[(path, *files[path]) for path in paths[i::world_size]] for i in range(world_size)]


def decode_job(job):
    """(sha256 hex of a file of share_work's, [for each cut its wave (n,) or saved codes (T, K), and
    its measures; or text of why there are none]).
    """
    path, _, cuts = job

    def wave(part, clip):
        try:        # numpy: tensors would travel through /dev/shm, which containers keep small
            found = cut_wave(part, rate, clip.offset, clip.duration)
            return filled(found) if clip.filled else found, measure(part, rate)
        except ValueError as error:
            return str(error)

    try:
        if holds_codes(path):
            digest, found = read_codes(path)
            seconds = np.array([len(found) / FRAME_RATE, *[np.nan] * 4], np.float32)
            return digest, [(found, seconds)] * len(cuts)
        digest, rate, parts = decode_file(path, [(c.offset, c.duration) for c in cuts.values()])
    except ValueError as error:
        return "", [str(error)] * len(cuts)
    return digest, list(map(wave, parts, cuts.values()))


def encode_share(world, work, folder, how):
    """Encode this rank's share of `work` into shards -> {clip: file and reason} of what fails."""
    bad, progress = {}, Progress(world, work)
    try:
        if work[world.rank]:
            encode_files(world, work[world.rank], folder, how, progress, bad)
    finally:
        progress.bar.close()        # an error's line begins after the bar
    return bad


def encode_files(world, mine, folder, how, progress, bad):
    index, seen = CacheIndex(folder), set()
    batch, flushed = Batch(folder, how.num_codebooks), time.monotonic()
    codec, bandwidth = load_codec(how.codec_dir, world.device, how.num_codebooks)
    workers = min(len(mine), max(1, how.processes // world.local_size) if how.processes else 0)
    loader = DataLoader(mine, batch_size=None, num_workers=workers, collate_fn=decode_job,
                        worker_init_fn=watchdog.init_loader,
                        multiprocessing_context="fork" if workers else None)
    for (digest, waves), (path, about, cuts) in zip(packing.iterate(loader), mine):
        heard = 0.0
        for (number, clip), found in zip(cuts.items(), waves):
            if isinstance(found, str):
                bad[number] = f"{path}: {found}"
                continue
            wave, measures = found
            seconds, saved = float(measures[0]), wave.ndim == 2
            heard += seconds
            key = content_key(digest, clip, clip.filled and not saved and seconds < FILLED_S)
            # the same content under two paths is encoded by the rank that claims it first
            if key not in seen and not index.has(key) and progress.count(key.hex(), 1) == 1:
                try:
                    if saved:
                        size = codec.config.codebook_size
                        check_codes(wave, clip.offset, how.num_codebooks, size)
                    else:
                        wave = encode_clip(codec, wave, bandwidth, how.num_codebooks)
                    batch.add_codes(key, wave.astype(np.int16), measures)
                except torch.OutOfMemoryError:
                    bad[number] = f"{path}: {seconds:.0f} s are too long to encode on this device"
                except ValueError as error:
                    bad[number] = f"{path}: {error}"
            seen.add(key)
            batch.add_file(file_key(clip, *about), key)
        progress.add(len(cuts), heard)
        if progress.count("stop", int(bool(watchdog.stop_requested()))):
            break
        if len(batch.files) >= SHARD_CLIPS or time.monotonic() - flushed > SHARD_SECONDS:
            batch.write()
            flushed = time.monotonic()
    batch.write()
    del codec
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


class Progress:
    """A bar on rank 0 of the clips of all ranks, which count them in the run's store."""

    def __init__(self, world, work):
        """work: of share_work."""
        from tqdm import tqdm
        self.world, self.store = world, world.store or HashStore()
        self.start = time.monotonic() - 1e-3
        self.bar = tqdm(total=sum(len(cuts) for share in work for *_, cuts in share), unit="clip",
                        desc="encoding audio", disable=not world.is_main,
                        mininterval=0.1 if sys.stderr.isatty() else 30)

    def count(self, name, n=0):
        return self.store.add(f"encoding audio/{name}", n)

    def add(self, n, seconds):
        """Count n clips and their seconds of audio."""
        done = self.count("clips", n)
        hours = self.count("milliseconds", round(1000 * seconds)) / 3.6e6
        speed = 3600 * hours / (time.monotonic() - self.start)
        self.bar.set_postfix_str(f"{hours:.2f} h of audio, {speed:,.0f} x real time", refresh=False)
        self.bar.update(done - self.bar.n)


def plan_codes(clips, how, bad=None):
    """The result of ensure_codes, without encoding: -1, -1, frames for a new clip."""
    config, _ = codec_config(how.codec_dir, how.num_codebooks)
    folder = Path(how.cache_dir) / codec_fingerprint(how.codec_dir)
    index, where, unknown = look_up(folder, clips, how.processes)
    if index.damaged:
        print(f"notice     {len(index.damaged)} shards of the code cache are damaged: a run sets "
              "them aside and encodes their clips again")
    unusable = {} if bad is None else bad

    def frames(i):
        try:
            return header_frames(clips[i], config, how.num_codebooks)
        except ValueError as error:
            unusable[i] = f"{clips[i].path}: {error}"
            return 0

    with ThreadPoolExecutor(16) as pool:        # waits for the file system, not for the processor
        where[unknown[:, 0], 2] = list(pool.map(frames, unknown[:, 0].tolist()))
    if bad is None and unusable:
        raise UserError(problem_text(list(dict.fromkeys(unusable[i] for i in sorted(unusable)))))
    if len(unknown):
        check_encoder()
    return folder, [], where
