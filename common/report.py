"""One self-contained HTML page about a run: curves, speed, memory, samples to hear, settings.

    python common/report.py output_dir           # output_dir/report.html; open it in any browser
    python common/report.py out_a out_b          # both runs in one page: out_a/comparison.html
    python common/report.py output_dir --samples spoken --evaluations judged/evaluation.json
    python common/report.py output_dir --check_fell     # and status 1 unless the loss fell

The page has curves, audio and pictures inside it and forbids itself any network. It may be written
while the run goes on, for any trainer's metrics.jsonl. Standard library only.
"""
import base64
import hashlib
import json
import math
import re
import statistics
import sys
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside it

from common import flags
from common.flags import UserError, need
from common.text import error_text, without_secrets
from core import json_files, metrics

MARKER = "requeue"      # left by a trainer that was asked to stop (watchdog.py)
SILENT_S = 600          # seconds without a new line before a run no longer counts as going on
POINTS = 2000           # of one curve; longer ones keep each bucket's smallest and largest value
PLAYABLE = {".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg", ".ogg": "audio/ogg",
            ".opus": "audio/ogg", ".m4a": "audio/mp4"}      # what browsers play
FACTS = {"wer": "word errors {:.0%}", "speaker_similarity": "likeness {:.2f}",
         "dnsmos": "DNSMOS {:.1f}", "seconds": "{:.2f} s", "frames": "{} frames",
         "seed": "seed {}", "real_time_factor": "real-time factor {:.2f}"}      # of a sample
# where a metric stands: (words of its name, section, unit), the first that fits
PLACES = (("eos_loss", "End of speech", "nats"), ("length_ratio", "End of speech", "1 = target"),
          ("eos|stop_rate|stop_recall", "End of speech", "%"), ("wer|cer", "Speech", "%"),
          ("speaker_similarity|dnsmos", "Speech", ""), ("padding|mfu", "Speed and memory", "%"),
          ("second|real_time", "Speed and memory", "s"), ("memory", "Speed and memory", "GiB"),
          ("throughput", "Speed and memory", "tokens/s"), ("nfe", "Answers", "passes"),
          ("accuracy|ended", "Answers", "%"), ("masked$", "Loss", "%"),
          ("loss|nll|perplexity", "Loss", "nats"),
          ("learning_rate|norm|bad_steps|epoch", "Optimisation", ""), ("", "Other", ""))
SECTIONS = ("Loss", "Answers", "Speech", "End of speech", "Samples", "Evaluation", "Optimisation",
            "Speed and memory", "Other")
DATE = "%Y-%m-%d %H:%M"


# --------------------------------------------------------------------------------------------------
# What a run has left in its folder


@dataclass
class Run:
    """One output_dir."""
    folder: Path
    name: str
    rows: list                      # {"step": int, metric: finite float or None}
    starts: list                    # {"time", "step", "ranks", "host", "config": {flag: value}}
    checkpoints: list
    args: dict                      # config of the newest start
    written: float                  # time of the newest line of metrics.jsonl

    def curve(self, metric):
        """([step], [value or None]) of one metric, by step."""
        points = sorted(((row["step"], row[metric]) for row in self.rows if metric in row),
                        key=lambda point: point[0])
        return [step for step, _ in points], [value for _, value in points]

    def values(self, metric):
        """The finite values of one metric, by step."""
        return [value for _, value in metrics.curve(self.rows, metric)]

    def flag(self, name):
        """A flag's number; 0 where it has none."""
        return self.args.get(name) if is_number(self.args.get(name)) else 0

    @property
    def step(self):
        """The last step that was logged, 0 before the first."""
        return max((row["step"] for row in self.rows), default=0)


def is_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def numbers(row):
    """A row of metrics; what is not a finite number is None."""
    return {name: value if is_number(value) else None for name, value in row.items()}


def read_run(folder):
    """Run of an output_dir. Raises UserError."""
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    need(path.is_file(), f"{folder}: no metrics.jsonl in it; give the --output_dir of a run")
    rows, wrong = metrics.read_rows(path)
    need(not wrong, f"{path}: {wrong}; mend it")
    starts = [start for start in metrics.read_rows(folder / "starts.jsonl")[0]
              if isinstance(start.get("config"), dict)]
    # earlier versions stored flags with their passwords
    args = without_secrets(starts[-1]["config"]) if starts else {}
    return Run(folder, folder.resolve().name, list(map(numbers, rows)), starts,
               read_checkpoints(folder), args, path.stat().st_mtime)


