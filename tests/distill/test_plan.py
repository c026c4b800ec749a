"""--dry_run of the chat trainer: what it counts is what a real step has alive."""
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from core.dist import World
from core.cli import parse
from core.memory import Setup, step_bytes
from core import adapters, document_attention
from core.packing import PackOrder
from distill import causal_lm, chat_data, packed_lm, plan
from tests.helpers.students import train_sft
from tests.helpers import chats, students
from tests.helpers.live_bytes import by_lengths, real_peak

SIZES = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6,
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
        native = net = causal_lm.empty_model(MODELS[kind], torch.bfloat16 if lora and bf16 else torch.float32,
                                           attention=document_attention.ATTENTION)
        if lora:
            net = adapters.add_lora(native, causal_lm.decoder_layers(native), 8, 16, dropout, "all-linear", "base")
        models.append(packed_lm.PackedLM(net, recompute, **more).train())
    causal_lm.give_memory(models[1], "cpu")
    for parameter in models[1].parameters():
        torch.nn.init.normal_(parameter, 0, 0.05)
    return models[0], models[1].to(torch.bfloat16) if bf16 and sharded else models[1]


def batch_of(documents, n, trained):
    """PackedChats of documents of n tokens, of which the last ones are trained."""
    mask = np.arange(n) >= n - trained
    return chat_data.collate([(i, np.arange(n) % 250, mask.copy()) for i in range(documents)])


@pytest.mark.slow
@pytest.mark.parametrize("kind, lora, bf16, recompute", [
    ("qwen", True, True, "selective"), ("llama", True, True, None), ("gemma", False, True, "all"),
    ("moe", True, True, None), ("wide", True, False, "all")])
def test_what_is_counted_is_what_a_real_step_has_alive(kind, lora, bf16, recompute, monkeypatch):
    """Within 3 %, activations, logits, casts and gradients; of six layers four are run."""
    monkeypatch.setattr(document_attention, "_attention_by_document", by_lengths([150] * 4))
    empty, model = built(kind, lora, bf16, False, recompute, dropout=0.1)
    batch = batch_of(4, 150, 120)
    empty.chunk = model.chunk = 200
    peak = real_peak(model, batch, lambda model, batch: model(batch)[0], bf16)
    setup = Setup(1, bf16=bf16, recompute=recompute)
    found = step_bytes(plan.step_of(empty), setup, (600, len(batch.rows)), gpu=False)
    assert max(found.values()) == pytest.approx(peak, rel=0.03)


@pytest.mark.slow
def test_packs_of_keep_are_counted(monkeypatch):
    """Answers of the untouched base beside them; 600 tokens where training has 200."""
    monkeypatch.setattr(document_attention, "_attention_by_document", lambda q, *others: by_lengths(
        [150] * 4 if len(q) == 600 else [len(q)])(q, *others))
    empty, model = built("qwen", True, True, False, None)
    empty.chunk = model.chunk = 200
    batch = chat_data.kept([(i, np.arange(150) % 250, np.arange(150) >= 30) for i in range(4)])
    peak = real_peak(model, batch, lambda model, batch: model(batch).loss, True)
    setup = Setup(1, batch_size=4)
    counted = max(step_bytes(plan.step_of(empty), setup, (600, 480, True), gpu=False).values())
    assert counted == pytest.approx(peak, rel=0.03)
    order = PackOrder(np.full(8, 50), tokens_per_pack=0, samples_per_pack=4, seed=1)
    few, both, many = (plan.memory(empty, setup, np.full(8, each), np.full(8, each - 10), order, kept=kept)[0].parts
                       for each, kept in ((50, None), (50, SimpleNamespace(lengths=np.full(8, 150),
                                                                           targets=np.full(8, 120))), (150, None)))
    assert few["activations"] < 0.6 * many["activations"] < both["activations"] * 0.7


