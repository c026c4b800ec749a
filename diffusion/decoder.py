"""A Llama- or Qwen3-shaped language model as a block-diffusion backbone: its weights, block-causal attention.

Same three-part pass, masks and interface as dit.py; a token also sees what follows it in its block. The recipe is that
of dLLM's BD3 of Qwen3 (github.com/ZHZisZZ/dllm, examples/a2d), SDAR (arXiv 2510.06303, github.com/JetAstra/SDAR) and
E2D2 (github.com/kuleshov-group/e2d2): noisy and clean copies under the same positions, all weights trained, and no
shift: the head, which an autoregressive model reads one place before a token, here reads at the masked token itself.
The mask's row is new; where the table has rows that no token uses, it is the first of them, as in dLLM and SDAR.
Under LoRA the base is frozen, and the mask's row is a parameter of its own that is trained beside the adapters.

Names of parameters are transformers', so files go both ways. Read there: models/llama and models/qwen3.
"""
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from common import tensor_files
from common.distributed import UserError
from core import fused, json_files
from diffusion import dit

SHAPES = ("llama", "mistral", "qwen2", "qwen3", "sdar")     # values of model_type that are this network


@dataclass
class Config:
    """Shape of a decoder. vocab_size includes the mask token mask_id, which is never predicted."""
    vocab_size: int
    mask_id: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    theta: float            # base of the rotary frequencies
    eps: float              # of the norms
    tied: bool              # the head is the embedding
    qk_norm: bool           # Qwen3: queries and keys are normalised
    qkv_bias: bool          # Qwen2: their products have biases
    dropout: float = 0.0
    lora: dict | None = None    # adapt's arguments; base, the language model's name, and identity, of its files


def config_of(folder, vocab_size, mask_id, dropout):
    """Config of a transformers folder; vocab_size, if its own table is not larger. Raises UserError."""
    given = json_files.read_object(folder / "config.json")
    kind = given.get("model_type")
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    odd = {"model_type": (kind, kind if kind in SHAPES else SHAPES),
           "hidden_act": (given.get("hidden_act", "silu"), "silu"),
           "rope": (rope.get("rope_type", rope.get("type", "default")), "default"),
           "mlp_bias": (given.get("mlp_bias", False), False),
           "attention_bias": (given.get("attention_bias", False), False),
           "use_sliding_window": (given.get("use_sliding_window", False), False),
           "quantization_config": (given.get("quantization_config"), None)}
    if kind == "mistral":
        odd["sliding_window"] = given.get("sliding_window"), None
    if wrong := [f"{name} {value}" for name, (value, right) in odd.items() if value != right]:
        raise UserError(f"--init_from {folder}: its config.json has {', '.join(wrong)}; models of type "
                        f"{', '.join(SHAPES)} without that can be converted")
    heads = given["num_attention_heads"]
    return Config(
        max(vocab_size, given["vocab_size"]), mask_id, given["hidden_size"], given["num_hidden_layers"], heads,
        given.get("num_key_value_heads") or heads, given.get("head_dim") or given["hidden_size"] // heads,
        given["intermediate_size"], float(rope.get("rope_theta") or given.get("rope_theta") or dit.THETA),
        given.get("rms_norm_eps", 1e-6), bool(given.get("tie_word_embeddings", False)),
        kind in ("qwen3", "sdar"), kind == "qwen2", dropout)


def read_folder(folder, config):
    """{name: CPU tensor} of a transformers folder, without the second name of a tied head. Raises UserError."""
    files = tensor_files.model_files(folder, "--init_from ")
    tensor_files.open_tensors(files)        # names what cannot be read
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()
               if not name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        tensors.pop("lm_head.weight", None)
    if len(tensors.get("model.embed_tokens.weight", ())) > config.vocab_size:
        raise UserError(f"--init_from {folder}: its embedding has more rows than its config.json says")
    return tensors


