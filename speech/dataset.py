"""The table of tokenised samples on disk: rank 0 writes it, all ranks and loader workers map it.

    table = Table(build(world, tokenizer, ids, sources, encode, output_dir, problems, finish))
    train, held_out = usable_samples(table, *split_samples(table, None, seed), ...)

Each sample is tokenised once, and each distinct clip is stored once. A clip is one placeholder
token here; data.py replaces it by the clip's rows.
"""
import atexit
import contextlib
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
from typing import NamedTuple

import numpy as np

from core import checkpoint, json_files
from core.cli import UserError, counted, printable, require
from core.dist import error_names_file, rank0
from core.packing import Column, Lists, parallel_map_ordered, token_lists
from core.problems import LIST, problem, settle
from speech import choices
from speech.codes import FRAME_RATE, CodeReader, Encoding, codec_fingerprint
from speech.conversations import (OTHER_MARKS, SHORTENED, BadSample, Clip, Paths, Reading, Sample,
                                  canonical_sample, is_chatml, label_of, marks_speakers_otherwise,
                                  sample_text)

CHUNK = 2048    # entries of a file that are tokenised together
LOOK = 20       # entries that are read to detect the format
FLAGS = {"ref_in_system": "--ref_audio_in_system_message", "normalize": "--normalize_text"}
NOTES = {       # checks whose samples are still used
    "no_second_clip": "their speakers have no other clip for reference; trained without one",
    "unused_reference": "their task type uses no reference clips; --task_type "
                        "zero_shot_voice_cloning trains with them",
    "no_reference_text": "what their reference clips say is not known (ref_text); trained without "
                         "them"}
SHARE = 0.005           # default of --validation_split
PREPARED = "prepared.json"      # marks a folder of prepare_tts.py, written last
# per sample: hash of speaker and text; letters and digits of the text, 0: no words; language
FACTS = np.dtype([("words", np.uint64), ("letters", np.int32), ("language", np.uint64)])


def file_of(sources, i):
    return next((s["path"] for s in sources if s["first"] <= i < s["stop"]), "")


# ---- Reading: the files of a run -> Samples


@dataclass(frozen=True)
class Sources:
    """The user's files and folders of a run, and settings that turn them into samples."""
    train: list                     # [(path, weight)]
    held_out: str | None = None     # path of the validation data
    reading: Reading = Reading()
    processes: int = 0              # extra processes for sources of many samples
    drop: tuple = ()                # checks (choices.CHECKS) whose samples are dropped

    def all(self):
        """[(path, weight, True for validation data)]."""
        train = [(path, weight, False) for path, weight in self.train]
        return [*train, (self.held_out, 1.0, True)] if self.held_out else train


def of_flags(args, ids, codec_dir):
    """(Sources, codes.Encoding) of the flags of the trainer or of prepare_tts.py."""
    reading = Reading(args.task_type, args.ref_audio_in_system_message, args.columns,
                      args.reference, args.reference_share, args.seed,
                      args.normalize_text == "on", ids.lone_reference)
    cache = args.code_cache or Path(args.output_dir) / "codes"
    return (Sources(*choices.sources(args), reading, args.preprocess_num_proc, args.drop_bad),
            Encoding(codec_dir, cache, ids.num_codebooks, args.preprocess_num_proc,
                     args.wait_timeout))


class Source(NamedTuple):
    """A ChatML file. read(wanted) yields (number from 0, entry or SKIPPED)."""
    path: Path
    about: str          # where it comes from, for messages
    unit: str           # "line" or "sample", for messages
    read: object


