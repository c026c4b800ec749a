"""sample_bd3lm.py on models that know eight problems by heart: exact answers, counted passes, refusals."""
import json
import math
import types
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diffusion import (blocks, dit, elbo, evaluate, make_problems, noise, published, sample_bd3lm)
from diffusion.choices import Layout
from diffusion.problems import load_tokenizer, read_problems
from diffusion.sample_bd3lm import Sampling
from tests.helpers.block_problems import documents_of
from tests.helpers.block_runs import as_checkpoint

LAYOUTS = {
    "gsm8k": Layout("gsm8k", block_size=8, max_length=96),
    "hdp": Layout("hdp", block_size=8, execution_block_size=4, question_budget=48, plan_budget=32, execution_budget=48),
}
FILES = {"gsm8k": "train.jsonl", "hdp": "train_hdp.json"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Folder with eight problems of both systems and a tokenizer."""
    folder = tmp_path_factory.mktemp("demo")
    make_problems.write_demo(folder, n_train=8, n_test=4)
    return folder


MOST_STEPS = 3000       # 15 runs took 150 to 625 steps of 20 ms
SURE = 0.75             # probability that every token gets, so that no rounding makes another one likelier


def overfit(documents, tokens):
    """A DiT trained until it knows these documents by heart: its averaged weights, since single steps spoil a token."""
    torch.manual_seed(2)
    model = dit.DiT(dit.config_of("nano", tokens.vocab_size, tokens.mask, dropout=0.0))
    average = elbo.Average(model, 0.97)
    rows = blocks.make_rows(documents, np.arange(len(documents)), 72, pack=False)
    (batch,) = blocks.make_loader(rows, [list(range(len(rows)))], len(rows), num_workers=0,
                                 prefetch_factor=None)

    def noised(number, masked):
        """The documents under a draw of noise, or wholly masked, which is where generation starts."""
        draws = noise.draw(2, "train", number, batch.n_groups, *batch.doc.shape)
        return noise.diffuse(batch, draws._replace(levels=np.ones(batch.n_groups)) if masked else draws, tokens.mask)

    @torch.no_grad()
    def known():
        return all(model(noised(MOST_STEPS + n, masked=n == 0)).max() < -math.log(SURE) for n in range(40))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0, betas=(0.9, 0.95))
    for step in range(MOST_STEPS):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, (step + 1) / 30)
        inputs = noised(step, masked=step % 2)
        (model(inputs) * inputs.weights.clamp(max=3)).sum().div(batch.n_targets).backward()     # little noise: capped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        if step % 25 == 24:
            average.swap()
            if known():
                return model.eval()
            average.swap()
    raise RuntimeError(f"{MOST_STEPS} steps did not teach a tiny model {len(documents)} documents: training is broken")


def save(folder, step, model, layout, tokens):
    """checkpoint-<step> as the trainer leaves it; its last weights are noise, its averaged ones are the model's."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model": asdict(model.config), "layout": asdict(layout)}))
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_file(state, path / "ema.safetensors")
    torch.manual_seed(0)
    save_file({name: torch.randn_like(p) for name, p in state.items()}, path / "model.safetensors")
    tokens.save(path)
    seal(path, step, None)
    return path


def seal(path, step, best_step):
    """Write a checkpoint's state and its manifest."""
    as_checkpoint(path, {"step": step, "best_step": best_step})


@pytest.fixture(scope="module", params=["gsm8k", "hdp"])
def trained(request, demo, tmp_path_factory):
    """(output_dir with checkpoint-5, test file, Documents, Tokens) of one system; the documents are known by heart."""
    layout = LAYOUTS[request.param]
    tokens = load_tokenizer(demo, layout.system)
    file = demo / FILES[layout.system]
    documents = documents_of(read_problems(file, "", layout.system), tokens, layout)
    folder = tmp_path_factory.mktemp(f"run-{request.param}")
    save(folder, 5, overfit(documents, tokens), layout, tokens)
    return folder, file, documents, tokens


def run(folder, file, *flags, output=None):
    """Run the script in this process; the JSON it wrote."""
    output = output or folder / "answers.json"
    sample_bd3lm.main([str(word) for word in (
        "--checkpoint", folder, "--test_file", file, "--output", output, "--device", "cpu", *flags)])
    return json.loads(output.read_text())


def texts(result):
    return [(a.get("plan"), a["text"]) for a in result["answers"]]


def expected(problem, system):
    if system == "gsm8k":
        return None, problem.solution
    return problem.plan, f"{problem.solution}\n#### {problem.answer}"


# -- right answers, counted right -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_problems_known_by_heart_are_answered_exactly(trained, capsys):
    folder, file, documents, _ = trained
    result = run(folder, file, "--batch_size", 3)
    system = documents.layout.system
    assert texts(result) == [expected(p, system) for p in documents.problems]
    assert [(a["name"], a["question"], a["answer"]) for a in result["answers"]] == \
        [(p.name, p.question, p.answer) for p in documents.problems]
    assert all(a["strict"] and a["flexible"] and a["ended"] for a in result["answers"])
    # one token a pass: as many passes as tokens in the generated blocks, which the documents fill up to their end
    assert [a["forwards"] for a in result["answers"]] == documents.counts["targets"].tolist()
    real = documents.counts["text"]
    assert [a["tokens"] for a in result["answers"]] == real.tolist()
    total = result["summary"]
    assert (total["strict"], total["flexible"], total["ended"], total["problems"]) == (1, 1, 1, 8)
    assert total["nfe"] == pytest.approx(documents.counts["targets"].mean()) and total["tokens"] == real.sum()
    assert total["tokens_per_second"] == pytest.approx(total["tokens"] / total["seconds"])
    out = capsys.readouterr().out
    assert "accuracy   strict 100.00% +- 0.00%, flexible 100.00% of 8 problems, 0 of them too long" in out
    assert f"-- {documents.problems[0].name}\n" in out and f"   answer    {documents.problems[0].answer!r}\n" in out
    assert out.count("-- ") == 3 and ("   plan " in out) == (system == "hdp")
    assert f"answers    {folder}/answers.json" in out


def test_prompts_of_lm_eval(trained):
    """Requests as the harness sends them."""
    folder, file, documents, tokens = trained
    if documents.layout.system == "hdp":
        return
    wanted = run(folder, file, "--order", "confidence")["answers"]
    model, _ = published.load_checkpoint(folder / "checkpoint-5")
    solver = sample_bd3lm.Solver(model, tokens, documents.layout, Sampling("confidence", temperature=0.0))
    ours = evaluate.harness_model(object, solver, 3, 16)
    prompts = [f"Question: {answer['question']}\nAnswer:" for answer in wanted] + ["word " * 200]
    stops = [[], "\n", ["####"], ["no", "\n####"]]
    requests = [types.SimpleNamespace(args=(prompt, {"until": stops[i % 4]})) for i, prompt in enumerate(prompts)]
    texts = ours.generate_until(requests)
    assert texts[-1] == "" and ours.too_long == 1
    for i, answer in enumerate(wanted):
        text = answer["text"]
        for stop in [stops[i % 4]] if isinstance(stops[i % 4], str) else stops[i % 4]:
            text = text.split(stop)[0]
        assert texts[i] == text
