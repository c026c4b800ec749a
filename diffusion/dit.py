"""The DiT backbone of block diffusion (BD3-LM, arXiv 2503.09573).

A row of the batch is x_t, the noisy copies of blocks (N tokens), then x_0, the clean tokens (L).
One pass gives the loss of all blocks: a noisy block attends to itself and to the clean blocks
before it. The mask depends only on each token's document, block number and half (attends), so one
model covers packed rows, padded rows and the hierarchy of question, plan and execution.
The network is that of BD3-LM and MDLM: RoPE, adaLN-zero (DiT, arXiv 2212.09748), GELU MLP, untied
zero-initialised head. There is no time conditioning, so the modulation is constant.
"""
import functools
import math
import re
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from core import kernels

# hidden size, layers, heads, size of the condition; nano is for demos and tests
SIZES = {"nano": (64, 2, 4, 16), "tiny": (256, 8, 8, 64), "small": (768, 12, 12, 128),
         "medium": (1024, 24, 16, 128)}
RECOMPILE = 32          # shapes that dynamo compiles for; then it silently runs eagerly
HEAD_ROWS = 8192        # rows of logits at a time; the backward pass recomputes them
ROW_STEP = 128          # on a GPU the number of rows of logits is a multiple of this
TILE = 128              # queries and keys of a tile, flex_attention's unit of work
# the default of 4 warps spills 920 bytes per thread on sm_90, 8 warps spill none
KERNEL = {"fwd_num_warps": 8}
NOTHING, SOME, ALL = 0, 1, 2        # how many pairs of a tile may attend
THETA = 10_000.0        # base of the rotary frequencies
FREQUENCIES = 256       # sines and cosines of the noise level


