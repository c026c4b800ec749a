"""Speech data as people have it -> the ChatML .jsonl that the trainer reads.

    python speech/convert.py my_corpus --output train.jsonl
    python speech/convert.py clips.csv --columns audio=clip,text=caption --output train.jsonl
    python speech/convert.py 'shards/*.parquet' --output train.jsonl   # audio is unpacked, too

Reads tables with a header (.csv .tsv .json .jsonl; columns are known by name), tables without one
(audio|text, LJSpeech, Piper, the .list of GPT-SoVITS), Kaldi folders, metadata.json of the GUIs,
ms-swift, VibeVoice, audio with texts or subtitles next to it, parquet and arrow files, WebDataset
tars, and the corpora of CORPORA. A column's meaning is never guessed against its values: where
that is undecided, name it with --columns. Rows that cannot be used are counted and listed with the
reason; look at the first sample that is printed, and into the file.
"""
import contextlib
import csv
import glob
import hashlib
import heapq
import html
import io
import itertools
import json
import math
import os
import re
import sys
import tarfile
import tempfile
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli, json_files
from core.cli import UserError, counted, error_text, printable, require
from speech import choices
from speech.choices import COLUMNS, TASK_TYPES
from speech.conversations import (AUDIO_FILES, DEFAULT_SYSTEM, SCENE, BadSample, Paths, Reading,
                                  canonical_sample, content_items, is_chatml, label_of, sample_text,
                                  system_parts)

# what libsndfile does not read is found as well, and refused when it is decoded
SOUNDS = AUDIO_FILES + (".m4a", ".aac", ".mp4", ".webm", ".wma", ".amr")
TEXTS = (".txt", ".normalized.txt", ".lab")                         # next to an audio file
CUES = (".srt", ".vtt")                                             # of recordings: with times
LISTS = (".json", ".jsonl", ".csv", ".tsv", ".list", ".lst", ".txt")
SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
INSIDE = ("wavs", "wav", "clips", "audio")      # subfolders in which a list's audio is looked for
LANGUAGES = set("zh ja jp en ko yue de fr es it pt ru ar vi th".split())
HELD_OUT = {"eval", "test", "dev", "val", "valid", "validation"}
NO_SPEAKER = {*INSIDE, "mp3", "flac", "train", "dev", "test", "eval", "valid", "val"}   # folders
IPA = re.compile("[əɪʊɛɔæʌɑɹʃʒθðŋˈˌː]")
NOTHING = {"nan", "none", "null", "<na>", "n/a", "na", ""}      # pandas' words for no text
NOISES = ("laugh|sigh|cough|breath|gasp|chuckle|sniff|groan|yawn|music|applau|cheer|cry|whisper|"
          "pause|silence|noise|clears")
