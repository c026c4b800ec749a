"""What may be wrong with speech data, found when they are prepared; and prepared folders, proven.

Errors stop prepare_tts.py, warnings are counted; --drop_bad drops the errors and the warnings that
it names. All are in problems.jsonl. A clip is checked wherever it is used, as a target or as a
reference. A prepared folder holds a table, the codes of its audio, and prepared.json, which lists
every file with its size and checksum and says which tokenizer and codec they fit to.
"""
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np

from core import checkpoint, json_files
from core.cli import UserError, require
from core.dist import rank0
from core.problems import LIST, problem
from speech.codes import FRAME_RATE, MEASURES, codec_fingerprint
from speech.dataset import PREPARED, Table, file_of, own_references, places
from speech.rows import flag_of

SILENCE_DB = -60.0          # root mean square of a clip; full scale is 0
CLIPPED = 1e-3              # share of samples at full scale
DC = 0.02                   # mean of the samples; full scale is 1
SPREAD = 1.5                # interquartile ranges beyond the quartiles of the logarithm: Tukey's
ENOUGH = 20                 # samples of a language, for quartiles


def targets(builder):
    """(n,) numbers of the clips that samples are trained on: the last one of each."""
    numbers, offsets = builder.used_clips()
    return numbers[np.maximum(offsets[1:], 1) - 1]


def find_problems(builder, sources, where, measures, least, most):
    """[Problem] of samples, by check; those with a clip that has no codes are passed over. builder:
    TableBuilder. sources: of rows.read_all. where: (n_clips, 4) of ensure_codes. measures:
    (n_clips, 5) of measures_of. least, most: seconds of a clip.
    """
    numbers, offsets = builder.used_clips()
    target, facts, found = targets(builder), builder.facts.array(), []
    usable = np.diff(offsets) > 0
    usable &= np.add.reduceat(np.append(where[numbers, 2] <= 0, False), offsets[:-1]) == 0
    column = dict(zip(MEASURES, measures.T))
    seconds = column["seconds"]
    seconds = np.where(np.isnan(seconds), where[:, 2] / FRAME_RATE, seconds)

    def add(check, samples, what):
        """Note samples (numbers); what(i): text about one."""
        found.extend(problem(builder.name(i), check, what(i), file_of(sources, i), i)
                     for i in samples.tolist())

    def of_clips(check, wrong, what):
        """Note the samples with a clip for which wrong (n_clips,) is true; what(clip): text."""
        at = np.flatnonzero(wrong[numbers])
        samples, first = np.unique(np.searchsorted(offsets, at, "right") - 1, return_index=True)
        clip = dict(zip(samples.tolist(), numbers[at[first]].tolist()))
        add(check, samples[usable[samples]],
            lambda i: f"{what(clip[i])}: {builder.clips[clip[i]].path}")

    def again(check, values, what):
        """Note the usable samples whose value an earlier one has."""
        order, values = samples[np.argsort(values, kind="stable")], np.sort(values, kind="stable")
        new = np.append(True, values[1:] != values[:-1])[:len(values)]
        first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
        earlier = dict(zip(order[~new].tolist(), first[~new].tolist()))
        add(check, np.sort(order[~new]), lambda i: f"{what} {builder.name(earlier[i])}")

    of_clips("too_short", (seconds < least) & (where[:, 2] > 0),
             lambda clip: f"{seconds[clip]:.2f} s, less than --min_clip_seconds {least:g}")
    of_clips("too_long", seconds > most,
             lambda clip: f"{seconds[clip]:.1f} s, more than --max_clip_seconds {most:g}")
    with np.errstate(invalid="ignore", divide="ignore"):
        decibels = 20 * np.log10(column["rms"])
        pace = np.log(facts["letters"] / seconds[target])       # letters a second
        of_clips("silence", decibels < SILENCE_DB,
                 lambda clip: f"is silent, {decibels[clip]:.0f} dB of full scale")
        of_clips("clipping", column["clipped"] > CLIPPED, lambda clip:
                 f"{column['clipped'][clip] * 100:.1f} % of its samples are at full scale")
        of_clips("dc_offset", np.abs(column["dc"]) > DC,
                 lambda clip: f"its mean is {column['dc'][clip]:.3f}, not 0")
    add("no_words", np.flatnonzero(usable & (facts["letters"] == 0)),
        lambda i: "its text has no letter and no digit")
    samples = np.flatnonzero(usable)
    place, train = places(where, target[samples]), np.ones(len(samples), bool)
    for source in sources:
        if source["held_out"]:
            train &= (samples < source["first"]) | (samples >= source["stop"])
    add("in_validation", samples[np.isin(place, place[~train]) & train],
        lambda i: "its audio is in the validation data as well")
    add("own_reference", np.intersect1d(samples, own_references(places(where, numbers), offsets)),
        lambda i: "its reference is its own clip")
    again("duplicate_audio", place, "has the same audio as")
    again("duplicate_text", facts["said"][samples], "has speaker and text of")
    for language in np.unique(facts["language"]):
        mine = np.flatnonzero(usable & (facts["letters"] > 0) & (facts["language"] == language))
        if len(mine) >= ENOUGH:
            low, high = np.quantile(pace[mine], (0.25, 0.75))
            low, high = low - SPREAD * (high - low), high + SPREAD * (high - low)
            usual = f"usual are {np.exp(low):.1f} to {np.exp(high):.1f}"
            add("text_rate", mine[(pace[mine] < low) | (pace[mine] > high)],
                lambda i, usual=usual: f"{np.exp(pace[i]):.1f} letters a second; {usual}")
    return found


# --------------------------------------------------------------------------------------------------
# Prepared folders


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
                raise UserError(f"{path}: was prepared with {flag_of(name)} {was}, not {value}; "
                                "drop the flag, or prepare it again")
        (Path(output_dir) / LIST).unlink(missing_ok=True)       # of the run before
        print(f"data       prepared: {path}", flush=True)
        return str(Path(path) / about["table"])

    table = Table(rank0(world, check))
    table.sources = [{**source, "weight": source["weight"] * weight} for source in table.sources]
    return table
