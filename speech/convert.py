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
import functools
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
from core.cli import UserError, plural, error_text, first_line, one_line, require
from speech import choices
from speech.choices import COLUMNS, TASK_TYPES
from speech.conversations import (AUDIO_FILES, DEFAULT_SYSTEM, SCENE, BadSample, Paths, Reading,
                                  canonical_sample, content_items, is_chatml, label_of, sample_text,
                                  system_parts)

NOT_READ = (".m4a", ".aac", ".mp4", ".webm", ".wma", ".amr")        # by libsndfile
SOUNDS = AUDIO_FILES + NOT_READ
TEXTS = (".normalized.txt", ".txt", ".lab")
NEXT_TO = (".srt", ".vtt", *TEXTS, ".json", ".tsv")      # next to audio; the first that is there
LISTS = (".json", ".jsonl", ".csv", ".tsv", ".list", ".lst", ".txt")
SEPARATORS = "\t,;|"
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
OUTSIDE = "name audio that is not below the folder of the list"
PHONEMES = "give the texts of which they were made, Higgs-Audio does not read these"
SPOKEN_BY = re.compile(r"^\s*Speaker\s+(\d+)\s*:\s*", re.I | re.M)     # as VibeVoice writes it
CANDIDATES = 64         # clips of a speaker among which references are chosen
GOOD_SECONDS = (3, 15)  # of a reference, where the data say how long clips are
SHARD_S = 600           # of sound in a FLAC file that audio is unpacked into
DEPTH, LOOK = 3, 20     # levels of folders, and rows, that are looked through


class Undecided(UserError):
    """A table is one of speech, but what its columns mean is not certain."""


# ---- Lists. Readers yield (place, entry). place: "line 7". entry: a dict by the names of columns,
# or the BadSample that says why there is none. Rows are (place, dict with keys of COLUMNS)


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


def rows_of(path, entries, given):
    """Rows of entries; UserError without columns of audio and text, or one that --columns names."""
    entries = iter(entries)
    first = list(itertools.islice(entries, LOOK))
    names = list(dict.fromkeys(name for _, one in first if isinstance(one, dict) for name in one))
    if first and "messages" not in names:
        found = find_columns(names, given)
        there = f"its columns are {', '.join(str(name)[:40] for name in names[:20])}"
        for meaning, name in given.items():
            require(meaning in found,
                    f"{path}: has no column as --columns {meaning}={name} says; {there}")
        lost = [meaning for meaning in ("audio", "text") if meaning not in found]
        known = "; ".join(f"of {one} are {COLUMNS[one].replace(' ', ', ')}" for one in lost)
        require(not lost, f"{path}: has no column of {' and none of '.join(lost)}; {there}; known "
                f"names {known}; name yours: --columns {','.join(f'{one}=NAME' for one in lost)}")
    columns = functools.cache(lambda names: find_columns(names, given).items())

    def row_of(entry):
        if not isinstance(entry, dict) or is_chatml(entry):
            return entry
        if isinstance(entry.get("messages"), list):
            return swift_row(entry)
        return {meaning: entry.get(name) for meaning, name in columns(tuple(entry))}
    return ((place, row_of(entry)) for place, entry in itertools.chain(first, entries))


def swift_row(entry):
    """Row of ms-swift: texts with <audio> in them, and a list of the audio."""
    messages, clips = entry["messages"], entry.get("audios") or entry.get("audio") or []
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        return BadSample("has no list 'messages' of texts")
    clips = clips if isinstance(clips, list) else [clips]
    answers = [m["content"] for m in messages if m.get("role") == "assistant"]
    requests = [m["content"] for m in messages if m.get("role") == "user"]
    spoken = "".join(answers).count("<audio>")
    asked = sum(m["content"].count("<audio>") for m in messages) - spoken
    if asked and not spoken:
        return BadSample("its <audio> is the user's: that is speech to understand, not to speak")
    if spoken > 1 or asked or len(clips) != 1 or not answers:
        return BadSample(f"{asked + spoken} <audio> and {len(clips)} audios, not one spoken clip")
    ref = entry.get("ref_audios")
    kept = {key: entry.get(key) for key in ("id", "speaker", "language", "split", "ref_text")}
    ref = ref[0] if isinstance(ref, list) and ref else ref
    return {**kept, "audio": clips[0], "ref_audio": ref,
            "text": answers[-1].replace("<audio>", "").strip() or (requests or [""])[-1]}


def metadata_row(folder, raw):
    """Row of a metadata.json of the GUIs, whose paths may leave out train/ and eval/."""
    if not isinstance(raw, dict):
        return raw
    row = {meaning: raw[name] for meaning, name in find_columns(raw, {}).items()}
    row |= {"text": raw.get("transcript_file"), "ref_speakers": raw.get("ref_speakers") or [],
            "task_type": raw.get("training_task_type") or raw.get("task_type")}
    for key in ("audio", "text", "ref_audio"):
        name = str(row.get(key))
        moved = os.path.join(folder, str(raw.get("split")), name)
        if os.path.exists(moved) and not os.path.exists(folder / name):
            row[key] = moved
    return row | {"text": folder / str(row["text"]) if row["text"] else None}


