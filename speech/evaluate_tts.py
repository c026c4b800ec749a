"""Judge generated speech: words, voice, naturalness, length, endings. One folder, or several side by side.

    python speech/evaluate_tts.py samples --reference_dir clips
    python speech/evaluate_tts.py samples --asr_model openai/whisper-small --speaker_model microsoft/wavlm-base-plus-sv
    python speech/evaluate_tts.py samples --asr_model pocketsphinx --speaker_model resemblyzer --mos
    python speech/evaluate_tts.py samples_base samples_trained         # the same prompts from two checkpoints

A folder holds what generate_tts.py writes: NAME.wav and NAME.json with "text", "ended_by" ("eos" or "length"), and
maybe "reference_audio" (the voice to be cloned) and "target_audio" (the same text, truly spoken): all of the file, or
"target_seconds" ("reference_seconds") of it from "target_offset" ("reference_offset") on. Printed is a table; each
folder gets evaluation.json.

    wer, cer             errors against "text" over its words or characters, all samples together, as heard by
                         --asr_model or --asr_command; texts are compared by whisper's rules (scores.normaliser), "text"
                         after text_normalization.heard. An error of the listener counts too, so judge the true recordings once as
                         well and compare
    wer_mean             mean of the samples' own wer, as Seed-TTS-eval counts
    speaker_similarity   cosine of --speaker_model's embeddings of the sample and of reference_audio, else the target
    dnsmos               naturalness from 1 to 5 as DNSMOS estimates it (--mos)
    length_ratio         seconds of the sample over those of its target (--reference_dir, else target_audio)
    stop_rate            share of samples that ended by themselves, not at the length limit
    real_time_factor     seconds of computing a second of speech, as generate_tts.py noted it

wer and similarity mean as much as the models do: with a model that cannot listen they are only arithmetic.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli
from core.cli import UserError, problem_text, require
from speech.choices import check_judges, judges


def build_parser():
    p = cli.Parser(__doc__.partition("\n")[0])
    p.usage = "%(prog)s FOLDER [FOLDER ...] [--flag value ...]"
    p.add_argument("folders", nargs="+", metavar="FOLDER", help="what generate_tts.py wrote; several are compared")
    p.add_argument("--reference_dir", help="true recordings of the same names (default: each JSON's target_audio)")
    judges(p)
    p.add_argument("--device", help="where the models run (default: a GPU when there is one)")
    p.add_argument("--batch_size", type=int, default=8, help="samples Whisper hears at once")
    return p


def check_flags(args, world_size):
    """Raise UserError for flags that cannot work."""
    cli.at_least_one(args, "batch_size")
    check_judges(args)
    require(not args.reference_dir or Path(args.reference_dir).is_dir(),
         f"--reference_dir {args.reference_dir}: no such folder")
    require(len(set(map(str, map(Path, args.folders)))) == len(args.folders), "the same folder is given twice")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = cli.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import math
from dataclasses import dataclass

import torch

from core import dist, json_files, run_lock
from core.checkpoint import write_json
from speech import scores, speech_metrics, text_normalization

# name -> (unit, what is better: -1 less, 1 more, 0 near 1)
METRICS = {"wer": ("errors/word", -1), "wer_mean": ("errors/word", -1), "cer": ("errors/char", -1),
           "speaker_similarity": ("cosine", 1), "dnsmos": ("1 to 5", 1),
           "length_ratio": ("1 = target", 0), "stop_rate": ("share", 1), "real_time_factor": ("s/s", -1)}
AUDIO = (".wav", ".flac", ".mp3", ".ogg")


@dataclass
class Sample:
    """One generated clip. target, voice: arguments of read_audio to compare with, or None."""
    name: str
    audio: Path
    text: str | None
    ended_by: str | None
    target: tuple | None
    voice: tuple | None
    real_time_factor: float | None = None       # of its generation


# ---------------------------------------------------------------------------------------------------------------------
# What is to be judged


def read_samples(folder, reference_dir, needs_text):
    """[Sample] of a folder of NAME.wav and NAME.json. Raises UserError that lists all which cannot be judged."""
    folder, samples, problems = Path(folder), [], []
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one that generate_tts.py wrote")
    for audio in sorted(folder.glob("*.wav")):
        try:
            samples.append(read_sample(audio, reference_dir, needs_text))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError(problem_text(problems))
    if not samples:
        raise UserError(f"{folder}: holds no .wav; give a folder that generate_tts.py wrote")
    return samples


def read_sample(audio, reference_dir, needs_text):
    """The Sample of one NAME.wav. Raises UserError."""
    path = audio.with_suffix(".json")
    try:
        facts = json_files.read_object(path)
    except UserError as error:
        raise UserError(f"{error}; every .wav needs the .json that generate_tts.py writes")
    text, ended_by = facts.get("text"), facts.get("ended_by")
    if not isinstance(text, str) and (needs_text or text is not None):
        raise UserError(f'{path}: "text" is {text!r}; word errors need the text that was to be spoken')
    if ended_by not in ("eos", "length", None):
        raise UserError(f'{path}: "ended_by" is {ended_by!r}; it must be "eos" or "length"')
    if reference_dir:
        places = (Path(reference_dir) / (audio.stem + end) for end in AUDIO)
        target = next(((place, None, None) for place in places if place.is_file()), None)
        if target is None:
            raise UserError(f"--reference_dir {reference_dir}: has no {audio.stem}.wav (nor .flac, .mp3, .ogg) "
                            f"for {audio}")
    else:
        target = find_audio(facts, "target", path)
    return Sample(audio.stem, audio, text, ended_by, target, find_audio(facts, "reference", path),
                  facts.get("real_time_factor") if isinstance(facts.get("real_time_factor"), (int, float)) else None)


def find_audio(facts, what, path):
    """(path, offset, seconds) of the recording that a JSON names, here or beside it, or None.

    offset, seconds: None for all of it. Raises UserError.
    """
    name, *stretch = (facts.get(f"{what}_{key}") for key in ("audio", "offset", "seconds"))
    if name is None:
        return None
    if not isinstance(name, str):
        raise UserError(f'{path}: "{what}_audio" is {name!r}, not a path')
    given = [number for number in stretch if number is not None]
    if not all(isinstance(number, (int, float)) and number >= 0 for number in given):
        raise UserError(f'{path}: "{what}_offset" and "{what}_seconds" are {stretch}, '
                        "not two numbers of seconds")
    for place in (Path(name), path.parent / name):
        if place.is_file():
            return place, *stretch
    raise UserError(f'{path}: "{what}_audio" {name} is not there; looked here and in {path.parent}')


# ---------------------------------------------------------------------------------------------------------------------
# Judging


def evaluate(folder, samples, judges, settings):
    """The contents of evaluation.json for one folder and its [Sample].

    judges: scores.Judges, on their device. settings: {flag: value}, noted in the file.
    """
    rows, voices, notes = [], {}, []
    for sample in samples:
        row = {"name": sample.name} | dict.fromkeys(METRICS)
        if sample.target:
            ours = speech_metrics.read_audio(sample.audio)
            true = speech_metrics.read_audio(*sample.target)
            row["length_ratio"] = len(ours) / len(true) if len(true) else None
        if sample.ended_by:
            row["stop_rate"] = float(sample.ended_by == "eos")
        row["real_time_factor"] = sample.real_time_factor
        like = sample.voice or sample.target
        if judges.embed and like:
            for clip in {(sample.audio,), like} - voices.keys():
                voices[clip] = voice_of(judges.embed, clip, notes)
            a, b = voices[sample.audio,], voices[like]
            row["speaker_similarity"] = None if a is None or b is None else float(a @ b)
        if judges.mos:
            row["dnsmos"] = scores.dnsmos([speech_metrics.read_audio(sample.audio)], speech_metrics.RATE)[0]
        rows.append(row)
    heard, total = [], {}
    if judges.hear:
        heard = judges.hear((speech_metrics.read_audio(sample.audio) for sample in samples), speech_metrics.RATE,
                            [sample.audio for sample in samples], notes)
        rates, total = scores.word_rates([text_normalization.heard(sample.text) for sample in samples], heard, judges.language)
        for row, found in zip(rows, rates):
            row |= found | {"wer_mean": found["wer"]}
    metrics = {key: mean(row[key] for row in rows) for key in METRICS} | total
    return {"name": str(folder), "metrics": metrics, "samples": rows,
            "settings": settings | {"samples": len(samples), "notes": notes},
            "heard": dict(zip((sample.name for sample in samples), heard))}


def voice_of(embed, clip, notes):
    """embed's vector of read_audio(*clip), or None when that is too short."""
    wave = speech_metrics.read_audio(*clip)
    if len(wave) < scores.SHORTEST_VOICE_S * speech_metrics.RATE:
        notes.append(f"{clip[0]}: shorter than {scores.SHORTEST_VOICE_S} s, its voice is not judged")
        return None
    return embed(speech_metrics.resample(wave, speech_metrics.RATE, scores.RATE))


