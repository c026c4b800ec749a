"""What a run has left in its folder, read for a report: numbers, starts, checkpoints, samples, evaluations.

Reads small text files and folder listings only, never weights, and may be used while the run goes on: a last line that
is still being written is left out. Anything else that is wrong is a UserError naming file and line.

Used by report.py. Standard library only, so that it also runs where no torch is.
"""
import json
import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import json_files
from common.flags import UserError

MARKER = "requeue"          # left by a trainer that was asked to stop (watchdog.py)
PLAYABLE = {".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg", ".ogg": "audio/ogg", ".opus": "audio/ogg",
            ".m4a": "audio/mp4"}     # what browsers play
SILENT_S = 600              # seconds without a new line before a run no longer counts as going on


@dataclass
class Run:
    """One output_dir. args: {flag: value} of the newest start, or of the newest checkpoint where none was noted."""
    folder: Path
    name: str
    rows: list                                      # metrics.jsonl: {"step": int, metric: float or None}
    starts: list = field(default_factory=list)      # starts.jsonl: {"time", "step", "ranks", "host", "config"}
    checkpoints: list = field(default_factory=list)
    args: dict = field(default_factory=dict)
    best_step: int = None                           # of the newest checkpoint's state.json
    written: float = 0.0                            # time of the newest line of metrics.jsonl

    def curve(self, metric):
        """([step], [value or None]) of one metric, by step."""
        points = sorted(((row["step"], row[metric]) for row in self.rows if metric in row), key=lambda point: point[0])
        return [step for step, _ in points], [value for _, value in points]

    def metrics(self):
        """Names of all metrics in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    def flag(self, name):
        """A flag's number; None where it has none."""
        value = self.args.get(name)
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None

    @property
    def step(self):
        """The last step that was logged, 0 before the first."""
        return max((row["step"] for row in self.rows), default=0)


@dataclass
class Sample:
    """One generated clip; paths of files that are there, facts from its JSON."""
    name: str
    audio: Path
    picture: Path = None
    reference: Path = None
    facts: dict = field(default_factory=dict)


def read_lines(path):
    """Objects of a JSONL file; a last line without its end is being written, or was cut off by a kill: left out."""
    with json_files.open_file(path) as file:
        lines, rows = file.read().decode("utf-8", errors="replace").split("\n"), []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json_files.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}: line {number} cannot be read ({error}): {line[:60]!r}; mend it")
        rows.append(row)
    return rows


def read_numbers(path):
    """Rows of a metrics.jsonl, {"step": int, metric: float or None}; what is not finite becomes None."""
    rows = read_lines(path)
    for row in rows:
        if type(row.get("step")) is not int:
            raise UserError(f"{path}: a line has no whole number as its step: {json.dumps(row)[:60]}")
        for name, value in row.items():
            if value is not None and type(value) not in (int, float):
                raise UserError(f"{path}: step {row['step']}: {name} is {json.dumps(value)[:40]}, not a number")
            if type(value) is float and not math.isfinite(value):
                row[name] = None
    return rows


def read_run(folder):
    """Run of an output_dir; UserError when it is none."""
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the --output_dir of a run")
    if not path.is_file():
        raise UserError(f"{folder}: no metrics.jsonl in it; give the --output_dir of a run that has started")
    run = Run(folder, folder.resolve().name, read_numbers(path), written=path.stat().st_mtime)
    if (folder / "starts.jsonl").is_file():
        run.starts = [start for start in read_lines(folder / "starts.jsonl")
                      if isinstance(start.get("config"), dict) and type(start.get("step")) is int]
    run.checkpoints = read_checkpoints(folder)
    metas = [found["meta"] for found in run.checkpoints if found["meta"]]
    if metas:
        args, run.best_step = metas[-1].get("args"), metas[-1].get("best_step")
        run.args = args if isinstance(args, dict) else {}
    if run.starts:
        run.args = run.starts[-1]["config"]
    return run


def read_checkpoints(folder):
    """[{"step", "path", "bytes", "time", "wrong", "closed", "meta"}] by step.

    wrong: "" or what sizes and manifest tell; closed: this user may not read it.

    Checksums are left to the trainer, which compares them when it resumes: hashing weights would take minutes.
    """
    found = []
    for path in folder.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if not match or not path.is_dir():
            continue
        wrong, closed, size = "", False, sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        try:
            files = json_files.read_object(path / "manifest.json")["files"]
            sizes = {name: os.path.getsize(path / name) if os.path.isfile(path / name) else None for name in files}
            wrong = next((f"{name} is missing" if sizes[name] is None else
                          f"{name} has {sizes[name]} bytes instead of {facts['bytes']}"
                          for name, facts in files.items() if sizes[name] != facts["bytes"]), "")
        except (UserError, KeyError, TypeError, AttributeError):
            there = (path / "manifest.json").exists()
            closed = there and not os.access(path / "manifest.json", os.R_OK)
            wrong = "" if closed else "unreadable manifest.json" if there else "no manifest.json"
        try:
            meta = json_files.read_object(path / "trainer_state" / "state.json")
        except UserError:
            meta = None
        found.append({"step": int(match[1]), "path": path, "bytes": size, "time": path.stat().st_mtime, "wrong": wrong,
                      "closed": closed, "meta": meta})
    return sorted(found, key=lambda checkpoint: checkpoint["step"])


