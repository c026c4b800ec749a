"""The block-diffusion benchmark: both steps and every lever compute the same, its numbers follow from each other, its
problems are like GSM8K's, its checks fail."""
import functools
import importlib.util
import json
import math
import sys

import numpy as np
import pytest
import torch

from bench import measure
from diffusion import blocks, dit
from tests.helpers.trainer import ROOT

TINY = ("--size", "nano", "--length", "64", "--problems", "2", "--batches", "2,4", "--repeats", "1")


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_block_diffusion", ROOT / "bench" / "block_diffusion.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dit.Layer, "compile", lambda *_, **__: None)      # these two take longer than all else here
    monkeypatch.setattr(measure, "matmul_rate", lambda *_: 1e10)


@pytest.fixture(scope="module")
def few(bench):
    """World, flags, problems of several rows when packed."""
    args = bench.argparse.Namespace(size="nano", seed=42, micro_steps=2, plain_micro_steps=2)
    return bench.distributed.World(device=torch.device("cpu")), args, bench.make_documents(6, 64, 42), list(range(6))


@pytest.mark.slow
def test_the_straightforward_step_and_every_lever_compute_the_same(bench, few):
    """Loss and gradient norm of two steps, so the updates of the weights are compared, too."""
    def losses(step):
        return torch.tensor([list(map(float, step(number))) for number in range(2)])
    expected = losses(bench.plain_step(*few, stirred=True))
    assert (expected[1] - expected[0]).abs().min() > 0.01
    torch.testing.assert_close(losses(bench.plain_step(*few, noisy_logits_only=True, stirred=True)), expected)
    for change in ({}, {"pack": False}, {"forward": bench.head_on_all}, {"forward": bench.one_attention},
                   {"fused": False}, {"averaged": False}):
        found = losses(bench.our_step(*few, "sdpa", stirred=True, **change))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_both_average_the_weights_alike(bench, few, monkeypatch):
    averages, steps = [], sys.modules["bench.block_steps"]
    real = steps.build
    monkeypatch.setattr(steps, "build", lambda *args: averages.append(real(*args)) or averages[-1])
    for make in bench.plain_step, lambda *rest, **more: bench.our_step(*rest, "sdpa", **more):
        step = make(*few, stirred=True)
        for number in range(2):
            step(number)
    (_, _, plain), (_, _, ours) = averages
    for name, average in ours.shadow.items():
        difference = (average - plain.shadow[name]).abs()   # AdamW moves by 5e-4, by a part of it where all is rounding
        assert difference.mean() < 1e-7 and difference.max() < 2e-4, name


