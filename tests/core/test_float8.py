"""--float8: products against torch's own float8 ones, real training of both trainers, and what is refused."""
import os
from argparse import Namespace

import pytest
import torch

from core.cli import UserError
from core import dist, quantized
from distill import causal_lm
from tests.helpers.students import train_sft
from tests.distill.test_plan import batch_of, built
from tests.helpers.small_speech import pack_of, small_model
from tests.helpers.trainer import speech_trainer


def test_products_are_those_of_float8_kernels():
    """The values that torch._scaled_mm multiplies, with our scales; and close to the product that was asked for."""
    torch.manual_seed(0)
    rows, weight = torch.randn(24, 64) * torch.logspace(-4, 4, 24)[:, None], torch.randn(48, 64)
    stored, scales = quantized.rounded(weight)
    ours = quantized.product(rows, stored.view(torch.uint8), scales).float()
    small, row_scales = quantized.rounded(rows)
    one = torch.ones(())
    kernel = torch._scaled_mm(small, stored.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    torch.testing.assert_close(ours, kernel * row_scales * scales.t(), rtol=0.01, atol=0)      # bf16 rounds by 0.4 %
    exact = rows @ weight.t()
    # both factors have 3 bits, so each is 2.6 % off in the mean
    assert ((ours - exact).norm(dim=1) / exact.norm(dim=1)).max() < 0.06, "each row has a scale of its own"
    alone = torch.cat([quantized.product(row[None], stored.view(torch.uint8), scales) for row in rows]).float()
    torch.testing.assert_close(ours, alone, rtol=0.01, atol=0)      # so ranks may share rows out as they like
    assert not quantized.product(torch.zeros(2, 64), stored.view(torch.uint8), scales).any()
    assert quantized.product(torch.zeros(0, 64), stored.view(torch.uint8), scales).shape == (0, 48)


def speech(mode):
    # no dropout: with it a rounded layer's adapters draw masks of their own
    _, model = small_model("attention", torch.bfloat16, mode, dropout=0.0)
    del model.base_model.model.layers[1:]
    batch = pack_of(2, 20, 50, 20)
    return model, model.base_model.model.layers, lambda: sum(part.sum() for part in model(batch)[:2])


def student(mode):
    _, model = built("qwen", True, True, False, mode, dropout=0.1)
    del model.native.model.layers[1:]
    batch = batch_of(2, 60, 10)
    return model, causal_lm.decoder_layers(model.native), lambda: model(batch)[0]


@pytest.mark.parametrize("make, linears", [(speech, 10), (student, 7)])
def test_frozen_layers_are_rounded_and_adapters_learn_nearly_the_same(make, linears):
    """With and without recomputation; weights take the room that they took in bf16."""
    found = {}
    for name, mode in (("bf16", None), ("float8", None), ("selective", "selective")):
        torch.manual_seed(0)
        model, layers, loss_of = make(mode)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:      # from zero, A would have no gradient
                torch.nn.init.normal_(parameter, 0, 0.05)
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        if name != "bf16":
            held = list(model.parameters())     # by names, as the trainers' scripts do
            assert quantized.to_float8(layers) == linears
            small = [m for m in model.modules() if isinstance(m, quantized.Float8Linear)]
            assert not any(p.requires_grad for m in small for p in m.parameters())
            rounded = sum(m.weight.nbytes + m.turned.nbytes for m in small)
            assert sum(p.dtype == torch.uint8 for p in held) == linears, "weights in bf16 stay in memory"
            assert rounded == sum(2 * m.in_features * m.out_features for m in small)
        assert names == [n for n, p in model.named_parameters() if p.requires_grad]
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of()
        loss.backward()
        found[name] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    loss, gradient = found["float8"]
    assert loss != found["bf16"][0] and loss == pytest.approx(found["bf16"][0], rel=0.01)
    assert torch.cosine_similarity(gradient, found["bf16"][1], dim=0) > 0.98        # 0.9994 to 0.9996 was seen
    assert not torch.equal(gradient, found["bf16"][1])
    assert found["selective"][0] == loss and torch.equal(found["selective"][1], gradient)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    os.environ.get("TEST_DEVICE") != "cuda", reason="set TEST_DEVICE=cuda to use a GPU"))])
def test_gpu_kernels_take_both_products_as_they_lie(device):
    """A weight's copies and the rows, each turned in memory or not; on a CPU only that they lie row by row."""
    linear = torch.nn.Linear(64, 48).bfloat16().requires_grad_(False)
    x, grad = torch.randn(64, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    expected = [x.t() @ linear.weight.t() + linear.bias, grad.t() @ linear.weight]
    quantized.to_float8([linear.to(device)])
    assert linear.weight.is_contiguous() and linear.turned.is_contiguous() and linear.turned.shape == (64, 48)
    x = x.to(device).requires_grad_()
    out = linear(x.t())
    found = [out, torch.autograd.grad(out, [x], grad.to(device).t())[0].t()]
    for one, other in zip(found, expected, strict=True):
        assert (one.cpu() - other).norm() < 0.06 * other.norm()     # as above


@pytest.mark.slow
def test_compiled_in_one_graph():
    linear = torch.nn.Linear(32, 48).bfloat16().requires_grad_(False)
    assert quantized.to_float8([linear]) == 1
    found = []
    torch._dynamo.reset()
    for call in (linear, torch.compile(linear, backend="aot_eager", fullgraph=True)):
        x = torch.linspace(-1, 1, 7 * 32).view(7, 32).requires_grad_()
        call(x).float().square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=0.02, atol=1e-3)        # bf16, a few times


@pytest.mark.parametrize("trainer, flags", [
    (speech_trainer, "--bf16 --use_lora --compile false"), (speech_trainer, "--use_lora --compile"),
    (speech_trainer, "--bf16 --compile"), (train_sft, "--bf16 --use_lora --compile --parallel fsdp")])
def test_what_float8_needs(trainer, flags):
    args = trainer.build_parser().parse_args(
        ["--model_path", "m", "--train_data_file", "d", "--report_to", "none", "--float8", *flags.split(),
         *(["--audio_tokenizer_path", "c"] if trainer is speech_trainer else ["--gradient_accumulation_steps", "1"])])
    with pytest.raises(UserError, match="--float8 needs --compile, --use_lora, --bf16 and --parallel ddp"):
        trainer.check_flags(args, 1)


def test_gpus_without_float8_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
    with pytest.raises(UserError, match="RTX 3090 has no float8"):
        dist.check_device(torch.device("cuda"), Namespace(bf16=True, float8=True))
    dist.check_device(torch.device("cpu"), Namespace(bf16=True, float8=True))
