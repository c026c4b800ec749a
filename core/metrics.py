"""Numbers of a run: written to metrics.jsonl, TensorBoard and W&B, read again, put into words.

Imports the standard library only: report.py runs where no torch is.
"""
import contextlib
import json
import math
import os
import re
import resource
import threading
import time
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path, PurePath

from core import json_files

# Dense bf16 tensor-core peak, FLOP/s, from the makers' datasheets; SXM unless noted
PEAK_BF16 = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
             "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
             "A10": 125e12, "RTX 4090": 165e12}
SMALL = 0.005       # share of a loss that counts as no change: less than losses differ by seed
UNDERSTOOD, PARTLY = 0.15, 0.5      # word error rates: up to here speech is understood, or partly


# ---- Speed


def duration(seconds):
    """Seconds as 1:02:03."""
    return str(timedelta(seconds=int(seconds)))


def model_text(model, adapters):
    """The line about a model's size. Layers in NF4 count their values, not their bytes."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    every = sum(p.numel() for p in model.parameters()) + sum(
        m.in_features * m.out_features - m.weight.numel() for m in model.modules()
        if hasattr(m, "nf4"))
    return (f"model      {every / 1e6:,.1f} M parameters, {trained / 1e6:,.3f} M trainable "
            f"({'LoRA' if adapters else 'full'})")


class StepTimer:
    """Work and seconds of the steps since the last log line; pauses do not count, nor does the
    run's first step, which compiles and allocates, unless it has a log line.
    """

    def __init__(self, device):
        self.device, self.first = device, None
        self.reset()

    def reset(self):
        self.work, self.steps, self.slots = Counter(), 0, 0
        self.waited, self.start = 0.0, time.monotonic()

    @contextlib.contextmanager
    def waiting(self):
        """This rank waits for data in here."""
        start = time.monotonic()
        yield
        self.waited += time.monotonic() - start

    @contextlib.contextmanager
    def paused(self):
        """Time spent in here is not training: validation, saves."""
        start = time.monotonic()
        yield
        self.start += time.monotonic() - start

    def count(self, work, slots):
        """Add a step. work: {"tokens", "samples", "flops"} of all ranks; slots: with padding."""
        if self.first is None:
            if self.device.type == "cuda":
                import torch
                torch.cuda.synchronize(self.device)     # else its kernels count for the next step
            self.first = work, slots, time.monotonic() - self.start, self.waited
            return self.reset()
        self.work.update(work)
        self.steps, self.slots = self.steps + 1, self.slots + slots

    def report(self, world):
        """{metric name: float} of all ranks' work since reset(), which this calls. MFU is model
        FLOP/s over the bf16 peak of all GPUs; audio_seconds gives a rate as well.
        """
        found = self.work, self.slots, time.monotonic() - self.start, self.waited
        work, slots, seconds, waited = found if self.steps else self.first
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
        values = {"train/throughput": work["tokens"] / seconds,
                  "train/samples_per_second": work["samples"] / seconds,
                  "train/step_seconds": seconds / max(1, self.steps), "train/memory_gib": memory,
                  "train/padding": 1 - work["tokens"] / slots, "train/data_wait_seconds": waited}
        values |= {f"train/{name}_per_second": amount / seconds for name, amount in work.items()
                   if name.endswith("_seconds")}
        if world.device.type == "cuda":
            import torch
            memory = torch.cuda.max_memory_allocated(world.device) / 2**30
            values |= {"train/memory_gib": memory, "system/gpu_memory_allocated": memory}
            name = torch.cuda.get_device_name(world.device)
            peak = [of for part, of in PEAK_BF16.items() if re.search(rf"\b{part}\b", name)]
            if peak:
                values["train/mfu"] = work["flops"] / seconds / (peak[0] * world.size)
        self.reset()
        return values


# ---- Written


class MetricsLog:
    """A run's record, of rank 0 alone. report_to: some of cli.TRACKERS; config: flags, for W&B.
    Lines of metrics.jsonl and TensorBoard points later than resumed_step (work lost in a crash) are
    dropped first, so no step is there twice. A metrics.jsonl with other lines than ours is moved
    aside whole, its good lines go on in a new one.
    """

    def __init__(self, output_dir, logging_dir, report_to, config, resumed_step=0, project=None,
                 eval_due=False):
        """eval_due: resumed_step is validated again, so its earlier numbers are dropped."""
        from core import checkpoint, dist  # which import torch
        self.naming = dist.error_names_file
        self.path = Path(output_dir) / "metrics.jsonl"
        rows, bad = read_rows(self.path)
        if bad:
            checkpoint.move_aside(self.path, f"is damaged ({bad})")
        again = eval_due or not resumed_step    # by a run killed before its next checkpoint
        kept = [row for row in rows if row["step"] < resumed_step or row["step"] == resumed_step
                and not (again and any(name.startswith("eval/") for name in row))]
        checkpoint.write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.file = open(self.path, "a", buffering=1)
        self.board = self.wandb = None
        if "tensorboard" in report_to:
            from torch.utils.tensorboard import SummaryWriter
            show = threading.excepthook
            # add_scalar raises the error of a full disk as well
            threading.excepthook = lambda found: issubclass(
                found.exc_type, OSError) or show(found)
            with self.naming(logging_dir):
                self.board = SummaryWriter(logging_dir, purge_step=resumed_step + 1)
        if "wandb" in report_to:
            # a resumed run goes on in the same run there, a new one does not
            run_id = Path(output_dir) / "wandb_id"
            if not (resumed_step and run_id.exists()):
                checkpoint.write_text(run_id, uuid.uuid4().hex[:16])
            import wandb
            self.wandb = wandb.init(
                project=project, dir=str(output_dir), config=config, resume="allow",
                name=Path(output_dir).resolve().name, id=json_files.read_text(run_id))

    def write(self, step, values):
        """Record {name: number} at an optimizer step everywhere; in JSON nan and inf are null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self.naming(self.path):
            self.file.write(json.dumps({"step": step, **finite}) + "\n")
        if self.board:
            with self.naming(self.board.log_dir):
                for name, value in values.items():
                    self.board.add_scalar(name, value, step)
                self.board.flush()
        if self.wandb:
            self.wandb.log(values, step=step)

    def write_speech(self, step, name, wave, rate):
        """A sound, (n,) float32 in -1..1 at `rate` Hz, maybe empty, to all but metrics.jsonl."""
        wave = wave.clip(-1, 1)
        if self.board and len(wave):
            with self.naming(self.board.log_dir):
                self.board.add_audio(name, wave[None], step, rate)
                self.board.flush()
        if self.wandb and len(wave):
            import wandb
            samples = (wave * 32767).astype("int16")    # floats would be made as loud as can be
            self.wandb.log({name: wandb.Audio(samples, sample_rate=rate)}, step=step)

    def close(self):
        """Flush and close every writer."""
        os.fsync(self.file.fileno())
        self.file.close()
        if self.board:
            self.board.close()
        if self.wandb:
            self.wandb.finish()


