"""Tokenised samples on disk: all ranks and loader workers map one table, so memory does not grow with their number.

Rank 0 reads the user's files, tokenises every sample once and writes flat arrays. It also says which samples are held
out and which are short enough to be used.
"""
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import tempfile
import weakref
from collections import Counter
from pathlib import Path

import numpy as np

from common.checkpoint import naming
from common.distributed import UserError
from common.indexing import Column, Lists, parallel_map_ordered, token_lists
from common.problems import Problems, problem, settle
from common.text import NAME, counted, printable
from speech.data.code_cache import FRAME_RATE, CodeReader
from speech.data.conversations import OTHER_MARKS, BadSample, Clip, marks_speakers_otherwise
from speech.data.rows import NOTES, open_source, read_chunks
from speech.data.text_normalization import RECOGNISED

LIKE_A_TAG = re.compile(r"<\|[^<>|]*\|>")
CHUNK = 2048            # entries of a file that are tokenised together
# a sample's speaker and text, and the letters and digits of that text: 0 are no words
FACTS = np.dtype([("said", np.uint64), ("letters", np.int32), ("speaker", np.uint64), ("language", np.uint64)])
SHARE = 0.005           # of the samples, for validation, where --validation_split says nothing
PREPARED = "prepared.json"      # of a folder of prepare_tts.py: written last, without it the folder is not finished
ROWS = 2**18            # samples whose columns are in memory together


def is_prepared(path):
    """Whether a path is a folder of prepare_tts.py."""
    return os.path.isfile(os.path.join(path, PREPARED))


def keep_prepared(output_dir):
    """Raise UserError where a run would take the table of a prepared folder for its own, of an earlier start."""
    if is_prepared(output_dir):
        raise UserError(f"--output_dir {output_dir}: is a folder of prepare_tts.py; give another one to the trainer")


class Clips:
    """Sequence of the distinct clips of a TableBuilder in order of first use; a Clip is made when it is asked for.

    The builder has an entry for each distinct clip of each chunk, so a clip that three chunks use has three entries.
    numbers: (entries,) int32, for each entry the number of its clip in this sequence.
    """

    def __init__(self, paths, cuts, digests):
        self.paths, self.ends, self.cuts = paths.values.array(), paths.offsets.array(), cuts.array()
        digests = digests.array()
        order, new = np.lexsort((digests[:, 1], digests[:, 0])), np.ones(len(digests), bool)
        high, low = digests[:, 0][order], digests[:, 1][order]      # equal ones stand side by side, the earliest first
        new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        first = np.empty(len(order), np.int32)
        first[order] = order[new][np.cumsum(new) - 1]
        del order, new, high, low
        own = first == np.arange(len(first), dtype=np.int32)
        self.entries = np.flatnonzero(own).astype(np.int32)
        self.numbers = (np.cumsum(own, dtype=np.int32) - 1)[first]

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, i):
        """Clip i, or the list of Clips of a slice."""
        if not isinstance(i, slice):
            i = range(len(self))[i]
            return self[i:i + 1][0]
        entries = self.entries[i]
        cuts, starts, stops = (values.tolist() for values in (
            self.cuts[entries], self.ends[entries], self.ends[entries + 1]))
        return [Clip(os.fsdecode(self.paths[start:stop].tobytes()), *_unpacked(*cut))
                for start, stop, cut in zip(starts, stops, cuts)]


def _packed(clip):
    """Clip -> (offset, duration, seconds, bits: which of the first two are whole, filled) as floats; None is NaN."""
    offset, duration = (math.nan if value is None else float(value) for value in (clip.offset, clip.duration))
    bits = isinstance(clip.offset, int) + 2 * isinstance(clip.duration, int) + 4 * clip.filled
    return offset, duration, clip.seconds, bits


def _unpacked(offset, duration, seconds, bits):
    """(offset, duration, seconds, filled) of a Clip; the keys of speech/data/code_cache.py tell 3 from 3.0."""
    def number(value, whole):
        if math.isnan(value):
            return None
        return int(value) if whole else value
    bits = int(bits)
    return number(offset, bits & 1), number(duration, bits & 2), seconds, bool(bits & 4)


