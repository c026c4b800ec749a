"""Start and end of a trainer and the lines it prints. The loop is in each script."""
import atexit
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from core import checkpoint, cli, dist, json_files, lifetime, metrics, watchdog

MARKER = "requeue"      # in OUTPUT_DIR: the launcher starts this run again


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
        if world.is_main:
            name = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
            kind = "bf16" if args.bf16 else "fp16" if getattr(args, "fp16", False) else "fp32"
            print(f"device     {world.size} x {name}, torch {torch.__version__}, {kind}")
        dist.rank0(world, checkpoint.claim_output, folder)
        if world.is_main:       # of an earlier run
            for name in (MARKER, "stop", json_files.LIST):
                (Path(folder) / name).unlink(missing_ok=True)
        if "tensorboard" in args.report_to:
            dist.rank0(world, checkpoint.prepare_folder, args.logging_dir, "--logging_dir")
    watch = watchdog.Watchdog(world, args.collective_timeout)       # names a rank that hangs
    watch.report_progress("data preparation", args.wait_timeout)

    def report_or_stop(kind, error, trace):
        if issubclass(kind, watchdog.Stopped):      # raised on all ranks, before the first step
            watchdog.disarm()
            if world.is_main:
                checkpoint.write_text(Path(args.output_dir) / MARKER, f"{error}\n")
                print(f"stopped    {error}")
            dist.finish()
            sys.exit(0)
        dist.report_error(kind, error, trace)

    sys.excepthook = report_or_stop
    # a signal may have come during the imports
    if asked := [name for name in dist.all_gather(world, lifetime.stop_requested()) if name]:
        raise watchdog.Stopped(f"asked to stop by {asked[0]} before the first step")
    return world, watch, folder


def open_checkpoints(args, world, identity):
    """(CheckpointManager, newest intact checkpoint or None, its state or {}). UserError unless the
    checkpoint has the same `identity`, a dict. Collective."""
    checkpoints = checkpoint.CheckpointManager(
        world, args.output_dir, args.save_total_limit, args.wait_timeout)
    resume, state = dist.rank0(world, checkpoint.find_newest, args.output_dir, args.resume)
    if resume:
        dist.rank0(world, checkpoint.check_identity, resume, state, identity)
    return checkpoints, resume, state


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
    board = Path(args.logging_dir) / folder.resolve().name
    return metrics.MetricsLog(folder, board, args.report_to, cli.safe_flags(args), step,
                              args.wandb_project, eval_due)


def end(args, watch, checkpoints, log, step, total_steps, stopping, result):
    """Wait for the last checkpoint, print how the run ended, leave the process group. stopping: the
    run was asked to stop, so the launcher's marker is written. result: text for a complete run."""
    watch.report_progress("waiting for the last checkpoint", args.wait_timeout)
    checkpoints.wait()
    watchdog.disarm()       # from here on no rank waits for another
    if log:
        log.close()
        if stopping:
            why = (watchdog.stop_asked(args.output_dir)
                   or "asked to stop by a signal to another rank") + f" at step {step}"
            checkpoint.write_text(Path(args.output_dir) / MARKER, f"{why}\n")
            print(f"stopped    {why} of {total_steps}; checkpoint saved; rerun the same command to "
                  "resume")
        else:
            print(f"done       step {step}; {result}; final checkpoint "
                  f"{Path(args.output_dir) / f'checkpoint-{step}'}")
            print("verdict   ", "; ".join(metrics.verdict(metrics.read_metrics(log.path))))
    dist.finish()
