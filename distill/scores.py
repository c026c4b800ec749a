"""How well labels fit labels: shares with their error, precision and recall, confusion; the same as text.

wanted: the right label of each line. given: the label in the answer, or None where the answer holds none; None is never
right and has the last column of the confusion matrix. systems: {column: {"parsed", "agreement", "accuracy",
"no_label", "speed", ...}} as evaluate_sft.judge returns them.
"""
import json
import math
import re
from pathlib import Path

import numpy as np

from common import checkpoint

WORD = re.compile(r"\w+|[^\w\s]")
Z95 = 1.959963984540054     # of a normal distribution 95 % lie within so many standard deviations


def wilson(right, n, z=Z95):
    """(low, high) bounds of a share, 0 to 1; (None, None) for n = 0.

    Score interval of E. B. Wilson, Probable inference, the law of succession, and statistical inference, J. Am. Stat.
    Assoc. 22 (1927), 209-212. It stays within 0 and 1 and has a width also where all, or none, is right. It takes the
    lines as independent, which translations of one sentence are not quite.
    """
    if not n:
        return None, None
    share = right / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (max(0.0, centre - half) if right else 0.0), (min(1.0, centre + half) if right < n else 1.0)


def proportion(right, n):
    """{"right", "n", "share", "low", "high"}: a share with its 95 % interval, None where n is 0."""
    low, high = wilson(right, n)
    return {"right": right, "n": n, "share": right / n if n else None, "low": low, "high": high}


def confusion(wanted, given, labels):
    """(L, L + 1) counts: row the label wanted, column the one given, the last column None.

    Raises KeyError for a label that is not in labels.
    """
    place = {label: i for i, label in enumerate(labels)}
    matrix = np.zeros((len(labels), len(labels) + 1), np.int64)
    for w, g in zip(wanted, given, strict=True):
        matrix[place[w], len(labels) if g is None else place[g]] += 1
    return matrix


def by_label(matrix, labels):
    """{label: {"precision", "recall", "f1", "support", "given"}} of a confusion matrix.

    support: how often the label is wanted; given: how often it came out. precision is None where it never came out,
    recall where it was never wanted, f1 where neither.
    """
    found = {}
    for i, label in enumerate(labels):
        right, support, given = int(matrix[i, i]), int(matrix[i].sum()), int(matrix[:, i].sum())
        found[label] = {"precision": right / given if given else None, "recall": right / support if support else None,
                        "f1": 2 * right / (support + given) if support + given else None,
                        "support": support, "given": given}
    return found


def macro_f1(found):
    """Mean f1 of the labels that are wanted at all, each with the same weight; None without any. found: by_label's."""
    values = [row["f1"] for row in found.values() if row["support"]]
    return math.fsum(values) / len(values) if values else None


def score(wanted, given, labels):
    """All of the above for one pair of columns, JSON-able: proportion's values, macro_f1, labels, confusion."""
    matrix = confusion(wanted, given, labels)
    rows = by_label(matrix, labels)
    return proportion(int(np.trace(matrix)), len(wanted)) | {"macro_f1": macro_f1(rows), "labels": rows,
                                                             "confusion": matrix.tolist()}


def overlap(text, reference):
    """ROUGE-L of two texts, 0 to 1: F1 of their longest common subsequence of words, case and white space aside.

    C.-Y. Lin, ROUGE: a package for automatic evaluation of summaries (2004). Two empty texts have 1.
    """
    ours, theirs = (WORD.findall(each.lower()) for each in (text, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    row = [0] * (len(theirs) + 1)
    for word in ours:
        above = row
        row = [0]
        for place, other in enumerate(theirs):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[-1]))
    return 2 * row[-1] / (len(ours) + len(theirs))


# ---------------------------------------------------------------------------------------------------------------------
# As text


def none_name(labels):
    """What the column of None is called: no label has this name."""
    return "none" if "none" not in labels else "no label"


def confusion_lines(matrix, labels, corner):
    """Lines of the matrix as a table, zeros as dots. corner: what rows and columns are."""
    columns = [*labels, none_name(labels)]
    width = max(5, *(len(str(name)) + 1 for name in columns))
    first = max(len(corner), *(len(label) for label in labels))
    lines = [f"{corner:<{first}}" + "".join(f"{name:>{width}}" for name in columns)]
    return lines + [f"{label:<{first}}" + "".join(f"{n or '.':>{width}}" for n in row)
                    for label, row in zip(labels, np.asarray(matrix).tolist())]


