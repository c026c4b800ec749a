"""The distillation demo with a tiny model, and its gate."""
import json
import os
import subprocess

import pytest

from tests.helpers import tiny_teacher
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import environment

LAUNCHER = ROOT / "launch" / "distill_demo.sh"


def run_demo(folder, python, **settings):
    """(status, output) of the demo. A stub of python answers the checks of the set-up without torch."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "python").write_text('#!/bin/sh\ncase "$*" in *"device_count()"*) echo 0 ;; '
                                           f'*"import torchaudio"*) ;; *) exec "{python}" "$@" ;; esac\n')
    (folder / "bin" / "python").chmod(0o755)
    settings |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHON_EXEC": python}
    done = subprocess.run(["bash", str(LAUNCHER), "--report_to", "none"], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=PATIENCE_S, cwd=folder,
                          env=environment(VENV="none", OUT=str(folder / "out"), RANKS="1", OMP_NUM_THREADS="1",
                                          **settings))
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.race
def test_the_demo_with_a_student_that_did_not_learn(tmp_path, quick_python):
    model, _ = tiny_teacher.save(tmp_path / "model")
    model.lm_head.weight.data[-3:] = 0          # answers may not hold control tokens
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "questions.txt").write_text("".join(
        f"Where is {thing}?\n" for thing in "rain snow ice wool tea milk salt gold silk wood rice soap".split()))
    (tmp_path / "prompt.txt").write_text("Be short.\n")
    settings = {"STUDENT": str(tmp_path / "model"), "QUESTIONS": "questions.txt", "PROMPT": "prompt.txt", "STEPS": "2",
                "BATCH": "2", "GROUP_SIZE": "1", "ANSWER_TOKENS": "12"}
    status, output = run_demo(tmp_path, quick_python, **settings, MIN_CLOSED="0")
    report = json.loads((tmp_path / "out" / "training" / "evaluation" / "evaluation.json").read_text())
    assert {"base: kl", "student: kl", "control: kl", "base + prompt: follows"} <= report["metrics"].keys()
    assert report["metrics"]["tokens saved"] == len("system\nBe short.\n") + 2     # a token is a byte
    answers, swapped = ([json.loads(line)["messages"] for line in (tmp_path / "out" / name).read_text().splitlines()]
                      for name in ("answers.jsonl", "swapped.jsonl"))
    assert [row[:-1] for row in swapped] == [row[:-1] for row in answers]
    half = len(answers) // 2
    assert [row[-1] for row in swapped] == [row[-1] for row in [*answers[half:], *answers[:half]]]
    # the last line has the result, the line before it the number of answers that were cut off
    notice, done = output.splitlines()[-2:]
    assert status == 0 and done.startswith(f"done       {report['verdict']}; "), output[-3000:]
    lost = len((tmp_path / "out" / "answers.rejected.jsonl").read_text().splitlines())
    assert "the control went" in done and lost and "TOKENS=12" in notice
    assert notice.startswith(f"notice     {lost} of 12 questions are not trained: ")
    settings["MIN_CLOSED"] = "0.9"      # the rerun repeats only the evaluation
    status, output = run_demo(tmp_path, quick_python, **settings)
    assert status == 1 and output.count(": finished, ") == 4 and "== evaluation\n" in output, output[-3000:]
