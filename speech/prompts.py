"""Rows of convert.py -> raw ChatML: the conversation that Higgs-Audio's own inference builds.

System turn with the scene, references, the text to speak, the clip. Which reference, if any, stands
before the text is chosen here.
"""
import hashlib
import heapq
import math
import re
from pathlib import Path

from core import json_files
from core.cli import UserError
from speech.choices import DEFAULT_SYSTEM, TASK_TYPES
from speech.conversations import SCENE, BadSample, system_parts

SPOKEN_BY = re.compile(r"^\s*Speaker\s+(\d+)\s*:\s*", re.I | re.M)     # as VibeVoice writes it
CANDIDATES = 64             # clips of a speaker among which references are chosen
GOOD_SECONDS = (3, 15)      # of a reference, where the data say how long clips are


def row_entry(row, reading, pool, paths):
    """(raw ChatML sample, [(check, note)]) of a row of convert.py. Raises BadSample.

    reading: Reading. pool: {speaker: [candidate]} of note_candidate.
    """
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
        start = "\n\n<|scene_desc_start|>\n" + (f"{scene}\n\n" if scene else "")
        system = [DEFAULT_SYSTEM, start]
        for i, (tag, _, audio) in enumerate(references):
            system += ["\n" * bool(i) + f"{tag.strip('[] ') or 'SPEAKER0'}:", audio]
        system.append("\n<|scene_desc_end|>")
    else:
        voices = row.get("voices") if isinstance(row.get("voices"), dict) else {}
        said, scene = system_parts(text, scene, voices, bool(references))
        system = [said] + ["\n\n" + SCENE.format(scene)] * bool(scene)
        for tag, transcript, audio in references:
            said = tag + transcript.strip()
            turns += [{"role": "user", "content": said}] * bool(said)
            turns.append({"role": "assistant", "content": audio})
    system = [{"type": "text", "text": part} if isinstance(part, str) else part for part in system]
    kept = {name: row.get(name) for name in ("speaker", "language", "split", "normalize_text")}
    return {"messages": [{"role": "system", "content": system}, *turns,
                         {"role": "user", "content": text},
                         {"role": "assistant", "content": audio_item(row)}],
            **kept, "misc": {"sample_id": row.get("id")}}, notes


def read_text(path, name=""):
    """Text of a file of its own. name: of what names it, for the BadSample."""
    try:
        return json_files.read_text(Path(path), name and f"{name} ").strip()
    except UserError as error:
        raise BadSample(error)


def row_text(row):
    """The text to speak of a row. Raises BadSample when there is none."""
    text = row.get("text")
    if row.get("text_file"):
        text = read_text(row["text_file"], row.get("text_name", ""))
    if text is not None and not isinstance(text, str):
        raise BadSample(f"its text is {text!r}, not text")
    if text and len(text) > json_files.LONGEST:        # the tokenizer would end this process
        raise BadSample(f"its text is longer than {json_files.LONGEST >> 20} MiB")
    # ms-swift's placeholder, kept by some converters
    text = tagged((text or "").replace("<audio>", "").strip())
    if not text:
        raise BadSample("its text is empty", "empty_text")
    return text


def tagged(text):
    """Text with "Speaker 3:" before its lines -> "[SPEAKER0]", by first appearance; without it
    where one speaks.
    """
    spoken = SPOKEN_BY.findall(text)
    if not spoken or not SPOKEN_BY.match(text):
        return text
    numbers = {number: i for i, number in enumerate(dict.fromkeys(spoken))}
    alone = len(numbers) == 1
    return SPOKEN_BY.sub("" if alone else lambda m: f"[SPEAKER{numbers[m[1]]}] ", text)


def audio_item(row):
    """ChatML audio item of a row. Its offset makes it a cut, up to its end if that is known."""
    offset, duration, end = (seconds_of(row, key) for key in ("offset", "duration", "end"))
    if offset is None and end is not None and end >= 0:
        offset = 0.0
    if end is not None and offset is not None:
        duration = end - offset if end >= 0 else None       # Kaldi's -1: to the end of the file
        if duration is not None and duration <= 0:
            raise BadSample(f"ends at {end} s, where it does not last: it begins at {offset} s")
    return {"type": "audio", "audio_url": row["audio"], "offset": offset, "duration": duration}


def seconds_of(row, key):
    value = row.get(key)
    if value in (None, ""):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadSample(f"its {key} is {value!r}, not seconds")
    return number if math.isfinite(number) else None


# --------------------------------------------------------------------------------------------------
# References


def chosen_references(row, task, reading, pool, paths, notes):
    """[(tag, transcript, audio item)] before the text of a row, as --reference says."""
    drawn = share_of("share", row, reading.seed) < reading.reference_share
    if reading.reference == "none" or not drawn:
        return []
    if reading.reference == "same_speaker":
        if chosen := another_clip(row, pool, reading.seed):
            return [("", chosen["text"], audio_item(chosen))]
        notes.append(("no_second_clip", f"its speaker {row.get('speaker')!r} has no other clip for "
                                        "reference"))
        return []
    if task == "multi_speaker_voice_cloning":
        found, speakers = [], row.get("ref_speakers")
        for one in speakers if isinstance(speakers, list) else []:
            if not (isinstance(one, dict) and one.get("ref_audio_file")
                    and one.get("ref_transcript")):
                raise BadSample("every ref_speakers entry needs 'ref_audio_file' and "
                                "'ref_transcript'")
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
        beside = Path(paths.find(audio)).with_suffix(".txt")
        text = read_text(beside) if beside.is_file() else ""
    if audio and (text or reading.lone_reference):
        return [("", text or "", audio_item({"audio": audio}))]
    notes.append(("no_reference_text", f"what its reference {audio!r} says is not known"))
    return []


def share_of(what, row, seed):
    """Number from 0 to 1 that belongs to a row, whatever the order of the rows."""
    key = f"{seed}\0{what}\0{row['name']}\0{row.get('offset')}".encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64


def note_candidate(pool, row, reading, number):
    """Take row `number` into {speaker: heap} of at most CANDIDATES clips of each speaker: those of
    a good length first, else by chance.
    """
    if reading.reference != "same_speaker" or not row.get("speaker"):
        return
    seconds = audio_item(row)["duration"]
    odd = bool(seconds) and not GOOD_SECONDS[0] <= seconds <= GOOD_SECONDS[1]
    entry = (-odd, -share_of("candidate", row, reading.seed), number, row)
    heap = pool.setdefault(str(row["speaker"]), [])
    if len(heap) < CANDIDATES:
        heapq.heappush(heap, entry)
    else:
        heapq.heappushpop(heap, entry)      # the worst one goes


def another_clip(row, pool, seed):
    """Row of another clip of a row's speaker, chosen by the row itself; None where is none."""
    mine = row["name"], row.get("offset")
    found = sorted(pool.get(str(row.get("speaker")), ()), reverse=True)
    others = [other for *_, other in found if (other["name"], other.get("offset")) != mine]
    return others[int(share_of("reference", row, seed) * len(others))] if others else None
