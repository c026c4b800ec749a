"""Speech data as people have it -> the ChatML .jsonl that the trainer reads.

    python speech/convert.py my_corpus --output train.jsonl
    python speech/convert.py clips.csv --columns audio=clip,text=caption --output train.jsonl
    python speech/convert.py 'shards/*.parquet' --output train.jsonl   # audio is unpacked, too

Reads the formats of docs/data.md. The script stops where the values do not settle what a column
means; then name it with --columns. Rows that cannot be used are counted and listed with the reason.

Each reader yields (location, row). location: "line 7". row: a dict with keys of COLUMNS, a ChatML
sample, or the BadSample with the reason why there is none. check_row() and chatml_of() do the rest.
"""
import contextlib
import csv
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
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # the folder of core/

from core import cli, json_files
from core.cli import UserError, plural, first_line, one_line, require
from speech.conversations import (TASK_TYPES, BadSample, Paths, Reading, content_items, is_chatml,
                                  sample_name, system_parts)

SCENE = "<|scene_desc_start|>\n{}\n<|scene_desc_end|>"
AUDIO_FILES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".oga", ".aiff", ".aif", ".au", ".caf",
               ".w64", ".rf64")     # what libsndfile reads
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
COLUMNS = {     # {meaning: column names in lower case}; the first that exists counts
    "audio": "audio audio_file audio_path audio_filepath audio_filename audio_url wav wav_path "
             "file_name filename path file",
    "text": "text transcript transcription sentence normalized_text text_normalized target_text",
    "id": "id _id utt utt_id sentence_id sid key",
    "speaker": "speaker speaker_id speaker_name spk spk_id client_id",
    "language": "language lang locale", "scene": "scene", "split": "split",
    "duration": "duration seconds", "offset": "offset start start_time", "end": "end end_time",
    "ref_audio": "ref_audio ref_audio_file ref_audio_path reference_audio prompt_audio",
    "ref_text": "ref_text ref_transcript reference_text prompt_text",
    "voice_prompts": "voice_prompts", "voices": "voices", "normalize_text": "normalize_text"}
KNOWN = COLUMNS | {"text_file": "transcript_file", "task_type": "training_task_type task_type",
                   "ref_speakers": "ref_speakers"}      # of a metadata.json
NO_TEXT = {"nan", "none", "null", "<na>", "n/a", "na", ""}      # pandas' words for a missing value
# sound marks, a name before a colon, HTML entities, control characters, a wrong encoding
ODD_TEXT = re.compile(
    r"\[s\d+\]|\[[a-z][a-z _-]*\]|</?[a-z][^<>]*>|\*[a-z][a-z ]*\*|\((?:laugh|sigh|cough|breath|"
    r"gasp|chuckle|sniff|groan|yawn|music|applau|cheer|cry|whisper|pause|silence|noise|clears)"
    r"[a-z ]*\)|^\s*[^\W\d][\w.'-]{0,20}(?: \w{1,12})?:\s|&(?:#\d+|#x[0-9a-f]+|[a-z]{2,8});|"
    r"[\x00-\x08\x0b\x0c\x0e-\x1f]|Ã[\x80-¿]|â€|Â[\x80-¿]|�", re.I)
SPEAKER_MARK = re.compile(r"^\s*Speaker\s+(\d+)\s*:\s*", re.I | re.M)      # as VibeVoice writes it
CANDIDATES = 64         # clips of a speaker among which references are chosen
SHARD_S = 600           # of sound in a FLAC file that audio is unpacked into
DEPTH, LOOK = 3, 20     # levels of folders, and rows, that are looked through


class Undecided(UserError):
    """A table is one of speech, but what its columns mean is not certain."""


def check_columns(columns):
    for pair in filter(None, columns.split(",")):
        require(re.fullmatch(r"\w+=.+", pair) and pair.split("=")[0] in COLUMNS,
                f"--columns {pair}: is not MEANING=NAME; meanings are {', '.join(COLUMNS)}")


# ---- Lists. columns: {meaning: name} of --columns. entry: a dict by the file's own names.


def find_columns(names, columns):
    """{meaning: column name} of the columns whose meaning is known."""
    lower, meanings = {str(name).strip().lower(): name for name in names}, {}
    for meaning, spellings in KNOWN.items():
        for spelling in [columns[meaning].lower()] if meaning in columns else spellings.split():
            if spelling in lower:
                meanings.setdefault(meaning, lower[spelling])
    return meanings


