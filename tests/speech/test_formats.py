"""Every format is recognised by its content; its rows become samples or are refused with a reason."""
import io
import json
import resource
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile

from core.cli import UserError
from speech import convert, v3
from speech.conversations import MULTISPEAKER_SYSTEM
from speech.speak import read_samples
from speech.speak import text_prompts
from tests.helpers.trainer import ROOT


def write(folder, files):
    """Write {path: text or bytes} below a folder; return the last path."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def folder(tmp_path):
    """A folder with files a.wav to d.wav, also in wavs/; readers check that they exist, but never open them."""
    write(tmp_path, dict.fromkeys([f"{sub}{n}.wav" for sub in ("", "wavs/") for n in "abcd"], "audio"))
    return tmp_path


def read(path, **reading):
    """(samples, problems) of a source."""
    problems = []
    return list(read_samples(path, problems, **reading)), problems


def spoken(samples):
    """[(file of the last clip, the text before it)]."""
    return [(s.turns[-1].clips[-1].path.rsplit("/", 1)[-1], s.turns[-2].text) for s in samples]


def cuts(samples):
    return [(c.offset, c.duration) for s in samples for c in s.turns[-1].clips]


def jsonl(*entries):
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


# the converter of JimmyMa99 writes "audio_generation" and leaves the placeholder in the transcripts
JIMMYS = {"samples": [{"id": n, "audio_file": f"{n}.wav", "transcript_file": f"{n}.txt", "speaker_id": "spk",
                       "user_instruction": None, "task_type": "audio_generation"} for n in "ab"]}
GUI = {"samples": [{"id": n, "audio_file": f"{n}.wav", "transcript_file": f"{n}.txt", "split": split}
                   for n, split in (("a", "train"), ("b", "eval"), ("c", "Val "))]}
GIGASPEECH = {"language": "EN", "audios": [{"aid": "A", "path": "audio/A.opus", "segments": [
    {"sid": "A1", "speaker": "N/A", "begin_time": 1.5, "end_time": 2, "text_tn": "YES <COMMA> NO <PERIOD>"},
    {"sid": "A2", "speaker": "P7", "begin_time": 2, "end_time": 3, "text_tn": "<MUSIC>"},
    {"sid": "A3", "speaker": "P7", "begin_time": 3, "end_time": 4, "text_tn": "WELL <QUESTIONMARK>"}]}]}
TWO = [("a.wav", "This is a.", "anna"), ("b.wav", "This is b.", "ben")]
PLAIN = [(file, text) for file, text, _ in TWO]
# {format: (files, source to read, [(audio, text, and maybe the speaker)], checks of refused rows)}
FORMATS = {
    "metadata.json": ({f"{n}{end}": f"<audio>This is {n}." for n in "ab" for end in (".txt", ".wav")} | {
        "metadata.json": json.dumps(JIMMYS)}, "", PLAIN, []),
    "metadata.json of a GUI without the folder of the split": (
        {"metadata.json": json.dumps(GUI), "train/a.wav": "", "train/a.txt": "Hi.", "eval/b.wav": "",
         "eval/b.txt": "Ho.", "c.wav": "", "c.txt": "Hu."}, "", [("a.wav", "Hi.")], []),
    "ms-swift": ({"m.jsonl": jsonl(*({"messages": [{"role": "assistant", "content": f"<audio>This is {n}."}],
                                      "audios": [f"wavs/{n}.wav"]} for n in "ab"), *(
        {"messages": messages, "audios": clips} for messages, clips in (
            ([{"role": "user", "content": "<audio>What?"}, {"role": "assistant", "content": "This."}], ["wavs/a.wav"]),
            ([{"role": "assistant", "content": "<audio>a<audio>b"}], ["wavs/a.wav", "wavs/b.wav"])))),
        "wavs/a.wav": "", "wavs/b.wav": ""}, "m.jsonl", PLAIN, ["invalid"] * 2),
    "jsonl": ({"m.jsonl": jsonl(*({"audio": f"{n}.wav", "text": f"This is {n}."} for n in "ab")),
               "a.wav": "", "b.wav": ""}, "m.jsonl", PLAIN, []),
    "csv of excel": ({"m.csv": "\ufeffwav, text,client_id\r\na.wav, \"This is a.\",anna\r\nb.wav,This is b.,ben\r\n",
                      "a.wav": "", "b.wav": ""}, "m.csv", TWO, []),
    "csv without a header": ({"m.csv": 'wav\\c.wav,"Hi, you."\nd.wav,Ho.\n', "wav/c.wav": "", "d.wav": ""}, "",
                             [("c.wav", "Hi, you."), ("d.wav", "Ho.")], []),
    "ljspeech": ({"metadata.csv": 'a|This is (a).|This is a.\nb|This is b.|\nc|So "no|So "no\nd|"Go!"|"Go!"\n'} | {
        f"wavs/{n}.wav": "" for n in "abcd"}, "", [*PLAIN, ("c.wav", 'So "no'), ("d.wav", '"Go!"')], []),
    "piper": ({"metadata.csv": 'c.wav|"She says ""now"", twice."\nd.wav|"a | b"\n', "wav/c.wav": "", "wav/d.wav": ""},
              "", [("c.wav", 'She says "now", twice.'), ("d.wav", "a | b")], []),
    "pandas": ({"m.csv": 'audio_file|text\na.wav|"He says ""no""."\nb.wav|"odd\n', "a.wav": "", "b.wav": ""}, "",
               [("a.wav", 'He says "no".'), ("b.wav", '"odd')], []),
    "gpt-sovits": ({"train.list": "wavs/a.wav|anna|EN|This is a.\nwavs/b.wav|ben|EN|This is b.\n", "wavs/a.wav": "",
                    "wavs/b.wav": ""}, "train.list", TWO, []),
    "kaldi": ({"wav.scp": "u1 a.wav\nu2 b.wav\nu3 a.wav\n", "utt2spk": "u1 anna\nu2 ben\n", "a.wav": "", "b.wav": "",
               "text": "u1 This is a.\nu2 This is b.\n"}, "", TWO, ["empty_text"]),
    "kaldi with segments": ({"wav.scp": "r1 a.wav\n", "segments": "u1 r1 1.5 -1\n", "a.wav": "",
                             "text": "u1 This is a.\nr1 Whole.\n"}, "", [("a.wav", "This is a.")], ["invalid"]),
    "texts": ({f"{who}/{n}{end}": f"This is {n}.\n" for n, who in (("a", "anna"), ("b", "ben"))
               for end in (".txt", ".wav")}, "", TWO, []),
    "texts in capitals": ({"0.TXT": "Hi.", "0.WAV": "audio"}, "", [("0.WAV", "Hi.")], []),
    "a text for m4a": ({f"a{end}": "This is a." for end in (".txt", ".wav")} | {"b.m4a": "", "b.txt": "Hi."}, "",
                       PLAIN[:1], ["audio"]),
    "subtitles of another file": ({"a.wav": "", "a.txt": "This is a.", "a.part.wav": "", "a.part.srt":
        "1\n00:00:01,000 --> 00:00:02,000\nPart.\n"}, "", [("a.part.wav", "Part."), *PLAIN[:1]], []),
    "audacity": ({"c.wav": "", "c.txt": "0.000000\t3.200000\tThe ship\n\\\t80.0\t900.0\n4.500000 5.000000 Sails\n"}, "",
                 [("c.wav", "The ship"), ("c.wav", "Sails")], []),
    "common voice": ({"train.tsv": "client_id\tpath\tsentence\nx\tc1.mp3\t\"Hi\" he calls.\n", "clips/c1.mp3": "",
                      "reported.tsv": "sentence\treason\nHi.\tx\n"}, "", [("c1.mp3", '"Hi" he calls.', "x")], []),
    "emilia": ({"EN/EN_B0.jsonl": '{"id": "x", "wav": "EN_B0/S0/mp3/x.mp3", "text": " Hi.", "speaker": "s"}\n',
                "EN/EN_B0/S0/mp3/x.mp3": ""}, "", [("x.mp3", "Hi.", "s")], []),
    "vctk": ({"txt/p225/p225_001.txt": "Hi.\n", "wav48_silence_trimmed/p225/p225_001_mic1.flac": "",
              "wav48_silence_trimmed/p225/p225_001_mic2.flac": "", "txt/p280/p280_001.txt": "Ho.",
              "wav48_silence_trimmed/p280/p280_001_mic1.flac": "", "wav48_silence_trimmed/p315/p315_001_mic2.flac": ""},
             "", [("p225_001_mic2.flac", "Hi.", "p225"), ("p280_001_mic1.flac", "Ho.", "p280")], []),
    "aishell3": ({"content.txt": "SSB00050001.wav\t你 ni3 好 hao3\n", "wav/SSB0005/SSB00050001.wav": ""}, "",
                 [("SSB00050001.wav", "你好", "SSB0005")], []),
    "mls": ({"transcripts.txt": "1_2_3\tone\x85two\n1_2_4\t\n", "audio/1/2/1_2_3.opus": ""}, "",   # \x85 ends no line
            [("1_2_3.opus", "one\x85two", "1")], ["empty_text"]),
    "wenetspeech4tts": ({"txts/X1.txt": "X1\t你好。\n[[0, 0.2]]\n", "wavs/X1.wav": ""}, "", [("X1.wav", "你好。", "")], []),
    "gigaspeech": ({"GigaSpeech.json": json.dumps(GIGASPEECH), "audio/A.opus": ""}, "",
                   [("A.opus", "YES, NO.", ""), ("A.opus", "WELL?", "P7")], ["empty_text"]),
    "libritts": ({"19/198/19_198_000.wav": "", "19/198/19_198_000.normalized.txt": "Hi.", "19/198/._a.wav": "",
                  "19/198/19_198_000.original.txt": "hi"}, "", [("19_198_000.wav", "Hi.", "19")], []),
    "libritts of names": ({"x/an-na_1.wav": "", "x/an-na_1.normalized.txt": "Hi."}, "",
                          [("an-na_1.wav", "Hi.", "an-na")], []),
    "librispeech": ({"19/198/19-198.trans.txt": "19-198-0000 THE SHIP\n", "19/198/19-198-0000.flac": ""}, "",
                    [("19-198-0000.flac", "THE SHIP", "19")], [])}
CUTS = {"audacity": [(0, 3.2), (4.5, 0.5)], "gigaspeech": [(1.5, 0.5), (3, 1)], "kaldi with segments": [(1.5, None)]}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_found_and_read(tmp_path, name):
    files, source, expected, refused = FORMATS[name]
    write(tmp_path, files)
    samples, problems = read(tmp_path / source)
    assert [(*pair, s.speaker)[:len(expected[0])] for pair, s in zip(spoken(samples), samples)] == expected
    assert [p.check for p in problems] == refused
    assert name not in CUTS or cuts(samples) == CUTS[name]
    assert name != "gpt-sovits" or {s.language for s in samples} == {"EN"}


def test_rows_in_are_rows_kept_and_rows_refused(folder):
    path = write(folder, {"m.tsv": "audio\ttext\na.wav\tOne.\nb.wav\t \ngone.wav\tTwo.\nc.wav\nd.wav\tThree.\n"})
    samples, problems = read(path)
    assert [name for name, _ in spoken(samples)] == ["a.wav", "d.wav"]
    assert [p.check for p in problems] == ["empty_text", "invalid", "invalid"]
    assert [p.name.split(" ")[2] for p in problems] == ["3", "4", "5"]
    assert "gone.wav' not found; tried" in str(problems[1]) and "has 1 fields, not 2" in str(problems[2])
    # a missing file does not change the format of a table without a header
    rows = "".join(f"{'gone' if i == 1 else 'abcd'[i % 4]}.wav|This is {i}.\n" for i in range(12))
    samples, (problem,) = read(write(folder, {"list.csv": rows}))
    assert len(samples) == 11 and "list.csv line 2 " in str(problem) and "gone.wav' not found" in str(problem)
    path = write(folder, {"n.csv": 'path,text\na.wav,"one, ""two""\nthree"\nb.wav,four\n'})     # a row of two lines
    assert [s.turns[-2].text.split() for s in read(path)[0]] == [["one,", '"two"', "three"], ["four"]]


SENTENCES = ["The ship sails at noon.", "Nobody was at home.", "Bring me the red book.", "It rained all day."]
IPA_SENTENCES = ["ðə ʃˈɪp sˈeɪlz æt nˈuːn", "nˈoʊbɑːdi wʌz æt hˈoʊm", "bɹˈɪŋ miː ðə ɹˈɛd bˈʊk", "ɪt ɹˈeɪnd ˈɔːl dˈeɪ"]


def table(rows, separator="|"):
    return "".join(separator.join((f"{name}.wav", *map(str, fields))) + "\n" for name, fields in zip("abcd", rows))


EQUAL = "audio,text\n" + "".join(f"{n}.wav,{text}\n" for n, text in zip("abcd" * 2, "calm calm happy calm".split() * 2))
REFUSED = {         # {name: (files, source to read, pattern of the error)}
    "not utf-8": ({"m.csv": "audio,text\na.wav,Größe\n".encode("cp1252")}, "m.csv",
                  "line 2 is not UTF-8 text; convert it: iconv -f CP1252"),
    "excel": ({"m.csv": b"PK\x03\x04xlsx"}, "m.csv", "save an Excel table as CSV"),
    "open quote": ({"m.csv": 'audio,text\na.wav,One.\nb.wav,"Two\nc.wav,Three.\nd.wav,"Four"\n'}, "m.csv",
                   "row that begins at line 3"),
    "no table": ({"x.txt": "gone|x\n"}, "x.txt", "is not a table that is known: .*audio file that is there: .'gone'"),
    "no list": ({"x.json": '"hello"'}, "x.json", "holds a JSON str, not a list of samples"),
    "half a json": ({"x.json": '[{"messages":\n [{"role": "us'}, "x.json", "not valid JSON at line 2 column [0-9]+"),
    "audio": ({"x.json": b"RIFF\xff\xfe\x00\x00WAVEfmt "}, "x.json", "is an audio file; give the folder with the text"),
    "phonemes": ({"m.csv": table(zip(IPA_SENTENCES))}, "m.csv", "its texts are phonemes, such as"),
    "equal texts": ({"m.csv": EQUAL}, "m.csv", "6 of 8 texts are equal, 'calm': .*--columns text=NAME"),
    "two splits": ({f"{split}/metadata.csv": "file_name,text\na.wav,Hi.\n" for split in ("train", "test")}, "",
                   "give one: .*/test/metadata.csv, .*/train/metadata.csv"),
    "unknown column": ({"m.jsonl": '{"audio": "a.wav", "caption": "Hi."}\n'}, "m.jsonl",
                       "no column of text among audio, caption: --columns text=NAME"),
    "wrong --columns": ({"m.jsonl": '{"audio": "a.wav", "text": "Hi."}\n'}, "m.jsonl", "no column of scene"),
    "a command": ({"k/wav.scp": "u1 sox a.wav -t wav - |\n", "k/text": "u1 Hi.\n"}, "k", "u1 is a command"),
    "no texts": ({"x/c.wav": "", "x/notes.csv": "name,size\nc,1\n"}, "x", "has audio, such as c.wav, but .*c.srt"),
    "nothing": ({"x/read.md": ""}, "x", "has neither a list nor audio files")}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_data_is_refused_with_the_remedy(folder, name):
    files, source, message = REFUSED[name]
    write(folder, files)
    with pytest.raises(UserError, match=message):
        read(folder / source, columns="scene=place" if "--columns" in name else "")


UNDECIDED = {
    "tensorflowtts": table(zip(SENTENCES, ["anna", "ben"] * 2)),
    "seconds": table(zip(SENTENCES, (1.25, 2.5, 0.75, 3))), "phonemes": table(zip(SENTENCES, IPA_SENTENCES)),
    "speaker before": table(zip(["anna", "ben"] * 2, SENTENCES)),
    "a language, a name": table((text, "en", "anna") for text in SENTENCES),
    "csv with a speaker": table(zip(SENTENCES, ["anna", "ben"] * 2), ","),
    "translations": table(zip(SENTENCES, SENTENCES[::-1])), "durations": table(zip((1.2, 3.4, 2.25, 0.5)), ","),
    "speakers": table(zip(["anna", "ben"] * 2, (1.25, 2.5, 0.75, 3)))}


@pytest.mark.parametrize("name", UNDECIDED)
def test_a_text_column_is_never_guessed(folder, name):
    """Else the trainer learns "0.", "anna." or seconds as texts."""
    path = write(folder, {"list.csv": UNDECIDED[name]})
    with pytest.raises(UserError, match=r"what its fields mean is not certain: 1 'a.wav', .*--columns audio=1,text=2"):
        read(path)
    with pytest.raises(UserError, match="not certain"):
        read(folder)        # the folder is not read as another format
    if SENTENCES[0] in UNDECIDED[name]:
        text = 3 if name == "speaker before" else 2
        assert [text for _, text in spoken(read(path, columns=f"audio=1,text={text}")[0])] == SENTENCES


MARKED_TEXTS = ["(laughs) Well then.", "<laugh> Well.", "[breath] Well.", "*gasps* Well.", "anna: Well.",
                "Tom &amp; Ann.", "GrÃ¶ÃŸe.", "Well\x00 then.", "[S1] Well. [S2] No."]


def test_odd_rows_are_counted_and_nothing_is_no_text(folder, capsys):
    plain = ["a < b and c > d", "Plain text.", "[SPEAKER0] Hi."]
    path = write(folder, {"in/m.jsonl": jsonl(*({"audio": "a.wav", "text": text} for text in (
        *MARKED_TEXTS, *plain, "nan", "None", "<NA>", None)))})
    samples, problems = read(path)
    assert [p.check for p in problems] == ["empty_text"] * 4 and len(samples) == len(MARKED_TEXTS) + len(plain)
    out = capsys.readouterr().out
    assert f"           {len(MARKED_TEXTS)} rows hold marks, a name and a colon, or odd characters" in out
    assert "12 rows name audio that is not below the folder of the list" in out


ONE = "1\n00:00:01,000 --> 00:00:02,000\n"
SUBTITLES = {       # {file name, or a case in talk.srt: (text of the file, [(words, offset, seconds)], checks)}
    "talk.en.srt": (ONE + "Hi there.\n", [("Hi there.", 1, 1)], []),
    "talk.json": ('{"segments": [{"start": 1.0, "end": 2.0, "text": " Hi there."}]}', [("Hi there.", 1, 1)], []),
    "talk.tsv": ("start\tend\ttext\n1000\t2000\tHi there.\n", [("Hi there.", 1, 1)], []),      # whisper's
    "no blank lines": (ONE + "One.\n2\n00:00:02,000 --> 00:00:03,000\nTwo.\n3\n00:00:03,000 --> 00:00:04,000\nThree.\n",
                       [("One.", 1, 1), ("Two.", 2, 1), ("Three.", 3, 1)], []),
    "blank line inside": (ONE + "One,\n\nand more.\n\n2\n00:00:02,000 --> 00:00:03,000\nTwo.\n",
                          [("One, and more.", 1, 1), ("Two.", 2, 1)], []),
    "bad arrow": (ONE + "One.\n\n2\n00:00:02,000 -> 00:00:03,000\nTwo.\n\n3\n00:00:03,000 --> 00:00:04,000\nThree.\n",
                  [("Three.", 3, 1)], ["invalid"]),
    "bad first": ("1\n00:00:01,000 -> 00:00:02,000\nOne.\n\n2\n00:00:02,000 --> 00:00:03,000\nTwo.\n", [("Two.", 2, 1)],
                  ["invalid"]),
    "a note": ("WEBVTT\n\nNOTE by hand\n\nfirst\n00:01.000 --> 00:02.000\nOne.\n\nNOTE more\n", [("One.", 1, 1)], []),
    "less than": (ONE + "a < b and c > d\n", [("a < b and c > d", 1, 1)], []),
    "entities and places": (ONE + "{\\an8}<i>Tom</i> &amp; Ann\n", [("Tom & Ann", 1, 1)], []),
    "rolling": (ONE + "A\nb\n\n2\n00:00:02,000 --> 00:00:03,000\nb\nc\n", [("A b", 1, 1), ("c", 2, 1)], []),
    "music": (ONE + "♪ la la ♪\n\n2\n00:00:02,000 --> 00:00:03,000\nTwo.\n", [("Two.", 2, 1)], ["empty_text"])}


@pytest.mark.parametrize("name", SUBTITLES)
def test_subtitles_are_read(tmp_path, name):
    text, expected, checks = SUBTITLES[name]
    file = name if name.startswith("talk.") else "talk.srt"
    write(tmp_path, {file: text, "talk.wav": "audio"})
    samples, problems = read(tmp_path)
    assert [(s.turns[-2].text, *cut) for s, cut in zip(samples, cuts(samples))] == expected
    assert [p.check for p in problems] == checks
    assert all(f"{file} entry" in name for name in (samples[0].name, *map(str, problems)))


def test_texts_next_to_audio_and_links(tmp_path):
    """Audacity's labels have tabs; a text may begin with numbers. A folder that is linked twice, or in a circle, counts once."""
    write(tmp_path, {"x/a.wav": "", "x/a.txt": "1.5 2.5 litres.", "x/b.wav": "", "x/b.txt": "0\t2\tHi.\n2\t3.5\tHo.\n",
                     "x/z/1-2-3.wav": "", "x/z/1-2-4.wav": "", "x/z/1-2.trans.txt": "1-2-3 HI\n1-2-4 \n"})
    (tmp_path / "y").symlink_to("x")
    (tmp_path / "x" / "z" / "circle").symlink_to("..")
    samples, problems = read(tmp_path)
    assert spoken(samples) == [("a.wav", "1.5 2.5 litres."), ("b.wav", "Hi."), ("b.wav", "Ho."), ("1-2-3.wav", "HI")]
    assert [p.check for p in problems] == ["empty_text"]