ODD = {         # of texts that are used all the same: {clause about them: pattern}
    "hold marks of sounds or sound tags, which may be read aloud": re.compile(
        rf"\[[a-z][a-z _-]*\]|</?[a-z][^<>]*>|\*[a-z][a-z ]*\*|\((?:{NOISES})[a-z ]*\)", re.I),
    "begin with a name and a colon, which is read aloud": re.compile(
        r"^\s*[^\W\d][\w.'-]{0,20}(?: \w{1,12})?:\s"),
    "hold HTML entities, which are read aloud": re.compile(
        r"&(?:#\d+|#x[0-9a-f]+|[a-z]{2,8});", re.I),
    "look like text in a wrong encoding": re.compile("Ã[\x80-¿]|â€|Â[\x80-¿]|�"),
    "hold control characters": re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")}
PHONEMES = "give the texts of which they were made, Higgs-Audio does not read these"
OUTSIDE = "name audio that is not below the folder of the list"
SPOKEN_BY = re.compile(r"^\s*Speaker\s+(\d+)\s*:\s*", re.I | re.M)     # as VibeVoice writes it
CANDIDATES = 64         # clips of a speaker among which references are chosen
GOOD_SECONDS = (3, 15)  # of a reference, where the data say how long clips are
SHARD_S = 600           # of sound in a FLAC file that audio is unpacked into
DEPTH, LOOK = 3, 20     # levels of folders, and rows, that are looked through


class Undecided(UserError):
    """A table is one of speech, but what its columns mean is not certain."""


# ---- Tables, JSON. A reader yields (place, row): place is "line 7"; row a dict with the keys of
# COLUMNS, an entry that is ChatML already, or the BadSample that says why it is none


def find_columns(names, given):
    """{meaning: column name}. given: {meaning: name} of --columns."""
    lower, found = {}, {}
    for name in names:
        lower.setdefault(str(name).strip().lower(), name)
    for meaning, spellings in COLUMNS.items():
        for spelling in [given[meaning].lower()] if meaning in given else spellings.split():
            if spelling in lower:
                found.setdefault(meaning, lower[spelling])
    return found


def check_columns(path, names, given):
    """find_columns; UserError without audio or text, or a column that --columns names."""
    found = find_columns(names, given)
    there = ", ".join(str(name)[:40] for name in list(names)[:20])
    for meaning, name in given.items():
        require(meaning in found, f"{path}: has no column as --columns {meaning}={name} says; its "
                                  f"columns are {there}")
    lost = [meaning for meaning in ("audio", "text") if meaning not in found]
    known = "; ".join(f"of {meaning} are {COLUMNS[meaning].replace(' ', ', ')}" for meaning in lost)
    require(not lost, f"{path}: has no column of {' and none of '.join(lost)}; its columns are "
            f"{there}; known names {known}; name yours: --columns "
            + ",".join(f"{meaning}=NAME" for meaning in lost))
    return found


def open_json(path, given):
    first = json_files.json_value(path) if path.suffix == ".json" else None
    if isinstance(first, dict) and "samples" in first:
        return "metadata.json", read_metadata(path, first["samples"])
    require(not (isinstance(first, dict) and "segments" in first),
            f"{path}: is of a recogniser; give the folder of it and its recording")
    unit, read = json_files.read_entries(path)
    entries = [entry for _, entry in itertools.islice(read(lambda number: True),
                                                      None if given else LOOK)]
    names = list(dict.fromkeys(key for one in entries if isinstance(one, dict) for key in one))
    require(names or not entries, f"{path}: holds neither 'messages' nor columns of audio and text")
    require("audio_codes" not in names,
            f"{path}: holds audio_codes, another trainer's; give the list of which they were made")
    if names and "messages" not in names:
        check_columns(path, names, given)
    return "JSON", ((f"{unit} {number + 1}", json_row(entry, given))
                    for number, entry in read(lambda number: True))


def json_row(entry, given):
    """Row of a JSON entry: ChatML, ms-swift, or an object of columns."""
    if not isinstance(entry, dict):
        return BadSample(f"is a {type(entry).__name__}, not an object")
    if isinstance(entry.get("messages"), list):
        return entry if is_chatml(entry) else swift_row(entry)
    return {meaning: entry.get(name) for meaning, name in find_columns(entry, given).items()}


def swift_row(entry):
    """Row of ms-swift: texts with <audio> in them, and a list of the audio."""
    messages, clips = entry["messages"], entry.get("audios") or entry.get("audio") or []
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        return BadSample("has no list 'messages' of texts")
    clips = [clip.get("path") if isinstance(clip, dict) else clip
             for clip in ([clips] if isinstance(clips, str) else clips)]
    answers = [m["content"] for m in messages if m.get("role") == "assistant"]
    spoken = sum(answer.count("<audio>") for answer in answers)
    asked = sum(m["content"].count("<audio>") for m in messages) - spoken
    if asked and not spoken:
        return BadSample("its <audio> is the user's: that is speech to understand, not to speak")
    if spoken > 1 or asked or len(clips) != 1 or not answers:
        return BadSample(f"{asked + spoken} <audio> and {len(clips)} audios, not one spoken clip")
    requests = [m["content"] for m in messages if m.get("role") == "user"]
    text = answers[-1].replace("<audio>", "").strip() or (requests or [""])[-1]
    ref = entry.get("ref_audios")
    return {**{key: entry.get(key) for key in ("id", "speaker", "ref_text")}, "audio": clips[0],
            "text": text, "ref_audio": (ref[0] if isinstance(ref, list) and ref else ref) or None}


def read_metadata(path, samples):
    """A metadata.json of the GUIs, whose root may leave train/ and eval/ out of the paths."""
    require(isinstance(samples, list), f"{path}: has no list 'samples'")

    def row_of(raw):
        if not isinstance(raw, dict):
            return BadSample(f"is a {type(raw).__name__}, not an object")

        def inside(key):
            value = raw.get(key)
            if not value or not isinstance(value, str) or (path.parent / value).exists():
                return value or None
            moved = path.parent / str(raw.get("split") or "") / value
            return str(moved) if moved.exists() else value
        kept = ("id", "scene", "language", "split", "duration", "voices")
        text = inside("transcript_file")
        return {**{key: raw.get(key) for key in kept}, "audio": inside("audio_file"),
                "text_file": path.parent / text if isinstance(text, str) else None,
                "text_name": "transcript_file", "ref_speakers": raw.get("ref_speakers") or [],
                "ref_audio": inside("ref_audio_file"), "ref_text": raw.get("ref_transcript"),
                "speaker": raw.get("speaker_id") or raw.get("speaker_name"),
                "task_type": raw.get("training_task_type") or raw.get("task_type")}
    return ((f"sample {number}", row_of(raw)) for number, raw in enumerate(samples, 1))


def lines_of(path):
    """Lines of a UTF-8 file without their ends; UserError names the first that is not."""
    with json_files.open_file(path) as file:
        for number, line in enumerate(json_files.lines(file, path), 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise json_files.not_utf8(path, number, line)


def fields_of(line, separator, as_written=False):
    """Fields of a line; one whose quotes do not fit is split at every separator. as_written: quotes
    count only where Python's csv module would write them, as Piper does; LJSpeech's are text.
    """
    if '"' not in line:
        return line.split(separator)
    with contextlib.suppress(csv.Error):
        fields = next(csv.reader([line], delimiter=separator, strict=True, skipinitialspace=True))
        if not as_written:
            return fields
        for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
            again = io.StringIO()
            csv.writer(again, delimiter=separator, quoting=quoting,
                       lineterminator="").writerow(fields)
            if again.getvalue() == line:
                return fields
    return line.split(separator)


def open_table(path, given):
    head = [line for line in itertools.islice(lines_of(path), 10 * LOOK) if line.strip()][:LOOK]
    require(head, f"{path}: is empty")
    if not given or not all(name.isdecimal() for name in given.values()):
        headers = {separator: [name.strip() for name in fields_of(head[0], separator)]
                   for separator in SEPARATORS}
        separator, names = max(headers.items(), key=lambda item: len(find_columns(item[1], given)))
        if find_columns(names, given):
            found = check_columns(path, names, given)
            columns = (meaning if meaning == name else f"{meaning} = {name!r}"
                       for meaning, name in found.items())
            return (f"a table with {SEPARATORS[separator]}, {', '.join(columns)}", read_table(
                path, separator, {meaning: names.index(name) for meaning, name in found.items()}))
    return open_headerless(path, head, given)


def read_table(path, separator, columns):
    """Rows of a table with a header. In CSV a quoted field may go over several lines."""
    rows = csv_rows(path) if separator == "," else (
        (number, fields_of(line, separator)) for number, line in enumerate(lines_of(path), 1))
    rows = ((number, row) for number, row in rows if any(field.strip() for field in row))
    width = len(next(rows)[1])
    for number, row in rows:
        yield f"line {number}", {meaning: row[at].strip() for meaning, at in columns.items()} \
            if len(row) == width else BadSample(f"has {len(row)} fields, the header has {width}: "
                                                f"{separator.join(row)[:80]!r}")


def csv_rows(path):
    """(number of the first line, row) of CSV; UserError names the line of an open quote."""
    reader = csv.reader((line + "\n" for line in lines_of(path)), strict=True,
                        skipinitialspace=True)
    while True:
        line = reader.line_num + 1
        try:
            yield line, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}: its quotes do not fit in the row that begins at line {line} "
                            f'({error}); write one inside a field twice: "so ""it"" is"')


def open_headerless(path, head, given):
    """(about, rows) of lines of 2 to 4 fields without a header, of which the first names audio;
    what the others are is judged over all rows.
    """
    paths, why = audio_paths(path.parent), f"nor 2 to 4 fields as all others: {head[0][:80]!r}"
    at = int(given.get("audio", 1)) - 1
    for separator in SEPARATORS:
        rows = [fields_of(line, separator, as_written=True) for line in head]
        if len({len(row) for row in rows}) == 1 and 2 <= len(rows[0]) <= 4 and at < len(rows[0]):
            if sum(bool(paths.look_up(row[at].strip())) for row in rows) >= 0.9 * len(rows):
                break
            why = (f"and its first field names no audio files: {rows[0][0].strip()[:80]!r} is not "
                   f"there; looked in {', '.join(paths.places())}")
    else:
        raise UserError(f"{path}: is not a table that is known: its first line has neither columns "
                        f"of audio and of text, {why}; give it a first line: audio,text")
    width = len(rows[0])
    rows = [(number, [field.strip() for field in fields_of(line, separator, as_written=True)])
            for number, line in enumerate(lines_of(path), 1) if line.strip()]
    meanings = {int(at) - 1: meaning for meaning, at in given.items()} if given else \
        meanings_of(path, [row for _, row in rows if len(row) == width])

    def row_of(row):
        shorter = width == 3 > len(row) == 2 and "normalised" in meanings.values()
        if len(row) != width and not shorter:
            return BadSample(f"has {len(row)} fields, not {width}: {separator.join(row)[:80]!r}")
        found = {meaning: row[at] for at, meaning in meanings.items() if at < len(row)}
        text = found.pop("normalised", "") or found["text"]
        return {"id": Path(found["audio"]).stem, **found, "text": text}
    about = f"no header, {', '.join(meanings.values())} between {SEPARATORS[separator]}"
    return about, ((f"line {number}", row_of(row)) for number, row in rows)


