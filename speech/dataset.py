"""The data of a run on disk: a table of tokenised samples, and a cache of the codes of their clips.

data.make_table() makes a table: read_all(), ensure_codes(), TableBuilder.write(). Each sample is
tokenised once, and each distinct clip is stored once. A clip is one placeholder token here; data.py
replaces it by the clip's rows. Rank 0 writes the table, all ranks map it.

Codes are stored in append-only shards under CACHE/<codec fingerprint>, for all runs. A shard has
int16 codes, their lengths, a content key per clip, and the key of each (path, size, date, cut), so
later runs only check file dates. Each clip's codes have a CRC-32, checked when a run starts and at
each read. The other columns have a SHA-256. speech/codes.py encodes new clips.
"""
import contextlib
import hashlib
import itertools
import json
import os
import re
import uuid
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from core import checkpoint, json_files
from core.cli import UserError, error_names_file, one_line, plural, require
from core.dist import rank0
from core.packing import Column, map_chunks, token_lists
from speech.conversations import (CHATML, SHORTENED, BadSample, Clip, Paths, Reading, Sample,
                                  canonical_sample, is_chatml, sample_name, sample_text,
                                  source_paths)

CHUNK = 2048    # entries of a file that are tokenised together
PREPARED = "prepared.json"      # marks a folder of prepare_tts.py, written last
# columns that TableBuilder fills, and those of lists: {values: where each list begins}
LISTS = {"tokens": "token_offsets", "names": "name_offsets", "clips": "clip_offsets"}
COLUMNS = {"tokens": np.int32, "labelled": bool, "names": np.uint8, "text_targets": np.int64,
           "clips": np.int32, "trained": bool, **dict.fromkeys(LISTS.values(), np.int64)}
PIPELINE = b"mono-mean soxr-HQ 24k v2"      # in the fingerprint: rename it if waveforms change
# of a shard, besides the codes
SHARD_COLUMNS = ("lengths", "keys", "files", "file_keys", "checksums", "measures")


def problem_of(table, i, check, reason):
    """Problem of sample i of a Table or TableBuilder."""
    file = next((s["path"] for s in table.sources if s["first"] <= i < s["stop"]), "")
    return json_files.Problem(table.name(i), check, reason, file, i)


# ---- Reading: the files of a run -> Samples


@dataclass(frozen=True)
class Sources:
    """The user's files and folders of a run, and settings that turn them into samples."""
    files: list                     # [(path, weight, True for validation data)]
    reading: Reading = Reading()
    processes: int = 0              # extra processes for sources of many samples
    drop: tuple = ()                # checks (CHECKS) whose samples are dropped


def read_flags(args, ids, codec_dir):
    """(Sources, codes.Encoding) of the flags of the trainer or of prepare_tts.py."""
    reading = Reading(args.task_type, args.columns, args.reference, args.reference_share, args.seed,
                      args.normalize_text == "on", ids.lone_reference)
    cache = args.code_cache or Path(args.output_dir) / "codes"
    return (Sources(source_paths(args), reading, args.preprocess_num_proc, args.drop_bad),
            Encoding(codec_dir, cache, ids.num_codebooks, args.preprocess_num_proc,
                     args.wait_timeout))


