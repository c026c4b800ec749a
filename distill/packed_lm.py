"""transformers' causal language models on packed batches: attention inside each document, loss in
chunks of rows.

transformers' forward runs on one flat axis of all conversations, with another attention function.
The head reads only rows that predict a trained token, in chunks, inside the wrapped forward, so
FSDP2 gathers its weight once.
"""
import math

import torch
from torch import nn

from core import dist, kernels, tensor_io
from core.cli import require
from distill import causal_lm
from distill.chat_data import PackedChats
from distill.losses import chunked_loss

LOGITS = 2**26          # values of logits at a time: 256 MiB in fp32
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
LENGTH_ROPE = {"dynamic", "longrope"}
# settings that the packed forward ignores: {name: values without effect}
NEUTRAL = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "logit_scale": 1,
           "logits_scaling": 1, "lm_head_multiplier": 1, "attention_dropout": 0,
           "attn_pdrop": 0, "attention_chunk_size": None,
           # adds the routers' balancing loss in transformers
           "output_router_logits": False}
MIXTURES = {"qwen2_moe", "qwen3_moe", "olmoe"}      # of experts, in the layout of causal_lm.EXPERTS


def check_model(model):
    """UserError if packed documents would not be independent, or the loss not transformers'."""
    config, parameters = model.config, [name for name, _ in model.named_parameters()]
    rope = getattr(config, "rope_parameters", None) or {}       # one dict, or one per type of layer
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    layers = set(getattr(config, "layer_types", None) or ())
    mixture = any(".experts." in name for name in parameters)
    for bad, why in (
            (not model._supports_attention_backend, "its attention cannot be replaced"),
            (getattr(model, "_is_stateful", False) or layers - SUPPORTED_LAYERS,
             "it has layers that carry state from one packed document into the next"),
            (kinds & LENGTH_ROPE, f"its {' or '.join(kinds & LENGTH_ROPE)} rotary embedding "
             "depends on the longest document of a pack"),
            (any(name.endswith(".sinks") for name in parameters), "it has attention sinks"),
            (mixture and config.model_type not in MIXTURES,
             f"of mixtures of experts only {', '.join(sorted(MIXTURES))} are"),
            (not isinstance(model.get_output_embeddings(), nn.Linear), "it has no linear head"),
            *((getattr(config, setting, neutral) not in (neutral, None),
               f"its config.json has {setting} {getattr(config, setting, None)}")
              for setting, neutral in NEUTRAL.items())):
        require(not bad, f"{type(model).__name__} is not supported: {why}")


# ---- Model and loss