def read_checkpoints(folder):
    """[{"step", "bytes", "time", "wrong": "" or why it is damaged}] by step.

    Checksums are left to the trainer, which compares them when it resumes: hashing takes minutes.
    """
    found = []
    for path in folder.glob("checkpoint-*"):
        if not re.fullmatch(r"checkpoint-\d+", path.name) or not path.is_dir():
            continue
        sizes = {file.relative_to(path).as_posix(): file.stat().st_size
                 for file in path.rglob("*") if file.is_file()}
        wrong = "no readable manifest.json"
        try:
            files = json_files.read_object(path / "manifest.json")["files"].items()
            wrong = next((f"{name} has {sizes.get(name, 'no')} bytes instead of {facts['bytes']}"
                          for name, facts in files if sizes.get(name) != facts["bytes"]), "")
        except (UserError, KeyError, TypeError, AttributeError):
            pass
        found.append({"step": int(path.name.split("-")[1]), "bytes": sum(sizes.values()),
                      "time": path.stat().st_mtime, "wrong": wrong})
    return sorted(found, key=lambda checkpoint: checkpoint["step"])


def total_steps(run):
    """Steps the whole run will have, as far as flags and epochs tell, or 0."""
    epochs = metrics.curve(run.rows, "train/epoch")
    if run.flag("max_steps") or not epochs or not epochs[-1][1]:
        return int(run.flag("max_steps"))
    total = epochs[-1][0] / epochs[-1][1] * run.flag("num_train_epochs")
    return round(total) if math.isfinite(total) else 0


def state(run, now):
    """(word, sentence) on where a run stands: finished, stopped, running or silent."""
    if (run.folder / MARKER).is_file():
        why = (run.folder / MARKER).read_text(errors="replace").strip()
        return "stopped", f"{why}; the same command goes on"
    whole = [found["step"] for found in run.checkpoints if not found["wrong"]]
    if run.step in whole and 0 < total_steps(run) <= run.step:
        return "finished", f"at step {run.step}, saved"
    age, slowest = now - run.written, max(run.values("train/step_seconds"), default=0)
    if age < max(SILENT_S, 3 * run.flag("logging_steps") * slowest):
        return "running", f"last line {age:.0f} seconds ago"
    goes_on = f"step {whole[-1]}" if whole else "the start"
    return "silent", (f"last line {age / 3600:.1f} hours ago, no end noted: killed, failed or "
                      f"hanging; the same command goes on from {goes_on}")


def read_samples(folder):
    """[facts] of a folder's <name>.wav, by name: what its JSON says, and name, paths of files.

    The page shows files of this folder alone, whatever a link or a JSON file in it names.
    """
    folder, samples = Path(folder).resolve(), []

    def is_ours(path):
        return path.is_file() and path.resolve().is_relative_to(folder)
    for audio in filter(is_ours, sorted(folder.glob("*.wav"), key=lambda path: natural(path.stem))):
        notes, picture = audio.with_suffix(".json"), audio.with_suffix(".png")
        facts = without_secrets(json_files.read_object(notes)) if is_ours(notes) else {}
        voice = folder / str(facts.get("reference_audio") or ".")
        samples.append(facts | {
            "name": audio.stem, "audio": audio, "picture": picture if is_ours(picture) else None,
            "voice": voice if is_ours(voice) and voice.suffix.lower() in PLAYABLE else None})
    return samples


def step_paths(folder, pattern, wanted):
    """[(step, path)] of the paths called step-N: at most `wanted` (0 = all), evenly chosen."""
    found = sorted((int(path.stem.split("-")[1]), path) for path in Path(folder).glob(pattern)
                   if re.fullmatch(r"step-\d+", path.stem)
                   and (path.is_file() or any(path.glob("*.wav"))))
    if not 0 < wanted < len(found):
        return found
    last = len(found) - 1
    chosen = {round(i * last / (wanted - 1)) for i in range(wanted)} if wanted > 1 else {last}
    return [found[place] for place in sorted(chosen)]


