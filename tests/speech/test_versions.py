"""Runs of Higgs TTS 3: any ranks train the same; checkpoints are resumed, merged, exported and spoken."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import lora
from speech import make_tiny, speak, v3
from speech.codes import load_codec
from tests.helpers import higgs3
from tests.helpers.trainer import Tiny, brief, train_forked


@pytest.fixture(scope="module")
def tiny3(tmp_path_factory, tiny):
    """Like tiny, with a Higgs TTS 3 as the model and short clips."""
    root = tmp_path_factory.mktemp("tiny3")
    brief(tiny, root)
    (root / "model").unlink()
    make_tiny.make_model3(root, load_codec(root / "codec", torch.device("cpu"), 8)[0])
    return Tiny(root)


LENGTH = ("--max_steps", 4, "--save_steps", 2, "--learning_rate", 1e-2, "--validation_split", 0.2, "--eval_steps", 2)


@pytest.fixture(scope="module")
def runs(pool, tiny3, tmp_path_factory):
    done = {}

    def run(ranks, *flags):
        if (ranks, flags) not in done:
            done[ranks, flags] = train_forked(pool, tiny3, tmp_path_factory.mktemp("run") / "out", *LENGTH, *flags,
                                              ranks=ranks)
        return done[ranks, flags]
    return run


def weights_of(run, step=4):
    folder = run.output_dir / f"checkpoint-{step}"
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_same(run, other):
    """Equal up to the order of float32 sums: metrics differed by 4e-5, and 0.07 % of the values of a weight."""
    for name in ("train/loss", "eval/loss", "train/grad_norm"):
        assert list(run.metrics(name).values()) == pytest.approx(list(other.metrics(name).values()), rel=1e-4), name
    weights, other_weights = weights_of(run), weights_of(other)
    assert weights.keys() == other_weights.keys() and len(weights) > 20
    for name, expected in other_weights.items():       # Adam turns rounding of a zero gradient into steps
        differs = (weights[name] - expected).abs() > 2e-4 + 1e-3 * expected.abs()
        assert differs.float().mean() < 0.01, f"{name}: {int(differs.sum())} of {differs.numel()} values differ"


@pytest.mark.slow
def test_any_split_trains_the_same(runs):
    """With all weights trained; the test below has adapters and the table."""
    run = runs(1, "--per_device_train_batch_size", 4)
    initial, final = weights_of(run, 2), weights_of(run)
    assert not any(torch.equal(final[name], initial[name]) for name in final), "it trains"
    assert_same(run, runs(2, "--per_device_train_batch_size", 2))
    assert_same(run, runs(2, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 2, "--parallel",
                          "fsdp"))


def test_merged_and_exported_folders_have_the_tensors_of_the_release(runs, tiny3, tmp_path):
    adapter = runs(1, "--per_device_train_batch_size", 4, "--use_lora", "--lora_target_modules", "all-linear",
                   "--lora_dropout", 0).output_dir / "checkpoint-4"
    lora.export(str(tiny3.model), tmp_path / "merged", adapter=str(adapter))
    released, merged = (load_file(folder / "model.safetensors") for folder in (tiny3.model, tmp_path / "merged"))
    assert merged.keys() == released.keys()
    changed = {name for name in merged if not torch.equal(merged[name], released[name])}
    assert changed == {name for name in merged if name.startswith("body.layers.") and "_proj." in name}
    assert all(torch.equal(merged[head], merged[table]) for head, table in v3.HEADS.items())
    speaking = speak.load_model(tiny3.model, json.loads((tiny3.model / "config.json").read_text()), adapter,
                                torch.float32, torch.device("cpu"))
    prompt, rows = higgs3.prompt(higgs3.load(tiny3.model)[1], [5, 6]), higgs3.delay(torch.arange(80).view(10, 8))
    torch.testing.assert_close(higgs3.forced_logits(higgs3.load(tmp_path / "merged")[0], prompt, None, rows),
                               higgs3.forced_logits(speaking, prompt, None, rows), rtol=1e-4, atol=1e-4)
    full = runs(1, "--per_device_train_batch_size", 4)
    trained = weights_of(full)
    assert v3.AUDIO_TABLE in trained and not trained.keys() & v3.HEADS.keys()       # one parameter for both
    lora.export(str(full.output_dir / "checkpoint-4"), tmp_path / "served", shard_bytes=10**6, codec=str(tiny3.codec))
    index = json.loads((tmp_path / "served" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == released.keys()
    served, _ = higgs3.load(tmp_path / "served")
    assert all(torch.equal(value, trained[name]) for name, value in v3.weight_names(served).items())


TABLE = ("--use_lora", "--train_audio_table", "--lora_dropout", 0)


@pytest.mark.slow
def test_the_audio_table_is_trained_with_adapters_as_one_parameter(pool, runs, tiny3, tmp_path):
    """Embedding and head stay one table: sharded or not, resumed and merged."""
    run = runs(1, "--per_device_train_batch_size", 4, *TABLE)
    assert_same(run, runs(2, "--per_device_train_batch_size", 2, "--parallel", "fsdp", *TABLE))
    released, weights = load_file(tiny3.model / "model.safetensors")[v3.AUDIO_TABLE], weights_of(run)
    table = weights["base_model.model.audio_embedding.weight"]
    assert (table - released).abs().max() > 1e-3
    assert sum("lora_A" in name for name in weights) == len([name for name in weights if "lora_B" in name]) > 7
    out = tmp_path / "out"
    shutil.copytree(run.output_dir, out)
    shutil.rmtree(out / "checkpoint-4")
    resumed = train_forked(pool, tiny3, out, *LENGTH, "--per_device_train_batch_size", 4, *TABLE)
    assert "start      step 2, resumed from" in resumed.output
    again = weights_of(resumed)
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)
    adapter = run.output_dir / "checkpoint-4"
    lora.export(str(tiny3.model), tmp_path / "merged", adapter=str(adapter))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged[v3.AUDIO_TABLE], table.to(merged[v3.AUDIO_TABLE].dtype))
    assert all(torch.equal(merged[head], merged[table]) for head, table in v3.HEADS.items())


def test_a_clip_too_short_to_end_is_refused_or_dropped(pool, tiny3, tmp_path):
    samples, data = tiny3.samples(), tiny3.root / "short.json"
    samples[0]["messages"][-1]["content"][-1] |= {"offset": 0.0, "duration": 0.25}
    data.write_text(json.dumps(samples))
    flags = ("--train_data_file", data, "--max_steps", 1)
    refused = train_forked(pool, tiny3, tmp_path / "a", *flags, ok=False)
    assert refused.status == 1 and "gives 7 codec frames; this model needs 8 (0.32 s)" in refused.output
    assert "dropped: 1 audio" in train_forked(pool, tiny3, tmp_path / "b", *flags, "--drop_bad", "audio").output
