"""Problems without a download."""
import re

import pytest

from core.cli import UserError
from diffusion import make_problems
from diffusion.problems import read_problems


def test_demo_problems_are_distinct_and_right(monkeypatch):
    found = make_problems.draw_problems(500, seed=1)
    assert len({p["question"] for p in found}) == 500 and found == make_problems.draw_problems(500, seed=1)
    kinds = set()
    for p in found:
        marks = re.findall(r"<<(.*?)=(.*?)>>", p["solution"])
        assert all(eval(left) == int(right) for left, right in marks)
        assert p["solution"].endswith(f"#### {marks[-1][1]}") and p["answer"] == marks[-1][1]
        numbers = re.findall(r"\d+", p["question"])
        assert numbers == [n for i, (left, _) in enumerate(marks) for n in re.findall(r"\d+", left)[i > 0:]]
        assert not re.search(r"\d", p["plan"]) and "<<" not in p["execution"] and int(p["answer"]) > 0
        kinds.add(tuple(sorted(re.sub(r"\d", "", left) for left, _ in marks)))
    assert kinds == {("+",), ("-",), ("*",), ("+", "-")}
    monkeypatch.setattr(make_problems, "NAMES", ("Anna",))
    monkeypatch.setattr(make_problems, "THINGS", ("pens",))
    with pytest.raises(UserError, match="there are not 2000 different demo problems"):
        make_problems.draw_problems(2000)


def test_demo_files_share_no_question_and_repeat_exactly(demo, tmp_path):
    train, test = (read_problems(demo, split, "gsm8k") for split in ("train", "test"))
    assert (len(train), len(test)) == (60, 20) and not {p.question for p in train} & {p.question for p in test}
    make_problems.write_demo(tmp_path, 60, 20)
    for file in ("train.jsonl", "test.jsonl", "train_hdp.json", "test_hdp.json", "tokenizer.json"):
        assert (tmp_path / file).read_bytes() == (demo / file).read_bytes()
