"""Start, stop and end of a trainer, and a watchdog. The loop is in each script.

SIGTERM and SIGUSR1 only set a flag. The loop checks it, saves, leaves OUTPUT_DIR/requeue for the
launcher and exits with status 0. A thread of each rank reports the progress of its main thread to
the run's store. If a rank exceeds its time limit, the slowest ranks are named and print their
stacks, and all ranks exit with status 1 before the process group's limit. A frozen process is
noticed in any phase, after the limit of a step.
"""
import atexit
import json
import multiprocessing.queues
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import torch
from torch._utils import ExceptionWrapper

from core import checkpoint, cli, dist, json_files, metrics
from core.cli import require
from core.dist import FAILED, GRACE_S

MARKER = "requeue"      # in OUTPUT_DIR: the launcher starts this run again
BLOCKED_SIGNALS = (*cli.SIGNALS, signal.SIGINT)        # blocked while a loader process starts
JUDGES = 8      # ranks that look for hanging ones; several, as some may be frozen
_disarmed = threading.Event()


class Stopped(Exception):
    """The run was asked to stop before its first step. Raised on all ranks."""


def start(args):
    """(World, Watchdog, folder to prepare data in). A dry run joins no other process and prepares
    data in a temporary folder instead of --output_dir. UserError."""
    if args.dry_run is not None:
        world, folder = dist.single_process(), tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    else:
        folder = args.output_dir
        world = dist.init(args.collective_timeout, args.wait_timeout,
                          args.auto or args.parallel != "ddp",      # --auto may choose to shard
                          getattr(args, "cpu_offload", False))
        dist.rank0(world, open_output, args, world)
    if world.device.type == "cuda" and args.bf16:     # a CPU has it, slowly; --float8 needs --bf16
        version, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
        require(version >= (8, 0), f"--bf16: {name} has no bfloat16; give --fp16, or drop it")
        require(version >= (8, 9) or not getattr(args, "float8", False),
                f"--float8: {name} has no float8 products; drop the flag")
    watch = Watchdog(world, args.collective_timeout)
    watch.report_progress("data preparation", args.wait_timeout)

    def report_or_stop(kind, error, trace):
        if kind is not Stopped:
            return dist.report_error(kind, error, trace)
        disarm()
        if world.is_main:
            mark_stopped(args, error)
        dist.finish()
        sys.exit(0)

    sys.excepthook = report_or_stop
    # a signal may have come during the imports
    if asked := [name for name in dist.all_gather(world, cli.stop_requested()) if name]:
        raise Stopped(f"asked to stop by {asked[0]} before the first step")
    return world, watch, folder


def open_output(args, world):
    """On rank 0: lock the folders of a run and remove what an earlier run left in them."""
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    kind = "bf16" if args.bf16 else "fp16" if getattr(args, "fp16", False) else "fp32"
    print(f"device     {world.size} x {name}, torch {torch.__version__}, {kind}")
    checkpoint.claim_output(args.output_dir)
    for name in (MARKER, "stop", json_files.LIST):
        (Path(args.output_dir) / name).unlink(missing_ok=True)
    if "tensorboard" in args.report_to:
        checkpoint.prepare_folder(args.logging_dir, "--logging_dir")


def schedule_lines(args, ranks, total_steps, steps_per_epoch, step, resume, intervals):
    """Lines about the steps of a run, its intervals and its start."""
    packs = ranks * args.gradient_accumulation_steps
    return [f"steps      {total_steps} ({steps_per_epoch} an epoch), {cli.plural(packs, 'pack')} "
            f"a step = {cli.plural(ranks, 'rank')} x "
            f"{cli.plural(args.gradient_accumulation_steps, 'micro-step')}; ", intervals,
            start_line(step, total_steps, resume)]


def start_line(step, total_steps, resume, base="base model"):
    """Line about the step and weights from which a run starts."""
    return (f"start      step {step}, {f'resumed from {resume}' if resume else base}"
            + f"; already finished: raise --max_steps above {total_steps}" * (step >= total_steps))


def open_log(args, world, step, eval_due):
    """MetricsLog on rank 0, else None. Writes OUTPUT_DIR/run.yaml, whose flags repeat the run."""
    if not world.is_main:
        return None
    folder = Path(args.output_dir)
    checkpoint.write_text(folder / cli.CONFIG, cli.config_text(args, sys.argv[0]))
    return metrics.MetricsLog(folder, Path(args.logging_dir) / folder.resolve().name,
                              args.report_to, cli.safe_flags(args), step, args.wandb_project,
                              eval_due)


def end(args, log, step, total_steps, stopping, result):
    """Wait for the last checkpoint, print how the run ended, leave the process group. stopping: the
    run was asked to stop, so the launcher's marker is written. result: text for a complete run."""
    checkpoint.wait()
    disarm()       # from here on no rank waits for another
    if log:
        log.close()
        if stopping:
            why = stop_asked(args.output_dir) or "asked to stop by a signal to another rank"
            mark_stopped(args, f"{why} at step {step}", f" of {total_steps}; checkpoint saved; "
                         "rerun the same command to resume")
        else:
            print(f"done       step {step}; {result}; final checkpoint "
                  f"{Path(args.output_dir) / f'checkpoint-{step}'}")
            print("verdict   ", "; ".join(metrics.verdict(metrics.read_metrics(log.path))))
    dist.finish()


# ---- Stopping


def stop_asked(output_dir):
    """Reason to save and stop as text, or None: a signal, or the file OUTPUT_DIR/stop."""
    asked = cli.stop_requested() or os.path.exists(Path(output_dir) / "stop") and "stop"
    return f"asked to stop by {asked}" if asked else None