def open_source(path, reading, problems, folder, held_out=False, number=0, make=canonical_sample):
    """(read, parse) of a path, the number-th source of the run: read() is json_files.read_entries
    of it; parse(entries) yields a Sample or Problem for each. Other formats than ChatML are
    converted first, into a file in `folder`. problems: list to which unusable rows are
    added. make: function from ChatML to Sample."""
    file, first = Path(path), None
    if file.suffix in CHATML and file.is_file():
        with contextlib.suppress(UserError):        # the converter says more
            _, first = next(json_files.read_entries(file), ("", None))
    if is_chatml(first):
        changed = [f"--{name}" for name in ("task_type", "columns", "reference", "reference_share")
                   if getattr(reading, name) != getattr(Reading, name)]
        if changed:
            print(f"notice     {one_line(path)}: ChatML samples have prompts, which "
                  f"{', '.join(changed)} does not change", flush=True)
    else:
        from speech import convert
        file = Path(folder) / f"{'eval' if held_out else 'train'}-{number}.jsonl"
        convert.to_chatml(path, file, problems, held_out=held_out, **vars(reading))
    paths = Paths(file.parent.resolve())

    def parse(entries):
        for location, entry in entries:
            fields = entry if isinstance(entry, dict) else {}
            misc = fields["misc"] if isinstance(fields.get("misc"), dict) else {}
            name, setting = misc.get("source"), fields.get("normalize_text")  # source: of convert
            if not isinstance(name, str):
                name = sample_name(f"{file} {location}", entry)
            try:
                if setting not in (None, "", "on", "off"):
                    raise BadSample(f"its normalize_text is {setting!r}; give off, on or nothing")
                # off: this text was spoken without normalisation, by generate_tts.py
                sample = make(name, entry, paths, reading.normalize and setting != "off")
            except BadSample as error:
                yield json_files.Problem(name, error.check, error, path)
            else:
                sample.notes.extend(map(tuple, misc.get("notes", ())))
                yield sample
    # a converted file is empty if all its rows were refused
    return partial(json_files.read_entries, file) if file.stat().st_size else list, parse


def read_all(builder, sources, problems, folder=None, inspect=None):
    """Read and tokenise Sources into a TableBuilder. UserError if a source is empty.

    problems: Problems that collects unusable samples, for the caller to settle. folder: for data
    converted to ChatML. inspect: as in tokenise(); builder.inspected takes its results."""
    for number, (path, weight, held_out) in enumerate(sources.files):
        start, before, unconverted = len(builder), problems.counts.total(), []
        read, parse = open_source(path, sources.reading, unconverted, folder, held_out, number)
        problems.add(unconverted)

        def encode(entries, parse=parse, path=path):
            return tokenise(parse(entries), builder.tokenizer, builder.ids, path, sources.drop,
                            inspect)

        for chunk in map_chunks(encode, read(), CHUNK, sources.processes):
            builder.append(chunk)
            problems.add(chunk["refused"])
            builder.inspected.append(chunk["inspected"])
        kept, lost = len(builder) - start, problems.counts.total() - before
        print(f"source     {one_line(path)}: {plural(kept + lost, 'row')} = {kept} kept + "
              f"{lost} refused", flush=True)
        samples = parse(read())
        if first := next((sample for sample in samples if isinstance(sample, Sample)), None):
            print(f"           first: {one_line(sample_text(first))}", flush=True)
        if not kept and not problems.fatal:
            raise UserError(f"{path}: holds no samples{' that can be used' if lost else ''}")
        builder.sources.append({"path": str(path), "weight": weight, "held_out": held_out,
                                "first": start, "stop": len(builder)})
    for clause, n in sorted(builder.notices.items()):
        print(f"data       {n} samples {clause}", flush=True)


# ---- Writing


@contextlib.contextmanager
def new_builder(world, tokenizer, ids, output_dir):
    """Context with (TableBuilder, list of its clips); None, [] on ranks > 0. Tables of earlier
    starts are deleted: at the end of the context, and before it unless output_dir is prepared."""
    if not world.is_main:
        yield None, []
        return
    if not is_prepared(output_dir):
        checkpoint.remove_named(output_dir, r"table-[0-9a-f]{8}")
    name = f"table-{uuid.uuid4().hex[:8]}"
    builder = TableBuilder(tokenizer, ids, Path(output_dir) / name)
    yield builder, builder.clips
    # a job keeps mapped files
    checkpoint.remove_named(output_dir, rf"(?!{name})table-[0-9a-f]{{8}}")


