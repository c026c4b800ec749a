"""Checkpoints of causal language models: loaded as from_pretrained loads them, saved as from_pretrained wants them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from distill import causal_lm


@pytest.mark.parametrize("student", ["qwen", "llama"])
def test_loaded_is_from_pretrained(made, student):
    """Weights, computed buffers, ties: the very logits."""
    ours = causal_lm.empty_model(causal_lm.load_config(made / student), torch.float32, made / student, "sdpa").eval()
    parts = causal_lm.weight_parts(made / student, ours)
    causal_lm.check_weights(ours, parts, made / student)
    causal_lm.give_memory(ours, "cpu")
    causal_lm.load_weights(dict(ours.named_parameters()), parts)
    theirs = AutoModelForCausalLM.from_pretrained(made / student).eval()
    ids = torch.arange(3, 200)[None]
    assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == (student == "qwen")
    assert {name for name, _ in ours.named_buffers()} == {name for name, _ in theirs.named_buffers()}
