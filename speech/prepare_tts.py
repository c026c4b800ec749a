"""Speech data of any format -> a prepared folder: checked, tokenised and encoded, with a report.

    python speech/prepare_tts.py --model_path bosonai/higgs-audio-v2-generation-3B-base \
        --audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer --train_data_file train.csv
    torchrun --nproc_per_node=8 speech/prepare_tts.py ...       # encode on 8 GPUs, or 8 CPU ranks
    torchrun --nproc_per_node=8 train_v2_ddp.py ... --train_data_dir prepared

Training on the folder starts at once and needs neither the audio nor torchaudio. Rerun the same
command to resume; codes that are already encoded are kept. OUTPUT_DIR/problems.jsonl lists all
problems of the data. OUTPUT_DIR/prepared.json describes the data.
"""
import hashlib
import itertools
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))     # the folder of core/

from core import cli
from core.cli import COUNT, CPUS, UserError, require
from speech.conversations import CHECKS, LONGEST_CLIP_S, check_data, data_flags

SOUND_ERRORS = ("too_short", "silence")     # besides those of CHECKS
# checks whose samples are still used
WARNINGS = ("clipping", "dc_offset", "no_words", "duplicate_audio", "duplicate_text",
            "in_validation", "text_rate", "no_second_clip", "no_reference_text", "unused_reference",
            "own_reference")
ERRORS = (*CHECKS, *SOUND_ERRORS)

p = cli.Parser("Turn speech data into a prepared folder for train_v2_ddp.py.")
flag = p.flag
flag("--device", "auto", "auto: a GPU if there is one", choices=("auto", "cuda", "cpu"))
data_flags(p)
flag("--eval_data_file", None, "validation data; without it the trainer holds out a share")
flag("--seed", 42, "seed for choosing references and the samples that have one")
# checks
flag("--min_clip_seconds", 0.32, "a shorter clip is an error, too_short")
flag("--max_clip_seconds", 60.0, "a longer clip is an error, too_long",
     (f"be above 0 and at most {LONGEST_CLIP_S}", lambda v: 0 < v <= LONGEST_CLIP_S))
flag("--drop_bad", None, f"drop samples with errors ({', '.join(ERRORS)}) instead of stopping, and "
     f"those with the given warnings: {', '.join(WARNINGS)}", nargs="*", metavar="CHECK")
# output
flag("--output_dir", "./prepared", "folder to write; shared by all nodes")
flag("--preprocess_num_proc", min(8, CPUS), "processes that read and tokenise, or decode "
     "audio, per node; 0 = in this one")
flag("--wait_timeout", 21600, "seconds to wait for the other processes", COUNT)


def check_flags(args, world_size):
    """Raise UserError for flags that would fail later; expand drop_bad to the checks to drop."""
    check_data(args)
    require(args.min_clip_seconds < args.max_clip_seconds,
            "--min_clip_seconds must be below --max_clip_seconds")
    names = [name for word in args.drop_bad or () for name in word.split(",") if name]
    for name in names:
        require(name in (*ERRORS, *WARNINGS), f"--drop_bad {name}: no such check; there are "
                f"{', '.join((*ERRORS, *WARNINGS))}")
    args.drop_bad = () if args.drop_bad is None else tuple(dict.fromkeys([*ERRORS, *names]))


# parsed before torch is imported: --help and wrong flags answer at once
ARGS = cli.parse(p, check_flags) if __name__ == "__main__" else None
if ARGS and ARGS.device == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np

from core import checkpoint, dist, json_files, run
from core.json_files import LIST, Problem, Problems
from speech import weights
from speech.codes import find_bad_audio, samples_with
from speech.conversations import FRAME_RATE, Reading
from speech.dataset import (PREPARED, codec_fingerprint, ensure_codes, is_prepared, last_clips,
                            new_builder, problem_of, read_all, read_flags, sums)

SILENCE_DB = -60.0          # root mean square of a clip; full scale is 0
CLIPPED = 1e-3              # share of samples at full scale
DC = 0.02                   # mean of the samples; full scale is 1
# per sample: hash of speaker and text; number of letters and digits (0: no words); language hash
FACTS = np.dtype([("words", np.uint64), ("letters", np.int32), ("language", np.uint64)])
SPREAD = 1.5                # Tukey's fences: interquartile ranges beyond the quartiles, in logs
ENOUGH = 20                 # least samples of a language, for quartiles


def facts_of(sample):
    """FACTS of a Sample, from the text of its last clip."""
    def short_hash(text):
        data = text.encode("utf-8", "backslashreplace")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
    spoken = next((turn.text for turn in reversed(sample.turns) if turn.text.strip()), "")
    spoken = " ".join(spoken.split()).casefold()
    return (short_hash(f"{sample.speaker}\0{spoken}"), sum(map(str.isalnum, spoken)),
            short_hash(sample.language))


