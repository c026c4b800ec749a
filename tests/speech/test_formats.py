"""Every format is told from its neighbours by its content, and its rows become the samples that they are."""
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile

from core.cli import UserError
from speech.conversations import MULTISPEAKER_SYSTEM, canonical_sample
from speech.codes import decode_audio
from speech import convert
from speech.rows import read_samples
from speech import labels_v3
from speech.speak import canonical_prompt, text_prompts
from tests.helpers.trainer import ROOT


@pytest.fixture
def folder(tmp_path):
    """A folder with files a.wav to d.wav, in wavs/ and beside it; readers look whether they exist, never into them."""
    for place in (tmp_path, tmp_path / "wavs"):
        place.mkdir(exist_ok=True)
        for name in "abcd":
            (place / f"{name}.wav").write_bytes(b"audio")
    return tmp_path


def read(path, **reading):
    """(samples, problems) of a source, converted and read."""
    problems = []
    return list(read_samples(path, problems, **reading)), problems


def spoken(samples):
    """[(file of the last clip, the text before it)]."""
    return [(s.turns[-1].clips[-1].path.rsplit("/", 1)[-1], s.turns[-2].text) for s in samples]


def written(path, text, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, **how)
    return path


def lines(path, *entries):
    return written(path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))


# -- One file or folder of each format ---------------------------------------------------------------------------------


def jsonl(entry):
    """JSON lines of entry("a") and entry("b")."""
    return "".join(json.dumps(entry(name)) + "\n" for name in "ab")


# as JimmyMa99's converter writes it: "audio_generation", and the placeholder still in the transcripts
JIMMYS = {"duration": 1.2, "speaker_id": "spk", "speaker_name": "spk", "scene": "quiet_room", "emotion": "neutral",
          "language": "zh", "gender": "unknown", "quality_score": 1.0, "original_audio_path": "/x.mp3",
          "user_instruction": None, "task_type": "audio_generation"}
TWO = {f"{n}.txt": f"<audio>This is {n}." for n in "ab"}
FORMATS = {     # {what writes it: ({file: text}, what is given)}
    "jimmys": (TWO | {"metadata.json": json.dumps({"dataset_info": {"total_samples": 2}, "samples": [
        {"id": f"spk_{n}", "audio_file": f"{n}.wav", "transcript_file": f"{n}.txt", **JIMMYS} for n in "ab"]})}, ""),
    "swift": ({"m.jsonl": jsonl(lambda n: {"messages": [
        {"role": "assistant", "content": f"<audio>This is {n}."}], "audios": [f"FOLDER/{n}.wav"]})}, "m.jsonl"),
    "manifest": ({"m.jsonl": jsonl(lambda n: {"audio": f"{n}.wav", "text": f"This is {n}."})}, "m.jsonl"),
    "json list": ({"m.json": json.dumps([
        {"audio_filepath": f"{n}.wav", "text": f"This is {n}.", "duration": 1.5} for n in "ab"])}, "m.json"),
    "excel": ({"m.csv": "\ufeffwav,sentence,client_id\r\na.wav,This is a.,anna\r\nb.wav,This is b.,ben\r\n"},
              "m.csv"),
    "tabs": ({"m.tsv": "client_id\tpath\tsentence\nx\ta.wav\tThis is a.\n\ny\tb\tThis is b.\n"}, "m.tsv"),
    "bars": ({"m.csv": "audio_file|text|speaker_name\nwavs/a.wav|This is a.|anna\nb|This is b.|ben\n"}, "m.csv"),
    "ljspeech": ({"metadata.csv": "a|This is a.|This is a.\nb|This is b.|\n"}, ""),
    "two columns": ({"list.txt": "a|This is a.\nb|This is b.\n"}, "list.txt"),
    "piper": ({"p.csv": "a.wav|anna|This is a.\nb.wav|anna|This is b.\n"}, "p.csv"),
    "vits": ({"train.list": "wavs/a.wav|anna|EN|This is a.\nwavs/b.wav|anna|EN|This is b.\n"}, "train.list"),
    "kaldi": ({"wav.scp": "u1 FOLDER/a.wav\nu2 b.wav\n", "utt2spk": "u1 anna\nu2 ben\n",
                        "text": "u1 This is a.\nu2 This is b.\n"}, ""),
    "sidecar": ({f"data/{n}/{n}{end}": f"This is {n}.\n" for n in "ab" for end in (".txt", ".wav")}, "data")}
SPEAKERS = {"excel": ["anna", "ben"], "kaldi": ["anna", "ben"], "vits": ["anna", "anna"], "sidecar": ["a", "b"]}


def made(folder, name):
    """Write what FORMATS says; returns the path that is given."""
    files, given = FORMATS[name]
    for path, text in files.items():
        written(folder / path, text.replace("FOLDER", str(folder)))
    return folder / given


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_found_and_read(folder, name):
    samples, problems = read(made(folder, name))
    assert not problems
    assert spoken(samples) == [("a.wav", "This is a."), ("b.wav", "This is b.")]
    assert [s.speaker for s in samples] == SPEAKERS.get(name) or name not in SPEAKERS
    assert {s.language for s in samples} == {"EN"} or name != "vits"


GIGASPEECH = {"language": "EN", "audios": [{"aid": "A", "path": "audio/A.opus", "segments": [
    {"sid": "A1", "speaker": "N/A", "begin_time": 1.5, "end_time": 2, "text_tn": "YES <COMMA> NO <PERIOD>"},
    {"sid": "A2", "speaker": "P7", "begin_time": 2, "end_time": 3, "text_tn": "<MUSIC>"},
    {"sid": "A3", "speaker": "P7", "begin_time": 3, "end_time": 4, "text_tn": "WELL <QUESTIONMARK>"}]}]}
