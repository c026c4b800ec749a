"""The table of tokenised samples on disk: rank 0 writes it, all ranks and loader workers map it.

    builder = TableBuilder(tokenizer, ids, folder)
    builder.add(samples, problems)                  # of read_samples or read_all
    builder.write(*codes.ensure_codes(world, builder.clips, how)[:3])
    table = Table(folder)
    train, held_out = usable_samples(table, *split_samples(table, None, seed), ...)

Each sample is tokenised once, each distinct clip kept once. A clip is one placeholder token here;
its rows come when it is loaded (data.py).
"""
import atexit
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from core import checkpoint, json_files
from core.cli import UserError, counted, printable, require
from core.dist import error_names_file, rank0
from core.packing import Column, Lists, parallel_map_ordered, token_lists
from core.problems import LIST, problem, settle
from speech.codes import FRAME_RATE, CodeReader, codec_fingerprint
from speech.conversations import (OTHER_MARKS, RECOGNISED, BadSample, Clip, Paths, Reading, Sample,
                                  canonical_sample, is_chatml, label_of, marks_speakers_otherwise,
                                  sample_text)

LIKE_A_TAG = re.compile(r"<\|[^<>|]*\|>")
CHUNK = 2048    # entries of a file that are tokenised together
LOOK = 20       # entries that are looked at to find out the format
FLAGS = {"ref_in_system": "--ref_audio_in_system_message", "normalize": "--normalize_text"}
NOTES = {       # of samples that are used all the same
    "no_second_clip": "their speakers have no other clip for reference; trained without one",
    "unused_reference": "their task type uses no reference clips; --task_type "
                        "zero_shot_voice_cloning trains with them",
    "no_reference_text": "what their reference clips say is not known (ref_text); trained without "
                         "them"}
SHARE = 0.005           # of the samples, for validation, where --validation_split says nothing
TABLE = r"table-[0-9a-f]{8}"    # new_table
PREPARED = "prepared.json"      # of a folder of prepare_tts.py, written last
# of a sample: hashes of its speaker and text; the letters and digits of that text, 0: no words
FACTS = np.dtype([("words", np.uint64), ("letters", np.int32), ("speaker", np.uint64),
                  ("language", np.uint64)])


def new_table(folder):
    """Path for a table, which is made at each start; a running job keeps its table."""
    return Path(folder) / f"table-{uuid.uuid4().hex[:8]}"


def is_prepared(path):
    """True if a path is a folder of prepare_tts.py."""
    return os.path.isfile(os.path.join(path, PREPARED))


def keep_prepared(output_dir):
    """UserError where a run would take a prepared folder's table for one of an earlier start."""
    if is_prepared(output_dir):
        raise UserError(f"--output_dir {output_dir}: is a folder of prepare_tts.py; give another "
                        "one to the trainer")


def file_of(sources, i):
    return next((s["path"] for s in sources if s["first"] <= i < s["stop"]), "")


# ---- Reading: the files of a run -> Samples


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


