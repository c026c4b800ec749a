"""Checkpoints, native and in the 2025 layout: every weight is loaded or the run stops; what is saved is complete."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import HiggsAudioV2ForConditionalGeneration

from core.cli import UserError
from speech import layout_2025
from speech.speak import load_model
from speech.weights import find_model, native_config
from tests.helpers import spoken
from tests.helpers.checkpoints import (
    config_of,
    original_config,
    original_name,
    original_state,
    split_rows,
    write_checkpoint,
)


def load(folder):
    return load_model(folder, config_of(folder), None, torch.float32, "cpu")


@pytest.mark.parametrize("variant", ["plain", "split and sharded"])
def test_original_format_loads_with_every_weight(tiny, tmp_path, variant):
    state = original_state(tiny.model)
    state["audio_codebook_weights"] = torch.ones(8)
    state |= {f"{where}inv_freq": torch.rand(16) for where in
              ("rotary_emb.", "rotary_emb.original_", "layers.0.self_attn.rotary_emb.")}
    if variant != "plain":
        split_rows(state, "embed_tokens", ("embedding_frozen", "embedding_trainable"), 570)
        for head in ("audio_lm_head", "text_lm_head"):
            split_rows(state, f"audio_decoder_proj.{head}", ("linear_frozen", "linear_trainable"), 500)
    folder = write_checkpoint(tmp_path / "original", original_config(config_of(tiny.model)), state,
                              1 if variant == "plain" else 3)
    found, config = find_model(str(folder))
    model = load_model(found, config, None, torch.float32, "cpu")
    expected = HiggsAudioV2ForConditionalGeneration.from_pretrained(tiny.model, use_text_head=True)
    got = model.state_dict()
    assert got.keys() == expected.state_dict().keys() == layout_2025.native_names(state).keys()     # none is ignored
    assert all(torch.equal(got[n], t) for n, t in expected.state_dict().items())
    assert model.config.codebook_size == 1026 and model.config.audio_stream_eos_id == 1025
    (tmp_path / "speech").mkdir()
    ids, samples = spoken.samples_of(tiny.model, expected.config, [spoken.CLONING], tmp_path / "speech")
    inputs = {k: v for k, v in spoken.native_batch(samples, ids).items() if "labels" not in k}
    # the old config has no delay token: 128014 is a constant there, and the tiny tokenizer's is another
    inputs["input_ids"] = torch.where(inputs["input_ids"] == ids.delay, ids.audio, inputs["input_ids"])
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits, rtol=0, atol=0)


def test_original_config_gives_the_released_native_config(tmp_path):
    """Values of the two published config.json files; the rope spelling differs but must not matter."""
    text = {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
            "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048, "hidden_act": "silu", "audio_token_id": 128016, "pad_token_id": 128001,
            "audio_bos_token_id": 128013}
    native = native_config(original_config(text))
    expected = {key: value for key, value in text.items()} | {
        "num_codebooks": 8, "codebook_size": 1026, "audio_delay_token_id": 128014, "bos_token_id": 1,
        "eos_token_id": 128009, "audio_stream_bos_id": 1024, "audio_stream_eos_id": 1025,
        "tie_word_embeddings": False}
    assert {key: getattr(native, key) for key in expected} == expected
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    llama = LlamaConfig(hidden_size=3072, num_attention_heads=24, head_dim=128, max_position_embeddings=131072,
                        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0,
                                         "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                         "original_max_position_embeddings": 8192})
    from transformers.models.higgs_audio_v2.modeling_higgs_audio_v2 import (
        HiggsAudioV2RotaryEmbedding,
    )
    assert torch.equal(LlamaRotaryEmbedding(llama).inv_freq, HiggsAudioV2RotaryEmbedding(native).inv_freq)


@pytest.mark.parametrize("key, value", [
    ("audio_adapter_type", "stack"), ("audio_dual_ffn_layers", [0])])
def test_unsupported_original_variant_is_named(tiny, key, value):
    config = original_config(config_of(tiny.model))
    native_config(config)
    with pytest.raises(UserError) as error:
        native_config({**config, key: value})
    assert str(error.value).endswith(f"the native class lacks: {key}={value!r}")


def broken(state, what):
    if what == "missing":
        del state["model.layers.1.audio_mlp.up_proj.weight"], state["model.norm.weight"]
    elif what == "unexpected":
        state["model.layers.0.audio_attn.q_proj.weight"] = torch.ones(2, 2)
    elif what == "shape":
        state["model.layers.1.self_attn.k_proj.weight"] = torch.ones(32, 128)
    elif what == "text head":
        del state["text_lm_head.weight"]
    return state


MESSAGES = {"missing": ["2 missing keys", "model.layers.1.audio_mlp.up_proj.weight", "model.norm.weight"],
            "unexpected": ["1 unexpected key", "model.layers.0.audio_attn.q_proj.weight"],
            "shape": ["1 mismatched key", "model.layers.1.self_attn.k_proj.weight (32, 128) instead of (64, 128)"],
            "text head": ["1 missing key", "text_lm_head.weight", "dropped the text head", "base model"]}


@pytest.mark.parametrize("form", ["native", "original"])
@pytest.mark.parametrize("what", MESSAGES)
def test_checkpoint_that_does_not_fit_stops_with_the_weights_names(tiny, tmp_path, what, form):
    """transformers only prints a report, and trains on random weights."""
    state = broken(load_file(tiny.model / "model.safetensors"), what)
    config = config_of(tiny.model)
    if form == "original":
        state, config = {original_name(n): t for n, t in state.items()}, original_config(config)
    folder = write_checkpoint(tmp_path / "model", config, state)
    with pytest.raises(UserError) as error:
        load(folder)
    for part in [str(folder), *MESSAGES[what]]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_codebook_size_without_the_stream_tokens_is_refused(tiny, tmp_path):
    """transformers' default of 1024: an all-BOS row would index past the table, or another codebook's rows."""
    config = {**config_of(tiny.model), "codebook_size": 1024}
    folder = write_checkpoint(tmp_path / "model", config, load_file(tiny.model / "model.safetensors"))
    with pytest.raises(UserError, match="codebook_size 1024.*must be 1026"):
        load(folder)
