"""Answers in validation: the same from one rank or two, whole or sharded, and what they decide."""

import torch

from diffusion import blocks, choices, elbo, problems, sample_bd3lm
from tests.helpers.block_problems import documents_of


def test_either_a_better_bound_or_a_better_accuracy_goes_on():
    best, said = {}, []
    for nll, right in ((2.0, 0.0), (1.0, 0.0), (1.1, 0.1), (1.2, 0.1), (1.3, 0.2), (1.0, 0.2), (float("nan"), 0.0)):
        said.append(elbo.improved(best, {"eval/nll": nll, "eval/accuracy": right}))
    assert said == [True, True, True, False, True, False, False] and best == {"nll": 1.0, "wrong": 0.8}
    best = {}
    assert [elbo.improved(best, {"eval/nll": nll}) for nll in (2.0, 2.5, 1.9)] == [True, False, True]


def test_known_answers_are_right(demo, monkeypatch):
    """Scores and shares, with a sampler that writes the truth to every other problem."""
    from core.dist import World
    tokens, layout = problems.load_tokenizer(demo, "gsm8k"), choices.Layout("gsm8k", block_size=8, max_length=96)
    documents = documents_of(problems.read_problems(demo / "test.jsonl", "", "gsm8k"), tokens, layout)
    rows = blocks.make_rows(documents, range(len(documents)), 96, pack=True)
    asked = elbo.choose_problems(rows, 8, tokens, seed=1)
    assert len({problem.name for problem, _ in asked}) == 8 and elbo.choose_problems(rows, 0, tokens, 1) == []
    assert [p for p, _ in elbo.choose_problems(rows, 8, tokens, 1)] == [p for p, _ in asked]
    assert [p for p, _ in elbo.choose_problems(rows, 8, tokens, 2)] != [p for p, _ in asked]

    def generate(model, states, rooms, block_size, end, how, generator):
        found = []
        for state in states:
            place, ids = next(i for i, (_, other) in enumerate(asked) if other is state), state[1][0]
            problem = asked[place][0]
            text = problem.solution if place % 2 else "#### 1"
            found.append(sample_bd3lm.Generated([*ids, *tokens.encode(" " + text), end], 3, True))
        return found
    monkeypatch.setattr(sample_bd3lm, "generate", generate)
    how = elbo.Eval(rows, tokens, batch_rows=3, repeats=1, seed=0, bf16=False, chosen=asked)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(1, 1)})
    model.embed = model["embed"]
    values = elbo.accuracy(World(device=torch.device("cpu")), model, how)
    right = sum(p.answer == "1" or i % 2 for i, (p, _) in enumerate(asked)) / 8
    assert values["eval/accuracy"] == right >= 0.5 and values["eval/nfe"] == 3
    values |= {"eval/nll": 1, "eval/bits_per_token": 1, "eval/perplexity": 1, "eval/loss": 1}
    assert f"right {right:.1%}" in elbo.eval_line(3, values)