def open_source(path, reading, problems, held_out=False, folder=None, number=0):
    """Source of a path: itself where it is ChatML; else `folder` gets it as ChatML first.

    problems: a list that takes rows that cannot be used. held_out: whether it is validation data.
    number: of the path among those of a run.
    """
    if source := chatml_source(path):
        unused = ("task_type", "ref_in_system", "reference", "reference_share", "columns")
        changed = [FLAGS.get(name, f"--{name}") for name in unused
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
    if not made.stat().st_size:
        return Source(Path(path), "no rows", made.parent, "row", lambda wanted: ())
    unit, read = json_files.read_entries(made)
    return Source(Path(path), f"as ChatML in {made}", made.parent, unit, read)


def chatml_source(path):
    """Source of a JSON file with ChatML among its first entries; None for anything else."""
    path = Path(path)
    if path.suffix not in (".json", ".jsonl") or not path.is_file():
        return None
    try:
        unit, read = json_files.read_entries(path)
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
        if entry is json_files.SKIPPED or not wanted(number):
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


# ---- Writing


def facts_of(sample):
    """FACTS of a Sample, by the words of its last clip."""
    spoken = next((turn.text for turn in reversed(sample.turns) if turn.text.strip()), "")
    spoken = " ".join(spoken.split()).casefold()
    return (short_hash(sample.speaker, spoken), sum(map(str.isalnum, spoken)),
            short_hash(sample.speaker), short_hash(sample.language))


def short_hash(*parts):
    text = "\0".join(parts).encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


class TableBuilder:
    """Tokenised samples in columns on disk, and the distinct clips in order of first use."""

    def __init__(self, tokenizer, ids, folder=None):
        """folder: an empty one, which write() makes the table; None: a temporary one."""
        self.tokenizer, self.ids, self.lists = tokenizer, ids, token_lists(tokenizer)
        self.control, self.tags = ids.forbidden(tokenizer), ids.known_tags(tokenizer)
        self.known, self.left_out = {}, Counter()
        self.folder = Path(folder or tempfile.mkdtemp())
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        scratch = self.folder / "scratch"
        scratch.mkdir(parents=True)
        self.tokens = Lists(self.folder, "tokens", "token_offsets", np.int32)
        self.labelled = Column(self.folder / "labelled.npy", bool)
        self.names = Lists(self.folder, "names", "name_offsets", np.uint8)
        self.text_targets = Column(self.folder / "text_targets.npy", np.int64)
        self.used = Lists(self.folder, "clips", "clip_offsets", np.int32)
        self.trained = Column(scratch / "trained.npy", bool)
        self.facts = Column(scratch / "facts.npy", FACTS)
        self.clips, self.number_of = [], {}     # number_of: {Clip: its place in clips}

    def __len__(self):
        return len(self.tokens)

    def add(self, samples, problems):
        """Tokenise Samples; those that cannot be used go to the list `problems`."""
        self.append(self.chunk(samples, problems))

    def chunk(self, samples, problems):
        """{name: array, or (array, lengths) of lists} of Samples for append(), which may be that of
        another process's builder.
        """
        good, facts, left_out = [], [], Counter()
        for sample in samples:
            if token := self.control_token(sample):
                problems.append(problem(sample.name, "control_token", "text contains the control "
                                        f"token {token}; remove it"))
                continue
            try:
                found, without = self.ids.streams(sample)
            except BadSample as error:
                problems.append(problem(sample.name, "invalid", str(error)))
                continue
            good += found
            facts += [facts_of(sample)] * len(found)
            left_out.update(without)
            left_out.update(self.read_aloud(sample))
        streams = [stream for _, stream in good]
        pieces, labels = zip(*itertools.chain.from_iterable(streams)) if good else ((), ())
        starts = np.cumsum([0, *map(len, streams)])[:-1]
        parts = self.tokens_of(pieces)
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        spoken = np.array([type(piece) is Clip for piece in pieces], bool)
        labels = np.array(labels, bool)
        tokens = np.fromiter(itertools.chain.from_iterable(parts), np.int32, lengths.sum())

        names = [name.encode("utf-8", "backslashreplace") for name, _ in good]

        def per_sample(values):
            return np.add.reduceat(values, starts, dtype=np.int64) if good else np.empty(0, int)

        return {"tokens": (tokens, per_sample(lengths)), "labelled": np.repeat(labels, lengths),
                "names": (np.frombuffer(b"".join(names), np.uint8), list(map(len, names))),
                "text_targets": per_sample(lengths * (labels & ~spoken)),
                "clips": list(itertools.compress(pieces, spoken)),
                "clip_counts": per_sample(spoken), "trained": labels[spoken],
                "facts": np.array(facts, FACTS), "left_out": left_out}

    def append(self, chunk):
        for clip in chunk["clips"]:
            if self.number_of.setdefault(clip, len(self.clips)) == len(self.clips):
                self.clips.append(clip)
        self.used.append([self.number_of[clip] for clip in chunk["clips"]], chunk["clip_counts"])
        for name in ("tokens", "names"):
            getattr(self, name).append(*chunk[name])
        for name in ("labelled", "text_targets", "trained", "facts"):
            getattr(self, name).append(chunk[name])
        self.left_out.update(chunk["left_out"])

    def tokens_of(self, pieces):
        """[tokens] of pieces of streams: texts, and Clips, each of which is one token."""
        new = {text for text in pieces if type(text) is str and text not in self.known}
        known = {**self.known, **dict(zip(new, self.lists(list(new))))}
        # template pieces repeat in every sample, the samples' own text does not
        self.known.update((text, known[text]) for text in new
                          if text.startswith("<|") and text.endswith(("|>", "\n\n")))
        place = [self.ids.audio_placeholder_id]
        return [known[piece] if type(piece) is str else place for piece in pieces]

    def read_aloud(self, sample):
        """Marks in a sample's texts that this model does not know."""
        asked = [turn.text for turn in sample.turns if turn.role != "system"]
        tags = {tag for text in asked if "<|" in text for tag in LIKE_A_TAG.findall(text)}
        found = [f"hold {tag}, which is not a control tag of this model: it is read aloud"
                 for tag in tags - self.tags]
        return found + ([OTHER_MARKS] if any(map(marks_speakers_otherwise, asked)) else [])

    def control_token(self, sample):
        """The control token that a turn's own text spells, "" if none."""
        return next((token for turn in sample.turns if "<|" in turn.text
                     for token in self.control if token in turn.text), "")

    def clips_of(self, i):
        return self.used[i]

    def name(self, i):
        """Place of sample i in the user's files."""
        return self.names[i].tobytes().decode()

    def used_clips(self):
        """((m,) numbers of the clips of all samples, (n + 1,) offsets of each sample's in it)."""
        return self.used.values.array(), self.used.offsets.array()

    def without_audio(self, bad, sources):
        """Problems of the samples that use clips in bad, {clip number: file and reason}."""
        used, offsets = self.used_clips()
        at = np.flatnonzero(np.isin(used, list(bad)))
        samples, first = np.unique(np.searchsorted(offsets, at, "right") - 1, return_index=True)
        return [problem(self.name(i), "audio", f"its audio {bad[clip]}", file_of(sources, i), i)
                for i, clip in zip(samples.tolist(), used[at[first]].tolist())]

    def shorter_than(self, least, where):
        """{clip: fault} of trained clips with fewer codec frames, which where[:, 2] then
        says have none.
        """
        trained = np.unique(self.used_clips()[0][self.trained.array()])
        short = trained[(where[trained, 2] > 0) & (where[trained, 2] < least)]
        found = {int(clip): f"{self.clips[int(clip)].path}: gives {where[clip, 2]} codec frames; "
                            f"this model needs {least} ({least / FRAME_RATE:g} s) to end a clip"
                 for clip in short}
        where[short, 2] = 0
        return found

    def write(self, cache_folder, shards, where, sources=(), left_out=False):
        """Make the table in `folder`; ends the builder. sources: of read_all. left_out: (n,)
        bool, of samples not used.

        cache_folder: absolute, or relative to `folder`. shards, where: of codes.ensure_codes; where
        is (n_clips, 4) int64, in the order of `clips`. Samples with a clip of 0 frames, which has
        no codes, are not `audible`, nor are those left out.
        """
        (used, offsets), trained = self.used_clips(), self.trained.array()
        frames = where[used, 2]

        def per_sample(values):      # of its clips; it may have none
            return np.diff(np.concatenate([[0], np.cumsum(values)])[offsets])

        tokens = np.diff(self.tokens.offsets.array())
        columns = {
            "where": where, "frames": per_sample(frames),
            "lengths": tokens + per_sample(self.ids.rows(frames, trained) - 1),     # one is there
            "audio_targets": per_sample(np.where(trained, self.ids.targets(frames), 0)),
            "audible": (per_sample(frames == 0) == 0) & ~np.asarray(left_out)}
        for lists in (self.tokens, self.names, self.used):
            lists.values.close()
            lists.offsets.close()
        for column in (self.labelled, self.text_targets):
            column.close()
        codes = {"folder": str(cache_folder), "shards": shards, "sources": list(sources)}
        with error_names_file(self.folder):
            for name, values in columns.items():
                np.save(self.folder / f"{name}.npy", values)
            (self.folder / "codes.json").write_text(json.dumps(codes))
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)     # still mapped: NFS minds


