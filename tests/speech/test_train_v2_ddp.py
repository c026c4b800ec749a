"""Whole runs: they resume exactly, log each step once and skip bad steps. test_fsdp.py compares splits over ranks."""
import functools
import json
import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from core import checkpoint, json_files
from tests.helpers.runs import assert_same_bits, rows, steps_of, tensors
from tests.helpers.trainer import bad_token, brief, train_forked, unheard

LR = 2e-4               # a wrong gradient moves weights far beyond the tolerances below

COMMON = ("--learning_rate", LR, "--validation_split", 0.2, "--eval_steps", 4, "--num_train_epochs", 2)
# dropout makes the random state matter; a constant rate does not depend on --max_steps
DROPOUT = ("--use_lora", "--lora_dropout", 0.1, "--learning_rate", LR, "--lr_scheduler", "constant", "--disable_eval",
           "--save_steps", 0, "--num_train_epochs", 2)
SHARED = {
    "full 1x4": (1, (*COMMON, "--per_device_train_batch_size", 4, "--max_steps", 3)),
    "packs 2": (2, (*COMMON, "--use_lora", "--lora_dropout", 0, "--max_tokens_per_batch", 450, "--max_steps", 6)),
    "dropout": (1, DROPOUT),
}


@pytest.fixture(scope="module")
def tiny(tiny, tmp_path_factory):
    return brief(tiny, tmp_path_factory.mktemp("brief"))


@pytest.fixture(scope="module")
def complete(pool, tiny):
    """complete(output_dir, *flags, ranks=1) -> Run of a forked trainer."""
    return functools.partial(train_forked, pool, tiny)


@pytest.fixture(scope="module")
def shared(complete, tiny, tmp_path_factory):
    """shared(name) -> Run of SHARED[name], trained on first use; read only."""
    root, done = tmp_path_factory.mktemp("shared"), {}

    def get(name):
        if name not in done:
            ranks, flags = SHARED[name]
            done[name] = complete(root / name.replace(" ", "-"), *flags, ranks=ranks)
        return done[name]
    return get


def state_of(path):
    return json_files.read_object(path / "trainer_state" / "state.json")


@pytest.mark.slow
def test_resumed_run_equals_uninterrupted(shared, complete, tmp_path):
    """Stopped at steps 3 (in the first epoch), 6 (at its end, after 24 samples) and 8 (in the second)."""
    output_dir = tmp_path / "out"
    for step, before in ((3, None), (6, 3), (8, 6)):
        run = complete(output_dir, *DROPOUT, "--max_steps", step)
        start = f"resumed from {output_dir}/checkpoint-{before}" if before else "base model"
        assert f"start      step {before or 0}, {start}" in run.output
    assert [state_of(path)["epoch"] for _, path in checkpoint.list_checkpoints(output_dir)] == [0, 0, 1]
    resumed = complete(output_dir, *DROPOUT)
    assert [row["step"] for row in rows(resumed)] == list(range(1, 13))     # no step twice, none left out
    assert_same_bits(shared("dropout"), resumed)
    before = tensors(resumed)
    again = complete(output_dir, *DROPOUT)                                  # a finished run trains no step
    assert "already finished: raise --max_steps above 12" in again.output
    assert "already finished" not in resumed.output
    assert_same_bits(shared("dropout"), again)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(again).items())
    assert steps_of(output_dir) == [6, 8, 12]


@pytest.mark.slow
def test_resume_with_fewer_packs_a_step_finishes_every_epoch(complete, tmp_path):
    """An epoch ends in the middle of a step. After a resume with smaller steps, the next epochs are complete."""
    flags = ("--use_lora", "--disable_eval", "--per_device_train_batch_size", 8)        # 3 packs an epoch
    complete(tmp_path / "out", *flags, "--gradient_accumulation_steps", 4, "--max_steps", 1)
    resumed = complete(tmp_path / "out", *flags, "--num_train_epochs", 2)
    assert sorted(resumed.metrics("train/epoch")) == [1, 2, 3, 4]
    assert resumed.metrics("train/epoch")[4] == 2


