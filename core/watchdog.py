"""Signals that ask a run to save and stop; and a rank that hangs is named, with where it hangs.

SIGTERM and SIGUSR1 only set a flag; the loop asks for it, saves, leaves the file OUTPUT_DIR/requeue
for the launcher and exits with status 0. A thread of each rank reports to the run's store how far
its main thread has come. When one makes no progress for its time limit, the slowest ranks are
named, each prints its stack, and all end with status 1, before the process group's limit. A save
may take longer than a step; a rank whose thread is silent, since its process or node is frozen, is
missed after a step's limit in any phase.
"""
import errno
import itertools
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
from core.cli import print_error
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
    """worker_init_fn of every DataLoader: loader processes end when the trainer stops them, or with
    it, not by a signal sent to all processes. A connection to a killed trainer, and too many open
    files, print no traceback here: what the trainer and its peers say of it must be seen.
    """
    lifetime.end_with_trainer()
    # what cannot be handed over, because /dev/shm is full or no file can be opened, is an error of
    # the trainer's, which would wait
    multiprocessing.queues.Queue._on_queue_feeder_error = lambda queue, error, item: queue.put(
        (item[0], ExceptionWrapper((type(error), error, error.__traceback__),
                                   "in a loader process")))
    for number in HELD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    show, gone = sys.excepthook, (ConnectionError, EOFError)
    sys.excepthook = lambda kind, error, trace: isinstance(error, gone) or getattr(
        error, "errno", None) == errno.EMFILE or show(kind, error, trace)


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


def stop_asked(output_dir):
    """Why this process should save and stop, in words, or None: a signal, or OUTPUT_DIR/stop."""
    asked = stop_requested() or os.path.exists(Path(output_dir) / STOP_FILE) and STOP_FILE
    return f"asked to stop by {asked}" if asked else None


def any_stop(world, output_dir):
    """True if any rank was asked to stop. Collective, waits for the device."""
    return bool(all_max(world, bool(stop_asked(output_dir))).item())


def leave_marker(output_dir, text):
    """Leave OUTPUT_DIR/requeue: the launcher is to start this run again."""
    write_text(Path(output_dir) / MARKER, text + "\n")