EMILIA = [{"text": " One.", "speaker": "SPEAKER_00", "language": "en"}, {"text": " Two.", "speaker": "SPEAKER_01"}]
CORPORA = {     # {corpus: ({file: text}, [(audio, text, speaker)], checks of what is refused)}
    "vctk": ({"txt/p225/p225_001.txt": "Hi.\n", "wav48_silence_trimmed/p225/p225_001_mic1.flac": "",
              "wav48_silence_trimmed/p225/p225_001_mic2.flac": "", "txt/p280/p280_001.txt": "Ho.",
              "wav48_silence_trimmed/p280/p280_001_mic1.flac": "", "wav48_silence_trimmed/p315/p315_001_mic2.flac": ""},
             [("p225_001_mic2.flac", "Hi.", "p225"), ("p280_001_mic1.flac", "Ho.", "p280")], []),
    "aishell3": ({"content.txt": "SSB00050001.wav\t你 ni3 好 hao3\n", "wav/SSB0005/SSB00050001.wav": "",
                  "label_train-set.txt": "x"}, [("SSB00050001.wav", "你好", "SSB0005")], []),
    "mls": ({"transcripts.txt": "1_2_3\tone\x85two\n1_2_4\t\n", "audio/1/2/1_2_3.opus": "", "segments.txt": "x"},
            [("1_2_3.opus", "one\x85two", "1")], ["empty_text"]),
    "wenetspeech4tts": ({"txts/X1.txt": "X1\t你好。\n[[0, 0.2]]\n", "wavs/X1.wav": ""}, [("X1.wav", "你好。", "")], []),
    "gigaspeech": ({"GigaSpeech.json": json.dumps(GIGASPEECH), "audio/A.opus": ""},
                   [("A.opus", "YES, NO.", ""), ("A.opus", "WELL?", "P7")], []),
    "emilia_pipe": ({"A/A.json": json.dumps(EMILIA), "A/A_0.mp3": "", "A/A_1.mp3": "", "A/A_7.mp3": "",
                     "C/C.json": json.dumps(EMILIA[:1]), "about.json": "{}"},
                    [("A_0.mp3", "One.", "A/SPEAKER_00"), ("A_1.mp3", "Two.", "A/SPEAKER_01")],
                    ["empty_text", "invalid"]),         # audio without an entry, an entry without audio
    "sidecar": ({"19/198/19_198_000.wav": "", "19/198/19_198_000.normalized.txt": "Hi.", "19/198/._a.wav": "",
                 "19/198/19_198_000.original.txt": "hi", "19/198/19_198.trans.tsv": "x"},        # LibriTTS
                [("19_198_000.wav", "Hi.", "19")], [])}


@pytest.mark.parametrize("name", CORPORA)
def test_corpora_are_read_as_they_are_published(tmp_path, name):
    """In their tables only a line feed ends a line; texts may hold other characters that separate lines."""
    files, expected, refused = CORPORA[name]
    for path, text in files.items():
        written(tmp_path / path, text)
    samples, problems = read(tmp_path)
    assert [p.check for p in problems] == refused
    assert [(*pair, s.speaker) for pair, s in zip(spoken(samples), samples)] == expected
    if name == "gigaspeech":
        assert [(c.offset, c.duration) for s in samples for c in s.turns[-1].clips] == [(1.5, 0.5), (3, 1)]


GUI = [{"id": n, "audio_file": f"{n}.wav", "transcript_file": f"{n}.txt", "split": split} for n, split in (
    ("a", "train"), ("b", "eval"), ("c", "Val "))]
COSY = "Speak slowly.<|endofprompt|>Hi."
SETS = {        # {tool: ({file: text} as it writes them, what is given, [(audio, text)] or what the error says)}
    "common voice": ({"train.tsv": "client_id\tpath\tsentence\nx\tc1.mp3\t\"Hi\" he said.\n", "clips/c1.mp3": "",
                      "reported.tsv": "sentence\treason\nHi.\tx\n"}, "", [("c1.mp3", '"Hi" he said.')]),
    "common voice, splits": ({"train.tsv": "path\tsentence\nc\tHi.\n", "test.tsv": "path\tsentence\nd\tHo.\n",
                              "clips/c.mp3": ""}, "", "holds 2 lists; give one: .*/test.tsv, .*/train.tsv"),
    "audiofolder": ({"train/metadata.csv": "file_name,text\nc.wav,Hi.\n", "train/c.wav": ""}, "", [("c.wav", "Hi.")]),
    "audiofolder, splits": ({f"{split}/metadata.csv": "file_name,text\nc.wav,Hi.\n" for split in ("train", "test")} | {
        "train/c.wav": ""}, "", "give one: .*/test/metadata.csv, .*/train/metadata.csv"),
    "emilia": ({"EN/EN_B0.jsonl": '{"id": "x", "wav": "EN_B0/S0/mp3/x.mp3", "text": " Hi.", "speaker": "s"}\n',
                "EN/EN_B0/S0/mp3/x.mp3": ""}, "", [("x.mp3", "Hi.")]),
    "xtts": ({"metadata_train.csv": "audio_file|text|speaker_name\nwavs/c.wav|hi|anna\n", "wavs/c.wav": ""},
             "", [("c.wav", "hi")]),
    "xtts, splits": ({f"metadata_{split}.csv": "audio_file|text\nwavs/c.wav|hi\n" for split in ("train", "eval")},
                     "", "give one: .*/metadata_eval.csv, .*/metadata_train.csv"),
    "styletts2": ({"Data/train_list.txt": "c.wav|həlˈoʊ|0\nd.wav|hˈaɪ|1\n", "Data/c.wav": "", "Data/d.wav": ""}, "",
                  "its texts are phonemes"),
    "aishell3": ({"train/content.txt": "SSB00050001.wav\t你 ni3 好 hao3\n", "train/wav/SSB0005/SSB00050001.wav": ""},
                 "", [("SSB00050001.wav", "你好")]),
    "mls": ({"train/transcripts.txt": "1_2_3\tone\n", "train/audio/1/2/1_2_3.opus": ""}, "", [("1_2_3.opus", "one")]),
    "piper": ({"metadata.csv": 'c.wav|"She said ""now"", twice."\nd.wav|"a | b"\n', "wav/c.wav": "", "wav/d.wav": ""},
              "", [("c.wav", 'She said "now", twice.'), ("d.wav", "a | b")]),
    "cosyvoice": ({"wav.scp": "u c.wav\n", "text": f"u {COSY}\n", "utt2spk": "u anna\n", "spk2utt": "anna u\n",
                   "c.wav": ""}, "", [("c.wav", COSY)]),
    "higgs gui": ({"metadata.json": json.dumps({"samples": GUI}), "train/a.wav": "", "train/a.txt": "Hi.",
                   "eval/b.wav": "", "eval/b.txt": "Ho.", "c.wav": "", "c.txt": "Hu."}, "", [("a.wav", "Hi.")]),
    "f5": ({"f5.csv": '\ufeffaudio_file|text\nc.wav|"one | two"\n', "c.wav": ""}, "f5.csv", [("c.wav", "one | two")]),
    "wav and txt": ({"wav/anna/c.wav": "", "txt/anna/c.txt": "Hi."}, "", [("c.wav", "Hi.")]),
    "subtitles": ({"c.mp3": "", "c.srt": "1\n00:00:01,500 --> 00:00:02,000\nHi,\n<i>you</i>.\n\n2\n00:01:00,0 --> "
                   "00:01:01,0\nHo.\n", "d.wav": "", "d.vtt": "WEBVTT\n\n00:00.000 --> 00:01.000 align:left\nWell.\n"},
                  "", [("c.mp3", "Hi, you."), ("c.mp3", "Ho."), ("d.wav", "Well.")]),
    "audacity": ({"c.wav": "", "c.txt": "0.000000\t3.200000\tThe ship\n\\\t80.0\t900.0\n4.500000 5.000000 Sails\n"}, "",
                 [("c.wav", "The ship"), ("c.wav", "Sails")]),
    "text of numbers": ({"c.wav": "", "c.txt": "1.5 2.5 litres\n"}, "", [("c.wav", "1.5 2.5 litres")]),
    "excel": ({"m.csv": "\ufeffaudio;text;speaker\r\nc.wav;Hi;anna\r\n", "c.wav": ""}, "m.csv", [("c.wav", "Hi")]),
    "no header": ({"m.csv": 'wav\\c.wav,"Hi, you."\nd.wav,Ho.\n', "wav/c.wav": "", "d.wav": ""}, "",
                  [("c.wav", "Hi, you."), ("d.wav", "Ho.")]),
    "another machine": ({"m.csv": "audio,text\n/data/x/c.wav,Hi.\n", "wavs/c.wav": ""}, "",
                        "wavs/c.wav is there: write paths relative to"),
    "url": ({"m.csv": "audio,text\ns3://b/c.wav,Hi.\n"}, "m.csv", "is a URL, which is not read"),
    "unknown column": ({"m.jsonl": '{"audio": "c.wav", "caption": "Hi."}\n'}, "m.jsonl",
                       "no column of text; its columns are audio, caption; .*transcript, .*--columns text=NAME"),
    "unknown header": ({"m.csv": "file,caption\nc.wav,Hi.\n"}, "m.csv", "its columns are file, caption; .*text=NAME"),
    "no texts": ({"x/c.wav": "", "x/notes.csv": "name,size\nc,1\n"}, "", "has audio, such as x/c.wav, but no list of")}


