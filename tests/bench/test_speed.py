"""bench/speed.py: ours, minimal/ and transformers' Trainer start at one loss; bench/profile_step.py: all time has a name."""
import json
import sys
import time

import pytest
import torch

from bench import speed

FEW = ("--rounds", "1", "--samples", "4", "--batch", "2")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, quick_python):
    """And the ways' processes have their imports done, so that the clock tells how long they take."""
    monkeypatch.setattr(sys, "executable", quick_python)
    monkeypatch.setattr(speed, "seconds_of", lambda pid: time.monotonic())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def table(name, shape, tmp_path, *more):
    """{way: {column: value}} that speed.py has measured."""
    speed.main([name, "--shape", shape, *FEW, "--results_dir", str(tmp_path), *more])
    report = json.loads((tmp_path / f"{name}-cpu.json").read_text())
    rows = [dict(zip(report["tables"][name]["columns"], row)) for row in report["tables"][name]["rows"]]
    for row in rows:
        seconds = report["runs"][row["way"]][0]["seconds"]
        assert row["samples/s"] * seconds == pytest.approx(4) and row["step (ms)"] > 0
    return {row["way"]: row for row in rows}


@pytest.mark.slow
def test_speech_by_the_trainer_minimal_and_transformers(tmp_path):
    """In turn, and all of it; with random codes of clips too, as on machines that cannot decode audio."""
    rows = table("speech", "tiny", tmp_path, "--lora")
    assert rows.keys() == {"ours", "ours, packed", "minimal", "Trainer"}
    assert rows["ours"]["first loss"] == pytest.approx(rows["minimal"]["first loss"], rel=1e-5)
    assert [rows[way]["steps of an epoch"] for way in ("ours", "minimal", "Trainer")] == [2, 2, 2]
    assert rows["ours"]["padding"] == 0 < rows["ours, packed"]["padding"] and rows["ours"]["ours is faster by"] == 1


def test_other_losses_stop_it():
    def found(loss):
        return {way: [{"rows": [{"train/loss": value}]}] for way, value in (("ours", 2.0), ("minimal", loss))}
    speed.check_first_loss(found(2.0001), ("ours", "minimal"), torch.device("cpu"))
    for loss in 2.001, float("nan"):
        with pytest.raises(SystemExit, match="DISAGREE"):
            speed.check_first_loss(found(loss), ("ours", "minimal"), torch.device("cpu"))