def test_frozen_llm_trains_audio_embedding_and_head_only(shared, forked, tiny):
    run = forked(*COMMON, "--freeze_llm", "--max_steps", 3, "--num_workers", 0, "--text_loss_weight", 0.5)
    base, trained = load_file(tiny.model / "model.safetensors"), tensors(run)
    assert {name for name in base if not torch.equal(base[name], trained[name])} == {
        "model.embed_audio_tokens.embed_audio_tokens.weight", "audio_lm_head.weight"}
    # step 1 has the weights and samples of "full 1x4"
    mean = {name: shared("full 1x4").metrics(f"train/{name}")[1] for name in ("audio_loss", "text_loss")}
    assert run.metrics("train/loss")[1] == pytest.approx(mean["audio_loss"] + 0.5 * mean["text_loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["full 1x4", "packs 2"])
def test_losses_in_the_log_add_up(shared, name):
    lines = [row for row in rows(shared(name)) if "train/loss" in row]
    for row in lines:
        books = [row[f"train/audio_loss_codebook_{k}"] for k in range(8)]
        assert "train/audio_loss_codebook_8" not in row
        assert row["train/audio_loss"] == pytest.approx(np.mean(books), rel=1e-9)
        assert row["train/loss"] == pytest.approx(row["train/audio_loss"] + row["train/text_loss"], rel=1e-9)
        assert 0 < row["train/eos_loss"] and 0 <= row["train/eos_accuracy"] <= 1
        assert 0 <= row["train/stop_recall"] <= 1 and 0 <= row["train/false_stop_rate"] <= 1
    shown = [f"{100 * row['train/stop_recall']:.1f}" for row in lines]
    assert re.findall(r"^step .* \| stop +(\S+)% \|", shared(name).output, re.M) == shown
    assert name != "packs 2" or max(row["train/epoch"] for row in lines) > 1      # also after the first epoch
    assert lines[0]["train/audio_loss"] == pytest.approx(math.log(1026), abs=0.5)      # a random model guesses


@pytest.fixture(scope="module")
def poisoned(tiny):
    """(flags for six samples with "~" in number 4, options for a run whose embedding of "~" is NaN)."""
    samples, data = tiny.samples()[:6], tiny.root / "poisoned.json"
    samples[4]["messages"][-1]["content"][0]["text"] += " ~"
    samples[4]["messages"][1]["content"][-1]["text"] += " ~"
    data.write_text(json.dumps(samples))
    return ("--train_data_file", data, "--disable_eval", "--per_device_train_batch_size", 1,
            "--num_train_epochs", 2), bad_token(tiny.model)


def test_bad_step_is_skipped_and_the_sample_named(poisoned, forked):
    flags, options = poisoned
    run = forked(*flags, **options)
    skipped = dict(re.findall(
        r"^step (\d+): gradient norm is not finite, step skipped .*?with a non-finite loss: (.*)$", run.output, re.M))
    assert len(skipped) == 2 and all(re.search(r"^[^;]*poisoned.json sample 5 \(sample_00000004\)$", name)
                                     for name in skipped.values())      # once in each epoch
    assert "2 steps skipped" in run.output and run.metrics("train/bad_steps")[12] == 2
    state = load_file(run.output_dir / "checkpoint-12" / "trainer_state" / "optimizer.safetensors")
    assert {int(tensor) for name, tensor in state.items() if name.endswith(".step")} == {10}
    assert all(torch.isfinite(tensor).all() for tensor in tensors(run).values())
    assert "NaN" not in (run.output_dir / "metrics.jsonl").read_text()      # it is not JSON
    losses = run.metrics("train/loss")
    assert all(0 < losses[step] < 100 for step in range(1, 13) if str(step) not in skipped)
    # a skipped step logs no loss: 0 would reduce the mean
    assert all(value is None or value > 1 for value in losses.values())


def test_validation_without_a_number_is_never_the_best(poisoned, forked, tiny):
    """NaN as the best loss would stay, since no loss is smaller."""
    flags, options = poisoned
    held_out = tiny.root / "eval.json"
    held_out.write_text(json.dumps(unheard(json.loads(flags[1].read_text()))))
    run = forked("--eval_data_file", held_out, "--use_lora", "--max_steps", 2, "--eval_steps", 1, "--save_steps", 1,
                 **options)
    assert list(run.metrics("eval/loss").values()) == [None, None]
    state = state_of(run.output_dir / "checkpoint-2")
    assert state["best_step"] is None and state["best_loss"] is None


@pytest.mark.slow
def test_weights_without_a_number_are_never_saved(forked):
    """The gradient is finite, the update is not: the run ends and writes no new checkpoint."""
    flags = ("--use_lora", "--save_steps", 1, "--save_total_limit", 2, "--warmup_steps", 2)
    good = forked(*flags, "--max_steps", 1)
    assert good.status == 0 and steps_of(good.output_dir) == [1]
    run = forked(*flags, "--max_steps", 6, "--learning_rate", 1e38, ok=False)
    assert run.status != 0 and steps_of(run.output_dir) == [1], run.output
    errors = re.findall("^error: .*", run.output, re.M)
    assert len(errors) == 1 and re.search(r"checkpoint-\d could not be written .*adapter_model.safetensors: \d+ of its "
                                          r"tensors hold NaN or infinity, first base_model", errors[0]), run.output
