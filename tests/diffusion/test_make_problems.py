"""Plans made by rule from worked answers."""
import json
import re

import pytest

from core.cli import UserError
from diffusion import make_problems
from diffusion.problems import read_problems


def test_rule_plans_follow_the_steps_and_never_hold_a_number():
    solution = ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nThen -3*2 = <<-3*2=-6>>6 were lost, 7 of 9.\n"
                "She has $<<24-6=18>>18.50 left over two days.\n")
    assert make_problems.rule_plan(solution) == (
        "Divide to find clips in May. Multiply to find were lost. Subtract to find left over days.")
    assert make_problems.rule_plan("<<1+1=2>>2") == "Add to find the next amount."
    assert make_problems.rule_plan("no marks at all") == "Work out the answer from the given amounts."


def test_plans_by_rule_are_hdp_problems_labelled_as_such(demo, tmp_path, capsys):
    out = tmp_path / "new" / "plans.json"
    make_problems.main(["plans", "--input", str(demo), "--split", "test", "--output", str(out)])
    assert f"{out}: 20 problems with plans by rule" in capsys.readouterr().out
    entries = json.loads(out.read_text())
    assert all(e["plan_source"] == "rule" and not re.search(r"\d", e["plan"]) for e in entries)
    source, plans = read_problems(demo, "test", "gsm8k"), read_problems(out, "test", "hdp")
    for before, after in zip(source, plans, strict=True):
        assert (after.question, after.answer) == (before.question, before.answer)
        assert after.solution == " ".join(re.sub("<<.*?>>", "", before.solution.split("####")[0]).split())


def test_plans_need_steps(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": "q", "answer": "#### 3"}))
    with pytest.raises(UserError, match=r"p.jsonl line 1: its answer has no steps before ####; a plan needs some"):
        make_problems.make_plans(tmp_path / "p.jsonl")