def rows_of(path, entries, columns):
    """Rows of entries; UserError if the first have no audio, no text, or no column of --columns."""
    entries = iter(entries)
    head = list(itertools.islice(entries, LOOK))
    names = list(dict.fromkeys(name for _, entry in head if isinstance(entry, dict)
                               for name in entry))
    meanings = find_columns(names, columns)
    text = "text_file" if "text_file" in meanings else "text"
    for meaning in ("audio", text, *columns) if head and "messages" not in names else ():
        require(meaning in meanings, f"{path}: has no column of {meaning} among "
                f"{', '.join(str(name)[:40] for name in names[:20])}: --columns {meaning}=NAME")

    def row_of(entry):
        if not isinstance(entry, dict) or is_chatml(entry):
            return entry
        row = {meaning: entry[name] for meaning, name in find_columns(entry, columns).items()}
        return swift_row(entry, row) if isinstance(entry.get("messages"), list) else row
    return ((location, row_of(entry)) for location, entry in itertools.chain(head, entries))


def swift_row(entry, row):
    """Row of ms-swift: texts with <audio> in them, and a list of the audio."""
    messages, clips = entry["messages"], entry.get("audios") or entry.get("audio") or []
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        return BadSample("has no list 'messages' of texts")
    clips = clips if isinstance(clips, list) else [clips]
    answers, requests = ([m["content"] for m in messages if m.get("role") == role]
                         for role in ("assistant", "user"))
    spoken, heard = ("".join(texts).count("<audio>") for texts in (answers, requests))
    if spoken > 1 or heard or len(clips) != 1 or not answers:
        return BadSample(f"{heard + spoken} <audio> and {len(clips)} audios, not one spoken clip")
    references = entry.get("ref_audios") or row.get("ref_audio")
    text = answers[-1].replace("<audio>", "").strip() or (requests or [""])[-1]
    return row | {"audio": clips[0], "text": text,
                  "ref_audio": references[0] if isinstance(references, list) else references}


def lines_of(path):
    """Lines of a UTF-8 file; only a line feed ends one."""
    return [line.rstrip("\r") for line in json_files.read_text(path).split("\n")]


def key_and_text(path):
    """[(first word, the rest)] of the lines of a file."""
    lines = filter(None, map(str.strip, lines_of(path)))
    return [(*line.split(None, 1), "")[:2] for line in lines]


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


def read_table(path, separator, has_header):
    """[(line number, fields)] of a table. A field in quotes may have lines in CSV with a header."""
    lines, rows, line = lines_of(path), [], 1
    if has_header and separator == ",":
        reader = csv.reader((line + "\n" for line in lines), strict=True, skipinitialspace=True)
        try:
            for fields in reader:
                rows.append((line, fields))
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}: its quotes do not fit in the row that begins at line {line} "
                            f'({error}); write one inside a field twice: "so ""it"" is"')
    else:
        rows = enumerate((split_line(line, separator, has_header) for line in lines), 1)
    rows = [(line, [field.strip() for field in fields]) for line, fields in rows]
    return [(line, fields) for line, fields in rows if any(fields)]


def open_table(path, columns):
    """Rows of a text file with a row in each line."""
    first = next((line for line in lines_of(path) if line.strip()), None)
    require(first, f"{path}: is empty")
    separator = max(SEPARATORS, key=lambda s: len(find_columns(split_line(first, s), columns)))
    numbered = columns and all(map(str.isdecimal, columns.values()))
    if not numbered and (columns or find_columns(split_line(first, separator), {})):
        (_, names), *rows = read_table(path, separator, True)
    else:
        names, rows = open_headerless(path, columns)
        columns = {}

    def entries():
        for line, fields in rows:
            entry = dict(zip(names, fields))
            if len(fields) != len(names):
                entry = BadSample(f"has {len(fields)} fields, not {len(names)}: "
                                  f"{separator.join(fields)[:80]!r}")
            elif entry.get("normalised"):       # LJSpeech's last field, which may be empty
                entry["text"] = entry["normalised"]
            yield f"line {line}", entry
    return rows_of(path, entries(), columns)


def open_headerless(path, columns):
    """(names, read_table) of lines of 2 to 4 fields of which one names audio files."""
    paths, audio = audio_paths(path), int(columns.get("audio", 1)) - 1
    for separator in SEPARATORS:
        rows = read_table(path, separator, False)
        head, width = [fields for _, fields in rows[:LOOK]], len(rows[0][1])
        if audio < width and 2 <= width <= 4 and all(len(fields) == width for fields in head):
            if sum(bool(paths.look_up(fields[audio])) for fields in head) >= 0.9 * len(head):
                meanings = {int(number) - 1: name for name, number in columns.items()}
                return [meanings.get(i, "") for i in range(width)] if columns else guess_meanings(
                    path, [fields for _, fields in rows if len(fields) == width]), rows
    raise UserError(f"{path}: is not a table that is known: the first line names no columns of "
                    f"audio and text, such as audio,text, and no audio file that is there: "
                    f"{rows[0][1]}; looked in {', '.join(paths.folders)}")


