"""Rows of convert.py -> raw ChatML: the conversation that Higgs-Audio's own inference builds of them.

System turn with the scene, references, the text to speak, the clip. Which reference, if any, stands before the text is
chosen here.
"""
import hashlib
import heapq
import math
import re
from pathlib import Path

from core.cli import UserError
from core import json_files
from core.json_files import LONGEST
from speech.choices import DEFAULT_SYSTEM, TASK_TYPES
from speech.conversations import SCENE, BadSample, system_parts

SPOKEN_BY = re.compile(r"^\s*Speaker\s+(\d+)\s*:\s*", re.IGNORECASE | re.MULTILINE)     # as VibeVoice writes it
CANDIDATES = 64             # clips of a speaker among which references are chosen
GOOD_SECONDS = (3, 15)      # of a reference, where the data say how long clips are
NOTES = {       # of samples that are used all the same
    "no_second_clip": "their speakers have no other clip for reference; trained without one",
    "unused_reference": "their task type uses no reference clips; --task_type "
                        "zero_shot_voice_cloning trains with them",
    "no_reference_text": "what their reference clips say is not known (ref_text); trained without "
                         "them"}


def row_entry(row, reading, pool, paths):
    """(raw ChatML sample, [(check, note)]) of a row of convert.py. Raises BadSample.

    reading: Reading. pool: {speaker: [candidate]} of note_candidate.
    """
    notes = []
    task = row.get("task_type")
    # JimmyMa99's converter writes "audio_generation" into every sample
    if task in (None, "", "audio_generation"):
        task = reading.task_type
    if task not in TASK_TYPES:
        raise BadSample(f"unknown task_type {task!r}; known: {', '.join(TASK_TYPES)}")
    if not isinstance(row["audio"], str) or not row["audio"].strip():
        raise BadSample(f"has no audio, but {row['audio']!r}")
    text = row_text(row)
    references = chosen_references(row, task, reading, pool, paths, notes)
    for value in [value for tag, transcript, _ in references for value in (tag, transcript)]:
        if not isinstance(value, str):
            raise BadSample(f"a reference's tag or transcript is {value!r}, not text")
    scene = f"Audio is recorded from {str(row['scene']).replace('_', ' ')}." if row.get("scene") else ""
    system, turns = [{"type": "text", "text": DEFAULT_SYSTEM}], []
    if reading.ref_in_system and references:
        scene_parts = [{"type": "text", "text": "\n\n<|scene_desc_start|>\n" + (scene + "\n\n" if scene else "")}]
        for i, (tag, _, audio) in enumerate(references):
            label = tag.strip("[] ") or "SPEAKER0"
            scene_parts += [{"type": "text", "text": ("\n" if i else "") + f"{label}:"}, audio]
        system += scene_parts + [{"type": "text", "text": "\n<|scene_desc_end|>"}]
    else:
        voices = row.get("voices") if isinstance(row.get("voices"), dict) else {}
        said, scene = system_parts(text, scene, voices, bool(references))
        system = [{"type": "text", "text": said}]
        if scene:
            system.append({"type": "text", "text": "\n\n" + SCENE.format(scene)})
        for tag, transcript, audio in references:
            said = tag + transcript.strip()
            turns += [{"role": "user", "content": said}] * bool(said) + [{"role": "assistant", "content": audio}]
    return {"messages": [{"role": "system", "content": system}, *turns,
                         {"role": "user", "content": text},
                         {"role": "assistant", "content": audio_item(row)}],
            "speaker": row.get("speaker"), "language": row.get("language"), "split": row.get("split"),
            "misc": {"sample_id": row.get("id")},
            "normalize_text": row.get("normalize_text")}, notes


def read_text(path, name=""):
    """Text of a file of its own. name: of what names it, for the BadSample."""
    try:
        return json_files.read_text(Path(path), name and f"{name} ").strip()
    except UserError as error:
        raise BadSample(error)


def row_text(row):
    """The text to speak of a row. Raises BadSample when there is none."""
    text = read_text(row["text_file"], row.get("text_name", "")) if row.get("text_file") else row.get("text")
    if text is not None and not isinstance(text, str):
        raise BadSample(f"its text is {text!r}, not text")
    if text and len(text) > LONGEST:        # the tokenizer would end this process
        raise BadSample(f"its text is longer than {LONGEST >> 20} MiB")
    text = tagged((text or "").replace("<audio>", "").strip())      # ms-swift's placeholder, kept by some converters
    if not text:
        raise BadSample("its text is empty", "empty_text")
    return text