def sums(values, offsets):
    """(n,) int64: the sum of each values[offsets[i]:offsets[i + 1]], which may be empty."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[offsets])


def tokenise(entries, tokenizer, ids, file="", drop=(), inspect=None):
    """Argument of TableBuilder.append(): {column: values, or for LISTS' offsets the lengths}, with
    "notices", "refused" ([Problem] of unusable samples) and "inspected".

    entries: Samples and Problems of a file. drop: checks whose samples are dropped. inspect: None,
    or function([(Sample, number of its rows in the table)], file) -> "inspected"."""
    control, tags = ids.forbidden_tokens(tokenizer), ids.known_tags(tokenizer)
    rows, samples, notices, refused = [], [], Counter(), []     # rows: (name, stream)
    for sample in entries:
        if isinstance(sample, json_files.Problem):
            refused.append(sample)
            continue
        marked = [turn for turn in sample.turns if "<|" in turn.text]
        try:
            for check, reason in sample.notes:
                if check in drop:
                    raise BadSample(reason, check)
            for token in (t for turn in marked for t in control if t in turn.text):
                raise BadSample(f"text contains the control token {token}", "control_token")
            streams, omissions = ids.streams(sample)
        except BadSample as error:
            refused.append(json_files.Problem(sample.name, error.check, error, file))
            continue
        rows += streams
        samples.append((sample, len(streams)))
        # tags in a text to speak that this model does not know
        unknown = {tag for turn in marked if turn.role != "system"
                   for tag in re.findall(r"<\|[^<>|]*\|>", turn.text)} - tags
        notices.update(omissions)
        notices.update(f"with {check}" for check, _ in sample.notes)
        notices.update(f"hold {tag}, which is not a control tag of this model: it is read aloud"
                       for tag in unknown)
        notices.update([SHORTENED] * any(turn.shortened for turn in sample.turns))
    names = [name.encode("utf-8", "backslashreplace") for name, _ in rows]
    offsets = np.cumsum([0, *(len(stream) for _, stream in rows)])
    pieces, labels = zip(*itertools.chain(*(stream for _, stream in rows))) if rows else ((), ())
    texts = list({piece for piece in pieces if type(piece) is str})
    tokens_of = dict(zip(texts, token_lists(tokenizer, texts)))
    parts = [tokens_of.get(piece, [ids.audio_placeholder_id]) for piece in pieces]
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    spoken = np.array([type(piece) is Clip for piece in pieces], bool)
    labels = np.array(labels, bool)
    return {"tokens": np.fromiter(itertools.chain(*parts), np.int32, lengths.sum()),
            "token_offsets": sums(lengths, offsets), "labelled": np.repeat(labels, lengths),
            "names": np.frombuffer(b"".join(names), np.uint8),
            "name_offsets": list(map(len, names)),
            "text_targets": sums(lengths * (labels & ~spoken), offsets),
            "clips": list(itertools.compress(pieces, spoken)),
            "clip_offsets": sums(spoken, offsets), "trained": labels[spoken], "notices": notices,
            "refused": refused, "inspected": inspect and inspect(samples, file)}


class TableBuilder:
    """Tokenised samples in columns on disk, and the distinct clips in order of first use."""

    def __init__(self, tokenizer, ids, folder):
        """folder: new folder in which write() completes the table."""
        self.tokenizer, self.ids, self.folder = tokenizer, ids, Path(folder)
        # of read_all: counts by text, places in the files, results of its inspect()
        self.notices, self.sources, self.inspected = Counter(), [], []
        self.folder.mkdir(parents=True, exist_ok=True)
        self.columns = {name: Column(self.folder / f"{name}.npy", dtype)
                        for name, dtype in COLUMNS.items()}
        for offsets in LISTS.values():
            self.columns[offsets].append([0])
        self.clips, self.number_of = [], {}     # number_of: {Clip: its index}

    def __len__(self):
        return len(self.array("text_targets"))

    def array(self, name):
        """Memory-mapped array of a column."""
        return self.columns[name].array

    def name(self, i):
        """Place of sample i in the user's files."""
        start, stop = self.array("name_offsets")[i:i + 2]
        return self.array("names")[start:stop].tobytes().decode()

    def append(self, chunk):
        """Append a chunk of tokenise()."""
        for clip in chunk["clips"]:
            if self.number_of.setdefault(clip, len(self.clips)) == len(self.clips):
                self.clips.append(clip)
        values = chunk | {"clips": [self.number_of[clip] for clip in chunk["clips"]]}
        for name, offsets in LISTS.items():
            values[offsets] = len(self.array(name)) + np.cumsum(chunk[offsets], dtype=np.int64)
        for name, column in self.columns.items():
            column.append(values[name])
        self.notices.update(chunk["notices"])

    def write(self, cache_folder, shards, where, left_out=False):
        """Write the table to `folder` and end the builder. left_out: (n,) bool, samples not to use.

        cache_folder: absolute, or relative to `folder`. shards, where: from codes.ensure_codes;
        where is (n_clips, 4) int64, in the order of `clips`. Samples that are left out, or have a
        clip of 0 frames (without codes), are not `audible`."""
        used, offsets, trained = map(self.array, ("clips", "clip_offsets", "trained"))
        frames, tokens = where[used, 2], np.diff(self.array("token_offsets"))
        rows = self.ids.rows(frames, trained) - 1       # besides the placeholder
        columns = {
            "where": where, "frames": sums(frames, offsets),
            "lengths": tokens + sums(rows, offsets),
            "audio_targets": sums(np.where(trained, self.ids.targets(frames), 0), offsets),
            "audible": (sums(frames == 0, offsets) == 0) & ~np.asarray(left_out)}
        codes = {"folder": str(cache_folder), "shards": shards, "sources": self.sources}
        with error_names_file(self.folder):
            for name, values in columns.items():
                np.save(self.folder / f"{name}.npy", values)
            (self.folder / "codes.json").write_text(json.dumps(codes))


def last_clips(clips, offsets, where):
    """((n,) number of each sample's last clip, (n,) int64 that are equal for the same audio).
    clips, offsets: columns of a table."""
    last = clips[np.maximum(offsets[1:], 1) - 1]
    shard, row = where[last, 0], where[last, 1]
    return last, np.where(shard < 0, -2 - last.astype(np.int64), shard * 2**40 + row)


# ---- Codes of clips


class Encoding(NamedTuple):
    codec_dir: Path
    cache_dir: Path
    num_codebooks: int
    processes: int = 0                  # decoding processes on this node
    wait_limit_s: float = 6 * 3600      # for another run that fills the cache

    def folder(self):       # of the codec's shards
        return Path(self.cache_dir) / codec_fingerprint(self.codec_dir)


class ClipCodes(NamedTuple):
    """Where the codes of a list of clips are, with measures and errors of the clips."""
    folder: Path            # of the shards
    shards: list            # file names
    where: np.ndarray       # (n, 4) int64: shard, first row, frames, checksum; shard -1: no codes
    measures: np.ndarray    # (n, 5) float32 MEASURES; NaN: unknown
    errors: dict            # {number of a clip without codes: its file and the reason}

    def missing(self):      # numbers of the clips without codes
        return np.flatnonzero(self.where[:, 0] < 0).tolist()


def codec_fingerprint(codec_dir):
    """16 hex digits of the codec's config and weights and of PIPELINE. Raises UserError."""
    digest, weights = hashlib.sha256(PIPELINE), sorted(Path(codec_dir).glob("*.safetensors"))
    require(weights, f"{codec_dir}: holds no *.safetensors weights; take the native codec")
    for path in sorted([*weights, *Path(codec_dir).glob("config.json")]):
        digest.update(path.name.encode() + bytes.fromhex(checkpoint.sha256(path)))
    return digest.hexdigest()[:16]


def key_of(clip, filled, *recording):
    """16-byte key of a Clip's cut; `recording` identifies the file by content, or path and date."""
    cut = "" if clip.offset is None else f"{clip.offset}+{clip.duration}"
    text = "\0".join(map(str, (*recording, f"{cut} filled" if filled else cut)))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:16]


