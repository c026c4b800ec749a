"""ChatML files -> Samples; speech data of any other format become ChatML first (convert.py)."""
import atexit
import itertools
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from core.cli import UserError, counted, printable
from core.packing import parallel_map_ordered
from core.json_files import SKIPPED, read_entries
from core.problems import problem
from speech.conversations import (BadSample, Paths, Reading, Sample, canonical_sample, is_chatml,
                                  label_of, sample_text)
from speech.text_normalization import RECOGNISED

CHUNK = 2048    # entries of a file that are tokenised together
LOOK = 20       # entries that are looked at to find out the format
FLAGS = {"ref_in_system": "--ref_audio_in_system_message", "normalize": "--normalize_text"}
NOTES = {       # of samples that are used all the same
    "no_second_clip": "their speakers have no other clip for reference; trained without one",
    "unused_reference": "their task type uses no reference clips; --task_type "
                        "zero_shot_voice_cloning trains with them",
    "no_reference_text": "what their reference clips say is not known (ref_text); trained without "
                         "them"}


@dataclass(frozen=True)
class Sources:
    """The user's files and folders of a run, and how they become samples.

    train: [(path, weight)]. held_out: path of the validation data, or None. processes: that help
    this one with sources of many samples. drop: checks (choices.CHECKS) whose samples are dropped.
    """
    train: list
    held_out: str | None = None
    reading: Reading = Reading()
    processes: int = 0
    drop: tuple = ()

    def all(self):
        """[(path, weight, whether it is validation data)]."""
        train = [(path, weight, False) for path, weight in self.train]
        return [*train, (self.held_out, 1.0, True)] if self.held_out else train


@dataclass(frozen=True)
class Source:
    """A ChatML file. read(wanted) yields (number, entry or SKIPPED); people count from 1."""
    path: Path
    about: str          # what was found out, for people
    base: Path          # relative names of audio files begin here
    unit: str           # numbered things: "line" of a file or "sample"
    read: object


def flag_of(name):
    """The flag that sets a field of Reading."""
    return FLAGS.get(name, f"--{name}")


def open_source(path, reading, problems, held_out=False, folder=None, number=0):
    """Source of a path: itself where it is ChatML; else `folder` gets it as ChatML first.

    problems: a list that takes rows that cannot be used. held_out: whether it is validation data.
    number: of the path among those of a run.
    """
    if source := chatml_source(path):
        unused = ("task_type", "ref_in_system", "reference", "reference_share", "columns")
        changed = [flag_of(name) for name in unused
                   if getattr(reading, name) != getattr(Reading(), name)]
        if changed:
            print(f"notice     {printable(path)}: ChatML has its prompts, in which "
                  f"{', '.join(changed)} changes nothing", flush=True)
        return source
    from speech import convert
    if folder is None:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Path(folder) / f"{'eval' if held_out else 'train'}-{number}.jsonl"
    convert.to_chatml(path, made, problems, held_out=held_out, **vars(reading))
    unit, read = read_entries(made) if made.stat().st_size else ("row", lambda wanted: ())
    return Source(Path(path), f"as ChatML in {made}", made.parent, unit, read)


def chatml_source(path):
    """Source of a JSON file with ChatML among its first entries; None for anything else."""
    path = Path(path)
    if path.suffix not in (".json", ".jsonl") or not path.is_file():
        return None
    try:
        unit, read = read_entries(path)
        first = [entry for _, entry in itertools.islice(read(lambda number: True), LOOK)]
    except UserError:
        return None
    talks = [entry for entry in first
             if isinstance(entry, dict) and isinstance(entry.get("messages"), list)]
    fits = talks and all(map(is_chatml, talks))
    return Source(path, "JSON samples", path.parent, unit, read) if fits else None


def entries_of(source, reading, wanted, make=canonical_sample):
    """Yield (number, its Sample, or the Problem with it; None if it is left out) of each entry."""
    paths = Paths(source.base.resolve())
    for number, entry in source.read(wanted):
        if entry is SKIPPED or not wanted(number):
            yield number, None
            continue
        name, misc, setting = f"{source.path} {source.unit} {number + 1}", {}, None
        try:
            if isinstance(entry, dict):
                misc = entry["misc"] if isinstance(entry.get("misc"), dict) else {}
                label, setting = label_of(entry), entry.get("normalize_text")
                name += f" ({printable(label, 80)})" if label else ""
                if isinstance(misc.get("source"), str):     # of convert.py
                    name = misc["source"]
            if setting not in (None, "", "on", "off"):
                raise BadSample(f"its normalize_text is {setting!r}; give off, on or nothing")
            # off: as a take was spoken
            sample = make(name, entry, paths, reading.normalize and setting != "off")
        except BadSample as error:
            yield number, problem(name, error.check, error, source.path)
        else:
            sample.notes.extend(map(tuple, misc.get("notes", ())))
            yield number, sample


