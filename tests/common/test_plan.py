"""A plan's packs, disk and memory, what is refused and what is advised; --auto, and that a resumed run keeps its choice."""
import json
import re
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from common import plan, step_memory
from common.distributed import World
from common.flags import Parser, UserError, parse
from common.step_memory import GIB, Memory, Setup
from core import adapters, document_attention
from core.packing import PackOrder
from diffusion import plan as block_plan
from distill import causal_lm, packed_lm
from tests.helpers.students import train_sft
from distill import plan as chat_plan
from tests.helpers import chats

# ---------------------------------------------------------------------------------------------------------------------
# Packs, disk, host


def test_packs():
    """Sums over packs; how full they are, and how even ranks are loaded, where an empty pack of a slot fills up."""
    order, lengths = PackOrder(np.arange(1, 8), samples_per_pack=3, seed=1), np.arange(1, 8)
    sums = [sum(order.epoch(0).pack(p) + 1) for p in range(3)]
    assert plan.epoch_sums(order, [0, 0], lengths).tolist() == [*sums, *sums]
    even = np.maximum([*sums, 0], 1).reshape(2, 2)
    balance = (even.mean(1) / even.max(1)).mean()
    said = plan.packs_text(Setup(2), order, lengths, "")
    assert f"{28 / 29 * 100:.1f}% of slots" in said and f"{balance * 100:.0f}%" in said.splitlines()[-1]
    said = plan.packs_text(Setup(2, accumulation=3, budget=32), order, lengths, "")
    assert f"{28 / (6 * 32) * 100:.1f}% of slots" in said and said.endswith("100%")
    assert "28 tokens an epoch; of a sample 1 at least, 4 in the middle" in said and "7 at most" in said


def test_checkpoints_at_once():
    """The newest, the best and the one being written; no more than there will be."""
    def most(steps, save, evaluate, limit, minutes=0):
        args = Namespace(save_steps=save, eval_steps=evaluate, save_total_limit=limit, save_minutes=minutes)
        return plan.checkpoints_at_once(args, steps, evaluate is not None)
    assert most(100, 10, None, 3) == 4 and most(100, 10, 20, 3) == 5
    assert most(100, 10, None, 0) == 11 and most(100, 10, 50, 0) == 13
    assert most(100, 50, None, 3, minutes=30) == 4      # more may come than by steps
    assert most(10, 0, 0, 3) == 1 and most(10, 10, 0, 3) == 2


