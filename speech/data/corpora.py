"""Corpora as their publishers lay them out: how a folder is recognised, and its rows.

A row is that of speech/data/formats.py. Audio is named relative to the folder, without its ending where that may vary.
"""
import os
import re
from pathlib import Path

from common.distributed import UserError
from common.text import NAME, printable
from core.json_files import SKIPPED, json_value, read_text
from speech.data.columns import AUDIO_FILES
from speech.data.conversations import BadSample
from speech.data.sidecar import walk

NUMBERED = re.compile(r"(.+)_(\d+)")        # a clip that Emilia-Pipe cut out of a recording
GIGASPEECH_MARKS = {"<COMMA>": ",", "<PERIOD>": ".", "<QUESTIONMARK>": "?", "<EXCLAMATIONPOINT>": "!"}
GIGASPEECH_NOISE = ("<SIL>", "<MUSIC>", "<NOISE>", "<OTHER>")


def find_corpus(folder, names):
    """(name, what it is recognised by, reader(wanted)) of a folder with these names in it; None for no known corpus."""
    for name, (needs, read) in CORPORA.items():
        if all(any(re.fullmatch(need, there) for there in names) for need in needs):
            return name, " and ".join(need.replace(".*", "*") for need in needs), lambda wanted, read=read: numbered(
                read(folder), wanted)
    return None


def numbered(rows, wanted):
    """(number, row or SKIPPED) of rows, as readers yield them."""
    for number, row in enumerate(rows):
        yield number, row if wanted(number) else SKIPPED


def _lines(path):
    """[first field, the rest] of the lines of a table with tabs that are not empty."""
    return (line.rstrip("\r").split("\t", 1) for line in read_text(path).split("\n") if line.strip())


def vctk(folder):
    """VCTK: of its two microphones the second one, as its authors advise; speakers without texts are left out."""
    wav48 = next(path for path in sorted(folder.glob("wav48*"), reverse=True))
    for text in sorted(folder.glob("txt/*/*.txt")):
        speaker, stem = text.parent.name, text.stem
        choices = [wav48 / speaker / f"{stem}{ending}" for ending in ("_mic2.flac", "_mic1.flac", ".flac", ".wav")]
        yield {"id": stem, "audio": str(next((c for c in choices if c.exists()), choices[0])), "text_file": text,
               "speaker": speaker, "language": "en"}


def aishell3(folder):
    """AISHELL-3, train or test: in a text every second word is the pinyin of the one before."""
    for name, *text in _lines(folder / "content.txt"):
        yield {"id": Path(name).stem, "audio": f"wav/{name[:7]}/{name}", "speaker": name[:7], "language": "zh",
               "text": "".join(" ".join(text).split()[::2])}


def mls(folder):
    """Multilingual LibriSpeech, one split: lower case, no punctuation."""
    for name, *text in _lines(folder / "transcripts.txt"):
        speaker, book = (*name.split("_"), "", "")[:2]
        yield {"id": name, "audio": f"audio/{speaker}/{book}/{name}", "speaker": speaker, "text": "".join(text)}


def wenetspeech4tts(folder):
    """WenetSpeech4TTS: the first line of a text file is its name and its text, the second one has times."""
    for path in sorted(folder.glob("txts/*.txt")):
        text = (next(_lines(path), None) or ["", ""])[-1]
        yield {"id": path.stem, "audio": f"wavs/{path.stem}", "text": text, "language": "zh"}


def gigaspeech(folder):
    """GigaSpeech: stretches of long recordings; its marks become punctuation, its noises are left out."""
    data = json_value(folder / "GigaSpeech.json")
    for audio in data.get("audios") or [] if isinstance(data, dict) else []:
        for segment in audio.get("segments") or []:
            text = str(segment.get("text_tn") or "")
            if any(noise in text for noise in GIGASPEECH_NOISE):        # not speech
                yield SKIPPED
                continue
            for mark, sign in GIGASPEECH_MARKS.items():
                text = text.replace(f" {mark}", sign)
            speaker = segment.get("speaker")
            yield {"id": segment.get("sid"), "audio": audio.get("path"), "text": text,
                   "offset": segment.get("begin_time"), "end": segment.get("end_time"),
                   "speaker": speaker if speaker != "N/A" else None, "language": data.get("language")}


def numbered_list(audio):
    """Name of Emilia-Pipe's list NAME.json for a clip NAME_3.mp3, "" if it is not there."""
    cut = NUMBERED.fullmatch(audio.stem)
    return f"{cut[1]}.json" if cut and (audio.parent / f"{cut[1]}.json").is_file() else ""


def emilia_pipe(folder):
    """Emilia-Pipe's own output, in subfolders too: NAME.json is a list, of which entry 3 is spoken in NAME_3.mp3."""
    for at, names in walk(folder):
        clips = {}      # {NAME: {number, None for a file without one: file}}
        for name in names:
            stem, ending = os.path.splitext(name)
            if ending.lower() in AUDIO_FILES:
                found = NUMBERED.fullmatch(stem)
                clips.setdefault(found[1] if found else stem, {})[int(found[2]) if found else None] = name
            elif ending == ".json":
                clips.setdefault(stem, {})
        for name, numbers in sorted(clips.items()):
            path = at / f"{name}.json"
            rows = json_value(path) if path.exists() else []
            if not isinstance(rows, list) and not numbers:      # a file of something else
                continue
            if not isinstance(rows, list):
                raise UserError(f"{path}: is not a list of the clips beside it")
            for number, file in numbers.items():
                if number is None or number >= len(rows):
                    error = BadSample(f"{file}: {path.name} has no entry for it", "empty_text")
                    error.place = f" ({printable(file, NAME)})"
                    yield error
            for number, row in enumerate(rows):
                if number not in numbers or not isinstance(row, dict):
                    error = BadSample(f"{name}_{number} is not there, or has no entry")
                    error.place = f" ({name} {number})"
                    yield error
                    continue
                speaker = row.get("speaker")        # of this recording
                yield {"id": f"{name}_{number}", "audio": str(at / numbers[number]), "text": row.get("text"),
                       "speaker": speaker and f"{name}/{speaker}", "language": row.get("language")}


# name: (what must be in its folder, the reader)
CORPORA = {"vctk": (("txt", "wav48.*"), vctk), "aishell3": (("content.txt", "wav"), aishell3),
           "mls": (("transcripts.txt", "audio"), mls), "wenetspeech4tts": (("txts", "wavs"), wenetspeech4tts),
           "gigaspeech": (("GigaSpeech.json",), gigaspeech)}