# ---- Mapping


class Table:
    """Memory-mapped sample table; every attribute is a numpy array named as in TableBuilder.write.

    sources: [{path, weight, held_out, first, stop}], whose samples follow each other.
    """

    def __init__(self, folder):
        for path in Path(folder).glob("*.npy"):
            empty = path.stat().st_size <= 128      # a header alone cannot be mapped
            setattr(self, path.stem, np.load(path, mmap_mode=None if empty else "r"))
        codes = json.loads((Path(folder) / "codes.json").read_text())
        place = os.path.normpath(os.path.join(folder, codes["folder"]))
        self.reader, self.sources = CodeReader(place, codes["shards"]), codes["sources"]

    def __len__(self):
        return len(self.lengths)

    def fingerprint(self, numbers):
        """Short hash of tokens, labels, clip lengths and relative numbers of (sorted) samples;
        after " audio " one of the checksums of codes.
        """
        if not len(numbers):
            return ""
        first, stop = numbers[0], numbers[-1] + 1
        tokens = slice(self.token_offsets[first], self.token_offsets[stop])
        where = self.where[self.clips[self.clip_offsets[first]:self.clip_offsets[stop]]]
        frames, checksums = where[:, 2], where[where[:, 2] > 0, 3]
        digest = hashlib.sha256()
        for values in (self.tokens[tokens], self.labelled[tokens], frames, numbers - first):
            digest.update(np.ascontiguousarray(values))
        if (checksums < 0).any():       # a dry run has not all
            return digest.hexdigest()[:16]
        return f"{digest.hexdigest()[:16]} audio {hashlib.sha256(checksums).hexdigest()[:16]}"

    def file(self, i):
        return file_of(self.sources, i)

    def name(self, i):
        """Place of sample i in the user's files."""
        return bytes(self.names[self.name_offsets[i]:self.name_offsets[i + 1]]).decode()


