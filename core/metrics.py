"""Metrics of a run: measure speed, write metrics.jsonl, TensorBoard and W&B, read and summarise.

Imports the standard library only, so that report.py runs without torch.
"""
import contextlib
import json
import math
import re
import resource
import time
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path

from core import cli, json_files

# Peak FLOP/s of dense bf16 products, from NVIDIA's datasheets; SXM unless noted
PEAK_BF16 = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
             "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
             "A10": 125e12, "RTX 4090": 165e12}


def duration(seconds):
    """Seconds as 1:02:03."""
    return str(timedelta(seconds=int(seconds)))


class StepTimer:
    """Sums of the steps since the last log line, without pauses. The loop adds to `sums` the work
    of all ranks: "steps", "tokens", "samples", "flops", and "slots", the tokens with padding."""

    def __init__(self):
        self.sums, self.start = Counter(), time.monotonic()

    @contextlib.contextmanager
    def timed(self, name):
        """Context whose seconds are "waited", for data, or "paused": validation and saves, which
        do not count as training."""
        start = time.monotonic()
        yield
        self.sums[name] += time.monotonic() - start

    def report(self, world):
        """{metric name: float} of all ranks' work since the last report. MFU is the model's FLOP/s
        divided by the bf16 peak of all GPUs."""
        sums, seconds = self.sums, time.monotonic() - self.start - self.sums["paused"]
        self.sums, self.start = Counter(), time.monotonic()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20     # of kibibytes
        values = {"train/throughput": sums["tokens"] / seconds,
                  "train/step_seconds": seconds / sums["steps"], "train/memory_gib": memory,
                  "train/padding": 1 - sums["tokens"] / sums["slots"],
                  "train/data_wait_seconds": sums["waited"]}
        values |= {f"train/{name}_per_second": amount / seconds for name, amount in sums.items()
                   if name == "samples" or name.endswith("_seconds")}
        if world.device.type == "cuda":
            import torch
            memory = torch.cuda.max_memory_allocated(world.device) / 2**30
            values |= {"train/memory_gib": memory, "system/gpu_memory_allocated": memory}
            name = torch.cuda.get_device_name(world.device)
            peaks = [peak for gpu, peak in PEAK_BF16.items() if re.search(rf"\b{gpu}\b", name)]
            if peaks:
                values["train/mfu"] = sums["flops"] / seconds / (peaks[0] * world.size)
        return values


class MetricsLog:
    """Writes a run's metrics, on rank 0. Lines of metrics.jsonl and TensorBoard points after
    resumed_step, which a crash has undone, are dropped first, so no step is there twice."""

    def __init__(self, args, resumed_step=0, eval_due=False):
        """args: flags of the trainer. eval_due: resumed_step will be validated again, so its
        earlier validation is dropped."""
        from core import checkpoint  # which imports torch
        folder, name = Path(args.output_dir), Path(args.output_dir).resolve().name
        self.path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(self.path) if resumed_step and row["step"]
                <= resumed_step - (eval_due and any(name.startswith("eval/") for name in row))]
        checkpoint.write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.board = self.wandb = None
        if "tensorboard" in args.report_to:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(Path(args.logging_dir) / name, purge_step=resumed_step + 1)
        if "wandb" in args.report_to:
            # a resumed run continues the same W&B run, a new one does not
            run_id = folder / "wandb_id"
            if not (resumed_step and run_id.exists()):
                checkpoint.write_text(run_id, uuid.uuid4().hex[:16])
            import wandb
            self.wandb = wandb.init(
                project=args.wandb_project, dir=str(folder), name=name, resume="allow",
                id=json_files.read_text(run_id), config=cli.remove_secrets(vars(args)))

    def write(self, step, values):
        """Write {name: number} of an optimizer step to all logs; nan and inf are null in JSON."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with cli.error_names_file(self.path), open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")
        if self.board:
            with cli.error_names_file(self.board.log_dir):
                for name, value in values.items():
                    self.board.add_scalar(name, value, step)
                self.board.flush()
        if self.wandb:
            self.wandb.log(values, step=step)


def read_metrics(path):
    """Rows of a metrics.jsonl: JSON objects with an integer "step". Other lines, such as a last one
    that a kill has cut, are passed over."""
    rows = []
    for line in Path(path).read_bytes().splitlines() if Path(path).is_file() else ():
        with contextlib.suppress(ValueError):
            row = json_files.loads(line)
            if isinstance(row, dict) and type(row.get("step")) is int:
                rows.append(row)
    return rows


def curve(rows, name):
    """[(step, value)] of one metric by step, without missing or infinite values."""
    return sorted((row["step"], row[name]) for row in rows
                  if isinstance(row.get(name), (int, float)) and math.isfinite(row[name]))


# ---- Verdict


def percent(share):
    """0.98 -> "98 %", 0.925 -> "92.5 %"."""
    return f"{round(share * 100, 1):g} %"


def verdict(rows):
    """[clause] about a run: its validation loss, which model to take, how the sample prompts ended.
    rows: of its metrics.jsonl."""
    losses, clauses = curve(rows, "eval/nll") or curve(rows, "eval/loss"), ["nothing was validated"]
    if losses:
        (_, start), (last, end) = losses[0], losses[-1]
        best, step = min((value, step) for step, value in losses)
        clauses = [f"validation loss was {start:.4f} at first, best at step {step} ({best:.4f})"]
        rise = (end - best) / max(abs(best), 1e-12)
        if rise > 0.005:    # less is noise: seeds differ by more
            model = f"checkpoint-{step}" if step else "the base model"
            clauses[0] += f" and {rise * 100:.1f} % higher at step {last}: take {model}"
    for _, share in curve(rows, "eval/stop_rate")[-1:]:
        clauses.append(f"{percent(share)} of the sample prompts ended by themselves")
    return clauses
