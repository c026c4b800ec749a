"""The formats in which people keep speech: found by content, and read row by row.

find_source(path) looks into a file or folder, names its format, and gives a reader. A reader yields rows: dicts with
audio, text and maybe id, speaker, language, scene, offset, duration, references; or raw ChatML samples. What a row
means is decided elsewhere (speech/data/prompts.py).
"""
import csv
import glob
import io
import itertools
import os
import re
from pathlib import Path

from common import hub
from common.distributed import UserError
from common.text import NAME, printable
from core import json_files
from core.json_files import SKIPPED, json_value, read_entries
from speech.choices import FORMATS
from speech.data import containers, corpora, sidecar
from speech.data.columns import (
    AUDIO_FILES,
    OTHER_AUDIO,
    TEXTS,
    check_given,
    find_columns,
    unknown_columns,
)
from speech.data.conversations import BadSample, Paths, Source, is_chatml

MAGIC = ((0, b"PAR1", "parquet"), (0, b"ARROW1", "arrow"), (0, b"\xff\xff\xff\xff", "arrow"), (257, b"ustar", "tar"),
         (0, b"\x1f\x8b", "gzip"), (0, b"PK\x03\x04", "zip"), (0, b"RIFF", "audio"), (0, b"fLaC", "audio"),
         (0, b"OggS", "audio"), (0, b"ID3", "audio"))
NOT_READ = {"gzip": "is compressed; unpack it first (gunzip, tar xzf)",
            "zip": "is a zip file; unpack it first; save an Excel table as CSV UTF-8",
            "audio": "is an audio file; give the folder with the texts, or a list of audio and text"}
SEPARATORS = {"\t": "TSV", ",": "CSV", ";": "CSV with semicolons", "|": "table with |"}
HEADERLESS = {"list": ("audio", "speaker", "language", "text"), "piper": ("audio", "speaker", "text"),
              "ljspeech": ("audio", "text", "normalised text")}
LANGUAGES = {"zh", "ja", "jp", "en", "ko", "yue", "de", "fr", "es", "it", "pt", "ru", "ar", "vi", "th"}
IPA = re.compile("[əɪʊɛɔæʌɑɹʃʒθðŋˈˌː]")
LISTS = (".json", ".jsonl", ".csv", ".tsv", ".list", ".lst", ".txt")       # in a folder
DEPTH, FOLDERS, FILES = 3, 200, 100     # levels of folders that are looked through for lists; more are not lists
HELD_OUT = {"eval", "test", "dev", "val", "valid", "validation"}
LOOK = 20               # rows that are looked at to find out the format


def find_source(path, data_format="auto", columns="", held_out=False):
    """Source of a file, a folder, or a pattern such as 'shards/*.tar'. data_format: one of FORMATS, or "auto".

    columns: of --columns. held_out: whether it is validation data. Raises UserError when no format fits, or two do, or
    the one asked for does not.
    """
    name, path = str(path), Path(path)
    if path.is_dir():
        fits = _folder_formats(path, data_format, columns, held_out)
    elif not path.exists() and (shards := [Path(p) for p in sorted(glob.glob(name))]):
        fits = _shard_formats(path, shards, columns)
    elif re.match(r"[a-z0-9]+://", name) and not name.startswith(hub.PREFIX):
        raise UserError(f"{name}: URLs are not read; copy the data here first")
    elif not path.exists() and hub.may_be(name):
        fits = _shard_formats(name, hub.find_shards(name, (".parquet", ".tar")), columns)
    else:
        fits = _file_formats(path, columns, held_out)
    if data_format != "auto":
        if data_format not in fits:
            raise UserError(f"{path}: cannot be read as --data_format {data_format}; what is in it fits "
                            f"{' and '.join(fits) or 'none of ' + ', '.join(FORMATS)}")
        return fits[data_format]
    if len(fits) > 1:
        raise UserError(f"{path}: fits two formats, {' and '.join(fits)}; say which with --data_format")
    return next(iter(fits.values()))


