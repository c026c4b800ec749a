"""The launchers without Slurm: commands, errors, Python environments; signals save and leave no process running."""
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import uuid
from pathlib import Path

import pytest

from core import metrics
from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT, trainer_command

SCRIPTS = [*(ROOT / "launch").glob("*.sh"), *(ROOT / "tests/helpers/slurm").glob("*.sh"), ROOT / ".ci" / "run"]


def environment(**settings):
    """This environment plus settings, without variables of a Slurm job or an earlier launch, without GPUs."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("SLURM", "NCCL", "LAUNCH", "TRAINER", "AFTER", "CONDA_ENV"))}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "VENV": "none", "MIN_GPUS": "0"} | settings


def launch(launcher, *args, cwd=None, **settings):
    return subprocess.run(["bash", ROOT / "launch" / launcher, *args], text=True, capture_output=True, cwd=cwd,
                          timeout=PATIENCE_S, env=environment(**settings))


def printed_command(done):
    """(all words that DRY_RUN=1 printed, flags of the trainer)."""
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    return words, words[next(i for i, word in enumerate(words) if word.endswith("train_v2_ddp.py")) + 1:]


def shell(text, **settings):
    return subprocess.run(["bash", "-euc", f'source "{ROOT}/launch/env.sh"\n{text}'], text=True, capture_output=True,
                          timeout=PATIENCE_S, env=environment(**settings))


def alive(mark, *more):
    """Pids of the processes whose environment has MARK=mark and the entries `more`, the oldest first."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if {f"MARK={mark}".encode(), *more} <= set((folder / "environ").read_bytes().split(b"\0")):
                started = (folder / "stat").read_text().rpartition(")")[2].split()[19]
                processes.append((int(started), int(folder.name)))
    return [pid for _, pid in sorted(processes)]


@contextlib.contextmanager
def launches(folder):
    """run(command, env) -> process in a new process group, killed at the end. process.mark is in the environment of
    every descendant; process.log is the file of its output."""
    started = []

    def run(command, env):
        mark, log = uuid.uuid4().hex, folder / f"launch-{len(started)}.log"
        process = subprocess.Popen([*map(str, command)], cwd=folder, stdout=log.open("w"), stderr=subprocess.STDOUT,
                                   process_group=0, env=env | {"MARK": mark})
        process.mark, process.log = mark, log
        started.append(process)
        return process
    try:
        yield run
    finally:
        for process in started:
            for pid in alive(process.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def script(tmp_path):
    """script(text) -> path of a small trainer."""
    def write(text):
        (tmp_path / "trainer.py").write_text(text)
        return str(tmp_path / "trainer.py")
    return write


@pytest.fixture
def light(tmp_path):
    """A PATH whose torchrun starts one trainer without importing torch."""
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "torchrun").write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\npython "$@"\n')
    (tmp_path / "light" / "torchrun").chmod(0o755)
    return f"{tmp_path}/light:{os.environ['PATH']}"


@pytest.fixture
def start(tmp_path):
    """start(*args, **settings) runs train_tts.sh, or slurm.sh with a TRAINER that takes no flags of train_tts.sh."""
    with launches(tmp_path) as run:
        yield lambda *args, **settings: run(
            ["bash", ROOT / "launch" / ("slurm.sh" if "TRAINER" in settings else "train_tts.sh"), *args],
            environment(SWITCHES="", **settings))


@pytest.mark.parametrize("launcher, args, settings, message", [
    ("train_tts.sh", [], {}, r"TRAIN_DATA is not set: a ChatML file"),
    ("train_tts.sh", ["--train_data_file", __file__], {"SLURM_GPUS_ON_NODE": "8"},
     r"Slurm gave 8 GPUs on .*, the driver shows 0"),
    ("train_tts.sh", [], {"TRAINER": "/no/train.py", "TRAIN_DATA": __file__}, r"TRAINER: no such file: /no/train.py"),
    ("train_tts.sh", [], {"VENV": "", "CONDA_ENV": "no-such", "TRAIN_DATA": __file__}, "no such conda environment"),
    ("train_tts.sh", ["--no_such", "3"], {"TRAIN_DATA": __file__}, r"unrecognized arguments: --no_such 3"),
])
def test_errors_are_one_clear_line(launcher, args, settings, message):
    done = launch(launcher, *args, DRY_RUN="1", **settings)
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode in (1, 2) and len(lines) == 1 and done.stdout == "", done.stderr
    assert re.search(f"^({launcher[:-3]}: )?error: .*{message}", lines[0]), lines