@pytest.mark.parametrize("name", SETS)
def test_sets_as_tools_write_them_are_read_or_refused_in_one_line(tmp_path, name):
    files, given, expected = SETS[name]
    for path, text in files.items():
        written(tmp_path / path, text)
    if isinstance(expected, list):
        samples, problems = read(tmp_path / given)
        assert spoken(samples) == expected and not problems
        if name in ("subtitles", "audacity"):
            cuts = [(c.offset, c.duration) for s in samples for c in s.turns[-1].clips]
            assert cuts == ([(1.5, 0.5), (60, 1), (0, 1)] if name == "subtitles" else [(0, 3.2), (4.5, 0.5)])
    else:
        with pytest.raises(UserError, match=expected):
            raise UserError(read(tmp_path / given)[1][0])


def test_columns_are_named_by_hand(folder):
    path = written(folder / "m.csv", "caption,audio,clip\nHi.,none.wav,a.wav\n")
    assert spoken(read(path, columns="audio=clip,text=caption")[0]) == [("a.wav", "Hi.")]
    for given in ("audio=clip,text=words", "audio=clip,text=caption,speaker=words"):
        with pytest.raises(UserError, match="has no column as --columns [a-z]*=words says; its columns are caption, audio"):
            read(path, columns=given)
    late = lines(folder / "late.jsonl", *({"audio": "a.wav", "text": f"Hi {i}."} for i in range(30)), {"who": "anna"})
    assert len(read(late, columns="speaker=who")[0]) == 30
    with pytest.raises(UserError, match="has no column as --columns speaker=whom says; its columns are audio, text, who"):
        read(late, columns="speaker=whom")
    table = pyarrow.table({"caption": ["Hi."], "one": [b"1"], "two": [b"2"]})
    pyarrow.parquet.write_table(table, folder / "m.parquet")
    with pytest.raises(UserError, match="has no column as --columns speaker=who says"):
        read(folder / "m.parquet", columns="audio=two,text=caption,speaker=who")
    (problem,) = read(folder / "m.parquet", columns="audio=two,text=caption")[1]
    assert "is not readable audio" in problem
    path = written(folder / "n.txt", "anna|Hi there.|a.wav\nanna|Ho there.|b.wav\n")
    (sample, _), _ = read(path, columns="audio=3,text=2,speaker=1")
    assert spoken([sample]) == [("a.wav", "Hi there.")] and sample.speaker == "anna"


def test_linked_folders_are_walked_once_and_names_are_printable(tmp_path, capsys):
    written(tmp_path / "far" / "a\x1b[31m.txt", "Hi.").with_suffix(".wav").write_bytes(b"")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "anna").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "loop").symlink_to(tmp_path / "far")
    assert len(read(tmp_path / "set")[0]) == 1
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("held_out, names", [(False, "a"), (True, "bc")])
def test_validation_rows_of_a_gui_are_validation_data(tmp_path, capsys, held_out, names):
    for path, text in SETS["higgs gui"][0].items():
        written(tmp_path / path, text)
    made = convert.to_chatml(tmp_path, tmp_path / "out.jsonl", held_out=held_out)
    assert [json.loads(line)["misc"]["sample_id"] for line in made.read_text().splitlines()] == list(names)
    assert f"; {3 - len(names)} are of another split" in capsys.readouterr().out


# -- Traps of single formats -------------------------------------------------------------------------------------------


def test_what_gui_converters_leave_out_of_the_root_is_found(folder):
    """A root metadata.json whose files stand in train/ and eval/, with the real task under another key."""
    (folder / "a.wav").rename(written(folder / "train" / "a.txt", "Hi.").with_suffix(".wav"))
    written(folder / "metadata.json", json.dumps({"samples": [{
        "id": "a", "audio_file": "a.wav", "transcript_file": "a.txt", "split": "train", "ref_audio_file": "b.wav",
        "ref_transcript": "Ho.", "task_type": "audio_generation", "training_task_type": "zero_shot_voice_cloning"}]}))
    (sample,), problems = read(folder)
    assert not problems and [turn.text for turn in sample.turns[1:]] == ["Ho.", "", "Hi.", ""]
    assert [clip.path for turn in sample.turns for clip in turn.clips] == [
        str(folder / "b.wav"), str(folder / "train" / "a.wav")]


def test_speech_to_understand_is_not_trained_as_speech(folder):
    path = lines(folder / "s.jsonl", {"messages": [{"role": "user", "content": "<audio>What was said?"},
                                                   {"role": "assistant", "content": "This."}], "audios": ["a.wav"]},
                 {"messages": [{"role": "assistant", "content": "<audio>a<audio>b"}], "audios": ["a.wav", "b.wav"]},
                 {"messages": [{"role": "assistant", "content": "Bare text."}], "audios": ["a.wav"]})
    samples, problems = read(path)
    assert spoken(samples) == [("a.wav", "Bare text.")]
    assert "speech to understand" in problems[0] and "2 <audio> and 2 audios" in problems[1]


def test_quotes_are_text_in_ljspeech_and_quotes_in_what_pandas_writes(folder):
    written(folder / "metadata.csv", 'a|"Go away!"|"Go away!"\nb|He said "no|He said "no\nc|Third|Third\n')
    assert spoken(read(folder)[0]) == [("a.wav", '"Go away!"'), ("b.wav", 'He said "no'), ("c.wav", "Third")]
    path = written(folder / "m.csv", 'audio_file|text\na.wav|"He said ""no""."\nb.wav|"odd\nc.wav|Third\n')
    assert spoken(read(path)[0]) == [("a.wav", 'He said "no".'), ("b.wav", '"odd'), ("c.wav", "Third")]
    path = written(folder / "n.csv", 'path,text\na.wav,"one, ""two""\nthree"\nb.wav,four\n')
    assert [s.turns[-2].text.split() for s in read(path)[0]] == [["one,", '"two"', "three"], ["four"]]


