"""Audio is decoded exactly and encoded once, with a shared cache and after kills."""
import os
import signal
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch
from safetensors.numpy import load_file

from core.dist import World
from speech import codes as encode
from speech.codes import encode_clip, header_frames, load_codec, plan_codes
from speech.conversations import Clip
from speech.dataset import CodeReader, Encoding, codec_fingerprint, ensure_codes
from speech.speak import read_samples
from tests.helpers.spoken import decode_audio

WORLD = World(device=torch.device("cpu"))


def sine(hertz, rate, seconds=1.0):
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)


def write_audio(path, wave, rate=24000, **options):
    soundfile.write(path, wave, rate, **options)
    return path


def fill(clips, codec, cache, num_proc=0):
    """Fill a cache in this process; returns ([codes per clip], folder of the shards)."""
    folder, shards, where, _, bad = ensure_codes(WORLD, clips, Encoding(codec, cache, 8, num_proc))
    assert not bad
    reader = CodeReader(folder, shards)
    return [reader.codes(*row.tolist()) for row in where], folder


def encoded(folder):
    """Content keys of all codes in a cache folder, one for each encoded clip."""
    return [key for path in sorted(Path(folder).glob("codes-*.safetensors"))
            for key in map(bytes, load_file(path)["keys"])]


def clips_of(tiny):
    """The distinct clips of the tiny data set."""
    problems = []
    clips = {c.path: c for s in read_samples(tiny.train_json, problems) for t in s.turns for c in t.clips}
    assert not problems and len(clips) == 24
    return list(clips.values())


@pytest.fixture(scope="module")
def filled(tiny, tmp_path_factory):
    """(cache folder, folder of shards, codes by path) of the tiny dataset, decoded by two processes."""
    cache = tmp_path_factory.mktemp("filled")
    clips = clips_of(tiny)
    codes, folder = fill(clips, tiny.codec, cache, num_proc=2)
    return cache, folder, {c.path: k for c, k in zip(clips, codes)}


@pytest.fixture(scope="module")
def codec(tiny):
    return load_codec(tiny.codec, WORLD.device, 8)[0]


def direct(codec, wave):
    """The codec's codes of one clip, (T, 8)."""
    with torch.no_grad():
        return codec.encode(torch.from_numpy(wave)[None, None], bandwidth=2).audio_codes[0].T.numpy()


@pytest.mark.parametrize("kind, rate, channels", [
    ("wav", 8000, 1), ("wav", 44100, 2), ("flac", 22050, 2), ("mp3", 44100, 2), ("mp3", 22050, 1), ("ogg", 44100, 1)])
def test_decoding_equals_an_independent_reference(tmp_path, kind, rate, channels):
    wave = sine(440, rate) + 0.05 * np.random.default_rng(0).standard_normal(rate)
    path = write_audio(tmp_path / f"a.{kind}", wave if channels == 1 else np.stack([wave, 0.3 * wave[::-1]], 1), rate)
    (decoded,) = decode_audio(path)
    samples, file_rate = soundfile.read(path)                       # float64, from the path
    assert file_rate == rate and samples.ndim == channels
    mono = samples if channels == 1 else (samples[:, 0] + samples[:, 1]) / 2
    expected = soxr.resample(mono, rate, 24000, quality="HQ")
    assert decoded.dtype == np.float32 and decoded.flags.c_contiguous and decoded.shape == expected.shape
    assert abs(len(decoded) - 24000 * len(mono) / rate) <= 1 and 24000 <= len(decoded) <= 26000     # mp3, ogg may pad
    assert np.abs(decoded - expected).max() < 1e-5


@pytest.mark.parametrize("content, cut, message", [
    (b"\0\0\0 ftypM4A ", (None, None), "Format not recognised.*convert it: ffmpeg -i FILE NEW.flac"),
    (np.zeros(900), (None, None), "is too short: 0.037 s; a clip needs 0.04 s"),
    (np.array([0.1, np.nan] * 4800), (None, None), "peaks at nan"),
    (np.zeros(24000), (1.5, None), "is too short: 0.000 s"),
    (np.zeros(24000), (0.5, 0.03), "is too short: 0.030 s"),
    (np.r_[sine(440, 24000), np.full(24000, -0.25)], (1.0, None), "is silent: every sample is -0.25"),
    (32768 * sine(440, 24000), (0.5, 0.2), "peaks at 1.64e.04")])
def test_undecodable_audio_gives_the_reason(tmp_path, content, cut, message):
    path = tmp_path / "a.wav"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write_audio(path, content, subtype="FLOAT")
    with pytest.raises(ValueError, match=message):
        decode_audio(path, [cut])


