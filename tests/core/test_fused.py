"""The norm of GPUs matches transformers' in values and gradients, and so do models whose layers are replaced."""
import copy

import pytest
import torch
import transformers
from transformers.models.qwen3 import modeling_qwen3

from core import kernels

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def reference_norm(x, weight):
    norm = modeling_qwen3.Qwen3RMSNorm(x.shape[-1], eps=1e-6)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def test_the_norm_is_as_near_to_float32_as_that_of_transformers():
    """It rounds once in bf16, transformers at each operator."""
    def norm(x, weight):
        return kernels.rms_norm(x, weight, 1e-6)
    exact = [numbers(*shape, seed=i).detach().bfloat16() for i, shape in enumerate(((4, 7, 24), (24,)))]
    results = []
    for function, kind in ((norm, torch.bfloat16), (reference_norm, torch.bfloat16), (reference_norm, torch.float32)):
        inputs = [x.detach().to(kind).requires_grad_() for x in exact]
        out = function(*inputs)
        assert out.dtype == kind or function is reference_norm
        out.backward(numbers(*out.shape, seed=9).detach().bfloat16().to(out.dtype))
        results.append([out.detach().float(), *(x.grad.float() for x in inputs)])
    for actual, other, true in zip(*results):
        assert (actual - true).norm() <= 1.05 * (other - true).norm() + 1e-3 * true.norm()


@pytest.mark.parametrize("kind, changes", [("Qwen3", {"norm", "mlp"}), ("Mistral", {"norm", "mlp"}),
                                           ("Gemma3Text", set()), ("Granite", {"norm", "mlp"})])
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
    for name, real in (("norm", kernels.rms_norm), ("mlp", kernels.swiglu)):
        monkeypatch.setattr(kernels, real.__name__, lambda *args, name=name, real=real: (
            called.add(name), real(*args))[1])
    losses = []
    for model, on in ((plain, False), (fused, True)):
        monkeypatch.setattr(kernels, "can_fuse", lambda x, on=on: on)
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    assert called == changes
    torch.testing.assert_close(losses[1], losses[0], **CLOSE)
    for (name, actual), expected in zip(fused.named_parameters(), plain.parameters()):
        assert (actual.grad - expected.grad).norm() <= 1e-5 * expected.grad.norm(), name
