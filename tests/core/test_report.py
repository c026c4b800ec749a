"""core/report.py: its page against the files it was made from."""
import argparse
import base64
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import soundfile

from core import cli
from core.metrics import MetricsLog, loss_clause
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT

RATE, STEPS, EVALS, BAD = 24_000, 40, (10, 20, 30, 40), 13
PROMPTS = ("prompt-1", "prompt-2", "prompt-10")
TEXTS = ['</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2">',
         "\"It's\" {body} & <b>bold</b>", "héllo, 你好 \ud800"]
FLAGS = {"model_path": "voices/" + "big-model" * 9, "max_steps": STEPS, "note": TEXTS[0], "learning_rate": 5e-5,
         "base_url": "http://anna:hush@host/v1?api_key=hush2"}


def make_run(folder):
    """A run's files, resumed at step 20, best at 20, its last line cut off."""
    folder.mkdir()
    args = argparse.Namespace(given=cli.safe_flags(argparse.Namespace(**FLAGS)))
    (folder / cli.CONFIG).write_text(cli.config_text(args, "train.py"))
    for start, end in ((0, 20), (20, STEPS)):
        log = MetricsLog(folder, folder / "logs", "none", FLAGS, start)
        for step in range(start + 1, end + 1):
            log.write(step, {"train/loss": math.nan if step == BAD else 3 + 7 / step,
                             "train/audio_loss_codebook_0": 2 / step, "train/audio_loss_codebook_1": 3 / step,
                             "train/memory_gib": 1.5, "train/spread<b>": 1e-5 * step})
            if step in EVALS:
                log.write(step, {"eval/loss": 4 + abs(step - 20) / 100})
        log.close()
        (folder / f"checkpoint-{end}").mkdir()
        (folder / f"checkpoint-{end}" / "manifest.json").write_text("{}")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "train/lo')
    for step in EVALS:
        make_samples(folder / "samples" / f"step-{step}", step)
    return folder


def make_samples(folder, step):
    folder.mkdir(parents=True)
    for i, (name, text) in enumerate(zip(PROMPTS, TEXTS)):
        wave = 0.3 * np.sin(np.arange((10 + 5 * i + step) * 960) * 0.02)
        soundfile.write(folder / f"{name}.wav", wave, RATE, subtype=("PCM_16", "PCM_16", "FLOAT")[i])
        about = {"text": text, "seed": 7 + i, "seconds": len(wave) / RATE, "ended_by": "eos" if step > 20 else "length"}
        (folder / f"{name}.json").write_text(json.dumps(about))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with samples, evaluations and its report.html."""
    folder = make_run(tmp_path_factory.mktemp("report") / "voice & <run>")
    for about in ({"name": "<i>step 40<i>", "metrics": {"wer": 0.125, "f0_correlation": None}},
                  {"name": "base", "verdict": "fair", "metrics": {"wer": 0.5, "similarity": 0.75}}):
        (folder / about["name"][-3:]).mkdir()
        (folder / about["name"][-3:] / "evaluation.json").write_text(json.dumps(about))
    for name in ("after", "before"):
        make_samples(folder.parent / name, 99)
    os.symlink(folder / "samples" / "step-10" / "prompt-1.wav", folder.parent / "after" / "link.wav")
    os.mkfifo(folder.parent / "after" / "pipe.wav")
    done = make_report(folder, "--samples", folder.parent / "after", folder.parent / "before")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"report     .*/report.html \(\d+\.\d MiB\): 44 lines of metrics, 18 samples, "
                        r"2 evaluations\n", done.stdout)
    return folder


def make_report(*args, cwd=ROOT, python=()):
    """report.py as a user runs it."""
    return subprocess.run([sys.executable, *python, ROOT / "core" / "report.py", *map(str, args)], cwd=cwd, text=True,
                          capture_output=True, timeout=PATIENCE_S)


class Page(HTMLParser):
    """What a browser would show and load. tags: [(name, attributes)]; texts: pieces of text, in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))

    def handle_data(self, text):
        self.texts.append(text.strip())


def test_the_page(run):
    """Every number and sound is there, nothing runs or is loaded, no password or file from elsewhere is shown."""
    text = (run / "report.html").read_text()
    page = Page(text)
    assert "script" not in {name for name, _ in page.tags} and "hush" not in text and 'name="viewport"' in text
    for _, attributes in page.tags:
        assert all(attributes.get(name, "data:").startswith("data:") for name in ("src", "href", "data"))
    shown = " ".join(" ".join(page.texts).split())
    for words in (run.name, "Validation loss was 4.1000 at first, best at step 20 (4.0000) and 5.0 % higher at step 40: "
                  "take checkpoint-20.", "Base: speech is partly understood (word errors 50 %).",
                  "<i>step 40<i>: speech is understood (word errors 12.5 %).", "ended_by length",
                  "last logged step 40; checkpoints: checkpoint-20, checkpoint-40", "memory gib train 1.5",
                  "base <i>step 40<i>", "wer 0.5 0.125 similarity 0.75 –", "train 3.175 eval 4.2", "spread<b>",
                  *(f"{name}: {json.dumps(value)}" for name, value in {**FLAGS, "base_url": "http://***@host/v1?***"}.items())):
        assert " ".join(words.split()) in shown, words
    lines = [attributes["points"].split() for name, attributes in page.tags if name == "polyline"]
    assert {len(points) for points in lines} == {STEPS, STEPS - 1, len(EVALS)}
    labels = ["before", *(f"step {step}" for step in EVALS), "after"]       # a prompt a row
    files = [run.parent / label / f"{name}.wav" if " " not in label else
             run / "samples" / label.replace(" ", "-") / f"{name}.wav" for name in PROMPTS for label in labels]
    heard = [attributes["src"] for name, attributes in page.tags if name == "audio"]
    assert [base64.b64decode(source.split(",")[1]) for source in heard] == [file.read_bytes() for file in files]
    assert all(text.replace("\ud800", "?") in page.texts for text in TEXTS)


def test_a_run_that_has_just_begun_needs_nothing_installed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tr')
    done = make_report(tmp_path, python=("-I", "-S"))
    assert done.returncode == 0 and " 0 lines of metrics" in done.stdout, done.stderr
    assert "Nothing was validated" in (tmp_path / "report.html").read_text()


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
    assert "holds 1 training steps" in check(1, None).stderr
    # a base that stays the best has no checkpoint: validated before the first step
    assert loss_clause([{"step": step, "eval/loss": 2 + step} for step in range(4)]).endswith("take the base model")