def file_key(clip):
    """Key of a Clip by path, size and date of its file."""
    stat = os.stat(clip.path)
    return key_of(clip, clip.filled, clip.path, stat.st_size, stat.st_mtime_ns)


def digest_columns(columns):
    return hashlib.sha256(b"".join(columns[name].tobytes() for name in SHARD_COLUMNS)).hexdigest()


@contextlib.contextmanager
def explain_damage(path):
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({error}); delete it and start again, and its clips "
                        "are encoded again")


def read_index(folder):
    """(shard names, {file key: content key}, {content key: row}, "where" and measures of the rows
    as in ClipCodes). Row -1, the last one, is that of an unknown clip."""
    names = os.listdir(folder) if os.path.exists(folder) else ()    # glob() hides a refused access
    shards = sorted(name for name in names if re.fullmatch(r"codes-\w+\.safetensors", name))
    contents, rows, where, measures = {}, {}, [], []
    for number, shard in enumerate(shards):
        path = Path(folder) / shard
        with explain_damage(path), safe_open(path, "np") as file:
            columns = {name: file.get_tensor(name) for name in SHARD_COLUMNS}
            if digest_columns(columns) != (file.metadata() or {}).get("sha256"):
                raise ValueError("its columns have another checksum than when they were written")
        contents.update(zip(map(bytes, columns["files"]), map(bytes, columns["file_keys"])))
        rows.update(zip(map(bytes, columns["keys"]), itertools.count(sum(map(len, where)))))
        lengths = columns["lengths"].astype(np.int64)
        where.append(np.stack([np.full(len(lengths), number), np.cumsum(lengths) - lengths, lengths,
                               columns["checksums"]], axis=1, dtype=np.int64))
        measures.append(columns["measures"])
    where.append(np.array([[-1, -1, 0, -1]]))
    measures.append(np.full((1, 5), np.nan, np.float32))
    return shards, contents, rows, np.concatenate(where), np.concatenate(measures)