def _clip_digest(path, cut):
    """128 bits of a clip's path and cut: the same for clips that are equal."""
    text = "" if math.isnan(cut[0]) else f"\0{cut[0]}+{cut[1]}"
    if int(cut[3]) >= 4:
        text += "\0filled"
    return hashlib.blake2b(path + text.encode(), digest_size=16).digest()


class TableBuilder:
    """Tokenised samples in columns on disk; clips holds each distinct clip once, in order of first use.

    folder: an empty one, which write() makes the table; None: a temporary one. facts: keep FACTS of the samples too.
    """

    def __init__(self, tokenizer, ids, folder=None, facts=False):
        self.tokenizer, self.ids, self.lists = tokenizer, ids, token_lists(tokenizer)
        self.control, self.tags = ids.forbidden(tokenizer), ids.known_tags(tokenizer)
        self._known, self._spelled = {}, {}
        self._clips, self.left_out = None, Counter()
        self.folder = Path(folder or tempfile.mkdtemp())
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        (self.folder / "clips").mkdir(parents=True)
        self.tokens = Lists(self.folder, "tokens", "token_offsets", np.int32)
        self.labelled = Column(self.folder / "labelled.npy", bool)
        self.names = Lists(self.folder, "names", "name_offsets", np.uint8)
        self.text_targets = Column(self.folder / "text_targets.npy", np.int64)
        # one entry for each distinct clip of a chunk; which of them are the same clip is found when all are known
        self.entries = Lists(self.folder / "clips", "entries", "offsets", np.int32)     # of the samples' clips
        self.trained = Column(self.folder / "clips" / "trained.npy", bool)
        self.paths = Lists(self.folder / "clips", "paths", "path_offsets", np.uint8)
        self.cuts = Column(self.folder / "clips" / "cuts.npy", np.float64, 4)
        self.digests = Column(self.folder / "clips" / "digests.npy", np.uint64, 2)
        self.facts = Column(self.folder / "clips" / "facts.npy", FACTS) if facts else None
        self.said = Lists(self.folder / "clips", "said", "said_offsets", np.uint8) if facts else None

    def __len__(self):
        return len(self.tokens)

    def add(self, samples, problems):
        """Tokenise a list of Samples; one whose text spells a control token goes to the list `problems`."""
        self.append(self.chunk(samples, problems))

    def chunk(self, samples, problems):
        """{name: array} of Samples, for `append`, which may be that of another process's builder."""
        good, facts = [], []
        said, left_out = [], Counter()
        for sample in samples:
            if token := self._control_token(sample):
                problems.append(problem(sample.name, "control_token", f"text contains the control token {token}; "
                                                                                      "remove it"))
                continue
            try:
                found, without = self.ids.streams(sample)
            except BadSample as error:
                problems.append(problem(sample.name, "invalid", str(error)))
                continue
            good += found
            asked = [turn.text for turn in sample.turns if turn.role != "system"]
            left_out.update(f"hold {tag}, which is not a control tag of this model: it is read aloud" for tag in {
                tag for text in asked if "<|" in text for tag in LIKE_A_TAG.findall(text) if tag not in self.tags})
            left_out.update([OTHER_MARKS] if any(map(marks_speakers_otherwise, asked)) else [])
            if self.facts is not None:
                facts += [facts_of(sample)] * len(found)
                said += [said_text(sample).encode("utf-8", "backslashreplace")] * len(found)
            left_out.update(without)
        streams = [stream for _, stream in good]
        pieces, labels = zip(*itertools.chain.from_iterable(streams)) if good else ((), ())
        starts = np.cumsum([0, *map(len, streams)])[:-1]
        new = list({text for text in pieces if type(text) is str and text not in self._known})
        known = {**self._known, **dict(zip(new, self.lists(new)))}
        for text in new:        # template pieces repeat in every sample, the samples' own text does not
            if text.startswith("<|") and text.endswith(("|>", "\n\n")):
                self._known[text] = known[text]
        place = [self.ids.audio_placeholder_id]
        parts = [known[piece] if type(piece) is str else place for piece in pieces]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        spoken = np.array([type(piece) is Clip for piece in pieces], bool)
        labels = np.array(labels, bool)
        clips = {}
        entries = [clips.setdefault(clip, len(clips)) for clip in itertools.compress(pieces, spoken)]
        paths, cuts = [os.fsencode(clip.path) for clip in clips], [_packed(clip) for clip in clips]
        digests, names = b"".join(map(_clip_digest, paths, cuts)), [name.encode("utf-8", "backslashreplace")
                                                                    for name, _ in good]

        def per_sample(values):
            return np.add.reduceat(values, starts, dtype=np.int64) if good else np.empty(0, np.int64)

        return {"facts": np.array(facts, FACTS), "said": _bytes(said), "said_counts": _sizes(said),
                "tokens": np.fromiter(itertools.chain.from_iterable(parts), np.int32, lengths.sum()),
                "token_counts": per_sample(lengths), "labelled": np.repeat(labels, lengths),
                "text_targets": per_sample(lengths * (labels & ~spoken)),
                "entries": np.array(entries, np.int32), "entry_counts": per_sample(spoken), "trained": labels[spoken],
                "names": _bytes(names), "name_counts": _sizes(names), "paths": _bytes(paths),
                "path_counts": _sizes(paths), "cuts": np.array(cuts).reshape(-1, 4),
                "digests": np.frombuffer(digests, np.uint64).reshape(-1, 2), "left_out": left_out}

    def append(self, chunk):
        """Add a chunk to the columns."""
        self.tokens.append(chunk["tokens"], chunk["token_counts"])
        self.labelled.append(chunk["labelled"])
        self.names.append(chunk["names"], chunk["name_counts"])
        self.text_targets.append(chunk["text_targets"])
        self.entries.append(chunk["entries"] + len(self.paths), chunk["entry_counts"])
        self.trained.append(chunk["trained"])
        self.paths.append(chunk["paths"], chunk["path_counts"])
        self.cuts.append(chunk["cuts"])
        self.digests.append(chunk["digests"])
        self.left_out.update(chunk["left_out"])
        if self.facts is not None:
            self.facts.append(chunk["facts"])
            self.said.append(chunk["said"], chunk["said_counts"])
        self._clips = None

    def _control_token(self, sample):
        """The control token that a turn's own text spells, "" if none."""
        for turn in sample.turns:
            text = turn.text
            if "<|" in text:
                if text not in self._spelled:
                    if len(self._spelled) >= 1000:
                        self._spelled.clear()
                    found = [self.control[token] for token in self.lists([text])[0] if token in self.control]
                    self._spelled[text] = found[0] if found else ""
                if self._spelled[text]:
                    return self._spelled[text]
        return ""

    @property
    def clips(self):
        """Clips of all samples."""
        if self._clips is None:
            self._clips = Clips(self.paths, self.cuts, self.digests)
        return self._clips

    def clips_of(self, i):
        """Numbers of sample i's clips."""
        return self.clips.numbers[self.entries[i]]

    def without_audio(self, bad, sources):
        """Problems of the samples that use clips in bad, {clip number: file and reason}. sources: of read_all."""
        used, offsets = self.clips.numbers[self.entries.values.array()], self.entries.offsets.array()
        at = np.flatnonzero(np.isin(used, list(bad)))
        samples, first = np.unique(np.searchsorted(offsets, at, "right") - 1, return_index=True)
        return [problem(self.names[i].tobytes().decode(), "audio", f"its audio {bad[clip]}", file_of(sources, i), i)
                for i, clip in zip(samples.tolist(), used[at[first]].tolist())]

    def shorter_than(self, least, where):
        """{clip: what is wrong} of trained clips with fewer codec frames, which where[:, 2] then says have none."""
        if least <= 1:
            return {}
        trained = np.unique(self.clips.numbers[self.entries.values.array()[self.trained.array()]])
        short = trained[(where[trained, 2] > 0) & (where[trained, 2] < least)]
        found = {int(clip): f"{self.clips[int(clip)].path}: gives {where[clip, 2]} codec frames; this model needs "
                            f"{least} ({least / FRAME_RATE:g} s) to end a clip" for clip in short}
        where[short, 2] = 0
        return found

    def write(self, folder, cache_folder, shards, where, sources=(), left_out=None):
        """Make the table in `folder`; ends the builder. sources: of read_all. left_out: (n,) bool, of samples not used.

        cache_folder: absolute, or relative to `folder`. shards, where: of speech.data.encode.ensure_codes; where is
        (n_clips, 4) int64, in the order of `clips`. Samples with a clip of 0 frames, which has no codes, are not
        `audible`, nor are those left out.
        """
        folder, numbers = Path(folder), self.clips.numbers
        folder.mkdir(parents=True, exist_ok=True)
        entries, trained, offsets = self.entries.values.array(), self.trained.array(), self.entries.offsets.array()
        columns = {name: Column(self.folder / f"{name}.npy", kind) for name, kind in (
            ("clips", np.int32), ("lengths", np.int64), ("frames", np.int64), ("audio_targets", np.int64),
            ("audible", bool))}
        for start in range(0, len(self), ROWS):
            stop = min(start + ROWS, len(self))
            bounds = offsets[start:stop + 1]
            part = slice(bounds[0], bounds[-1])
            clips, bounds = numbers[entries[part]], bounds - bounds[0]
            frames = where[clips, 2]

            def per_sample(values, bounds=bounds):      # of its clips; it may have none
                return np.diff(np.concatenate([[0], np.cumsum(values)])[bounds])

            columns["clips"].append(clips)
            columns["lengths"].append(np.diff(self.tokens.offsets.array()[start:stop + 1])
                                      + per_sample(self.ids.rows(frames, trained[part]) - 1))      # one token is there
            columns["frames"].append(per_sample(frames))
            heard = per_sample(frames == 0) == 0
            columns["audible"].append(heard if left_out is None else heard & ~left_out[start:stop])
            columns["audio_targets"].append(per_sample(np.where(trained[part], self.ids.targets(frames), 0)))
        for column in (*columns.values(), self.tokens.values, self.tokens.offsets, self.labelled, self.names.values,
                       self.names.offsets, self.text_targets):
            column.close()
        shutil.copyfile(self.entries.offsets.path, self.folder / "clip_offsets.npy")
        with naming(self.folder):
            np.save(self.folder / "where.npy", where)
            (self.folder / "codes.json").write_text(json.dumps({"folder": str(cache_folder), "shards": shards,
                                                              "sources": list(sources)}))
        shutil.rmtree(self.folder / "clips", ignore_errors=True)        # still mapped, which NFS minds
        if folder != self.folder:
            for path in self.folder.iterdir():
                shutil.move(path, folder / path.name)