def test_a_recording_is_decoded_for_its_cuts_but_not_as_one_clip(tmp_path, monkeypatch):
    path = write_audio(tmp_path / "a.wav", np.tile(sine(40, 1000), 601), 1000)
    for cut in ((None, None), (0.5, None)):
        with pytest.raises(ValueError, match="lasts 60[01] s.*, 600 are decoded: cut it"):
            decode_audio(path, [cut])
        with pytest.raises(ValueError, match="600 are decoded"):
            header_frames(Clip(str(path), *cut))
    for name, value in {"BLOCK": 1 << 12, "SAMPLE_RATE": 1000, "MIN_SAMPLES": 40}.items():      # no resampling
        monkeypatch.setattr(encode, name, value)
    cuts = [(600.0, 1.0), (3.5, 4.25), (0.25, 0.5), (599.0, None)]
    whole = soundfile.read(path, dtype="float32")[0]
    for wave, (start, length) in zip(decode_audio(path, cuts), cuts):
        stop = round((start + length) * 1000) if length else None
        assert (wave == whole[round(start * 1000):stop]).all() and len(wave)
    tracemalloc.start()
    decode_audio(path, cuts[1:3])
    assert tracemalloc.get_traced_memory()[1] < whole.nbytes / 4
    tracemalloc.stop()


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    """libsndfile decodes the first part without an error. A wav written into a pipe has no size and is read."""
    for kind in ("mp3", "wav", "flac"):
        path = write_audio(tmp_path / f"a.{kind}", np.tile(sine(440, 24000), 3))
        data = path.read_bytes()
        decode_audio(path)
        path.write_bytes(data[:len(data) // 2])
        with pytest.raises(ValueError, match="is cut off: its header promises 3.00 s, 1.[2-6]. s are there" if
                           kind != "flac" else "is not readable audio"):
            decode_audio(path)
        if kind == "wav":
            start = data.index(b"data")
            path.write_bytes(data[:start + 4] + b"\xff\xff\xff\xff" + data[start + 8:])
            assert len(decode_audio(path)[0]) == 72000


def test_files_written_into_a_pipe_are_refused(tmp_path):
    """An mp3 without the frame for its length, which libsndfile guesses, and a FLAC file of unknown length."""
    wave = np.random.default_rng(0).normal(0, 0.2, 24000 * 6).astype(np.float32)
    wave[72000:] *= 1e-4        # with a variable bitrate the guess would be wrong
    for kind in ("mp3", "flac"):
        path = write_audio(tmp_path / f"a.{kind}", wave)
        data, tag = bytearray(path.read_bytes()), b"ID3\x03\0\0\0\0\0\x10" + bytes(16)
        (tmp_path / f"tagged.{kind}").write_bytes(tag + data)
        if kind == "flac":
            data[21] &= 0xF0            # 36 bits: samples in STREAMINFO
            data[22:26] = bytes(4)
        else:
            end = data.index(data[:2], data.index(b"LAME") + 36)     # cut the frame with the length
            data = tag + data[end:] + b"TAG".ljust(128)
        (tmp_path / f"b.{kind}").write_bytes(data)
        for read in (decode_audio, lambda path: header_frames(Clip(str(path)))):
            read(path), read(tmp_path / f"tagged.{kind}")
            with pytest.raises(ValueError, match="does not say how long it is"):
                read(tmp_path / f"b.{kind}")


def test_a_second_fill_opens_no_audio(filled, tiny):
    """It reads only the dates of the files."""
    cache, folder, codes = filled
    shards = sorted(p.name for p in folder.iterdir())
    opened, watching = [], [True]                       # an audit hook cannot be removed
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" and watching else None)
    again, _ = fill(clips_of(tiny), tiny.codec, cache)
    watching.clear()
    assert all((a == b).all() for a, b in zip(again, codes.values()))
    assert sorted(p.name for p in folder.iterdir()) == shards
    assert not [name for name in opened if name.endswith(".wav")] and opened


def test_a_short_reference_is_padded_and_a_long_one_shares_its_codes(tiny, tmp_path, codec):
    long, short = (write_audio(tmp_path / f"{s}.wav", sine(440, 24000, s)) for s in (1.5, 0.5))
    clips = [Clip(str(path), filled=filled) for path in (short, long) for filled in (False, True)]
    codes, folder = fill(clips, tiny.codec, tmp_path / "cache")
    (wave,) = decode_audio(short)
    assert np.array_equal(codes[0], direct(codec, wave))
    assert np.array_equal(codes[1], direct(codec, np.pad(wave, (0, 24000 - len(wave))))) and len(codes[1]) == 25
    assert np.array_equal(codes[2], codes[3]) and len(encoded(folder)) == 3
    frames = plan_codes(clips, Encoding(tiny.codec, tmp_path / "empty", 8))[2][:, 2]
    assert frames.tolist() == list(map(len, codes))


def test_cuts_of_one_file_are_separate_clips(tiny, tmp_path, codec):
    path = clips_of(tiny)[0].path
    cuts = [(None, None), (0.5, 0.5), (0.5, 0.25), (0.5, None), (0, 0.5)]
    codes, folder = fill([Clip(path, *cut) for cut in cuts], tiny.codec, tmp_path / "codes")
    assert len(set(encoded(folder))) == 5 and len({c.tobytes() for c in codes}) == 5
    assert all((c == direct(codec, w)).all() for c, w in zip(codes, decode_audio(path, cuts)))


def test_new_content_under_an_old_name_is_encoded_again(tmp_path, tiny, codec):
    path = write_audio(tmp_path / "a.wav", sine(300, 24000))
    date = os.stat(path).st_mtime_ns
    (old,), folder = fill([Clip(str(path))], tiny.codec, tmp_path / "codes")
    write_audio(path, sine(900, 24000))
    os.utime(path, ns=(date, date + 10 ** 9))
    (new,), _ = fill([Clip(str(path))], tiny.codec, tmp_path / "codes")
    assert len(encoded(folder)) == 2
    assert (new == direct(codec, *decode_audio(path))).all() and new.tobytes() != old.tobytes()
    os.utime(path)                                      # a new date alone: read again, but not encoded again
    (same,), _ = fill([Clip(str(path))], tiny.codec, tmp_path / "codes")
    assert len(encoded(folder)) == 2 and (same == new).all()


def test_an_unusable_clip_spoils_no_other(filled, tiny, tmp_path):
    """Other cuts of its file and other clips have codes; only its row has none."""
    good = clips_of(tiny)[0]
    path = write_audio(tmp_path / "a.wav", np.r_[sine(440, 24000), np.zeros(24000)])
    clips = [Clip(str(path), 0.2, 0.5), Clip(str(path), 1.2, 0.5), good, Clip(str(path), 9.0, 1.0)]
    messages = {1: f"{path}: is silent: every sample is 0",
            3: f"{path}: is too short: 0.000 s; a clip needs 0.04 s"}
    for num_proc in (0, 2):
        encoding = Encoding(tiny.codec, tmp_path / "codes", 8, num_proc)
        folder, shards, where, _, bad = ensure_codes(WORLD, clips, encoding)
        assert bad == messages and where[[1, 3], :3].tolist() == [[-1, -1, 0]] * 2 and (where[[0, 2], 2] > 0).all()
        assert (CodeReader(folder, shards).codes(*where[2].tolist()) == filled[2][good.path]).all()
    _, _, planned, _, bad = plan_codes(clips, encoding)      # a header shows only the length
    assert bad == {3: messages[3]} and (planned[[0, 2]] == where[[0, 2]]).all() and planned[1, 2] == 13


def fill_in_a_rank(codec, cache, paths, shard_clips, dies_after=None):
    """Fill a cache in another process, which kills itself after `dies_after` shards."""
    encode.SHARD_CLIPS = shard_clips

    def encode_one(*args):
        if dies_after is not None and len(list(Path(cache).rglob("codes-*.safetensors"))) >= dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode_clip(*args)
    encode.encode_clip = encode_one
    ensure_codes(WORLD, [Clip(path) for path in paths], Encoding(codec, cache, 8))


@pytest.mark.slow
@pytest.mark.race
def test_a_killed_run_leaves_a_usable_cache_which_two_runs_fill_at_the_same_time(filled, pool, tiny, tmp_path):
    """Each clip is encoded once."""
    paths, folder = [clip.path for clip in clips_of(tiny)], tmp_path / "codes" / codec_fingerprint(tiny.codec)

    def start(runs, *options):
        return pool.run(runs, f"{__name__}.fill_in_a_rank", str(tiny.codec), str(tmp_path / "codes"), paths, *options)
    statuses, output = start(1, 2, 2)
    assert statuses == [-signal.SIGKILL], output
    before = encoded(folder)
    assert 4 <= len(before) < 24
    statuses, output = start(2, 5)
    assert statuses == [0, 0], output
    assert output.count("another run is using") <= 1        # 0 if the runs do not overlap
    codes, _ = fill(clips_of(tiny), tiny.codec, tmp_path / "codes")
    assert all((c == filled[2][path]).all() for c, path in zip(codes, paths))
    assert len(encoded(folder)) == len(set(encoded(folder))) == 24 and set(before) < set(encoded(folder))
