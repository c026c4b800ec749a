"""Judge generated speech: words, voice, naturalness, length, endings. One folder, or several.

    python speech/evaluate_tts.py samples --reference_dir clips
    python speech/evaluate_tts.py samples --asr_model openai/whisper-small --mos \
        --speaker_model microsoft/wavlm-base-plus-sv
    python speech/evaluate_tts.py samples_base samples_trained  # the same prompts, two checkpoints

A folder holds what generate_tts.py writes: NAME.wav and NAME.json with "text", "ended_by" ("eos" or
"length"), and maybe "reference_audio" (the voice to be cloned) and "target_audio" (the same text,
truly spoken): all of the file, or "target_seconds" ("reference_seconds") of it from "target_offset"
("reference_offset") on. Prints a table; each folder gets evaluation.json.

    wer, cer             errors per word or character of "text", all samples together, as heard by
                         --asr_model or --asr_command; texts are compared by whisper's rules. An
                         error of the recogniser counts too: judge the true recordings once as well
    wer_mean             mean of the samples' own wer, as Seed-TTS-eval counts
    speaker_similarity   cosine of --speaker_model's embeddings of the sample and of
                         reference_audio, else of the target
    dnsmos               naturalness from 1 to 5 as DNSMOS estimates it (--mos)
    length_ratio         seconds of the sample over those of its target (--reference_dir, else
                         target_audio)
    stop_rate            share of samples that ended by themselves, not at the length limit
    real_time_factor     seconds of computing per second of speech, as generate_tts.py noted it
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli
from core.cli import UserError, problem_text, require
from speech import choices


def build_parser():
    p = cli.Parser(__doc__.partition("\n")[0])
    p.usage = "%(prog)s FOLDER [FOLDER ...] [--flag value ...]"
    p.add_argument("folders", nargs="+", metavar="FOLDER", help="of generate_tts.py")
    p.flag("--reference_dir", None, "true recordings of the same names (default: each JSON's "
           "target_audio)")
    choices.recognisers(p)
    choices.speakers(p)
    p.switch("--mos", "estimate naturalness by DNSMOS, of the package speechmos")
    p.flag("--device", None, "where the models run (default: a GPU when there is one)")
    p.flag("--batch_size", 8, "samples Whisper hears at once")
    return p


def check_flags(args, world_size):
    cli.at_least_one(args, "batch_size")
    choices.check_recognisers(args)
    require(not args.reference_dir or Path(args.reference_dir).is_dir(),
            f"--reference_dir {args.reference_dir}: no such folder")
    require(len(set(map(Path, args.folders))) == len(args.folders),
            "the same folder is given twice")


# parsed before torch is imported: --help and a mistake in a flag answer at once
args = cli.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import math
from dataclasses import dataclass

import torch

from core import dist, json_files, run_lock
from core.checkpoint import write_json
from speech import judges
from speech.text_normalization import heard, normalise

METRICS = {"wer": "errors/word", "wer_mean": "errors/word", "cer": "errors/char",      # name: unit
           "speaker_similarity": "cosine", "dnsmos": "1 to 5", "length_ratio": "1 = target",
           "stop_rate": "share", "real_time_factor": "s/s"}
AUDIO = (".wav", ".flac", ".mp3", ".ogg")
HZ = 24000


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


# --------------------------------------------------------------------------------------------------
# Samples


def read_samples(folder, reference_dir, needs_text):
    """[Sample] of a folder of NAME.wav and NAME.json. UserError lists all that cannot be judged."""
    folder, samples, problems = Path(folder), [], []
    require(folder.is_dir(), f"{folder}: no such folder; give one that generate_tts.py wrote")
    for audio in sorted(folder.glob("*.wav")):
        try:
            samples.append(read_sample(audio, reference_dir, needs_text))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError(problem_text(problems))
    require(samples, f"{folder}: holds no .wav; give a folder that generate_tts.py wrote")
    return samples


def read_sample(audio, reference_dir, needs_text):
    path = audio.with_suffix(".json")
    try:
        facts = json_files.read_object(path)
    except UserError as error:
        raise UserError(f"{error}; every .wav needs the .json that generate_tts.py writes")
    text, ended_by = facts.get("text"), facts.get("ended_by")
    require(isinstance(text, str) or not needs_text,
            f'{path}: "text" is {text!r}; word errors need the text that was to be spoken')
    if reference_dir:
        places = (Path(reference_dir) / (audio.stem + end) for end in AUDIO)
        target = next(((place, None, None) for place in places if place.is_file()), None)
        require(target, f"--reference_dir {reference_dir}: has no {audio.stem}.wav (nor .flac, "
                f".mp3, .ogg) for {audio}")
    else:
        target = find_audio(facts, "target", path)
    return Sample(audio.stem, audio, text, ended_by, target, find_audio(facts, "reference", path),
                  facts.get("real_time_factor"))


def find_audio(facts, what, path):
    """(path, offset, seconds) of the recording that a JSON names, or None. Raises UserError.

    The path is relative to here or to the JSON. offset, seconds: None for all of it.
    """
    name, *stretch = (facts.get(f"{what}_{key}") for key in ("audio", "offset", "seconds"))
    if name is None:
        return None
    for place in (Path(name), path.parent / name):
        if place.is_file():
            return place, *stretch
    raise UserError(f'{path}: "{what}_audio" {name} is not there; looked here and in {path.parent}')


def check_same_prompts(folders, found):
    """Raise UserError unless all folders hold the same prompts by name: else a difference would
    mean nothing.
    """
    def texts_of(samples):      # normalised: with one checkpoint they may be, with the other not
        return {sample.name: sample.text and normalise(sample.text) for sample in samples}
    first, why = texts_of(found[0]), "only the same prompts can be compared; generate both from " \
        "one list"
    for folder, samples in zip(folders[1:], found[1:]):
        texts = texts_of(samples)
        if odd := first.keys() ^ texts.keys():
            has, lacks = (folders[0], folder) if min(odd) in first else (folder, folders[0])
            raise UserError(f"{min(odd)} is in {has}, but not in {lacks} ({len(odd)} such "
                            f"samples): {why}")
        if odd := [name for name in first if first[name] != texts[name]]:
            raise UserError(f"{odd[0]} has another text in {folder} than in {folders[0]} "
                            f"({len(odd)} such samples): {why}")


# --------------------------------------------------------------------------------------------------
# Judging


def evaluate(folder, samples, by, settings):
    """The contents of evaluation.json for one folder and its [Sample].

    by: judges.Judges, on their device. settings: {flag: value}, noted in the file.
    """
    rows, voices, notes, said, total = [], {}, [], [], {}
    for sample in samples:
        wave, row = judges.read_audio(sample.audio), {"name": sample.name} | dict.fromkeys(METRICS)
        if sample.target:
            true = judges.read_audio(*sample.target)
            row["length_ratio"] = len(wave) / len(true) if len(true) else None
        if sample.ended_by:
            row["stop_rate"] = float(sample.ended_by == "eos")
        row["real_time_factor"] = sample.real_time_factor
        like = sample.voice or sample.target
        if by.embed and like:
            for clip in {(sample.audio,), like} - voices.keys():
                voices[clip] = voice_of(by.embed, clip, notes)
            a, b = voices[sample.audio,], voices[like]
            row["speaker_similarity"] = None if a is None or b is None else float(a @ b)
        if by.mos:
            row["dnsmos"] = judges.dnsmos([wave], HZ)[0]
        rows.append(row)
    if by.hear:
        waves = (judges.read_audio(sample.audio) for sample in samples)
        said = by.hear(waves, HZ, [sample.audio for sample in samples], notes)
        rates, total = judges.word_rates([heard(sample.text) for sample in samples], said,
                                         by.language)
        for row, found in zip(rows, rates):
            row |= found | {"wer_mean": found["wer"]}
    metrics = {key: mean(row[key] for row in rows) for key in METRICS} | total
    return {"name": str(folder), "metrics": metrics, "samples": rows,
            "settings": settings | {"samples": len(samples), "notes": notes},
            "heard": dict(zip((sample.name for sample in samples), said))}


def voice_of(embed, clip, notes):
    """embed's vector of read_audio(*clip), or None when that is too short."""
    wave = judges.read_audio(*clip)
    if len(wave) < judges.SHORTEST_VOICE_S * HZ:
        notes.append(f"{clip[0]}: shorter than {judges.SHORTEST_VOICE_S} s, its voice is not "
                     "judged")
        return None
    return embed(judges.resample(wave, HZ, judges.RATE))


