"""Evaluations of students of train_sft.py match transformers' forward one line at a time; refusals."""
import json
import random
import re
import types

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.json_files import read_object
from distill import evaluate as script
from tests.helpers import chats, scripts, students

WORDS = {"de": "das ist ein satz der etwas und nicht", "en": "the quick dog is over and lazy fox jumps",
         "fr": "ou est la le que bibliotheque des une"}
N, GROUP, REJECTED = 120, 3, range(5, 120, 17)
PROMPT = "Which language?\nLast line: Final Answer: CODE\n{text}\n"
STEPS = 45


def truth_of(i):
    return list(WORDS)[i % 3]


def label_of(i):
    """The teacher's label: wrong for every seventh German line."""
    return "en" if i % 21 == 0 else truth_of(i)


def record(i, text=None, label=None):
    draw = random.Random(i)
    text = text or " ".join(draw.choice(WORDS[truth_of(i)].split()) for _ in range(3 + i % 5)) + f" {i}"
    return {"id": i, "messages": chats.ask(text, label or label_of(i))}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folder with the inputs: a base model, labels and a prompt."""
    folder = tmp_path_factory.mktemp("judged")
    chats.student(folder / "base")
    chats.tokenizer(chats.QWEN_THINK).save_pretrained(folder / "base")
    write(folder / "labels.jsonl", [record(i) for i in range(N) if i not in REJECTED])
    (folder / "prompt.txt").write_text(PROMPT)
    return folder


@pytest.fixture(scope="module")
def train(pool, inputs):
    """train(name, *flags) -> checkpoint folder of a student, trained on first use. Read only."""
    done = {}

    def get(name, *flags):
        if name not in done:
            steps, out = 1 if flags else STEPS, inputs / name
            hold_out = [] if flags else ["--validation_split", 0.2, "--group_size", GROUP]
            students.train(pool, 1, out, "--model_path", inputs / "base", "--train_data_file", inputs / "labels.jsonl",
                           "--logging_dir", inputs / "logs", "--max_steps", steps, "--eval_steps", 0, "--save_steps", 0,
                           "--per_device_train_batch_size", 16, "--global_batch_size", 16, "--learning_rate", 5e-3,
                           "--enable_thinking", "false", *hold_out, *flags)
            done[name] = out / f"checkpoint-{steps}"
        return done[name]
    return get


@pytest.fixture(scope="module")
def full(train):
    return train("full")


def evaluate(inputs, out, checkpoint, *flags):
    """Run the script in this process; returns the contents of evaluation.json."""
    scripts.run(script, [str(word) for word in ("--checkpoint", checkpoint, "--parser", "language", "--labels",
                                               "en,de,fr", "--max_new_tokens", 10, "--output_dir", out, *flags)])
    return json.loads((out / "evaluation.json").read_text())


def refusal(capsys, inputs, out, checkpoint, *flags):
    """Run the script; returns its error, one line, with status 1."""
    with pytest.raises(SystemExit) as left:
        evaluate(inputs, out, checkpoint, *flags)
    error = capsys.readouterr().err.strip()
    assert left.value.code == 1 and error.startswith("error: ") and "\n" not in error, error
    return error


def alone(model, tokenizer, text, tokens=10):
    """The greedy answer by transformers' forward, without cache and batch."""
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                        return_dict=False, enable_thinking=False)
    start = len(ids)
    with torch.inference_mode():
        while len(ids) < start + tokens and ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item()]
    return tokenizer.decode(ids[start:]).removesuffix(tokenizer.eos_token)


@pytest.fixture(scope="module")
def whole(inputs, full, tmp_path_factory):
    """(evaluation.json of the full student with its base and the prompt, output folder)."""
    out = tmp_path_factory.mktemp("whole")
    return evaluate(inputs, out, full, "--prompt_file", inputs / "prompt.txt", "--batch_size", 5), out


