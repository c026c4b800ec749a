"""The launchers without Slurm: what they would run, what they refuse; signals save and leave no process behind."""
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
import uuid
from pathlib import Path

import pytest

from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT, trainer_command

SCRIPTS = [*(path for folder in ("launch", "tests/helpers/slurm") for path in (ROOT / folder).glob("*.sh")), ROOT / ".ci" / "run"]


def environment(**settings):
    """This environment without what a Slurm job or an earlier launch would have set, GPUs hidden; settings on top.

    VENV=none, so what is first on the PATH is what runs.
    """
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("SLURM", "NCCL", "LAUNCH", "TRAINER", "AFTER", "CONDA_ENV"))}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "VENV": "none", "MIN_GPUS": "0"} | settings


def launch(launcher, *args, cwd=None, **settings):
    """Run a launcher to its end; returns the finished process with stdout and stderr."""
    return subprocess.run(["bash", ROOT / "launch" / launcher, *args], text=True, capture_output=True, cwd=cwd,
                          timeout=PATIENCE_S, env=environment(**settings))


def printed_command(done):
    """The command DRY_RUN=1 printed as (settings in front, words after torchrun's own)."""
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    return words, words[next(i for i, word in enumerate(words) if word.endswith("train_v2_ddp.py")) + 1:]


def shell(text, **settings):
    """Run lines of bash after env.sh."""
    return subprocess.run(["bash", "-euc", f'source "{ROOT}/launch/env.sh"\n{text}'], text=True, capture_output=True,
                          timeout=PATIENCE_S, env=environment(**settings))


