"""Exported checkpoints: the files that transformers, PEFT and boson-ai's 2025 layout expect."""
import json
import math
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration, LlamaConfig
from transformers.models.higgs_audio_v2.modeling_higgs_audio_v2 import HiggsAudioV2RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import lora
from core.cli import UserError
from speech import layout_2025, weights
from speech.speak import load_model
from tests.helpers import spoken
from tests.helpers.spoken import logits
from tests.helpers.trainer import run_script

LAYER = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj", "audio_mlp.gate_proj", "audio_mlp.up_proj", "audio_mlp.down_proj", "input_layernorm",
         "post_attention_layernorm", "audio_input_layernorm", "audio_post_attention_layernorm"}
# 2025 name -> native name, for the two layers of the tiny model
NAMES = {"audio_codebook_embeddings.weight": "model.embed_audio_tokens.embed_audio_tokens.weight",
         "audio_decoder_proj.audio_lm_head.weight": "audio_lm_head.weight",
         "audio_decoder_proj.text_lm_head.weight": "text_lm_head.weight",
         "embed_tokens.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
         **{f"layers.{i}.{module}.weight": f"model.layers.{i}.{module}.weight" for i in range(2) for module in LAYER}}
SPLIT = {"embed_tokens": ("embedding_frozen", "embedding_trainable"),
         "audio_decoder_proj.text_lm_head": ("linear_frozen", "linear_trainable")}
PUBLISHED_GENERATION = {"_from_model_config": True, "bos_token_id": 128000, "eos_token_id": 128001,
                        "pad_token_id": 128001, "transformers_version": "4.46.3"}
RAS = {"ras_win_len": 7, "ras_win_max_num_repeat": 2, "use_text_head": True}


