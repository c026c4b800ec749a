"""Where the codec codes of audio lie: a content-addressed cache that all ranks, epochs, restarts and runs share.

Codes lie in append-only safetensors shards under <cache>/<codec fingerprint>/: int16 codes, their lengths, a content
key per clip, and for each (path, size, mtime, cut) the key it had, so later runs only look at file dates. Shards appear
atomically under unique names, so runs may share a cache; one of them at a time fills it (core/run_lock.py). Every
clip's codes have a CRC-32, which is compared when a run starts and whenever they are read; the other columns have a
SHA-256, compared when they are read.
"""
import errno
import hashlib
import os
import re
import stat
import zlib
from array import array
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from core.cli import UserError
from core.indexing import parallel_map_ordered
from core import json_files

SAMPLE_RATE = 24_000
FRAME_RATE = 25                 # codec frames per second: 24 kHz / hop 960
PIPELINE = b"mono-mean soxr-HQ 24k v2"      # part of the fingerprint: change it when the waveform would change
CODES = 1024                    # values of a code: 0 to 1023
KEY = "S16"                     # 128 bits of SHA-256, compared as bytes
BLOCK = 8192                    # clips whose file dates are asked for together
COLUMNS = ("lengths", "keys", "files", "file_keys", "checksums", "measures")    # of a shard, beside the codes


def codec_fingerprint(codec_dir):
    """16 hex digits of the codec's config and weights plus our audio pipeline. Raises UserError on a wrong folder."""
    digest = hashlib.sha256(PIPELINE)
    files = sorted(p for p in Path(codec_dir).iterdir() if p.name == "config.json" or p.suffix == ".safetensors")
    if not any(p.suffix == ".safetensors" for p in files):
        raise UserError(f"{codec_dir}: holds no *.safetensors weights; the 2025 codec format (model.pth) is not read, "
                        "use the native one (bosonai/higgs-audio-v2-tokenizer, main)")
    for path in files:
        digest.update(path.name.encode())
        with json_files.open_file(path) as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()[:16]


def _cut(clip, filled):
    """The part of its file that a Clip is, and whether zeros fill it up, as text; "" for all of it as it is."""
    text = "" if clip.offset is None else f"{clip.offset}+{clip.duration}"
    return f"{text} filled" if filled else text


def _digest(*parts):
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "backslashreplace")).digest()[:16]


def content_key(file_digest, clip, filled=False):
    """Digest (16 bytes) of a file's content and a Clip's cut of it. file_digest: SHA-256 of the file, hex digits.

    filled: zeros were added; a Clip that may be filled and is long enough has the key, and the codes, of the plain one.
    """
    return _digest(file_digest, _cut(clip, filled))


def file_key(clip, size, mtime_ns):
    """Digest (16 bytes) of path, size, modification time and cut: the same as long as the file was not touched."""
    return _digest(clip.path, size, mtime_ns, _cut(clip, clip.filled))


def file_keys(clips):
    """((n, 2) int64 of size and modification time in ns, (n,) keys) of clips. UserError for a file
    gone by now.
    """
    stats, keys = array("q"), bytearray()
    for clip in clips:
        try:
            about = os.stat(clip.path)
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read any more ({error.strerror})")
        stats.extend((about.st_size, about.st_mtime_ns))
        keys += file_key(clip, about.st_size, about.st_mtime_ns)
    return np.asarray(stats).reshape(-1, 2), np.frombuffer(bytes(keys), KEY)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def shard_names(folder):
    """Names of the shards in a cache folder, which need not be there."""
    names = os.listdir(folder) if os.path.exists(folder) else []
    return sorted(name for name in names if re.fullmatch(r"codes-\w+\.safetensors", name))


class CacheIndex:
    """Where every cached clip is: sorted keys in numpy arrays, no Python object per clip.

    damaged: {shard: what is wrong with it}; such shards are left out.
    """

    def __init__(self, folder, damaged=()):
        """damaged: {shard: ...} that are known to be, beside those whose columns are."""
        self.shards, self.damaged, parts = [], dict(damaged), []
        for name in shard_names(folder):
            if name not in self.damaged:
                try:
                    parts.append(_read_index(Path(folder) / name))
                    self.shards.append(name)
                except FileNotFoundError:       # set aside by another run since
                    pass
                except ValueError as why:
                    self.damaged[name] = str(why)
        shard = [np.full(len(p["lengths"]), i, np.int32) for i, p in enumerate(parts)]
        start = [np.cumsum(p["lengths"], dtype=np.int64) - p["lengths"] for p in parts]
        keys = _concat([p.pop("keys") for p in parts], KEY)
        order = np.argsort(keys, kind="stable")
        self.keys = keys[order]
        self.where = np.stack([_concat(shard, np.int64), _concat(start, np.int64),
                               _concat([p["lengths"] for p in parts], np.int64),
                               _concat([p.pop("checksums") for p in parts], np.int64)], axis=1)[order]
        files = _concat([p.pop("files") for p in parts], KEY)
        order = np.argsort(files, kind="stable")
        self.files = files[order]
        del files
        self.file_keys = _concat([p.pop("file_keys") for p in parts], KEY)[order]

    def find_files(self, file_keys):
        """(n,) file keys -> (n, 4) int64 of shard number, first row, frames, checksum; all -1 where
        unknown.
        """
        at, known = _search(self.files, file_keys)
        found = np.full((len(file_keys), 4), -1, np.int64)
        if known.any():
            row, there = _search(self.keys, self.file_keys[at[known]])
            found[np.flatnonzero(known)[there]] = self.where[row[there]]
        return found

    def find_clips(self, clips, processes=0):
        """((n, 4) of find_files for clips, (m, 3) int64 of number, size and modification time of those unknown).

        clips: a list, or another sequence that gives lists for slices. processes: that help to ask for file dates.
        """
        found, unknown = np.empty((len(clips), 4), np.int64), [np.empty((0, 3), np.int64)]
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

        parallel_map_ordered(keys, processes, take)
        return found, np.concatenate(unknown)

    def has(self, key):
        """True when this content key (16 bytes) has codes."""
        return bool(_search(self.keys, np.array([key], KEY))[1][0])


