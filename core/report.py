"""One HTML page about a run: verdict, settings, curves, spoken samples, evaluations.

    python core/report.py output_dir            # output_dir/report.html; open it in any browser
    python core/report.py output_dir --samples before after
    python core/report.py output_dir --check_fell       # exit status 1 unless the loss fell

Reads metrics.jsonl of any trainer, also during the run. The page has no scripts and loads nothing.
"""
import base64
import re
import statistics
import sys
import time
from html import escape
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)       # instead of core/

from core import cli, json_files, metrics
from core.cli import UserError, require

WIDTH, HEIGHT, LEFT = 420, 200, 70
BEFORE = "before", "base"   # folders and evaluations with these prefixes come first
STEPS, SAMPLES = 5, 8       # most steps whose samples are shown, and most samples of a step
COLORS = "#1f6feb", "#d9480f", "#1a7f37", "#9333c0", "#b07d00", "#0b8594", "#c2255c", "#5f6b7a"
FACTS = "seconds", "seed", "ended_by", "heard", "wer", "speaker_similarity", "dnsmos"  # of a sample
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"><style>
:root {{ color-scheme: light dark }} small, figcaption {{ color: #808894 }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1300px; margin: auto; padding: 0 16px;
  overflow-wrap: anywhere }} h2 {{ margin-top: 36px; border-bottom: 1px solid #8886 }}
.grid {{ display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)) }}
figure {{ margin: 0; min-width: 0 }} svg {{ width: 100%; font-size: 12px; fill: #808894 }}
td {{ padding: 3px 18px 3px 0; border-top: 1px solid #8886; overflow-wrap: break-word }}
audio {{ display: block; width: 100% }} .wide {{ overflow-x: auto }}
blockquote {{ margin: 0 0 8px; white-space: pre-line }}
pre {{ columns: 340px; white-space: pre-wrap }}
</style><h1>{title}</h1><small>made {made}</small>{body}</html>
"""


def natural_key(text):
    """Sort key that orders numbers in a name by value."""
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", text)]


def read_evaluations(run):
    """[{"name", "metrics", ...}] of the evaluation.json files in a folder. Raises UserError."""
    evaluations = []
    for path in filter(Path.is_file, sorted(run.rglob("evaluation.json"))):
        evaluation = cli.remove_secrets(json_files.read_object(path))
        evaluations.append(evaluation | {"name": str(evaluation.get("name", path.parent.name))})
    return sorted(evaluations, key=lambda evaluation: not evaluation["name"].startswith(BEFORE))


def evaluation_table(evaluations):
    """HTML table with a row for each metric and a column for each evaluation."""
    rows = [["", *(evaluation["name"] for evaluation in evaluations)],
            ["verdict", *(evaluation.get("verdict", "") for evaluation in evaluations)]]
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation["metrics"])
    for name in names:
        values = [evaluation["metrics"].get(name) for evaluation in evaluations]
        rows.append([name, *("–" if value is None else f"{value:,.4g}" if isinstance(value, float)
                             else value for value in values)])
    lines = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in row) for row in rows)
    return f'<div class="wide"><table>{lines}</table></div>'


def chart(title, curves):
    """<figure> of {label: [(step, value)]}."""
    steps, values = zip(*(point for curve in curves.values() for point in curve))
    first, last, low, high = min(steps), max(steps), min(values), max(values)

    def x(step):
        return round(LEFT + (step - first) / (last - first or 1) * (WIDTH - LEFT - 8), 1)

    def y(value):
        return round(10 + (high - value) / (high - low or 1) * (HEIGHT - 40), 1)
    parts = [f'<text x="{LEFT}" y="{HEIGHT - 8}">step {first:,}</text><text x="{WIDTH - 8}" '
             f'y="{HEIGHT - 8}" text-anchor="end">{last:,}</text>']
    parts += [f'<path d="M{LEFT} {y(value)}H{WIDTH - 8}" stroke="#8886"/><text x="{LEFT - 6}" '
              f'y="{y(value) + 4}" text-anchor="end">{value:.4g}</text>'
              for value in (low, (low + high) / 2, high)]
    legend = ""
    for (label, curve), color in zip(curves.items(), COLORS * len(curves)):
        line = " ".join(f"{x(step)},{y(value)}" for step, value in curve)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{line}"/>')
        legend += f' <span style="color:{color}">{escape(label)} {curve[-1][1]:.4g}</span>'
    return (f'<figure><b>{escape(title)}</b> <small>{legend}</small><svg role="img" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg></figure>')


def charts(rows):
    """HTML of metrics.jsonl. train/x and eval/x share a chart, as do x_0, x_1 and so on."""
    curves = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
        prefix, _, rest = name.rpartition("/")
        stem, number = re.fullmatch(r"(.*?)(?:_(\d+))?", rest, re.DOTALL).groups()
        if curve := metrics.curve(rows, name):
            title = f"{stem} ({prefix})" if number else stem
            curves.setdefault(title.replace("_", " "), {})[number or prefix] = curve
    figures = "".join(chart(title, lines) for title, lines in curves.items())
    return figures and f'<div class="grid">{figures}</div>'


def read_samples(folder, label):
    """Yield (prompt, text, HTML) of a folder's first .wav files by name. Links to files elsewhere
    are skipped, as the folder may come from somebody else."""
    def is_inside(path):
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    waves = sorted(filter(is_inside, folder.glob("*.wav")), key=lambda path: natural_key(path.stem))
    for path in waves[:SAMPLES]:
        notes = path.with_suffix(".json")
        sample = cli.remove_secrets(json_files.read_object(notes)) if is_inside(notes) else {}
        facts = {name: sample[name] for name in FACTS if sample.get(name) is not None}
        words = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                 for name, value in facts.items()]
        sound = base64.b64encode(path.read_bytes()).decode()
        yield path.stem, str(sample.get("text", "")), (
            f'<figure><figcaption>{escape(label)}</figcaption><audio controls preload="metadata" '
            f'src="data:audio/wav;base64,{sound}"></audio>'
            f'<small>{escape(" · ".join(words))}</small></figure>')


def samples_html(run, folders):
    """HTML of a run's samples and of --samples, a row per prompt. UserError."""
    steps = sorted((run / "samples").glob("step-*"), key=lambda path: natural_key(path.name))
    steps = steps[::-max(1, -(-len(steps) // STEPS))][::-1]     # evenly spaced, with the last one
    for folder in folders:
        require(any(folder.glob("*.wav")), f"--samples {folder}: no .wav file in it")
    labels, rows = {path: path.name.replace("-", " ") for path in steps}, {}
    labels |= {path: path.resolve().name for path in folders}
    for folder in sorted(labels, key=lambda folder: not labels[folder].startswith(BEFORE)):
        for prompt, text, cell in read_samples(folder, labels[folder]):
            rows.setdefault((prompt, text), []).append(cell)
    return "".join(
        f"<h3>{escape(name)}</h3><blockquote>{escape(text)}</blockquote>"
        f'<div class="grid">{"".join(rows[name, text])}</div>'
        for name, text in sorted(rows, key=lambda row: natural_key(row[0])))


# ---- Command


def write_report(run, rows, folders):
    """Write the page of a run and print a line about it. folders: of --samples. UserError."""
    evaluations = read_evaluations(run)
    saved = [path.parent.name for path in run.glob("checkpoint-*/manifest.json")]
    config = run / cli.CONFIG
    flags = cli.remove_secrets(json_files.read_text(config)) if config.is_file() else ""
    clauses = "".join(f"<li>{escape(clause[0].upper() + clause[1:])}."
                      for clause in metrics.verdict(rows, evaluations))
    last = max((row["step"] for row in rows), default=0)
    parts = {"Verdict": f"<ul>{clauses}</ul>last logged step {last:,}; checkpoints: "
             f"{', '.join(sorted(saved, key=natural_key)) or 'none yet'}",
             "Settings": flags and f"<pre>{escape(flags)}</pre>", "Curves": charts(rows),
             "Samples": samples_html(run, folders),
             "Evaluation": evaluations and evaluation_table(evaluations)}
    page = PAGE.format(title=escape(run.resolve().name), made=time.strftime("%Y-%m-%d %H:%M"),
                       body="".join(f"<h2>{name}</h2>{content}" for name, content in parts.items()
                                    if content))
    output, temporary = run / "report.html", run / ".report.html.tmp"
    temporary.unlink(missing_ok=True)       # it may be a link to another file
    temporary.write_text(page, encoding="utf-8", errors="replace")
    temporary.replace(output)
    print(f"report     {output} ({len(page) / 2**20:.1f} MiB): {len(rows)} lines of metrics")


if __name__ == "__main__":
    p = cli.Parser("Write OUTPUT_DIR/report.html, one page about a run.")
    p.add_argument("output_dir", type=Path, help="folder of a run")
    p.flag("--samples", [], "more folders of .wav files", nargs="+", type=Path, metavar="FOLDER")
    p.switch("--check_fell", "exit with status 1 unless the training loss fell")
    args = cli.parse(p)
    path = args.output_dir / "metrics.jsonl"
    try:
        require(path.is_file(), f"{path}: no such file; give the --output_dir of a run")
        rows = metrics.read_metrics(path)
        write_report(args.output_dir, rows, args.samples)
        if args.check_fell:     # compares the means of the first and the last fifth
            losses = [value for _, value in metrics.curve(rows, "train/loss")]
            require(len(losses) > 1, f"{path} holds {len(losses)} training steps with a loss")
            fifth = max(1, len(losses) // 5)
            first, last = statistics.fmean(losses[:fifth]), statistics.fmean(losses[-fifth:])
            how = "fell" if last < first else "DID NOT FALL"
            print(f"train/loss {first:.3f} -> {last:.3f} {how}")
            sys.exit(how != "fell")
    except (OSError, UserError) as error:
        cli.fail(error)
