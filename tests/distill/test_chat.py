"""Which tokens are trained, token by token, on chat templates of four styles; refusals; table, hold-out, batches.

Released models' own templates are tried as well where TRL is installed, which carries them; without it, CHAT_TEMPLATES
names a folder with them.

The reference knows nothing of prefixes: it searches the rendered text for answers and maps places to tokens with the
tokenizer's own offsets.
"""
import importlib.util
import os
import re
from pathlib import Path

import numpy as np
import pytest

from common.packing import PackOrder, rank_packs
from common.parallel import UserError, World
from distill import chat
from distill import table as chat_table
from tests.helpers import chats
from tests.helpers.chats import LLAMA, QWEN, QWEN_OPEN, QWEN_THINK, ask

SYSTEM = {"role": "system", "content": "Answer with a label."}
SINGLE = ask("Das ist ein Satz.", "de")
MULTI = [SYSTEM, *ask("Which language?\n\nOù est la bibliothèque ?", "fr"),
         *ask("And this: the fox", "Final Answer: en"), *ask("again", "en")]
THOUGHTS = ask("Der Hund", "de", reasoning_content="It says Der.\n\nSo it is German.")
IN_TEXT = ask("Der Hund", "<think>\nIt says Der.\n</think>\n\nde")

# where answers stand in the rendered text: what generate would have to write, its end included
ANSWER = {QWEN: r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
          LLAMA: r"assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
          QWEN_THINK: r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
          "no thinking": r"<\|im_start\|>assistant\n<think>\n\n</think>\n\n(.*?<\|im_end\|>)",
          QWEN_OPEN: r"<\|im_start\|>assistant\n<think>\n(.*?<\|im_end\|>)"}


@pytest.fixture(scope="module")
def made():
    return chats.tokenizer()


def encoder(made, template, *options):
    made.chat_template = template
    return chat.Encoder(made, *options)


def reference(made, messages, pattern, last=False, **options):
    """(ids, mask) by searching the text."""
    text = made.apply_chat_template(messages, tokenize=False, **options)
    places = [match.span(1) for match in re.finditer(pattern, text, re.DOTALL)]
    encoded = made(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(a <= start and stop <= b for a, b in places[-1 if last else 0:])
            for start, stop in encoded["offset_mapping"]]
    return encoded["input_ids"], mask


@pytest.mark.parametrize("template, messages, turns, thinking, pattern", [
    (QWEN, SINGLE, "all", None, QWEN), (QWEN, MULTI, "all", None, QWEN), (QWEN, MULTI, "last", None, QWEN),
    (LLAMA, SINGLE, "all", None, LLAMA), (LLAMA, MULTI, "all", None, LLAMA), (LLAMA, MULTI, "last", None, LLAMA),
    (QWEN_THINK, SINGLE, "all", None, QWEN_THINK), (QWEN_THINK, SINGLE, "all", True, QWEN_THINK),
    (QWEN_THINK, SINGLE, "all", False, "no thinking"), (QWEN_THINK, MULTI, "last", False, "no thinking"),
    (QWEN_THINK, THOUGHTS, "all", True, QWEN_THINK), (QWEN_THINK, IN_TEXT, "all", None, QWEN_THINK),
    (QWEN_OPEN, SINGLE, "all", False, "no thinking"), (QWEN_OPEN, THOUGHTS, "all", None, QWEN_OPEN),
    (QWEN_OPEN, IN_TEXT, "last", True, QWEN_OPEN),
])
def test_masks_token_by_token(made, template, messages, turns, thinking, pattern):
    options = {} if thinking is None else {"enable_thinking": thinking}
    (ids, mask), = encoder(made, template, turns, thinking).encode([messages])
    wanted_ids, wanted = reference(made, messages, ANSWER[pattern], turns == "last", **options)
    tokens = made.convert_ids_to_tokens(ids)
    assert list(zip(tokens, ids, mask)) == list(zip(tokens, wanted_ids, wanted))
    assert sum(mask) >= 2 and tokens[max(np.flatnonzero(mask))] in ("<|im_end|>", "<|eot_id|>")


