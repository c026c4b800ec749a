"""Speech data as people have it -> the ChatML .jsonl that the trainer reads.

    python speech/convert.py my_corpus --output train.jsonl
    python speech/convert.py clips.csv --columns audio=clip,text=caption --output train.jsonl
    python speech/convert.py 'shards/*.parquet' --output train.jsonl   # audio is unpacked, too

Reads tables with a header (.csv .tsv .json .jsonl; columns are known by name), tables without one
(audio|text, LJSpeech, Piper, the .list of GPT-SoVITS), Kaldi folders, metadata.json of the GUIs,
ms-swift, VibeVoice, audio with texts or subtitles next to it, parquet and arrow files, WebDataset
tars, and the corpora of CORPORA. The script stops where the values do not settle what a column
means; then name it with --columns. Rows that cannot be used are counted and listed with the reason.
Check the first sample, which is printed, and the file.
"""
import contextlib
import csv
import functools
import glob
import hashlib
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # the folder of core/

from core import cli, json_files
from core.cli import UserError, plural, error_text, first_line, one_line, require
from speech import choices
from speech.choices import COLUMNS, TASK_TYPES
from speech.conversations import (AUDIO_FILES, DEFAULT_SYSTEM, SCENE, BadSample, Paths, Reading,
                                  canonical_sample, content_items, is_chatml, sample_name,
                                  sample_text, system_parts)

NOT_READ = (".m4a", ".aac", ".mp4", ".webm", ".wma", ".amr")        # by libsndfile
SOUNDS = AUDIO_FILES + NOT_READ
TEXTS = (".normalized.txt", ".txt", ".lab")
SIDECARS = (".srt", ".vtt", *TEXTS, ".json", ".tsv")    # next to audio; the first that exists
LISTS = (".json", ".jsonl", ".csv", ".tsv", ".list", ".lst", ".txt")
SEPARATORS = "\t,;|"
SUBFOLDERS = ("wavs", "wav", "clips", "audio")      # in which a list's audio is looked for
LANGUAGES = set("zh ja jp en ko yue de fr es it pt ru ar vi th".split())
HELD_OUT = {"eval", "test", "dev", "val", "valid", "validation"}
NO_SPEAKER = {*SUBFOLDERS, "mp3", "flac", "train", "dev", "test", "eval", "valid", "val"} # folders
IPA = re.compile("[əɪʊɛɔæʌɑɹʃʒθðŋˈˌː]")
NO_TEXT = {"nan", "none", "null", "<na>", "n/a", "na", ""}      # pandas' words for a missing value
NOISES = ("laugh|sigh|cough|breath|gasp|chuckle|sniff|groan|yawn|music|applau|cheer|cry|whisper|"
          "pause|silence|noise|clears")