def test_an_end_without_a_start_cuts_from_the_beginning(folder):
    (sample,), _ = read(written(folder / "m.csv", "audio,text,end\na.wav,Hi.,0.5\n"))
    assert [(c.offset, c.duration) for c in sample.turns[-1].clips] == [(0, 0.5)]


def test_a_cut_of_no_length_is_refused(folder):
    (sample,), (problem,) = read(lines(folder / "m.jsonl", *(
        {"audio": "a.wav", "text": "Hi.", "offset": offset, "duration": 0} for offset in (0.5, None))))
    assert problem.endswith("lasts 0 s from offset 0.5 s on; without a duration the rest of the file is meant")
    assert sample.turns[-1].clips[0].duration is None       # of a whole file it is a note that says nothing


def test_columns_may_come_late_in_json_lines(folder):
    """Rows leave out what they have not: the first ones here have neither speaker nor reference."""
    rows = [{"audio": "a.wav", "text": f"Text {i}."} for i in range(30)]
    rows[25] |= {"speaker": "anna", "ref_audio": "b.wav", "ref_text": "Heard."}
    samples, problems = read(lines(folder / "m.jsonl", *rows))
    assert not problems and [s.speaker for s in samples] == [""] * 25 + ["anna"] + [""] * 4
    assert [turn.text for turn in samples[25].turns[1:]] == ["Heard.", "", "Text 25.", ""]


def test_rows_in_are_rows_kept_and_rows_refused(folder):
    path = written(folder / "m.tsv", "audio\ttext\na.wav\tOne.\nb.wav\t \ngone.wav\tTwo.\nc.wav\nd.wav\tThree.\n")
    samples, problems = read(path)
    assert [name for name, _ in spoken(samples)] == ["a.wav", "d.wav"]
    assert [(p.check, p.name.split(" ")[2]) for p in problems] == [("empty_text", "3"), ("invalid", "4"),
                                                                       ("invalid", "5")]
    assert "gone.wav' not found; tried" in problems[1] and "has 1 fields, the header has 2" in problems[2]


def test_segments_cut_recordings(folder):
    made(folder, "kaldi")
    written(folder / "segments", "u1 u1 1.5 2.25\nu2 u1 3.0 -1\n")
    samples, problems = read(folder)
    assert not problems
    assert [(c.offset, c.duration) for s in samples for c in s.turns[-1].clips] == [(1.5, 0.75), (3.0, None)]
    written(folder / "wav.scp", "u1 sph2pipe -f wav x.sph |\n")
    with pytest.raises(UserError, match="u1 is a command, which is not run"):
        read(folder)


def test_a_folder_with_audio_that_is_not_read(folder):
    for name, text in (("a.txt", "Hi."), ("b.m4a", "x"), ("b.txt", "Ho."), ("._c.wav", "junk")):
        written(folder / "in" / name, text)
    (folder / "a.wav").rename(folder / "in" / "a.wav")
    (folder / "c.wav").rename(folder / "in" / "21.15-26.44.wav")
    (folder / "d.wav").rename(folder / "in" / "d.wav")
    written(folder / "in" / "21.15-26.44.lab", "Dots.")
    samples, problems = read(folder / "in")
    assert spoken(samples) == [("21.15-26.44.wav", "Dots."), ("a.wav", "Hi.")]
    assert [(p.check, p.what) for p in problems] == [
        ("unreadable", "m4a is not read; convert it: ffmpeg -i b.m4a b.flac"),
        ("empty_text", "has no text beside it (d.txt, d.normalized.txt, d.lab)")]


PHONEMES = "a.wav|əlˈoʊ|0\nb.wav|hˈaɪ|1\n".encode()
NO_DATA = [     # (file, what is in it, what is said)
    ("m.csv", "audio,text\na.wav,Größe\n".encode("cp1252"), "line 2.; convert it: iconv -f CP1252"),
    ("m.csv", "audio,text\na.wav,x\n".encode("utf-16"), "iconv -f UTF-16"),
    ("m.csv", b"PK\x03\x04xlsx", "save an Excel table as CSV"),
    ("m.csv", b'audio,text\na.wav,One.\nb.wav,"Two\nc.wav,Three.\nd.wav,"Four"\n', "row that begins at line 3"),
    ("m.csv", b'audio,text\na.wav,One.\nb.wav,"Two.\n' + b"c.wav,Three and so on.\n" * 9000, "row that begins at line 3"),
    ("x.txt", PHONEMES, "phonemes"), ("x.txt", b"a|x|y|z\n", "not certain: 1 'a', 2 'x', 3 'y', 4 'z'; name them"),
    ("x.txt", b"gone|x\n", "names no audio files: 'gone' is not there"),
    ("x.txt", b"hello\nworld\n", "is not a table that is known"), ("x.txt", b"a|x\nb|y|z\n", "is not a table that is known"),
    ("x.txt", b"", "is empty"), ("x.txt", b"\x1f\x8b", "is compressed")]


@pytest.mark.parametrize("name, data, said", NO_DATA)
def test_what_is_no_data_is_refused(folder, name, data, said):
    """With the remedy; a quote that nothing closes swallows no lines."""
    (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=said):
        read(folder / name)


def test_several_lists_are_named(folder):
    made(folder, "kaldi")
    assert spoken(read(folder)[0]) == [("a.wav", "This is a."), ("b.wav", "This is b.")]
    (folder / "wav.scp").unlink()
    made(folder, "ljspeech"), made(folder, "piper")
    with pytest.raises(UserError, match="holds 2 lists; give one: "):
        read(folder)


# -- What is not what it seems -------------------------------------------------------------------------------------


SAID = ["The ship sails at noon.", "Nobody was at home.", "Bring me the red book.", "It rained all day."]
IPA_SAID = ["ðə ʃˈɪp sˈeɪlz æt nˈuːn", "nˈoʊbɑːdi wʌz æt hˈoʊm", "bɹˈɪŋ miː ðə ɹˈɛd bˈʊk", "ɪt ɹˈeɪnd ˈɔːl dˈeɪ"]


def table(rows, separator="|"):
    return "".join(separator.join((f"{name}.wav", *map(str, fields))) + "\n" for name, fields in zip("abcd", rows))


