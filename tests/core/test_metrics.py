"""metrics.jsonl and the trackers that get its values."""
import json
import math
from argparse import Namespace
from unittest import mock

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torch
from core import dist, metrics
from core.cli import UserError
from core.metrics import MetricsLog, read_metrics
from speech.speak import log_speech


def log(folder, resumed_step=0, report_to=(), **options):
    args = Namespace(output_dir=folder, logging_dir=folder / "logs", report_to=report_to)
    return MetricsLog(args, resumed_step, **options)


def steps(folder):
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def test_resumed_log_drops_rows_after_the_checkpoint(tmp_path):
    first = log(tmp_path)
    for step in (1, 2, 3, 4):
        first.write(step, {"train/loss": 10.0 - step, "train/grad_norm": math.nan})
    first.write(4, {"eval/loss": 1.0})
    resumed = log(tmp_path, resumed_step=2)         # the newest checkpoint was step 2
    assert steps(tmp_path) == [1, 2] and "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    resumed.write(3, {"train/loss": 5.0})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\n{"step": "3"}\n{"step": 4, "train/lo')       # the last line was cut by a kill
    log(tmp_path, resumed_step=3)
    assert [row["train/loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [9.0, 8.0, 5.0]
    log(tmp_path, resumed_step=0)           # a fresh start keeps no rows
    assert steps(tmp_path) == []


def test_tensorboard_gets_numbers_and_speech(tmp_path):
    for start in (0, 2):
        record = log(tmp_path, start, ["tensorboard"])
        log_speech(record, start, "samples/0", np.full(2400, 0.5, np.float32))
        log_speech(record, start, "samples/1", np.zeros(0, np.float32))
        for step in (1, 2) if start == 0 else (3,):
            record.write(step, {"train/loss": 1 / step, "train/grad_norm": math.nan})
    board = EventAccumulator(str(tmp_path / "logs" / tmp_path.name), size_guidance={"audio": 0}).Reload()
    losses = {event.step: event.value for event in board.Scalars("train/loss")}
    assert losses == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3}) and board.Tags()["audio"] == ["samples/0"]


@pytest.mark.parametrize("eval_due, kept", [(False, 3), (True, 2)])
def test_a_repeated_validation_is_logged_once(tmp_path, eval_due, kept):
    rows = [{"step": 1, "eval/loss": 3.0}, {"step": 2, "train/loss": 2.0}, {"step": 2, "eval/loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log(tmp_path, 2, eval_due=eval_due)
    assert read_metrics(tmp_path / "metrics.jsonl") == rows[:kept]


def test_a_full_disk_for_tensorboard_is_named(tmp_path):
    record = log(tmp_path)
    record.board = mock.Mock(log_dir="logs", **{"add_scalar.side_effect": OSError(28, "No space left on device")})
    with pytest.raises(UserError, match=r"^logs cannot be read or written \(No space left on device\)$"):
        record.write(1, {"train/loss": 1.0})


def test_speed_without_pauses(monkeypatch):
    now = 0.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    world = dist.World(device=torch.device("cpu"))
    timer = metrics.StepTimer()
    for steps in (2, 1):
        for _ in range(steps):
            now += 0.5
            timer.sums.update({"tokens": 100, "samples": 2, "flops": 1}, steps=1, slots=125)
        with timer.timed("paused"):        # a validation
            now += 60
        with timer.timed("waited"):
            pass
        values = timer.report(world)
        assert values["train/step_seconds"] == 0.5 and values["train/throughput"] == 200
        assert values["train/padding"] == pytest.approx(0.2) and values["train/data_wait_seconds"] == 0
