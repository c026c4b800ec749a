"""One HTML page about a run: verdict, settings, curves, spoken samples, evaluations.

    python core/report.py output_dir            # output_dir/report.html; open it in any browser
    python core/report.py output_dir --check_fell       # exit status 1 unless the loss fell

Reads metrics.jsonl of any trainer, also during the run. The page has no scripts and loads nothing.
"""
import base64
import re
import statistics
import sys
from html import escape
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)       # instead of core/

from core import cli, json_files, metrics

NAME = r"(?:(.*)/)?(.*?)(?:_(\d+))?"     # prefix, stem and number of a metric
BEFORE = "before", "base"   # folders and evaluations with these prefixes come first
STEPS, SAMPLES = 5, 8       # most steps whose samples are shown, and most samples of a step
COLORS = "#1f6feb", "#d9480f", "#1a7f37", "#9333c0", "#b07d00", "#0b8594", "#c2255c", "#5f6b7a"
FACTS = "seconds", "seed", "ended_by", "heard", "wer", "speaker_similarity", "dnsmos"  # of a sample
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 16px; overflow-wrap: anywhere }}
.grid {{ display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)) }}
figure {{ margin: 0 }} svg, audio {{ width: 100% }} svg {{ border: 1px solid #8886 }}
td {{ padding: 3px 18px 3px 0 }} pre {{ white-space: pre-wrap; columns: 3 }}
</style><h1>{title}</h1>{body}</html>
"""


def shown(value):
    """HTML of a number, as in tables, or of a text; of None a dash."""
    text = f"{value:,.4g}" if isinstance(value, float) else str(value)
    return "–" if value is None else escape(text)


def charts(rows):
    """HTML of metrics.jsonl: charts with the ranges of both axes below. train/x and eval/x share
    one, as do x_0, x_1 and so on."""
    grouped, figures = {}, ""       # {title: {label: [(step, value)]}}
    for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
        prefix, stem, number = re.fullmatch(NAME, name, re.DOTALL).groups("")
        if curve := metrics.curve(rows, name):
            title = f"{stem} ({prefix})" if number else stem
            grouped.setdefault(title.replace("_", " "), {})[number or prefix] = curve
    for title, curves in grouped.items():
        steps, values = zip(*(point for curve in curves.values() for point in curve))
        first, last, low, high = min(steps), max(steps), min(values), max(values)
        lines = legend = ""
        for (label, curve), color in zip(curves.items(), COLORS * len(curves)):
            points = " ".join(f"{(step - first) / (last - first or 1) * 400:.1f},"
                              f"{5 + (high - value) / (high - low or 1) * 190:.1f}"
                              for step, value in curve)
            lines += f'<polyline fill="none" stroke="{color}" points="{points}"/>'
            legend += f' <span style="color:{color}">{escape(label)} {curve[-1][1]:.4g}</span>'
        figures += (f'<figure><b>{escape(title)}</b>{legend}<svg viewBox="0 0 400 200">{lines}'
                    f"</svg>{low:.4g} to {high:.4g}, steps {first:,} to {last:,}</figure>")
    return f'<div class="grid">{figures}</div>'


def samples_html(run, folders):
    """HTML of a run's samples and of --samples, a row per prompt. UserError. Links are skipped: in
    a folder of somebody else they may lead to any file."""
    rows = {}
    steps = sorted((run / "samples").glob("step-*"), key=lambda path: (len(path.name), path.name))
    steps = steps[::-max(1, -(-len(steps) // STEPS))][::-1]     # evenly spaced, with the last one
    for folder in folders:
        cli.require(any(folder.glob("*.wav")), f"--samples {folder}: no .wav file in it")
    for folder in sorted([*steps, *folders], key=lambda path: not path.name.startswith(BEFORE)):
        files = [path for path in folder.glob("*") if path.is_file() and not path.is_symlink()]
        for path in sorted(path for path in files if path.suffix == ".wav")[:SAMPLES]:
            notes = path.with_suffix(".json")
            sample = cli.remove_secrets(json_files.read_object(notes)) if notes in files else {}
            facts = " · ".join(f"{fact} {shown(sample[fact])}" for fact in FACTS
                               if sample.get(fact) is not None)
            sound = base64.b64encode(path.read_bytes()).decode()
            title = f"<h3>{escape(path.stem)}</h3><p>{shown(sample.get('text', ''))}</p>"
            rows.setdefault((path.stem, title), []).append(
                f"<figure>{escape(folder.resolve().name)}<audio controls preload=metadata "
                f'src="data:audio/wav;base64,{sound}"></audio>{facts}</figure>')
    return "".join(f'{title}<div class="grid">{"".join(figures)}</div>'
                   for (_, title), figures in sorted(rows.items()))


p = cli.Parser("Write OUTPUT_DIR/report.html, one page about a run.")
p.add_argument("output_dir", type=Path, help="folder of a run")
p.flag("--samples", [], "more folders of .wav files", nargs="+", type=Path, metavar="FOLDER")
p.switch("--check_fell", "exit with status 1 unless the training loss fell")
args = cli.parse(p)
run = args.output_dir
path, config, output = run / "metrics.jsonl", run / cli.CONFIG, run / "report.html"
cli.require(path.is_file(), f"{path}: no such file; give the --output_dir of a run")
rows = metrics.read_metrics(path)
files = sorted(run.rglob("evaluation.json"))
evaluations = map(cli.remove_secrets, map(json_files.read_object, files))
columns = [{"": e["name"], "verdict": e.get("verdict", "")} | e["metrics"] for e in evaluations]
columns.sort(key=lambda column: not column[""].startswith(BEFORE))
clauses = metrics.verdict(rows) + [
    f"{column['']}: word errors {metrics.percent(column['wer'])}" for column in columns
    if column.get("wer") is not None]
clauses = "".join(f"<li>{escape(clause[0].upper() + clause[1:])}." for clause in clauses)
table = "".join(
    f"<tr><td>{escape(name)}" + "".join(f"<td>{shown(column.get(name))}" for column in columns)
    for name in dict.fromkeys(name for column in columns for name in column))
flags = cli.remove_secrets(json_files.read_text(config)) if config.is_file() else ""
parts = {"Verdict": f"<ul>{clauses}</ul>", "Settings": flags and f"<pre>{escape(flags)}</pre>",
         "Curves": charts(rows), "Samples": samples_html(run, args.samples),
         "Evaluation": table and f"<table>{table}</table>"}
body = "".join(f"<h2>{name}</h2>{content}" for name, content in parts.items() if content)
page = PAGE.format(title=escape(run.resolve().name), body=body)
temporary = run / ".report.html.tmp"
temporary.unlink(missing_ok=True)       # it may be a link to another file
temporary.write_text(page, encoding="utf-8", errors="replace")
temporary.replace(output)
print(f"report     {output} ({len(page) / 2**20:.1f} MiB): {len(rows)} lines of metrics")
if args.check_fell:     # compares the means of the first and the last fifth
    losses = [value for _, value in metrics.curve(rows, "train/loss")]
    cli.require(len(losses) > 1, f"{path} holds {len(losses)} training steps with a loss")
    fifth = max(1, len(losses) // 5)
    first, last = statistics.fmean(losses[:fifth]), statistics.fmean(losses[-fifth:])
    cli.require(last < first, f"train/loss {first:.3f} -> {last:.3f} DID NOT FALL")
    print(f"train/loss {first:.3f} -> {last:.3f} fell")
