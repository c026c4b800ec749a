"""Samples that cannot be used: which of them stop a run, which are dropped, and the list of all, problems.jsonl."""
import json
from collections import Counter
from pathlib import Path

from common import checkpoint
from common.parallel import UserError, problem_text
from common.text import printable

LIST = "problems.jsonl"     # in OUTPUT_DIR
SHOWN = 20                  # problems in an error


class Problem(str):
    """A line about a sample: "NAME: what is wrong".

    name: where the sample stands, which begins with its file. check: what found it, as --drop_bad names it.
    """

    def __new__(cls, text, name="", what="", check="", file=""):
        made = super().__new__(cls, text)
        made.name, made.what, made.check, made.file = name, what, check, file
        return made


def problem(name, check, what, file=""):
    """Problem of the sample that stands at `name`; both texts made printable."""
    name, what = printable(name), printable(what)
    return Problem(f"{name}: {what}", name, what, check, str(file))


def write(path, problems, more=False):
    """Write the list of problems, one JSON object a line {"file", "entry", "check", "problem"}; no problems: no list.

    more: behind those that it has.
    """
    lines = path.read_text(encoding="utf-8") if more and path.exists() else ""
    for p in problems:
        row = {"file": p.file, "entry": p.name.removeprefix(p.file).strip(" :"), "check": p.check, "problem": p.what}
        lines += json.dumps(row) + "\n"
    if lines:
        checkpoint.write_atomically(path, lambda temporary: temporary.write_text(lines, encoding="utf-8"))
    else:
        path.unlink(missing_ok=True)


def settle(problems, drop=(), folder=None, hint="", more=False):
    """Text of how many samples each check drops, "" if none; UserError with the problems of checks not in `drop`.

    folder: where LIST is written, with those that are dropped; None: nowhere. hint: what helps, the error's last line.
    more: the list has problems of this run already.
    """
    path = Path(folder) / LIST if folder else None
    if path:
        write(path, problems, more)
    if left := [p for p in problems if p.check not in drop]:
        where = f"; all are in {path}" if path and len(left) > SHOWN else ""
        raise UserError(problem_text(left, SHOWN) + where + hint)
    counts = Counter(p.check for p in problems)
    where = f"; see {path}" if path and counts else ""
    return ", ".join(f"{n} {check}" for check, n in sorted(counts.items())) + where
