"""Random problems of GSM8K's lengths, and whole optimizer steps on them: ours, and the straightforward one.

Both kinds of step take the same problems, noise, weights, precision and kind of optimizer, so what they compute must
agree.
"""
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import plain_block_diffusion as plain
from common import distributed, optim
from diffusion import blocks, dit, noise, weights
from diffusion.problems import Problem, Tokens

MEAN, SIGMA, SHORTEST, LONGEST, ANSWER = 157, 0.3375, 40, 440, 0.6      # GSM8K in GPT-2's tokens, for rows of 512
TOKENS = Tokens(None, 50258, 50256, 50256, 50256, -1, -1, -1, 50257)    # GPT-2's vocabulary and the mask


# ---------------------------------------------------------------------------------------------------------------------
# Data


def make_documents(n, length, seed):
    """blocks.Documents of n random problems for rows of `length` tokens."""
    rng, scale, layout = np.random.default_rng((seed, 1)), length / 512, blocks.Layout(max_length=length)
    sizes = np.exp(np.log(MEAN) - SIGMA ** 2 / 2 + SIGMA * rng.standard_normal(n)).clip(SHORTEST, LONGEST) * scale
    parts = []
    for tokens in sizes.round().astype(int):
        question = round((1 - ANSWER) * tokens)     # its first token and the answer's last one are <|endoftext|>
        ids = [rng.integers(0, TOKENS.bos, k - 1).tolist() for k in (question, tokens - question)]
        parts.append(blocks.make_document(blocks.regions_of(ids, TOKENS, layout), TOKENS, layout))
    ids, position, block, target, region, live = np.concatenate(parts, axis=1)
    offsets = np.cumsum([0] + [part.shape[1] for part in parts])
    group = blocks.number_groups(block, target, live, offsets)
    problems = [Problem(f"problem {i}", "", "", "") for i in range(n)]
    return blocks.Documents(layout, ids, position, block, target > 0, region, live > 0, group, offsets, problems,
                           TOKENS.pad, 0)


def make_packs(documents, micro_batch, pack, micro_steps, seed):
    """(blocks.Rows, packs, rows of the largest pack): `micro_batch` problems a micro-step, on average when packed.

    Rows of both kinds hold the same problems, micro_batch * micro_steps of them.
    """
    rows = blocks.make_rows(documents, np.arange(micro_batch * micro_steps), documents.layout.longest, pack, seed)
    order = np.random.default_rng((seed, 2)).permutation(len(rows))
    packs = [part.tolist() for part in np.array_split(order, micro_steps)]
    return rows, packs, len(packs[0])


# ---------------------------------------------------------------------------------------------------------------------
# Model


def build(world, args, backend, compiled, dropout=0.1):
    """(DiT, what to call, weights.Average), as the trainer makes them."""
    torch._dynamo.reset()       # after 8 shapes of one function dynamo would give up compiling it
    distributed.seed_everything(args.seed)
    config = dit.config_of(args.size, TOKENS.vocab_size, TOKENS.mask, dropout)
    model = dit.DiT(config, backend).to(world.device).train()
    if compiled:
        distributed.compile_layers(model.layers, dynamic=False)    # FlexAttention of unknown lengths is slow
    return model, distributed.wrap_ddp(model, world), weights.Average(model, 0.9999)


