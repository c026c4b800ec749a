"""Checkpoints of causal language models: loaded as from_pretrained loads them, saved as from_pretrained wants them."""
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from distill import causal_lm
from tests.helpers import chats


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


def test_a_saved_config_tells_what_was_trained(made, tmp_path):
    """The dtype of the weights beside it, whatever the base had, and an end that generate stops at."""
    config = causal_lm.load_config(made / "qwen")
    config.dtype = torch.bfloat16
    model, tokenizer = causal_lm.empty_model(config, torch.float32, made / "qwen"), chats.tokenizer()
    known, other = model.generation_config.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert causal_lm.stop_at(model, [known]) == [] and causal_lm.stop_at(model, [known, other]) == [other]
    causal_lm.save_config(model, tokenizer, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["dtype"] == "float32" and saved["architectures"] == ["Qwen3ForCausalLM"]
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [known, other]
