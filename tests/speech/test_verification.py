"""SIM of a checkpoint as UniSpeech writes it: the head against modules of torch, WavLM against transformers' own."""
import numpy as np
import pytest
import torch
from torch import nn

from core.cli import UserError
from speech import judges

PREFIX = "feature_extract.model."
LAYERS, HIDDEN, CHANNELS, POOLED = 2, 32, 32, 48


def wavlm():
    from transformers import WavLMConfig, WavLMModel
    torch.manual_seed(0)
    return WavLMModel(WavLMConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=40, conv_dim=[24] * 7,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, feat_extract_norm="layer", do_stable_layer_norm=True,
        layerdrop=0.0)).eval()


def fairseq_names(model):
    """{name in fairseq: tensor}, layer by layer."""
    state, found = model.state_dict(), {}

    def put(ours, *theirs):
        for end in ("weight", "bias"):
            if f"{theirs[0]}.{end}" in state:
                found[f"{ours}.{end}"] = state[f"{theirs[0]}.{end}"]
    found["mask_emb"] = state["masked_spec_embed"]
    for i in range(7):
        put(f"feature_extractor.conv_layers.{i}.0", f"feature_extractor.conv_layers.{i}.conv")
        put(f"feature_extractor.conv_layers.{i}.2.1", f"feature_extractor.conv_layers.{i}.layer_norm")
    put("layer_norm", "feature_projection.layer_norm")
    put("post_extract_proj", "feature_projection.projection")
    put("encoder.layer_norm", "encoder.layer_norm")
    conv = "encoder.pos_conv_embed.conv"
    for name, part in (("weight_g", "parametrizations.weight.original0"), ("bias", "bias"),
                       ("weight_v", "parametrizations.weight.original1")):
        found[f"encoder.pos_conv.0.{name}"] = state[f"{conv}.{part}"]
    for i in range(LAYERS):
        at = f"encoder.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            put(f"{at}self_attn.{name}", f"{at}attention.{name}")
        put(f"{at}self_attn.grep_linear", f"{at}attention.gru_rel_pos_linear")
        found[f"{at}self_attn.grep_a"] = state[f"{at}attention.gru_rel_pos_const"]
        put(f"{at}self_attn_layer_norm", f"{at}layer_norm")
        put(f"{at}final_layer_norm", f"{at}final_layer_norm")
        put(f"{at}fc1", f"{at}feed_forward.intermediate_dense")
        put(f"{at}fc2", f"{at}feed_forward.output_dense")
    found["encoder.layers.0.self_attn.relative_attention_bias.weight"] = \
        state["encoder.layers.0.attention.rel_attn_embed.weight"]
    assert len(found) == len(state)
    return found


def head_modules():
    """{name in the checkpoint: module of torch}, with numbers that all count."""
    modules = {"layer1.conv": nn.Conv1d(HIDDEN, CHANNELS, 5, padding=2), "layer1.bn": nn.BatchNorm1d(CHANNELS),
               "conv": nn.Conv1d(3 * CHANNELS, POOLED, 1), "pooling.linear1": nn.Conv1d(POOLED, 8, 1),
               "pooling.linear2": nn.Conv1d(8, POOLED, 1), "bn": nn.BatchNorm1d(2 * POOLED), "linear": nn.Linear(2 * POOLED, 16)}
    for layer in (2, 3, 4):
        for side in (1, 2):
            modules[f"layer{layer}.Conv1dReluBn{side}.conv"] = nn.Conv1d(CHANNELS, CHANNELS, 1)
            modules[f"layer{layer}.Conv1dReluBn{side}.bn"] = nn.BatchNorm1d(CHANNELS)
        for i in range(7):
            modules[f"layer{layer}.Res2Conv1dReluBn.convs.{i}"] = nn.Conv1d(4, 4, 3, padding=layer, dilation=layer)
            modules[f"layer{layer}.Res2Conv1dReluBn.bns.{i}"] = nn.BatchNorm1d(4)
        modules[f"layer{layer}.SE_Connect.linear1"], modules[f"layer{layer}.SE_Connect.linear2"] = \
            nn.Linear(CHANNELS, 8), nn.Linear(8, CHANNELS)
    draw = torch.Generator().manual_seed(1)
    for module in modules.values():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=draw)
                tensor.copy_(noise.abs() + 0.5 if name == "running_var" else tensor + 0.2 * noise)
        module.eval()
    return modules


@pytest.fixture(scope="module")
def parts():
    with torch.no_grad():
        return wavlm(), head_modules(), torch.tensor([0.3, -0.7, 1.1])


