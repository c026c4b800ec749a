"""Audio files with their texts beside them, in subfolders too: .txt, .lab or .json, or cuts with times (.srt, .vtt)."""
import contextlib
import os
import re
from pathlib import Path

from common.distributed import UserError
from common.text import NAME, printable
from core import json_files
from core.json_files import SKIPPED
from speech.data.columns import AUDIO_FILES, CUES, OTHER_AUDIO, TEXTS
from speech.data.conversations import BadSample

AUDIO_FOLDERS = {"wav", "wavs", "clips", "audio", "mp3", "flac"}
TEXT_FOLDERS = ("txt", "txts", "text", "texts", "transcripts")      # beside a folder of audio
NO_SPEAKER = AUDIO_FOLDERS | {"train", "dev", "test", "eval", "valid", "val"}
TIME = r"(?:(\d+):)?(\d+):(\d+[.,]\d+)"
CUE = re.compile(rf"{TIME}[ \t]*-->[ \t]*{TIME}.*\n((?:.*\S.*\n?)*)")
# start and end of a line of Audacity's labels, with six decimals also where an editor made spaces of its tabs
SECONDS = r"(\d+(?:[.,]\d+)?)(?:\t|(?<=[.,]\d{6}) +)"
LABEL = re.compile(SECONDS * 2 + "(.*)")


def walk(folder):
    """(folder, names of its files) of a tree in order, hidden ones left out; a folder that is a link is walked too."""
    seen = set()
    for at, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(at)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if real not in seen else []
        if real not in seen:
            yield Path(at), sorted(name for name in names if not name.startswith("."))
        seen.add(real)


def clips(folder):
    """(audio file, the file of its text or None) of a tree."""
    for place, names in walk(folder):
        there, others = set(names), None
        for name in names:
            stem, ending = os.path.splitext(name)
            if ending.lower() not in AUDIO_FILES + OTHER_AUDIO:
                continue
            wanted = [stem + end for end in (*CUES, *TEXTS, ".json")]
            text = next((place / one for one in wanted if one in there), None)
            if text is None:
                others = _text_folders(folder, place) if others is None else others
                text = next((other / one for other in others for one in wanted if (other / one).is_file()), None)
            yield place / name, text


def _text_folders(folder, place):
    """Folders that mirror one of audio: txt/anna for wav/anna."""
    parts = place.relative_to(folder).parts
    found = [folder.joinpath(*parts[:i], name, *parts[i + 1:]) for i, part in enumerate(parts)
             if part.lower() in AUDIO_FOLDERS for name in TEXT_FOLDERS]
    return [path for path in found if path.is_dir()]


def first_clips(folder):
    """(first audio file of a tree, first one with a text); None for none."""
    first = None
    for audio, text in clips(folder):
        first = first or audio
        if text:
            return first, audio
    return first, None


def read_sidecar(folder, wanted):
    """Rows of the clips of a tree; a subfolder is taken for a speaker. Cuts of one recording share its number."""
    for number, (audio, text) in enumerate(clips(folder)):
        if not wanted(number):
            yield number, SKIPPED
            continue
        try:
            for row in _rows(folder, audio, text):
                yield number, row
        except BadSample as error:
            error.place = f" ({printable(str(audio.relative_to(folder)), NAME)})"
            yield number, error


def _rows(folder, audio, text):
    place, stem = audio.parent, audio.stem
    if audio.suffix.lower() in OTHER_AUDIO:
        raise BadSample(f"{audio.suffix[1:]} is not read; convert it: ffmpeg -i {audio.name} {stem}.flac", "unreadable")
    if text is None:
        raise BadSample(f"has no text beside it ({', '.join(stem + ending for ending in TEXTS)})", "empty_text")
    inside = "" if place == folder else str(place.relative_to(folder))
    speaker = inside if place.name.lower() not in NO_SPEAKER else ""
    if text.name.endswith(".normalized.txt"):       # LibriTTS: speaker_chapter_...
        speaker = stem.split("_")[0]
    row = {"id": os.path.join(inside, stem), "audio": str(audio), "speaker": speaker, "text_file": text}
    if text.suffix == ".json":
        with contextlib.suppress(UserError):        # read_text says what is wrong
            row["normalize_text"] = json_files.read_object(text).get("normalize_text")  # of a take
    cuts = cues(text)
    if cuts is None:
        return [row]
    return [{**row, "id": f"{row['id']} {start:g}-{end:g} s", "text_file": None, "text": said, "offset": start,
             "end": end} for start, end, said in cuts]


def cues(path):
    """[(start, end, text)] of subtitles or of Audacity's labels, times in seconds; None for a plain text."""
    if path.suffix == ".json":
        return None
    text = read_text(path) + "\n"
    if path.suffix in CUES:
        found = [((h, m, s), (hh, mm, ss), said) for h, m, s, hh, mm, ss, said in CUE.findall(text)]
        if not found:
            raise BadSample(f"{path.name} has no line 00:00:00.000 --> 00:00:01.000", "empty_text")
        return [(_seconds(start), _seconds(end), " ".join(re.sub("<[^>]*>", "", said).split()))
                for start, end, said in found]
    # a line that begins with a backslash is a range of Hz of the one before
    labels = [LABEL.fullmatch(line) for line in text.splitlines() if line.strip() and line[0] != "\\"]
    if not labels or not all(labels):
        return None
    return [(_seconds(("", "", start)), _seconds(("", "", end)), said.strip())
            for start, end, said in map(re.Match.groups, labels)]


def _seconds(time):
    hours, minutes, seconds = (float(part.replace(",", ".") or 0) for part in time)
    return round(3600 * hours + 60 * minutes + seconds, 3)


def read_text(path, name=""):
    """Text of a file of its own, or of the JSON beside an audio file. name: of what names it, for the BadSample."""
    try:
        if path.suffix != ".json":
            return json_files.read_text(path, name and f"{name} ").strip()
        data = json_files.read_object(path)
    except UserError as error:
        raise BadSample(error)
    names = {key.lower(): key for key in data}
    found = [data[names[key]] for key in ("text", "transcript", "reference_text") if key in names]
    if not found:
        raise BadSample(f"{path.name} has none of text, transcript, reference_text", "empty_text")
    return str(found[0])
