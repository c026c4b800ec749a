"""core/memory.py: packs, memory, what is refused; --auto, and that a resumed run keeps its choice."""
import json
import re

import pytest
import torch
import transformers

from core import adapters, document_attention, memory
from core.cli import UserError, parse
from core.dist import World
from core.memory import GIB, Memory, Setup
from distill import causal_lm, packed_lm
from distill import plan as chat_plan
from tests.helpers import chats
from tests.helpers.students import train_sft

SIZES = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}     # Qwen3-4B


ALONE = World(device=torch.device("cpu"))


def flags(*words):
    """Flags of the chat trainer for a dry run."""
    return parse(train_sft.build_parser(), train_sft.check_flags, [
        "--model_path", "m", "--train_data_file", "d", "--report_to", "none", "--dry_run", *map(str, words)])


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
    """16 bytes a value, over 8 GPUs two; offloaded none; gradients once more where they accumulate."""
    step, pack, values = chat_plan.step_of(students[False]), (4096, 2048), 4_022_468_096
    alone = memory.estimate(step, Setup(1, recompute="all"), pack)
    assert [alone.parts[name] / values for name in ("weights", "gradients", "optimizer")] == [4, 4, 8]
    assert alone.parts["copies"] == 0 and alone.parts["fixed"] == GIB
    sharded = memory.estimate(step, Setup(8, "fsdp", recompute="all"), pack)
    assert sum(sharded.parts[name] for name in ("weights", "gradients", "optimizer")) == 2 * values
    root, layer = 151936 * 2560 + 2560, (values - 151936 * 2560 - 2560) // 36
    assert sharded.parts["copies"] == 2 * (root + 3 * layer) and sharded.parts["fixed"] == 2 * GIB
    kept = memory.estimate(step, Setup(8, "fsdp", recompute="all", reshard=False), pack)
    assert kept.parts["copies"] == 2 * values
    away = memory.estimate(step, Setup(8, "fsdp", recompute="all", offload=True), pack)
    assert away.parts["weights"] == away.parts["optimizer"] == 0 and away.host == 2 * values
    more = memory.estimate(step, Setup(8, "fsdp", recompute="all", accumulation=2), pack)
    assert more.parts["gradients"] == 4.5 * values and more.peak - sharded.peak > 3.9 * values
    in_buckets = memory.estimate(step, Setup(2, recompute="all"), pack)        # DDP's, all the time
    assert in_buckets.peak > alone.peak + GIB


def test_a_run_that_fits_nowhere_is_refused_before_it_starts(tmp_path, monkeypatch):
    args = flags(1, "--auto", "--gpu_memory", 24, "--output_dir", tmp_path)
    args.dry_run = None
    with pytest.raises(UserError, match="memory: about 30.00 GiB needed on each GPU, which has 24.00 GiB"):
        memory.choose(args, ALONE, 1, [Setup(1)], lambda setup: Memory({}, {"": 30 * GIB}, 0))


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
    text = run("--max_steps", 1, "--gpu_memory", 80)
    assert re.search(r"ddp +2,048 tokens .*taken", text) and "1 rank x 2 micro-steps" in text
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state" / "state.json").read_text())
    found = {name: state["args"][name] for name in (*memory.FLAGS, "packs_per_step")}
    assert found == {"parallel": "ddp", "max_tokens_per_batch": 2048, "per_device_train_batch_size": 16,
                     "gradient_checkpointing": None, "gradient_accumulation_steps": 2, "packs_per_step": 2,
                     "base_dtype": None, "cpu_offload": False}
    assert state["identity"]["pack"] == "2048 tokens"
    text = run("--max_steps", 2, "--gpu_memory", 1)
    assert "as the run that is resumed began: --parallel ddp, --max_tokens_per_batch 2048" in text
    assert "done       step 2" in text
    text = run("--dry_run", 2, "--gpu_memory", 80)
    assert "2 packs a step = 2 ranks x 1 micro-step" in text
    assert re.search(r"^FITS \d\.\d of 80\.0 GiB · 2 steps$", text, re.M), text
    with pytest.raises(UserError, match="this run has 2 packs a step, which 3 ranks cannot share out"):
        run("--dry_run", 3)