def test_the_script(folder, quick_python):
    """It prints rows, reasons and the first sample, writes the file, and refuses other sources in one line."""
    path = write(folder, {"m.csv": "audio,text,speaker,language,split\na.wav,Hi.,anna,en,train\nb.wav,,anna,en,\n"
                                   "c.wav,Ho.,x,en,test\n"})
    done = subprocess.run([quick_python, ROOT / "speech" / "convert.py", path, "--output", folder / "out.jsonl"],
                          capture_output=True, text=True)
    assert done.returncode == 0 and "2 rows = 1 kept + 1 refused" in done.stdout, done.stderr
    assert "1 are of another split" in done.stdout and "m.csv line 3 (b.wav): its text is empty" in done.stdout
    assert f'first row: {(folder / "out.jsonl").read_text().strip()[:100]}' in done.stdout
    path = write(folder, {"n.csv": "audio,text\na.wav,\n"})
    done = subprocess.run([quick_python, ROOT / "speech" / "convert.py", path, "--output", folder / "none.jsonl"],
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == f"error: {path}: holds no row that can be used\n"
    (entry,) = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    assert entry["messages"][-1]["content"]["audio_url"] == str(folder / "a.wav")
    assert (entry["speaker"], entry["language"], entry["split"]) == ("anna", "en", "train")
    with pytest.raises(UserError, match="^.* not certain.*$"):
        convert.main([str(write(folder, {"x.csv": UNDECIDED["seconds"]})), "--output", str(folder / "no.jsonl")])
    assert not (folder / "no.jsonl").exists()


def test_dialogue_has_bosons_scene_and_speaker_lines(folder):
    """A text with speakers gets them, also in ChatML without a system turn and in a text to speak."""
    words, scene = "[SPEAKER0] Hi.\n[SPEAKER1] Ho.", "Audio is recorded from a room."
    voices = "SPEAKER0: feminine\nSPEAKER1: masculine\n<|scene_desc_end|>"
    path = write(folder, {"m.jsonl": jsonl(
        {"audio": "b.wav", "text": "[SPEAKER0] Alone."}, {"audio": "a.wav", "text": words, "scene": "a_room"},
        {"audio": "a.wav", "text": "Speaker 1: Hi.\nSpeaker 2: Ho."})})          # VibeVoice's
    expected = f"{MULTISPEAKER_SYSTEM}\n\n<|scene_desc_start|>\n{scene}\n\n{voices}"
    alone, with_scene, vibe = read(path)[0]
    assert [s.turns[0].text for s in (alone, with_scene)] == ["Generate audio following instruction.", expected]
    assert vibe.turns[-2].text == words
    chat = write(folder, {"chat.jsonl": jsonl({"messages": [{"role": "user", "content": words}, {
        "role": "assistant", "content": {"type": "audio", "audio_url": "a.wav"}}]})})
    assert text_prompts([("x", words)], False, scene=scene)[0].turns[0].text == expected
    assert read(chat)[0][0].turns[0].text == vibe.turns[0].text == expected.replace(f"{scene}\n\n", "")


def test_references_are_other_clips_of_the_speaker(folder):
    rows = [{"audio": f"wavs/{n}.wav", "text": f"Wavs {n}.", "speaker": "anna"} for n in "abcd"]
    rows += [{"audio": "a.wav", "text": "Ben.", "speaker": "ben"}, {"audio": "b.wav", "text": "Nobody."}]

    def references(rows, **more):
        samples, _ = read(write(folder, {"m.jsonl": jsonl(*rows)}), reference="same_speaker", **more)
        return samples, {s.turns[-2].text: s.turns[1].text if len(s.turns) > 3 else None for s in samples}
    samples, reference_texts = references(rows)
    assert reference_texts["Ben."] is reference_texts["Nobody."] is None
    assert [s.notes[0][0] for s in samples[4:]] == ["no_second_clip"] * 2 and not any(s.notes for s in samples[:4])
    for sample in samples[:4]:
        reference, target = (sample.turns[i].clips[0].path[-5] for i in (2, 4))
        assert [turn.text for turn in sample.turns[1:4:2]] == [f"Wavs {reference}.", f"Wavs {target}."]
        assert reference != target
    assert references(rows[::-1])[1] == reference_texts
    assert any(references(rows, seed=seed)[1] != reference_texts for seed in range(8))


def test_given_references(folder):
    """A task type or --reference none drops a reference; a clip that refers to itself gets a note."""
    two = [{"ref_audio_file": f"{n}.wav", "ref_transcript": f"This is {n}.", "speaker_tag": "[SPEAKER0]"} for n in "bc"]
    rows = [{"ref_audio": "b.wav", "ref_text": "This is b."}, {"ref_audio": "b.wav"}, {"ref_speakers": two},
            {"ref_audio": "b.wav", "ref_text": "Hi.", "task_type": "single_speaker_smart_voice"},
            {"ref_audio": "a.wav", "ref_text": "Ho."}]
    path = write(folder, {"m.jsonl": jsonl(*({"audio": "a.wav", "text": "Ho.", **row} for row in rows))})
    samples, problems = read(path)
    assert [[t.text for t in s.turns if t.role == "user"][:-1] for s in samples] == [
        ["This is b."], [], ["[SPEAKER0] This is b.", "[SPEAKER0] This is c."], [], ["Ho."]]
    assert [[note for note, _ in s.notes] for s in samples] == [
        [], ["no_reference_text"], [], ["unused_reference"], ["own_reference"]] and not problems
    assert not any(len(s.turns) > 3 for s in read(path, reference="none")[0])
    (problem,) = read(write(folder, {"n.jsonl": jsonl({"audio": "a.wav", "text": "Ho.", "task_type": "zero_shoot"})}))[1]
    assert "unknown task_type 'zero_shoot'" in str(problem)
    for speakers in (["b.wav"], {"a": 1}, [{"ref_audio_file": "b.wav"}]):
        (problem,) = read(write(folder, {"n.jsonl": jsonl({"audio": "a.wav", "text": "Ho.", "ref_speakers": speakers})}))[1]
        assert "its ref_speakers need 'ref_audio_file' and 'ref_transcript'" in str(problem)
    (problem,) = read(write(folder, {"n.jsonl": jsonl({"audio": "a.wav", "text": "Ho."})}),
                      task_type="zero_shot_voice_cloning")[1]
    assert "has no reference clip, which its task type needs" in str(problem)


def test_tts_3_clones_a_clip_without_a_transcript(folder):
    """A manifest's row and a text to speak become the same sequence, which servers use as well."""
    path = write(folder, {"m.jsonl": jsonl({"audio": "a.wav", "text": "Ho.", "ref_audio": "c.wav"})})
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
    """{name: bytes of a wav file} with different pitches."""
    files = {}
    for i in range(n):
        file = io.BytesIO()
        soundfile.write(file, 0.3 * np.sin(2 * np.pi * (200 + 20 * i) * np.arange(8000) / 16000), 16000, format="WAV")
        files[f"c{i}.wav"] = file.getvalue()
    return files


def tar_of(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def assert_sounds(samples, clips):
    """The clips of the samples have the sounds of these files."""
    assert len(samples) == len(clips)
    for sample, data in zip(samples, clips):
        clip = sample.turns[-1].clips[0]
        wave = soundfile.read(clip.path, start=round(clip.offset * 16000), frames=round(clip.duration * 16000))[0]
        assert np.abs(wave - soundfile.read(io.BytesIO(data))[0]).max() < 1e-4


@pytest.mark.parametrize("kind", ["parquet", "arrays", "stream", "tar"])
def test_clips_inside_other_files_decode_to_the_right_sound(tmp_path, kind):
    """In files of datasets.push_to_hub, save_to_disk and WebDataset."""
    clips, source = waves(8), tmp_path / f"a.{kind}"
    audio = [{"bytes": data, "path": name} for name, data in clips.items()]
    if kind == "arrays":
        audio = [{"array": soundfile.read(io.BytesIO(data))[0], "sampling_rate": 16000} for data in clips.values()]
    table = pyarrow.table({"audio": audio, "speaker_id": ["anna"] * len(clips),
                           "text": [f"This is {name}." for name in clips]})
    if kind == "stream":
        with pyarrow.ipc.new_stream(source, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    elif kind != "tar":
        pyarrow.parquet.write_table(table, source, row_group_size=3)
    else:
        members = [(name.replace(".wav", end), data) for name, sound in clips.items() for end, data in (
            (".wav", sound), (".json", json.dumps({"text": f" This is {name}.", "speaker": "anna"}).encode()))]
        tar_of(tmp_path / "s-0.tar", dict(members[:10])), tar_of(tmp_path / "s-1.tar", dict(members[10:]))
        source = tmp_path
    samples, problems = read(source)
    assert not problems and {s.speaker for s in samples} == {"anna"}
    assert [s.turns[-2].text for s in samples] == [f"This is {name}." for name in clips]
    assert_sounds(samples, clips.values())


def test_parquet_with_paths(folder):
    pyarrow.parquet.write_table(pyarrow.table({"audio": [{"path": "b.wav"}], "text": ["Hi."]}), folder / "p.parquet")
    assert spoken(read(folder / "p.parquet")[0]) == [("b.wav", "Hi.")]


def test_tars_with_dots_in_names_and_without_texts(tmp_path):
    clips = waves(4)
    members = {f"x/21.{i}.wav": data for i, data in enumerate(clips.values())}
    members |= {f"x/21.{i}.txt": b"Dots." for i in range(3)} | {"x/._21.wav": b"junk"}
    samples, problems = read(tar_of(tmp_path / "a.tar", dict(sorted(members.items()))))
    assert [s.turns[-2].text for s in samples] == ["Dots."] * 3 and [p.check for p in problems] == ["empty_text"]
    assert_sounds(samples, list(clips.values())[:3])
    with open(tmp_path / "a.tar", "r+b") as file:
        file.truncate(20000)
    with pytest.raises(UserError, match="a.tar: cannot be read, it may be cut off"):
        read(tmp_path / "a.tar")


def test_a_full_disk_is_not_the_fault_of_a_sample(tmp_path):
    """A limit of file sizes acts like a full disk: the run stops, and no sample counts as unreadable audio."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sound = {"array": np.random.default_rng(0).uniform(-1, 1, 400_000), "sampling_rate": 16000}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match="sound cannot be written"):
            list(convert.unpack_audio([("row 1", {"text": "a", "audio": sound})], tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_pattern_of_one_list_reads_the_audio_of_its_folder(folder):
    """A folder above has files with the same names, which belong to another corpus."""
    write(folder, {"corpus/l.jsonl": jsonl({"audio": "a.wav", "text": "This is a."}), "corpus/a.wav": "x"})
    samples, problems = read(folder / "corp*" / "*.jsonl")
    assert not problems and samples[0].turns[-1].clips[-1].path == str(folder / "corpus" / "a.wav")


def test_training_rows_never_validate_if_rows_have_splits(folder):
    """This also holds if no row of the test split can be used."""
    source = write(folder, {"m.jsonl": jsonl({"audio": "a.wav", "text": "This is a.", "split": "train"},
                                             {"audio": "gone.wav", "text": "This is b.", "split": "test"})})
    for held_out, n_rows, n_problems in ((True, 0, 1), (False, 1, 0)):
        convert.to_chatml(source, folder / "out.jsonl", problems := [], held_out=held_out)
        assert (len((folder / "out.jsonl").read_text().splitlines()), len(problems)) == (n_rows, n_problems)