def published_config(vocab=128256, hidden=3072, inner=8192, layers=28, heads=24, kv=8, head_dim=128, first=128000,
                     dtype="bfloat16"):
    """The released config.json. first: id of <|begin_of_text|>, which the other special tokens follow."""
    return {
        "model_type": "higgs_audio", "architectures": ["HiggsAudioModel"], "audio_adapter_type":
        "dual_ffn_fast_forward", "audio_dual_ffn_layers": list(range(layers)), "audio_codebook_size": 1024,
        "audio_num_codebooks": 8, "audio_decoder_proj_num_layers": 0, "audio_embed_avg": False, "hidden_size": hidden,
        "audio_ffn_hidden_size": hidden, "audio_ffn_intermediate_size": inner, "audio_stream_bos_id": 1024,
        "audio_stream_eos_id": 1025, "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
        "audio_in_token": "<|AUDIO|>", "audio_out_token": "<|AUDIO_OUT|>", "audio_out_bos_token": "<|audio_out_bos|>",
        "audio_eos_token_id": first + 12, "audio_out_bos_token_id": first + 13, "audio_in_token_idx": first + 15,
        "audio_out_token_idx": first + 16, "pad_token_id": first + 1, "encode_audio_in_tokens": True,
        "encode_whisper_embed": False, "skip_audio_tower": True, "use_audio_out_embed_projector": False,
        "use_audio_out_self_attention": False, "use_delay_pattern": True, "use_rq_transformer": False,
        "torch_dtype": dtype, "text_config": {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
            "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv, "head_dim": head_dim, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "max_position_embeddings": 131072, "initializer_range": 0.02, "attention_bias": False,
            "attention_dropout": 0.0, "mlp_bias": False, "bos_token_id": first, "eos_token_id": first + 1,
            "rope_theta": 500000.0, "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "torch_dtype": dtype}}


def tensors(folder):
    """Every tensor of a checkpoint's weight files."""
    weights_by_name = {}
    for path in sorted(folder.glob("model*.safetensors")):
        shard = load_file(path)
        assert not weights_by_name.keys() & shard.keys()
        weights_by_name |= shard
    return weights_by_name


def same(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def load(folder, **more):
    """from_pretrained, which must find every weight and no other."""
    model, info = HiggsAudioV2ForConditionalGeneration.from_pretrained(
        folder, use_text_head=True, output_loading_info=True, **more)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def read(folder, name):
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    """Keyword arguments of transformers' forward for a voice-cloning sample."""
    return spoken.inputs_of(tiny.model, [spoken.CLONING], tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def original(tiny, tmp_path_factory):
    """A bf16 base in the published 2025 layout, with two split tensors and no processor file."""
    folder = tmp_path_factory.mktemp("original") / "model"
    native = load_file(tiny.model / "model.safetensors")
    state = {old: native[new].bfloat16() for old, new in NAMES.items()}
    for name, kinds in SPLIT.items():
        whole = state.pop(f"{name}.weight")
        state |= {f"{name}.{kind}.weight": rows.clone() for kind, rows in zip(kinds, (whole[:570], whole[570:]))}
    state |= {"audio_codebook_weights": torch.ones(8) / 8, "rotary_emb.inv_freq": torch.rand(16),
              "layers.0.self_attn.rotary_emb.inv_freq": torch.rand(16)}        # which nothing reads
    AutoTokenizer.from_pretrained(tiny.model).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = published_config(600, 128, 256, 2, 4, 2, 32, first=576)
    (folder / "config.json").write_text(json.dumps(config | {"audio_delay_token_id": 590, "eos_token_id": 585}))
    (folder / "generation_config.json").write_text(json.dumps(PUBLISHED_GENERATION))
    return folder


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """(folder, PeftModel): an adapter that changes the output, written by PEFT."""
    return make_adapter(tiny, tmp_path_factory.mktemp("adapter"))


def make_adapter(tiny, folder, **more):
    torch.manual_seed(3)
    usual = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "audio_mlp.down_proj"]}
    config = LoraConfig(**usual | more)
    net = get_peft_model(load(tiny.model), config).eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    net.save_pretrained(folder)
    return folder, net


def test_2025_layout_is_the_published_one(tiny, tmp_path):
    """Names, bits and config.json."""
    native, served = load_file(tiny.model / "model.safetensors"), tmp_path / "served"
    run_script("lora.py", ["export", "--model_path", str(tiny.model), "--output_dir", str(served)])
    assert len(NAMES) == len(native) == 33
    assert same(tensors(served), {old: native[new] for old, new in NAMES.items()})
    expected = published_config(600, 128, 256, 2, 4, 2, 32, first=576, dtype="float32")
    expected["text_config"]["initializer_range"] = 0.06
    extra = {"audio_delay_token_id": 590, "bos_token_id": 576, "eos_token_id": 585}     # not in the release
    assert read(served, "config.json") == expected | extra
    ids = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|audio_eos|>": 128012, "<|AUDIO|>": 128015}
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    tokenizer.convert_tokens_to_ids = ids.__getitem__       # the real tokenizer is on the Hub
    assert layout_2025.original_config(HiggsAudioV2Config(codebook_size=1026), tokenizer, "bfloat16") == published_config()


def test_2025_to_native_to_2025_is_bit_equal(original, tmp_path):
    lora.export(str(original), tmp_path / "native")
    state = load_file(original / "model.safetensors")
    state = {name: value for name, value in state.items() if "codebook_weights" not in name and "inv_freq" not in name}
    for name, kinds in SPLIT.items():
        state[f"{name}.weight"] = torch.cat([state.pop(f"{name}.{kind}.weight") for kind in kinds])
    for source in (tmp_path / "native", original):      # the first export rebuilds the config, the second copies it
        lora.export(str(source), out := tmp_path / f"from-{source.name}", "2025")
        assert same(tensors(out), state) and {t.dtype for t in state.values()} == {torch.bfloat16}
        assert read(out, "config.json") == read(original, "config.json")


def test_native_export_of_a_2025_base_can_generate(original, tmp_path):
    """The base stops at <|end_of_text|> and has no repetition guard: its speech would run to the limit."""
    lora.export(str(original), tmp_path / "out", dtype="float32")
    expected = {"eos_token_id": 585, "pad_token_id": 577, "do_sample": True, **RAS}
    generation = read(tmp_path / "out", "generation_config.json")
    assert generation | expected == generation
    prompt = AutoTokenizer.from_pretrained(tmp_path / "out")(
        "<|begin_of_text|><|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>", return_tensors="pt")
    rows = load(tmp_path / "out").generate(input_ids=prompt.input_ids.repeat(1, 2), max_new_tokens=12)
    assert rows.shape[2] == 8 and (rows[0, 0] == 1024).all()


@pytest.mark.parametrize("layout", ["native", "2025"])
def test_merged_model_equals_the_adapter_on_its_base(tiny, adapter, data, tmp_path, layout):
    folder, net = adapter
    lora.export(str(tiny.model), tmp_path / "out", layout, "float32", 3 * 10**6, folder)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) == 3      # each large table has a file
    named = read(tmp_path / "out", "model.safetensors.index.json")["weight_map"].keys()
    assert named == (NAMES.keys() if layout == "2025" else set(NAMES.values()))
    back = tmp_path / "out"
    if layout == "2025":
        lora.export(str(back), back := tmp_path / "back")
    merged = load(back)
    torch.testing.assert_close(logits(merged, data), logits(net, data), rtol=1e-5, atol=1e-5)
    assert (logits(merged, data) - logits(load(tiny.model), data)).abs().max() > 0.05


@pytest.mark.parametrize("kind", [{"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"q_proj": 2}},
                                  {"alpha_pattern": {"o_proj": 3}}], ids=str)
def test_weights_are_those_of_pefts_own_merge(tiny, tmp_path, kind):
    folder, net = make_adapter(tiny, tmp_path / "adapter", **kind)
    lora.export(str(tiny.model), tmp_path / "out", dtype="float32", adapter=folder)
    got, expected = tensors(tmp_path / "out"), net.merge_and_unload().state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind, words", [({"modules_to_save": ["audio_lm_head"]}, r"modules_to_save \['audio_lm_head'\]"),
                                         ({"init_lora_weights": "olora"}, "init_lora_weights 'olora'")], ids=str)
