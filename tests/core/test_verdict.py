"""A run in words: what is said of its losses and of its speech follows from its numbers."""
import json
import subprocess
import sys

import pytest

from tests.helpers.trainer import ROOT


@pytest.mark.parametrize("training, said", [
    ([2.0, 1.5, 1.0], "while the training loss fell: overfitting, take the base model"),
    ([2.0, 2.5, 3.0], "the run diverged, take the base model and a lower rate")])
def test_a_base_that_stays_the_best_has_no_checkpoint(tmp_path, training, said):
    found = [{"step": 0, "eval/loss": 2.0}]
    for step, loss in enumerate(training, 1):
        found += [{"step": step, "train/loss": loss}, {"step": step, "eval/loss": 2.0 + step / 10}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    subprocess.run([sys.executable, ROOT / "core" / "report.py", tmp_path], check=True)
    page = (tmp_path / "report.html").read_text()
    assert said in page and "checkpoint-0" not in page
