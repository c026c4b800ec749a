"""--auto: what it chooses for real shapes and memories, and that a run which resumes keeps its choice."""
import functools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from common import adapters, auto, document_attention
from common.distributed import World
from common.flags import Parser, UserError, parse
from common.packing import pack_order
from common.plan import Setup
from distill import packed_lm, plan, train_sft, weights
from tests.helpers import chats

# as Qwen3-4B; the memory of a GPU is in GiB
SIZES = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
LENGTHS = np.random.default_rng(0).integers(200, 2000, 20_000)
ALONE = World(device=torch.device("cpu"))


@functools.cache
def order_of(budget):
    return pack_order(LENGTHS, tokens_per_pack=budget, samples_per_pack=4, seed=0)


@functools.cache
def peaks_of(lora):
    native = net = weights.empty_model(transformers.Qwen3Config(**SIZES), torch.bfloat16 if lora else torch.float32,
                                       attention=document_attention.ATTENTION)
    if lora:
        net = adapters.add_lora(native, weights.decoder_layers(native), 32, 32, 0.0, "all-linear", "base")
    return plan.peaks(packed_lm.PackedLM(net, None).train(), LENGTHS, LENGTHS // 2)


def chosen(tmp_path, gpus, gib, *words):
    """(flags with the choice, as a dry run comes to it, packs' Setup)."""
    args = parse(train_sft.build_parser(), train_sft.check_flags, [
        "--model_path", "m", "--train_data_file", "d", "--output_dir", str(tmp_path), "--bf16", "--auto", "--dry_run",
        str(gpus), "--gpu_memory", str(gib), "--report_to", "none", *words])
    peak_of = peaks_of(args.use_lora)
    setups = auto.by_tokens(args, train_sft.setup_of(args, gpus), LENGTHS, lambda budget:
                            order_of(budget).packs_per_epoch, args.global_batch_size)
    auto.decide(args, ALONE, setups, lambda setup: peak_of(setup, order_of(setup.budget)),
                lambda setup: len(LENGTHS) / order_of(setup.budget).packs_per_epoch)
    return args.parallel, args.max_tokens_per_batch, args.gradient_checkpointing, args.gradient_accumulation_steps


LORA, STEP = "--use_lora", ("--global_batch_size", "1024")


@pytest.mark.slow
@pytest.mark.parametrize("gpus, gib, words, wanted", [
    (1, 24, STEP, ("ddp", 2048, "all", 559)), (1, 80, STEP, ("ddp", 16384, "all", 69)),
    (1, 141, STEP, ("ddp", 8192, None, 138)),
    (8, 24, STEP, ("fsdp", 2048, "all", 70)), (8, 80, STEP, ("fsdp", 8192, None, 17)),
    (8, 141, STEP, ("ddp", 8192, None, 17)),
    (1, 24, (LORA, *STEP), ("ddp", 4096, "selective", 276)),
    (1, 96, (LORA, *STEP), ("ddp", 16384, None, 69)),       # 76 GiB; 82 where torch < 2.13 repeats the keys
    (1, 141, (LORA, *STEP), ("ddp", 16384, None, 69)),
    (8, 80, ("--gradient_checkpointing", "all", *STEP), ("ddp", 16384, "all", 9)),      # what a flag says is kept
    (8, 141, ("--parallel", "fsdp", *STEP), ("fsdp", 16384, None, 9)),
    (8, 80, ("--compile", *STEP), ("fsdp", 8192, None, 17)),
    (8, 141, ("--max_tokens_per_batch", "4096", "--gradient_accumulation_steps", "3"), ("ddp", 4096, None, 3)),
    (8, 141, ("--per_device_train_batch_size", "4"), ("ddp", 0, None, 4)),              # 128 samples a step = 4 x 8 x 4
    (8, 141, (), ("ddp", 8192, None, 2))], ids=str)
def test_choices_for_a_model_of_4b(tmp_path, capsys, gpus, gib, words, wanted):
    assert chosen(tmp_path, gpus, gib, *words) == wanted
    said = capsys.readouterr().out.splitlines()
    assert re.match(rf"auto       (none|the first) that fits one GPU's {gib}.00 GiB, ", said[0])
    tried = [re.search(r"^ {11}(?:ddp|fsdp) .* ([\d.]+) GiB  (taken|too much)$", line) for line in said]
    assert len({line.index(" GiB  ") for line, found in zip(said, tried) if found}) == 1        # aligned
    found = [match.groups() for match in tried if match]
    fits = [float(peak) <= 0.95 * gib for peak, _ in found]
    assert not any(fits[:-1]) and [how == "taken" for _, how in found] == fits
    asked = "--gradient_checkpointing" in words
    assert ("recomputation because" in "".join(said)) == (wanted[2] == "all" and not asked)


def test_a_run_that_fits_nowhere_is_refused_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(auto.plan, "gpu_memory", lambda gib: 24 * 2**30)
    args = parse(Parser(), None, [])
    vars(args).update(auto=True, dry_run=None, gpu_memory=None, output_dir=str(tmp_path), resume="auto")
    setup = Setup(ranks=1, parallel="ddp", bf16=True, recompute=None, accumulation=1, batch_size=1)
    with pytest.raises(UserError, match="memory: about 30.00 GiB needed on each GPU, which has 24.00 GiB"):
        auto.decide(args, ALONE, [setup], lambda setup: 30 * 2**30, lambda setup: 1)


def test_a_longer_sample_makes_larger_packs():
    args = parse(train_sft.build_parser(), train_sft.check_flags, [
        "--model_path", "m", "--train_data_file", "d", "--auto", "--dry_run", "8", "--report_to", "none"])
    setup = train_sft.setup_of(args, 8)
    for longest, budget in ((900, 1024), (1025, 2048), (16384, 16384), (16385, 17408)):
        setups = auto.by_tokens(args, setup, np.array([10] * 1000 + [longest]), lambda budget: 10, 128)
        assert {setup.budget for setup in setups} == {budget}


def test_rows_of_block_diffusion_are_split_over_any_number_of_ranks():
    """As few micro-steps as fit, none of fewer than 4,096 tokens; never less than a row."""
    args = parse(Parser(), None, [])
    args.compile = True
    setup = Setup(ranks=8, parallel="ddp", bf16=True, recompute=None, accumulation=4, batch_size=43)

    def split(ranks, tokens=1024):
        found = list(auto.by_rows(args, replace(setup, ranks=ranks), 171, tokens))
        return list(dict.fromkeys((one.batch_size, one.accumulation) for one in found))
    assert split(1) == [(171, 1), (86, 2), (43, 4), (21, 8), (11, 16), (5, 32), (3, 64)]
    assert split(8) == [(21, 1), (11, 2), (5, 4), (3, 8)] and split(64) == [(3, 1)] and split(512) == [(1, 1)]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_choice(tmp_path, capfd):
    """Though there is less memory now, and with as many packs a step on another number of ranks."""
    chats.student(tmp_path / "student")
    chats.write(tmp_path / "chats.jsonl", chats.conversations(64))

    def run(*words):
        line = ["--model_path", tmp_path / "student", "--train_data_file", tmp_path / "chats.jsonl", "--output_dir",
                tmp_path / "out", "--auto", "--num_workers", "0", "--report_to", "none", "--global_batch_size", 64,
                *words]
        train_sft.main([str(word) for word in line])
        return capfd.readouterr().out
    said = run("--max_steps", 1, "--gpu_memory", 80)
    assert re.search(r"ddp +2,048 tokens .*taken", said)
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state" / "state.json").read_text())
    flags = {name: state["args"][name] for name in (*auto.FLAGS, "packs_per_step")}
    assert flags == {"parallel": "ddp", "max_tokens_per_batch": 2048, "per_device_train_batch_size": 16,
                     "gradient_checkpointing": None, "gradient_accumulation_steps": 2, "packs_per_step": 2}
    assert state["identity"]["pack"] == "2048 tokens"
    said = run("--max_steps", 2, "--gpu_memory", 1)
    assert "as the run that is resumed began: --parallel ddp, --max_tokens_per_batch 2048" in said
    assert "done       step 2" in said
    assert "2 packs a step = 2 ranks x 1 micro-steps" in run("--dry_run", 2, "--gpu_memory", 80)
    with pytest.raises(SystemExit):
        run("--dry_run", 3)
    assert "this run has 2 packs a step, which 3 ranks cannot share out" in capfd.readouterr().err