@pytest.mark.slow
def test_the_evaluation_reads_the_held_out_lines(inputs, full, whole):
    """Their loss equals the run's validation loss, and no group is on both sides."""
    result, _ = whole
    ids = [row["id"] for row in result["samples"]]
    everyone = {i for i in range(N) if i not in REJECTED}
    trained = everyone - set(ids)
    assert set(ids) < everyone and not {i // GROUP for i in ids} & {i // GROUP for i in trained}
    assert result["data"]["training_lines"] == len(trained) and ids == sorted(ids)
    log = [json.loads(line) for line in (full.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval/loss"] for row in log if "eval/loss" in row] == [
        pytest.approx(result["metrics"]["student: nll"], rel=1e-5)]


def test_answers_are_those_of_each_line_alone(inputs, full, whole):
    result, _ = whole
    tokenizer = AutoTokenizer.from_pretrained(full)
    before, after = PROMPT.strip().split("{text}")
    for folder, name, change in ((full, "student", "{}".format), (inputs / "base", "base", "{}".format),
                                 (inputs / "base", "base + prompt", lambda text: before + text + after)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        for row in result["samples"][:8 if name != "student" else None]:
            assert row["question"] == record(row["id"])["messages"][0]["content"]
            assert row[name] == alone(model, tokenizer, change(row["question"])), name


def test_accuracy_is_that_of_the_rows(whole):
    """The accuracy equals a count from the rows and the rules of the data."""
    result, out = whole
    rows, measured = result["samples"], result["metrics"]
    for row in rows:
        assert row["held out"] == label_of(row["id"])
    for name in ("base", "base + prompt", "student"):
        labels = [row[name] if row[name] in WORDS else (re.findall("Final Answer: (de|en|fr)$", row[name]) or [None])[0]
                  for row in rows]
        share = np.mean([label == label_of(row["id"]) for label, row in zip(labels, rows)])
        assert measured[f"{name}: accuracy"] == pytest.approx(share), name
    assert measured["student: accuracy"] > 0.6 > 0.2 > measured["base: accuracy"], "it learnt"
    assert measured["base + prompt: tokens in"] > measured["student: tokens in"] + 20
    assert measured["base + prompt: kl"] == 0 < measured["student: kl"]
    assert re.match(r" {9,}base  +base \+ prompt  +student\n", (out / "evaluation.txt").read_text())
    assert read_object(out / "evaluation.json")["metrics"]["student: accuracy"] is not None


@pytest.mark.parametrize("template, thinking, tools", [
    (chats.QWEN_THINK, "false", None), (chats.QWEN, "template", None),
    (chats.QWEN_TOOLS, "template", [{"type": "function", "function": {"name": "look", "parameters": {}}}])])
def test_prompts_equal_the_trained_ones(inputs, template, thinking, tools):
    """generate gets the ids before the first trained token; pads are on the left, masked."""
    from core.chat import THINKING, Encoder
    tokenizer = chats.tokenizer(template)
    model, seen = AutoModelForCausalLM.from_pretrained(inputs / "base").eval(), []
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    generate = model.generate
    model.generate = lambda **options: seen.append(options) or generate(**options)
    asked = [record(i)["messages"] for i in (1, 4, 9)]
    args = types.SimpleNamespace(max_new_tokens=2, batch_size=3)
    answers = script.ask_column(
        args, script.Column(model, tokenizer, True), [tokenizer.eos_token_id], thinking,
        [{"messages": messages, "tools": tools} for messages in asked])
    trained = [ids[:mask.index(True)] for ids, mask in (
        chats.encode(Encoder(tokenizer, options=THINKING[thinking]), messages, tools) for messages in asked)]
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id, "trained answers end with it"
    rows = [row[mask.bool()].tolist() for row, mask in zip(seen[0]["input_ids"], seen[0]["attention_mask"])]
    assert sorted(rows) == sorted(trained) and [answer.prompt_tokens for answer in answers] == list(map(len, trained))
    assert all(mask[-1] and mask.tolist() == sorted(mask.tolist()) for mask in seen[0]["attention_mask"])


def test_trained_texts_are_left_out(inputs, train, tmp_path, capsys):
    """Both sides of the split have lines with one text; only white space differs."""
    rows = [record(i, text="the" + " " * (i + 1) + "same" if i < 40 else f"fox \u2028 {i}") for i in range(N)]
    write(inputs / "leaky.jsonl", rows)
    checkpoint = train("leaky", "--validation_split", 0.5, "--train_data_file", inputs / "leaky.jsonl")
    result = evaluate(inputs, tmp_path, checkpoint)
    gone = result["data"]["leaked_lines_left_out"]
    assert gone > 5
    assert all(row["id"] >= 40 for row in result["samples"]) and len(result["samples"]) == 60 - gone
    assert f"{gone} lines left out" in capsys.readouterr().out


@pytest.mark.parametrize("flags, message", [
    (["--eval_data_file", "trained.jsonl"], "each of its questions was trained"),
    (["--model_path", "full/checkpoint-45"], "was not trained from full/checkpoint-45 but from other weights"),
    (["--labels", "en,de"], "is labelled 'fr', which is not one of en, de; see --parser and --labels"),
])
def test_bad_input_is_one_clear_line(inputs, train, full, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(inputs)
    held_out = {json.loads(line)["id"] for line in (full.parent / "held_out.jsonl").read_text().splitlines()}
    write(inputs / "trained.jsonl", [record(i) for i in range(N) if i not in {*REJECTED, *held_out}])
    assert message in refusal(capsys, inputs, tmp_path / "out", full, *flags)
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_a_teacher_that_does_not_follow_the_prompt_is_refused(inputs, full, tmp_path, capsys):
    error = refusal(capsys, inputs, tmp_path, full, "--prompt_file", inputs / "prompt.txt", "--follows", "^never$",
                    "--min_closed", 0.01)
    assert "following: there is no gap to close: 0 of the teacher, 0 of the base" in error