ODDITIES = {        # of texts that are used all the same: {clause about them: pattern}
    "hold marks of sounds or sound tags, which may be read aloud": re.compile(
        rf"\[[a-z][a-z _-]*\]|</?[a-z][^<>]*>|\*[a-z][a-z ]*\*|\((?:{NOISES})[a-z ]*\)", re.I),
    "begin with a name and a colon, which is read aloud": re.compile(
        r"^\s*[^\W\d][\w.'-]{0,20}(?: \w{1,12})?:\s"),
    "hold HTML entities, which are read aloud": re.compile(
        r"&(?:#\d+|#x[0-9a-f]+|[a-z]{2,8});", re.I),
    "look like text in a wrong encoding": re.compile("Ã[\x80-¿]|â€|Â[\x80-¿]|�"),
    "hold control characters": re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")}
OUTSIDE = "name audio that is not below the folder of the list"
PHONEMES = "give the texts they were made from; Higgs-Audio does not read phonemes"
SPEAKER_MARK = re.compile(r"^\s*Speaker\s+(\d+)\s*:\s*", re.I | re.M)      # as VibeVoice writes it
CANDIDATES = 64         # clips of a speaker among which references are chosen
GOOD_SECONDS = (3, 15)  # of a reference, where the data say how long clips are
SHARD_S = 600           # of sound in a FLAC file that audio is unpacked into
DEPTH, LOOK = 3, 20     # levels of folders, and rows, that are looked through


class Undecided(UserError):
    """A table is one of speech, but what its columns mean is not certain."""


# ---- Lists. Readers yield (location, entry). location: "line 7". entry: a dict by column names, or
# the BadSample with the reason why there is none. Rows are (location, dict with keys of COLUMNS).
# columns: {meaning: name} of --columns.


def find_columns(names, columns):
    """{meaning: column name} of the columns whose meaning is known."""
    lower, meanings = {}, {}
    for name in names:
        lower.setdefault(str(name).strip().lower(), name)
    for meaning, spellings in COLUMNS.items():
        for spelling in [columns[meaning].lower()] if meaning in columns else spellings.split():
            if spelling in lower:
                meanings.setdefault(meaning, lower[spelling])
    return meanings


def rows_of(path, entries, columns):
    """Rows of entries; UserError without columns of audio and text, or one that --columns names."""
    entries = iter(entries)
    head = list(itertools.islice(entries, LOOK))
    names = list(dict.fromkeys(name for _, entry in head if isinstance(entry, dict)
                               for name in entry))
    if head and "messages" not in names:
        meanings = find_columns(names, columns)
        there = f"its columns are {', '.join(str(name)[:40] for name in names[:20])}"
        for meaning, name in columns.items():
            require(meaning in meanings,
                    f"{path}: has no column as --columns {meaning}={name} says; {there}")
        lost = [meaning for meaning in ("audio", "text") if meaning not in meanings]
        known = "; ".join(f"of {name} are {COLUMNS[name].replace(' ', ', ')}" for name in lost)
        require(not lost, f"{path}: has no column of {' and none of '.join(lost)}; {there}; known "
                f"names {known}; name yours: --columns {','.join(f'{name}=NAME' for name in lost)}")
    columns_of = functools.cache(lambda names: find_columns(names, columns).items())

    def row_of(entry):
        if not isinstance(entry, dict) or is_chatml(entry):
            return entry
        if isinstance(entry.get("messages"), list):
            return swift_row(entry)
        return {meaning: entry.get(name) for meaning, name in columns_of(tuple(entry))}
    return ((location, row_of(entry)) for location, entry in itertools.chain(head, entries))


def swift_row(entry):
    """Row of ms-swift: texts with <audio> in them, and a list of the audio."""
    messages, clips = entry["messages"], entry.get("audios") or entry.get("audio") or []
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        return BadSample("has no list 'messages' of texts")
    clips = clips if isinstance(clips, list) else [clips]
    answers = [m["content"] for m in messages if m.get("role") == "assistant"]
    requests = [m["content"] for m in messages if m.get("role") == "user"]
    spoken = "".join(answers).count("<audio>")
    heard = sum(m["content"].count("<audio>") for m in messages) - spoken
    if spoken > 1 or heard or len(clips) != 1 or not answers:
        return BadSample(f"{heard + spoken} <audio> and {len(clips)} audios, not one spoken clip"
                         + "; the user's are speech to understand, not to speak" * bool(heard))
    references = entry.get("ref_audios")
    reference = references[0] if isinstance(references, list) and references else references
    kept = {key: entry.get(key) for key in ("id", "speaker", "language", "split", "ref_text")}
    return {**kept, "audio": clips[0], "ref_audio": reference,
            "text": answers[-1].replace("<audio>", "").strip() or (requests or [""])[-1]}


def metadata_row(folder, entry):
    """Row of a metadata.json of the GUIs, whose paths may leave out train/ and eval/."""
    if not isinstance(entry, dict):
        return entry
    row = {meaning: entry[name] for meaning, name in find_columns(entry, {}).items()}
    row |= {"text": entry.get("transcript_file"), "ref_speakers": entry.get("ref_speakers") or [],
            "task_type": entry.get("training_task_type") or entry.get("task_type")}
    for key in ("audio", "text", "ref_audio"):
        name = str(row.get(key))
        in_split = os.path.join(folder, str(entry.get("split")), name)
        if os.path.exists(in_split) and not os.path.exists(folder / name):
            row[key] = in_split
    return row | {"text": folder / str(row["text"]) if row["text"] else None}


def lines_of(path):
    """Lines of a UTF-8 file without their ends; UserError names the first that is not."""
    with json_files.open_file(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise UserError(f"{path}: line {number} {json_files.NOT_UTF8}")


def split_line(line, separator, has_header=True):
    """Fields of a line. Unbalanced quotes are text. Without a header, quotes enclose a field only
    where Python's csv module would write them: Piper's do, LJSpeech's are text."""
    if '"' in line:
        with contextlib.suppress(csv.Error):
            style = {"delimiter": separator, "strict": True, "skipinitialspace": True}
            fields, rewritten = next(csv.reader([line], **style)), io.StringIO()
            csv.writer(rewritten, lineterminator="", **style).writerow(fields)
            if has_header or rewritten.getvalue() == line:
                return fields
    return line.split(separator)


def read_table(path, separator, names, has_header):
    """Entries of a table. In CSV with a header a field in quotes may go over several lines."""
    if has_header and separator == ",":
        rows = csv.reader((line + "\n" for line in lines_of(path)), strict=True,
                          skipinitialspace=True)
    else:
        rows = (split_line(line, separator, has_header) for line in lines_of(path))
    line, skip_header = 1, has_header
    try:
        for fields in rows:
            fields, location = [field.strip() for field in fields], f"line {line}"
            line = getattr(rows, "line_num", line) + 1
            if not any(fields):
                continue
            if skip_header:
                skip_header = False
            elif len(fields) != len(names):
                yield location, BadSample(f"has {len(fields)} fields, not {len(names)}: "
                                          f"{separator.join(fields)[:80]!r}")
            else:
                entry = dict(zip(names, fields))
                if entry.get("normalised"):     # LJSpeech's last field, which may be empty
                    entry["text"] = entry["normalised"]
                yield location, entry
    except csv.Error as error:
        raise UserError(f"{path}: its quotes do not fit in the row that begins at line {line} "
                        f'({error}); write one inside a field twice: "so ""it"" is"')


def open_table(path, columns):
    """(description, rows) of a text file with a row in each line."""
    head = [line for line in itertools.islice(lines_of(path), 10 * LOOK) if line.strip()][:LOOK]
    require(head, f"{path}: is empty")
    headers = [(separator, [name.strip() for name in split_line(head[0], separator)])
               for separator in SEPARATORS]
    separator, names = max(headers, key=lambda header: len(find_columns(header[1], columns)))
    numbered = columns and all(map(str.isdecimal, columns.values()))
    has_header = not numbered and bool(columns or find_columns(names, {}))
    if not has_header:
        separator, names = headerless_columns(path, head, columns)
        columns = {}
    shown = ", ".join(meaning if meaning == name else f"{meaning} = {name!r}"
                      for meaning, name in find_columns(names, columns).items())
    entries = read_table(path, separator, names, has_header)
    return f"a table of {shown} between {separator!r}", rows_of(path, entries, columns)


def headerless_columns(path, head, columns):
    """(separator, names) of lines of 2 to 4 fields; what they are is judged over all rows."""
    paths, why = audio_paths(path), f"nor 2 to 4 fields as all lines must: {head[0][:80]!r}"
    audio = int(columns.get("audio", 1)) - 1
    for separator in SEPARATORS:
        rows = [split_line(line, separator, False) for line in head]
        width = len(rows[0])
        if audio < width and 2 <= width <= 4 and all(len(row) == width for row in rows):
            if sum(bool(paths.look_up(row[audio].strip())) for row in rows) >= 0.9 * len(rows):
                break
            why = (f"and its first field names no audio files: {rows[0][audio].strip()[:80]!r} is "
                   f"not there; looked in {', '.join(paths.folders)}")
    else:
        raise UserError(f"{path}: is not a table that is known: its first line has neither columns "
                        f"of audio and of text, {why}; give it a first line: audio,text")
    if columns:
        meanings = {int(number): name for name, number in columns.items()} | {audio + 1: "audio"}
        return separator, [meanings.get(number, f"{number}") for number in range(1, width + 1)]
    rows = read_table(path, separator, range(width), False)
    return separator, guess_meanings(
        path, [list(row.values()) for _, row in rows if isinstance(row, dict)])


def guess_meanings(path, rows):
    """The meaning of each field of a table without a header; Undecided where it is open."""
    columns = [[value for value in column if value] for column in zip(*rows)]
    if phonemes := [column for column in columns if is_phonemic(column)]:
        raise Undecided(f"{path}: its texts are phonemes, such as {phonemes[0][0][:60]!r}: "
                        f"{PHONEMES}")
    prose, names = [is_prose(column) for column in columns], None
    if prose[1] and not any(columns[2:]):
        names = "audio text"
    elif len(columns) == 3 and prose[1] and prose[2]:
        similarities = [SequenceMatcher(None, row[1].lower(), row[2].lower()).ratio()
                        for row in rows[:200] if row[2]]
        if sum(similarities) >= 0.6 * len(similarities):
            names = "audio text normalised"
    elif len(columns) == 3 and prose[2] and not prose[1]:
        if all(len(value) <= 40 and " " not in value for value in columns[1]):
            names = "audio speaker text"
    elif len(columns) == 4 and prose[3] and all(v.lower() in LANGUAGES for v in columns[2]):
        names = "audio speaker language text"
    if names:
        return (names.split() + ["", ""])[:len(columns)]
    shown = ", ".join(f"{number} {column[0][:40]!r}" if column else f"{number} empty"
                      for number, column in enumerate(columns, 1))
    raise Undecided(f"{path}: has no header, and what its fields mean is not certain: {shown}; "
                    "name them by number, for example --columns audio=1,text=2")


def is_prose(values):
    """True if these can be texts to speak, not numbers, codes, names or a few repeated words."""
    numbers = sum(bool(re.fullmatch(r"[\d.,:+-]*", value)) for value in values)
    if not values or numbers > len(values) / 2:
        return False
    unspaced = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f]"
    if any(" " in value or re.search(unspaced, value) for value in values):
        return len(values) < 4 or len(set(values)) > len(values) / 2
    return sum(bool(re.search(r"\w[.!?]$", value)) for value in values) > len(values) / 2


def is_phonemic(values):
    """True if most texts are in IPA."""
    return sum(len(IPA.findall(v)) >= 0.1 * len(v) > 0 for v in values) > len(values) / 2


def read_kaldi(folder):
    """Rows of wav.scp, text and maybe segments, utt2spk; a command in wav.scp is never run."""
    def read_pairs(name):
        values = {}
        for number, line in enumerate(lines_of(folder / name), 1):
            key, value = (*line.split(None, 1), "", "")[:2]
            require(key not in values, f"{folder / name}: line {number} has {key!r} again")
            if key:
                values[key] = value.strip()
        return values
    audio, texts, segments, speakers = (read_pairs(name) if (folder / name).exists() else {}
                                        for name in ("wav.scp", "text", "segments", "utt2spk"))
    for key, path in audio.items():
        require(path[-1:] != "|", f"{folder / 'wav.scp'}: {key} is a command: run wav-copy first")
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


def read_sidecars(folder):
    """Rows of the clips of a tree; each subfolder is a speaker."""
    seen = set()        # links may lead to a folder twice, or in a circle
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        names = sorted(name for name in names if real not in seen and name[0] != ".")
        folders[:] = sorted(name for name in folders if real not in seen and name[0] != ".")
        seen.add(real)
        root, files = Path(root), {name.lower(): name for name in names}
        of_language = {stem: name for name in sorted(files, reverse=True)       # talk.en.srt
                       for stem in re.findall(r"(.+)\.[a-z]{2,3}(?:-[a-z]+)?\.(?:srt|vtt)$", name)}
        librispeech = dict((*line.split(None, 1), "")[:2] for name in names
                           if name.endswith(".trans.txt") for line in lines_of(root / name))
        no_speaker = root == folder or root.name.lower() in NO_SPEAKER
        for name in names:
            stem, ending = os.path.splitext(name)
            if ending.lower() not in SOUNDS:
                continue
            audio = str((root / name).relative_to(folder))
            row = {"audio": audio, "id": os.path.splitext(audio)[0],
                   "speaker": "" if no_speaker else str(root.relative_to(folder))}
            wanted = [start + end for end in SIDECARS for start in (stem.lower(), name.lower())]
            text = next((name for name in wanted if name in files), of_language.get(stem.lower()))
            if stem in librispeech:
                entries, row["speaker"] = [{"text": librispeech[stem]}], stem.split("-")[0]
            elif text:
                entries = read_sidecar(root / files[text])
                if text.endswith(".normalized.txt"):    # LibriTTS: speaker_chapter_...
                    row["speaker"] = stem.split("_")[0]
            else:
                entries = [BadSample(f"has no text next to it ({', '.join(wanted[::2])})",
                                     "empty_text")]
            for number, entry in enumerate(entries, 1):
                yield (f"{files[text]} entry {number}" if text else audio,
                       row | entry if isinstance(entry, dict) else entry)


def read_sidecar(path):
    """[columns, or BadSample, of each entry] of a text next to audio; a plain text is one entry."""
    try:
        text, ending, unit = json_files.read_text(path), path.suffix.lower(), 1
        data = json_files.read_object(path) if ending == ".json" else {}
    except UserError as error:
        return [BadSample(error)]
    if ending in (".srt", ".vtt"):
        return read_subtitles(text)
    if ending == ".json":
        data = {key.lower(): value for key, value in data.items()}
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
    return [{"offset": seconds_of(start) / unit, "end": seconds_of(end) / unit,
             "text": words.strip()} for start, end, words in map(re.Match.groups, labels)]


def seconds_of(text):
    """Seconds of 1:02:03,5 or 3.5."""
    numbers = [float(number.replace(",", ".")) for number in text.split(":")]
    return round(sum(number * 60 ** i for i, number in enumerate(reversed(numbers))), 3)


NUMBER = r"(\d+(?:[.,]\d+)?)(?:\t|(?<=[.,]\d{6}) +)"    # an editor may have replaced its tabs
LABEL = re.compile(NUMBER * 2 + "(.*)")                 # of Audacity, whisper
TIME = r"(?:\d+:)?\d+:\d+[.,]\d+"
ARROW = re.compile(rf"^({TIME})(?:[ \t]*-->[ \t]*({TIME})(?:[ \t].*)?|[^\w\n]+{TIME})$", re.M)
COMMENT = re.compile(r"(?:\A|(?<=\n\n))(?:WEBVTT|NOTE|STYLE|REGION)\b.*(?:\n.+)*")
MARKUP = re.compile(r"</?[a-z][a-z0-9.]*(?: [^<>]*)?>|<[\d:.]+>|\{\\[^}]*\}")
NO_WORDS = re.compile(r"\W*|[♪♫].*[♪♫]|\[[^]]*\]|\([^)]*\)")


def read_subtitles(text):
    """Entries of SRT or VTT; a cue lasts to the next line of times, whose arrow may be damaged."""
    text = COMMENT.sub("", "\n".join(map(str.strip, text.splitlines())))
    _, *fields = ARROW.split(text)      # start, end and text of each cue
    cues = list(zip(fields[::3], fields[1::3], fields[2::3]))
    if not cues:
        return [BadSample("has no line 00:00:00.000 --> 00:00:01.000", "empty_text")]
    previous, entries = "", []
    for number, (start, end, body) in enumerate(cues, 1):
        lines = body.split("\n")[1:]
        if number < len(cues):
            lines = lines[:-1]
            if lines and (lines[-1].isdecimal() or len(lines) > 1 and not lines[-2]):
                lines.pop()                             # the number, or name, of the next cue
        lines = [html.unescape(MARKUP.sub("", line)).strip() for line in lines]
        lines = [line for line in lines if line]
        if len(lines) > 1 and lines[0] == previous:     # rolling captions repeat a line
            del lines[0]
        previous = lines[-1] if lines else previous
        words = " ".join(" ".join(lines).split())
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
    import pyarrow.parquet
    with pyarrow.memory_map(str(path)) as source:
        start = source.read(6)
        source.seek(0)
        if start.startswith(b"PAR1"):
            batches = pyarrow.parquet.ParquetFile(source).iter_batches(64)
        elif start == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            batches = map(file.get_batch, range(file.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(source)
        for number, entry in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{path.name} row {number}", entry


def read_tar(path):
    """Entries of a WebDataset shard. A sample is the files whose names agree up to the first dot
    or, if these hold several clips, up to the last dot."""
    with tarfile.open(path, mode="r:") as tar:
        files = ((member.name, tar.extractfile(member).read()) for member in tar
                 if member.isfile() and not os.path.basename(member.name).startswith("."))
        groups = itertools.groupby(files, lambda file: re.match("(?:.*/)?[^.]*", file[0])[0])
        for group in (list(group) for _, group in groups):
            clips, samples = sum(name.lower().endswith(SOUNDS) for name, _ in group), {}
            for name, data in group:
                samples.setdefault(name.rpartition(".")[0] * (clips > 1), {})[name] = data
            for sample in samples.values():
                entry, metadata = {}, {}
                try:
                    for name, data in sample.items():
                        if name.lower().endswith(SOUNDS):
                            entry |= {"audio": data, "id": name}
                        elif name.endswith(".json"):
                            value = json_files.loads(data)
                            metadata = value if isinstance(value, dict) else {}
                        elif name.endswith(TEXTS):
                            entry.setdefault("text", data.decode("utf-8-sig"))
                    entry = metadata | entry
                except ValueError as error:     # not JSON, or not UTF-8
                    entry = BadSample(error)
                yield f"{path.name} {next(iter(sample))}", entry
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(512) != bytes(512):     # tarfile reads a truncated file without error
            raise EOFError("its end is missing")


def unpack_audio(rows, folder):
    """Rows whose audio is a path: bytes of a file, or {array, sampling_rate}, are written to FLAC
    files of about SHARD_S seconds in `folder`."""
    import numpy as np
    import soundfile

    from speech.codes import open_sound
    files, paths = {}, (folder / f"{number:07}.flac" for number in itertools.count())
    for location, row in rows:
        audio = row.get("audio") if isinstance(row, dict) else None
        if isinstance(audio, dict):
            name = audio.get("path")
            row["id"] = row.get("id") or os.path.basename(str(name or ""))
            audio = audio.get("bytes") or (name if audio.get("array") is None else audio)
            row["audio"] = audio
        if not isinstance(audio, (bytes, dict)):
            yield location, row
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
            yield location, error
            continue
        except (KeyError, TypeError, ValueError, RuntimeError) as error:    # libsndfile's, NumPy's
            yield location, BadSample(f"is not readable audio ({error})", "audio")
            continue
        try:        # a full disk is not the fault of this sample
            if rate in files and files[rate].frames >= SHARD_S * rate:
                files.pop(rate).close()
            if rate not in files:
                folder.mkdir(parents=True, exist_ok=True)
                files[rate] = soundfile.SoundFile(next(paths), "w", rate, 1, "PCM_16")
            start = files[rate].frames
            files[rate].write(wave.mean(axis=1) if wave.ndim == 2 else wave)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"{folder}: sound cannot be written ({error or 'disk full?'})")
        yield location, row | {"audio": str(files[rate].name), "offset": start / rate,
                               "duration": len(wave) / rate}
    for file in files.values():
        file.close()


# ---- Corpora as their publishers lay them out


def tab_lines(path):
    """(name, text) of lines that only a line feed ends."""
    return ((*line.rstrip("\r").split("\t", 1), "")[:2]
            for line in json_files.read_text(path).split("\n") if line.strip())


def read_gigaspeech(folder):
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
    "GigaSpeech": (("GigaSpeech.json",), read_gigaspeech),
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


def audio_paths(source):
    """Paths of a list or folder of speech; names may omit their ending and the usual subfolder."""
    folder = source if source.is_dir() else source.parent
    return Paths(folder.resolve(), inside=SUBFOLDERS, endings=SOUNDS)


def open_source(name, columns):
    """(the list or folder that is read, description, rows) of a file, a folder, or a pattern."""
    path = Path(name)
    if path.is_dir():
        return open_folder(path, columns)
    files = [path] if path.exists() else sorted(map(Path, glob.glob(str(name))))
    require(files, f"{name}: there is no such file or folder; download data of a URL or the "
            "Hub first: hf download OWNER/NAME --repo-type dataset --local-dir FOLDER")
    return (files[0] if len(files) == 1 else path), *open_files(files, columns)


def open_files(files, columns):
    """(description, rows) of a list, or of files that hold audio and texts, all of one kind."""
    path = files[0]
    with json_files.open_file(path) as opened:
        head = opened.read(512)
    require(not head.startswith((b"\x1f\x8b", b"PK\3\4")),
            f"{path}: is compressed: gunzip, tar xzf or unzip it, or save an Excel table as CSV")
    require(not head.startswith((b"RIFF", b"fLaC", b"OggS", b"ID3")),
            f"{path}: is an audio file; give the folder with the texts, or a list of both")
    read = read_tar if head[257:262] == b"ustar" else None
    if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        cli.require_package("pyarrow", f"{path}: parquet and arrow files")
        read = read_columns

    def entries():
        for file in files:
            try:
                yield from read(file)
            except (tarfile.TarError, EOFError, OSError,        # and pyarrow's
                    ValueError, NotImplementedError) as error:
                raise UserError(f"{file}: cannot be read, it may be cut off ({first_line(error)})")
    if read:
        return f"{plural(len(files), 'file')} with audio", rows_of(path, entries(), columns)
    require(len(files) == 1, f"{path}: is one of {len(files)} lists; give one")
    require(path.suffix not in (".parquet", ".arrow", ".tar"),
            f"{path}: is not a parquet, arrow or tar file")
    start = next((line.strip() for line in lines_of(path) if line.strip()), "")
    if start[:1] not in ("{", "[") and path.suffix not in (".json", ".jsonl"):
        return open_table(path, columns)
    whole = json_files.json_value(path) if path.suffix == ".json" else None
    if isinstance(whole, dict) and isinstance(whole.get("samples"), list):
        return "metadata.json", ((f"sample {number}", metadata_row(path.parent, entry))
                                 for number, entry in enumerate(whole["samples"], 1))
    unit, read = json_files.read_entries(path)
    return "JSON", rows_of(path, ((f"{unit} {number + 1}", entry)
                                  for number, entry in read(lambda number: True)), columns)


def open_folder(folder, columns):
    """open_source of a folder: the one list in it, or nearest below it; else audio with texts."""
    refused, level = [], [folder]
    for depth in range(DEPTH):
        lists = [source for path in level for source in open_lists(path, depth, columns, refused)]
        require(len(lists) < 2, f"{folder}: holds {len(lists)} lists; give one: "
                                + ", ".join(str(path) for path, *_ in lists[:12]))
        if lists:
            return lists[0]
        level = [path for parent in level for path in sorted(parent.iterdir())
                 if path.is_dir() and not path.name.startswith(".")][:200]
    first = next(read_sidecars(folder), None)
    if any(not isinstance(row, BadSample) for _, row in read_sidecars(folder)):
        return folder, "audio files with their texts next to them", read_sidecars(folder)
    why = f"has audio, such as {one_line(first[0], 80)}, but no list of texts; it {first[1]}" \
        if first else f"has neither a list nor audio files ({', '.join(AUDIO_FILES)})"
    raise UserError(f"{folder}: {why}" + "".join(f"; {error}" for error in refused[:1]))


def open_lists(folder, depth, columns, refused):
    """[open_source of each list] in one folder; refused takes the reasons of files not read."""
    names = sorted(path.name for path in folder.iterdir())
    for corpus, (patterns, read) in CORPORA.items():
        if all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns):
            rows = ((f"row {number}", row) for number, row in enumerate(read(folder), 1))
            return [(folder, corpus, rows)]
    if {"wav.scp", "text"} <= set(names):
        return [(folder, "Kaldi", read_kaldi(folder))]
    require("raw.arrow" not in names, f"{folder}: is F5-TTS's prepared folder; give its csv")
    require("dataset_dict.json" not in names, f"{folder}: holds splits; give the folder of one")
    saved = {"state.json", "dataset_info.json"} <= set(names)       # by datasets' save_to_disk
    groups, lists = {}, []      # groups: {list or pattern: its files}
    for name in names:
        if name.endswith((".parquet", ".tar") + (".arrow",) * saved) and name[0] != ".":
            split = "" if saved or name.endswith(".tar") else re.split("[-_]", name)[0] + "-"
            groups.setdefault(folder / f"{split}*{Path(name).suffix}", []).append(folder / name)
    shards = set(groups)
    clips = {name.split(".")[0] for name in names if name.lower().endswith(SOUNDS)}
    has_texts = any(name.split(".")[0] in clips for name in names if name.endswith(TEXTS))
    tables = [name for name in names if name.lower().endswith(LISTS) and (folder / name).is_file()
              and name.split(".")[0] not in clips and not name.endswith(".trans.txt")]
    if len(tables) > 100 or has_texts and depth or saved:       # a folder of texts
        tables = [name for name in tables if name.startswith("metadata.")]
    for path, files in (groups | {folder / name: [folder / name] for name in tables}).items():
        try:
            lists.append((path, *open_files(files, columns)))
        except UserError as error:
            if path in shards or isinstance(error, Undecided):
                raise
            refused.append(error)
    return lists


# ---- Rows -> ChatML


def check_row(row, paths):
    """The row with the absolute path of its audio and its text as a string. Raises BadSample."""
    if not isinstance(row, dict):
        raise row if isinstance(row, BadSample) else BadSample(
            f"is a {type(row).__name__}, not an object")
    if "messages" in row:
        for item in content_items(row):
            for key in ("audio_url", "url", "path") if isinstance(item, dict) else ():
                if item.get("type") == "audio" and isinstance(item.get(key), str):
                    item[key] = paths.find(item[key])
        return row
    name = row.get("audio")
    if not isinstance(name, str) or not name.strip():
        raise BadSample(f"has no audio, but {name!r}")
    row |= {"text": text_of(row), "audio": paths.find(name), "name": name}
    stem, ending = os.path.splitext(os.path.basename(row["audio"]))
    if ending.lower() in NOT_READ:      # it would be refused after hours of encoding
        raise BadSample(f"{ending[1:]} is not read; convert it: ffmpeg -i {stem}{ending} "
                        f"{stem}.flac", "audio")
    audio_item(row)     # its times
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
    if text.lower() in NO_TEXT:
        raise BadSample(f"its text is {text!r}" if text else "its text is empty", "empty_text")
    if not SPEAKER_MARK.match(text):
        return text
    speakers = list(dict.fromkeys(SPEAKER_MARK.findall(text)))
    return SPEAKER_MARK.sub(lambda mark: f"[SPEAKER{speakers.index(mark[1])}] "
                            if len(speakers) > 1 else "", text)


def audio_item(row):
    """ChatML audio item of a row; with an offset it is a cut, of a duration if that is known."""
    times = []
    for key in ("offset", "duration", "end"):
        try:
            seconds = float("nan" if row.get(key) in (None, "") else row[key])
        except (TypeError, ValueError):
            raise BadSample(f"its {key} is {row[key]!r}, not seconds")
        times.append(seconds if math.isfinite(seconds) else None)
    offset, duration, end = times
    if end is not None and (offset is not None or end >= 0):
        offset = offset or 0.0
        duration = end - offset if end >= 0 else None       # Kaldi's -1: to the end of the file
        if duration is not None and duration <= 0:
            raise BadSample(f"ends at {end} s, where it does not last: it begins at {offset} s")
    return {"type": "audio", "audio_url": row["audio"], "offset": offset, "duration": duration}


def chatml_of(row, reading, candidates, paths):
    """ChatML sample of a row. candidates: find_candidates. Raises BadSample."""
    task = row.get("task_type")
    if task in (None, "", "audio_generation"):      # JimmyMa99's converter writes it everywhere
        task = reading.task_type
    if task not in TASK_TYPES:
        raise BadSample(f"unknown task_type {task!r}; known: {', '.join(TASK_TYPES)}")
    references, notes = references_of(row, task, reading, candidates, paths)
    if not all(isinstance(text, str) for _, text, _ in references):
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
        instruction, scene = system_parts(row["text"], scene, voices, bool(references))
        system = [instruction] + ["\n\n" + SCENE.format(scene)] * bool(scene)
        for tag, transcript, audio in references:
            words = tag + transcript.strip()
            turns += [{"role": "user", "content": words}] * bool(words)
            turns.append({"role": "assistant", "content": audio})
    system = [{"type": "text", "text": item} if isinstance(item, str) else item for item in system]
    kept = {name: row.get(name) for name in ("speaker", "language", "split", "normalize_text")}
    misc = {"sample_id": row.get("id")} | ({"notes": notes} if notes else {})
    return {"messages": [{"role": "system", "content": system}, *turns,
                         {"role": "user", "content": row["text"]},
                         {"role": "assistant", "content": audio_item(row)}], **kept, "misc": misc}


def references_of(row, task, reading, candidates, paths):
    """([(tag, transcript, audio item)] before the text of a row, [(check, note)])."""
    def clip(name):
        return {"type": "audio", "audio_url": paths.find(str(name))}
    if reading.reference == "none" or draw("share", row, reading) >= reading.reference_share:
        return [], []
    if reading.reference == "same_speaker":
        others = [other for other in candidates.get(str(row.get("speaker")), ())
                  if (other["name"], other.get("offset")) != (row["name"], row.get("offset"))]
        if not others:
            return [], [("no_second_clip", f"its speaker {row.get('speaker')!r} has no other clip")]
        other = others[int(draw("reference", row, reading) * len(others))]
        return [("", other["text"], audio_item(other))], []
    audio, text, speakers = row.get("ref_audio"), row.get("ref_text"), row.get("ref_speakers")
    if task == "multi_speaker_voice_cloning":
        if not isinstance(speakers, list) or not speakers or not all(
                isinstance(speaker, dict) and speaker.get("ref_audio_file")
                and speaker.get("ref_transcript") for speaker in speakers):
            raise BadSample(f"{task} needs 'ref_speakers' of 'ref_audio_file' and 'ref_transcript'")
        tags = [str(speaker.get("speaker_tag") or f"SPEAKER{i}").strip("[]")
                for i, speaker in enumerate(speakers)]
        return [(f"[{tag}] ", speaker["ref_transcript"], clip(speaker["ref_audio_file"]))
                for tag, speaker in zip(tags, speakers)], []
    if speakers is not None and task != "zero_shot_voice_cloning":      # a metadata.json's row
        note = "unused_reference", f"{task} uses no reference clips"
        return [], [note] * bool(audio or speakers)
    if speakers is not None and not (audio and text):
        raise BadSample("zero_shot_voice_cloning needs 'ref_audio_file' and 'ref_transcript'")
    unknown = [("no_reference_text", f"what its reference {audio!r} says is not known")]
    if not audio:
        return [], unknown * bool(row.get("voice_prompts"))
    sidecar = Path(clip(audio)["audio_url"]).with_suffix(".txt")
    text = text or (json_files.read_text(sidecar).strip() if sidecar.is_file() else "")
    return ([("", text, clip(audio))], []) if text or reading.lone_reference else ([], unknown)


def draw(purpose, row, reading):
    """A random number from 0 to 1 that depends on the row and the seed, not on other rows."""
    key = f"{reading.seed}\0{purpose}\0{row['name']}\0{row.get('offset')}"
    key = key.encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64


def find_candidates(rows, reading):
    """{speaker: up to CANDIDATES rows for reference}; those of a good length come first."""
    candidates = {}

    def rank(row):
        seconds = audio_item(row)["duration"]
        is_good = not seconds or GOOD_SECONDS[0] <= seconds <= GOOD_SECONDS[1]
        return not is_good, draw("candidate", row, reading)

    for row in rows:
        if row.get("speaker"):
            clips = candidates.setdefault(str(row["speaker"]), [])
            clips.append(row)
            if len(clips) == 2 * CANDIDATES:        # so that memory holds few
                clips[:] = sorted(clips, key=rank)[:CANDIDATES]
    return {speaker: sorted(clips, key=rank)[:CANDIDATES] for speaker, clips in candidates.items()}


# ---- A whole source


def is_held_out(row):
    """True if a row's split says that it is validation data."""
    return isinstance(row, dict) and str(row.get("split")).strip().lower() in HELD_OUT


class JsonLines:
    """JSON values in a temporary file of a folder, so that memory never holds all of them. They are
    read by one loop at a time."""

    def __init__(self, folder):
        self.folder, self.length = folder, 0
        self.file = tempfile.TemporaryFile("w+", encoding="utf-8", dir=folder)

    def __len__(self):
        return self.length

    def __iter__(self):
        self.file.seek(0)
        return map(json.loads, self.file)

    def append(self, value):
        """Append a value; what JSON does not know becomes text."""
        try:
            self.file.write(json.dumps(value, default=str) + "\n")
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written ({error.strerror})")
        self.length += 1


def read_rows(source, rows, held_out, paths, folder):
    """(JsonLines in `folder` of [name, checked row], [(name, BadSample)], number of rows of another
    split). held_out: take the rows whose `split` says validation data, or all if none does."""
    usable, marked = JsonLines(folder), JsonLines(folder)
    refused, n_marked = [], 0       # n_marked: also rows that cannot be used
    for location, row in rows:
        name, is_marked = sample_name(f"{source} {location}", row), is_held_out(row)
        n_marked += is_marked
        try:
            if held_out or not is_marked:
                (marked if is_marked else usable).append([name, check_row(row, paths)])
        except BadSample as error:
            refused.append((name, error))
    return (marked, refused, len(usable)) if held_out and n_marked else (usable, refused, n_marked)


def make_entries(rows, reading, candidates, paths, refused):
    """Yield the ChatML of each (name, row); refused takes (name, BadSample) of one without."""
    for name, row in rows:
        try:
            entry = row if "messages" in row else chatml_of(row, reading, candidates, paths)
        except BadSample as error:
            refused.append((name, error))
        else:
            misc = entry.get("misc") if isinstance(entry.get("misc"), dict) else {}
            yield entry | {"misc": misc | {"source": name}}


def count_oddities(rows, folder):
    """Lines that count the rows with an oddity, with an example."""
    examples = {}       # {clause: [number of rows, the text or path of the first]}
    for row in rows:
        for clause, pattern in ODDITIES.items():
            if pattern.search(row["text"]):
                examples.setdefault(clause, [0, row["text"]])[0] += 1
        if not os.path.isabs(row["name"]) and not Path(row["audio"]).is_relative_to(folder):
            examples.setdefault(OUTSIDE, [0, row["audio"]])[0] += 1
    return [f"{plural(n, 'row' if clause == OUTSIDE else 'text')} {clause}, such as "
            f"{one_line(example)[:60]!r}" for clause, (n, example) in examples.items()]


def to_chatml(source, out_path, problems, *, held_out=False, **settings):
    """Write a source of any format as ChatML .jsonl. UserError where nothing can be read.

    problems: a list that takes the Problems of rows that cannot be used. held_out: as in
    read_rows. settings: of Reading."""
    from core import checkpoint         # late: these import torch, which --help does not need
    from core.problems import problem
    out_path, reading = Path(out_path), Reading(**settings)
    files = Path(source).rglob("*") if os.path.isdir(source) else map(Path, glob.glob(str(source)))
    origin = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)
              if file.suffix in (".parquet", ".arrow", ".tar")]
    note_path = out_path.with_suffix(".source")     # audio is unpacked once
    if origin and note_path.exists() and out_path.exists():
        note = json_files.read_object(note_path)
        if note["made"] == [*origin, held_out, vars(reading)]:
            print(f"converted  {one_line(source)}: as before, {out_path}", flush=True)
            problems += [problem(*row, source) for row in note["refused"]]
            return
    out_path.parent.mkdir(parents=True, exist_ok=True)
    note_path.unlink(missing_ok=True)
    columns = dict(pair.split("=", 1) for pair in reading.columns.split(",") if pair)
    path, description, rows = open_source(source, columns)
    rows, paths = unpack_audio(rows, out_path.with_suffix(".audio").resolve()), audio_paths(path)
    rows, refused, skipped = read_rows(path, rows, held_out, paths, out_path.parent)

    def table_rows():
        return (row for _, row in rows if "messages" not in row)

    texts = Counter(row["text"] for row in table_rows())
    for text, n in texts.most_common(1):
        require(texts.total() < 8 or n <= texts.total() / 2, f"{path}: {n} of {texts.total()} "
                f"texts are equal, {text[:60]!r}: hardly the spoken words; name the column: "
                "--columns text=NAME")
        require(not is_phonemic(list(texts)[:1000]),
                f"{path}: its texts are phonemes, such as {text[:60]!r}: {PHONEMES}")
    of_speakers = reading.reference == "same_speaker"
    candidates = find_candidates(table_rows(), reading) if of_speakers else {}
    entries = make_entries(rows, reading, candidates, paths, refused)
    n_kept = 0

    def write(path):
        nonlocal n_kept
        with open(path, "w", encoding="utf-8") as file:
            for entry in entries:
                file.write(json.dumps(entry) + "\n")
                n_kept += 1

    checkpoint.write_atomically(out_path, write)
    refused = [problem(name, error.check, error, source) for name, error in refused]
    if origin:
        note = {"made": [*origin, held_out, vars(reading)],
                "refused": [[p.name, p.check, p.reason] for p in refused]}
        checkpoint.write_text(note_path, json.dumps(note))
    problems.extend(refused)
    counts = sorted(Counter(p.check for p in refused).items())
    print(f"converted  {one_line(source)} ({one_line(description)}): "
          f"{plural(n_kept + len(refused), 'row')} = {n_kept} kept + {len(refused)} refused"
          + (f" ({', '.join(f'{n} {check}' for check, n in counts)})" if counts else "")
          + f"; {out_path}" + (f"; {skipped} are of another split" if skipped else ""))
    with contextlib.suppress(BadSample), open(out_path, encoding="utf-8") as file:
        for entry in map(json.loads, itertools.islice(file, 1)):
            sample = canonical_sample(entry["misc"]["source"], entry, paths)
            print(f"           first: {one_line(sample_text(sample))}")
    for line in count_oddities(table_rows(), paths.base):
        print(f"           {line}")
    sys.stdout.flush()


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