# ---- Which samples are trained, and which validated


def split_validation(n, share, seed):
    """(train, validation) numbers of n samples, drawn by the seed: at least one each when n > 1.

    share: None for SHARE, but of few samples 5 %, up to 16: the best checkpoint hangs on these.
    """
    if share is None:
        share = max(SHARE, min(0.05, 16 / max(1, n)))
    held_out = min(max(1, round(n * share)), n - 1) if share > 0 else 0
    order = np.random.default_rng((seed, 2)).permutation(n)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def split_samples(table, share, seed):
    """(train, validation) sample numbers, sorted; share, seed: of split_validation, where no
    samples came as validation data. A source of weight 2 has each of its numbers twice, one of
    weight 0.3 a share of them, drawn by the seed.
    """
    def numbers(held_out):
        found = np.concatenate([np.arange(0), *(np.arange(s["first"], s["stop"])
                                for s in table.sources if s["held_out"] == held_out)])
        return found[table.audible[found]]

    train, held_out = numbers(False), numbers(True)
    if not len(held_out):
        train, held_out = (train[part] for part in split_validation(len(train), share, seed))
    mixed = [weighted(train[(train >= s["first"]) & (train < s["stop"])], s["weight"], (seed, 3, i))
             for i, s in enumerate(table.sources) if not s["held_out"]]
    return np.sort(np.concatenate(mixed)), held_out


def weighted(numbers, weight, seed):
    """Each number int(weight) times, and once more a share of them for what remains."""
    more = round((weight - int(weight)) * len(numbers))
    drawn = np.random.default_rng(seed).permutation(numbers)[:more]
    return np.concatenate([*[numbers] * int(weight), drawn])


