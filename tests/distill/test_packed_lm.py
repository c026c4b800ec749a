"""Packed batches have the losses and gradients of single documents; the loss in pieces, other architectures."""
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

from core import kernels
from core.cli import UserError
from core.dist import World
from distill import causal_lm, packed_lm
from distill.chat_data import collate
from distill.losses import chunked_loss
from tests.helpers.students import sample_loss


@pytest.mark.parametrize("student, recompute", [("qwen", None), ("llama", "all"), ("window", "all"),
                                                ("moe", None), ("moe", "all")])
def test_packed_is_unpacked(inputs, data, student, recompute):
    """Losses and every gradient are equal; documents of padding and another order change nothing."""
    table, train, _ = data(student)
    model, parts = packed_lm.build_empty(inputs / student, torch.float32, recompute=recompute)
    packed_lm.load(model, parts, World(device=torch.device("cpu")))
    model.train()
    reference = AutoModelForCausalLM.from_pretrained(
        inputs / student, **({"experts_implementation": "eager"} if student == "moe" else {}))
    chosen = [train[i] for i in (3, 0, 7, 4)]
    batch = collate([table[n] for n in chosen], pad_to=700)
    model.chunk = 3
    loss, right, _ = model(batch)[:3]
    loss.backward()
    wanted = [sample_loss(reference, table, n) for n in chosen]
    wanted_loss, wanted_right = map(sum, zip(*wanted))
    wanted_loss.backward()
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-5) and right == wanted_right
    grads = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.native.named_parameters():
        grad = grads.pop(name)
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-5 * grad.abs().max().item())
    assert not grads


def test_the_heads_gradient_is_summed_in_float32():
    """In bfloat16, 1 piece and 64 are equally near to the exact gradient. Without grad mode none is computed."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(256, 16).bfloat16(), torch.randn(50, 16).bfloat16()
    targets, gradients = torch.randint(0, 50, (256,)), []
    for chunk, dtype in ((256, torch.float64), (256, torch.bfloat16), (4, torch.bfloat16)):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight)]
        chunked_loss(leaves[0], (leaves[1], None), targets, chunk)[0].backward()
        assert leaves[1].grad.dtype == dtype
        gradients.append([t.grad.double() for t in leaves])
    for exact, whole, pieces in zip(*gradients):
        assert (pieces - exact).norm() < 1.1 * (whole - exact).norm() < 0.01 * exact.norm()
    with torch.no_grad():
        assert not chunked_loss(leaves[0], (leaves[1], None), targets, 4)[0].requires_grad


ENDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, **ENDS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0, **ENDS}


@pytest.mark.parametrize("kind, settings", [
    ("Mistral", {"sliding_window": 5}), ("Phi3", {}), ("Olmo2", {}), ("SmolLM3", {}), ("GPT2", None),
    ("Granite", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    ("Gemma3Text", {"head_dim": 8, "sliding_window": 5}), ("Olmoe", EXPERTS), ("GPTJ", {"rotary_dim": 4}),
    ("Qwen2Moe", EXPERTS | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12})])
def test_other_architectures_packed(kind, settings):
    """Losses and gradients, summed over documents, equal transformers' forward of each document alone."""
    config = getattr(transformers, f"{kind}Config")(**GPT2 if settings is None else SIZES | settings)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config).eval()
    if kind == "GPTJ" and not reference._supports_attention_backend:       # transformers < 5.24
        with pytest.raises(UserError, match="cannot be built with another attention|it is not supported"):
            causal_lm.empty_model(config, torch.float32, attention=kernels.packed_documents())
        return
    native = causal_lm.empty_model(config, torch.float32, attention=kernels.packed_documents()).eval()
    packed_lm.check_model(native)
    causal_lm.give_memory(native, "cpu")
    expected = dict(reference.named_parameters())
    for name, parameter in native.named_parameters():
        expected[name].data += 0.1 * torch.randn(parameter.shape)
        parameter.data.copy_(expected[name].data)
    documents = [torch.randint(3, 90, (n,)) for n in (9, 31, 17)]
    batch = collate([(i, ids.numpy(), np.ones(len(ids), bool)) for i, ids in enumerate(documents)])
    alone = sum(F.cross_entropy(reference(ids[None]).logits[0, :-1], ids[1:], reduction="sum") for ids in documents)
    alone.backward()
    loss = packed_lm.PackedLM(native)(batch)[0]
    loss.backward()
    assert loss.item() == pytest.approx(alone.item(), rel=1e-5)
    for name, parameter in native.named_parameters():
        wanted = expected[name].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item(),
                                   msg=lambda text, name=name: f"{name}: {text}")


def test_work_is_counted_like_a_plain_sum():
    """Chats of 3 and 7 tokens have 6 + 28 attended pairs. The teacher's tokens are counted, their FLOPs are not."""
    sizes = types.SimpleNamespace(hidden_size=8, vocab_size=20, num_attention_heads=4, head_dim=4, num_hidden_layers=2)
    products, attended = 2 * 10 * 100 + 2 * 3 * 8 * 20, 4 * 34 * 16 * 2
    for prompted, lora, flops in ((False, False, 3 * (products + attended)), (True, True, 2 * products + 3 * attended)):
        table = types.SimpleNamespace(lengths=np.array([3, 7]) + 2 * prompted, own=np.array([3, 7]),
                                      targets=np.array([1, 2]), prompted=prompted)
        assert packed_lm.step_work(table, [0, 1], 100, sizes, lora) == {
            "tokens": 10 + 4 * prompted, "targets": 3, "samples": 2, "flops": flops}
