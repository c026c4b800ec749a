"""--float8 and --base_dtype nf4: products match torch's and bitsandbytes', gradients, whole runs, refusals.

nf4 needs bitsandbytes: installed, or in the folder BITSANDBYTES.
"""
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

if os.environ.get("BITSANDBYTES"):
    sys.path.append(os.environ["BITSANDBYTES"])

import lora
from core import quantized
from distill import causal_lm
from tests.distill.test_plan import batch_of, built
from tests.helpers.small_speech import pack_of, small_model
from tests.helpers.trainer import ROOT, speech_main, train_forked

needs_it = pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"),
                              reason="needs the package bitsandbytes, or its folder in BITSANDBYTES")


def speech(mode):
    # no dropout: the adapters of a rounded layer would draw other masks
    _, model = small_model("attention", torch.bfloat16, mode, dropout=0.0)
    del model.base_model.model.layers[1:]
    batch = pack_of(2, 20, 50, 20)
    return model, model.base_model.model.layers, lambda: sum(loss.sum() for loss in model(batch)[:2])


def student(mode):
    _, model = built("qwen", True, True, False, mode, dropout=0.1)
    del model.native.model.layers[1:]
    batch = batch_of(2, 60, 10)
    return model, causal_lm.decoder_layers(model.native), lambda: model(batch)[0]


def trained(make, mode, change):
    """(loss, gradient of all adapters, tensors kept for the backward pass) of a model whose layers change() changes."""
    torch.manual_seed(0)
    model, layers, loss_of = make(mode)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:      # from zero, A would have no gradient
            torch.nn.init.normal_(parameter, 0, 0.05)
    change(model, layers)
    kept = []
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(t), t)[1], lambda t: t):
        loss = loss_of()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]), kept


def test_products_are_those_of_float8_kernels():
    """The product equals torch._scaled_mm with our scales, and is close to the exact product."""
    torch.manual_seed(0)
    rows, weight = torch.randn(24, 64) * torch.logspace(-4, 4, 24)[:, None], torch.randn(48, 64)
    stored, scales = quantized.rounded(weight)
    product = quantized.product(rows, stored.view(torch.uint8), scales).float()
    small, row_scales = quantized.rounded(rows)
    unit = torch.ones(())
    kernel = torch._scaled_mm(small, stored.t(), scale_a=unit, scale_b=unit, out_dtype=torch.float32)
    torch.testing.assert_close(product, kernel * row_scales * scales.t(), rtol=0.01, atol=0)      # bf16 rounds by 0.4 %
    exact = rows @ weight.t()
    # both factors have 3 bits, so each is 2.6 % off in the mean
    assert ((product - exact).norm(dim=1) / exact.norm(dim=1)).max() < 0.06, "each row has a scale"
    alone = torch.cat([quantized.product(row[None], stored.view(torch.uint8), scales) for row in rows]).float()
    torch.testing.assert_close(product, alone, rtol=0.01, atol=0)      # so any split of rows over ranks is the same
    assert not quantized.product(torch.zeros(2, 64), stored.view(torch.uint8), scales).any()
    assert quantized.product(torch.zeros(0, 64), stored.view(torch.uint8), scales).shape == (0, 48)


@pytest.mark.parametrize("make, linears", [(speech, 10), (student, 7)])
def test_frozen_layers_are_rounded_and_adapters_learn_nearly_the_same(make, linears):
    """Recomputation changes nothing; the rounded weights take no more bytes than bf16."""
    def round_weights(model, layers):
        held = list(model.parameters())     # by names, as the trainers' scripts do
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        quantized.to_float8(layers)
        small = [m for m in model.modules() if isinstance(m, quantized.Float8Linear)]
        assert not any(p.requires_grad for m in small for p in m.parameters())
        rounded = sum(m.weight.nbytes + m.turned.nbytes for m in small)
        assert sum(p.dtype == torch.uint8 for p in held) == linears, "weights in bf16 stay in memory"
        assert rounded == sum(2 * m.in_features * m.out_features for m in small)
        assert names == [n for n, p in model.named_parameters() if p.requires_grad]
    exact, gradient, _ = trained(make, None, lambda *_: None)
    loss, noisy, _ = trained(make, None, round_weights)
    assert loss != exact and loss == pytest.approx(exact, rel=0.01)
    assert 0.98 < torch.cosine_similarity(noisy, gradient, dim=0) and not torch.equal(noisy, gradient)
    again, recomputed, _ = trained(make, "all", round_weights)
    assert again == loss and torch.equal(recomputed, noisy)