def meanings_of(path, rows):
    """{number of a field: its meaning} of a table without a header; Undecided where it is open."""
    columns = [[value for value in column if value] for column in zip(*rows)]
    if any(map(phonemes, columns)):
        found = next(filter(phonemes, columns))[0][:60]
        raise Undecided(f"{path}: its texts are phonemes, such as {found!r}: {PHONEMES}")
    prose, found = [is_prose(column) for column in columns], None
    if prose[1] and not any(columns[2:]):
        found = "audio text"
    elif len(columns) == 3 and prose[1] and prose[2]:
        alike = [SequenceMatcher(None, row[1].lower(), row[2].lower()).ratio()
                 for row in rows[:200] if row[2]]
        found = "audio text normalised" if sum(alike) >= 0.6 * len(alike) else None
    elif len(columns) == 3 and prose[2] and not prose[1]:
        names = all(len(value) <= 40 and " " not in value for value in columns[1])
        found = "audio speaker text" if names else None
    elif len(columns) == 4 and prose[3] and all(v.lower() in LANGUAGES for v in columns[2]):
        found = "audio speaker language text"
    if found:
        return dict(enumerate(found.split()))
    shown = ", ".join(f"{number} {column[0][:40]!r}" if column else f"{number} empty"
                      for number, column in enumerate(columns, 1))
    raise Undecided(f"{path}: has no header, and what its fields mean is not certain: {shown}; "
                    "name them by number, for example --columns audio=1,text=2")


def is_prose(values):
    """True if texts may be spoken: not numbers, codes, names, nor one of a few words."""
    numbers = sum(bool(re.fullmatch(r"[\d.,:+-]*", value)) for value in values)
    if not values or numbers > len(values) / 2:
        return False
    unspaced = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f]"
    if any(" " in value or re.search(unspaced, value) for value in values):
        return len(values) < 4 or len(set(values)) > len(values) / 2
    return sum(bool(re.search(r"\w[.!?]$", value)) for value in values) > len(values) / 2


def phonemes(values):
    return sum(len(IPA.findall(v)) >= 0.1 * len(v) > 0 for v in values) > len(values) / 2


def read_kaldi(folder):
    """wav.scp, text and maybe segments, utt2spk; a pipe in wav.scp is never run."""
    def pairs(name):
        found = {}
        for number, line in enumerate(
                lines_of(folder / name) if (folder / name).exists() else (), 1):
            key, value = (*line.split(None, 1), "", "")[:2]
            require(key not in found, f"{folder / name}: line {number} has {key!r} again")
            if key:
                found[key] = value.strip()
        return found
    audio, texts, segments, speakers = map(pairs, ("wav.scp", "text", "segments", "utt2spk"))
    for key, where in audio.items():
        require(not where.endswith("|"), f"{folder / 'wav.scp'}: {key} is a command, which is not "
                "run; write its output to files (wav-copy)")
    for key in dict.fromkeys([*texts, *(segments or audio)]):
        recording, start, end = (segments.get(key, key).split() + ["", "", ""])[:3]
        row = {"id": key, "audio": audio.get(recording), "text": texts.get(key),
               "speaker": speakers.get(key)}
        if segments:
            row |= {"offset": start, "end": None if end == "-1" else end}
        if key not in texts:
            row = BadSample(f"{key} has no line in text", "empty_text")
        elif segments and key not in segments:
            row = BadSample(f"{key} is not in segments")
        elif recording not in audio:
            row = BadSample(f"{recording!r} is not in wav.scp")
        yield f"utterance {key}", row


# ---- Audio with texts next to it


def walk(folder):
    """(folder, names of its files) of a tree in order, hidden ones left out; links once."""
    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, followlinks=True):
        inside = {os.path.realpath(os.path.join(at, name)): name
                  for name in sorted(folders, reverse=True) if name[0] != "."}
        folders[:] = sorted(name for path, name in inside.items() if path not in seen)
        seen.update(inside)
        yield Path(at), sorted(name for name in names if name[0] != ".")


def read_sidecar(folder):
    """Rows of the clips of a tree; a subfolder is taken for a speaker."""
    for place, names in walk(folder):
        there = {name.lower(): name for name in names}
        known = dict((*line.split(None, 1), "")[:2] for name in names       # LibriSpeech
                     if name.endswith(".trans.txt") for line in lines_of(place / name))
        for name in names:
            stem, sound = os.path.splitext(name)
            base, sound = stem.lower(), sound.lower()
            if sound not in SOUNDS:
                continue
            at = str((place / name).relative_to(folder))
            wanted = [f"{one}{end}" for end in (*CUES, *TEXTS, ".json", ".tsv")
                      for one in (base, f"{base}{sound}")]
            in_a_language = re.escape(base) + r"\.[a-z]{2,3}(-[a-z]+)?\.(srt|vtt)"
            wanted += sorted(one for one in there if re.fullmatch(in_a_language, one))
            text = next((place / there[one] for one in wanted if one in there), None)
            plain = place == folder or place.name.lower() in NO_SPEAKER
            row = {"audio": at, "id": os.path.join(os.path.dirname(at), stem),
                   "speaker": "" if plain else str(place.relative_to(folder))}
            if sound not in AUDIO_FILES:        # refused now, not after hours of encoding
                yield at, BadSample(f"{sound[1:]} is not read; convert it: ffmpeg -i {name} "
                                    f"{stem}.flac", "audio")
            elif stem in known:
                yield at, {**row, "text": known[stem], "speaker": stem.split("-")[0]}
            elif text is None:
                grid = next((there[f"{base}{end}"] for end in (".textgrid", ".eaf")
                             if f"{base}{end}" in there), None)
                more = f"; {grid} is not read: save it as .srt or labels" if grid else ""
                names = ", ".join(stem + end for end in TEXTS)
                yield at, BadSample(f"has no text next to it ({names}){more}", "empty_text")
            else:
                if text.name.endswith(".normalized.txt"):       # LibriTTS: speaker_chapter_...
                    row["speaker"] = stem.split("_")[0]
                try:
                    yield from cuts_of(at, row, text)
                except (BadSample, UserError) as error:
                    yield at, error if isinstance(error, BadSample) else BadSample(error)


