"""One self-contained HTML page about a run: curves, speed, memory, samples to hear, checkpoints, settings.

    python common/report.py output_dir                     # writes output_dir/report.html; open it in any browser
    python common/report.py out_a out_b                    # both runs in one page: out_a/comparison.html
    python common/report.py output_dir --samples spoken --evaluations judged/evaluation.json
    python common/report.py output_dir --check_fell        # and exit status 1 unless the training loss fell

Nothing is loaded from elsewhere: curves are drawn by the page itself, audio and pictures are inside it, and the page
forbids itself any network. It may be written while the run goes on, and for any trainer's metrics.jsonl: metrics are
grouped by name, and a name that is not known gets a plot of its own. Standard library only.
"""
import base64
import hashlib
import json
import math
import os
import re
import statistics
import sys
import time
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags, report_files, verdict
from common.flags import UserError
from common.report_curves import SECTIONS, panels
from common.text import error_text

NOTICE_BYTES = 30 * 2**20     # of a page, from which on it is slow to open and send
FACTS = {"wer": "word errors {:.0%}", "speaker_similarity": "likeness {:.2f}", "dnsmos": "DNSMOS {:.1f}",
         "seconds": "{:.2f} s", "frames": "{} frames", "seed": "seed {}", "real_time_factor": "real-time factor {:.2f}"}


class Raw(str):
    """HTML as it is; every other text is escaped."""


def html(value):
    return value if isinstance(value, Raw) else Raw(escape(str(value)))


def table(head, rows, attributes=""):
    """Rows of cells (text, or Raw) -> one HTML table that scrolls by itself on a narrow screen."""
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html(cell)}</{tag}>" for cell in cells) + "</tr>"
    body = "".join(line(cells, "td") for cells in rows)
    return Raw(f'<div class="wide"><table {attributes}><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table>'
               "</div>")


def details(title, content):
    return Raw(f"<details><summary>{html(title)}</summary>{content}</details>")


def number(value, digits=5):
    """A number for people; what is missing or not finite is a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if isinstance(value, int) or (value == round(value) and abs(value) >= 10 ** digits):
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}" if 1e-3 <= abs(value) < 10 ** digits or value == 0 else f"{value:.3e}"


def size(count):
    """Bytes in words."""
    for unit, worth in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= worth:
            return f"{count / worth:.1f} {unit}"
    return f"{count} bytes"


def duration(seconds):
    """Seconds as 1:02:03."""
    if not math.isfinite(seconds):
        return "–"
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def moment(seconds):
    """Seconds since 1970 as a date; of what is no time of this calendar a dash."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError, TypeError):
        return "–"


def data_uri(path):
    """Bytes of a .png or of a clip as a data: URI; its kind is not left to the machine's own list of them."""
    kind = report_files.PLAYABLE.get(path.suffix.lower(), "image/png")
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the page


