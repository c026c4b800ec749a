"""Reading problems and tokenizers: files, folders, hub names, and what is wrong with them."""
import json
from dataclasses import replace

import pytest

from core.cli import UserError
from diffusion.problems import load_tokenizer, read_problems

# -- Tokenizers --------------------------------------------------------------------------------------------------------


def test_special_tokens_come_behind_the_vocabulary_in_the_sources_order(demo):
    size = load_tokenizer(demo, "gsm8k").vocab_size - 1
    base = load_tokenizer(demo, "gsm8k")
    assert (base.mask, base.bos, base.end, base.plan) == (size, size - 1, size - 1, -1)
    hdp = load_tokenizer(demo, "hdp")
    assert (hdp.end, hdp.plan, hdp.execution, hdp.answer, hdp.mask) == tuple(range(size, size + 5))
    assert (hdp.vocab_size, hdp.end, hdp.bos) == (size + 5, size, -1)
    assert hdp.encode("<|plan|> a<|pad|>")[0] == hdp.plan and hdp.encode("<|plan|> a<|pad|>")[-1] == hdp.end
    text = "Anna's 3 pëns\n cost <<3*2=6>>$6 — \u2028 cheap\t#### 6"
    assert base.decode(base.encode(text)) == text


@pytest.mark.parametrize("name, message", [
    ("/no/such/folder", r"--tokenizer /no/such/folder: cannot be read \(no such file or folder\); give a folder"),
    ("{tmp}/bad.json", r"bad.json: cannot be read \(.+\); give"),
    ("{tmp}/other.json", r"other.json: has no token <\|endoftext\|> to end answers with; give --end_token"),
])
def test_unknown_tokenizers_are_one_clear_line(tmp_path, demo, name, message):
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "other.json").write_text((demo / "tokenizer.json").read_text().replace("endoftext", "eos"))
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(name.format(tmp=tmp_path), "gsm8k")
    assert "\n" not in str(caught.value)


# -- Reading -----------------------------------------------------------------------------------------------------------


def test_files_folders_and_forms_give_the_same_problems(demo, tmp_path):
    ours = read_problems(demo / "train.jsonl", "any", "gsm8k")
    in_folder = read_problems(demo, "train", "gsm8k")
    entries = [json.loads(line) for line in (demo / "train.jsonl").read_text().splitlines()]
    (tmp_path / "train.json").write_text("\ufeff" + json.dumps(entries))
    as_json = read_problems(tmp_path, "train", "gsm8k")
    (tmp_path / "train.jsonl").write_text("\n\n".join(json.dumps(e, ensure_ascii=False) for e in entries))
    assert [replace(p, name="") for p in ours] == [replace(p, name="") for p in as_json]
    assert ours == in_folder and len(ours) == 60
    assert [p.name for p in read_problems(tmp_path, "train", "gsm8k")[:2]] == [f"{tmp_path}/train.jsonl line 1",
                                                                             f"{tmp_path}/train.jsonl line 3"]
    assert as_json[2].name == f"{tmp_path}/train.json sample 2"
    hdp = read_problems(demo / "train_hdp.json", "any", "hdp")
    assert hdp[3].name.endswith("train_hdp.json sample 3 (demo_3)")
    assert [(p.question, p.answer) for p in hdp] == [(p.question, p.answer) for p in ours]
    assert all(p.plan and "<<" not in p.solution for p in hdp)


GOOD = {"question": "q", "answer": "a #### 3"}


@pytest.mark.parametrize("system, text, message", [
    ("gsm8k", "", r"p.jsonl: is empty"),
    ("gsm8k", json.dumps(GOOD) + '\n{"question": "q", \n', r"p.jsonl: not valid JSON at line 2 column \d+"),
    ("gsm8k", json.dumps({"question": "q"}), r"p.jsonl line 1: has no 'answer' \(a text that is not empty\)"),
    ("gsm8k", json.dumps({"question": "q", "answer": "it is 3"}), r"line 1: its 'answer' has no '#### N' line; add"),
    ("gsm8k", json.dumps({"question": "q", "answer": "#### three"}), r"its final answer 'three' is not a number"),
    ("gsm8k", json.dumps(GOOD) + '\n{"question": "\\ud83d", "answer": "#### 3"}', r"line 2: its 'question' holds half"),
    ("gsm8k", "[" * 100_000, r"p.jsonl: JSON that cannot be read, from line 1 on: is nested too deeply"),
    ("hdp", json.dumps([GOOD | {"id": "x7"}]), r"sample 0 \(x7\): has no 'plan' .*; make plans with make_problems.py"),
])
def test_bad_files_are_one_line_naming_file_and_sample(tmp_path, system, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_problems(tmp_path / "p.jsonl", "train", system)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)