def test_products_take_transposed_inputs(device=os.environ.get("TEST_DEVICE", "cpu")):
    """Both copies of the weight are contiguous, the rows are transposed. torch.compile makes one graph."""
    linear = torch.nn.Linear(64, 48).bfloat16().requires_grad_(False)
    x, grad = torch.randn(64, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    expected = [x.t() @ linear.weight.t() + linear.bias, grad.t() @ linear.weight]
    quantized.to_float8([linear.to(device)])
    assert linear.weight.is_contiguous() and linear.turned.is_contiguous() and linear.turned.shape == (64, 48)
    x = x.to(device).requires_grad_()
    for call in (linear, torch.compile(linear, backend="aot_eager", fullgraph=True)):
        out = call(x.t())
        results = [out, torch.autograd.grad(out, [x], grad.to(device).t())[0].t()]
        for actual, exact in zip(results, expected, strict=True):
            assert (actual.cpu() - exact).norm() < 0.06 * exact.norm()     # as above


def rounded(weight, dtype):
    """A weight that bitsandbytes rounds and dequantises to a dtype."""
    from bitsandbytes import functional
    packed, state = functional.quantize_4bit(weight.float(), blocksize=64, compress_statistics=True, quant_type="nf4")
    state.dtype = dtype
    return functional.dequantize_4bit(packed, state)


def converted(layers):
    """Convert all frozen linear layers to NF4Linear; returns the weights before."""
    before = [(module, module.weight.detach().clone()) for module in quantized.frozen_linears(layers, "")]
    quantized.to_nf4(layers)
    for module, weight in before:
        module.fill(weight.float())
    return [weight for _, weight in before]


@needs_it
@pytest.mark.parametrize("shape", [(40, 10), (1024, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_is_dequantise_then_multiply_bit_for_bit(shape, dtype):
    """Output and input gradient are equal, also with partial blocks. A large weight takes 4.2 bits a value."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(shape[1], shape[0], bias=False).requires_grad_(False)
    weight, = converted([torch.nn.Sequential(layer)])
    weight = rounded(weight, dtype)
    x, grad = torch.randn(10, shape[1], dtype=dtype).requires_grad_(), torch.randn(10, shape[0], dtype=dtype)
    out = layer(x.unflatten(0, (5, 2)))
    assert torch.equal(out, (x @ weight.t()).unflatten(0, (5, 2)))
    assert torch.equal(torch.autograd.grad(out, [x], grad.view_as(out))[0], grad @ weight)
    if shape[0] > 1000:
        held = layer.weight, layer.state.absmax, layer.state.state2.absmax, layer.state.state2.code
        assert sum(tensor.nbytes for tensor in held) * 8 < 4.4 * weight.numel()


@needs_it
@pytest.mark.parametrize("make", [speech, student])
def test_a_model_trains_as_one_of_the_rounded_weights(make):
    """The bits are those of a bf16 model with these weights, and no whole weight is kept for the backward pass."""
    shapes = set()

    def round_weights(_, layers):
        for module in quantized.frozen_linears(layers, ""):
            module.weight.data = rounded(module.weight, torch.bfloat16)
            shapes.update({module.weight.shape, module.weight.t().shape})
    loss, gradient, kept = trained(make, None, round_weights)

    def whole(kept):
        return [t for t in kept if t.shape in shapes and not t.requires_grad and t.is_floating_point()]
    assert whole(kept)
    for mode in (None, "all"):
        result = trained(make, mode, lambda _, layers: converted(layers))
        assert result[0] == loss and torch.equal(result[1], gradient) and not whole(result[2]), mode


def main_here(argv):
    """Train in a rank; the import of this file puts BITSANDBYTES on its path."""
    speech_main(argv)


@needs_it
@pytest.mark.slow
def test_an_adapter_on_nf4_generates_and_merges_on_nf4(pool, quick_python, tiny, tmp_path):
    """Two ranks learn the same; a run with another base dtype refuses to resume it."""
    flags = ("--use_lora", "--lora_rank", 4, "--lora_alpha", 8, "--bf16", "--lora_target_modules", "all-linear")

    def run(name, *more, **options):
        return train_forked(pool, tiny, tmp_path / name, *flags, "--base_dtype", "nf4", "--max_steps", 4, *more,
                            main=f"{__name__}.main_here", **options)
    one_rank = run("one", "--gradient_accumulation_steps", 2)
    learnt = one_rank.output_dir / "checkpoint-4"
    names = load_file(learnt / "adapter_model.safetensors")
    assert all(".lora_" in name and tensor.dtype == torch.float32 for name, tensor in names.items())
    two_ranks = run("two", ranks=2)
    assert two_ranks.metrics("train/loss") == pytest.approx(one_rank.metrics("train/loss"), rel=2e-3)
    subprocess.run([quick_python, *map(str, (
        ROOT / "speech" / "generate_tts.py", "--model_path", tiny.model, "--adapter", learnt, "--output_dir",
        tmp_path / "speech", "--audio_tokenizer_path", tiny.codec, "--text", "one.", "--max_seconds", 0.4))],
        check=True, env={**os.environ, "PYTHONPATH": os.environ.get("BITSANDBYTES", "")})
    assert json.loads((tmp_path / "speech" / "0000.json").read_text())["base_dtype"] == "nf4"
    base, layer = load_file(tiny.model / "model.safetensors"), "model.layers.0.self_attn.q_proj"
    up, down = (names[f"base_model.model.{layer}.lora_{half}.weight"] for half in "BA")
    frozen = base[f"{layer}.weight"].float()
    for name, dtype in (("as trained", "nf4"), ("on the base", None)):
        lora.export(str(tiny.model), tmp_path / name, dtype="float32", adapter=str(learnt), codec=str(tiny.codec),
                    base_dtype=dtype)
        whole = load_file(tmp_path / name / "model.safetensors")
        expected = (rounded(frozen, torch.float32) if dtype else frozen) + 2 * up @ down
        torch.testing.assert_close(whole[f"{layer}.weight"], expected)
        assert torch.equal(whole["model.embed_tokens.weight"], base["model.embed_tokens.weight"].float())
    other = train_forked(pool, tiny, one_rank.output_dir, *flags, "--max_steps", 5, ok=False)
    assert other.status and "lora on nf4" in other.output, other.output
