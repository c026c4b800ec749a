"""The speech benchmark: its numbers follow from each other and from an independent count, its check notices a label."""
import functools
import json
import multiprocessing
import re

import numpy as np
import pytest
import torch
import torch._dynamo
from safetensors.numpy import load_file

from bench import profile_step, tts, tts_ways
from common.packing import PackOrder
from data import SpeechSamples, collate
from speech.data.dataset import Table
from speech.model import v2

CPU = torch.device("cpu")
WAY = {"side": "ours", "shape": "tiny", "method": "full", "bf16": False, "batch": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    tts_ways.write_samples(folder, 10, 7)
    return folder


@pytest.mark.slow
def test_numbers_of_the_tiny_form_follow_from_each_other(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tts.measure, "matmul_rate", functools.partial(tts.measure.matmul_rate, size=128))
    monkeypatch.setitem(tts.SIDES["cpu"], "broken", {"side": "ours", "batch": 0})
    with pytest.raises(SystemExit, match=r"^error: failed: tiny, lora, broken: ValueError: give exactly one of"):
        tts.main(["--shapes", "tiny", "--methods", "lora", "--clips", "5", "--batch", "2", "--rounds", "2", "--fast",
                  "--results_dir", str(tmp_path)])
    report = json.loads((tmp_path / "tts-cpu.json").read_text())
    tts_ways.write_samples(tmp_path / "same", 5, 42)
    frames = len(load_file(tmp_path / "same" / "codes.safetensors")["codes"])
    tokens = len(np.load(tmp_path / "same" / "table" / "tokens.npy")) - 10 + frames + 10 * 9    # 10 clips, 9 more rows
    trainer, ours, packed, broken = report["results"]
    assert [result["name"] for result in report["results"]] == [
        "Trainer", "ours", "ours, packed to a budget", "broken"]
    assert (trainer["side"], ours["side"]) == ("trainer", "ours")
    rows = report["tables"]["step"]["rows"]
    assert rows[-1][:3] == ["tiny", "lora", "broken"] and rows[-1][-1] == broken["error"] and rows[-1][3] is None
    for result, row in zip(report["results"][:-1], rows):
        row = dict(zip(report["tables"]["step"]["columns"], row))
        seconds = np.median(result["seconds"])
        assert len(result["seconds"]) == 2 and 0 < min(result["seconds"])
        assert result["tokens"] == tokens and result["audio_seconds"] == frames / 25
        assert row["useful tokens/s"] == round(tokens / seconds) and row["padding"] == round(result["padding"], 3)
        assert row["step (ms)"] == pytest.approx(seconds / result["steps"] * 1000, abs=0.06)
        share = result["flops"] / seconds / report["matmul_flops_per_second"]
        assert row["of the matmul rate"] == pytest.approx(share, abs=6e-4) and 0 < share
        assert row["ours is faster by"] == round(np.median(np.divide(result["seconds"], ours["seconds"])), 2)
        assert 0 <= result["padding"] < 0.5 and result["memory_gib"] > 0
    assert trainer["steps"] == ours["steps"] == 3 and trainer["syncs"] > 20 and ours["syncs"] == packed["syncs"] == 0
    assert ours["padding"] == 0 < packed["padding"]
    (check,) = report["checks"]
    assert check["shape"] == "tiny" and check["loss"] > 100 and check["gradients_apart"] < 1e-5


def test_padded_batch_holds_every_useful_token_once(folder):
    ids, table = tts_ways.ids_of(folder), Table(folder / "table")
    data = SpeechSamples(table, ids)
    batch = tts_ways.padded_batch([data[i] for i in range(10)], ids)
    assert batch["attention_mask"].sum() == table.lengths.sum() == tts.work_of(folder, "tiny", "full")["tokens"]
    assert (batch["audio_labels"] != -100).sum() == table.audio_targets.sum()
    assert (batch["labels"] != -100).sum() == table.text_targets.sum()
    assert (batch["input_ids"] == ids.audio).sum() + 7 * 20 == batch["audio_input_ids_mask"].sum()
    frames = table.where[:, 2]
    assert 50 <= frames.min() and frames.max() <= 500 and 100 < np.median(frames) < 200


def test_one_wrong_label_stops_the_measurement(folder, monkeypatch):
    def wrong(samples, ids, right=tts_ways.padded_batch):
        batch = right(samples, ids)
        clip, row, book = (batch["audio_labels"] >= 0).nonzero()[len(samples)].tolist()
        batch["audio_labels"][clip, row, book] = 1023 - batch["audio_labels"][clip, row, book]
        return batch

    monkeypatch.setattr(tts_ways, "padded_batch", wrong)
    with pytest.raises(SystemExit, match="DISAGREE, nothing was measured"):
        tts.check_agreement(WAY, folder, CPU)


def one_pass(folder, **settings):
    """What ours tells of one pass over the samples."""
    ours, theirs = multiprocessing.Pipe()
    for word in ("keep", "stop"):
        ours.send(word)
    tts_ways.train_ours(WAY | settings, folder, CPU, tts_ways.Rounds(theirs, CPU))
    assert ours.recv() == {}
    return ours.recv()


@pytest.mark.slow
def test_levers_change_the_time_and_nothing_else(folder):
    default = one_pass(folder)
    assert default["loss"] > 6 and default["slots"] == Table(folder / "table").lengths.sum() and default["syncs"] == 0
    assert one_pass(folder, packed=True)["slots"] % 128 == 0 < default["slots"] % 128
    for words, settings, *where in tts.LEVERS:
        if not where and not settings.keys() & {"packed", "foreach", "recompute"}:     # that other tests compare
            other = one_pass(folder, **settings)
            assert other["loss"] == pytest.approx(default["loss"], rel=1e-5), words
            assert "masks" not in settings or other["syncs"] > 8


@pytest.mark.slow
def test_compiled_layers_meet_packs_of_one_budget_with_no_new_graph(folder):
    ids, table = tts_ways.ids_of(folder), Table(folder / "table")
    data, budget = SpeechSamples(table, ids), tts_ways.token_budget(table.lengths, 2)
    order = PackOrder(table.lengths, tokens_per_pack=budget)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = v2.PackedHiggs(tts_ways.build(WAY, folder, CPU)).train()
    for layer in model.base_model.model.layers:
        layer.compile(backend="eager")
    graphs, shapes = [], set()
    for number in range(5):
        batch = collate([data[i] for i in order.epoch(0).pack(number)], ids, budget)
        shapes.add((len(batch.text_pos), batch.longest, len(batch.seqlens)))
        model(batch)[0].sum().backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(shapes) == 5 and len({shape[2] for shape in shapes}) > 2
    assert 0 < graphs[0] < graphs[1] == graphs[4]


@pytest.mark.slow
def test_a_profile_counts_the_operators_of_a_step_and_accounts_for_all_its_time(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    profile_step.main(["tts", "--shape", "tiny", "--steps", "2", "--results_dir", str(tmp_path)])
    text = (tmp_path / "profile-tts-cpu.txt").read_text()
    assert "`python bench/profile_step.py tts --shape tiny --steps 2`" in text
    wall = float(re.search(r"under the profiler ([\d,.]+) ms", text)[1].replace(",", ""))
    shares = re.findall(r"^ *([\d,.]+) ms +(-?[\d.]+) %   (.+)$", text, re.M)
    assert {"matrix products", "attention", "outside operators (Python)"} <= {name for *_, name in shares}
    assert sum(float(share) for _, share, _ in shares) == pytest.approx(100, abs=1)
    assert sum(float(spent.replace(",", "")) for spent, *_ in shares) == pytest.approx(wall, abs=1)
    calls = {name: int(count.replace(",", "")) for count, name in re.findall(r"([\d,]+)   (aten::\S+)$", text, re.M)}
    assert calls["aten::_log_softmax"] == 2 and calls["aten::argmax"] == 1      # two heads; ends of speech
    attention = calls["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert attention == 2 * 4               # layers, samples of a pack
    assert profile_step.group_of("void cutlass::device_kernel<flash::enable_sm90>") == "attention"
    assert profile_step.group_of("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT") == "matrix products"
