"""A prepared folder trains like its sources, also after a move; checks find and report every fault."""
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from core.cli import UserError
from core.dist import World
from data import SpeechSamples, Table, make_table, split_samples, usable_samples
from speech import prepare_tts
from speech.conversations import CHECKS, Sample
from speech.dataset import Encoding, Reading, Sources
from tests.helpers.trainer import RUN_SCRIPT, speech_main

WORLD = World(device=torch.device("cpu"))


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def speech(tiny, tmp_path_factory):
    """A manifest of the clips of the tiny data set, of three speakers, in a new folder."""
    folder = tmp_path_factory.mktemp("speech")
    shutil.copytree(tiny.root / "speech", folder / "speech")
    rows = [{"audio": f"speech/{path.name}", "text": f"Sentence number {i}, spoken.", "speaker": path.stem[-1]}
            for i, path in enumerate(sorted((folder / "speech").glob("*.wav")))]
    return written(folder / "m.jsonl", rows)


def sources_of(train, held_out):
    """[(path, weight, True for validation data)]."""
    return [*((*source, False) for source in train), *([(held_out, 1.0, True)] if held_out else [])]


def prepared(tiny, tokenizer, ids, source, out, drop=(), held_out=None, reading=None, cache=None):
    """Run prepare() in this process; return its report."""
    out.mkdir(exist_ok=True)
    sources = Sources(sources_of([(source, 1.0)], held_out), reading or Reading(), drop=drop)
    encoding = Encoding(tiny.codec, cache or out / "codes", ids.num_codebooks, wait_limit_s=60)
    return prepare_tts.prepare(WORLD, tokenizer, ids, sources, encoding, out, 0.32, 60.0)


def opened(tiny, tokenizer, ids, train, out, held_out=None, reading=None):
    """The table of prepared folders or sources."""
    out.mkdir(exist_ok=True)
    return make_table(WORLD, tokenizer, ids, Sources(sources_of(train, held_out), reading or Reading()),
                      Encoding(tiny.codec, out / "codes", ids.num_codebooks, wait_limit_s=60), out)


@pytest.fixture(scope="module")
def folder(tiny, tokenizer, ids, speech, tmp_path_factory):
    """A prepared folder of the manifest, with references of the same speaker and a code cache."""
    out = tmp_path_factory.mktemp("prepared")
    prepared(tiny, tokenizer, ids, speech, out, reading=Reading(reference="same_speaker"))
    return out


def train_without_codec(argv):
    """In a fork that cannot import torchaudio, so it cannot encode."""
    sys.modules["torchaudio"] = None
    speech_main(argv)


@pytest.mark.slow
def test_ranks_prepare_and_the_trainer_trains_on_it_elsewhere(tiny, speech, pool, forked, folder, tmp_path):
    """Two processes run the script. Then the folder is moved and the audio deleted, and no codec can load."""
    mine = tmp_path / "mine"
    shutil.copytree(speech.parent, mine)
    flags = ["--model_path", tiny.model, "--audio_tokenizer_path", tiny.codec, "--train_data_file", mine / "m.jsonl:2",
             "--output_dir", tmp_path / "made", "--reference", "same_speaker", "--preprocess_num_proc", "1"]
    statuses, output = pool.run(2, RUN_SCRIPT, "speech/prepare_tts.py", list(map(str, flags)), cwd=tmp_path)
    assert statuses == [0, 0], output[-3000:]
    assert "24 rows = 24 kept + 0 refused" in output and "done       24 samples" in output
    tables = [Table(out / json.loads((out / "prepared.json").read_text())["table"])
              for out in (folder, tmp_path / "made")]
    assert len({table.fingerprint(np.arange(24)) for table in tables}) == 1
    shutil.rmtree(mine)
    (tmp_path / "made").rename(tmp_path / "moved")
    done = forked("--train_data_file", "", "--train_data_dir", tmp_path / "moved", "--code_cache", "", "--max_steps", 2,
                  "--disable_eval", main=f"{__name__}.train_without_codec")
    assert "samples    48 to train" in done.output and done.metrics("train/loss").keys() == {1, 2}
    assert not (done.output_dir / "codes").exists()


