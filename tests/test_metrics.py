"""metrics.jsonl, the loss picture and its verdict, and the numbers of the learning-rate schedules."""
import json
import math
import subprocess
import sys

import pytest
from conftest import ROOT
from progress import PATIENCE_S

from metrics import MetricsLog, draw_losses, duration, read_metrics
from optim import lr_factor, sqrt_lr

PNG = b"\x89PNG\r\n\x1a\n"


def verdict(folder):
    """`python metrics.py FOLDER` as a user runs it: (exit status, what it printed)."""
    done = subprocess.run([sys.executable, str(ROOT / "metrics.py"), str(folder)], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, cwd=folder, timeout=PATIENCE_S)
    return done.returncode, done.stdout


def log(folder, resumed_step=0):
    return MetricsLog(folder, folder / "logs", "none", {}, resumed_step)


def steps(folder):
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def test_loss_curve_of_a_real_run(train, tmp_path):
    run = train("--learning_rate", 1e-3, "--max_steps", 10, "--validation_split", 0.2, "--eval_steps", 5)
    losses = list(run.metrics("train/loss").values())
    changes, path = draw_losses(run.output_dir)
    assert changes["train/loss"] == pytest.approx((sum(losses[:2]) / 2, sum(losses[-2:]) / 2))  # fifths of ten steps
    assert set(changes) == {"train/loss", "train/audio_loss", "train/text_loss"}
    assert all(last < first for first, last in changes.values())
    assert path == run.output_dir / "loss_curve.png" and path.read_bytes().startswith(PNG)

    path.unlink()
    status, text = verdict(run.output_dir)
    assert status == 0 and path.read_bytes().startswith(PNG)
    first, last = changes["train/loss"]
    assert f"{first:.3f} -> " in text and f"{last:.3f} fell" in text and "NOT" not in text

    # the same run told backwards
    rows = read_metrics(run.output_dir / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    status, text = verdict(tmp_path)
    assert status == 1 and "DID NOT FALL" in text and "Traceback" not in text


def test_verdict_without_enough_steps(tmp_path):
    status, text = verdict(tmp_path)
    assert status == 1 and text.startswith("error: ") and "metrics.jsonl" in text and "Traceback" not in text
    log(tmp_path).write(1, {"train/loss": 2.0})
    with pytest.raises(ValueError, match="1 training steps"):
        draw_losses(tmp_path)


def test_numbers_that_are_not_finite(tmp_path):
    """They are null in the file, which stays JSON, and no part of the verdict."""
    record = log(tmp_path)
    for step, loss in enumerate((3.0, 2.0, math.nan, math.inf), 1):
        record.write(step, {"train/loss": loss, "train/grad_norm": 1.0})
    record.write(4, {"eval/loss": math.nan})
    record.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.get("train/loss", "none") for row in rows] == [3.0, 2.0, None, None, "none"]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert draw_losses(tmp_path)[0] == {"train/loss": (3.0, 2.0)}


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
    assert [row["train/loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [9.0, 8.0, 5.0]

    log(tmp_path, resumed_step=0).close()           # started anew: nothing of the lost run counts
    assert steps(tmp_path) == []


def test_line_cut_off_by_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 3.0}\n{"step": 2, "train/loss": 2.0}\n{"step": 3, "train/lo')
    assert steps(tmp_path) == [1, 2]
    assert draw_losses(tmp_path)[0] == {"train/loss": (3.0, 2.0)}
    resumed = log(tmp_path, resumed_step=2)
    resumed.write(3, {"train/loss": 1.0})
    resumed.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_every_line_is_on_disk_at_once(tmp_path):
    """A kill loses no line that was written: nothing waits in a buffer of the process."""
    record = log(tmp_path)
    record.write(1, {"train/loss": 3.0})
    assert steps(tmp_path) == [1]
    record.close()


@pytest.mark.parametrize("seconds, text", [(0, "0:00:00"), (59.9, "0:00:59"), (3599, "0:59:59"), (3723, "1:02:03"),
                                           (90_061, "25:01:01"), (360_000, "100:00:00")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_warm_up_moves_from_the_first_step():
    for scheduler in ("cosine", "linear", "constant"):
        assert [lr_factor(step, 100, 4, scheduler) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
        assert lr_factor(4, 100, 4, scheduler) == 1.0
        assert lr_factor(0, 100, 0, scheduler) == 1.0       # no warm-up: no division by it either


@pytest.mark.parametrize("scheduler", ["cosine", "linear"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_decay_ends_at_the_floor(scheduler, floor):
    factors = [lr_factor(step, 110, 10, scheduler, floor) for step in range(10, 111)]
    assert all(later < earlier for earlier, later in zip(factors, factors[1:]))
    assert factors[0] == 1.0
    assert factors[50] == pytest.approx((1 + floor) / 2)    # half way through the decay
    quarter = {"cosine": (1 + math.sqrt(0.5)) / 2, "linear": 0.75}[scheduler]
    assert factors[25] == pytest.approx(floor + (1 - floor) * quarter)
    assert factors[100] == pytest.approx(floor)
    assert lr_factor(500, 110, 10, scheduler, floor) == pytest.approx(floor)


def test_constant_rate_stays():
    assert [lr_factor(step, 20, 0, "constant", 0.3) for step in (0, 10, 19, 40)] == [1.0] * 4


def test_square_root_rule():
    assert sqrt_lr(1e-4, 64, 16) == pytest.approx(2e-4)
    assert sqrt_lr(1e-4, 4, 16) == pytest.approx(5e-5)