def facts_of(sample):
    """FACTS of a Sample: what is spoken in its last clip, and by whom."""
    said = said_text(sample).casefold()
    return (_hash(sample.speaker, said), sum(map(str.isalnum, said)), _hash(sample.speaker), _hash(sample.language))


def said_text(sample):
    """What is spoken in the last clip of a Sample, in one line."""
    return " ".join(next((turn.text for turn in reversed(sample.turns) if turn.text.strip()), "").split())


def _hash(*parts):
    text = "\0".join(parts).encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _bytes(texts):
    return np.frombuffer(b"".join(texts), np.uint8)


def _sizes(texts):
    return np.array([len(text) for text in texts], np.int64)


class Table:
    """Memory-mapped sample table; every attribute is a numpy array named as in TableBuilder.write.

    sources: [{path, weight, held_out, first, stop}], whose samples stand behind each other.
    """

    def __init__(self, folder):
        for path in Path(folder).glob("*.npy"):
            empty = path.stat().st_size <= 128      # a header alone; an empty array cannot be mapped
            setattr(self, path.stem, np.load(path, mmap_mode=None if empty else "r"))
        codes = json.loads((Path(folder) / "codes.json").read_text())
        self.reader = CodeReader(os.path.normpath(os.path.join(folder, codes["folder"])), codes["shards"])
        self.sources = codes["sources"]

    def __len__(self):
        return len(self.lengths)

    def fingerprint(self, numbers):
        """Short hash of the tokens, labels, clip lengths and relative numbers of these (sorted) samples."""
        if not len(numbers):
            return ""
        first, stop = numbers[0], numbers[-1] + 1
        tokens = slice(self.token_offsets[first], self.token_offsets[stop])
        frames = self.where[self.clips[self.clip_offsets[first]:self.clip_offsets[stop]], 2]
        digest = hashlib.sha256()
        for values in (self.tokens[tokens], self.labelled[tokens], frames, numbers - first):
            digest.update(np.ascontiguousarray(values))
        return digest.hexdigest()[:16]

    def file(self, i):
        """The source of sample i."""
        return file_of(self.sources, i)

    def name(self, i):
        """Where sample i stands in the user's files."""
        return bytes(self.names[self.name_offsets[i]:self.name_offsets[i + 1]]).decode()