def cuts_of(at, row, path):
    """(place, row) of a clip, or of each entry of subtitles, labels, or a recogniser's segments."""
    text, ending, found = json_files.read_text(path), path.suffix.lower(), None
    if ending in CUES:
        found = subtitles(path.name, text)
    elif ending == ".json":
        data = {key.lower(): value for key, value in json_files.read_object(path).items()}
        texts = [data[key] for key in ("text", "transcript", "reference_text") if key in data]
        if isinstance(data.get("segments"), list):      # whisper, whisperX
            found = [(s.get("start"), s.get("end"), s.get("text")) for s in data["segments"]
                     if isinstance(s, dict)]
        elif not texts:
            raise BadSample(f"{path.name} has no text, transcript or reference_text", "empty_text")
        else:
            text, row = str(texts[0]), {**row, "normalize_text": data.get("normalize_text")}
    elif ending == ".tsv":                              # whisper, in milliseconds
        rows = [line.split("\t") for line in text.splitlines() if line.strip()]
        if rows[:1] != [["start", "end", "text"]]:
            raise BadSample(f"{path.name} does not begin with start, end, text")
        found = [(float(cut[0]) / 1000, float(cut[1]) / 1000, cut[2]) for cut in rows[1:]]
    else:
        found = labels(text)
    if found is None:
        yield at, {**row, "text": text}
    for number, cut in enumerate(found or (), 1):
        if not isinstance(cut, BadSample):
            start, end, text = cut
            cut = {**row, "id": f"{row['id']} {start}-{end} s", "text": text, "offset": start,
                   "end": end}
        yield f"{path.name} entry {number}", cut


def seconds_of(text):
    parts = [float(part.replace(",", ".")) for part in text.split(":")]
    return round(sum(part * 60 ** i for i, part in enumerate(reversed(parts))), 3)


TIME = r"(?:\d+:)?\d+:\d+[.,]\d+"
ARROW = re.compile(rf"\s*({TIME})(?:\s*-->\s*({TIME})(?:\s.*)?|\W+{TIME}\s*)")    # or a damaged one
MARKUP = re.compile(r"</?[a-z][a-z0-9.]*(?: [^<>]*)?>|<[\d:.]+>|\{\\[^}]*\}")
NO_WORDS = re.compile(r"\W*|[♪♫].*[♪♫]|\[[^]]*\]|\([^)]*\)")


def subtitles(name, text):
    """[(start, end, words) or BadSample] of SRT or VTT; a cue lasts to the next line of times."""
    cues, skipping = [], False
    for line in text.splitlines():
        if skipping := (line.startswith(("NOTE", "STYLE", "REGION", "WEBVTT"))
                        or skipping and bool(line.strip())):
            continue
        if found := ARROW.fullmatch(line):
            lines = cues[-1][1] if cues else []
            if lines and (lines[-1].isdecimal() or len(lines) > 1 and not lines[-2]):
                lines.pop()                             # the number, or name, of this cue
            cues.append((found, []))
        elif cues:
            cues[-1][1].append(line.strip())
    if not cues:
        raise BadSample(f"{name} has no line 00:00:00.000 --> 00:00:01.000", "empty_text")
    found, before = [], ""
    for times, lines in cues:
        lines = [html.unescape(MARKUP.sub("", line)).strip() for line in lines]
        lines = [line for line in lines if line]
        last = lines[-1] if lines else before
        if len(lines) > 1 and lines[0] == before:       # rolling captions repeat the line before
            lines = lines[1:]
        before, words = last, " ".join(" ".join(lines).split())
        if times[2] is None:
            found.append(BadSample(f"its line of times cannot be read: {times[0].strip()!r}"))
        elif NO_WORDS.fullmatch(words):
            found.append(BadSample(f"says no words ({words!r})", "empty_text"))
        else:
            found.append((seconds_of(times[1]), seconds_of(times[2]), words))
    return found


def labels(text):
    """[(start, end, words)] of Audacity's labels; None for a plain text."""
    number = r"(\d+(?:[.,]\d+)?)(?:\t|(?<=[.,]\d{6}) +)"    # an editor may have replaced its tabs
    # a line that begins with a backslash is a range of Hz of the one before
    found = [re.fullmatch(number * 2 + "(.*)", line)
             for line in text.splitlines() if line.strip() and line[0] != "\\"]
    if not found or not all(found):
        return None
    return [(seconds_of(cut[1]), seconds_of(cut[2]), cut[3].strip()) for cut in found]


# ---- Audio inside other files


class Unpacked:
    """FLAC files of about SHARD_S seconds in `folder`, which take the sound of other files."""

    def __init__(self, folder):
        self.folder, self.open, self.count = Path(folder), {}, 0

    def row(self, row, value):
        """A row with the place of its sound, which is written; BadSample. value: a path, the bytes
        of an audio file, or {array, sampling_rate}.
        """
        if not isinstance(value, (bytes, dict)):
            return {**row, "audio": value}
        if row.get("offset") not in (None, "") or row.get("end") not in (None, ""):
            return BadSample("has an offset into audio that is inside the file: cut it first")
        import numpy as np
        import soundfile

        from speech.codes import open_sound
        try:
            text_of(row)                                # nothing is unpacked in vain
            if isinstance(value, dict):
                wave, rate = np.asarray(value["array"], np.float32), int(value["sampling_rate"])
            else:
                with open_sound(io.BytesIO(value)) as file:
                    wave, rate = file.read(dtype="float32"), file.samplerate
            wave = wave.mean(axis=1) if wave.ndim == 2 else wave
        except BadSample as error:
            return error
        except (ValueError, RuntimeError) as error:     # of open_sound, NumPy and libsndfile
            return BadSample(f"is not readable audio ({error})", "audio")
        file, done = self.open.get(rate, (None, SHARD_S * rate))
        try:        # a full disk is not the fault of this sample
            if done >= SHARD_S * rate:
                if file:
                    file.close()
                self.folder.mkdir(parents=True, exist_ok=True)
                path, self.count = self.folder / f"{self.count:07}.flac", self.count + 1
                file, done = soundfile.SoundFile(path, "w", rate, 1, "PCM_16"), 0
            file.write(wave)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"{self.folder}: sound cannot be written ({error or 'disk full?'})")
        self.open[rate] = file, done + len(wave)
        place = {"audio": str(file.name), "offset": done / rate, "duration": len(wave) / rate}
        return {**row, **place}

    def close(self):
        for file, _ in self.open.values():
            file.close()


