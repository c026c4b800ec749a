"""Reading chats, problems and tokenizers. Each trained answer of a chat becomes one document."""
import json
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from core.cli import UserError
from diffusion import choices, published, sample_bd3lm
from diffusion.problems import load_tokenizer, read_problems
from tests.helpers.block_problems import documents_of
from tests.helpers.block_runs import short_run
from tests.helpers.chats import ask, write

TALK = [{"role": "system", "content": "Be short."}, *ask("How many pens has Ben?", "Ben has 3 pens."),
        *ask("And Anna?", "Anna has 4.", weight=0), *ask("Both?", "They have 7 pens.")]


@pytest.fixture(scope="module")
def folder(demo):
    """The demo's tokenizer with a chat template."""
    return demo / "chat"


def test_every_trained_answer_is_a_document_with_all_earlier_turns(folder, tmp_path):
    layout = published.add_chat_form(choices.Layout("chat", block_size=8, max_length=128), folder)
    tokens = load_tokenizer(folder, "chat", layout.end_token)
    bad, data = [], write(tmp_path / "chats.jsonl", [TALK])
    with open(data, "a") as file:
        file.write('{"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "1"}]}\n')
        file.write('{"messages": [{"role": "user", "content": "no answer"}]}\nno JSON\n')
    answers = published.read_chats(data, folder, tokens, bad)
    assert [p.name for p in answers] == [f"{data}:1"] * 2
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    documents = documents_of(answers, tokens, layout)
    for problem, until, (first, last) in zip(answers, (3, 7), zip(documents.offsets, documents.offsets[1:])):
        messages = [{k: m[k] for k in ("role", "content")} for m in TALK[:until]]
        text = reference.apply_chat_template(messages, tokenize=False)
        ids = documents.ids[first:last]
        fill = "<|im_end|>" * (len(ids) - len(problem.ids))
        assert tokens.decode(ids) == text.rstrip("\n") + fill
        assert tokens.decode(ids[documents.target[first:last]]) == messages[-1]["content"] + "<|im_end|>" + fill
        assert len(ids) % 8 == 0 and set(ids[len(problem.ids):]) <= {tokens.end}
    words = sorted(str(p).removeprefix(str(data)) for p in bad)
    assert len(words) == 3 and {p.check for p in bad} == {"invalid"}
    assert words[0].startswith(":2: answer in message 2: contains the control token <|im_end|>")
    assert words[1].startswith(":3: has no message of the assistant") and words[2].startswith(":4: ")


def test_train_and_answer(folder, tmp_path, capsys):
    """A run on chats holds out whole chats; then the checkpoint answers a file."""
    talks = [[*ask(f"Which is {i}?", f"It is {i}."), *ask(f"And {i} more?", f"It is {2 * i}.")] for i in range(24)]
    data, out = write(tmp_path / "chats.jsonl", talks), tmp_path / "out"
    short_run(out, f"--system chat --train_data_file {data} --tokenizer {folder} --model_size nano --row_length 128",
              "--max_steps 2 --validation_split 0.25 --problems_per_batch 8")
    output = capsys.readouterr().out
    assert "36 to train, 12 to validate" in output and "done       step 2" in output, output
    common = ["--checkpoint", str(out), "--device", "cpu", "--order", "confidence"]
    sample_bd3lm.main([*common, "--test_file", str(data), "--limit", "3", "--output", str(tmp_path / "answers.json")])
    answers = json.loads((tmp_path / "answers.json").read_text())["answers"]
    assert [a["question"] for a in answers] == ["Which is 0?", "And 0 more?", "Which is 1?"]
    with pytest.raises(UserError, match="--min_accuracy needs answers to compare with"):
        sample_bd3lm.main([*common, "--test_file", str(data), "--min_accuracy", "0.5"])


def test_special_tokens_follow_the_vocabulary_in_the_sources_order(demo):
    size = load_tokenizer(demo, "gsm8k").vocab_size - 1
    base = load_tokenizer(demo, "gsm8k")
    assert (base.mask, base.bos, base.end, base.plan) == (size, size - 1, size - 1, -1)
    hdp = load_tokenizer(demo, "hdp")
    assert (hdp.end, hdp.plan, hdp.execution, hdp.answer, hdp.mask) == tuple(range(size, size + 5))
    assert (hdp.vocab_size, hdp.end, hdp.bos) == (size + 5, size, -1)
    assert hdp.encode("<|plan|> a<|pad|>")[0] == hdp.plan and hdp.encode("<|plan|> a<|pad|>")[-1] == hdp.end
    text = "Anna's 3 pëns\n cost <<3*2=6>>$6 — \u2028 cheap\t#### 6"
    assert base.decode(base.encode(text)) == text


def test_files_folders_and_forms_give_the_same_problems(demo, tmp_path):
    as_lines = read_problems(demo / "train.jsonl", "any", "gsm8k")
    entries = [json.loads(line) for line in (demo / "train.jsonl").read_text().splitlines()]
    (tmp_path / "train.json").write_text("\ufeff" + json.dumps(entries))
    as_json = read_problems(tmp_path, "train", "gsm8k")
    (tmp_path / "train.jsonl").write_text("\n\n".join(json.dumps(e, ensure_ascii=False) for e in entries))
    assert [replace(p, name="") for p in as_lines] == [replace(p, name="") for p in as_json]
    assert as_lines == read_problems(demo, "train", "gsm8k") and len(as_lines) == 60
    assert read_problems(tmp_path, "train", "gsm8k")[1].name == f"{tmp_path}/train.jsonl line 3"
    assert as_json[2].name == f"{tmp_path}/train.json sample 3"
    hdp = read_problems(demo / "train_hdp.json", "any", "hdp")
    assert [(p.question, p.answer) for p in hdp] == [(p.question, p.answer) for p in as_lines]
    assert all(p.plan and "<<" not in p.solution for p in hdp)


GOOD = {"question": "q", "answer": "a #### 3"}


@pytest.mark.parametrize("system, text, message", [
    ("gsm8k", "", r"p.jsonl: is not valid JSON"),
    ("gsm8k", json.dumps(GOOD) + '\n{"question": "q", \n', r"p.jsonl line 2: is not valid JSON at column \d+"),
    ("gsm8k", "[" * 100_000, "p.jsonl: is nested too deeply"),
    ("gsm8k", json.dumps({"question": "q"}), r"p.jsonl line 1: has no 'answer' \(a text that is not empty\)"),
    ("gsm8k", json.dumps({"question": "q", "answer": "it is 3"}), r"line 1: its 'answer' has no '#### N' line; add"),
    ("gsm8k", json.dumps({"question": "q", "answer": "#### three"}), r"its final answer 'three' is not a number"),
    ("gsm8k", json.dumps(GOOD) + '\n{"question": "\\ud83d", "answer": "#### 3"}', r"line 2: its 'question' holds half"),
    ("hdp", json.dumps([GOOD | {"id": "x7"}]), r"sample 1: has no 'plan' .*; make plans with make_problems.py"),
])
def test_bad_files_are_one_line_naming_file_and_sample(tmp_path, system, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_problems(tmp_path / "p.jsonl", "train", system)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)
