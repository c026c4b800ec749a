"""Speech data as people have it -> Samples: rows of any format (speech/data/formats.py), or ChatML, as conversations.

A row becomes the conversation that Higgs-Audio's own inference builds: system turn with the scene, references, the text
to speak, the clip. Which reference, if any, stands before the text is chosen here.
"""
import hashlib
import heapq
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from common.json_files import SKIPPED
from common.problems import problem
from common.text import NAME, printable
from speech.choices import DEFAULT_SYSTEM, TASK_TYPES
from speech.data.conversations import (
    SCENE,
    BadSample,
    Paths,
    Sample,
    canonical_prompt,
    canonical_sample,
    system_parts,
)
from speech.data.formats import Source, audio_paths, find_source, read_text

SPOKEN_BY = re.compile(r"^\s*Speaker\s+(\d+)\s*:\s*", re.IGNORECASE | re.MULTILINE)     # as VibeVoice writes it
NOTES = {       # of samples that are used all the same
    "no_second_clip": "their speakers have no other clip for reference; trained without one",
    "unused_reference": "their task type uses no reference clips; --task_type zero_shot_voice_cloning trains with them",
    "no_reference_text": "what their reference clips say is not known (ref_text); trained without them"}
CANDIDATES = 64             # clips of a speaker among which references are chosen
GOOD_SECONDS = (3, 15)      # of a reference, where the data say how long clips are


@dataclass(frozen=True)
class Reading:
    """How rows become conversations: what the flags of these names say. normalize: the texts to speak."""
    task_type: str = "single_speaker_smart_voice"
    ref_in_system: bool = False
    data_format: str = "auto"
    reference: str = "given"
    reference_share: float = 1.0
    seed: int = 42
    normalize: bool = False


def flag_of(name):
    """The flag that sets a field of Reading."""
    return {"ref_in_system": "--ref_audio_in_system_message", "normalize": "--normalize_text"}.get(name, f"--{name}")


@dataclass(frozen=True)
class Opened:
    """A source ready to be read by several processes. pool: {speaker: [row]} to choose references from."""
    source: Source
    reading: Reading
    pool: dict = field(default_factory=dict)


def open_source(path, reading):
    """Find out a source's format, and look through it for references if they shall be chosen -> Opened."""
    source, plain = find_source(path, reading.data_format), Reading()
    shape = ("task_type", "ref_in_system", "reference", "reference_share")
    if source.format == "chatml" and (changed := [n for n in shape if getattr(reading, n) != getattr(plain, n)]):
        print(f"notice     {path}: ChatML has prompts of its own, in which {', '.join(map(flag_of, changed))} changes "
              "nothing", flush=True)
    pool = reference_pool(source, reading.seed) if reading.reference == "same_speaker" else {}
    return Opened(source, reading, pool)


def read_samples(path, problems, prompts=False, **reading):
    """Yield the Samples of a data file or folder.

    A sample that cannot be used appends one line to the list `problems` (file, sample, reason) and is not yielded; the
    caller decides. prompts: as canonical_prompt makes them. reading: of Reading. Raises UserError when the file itself
    cannot be read.
    """
    for _, found in _numbered(open_source(path, Reading(**reading)), lambda number: True, prompts):
        if isinstance(found, Sample):
            yield found
        else:
            problems.append(found)


def read_chunks(opened, size, first=0, step=1):
    """Yield (Samples, problems) of every `step`-th chunk of `size` entries of an Opened source from chunk `first` on.

    So several processes can share the work: what is not asked for is passed over, JSON lines even unread.
    """
    def wanted(number):
        chunk = number // size
        return chunk >= first and (chunk - first) % step == 0

    stop, samples, problems = (first + 1) * size, [], []
    for number, found in _numbered(opened, wanted):
        if number >= stop:
            yield samples, problems
            stop, samples, problems = stop + step * size, [], []
        if found is not None:
            (samples if isinstance(found, Sample) else problems).append(found)
    if samples or problems:
        yield samples, problems


