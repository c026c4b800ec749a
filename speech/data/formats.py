"""The formats in which people keep speech: found by content, and read row by row.

find_source(path) looks into a file or folder, names its format, and gives a reader. A reader yields rows: dicts with
audio, text and maybe id, speaker, language, scene, offset, duration, references; or raw ChatML samples. What a row
means is decided elsewhere (speech/data/rows.py).
"""
import csv
import glob
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from common import hub, json_files
from common.distributed import UserError
from common.json_files import SKIPPED, json_entries, json_value
from common.text import NAME, printable
from speech.choices import FORMATS
from speech.data import containers, corpora
from speech.data.columns import AUDIO_FILES, OTHER_AUDIO, TEXTS, find_columns
from speech.data.conversations import BadSample, Paths

MAGIC = ((0, b"PAR1", "parquet"), (0, b"ARROW1", "arrow"), (0, b"\xff\xff\xff\xff", "arrow"), (257, b"ustar", "tar"),
         (0, b"\x1f\x8b", "gzip"), (0, b"RIFF", "audio"), (0, b"fLaC", "audio"), (0, b"OggS", "audio"),
         (0, b"ID3", "audio"))
LANGUAGES = {"zh", "ja", "jp", "en", "ko", "yue", "de", "fr", "es", "it", "pt", "ru", "ar", "vi", "th"}
IPA = re.compile("[əɪʊɛɔæʌɑɹʃʒθðŋˈˌː]")
NO_SPEAKER = {"wav", "wavs", "clips", "audio", "mp3", "flac", "train", "dev", "test", "eval", "valid", "val"}
LOOK = 20               # rows that are looked at to find out the format


@dataclass(frozen=True)
class Source:
    """A file or folder and how to read it. read(wanted) yields (number, row, raw sample, BadSample or SKIPPED)."""
    path: Path
    format: str
    about: str          # what was found out, for people
    base: Path          # relative names of audio files begin here
    read: object
    on_hub: bool = False


def find_source(path, data_format="auto"):
    """Source of a file, a folder, or a pattern such as 'shards/*.tar'. data_format: one of FORMATS, or "auto".

    Raises UserError when no format fits, or two do, or the one asked for does not.
    """
    name, path = str(path), Path(path)
    if path.is_dir():
        fits = _folder_formats(path)
    elif not path.exists() and (shards := [Path(p) for p in sorted(glob.glob(str(path)))]):
        fits = _shard_formats(path, shards)
    elif not path.exists() and hub.may_be(name):
        fits = _shard_formats(name, hub.find_shards(name, (".parquet", ".tar")))
    else:
        fits = _file_formats(path)
    if data_format != "auto":
        if data_format not in fits:
            raise UserError(f"{path}: cannot be read as --data_format {data_format}; what is in it fits "
                            f"{' and '.join(fits) or 'none of ' + ', '.join(FORMATS)}")
        return fits[data_format]
    if len(fits) > 1:
        raise UserError(f"{path}: fits two formats, {' and '.join(fits)}; say which with --data_format")
    return next(iter(fits.values()))


# ---------------------------------------------------------------------------------------------------------------------
# Which formats fit