def _concat(arrays, dtype):
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _search(haystack, needles):
    at = np.minimum(np.searchsorted(haystack, needles), max(0, len(haystack) - 1))
    return at, haystack[at] == needles if len(haystack) else np.zeros(len(needles), bool)


def _read(path, names):
    """({name: array} of those tensors that a shard has, its notes).

    Raises ValueError when it is damaged, UserError when it cannot be read, which says nothing about what is in it.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):     # safe_open would wait at a pipe
            raise ValueError("not a file")
        with open(path, "rb"), safe_open(path, "np") as f:
            return {name: f.get_tensor(name) for name in names if name in f.keys()}, f.metadata() or {}
    except OSError as error:
        if error.errno == errno.ENOENT:     # of open(): safe_open calls every reason so, without a number
            raise
        help = "; its owner can allow it (chmod)" if isinstance(error, PermissionError) else ""
        raise UserError(f"{path}: cannot be read ({error.strerror or error}){help}")
    except MemoryError:
        raise
    except Exception as error:      # safetensors has many
        raise ValueError(f"it is no shard: {error}")


def digest_columns(columns):
    """SHA-256, in hex digits, of a shard's columns beside the codes."""
    digest = hashlib.sha256()
    for name in COLUMNS:
        digest.update(np.ascontiguousarray(columns[name]))
    return digest.hexdigest()


def _read_index(path):
    columns, notes = _read(path, COLUMNS)
    if missing := [name for name in COLUMNS if name not in columns]:
        raise ValueError(f"it has no {missing[0]}")
    if digest_columns(columns) != notes.get("sha256"):
        raise ValueError("its columns have another checksum than when they were written")
    del columns["measures"]
    for name in ("keys", "files", "file_keys"):
        columns[name] = columns[name].view(KEY).reshape(-1)
    return columns


def in_range(codes):
    """Whether all codes are values of a codebook; others would be looked up beyond the model's embeddings."""
    return not codes.size or codes.min() >= 0 and codes.max() < CODES


def _wrong_codes(path):
    """What is wrong with the codes of a shard, in words, or ""."""
    try:
        found, _ = _read(path, ("codes", "lengths", "checksums"))
        if "codes" not in found:
            return "it has no codes"
        if not in_range(found["codes"]):
            return f"it has codes beyond 0 to {CODES - 1}"
        ends = np.cumsum(found["lengths"], dtype=np.int64).tolist()
        for number, (start, stop, checksum) in enumerate(zip([0, *ends], ends, found["checksums"].tolist())):
            if zlib.crc32(found["codes"][start:stop]) != checksum:
                return f"clip {number} of it has another checksum than when it was written"
    except ValueError as why:
        return str(why)
    return ""


def look_up(folder, clips, processes=0):
    """(CacheIndex, *what its find_clips gives for clips); the codes of each shard that has one of them are compared
    with their checksums. processes: that help.
    """
    index = CacheIndex(folder)
    found, unknown = index.find_clips(clips, processes)
    used = [index.shards[i] for i in np.unique(found[:, 0]) if i >= 0]
    damaged = dict(index.damaged)

    def check(first, step):
        for name in used[first::step]:
            yield name, _wrong_codes(Path(folder) / name)

    def take(part):
        if part[1]:
            damaged[part[0]] = part[1]

    parallel_map_ordered(check, processes, take)
    if len(damaged) > len(index.damaged):
        index = CacheIndex(folder, damaged)
        found, unknown = index.find_clips(clips, processes)
    return index, found, unknown


class CodeReader:
    """Reads clips' codes from the shards; one per process, opened lazily so that it can be sent to loader workers."""

    def __init__(self, folder, shards):
        self.folder, self.shards, self.open_shards = str(folder), shards, {}

    def codes(self, shard, start, frames, checksum=-1):
        """(frames, 8) int16 codes. UserError when they are not those that were written."""
        path = os.path.join(self.folder, self.shards[shard])
        try:
            if shard not in self.open_shards:
                self.open_shards[shard] = safe_open(path, "np").__enter__()
            found, why = self.open_shards[shard].get_slice("codes")[start:start + frames], "has another checksum"
        except (OSError, SafetensorError) as error:
            found, why = None, f"cannot be read ({error})"
        if found is not None and not in_range(found):
            found, why = None, f"has codes beyond 0 to {CODES - 1}"
        if found is None or checksum >= 0 and zlib.crc32(found) != checksum:
            raise UserError(f"{path}: a clip in it {why}; start the same command again, for a prepared folder that of "
                            "prepare_tts.py: what is damaged is set aside, and its clips are encoded again")
        return found

    def __getstate__(self):
        return {**self.__dict__, "open_shards": {}}
