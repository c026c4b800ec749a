"""tests/helpers/fork_server.py: who starts its python sees what the real one shows."""
import os
import signal
import subprocess

import pytest

from tests.helpers.progress import wait_until

WAITS = """
import os, signal, sys, time
import torch
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_status_signals_and_death_go_both_ways(quick_python):
    said = subprocess.run([quick_python, "-c", "import torch, sys\nraise SystemExit('no ' + sys.argv[1])", "a b"],
                          text=True, capture_output=True)
    assert (said.returncode, said.stdout, said.stderr) == (1, "", "no a b\n")
    for number, status in ((signal.SIGUSR1, 7), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([quick_python, "-c", WAITS], text=True, stdout=subprocess.PIPE) as process:
            fork = int(process.stdout.readline())
            process.send_signal(number)
            assert process.wait() == status
        wait_until(lambda: not os.path.exists(f"/proc/{fork}"), "end of the fork")       # noqa: B023
    done = subprocess.run([quick_python, "-c", "import torch, os; os.kill(os.getpid(), 9)"])
    assert done.returncode == -signal.SIGKILL
    with open("/dev/full", "w") as full:        # a failure behind the program's last line
        assert subprocess.run([quick_python, "-c", "import torch; print(1)"], stdout=full, stderr=full).returncode