# ---------------------------------------------------------------------------------------------------------------------
# From the user's files to the samples of a run


def read_all(train, held_out, tokenizer, ids, reading, folder=None, processes=0, drop=(), output_dir=None,
             builder=None, noted=None, problems=None):
    """Read and tokenise the training sources and the (optional) validation source: (TableBuilder, sources of Table).

    train: [(path, weight)]. held_out: path or None. reading: rows.Reading. folder: of TableBuilder. processes: that
    help this one with sources of many samples. Raises UserError with every sample that cannot be used, or when a source
    is empty. drop: checks (choices.CHECKS) whose samples are dropped and counted instead. output_dir: where all that
    cannot be used are listed, None: nowhere. builder: an empty TableBuilder to fill. noted: a list that takes what is
    odd about samples that are used, as Problems. problems: takes those that cannot be used, for the caller to settle.
    """
    builder, sources = TableBuilder(tokenizer, ids, folder) if builder is None else builder, []
    settled_here, problems = problems is None, Problems(drop, output_dir) if problems is None else problems
    recognised = {}     # {key of text.RECOGNISED: [number of samples, the first one's words]}
    for path, weight in [*train, (held_out, 1.0)][:len(train) + bool(held_out)]:
        before, opened = len(builder), open_source(path, reading, len(sources) >= len(train))
        notes, refused, first = Counter(), Counter(), []

        def chunks(start, step, opened=opened, path=path):
            for samples, wrong in read_chunks(opened, CHUNK, start, step):
                unwanted = [[note for note in sample.notes if note[0] in drop] for sample in samples]
                wrong += [problem(sample.name, *notes[0]) for sample, notes in zip(samples, unwanted) if notes]
                samples = [sample for sample, notes in zip(samples, unwanted) if not notes]
                found = [problem(sample.name, *note, path) for sample in samples for note in sample.notes]
                shown = [sample_text(samples[0])] if samples and start == 0 else []
                yield (builder.chunk(samples, wrong), wrong, found, shown,
                       [s.recognised for s in samples if s.recognised])

        def take(part, path=path, notes=notes, refused=refused, first=first):
            builder.append(part[0])
            for wrong in part[1]:
                wrong.file = str(path)
                refused[wrong.check] += 1
            problems.add(part[1])
            notes.update(p.check for p in part[2])
            if noted is not None:
                noted.extend(part[2])
            first.extend(part[3])
            for how, words in itertools.chain.from_iterable(map(dict.items, part[4])):
                recognised.setdefault(how, [0, words])[0] += 1

        # of one on the hub each would read all texts
        parallel_map_ordered(chunks, 0 if opened.source.on_hub else processes, take)
        kept, lost = len(builder) - before, sum(refused.values())
        counts = ", ".join(f"{n} {check}" for check, n in sorted(refused.items()))
        print(f"source     {printable(path)}: {opened.source.format} ({opened.source.about}); {kept + lost} rows = {kept} kept + "
              f"{lost} refused{' (' + counts + ')' if counts else ''}", flush=True)
        for text in first[:1]:
            print(f"           first: {printable(text)}", flush=True)
        for check, n in sorted(notes.items()):
            print(f"           {counted(n, 'sample')} with {check}: {NOTES[check]}", flush=True)
        if not kept and not problems.stopping:
            problems.settle()
            raise UserError(f"{path}: holds no samples" + (" that can be used" if lost else ""))
        sources.append({"path": str(path), "weight": weight, "held_out": len(sources) >= len(train), "first": before,
                        "stop": len(builder)})
    if settled_here and (said := problems.settle()):
        print(f"data       dropped: {said}", flush=True)
    for how, (count, words) in sorted(recognised.items()):
        print(f"data       {count} {RECOGNISED[how].format(printable(words, NAME))}", flush=True)
    for what, n in sorted(builder.left_out.items()):
        print(f"data       {n} samples {what}", flush=True)
    return builder, sources


