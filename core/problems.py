"""Samples that cannot be used: which stop a run, which are dropped, and a list of all of them."""
import json
from collections import Counter
from pathlib import Path

from core import dist
from core.cli import UserError, one_line, problem_text

LIST = "problems.jsonl"     # in OUTPUT_DIR
SHOWN = 20                  # problems in an error


class Problem(str):
    """A line about a sample, with the attributes that problem() gives it."""


def problem(name, check, what, file="", sample=None):
    """Problem of the sample at `name`, which begins with its file; texts are made printable. check:
    one of --drop_bad. sample: its number in a table of all, if there is one already.
    """
    name, what = one_line(name), one_line(what)
    made = Problem(f"{name}: {what}")
    made.name, made.what, made.check, made.file, made.sample = name, what, check, str(file), sample
    return made


class Problems:
    """Problems as they are found: written to LIST in a folder (None: nowhere), counted by check; of
    those that stop the run the first SHOWN are kept, so that millions take no memory. drop: checks
    whose samples are dropped. more: the list has problems of this run already.
    """

    def __init__(self, drop=(), folder=None, more=False):
        self.drop, self.path, self.more = drop, Path(folder) / LIST if folder else None, more
        self.counts, self.shown, self.file = Counter(), [], None

    def add(self, problems):
        """Note Problems."""
        for p in problems:
            self.counts[p.check] += 1
            if p.check not in self.drop and len(self.shown) < SHOWN:
                self.shown.append(p)
            if self.path:
                entry = p.name.removeprefix(one_line(p.file)).strip(" :")
                row = {"file": p.file, "entry": entry, "check": p.check, "problem": p.what}
                with dist.error_names_file(self.path):
                    if not (self.file or self.more):
                        self.path.unlink(missing_ok=True)       # of an earlier run
                    self.file = self.file or open(self.path, "a")
                    self.file.write(json.dumps(row) + "\n")

    @property
    def stopping(self):
        """Number of problems of checks that are not dropped."""
        return sum(n for check, n in self.counts.items() if check not in self.drop)

    def settle(self, hint=""):
        """Text of how many samples each check drops, "" if none; UserError with the problems that
        stop the run, hint its last line. LIST then has all, one JSON object a line.
        """
        if self.file:
            with dist.error_names_file(self.path):
                self.file.close()
        elif self.path and not self.more:
            self.path.unlink(missing_ok=True)
        where = f"; all are in {self.path}" if self.path and self.stopping > SHOWN else ""
        if self.stopping:
            raise UserError(problem_text(self.shown, SHOWN, self.stopping) + where + hint)
        where = f"; see {self.path}" if self.path and self.counts else ""
        return ", ".join(f"{n} {check}" for check, n in sorted(self.counts.items())) + where


def settle(problems, drop=(), folder=None, hint="", more=False):
    """Problems.settle of these; the other arguments as there."""
    found = Problems(drop, folder, more)
    found.add(problems)
    return found.settle(hint)


def collect(dry, *works):
    """[what work() returns for each of works, none of which needs another's]. A run ends at the
    first UserError; a dry run does all, and then raises one with all problems.
    """
    results, problems = [], {}
    for work in works:
        try:
            results.append(work())
        except UserError as error:
            if not dry:
                raise
            problems[str(error)] = None
    if problems:
        raise UserError(problem_text(list(problems)))
    return results