def read_samples(path, problems, make=canonical_sample, **reading):
    """Yield the Samples of data of any format; the list `problems` takes what cannot be used.

    make: what makes them of ChatML. reading: of Reading. UserError for a file that is unreadable.
    """
    reading = Reading(**reading)
    for _, found in entries_of(open_source(path, reading, problems), reading, lambda n: True, make):
        if isinstance(found, Sample):
            yield found
        elif found is not None:
            problems.append(found)


def read_chunks(source, reading, size, first=0, step=1):
    """Yield (Samples, problems) of every `step`-th chunk of `size` entries from chunk `first` on,
    so that several processes share the work; JSON lines of others' are passed over unread.
    """
    def wanted(number):
        chunk = number // size
        return chunk >= first and (chunk - first) % step == 0

    stop, samples, problems = (first + 1) * size, [], []
    for number, found in entries_of(source, reading, wanted):
        while number >= stop:       # numbers are of lines, of which some are empty
            yield samples, problems
            stop, samples, problems = stop + step * size, [], []
        if found is not None:
            (samples if isinstance(found, Sample) else problems).append(found)
    if samples or problems:
        yield samples, problems


def read_all(builder, sources, problems, noted=None, folder=None):
    """Read and tokenise Sources into a TableBuilder -> sources of its Table.

    problems: Problems, which takes the samples that cannot be used, for the caller to settle.
    noted: a list that takes oddities of samples that are used, as Problems. folder: for what
    is not ChatML. UserError when a source is empty.
    """
    found = []
    for number, (path, weight, held_out) in enumerate(sources.all()):
        first, lost = len(builder), []
        source = open_source(path, sources.reading, lost, held_out, folder, number)
        notes, refused, shown = Counter(), Counter(p.check for p in lost), []
        problems.add(lost)

        def chunks(start, step, source=source, path=path):
            for samples, wrong in read_chunks(source, sources.reading, CHUNK, start, step):
                kept, odd = [], []
                for sample in samples:
                    unwanted = [note for note in sample.notes if note[0] in sources.drop]
                    if unwanted:
                        wrong.append(problem(sample.name, *unwanted[0]))
                    else:
                        kept.append(sample)
                        odd += [problem(sample.name, *note, path) for note in sample.notes]
                text = sample_text(kept[0]) if kept and start == 0 else ""
                chunk = builder.chunk(kept, wrong)
                chunk["left_out"].update(RECOGNISED[how] for one in kept for how in one.recognised)
                yield chunk, wrong, odd, text

        def take(part, path=path, notes=notes, refused=refused, shown=shown):
            chunk, wrong, odd, text = part
            builder.append(chunk)
            for p in wrong:
                p.file = str(path)
                refused[p.check] += 1
            problems.add(wrong)
            notes.update(p.check for p in odd)
            if noted is not None:
                noted.extend(odd)
            shown += [text] * bool(text)

        parallel_map_ordered(chunks, sources.processes, take)
        kept, lost = len(builder) - first, sum(refused.values())
        counts = ", ".join(f"{n} {check}" for check, n in sorted(refused.items()))
        print(f"source     {printable(path)}: chatml ({source.about}); {kept + lost} rows = {kept} "
              f"kept + {lost} refused{f' ({counts})' if counts else ''}", flush=True)
        for text in shown[:1]:
            print(f"           first: {printable(text)}", flush=True)
        for check, n in sorted(notes.items()):
            print(f"           {counted(n, 'sample')} with {check}: {NOTES[check]}", flush=True)
        if not kept and not problems.stopping:
            problems.settle()
            raise UserError(f"{path}: holds no samples" + " that can be used" * bool(refused))
        found.append({"path": str(path), "weight": weight, "held_out": held_out, "first": first,
                      "stop": len(builder)})
    for what, n in sorted(builder.left_out.items()):
        print(f"data       {n} samples {what}", flush=True)
    return found
