"""Answers in validation: the same from one rank or two, whole or sharded, and what they decide."""
import json

import pytest
import torch

from core import checkpoint
from diffusion import blocks, choices, elbo, problems, published, sample_bd3lm, sampler
from tests.helpers.trainer import Run

ARGUMENTS = {"report_to": "none", "model_size": "nano", "block_size": 8, "max_length": 96, "row_length": 96,
             "eval_steps": 3, "save_steps": 0, "eval_repeats": 1, "num_workers": 1, "learning_rate": 3e-3,
             "warmup_steps": 1, "max_steps": 6, "gradient_accumulation_steps": 1, "eval_accuracy": 5,
             "best_by": "accuracy", "early_stop_patience": 0, "ema_decay": 0.5, "validation_split": 0.2}


def train(pool, demo, folder, ranks, *more):
    words = [str(part) for name, value in ARGUMENTS.items() for part in (f"--{name}", value)]
    words += ["--train_data_file", demo / "train.jsonl", "--tokenizer", demo, "--output_dir", folder, "--logging_dir",
              f"{folder}-logs", "--per_device_train_batch_size", 4 // ranks, "--dropout", 0, *more]
    statuses, output = pool.run(ranks, "tests.helpers.block_runs.ranks_main", [str(word) for word in words])
    assert not any(statuses), output
    return Run(0, output, folder)


@pytest.mark.slow
def test_ranks_share_the_problems(pool, demo, tmp_path):
    """The same answers from 1 rank, DDP and FSDP2; they are those of sample_bd3lm.py from the checkpoint."""
    runs = [train(pool, demo, tmp_path / mode, ranks, "--parallel", mode) for mode, ranks in (("ddp", 1), ("fsdp", 2))]
    shown = [[json.loads((run.output_dir / "answers" / f"step-{step}.json").read_text())["answers"] for step in (3, 6)]
             for run in runs]
    assert shown[0] == shown[1] and [len(answers) for answers in shown[0]] == [4, 4]
    for name in ("eval/accuracy", "eval/accuracy_flexible", "eval/ended", "eval/nfe"):
        assert runs[0].metrics(name) == runs[1].metrics(name) and sorted(runs[0].metrics(name)) == [3, 6]
    first, last = (folder for _, folder in checkpoint.list_checkpoints(runs[0].output_dir))
    meta = published.state_of(last)
    right, nll = runs[0].metrics("eval/accuracy"), runs[0].metrics("eval/nll")
    best = min((3, 6), key=lambda step: (-right[step], nll[step]))     # none is right: the better bound decides
    assert right[3] == right[6] and (meta["best_loss"], meta["best_step"]) == (1 - right[best], best) and best == 6
    assert meta["best"]["wrong"] == 1 - right[best]
    found = shown[0][0]         # at step 6 all answers are empty
    assert all(answer["text"] for answer in found)
    sample_bd3lm.main(["--checkpoint", str(first), "--question", *(a["question"] for a in found), "--order", "confidence",
                       "--device", "cpu", "--output", str(tmp_path / "answers.json")])
    again = json.loads((tmp_path / "answers.json").read_text())["answers"]
    assert [a["text"] for a in again] == [a["text"] for a in found]
    assert [a["forwards"] for a in again] == [a["forwards"] for a in found]


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
    documents = blocks.make_documents(problems.read_problems(demo / "test.jsonl", "", "gsm8k"), tokens, layout)
    rows = blocks.make_rows(documents, range(len(documents)), 96, pack=True)
    asked = elbo.choose_problems(rows, 8, tokens, seed=1)
    assert len({problem.name for problem, _ in asked}) == 8 and elbo.choose_problems(rows, 0, tokens, 1) == []
    assert [p for p, _ in elbo.choose_problems(rows, 8, tokens, 1)] == [p for p, _ in asked]
    assert [p for p, _ in elbo.choose_problems(rows, 8, tokens, 2)] != [p for p, _ in asked]
    written = iter(enumerate(asked))

    def generate(model, states, rooms, block_size, end, how, generator):
        found = []
        for _, (ids, _) in states:
            place, (problem, _) = next(written)
            text = problem.solution if place % 2 else "#### 1"
            found.append(sampler.Generated([*ids, *tokens.encode(" " + text), end], 3, True))
        return found
    monkeypatch.setattr(sampler, "generate", generate)
    how = elbo.Eval(rows, tokens, batch_rows=3, repeats=1, seed=0, bf16=False, chosen=asked)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(1, 1)})
    model.embed = model["embed"]
    values, shown = elbo.accuracy(World(device=torch.device("cpu")), model, how)
    right = sum(p.answer == "1" or i % 2 for i, (p, _) in enumerate(asked)) / 8
    assert values["eval/accuracy"] == right >= 0.5 and values["eval/nfe"] == 3 and values["eval/ended"] == 1
    assert [a["name"] for a in shown] == [p.name for p, _ in asked[:4]]
    values |= {"eval/nll": 1, "eval/bits_per_token": 1, "eval/perplexity": 1, "eval/loss": 1}
    assert f"right {right:.1%}" in elbo.eval_line(3, values, ())
