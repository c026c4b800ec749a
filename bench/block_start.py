"""Block diffusion from a language model beside training from nothing, in the same CPU time: bound and accuracy.

    python distill/demo/get_smollm2.py smollm2                        # SmolLM2-135M-Instruct
    python bench/block_start.py smollm2 --work_dir work               # the demo's arithmetic; the same command goes on
    python bench/block_start.py smollm2 --work_dir work --gsm8k train.jsonl test.jsonl

Each way is diffusion/train_bd3lm.py itself in a process of its own, one thread, one way after the other, with the same
tokenizer, chat template, blocks and problems, so that bounds per token compare. What counts is the CPU time of the
process (of /proc, children and validations included), as other work on the machine does not change it much: after
--cpu_minutes it is asked to stop; the last validation counts. Work that a kill has cost is done again and not counted.

Writes bench/results/block_start-DEVICE.json, or block_start_gsm8k-DEVICE.json.
"""
import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure
from common import checkpoint

from transformers import AutoConfig, AutoModelForCausalLM  # isort: skip

ROOT = Path(__file__).resolve().parent.parent
TICK = os.sysconf("SC_CLK_TCK")
ALONE = measure.MALLOC | {"OMP_NUM_THREADS": "1"}       # of each process; freed memory is kept
BOTH = ["--chat", "--strip_calculator", "--block_size", "4", "--dropout", "0", "--bf16", "--num_workers", "0",
        "--gradient_accumulation_steps", "1", "--ema_decay", "0.95", "--save_steps", "0", "--save_total_limit", "1",
        "--eval_repeats", "1", "--early_stop_patience", "0", "--report_to", "none", "--max_steps", "1000000"]
ARITHMETIC = ["--max_length", "128", "--row_length", "160"]
GSM8K = ["--max_length", "384", "--row_length", "384", "--drop_too_long"]
LARGE, NANO = ["--per_device_train_batch_size", "4", "--eval_steps", "25", "--logging_steps", "5"], [
    "--per_device_train_batch_size", "8", "--eval_steps", "400", "--logging_steps", "100"]
FEW = ["--per_device_train_batch_size", "2", "--logging_steps", "5"]


def ways(args, work):
    """{name: flags of the trainer}. {MODEL} and {RANDOM} are folders of the same network."""
    model, new = ["--init_from", str(args.model)], ["--init_from", str(work / "random")]
    tokenizer = ["--tokenizer", str(args.model)]
    if args.gsm8k:
        return {"converted": [*model, *FEW, "--eval_steps", "100", "--learning_rate", "1e-4", "--warmup_steps", "20"],
                "tiny DiT from nothing": ["--model_size", "tiny", *tokenizer, *FEW, "--eval_steps", "200",
                                          "--learning_rate", "1e-3", "--warmup_steps", "50"]}
    return {"converted": [*model, *LARGE, "--learning_rate", "3e-4", "--warmup_steps", "5"],
            "the same network from nothing": [*new, *LARGE, "--learning_rate", "1e-3", "--warmup_steps", "20"],
            "nano DiT from nothing": ["--model_size", "nano", *tokenizer, *NANO, "--learning_rate", "2e-3",
                                      "--warmup_steps", "100"]}


def prepare(args, work):
    """(training file, validation file); made in the work folder, beside the network of random weights."""
    if args.gsm8k:
        train, test = args.gsm8k
    else:
        if not (work / "problems" / "tokenizer.json").exists():
            subprocess.run([sys.executable, ROOT / "diffusion" / "make_problems.py", "demo", work / "problems",
                            "--test", str(args.validation)], check=True)
        train, test = (work / "problems" / f"{name}.jsonl" for name in ("train", "test"))
        if not (work / "random").exists():
            torch.manual_seed(0)
            network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model)).to(torch.bfloat16)
            network.save_pretrained(work / "half")
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                (work / "half" / name).write_bytes((args.model / name).read_bytes())
            (work / "half").rename(work / "random")
    lines = Path(test).read_text(encoding="utf-8").splitlines(keepends=True)
    checkpoint.write_atomically(work / "validation.jsonl",
                                lambda path: path.write_text("".join(lines[:args.validation])))
    return train, work / "validation.jsonl"


def cpu_seconds(pid):
    """CPU seconds of a process and of those it has waited for; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK


def rows_of(output):
    """Rows of a run's metrics.jsonl, the last one of each (step, kind) only."""
    try:
        lines = (output / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]


