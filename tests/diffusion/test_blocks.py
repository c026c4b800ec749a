"""Documents, rows and batches equal a slow construction, rule by rule; noise."""
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.cli import UserError
from core.packing import PackOrder, rank_packs, run_ahead
from diffusion import blocks
from diffusion.choices import EXECUTION, FILL, FULL, PLAN, QUESTION, Layout, check_range
from tests.helpers.block_problems import LAYOUTS, documents_of, load
from tests.helpers.block_rows import MASK, MIXED, chi_square, clean_half, document, make_blocks


def slow_document(problem, tokens, layout):
    """One document as a list of (id, position, block, target, region), built rule by rule."""
    t, out = tokens, []
    if layout.system == "gsm8k":
        head = [t.bos, *t.encode(f"Question: {problem.question}\nAnswer:")]
        ids = [*head, *t.encode(f" {problem.solution}"), t.end]
        for i in range(-(-len(ids) // layout.block_size) * layout.block_size):
            region = QUESTION if i < len(head) else PLAN if i < len(ids) else FILL
            trained = i >= len(head) or layout.loss_on_question and i > 0
            out.append((ids[i] if i < len(ids) else t.end, i, i // layout.block_size, trained, region))
        return out
    question = t.encode(problem.question)
    plan = t.encode(f"<|plan|> {problem.plan}<|pad|>")
    execution = t.encode(f"<|execution|> {problem.solution} <|answer|> {problem.answer}<|pad|>")
    start = block = 0
    for region, ids, budget, size in ((QUESTION, question, layout.question_budget, layout.question_budget),
                                      (PLAN, plan, layout.plan_budget, layout.plan_block_size),
                                      (EXECUTION, execution, layout.execution_budget, layout.execution_block_size)):
        size, last = size or layout.block_size, None
        for i in range(budget):
            number = block + i // size
            if i >= len(ids) and (region == QUESTION or number != last):
                break       # fill ends with the block of the end token
            last = number
            out.append((ids[i] if i < len(ids) else t.end, start + i, number, i > 0 if region else
                        layout.loss_on_question, region if i < len(ids) else FILL))
        start, block = start + budget, last + 1
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_equal_a_construction_rule_by_rule(demo, name):
    layout = LAYOUTS[name]
    layout.check()
    problems, tokens, documents = load(demo, layout)
    assert len(documents) == 60
    for d, problem in enumerate(problems):
        span = slice(*documents.offsets[d:d + 2])
        actual = list(zip(*(getattr(documents, field)[span].tolist()
                          for field in ("ids", "position", "block", "target", "region"))))
        expected = slow_document(problem, tokens, layout)
        assert actual == expected
        trained = sorted({row[2] for row in expected if row[3]})
        groups = [trained.index(row[2]) if row[2] in trained else -1 for row in expected]
        assert documents.group[span].tolist() == groups
        assert documents.counts["groups"][d] == len(trained) and documents.counts["clean"][d] == len(expected)
        assert documents.counts["targets"][d] == sum(row[3] for row in expected)
        assert documents.counts["noisy"][d] == sum(g >= 0 for g in groups)
        assert documents.counts["tokens"][d] == sum(row[4] != FILL for row in expected)


def test_too_long_problems_are_refused_by_name_or_dropped_and_counted(demo):
    problems, tokens, documents = load(demo, LAYOUTS["gsm8k"])
    limit = int(np.median(documents.counts["tokens"]))
    layout = replace(LAYOUTS["gsm8k"], max_length=limit, block_size=1)
    long = [i for i in range(60) if documents.counts["tokens"][i] > limit]
    with pytest.raises(UserError) as caught:
        documents_of(problems, tokens, layout)
    text = str(caught.value)
    assert f"{problems[long[0]].name}: has {documents.counts['tokens'][long[0]]} tokens" in text
    assert f"more than --max_length {limit}" in text and "pass --drop_too_long" in text
    assert text.count("line ") == min(20, len(long))
    kept = blocks.make_documents(problems, tokens, layout, bad := [])
    assert [p.check for p in bad] == ["too_long"] * len(long)
    assert len(kept) == 60 - len(long)
    assert [p.name for p in kept.problems] == [p.name for i, p in enumerate(problems) if i not in long]
    with pytest.raises(UserError, match="none of 60 problems can be used, the first one being"):
        blocks.make_documents(problems, tokens, replace(layout, max_length=4), [])


@pytest.mark.parametrize("token", ["<|mask|>", "<|endoftext|>", "<|plan|>"])
def test_special_tokens_in_a_text_are_refused(demo, token):
    problems, tokens, _ = load(demo, LAYOUTS["hdp"])
    problems[5] = replace(problems[5], solution=f"then {token} follows")
    with pytest.raises(UserError, match=re.escape(f"{problems[5].name}: its text holds the special token {token};")):
        documents_of(problems, tokens, LAYOUTS["hdp"])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("pack", [False, True])
def test_batches_hold_every_whole_document_once(demo, name, pack):
    layout = LAYOUTS[name]
    _, tokens, documents = load(demo, layout)
    length = layout.longest * (3 if pack else 1)
    train = np.arange(3, 57)
    rows = blocks.make_rows(documents, train, length, pack, seed=5)
    assert sorted(d for row in rows.members for d in row) == train.tolist()
    assert all(len(m) == 1 for m in rows.members) or pack
    order = PackOrder(rows.table["tokens"], samples_per_pack=4, seed=5)
    packs = list(rank_packs(order, 0, 1, 1, epochs=1)) + [[]]
    loader = run_ahead(lambda pack: blocks.collate([rows.members[i] for i in pack], 4, rows), packs, 0)
    for batch, numbers in zip(loader, packs, strict=True):
        n_noisy = rows.noisy_length
        assert batch.tokens.shape == (4, n_noisy + length) and batch.copied.shape == (4, n_noisy) and (
            batch.n_noisy == n_noisy)
        assert batch.group.dtype == batch.copied.dtype == torch.int64 and batch.target.dtype == torch.bool
        members, groups = [rows.members[number] for number in numbers], 0
        for r, (ids, position, doc, block) in enumerate(clean_half(batch).unbind(1)):
            # what the noisy copies say about the clean tokens
            live = batch.doc[r, :n_noisy] >= 0
            copied = batch.copied[r][live]
            group, target = torch.full_like(ids, -1), torch.zeros_like(ids, dtype=torch.bool)
            group[copied], target[copied] = batch.group[r][live], batch.target[r][live]
            inside = members[r] if r < len(members) else []
            for number, d in enumerate(inside):
                span = slice(*documents.offsets[d:d + 2])
                for tensor, name in ((ids, "ids"), (position, "position"), (block, "block"), (target, "target")):
                    assert tensor[doc == number].tolist() == getattr(documents, name)[span].tolist()
                own = documents.group[span]
                assert group[doc == number].tolist() == np.where(own >= 0, own + groups, -1).tolist()
                groups += documents.counts["groups"][d]
            copies = (group >= 0).nonzero()[:, 0].tolist()
            assert copied.tolist() == copies and live[:len(copies)].all()
            for tensor in (batch.tokens, batch.position, batch.doc, batch.block):
                assert torch.equal(tensor[r, :len(copies)], tensor[r, n_noisy:][copied])
            assert (batch.group[r][~live] == -1).all() and not batch.target[r][~live].any()
            padding = doc < 0
            assert padding.sum() == length - documents.counts["clean"][inside].sum()
            assert (group[padding] == -1).all() and not target[padding].any() and (ids[padding] == tokens.end).all()
        assert batch.n_groups == groups
        assert batch.target.sum() == rows.table["targets"][numbers].sum()


def test_packing_fills_rows_and_depends_on_the_seed_alone(demo):
    _, _, documents = load(demo, LAYOUTS["hdp"])
    every = np.arange(60)
    rows = [blocks.make_rows(documents, every, 512, True, seed) for seed in (1, 1, 2)]
    assert rows[0].members == rows[1].members != rows[2].members
    assert len(rows[0]) < 60 / 5 and rows[0].table["clean"].max() <= 512
    assert rows[0].table["noisy"].max() <= rows[0].noisy_length in (128, 256, 384)
    assert blocks.make_rows(documents, every, 128, False).noisy_length == 16 * -(-documents.counts["noisy"].max() // 16)


def test_strata_are_covered_and_unbiased_for_every_block():
    n = 12
    levels = np.stack([blocks.draw(0, "train", step, n, 0, 0).levels for step in range(3000)])
    assert (np.sort((levels * n).astype(int), axis=1) == np.arange(n)).all()     # every stratum once
    assert abs(levels.mean(0) - 0.5).max() < 4.5 * math.sqrt(1 / 12 / 3000)       # every group the same mean,
    assert levels.min(0).max() < 0.01 and levels.max(0).min() > 0.99              # and the full range
    assert not np.array_equal(blocks.draw(0, "validation", 0, n, 0, 0).levels, levels[0])
    assert not np.array_equal(blocks.draw(1, "train", 0, n, 0, 0).levels, levels[0])


def test_any_split_of_the_rows_gets_the_same_noise():
    rows = [[document([4, 4, 3], prompt=5, seed=s)] for s in range(4)]
    draws = blocks.draw(0, "train", 7, 8, 4, 12)             # two groups a row: the first block has no target
    for t_range in (FULL, (0.3, 0.8)):
        whole = blocks.diffuse(make_blocks(rows, 12, 8), draws, MASK, t_range)
        shares = [blocks.diffuse(make_blocks(rows[r:r + 2], 12, 8), draws.part(r, 2, 2 * r, 4), MASK, t_range)
                 for r in (0, 2)]
        for name in ("tokens", "labels", "weights"):
            assert torch.equal(getattr(whole, name), torch.cat([getattr(share, name) for share in shares])), name


@pytest.mark.parametrize("size,low,high,t", [(16, 0.3, 0.8, 0.35), (4, 0.45, 0.95, 0.6), (7, 1e-3, 0.5, 0.4),
                                             (5, 0.5, 1.0, 0.99), (8, *FULL, 0.3)])
def test_clipped_masking_is_the_truncated_binomial(size, low, high, t):
    groups, batch = 4000, make_blocks([[document([size] * 40)] for _ in range(100)], 40 * size, 40 * size)
    draws = blocks.draw(0, "train", 0, groups, 100, 40 * size)
    masked = blocks.choose_masked(batch, torch.full((groups,), t, dtype=torch.float64), draws, (low, high))
    masked = masked.view(groups, size).numpy()
    k = np.arange(size + 1)
    inside = ((k / size >= low) | (low == 1e-3)) & ((k / size <= high) | (high == 1))
    pmf = np.array([math.comb(size, i) * t**i * (1 - t)**(size - i) for i in k]) * inside
    assert chi_square(np.bincount(masked.sum(1), minlength=size + 1), pmf / pmf.sum()) < 0
    assert chi_square(masked.sum(0), np.full(size, 1 / size)) < 0         # each place in the block is equally likely


def test_ranges_without_a_count_end_or_are_refused():
    with pytest.raises(UserError, match="no number of masked tokens out of 4 lies in it"):
        check_range((0.3, 0.45), Layout(block_size=4))
    for bad in ((0.8, 0.3), (0.0, 0.5), (0.5, 1.1)):
        with pytest.raises(UserError, match="lower end first"):
            check_range(bad, Layout(block_size=4))
    for good, size in (((0.3, 0.8), 16), ((0.45, 0.95), 4), ((1.0, 1.0), 1), (FULL, 1), ((0.3, 0.5), 4)):
        check_range(good, Layout(block_size=size))
    batch = make_blocks([[document([1, 2, 3])] for _ in range(200)], 6, 6)     # too short for any share in [0.4, 0.45]
    draws = blocks.draw(0, "train", 0, batch.n_groups, 200, 6)
    masked = blocks.choose_masked(batch, torch.full((600,), 0.42, dtype=torch.float64), draws, (0.4, 0.45)).view(200, 6)
    assert set(masked[:, :1].sum(1).tolist()) == {0, 1} and set(masked[:, 1:3].sum(1).tolist()) == {0, 1}
    assert set(masked[:, 3:].sum(1).tolist()) == {1, 2}
    masked = blocks.choose_masked(batch, torch.full((600,), 0.3, dtype=torch.float64), draws, (1e-3, 0.45)).view(200, 6)
    assert set(masked[:, 0].tolist()) == {True, False}      # a lone token is sometimes masked


def test_only_targets_are_masked_and_weighted():
    batch = make_blocks(MIXED, 26, 24)
    for options in ({}, {"t_range": (0.3, 0.8)}, {"t_range": (0.6, 1.0)}, {"weighting": "ce"}):
        draws = blocks.draw(1, "train", 0, batch.n_groups, *clean_half(batch).shape[1:])
        inputs = blocks.diffuse(batch, draws, MASK, **options)
        low, high = options.get("t_range", FULL)
        t = (low + (high - low) * draws.levels)[batch.group.flatten()[inputs.rows]]
        assert batch.target.flatten()[inputs.rows].all()
        clean = clean_half(batch)[0].gather(1, batch.copied).flatten()
        assert torch.equal(clean[inputs.rows], inputs.labels)
        assert (inputs.tokens[:, :24].flatten()[inputs.rows] == MASK).all()
        assert (inputs.tokens == MASK).sum() == len(inputs.rows)
        plain = low > 0.5 or "weighting" in options
        np.testing.assert_allclose(inputs.weights, np.ones_like(t) if plain else 1 / t, rtol=1e-6)
        assert torch.equal(inputs.tokens[:, 24:], batch.tokens[:, 24:])
