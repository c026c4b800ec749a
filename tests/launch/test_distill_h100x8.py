"""distill_h100x8.sh: what each of its settings does, what it refuses, and one whole run that is killed on its way."""
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid

import pytest

from common import flags
from distill import create_data
from tests.helpers import chats
from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import alive, environment, launch

LAUNCHER = "distill_h100x8.sh"
# every setting of its list, to a value that is seen in the commands; a server has the others
OWN = {"TEACHER": "a/teacher", "TP": "2", "GPUS": "6", "MAX_MODEL_LEN": "77", "PROMPT": "p.txt",
       "TEACHER_FLAGS": "--seed 5", "VLLM": "vllm==9", "VLLM_VENV": "a venv", "PYTHON": "python9",
       "STUDENT": "a/student", "HELD_OUT": "0.3", "TRUTH": "t.jsonl", "MIN_AGREEMENT": "0.8",
       "JUDGE_FLAGS": "--batch_size 3", "ON_POLICY": "0.5", "TEACHER_PATH": "a/scorer"}
SERVED = {"TEACHER": "http://anna:se$cret@h/v1", "TEACHER_NAME": "x", "PARSER": "whole", "GPUS": "6",
          "PROMPT": "p.txt", "PROMPT_ROLE": "system", "TEACHER_FLAGS": "--max_tokens 99"}
FOR_ALL_BELOW = {"LORA", "EPOCHS", "GROUP_SIZE", "VENV", "CONDA_ENV"}       # train_sft_h100x8.sh and env.sh read them


@pytest.fixture
def folder(tmp_path):
    for name in ("lines.txt", "p.txt", "t.jsonl"):
        (tmp_path / name).write_text("x\n")
    return tmp_path


def commands(folder, *more, **settings):
    """The words of each step that it would run with these settings."""
    done = launch(LAUNCHER, "lines.txt", "out", *more, cwd=folder, DRY_RUN="1", **settings)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["lines.txt", "p.txt", "t.jsonl"], "nothing is written"
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_teacher_student_and_judgement_in_one_command(folder):
    """Without settings: vLLM, never transformers; its instances do not get env.sh's way to allocate memory."""
    vllm, answers, student, judged = commands(folder, "--learning_rate", "1e-5")
    assert vllm[-1] == "vllm==0.32.0" and "ENGINE=vllm" in answers and f"VENV={ROOT}/.venv-vllm" in answers
    assert "MODEL=Qwen/Qwen3-30B-A3B-Instruct-2507" in answers and answers[answers.index("lines.txt") + 2] == "4"
    assert "PYTORCH_ALLOC_CONF=" in answers and "GPUS=" in answers and not re.search("NPROC", str(student))
    assert "MODEL=Qwen/Qwen3-4B-Instruct-2507" in student and student[-3:] == ["out/student", "--learning_rate", "1e-5"]
    assert judged[1] == f"{ROOT}/distill/evaluate.py" and "TRAIN_FILE=out/answers.jsonl" in student


def test_every_setting_is_in_a_command(folder):
    listed = re.findall(r"^([A-Z_]+)=\$\{\1:-", (ROOT / "launch" / LAUNCHER).read_text(), re.M)
    assert set(listed) - {"DRY_RUN"} == OWN.keys() | SERVED.keys() | FOR_ALL_BELOW
    vllm, answers, student, judged = commands(folder, **OWN)
    assert vllm[-3:] == ["python9", "a venv", "vllm==9"] and "VENV=a venv" in answers
    assert {"MODEL=a/teacher", "GPUS=6", "MAX_MODEL_LEN=77", "p.txt"} < set(answers) and answers[-2:] == ["--seed", "5"]
    assert answers[answers.index("lines.txt") + 2] == "2"
    assert {"MODEL=a/student", "VALIDATION=0.3", "NPROC_PER_NODE=6"} < set(student)
    assert " ".join(judged).endswith(" --min_agreement 0.8 --truth_file t.jsonl --batch_size 3")
    assert student[-8:] == ["--teacher_path", "a/scorer", "--prompt_file", "p.txt", "--prompt_role", "user",
                            "--on_policy", "0.5"]
    *_, student, judged = commands(folder, ON_POLICY="1", PARSER="whole", LORA="0")
    assert "Qwen/Qwen3-30B-A3B-Instruct-2507" in student and "--prompt_file" not in judged
    answers, _, judged = commands(folder, **SERVED)
    args = flags.parse(create_data.build_parser(), create_data.check_flags, answers[2:])
    assert (args.base_url, args.model_name, args.parser, args.prompt_role, args.max_tokens) == (
        "http://h/v1", "x", "whole", "system", 99)
    assert judged[1] == f"{ROOT}/distill/evaluate.py" and judged[judged.index("--max_new_tokens") + 1] == "99"


