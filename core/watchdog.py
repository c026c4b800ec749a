"""Signals that ask a run to save and stop, and a watchdog that names hanging ranks.

SIGTERM and SIGUSR1 only set a flag. The loop checks it, saves, leaves OUTPUT_DIR/requeue for the
launcher and exits with status 0. A thread of each rank reports the progress of its main thread to
the run's store. If a rank exceeds its time limit, the slowest ranks are named and print their
stacks, and all ranks exit with status 1 before the process group's limit. A frozen process is
noticed in any phase, after the limit of a step.
"""
import json
import multiprocessing.queues
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from torch._utils import ExceptionWrapper

from core.cli import first_line, print_error
from core.dist import FAILED, GRACE_S, all_max, claim_error_report
from core.lifetime import SIGNALS, end_with_parent, stop_requested

BLOCKED_SIGNALS = (*SIGNALS, signal.SIGINT)        # blocked while a loader process starts
_disarmed = threading.Event()


class Stopped(Exception):
    """The run was asked to stop before its first step. Raised on all ranks."""


def init_loader(worker_id):
    """worker_init_fn of every DataLoader: the process ignores signals and ends with the trainer."""
    end_with_parent()
    # pass an item that cannot be sent (/dev/shm is full) as an error: the trainer waits for it
    multiprocessing.queues.Queue._on_queue_feeder_error = lambda queue, error, item: queue.put(
        (item[0], ExceptionWrapper((type(error), error, error.__traceback__), "in a loader")))
    for number in BLOCKED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)


def disarm():
    """At the end of a run: ranks may exit at different times, and signals are ignored."""
    for number in SIGNALS:      # the exiting interpreter would restore default handlers, which kill
        signal.signal(number, signal.SIG_IGN)
    _disarmed.set()
    for thread in threading.enumerate():
        if thread.name == "watchdog":       # in a call to the store it would abort the exit
            thread.join(GRACE_S)


def stop_asked(output_dir):
    """Reason to save and stop as text, or None: a signal, or the file OUTPUT_DIR/stop."""
    asked = stop_requested() or os.path.exists(Path(output_dir) / "stop") and "stop"
    return f"asked to stop by {asked}" if asked else None


def any_stop(world, output_dir):
    """True if any rank was asked to stop. Collective; waits for the device."""
    return bool(all_max(world, bool(stop_asked(output_dir))).item())


class Watchdog:
    """Threads on every rank that watch the main threads of all ranks; none in a single process."""

    def __init__(self, world, limit_s):
        """limit_s: seconds that a step may take, or that a rank may not report."""
        self.world, self.limit_s, self.main = world, limit_s, threading.get_ident()
        # the more ranks, the longer each interval, but a failure is noticed within GRACE_S
        self.beat_s = min(limit_s / 10, max(1.0, (world.size / 8) ** 0.5), 0.8 * GRACE_S)
        self.who = f"{os.uname().nodename}, process {os.getpid()}"
        self.beats = 0      # used as the clock, which must not run while the process is paused
        self.unanswered = 0     # seconds since the store's last answer
        self.state = {"progress": 0, "since": 0, "where": "start", "limit_s": limit_s}
        self.reports, self.silent = {}, {}      # {rank: last report}, {rank: seconds without one}
        self.judges = world.local_rank == 0 or world.rank < 8       # several, as some may be frozen
        if world.store is not None:
            self.store = world.store.clone()    # calls of the main thread must not delay beats
            for watch in (self._watch, self._watch_store):
                threading.Thread(target=watch, daemon=True, name="watchdog").start()

    def report_progress(self, where, limit_s=None):
        """where: the phase that begins. limit_s: seconds it may take, None: those of a step."""
        self.state = {"progress": self.state["progress"] + 1, "since": self.beats, "where": where,
                      "limit_s": limit_s or self.limit_s}

    def _watch(self):
        """Thread: beat; if a rank hangs or has failed, end this process, which may wait for it."""
        try:
            while not self._beat():
                self._judge()
            if self.store.check([f"hangs/{self.world.rank}"]):
                print(f"rank {self.world.rank} hangs here:", file=sys.stderr)
                traceback.print_stack(sys._current_frames()[self.main])
            if not _disarmed.wait(GRACE_S):     # others print their stacks
                os._exit(1)
        except Exception as error:      # the store is lost: rank 0 or torchrun hosts it
            _disarmed.wait(GRACE_S)      # torchrun may end this process first
            self._end(0, "rank 0 or its node is gone: the store of the run does not answer "
                      f"({first_line(error)})")

    def _watch_store(self):
        """Thread: notice a store whose host is frozen, so that no call to it returns."""
        while not _disarmed.wait(self.beat_s):
            self.unanswered += self.beat_s
            if self.unanswered > self.limit_s + GRACE_S:
                self._end(self.world.local_size - 1, f"no answer from rank 0 for "
                          f"{self.unanswered:.0f} s: its process, torchrun, or its node is frozen")

    def _end(self, printing, why):
        """End this process, unless the run is over. printing: the local rank that prints why."""
        if self.world.local_rank == printing and not _disarmed.is_set():
            print_error(f"error: {why}")
        if not _disarmed.wait(GRACE_S):      # other ranks of the node print before this one exits
            os._exit(1)

    def _beat(self):
        """Report this rank's phase to the store; True if a rank has failed."""
        self.beats += 1
        # reads self.state once: the main thread may replace it
        report = self.state | {"beats": self.beats, "who": self.who}
        self.store.set(f"watch/{self.world.rank}", json.dumps(report))
        failed = self.store.check([FAILED])     # unlike set(), this waits for an answer
        self.unanswered = 0
        if _disarmed.wait(self.beat_s):
            sys.exit()      # ends this thread only
        return failed

    def _judge(self):
        """If a rank takes too long, name the silent ranks or, if none is silent, the slowest."""
        late, spare = [], min(5 * self.beat_s, GRACE_S)     # reports are delayed
        for rank in range(self.world.size) if self.judges else ():
            if self.store.check([f"watch/{rank}"]):     # the rank has started
                report = json.loads(self.store.get(f"watch/{rank}"))
                same = report == self.reports.get(rank)
                self.silent[rank] = self.silent[rank] + self.beat_s if same else 0
                self.reports[rank] = report
                waited = (report["beats"] - report["since"]) * self.beat_s
                if waited > report["limit_s"] + spare or self.silent[rank] > self.limit_s + spare:
                    late.append(max(waited, self.silent[rank]))
        if not late:
            return
        silent = [rank for rank, seconds in self.silent.items() if seconds > self.limit_s / 2]
        slowest = min(report["progress"] for report in self.reports.values())
        hanging = silent or [i for i, r in self.reports.items() if r["progress"] == slowest]
        for rank in hanging:
            self.store.set(f"hangs/{rank}", "")
        names = "; ".join("rank {} ({who}) in: {where}".format(rank, **self.reports[rank])
                          for rank in hanging[:8])
        if claim_error_report(self.store):
            print_error(f"error: {'no answer from' if silent else 'hangs:'} {names}; the others "
                        f"have waited for {max(late):.0f} s")