def test_a_prepared_folder_gives_the_batches_of_its_source(tiny, tokenizer, ids, speech, folder, tmp_path):
    reading = Reading(reference="same_speaker")
    direct = opened(tiny, tokenizer, ids, [(speech, 1.0)], tmp_path / "a", reading=reading)
    (tmp_path / "b").mkdir()
    mapped = opened(tiny, tokenizer, ids, [(folder, 1.0)], tmp_path / "b")
    assert direct.fingerprint(np.arange(24)) == mapped.fingerprint(np.arange(24)) and len(mapped) == 24
    samples = SpeechSamples(mapped, ids)        # reads codes from the present folder
    assert [len(samples[i]["input_ids"]) for i in range(24)] == direct.lengths.tolist()
    half = opened(tiny, tokenizer, ids, [(folder, 0.5)], tmp_path / "c")
    assert len(split_samples(half, 0, 42)[0]) == 12
    with pytest.raises(UserError, match="a prepared folder is given alone; prepare all data together"):
        opened(tiny, tokenizer, ids, [(folder, 0.5)], tmp_path / "c", held_out=speech)
    with pytest.raises(UserError, match="is a folder of prepare_tts.py; give another one"):
        opened(tiny, tokenizer, ids, [(speech, 1.0)], folder)       # a start deletes old tables there


def test_a_folder_of_another_model_or_with_a_flipped_bit_is_refused(tiny, tokenizer, ids, folder, tmp_path):
    contents = json.loads((folder / "prepared.json").read_text())

    def refused(message, train=folder, **reading):
        with pytest.raises(UserError, match=message):
            opened(tiny, tokenizer, ids, [(train, 1.0)], tmp_path / "out", reading=Reading(**reading))
    refused("was prepared with reference same_speaker, not none", reference="none")
    refused("was prepared with normalize False, not True", normalize=True)      # also if the flag has its default
    other = shutil.copytree(folder, tmp_path / "other")
    for change, message in (
            ({"tokenizer": "x"}, "was prepared with another tokenizer than that of --model_path"),
            ({"reading": contents["reading"] | {"normalize": True}}, "was prepared with normalize True, not False"),
            ({"sha256": {"gone": "x"}}, "is damaged, gone is not there")):
        (other / "prepared.json").write_text(json.dumps(contents | change))
        refused(message, other)
    (other / "prepared.json").write_text(json.dumps(contents))
    opened(tiny, tokenizer, ids, [(other, 1.0)], tmp_path / "out")
    for pattern in ("table-*/tokens.npy", "codes/*/*.safetensors"):
        path = next(other.glob(pattern))
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused(f"is damaged, .*{path.name} .* has another checksum", other)
        path.write_bytes(whole)


def test_a_cut_past_the_end_of_its_recording_is_an_error(tiny, tokenizer, ids, tmp_path):
    """Subtitles of another recording, or times in milliseconds, would train 2 s of sound for 7 s of text."""
    data = tmp_path / "data"
    data.mkdir()
    soundfile.write(data / "talk.wav", tone(20.0), 16000)
    (data / "talk.srt").write_text(
        "1\n00:00:01,000 --> 00:00:02,000\nOne.\n\n2\n00:00:18,000 --> 00:00:20,200\nTwo.\n\n"
        "3\n00:00:18,000 --> 00:00:25,000\nThree.\n")
    with pytest.raises(UserError, match="talk.srt entry 3 .* .*talk.wav: ends 5.00 s before the cut from 18 to 25 s"):
        prepared(tiny, tokenizer, ids, data, tmp_path / "a")
    assert prepared(tiny, tokenizer, ids, data, tmp_path / "b", drop=("audio",))["samples"] == 2


