"""Audio files -> codec codes, once ever: the codec, and sharing the work among the ranks.

Each distinct file is decoded once (speech/decode.py). Each distinct content is encoded once,
clip by clip, because zero-padding a batch changes the codes. Where the codes then lie:
speech/code_cache.py.

The codec (and with it torchaudio) is imported only when a clip is missing.
"""
import errno
import heapq
import os
import sys
import time
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from core import tensor_io
from core.checkpoint import write_atomically
from core.cli import UserError, problem_text
from core.loading import each
from core.watchdog import init_loader, stop_requested
from speech.code_cache import (
    FRAME_RATE,
    SAMPLE_RATE,
    CacheIndex,
    content_key,
    digest_columns,
    file_key,
    look_up,
)
from speech.conversations import FILLED_S
from speech.decode import (
    check_codes,
    cut_wave,
    decode_file,
    filled,
    header_frames,
    holds_codes,
    read_codes,
)

MEASURES = ("seconds", "peak", "rms", "clipped", "dc")     # of a clip's sound: those of measure()
SHARD_CLIPS, SHARD_SECONDS = 4096, 60.0     # a crash loses at most this much encoding
BYTES_PER_SECOND = {".wav": 64_000, ".flac": 32_000, ".mp3": 12_000, ".ogg": 10_000}     # typical, to share out work


def share_work(clips, unknown, world_size):
    """Per rank, the list of (path, (size, mtime), {number: clip}) to encode, balanced by estimated seconds.

    unknown: of CacheIndex.find_clips.
    """
    files = {}
    for i, *stat in unknown.tolist():
        clip = clips[i]
        files.setdefault(clip.path, (tuple(stat), {}))[1][i] = clip

    def seconds(path, stat, cuts):
        claimed = sum(c.seconds for c in cuts.values())
        return claimed or stat[0] / BYTES_PER_SECOND.get(os.path.splitext(path)[1].lower(), 64_000)

    jobs = sorted(((seconds(path, *job), path, *job) for path, job in files.items()), key=lambda j: (-j[0], j[1]))
    loads, work = [(0.0, rank) for rank in range(world_size)], [[] for _ in range(world_size)]
    for cost, *job in jobs:
        load, rank = heapq.heappop(loads)
        work[rank].append(tuple(job))
        heapq.heappush(loads, (load + cost, rank))
    return work


# ---------------------------------------------------------------------------------------------------------------------
# The codec


def codec_config(codec_dir, num_codebooks):
    """(HiggsAudioV2TokenizerConfig, bandwidth in kbit/s that gives num_codebooks); needs no torchaudio. UserError."""
    from transformers import HiggsAudioV2TokenizerConfig
    try:
        config = HiggsAudioV2TokenizerConfig.from_pretrained(codec_dir)
        rates = (config.sample_rate, config.frame_rate)
    except Exception as error:
        raise UserError(f"{codec_dir}: codec cannot be loaded ({str(error).splitlines()[0]})")
    if rates != (SAMPLE_RATE, FRAME_RATE):
        raise UserError(f"{codec_dir}: codec runs at {rates[0]} Hz and {rates[1]} frames/s; "
                        f"Higgs-Audio V2 needs {SAMPLE_RATE} Hz and {FRAME_RATE}")
    bandwidth = num_codebooks * config.frame_rate * config.codebook_nbits / 1000
    if bandwidth not in config.target_bandwidths:
        raise UserError(f"{codec_dir}: {num_codebooks} codebooks need bandwidth {bandwidth}, "
                        f"the codec has {list(config.target_bandwidths)}")
    return config, bandwidth


def check_encoder():
    """Raise UserError unless all that encoding new audio imports is there."""
    try:
        import torchaudio  # noqa: F401  (the codec resamples with it; say so before transformers does)
    except ImportError:
        raise UserError("encoding new audio needs torchaudio, which is not installed (training from a filled "
                        "--code_cache does not): run launch/setup.sh or pip install torchaudio==2.11.0")


