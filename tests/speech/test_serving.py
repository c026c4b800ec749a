"""Merged folders in the servers' own code: vLLM-Omni's classes in vLLM's engine, sglang-omni's, both on a CPU.

    VENV=.venv-vllm-omni VLLM_VERSION=0.30.0 bash tests/helpers/vllm_cpu.sh vllm-omni==0.30.0
    python -m pytest tests/speech/test_serving.py

Skipped where there is no such Python: VLLM_OMNI_PYTHON, or the one of .venv-vllm-omni. References are transformers and
this repository's own forward.
"""
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    HiggsAudioV2ForConditionalGeneration,
    HiggsAudioV2TokenizerConfig,
    HiggsAudioV2TokenizerModel,
)

import lora
from speech.codes import load_codec
from speech import make_tiny, v3
from tests.helpers.merging import merge
from tests.helpers import higgs3
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT

VLLM_OMNI = Path(os.environ.get("VLLM_OMNI_PYTHON", ROOT / ".venv-vllm-omni" / "bin" / "python"))
CODES = np.random.default_rng(0).integers(0, 1024, (8, 12)).tolist()
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}     # by servers


def adapter(model, folder):
    """Folder of an adapter that changes what the model says."""
    net = lora.add_lora(model, 4, 8, 0.0, "all-linear", "base")
    for name, weight in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    net.save_pretrained(folder)
    return folder


def asked(python, probe, scratch, **request):
    """Tensors that a probe in another Python finds."""
    (scratch / "request.json").write_text(json.dumps(request))
    done = subprocess.run([python, ROOT / "tests" / "helpers" / probe, scratch / "request.json", scratch / "found"],
                          capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(scratch / "found")


def same_weights(found, expected):
    """Every weight that the server holds is the expected one, bit by bit; it may have fused some of a layer."""
    for name, value in found.items():
        fused = next((part for part in FUSED if part in name), None)
        names = [name.replace(fused, part) for part in FUSED[fused]] if fused else [name]
        assert torch.equal(value, torch.cat([expected.pop(part) for part in names])), name
    assert not expected


@pytest.mark.skipif(not VLLM_OMNI.is_file(), reason=f"no vLLM-Omni: {VLLM_OMNI} is not there")
def test_vllm_omni_computes_the_same_from_a_merged_higgs_audio_v2(tiny, tmp_path):
    base = shutil.copytree(tiny.model, tmp_path / "base")
    config, weights = json.loads((base / "config.json").read_text()), load_file(base / "model.safetensors")
    for name in ("model.embed_tokens.weight", "text_lm_head.weight"):       # vLLM wants a multiple of 64, as 128,256
        weights[name] = torch.nn.functional.pad(weights[name], (0, 0, 0, 640 - config["vocab_size"]))
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text(json.dumps(config | {"vocab_size": 640}))
    learnt = adapter(HiggsAudioV2ForConditionalGeneration.from_pretrained(base), tmp_path / "adapter")
    merged = tmp_path / "merged"
    merge(str(base), str(learnt), merged, codec=str(tiny.codec))
    prompt = [config["bos_token_id"], 5, 6, 9, 300, config["audio_bos_token_id"], *[config["audio_token_id"]] * 3]
    found = asked(VLLM_OMNI, "vllm_omni_probe.py", tmp_path, folder=str(merged), third=False, prompt=prompt, text="",
                  codec=str(tiny.codec), codes=CODES)
    model = HiggsAudioV2ForConditionalGeneration.from_pretrained(merged).eval()
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        sound = load_codec(tiny.codec, torch.device("cpu"), 8)[0].decode(torch.tensor(CODES)[None]).audio_values
    torch.testing.assert_close(found["hidden"], hidden, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found["sound"], sound, rtol=1e-4, atol=1e-5)
    theirs = {"model.embed_audio_tokens.embed_audio_tokens": "audio_codebook_embeddings", "text_lm_head": "lm_head"}
    same_weights({name[2:]: value for name, value in found.items() if name.startswith("w.")},
                 {theirs.get(name.removesuffix(".weight"), name.removesuffix(".weight")).removeprefix("model.")
                  + ".weight": value for name, value in load_file(merged / "model.safetensors").items()})


@pytest.fixture(scope="module")
def merged3(tmp_path_factory):
    """A Higgs TTS 3 with a random codec of the released sizes inside, and an adapter folded in."""
    root = tmp_path_factory.mktemp("higgs3")
    torch.manual_seed(0)
    codec = HiggsAudioV2TokenizerModel(HiggsAudioV2TokenizerConfig(**v3.RELEASED_CODEC))
    codec.save_pretrained(root / "codec")
    make_tiny.make_model3(root, codec)
    merge(str(root / "model"), str(adapter(higgs3.load(root / "model")[0], root / "adapter")), root / "merged")
    return root / "merged"


@pytest.mark.skipif(not VLLM_OMNI.is_file(), reason=f"no vLLM-Omni: {VLLM_OMNI} is not there")
def test_vllm_omni_computes_the_same_from_a_merged_higgs_tts_3(merged3, tmp_path):
    (model, ids), text = higgs3.load(merged3), "Say <|emotion:elation|>this."
    spoken = v3.load_tokenizer(merged3).encode(text, add_special_tokens=False)
    prompt = higgs3.prompt(ids, spoken)
    found = asked(VLLM_OMNI, "vllm_omni_probe.py", tmp_path, folder=str(merged3), third=True, text=text,
                  prompt=prompt[0].tolist(), codec="", codes=CODES)
    assert found["prompt"].tolist() == prompt[0].tolist()
    logits = higgs3.forced_logits(model, prompt, None, v3.delay(torch.zeros(9, 8, dtype=torch.long)))[0]
    table = model.audio_embedding.weight.detach()
    torch.testing.assert_close((found["hidden"][-1] @ table.T).view(8, -1), logits, rtol=1e-4, atol=2e-5)
    codec = HiggsAudioV2TokenizerModel.from_pretrained(merged3.parent / "codec").eval()
    with torch.no_grad():
        sound = codec.decode(torch.tensor(CODES)[None]).audio_values
    torch.testing.assert_close(found["sound"], sound, rtol=1e-4, atol=1e-5)
    expected = {f"model.{name}": value for name, value in model.body.state_dict().items()}
    embedded = found.pop("w.model.embed_tokens.weight")[:len(expected["model.embed_tokens.weight"])]    # it pads
    same_weights({name[2:]: value for name, value in found.items() if name.startswith("w.")} |
                 {"model.embed_tokens.weight": embedded}, expected | {"multimodal_embedding.weight": table})
