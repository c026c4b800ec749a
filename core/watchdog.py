"""Signals that ask a run to save and stop; and a rank that hangs is named, with where it hangs.

SIGTERM and SIGUSR1 only set a flag; the loop asks for it, saves, leaves OUTPUT_DIR/requeue for the
launcher and exits with status 0. A thread of each rank reports to the run's store how far its main
thread has come. When one makes no progress for its time limit, the slowest ranks are named, each
prints its stack, and all end with status 1, before the process group's limit. A save may take
longer than a step; a frozen process or node is missed after a step's limit in any phase.
"""
import json
import multiprocessing.queues
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from torch._utils import ExceptionWrapper

from core import lifetime
from core.checkpoint import write_text
from core.cli import first_line, print_error
from core.dist import FAILED, GRACE_S, all_gather, all_max, claim_error_report, finish
from core.lifetime import SIGNALS, stop_requested

MARKER = "requeue"      # in OUTPUT_DIR: the run was asked to stop, and wants to be started again
STOP_FILE = "stop"      # in OUTPUT_DIR: whoever makes it asks the run to save and stop
HELD = (*SIGNALS, signal.SIGINT)        # while a loader process starts
SILENT_BEATS = 5        # beats without one of another rank's after which it counts as silent

_at_rest = threading.Event()


class Stopped(Exception):
    """The run was asked to stop before there was anything to save; raised on all ranks alike."""


