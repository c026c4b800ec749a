"""Every format is told from its neighbours by its content, and its rows become the samples that they are."""
import io
import json
import resource
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile

from core.cli import UserError
from speech import convert, v3
from speech.conversations import MULTISPEAKER_SYSTEM
from speech.dataset import read_samples
from speech.speak import text_prompts
from tests.helpers.spoken import decode_audio
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


def jsonl(*entries):
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def lines(path, *entries):
    return written(path, jsonl(*entries))


# as JimmyMa99's converter writes it: "audio_generation", and the placeholder still in the transcripts
JIMMYS = {"duration": 1.2, "speaker_id": "spk", "scene": "quiet_room", "language": "zh", "original_audio_path": "/x.mp3",
          "user_instruction": None, "task_type": "audio_generation"}
FORMATS = {
    "jimmys": ({f"{n}.txt": f"<audio>This is {n}." for n in "ab"} | {"metadata.json": json.dumps({"samples": [
        {"id": f"spk_{n}", "audio_file": f"{n}.wav", "transcript_file": f"{n}.txt", **JIMMYS} for n in "ab"]})}, ""),
    "swift": ({"m.jsonl": jsonl(*({"messages": [{"role": "assistant", "content": f"<audio>This is {n}."}],
                                   "audios": [f"FOLDER/{n}.wav"]} for n in "ab"))}, "m.jsonl"),
    "manifest": ({"m.jsonl": jsonl(*({"audio": f"{n}.wav", "text": f"This is {n}."} for n in "ab"))}, "m.jsonl"),
    "excel": ({"m.csv": "\ufeffwav,sentence,client_id\r\na.wav,This is a.,anna\r\nb.wav,This is b.,ben\r\n"},
              "m.csv"),
    "ljspeech": ({"metadata.csv": "a|This is a.|This is a.\nb|This is b.|\n"}, ""),
    "vits": ({"train.list": "wavs/a.wav|anna|EN|This is a.\nwavs/b.wav|anna|EN|This is b.\n"}, "train.list"),
    "kaldi": ({"wav.scp": "u1 FOLDER/a.wav\nu2 b.wav\n", "utt2spk": "u1 anna\nu2 ben\n",
                        "text": "u1 This is a.\nu2 This is b.\n"}, ""),
    "sidecar": ({f"data/{n}/{n}{end}": f"This is {n}.\n" for n in "ab" for end in (".txt", ".wav")}, "data")}
SPEAKERS = {"excel": ["anna", "ben"], "kaldi": ["anna", "ben"], "vits": ["anna", "anna"], "sidecar": ["a", "b"]}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_found_and_read(folder, name):
    files, given = FORMATS[name]
    for path, text in files.items():
        written(folder / path, text.replace("FOLDER", str(folder)))
    samples, problems = read(folder / given)
    assert not problems
    assert spoken(samples) == [("a.wav", "This is a."), ("b.wav", "This is b.")]
    assert [s.speaker for s in samples] == SPEAKERS.get(name) or name not in SPEAKERS
    assert {s.language for s in samples} == {"EN"} or name != "vits"


