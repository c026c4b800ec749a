"""Do the demos pass whatever the seed and the processor? Each of them with other seeds, and on older vector units.

    python bench/gates.py WORK_DIR                              # hours on two cores; the same command goes on
    python bench/gates.py WORK_DIR --demos speech --settings AVX2 --seeds 7

A run is a demo's own launcher with --seed, in WORK_DIR/SETTING/SEED/DEMO. What it measured is in bench/results/
gates-cpu.json once it has come to its end, with the processor; runs that passed there are not repeated, on whatever
machine. The default seed is one of the three. Per figure the table says what it has to be, the worst of all runs, how
far that is inside the gate, and how far apart the runs are. Ends with status 1 when a run did not pass.
"""
import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"as is": {}, "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
                                  "MKL_ENABLE_INSTRUCTIONS": "AVX2"}}
BLOCKS = {"fall of the loss, last fifth of the steps": (">=", 0.0), "answers right": (">=", 0.8)}
DEMOS = {       # {name: (launcher, its variables, {figure: gate})}; figures() measures them in this order
    "speech": ("demo.sh", {}, {"word errors": ("<=", 0.15), "word errors against other texts": (">=", 0.7),
                               "more like the new voice": (">=", 0.9), "ended by themselves": (">=", 1.0)}),
    "blocks": ("train_gsm8k_bd3lm_h200.sh --demo", {}, BLOCKS),
    "plans": ("train_hdp_diffusion_h200.sh --demo", {}, BLOCKS),
    "prompt": ("distill_demo.sh", {}, {"divergence closed": (">=", 0.5), "following closed": (">=", 0.5),
                                       "less of the two, control": ("<", 0.5)}),
    "labels": ("distill_demo.sh", {"STORY": "language"}, {"agreement": (">=", 0.7), "gain": (">=", 0.3)})}


def metrics(pattern, folder):
    """"metrics" of the newest evaluation.json that a pattern finds."""
    newest = max(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())["metrics"]


def figures(demo, folder):
    """What a demo measured in its folder, a number for each of its gates."""
    if demo == "speech":
        found = metrics("run-*/after/evaluation.json", folder)
        return [found[name] for name in ("wer", "shuffled_wer", "likeness", "stop_rate")]
    if demo == "prompt":
        found = metrics("training/evaluation/evaluation.json", folder)
        return [found["closed: kl"], found["closed: follows"],
                min(found["control closed: kl"], found["control closed: follows"])]
    if demo == "labels":
        found = metrics("evaluation/evaluation.json", folder)
        agreed = found["student: agreement"]
        others = [value for name, value in found.items() if name in ("base: agreement", "base + prompt: agreement")]
        return [agreed, agreed - max(others)]
    losses = [row["train/loss"] for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
              if row.get("train/loss") is not None]
    fifth = max(1, len(losses) // 5)
    answers = max(folder.glob("answers-*.json"), key=lambda path: path.stat().st_mtime)
    return [1 - statistics.fmean(losses[-fifth:]) / statistics.fmean(losses[:fifth]),
            json.loads(answers.read_text())["summary"]["strict"]]


def run(demo, setting, seed, folder):
    """Run a demo to its end -> {"status", "figures"}. SystemExit when it ends without its figures."""
    launcher, variables, _ = DEMOS[demo]
    command, out = ["bash", *shlex.split(f"launch/{launcher}")], {"OUT": str(folder), "OUTPUT_DIR": str(folder)}
    if demo == "speech":
        out["SEED"] = str(seed)
    else:
        command += ["--seed", str(seed)]
    folder.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "a") as log:
        status = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                env=os.environ | SETTINGS[setting] | variables | out).returncode
    try:
        return {"status": status, "figures": figures(demo, folder)}
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"error: {demo}, {setting}, seed {seed}: status {status}, {type(error).__name__}: {error}; "
                         f"see {folder}.log")


def summarise(runs):
    """The table of [{"demo", "figures"}]."""
    rows = []
    for demo, (_, _, gates) in DEMOS.items():
        of_demo = [run["figures"] for run in runs if run["demo"] == demo]
        for place, (figure, (sign, gate)) in enumerate(gates.items() if of_demo else ()):
            values = [each[place] for each in of_demo]
            worst, least = (min(values), min(values) - gate) if sign == ">=" else (max(values), gate - max(values))
            rows.append([demo, figure, f"{sign} {gate:g}", worst, least, max(values) - min(values), len(values)])
    return {"columns": ["demo", "figure", "gate", "worst", "inside by", "runs apart", "runs"], "rows": rows}


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("work_dir", type=Path, help="runs and what they measured")
    p.add_argument("--demos", nargs="+", choices=DEMOS, default=list(DEMOS), help="which to run now")
    p.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="where")
    p.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44], help="of weights, order, hold-out and draws")
    p.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = p.parse_args(argv)
    report = measure.new_report("do the demos pass whatever the seed and the processor?", torch.device("cpu"),
                                "python bench/gates.py WORK_DIR")
    cpu, path = report["cpu"], args.results_dir / "gates-cpu.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    for what in itertools.product(args.seeds, args.settings, args.demos):
        seed, setting, demo = what
        same = [run for run in runs if (run["seed"], run["setting"], run["demo"]) == what]
        if same and same[0]["status"] == 0:
            continue
        found = run(demo, setting, seed, args.work_dir.resolve() / setting.replace(" ", "-") / str(seed) / demo)
        print(f"{demo}, {setting}, seed {seed}: status {found['status']}, {found['figures']}", flush=True)
        runs = [run for run in runs if run not in same]
        runs.append({"demo": demo, "setting": setting, "seed": seed, "cpu": cpu, **found})
        runs.sort(key=lambda run: (run["setting"], run["seed"], run["demo"]))
        report |= {"cpu": "; ".join(sorted({run["cpu"] for run in runs})), "runs": runs,
                   "tables": {"gates": summarise(runs)}}
        measure.write_report("gates", report, args.results_dir)
    failed = [f"{run['demo']}, {run['setting']}, seed {run['seed']}" for run in runs if run["status"]]
    sys.exit(f"error: did not pass: {'; '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