def _one(path, kind, about, base, read, unit="sample"):
    return {kind: Source(path, kind, printable(about), base, read, unit)}


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def _folder_formats(folder, data_format, columns, held_out):
    """{format: Source} of a folder: the one list in it, or nearest below it; without a list, texts beside audio."""
    refused, level = [], [folder]
    for depth in range(DEPTH):
        found = {}
        for place in level:
            found |= _lists_in(place, depth, columns, held_out, refused)
        if data_format != "auto":
            found = {path: fits for path, fits in found.items() if data_format in fits}
        if len(found) > 1:
            raise UserError(f"{folder}: holds {len(found)} lists; give one: {', '.join(map(str, list(found)[:12]))}")
        if found:
            return next(iter(found.values()))
        level = [Path(entry.path) for place in level for entry in sorted(os.scandir(place), key=lambda e: e.name)
                 if entry.is_dir() and not entry.name.startswith(".")]
        if len(level) > FOLDERS:
            break
    audio, text = sidecar.first_clips(folder)
    if not audio:
        raise refused[0] if refused else UserError(
            f"{folder}: has neither a list nor audio files ({', '.join(AUDIO_FILES)})")
    if cut := corpora.numbered_list(audio):
        return _one(folder, "emilia_pipe", f"lists of clips, such as {cut}", folder,
                    lambda wanted: corpora.numbered(corpora.emilia_pipe(folder), wanted))
    if not text:
        why = f"; of the files there: {refused[0]}" if refused else ""
        raise UserError(f"{folder}: has audio, such as {printable(str(audio.relative_to(folder)), NAME)}, but no list of "
                        f"texts, nor texts beside it ({', '.join(audio.stem + ending for ending in TEXTS)}){why}")
    return _one(folder, "sidecar", f"audio files with their texts beside them, such as {text.relative_to(folder)}",
                folder, lambda wanted: sidecar.read_sidecar(folder, wanted))


def _lists_in(place, depth, columns, held_out, refused):
    """{path to give: {format: Source}} of the lists in one folder; refused takes why others are not read."""
    try:
        names = sorted(os.listdir(place))
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({error.strerror})")
    if saved := hub.saved_shards(place):
        return {place: _shard_formats(place, saved, columns)}
    if corpus := corpora.find_corpus(place, names):
        return {place: _one(place, corpus[0], corpus[1], place, corpus[2])}
    found, shards = {}, {}
    for name in names:
        if name.endswith((".parquet", ".tar")) and not name.startswith("."):
            split = re.split("[-_]", name)[0] + "-" if name.endswith(".parquet") else ""
            shards.setdefault(place / f"{split}*{Path(name).suffix}", []).append(place / name)
    for path, files in shards.items():
        found[path] = _shard_formats(place, files, columns)
    if "wav.scp" in names and "text" in names:
        about = "wav.scp and text" + (" and segments" if "segments" in names else "")
        found[place] = _one(place, "kaldi", about, place, lambda wanted: read_kaldi(place))
    spoken = {name.split(".")[0] for name in names if name.lower().endswith(AUDIO_FILES + OTHER_AUDIO)}
    lists = [name for name in names if name.lower().endswith(LISTS) and name.split(".")[0] not in spoken]
    texts = any(name.split(".")[0] in spoken for name in names if name.endswith(TEXTS))
    if len(lists) > FILES or texts and depth:       # a folder of texts
        lists = [name for name in lists if name.startswith("metadata.")]
    for name in lists:
        try:
            found[place / name] = _file_formats(place / name, columns, held_out)
        except UserError as error:
            refused.append(error)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _shard_formats(path, shards, columns):
    """{format: Source} of files that hold audio and texts, all of one kind."""
    there = hub.is_there(shards[0])
    kinds = {shard: _magic(shard)[0] for shard in (shards[:1] if there else shards)}        # on the hub by their names
    kind = kinds[shards[0]]
    if kind not in containers.READERS:
        raise UserError(f"{path}: {os.path.basename(shards[0])} is neither parquet, arrow nor tar")
    if others := [shard.name for shard in kinds if kinds[shard] != kind]:
        raise UserError(f"{path}: {shards[0].name} is {kind}, {others[0]} is not; give files of one kind")
    names = [shard if there else str(shard.resolve()) for shard in shards]
    about = f"{len(names)} files{' on the hub' if there else ''}, " + containers.about(kind, names[0], columns)
    base = Path.cwd() if there else shards[0].parent
    return {kind: Source(Path(path), kind, printable(about), base,
                         lambda wanted: containers.READERS[kind](names, wanted, columns), on_hub=there)}


