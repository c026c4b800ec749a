"""Whole runs of train_sft.py against a plain trainer that calls transformers' forward sample by sample; bad input.

A run's name is "student method mode ranks x samples x micro-steps flags". Each run is trained once, on first use.
"""
import json
import math
import re
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from core import checkpoint, json_files
from core.cli import UserError
from core.packing import PackOrder
from tests.helpers import chats, students
from tests.helpers.scripts import ASKED_AT
from tests.helpers.runs import CLOCK, CUTS, assert_same_bits, moments, newest, rows, tensors
from tests.helpers.students import HELD_OUT, SEED, sample_loss
from tests.helpers.trainer import RUN_SCRIPT, Run

LR, STEPS = 2e-3, 5
# 20 of 24 samples are trained, 8 a step: an epoch's third step has 4, so some ranks get empty packs
COMMON = {"learning_rate": LR, "max_steps": STEPS, "logging_steps": 1, "warmup_ratio": 0.4, "weight_decay": 0.1,
          "eval_steps": 2, "validation_split": HELD_OUT, "per_device_eval_batch_size": 3, "num_workers": 0,
          "save_steps": 0, "save_total_limit": 1, "report_to": "none", "seed": SEED}
BUDGET, LORA = 160, ("--use_lora", "--lora_rank", 5)
METHODS = {"full": (), "lora": LORA, "packs": (*LORA, "--max_tokens_per_batch", BUDGET),
           "dropout": (*LORA, "--lora_dropout", 0.2)}
SERVED = ["--teacher_url", "u", "--teacher_path", ".", "--distill_topk", "5"]
SAVES = "--save_steps 1 --save_total_limit 0"
EVERY = f"{SAVES} --logging_steps 2"
FORGOTTEN = CLOCK | {"train/padding"}     # a resumed run does not know the padding of earlier packs
QWEN = f"qwen full fsdp 2x4x1 {SAVES}"


def arguments(inputs, output_dir, name, *more):
    """(ranks, command line) of a run's name; flags override COMMON."""
    student, method, mode, split, *flags = name.split()
    ranks, samples, micro_steps = map(int, split.split("x"))
    batch = [] if method == "packs" else ["--per_device_train_batch_size", samples]
    return ranks, [str(word) for word in (
        *(word for name, value in COMMON.items() for word in (f"--{name}", value)), *METHODS[method], *batch,
        "--model_path", inputs / student, "--train_data_file", inputs / "chats.jsonl", "--parallel", mode,
        "--gradient_accumulation_steps", micro_steps, "--output_dir", output_dir,
        "--logging_dir", f"{output_dir}-logs", *flags, *more)]


def complete(pool, inputs, output_dir, name, *more):
    """Train to the end; returns the Run."""
    ranks, line = arguments(inputs, output_dir, name, *more)
    statuses, output = pool.run(ranks, RUN_SCRIPT, students.SCRIPT, line)
    assert not any(statuses), output
    return Run(0, output, output_dir)


@pytest.fixture(scope="module")
def shared(pool, inputs, tmp_path_factory):
    """shared(name) -> the Run, trained on first use. Read only."""
    root, done = tmp_path_factory.mktemp("shared"), {}

    def get(name):
        if name not in done:
            done[name] = complete(pool, inputs, root / re.sub(r"\W+", "-", name), name)
        return done[name]
    return get


def assert_close(actual, expected):
    """Weights are equal up to rounding, which Adam turns into part of a step where gradients are tiny."""
    assert actual.keys() == expected.keys() and actual
    for name in actual:
        difference = (actual[name] - expected[name]).abs()
        assert difference.mean() < 2e-3 * LR and difference.max() < 0.1 * LR, (name, difference.max())