def test_a_link_to_a_launcher_finds_the_repository(tmp_path):
    (tmp_path / "mine.sh").symlink_to(ROOT / "launch" / "train_tts.sh")
    done = launch(tmp_path / "mine.sh", DRY_RUN="1", TRAIN_DATA=__file__)
    assert f"{ROOT}/train_v2_ddp.py" in printed_command(done)[0]
    done = launch(shutil.copy(ROOT / "launch" / "train_tts.sh", tmp_path), PATH="/usr/bin:/bin")
    assert done.returncode == 1 and "env.sh not found: sbatch FILE, not sbatch < FILE\n" in done.stderr
    for name, near, wrong in (("create_data_h100x8", "MAX_MODEL_LEN", "MAXMODELLEN"),
                              ("distill_demo", "LEARNING_RATE", "LEARNINGRATE"), ("demo", "SENTENCES", "SENTENCE")):
        (tmp_path / f"my_{name}").symlink_to(ROOT / "launch" / f"{name}.sh")
        done = launch(tmp_path / f"my_{name}", DRY_RUN="1", **{wrong: "3"})
        message = f"{name}: error: {wrong} is not a setting of this launcher; it has .*{near}.*\n"
        assert re.fullmatch(message, done.stderr) and done.returncode == 1
    assert "RANK" not in launch("distill_demo.sh", KEEP="x", RANK="0", TOKEN="x").stderr


@pytest.mark.parametrize("launcher", sorted(path.name for path in (ROOT / "launch").glob("*.sh")
                                             if path.name not in ("env.sh", "node.sh")))
def test_help_is_the_header(launcher, tmp_path):
    done = launch(launcher, "--help", cwd=tmp_path, PATH="/usr/bin:/bin")
    header = (ROOT / "launch" / launcher).read_text().split("\n\n")[0].splitlines()
    assert done.returncode == 0 and done.stderr == "" and not list(tmp_path.iterdir())
    assert done.stdout.splitlines()[0] == header[1].removeprefix("# ") and "SBATCH -" not in done.stdout
    assert "set -euo" not in done.stdout and len(done.stdout.splitlines()) >= 3


def test_a_node_without_gpus_is_refused_but_for_a_dry_run():
    done = launch("train_tts.sh", "--wandb_project", "try -h 2", TRAIN_DATA=__file__, MIN_GPUS="")   # "-h" is no --help
    assert done.returncode == 1 and done.stderr == (
        f"train_tts: error: {socket.gethostname()} has 0 GPUs, 1 are needed (MIN_GPUS=0 trains on CPUs)\n")
    assert launch("train_tts.sh", TRAIN_DATA=__file__, MIN_GPUS="", DRY_RUN="1").returncode == 0