# ---------------------------------------------------------------------------------------------------------------------
# Layers


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension in float32, with a weight."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        if fused.wanted(x):
            return fused.rms_norm(x, self.weight, self.eps)
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, bias = config.hidden_size, config.qkv_bias
        self.head_size = config.head_size
        self.q_proj = nn.Linear(size, config.heads * config.head_size, bias)
        self.k_proj = nn.Linear(size, config.kv_heads * config.head_size, bias)
        self.v_proj = nn.Linear(size, config.kv_heads * config.head_size, bias)
        self.o_proj = nn.Linear(config.heads * config.head_size, size, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = (Norm(config.head_size, config.eps) for _ in range(2))
        self.qk_norm = config.qk_norm

    def forward(self, x, cos, sin, queries, mask, clean_mask, past):
        """As dit.Layer: (attended (B, S or queries, H), keys and values of x (B, kv_heads, S, D))."""
        q, k, v = (out.unflatten(-1, (-1, self.head_size)) for out in fused.outputs(
            x, self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        rotate = fused.rotate if fused.wanted(v) else fused.rotate_kernel
        q, k = (rotate(t, cos, sin).to(v.dtype) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        new = k, v
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        return self.o_proj(dit.attend(q, k, v, queries, mask, clean_mask).flatten(2)), new


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x):
        gate, up = fused.outputs(x, self.gate_proj, self.up_proj)
        return self.down_proj(fused.swiglu(gate, up) if fused.wanted(x) else F.silu(gate) * up)


class Layer(nn.Module):
    """One transformer layer; arguments and results as dit.Layer's, without its conditioning."""

    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.eps)

    def forward(self, x, cos, sin, queries, mask, clean_mask=None, past=None):
        out, new = self.self_attn(self.input_layernorm(x), cos, sin, queries, mask, clean_mask, past)
        x = x[:, :out.shape[1]]
        x = x + F.dropout(out, self.dropout, self.training)
        x = x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)
        return x if past is None else (x, new)


class Decoder(nn.Module):
    """The whole network, with DiT's interface: forward is what training wraps, extend and logits what samples."""

    def __init__(self, config, backend="sdpa", recompute=None):
        super().__init__()
        self.config, self.backend, self.call = config, backend, dit.caller(recompute)
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList([Layer(config) for _ in range(config.layers)]),
            "norm": Norm(config.hidden_size, config.eps)})
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        self._masks = None, None        # layout, its masks: rows of one layout share them
        self.register_parameter("mask_row", None)
        if config.lora:
            # in a list, torch does not register it again
            self.adapted = [adapt(self, config.lora)]
            if recompute:
                from core import recomputation
                recomputation.leave_products(self, recompute)

    def tie(self):
        """Make the head the embedding, where it is; again when weights were moved or made anew."""
        if self.config.tied:
            self.lm_head.weight = self.model["embed_tokens"].weight

    embed = property(lambda self: self.model["embed_tokens"])
    layers = property(lambda self: self.model["layers"])

    def embedded(self, tokens):
        """(..., H) of tokens (...), in the dtype of the layers."""
        x = self.embed(tokens)
        x = x if self.mask_row is None else torch.where((tokens == self.config.mask_id)[..., None], self.mask_row, x)
        return x.to(fused.stream_dtype(x))

    def rope(self, position):
        """(cos, sin) of (B, S) positions, each (B, S, 1, D) float32."""
        half = self.config.head_size // 2
        frequency = self.config.theta ** (-torch.arange(half, device=position.device, dtype=torch.float32) / half)
        angle = position[..., None, None] * torch.cat([frequency, frequency])
        return angle.cos(), angle.sin()

    def hidden_states(self, inputs):
        """Final hidden states (B, N, H) of the noisy copies. inputs: noise.Inputs."""
        x, (cos, sin) = self.embedded(inputs.tokens), self.rope(inputs.position)
        for layer, masks in zip(self.layers, dit.masks_of(self, inputs)):
            given = (x, cos, sin, *masks)
            x = self.call(layer, *given) if self.training else layer(*given)
        return x

    def logits(self, hidden):
        """(..., H) -> (..., V) float32; the mask token's is -inf (SUBS: it is never the answer)."""
        return dit.logits_of(self.lm_head, self.model["norm"](hidden), self.config.mask_id)

    def row_losses(self, hidden, labels):
        """As dit.DiT.row_losses."""
        return dit.cross_entropies(self.lm_head, self.model["norm"](hidden), self.config.mask_id, labels)

    def forward(self, inputs):
        """Cross-entropy (R,) float32 of the clean token at each of inputs.rows; no row gives an empty tensor."""
        return dit.losses(self, inputs)

    def extend(self, tokens, position, mask, past):
        """As DiT.extend: hidden states of one more block behind cached ones, and its own keys and values."""
        x, new, (cos, sin) = self.embedded(tokens), [], self.rope(position)
        for layer, pair in zip(self.layers, past):
            x, own = layer(x, cos, sin, tokens.shape[1], mask, past=pair)
            new.append(own)
        return x, new


