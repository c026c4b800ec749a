"""The growth benchmark: its line finds what is not linear, all steps train, a real run's checkpoints are timed."""
import argparse
import functools
import json

import pytest
import torch

from bench import growth


def test_the_line_finds_what_is_not_linear():
    sizes = growth.TIMES
    a, b, off = growth.line(sizes, [0.5 + 0.25 * n for n in sizes])
    assert (a, b) == pytest.approx((0.5, 0.25)) and max(map(abs, off)) < 1e-9
    _, _, off = growth.line(sizes, [0.5 + 0.25 * n * (1.2 if n == 16 else 1) for n in sizes])
    assert max(map(abs, off)) > 0.05
    _, _, off = growth.line(sizes, [0.5 + 0.25 * n + 0.02 * n * n for n in sizes])
    assert max(map(abs, off)) > 0.05


@pytest.mark.slow
def test_small_sizes_are_timed_as_many_steps_in_a_row(monkeypatch):
    """By a clock of the test's own: a busy machine would lengthen any other."""
    each, clock, calls = 2**-7, [0.0], {1: 0, 10: 0}
    monkeypatch.setattr(growth, "LEAST_S", 5 * each)
    monkeypatch.setattr(growth.measure, "time", argparse.Namespace(perf_counter=lambda: clock[0]))

    def step(size):
        calls[size] += 1
        clock[0] += each * size
    rows, fit = growth.grow("sleep", {n: functools.partial(step, n) for n in calls}, 100,
                            argparse.Namespace(rounds=3), torch.device("cpu"))
    assert calls == {1: 3 + 3 * 5, 10: 3 + 3}       # two to warm up, one to see how long it takes, three rounds
    assert [row[1:3] for row in rows] == [[100, each], [1000, 10 * each]]
    assert fit["seconds_each"] == pytest.approx(each / 100) and fit["most_off"] < 1e-9


@pytest.mark.parametrize("name", growth.TRAINERS)
def test_every_step_trains_its_weights(name, monkeypatch):
    made, real = [], growth.train_step
    monkeypatch.setattr(growth, "train_step", lambda *args: made.append(args) or real(*args))
    for documents in 1, 3:
        torch.manual_seed(0)
        step = growth.TRAINERS[name](torch.device("cpu"), 32, 2, documents)
        _, parameters, _, loss = made[-1]
        before, first = {n: p.detach().clone() for n, p in parameters}, loss().item()
        for _ in range(3):
            step()
        assert loss().item() < first
        assert not [n for n, p in parameters if torch.equal(p, before[n])]
    assert len(made) == 2


@pytest.mark.slow
def test_the_report_holds_every_size_and_a_real_runs_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(growth, "TIMES", (4, 16))
    monkeypatch.setattr(growth, "LAYERS", (4, 8))
    monkeypatch.setattr(growth, "LEAST_S", 0.01)
    monkeypatch.setattr(growth.dit, "HEAD_ROWS", growth.dit.HEAD_ROWS)      # main sets it
    growth.main(["--tokens", "128", "--rounds", "1", "--hidden_size", "32", "--steps", "5", "--save_steps", "2",
                 "--checkpoint_size", "64", "--work_dir", str(tmp_path), "--results_dir", str(tmp_path)])
    report = json.loads((tmp_path / "growth-cpu.json").read_text())
    assert str(tmp_path) not in json.dumps(report) and report["command"] == "python bench/growth.py --tokens 128 " \
        "--rounds 1 --hidden_size 32 --steps 5 --save_steps 2 --checkpoint_size 64"
    tables = report["tables"]
    assert [row[:2] for row in tables["tokens"]["rows"]] == [[name, 128 * n] for name in growth.TRAINERS
                                                            for n in (4, 16)]
    assert [row[:2] for row in tables["layers"]["rows"]] == [[name, n] for name in growth.TRAINERS for n in (4, 8)]
    for _, size, seconds, each, _ in [*tables["tokens"]["rows"], *tables["layers"]["rows"]]:
        assert each * size == pytest.approx(1e3 * seconds) and seconds > 0
    found = {row[0]: row[1] for row in tables["checkpoints"]["rows"]}
    assert found["saves in the run"] == 2 and found["checkpoint, MB"] > 3 * 4 * 0.1     # weights and two moments
    stopped = found["stopped a save, seconds"]
    assert 0 < stopped <= found["longest of them"]
    assert found["stopped, % of that interval"] == pytest.approx(
        100 * stopped / found["save interval of 500 steps, seconds"])
