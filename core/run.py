"""Start and end of a trainer, and the lines it prints; the loop is in the script."""
import atexit
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from core import checkpoint, cli, dist, metrics, watchdog


def start(args):
    """(World, Watchdog, folder to prepare data in) of this process. A dry run joins no other
    process, writes nothing to --output_dir, and has a temporary folder. UserError.
    """
    if args.dry_run is not None:
        world, folder = dist.single_process(), tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    else:
        folder = args.output_dir
        world = dist.init(args.collective_timeout, args.wait_timeout,
                          args.auto or args.parallel != "ddp",      # auto may yet choose to shard
                          getattr(args, "cpu_offload", False))
        if world.is_main:
            gpu = world.device.type == "cuda"
            name = torch.cuda.get_device_name(world.device) if gpu else "CPU"
            kind = "bf16 autocast" if args.bf16 else (
                "fp16 autocast" if getattr(args, "fp16", False) else "fp32")
            print(f"device     {world.size} x {name}, torch {torch.__version__}, {kind}")
        dist.rank0(world, checkpoint.claim_output, folder)
        dist.rank0(world, watchdog.clear_marker, folder)
        if "tensorboard" in args.report_to:
            dist.rank0(world, checkpoint.prepare_folder, args.logging_dir, "--logging_dir")
    watch = watchdog.Watchdog(world, args.collective_timeout)       # names a rank that hangs
    watch.report_progress("data preparation", args.wait_timeout)
    report = sys.excepthook

    def report_or_stop(kind, error, trace):
        if issubclass(kind, watchdog.Stopped):      # on all ranks alike, before the first step
            watchdog.exit_stopped(world, args.output_dir, error)
        report(kind, error, trace)

    sys.excepthook = report_or_stop
    watchdog.exit_if_asked(world, args.output_dir)      # by a signal during the imports
    return world, watch, folder


@contextlib.contextmanager
def enough_memory(what):
    """A GPU out of memory in here is a UserError about `what`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise cli.UserError(f"{what} does not fit into the GPU's memory; what helps: --auto, "
                            "--gradient_checkpointing, smaller batches, --parallel fsdp")


def schedule_lines(args, ranks, total_steps, steps_per_epoch, step, resume, intervals):
    """[line] of the steps of a run, its intervals, and where it starts."""
    packs = ranks * args.gradient_accumulation_steps
    return [f"steps      {total_steps} ({steps_per_epoch} an epoch), {cli.plural(packs, 'pack')} "
            f"a step = {cli.plural(ranks, 'rank')} x "
            f"{cli.plural(args.gradient_accumulation_steps, 'micro-step')}; ", intervals,
            start_line(step, total_steps, resume)]


def start_line(step, total_steps, resume, base="base model"):
    """The line of where a run starts."""
    return (f"start      step {step}, {f'resumed from {resume}' if resume else base}"
            + f"; already finished: raise --max_steps above {total_steps}" * (step >= total_steps))


def open_log(args, world, step, eval_due):
    """MetricsLog of rank 0, None elsewhere. Leaves OUTPUT_DIR/run.yaml, which repeats the run."""
    if not world.is_main:
        return None
    folder = Path(args.output_dir)
    checkpoint.write_text(folder / cli.CONFIG, cli.config_text(args, sys.argv[0]))
    return metrics.MetricsLog(folder, Path(args.logging_dir) / folder.resolve().name,
                              args.report_to, cli.safe_flags(args), step, args.wandb_project, eval_due)


def end(args, watch, checkpoints, log, step, total_steps, stopping, words):
    """Wait for the last checkpoint, say how the run ended, leave the process group.

    stopping: the run was asked to stop, so the launcher gets its marker. words: for a done run.
    """
    watch.report_progress("waiting for the last checkpoint", args.wait_timeout)
    checkpoints.wait()
    watchdog.disarm()       # no rank waits for another any more
    if log:
        log.close()
        if stopping:
            why = (watchdog.stop_asked(args.output_dir)
                   or "asked to stop by a signal to another rank")
            watchdog.leave_marker(args.output_dir, f"{why} at step {step}")
            print(f"stopped    {why} at step {step} of {total_steps}; checkpoint saved; rerun the "
                  "same command to resume")
        else:
            print(f"done       step {step}; {words}; final checkpoint "
                  f"{Path(args.output_dir) / f'checkpoint-{step}'}")
            print(metrics.verdict_line(metrics.verdict(metrics.read_metrics(log.path))))
    dist.finish()
