"""Child processes end with their parent, and only then; signals at awkward moments. Whole runs: test_recovery.py."""
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.progress import in_sessions, wait_until
from tests.helpers.trainer import ROOT, trainer_command

pytestmark = pytest.mark.race

RANK = """
import os, threading, time
from core import cli
cli.end_with_parent()
print("here", flush=True)
def speak():
    while True:
        os.write(1, b"step 8/10000 ")
        os.write(2, b"sendBytes failed\\n")
        time.sleep(0.01)
threading.Thread(target=speak, daemon=True).start()
time.sleep(1000)
"""
LAUNCHER = """
import os, subprocess, sys, time
for rank in range(3):
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=os.environ | {"LOCAL_RANK": str(rank)})
time.sleep(1000)
"""


@pytest.fixture
def start(tmp_path):
    """start(*command, **env) -> process in a new session, output in .log; the session is killed at the end."""
    started = []

    def run(*command, **env):
        log = tmp_path / f"{len(started)}.txt"
        process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
                                   cwd=ROOT, env={**os.environ, **env})
        process.log = log
        started.append(process)
        return process
    yield run
    for process in started:
        for pid in in_sessions(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_ranks_end_with_torchrun(start):
    """Threads keep printing, as c10d's do once torchrun and its store are gone."""
    parent = start(sys.executable, "-c", LAUNCHER, RANK, TORCHELASTIC_RUN_ID="none")
    wait_until(lambda: parent.log.read_text().count("here") == 3, "ranks")
    os.kill(max(in_sessions(parent.pid)), signal.SIGSTOP)    # one of them
    parent.kill()
    wait_until(lambda: not in_sessions(parent.pid), "end of the ranks")
    assert parent.log.read_text().count("here") == 3        # no rank has started another time


@pytest.mark.slow
def test_a_signal_during_the_imports_asks_for_requeue(start, tiny, tmp_path):
    """The signal arrives at the import of torch.nn."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nclass Finder:\n    def find_spec(name, *_):\n        if name == 'torch.nn':\n"
        "            os.kill(os.getpid(), signal.SIGUSR1)\nsys.meta_path.insert(0, Finder)\n")
    job = start(*trainer_command(tiny, tmp_path / "out", "--use_lora", "--max_steps", 3), PYTHONPATH=str(tmp_path))
    assert job.wait() == 0, job.log.read_text()
    why = "asked to stop by SIGUSR1 before the first step"
    assert f"stopped    {why}\n" in job.log.read_text()
    assert (tmp_path / "out" / "requeue").read_text() == f"{why}\n"


# a trainer whose process may be a fork of fork_server.py: it writes its number
NAMED = f"""
import os, pathlib, runpy, sys
sys.path[0] = {str(ROOT)!r}
pathlib.Path(sys.argv[0] + os.environ.get("RANK", "0")).write_text(str(os.getpid()))
runpy.run_path(sys.path[0] + "/train_v2_ddp.py", run_name="__main__")
"""


@pytest.fixture
def train(start, tiny, quick_python, tmp_path):
    """train(*flags, ranks) -> (process, process numbers of the ranks); the first steps are done."""
    def run(*flags, ranks=1):
        (script := tmp_path / "train.py").write_text(NAMED)
        words = trainer_command(tiny, tmp_path / "out", "--use_lora", "--num_train_epochs", 1000, *flags, ranks=ranks,
                                python=quick_python)
        job = start(*(script if word.endswith("train_v2_ddp.py") else word for word in words), PYTHON_EXEC=quick_python)
        wait_until(lambda: (tmp_path / "out" / "metrics.jsonl").exists(), "metrics", lambda: job.poll() is None)
        return job, [int(Path(f"{script}{rank}").read_text()) for rank in range(ranks)]
    return run


@pytest.mark.slow
def test_a_rank_whose_peer_was_killed_prints_nothing(train):
    """torchrun names the dead rank and sends SIGTERM to the other before that one notices the loss."""
    job, (innocent, other) = train("--disable_eval", ranks=2)
    os.kill(innocent, signal.SIGSTOP)
    os.kill(other, signal.SIGKILL)

    def asked():
        pending = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{innocent}/status").read_text(), re.M)[1]
        return int(pending, 16) >> (signal.SIGTERM - 1) & 1
    wait_until(asked, "SIGTERM from torchrun")
    os.kill(innocent, signal.SIGCONT)
    assert job.wait() == 1 and "rank 0 failed" not in job.log.read_text(), job.log.read_text()
    assert "Signal 9 (SIGKILL)" in job.log.read_text()