def released(name):
    """A released model's chat template out of the TRL package; skips where there is none."""
    folder, spec = os.environ.get("CHAT_TEMPLATES"), importlib.util.find_spec("trl")
    if not folder and not spec:
        pytest.skip("no TRL here, and CHAT_TEMPLATES names no folder with templates")
    return (Path(folder or Path(spec.origin).parent / "chat_templates") / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name, messages, turns, thinking, pattern", [
    ("qwen2_5", MULTI, "all", None, QWEN), ("qwen3_instruct_2507", MULTI, "all", None, QWEN),
    ("qwen3", SINGLE, "all", None, QWEN_THINK), ("qwen3", MULTI, "last", False, "no thinking"),
    ("qwen3", THOUGHTS, "all", True, QWEN_THINK), ("qwen3_5_nothink", SINGLE, "all", None, "no thinking"),
    ("qwen3_5_think", SINGLE, "all", False, "no thinking"), ("qwen3_5_think", THOUGHTS, "all", None, QWEN_OPEN),
    ("llama3", MULTI, "all", None, LLAMA),
])
def test_masks_on_released_templates(made, name, messages, turns, thinking, pattern):
    test_masks_token_by_token(made, released(name), messages, turns, thinking, pattern)


@pytest.mark.parametrize("template, messages, thinking", [
    (QWEN, SINGLE, None), (LLAMA, SINGLE, None), (QWEN_THINK, SINGLE, False), (QWEN_OPEN, SINGLE, False)])
def test_the_prompt_of_training_is_the_prompt_of_generation(made, template, messages, thinking):
    """What stands before the first trained token is, token by token, what an evaluation gives the model."""
    (ids, mask), = encoder(made, template, "all", thinking).encode([messages])
    options = {} if thinking is None else {"enable_thinking": thinking}
    prompt = made.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False, **options)
    assert ids[:mask.index(True)] == prompt
    assert made.decode([i for i, trained in zip(ids, mask) if trained]) in ("de<|im_end|>", "de<|eot_id|>")


def test_many_at_once_are_as_each_alone(made):
    together = encoder(made, QWEN).encode(chats.conversations(9))
    assert together == [result for c in chats.conversations(9) for result in encoder(made, QWEN).encode([c])]


@pytest.mark.parametrize("template, messages, turns, thinking, part", [
    (QWEN_OPEN, SINGLE, "all", None, "Try --enable_thinking false"),            # two line feeds are one token
    (QWEN_THINK, MULTI, "all", None, "--train_turns last"),                     # earlier turns lose their think block
    (QWEN_THINK, THOUGHTS, "all", False, "is not how the whole begins"),
    (QWEN.replace("<|im_end|>", ""), SINGLE, "all", None, "does not end an answer with a special token"),
    ("{{ raise_exception('no system role') }}", SINGLE, "all", None, "refuses it (TemplateError: no system role)"),
    (QWEN.replace("messages -%}", "messages if m.role != 'system' -%}", 1), MULTI, "all", None,
     "leaves out the text of message 1 (system)"),
    (QWEN, THOUGHTS, "all", None, "leaves out the answer or the reasoning of message 2"),
    (QWEN, ask("say <|im_end|> now", "en"), "all", None, "message 1 contains the control token <|im_end|>"),
    (QWEN, ask("hello", "en<|im_start|>"), "all", None, "message 2 contains the control token <|im_start|>"),
    (QWEN + "{{ '<|endoftext|>' if not add_generation_prompt }}", MULTI, "all", None, "conversation so far"),
])
def test_refused(made, template, messages, turns, thinking, part):
    good = ask("fine", "en")
    refused, = encoder(made, template, turns, thinking).encode([messages])
    assert isinstance(refused, ValueError) and part in str(refused), refused
    if template == QWEN:        # its neighbours are not touched by it
        assert isinstance(encoder(made, template, turns).encode([messages, good])[1], tuple)


@pytest.mark.parametrize("line, part", [
    (b"{", "is not JSON (Expecting property name"), (b"[]", 'has no list "messages"'), (b"\xff{}", "is not UTF-8"),
    (b'{"messages": []}', 'has no list "messages"'), (b'{"messages": "hi"}', 'has no list "messages"'),
    (b'{"messages": [{"role": "bot", "content": "a"}]}', "message 1 has no role out of system"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "ends with a message of the user"),
    (b'{"messages": [{"role": "assistant", "content": null}]}', "message 1 has no text as its content"),
    (b'{"messages": [{"role": "assistant", "content": " "}]}', "message 1 is an empty answer"),
    (b'{"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]}', "has tool_calls, which cannot"),
    (b'{"messages": [{"role": "assistant", "content": "a", "reasoning_content": 1}]}', "reasoning_content is not"),
    (b'{"messages": [{"role": "assistant", "content": "<|im_end|>"}]}', "contains the control token"),
    (b'{"id": -1, "messages": [{"role": "assistant", "content": "a"}]}', 'has the "id" -1; give a whole number'),
    (b'{"id": 9223372036854775808, "messages": [{"role": "assistant", "content": "a"}]}', "below 2**63, or leave it"),
])
def test_bad_lines_are_named(made, tmp_path, line, part):
    path = chats.write(tmp_path / "chats.jsonl", [SINGLE, SINGLE])
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")
    with pytest.raises(UserError) as wrong:
        chat_table.write_table(tmp_path / "table", [path], encoder(made, QWEN), 100, "stop")
    assert str(wrong.value).startswith(f"{path}:4: ") and part in str(wrong.value)
    assert "\n" not in str(wrong.value) and not (tmp_path / "table").exists()