def _magic(path):
    """(kind that the first bytes of a file tell, "" for none; those bytes)."""
    with hub.open_file(path) if hub.is_there(path) else json_files.open_file(path) as f:
        head = f.read(2**16)
    return next((kind for at, magic, kind in MAGIC if head[at:at + len(magic)] == magic), ""), head


def _file_formats(path, columns, held_out):
    """{format: Source} of all that fit a file."""
    kind, head = _magic(path)
    if kind in NOT_READ:
        raise UserError(f"{path}: {NOT_READ[kind]}")
    if kind:
        return _shard_formats(path, [path], columns)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if path.name == "metadata.json" or text[:1] == b"{" and b'"samples"' in head and "samples" in _object(path):
        return _metadata_json(path, held_out)
    if text[:1] in (b"{", b"[") or str(path).endswith((".json", ".jsonl")):
        return _json_formats(path, columns)
    return _table_formats(path, columns)


def _object(path):
    """The JSON object of a file, {} for anything else."""
    try:
        found = json_value(path)
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def _json_formats(path, given):
    unit, read = read_entries(path)
    first = list(itertools.islice(read(lambda number: True), LOOK))
    kinds = {}      # of which each is first seen at an entry
    for number, entry in first:
        if kind := _kind(entry, given):
            kinds.setdefault(kind, number + 1)
    if len(kinds) > 1:
        (a, i), (b, j) = list(kinds.items())[:2]
        raise UserError(f"{path}: {unit} {i} is {a}, {unit} {j} is {b}; put them into files of their own")
    kind = next(iter(kinds), "")
    names = list(dict.fromkeys(key for _, entry in first if isinstance(entry, dict) for key in entry))
    found = find_columns(names, given)
    if kind == "codes":
        raise UserError(f"{path}: holds audio_codes, another trainer's; give the list from which they were made")
    if not kind and names and "messages" not in names:
        raise unknown_columns(path, names, found, given)
    if first and not kind and not names:
        raise UserError(f"{path}: holds neither samples with 'messages' nor rows with columns of audio and text")
    if kind in ("manifest", "vibevoice"):
        if given:       # of which some may come late
            entries = (entry for _, entry in read(lambda number: True) if isinstance(entry, dict))
            check_given(path, dict.fromkeys(key for entry in entries for key in entry), given)
        return _one(path, kind, _columns_text("JSON", found), path.parent,
                    lambda wanted: _rows(read(wanted), lambda entry: _manifest_row(entry, found, given)), unit)
    if kind == "ms_swift":
        return _one(path, kind, "JSON samples", path.parent, lambda wanted: _rows(read(wanted), _swift_row), unit)
    return _one(path, "chatml", "JSON samples", path.parent, read, unit)


def _kind(entry, given):
    """Format of one JSON entry, "" for none."""
    if not isinstance(entry, dict):
        return ""
    if isinstance(entry.get("messages"), list):
        return "chatml" if is_chatml(entry) else "ms_swift"
    if "audio_codes" in entry:
        return "codes"
    if "voice_prompts" in entry:
        return "vibevoice"
    return "manifest" if {"audio", "text"} <= find_columns(entry, given).keys() else ""


def _rows(entries, row_of):
    """(number, row_of(entry)) of entries, or the BadSample that it raises."""
    for number, entry in entries:
        try:
            yield number, entry if entry is SKIPPED else row_of(entry)
        except BadSample as error:
            yield number, error