def file_of(sources, i):
    """Path of the source of sample i."""
    return next((s["path"] for s in sources if s["first"] <= i < s["stop"]), "")


def sample_text(sample):
    """One line of what was understood of a sample: texts and clips in their order, and the speaker."""
    parts = [f"text {part[:60]!r}" if isinstance(part, str) else f"audio {part.path}"
             for turn in sample.turns if turn.role != "system" for part in turn.parts]
    labels = {"speaker": sample.speaker, "language": sample.language}
    labels = [f"{name} {value}" for name, value in labels.items() if value]
    return ", ".join(parts + labels)


def split_validation(n, share, seed):
    """(train, validation) sample numbers: a seeded shuffle, never the file's tail. At least one each when n > 1.

    share: None for SHARE, but of few samples 5 %, up to 16 of them: the best checkpoint hangs on the loss of these.
    """
    if share is None:
        share = max(SHARE, min(0.05, 16 / max(1, n)))
    held_out = min(max(1, round(n * share)), n - 1) if share > 0 else 0
    order = np.random.default_rng((seed, 2)).permutation(n)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def split_samples(table, share, seed):
    """(train, validation) sample numbers, sorted. A training source of weight 2 has each of its numbers twice, one of
    weight 0.3 a share of 0.3 of its numbers, drawn by the seed: so many times an epoch goes over it.

    share, seed: of split_validation, when no samples came as validation data.
    """
    def numbers(held_out):
        found = np.concatenate([np.arange(0), *(np.arange(s["first"], s["stop"]) for s in table.sources
                                                if s["held_out"] == held_out)])
        return found[table.audible[found]]

    train, held_out = numbers(False), numbers(True)
    if not len(held_out):
        train, held_out = (train[part] for part in split_validation(len(train), share, seed))
    mixed = [weighted(train[(train >= s["first"]) & (train < s["stop"])], s["weight"], (seed, 3, i))
             for i, s in enumerate(table.sources) if not s["held_out"]]
    return np.sort(np.concatenate(mixed)), held_out