def test_adapters_that_are_more_than_lora_are_refused(tiny, tmp_path, kind, words):
    """The merge would be wrong or incomplete."""
    folder, _ = make_adapter(tiny, tmp_path / "adapter", **kind)
    with pytest.raises(UserError, match=f"adapter_config.json: the adapter has {words}, which is not supported"):
        lora.export(str(tiny.model), tmp_path / "out", dtype="float32", adapter=folder)


def test_speech_uses_an_adapter_like_peft(tiny, data, tmp_path):
    """The model of generate_tts.py has the logits of PeftModel.from_pretrained."""
    folder, _ = make_adapter(tiny, tmp_path / "adapter", use_dora=True)
    config = json.loads((tiny.model / "config.json").read_text())
    model = load_model(tiny.model, config, folder, torch.float32, torch.device("cpu"))
    reference = PeftModel.from_pretrained(load(tiny.model), folder)
    torch.testing.assert_close(logits(model, data), logits(reference, data), rtol=1e-5, atol=1e-5)
    assert (logits(model, data) - logits(load(tiny.model), data)).abs().max() > 0.05


@pytest.mark.parametrize("where, value", [("base", math.nan), ("update", 1e30)])
def test_weights_that_are_not_finite_are_refused(tiny, adapter, tmp_path, where, value):
    """Weights of the base or of an update that overflows."""
    model, folder = shutil.copytree(tiny.model, tmp_path / "model"), shutil.copytree(adapter[0], tmp_path / "adapter")
    name, path = "model.layers.1.self_attn.q_proj", folder / "adapter_model.safetensors"
    names = [f"base_model.model.{name}.lora_{half}.weight" for half in "AB"]
    if where == "base":
        names, path = [f"{name}.weight"], model / "model.safetensors"
    state = load_file(path)
    for name in names:
        state[name][1, 1] = value
    save_file(state, path, {"format": "pt"})
    with pytest.raises(UserError, match="NaN or infinity"):
        lora.export(str(model), tmp_path / "out", dtype="float32", adapter=folder)
    assert not (tmp_path / "out").exists()