def summary(run, now, evaluations):
    """Verdict and tiles of one run. evaluations: those of report_files.read_evaluation that are about it."""
    word, sentence = report_files.state(run, now)
    total, speed = report_files.total_steps(run), run.curve("train/throughput")[1]
    steps, seconds = run.curve("train/step_seconds")
    between = [step - before for before, step in zip([0, *steps], steps)]
    spent = sum(count * value for count, value in zip(between, seconds) if value)
    waited = sum(value for value in run.curve("train/data_wait_seconds")[1] if value)
    tiles = [("State", Raw(f'<b class="state {word}">{word}</b>'), sentence),
             ("Step", f"{run.step:,}", f"of {total:,}" if total else "")]
    for name, title in (("train/loss", "Training loss"), ("eval/loss", "Validation loss")):
        at, values = run.curve(name)
        finite = [(value, step) for step, value in zip(at, values) if value is not None]
        if finite:
            best, best_at = min(finite)
            tiles.append((title, number(finite[-1][0], 4), f"first {number(finite[0][0], 4)}" if "train" in name else
                          f"best {number(best, 4)} at step {best_at:,}"))
    if speed := [value for value in speed if value is not None]:
        tiles.append(("Throughput", f"{statistics.median(speed):,.0f} tok/s", "median over log lines"))
    if spent:
        tiles.append(("Time in steps", duration(spent), f"{waited / spent:.1%} of it waiting for data"))
    if memory := [value for value in run.curve("train/memory_gib")[1] if value is not None]:
        tiles.append(("Peak memory", f"{max(memory):.2f} GiB", "rank 0"))
    resumed = [start["step"] for start in run.starts if start.get("step")]
    ranks = [str(start.get("ranks", "?")) for start in run.starts]
    if run.starts:
        tiles.append(("Ranks", ranks[-1], f"{len(run.starts)} starts" + (f"; {', '.join(ranks)} ranks" if
                      len(set(ranks)) > 1 else "") if len(run.starts) > 1 else "one start"))
        tiles.append(("Resumed at", ", ".join(f"{step:,}" for step in resumed[-3:]) or "never",
                      f"{len(resumed)} times" if len(resumed) > 1 else ""))
    if model := run.args.get("model_path") or run.args.get("model_size"):
        what = "LoRA" if run.args.get("use_lora") else "full fine-tuning" if "use_lora" in run.args else ""
        tiles.append(("Model", "/".join(Path(str(model)).parts[-2:]), what))
    cells = "".join(f"<div><dt>{html(title)}</dt><dd>{html(value)}</dd><small>{html(note)}</small></div>"
                    for title, value, note in tiles)
    clauses = "".join(f"<li>{html(clause[0].upper() + clause[1:])}.</li>"
                      for clause in verdict.verdict(run.rows, evaluations))
    return Raw(f'<p class="path">{html(run.folder.resolve())}</p><ul class="verdict">{clauses}</ul>'
               f'<dl class="tiles">{cells}</dl>')


def sample_cell(label, sample):
    """Player, mel picture and facts of one sample."""
    facts = sample.facts
    line = [text.format(facts[key]) for key, text in FACTS.items() if isinstance(facts.get(key), (int, float))]
    ends = {"eos": '<span class="good">ended by itself</span>', "length": '<span class="bad">cut off by length</span>'}
    ended = ends.get(facts.get("ended_by"), "")
    picture = (f'<img loading="lazy" alt="mel spectrogram of {html(sample.name)}, {html(label)}" '
               f'src="{data_uri(sample.picture)}">' if sample.picture else "")
    return (f'<figure class="sample" data-name="{html(sample.name)}"><figcaption>{html(label)} {ended}</figcaption>'
            f'<audio controls preload="metadata" src="{data_uri(sample.audio)}"></audio>{picture}'
            f"<small>{html(' · '.join(line))}</small>"
            + (f"<small><br>heard: {html(facts['heard'] or 'nothing')}</small>" if "heard" in facts else "")
            + "</figure>")


def sample_rows(columns):
    """The same prompt, name and text, of every step or folder side by side.

    columns: [(row, label, [Sample])]; a row is a run's. A sample of unknown text stands with the first of its name.
    """
    texts, rows = {}, {}
    for *_, samples in columns:
        for sample in samples:
            if sample.facts.get("text"):
                texts.setdefault(sample.name, str(sample.facts["text"]))
    for row, label, samples in columns:
        for sample in samples:
            text = str(sample.facts.get("text") or texts.get(sample.name, ""))
            rows.setdefault((sample.name, text), {}).setdefault(row, []).append((label, sample))
    parts = []
    for name, heading in sorted(rows, key=lambda prompt: report_files.natural(prompt[0])):
        prompt_rows = rows[name, heading]
        cells = [cell for row in prompt_rows.values() for cell in row]
        reference = next((sample.reference for _, sample in cells if sample.reference), None)
        prompt = next((str(sample.facts["prompt"]) for _, sample in cells if sample.facts.get("prompt")), "")
        voice = (f'<p class="reference">reference voice: {html(reference.name)}'
                 f'<audio controls preload="metadata" src="{data_uri(reference)}"></audio></p>' if reference else "")
        parts.append(f"<h3>{html(name)}</h3><blockquote>{html(heading)}</blockquote>"
                     + (f'<p class="path">prompt: {html(prompt)}</p>' if prompt and prompt != heading else "") + voice
                     + "".join(f'<div class="samples">{"".join(sample_cell(*cell) for cell in row)}</div>'
                               for row in prompt_rows.values()))
    return Raw("".join(parts))