def _manifest_row(entry, columns, given):
    """Row of a JSON object, which may leave columns out, also those in which the format was seen."""
    if not isinstance(entry, dict):
        raise BadSample(f"is a {type(entry).__name__}, not an object")
    mine = find_columns(entry, given)
    return {meaning: entry.get(mine.get(meaning)) for meaning in {**columns, **mine}}


def _swift_row(entry):
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        raise BadSample("has no list 'messages' of texts")
    clips = entry.get("audios") or entry.get("audio") or []
    clips = [clips] if isinstance(clips, str) else clips
    clips = [clip.get("path") if isinstance(clip, dict) else clip for clip in clips]
    answers = [m["content"] for m in messages if m.get("role") == "assistant"]
    asked = sum(m["content"].count("<audio>") for m in messages if m.get("role") != "assistant")
    spoken = sum(answer.count("<audio>") for answer in answers)
    if not answers:
        raise BadSample("has no assistant message")
    if asked and not spoken:
        raise BadSample("its <audio> is in the user's message: that is speech to understand, not to speak")
    if spoken > 1 or asked or len(clips) != 1:
        raise BadSample(f"{asked + spoken} <audio> and {len(clips)} audios: one spoken clip a sample is read")
    text = answers[-1].replace("<audio>", "").strip()
    if not text:
        text = next((m["content"] for m in reversed(messages) if m.get("role") == "user"), "")
    ref = entry.get("ref_audios")
    ref = ref[0] if isinstance(ref, list) and ref else ref
    return {"audio": clips[0], "text": text, "id": entry.get("id"), "speaker": entry.get("speaker"),
            "ref_audio": ref or None, "ref_text": entry.get("ref_text")}


def _metadata_json(path, held_out):
    """A metadata.json with samples. Those marked for validation are read as such, where any are, and never trained."""
    samples = _object(path).get("samples") or json_files.read_object(path).get("samples")
    if not isinstance(samples, list):
        raise UserError(f"{path}: has no list 'samples'")
    marked = [isinstance(raw, dict) and str(raw.get("split")).strip().lower() in HELD_OUT for raw in samples]
    left_out = [mark != held_out for mark in marked] if not held_out or any(marked) else [False] * len(samples)
    about = "samples with files of text" + (f"; {sum(left_out)} are of another split" if any(left_out) else "")

    def read(wanted):
        return ((number, SKIPPED if left_out[number] or not wanted(number) else _metadata_row(raw, path.parent))
                for number, raw in enumerate(samples))
    return _one(path, "metadata_json", about, path.parent, read)


def _metadata_row(raw, folder):
    """Row of one sample of a metadata.json, or the BadSample that says why there is none."""
    if not isinstance(raw, dict):
        error = BadSample(f"is a {type(raw).__name__}, not an object")
        error.place = " (?)"
        return error

    def found(key):
        value = raw.get(key)
        if not isinstance(value, str) or not value:
            raise BadSample(f"has no {key!r}")
        inside = os.path.join(str(raw.get("split") or ""), value)       # its root may leave train/ and eval/ out
        return inside if inside != value and not (folder / value).exists() and (folder / inside).exists() else value

    try:
        row = {"audio": found("audio_file"), "text_file": folder / found("transcript_file"),
               "ref_audio": found("ref_audio_file") if raw.get("ref_audio_file") else None}
    except BadSample as error:
        error.place = f" ({printable(raw.get('id', '?'), NAME)})"
        return error
    return row | {
        "id": raw.get("id"), "text_name": "transcript_file", "scene": raw.get("scene"),
        "speaker": raw.get("speaker_id") or raw.get("speaker_name"), "language": raw.get("language"),
        "duration": raw.get("duration"), "task_type": raw.get("training_task_type") or raw.get("task_type"),
        "ref_text": raw.get("ref_transcript"), "ref_speakers": raw.get("ref_speakers") or [],
        "voices": raw.get("voices")}