@pytest.mark.parametrize("settings, message", [
    ({"TEACHER": "http://h/v1", "TEACHER_NAME": "x", "ON_POLICY": "1"}, "ON_POLICY=1: set TEACHER_PATH"),
    ({"TEACHER_PATH": "x"}, "TEACHER_PATH is set, which scores with ON_POLICY alone"),
    ({"PARSER": "whole", "TRUTH": "t.jsonl"}, "TRUTH is set, but PARSER=whole has no labels"),
    ({"TEACHER": "http://h/v1"}, "TEACHER=http://h/v1: set TEACHER_NAME"),
    ({"TEACHER": "http://h/v1", "TEACHER_NAME": "x", "TP": "2"}, "TP is set, but TEACHER is a server"),
    ({"MODEL": "x"}, "MODEL=x: not a setting of this launcher"), ({"PROMPT": "q"}, "PROMPT: no such file: q")])
def test_settings_that_would_do_nothing_are_refused(folder, settings, message):
    done = launch(LAUNCHER, "lines.txt", "out", cwd=folder, DRY_RUN="1", **settings)
    assert done.returncode == 1 and done.stderr.startswith(f"distill_h100x8: error: {message}"), done.stderr


@pytest.mark.slow
@pytest.mark.race
def test_a_whole_run_that_is_killed_on_its_way(tmp_path):
    """kill -9 of the script alone, amid the answers: its step ends as well, and the same command does the rest; the
    student draws half of the answers, which a mixture of experts scores.
    """
    lines = [f"{label} slow line {i}" for i in range(4) for label in ("ar", "de", "el", "en", "es", "fr")]
    (tmp_path / "lines.txt").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "p.txt").write_text("Last line: Final Answer: xx\n{text}\n")
    chats.student(tmp_path / "model")
    chats.student(tmp_path / "larger", "moe", hidden_size=48)
    log, mark = tmp_path / "asked", uuid.uuid4().hex
    server = subprocess.Popen([sys.executable, str(ROOT / "tests" / "helpers" / "label_server.py"), str(log)],
                              text=True, stdout=subprocess.PIPE)
    settings = environment(
        MARK=mark, TEACHER=f"http://anna:secret@127.0.0.1:{int(server.stdout.readline())}/v1", TEACHER_NAME="teacher",
        TEACHER_FLAGS="--concurrency 1", STUDENT=str(tmp_path / "model"), PROMPT="p.txt", GROUP_SIZE="6",
        HELD_OUT="0.25", EPOCHS="1", ON_POLICY="0.5", TEACHER_PATH=str(tmp_path / "larger"), SWITCHES="", REPORT_TO="",
        JUDGE_FLAGS="--prompt_max_new_tokens 4")

    def start():
        return subprocess.Popen(["bash", str(ROOT / "launch" / LAUNCHER), "lines.txt", "out"], cwd=tmp_path, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0, env=settings)

    def asked():
        return log.read_text().count("\n") if log.exists() else 0
    try:
        first = start()
        wait_until(lambda: asked() >= 5, "answers", lambda: first.poll() is None)
        os.killpg(first.pid, signal.SIGKILL)        # its step has a process group of its own
        wait_until(lambda: not set(alive(mark)) - {first.pid}, "end of its step")
        assert asked() < 24 and not (tmp_path / "out" / "answers.jsonl").exists()
        said, _ = start().communicate(timeout=PATIENCE_S)
    finally:
        server.kill()
        server.wait()
    finished = re.search(r"lines      24, (\d+) of them finished", said)       # asked to end, its step has noted them
    assert finished and int(finished[1]) >= 2 and said.splitlines()[-1].startswith("done"), said
    records = [json.loads(line) for name in ("answers.jsonl", "answers.rejected.jsonl")
               for line in (tmp_path / "out" / name).read_text().splitlines()]
    assert sorted(record["line"] for record in records) == list(range(24))
    report = json.loads((tmp_path / "out" / "evaluation" / "evaluation.json").read_text())
    assert report["data"]["training_lines"] > report["data"]["held_out_lines"] > 0
    assert (tmp_path / "out" / "student" / "report.html").stat().st_size > 10_000
    steps = {path.name: path.read_text() for path in (tmp_path / "out" / "steps").iterdir()}
    assert steps.keys() == {"answers", "evaluation", "student"} and "secret" not in str(steps)