def places(where, clips):
    """(n,) int64 for numbers of clips, equal for clips of the same audio."""
    shard, row = where[clips, 0], where[clips, 1]
    return np.where(shard < 0, -2 - clips.astype(np.int64), shard * 2**40 + row)


def own_references(place, offsets):
    """Numbers of the samples whose clip to speak, the last one, is also a reference there.

    place: of the clips of all samples (places). offsets: (n + 1,) of each sample's first one.
    """
    last = np.repeat(place[np.maximum(offsets[1:], 1) - 1], np.diff(offsets))
    again = np.concatenate([[0], np.cumsum(place == last)])
    return np.flatnonzero(np.diff(again[offsets]) > 1)


def usable_samples(table, train, held_out, *, max_length, max_tokens, drop, say=True,
                   output_dir=None):
    """(training, validation) numbers of the samples to use: short enough, no audio in both.

    max_length: tokens of --max_length or, without it, the model's positions. max_tokens: of
    --max_tokens_per_batch, 0 = no limit. drop: longer samples are left out and, if `say`, counted;
    else they are a UserError. output_dir: where they are listed, None: nowhere.
    """
    def audio(numbers):
        return places(table.where, table.clips[np.maximum(table.clip_offsets[numbers + 1], 1) - 1])

    twice = np.isin(audio(train), audio(held_out))
    if len(train) and twice.all():
        raise UserError("no training samples are left: the audio of each is in the validation data "
                        "too; give other validation data")
    if say and twice.any():
        print(f"data       dropped from training: {counted(twice.sum(), 'sample')} whose audio is "
              "in the validation data")
    train = train[~twice]
    own = own_references(places(table.where, table.clips), table.clip_offsets) if say else []
    if len(own):
        print(f"data       {counted(len(own), 'sample')} with own_reference: the model learns to "
              f"copy a reference that is the clip to speak, as of {printable(table.name(own[0]))}")
    limit, flag = min((value, name) for value, name in (
        (max_length, "--max_length"), (max_tokens or np.inf, "--max_tokens_per_batch")))
    settle((problem(table.name(i), "too_long", f"{table.lengths[i]} tokens "
                    f"({table.frames[i] / FRAME_RATE:.1f} s of audio), more than {flag} {limit}",
                    table.file(i))
            for numbers in (train, held_out)
            for i in np.unique(numbers[table.lengths[numbers] > limit])),
           ("too_long",) if drop else (), output_dir,
           "\nfix: shorten them, raise the limit, or pass --drop_too_long", more=True)
    kept = [numbers[table.lengths[numbers] <= limit] for numbers in (train, held_out)]
    lost = [len(train) - len(kept[0]), len(held_out) - len(kept[1])]
    if say and any(lost):
        print(f"data       dropped as too long: {lost[0]} of {len(train)} training and {lost[1]} "
              f"of {len(held_out)} validation samples")
    if not len(kept[0]):
        raise UserError("no training samples are left that can be used")
    return kept


def data_facts(table, train_ids):
    """{"samples": how many, "hours": of audio in them, references too} for a model card."""
    hours = float(table.frames[train_ids].sum() / FRAME_RATE / 3600)
    return {"samples": len(train_ids), "hours": hours}


def samples_line(table, train_ids, eval_ids):
    """Line that says how many samples a run has and how long they are."""
    lengths, hours = table.lengths[train_ids], data_facts(table, train_ids)["hours"]
    return (f"samples    {len(train_ids)} to train, {len(eval_ids)} to validate; tokens mean "
            f"{lengths.mean():.0f} max {lengths.max()}; {hours:.2f} h of audio")


# ---- Prepared folders: a table, the codes of its audio, and prepared.json, which lists every file
# with its size and checksum and says which tokenizer and codec they fit to