def answer_rows(columns):
    """Each problem with its answers at several steps, one behind the other; blocks are set apart.

    columns: [(label, [answer])], answers as report_files.answer_steps has them.
    """
    found = {}
    for label, answers in columns:
        for answer in answers:
            problem = str(answer.get("question", "")), str(answer.get("answer", ""))
            found.setdefault(problem, []).append((label, answer))
    parts = []
    for (question, right), rows in found.items():
        lines = [[label, Raw('<b class="good">right</b>' if answer.get("strict") else '<b class="bad">wrong</b>'),
                  grown(answer)] for label, answer in rows]
        parts.append(f"<blockquote>{html(question)} <b>{html(right)}</b></blockquote>"
                     + table(["step", "", "answer, block by block"], lines, 'class="answers"'))
    return Raw("".join(parts))


def grown(answer):
    """The text of an answer as HTML, the blocks it was written in side by side; hdp's plan comes first."""
    parts, before = [], {}
    for part, text in answer.get("growth", []):
        parts.append(f'<span class="block">{html(text[len(before.get(part, "")):])}</span>')
        before[part] = text
    return Raw(" ".join(parts) or html(answer.get("text", "")))


def evaluation_tables(evaluations):
    """Verdicts; metrics as rows, evaluations as columns; their samples and settings folded away."""
    names = list(dict.fromkeys(name for found in evaluations for name in found["metrics"]))
    parts = [f'<p class="verdict">{html(found["name"])}: {html(found["verdict"])}</p>' for found in evaluations
             if found["verdict"]]
    parts += [table(["metric", *(found["name"] for found in evaluations)],
                    [[name, *(number(found["metrics"].get(name)) for found in evaluations)] for name in names],
                    'id="evaluations"')]
    for found in evaluations:
        keys = list(dict.fromkeys(key for row in found["samples"] for key in row))
        rows = [[number(row.get(key)) if isinstance(row.get(key), (int, float, type(None))) else row[key]
                 for key in keys] for row in found["samples"]]
        settings = [[key, json.dumps(value, ensure_ascii=False)] for key, value in found["settings"].items()]
        parts.append(details(f"{found['name']}: {f'{len(rows)} samples' if rows else 'settings'}, {found['path']}",
                             (table(keys, rows) if rows else "") + (table(["setting", "value"], settings)
                                                                    if settings else "")))
    return Raw("".join(parts))


def checkpoint_table(run):
    """Step, losses, size, time and whether each checkpoint is whole."""
    losses = [dict(zip(*run.curve(name))) for name in ("train/loss", "eval/loss")]
    rows = [[Raw(f"{found['step']:,}" + (' <b class="good">best</b>' if found["step"] == run.best_step else "")),
             *(number(loss.get(found["step"])) for loss in losses), size(found["bytes"]), moment(found["time"]),
             Raw(f'<span class="bad">damaged: {html(found["wrong"])}</span>' if found["wrong"] else
                 "not readable for this user" if found["closed"] else '<span class="good">whole</span>')]
            for found in run.checkpoints]
    return table(["step", "training loss", "validation loss", "size", "saved", "sizes of its files"], rows,
                 'class="checkpoints"') if rows else Raw("<p>none yet</p>")


def numbers_table(runs):
    """First, smallest, largest and last value of every metric."""
    rows = []
    for run in runs:
        for name in run.metrics():
            values = [value for value in run.curve(name)[1] if value is not None]
            cells = (values[0], min(values), max(values), values[-1]) if values else [None] * 4
            rows.append([*([run.name] if len(runs) > 1 else []), name, len(values), *map(number, cells)])
    head = ["metric", "values", "first", "smallest", "largest", "last"]
    return table([*(["run"] if len(runs) > 1 else []), *head], rows, 'id="numbers"')


def settings_table(runs):
    """Every flag; in a comparison those that differ come first."""
    names = list(dict.fromkeys(name for run in runs for name in run.args))
    rows = [[name, *(json.dumps(run.args[name], ensure_ascii=False) if name in run.args else "–" for run in runs)]
            for name in names]
    different = [row for row in rows if len(set(row[1:])) > 1]
    same = [row for row in rows if len(set(row[1:])) == 1]
    head = ["flag", *(run.name if len(runs) > 1 else "value" for run in runs)]
    parts = [table(head, different, 'id="different"')] if different else []
    return Raw("".join(parts) + details(f"{len(same)} flags" + (" alike" if len(runs) > 1 else ""),
                                        table(head, same, 'id="settings"')))


