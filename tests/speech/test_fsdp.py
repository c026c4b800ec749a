"""FSDP2 and HSDP log the numbers of DDP and of one process, and end with the same weights and moments.

The model has uneven sizes: the ranks do not divide most tensors, and one rank has no row of some tensors. The name of a
run is its method, its mode, "ranks x samples x micro-steps" and further flags.
"""
import functools
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, HiggsAudioV2ForConditionalGeneration

from speech import make_tiny
from tests.helpers import spoken
from tests.helpers.runs import assert_same_bits, CLOCK, CUTS, moments, newest, rows, tensors
from tests.helpers.trainer import Tiny, speech_main, train_forked

LR = 2e-4
# 19 of 24 samples are trained, 12 a step: an epoch's second step has 7, so some ranks get empty packs
COMMON = ("--learning_rate", LR, "--validation_split", 0.2, "--eval_steps", 2, "--save_total_limit", 1,
          "--num_train_epochs", 2, "--num_workers", 0)
METHODS = {"full": (), "lora": ("--use_lora", "--lora_dropout", 0, "--lora_rank", 5),
           "packs": ("--max_tokens_per_batch", 400, "--max_steps", 4)}
EVERY = "--save_steps 1 --save_total_limit 0"
COUNTED = "full fsdp 2x2x3"
HSDP = "hsdp:2 4x3x1"      # two copies, each in two shards


