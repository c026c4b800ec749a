"""Tokenised conversations on disk: refused lines, long samples, held-out lines, split answers."""
import json

import numpy as np
import pytest

from core import chat
from core.cli import UserError
from core.dist import World
from distill.chat_data import ChatTable, prepare_table, split_samples, write_held_out, write_table
from tests.helpers import chats
from tests.helpers.chats import QWEN, ask, encoder

SINGLE = ask("Das ist ein Satz.", "de")


@pytest.fixture(scope="module")
def tokenizer():
    return chats.tokenizer()


@pytest.mark.parametrize("line, message", [
    (b"{", "not valid JSON at column 2: Expecting property name"), (b"\xff{}", "not UTF-8"),
    (b"[]", "is a JSON list, not an object"),
    (b'{"conversations": [{"from": ["gpt"], "value": "a"}]}', "message 1 has no role out of system"),
    (b'{"instruction": "ask", "output": "answer"}', 'has no list "messages" of {"role": ..., "content": ...}'),
    (b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": 1}]}', 'its "tools" are no list'),
    (b'{"messages": [{"role": "user", "name": "J", "content": "a"}]}', "message 1 has name, which no chat template is"),
    (b'{"messages": [{"role": "assistant", "content": "a"}]}', "has no answer to train, or begins with one"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text is trained"),
    (b'{"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a"}], '
     b'"teacher_messages": []}', '"teacher_messages" need --teacher_path'),
    (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": 1}]}]}', "tool_calls are no list")])
def test_bad_lines_are_named(tokenizer, tmp_path, line, message):
    path = chats.write(tmp_path / "chats.jsonl", [SINGLE, SINGLE])
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")
    with pytest.raises(UserError) as wrong:
        write_table(tmp_path / "table", [path], encoder(tokenizer, QWEN), 100)
    assert str(wrong.value).startswith(f"{path}:4: ") and message in str(wrong.value)
    assert "\n" not in str(wrong.value)


def make_table(tokenizer, folder, conversations, limit=256, drop=()):
    path = chats.write(folder / "chats.jsonl", conversations)
    counts = write_table(folder / "table", [path], encoder(tokenizer, QWEN), limit, drop)
    return ChatTable(folder / "table"), counts


def samples_of(table):
    return [(table.tokens[a:b].tolist(), table.trained[a:b].tolist()) for a, b in zip(table.offsets, table.offsets[1:])]


def test_the_table_holds_the_encoded_samples(tokenizer, tmp_path):
    table, counts = make_table(tokenizer, tmp_path, chats.conversations(7))
    whole = [chats.encode(encoder(tokenizer, QWEN), messages) for messages in chats.conversations(7)]
    assert samples_of(table) == whole and counts == ([7], "")
    assert table.lengths.tolist() == [len(ids) for ids, _ in whole]
    assert table.targets.tolist() == [sum(mask) for _, mask in whole]
    assert table.name(6) == f"{tmp_path}/chats.jsonl:7"
    mapped = (table.tokens, table.trained, table.offsets, table.lengths)
    assert all(isinstance(values, np.memmap) for values in mapped), "memory must not grow with ranks or workers"
    (tmp_path / "other").mkdir()
    other, _ = make_table(tokenizer, tmp_path / "other", [*chats.conversations(6), ask("x", "de")])
    everyone = np.arange(7)
    assert table.fingerprint(everyone[:6]) == other.fingerprint(everyone[:6])
    assert table.fingerprint(everyone) != other.fingerprint(everyone) != table.fingerprint(everyone[:6])


def test_too_long_samples(tokenizer, tmp_path):
    short, long = ask("a", "en"), ask("the quick brown fox " * 9, "de or fr")
    ids, _ = chats.encode(encoder(tokenizer, QWEN), long)
    limit = len(ids) - 1
    with pytest.raises(UserError, match=rf"jsonl:2: {len(ids)} tokens, more than {limit}\nfix: shorten"):
        make_table(tokenizer, tmp_path, [short, long, short], limit)
    table, counts = make_table(tokenizer, tmp_path, [short, long, short], limit, ("too_long",))
    assert table.lines.tolist() == [1, 3] and counts == ([2], "1 too_long")


class Rows:
    """The columns of a ChatTable that its split reads."""

    def __init__(self, keys, lines):
        self.keys, self.lines = keys, lines

    def __len__(self):
        return len(self.keys)


def test_hold_out_takes_whole_groups():
    keys, lines = np.full(60, -1), np.delete(np.arange(1, 64), [5, 20, 21])     # three lines of the file were dropped
    groups = (lines - 1) // 15

    def split(share, seed, keys=keys, size=15):
        return split_samples(Rows(keys, lines), 60, size, share, seed)
    train, out = split(0.4, 7)
    assert sorted([*train, *out]) == list(range(60)) and len(set(groups[out])) == 2
    assert not set(groups[train]) & set(groups[out])
    assert [list(numbers) for numbers in split(0.4, 7)] == [list(train), list(out)]
    assert list(split(0.4, 8)[1]) != list(out)
    _, by_id = split(0.4, 7, keys=lines[::-1] - 1)           # an id is the number of the source line
    assert sorted(59 - by_id) == list(out)
    assert [len(numbers) for numbers in split(0, 7)] == [60, 0]
    with pytest.raises(UserError, match="all samples are one group"):
        split(0.5, 7, size=99)


def test_all_forms_are_the_same_conversations(tokenizer, tmp_path):
    """Forms: ShareGPT, prompts and completions, parquet with columns of null. A question at the end is dropped."""
    import pyarrow
    import pyarrow.parquet
    talks = [chats.ask(f"question {i}", f"answer {i}") for i in range(6)]
    talks[2] = [{"role": "system", "content": "Be brief."}, *talks[2]]
    talks[0][1]["weight"] = 1                               # a column of null in all other rows
    chats.write(tmp_path / "plain.jsonl", talks)
    rows = [{"messages": talk, "id": i} for i, talk in enumerate(talks)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    turns = [{"from": "human", "value": "question 2"}, {"from": "gpt", "value": "answer 2"}]
    others = [{"prompt": "question 0", "completion": "answer 0"}, {"prompt": talks[1][:1], "completion": talks[1][1:]},
              {"system": "Be brief.", "conversations": turns}, {"prompt": "question 3", "response": "answer 3"},
              {"messages": [*talks[4], {"role": "user", "content": "and then?"}]}, {"messages": talks[5]}]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    tables = []
    for name in ("plain.jsonl", "rows.parquet", "others.jsonl"):
        write_table(tmp_path / f"table-{name}", [tmp_path / name], chat.Encoder(tokenizer), 256)
        tables.append(ChatTable(tmp_path / f"table-{name}"))
        for column in ("tokens", "trained", "offsets", "asked"):
            assert getattr(tables[-1], column).tolist() == getattr(tables[0], column).tolist()
    assert len(tables[0]) == 6 and tables[1].keys.tolist() == list(range(6))
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cut\.parquet: cannot be read as parquet \(\w+"):
        write_table(tmp_path / "table-cut", [tmp_path / "cut.parquet"], chat.Encoder(tokenizer), 256)


def test_each_answer_of_a_hybrid_template_is_a_sample(tokenizer, tmp_path):
    """Each answer is rendered at its turn. All samples of a line are held out together, and the line is saved once."""
    talk = ask("a", "one", reasoning_content="why") + ask("b", "two", reasoning_content="hm") + ask("c", "three")
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"id": i, "messages": messages}) + "\n" for i, messages in enumerate(
        [talk, SINGLE, talk])))
    split = chat.Encoder(tokenizer, split=True)
    tokenizer.chat_template = chats.QWEN_THINK
    table, n_train = prepare_table(World(), tmp_path, [path], split, 256)
    wanted = []
    for messages in (talk, SINGLE, talk):
        for i in range(1, len(messages), 2):
            start, whole = (tokenizer.apply_chat_template(messages[:i + 1 - k], add_generation_prompt=bool(k),
                                                     return_dict=False) for k in (1, 0))
            # the line feed after the end token is not trained
            wanted.append((whole, [len(start) <= index < len(whole) - 1 for index in range(len(whole))]))
    assert samples_of(table) == wanted and table.lines.tolist() == [1, 1, 1, 2, 3, 3, 3]
    train, held_out = split_samples(table, n_train, 1, 0.5, 3)
    write_held_out(tmp_path, table, train, held_out)
    assert not set(table.lines[train]) & set(table.lines[held_out])
    rows = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert [row["id"] + 1 for row in rows] == sorted(set(table.lines[held_out].tolist()))
