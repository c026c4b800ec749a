"""Fills the tables of README.md and docs/ from bench/results, and from nothing else.

    python bench/table.py               # rewrite every block
    python bench/table.py --check       # change nothing; exit 1 naming the pages that differ

A block is all between these two lines. TABLE is a key of the file's `tables`; machine,
versions and the command that measures it again follow:

    <!-- table NAME-DEVICE.json TABLE; columns way | step (ms) -->
    <!-- end table -->
"""
import json
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- table (\S+) (\S+); columns (.*?) -->\n).*?(<!-- end table -->\n)", re.S)


def cell(value):
    """A word, a whole number, or another one with 3 significant digits: 12,300; 1.23; 1.23e-07."""
    if not isinstance(value, float):
        return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    value = float(f"{value:.2e}")       # rounded first: 9.999 has two decimals, 10.0 one
    size = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.2e}" if size < -4 else f"{value:,.{max(0, 2 - size)}f}"


def origin(report):
    """Where, with what and how a report was measured, in one line."""
    machine = [name for name in dict.fromkeys((report["device"], report["cpu"]))
               if name not in ("", "CPU")]
    for name in ("core", "thread"):
        count = report[f"{name}s"]
        machine.append(f"{count} {name}{'s' * (count != 1)}")
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return f"{', '.join(machine)}; {versions}; `{report['command']}`"


def fill(block):
    """A match of BLOCK -> its text, filled; columns of numbers are aligned right."""
    begin, name, table, wanted, end = block.groups()
    report, names = json.loads((ROOT / "bench" / "results" / name).read_text()), wanted.split(" | ")
    columns, rows = report["tables"][table].values()
    rows = [[row[columns.index(name)] for name in names] for row in rows]
    right = ["---" if any(isinstance(value, str) for value in values) else "--:"
             for values in zip(*rows)]
    cells = [names, right, *[map(cell, row) for row in rows]]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([begin + lines[0], *lines[1:], "", origin(report), end])


if __name__ == "__main__":
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        if text.count("<!-- table ") != len(BLOCK.findall(text)):
            sys.exit(f"error: {path}: a block has no columns or no end")
        if (new := BLOCK.sub(fill, text)) != text:
            stale.append(path.name)
            if sys.argv[1:] != ["--check"]:
                path.write_text(new)
    if stale:
        print(f"{', '.join(stale)}: not what bench/results says", file=sys.stderr)
        sys.exit(sys.argv[1:] == ["--check"])
