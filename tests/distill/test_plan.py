"""--dry_run of the chat trainer plans the peak memory of a real step."""
import numpy as np
import pytest
import torch
import transformers

from core import adapters, kernels, memory
from distill import causal_lm, chat_data, packed_lm, plan
from tests.helpers.live_bytes import by_lengths, check_plan, run_flags

SIZES = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
MODELS = {"qwen": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
          "gemma": transformers.Gemma3TextConfig(**SIZES, sliding_window=64),
          "moe": transformers.Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)}


def built(kind, lora, bf16, sharded, recompute, dropout=0.0, **more):
    """(PackedLM on the meta device, the same model with memory and in its compute dtype)."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        native = net = causal_lm.empty_model(MODELS[kind], torch.bfloat16 if lora and bf16 else torch.float32,
                                           attention=kernels.packed_documents())
        if lora:
            net = adapters.add_lora(native, causal_lm.decoder_layers(native), 8, 16, dropout, "all-linear", "base")
        models.append(packed_lm.PackedLM(net, recompute, **more).train())
    causal_lm.give_memory(models[1], "cpu")
    for parameter in models[1].parameters():
        torch.nn.init.normal_(parameter, 0, 0.05)
    return models[0], models[1].to(torch.bfloat16) if bf16 and sharded else models[1]


def batch_of(documents, n, trained):
    """PackedChats of documents of n tokens, the last `trained` of them trained."""
    mask = np.arange(n) >= n - trained
    return chat_data.collate([(i, np.arange(n) % 250, mask.copy()) for i in range(documents)])


@pytest.mark.slow
@pytest.mark.parametrize("kind, lora, bf16, recompute", [
    ("qwen", True, True, "all"), ("gemma", False, True, "all"), ("moe", True, True, None)])
def test_planned_memory_is_the_peak_of_a_real_step(kind, lora, bf16, recompute, monkeypatch):
    """The peak has activations, logits, casts and gradients."""
    monkeypatch.setattr(kernels, "_attention_by_document", by_lengths([150] * 4))
    empty, model = built(kind, lora, bf16, False, recompute, dropout=0.1)
    batch = batch_of(4, 150, 120)
    empty.chunk = model.chunk = 200
    check_plan(empty, plan.loss, run_flags(1, "ddp", bf16, recompute), (600, len(batch.rows)), model, batch,
               lambda model, batch: model(batch)[0])


def test_compiled_layers_keep_less_than_eager_ones():
    model, _ = built("qwen", True, True, False, None)
    compiled, eager = (memory.step_bytes(model, plan.loss, run_flags(compile=way), (600, 480))
                       for way in ("auto", False))
    assert compiled < 0.9 * eager