class PackedLM(nn.Module):
    """Module that DDP and FSDP2 wrap: forward(batch) -> sums, so any split of a batch adds up.

    net: a causal LM with kernels.packed_documents() as attention, or the PeftModel around it.
    recompute: as --gradient_checkpointing. With a teacher or --keep it is a frozen.Student."""

    sums, prompted = 3, None        # number of sums of forward

    def __init__(self, net, recompute=None):
        super().__init__()
        self.net, self.lora, self.frozen = net, hasattr(net, "peft_config"), {}
        kernels.recompute(causal_lm.decoder_layers(self.native), recompute)
        rows = LOGITS // self.native.get_output_embeddings().out_features
        self.chunk = max(128, rows // 128 * 128)        # whole tiles of matrix products

    @property
    def native(self):
        """transformers' model, including adapters."""
        return self.net.get_base_model() if self.lora else self.net

    def forward(self, batch: PackedChats):
        """Sums over the batch, 0-d fp32 tensors: (the trained loss, targets that were the likeliest
        token, targets). Only the first has gradients."""
        (rows,), head = self.rows(batch)
        loss, right = chunked_loss(rows, head, batch.targets, self.chunk)
        # filled on the device: copying a Python number would wait for the GPU
        return loss, right, torch.full_like(right, len(batch.targets))

    def rows(self, batch):
        """(((R, H) inputs of the head that predict the targets,), (weight, bias) of the head)."""
        embedded = self.native.get_input_embeddings()(batch.input_ids[None])
        bounds, longest = batch.cu_seqlens, batch.longest
        hidden = self.native.base_model(
            inputs_embeds=embedded.to(kernels.stream_dtype(embedded)), use_cache=False,
            position_ids=batch.position_ids[None], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
            max_length_q=longest, max_length_k=longest).last_hidden_state[0]
        head = self.native.get_output_embeddings()
        return (hidden.index_select(0, batch.rows),), (head.weight, head.bias)


def build_empty(folder, dtype, lora=None, recompute=None, four_bits=False, wrap=PackedLM):
    """(PackedLM of a model folder, on the meta device, {name: slice} of its weights).
    UserError. lora: None, or arguments of adapters.add_lora; then only adapters are trained.
    four_bits: frozen layers in NF4. wrap(net, recompute): makes the PackedLM."""
    native = net = causal_lm.empty_model(causal_lm.load_config(folder), dtype, folder,
                                         kernels.packed_documents())
    check_model(native)
    layers, parts = causal_lm.decoder_layers(native), causal_lm.weight_parts(folder, native)
    causal_lm.check_weights(native, parts, folder)
    weights = layer_weights(layers, native.config)
    if lora:
        from core import adapters
        net = adapters.add_lora(native, layers, *lora)
    if four_bits:
        from core import quantized
        quantized.to_nf4(layers)
    packed = wrap(net, recompute)
    packed.weights = weights
    return packed, parts


def load(model, parts, world, *, sharding=None, compiled=False):
    """Move build_empty's model to this rank's device and load its files, except for adapters.

    sharding: options of dist.shard, or None. compiled: torch.compile each layer."""
    layers = causal_lm.decoder_layers(model.native)
    if compiled:
        dist.compile_layers(layers)
    if sharding is not None:
        dist.shard(model, layers, world, **sharding)
    on_host = sharding and sharding.get("cpu_offload")
    causal_lm.give_memory(model, "cpu" if on_host else world.device, world.device)
    tensor_io.load_base(model.native, parts, world, causal_lm.split_experts)


def loss_report(sums, prefix):
    """Sums of forward() over all ranks -> {metric name: float}; nan if every step was skipped."""
    loss, right, targets, *parts = sums
    names = ("loss", "accuracy", "ce_loss", "kl_loss")      # the last two with a teacher
    return {f"{prefix}/{name}": total / targets if targets else math.nan
            for name, total in zip(names, (loss, right, *parts))}


def layer_weights(layers, config):
    """Number of weights in transformers' layers that multiply a token; of a mixture of experts,
    those that a token is routed to."""
    matrices = [weight for layer in layers for weight in layer.parameters() if weight.ndim > 1]
    return sum(weight.numel() if weight.ndim == 2
               else weight.numel() * config.num_experts_per_tok // len(weight)
               for weight in matrices)


def step_work(table, samples, weights, config, lora):
    """{"tokens", "targets", "samples", "flops"} of a step's samples on all ranks: the student's
    FLOPs, forward and backward, without recomputation, adapters and sliding windows. weights: from
    layer_weights.

    A matrix with N weights costs 2N per row forward, 2N for the input gradient and, if it is
    trained, 2N for its gradient. The head runs on trained rows only. A pair (query, key) costs
    4 * heads * head_dim forward, twice that backward."""
    lengths, targets = table.lengths[samples], int(table.targets[samples].sum())
    own = table.own[samples]        # without the teacher's version
    pairs = int((own * (own + 1) // 2).sum())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    products = int(own.sum()) * weights + targets * config.hidden_size * config.vocab_size
    attended = config.num_attention_heads * head_dim * pairs * config.num_hidden_layers
    return {"tokens": int(lengths.sum()), "targets": targets, "samples": len(samples),
            "flops": (4 if lora else 6) * products + 12 * attended}
