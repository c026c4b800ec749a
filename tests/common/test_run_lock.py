"""One live process owns a folder: real processes, killed, stopped, in other containers; other hosts by their files."""
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import run_lock
from common.distributed import UserError, World
from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT

OWNER = """
import os, sys, time
sys.path.insert(0, {root!r})
from common import run_lock
{before}
run_lock.claim(sys.argv[1])
child = os.fork()
open(sys.argv[1] + f"/{{'child' if child == 0 else 'ready'}}", "w").write(str(os.getpid()))
time.sleep(600)
"""
IN_A_CONTAINER = """
import ctypes
if ctypes.CDLL(None, use_errno=True).unshare(0x20000000):       # CLONE_NEWPID, for children
    sys.exit(3)
if (child := os.fork()):
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@contextlib.contextmanager
def owner_process(folder, before=""):
    """A process that owns the folder, with a child of its own; both are killed in the end."""
    process = subprocess.Popen([sys.executable, "-c", OWNER.format(root=str(ROOT), before=before), str(folder)],
                               start_new_session=True)
    try:
        wait_until(lambda: all((folder / name).exists() and (folder / name).read_text() for name in ("ready", "child")),
                   "owner", alive=lambda: process.poll() is None)
        yield process
    except AssertionError:
        if process.wait() == 3:
            pytest.skip("no process namespace can be made here")
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def other_host(folder, number=1, beat=0.0, **more):
    """The file of an owner on another host, whose heartbeat came `beat` seconds ago; returns its path."""
    path = folder / f"owner-{number}"
    hidden = folder.parent / f"{folder.name}-{path.name}"       # whole at once: a heartbeat may be reading
    hidden.write_text(json.dumps(run_lock.this_process() | {"host": "node7", "boot": "another", "pid": 41} | more))
    os.utime(hidden, (time.time() - beat,) * 2)
    hidden.rename(path)
    return path


def test_a_living_owner_is_named_and_a_killed_one_is_dead_at_once_whatever_its_children_do(tmp_path):
    with owner_process(tmp_path) as process:
        with pytest.raises(UserError) as caught:
            run_lock.claim(tmp_path, wait_s=0)
        assert "\n" not in str(caught.value) and f"host {socket.gethostname()}, process {process.pid}, started 20" in \
            str(caught.value)
        with pytest.raises(UserError):
            run_lock.look(tmp_path, wait_s=0)
        process.send_signal(signal.SIGSTOP)         # alive, however long it shows no sign of it
        os.utime(tmp_path / "owner-1", (1, 1))
        with pytest.raises(UserError):
            run_lock.claim(tmp_path, wait_s=0)
        process.kill()
        process.wait()
        os.kill(int((tmp_path / "child").read_text()), 0)       # lives, and holds no lock
        assert run_lock.is_locked(tmp_path / "owner-1") is False
        run_lock.look(tmp_path)
        with run_lock.claim(tmp_path) as owner:
            assert owner.number == 2 and not (tmp_path / "owner-1").exists()


def test_a_process_of_another_container_is_known_by_its_lock(tmp_path):
    with owner_process(tmp_path, IN_A_CONTAINER) as process:
        os.utime(tmp_path / "owner-1", (1, 1))
        assert json.loads((tmp_path / "owner-1").read_text())["namespace"] != run_lock.this_process()["namespace"]
        with pytest.raises(UserError, match="another run is using it"):
            run_lock.claim(tmp_path, wait_s=0)
        first, = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGKILL)     # the first process of a namespace: the others end with it
        wait_until(lambda: run_lock.is_locked(tmp_path / "owner-1") is False, "end of the lock")
        run_lock.claim(tmp_path).release()


def race(folder, barrier, results):
    barrier.wait()
    try:
        owner = run_lock.claim(folder, wait_s=0)
        results.put(("won", os.getpid()))
        time.sleep(600)
        owner.release()
    except UserError as error:
        results.put(("lost", str(error)))


@pytest.mark.race
def test_of_newcomers_at_the_same_moment_one_wins(tmp_path):
    """Each time after a dead owner."""
    fork = multiprocessing.get_context("fork")
    for _ in range(4):
        barrier, results = fork.Barrier(6), fork.Queue()
        processes = [fork.Process(target=race, args=(tmp_path, barrier, results)) for _ in range(6)]
        for process in processes:
            process.start()
        found = [results.get(timeout=PATIENCE_S) for _ in processes]
        winner, = [pid for what, pid in found if what == "won"]
        assert all(f"process {winner}," in text for what, text in found if what == "lost")
        for process in processes:
            process.kill()
            process.join()
    assert len(run_lock.numbers(tmp_path, "owner")) == 1       # earlier ones are removed


def test_owners_that_end_leave_the_folder_free(tmp_path):
    with run_lock.claim(tmp_path) as owner:
        assert run_lock.Sight(owner.path).look() is True and run_lock.is_locked(owner.path) is True
    assert run_lock.Sight(owner.path).look() is False and owner.path.stat().st_mtime == 0
    other_host(tmp_path, 5)
    os.utime(tmp_path / "owner-5", (0, 0))          # it says that it has ended
    run_lock.claim(tmp_path).release()
    assert [path.name for path in tmp_path.iterdir()] == ["owner-6"]


@pytest.mark.slow
def test_owners_on_other_hosts_are_judged_by_their_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "WATCH_S", 0.5)
    path = other_host(tmp_path, beat=5)
    with pytest.raises(UserError, match="host node7, process 41"):
        run_lock.claim(tmp_path, wait_s=0)
    run_lock.look(tmp_path)                        # knows of this host only
    os.utime(path, (time.time() - 100,) * 2)        # by the clock it is dead, but it goes on: clocks differ
    with pytest.raises(UserError, match="host node7, process 41"):
        run_lock.claim(tmp_path, wait_s=0, waiting=lambda: os.utime(path, (time.time() - 90,) * 2))
    run_lock.claim(tmp_path).release()             # no further heartbeat came
    path = other_host(tmp_path, 7, beat=-10_000)    # a clock ahead of ours: only what can be watched counts
    monkeypatch.setattr(run_lock, "DEAD_S", 0.5)
    run_lock.claim(tmp_path).release()
    (tmp_path / "owner-9").write_text("")           # killed before it could write its name
    os.utime(tmp_path / "owner-9", (1, 1))
    run_lock.claim(tmp_path).release()


def test_a_job_that_slurm_starts_again_takes_over_at_once(tmp_path, monkeypatch):
    other_host(tmp_path, slurm_job="c/7", slurm_restart=1)
    for job, restart in (("7", "1"), ("8", "2")):
        monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        with pytest.raises(UserError):
            run_lock.claim(tmp_path, wait_s=0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    run_lock.claim(tmp_path).release()


def test_an_owner_that_was_taken_for_dead_finds_out(tmp_path, monkeypatch):
    """By its next heartbeat, and before a checkpoint gets its name."""
    from common import checkpoint
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    why = []
    checkpoint.own_output(tmp_path, why.append)
    path = tmp_path / "owner-1"
    path.unlink()                                   # somebody tidied up
    wait_until(path.exists, "heartbeat that makes it again")
    writer = checkpoint.Writer(World(), tmp_path)
    writer.begin(3)
    other_host(tmp_path, 2)
    writer.save(3, {"weights": lambda path: path.write_text("x")}, {"step": 3})
    with pytest.raises(UserError, match="checkpoint-3 could not be written .* taken over by another run .host node7"):
        writer.wait()
    wait_until(lambda: why, "notice")
    assert "taken over by another run (host node7, process 41" in why[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner-1", "owner-2"]


def test_a_newcomer_that_slept_between_two_calls_does_not_win(tmp_path):
    """It has seen no owner, and makes its file when owners 1 and 2 have come and gone and a third is there."""
    other_host(tmp_path, 3)
    assert run_lock.take(tmp_path, "owner", 1, None) is None
    assert [path.name for path in tmp_path.iterdir()] == ["owner-3"]


def test_whoever_waits_goes_on_when_the_owner_ends(tmp_path, capsys):
    with owner_process(tmp_path) as process:
        asked = []

        def waiting():
            asked.append(process.kill() or process.wait())
        run_lock.claim(tmp_path, wait_s=600, waiting=waiting).release()
        assert asked and f"another run is using {tmp_path} (host" in capsys.readouterr().out
