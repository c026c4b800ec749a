"""bench/gpu.py on the CPU, tiny: what is right is told from what is wrong, and a job has all its figures."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def gpu(*words):
    done = subprocess.run([sys.executable, "bench/gpu.py", *map(str, words)], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {"SHAPES": "tiny"})
    return done.returncode, done.stdout + done.stderr


def test_a_wrong_run_is_found(tmp_path):
    """A first gradient off by 1 %, which is within the limits of bf16 and not of fp32."""
    status, output = gpu("refs", tmp_path, "--only", "chats lora")
    assert status == 0, output
    refs = json.loads((tmp_path / "refs.json").read_text())
    refs["chats lora"][0][1] *= 1.01
    (tmp_path / "refs.json").write_text(json.dumps(refs))
    status, output = gpu("right", tmp_path, "--only", "(fp32|bf16)$")
    assert status == 1 and output.rstrip().endswith("error: failed: chats lora fp32"), output
    assert output.count("| yes |") == output.count("| NO |") == 1


def test_figures_of_jobs(tmp_path):
    status, output = gpu("fast", tmp_path, "chats lora quickly")
    assert status == 2 and "'chats lora quickly': a model" in output
    status, output = gpu("fast", tmp_path, "chats lora eager")
    assert status == 0 and "matrix products" in output, output
    ours = json.loads((tmp_path / "fast.jsonl").read_text())
    assert all(ours[key] > 0 for key in ("step_s", "tokens_s", "samples_s", "planned_gib", "grad_norm"))