def tone(seconds, rate=16000, level=0.3, hertz=200):
    return level * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A manifest with one sample of each fault and 30 good ones."""
    folder, rows = tmp_path_factory.mktemp("faulty"), []
    waves = {f"good{i}": tone(1.0, hertz=200 + i) for i in range(30)} | {
        "tiny": tone(0.2), "quiet": tone(1.0, level=1e-5), "clipped": np.clip(tone(1.0, level=2.0), -1, 1),
        "shifted": tone(1.0) + 0.1, "copy": tone(1.0, hertz=200), "again": tone(1.0, hertz=300),
        "dots": tone(1.0, hertz=301), "fast": tone(1.0, hertz=302)}
    for name, wave in waves.items():
        soundfile.write(folder / f"{name}.wav", wave, 16000, subtype="FLOAT")
        texts = {"again": rows[3]["text"] if rows[3:] else "", "dots": "...", "tiny": "Tin.", "fast": "Too much. " * 14}
        text = texts.get(name, f"A {'very ' * (len(rows) % 5)}good text of {name.removeprefix('good')}.")
        rows.append({"audio": f"{name}.wav", "text": text, "speaker": "anna"})
    shutil.copy(folder / "good0.wav", folder / "copy.wav")
    (folder / "text.wav").write_text("no audio")
    rows.append({"audio": "text.wav", "text": "Unreadable."})
    return written(folder / "m.jsonl", [*rows, {"audio": "good1.wav", "text": " "}])


FAULTS = {"audio": "text", "too_short": "tiny", "silence": "quiet", "clipping": "clipped", "dc_offset": "shifted",
          "no_words": "dots", "duplicate_audio": "copy", "duplicate_text": "again", "text_rate": "fast"}


def read_problems(out):
    """{check: [number of the row]} of problems.jsonl."""
    numbers = {}
    for line in (out / "problems.jsonl").read_text().splitlines():
        row = json.loads(line)
        numbers.setdefault(row["check"], []).append(int(row["entry"].split()[1]) - 1)
    return numbers


def test_errors_stop_and_all_problems_are_listed(tiny, tokenizer, ids, faulty, tmp_path):
    cache, rows = tmp_path / "codes", [json.loads(line) for line in faulty.read_text().splitlines()]
    expected = {"empty_text": [39]} | {check: [i for i, row in enumerate(rows) if Path(row["audio"]).stem == name]
                                       for check, name in FAULTS.items()}
    with pytest.raises(UserError, match="4 problems:") as caught:        # of rows and of audio, in one list
        prepared(tiny, tokenizer, ids, faulty, tmp_path / "b", cache=cache)
    for message in ("line 40 (good1.wav): its text is empty", "text.wav: is not readable audio", "--drop_bad",
                    "0.20 s, less than --min_clip_seconds 0.32", "is silent, -103 dB of full scale"):
        assert message in str(caught.value)
    assert read_problems(tmp_path / "b") == expected and not (tmp_path / "b" / "prepared.json").exists()
    dropped = (*CHECKS, *prepare_tts.SOUND_ERRORS, "clipping", "text_rate")
    report = prepared(tiny, tokenizer, ids, faulty, tmp_path / "c", cache=cache, drop=dropped)
    assert read_problems(tmp_path / "c") == expected and (report["samples"], report["dropped"]) == (34, 6)
    assert report["checks"]["clipping"] == {"samples": 1, "dropped": True}
    assert report["checks"]["dc_offset"] == {"samples": 1, "dropped": False}
    table = opened(tiny, tokenizer, ids, [(tmp_path / "c", 1.0)], tmp_path / "d")
    kept = {int(table.name(i).split()[2]) - 1 for i in split_samples(table, 0, 42)[0]}
    assert kept == {*range(39)} - {expected[check][0] for check in (
        "audio", "too_short", "silence", "clipping", "text_rate")}


def test_validation_audio_in_training_is_found(tiny, tokenizer, ids, faulty, tmp_path, capsys):
    rows = [json.loads(line) for line in faulty.read_text().splitlines()]
    train = written(faulty.parent / "train.jsonl", rows[:4])
    held_out = written(faulty.parent / "eval\x1b[31m.jsonl", [{**rows[2], "text": "Other words."}, rows[5]])
    report = prepared(tiny, tokenizer, ids, train, tmp_path / "a", held_out=held_out, drop=("in_validation",))
    assert read_problems(tmp_path / "a")["in_validation"] == [2] and report["samples"] == 5
    table = opened(tiny, tokenizer, ids, [(train, 1.0)], tmp_path / "c", held_out)      # without a flag
    limits = {"max_length": 10_000, "max_tokens": 0, "drop": False}
    train_ids, validation_ids = usable_samples(table, *split_samples(table, 0, 42), **limits)
    assert train_ids.tolist() == [0, 1, 3] and validation_ids.tolist() == [4, 5]
    output = capsys.readouterr().out
    assert "dropped from training: 1 sample whose audio is in the validation data" in output
    assert "eval\\x1b[31m.jsonl" in output and "\x1b" not in output
    with pytest.raises(UserError, match="no training samples are left"):
        usable_samples(table, np.array([2]), np.array([4, 5]), **limits)


def test_a_note_counts_once_for_all_rows_of_a_sample():
    """TTS 3 makes a row of each trained turn."""
    noted = Sample("a.jsonl line 1", [], "anna", "en", [("own_reference", "its reference is the trained clip")])
    facts, notes = prepare_tts.inspect([(noted, 2), (noted, 0)], "a.jsonl")
    assert len(facts) == 2 and [note.check for note in notes] == ["own_reference"] * 2


def test_a_failed_start_keeps_the_prepared_table(tiny, tokenizer, ids, speech, folder, tmp_path, monkeypatch):
    """prepared.json names an existing table at any time."""
    out = shutil.copytree(folder, tmp_path / "out")
    (table,) = out.glob("table-*")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
        def write_prepared(*_):
            assert table.exists() and len(list(out.glob("table-*"))) == 2
            raise OSError("killed")
        patch.setattr(prepare_tts, "tokenizer_fingerprint", write_prepared)      # for prepared.json
        prepared(tiny, tokenizer, ids, speech, out)
    assert table.exists()
    prepared(tiny, tokenizer, ids, speech, out)
    (new,) = out.glob("table-*")
    assert new.name == json.loads((out / "prepared.json").read_text())["table"] != table.name