def alive(mark, *more):
    """Pids of the processes that were started with MARK=mark, and more, in their environment, however far down."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if {f"MARK={mark}".encode(), *more} <= set((folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
        except OSError:
            pass
    return found


@pytest.fixture
def start(tmp_path):
    """start(*args, **settings) runs train_tts.sh, or slurm.sh where a TRAINER of ours takes none of its flags, in a
    process group of its own, as a terminal does; it ends here.

    Returns the process; .mark is in every descendant's environment, .log its output.
    """
    started = []

    def run(*args, **settings):
        mark, log = uuid.uuid4().hex, tmp_path / f"launch-{len(started)}.log"
        launcher = ROOT / "launch" / ("slurm.sh" if "TRAINER" in settings else "train_tts.sh")
        process = subprocess.Popen(["bash", str(launcher), *map(str, args)], cwd=tmp_path, stdout=log.open("w"),
                                   stderr=subprocess.STDOUT, process_group=0,
                                   env=environment(MARK=mark, SWITCHES="", **settings))
        process.mark, process.log = mark, log
        started.append(process)
        return process
    yield run
    for process in started:
        for pid in [*alive(process.mark), process.pid]:
            if process.poll() is None or pid != process.pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        process.wait()


@pytest.mark.parametrize("launcher, args, settings, message", [
    ("train_tts.sh", [], {}, r"TRAIN_DATA is not set: a ChatML file"),
    ("train_tts.sh", ["--train_data_file", __file__], {"SLURM_GPUS_ON_NODE": "8"},
     r"Slurm gave 8 GPUs on .*, the driver shows 0"),
    ("train_tts.sh", [], {"PATH": "/usr/bin:/bin", "TRAIN_DATA": __file__}, r"no torchrun on PATH"),
    ("train_tts.sh", ["--no_such", "3"], {"TRAIN_DATA": __file__}, r"--no_such: no such flag; --help lists all"),
])
def test_errors_are_one_clear_line(launcher, args, settings, message):
    if settings.get("PATH") and shutil.which("torchrun", path=settings["PATH"]):
        pytest.skip("torchrun is in /usr/bin")
    done = launch(launcher, *args, DRY_RUN="1", **settings)
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode in (1, 2) and len(lines) == 1 and done.stdout == "", done.stderr
    assert re.search(f"^({launcher[:-3]}: )?error: .*{message}", lines[0]), lines


def test_a_link_to_a_launcher_finds_the_repository(tmp_path):
    (tmp_path / "mine.sh").symlink_to(ROOT / "launch" / "train_tts.sh")
    assert f"{ROOT}/train_v2_ddp.py" in printed_command(launch(tmp_path / "mine.sh", DRY_RUN="1", TRAIN_DATA=__file__))[0]
    done = launch(shutil.copy(ROOT / "launch" / "train_tts.sh", tmp_path), PATH="/usr/bin:/bin")
    assert done.returncode == 1 and "env.sh not found: sbatch FILE, not sbatch < FILE\n" in done.stderr
    assert "RANK" not in launch("distill_demo.sh", KEEP="x", RANK="0", TOKEN="of mine").stderr


def test_a_node_without_gpus_is_refused_but_for_a_dry_run():
    done = launch("train_tts.sh", "--wandb_project", "try -h 2", TRAIN_DATA=__file__, MIN_GPUS="")     # asks for no help
    assert done.returncode == 1 and done.stderr == (
        f"train_tts: error: {socket.gethostname()} has 0 GPUs, 1 are needed (MIN_GPUS=0 trains on CPUs)\n")
    assert launch("train_tts.sh", TRAIN_DATA=__file__, MIN_GPUS="", DRY_RUN="1").returncode == 0


def test_arguments_of_srun(tmp_path):
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho n1\n")
    (tmp_path / "scontrol").chmod(0o755)
    done = launch("train_tts.sh", DRY_RUN="1", TRAIN_DATA=__file__, PATH=f"{tmp_path}:{os.environ['PATH']}",
                  SLURM_JOB_ID="3007", SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="n1",
                  SRUN_ARGS="--container-image=/i.sqsh --container-mounts=/data")
    words, _ = printed_command(done)
    assert words[words.index("bash") - 2:words.index("bash")] == [
        "--container-image=/i.sqsh", "--container-mounts=/data"]


# -- status and signals -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.race
def test_torchruns_restart_resumes_and_the_first_ctrl_c_saves(tiny, tmp_path, start):
    """From the newest checkpoint, after the death of a rank; no process is left behind."""
    out = tmp_path / "out"
    flags = trainer_command(tiny, out, "--use_lora", "--max_steps", 100000, "--num_train_epochs", 100000,
                            "--disable_eval", "--save_steps", 5)[2:]
    process = start(*flags, NPROC_PER_NODE="2", MAX_RESTARTS="1")
    wait_until(lambda: (out / "checkpoint-5").exists() or process.poll() is not None, "first checkpoint")
    # of the processes with rank 1, loaders too, the trainer is the oldest
    os.kill(min(alive(process.mark, b"RANK=1")), signal.SIGKILL)

    def starts():
        return [int(step) for step in re.findall(r"^start +step (\d+)", process.log.read_text(), re.M)]

    def last_step():
        return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    wait_until(lambda: len(starts()) == 2 and last_step() > starts()[1] or process.poll() is not None, "second start")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=PATIENCE_S) == 0, process.log.read_text()[-3000:]
    wait_until(lambda: not alive(process.mark), "end of every process")
    first, second = starts()
    assert first == 0 < second and second % 5 == 0
    assert (out / "requeue").read_text() == f"asked to stop by SIGUSR1 at step {last_step()}\n"
    assert (out / f"checkpoint-{last_step()}" / "manifest.json").exists()


# deaf to signals for a while, as a trainer is while it imports; then as a trainer is
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
    wait_until(lambda: not alive(process.mark), "end of every process")     # the reminder's, too, within REPEAT_S


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
    process.kill()      # and a parent that does not ask how it ended, as a container's first process may be
    wait_until(lambda: not alive(process.mark), "end of every process")      # torchrun gets SIGTERM
    assert not alive(process.mark)


# -- after training ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_comes_after_training_runs_line_by_line(tmp_path, script, light):
    """Only when training has come to its end; the first line that fails gives the status."""
    after = 'echo "one $0"; echo two >&2\n[ -z "${AFTER-}${TRAINER-}${LAUNCHER-}" ] || echo inherited\n'
    done = launch("slurm.sh", "--output_dir", "a folder", cwd=tmp_path, TRAINER=script("print('trained')"),
                  AFTER=after + "exit 7\necho three", PATH=light)
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["trained", "one bash", "two"]
    assert (tmp_path / "a folder" / "node_logs" / "local-after.log").read_text() == "one bash\ntwo\n"
    assert launch("slurm.sh", cwd=tmp_path, TRAINER=script("pass"), AFTER=after, PATH=light).returncode == 0
    done = launch("slurm.sh", cwd=tmp_path, TRAINER=script("import sys; sys.exit(5)"), AFTER=after, PATH=light)
    assert done.returncode == 5 and "one" not in done.stdout


# -- the Python environment --------------------------------------------------------------------------------------------

STANDARD = "/usr/local/bin:/usr/bin:/bin"
no_torchrun = pytest.mark.skipif(bool(shutil.which("torchrun", path=STANDARD)), reason=f"torchrun is in {STANDARD}")


def make_environment(folder, name):
    """A virtual environment's activate, python and a torchrun that says its name."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "activate").write_text(f'PATH="{folder}/bin:$PATH"\n')
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "torchrun").write_text(f"#!/bin/bash\necho trained in {name}, VENV=${{VENV-}}\n")
    (folder / "bin" / "torchrun").chmod(0o755)


