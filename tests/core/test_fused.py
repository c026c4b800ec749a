"""The GPU kernels of norm, rotary embedding and SwiGLU match transformers in values and gradients, on the CPU."""
import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from core import kernels

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def reference_norm(x, weight):
    norm = modeling_qwen3.Qwen3RMSNorm(x.shape[-1], eps=1e-6)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def reference_rotated(x, cos, sin):
    return modeling_qwen3.apply_rotary_pos_emb(x, x, cos[:, 0], sin[:, 0])[0]


ANGLES = numbers(2, 1, 5, 16, seed=3).detach()      # halves that differ: any cosine and sine, that bf16 has
COS, SIN = (values.bfloat16().float() for values in (ANGLES.cos(), ANGLES.sin()))
CASES = {"norm": (lambda x, w: kernels.rms_norm(x, w, 1e-6), reference_norm, ((4, 7, 24), (24,))),
         "swiglu": (kernels.swiglu, lambda gate, up: nn.functional.silu(gate) * up, ((3, 40), (3, 40))),
         "rotary": (lambda x: kernels.rotate(x, COS.to(x.dtype), SIN.to(x.dtype)),
                    lambda x: reference_rotated(x, COS.to(x.dtype), SIN.to(x.dtype)), ((2, 3, 5, 16),))}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_as_near_to_float32_as_transformers(case):
    """The kernels round once in bf16, transformers at each operator; the kernels' error is no larger."""
    fused, reference, shapes = CASES[case]
    exact = [numbers(*shape, seed=i).detach().bfloat16() for i, shape in enumerate(shapes)]
    results = []
    for function, kind in ((fused, torch.bfloat16), (reference, torch.bfloat16), (reference, torch.float32)):
        inputs = [x.detach().to(kind).requires_grad_() for x in exact]
        out = function(*inputs)
        assert out.dtype == kind or function is reference
        out.backward(numbers(*out.shape, seed=9).detach().bfloat16().to(out.dtype))
        results.append([out.detach().float(), *(x.grad.float() for x in inputs)])
    for actual, other, true in zip(*results):
        assert (actual - true).norm() <= 1.05 * (other - true).norm() + 1e-3 * true.norm()


@pytest.mark.parametrize("kind, changes", [("Qwen3", {"norm", "mlp", "rotary"}), ("Mistral", {"norm", "mlp", "rotary"}),
                                           ("Gemma3Text", set()), ("Granite", {"norm", "mlp", "rotary"})])
def test_whole_models_compute_the_same(kind, changes, monkeypatch):
    """Loss and all gradients are equal. Gemma's norms and activation differ, so they keep transformers' code."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0)
    plain = transformers.AutoModelForCausalLM.from_config(config).train()
    for parameter in plain.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids, fused = torch.randint(0, 50, (2, 9)), kernels.use(copy.deepcopy(plain))
    called = set()
    for name, real in (("norm", kernels.rms_norm), ("mlp", kernels.swiglu), ("rotary", kernels.rotate)):
        monkeypatch.setattr(kernels, real.__name__, lambda *args, name=name, real=real: (
            called.add(name), real(*args))[1])
    losses = []
    for model, on in ((plain, False), (fused, True)):
        monkeypatch.setattr(kernels, "can_fuse", lambda x, on=on: on)
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    assert called - {"rotary"} == changes - {"rotary"} and changes <= called
    torch.testing.assert_close(losses[1], losses[0], **CLOSE)
    for (name, actual), expected in zip(fused.named_parameters(), plain.parameters()):
        assert (actual.grad - expected.grad).norm() <= 1e-5 * expected.grad.norm(), name