GIGASPEECH = {"language": "EN", "audios": [{"aid": "A", "path": "audio/A.opus", "segments": [
    {"sid": "A1", "speaker": "N/A", "begin_time": 1.5, "end_time": 2, "text_tn": "YES <COMMA> NO <PERIOD>"},
    {"sid": "A2", "speaker": "P7", "begin_time": 2, "end_time": 3, "text_tn": "<MUSIC>"},
    {"sid": "A3", "speaker": "P7", "begin_time": 3, "end_time": 4, "text_tn": "WELL <QUESTIONMARK>"}]}]}
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
    "sidecar": ({"19/198/19_198_000.wav": "", "19/198/19_198_000.normalized.txt": "Hi.", "19/198/._a.wav": "",
                 "19/198/19_198_000.original.txt": "hi", "19/198/19_198.trans.tsv": "x"},        # LibriTTS
                [("19_198_000.wav", "Hi.", "19")], []),
    "librispeech": ({"19/198/19-198.trans.txt": "19-198-0000 THE SHIP\n19-198-0001 SAILS\n", "19/198/19-198-0000.flac": "",
                     "19/198/19-198-0001.flac": ""},
                    [("19-198-0000.flac", "THE SHIP", "19"), ("19-198-0001.flac", "SAILS", "19")], [])}


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
SETS = {
    "common voice": ({"train.tsv": "client_id\tpath\tsentence\nx\tc1.mp3\t\"Hi\" he said.\n", "clips/c1.mp3": "",
                      "reported.tsv": "sentence\treason\nHi.\tx\n"}, "", [("c1.mp3", '"Hi" he said.')]),
    "audiofolder, splits": ({f"{split}/metadata.csv": "file_name,text\nc.wav,Hi.\n" for split in ("train", "test")} | {
        "train/c.wav": ""}, "", "give one: .*/test/metadata.csv, .*/train/metadata.csv"),
    "emilia": ({"EN/EN_B0.jsonl": '{"id": "x", "wav": "EN_B0/S0/mp3/x.mp3", "text": " Hi.", "speaker": "s"}\n',
                "EN/EN_B0/S0/mp3/x.mp3": ""}, "", [("x.mp3", "Hi.")]),
    "piper": ({"metadata.csv": 'c.wav|"She said ""now"", twice."\nd.wav|"a | b"\n', "wav/c.wav": "", "wav/d.wav": ""},
              "", [("c.wav", 'She said "now", twice.'), ("d.wav", "a | b")]),
    "higgs gui": ({"metadata.json": json.dumps({"samples": GUI}), "train/a.wav": "", "train/a.txt": "Hi.",
                   "eval/b.wav": "", "eval/b.txt": "Ho.", "c.wav": "", "c.txt": "Hu."}, "", [("a.wav", "Hi.")]),
    "audacity": ({"c.wav": "", "c.txt": "0.000000\t3.200000\tThe ship\n\\\t80.0\t900.0\n4.500000 5.000000 Sails\n"}, "",
                 [("c.wav", "The ship"), ("c.wav", "Sails")]),
    "no header": ({"m.csv": 'wav\\c.wav,"Hi, you."\nd.wav,Ho.\n', "wav/c.wav": "", "d.wav": ""}, "",
                  [("c.wav", "Hi, you."), ("d.wav", "Ho.")]),
    "another machine": ({"m.csv": "audio,text\n/data/x/c.wav,Hi.\n", "wavs/c.wav": ""}, "",
                        "; write paths relative to"),
    "unknown column": ({"m.jsonl": '{"audio": "c.wav", "caption": "Hi."}\n'}, "m.jsonl",
                       "no column of text; its columns are audio, caption; .*transcript, .*--columns text=NAME"),
    "nothing": ({"x/read.md": ""}, "", "has neither a list nor audio files"),
    "f5": ({"raw.arrow": "x"}, "", "F5-TTS's prepared folder"), "grid": ({"talk.TextGrid": "", "talk.wav": ""}, "", "talk.srt"),
    "no texts": ({"x/c.wav": "", "x/notes.csv": "name,size\nc,1\n"}, "", "has audio, such as x/c.wav, but no list of")}


@pytest.mark.parametrize("name", SETS)
def test_sets_as_tools_write_them_are_read_or_refused_in_one_line(tmp_path, name):
    files, given, expected = SETS[name]
    for path, text in files.items():
        written(tmp_path / path, text)
    if isinstance(expected, list):
        samples, problems = read(tmp_path / given)
        assert spoken(samples) == expected and not problems
        if name == "audacity":
            cuts = [(c.offset, c.duration) for s in samples for c in s.turns[-1].clips]
            assert cuts == [(0, 3.2), (4.5, 0.5)]
    else:
        with pytest.raises(UserError, match=expected):
            raise UserError(read(tmp_path / given)[1][0])


def test_speech_to_understand_is_not_trained_as_speech(folder):
    samples, problems = read(lines(folder / "s.jsonl", *({"messages": messages, "audios": clips} for messages, clips in (
        ([{"role": "user", "content": "<audio>What was said?"}, {"role": "assistant", "content": "This."}], ["a.wav"]),
        ([{"role": "assistant", "content": "<audio>a<audio>b"}], ["a.wav", "b.wav"]),
        ([{"role": "assistant", "content": "Bare text."}], ["a.wav"])))))
    assert spoken(samples) == [("a.wav", "Bare text.")]
    assert "1 <audio> and 1 audios, not one spoken clip; the user's are speech to understand" in problems[0] and "2 <audio> and 2 audios" in problems[1]