def test_auto_takes_packs_that_hold_the_longest_of_keep(tmp_path, capsys):
    """Which may be longer than any that is trained on, and than the largest budget."""
    empty, _ = built("qwen", True, False, False, None)
    empty.chunk = 20480
    for longest, budget in ((5000, 8192), (20000, 20480)):
        args = parse(train_sft.build_parser(), train_sft.check_flags, [
            "--model_path", "m", "--train_data_file", "d", "--output_dir", str(tmp_path), "--use_lora", "--auto",
            "--dry_run", "1", "--report_to", "none", "--prompt_file", "p", "--keep", "k", "--global_batch_size", "8"])
        kept = SimpleNamespace(lengths=np.array([60, longest]), targets=np.array([30, 30]))
        plan.choose(args, World(device=torch.device("cpu")), 1, empty, np.full(40, 50), np.full(40, 40), kept)
        assert args.max_tokens_per_batch == budget, capsys.readouterr().out


def test_sharded_weights_are_computed_on_in_bfloat16(monkeypatch):
    """Nothing is cast, and the stream of the layers is as wide as they are."""
    monkeypatch.setattr(document_attention, "_attention_by_document", by_lengths([150] * 4))
    empty, model = built("qwen", True, True, True, None)
    peak = real_peak(model, batch_of(4, 150, 20), lambda model, batch: model(batch)[0], True)
    found = step_bytes(plan.step_of(empty), Setup(1, "fsdp"), (600, 80), gpu=False)
    assert max(found.values()) == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("k", [0, 20])
@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_logits_of_a_prompted_teacher_are_counted(kind, k):
    """A student's and a teacher's, and what a divergence makes of them: copies of (targets, vocabulary) in fp32."""
    empty, _ = built("wide", True, False, True, None, prompted=(1.0, kind, 0.5, k))
    few, many = (max(step_bytes(plan.step_of(empty), Setup(1, bf16=False), (600, targets)).values())
                 for targets in (256, 512))
    copies = (many - few) / (4 * 256 * 4000)
    assert copies == pytest.approx({"forward": 8, "reverse": 8, "js": 12}[kind] if not k else 6, abs=0.5)


def test_counting_leaves_the_model_as_it_was():
    empty, model = built("qwen", False, False, True, "all")
    batch = batch_of(3, 40, 9)
    with torch.no_grad():
        before = model(batch)[0].item()
    for counted in (model, empty):
        step_bytes(plan.step_of(counted), Setup(1, "fsdp", recompute="selective"), (120, 27))
    with torch.no_grad():
        assert model(batch)[0].item() == before
    layers = causal_lm.decoder_layers(model.native)
    assert len(layers) == 6 and all(layer.gradient_checkpointing and not layer._forward_hooks for layer in layers)


def test_flash_attention_and_fused_kernels_keep_less_than_the_cpu(monkeypatch):
    """Grouped keys and values as they are, no output of silu, no norms in fp32."""
    monkeypatch.setattr(document_attention, "_attention_by_document", by_lengths([150] * 4))
    step = plan.step_of(built("qwen", False, True, True, None)[0])
    cpu, gpu = (step_bytes(step, Setup(1, "fsdp"), (600, 20), gpu=gpu)["the heads"] for gpu in (False, True))
    assert gpu < 0.8 * cpu


def test_the_printed_table(tmp_path, capsys):
    """The worst pack decides, the parts are there, and what should lower the peak does."""
    chats.student(tmp_path / "qwen", hidden_size=96, intermediate_size=256, head_dim=16)
    chats.write(tmp_path / "chats.jsonl", chats.conversations(20))

    def said(*flags):
        students.plan_run([
            "--model_path", tmp_path / "qwen", "--train_data_file", tmp_path / "chats.jsonl", "--output_dir",
            tmp_path / "out", "--report_to", "none", "--per_device_train_batch_size", 8, *flags,
            "--gradient_accumulation_steps", 1])
        return capsys.readouterr().out

    text = said()
    tokens, = map(int, re.findall(r"activations .*worst pack, (\d+) tokens", text))
    assert re.search(r"peak estimate +[\d.]+ GiB  reached in (the heads|a layer's backward|the embedding's)", text)
    assert ", recomputed by layer" not in text
    assert int(re.search(r"worst pack, (\d+) tokens, recomputed", said("--gradient_checkpointing"))[1]) == tokens
    assert "worst pack, 300 tokens" in said("--max_tokens_per_batch", 300)