def column_batches(path):
    """Record batches of a parquet or an arrow file, or an arrow stream."""
    import pyarrow
    from pyarrow import parquet
    with pyarrow.memory_map(str(path)) as source:
        start = source.read(6)
        source.seek(0)
        if start[:4] == b"PAR1":
            yield from parquet.ParquetFile(source).iter_batches(64)
        elif start == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            yield from map(file.get_batch, range(file.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(source)


def read_columns(path, given, unpacked):
    """Rows of a parquet or arrow file; sound is in the column called so, or in the only one."""
    def row_of(row, number):
        named = find_columns(row, given).get("audio")
        inside = [name for name, value in row.items() if isinstance(value, bytes)
                  or isinstance(value, dict) and {"bytes", "path", "array"} & value.keys()]
        mine = dict(given)
        if inside and named not in inside and "audio" not in given:
            require(len(inside) == 1, f"{path}: has several columns of audio, {', '.join(inside)}; "
                                      "name it: --columns audio=NAME")
            mine["audio"] = inside[0]
        found = {meaning: row[name] for meaning, name in check_columns(path, row, mine).items()}
        value = name = found["audio"]
        if isinstance(value, dict):
            name = value.get("path")
            value = value.get("bytes") or (value if value.get("array") is not None else name)
        name = "" if isinstance(name, bytes) else os.path.basename(name or "")
        return unpacked.row(found | {"id": found.get("id") or name or f"row {number}"}, value)

    rows = (row for batch in column_batches(path) for row in batch.to_pylist())
    for number, row in enumerate(rows, 1):
        yield f"{path.name} row {number}", row_of(row, number)


def read_tar(path, given, unpacked):
    """Rows of a WebDataset shard: members of one name up to the first dot are a sample, where these
    have two clips up to the last.
    """
    def row_of(members):
        row, text, sound = {}, None, None
        for name, data in members:
            if name.lower().endswith(SOUNDS):
                sound = name, data
            elif name.endswith(".json") and isinstance(found := json_files.loads(data), dict):
                row |= {meaning: found[column] for meaning, column
                        in find_columns(found, given).items() if meaning not in ("audio", "id")}
            elif name.endswith(TEXTS) and text is None:
                text = data.decode("utf-8-sig")
        if sound is None:
            return BadSample(f"has no audio file: {', '.join(name for name, _ in members)}")
        row |= {"text": row.get("text") if text is None else text, "id": sound[0]}
        return unpacked.row(row, sound[1])

    def first_dot(member):
        return os.path.join(os.path.dirname(member[0]), os.path.basename(member[0]).split(".")[0])

    with tarfile.open(path, mode="r:") as tar:
        members = ((member.name, tar.extractfile(member).read()) for member in tar
                   if member.isfile() and not os.path.basename(member.name).startswith("."))
        for group in (list(found) for _, found in itertools.groupby(members, key=first_dot)):
            clips, parts = sum(name.lower().endswith(AUDIO_FILES) for name, _ in group), {}
            for member in group:
                parts.setdefault(member[0].rpartition(".")[0] * (clips > 1), []).append(member)
            for part in parts.values():
                try:
                    row = row_of(part)
                except ValueError as error:     # of JSON, or no UTF-8
                    row = BadSample(str(error))
                yield f"{path.name} {part[0][0]}", row
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(512) != bytes(512):     # tarfile takes a cut for the end
            raise EOFError("its end is not there")


# ---- Corpora as their publishers lay them out


def tab_lines(path):
    """(name, text) of lines that only a line feed ends."""
    return ((*line.rstrip("\r").split("\t", 1), "")[:2]
            for line in json_files.read_text(path).split("\n") if line.strip())


def vctk(folder):
    """Take the second of its two microphones, as its authors advise."""
    for text in sorted(folder.glob("txt/*/*.txt")):
        clips = [sorted(folder.glob("wav48*"))[-1] / text.parent.name / f"{text.stem}{end}"
                 for end in ("_mic2.flac", "_mic1.flac", ".flac", ".wav")]
        audio = next((clip for clip in clips if clip.exists()), clips[0])
        yield {"id": text.stem, "audio": str(audio), "text_file": text,
               "speaker": text.parent.name, "language": "en"}


def gigaspeech(folder):
    """Cuts of long recordings; its marks become punctuation, its noises are left out."""
    data = json_files.read_object(folder / "GigaSpeech.json")
    marks = {"COMMA": ",", "PERIOD": ".", "QUESTIONMARK": "?", "EXCLAMATIONPOINT": "!"}
    for audio in data.get("audios") or []:
        for cut in audio.get("segments") or []:
            text, speaker = str(cut.get("text_tn") or ""), cut.get("speaker")
            for mark, sign in marks.items():
                text = text.replace(f" <{mark}>", sign)
            if "<" not in text:
                yield {"id": cut.get("sid"), "audio": audio.get("path"), "text": text,
                       "offset": cut.get("begin_time"), "end": cut.get("end_time"),
                       "speaker": None if speaker == "N/A" else speaker,
                       "language": data.get("language")}


CORPORA = {     # {name: (patterns of names that its folder holds, rows of the folder)}
    "VCTK": (("txt", "wav48.*"), vctk), "GigaSpeech": (("GigaSpeech.json",), gigaspeech),
    "AISHELL-3": (("content.txt", "wav"), lambda folder: (      # after each word is its pinyin
        {"id": Path(name).stem, "audio": f"wav/{name[:7]}/{name}", "speaker": name[:7],
         "language": "zh", "text": "".join(text.split()[::2])}
        for name, text in tab_lines(folder / "content.txt"))),
    "Multilingual LibriSpeech": (("transcripts.txt", "audio"), lambda folder: (
        {"id": name, "audio": f"audio/{'/'.join(name.split('_')[:2])}/{name}",
         "speaker": name.split("_")[0], "text": text}
        for name, text in tab_lines(folder / "transcripts.txt"))),
    "WenetSpeech4TTS": (("txts", "wavs"), lambda folder: (
        {"id": path.stem, "audio": f"wavs/{path.stem}", "language": "zh",
         "text": next(iter(tab_lines(path)), ("", ""))[1]}
        for path in sorted(folder.glob("txts/*.txt"))))}


# ---- What the user gave


def audio_paths(folder):
    """Paths of a folder of speech, where names may omit their ending and the usual subfolder."""
    return Paths(Path(folder).resolve(), inside=INSIDE, endings=SOUNDS)


def open_source(name, given, unpacked):
    """(the list or folder that is read, about, rows) of a file, a folder, or a pattern."""
    path = Path(name)
    if path.is_dir():
        return open_folder(path, given, unpacked)
    if files := [path] if path.exists() else sorted(map(Path, glob.glob(str(name)))):
        return files[0] if len(files) == 1 else path, *open_files(files, given, unpacked)
    require("://" not in str(name), f"{name}: URLs are not read; copy the data here first")
    hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(name)) and not path.suffix
    raise UserError(f"{name}: there is no such file or folder" + (
        f"; on the hub: hf download {name} --repo-type dataset --local-dir FOLDER" if hub else ""))


def kind_of(path):
    """By its first bytes: columns, tar, or "" for text. UserError for other kinds."""
    with json_files.open_file(path) as file:
        head = file.read(512)
    require(head[:2] != b"\x1f\x8b", f"{path}: is compressed; unpack it first (gunzip, tar xzf)")
    require(head[:4] != b"PK\x03\x04", f"{path}: is a zip file: unpack it, or save an "
            "Excel table as CSV")
    require(head[:4] not in (b"RIFF", b"fLaC", b"OggS") and head[:3] != b"ID3",
            f"{path}: is an audio file; give the folder with the texts, or a list of both")
    if head[:4] in (b"PAR1", b"ARRO", b"\xff\xff\xff\xff"):
        return "columns"
    return "tar" if head[257:262] == b"ustar" else ""


def open_files(paths, given, unpacked):
    """(about, rows) of a list, or of files that hold audio and texts, all of one kind."""
    kinds = list(map(kind_of, paths))
    if kinds == [""] and paths[0].suffix not in (".parquet", ".arrow", ".tar"):
        start = next((line.strip() for line in lines_of(paths[0]) if line.strip()), "")
        is_json = start[:1] in ("{", "[") or paths[0].suffix in (".json", ".jsonl")
        return (open_json if is_json else open_table)(paths[0], given)
    for path, kind in zip(paths, kinds):
        require(kind and kind == kinds[0],
                f"{path}: is not a parquet, arrow or tar file like the others")
    if kinds[0] == "columns":
        cli.require_package("pyarrow", f"{paths[0]}: parquet and arrow files")
    read = read_tar if kinds[0] == "tar" else read_columns

    def rows():
        for path in paths:
            try:
                yield from read(path, given, unpacked)
            except (tarfile.TarError, EOFError, OSError,        # and pyarrow's
                    ValueError, NotImplementedError) as error:
                why = f" as a tar ({error}); the file may be cut off" if read == read_tar else \
                    f" ({str(error).partition(chr(10))[0]})"
                raise UserError(f"{path}: cannot be read{why}")
    return f"{len(paths)} {'tar files' if read == read_tar else 'files of columns'}", rows()


def open_folder(folder, given, unpacked):
    """open_source of a folder: the one list in it, or nearest below it; else audio with texts."""
    refused, level = [], [folder]
    for depth in range(DEPTH):
        found = {}
        for place in level:
            found |= lists_in(place, depth, given, unpacked, refused)
        require(len(found) < 2, f"{folder}: holds {len(found)} lists; give one: "
                                + ", ".join(map(str, list(found)[:12])))
        if found:
            return next(iter(found.values()))
        level = [path for place in level for path in sorted(place.iterdir())
                 if path.is_dir() and not path.name.startswith(".")][:200]
    first = next(read_sidecar(folder), None)
    if any(not isinstance(row, BadSample) for _, row in read_sidecar(folder)):
        return folder, "audio files with their texts next to them", read_sidecar(folder)
    require(first, str(refused[0]) if refused else
            f"{folder}: has neither a list nor audio files ({', '.join(AUDIO_FILES)})")
    why = f"; of the files there: {refused[0]}" if refused else ""
    raise UserError(f"{folder}: has audio, such as {printable(first[0], 80)}, but no list of "
                    f"texts; it {first[1]}{why}")


def lists_in(place, depth, given, unpacked, refused):
    """{path to give: open_source of it} of one folder; refused takes why others are not read."""
    names = sorted(path.name for path in place.iterdir())
    require("raw.arrow" not in names, f"{place}: is F5-TTS's prepared folder; give its csv")
    for name, (needs, read) in CORPORA.items():
        if all(any(re.fullmatch(one, there) for there in names) for one in needs):
            rows = ((f"row {number}", row) for number, row in enumerate(read(place), 1))
            return {place: (place, name, rows)}
    if {"wav.scp", "text"} <= set(names):
        return {place: (place, "Kaldi", read_kaldi(place))}
    if "dataset_dict.json" in names:
        splits = json_files.read_object(place / "dataset_dict.json").get("splits") or ["?"]
        raise UserError(f"{place}: holds the splits {', '.join(map(str, splits))}; give one: "
                        f"{place / str(splits[0])}")
    found, shards = {}, {}
    saved = {"state.json", "dataset_info.json"} <= set(names)       # by datasets' save_to_disk
    for name in names:
        if name.endswith((".parquet", ".tar") + (".arrow",) * saved) and name[0] != ".":
            split = "" if saved or name.endswith(".tar") else re.split("[-_]", name)[0] + "-"
            shards.setdefault(place / f"{split}*{Path(name).suffix}", []).append(place / name)
    for path, files in shards.items():
        found[path] = (path, *open_files(files, given, unpacked))
    spoken = {name.split(".")[0] for name in names
              if name.lower().endswith(SOUNDS)}
    lists = [name for name in names if name.lower().endswith(LISTS)
             and name.split(".")[0] not in spoken and not name.endswith(".trans.txt")
             and (place / name).is_file()]
    texts = any(name.split(".")[0] in spoken for name in names if name.endswith(TEXTS))
    if len(lists) > 100 or texts and depth or saved:        # a folder of texts
        lists = [name for name in lists if name.startswith("metadata.")]
    for path in (place / name for name in lists):
        try:
            found[path] = (path, *open_files([path], given, unpacked))
        except Undecided:
            raise
        except UserError as error:
            refused.append(error)
    return found


# ---- Rows -> ChatML


def checked(row, paths, plain):
    """A row whose audio is there, by its absolute path, and whose text is one. Raises BadSample.
    paths: of a list's audio; plain: of ChatML's.
    """
    if isinstance(row, BadSample):
        raise row
    if "messages" in row:
        for item in content_items(row):
            for key in ("audio_url", "url", "path"):
                if isinstance(item, dict) and item.get("type") == "audio" and isinstance(
                        item.get(key), str):
                    item[key] = plain.find(item[key])
        return row
    name, speakers = row.get("audio"), row.get("ref_speakers")
    if not isinstance(name, str) or not name.strip():
        raise BadSample(f"has no audio, but {name!r}")
    row = {**row, "text": text_of(row), "audio": paths.find(name), "name": name, "text_file": None}
    for of, key in [(row, "ref_audio"), *((one, "ref_audio_file") for one in (
            speakers if isinstance(speakers, list) else ()) if isinstance(one, dict))]:
        if isinstance(of.get(key), str) and of[key]:
            of[key] = paths.find(of[key])
    audio_item(row)
    return row


def row_entry(row, reading, pool, paths):
    """(raw ChatML sample, [(check, note)]) of a row; pool: of note_candidate. Raises BadSample."""
    notes, task = [], row.get("task_type")
    if task in (None, "", "audio_generation"):      # JimmyMa99's converter writes it everywhere
        task = reading.task_type
    if task not in TASK_TYPES:
        raise BadSample(f"unknown task_type {task!r}; known: {', '.join(TASK_TYPES)}")
    text, references = row["text"], chosen_references(row, task, reading, pool, paths, notes)
    for value in [value for *words, _ in references for value in words]:
        if not isinstance(value, str):
            raise BadSample(f"a reference's tag or transcript is {value!r}, not text")
    scene = row.get("scene")
    scene = f"Audio is recorded from {str(scene).replace('_', ' ')}." if scene else ""
    turns = []
    if reading.ref_in_system and references:
        system = [DEFAULT_SYSTEM, "\n\n<|scene_desc_start|>\n" + f"{scene}\n\n" * bool(scene)]
        for i, (tag, _, audio) in enumerate(references):
            system += ["\n" * bool(i) + f"{tag.strip('[] ') or 'SPEAKER0'}:", audio]
        system.append("\n<|scene_desc_end|>")
    else:
        voices = row.get("voices") if isinstance(row.get("voices"), dict) else {}
        words, scene = system_parts(text, scene, voices, bool(references))
        system = [words] + ["\n\n" + SCENE.format(scene)] * bool(scene)
        for tag, transcript, audio in references:
            words = tag + transcript.strip()
            turns += [{"role": "user", "content": words}] * bool(words)
            turns.append({"role": "assistant", "content": audio})
    system = [{"type": "text", "text": part} if isinstance(part, str) else part for part in system]
    kept = {name: row.get(name) for name in ("speaker", "language", "split", "normalize_text")}
    return {"messages": [{"role": "system", "content": system}, *turns,
                         {"role": "user", "content": text},
                         {"role": "assistant", "content": audio_item(row)}],
            **kept, "misc": {"sample_id": row.get("id")}}, notes


def read_text(path, name=""):
    """Text of a file. name: the key that names it, for the BadSample."""
    try:
        return json_files.read_text(Path(path), name and f"{name} ").strip()
    except UserError as error:
        raise BadSample(error)


def text_of(row):
    """The text to speak of a row. Raises BadSample when there is none."""
    text = row.get("text")
    if "text_name" in row and not row["text_file"]:
        raise BadSample(f"has no {row['text_name']!r}")
    if row.get("text_file"):
        text = read_text(row["text_file"], row.get("text_name", ""))
    if text is not None and not isinstance(text, str):
        raise BadSample(f"its text is {text!r}, not text")
    # ms-swift's placeholder, kept by some converters
    text = tagged((text or "").replace("<audio>", "").strip())
    if text.lower() in NOTHING:
        raise BadSample(f"its text is {text!r}" if text else "its text is empty", "empty_text")
    if len(text) > json_files.LONGEST:                 # the tokenizer would end this process
        raise BadSample(f"its text is longer than {json_files.LONGEST >> 20} MiB")
    return text


def tagged(text):
    """Text with "Speaker 3:" before its lines -> "[SPEAKER0]", or without it where one speaks."""
    spoken = SPOKEN_BY.findall(text)
    if not spoken or not SPOKEN_BY.match(text):
        return text
    numbers = {number: i for i, number in enumerate(dict.fromkeys(spoken))}
    alone = len(numbers) == 1
    return SPOKEN_BY.sub("" if alone else lambda m: f"[SPEAKER{numbers[m[1]]}] ", text)


def audio_item(row):
    """ChatML audio item of a row. Its offset makes it a cut, up to its end if that is known."""
    offset, duration, end = (number_of(row, key) for key in ("offset", "duration", "end"))
    if offset is None and end is not None and end >= 0:
        offset = 0.0
    if end is not None and offset is not None:
        duration = end - offset if end >= 0 else None       # Kaldi's -1: to the end of the file
        if duration is not None and duration <= 0:
            raise BadSample(f"ends at {end} s, where it does not last: it begins at {offset} s")
    return {"type": "audio", "audio_url": row["audio"], "offset": offset, "duration": duration}


def number_of(row, key):
    value = row.get(key)
    if value in (None, ""):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadSample(f"its {key} is {value!r}, not seconds")
    return number if math.isfinite(number) else None


# ---- References


def chosen_references(row, task, reading, pool, paths, notes):
    """[(tag, transcript, audio item)] before the text of a row, as --reference says."""
    drawn = share_of("share", row, reading.seed) < reading.reference_share
    if reading.reference == "none" or not drawn:
        return []
    if reading.reference == "same_speaker":
        if chosen := another_clip(row, pool, reading.seed):
            return [("", chosen["text"], audio_item(chosen))]
        notes.append(("no_second_clip", f"its speaker {row.get('speaker')!r} has no other clip"))
        return []
    if task == "multi_speaker_voice_cloning":
        found, speakers = [], row.get("ref_speakers")
        for one in speakers if isinstance(speakers, list) else []:
            if not (isinstance(one, dict)
                    and one.get("ref_audio_file") and one.get("ref_transcript")):
                raise BadSample("a ref_speakers entry needs 'ref_audio_file' and 'ref_transcript'")
            tag = str(one.get("speaker_tag") or f"SPEAKER{len(found)}").strip("[]")
            audio = audio_item({"audio": one["ref_audio_file"]})
            found.append((f"[{tag}] ", one["ref_transcript"], audio))
        if not found:
            raise BadSample("multi_speaker_voice_cloning needs a list 'ref_speakers'")
        return found
    audio, text = row.get("ref_audio"), row.get("ref_text")
    if "ref_speakers" in row:       # a metadata.json, where the task type decides
        if task != "zero_shot_voice_cloning":
            if audio or row["ref_speakers"]:
                notes.append(("unused_reference", f"{task} uses no reference clips"))
            return []
        if not (audio and text):
            raise BadSample("zero_shot_voice_cloning needs 'ref_audio_file' and 'ref_transcript'")
    if not audio and not row.get("voice_prompts"):
        return []
    if audio and not text:
        path = Path(paths.find(audio)).with_suffix(".txt")
        text = read_text(path) if path.is_file() else ""
    if audio and (text or reading.lone_reference):
        return [("", text or "", audio_item({"audio": audio}))]
    notes.append(("no_reference_text", f"what its reference {audio!r} says is not known"))
    return []


def share_of(what, row, seed):
    """Number from 0 to 1 that belongs to a row, whatever the order of the rows."""
    key = f"{seed}\0{what}\0{row['name']}\0{row.get('offset')}".encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64


def note_candidate(pool, row, reading, number):
    """Take row `number` into {speaker: heap of CANDIDATES clips}: those of a good length first."""
    if reading.reference != "same_speaker" or not row.get("speaker"):
        return
    seconds = audio_item(row)["duration"]
    odd = bool(seconds) and not GOOD_SECONDS[0] <= seconds <= GOOD_SECONDS[1]
    entry = (-odd, -share_of("candidate", row, reading.seed), number, row)
    heap = pool.setdefault(str(row["speaker"]), [])
    heapq.heappush(heap, entry)
    if len(heap) > CANDIDATES:
        heapq.heappop(heap)     # the worst one


def another_clip(row, pool, seed):
    """Row of another clip of a row's speaker, chosen by the row itself; None where is none."""
    mine = row["name"], row.get("offset")
    found = sorted(pool.get(str(row.get("speaker")), ()), reverse=True)
    others = [other for *_, other in found if (other["name"], other.get("offset")) != mine]
    return others[int(share_of("reference", row, seed) * len(others))] if others else None


# ---- A whole source


def made_of(source, how):
    """Key by which a source is unpacked again: its files, their sizes and dates; [] if none."""
    path = Path(source)
    files = sorted(path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(source))))
    stats = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files
             if file.suffix in (".parquet", ".arrow", ".tar")]
    return [*stats, *how] if stats else []


