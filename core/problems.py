"""Samples that cannot be used: which stop a run, which are dropped, and a list of all of them."""
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from core import checkpoint
from core.cli import UserError, printable, problem_text

LIST = "problems.jsonl"     # in OUTPUT_DIR
SHOWN = 20                  # problems in an error


class Problem(str):
    """A line about a sample: "NAME: WHAT". name: the place of the sample, which begins with its
    file. check: what found it, as --drop_bad names it. sample: its number in a table of all, if
    there is one already; names are not unique where a file is given twice.
    """


def problem(name, check, what, file="", sample=None):
    """Problem of the sample at `name`; both texts made printable."""
    name, what = printable(name), printable(what)
    made = Problem(f"{name}: {what}")
    made.name, made.what, made.check, made.file, made.sample = name, what, check, str(file), sample
    return made


class Problems:
    """Problems as they are found: written to a file of no name, counted by check; of those that
    stop the run the first SHOWN are kept, so that millions take no memory.

    drop: checks whose samples are dropped. folder: where settle() writes LIST, None: nowhere. more:
    the list has problems of this run already.
    """

    def __init__(self, drop=(), folder=None, more=False):
        self.drop, self.path, self.more = drop, Path(folder) / LIST if folder else None, more
        self.counts, self.shown, self.rows = Counter(), [], None

    def add(self, problems):
        """Note a list of problems."""
        for p in problems:
            self.counts[p.check] += 1
            if p.check not in self.drop and len(self.shown) < SHOWN:
                self.shown.append(p)
            if self.path:
                self.rows = self.rows or tempfile.TemporaryFile(dir=self.path.parent)
                entry = p.name.removeprefix(printable(p.file)).strip(" :")
                row = {"file": p.file, "entry": entry, "check": p.check, "problem": p.what}
                self.rows.write(json.dumps(row).encode() + b"\n")

    @property
    def stopping(self):
        """Number of problems of checks that are not dropped."""
        return sum(n for check, n in self.counts.items() if check not in self.drop)

    def settle(self, hint=""):
        """Text of how many samples each check drops, "" if none; UserError with the problems that
        stop the run, hint its last line. LIST then has all, one JSON object a line.
        """
        if self.rows:
            checkpoint.write_atomically(self.path, self._write)
            self.rows.close()
        elif self.path and not self.more:
            self.path.unlink(missing_ok=True)
        if self.stopping:
            where = f"; all are in {self.path}" if self.path and self.stopping > SHOWN else ""
            raise UserError(problem_text(self.shown, SHOWN, self.stopping) + where + hint)
        where = f"; see {self.path}" if self.path and self.counts else ""
        return ", ".join(f"{n} {check}" for check, n in sorted(self.counts.items())) + where

    def _write(self, temporary):
        with open(temporary, "wb") as file:
            if self.more and self.path.exists():
                file.write(self.path.read_bytes())
            self.rows.seek(0)
            shutil.copyfileobj(self.rows, file)


def settle(problems, drop=(), folder=None, hint="", more=False):
    """Problems.settle of a list of them; the other arguments as there."""
    found = Problems(drop, folder, more)
    found.add(problems)
    return found.settle(hint)


def collect(dry, *works):
    """[what work() returns for each of works, none of which needs another's].

    A run ends at the first UserError; a dry run does all the work, and then raises one UserError
    with all problems.
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
