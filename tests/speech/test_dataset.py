"""Tokenised samples on disk: several processes write the same table as one process."""
import json

import numpy as np
import pytest
import soundfile
import torch

from core.dist import World
from core.json_files import Problems
from data import make_table, split_validation
from speech.conversations import CHECKS, Clip
from speech.dataset import ClipCodes, Encoding, Sources, TableBuilder, read_all


@pytest.fixture
def tools(tokenizer, ids):
    return tokenizer, ids


def entry(i, **more):
    """A sample whose reference occurs in several chunks; every fifth has a cut."""
    audio = {"type": "audio", "audio_url": f"{i % 29}.wav"}
    if i % 5 == 0:
        audio |= {"offset": i % 3, "duration": 0.5 + i % 2}
    return {"messages": [{"role": "user", "content": f"Reference {i % 7}."},
                         {"role": "assistant", "content": {"type": "audio", "audio_url": f"r{i % 7}.wav"}},
                         {"role": "user", "content": f"Number {i}, über {'and so on ' * (i % 11)}."},
                         {"role": "assistant", "content": audio}], "misc": {"sample_id": f"s{i}"}, **more}


def write_entries(folder, kind, n, change=lambda i, raw: raw):
    """Write a data file of n entries and the audio files that they name; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*range(29), *(f"r{i}" for i in range(7))]:
        (folder / f"{name}.wav").write_bytes(b"audio")
    entries, path = [change(i, entry(i)) for i in range(n)], folder / f"{kind}.json"
    path.write_text("\n\n".join(map(json.dumps, entries)) if kind == "lines" else json.dumps(entries, indent=1))
    return path


def files_of(sources, tools, folder, processes):
    """({file name: bytes} of the table of (training source, validation source), its clips, its problems)."""
    train, held_out = sources
    builder = TableBuilder(*tools, folder)
    (folder.parent / "problems.jsonl").unlink(missing_ok=True)
    problems = Problems(CHECKS, folder.parent)
    read_all(builder, Sources([(train, 1.0, False), (held_out, 1.0, True)], processes=processes), problems)
    problems.settle()
    clips = builder.clips[:]
    frames = np.array([7 + len(clip.path) + i % 13 for i, clip in enumerate(clips)], np.int64)
    builder.write(folder / "cache", ["shard"], np.stack([frames * 0, np.cumsum(frames), frames, frames * 0], axis=1))
    return {path.name: path.read_bytes().replace(str(folder).encode(), b"")
            for path in folder.iterdir()}, clips, (folder.parent / "problems.jsonl").read_text().splitlines()


@pytest.mark.parametrize("n, share, held_out", [
    (2, None, 1), (24, None, 1), (320, None, 16), (4000, None, 20), (240, 0, 0)])
def test_enough_samples_are_held_out_for_a_best_checkpoint(n, share, held_out):
    train, validation = split_validation(n, share, 42)
    assert len(validation) == held_out and sorted([*train, *validation]) == list(range(n))


def spoil(i, raw):
    """Make some samples unusable, in two ways."""
    if i in (7, 19, 20, 21, 22, 23, 24, 38):
        return {**raw, "messages": raw["messages"][:2] + [{"role": "nobody"}]}
    spoilt = {**raw, "messages": [{"role": "user", "content": "<|eot_id|>"}, *raw["messages"][1:]]}
    return spoilt if i in (31, 51) else raw


@pytest.mark.parametrize("kind", ["list", "lines"])
def test_several_processes_make_the_table_of_one(tmp_path, tools, kind, monkeypatch):
    """They also find the same problems in the same order."""
    monkeypatch.setattr("speech.dataset.CHUNK", 3)
    sources = write_entries(tmp_path / "train", kind, 61, spoil), write_entries(tmp_path / "held_out", "lines", 20)
    expected, clips, problems = files_of(sources, tools, tmp_path / "table", 0)
    assert set(expected) == {f"{name}.npy" for name in (
        "tokens", "labelled", "token_offsets", "clips", "clip_offsets", "where", "lengths", "frames", "audio_targets",
        "audible", "text_targets", "names", "name_offsets", "trained")} | {"codes.json"}
    assert len(problems) == 10
    assert any(f"{'line' if kind == 'lines' else 'sample'} 39" in row for row in problems)
    assert any("control token <|eot_id|>" in row for row in problems)
    for processes in (1, 2):
        actual, same_clips, others = files_of(sources, tools, tmp_path / f"table{processes}", processes)
        assert others == problems and same_clips == clips and list(map(repr, same_clips)) == list(map(repr, clips))
        assert {name: actual[name] == expected[name] for name in expected} == dict.fromkeys(actual, True)
    ordered = {}      # clips in the order of first use
    for i in (i for i in range(61) if spoil(i, entry(i)) == entry(i)):
        cut = {} if i % 5 else {"offset": i % 3, "duration": 0.5 + i % 2}
        for name, more in ((f"r{i % 7}", {}), (f"{i % 29}", cut)):
            ordered.setdefault(Clip(str(tmp_path / "train" / f"{name}.wav"), **more))
    assert clips[:len(ordered)] == list(ordered)


def test_a_rerecorded_clip_is_other_data(tiny, tools, tmp_path):
    """A copy in another folder is the same data. A dry run encodes nothing, so it cannot see a difference."""
    def fingerprint_of(folder, sound, dry=False):
        folder.mkdir(exist_ok=True)
        for name, (seconds, seed) in {"a": (0.4, 1), **sound}.items():
            wave = np.random.default_rng(seed).normal(0, 0.1, round(24000 * seconds))
            soundfile.write(folder / f"{name}.wav", wave, 24000)
        (folder / "m.csv").write_text("audio,text\na.wav,One.\nb.wav,Two.\n")
        work = tmp_path / f"work-{len(list(tmp_path.iterdir()))}"
        table = make_table(World(device=torch.device("cpu")), *tools, Sources([(folder / "m.csv", 1.0, False)]),
                              Encoding(tiny.codec, work / "codes", 8), work, dry=dry)
        return table.fingerprint(np.arange(2))
    first = fingerprint_of(tmp_path / "x", {"b": (0.6, 2)})
    again = fingerprint_of(tmp_path / "x", {"b": (0.6, 3)})
    assert first != again and first.split(" audio ")[0] == again.split(" audio ")[0]
    assert fingerprint_of(tmp_path / "y", {"b": (0.6, 2)}) == first
    assert fingerprint_of(tmp_path / "y", {"b": (0.6, 3)}, dry=True) == first.split(" audio ")[0]


def test_bad_rows_are_listed_before_audio_is_encoded(tools, tmp_path, monkeypatch, capfd):
    """The table of an earlier start that failed is deleted, so that they do not pile up."""
    write_entries(tmp_path / "in", "list", 0)
    (tmp_path / "in" / "m.csv").write_text("audio,text\n0.wav,One.\n1.wav,\n")
    out, sources = tmp_path / "out", Sources([(tmp_path / "in" / "m.csv", 1.0, False)], drop=("empty_text",))
    (out / "table-0000000f").mkdir(parents=True)

    def ensure_codes(*_):
        assert '"check": "empty_text"' in (out / "problems.jsonl").read_text()
        assert "data       dropped: 1 empty_text" in capfd.readouterr().out
        assert len(list(out.glob("table-*"))) == 1
        raise OSError("disk full")
    monkeypatch.setattr("data.ensure_codes", ensure_codes)
    with pytest.raises(OSError, match="disk full"):
        make_table(World(device=torch.device("cpu")), *tools, sources, Encoding("codec", out / "codes", 8), out)
    assert not (out / "table-0000000f").exists()


@pytest.mark.parametrize("errors, least, dropped", [({1: "1.wav is broken"}, 1, 1), ({}, 31, 1), ({}, 30, 0)])
def test_bad_audio_is_reported_without_the_bad_rows(tools, tmp_path, monkeypatch, capfd, errors, least, dropped):
    """Clips have 30 and no, or 40 and 30 frames. TTS 3 needs a least number of them."""
    write_entries(tmp_path / "in", "list", 0)
    (tmp_path / "in" / "m.csv").write_text("audio,text\n0.wav,One.\n1.wav,Two.\n2.wav,\n")
    where = np.array([[0, 0, 30, 0], [-1, -1, 0, -1]] if errors else [[0, 0, 40, 0], [0, 40, 30, 0]])
    known = ClipCodes(tmp_path, ["s"], where, np.full((2, 5), np.nan), errors)
    monkeypatch.setattr("data.ensure_codes", lambda *_: known)
    monkeypatch.setattr(type(tools[1]), "min_frames", least)
    sources = Sources([(tmp_path / "in" / "m.csv", 1.0, False)], drop=("empty_text", "audio"))
    table = make_table(World(), *tools, sources, Encoding("codec", "codes", 8), tmp_path / "out")
    assert table.audible.tolist() == [True, not dropped]
    output = capfd.readouterr().out
    assert output.count("1 empty_text; see") == 1 and output.count("dropped: 1 audio; see") == dropped