def test_host_memory(tmp_path, monkeypatch):
    """What there is, and what a save copies: all on rank 0's node (DDP), or what its ranks own (FSDP2)."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemFree:  100 kB\nMemAvailable:    4194304 kB\n")
    for given, said in (({}, 4), ({"SLURM_MEM_PER_NODE": "2048"}, 2), ({"SLURM_MEM_PER_NODE": "0"}, 4)):
        monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert plan.host_memory(tmp_path / "meminfo") == said * GIB
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    full, sharded = Setup(16, adapters=False), Setup(16, "fsdp", adapters=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert plan.staged_bytes(full, 4, 8) == 12 * plan.ROUNDED       # of pinned memory
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:True,{plan.PINNED}:16")
    assert plan.staged_bytes(full, 4, 8) == 12 == plan.staged_bytes(replace(sharded, ranks=2), 4, 8)
    assert plan.staged_bytes(sharded, 4, 8) == 6 and plan.staged_bytes(replace(sharded, adapters=True), 4, 8) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert plan.staged_bytes(sharded, 4, 8) == 3


def test_what_a_gpu_s_kernels_are_built_with_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(plan.sysconfig, "get_path", lambda name: tmp_path / name)
    assert plan.lacking() == "C compiler and no Python.h"
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    assert plan.lacking() == "Python.h"
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").write_text("")
    assert not plan.lacking()


# ---------------------------------------------------------------------------------------------------------------------
# Memory of a model as large as Qwen3-4B

SIZES = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
LENGTHS = np.random.default_rng(0).integers(200, 2000, 20_000)
ALONE = World(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def students():
    """{LoRA: the empty PackedLM}."""
    found = {}
    for lora in (False, True):
        native = net = causal_lm.empty_model(transformers.Qwen3Config(**SIZES),
                                           torch.bfloat16 if lora else torch.float32,
                                           attention=document_attention.ATTENTION)
        if lora:
            net = adapters.add_lora(native, causal_lm.decoder_layers(native), 32, 32, 0.0, "all-linear", "base")
        found[lora] = packed_lm.PackedLM(net, None)
    return found


@pytest.mark.slow
def test_parts_of_the_memory(students):
    """16 bytes a value, over 8 GPUs two; offloaded none; gradients once more where accumulation goes between."""
    step, pack, values = chat_plan.step_of(students[False]), (4096, 2048), 4_022_468_096
    alone = step_memory.estimate(step, Setup(1, recompute="all"), pack)
    assert [alone.parts[name] / values for name in ("weights", "gradients", "optimizer")] == [4, 4, 8]
    assert alone.parts["copies"] == 0 and alone.parts["fixed"] == GIB
    sharded = step_memory.estimate(step, Setup(8, "fsdp", recompute="all"), pack)
    assert sum(sharded.parts[name] for name in ("weights", "gradients", "optimizer")) == 2 * values
    root, layer = 151936 * 2560 + 2560, (values - 151936 * 2560 - 2560) // 36
    assert sharded.parts["copies"] == 2 * (root + 3 * layer) and sharded.parts["fixed"] == 2 * GIB
    kept = step_memory.estimate(step, Setup(8, "fsdp", recompute="all", reshard=False), pack)
    assert kept.parts["copies"] == 2 * values
    away = step_memory.estimate(step, Setup(8, "fsdp", recompute="all", offload=True), pack)
    assert away.parts["weights"] == away.parts["optimizer"] == 0 and away.host == 2 * values
    more = step_memory.estimate(step, Setup(8, "fsdp", recompute="all", accumulation=2), pack)
    assert more.parts["gradients"] == 4.5 * values and more.peak - sharded.peak > 3.9 * values
    in_buckets = step_memory.estimate(step, Setup(2, recompute="all"), pack)        # of DDP, all the time
    assert in_buckets.peak > alone.peak + GIB


def chosen(tmp_path, model, gpus, gib, *words):
    """(flags as --auto sets them, which a dry run then prints)."""
    args = parse(train_sft.build_parser(), train_sft.check_flags, [
        "--model_path", "m", "--train_data_file", "d", "--output_dir", str(tmp_path), "--bf16", "--auto", "--dry_run",
        str(gpus), "--gpu_memory", str(gib), "--report_to", "none", "--global_batch_size", "1024", *words])
    chat_plan.choose(args, ALONE, gpus, model, LENGTHS, LENGTHS // 2)
    return (args.parallel, args.max_tokens_per_batch, args.gradient_checkpointing, args.gradient_accumulation_steps,
            args.cpu_offload)


@pytest.mark.slow
@pytest.mark.parametrize("gpus, gib, words, wanted", [
    (1, 24, (), ("fsdp", 2048, "all", 559, True)),      # the state alone is 60 GiB: on the host
    (8, 80, (), ("fsdp", 8192, None, 17, False)),
    (1, 24, ("--use_lora",), ("ddp", 4096, "selective", 276, False))], ids=str)
def test_choices_for_a_model_of_4b(students, tmp_path, capsys, gpus, gib, words, wanted):
    assert chosen(tmp_path, students["--use_lora" in words], gpus, gib, *words) == wanted
    said = capsys.readouterr().out.splitlines()
    assert re.match(rf"auto       the first that fits one GPU's {gib}.00 GiB, ", said[0])
    tried = [re.search(r"^ {11}(?:ddp|fsdp) .* ([\d.]+) GiB  (taken|too much)$", line) for line in said]
    found = [match.groups() for match in tried if match]
    fits = [float(peak) <= 0.95 * gib for peak, _ in found]
    assert not any(fits[:-1]) and [how == "taken" for _, how in found] == fits


@pytest.mark.parametrize("setup, activations, helps", [
    (Setup(1, adapters=False, offload=False, budget=4096), 0.05, "--parallel fsdp --cpu_offload, --use_lora"),
    (Setup(1, adapters=False, offload=False, budget=4096), 20, "--gradient_checkpointing, a smaller "
     "--max_tokens_per_batch, --parallel fsdp --cpu_offload, --use_lora"),
    (Setup(8, adapters=True, offload=False), 0.05, "--parallel fsdp, --parallel fsdp --cpu_offload"),
    (Setup(8, adapters=True, offload=False, whole=True, budget=1024), 20, "--gradient_checkpointing, a smaller "
     "--max_tokens_per_batch"),
    (Setup(8, "fsdp", adapters=True, offload=False, accumulation=2), 0.05, "--gradient_accumulation_steps 1, "
     "--cpu_offload"), (Setup(1), 20, "--gradient_checkpointing")], ids=str)
def test_advice_on_memory_names_what_helps(setup, activations, helps):
    """On one GPU sharding does not, and no pack where the state is too large. A margin of the GPU stays free."""
    found = Memory({"activations": activations * GIB}, {"the heads": 22.9 * GIB}, 0)
    with pytest.raises(UserError) as told:
        plan.check_memory(found, 24 * GIB, setup)
    assert str(told.value) == ("memory: about 22.90 GiB needed on each GPU, which has 24.00 GiB, 5 % of it left for "
                               f"fragmentation; what helps: {helps}")
    plan.check_memory(found, 24.2 * GIB, setup)


@pytest.mark.parametrize("words, installed, open_to", [
    ("--bf16 --use_lora", True, ("nf4", "fsdp")), ("--bf16 --use_lora", False, ("fsdp",)), ("--bf16", True, ("fsdp",)),
    ("--bf16 --use_lora --compile", True, ("fsdp",)), ("--bf16 --use_lora --parallel fsdp", True, ("fsdp",)),
    ("--fp16 --use_lora", True, ("nf4",)), ("--fp16", True, ()),
    ("--bf16 --use_lora --base_dtype nf4", True, ("nf4",))], ids=str)
def test_small_cards_are_told_of_nothing_that_is_refused(words, installed, open_to, monkeypatch):
    """By advice and by --auto alike, on one GPU and two; the plan says fp16 where it is."""
    find = plan.importlib.util.find_spec
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: (
        installed or None) if name == "bitsandbytes" else find(name))
    args = parse(train_sft.build_parser(), train_sft.check_flags, [
        "--model_path", "m", "--train_data_file", "d", "--dry_run", "2", "--report_to", "none", *words.split()])
    setup = plan.setup_of(args, 2)
    setup = replace(setup, parallel="fsdp" if "fsdp" in words else "ddp")
    with pytest.raises(UserError) as told:
        plan.check_memory(Memory({"activations": 0}, {"": 30 * GIB}, 0), 24 * GIB, setup)
    told = str(told.value).partition("what helps: ")[2]
    named = "--parallel" in words or "--base_dtype" in words
    assert ("--base_dtype nf4" in told) == (not named and (not installed or "nf4" in open_to)), told
    assert ("nf4 (pip install bitsandbytes)" in told) == (not installed)
    assert ("--parallel fsdp" in told) == ("fsdp" in open_to and not named), told
    for ranks in (1, 2):
        tried = list(plan.by_tokens(args, replace(setup, ranks=ranks), LENGTHS, lambda _: Namespace(packs_per_epoch=9)))
        assert ({"nf4"} if any(way.base_dtype for way in tried) else set()) == {"nf4"} & set(open_to)
        assert any(way.fsdp for way in tried) == ("fsdp" in open_to)
        assert not any(way.fsdp and way.base_dtype for way in tried)
    wide = "fp16" if "--fp16" in words else "bf16"
    assert f"ddp, {wide}\n" in plan.head_text(replace(setup, parallel="ddp"), torch.nn.Linear(2, 2))


def test_a_run_that_fits_nowhere_is_refused_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "gpu_memory", lambda gib: 24 * GIB)
    args = parse(Parser(), None, [])
    vars(args).update(auto=True, dry_run=None, gpu_memory=None, output_dir=str(tmp_path), resume="auto")
    with pytest.raises(UserError, match="memory: about 30.00 GiB needed on each GPU, which has 24.00 GiB"):
        plan.decide(args, ALONE, [Setup(1)], lambda setup: Memory({"activations": 0}, {"": 30 * GIB}, 0), None)


def test_a_longer_sample_makes_larger_packs():
    args = parse(train_sft.build_parser(), train_sft.check_flags, [
        "--model_path", "m", "--train_data_file", "d", "--auto", "--dry_run", "8", "--report_to", "none"])
    for longest, budget in ((900, 1024), (1025, 2048), (16384, 16384), (16385, 17408)):
        setups = plan.by_tokens(args, plan.setup_of(args, 8), np.array([10] * 1000 + [longest]),
                                lambda budget: Namespace(packs_per_epoch=10))
        assert {setup.budget for setup in setups} == {budget}


def test_rows_of_block_diffusion_are_split_over_any_number_of_ranks():
    """As few micro-steps as fit, none of fewer than 4,096 tokens; never less than a row."""
    args = parse(Parser(), None, [])
    args.compile = True

    def split(ranks, tokens=1024):
        found = block_plan.by_rows(args, Setup(ranks, accumulation=4, batch_size=43), 171, tokens)
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
        try:
            train_sft.main([str(word) for word in line])
        except SystemExit as ended:     # a dry run ends so
            if ended.code:
                raise
        return capfd.readouterr().out
    said = run("--max_steps", 1, "--gpu_memory", 80)
    assert re.search(r"ddp +2,048 tokens .*taken", said) and "a step: 1 rank x 2 micro-steps" in said
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state" / "state.json").read_text())
    flags = {name: state["args"][name] for name in (*plan.FLAGS, "packs_per_step")}
    assert flags == {"parallel": "ddp", "max_tokens_per_batch": 2048, "per_device_train_batch_size": 16,
                     "gradient_checkpointing": None, "gradient_accumulation_steps": 2, "packs_per_step": 2,
                     "base_dtype": None, "cpu_offload": False}
    assert state["identity"]["pack"] == "2048 tokens"
    said = run("--max_steps", 2, "--gpu_memory", 1)
    assert "as the run that is resumed began: --parallel ddp, --max_tokens_per_batch 2048" in said
    assert "done       step 2" in said
    assert "2 packs a step = 2 ranks x 1 micro-step" in run("--dry_run", 2, "--gpu_memory", 80)
    with pytest.raises(UserError, match="this run has 2 packs a step, which 3 ranks cannot share out"):
        run("--dry_run", 3)
