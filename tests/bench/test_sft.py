"""The SFT benchmark: tokens that it counts are those of the samples, its numbers follow, and other losses stop it."""
import functools
import importlib.util
import json

import numpy as np
import pytest

from tests.helpers.trainer import ROOT

SEED, STEPS = 3, 3         # of this seed, the four samples of the check have more tokens than a pack of a step


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_sft", ROOT / "bench" / "sft.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiny(bench, monkeypatch):
    """Sets of 12 samples, three steps each."""
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench.measure, "matmul_rate", functools.partial(bench.measure.matmul_rate, size=128))
    mix = bench.MIXES["cpu"]["short"].__class__(20, 0.6, 8, 60, 0, 2, 2, STEPS)
    monkeypatch.setitem(bench.MIXES["cpu"], "short", mix)
    monkeypatch.delitem(bench.COMPARE, "SFTTrainer, padding_free")
    for name in [name for name in bench.LEVERS if name != "logits of all positions"]:
        monkeypatch.delitem(bench.LEVERS, name)         # the others take minutes
        monkeypatch.delitem(bench.LEVER_WAYS, name)
    return mix


def run(bench, tmp_path, *flags):
    bench.main(["--shape", "tiny", "--rounds", "2", "--seed", str(SEED), "--results_dir", str(tmp_path), *flags])
    return json.loads(next(tmp_path.glob("*.json")).read_text())


@pytest.mark.slow
def test_ways_train_on_the_same_tokens_and_numbers_follow(bench, tiny, tmp_path, monkeypatch):
    from bench import sft_ways
    sizes = sft_ways.set_sizes(tiny, 2, bench.torch.device("cpu"))
    assert sizes == [4, 12, 12]
    sft_ways.make_table(tmp_path / "table", tiny, sizes, 512, SEED)
    lengths, trained = (np.load(tmp_path / "table" / f"{name}.npy") for name in ("lengths", "trained"))
    sample, bounds = np.repeat(np.arange(28), lengths), (slice(4, 16), slice(16, 28))
    sets = [(lengths[b], trained[(sample >= b.start) & (sample < b.stop)].sum()) for b in bounds]
    assert abs(sets[0][0].sum() - sets[1][0].sum()) < 0.1 * sets[0][0].sum()
    monkeypatch.setitem(bench.COMPARE, "broken", ("ours", {"packed": 8}))
    with pytest.raises(SystemExit, match=r"^error: failed: full, short, broken: ValueError: sample \d+ has"):
        run(bench, tmp_path, "--parts", "short,levers")
    report = json.loads((tmp_path / "sft_tiny_short_levers-cpu.json").read_text())
    table = report["tables"]["full, short"]
    names = [row[0] for row in table["rows"]]
    assert names == list(bench.COMPARE)
    ways, times = report["runs"]["full, short"]["ways"], {}
    for name, *row in table["rows"]:
        if sft_ways.trl is None and name.startswith("SFT"):
            assert row[-1] == "not installed"
            continue
        if name == "broken":
            assert row[-1].startswith("ValueError: sample ") and row[:-1] == [None] * 7
            continue
        values = dict(zip(table["columns"][1:], row))
        turns = ways[name]["turns"]
        assert len(turns) == 2
        for turn, (own, targets) in zip(turns, sets):
            assert turn["steps"] == (2 if name == "ours, packed" else STEPS)       # two packs hold them all
            assert turn["samples"] == 12 and turn["tokens"] == own.sum()
            assert turn["targets"] == targets and turn["pairs"] == sum(n * (n + 1) // 2 for n in own)
        slots = sum(turn["slots"] for turn in turns)
        seconds, tokens = (sum(turn[key] for turn in turns) for key in ("seconds", "tokens"))
        assert values["tokens/s"] == pytest.approx(tokens / seconds)
        assert values["padding %"] == pytest.approx(100 * (1 - tokens / slots))
        steps = sum(turn["steps"] for turn in turns)
        assert values["trained tokens/step"] * steps == pytest.approx(sets[0][1] + sets[1][1])
        times[name] = [turn["seconds"] / turn["tokens"] for turn in turns]
        assert values["ours is faster by"] == pytest.approx(np.median(np.divide(times[name], times["ours"])))
    rows = {row[0]: dict(zip(table["columns"][1:], row[1:])) for row in table["rows"]}
    assert rows["ours"]["padding %"] == rows["Trainer, no padding"]["padding %"] == 0 < rows["Trainer"]["padding %"]
    assert rows["Trainer, by length"]["padding %"] < rows["Trainer"]["padding %"]
    levers = report["tables"]["full, levers"]
    assert [row[0] for row in levers["rows"]] == list(bench.LEVERS)
    assert all(isinstance(value, float) for row in levers["rows"] for value in row[2:])


def shifted(table, numbers):
    """The examples, one more token of each sample trained."""
    from bench import sft_ways
    examples = sft_ways.plain_examples(table, numbers)
    for example in examples:
        first = next(i for i, label in enumerate(example["labels"]) if label >= 0)
        example["labels"][first - 1] = example["input_ids"][first - 1]
    return examples


@pytest.mark.slow
def test_other_labels_stop_it(bench, tiny, tmp_path, monkeypatch):
    from bench import sft_ways
    monkeypatch.setattr(sft_ways, "plain_examples", sft_ways.make_examples, raising=False)
    monkeypatch.setattr(sft_ways, "make_examples", shifted)
    monkeypatch.setattr(bench, "COMPARE", {name: bench.COMPARE[name] for name in ("ours", "Trainer")})
    with pytest.raises(SystemExit, match=r"DISAGREE(.|\n)*ours(.|\n)*Trainer"):
        run(bench, tmp_path, "--parts", "short")
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("other", [(2.001, 3.0, 5), (2.0, 3.1, 5), (2.0, 3.0, 6), (float("nan"), 3.0, 5)])
def test_a_difference_in_either_number_is_named(bench, other):
    bench.check_agreement({"a": [(2.0, 3.0, 5)], "b": [(2.0, 3.0001, 5)]}, "cpu")
    with pytest.raises(SystemExit, match=r"DISAGREE(.|\n)*a: .*\nc: "):
        bench.check_agreement({"a": [(2.0, 3.0, 5)], "c": [other]}, "cpu")
