"""Evaluate generated speech: words, voice, naturalness, length, endings; one folder or several.

    python speech/evaluate_tts.py samples
    python speech/evaluate_tts.py samples --asr_model openai/whisper-small --mos \
        --speaker_model microsoft/wavlm-base-plus-sv
    python speech/evaluate_tts.py samples_base samples_trained  # the same prompts, two checkpoints

A folder holds NAME.wav and NAME.json of generate_tts.py, with "text" and "ended_by". Optional are
"reference_audio" (the voice to be cloned) and "target_audio" (a recording of the text), each with
optional "..._offset" and "..._seconds". Prints a table and writes evaluation.json into each folder.

    wer, cer             over all samples. They include the recogniser's errors
    wer_mean             mean of the samples' wer, as in Seed-TTS-eval
    speaker_similarity   cosine of the sample and of reference_audio, else of the target
    length_ratio         seconds of the sample over those of target_audio
    real_time_factor     computing time per second of speech
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli
from core.cli import UserError, problem_text, require
from speech import judges

p = cli.Parser(__doc__.partition("\n")[0])
p.add_argument("folders", nargs="+", metavar="FOLDER", help="folder of generate_tts.py")
judges.judge_flags(p)
p.switch("--mos", "estimate naturalness by DNSMOS, of the package speechmos")
p.flag("--device", "auto", "auto: a GPU if there is one", choices=("auto", "cuda", "cpu"))
p.flag("--batch_size", 8, "samples per batch of Whisper", cli.COUNT)


def check_flags(args, world_size):
    judges.check_judges(args)
    if args.mos:
        cli.require_package("speechmos", "--mos", "speechmos onnxruntime librosa")


# parsed before torch is imported: --help and wrong flags answer at once
args = cli.parse(p, check_flags)

from statistics import fmean

from core import dist, json_files
from core.checkpoint import lock_folder, write_json
from speech.conversations import normalise

METRICS = ("wer", "wer_mean", "cer", "speaker_similarity", "dnsmos", "length_ratio", "stop_rate",
           "real_time_factor")
HZ = 24000


def read_samples(folder):
    """[(file, its JSON, target, voice: arguments of read_audio or None)] of a folder. UserError."""
    folder, samples, problems = Path(folder), [], []
    for audio in sorted(folder.glob("*.wav")):
        path = audio.with_suffix(".json")
        try:
            facts = json_files.read_object(path)
            require(isinstance(facts.get("text"), str) or not (args.asr_model or args.asr_command),
                    f'{path}: "text" is {facts.get("text")!r}, not what was to be spoken')
            samples.append((audio, facts, find_audio(facts, "target", path),
                            find_audio(facts, "reference", path)))
        except UserError as error:
            problems.append(str(error))
    require(not problems, problem_text(problems))
    require(samples, f"{folder}: holds no .wav; give a folder that generate_tts.py wrote")
    return samples


def find_audio(facts, role, path):
    """(path, offset, seconds; None for the whole file) of a JSON's recording, or None. The path is
    relative to the working directory or to the JSON. Raises UserError."""
    name, *stretch = (facts.get(f"{role}_{key}") for key in ("audio", "offset", "seconds"))
    if name is None:
        return None
    for file in (Path(name), path.parent / name):
        if file.is_file():
            return file, *stretch
    raise UserError(f'{path}: "{role}_audio" {name} is not there; looked here and in {path.parent}')


def evaluate(folder, samples, by, settings):
    """evaluation.json of a folder, as a dict. by: judges.Judges. settings: {flag: value}, noted."""
    waves = [judges.read_audio(audio) for audio, *_ in samples]
    texts = [facts.get("text") or "" for _, facts, *_ in samples]
    measured = judges.measure(by, waves, HZ, texts, [
        reference or target for *_, target, reference in samples])
    rows, heard = [], {}
    for (audio, facts, target, _), wave, row in zip(samples, waves, measured):
        if by.hear:
            heard[audio.stem], row["wer_mean"] = row.pop("heard"), row["wer"]
        if target and len(true := judges.read_audio(*target)):
            row["length_ratio"] = len(wave) / len(true)
        if ended_by := facts.get("ended_by"):
            row["stop_rate"] = float(ended_by == "eos")
        row["real_time_factor"] = facts.get("real_time_factor")
        if args.mos:
            row["dnsmos"] = judges.dnsmos(wave, HZ)
        rows.append({"name": audio.stem} | dict.fromkeys(METRICS) | row)
    metrics = {key: fmean(values) if (values := [
        row[key] for row in rows if row[key] is not None]) else None for key in METRICS}
    if by.hear:
        spoken = list(map(judges.audible_text, texts))
        metrics |= judges.word_rates(spoken, heard.values(), by.language)
    return {"name": str(folder), "metrics": metrics, "samples": rows, "heard": heard,
            "settings": settings | {"samples": len(samples)}}


device = dist.World().device.type
require(args.device != "cuda" or device == "cuda", "--device cuda: there is no GPU here")
if args.device == "auto":
    args.device = device
folders = {folder: read_samples(folder) for folder in args.folders}
# normalised, since only one of the checkpoints may do that
texts = [{audio.stem: normalise(facts.get("text") or "") for audio, facts, *_ in samples}
         for samples in folders.values()]
for folder, spoken in zip(folders, texts):
    require(spoken == texts[0], f"{folder} has other prompts than {args.folders[0]}")
    lock_folder(folder, "folder")
by = judges.load_judges(args.asr_model, args.asr_command, args.speaker_model, args.language,
                        args.batch_size, args.device)
settings = {key: value for key, value in cli.remove_secrets(vars(args)).items() if key != "folders"}
runs = [evaluate(folder, samples, by, settings) for folder, samples in folders.items()]
for folder, run in zip(folders, runs):
    write_json(Path(folder) / "evaluation.json", run)
width = max(12, *map(len, args.folders))
print(f"{'metric':<19}" + "".join(f" {folder:>{width}}" for folder in args.folders))
for key in METRICS:
    values = [run["metrics"][key] for run in runs]
    if any(value is not None for value in values):
        print(f"{key:<19}" + "".join(f" {'-' if value is None else format(value, '.4f'):>{width}}"
                                     for value in values))