def _folder_formats(folder):
    """{format: Source} of all that fit a folder."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})")
    if "metadata.json" in names:
        return _metadata_json(folder / "metadata.json")
    fits = {}
    if saved := hub.saved_shards(folder):
        fits |= _shard_formats(folder, saved)
    for place in (folder, folder / "data"):
        for ending in (".parquet", ".tar"):
            if shards := sorted(place.glob(f"*{ending}")):
                splits = sorted({re.split("[-_]", shard.name)[0] for shard in shards}) if ending == ".parquet" else []
                if len(splits) > 1:
                    raise UserError(f"{folder}: holds the splits {', '.join(splits)}; give one: "
                                    f"'{place}/{splits[-1]}-*.parquet'")
                fits |= _shard_formats(folder, shards)
    if "wav.scp" in names and "text" in names:
        fits |= _one(folder, "kaldi", "wav.scp and text" + " and segments" * ("segments" in names), folder,
                     lambda wanted: read_kaldi(folder))
    for name in names:
        if name in ("metadata.csv", "metadata.tsv", "metadata.txt", "metadata.jsonl"):
            fits |= {kind: Source(folder, kind, f"{name}: {found.about}", folder, found.read)
                     for kind, found in _file_formats(folder / name).items()}
    if corpus := corpora.find_corpus(folder, names):
        fits |= _one(folder, corpus[0], corpus[1], folder, corpus[2])
    audio = None if fits else _first_audio(folder)
    cut = audio and corpora.NUMBERED.fullmatch(audio.stem)
    if cut and (audio.parent / f"{cut[1]}.json").is_file():
        fits = _one(folder, "emilia_pipe", f"lists of clips, such as {cut[1]}.json", folder,
                    lambda wanted: corpora.numbered(corpora.emilia_pipe(folder), wanted))
    elif audio:
        fits = _one(folder, "sidecar", f"audio files with their texts beside them, such as {audio.relative_to(folder)}",
                    folder, lambda wanted: read_sidecar(folder, wanted))
    if not fits:
        tables = [n for n in names if n.endswith((".json", ".jsonl", ".csv", ".tsv", ".list", ".txt"))]
        hint = f"; give one of its files: {', '.join(tables[:5])}" if tables else ""
        raise UserError(f"{folder}: has neither metadata.json nor audio files ({', '.join(AUDIO_FILES)}){hint}")
    return fits


def _one(path, kind, about, base, read):
    return {kind: Source(path, kind, about, base, read)}


def _first_audio(folder):
    return next((Path(at) / name for at, _, names in os.walk(folder) for name in names
                 if name.lower().endswith(AUDIO_FILES + OTHER_AUDIO)), None)


def _shard_formats(path, shards):
    """{format: Source} of files that hold audio and texts, all of one kind."""
    there = hub.is_there(shards[0])
    kinds = {shard: _magic(shard)[0] for shard in (shards[:1] if there else shards)}        # on the hub by their names
    kind = kinds[shards[0]]
    if kind not in containers.READERS:
        raise UserError(f"{path}: {os.path.basename(shards[0])} is neither parquet, arrow nor tar")
    if others := [shard.name for shard in kinds if kinds[shard] != kind]:
        raise UserError(f"{path}: {shards[0].name} is {kind}, {others[0]} is not; give files of one kind")
    names = [shard if there else str(shard.resolve()) for shard in shards]
    about = f"{len(names)} files{' on the hub' * there}, " + containers.about(kind, names[0])
    base = Path.cwd() if there else shards[0].parent
    return {kind: Source(Path(path), kind, about, base, lambda wanted: containers.READERS[kind](names, wanted), there)}


def _magic(path):
    """(kind that the first bytes of a file tell, "" for none; those bytes)."""
    with hub.open_file(path) if hub.is_there(path) else json_files.open_file(path) as f:
        head = f.read(2**16)
    return next((kind for at, magic, kind in MAGIC if head[at:at + len(magic)] == magic), ""), head


def _file_formats(path):
    """{format: Source} of all that fit a file."""
    kind, head = _magic(path)
    if kind == "gzip":
        raise UserError(f"{path}: is compressed; unpack it first (gunzip, tar xzf)")
    if kind == "audio":
        raise UserError(f"{path}: is an audio file; give the folder with the texts, or a list of audio and text")
    if kind:
        return _shard_formats(path, [path])
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in b"{[" or str(path).endswith((".json", ".jsonl")):
        return _json_formats(path, path.name == "metadata.json" or text[:1] == b"{" and b'"samples"' in head)
    return _table_formats(path)


def _json_formats(path, folder_like):
    if folder_like and isinstance(data := json_value(path), dict) and "samples" in data:
        return _metadata_json(path)
    first = list(itertools.islice(json_entries(path), LOOK))
    kinds = {}      # of which each is first seen at a sample
    for i, entry in enumerate(first):
        if kind := _kind(entry):
            kinds.setdefault(kind, i)
    if len(kinds) > 1:
        (a, i), (b, j) = list(kinds.items())[:2]
        raise UserError(f"{path}: sample {i} is {a}, sample {j} is {b}; put them into files of their own")
    kind = next(iter(kinds), "chatml")
    if kind == "codes":
        raise UserError(f"{path}: holds audio_codes, another trainer's; give the list from which they were made")
    about = "JSON samples"
    if kind in ("manifest", "vibevoice"):
        names = list(dict.fromkeys(key for entry in first if isinstance(entry, dict) for key in entry))
        columns = find_columns(names)
        read, about = lambda wanted: read_manifest(path, columns, wanted), _columns_text("JSON", columns)
    else:
        read = {"chatml": lambda wanted: enumerate(json_entries(path, wanted)),
                "ms_swift": lambda wanted: read_ms_swift(path, wanted)}[kind]
    return _one(path, kind, about, path.parent, read)


def _kind(entry):
    """Format of one JSON entry, "" for none."""
    if not isinstance(entry, dict):
        return ""
    if isinstance(entry.get("messages"), list):
        items = [item for m in entry["messages"] if isinstance(m, dict) for item in (
            m["content"] if isinstance(m.get("content"), list) else [m.get("content")])]
        spoken = any(isinstance(item, dict) and item.get("type") == "audio" for item in items)
        return "ms_swift" if not spoken and ("audios" in entry or "audio" in entry) else "chatml"
    if "audio_codes" in entry:
        return "codes"
    if "voice_prompts" in entry:
        return "vibevoice"
    columns = find_columns(entry)
    return "manifest" if "audio" in columns and "text" in columns else ""


def _metadata_json(path):
    def read(wanted):
        data = json_value(path)
        samples = data.get("samples") if isinstance(data, dict) else None
        if not isinstance(samples, list):
            raise UserError(f"{path}: has no list 'samples'")
        return ((number, SKIPPED if not wanted(number) else _metadata_row(raw, path.parent))
                for number, raw in enumerate(samples))
    return _one(path, "metadata_json", "samples with files of text", path.parent, read)


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


def _table_formats(path):
    """Of text that is not JSON: a table with a header, or lines of fields between bars."""
    lines = [line for line in itertools.islice(_lines(path), 10 * LOOK) if line.strip()][:LOOK]
    if not lines:
        raise UserError(f"{path}: is empty")
    for separator, name in (("\t", "TSV"), (",", "CSV"), ("|", "table with |")):
        columns = find_columns(_fields(lines[0], separator))
        if "audio" in columns and "text" in columns:
            return _one(path, "manifest", _columns_text(name, columns), path.parent,
                        lambda wanted, separator=separator: read_table(path, separator))
    rows = [line.split("|") for line in lines]
    if len({len(row) for row in rows}) > 1 or not 2 <= len(rows[0]) <= 4:
        raise UserError(f"{path}: is no table that is known: its first line has neither a column of audio and one of "
                        f"text, nor 2 to 4 fields between bars as all others: {lines[0][:80]!r}")
    paths = audio_paths(path.parent)
    there = [sum(paths.has(row[i].strip()) for row in rows) for i in range(len(rows[0]))]
    if there[0] < 0.9 * len(rows):
        raise UserError(f"{path}: has no header, and its first field names no audio files: "
                        f"{rows[0][0]!r} is not there; looked in {', '.join(paths.places())}")
    fits = {}

    def fit(kind, about):
        fits.update(_one(path, kind, about, path.parent, lambda wanted: read_bars(path, kind)))

    if len(rows[0]) == 4:
        if all(row[2].strip().lower() in LANGUAGES for row in rows):
            fit("list", "audio|speaker|language|text")
        else:
            raise UserError(f"{path}: of 4 fields the third must be a language ({', '.join(sorted(LANGUAGES))}), "
                            f"not {rows[0][2]!r}")
    elif len(rows[0]) == 2:
        fit("ljspeech", "audio|text")
    elif all(row[2].strip().isdigit() for row in rows) and any(IPA.search(row[1]) for row in rows):
        raise UserError(f"{path}: its texts are phonemes (StyleTTS2), which Higgs-Audio does not read; give the texts "
                        "from which they were made")
    else:
        middle = {row[1].strip() for row in rows}
        names = all(len(name) <= 40 and " " not in name for name in middle)
        if names and (len(middle) <= len(rows) / 2 or len(rows) == 1):
            fit("piper", "audio|speaker|text")
        if not names or len(rows) == 1:
            fit("ljspeech", "audio|text|normalised text")
        if not fits:
            fit("piper", "audio|speaker|text"), fit("ljspeech", "audio|text|normalised text")
    return fits


# ---------------------------------------------------------------------------------------------------------------------
# Readers


def audio_paths(folder):
    """Paths of a folder of speech, where names may lack their ending and the usual subfolder."""
    return Paths(Path(folder).resolve(), inside=("wavs", "wav", "clips", "audio"), endings=AUDIO_FILES + OTHER_AUDIO)


def _lines(path):
    """Lines of a text file without their ends. Raises UserError naming the first line that is not UTF-8."""
    with json_files.open_file(path) as f:
        for number, line in enumerate(json_files.lines(f, path), 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}: is not UTF-8 text ({error.reason}, line {number})")


def _fields(line, separator):
    """Fields of a line of a table: quotes count where they enclose a field and are doubled inside, as pandas writes."""
    if '"' not in line:
        return line.split(separator)
    if separator == ",":
        return next(csv.reader([line]))
    fields = line.split(separator)
    whole = [len(f) > 1 and f[0] == f[-1] == '"' and '"' not in f[1:-1].replace('""', "") for f in fields]
    return [f[1:-1].replace('""', '"') if quoted else f for f, quoted in zip(fields, whole)]


def read_manifest(path, columns, wanted):
    """JSON rows with an audio and a text column."""
    for number, entry in enumerate(json_entries(path, wanted)):
        if entry is SKIPPED or not isinstance(entry, dict):
            yield number, entry if entry is SKIPPED else BadSample(f"is a {type(entry).__name__}, not an object")
        else:
            mine = find_columns(entry)      # rows may leave columns out, also those in which the format was seen
            yield number, {meaning: entry.get(mine.get(meaning)) for meaning in {**columns, **mine}}


def read_table(path, separator):
    """Rows of a table with a header. In CSV a quoted field may go over several lines; elsewhere a line is a row."""
    if separator == ",":
        rows = _csv_rows(path)
    else:
        rows = (_fields(line, separator) for line in _lines(path))
    rows = (row for row in rows if any(field.strip() for field in row))
    names = next(rows)
    columns = {meaning: names.index(name) for meaning, name in find_columns(names).items()}
    for number, row in enumerate(rows):
        if len(row) != len(names):
            yield number, BadSample(f"has {len(row)} fields, the header has {len(names)}: {separator.join(row)[:80]!r}")
        else:
            yield number, {meaning: row[at].strip("\n") for meaning, at in columns.items()}


def _csv_rows(path):
    """Rows of a CSV file. UserError names the line of an open quote, which would swallow the lines behind it."""
    reader = csv.reader((line + "\n" for line in _lines(path)), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}: its quotes do not fit in the row that begins at line {line} ({error}); a quote "
                            'inside a field is written twice, and the field stands in quotes: "so ""it"" is"')


def read_bars(path, kind):
    """Rows of lines without a header. Quotes are text, as in LJSpeech."""
    fields = {"list": ("audio", "speaker", "language", "text"), "piper": ("audio", "speaker", "text"),
              "ljspeech": ("audio", "text", "normalised")}[kind]
    number = -1
    for line in _lines(path):
        if not line.strip():
            continue
        number, values = number + 1, [value.strip() for value in line.split("|")]
        if len(values) != len(fields) and not (kind == "ljspeech" and len(values) == 2):
            yield number, BadSample(f"has {len(values)} fields between bars, not {len(fields)}: {line[:80]!r}")
            continue
        row = dict(zip(fields, values))
        row["text"] = row.pop("normalised", "") or row["text"]
        yield number, {"id": Path(row["audio"]).stem, **row}


def read_ms_swift(path, wanted):
    """Rows of ms-swift's JSONL: the last assistant message is the text, <audio> in it the clip to be spoken."""
    for number, entry in enumerate(json_entries(path, wanted)):
        try:
            yield number, entry if entry is SKIPPED else _swift_row(entry)
        except BadSample as error:
            yield number, error