UNDECIDED = {       # tables without a header whose columns nobody can tell: {who writes it: lines}
    "styletts2 with words": table(zip(SAID, "0101")), "tensorflowtts": table(zip(SAID, ["anna", "ben", "anna", "ben"])),
    "mellotron": table(zip(SAID, (1069, 40, 1069, 40))), "emotions": table(zip(SAID, ["sad", "calm", "sad", "sad"])),
    "seconds": table(zip(SAID, (1.25, 2.5, 0.75, 3))), "lengths": table(zip(SAID, (41, 33, 30, 27))),
    "a language, a name": table((said, "en", "anna") for said in SAID),
    "csv with a speaker": table(zip(SAID, ["anna", "ben"] * 2), ","),
    "durations": table(zip((1.2, 3.4, 2.25, 0.5)), ","), "speakers": table(zip(["anna", "ben"] * 2)),
    "languages": table(zip(["en", "de", "en", "en"])),
    "texts of two kinds": table(zip(SAID, SAID[::-1])), "words and texts": table(zip(["a day", "home", "red", "sea"], SAID))}
PHONEMIC = {"piper": table(zip(SAID, IPA_SAID)), "vits, cleaned": table(zip(IPA_SAID)),
            "styletts2": table(zip(IPA_SAID, "0101")), "with a header": "audio|text\n" + table(zip(IPA_SAID))}


@pytest.mark.parametrize("name", UNDECIDED)
def test_a_text_column_is_never_guessed(folder, name):
    """Each trained "0.", "anna." or the seconds before, with `dry run ok`."""
    path = written(folder / "list.csv", UNDECIDED[name])
    with pytest.raises(UserError, match=r"what its fields mean is not certain: 1 'a.wav', .*--columns audio=1,text=2"):
        read(path)
    with pytest.raises(UserError, match="not certain"):
        read(folder)        # nor are they passed over for another format
    if name not in ("durations", "speakers", "languages", "words and texts"):
        assert [text for _, text in spoken(read(path, columns="audio=1,text=2")[0])] == SAID


@pytest.mark.parametrize("name", PHONEMIC)
def test_phonemes_are_refused_in_every_format(folder, name):
    with pytest.raises(UserError, match="its texts are phonemes, such as"):
        read(written(folder / "list.csv", PHONEMIC[name]))


def test_texts_that_are_mostly_equal_stop(folder):
    path = written(folder / "m.csv", "audio,text\n" + "".join(f"{name}.wav,{text}\n" for name, text in zip(
        "abcdabcd", ["neutral", "neutral", "happy", "neutral"] * 2)))
    with pytest.raises(UserError, match="6 of 8 texts are equal, 'neutral': .*--columns text=NAME"):
        read(path)


def test_near_equal_prose_is_ljspeech(folder):
    path = written(folder / "list.csv", table((said, said.replace("red", "scarlet")) for said in SAID))
    assert [text for _, text in spoken(read(path)[0])] == [said.replace("red", "scarlet") for said in SAID]


ODD_TEXTS = ["(laughs) Well then.", "<laugh> Well.", "[breath] Well.", "*gasps* Well.", "anna: Well then.", "Tom &amp; Ann.",
             '<break time="1s"/> Well.', "GrÃ¶ÃŸe.", "Well\x00 then.", "a < b and c > d", "Plain text."]


def test_rubbish_is_counted_and_nothing_is_no_text(folder, capsys):
    path = lines(folder / "m.jsonl", *({"audio": "a.wav", "text": text} for text in (*ODD_TEXTS, "nan", "None", "<NA>", None)))
    samples, problems = read(path)
    assert [p.check for p in problems] == ["empty_text"] * 4 and len(samples) == len(ODD_TEXTS)
    out = capsys.readouterr().out
    for n, what in ((5, "hold marks of sounds"), (1, "begin with a name"), (1, "hold HTML entities"), (1, "wrong encoding"),
                    (1, "hold control characters")):
        assert f"           {n} text{'s' * (n > 1)} {what}" in out or f"{n} text" in out and what in out, (n, what, out)


def test_audio_from_outside_the_folder_is_counted(folder, capsys):
    (folder / "in").mkdir()
    (folder / "0.wav").write_bytes(b"of another corpus")
    read(written(folder / "in" / "m.csv", "audio,text\n0.wav,Hi.\n"))
    assert "1 row name audio that is not below the folder of the list, such as" in capsys.readouterr().out


def test_kaldi_utterances_without_text_are_counted(folder):
    made(folder, "kaldi")
    written(folder / "wav.scp", "u1 a.wav\nu2 b.wav\nu3 c.wav\n")
    _, (problem,) = read(folder)
    assert problem.check == "empty_text" and "u3 has no line in text" in problem


def test_one_missing_row_is_named_by_its_own_line(folder):
    rows = "".join(f"{'gone' if i == 1 else 'abcd'[i % 4]}.wav|This is {i}.\n" for i in range(12))
    samples, (problem,) = read(written(folder / "list.csv", rows))
    assert len(samples) == 11 and "list.csv line 2 " in problem and "gone.wav' not found" in problem
    (sample,), _ = read(written(folder / "q.csv", 'audio, text\na.wav, "Hi, you."\n'))
    assert sample.turns[-2].text == "Hi, you."
    _, (problem,) = read(written(folder / "w.csv", "audio,text\nD:\\\\set\\\\gone.wav,Hi.\n"))
    assert "write paths relative to" in problem or "relative" in problem


def cuts(folder):
    return [(s.turns[-2].text, c.offset, c.duration) for s in read(folder)[0] for c in s.turns[-1].clips]


ONE = "1\n00:00:01,000 --> 00:00:02,000\n"
SUBTITLES = {       # {what: (text of talk.srt, [(words, offset, seconds)], checks)}
    "no blank lines": (ONE + "One.\n2\n00:00:02,000 --> 00:00:03,000\nTwo.\n3\n00:00:03,000 --> 00:00:04,000\nThree.\n",
                       [("One.", 1, 1), ("Two.", 2, 1), ("Three.", 3, 1)], []),
    "blank line inside": (ONE + "One,\n\nand more.\n\n2\n00:00:02,000 --> 00:00:03,000\nTwo.\n",
                          [("One, and more.", 1, 1), ("Two.", 2, 1)], []),
    "damaged arrow": (ONE + "One.\n\n2\n00:00:02,000 -> 00:00:03,000\nTwo.\n", [("One.", 1, 1)], ["invalid"]),
    "less than": (ONE + "a < b and c > d\n", [("a < b and c > d", 1, 1)], []),
    "entities and places": (ONE + "{\\an8}<i>Tom</i> &amp; Ann\n", [("Tom & Ann", 1, 1)], []),
    "rolling": (ONE + "One\ntwo\n\n2\n00:00:02,000 --> 00:00:03,000\ntwo\nthree\n", [("One two", 1, 1), ("three", 2, 1)], []),
    "music": (ONE + "♪ la la ♪\n\n2\n00:00:02,000 --> 00:00:03,000\nTwo.\n", [("Two.", 2, 1)], ["empty_text"])}