def open_source(path, reading, problems, held_out=False, folder=None, number=0):
    """Source of a path, the number-th of the run. Other formats than ChatML are converted first,
    into a file in `folder`. problems: list to which unusable rows are added."""
    if Path(path).suffix in choices.CHATML and Path(path).is_file():
        with contextlib.suppress(UserError):
            given = Source(Path(path), "JSON samples", *json_files.read_entries(path))
            first = [entry for _, entry in itertools.islice(given.read(lambda number: True), LOOK)]
            talks = [e for e in first if isinstance(e, dict) and type(e.get("messages")) is list]
            if talks and all(map(is_chatml, talks)):
                changed = [FLAGS.get(name, f"--{name}") for name in (
                    "task_type", "ref_in_system", "reference", "reference_share", "columns")
                    if getattr(reading, name) != getattr(Reading(), name)]
                if changed:
                    print(f"notice     {printable(path)}: ChatML has its prompts, in which "
                          f"{', '.join(changed)} changes nothing", flush=True)
                return given
    from speech import convert
    if folder is None:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Path(folder) / f"{'eval' if held_out else 'train'}-{number}.jsonl"
    convert.to_chatml(path, made, problems, held_out=held_out, **vars(reading))
    if not made.stat().st_size:
        return Source(made, "no rows", "row", lambda wanted: ())
    return Source(made, f"as ChatML in {made}", *json_files.read_entries(made))


def entries_of(source, reading, wanted, make=canonical_sample):
    """Yield (number, Sample or Problem, None if it is left out) for each entry."""
    paths = Paths(source.path.parent.resolve())
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
            # off: the setting with which a take was spoken
            sample = make(name, entry, paths, reading.normalize and setting != "off")
        except BadSample as error:
            yield number, problem(name, error.check, error, source.path)
        else:
            sample.notes.extend(map(tuple, misc.get("notes", ())))
            yield number, sample


def read_samples(path, problems, make=canonical_sample, **reading):
    """Yield the Samples of data of any format; unusable rows are added to the list `problems`.
    make: function from ChatML to Sample. reading: fields of Reading."""
    reading = Reading(**reading)
    for _, found in entries_of(open_source(path, reading, problems), reading, lambda n: True, make):
        if isinstance(found, Sample):
            yield found
        elif found is not None:
            problems.append(found)


