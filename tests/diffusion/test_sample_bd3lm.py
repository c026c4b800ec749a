"""sample_bd3lm.py on random models: a file of answers, counted passes and tokens, requests of lm-eval."""
import json
import types
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file

from diffusion import dit, evaluate, sample_bd3lm
from diffusion.choices import Layout
from diffusion.problems import load_tokenizer, read_problems
from diffusion.sample_bd3lm import Sampling, Solver
from tests.helpers.block_runs import as_checkpoint

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
