"""The native transformers Higgs-Audio V2 model on packed batches: forward and loss.

Parameter names are those of transformers, so hub checkpoints load, PEFT attaches and
save_pretrained and generate work. The training forward differs: one flat axis holds all samples,
in modality order (text rows, then audio rows), so each FFN of a dual-FFN layer reads a contiguous
slice. Attention has variable lengths, heads run on supervised rows only, and the host never
waits.
"""
import torch
import torch.nn.functional as F
from transformers.models.higgs_audio_v2 import modeling_higgs_audio_v2 as modeling

from core import kernels
from speech import labels
# for weights.module(), with the code below
from speech.labels import IGNORE, loss_report, token_ids  # noqa: F401
from speech.weights import (empty_model, load_tokenizer, read_config,  # noqa: F401
                            reset_buffers, weight_parts)

LICENCE = None          # no notice needed
LORA_TARGETS = "attention"      # default of --lora_target_modules: four linear layers
WHOLE_MODULES = ()      # modules that an adapter may contain in full
# sampling settings of the released model
DRAWS = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "ras_window": 7}

# ---- The interface of weights.module(), with the imported names


def text_setting(wanted):
    """--normalize_text as "on" or "off"; the default is on, as in boson-ai's inference."""
    return wanted or "on"


def layers(native):
    return native.model.layers


def weight_names(native):
    """{name in a checkpoint's files: parameter} of a full model."""
    return dict(native.named_parameters())


def save_config(*arguments):
    from speech import layout_2025      # a LoRA run writes none of these files
    layout_2025.save_config(*arguments)


# ---- Packed forward


class Permute(torch.autograd.Function):
    """rows[index] for a permutation; its backward is a gather too, not an atomic scatter-add."""

    @staticmethod
    def forward(ctx, rows, index, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class PackedDecoderLayer(modeling.HiggsAudioV2DecoderLayer):
    """The native layer with a second forward, used if `packed` is given."""

    def __init_subclass__(cls, **kwargs):
        """Empty: FSDP2 makes subclasses, whose forward transformers would wrap a second time."""

    def forward(self, hidden_states, *args, packed=None, **kwargs):
        """(S, H) -> (S, H) in modality order. packed: the number of text rows; (S,) the sequence
        position of each row; (S,) the reverse; cos and sin (S, D); (B + 1,) sample boundaries, on
        the CPU unless flash attention is used; the longest sample."""
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)
        n_text, order, seq_index, cos, sin, cu_seqlens, longest = packed
        attn, rows = self.self_attn, len(hidden_states)
        sizes = [n_text, rows - n_text]
        text, audio = hidden_states.split(sizes)
        normed = torch.cat([self.input_layernorm(text), self.audio_input_layernorm(audio)])
        # to sequence order here, since q, k and v are wider in total
        normed = Permute.apply(normed, seq_index, order)
        q, k, v = (linear(normed).view(rows, -1, attn.head_dim)
                   for linear in (attn.q_proj, attn.k_proj, attn.v_proj))
        q, k = modeling.apply_rotary_pos_emb(q, k, cos, sin)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))      # (1, heads, S, D)
        out, _ = kernels.packed_attention(attn, q, k, v, None, cu_seq_lens_q=cu_seqlens,
                                          max_length_q=longest)
        out = attn.o_proj(out.reshape(rows, -1))
        hidden_states = hidden_states + Permute.apply(out, order, seq_index)
        text, audio = hidden_states.split(sizes)
        text = self.mlp(self.post_attention_layernorm(text))
        audio = self.audio_mlp(self.audio_post_attention_layernorm(audio))
        return hidden_states + torch.cat([text, audio])


class PackedHiggs(labels.PackedBase):
    """The native model on packed batches, with adapters or without."""
    layers = staticmethod(layers)

    def __init__(self, net, recompute=None):
        super().__init__(net, recompute)
        for layer in layers(self.base_model):
            layer.__class__ = PackedDecoderLayer

    def hidden_states(self, batch):
        """Final hidden states (S, H) in modality order of a data.PackedBatch."""
        model = self.base_model.model
        order = torch.cat([batch.text_pos, batch.audio_pos])
        n_text = len(batch.text_pos)
        text = model.embed_tokens(batch.input_ids.index_select(0, batch.text_pos))
        text = text.to(kernels.stream_dtype(text))
        hidden = torch.cat([text, model.embed_audio_tokens(batch.audio_ids).to(text.dtype)])
        cos, sin = model.rotary_emb(hidden, batch.position_ids[None])
        ends = batch.cu_seqlens
        if not (hidden.is_cuda and hidden.dtype in kernels.FLASH):      # the host reads them
            ends = torch.tensor([0, *batch.seqlens]).cumsum(0)
        packed = n_text, order, batch.seq_index, cos[0], sin[0], ends, batch.longest
        for layer in model.layers:
            hidden = layer(hidden, packed=packed)
        return model.norm(hidden)

    def audio_logits(self, hidden, batch):
        """(R, K, C) fp32 logits of the rows that predict audio. hidden: of hidden_states."""
        config, head = self.base_model.config, self.base_model.audio_lm_head
        logits = head(hidden.index_select(0, batch.audio_rows)).float()
        return logits.view(-1, config.num_codebooks, config.codebook_size)

    def text_loss(self, hidden, batch):
        logits = self.base_model.text_lm_head(hidden.index_select(0, batch.text_rows)).float()
        return F.cross_entropy(logits, batch.text_targets, ignore_index=IGNORE, reduction="sum")


packed = PackedHiggs        # of module()


def freeze_unreachable(model, text_loss_weight):
    """Without a text loss, freeze the text head and the last layer's text FFN: no loss depends on
    them, as audio is predicted from audio rows only."""
    last = f"layers.{model.config.num_hidden_layers - 1}."
    unreachable = (f"{last}mlp.", f"{last}post_attention_layernorm.", "text_lm_head")
    for name, parameter in model.named_parameters():
        if text_loss_weight == 0 and any(stem in name for stem in unreachable):
            parameter.requires_grad_(False)
