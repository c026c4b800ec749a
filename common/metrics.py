"""Numbers of a run: metrics.jsonl always, TensorBoard, W&B and trackio when asked, throughput and memory."""
import json
import math
import os
import re
import resource
import socket
import threading
import time
import uuid
from pathlib import Path

import torch

from common import json_files
from common.checkpoint import move_aside, naming, write_atomically

# Dense bf16 tensor-core peak, FLOP/s, from the makers' datasheets; SXM parts unless the name says otherwise.
PEAK_BF16 = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12,
             "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12}


def peak_flops(device):
    """Peak bf16 FLOP/s of this device, or None when unknown: then no MFU is claimed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16.items() if re.search(rf"\b{part}\b", name)), None)


def peak_memory(device):
    """GiB: peak allocated GPU memory, or this process's peak resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30


def duration(seconds):
    """Seconds as 1:02:03."""
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def speed_report(totals, seconds, steps, slots, waited, device, world_size):
    """Throughput of all ranks over `seconds` of training -> {metric name: float}.

    totals: useful work of all ranks, {"tokens", "samples", "flops"} (numbers); slots: tokens with padding; waited:
    seconds this rank waited for data. MFU is model FLOP/s over the known bf16 peak of all GPUs.
    """
    memory, peak = peak_memory(device), peak_flops(device)
    values = {"train/throughput": totals["tokens"] / seconds, "train/samples_per_second": totals["samples"] / seconds,
              "train/step_seconds": seconds / steps, "train/padding": 1 - totals["tokens"] / slots,
              "train/data_wait_seconds": waited, "train/memory_gib": memory}
    if device.type == "cuda":
        values["system/gpu_memory_allocated"] = memory
    if peak:
        values["train/mfu"] = totals["flops"] / seconds / (peak * world_size)
    return values


# TensorBoard's custom scalars: {group: {chart: patterns of its curves}}, what is looked at first in front
BOARD = {"Loss": {"loss": ["(train|eval)/(loss|nll)$"], "audio": ["(train|eval)/audio_loss$"],
                  "text": ["(train|eval)/text_loss$"], "codebooks": ["train/audio_loss_codebook_\\d+$"]},
         "Speech": {"word errors": ["eval/(wer|cer)$"], "voice": ["eval/speaker_similarity$"],
                    "ended by themselves": ["eval/stop_rate$"], "length": ["eval/length_ratio$"],
                    "end of stream": ["(train|eval)/(eos_accuracy|stop_recall)$"]},
         "Optimisation": {"learning rate": ["train/learning_rate$"], "gradient norm": ["train/grad_norm$"]},
         "Speed and memory": {"throughput": ["train/throughput$"], "seconds a step": ["train/step_seconds$"],
                              "waiting for data": ["train/data_wait_seconds$"], "memory": ["train/memory_gib$"]}}