def natural(text):
    """Sort key: numbers in a name by their value."""
    return [int(part) if part.isdecimal() else part.lower() for part in re.split(r"(\d+)", text)]


def read_evaluation(path):
    """{"name", "path", "metrics": {name: number or None}, "verdict", "samples"} of a file."""
    found = without_secrets(json_files.read_object(path))
    need(isinstance(found.get("metrics"), dict), f"{path}: has no metrics; see evaluate_tts.py")
    return {"name": str(found.get("name", Path(path).parent.name)), "path": Path(path),
            "metrics": numbers(found["metrics"]), "verdict": found.get("verdict", ""),
            "samples": objects(found, "samples", path)}


def objects(found, name, path):
    """The list of objects that a file has under a name. Raises UserError."""
    rows = found.get(name, [])
    need(isinstance(rows, list) and all(isinstance(row, dict) for row in rows),
         f"{path}: its {name} are not a list of objects")
    return rows


def thin(steps, values):
    """About POINTS of a curve: of each bucket the smallest value, or a gap, and the largest."""
    if len(steps) <= POINTS:
        return steps, values
    height = [-math.inf if value is None else value for value in values]
    kept, width = {0, len(steps) - 1}, math.ceil(2 * len(steps) / POINTS)
    for first in range(0, len(steps), width):
        places = range(first, min(first + width, len(steps)))
        kept |= {min(places, key=height.__getitem__), max(places, key=height.__getitem__)}
    return [steps[i] for i in sorted(kept)], [values[i] for i in sorted(kept)]


def panels(runs):
    """[{"section", "title", "unit", "series", "starts": [step of a resume]}], a chart each.

    train/x and eval/x of all runs stand in one chart, numbered ones (x_0, x_1) in one of their own
    prefix and run. series: [{"metric", "label", "color", "dots", "steps", "values"}].
    """
    found = {}
    for place, run in enumerate(runs):
        for metric in dict.fromkeys(name for row in run.rows for name in row if name != "step"):
            prefix, _, rest = metric.rpartition("/") if metric.count("/") == 1 else ("", "", metric)
            stem, index = re.fullmatch(r"(.*?)(?:_(\d+))?", rest, re.DOTALL).groups()
            whose = run.name if len(runs) > 1 else ""
            own = (prefix, whose) if index else ()
            found.setdefault((stem, own), []).append((place, prefix, index, metric))
    made = []
    for (stem, own), members in found.items():
        _, section, unit = next(place for place in PLACES if re.search(place[0], stem))
        several = len({place for place, *_ in members}) > 1
        series = []
        for place, prefix, index, metric in members:
            label = index or f"{runs[place].name if several else ''} {prefix}".strip() or metric
            steps, values = thin(*runs[place].curve(metric))
            series.append({"metric": metric, "label": label, "steps": steps, "values": values,
                           "color": (place if several else len(series)) % 8,
                           "dots": prefix not in ("train", "system", "")})
        starts = {start["step"] for place, *_ in members for start in runs[place].starts}
        made.append({"section": section, "unit": unit, "series": series,
                     "title": " · ".join([stem.replace("_", " "), *filter(None, own)]),
                     "starts": sorted(starts - {0})})
    return made


# --------------------------------------------------------------------------------------------------
# The page


class Raw(str):
    """HTML as it is; every other text is escaped."""


def html(value):
    return value if isinstance(value, Raw) else Raw(escape(str(value)))


def tag(name, *content, **attributes):
    """<name class="...">content</name>. content: texts, or Raw; data_x is the attribute data-x."""
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{html(value)}"'
                    for key, value in attributes.items())
    return Raw(f"<{name}{words}>{''.join(map(html, content))}</{name}>")


def table(head, rows, **attributes):
    """Rows of cells (text, or Raw) -> an HTML table that scrolls by itself on a narrow screen."""
    lines = [tag("tr", *(tag("td", cell) for cell in cells)) for cells in rows]
    head = tag("tr", *(tag("th", cell) for cell in head))
    return tag("div", tag("table", head, *lines, **attributes), class_="wide")


