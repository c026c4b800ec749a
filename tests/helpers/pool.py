"""Real ranks without start-up time: forks of fork_server.py with torchrun's environment."""
import json
import os
import socket
import subprocess
import time
from pathlib import Path

from tests.helpers.progress import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent
CALL = f"""
import faulthandler, importlib, json, sys
import torch
sys.path[0] = {str(ROOT)!r}
faulthandler.enable()
faulthandler.dump_traceback_later(0.9 * float(sys.argv[1]))      # shows a hang before the pool's timeout
module, _, name = sys.argv[2].rpartition(".")
getattr(importlib.import_module(module), name)(*json.loads(sys.argv[3]))
"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Pool:
    """python: fork_server's. folder: an empty folder for output."""

    def __init__(self, python, folder):
        self.python, self.folder, self.jobs = python, Path(folder), 0

    def run(self, ranks, function, *args, timeout=PATIENCE_S, cwd=None, env=None):
        """Call "module.function" with these (JSON-able) arguments on ranks 0 to ranks - 1; (their statuses, output)."""
        self.jobs += 1
        log = self.folder / f"{self.jobs}.txt"
        port = str(free_port())
        where = {**os.environ, "HF_HUB_OFFLINE": "1", "WORLD_SIZE": str(ranks), **(env or {})}
        started, end = [], time.monotonic() + timeout
        try:
            for rank in range(ranks):
                if ranks > 1:       # a single rank runs without torchrun
                    where |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                with open(log, "ab") as out:
                    started.append(subprocess.Popen(
                        [self.python, "-c", CALL, str(timeout), function, json.dumps(args)], stdin=subprocess.DEVNULL,
                        stdout=out, stderr=out, cwd=cwd or self.folder, env=where))
            statuses = [process.wait(max(0, end - time.monotonic())) for process in started]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{function} {args} did not end in {timeout} s\n{log.read_text(errors='replace')}")
        finally:        # also after an interruption by pytest-timeout
            for process in started:
                process.kill()      # its fork goes with it
                process.wait()
        return statuses, log.read_text(errors="replace")