def look_up(folder, clips):
    """ClipCodes of a folder of shards, which may miss some clips. Checks the codes."""
    with ThreadPool(16) as pool:        # bound by the file system
        files = pool.map(file_key, clips, 4096)
    shards, contents, rows, where, measures = read_index(folder)
    numbers = np.array([rows.get(contents.get(key), -1) for key in files], np.int64)
    reader, where = CodeReader(folder, shards), where[numbers]
    for row in sorted(where[where[:, 0] >= 0].tolist()):
        reader.codes(*row)
    return ClipCodes(folder, shards, where, measures[numbers], {})


class CodeReader:
    """Reads codes from shards, in any number of threads."""

    def __init__(self, folder, shards):
        self.folder, self.shards, self.open_shards = Path(folder), shards, {}

    def codes(self, shard, start, frames, checksum):
        """(frames, 8) int16 codes. UserError if their checksum does not match."""
        path = self.folder / self.shards[shard]
        with explain_damage(path):
            if shard not in self.open_shards:
                self.open_shards[shard] = safe_open(path, "np").__enter__()
            codes = self.open_shards[shard].get_slice("codes")[start:start + frames]
            if zlib.crc32(codes) != checksum:
                raise ValueError("codes with another checksum than when they were written")
        return codes


def ensure_codes(world, clips, encoding):
    """ClipCodes of unique Clips on rank 0, else None; new clips are encoded. Collective; only rank
    0 needs `clips`."""
    known = look_up(encoding.folder(), clips) if world.is_main else None
    if rank0(world, lambda: bool(known.missing())):
        from speech import codes
        return codes.fill_cache(world, clips, encoding)
    return known


def is_prepared(path):
    """True if a path is a folder of prepare_tts.py."""
    return os.path.isfile(os.path.join(path, PREPARED))
