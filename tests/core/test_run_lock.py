"""One live process owns a folder: real processes, killed and stopped; a kernel that refuses locks."""
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from core import checkpoint
from core.cli import UserError
from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT

OWNER = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from core import checkpoint
checkpoint.lock_folder(sys.argv[1])
child = os.fork()
open(sys.argv[1] + f"/{{'child' if child == 0 else 'ready'}}", "w").write(str(os.getpid()))
time.sleep(600)
"""
NO_LOCKS = f"""
import errno, sys
sys.path.insert(0, {str(ROOT)!r})
from core import checkpoint
from tests.helpers.system_calls import refuse
try:
    refuse("flock", errno.ENOLCK)       # as NFS without a lock server
except OSError:
    sys.exit(77)
checkpoint.lock_folder(sys.argv[1]).release()
"""


@contextlib.contextmanager
def owner_process(folder):
    """A process that owns the folder, with a child of its own; both are killed in the end."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], start_new_session=True)
    try:
        wait_until(lambda: all((folder / name).exists() and (folder / name).read_text() for name in ("ready", "child")),
                   "owner", alive=lambda: process.poll() is None)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_living_owner_is_named_and_a_killed_one_is_gone_at_once_whatever_its_children_do(tmp_path):
    with owner_process(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)         # alive, however long it shows no sign of it
        with pytest.raises(UserError) as caught:
            checkpoint.lock_folder(tmp_path)
        assert "\n" not in str(caught.value)
        assert f"host {socket.gethostname()}, process {process.pid}, started 20" in str(caught.value)
        process.kill()
        process.wait()
        os.kill(int((tmp_path / "child").read_text()), 0)       # lives, and holds no lock
        checkpoint.lock_folder(tmp_path, wait_s=0).release()
        assert {path.name for path in tmp_path.iterdir()} == {"ready", "child", "run.lock"}


def race(folder, barrier, results):
    barrier.wait()
    try:
        checkpoint.lock_folder(folder, wait_s=0)
        results.put(("won", os.getpid()))
        time.sleep(600)
    except UserError as error:
        results.put(("lost", str(error)))


@pytest.mark.race
def test_of_newcomers_at_the_same_moment_one_wins(tmp_path):
    """Each time after an owner that was killed. The lock's file is removed once, as by hand."""
    fork = multiprocessing.get_context("fork")
    for attempt in range(3):
        barrier, results = fork.Barrier(6), fork.Queue()
        processes = [fork.Process(target=race, args=(tmp_path, barrier, results)) for _ in range(6)]
        for process in processes:
            process.start()
        found = [results.get(timeout=PATIENCE_S) for _ in processes]
        assert sorted(what for what, _ in found) == ["lost"] * 5 + ["won"]
        for process in processes:
            process.kill()
            process.join()
        if attempt == 1:
            (tmp_path / "run.lock").unlink()


def test_a_file_system_without_locks_is_a_notice(tmp_path):
    done = subprocess.run([sys.executable, "-c", NO_LOCKS, str(tmp_path)], text=True, capture_output=True)
    if done.returncode == 77:
        pytest.skip("system calls cannot be filtered here")
    assert done.returncode == 0, done.stderr
    said, = done.stdout.splitlines()
    assert said.startswith(f"notice     {tmp_path}/run.lock: this file system has no locks")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path),
                                  lambda path: os.symlink("gone", path)])
def test_what_is_not_a_file_is_refused(tmp_path, make):
    make(tmp_path / "run.lock")
    with pytest.raises(UserError, match="run.lock: is not a file"):
        checkpoint.lock_folder(tmp_path)


def test_a_lock_whose_file_goes_meanwhile_is_none(tmp_path, monkeypatch):
    """Between opening and locking it: the lock is of a file that nobody else can find."""
    real = checkpoint.fcntl.flock
    monkeypatch.setattr(checkpoint.fcntl, "flock", lambda fd, how: (real(fd, how), (tmp_path / "run.lock").unlink()))
    assert checkpoint.try_lock(tmp_path / "run.lock") is None
