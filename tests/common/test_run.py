"""Intervals of a run: by its length where the flags do not say, and what is said of those that never come."""
import argparse
import math

import pytest

from common import run


def settled(total, meta=None, validates=True, own=None, **given):
    """(args that run.intervals has filled in, its lines)."""
    flags = dict.fromkeys(("save_steps", "eval_steps", "save_minutes", "warmup_steps"))
    args = argparse.Namespace(**flags | given)
    return args, run.intervals(args, total, meta, validates, **own or {}).splitlines()


@pytest.mark.parametrize("total, save, validate, warmup", [
    (525, 52, 105, 26), (1, 1, 1, 0), (9, 1, 1, 0), (50_000, 5000, 10_000, 100)])
def test_a_run_saves_and_validates_by_its_length(total, save, validate, warmup):
    args, lines = settled(total)
    assert (args.save_steps, args.eval_steps, args.warmup_steps, args.save_minutes) == (save, validate, warmup, 30)
    assert lines == [f"intervals  checkpoints every {save} steps and when the last one is 30 minutes old; validation "
                     f"every {validate} steps"]


def test_flags_are_obeyed_and_what_never_comes_is_said():
    args, lines = settled(525, save_steps=5000, eval_steps=0, warmup_steps=526)
    assert (args.save_steps, args.eval_steps, args.warmup_steps, args.save_minutes) == (5000, 0, 526, 0)
    assert lines == [
        "intervals  checkpoints every 5000 steps; validation at the end",
        "note       --warmup_steps 526 is longer than the run of 525 steps: the learning rate never reaches its peak",
        "note       --save_steps 5000 is longer than the run of 525 steps: no checkpoint before the end"]
    args, lines = settled(525, save_steps=0, eval_steps=5000, save_minutes=10, validates=False)
    assert lines == ["intervals  checkpoints at the end and when the last one is 10 minutes old"]
    assert len(settled(525, eval_steps=5000)[1]) == 2


def test_a_trainer_with_defaults_of_its_own():
    args, _ = settled(10_000, own={"save_steps": 2000, "eval_steps": 500})
    assert (args.save_steps, args.eval_steps, args.save_minutes) == (2000, 500, 30)


def test_a_resumed_run_keeps_its_intervals():
    """Another number of ranks or more epochs change the length of the run, and would change its warm-up."""
    first, _ = settled(525)
    args, _ = settled(1050, {"args": vars(first)}, eval_steps=7)
    assert (args.save_steps, args.eval_steps, args.warmup_steps) == (52, 7, 26)


def test_of_equal_losses_the_better_tie_is_best():
    """As while no answer is right yet: else a checkpoint from before training stayed the best one."""
    state, found = argparse.Namespace(best_loss=None, best_tie=0.0, step=0), []
    for state.step, values in enumerate([(1, 7.2), (1, 2.3), (1, 2.3), (0.9, 5), (0.9, math.nan), (math.nan,)]):
        found.append(run.TrainState.better(state, *values))
    assert found == [True, True, False, True, False, False] and (state.best_step, state.best_loss) == (3, 0.9)
