"""sample_bd3lm.py and evaluate.py on random models: answers, counted passes and tokens, likelihoods, requests of lm-eval."""
import itertools
import json
import math
import types
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diffusion import dit, evaluate, sample_bd3lm
from diffusion.choices import Layout
from diffusion.problems import load_tokenizer, read_problems
from diffusion.sample_bd3lm import Sampling, Solver, prefill
from tests.helpers.block_runs import as_checkpoint, train_bd3lm

LAYOUTS = {
    "gsm8k": Layout("gsm8k", block_size=8, max_length=96),
    "hdp": Layout("hdp", block_size=8, execution_block_size=4, question_budget=48, plan_budget=32, execution_budget=48),
}
FILES = {"gsm8k": "train.jsonl", "hdp": "train_hdp.json"}


def solver_of(demo, layout, how=None):
    """A Solver of a DiT with random weights."""
    tokens = load_tokenizer(demo, layout.system)
    torch.manual_seed(0)
    model = dit.DiT(dit.config_of("nano", tokens.vocab_size, tokens.mask)).eval()
    model.head.weight.data.normal_(0, 0.3)
    for layer in model.layers:
        for parameter in layer.parameters():
            parameter.data += 0.4 * torch.randn_like(parameter)
    return Solver(model, tokens, layout, how or Sampling())


@pytest.mark.parametrize("system", LAYOUTS)
def test_answers_to_a_file(demo, tmp_path, system, capsys):
    """Of averaged weights; the same in any batch; a pass for each token, or fewer where several are sure."""
    solver, layout, path = solver_of(demo, LAYOUTS[system]), LAYOUTS[system], tmp_path / "run" / "checkpoint-5"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model": asdict(solver.model.config), "layout": asdict(layout)}))
    state = {name: p.detach().clone() for name, p in solver.model.named_parameters()}
    save_file(state, path / "ema.safetensors")
    save_file({name: torch.randn_like(p) for name, p in state.items()}, path / "model.safetensors")
    solver.tokens.tokenizer.save(str(path / "tokenizer.json"))
    as_checkpoint(path, {"step": 5, "best_step": None})
    found = {}
    for how in ("--batch_size 2", "--batch_size 6", "--batch_size 6 --order confidence --threshold 0.02"):
        sample_bd3lm.main(["--checkpoint", str(tmp_path / "run"), "--test_file", str(demo / FILES[system]), "--limit", "6",
                           "--device", "cpu", "--output", str(tmp_path / "answers.json"), *how.split()])
        found[how] = json.loads((tmp_path / "answers.json").read_text())
    result, other, fast = found.values()
    problems = read_problems(demo / FILES[system], "", system)[:6]
    assert [(a["name"], a["question"], a["answer"]) for a in result["answers"]] == [
        (p.name, p.question, p.answer) for p in problems]
    states = [sample_bd3lm.question_state(p, solver.tokens, layout) for p in problems]
    free = [96 - first - len(pinned) if system == "gsm8k" else 31 + 47 for _, (pinned, first) in states]
    for answer, most in zip(result["answers"], free):
        assert answer["forwards"] == answer["tokens"] == most if not answer["ended"] else answer["tokens"] <= most
        assert ("plan" in answer) == (system == "hdp")
    assert not all(a["ended"] for a in result["answers"])
    assert [len(a["text"]) > 0 for a in other["answers"]] == [True] * 6
    assert fast["summary"]["forwards"] < result["summary"]["forwards"] and fast["summary"]["problems"] == 6
    total = result["summary"]
    assert total["tokens_per_second"] == pytest.approx(sum(a["tokens"] for a in result["answers"]) / total["seconds"])
    out = capsys.readouterr().out
    assert "accuracy   strict 0.00% +- 0.00% of 6 problems, 0 of them too long" in out
    assert f"answers    {tmp_path}/answers.json" in out and f"-- {problems[0].name}\n" in out


def test_prompts_of_lm_eval(demo):
    """Requests as the harness sends them: our greedy answers, cut at the first stop; one too long is empty, and counted."""
    solver = solver_of(demo, LAYOUTS["gsm8k"], Sampling("confidence", temperature=0.0))
    problems = read_problems(demo / "train.jsonl", "", "gsm8k")[:6]
    states = [sample_bd3lm.question_state(p, solver.tokens, solver.layout) for p in problems]
    wanted = [found["text"] for found in sample_bd3lm.answer(solver, states, 2)]
    ours = evaluate.harness_model(object, solver, 3, 16)
    prompts = [f"Question: {p.question}\nAnswer:" for p in problems] + ["word " * 200]
    stops = [[], wanted[1][5:7], [wanted[2][3]], ["\0", wanted[3][4:6]], [], [], []]
    texts = ours.generate_until([types.SimpleNamespace(args=(prompt, {"until": stop})) for prompt, stop in zip(
        prompts, stops)])
    assert texts[-1] == "" and ours.too_long == 1
    for text, whole, stop in zip(texts, wanted, stops):
        for end in [stop] if isinstance(stop, str) else stop:
            whole = whole.split(end)[0]
        assert text == whole


# -- Likelihoods ------------------------------------------------------------------------------------------------------

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
    solver = solver_of(demo, Layout(block_size=1, max_length=64))
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
    solver, size = solver_of(demo, Layout(block_size=4, max_length=64)), 4
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
    assert abs(summary["eval/nll"] - wanted["eval/nll"]) < 4 * error
    assert summary["eval/bits_per_token"] == pytest.approx(summary["eval/nll"] / math.log(2))
    assert summary["texts"] == 20 and summary["tokens"] > 20 * 10
    said = capsys.readouterr().out
    assert "bound      nll <= " in said
    with pytest.raises(SystemExit):
        evaluate.main([*common, "--draws", "1"])
