"""Whole block diffusion runs: splits, resuming, exact bounds, early stops, bad flags."""
import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file

from core import checkpoint
from core.cli import UserError
from diffusion import dit, make_problems
from tests.helpers.block_runs import SCRIPT, train_bd3lm
from tests.helpers.runs import CLOCK, CUTS, newest, rows, steps_of
from tests.helpers.scripts import ASKED_AT
from tests.helpers.trainer import RUN_SCRIPT, Run

LR = 2e-3
COMMON = {"model_size": "nano", "dropout": 0, "block_size": 8, "max_length": 96, "max_steps": 4, "learning_rate": LR,
          "warmup_steps": 2, "logging_steps": 1, "eval_steps": 2, "eval_repeats": 2, "per_device_eval_batch_size": 3,
          "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_workers": 0, "ema_decay": 0.7,
          "save_total_limit": 0, "report_to": "none"}
HDP = "--system hdp --question_budget 48 --plan_budget 32 --execution_budget 64"
SEARCH = "--clip_search_widths 0.5"
SPLITS = "ddp 1x4", "ddp 2x2 --num_workers 1", "fsdp 2x1x2 --gradient_checkpointing"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Folder with the tokenizer, 24 training and 8 test problems for both systems."""
    folder = tmp_path_factory.mktemp("demo")
    make_problems.write_demo(folder, 24, 8)
    return folder


def arguments(demo, output_dir, *flags):
    """The command line of a run; flags override COMMON."""
    flags = [str(flag) for flag in flags]
    ending = "_hdp.json" if "hdp" in flags else ".jsonl"
    common = [str(word) for name, value in COMMON.items() for word in (f"--{name}", value)]
    data = [] if "--demo" in flags else ["--train_data_file", str(demo / f"train{ending}"), "--tokenizer",
                                         str(demo), "--eval_data_file", str(demo / f"test{ending}")]
    return [*common, *data, "--output_dir", str(output_dir), "--logging_dir", str(output_dir) + "-logs", *flags]


def complete(pool, demo, output_dir, *flags, ranks=1):
    """Train to the end; returns the Run."""
    statuses, output = pool.run(ranks, RUN_SCRIPT, SCRIPT, arguments(demo, output_dir, *flags))
    assert not any(statuses), output
    return Run(0, output, output_dir)


@pytest.fixture(scope="module")
def shared(pool, demo, tmp_path_factory):
    """shared("mode ranks x rows x micro-steps flags") -> the Run, trained on first use. Read only."""
    root, done = tmp_path_factory.mktemp("shared"), {}

    def get(name):
        if name not in done:
            mode, split, *flags = name.split()
            ranks, rows, *micro_steps = split.split("x")
            flags += ["--parallel", mode, "--per_device_train_batch_size", rows]
            done[name] = complete(pool, demo, root / str(len(done)), "--gradient_accumulation_steps",
                                  *(micro_steps or [1]), *flags, ranks=int(ranks))
        return done[name]
    return get


def training(run):
    return [row for row in rows(run) if "train/loss" in row]


def states(folder):
    """{(stem, name): tensor} of a checkpoint's weights, averages and moments."""
    return {(stem, name): tensor for stem in ("model", "ema", f"{checkpoint.STATE}/optimizer")
            for file in folder.glob(f"{stem}*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_training(a, b, without=CLOCK):
    """Metrics, weights, averages and moments are equal up to rounding."""
    for x, y in zip(rows(a, without=without), rows(b, without=without), strict=True):
        assert x.keys() == y.keys()
        assert x == pytest.approx(y, rel=2e-4, abs=1e-6)
    expected, actual = states(newest(a)), states(newest(b))
    assert expected.keys() == actual.keys() and len(expected) > 100
    for (stem, name), tensor in expected.items():
        unit = LR if "optimizer" not in stem else tensor.abs().max().item() + 1e-9
        difference = (tensor - actual[stem, name]).abs()     # Adam turns rounding of tiny gradients into steps
        assert difference.mean() < 0.01 * unit and difference.max() < 0.5 * unit, (stem, name)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS[1:])
def test_any_split_trains_the_same(shared, split):
    reference = shared(f"{SPLITS[0]} {SEARCH}")
    assert len({row["train/t_low"] for row in training(reference)}) == 2      # the search had an effect
    assert_same_training(reference, shared(f"{split} {SEARCH}"), CLOCK | CUTS)


@pytest.mark.slow
def test_the_hierarchy_trains_the_same_on_two_ranks(shared):
    flags = f"{HDP} --plan_block_size 4 --execution_block_size 16"
    assert_same_training(shared(f"ddp 1x4 {flags}"), shared(f"fsdp 2x2 {flags}"), CLOCK | CUTS)


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_ranks(pool, demo, shared, tmp_path):
    output = tmp_path / "moved"
    complete(pool, demo, output, "--max_steps", 2, *SEARCH.split(), "--per_device_train_batch_size", 2, "--parallel",
             "fsdp", ranks=2)
    moved = complete(pool, demo, output, "--max_steps", 4, *SEARCH.split(), "--per_device_train_batch_size", 2,
                     "--gradient_accumulation_steps", 2)
    assert f"resumed from {output}/checkpoint-2" in moved.output
    assert_same_training(shared(f"{SPLITS[0]} {SEARCH}"), Run(0, "", output), CLOCK | CUTS)


@pytest.mark.slow
@pytest.mark.race
def test_a_stop_during_a_validation_changes_nothing(pool, demo, shared, tmp_path):
    whole = shared(f"fsdp 1x4 --dropout 0.2 {SEARCH} --max_steps 6")
    output = tmp_path / "out"
    flags = arguments(demo, output, "--dropout", 0.2, *SEARCH.split(), "--max_steps", 6, "--parallel", "fsdp")
    step_taken, validation = ("core.optim", "take_step"), ("diffusion.elbo", "bound")
    for call, number, step in ((step_taken, 1, 2), (validation, 1, 2), (validation, 3, 6)):
        statuses, printed = pool.run(1, ASKED_AT, SCRIPT, flags, *call, number)
        assert statuses == [0], printed
        assert f"at step {step} of 6; checkpoint saved; rerun the same command to resume" in printed, printed
        assert "SIGTERM" in (output / "requeue").read_text()
    statuses, printed = pool.run(1, RUN_SCRIPT, SCRIPT, flags)
    assert statuses == [0] and "done       step 6" in printed and not (output / "requeue").exists(), printed
    resumed = Run(0, printed, output)
    assert rows(resumed) == rows(whole)
    keys = ("best_step", "best", "stale", "t_range", "eval_due")
    metas = [json.loads((newest(run) / checkpoint.STATE / "state.json").read_text()) for run in (whole, resumed)]
    assert [metas[0][key] for key in keys] == [metas[1][key] for key in keys] and not metas[0]["eval_due"]
    expected, actual = states(newest(whole)), states(newest(resumed))
    assert expected.keys() == actual.keys() and all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.parametrize("flags", ["--bf16 --strip_calculator --block_size 96 --no-pack",
                                   f"{HDP} --loss_on_question --loss_weighting ce --t_range 0.3 0.8"])
def test_the_first_loss_of_every_mode_is_that_of_guessing(shared, flags):
    run = shared(f"ddp 1x4 --max_steps 2 --eval_steps 0 {flags}")
    first, second = training(run)
    guess = math.log(json.loads((newest(run) / "config.json").read_text())["model"]["vocab_size"] - 1)
    assert first["train/masked_loss"] == pytest.approx(guess, rel=1e-3 if "bf16" in flags else 1e-6)
    assert 0.2 < first["train/masked"] < 0.8 and math.isfinite(second["train/loss"])
    if "ce" in flags:
        assert first["train/loss"] == pytest.approx(guess * first["train/masked"])


@pytest.mark.slow
def test_validation_restores_the_raw_weights(shared):
    """No better bound saves a checkpoint here; a save would hide the fault."""
    runs = [shared(f"fsdp 1x4 --learning_rate 0.05 --warmup_steps 0 --eval_steps {steps} --eval_repeats 1")
            for steps in (1, 0)]        # the second one validates at its end alone
    bounds = [row["eval/nll"] for row in rows(runs[0]) if "eval/nll" in row]
    assert bounds[2] > min(bounds[:2])
    for seen, unseen in zip(*map(training, runs), strict=True):
        assert seen["train/loss"] == pytest.approx(unseen["train/loss"], rel=1e-3)


@pytest.mark.slow
def test_the_bound_is_unbiased_within_its_error(shared):
    run = shared(f"ddp 1x4 {HDP} --max_steps 1 --learning_rate 0 --eval_repeats 100")
    values, folder = rows(run)[-1], newest(run)
    guess = math.log(json.loads((folder / "config.json").read_text())["model"]["vocab_size"] - 1)
    share = values["eval/nll"] / values["eval/loss"]        # targets to text tokens
    assert abs(values["eval/nll"] - guess * share) < 4 * values["eval/stderr"] < 0.3 * guess
    assert abs(values["eval/loss"] / guess - 1) < 0.07


@pytest.mark.slow
def test_early_stop_ends_the_run_and_a_rerun_does_nothing(pool, demo, tmp_path):
    flags = ("--learning_rate", 0, "--max_steps", 50, "--eval_steps", 1, "--early_stop_patience", 2)
    for _ in range(2):
        run = complete(pool, demo, tmp_path / "out", *flags, ranks=2)
        assert "done       step 3; no better bound in 2 validations; 0 steps skipped; best at step 1" in run.output
        assert steps_of(run.output_dir) == [1, 3] and len(rows(run)) == 6


def poisoned(arguments, call):
    """Train; forward pass number `call` returns NaN losses."""
    forward, calls = dit.DiT.forward, []

    def poison(self, inputs):
        calls.append(1)
        return forward(self, inputs) * (math.nan if len(calls) == call else 1)
    dit.DiT.forward = poison
    train_bd3lm.main(arguments)


def test_one_bad_step_is_skipped_and_reported(pool, demo, tmp_path):
    flags = arguments(demo, tmp_path / "out", "--eval_steps", 0, "--validation_split", 0, "--save_steps", 1)
    statuses, output = pool.run(1, f"{__name__}.poisoned", flags, 2)
    run = Run(0, output, tmp_path / "out")
    assert statuses == [0] and "done       step 4; 1 step skipped" in output, output
    assert re.search(r"step 2: gradient norm is not finite, step skipped .*train.jsonl line \d+", output)
    losses = [row["train/loss"] for row in training(run)]
    assert losses[1] is None and all(math.isfinite(loss) for loss in losses[:1] + losses[2:])
    first, second, third = (states(run.output_dir / f"checkpoint-{step}") for step in (1, 2, 3))
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    assert not all(torch.equal(tensor, third[key]) for key, tensor in first.items())
    assert json.loads((newest(run) / checkpoint.STATE / "state.json").read_text())["averaged"] == 3


BAD = {
    "--demo 8": "give one of --train_data_file and --demo, which",
    "--block_size 4 --t_range 0.3 0.45": "no number of masked tokens out of 4",
    "--end_token </s> --chat": "--end_token needs --system gsm8k, and no --chat",
    "--plan_block_size 4": "--plan_block_size and --execution_block_size need --system hdp",
    f"{HDP} --plan_block_size 5": "--plan_budget 32 is not a multiple of --plan_block_size 5",
    f"--seed {2**62}": f"--seed is {2**62}; it must be below 2**62",
    "--ema_decay 1": "--ema_decay is 1.0; it must be at least 0 and below 1",
    "--clip_search_widths 1.2": "--clip_search_widths is 1.2; it must lie between 0 and 1"}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_are_refused_by_name(demo, flags):
    words = [*arguments(demo, "out", *flags.split()), *(["--train_data_file", "x"] if "--demo" in flags else [])]
    with pytest.raises(UserError, match=re.escape(BAD[flags])):
        train_bd3lm.check_flags(train_bd3lm.build_parser().parse_args(words), 1)


@pytest.mark.parametrize("flags,expected", [
    ("--row_length 104", "was made with another batch"), ("--attn_backend flex", "trains on CUDA only"),
    ("--row_length 40", "--row_length 40"),
    ("--block_size 4 --seed 1", "was made with another block_size (8, this run 4)")])
def test_resuming_with_other_flags_is_refused(demo, shared, flags, expected):
    output = shared(f"{SPLITS[0]} {SEARCH}").output_dir
    with pytest.raises(UserError, match=re.escape(expected)):
        train_bd3lm.main(arguments(demo, output, *flags.split(), *SEARCH.split(), "--max_steps", 8))
    assert steps_of(output)[-1] == 4