def _columns_text(kind, columns):
    return f"{kind}, " + ", ".join(meaning if meaning == name else f"{meaning} = {name!r}"
                                   for meaning, name in columns.items())


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def _table_formats(path, given):
    """Of text that is not JSON: a table with a header, or lines of 2 to 4 fields of which the first names audio."""
    lines = [line for line in itertools.islice(_lines(path), 10 * LOOK) if line.strip()][:LOOK]
    if not lines:
        raise UserError(f"{path}: is empty")
    headers = {separator: _fields(lines[0], separator) for separator in SEPARATORS}
    for separator, names in headers.items():
        found = find_columns(names, given)
        if {"audio", "text"} <= found.keys():
            check_given(path, names, given)
            return _one(path, "manifest", _columns_text(SEPARATORS[separator], found), path.parent,
                        lambda wanted: read_table(path, separator, given), "line")
    known = max(((find_columns(names, given), names) for names in headers.values()), key=lambda pair: len(pair[0]))
    if known[0]:
        raise unknown_columns(path, known[1], known[0], given)
    paths, why = audio_paths(path.parent), f"nor 2 to 4 fields as all others: {lines[0][:80]!r}"
    for separator in SEPARATORS:
        rows = [_fields(line, separator, as_written=True) for line in lines]
        if len({len(row) for row in rows}) == 1 and 2 <= len(rows[0]) <= 4:
            if sum(paths.has(row[0].strip()) for row in rows) >= 0.9 * len(rows):
                return _headerless(path, separator, rows)
            why = (f"and its first field names no audio files: {rows[0][0].strip()[:80]!r} is not there; looked in "
                   + ", ".join(paths.places()))
    raise UserError(f"{path}: is not a table that is known: its first line has neither a column of audio and one of "
                    f"text, {why}; give it a first line: audio,text")


def _headerless(path, separator, rows):
    """{format: Source} of a table without a header. rows: its first ones, all of 2 to 4 fields."""
    if len(rows[0]) == 2:
        kinds = ["ljspeech"]
    elif len(rows[0]) == 4:
        kinds = ["list"]
        if not all(row[2].strip().lower() in LANGUAGES for row in rows):
            raise UserError(f"{path}: of 4 fields the third must be a language ({', '.join(sorted(LANGUAGES))}), "
                            f"not {rows[0][2]!r}")
    elif all(row[2].strip().isdigit() for row in rows) and any(IPA.search(row[1]) for row in rows):
        raise UserError(f"{path}: its texts are phonemes (StyleTTS2), which Higgs-Audio does not read; give the texts "
                        "from which they were made")
    else:
        middle = {row[1].strip() for row in rows}
        names = all(len(name) <= 40 and " " not in name for name in middle)
        few = len(middle) <= len(rows) / 2
        kinds = (["piper"] if names else []) + ([] if names and few else ["ljspeech"])
    fits = {}
    for kind in kinds:
        fields = HEADERLESS[kind][:len(rows[0])]
        fits |= _one(path, kind, separator.replace("\t", " TAB ").join(fields), path.parent,
                     lambda wanted, kind=kind: read_headerless(path, separator, kind), "line")
    return fits


def audio_paths(folder):
    """Paths of a folder of speech, where names may lack their ending and the usual subfolder."""
    return Paths(Path(folder).resolve(), inside=("wavs", "wav", "clips", "audio"), endings=AUDIO_FILES + OTHER_AUDIO)