def read_all(builder, sources, problems, noted=None, folder=None):
    """Read and tokenise Sources into a TableBuilder. UserError if a source is empty.

    problems: Problems that collects unusable samples, for the caller to settle; noted: a list, of
    warnings about usable ones. folder: for data converted to ChatML."""
    for number, (path, weight, held_out) in enumerate(sources.all()):
        first, lost = len(builder), []
        source = open_source(path, sources.reading, lost, held_out, folder, number)
        notes, refused, shown = Counter(), Counter(p.check for p in lost), []
        problems.add(lost)

        def chunks(start, step, source=source, path=path):
            """Every step-th chunk; the lines of other processes' chunks are skipped."""
            def wanted(entry):
                return entry // CHUNK >= start and (entry // CHUNK - start) % step == 0
            entries, due = entries_of(source, sources.reading, wanted), start
            for chunk, group in itertools.groupby(entries, lambda entry: entry[0] // CHUNK):
                if not wanted(chunk * CHUNK):
                    continue
                for _ in range(due, chunk, step):       # of blank lines alone: the order counts
                    yield builder.chunk([], []), [], [], ""
                due = chunk + step
                kept, wrong, odd = [], [], []
                for _, one in group:
                    notes = one.notes if isinstance(one, Sample) else ()
                    if unwanted := next((n for n in notes if n[0] in sources.drop), None):
                        one = problem(one.name, *unwanted)
                    if isinstance(one, Sample):
                        kept.append(one)
                        odd += [problem(one.name, *note, path) for note in notes]
                    elif one is not None:
                        wrong.append(one)
                text = sample_text(kept[0]) if kept and start == 0 else ""
                made = builder.chunk(kept, wrong)
                made["left_out"].update(
                    SHORTENED for one in kept if any(turn.shortened for turn in one.turns))
                yield made, wrong, odd, text

        def take(part, path=path, notes=notes, refused=refused, shown=shown):
            chunk, wrong, odd, text = part
            builder.append(chunk)
            for p in wrong:
                p.file = str(path)
            refused.update(p.check for p in wrong)
            problems.add(wrong)
            notes.update(p.check for p in odd)
            if noted is not None:
                noted.extend(odd)
            shown += [text] * bool(text)

        parallel_map_ordered(chunks, sources.processes, take)
        kept, lost = len(builder) - first, sum(refused.values())
        counts = ", ".join(f"{n} {check}" for check, n in sorted(refused.items()))
        print(f"source     {printable(path)}: chatml ({source.about}); "
              f"{counted(kept + lost, 'row')} = {kept} kept + {lost} refused"
              f"{f' ({counts})' if counts else ''}", flush=True)
        for text in shown[:1]:
            print(f"           first: {printable(text)}", flush=True)
        for check, n in sorted(notes.items()):
            print(f"           {counted(n, 'sample')} with {check}: {NOTES[check]}", flush=True)
        if not kept and not problems.stopping:
            problems.settle()
            raise UserError(f"{path}: holds no samples" + " that can be used" * bool(refused))
        builder.sources.append({"path": str(path), "weight": weight, "held_out": held_out,
                                "first": first, "stop": len(builder)})
    for what, n in sorted(builder.left_out.items()):
        print(f"data       {n} samples {what}", flush=True)


# ---- Writing


def facts_of(sample):
    """FACTS of a Sample, from the text of its last clip."""
    def short_hash(text):
        data = text.encode("utf-8", "backslashreplace")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
    spoken = next((turn.text for turn in reversed(sample.turns) if turn.text.strip()), "")
    spoken = " ".join(spoken.split()).casefold()
    return (short_hash(f"{sample.speaker}\0{spoken}"), sum(map(str.isalnum, spoken)),
            short_hash(sample.language))


class TableBuilder:
    """Tokenised samples in columns on disk, and the distinct clips in order of first use."""

    def __init__(self, tokenizer, ids, folder=None):
        """folder: empty folder in which write() makes the table; None: a temporary one."""
        self.tokenizer, self.ids, self.lists = tokenizer, ids, token_lists(tokenizer)
        self.control, self.tags = ids.forbidden_tokens(tokenizer), ids.known_tags(tokenizer)
        self.known, self.left_out, self.sources = {}, Counter(), []     # of read_all
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
        """Tokenise Samples; unusable ones are added to the list `problems`."""
        self.append(self.chunk(samples, problems))

    def chunk(self, samples, problems):
        """{name: array, or (array, lengths) of lists} of Samples for append(), possibly of another
        process's builder."""
        good, facts, left_out = [], [], Counter()
        for sample in samples:
            marked = [turn for turn in sample.turns if "<|" in turn.text]
            try:
                for token in (t for turn in marked for t in self.control if t in turn.text):
                    raise BadSample(f"text contains the control token {token}",
                                    "control_token")
                found, without = self.ids.streams(sample)
            except BadSample as error:
                problems.append(problem(sample.name, error.check, str(error)))
                continue
            good += found
            facts += [facts_of(sample)] * len(found)
            # tags in a text to speak that this model does not know
            tags = {tag for turn in marked if turn.role != "system"
                    for tag in re.findall(r"<\|[^<>|]*\|>", turn.text)} - self.tags
            left_out.update(without)
            left_out.update(f"hold {tag}, which is not a control tag of this model: it is read "
                            "aloud" for tag in tags)
            left_out.update([OTHER_MARKS] * any(marks_speakers_otherwise(turn.text)
                                                for turn in sample.turns if turn.role != "system"))
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
        """[tokens] of the pieces of streams: a text gives its tokens, a Clip one token."""
        new = {text for text in pieces if type(text) is str and text not in self.known}
        known = {**self.known, **dict(zip(new, self.lists(list(new))))}
        # template pieces repeat in every sample, user texts do not
        self.known.update((text, known[text]) for text in new
                          if text.startswith("<|") and text.endswith(("|>", "\n\n")))
        place = [self.ids.audio_placeholder_id]
        return [known[piece] if type(piece) is str else place for piece in pieces]

    def clips_of(self, i):
        return self.used[i]

    def name(self, i):
        """Place of sample i in the user's files."""
        return self.names[i].tobytes().decode()

    def used_clips(self):
        """((m,) clip numbers of all samples, (n + 1,) offsets of each sample in that array)."""
        return self.used.values.array(), self.used.offsets.array()

    def write(self, cache_folder, shards, where, left_out=False):
        """Write the table to `folder`; ends the builder. left_out: (n,) bool, unused samples.

        cache_folder: absolute, or relative to `folder`. shards, where: from codes.ensure_codes;
        where is (n_clips, 4) int64, in the order of `clips`. Samples that are left out, or have a
        clip of 0 frames (without codes), are not `audible`."""
        (used, offsets), trained = self.used_clips(), self.trained.array()
        frames = where[used, 2]

        def per_sample(values):      # sums over a sample's clips, if any
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
        self.labelled.close()
        self.text_targets.close()
        codes = {"folder": str(cache_folder), "shards": shards, "sources": self.sources}
        with error_names_file(self.folder):
            for name, values in columns.items():
                np.save(self.folder / f"{name}.npy", values)
            (self.folder / "codes.json").write_text(json.dumps(codes))
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)     # still mapped: NFS minds


