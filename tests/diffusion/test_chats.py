"""Chats as block diffusion: the same losses as GSM8K's form, one document an answer, sampled with what was said."""
import json

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from core.cli import UserError
from core.dist import World
from diffusion import blocks, choices, dit, elbo, problems, published, sample_bd3lm
from diffusion.problems import load_tokenizer
from tests.helpers.block_problems import documents_of
from tests.helpers.block_runs import train_bd3lm
from tests.helpers.chats import ask, write

TALK = [{"role": "system", "content": "Be short."}, *ask("How many pens has Ben?", "Ben has 3 pens."),
        *ask("And Anna?", "Anna has 4.", weight=0), *ask("Both?", "They have 7 pens.")]


@pytest.fixture(scope="module")
def folder(demo):
    """Folder of the demo's tokenizer with a chat template."""
    return demo / "chat"


def parts(folder, system, block_size=8):
    """(Layout, Tokens) of a run with the chat template."""
    layout = published.with_chat(choices.Layout(system, block_size=block_size, max_length=128), folder)
    return layout, load_tokenizer(folder, system, layout.end_token)


@torch.no_grad()
def test_a_chat_of_one_turn_has_the_losses_of_the_problem(folder, demo, tmp_path):
    entries = [json.loads(line) for line in (demo / "train.jsonl").read_text().splitlines()[:12]]
    data = write(tmp_path / "chats.jsonl", [ask(p["question"], p["answer"]) for p in entries])
    found = {}
    for system, path in (("gsm8k", demo / "train.jsonl"), ("chat", data)):
        layout, tokens = parts(folder, system)
        made = problems.read_chats(data, folder, tokens, []) if system == "chat" else problems.read_problems(
            path, "train", system)[:12]
        rows = blocks.make_rows(documents_of(made, tokens, layout), np.arange(12), 128, False)
        torch.manual_seed(0)
        model = dit.DiT(dit.config_of("nano", tokens.vocab_size, tokens.mask)).eval()
        model.head.weight.normal_(0, 0.3)
        how = elbo.Eval(rows, tokens, batch_rows=4, repeats=2, seed=1, bf16=False)
        found[system] = elbo.bound(World(device=torch.device("cpu")), model, how, int)
    assert found["chat"] == pytest.approx(found["gsm8k"], rel=1e-6) and found["chat"]["eval/nll"] > 1


def test_every_trained_answer_is_a_document_behind_all_that_was_said(folder, tmp_path):
    layout, tokens = parts(folder, "chat")
    bad, data = [], write(tmp_path / "chats.jsonl", [TALK])
    with open(data, "a") as file:
        file.write('{"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "1"}]}\n')
        file.write('{"messages": [{"role": "user", "content": "no answer"}]}\nno JSON\n')
    found = problems.read_chats(data, folder, tokens, bad)
    assert [p.name for p in found] == [f"{data}:1"] * 2
    said = PreTrainedTokenizerFast.from_pretrained(folder)
    documents = documents_of(found, tokens, layout)
    for problem, until, (first, last) in zip(found, (3, 7), zip(documents.offsets, documents.offsets[1:])):
        messages = [{k: m[k] for k in ("role", "content")} for m in TALK[:until]]
        text = said.apply_chat_template(messages, tokenize=False)
        ids = documents.ids[first:last]
        fill = "<|im_end|>" * (len(ids) - len(problem.ids))
        assert tokens.decode(ids) == text.rstrip("\n") + fill
        assert tokens.decode(ids[documents.target[first:last]]) == messages[-1]["content"] + "<|im_end|>" + fill
        assert len(ids) % 8 == 0 and set(ids[len(problem.ids):]) <= {tokens.end}
    words = sorted(str(p).removeprefix(str(data)) for p in bad)
    assert len(words) == 3 and {p.check for p in bad} == {"invalid"}
    assert words[0].startswith(":2: answer in message 2: message 1 contains the control token <|im_end|>")
    assert words[1].startswith(":3: ends with a message of the user") and words[2].startswith(":4: ")


def test_train_and_answer(folder, tmp_path, capsys):
    """A run on chats, whose held-out part shares no chat with the rest; then answers to files."""
    talks = [[*ask(f"What is {i}?", f"It is {i}."), *ask(f"And {i} more?", f"It is {2 * i}.")] for i in range(24)]
    data, out = write(tmp_path / "chats.jsonl", talks), tmp_path / "out"
    train_bd3lm.main(["--system", "chat", "--train_data_file", str(data), "--tokenizer", str(folder), "--model_size",
                      "nano", "--block_size", "4", "--max_length", "96", "--row_length", "128", "--max_steps", "2",
                      "--validation_split", "0.25", "--problems_per_batch", "8", "--num_workers", "0", "--eval_repeats",
                      "1", "--output_dir", str(out), "--logging_dir", str(tmp_path / "logs"), "--report_to", "none",
                      "--gradient_accumulation_steps", "1", "--warmup_steps", "0"])
    said = capsys.readouterr().out
    assert "36 to train, 12 to validate" in said and "done       step 2" in said, said
    common = ["--checkpoint", str(out), "--device", "cpu", "--order", "confidence"]
    sample_bd3lm.main([*common, "--test_file", str(data), "--limit", "3", "--output", str(tmp_path / "answers.json")])
    answers = json.loads((tmp_path / "answers.json").read_text())["answers"]
    assert [a["question"] for a in answers] == ["What is 0?", "And 0 more?", "What is 1?"]
    for flags, what in ((["--min_accuracy", "0.9"], "no answer is right or wrong"), (["--output", str(tmp_path)], "is a folder")):
        with pytest.raises((UserError, SystemExit)) as caught:
            sample_bd3lm.main([*common, "--test_file", str(data), *flags])
        assert what in str(caught.value) + capsys.readouterr().err
    bad = {"messages": [{"role": "user", "content": "And <|im_end|>?"}, {"role": "assistant", "content": "1"}]}
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user"}]}\n{"question": "1"}\n' + json.dumps(bad))
    with pytest.raises(UserError) as caught:
        sample_bd3lm.main([*common, "--test_file", str(tmp_path / "bad.jsonl")])
    said = str(caught.value)
    assert ":1: " in said and "contains the control token <|im_end|>" in said
    assert ':2: has no list "messages"' in said
