"""Audio files -> codec codes, once ever: a content-addressed cache that all ranks, epochs, restarts and runs share.

Each distinct file is opened once: its bytes are hashed and decoded from memory (soundfile), averaged to mono and
resampled to 24 kHz (soxr HQ). Each distinct content is encoded once, clip by clip, because zero-padding a batch changes
the codes. Results go to append-only safetensors shards under <cache>/<codec fingerprint>/: int16 codes, their lengths,
a content key per clip, and for each (path, size, mtime, cut) the key it had, so later runs only look at file dates.
Shards appear atomically under unique names, so runs may share a cache; a lock keeps two from doing the same work.

The codec (and with it torchaudio) is imported only when a clip is missing.

Copy with it: handover.py, indexing.py, parallel.py, checkpoint.py (write_atomically), watchdog.py (a run asked to
stop), tensor_files.py.
"""
import contextlib
import fcntl
import hashlib
import heapq
import io
import os
import sys
import time
import uuid
from array import array
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from common.checkpoint import write_atomically
from common.indexing import in_order
from common.loading import each
from common.parallel import UserError, all_ranks_ok, gather_objects, rank0_first
from common.watchdog import Stopped, ignore_in_worker, stop_requested

SAMPLE_RATE = 24_000
FRAME_RATE = 25                 # codec frames a second: 24 kHz / hop 960
MIN_SAMPLES = 960               # one codec frame
PIPELINE = b"mono-mean soxr-HQ 24k v1"      # part of the fingerprint: change it when the waveform would change
KEY = "S16"                     # 128 bits of SHA-256, compared as bytes
BLOCK = 8192                    # clips whose file dates are asked for together
SHARD_CLIPS, SHARD_SECONDS = 4096, 60.0     # a crash loses at most this much encoding
BYTES_PER_SECOND = {".wav": 64_000, ".flac": 32_000, ".mp3": 12_000, ".ogg": 10_000}     # typical, to share out work


def codec_fingerprint(codec_dir):
    """16 hex digits of the codec's config and weights plus our audio pipeline. Raises UserError on a wrong folder."""
    digest = hashlib.sha256(PIPELINE)
    files = sorted(p for p in Path(codec_dir).iterdir() if p.name == "config.json" or p.suffix == ".safetensors")
    if not any(p.suffix == ".safetensors" for p in files):
        raise UserError(f"{codec_dir}: holds no *.safetensors weights; the 2025 codec format (model.pth) is not read, "
                        "use the native one (bosonai/higgs-audio-v2-tokenizer, main)")
    for path in files:
        digest.update(path.name.encode())
        with open(path, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()[:16]


def _cut(clip):
    return f"{clip.offset}+{clip.duration}" if clip.offset is not None else ""


def _digest(*parts):
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "backslashreplace")).digest()[:16]


def file_key(clip, stat):
    """Digest (16 bytes) of path, size, modification time and cut: the same as long as the file was not touched."""
    return _digest(clip.path, stat.st_size, stat.st_mtime_ns, _cut(clip))


def file_keys(clips):
    """((n, 2) int64 of size and modification time in ns, (n,) keys) of clips. UserError for a file gone by now."""
    stats, keys = array("q"), bytearray()
    for clip in clips:
        try:
            stat = os.stat(clip.path)
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read any more ({error.strerror})")
        stats.extend((stat.st_size, stat.st_mtime_ns))
        keys += file_key(clip, stat)
    return np.asarray(stats).reshape(-1, 2), np.frombuffer(bytes(keys), KEY)


