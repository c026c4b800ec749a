"""Sampling and likelihoods of random models: answers, number of passes, states, requests of lm-eval."""
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
from diffusion.choices import EXECUTION, FILL, PLAN, QUESTION, Layout
from diffusion.problems import load_tokenizer, read_problems
from diffusion.sample_bd3lm import Sampling, Solver, generate, prefill
from tests.helpers.block_problems import LAYOUTS, load
from tests.helpers.block_rows import MASK, chi_square, network
from tests.helpers.block_runs import as_checkpoint, short_run

HDP = Layout("hdp", block_size=8, execution_block_size=4, question_budget=48, plan_budget=32, execution_budget=48)
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


@pytest.mark.parametrize("system", FILES)
def test_answers_to_a_file(demo, tmp_path, system, capsys):
    """The averaged weights answer with one pass a token, or fewer if several tokens are sure."""
    layout, path = HDP if system == "hdp" else LAYOUTS["gsm8k"], tmp_path / "run" / "checkpoint-5"
    solver = solver_of(demo, layout)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model": asdict(solver.model.config), "layout": asdict(layout)}))
    state = {name: p.detach().clone() for name, p in solver.model.named_parameters()}
    save_file(state, path / "ema.safetensors")
    save_file({name: torch.randn_like(p) for name, p in state.items()}, path / "model.safetensors")
    solver.tokens.tokenizer.save(str(path / "tokenizer.json"))
    as_checkpoint(path, {"step": 5, "best_step": None})
    reports = {}
    for how in ("--batch_size 2", "--batch_size 6 --order confidence --threshold 0.02"):
        sample_bd3lm.main(["--checkpoint", str(tmp_path / "run"), "--test_file", str(demo / FILES[system]), "--limit",
                           "6", "--device", "cpu", "--output", str(tmp_path / "answers.json"), *how.split()])
        reports[how] = json.loads((tmp_path / "answers.json").read_text())
    result, fast = reports.values()
    problems = read_problems(demo / FILES[system], "", system)[:6]
    assert [(a["name"], a["question"], a["answer"]) for a in result["answers"]] == [
        (p.name, p.question, p.answer) for p in problems]
    states = [sample_bd3lm.question_state(p, solver.tokens, layout) for p in problems]
    free = [96 - first - len(pinned) if system == "gsm8k" else 31 + 47 for _, (pinned, first) in states]
    for answer, most in zip(result["answers"], free):
        assert answer["forwards"] == answer["tokens"] == most if not answer["ended"] else answer["tokens"] <= most
        assert ("plan" in answer) == (system == "hdp")
    assert not all(a["ended"] for a in result["answers"])
    assert fast["summary"]["forwards"] < result["summary"]["forwards"] and fast["summary"]["problems"] == 6
    total = result["summary"]
    assert total["tokens_per_second"] == pytest.approx(sum(a["tokens"] for a in result["answers"]) / total["seconds"])
    assert "accuracy   strict 0.00% +- 0.00% of 6 problems, 0 of them too long" in capsys.readouterr().out


def test_prompts_of_lm_eval(demo):
    """The harness gets our greedy answers up to the first stop. A prompt that is too long gets none and is counted."""
    solver = solver_of(demo, LAYOUTS["gsm8k"], Sampling("confidence", temperature=0.0))
    problems = read_problems(demo / "train.jsonl", "", "gsm8k")[:6]
    states = [sample_bd3lm.question_state(p, solver.tokens, solver.layout) for p in problems]
    wanted = [result["text"] for result in sample_bd3lm.answer(solver, states, 2)]
    model = evaluate.harness_model(object, solver, 3, 16)
    prompts = [f"Question: {p.question}\nAnswer:" for p in problems] + ["word " * 200]
    stops = [[], wanted[1][5:7], [wanted[2][3]], ["\0", wanted[3][4:6]], [], [], []]
    texts = model.generate_until([types.SimpleNamespace(args=(prompt, {"until": stop})) for prompt, stop in zip(
        prompts, stops)])
    assert texts[-1] == "" and model.too_long == 1
    for text, whole, stop in zip(texts, wanted, stops):
        for end in [stop] if isinstance(stop, str) else stop:
            whole = whole.split(end)[0]
        assert text == whole


PAIRS = [("Question: Ben has 3 pens.\nAnswer:", " Ben has"), ("1", " 3*6 = 18"), ("Who?", " Anna")]