def guess_meanings(path, rows):
    """The meaning of each field of a table without a header; Undecided where it is open."""
    columns = [[value for value in column if value] for column in zip(*rows)]
    prose, names = [is_prose(column) for column in columns], None
    if prose[1] and not any(columns[2:]):
        names = "audio text"
    elif len(columns) == 3 and prose[1] and prose[2]:
        similarities = [SequenceMatcher(None, row[1].lower(), row[2].lower()).ratio()
                        for row in rows[:200] if row[2]]
        if sum(similarities) >= 0.6 * len(similarities):
            names = "audio text normalised"
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
    unspaced = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f]"
    if any(" " in value or re.search(unspaced, value) for value in values):
        return len(values) < 4 or len(set(values)) > len(values) / 2
    return sum(bool(re.search(r"\w[.!?]$", value)) for value in values) > len(values) / 2


def read_kaldi(folder):
    """Rows of wav.scp, text and maybe segments, utt2spk; a command in wav.scp is never run."""
    def read_pairs(name):
        pairs = key_and_text(folder / name) if (folder / name).exists() else ()
        require(len(dict(pairs)) == len(pairs), f"{folder / name}: has an utterance twice")
        return dict(pairs)
    audio, texts, segments, speakers = map(read_pairs, ("wav.scp", "text", "segments", "utt2spk"))
    for key, path in audio.items():
        require(path[-1:] != "|", f"{folder / 'wav.scp'}: {key} is a command: run wav-copy first")
    for key in dict.fromkeys([*texts, *(segments or audio)]):
        cut = segments.get(key, "" if segments else key).split()
        recording, start, end = [*cut, None, None, None][:3]
        yield {"id": key, "audio": audio.get(recording), "text": texts.get(key),
               "speaker": speakers.get(key), "offset": start, "end": end}


# ---- Audio with texts next to it


def read_sidecars(folder):
    """Rows of the clips of a tree; each subfolder is a speaker."""
    seen = set()        # links may lead to a folder twice, or in a circle
    for root, folders, names in os.walk(folder, followlinks=True):
        root, real = Path(root), os.path.realpath(root)
        names = sorted(name for name in names if real not in seen and name[0] != ".")
        folders[:] = sorted(name for name in folders if real not in seen and name[0] != ".")
        seen.add(real)
        files = {name.lower(): name for name in names}
        translated = {match[1]: name for name in reversed(names)        # talk.en.srt
                      if (match := LANGUAGE_CODE.fullmatch(name.lower()))}
        librispeech = dict(pair for name in names if name.endswith(".trans.txt")
                           for pair in key_and_text(root / name))
        no_speaker = root == folder or root.name.lower() in NO_SPEAKER
        for path in (root / name for name in names if name.lower().endswith(SOUNDS)):
            audio = path.relative_to(folder)
            row = {"audio": str(audio), "id": str(audio.with_suffix("")),
                   "speaker": "" if no_speaker else str(audio.parent)}
            wanted = [path.stem.lower() + ending for ending in SIDECARS]
            text = next((files[name] for name in wanted if name in files),
                        translated.get(path.stem.lower(), ""))
            entries = [BadSample(f"has no text next to it ({', '.join(wanted)})", "empty_text")]
            if path.stem in librispeech:
                entries = [{"text": librispeech[path.stem]}]
            elif text:
                entries = read_sidecar(root / text)
            if path.stem in librispeech or text.endswith(".normalized.txt"):    # of LibriTTS
                row["speaker"] = path.stem.split("-" if path.stem in librispeech else "_")[0]
            for number, entry in enumerate(entries, 1):
                yield (f"{text} entry {number}" if text else row["audio"],
                       row | entry if isinstance(entry, dict) else entry)


def read_sidecar(path):
    """[columns, or BadSample, of each entry] of a text next to audio; a plain text is one entry."""
    try:
        text, ending = json_files.read_text(path), path.suffix.lower()
        data = json_files.read_object(path) if ending == ".json" else {}
    except UserError as error:
        return [BadSample(error)]
    if ending in (".srt", ".vtt"):
        return read_subtitles(text)
    if isinstance(data.get("segments"), list):      # whisper, whisperX
        return [{"offset": cut.get("start"), "end": cut.get("end"), "text": cut.get("text")}
                for cut in data["segments"] if isinstance(cut, dict)]
    if ending == ".json":
        return [{meaning: data[name] for meaning, name in find_columns(data, {}).items()
                 if meaning in ("text", "normalize_text")}]
    # of Audacity; a line that begins with a backslash is a range of Hz of the label before
    lines = [line for line in text.splitlines() if line.strip() and line[0] != "\\"]
    whisper = lines[:1] == ["start\tend\ttext"]     # in milliseconds
    labels, unit = [LABEL.fullmatch(line) for line in lines[whisper:]], 1000 if whisper else 1
    if labels and all(labels):
        return [{"offset": seconds_of(start) / unit, "end": seconds_of(end) / unit,
                 "text": words.strip()} for start, end, words in map(re.Match.groups, labels)]
    return [{"text": text} if ending != ".tsv" else BadSample("has no start, end, text")]