Model = Decoder

# ---------------------------------------------------------------------------------------------------------------------
# Adapters


def adapt(model, lora):
    """Freeze a Decoder, give it LoRA adapters and the mask's row as a parameter -> PEFT's wrapper.

    lora: of Config: dtype, the name of that of frozen weights, and arguments of adapters.add_lora by name. UserError
    when no layer is a target.
    """
    from core import adapters  # here: PEFT takes seconds to import
    how = [lora[name] for name in ("rank", "alpha", "dropout", "targets", "base", "rslora", "dora")]
    wrapper = adapters.add_lora(model, model.layers, *how, task=None)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, lora["dtype"]))
    model.mask_row = nn.Parameter(torch.zeros(model.config.hidden_size))
    return wrapper


def base_weights(model):
    """{transformers' name: parameter}: all of a Decoder, or the frozen ones under its adapters."""
    return {name.replace(".base_layer.", "."): parameter for name, parameter in model.named_parameters()
            if ".lora_" not in name and name != "mask_row"}


def begin_adapters(model, tensors, seed):
    """Fill new adapters, which change nothing yet, and the mask's row, from a start's tensors. The base is filled."""
    from core import adapters
    adapters.init_adapters(model.adapted[0], seed)
    tensor_files.fill(model.mask_row, tensors["model.embed_tokens.weight"][model.config.mask_id])


@torch.no_grad()
def read_base(model):
    """Fill the frozen weights from the language model that the checkpoint's config names. UserError when it changed."""
    config = model.config
    folder = tensor_files.find_folder(config.lora["base"], "the language model of these adapters,")
    files = tensor_files.model_files(folder)
    if tensor_files.fingerprint_files(files) != config.lora["identity"]:
        raise UserError(f"{folder}: its weights are not those that these adapters were trained on")
    tensors = read_folder(folder, config)
    for name, parameter in base_weights(model).items():
        parameter[:len(tensors[name])] = tensors[name]      # rows of new tokens stay: the mask has its own


@torch.no_grad()
def merged(model):
    """A Decoder without adapters that computes the same: updates are added to the weights, the mask's row is set."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
    tensors = {name: parameter.detach() for name, parameter in base_weights(model).items()}
    tensors["model.embed_tokens.weight"][model.config.mask_id] = model.mask_row
    if model.config.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    with torch.device("meta"):
        plain = Decoder(replace(model.config, lora=None), model.backend)
    plain.load_state_dict(tensors, assign=True)
    plain.tie()
    return plain


# ---------------------------------------------------------------------------------------------------------------------
# Work


def decays(name, parameter):
    """As dit.decays; a tied table is an embedding."""
    return parameter.ndim > 1 and "embed_tokens" not in name


def flops(config, tokens, rows, pairs):
    """As dit.flops; frozen matrices have no gradients of their own, and adapters are not counted."""
    size, heads = config.hidden_size, config.heads * config.head_size
    layer = 2 * size * (heads + config.kv_heads * config.head_size) + 3 * size * config.mlp_size
    matrices = 2 * tokens * layer * config.layers + 2 * rows * size * config.vocab_size
    return (2 if config.lora else 3) * matrices + 3 * 4 * heads * pairs * config.layers
