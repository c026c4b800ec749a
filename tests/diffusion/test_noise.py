"""Block diffusion against independent slow formulas: who sees whom, noise, loss, averaged weights, names, sampling."""
import math
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from common.parallel import UserError
from diffusion import dit, noise, sampler

V, MASK = 21, 20
CONFIG = dit.Config(V, MASK, hidden_size=32, layers=3, heads=2, cond_size=8, dropout=0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Small documents, rows, models


def document(sizes, given=0, question=0, seed=0):
    """(n, 3) array of ids, block, target: blocks of these sizes; the first `given` tokens are no targets, and neither
    is block 0 when question is 1.
    """
    block = np.repeat(np.arange(len(sizes)), sizes)
    n, rng = len(block), np.random.default_rng(seed)
    target = (np.arange(n) >= given) & ~((block == 0) & bool(question))
    return np.stack([rng.integers(0, MASK, n), block, target], axis=1)


def blocks(rows, length, width, everything=False):
    """bd3lm.Blocks of rows of documents, a gap of padding between them; width: noisy copies a row.

    everything: all tokens get a noisy copy, not only those of blocks with targets.
    """
    shape = (len(rows), length)
    ids, position, doc, block, group = (torch.full(shape, fill) for fill in (7, 0, -1, 0, -1))
    target, noisy, groups, documents = torch.zeros(shape, dtype=torch.bool), torch.full((len(rows), width), -1), 0, 0
    for r, docs in enumerate(rows):
        at = 0
        for number, table in enumerate(docs):
            to, table = slice(at, at + len(table)), torch.from_numpy(table)
            ids[r, to], block[r, to], target[r, to] = table[:, 0], table[:, 1], table[:, 2].bool()
            position[r, to], doc[r, to] = torch.arange(len(table)), number
            for b in table[:, 1].unique():
                if (own := table[:, 1] == b).any() and (table[own, 2] > 0).any():
                    group[r, to][own], groups = groups, groups + 1
            at, documents = at + len(table) + (at == 0), documents + 1
        copies = ((doc[r] >= 0) & ((group[r] >= 0) | everything)).nonzero()[:, 0]
        noisy[r, :len(copies)] = copies
    at = noisy.clamp(min=0)
    tiles = dit.tile_states(torch.cat([doc.gather(1, at).masked_fill(noisy < 0, -1), doc], 1).numpy(),
                            torch.cat([block.gather(1, at), block], 1).numpy(), width)
    return noise.Blocks(ids, position, doc, block, target, target.long(), noisy, group, groups, int(target.sum()),
                        documents, int((doc >= 0).sum()), *tiles)


def noised(batch, seed=0, **options):
    draws = noise.draw(seed, "train", 0, batch.n_groups, *batch.doc.shape)
    return noise.diffuse(batch, draws, MASK, **options)


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


def close(a, b, rtol=1e-5):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-5 * float(y.detach().abs().max()) + 1e-7)


MIXED = [[document([4, 4, 3], given=6), document([5, 3, 3, 2], question=1, seed=1)], [document([4] * 5, seed=2)]]


# ---------------------------------------------------------------------------------------------------------------------
# Who sees whom


def seen_by(doc, block, n_noisy):
    """(B, S, S) bool of what attention_masks allows; clean queries see no noisy key, since they are not given any."""
    of_noisy, of_clean = dit.attention_masks(doc, block, n_noisy)
    full = torch.zeros(len(doc), doc.shape[1], doc.shape[1], dtype=torch.bool)
    full[:, :n_noisy], full[:, n_noisy:, n_noisy:] = of_noisy[:, 0], of_clean[:, 0]
    return full


@pytest.mark.parametrize("length,size", [(6, 1), (8, 2), (12, 4), (10, 5), (8, 8), (9, 4)])
def test_mask_of_the_baseline_is_the_papers(length, size):
    block = torch.arange(length).repeat(2)[None] // size
    full = seen_by(torch.zeros_like(block), block, length)[0]
    for q, k in product(range(2 * length), repeat=2):
        q_block, k_block, q_clean, k_clean = q % length // size, k % length // size, q >= length, k >= length
        expected = (q_block == k_block and q_clean == k_clean) or (q_block > k_block and k_clean and not q_clean) or \
            (q_block >= k_block and q_clean and k_clean)
        assert full[q, k] == expected, (q, k)