def seconds_of(text):
    """Seconds of 1:02:03,5 or 3.5."""
    numbers = [float(number.replace(",", ".")) for number in text.split(":")]
    return round(sum(number * 60 ** i for i, number in enumerate(reversed(numbers))), 3)


LANGUAGE_CODE = re.compile(r"(.+)\.[a-z]{2,4}(-\w+)?\.(srt|vtt)")
LABEL = re.compile(r"(\d+(?:[.,]\d+)?)(?:\t|(?<=[.,]\d{6}) +)" * 2 + "(.*)")  # not "1.5 2.5 litres"
TIME = r"(?:\d+:)?\d+:\d+[.,]\d+"
# the line of times of a cue, and its number or name before it
ARROW = re.compile(rf"(?:^\d+\n|(?<=\n\n).+\n)?^({TIME})[ \t]*-->[ \t]*({TIME})(?:[ \t].*)?$", re.M)
COMMENT = re.compile(r"(?:\A|(?<=\n\n))(?:WEBVTT|NOTE|STYLE|REGION)\b.*(?:\n.+)*")
MARKUP = re.compile(r"</?[a-z][a-z0-9.]*(?: [^<>]*)?>|<[\d:.]+>|\{\\[^}]*\}")
NO_WORDS = re.compile(r"\W*|[♪♫].*[♪♫]|\[[^]]*\]|\([^)]*\)")


def read_subtitles(text):
    """Entries of SRT or VTT; a cue lasts to the next line of times."""
    text = COMMENT.sub("", "\n".join(map(str.strip, text.splitlines())))
    lost, *fields = ARROW.split(text)   # start, end and text of each cue
    previous, entries = "", [BadSample("begins with a damaged line of times")
                             ] * bool(fields and re.search(TIME, lost))
    for start, end, body in zip(fields[::3], fields[1::3], fields[2::3]):
        lines = [html.unescape(MARKUP.sub("", line)).strip() for line in body.split("\n")]
        lines = [line for line in lines if line]
        if len(lines) > 1 and lines[0] == previous:     # rolling captions repeat a line
            del lines[0]
        previous = lines[-1] if lines else previous
        words = " ".join(" ".join(lines).split())
        if re.search(TIME, words):
            entries.append(BadSample(f"holds times, such as of a damaged line: {words[:80]!r}"))
        elif NO_WORDS.fullmatch(words):
            entries.append(BadSample(f"says no words ({words!r})", "empty_text"))
        else:
            entries.append({"offset": seconds_of(start), "end": seconds_of(end), "text": words})
    return entries or [BadSample("has no line 00:00:00.000 --> 00:00:01.000", "empty_text")]


# ---- Audio inside other files


def read_columns(path):
    """Entries of a parquet file, or of an arrow stream, as datasets writes them."""
    import pyarrow.parquet
    with pyarrow.memory_map(str(path)) as source:
        is_parquet = source.read(4) == b"PAR1"
        source.seek(0)
        batches = pyarrow.parquet.ParquetFile(source).iter_batches(64) if is_parquet else (
            pyarrow.ipc.open_stream(source))
        for number, entry in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{path.name} row {number}", entry


def read_tar(path):
    """Entries of a WebDataset shard: neighbours whose names agree up to the last dot are one."""
    with tarfile.open(path, mode="r:") as tar:
        files = ((member.name, tar.extractfile(member).read()) for member in tar
                 if member.isfile() and not os.path.basename(member.name).startswith("."))
        for key, sample in itertools.groupby(files, lambda file: os.path.splitext(file[0])[0]):
            entry, metadata = {}, {}
            try:
                for name, data in sample:
                    if name.lower().endswith(SOUNDS):
                        entry["audio"] = data
                    elif name.endswith(".json"):
                        metadata = json_files.loads(data)
                    elif name.endswith(TEXTS):
                        entry.setdefault("text", data.decode("utf-8-sig"))
                entry = metadata | entry
            except (TypeError, ValueError) as error:        # no object, not JSON, or not UTF-8
                entry = BadSample(error)
            yield f"{path.name} {key}", entry
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(512) != bytes(512):     # tarfile reads a truncated file without error
            raise EOFError("its end is missing")


