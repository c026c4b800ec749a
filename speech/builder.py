"""Samples -> the columns of a table on disk, each tokenised once, each distinct clip kept once.

What reads the table: speech/dataset.py.
"""
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import weakref
from collections import Counter
from pathlib import Path

import numpy as np

from core.dist import error_names_file
from core.indexing import Column, Lists, token_lists
from core.problems import problem
from speech.code_cache import FRAME_RATE
from speech.conversations import OTHER_MARKS, BadSample, Clip, marks_speakers_otherwise
from speech.rows import file_of

LIKE_A_TAG = re.compile(r"<\|[^<>|]*\|>")
ROWS = 2**18            # samples whose columns are in memory together
LISTS = ("tokens", "names", "entries", "clip_texts", "about")       # of TableBuilder
COLUMNS = ("labelled", "text_targets", "trained", "digests")


class Clips:
    """Sequence of the distinct clips of a TableBuilder in order of first use; a Clip is made when
    it is asked for.

    The builder has an entry for each distinct clip of each chunk, so a clip that three chunks use
    has three entries. numbers: (entries,) int32, for each entry the number of its clip in this
    sequence.
    """

    def __init__(self, texts, digests):
        self.texts, self.ends = texts.values.array(), texts.offsets.array()
        digests = digests.array()
        order, new = np.lexsort((digests[:, 1], digests[:, 0])), np.ones(len(digests), bool)
        # equal ones stand side by side, the earliest first
        high, low = digests[:, 0][order], digests[:, 1][order]
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
        places = zip(self.ends[entries].tolist(), self.ends[entries + 1].tolist())
        return [_clip(self.texts[start:stop].tobytes()) for start, stop in places]


def _text(clip):
    """Clip -> bytes. By JSON, since the keys of speech/code_cache.py tell 3 s from 3.0 s."""
    cut = json.dumps([clip.offset, clip.duration, clip.seconds, clip.filled])
    return os.fsencode(clip.path) + b"\0" + cut.encode()


def _clip(text):
    """The Clip that _text made into bytes."""
    path, _, cut = text.rpartition(b"\0")
    return Clip(os.fsdecode(path), *json.loads(cut))


def _digest(clip):
    """128 bits of a clip's path and cut: the same for clips that are equal."""
    cut = [value if value is None else float(value) for value in (clip.offset, clip.duration)]
    about = f"\0{cut}{clip.filled}".encode()
    return hashlib.blake2b(os.fsencode(clip.path) + about, digest_size=16).digest()


