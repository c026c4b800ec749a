"""The table of tokenised samples on disk: all ranks and loader workers map one, so memory does not
grow with their number. And the codes of its clips, looked up in the cache, encoded where they lack.

Which of its samples are trained, which held out, and which are short enough to be used. What makes
it: speech/builder.py.
"""
import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.cli import UserError, counted, printable
from core.dist import rank0
from core.problems import problem, settle
from speech.code_cache import FRAME_RATE, CodeReader, codec_fingerprint, look_up
from speech.rows import file_of

SHARE = 0.005           # of the samples, for validation, where --validation_split says nothing
TABLE = r"table-[0-9a-f]{8}"      # new_table
PREPARED = "prepared.json"      # of a folder of prepare_tts.py: written last, once it is finished


@dataclass(frozen=True)
class Encoding:
    """How clips become codes, and where these lie.

    codec_dir: native codec folder. cache_dir: of encoded audio. processes: that decode, on this
    node. wait_limit_s: seconds to wait for another run that fills the cache, and for a rank that
    encodes.
    """
    codec_dir: Path
    cache_dir: Path
    num_codebooks: int
    processes: int = 0
    wait_limit_s: float = 6 * 3600

    def folder(self):
        """The part of the cache that is of this codec. Raises UserError."""
        return Path(self.cache_dir) / codec_fingerprint(self.codec_dir)


def ensure_codes(world, clips, how, bad=None):
    """Encode what is missing, all ranks together. Called by every rank; `clips` (unique Clips)
    matters on rank 0 only.

    Returns on rank 0 (folder, shard names, (n, 4) int64 of CacheIndex.find_files in the order of
    clips), else None. A cache that has all clips is only read. Damaged shards are set aside, and
    their clips encoded again. how: Encoding. bad: a dict that on rank 0 takes {number of a clip
    that cannot be decoded or encoded: file and reason}, whose row says 0 frames; None: UserError
    with all.
    """
    known = None        # on rank 0

    def is_complete():
        nonlocal known
        folder = how.folder()
        index, found, unknown = look_up(folder, clips, how.processes)
        known = folder, index, found, unknown
        return not len(unknown) and not index.damaged

    if not rank0(world, is_complete):
        from speech.fill_cache import fill_cache
        return fill_cache(world, clips, how, known, bad)
    if not world.is_main:
        return None
    folder, index, found, _ = known
    return folder, index.shards, found


def new_table(folder):
    """Path in `folder` for the table of a data set, which is made anew at each start.

    A running job keeps the one that it has mapped; earlier ones go by remove_named.
    """
    return Path(folder) / f"table-{uuid.uuid4().hex[:8]}"


def is_prepared(path):
    """Whether a path is a folder of prepare_tts.py."""
    return os.path.isfile(os.path.join(path, PREPARED))


def keep_prepared(output_dir):
    """Raise UserError where a run would take the table of a prepared folder for its own, of an
    earlier start.
    """
    if is_prepared(output_dir):
        raise UserError(f"--output_dir {output_dir}: is a folder of prepare_tts.py; give another "
                        "one to the trainer")


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
        """Short hash of tokens, labels, clip lengths, relative numbers of (sorted) samples; with
        " audio " before it, one of the checksums of codes.
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
        if (checksums < 0).any():       # a dry run lacks some
            return digest.hexdigest()[:16]
        return f"{digest.hexdigest()[:16]} audio {hashlib.sha256(checksums).hexdigest()[:16]}"

    def file(self, i):
        """The source of sample i."""
        return file_of(self.sources, i)

    def name(self, i):
        """Where sample i stands in the user's files."""
        return bytes(self.names[self.name_offsets[i]:self.name_offsets[i + 1]]).decode()


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
    """(n,) int64 for numbers of clips, equal for clips of the same audio. where: of speech.encode.ensure_codes."""
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
