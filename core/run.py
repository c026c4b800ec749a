"""Start, stop and end of a trainer. The loop is in each script.

SIGTERM and SIGUSR1 only set a flag. The loop checks it, saves, leaves OUTPUT_DIR/requeue for the
launcher and exits with status 0.
"""
import atexit
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import torch

from core import checkpoint, cli, dist, json_files, metrics
from core.cli import require
from core.dist import GRACE_S

MARKER = "requeue"      # in OUTPUT_DIR: the launcher starts this run again


class Stopped(Exception):
    """The run was asked to stop before its first step. Raised on all ranks."""


def start(args):
    """(World, Watchdog, folder to prepare data in). A dry run joins no other process and prepares
    data in a temporary folder instead of --output_dir. UserError."""
    if args.dry_run is not None:
        world, folder = dist.World(), tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    else:
        folder = args.output_dir
        world = dist.init(args.collective_timeout, args.wait_timeout,
                          args.auto or args.parallel != "ddp",      # --auto may choose to shard
                          getattr(args, "cpu_offload", False))
        dist.rank0(world, open_output, args, world)
    if world.device.type == "cuda" and args.bf16:     # a CPU has it, slowly
        require(torch.cuda.get_device_capability() >= (8, 0), f"--bf16: "
                f"{torch.cuda.get_device_name()} has no bfloat16; give --fp16, or drop it")
    watch = SimpleNamespace(report_progress=lambda where, limit_s=None: None)
    if world.size > 1:      # a single process has no rank to watch
        from core import watchdog
        watch = watchdog.Watchdog(world, args.collective_timeout)
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
    checkpoint.lock_folder(args.output_dir)
    checkpoint.remove_named(args.output_dir, checkpoint.UNFINISHED)
    for name in (MARKER, "stop", json_files.LIST):
        (Path(args.output_dir) / name).unlink(missing_ok=True)
    if "tensorboard" in args.report_to:
        checkpoint.prepare_folder(args.logging_dir, "--logging_dir")


def schedule_lines(args, model, total_steps, steps_per_epoch, step, resume, intervals, warmup):
    """Lines about the model and steps of a run, its intervals and its start."""
    ranks, micro_steps = args.ranks, args.gradient_accumulation_steps
    return [metrics.model_text(model, args.use_lora),
            f"steps      {total_steps} ({steps_per_epoch} an epoch), "
            f"{cli.plural(ranks * micro_steps, 'pack')} a step = {cli.plural(ranks, 'rank')} x "
            f"{cli.plural(micro_steps, 'micro-step')}; peak lr {args.learning_rate:.2e}, "
            f"warm-up {warmup}", intervals, start_line(step, total_steps, resume)]


def start_line(step, total_steps, resume, base="base model"):
    """Line about the step and weights from which a run starts."""
    return (f"start      step {step}, {f'resumed from {resume}' if resume else base}"
            + f"; already finished: raise --max_steps above {total_steps}" * (step >= total_steps))


def open_log(args, world, step, eval_due):
    """MetricsLog; only rank 0's writes. Writes OUTPUT_DIR/run.yaml, whose flags repeat the run."""
    if not world.is_main:
        return SimpleNamespace(path=None, write=lambda step, values: None)
    checkpoint.write_text(Path(args.output_dir) / cli.CONFIG, cli.config_text(args, sys.argv[0]))
    return metrics.MetricsLog(args, step, eval_due)


def end(args, log, step, total_steps, stopping, result):
    """Wait for the last checkpoint, print how the run ended, leave the process group. stopping: the
    run was asked to stop, so the launcher's marker is written. result: text for a complete run."""
    checkpoint.wait()
    disarm()       # from here on no rank waits for another
    if log.path:
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
    """True if any rank was asked to stop. Collective."""
    return any(dist.all_gather(world, stop_asked(output_dir)))


def mark_stopped(args, why, more=""):
    """Ask the launcher to start this run again, and print why it stops."""
    checkpoint.write_text(Path(args.output_dir) / MARKER, f"{why}\n")
    print(f"stopped    {why}{more}")


def disarm():
    """At the end of a run: ranks may exit at different times, and signals are ignored."""
    for number in cli.SIGNALS:  # the exiting interpreter would restore default handlers, which kill
        signal.signal(number, signal.SIG_IGN)
    dist.disarmed.set()
    for thread in threading.enumerate():
        if thread.name == "watchdog":       # in a call to the store it would abort the exit
            thread.join(GRACE_S)