def saved(path, parts, change=lambda state: None):
    model, modules, weight = parts
    state = {PREFIX + name: tensor.clone() for name, tensor in fairseq_names(model).items()}
    for name, module in modules.items():
        state |= {f"{name}.{part}": tensor.clone() for part, tensor in module.state_dict().items()}
    state |= {"feature_weight": weight, "loss_calculator.projection.weight": torch.zeros(3, 2)}
    change(state)
    torch.save({"model": state, "best_valid_eer": 0.0}, path)
    return str(path)


@torch.no_grad()
def reference(parts, wave):
    """Unit embedding by ECAPA-TDNN's own order: convolution, ReLU, norm; parts of Res2 one behind another."""
    model, m, weight = parts
    wave = torch.from_numpy(wave)
    wave = (wave - wave.mean()) / (wave.var(unbiased=False) + 1e-5).sqrt()
    found = model(wave[None], output_hidden_states=True)
    states = [*found.hidden_states[:LAYERS], found.last_hidden_state]       # which s3prl takes behind the last norm
    shares = torch.exp(weight) / torch.exp(weight).sum()
    x = sum(share * state for share, state in zip(shares, states)).transpose(1, 2)
    x = (x - x.mean(2, keepdim=True)) / (x.var(2, unbiased=False, keepdim=True) + 1e-5).sqrt()
    x, outs = m["layer1.bn"](m["layer1.conv"](x).clamp(min=0)), []
    for layer in (2, 3, 4):
        at = f"layer{layer}."
        y = m[f"{at}Conv1dReluBn1.bn"](m[f"{at}Conv1dReluBn1.conv"](x).clamp(min=0))
        pieces, last = [], 0
        for i in range(7):
            last = m[f"{at}Res2Conv1dReluBn.convs.{i}"](last + y[:, 4 * i:4 * i + 4]).clamp(min=0)
            last = m[f"{at}Res2Conv1dReluBn.bns.{i}"](last)
            pieces.append(last)
        y = torch.cat([*pieces, y[:, 28:]], 1)
        y = m[f"{at}Conv1dReluBn2.bn"](m[f"{at}Conv1dReluBn2.conv"](y).clamp(min=0))
        gate = m[f"{at}SE_Connect.linear2"](m[f"{at}SE_Connect.linear1"](y.mean(2)).clamp(min=0))
        x = x + y / (1 + torch.exp(-gate))[..., None]
        outs.append(x)
    x = m["conv"](torch.cat(outs, 1)).clamp(min=0)
    logits = m["pooling.linear2"](torch.tanh(m["pooling.linear1"](x)))
    share = torch.exp(logits) / torch.exp(logits).sum(2, keepdim=True)
    mean = (share * x).sum(2)
    deviation = (share * (x - mean[..., None]) ** 2).sum(2).clamp(min=1e-9).sqrt()
    found = m["linear"](m["bn"](torch.cat([mean, deviation], 1)))[0].double()
    return (found / found.norm()).numpy()


def noise(seconds, seed):
    return (0.1 * np.random.default_rng(seed).normal(size=round(16000 * seconds))).astype(np.float32)


def test_an_embedding_is_the_references(parts, tmp_path):
    """Through load_judges, as the scripts have it; red when the parts of a block are not chained."""
    by = judges.load_judges(speaker_model=saved(tmp_path / "tiny.pth", parts))
    found = [by.embed(noise(seconds, i)) for i, seconds in enumerate((0.5, 2.0))]
    for i, seconds in enumerate((0.5, 2.0)):
        np.testing.assert_allclose(found[i], reference(parts, noise(seconds, i)), atol=2e-5)
    assert found[0].shape == (16,) and np.abs(found[0] - found[1]).max() > 1e-3
    assert np.array_equal(by.embed(noise(0.5, 0)), found[0])        # nothing of the clip before stays
    unchained = torch.roll(parts[1]["layer3.Res2Conv1dReluBn.convs.1"].weight, 1, 0)
    other = saved(tmp_path / "other.pth", parts,
                  lambda state: state.update({"layer3.Res2Conv1dReluBn.convs.1.weight": unchained}))
    assert np.abs(judges.load_unispeech(other)[0](noise(0.5, 0)) - found[0]).max() > 1e-4


@pytest.mark.parametrize("change, why", [
    (lambda state: state.pop("layer3.SE_Connect.linear1.bias"), "layer3.SE_Connect.linear1.bias"),
    (lambda state: state.update(shortcut=torch.zeros(1)), "unknown weight shortcut"),
    (lambda state: state.update({"linear.weight": torch.zeros(16, 7)}), "RuntimeError")])
def test_a_checkpoint_that_lacks_something_or_has_more_is_refused(parts, tmp_path, change, why):
    with pytest.raises(UserError, match=rf"tiny.pth: is not a checkpoint of UniSpeech's .*{why}"):
        judges.load_unispeech(saved(tmp_path / "tiny.pth", parts, change))
