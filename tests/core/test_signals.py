"""Signals at moments that no handler of the trainer used to cover. Commands as users type them."""
import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.progress import wait_until
from tests.helpers.trainer import trainer_command

pytestmark = [pytest.mark.race, pytest.mark.slow]


@pytest.fixture
def start(tiny, tmp_path):
    """start(*flags, ranks=1) -> a trainer in a session of its own; .log is what it prints."""
    jobs = []

    def begin(*flags, ranks=1):
        log = tmp_path / "log.txt"
        with open(log, "w") as out:
            jobs.append(subprocess.Popen(trainer_command(tiny, tmp_path / "out", *flags, ranks=ranks), stdout=out,
                                         stderr=subprocess.STDOUT, cwd=tmp_path, start_new_session=True))
        jobs[-1].log = log
        return jobs[-1]
    yield begin
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def is_python(pid, name):
    """Whether a process has one of torch's libraries mapped, so that its imports have begun."""
    with contextlib.suppress(OSError):
        return name in Path(f"/proc/{pid}/maps").read_text()
    return False


def test_a_signal_during_the_imports_asks_for_requeue(start, tmp_path, number=signal.SIGUSR1):
    job = start("--use_lora", "--max_steps", 3)
    wait_until(lambda: is_python(job.pid, "libtorch_python"), "import of torch", lambda: job.poll() is None)
    job.send_signal(number)
    assert job.wait() == 0, job.log.read_text()
    why = f"asked to stop by {number.name} before the first step"
    assert f"stopped    {why}\n" in job.log.read_text()
    assert (tmp_path / "out" / "requeue").read_text() == f"{why}\n"


def children(pid):
    with contextlib.suppress(OSError):
        return {int(child) for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()}
    return set()


def test_signals_from_the_fork_of_a_loader_on_take_no_loader_away(start, tmp_path):
    """Each validation forks one; here it is signalled again and again from its first instant on."""
    out = tmp_path / "out"
    job = start("--use_lora", "--num_train_epochs", 1000, "--eval_steps", 4, "--validation_split", 0.2)
    wait_until(lambda: (out / "metrics.jsonl").exists(), "metrics", lambda: job.poll() is None)
    before = children(job.pid)
    while not (new := children(job.pid) - before):
        assert job.poll() is None, job.log.read_text()
    loader, end = new.pop(), time.monotonic() + 1
    with contextlib.suppress(ProcessLookupError):
        os.kill(job.pid, signal.SIGTERM)
        while time.monotonic() < end:
            os.kill(loader, signal.SIGTERM)
    assert job.wait() == 0, job.log.read_text()
    assert re.search(r"^stopped .*checkpoint saved; rerun the same command to resume$", job.log.read_text(), re.M)
    assert (out / "requeue").exists() and list(out.glob("checkpoint-*"))
    assert "Traceback" not in job.log.read_text()


def rank_of(job, rank):
    """Pid of a rank under torchrun."""
    for pid in children(job.pid):
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    raise AssertionError(f"no rank {rank}\n{job.log.read_text()}")


def test_a_rank_whose_peer_was_killed_says_nothing(start, tmp_path):
    """torchrun names the dead one, and asks the other to end before that one notices its loss."""
    job = start("--use_lora", "--num_train_epochs", 1000, "--disable_eval", ranks=2)
    wait_until(lambda: (tmp_path / "out" / "metrics.jsonl").exists(), "metrics", lambda: job.poll() is None)
    innocent = rank_of(job, 0)
    os.kill(innocent, signal.SIGSTOP)
    os.kill(rank_of(job, 1), signal.SIGKILL)

    def asked():
        pending = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{innocent}/status").read_text(), re.M)[1]
        return int(pending, 16) >> (signal.SIGTERM - 1) & 1
    wait_until(asked, "SIGTERM from torchrun")
    os.kill(innocent, signal.SIGCONT)
    assert job.wait() == 1 and "rank 0 failed" not in job.log.read_text(), job.log.read_text()
    assert "Signal 9 (SIGKILL)" in job.log.read_text()