def _swift_row(entry):
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        raise BadSample("has no list 'messages' of texts")
    clips = entry.get("audios") or entry.get("audio") or []
    clips = [clips] if isinstance(clips, str) else [c.get("path") if isinstance(c, dict) else c for c in clips]
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


def read_sidecar(folder, wanted):
    """Rows of audio files, in subfolders too, each with its text beside it; a subfolder is taken for a speaker."""
    number = -1
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        there, place = set(names), Path(at)
        for name in sorted(names):
            stem, ending = os.path.splitext(name)
            if ending.lower() not in AUDIO_FILES + OTHER_AUDIO or name.startswith("."):
                continue
            number += 1
            if not wanted(number):
                yield number, SKIPPED
                continue
            inside = "" if place == folder else str(place.relative_to(folder))
            texts = [stem + ending for ending in TEXTS if stem + ending in there]
            speaker = inside if place.name.lower() not in NO_SPEAKER else ""
            if texts and texts[0].endswith(".normalized.txt"):      # LibriTTS: speaker_chapter_...
                speaker = stem.split("_")[0]
            row = {"id": os.path.join(inside, stem), "audio": str(place / name), "speaker": speaker}
            texts += [f"{stem}.json"] * (f"{stem}.json" in there)
            if ending.lower() in OTHER_AUDIO:
                row = BadSample(f"{ending[1:]} is not read; convert it: ffmpeg -i {name} {stem}.flac", "unreadable")
            elif not texts:
                row = BadSample(f"has no text beside it ({', '.join(stem + ending for ending in TEXTS)})", "empty_text")
            else:
                row["text_file"] = place / texts[0]
            if isinstance(row, BadSample):
                row.place = f" ({printable(os.path.join(inside, name), NAME)})"
            yield number, row


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