# ---- Read


def read_rows(path):
    """(rows of a metrics.jsonl, its fault or ""). A row is a JSON object with an integer "step";
    all come back, also those after a damaged line. A last line cut off by a kill is not a fault.
    """
    path, rows, wrong = Path(path), [], []
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, 1):
        row = None
        with contextlib.suppress(ValueError):
            row = json_files.loads(line)
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        elif line.strip() and number < len(lines):      # the last one was being written
            wrong.append(number)
    return rows, f"{len(wrong)} lines are not metrics, line {wrong[0]} first" if wrong else ""


def read_metrics(path):
    """Rows of a metrics.jsonl as dicts."""
    return read_rows(path)[0]


def curve(rows, name):
    """[(step, value)] of one metric by step, without missing or infinite values."""
    found = sorted((row["step"], row[name]) for row in rows
                   if isinstance(row.get(name), (int, float)))
    return [(step, value) for step, value in found if math.isfinite(value)]


# ---- In words


def percent(share):
    """0.98 -> "98 %", 0.925 -> "92.5 %"; only a whole share is 100 %, only none is 0 %."""
    shown = min(99.9, max(0.1, share * 100)) if 0 < share < 1 else share * 100
    return f"{shown:.1f}".removesuffix(".0") + " %"


def loss_clause(rows):
    """Clause about the validation loss: its first, best and last value."""
    training, found = curve(rows, "train/loss"), curve(rows, "eval/nll")
    what = "the validation bound" if found else "validation loss"
    found = found or curve(rows, "eval/loss")
    if not found:
        return ("nothing was validated; training loss "
                f"{training[0][1]:.4f} -> {training[-1][1]:.4f}" if training
                else "nothing was logged")
    (_, start), (last, end) = found[0], found[-1]
    best, step = min((value, step) for step, value in found)
    where = f"{what} was {start:.4f} at first, best at step {step} ({best:.4f})"
    rise = (end - best) / max(abs(best), 1e-12)
    if rise <= SMALL:
        return where
    take = f"checkpoint-{step}" if step else "the base model"
    return f"{where} and {rise * 100:.1f} % higher at step {last}: take {take}"


def understood(share):
    """Word error rate `share` as a clause."""
    how = "" if share <= UNDERSTOOD else "partly " if share <= PARTLY else "not "
    return f"speech is {how}understood (word errors {percent(share)})"


def verdict(rows, evaluations=()):
    """[clause] about a run. rows: of metrics.jsonl, {"step": int, metric: number or None};
    evaluations: what an evaluation.json has, {"name", "metrics": {metric: number or None}}.
    """
    clauses = [loss_clause(rows)]
    if stops := curve(rows, "eval/stop_rate"):
        clauses.append(f"{percent(stops[-1][1])} of the sample prompts ended by themselves")
    return clauses + [
        f"{PurePath(found['name']).name}: {understood(share)}" for found in evaluations
        if (share := found["metrics"].get("wer")) is not None and math.isfinite(share)]


def verdict_line(clauses):
    """The line that every script prints of its verdict."""
    return f"verdict    {'; '.join(clauses)}"
