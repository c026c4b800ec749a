"""Files in the published BD3-LM and MDLM formats compute the same as a plain forward pass in this file."""
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from core.cli import UserError
from diffusion import blocks, dit, published
from diffusion.problems import load_tokenizer
from tests.helpers.trainer import ROOT

TABLE = json.loads((ROOT / "tests" / "diffusion" / "bd3lm_owt.json").read_text())
LAYERS, HEADS, V = 2, 4, 454        # of model size nano and the demo's tokenizer
SIZES = {768: 64, 2304: 192, 3072: 256, 4608: 384, 1536: 128, 128: 16, 256: 256, 32: 8, 50258: V}
EPS = {"sampling_eps_min": 0.3, "sampling_eps_max": 0.8}


def draw(seed):
    """The table's tensors at the sizes of nano, with random values."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (dtype, *shape) in TABLE["tensors"].items():
        if (number := re.search(r"blocks\.(\d+)", name)) and int(number[1]) >= LAYERS:
            continue
        tensors[name] = 0.3 * torch.randn([SIZES[n] for n in shape], dtype=getattr(torch, dtype), generator=generator)
        if name.endswith("inv_freq"):
            tensors[name] = 1.0 / (10_000 ** (torch.arange(0, 16, 2).float() / 16))
        elif name in EPS:
            tensors[name] = torch.tensor(EPS[name])
    return tensors


def reference(state, noisy, clean, size):
    """Logits (L, V) of noisy (L,) ids before clean (L,) ids in blocks of `size`, as in bd3lms' models/dit.py."""
    w = {name.removeprefix("backbone."): tensor for name, tensor in state.items()}
    length = len(noisy)
    number = torch.arange(length).repeat(2) // size
    is_clean = torch.arange(2 * length) >= length
    mask = ((number[:, None] == number) & (is_clean[:, None] == is_clean)) | ((number[:, None] > number) & is_clean)
    mask &= ~(is_clean[:, None] & ~is_clean)
    wave = torch.cat([torch.ones(128), torch.zeros(128)])       # of noise level 0

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:]) * w[f"{name}.weight"]
    condition = F.silu(linear("sigma_map.mlp.2", F.silu(linear("sigma_map.mlp.0", wave))))
    angle = torch.outer(torch.arange(length).float(), w["rotary_emb.inv_freq"]).repeat(2, 2)[:, None]
    x = w["vocab_embed.embedding"][torch.cat([noisy, clean])]
    for i in range(LAYERS):
        block = f"blocks.{i}."
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(block + "adaLN_modulation", condition).chunk(6)
        q, k, v = linear(block + "attn_qkv", norm(block + "norm1", x) * (1 + scale1) + shift1).view(
            2 * length, 3, HEADS, -1).unbind(1)
        q, k = (t * angle.cos() + torch.cat([-t[..., 8:], t[..., :8]], -1) * angle.sin() for t in (q, k))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v).flatten(1)
        x = x + gate1 * linear(block + "attn_out", out)
        up = F.gelu(linear(block + "mlp.0", norm(block + "norm2", x) * (1 + scale2) + shift2), approximate="tanh")
        x = x + gate2 * linear(block + "mlp.2", up)
    shift, scale = linear("output_layer.adaLN_modulation", condition).chunk(2)
    return linear("output_layer.linear", norm("output_layer.norm_final", x) * (1 + scale) + shift)[:length]


@pytest.fixture
def files(tmp_path):
    """{form: folder}: one model in both published forms."""
    averaged = draw(1)
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file(averaged, hub / "model.safetensors")
    (hub / "config.json").write_text(json.dumps({"model_type": "bd3lm", "n_heads": HEADS, "hidden_dim": 64}))
    old = tmp_path / "mdlm"
    old.mkdir()
    save_file({name: tensor for name, tensor in averaged.items() if name not in EPS}, old / "model.safetensors")
    (old / "config.json").write_text(json.dumps({"model_type": "mdlm"}))
    return {"hub": hub, "mdlm": old}


def filled(loaded, config):
    model = dit.DiT(config).eval()
    model.load_state_dict(loaded[0])
    return model