def assert_same_run(run, other):
    """The same losses, gradient norms, validations, weights and moments up to float rounding."""
    for actual, expected in zip(rows(run, without=CLOCK | CUTS), rows(other, without=CLOCK | CUTS), strict=True):
        assert actual == pytest.approx(expected, rel=2e-4, abs=1e-6)
    assert_close(tensors(run), tensors(other))
    for name, actual in moments(run).items():     # sums of float32 gradients, whose order differs
        torch.testing.assert_close(actual, moments(other)[name], rtol=2e-5, atol=2e-5)


def mean_loss(model, table, numbers):
    """Mean loss of all trained tokens of the samples."""
    with torch.no_grad():
        return sum(sample_loss(model, table, n)[0].item() for n in numbers) / table.targets[numbers].sum()


def reference_run(model, table, numbers):
    """Train the model in place: 8 samples a step, AdamW, warm-up and cosine. Returns [(loss, gradient norm)]."""
    named = dict(model.named_parameters())
    decay = [name for name, p in named.items() if p.ndim > 1 and "embed" not in name]
    optimizer = torch.optim.AdamW([{"params": [named[n] for n in decay], "weight_decay": COMMON["weight_decay"]},
                                   {"params": [p for n, p in named.items() if n not in decay], "weight_decay": 0}],
                                  lr=LR, betas=(0.9, 0.95), eps=1e-8)
    order, losses = PackOrder(table.lengths[numbers], samples_per_pack=8, seed=SEED), []
    for step in range(STEPS):
        chosen = numbers[order.window(step // 3, step % 3)]
        loss = sum(sample_loss(model, table, n)[0] for n in chosen) / int(table.targets[chosen].sum())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = (step + 1) / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 3))
        for group in optimizer.param_groups:
            group["lr"] = LR * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), norm.item()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", [QWEN, "llama full fsdp 2x2x2", "window full ddp 1x8x1",
                                  "moe full fsdp 2x4x1"])
def test_a_run_equals_the_plain_trainer(shared, data, inputs, name):
    run, student = shared(name), name.split()[0]
    table, train, held_out = data(student)
    model = AutoModelForCausalLM.from_pretrained(inputs / student).train()
    losses, norms = zip(*reference_run(model, table, train))
    assert list(run.metrics("train/loss").values()) == pytest.approx(losses, rel=2e-5)
    assert list(run.metrics("train/grad_norm").values()) == pytest.approx(norms, rel=1e-4)
    saved = AutoModelForCausalLM.from_pretrained(newest(run))
    assert_close(saved.state_dict(), model.state_dict())
    assert run.metrics("eval/loss")[STEPS] == pytest.approx(mean_loss(saved, table, held_out), rel=1e-5)
    right = sum(sample_loss(saved, table, n)[1].item() for n in held_out)
    assert run.metrics("eval/accuracy")[STEPS] == pytest.approx(right / table.targets[held_out].sum())
    losses = list(run.metrics("eval/loss").values())
    assert losses[-1] < losses[0], "it learns"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen full ddp 1x4x2 --gradient_checkpointing --num_workers 1",
                                  "qwen full fsdp 2x2x2 --gradient_checkpointing --cpu_offload"])
def test_any_split_trains_the_same(shared, name):
    assert_same_run(shared(name), shared(QWEN))


@pytest.mark.slow
def test_adapters_on_packs_to_a_budget_train_the_same(shared):
    one_rank, two_ranks = shared("llama packs ddp 1x0x2"), shared("llama packs fsdp 2x0x1")
    assert_same_run(one_rank, two_ranks)
    assert one_rank.metrics("train/padding") == two_ranks.metrics("train/padding")