class Watchdog:
    """Watches this rank's main thread, on every rank. A single process waits for nobody."""

    def __init__(self, world, limit_s):
        """limit_s: seconds a step may take, or a rank be silent."""
        self.world, self.limit_s, self.main = world, limit_s, threading.get_ident()
        # with more ranks each beats less often, but a failure is seen within GRACE_S
        self.beat_s = min(limit_s / 10, max(1.0, (world.size / 8) ** 0.5), 0.8 * GRACE_S)
        now = time.monotonic()
        self.state = (0, "start", now, limit_s)     # progress made, where, since when, for how long
        self.heard = (None, now)                    # the next rank's last beat, and when it was new
        self.answered = self.woke = now             # the store; this process, from a pause
        if world.store is not None:
            self.store = world.store.clone()        # beats wait for no call of the main thread
            threading.Thread(target=self._watch, daemon=True).start()
            threading.Thread(target=self._watch_store, daemon=True).start()

    def report_progress(self, where, limit_s=None):
        """To be called on all ranks at the same places. where: what the main thread does now, for
        the message. limit_s: seconds it may take, None: a step's.
        """
        self.state = (self.state[0] + 1, where, time.monotonic(), limit_s or self.limit_s)

    def _watch(self):
        """Beat. When the main thread does not move for its limit, or the next rank is silent for a
        step's, note all ranks' beats, and some beats later name the ranks that have not moved
        since. When a rank has failed, end this process GRACE_S later: the main thread may wait for
        that one.
        """
        before, decide, leave = None, None, None
        me = f"{socket.gethostname()}, process {os.getpid()}"
        try:
            for beat in itertools.count():
                if _at_rest.is_set():
                    return
                count, where, since, limit_s = self.state
                self.store.set(f"watch/{self.world.rank}", json.dumps([beat, count, where, me]))
                stuck, silent = time.monotonic() - max(since, self.woke), self._silence()
                failed = self.store.check([FAILED])
                self.answered = time.monotonic()
                if leave is not None:       # beats go on until then, or this rank would be named
                    if time.monotonic() > leave:
                        os._exit(1)
                elif stuck <= limit_s and silent <= self.limit_s:
                    before, leave = None, time.monotonic() + GRACE_S if failed else None
                elif before is None:
                    before, decide = self._states(), beat + SILENT_BEATS
                elif beat >= decide:
                    self._judge(before, self._states(), stuck if stuck > limit_s else silent)
                    leave = time.monotonic() + GRACE_S      # time for the stacks of other ranks
                time.sleep(self.beat_s)
        except Exception as error:      # the store is gone: its host is, rank 0 or torchrun
            time.sleep(GRACE_S)         # torchrun, when it noticed, ends this process meanwhile
            asked = f", after {stop_requested()}" if stop_requested() else ""
            self._end(self.world.local_rank == 0,       # torchrun says why on rank 0's node
                      f"rank 0 or its node is gone{asked}: the store of the run does not answer "
                      f"({str(error).splitlines()[0]})")

    def _watch_store(self):
        """See, in another thread, a store whose host is frozen: no call to it ends."""
        while not _at_rest.is_set():
            before = time.monotonic()
            time.sleep(self.beat_s)
            now = time.monotonic()
            # this process did not run, while the others may have
            if now - before > min(self.limit_s / 2, GRACE_S):
                self.answered = self.woke = now
            if (silent := now - self.answered) > self.limit_s + GRACE_S:    # rank 0 cannot speak
                self._end(self.world.local_rank == 0 or self.world.rank == 1,
                          f"no answer from rank 0 for {silent:.0f} s: its process, which hosts the "
                          "run's store, or torchrun, or its node is frozen")

    def _end(self, speaks, why):
        """End this process, unless the run is over; `speaks`: say why."""
        if not _at_rest.is_set():
            if speaks:
                print_error(f"error: {why}")
                time.sleep(GRACE_S)         # the node's other ranks come here, too
            os._exit(1)

    def _silence(self):
        """Seconds without a beat of the next rank, which this one watches; 0 before its first."""
        key = f"watch/{(self.world.rank + 1) % self.world.size}"
        beat = self.store.get(key) if self.store.check([key]) else None
        if beat is None or beat != self.heard[0]:
            self.heard = beat, time.monotonic()
        return time.monotonic() - max(self.heard[1], self.woke)

    def _states(self):
        """{rank: [beat, count, where, host and process]} as last reported."""
        keys = {rank: f"watch/{rank}" for rank in range(self.world.size)}
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items()
                if self.store.check([key])}

    def _judge(self, before, now, stuck):
        """Name the ranks that hang: those that do not beat, else the slowest, else none."""
        silent = [rank for rank in now if rank in before and now[rank][0] == before[rank][0]]
        slowest = min(state[1] for state in now.values())
        hanging = silent or [rank for rank in now if now[rank][1] == slowest]
        names = "; ".join(f"rank {rank} ({now[rank][3]}) in: {now[rank][2]}" for rank in hanging)
        text = (f"{'no answer from' if silent else 'hangs:'} {names}; the other ranks have waited "
                f"for {stuck:.0f} s")
        if len(hanging) == len(now):
            text = (f"no rank moved for {stuck:.0f} s, all are in: {now[hanging[0]][2]}; the "
                    "network or a GPU hangs")
        if claim_error_report(self.store):
            print_error(f"error: {text}")
        if self.world.rank in hanging:
            stack = "".join(traceback.format_stack(sys._current_frames()[self.main]))
            print(f"rank {self.world.rank} hangs here:\n{stack}", file=sys.stderr, flush=True)
