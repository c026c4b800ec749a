"""The block-diffusion launchers without Slurm: the demo."""
import json
import re
from pathlib import Path

import pytest

from tests.launch.test_launchers import launch

HDP = "train_hdp_diffusion_h200.sh"


@pytest.mark.slow
def test_the_demo_trains_and_answers(tmp_path, quick):
    done = launch(HDP, "--demo", "60", "--max_steps", "12", "--eval_steps", "6", "--warmup_steps", "2",
                  "--logging_steps", "2", "--output_dir", "out", cwd=tmp_path, **quick)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]      # too short to learn it, and it says so
    assert re.search(r"^verdict    FAILED: not 80 % of the answers are right; .* of 8 problems were answered right; ",
                     done.stdout, re.M)
    bounds = [float(b) for b in re.findall(r"^eval .*? nll <= ([\d.]+)", done.stdout, re.M)]
    assert len(bounds) == 2 and bounds[1] < bounds[0]
    assert re.search(r"^train/loss .* fell$", done.stdout, re.M)
    assert re.search(r"^accuracy   strict \d+\.\d+% .* of 8 problems", done.stdout, re.M)
    answers = json.loads((tmp_path / "out" / "answers-checkpoint-12.json").read_text())
    assert len(answers["answers"]) == 8 and all("plan" in a for a in answers["answers"])
    assert Path(tmp_path / "out" / "node_logs" / "local-after.log").read_text().count("accuracy ") == 1
