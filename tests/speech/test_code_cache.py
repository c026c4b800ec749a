"""Where codes lie: shards, the index of them, their checksums, keys of files and codecs."""
import os
import random
import shutil

import numpy as np
import pytest
from torch.utils.data import DataLoader

from core import packing, watchdog
from core.cli import UserError
from speech.codes import (
    KEY,
    Batch,
    CacheIndex,
    CodeReader,
    codec_fingerprint,
    file_key,
    look_up,
)
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
        assert missing.tolist() == [[-1, -1, -1, -1]] and not index.has(b"\xff" * 16)


def test_another_codec_has_a_cache_of_its_own(tiny, tmp_path):
    other = tmp_path / "codec"
    shutil.copytree(tiny.codec, other)
    assert codec_fingerprint(other) == codec_fingerprint(tiny.codec)        # where it lies does not matter
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert codec_fingerprint(other) != codec_fingerprint(tiny.codec)


@pytest.fixture
def cache(tmp_path):
    """(folder, its one shard, clips, codes of each)."""
    folder, batch, clips, drawn = tmp_path / "codes", Batch(tmp_path / "codes", 8), [], np.random.default_rng(0)
    folder.mkdir()
    for i in range(5):
        clips.append(Clip(str(tmp_path / f"{i}.wav")))
        (tmp_path / f"{i}.wav").write_bytes(b"x" * i)
        batch.add_codes(bytes([65 + i] * 16), drawn.integers(0, 1024, (4 + i, 8)).astype(np.int16))
        stat = os.stat(clips[i].path)
        batch.add_file(file_key(clips[i], stat.st_size, stat.st_mtime_ns), bytes([65 + i] * 16))
    codes = batch.codes
    batch.write()
    return folder, next(folder.iterdir()), clips, codes


def read_all(folder, clips):
    """(index, clips that are not found, codes of the others by number)."""
    index, found, unknown = look_up(folder, clips)
    reader = CodeReader(folder, index.shards)
    return index, unknown, {i: reader.codes(*row.tolist()) for i, row in enumerate(found) if row[0] >= 0}


def test_no_flipped_bit_of_a_shard_changes_a_code(cache):
    """Bits of the header as well: a shard is damaged, or it gives the codes that it was made of."""
    folder, shard, clips, codes = cache
    data, damaged = shard.read_bytes(), 0
    header = int.from_bytes(data[:8], "little") + 8
    for bit in random.Random(0).sample(range(len(data) * 8), 300):
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(spoilt)
        index, unknown, found = read_all(folder, clips)
        damaged += len(index.damaged)
        assert len(index.damaged) == 1 or bit // 8 < header and not len(unknown), bit
        assert all((found[i] == codes[i]).all() for i in found), bit
    assert damaged > 250


@pytest.mark.parametrize("code", [-1, 1024, 1030])
def test_codes_that_no_codebook_has_are_refused_whoever_wrote_them(cache, code):
    """With right checksums: begin and end of stream are no codes of audio either."""
    folder, shard, clips, codes = cache
    shard.unlink()
    batch = Batch(folder, 8)
    for i, clip in enumerate(clips):
        batch.add_codes(bytes([65 + i] * 16), np.where(codes[i] == codes[i][0, 0], code, codes[i]).astype(np.int16))
        stat = os.stat(clip.path)
        batch.add_file(file_key(clip, stat.st_size, stat.st_mtime_ns), bytes([65 + i] * 16))
    batch.write()
    index = CacheIndex(folder)
    with pytest.raises(UserError, match="a clip in it cannot be read .it has codes beyond 0 to 1023"):
        CodeReader(folder, index.shards).codes(*index.find_clips(clips)[0][0].tolist())
    index, found, unknown = look_up(folder, clips)
    assert list(index.damaged.values()) == ["it has codes beyond 0 to 1023"] and len(unknown) == 5


def test_codes_that_change_after_the_start_are_refused_when_they_are_read(cache):
    folder, shard, clips, codes = cache
    index, found, _ = look_up(folder, clips)
    data = bytearray(shard.read_bytes())
    data[bytes(data).index(codes[3].tobytes())] ^= 1
    shard.write_bytes(data)
    reader = CodeReader(folder, index.shards)
    assert (reader.codes(*found[2].tolist()) == codes[2]).all()
    with pytest.raises(UserError, match=f"{shard}: a clip in it cannot be read .it has another checksum.; start the same command again"):
        reader.codes(*found[3].tolist())
    loader = DataLoader(found.tolist(), batch_size=None, num_workers=1, multiprocessing_context="fork",
                        collate_fn=lambda row: reader.codes(*row), worker_init_fn=watchdog.init_loader)
    with pytest.raises(UserError, match=f"^{shard}: .* and its clips are encoded again$"):
        list(packing.iterate(loader))
    shard.rename(f"{shard}.damaged-1")              # another run has set it aside
    with pytest.raises(UserError, match=f"{shard}: a clip in it cannot be read"):
        CodeReader(folder, index.shards).codes(*found[2].tolist())