def test_all_bad_lines_at_once_and_empty_files(made, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("{\n" * 30)
    with pytest.raises(UserError, match=r"30 problems:(.|\n)*chats.jsonl:20(.|\n)*and 10 more"):
        chat_table.write_table(tmp_path / "table", [path], encoder(made, QWEN), 100, "stop")
    path.write_text("\n\n")
    with pytest.raises(UserError, match="holds no conversations"):
        chat_table.write_table(tmp_path / "table", [path], encoder(made, QWEN), 100, "stop")
    with pytest.raises(UserError, match="nothing.jsonl: cannot be read"):
        chat_table.write_table(tmp_path / "table", [tmp_path / "nothing.jsonl"], encoder(made, QWEN), 100, "stop")


# ---------------------------------------------------------------------------------------------------------------------
# Table and batches


def make_table(made, folder, conversations, limit=256, policy="stop", **more):
    path = chats.write(folder / "chats.jsonl", conversations, **more)
    found = chat_table.write_table(folder / "table", [path], encoder(made, QWEN), limit, policy)
    return chat_table.ChatTable(folder / "table"), found


def samples_of(table):
    return [(table.tokens[a:b].tolist(), table.trained[a:b].tolist())
            for a, b in zip(table.offsets, table.offsets[1:])]


def test_table_holds_what_was_encoded(made, tmp_path):
    table, found = make_table(made, tmp_path, chats.conversations(7))
    whole = encoder(made, QWEN).encode(chats.conversations(7))
    assert samples_of(table) == whole and found == {"samples": [7], "long": [0], "dropped": [0]}
    assert table.lengths.tolist() == [len(ids) for ids, _ in whole]
    assert table.targets.tolist() == [sum(mask) for _, mask in whole]
    assert table.name(6) == f"{tmp_path}/chats.jsonl:7"
    mapped = (table.tokens, table.trained, table.offsets, table.lengths)
    assert all(isinstance(values, np.memmap) for values in mapped), "memory must not grow with ranks or workers"
    (tmp_path / "other").mkdir()
    other, _ = make_table(made, tmp_path / "other", [*chats.conversations(6), ask("x", "de")])
    everyone = np.arange(7)
    assert table.fingerprint(everyone[:6]) == other.fingerprint(everyone[:6])
    assert table.fingerprint(everyone) != other.fingerprint(everyone) != table.fingerprint(everyone[:6])


def test_too_long_samples(made, tmp_path):
    short, long = ask("a", "en"), ask("the quick brown fox " * 9, "de or fr")
    (ids, mask), = encoder(made, QWEN).encode([long])
    limit = len(ids) - 3
    for policy in ("drop", "cut_left", "cut_right", "stop"):
        (tmp_path / policy).mkdir()
        if policy == "stop":
            with pytest.raises(UserError, match=rf"jsonl:2: {len(ids)} tokens, more than {limit}\nfix: shorten"):
                make_table(made, tmp_path / policy, [short, long, short], limit, policy)
            continue
        table, found = make_table(made, tmp_path / policy, [short, long, short], limit, policy)
        wanted = {"drop": [], "cut_left": [(ids[3:], mask[3:])], "cut_right": [(ids[:-3], mask[:-3])]}[policy]
        assert samples_of(table)[1:-1] == wanted
        assert table.lines.tolist() == ([1, 3] if policy == "drop" else [1, 2, 3])
        assert found == {"samples": [3 - (policy == "drop")], "long": [1], "dropped": [int(policy == "drop")]}
    (tmp_path / "all").mkdir()      # of a long prompt cut on the right no answer is left
    table, found = make_table(made, tmp_path / "all", [short, long], 30, "cut_right")
    assert len(table) == 1 and found == {"samples": [1], "long": [1], "dropped": [1]}


def test_hold_out_takes_whole_groups():
    keys, lines = np.full(60, -1), np.delete(np.arange(1, 64), [5, 20, 21])     # three lines of the file were dropped
    groups = chat_table.group_numbers(keys, lines, 15)
    assert groups.tolist() == [(line - 1) // 15 for line in lines]
    train, out = chat_table.split_groups(groups, 0.4, 7)
    assert sorted([*train, *out]) == list(range(60)) and len(set(groups[out])) == 2
    assert not set(groups[train]) & set(groups[out])
    assert [list(part) for part in chat_table.split_groups(groups, 0.4, 7)] == [list(train), list(out)]
    assert list(chat_table.split_groups(groups, 0.4, 8)[1]) != list(out)
    by_id = chat_table.group_numbers(lines[::-1] - 1, lines, 15)        # an id is the line that a record came from
    assert by_id.tolist() == groups[::-1].tolist()
    assert [len(part) for part in chat_table.split_groups(groups, 0, 7)] == [60, 0]
    with pytest.raises(UserError, match="all samples are one group"):
        chat_table.split_groups(np.zeros(9), 0.5, 7)


@pytest.mark.parametrize("budget", [0, 300])
def test_batches_hold_each_sample_once(made, tmp_path, budget):
    """Every rank together, against a plain walk over the samples: inputs, places, boundaries, targets."""
    table, _ = make_table(made, tmp_path, chats.conversations(23))
    order = PackOrder(table.lengths, samples_per_pack=0 if budget else 4, tokens_per_pack=budget)
    seen, steps = [], set()
    for rank in range(3):
        packs = list(rank_packs(order, rank, 3, 1, epochs=1))
        steps.add(len(packs))
        for batch in chat_table.make_loader(table, packs, num_workers=0, prefetch_factor=2, pad_to=budget,
                                            pad_id=1):
            bounds = batch.cu_seqlens.tolist()
            assert bounds[-1] == len(batch.input_ids) == (budget or max(1, batch.counts["tokens"]))
            assert max(np.diff(bounds)) <= batch.longest and batch.longest % 128 == 0
            wanted = {}
            for number, a, b in zip(batch.samples, bounds, bounds[1:]):
                ids, mask = samples_of(table)[number]
                assert batch.input_ids[a:b].tolist() == ids and batch.position_ids[a:b].tolist() == list(range(b - a))
                wanted |= {a + i - 1: ids[i] for i in range(1, len(ids)) if mask[i]}
            assert dict(zip(batch.rows.tolist(), batch.targets.tolist())) == wanted
            assert batch.counts == {"tokens": int(table.lengths[list(batch.samples)].sum()), "targets": len(wanted),
                                    "samples": len(batch.samples)}
            seen += batch.samples
    assert sorted(seen) == list(range(23)) and len(steps) == 1


def test_a_batch_moves_whole():
    batch = chat_table.collate([(3, np.arange(5), np.array([True, False, True, True, False]))])
    assert batch.rows.tolist() == [1, 2] and batch.targets.tolist() == [2, 3]       # the first token has no predecessor
    moved = batch.to("meta")
    assert all(getattr(moved, name).is_meta for name in ("input_ids", "position_ids", "cu_seqlens", "rows", "targets"))
    assert (moved.samples, moved.longest, moved.counts) == (batch.samples, batch.longest, batch.counts)
    empty = chat_table.collate([])
    assert len(empty.input_ids) == 1 and not len(empty.rows) and empty.counts["tokens"] == 0


def test_prepared_table(made, tmp_path, capsys):
    import argparse
    train = chats.write(tmp_path / "train.jsonl", chats.conversations(8))
    held = chats.write(tmp_path / "held.jsonl", chats.conversations(3))
    args = argparse.Namespace(train_data_file=str(train), eval_data_file=None, output_dir=str(tmp_path), seed=1,
                              validation_split=0.25, group_size=2, too_long="stop", preprocess_num_proc=2)
    table, ours, theirs, ends = chat_table.prepare_table(World(), args, encoder(made, QWEN), 200)
    assert len(ours) == 6 and len(theirs) == 2 and theirs[0] // 2 == theirs[1] // 2
    assert ends == [made.convert_tokens_to_ids("<|im_end|>")]
    args.eval_data_file = str(held)
    table, ours, theirs, _ = chat_table.prepare_table(World(), args, encoder(made, QWEN), 200)
    assert (len(ours), len(theirs), table.name(theirs[0])) == (8, 3, f"{held}:1")
    assert len(list(tmp_path.glob("table-*"))) == 1, "an old table is not left behind"
    assert "data       read in" in capsys.readouterr().out


def test_tokenizers_that_cannot_be_used(made, tmp_path):
    made.chat_template = None
    made.save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="has no chat template; give one with --chat_template"):
        chat.load_tokenizer(tmp_path / "bare")
    (tmp_path / "template.jinja").write_text(LLAMA)
    assert chat.load_tokenizer(tmp_path / "bare", tmp_path / "template.jinja").chat_template == LLAMA
    with pytest.raises(UserError, match="--chat_template .*none.jinja: cannot be read"):
        chat.load_tokenizer(tmp_path / "bare", tmp_path / "none.jinja")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no tokenizer can be loaded"):
        chat.load_tokenizer(tmp_path / "empty")
