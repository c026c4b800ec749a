"""The bound of a text's evaluate: exact in blocks of one token, above the exact value of a larger block by its error."""
import itertools
import json
import math
import types

import numpy as np
import pytest
import torch

from diffusion import choices, evaluate
from diffusion.sample_bd3lm import prefill
from tests.diffusion.test_sample_bd3lm import solver_of
from tests.helpers.block_runs import train_bd3lm

PAIRS = [("Question: Ben has 3 pens.\nAnswer:", " Ben has"), ("1", " 3*6 = 18"), ("Who?", " Anna")]


def log_probabilities(solver, clean, shown):
    """(block_size, V) of the places of the block behind the clean ids, some of which are shown, the others masked."""
    at = torch.arange(len(clean))[None]
    size = len(shown)
    past = prefill(solver.model, torch.tensor(clean)[None], at, at // size, torch.ones_like(at, dtype=torch.bool))
    here = torch.arange(len(clean), len(clean) + size)[None]
    seen = torch.ones(1, 1, size, len(clean) + size, dtype=torch.bool)
    hidden, _ = solver.model.extend(torch.tensor(shown)[None], here, seen, past)
    return solver.model.logits(hidden)[0].double().log_softmax(-1)


@torch.no_grad()
def test_blocks_of_one_token_have_the_exact_likelihood(demo):
    """Of a DiT, against its cached sampler asked for one token after the other; lm-eval gets minus that."""
    solver = solver_of(demo, choices.Layout(block_size=1, max_length=64))
    found = evaluate.harness_model(object, solver, 2, 16).loglikelihood(
        [types.SimpleNamespace(args=pair) for pair in PAIRS])
    for (context, text), (value, greedy) in zip(PAIRS, found):
        ids = [solver.tokens.bos, *solver.tokens.encode(context)]
        exact = 0.0
        for token in solver.tokens.encode(text):
            exact += float(log_probabilities(solver, ids, [solver.tokens.mask])[0, token])
            ids.append(token)
        assert value == pytest.approx(exact, rel=1e-5) and greedy is False and exact < -5


@pytest.mark.slow
@torch.no_grad()
def test_the_mean_of_the_draws_is_the_mean_over_all_orders(demo):
    """Two tokens of a block of four, whose other places stay masked: the bound is a mean over both orders."""
    solver, size = solver_of(demo, choices.Layout(block_size=4, max_length=64)), 4
    context, text = list(range(60, 68)), [70, 90]
    both = []
    for order in itertools.permutations(range(2)):
        shown, nats = [solver.tokens.mask] * size, 0.0
        for place in order:
            nats -= float(log_probabilities(solver, context, shown)[place, text[place]])
            shown[place] = text[place]
        both.append(nats)
    documents = evaluate.continuations(solver, [("a", context, text)] * 1000)
    found = evaluate.draw_bounds(solver, documents, 50, 500, seed=3)
    error = found.mean(0).std(ddof=1) / math.sqrt(found.shape[1])     # levels are stratified over all documents
    assert abs(found.mean() - np.mean(both)) < 4 * error < 0.05 * np.mean(both)
    assert abs(both[0] - both[1]) > 4 * error


def test_the_bound_of_a_file(demo, tmp_path, capsys):
    """The validation's number of the same weights, within both errors; wrong flags are refused."""
    out = tmp_path / "out"
    train_bd3lm.main(["--train_data_file", str(demo / "train.jsonl"), "--eval_data_file", str(demo / "test.jsonl"),
                      "--tokenizer", str(demo), "--model_size", "nano", "--block_size", "4", "--max_length", "96",
                      "--max_steps", "1", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1",
                      "--eval_repeats", "8", "--num_workers", "0", "--output_dir", str(out), "--report_to", "none",
                      "--logging_dir", str(tmp_path / "logs"), "--warmup_steps", "0"])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    wanted = next(line for line in lines if "eval/nll" in line)
    capsys.readouterr()
    common = ["--checkpoint", str(out), "--device", "cpu", "--bound", str(demo / "test.jsonl")]
    evaluate.main([*common, "--draws", "8", "--output", str(tmp_path / "bound.json")])
    found = json.loads((tmp_path / "bound.json").read_text())
    summary = found["summary"]
    error = math.hypot(summary["eval/stderr"], wanted["eval/stderr"])
    assert abs(summary["eval/nll"] - wanted["eval/nll"]) < 4 * error and not summary["exact"]
    assert summary["eval/bits_per_token"] == pytest.approx(summary["eval/nll"] / math.log(2))
    assert summary["texts"] == 20 and summary["tokens"] > 20 * 10
    said = capsys.readouterr().out
    assert "bound      nll <= " in said
    with pytest.raises(SystemExit):
        evaluate.main([*common, "--draws", "1"])