def number(value, digits=4):
    """A number for people; what is missing or not finite is a dash."""
    if not is_number(value):
        return "–"
    if isinstance(value, int) or abs(value) >= 10 ** digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def data_uri(path):
    kind = PLAYABLE.get(path.suffix.lower(), "image/png")
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def player(path):
    return tag("audio", controls="", preload="metadata", src=data_uri(path))


def summary(run, evaluations):
    """Verdict and tiles of one run. evaluations: those that are about it."""
    word, sentence = state(run, time.time())
    tiles = [("State", tag("b", word, class_=f"state {word}"), sentence),
             ("Step", f"{run.step:,}", f"of {total:,}" if (total := total_steps(run)) else "")]
    if losses := run.values("train/loss"):
        tiles.append(("Training loss", number(losses[-1]), f"first {number(losses[0])}"))
    if losses := metrics.curve(run.rows, "eval/loss"):
        best, at = min((value, step) for step, value in losses)
        tiles.append(("Validation loss", number(losses[-1][1]),
                      f"best {number(best)} at step {at:,}"))
    if speeds := run.values("train/throughput"):
        tiles.append(("Throughput", f"{number(statistics.median(speeds))} tok/s", "median"))
    if memory := run.values("train/memory_gib"):
        tiles.append(("Peak memory", f"{max(memory):.2f} GiB", "rank 0"))
    if run.starts:
        resumed = ", ".join(f"{start['step']:,}" for start in run.starts[-3:] if start["step"])
        tiles.append(("Ranks", run.starts[-1].get("ranks", "?"),
                      f"resumed at step {resumed}" if resumed else "one start"))
    clauses = [tag("li", f"{clause[0].upper()}{clause[1:]}.")
               for clause in metrics.verdict(run.rows, evaluations)]
    cells = [tag("div", tag("dt", title), tag("dd", value), tag("small", note))
             for title, value, note in tiles]
    return Raw(tag("p", run.folder.resolve(), class_="path")
               + tag("ul", *clauses, class_="verdict") + tag("dl", *cells, class_="tiles"))


def sample_cell(label, sample):
    """Player, mel picture and facts of one sample."""
    line = [text.format(sample[key]) for key, text in FACTS.items() if is_number(sample.get(key))]
    if "heard" in sample:
        line.append(f"heard: {sample['heard'] or 'nothing'}")
    ended = {"eos": tag("span", "ended by itself", class_="good"),
             "length": tag("span", "cut off by length", class_="bad")}
    parts = [tag("figcaption", label, " ", ended.get(str(sample.get("ended_by")), "")),
             player(sample["audio"])]
    if sample["picture"]:
        parts.append(tag("img", loading="lazy", src=data_uri(sample["picture"]),
                         alt=f"mel spectrogram of {sample['name']}, {label}"))
    parts.append(tag("small", " · ".join(line)))
    return tag("figure", *parts, class_="sample", data_name=sample["name"])


def sample_rows(columns):
    """The same prompt of all steps and folders side by side. columns: [(label, [facts of one])]."""
    rows, parts = {}, []
    for label, samples in columns:
        for sample in samples:
            prompt = sample["name"], str(sample.get("text", ""))
            rows.setdefault(prompt, []).append((label, sample))
    for name, text in sorted(rows, key=lambda prompt: natural(prompt[0])):
        parts += [tag("h3", name), tag("blockquote", text)]
        for voice in [one["voice"] for _, one in rows[name, text] if one["voice"]][:1]:
            parts.append(tag("p", f"reference: {voice.name}", player(voice), class_="reference"))
        cells = [sample_cell(*cell) for cell in rows[name, text]]
        parts.append(tag("div", *cells, class_="samples"))
    return Raw("".join(parts))


def answer_rows(columns):
    """Each problem with its answers at several steps, the blocks of one side by side.

    columns: [(label, [{"question", "answer", "text", "strict", "growth": [[part, text so far]]}])].
    """
    found = {}
    for label, answers in columns:
        for answer in answers:
            blocks, before = [], {}
            for part, text in answer.get("growth", []):
                blocks.append(tag("span", text[len(before.get(part, "")):], class_="block"))
                before[part] = text
            right = bool(answer.get("strict"))
            mark = tag("b", "right" if right else "wrong", class_="good" if right else "bad")
            problem = str(answer.get("question")), str(answer.get("answer"))
            found.setdefault(problem, []).append(
                [label, mark, Raw(" ".join(blocks)) or answer.get("text")])
    return Raw("".join(tag("blockquote", question, " ", tag("b", right))
                       + table(["step", "", "answer, block by block"], rows, class_="answers")
                       for (question, right), rows in found.items()))