def weighted(numbers, weight, seed):
    """Each of the numbers int(weight) times, and once more a share of them, drawn by the seed, for what remains."""
    more = round((weight - int(weight)) * len(numbers))
    return np.concatenate([*[numbers] * int(weight), np.random.default_rng(seed).permutation(numbers)[:more]])


def heard_in_validation(table, train, held_out):
    """(len(train),) bool: whether a validation sample speaks the audio of a training sample too."""
    def audio(numbers):
        return places(table.where, table.clips[np.maximum(table.clip_offsets[numbers + 1], 1) - 1])

    return np.isin(audio(train), audio(held_out))


def places(where, clips):
    """(n,) int64 for numbers of clips, equal for clips of the same audio. where: of speech.data.encode.ensure_codes."""
    shard, row = where[clips, 0], where[clips, 1]
    return np.where(shard < 0, -2 - clips.astype(np.int64), shard * 2**40 + row)


def own_references(place, offsets):
    """Numbers of the samples that have the clip to speak, their last one, as a reference too.

    place: of the clips of all samples (places). offsets: (n + 1,) of each sample's first one in it.
    """
    last = np.repeat(place[np.maximum(offsets[1:], 1) - 1], np.diff(offsets))
    again = np.concatenate([[0], np.cumsum(place == last)])
    return np.flatnonzero(np.diff(again[offsets]) > 1)