def is_held_out(row):
    return str(row.get("split")).strip().lower() in HELD_OUT


def to_chatml(source, out_path, problems, *, held_out=False, **how):
    """Write a source of any format as ChatML .jsonl. UserError where nothing can be read.

    problems: a list that takes the Problems of rows that cannot be used. held_out: whether
    validation data is asked for: rows whose `split` says so are that alone. how: of Reading.
    """
    from core import checkpoint         # they import torch, which --help needs not
    from core.problems import problem
    out_path, reading = Path(out_path), Reading(**how)
    given = dict(pair.split("=", 1) for pair in reading.columns.split(",") if pair)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    note, made = out_path.with_suffix(".source"), made_of(source, [held_out, vars(reading)])
    if made and note.exists() and out_path.exists():
        saved = json_files.read_object(note)
        if saved["made"] == made:
            print(f"converted  {printable(source)}: as before, {out_path}", flush=True)
            problems += [problem(*row, source) for row in saved["refused"]]
            return
    note.unlink(missing_ok=True)
    unpacked = Unpacked(out_path.with_suffix(".audio"))
    at, about, rows = open_source(source, given, unpacked)
    base = (at if at.is_dir() else at.parent).resolve()
    paths, plain = audio_paths(base), Paths(base)
    refused, texts, odd, pool = [], Counter(), {}, {}
    number = other = kept = 0
    marked, first = False, ""

    def note_odd(what, example):
        odd.setdefault(what, [0, example])[0] += 1

    with tempfile.TemporaryFile("w+", encoding="utf-8", dir=out_path.parent) as scratch:
        # all rows first: their values decide whether the columns are what they seem
        for place, row in rows:
            name = f"{at} {place}"
            if isinstance(row, dict):
                label, raw = label_of(row), row.get("audio")
                name += f" ({printable(label, 80)})" if label else ""
                marked = marked or is_held_out(row)
                if is_held_out(row) and not held_out:
                    other += 1
                    continue
            try:
                row = checked(row, paths, plain)
            except BadSample as error:
                refused.append(problem(name, error.check, error, source))
                continue
            if "messages" not in row:
                number += 1
                texts[row["text"]] += 1
                for what, pattern in ODD.items():
                    if pattern.search(row["text"]):
                        note_odd(what, row["text"])
                if not os.path.isabs(raw) and not Path(row["audio"]).is_relative_to(base):
                    note_odd(OUTSIDE, row["audio"])
                note_candidate(pool, row, reading, number)
            scratch.write(json.dumps([name, row], default=str) + "\n")
        unpacked.close()
        for text, most in texts.most_common(1):
            require(number < 8 or most <= number / 2, f"{source}: {most} of {number} texts are "
                    f"equal, {text[:60]!r}: hardly the spoken words; name the column: --columns "
                    "text=NAME")
            require(not phonemes(list(itertools.islice(texts, 1000))),
                    f"{source}: its texts are phonemes, such as {text[:60]!r}: {PHONEMES}")
        scratch.seek(0)

        def write(path):
            nonlocal first, kept, other
            with open(path, "w", encoding="utf-8") as out:
                for name, row in map(json.loads, scratch):
                    if held_out and marked and not is_held_out(row):
                        other += 1
                        continue
                    notes = []
                    try:
                        if "messages" not in row:
                            row, notes = row_entry(row, reading, pool, paths)
                    except BadSample as error:
                        refused.append(problem(name, error.check, error, source))
                        continue
                    misc = row.get("misc") if isinstance(row.get("misc"), dict) else {}
                    row["misc"] = {**misc, "source": name} | ({"notes": notes} if notes else {})
                    if not kept:
                        with contextlib.suppress(BadSample):
                            first = sample_text(canonical_sample(name, row, plain))
                    out.write(json.dumps(row) + "\n")
                    kept += 1
        checkpoint.write_atomically(out_path, write)
    if made:
        rows = [[p.name, p.check, p.what] for p in refused]
        checkpoint.write_text(note, json.dumps({"made": made, "refused": rows}))
    counts = sorted(Counter(p.check for p in refused).items())
    counts = ", ".join(f"{n} {check}" for check, n in counts)
    lines = [f"converted  {printable(source)} ({printable(about)}): {kept + len(refused)} rows = "
             f"{kept} kept + {len(refused)} refused{f' ({counts})' * bool(counts)}; {out_path}"
             + f"; {other} are of another split" * bool(other)]
    lines += [f"           first: {printable(first)}"] if first else []
    for what, (n, one) in odd.items():
        noun = counted(n, "row" if what == OUTSIDE else "text")
        lines.append(f"           {noun} {what}, such as {printable(one)[:60]!r}")
    problems.extend(refused)
    print("\n".join(lines), flush=True)


def main(argv=None):
    p = cli.Parser("Speech data of any format -> ChatML .jsonl.")
    p.add_argument("source", help="file, folder, or pattern of shards in quotes")
    p.add_argument("--output", required=True, help="the .jsonl to write")
    p.add_argument("--columns", default="", metavar="MEANING=NAME,...", help="columns of other "
                   "names, or by number where there is no header: audio=clip,text=caption; "
                   f"meanings are {', '.join(COLUMNS)}")
    args = cli.parse(p, lambda args, _: choices.check_columns(args.columns), argv)
    try:
        to_chatml(args.source, args.output, problems := [], columns=args.columns)
        print(*problems[:20], sep="\n")
    except UserError as error:
        sys.exit(error_text(f"error: {error}"))


if __name__ == "__main__":
    main()