@pytest.mark.slow
def test_experts_train_the_same(shared, inputs):
    """The split changes nothing, though some experts get no tokens on a rank. Tensors have the base's names."""
    full, adapted = shared("moe full fsdp 2x4x1"), shared("moe lora ddp 1x8x1")
    assert_same_run(shared("moe full ddp 2x2x2 --gradient_checkpointing"), full)
    base = load_file(inputs / "moe" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors(full).items()} == {
        name: tensor.shape for name, tensor in base.items()} and "model.layers.1.mlp.experts.4.up_proj.weight" in base
    ends = {name.split(".")[-3] for name in tensors(adapted, "adapter_model")}
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_saved_adapter_loads_in_peft(shared, data, inputs):
    run, (table, train, held_out) = shared("llama packs fsdp 2x0x1"), data("llama")
    base = AutoModelForCausalLM.from_pretrained(inputs / "llama")
    before = mean_loss(base, table, held_out)
    first = train[PackOrder(table.lengths[train], tokens_per_pack=BUDGET, seed=SEED).window(0, 0, 2)]
    assert run.metrics("train/loss")[1] == pytest.approx(mean_loss(base, table, first), rel=1e-5), "starts as base"
    model = PeftModel.from_pretrained(base, newest(run))
    assert run.metrics("eval/loss")[STEPS] == pytest.approx(mean_loss(model, table, held_out), rel=1e-5)
    assert mean_loss(model, table, held_out) < before - 1e-3
    ends = {name.split(".")[-3] for name in tensors(run, "adapter_model")}
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert AutoTokenizer.from_pretrained(newest(run)).chat_template == chats.LLAMA


def test_transformers_generates_from_a_checkpoint(shared, inputs):
    folder = newest(shared(QWEN))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config._attn_implementation == "sdpa", "nothing of the packed attention is left in it"
    prompt = tokenizer.apply_chat_template(chats.ask("x", "en")[:1], add_generation_prompt=True, return_tensors="pt",
                                           return_dict=True)
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] <= prompt["input_ids"].shape[1] + 2
    assert tokenizer.chat_template == chats.QWEN


@pytest.mark.slow
def test_resumed_is_uninterrupted(pool, inputs, shared, tmp_path):
    """Runs resumed in the middle of an epoch and at its end have the same bits."""
    name = "llama dropout ddp 2x2x2"
    whole = shared(f"{name} {EVERY}")
    for step in (2, 3):
        output_dir = tmp_path / f"from-{step}"
        output_dir.mkdir()
        shutil.copytree(whole.output_dir / f"checkpoint-{step}", output_dir / f"checkpoint-{step}")
        resumed = complete(pool, inputs, output_dir, name, "--logging_steps", 2)
        assert f"resumed from {output_dir}/checkpoint-{step}" in resumed.output
        assert_same_bits(resumed, whole, step, FORGOTTEN)


def test_another_number_of_ranks_resumes(pool, inputs, shared, tmp_path):
    shutil.copytree(shared(QWEN).output_dir / "checkpoint-2", tmp_path / "checkpoint-2")
    resumed = complete(pool, inputs, tmp_path, "qwen full ddp 1x4x2")
    assert f"resumed from {tmp_path}/checkpoint-2" in resumed.output
    for actual, expected in zip(rows(resumed, 2, CLOCK | CUTS), rows(shared(QWEN), 2, CLOCK | CUTS), strict=True):
        assert actual == pytest.approx(expected, rel=2e-4)
    assert_close(tensors(resumed), tensors(shared(QWEN)))


@pytest.mark.slow
def test_a_validation_interrupted_by_a_signal_is_repeated(pool, inputs, shared, tmp_path):
    """It is interrupted twice. Log, best loss and final weights equal those of a run without signals."""
    name = "moe lora ddp 1x8x1"
    _, line = arguments(inputs, tmp_path, name)
    for _ in range(2):      # the loaders are of data preparation, training and a validation
        statuses, output = pool.run(1, ASKED_AT, students.SCRIPT, line, "core.packing", "run_ahead", 3)
        assert statuses == [0] and "at step 2 of 5; checkpoint saved" in output, output
    resumed = complete(pool, inputs, tmp_path, name)
    assert_same_bits(resumed, shared(name), 0, FORGOTTEN)
    metas = [json_files.read_object(newest(run) / checkpoint.STATE / "state.json") for run in (resumed, shared(name))]
    assert [metas[0][key] for key in ("best_step", "best_loss", "eval_due")] == [
        metas[1][key] for key in ("best_step", "best_loss", "eval_due")]


