"""What the sampler is given, what becomes of what it wrote, and scores."""
from dataclasses import replace

import numpy as np
import pytest

from core.cli import UserError
from diffusion import sample_bd3lm
from diffusion.choices import EXECUTION, FILL, PLAN, QUESTION
from diffusion.problems import load_tokenizer
from tests.helpers.block_problems import LAYOUTS, load


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k-1", "gsm8k-whole", "hdp", "hdp-sizes"])
def test_a_sampler_that_writes_the_truth_sees_what_training_saw(demo, name):
    layout = LAYOUTS[name]
    found, tokens, documents = load(demo, layout)
    for d, problem in enumerate(found[:20]):
        part = slice(*documents.offsets[d:d + 2])
        truth = np.stack([documents.ids[part], documents.position[part], documents.block[part]])
        region = documents.region[part]
        context, (pinned, first) = sample_bd3lm.question_state(problem, tokens, layout)
        for own in (PLAN, EXECUTION)[:2 if layout.system == "hdp" else 1]:
            start = truth.shape[1] - (truth[1] >= first).sum()
            assert (context[0] == truth[0][:start]).all() and (context[1] == truth[1][:start]).all()
            assert (context[2] == truth[2][:start]).all()
            stop = layout.start(EXECUTION) if own == PLAN and layout.system == "hdp" else 10**9
            body = truth[:, (truth[1] >= first) & (truth[1] < stop)]
            assert body[0][:len(pinned)].tolist() == pinned
            size = layout.regions[own][2]
            assert body.shape[1] % size == 0 and body.shape[1] // size <= sample_bd3lm.room(first, own, layout)
            if layout.system == "gsm8k":
                assert first + size * sample_bd3lm.room(first, own, layout) <= layout.max_length
            finished = sample_bd3lm.finish_region(body[0].tolist(), len(pinned), tokens.end)
            assert tokens.end in finished and finished == body[0].tolist()
            text = sample_bd3lm.region_text(finished, len(pinned), tokens)
            if own == PLAN and layout.system == "hdp":
                assert text == problem.plan
                context, (pinned, first) = sample_bd3lm.execution_state(context, finished, tokens, layout)
        expected = problem.solution if layout.system == "gsm8k" else f"{problem.solution}\n#### {problem.answer}"
        assert text == expected and sample_bd3lm.score(text, problem.answer)
        assert set(region) <= {QUESTION, PLAN, EXECUTION, FILL}


def test_a_question_that_is_too_long_is_refused(demo):
    found, tokens, _ = load(demo, LAYOUTS["hdp"])
    with pytest.raises(UserError, match=r"demo_0\): its question has \d+ tokens, more than --question_budget 8"):
        sample_bd3lm.question_state(found[0], tokens, replace(LAYOUTS["hdp"], question_budget=8))
    with pytest.raises(UserError, match=r"its question has \d+ tokens, no room in --max_length 16"):
        sample_bd3lm.question_state(found[0], load_tokenizer(demo, "gsm8k"), replace(LAYOUTS["gsm8k"], max_length=16))


@pytest.mark.parametrize("text, gold, right", [
    ("so 6*3 = 18\n#### 18", "18", True), ("#### 1,234", "1234", True), ("#### 1234", "1,234", True),
    ("#### -5", "-5", True), ("#### 18.0", "18", False), ("####18", "18", False), ("18 then 19", "18", False)])
def test_scores(text, gold, right):
    assert sample_bd3lm.score(text, gold) is right