def unpack_audio(rows, folder):
    """Rows whose audio is a path: sound inside the data, the bytes of a file or {array,
    sampling_rate}, is written to FLAC files of about SHARD_S seconds in `folder`."""
    import numpy as np
    import soundfile

    from speech.codes import open_sound
    files, numbers = {}, itertools.count()      # files: {Hz: the file that is written}
    for location, row in rows:
        audio = row.get("audio") if isinstance(row, dict) else None
        if isinstance(audio, dict) and audio.get("array") is None:      # as datasets has it
            audio = row["audio"] = audio.get("bytes") or audio.get("path")
        if not isinstance(audio, (bytes, dict)):
            yield location, row
            continue
        try:
            if any(row.get(key) not in (None, "") for key in ("offset", "end")):
                raise ValueError("an offset into audio inside the file: cut it first")
            if isinstance(audio, dict):
                wave, rate = np.asarray(audio["array"], np.float32), int(audio["sampling_rate"])
            else:
                with open_sound(io.BytesIO(audio)) as sound:
                    wave, rate = sound.read(dtype="float32"), sound.samplerate
        except (KeyError, TypeError, ValueError, RuntimeError) as error:    # libsndfile's, NumPy's
            yield location, BadSample(f"its audio cannot be used ({error})", "audio")
            continue
        try:        # a full disk is not the fault of this sample
            if rate in files and files[rate].frames >= SHARD_S * rate:
                files.pop(rate).close()
            if rate not in files:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{next(numbers):07}.flac"
                files[rate] = soundfile.SoundFile(path, "w", rate, 1, "PCM_16")
            start = files[rate].frames
            files[rate].write(wave.mean(axis=1) if wave.ndim == 2 else wave)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"{folder}: sound cannot be written ({error or 'disk full?'})")
        yield location, row | {"audio": str(files[rate].name), "offset": start / rate,
                               "duration": len(wave) / rate}
    for file in files.values():
        file.close()


def read_gigaspeech(folder):
    """Cuts of long recordings; its marks become punctuation."""
    data = json_files.read_object(folder / "GigaSpeech.json")
    marks = {"COMMA": ",", "PERIOD": ".", "QUESTIONMARK": "?", "EXCLAMATIONPOINT": "!"}
    for audio in data.get("audios", []):
        for cut in audio.get("segments", []):
            text = re.sub(r" <(\w+)>", lambda mark: marks.get(mark[1], mark[0]),
                          str(cut.get("text_tn") or ""))
            yield BadSample(f"says no words ({text!r})", "empty_text") if "<" in text else {
                "id": cut.get("sid"), "audio": audio.get("path"), "text": text,
                "speaker": str(cut.get("speaker") or "").replace("N/A", ""),
                "offset": cut.get("begin_time"), "end": cut.get("end_time"),
                "language": data.get("language")}


CORPORA = (     # (patterns of names that a folder holds, its rows)
    (("wav.scp", "text"), read_kaldi),
    (("GigaSpeech.json",), read_gigaspeech),
    (("txt", "wav48.*"), lambda folder: (           # VCTK; of two microphones, mic2 is better
        {"text_file": text.relative_to(folder), "speaker": text.parent.name, "language": "en",
         "audio": str(max(folder.glob(f"wav48*/{text.parent.name}/{text.stem}[_.]*"),
                          default=text.stem))} for text in sorted(folder.glob("txt/*/*.txt")))),
    (("content.txt", "wav"), lambda folder: (       # AISHELL-3; after each word is its pinyin
        {"audio": f"wav/{name[:7]}/{name}", "speaker": name[:7], "language": "zh",
         "text": "".join(text.split()[::2])}
        for name, text in key_and_text(folder / "content.txt"))),
    (("transcripts.txt", "audio"), lambda folder: (     # Multilingual LibriSpeech
        {"audio": f"audio/{'/'.join(name.split('_')[:2])}/{name}", "speaker": name.split("_")[0],
         "text": text} for name, text in key_and_text(folder / "transcripts.txt"))),
    (("txts", "wavs"), lambda folder: (             # WenetSpeech4TTS
        {"audio": f"wavs/{path.stem}", "language": "zh",
         "text": next(iter(key_and_text(path)), ("", ""))[1]}
        for path in sorted(folder.glob("txts/*.txt")))))


# ---- The files that the user gave


def audio_paths(source):
    """Paths of a list or folder of speech; names may omit their ending and the usual subfolder."""
    folder = source if source.is_dir() else source.parent
    return Paths(folder.resolve(), inside=SUBFOLDERS, endings=SOUNDS)


def open_source(name, columns):
    """(path of the list or folder that is read, rows) of a file, a folder, or a pattern."""
    path = Path(name)
    if path.is_dir():
        return open_folder(path, columns)
    files = [path] if path.exists() else sorted(map(Path, glob.glob(str(name))))
    require(files, f"{name}: there is no such file or folder; download data of the Hub first")
    return files[0] if len(files) == 1 else path, open_files(files, columns)


