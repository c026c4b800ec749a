"""--base_dtype nf4: layers against bitsandbytes' own, real training of both trainers, resume, and what is refused.

Needs bitsandbytes: installed, or in the folder that BITSANDBYTES names.
"""
import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

if os.environ.get("BITSANDBYTES"):
    sys.path.append(os.environ["BITSANDBYTES"])

from tests.core.test_float8 import speech, student
from tests.helpers.merging import merge
from tests.helpers.trainer import ROOT, speech_main, train_forked
from tests.speech.test_train_v2_ddp import assert_same_bits, rows

needs_it = pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"),
                              reason="needs the package bitsandbytes, or its folder in BITSANDBYTES")
FLAGS = ("--use_lora", "--lora_rank", 4, "--lora_alpha", 8, "--bf16", "--lora_target_modules", "all-linear",
         "--base_dtype", "nf4")


# A layer, a model


def rounded(weight, dtype):
    """A weight as the library rounds it, and makes it again in a dtype."""
    from bitsandbytes import functional
    packed, state = functional.quantize_4bit(weight.float(), blocksize=64, compress_statistics=True, quant_type="nf4")
    state.dtype = dtype
    return functional.dequantize_4bit(packed, state)


def converted(layers):
    """NF4Linear of all frozen linear layers, with the weights that they had."""
    from core import quantized
    linear = [module for layer in layers for module in layer.modules() if type(module) is torch.nn.Linear
              and not module.weight.requires_grad]
    before = [module.weight.detach().clone() for module in linear]
    quantized.to_nf4(layers)
    for module, weight in zip(linear, before):
        module.weight.copy_(quantized.pack(weight.float()))
    return before


@needs_it
@pytest.mark.parametrize("shape", [(48, 64), (40, 10), (1024, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_is_dequantise_then_multiply_bit_for_bit(shape, dtype):
    """Output and input gradient, with blocks that are not full; 4.2 bits a value where there are many."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(shape[1], shape[0], bias=False).requires_grad_(False)
    weight, = converted([torch.nn.Sequential(layer)])
    weight = rounded(weight, dtype)
    x, grad = torch.randn(10, shape[1], dtype=dtype).requires_grad_(), torch.randn(10, shape[0], dtype=dtype)
    out = layer(x.unflatten(0, (5, 2)))
    assert torch.equal(out, (x @ weight.t()).unflatten(0, (5, 2)))
    assert torch.equal(torch.autograd.grad(out, [x], grad.view_as(out))[0], grad @ weight)
    if shape[0] > 1000:
        assert layer.weight.nbytes * 8 < 4.4 * weight.numel()


@needs_it
@pytest.mark.slow
def test_an_adapter_says_that_its_base_was_in_four_bits(tmp_path):
    """generate_tts.py does as the run did, unless told otherwise; what a run saves and merges is seen below."""
    voice = ROOT / "launch" / "voice"
    adapter = shutil.copytree(voice / "adapter", tmp_path / "adapter")
    (adapter / "text_settings.json").write_text('{"normalize_text": "on", "base_dtype": "nf4"}')
    for more, said in (([], "nf4"), (["--base_dtype", "bf16"], None)):
        subprocess.run([sys.executable, *map(str, (
            ROOT / "speech" / "generate_tts.py", "--model_path", voice / "model", "--adapter", adapter, "--output_dir",
            tmp_path / "said", "--audio_tokenizer_path", voice / "codec", "--text", "one.", "--max_seconds", 0.4,
            "--overwrite", *more))], check=True, env={**os.environ, "PYTHONPATH": os.environ.get("BITSANDBYTES", "")})
        assert json.loads((tmp_path / "said" / "0000.json").read_text())["base_dtype"] == said


@needs_it
@pytest.mark.parametrize("make", [speech, student])
def test_a_model_trains_as_one_of_the_rounded_weights(make):
    """Bit for bit the loss and gradients of a bf16 model that holds them, joint products and dropout included; with
    and without recomputation; and no weight is kept whole for the backward pass.
    """
    found = {}
    for name, mode in (("bf16", None), ("nf4", None), ("all", "all"), ("selective", "selective")):
        torch.manual_seed(0)
        model, layers, loss_of = make(mode)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:      # from zero, A would have no gradient
                torch.nn.init.normal_(parameter, 0, 0.05)
        frozen = [module for layer in layers for module in layer.modules() if type(module) is torch.nn.Linear
                  and not module.weight.requires_grad]
        shapes = {module.weight.shape for module in frozen} | {module.weight.t().shape for module in frozen}
        kept = []
        if name == "bf16":
            for module in frozen:
                module.weight.data = rounded(module.weight, torch.bfloat16)
        else:
            converted(layers)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(
                lambda t: (kept.append(t), t)[1], lambda t: t):
            loss = loss_of()
        loss.backward()
        found[name] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        whole = [t for t in kept if t.shape in shapes and not t.requires_grad and t.is_floating_point()]
        assert bool(whole) == (name == "bf16"), "a weight is kept"
    for name in ("nf4", "all", "selective"):
        assert found[name][0] == found["bf16"][0] and torch.equal(found[name][1], found["bf16"][1]), name


# Whole runs


def main_here(argv):
    """In a rank that has not imported this file, and so does not know the package's folder."""
    speech_main(argv)


@needs_it
@pytest.mark.slow
def test_resume_is_exact_and_two_ranks_learn_the_same(pool, tiny, tmp_path):
    """And what is saved is PEFT's; a run on another base dtype does not go on from it."""
    def run(name, *flags, ranks=1, **options):
        return train_forked(pool, tiny, tmp_path / name, *FLAGS, "--max_steps", 4,
                            "--save_steps", 2, *flags, ranks=ranks, main=f"{__name__}.main_here", **options)
    one = run("one", "--gradient_accumulation_steps", 2)
    shutil.copytree(one.output_dir, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-4")
    again = run("again", "--gradient_accumulation_steps", 2)
    assert "resumed from" in again.output and len(rows(again)) == len(rows(one))
    assert_same_bits(one, again)
    names = load_file(one.output_dir / "checkpoint-4" / "adapter_model.safetensors")
    assert all(".lora_" in name and tensor.dtype == torch.float32 for name, tensor in names.items())
    two = run("two", ranks=2)
    assert two.metrics("train/loss") == pytest.approx(one.metrics("train/loss"), rel=2e-3)
    learnt = one.output_dir / "checkpoint-4"
    assert json.loads((learnt / "text_settings.json").read_text())["base_dtype"] == "nf4"
    for name, dtype in (("as trained", "nf4"), ("on the base", None)):
        merge(str(tiny.model), str(learnt), tmp_path / name, codec=str(tiny.codec), base_dtype=dtype)
        whole = load_file(tmp_path / name / "model.safetensors")
        base = load_file(tiny.model / "model.safetensors")
        place = "model.layers.0.self_attn.q_proj"
        up, down = (names[f"base_model.model.{place}.lora_{half}.weight"] for half in "BA")
        frozen = base[f"{place}.weight"].float()
        expected = (rounded(frozen, torch.float32) if dtype else frozen) + 2 * up @ down
        torch.testing.assert_close(whole[f"{place}.weight"], expected)
        assert torch.equal(whole["model.embed_tokens.weight"], base["model.embed_tokens.weight"].float())
    other = train_forked(pool, tiny, one.output_dir, *FLAGS[:-2], "--max_steps", 5, ok=False)
    assert other.status and "lora on nf4" in other.output, other.output


# The plan
