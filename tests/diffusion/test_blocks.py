"""Documents, rows and batches against a construction rule by rule."""
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.cli import UserError
from core.packing import PackOrder, rank_packs
from diffusion import blocks
from diffusion.choices import EXECUTION, FILL, PLAN, QUESTION
from tests.helpers.block_problems import LAYOUTS, documents_of, load
from tests.helpers.block_rows import noised, seen_by

# -- Documents ---------------------------------------------------------------------------------------------------------


def slow_document(problem, tokens, layout):
    """One document as a list of (id, position, block, target, region, live), written down rule by rule."""
    t, out = tokens, []
    if layout.system == "gsm8k":
        head = [t.bos, *t.encode(f"Question: {problem.question}\nAnswer:")]
        body = t.encode(f" {problem.solution}") + [t.end]
        n = len(head) + len(body)
        while n % layout.block_size:
            n += 1
        for i in range(n):
            if i < len(head):
                out.append((head[i], i, i // layout.block_size, layout.loss_on_question and i > 0, QUESTION, True))
            elif i < len(head) + len(body):
                out.append((body[i - len(head)], i, i // layout.block_size, True, PLAN, True))
            else:
                out.append((t.end, i, i // layout.block_size, True, FILL, True))
        return out
    question = t.encode(problem.question)
    plan = t.encode(f"<|plan|> {problem.plan}<|pad|>")
    execution = t.encode(f"<|execution|> {problem.solution} <|answer|> {problem.answer}<|pad|>")
    start = block = 0
    for region, ids, budget, own in ((QUESTION, question, layout.question_budget, 0),
                                     (PLAN, plan, layout.plan_budget, layout.plan_block_size),
                                     (EXECUTION, execution, layout.execution_budget, layout.execution_block_size)):
        size, filling, last = own or layout.block_size, region != QUESTION, None
        for i in range(budget):
            number = block + i // size if region else 0
            if i >= len(ids):       # nothing is filled beyond the block of the end token
                filling &= number == last
                if not filling:
                    break
            last = number
            live = i < len(ids) or filling
            trained = live and (i > 0 if region else layout.loss_on_question)
            what = FILL if filling and i >= len(ids) else region
            out.append((ids[i] if i < len(ids) else t.end, start + i, number, trained, what, live))
        start, block = start + budget, last + 1
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_equal_a_construction_rule_by_rule(demo, name):
    layout = LAYOUTS[name]
    layout.check()
    found, tokens, documents = load(demo, layout)
    assert len(documents) == 60
    for d, problem in enumerate(found):
        part = slice(*documents.offsets[d:d + 2])
        ours = list(zip(*(getattr(documents, field)[part].tolist()
                          for field in ("ids", "position", "block", "target", "region"))))
        theirs = slow_document(problem, tokens, layout)
        assert ours == [row[:5] for row in theirs] and all(row[5] for row in theirs)
        trained = sorted({row[2] for row in theirs if row[3]})
        groups = [trained.index(row[2]) if row[2] in trained and row[5] else -1 for row in theirs]
        assert documents.group[part].tolist() == groups
        assert documents.counts["groups"][d] == len(trained) and documents.counts["clean"][d] == len(theirs)
        assert documents.counts["targets"][d] == sum(row[3] for row in theirs)
        assert documents.counts["noisy"][d] == sum(g >= 0 for g in groups)
        assert documents.counts["tokens"][d] == sum(row[5] and row[4] != FILL for row in theirs)


def test_too_long_is_refused_naming_each_or_dropped_and_counted(demo):
    found, tokens, documents = load(demo, LAYOUTS["gsm8k"])
    limit = int(np.median(documents.counts["tokens"]))
    layout = replace(LAYOUTS["gsm8k"], max_length=limit, block_size=1)
    long = [i for i in range(60) if documents.counts["tokens"][i] > limit]
    with pytest.raises(UserError) as caught:
        documents_of(found, tokens, layout)
    text = str(caught.value)
    assert f"{found[long[0]].name}: it has {documents.counts['tokens'][long[0]]} tokens" in text
    assert f"more than --max_length {limit}" in text and "pass --drop_too_long" in text
    assert text.count("line ") == min(20, len(long))
    kept = blocks.make_documents(found, tokens, layout, bad := [])
    assert [p.check for p in bad] == ["too_long"] * len(long)
    assert len(kept) == 60 - len(long)
    assert [p.name for p in kept.problems] == [p.name for i, p in enumerate(found) if i not in long]
    with pytest.raises(UserError, match="none of 60 problems can be used, the first one being"):
        blocks.make_documents(found, tokens, replace(layout, max_length=4), [])
    for flag, what in [("question_budget", "question"), ("plan_budget", "plan"), ("execution_budget", "execution")]:
        found, tokens, _ = load(demo, LAYOUTS["hdp"])
        with pytest.raises(UserError, match=rf"sample 0 \(demo_0\): its {what} has \d+ tokens.* more than --{flag} 8"):
            documents_of(found, tokens, replace(LAYOUTS["hdp"], **{flag: 8}))


@pytest.mark.parametrize("token", ["<|mask|>", "<|endoftext|>", "<|plan|>"])
def test_special_tokens_in_a_text_are_refused(demo, token):
    found, tokens, _ = load(demo, LAYOUTS["hdp"])
    found[5] = replace(found[5], solution=f"then {token} follows")
    with pytest.raises(UserError, match=re.escape(f"{found[5].name}: its text holds the special token {token};")):
        documents_of(found, tokens, LAYOUTS["hdp"])


# -- Rows and batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("pack", [False, True])
def test_batches_hold_every_document_once_and_whole(demo, name, pack):
    layout = LAYOUTS[name]
    _, tokens, documents = load(demo, layout)
    length = layout.longest * (3 if pack else 1)
    train = np.arange(3, 57)
    rows = blocks.make_rows(documents, train, length, pack, seed=5)
    assert sorted(d for row in rows.members for d in row) == train.tolist()
    assert all(len(m) == 1 for m in rows.members) or pack
    order = PackOrder(rows.table["tokens"], samples_per_pack=4, seed=5)
    packs = list(rank_packs(order, 0, 1, 1, epochs=1)) + [[]]
    loader = blocks.make_loader(rows, packs, 4, num_workers=0, prefetch_factor=None)
    fields = ("ids", "position", "block", "target")
    seen, counted = [], 0
    for batch, numbers in zip(loader, packs, strict=True):
        assert batch.input_ids.shape == (4, length) and batch.noisy.shape == (4, rows.noisy_length)
        assert batch.group.dtype == batch.noisy.dtype == torch.int64 and batch.target.dtype == torch.bool
        groups = []
        for r in range(4):
            doc, block, group = batch.doc[r].numpy(), batch.block[r].numpy(), batch.group[r].numpy()
            copies = batch.noisy[r][batch.noisy[r] >= 0].tolist()
            assert copies == np.flatnonzero(group >= 0).tolist() and (batch.noisy[r][len(copies):] == -1).all()
            for number in range(doc.max() + 1):
                at = doc == number
                parts = [getattr(batch, "input_ids" if f == "ids" else f)[r].numpy()[at].tolist() for f in fields]
                seen.append(tuple(map(tuple, parts)))
                trained = np.unique(block[at & batch.target[r].numpy()])
                for b in trained:
                    inside = at & (block == b)
                    assert len(set(group[inside].tolist())) == 1 and (group[inside] >= 0).all()
                    groups.append(int(group[inside][0]))
                assert (group[at & ~np.isin(block, trained)] == -1).all()
            assert (group[doc < 0] == -1).all() and not batch.target[r][doc < 0].any()
            assert (batch.input_ids[r][doc < 0] == tokens.end).all()
        assert sorted(groups) == list(range(batch.n_groups))
        assert batch.n_targets == batch.target.sum() == rows.table["targets"][numbers].sum()
        counted += batch.n_targets
    wanted = []
    for d in train:
        part = slice(*documents.offsets[d:d + 2])
        wanted.append(tuple(tuple(getattr(documents, f)[part].tolist()) for f in fields))
    assert sorted(seen) == sorted(wanted)
    assert counted == documents.counts["targets"][train].sum()


@pytest.mark.parametrize("name", ["gsm8k-question", "hdp-sizes"])
def test_counted_pairs_are_those_that_the_mask_allows(demo, name):
    _, _, documents = load(demo, LAYOUTS[name])
    rows = blocks.make_rows(documents, np.arange(6), 256, True)
    batch = blocks.collate([rows[r] for r in range(len(rows))], len(rows), 256, rows.noisy_length, 0)
    inputs = noised(batch)
    full = seen_by(inputs.doc, inputs.block, inputs.n_noisy)
    assert rows.table["pairs"].sum() == full[inputs.doc >= 0].sum()


def test_packing_fills_rows_and_depends_on_the_seed_alone(demo):
    _, _, documents = load(demo, LAYOUTS["hdp"])
    every = np.arange(60)
    rows = [blocks.make_rows(documents, every, 512, True, seed) for seed in (1, 1, 2)]
    assert rows[0].members == rows[1].members != rows[2].members
    assert len(rows[0]) < 60 / 5
    assert rows[0].noisy_length % 128 == 0 and rows[0].noisy_length < 512
    assert rows[0].table["noisy"].max() <= rows[0].noisy_length
    assert rows[0].table["clean"].max() <= 512
    assert blocks.make_rows(documents, every, 128, False).noisy_length == 16 * -(-documents.counts["noisy"].max() // 16)
