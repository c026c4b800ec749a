"""Processes end with the one that started them, and only then. Whole runs: test_recovery.py."""
import ast
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.progress import wait_until
from tests.helpers.trainer import ROOT
from tests.test_house import MODULES

pytestmark = pytest.mark.race

RANK = """
import sys, time
from core import lifetime
lifetime.POLL_S = float(sys.argv[2])
lifetime.end_with_torchrun()
print("here", flush=True)
time.sleep(float(sys.argv[1]))
print("to its end", flush=True)
"""
LAUNCHER = """
import os, subprocess, sys, time
for rank in range(3):
    subprocess.Popen(sys.argv[1:], env=os.environ | {"LOCAL_RANK": str(rank)})
time.sleep(1000)
"""
COMMAND = """
import sys, time
from core import lifetime
lifetime.start(sys.argv[1:])
time.sleep(1000)
"""
LONG = "1000"       # seconds that a rank would live
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}


def in_session(session):
    """Processes of a session that are alive."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(number) == session and state != "Z":
            found.append(int(folder.name))
    return found


@pytest.fixture
def start(tmp_path):
    """start(*command, **env) -> process in a session of its own, output in .log; the session is killed at the end."""
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
        for pid in in_session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_ranks_end_with_torchrun_and_one_of_them_says_so_last(start):
    """A parent that runs Python, as torchrun does; the whole thing is in test_recovery.py.

    Whatever threads say, as c10d's do when torchrun, which hosts the store, is gone; no step line is glued to it.
    """
    noisy = RANK.replace("time.sleep(", """
import os, threading
def speak():
    while True:
        os.write(1, b"step 8/10000 ")
        os.write(2, b"sendBytes failed\\n")
        time.sleep(0.01)
threading.Thread(target=speak, daemon=True).start()
time.sleep(""")
    parent = start(sys.executable, "-c", LAUNCHER, sys.executable, "-c", noisy, LONG, "3",
                   **TORCHRUN)       # seconds in which each rank looks, even on a busy machine
    wait_until(lambda: parent.log.read_text().count("here") == 3, "ranks")
    os.kill(max(in_session(parent.pid)), signal.SIGSTOP)    # one of them, whose thread cannot look
    parent.kill()
    wait_until(lambda: not in_session(parent.pid), "end of the ranks")
    said = parent.log.read_text()
    assert said.count("error: ") == 1
    assert said.endswith("\nerror: torchrun has ended; its ranks end with it\n")


def test_a_command_ends_with_who_has_started_it_and_all_that_it_started(start):
    parent = start(sys.executable, "-c", COMMAND, "sh", "-c", f"sleep {LONG} & wait")
    wait_until(lambda: len(in_session(parent.pid)) == 4, "command and its child", progress=parent.log.read_text)
    parent.kill()
    assert wait_until(lambda: not in_session(parent.pid), "end of all")


def test_every_process_begins_with_what_ends_it():
    """Whoever makes processes: a DataLoader without init_loader would leave them behind, so would a Popen."""
    calls = [(path, node, ast.unparse(node.func).split(".")[-1]) for path in MODULES.values()
             for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Call)]
    loaders = [node for _, node, name in calls if name == "DataLoader"]
    begun = [ast.unparse(keyword.value).split(".")[-1] for loader in loaders for keyword in loader.keywords
             if keyword.arg == "worker_init_fn"]
    assert len(loaders) >= 3 and begun == ["init_loader"] * len(loaders)
    assert [str(path) for path, _, name in calls if name == "Popen"] == ["core/lifetime.py"]
