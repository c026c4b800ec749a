"""core/memory.py: packs, memory, refusals; --auto, and a resumed run that keeps its choice."""
import json
import re

import numpy as np
import pytest
import torch
import transformers

from core import kernels, memory
from core.cli import UserError, parse
from core.dist import World
from core.memory import GIB
from diffusion import plan as block_plan
from distill import causal_lm, packed_lm
from distill import plan as chat_plan
from tests.helpers import chats
from tests.helpers.live_bytes import run_flags
from tests.helpers.students import train_sft

SIZES = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,     # Qwen3-4B
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
LENGTHS = np.random.default_rng(0).integers(200, 2000, 20_000)
ALONE = World(device=torch.device("cpu"))


def flags(*words):
    """Flags of the chat trainer for a dry run."""
    return parse(train_sft.build_parser(), train_sft.check_flags, [
        "--model_path", "m", "--train_data_file", "d", "--report_to", "none", "--dry_run", *map(str, words)])


@pytest.fixture(scope="module")
def student():
    """The empty PackedLM."""
    config = transformers.Qwen3Config(**SIZES)
    native = causal_lm.empty_model(config, torch.float32, attention=kernels.packed_documents())
    return packed_lm.PackedLM(native, None)


@pytest.mark.slow
def test_parts_of_the_memory(student):
    """A value takes 16 bytes, 2 on each of 8 GPUs, none when offloaded; accumulation adds unsharded gradients."""
    pack, values = (4096, 2048), 4_022_468_096

    def estimate(ranks, parallel, **flags):
        return memory.estimate(student, chat_plan.loss, run_flags(ranks, parallel, True, "all", **flags), [pack])
    alone, sharded = estimate(1, "ddp"), estimate(8, "fsdp")
    assert [alone[name] / values for name in ("weights", "gradients", "optimizer")] == [4, 0, 8]
    assert "copies" not in alone and alone["fixed"] == GIB
    assert sum(sharded[name] for name in ("weights", "gradients", "optimizer")) == 2 * values
    root, layer = 151936 * 2560 + 2560, (values - 151936 * 2560 - 2560) // 36
    assert sharded["copies"] == 2 * (root + 3 * layer) + 6 * layer and sharded["fixed"] == 2 * GIB
    assert estimate(8, "fsdp", reshard_after_forward=False)["copies"] == 2 * values + 6 * layer
    away = estimate(8, "fsdp", cpu_offload=True)
    assert away["weights"] == away["optimizer"] == 0
    more = estimate(8, "fsdp", gradient_accumulation_steps=2)
    assert more["gradients"] == 4.5 * values and sum(more.values()) - sum(sharded.values()) > 3.9 * values
    assert sum(estimate(2, "ddp").values()) > sum(alone.values()) + GIB       # DDP's buckets, all the time