def test_nothing_is_measured_when_the_steps_disagree(bench, on_cpu, tmp_path, monkeypatch):
    plain = sys.modules["bench.plain_block_diffusion"]
    real = plain.dense_mask
    monkeypatch.setattr(plain, "dense_mask", lambda length, size, device: real(length, 2 * size, device))
    with pytest.raises(SystemExit, match="DISAGREE"):
        bench.main([*TINY, "--results_dir", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_numbers_of_the_tiny_form_follow_from_each_other(bench, on_cpu, tmp_path):
    bench.main([*TINY, f"--results_dir={tmp_path}"])
    report = json.loads((tmp_path / "block_diffusion-cpu.json").read_text())
    assert report["command"] == " ".join(["python bench/block_diffusion.py", *TINY])
    tokens = bench.make_documents(32, 64, 42).tokens[:2].sum()
    steps = report["tables"]["steps"]["rows"]
    assert steps[0][-1] == 1 and len(steps) == 3
    for _, median, least, most, per_second, problems, _ in steps:
        assert 0 < least <= median <= most
        assert per_second * median == pytest.approx(tokens) and problems * median == pytest.approx(2)
    assert report["tables"]["levers"]["rows"][0][2] == 1 and len(report["tables"]["levers"]["rows"]) == 7
    assert all(row[1] > 0 for row in report["tables"]["preparation"]["rows"])
    assert len(report["tables"]["settings"]["rows"]) == 3
    results = report["results"]
    assert [(r["micro_batch"], r["attention"], r["packed"]) for r in results] == \
        [(2, "sdpa", True), (4, "sdpa", True), (2, "sdpa", False)]
    lengths = bench.make_documents(32, 64, 42).tokens
    for r in results:
        assert r["problems_per_step"] == r["micro_batch"] * 4
        assert r["tokens_per_step"] == lengths[:r["micro_batch"] * 8].sum() / 2
        assert r["tokens_per_second"] * r["step_seconds"] == pytest.approx(r["tokens_per_step"])
        assert r["problems_per_second"] * r["step_seconds"] == pytest.approx(r["problems_per_step"])
        assert r["projected_hours"] * 3600 == pytest.approx(r["step_seconds"] * 50_000 * 512 / r["problems_per_step"])
        assert r["of_matmul_rate"] * report["matmul_flops_per_second"] * r["step_seconds"] == \
            pytest.approx(r["flops_per_step"])
        low, high = r["step_seconds_range"]
        assert 0 < low <= r["step_seconds"] <= high < r["seconds_to_first_result"] + high
        assert r["mfu"] is None and 0 < r["of_matmul_rate"]
    packed, _, padded = results         # the same problems, so the same useful work, in fewer rows
    assert padded["tokens_per_step"] == packed["tokens_per_step"]
    assert padded["flops_per_step"] == packed["flops_per_step"]
    assert padded["rows_per_micro_step"] == 2 and padded["padding"] > packed["padding"] >= 0
    assert padded["padding"] == pytest.approx(1 - padded["tokens_per_step"] / (8 * 64))


@pytest.mark.slow
def test_out_of_memory_and_out_of_time_are_recorded(bench, on_cpu, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError
    for name in "compare", "levers", "host_costs":
        monkeypatch.setattr(bench, name, lambda *_: None)
    monkeypatch.setattr(bench, "measure_setting", full)
    for flags, error in ((), "out of memory"), (("--minutes", "0"), "not run: out of time"):
        bench.main([*TINY, *flags, "--results_dir", str(tmp_path)])
        results = json.loads((tmp_path / "block_diffusion-cpu.json").read_text())["results"]
        assert [(r["micro_batch"], r["error"]) for r in results] == [(2, error), (4, error), (2, error)]


def test_a_step_without_memory_is_left_out_and_the_others_take_their_turns(bench, monkeypatch):
    monkeypatch.setattr(bench.gc, "collect", lambda: 0)      # takes longer than all else
    told, args = [], bench.argparse.Namespace(repeats=2)

    def full(when, number):
        if number == when:
            raise torch.OutOfMemoryError
        return functools.partial(full, when)
    for when in "made", 1:
        makes = {"ours": lambda: lambda number: None, "big": functools.partial(full, when, "made")}
        seconds = bench.in_turns(makes, args, torch.device("cpu"), told.append)
        assert seconds["big"] == [] and len(seconds["ours"]) == 2 and len(told.pop()["ours"]) == 2
        assert bench.median_and_ratio(seconds["big"], seconds["ours"]) == (None, "out of memory")


def test_problems_have_gsm8ks_lengths_and_fill_rows_alike(bench):
    documents = bench.make_documents(7473, 512, 0)
    tokens = documents.tokens
    assert tokens.mean() == pytest.approx(157, rel=0.02) and 315 < np.percentile(tokens, 99) < 335
    assert 40 <= tokens.min() and tokens.max() <= 440
    answers = documents.per_document(documents.region == blocks.PLAN)
    assert answers.sum() / tokens.sum() == pytest.approx(0.6, abs=0.01)
    rows = blocks.make_rows(documents, np.arange(7473), 512, True)
    assert len(rows) == pytest.approx(2520, rel=0.03) and rows.noisy_length == 384     # GSM8K's own, see README


@pytest.mark.parametrize("other", [(2.01, 3.0), (2.0, 3.1), (math.nan, 3.0), (2.0, math.nan)])
def test_disagreement_is_an_error_that_names_both(bench, other):
    bench.check_agreement({"sdpa": (2.0, 3.0), "flex": (2.0002, 3.003)})
    with pytest.raises(SystemExit, match=r"DISAGREE(.|\n)*flex, compiled: loss .*sdpa: 2\.0, 3\.0"):
        bench.check_agreement({"sdpa": (2.0, 3.0), "flex": (2.0, 3.0), "flex, compiled": other})


def test_the_checked_batch_notices_a_wrong_mask(bench, monkeypatch):
    world = bench.distributed.World(device=torch.device("cpu"))
    args, documents = bench.argparse.Namespace(size="nano", seed=42), bench.make_documents(16, 128, 42)
    right, attends = bench.loss_and_norm(world, args, documents, "sdpa", False), bench.dit.attends
    monkeypatch.setattr(bench.dit, "attends", lambda doc, *more: attends(doc.clip(max=0), *more))
    with pytest.raises(SystemExit, match="DISAGREE"):
        bench.check_agreement({"right": right, "one document": bench.loss_and_norm(world, args, documents, "sdpa",
                                                                                   False)})