def evaluation_tables(evaluations):
    """Metrics as rows, evaluations as columns; their samples folded away."""
    names = dict.fromkeys(name for found in evaluations for name in found["metrics"])
    rows = [["verdict", *(found["verdict"] for found in evaluations)]]
    rows += [[name, *(number(found["metrics"].get(name)) for found in evaluations)]
             for name in names]
    parts = [table(["", *(found["name"] for found in evaluations)], rows, id="evaluations")]
    for found in evaluations:
        keys = list(dict.fromkeys(key for row in found["samples"] for key in row))
        rows = [[number(row[key]) if is_number(row.get(key)) else row.get(key, "") for key in keys]
                for row in found["samples"]]
        parts.append(tag("details", tag("summary", f"{found['name']}: {len(rows)} samples"),
                         table(keys, rows)))
    return Raw("".join(parts))


def checkpoint_table(run):
    """Step, losses, size, time and whether each checkpoint is whole, as sizes of files tell."""
    losses = [dict(metrics.curve(run.rows, name)) for name in ("train/loss", "eval/loss")]
    rows = [[f"{found['step']:,}", *(number(loss.get(found["step"])) for loss in losses),
             f"{found['bytes'] / 2**20:,.1f} MiB",
             time.strftime(DATE, time.localtime(found["time"])),
             tag("span", f"damaged: {found['wrong']}" if found["wrong"] else "whole",
                 class_="bad" if found["wrong"] else "good")] for found in run.checkpoints]
    head = ["step", "training loss", "validation loss", "size", "saved", "files"]
    return table(head, rows, class_="checkpoints") if rows else tag("p", "none yet")


def settings_table(runs):
    """Every flag; in a comparison those that differ come first."""
    names = dict.fromkeys(name for run in runs for name in run.args)
    rows = [[name, *(json.dumps(run.args.get(name), ensure_ascii=False) for run in runs)]
            for name in names]
    different = [row for row in rows if len(set(row[1:])) > 1]
    head = ["flag", *(run.name for run in runs)]
    return Raw((table(head, different, id="different") if different else "")
               + tag("details", tag("summary", f"all {len(rows)} flags"),
                     table(head, rows, id="settings")))