@pytest.mark.slow
@pytest.mark.race
def test_torchruns_restart_resumes_and_the_first_ctrl_c_saves(tiny, tmp_path, start, quick):
    """From the newest checkpoint, after the death of a rank."""
    out = tmp_path / "out"
    flags = trainer_command(tiny, out, "--use_lora", "--max_steps", 100000, "--num_train_epochs", 100000,
                            "--disable_eval", "--save_steps", 5)[2:]
    process = start(*flags, NPROC_PER_NODE="2", MAX_RESTARTS="1", **quick)
    wait_until(lambda: (out / "checkpoint-5").exists() or process.poll() is not None, "first checkpoint")
    # the oldest process with rank 1 is the trainer; others prepare data
    os.kill(alive(process.mark, b"RANK=1")[0], signal.SIGKILL)

    def starts():
        return [int(step) for step in re.findall(r"^start +step (\d+)", process.log.read_text(), re.M)]
    def last_step():
        return metrics.read_metrics(out / "metrics.jsonl")[-1]["step"]
    wait_until(lambda: len(starts()) == 2 and last_step() > starts()[1] or process.poll() is not None, "second start")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=PATIENCE_S) == 0, process.log.read_text()[-3000:]
    wait_until(lambda: not alive(process.mark), "end of every process")
    first, second = starts()
    assert first == 0 < second and second % 5 == 0
    assert (out / "requeue").read_text() == f"asked to stop by SIGUSR1 at step {last_step()}\n"
    assert (out / f"checkpoint-{last_step()}" / "manifest.json").exists()