def open_files(files, columns):
    """Rows of a list, or of files that hold audio and texts, all of one kind."""
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
            except (tarfile.TarError, EOFError, OSError, ValueError, NotImplementedError) as error:
                raise UserError(f"{file}: cannot be read, it may be cut off ({first_line(error)})")
    if read:
        return rows_of(path, entries(), columns)
    require(len(files) == 1, f"{path}: is one of {len(files)} lists; give one")
    if path.suffix not in (".json", ".jsonl"):
        return open_table(path, columns)
    whole = json_files.read_object(path, object) if path.suffix == ".json" else None
    if isinstance(whole, dict) and isinstance(whole.get("samples"), list):      # metadata.json
        numbered = ((f"sample {number}", row) for number, row in enumerate(whole["samples"], 1))
    else:
        numbered = json_files.read_entries(path)
    return rows_of(path, numbered, columns)


def open_folder(folder, columns):
    """open_source of a folder: the one list in it, or nearest below it; else audio with texts."""
    refused, level = [], [folder]
    for depth in range(DEPTH):
        lists = [source for path in level for source in open_lists(path, depth, columns, refused)]
        require(len(lists) < 2, f"{folder}: holds {len(lists)} lists; give one: "
                                + ", ".join(str(path) for path, _ in lists[:12]))
        if lists:
            return lists[0]
        level = [path for parent in level for path in sorted(parent.iterdir())
                 if path.is_dir() and not path.name.startswith(".")][:200]
    rows = list(read_sidecars(folder))
    if any(isinstance(row, dict) for _, row in rows):
        return folder, rows
    why = (f"has audio, such as {one_line(rows[0][0], 80)}, but no list of texts; it {rows[0][1]}"
           if rows else f"has neither a list nor audio files ({', '.join(AUDIO_FILES)})")
    raise UserError(f"{folder}: {why}" + "".join(f"; {error}" for error in refused[:1]))


def open_lists(folder, depth, columns, refused):
    """[open_source of each list] in one folder; refused takes the reasons of files not read."""
    names = sorted(path.name for path in folder.iterdir() if path.name[0] != ".")
    for patterns, read in CORPORA:
        if all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns):
            return [(folder, ((f"row {i}", row) for i, row in enumerate(read(folder), 1)))]
    shards = {}         # {pattern: its files}; a name begins with its split
    for path in (folder / name for name in names if name.endswith((".parquet", ".tar", ".arrow"))):
        split = re.match("[^0-9_-]*", path.stem)[0]
        shards.setdefault(folder / f"{split}*{path.suffix}", []).append(path)
    lists = [(pattern, open_files(files, columns)) for pattern, files in shards.items()]
    clips = {name.split(".")[0] for name in names if name.lower().endswith(SOUNDS)}
    has_texts = any(name.split(".")[0] in clips for name in names if name.endswith(TEXTS))
    tables = [name for name in names if name.lower().endswith(LISTS) and (folder / name).is_file()
              and name.split(".")[0] not in clips and not name.endswith(".trans.txt")]
    if len(tables) > 100 or has_texts and depth:        # a folder of texts
        tables = [name for name in tables if name.startswith("metadata.")]
    for path in (folder / name for name in tables):
        try:
            lists.append((path, open_files([path], columns)))
        except Undecided:
            raise
        except UserError as error:
            refused.append(error)
    return lists


# ---- Rows -> ChatML


def check_row(row, paths):
    """The row with the absolute path of its audio and its text as a string. Raises as text_of."""
    if not isinstance(row, dict):
        raise row if isinstance(row, BadSample) else BadSample(
            f"is a {type(row).__name__}, not an object")
    if "messages" in row:
        for item in content_items(row):
            if isinstance(item, dict) and item.get("type") == "audio":
                name = item.get("audio_url") or item.get("url") or item.get("path")
                item |= {"audio_url": paths.find(name)} if isinstance(name, str) else {}
        return row
    name = row.get("audio")
    if not isinstance(name, str) or not name.strip():
        raise BadSample(f"has no audio, but {name!r}")
    row |= {"text": text_of(row, paths), "audio": find_file(name, row, paths), "name": name}
    ending = os.path.splitext(row["audio"])[1].lower()
    if ending in NOT_READ:      # it would be refused after hours of encoding
        raise BadSample(f"{ending} is not read; convert it: ffmpeg -i FILE NEW.flac", "audio")
    audio_item(row)     # its times
    return row


def find_file(name, row, paths):
    """Absolute path of a file of a row; GUIs leave out the folder of its split. BadSample."""
    return paths.look_up(str(name)) or paths.look_up(f"{row.get('split')}/{name}") or (
        paths.find(str(name)))


def text_of(row, paths):
    """The text to speak of a row. Raises BadSample, or the UserError of a text file."""
    text = row.get("text")
    if text is None and row.get("text_file"):
        text = json_files.read_text(find_file(row["text_file"], row, paths))
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
    def seconds(key):
        try:
            number = float("nan" if row.get(key) in (None, "") else row[key])
        except (TypeError, ValueError):
            raise BadSample(f"its {key} is {row[key]!r}, not seconds")
        return number if math.isfinite(number) else None
    offset, duration, end = seconds("offset"), seconds("duration"), seconds("end")
    if end is not None:
        offset = offset or 0.0
        duration = end - offset if end >= 0 else None       # Kaldi's -1: to the end of the file
    return {"type": "audio", "audio_url": row["audio"], "offset": offset, "duration": duration}