def label_lines(rows):
    """Lines of by_label's values as a table, labels that are neither wanted nor given left out."""
    first = max(5, *(len(label) for label in rows))
    lines = [f"{'label':<{first}} {'precision':>9} {'recall':>9} {'f1':>9} {'support':>9} {'given':>9}"]
    for label, row in rows.items():
        if row["support"] or row["given"]:
            shares = " ".join(f"{'-' if row[key] is None else format(row[key], '.3f'):>9}"
                              for key in ("precision", "recall", "f1"))
            lines.append(f"{label:<{first}} {shares} {row['support']:>9,} {row['given']:>9,}")
    return lines


def cell(value):
    """A share with its interval as text."""
    if value is None or value["share"] is None:
        return "-"
    return f"{100 * value['share']:.1f}% ({100 * value['low']:.1f}-{100 * value['high']:.1f})"


def number(value, digits):
    """A number as text, "-" for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def aligned(rows):
    """Rows of texts -> lines, the first column on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [first.ljust(widths[0]) + "".join(f"  {text:>{width}}"
                                             for text, width in zip(more, widths[1:]))
            for first, *more in rows]


def side_by_side(systems, teacher, batch):
    """Lines of the table: a row a metric, a column for the teacher and each model."""
    def row(name, teachers, value):
        return [name, *[teachers] * bool(teacher), *map(value, systems.values())]

    rows = [["", *["teacher"] * bool(teacher), *systems],
            row("agreement with the teacher", "", lambda s: cell(s["agreement"]))]
    if teacher:
        wrong = "right_where_teacher_is_wrong"
        rows += [row("accuracy against the truth", cell(teacher), lambda s: cell(s["accuracy"])),
                 row("right where the teacher is wrong", "", lambda s: cell(s[wrong]))]
    key = "accuracy" if teacher else "agreement"
    rows += [row(f"macro F1 of the {key}", number(teacher["macro_f1"], 3) if teacher else "",
                 lambda s: number(s[key]["macro_f1"], 3)),
             row("answers with a label", "", lambda s: cell(s["parsed"])),
             *(row(what, "", lambda s, name=name, digits=digits: number(s["speed"][name], digits))
               for what, name, digits in (
                   ("tokens in, per line", "tokens_in", 1),
                   ("tokens out, per line", "tokens_out", 1),
                   ("seconds per line, one at a time", "seconds_per_line_alone", 4),
                   (f"lines per second, {batch}", "lines_per_second", 1)))]
    return aligned(rows)


def make_notes(report):
    """Lines that explain the table. report: the contents of evaluation.json."""
    data, notes = report["data"], []
    if data["leaked_lines_left_out"]:
        notes.append(f"{data['leaked_lines_left_out']:,} lines left out: their text was trained as "
                     "well")
    if report["teacher"] and report["teacher"]["n"] < len(report["samples"]):
        notes.append(f"accuracy is over the {report['teacher']['n']:,} lines whose truth is known")
    for name, system in report["systems"].items():
        if system["no_label"]:
            reasons = [f"{n:,} {why}" for why, n in list(system["no_label"].items())[:4]]
            notes.append(f"{name}: no label in {sum(system['no_label'].values()):,} answers: "
                         + ", ".join(reasons))
    notes.append("in brackets: 95 % Wilson interval of the share, lines taken as independent")
    return [f"note       {note}" for note in notes]


def detail_lines(systems, labels):
    """Lines of all tables of every column."""
    lines = []
    for name, system in systems.items():
        for key, what in (("agreement", "teacher"), ("accuracy", "truth")):
            if system[key]:
                right, n = system[key]["right"], system[key]["n"]
                lines += ["", f"{name} against the {what}: {right:,} of {n:,}", "",
                          *label_lines(system[key]["labels"]), "",
                          *confusion_lines(system[key]["confusion"], labels, f"{what} \\ {name}")]
        if system["no_label"]:
            lines += ["", f"{name}: answers without a label",
                      *(f"{n:>8,}   {why}" for why, n in system["no_label"].items())]
    return lines


def write(output_dir, report, lines):
    """evaluation.json with a report (JSON-able) and evaluation.txt with lines, each whole or not at all."""
    for name, text in (("evaluation.json", json.dumps(report, indent=1, ensure_ascii=False)),
                       ("evaluation.txt", "\n".join(lines))):
        checkpoint.write_atomically(Path(output_dir) / name, lambda path, text=text: path.write_text(
            text + "\n", encoding="utf-8"))
