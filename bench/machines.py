r"""What the parts of bench/machines.sh have found, as a report of this folder; that script calls it, in its clone.

    python bench/machines.py WORK_DIR/COMMIT            # write the report
    python bench/machines.py WORK_DIR/COMMIT --left as-is --files tests/test_docs.py     # print what is to be run

Reads SETTING/FILE.xml, in which pytest has counted, SETTING/machine, and SETTING/why where a setting could not be run.
Beside the report lies machines-parts.jsonl, a line for each test file under each setting, with the hash of all that
can touch it (reached.py). As long as that stays, the line counts, on whatever machine and for whatever commit.
"""
import argparse
import json
import os
import platform
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import reached

RESULTS = Path(__file__).resolve().parent / "results"

SETTINGS = {"as-is": "as is", "sse41": "SSE4.1", "avx2": "AVX2", "busy": "beside two busy processes",
            "oldest": "the oldest packages", "races": "every race 20 times"}
COUNTS = "passed", "failed", "skipped", "seconds"


def machine():
    """{"cpu", "versions"} of this process, in words."""
    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return {"cpu": cpu, "versions": f"python {platform.python_version()}, {packages}"}


def read_lines(path):
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def count(path):
    """{"passed", "failed", "skipped", "seconds", "skips": {reason: count}, "failures": [name]} of a part."""
    suite, found, skips, failures = next(xml.parse(path).iter("testsuite")), Counter(), Counter(), []
    clone = f"{path.parent.parent / 'clone'}/"      # says nothing on another machine
    for case in suite.iter("testcase"):
        kinds = {child.tag for child in case}
        what = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[what] += 1
        if what == "failed":
            failures.append(f"{case.get('classname')}::{case.get('name')} ({path.name})")
        skips.update(child.get("message").replace(clone, "") for child in case if child.tag == "skipped")
    return {name: found[name] for name in COUNTS[:3]} | {
        "seconds": round(float(suite.get("time")), 1), "skips": dict(skips), "failures": failures}


def add(line, runs, found):
    """Add these runs, counted as count() does, to a line."""
    line["runs"] = sorted(line["runs"] + runs)
    line |= {name: round(line[name] + found[name], 1) for name in COUNTS}
    line["skips"] = dict(Counter(line["skips"]) + Counter(found["skips"]))
    line["failures"] += found["failures"]


def known(parts, recorded, contents):
    """Lines that count: those recorded whose content is still the same, and what lies in `parts`.

    A part that failed is counted anew when it has been run again.
    """
    lines = [line for line in recorded if contents.get(line["file"]) == line["content"]]
    for folder in (parts / setting for setting in SETTINGS):
        for file in contents:
            stem = file.replace("/", ".")
            here = {path.stem[len(stem):]: path for path in folder.glob(f"{stem}*.xml")}      # {run: its result}
            if not here:
                continue
            same = [line for line in lines if (line["setting"], line["file"]) == (folder.name, file)]
            for line in [line for line in same if line["failed"] and set(line["runs"]) <= here.keys()]:
                lines.remove(line)
                same.remove(line)
            here_is = json.loads((folder / "machine").read_text())
            line = next((line for line in same if here_is.items() <= line.items()), None)
            for run in sorted(here.keys() - {run for other in same for run in other["runs"]}):
                if line is None:
                    line = {"setting": folder.name, "file": file, "content": contents[file], **here_is, "runs": [],
                            **dict.fromkeys(COUNTS, 0), "skips": {}, "failures": []}
                    lines.append(line)
                add(line, [run], count(here[run]))
    return lines


def left(lines, setting, files, runs, again):
    """[(file, run)] that no line has; again: nor those that failed."""
    done = {(line["file"], run) for line in lines if line["setting"] == setting and not (again and line["failed"])
            for run in line["runs"]}
    return [(file, run) for run in runs for file in files if (file, run) not in done]


def summarise(parts, lines):
    """({setting: sums, "skips", "failures", "why" if it could not be run}, the table of them)."""
    settings, rows = {}, []
    for name, words in SETTINGS.items():
        here, why = [line for line in lines if line["setting"] == name], parts / name / "why"
        if not here and not why.exists():
            continue
        found = settings[name] = {key: round(sum(line[key] for line in here), 1) for key in COUNTS}
        found["skips"] = dict(sum((Counter(line["skips"]) for line in here), Counter()).most_common())
        found["failures"] = [failure for line in here for failure in line["failures"]]
        if why.exists():
            found["why"] = why.read_text().strip()
        processors, versions = ("; ".join(sorted({line[key] for line in here})) for key in ("cpu", "versions"))
        rows.append([words, versions or found["why"], processors, len({line["file"] for line in here}),
                     sum(len(line["runs"]) for line in here), found["passed"], found["failed"], found["skipped"],
                     found["seconds"] / 60])
    columns = ["setting", "with", "processor", "test files", "runs", "passed", "failed", "skipped", "minutes of tests"]
    return settings, {"columns": columns, "rows": rows}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, help="WORK_DIR/COMMIT of bench/machines.sh")
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help="where the report is")
    parser.add_argument("--left", choices=SETTINGS, help="print the parts of this setting that are still to be run")
    parser.add_argument("--files", nargs="*", default=[], help="of these test files")
    parser.add_argument("--runs", nargs="*", default=[""], help="their runs: \"\", or .1, .2, ...")
    parser.add_argument("--again", action="store_true", help="also those that failed")
    parser.add_argument("--machine", action="store_true", help="print this machine's processor and versions")
    args = parser.parse_args(argv)
    if args.machine:
        print(json.dumps(machine()))
        return
    path, contents = args.results_dir / "machines-parts.jsonl", reached.contents()
    recorded = read_lines(path)
    lines = known(args.parts, recorded, contents)
    if args.left:
        for part in left(lines, args.left, args.files, args.runs, args.again):
            print(*part, sep="\t")
        return
    now = {(line["setting"], line["file"]) for line in lines}
    others = [line for line in recorded if (line["setting"], line["file"]) not in now]      # of another content
    args.results_dir.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{json.dumps(line)}\n" for line in sorted(
        lines + others, key=lambda line: (list(SETTINGS).index(line["setting"]), line["file"], line["cpu"]))))
    os.replace(temporary, path)
    import torch  # only here, as it takes seconds

    from bench import measure
    report = measure.new_report("Is the suite green on every machine?", torch.device("cpu"), "bash bench/machines.sh")
    settings, table = summarise(args.parts, lines)
    report |= {"commit": args.parts.name, "settings": settings, "tables": {"settings": table}}
    written = measure.write_report("machines", report, args.results_dir)
    failures = [name for found in settings.values() for name in found["failures"]]
    print(f"wrote {written}: {sum(found['passed'] for found in settings.values())} passed, {len(failures)} failed",
          *failures, sep="\n  ")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