def build(world, tokenizer, ids, sources, encode, output_dir, problems, finish, noted=None,
          check=lambda: None):
    """A new table of Sources, on every rank: read, encode, finish. Then earlier tables are deleted;
    a running job keeps its mapped files.

    encode(clips): from codes.py. problems, noted: as in read_all. check(): called before audio is
    encoded. finish(builder, cache folder, shards, where, measures, audio problems) writes the table
    on rank 0; every rank gets its result."""
    name, builder = f"table-{uuid.uuid4().hex[:8]}", None

    def read():
        nonlocal builder
        builder = TableBuilder(tokenizer, ids, Path(output_dir) / name)
        read_all(builder, sources, problems, noted, Path(output_dir) / "data")
        check()
        n_train = sum(s["stop"] - s["first"] for s in builder.sources if not s["held_out"])
        print(f"data       {n_train} training samples, {len(builder) - n_train or 'no'} separate "
              f"validation samples, {len(builder.clips)} distinct clips", flush=True)

    def write():
        cache, shards, where, measures, bad = codes     # bad: {number of a clip: why}
        used, offsets = builder.used_clips()
        trained = np.unique(used[builder.trained.array()])
        for clip in trained[(where[trained, 2] > 0) & (where[trained, 2] < ids.min_frames)]:
            bad[int(clip)] = (
                f"{builder.clips[clip].path}: gives {where[clip, 2]} codec frames; this model "
                f"needs {ids.min_frames} ({ids.min_frames / FRAME_RATE:g} s) to end a clip")
            where[clip, 2] = 0
        at = np.flatnonzero(np.isin(used, list(bad)))
        samples, first = np.unique(np.searchsorted(offsets, at, "right") - 1, return_index=True)
        lost = [problem(builder.name(i), "audio", f"its audio {bad[clip]}",
                        file_of(builder.sources, i), i)
                for i, clip in zip(samples.tolist(), used[at[first]].tolist())]
        found = finish(builder, cache, shards, where, measures, lost)
        checkpoint.remove_named(output_dir, rf"(?!{name})table-[0-9a-f]{{8}}")
        return found

    try:
        rank0(world, read)
        codes = encode(builder.clips if builder else [])
        return rank0(world, write)
    except BaseException:
        if world.is_main:
            shutil.rmtree(Path(output_dir) / name, ignore_errors=True)
        raise


# ---- Mapping


class Table:
    """Memory-mapped sample table: numpy arrays named as in TableBuilder.write, and sources,
    [{path, weight, held_out, first, stop}], whose samples follow each other."""

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
        """Short hash of tokens, labels, clip lengths and relative numbers of (sorted) samples,
        then " audio " and a hash of the codes' checksums."""
        if not len(numbers):
            return ""
        first, stop = numbers[0], numbers[-1] + 1
        tokens = slice(self.token_offsets[first], self.token_offsets[stop])
        where = self.where[self.clips[self.clip_offsets[first]:self.clip_offsets[stop]]]
        frames, checksums = where[:, 2], where[where[:, 2] > 0, 3]
        digest = hashlib.sha256()
        for values in (self.tokens[tokens], self.labelled[tokens], frames, numbers - first):
            digest.update(np.ascontiguousarray(values))
        if (checksums < 0).any():       # incomplete in a dry run
            return digest.hexdigest()[:16]
        return f"{digest.hexdigest()[:16]} audio {hashlib.sha256(checksums).hexdigest()[:16]}"

    def name(self, i):
        """Place of sample i in the user's files."""
        return bytes(self.names[self.name_offsets[i]:self.name_offsets[i + 1]]).decode()


