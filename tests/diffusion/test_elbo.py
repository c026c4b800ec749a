"""Validation: averaged weights, counts, shares of ranks, the error bar, the search for a noise range, answers."""
import numpy as np
import pytest
import torch

from core import dist
from diffusion import blocks, choices, dit, elbo, plan, problems, sample_bd3lm
from tests.helpers.block_problems import documents_of
from tests.helpers.block_rows import network

ALONE = dist.World(device=torch.device("cpu"))


def rows_of(demo, split, count, pack=True):
    """(Tokens, Rows of 96 tokens) of the first documents of a demo file."""
    tokens = problems.load_tokenizer(demo, "gsm8k")
    documents = documents_of(problems.read_problems(demo / f"{split}.jsonl", split, "gsm8k"), tokens,
                                  choices.Layout(block_size=8, max_length=96))
    return tokens, blocks.make_rows(documents, np.arange(count), 96, pack)


def bound_of_one_nat(demo, repeats, seed=42):
    """The bound by a model whose every cross-entropy is 1."""
    tokens, rows = rows_of(demo, "test", 8)
    how = elbo.Eval(rows, tokens, batch_rows=3, repeats=repeats, seed=seed, bf16=False)
    return elbo.bound(ALONE, lambda inputs: torch.ones(len(inputs.rows)), how, int)


def test_the_error_bar_covers_the_exact_bound(demo):
    """With two draws, their difference alone would be too small an error in three of ten validations."""
    values, rows = [bound_of_one_nat(demo, 2, seed) for seed in range(60)], rows_of(demo, "test", 8)[1]
    assert values[0]["eval/nll"] * rows.table["text"].sum() == pytest.approx(
        values[0]["eval/loss"] * rows.table["targets"].sum())
    errors = [(value["eval/loss"] - 1) * value["eval/nll"] / value["eval/loss"] / value["eval/stderr"]
              for value in values]
    assert 0.85 < np.mean(np.abs(errors) < 2) and 0.5 < np.std(errors) < 1.5


def test_ranks_share_all_batches(demo):
    _, rows = rows_of(demo, "train", 24, pack=False)
    for most, expected in ((None, 24), (2, 10), (5, 24), (9, 24)):
        for size in (1, 2, 3):
            shares = [list(elbo.share_of_batches(dist.World(rank=rank, size=size), rows, 5, most))
                      for rank in range(size)]
            assert len({len(share) for share in shares}) == 1
            batches = sorted((number, int((batch.doc.amax(1) + 1).sum())) for number, batch in sum(shares, []))
            assert [number for number, _ in batches] == list(range(len(batches)))
            assert sum(documents for _, documents in batches) == expected and batches[0] == (0, 5)


def test_search_takes_the_range_of_least_variance(demo, monkeypatch):
    monkeypatch.setattr(plan, "SEARCH_BATCHES", 2)
    official = plan.candidates([0.5, 0.6, 0.7, 0.8, 0.9], {16})
    assert len(official) == 1 + 11 + 9 + 7 + 5 + 3 and official[:3] == [blocks.FULL, (1e-3, 0.5), (0.05, 0.55)]
    assert plan.candidates([0.1], {4}) == [blocks.FULL, *((low, round(low + 0.1, 2)) for low in
                                                        (0.15, 0.2, 0.25, 0.4, 0.45, 0.5, 0.65, 0.7, 0.75, 0.9))]
    tokens, rows = rows_of(demo, "train", 24)
    torch.manual_seed(0)
    model = dit.DiT(dit.config_of("nano", tokens.vocab_size, tokens.mask)).eval()
    model.head.weight.data.normal_(0, 0.3)
    how = elbo.Eval(rows, tokens, batch_rows=4, repeats=1, seed=42, bf16=False, widths=(0.5, 0.3))
    best = plan.search_range(ALONE, model, how, int)
    scores = {}
    for t_range in plan.candidates([0.5, 0.3], {8}):
        per_block = []
        for number in range(plan.SEARCH_BATCHES):
            batch = blocks.collate(rows.members[4 * number:4 * number + 4], 4, rows)
            draws = blocks.draw(42, "search", number, batch.n_groups, 4, 96)
            inputs = blocks.diffuse(batch, draws, tokens.mask, t_range)
            losses, groups = (model(inputs) * inputs.weights).tolist(), inputs.group.flatten()[inputs.rows].tolist()
            for group in range(batch.n_groups):
                size = int((batch.group[batch.target] == group).sum())
                per_block.append(sum(loss for loss, g in zip(losses, groups) if g == group) / size)
        scores[t_range] = np.var(per_block)
    assert best == min(scores, key=scores.get) and len(set(scores.values())) > 10


def test_average_follows_its_formula_and_swaps():
    model = network()
    average = elbo.Average(model, 0.7)
    weight = model.head.weight
    expected, n = weight.detach().clone(), 0
    for step in range(40):      # from step 21 on the decay is at its maximum
        with torch.no_grad():
            weight += 0.1 * torch.randn_like(weight)
        skip = step == 4        # this step has a bad gradient
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


def test_a_better_bound_or_a_better_accuracy_is_an_improvement():
    best, improved = {}, []
    for nll, right in ((2.0, 0.0), (1.0, 0.0), (1.1, 0.1), (1.2, 0.1), (1.3, 0.2), (1.0, 0.2), (float("nan"), 0.0)):
        improved.append(elbo.update_best(best, {"eval/nll": nll, "eval/accuracy": right}))
    assert improved == [True, True, True, False, True, False, False] and best == {"nll": 1.0, "wrong": 0.8}
    best = {}
    assert [elbo.update_best(best, {"eval/nll": nll}) for nll in (2.0, 2.5, 1.9)] == [True, False, True]


def test_accuracy_counts_true_answers(demo, monkeypatch):
    """The sampler writes the truth to every other problem."""
    tokens, layout = problems.load_tokenizer(demo, "gsm8k"), choices.Layout("gsm8k", block_size=8, max_length=96)
    documents = documents_of(problems.read_problems(demo / "test.jsonl", "", "gsm8k"), tokens, layout)
    rows = blocks.make_rows(documents, range(len(documents)), 96, pack=True)
    asked = sample_bd3lm.choose_problems(rows, 8, tokens, seed=1)
    assert len({problem.name for problem, _ in asked}) == 8 and sample_bd3lm.choose_problems(rows, 0, tokens, 1) == []
    assert [p for p, _ in sample_bd3lm.choose_problems(rows, 8, tokens, 1)] == [p for p, _ in asked]
    assert [p for p, _ in sample_bd3lm.choose_problems(rows, 8, tokens, 2)] != [p for p, _ in asked]

    def generate(model, states, limits, block_size, end, how, generator):
        answers = []
        for state in states:
            context, (ids, first) = state
            index = next(i for i, (_, (other, start)) in enumerate(asked)
                         if start == (ids, first) and np.array_equal(other, context))
            problem = asked[index][0]
            text = problem.solution if index % 2 else "#### 1"
            answers.append(sample_bd3lm.Generated([*ids, *tokens.encode(" " + text), end], 3, True))
        return answers
    monkeypatch.setattr(sample_bd3lm, "generate", generate)
    how = elbo.Eval(rows, tokens, batch_rows=3, repeats=1, seed=1, bf16=False, asked=8)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(1, 1)})
    model.embed = model["embed"]
    values = sample_bd3lm.accuracy(ALONE, model, how)
    right = sum(p.answer == "1" or i % 2 for i, (p, _) in enumerate(asked)) / 8
    assert values["eval/accuracy"] == right >= 0.5 and values["eval/nfe"] == 3