def test_quotes_are_text_in_ljspeech_and_quotes_in_what_pandas_writes(folder):
    written(folder / "metadata.csv", 'a|"Go away!"|"Go away!"\nb|He said "no|He said "no\nc|Third|Third\n')
    assert spoken(read(folder)[0]) == [("a.wav", '"Go away!"'), ("b.wav", 'He said "no'), ("c.wav", "Third")]
    path = written(folder / "m.csv", 'audio_file|text\na.wav|"He said ""no""."\nb.wav|"odd\nc.wav|Third\n')
    assert spoken(read(path)[0]) == [("a.wav", 'He said "no".'), ("b.wav", '"odd'), ("c.wav", "Third")]
    path = written(folder / "n.csv", 'path,text\na.wav,"one, ""two""\nthree"\nb.wav,four\n')
    assert [s.turns[-2].text.split() for s in read(path)[0]] == [["one,", '"two"', "three"], ["four"]]


def test_rows_in_are_rows_kept_and_rows_refused(folder):
    path = written(folder / "m.tsv", "audio\ttext\na.wav\tOne.\nb.wav\t \ngone.wav\tTwo.\nc.wav\nd.wav\tThree.\n")
    samples, problems = read(path)
    assert [name for name, _ in spoken(samples)] == ["a.wav", "d.wav"]
    assert [(p.check, p.name.split(" ")[2]) for p in problems] == [("empty_text", "3"), ("invalid", "4"),
                                                                       ("invalid", "5")]
    assert "gone.wav' not found; tried" in problems[1] and "has 1 fields, not 2" in problems[2]


NO_DATA = [
    ("m.csv", "audio,text\na.wav,Größe\n".encode("cp1252"), "line 2 is not UTF-8 text; convert it: iconv -f CP1252"),
    ("m.csv", b"PK\x03\x04xlsx", "save an Excel table as CSV"),
    ("m.csv", b'audio,text\na.wav,One.\nb.wav,"Two\nc.wav,Three.\nd.wav,"Four"\n', "row that begins at line 3"),
    ("x.txt", b"a|x|y|z\n", "not certain: 1 'a', 2 'x', 3 'y', 4 'z'; name them"),
    ("x.txt", b"gone|x\n", "names no audio files: 'gone' is not there"),
    ("x.json", b'"hello"', "holds a JSON str, not a list of samples"),
    ("x.json", b'[{"messages":\n [{"role": "us', "not valid JSON at line 2 column [0-9]+: Unterminated string"),
    ("x.json", b"RIFF\xff\xfe\x00\x00WAVEfmt ", "is an audio file; give the folder with the texts")]


@pytest.mark.parametrize("name, data, said", NO_DATA)
def test_what_is_no_data_is_refused(folder, name, data, said):
    """With the remedy; a quote that nothing closes swallows no lines."""
    (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=said):
        read(folder / name)


SAID = ["The ship sails at noon.", "Nobody was at home.", "Bring me the red book.", "It rained all day."]
IPA_SAID = ["ðə ʃˈɪp sˈeɪlz æt nˈuːn", "nˈoʊbɑːdi wʌz æt hˈoʊm", "bɹˈɪŋ miː ðə ɹˈɛd bˈʊk", "ɪt ɹˈeɪnd ˈɔːl dˈeɪ"]


def table(rows, separator="|"):
    return "".join(separator.join((f"{name}.wav", *map(str, fields))) + "\n" for name, fields in zip("abcd", rows))


UNDECIDED = {
    "tensorflowtts": table(zip(SAID, ["anna", "ben", "anna", "ben"])),
    "seconds": table(zip(SAID, (1.25, 2.5, 0.75, 3))),
    "a language, a name": table((said, "en", "anna") for said in SAID),
    "csv with a speaker": table(zip(SAID, ["anna", "ben"] * 2), ","),
    "translations": table(zip(SAID, SAID[::-1])),
    "speakers": table(zip(["anna", "ben"] * 2, (1.25, 2.5, 0.75, 3))),
    "durations": table(zip((1.2, 3.4, 2.25, 0.5)), ",")}
PHONEMIC = {"piper": table(zip(SAID, IPA_SAID)), "styletts2": table(zip(IPA_SAID, "0101"))}