@dataclass
class Config:
    """Shape of a DiT. vocab_size includes mask_id, the mask token, which is never predicted."""
    vocab_size: int
    mask_id: int
    hidden_size: int
    layers: int
    heads: int
    cond_size: int
    dropout: float = 0.1

    lora = None         # this and the next two are as in decoder.Config
    kv_heads = property(lambda self: self.heads)
    head_size = property(lambda self: self.hidden_size // self.heads)


def config_of(size, vocab_size, mask_id, dropout=0.1):
    """Config of a named size (SIZES)."""
    return Config(vocab_size, mask_id, *SIZES[size], dropout)


def attends(doc, block, n_noisy):
    """BD3-LM's attention mask as FlexAttention's function of (row, head, query, key) indices.

    doc, block: (B, S) ints; doc is -1 on padding. The first n_noisy tokens of a row are noisy.
    Within its document a query attends to its block in its half (M_BD), and to clean tokens of
    earlier blocks (M_OBC, M_BC). Padding attends to itself, so no softmax row is empty."""
    def rule(b, h, q, k):
        q_block, k_block = block[b, q], block[b, k]
        own_block = (q_block == k_block) & ((q < n_noisy) == (k < n_noisy))
        earlier = (q_block > k_block) & (k >= n_noisy)
        seen = (doc[b, q] == doc[b, k]) & (doc[b, k] >= 0) & (own_block | earlier)
        return seen | (q == k)
    return rule


def tile_states(doc, block, n_noisy):
    """(B, tiles, tiles) int8 of NOTHING, SOME or ALL: how many pairs of each tile may attend.
    doc, block: (B, S) int arrays as in attends. Tests pairs of runs (tokens of one block, about 50
    runs per row) instead of pairs of tokens as create_block_mask does, so a loader can do it."""
    rows, length = doc.shape
    edges = np.append(np.arange(0, length, TILE), length)
    counts = np.zeros((rows, len(edges) - 1, len(edges) - 1), np.int64)
    for r in range(rows):
        changes = np.flatnonzero((np.diff(doc[r]) != 0) | (np.diff(block[r]) != 0)) + 1
        starts = np.unique(np.concatenate([[0, n_noisy], changes]))
        ends = np.append(starts[1:], length)[:, None]
        runs, is_text = np.arange(len(starts)), doc[r, starts] >= 0
        rule = attends(doc[r:r + 1, starts], block[r:r + 1, starts],
                       np.searchsorted(starts, n_noisy))
        seen = rule(0, 0, runs[:, None], runs) & is_text    # runs of padding do not attend
        # (runs, tiles) tokens of each run in each tile
        tokens = (np.minimum(ends, edges[1:]) - np.maximum(starts[:, None], edges[:-1])).clip(min=0)
        counts[r] = tokens.T @ seen @ tokens
        counts[r] += np.diag((tokens * ~is_text[:, None]).sum(0))   # each padding token to itself
    states = np.select([counts == TILE * TILE, counts > 0], [ALL, SOME], NOTHING)
    return torch.from_numpy(states.astype(np.int8))


def attention_masks(doc, block, n_noisy, states=None):
    """(mask of noisy queries over all keys, mask of the other queries), for attend().
    With states (tile_states, on the device of doc and block): two BlockMasks; the second has all
    queries and keys. Otherwise: two (B, 1, queries, keys) bool; the second has clean ones only."""
    (rows, length), device = doc.shape, doc.device
    rule = attends(doc, block, n_noisy)

    def block_mask(states, queries):
        tiles = []      # number and indices of partial tiles, then of full ones
        for state in (SOME, ALL):
            chosen = (states[:, None] == state).int()
            tiles += [chosen.sum(-1, dtype=torch.int32),
                      chosen.argsort(dim=-1, descending=True, stable=True).int()]
        return BlockMask.from_kv_blocks(*tiles, BLOCK_SIZE=TILE, mask_mod=rule,
                                        seq_lengths=(queries, length))
    if states is not None:
        return block_mask(states[:, :-(-n_noisy // TILE)], n_noisy), block_mask(states, length)
    b = torch.arange(rows, device=device)[:, None, None]
    tokens = torch.arange(length, device=device)
    noisy, clean = tokens[:n_noisy, None], tokens[n_noisy:]
    return rule(b, 0, noisy, tokens)[:, None], rule(b, 0, clean[:, None], clean)[:, None]


# compiled to one kernel, which does not store the scores; late, as the compiler loads for seconds
compiled_flex = functools.cache(lambda: torch.compile(flex_attention, dynamic=False))


def on_gpu(x):
    """True for a tensor on a GPU outside of compiled layers."""
    return x.is_cuda and not torch.compiler.is_compiling()


def sparse_attention(q, k, v, mask):
    """FlexAttention under a BlockMask; in the graph of a compiled layer. On a CPU forward only."""
    flex = compiled_flex() if on_gpu(q) else flex_attention
    return flex(q, k, v, block_mask=mask, kernel_options=KERNEL)


def attend(q, k, v, queries, mask, clean_mask):
    """Attention of q, k, v (B, heads, S, D) -> (B, S or queries, heads, D). The first `queries`
    tokens use mask. The others attend to each other by clean_mask, or are left out without."""
    first = q if queries == q.shape[2] else q[:, :, :queries]    # slicing costs a backward pass
    attention = sparse_attention if isinstance(mask, BlockMask) else F.scaled_dot_product_attention
    out = attention(first, k, v, mask)
    if clean_mask is not None:
        clean = (t[:, :, queries:] for t in (q, k, v))
        out = torch.cat([out, F.scaled_dot_product_attention(*clean, attn_mask=clean_mask)], dim=2)
    return out.transpose(1, 2)


def cross_entropies(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="none")


@functools.cache
def compiled_losses():
    # only sizes that change become symbolic. With dynamic=True all would be, and Triton, unable to
    # prove that rows are aligned, would read 2 bytes at a time, not 16 (tests/gpu/test_kernels.py)
    torch._dynamo.config.recompile_limit = max(RECOMPILE, torch._dynamo.config.recompile_limit)
    return torch.compile(cross_entropies)


def losses_of(logits, labels):
    """cross_entropies(), on a GPU compiled, where it keeps only its inputs."""
    compiled = on_gpu(logits) and kernels.compiles("cuda")
    return (compiled_losses() if compiled else cross_entropies)(logits, labels)


class Network(nn.Module):
    """Losses of a backbone with a Config, run(), head_inputs(hidden) and a head."""

    def hidden_states(self, inputs):
        """Final hidden states (B, N, H) of the noisy copies. inputs: blocks.Blocks. Rows with fewer
        copies than a tile get dense masks, as torch compiles FlexAttention of few queries without a
        backward pass."""
        n_noisy, flex = inputs.n_noisy, self.backend == "flex" and inputs.n_noisy >= TILE
        noisy, others = attention_masks(inputs.doc, inputs.block, n_noisy,
                                        inputs.tiles if flex else None)
        inner = (inputs.doc.shape[1], others, None) if flex else (n_noisy, noisy, others)
        # attend()'s (queries, mask, clean_mask); the last layer has only noisy queries
        return self.run(inputs.tokens, inputs.position, [inner, (n_noisy, noisy, None)])

    def _logits(self, hidden):
        """Logits (..., V or more) of hidden states, -inf for the mask and beyond the vocabulary.
        GPT-2's 50,258 rows are padded, since tensor cores need rows of a multiple of 16 bytes."""
        x, weight, bias = self.head_inputs(hidden), self.head.weight, self.head.bias
        size = len(weight)
        bias = torch.zeros(size, device=x.device) if bias is None else bias.clone()
        bias[self.config.mask_id] = -torch.inf
        if on_gpu(x) and size % 8:
            weight = F.pad(weight.to(x.dtype), (0, 0, 0, -size % 64))
            bias = F.pad(bias, (0, -size % 64), value=-torch.inf)
        return F.linear(x, weight, bias.to(x.dtype))

    def logits(self, hidden):
        """(..., H) -> (..., V) float32; -inf for the mask (SUBS: it has no probability)."""
        return self._logits(hidden)[..., :len(self.head.weight)].float()

    def row_losses(self, hidden, labels):
        """Cross-entropies (R,) float32 of hidden states (R, H) at labels (R,)."""
        return losses_of(self._logits(hidden), labels)

    def forward(self, inputs):
        """Cross-entropy (R,) float32 of the clean token at each of inputs.rows, in chunks."""
        hidden, rows, labels = self.hidden_states(inputs).flatten(0, 1), inputs.rows, inputs.labels
        if on_gpu(hidden):      # the number of masked tokens varies: allocate fewer sizes
            rows, labels = (F.pad(numbers, (0, -len(numbers) % ROW_STEP))
                            for numbers in (rows, labels))
        hidden = hidden.index_select(0, rows)
        if len(hidden) <= HEAD_ROWS:
            return self.row_losses(hidden, labels)[:len(inputs.rows)]
        chunks = zip(hidden.split(HEAD_ROWS), labels.split(HEAD_ROWS))
        losses = [checkpoint(self.row_losses, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat(losses)[:len(inputs.rows)]

    def flops(self, tokens, rows, pairs):
        """Model FLOPs of forward and backward: three times the forward; twice for frozen weights.
        tokens: noisy and clean. rows: masked tokens, which reach the head. pairs: (query, key)
        pairs that attend. Padding, recomputation and adapters are not counted."""
        matrices = sum(p.numel() for name, p in self.named_parameters() if p.ndim > 1
                       and "layers." in name and not re.search("modulation|lora_", name))
        products = 2 * tokens * matrices + 2 * rows * self.head.weight.numel()
        scores = 4 * pairs * self.config.heads * self.config.head_size * self.config.layers
        return (2 if self.config.lora else 3) * products + 3 * scores


def modulate(norm, x, shift, scale):
    """norm(x) * (1 + scale) + shift, like x (..., H). norm: nn.LayerNorm; shift, scale (H,)."""
    weight = norm.weight.float() * (1 + scale)
    with torch.autocast(x.device.type, enabled=False):      # autocast would return float32
        return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), shift.to(x.dtype), 1e-5)


def modulations(modulation, condition, number):
    """`number` (H,) float32 tensors (shifts, scales, gates) from a condition (cond_size,)."""
    with torch.autocast(condition.device.type, enabled=False):      # a few numbers
        return modulation(condition.to(modulation.weight.dtype)).float().chunk(number)


def rotate(x, cos, sin):
    """Rotary embedding of x (B, S, heads, D), like x; cos, sin (B, S, 1, D / 2) float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def gated_linear(linear, x, gate):
    """gate * linear(x). The gate (outputs,) scales the weights or, if smaller, the result."""
    if x[..., 0].numel() < linear.in_features:
        return gate.to(x.dtype) * linear(x)
    bias = None if linear.bias is None else gate * linear.bias
    return F.linear(x, gate[:, None] * linear.weight, bias)


class Layer(nn.Module):
    """One transformer layer under adaLN-zero. Every layer starts as the identity."""

    def __init__(self, config, number):
        super().__init__()
        size, self.number = config.hidden_size, number
        self.heads, self.dropout = config.heads, config.dropout
        self.norm_attention, self.norm_mlp = (nn.LayerNorm(size, bias=False) for _ in range(2))
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.modulation = nn.Linear(config.cond_size, 6 * size)

    def forward(self, x, condition, cos, sin, queries, mask, clean_mask, past):
        """x (B, S, H) -> same shape, or (B, queries, H). The first `queries` tokens attend by mask,
        the others by clean_mask. If that is None, the others only give keys and values.

        condition (cond_size,). past: None, or sample_bd3lm.Past; mask is (B, 1, S, P + S) then."""
        shift1, scale1, gate1, shift2, scale2, gate2 = modulations(self.modulation, condition, 6)
        qkv = self.qkv(modulate(self.norm_attention, x, shift1, scale1))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        if past is not None:
            k, v = past.update(k, v, self.number)
        out = attend(q, k, v, queries, mask, clean_mask)
        x = x[:, :out.shape[1]]
        attention = gated_linear(self.out, out.flatten(2), gate1)
        x = x + F.dropout(attention, self.dropout, self.training)
        mlp = F.gelu(self.up(modulate(self.norm_mlp, x, shift2, scale2)), approximate="tanh")
        return x + F.dropout(gated_linear(self.down, mlp, gate2), self.dropout, self.training)


class DiT(Network):
    """backend: "flex" (on a CPU forward only) or "sdpa". recompute: as --gradient_checkpointing."""

    def __init__(self, config, backend="sdpa", recompute=None):
        super().__init__()
        self.config, self.backend = config, backend
        size, cond = config.hidden_size, config.cond_size
        self.embed = nn.Embedding(config.vocab_size, size)
        self.condition_in = nn.Linear(FREQUENCIES, cond)
        self.condition_out = nn.Linear(cond, cond)
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.layers)])
        self.norm = nn.LayerNorm(size, bias=False)
        self.modulation = nn.Linear(cond, 2 * size)
        self.head = nn.Linear(size, config.vocab_size)
        nn.init.kaiming_uniform_(self.embed.weight, a=math.sqrt(5))
        for linear in [self.head, self.modulation, *(layer.modulation for layer in self.layers)]:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        kernels.recompute(self.layers, recompute)

    def condition(self):
        """(cond_size,) embedding of noise level 0, whose cosines are 1 and sines 0."""
        weight = self.condition_in.weight
        waves = torch.zeros(FREQUENCIES, device=weight.device, dtype=weight.dtype)
        waves[:FREQUENCIES // 2] = 1
        with torch.autocast(weight.device.type, enabled=False):
            return F.silu(self.condition_out(F.silu(self.condition_in(waves))))

    def run(self, tokens, position, masks, past=None):
        """Hidden states of tokens at positions (B, S) -> (B, queries of the last layer, H). masks:
        attend()'s last arguments, for inner layers and the last one. past: or sample_bd3lm.Past."""
        x = self.embed(tokens)
        x = x.to(kernels.stream_dtype(x))
        half = self.config.head_size // 2
        exponents = -torch.arange(half, device=position.device, dtype=torch.float32) / half
        angle = position[..., None, None] * THETA ** exponents
        condition, cos, sin = self.condition(), angle.cos(), angle.sin()
        for layer in self.layers:
            is_last = layer is self.layers[-1]
            inputs = x, condition, cos, sin, *masks[is_last], past
            if self.training and layer.gradient_checkpointing:
                x = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                x = layer(*inputs)
        return x

    def head_inputs(self, hidden):
        """Hidden states (..., H) as input of the head."""
        return modulate(self.norm, hidden, *modulations(self.modulation, self.condition(), 2))


Config.network = DiT


def trained_parameters(model):
    """{name: parameter} of the trained parameters: all, or adapters and the mask's row."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
