"""What the loops of the three trainers share: start, position, one optimizer step, log lines, stopping, the end.

A TrainState is a record of what a loop would otherwise keep in twenty local variables, with small
functions on it. It never calls the script: batches, forward, loss, backward, validation and what a
checkpoint holds are written out there.
"""
import atexit
import contextlib
import math
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from common import checkpoint, distributed, flags
from common.distributed import UserError
from core.problems import collect
from core import fused, metrics, optim, watchdog

SAVE_MINUTES = 30           # a checkpoint at least so often, where --save_steps is not given
INTERVALS = {"save_steps": lambda total: max(1, total // 10), "eval_steps": lambda total: max(1, total // 5),
             "warmup_steps": lambda total: min(100, round(0.05 * total))}     # of runs whose flags do not say


def main(args, train):
    """A trainer's main: one clear error; a marker for the launcher if the run was stopped before there was a save."""
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")      # a log file shows each line at once
    is_main = os.environ.get("RANK", "0") == "0"
    with distributed.one_clear_error():
        try:
            if args.dry_run is None or is_main:
                train(args)
        except watchdog.Stopped as why:
            if is_main:
                watchdog.leave_marker(args.output_dir, str(why))
                print(f"stopped    {why}")
        watchdog.rest()
    distributed.finish()


def ranks(args):
    """How many processes train: those of this launch, or as many as a dry run plans for."""
    return args.dry_run or int(os.environ.get("WORLD_SIZE", "1"))


def start(args, cpu_too=False):
    """(World, Watchdog) of this process. Raises UserError.

    Signals are caught, output folders are proven writable, --output_dir is this run's from here on,
    the marker that an earlier run left for its launcher is removed. A dry run touches no folder,
    joins no other process, and has no Watchdog. cpu_too: see distributed.init.
    """
    if args.dry_run is not None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        if args.compile or kind == "cuda":
            fused.compiles(kind)        # says so if it cannot
        return distributed.World(device=torch.device(kind)), None
    alone_too = args.auto or args.parallel != "ddp"
    world = distributed.init(args.collective_timeout, args.wait_timeout, alone_too, cpu_too)
    watch = watchdog.Watchdog(world, args.collective_timeout)
    watch.moved("data preparation", args.wait_timeout)
    if args.compile:        # by all ranks or by none
        found = distributed.gather_objects(world, fused.compiles(world.device.type))
        args.compile = all(found)
    distributed.rank0_first(world, checkpoint.own_output, args.output_dir)
    distributed.rank0_first(world, watchdog.clear_marker, args.output_dir)
    asked = [name for name in distributed.gather_objects(world, watchdog.stop_requested()) if name]
    if asked:       # during the imports
        raise watchdog.Stopped(f"asked to stop by {asked[0]} before the first step")
    if "tensorboard" in args.report_to:
        distributed.rank0_first(world, checkpoint.prepare_output, args.logging_dir, "--logging_dir")
    return world, watch


def work_folder(args):
    """Where to write what belongs into --output_dir; a dry run has a temporary folder."""
    if args.dry_run is None:
        return args.output_dir
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def check_folders(args):
    """UserError for a folder that a run could not write, found by its dry run."""
    if args.dry_run is None:
        return
    from core import memory
    folders = {flag: getattr(args, flag, None) for flag in ("output_dir", "code_cache")}
    if "tensorboard" in args.report_to:
        folders["logging_dir"] = args.logging_dir
    collect(True, *(partial(memory.check_writable, path, f"--{flag}")
                    for flag, path in folders.items() if path))


def start_text(step, resume, new="base model"):
    """Where the run starts. resume: checkpoint folder or None."""
    return f"start      step {step}, {f'resumed from {resume}' if resume else new}"


def half(args):
    """The dtype that --bf16 or --fp16 computes in, or None: float32."""
    return torch.float16 if getattr(args, "fp16", False) else torch.bfloat16 if args.bf16 else None


def autocast(args, device):
    """The context of a forward pass in the dtype of half()."""
    return torch.autocast(device.type, half(args) or torch.bfloat16, enabled=half(args) is not None)


def sharding(args, size):
    """What distributed.shard takes of the flags, by name, or None under DDP. size: how many ranks train."""
    if args.parallel == "ddp":
        return None
    group = args.shard_size or flags.local_ranks(size)
    return {"bf16": args.bf16, "reshard_after_forward": getattr(args, "reshard_after_forward", True),
            "cpu_offload": getattr(args, "cpu_offload", False), "size": group if args.parallel == "hsdp" else 0,
            "reduce": args.reduce_dtype}


def find_resume(output_dir, resume, identity, world=checkpoint.ALONE):
    """(checkpoint folder or None, its meta or None) for --resume auto | none | FOLDER. Collective.

    identity: {name: value} that the checkpoint's meta must share, on rank 0. Raises UserError when
    nothing usable is there, or it is another run's.
    """
    tried = distributed.rank0_first(world, checkpoint.to_try, output_dir, resume)
    if not tried:
        return None, None
    from common.resume import whole_one
    return whole_one(tried, output_dir, resume, identity, world)


def position(meta):
    """{"step", "epoch", "first"} to go on from; first: the epoch's pack that comes next. meta: of the checkpoint."""
    return {key: meta[key] if meta else 0 for key in ("step", "epoch", "first")}


def intervals(args, total_steps, meta, validates, **own):
    """Set the intervals that the flags leave open, by the length of the run -> lines that tell all of them.

    args: its save_steps, eval_steps, save_minutes and, where the trainer has it, warmup_steps. validates: whether there
    is anything to validate. own: {flag: steps} of a trainer with defaults of its own. meta: of the checkpoint to go on
    from, or None: that run's steps hold on, however long this one is.
    """
    before = meta["args"] if meta else {}
    if args.save_minutes is None:
        args.save_minutes = SAVE_MINUTES if args.save_steps is None else 0
    for flag, work in INTERVALS.items():
        if getattr(args, flag, 0) is None:
            setattr(args, flag, before.get(flag, own.get(flag, work(total_steps))))
    saves, evals = (f"every {steps} steps" if steps else "at the end" for steps in (args.save_steps, args.eval_steps))
    timed = f" and when the last one is {args.save_minutes:g} minutes old" if args.save_minutes else ""
    lines = [f"intervals  checkpoints {saves}{timed}" + (f"; validation {evals}" if validates else "")]
    late = {"warmup_steps": "the learning rate never reaches its peak",
            "save_steps": f"no checkpoint before the end{', but by --save_minutes' if args.save_minutes else ''}",
            "eval_steps": "no validation before the end"}
    lines += [f"note       --{flag} {getattr(args, flag)} is longer than the run of {total_steps} steps: {what}"
              for flag, what in late.items() if getattr(args, flag, 0) > total_steps and (
                  validates or flag != "eval_steps")]
    return "\n".join(lines)


class Facts(NamedTuple):
    """What a trainer knows of its steps and data."""
    sums: int               # how many numbers a step adds up for the log
    validation: object      # JSON-able; validation losses compare only where it is equal
    name: Callable          # (i) -> where sample i stands in the user's files


class TrainState:
    """Where a run stands: position, best validation loss, sums of the log line, writer, log, clock."""

    def __init__(self, world, watch, args, order, total_steps, found, facts):
        """order: packing.PackOrder. found: of find_resume. facts: Facts."""
        self.world, self.watch, self.args = world, watch, args
        self.order, self.total_steps = order, total_steps
        self.name, self.validation = facts.name, facts.validation
        self.per_step = world.size * args.gradient_accumulation_steps
        self.resume, meta = found
        self.at = position(meta)
        self.start_step = self.step
        self.saved_step = self.step if meta else None
        self.saved_at, self.asked_to_save = time.monotonic(), False
        self.best_loss, self.best_step, self.best_tie = None, None, 0.0
        if meta and meta["validation"] == facts.validation:
            self.best_loss, self.best_step = meta["best_loss"], meta["best_step"]
            self.best_tie = meta.get("best_tie", 0.0)
        self.eval_due = bool(meta and meta.get("eval_due"))     # a signal broke a validation off
        self.flags = optim.StepFlags(world.device, meta["skipped"] if meta else 0)
        self.writer = checkpoint.Writer(world, args.output_dir, args.save_total_limit,
                                        args.wait_timeout)
        self.sums = torch.zeros(facts.sums, dtype=torch.float64, device=world.device)
        # an older checkpoint's has other numbers
        if meta and world.is_main and len(meta["unlogged"]) == facts.sums:
            self.sums += torch.tensor(meta["unlogged"], dtype=torch.float64, device=world.device)
        self.finite, self.log = [], None
        self.scaler, self.scale = None, 1.0     # the loss is multiplied by it before backward()
        if half(args) is torch.float16:
            from core.fp16 import Scaler
            self.scaler = Scaler(world.device, meta and meta.get("scaler"))
            self.scale = self.scaler.scale
        self.norm, self.lr = None, 0.0
        # delay: no bar before the first step, or the lines about the run would stand behind it
        self.bar = tqdm(total=total_steps, initial=self.step, unit="step", delay=0.001,
                        disable=None if world.is_main else True)
        self.begin_line()

    @property
    def step(self):
        """Optimizer steps done."""
        return self.at["step"]

    @property
    def last(self):
        """True behind the last step."""
        return self.step == self.total_steps

    def restore(self, model, optimizer):
        """Put back the checkpoint's moments and random states, if any; open the log, on rank 0."""
        args, world = self.args, self.world
        if self.resume:
            from common import resume
            moments = optim.state_tensors(optimizer, model.named_parameters())
            folder = Path(self.resume) / checkpoint.STATE_DIR
            resume.load_tensors(folder, "optimizer", moments, world)
            resume.load_rng(self.resume, world.rank, world.device)
        # its later lines are dropped, so not before the checkpoint has proven to fit
        if world.is_main:
            board = Path(args.logging_dir) / Path(args.output_dir).resolve().name
            checkpoint.write_text(Path(args.output_dir) / flags.CONFIG,
                                  flags.config_text(args.given, sys.argv[0]))
            self.log = metrics.MetricsLog(args.output_dir, board, args.report_to,
                                          flags.stored(args), self.step, args.wandb_project,
                                          self.eval_due)

    # -- one step ------------------------------------------------------------------------------------------------------

    def window(self):
        """Sample numbers (n,) of the coming step, of all ranks; the next epoch begins where one is used up."""
        if self.at["first"] >= self.order.packs_per_epoch:
            self.at["epoch"], self.at["first"] = self.at["epoch"] + 1, 0
        return self.order.window(self.at["epoch"], self.at["first"], self.per_step)

    def next(self, batches):
        """The next batch of an iterator; the wait for it is counted."""
        asked = time.monotonic()
        self.watch.moved(f"loading data for step {self.step + 1}")
        batch = next(batches)
        compiling = self.args.compile and self.step == self.start_step      # minutes, in the first step
        self.watch.moved(f"step {self.step + 1}", self.args.wait_timeout if compiling else None)
        self.waited += time.monotonic() - asked
        return batch

    def note_loss(self, loss, samples):
        """Note, without a host sync, whether a micro-step's loss is finite: its samples are named if the step is
        skipped. samples: their numbers.
        """
        self.loss = loss.detach()
        self.finite.append((torch.isfinite(loss.detach()), list(samples)))

    def update(self, optimizer, parameters, lr, sums):
        """Clip the gradients, step with rate lr unless they are not finite, add sums up, advance the position.

        sums: (n,) of this step's log values, dropped with a skipped step. No host sync. Returns a 0-d tensor, 1 where
        the step was skipped, the same on every rank: a bad loss makes its gradient bad, and gradients are global.
        """
        if self.scaler:
            self.scaler.unscale(parameters)
        self.norm = optim.clip_gradients(parameters, self.args.max_grad_norm)
        zero = (self.norm == 0).float()
        bad = torch.maximum(1 - torch.isfinite(self.norm).float(), zero)
        asked = distributed.largest(self.world, self.request())
        self.lr = lr
        for group in optimizer.param_groups:
            group["lr"] = lr
        optim.guarded_step(optimizer, bad)
        optimizer.zero_grad(set_to_none=True)
        # with --cpu_offload gradients are elsewhere
        bad, zero = bad.to(self.world.device), zero.to(self.world.device)
        if self.scaler:
            self.scaler.update(bad)
        self.sums += torch.where(bad > 0, 0.0, sums)
        self.at["step"], self.at["first"] = self.step + 1, self.at["first"] + self.per_step
        self.report_bad()                               # of the step before: this one is still being computed
        self.flags.push(bad + zero, asked, (self.step, self.finite))
        self.finite = []
        return bad

    def request(self):
        """What this rank asks of all: optim.STOP; on rank 0 optim.SAVE, once, when the last checkpoint is too old."""
        if watchdog.stop_requested():
            return optim.STOP
        minutes = self.args.save_minutes
        old = self.world.is_main and minutes and time.monotonic() - self.saved_at >= 60 * minutes
        ask = optim.SAVE if old and not self.asked_to_save else 0
        self.asked_to_save = self.asked_to_save or old
        return ask

    def report_bad(self):
        """Name the samples of a skipped step whose flags have arrived; UserError after --max_bad_steps in a row."""
        if not (about := self.flags.pop()):
            return
        step, flags = about
        if self.flags.zero:
            raise UserError(f"step {step}: the gradient norm is exactly 0, so nothing is "
                            "learnt; check that samples have trained tokens, and run once "
                            "without --compile and --float8")
        local = [self.name(i) for finite, numbers in flags if not finite.item() for i in numbers]
        names = sorted({name for rank_names in distributed.gather_objects(self.world, local) for name in rank_names})
        what = f"samples with a non-finite loss: {'; '.join(names[:20])}" if names else "every loss was finite"
        if self.scaler and not names and self.scale > 1:    # as often as it takes to find the scale: no fault
            self.flags.bad_in_a_row = 0
        text = f"step {step}: gradient norm is not finite, step skipped ({self.flags.bad_total} so far); {what}"
        if self.world.is_main:
            tqdm.write(text)
        if self.flags.bad_in_a_row >= self.args.max_bad_steps:
            self.watch.moved("waiting for the checkpoint under way", self.args.wait_timeout)
            self.writer.finish()
            raise UserError(f"{self.flags.bad_in_a_row} steps in a row had a non-finite gradient; {text}")

    def due(self, steps):
        """Whether what comes every so many steps, and at the end, comes now. steps 0: at the end only."""
        return self.last or (steps > 0 and self.step % steps == 0)

    def save_due(self):
        """Whether a checkpoint comes now: by --save_steps, at the end, or because rank 0 asked for it by its clock."""
        return self.due(self.args.save_steps) or self.flags.save

    def stop_asked(self, waits):
        """Whether any rank was asked to stop. waits: the host waits for this step anyway, so its flags can be read
        now; otherwise those of the step before count.
        """
        if waits or self.flags.stop:
            self.report_bad()
        return self.flags.stop

    # -- log -----------------------------------------------------------------------------------------------------------

    def begin_line(self):
        """Start counting for the next log line."""
        self.sums_since, self.steps, self.slots = Counter(), 0, 0
        self.waited, self.since = 0.0, time.monotonic()

    def count(self, slots, work):
        """Add up one step: slots, tokens with padding; work, {"tokens", "samples", "flops", ...} of all ranks."""
        self.sums_since.update(work)
        self.steps, self.slots = self.steps + 1, self.slots + slots
        self.bar.update(1)

    def log_step(self, values, console, **per_second):
        """On rank 0, complete and log the values of the steps since the last line; console(values) is printed.

        per_second: more amounts of the same steps, logged under their names as rates.
        """
        seconds = time.monotonic() - self.since
        values |= {**{f"train/{name}": amount / seconds for name, amount in per_second.items()},
                   "train/learning_rate": self.lr, "train/grad_norm": float(self.norm),
                   "train/epoch": self.at["epoch"] + min(1.0, self.at["first"] / self.order.packs_per_epoch),
                   "train/bad_steps": self.flags.bad_total,
                   **({"train/loss_scale": self.scale.item()} if self.scaler else {}),
                   **metrics.speed_report(self.sums_since, seconds, self.steps, self.slots, self.waited,
                                          self.world.device, self.world.size)}
        self.log.write(self.step, values)
        tqdm.write(console(values))

    @contextlib.contextmanager
    def pause(self):
        """Time spent in here does not count as training; an error of the last checkpoint is raised here first."""
        began = time.monotonic()
        self.writer.check()
        yield
        self.since += time.monotonic() - began

    # -- checkpoints, the end ------------------------------------------------------------------------------------------

    def better(self, loss, tie=0.0):
        """Whether a validation loss is the best so far; notes it. One that is not finite never is. tie: what
        decides between equal losses, less is better.
        """
        if not math.isfinite(loss + tie):
            return False
        if self.best_loss is not None and (loss, tie) >= (self.best_loss, self.best_tie):
            return False
        self.best_loss, self.best_tie, self.best_step = loss, tie, self.step
        return True

    def to_save(self, identity, **more):
        """state.json of a checkpoint made now. Collective. identity: find_resume's; more:
        the script's.
        """
        self.watch.moved(f"saving at step {self.step}", self.args.wait_timeout)
        self.saved_step, self.saved_at = self.step, time.monotonic()
        self.asked_to_save, self.flags.save = False, False
        return {**self.at, "identity": identity, "validation": self.validation,
                "best_step": self.best_step, "best_loss": self.best_loss,
                "best_tie": self.best_tie, "eval_due": self.eval_due,
                **({"scaler": self.scaler.saved()} if self.scaler else {}),
                **more, "skipped": self.flags.bad_total, "args": flags.stored(self.args),
                "unlogged": distributed.all_sum(self.world, self.sums.clone()).tolist()}

    def finish(self, stopped, note="", best="validation loss {:.4f}", more=lambda rows: []):
        """Wait for the last checkpoint and say how the run ended. stopped: on request, before its end.

        note: words behind the last step; best: how to print the best loss. more: clauses of the verdict, of the rows
        of metrics.jsonl.
        """
        self.watch.moved("waiting for the last checkpoint", self.args.wait_timeout)
        self.writer.finish()
        watchdog.rest()         # no rank waits for another any more, however long rank 0's loggers take to close
        self.bar.close()
        if not self.world.is_main:
            return
        self.log.close()
        if stopped:
            why = f"asked to stop by {watchdog.stop_requested() or 'a signal to another rank'} at step {self.step}"
            watchdog.leave_marker(self.args.output_dir, why)
            print(f"stopped    {why} of {self.total_steps}; saved; the same command goes on")
            return
        best = f"; best {best.format(self.best_loss)} at step {self.best_step}" if self.best_step is not None else ""
        print(f"done       step {self.step}{note}; {self.flags.bad_total} steps skipped; final checkpoint "
              f"{Path(self.args.output_dir) / f'checkpoint-{self.step}'}{best}")
        rows = metrics.read_metrics(self.log.path)
        print(metrics.verdict_line([*metrics.verdict(rows), *more(rows)]))