@pytest.mark.parametrize("name", SUBTITLES)
def test_subtitles_as_they_come(tmp_path, name):
    text, expected, checks = SUBTITLES[name]
    written(tmp_path / "talk.srt", text)
    (tmp_path / "talk.wav").write_bytes(b"audio")
    samples, problems = read(tmp_path)
    assert cuts(tmp_path) == expected and [p.check for p in problems] == checks
    assert "talk.srt entry" in samples[0].name and all("talk.srt entry" in problem for problem in problems)


WHISPER = {"talk.en.srt": ONE + "Hi there.\n", "talk.wav.srt": ONE + "Hi there.\n",
           "talk.tsv": "start\tend\ttext\n1000\t2000\tHi there.\n",
           "talk.json": json.dumps({"text": "Hi there.", "segments": [{"start": 1.0, "end": 2.0, "text": " Hi there."}]}),
           "talk.txt": "1.000000\t2.000000\tHi there.\n"}


@pytest.mark.parametrize("name", WHISPER)
def test_what_recognisers_write_beside_a_recording_is_read(tmp_path, name):
    written(tmp_path / name, WHISPER[name])
    (tmp_path / "talk.wav").write_bytes(b"audio")
    assert cuts(tmp_path) == [("Hi there.", 1, 1)]


def test_what_is_near_is_read_or_named(tmp_path, folder):
    libri = tmp_path / "libri" / "19" / "198"
    written(libri / "19-198.trans.txt", "19-198-0000 THE SHIP\n19-198-0001 SAILS\n")
    for i in (0, 1):
        (libri / f"19-198-000{i}.flac").write_bytes(b"audio")
    assert [(text, s.speaker) for s in read(tmp_path / "libri")[0] for _, text in spoken([s])] == [("THE SHIP", "19"), ("SAILS", "19")]
    upper = tmp_path / "upper"
    written(upper / "0.TXT", "Hi.")
    (upper / "0.WAV").write_bytes(b"audio")
    assert spoken(read(upper)[0]) == [("0.WAV", "Hi.")]
    assert spoken(read(written(upper / "m" / "m.csv", "audio,text\n../0.wav,Hi.\n"))[0]) == [("0.WAV", "Hi.")]
    for name, files, said in (("f5", ("raw.arrow",), "F5-TTS's prepared folder"), ("grid", ("talk.TextGrid", "talk.wav"), "save it as .srt")):
        for file in files:
            written(tmp_path / name / file, "x")
        with pytest.raises(UserError, match=said):
            problems = read(tmp_path / name)[1]
            raise UserError(problems[0])


def test_parquet_with_arrays_and_paths(tmp_path):
    clip = (0.3 * np.sin(np.arange(8000) / 20)).astype(np.float32)
    (tmp_path / "b.wav").write_bytes(b"audio")
    for name, audio in (("arrays", {"array": clip.tolist(), "sampling_rate": 16000}), ("paths", {"path": "b.wav"})):
        pyarrow.parquet.write_table(pyarrow.table({"audio": [audio], "text": ["Hi."]}), tmp_path / f"{name}.parquet")
    (sample,), _ = read(tmp_path / "arrays.parquet")
    found = sample.turns[-1].clips[0]
    assert len(decode_audio(found.path, [(found.offset, found.duration)])[1][0]) == 12000
    assert spoken(read(tmp_path / "paths.parquet")[0]) == [("b.wav", "Hi.")]


def test_audio_is_unpacked_once(tmp_path, capsys):
    """A restart finds the same files untouched, so that their codes are known without reading them."""
    parquet_of(tmp_path / "a.parquet", waves(3) | {"bad.wav": b"RIFFxx"}, "struct")
    found, problems = [], [[], [], []]
    for at in range(3):
        if at == 2:
            parquet_of(tmp_path / "a.parquet", waves(2), "struct")
        made = convert.to_chatml(tmp_path / "a.parquet", tmp_path / "out.jsonl", problems=problems[at])
        found.append([(path.name, path.stat().st_mtime_ns) for path in sorted((tmp_path / "out.audio").iterdir())])
    assert found[0] == found[1] != found[2] and len(made.read_text().splitlines()) == 2
    assert problems[0] == problems[1] and len(problems[0]) == 1 and not problems[2]
    assert capsys.readouterr().out.count("as before") == 1


def test_the_script(folder):
    """Rows, reasons, the first sample and the file; one line for what it cannot read."""
    path = written(folder / "m.csv", "audio,text,speaker,language,split\na.wav,Hi.,anna,en,train\nb.wav,,anna,en,\nc.wav,Ho.,x,en,test\n")

    def run(*words):
        return subprocess.run([sys.executable, ROOT / "speech" / "convert.py", *map(str, words)], capture_output=True, text=True)
    done = run(path, "--output", folder / "out.jsonl")
    assert done.returncode == 0 and "2 rows = 1 kept + 1 refused (1 empty_text)" in done.stdout, done.stderr
    assert "1 are of another split" in done.stdout and "m.csv line 3 (b.wav): its text is empty" in done.stdout
    assert f"first: text 'Hi.', audio {folder / 'a.wav'}, speaker anna, language en" in done.stdout
    (entry,) = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    assert entry["messages"][-1]["content"]["audio_url"] == str(folder / "a.wav") and entry["split"] == "train"
    assert (entry["speaker"], entry["language"]) == ("anna", "en")
    watch = ("import runpy, sys\nsys.argv = ['convert.py', '--help']\ntry:\n    runpy.run_path('speech/convert.py', run_name="
             "'__main__')\nexcept SystemExit:\n    print({'torch', 'numpy'} & set(sys.modules))")
    asked = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, cwd=ROOT).stdout
    assert "--columns" in asked and asked.endswith("\nset()\n")
    done = run(written(folder / "x.csv", UNDECIDED["seconds"]), "--output", folder / "no.jsonl")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and not (folder / "no.jsonl").exists()


# -- Several speakers --------------------------------------------------------------------------------------------------


