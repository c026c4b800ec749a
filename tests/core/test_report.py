"""core/report.py: the page shows the files of its run."""
import argparse
import base64
import json
import math
import os
import re
import subprocess
import sys
from html import escape

import pytest

from core import cli
from core.metrics import MetricsLog, verdict
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT

STEPS, EVALS = 40, (10, 20, 30, 40)
PROMPTS = ("prompt-01", "prompt-02", "prompt-10")
TEXTS = ["</script><script>window.broken = 1</script>", "\"It's\" {body} & <b>bold</b>", "héllo, 你好 \ud800"]
FLAGS = {"model_path": "voices/big", "note": TEXTS[0], "learning_rate": 5e-5,
         "base_url": "http://anna:hush@host/v1?api_key=hush2"}


def make_run(folder):
    """Write a run's files: best at step 20, the last line of its log cut off."""
    folder.mkdir()
    args = argparse.Namespace(given=cli.remove_secrets(FLAGS))
    (folder / cli.CONFIG).write_text(cli.config_text(args, "train.py"))
    log = MetricsLog(argparse.Namespace(output_dir=folder, report_to=[]))
    for step in range(1, STEPS + 1):
        log.write(step, {"train/loss": math.nan if step == 13 else 3 + 7 / step, "train/memory_gib": 1.5,
                         "train/audio_loss_codebook_0": 2 / step, "train/audio_loss_codebook_1": 3 / step})
        if step in EVALS:
            log.write(step, {"eval/loss": 4 + abs(step - 20) / 100})
            make_samples(folder / "samples" / f"step-{step}")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "train/lo')
    return folder


def make_samples(folder):
    folder.mkdir(parents=True)
    for name, text in zip(PROMPTS, TEXTS):
        (folder / f"{name}.wav").write_text(f"{folder.name} {name}")
        (folder / f"{name}.json").write_text(json.dumps({"text": text, "ended_by": "length"}))


def make_report(*args, python=()):
    return subprocess.run([sys.executable, *python, ROOT / "core" / "report.py", *map(str, args)], cwd=ROOT, text=True,
                          capture_output=True, timeout=PATIENCE_S)


def test_the_page(tmp_path):
    """The page has every number and sound, no script, no external file and no password."""
    run = make_run(tmp_path / "voice & <run>")
    for name, more in (("<i>step 40<i>", {"metrics": {"wer": 0.125, "f0_correlation": None}}),
                       ("base", {"verdict": "fair", "metrics": {"wer": 0.5, "similarity": 0.75}})):
        (run / name[-3:]).mkdir()
        (run / name[-3:] / "evaluation.json").write_text(json.dumps({"name": name, **more}))
    for name in ("after", "before"):
        make_samples(tmp_path / name)
    os.symlink(run / "samples" / "step-10" / "prompt-01.wav", tmp_path / "after" / "link.wav")
    os.mkfifo(tmp_path / "after" / "pipe.wav")
    (tmp_path / "victim").write_text("whole")
    os.symlink(tmp_path / "victim", run / "report.html")
    done = make_report(run, "--samples", tmp_path / "after", tmp_path / "before")
    assert done.returncode == 0 and "44 lines of metrics\n" in done.stdout, done.stderr
    assert (tmp_path / "victim").read_text() == "whole"
    page = (run / "report.html").read_text()
    assert "<script" not in page and "hush" not in page
    assert all(url.startswith("data:") for url in re.findall(r'(?:src|href|data)="([^"]*)"', page))
    for words in ("Validation loss was 4.1000 at first, best at step 20 (4.0000) and 5.0 % higher at step 40: "
                  "take checkpoint-20.", "ended_by length", "voice & <run>",
                  'base_url: "http://***@host/v1?***"', *TEXTS[:2]):
        assert escape(words) in page, words
    assert "<td>wer<td>0.5<td>0.125<tr>" in page and "<td>similarity<td>0.75<td>–" in page
    lines = [points.split() for points in re.findall('points="([^"]*)"', page)]
    assert sorted({len(points) for points in lines}) == [len(EVALS), STEPS - 1, STEPS]
    labels = ["before", *(f"step-{step}" for step in EVALS), "after"]       # a prompt a row
    sounds = [base64.b64decode(sound).decode() for sound in re.findall('data:audio/wav;base64,([^"]*)', page)]
    assert sounds == [f"{label} {name}" for name in PROMPTS for label in labels]


def test_a_run_that_has_just_begun_needs_nothing_installed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tr')
    done = make_report(tmp_path, python=("-I", "-S"))
    assert done.returncode == 0 and " 0 lines of metrics" in done.stdout, done.stderr
    assert "Nothing was validated" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("losses, status, words", [
    ((4, 2, None, 9, 9, 9, 9, 9, 9, 1, 2), 0, "train/loss 3.000 -> 1.500 fell\n"), ((1, 2), 1, "DID NOT FALL"),
    ((1, None), 1, "holds 1 training steps")])
def test_check_fell(tmp_path, losses, status, words):
    """The check compares the means of the first and last fifth and skips null, a loss that is not finite."""
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "train/loss": loss}) + "\n" for step, loss in enumerate(losses)))
    done = make_report(tmp_path, "--check_fell")
    assert done.returncode == status and words in done.stdout + done.stderr


def test_a_base_that_stays_the_best_has_no_checkpoint():
    """The base was validated before the first step."""
    clause, = verdict([{"step": step, "eval/loss": 2 + step} for step in range(4)])
    assert clause.endswith("take the base model")