def plan(inputs, output_dir, *flags, student="qwen"):
    _, line = arguments(inputs, output_dir, f"{student} full fsdp 1x8x1", *flags)
    students.plan_run(line)


def test_a_frozen_base_is_planned(inputs, tmp_path, capsys):
    """All weights are trained, so --keep needs a copy of the base."""
    plan(inputs, tmp_path / "out", "--keep", inputs / "chats.jsonl")
    assert "+ teacher " in capsys.readouterr().out


@pytest.mark.parametrize("flags, message", [
    (["--use_lora", "--lora_target_modules", "qkv"], "'qkv' matches no linear layer; use all-linear or out of: down_"),
    (["--use_lora", "--lora_target_modules", "gate_up_proj", "--model_path", "MOE"], "'gate_up_proj' matches no"),
    ([*SERVED, "--divergence", "reverse"], "--divergence reverse needs"),
    (["--teacher_name", "n"], "needs --teacher_url"),
    (["--teacher_path", "QWEN"], "reads what the student reads, so there is nothing to learn"),
    (["--teacher_path", "MOE", "--distill_topk", "401"], "--distill_topk 401: the models have 401 tokens"),
    ([*SERVED, "--teacher_url", "http://h/v1?key=x"], "--teacher_url: holds a name and password (@), ?... or #...")])
def test_bad_flags(inputs, tmp_path, flags, message):
    with pytest.raises(UserError, match=re.escape(message)):
        plan(inputs, tmp_path, *[
            flag.replace("MOE", f"{inputs}/moe").replace("QWEN", f"{inputs}/qwen") for flag in flags])


def spoil(folder, kind):
    if isinstance(kind, dict):
        config = json.loads((folder / "config.json").read_text()) | kind
        (folder / "config.json").write_text(json.dumps(config))
        return
    stored, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    if kind == "missing":
        del stored[name]
    elif kind == "shape":
        stored[name] = stored[name][:-1].contiguous()
    else:
        stored[kind] = stored["model.embed_tokens.weight"] + 0.1
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("kind, message", [
    ("missing", "1 missing keys, first model.layers.1.mlp.up_proj.weight"), ("stray", "1 unexpected keys, first stray"),
    ("shape", "up_proj.weight (42, 36) instead of (43, 36)"), ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ({"quantization_config": {"quant_method": "fp8"}}, "is quantised; give the unquantised model"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
     "its dynamic rotary embedding depends on the longest document"),
    ({"num_attention_heads": 0}, "/qwen: "),
    ("lm_head.weight", "other values for lm_head.weight than for model.embed_tokens.weight")])
def test_bad_models(inputs, tmp_path, kind, message):
    shutil.copytree(inputs / "qwen", tmp_path / "qwen")
    spoil(tmp_path / "qwen", kind)
    with pytest.raises(UserError, match=re.escape(message)):
        plan(inputs, tmp_path / "out", "--model_path", str(tmp_path / "qwen"))


def test_another_runs_checkpoint_is_refused(pool, inputs, shared, tmp_path):
    source = newest(shared(QWEN))
    shutil.copytree(source, tmp_path / "out" / source.name)
    for flags, message in ((["--seed", 1], "another seed"), (["--per_device_train_batch_size", 3], "another pack"),
                        (["--use_lora"], "another set of trained weights"),
                        (["--model_path", inputs / "window"], "another base model"),
                        (["--keep", inputs / "chats.jsonl"], "another teacher")):
        with pytest.raises(UserError, match=message):
            plan(inputs, tmp_path / "out", "--per_device_train_batch_size", 4, *flags)