def chatml_of(row, reading, candidates, paths):
    """ChatML sample of a row. candidates: find_candidates. Raises BadSample."""
    references, notes = references_of(row, reading, candidates, paths)
    scene, turns = row.get("scene"), []
    scene = f"Audio is recorded from {str(scene).replace('_', ' ')}." if scene else ""
    instruction, scene = system_parts(row["text"], scene, row.get("voices"), bool(references))
    system = [instruction] + ["\n\n" + SCENE.format(scene)] * bool(scene)
    for tag, transcript, audio in references:
        words = tag + str(transcript or "").strip()
        turns += [{"role": "user", "content": words}] * bool(words)
        turns.append({"role": "assistant", "content": audio})
    system = [{"type": "text", "text": text} for text in system]
    kept = {name: row.get(name) for name in ("speaker", "language", "split", "normalize_text")}
    misc = {"sample_id": row.get("id")} | ({"notes": notes} if notes else {})
    return {"messages": [{"role": "system", "content": system}, *turns,
                         {"role": "user", "content": row["text"]},
                         {"role": "assistant", "content": audio_item(row)}], **kept, "misc": misc}


def references_of(row, reading, candidates, paths):
    """([(tag, transcript, audio item)] before the text of a row, [(check, note)])."""
    def clip(name):
        return {"type": "audio", "audio_url": find_file(name, row, paths)}
    task, audio, text = row.get("task_type") or "", row.get("ref_audio"), row.get("ref_text")
    # JimmyMa99's converter writes audio_generation everywhere
    if task not in ("", "audio_generation", *TASK_TYPES):
        raise BadSample(f"unknown task_type {task!r}; known: {', '.join(TASK_TYPES)}")
    if reading.reference == "none" or draw("share", row, reading) >= reading.reference_share:
        return [], []
    if reading.reference == "same_speaker":
        others = [other for other in candidates.get(str(row.get("speaker")), ())
                  if (other["name"], other.get("offset")) != (row["name"], row.get("offset"))]
        if not others:
            return [], [("no_second_clip", f"its speaker {row.get('speaker')!r} has no other clip")]
        other = others[int(draw("reference", row, reading) * len(others))]
        return [("", other["text"], audio_item(other))], []
    if task.endswith("smart_voice"):
        unused = [("unused_reference", f"{task} uses no reference clips")]
        return [], unused if audio or row.get("ref_speakers") else []
    if speakers := row.get("ref_speakers"):
        try:
            tags = [str(item.get("speaker_tag") or f"SPEAKER{i}").strip("[]")
                    for i, item in enumerate(speakers)]
            return [(f"[{tag}] ", item["ref_transcript"].strip(), clip(item["ref_audio_file"]))
                    for tag, item in zip(tags, speakers)], []
        except (AttributeError, KeyError, TypeError):
            raise BadSample("its ref_speakers need 'ref_audio_file' and 'ref_transcript'")
    if not audio and any(name.endswith("voice_cloning") for name in (task, reading.task_type)):
        raise BadSample("has no reference clip, which its task type needs")
    unknown = [("no_reference_text", f"what its reference {audio!r} says is not known")]
    if not audio:
        return [], unknown * bool(row.get("voice_prompts"))
    sidecar = Path(clip(audio)["audio_url"]).with_suffix(".txt")
    text = text or (json_files.read_text(sidecar).strip() if sidecar.is_file() else "")
    return ([("", text, clip(audio))], []) if text or reading.lone_reference else ([], unknown)


def draw(purpose, row, reading):
    """A random number from 0 to 1 that depends on the row and the seed, not on other rows."""
    key = f"{reading.seed}\0{purpose}\0{row['name']}\0{row.get('offset')}"
    digest = hashlib.blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def find_candidates(rows, reading):
    """{speaker: up to CANDIDATES rows for reference}; those of 3 to 15 seconds come first."""
    def rank(row):
        seconds = audio_item(row)["duration"]
        return not (seconds is None or 3 <= seconds <= 15), draw("candidate", row, reading)

    candidates = {}
    for row in rows:
        if row.get("speaker"):
            candidates.setdefault(str(row["speaker"]), []).append(row)
    return {speaker: sorted(clips, key=rank)[:CANDIDATES] for speaker, clips in candidates.items()}