# ---- Split into training and validation samples


def split_validation(n, share, seed):
    """(train, validation) numbers of n samples, drawn by the seed: at least one each when n > 1.

    share: None: SHARE, or 5 % of a small data set, up to 16: they decide the best checkpoint."""
    if share is None:
        share = max(SHARE, min(0.05, 16 / max(1, n)))
    held_out = min(max(1, round(n * share)), n - 1) if share > 0 else 0
    order = np.random.default_rng((seed, 2)).permutation(n)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def split_samples(table, share, seed):
    """(train, validation) sample numbers, sorted. share, seed: as in split_validation, which is
    used if there is no validation data. Weight 2 repeats each number of a source; weight 0.3
    draws that share of them by the seed."""
    def numbers(held_out):
        found = np.concatenate([np.arange(0), *(np.arange(s["first"], s["stop"])
                                for s in table.sources if s["held_out"] == held_out)])
        return found[table.audible[found]]

    train, held_out = numbers(False), numbers(True)
    if not len(held_out):
        train, held_out = (train[part] for part in split_validation(len(train), share, seed))
    mixed = []
    for i, source in enumerate(table.sources):
        if not source["held_out"]:
            mine = train[(train >= source["first"]) & (train < source["stop"])]
            whole, part = divmod(source["weight"], 1)
            drawn = np.random.default_rng((seed, 3, i)).permutation(mine)[:round(part * len(mine))]
            mixed += [*[mine] * int(whole), drawn]
    return np.sort(np.concatenate(mixed)), held_out


def places(where, clips):
    """(n,) int64 for clip numbers, equal for clips of the same audio."""
    shard, row = where[clips, 0], where[clips, 1]
    return np.where(shard < 0, -2 - clips.astype(np.int64), shard * 2**40 + row)


def own_references(place, offsets):
    """Numbers of the samples whose clip to speak (the last one) is also their reference. place:
    places() of the clips of all samples. offsets: (n + 1,) index of each sample's first."""
    last = np.repeat(place[np.maximum(offsets[1:], 1) - 1], np.diff(offsets))
    again = np.concatenate([[0], np.cumsum(place == last)])
    return np.flatnonzero(np.diff(again[offsets]) > 1)


def usable_samples(table, train, held_out, *, max_length, max_tokens, drop, say=True,
                   output_dir=None):
    """(training, validation) numbers of usable samples: short enough, and no audio in both parts.

    max_length: --max_length, or by default the model's positions. max_tokens:
    --max_tokens_per_batch, 0 = no limit. drop: leave longer samples out, and count them if `say`;
    otherwise raise UserError. output_dir: where to list them; None: nowhere."""
    def audio(numbers):
        return places(table.where, table.clips[np.maximum(table.clip_offsets[numbers + 1], 1) - 1])

    twice = np.isin(audio(train), audio(held_out))
    if len(train) and twice.all():
        raise UserError("no training samples are left: all audio is in the validation data too")
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
                    file_of(table.sources, i))
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
    """{"samples": their number, "hours": of audio, with references} for a model card."""
    hours = float(table.frames[train_ids].sum() / FRAME_RATE / 3600)
    return {"samples": len(train_ids), "hours": hours}


def samples_line(table, train_ids, eval_ids):
    """Log line with the number of samples and their lengths."""
    lengths, hours = table.lengths[train_ids], data_facts(table, train_ids)["hours"]
    return (f"samples    {len(train_ids)} to train, {len(eval_ids)} to validate; tokens mean "
            f"{lengths.mean():.0f} max {lengths.max()}; {hours:.2f} h of audio")


