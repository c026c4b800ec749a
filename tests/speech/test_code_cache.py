"""The cache of codes: shards, their index and checksums, keys of files and codecs."""
import random
import re
import shutil

import numpy as np
import pytest

from core import packing
from core.cli import UserError
from speech.codes import write_shard
from speech.conversations import Clip
from speech.dataset import CodeReader, codec_fingerprint, file_key, look_up


def fill(folder, values):
    """Write a shard of a list of codes (T, 8); return its clips, one file for each."""
    folder.mkdir(exist_ok=True)
    clips = [Clip(str(folder / f"{i}.wav")) for i in range(len(values))]
    for i in range(len(values)):
        (folder / f"{i}.wav").write_bytes(b"x" * i)
    keys = [bytes([65 + i] * 16) for i in range(len(values))]
    write_shard(folder, {key: (codes, [np.nan] * 5) for key, codes in zip(keys, values)},
                dict(zip(map(file_key, clips), keys)))
    return clips


@pytest.fixture
def cache(tmp_path):
    """(folder, path of the only shard, clips, codes of each clip)."""
    drawn = np.random.default_rng(0)
    codes = [drawn.integers(0, 1024, (4 + i, 8)).astype(np.int16) for i in range(5)]
    clips = fill(tmp_path / "codes", codes)
    return tmp_path / "codes", next((tmp_path / "codes").glob("codes-*")), clips, codes


def read_all(folder, clips):
    """(indices of clips without codes, {index: codes} of the others)."""
    known = look_up(folder, clips)
    reader = CodeReader(folder, known.shards)
    return known.missing(), {i: reader.codes(*row.tolist()) for i, row in enumerate(known.where) if row[0] >= 0}


def test_codes_are_read_as_they_were_written(tmp_path):
    """All values of a codebook, also in Fortran order, since safetensors writes raw memory."""
    values = np.arange(1024 * 8, dtype=np.int16).reshape(1024, 8) % 1024
    for number, codes in enumerate(([values[:3], np.asfortranarray(values), values[::2, ::-1]], [])):
        clips = fill(tmp_path / str(number), codes)
        missing, stored = read_all(tmp_path / str(number), [*clips, Clip(__file__)])
        assert missing == [len(codes)]
        assert all(stored[i].dtype == np.int16 and (stored[i] == expected).all() for i, expected in enumerate(codes))


def test_another_codec_has_another_fingerprint(tiny, tmp_path):
    other = tmp_path / "codec"
    shutil.copytree(tiny.codec, other)
    assert codec_fingerprint(other) == codec_fingerprint(tiny.codec)        # the folder does not matter
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert codec_fingerprint(other) != codec_fingerprint(tiny.codec)


def test_no_flipped_bit_of_a_shard_changes_a_code(cache):
    """A shard with a flipped bit, in the header or not, is refused, or it still has the right codes."""
    folder, shard, clips, codes = cache
    data, damaged = shard.read_bytes(), 0
    header = int.from_bytes(data[:8], "little") + 8
    for bit in random.Random(0).sample(range(len(data) * 8), 300):
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(spoilt)
        try:
            missing, stored = read_all(folder, clips)
            assert bit // 8 < header and not missing, bit
            assert all((stored[i] == codes[i]).all() for i in stored), bit
        except UserError as error:
            assert re.match(f"{shard}: is damaged .*; delete it and start again, and its clips are encoded", str(error))
            damaged += 1
    assert damaged > 250


def test_codes_that_change_after_the_start_are_refused_when_they_are_read(cache):
    folder, shard, clips, codes = cache
    _, shards, where, *_ = look_up(folder, clips)
    data = bytearray(shard.read_bytes())
    data[bytes(data).index(codes[3].tobytes())] ^= 1
    shard.write_bytes(data)
    reader = CodeReader(folder, shards)
    assert (reader.codes(*where[2].tolist()) == codes[2]).all()
    with pytest.raises(UserError, match=f"{shard}: is damaged .codes with another checksum"):
        reader.codes(*where[3].tolist())
    with pytest.raises(UserError, match=f"^{shard}: .* and its clips are encoded again"):
        list(packing.run_ahead(lambda row: reader.codes(*row), where.tolist(), 1))