def inspect(samples, file):
    """(FACTS of each row of the table, [Problem] of notes) of [(Sample, number of its rows)]."""
    facts = [facts_of(sample) for sample, rows in samples for _ in range(rows)]
    return np.array(facts, FACTS), [
        Problem(sample.name, *note, file) for sample, _ in samples for note in sample.notes]


def find_problems(builder, facts, codes, least, most):
    """[Problem] of samples; samples with an unencoded clip are skipped. builder: TableBuilder.
    facts: FACTS of its samples. codes: ClipCodes. least, most: seconds of a clip."""
    where = codes.where
    clips, offsets = map(builder.array, ("clips", "clip_offsets"))
    target, audio = last_clips(clips, offsets, where)
    seconds, _, rms, clipped, dc = codes.measures.T
    seconds = np.where(np.isnan(seconds), where[:, 2] / FRAME_RATE, seconds)
    with np.errstate(invalid="ignore", divide="ignore"):
        decibels = 20 * np.log10(rms)
        pace = np.log(facts["letters"] / seconds[target])       # letters a second
    of_clips = (        # (check, which clips fail it, text about one, its value)
        ("too_short", (seconds < least) & (where[:, 2] > 0),
         f"{{:.2f}} s, less than --min_clip_seconds {least:g}", seconds),
        ("too_long", seconds > most, f"{{:.1f}} s, more than --max_clip_seconds {most:g}", seconds),
        ("silence", decibels < SILENCE_DB, "is silent, {:.0f} dB of full scale", decibels),
        ("clipping", clipped > CLIPPED, "{:.1%} of its samples are at full scale", clipped),
        ("dc_offset", np.abs(dc) > DC, "its mean is {:.3f}, not 0", dc))
    usable = (np.diff(offsets) > 0) & (sums(where[clips, 2] <= 0, offsets) == 0)
    low, high = np.full(len(builder), -np.inf), np.full(len(builder), np.inf)   # usual pace
    for language in np.unique(facts["language"]):
        spoken = usable & (facts["letters"] > 0) & (facts["language"] == language)
        if spoken.sum() >= ENOUGH:
            quartiles = np.quantile(pace[spoken], (0.25, 0.75))
            low[spoken], high[spoken] = quartiles + np.diff(quartiles) * (-SPREAD, SPREAD)
    held_out = np.zeros(len(builder), bool)
    for source in builder.sources:
        held_out[source["first"]:source["stop"]] = source["held_out"]

    def first_of(values):
        """(n,) for each sample, the first usable sample with the same value."""
        _, first, group = np.unique(values[usable], return_index=True, return_inverse=True)
        numbers = np.arange(len(values))
        numbers[usable] = np.flatnonzero(usable)[first[group]]
        return numbers

    wordless, numbered = facts["letters"] == 0, np.arange(len(builder))
    same_audio, same_text = first_of(audio), first_of(facts["words"])
    of_samples = (      # (check, which samples fail it, text about sample i)
        ("no_words", wordless, lambda i: "its text has no letter and no digit"),
        ("text_rate", ~wordless & ((pace < low) | (pace > high)), lambda i:
         "{:.1f} letters a second; usual are {:.1f} to {:.1f}".format(
             *np.exp((pace[i], low[i], high[i])))),
        ("in_validation", ~held_out & np.isin(audio, audio[usable & held_out]), lambda i:
         "its audio is in the validation data as well"),
        ("duplicate_audio", same_audio < numbered, lambda i:
         f"has the same audio as {builder.name(same_audio[i])}"),
        ("duplicate_text", same_text < numbered, lambda i:
         f"has speaker and text of {builder.name(same_text[i])}"))
    failures = []       # (sample, check, text)
    for check, wrong, text, value in of_clips:
        failures += [(i, check, f"{text.format(value[clip])}: {builder.clips[clip].path}")
                     for i, clip in samples_with(builder, np.flatnonzero(wrong)) if usable[i]]
    for check, wrong, text in of_samples:
        failures += [(i, check, text(i)) for i in np.flatnonzero(usable & wrong).tolist()]
    return [problem_of(builder, i, check, text)
            for i, check, text in sorted(failures, key=lambda failure: failure[0])]


# ---- The folder: a table, the codes of its audio, and prepared.json, with the checksums of all
# files and the fingerprints of the tokenizer and codec


