"""Speech data as people have it -> Samples: raw ChatML, or rows of any other format, as conversations.

ChatML is recognised here. All that other formats need is imported for them: speech/data/formats.py finds out which it
is and reads its rows, speech/data/prompts.py makes conversations of them.
"""
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

from common.distributed import UserError
from common.json_files import SKIPPED, read_entries
from common.problems import problem
from common.text import NAME, printable
from speech.data.conversations import (
    BadSample,
    Paths,
    Sample,
    Source,
    canonical_prompt,
    canonical_sample,
    content_items,
    is_chatml,
)

LOOK = 20       # entries that are looked at to find out the format
NOTES = {       # of samples that are used all the same
    "no_second_clip": "their speakers have no other clip for reference; trained without one",
    "unused_reference": "their task type uses no reference clips; --task_type zero_shot_voice_cloning trains with them",
    "no_reference_text": "what their reference clips say is not known (ref_text); trained without them"}


@dataclass(frozen=True)
class Reading:
    """How rows become conversations: what the flags of these names say. normalize: the texts to speak."""
    task_type: str = "single_speaker_smart_voice"
    ref_in_system: bool = False
    data_format: str = "auto"
    columns: str = ""
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


def open_source(path, reading, held_out=False):
    """Find out a source's format, and look through it for references if they shall be chosen -> Opened.

    held_out: whether it is validation data.
    """
    source, plain = chatml_source(path, reading.data_format), Reading()
    if source is None:
        from speech.data import formats
        source = formats.find_source(path, reading.data_format, reading.columns, held_out)
    unused, why = (), ""
    if source.format == "chatml":
        unused = ("task_type", "ref_in_system", "reference", "reference_share", "columns")
        why = "ChatML has prompts of its own, in which"
    elif source.format not in ("manifest", "vibevoice", "parquet", "arrow", "tar"):
        unused, why = ("columns",), f"has no columns with names ({source.format}):"
    if changed := [flag_of(name) for name in unused if getattr(reading, name) != getattr(plain, name)]:
        print(f"notice     {printable(path)}: {why} {', '.join(changed)} changes nothing", flush=True)
    pool = {}
    if reading.reference == "same_speaker" and source.format != "chatml":
        from speech.data.prompts import reference_pool
        pool = reference_pool(source, reading.seed)
    return Opened(source, reading, pool)


def chatml_source(path, data_format="auto"):
    """Source of a JSON file whose first entries are all ChatML; None for anything else, and what cannot be read."""
    path = Path(path)
    if data_format not in ("auto", "chatml") or path.suffix not in (".json", ".jsonl") or not path.is_file():
        return None
    try:
        unit, read = read_entries(path)
        first = [entry for _, entry in itertools.islice(read(lambda number: True), LOOK)]
    except UserError:
        return None
    if not first or not all(map(is_chatml, first)):
        return None
    return Source(path, "chatml", "JSON samples", path.parent, read, unit)


def read_samples(path, problems, prompts=False, **reading):
    """Yield the Samples of a data file or folder.

    A sample that cannot be used appends one line to the list `problems` (file, sample, reason) and is not yielded; the
    caller decides. prompts: as canonical_prompt makes them. reading: of Reading. Raises UserError when the file itself
    cannot be read.
    """
    for _, found in _numbered(open_source(path, Reading(**reading)), lambda number: True, prompts):
        if isinstance(found, Sample):
            yield found
        elif found is not None:
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
        while number >= stop:       # numbers are of lines, of which some are empty
            yield samples, problems
            stop, samples, problems = stop + step * size, [], []
        if found is not None:
            (samples if isinstance(found, Sample) else problems).append(found)
    if samples or problems:
        yield samples, problems


def _numbered(opened, wanted, prompts=False):
    """Yield (number, found) of every entry: its Sample, a line on what is wrong with it, or None if it is left out."""
    source, make = opened.source, canonical_prompt if prompts else canonical_sample
    paths = Paths(source.base.resolve())
    if source.format not in ("chatml", "metadata_json"):        # those name their files in full
        from speech.data.formats import audio_paths
        paths = audio_paths(source.base)
    for number, entry in source.read(wanted):
        if entry is SKIPPED or not wanted(number):
            yield number, None
            continue
        name, notes = f"{source.path} {source.unit} {number + 1}", []
        try:
            if isinstance(entry, BadSample):
                name += entry.place
                raise entry
            if isinstance(entry, dict):
                label = label_of(entry)
                name += f" ({printable(label, NAME)})" if label else ""
                if "messages" not in entry and "audio" in entry:
                    from speech.data.prompts import row_entry
                    entry, notes = row_entry(entry, opened, paths)
            sample = make(name, entry, paths, opened.reading.normalize)
        except BadSample as error:
            yield number, problem(name, error.check, error, source.path)
        else:
            sample.notes.extend(notes)
            yield number, sample


def label_of(entry):
    """What people know a row or raw sample by: its id, or the file of its last clip."""
    misc = entry.get("misc") if isinstance(entry.get("misc"), dict) else {}
    if found := misc.get("sample_id") or entry.get("id"):
        return found
    clips = [item.get("audio_url") for item in content_items(entry) if isinstance(item, dict)]
    clips = [clip for clip in (*clips, entry.get("audio")) if isinstance(clip, str) and clip]
    return os.path.basename(clips[-1]) if clips else entry.get("speaker")