@pytest.mark.parametrize("name", UNDECIDED)
def test_a_text_column_is_never_guessed(folder, name):
    """Each trained "0.", "anna." or the seconds before, with `dry run ok`."""
    path = written(folder / "list.csv", UNDECIDED[name])
    with pytest.raises(UserError, match=r"what its fields mean is not certain: 1 'a.wav', .*--columns audio=1,text=2"):
        read(path)
    with pytest.raises(UserError, match="not certain"):
        read(folder)        # nor are they passed over for another format
    if name not in ("durations", "speakers"):
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


def test_one_missing_row_is_named_by_its_own_line(folder):
    rows = "".join(f"{'gone' if i == 1 else 'abcd'[i % 4]}.wav|This is {i}.\n" for i in range(12))
    samples, (problem,) = read(written(folder / "list.csv", rows))
    assert len(samples) == 11 and "list.csv line 2 " in problem and "gone.wav' not found" in problem
    (sample,), _ = read(written(folder / "q.csv", 'audio, text\na.wav, "Hi, you."\n'))
    assert sample.turns[-2].text == "Hi, you."
    _, (problem,) = read(written(folder / "w.csv", "audio,text\nD:\\\\set\\\\gone.wav,Hi.\n"))
    assert "write paths relative to" in problem


def test_what_others_leave_out_or_take_from_elsewhere_is_counted(folder, capsys):
    written(folder / "kaldi" / "wav.scp", "u1 ../a.wav\nu2 ../b.wav\n"), written(folder / "kaldi" / "text", "u1 This is a.\n")
    _, (problem,) = read(folder / "kaldi")
    assert problem.check == "empty_text" and "u2 has no line in text" in problem
    read(written(folder / "in" / "m.csv", "audio,text\na.wav,Hi.\n"))
    assert "1 row name audio that is not below the folder of the list, such as" in capsys.readouterr().out


ONE = "1\n00:00:01,000 --> 00:00:02,000\n"
SUBTITLES = {       # {what, or a file's name: (text of it, or of talk.srt, [(words, offset, seconds)], checks)}
    "talk.en.srt": (ONE + "Hi there.\n", [("Hi there.", 1, 1)], []),
    "talk.tsv": ("start\tend\ttext\n1000\t2000\tHi there.\n", [("Hi there.", 1, 1)], []),
    "talk.json": ('{"segments": [{"start": 1.0, "end": 2.0, "text": " Hi there."}]}', [("Hi there.", 1, 1)], []),
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
    file = name if name.startswith("talk.") else "talk.srt"
    written(tmp_path / file, text), written(tmp_path / "talk.wav", "audio")
    samples, problems = read(tmp_path)
    assert [(s.turns[-2].text, c.offset, c.duration) for s in samples for c in s.turns[-1].clips] == expected
    assert [p.check for p in problems] == checks
    assert all(f"{file} entry" in place for place in (samples[0].name, *problems))


def test_names_in_another_case_are_found(tmp_path):
    written(tmp_path / "0.TXT", "Hi."), written(tmp_path / "0.WAV", "audio")
    assert spoken(read(tmp_path)[0]) == [("0.WAV", "Hi.")]
    assert spoken(read(written(tmp_path / "m" / "m.csv", "audio,text\n../0.wav,Hi.\n"))[0]) == [("0.WAV", "Hi.")]


def test_parquet_with_arrays_and_paths(tmp_path):
    clip = (0.3 * np.sin(np.arange(8000) / 20)).astype(np.float32)
    (tmp_path / "b.wav").write_bytes(b"audio")
    for name, audio in (("arrays", {"array": clip.tolist(), "sampling_rate": 16000}), ("paths", {"path": "b.wav"})):
        pyarrow.parquet.write_table(pyarrow.table({"audio": [audio], "text": ["Hi."]}), tmp_path / f"{name}.parquet")
    (sample,), _ = read(tmp_path / "arrays.parquet")
    found = sample.turns[-1].clips[0]
    assert len(decode_audio(found.path, [(found.offset, found.duration)])[0]) == 12000
    assert spoken(read(tmp_path / "paths.parquet")[0]) == [("b.wav", "Hi.")]


def test_the_script(folder, quick_python):
    """Rows, reasons, the first sample and the file; one line for a source that it cannot read."""
    path = written(folder / "m.csv", "audio,text,speaker,language,split\na.wav,Hi.,anna,en,train\nb.wav,,anna,en,\nc.wav,Ho.,x,en,test\n")
    done = subprocess.run([quick_python, ROOT / "speech" / "convert.py", path, "--output", folder / "out.jsonl"],
                          capture_output=True, text=True)
    assert done.returncode == 0 and "2 rows = 1 kept + 1 refused (1 empty_text)" in done.stdout, done.stderr
    assert "1 are of another split" in done.stdout and "m.csv line 3 (b.wav): its text is empty" in done.stdout
    assert f"first: text 'Hi.', audio {folder / 'a.wav'}, speaker anna, language en" in done.stdout
    (entry,) = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    assert entry["messages"][-1]["content"]["audio_url"] == str(folder / "a.wav")
    assert (entry["speaker"], entry["language"], entry["split"]) == ("anna", "en", "train")
    with pytest.raises(SystemExit, match="^error: .* not certain.*$"):
        convert.main([str(written(folder / "x.csv", UNDECIDED["seconds"])), "--output", str(folder / "no.jsonl")])
    assert not (folder / "no.jsonl").exists()


def test_dialogue_has_bosons_scene_and_speaker_lines(folder):
    """The text decides, not the task type; ChatML without a system turn, and a text to speak, get the same."""
    words, scene = "[SPEAKER0] Hi.\n[SPEAKER1] Ho.", "Audio is recorded from a room."
    path = lines(folder / "m.jsonl", {"audio": "b.wav", "text": "[SPEAKER0] Alone."}, {"audio": "a.wav", "text": words, "scene": "a_room"})
    expected = (f"{MULTISPEAKER_SYSTEM}\n\n<|scene_desc_start|>\n{scene}\n\nSPEAKER0: feminine\nSPEAKER1: masculine\n<|scene_desc_end|>")
    for task in ("single_speaker_smart_voice", "multi_speaker_smart_voice"):
        assert [s.turns[0].text for s in read(path, task_type=task)[0]] == ["Generate audio following instruction.", expected]
    chat = lines(folder / "chat.jsonl", {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": {
        "type": "audio", "audio_url": "a.wav"}}], "scene": scene})
    assert text_prompts([("x", words)], False, scene=scene)[0].turns[0].text == expected
    assert read(chat)[0][0].turns[0].text.split() == expected.split()


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
    for sample in samples[:4]:
        reference, target = (sample.turns[i].clips[0].path[-5] for i in (2, 4))
        assert sample.turns[1].text == f"Wavs {reference}." and sample.turns[3].text == f"Wavs {target}." and reference != target
    speakers.write_text("".join(reversed(speakers.read_text().splitlines(keepends=True))))
    assert references(read(speakers, reference="same_speaker")[0]) == found
    assert any(references(read(speakers, reference="same_speaker", seed=seed)[0]) != found for seed in range(8))