def init_loader(worker_id):
    """worker_init_fn of every DataLoader: its process ends by or with the trainer, by no signal."""
    lifetime.end_with_trainer()
    # what cannot be handed over (/dev/shm is full) is the trainer's error; it would wait for it
    multiprocessing.queues.Queue._on_queue_feeder_error = lambda queue, error, item: queue.put(
        (item[0], ExceptionWrapper((type(error), error, error.__traceback__), "in a loader")))
    for number in HELD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def fork_loaders(loader):
    """iter(loader). Signals wait until init_loader: before it, torch's handlers end the worker."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def disarm():
    """The run is over: ranks may end one by one, and a signal comes too late to kill."""
    for number in SIGNALS:      # ignored: the interpreter's end gives handlers back to the default
        signal.signal(number, signal.SIG_IGN)
    _at_rest.set()
    for thread in threading.enumerate():
        if thread.name == "watchdog":       # at the interpreter's end one in a call of the store
            thread.join(GRACE_S)            # would abort the process


def exit_if_asked(world, output_dir):
    """exit_stopped if a rank was asked to stop before there was anything to save. Collective."""
    if asked := [name for name in all_gather(world, stop_requested()) if name]:
        exit_stopped(world, output_dir, f"asked to stop by {asked[0]} before the first step")


def exit_stopped(world, output_dir, why):
    """Leave the marker for the launcher and exit with status 0. On every rank."""
    disarm()
    if world.is_main:
        leave_marker(output_dir, str(why))
        print(f"stopped    {why}")
    finish()
    sys.exit(0)


def clear_marker(output_dir):
    """Remove the marker of an earlier run, and a request to stop that was meant for that one."""
    for name in (MARKER, STOP_FILE):
        (Path(output_dir) / name).unlink(missing_ok=True)


def leave_marker(output_dir, text):
    """Leave OUTPUT_DIR/requeue: the launcher is to start this run again."""
    write_text(Path(output_dir) / MARKER, text + "\n")


def stop_asked(output_dir):
    """Why this process should save and stop, in words, or None: a signal, or OUTPUT_DIR/stop."""
    asked = stop_requested() or os.path.exists(Path(output_dir) / STOP_FILE) and STOP_FILE
    return f"asked to stop by {asked}" if asked else None


def any_stop(world, output_dir):
    """True if any rank was asked to stop. Collective, waits for the device."""
    return bool(all_max(world, bool(stop_asked(output_dir))).item())


class Watchdog:
    """Watches this rank's main thread, on every rank. A single process waits for nobody.

    Time is counted in beats: a process that was paused, with its machine, has not waited.
    """

    def __init__(self, world, limit_s):
        """limit_s: seconds a step may take, or a rank be silent."""
        self.world, self.limit_s, self.main = world, limit_s, threading.get_ident()
        # with more ranks each beats less often, but a failure is seen within GRACE_S
        self.beat_s = min(limit_s / 10, max(1.0, (world.size / 8) ** 0.5), 0.8 * GRACE_S)
        self.state = 0, "start", limit_s        # progress made, where, seconds it may take
        self.beats = self.unanswered = 0        # in all; seconds since the store has answered
        if world.store is not None:
            self.store = world.store.clone()    # beats wait for no call of the main thread
            for watch in (self._watch, self._watch_store):
                threading.Thread(target=watch, daemon=True, name="watchdog").start()

    def report_progress(self, where, limit_s=None):
        """On all ranks at the same places. where: what the main thread does now, for the message.
        limit_s: seconds it may take, None: a step's.
        """
        self.state = self.state[0] + 1, where, limit_s or self.limit_s

    def _watch(self):
        """Beat; when a rank hangs or has failed, end this process, which may wait for that one."""
        seen, moved = (None, None), [0, 0]      # this rank's state, the next one's report; beats
        try:
            while True:
                failed, state = self._beat(), self.state      # read once: the main thread moves
                now = state, self._report((self.world.rank + 1) % self.world.size)
                moved = [beat if found and found == before else self.beats
                         for beat, found, before in zip(moved, now, seen)]
                stuck, silent = ((self.beats - beat) * self.beat_s for beat in moved)
                seen = now
                if failed or stuck > state[2] and self._judge(stuck, state) \
                        or silent > self.limit_s and self._judge(silent):
                    self._beat(round(GRACE_S / self.beat_s))    # time for others to print a stack
                    self._end()
        except Exception as error:      # the store is gone: its host is, rank 0 or torchrun
            _at_rest.wait(GRACE_S)      # torchrun, when it noticed, ends this process meanwhile
            self._end(self.world.local_rank == 0 and        # torchrun says why on rank 0's node
                      "rank 0 or its node is gone: the store of the run does not answer "
                      f"({first_line(error)})")

    def _watch_store(self):
        """See, in another thread, a store whose host is frozen: no call to it ends."""
        while not _at_rest.wait(self.beat_s):
            self.unanswered += self.beat_s
            if self.unanswered > self.limit_s + GRACE_S:
                self._end((self.world.local_rank == 0 or self.world.rank == 1) and  # 0 may not
                          f"no answer from rank 0 for {self.unanswered:.0f} s: its process, which "
                          "hosts the run's store, or torchrun, or its node is frozen")

    def _end(self, why=""):
        """End this process, unless the run is over."""
        if why and not _at_rest.is_set():
            print_error(f"error: {why}")
            time.sleep(GRACE_S)         # the node's other ranks come here, too
        if not _at_rest.is_set():
            os._exit(1)

    def _beat(self, times=1):
        """Report that this rank lives, and where it is; True if a rank has failed."""
        me = f"{socket.gethostname()}, process {os.getpid()}"
        for _ in range(times):
            self.beats += 1
            self.store.set(f"watch/{self.world.rank}", json.dumps([self.beats, *self.state, me]))
            failed = self.store.check([FAILED])     # set() waits for no answer
            self.unanswered = 0
            if _at_rest.wait(self.beat_s):
                sys.exit()      # ends this thread
        return failed

    def _report(self, rank):
        """[beats, *state, host and process] as a rank has last reported; None before it has."""
        key = f"watch/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _judge(self, waited, state=None):
        """Name the ranks that do not beat from now on, or else the slowest; False if all do, and
        this one is not in `state` any more.
        """
        ranks = range(self.world.size)
        before = {rank: found for rank in ranks if (found := self._report(rank))}
        self._beat(SILENT_BEATS)
        now = {rank: self._report(rank) for rank in before}
        silent = [rank for rank in now if now[rank][0] == before[rank][0]]
        if not silent and self.state != state:
            return False
        slowest = min(found[1] for found in now.values())
        hanging = silent or [rank for rank in now if now[rank][1] == slowest]
        names = "; ".join(f"rank {rank} ({now[rank][-1]}) in: {now[rank][2]}" for rank in hanging)
        text = (f"{'no answer from' if silent else 'hangs:'} {names}; the other ranks have waited "
                f"for {waited:.0f} s")
        if len(hanging) == len(now):
            text = (f"no rank moved for {waited:.0f} s, all are in: {now[hanging[0]][2]}; the "
                    "network or a GPU hangs")
        if claim_error_report(self.store):
            print_error(f"error: {text}")
        if self.world.rank in hanging:
            stack = "".join(traceback.format_stack(sys._current_frames()[self.main]))
            print(f"rank {self.world.rank} hangs here:\n{stack}", file=sys.stderr, flush=True)
        return True