def mean(values):
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


# --------------------------------------------------------------------------------------------------
# Output


def labels(runs):
    """The runs' folders by as many of their last parts as it takes to tell them apart."""
    parts = [Path(run["name"]).absolute().parts for run in runs]
    return next(names for n in range(1, 1 + max(map(len, parts)))
                if len(set(names := ["/".join(part[-n:]) for part in parts])) == len(runs))


def table(runs):
    """Lines of the table, one a metric; with several runs the difference from the first."""
    names = labels(runs)
    width = max(12, *map(len, names))
    heads = names + ["difference"] * (len(runs) - 1)
    lines = [f"{'metric':<19}{'unit':<12}" + "".join(f" {head:>{width}}" for head in heads)]
    for key, unit in METRICS.items():
        first, *others = values = [run["metrics"][key] for run in runs]
        values += [None if None in (first, value) else value - first for value in others]
        shown = "".join(f" {'-' if value is None else format(value, '.4f'):>{width}}"
                        for value in values)
        if any(value is not None for value in values):
            lines.append(f"{key:<19}{unit:<12}{shown}")
    return lines


def pick_device(name):
    """Name of the device to use; None: the GPU if there is one. Raises UserError."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: cannot be used ({str(error).splitlines()[0]})")
    return name


def main():
    dist.single_process()
    args.device = pick_device(args.device)
    found = [read_samples(folder, args.reference_dir, bool(args.asr_model or args.asr_command))
             for folder in args.folders]
    check_same_prompts(args.folders, found)
    for folder in args.folders:
        run_lock.acquire(folder, "folder")
    by = judges.load_judges(args.asr_model, args.asr_command, args.speaker_model, args.mos,
                            args.language, args.batch_size, args.asr_time_limit)
    settings = {key: value for key, value in cli.stored(args).items() if key != "folders"}
    with by.on(args.device):
        runs = [evaluate(folder, samples, by, settings)
                for folder, samples in zip(args.folders, found)]
    for folder, run in zip(args.folders, runs):
        write_json(Path(folder) / "evaluation.json", run)
    print(*table(runs), sep="\n")
    for run in runs:
        for note in run["settings"]["notes"]:
            print(f"note: {note}")


if __name__ == "__main__":
    main()