def test_dialogue_has_bosons_scene_and_speaker_lines(folder):
    path = lines(folder / "m.jsonl", {"audio": "b.wav", "text": "[SPEAKER0] Alone."},
                 {"audio": "a.wav", "text": "[SPEAKER0] Hi.\n[SPEAKER1] Ho.", "scene": "a_room"})
    (one, two), _ = read(path)       # the text decides, not the task type
    assert two.turns[0].text == (MULTISPEAKER_SYSTEM + "\n\n<|scene_desc_start|>\nAudio is recorded from a room.\n\n"
                                 "SPEAKER0: feminine\nSPEAKER1: masculine\n<|scene_desc_end|>")
    assert one.turns[0].text == "Generate audio following instruction."
    assert read(path, task_type="multi_speaker_smart_voice")[0][1].turns[0] == two.turns[0]
    chat = lines(folder / "chat.jsonl", {"messages": [
        {"role": "user", "content": "[SPEAKER0] Hi.\n[SPEAKER1] Ho."},
        {"role": "assistant", "content": {"type": "audio", "audio_url": "a.wav"}}], "scene": "Audio is recorded from a room."})
    spoken_later = text_prompts([("x", "[SPEAKER0] Hi.\n[SPEAKER1] Ho.")], False, scene="Audio is recorded from a room.")
    assert spoken_later[0].turns[0].text == two.turns[0].text
    assert read(chat)[0][0].turns[0].text.split() == two.turns[0].text.split()
    turns = [{"role": "user", "content": "Said."}, {"role": "assistant", "content": {"type": "audio", "audio_url": "b.wav"}},
             {"role": "user", "content": "[SPEAKER0] Hi.\n[SPEAKER1] Ho."},
             {"role": "assistant", "content": {"type": "audio", "audio_url": "a.wav"}}]
    trained, whole, bare = (list(read_samples(lines(folder / "c.jsonl", {"messages": messages}), [], make)) for
                            messages, make in ((turns, canonical_sample), (turns, canonical_prompt), (turns[:3], canonical_prompt)))
    assert {sample.turns[0].text for sample, in (trained, whole, bare)} == {"Generate audio following instruction."}
    cloned, = text_prompts([("x", "[SPEAKER0] Hi.\n[SPEAKER1] Ho.")], False, str(folder / "a.wav"), "Said.")
    assert cloned.turns[0].text == "Generate audio following instruction."      # boson's way, where a clip gives the voice


def test_vibevoice_speakers_are_numbered_by_first_appearance(folder):
    path = lines(folder / "v.jsonl", {"text": "Speaker 2: Hi.\nSpeaker 1: Ho.\nSpeaker 2: Well.", "audio": "a.wav",
                                      "voice_prompts": ["b.wav", "c.wav"]},
                 {"text": "Speaker 1: Alone.", "audio": "b.wav", "voice_prompts": "c.wav"})
    samples, problems = read(path)
    assert not problems
    assert [text for _, text in spoken(samples)] == ["[SPEAKER0] Hi.\n[SPEAKER1] Ho.\n[SPEAKER0] Well.", "Alone."]
    assert [s.notes[0][0] for s in samples] == ["no_reference_text"] * 2


# -- References --------------------------------------------------------------------------------------------------------


@pytest.fixture
def speakers(folder):
    """A manifest of four clips of anna, one of ben, one of nobody."""
    rows = [{"audio": f"wavs/{n}.wav", "text": f"Wavs {n}.", "speaker": "anna"} for n in "abcd"]
    return lines(folder / "m.jsonl", *rows, {"audio": "a.wav", "text": "Ben.", "speaker": "ben"},
                 {"audio": "b.wav", "text": "Nobody."})


def references(samples):
    return {s.turns[-2].text: s.turns[1].text if len(s.turns) > 3 else None for s in samples}


def test_references_are_other_clips_of_the_speaker_whoever_reads(speakers):
    samples, _ = read(speakers, reference="same_speaker")
    found = references(samples)
    assert found["Ben."] is found["Nobody."] is None
    assert [s.notes[0][0] for s in samples[4:]] == ["no_second_clip"] * 2 and not any(s.notes for s in samples[:4])
    for n in "abcd":
        assert found[f"Wavs {n}."] in {f"Wavs {m}." for m in "abcd"} - {f"Wavs {n}."}
    for sample in samples[:4]:
        _, reference, target = [turn.clips[0].path[-5] if turn.clips else "" for turn in sample.turns][::2]
        assert sample.turns[1].text == f"Wavs {sample.turns[2].clips[0].path[-5]}." and reference != target
    rows = speakers.read_text().splitlines(keepends=True)
    speakers.write_text("".join(reversed(rows)))
    assert references(read(speakers, reference="same_speaker")[0]) == found
    drawn = [references(read(speakers, reference="same_speaker", seed=seed)[0]) for seed in range(8)]
    assert any(other != found for other in drawn)


def test_chatml_that_keeps_its_own_references_says_so(folder, capsys):
    path = lines(folder / "c.jsonl", {"messages": [{"role": "user", "content": "Hi."}, {
        "role": "assistant", "content": {"type": "audio", "audio_url": "a.wav"}}]})
    assert len(read(path)[0]) == 1 and not capsys.readouterr().out
    assert len(read(path, reference="none", ref_in_system=True)[0]) == 1
    assert "in which --ref_audio_in_system_message, --reference changes nothing" in capsys.readouterr().out


def test_shares_and_references_that_are_given(folder):
    path = lines(folder / "m.jsonl", *({"audio": "a.wav", "text": f"T{i}.", "ref_audio": "b.wav", "ref_text": "Ref.",
                                        "offset": i, "duration": 1} for i in range(200)))
    assert set(references(read(path)[0]).values()) == {"Ref."}
    assert set(references(read(path, reference="none")[0]).values()) == {None}
    few, more = (references(read(path, reference_share=share)[0]) for share in (0.2, 0.5))
    kept = [{text for text, ref in found.items() if ref} for found in (few, more)]
    assert kept[0] < kept[1] and 20 < len(kept[0]) < 60 and 75 < len(kept[1]) < 125


def test_tts_3_clones_a_clip_whose_words_are_not_known(folder):
    """A manifest's row and a text to speak give the sequence that the servers have for it, and nothing is left out."""
    path = lines(folder / "m.jsonl", {"audio": "a.wav", "text": "Ho.", "ref_audio": "c.wav"})
    ids = labels_v3.Ids(tts=1, text=2, audio=3, ref_audio=4, ref_text=5)
    (row,), problems = read(path, lone_reference=True)
    asked, = text_prompts([("x", "Ho.")], False, str(folder / "c.wav"))
    asked.turns[-1].trained = True
    assert not problems and not row.notes
    for sample in (row, asked):
        ((_, pieces),), _ = ids.streams(sample)
        assert [p if isinstance(p, str) else Path(p.path).stem for p, _ in pieces[:-1]] == [
            "<|tts|>", "<|ref_audio|>", "c", "<|text|>", "Ho.", "<|audio|>"]


def test_the_text_of_a_reference_may_stand_beside_it(folder):
    path = lines(folder / "m.jsonl", {"audio": "a.wav", "text": "Hi.", "ref_audio": "b.wav"},
                 {"audio": "a.wav", "text": "Ho.", "ref_audio": "c.wav"})
    written(folder / "b.txt", "From beside.")
    samples, _ = read(path)
    assert not samples[0].notes and references(samples) == {"Hi.": "From beside.", "Ho.": None} and samples[1].notes[0][0] == "no_reference_text"


# -- Audio inside other files ------------------------------------------------------------------------------------------


def waves(n):
    """{name: bytes of a wav file}, each of another pitch."""
    found = {}
    for i in range(n):
        file = io.BytesIO()
        soundfile.write(file, 0.3 * np.sin(2 * np.pi * (200 + 20 * i) * np.arange(8000) / 16000), 16000, format="WAV")
        found[f"c{i}.wav"] = file.getvalue()
    return found


