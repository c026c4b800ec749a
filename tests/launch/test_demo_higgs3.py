"""The demo of Higgs TTS 3, on two clips: the loss falls, the run resumes, and each training text ends by itself."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT

SMALL = {"STEPS": "32", "CLIPS": "2", "SPEAKERS": "1", "RANKS": "1", "SAMPLE_SECONDS": "0.4", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_demo_learns_its_clips_and_stops_by_itself(tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "launch" / "demo.sh"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=PATIENCE_S, env={**os.environ, "MODEL": "higgs3", "VENV": "none", "OUT": str(tmp_path / "out"), **SMALL,
                                 "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stdout[-4000:]
    for said in ("start      step 16, resumed from", "all 2 training texts end by themselves"):
        assert said in done.stdout, done.stdout[-4000:]
    loss, = [line.split() for line in done.stdout.splitlines() if line.startswith("train/loss ")]
    assert loss[-1] == "fell" and float(loss[3]) < 0.5 * float(loss[1])
    assert len(list((tmp_path / "out").glob("run-*/spoken/*.wav"))) == 2