def page(runs, sample_columns, evaluations, answer_columns=()):
    """The whole HTML text. The columns: as sample_rows and answer_rows have them."""
    drawn, parts = panels(runs), {}
    for section in SECTIONS:
        charts = [tag("figure", class_="chart", data_panel=place)
                  for place, panel in enumerate(drawn) if panel["section"] == section]
        parts[section] = tag("div", *charts, class_="charts") if charts else ""
    parts["Loss"] = parts["Loss"] if drawn else tag("p", "nothing logged yet")
    parts["Answers"] += answer_rows(answer_columns)
    parts["Samples"] = sample_rows(sample_columns)
    if evaluations:
        parts["Evaluation"] = evaluation_tables(evaluations)
    parts["Checkpoints"] = "".join(tag("h3", run.name) + checkpoint_table(run) for run in runs)
    parts["Settings"] = settings_table(runs)
    parts = {name: Raw(content) for name, content in parts.items() if content}
    top = [tag("section", tag("h2", run.name) if len(runs) > 1 else "", summary(run, [
        found for found in evaluations if len(runs) == 1
        or run.folder.resolve() in found["path"].resolve().parents])) for run in runs]
    links = [tag("a", name, href=f"#{name.replace(' ', '-')}") for name in parts]
    body = [tag("section", tag("h2", name), content, id=name.replace(" ", "-"))
            for name, content in parts.items()]
    data = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    template = Path(__file__).resolve().with_name("report_page.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1].encode()
    values = {"title": escape(" and ".join(run.name for run in runs)), "links": "".join(links),
              "made": time.strftime(DATE), "body": "".join(body), "summary": "".join(top),
              "data": data,      # and the only script that the page allows to run:
              "script": base64.b64encode(hashlib.sha256(script).digest()).decode()}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def write_report(runs, args):
    """Write the page and say what is in it. Raises UserError."""
    for run in runs:        # names tell the runs apart
        if [other.name for other in runs].count(run.name) > 1:
            run.name = str(run.folder)
    columns, answers, evaluations = [], [], []
    for run in runs:
        of_run = f"{run.name} · " if len(runs) > 1 else ""
        for step, folder in step_paths(run.folder, "samples/step-*", args.sample_steps):
            columns.append((f"{of_run}step {step:,}", read_samples(folder)))
        for step, path in step_paths(run.folder, "answers/step-*.json", args.sample_steps):
            found = json_files.read_object(path)
            answers.append((f"{of_run}{step:,}", objects(found, "answers", path)))
        evaluations += sorted(filter(Path.is_file, run.folder.rglob("evaluation.json")))
    for folder in map(Path, args.samples):
        clips = read_samples(folder)
        need(clips, f"--samples {folder}: no .wav file in it; give a folder of generate_tts.py")
        columns.append((folder.resolve().name, clips))
    found = sum(len(samples) for _, samples in columns)
    if args.sample_count:       # the same prompts at every step: the first by name
        columns = [(label, samples[:args.sample_count]) for label, samples in columns]
    shown = sum(len(samples) for _, samples in columns)
    there = [path.resolve() for path in evaluations]
    evaluations += [path for path in map(Path, args.evaluations) if path.resolve() not in there]
    text = page(runs, columns, [read_evaluation(path) for path in evaluations], answers)
    output = runs[0].folder / ("report.html" if len(runs) == 1 else "comparison.html")
    temporary = output.with_name(f".{output.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb") as file:     # x: not through a link of this name
        file.write(text.encode("utf-8", errors="replace"))
    temporary.replace(output)       # readers see the old page or the new one
    print(f"report     {output} ({len(text) / 2**20:.1f} MiB): "
          f"{sum(len(run.rows) for run in runs)} lines of metrics, {shown} of {found} samples "
          f"(--sample_count {args.sample_count}), {len(evaluations)} evaluations")


def check_fell(run):
    """Print how a run's training loss changed, and whether it fell: -> bool. Raises UserError.

    Compared are the means over the first and the last fifth of the logged steps that have a loss.
    """
    losses = run.values("train/loss")
    need(len(losses) > 1, f"{run.folder}/metrics.jsonl holds {len(losses)} training steps with a "
                          "loss; two are needed")
    fifth = max(1, len(losses) // 5)
    first, last = statistics.fmean(losses[:fifth]), statistics.fmean(losses[-fifth:])
    print(f"train/loss {first:.3f} -> {last:.3f} {'fell' if last < first else 'DID NOT FALL'}")
    return last < first


def build_parser():
    p = flags.Parser("Write OUTPUT_DIR/report.html, one self-contained page about a run, or "
                     "comparison.html about several.")
    p.add_argument("output_dir", nargs="+", help="folder of a run; several are compared")
    add = p.add_argument
    add("--samples", nargs="+", default=[], metavar="FOLDER", help="more folders of .wav files")
    add("--sample_steps", type=int, default=5,
        help="steps whose samples or answers are shown, evenly chosen, 0 = all")
    add("--sample_count", type=int, default=8,
        help="samples shown of each step and folder, the first by name, 0 = all")
    add("--evaluations", nargs="+", default=[], metavar="FILE",
        help="evaluation.json files beside those below OUTPUT_DIR")
    flags.switch(p, "--check_fell",
                 help="print how the losses changed; exit status 1 unless the training loss fell")
    return p


def main(argv=None):
    args = flags.parse(build_parser(), argv=argv)
    try:
        flags.zero_or_more(args, "sample_steps", "sample_count")
        runs = [read_run(folder) for folder in args.output_dir]
        write_report(runs, args)
        if args.check_fell and not all([check_fell(run) for run in runs]):
            sys.exit(1)
    except OSError as error:
        sys.exit(error_text(f"error: {error.filename}: {error.strerror}"))
    except UserError as error:
        sys.exit(error_text(f"error: {error}"))


if __name__ == "__main__":
    main()
