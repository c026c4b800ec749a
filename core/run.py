"""Start and end of a trainer; its loop is in each script. SIGTERM and SIGUSR1 only set a flag: the
loop saves, end() leaves OUTPUT_DIR/requeue for the launcher, and the exit status is 0.
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
from core.cli import plural, require


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
        require(torch.cuda.get_device_capability() >= (8, 0), "--bf16: not on this GPU; drop it")
    watch = SimpleNamespace(report_progress=lambda where, limit_s=None: None)
    if world.size > 1:      # a single process has no rank to watch
        from core import watchdog
        watch = watchdog.Watchdog(world, args.collective_timeout)
    watch.report_progress("data preparation", args.wait_timeout)

    def report_or_stop(kind, error, trace):
        if kind is not Stopped:
            return dist.report_error(kind, error, trace)
        end(args, world, None, None, True, error)
        sys.exit(0)

    sys.excepthook = report_or_stop
    # a signal may have come during the imports
    if asked := [name for name in dist.all_gather(world, cli.stop_requested()) if name]:
        raise Stopped(f"asked to stop by {asked[0]} before the first step")
    return world, watch, folder


def open_output(args, world):
    """On rank 0: lock the folders of a run and remove what an earlier run left in them."""
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    print(f"device     {world.size} x {name}, torch {torch.__version__}")
    checkpoint.lock_folder(args.output_dir)
    checkpoint.remove_named(args.output_dir, checkpoint.UNFINISHED)
    for name in ("requeue", "stop", json_files.LIST):
        (Path(args.output_dir) / name).unlink(missing_ok=True)
    if "tensorboard" in args.report_to:
        checkpoint.prepare_folder(args.logging_dir, "--logging_dir")


def schedule_lines(args, model, total_steps, per_epoch, step, resume, state, validates,
                   base="base model", **own):
    """Derive intervals that no flag sets from the length of the run -> lines about the model, the
    steps and the start. state: of the checkpoint `resume`, whose intervals stay. base: weights of
    step 0. own: {flag: steps}, other defaults."""
    ranks, micro = args.ranks, args.gradient_accumulation_steps
    usual = {"save_steps": max(1, total_steps // 10), "eval_steps": max(1, total_steps // 5),
             "warmup_steps": min(100, round(0.05 * total_steps))} | own | state.get("args", {})
    for flag in ("save_steps", "eval_steps", "warmup_steps"):
        if getattr(args, flag) is None:
            setattr(args, flag, usual[flag])
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    return [f"model      {trained:,.3f} M trained parameters{' of LoRA' * args.use_lora}",
            f"steps      {total_steps} ({per_epoch} an epoch), {plural(ranks * micro, 'pack')} "
            f"a step = {plural(ranks, 'rank')} x {plural(micro, 'micro-step')}; peak lr "
            f"{args.learning_rate:.2e}, warm-up {args.warmup_steps}",
            f"intervals  checkpoints every {plural(args.save_steps or total_steps, 'step')}"
            + f"; validation every {plural(args.eval_steps or total_steps, 'step')}" * validates,
            f"start      step {step}, {f'resumed from {resume}' if resume else base}"
            + f"; already finished: raise --max_steps above {total_steps}" * (step >= total_steps)]


def open_log(args, world, step, eval_due):
    """MetricsLog; only rank 0's writes. Writes OUTPUT_DIR/run.yaml, whose flags repeat the run."""
    if not world.is_main:
        return SimpleNamespace(write=lambda step, values: None)
    checkpoint.write_text(Path(args.output_dir) / cli.CONFIG, cli.config_text(args, sys.argv[0]))
    return metrics.MetricsLog(args, step, eval_due)


def stop_asked(output_dir):
    """Reason to save and stop as text, or None: a signal, or the file OUTPUT_DIR/stop."""
    asked = cli.stop_requested() or os.path.exists(Path(output_dir) / "stop") and "stop"
    return f"asked to stop by {asked}" if asked else None


def end(args, world, step, total_steps, stopping, result):
    """Wait for the last checkpoint, print how the run ended, leave the process group. stopping: the
    launcher starts this run again. result: text for a complete run; why it stops, without a step"""
    checkpoint.wait()
    # ranks may exit at different times: from here on no rank waits for another
    for number in cli.SIGNALS:  # the exiting interpreter would restore default handlers, which kill
        signal.signal(number, signal.SIG_IGN)
    dist.disarmed.set()
    for thread in threading.enumerate():
        if thread.name == "watchdog":       # in a call to the store it would abort the exit
            thread.join(dist.GRACE_S)
    folder = Path(args.output_dir)
    if world.is_main and stopping:
        asked = stop_asked(folder) or "asked to stop by a signal to another rank"
        why = result if step is None else f"{asked} at step {step}"
        more = f" of {total_steps}; checkpoint saved; rerun the same command to resume"
        checkpoint.write_text(folder / "requeue", f"{why}\n")     # for the launcher
        print(f"stopped    {why}{more * (step is not None)}")
    elif world.is_main:
        print(f"done       step {step}; {result}; final checkpoint {folder / f'checkpoint-{step}'}")
        rows = metrics.read_metrics(folder / "metrics.jsonl")
        print("verdict   ", "; ".join(metrics.verdict(rows)))
    dist.finish()
