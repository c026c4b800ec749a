"""Where codes lie: shards, the index of them, keys of files and codecs."""
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from common import indexing
from common.parallel import UserError
from speech.codes import KEY, Batch, CacheIndex, CodeReader, codec_fingerprint, file_key
from speech.conversations import Clip


def test_codes_survive_the_way_through_a_shard(tmp_path):
    """All values of a codebook, in C and in Fortran order, alone and joined: safetensors writes raw memory."""
    values = np.arange(1024 * 8, dtype=np.int16).reshape(1024, 8) % 1024
    for number, clips in enumerate(([values], [np.asfortranarray(values)], [values[:3], np.asfortranarray(values)[5:9]],
                                    [values[::2, ::-1]])):
        folder = tmp_path / str(number)
        folder.mkdir()
        batch = Batch(folder, 8)
        for i, codes in enumerate(clips):
            batch.add_codes(bytes([i] * 16), codes)
            batch.add_file(bytes([100 + i] * 16), bytes([i] * 16))
        batch.write()
        index = CacheIndex(folder)
        where = index.find_files(np.array([bytes([100 + i] * 16) for i in range(len(clips))], KEY))
        for codes, row in zip(clips, where):
            read = CodeReader(folder, index.shards).codes(*row.tolist())
            assert read.dtype == np.int16 and (read == codes).all()
        missing = index.find_files(np.array([b"\0" * 16], KEY))
        assert missing.tolist() == [[-1, -1, -1]] and not index.has(b"\xff" * 16)


def test_file_dates_are_asked_for_by_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("speech.codes.BLOCK", 2)
    monkeypatch.setattr(indexing, "HERE", 1)
    clips = [Clip(str(tmp_path / f"{i}.wav"), *((i, 1.0) if i % 3 else ())) for i in range(23)]
    for i in range(23):
        (tmp_path / f"{i}.wav").write_bytes(b"x" * i)
    cache, batch = tmp_path / "codes", Batch(tmp_path / "codes", 8)
    cache.mkdir()
    for i in range(0, 23, 2):
        batch.add_codes(bytes([65 + i] * 16), np.zeros((i + 1, 8), np.int16))
        stat = os.stat(clips[i].path)
        batch.add_file(file_key(clips[i], stat.st_size, stat.st_mtime_ns), bytes([65 + i] * 16))
    batch.write()
    for processes in (0, 2):
        found, unknown = CacheIndex(cache).find_clips(clips, processes)
        assert found[::2, 2].tolist() == list(range(1, 24, 2)) and (found[1::2] == -1).all()
        assert unknown.tolist() == [[i, i, os.stat(clips[i].path).st_mtime_ns] for i in range(1, 23, 2)]
        with pytest.raises(UserError, match="gone.wav: cannot be read any more"):
            CacheIndex(cache).find_clips([*clips, replace(clips[0], path=str(tmp_path / "gone.wav"))], processes)


def test_another_codec_has_a_cache_of_its_own(tiny, tmp_path):
    other = tmp_path / "codec"
    shutil.copytree(tiny.codec, other)
    assert codec_fingerprint(other) == codec_fingerprint(tiny.codec)        # where it lies does not matter
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert codec_fingerprint(other) != codec_fingerprint(tiny.codec)