def _numbered(opened, wanted, prompts=False):
    """Yield (number, found) of every entry: its Sample, a line on what is wrong with it, or None if it is left out."""
    source = opened.source
    # samples that name their files in full are not looked for elsewhere
    paths = (Paths(source.base.resolve()) if source.format in ("chatml", "metadata_json") else audio_paths(source.base))
    make = canonical_prompt if prompts else canonical_sample
    for number, entry in source.read(wanted):
        if entry is SKIPPED or not wanted(number):
            yield number, None
            continue
        name, notes = f"{source.path} sample {number}", []
        try:
            if isinstance(entry, BadSample):
                name += entry.place
                raise entry
            if isinstance(entry, dict):
                misc = entry.get("misc") if isinstance(entry.get("misc"), dict) else {}
                label = misc.get("sample_id") or entry.get("id") or entry.get("speaker")
                name += f" ({printable(label, NAME)})" if label else ""
                if "messages" not in entry and "audio" in entry:
                    entry, notes = row_entry(entry, opened, paths)
            sample = make(name, entry, paths, opened.reading.normalize)
        except BadSample as error:
            yield number, problem(name, error.check, error, source.path)
        else:
            sample.notes.extend(notes)
            yield number, sample


# ---------------------------------------------------------------------------------------------------------------------
# Rows -> raw ChatML


def task_of(row, reading):
    """Task type of a row: its own, or the flag's; JimmyMa99's converter writes "audio_generation" into every sample."""
    given = row.get("task_type")
    return reading.task_type if given in (None, "", "audio_generation") else given


def row_entry(row, opened, paths):
    """(raw ChatML sample, [(check, note)]) of a row of a manifest, a folder or a corpus. Raises BadSample."""
    reading, notes = opened.reading, []
    task = task_of(row, reading)
    if task not in TASK_TYPES:
        raise BadSample(f"unknown task_type {task!r}; known: {', '.join(TASK_TYPES)}")
    if not isinstance(row["audio"], str) or not row["audio"].strip():
        raise BadSample(f"has no audio, but {row['audio']!r}")
    text = row_text(row)
    references = chosen_references(row, task, opened, paths, notes)
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
            turns += [{"role": "user", "content": tag + transcript.strip()}, {"role": "assistant", "content": audio}]
    return {"messages": [{"role": "system", "content": system}, *turns,
                         {"role": "user", "content": text},
                         {"role": "assistant", "content": audio_item(row)}],
            "speaker": row.get("speaker"), "language": row.get("language"), "misc": {"sample_id": row.get("id")}}, notes


def row_text(row):
    """The text to speak of a row. Raises BadSample when there is none."""
    text = read_text(row["text_file"], row.get("text_name", "")) if row.get("text_file") else row.get("text")
    if text is not None and not isinstance(text, str):
        raise BadSample(f"its text is {text!r}, not text")
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


def chosen_references(row, task, opened, paths, notes):
    """[(tag, transcript, audio item)] that stand before the text of a row, as --reference says. Raises BadSample."""
    reading = opened.reading
    if reading.reference == "none" or share_of("share", row, reading.seed) >= reading.reference_share:
        return []
    if reading.reference == "same_speaker":
        chosen = another_clip(row, opened.pool, reading.seed)
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
    if not audio or not text:
        notes.append(("no_reference_text", f"what its reference {audio!r} says is not known"))
        return []
    return [("", text, audio_item({"audio": audio}))]


def share_of(what, row, seed):
    """Number from 0 to 1 that belongs to a row, whatever the order of the rows and who reads them."""
    key = f"{seed}\0{what}\0{row.get('audio')}\0{row.get('offset')}"
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "backslashreplace"), digest_size=8).digest()) / 2**64


def reference_pool(source, seed):
    """{speaker: rows} of at most CANDIDATES clips of each speaker, those of a good length first, else by chance."""
    heaps = {}
    for number, row in source.read(lambda number: True):
        if not isinstance(row, dict) or "messages" in row or not row.get("speaker") or not row.get("audio"):
            continue
        try:
            seconds = audio_item(row)["duration"]
        except BadSample:
            continue
        odd = bool(seconds) and not GOOD_SECONDS[0] <= seconds <= GOOD_SECONDS[1]
        entry = (-odd, -share_of("candidate", row, seed), number, row)
        heap = heaps.setdefault(str(row["speaker"]), [])
        if len(heap) < CANDIDATES:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)      # the worst one goes
    return {speaker: [row for *_, row in sorted(heap, reverse=True)] for speaker, heap in heaps.items()}


def another_clip(row, pool, seed):
    """Row of another clip of a row's speaker, chosen by the row itself; None where there is none with a text."""
    def place(row):
        return row["audio"], row.get("offset")

    others = [other for other in pool.get(str(row.get("speaker")), ()) if place(other) != place(row)]
    while others:
        other = others.pop(int(share_of("reference", row, seed) * len(others)))
        try:
            return {**other, "text": row_text(other), "text_file": None}
        except BadSample:       # without a text it is told of where it is a sample itself
            continue
    return None