def too_long(table, numbers, flag, limit):
    """Iterator over the Problems of samples that have more tokens than a limit that a flag sets."""
    return (problem(table.name(i), "too_long", f"{table.lengths[i]} tokens ({table.frames[i] / FRAME_RATE:.1f} s of "
                    f"audio), more than {flag} {limit}", table.file(i))
            for i in np.unique(numbers[table.lengths[numbers] > limit]))


def usable_samples(table, train, held_out, *, max_length, max_tokens, drop, say=True, output_dir=None):
    """(training, validation) sample numbers of those to use: short enough, and no audio is both trained and validated.

    UserError when none is left to train.

    max_length: tokens of --max_length or, without it, the model's positions. max_tokens: of --max_tokens_per_batch, 0 =
    no limit. drop: leave out longer samples, and if `say` print how many, instead of raising UserError. output_dir:
    where they are listed behind what read_all listed there, None: nowhere.
    """
    twice = heard_in_validation(table, train, held_out)
    if len(train) and twice.all():
        raise UserError("no training samples are left: the audio of each is in the validation data too; give other "
                        "validation data")
    if say and twice.any():
        print(f"data       dropped from training: {counted(twice.sum(), 'sample')} whose audio is in the "
              "validation data")
    train = train[~twice]
    own = own_references(places(table.where, table.clips), table.clip_offsets) if say else []
    if len(own):
        print(f"data       {counted(len(own), 'sample')} with own_reference: the reference is the "
              f"clip to speak, which the model learns to copy, as of {printable(table.name(own[0]))}")
    limits = {"--max_length": max_length} | ({"--max_tokens_per_batch": max_tokens} if max_tokens else {})
    flag, limit = min(limits.items(), key=lambda item: item[1])
    problems = (p for numbers in (train, held_out) for p in too_long(table, numbers, flag, limit))
    settle(problems, ("too_long",) if drop else (), output_dir,
           "\nfix: shorten them, raise the limit, or pass --drop_too_long", more=True)
    train_ids, eval_ids = (numbers[table.lengths[numbers] <= limit] for numbers in (train, held_out))
    if say and len(train_ids) + len(eval_ids) < len(train) + len(held_out):
        print(f"data       dropped as too long: {len(train) - len(train_ids)} of {len(train)} training and "
              f"{len(held_out) - len(eval_ids)} of {len(held_out)} validation samples")
    if not len(train_ids):
        raise UserError("no training samples are left that can be used")
    return train_ids, eval_ids


def data_facts(table, train_ids):
    """{"samples": how many, "hours": of audio in them, references too} for a model card."""
    return {"samples": len(train_ids), "hours": float(table.frames[train_ids].sum() / FRAME_RATE / 3600)}


def samples_line(table, train_ids, eval_ids):
    """Line that says how many samples a run has and how long they are."""
    lengths, hours = table.lengths[train_ids], table.frames[train_ids].sum() / FRAME_RATE / 3600
    return (f"samples    {len(train_ids)} to train, {len(eval_ids)} to validate; tokens mean {lengths.mean():.0f} "
            f"max {lengths.max()}; {hours:.2f} h of audio")