@pytest.fixture(scope="module")
def uneven(tiny, tmp_path_factory):
    """A Tiny whose model has uneven sizes and random norms, with clips of half a second."""
    root = tmp_path_factory.mktemp("uneven")
    # 4 ranks get 2, 2, 2 and 0 of the 6 rows of k_proj
    make_tiny.make_model(root, AutoTokenizer.from_pretrained(tiny.model), hidden_size=38, intermediate_size=53,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=6)
    weights, generator = load_file(root / "model" / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in weights:
        if "norm" in name:
            weights[name] += 0.3 * torch.randn(weights[name].shape, generator=generator)
    save_file(weights, root / "model" / "model.safetensors", {"format": "pt"})
    (root / "codec").symlink_to(tiny.codec)
    samples = []
    for number, sample in enumerate(tiny.samples()):
        audio = tiny.root / sample["messages"][-1]["content"][-1]["audio_url"]
        text = " ".join(sample["misc"]["target_transcript"].split()[:2 + number % 4])
        spoken = {"type": "audio", "audio_url": str(audio), "offset": 1.0, "duration": 0.3 + 0.02 * number}
        turns = {"system": "Generate audio.", "user": text, "assistant": spoken}
        samples.append({"messages": [{"role": role, "content": content} for role, content in turns.items()]})
    (root / "train.json").write_text(json.dumps(samples))
    return Tiny(root)


def complete(pool, tiny, output_dir, name, *more, **options):
    """Train to the end; return the Run."""
    method, mode, split, *flags = name.split()
    ranks, samples, micro_steps = map(int, split.split("x"))
    return train_forked(pool, tiny, output_dir, *COMMON, *METHODS[method], "--parallel", mode,
                        "--per_device_train_batch_size", samples, "--gradient_accumulation_steps", micro_steps, *flags,
                        *more, ranks=ranks, **options)


@pytest.fixture(scope="module")
def shared(pool, uneven, tmp_path_factory):
    """shared(name) -> Run, trained on first use; read only."""
    root, done = tmp_path_factory.mktemp("shared"), {}

    def get(name):
        if name not in done:
            counted = {"main": f"{__name__}.count_collectives"} if name == COUNTED else {}
            done[name] = complete(pool, uneven, root / re.sub(r"\W+", "-", name), name, **counted)
        return done[name]
    return get


def assert_close(run, other, after=0):
    """Logs after a step, final weights and moments are equal up to the order of float32 sums."""
    lines, other_lines = (rows(r, after, CLOCK | CUTS) for r in (run, other))
    assert len(lines) == len(other_lines) and lines
    for line, other_line in zip(lines, other_lines):
        assert line == pytest.approx(other_line, abs=1e-5, rel=1e-5)
    worst = differences(tensors(run), tensors(other))
    assert max(worst.values()) < LR / 100, f"weights: {worst}"
    worst = differences(moments(run), moments(other), relative=True)
    assert max(worst.values()) < 1e-5, f"moments: {worst}"


def differences(actual, expected, relative=False):
    """{name: largest difference}; relative: divided by the largest value."""
    assert actual.keys() == expected.keys() and actual
    scale = {name: expected[name].abs().max().clamp_min(1e-12) if relative else 1 for name in actual}
    return {name: ((actual[name] - expected[name]).abs().max() / scale[name]).item() for name in actual}


# each method, each sharding and each mode at least once
SAME = ["full ddp 2x2x3", f"full fsdp 4x3x1 {EVERY}", "lora fsdp 2x2x3 --gradient_checkpointing",
        f"full {HSDP} {EVERY}", "packs ddp 2x1x1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_ranks_accumulation_and_sharding_change_nothing(shared, name):
    method = name.split()[0]
    reference = shared(f"{method} ddp 1x1x2" if method == "packs" else f"{method} ddp 1x12x1")
    assert_close(shared(name), reference)


def test_equal_runs_really_trained(shared, uneven):
    """Else the comparisons would pass for runs that train nothing."""
    base = load_file(uneven.model / "model.safetensors")
    full, adapter = tensors(shared("full ddp 1x12x1")), tensors(shared("lora ddp 1x12x1"))
    assert full.keys() == base.keys()
    assert all((full[name] - base[name]).abs().max() > LR for name in base)
    assert all(tensor.abs().max() > LR for name, tensor in adapter.items() if "lora_B" in name)
    for method in ("full", "lora"):
        run = shared(f"{method} ddp 1x12x1")
        assert sorted(run.metrics("train/loss")) == [1, 2, 3, 4] and sorted(run.metrics("eval/loss")) == [2, 4]
        assert min(run.metrics("train/grad_norm").values()) > 1.5        # clipped, so a wrong norm shows in the moments


@pytest.mark.slow
def test_offloading_changes_no_bit(shared):
    assert_same_bits(shared(f"{COUNTED} --cpu_offload"), shared(COUNTED))


@pytest.mark.slow
def test_compiled_layers_train_the_same(pool, uneven, shared, tmp_path):
    """aot_eager traces the layers with FSDP2's hooks but builds no kernels."""
    run = complete(pool, uneven, tmp_path / "out", "packs fsdp 1x1x2 --compile", main=f"{__name__}.train_compiled")
    assert_close(run, shared("packs ddp 1x1x2"))


def train_compiled(argv):
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    speech_main(argv)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_bf16_is_close_to_fp32_and_the_trained_weights_stay_fp32(shared):
    exact, fsdp = shared("full ddp 1x12x1"), shared("full fsdp 2x2x3 --bf16")
    for name in ("train/loss", "train/audio_loss", "train/text_loss", "eval/loss"):
        assert fsdp.metrics(name) == pytest.approx(exact.metrics(name), rel=3e-3)
        assert fsdp.metrics(name) != pytest.approx(exact.metrics(name), rel=1e-6)      # not computed in fp32
    assert fsdp.metrics("train/grad_norm") == pytest.approx(exact.metrics("train/grad_norm"), rel=2e-2)
    for read in (tensors, moments):
        fp32 = read(exact)
        for name, value in read(fsdp).items():       # the sign of a tiny gradient may differ in bf16
            assert torch.cosine_similarity(*(t.double().flatten() for t in (value, fp32[name])), 0, 0) > 0.9, name
            assert value.dtype == torch.float32
            assert name.endswith("step") or (value.bfloat16() != value).any()       # not rounded


@pytest.mark.slow
def test_gradients_are_reduced_once_a_step(shared):
    """Three micro-steps cost the reductions of one: one for each layer and one for the rest."""
    run = shared(COUNTED)
    counts, steps = json.loads((run.output_dir / "counts.json").read_text()), len(run.metrics("train/loss"))
    reductions = sum(number for name, number in counts.items() if re.match("c10d::.*reduce_scatter", name))
    assert steps == 4 and reductions == steps * (2 + 1), reductions


def count_collectives(argv):
    """Write the number of rank 0's collectives by name to counts.json in --output_dir."""
    if os.environ["RANK"] != "0":
        speech_main(argv)
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        speech_main(argv)
    counts = Counter(event.name() for event in profile.profiler.kineto_results.events())
    Path(argv[argv.index("--output_dir") + 1], "counts.json").write_text(json.dumps(counts))


# an epoch has two steps, so step 3 is in the middle of an epoch
@pytest.mark.slow
@pytest.mark.parametrize("source, name", [("fsdp 4x3x1", "full ddp 2x3x2"), (HSDP, "full fsdp 2x3x2")])
def test_resume_with_other_ranks_or_mode_trains_the_same(pool, uneven, shared, tmp_path, source, name):
    first = shared(f"full {source} {EVERY}")
    run = complete(pool, uneven, tmp_path / "out", name, "--resume", first.output_dir / "checkpoint-3")
    assert rows(run)[0]["step"] == 4
    assert_close(run, first, after=3)


def test_full_checkpoint_is_a_transformers_model(shared, uneven, tmp_path):
    run = shared(f"full fsdp 4x3x1 {EVERY}")
    for same in (run, shared(f"full {HSDP} {EVERY}")):      # each of the four ranks writes a file
        assert len(list(newest(same).glob("model-*-of-00004.safetensors"))) == 4
    model, info = HiggsAudioV2ForConditionalGeneration.from_pretrained(newest(run), use_text_head=True,
                                                                       output_loading_info=True)
    assert not any(info.values()), info
    saved = tensors(run)
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    ddp = HiggsAudioV2ForConditionalGeneration.from_pretrained(newest(shared("full ddp 2x2x3")), use_text_head=True)
    inputs = spoken.inputs_of(uneven.model, [spoken.CLONING], tmp_path / "table")
    torch.testing.assert_close(spoken.logits(model, inputs), spoken.logits(ddp, inputs))
