"""metrics.jsonl, and what trackers get of it."""
import json
import math

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from core import dist, metrics
from core.metrics import MetricsLog, read_metrics


def log(folder, resumed_step=0):
    return MetricsLog(folder, folder / "logs", "none", {}, resumed_step)


def steps(folder):
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def test_numbers_that_are_not_finite(tmp_path):
    """They are null in the file, which stays JSON."""
    record = log(tmp_path)
    for step, loss in enumerate((3.0, 2.0, math.nan, math.inf), 1):
        record.write(step, {"train/loss": loss, "train/grad_norm": 1.0})
    record.write(4, {"eval/loss": math.nan})
    record.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.get("train/loss", "none") for row in rows] == [3.0, 2.0, None, None, "none"]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_resumed_log_drops_what_a_crash_left_behind(tmp_path):
    first = log(tmp_path)
    for step in (1, 2, 3, 4):
        first.write(step, {"train/loss": 10.0 - step})
    first.write(4, {"eval/loss": 1.0})
    first.close()
    resumed = log(tmp_path, resumed_step=2)         # the newest checkpoint was step 2
    assert steps(tmp_path) == [1, 2]
    resumed.write(3, {"train/loss": 5.0})
    resumed.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "train/lo')     # cut off by a kill
    log(tmp_path, resumed_step=3).close()
    assert [row["train/loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [9.0, 8.0, 5.0]

    log(tmp_path, resumed_step=0).close()           # a fresh start: nothing of the lost run counts
    assert steps(tmp_path) == []


def test_tensorboard_gets_numbers_and_speech(tmp_path):
    """A second start continues the same run."""
    for start in (0, 2):
        record = MetricsLog(tmp_path, tmp_path / "logs", ["tensorboard"], {"seed": 1}, start, "project")
        for step in (1, 2) if start == 0 else (3,):
            record.write(step, {"train/loss": 1 / step, "train/grad_norm": math.nan})
        record.write_speech(step, "samples/0", np.full(2400, 0.5, np.float32), 24000)
        record.write_speech(step, "samples/1", np.zeros(0, np.float32), 24000)
        record.close()
    board = EventAccumulator(str(tmp_path / "logs"), size_guidance={"audio": 0}).Reload()
    losses = {event.step: event.value for event in board.Scalars("train/loss")}
    assert losses == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3}) and board.Tags()["audio"] == ["samples/0"]


def test_a_validation_that_is_due_again_stands_there_once(tmp_path):
    """Its run was killed before the next checkpoint said that it is done."""
    rows = [{"step": 1, "eval/loss": 3.0}, {"step": 2, "train/loss": 2.0}, {"step": 2, "eval/loss": 2.5}]
    for eval_due, kept in ((False, 3), (True, 2)):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        MetricsLog(tmp_path, tmp_path / "logs", "none", {}, 2, eval_due=eval_due).close()
        assert read_metrics(tmp_path / "metrics.jsonl") == rows[:kept]


@pytest.mark.parametrize("bad", [b"\xff\xfe", b'{"step": "3"}', b"[" * 100_000])
def test_a_damaged_log_is_moved_aside_whole(tmp_path, capsys, bad):
    """One bad line costs no other one: good rows on both sides of it go on in a new file."""
    path, good = tmp_path / "metrics.jsonl", [json.dumps({"step": n, "train/loss": 1.0}).encode() for n in (1, 2, 3, 4)]
    damaged = b"\n".join([*good[:2], bad, *good[2:]]) + b"\n"
    path.write_bytes(damaged)
    log(tmp_path, resumed_step=3).close()
    assert steps(tmp_path) == [1, 2, 3]
    (aside,) = tmp_path.glob("metrics.jsonl.damaged-*")
    said = capsys.readouterr().out
    assert aside.read_bytes() == damaged and aside.name in said and "damaged lines: 1, the first is line" in said
    log(tmp_path, resumed_step=3).close()
    assert len(list(tmp_path.glob("*damaged*"))) == 1       # the new one is whole


def test_the_first_step_of_a_run_does_not_count_for_its_speed(monkeypatch):
    """It compiles and allocates; a run that logs each step shows it on its own line."""
    now = 0.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    work, world = {"tokens": 100, "samples": 2, "flops": 1}, dist.World(device=torch.device("cpu"))
    whole, single = metrics.StepTimer(world.device), metrics.StepTimer(world.device)
    for now in (90.0, 90.5, 91.0):
        whole.count(work, 100)
        if now == 90:
            single.count(work, 100)
    values = whole.report(world)
    assert values["train/step_seconds"] == 0.5 and values["train/throughput"] == 200
    assert single.report(world)["train/step_seconds"] == 90