@torch.no_grad()
def stir(model, seed):
    """Give weights to what is zero at the start, so that attention matters; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "modulation" in name or "head" in name:      # zero: every layer would be the identity
            std = 1.0 if "modulation" in name and p.ndim == 1 else 0.02
            p.copy_(torch.randn(p.shape, generator=generator) * std)
        elif "qkv" in name:                             # else every token would look at all others alike
            p.mul_(3)


# ---------------------------------------------------------------------------------------------------------------------
# Steps


def problem_noise(documents, numbers, seed, step):
    """{problem: (level of each of its blocks with targets, uniform number of each of its tokens)} of one step."""
    rng = np.random.default_rng((seed, 3, step))
    groups = documents.n_groups[numbers]
    levels = (rng.permutation(groups.sum()) + rng.random(groups.sum())) / groups.sum()      # stratified
    return {d: (own, rng.random(documents.lengths[d]))
            for d, own in zip(numbers, np.split(levels, np.cumsum(groups)[:-1]))}


def draws_of(drawn, rows, pack, batch_rows):
    """noise.Draws of the rows of a pack, from the problem_noise of their problems."""
    levels, tokens = [np.empty(0)], np.zeros((batch_rows, rows.length))
    for r, row in enumerate(pack):
        members = rows.members[row]
        levels += [drawn[d][0] for d in members]
        uniform = np.concatenate([drawn[d][1] for d in members])
        tokens[r, :len(uniform)] = uniform
    return noise.Draws(np.concatenate(levels), np.empty(0), tokens)


def head_on_all(model, inputs):
    """DiT.forward, but logits of every noisy copy and not of the masked ones alone."""
    logits = model.logits(model.hidden_states(inputs).flatten(0, 1))
    labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device).index_copy(0, inputs.rows, inputs.labels)
    return F.cross_entropy(logits, labels, reduction="none").index_select(0, inputs.rows)


def one_attention(model, inputs):
    """DiT.forward, but one attention with one dense mask, as if clean queries might see noisy copies."""
    n, (_, length) = inputs.n_noisy, inputs.doc.shape
    at = torch.arange(length, device=inputs.doc.device)
    b = torch.arange(len(inputs.doc), device=inputs.doc.device)[:, None, None]
    mask = dit.attends(inputs.doc, inputs.block, n)(b, 0, at[:, None], at)[:, None]
    x, (cos, sin), condition = model.embedded(inputs.tokens), model.rope(inputs.position), model.condition()
    for layer in model.layers[:-1]:
        x = layer(x, condition, cos, sin, length, mask)
    x = model.layers[-1](x, condition, cos, sin, n, mask[:, :, :n])
    return model.row_losses(x.flatten(0, 1).index_select(0, inputs.rows), inputs.labels)


def our_step(world, args, documents, numbers, backend, compiled=False, pack=True, forward=None, fused=True,
             averaged=True, stirred=False):
    """step(number) -> (loss, gradient norm): trains the problems `numbers` in args.micro_steps micro-steps.

    forward: another DiT.forward. stirred: for comparing losses, weights that all matter and no dropout.
    """
    rows = blocks.make_rows(documents, numbers, documents.layout.longest, pack, args.seed)
    packs = [part.tolist() for part in np.array_split(np.arange(len(rows)), args.micro_steps)]
    batches = [blocks.collate([rows[r] for r in part], len(packs[0]), rows.length, rows.noisy_length, TOKENS.pad)
               for part in packs]
    model, wrapped, average = build(world, args, backend, compiled, 0.0 if stirred else 0.1)
    if stirred:
        stir(model, args.seed)
    optimizer = optim.build_adamw(model.named_parameters(), 5e-4, 0.0, (0.9, 0.999), dit.decays) if fused \
        else torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.0)

    def step(number):
        drawn, total = problem_noise(documents, numbers, args.seed, number), 0
        for batch, part in zip(batches, packs):
            inputs = noise.diffuse(batch, draws_of(drawn, rows, part, len(packs[0])), TOKENS.mask)
            inputs = inputs._replace(layout=None).to(world.device)      # masks are made anew, as in training
            with autocast(world.device):
                losses = forward(model, inputs) if forward else wrapped(inputs)
            loss = (losses * inputs.weights).sum() / rows.n_targets.sum()
            loss.backward()
            total = total + loss.detach()
        norm = optim.clip_gradients(list(model.parameters()), 1.0)
        bad = 1 - torch.isfinite(norm).float()
        if fused:
            optim.guarded_step(optimizer, bad)
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if averaged:
            average.update(bad)
        return total, norm
    return step


def plain_step(world, args, documents, numbers, noisy_logits_only=False, stirred=False):
    """our_step's counterpart: the straightforward step on the same problems, in args.plain_micro_steps micro-steps."""
    model, _, average = build(world, args, "sdpa", False, 0.0 if stirred else 0.1)
    if stirred:
        stir(model, args.seed)
    optimizer, shadow = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.0), list(average.shadow.values())
    length, parts = documents.layout.longest, np.array_split(numbers, args.plain_micro_steps)
    rows = [plain.padded(documents, part, length) for part in parts]
    mask = plain.dense_mask(length, documents.layout.block_size, world.device)
    targets = int(documents.n_targets[numbers].sum())

    def step(number):
        drawn, total = problem_noise(documents, numbers, args.seed, number), 0
        for some, part in zip(rows, parts):
            inputs = plain.noised(some, part, drawn, TOKENS.mask, world.device)
            with autocast(world.device):
                loss = plain.loss_sum(model, *inputs, mask, noisy_logits_only) / targets
            loss.backward()
            total = total + loss.detach()
        return total, plain.optimizer_step(model, optimizer, shadow, number + 1)
    return step


def autocast(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
