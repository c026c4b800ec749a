"""Real ranks without their start-up time: a process imports a trainer once and forks the ranks of every job.

Importing torch and transformers takes most of a tiny run's time. A rank is a fresh process with the environment that
torchrun gives; the ranks of a job meet on a port of their own, where rank 0 hosts their store, as under our launchers.
"""
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)      # instead of this file's folder

from tests.helpers.progress import PATIENCE_S  # noqa: E402

LATE = ("speech.v2", "distill.packed_lm", "diffusion.elbo", "numpy.ma", "matplotlib.figure",
        "matplotlib.backends.backend_agg")      # many jobs import some of them


class Pool:
    """Jobs of at most so many ranks. folder: an empty one for their output; preload: a module imported once."""

    def __init__(self, ranks, folder, preload="tests.helpers.imports"):
        self.ranks, self.folder, self.preload, self.jobs, self.server = ranks, Path(folder), preload, 0, None

    def run(self, ranks, function, *args, timeout=PATIENCE_S, cwd=None, env=None):
        """Call "module.function" with these (JSON-able) arguments on ranks 0 to ranks - 1; (their statuses, output).

        Whatever interrupts it, as pytest-timeout does, ends the job: the next one must not wait for it.
        """
        assert ranks <= self.ranks
        try:
            return self._run(ranks, function, args, timeout, cwd, env)
        except BaseException:
            server, self.server = self.server, None     # first, if this is interrupted as well
            if server:
                server.kill()       # the ranks go with it; the next job starts another
                server.wait()
            raise

    def _run(self, ranks, function, args, timeout, cwd, env):
        if self.server is None or self.server.poll() is not None:
            with open(self.folder / "server.txt", "a") as log:
                self.server = subprocess.Popen([sys.executable, __file__, self.preload], cwd=self.folder,
                                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0,
                                               env={**os.environ, "HF_HUB_OFFLINE": "1"})      # read while importing
        self.jobs += 1
        log = self.folder / f"{self.jobs}.txt"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = [self.jobs, ranks, port, timeout, str(log), str(cwd or self.folder), env or {}, function, args]
        self.server.stdin.write(json.dumps(job).encode() + b"\n")
        statuses, deadline = {}, time.monotonic() + timeout
        while len(statuses) < ranks:
            ready, _, _ = select.select([self.server.stdout], [], [], max(0, deadline - time.monotonic()))
            line = self.server.stdout.readline() if ready else b""
            if not line:
                hung = [rank for rank in range(ranks) if rank not in statuses]
                raise AssertionError(f"{function} {args}: ranks {hung} did not end in {timeout} s\n{self.output(log)}")
            number, rank, status = map(int, line.split())
            if number == self.jobs:     # else of a job that nobody waits for any more
                statuses[rank] = status
        return [statuses[rank] for rank in range(ranks)], self.output(log)

    def output(self, log):
        text = log.read_text(errors="replace") if log.exists() else ""
        return text + (self.folder / "server.txt").read_text()

    def close(self):
        if self.server:
            # by force: a loader process that a test has left holds the pipe, whose end would never come
            self.server.kill()
            self.server.wait(timeout=PATIENCE_S)


def serve():
    """For each job that stdin has: fork its ranks, print "job rank status" when one has ended."""
    for line in sys.stdin:
        number, ranks, *job = json.loads(line)
        pids = {}
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    status = work(rank, ranks, *job)
                finally:
                    os._exit(status)        # tearing down a copy of all that was imported takes a second
            pids[child] = rank
        while pids:
            child, status = os.wait()
            print(number, pids.pop(child), os.waitstatus_to_exitcode(status), flush=True)


def work(rank, ranks, port, timeout, log, cwd, env, function, args):
    """Run one rank of a job in this process, all its output in the log; returns the exit status."""
    die_with_parent()
    out, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(ours, theirs)
    os.chdir(cwd)
    os.environ |= {"WORLD_SIZE": str(ranks), **env}
    if ranks > 1:       # one is alone, as without torchrun
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    faulthandler.enable()       # as flags.parse does for a process of its own
    faulthandler.dump_traceback_later(0.9 * timeout)        # where it hangs, before the pool gives up
    module, name = function.rsplit(".", 1)
    status = 0
    try:
        getattr(importlib.import_module(module), name)(*args)
    except SystemExit as left:
        status = left.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())     # a script's own, which may end the process here
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # PR_SET_PDEATHSIG: no process outlives the one that it works for


if __name__ == "__main__":
    die_with_parent()
    gc.disable()
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    importlib.import_module(sys.argv[1])        # what takes long
    for name in LATE:
        with contextlib.suppress(ImportError):      # matplotlib need not be there
            importlib.import_module(name)
    get_checkpoint_conversion_mapping("llama")      # PEFT asks; a thousand patterns are compiled once
    gc.freeze()     # ranks share its pages
    gc.enable()
    torch.set_num_threads(1)
    serve()
    os._exit(0)
