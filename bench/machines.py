r"""What the parts of bench/machines.sh have found, as a report of this folder; that script calls it.

    python bench/machines.py WORK_DIR/COMMIT

Reads SETTING/FILE.xml, in which pytest has counted, FILE.since with the commit that a part was taken over from,
SETTING/versions, and SETTING/why where a setting could not be run.
"""
import argparse
import json
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure

SETTINGS = {"as-is": "as is", "sse41": "SSE4.1", "avx2": "AVX2", "busy": "beside two busy processes",
            "oldest": "the oldest packages", "races": "every race 20 times"}


def count(folder):
    """{"passed", "failed", "skipped", "seconds", "files", "skips": {reason: count}, "failures": names, "since":
    {commit: parts}} of a setting."""
    found, skips, failures, files = Counter(), Counter(), [], set()
    since = Counter(path.read_text().strip() for path in folder.glob("*.since"))
    for path in sorted(folder.glob("*.xml")):
        suite = next(xml.parse(path).iter("testsuite"))
        files.add(path.name.partition(".py")[0])
        found["seconds"] += float(suite.get("time"))
        for case in suite.iter("testcase"):
            kinds = {child.tag for child in case}
            what = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found[what] += 1
            if what == "failed":
                failures.append(f"{case.get('classname')}::{case.get('name')} ({path.name})")
            skips.update(child.get("message") for child in case if child.tag == "skipped")
    return {name: found[name] for name in ("passed", "failed", "skipped", "seconds")} | {
        "files": len(files), "skips": dict(skips.most_common()), "failures": failures, "since": dict(since)}


def summarise(parts):
    """({setting: count() and "versions" or "why"}, the table of them)."""
    settings, rows = {}, []
    for name, words in SETTINGS.items():
        folder = parts / name
        if not folder.is_dir():
            continue
        found = settings[name] = count(folder)
        if (folder / "versions").exists():
            found["versions"] = json.loads((folder / "versions").read_text())
        if (folder / "why").exists():
            found["why"] = (folder / "why").read_text().strip()
        versions = ", ".join(f"{key} {value}" for key, value in found.get("versions", {}).items())
        rows.append([words, found.get("why", versions), found["files"], found["passed"], found["failed"],
                     found["skipped"], found["seconds"] / 60])
    return settings, {"columns": ["setting", "with", "test files", "passed", "failed", "skipped", "minutes of tests"],
                      "rows": rows}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, help="WORK_DIR/COMMIT of bench/machines.sh")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    report = measure.new_report("Is the suite green on every machine?", torch.device("cpu"), "bash bench/machines.sh")
    settings, table = summarise(args.parts)
    report |= {"commit": args.parts.name, "settings": settings, "tables": {"settings": table}}
    path = measure.write_report("machines", report, args.results_dir)
    failures = [name for found in settings.values() for name in found["failures"]]
    print(f"wrote {path}: {sum(found['passed'] for found in settings.values())} passed, {len(failures)} failed",
          *failures, sep="\n  ")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