def prepare(world, tokenizer, ids, sources, encoding, output_dir, least, most):
    """Make the prepared folder, on every rank; returns its report.

    sources: dataset.Sources. encoding: codes.Encoding. least, most: seconds of a clip. UserError
    lists all errors in the data, unless they are dropped."""
    out, drop = Path(output_dir), sources.drop
    problems = Problems((*drop, *WARNINGS), out)        # of rows, then of their sound, in one list

    def write():
        refused = problems.counts.total()
        facts, noted = zip((np.empty(0, FACTS), []), *builder.inspected)
        of_samples = [*find_bad_audio(builder, codes), *itertools.chain(*noted), *find_problems(
            builder, np.concatenate(facts), codes, least, most)]
        problems.add(of_samples)
        problems.settle("\nfix: correct them, or drop them with --drop_bad")
        left_out = np.zeros(len(builder), bool)
        left_out[[p.sample for p in of_samples if p.sample is not None and p.check in drop]] = True
        require(not left_out.all(),
                f"no samples are left: all {len(builder)} are dropped: {out / LIST}")
        last, _ = last_clips(builder.array("clips"), builder.array("clip_offsets"), codes.where)
        frames = codes.where[last, 2]
        report = {
            "samples": int((~left_out).sum()), "dropped": int(left_out.sum()) + refused,
            "hours": round(float(frames[~left_out].sum()) / FRAME_RATE / 3600, 4),
            "checks": {check: {"samples": n, "dropped": check in drop}
                       for check, n in sorted(problems.counts.items())}}
        inside = out in codes.folder.parents        # then the prepared folder can be moved
        cache = codes.folder if inside else Path(os.path.abspath(codes.folder))
        builder.write(os.path.relpath(cache, builder.folder) if inside else cache, codes.shards,
                      codes.where, left_out)
        files = [*sorted(builder.folder.iterdir()), *(cache / name for name in codes.shards)]
        checkpoint.write_text(out / PREPARED, json.dumps({      # completes the folder
            "table": builder.folder.name,
            "sha256": {str(path.relative_to(out) if path.is_relative_to(out) else path):
                       checkpoint.sha256(path) for path in files},
            "tokenizer": tokenizer_fingerprint(tokenizer, ids),
            "codec": codec_fingerprint(encoding.codec_dir),
            "reading": asdict(sources.reading), "report": report}, indent=1) + "\n")
        return report

    with new_builder(world, tokenizer, ids, out) as (builder, clips):
        dist.rank0(world, read_all, builder, sources, problems, out / "data", inspect)
        codes = ensure_codes(world, clips, encoding)
        return dist.rank0(world, write)


def check_prepared(sources, tokenizer, ids, codec_dir):
    """Folder of the table of a prepared folder. UserError unless it is complete, given alone, and
    the flags in Sources are defaults or equal those of the preparation."""
    path = next(path for path, *_ in sources.files if is_prepared(path))
    require(len(sources.files) == 1,
            f"{path}: a prepared folder is given alone; prepare all data together")
    folder = Path(path)
    contents = json_files.read_object(folder / PREPARED)
    for name, digest in contents["sha256"].items():
        fits = (folder / name).exists() and checkpoint.sha256(folder / name) == digest
        require(fits, f"{path}: is damaged, {name} is not there or has another checksum; copy it "
                "again")
    for name, fingerprint, flag in (
            ("tokenizer", tokenizer_fingerprint(tokenizer, ids), "--model_path"),
            ("codec", codec_fingerprint(codec_dir), "--audio_tokenizer_path")):
        require(contents[name] == fingerprint, f"{path}: was prepared with another {name} than "
                f"that of {flag}; prepare it again")
    for name, default in asdict(Reading()).items():
        value, expected = getattr(sources.reading, name), contents["reading"][name]
        # a default fits any value, except for the text setting, which checkpoints keep
        fits = value == expected or value == default and name != "normalize"
        require(fits or name in ("seed", "lone_reference"),
                f"{path}: was prepared with {name} {expected}, not {value}; prepare it again")
    return folder / contents["table"]


def tokenizer_fingerprint(tokenizer, ids):
    """16 hex digits: hash of a tokenizer's vocabulary and of the ids that the trainer uses."""
    text = json.dumps([sorted(tokenizer.get_vocab().items()), asdict(ids)])
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def main():
    args = ARGS
    cli.catch_signals()
    world = dist.init(600, args.wait_timeout)
    require(args.device != "cuda" or world.device.type == "cuda",
            "--device cuda: there is no GPU here")
    if world.is_main:
        checkpoint.lock_folder(args.output_dir)
        (Path(args.output_dir) / LIST).unlink(missing_ok=True)      # of an earlier run
    folder, config_dict, codec_dir = weights.find_files(
        world, args.model_path, args.audio_tokenizer_path)
    module = weights.module(config_dict)
    args.normalize_text = module.text_setting(args.normalize_text or "")
    tokenizer = module.load_tokenizer(folder)
    ids = module.token_ids(tokenizer, module.read_config(config_dict))
    try:
        report = prepare(world, tokenizer, ids, *read_flags(args, ids, codec_dir), args.output_dir,
                         args.min_clip_seconds, args.max_clip_seconds)
    except run.Stopped as why:
        raise UserError(f"{why}; rerun the same command to resume")
    if world.is_main:
        for check, counts in report["checks"].items():
            print(f"check      {check}: {counts['samples']} samples, "
                  f"{'dropped' if counts['dropped'] else 'kept'}")
        print(f"done       {report['samples']} samples, {report['hours']:.2f} h of audio, "
              f"{report['dropped']} dropped; train_v2_ddp.py --train_data_dir {args.output_dir}")
    dist.finish()


if __name__ == "__main__":
    main()