# ---- Prepared folders: a table, the codes of its audio, and prepared.json, which has the size and
# checksum of every file and the fingerprints of the tokenizer and codec


def is_prepared(path):
    """True if a path is a folder of prepare_tts.py."""
    return os.path.isfile(os.path.join(path, PREPARED))


def tokenizer_fingerprint(tokenizer, ids):
    """16 hex digits: hash of a tokenizer's vocabulary and of the ids that the trainer uses."""
    text = json.dumps([sorted(tokenizer.get_vocab().items()), asdict(ids)])
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def write_prepared(folder, table, tokenizer, ids, codec_dir, reading, report):
    """Write prepared.json, which completes a folder with a table. report: JSON-able, for users."""
    folder, table = Path(folder), Path(table)
    codes = json.loads((table / "codes.json").read_text())
    place, parts = Path(os.path.normpath(table / codes["folder"])), sorted(table.iterdir())
    sizes = {str(path.relative_to(folder) if path.is_relative_to(folder) else path):
             path.stat().st_size for path in (*parts, *(place / name for name in codes["shards"]))}
    about = {"table": table.name, "files": sizes,
             "sha256": {path.relative_to(folder).as_posix(): checkpoint.sha256(path)
                        for path in parts},     # codes have separate checksums
             "tokenizer": tokenizer_fingerprint(tokenizer, ids),
             "codec": codec_fingerprint(codec_dir), "reading": asdict(reading), "report": report}
    checkpoint.write_text(folder / PREPARED, json.dumps(about, indent=1) + "\n")


def open_prepared(world, sources, tokenizer, ids, codec_dir, output_dir):
    """Table of a prepared folder, on every rank. UserError unless it is complete and the flags in
    sources (Sources) are defaults or equal those of the preparation."""
    (path, weight, _), *others = sources.all()
    reading = sources.reading

    def need(fits, why):
        require(fits, f"{path}: is damaged, {why}; copy it again, or prepare it again")

    def check():
        if others:
            raise UserError(f"{path} and {others[0][0]}: a prepared folder is given alone; prepare "
                            "all data together (--train_data_file A B:0.5 --eval_data_file C)")
        about = json_files.read_object(Path(path) / PREPARED)
        for name in ("table", "files", "sha256", "tokenizer", "codec", "reading"):
            need(name in about, f"{PREPARED} has no {name!r}")
        for name, size in {about["table"]: None, **about["files"]}.items():
            file = Path(path) / name
            need(file.exists(), f"{name} is not there")
            found = file.stat().st_size
            need(size in (None, found), f"{name} has {found} bytes, not {size}")
        for name, digest in about["sha256"].items():
            need(checkpoint.sha256(Path(path) / name) == digest, f"{name} has another checksum")
        for what, mine, flag in (
                ("tokenizer", tokenizer_fingerprint(tokenizer, ids), "--model_path"),
                ("codec", codec_fingerprint(codec_dir), "--audio_tokenizer_path")):
            require(about[what] == mine, f"{path}: was prepared with another {what} than that of "
                    f"{flag}; prepare it again")
        for name, default in asdict(Reading()).items():
            value, was = getattr(reading, name), about["reading"].get(name, default)
            # defaults match any value, except for the text setting, which checkpoints keep
            fits = (was,) if name == "normalize" else (default, was)
            if value not in fits and name not in ("seed", "lone_reference"):
                was, value = ({True: "on", False: "off"}.get(x, x) for x in (was, value))
                raise UserError(f"{path}: was prepared with {FLAGS.get(name, f'--{name}')} {was}, "
                                f"not {value}; drop the flag, or prepare it again")
        (Path(output_dir) / LIST).unlink(missing_ok=True)       # of the previous run
        print(f"data       prepared: {path}", flush=True)
        return str(Path(path) / about["table"])

    table = Table(rank0(world, check))
    table.sources = [{**source, "weight": source["weight"] * weight} for source in table.sources]
    return table
