"""core/report.py: its page in a real headless Chromium, against the files it was made from."""
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

RATE, STEPS, EVALS, BAD = 24_000, 40, (10, 20, 30, 40), 13
PROMPTS = ("prompt-1", "prompt-2", "prompt-10")
TEXTS = ['</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2">',
         "\"It's\" {body} & <b>bold</b>", "héllo, 你好 \ud800"]


def make_samples(folder, step):
    """Three prompts, of other lengths at every step."""
    folder.mkdir(parents=True)
    for i, (name, text) in enumerate(zip(PROMPTS, TEXTS)):
        wave = 0.3 * np.sin(np.arange((10 + 5 * i + step) * 960) * 0.02)
        soundfile.write(folder / f"{name}.wav", wave, RATE, subtype=("PCM_16", "PCM_16", "FLOAT")[i])
        about = {"text": text, "seed": 7 + i, "seconds": len(wave) / RATE, "ended_by": "eos" if step > 20 else "length"}
        (folder / f"{name}.json").write_text(json.dumps(about))


def make_report(*args, cwd=ROOT, python=()):
    """report.py as a user runs it."""
    return subprocess.run([sys.executable, *python, ROOT / "core" / "report.py", *map(str, args)], cwd=cwd, text=True,
                          capture_output=True, timeout=PATIENCE_S)


def test_no_other_file_of_the_disk_gets_into_the_page_or_is_written(run, tmp_path):
    """Samples may come from somebody else: a link, a FIFO."""
    secret, folder = tmp_path / "secret.wav", tmp_path / "spoken"
    make_samples(folder, 3)
    shutil.copy(folder / "prompt-1.wav", secret)
    secret.write_bytes(secret.read_bytes() + b"only here")
    os.symlink(secret, folder / "link.wav")
    for fifo in (folder / "pipe.wav", folder / "link.json", run / "evaluation.json"):
        os.mkfifo(fifo)
    os.symlink(tmp_path / "victim", run / ".report.html.tmp")
    (tmp_path / "victim").write_text("whole")
    done = make_report(run, "--samples", folder)
    (run / "evaluation.json").unlink()
    assert done.returncode == 0, done.stderr
    assert base64.b64encode(secret.read_bytes()).decode() not in (run / "report.html").read_text()
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