def _lines(path):
    """Lines of a text file without their ends. Raises UserError naming the first line that is not UTF-8."""
    with json_files.open_file(path) as f:
        for number, line in enumerate(json_files.lines(f, path), 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise json_files.not_utf8(path, number, line)


def _fields(line, separator, as_written=False):
    """Fields of a line of a table; a line whose quotes do not fit is split at every separator.

    as_written: quotes count only where Python's csv module would have written them, as in tables without a header:
    Piper's are made by it, LJSpeech has quotes of its own.
    """
    if '"' not in line:
        return line.split(separator)
    try:
        fields = next(csv.reader([line], delimiter=separator, strict=True))
    except csv.Error:
        return line.split(separator)
    if as_written and line not in (_written(fields, separator, csv.QUOTE_MINIMAL),
                                   _written(fields, separator, csv.QUOTE_ALL)):
        return line.split(separator)
    return fields


def _written(fields, separator, quoting):
    line = io.StringIO()
    csv.writer(line, delimiter=separator, quoting=quoting, lineterminator="").writerow(fields)
    return line.getvalue()


def read_table(path, separator, given):
    """Rows of a table with a header. In CSV a quoted field may go over several lines; elsewhere a line is a row."""
    if separator == ",":
        rows = _csv_rows(path)
    else:
        rows = ((number, _fields(line, separator)) for number, line in enumerate(_lines(path)))
    rows = ((number, row) for number, row in rows if any(field.strip() for field in row))
    _, names = next(rows)
    columns = {meaning: names.index(name) for meaning, name in find_columns(names, given).items()}
    for number, row in rows:
        if len(row) != len(names):
            yield number, BadSample(f"has {len(row)} fields, the header has {len(names)}: {separator.join(row)[:80]!r}")
        else:
            yield number, {meaning: row[at].strip("\n") for meaning, at in columns.items()}


def _csv_rows(path):
    """(number of the first line, row) of a CSV file.

    UserError names the line of an open quote, which would swallow the lines behind it.
    """
    reader = csv.reader((line + "\n" for line in _lines(path)), strict=True)
    while True:
        line = reader.line_num
        try:
            yield line, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}: its quotes do not fit in the row that begins at line {line + 1} ({error}); a quote "
                            'inside a field is written twice, and the field stands in quotes: "so ""it"" is"')


def read_headerless(path, separator, kind):
    """Rows of lines without a header."""
    names = HEADERLESS[kind]
    for number, line in enumerate(_lines(path)):
        if not line.strip():
            continue
        values = [value.strip() for value in _fields(line, separator, as_written=True)]
        if len(values) != len(names) and not (kind == "ljspeech" and len(values) == 2):
            yield number, BadSample(f"has {len(values)} fields between bars, not {len(names)}: {line[:80]!r}")
            continue
        row = dict(zip(names, values))
        row["text"] = row.pop("normalised text", "") or row["text"]
        yield number, {"id": Path(row["audio"]).stem, **row}


# ---------------------------------------------------------------------------------------------------------------------
# Kaldi


def read_kaldi(folder):
    """Rows of wav.scp, text and maybe segments, utt2spk; a pipe in wav.scp is never run."""
    def pairs(name):
        found = {}
        for number, line in enumerate(_lines(folder / name), 1):
            key, value = (*line.split(None, 1), "", "")[:2]
            if key in found:
                raise UserError(f"{folder / name}: line {number} has {key!r} again")
            if key:
                found[key] = value.strip()
        return found

    audio, texts = pairs("wav.scp"), pairs("text")
    for key, where in audio.items():
        if where.endswith("|"):
            raise UserError(f"{folder / 'wav.scp'}: {key} is a command, which is not run; write its output to files "
                            "(wav-copy) and name those")
    segments = pairs("segments") if (folder / "segments").exists() else None
    speakers = pairs("utt2spk") if (folder / "utt2spk").exists() else {}
    for number, (key, text) in enumerate(texts.items()):
        row = {"id": key, "audio": key, "text": text, "speaker": speakers.get(key)}
        try:
            if segments is not None:
                if key not in segments:
                    raise BadSample("is not in segments")
                recording, start, end = segments[key].split()
                row |= {"audio": recording, "offset": float(start), "end": float(end)}
            if row["audio"] not in audio:
                raise BadSample(f"{row['audio']!r} is not in wav.scp")
            yield number, {**row, "audio": audio[row["audio"]]}
        except ValueError:
            yield number, BadSample(f"segments has {segments[key]!r}, not: recording start end")
        except BadSample as error:
            yield number, error
