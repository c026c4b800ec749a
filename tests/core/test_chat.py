"""Masks of trained tokens, checked token by token on chat templates of four styles; refusals.

Templates of released models come from TRL if it is installed, or from the folder CHAT_TEMPLATES. The reference does not
compare prefixes: it searches the rendered text for answers and maps them to tokens with the tokenizer's offsets.
"""
import importlib.util
import os
import re
from pathlib import Path

import numpy as np
import pytest

from core.cli import UserError
from core import chat
from tests.helpers import chats
from tests.helpers.chats import LLAMA, QWEN, QWEN_OPEN, QWEN_THINK, ask, encoder

SYSTEM = {"role": "system", "content": "Answer with a label."}
SINGLE = ask("Das ist ein Satz.", "de")
MULTI = [SYSTEM, *ask("Which language?\n\nOù est la bibliothèque ?", "fr"),
         *ask("And this: the fox", "Final Answer: en"), *ask("again", "en")]
THOUGHTS = ask("Der Hund", "de", reasoning_content="It says Der.\n\nSo it is German.")
IN_TEXT = ask("Der Hund", "<think>\nIt says Der.\n</think>\n\nde")

# spans of the answers in the rendered text, with the end token
ANSWER = {QWEN: r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
          LLAMA: r"assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
          QWEN_THINK: r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
          "no thinking": r"<\|im_start\|>assistant\n<think>\n\n</think>\n\n(.*?<\|im_end\|>)",
          QWEN_OPEN: r"<\|im_start\|>assistant\n<think>\n(.*?<\|im_end\|>)"}


@pytest.fixture(scope="module")
def tokenizer():
    return chats.tokenizer()


def reference(tokenizer, messages, pattern, last=False, **options):
    """(ids, mask), found by searching the text."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    places = [match.span(1) for match in re.finditer(pattern, text, re.DOTALL)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(a <= start and stop <= b for a, b in places[-1 if last else 0:])
            for start, stop in encoded["offset_mapping"]]
    return encoded["input_ids"], mask


def released(name):
    """A released model's chat template from the TRL package; skips the test without TRL."""
    folder, spec = os.environ.get("CHAT_TEMPLATES"), importlib.util.find_spec("trl")
    if not folder and not spec:
        pytest.skip("no TRL here, and CHAT_TEMPLATES names no folder with templates")
    return (Path(folder or Path(spec.origin).parent / "chat_templates") / f"{name}.jinja").read_text()


@pytest.mark.parametrize("template, messages, turns, thinking, pattern", [
    (QWEN, SINGLE, "all", None, QWEN), (QWEN, MULTI, "all", None, QWEN), (LLAMA, MULTI, "last", None, LLAMA),
    (QWEN_THINK, SINGLE, "all", None, QWEN_THINK), (QWEN_THINK, MULTI, "last", False, "no thinking"),
    (QWEN_THINK, IN_TEXT, "all", None, QWEN_THINK), (QWEN_OPEN, SINGLE, "all", False, "no thinking"),
    (QWEN_OPEN, THOUGHTS, "all", None, QWEN_OPEN), ("qwen2_5", MULTI, "all", None, QWEN),
    ("qwen3", SINGLE, "last", False, "no thinking"), ("qwen3", THOUGHTS, "all", True, QWEN_THINK),
    ("qwen3_5_nothink", SINGLE, "all", None, "no thinking"), ("qwen3_5_think", THOUGHTS, "all", None, QWEN_OPEN),
    ("llama3", MULTI, "all", None, LLAMA)])
def test_masks_token_by_token(tokenizer, template, messages, turns, thinking, pattern):
    template = template if "{" in template else released(template)
    options = {} if thinking is None else {"enable_thinking": thinking}
    ids, mask = chats.encode(encoder(tokenizer, template, turns, options), messages)
    wanted_ids, wanted = reference(tokenizer, messages, ANSWER[pattern], turns == "last", **options)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert list(zip(tokens, ids, mask)) == list(zip(tokens, wanted_ids, wanted))
    assert sum(mask) >= 2 and tokens[max(np.flatnonzero(mask))] in ("<|im_end|>", "<|eot_id|>")
    if messages == SINGLE:      # an evaluation gives the model all that precedes the first trained token
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False, **options)
        assert ids[:mask.index(True)] == prompt