def test_tts_3_clones_a_clip_whose_words_are_not_known(folder):
    """A manifest's row and a text to speak give the sequence that the servers have for it, and nothing is left out."""
    path = lines(folder / "m.jsonl", {"audio": "a.wav", "text": "Ho.", "ref_audio": "c.wav"})
    ids = v3.Ids(tts=1, text=2, audio=3, ref_audio=4, ref_text=5)
    (row,), problems = read(path, lone_reference=True)
    asked, = text_prompts([("x", "Ho.")], False, str(folder / "c.wav"))
    asked.turns[-1].trained = True
    assert not problems and not row.notes
    for sample in (row, asked):
        ((_, pieces),), _ = ids.streams(sample)
        assert [p if isinstance(p, str) else Path(p.path).stem for p, _ in pieces[:-1]] == [
            "<|tts|>", "<|ref_audio|>", "c", "<|text|>", "Ho.", "<|audio|>"]


def waves(n):
    """{name: bytes of a wav file}, each of another pitch."""
    found = {}
    for i in range(n):
        file = io.BytesIO()
        soundfile.write(file, 0.3 * np.sin(2 * np.pi * (200 + 20 * i) * np.arange(8000) / 16000), 16000, format="WAV")
        found[f"c{i}.wav"] = file.getvalue()
    return found