def test_an_adapter_on_a_bf16_base_is_folded_in_fp32_and_kept_so(tiny, adapter, original, tmp_path):
    """In bf16, an update below half a step of the weight would be lost."""
    folder, net = adapter
    lora.export(str(original), tmp_path / "out", adapter=folder)
    got = tensors(tmp_path / "out")
    assert {t.dtype for t in got.values()} == {torch.float32}
    name = "layers.1.self_attn.q_proj"
    base = load_file(original / "model.safetensors")[f"{name}.weight"].float()
    layer = net.get_base_model().get_submodule(f"model.{name}")
    update = 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(got[f"model.{name}.weight"], base + update, rtol=1e-6, atol=1e-7)
    assert not torch.equal(got[f"model.{name}.weight"].bfloat16().float(), got[f"model.{name}.weight"])


def open_model(folder):
    return load_model(folder, read(folder, "config.json"), None, torch.float32, "cpu")


def test_original_weights_compute_what_the_native_ones_do(tiny, original, data):
    model, expected = open_model(original), load(tiny.model, dtype=torch.bfloat16).float()
    assert same(model.state_dict(), expected.state_dict())
    assert model.config.codebook_size == 1026 and model.config.audio_stream_eos_id == 1025
    assert torch.equal(logits(model, data), logits(expected, data))


def test_original_config_gives_the_released_native_config():
    """The names of the RoPE settings differ, its frequencies do not."""
    config = published_config()
    native, text = weights.read_config(config), config["text_config"]
    with pytest.raises(UserError, match="audio_embed_avg is not supported"):
        weights.read_config(config | {"audio_embed_avg": True})
    expected = {key: text[key] for key in layout_2025.TEXT_KEYS} | {
        "num_codebooks": 8, "codebook_size": 1026, "audio_delay_token_id": 128014, "bos_token_id": 1,
        "eos_token_id": 128009, "audio_stream_bos_id": 1024, "audio_stream_eos_id": 1025, "tie_word_embeddings": False,
        "audio_token_id": 128016, "pad_token_id": 128001, "audio_bos_token_id": 128013}
    assert {key: getattr(native, key) for key in expected} == expected
    llama = LlamaConfig(hidden_size=3072, num_attention_heads=24, head_dim=128, max_position_embeddings=131072,
                        rope_parameters={"rope_theta": 500000.0, **text["rope_scaling"]})
    assert torch.equal(LlamaRotaryEmbedding(llama).inv_freq, HiggsAudioV2RotaryEmbedding(native).inv_freq)


UP, KEYS = "model.layers.1.audio_mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"
HEAD, EXTRA = "text_lm_head.weight", "model.layers.0.audio_attn.q_proj.weight"
# (added weights, or removed ones if None; words of the message)
BROKEN = [({UP: None, HEAD: None}, ["2 missing keys", UP, HEAD]), ({EXTRA: torch.ones(2)}, ["1 unexpected key", EXTRA]),
          ({KEYS: torch.ones(32, 128)}, ["1 mismatched key", f"{KEYS} (32, 128) instead of (64, 128)"])]


@pytest.mark.parametrize("change, words", BROKEN)
def test_a_checkpoint_that_does_not_fit_stops_with_the_names(tiny, tmp_path, change, words):
    """transformers only prints a report and continues with random weights."""
    folder = shutil.copytree(tiny.model, tmp_path / "model")
    state = {name: value for name, value in (tensors(folder) | change).items() if value is not None}
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        open_model(folder)
    assert all(word in str(error.value) for word in [str(folder), *words]) and "\n" not in str(error.value)


def test_codebook_size_without_the_stream_tokens_is_refused(tiny, tmp_path):
    """With transformers' default of 1024, a BOS row would index past the table or into another codebook."""
    folder = shutil.copytree(tiny.model, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(read(folder, "config.json") | {"codebook_size": 1024}))
    with pytest.raises(UserError, match="codebook_size 1024.*must be 1026"):
        open_model(folder)
