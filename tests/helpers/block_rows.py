"""Small documents, batches (blocks.Blocks) and networks for the tests of block diffusion."""
import math

import numpy as np
import torch

from diffusion import blocks, dit, sample_bd3lm

V, MASK = 21, 20
CONFIG = dit.Config(V, MASK, hidden_size=32, layers=3, heads=2, cond_size=8, dropout=0.0)


def document(sizes, prompt=0, question=0, seed=0):
    """(n, 3) array of ids, block, target. The first `prompt` tokens are no targets, nor is block 0 if question is 1."""
    block = np.repeat(np.arange(len(sizes)), sizes)
    n, rng = len(block), np.random.default_rng(seed)
    target = (np.arange(n) >= prompt) & ~((block == 0) & bool(question))
    return np.stack([rng.integers(0, MASK, n), block, target], axis=1)


def make_blocks(rows, length, width):
    """blocks.Blocks of rows of documents, a gap of padding between them; width: noisy copies a row."""
    shape = (len(rows), length)
    ids, position, doc, block, group = (torch.full(shape, fill) for fill in (7, 0, -1, 0, -1))
    target, copied, groups = torch.zeros(shape, dtype=torch.bool), torch.full((len(rows), width), -1), 0
    for r, docs in enumerate(rows):
        start = 0
        for number, table in enumerate(docs):
            to, table = slice(start, start + len(table)), torch.from_numpy(table)
            ids[r, to], block[r, to], target[r, to] = table[:, 0], table[:, 1], table[:, 2].bool()
            position[r, to], doc[r, to] = torch.arange(len(table)), number
            for b in table[:, 1].unique():
                if (own := table[:, 1] == b).any() and (table[own, 2] > 0).any():
                    group[r, to][own], groups = groups, groups + 1
            start += len(table) + (start == 0)
        copies = (group[r] >= 0).nonzero()[:, 0]
        copied[r, :len(copies)] = copies
    places, is_copy = copied.clamp(min=0), copied >= 0
    ids, position, doc, block = (torch.cat([clean.gather(1, places), clean], 1) for clean in (ids, position, doc, block))
    doc[:, :width][~is_copy] = -1
    tiles = dit.tile_states(doc.numpy(), block.numpy(), width)
    return blocks.Blocks(ids, position, doc.int(), block.int(), width, places, target.gather(1, places) & is_copy,
                         group.gather(1, places).masked_fill(~is_copy, -1), groups, tiles=tiles)


def clean_half(batch):
    """(4, B, L) ids, positions, documents and blocks of the clean tokens of blocks.Blocks."""
    return torch.stack([batch.tokens, batch.position, batch.doc, batch.block])[:, :, batch.n_noisy:]


def noised(batch, seed=0, **options):
    draws = blocks.draw(seed, "train", 0, batch.n_groups, *clean_half(batch).shape[1:])
    return blocks.diffuse(batch, draws, MASK, **options)


def network(config=CONFIG, backend="sdpa", **options):
    """A DiT whose every weight matters: no zeros left."""
    torch.manual_seed(0)
    model = dit.DiT(config, backend, **options)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.5)
    return model


def loss_of(model, inputs, n_targets):
    return (model(inputs) * inputs.weights).sum() / n_targets


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_close(a, b, rtol=1e-5):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-5 * float(y.detach().abs().max()) + 1e-7)


MIXED = [[document([4, 4, 3], prompt=6), document([5, 3, 3, 2], question=1, seed=1)], [document([4] * 5, seed=2)]]


def seen_by(doc, block, n_noisy):
    """(B, S, S) bool mask from attention_masks; clean queries get no noisy keys."""
    of_noisy, of_clean = dit.attention_masks(doc, block, n_noisy)
    full = torch.zeros(len(doc), doc.shape[1], doc.shape[1], dtype=torch.bool)
    full[:, :n_noisy], full[:, n_noisy:, n_noisy:] = of_noisy[:, 0], of_clean[:, 0]
    return full


def sampled_hidden(model, batch, inputs, row, doc, number):
    """Hidden states of one noisy block as the sampler computes them: clean tokens into a cache, then the block."""
    ids, position, of_doc, block = clean_half(batch)[:, row]
    context = torch.stack([ids, position, block])[:, (of_doc == doc) & (block < number)]
    past = sample_bd3lm.prefill(model, *context[:, None], torch.ones(1, context.shape[1], dtype=torch.bool))
    copies = ((batch.doc[row] == doc) & (batch.block[row] == number))[:batch.n_noisy].nonzero()[:, 0].tolist()
    seen = torch.ones(1, 1, len(copies), context.shape[1] + len(copies), dtype=torch.bool)
    noisy = inputs.tokens[row:row + 1, copies], inputs.position[row:row + 1, copies]
    hidden, _ = sample_bd3lm.extend(model, *noisy, seen, past)
    return hidden[0], copies


def chi_square(counts, probabilities):
    """Statistic minus its 99.99 % quantile (Wilson and Hilferty): negative when the counts fit."""
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = len(expected) - 1
    limit = df * (1 - 2 / (9 * df) + 3.719 * math.sqrt(2 / (9 * df))) ** 3 if df else 1e-9
    return ((counts - expected) ** 2 / expected).sum() - limit