@pytest.mark.parametrize("q,p,e,plan,execution", [(3, 4, 4, 2, 2), (5, 6, 4, 3, 1), (1, 4, 8, 4, 8), (4, 2, 3, 1, 3)])
def test_mask_of_the_hierarchy_follows_its_table(q, p, e, plan, execution):
    noisy = [("P", i // plan) for i in range(p)] + [("E", i // execution) for i in range(e)]
    clean = [("Q", 0)] * q + noisy
    number = {"Q": 0, "P": 1, "E": 1 + -(-p // plan)}
    spare = 2       # dead copies and padding behind both halves, and another problem behind it all
    half = [[number[region] + b for region, b in part] + [0] * spare for part in (noisy, clean)]
    doc = torch.tensor([([0] * len(noisy) + [-1] * spare) + ([0] * len(clean) + [-1] * spare) + [1] * 3])
    block = torch.tensor([half[0] + half[1] + [0, 0, 1]])
    full = seen_by(doc, block, len(noisy) + spare)[0]
    kinds = [("t", *x) for x in noisy] + [None] * spare + [("0", *x) for x in clean] + [None] * spare
    for i, j in product(range(len(kinds) + 3), repeat=2):
        query, key = (kinds[x] if x < len(kinds) else "other" for x in (i, j))
        if query is None or key is None:
            expected = i == j
        elif "other" in (query, key):
            expected = query == key and not (i < len(kinds) + 2 and j == len(kinds) + 2)
        else:
            (q_half, q_region, q_block), (k_half, k_region, k_block) = query, key
            if q_region == "Q":
                expected = k_region == "Q"
            elif k_region == "Q" or (q_region == "E" and k_region == "P" and k_half == "0"):
                expected = True
            elif q_region != k_region:
                expected = False
            elif q_half == "t":
                expected = k_block == q_block if k_half == "t" else k_block < q_block
            else:
                expected = k_half == "0" and k_block <= q_block
        assert full[i, j] == expected, (query, key)


def test_a_clean_token_reaches_later_blocks_of_its_own_document_only():
    batch, model = blocks(MIXED, 26, 26, everything=True), network()
    clean = noised(batch)
    before = model.hidden_states(clean)
    block, doc = clean.block[0, :26], clean.doc[0, :26]
    for at in (1, 5, 9, 13, 18, 21):
        tokens = clean.tokens.clone()
        tokens[0, 26 + at] = (tokens[0, 26 + at] + 1) % MASK
        changed = (model.hidden_states(clean._replace(tokens=tokens)) - before).abs().amax(-1) > 1e-6
        expected = (doc == batch.doc[0, at]) & (block > batch.block[0, at])
        assert torch.equal(changed[0], expected) and not changed[1].any(), at


def contexts_of(batch, row, doc, number):
    """ids, positions, blocks (n,) of the clean tokens before a block, and (n,) bool: that block's tokens."""
    mine = (batch.doc[row] == doc) & (batch.block[row] < number)
    return (torch.stack([batch.input_ids[row], batch.position[row], batch.block[row]])[:, mine],
            (batch.doc[row] == doc) & (batch.block[row] == number))


def sampled_hidden(model, batch, inputs, row, doc, number):
    """Hidden states of one noisy block as the sampler computes them: clean tokens into a cache, then the block."""
    context, here = contexts_of(batch, row, doc, number)
    past = sampler.prefill(model, *context[:, None], torch.ones(1, context.shape[1], dtype=torch.bool))
    copies = [i for i, p in enumerate(batch.noisy[row].tolist()) if p >= 0 and here[p]]
    seen = torch.ones(1, 1, len(copies), context.shape[1] + len(copies), dtype=torch.bool)
    hidden, _ = model.extend(inputs.tokens[row:row + 1, copies], inputs.position[row:row + 1, copies], seen, past)
    return hidden[0], copies


def test_noisy_blocks_are_what_the_sampler_sees():
    batch, model = blocks(MIXED, 26, 24), network()
    inputs = noised(batch)
    hidden = model.hidden_states(inputs)
    for row, doc, number in [(0, 0, 1), (0, 0, 2), (0, 1, 1), (0, 1, 2), (0, 1, 3), (1, 0, 0), (1, 0, 4)]:
        sampled, copies = sampled_hidden(model, batch, inputs, row, doc, number)
        torch.testing.assert_close(sampled, hidden[row, copies], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_and_sdpa_agree():
    batch = blocks(MIXED, 26, 24)
    inputs = noised(batch)
    with torch.no_grad():
        torch.testing.assert_close(network(backend="flex")(inputs), network()(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("system", ["gsm8k", "hdp", "random"])
def test_tiles_are_those_of_create_block_mask(system):
    """Ragged documents, padding, tiles that are whole and last ones that are not."""
    rng = np.random.default_rng(len(system))
    for n_noisy, n_clean in [(384, 512), (80, 112), (256, 384), (208, 640), (512, 256)]:
        doc, block = np.full((3, n_noisy + n_clean), -1), np.zeros((3, n_noisy + n_clean), np.int64)
        for r in range(3):
            for first, last in ((0, n_noisy), (n_noisy, n_noisy + n_clean)):
                at = first
                for number in range(rng.integers(0, 5)):
                    sizes = {"gsm8k": [16] * rng.integers(1, 20),
                             "hdp": [rng.integers(1, 130), *[16] * rng.integers(1, 8), *[32] * rng.integers(1, 4)],
                             "random": rng.integers(1, 300, 4)}[system]
                    own = np.repeat(np.arange(len(sizes)), sizes)[:last - at]
                    doc[r, at:at + len(own)], block[r, at:at + len(own)] = number, own
                    at = min(last, at + len(own) + rng.integers(0, 3))
        states = dit.tile_states(doc, block, n_noisy)
        doc, block = torch.from_numpy(doc), torch.from_numpy(block)
        rule, clean = dit.attends(doc, block, n_noisy), dit.attends(doc[:, n_noisy:], block[:, n_noisy:], 0)
        wanted = (create_block_mask(rule, 3, None, n_noisy, n_noisy + n_clean, device="cpu"),
                  create_block_mask(clean, 3, None, n_clean, n_clean, device="cpu"))
        for ours, theirs in zip(dit.attention_masks(doc, block, n_noisy, states), wanted, strict=True):
            for a, b in zip(ours.as_tuple(), theirs.as_tuple(), strict=True):
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else callable(a) or a == b


# ---------------------------------------------------------------------------------------------------------------------
# Loss


def slow_loss(model, batch, inputs, t_of_group):
    """SUBS as the papers write it, block by block: log-probabilities, one-hot where nothing is masked, times -1/t."""
    total = 0
    for row, doc, number in {(r, int(batch.doc[r, i]), int(batch.block[r, i])) for r, i in
                             (batch.group >= 0).nonzero().tolist()}:
        hidden, copies = sampled_hidden(model, batch, inputs, row, doc, number)
        shift, scale = model.modulation(model.condition()[0]).chunk(2, -1)
        logits = model.head(model.norm(hidden) * (1 + scale) + shift)
        logits[:, MASK] += -1e6
        log_p = logits - logits.logsumexp(-1, keepdim=True)
        for i, copy in enumerate(copies):
            at = batch.noisy[row, copy]
            if inputs.tokens[row, copy] != MASK:
                log_p = log_p.index_fill(0, torch.tensor(i), -1e6)
                log_p[i, inputs.tokens[row, copy]] = 0
            if batch.target[row, at]:
                total = total - log_p[i, batch.input_ids[row, at]] / t_of_group[batch.group[row, at]]
    return total / batch.n_targets


def test_loss_and_gradients_equal_the_slow_formula():
    batch, model = blocks(MIXED, 26, 24), network()
    draws = noise.draw(3, "train", 0, batch.n_groups, *batch.doc.shape)
    inputs = noise.diffuse(batch, draws, MASK)
    t = 1e-3 + (1 - 1e-3) * draws.levels
    assert 5 < len(inputs.rows) < batch.n_targets
    fused, slow = loss_of(model, inputs, batch.n_targets), slow_loss(model, batch, inputs, t)
    torch.testing.assert_close(fused, slow, rtol=1e-5, atol=1e-5)
    close(gradients(model, fused), gradients(model, slow))


def test_gradient_is_the_slope_of_the_loss():
    batch, model = blocks(MIXED, 26, 24), network()
    inputs = noised(batch)
    grads = gradients(model, loss_of(model, inputs, batch.n_targets))
    parameters, step = list(model.parameters()), 1e-3
    direction = [g / torch.stack([x.norm() for x in grads]).norm() for g in grads]

    def moved(by):
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=by)
            value = loss_of(model, inputs, batch.n_targets).double()
            torch._foreach_add_(parameters, direction, alpha=-by)
        return value
    slope = (moved(step) - moved(-step)) / (2 * step)
    expected = sum((g * d).sum() for g, d in zip(grads, direction)).double()
    torch.testing.assert_close(slope, expected, rtol=1e-2, atol=0)


def test_an_untrained_model_guesses_among_all_but_the_mask():
    inputs = noised(blocks(MIXED, 26, 24))
    torch.testing.assert_close(dit.DiT(CONFIG)(inputs), torch.full((len(inputs.rows),), math.log(V - 1)))


def test_blocks_of_one_masked_token_are_autoregressive():
    batch, model = blocks([[document([1] * 9)]], 9, 9), network()
    inputs = noised(batch, t_range=(1.0, 1.0))
    assert len(inputs.rows) == 9 and (inputs.weights == 1).all()
    nll = 0
    for i in range(9):      # p(token i | tokens before), each from a prefix of its own
        context = torch.stack([batch.input_ids[0, :i], torch.arange(i), torch.arange(i)])
        past = sampler.prefill(model, *context[:, None], torch.ones(1, i, dtype=torch.bool))
        hidden, _ = model.extend(torch.tensor([[MASK]]), torch.tensor([[i]]), torch.ones(1, 1, 1, i + 1) > 0, past)
        nll -= model.logits(hidden)[0, 0].log_softmax(-1)[batch.input_ids[0, i]]
    torch.testing.assert_close(model(inputs).sum(), nll, rtol=1e-5, atol=1e-5)
    again = noised(batch, seed=1, t_range=(1.0, 1.0))       # exact: no noise is left in it
    assert torch.equal(model(again), model(inputs))


def test_one_block_is_masked_diffusion():
    batch, model = blocks([[document([10])]], 10, 10), network()
    inputs = noised(batch, seed=1)
    other = inputs.tokens.clone()
    other[:, 10:] = 3
    assert torch.equal(model(inputs), model(inputs._replace(tokens=other)))      # nobody reads the clean half
    hidden, _ = sampled_hidden(model, batch, inputs, 0, 0, 0)                     # a plain bidirectional pass
    expected = model.row_losses(hidden[inputs.rows], inputs.labels)
    torch.testing.assert_close(model(inputs), expected, rtol=1e-5, atol=1e-5)


def test_packed_rows_train_like_padded_ones():
    docs = [document([4, 4, 3], given=6), document([5, 3, 2], question=1, seed=1), document([4, 4], seed=2)]
    packed, padded = blocks([[docs[0], docs[1]], [docs[2]]], 22, 16), blocks([[d] for d in docs], 12, 12)
    both = []
    for batch in (packed, padded):
        model, rng = network(), np.random.default_rng(5)
        tokens = np.zeros(batch.doc.shape)
        tokens[batch.target.numpy()] = rng.random(batch.n_targets)
        draws = noise.Draws(rng.random(batch.n_groups), None, tokens)
        loss = loss_of(model, noise.diffuse(batch, draws, MASK), batch.n_targets)
        both.append([loss, *gradients(model, loss)])
    close(*both)


def test_chunked_head_and_recomputation_change_nothing(monkeypatch):
    batch = blocks(MIXED, 26, 24)
    inputs, results = noised(batch), []
    for rows, recompute in ((dit.HEAD_ROWS, None), (4, None), (dit.HEAD_ROWS, "all")):
        monkeypatch.setattr(dit, "HEAD_ROWS", rows)
        model = network(recompute=recompute)
        loss = loss_of(model, inputs, batch.n_targets)
        results.append([loss, *gradients(model, loss)])
    close(results[0], results[1])
    close(results[0], results[2])


def test_compiled_layers_train_the_same():
    """inductor is what --compile uses, half a minute of g++; aot_eager shows whether tracing alone is at fault."""
    batch, results = blocks(MIXED, 26, 24), []
    for compiled in (False, True):
        model = network()
        if compiled:
            for layer in model.layers:
                layer.compile(backend="aot_eager", dynamic=False)
        for inputs in (noised(batch), noised(blocks(MIXED[::-1], 26, 24))):
            loss = loss_of(model, inputs, batch.n_targets)
            results.append([loss, *gradients(model, loss)])
    close(results[0], results[2])
    close(results[1], results[3])


def test_a_batch_of_padding_gives_zero_gradients():
    batch, model = blocks([[], []], 8, 8), network()
    loss = loss_of(model, noised(batch), 1)
    assert loss == 0 and all((g == 0).all() for g in gradients(model, loss))


def test_attended_pairs_counts_what_the_mask_allows():
    for everything in (False, True):
        batch = blocks(MIXED, 26, 26, everything)
        inputs = noised(batch)
        full = seen_by(inputs.doc, inputs.block, inputs.n_noisy)
        assert noise.attended_pairs(batch) == full[inputs.doc >= 0].sum()


def test_masks_are_built_once_a_layout(monkeypatch):
    built, real = [], dit.attention_masks
    monkeypatch.setattr(dit, "attention_masks", lambda *args: built.append(1) or real(*args))
    model, batch = network(), blocks(MIXED, 26, 24)
    for seed in range(3):
        model(noised(batch, seed))
    assert len(built) == 1
    model(noised(blocks(MIXED[::-1], 26, 24)))
    assert len(built) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Noise


@pytest.mark.parametrize("schedule", noise.SCHEDULES)
def test_weights_are_those_of_the_schedule(schedule):
    t = torch.linspace(0.05, 1, 40, dtype=torch.float64, requires_grad=True)
    rate = noise.mask_rate(t, schedule)
    slope, = torch.autograd.grad(rate.sum(), t)
    torch.testing.assert_close(noise.bound_weight(t, schedule), slope / rate)
    assert rate.min() > 0 and rate[-1] > 1 - 2e-16 and (slope > 0).all()
    named = {"loglinear": 0.25, "square": 0.0625, "square_root": 0.5, "log": math.log2(1.25),
             "cosine": 1 - 0.999 * math.cos(math.pi / 8)}
    assert float(noise.mask_rate(torch.tensor(0.25, dtype=torch.float64), schedule)) == pytest.approx(named[schedule])


def test_strata_are_covered_and_unbiased_for_every_block():
    n = 12
    levels = np.stack([noise.draw(0, "train", step, n, 0, 0).levels for step in range(3000)])
    assert (np.sort((levels * n).astype(int), axis=1) == np.arange(n)).all()     # every stratum once
    assert abs(levels.mean(0) - 0.5).max() < 4.5 * math.sqrt(1 / 12 / 3000)       # every group the same mean,
    assert levels.min(0).max() < 0.01 and levels.max(0).min() > 0.99              # and the full range
    official = noise.draw(0, "train", 0, n, 0, 0, permuted=False).levels
    assert ((official * n).astype(int) == np.arange(n)).all()
    assert not np.array_equal(noise.draw(0, "validation", 0, n, 0, 0).levels, levels[0])
    assert not np.array_equal(noise.draw(1, "train", 0, n, 0, 0).levels, levels[0])


def test_any_split_of_the_rows_gets_the_same_noise():
    rows = [[document([4, 4, 3], given=5, seed=s)] for s in range(4)]
    draws = noise.draw(0, "train", 7, 8, 4, 12)             # two groups a row: the first block has no target
    for t_range in (noise.FULL, (0.3, 0.8)):
        whole = noise.diffuse(blocks(rows, 12, 8), draws, MASK, t_range)
        parts = [noise.diffuse(blocks(rows[r:r + 2], 12, 8), draws.part(r, 2, 2 * r, 4), MASK, t_range) for r in (0, 2)]
        for name in ("tokens", "labels", "weights"):
            assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts])), name


def chi_square(counts, probabilities):
    """Statistic minus its 99.99 % quantile (Wilson and Hilferty): negative when the counts fit."""
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = len(expected) - 1
    limit = df * (1 - 2 / (9 * df) + 3.719 * math.sqrt(2 / (9 * df))) ** 3 if df else 1e-9
    return ((counts - expected) ** 2 / expected).sum() - limit


@pytest.mark.parametrize("size,low,high,t", [(16, 0.3, 0.8, 0.35), (4, 0.45, 0.95, 0.6), (7, 1e-3, 0.5, 0.4),
                                             (5, 0.5, 1.0, 0.99)])
def test_clipped_masking_is_the_truncated_binomial(size, low, high, t):
    groups, batch = 4000, blocks([[document([size] * 40)] for _ in range(100)], 40 * size, 40 * size)
    draws = noise.draw(0, "train", 0, groups, 100, 40 * size)
    masked = noise.choose_masked(batch, torch.full((groups,), t, dtype=torch.float64), draws, (low, high))
    masked = masked.view(groups, size).numpy()
    k = np.arange(size + 1)
    inside = ((k / size >= low) | (low == 1e-3)) & ((k / size <= high) | (high == 1))
    pmf = np.array([math.comb(size, i) * t**i * (1 - t)**(size - i) for i in k]) * inside
    assert chi_square(np.bincount(masked.sum(1), minlength=size + 1), pmf / pmf.sum()) < 0
    assert chi_square(masked.sum(0), np.full(size, 1 / size)) < 0         # any place in the block is as likely


def test_unclipped_masking_is_independent_for_every_token():
    batch = blocks([[document([8] * 50)] for _ in range(20)], 400, 400)
    draws = noise.draw(0, "train", 0, 1000, 20, 400)
    masked = noise.choose_masked(batch, torch.full((1000,), 0.3, dtype=torch.float64), draws, noise.FULL)
    k = np.arange(9)
    pmf = np.array([math.comb(8, i) * 0.3**i * 0.7**(8 - i) for i in k])
    assert chi_square(np.bincount(masked.view(1000, 8).sum(1), minlength=9), pmf) < 0


def test_ranges_without_a_count_end_or_are_refused():
    with pytest.raises(UserError, match="no number of masked tokens out of 4 lies in it"):
        noise.check_range((0.3, 0.45), 4)
    for bad in ((0.8, 0.3), (0.0, 0.5), (0.5, 1.1)):
        with pytest.raises(UserError, match="lower end first"):
            noise.check_range(bad, 4)
    for good, size in (((0.3, 0.8), 16), ((0.45, 0.95), 4), ((1.0, 1.0), 1), (noise.FULL, 1), ((0.3, 0.5), 4)):
        noise.check_range(good, size)
    batch = blocks([[document([1, 2, 3])] for _ in range(200)], 6, 6)     # too short for any share in [0.4, 0.45]
    draws = noise.draw(0, "train", 0, batch.n_groups, 200, 6)
    masked = noise.choose_masked(batch, torch.full((600,), 0.42, dtype=torch.float64), draws, (0.4, 0.45)).view(200, 6)
    assert set(masked[:, :1].sum(1).tolist()) == {0, 1} and set(masked[:, 1:3].sum(1).tolist()) == {0, 1}
    assert set(masked[:, 3:].sum(1).tolist()) == {1, 2}
    masked = noise.choose_masked(batch, torch.full((600,), 0.3, dtype=torch.float64), draws, (1e-3, 0.45)).view(200, 6)
    assert set(masked[:, 0].tolist()) == {True, False}      # a lone token is masked at times


def test_only_targets_are_masked_and_weighted():
    batch = blocks(MIXED, 26, 24)
    for options in ({}, {"t_range": (0.3, 0.8)}, {"t_range": (0.6, 1.0)}, {"weighting": "ce"}):
        draws = noise.draw(1, "train", 0, batch.n_groups, *batch.doc.shape)
        inputs = noise.diffuse(batch, draws, MASK, **options)
        low, high = options.get("t_range", noise.FULL)
        t = (low + (high - low) * draws.levels)[batch.group.flatten()[inputs.places]]
        assert batch.target.flatten()[inputs.places].all()
        assert torch.equal(batch.input_ids.flatten()[inputs.places], inputs.labels)
        assert (inputs.tokens[:, :24].flatten()[inputs.rows] == MASK).all()
        assert (inputs.tokens == MASK).sum() == len(inputs.rows)
        plain = low > 0.5 or "weighting" in options
        np.testing.assert_allclose(inputs.weights, np.ones_like(t) if plain else 1 / t, rtol=1e-6)
    noisy = batch.noisy.clone()
    noisy[1, :8] = -1
    with pytest.raises(ValueError, match="no noisy copy"):
        noised(batch._replace(noisy=noisy), t_range=(1.0, 1.0))


# ---------------------------------------------------------------------------------------------------------------------
# Averaged weights, names


def test_average_follows_its_formula_and_swaps():
    model = network()
    average = noise.Average(model, 0.7)
    weight = model.head.weight
    expected, n = weight.detach().clone(), 0
    for step in range(12):
        with torch.no_grad():
            weight += 0.1 * torch.randn_like(weight)
        skip = step == 4        # a step that a bad gradient voided
        average.update(torch.tensor(float(skip)))
        if not skip:
            n += 1
            decay = min(0.7, (1 + n) / (10 + n))
            expected = expected - (1 - decay) * (expected - weight.detach())
    torch.testing.assert_close(average.shadow["head.weight"], expected)
    raw = weight.detach().clone()
    average.swap()
    torch.testing.assert_close(weight.detach(), expected)
    average.swap()
    assert torch.equal(weight.detach(), raw)


def test_small_has_the_papers_size():
    with torch.device("meta"):
        for vocabulary, expected in ((50258, 169_627_218), (50262, 169_633_366)):
            model = dit.DiT(dit.config_of("small", vocabulary, vocabulary - 1))
            assert sum(p.numel() for p in model.parameters()) == expected


def official_shapes(d, layers, cond, vocabulary):
    """Names and shapes of the official code's state dict."""
    shapes = {"vocab_embed.embedding": (vocabulary, d), "sigma_map.mlp.0.weight": (cond, 256),
              "sigma_map.mlp.0.bias": (cond,), "sigma_map.mlp.2.weight": (cond, cond), "sigma_map.mlp.2.bias": (cond,),
              "rotary_emb.inv_freq": (8,), "output_layer.norm_final.weight": (d,),
              "output_layer.linear.weight": (vocabulary, d), "output_layer.linear.bias": (vocabulary,),
              "output_layer.adaLN_modulation.weight": (2 * d, cond), "output_layer.adaLN_modulation.bias": (2 * d,)}
    for i in range(layers):
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in {
            "norm1.weight": (d,), "attn_qkv.weight": (3 * d, d), "attn_out.weight": (d, d), "norm2.weight": (d,),
            "mlp.0.weight": (4 * d, d), "mlp.0.bias": (4 * d,), "mlp.2.weight": (d, 4 * d), "mlp.2.bias": (d,),
            "adaLN_modulation.weight": (6 * d, cond), "adaLN_modulation.bias": (6 * d,)}.items()}
    return shapes


def test_official_weights_load_under_their_names():
    torch.manual_seed(0)
    state = {f"backbone.{name}": torch.randn(shape) for name, shape in official_shapes(32, 3, 8, V).items()}
    model = dit.DiT(CONFIG)
    dit.load_official_state_dict(model, state)
    own = dict(model.named_parameters())
    assert len(own) == len(state) - 1
    for theirs, ours in (("vocab_embed.embedding", "embed.weight"), ("sigma_map.mlp.2.bias", "condition_out.bias"),
                         ("blocks.2.attn_qkv.weight", "layers.2.qkv.weight"), ("blocks.0.norm2.weight",
                         "layers.0.norm_mlp.weight"), ("blocks.1.mlp.2.weight", "layers.1.down.weight"),
                         ("blocks.1.adaLN_modulation.bias", "layers.1.modulation.bias"),
                         ("output_layer.adaLN_modulation.weight", "modulation.weight"),
                         ("output_layer.linear.bias", "head.bias")):
        assert torch.equal(own[ours], state[f"backbone.{theirs}"])
    for change in ({"backbone.blocks.3.norm1.weight": torch.ones(32)}, {"other": torch.ones(1)},
                   {"backbone.output_layer.linear.bias": torch.ones(3)}):
        with pytest.raises(KeyError):
            dit.load_official_state_dict(dit.DiT(CONFIG), {**state, **change})
    del state["backbone.blocks.1.mlp.0.bias"]
    with pytest.raises(KeyError, match=r"layers\.1\.up\.bias"):
        dit.load_official_state_dict(dit.DiT(CONFIG), state)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def questions():
    """Contexts, pinned ids and rooms of three problems of different lengths, one of them without a context."""
    rng = np.random.default_rng(0)
    contexts = [np.stack([rng.integers(0, MASK, n), np.arange(n), np.arange(n) // 4]) for n in (8, 0, 4)]
    return contexts, [([3, 4], 8), ([], 0), ([5], 4)], [3, 2, 3]


ORDERS = ({"order": "first_hitting"}, {"order": "top_k", "tokens_per_step": 3}, {"order": "top_k", "temperature": 0},
          {"order": "confidence", "threshold": 0.12, "top_p": 0.8})


@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_cached_sampling_equals_uncached(options):
    model, (contexts, pinned, rooms) = network().eval(), questions()
    runs = []
    for use_cache in (True, False):
        generator = torch.Generator().manual_seed(1)
        runs.append(sampler.generate(model, contexts, pinned, rooms, 4, end=99, use_cache=use_cache,
                                           generator=generator, **options))
    assert runs[0] == runs[1]
    for i, result in enumerate(runs[0]):
        given, free = len(pinned[i][0]), 4 * rooms[i] - len(pinned[i][0])
        assert result.ids[:given] == pinned[i][0] and len(result.ids) == 4 * rooms[i] and not result.ended
        assert MASK not in result.ids
        if options["order"] == "first_hitting":
            assert result.forwards == free
        elif options.get("tokens_per_step") == 3:
            assert result.forwards == 2 * rooms[i] - (given > 0)
        else:
            assert rooms[i] <= result.forwards <= free


def test_one_sure_pass_a_block_and_none_without_room():
    model, (contexts, pinned, _) = network().eval(), questions()
    results = sampler.generate(model, contexts, pinned, [3, 0, 1], 4, 99, order="confidence", threshold=0.0)
    assert [r.forwards for r in results] == [3, 0, 1] and [len(r.ids) for r in results] == [12, 0, 4]


def test_a_problem_ends_with_its_end_token_and_the_others_go_on():
    model, (contexts, pinned, _) = network().eval(), questions()
    free = sampler.generate(model, contexts, pinned, [3] * 3, 4, 99, order="top_k", temperature=0)
    end = free[0].ids[5]        # in the second block of the first problem
    ended = sampler.generate(model, contexts, pinned, [3] * 3, 4, end, order="top_k", temperature=0)
    for i, (whole, cut) in enumerate(zip(free, ended)):
        own = whole.ids[len(pinned[i][0]):]
        at = own.index(end) + len(pinned[i][0]) if end in own else None
        assert cut.ended == (at is not None)
        assert cut.ids == (whole.ids if at is None else whole.ids[:at // 4 * 4 + 4])
    assert len(ended[0].ids) <= 8


def test_temperature_and_nucleus():
    torch.manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    many = p.log().expand(20000, -1)
    ids, sure = sampler.pick(many, 1.0, 1.0, None)
    assert chi_square(np.bincount(ids, minlength=5), p.numpy().astype(float)) < 0
    torch.testing.assert_close(sure.float(), p[ids])
    ids, _ = sampler.pick(many, 1.0, 0.8, None)       # 0.5 + 0.3 reach it
    assert chi_square(np.bincount(ids, minlength=5), np.array([0.625, 0.375, 0, 0, 0])) < 0
    ids, _ = sampler.pick(many, 0.5, 1.0, None)
    assert chi_square(np.bincount(ids, minlength=5), (p**2 / (p**2).sum()).numpy().astype(float)) < 0
    assert (sampler.pick(many, 0, 1.0, None)[0] == 0).all()
