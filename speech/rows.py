"""ChatML files -> Samples; speech data of any other format become ChatML first (speech/convert.py)."""
import atexit
import itertools
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from core.cli import UserError, counted, printable
from core.indexing import parallel_map_ordered
from core.problems import problem
from core.json_files import SKIPPED, read_entries
from speech.conversations import (
    BadSample,
    Paths,
    Reading,
    Sample,
    Source,
    canonical_sample,
    label_of,
    is_chatml,
    sample_text,
)
from speech.text_normalization import RECOGNISED

CHUNK = 2048    # entries of a file that are tokenised together
LOOK = 20       # entries that are looked at to find out the format


def flag_of(name):
    """The flag that sets a field of Reading."""
    return {"ref_in_system": "--ref_audio_in_system_message", "normalize": "--normalize_text"}.get(name, f"--{name}")


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


def open_source(path, reading, held_out=False, folder=None, problems=None, number=0):
    """Source of a path: itself where it is ChatML; what else it is becomes ChatML in `folder` first.
    number: of the path among those of a run.

    held_out: whether it is validation data. problems: a list that takes the rows that cannot be used.
    """
    source, plain = chatml_source(path), Reading()
    if source is not None:
        unused = ("task_type", "ref_in_system", "reference", "reference_share", "columns")
        if changed := [flag_of(name) for name in unused if getattr(reading, name) != getattr(plain, name)]:
            print(f"notice     {printable(path)}: ChatML has prompts of its own, in which "
                  f"{', '.join(changed)} changes nothing", flush=True)
        return source
    from speech import convert
    if folder is None:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Path(folder) / f"{'eval' if held_out else 'train'}-{number}.jsonl"
    made = convert.to_chatml(path, made, held_out=held_out, problems=problems, **vars(reading))
    unit, read = read_entries(made) if made.stat().st_size else ("row", lambda wanted: ())
    return Source(Path(path), "chatml", f"as ChatML in {made}", made.parent, read, unit)


def chatml_source(path):
    """Source of a JSON file with ChatML among its first entries; None for anything else, and what cannot be read."""
    path = Path(path)
    if path.suffix not in (".json", ".jsonl") or not path.is_file():
        return None
    try:
        unit, read = read_entries(path)
        first = [entry for _, entry in itertools.islice(read(lambda number: True), LOOK)]
    except UserError:
        return None
    talks = [entry for entry in first if isinstance(entry, dict) and isinstance(entry.get("messages"), list)]
    if not talks or not all(map(is_chatml, talks)):
        return None
    return Source(path, "chatml", "JSON samples", path.parent, read, unit)


def read_samples(path, problems, make=canonical_sample, **reading):
    """Yield the Samples of a data file or folder.

    A sample that cannot be used appends one line to the list `problems` (file, sample, reason) and
    is not yielded; the caller decides. make: what makes them of ChatML. reading: of Reading. Raises
    UserError when the file itself cannot be read.
    """
    reading = Reading(**reading)
    for _, found in _numbered(open_source(path, reading, problems=problems), reading, lambda number: True, make):
        if isinstance(found, Sample):
            yield found
        elif found is not None:
            problems.append(found)


def read_chunks(source, reading, size, first=0, step=1):
    """Yield (Samples, problems) of every `step`-th chunk of `size` entries of a Source from chunk
    `first` on.

    So several processes can share the work: what is not asked for is passed over, JSON lines even
    unread.
    """
    def wanted(number):
        chunk = number // size
        return chunk >= first and (chunk - first) % step == 0

    stop, samples, problems = (first + 1) * size, [], []
    for number, found in _numbered(source, reading, wanted):
        while number >= stop:       # numbers are of lines, of which some are empty
            yield samples, problems
            stop, samples, problems = stop + step * size, [], []
        if found is not None:
            (samples if isinstance(found, Sample) else problems).append(found)
    if samples or problems:
        yield samples, problems