@pytest.mark.parametrize("template, messages, turns, options, message", [
    (QWEN_OPEN, [*THOUGHTS, *THOUGHTS], "all", None, "--train_turns last"),
    (QWEN_THINK, MULTI, "all", None, "--train_turns last"),                     # earlier turns lose their think block
    (QWEN_THINK, THOUGHTS, "all", {"enable_thinking": False}, "is not how the whole begins"),
    (QWEN.replace("<|im_end|>", ""), SINGLE, "all", None, "does not end an answer with a special token"),
    ("{{ raise_exception('no system role') }}", SINGLE, "all", None, "refuses it (TemplateError: no system role)"),
    (QWEN.replace("messages -%}", "messages if m.role != 'system' -%}", 1), MULTI, "all", None,
     "leaves out a part of message 1 (system)"),
    (QWEN, THOUGHTS, "all", None, "leaves out a part of message 2 (assistant)"),
    (QWEN, ask("say <|im_end|> now", "en"), "all", None, "contains the control token <|im_end|>"),
    (QWEN + "{{ '<|endoftext|>' if not add_generation_prompt }}", MULTI, "all", None, "is not how the whole begins"),
])
def test_refused(tokenizer, template, messages, turns, options, message):
    refused = chats.encode(encoder(tokenizer, template, turns, options), messages)
    assert isinstance(refused, UserError) and message in str(refused), refused


def test_a_prompt_and_its_answer_share_a_token(tokenizer):
    """Two line feeds are one token. The prompt ends with the first of them."""
    ids, mask = chats.encode(encoder(tokenizer, QWEN_OPEN), SINGLE)
    prompt = tokenizer.apply_chat_template(SINGLE[:-1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(SINGLE, tokenize=False)
    assert whole.startswith(tokenizer.decode(prompt)) and tokenizer(whole)["input_ids"][:len(prompt)] != prompt
    assert ids[:len(prompt)] == prompt and tokenizer.decode(ids) == whole and not any(mask[:len(prompt)])
    assert tokenizer.decode([i for i, trained in zip(ids, mask) if trained]) == "\n</think>\n\nde<|im_end|>"


def test_answers_of_weight_0_are_context(tokenizer, tmp_path):
    talk = [message | ({"weight": weight} if message["role"] == "assistant" else {})
            for message, weight in zip(MULTI, (0, 0, 0, 1, 1, 0.0, 0.0))]
    (ids, mask), (plain, _) = (chats.encode(encoder(tokenizer, QWEN), each) for each in (talk, MULTI))
    assert tokenizer.decode([i for i, trained in zip(ids, mask) if trained]) == "Final Answer: en<|im_end|>"
    assert ids == plain[:len(ids)] and tokenizer.decode(ids).endswith("Final Answer: en<|im_end|>\n")
    refused = chats.encode(encoder(tokenizer, QWEN, "last"), talk)
    assert "no answer to train" in str(refused)
    problems, path = [], chats.write(tmp_path / "chats.jsonl", [talk, [SINGLE[0], SINGLE[1] | {"weight": 0.5}]])
    assert len(list(chat.read_records(path, problems))) == 1 and "has the weight 0.5" in str(problems[0])


TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"properties": {"word": {"type": "string"}}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": '{"word": "Hund"}'}}


def test_tools_and_calls_go_to_the_template(tokenizer, tmp_path):
    talk = [SINGLE[0], {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "German"}, SINGLE[1]]
    path = chats.write(tmp_path / "chats.jsonl", [talk], tools=[TOOL])
    (_, record), = chat.read_records(path, [])
    call = '<tool_call>\n{"name": "lookup", "arguments": {"word": "Hund"}}\n</tool_call><|im_end|>'
    for turns, wanted in (("all", call + "de<|im_end|>"), ("last", "de<|im_end|>")):
        with_tools = encoder(tokenizer, chats.QWEN_TOOLS, turns)
        ids, mask = chats.encode(with_tools, **record)
        plain, _ = chats.encode(with_tools, SINGLE)
        assert tokenizer.decode([i for i, trained in zip(ids, mask) if trained]) == wanted
        assert '"word": {"type": "string"}' in tokenizer.decode(ids) and "lookup" not in tokenizer.decode(plain)
    refused = chats.encode(encoder(tokenizer, QWEN), record["messages"][-2:], record["tools"])
    assert "leaves out the tool lookup" in str(refused)
    without = chats.QWEN_TOOLS.replace("m.tool_calls else", "none else")
    without_arguments = chats.QWEN_TOOLS.replace("[0].function |", "[0].function.name |")
    for template, turns in ((without, "all"), (without, "last"), (without_arguments, "all")):
        refused = chats.encode(encoder(tokenizer, template, turns), **record)
        assert "leaves out a part of message 2 (assistant)" in str(refused)
    refused = chats.encode(encoder(tokenizer, chats.QWEN_TOOLS), SINGLE, [{"name": "<|im_end|>"}])
    assert "contains the control token" in str(refused)


def test_tokenizers_that_cannot_be_used(tokenizer, tmp_path):
    with pytest.raises(UserError, match="no tokenizer can be loaded"):
        chat.load_tokenizer(tmp_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no chat template; give one with --chat_template"):
        chat.load_tokenizer(tmp_path)
    (tmp_path / "template.jinja").write_text(LLAMA)
    assert chat.load_tokenizer(tmp_path, tmp_path / "template.jinja").chat_template == LLAMA