def log_probabilities(solver, clean, shown):
    """(block_size, V) log-probabilities of the block after the clean ids; shown: the block's ids, or the mask."""
    size, positions = len(shown), torch.arange(len(clean))[None]
    real = torch.ones_like(positions, dtype=torch.bool)
    past = prefill(solver.model, torch.tensor(clean)[None], positions, positions // size, real)
    here = torch.arange(len(clean), len(clean) + size)[None]
    seen = torch.ones(1, 1, size, len(clean) + size, dtype=torch.bool)
    hidden, _ = sample_bd3lm.extend(solver.model, torch.tensor(shown)[None], here, seen, past)
    return solver.model.logits(hidden)[0].double().log_softmax(-1)


@torch.no_grad()
def test_blocks_of_one_token_have_the_exact_likelihood(demo):
    """The likelihood equals that of the cached sampler, token after token."""
    solver = solver_of(demo, Layout(block_size=1, max_length=64))
    likelihoods = evaluate.harness_model(object, solver, 2, 16).loglikelihood(
        [types.SimpleNamespace(args=pair) for pair in PAIRS])
    for (context, text), (value, greedy) in zip(PAIRS, likelihoods):
        ids = [solver.tokens.bos, *solver.tokens.encode(context)]
        exact = 0.0
        for token in solver.tokens.encode(text):
            exact += float(log_probabilities(solver, ids, [solver.tokens.mask])[0, token])
            ids.append(token)
        assert value == pytest.approx(exact, rel=1e-5) and greedy is False and exact < -5


@pytest.mark.slow
@torch.no_grad()
def test_the_mean_of_the_draws_is_the_mean_over_all_orders(demo):
    """Two tokens in a block of four, the others masked: the bound is a mean over both orders."""
    solver, size = solver_of(demo, Layout(block_size=4, max_length=64)), 4
    context, text = list(range(60, 68)), [94, 77]
    both = []
    for order in itertools.permutations(range(2)):
        shown, nats = [solver.tokens.mask] * size, 0.0
        for index in order:
            nats -= float(log_probabilities(solver, context, shown)[index, text[index]])
            shown[index] = text[index]
        both.append(nats)
    documents = evaluate.continuations(solver, [("a", context, text)] * 400)
    bounds = evaluate.draw_bounds(solver, documents, 30, 400, seed=3)
    error = bounds.mean(0).std(ddof=1) / math.sqrt(bounds.shape[1])     # levels are stratified over all documents
    assert abs(bounds.mean() - np.mean(both)) < 4 * error < 0.05 * np.mean(both)
    assert abs(both[0] - both[1]) > 4 * error


def test_the_bound_of_a_file(demo, tmp_path, capsys):
    """The bound equals the validation's bound of the same weights, within both errors."""
    out = tmp_path / "out"
    short_run(out, f"--train_data_file {demo}/train.jsonl --eval_data_file {demo}/test.jsonl --tokenizer {demo}",
              "--model_size nano --eval_repeats 8")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    wanted = next(line for line in lines if "eval/nll" in line)
    capsys.readouterr()
    common = ["--checkpoint", str(out), "--device", "cpu", "--bound", str(demo / "test.jsonl")]
    evaluate.main([*common, "--draws", "8", "--output", str(tmp_path / "bound.json")])
    bound = json.loads((tmp_path / "bound.json").read_text())
    summary = bound["summary"]
    error = math.hypot(summary["eval/stderr"], wanted["eval/stderr"])
    assert abs(summary["eval/nll"] - wanted["eval/nll"]) < 4 * error
    assert summary["eval/bits_per_token"] == pytest.approx(summary["eval/nll"] / math.log(2))
    assert summary["texts"] == 20 and summary["tokens"] > 20 * 10
    assert "bound      nll <= " in capsys.readouterr().out


def questions():
    """Contexts, pinned ids and limits of three problems of different lengths, one without a context."""
    rng = np.random.default_rng(0)
    contexts = [np.stack([rng.integers(0, MASK, n), np.arange(n), np.arange(n) // 4]) for n in (8, 0, 4)]
    return contexts, [([3, 4], 8), ([], 0), ([5], 4)], [3, 2, 1]


@pytest.mark.parametrize("how", [
    Sampling(), Sampling("confidence", 1.0, 0), Sampling("confidence", 0.12), Sampling("confidence", 0.0)], ids=str)
def test_every_order_fills_its_blocks_and_counts_its_passes(how):
    model, (contexts, pinned, limits) = network().eval(), questions()
    results = generate(model, zip(contexts, pinned), limits, 4, 99, how, torch.Generator().manual_seed(1))
    for i, result in enumerate(results):
        n_pinned, free = len(pinned[i][0]), 4 * limits[i] - len(pinned[i][0])
        assert result.ids[:n_pinned] == pinned[i][0] and len(result.ids) == 4 * limits[i] and not result.ended
        assert MASK not in result.ids and limits[i] <= result.forwards <= free
        assert how.threshold < 0.5 or result.forwards == free
        assert how.threshold > 0 or result.forwards == limits[i], "one sure pass a block"


def test_a_problem_ends_with_its_end_token_and_the_others_go_on():
    model, (contexts, pinned, _) = network().eval(), questions()
    how = Sampling("confidence", 1.0, 0)
    free = generate(model, zip(contexts, pinned), [3] * 3, 4, 99, how)
    end = free[0].ids[5]        # in the second block of the first problem
    ended = generate(model, zip(contexts, pinned), [3] * 3, 4, end, how)
    for i, (whole, cut) in enumerate(zip(free, ended)):
        own = whole.ids[len(pinned[i][0]):]
        last = own.index(end) + len(pinned[i][0]) if end in own else None
        assert cut.ended == (last is not None)
        assert cut.ids == (whole.ids if last is None else whole.ids[:last // 4 * 4 + 4])
    assert len(ended[0].ids) <= 8


def test_one_call_for_two_blocks_equals_two_calls():
    """Positions, block numbers, keys and values of later blocks are equal."""
    model, how = network().eval(), Sampling("confidence", 1.0, 0)
    context = np.stack([np.arange(8), np.arange(8), np.arange(8) // 4])
    whole, = generate(model, [(context, ([], 8))], [2], 4, 99, how)
    first, = generate(model, [(context, ([], 8))], [1], 4, 99, how)
    assert whole.ids[:4] == first.ids
    block = np.stack([first.ids, np.arange(8, 12), np.full(4, 2)])
    second, = generate(model, [(np.concatenate([context, block], 1), ([], 12))], [1], 4, 99, how)
    assert whole.ids[4:] == second.ids


def test_an_end_token_in_the_pinned_ids_ends_nothing():
    model = network().eval()
    context = np.stack([np.arange(8), np.arange(8), np.arange(8) // 4])
    result, = generate(model, [(context, ([3, 4], 8))], [1], 4, 4, Sampling("confidence", 1.0, 0))
    assert result.ids[:2] == [3, 4] and 4 not in result.ids[2:] and not result.ended


def test_temperature():
    torch.manual_seed(0)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    many = p.log().expand(20000, -1)
    ids, sure = sample_bd3lm.pick(many, 1.0, None)
    assert chi_square(np.bincount(ids, minlength=5), p.numpy().astype(float)) < 0
    torch.testing.assert_close(sure.float(), p[ids])
    ids, _ = sample_bd3lm.pick(many, 0.5, None)
    assert chi_square(np.bincount(ids, minlength=5), (p**2 / (p**2).sum()).numpy().astype(float)) < 0
    assert (sample_bd3lm.pick(many, 0, None)[0] == 0).all()


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k-1", "gsm8k-whole", "hdp", "hdp-sizes"])
def test_a_sampler_that_writes_the_truth_has_the_states_of_training(demo, name):
    layout = LAYOUTS[name]
    problems, tokens, documents = load(demo, layout)
    for d, problem in enumerate(problems[:20]):
        span = slice(*documents.offsets[d:d + 2])
        truth = np.stack([documents.ids[span], documents.position[span], documents.block[span]])
        region = documents.region[span]
        context, (pinned, first) = sample_bd3lm.question_state(problem, tokens, layout)
        for own in (PLAN, EXECUTION)[:2 if layout.system == "hdp" else 1]:
            start = truth.shape[1] - (truth[1] >= first).sum()
            assert (context[0] == truth[0][:start]).all() and (context[1] == truth[1][:start]).all()
            assert (context[2] == truth[2][:start]).all()
            stop = layout.start(EXECUTION) if own == PLAN and layout.system == "hdp" else 10**9
            body = truth[:, (truth[1] >= first) & (truth[1] < stop)]
            assert body[0][:len(pinned)].tolist() == pinned
            size = layout.regions[own][2]
            assert body.shape[1] % size == 0 and body.shape[1] // size <= sample_bd3lm.blocks_left(first, own, layout)
            if layout.system == "gsm8k":
                assert first + size * sample_bd3lm.blocks_left(first, own, layout) <= layout.max_length
            finished = sample_bd3lm.finish_region(body[0].tolist(), len(pinned), tokens.end)
            assert tokens.end in finished and finished == body[0].tolist()
            text = sample_bd3lm.region_text(finished, len(pinned), tokens)
            if own == PLAN and layout.system == "hdp":
                assert text == problem.plan
                context, (pinned, first) = sample_bd3lm.execution_state(context, finished, tokens, layout)
        expected = problem.solution if layout.system == "gsm8k" else f"{problem.solution}\n#### {problem.answer}"
        assert text == expected and sample_bd3lm.score(text, problem.answer)
        assert set(region) <= {QUESTION, PLAN, EXECUTION, FILL}


@pytest.mark.parametrize("text, gold, right", [
    ("so 6*3 = 18\n#### 18", "18", True), ("#### 1,234", "1234", True), ("#### 1234", "1,234", True),
    ("#### -5", "-5", True), ("#### 18.0", "18", False), ("####18", "18", False), ("18 then 19", "18", False)])
def test_scores(text, gold, right):
    assert sample_bd3lm.score(text, gold) is right