def any_stop(world, output_dir):
    """True if any rank was asked to stop. Collective; waits for the device."""
    return bool(dist.all_max(world, bool(stop_asked(output_dir))).item())


def mark_stopped(args, why, more=""):
    """Ask the launcher to start this run again, and print why it stops."""
    checkpoint.write_text(Path(args.output_dir) / MARKER, f"{why}\n")
    print(f"stopped    {why}{more}")


def disarm():
    """At the end of a run: ranks may exit at different times, and signals are ignored."""
    for number in cli.SIGNALS:  # the exiting interpreter would restore default handlers, which kill
        signal.signal(number, signal.SIG_IGN)
    _disarmed.set()
    for thread in threading.enumerate():
        if thread.name == "watchdog":       # in a call to the store it would abort the exit
            thread.join(GRACE_S)


def init_loader(worker_id):
    """worker_init_fn of every DataLoader: the process ignores signals and ends with the trainer."""
    cli.end_with_parent()
    # pass an item that cannot be sent (/dev/shm is full) as an error: the trainer waits for it
    multiprocessing.queues.Queue._on_queue_feeder_error = lambda queue, error, item: queue.put(
        (item[0], ExceptionWrapper((type(error), error, error.__traceback__), "in a loader")))
    for number in BLOCKED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)


class Watchdog:
    """Threads on every rank that watch the main threads of all ranks; none in a single process."""

    def __init__(self, world, limit_s):
        """limit_s: seconds that a step may take, or that a rank may not report."""
        self.world, self.limit_s, self.main = world, limit_s, threading.get_ident()
        # the more ranks, the longer each interval, but a failure is noticed within GRACE_S
        self.beat_s = min(limit_s / 10, max(1.0, (world.size / 8) ** 0.5), 0.8 * GRACE_S)
        self.beats = 0      # used as the clock, which must not run while the process is paused
        self.unanswered = 0     # seconds since the store's last answer
        self.state = {"progress": 0, "since": 0, "where": "start", "limit_s": limit_s}
        self.keys = [f"watch/{rank}" for rank in range(world.size)]
        # of each rank: its last report, and the seconds since it changed
        self.reports, self.silent = [None] * world.size, [0] * world.size
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
                if self.world.rank < JUDGES and self.store.check(self.keys):    # all have started
                    self._judge()
            if self.store.check([f"hangs/{self.world.rank}"]):
                print(f"rank {self.world.rank} hangs here:", file=sys.stderr)
                traceback.print_stack(sys._current_frames()[self.main])
            self._end()
        except Exception as error:      # the store is lost: rank 0 or torchrun hosts it
            _disarmed.wait(GRACE_S)      # torchrun may end this process first
            self._end("rank 0 or its node is gone: the store of the run does not answer "
                      f"({cli.first_line(error)})", printing=0)

    def _watch_store(self):
        """Thread: notice a store whose host is frozen, so that no call to it returns."""
        while not _disarmed.wait(self.beat_s):
            self.unanswered += self.beat_s
            if self.unanswered > self.limit_s + GRACE_S:
                self._end(f"no answer from rank 0 for {self.unanswered:.0f} s: its process, "
                          "torchrun, or its node is frozen", self.world.local_size - 1)

    def _end(self, why="", printing=None):
        """End this process, unless the run is over. printing: the local rank that prints why."""
        if self.world.local_rank == printing and not _disarmed.is_set():
            cli.print_error(f"error: {why}")
        if not _disarmed.wait(GRACE_S):      # others print before this one exits
            os._exit(1)

    def _beat(self):
        """Report this rank's phase to the store; True if a rank has failed."""
        self.beats += 1
        # reads self.state once: the main thread may replace it
        report = self.state | {"beats": self.beats,
                               "who": f"{os.uname().nodename}, process {os.getpid()}"}
        self.store.set(self.keys[self.world.rank], json.dumps(report))
        failed = self.store.check([FAILED])     # unlike set(), this waits for an answer
        self.unanswered = 0
        if _disarmed.wait(self.beat_s):
            sys.exit()      # ends this thread only
        return failed

    def _judge(self):
        """If a rank takes too long, name the silent ranks or, if none is silent, the slowest."""
        late, spare = [], min(5 * self.beat_s, GRACE_S)     # reports are delayed
        for rank, key in enumerate(self.keys):
            report = json.loads(self.store.get(key))
            same = report == self.reports[rank]
            self.silent[rank] = self.silent[rank] + self.beat_s if same else 0
            self.reports[rank] = report
            waited = (report["beats"] - report["since"]) * self.beat_s
            if waited > report["limit_s"] + spare or self.silent[rank] > self.limit_s + spare:
                late.append(max(waited, self.silent[rank]))
        if not late:
            return
        slowest = min(report["progress"] for report in self.reports)
        silent = [rank for rank, seconds in enumerate(self.silent) if seconds > self.limit_s / 2]
        hanging = silent or [
            rank for rank, report in enumerate(self.reports) if report["progress"] == slowest]
        for rank in hanging:
            self.store.set(f"hangs/{rank}", "")
        names = "; ".join("rank {} ({who}) in: {where}".format(rank, **self.reports[rank])
                          for rank in hanging[:8])
        if self.store.add(FAILED, 1) == 1:      # no rank has reported an error
            cli.print_error(f"error: {'no answer from' if silent else 'hangs:'} {names}; the "
                            f"others have waited for {max(late):.0f} s")