def parquet_of(path, clips, kind, rows=3):
    """As datasets.push_to_hub and CosyVoice write them, in row groups; kind: of the audio column."""
    audio = {"struct": pyarrow.array([{"bytes": data, "path": name} for name, data in clips.items()]),
             "bytes": pyarrow.array(list(clips.values())), "path": pyarrow.array(list(clips)),
             "no bytes": pyarrow.array([{"bytes": None, "path": name} for name in clips], pyarrow.struct(
                 {"bytes": pyarrow.binary(), "path": pyarrow.string()}))}[kind]
    table = pyarrow.table({"audio" if kind != "bytes" else "audio_data": audio, "speaker_id": ["anna"] * len(clips),
                           "text": [f"This is {name}." for name in clips]})
    if path.suffix == ".arrow":
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    else:
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def tar_of(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def tar_members(clips):
    found = {}
    for name, data in clips.items():
        found |= {name: data, name.replace(".wav", ".json"): json.dumps(
            {"text": f" This is {name}.", "speaker": "anna"}).encode()}
    return found


def assert_sounds(sample, data):
    """The clip of a sample is the sound in the bytes of a file, to half a step of 16 bits."""
    clip = sample.turns[-1].clips[0]
    wave = decode_audio(clip.path, [(clip.offset, clip.duration)])[1][0]
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        file.write(data)
        file.flush()
        theirs = decode_audio(file.name, [(None, None)])[1][0]
    assert len(wave) == len(theirs) == 12000 and np.abs(wave - theirs).max() < 1e-4


@pytest.mark.parametrize("kind", ["struct", "bytes", "path", "no bytes", "stream", "named tar", "tar"])
def test_clips_inside_other_files_decode_to_their_own_sound(tmp_path, kind):
    clips = waves(8)
    if kind == "tar":
        first, second = dict(list(clips.items())[:5]), dict(list(clips.items())[5:])
        tar_of(tmp_path / "s-0.tar", tar_members(first)), tar_of(tmp_path / "s-1.tar", tar_members(second))
        source = tmp_path / "s-*.tar"
    else:
        for name, data in clips.items() if kind in ("path", "no bytes") else ():
            (tmp_path / name).write_bytes(data)
        ending = {"stream": "arrow", "named tar": "tar"}.get(kind, "parquet")
        column = kind if kind in ("bytes", "path", "no bytes") else "struct"
        source = parquet_of(tmp_path / f"a.{ending}", clips, column)
    samples, problems = read(source)
    assert not problems
    assert [s.turns[-2].text for s in samples] == [f"This is {name}." for name in clips]
    assert {s.speaker for s in samples} == {"anna"}
    for sample, data in reversed(list(zip(samples, clips.values()))):
        assert_sounds(sample, data)
    assert {bool(sample.turns[-1].clips[0].path.endswith(".flac")) for sample in samples} == {kind not in ("path", "no bytes")}


def test_some_rows_have_their_audio_inside_others_beside(tmp_path):
    """Each row says it for itself, in a folder whose name holds what else stands before a clip's place in its file."""
    clips, folder = waves(5), tmp_path / "a::b"
    folder.mkdir()
    audio = [{"bytes": data if i in (0, 3) else None, "path": name} for i, (name, data) in enumerate(clips.items())]
    for name, data in clips.items():
        (folder / name).write_bytes(data if name != "c0.wav" else b"another")
    table = pyarrow.table({"audio": audio, "text": [f"Hi {name}." for name in clips]})
    pyarrow.parquet.write_table(table, folder / "p.parquet", row_group_size=4)
    with pyarrow.ipc.new_file(folder / "f.arrow", table.schema) as writer:
        writer.write_table(table)
    for source in (folder / "p.parquet", folder / "f.arrow"):
        samples, problems = read(source)
        assert not problems and len(samples) == 5
        for sample, data in zip(samples, clips.values()):
            assert_sounds(sample, data)


def test_tars_with_dots_in_names_and_without_texts(tmp_path):
    clips = waves(4)
    members = {f"x/21.{i}.wav": data for i, data in enumerate(clips.values())}
    members = dict(sorted((members | {f"x/21.{i}.txt": b"Dots." for i in range(3)} | {"x/._21.wav": b"junk"}).items()))
    samples, problems = read(tar_of(tmp_path / "a.tar", members))
    assert [s.turns[-2].text for s in samples] == ["Dots."] * 3 and [p.check for p in problems] == ["empty_text"]
    for sample, data in zip(samples, clips.values()):
        assert_sounds(sample, data)
    with open(tmp_path / "a.tar", "r+b") as file:
        file.truncate(20000)
    with pytest.raises(UserError, match="cannot be read as a tar"):
        read(tmp_path / "a.tar")


def test_folders_of_shards(tmp_path):
    clips = waves(4)
    (tmp_path / "data").mkdir()
    parquet_of(tmp_path / "data" / "train-00000-of-00001.parquet", clips, "struct")
    assert len(read(tmp_path)[0]) == 4
    parquet_of(tmp_path / "data" / "test-00000-of-00001.parquet", clips, "struct")
    with pytest.raises(UserError, match=r"holds 2 lists; give one: .*/data/test-\*.parquet, .*/data/train-\*.parquet"):
        read(tmp_path)
    assert len(read(tmp_path / "data" / "train-*.parquet")[0]) == 4
    saved = tmp_path / "saved"
    saved.mkdir()
    parquet_of(saved / "data-00000-of-00001.arrow", clips, "struct")
    written(saved / "dataset_info.json", "{}")
    written(saved / "state.json", json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    samples, _ = read(saved)
    assert len(samples) == 4
    written(tmp_path / "both" / "dataset_dict.json", '{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="holds the splits train, test; give one: .*/both/train"):
        read(tmp_path / "both")
    pyarrow.parquet.write_table(pyarrow.table({"audio": ["a"], "x": [1]}), tmp_path / "n.parquet")
    with pytest.raises(UserError, match="has no column of text; its columns are audio, x"):
        read(tmp_path / "n.parquet")


def test_texts_that_are_too_long(tmp_path):
    """A text of 65 MiB would end in the tokenizer."""
    clips = waves(1)
    (tmp_path / "a.wav").write_bytes(next(iter(clips.values())))
    tar_of(tmp_path / "s.tar", {"a.wav": (tmp_path / "a.wav").read_bytes(), "a.txt": b"ha " * (65 * 2**20 // 3)})
    samples, problems = read(tmp_path / "s.tar")
    assert not samples and len(problems) == 1 and "a.txt is longer than 64 MiB" in problems[0]
    (tmp_path / "in").mkdir()
    (tmp_path / "a.wav").rename(tmp_path / "in" / "a.wav")
    (tmp_path / "in" / "a.txt").write_bytes(b"ha " * (65 * 2**20 // 3))
    samples, problems = read(tmp_path / "in")
    assert not samples and len(problems) == 1 and "its text is longer than 64 MiB" in problems[0]
