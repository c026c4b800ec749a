"""A row of the scoreboard of docs/speed.md: how much speech is trained on in an hour, and how well it is understood then.

    python bench/scoreboard.py                      # runs launch/demo.sh (minutes), adds its row, fills the table
    python bench/scoreboard.py demo_out/run-XXXX    # the row of a run of the demo that is there

An hour is one of a core, or of a GPU where there is one: the seconds of the steps times the ranks. Validation, saves and
start-up are left out. STEPS, RANKS, SEED ... before the command reach the demo and stand in the row.
"""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
COLUMNS = ["word errors (%)", "clips an hour", "audio-hours an hour", "clips", "hours", "ranks", "machine", "date", "commit",
           "command", "note"]
SETTINGS = ("STEPS", "RANKS", "SENTENCES", "SEED", "DATA")       # of launch/demo.sh


def measured(run):
    """Of a run folder of the demo: {column: value} of what was trained and how it was understood.

    Rows of metrics.jsonl are means over the steps since the row before, rates are of all ranks.
    """
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ranks = json.loads((run / "starts.jsonl").read_text().splitlines()[0])["ranks"]
    judged = json.loads((run / "after" / "evaluation.json").read_text())["metrics"]
    seconds = clips = audio = last = 0
    for row in logged:
        if "train/step_seconds" in row:
            spent, last = row["train/step_seconds"] * (row["step"] - last), row["step"]
            seconds += spent
            clips += row["train/samples_per_second"] * spent
            audio += row["train/audio_seconds_per_second"] * spent
    hours = seconds * ranks / 3600
    return {"word errors (%)": 100 * judged["wer"], "clips an hour": clips / hours, "clips": round(clips),
            "audio-hours an hour": audio / 3600 / hours, "hours": hours, "ranks": ranks}


def run_demo(out):
    """The folder of a new run of launch/demo.sh. Its status may be 1: the row says how well it was understood."""
    before = set(out.glob("run-*"))
    subprocess.run(["bash", "launch/demo.sh"], cwd=ROOT, env=os.environ | {"OUT": str(out)})
    return next(iter(set(out.glob("run-*")) - before), out)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="a run of the demo (default: run it now)")
    parser.add_argument("--note", default="", help="what the row should say, such as: shared machine")
    parser.add_argument("--results_dir", type=Path, default=ROOT / "bench" / "results", help="folder of the report")
    args = parser.parse_args(argv)
    run = args.run or run_demo(ROOT / "demo_out")
    if not (run / "after" / "evaluation.json").exists():
        sys.exit(f"error: {run}: is not a run of launch/demo.sh that came to its end (after/evaluation.json)")
    row = measured(run)
    import torch

    from bench import measure, table
    report = measure.new_report("how much speech is trained on in an hour, and how well it is understood then",
                                torch.device("cuda" if torch.cuda.is_available() else "cpu"), "python bench/scoreboard.py")
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True, capture_output=True)
    settings = "".join(f"{name}={os.environ[name]} " for name in SETTINGS if name in os.environ)
    machine = report["device"] if torch.cuda.is_available() else f"{report['cpu']}, {report['cores']} cores"
    row |= {"machine": machine, "date": report["date"], "commit": git.stdout.strip(), "note": args.note,
            "command": f"{settings}bash launch/demo.sh"}
    path = args.results_dir / f"scoreboard-{'-'.join(report['device'].lower().split())}.json"
    rows = json.loads(path.read_text())["tables"]["rows"]["rows"] if path.exists() else []
    rows = sorted([*rows, [row[name] for name in COLUMNS]], key=lambda row: -row[COLUMNS.index("clips an hour")])
    report["tables"]["rows"] = {"columns": COLUMNS, "rows": rows}
    print(f"{measure.write_report('scoreboard', report, args.results_dir)}: " + json.dumps(row))
    if args.results_dir == ROOT / "bench" / "results":
        table.main([])


if __name__ == "__main__":
    main()
