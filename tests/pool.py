"""Real ranks without their start-up time: torchrun starts them once, they import once, and fork for every job.

Importing torch and transformers takes most of a tiny run's time. Ranks of a Pool stay, and for each job as many as it
asks for fork a fresh process; these meet on a port of their own, since torchrun's store remembers earlier jobs.
"""
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Pool:
    """At most so many ranks under one torchrun. folder: an empty one for jobs and their output; preload: a script."""

    def __init__(self, ranks, folder, preload="train_v2_ddp"):
        self.ranks, self.folder, self.preload, self.jobs, self.process = ranks, Path(folder), preload, 0, None

    def run(self, ranks, function, *args, timeout=120):
        """Call "module.function" with these (JSON-able) arguments on ranks 0 to ranks - 1; (their statuses, output)."""
        if self.process is None or self.process.poll() is not None:
            with open(self.folder / "torchrun.txt", "a") as log:
                self.process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone",
                                                 f"--nproc_per_node={self.ranks}", __file__, str(self.folder),
                                                 str(self.jobs), str(os.getpid()), self.preload],
                                                cwd=self.folder, stdout=log, stderr=log)
            timeout += 60
        job, self.jobs = self.folder / str(self.jobs), self.jobs + 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job.with_suffix(".tmp").write_text(json.dumps([ranks, port, timeout, function, args]))
        job.with_suffix(".tmp").rename(job.with_suffix(".job"))
        ends, deadline = [job.with_suffix(f".end{rank}") for rank in range(ranks)], time.monotonic() + timeout
        while not all(end.exists() for end in ends):
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.process.kill()         # the ranks see it and go; the next job starts others
                hung = [rank for rank, end in enumerate(ends) if not end.exists()]
                raise AssertionError(f"{function} {args}: ranks {hung} did not end in {timeout} s\n{self.output(job)}")
            time.sleep(0.02)
        return [int(end.read_text()) for end in ends], self.output(job)

    def output(self, job):
        text = job.with_suffix(".txt").read_text() if job.with_suffix(".txt").exists() else ""
        return text + (self.folder / "torchrun.txt").read_text()

    def close(self):
        (self.folder / "close").touch()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def serve(folder, job, owner):
    """One rank: fork for each job from this one on, write its exit status to <job>.end<rank>.

    Until Pool.close, or torchrun or the process `owner` is gone.
    """
    rank, torchrun = int(os.environ["RANK"]), os.getppid()

    def wanted():
        return os.getppid() == torchrun and os.path.exists(f"/proc/{owner}")

    while wanted() and not (folder / "close").exists():
        if not (folder / f"{job}.job").exists():
            time.sleep(0.02)
            continue
        if rank >= json.loads((folder / f"{job}.job").read_text())[0]:
            job += 1
            continue
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # PR_SET_PDEATHSIG: a job never outlives its rank
            os._exit(work(folder / f"{job}.job"))
        done = 0
        while not done:
            done, status = os.waitpid(child, os.WNOHANG)
            if not wanted():
                return
            time.sleep(0.01)
        part = folder / f"{job}.part{rank}"
        part.write_text(str(os.waitstatus_to_exitcode(status)))
        part.rename(folder / f"{job}.end{rank}")
        job += 1


def work(job):
    """Run one job in this process, all its output in <job>.txt; returns the exit status."""
    log = os.open(job.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ranks, port, timeout, function, args = json.loads(job.read_text())
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port),
                   "TORCHELASTIC_USE_AGENT_STORE": "False"}
    faulthandler.dump_traceback_later(0.9 * timeout)        # where it hangs, before the pool gives up
    module, name = function.rsplit(".", 1)
    status = 0
    try:
        getattr(importlib.import_module(module), name)(*args)
    except SystemExit as left:
        status = left.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import torch

    importlib.import_module(sys.argv[4])        # what takes long
    torch.set_num_threads(1)
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)