@pytest.mark.slow
def test_choice_for_a_model_of_4b_on_8_gpus(student, tmp_path, capsys):
    args = flags(8, "--output_dir", tmp_path, "--bf16", "--auto", "--gpu_memory", 80, "--global_batch_size", 1024)
    table = type("Table", (), {"lengths": LENGTHS, "targets": LENGTHS // 2})
    memory.choose(args, ALONE, memory.pack_ways(args, LENGTHS),
                  lambda *words: chat_plan.memory(student, table, slice(None), None, *words))
    assert (args.parallel, args.max_tokens_per_batch, args.gradient_checkpointing,
            args.gradient_accumulation_steps) == ("fsdp", 8192, None, 17)
    line = r"auto       --parallel fsdp --max_tokens_per_batch 8192 .*\(([\d.]+) GiB\)"
    assert float(re.match(line, capsys.readouterr().out)[1]) <= 0.95 * 80


def test_too_little_memory_is_refused():
    """5 % of the GPU stay free. Without a setup that fits, the run does not start."""
    args = flags(1, "--gpu_memory", 24)
    with pytest.raises(UserError, match="memory: about 22.90 GiB needed on each GPU, which has 24.00 GiB, 5 % of"):
        memory.check_memory({"weights": 22.9 * GIB}, args)
    memory.check_memory({"weights": 22.7 * GIB}, args)
    args.dry_run = None
    with pytest.raises(UserError, match="memory: about 30.00 GiB needed on each GPU, which has 24.00 GiB"):
        memory.choose(args, ALONE, [({}, None)], lambda *_: {"weights": 30 * GIB})


def ways_of(args, lengths):
    """All flags of --auto, which tries each if none fits."""
    return [way for way, _ in memory.pack_ways(args, lengths)]


@pytest.mark.parametrize("words, sharded, more", [
    ("--bf16 --use_lora", True, {}), ("--fp16 --parallel ddp", False, {}), ("--bf16", False, {"float8": True}),
    ("--bf16 --use_lora", False, {"base_dtype": "nf4"})], ids=str)
def test_auto_tries_nothing_that_is_refused(words, sharded, more, tmp_path):
    args = flags(2, "--auto", "--output_dir", tmp_path, *words.split())
    vars(args).update(more, parallel="ddp")
    ways = ways_of(args, LENGTHS)
    assert any(way["parallel"] == "fsdp" for way in ways) == sharded
    small = [way for way in ways if way["max_tokens_per_batch"] < memory.LARGE]
    assert small and {tuple(way.values())[:2] for way in small} == {tuple(ways[-1].values())[:2]}   # the slowest way


def test_auto_keeps_an_accumulation_that_is_named(tmp_path):
    args = flags(2, "--auto", "--output_dir", tmp_path, "--gradient_accumulation_steps", 1)
    args.global_batch_size = 512
    assert {way["gradient_accumulation_steps"] for way in ways_of(args, LENGTHS)} == {1}


def test_a_longer_sample_makes_larger_packs(tmp_path):
    for longest, budget in ((1024, 1024), (1025, 2048), (16384, 16384), (16385, 17408)):
        ways = ways_of(flags(8, "--auto", "--output_dir", tmp_path), np.array([10] * 1000 + [longest]))
        assert {way["max_tokens_per_batch"] for way in ways} == {budget}


def test_rows_of_block_diffusion_are_split_over_any_number_of_ranks():
    """The number of micro-steps is the smallest that fits; each has at least 4,096 tokens and one row."""
    def split(ranks, tokens=1024):
        args = run_flags(ranks, named=set())
        return list(dict.fromkeys((way["per_device_train_batch_size"], way["gradient_accumulation_steps"])
                                  for way in block_plan.ways(args, 171, tokens)))
    assert split(1) == [(171, 1), (86, 2), (43, 4), (21, 8), (11, 16), (5, 32), (3, 64)]
    assert split(8) == [(21, 1), (11, 2), (5, 4), (3, 8)] and split(64) == [(3, 1)] and split(512) == [(1, 1)]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_choice(tmp_path, capfd):
    """It keeps its choice with less memory, and the packs a step on another number of ranks."""
    chats.student(tmp_path / "student")
    chats.write(tmp_path / "chats.jsonl", chats.conversations(64))

    def run(*words):
        line = ["--model_path", tmp_path / "student", "--train_data_file", tmp_path / "chats.jsonl", "--output_dir",
                tmp_path / "out", "--auto", "--num_workers", "0", "--report_to", "none", "--global_batch_size", 64,
                *words]
        try:
            train_sft.main([str(word) for word in line])
        except SystemExit as ended:     # a dry run exits
            if ended.code:
                raise
        return capfd.readouterr().out
    text = run("--max_steps", 1, "--gpu_memory", 80)
    assert "auto       --parallel ddp --max_tokens_per_batch 2048 " in text and "1 rank x 2 micro-steps" in text
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state" / "state.json").read_text())
    choices = {name: state["args"][name] for name in (*memory.FLAGS, "packs_per_step")}
    assert choices == {"parallel": "ddp", "max_tokens_per_batch": 2048, "per_device_train_batch_size": 16,
                     "gradient_checkpointing": None, "gradient_accumulation_steps": 2, "packs_per_step": 2}
    assert state["identity"]["pack"] == "2048 tokens"
    text = run("--max_steps", 2, "--gpu_memory", 1)
    assert re.search(r"^auto +--parallel ddp --max_tokens_per_batch 2048 .*\(as the run that is resumed", text, re.M)
    assert "done       step 2" in text
    text = run("--dry_run", 2, "--gpu_memory", 80)
    assert "2 packs a step = 2 ranks x 1 micro-step" in text
    assert re.search(r"^FITS \d\.\d of 80\.0 GiB · 2 steps$", text, re.M), text
    with pytest.raises(UserError, match="this run has 2 packs a step, not a multiple of 3 ranks"):
        run("--dry_run", 3)
    (tmp_path / "out" / "checkpoint-2" / "trainer_state" / "state.json").write_text("{")
    assert "as the run that is resumed" in run("--dry_run", 2)      # by the checkpoint before