def total_steps(run):
    """Steps the whole run will have, as far as flags and epochs tell, or None."""
    if run.flag("max_steps"):
        return int(run.flag("max_steps"))
    steps, epochs = run.curve("train/epoch")
    if run.flag("num_train_epochs") and epochs and epochs[-1]:
        total = steps[-1] / epochs[-1] * run.flag("num_train_epochs")
        return max(run.step, round(total)) if math.isfinite(total) else None
    return None


def state(run, now=None):
    """(word, sentence) on where a run stands: finished, stopped, running or silent. now: seconds since 1970."""
    now = time.time() if now is None else now
    if (run.folder / MARKER).is_file():
        return "stopped", (run.folder / MARKER).read_text(errors="replace").strip() + "; the same command goes on"
    whole = [found["step"] for found in run.checkpoints if not found["wrong"]]
    epochs = [value for value in run.curve("train/epoch")[1] if value is not None]
    limit, last_epoch = run.flag("max_steps"), run.flag("num_train_epochs") or math.inf
    ended = run.step >= limit if limit else bool(epochs) and epochs[-1] >= last_epoch
    if ended and run.step in whole:
        return "finished", f"at step {run.step}, saved"
    age, seconds = now - run.written, [value for value in run.curve("train/step_seconds")[1] if value]
    interval = (run.flag("logging_steps") or 1) * seconds[-1] if seconds else 0
    last = f"last line {ago(age)} ago"
    if age < max(SILENT_S, 3 * interval):
        return "running", last
    goes_on = f"step {whole[-1]}" if whole else "the start"
    return "silent", f"{last}, no end noted: killed, failed or hanging; the same command goes on from {goes_on}"


def ago(seconds):
    """A span of time in words."""
    for name, unit in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0, seconds):.0f} seconds"


def read_samples(folder):
    """[Sample] of a folder's <name>.wav with <name>.png and <name>.json beside them."""
    samples = []
    for audio in sorted(Path(folder).glob("*.wav")):
        picture, notes = audio.with_suffix(".png"), audio.with_suffix(".json")
        facts = json_files.read_object(notes) if notes.exists() else {}
        given = facts.get("reference_audio")
        places = [Path(folder) / given, Path(given)] if isinstance(given, str) and given else []
        reference = next((path for path in places if path.is_file() and path.suffix.lower() in PLAYABLE), None)
        samples.append(Sample(audio.stem, audio, picture if picture.is_file() else None, reference, facts))
    return samples


def sample_steps(folder, wanted):
    """[(step, folder)] of OUTPUT_DIR/samples/step-N: at most `wanted` (0 = all), evenly chosen, first and last among
    them."""
    found = sorted((int(match[1]), path) for path in (Path(folder) / "samples").glob("step-*")
                   if (match := re.fullmatch(r"step-(\d+)", path.name)) and any(path.glob("*.wav")))
    return evenly(found, wanted)


def answer_steps(folder, wanted):
    """[(step, [answer])] of OUTPUT_DIR/answers/step-N.json: at most `wanted` steps (0 = all), evenly chosen. One is
    {"question", "answer", "text", "strict", "growth": [[part, its text so far]]}. Raises UserError.
    """
    found = sorted((int(match[1]), path) for path in (Path(folder) / "answers").glob("step-*.json")
                   if (match := re.fullmatch(r"step-(\d+)\.json", path.name)))
    steps = []
    for step, path in evenly(found, wanted):
        answers = json_files.read_object(path).get("answers")
        if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
            raise UserError(f"{path}: its answers are not a list of objects")
        steps.append((step, answers))
    return steps


def evenly(found, wanted):
    """At most `wanted` of a list (0 = all), evenly chosen, first and last among them."""
    if not 0 < wanted < len(found):
        return found
    return [found[place] for place in sorted({round(i * (len(found) - 1) / (wanted - 1)) for i in range(wanted)}
                                             if wanted > 1 else {-1})]


def natural(text):
    """Sort key: numbers in a name by their value."""
    return [int(part) if part.isdecimal() else part.lower() for part in re.split(r"(\d+)", text)]


def read_evaluation(path):
    """An evaluation.json: {"name": str, "metrics": {metric: number or None}, "samples": [...], "settings": {...}}.

    "verdict": text, "" where it has none.
    """
    found = json_files.read_object(path)
    if not isinstance(found.get("metrics"), dict):
        raise UserError(f"{path}: has no metrics; evaluate_tts.py writes such files")
    for name, value in found["metrics"].items():
        if value is not None and type(value) not in (int, float):
            raise UserError(f"{path}: {name} is {json.dumps(value)[:40]}, not a number")
    samples, settings = found.get("samples", []), found.get("settings", {})
    if not isinstance(samples, list) or not all(isinstance(row, dict) for row in samples):
        raise UserError(f"{path}: its samples are not a list of objects")
    if not isinstance(settings, dict):
        raise UserError(f"{path}: its settings are not an object")
    return {"name": str(found.get("name", Path(path).parent.name)), "metrics": found["metrics"], "path": Path(path),
            "samples": samples, "settings": settings, "verdict": str(found.get("verdict", ""))}