class CacheIndex:
    """Where every cached clip is: sorted keys in numpy arrays, no Python object per clip."""

    def __init__(self, folder):
        self.shards = sorted(p.name for p in Path(folder).glob("codes-*.safetensors"))
        parts = [_read_index(Path(folder) / name) for name in self.shards]
        shard = [np.full(len(p["lengths"]), i, np.int32) for i, p in enumerate(parts)]
        start = [np.cumsum(p["lengths"], dtype=np.int64) - p["lengths"] for p in parts]
        keys = _concat([p.pop("keys") for p in parts], KEY)
        order = np.argsort(keys, kind="stable")
        self.keys = keys[order]
        self.where = np.stack([_concat(shard, np.int64), _concat(start, np.int64),
                               _concat([p["lengths"] for p in parts], np.int64)], axis=1)[order]
        files = _concat([p.pop("files") for p in parts], KEY)
        order = np.argsort(files, kind="stable")
        self.files = files[order]
        del files
        self.file_keys = _concat([p.pop("file_keys") for p in parts], KEY)[order]

    def find_files(self, file_keys):
        """(n,) file keys -> (n, 3) int64 of shard number, first row, frames; -1 where unknown."""
        at, known = _search(self.files, file_keys)
        found = np.full((len(file_keys), 3), -1, np.int64)
        if known.any():
            row, there = _search(self.keys, self.file_keys[at[known]])
            found[np.flatnonzero(known)[there]] = self.where[row[there]]
        return found

    def find_clips(self, clips, processes=0):
        """((n, 3) of find_files for clips, (m, 3) int64 of number, size and modification time of those unknown).

        clips: a list, or another sequence that gives lists for slices. processes: that help to ask for file dates.
        """
        found, unknown = np.empty((len(clips), 3), np.int64), [np.empty((0, 3), np.int64)]
        done = 0

        def keys(first, step):
            for start in range(first * BLOCK, len(clips), step * BLOCK):
                yield file_keys(clips[start:start + BLOCK])

        def take(part):
            nonlocal done
            stats, keys = part
            found[done:done + len(keys)] = where = self.find_files(keys)
            new = np.flatnonzero(where[:, 0] < 0)
            unknown.append(np.column_stack([done + new, stats[new]]))
            done += len(keys)

        in_order(keys, processes, take)
        return found, np.concatenate(unknown)

    def has(self, key):
        """True when this content key (16 bytes) has codes."""
        return bool(_search(self.keys, np.array([key], KEY))[1][0])


def _concat(arrays, dtype):
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _search(haystack, needles):
    at = np.minimum(np.searchsorted(haystack, needles), max(0, len(haystack) - 1))
    return at, haystack[at] == needles if len(haystack) else np.zeros(len(needles), bool)


def _read_index(path):
    try:
        with safe_open(path, "np") as f:
            return {"lengths": f.get_tensor("lengths"), **{name: f.get_tensor(name).view(KEY).reshape(-1)
                                                           for name in ("keys", "files", "file_keys")}}
    except Exception as error:
        raise UserError(f"{path}: damaged code cache shard ({error}); delete this file and its clips are encoded again")


class CodeReader:
    """Reads clips' codes from the shards; one per process, opened lazily so that it can be sent to loader workers."""

    def __init__(self, folder, shards):
        self.folder, self.shards, self.open_shards = str(folder), shards, {}

    def codes(self, shard, start, frames):
        """(frames, 8) int16 codes."""
        if shard not in self.open_shards:
            self.open_shards[shard] = safe_open(os.path.join(self.folder, self.shards[shard]), "np").__enter__()
        return self.open_shards[shard].get_slice("codes")[start:start + frames]

    def __getstate__(self):
        return {**self.__dict__, "open_shards": {}}


# ---------------------------------------------------------------------------------------------------------------------
# Filling the cache


