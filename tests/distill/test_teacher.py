"""Answers of the engine transformers equal generate's; labels; addresses and keys of servers."""
import json

import pytest
import torch

from core.cli import UserError
from distill import teachers
from distill.generation import Draw
from tests.helpers.lora_server import LoraServer


def test_transformers_answers_as_generate_does(tiny_chat):
    folder, model, tokenizer = tiny_chat
    requests = [teachers.Request(i, [{"role": "user", "content": "a" * (3 * i + 1)}], i) for i in range(6)]
    answers = teachers.open_transformers(str(folder), teachers.Sampling(4), batch_size=4)
    by_id = {asked.id: answer for asked, answer in answers(requests)}
    for asked in requests:
        text = f"<|im_start|>user\n{asked.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer(text, return_tensors="pt")
        out = model.generate(**prompt, do_sample=False, max_new_tokens=4)[0, prompt["input_ids"].shape[1]:]
        ended = bool(out[-1].item() in model.generation_config.eos_token_id)
        ids, answer = out[:len(out) - ended], by_id[asked.id]
        assert answer.text == tokenizer.decode(ids) and answer.finish_reason == ("stop" if ended else "length")
        assert answer.prompt_tokens == prompt["input_ids"].shape[1] and answer.completion_tokens == len(out)
    assert {answer.finish_reason for answer in by_id.values()} == {"stop", "length"}


def test_a_draw_takes_one_random_number_a_row():
    """The drawn token is the first whose cumulative probability exceeds the number."""
    draw, shares = Draw([7, 8]), torch.tensor([0.0, 0.5, 0.25, 0.25])
    draws = [draw(None, shares.log().expand(2, 4)).argmax(-1).tolist() for _ in range(40)]
    for row, seed in enumerate((7, 8)):
        numbers = torch.rand(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        wanted = [1 if number < 0.5 else 2 + (number >= 0.75) for number in numbers.tolist()]
        assert [tokens[row] for tokens in draws] == wanted
    assert draw(None, torch.full((2, 4), torch.nan)).shape == (2, 4)        # the loss reports NaN


def test_redirections_are_refused(monkeypatch):
    """The other address gets neither the key nor the question."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with LoraServer(None) as first, LoraServer(None) as second:
        first.answer = lambda path, body: (307, "", ("Location", f"{second.url}/models"))
        with pytest.raises(UserError, match="HTTP 307 "):
            teachers.open_openai("m", teachers.Sampling(1), base_url=first.url)
        assert not second.calls


def test_an_answer_may_be_a_list_of_texts_or_a_tool_call():
    texts = [{"type": "text", "text": "Final "}, {"type": "text", "text": "Answer: fr"}]
    call = {"function": {"name": "look", "arguments": '{"at": "it"}'}}
    for more, reason, text in (({"content": texts}, "stop", "Final Answer: fr"), ({"content": []}, "stop", ""),
                               ({"content": None, "tool_calls": [call]}, "tool_calls", "")):
        answer = teachers.read_answer(json.dumps({"choices": [{"message": more, "finish_reason": reason}]}).encode())
        assert (answer.text, answer.finish_reason) == (text, "stop")
    assert answer.tool_calls == [{"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}]


@pytest.mark.parametrize("url, key, message", [
    ("http://anna:pa/ss@h/v1", "", "holds a name and password"), ("http://h/v1", "sk-se\ncret", "OPENAI_API_KEY")])
def test_an_error_does_not_print_a_bad_address_or_key(monkeypatch, url, key, message):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError) as error:
        teachers.Server(url, 1.0)
    assert message in str(error.value) and "pa/ss" not in str(error.value) and "cret" not in str(error.value)


@pytest.mark.parametrize("text, reason, expected", [
    ("Final Answer: fr", "stop", "fr"),
    ("Final Answer: xx\nis the form.\nFinal Answer: de", "stop", "de"),
    ("<think>Final Answer: hi</think>\nFinal Answer: ot", "stop", "ot"),
    ("a</think>Final Answer: hi\n</think>\nFinal Answer: ot", "stop", "ot"),
    ("Final Answer: fr", "length", None), ("<think>\nFinal Answer: hi\nbut", "stop", None),
    ("Final Answer: hi\n</think>\nI do not know", "stop", None),
    ("> Final Answer: fr", "stop", None), ("Final Answer: fr, es", "stop", None),
    ("Final Answer: sw", "stop", None), ("fr", "stop", None), ("th -> hi", "stop", None),
])
def test_labels_of_answers(text, reason, expected):
    label, why = teachers.read_label(teachers.make_parser("language"), text, reason)
    assert label == expected and bool(why) == (expected is None)