def load_codec(codec_dir, device, num_codebooks):
    """(codec in eval mode on device, bandwidth in kbit/s that gives num_codebooks). Raises UserError."""
    check_encoder()
    from transformers import HiggsAudioV2TokenizerModel
    _, bandwidth = codec_config(codec_dir, num_codebooks)
    try:
        codec, info = HiggsAudioV2TokenizerModel.from_pretrained(codec_dir, dtype=torch.float32,
                                                                 output_loading_info=True)
    except Exception as error:
        raise UserError(f"{codec_dir}: codec cannot be loaded ({str(error).splitlines()[0]})")
    lost = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
    if lost:
        raise UserError(f"{codec_dir}: {len(lost)} missing or unexpected codec weights, first {lost[:5]}")
    if bad := [name for name, p in codec.named_parameters() if not tensor_io.is_finite(p)]:
        raise UserError(f"{codec_dir}: {bad[0]} holds NaN or infinity; these weights cannot be used")
    return codec.to(device).eval(), bandwidth


@torch.no_grad()
def encode_clip(codec, wave, bandwidth, num_codebooks):
    """Mono float32 waveform (n,) at 24 kHz, numpy -> (T, num_codebooks) int16 codes on the CPU.

    Never in TF32: a cached code must not depend on the first run's speed flags. Raises ValueError for codes that the
    codec's codebooks do not have.
    """
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        wave = torch.from_numpy(wave)[None, None].to(codec.device)
        codes = codec.encode(wave, bandwidth=bandwidth).audio_codes[0]
    assert codes.shape[0] == num_codebooks, f"codec gave {codes.shape[0]} codebooks, the model has {num_codebooks}"
    low, high = codes.min().item(), codes.max().item()
    if low < 0 or high >= codec.config.codebook_size:
        raise ValueError(f"the codec gives codes from {low} to {high}, its codebooks have {codec.config.codebook_size}")
    return codes.T.to(torch.int16).contiguous().cpu().numpy()     # safetensors writes memory as it lies


# ---------------------------------------------------------------------------------------------------------------------
# The share of one rank


class _Decode(Dataset):
    """Decoding jobs for DataLoader workers; errors come back as text so that all of them can be listed."""

    def __init__(self, work):
        self.work = work

    def __len__(self):
        return len(self.work)

    def __getitem__(self, i):
        """(i, digest of the file, [(waveform of a cut, its measures), or text of why there is none])."""
        path, _, cuts = self.work[i]
        try:
            if holds_codes(path):
                digest, codes = read_codes(path)
                seconds = np.array([len(codes) / FRAME_RATE, *[np.nan] * (len(MEASURES) - 1)], np.float32)
                return i, digest, [(codes, seconds)] * len(cuts)
            digest, rate, parts = decode_file(path, [(clip.offset, clip.duration) for clip in cuts.values()])
        except ValueError as error:
            return i, "", [str(error)] * len(cuts)

        def wave(clip, part):
            try:        # numpy: tensors would travel through /dev/shm, which containers keep small
                found = cut_wave(part, rate, clip.offset, clip.duration)
                return filled(found) if clip.filled else found, measure(part, rate)
            except ValueError as error:
                return str(error)
        return i, digest, list(map(wave, cuts.values(), parts))


def encode_share(world, work, folder, how):
    """Decode and encode this rank's share of `work`, writing shards. Ends together on all ranks.

    how: dataset.Encoding. Returns (problem lines that end the run, {clip number: file and reason}
    of clips that cannot be used). The same content under two paths is encoded by whichever rank
    claims it first.
    """
    progress = Progress(world, work, "encoding audio", how.wait_limit_s)
    problems, bad = [], {}
    try:
        if work[world.rank]:
            _encode_files(world, work[world.rank], folder, how, progress, bad)
    except UserError as error:      # told to every rank by the caller
        problems.append(str(error))
    except BaseException:
        progress.close()        # the error's line begins behind it
        raise
    progress.finish()
    return problems, bad


