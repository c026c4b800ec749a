"""Names hanging ranks, and ends ranks that wait for one that has failed, see dist.report_error.

A thread of each rank reports the progress of its main thread to the run's store. If a rank exceeds
its time limit, the slowest ranks are named and print their stacks, and all ranks exit with status 1
before the process group's limit. A frozen process is noticed in any phase, after the limit of a
step.
"""
import json
import os
import sys
import threading
import traceback

from core import cli
from core.dist import FAILED, GRACE_S, disarmed

JUDGES = 8      # ranks that look for hanging ones; several, as some may be frozen


class Watchdog:
    """Threads on every rank that watch the main threads of all ranks."""

    def __init__(self, world, limit_s):
        """limit_s: seconds that a step may take, or that a rank may not report."""
        self.world, self.limit_s, self.main = world, limit_s, threading.get_ident()
        # the more ranks, the longer each interval, but a failure is noticed within GRACE_S
        self.beat_s = min(limit_s / 10, max(1.0, (world.size / 8) ** 0.5), 0.8 * GRACE_S)
        self.beats = 0      # used as the clock, which must not run while the process is paused
        self.unanswered = 0     # seconds since the store's last answer
        self.state = {"progress": 0, "who": f"{os.uname().nodename}, process {os.getpid()}"}
        self.report_progress("start")
        self.keys = [f"watch/{rank}" for rank in range(world.size)]
        # of each rank: its last report, and the seconds since it changed
        self.reports, self.silent = [None] * world.size, [0] * world.size
        self.store = world.store.clone()    # calls of the main thread must not delay beats
        for watch in (self._watch, self._watch_store):
            threading.Thread(target=watch, daemon=True, name="watchdog").start()

    def report_progress(self, where, limit_s=None):
        """where: the phase that begins. limit_s: seconds it may take, None: those of a step."""
        progress = self.state["progress"] + 1
        self.state = self.state | {"progress": progress, "since": self.beats, "where": where,
                                   "limit_s": limit_s or self.limit_s}

    def _watch(self):
        """Thread: beat; if a rank hangs or has failed, end this process, which may wait for it."""
        try:
            while not self._beat():
                if self.world.rank < JUDGES and self.store.check(self.keys):    # all have started
                    self._judge()
            if self.store.check([f"hangs/{self.world.rank}"]):
                print(f"rank {self.world.rank} hangs here:", file=sys.stderr)
                traceback.print_stack(sys._current_frames()[self.main])
            self._end()
        except Exception as error:      # the store is lost: rank 0 or torchrun hosts it
            disarmed.wait(GRACE_S)      # torchrun may end this process first
            self._end("rank 0 or its node is gone: the store of the run does not answer "
                      f"({cli.first_line(error)})", printing=0)

    def _watch_store(self):
        """Thread: notice a store whose host is frozen, so that no call to it returns."""
        while not disarmed.wait(self.beat_s):
            self.unanswered += self.beat_s
            if self.unanswered > self.limit_s + GRACE_S:
                self._end(f"no answer from rank 0 for {self.unanswered:.0f} s: its process, "
                          "torchrun, or its node is frozen", self.world.local_size - 1)

    def _end(self, why="", printing=None):
        """End this process, unless the run is over. printing: the local rank that prints why."""
        if self.world.local_rank == printing and not disarmed.is_set():
            cli.print_error(f"error: {why}")
        if not disarmed.wait(GRACE_S):      # others print before this one exits
            os._exit(1)

    def _beat(self):
        """Report this rank's phase to the store; True if a rank has failed."""
        self.beats += 1
        state = self.state      # read once: the main thread may replace it
        report = state | {"waited": (self.beats - state["since"]) * self.beat_s}
        self.store.set(self.keys[self.world.rank], json.dumps(report))
        failed = self.store.check([FAILED])     # unlike set(), this waits for an answer
        self.unanswered = 0
        if disarmed.wait(self.beat_s):
            sys.exit()      # ends this thread only
        return failed

    def _judge(self):
        """If a rank takes too long, name the silent ranks or, if none is silent, the slowest."""
        reports = list(map(json.loads, self.store.multi_get(self.keys)))
        self.silent = [seconds + self.beat_s if new == old else 0
                       for seconds, new, old in zip(self.silent, reports, self.reports)]
        self.reports = reports
        spare = min(5 * self.beat_s, GRACE_S)       # reports are delayed
        late = [max(report["waited"], seconds) for report, seconds in zip(reports, self.silent)
                if report["waited"] > report["limit_s"] + spare or seconds > self.limit_s + spare]
        if not late:
            return
        silent = [rank for rank, seconds in enumerate(self.silent) if seconds > self.limit_s / 2]
        progress = [report["progress"] for report in reports]
        hanging = silent or [rank for rank, n in enumerate(progress) if n == min(progress)]
        for rank in hanging:
            self.store.set(f"hangs/{rank}", "")
        names = "; ".join("rank {} ({who}) in: {where}".format(rank, **reports[rank])
                          for rank in hanging[:8])
        if self.store.add(FAILED, 1) == 1:      # no rank has reported an error
            cli.print_error(f"error: {'no answer from' if silent else 'hangs:'} {names}; the "
                            f"others have waited for {max(late):.0f} s")
