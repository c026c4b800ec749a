"""A language model of transformers as a block-diffusion backbone, under block-causal attention.

Masks and interface are those of dit.py. The model's layers run with another attention function. The
recipe follows dLLM's BD3 of Qwen3 (github.com/ZHZisZZ/dllm), SDAR (arXiv 2510.06303) and E2D2:
noisy and clean copies share positions, all weights are trained, and the head is not shifted: it
predicts a token at its masked position, not one position before. The mask's embedding row is new,
or the first unused one; under LoRA it is a separate parameter.
"""
import functools
import inspect
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from core import kernels, tensor_io
from core.cli import require
from diffusion import dit

ATTENTION = "noisy_and_clean_blocks"
KINDS = ("llama", "mistral", "qwen2", "qwen3", "sdar")     # SDAR is Qwen3 under another mask


def block_attention(module, query, key, value, attention_mask, block_masks, **_):
    """dit.attend of query (B, heads, S, D), key and value (B, kv_heads, S, D) -> (B, S, heads, D),
    None. block_masks: masks of run(); in the last layer the unused clean tokens get zeros."""
    is_last = module.layer_idx == module.config.num_hidden_layers - 1
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    out = dit.attend(query.to(value.dtype), key.to(value.dtype), value, *block_masks[is_last])
    return F.pad(out, (0, 0, 0, 0, 0, query.shape[2] - out.shape[1])), None


AttentionInterface.register(ATTENTION, block_attention)


@dataclass
class Config:
    """Sizes of a decoder. vocab_size includes the mask token mask_id."""
    vocab_size: int
    mask_id: int
    source: dict                # config.json of the language model
    dropout: float = 0.0
    lora: dict | None = None    # arguments of adapters.add_lora; dtype of frozen weights; identity

    @functools.cached_property
    def native(self):
        """transformers' config of this network."""
        values = {k: v for k, v in self.source.items() if k not in ("model_type", "auto_map")}
        kind = self.source["model_type"].replace("sdar", "qwen3")
        return AutoConfig.for_model(kind, **values | {"vocab_size": self.vocab_size})

    layers = property(lambda self: self.native.num_hidden_layers)
    heads = property(lambda self: self.native.num_attention_heads)
    kv_heads = property(lambda self: self.native.num_key_value_heads)
    head_size = property(lambda self: getattr(self.native, "head_dim", None)
                         or self.native.hidden_size // self.native.num_attention_heads)


def config_of(origin, tokens, dropout):
    """Config of a run from a language model (published.Origin). Raises UserError."""
    source, where = origin.source, f"--init_from {origin.path}: its config.json has "
    kind = source.get("model_type")
    rope = source.get("rope_parameters") or source.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type"))
    require(kind in KINDS, f"{where}model_type {kind}; types {', '.join(KINDS)} can be converted")
    slides = "sliding_window" if kind == "mistral" else "use_sliding_window"
    require(not source.get(slides), f"{where}a sliding window, which blocks do not have")
    require(rope_type not in ("dynamic", "longrope"),
            f"{where}rope {rope_type}, which depends on the longest text of a batch")
    size = max(tokens.vocab_size, origin.form.get("vocab_size", 0))
    return Config(size, tokens.mask, source, dropout)


def read_folder(folder, config):
    """{name: CPU tensor} of a transformers folder; a tied head is left out. Raises UserError."""
    stored = tensor_io.open_tensors(tensor_io.files_of(folder, "model"))
    tensors = {name: rows[:] for name, rows in stored.items()
               if not name.endswith("rotary_emb.inv_freq")}
    table = tensors.get("model.embed_tokens.weight")
    if config.native.tie_word_embeddings and "lm_head.weight" in tensors:
        head = tensors.pop("lm_head.weight")
        require(table is None or torch.equal(head, table), f"--init_from {folder}: config.json has "
                "tie_word_embeddings true, but lm_head.weight is not the embedding: set false")
    require(table is None or len(table) <= config.vocab_size,
            f"--init_from {folder}: its embedding has more rows than its config.json says")
    return tensors


class Decoder(dit.Network):
    """The whole network, with DiT's interface."""

    def __init__(self, config, backend="sdpa", recompute=None):
        super().__init__()
        self.config, self.backend = config, backend
        net = AutoModelForCausalLM.from_config(config.native, dtype=torch.float32,
                                               attn_implementation=ATTENTION)
        self.model, self.lm_head = net.model, net.lm_head
        for layer in self.layers:
            for module in (layer.self_attn, layer.mlp):
                module.register_forward_hook(functools.partial(drop_output, config.dropout))
        self.register_parameter("mask_row", None)
        if config.lora:
            from core import adapters       # late: importing PEFT takes seconds
            how = [config.lora[name] for name in
                   ("rank", "alpha", "dropout", "targets", "base", "rslora", "dora")]
            # in a list, where torch does not register PEFT's wrapper again
            self.adapted = [adapters.add_lora(self, self.layers, *how, task_type=None)]
            for parameter in self.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(getattr(torch, config.lora["dtype"]))
            self.mask_row = nn.Parameter(torch.zeros(config.native.hidden_size))
        kernels.recompute(self.layers, recompute)

    embed = property(lambda self: self.model.embed_tokens)
    layers = property(lambda self: self.model.layers)
    head = property(lambda self: self.lm_head)

    def run(self, tokens, position, masks, past=None):
        """As DiT.run."""
        x = self.embed(tokens)
        if self.mask_row is not None:
            is_mask = (tokens == self.config.mask_id)[..., None]
            x = torch.where(is_mask, self.mask_row, x)
        rotary = self.model.rotary_emb(x, position)
        x = x.to(kernels.stream_dtype(x))
        cache = {}
        if past is not None:        # transformers has renamed this argument
            known = inspect.signature(type(self.layers[0]).forward).parameters
            cache = {"cache" if "cache" in known else "past_key_values": past}
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary, position_ids=position, block_masks=masks,
                      **cache)
        return x[:, :masks[-1][0]]

    def head_inputs(self, hidden):
        """As DiT.head_inputs."""
        return self.model.norm(hidden)


Config.network = Decoder


def drop_output(dropout, module, args, output):
    """Forward hook: dropout on the output of attention or an MLP."""
    if isinstance(output, tuple):
        return F.dropout(output[0], dropout, module.training), *output[1:]
    return F.dropout(output, dropout, module.training)


@torch.no_grad()
def merge_adapters(model):
    """A Decoder with its adapters merged into the frozen weights, which are reloaded. UserError."""
    from diffusion.published import base_weights
    config = model.config
    folder = tensor_io.find_folder(config.lora["base"], "the language model of these adapters,")
    files = tensor_io.files_of(folder, "model")
    require(tensor_io.fingerprint_files(files) == config.lora["identity"],
            f"{folder}: its weights are not those that these adapters were trained on")
    tensors = read_folder(folder, config)
    for name, parameter in base_weights(model).items():
        parameter[:len(tensors[name])] = tensors[name]      # the mask's row follows
    model = model.adapted.pop().merge_and_unload()
    model.embed.weight[config.mask_id] = model.mask_row
    model.mask_row, model.config = None, replace(config, lora=None)
    return model
