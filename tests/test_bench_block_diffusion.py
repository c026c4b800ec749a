"""The block-diffusion benchmark: its numbers follow from each other, its problems are like GSM8K's, its check fails."""
import importlib.util
import json
import math

import numpy as np
import pytest
import torch
from conftest import ROOT

import gsm8k

pytestmark = pytest.mark.timeout(120)
TINY = ("--size", "nano", "--length", "64", "--batches", "2,4", "--repeats", "2")


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_block_diffusion", ROOT / "bench" / "block_diffusion.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_numbers_of_the_tiny_form_follow_from_each_other(bench, on_cpu, tmp_path):
    bench.main([*TINY, "--results_dir", str(tmp_path)])
    report = json.loads((tmp_path / "block_diffusion-cpu.json").read_text())
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


def test_out_of_memory_and_out_of_time_are_recorded(bench, on_cpu, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError
    monkeypatch.setattr(bench, "measure", full)
    for flags, error in ((), "out of memory"), (("--minutes", "0"), "not run: out of time"):
        bench.main([*TINY, *flags, "--results_dir", str(tmp_path)])
        results = json.loads((tmp_path / "block_diffusion-cpu.json").read_text())["results"]
        assert [(r["micro_batch"], r["error"]) for r in results] == [(2, error), (4, error), (2, error)]


def test_problems_have_gsm8ks_lengths_and_fill_rows_alike(bench):
    documents = bench.make_documents(7473, 512, 0)
    tokens = documents.tokens
    assert tokens.mean() == pytest.approx(157, rel=0.02) and 315 < np.percentile(tokens, 99) < 335
    assert 40 <= tokens.min() and tokens.max() <= 440
    answers = documents.per_document(documents.region == gsm8k.PLAN)
    assert answers.sum() / tokens.sum() == pytest.approx(0.6, abs=0.01)
    rows = gsm8k.make_rows(documents, np.arange(7473), 512, True)
    assert len(rows) == pytest.approx(2520, rel=0.03) and rows.noisy_length == 384     # GSM8K's own, see README


@pytest.mark.parametrize("other", [(2.01, 3.0), (2.0, 3.1), (math.nan, 3.0), (2.0, math.nan)])
def test_disagreement_is_an_error_that_names_both(bench, other):
    bench.check_agreement({"sdpa": (2.0, 3.0), "flex": (2.0002, 3.003)})
    with pytest.raises(SystemExit, match=r"DISAGREE(.|\n)*flex, compiled: loss .*sdpa: 2\.0, 3\.0"):
        bench.check_agreement({"sdpa": (2.0, 3.0), "flex": (2.0, 3.0), "flex, compiled": other})


def test_the_checked_batch_notices_a_wrong_mask(bench, monkeypatch):
    world = bench.parallel.World(device=torch.device("cpu"))
    args, documents = bench.argparse.Namespace(size="nano", seed=42), bench.make_documents(16, 128, 42)
    right, attends = bench.loss_and_norm(world, args, documents, "sdpa", False), bench.dit.attends
    monkeypatch.setattr(bench.dit, "attends", lambda doc, block, n: attends(doc.clip(max=0), block, n))
    with pytest.raises(SystemExit, match="DISAGREE"):
        bench.check_agreement({"right": right, "one document": bench.loss_and_norm(world, args, documents, "sdpa",
                                                                                   False)})


def test_without_a_gpu_the_real_form_is_one_line(bench, on_cpu):
    with pytest.raises(SystemExit, match=r"^error: no GPU here; .*--size nano --length 64 --batches 2,4 --repeats 2$"):
        bench.main([])