def tokenizer_fingerprint(tokenizer, ids):
    """16 hex digits of a tokenizer's words and of the ids that the trainer uses."""
    text = json.dumps([sorted(tokenizer.get_vocab().items()), asdict(ids)])
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def write_prepared(folder, table, tokenizer, ids, codec_dir, reading, report):
    """Finish a folder whose table is there: prepared.json. report: JSON-able, for people."""
    codes = json.loads((Path(table) / "codes.json").read_text())
    place = os.path.normpath(Path(table) / codes["folder"])
    files = [*sorted(Path(table).iterdir()), *(Path(place) / name for name in codes["shards"])]
    sizes = {str(path.relative_to(folder) if path.is_relative_to(folder) else path):
             path.stat().st_size for path in files}
    sums = {path.relative_to(folder).as_posix(): checkpoint.sha256(path)
            for path in Path(table).iterdir()}      # codes have other checksums
    about = {"table": Path(table).name, "files": sizes, "sha256": sums,
             "tokenizer": tokenizer_fingerprint(tokenizer, ids),
             "codec": codec_fingerprint(codec_dir), "reading": asdict(reading), "report": report}
    checkpoint.write_text(Path(folder) / PREPARED, json.dumps(about, indent=1) + "\n")


def look_into(folder):
    """The contents of prepared.json of a folder that has all its files. Raises UserError."""
    def need(fits, why):
        require(fits, f"{folder}: is damaged, {why}; copy it again, or prepare it again")
    try:
        about = json_files.read_object(Path(folder) / PREPARED)
    except UserError as error:
        need(False, str(error))
    for name, kind in (("table", str), ("tokenizer", str), ("codec", str), ("reading", dict)):
        need(isinstance(about.get(name), kind), f"{PREPARED} has no {name!r}")
    need((Path(folder) / about["table"]).is_dir(), f"{about['table']} is not there")
    need(isinstance(about.get("files"), dict), f"{PREPARED} has no list 'files'")
    for name, size in about["files"].items():
        path = Path(folder) / name
        need(path.is_file(), f"{name} is not there")
        found = path.stat().st_size
        need(found == size, f"{name} has {found} bytes, not {size}")
    for name, digest in about.get("sha256", {}).items():
        need(checkpoint.sha256(Path(folder) / name) == digest,
             f"{name} has another checksum than when it was made")
    return about


def open_prepared(world, sources, tokenizer, ids, codec_dir, output_dir):
    """Table of a prepared folder, on every rank. UserError unless the reading of sources (Sources)
    has the defaults or what the folder was prepared with.
    """
    (path, weight, _), *others = sources.all()
    reading = sources.reading

    def check():
        if others:
            raise UserError(f"{path} and {others[0][0]}: a prepared folder is given alone; prepare "
                            "all data together (--train_data_file A B:0.5 --eval_data_file C)")
        about = look_into(path)
        for what, mine, flag in (
                ("tokenizer", tokenizer_fingerprint(tokenizer, ids), "--model_path"),
                ("codec", codec_fingerprint(codec_dir), "--audio_tokenizer_path")):
            if about.get(what) != mine:
                raise UserError(f"{path}: was prepared with another {what} than that of {flag}; "
                                "prepare it again")
        for name, default in asdict(type(reading)()).items():
            value, was = getattr(reading, name), about["reading"].get(name, default)
            # a default may be any value, but of the texts, as checkpoints keep that
            fits = (was,) if name == "normalize" else (default, was)
            if value not in fits and name not in ("seed", "lone_reference"):
                was, value = ({True: "on", False: "off"}.get(x, x) for x in (was, value))
                flag = FLAGS.get(name, f"--{name}")
                raise UserError(f"{path}: was prepared with {flag} {was}, not {value}; drop the "
                                "flag, or prepare it again")
        (Path(output_dir) / LIST).unlink(missing_ok=True)       # of the run before
        print(f"data       prepared: {path}", flush=True)
        return str(Path(path) / about["table"])

    table = Table(rank0(world, check))
    table.sources = [{**source, "weight": source["weight"] * weight} for source in table.sources]
    return table