def tagged(text):
    """Text with "Speaker 3:" before its lines -> "[SPEAKER0]", by first appearance; without it where one speaks."""
    spoken = SPOKEN_BY.findall(text)
    if not spoken or not SPOKEN_BY.match(text):
        return text
    numbers = {number: i for i, number in enumerate(dict.fromkeys(spoken))}
    return SPOKEN_BY.sub("" if len(numbers) == 1 else lambda m: f"[SPEAKER{numbers[m[1]]}] ", text)


def audio_item(row):
    """ChatML audio item of a row. Its offset makes it a cut, up to its end if that is known."""
    offset, duration, end = (_seconds(row, key) for key in ("offset", "duration", "end"))
    if offset is None and end is not None and end >= 0:
        offset = 0.0
    if end is not None and offset is not None:
        duration = end - offset if end >= 0 else None       # Kaldi's -1: to the end of the file
        if duration is not None and duration <= 0:
            raise BadSample(f"ends at {end} s, where it does not last: it begins at {offset} s")
    return {"type": "audio", "audio_url": row["audio"], "offset": offset, "duration": duration}


def _seconds(row, key):
    value = row.get(key)
    if value in (None, ""):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadSample(f"its {key} is {value!r}, not seconds")
    return number if math.isfinite(number) else None


# ---------------------------------------------------------------------------------------------------------------------
# References


def chosen_references(row, task, reading, pool, paths, notes):
    """[(tag, transcript, audio item)] that stand before the text of a row, as --reference says. Raises BadSample."""
    if reading.reference == "none" or share_of("share", row, reading.seed) >= reading.reference_share:
        return []
    if reading.reference == "same_speaker":
        chosen = another_clip(row, pool, reading.seed)
        if chosen is None:
            notes.append(("no_second_clip", f"its speaker {row.get('speaker')!r} has no other clip for reference"))
        return [("", row_text(chosen), audio_item(chosen))] if chosen else []
    if task == "multi_speaker_voice_cloning":
        found = []
        speakers = row.get("ref_speakers")
        for speaker in speakers if isinstance(speakers, list) else []:
            if not isinstance(speaker, dict) or not (speaker.get("ref_audio_file") and speaker.get("ref_transcript")):
                raise BadSample("every ref_speakers entry needs 'ref_audio_file' and 'ref_transcript'")
            tag = str(speaker.get("speaker_tag") or f"SPEAKER{len(found)}").strip("[]")
            found.append((f"[{tag}] ", speaker["ref_transcript"], audio_item({"audio": speaker["ref_audio_file"]})))
        if not found:
            raise BadSample("multi_speaker_voice_cloning needs a list 'ref_speakers'")
        return found
    audio, text = row.get("ref_audio"), row.get("ref_text")
    if "ref_speakers" in row:       # a metadata.json, where the task type decides
        if task != "zero_shot_voice_cloning":
            notes += [("unused_reference", f"{task} uses no reference clips")] * bool(audio or row["ref_speakers"])
            return []
        if not (audio and text):
            raise BadSample("zero_shot_voice_cloning needs 'ref_audio_file' and 'ref_transcript'")
    if not audio and not row.get("voice_prompts"):
        return []
    if audio and not text:
        beside = Path(paths.find(audio)).with_suffix(".txt")
        text = read_text(beside) if beside.is_file() else ""
    if audio and not text and reading.lone_reference:
        return [("", "", audio_item({"audio": audio}))]
    if not audio or not text:
        notes.append(("no_reference_text", f"what its reference {audio!r} says is not known"))
        return []
    return [("", text, audio_item({"audio": audio}))]


def share_of(what, row, seed):
    """Number from 0 to 1 that belongs to a row, whatever the order of the rows and who reads them."""
    key = f"{seed}\0{what}\0{row['name']}\0{row.get('offset')}"
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8).digest()) / 2**64


def note_candidate(pool, row, reading, number):
    """Take a row into {speaker: heap} of at most CANDIDATES clips of each speaker: those of a good length first, else
    by chance. number: of the row.
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
    """Row of another clip of a row's speaker, chosen by the row itself; None where there is none with a text."""
    def place(row):
        return row["name"], row.get("offset")

    found = sorted(pool.get(str(row.get("speaker")), ()), reverse=True)
    others = [other for *_, other in found if place(other) != place(row)]
    return others[int(share_of("reference", row, seed) * len(others))] if others else None