def mean(values):
    """Mean of the numbers among values, None without any."""
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def better(key, a, b):
    """Whether b is better than a by this metric."""
    sign = METRICS[key][1]
    return (b - a) * sign > 0 if sign else abs(math.log(max(b, 1e-9))) < abs(math.log(max(a, 1e-9)))


def check_same_prompts(folders, found):
    """Raise UserError unless all folders hold the same prompts by name: else a difference would mean nothing."""
    def texts_of(samples):      # normalised: with one checkpoint they may be, with the other not
        return {sample.name: sample.text and text_normalization.normalise(sample.text) for sample in samples}
    first = texts_of(found[0])
    for folder, samples in zip(folders[1:], found[1:]):
        texts = texts_of(samples)
        if odd := first.keys() ^ texts.keys():
            there, lacks = (folders[0], folder) if min(odd) in first else (folder, folders[0])
            raise UserError(f"{min(odd)} is in {there}, but not in {lacks} ({len(odd)} such samples): only the same "
                            "prompts can be compared; generate both from one list")
        if odd := [name for name in first if first[name] != texts[name]]:
            raise UserError(f"{odd[0]} has another text in {folder} than in {folders[0]} ({len(odd)} such samples): "
                            "only the same prompts can be compared; generate both from one list")


# ---------------------------------------------------------------------------------------------------------------------
# Output