# like a trainer: no handler during the imports, then SIGUSR1 ends it
LATE = """
import pathlib, signal, sys, time
pathlib.Path("started").touch()
time.sleep(float(sys.argv[1]))
pathlib.Path("listens").touch()
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.race
def test_a_signal_that_comes_too_early_is_repeated(tmp_path, script, start, light):
    process = start("3", TRAINER=script(LATE), REPEAT_S="0.5", PATH=light)
    wait_until((tmp_path / "started").exists, "trainer")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):      # more of them change nothing
        process.send_signal(number)
        time.sleep(0.3)
    assert process.wait(timeout=PATIENCE_S) == 0, process.log.read_text()
    assert (tmp_path / "listens").exists()
    assert process.log.read_text().count("asking what runs") == 1
    wait_until(lambda: not alive(process.mark), "end of every process")     # including the reminder, within REPEAT_S


@pytest.mark.race
def test_second_ctrl_c_ends_everything_at_once(tmp_path, script, start):
    process = start("1000", TRAINER=script(LATE), NPROC_PER_NODE="2")
    wait_until((tmp_path / "started").exists, "trainer")
    os.killpg(process.pid, signal.SIGINT)
    wait_until(lambda: "asking what runs" in process.log.read_text(), "answer to the first Ctrl-C")
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGKILL
    wait_until(lambda: not alive(process.mark), "end of every process")


@pytest.mark.slow
@pytest.mark.race
def test_a_killed_launcher_leaves_no_process(tmp_path, script, start):
    process = start("0", TRAINER=script(LATE))
    wait_until((tmp_path / "listens").exists, "trainer")
    process.kill()      # its parent does not reap it, as in a container
    wait_until(lambda: not alive(process.mark), "end of every process")      # torchrun gets SIGTERM
    assert not alive(process.mark)


@pytest.mark.slow
def test_commands_after_training_run_line_by_line(tmp_path, script, light):
    """They run only after a finished training; the first line that fails gives the status."""
    after = 'echo "one $0"; echo two >&2\n[ -z "${AFTER-}${TRAINER-}${LAUNCHER-}" ] || echo inherited\n'
    done = launch("slurm.sh", "--output_dir", "a folder", cwd=tmp_path, TRAINER=script("print('trained')"),
                  AFTER=after + "exit 7\necho three", PATH=light)
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["trained", "one bash", "two"]
    assert (tmp_path / "a folder" / "node_logs" / "local-after.log").read_text() == "one bash\ntwo\n"
    assert launch("slurm.sh", cwd=tmp_path, TRAINER=script("pass"), AFTER=after, PATH=light).returncode == 0
    done = launch("slurm.sh", cwd=tmp_path, TRAINER=script("import sys; sys.exit(5)"), AFTER=after, PATH=light)
    assert done.returncode == 5 and "one" not in done.stdout


STANDARD = "/usr/local/bin:/usr/bin:/bin"
no_torchrun = pytest.mark.skipif(bool(shutil.which("torchrun", path=STANDARD)), reason=f"torchrun is in {STANDARD}")


def make_environment(folder, name):
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "activate").write_text(f'PATH="{folder}/bin:$PATH"\n')
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "torchrun").write_text(f"#!/bin/bash\necho trained in {name}, VENV=${{VENV-}}\n")
    (folder / "bin" / "torchrun").chmod(0o755)


@no_torchrun
@pytest.mark.parametrize("launcher, args, data", [
    ("train_tts.sh", [], "TRAIN_DATA"), ("train_sft_h100x8.sh", ["out"], "TRAIN_FILE"),
    ("train_hdp_diffusion_h200.sh", [], "TRAIN_DATA")])
def test_every_launcher_finds_the_environment_of_setup(launcher, args, data, tmp_path):
    """In a copy of the launchers, with empty scripts."""
    clone = tmp_path / "my clone"
    shutil.copytree(ROOT / "launch", clone / "launch")
    for name in ("train_v2_ddp.py", "distill/train_sft.py", "diffusion/train_bd3lm.py", "core/report.py",
                 "diffusion/sample_bd3lm.py"):
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text("")

    def run(venv=""):
        return launch(clone / "launch" / launcher, *args, cwd=tmp_path, PATH=STANDARD, VENV=venv, **{data: __file__})
    done = run()
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        f"{launcher[:-3]}: error: no torchrun on PATH: set VENV or CONDA_ENV, or run bash launch/setup.sh")
    make_environment(clone / ".venv", "the .venv")
    done = run()
    assert done.returncode == 0 and done.stdout == "trained in the .venv, VENV=\n", done.stderr
    assert f"{launcher[:-3]}: environment: {clone}/.venv\n" in done.stderr
    assert run("none").returncode == 1     # "none" uses PATH, which has no torchrun
    make_environment(tmp_path / "mine", "mine")
    done = run("mine")
    assert done.stdout == "trained in mine, VENV=mine\n" and "environment:" not in done.stderr


@pytest.mark.slow
def test_the_block_diffusion_demo_trains_and_answers(tmp_path, quick):
    done = launch("train_hdp_diffusion_h200.sh", "--demo", "60", "--max_steps", "12", "--eval_steps", "6",
                  "--output_dir", "out", "--warmup_steps", "2", "--logging_steps", "2", cwd=tmp_path, **quick)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]      # too short to learn
    assert re.search(r"^verdict    FAILED: not 80 % of the answers are right; .* of 8 problems were answered right; ",
                     done.stdout, re.M)
    bounds = [float(b) for b in re.findall(r"^eval .*? nll ([\d.]+)", done.stdout, re.M)]
    assert len(bounds) == 2 and bounds[1] < bounds[0]
    assert re.search(r"^train/loss .* fell$", done.stdout, re.M)
    assert re.search(r"^accuracy   strict \d+\.\d+% .* of 8 problems", done.stdout, re.M)
    answers = json.loads((tmp_path / "out" / "answers-checkpoint-12.json").read_text())
    assert len(answers["answers"]) == 8 and all("plan" in a for a in answers["answers"])
    assert (tmp_path / "out" / "node_logs" / "local-after.log").read_text().count("accuracy ") == 1


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_scripts_are_shellcheck_clean():
    done = subprocess.run(["shellcheck", "-x", *SCRIPTS], text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_the_lock_has_every_package():
    """launch/requirements.lock has one version of each package that the tests use."""
    names, direct = ([re.match(pattern, line)[0] for line in (ROOT / file).read_text().splitlines() if line[0] != "#"]
                     for file, pattern in (("launch/requirements.lock", "[a-z0-9-]+(?===)"),
                                           ("requirements.txt", "[a-z0-9-]+")))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    direct += [re.match("[a-z0-9-]+", line)[0] for lines in extras.values() for line in lines]
    assert set(direct) - set(names) == {"torch", "flat-trainers", "bitsandbytes", "vllm", "speechmos", "onnxruntime",
                                       "librosa"}
    assert not [name for name in names if name.startswith(("torch-", "nvidia", "triton"))]