def _encode_files(world, mine, folder, how, progress, bad):
    index, seen = CacheIndex(folder), set()
    batch, flushed = Batch(folder, how.num_codebooks), time.monotonic()
    codec, bandwidth = load_codec(how.codec_dir, world.device, how.num_codebooks)
    for path, stat, cuts, digest, waves in decoded(world, mine, how.processes):
        heard = 0.0
        for (number, clip), found in zip(cuts.items(), waves):
            if isinstance(found, str):
                bad[number] = f"{path}: {found}"
                continue
            wave, measures = found
            heard += float(measures[0])
            saved = wave.ndim == 2
            key = content_key(digest, clip, clip.filled and not saved and float(measures[0]) < FILLED_S)
            if key not in seen and not index.has(key) and _claim(world, key):
                try:
                    if saved:
                        check_codes(wave, clip.offset, how.num_codebooks, codec.config.codebook_size)
                    codes = wave if saved else encode_clip(codec, wave, bandwidth, how.num_codebooks)
                    batch.add_codes(key, codes.astype(np.int16), measures)
                except torch.OutOfMemoryError:
                    bad[number] = (f"{path}: {len(wave) / SAMPLE_RATE:.0f} s are too long to encode "
                                   "on this device")
                except ValueError as error:
                    bad[number] = f"{path}: {error}"
            seen.add(key)
            batch.add_file(file_key(clip, *stat), key)
        progress.add(len(cuts), heard)
        if progress.stopping():
            break
        if len(batch.files) >= SHARD_CLIPS or time.monotonic() - flushed > SHARD_SECONDS:
            batch.write()
            flushed = time.monotonic()
    batch.write()
    del codec
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def decoded(world, work, processes):
    """Yield (path, stat, cuts, digest, waves) of the files of share_work's list for one rank: what
    _Decode has of each. processes: that decode, on this node.
    """
    workers = min(len(work), max(1, processes // world.local_size) if processes else 0)
    loader = DataLoader(_Decode(work), batch_size=None, num_workers=workers,
                        collate_fn=lambda item: item, worker_init_fn=init_loader,
                        multiprocessing_context="fork" if workers else None)
    for i, digest, waves in each(loader) if work else ():
        yield *work[i], digest, waves


def _claim(world, key):
    return world.store is None or world.store.add(f"claim/{key.hex()}", 1) == 1


class Progress:
    """One progress bar on rank 0 for the work of all ranks, kept through the store's counters.

    work: of share_work.
    """

    def __init__(self, world, work, label, limit_s):
        total = sum(len(cuts) for share in work for *_, cuts in share)
        self.world, self.label, self.limit_s = world, label, limit_s
        self.local, self.seconds = 0, 0.0
        self.start = time.monotonic() - 1e-3
        often = 0.1 if sys.stderr.isatty() else 30
        self.bar = None
        if world.is_main:
            self.bar = tqdm(total=total, desc=label, unit="clip", mininterval=often)

    def _count(self, name, n=0):
        return self.world.store.add(f"{self.label}/{name}", n)

    def add(self, n, seconds):
        """Count n clips and so many seconds of audio; the bar shows the audio of all ranks, and per second."""
        self.local, self.seconds = self.local + n, self.seconds + seconds
        done = self._count("clips", n) if self.world.store else self.local
        milliseconds = self._count("milliseconds", round(1000 * seconds)) if self.world.store else 1000 * self.seconds
        if self.bar:
            hours = milliseconds / 3.6e6
            self.bar.set_postfix_str(f"{hours:.2f} h of audio, {hours / (time.monotonic() - self.start):.2g} h/s",
                                     refresh=False)
            self.bar.update(done - self.bar.n)

    def stopping(self):
        """True once any rank was asked to stop."""
        asked = bool(stop_requested())
        return self._count("stop", int(asked)) > 0 if self.world.store else asked

    def finish(self):
        """Rank 0 stays, updating the bar, until every rank has finished; the others go on to wait for it."""
        if self.world.store:
            self._count("ranks", 1)
        if self.bar and self.world.store:
            changed, last = time.monotonic(), -1
            while self._count("ranks") < self.world.size:
                done = self._count("clips")
                if done != last:
                    changed, last = time.monotonic(), done
                if time.monotonic() - changed > self.limit_s:
                    raise UserError(f"{self.label}: no clip came for {self.limit_s:.0f} s: a rank hangs")
                self.bar.update(done - self.bar.n)
                time.sleep(0.1)
            self.bar.update(self._count("clips") - self.bar.n)
        self.close()

    def close(self):
        if self.bar:
            self.bar.close()


# ---------------------------------------------------------------------------------------------------------------------
# What would be encoded


def plan_codes(clips, how, bad=None):
    """What ensure_codes would return for clips, without encoding, writing or locking: -1, -1,
    frames for a clip that is not in the cache yet.

    how, bad: of ensure_codes. Raises UserError where nothing can be encoded.
    """
    config, _ = codec_config(how.codec_dir, how.num_codebooks)
    folder = how.folder()
    index, where, unknown = look_up(folder, clips, how.processes)
    if index.damaged:
        print(f"notice     {len(index.damaged)} shards of the code cache are damaged: a run sets "
              "them aside and encodes their clips again")
    files, unusable = {}, {} if bad is None else bad
    for i in unknown[:, 0].tolist():
        clip = clips[i]
        files.setdefault(clip.path, {})[i] = (clip.offset, clip.duration, clip.filled)

    def frames(path):
        try:
            return header_frames(path, files[path].values(), config, how.num_codebooks)
        except ValueError:
            return [one_by_one(path, i, cut) for i, cut in files[path].items()]

    def one_by_one(path, i, cut):
        try:
            return header_frames(path, [cut], config, how.num_codebooks)[0]
        except ValueError as error:
            unusable[i] = f"{path}: {error}"
            return 0

    with ThreadPoolExecutor(16) as pool:        # waits for the file system, not for the processor
        for numbers, values in zip(files.values(), pool.map(frames, files)):
            where[list(numbers), 2] = values
    problems = list(dict.fromkeys(unusable.values())) if bad is None else []
    if len(unknown):
        try:
            check_encoder()
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError(problem_text(problems))
    return folder, [], where


# ---------------------------------------------------------------------------------------------------------------------
# Sound


def measure(part, rate):
    """(5,) float32 of MEASURES of mono samples (n,) at a rate in Hz: seconds; the largest and the root mean square
    amplitude, full scale is 1; the share of samples at full scale; the mean.
    """
    if not len(part):
        return np.zeros(len(MEASURES), np.float32)
    loud = np.abs(part)
    return np.array([len(part) / rate, loud.max(), np.sqrt(np.mean(np.square(part, dtype=np.float64))),
                     np.mean(loud >= 0.999), part.mean(dtype=np.float64)], np.float32)


def measures_of(folder, shards, where):
    """(n, 5) float32 of MEASURES of clips whose codes lie at `where`, of locate; NaN where the
    sound was not at hand.
    """
    found = np.full((len(where), len(MEASURES)), np.nan, np.float32)
    for number, name in enumerate(shards):
        mine = np.flatnonzero(where[:, 0] == number)
        if len(mine):
            with safe_open(os.path.join(folder, name), "np") as f:
                lengths = f.get_tensor("lengths").astype(np.int64)
                measures = f.get_tensor("measures")
            starts = np.cumsum(lengths) - lengths
            found[mine] = measures[np.searchsorted(starts, where[mine, 1])]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class Batch:
    """Codes and file keys of one shard to be."""

    def __init__(self, folder, num_codebooks):
        self.folder, self.num_codebooks = Path(folder), num_codebooks
        self.codes, self.keys, self.files = [], [], []
        self.file_keys, self.measures = [], []

    def add_codes(self, key, codes, measures=None):
        """measures: of measure(), None where the sound is not at hand."""
        self.keys.append(key)
        self.codes.append(codes)
        self.measures.append(np.full(len(MEASURES), np.nan) if measures is None else measures)

    def add_file(self, file, key):
        self.files.append(file)
        self.file_keys.append(key)

    def write(self):
        """Write and empty the shard; nothing when it is empty. Raises UserError when the disk refuses."""
        if not self.files:
            return
        def raw(keys):
            return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
        codes = np.concatenate(self.codes or [np.empty((0, self.num_codebooks), np.int16)])
        columns = {"measures": np.array(self.measures, np.float32).reshape(-1, len(MEASURES)),
                   "lengths": np.array([len(c) for c in self.codes], np.int32), "keys": raw(self.keys),
                   "files": raw(self.files), "file_keys": raw(self.file_keys),
                   "checksums": np.array([zlib.crc32(np.ascontiguousarray(c)) for c in self.codes], np.uint32)}
        tensors = {"codes": np.ascontiguousarray(codes), **columns}     # safetensors writes raw memory as it lies
        about = {"clips": str(len(self.keys)), "files": str(len(self.files)), "sha256": digest_columns(columns)}
        try:
            write_atomically(self.folder / f"codes-{uuid.uuid4().hex}.safetensors",
                             lambda temporary: tensor_io.save(tensors, temporary, about, save_file))
        except Exception as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
            remedy = "; free disk space" if full else ""
            raise UserError(f"{self.folder}: code cache shard cannot be written ({error}){remedy}")
        self.codes, self.keys, self.files = [], [], []
        self.file_keys, self.measures = [], []