def lines_of(path):
    """Lines of a UTF-8 file without their ends; UserError names the first that is not."""
    with json_files.open_file(path) as file:
        for number, line in enumerate(json_files.lines(file, path), 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise UserError(f"{path}: line {number} {json_files.NOT_UTF8}")


def fields_of(line, separator, header=True):
    """Fields of a line. Quotes that do not fit are text; without a header, so are those that
    Python's csv module would not write: LJSpeech's are text, Piper's are not."""
    if '"' in line:
        with contextlib.suppress(csv.Error):
            how = {"delimiter": separator, "strict": True, "skipinitialspace": True}
            fields, again = next(csv.reader([line], **how)), io.StringIO()
            csv.writer(again, lineterminator="", **how).writerow(fields)
            if header or again.getvalue() == line:
                return fields
    return line.split(separator)


def read_table(path, separator, names, header):
    """Entries of a table. In CSV with a header a field in quotes may go over several lines."""
    rows, line = (fields_of(text, separator, header) for text in lines_of(path)), 1
    skip = header
    if header and separator == ",":
        lines = (text + "\n" for text in lines_of(path))
        rows = csv.reader(lines, strict=True, skipinitialspace=True)
    try:
        for fields in rows:
            fields, place = [field.strip() for field in fields], f"line {line}"
            line = getattr(rows, "line_num", line) + 1
            if skip and any(fields):            # these are the names
                skip = False
            elif len(fields) == len(names) and any(fields):
                row = dict(zip(names, fields))
                if not header and row.get("normalised"):
                    row["text"] = row["normalised"]
                yield place, row
            elif any(fields):
                yield place, BadSample(f"has {len(fields)} fields, not {len(names)}: "
                                       f"{separator.join(fields)[:80]!r}")
    except csv.Error as error:
        raise UserError(f"{path}: its quotes do not fit in the row that begins at line {line} "
                        f'({error}); write one inside a field twice: "so ""it"" is"')


def open_table(path, given):
    head = [line for line in itertools.islice(lines_of(path), 10 * LOOK) if line.strip()][:LOOK]
    require(head, f"{path}: is empty")
    headers = [(separator, [name.strip() for name in fields_of(head[0], separator)])
               for separator in SEPARATORS]
    separator, names = max(headers, key=lambda header: len(find_columns(header[1], given)))
    header = not all(map(str.isdecimal, given.values())) if given else find_columns(names, {})
    if not header:
        separator, names = headerless(path, head, given)
        given = {}
    columns = ", ".join(meaning if meaning == name else f"{meaning} = {name!r}"
                        for meaning, name in find_columns(names, given).items())
    entries = read_table(path, separator, names, bool(header))
    return f"a table of {columns} between {separator!r}", rows_of(path, entries, given)


def headerless(path, head, given):
    """(separator, names) of lines of 2 to 4 fields; what they are is judged over all rows."""
    paths, why = audio_paths(path), f"nor 2 to 4 fields as all others: {head[0][:80]!r}"
    at = int(given.get("audio", 1)) - 1
    for separator in SEPARATORS:
        rows = [fields_of(line, separator, False) for line in head]
        width = len(rows[0])
        if at < width and 2 <= width <= 4 and all(len(row) == width for row in rows):
            if sum(bool(paths.look_up(row[at].strip())) for row in rows) >= 0.9 * len(rows):
                break
            why = (f"and its first field names no audio files: {rows[0][at].strip()[:80]!r} is not "
                   f"there; looked in {', '.join(paths.folders)}")
    else:
        raise UserError(f"{path}: is not a table that is known: its first line has neither columns "
                        f"of audio and of text, {why}; give it a first line: audio,text")
    if given:
        numbers = {int(number): meaning for meaning, number in given.items()} | {at + 1: "audio"}
        return separator, [numbers.get(number, f"{number}") for number in range(1, width + 1)]
    rows = read_table(path, separator, range(width), False)
    rows = [list(row.values()) for _, row in rows if isinstance(row, dict)]
    return separator, meanings_of(path, rows)


def meanings_of(path, rows):
    """The meaning of each field of a table without a header; Undecided where it is open."""
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
        return (found.split() + ["", ""])[:len(columns)]
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
    """Rows of wav.scp, text and maybe segments, utt2spk; a command in wav.scp is never run."""
    def pairs(name):
        found = {}
        for number, line in enumerate(lines_of(folder / name), 1):
            key, value = (*line.split(None, 1), "", "")[:2]
            require(key not in found, f"{folder / name}: line {number} has {key!r} again")
            if key:
                found[key] = value.strip()
        return found
    audio, texts, segments, speakers = (pairs(name) if (folder / name).exists() else {}
                                        for name in ("wav.scp", "text", "segments", "utt2spk"))
    for key, where in audio.items():
        require(where[-1:] != "|", f"{folder / 'wav.scp'}: {key} is a command: run wav-copy first")
    for key in dict.fromkeys([*texts, *(segments or audio)]):
        recording, start, end = (segments.get(key, key).split() + [None, None])[:3]
        row = {"id": key, "audio": audio.get(recording), "text": texts.get(key),
               "speaker": speakers.get(key), "offset": start, "end": end}
        if key not in texts:
            row = BadSample(f"{key} has no line in text", "empty_text")
        elif recording not in audio or segments and key not in segments:
            row = BadSample(f"{key} is not in segments, or {recording} not in wav.scp")
        yield f"utterance {key}", row


# ---- Audio with texts next to it


def read_sidecar(folder):
    """Rows of the clips of a tree; each subfolder is a speaker."""
    seen = set()        # links may lead to a folder twice, or round
    for place, folders, names in os.walk(folder, followlinks=True):
        new = (real := os.path.realpath(place)) not in seen
        seen.add(real)
        folders[:] = sorted(name for name in folders if new and name[0] != ".")
        names = sorted(name for name in names if new and name[0] != ".")
        place, there = Path(place), {name.lower(): name for name in names}
        spoken = {key: name for name in sorted(there, reverse=True)         # talk.en.srt
                  for key in re.findall(r"(.+)\.[a-z]{2,3}(?:-[a-z]+)?\.(?:srt|vtt)$", name)}
        known = dict((*line.split(None, 1), "")[:2] for name in names       # LibriSpeech
                     if name.endswith(".trans.txt") for line in lines_of(place / name))
        plain = place == folder or place.name.lower() in NO_SPEAKER
        for name in names:
            stem, sound = os.path.splitext(name)
            if sound.lower() not in SOUNDS:
                continue
            at = str((place / name).relative_to(folder))
            row = {"audio": at, "id": os.path.splitext(at)[0],
                   "speaker": "" if plain else str(place.relative_to(folder))}
            wanted = [one + end for end in NEXT_TO for one in (stem.lower(), name.lower())]
            text = next((one for one in wanted if one in there), spoken.get(stem.lower()))
            try:
                entries = entries_of(place / there[text]) if text else [BadSample(
                    f"has no text next to it ({', '.join(wanted[::2])})", "empty_text")]
            except UserError as error:
                entries = [BadSample(error)]
            if stem in known:
                entries, row["speaker"] = [{"text": known[stem]}], stem.split("-")[0]
            elif text and text.endswith(".normalized.txt"):     # LibriTTS: speaker_chapter_...
                row["speaker"] = stem.split("_")[0]
            for number, entry in enumerate(entries, 1):
                yield f"{there[text]} entry {number}" if text else at, \
                    row | entry if isinstance(entry, dict) else entry


def entries_of(path):
    """[columns, or BadSample, of each entry] of a text next to audio; a plain text is one entry."""
    text, ending, unit = json_files.read_text(path), path.suffix.lower(), 1
    if ending in (".srt", ".vtt"):
        return subtitles(text)
    if ending == ".json":
        data = {key.lower(): value for key, value in json_files.read_object(path).items()}
        if isinstance(data.get("segments"), list):      # whisper, whisperX
            return [{"offset": cut.get("start"), "end": cut.get("end"), "text": cut.get("text")}
                    for cut in data["segments"] if isinstance(cut, dict)]
        texts = [data[key] for key in ("text", "transcript", "reference_text") if key in data]
        return [{"text": (texts or [""])[0], "normalize_text": data.get("normalize_text")}]
    # a line that begins with a backslash is a range of Hz of the label before
    lines = [line for line in text.splitlines() if line.strip() and line[0] != "\\"]
    if lines[:1] == ["start\tend\ttext"]:               # whisper's .tsv, in milliseconds
        lines, unit = lines[1:], 1000
    labels = [LABEL.fullmatch(line) for line in lines]
    if not labels or not all(labels):
        return [{"text": text} if ending != ".tsv" else BadSample("has no start, end, text")]
    return [{"offset": seconds_of(found[1]) / unit, "end": seconds_of(found[2]) / unit,
             "text": found[3].strip()} for found in labels]


def seconds_of(text):
    parts = [float(part.replace(",", ".")) for part in text.split(":")]
    return round(sum(part * 60 ** i for i, part in enumerate(reversed(parts))), 3)


NUMBER = r"(\d+(?:[.,]\d+)?)(?:\t|(?<=[.,]\d{6}) +)"    # an editor may have replaced its tabs
LABEL = re.compile(NUMBER * 2 + "(.*)")                 # of Audacity, whisper
TIME = r"(?:\d+:)?\d+:\d+[.,]\d+"
ARROW = re.compile(rf"^({TIME})(?:[ \t]*-->[ \t]*({TIME})(?:[ \t].*)?|[^\w\n]+{TIME})$", re.M)
COMMENT = re.compile(r"(?:\A|(?<=\n\n))(?:WEBVTT|NOTE|STYLE|REGION)\b.*(?:\n.+)*")
MARKUP = re.compile(r"</?[a-z][a-z0-9.]*(?: [^<>]*)?>|<[\d:.]+>|\{\\[^}]*\}")
NO_WORDS = re.compile(r"\W*|[♪♫].*[♪♫]|\[[^]]*\]|\([^)]*\)")


def subtitles(text):
    """entries_of SRT or VTT; a cue lasts to the next line of times, whose arrow may be damaged."""
    text = COMMENT.sub("", "\n".join(map(str.strip, text.splitlines())))
    found, before, entries = ARROW.split(text)[1:], "", []
    if not found:
        return [BadSample("has no line 00:00:00.000 --> 00:00:01.000", "empty_text")]
    for i in range(0, len(found), 3):
        start, end, lines = found[i], found[i + 1], found[i + 2].split("\n")[1:]
        if i + 3 < len(found) and (lines := lines[:-1]) and (
                lines[-1].isdecimal() or len(lines) > 1 and not lines[-2]):
            lines.pop()                                 # the number, or name, of the next cue
        lines = [html.unescape(MARKUP.sub("", line)).strip() for line in lines]
        lines = [line for line in lines if line]
        rolled = len(lines) > 1 and lines[0] == before  # captions that repeat the line before
        before, words = lines[-1] if lines else before, " ".join(" ".join(lines[rolled:]).split())
        if end is None:
            entries.append(BadSample(f"its line of times cannot be read: it begins with {start}"))
        elif NO_WORDS.fullmatch(words):
            entries.append(BadSample(f"says no words ({words!r})", "empty_text"))
        else:
            entries.append({"offset": seconds_of(start), "end": seconds_of(end), "text": words})
    return entries


# ---- Audio inside other files


def read_columns(path):
    """Entries of a parquet or arrow file, or of an arrow stream, as datasets writes them."""
    import pyarrow
    from pyarrow import parquet
    with pyarrow.memory_map(str(path)) as source:
        start = source.read(6)
        source.seek(0)
        if start[:4] == b"PAR1":
            batches = parquet.ParquetFile(source).iter_batches(64)
        elif start == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            batches = map(file.get_batch, range(file.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(source)
        for number, entry in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{path.name} row {number}", entry


def read_tar(path):
    """Entries of a WebDataset shard: files of one name up to the first dot are a sample, or where
    these have several clips, up to the last."""
    with tarfile.open(path, mode="r:") as tar:
        files = ((member.name, tar.extractfile(member).read()) for member in tar
                 if member.isfile() and not os.path.basename(member.name).startswith("."))
        groups = itertools.groupby(files, lambda file: re.match("(?:.*/)?[^.]*", file[0])[0])
        for group in (list(group) for _, group in groups):
            clips, parts = sum(name.lower().endswith(SOUNDS) for name, _ in group), {}
            for name, data in group:
                parts.setdefault(name.rpartition(".")[0] * (clips > 1), {})[name] = data
            for part in parts.values():
                entry, found = {}, {}
                try:
                    for name, data in part.items():
                        if name.lower().endswith(SOUNDS):
                            found |= {"audio": data, "id": name}
                        elif name.endswith(".json"):
                            about = json_files.loads(data)
                            entry |= about if isinstance(about, dict) else {}
                        elif name.endswith(TEXTS):
                            found.setdefault("text", data.decode("utf-8-sig"))
                    entry |= found
                except ValueError as error:     # no JSON, or no UTF-8
                    entry = BadSample(error)
                yield f"{path.name} {next(iter(part))}", entry
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(512) != bytes(512):     # tarfile takes a cut for the end
            raise EOFError("its end is not there")


def unpacked(rows, folder):
    """Rows whose audio is a path: bytes of a file, or {array, sampling_rate}, are written to FLAC
    files of about SHARD_S seconds in `folder`."""
    import numpy as np
    import soundfile

    from speech.codes import open_sound
    files, number = {}, 0       # files: {rate: (SoundFile, path, samples in it)}
    for place, row in rows:
        audio = row.get("audio") if isinstance(row, dict) else None
        if isinstance(audio, dict):
            name = audio.get("path")
            row["id"] = row.get("id") or os.path.basename(str(name or ""))
            audio = audio.get("bytes") or (name if audio.get("array") is None else audio)
            row["audio"] = audio
        if not isinstance(audio, (bytes, dict)):
            yield place, row
            continue
        try:
            if any(row.get(key) not in (None, "") for key in ("offset", "end")):
                raise BadSample("has an offset into audio that is inside the file: cut it first")
            text_of(row)                                # nothing is unpacked in vain
            if isinstance(audio, dict):
                wave, rate = np.asarray(audio["array"], np.float32), int(audio["sampling_rate"])
            else:
                with open_sound(io.BytesIO(audio)) as sound:
                    wave, rate = sound.read(dtype="float32"), sound.samplerate
        except BadSample as error:
            yield place, error
            continue
        except (KeyError, TypeError, ValueError, RuntimeError) as error:    # libsndfile's, NumPy's
            yield place, BadSample(f"is not readable audio ({error})", "audio")
            continue
        file, path, start = files.get(rate, (None, None, math.inf))
        try:        # a full disk is not the fault of this sample
            if start >= SHARD_S * rate:
                if file:
                    file.close()
                folder.mkdir(parents=True, exist_ok=True)
                path, number = folder / f"{number:07}.flac", number + 1
                file, start = soundfile.SoundFile(path, "w", rate, 1, "PCM_16"), 0
            file.write(wave.mean(axis=1) if wave.ndim == 2 else wave)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"{folder}: sound cannot be written ({error or 'disk full?'})")
        files[rate] = file, path, start + len(wave)
        cut = {"offset": start / rate, "duration": len(wave) / rate}
        yield place, row | cut | {"audio": str(path)}
    for file, *_ in files.values():
        file.close()


# ---- Corpora as their publishers lay them out


def tab_lines(path):
    """(name, text) of lines that only a line feed ends."""
    return ((*line.rstrip("\r").split("\t", 1), "")[:2]
            for line in json_files.read_text(path).split("\n") if line.strip())


def gigaspeech(folder):
    """Cuts of long recordings; its marks become punctuation, its noises are left out."""
    data = json_files.read_object(folder / "GigaSpeech.json")
    marks = {"COMMA": ",", "PERIOD": ".", "QUESTIONMARK": "?", "EXCLAMATIONPOINT": "!"}
    for audio in data.get("audios") or []:
        for cut in audio.get("segments") or []:
            text = str(cut.get("text_tn") or "")
            text = re.sub(r" <(\w+)>", lambda mark: marks.get(mark[1], mark[0]), text)
            if "<" not in text:
                yield {"id": cut.get("sid"), "audio": audio.get("path"), "text": text,
                       "speaker": str(cut.get("speaker") or "").replace("N/A", ""),
                       "offset": cut.get("begin_time"), "end": cut.get("end_time"),
                       "language": data.get("language")}


CORPORA = {     # {name: (patterns of names that its folder holds, rows of the folder)}
    "GigaSpeech": (("GigaSpeech.json",), gigaspeech),
    "VCTK": (("txt", "wav48.*"), lambda folder: (   # of two microphones, the authors advise mic2
        {"id": text.stem, "text": text, "speaker": text.parent.name, "language": "en",
         "audio": str(max(folder.glob(f"wav48*/{text.parent.name}/{text.stem}[_.]*"),
                          default=text.stem))} for text in sorted(folder.glob("txt/*/*.txt")))),
    "AISHELL-3": (("content.txt", "wav"), lambda folder: (      # after each word is its pinyin
        {"audio": f"wav/{name[:7]}/{name}", "speaker": name[:7], "language": "zh",
         "text": "".join(text.split()[::2])}
        for name, text in tab_lines(folder / "content.txt"))),
    "Multilingual LibriSpeech": (("transcripts.txt", "audio"), lambda folder: (
        {"id": name, "audio": f"audio/{'/'.join(name.split('_')[:2])}/{name}",
         "speaker": name.split("_")[0], "text": text}
        for name, text in tab_lines(folder / "transcripts.txt"))),
    "WenetSpeech4TTS": (("txts", "wavs"), lambda folder: (
        {"id": path.stem, "audio": f"wavs/{path.stem}", "language": "zh",
         "text": next(iter(tab_lines(path)), ("", ""))[1]}
        for path in sorted(folder.glob("txts/*.txt"))))}


# ---- The files that the user gave


def audio_paths(at):
    """Paths of a list or folder of speech; names may omit their ending and the usual subfolder."""
    return Paths((at if at.is_dir() else at.parent).resolve(), inside=INSIDE, endings=SOUNDS)


def open_source(name, given):
    """(the list or folder that is read, about, rows) of a file, a folder, or a pattern."""
    path = Path(name)
    if path.is_dir():
        return open_folder(path, given)
    files = [path] if path.exists() else sorted(map(Path, glob.glob(str(name))))
    require(files, f"{name}: there is no such file or folder; download data of a URL or the "
            "Hub first: hf download OWNER/NAME --repo-type dataset --local-dir FOLDER")
    return files[0] if len(files) == 1 else path, *open_files(files, given)


def open_files(paths, given):
    """(about, rows) of a list, or of files that hold audio and texts, all of one kind."""
    path = paths[0]
    with json_files.open_file(path) as file:
        head = file.read(512)
    require(not head.startswith((b"\x1f\x8b", b"PK\3\4")),
            f"{path}: is compressed: gunzip, tar xzf or unzip it, or save an Excel table as CSV")
    require(not head.startswith((b"RIFF", b"fLaC", b"OggS", b"ID3")),
            f"{path}: is an audio file; give the folder with the texts, or a list of both")
    read = read_tar if head[257:262] == b"ustar" else None
    if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        cli.require_package("pyarrow", f"{path}: parquet and arrow files")
        read = read_columns

    def entries():
        for one in paths:
            try:
                yield from read(one)
            except (tarfile.TarError, EOFError, OSError,        # and pyarrow's
                    ValueError, NotImplementedError) as error:
                raise UserError(f"{one}: cannot be read, it may be cut off ({first_line(error)})")
    if read:
        return f"{plural(len(paths), 'file')} with audio", rows_of(path, entries(), given)
    require(len(paths) == 1, f"{path}: is one of {len(paths)} lists; give one")
    require(path.suffix not in (".parquet", ".arrow", ".tar"),
            f"{path}: is not a parquet, arrow or tar file")
    start = next((line.strip() for line in lines_of(path) if line.strip()), "")
    if start[:1] not in ("{", "[") and path.suffix not in (".json", ".jsonl"):
        return open_table(path, given)
    whole = json_files.json_value(path) if path.suffix == ".json" else None
    if isinstance(whole, dict) and isinstance(whole.get("samples"), list):
        return "metadata.json", ((f"sample {number}", metadata_row(path.parent, raw))
                                 for number, raw in enumerate(whole["samples"], 1))
    unit, read_all = json_files.read_entries(path)
    return "JSON", rows_of(path, ((f"{unit} {number + 1}", entry) for number, entry
                                  in read_all(lambda number: True)), given)


def open_folder(folder, given):
    """open_source of a folder: the one list in it, or nearest below it; else audio with texts."""
    refused, level = [], [folder]
    for depth in range(DEPTH):
        found = [one for place in level for one in lists_in(place, depth, given, refused)]
        require(len(found) < 2, f"{folder}: holds {len(found)} lists; give one: "
                                + ", ".join(str(path) for path, *_ in found[:12]))
        if found:
            return found[0]
        level = [path for place in level for path in sorted(place.iterdir())
                 if path.is_dir() and not path.name.startswith(".")][:200]
    first = next(read_sidecar(folder), None)
    if any(not isinstance(row, BadSample) for _, row in read_sidecar(folder)):
        return folder, "audio files with their texts next to them", read_sidecar(folder)
    why = f"has audio, such as {one_line(first[0], 80)}, but no list of texts; it {first[1]}" \
        if first else f"has neither a list nor audio files ({', '.join(AUDIO_FILES)})"
    raise UserError(f"{folder}: {why}" + "".join(f"; {error}" for error in refused[:1]))


def lists_in(place, depth, given, refused):
    """[open_source of each list] in one folder; refused takes why others are not read."""
    names = sorted(path.name for path in place.iterdir())
    for name, (needs, read) in CORPORA.items():
        if all(any(re.fullmatch(one, there) for there in names) for one in needs):
            return [(place, name, ((f"row {i}", row) for i, row in enumerate(read(place), 1)))]
    if {"wav.scp", "text"} <= set(names):
        return [(place, "Kaldi", read_kaldi(place))]
    require("raw.arrow" not in names, f"{place}: is F5-TTS's prepared folder; give its csv")
    require("dataset_dict.json" not in names, f"{place}: holds splits; give the folder of one")
    saved = {"state.json", "dataset_info.json"} <= set(names)       # by datasets' save_to_disk
    found, groups = [], {}
    for name in names:
        if name.endswith((".parquet", ".tar") + (".arrow",) * saved) and name[0] != ".":
            split = "" if saved or name.endswith(".tar") else re.split("[-_]", name)[0] + "-"
            groups.setdefault(place / f"{split}*{Path(name).suffix}", []).append(place / name)
    spoken = {name.split(".")[0] for name in names if name.lower().endswith(SOUNDS)}
    texts = any(name.split(".")[0] in spoken for name in names if name.endswith(TEXTS))
    lists = [name for name in names if name.lower().endswith(LISTS) and (place / name).is_file()
             and name.split(".")[0] not in spoken and not name.endswith(".trans.txt")]
    if len(lists) > 100 or texts and depth or saved:        # a folder of texts
        lists = [name for name in lists if name.startswith("metadata.")]
    for path, files in (groups | {place / name: [place / name] for name in lists}).items():
        try:
            found.append((path, *open_files(files, given)))
        except UserError as error:
            if path in groups or isinstance(error, Undecided):
                raise
            refused.append(error)
    return found


# ---- Rows -> ChatML


def checked(row, paths, plain):
    """A row whose audio is there, by its absolute path, and whose text is one. Raises BadSample."""
    if not isinstance(row, dict):
        raise row if isinstance(row, BadSample) else BadSample(
            f"is a {type(row).__name__}, not an object")
    if "messages" in row:
        for item in content_items(row):
            for key in ("audio_url", "url", "path") if isinstance(item, dict) else ():
                if item.get("type") == "audio" and isinstance(item.get(key), str):
                    item[key] = plain.find(item[key])
        return row
    name = row.get("audio")
    if not isinstance(name, str) or not name.strip():
        raise BadSample(f"has no audio, but {name!r}")
    row |= {"text": text_of(row), "audio": paths.find(name), "name": name}
    stem, ending = os.path.splitext(os.path.basename(row["audio"]))
    if ending.lower() in NOT_READ:      # it would be refused after hours of encoding
        raise BadSample(f"{ending[1:]} is not read; convert it: ffmpeg -i {stem}{ending} "
                        f"{stem}.flac", "audio")
    audio_item(row)
    return row


def text_of(row):
    """The text to speak of a row, whose "text" may be the Path of a file. Raises BadSample."""
    text = row.get("text")
    try:
        text = json_files.read_text(text) if isinstance(text, Path) else text
    except UserError as error:
        raise BadSample(error)
    if text is not None and not isinstance(text, str):
        raise BadSample(f"its text is {text!r}, not text")
    text = (text or "").replace("<audio>", "").strip()      # ms-swift's, kept by some converters
    if text.lower() in NOTHING:
        raise BadSample(f"its text is {text!r}" if text else "its text is empty", "empty_text")
    speakers = list(dict.fromkeys(SPOKEN_BY.findall(text))) if SPOKEN_BY.match(text) else []
    tags = {speaker: f"[SPEAKER{i}] " * (len(speakers) > 1) for i, speaker in enumerate(speakers)}
    return SPOKEN_BY.sub(lambda found: tags[found[1]], text) if tags else text


def audio_item(row):
    """ChatML audio item of a row. Its offset makes it a cut, up to its end if that is known."""
    found = {}
    for key in ("offset", "duration", "end"):
        try:
            number = float("nan" if row.get(key) in (None, "") else row[key])
        except (TypeError, ValueError):
            raise BadSample(f"its {key} is {row[key]!r}, not seconds")
        found[key] = number if math.isfinite(number) else None
    offset, duration, end = found.values()
    if end is not None and (offset is not None or end >= 0):
        offset = offset or 0.0
        duration = end - offset if end >= 0 else None       # Kaldi's -1: to the end of the file
        if duration is not None and duration <= 0:
            raise BadSample(f"ends at {end} s, where it does not last: it begins at {offset} s")
    return {"type": "audio", "audio_url": row["audio"], "offset": offset, "duration": duration}


def chatml_of(row, reading, pool, paths):
    """Raw ChatML sample of a row. pool: {speaker: rows for reference}. Raises BadSample."""
    task = row.get("task_type")
    if task in (None, "", "audio_generation"):      # JimmyMa99's converter writes it everywhere
        task = reading.task_type
    if task not in TASK_TYPES:
        raise BadSample(f"unknown task_type {task!r}; known: {', '.join(TASK_TYPES)}")
    references, notes = references_of(row, task, reading, pool, paths)
    if not all(isinstance(value, str) for *words, _ in references for value in words):
        raise BadSample(f"a reference's transcript is not text: {references!r}")
    scene, turns = row.get("scene"), []
    scene = f"Audio is recorded from {str(scene).replace('_', ' ')}." if scene else ""
    if reading.ref_in_system and references:
        system = [DEFAULT_SYSTEM, "\n\n<|scene_desc_start|>\n" + f"{scene}\n\n" * bool(scene)]
        for i, (tag, _, audio) in enumerate(references):
            system += ["\n" * bool(i) + f"{tag.strip('[] ') or 'SPEAKER0'}:", audio]
        system.append("\n<|scene_desc_end|>")
    else:
        voices = row.get("voices") if isinstance(row.get("voices"), dict) else {}
        words, scene = system_parts(row["text"], scene, voices, bool(references))
        system = [words] + ["\n\n" + SCENE.format(scene)] * bool(scene)
        for tag, transcript, audio in references:
            words = tag + transcript.strip()
            turns += [{"role": "user", "content": words}] * bool(words)
            turns.append({"role": "assistant", "content": audio})
    system = [{"type": "text", "text": part} if isinstance(part, str) else part for part in system]
    kept = {name: row.get(name) for name in ("speaker", "language", "split", "normalize_text")}
    misc = {"sample_id": row.get("id")} | ({"notes": notes} if notes else {})
    return {"messages": [{"role": "system", "content": system}, *turns,
                         {"role": "user", "content": row["text"]},
                         {"role": "assistant", "content": audio_item(row)}], **kept, "misc": misc}


def references_of(row, task, reading, pool, paths):
    """([(tag, transcript, audio item)] before the text of a row, [(check, note)])."""
    def clip(name):
        return {"type": "audio", "audio_url": paths.find(str(name))}
    if reading.reference == "none" or share_of("share", row, reading) >= reading.reference_share:
        return [], []
    if reading.reference == "same_speaker":
        others = [other for other in pool.get(str(row.get("speaker")), ())
                  if (other["name"], other.get("offset")) != (row["name"], row.get("offset"))]
        if not others:
            return [], [("no_second_clip", f"its speaker {row.get('speaker')!r} has no other clip")]
        other = others[int(share_of("reference", row, reading) * len(others))]
        return [("", other["text"], audio_item(other))], []
    audio, text, speakers = row.get("ref_audio"), row.get("ref_text"), row.get("ref_speakers")
    if task == "multi_speaker_voice_cloning":
        if not isinstance(speakers, list) or not speakers or not all(
                isinstance(one, dict) and one.get("ref_audio_file") and one.get("ref_transcript")
                for one in speakers):
            raise BadSample(f"{task} needs 'ref_speakers' of 'ref_audio_file' and 'ref_transcript'")
        tags = [str(one.get("speaker_tag") or f"SPEAKER{i}") for i, one in enumerate(speakers)]
        return [(f"[{tag.strip('[]')}] ", one["ref_transcript"], clip(one["ref_audio_file"]))
                for tag, one in zip(tags, speakers)], []
    if speakers is not None and task != "zero_shot_voice_cloning":      # a metadata.json's row
        note = "unused_reference", f"{task} uses no reference clips"
        return [], [note] * bool(audio or speakers)
    if speakers is not None and not (audio and text):
        raise BadSample("zero_shot_voice_cloning needs 'ref_audio_file' and 'ref_transcript'")
    unknown = [("no_reference_text", f"what its reference {audio!r} says is not known")]
    if not audio:
        return [], unknown * bool(row.get("voice_prompts"))
    words = Path(clip(audio)["audio_url"]).with_suffix(".txt")
    text = text or (json_files.read_text(words).strip() if words.is_file() else "")
    return ([("", text, clip(audio))], []) if text or reading.lone_reference else ([], unknown)


def share_of(what, row, reading):
    """Number from 0 to 1 that belongs to a row, whatever the order of the rows."""
    key = f"{reading.seed}\0{what}\0{row['name']}\0{row.get('offset')}"
    key = key.encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64


# ---- A whole source


def is_held_out(row):
    return str(row.get("split")).strip().lower() in HELD_OUT


def gather(at, rows, paths, scratch, reading, held_out, refuse):
    """Write [name, row] of each row that can be used to the file `scratch`: all rows first: their
    values decide whether columns are what they seem. Returns ({clause of ODD: [how many texts, an
    example]}, {speaker: rows for reference}, rows of another split, whether to leave out others).
    """
    plain = Paths(paths.base)       # of ChatML's audio
    odd, pool, texts, number, other, marked = {}, {}, Counter(), 0, 0, False
    for place, row in rows:
        name, label = f"{at} {place}", label_of(row) if isinstance(row, dict) else None
        name += f" ({one_line(label, 80)})" if label else ""
        held = isinstance(row, dict) and is_held_out(row)
        marked = marked or held
        if held and not held_out:
            other += 1
            continue
        try:
            row = checked(row, paths, plain)
        except BadSample as error:
            refuse(name, error)
            continue
        scratch.write(json.dumps([name, row], default=str) + "\n")
        if "messages" in row:
            continue
        texts[row["text"]] += 1
        number += 1
        found = [(what, row["text"]) for what in ODD if ODD[what].search(row["text"])]
        if not os.path.isabs(row["name"]) and not Path(row["audio"]).is_relative_to(paths.base):
            found.append((OUTSIDE, row["audio"]))
        for what, example in found:
            odd.setdefault(what, [0, example])[0] += 1
        if reading.reference == "same_speaker" and row.get("speaker"):
            # CANDIDATES of each speaker, by the rows themselves: those of a good length first
            seconds, heap = audio_item(row)["duration"], pool.setdefault(str(row["speaker"]), [])
            good = not seconds or GOOD_SECONDS[0] <= seconds <= GOOD_SECONDS[1]
            heapq.heappush(heap, (good, -share_of("candidate", row, reading), number, row))
            if len(heap) > CANDIDATES:
                heapq.heappop(heap)
    for text, most in texts.most_common(1):
        require(number < 8 or most <= number / 2, f"{at}: {most} of {number} texts are equal, "
                f"{text[:60]!r}: hardly the spoken words; name the column: --columns text=NAME")
        require(not phonemes(list(itertools.islice(texts, 1000))),
                f"{at}: its texts are phonemes, such as {text[:60]!r}: {PHONEMES}")
    for heap in pool.values():
        heap[:] = [row for *_, row in sorted(heap, reverse=True)]
    return odd, pool, other, marked and held_out


def to_chatml(source, out_path, problems, *, held_out=False, **how):
    """Write a source of any format as ChatML .jsonl. UserError where nothing can be read.

    problems: a list that takes the Problems of rows that cannot be used. held_out: whether
    validation data is asked for: rows whose `split` says so are that alone. how: of Reading."""
    from core import checkpoint         # they import torch, which --help needs not
    from core.problems import problem
    out_path, reading, refused = Path(out_path), Reading(**how), []
    given = dict(pair.split("=", 1) for pair in reading.columns.split(",") if pair)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    files = Path(source).rglob("*") if os.path.isdir(source) else map(Path, glob.glob(str(source)))
    made = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)
            if file.suffix in (".parquet", ".arrow", ".tar")]
    made, note = made and [*made, held_out, vars(reading)], out_path.with_suffix(".source")
    if made and note.exists() and out_path.exists():        # sound is unpacked once
        saved = json_files.read_object(note)
        if saved["made"] == made:
            print(f"converted  {one_line(source)}: as before, {out_path}", flush=True)
            problems += [problem(*row, source) for row in saved["refused"]]
            return
    note.unlink(missing_ok=True)
    at, about, rows = open_source(source, given)
    rows, paths = unpacked(rows, out_path.with_suffix(".audio").resolve()), audio_paths(at)
    kept, first = 0, ""

    def refuse(name, error):
        refused.append(problem(name, error.check, error, source))

    def write(path):
        nonlocal first, kept, other
        with open(path, "w", encoding="utf-8") as out:
            for name, row in map(json.loads, scratch):
                if marked and not is_held_out(row):
                    other += 1
                    continue
                try:
                    row = row if "messages" in row else chatml_of(row, reading, pool, paths)
                except BadSample as error:
                    refuse(name, error)
                    continue
                misc = row.get("misc") if isinstance(row.get("misc"), dict) else {}
                row["misc"] = misc | {"source": name}
                if not kept:
                    with contextlib.suppress(BadSample):
                        first = sample_text(canonical_sample(name, row, paths))
                out.write(json.dumps(row) + "\n")
                kept += 1

    with tempfile.TemporaryFile("w+", encoding="utf-8", dir=out_path.parent) as scratch:
        odd, pool, other, marked = gather(at, rows, paths, scratch, reading, held_out, refuse)
        scratch.seek(0)
        checkpoint.write_atomically(out_path, write)
    if made:
        rows = [[p.name, p.check, p.what] for p in refused]
        checkpoint.write_text(note, json.dumps({"made": made, "refused": rows}))
    problems.extend(refused)
    counts = sorted(Counter(p.check for p in refused).items())
    counts = f" ({', '.join(f'{n} {check}' for check, n in counts)})" * bool(counts)
    lines = [f"converted  {one_line(source)} ({one_line(about)}): "
             f"{plural(kept + len(refused), 'row')} = {kept} kept + {len(refused)} refused"
             f"{counts}; {out_path}" + f"; {other} are of another split" * bool(other)]
    lines += [f"           first: {one_line(first)}"] if first else []
    lines += [f"           {plural(n, 'row' if what == OUTSIDE else 'text')} {what}, such as "
              f"{one_line(one)[:60]!r}" for what, (n, one) in odd.items()]
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
