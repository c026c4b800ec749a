"""Higgs TTS 3 through the scripts themselves: trained on any ranks the same, resumed, merged, spoken; V2 kept apart."""
import json
import shutil

import pytest
import soundfile
import torch
from safetensors.torch import load_file

from speech import make_tiny, speak, v3
from speech.codes import load_codec
from tests.helpers import higgs3
from tests.helpers.merging import merge
from tests.helpers.trainer import Tiny, brief, train_forked


@pytest.fixture(scope="module")
def tiny3(tmp_path_factory, tiny):
    """As tiny, with a Higgs TTS 3 in place of the model, and short clips."""
    root = tmp_path_factory.mktemp("tiny3")
    brief(tiny, root)
    (root / "model").unlink()
    make_tiny.make_model3(root, load_codec(root / "codec", torch.device("cpu"), 8)[0])
    return Tiny(root)


LENGTH = ("--max_steps", 4, "--save_steps", 2, "--learning_rate", 1e-2, "--validation_split", 0.2, "--eval_steps", 2)


@pytest.fixture(scope="module")
def runs(pool, tiny3, tmp_path_factory):
    made = {}

    def run(ranks, *flags):
        if (ranks, flags) not in made:
            made[ranks, flags] = train_forked(pool, tiny3, tmp_path_factory.mktemp("run") / "out", *LENGTH, *flags,
                                              ranks=ranks)
        return made[ranks, flags]
    return run


def weights_of(run, step=4):
    folder = run.output_dir / f"checkpoint-{step}"
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_same(one, other):
    """Up to the order of float32 sums, which Adam makes steps of; numbers 4e-5 apart, 0.07 % of a weight were seen."""
    for name in ("train/loss", "eval/loss", "train/grad_norm"):
        assert list(one.metrics(name).values()) == pytest.approx(list(other.metrics(name).values()), rel=1e-4), name
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name in ours:       # a gradient that is rounding only, as of lora_A in its first steps, moves its value too
        apart = (ours[name] - theirs[name]).abs() > 2e-4 + 1e-3 * theirs[name].abs()
        assert apart.float().mean() < 0.01, f"{name}: {int(apart.sum())} of {apart.numel()} values differ"


@pytest.mark.slow
def test_any_split_trains_the_same(runs):
    """All weights; adapters and the table beside them are below."""
    one = runs(1, "--per_device_train_batch_size", 4)
    before, after = weights_of(one, 2), weights_of(one)
    assert not any(torch.equal(after[name], before[name]) for name in after), "it trains"
    assert_same(one, runs(2, "--per_device_train_batch_size", 2))
    assert_same(one, runs(2, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 2, "--parallel",
                          "fsdp"))


def test_the_table_is_one_parameter(runs):
    named = weights_of(runs(1, "--per_device_train_batch_size", 4))
    assert v3.AUDIO_TABLE in named and not named.keys() & v3.HEADS.keys()


def test_merged_and_exported_folders_are_those_of_servers(runs, tiny3, tmp_path):
    adapter = runs(1, "--per_device_train_batch_size", 4, "--use_lora", "--lora_target_modules", "all-linear",
                   "--lora_dropout", 0).output_dir / "checkpoint-4"
    merge(str(tiny3.model), str(adapter), tmp_path / "merged", None)
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
    full = runs(1, "--per_device_train_batch_size", 4).output_dir / "checkpoint-4"
    merge(str(full), None, tmp_path / "served", None, shard_bytes=10**6, codec=str(tiny3.codec))
    index = json.loads((tmp_path / "served" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == released.keys()
    served, _ = higgs3.load(tmp_path / "served")
    assert all(torch.equal(value, weights_of(runs(1, "--per_device_train_batch_size", 4))[name])
               for name, value in v3.weight_names(served).items())


TABLE = ("--use_lora", "--train_audio_table", "--lora_dropout", 0)


@pytest.mark.slow
def test_the_audio_table_is_trained_beside_adapters_as_one_parameter(pool, runs, tiny3, tmp_path):
    """Sharded or not, resumed and merged: embedding and head stay one table."""
    run = runs(1, "--per_device_train_batch_size", 4, *TABLE)
    assert_same(run, runs(2, "--per_device_train_batch_size", 2, "--parallel", "fsdp", *TABLE))
    released, ours = load_file(tiny3.model / "model.safetensors")[v3.AUDIO_TABLE], weights_of(run)
    table = ours["base_model.model.audio_embedding.weight"]
    assert (table - released).abs().max() > 1e-3
    assert sum("lora_A" in name for name in ours) == len([name for name in ours if "lora_B" in name]) > 7
    out = tmp_path / "out"
    shutil.copytree(run.output_dir, out)
    shutil.rmtree(out / "checkpoint-4")
    resumed = train_forked(pool, tiny3, out, *LENGTH, "--per_device_train_batch_size", 4, *TABLE)
    assert "start      step 2, resumed from" in resumed.output
    again = weights_of(resumed)
    assert again.keys() == ours.keys() and all(torch.equal(again[name], ours[name]) for name in ours)
    adapter = run.output_dir / "checkpoint-4"
    merge(str(tiny3.model), str(adapter), tmp_path / "merged", None)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged[v3.AUDIO_TABLE], table.to(merged[v3.AUDIO_TABLE].dtype))
    assert all(torch.equal(merged[head], merged[table]) for head, table in v3.HEADS.items())


def test_a_clip_too_short_to_end_is_refused_or_dropped(pool, tiny3, tmp_path):
    samples, short = tiny3.samples(), tmp_path / "short.wav"
    wave, rate = soundfile.read(tiny3.root / samples[0]["messages"][-1]["content"][-1]["audio_url"])
    soundfile.write(short, wave[:rate // 4], rate)
    samples[0]["messages"][-1]["content"][-1]["audio_url"] = str(short)
    for sample in samples:      # the file lies elsewhere
        for message in sample["messages"]:
            for item in message["content"] if isinstance(message["content"], list) else ():
                if item["type"] == "audio":
                    item["audio_url"] = str(tiny3.root / item["audio_url"])
    (tmp_path / "data.json").write_text(json.dumps(samples))
    flags = ("--train_data_file", tmp_path / "data.json", "--max_steps", 1)
    assert f"{short}: gives 7 codec frames; this model needs 8 (0.32 s)" in refusal(pool, tiny3, tmp_path / "a", *flags)
    run = train_forked(pool, tiny3, tmp_path / "b", *flags, "--drop_bad", "audio")
    assert "dropped: 1 audio" in run.output


def refusal(pool, tiny, output_dir, *flags):
    run = train_forked(pool, tiny, output_dir, *flags, ok=False)
    error, = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert run.status == 1
    return error