def _numbered(source, reading, wanted, make=canonical_sample):
    """Yield (number, found) of every entry: its Sample, a line on what is wrong with it, or None if
    it is left out.
    """
    paths = Paths(source.base.resolve())
    for number, entry in source.read(wanted):
        if entry is SKIPPED or not wanted(number):
            yield number, None
            continue
        name, misc = f"{source.path} {source.unit} {number + 1}", {}
        try:
            if isinstance(entry, dict):
                misc = entry["misc"] if isinstance(entry.get("misc"), dict) else {}
                label = label_of(entry)
                name += f" ({printable(label, 80)})" if label else ""
                if isinstance(misc.get("source"), str):     # of convert.py
                    name = misc["source"]
            setting = entry.get("normalize_text") if isinstance(entry, dict) else None
            if setting not in (None, "", "on", "off"):
                raise BadSample(f"its normalize_text is {setting!r}; give off, on or nothing")
            # off: as a take was spoken
            sample = make(name, entry, paths, reading.normalize and setting != "off")
        except BadSample as error:
            yield number, problem(name, error.check, error, source.path)
        else:
            sample.notes.extend(map(tuple, misc.get("notes", ())))
            yield number, sample


# --------------------------------------------------------------------------------------------------
# From the user's files to the samples of a run


def read_all(builder, sources, problems, noted=None, folder=None):
    """Read and tokenise Sources into a TableBuilder -> sources of its Table.

    problems: Problems, which takes the samples that cannot be used, for the caller to settle.
    noted: a list that takes what is odd about samples that are used, as Problems. folder: for what
    is not ChatML. Raises UserError when a source is empty.
    """
    found, recognised = [], {}  # {key of RECOGNISED: [number of samples, the first one's words]}
    for number, (path, weight, held_out) in enumerate(sources.all()):
        first, lost = len(builder), []
        source = open_source(path, sources.reading, held_out, folder, lost, number)
        notes, refused, shown = Counter(), Counter(p.check for p in lost), []
        problems.add(lost)

        def chunks(start, step, source=source, path=path):
            for samples, wrong in read_chunks(source, sources.reading, CHUNK, start, step):
                samples, odd = _without_noted(samples, wrong, sources.drop, path)
                text = sample_text(samples[0]) if samples and start == 0 else ""
                yield (builder.chunk(samples, wrong), wrong, odd, text,
                       [sample.recognised for sample in samples if sample.recognised])

        def take(part, path=path, notes=notes, refused=refused, shown=shown):
            chunk, wrong, odd, text, words_of = part
            builder.append(chunk)
            for p in wrong:
                p.file = str(path)
                refused[p.check] += 1
            problems.add(wrong)
            notes.update(p.check for p in odd)
            if noted is not None:
                noted.extend(odd)
            if text:
                shown.append(text)
            for how, words in itertools.chain.from_iterable(map(dict.items, words_of)):
                recognised.setdefault(how, [0, words])[0] += 1

        parallel_map_ordered(chunks, sources.processes, take)
        kept = len(builder) - first
        print_source(path, source, kept, refused, shown, notes)
        if not kept and not problems.stopping:
            problems.settle()
            raise UserError(f"{path}: holds no samples" + (" that can be used" if refused else ""))
        found.append({"path": str(path), "weight": weight, "held_out": held_out, "first": first,
                      "stop": len(builder)})
    for how, (count, words) in sorted(recognised.items()):
        text = RECOGNISED[how].format(printable(words, 80))
        print(f"data       {count} {text}", flush=True)
    for what, n in sorted(builder.left_out.items()):
        print(f"data       {n} samples {what}", flush=True)
    return found


def _without_noted(samples, wrong, drop, path):
    """(the samples with no note that `drop` names, Problems of the notes of those). The others' go
    to the list `wrong`.
    """
    kept, odd = [], []
    for sample in samples:
        unwanted = [note for note in sample.notes if note[0] in drop]
        if unwanted:
            wrong.append(problem(sample.name, *unwanted[0]))
        else:
            kept.append(sample)
            odd += [problem(sample.name, *note, path) for note in sample.notes]
    return kept, odd


def print_source(path, source, kept, refused, shown, notes):
    """What was found in a source. refused, notes: {check: samples}. shown: [text of a sample]."""
    lost, counts = sum(refused.values()), ""
    if refused:
        counts = ", ".join(f"{n} {check}" for check, n in sorted(refused.items()))
        counts = f" ({counts})"
    print(f"source     {printable(path)}: {source.format} ({source.about}); {kept + lost} rows = "
          f"{kept} kept + {lost} refused{counts}", flush=True)
    for text in shown[:1]:
        print(f"           first: {printable(text)}", flush=True)
    for check, n in sorted(notes.items()):
        from speech.prompts import NOTES
        print(f"           {counted(n, 'sample')} with {check}: {NOTES[check]}", flush=True)


def file_of(sources, i):
    """Path of the source of sample i."""
    return next((s["path"] for s in sources if s["first"] <= i < s["stop"]), "")
