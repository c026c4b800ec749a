"""The distillation demo: its questions, the student's file, the demo with a tiny model, what it refuses."""
import json
import os
import subprocess
import sys

import pytest

from tests.helpers import tiny_teacher
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import environment

LAUNCHER = ROOT / "launch" / "distill_demo.sh"


def python_that(folder, python):
    """A PATH whose python answers the set-up's questions without an import of torch, and else is this one."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "python").write_text('#!/bin/sh\ncase "$*" in *"device_count()"*) echo 0 ;; '
                                           f'*"import torchaudio"*) ;; *) exec "{python}" "$@" ;; esac\n')
    (folder / "bin" / "python").chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def run_demo(folder, *more, python=sys.executable, **settings):
    settings |= {"PATH": python_that(folder, python), "PYTHON_EXEC": python}
    done = subprocess.run(["bash", str(LAUNCHER), "--report_to", "none", *more], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=PATIENCE_S, cwd=folder,
                          env=environment(VENV="none", OUT=str(folder / "out"), RANKS="1", OMP_NUM_THREADS="1",
                                          **settings))
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.race
def test_the_prompt_story_with_a_student_that_did_not_learn(tmp_path, quick_python):
    model, _ = tiny_teacher.save(tmp_path / "model")
    model.lm_head.weight.data[-3:] = 0          # control tokens are no text that can be trained
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "questions.txt").write_text("".join(
        f"What is {thing}?\n" for thing in "rain snow ice wool tea milk salt gold silk wood rice soap".split()))
    (tmp_path / "prompt.txt").write_text("Be short.\n")
    settings = {"STUDENT": str(tmp_path / "model"), "QUESTIONS": "questions.txt", "PROMPT": "prompt.txt", "STEPS": "2",
                "BATCH": "2", "GROUP_SIZE": "1", "ANSWER_TOKENS": "12"}
    status, said = run_demo(tmp_path, python=quick_python, **settings, MIN_CLOSED="0")
    report = json.loads((tmp_path / "out" / "training" / "evaluation" / "evaluation.json").read_text())
    assert {"base: kl", "student: kl", "control: kl", "base + prompt: follows"} <= report["metrics"].keys()
    assert report["metrics"]["tokens saved"] == len("system\nBe short.\n") + 2     # a token is a byte
    asked, swapped = ([json.loads(line)["messages"] for line in (tmp_path / "out" / name).read_text().splitlines()]
                      for name in ("answers.jsonl", "swapped.jsonl"))
    assert [row[:-1] for row in swapped] == [row[:-1] for row in asked]
    half = len(asked) // 2
    assert [row[-1] for row in swapped] == [row[-1] for row in [*asked[half:], *asked[:half]]]
    # the last line is what was measured, the one before it what became of answers that were cut off
    notice, done = said.splitlines()[-2:]
    verdict = json.loads((tmp_path / "out" / "training" / "evaluation" / "evaluation.json").read_text())["verdict"]
    assert status == 0 and done.startswith(f"done       {verdict}; ") and "the control went" in done, said[-3000:]
    lost = len((tmp_path / "out" / "answers.rejected.jsonl").read_text().splitlines())
    assert lost and notice.startswith(f"notice     {lost} of 12 questions are not trained: ") and "TOKENS=12" in notice
    settings["MIN_CLOSED"] = "0.9"      # the judgement alone is another command
    status, said = run_demo(tmp_path, python=quick_python, **settings)
    assert status == 1 and said.count(": finished, ") == 4 and "== evaluation\n" in said, said[-3000:]
