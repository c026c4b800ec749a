"""Fills the tables in README.md and docs/ from the files in bench/results, and from nothing else.

    python bench/table.py               # rewrite every block
    python bench/table.py --check       # change nothing; exit 1 naming the blocks that differ

A block is all between two lines of its own:

    <!-- table NAME-DEVICE.json TABLE -->
    <!-- end table -->

TABLE is a key of the file's `tables`; machine, day, versions and the command that measures it again
follow. Whole numbers are printed as they are, others with 3 significant digits. A part of a table:
the rows that have all of the given cells, and the given columns, in that order:

    <!-- table NAME-DEVICE.json TABLE; rows small | lora; columns side | step (ms) -->
"""
import argparse
import json
import math
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = re.compile(r"<!-- table (\S+) (\S.*?) -->"), "<!-- end table -->"


class BadBlock(Exception):
    """What is wrong with a block or its file, in one line."""


def cell(value):
    """A number or a word as it stands in a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value)
    return str(value).replace("|", "\\|")


def number(value):
    """3 significant digits, thousands separated: 12,300; 1.23; 0.0123; 1.23e-07."""
    if not math.isfinite(value):
        return str(value)
    value = float(f"{value:.2e}")       # rounded first: 9.999 has two decimals, 10.0 one
    size = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.2e}" if size < -4 else f"{value:,.{max(0, 2 - size)}f}"


def markdown(table):
    """{"columns", "rows"} -> lines of a markdown table; columns of numbers are aligned right."""
    columns, rows = table["columns"], table["rows"]
    if odd := next((row for row in rows if len(row) != len(columns)), None):
        raise BadBlock(f"a row has {len(odd)} values for {len(columns)} columns: {odd}")
    right = [all(isinstance(row[i], (int, float, type(None))) for row in rows)
             for i in range(len(columns))]
    cells = [list(map(cell, columns)), ["--:" if r else "---" for r in right],
             *[list(map(cell, row)) for row in rows]]
    return ["| " + " | ".join(line) + " |" for line in cells]


def origin(report):
    """Where, when, with what and how a report was measured, in one line."""
    machine = [part for part in dict.fromkeys((report["device"], report["cpu"]))
               if part not in ("", "CPU")]
    cores, threads = report["cores"], report["threads"]
    machine += [f"{cores} core{'s' * (cores != 1)}", f"{threads} thread{'s' * (threads != 1)}"]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return f"{', '.join(machine)}; {report['date']}; {versions}; `{report['command']}`"


def part(table, wanted):
    """The part of a table that the marker asks for; wanted: ["rows a | b", "columns c", ...]."""
    columns, rows = table["columns"], table["rows"]
    for words in wanted:
        what, _, names = words.strip().partition(" ")
        names = [name.strip() for name in names.split("|")]
        if what == "rows":
            rows = [row for row in rows if set(names) <= set(map(cell, row))]
            if not rows:
                raise BadBlock(f"no row has the cells {' and '.join(names)}")
        elif what == "columns":
            if absent := [name for name in names if name not in columns]:
                raise BadBlock(f"there is no column {absent[0]!r}, only {' | '.join(columns)}")
            places = [columns.index(name) for name in names]
            columns, rows = names, [[row[i] for i in places] for row in rows]
        else:
            raise BadBlock(f"{words.strip()!r} is neither 'rows ...' nor 'columns ...'")
    return {"columns": columns, "rows": rows}


def block(results, name, words):
    """Lines of one block, without its markers; words: TABLE; rows ...; columns ..."""
    table, *wanted = words.split(";")
    try:
        report = json.loads((results / name).read_text())
    except OSError as error:
        raise BadBlock(f"{name} cannot be read ({error.strerror}); run the script that writes it")
    except ValueError as error:
        raise BadBlock(f"{name} is not JSON ({error})")
    if table not in (tables := report.get("tables", {})):
        raise BadBlock(f"{name} has no table {table!r}, only {', '.join(tables) or 'none'}")
    return [*markdown(part(tables[table], wanted)), "", origin(report)]


def render(text, results):
    """(text with every block filled, names of those that differed). Raises BadBlock."""
    lines, stale, rest = [], [], iter(enumerate(text.splitlines(), 1))
    for at, line in rest:
        lines.append(line)
        if line == END:
            raise BadBlock(f"line {at}: '{END}' ends no block")
        if not (begin := BEGIN.fullmatch(line)):
            continue
        old = []
        for _, line in rest:
            if line == END or BEGIN.fullmatch(line):
                break
            old.append(line)
        if line != END:
            raise BadBlock(f"line {at}: the block of {begin[1]} {begin[2]} is not closed by "
                           f"'{END}'")
        try:
            new = block(results, *begin.groups())
        except BadBlock as error:
            raise BadBlock(f"line {at}: {error}")
        stale += [f"{begin[1]} {begin[2]}"] * (new != old)
        lines += [*new, END]
    return "\n".join(lines) + "\n", stale


def fill(path, results, check):
    """Fill the blocks of one file, or (check) only compare them. Raises BadBlock."""
    try:
        text, stale = render(path.read_text(), results)
    except BadBlock as error:
        raise BadBlock(f"{path} {error}")
    if not stale:
        return
    if check:
        raise BadBlock(f"{path} does not show what the files say: {'; '.join(stale)}; "
                       "run python bench/table.py")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
    print(f"{path}: {'; '.join(stale)}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true",
                        help="change nothing; exit 1 when a block is out of date")
    parser.add_argument("--file", type=Path, nargs="+",
                        help="markdown files (default: README.md and docs/*.md)")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results",
                        help="folder of the reports")
    args = parser.parse_args(argv)
    try:
        for path in args.file or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
            fill(path, args.results, args.check)
    except BadBlock as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
