"""A straightforward training step of block diffusion: what bench/block_diffusion.py compares the trainer's with.

Written from the paper (BD3-LM, arXiv 2503.09573) and from what its code does (github.com/kuleshov-group/bd3lms): one
problem a row, padded to L tokens; L noisy tokens before L clean ones under one dense mask for all rows; logits of all
2L places, the clean half's thrown away; log-probabilities of the whole vocabulary at all L; the loss masked at the end;
torch's AdamW, gradient clipping and averaged weights tensor by tensor. The code's two scatters, which set the
log-probabilities of unmasked places, are left out: the mask on the loss does the same for less.

It computes with the weights of a dit.DiT, but not with its forward.
"""

import numpy as np
import torch
import torch.nn.functional as F

LOW = 1e-3      # least noise level


# ---------------------------------------------------------------------------------------------------------------------
# Network and loss


def dense_mask(length, block_size, device):
    """(2L, 2L) bool, True where a query (row) sees a key: its own noisy block, clean blocks before, clean to clean."""
    at = torch.arange(2 * length, device=device)
    block, clean = at % length // block_size, at >= length
    query, key = block[:, None], block
    own = (query == key) & (clean[:, None] == clean)
    past = (query > key) & clean
    return own | past


def attend(layer, x, cos, sin, mask):
    """Self-attention of x (B, 2L, H) with rotary positions."""
    batch, length, size = x.shape
    q, k, v = layer.qkv(x).view(batch, length, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
    q, k = (torch.cat([t[..., :t.shape[-1] // 2] * cos - t[..., t.shape[-1] // 2:] * sin,
                       t[..., t.shape[-1] // 2:] * cos + t[..., :t.shape[-1] // 2] * sin], -1) for t in (q, k))
    out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
    return layer.out(out.transpose(1, 2).reshape(batch, length, size))


def network(model, tokens, mask):
    """What the head multiplies, (B, 2L, H), of tokens (B, 2L), noisy half first."""
    config, length = model.config, tokens.shape[1] // 2
    half = config.hidden_size // config.heads // 2
    angle = torch.outer(torch.arange(length, device=tokens.device).repeat(2).float(),
                        10_000.0 ** (-torch.arange(half, device=tokens.device) / half))
    cos, sin = angle.cos(), angle.sin()
    condition, x = model.condition(), model.embed(tokens)

    def norm(weight, x, shift, scale):
        return F.layer_norm(x, x.shape[-1:], weight, eps=1e-5) * (1 + scale) + shift
    for layer in model.layers:
        shift1, scale1, gate1, shift2, scale2, gate2 = layer.modulation(condition).chunk(6, -1)
        out = attend(layer, norm(layer.norm_attention.weight, x, shift1, scale1), cos, sin, mask)
        x = x + gate1 * F.dropout(out, config.dropout, model.training)
        out = layer.down(F.gelu(layer.up(norm(layer.norm_mlp.weight, x, shift2, scale2)), approximate="tanh"))
        x = x + gate2 * F.dropout(out, config.dropout, model.training)
    return norm(model.norm.weight, x, *model.modulation(condition).chunk(2, -1))


def loss_sum(model, clean, noisy, t, mask, noisy_logits_only=False):
    """Sum of the weighted loss over masked places. clean, noisy, t: (B, L).

    noisy_logits_only: throw the clean half away before the head, an easy gain that the official code leaves.
    """
    length, mask_id = clean.shape[1], model.config.mask_id
    hidden = network(model, torch.cat([noisy, clean], 1), mask)
    logits = model.head(hidden[:, :length]) if noisy_logits_only else model.head(hidden)[:, :length]
    logits = logits.float()
    logits[..., mask_id] = -1e6         # the mask token is never the answer
    log_p = logits.log_softmax(-1)
    losses = -log_p.gather(-1, clean[..., None])[..., 0] / t
    return (losses * (noisy == mask_id)).sum()


# ---------------------------------------------------------------------------------------------------------------------
# Rows, noise, step


def padded(documents, numbers, length):
    """Rows of one problem each -> (clean (B, L), target (B, L), group (B, L)) arrays of blocks.Documents `numbers`."""
    shape = len(numbers), length
    clean, target, group = np.full(shape, documents.pad), np.zeros(shape, bool), np.full(shape, -1)
    for r, d in enumerate(numbers):
        part = slice(*documents.offsets[d:d + 2])
        n = part.stop - part.start
        clean[r, :n], target[r, :n] = documents.ids[part], documents.target[part]
        group[r, :n] = documents.group[part]
    return clean, target, group


def noised(rows, numbers, noise, mask_id, device):
    """(clean, noisy, t) tensors (B, L) of padded rows. noise: {problem: (level of each block, uniform of each token)}.
    """
    clean, target, group = rows
    level, uniform = np.ones(clean.shape), np.ones(clean.shape)
    for r, d in enumerate(numbers):
        levels, uniforms = noise[d]
        level[r] = np.where(group[r] >= 0, levels[group[r].clip(min=0)], 1)
        uniform[r, :len(uniforms)] = uniforms
    t = LOW + (1 - LOW) * level
    noisy = np.where(target & (uniform <= t), mask_id, clean)
    return tuple(torch.from_numpy(a).to(device, non_blocking=True) for a in (clean, noisy, t.astype(np.float32)))


def optimizer_step(model, optimizer, shadow, step, decay=0.9999):
    """Clip, AdamW, then averaged weights. shadow: one tensor a parameter; step counts from 1."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    decay = min(decay, (1 + step) / (10 + step))
    with torch.no_grad():
        for average, parameter in zip(shadow, model.parameters()):
            average.sub_((1 - decay) * (average - parameter))
    return norm