def inputs_of(noisy, clean, size, rows):
    """blocks.Blocks of one problem whose noisy copies `rows` are trained."""
    tokens, positions = torch.cat([noisy, clean])[None], torch.arange(len(noisy)).repeat(2)[None]
    return blocks.Blocks(tokens, positions, torch.zeros_like(positions), positions // size, len(noisy), rows=rows,
                         labels=clean[rows], weights=torch.ones(len(rows)))


def logits_of(model, noisy, clean, size):
    """Our model's logits for the same tokens, from the training pass."""
    inputs = inputs_of(noisy, clean, size, torch.zeros(0, dtype=torch.int64))
    return model.logits(model.hidden_states(inputs))[0]


@pytest.mark.parametrize("for_gpus", [False, True])
def test_loss_and_gradients_are_the_official_ones(for_gpus, monkeypatch):
    """300 tokens are more than a matrix has columns, so gates go into weights. A GPU pads the 454 words."""
    monkeypatch.setattr(dit, "on_gpu", lambda x: for_gpus)
    state = {name: tensor.requires_grad_("backbone" in name) for name, tensor in draw(3).items()}
    clean = torch.randint(V - 1, (150,), generator=torch.Generator().manual_seed(4))
    rows = torch.arange(0, 150, 3)
    noisy = clean.index_fill(0, rows, V - 1)
    expected = reference(state, noisy, clean, 16)[rows].index_fill(1, torch.tensor(V - 1), -torch.inf)
    expected = F.cross_entropy(expected, clean[rows], reduction="none")
    model = dit.DiT(dit.config_of("nano", V, V - 1, dropout=0.0)).train()
    model.load_state_dict(published.from_official(state, model.config, "x"))
    actual = model(inputs_of(noisy, clean, 16, rows))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    actual.sum().backward()
    expected.sum().backward()
    for name, parameter in model.named_parameters():
        grad, wanted = parameter.grad, state[f"backbone.{published.official_name(name)}"].grad
        assert (grad - wanted).norm() <= 1e-4 * wanted.norm(), name      # sums in other orders: 8e-6 was seen


@pytest.mark.parametrize("form", ["hub", "mdlm"])
def test_every_form_gives_the_published_model(files, demo, form, seed=1):
    tokens = load_tokenizer(demo, "gsm8k")
    config = dit.config_of("nano", tokens.vocab_size, tokens.mask)
    loaded = published.read(published.find(files[form]), config, tokens)
    noisy, clean = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(2))
    for size in (4, 12):
        actual = logits_of(filled(loaded, config), noisy, clean, size)
        expected = reference(draw(seed), noisy, clean, size)
        torch.testing.assert_close(actual[:, :-1], expected[:, :-1], rtol=1e-5, atol=1e-4)
    again = published.official_state(loaded[0], HEADS, EPS.values())
    wanted = draw(seed)
    assert again.keys() == wanted.keys() and all(torch.equal(again[name], wanted[name]) for name in wanted)
    assert {name: str(t.dtype) for name, t in again.items()} == {name: str(t.dtype) for name, t in wanted.items()}


def test_names_are_those_of_the_published_class():
    with torch.device("meta"):
        model = dit.DiT(dit.config_of("small", 50258, 50257))
    state = published.official_state(dict(model.named_parameters()), 12, (1e-3, 1))
    assert {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in state.items()} == TABLE["tensors"]


def spoil(path, change):
    save_file({**draw(1), **change}, path / "model.safetensors")


@pytest.mark.parametrize("damage, words", [
    (lambda f: spoil(f["hub"], {"backbone.extra": torch.ones(1)}),
     "1 names are missing, unknown or of another shape (--model_size), first extra"),
    (lambda f: spoil(f["hub"], {"backbone.blocks.0.norm1.weight": torch.ones(3)}),
     "of another shape (--model_size), first layers.0.norm_attention.weight"),
    (lambda f: (f["hub"] / "config.json").write_text('{"time_conditioning": true}'), "time_conditioning True"),
    (lambda f: (f["hub"] / "model.safetensors").write_bytes(b"no"), "cannot be read")])
def test_files_that_do_not_fit_are_refused_in_one_line(files, demo, damage, words):
    tokens = load_tokenizer(demo, "gsm8k")
    damage(files)
    with pytest.raises(UserError, match=re.escape(words)):
        published.read(published.find(files["hub"]), dit.config_of("nano", V, V - 1), tokens)