def tar_of(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def assert_sounds(sample, data):
    """The clip of a sample is the sound in the bytes of a file, to half a step of 16 bits."""
    clip = sample.turns[-1].clips[0]
    wave = decode_audio(clip.path, [(clip.offset, clip.duration)])[0]
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        Path(file.name).write_bytes(data)
        theirs = decode_audio(file.name)[0]
    assert len(wave) == len(theirs) == 12000 and np.abs(wave - theirs).max() < 1e-4


@pytest.mark.parametrize("kind", ["parquet", "stream", "arrow", "tar"])
def test_clips_inside_other_files_decode_to_their_own_sound(tmp_path, kind):
    """As datasets.push_to_hub and save_to_disk, or WebDataset, write them."""
    clips, source = waves(8), tmp_path / f"a.{kind}"
    table = pyarrow.table({"audio": [{"bytes": data, "path": name} for name, data in clips.items()],
                           "speaker_id": ["anna"] * len(clips), "text": [f"This is {name}." for name in clips]})
    if kind in ("stream", "arrow"):
        with (pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream)(source, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, source, row_group_size=3)
    else:
        members = [(name.replace(".wav", end), data) for name, sound in clips.items() for end, data in (
            (".wav", sound), (".json", json.dumps({"text": f" This is {name}.", "speaker": "anna"}).encode()))]
        tar_of(tmp_path / "s-0.tar", dict(members[:10])), tar_of(tmp_path / "s-1.tar", dict(members[10:]))
        source = tmp_path / "s-*.tar"
    samples, problems = read(source)
    assert not problems and {s.speaker for s in samples} == {"anna"}
    assert [s.turns[-2].text for s in samples] == [f"This is {name}." for name in clips]
    for sample, data in reversed(list(zip(samples, clips.values()))):
        assert_sounds(sample, data)


def test_tars_with_dots_in_names_and_without_texts(tmp_path):
    clips = waves(4)
    members = {f"x/21.{i}.wav": data for i, data in enumerate(clips.values())}
    members |= {f"x/21.{i}.txt": b"Dots." for i in range(3)} | {"x/._21.wav": b"junk"}
    samples, problems = read(tar_of(tmp_path / "a.tar", dict(sorted(members.items()))))
    assert [s.turns[-2].text for s in samples] == ["Dots."] * 3 and [p.check for p in problems] == ["empty_text"]
    for sample, data in zip(samples, clips.values()):
        assert_sounds(sample, data)
    with open(tmp_path / "a.tar", "r+b") as file:
        file.truncate(20000)
    with pytest.raises(UserError, match="a.tar: cannot be read, it may be cut off"):
        read(tmp_path / "a.tar")


def test_a_full_disk_is_not_the_fault_of_a_sample(tmp_path):
    """Files may not grow, as on a full disk: the run stops, and no sample is reported as unreadable audio."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sound = {"array": np.random.default_rng(0).uniform(-1, 1, 400_000), "sampling_rate": 16000}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match="sound cannot be written"):
            list(convert.unpack_audio([("row 1", {"text": "a", "audio": sound})], tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_pattern_of_one_list_reads_beside_that_list(folder):
    """Files of the same names in a folder above are another corpus."""
    lines(folder / "corpus" / "l.jsonl", {"audio": "a.wav", "text": "This is a."}), written(folder / "corpus" / "a.wav", "x")
    samples, problems = read(folder / "corp*" / "*.jsonl")
    assert not problems and samples[0].turns[-1].clips[-1].path == str(folder / "corpus" / "a.wav")


def test_audio_that_is_not_read_is_refused_when_it_is_found(folder):
    for name in ("a.txt", "a.wav", "b.txt", "b.m4a"):
        written(folder / "clips" / name, "This is it.")
    samples, (problem,) = read(folder / "clips")
    assert spoken(samples) == [("a.wav", "This is it.")] and "m4a is not read; convert it: ffmpeg -i b.m4a b.flac" in problem
    with pytest.raises(UserError, match="train.parquet: is not a parquet, arrow or tar file"):
        read(written(folder / "train.parquet", "version https://git-lfs.github.com/spec/v1\n"))


def test_training_rows_never_validate_where_rows_are_marked(folder):
    """Though no row that is marked can be used."""
    source = lines(folder / "m.jsonl", {"audio": "a.wav", "text": "This is a.", "split": "train"},
                   {"audio": "gone.wav", "text": "This is b.", "split": "test"}, {"audio": "c.wav", "text": "", "split": "test"})
    convert.to_chatml(source, folder / "eval" / "m.jsonl", problems := [], held_out=True)
    assert not (folder / "eval" / "m.jsonl").read_text() and len(problems) == 2
    convert.to_chatml(source, folder / "train" / "m.jsonl", problems := [])
    assert len((folder / "train" / "m.jsonl").read_text().splitlines()) == 1 and not problems
