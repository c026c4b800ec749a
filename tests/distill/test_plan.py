"""--dry_run of the student trainer: its estimate of activations and logits against what a real step leaves alive."""
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from common import adapters, document_attention, memory
from distill import dataset, packed_lm, plan, train_sft, weights
from tests.helpers import chats
from tests.helpers.live_bytes import LiveBytes

SIZES = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
MODELS = {"qwen": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
          "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
          "wide": transformers.Qwen3Config(**SIZES | {"vocab_size": 4000, "num_hidden_layers": 1}),
          "gemma": transformers.Gemma3TextConfig(**SIZES, sliding_window=64),
          "moe": transformers.Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)}


def built(kind, lora, bf16, sharded, recompute, dropout=0.0, **more):
    """(PackedLM as its flags make it, on the meta device; the same with memory, in the dtype that it computes on)."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        native = net = weights.empty_model(MODELS[kind], torch.bfloat16 if lora and bf16 else torch.float32,
                                             attention=document_attention.ATTENTION)
        if lora:
            net = adapters.add_lora(native, weights.decoder_layers(native), 8, 16, dropout, "all-linear", "base")
        models.append(packed_lm.PackedLM(net, recompute, **more).train())
    weights.give_memory(models[1], "cpu")
    for parameter in models[1].parameters():
        torch.nn.init.normal_(parameter, 0, 0.05)
    return models[0], models[1].to(torch.bfloat16) if bf16 and sharded else models[1]


def batch_of(documents, n, trained, topk=0):
    """PackedChats of documents of n tokens, of which the last ones are trained."""
    mask = np.arange(n) >= n - trained
    teacher = (np.arange(n - trained, n), np.tile(np.arange(topk), (trained, 1)),
               np.log(np.full((trained, topk), 0.9 / max(1, topk))))
    return dataset.collate([(i, np.arange(n) % 250, mask.copy(), teacher) for i in range(documents)], topk=topk)


def real_step(model, batch, bf16):
    """(bytes alive at the end of the forward pass, peak of both passes) beside weights and batch."""
    known = [*model.parameters(), *model.buffers(), *(v for v in vars(batch).values() if isinstance(v, torch.Tensor))]
    with LiveBytes(known) as memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(batch)[0]
            kept = memory.now
        loss.backward()
    return kept, memory.peak


@pytest.mark.slow
@pytest.mark.parametrize("kind, lora, bf16, sharded, recompute", [
    ("qwen", False, False, True, None), ("qwen", False, True, True, "all"), ("qwen", False, True, False, None),
    ("qwen", True, False, True, "all"), ("qwen", True, True, True, None), ("qwen", True, True, False, "all"),
    ("llama", False, True, True, None), ("llama", False, False, True, "all"), ("llama", True, True, False, None),
    ("llama", True, True, True, "all"), ("gemma", False, True, True, None), ("qwen", False, False, True, "selective"),
    ("qwen", True, True, False, "selective"), ("gemma", False, True, True, "selective"),
    ("moe", False, False, True, "selective"), ("moe", False, True, False, None), ("moe", True, True, True, None)])
def test_activations_are_what_a_step_keeps(kind, lora, bf16, sharded, recompute):
    """Within 10 %, and the peak of the whole step from the stages that are printed."""
    empty, model = built(kind, lora, bf16, sharded, recompute)
    batch = batch_of(4, 150, 20)
    kept, peak = real_step(model, batch, bf16)
    one = plan.row_bytes(empty, bf16, sharded, gpu=False)
    rows, tokens, value = len(batch.rows), len(batch.input_ids), 2 if bf16 else 4
    casts = 0 if sharded or not bf16 else 2 * sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2
                                                  and p.dtype == torch.float32 and "embed" not in n
                                                  and "lm_head" not in n and not (recompute and "lora_B" in n))
    head = rows * value * 96 + 4 * 300 * 96 * (not lora)        # its gradients, that of the weight in fp32
    (a_token,), (layer,) = memory.kept_bytes(one, MODELS[kind].num_hidden_layers, recompute)
    estimate = tokens * a_token
    assert estimate == pytest.approx(kept - casts - head, rel=0.1)
    logits = plan.LOGIT_COPIES[False] * 4 * rows * 300
    parts = memory.memory_parts([(0, 0, 0)], casts=(casts, 0)) | {"fixed": 0}
    stages = memory.peak_stages(parts, estimate + rows * value * 96, tokens * layer, logits, recompute)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert max(stages.values()) * 0.9 < peak < (max(stages.values()) + gradients) * 1.1


def test_dropout_of_adapters_is_counted():
    empty, model = built("qwen", True, False, True, None, dropout=0.1)
    kept, _ = real_step(model, batch_of(4, 150, 5), False)
    one = plan.row_bytes(empty, False, True, gpu=False)
    assert 600 * (one["layers"] + one["ends"]) == pytest.approx(kept - 20 * 4 * 96, rel=0.1)
    without = plan.row_bytes(built("qwen", True, False, True, None)[0], False, True, gpu=False)
    assert one["layers"] > 1.1 * without["layers"]


@pytest.mark.parametrize("topk", [0, 3])
@pytest.mark.parametrize("trained", [140, 60])
def test_logits_are_the_peak_of_many_rows(topk, trained):
    """Whole, and in pieces of which one at a time has logits."""
    empty, model = built("wide", True, False, True, "all", share=0.5 if topk else 0.0)
    batch = batch_of(2, 150, trained, topk)
    model.chunk = 200
    _, peak = real_step(model, batch, False)
    one, rows = plan.row_bytes(empty, False, True, gpu=False), len(batch.rows)
    logits = plan.LOGIT_COPIES[bool(topk)] * 4 * min(rows, 200) * 4000
    assert 300 * (one["inputs"] + one["ends"]) + rows * 4 * 96 + logits == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("k", [0, 20])
@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_logits_of_student_and_prompted_teacher_are_counted(kind, k):
    torch.manual_seed(0)
    hidden, teacher = torch.randn(2, 100, 4).unbind()
    hidden, weight, targets = hidden.clone().requires_grad_(), torch.randn(9000, 4), torch.randint(0, 9000, (100,))
    with LiveBytes([hidden, weight, targets, teacher]) as live:
        loss, *_ = packed_lm.chunked_loss(hidden, weight, None, targets, 100, (teacher,), 0.7, (kind, 0.5, k))
        loss.backward()
    copies = plan.logit_copies(SimpleNamespace(prompted=(kind, 0.5, k)))
    assert live.peak == pytest.approx(copies * 4 * 100 * 9000, rel=0.02)


def test_counting_leaves_the_model_as_it_was():
    empty, model = built("qwen", False, False, True, "all")
    batch = batch_of(3, 40, 9)
    with torch.no_grad():
        before = model(batch)[0].item()
        plan.row_bytes(empty, True, True)
        plan.row_bytes(model, False, False)
        assert model(batch)[0].item() == before
    layers = weights.decoder_layers(model.native)
    assert all(layer.gradient_checkpointing and not layer._forward_hooks for layer in layers)


def test_what_does_not_belong_to_tokens_is_not_counted(monkeypatch):
    """Weights and their casts: another number of tokens gives the same bytes a token."""
    empty, _ = built("qwen", False, True, False, None)
    one = plan.row_bytes(empty, True, False)
    monkeypatch.setattr(memory, "TRIAL", 2003)
    assert plan.row_bytes(empty, True, False) == one


def test_flash_attention_keeps_less_than_the_cpu():
    """Grouped keys and values as they are where torch's kernel takes them, no second output, and common/fused.py."""
    empty, _ = built("qwen", False, True, True, None)
    cpu, gpu = (plan.row_bytes(empty, True, True, gpu=gpu)["layer"] for gpu in (False, True))
    repeated = 2 * 2 * (6 - 2) * 16 if document_attention.VARLEN_GQA else 0
    mlp = 2 * MODELS["qwen"].intermediate_size      # silu's output
    assert cpu - gpu > repeated + 2 * 6 * 16 + mlp


