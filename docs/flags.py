"""Writes docs/flags.md: every flag of every script, as the script's own parser has it.

    python docs/flags.py                # write docs/flags.md
    python docs/flags.py --check        # change nothing; exit 1 when it is not what the parsers say

A script is a file of the root, speech/, diffusion/, distill/ or common/ that can be started. Its main() is called in
this process up to the line that parses its flags, so nothing runs.
"""
import argparse
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
FOLDERS = (".", "speech", "diffusion", "distill", "distill/demo", "common")
MACHINES = ((1, False), (1024, True))       # (CPUs, a GPU): defaults that differ between these depend on the machine
HEAD = """# Flags

Every flag of every script, written by `python docs/flags.py` from the parsers; a test compares. `--help` of a script
shows the same. An empty default means that the flag is not given.
"""


class Parser(Exception):
    """Carries the parser out of a main() that was about to use it."""


def scripts():
    """Paths, relative to the root, of all files that can be started, main jobs first."""
    return [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))
            if re.search(r'^if __name__ == "__main__":', path.read_text(), re.MULTILINE)]


def parser_of(script, machine=MACHINES[0]):
    """The ArgumentParser that a script's main() makes on a machine (CPUs, a GPU); script: path relative to the root."""
    def carry(parser, *_, **__):
        raise Parser(parser)
    cpus, gpu = machine
    with mock.patch.object(sys, "path", [str(ROOT), *sys.path]), mock.patch.object(sys, "argv", [script]), \
            mock.patch.object(os, "sched_getaffinity", lambda _: set(range(cpus))), \
            mock.patch.object(os, "cpu_count", lambda: cpus), \
            mock.patch.object(torch.cuda, "is_available", lambda: gpu):
        main = runpy.run_path(str(ROOT / script), run_name=f"flags of {script}")["main"]
        with mock.patch.object(argparse.ArgumentParser, "parse_args", carry):
            try:
                main()
            except Parser as carried:
                return carried.args[0]
    raise LookupError(f"{script}: main() parses no flags")


def name(action):
    """How a flag is written: `--flag VALUE`, with every spelling; positional arguments by their name alone."""
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    value = " ".join(value) if isinstance(value, tuple) else value
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    value = {0: "", "?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} [{value} ...]"}.get(action.nargs, value)
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{spelling} {value}`".replace(" `", "`") for spelling in action.option_strings)


def shown(action):
    """What a flag is when it is not given, as text."""
    value = action.default
    if action.required:
        return "required"
    if value is None or value == argparse.SUPPRESS:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text.replace(f"{ROOT}/", "")


def default(small, large):
    """The default of a flag, given as the actions of two machines."""
    low, high = shown(small), shown(large)
    return low if low == high else f"{low} to {high}, by the CPUs" if isinstance(small.default, int) else \
        f"{high} or {low}, by the machine"


def rows(pairs):
    """Lines of a markdown table about flags, without --help; pairs: the actions of two machines."""
    lines = []
    for action, large in pairs:
        if action.help is not argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            cells = (name(action), default(action, large), (action.help or "") % vars(action))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return ["| flag | default | meaning |", "|---|---|---|", *lines, ""] if lines else []


def section(parser, large, title):
    """Lines about one parser and, below it, about its subcommands; large: the same parser of the large machine."""
    lines = [title, "", (parser.description or "").strip(), ""] if parser.description else [title, ""]
    for group, other in zip(parser._action_groups, large._action_groups):
        pairs = list(zip(group._group_actions, other._group_actions))
        commands = [pair for pair in pairs if isinstance(pair[0], argparse._SubParsersAction)]
        table = rows([pair for pair in pairs if pair not in commands])
        if table and group.title not in ("options", "positional arguments", "subcommands"):
            lines += [f"**{group.title[0].upper()}{group.title[1:]}**", ""]
        lines += table
        for command, other in commands:
            for word, below in command.choices.items():
                lines += section(below, other.choices[word], f"#{title} {word}")
    return lines


def page():
    """The text of docs/flags.md."""
    lines = []
    for script in scripts():
        lines += section(*(parser_of(script, machine) for machine in MACHINES), f"## {script}")
    return HEAD + "\n" + "\n".join(lines).rstrip() + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the page is out of date")
    args = parser.parse_args(argv)
    text = page()
    if args.check and (not PAGE.exists() or PAGE.read_text() != text):
        sys.exit("error: docs/flags.md is not what the parsers say; run python docs/flags.py")
    if not args.check:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
