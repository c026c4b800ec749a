"""What evaluate_sft.py has found, for people: the table side by side, all tables, confusion matrices as pictures.

systems: {column: {"parsed", "agreement", "accuracy", "no_label", "most_confused", "speed", ...}} as evaluate_sft.judge
gives them. Own module of evaluate_sft.py. Copy with it: scores.py checkpoint.py and what those name.
"""
import numpy as np

from common import checkpoint
from distill import scores


def cell(value):
    """A share with its interval as text."""
    if value is None or value["share"] is None:
        return "-"
    return f"{100 * value['share']:.1f}% ({100 * value['low']:.1f}-{100 * value['high']:.1f})"


def number(value, digits):
    """A number as text, "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def side_by_side(systems, teacher, batch):
    """Lines of the table: a row a metric, a column for the teacher and each model."""
    def row(name, teachers, value):
        return [name, *[teachers] * bool(teacher), *map(value, systems.values())]

    rows = [["", *["teacher"] * bool(teacher), *systems],
            row("agreement with the teacher", "", lambda s: cell(s["agreement"]))]
    if teacher:
        rows += [row("accuracy against the truth", cell(teacher), lambda s: cell(s["accuracy"])),
                 row("right where the teacher is wrong", "", lambda s: cell(s["right_where_teacher_is_wrong"]))]
    key = "accuracy" if teacher else "agreement"
    rows += [row(f"macro F1 of the {key}", number(teacher["macro_f1"], 3) if teacher else "",
                 lambda s: number(s[key]["macro_f1"], 3)),
             row("answers with a label", "", lambda s: cell(s["parsed"])),
             row("tokens in, a line", "", lambda s: f"{s['speed']['tokens_in']:,.1f}"),
             row("tokens out, a line", "", lambda s: f"{s['speed']['tokens_out']:,.1f}"),
             row("seconds a line, one at a time", "", lambda s: number(s["speed"]["seconds_per_line_alone"], 4)),
             row(f"lines a second, {batch}", "", lambda s: f"{s['speed']['lines_per_second']:,.1f}")]
    widths = [max(len(line[i]) for line in rows) for i in range(len(rows[0]))]
    return [f"{line[0]:<{widths[0]}}" + "".join(f"  {text:>{width}}" for text, width in zip(line[1:], widths[1:]))
            for line in rows]


def make_notes(report):
    """Lines with what a reader of the table must know. report: the contents of evaluation.json."""
    data, notes = report["data"], []
    if data["leaked_lines_left_out"]:
        notes.append(f"{data['leaked_lines_left_out']:,} lines left out: their text was trained as well")
    if data["evaluated_lines"] < data["held_out_lines"] - data["leaked_lines_left_out"]:
        notes.append(f"{data['evaluated_lines']:,} of the lines were drawn by --seed {report['settings']['seed']}")
    if data["rejected_lines"]:
        known = f"; the truth is known for {data['rejected_lines_with_truth']:,} of them" if report["teacher"] else ""
        notes.append(f"{data['rejected_lines']:,} further lines have no teacher label and are in no number{known}")
    if report["teacher"] and report["teacher"]["n"] < data["evaluated_lines"]:
        notes.append(f"accuracy is over the {report['teacher']['n']:,} lines whose truth is known")
    for name, system in report["systems"].items():
        if system["no_label"]:
            notes.append(f"{name}: no label in {sum(system['no_label'].values()):,} answers: "
                         + ", ".join(f"{n:,} {why}" for why, n in list(system["no_label"].items())[:4]))
    notes.append("in brackets: 95 % Wilson interval of the share, lines taken as independent")
    return [f"note       {note}" for note in notes]


def confused_lines(rows):
    """Lines on the most confused labels, a text each."""
    return [f"{row['wanted']:>8} -> {row['given'] or 'none':<8} {row['lines']:>5,}   "
            f"{' '.join(row['examples'][0]['text'].split())[:80]}" for row in rows]


def detail_lines(systems, labels, truth):
    """Lines of all tables of every column."""
    lines = []
    for name, system in systems.items():
        for key, what in (("agreement", "teacher"), ("accuracy", "truth")):
            if system[key]:
                lines += ["", f"{name} against the {what}: {system[key]['right']:,} of {system[key]['n']:,}", "",
                          *scores.label_lines(system[key]["labels"]), "",
                          *scores.confusion_lines(system[key]["confusion"], labels, f"{what} \\ {name}")]
        if system["most_confused"]:
            lines += ["", f"{name}: most confused ({'truth' if truth else 'teacher'} -> answer, lines, one of them)",
                      *confused_lines(system["most_confused"])]
        if system["no_label"]:
            lines += ["", f"{name}: answers without a label",
                      *(f"{n:>8,}   {why}" for why, n in system["no_label"].items())]
    return lines


def draw(path, name, system, labels):
    """Confusion matrices as a picture: counts, shaded by their share of the row; a panel each for teacher and truth."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    panels = [(key, what) for key, what in (("agreement", "teacher"), ("accuracy", "truth")) if system[key]]
    size = 2 + 0.35 * len(labels)
    figure, axes = plt.subplots(1, len(panels), figsize=(size * len(panels), size), squeeze=False)
    for axis, (key, what) in zip(axes[0], panels):
        matrix = np.array(system[key]["confusion"])
        shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
        axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for i, j in zip(*np.nonzero(matrix)):
            axis.text(j, i, matrix[i, j], ha="center", va="center", fontsize=7,
                      color="white" if shares[i, j] > 0.5 else "black")
        axis.axvline(len(labels) - 0.5, color="grey", linewidth=0.7)
        axis.set(title=f"{name} against the {what}: {cell(system[key])}", xlabel=name, ylabel=what)
        axis.set_xticks(range(len(labels) + 1), [*labels, scores.none_name(labels)], rotation=90)
        axis.set_yticks(range(len(labels)), labels)
        axis.title.set_fontsize(8)
    figure.tight_layout()
    checkpoint.write_atomically(path, lambda file: figure.savefig(file, dpi=120, format="png"))
    plt.close(figure)