class Way:
    """A way's process, and the CPU seconds of all its processes by which each checkpoint and validation was there."""

    def __init__(self, name, flags, work, limit):
        self.name, self.output, self.limit, self.process = name, work / name.replace(" ", "_"), limit, None
        self.command = [sys.executable, ROOT / "diffusion" / "train_bd3lm.py", *BOTH, *flags, "--output_dir",
                        self.output]
        self.file = work / f"{self.output.name}.json"
        self.known = json.loads(self.file.read_text()) if self.file.exists() else {"saved": {}, "validated": {}}
        self.go_on()

    def go_on(self):
        """Start from the newest checkpoint while there is time left; what came behind it is done, and paid, again."""
        saved = [self.known["saved"].get(path.name) or self.at_most(path)
                 for _, path in checkpoint.checkpoints(self.output)]
        self.spent = self.now = max(saved, default=0.0)
        if self.spent >= self.limit:
            return
        end = ctypes.CDLL(None).prctl       # this script's end, however it comes, asks the process to stop: 1, a signal
        self.process = subprocess.Popen(self.command, stdout=open(f"{self.output}.log", "a"), stderr=subprocess.STDOUT,
                                        env=os.environ | ALONE, start_new_session=True,
                                        preexec_fn=lambda: end(1, signal.SIGTERM))

    def at_most(self, path):
        """CPU seconds by which a checkpoint was there that was written when this script had been ended."""
        return self.known["looked"][1] + max(0.0, path.stat().st_mtime - self.known["looked"][0])

    def look(self):
        """Note what is new. True while the process runs; a process that failed ends the script."""
        if not self.process:
            return False
        ended = self.process.poll()
        self.now = max(self.now, self.spent + cpu_seconds(self.process.pid))
        for row in rows_of(self.output):
            if "eval/nll" in row:
                self.known["validated"].setdefault(str(row["step"]), self.now)
        for _, path in checkpoint.checkpoints(self.output):
            self.known["saved"].setdefault(path.name, self.now)
        self.known["looked"] = time.time(), self.now
        text = json.dumps(self.known)
        checkpoint.write_atomically(self.file, lambda path: path.write_text(text))
        if ended:
            raise SystemExit(f"error: {self.name}: exit status {ended}; see {self.output}.log")
        if ended == 0:      # its time is over, or somebody else asked it to stop
            self.process = None
            self.go_on()
        elif self.now >= self.limit:
            self.process.send_signal(signal.SIGTERM)
        return self.process is not None


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", type=Path, help="folder of a small language model with a chat template")
    p.add_argument("--work_dir", type=Path, required=True, help="problems, checkpoints (2 GB a way), what is known")
    p.add_argument("--gsm8k", nargs=2, metavar=("TRAIN", "TEST"), help="JSONL files of GSM8K instead of arithmetic")
    p.add_argument("--cpu_minutes", type=float, default=12, help="CPU time of each way, validations included")
    p.add_argument("--validation", type=int, default=32, help="problems of a validation, all of them answered")
    p.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = p.parse_args(argv)
    work = args.work_dir / ("gsm8k" if args.gsm8k else "arithmetic")
    work.mkdir(parents=True, exist_ok=True)
    train, validation = prepare(args, work)
    data = ["--train_data_file", str(train), "--eval_data_file", str(validation), "--eval_accuracy",
            str(args.validation), *(GSM8K if args.gsm8k else ARITHMETIC)]
    runs = []
    for name, flags in ways(args, work).items():        # one at a time: each takes up to 7 GB
        runs.append(Way(name, [*flags, *data], work, 60 * args.cpu_minutes))
        while runs[-1].look():
            time.sleep(2)
    print(measure.write_report("block_start_gsm8k" if args.gsm8k else "block_start",
                               report_of(runs, args, argv), args.results_dir))


def report_of(runs, args, argv):
    report = measure.new_report("does block diffusion from a language model beat training from nothing in the same "
                                "CPU time?", torch.device("cpu"), measure.command("block_start", argv)
                                .replace(str(args.model), args.model.name))
    curve, end = [], []
    for run in runs:
        rows = rows_of(run.output)
        found = sorted({row["step"]: row for row in rows if "eval/nll" in row}.items())
        of_way = [[run.name, step, round(run.known["validated"][str(step)]), row["eval/nll"], row["eval/accuracy"],
                   row["eval/accuracy_flexible"]] for step, row in found]
        curve += of_way
        end.append(of_way[-1])
    columns = ["way", "step", "CPU (s)", "bound (nats/token)", "right", "right by the last number"]
    report["problems"] = args.validation
    report["tables"] = {"end": {"columns": columns, "rows": end}, "curve": {"columns": columns, "rows": curve}}
    return report


if __name__ == "__main__":
    main()