class TableBuilder:
    """Tokenised samples in columns on disk; clips holds each distinct clip once, in order of first
    use.

    folder: an empty one, which write() makes the table; None: a temporary one. about: function of a
    Sample -> bytes to keep of it, as a list of the same name.
    """

    def __init__(self, tokenizer, ids, folder=None, about=None):
        self.tokenizer, self.ids, self.lists = tokenizer, ids, token_lists(tokenizer)
        self.control, self.tags = ids.forbidden(tokenizer), ids.known_tags(tokenizer)
        self._known, self._spelled = {}, {}
        self._clips, self.left_out = None, Counter()
        self.folder = Path(folder or tempfile.mkdtemp())
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        scratch = self.folder / "clips"
        scratch.mkdir(parents=True)
        self.tokens = Lists(self.folder, "tokens", "token_offsets", np.int32)
        self.labelled = Column(self.folder / "labelled.npy", bool)
        self.names = Lists(self.folder, "names", "name_offsets", np.uint8)
        self.text_targets = Column(self.folder / "text_targets.npy", np.int64)
        # one entry for each distinct clip of a chunk; which of them are the same clip is found when
        # all are known
        self.entries = Lists(scratch, "entries", "offsets", np.int32)     # of the samples' clips
        self.trained = Column(scratch / "trained.npy", bool)
        self.clip_texts = Lists(scratch, "texts", "text_offsets", np.uint8)
        self.digests = Column(scratch / "digests.npy", np.uint64, 2)
        self.about_of, self.about = about, Lists(scratch, "about", "about_offsets", np.uint8)

    def __len__(self):
        return len(self.tokens)

    def add(self, samples, problems):
        """Tokenise a list of Samples; one whose text spells a control token goes to the list
        `problems`.
        """
        self.append(self.chunk(samples, problems))

    def chunk(self, samples, problems):
        """{name: array, or (array, lengths) of lists} of Samples, for `append`, which may be that
        of another process's builder.
        """
        good, about, left_out = [], [], Counter()
        for sample in samples:
            if token := self._control_token(sample):
                problems.append(problem(sample.name, "control_token", "text contains the control "
                                        f"token {token}; remove it"))
                continue
            try:
                found, without = self.ids.streams(sample)
            except BadSample as error:
                problems.append(problem(sample.name, "invalid", str(error)))
                continue
            good += found
            if self.about_of:
                about += [self.about_of(sample)] * len(found)
            left_out.update(without)
            left_out.update(self._read_aloud(sample))
        streams = [stream for _, stream in good]
        pieces, labels = zip(*itertools.chain.from_iterable(streams)) if good else ((), ())
        starts = np.cumsum([0, *map(len, streams)])[:-1]
        parts = self._tokens_of(pieces)
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        spoken = np.array([type(piece) is Clip for piece in pieces], bool)
        labels = np.array(labels, bool)
        clips = {}
        entries = [clips.setdefault(clip, len(clips))
                   for clip in itertools.compress(pieces, spoken)]
        tokens = np.fromiter(itertools.chain.from_iterable(parts), np.int32, lengths.sum())
        digests = np.frombuffer(b"".join(map(_digest, clips)), np.uint64).reshape(-1, 2)

        def per_sample(values):
            if not good:
                return np.empty(0, np.int64)
            return np.add.reduceat(values, starts, dtype=np.int64)

        return {"tokens": (tokens, per_sample(lengths)), "labelled": np.repeat(labels, lengths),
                "names": _bytes(name.encode("utf-8", "backslashreplace") for name, _ in good),
                "text_targets": per_sample(lengths * (labels & ~spoken)),
                "entries": (np.array(entries, np.int32), per_sample(spoken)),
                "trained": labels[spoken], "clip_texts": _bytes(map(_text, clips)),
                "digests": digests, "about": _bytes(about), "left_out": left_out}

    def append(self, chunk):
        """Add a chunk to the columns."""
        entries, counts = chunk["entries"]
        chunk = {**chunk, "entries": (entries + len(self.clip_texts), counts)}
        for name in LISTS:
            getattr(self, name).append(*chunk[name])
        for name in COLUMNS:
            getattr(self, name).append(chunk[name])
        self.left_out.update(chunk["left_out"])
        self._clips = None

    def _tokens_of(self, pieces):
        """[tokens] of pieces of streams: texts, and Clips, each of which one token stands for."""
        new = {text for text in pieces if type(text) is str and text not in self._known}
        known = {**self._known, **dict(zip(new, self.lists(list(new))))}
        # template pieces repeat in every sample, the samples' own text does not
        self._known.update((text, known[text]) for text in new
                           if text.startswith("<|") and text.endswith(("|>", "\n\n")))
        place = [self.ids.audio_placeholder_id]
        return [known[piece] if type(piece) is str else place for piece in pieces]

    def _read_aloud(self, sample):
        """What a sample's texts hold that looks like a mark and is none to this model."""
        asked = [turn.text for turn in sample.turns if turn.role != "system"]
        tags = {tag for text in asked if "<|" in text for tag in LIKE_A_TAG.findall(text)}
        found = [f"hold {tag}, which is not a control tag of this model: it is read aloud"
                 for tag in tags - self.tags]
        return found + ([OTHER_MARKS] if any(map(marks_speakers_otherwise, asked)) else [])

    def _control_token(self, sample):
        """The control token that a turn's own text spells, "" if none."""
        for turn in sample.turns:
            text = turn.text
            if "<|" in text:
                if text not in self._spelled:
                    if len(self._spelled) >= 1000:
                        self._spelled.clear()
                    tokens = self.lists([text])[0]
                    spelled = (self.control[token] for token in tokens if token in self.control)
                    self._spelled[text] = next(spelled, "")
                if self._spelled[text]:
                    return self._spelled[text]
        return ""

    @property
    def clips(self):
        """Clips of all samples."""
        if self._clips is None:
            self._clips = Clips(self.clip_texts, self.digests)
        return self._clips

    def clips_of(self, i):
        """Numbers of sample i's clips."""
        return self.clips.numbers[self.entries[i]]

    def name(self, i):
        """Where sample i stands in the user's files."""
        return self.names[i].tobytes().decode()

    def used_clips(self):
        """((m,) numbers of the clips of all samples, (n + 1,) offsets of each sample's in it)."""
        return self.clips.numbers[self.entries.values.array()], self.entries.offsets.array()

    def without_audio(self, bad, sources):
        """Problems of the samples that use clips in bad, {clip number: file and reason}. sources:
        of read_all.
        """
        used, offsets = self.used_clips()
        at = np.flatnonzero(np.isin(used, list(bad)))
        samples, first = np.unique(np.searchsorted(offsets, at, "right") - 1, return_index=True)
        return [problem(self.name(i), "audio", f"its audio {bad[clip]}", file_of(sources, i), i)
                for i, clip in zip(samples.tolist(), used[at[first]].tolist())]

    def shorter_than(self, least, where):
        """{clip: what is wrong} of trained clips with fewer codec frames, which where[:, 2] then
        says have none.
        """
        if least <= 1:
            return {}
        trained = np.unique(self.used_clips()[0][self.trained.array()])
        short = trained[(where[trained, 2] > 0) & (where[trained, 2] < least)]
        found = {int(clip): f"{self.clips[int(clip)].path}: gives {where[clip, 2]} codec frames; "
                            f"this model needs {least} ({least / FRAME_RATE:g} s) to end a clip"
                 for clip in short}
        where[short, 2] = 0
        return found

    def write(self, folder, cache_folder, shards, where, sources=(), left_out=None):
        """Make the table in `folder`; ends the builder. sources: of read_all. left_out: (n,) bool,
        of samples not used.

        cache_folder: absolute, or relative to `folder`. shards, where: of speech.dataset's
        ensure_codes; where is (n_clips, 4) int64, in the order of `clips`. Samples with a clip of 0
        frames, which has no codes, are not `audible`, nor are those left out.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (used, offsets), trained = self.used_clips(), self.trained.array()
        columns = {name: Column(self.folder / f"{name}.npy", np.int64)
                   for name in ("lengths", "frames", "audio_targets")}
        columns |= {"clips": Column(self.folder / "clips.npy", np.int32),
                    "audible": Column(self.folder / "audible.npy", bool)}
        for start in range(0, len(self), ROWS):
            stop = min(start + ROWS, len(self))
            bounds = offsets[start:stop + 1]
            part = slice(bounds[0], bounds[-1])
            clips, bounds = used[part], bounds - bounds[0]
            frames = where[clips, 2]

            def per_sample(values, bounds=bounds):      # of its clips; it may have none
                return np.diff(np.concatenate([[0], np.cumsum(values)])[bounds])

            tokens = np.diff(self.tokens.offsets.array()[start:stop + 1])
            rows = self.ids.rows(frames, trained[part]) - 1      # one token is there
            targets = np.where(trained[part], self.ids.targets(frames), 0)
            heard = per_sample(frames == 0) == 0
            columns["clips"].append(clips)
            columns["lengths"].append(tokens + per_sample(rows))
            columns["frames"].append(per_sample(frames))
            columns["audible"].append(heard if left_out is None else heard & ~left_out[start:stop])
            columns["audio_targets"].append(per_sample(targets))
        for column in (*columns.values(), self.tokens.values, self.tokens.offsets, self.labelled,
                       self.names.values, self.names.offsets, self.text_targets):
            column.close()
        shutil.copyfile(self.entries.offsets.path, self.folder / "clip_offsets.npy")
        codes = {"folder": str(cache_folder), "shards": shards, "sources": list(sources)}
        with error_names_file(self.folder):
            np.save(self.folder / "where.npy", where)
            (self.folder / "codes.json").write_text(json.dumps(codes))
        # still mapped, which NFS minds
        shutil.rmtree(self.folder / "clips", ignore_errors=True)
        if folder != self.folder:
            for path in self.folder.iterdir():
                shutil.move(path, folder / path.name)


def _bytes(texts):
    """(all bytes of some texts, the length of each), for Lists."""
    texts = list(texts)
    lengths = np.array([len(text) for text in texts], np.int64)
    return np.frombuffer(b"".join(texts), np.uint8), lengths