class MetricsLog:
    """Rank 0's record of a run. Make it on rank 0 only. report_to: some of flags.TRACKERS.

    Lines of metrics.jsonl and TensorBoard points later than resumed_step (work lost in a crash) are
    dropped first, so no step stands there twice. A metrics.jsonl with other lines than ours is moved
    aside whole, its good lines go on in a new one. Every start adds a line to starts.jsonl: when,
    where, from which step, how configured.
    """

    def __init__(self, output_dir, logging_dir, report_to, config, resumed_step=0, project=None,
                 eval_due=False):
        """eval_due: resumed_step is validated again; what was logged of that already is dropped."""
        self.path = Path(output_dir) / "metrics.jsonl"
        rows, bad = read_rows(self.path)
        if bad:
            move_aside(self.path, f"is damaged ({bad})")
        if rows:
            kept = [row for row in rows if row["step"] <= resumed_step]
            if eval_due:        # by a run that was killed before its next checkpoint
                kept = [row for row in kept if row["step"] < resumed_step or not is_validation(row)]
            text = "".join(json.dumps(row) + "\n" for row in kept)
            write_atomically(self.path, lambda path: path.write_text(text))
        elif self.path.exists():        # nothing but the beginning of a line
            self.path.write_bytes(b"")
        self._add_start(config, resumed_step)
        self.file = open(self.path, "a", buffering=1)
        self.board, self.runs = None, {}        # runs: {"wandb" or "trackio": (module, its run)}
        if "tensorboard" in report_to:
            self._open_board(logging_dir, config, resumed_step)
        # a resumed run goes on in the same run there, a new one does not
        name, run_id = Path(output_dir).resolve().name, Path(output_dir) / "wandb_id"
        if set(report_to) & {"wandb", "trackio"} and not (resumed_step and run_id.exists()):
            write_atomically(run_id, lambda path: path.write_text(uuid.uuid4().hex[:16]))
        if "wandb" in report_to:
            import wandb
            self.runs["wandb"] = wandb, wandb.init(
                project=project, dir=str(output_dir), config=config, resume="allow", name=name,
                id=json_files.read_text(run_id))
        if "trackio" in report_to:      # names are all it knows runs by
            import trackio
            self.runs["trackio"] = trackio, trackio.init(
                project=project, name=f"{name}-{json_files.read_text(run_id)[:4]}", resume="allow",
                config=json.loads(json.dumps(config, default=str)))

    def _add_start(self, config, step):
        """One more line of starts.jsonl."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        start = {"time": time.time(), "step": step, "ranks": ranks, "host": socket.gethostname(),
                 "config": config}
        starts = self.path.with_name("starts.jsonl")
        if starts.exists() and not starts.is_file():
            move_aside(starts, "is not a file")
        with naming(starts):
            earlier = starts.read_bytes() if starts.exists() else b""
        if earlier and not earlier.endswith(b"\n"):
            earlier += b"\n"
        text = earlier + json.dumps(start, default=str).encode() + b"\n"
        write_atomically(starts, lambda path: path.write_bytes(text))

    def _open_board(self, folder, config, step):
        """Begin TensorBoard's files; points later than a step are hidden there."""
        from torch.utils.tensorboard import SummaryWriter
        # a full disk, which add_scalar raises, its thread would print as well
        show = threading.excepthook
        threading.excepthook = lambda found: issubclass(found.exc_type, OSError) or show(found)
        charts = {group: {chart: ["Multiline", patterns] for chart, patterns in charts.items()}
                  for group, charts in BOARD.items()}
        with naming(folder):
            self.board = SummaryWriter(folder, purge_step=step + 1)
            self.board.add_custom_scalars(charts)
            self.board.add_text("config", "```\n" + json.dumps(config, indent=1) + "\n```", step)

    def write(self, step, values):
        """Record {name: number} at an optimizer step everywhere; a number that is not finite becomes null in JSON."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with naming(self.path):
            self.file.write(json.dumps({"step": step, **finite}) + "\n")
        if self.board:
            with naming(self.board.log_dir):
                for name, value in values.items():
                    self.board.add_scalar(name, value, step)
                self.board.flush()
        for _, run in self.runs.values():
            run.log(values, step=step)

    def write_speech(self, step, name, wave, rate, picture):
        """Sound (n,) float32 in -1..1 at `rate` Hz and its picture (H, W, 3) uint8, to all but
        metrics.jsonl.
        """
        if self.board:
            with naming(self.board.log_dir):
                if len(wave):       # TensorBoard cannot take silence of no length
                    sound = torch.from_numpy(wave).clamp(-1, 1)[None]
                    self.board.add_audio(name, sound, step, rate)
                self.board.add_image(f"{name}/mel", picture, step, dataformats="HWC")
                self.board.flush()
        for module, run in self.runs.values():
            samples = (wave.clip(-1, 1) * 32767).astype("int16")        # floats would be made loud
            sound = {name: module.Audio(samples, sample_rate=rate)} if len(wave) else {}
            run.log({**sound, f"{name}/mel": module.Image(picture)}, step=step)

    def close(self):
        """Flush and close every writer."""
        with naming(self.path):
            os.fsync(self.file.fileno())
            self.file.close()
        if self.board:
            with naming(self.board.log_dir):
                self.board.close()
        for _, run in self.runs.values():
            run.finish()


def is_validation(row):
    """Whether a row of metrics.jsonl is of a validation."""
    return any(name.startswith("eval/") for name in row)


def read_rows(path):
    """(rows of a metrics.jsonl, what is wrong with it or ""). A last line that a kill cut off is no
    fault.

    A row is a JSON object with an integer "step"; all there are come back, also those behind a line
    that is not one.
    """
    path, rows, wrong = Path(path), [], []
    if not path.exists():
        return [], ""
    if not path.is_file():
        return [], "it is not a file"
    with naming(path):
        lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json_files.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        elif line.strip() and number < len(lines):      # the last line may be half written
            wrong.append(number)
    return rows, f"{len(wrong)} lines are not metrics, line {wrong[0]} first" if wrong else ""


def read_metrics(path):
    """Rows of a metrics.jsonl as dicts."""
    return read_rows(path)[0]