def labels(runs):
    """The runs' folders by as many of their last parts as it takes to tell them apart."""
    parts = [Path(run["name"]).absolute().parts for run in runs]
    return next(names for n in range(1, 1 + max(map(len, parts)))
                if len(set(names := ["/".join(part[-n:]) for part in parts])) == len(runs))


def table(runs):
    """Lines of the table: one row a metric that any run has; with several runs the difference from the first."""
    number, names = "{:>12.4f}".format, labels(runs)
    width = max(12, *map(len, names))
    head = f"{'metric':<19}{'unit':<12}" + "".join(f" {name:>{width}}" for name in names)
    lines = [head + ("".join(f" {'difference':>12} {'better in':>11}" for _ in runs[1:]) if len(runs) > 1 else
                     f" {'samples':>12}  worst")]
    for key, (unit, _) in METRICS.items():
        values = [run["metrics"][key] for run in runs]
        if not any(value is not None for value in values):
            continue
        line = f"{key:<19}{unit:<12}" + "".join(
            f" {'-' if value is None else format(value, '.4f'):>{width}}" for value in values)
        if len(runs) == 1:
            rows = [row for row in runs[0]["samples"] if row[key] is not None]
            worst = rows[0]
            for row in rows[1:]:
                worst = row if better(key, row[key], worst[key]) else worst
            line += f" {len(rows):>12}  {worst['name']} {worst[key]:.4f}"
        for run, value in zip(runs[1:], values[1:]):
            there = {row["name"]: row[key] for row in run["samples"] if row[key] is not None}
            pairs = [(row[key], there[row["name"]]) for row in runs[0]["samples"]
                     if row[key] is not None and row["name"] in there]
            wins = f"{sum(better(key, a, b) for a, b in pairs)} of {len(pairs)}"
            known = value is not None and values[0] is not None
            line += f" {number(value - values[0]) if known else '-':>12} {wins:>11}"
        lines.append(line)
    return lines


def pick_device(name):
    """Name of the device to use; None: the GPU if there is one. Raises UserError when it cannot be used."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: cannot be used ({str(error).splitlines()[0]})")
    return name


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), check_flags, argv)
    dist.single_process()
    args.device = pick_device(args.device)
    found = [read_samples(folder, args.reference_dir, bool(args.asr_model or args.asr_command))
             for folder in args.folders]
    check_same_prompts(args.folders, found)
    for folder in args.folders:
        run_lock.acquire(folder, "folder")
    by = scores.load_judges(
        asr_model=args.asr_model, asr_command=args.asr_command, speaker_model=args.speaker_model, mos=args.mos,
        language=args.language, batch_size=args.batch_size, asr_time_limit=args.asr_time_limit)
    settings = {key: value for key, value in cli.stored(args).items() if key != "folders"}
    with by.on(args.device):
        runs = [evaluate(folder, samples, by, settings) for folder, samples in zip(args.folders, found)]
    for folder, run in zip(args.folders, runs):
        write_json(Path(folder) / "evaluation.json", run)
    print(*table(runs), sep="\n")
    for run in runs:
        for note in run["settings"]["notes"]:
            print(f"note: {note}")


if __name__ == "__main__":
    main()