def ensure_codes(world, clips, codec_dir, cache_dir, num_codebooks, num_proc, wait_limit_s=6 * 3600):
    """Encode what is missing, all ranks together. Called by every rank; `clips` (unique Clips) matters on rank 0 only.

    Returns on rank 0 (folder, shard names, (n, 3) int64 of shard, first row, frames in the order of clips), else None.
    codec_dir: native codec folder. num_proc: decoding processes on this node. Unreadable, empty or too short audio on
    any rank ends all of them with one list of problems.
    """
    positions = []      # rank 0's: shards and positions as they are at the start
    with contextlib.ExitStack() as stack:
        def plan():
            folder = Path(cache_dir) / codec_fingerprint(codec_dir)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(folder / "lock", 0.9 * wait_limit_s))
            except OSError as error:
                raise UserError(f"--code_cache {cache_dir}: cannot be written ({error.strerror})")
            index = CacheIndex(folder)
            found, unknown = index.find_clips(clips, num_proc)
            positions.extend([index.shards, found])
            return folder, share_work(clips, unknown, world.size)
        folder, work = rank0_first(world, plan)
        if any(work):
            workers = max(1, num_proc // world.local_size) if num_proc else 0
            all_ranks_ok(world, encode_share(world, work, folder, codec_dir, num_codebooks, workers, wait_limit_s))
            if any(gather_objects(world, stop_requested())):
                raise Stopped("asked to stop while audio was being encoded; what is done stays in the code cache")
            positions = locate(folder, clips, num_proc) if world.is_main else []
    return (folder, *positions) if world.is_main else None


def locate(folder, clips, processes=0):
    """Shard names and (n, 3) positions of clips that are all cached."""
    index = CacheIndex(folder)
    found, unknown = index.find_clips(clips, processes)
    if len(unknown):
        raise UserError(f"{clips[unknown[0, 0]].path}: changed while it was being read; start again")
    return index.shards, found


@contextlib.contextmanager
def _locked(path, limit_s):
    """Hold an exclusive lock that dies with the process. After limit_s another run is not waited for any longer."""
    with open(path, "a") as f:
        end, told = time.monotonic() + limit_s, False
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    print(f"another run is filling {path.parent}; waiting for it", flush=True)
                    told = True
                if time.monotonic() > end:
                    raise UserError(f"{path}: still locked by another run after {limit_s:.0f} s; use another cache")
                time.sleep(0.5)
            except OSError:     # no locks on this file system: duplicate work is possible, damage is not
                break
        yield


def share_work(clips, unknown, world_size):
    """Per rank, the list of (path, (size, mtime), [clips]) to encode, balanced by estimated seconds.

    unknown: of CacheIndex.find_clips.
    """
    files = {}
    for i, *stat in unknown.tolist():
        clip = clips[i]
        files.setdefault(clip.path, (tuple(stat), []))[1].append(clip)

    def seconds(path, stat, cuts):
        claimed = max(c.seconds for c in cuts)
        return claimed or stat[0] / BYTES_PER_SECOND.get(os.path.splitext(path)[1].lower(), 64_000)

    jobs = sorted(((seconds(path, *job), path, *job) for path, job in files.items()), key=lambda j: (-j[0], j[1]))
    loads, work = [(0.0, rank) for rank in range(world_size)], [[] for _ in range(world_size)]
    for cost, path, stat, cuts in jobs:
        load, rank = heapq.heappop(loads)
        work[rank].append((path, stat, cuts))
        heapq.heappush(loads, (load + cost, rank))
    return work


def decode_audio(path, cuts):
    """Open a file once -> (sha256 hex of its bytes, [mono float32 waveform at 24 kHz per cut]).

    cuts: [(offset seconds or None, duration seconds or None)]. Raises ValueError with the reason.
    """
    import soundfile
    import soxr
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})")
    if not data:
        raise ValueError("is an empty file")
    try:
        audio, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except Exception as error:
        why = str(error).rpartition(": ")[2].strip().rstrip(".")        # without the name of a buffer in memory
        raise ValueError(f"is not readable audio ({why}); wav, flac, mp3 and ogg are read")
    mono, waves = audio.mean(axis=1), []
    if not np.isfinite(mono).all():
        raise ValueError("contains samples that are not finite numbers")
    for offset, length in cuts:
        start = round((offset or 0) * rate)
        part = mono[start:start + round(length * rate)] if length else mono[start:]
        wave = soxr.resample(part, rate, SAMPLE_RATE, quality="HQ") if len(part) else part
        check_length(len(wave), offset)
        waves.append(np.ascontiguousarray(wave, np.float32))
    return hashlib.sha256(data).hexdigest(), waves


def check_length(samples, offset):
    """Raise ValueError unless a cut has enough samples at 24 kHz for one codec frame."""
    if samples < MIN_SAMPLES:
        where = f" from offset {offset} s" if offset else ""
        raise ValueError(f"is too short: {samples / SAMPLE_RATE:.3f} s{where}; "
                         f"a clip needs {MIN_SAMPLES / SAMPLE_RATE} s")


class _Decode(Dataset):
    """Decoding jobs for DataLoader workers; errors come back as text so that all of them can be listed."""

    def __init__(self, work):
        self.work = work

    def __len__(self):
        return len(self.work)

    def __getitem__(self, i):
        path, _, cuts = self.work[i]
        try:
            digest, waves = decode_audio(path, [(c.offset, c.duration) for c in cuts])
            return i, digest, waves, ""     # numpy: tensors would travel through /dev/shm, which containers keep small
        except ValueError as error:
            return i, "", [], f"{path}: {error}"


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
    return codec.to(device).eval(), bandwidth


@torch.no_grad()
def encode_clip(codec, wave, bandwidth, num_codebooks):
    """Mono float32 waveform (n,) at 24 kHz, numpy -> (T, num_codebooks) int16 codes on the CPU.

    Never in TF32: a cached code must not depend on the first run's speed flags.
    """
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        wave = torch.from_numpy(wave)[None, None].to(codec.device)
        codes = codec.encode(wave, bandwidth=bandwidth).audio_codes[0]
    assert codes.shape[0] == num_codebooks, f"codec gave {codes.shape[0]} codebooks, the model has {num_codebooks}"
    return codes.T.to(torch.int16).contiguous().cpu().numpy()     # safetensors writes memory as it lies