def to_chatml(source, out_path, problems, *, held_out=False, **settings):
    """Write a source of any format as ChatML .jsonl. UserError where nothing can be read.

    problems: a list that takes the Problems of rows that cannot be used. held_out: take the rows
    whose `split` says validation data, or all if none does. settings: of Reading."""
    from core import checkpoint         # late: these import torch, which --help does not need
    from core.json_files import Problem
    out_path, reading = Path(out_path), Reading(**settings)
    files = Path(source).rglob("*") if os.path.isdir(source) else map(Path, glob.glob(str(source)))
    archives = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)
                if file.suffix in (".parquet", ".arrow", ".tar")]
    origin = [*archives, held_out, vars(reading)]
    note_path = out_path.with_suffix(".source")     # audio is unpacked once
    if archives and note_path.exists() and out_path.exists():
        note = json_files.read_object(note_path)
        if note["origin"] == origin:
            print(f"converted  {one_line(source)}: as before, {out_path}", flush=True)
            problems += [Problem(*row, source) for row in note["refused"]]
            return
    out_path.parent.mkdir(parents=True, exist_ok=True)
    note_path.unlink(missing_ok=True)
    columns = dict(pair.split("=", 1) for pair in reading.columns.split(",") if pair)
    path, read_rows = open_source(source, columns)
    paths, parts, refused = audio_paths(path), ([], []), []     # parts: training, validation
    for location, row in unpack_audio(read_rows, out_path.with_suffix(".audio").resolve()):
        split = row.get("split") if isinstance(row, dict) else None
        is_marked = str(split).strip().lower() in HELD_OUT
        parts[is_marked].append((sample_name(f"{path} {location}", row), row))
    wanted = held_out and bool(parts[1])

    def attempt(name, make, row, *more):
        """make(row, ...), or None if the row is refused."""
        try:
            return make(row, *more)
        except (BadSample, UserError) as error:
            refused.append(Problem(name, getattr(error, "check", "invalid"), error, source))

    rows = [(name, attempt(name, check_row, row, paths)) for name, row in parts[wanted]]
    rows = [(name, row) for name, row in rows if row]
    table = [row for _, row in rows if "messages" not in row]
    texts = Counter(row["text"] for row in table)
    for text, n in texts.most_common(1):
        require(len(table) < 8 or n <= len(table) / 2, f"{path}: {n} of {len(table)} texts are "
                f"equal, {text[:60]!r}: name another column: --columns text=NAME")
        phonemic = sum(len(IPA.findall(text)) >= 0.1 * len(text) for text in texts)
        require(phonemic <= len(texts) / 2, f"{path}: its texts are phonemes, such as {text[:60]!r}"
                ", which Higgs-Audio does not read; give the texts they were made from")
    candidates = find_candidates(table, reading) if reading.reference == "same_speaker" else {}
    lines = []
    for name, row in rows:
        if "messages" not in row:
            row = attempt(name, chatml_of, row, reading, candidates, paths)
        if row:
            misc = row["misc"] if isinstance(row.get("misc"), dict) else {}
            lines.append(json.dumps(row | {"misc": misc | {"source": name}}, default=str) + "\n")
    checkpoint.write_text(out_path, "".join(lines))
    if archives:
        note = {"origin": origin, "refused": [[p.name, p.check, p.reason] for p in refused]}
        checkpoint.write_text(note_path, json.dumps(note))
    problems += refused
    others = len(parts[not wanted])
    print(f"converted  {one_line(path)}: {plural(len(lines) + len(refused), 'row')} = "
          f"{len(lines)} kept + {len(refused)} refused; {out_path}"
          + (f"; {others} are of another split" if others else ""))
    unusual = [row["text"] for row in table if ODD_TEXT.search(row["text"])]
    outside = [row["audio"] for row in table if not os.path.isabs(row["name"])
               and not Path(row["audio"]).is_relative_to(paths.base)]
    for examples, clause in (
            (unusual, "hold marks, a name and a colon, or odd characters, which may be read aloud"),
            (outside, "name audio that is not below the folder of the list")):
        if examples:
            print(f"           {plural(len(examples), 'row')} {clause}: {one_line(examples[:5])}")
    sys.stdout.flush()


def main(argv=None):
    p = cli.Parser("Speech data of any format -> ChatML .jsonl.")
    p.add_argument("source", help="file, folder, or pattern of shards in quotes")
    p.add_argument("--output", required=True, help="the .jsonl to write")
    p.add_argument("--columns", default="", metavar="MEANING=NAME,...", help="names of columns, or "
                   f"numbers if there is no header; meanings are {', '.join(COLUMNS)}")
    args = cli.parse(p, lambda args, _: check_columns(args.columns), argv)
    to_chatml(args.source, args.output, problems := [], columns=args.columns)
    print(*problems[:20], sep="\n")
    with open(args.output, encoding="utf-8") as file:
        first = file.readline()
    require(first, f"{args.source}: holds no row that can be used")
    print(f"first row: {one_line(first)}")


if __name__ == "__main__":
    main()