@pytest.fixture
def clone(tmp_path):
    """A copy of the launchers and of empty scripts; nothing is set up."""
    folder = tmp_path / "my clone"
    shutil.copytree(ROOT / "launch", folder / "launch")
    for name in ("train_v2_ddp.py", "core/report.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    return folder


def launch_from(clone, launcher, *args, path=STANDARD, **settings):
    return subprocess.run(["bash", str(clone / "launch" / launcher), *args], text=True, capture_output=True,
                          timeout=PATIENCE_S, cwd=clone.parent, env=environment(**{
                              "PATH": path, "VENV": "", "MIN_GPUS": "0", "TRAIN_DATA": __file__, **settings}))


@no_torchrun
def test_a_launcher_finds_what_set_up_has_made(clone):
    done = launch_from(clone, "train_tts.sh")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        "train_tts: error: no torchrun on PATH: set VENV or CONDA_ENV, or run bash launch/setup.sh")
    make_environment(clone / ".venv", "the .venv")
    done = launch_from(clone, "train_tts.sh")
    assert done.returncode == 0 and done.stdout == "trained in the .venv, VENV=\n", done.stderr
    assert f"train_tts: environment: {clone}/.venv\n" in done.stderr
    assert launch_from(clone, "train_tts.sh", VENV="none").returncode == 1     # as it is: without torchrun
    make_environment(clone.parent / "mine", "mine")
    done = launch_from(clone, "train_tts.sh", VENV="mine")
    assert done.stdout == "trained in mine, VENV=mine\n" and "environment:" not in done.stderr


def test_a_torch_without_cuda_is_not_started_on_gpus(clone):
    import torch
    (clone / "nvidia-smi").write_text("#!/bin/bash\necho 'GPU 0: NVIDIA H200 (UUID: x)'\n")
    (clone / "nvidia-smi").chmod(0o755)
    settings = {"path": f"{clone}:{os.environ['PATH']}", "DRY_RUN": "1"}
    done = launch_from(clone, "train_tts.sh", CUDA_VISIBLE_DEVICES="0", **settings)
    if torch.version.cuda or torch.version.hip:
        assert done.returncode == 0
    else:
        assert done.returncode == 1 and re.fullmatch(
            r"train_tts: error: .* has 1 GPUs, but torch of .* is built without CUDA: .*\n", done.stderr), done.stderr
    assert launch_from(clone, "train_tts.sh", **settings).returncode == 0       # CUDA_VISIBLE_DEVICES=


# -- the scripts themselves -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_scripts_are_shellcheck_clean():
    done = subprocess.run(["shellcheck", "-x", *SCRIPTS], text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
