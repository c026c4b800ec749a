"""Do the tests see faults? One-line faults are planted in copies of the tree, one at a time.

    python bench/planted.py                         # all of planted.json, fast tests: half an hour
    python bench/planted.py packing labels          # those in files with one of these words
    python bench/planted.py packing --draw 40       # and 40 drawn at random from those files

planted.json has for each file, by the end of its path, the tests that should see its faults, and
[old text, new text] of each fault; a third entry names other tests. Tests that begin with "slow"
run only with --slow. Where several files have that end, a fault is planted in the one with the old
text. Prints the faults that survive; the exit status is 1 if any does, or if an old text is stale.
"""
import argparse
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "bench" / "planted.json"
LIMIT_S = 200           # a fault may make a test hang; that is seen, too
SWAPS = {"+": "-", "-": "+", "*": "+", "//": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
         "==": "!=", "!=": "==", "and": "or", "or": "and", "min": "max", "max": "min"}


def tracked():
    """Paths of the repository's files, relative to its root."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def read_list(words):
    """([(file, old, new, tests)], [stale entries]) of planted.json."""
    product = [name for name in tracked() if name.endswith(".py")
               and not name.startswith(("tests/", "bench/", "minimal/"))]
    faults, stale = [], []
    for end, entry in json.loads(LIST.read_text()).items():
        files = {name: (ROOT / name).read_text() for name in product
                 if f"/{name}".endswith(f"/{end}")}
        if words and not any(word in name for word in words for name in [*files, end]):
            continue
        for old, new, *tests in entry["faults"]:
            matches = [name for name, text in files.items() if text.count(old) == 1]
            if len(matches) == 1:
                faults.append((matches[0], old, new, " ".join(tests or entry["tests"])))
            else:
                stale.append(f"{end}: {old!r} is not there once")
    return faults, stale


def drawn(faults, number, seed):
    """`number` more faults in the files of `faults`: an operator or a number is another one."""
    tests = {name: tests for name, _, _, tests in faults}
    places = []
    for name in tests:
        text = (ROOT / name).read_text()
        lines = text.splitlines(keepends=True)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            new = SWAPS.get(token.string)
            if token.type == tokenize.NUMBER and token.string.isdecimal():
                new = str(int(token.string) + 1)
            if new and token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
                (row, start), (_, end) = token.start, token.end
                line = lines[row - 1]
                places.append((name, row, line, line[:start] + new + line[end:]))
    chosen = random.Random(seed).sample(places, min(number, len(places)))
    return [(name, (row, line), new, tests[name]) for name, row, line, new in chosen]


def plant(copy, name, old, new):
    """Change the copy's file; returns its text before."""
    path = copy / name
    text = path.read_text()
    if isinstance(old, tuple):
        lines = text.splitlines(keepends=True)
        lines[old[0] - 1] = new
        path.write_text("".join(lines))
    else:
        path.write_text(text.replace(old, new))
    return text


def run_tests(copy, tests, log):
    """Start pytest in a fork of this process, which has done the slow imports -> pid."""
    if pid := os.fork():
        return pid
    os.setsid()
    os.chdir(copy)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    sys.argv[:] = ["pytest"]
    import pytest
    marks = [] if tests.startswith("slow ") else ["-m", "not slow"]
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *marks,
                        *tests.removeprefix("slow ").split()])
    sys.stdout.flush()
    os._exit(int(code))


def wait(running):
    """Take the first run that ends out of `running` -> (copy, fault, log, seconds, status)."""
    while True:
        for pid, (copy, fault, log, began) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            limit = LIMIT_S * (5 if fault[3].startswith("slow ") else 1)
            late = time.monotonic() - began > limit
            if done or late:
                try:
                    os.killpg(pid, signal.SIGKILL)      # what the tests have started, too
                except ProcessLookupError:
                    pass
                if not done:
                    os.waitpid(pid, 0)
                del running[pid]
                return copy, fault, log, time.monotonic() - began, (
                    "hangs" if late and not done else os.waitstatus_to_exitcode(status))
        time.sleep(0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of paths; default: every file")
    parser.add_argument("--draw", type=int, default=0, help="number of additional random faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of --draw")
    parser.add_argument("--slow", action="store_true", help="also run the slow tests")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs")
    args = parser.parse_args()
    faults, stale = read_list(args.words)
    faults += drawn(faults, args.draw, args.seed)
    faults = [fault for fault in faults if args.slow or not fault[3].startswith("slow ")]
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                   "PYTHONDONTWRITEBYTECODE": "1"}      # a cached module may hide a fault
    sys.dont_write_bytecode = True
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401
    torch.set_num_threads(1)
    survived, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / f"copy-{i}" for i in range(args.jobs)]
        for name in tracked():
            for copy in copies:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        todo, running = list(enumerate(faults)), {}
        while todo or running:
            while todo and copies:
                (number, fault), copy = todo.pop(0), copies.pop()
                before, log = plant(copy, *fault[:3]), Path(folder) / f"{number}.log"
                pid = run_tests(copy, fault[3], log)
                running[pid] = copy, (*fault, before), log, time.monotonic()
            copy, (name, old, new, tests, before), log, seconds, status = wait(running)
            (copy / name).write_text(before)
            copies.append(copy)
            seen = {0: "SURVIVES", 1: "seen", 5: "NO TESTS"}.get(status, f"seen ({status})")
            text = f"{name}:{old[0]}: {new.strip()}" if isinstance(old, tuple) else f"{name}: {new}"
            print(f"{seen:9} {seconds:5.1f} s  {text!r}", flush=True)
            if status in (0, 5):
                survived.append(f"{text}  [{tests}]")
    print(f"\n{len(faults)} faults, {len(survived)} survive, {time.monotonic() - began:.0f} s")
    for line in [*survived, *(f"stale: {line}" for line in stale)]:
        print(line)
    sys.exit(bool(survived or stale))


if __name__ == "__main__":
    main()