def test_the_printed_table(tmp_path, capsys):
    """The worst pack decides, the parts are there, and what should lower the peak does."""
    chats.student(tmp_path / "qwen", hidden_size=96, intermediate_size=256, head_dim=16)
    chats.write(tmp_path / "chats.jsonl", chats.conversations(20))

    def said(*flags):
        args = train_sft.build_parser().parse_args([str(word) for word in (
            "--model_path", tmp_path / "qwen", "--train_data_file", tmp_path / "chats.jsonl", "--output_dir",
            tmp_path / "out", "--report_to", "none", "--per_device_train_batch_size", 8, *flags,
            "--gradient_accumulation_steps", 1, "--dry_run", 2)])
        train_sft.check_flags(args, 2)
        train_sft.train(args)
        return capsys.readouterr().out

    text = said()
    tokens, = map(int, re.findall(r"activations .*worst pack, (\d+) tokens", text))
    assert re.search(r"peak estimate +[\d.]+ GiB  reached in (the heads|a layer's backward|the last reduction)", text)
    assert ", recomputed by layer" not in text and "not estimated" not in text
    assert int(re.search(r"worst pack, (\d+) tokens, recomputed", said("--gradient_checkpointing"))[1]) == tokens
    assert "worst pack, 300 tokens" in said("--max_tokens_per_batch", 300)
