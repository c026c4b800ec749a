"""One live process owns a folder: processes are killed and stopped; a file system has no locks."""
import errno
import multiprocessing
import os
import signal
import socket
import time

import pytest

from core import checkpoint
from core.cli import UserError
from tests.helpers.progress import PATIENCE_S

FORK = multiprocessing.get_context("fork")


def own(folder, results, barrier=None):
    """Lock the folder, fork a child, and sleep; both processes stay."""
    if barrier:
        barrier.wait()
    try:
        checkpoint.lock_folder(folder, wait_s=0)
    except UserError as error:
        return results.put(("lost", str(error)))
    child = os.fork()
    if child:
        results.put(("won", child))
    time.sleep(600)


def owner_process(folder):
    results = FORK.Queue()
    process = FORK.Process(target=own, args=(folder, results))
    process.start()
    return process, results.get(timeout=PATIENCE_S)[1]


def test_a_live_owner_is_named_and_a_killed_owner_frees_the_lock_at_once(tmp_path):
    process, child = owner_process(tmp_path)
    os.kill(process.pid, signal.SIGSTOP)         # a stopped owner keeps the lock
    with pytest.raises(UserError) as caught:
        checkpoint.lock_folder(tmp_path)
    assert "\n" not in str(caught.value)
    assert f"host {socket.gethostname()}, process {process.pid}, started 20" in str(caught.value)
    process.kill()
    process.join()
    os.kill(child, 0)       # the child still runs, without a lock
    checkpoint.lock_folder(tmp_path, wait_s=0).close()
    assert {path.name for path in tmp_path.iterdir()} == {"run.lock"}
    os.kill(child, signal.SIGKILL)


@pytest.mark.race
def test_of_newcomers_at_the_same_moment_one_wins(tmp_path):
    """Each round starts after the owner was killed. The lock file is deleted once."""
    for attempt in range(3):
        barrier, results = FORK.Barrier(6), FORK.Queue()
        processes = [FORK.Process(target=own, args=(tmp_path, results, barrier)) for _ in range(6)]
        for process in processes:
            process.start()
        outcomes = sorted(results.get(timeout=PATIENCE_S) for _ in processes)
        assert [outcome for outcome, _ in outcomes] == ["lost"] * 5 + ["won"]
        os.kill(outcomes[-1][1], signal.SIGKILL)
        for process in processes:
            process.kill()
            process.join()
        if attempt == 1:
            (tmp_path / "run.lock").unlink()


def test_a_file_system_without_locks_is_a_notice(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")       # as NFS without a lock server
    monkeypatch.setattr(checkpoint.fcntl, "flock", refuse)
    checkpoint.lock_folder(tmp_path).close()
    assert "run.lock: cannot be locked (No locks available)" in capsys.readouterr().out


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path),
                                  lambda path: os.symlink("gone", path)])
def test_a_lock_that_is_no_regular_file_is_refused(tmp_path, make):
    make(tmp_path / "run.lock")
    with pytest.raises(UserError, match="run.lock: is not a file"):
        checkpoint.lock_folder(tmp_path)


def test_a_lock_on_a_deleted_file_does_not_count(tmp_path, monkeypatch):
    """The file is deleted between the first open and lock, so no other process can see that lock."""
    real, calls = checkpoint.fcntl.flock, []

    def flock(fd, how):
        real(fd, how)
        calls.append(fd)
        if len(calls) == 1:
            (tmp_path / "run.lock").unlink()
    monkeypatch.setattr(checkpoint.fcntl, "flock", flock)
    lock = checkpoint.lock_folder(tmp_path)
    assert len(calls) == 2 and os.path.samestat(os.fstat(lock.fileno()), os.stat(tmp_path / "run.lock"))


def test_who_may_use_the_folder_may_lock_it(tmp_path):
    tmp_path.chmod(0o770)
    checkpoint.lock_folder(tmp_path).close()
    assert (tmp_path / "run.lock").stat().st_mode & 0o777 == 0o660
