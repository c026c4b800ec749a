"""Samples that cannot be used: some stop a run, others are dropped, and all are listed."""
import json
from collections import Counter
from pathlib import Path

from core import dist
from core.cli import SHOWN, UserError, one_line, problem_text

LIST = "problems.jsonl"     # in OUTPUT_DIR


class Problem(str):
    """A line about a sample, with the attributes that problem() gives it."""


def problem(name, check, reason, file="", sample=None):
    """Problem of a sample. name: its file and place in the file. check: one of --drop_bad. sample:
    its number in a table, if there is one."""
    name, reason = one_line(name), one_line(reason)
    line = Problem(f"{name}: {reason}")
    vars(line).update(name=name, reason=reason, check=check, sample=sample, file=str(file))
    return line


class Problems:
    """Collects problems: counts them by check, writes them to LIST in a folder, and keeps the first
    SHOWN of those that stop the run, so that millions need no memory."""

    def __init__(self, drop=(), folder=None, more=False):
        """drop: checks whose samples are dropped. folder: None writes no list. more: append to the
        list of this run."""
        self.drop, self.counts, self.shown = drop, Counter(), []
        self.path, self.more, self.file = Path(folder) / LIST if folder else None, more, None

    def add(self, problems):
        """Add problems made by problem()."""
        for p in problems:
            self.counts[p.check] += 1
            if p.check not in self.drop and len(self.shown) < SHOWN:
                self.shown.append(p)
            if self.path:
                entry = p.name.removeprefix(one_line(p.file)).strip(" :")
                row = {"file": p.file, "entry": entry, "check": p.check, "problem": p.reason}
                with dist.error_names_file(self.path):
                    if not self.file:       # line by line, as audio may be encoded for hours
                        self.file = open(self.path, "a" if self.more else "w", buffering=1)
                    self.file.write(json.dumps(row) + "\n")

    @property
    def n_fatal(self):
        """Number of problems that stop the run, as their checks are not dropped."""
        return sum(n for check, n in self.counts.items() if check not in self.drop)

    def settle(self, hint=""):
        """Text with the number of samples that each check drops, or "". UserError with the problems
        that stop the run, if any, and then `hint`."""
        if self.file:
            self.file.close()
        elif self.path and not self.more:
            self.path.unlink(missing_ok=True)       # of an earlier run
        if self.n_fatal:
            where = f"; all are in {self.path}" if self.path and self.n_fatal > SHOWN else ""
            raise UserError(problem_text(self.shown, self.n_fatal) + where + hint)
        where = f"; see {self.path}" if self.path and self.counts else ""
        return ", ".join(f"{n} {check}" for check, n in sorted(self.counts.items())) + where


def settle(problems, drop=(), folder=None, hint="", more=False):
    """Problems.settle() of all `problems`; other arguments are those of Problems."""
    collected = Problems(drop, folder, more)
    collected.add(problems)
    return collected.settle(hint)
