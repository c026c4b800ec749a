"""Likeness of voices as papers give it, "SIM": WavLM and a head of ECAPA-TDNN, of UniSpeech's
wavlm_large_finetune.pth.

Chen et al., "WavLM", 2022, section V.C; Desplanques et al., "ECAPA-TDNN", 2020. The sizes are read
from the weights.
"""
import re

import numpy as np
import torch
from torch.nn import functional as F

from core.cli import UserError

UNUSED = "loss_calculator.projection.weight"        # of the checkpoint's training
# WavLM's names in fairseq -> in transformers
NAMES = (("^mask_emb", "masked_spec_embed"), (r"(conv_layers\.\d)\.0", r"\1.conv"),
         ("weight_v", "weight.original1"), (r"(conv_layers\.\d)\.2\.1", r"\1.layer_norm"),
         ("^layer_norm", "feature_projection.layer_norm"),
         ("post_extract_proj", "feature_projection.projection"), ("weight_g", "weight.original0"),
         (r"pos_conv\.0(\.weight)", r"pos_conv.0.parametrizations\1"),
         (r"pos_conv\.0", "pos_conv_embed.conv"), ("self_attn_layer_norm", "layer_norm"),
         ("self_attn", "attention"), ("grep_a", "gru_rel_pos_const"),
         ("grep_linear", "gru_rel_pos_linear"),
         (r"relative_attention_bias\.weight", "rel_attn_embed.weight"),
         ("fc1", "feed_forward.intermediate_dense"), ("fc2", "feed_forward.output_dense"))


class Head:
    """ECAPA-TDNN by its weights, {name: tensor}. used: names of those that were asked for."""

    def __init__(self, weights):
        self.weights, self.used = weights, set()

    def __getitem__(self, name):
        self.used.add(name)
        return self.weights[name]

    def linear(self, name, x):
        return F.linear(x, self[f"{name}.weight"], self[f"{name}.bias"])

    def conv(self, name, x, dilation=1):
        weight = self[f"{name}.weight"]
        return F.conv1d(x, weight, self[f"{name}.bias"], dilation=dilation,
                        padding=dilation * (weight.shape[2] // 2))

    def norm(self, name, x):
        return F.batch_norm(x, *(self[f"{name}.{of}"]
                                 for of in ("running_mean", "running_var", "weight", "bias")))

    def layer(self, name, x):
        return self.norm(f"{name}.bn", self.conv(f"{name}.conv", x).relu())

    def block(self, name, x, dilation):
        """(1, C, T) -> the same: convolutions of parts, each after the one before; squeeze and
        excitation.
        """
        *parts, rest = self.layer(f"{name}.Conv1dReluBn1", x).chunk(8, dim=1)
        found, of = [], f"{name}.Res2Conv1dReluBn"
        for i, part in enumerate(parts):
            out = self.conv(f"{of}.convs.{i}", part + found[-1] if i else part, dilation)
            found.append(self.norm(f"{of}.bns.{i}", out.relu()))
        out = self.layer(f"{name}.Conv1dReluBn2", torch.cat([*found, rest], dim=1))
        gate = self.linear(f"{name}.SE_Connect.linear2",
                           self.linear(f"{name}.SE_Connect.linear1", out.mean(2)).relu())
        return x + out * gate.sigmoid()[:, :, None]

    def embedding(self, states):
        """(S, T, C) hidden states, the first before any layer -> (D,)."""
        x = torch.einsum("s,stc->ct", self["feature_weight"].softmax(0), states)[None]
        found = [self.layer("layer1", F.instance_norm(x))]
        for number in (2, 3, 4):
            found.append(self.block(f"layer{number}", found[-1], number))
        x = self.conv("conv", torch.cat(found[1:], dim=1)).relu()
        weights = self.conv("pooling.linear2", self.conv("pooling.linear1", x).tanh()).softmax(2)
        mean = (weights * x).sum(2)
        spread = ((weights * x ** 2).sum(2) - mean ** 2).clamp(min=1e-9).sqrt()
        return self.linear("linear", self.norm("bn", torch.cat([mean, spread], dim=1)))[0]


def read_wavlm(weights):
    """WavLMModel in eval mode of fairseq's weights by name; the sizes are theirs."""
    from transformers import WavLMConfig, WavLMModel
    for old, new in NAMES:
        weights = {re.sub(old, new, name): value for name, value in weights.items()}
    position = weights["encoder.pos_conv_embed.conv.parametrizations.weight.original1"]
    hidden, width, kernel = position.shape
    model = WavLMModel(WavLMConfig(
        hidden_size=hidden,
        num_hidden_layers=sum(name.endswith("gru_rel_pos_const") for name in weights),
        num_attention_heads=weights["encoder.layers.0.attention.gru_rel_pos_const"].shape[1],
        intermediate_size=len(weights["encoder.layers.0.feed_forward.intermediate_dense.weight"]),
        num_buckets=len(weights["encoder.layers.0.attention.rel_attn_embed.weight"]),
        feat_extract_norm="layer",
        conv_dim=[len(weights[f"feature_extractor.conv_layers.{i}.conv.weight"]) for i in range(7)],
        num_conv_pos_embeddings=kernel, num_conv_pos_embedding_groups=hidden // width,
        do_stable_layer_norm=True))
    model.load_state_dict(weights)
    return model.eval()


def load(path):
    """(embed(wave at 16 kHz) -> unit (D,) float64, its WavLM) of a checkpoint file. Raises
    UserError.
    """
    states = []     # what each layer gets, then what leaves the last norm

    @torch.inference_mode()
    def embed(wave):
        states.clear()
        wave = torch.from_numpy(wave).to(wavlm.device)
        states.append(wavlm(F.layer_norm(wave, wave.shape)[None]).last_hidden_state)
        found = head.embedding(torch.cat(states).float().cpu()).double()
        return (found / found.norm()).numpy()
    try:
        state, inside = torch.load(path, weights_only=True,
                                   map_location="cpu")["model"], "feature_extract.model."
        wavlm = read_wavlm({name[len(inside):]: state[name] for name in state
                            if name.startswith(inside)})
        for layer in wavlm.encoder.layers:
            layer.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        head = Head({name: state[name] for name in state if not name.startswith(inside)})
        embed(np.ones(16000, np.float32))       # asks for every weight
        if unknown := [name for name in head.weights.keys() - head.used - {UNUSED}
                       if not name.endswith("num_batches_tracked")]:
            raise ValueError(f"unknown weight {min(unknown)}")
    except Exception as error:
        raise UserError(f"--speaker_model {path}: is not a checkpoint of UniSpeech's speaker "
                        "verification with WavLM "
                        f"({type(error).__name__}: {' '.join(str(error).split())[:300]})")
    return embed, wavlm
