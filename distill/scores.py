"""How well labels fit labels: shares with their error, precision and recall, confusion. Plain functions, numpy only.

wanted: what should come out, a label each. given: what came out, a label or None where an answer holds none; None is
never right and has a column of its own, the last one. Own module of evaluate_sft.py; copy nothing with it.
"""
import math

import numpy as np

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


def most_confused(matrix, labels, limit):
    """[(wanted, given, count)] of what went wrong most often, most first; given None: the answer held no label."""
    columns = [*labels, None]
    pairs = [(labels[i], columns[j], int(matrix[i, j])) for i, j in zip(*np.nonzero(matrix)) if i != j]
    return sorted(pairs, key=lambda pair: -pair[2])[:limit]         # equal counts stay in the order of the labels


def score(wanted, given, labels):
    """All of the above for one pair of columns, JSON-able: proportion's values, macro_f1, labels, confusion."""
    matrix = confusion(wanted, given, labels)
    rows = by_label(matrix, labels)
    return proportion(int(np.trace(matrix)), len(wanted)) | {"macro_f1": macro_f1(rows), "labels": rows,
                                                             "confusion": matrix.tolist()}


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