def starts_table(run):
    rows = [[moment(start.get("time", "")),
             *(start.get(key, "–") for key in ("step", "ranks", "host"))] for start in run.starts]
    return table(["started", "from step", "ranks", "host"], rows, 'class="starts"') if rows else Raw()


# ---------------------------------------------------------------------------------------------------------------------
# The page


def page(runs, sample_columns, evaluations, left_out="", now=None, answer_columns=()):
    """The whole HTML text. sample_columns: [(row, label, [Sample])]; left_out: a sentence on samples not among them;
    answer_columns: as answer_rows has them.
    """
    drawn = panels(runs)
    content = {section: [f'<figure class="chart" data-panel="{place}"></figure>'
                         for place, panel in enumerate(drawn) if panel["section"] == section] for section in SECTIONS}
    parts = {section: Raw(f'<div class="charts">{"".join(figures)}</div>')
             for section, figures in content.items() if figures}
    if any(samples for *_, samples in sample_columns):
        note = f'<p class="path" id="left-out">{html(left_out)}</p>' if left_out else ""
        parts["Samples"] = Raw(note + sample_rows(sample_columns))
    if answer_columns:
        parts["Answers"] = Raw(parts.get("Answers", "") + answer_rows(answer_columns))
    if evaluations:
        parts["Evaluation"] = evaluation_tables(evaluations)
    parts = {section: parts[section] for section in SECTIONS if section in parts}
    if not drawn:
        parts["Loss"] = Raw("<p>nothing logged yet</p>")

    def named(run, tag, content):
        return f"<{tag}>{html(run.name)}</{tag}>{content}" if content and len(runs) > 1 else content

    def of_run(run):
        return [found for found in evaluations if len(runs) == 1 or run.folder.resolve() in
                found["path"].resolve().parents]

    def per_run(make):
        return Raw("".join(named(run, "h3", make(run)) for run in runs))
    parts["Checkpoints"] = per_run(checkpoint_table)
    parts["Numbers"] = details("every metric: first, smallest, largest, last", numbers_table(runs))
    parts["Settings"] = Raw(settings_table(runs) + per_run(starts_table))
    title = " and ".join(run.name for run in runs)
    links = "".join(f'<a href="#{escape(name.replace(" ", "-"))}">{escape(name)}</a>' for name in parts)
    body = "".join(f'<section id="{escape(name.replace(" ", "-"))}"><h2>{escape(name)}</h2>{content}</section>'
                   for name, content in parts.items())
    values = {"title": escape(title), "links": links, "made": moment(time.time() if now is None else now),
              "body": body, "summary": "".join(
                  f'<section class="run">{named(run, "h2", summary(run, now, of_run(run)))}</section>' for run in runs),
              "data": json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")}
    template = (Path(__file__).resolve().parent / "report_page.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    # the only script that the page allows to run
    values["script"] = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def write_atomically(path, text):
    """Readers see the old page or the new one."""
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        temporary.write_bytes(text.encode("utf-8", errors="replace"))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_fell(run):
    """Print how a run's training losses changed; True if train/loss fell.

    Compared are means over the first and the last fifth of the logged steps that have a loss. Raises UserError when
    fewer than two have one.
    """
    rows = [row for row in run.rows if row.get("train/loss") is not None]       # null: not finite, or no step counted
    if len(rows) < 2:
        raise UserError(f"{run.folder}/metrics.jsonl holds {len(rows)} training steps with a loss; two are needed")
    fifth, fell = max(1, len(rows) // 5), {}
    for name in ("train/loss", "train/audio_loss", "train/text_loss"):
        if all(row.get(name) is not None for row in rows) and any(row[name] for row in rows):       # 0: not trained
            first, last = (statistics.fmean(row[name] for row in part) for part in (rows[:fifth], rows[-fifth:]))
            fell[name] = last < first
            print(f"{name:<17} {first:7.3f} -> {last:7.3f} {'fell' if fell[name] else 'DID NOT FALL'}")
    return fell.get("train/loss", False)


def write_report(runs, output, samples, sample_steps, sample_count, evaluations):
    """Write the page and say what is in it. runs: report_files.Run; samples: folders; evaluations: files.

    output: the page's path, or None: in the first run's folder. The other two: as the flags. Raises UserError.
    """
    for run in runs:        # names tell the runs apart
        if [other.name for other in runs].count(run.name) > 1:
            run.name = str(run.folder)
    columns = [(place, f"{run.name} · step {step:,}" if len(runs) > 1 else f"step {step:,}",
                report_files.read_samples(folder))
               for place, run in enumerate(runs)
               for step, folder in report_files.sample_steps(run.folder, sample_steps)]
    for folder in map(Path, samples):
        if not (clips := report_files.read_samples(folder)):
            raise UserError(f"--samples {folder}: no .wav file in it; give a folder that generate_tts.py wrote")
        columns.append((0 if len(runs) == 1 else len(runs), folder.resolve().name, clips))
    answers = [(f"{run.name} · {step:,}" if len(runs) > 1 else f"{step:,}", found) for run in runs
               for step, found in report_files.answer_steps(run.folder, sample_steps)]
    found = sum(len(samples) for *_, samples in columns)
    if sample_count:       # the same prompts at every step: the first by name
        columns = [(row, label, sorted(clips, key=lambda clip: report_files.natural(clip.name))[:sample_count])
                   for row, label, clips in columns]
    shown = sum(len(samples) for *_, samples in columns)
    left_out = (f"{found - shown} of {found} samples left out: of each step and folder the first {sample_count} "
                "are shown (--sample_count, 0 = all)" if shown < found else "")
    files = [path for run in runs for path in sorted(run.folder.rglob("evaluation.json"))]
    files += [path for path in map(Path, evaluations) if path.resolve() not in [file.resolve() for file in files]]
    evaluations = [report_files.read_evaluation(path) for path in files]
    output = Path(output or runs[0].folder / ("report.html" if len(runs) == 1 else "comparison.html"))
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}")
    text = page(runs, columns, evaluations, left_out, answer_columns=answers)
    write_atomically(output, text)
    print(f"report     {output} ({size(output.stat().st_size)}): {sum(len(run.rows) for run in runs)} lines of "
          f"metrics, {shown} samples, {len(evaluations)} evaluations" + (f"; {left_out}" if left_out else ""))
    if output.stat().st_size > NOTICE_BYTES:
        print(f"notice: {output} is large ({size(output.stat().st_size)}): a smaller --sample_steps (now "
              f"{sample_steps}) or --sample_count (now {sample_count}) puts fewer samples into it, 0 = all")


def build_parser():
    p = flags.Parser("Write one self-contained HTML page about a run, or several.")
    p.add_argument("output_dir", nargs="+", help="folder of a run; several are compared")
    p.add_argument("--output", metavar="FILE", help="the page (default: OUTPUT_DIR/report.html, or comparison.html)")
    p.add_argument("--samples", nargs="+", default=[], metavar="FOLDER", help="more folders of generated .wav files")
    p.add_argument("--sample_steps", type=int, default=5,
                   help="steps of a run whose samples or answers are shown, evenly chosen from first to last, 0 = all")
    p.add_argument("--sample_count", type=int, default=8,
                   help="samples shown of each step and of each folder of --samples, the first by name, 0 = all")
    p.add_argument("--evaluations", nargs="+", default=[], metavar="FILE",
                   help="evaluation.json files beside those below OUTPUT_DIR")
    flags.switch(p, "--check_fell", help="print how the losses changed; exit status 1 unless the training loss fell")
    return p


def main(argv=None):
    args = flags.parse(build_parser(), lambda args, _: flags.zero_or_more(args, "sample_steps", "sample_count"), argv)
    try:
        runs = [report_files.read_run(folder) for folder in args.output_dir]
        write_report(runs, args.output, args.samples, args.sample_steps, args.sample_count, args.evaluations)
        if args.check_fell and not all([check_fell(run) for run in runs]):
            sys.exit(1)
    except OSError as error:
        sys.exit(error_text(f"error: {error.filename}: {error.strerror}"))
    except UserError as error:
        sys.exit(error_text(f"error: {error}"))


if __name__ == "__main__":
    main()