def encode_share(world, work, folder, codec_dir, num_codebooks, num_proc, wait_limit_s):
    """Decode and encode this rank's share of `work`, writing shards; returns problem lines. Ends together on all ranks.

    The same content under two paths is encoded by whichever rank claims it first.
    """
    mine, total = work[world.rank], sum(len(cuts) for share in work for _, _, cuts in share)
    progress = Progress(world, total, "encoding audio", wait_limit_s)
    problems = []
    try:
        if mine:
            _encode_files(world, mine, folder, codec_dir, num_codebooks, num_proc, progress, problems)
    except UserError as error:      # told to every rank by the caller
        problems.append(str(error))
    progress.finish()
    return problems


def _encode_files(world, mine, folder, codec_dir, num_codebooks, num_proc, progress, problems):
    index, seen, batch, flushed = CacheIndex(folder), set(), Batch(folder, num_codebooks), time.monotonic()
    codec, bandwidth = load_codec(codec_dir, world.device, num_codebooks)
    workers = min(num_proc, len(mine))
    loader = DataLoader(_Decode(mine), batch_size=None, num_workers=workers, collate_fn=lambda item: item,
                        multiprocessing_context="fork" if workers else None, worker_init_fn=ignore_in_worker)
    for i, digest, waves, problem in each(loader):
        path, stat, cuts = mine[i]
        if problem:
            problems.append(problem)
        for clip, wave in zip(cuts, waves):
            key = _digest(digest, _cut(clip))
            if key not in seen and not index.has(key) and _claim(world, key):
                try:
                    batch.add_codes(key, encode_clip(codec, wave, bandwidth, num_codebooks))
                except torch.OutOfMemoryError:
                    problems.append(f"{path}: {len(wave) / SAMPLE_RATE:.0f} s are too long to encode on this device")
            seen.add(key)
            batch.add_file(_digest(path, *stat, _cut(clip)), key)
        progress.add(len(cuts))
        if progress.stopping():
            break
        if len(batch.files) >= SHARD_CLIPS or time.monotonic() - flushed > SHARD_SECONDS:
            batch.write()
            flushed = time.monotonic()
    batch.write()
    del codec
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _claim(world, key):
    return world.store is None or world.store.add(f"claim/{key.hex()}", 1) == 1


class Batch:
    """Codes and file keys of one shard to be."""

    def __init__(self, folder, num_codebooks):
        self.folder, self.num_codebooks = Path(folder), num_codebooks
        self.codes, self.keys, self.files, self.file_keys = [], [], [], []

    def add_codes(self, key, codes):
        self.keys.append(key)
        self.codes.append(codes)

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
        tensors = {"codes": np.ascontiguousarray(codes),        # safetensors writes raw memory, whatever the strides
                   "lengths": np.array([len(c) for c in self.codes], np.int32), "keys": raw(self.keys),
                   "files": raw(self.files), "file_keys": raw(self.file_keys)}
        about = {"clips": str(len(self.keys)), "files": str(len(self.files))}
        try:
            write_atomically(self.folder / f"codes-{uuid.uuid4().hex}.safetensors",
                             lambda temporary: save_file(tensors, temporary, about))
        except Exception as error:
            raise UserError(f"{self.folder}: code cache shard cannot be written ({error}); free disk space")
        self.codes, self.keys, self.files, self.file_keys = [], [], [], []


class Progress:
    """One progress bar on rank 0 for the work of all ranks, kept through the store's counters."""

    def __init__(self, world, total, label, limit_s):
        self.world, self.total, self.limit_s, self.local = world, total, limit_s, 0
        self.bar = tqdm(total=total, desc=label, unit="clip", mininterval=0.1 if sys.stderr.isatty() else 30) \
            if world.is_main else None

    def _count(self, name, n=0):
        return self.world.store.add(f"progress/{name}", n)

    def add(self, n):
        self.local += n
        done = self._count("clips", n) if self.world.store else self.local
        if self.bar:
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
                    raise UserError(f"no clip was encoded for {self.limit_s:.0f} s: a rank hangs")
                self.bar.update(done - self.bar.n)
                time.sleep(0.1)
            self.bar.update(self._count("clips") - self.bar.n)
        if self.bar:
            self.bar.close()
