"""core/report.py: what gets into its page, and whether a loss fell."""
import base64
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import soundfile

from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT


def make_report(*args):
    """report.py as a user runs it."""
    return subprocess.run([sys.executable, ROOT / "core" / "report.py", *map(str, args)], cwd=ROOT, text=True,
                          capture_output=True, timeout=PATIENCE_S)


def test_no_other_file_of_the_disk_gets_into_the_page_or_is_written(tmp_path):
    """Samples may come from somebody else: a link, a FIFO, a text with a script in it."""
    run, secret, folder = tmp_path / "run", tmp_path / "secret.wav", tmp_path / "spoken"
    for path in (run, folder):
        path.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    soundfile.write(folder / "prompt-1.wav", 0.3 * np.sin(np.arange(9600) * 0.02), 24_000)
    (folder / "prompt-1.json").write_text(json.dumps({"text": "</script><script>window.broken = 1</script>", "seed": 7,
                                                      "seconds": 0.4, "ended_by": "eos"}))
    shutil.copy(folder / "prompt-1.wav", secret)
    secret.write_bytes(secret.read_bytes() + b"only here")
    os.symlink(secret, folder / "link.wav")
    for fifo in (folder / "pipe.wav", folder / "link.json", run / "evaluation.json"):
        os.mkfifo(fifo)
    os.symlink(tmp_path / "victim", run / ".report.html.tmp")
    (tmp_path / "victim").write_text("whole")
    done = make_report(run, "--samples", folder)
    assert done.returncode == 0, done.stderr
    page = (run / "report.html").read_text()
    assert base64.b64encode((folder / "prompt-1.wav").read_bytes()).decode() in page
    assert base64.b64encode(secret.read_bytes()).decode() not in page and "<script>" not in page
    assert (tmp_path / "victim").read_text() == "whole"


def test_check_fell(tmp_path):
    """By the means of the first and last fifth; null, a loss that was not finite, is none."""
    def check(*losses):
        (tmp_path / "metrics.jsonl").write_text("".join(
            json.dumps({"step": step, "train/loss": loss}) + "\n" for step, loss in enumerate(losses)))
        return make_report(tmp_path, "--check_fell")
    done = check(4, 2, None, 9, 9, 9, 9, 9, 9, 1, 2)
    assert done.returncode == 0 and "train/loss 3.000 -> 1.500 fell\n" in done.stdout
    done = check(1, 2)
    assert done.returncode == 1 and "DID NOT FALL" in done.stdout and not done.stderr
    done = check(1, None)
    assert done.returncode == 1 and "holds 1 training steps" in done.stderr
