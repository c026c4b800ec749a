"""Indices of millions of samples: what several processes make is what one makes, and little of it is in memory."""
import itertools
import json
import multiprocessing
import os
import signal
import tracemalloc

import numpy as np
import pytest
from transformers import AutoTokenizer

from core import indexing
from core.cli import UserError
from core.indexing import Column, Lists, parallel_map_ordered, token_lists
from core import chat, json_files
from distill import chat_data as chat_table
from tests.helpers import chats
from tests.helpers.fork import in_a_fork

# ---------------------------------------------------------------------------------------------------------------------
# Columns, parts, texts


@pytest.mark.parametrize("parts, width", [([], None), ([[1, 2], [], [3]], None), ([], 2), ([[[1, 2]], [[3, 4]]], 2),
                                          ([list(range(1000))] * 200, None)], ids=str)
def test_a_column_is_the_file_that_numpy_saves(tmp_path, parts, width):
    column = Column(tmp_path / "grown.npy", np.int32, width)
    for part in parts:
        column.append(np.array(part).reshape(-1, *([width] if width else [])))
        assert column.array().shape[0] == len(column)
    whole = np.concatenate([np.empty((0, *([width] if width else [])), np.int32),
                            *[np.array(part, np.int32).reshape(-1, *([width] if width else [])) for part in parts]])
    assert (column.array() == whole).all()
    column.close()
    np.save(tmp_path / "saved.npy", whole)
    assert (tmp_path / "grown.npy").read_bytes() == (tmp_path / "saved.npy").read_bytes()


def test_lists(tmp_path):
    lists = Lists(tmp_path, "values", "offsets", np.uint8)
    lists.append(np.array([1, 2, 3], np.uint8), [2, 0, 1])
    lists.append(np.array([4], np.uint8), np.array([1]))
    assert [found.tolist() for found in lists] == [[1, 2], [], [3], [4]] and len(lists) == 4


@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("n", [0, 3, 4, 5, 23])
def test_parts_come_in_order(n, processes):
    def share(first, step):
        for i in range(first, n, step):
            yield i, os.getpid()

    found = []
    parallel_map_ordered(share, processes, found.append)
    assert [i for i, _ in found] == list(range(n))
    elsewhere = {pid for i, pid in found if pid != os.getpid()}
    assert len(elsewhere) == min(processes, max(0, n - indexing.HERE))


def test_few_parts_start_no_process(monkeypatch):
    monkeypatch.setattr(indexing, "DataLoader", None)
    found = []
    parallel_map_ordered(lambda first, step: iter(range(first, indexing.HERE - 1, step)), 2, found.append)
    assert found == list(range(indexing.HERE - 1))


@pytest.mark.slow
@pytest.mark.race
def test_a_process_that_is_killed_ends_it_with_one_line():
    def share(first, step):
        for i in range(first, 100, step):
            if i == 17:
                os.kill(os.getpid(), signal.SIGKILL)
            yield i

    found = []
    with pytest.raises(UserError) as caught:
        parallel_map_ordered(share, 2, found.append)
    assert "\n" not in str(caught.value) and "is killed by signal: Killed" in str(caught.value)
    assert "--preprocess_num_proc" in str(caught.value) and not multiprocessing.active_children()
    assert found == list(range(len(found)))


def test_errors_come_in_their_place():
    def share(first, step):
        for i in range(first, 100, step):
            if i > 8:
                raise UserError(f"error {i}")
            yield i

    for processes in (0, 2):
        found = []
        with pytest.raises(UserError, match="^error 9$"):
            parallel_map_ordered(share, processes, found.append)
        assert found == list(range(9))


@pytest.mark.parametrize("with_limits", [False, True])
def test_fast_tokens_are_the_tokenizers(tiny, with_limits, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    texts = ["The kettle is singing.", "<|eot_id|>\n", "x" * 50, "", "two <|AUDIO_OUT|> three"]
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if with_limits:     # as a tokenizer.json may have them
        tokenizer.backend_tokenizer.enable_truncation(4)
        tokenizer.backend_tokenizer.enable_padding()
    lists = token_lists(tokenizer)
    assert lists([]) == [] and lists(texts) == expected
    monkeypatch.setattr(type(tokenizer), "__call__", None)      # from the second call on it is not asked any more
    assert lists(texts[::-1]) == expected[::-1]


# ---------------------------------------------------------------------------------------------------------------------
# Chats


def chat_lines(n):
    """JSONL text of conversations of all kinds that can be used, empty lines among them."""
    lines = [json.dumps({"id": 3 * i, "messages": chats.ask(f"Satz {i}, {'so ' * (i % 9)}", "de"[:1 + i % 2]) + (
        chats.ask("Und nun?", "fr") if i % 4 == 0 else [])}) + "\n" * (1 + (i % 13 == 0)) for i in range(n)]
    return "\n".join(lines)


def chat_table_of(paths, folder, processes, limit=60, policy="cut_left"):
    encoder = chat.Encoder(chats.tokenizer())
    found = chat_table.write_table(folder, paths, chat_table.Reading(
        encoder, limit, policy, processes=processes))
    return {path.name: path.read_bytes() for path in folder.iterdir()}, found, encoder.ends


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chat_table, "CHUNK", 4)
    monkeypatch.setattr(indexing, "HERE", 1)


@pytest.mark.parametrize("policy", ["drop", "cut_left", "cut_right"])
def test_several_processes_make_the_chats_of_one(tmp_path, policy, small_chunks):
    paths = [tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"]
    for path, n in zip(paths, (50, 21)):
        path.write_text(chat_lines(n))
    one, found, ends = chat_table_of(paths, tmp_path / "table", 0, policy=policy)
    assert found["long"] and sum(found["samples"]) + found["dropped"] == 71 and len(one) == 10
    assert ends == {chats.tokenizer().convert_tokens_to_ids("<|im_end|>"): 71 + 13 + 6}     # all answers
    for processes in (1, 2):
        many, again, its_ends = chat_table_of(paths, tmp_path / f"table{processes}", processes, policy=policy)
        assert (again, its_ends) == (found, ends)
        assert {name: many[name] == one[name] for name in one} == dict.fromkeys(many, True)
    table, encoder = chat_table.ChatTable(tmp_path / "table"), chat.Encoder(chats.tokenizer())
    every = [(line, *encoder.encode([record["messages"]])[0], source, chat.group_key(record))
             for source, path in enumerate(paths) for line, record in chat.read_records(path, [])]
    every = [(line, *part, source, key) for line, ids, mask, source, key in every
             if (part := chat.cut(ids, mask, 60, policy))]
    for i, (line, ids, mask, source, key) in enumerate(every):
        part = slice(table.offsets[i], table.offsets[i + 1])
        assert (table.tokens[part].tolist(), table.trained[part].tolist()) == (ids, mask)
        assert (table.lines[i], table.lengths[i], table.targets[i], table.sources[i], table.keys[i]) == (
            line, len(ids), sum(mask[1:]), source, key)
    assert len(table) == len(every)


def test_problems_of_chats_are_the_same_in_the_same_order(tmp_path, small_chunks):
    lines, texts = chat_lines(40).split("\n"), []
    control, long = (json.dumps({"messages": chats.ask(text, "de")}) for text in ("<|im_end|>", "lang " * 90))
    for at, line in ((2, "{"), (6, '{"messages": []}'), (17, "\udcff"), (25, control), (26, long)):
        lines[at] = line
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines), errors="surrogateescape")
    for processes in (0, 1, 2):
        with pytest.raises(UserError) as caught:
            chat_table_of([path], tmp_path / f"table{processes}", processes, policy="stop", limit=100)
        texts.append(str(caught.value))
    assert texts == texts[:1] * 3 and texts[0].startswith("5 problems:") and "fix: shorten them" in texts[0]
    places = [texts[0].index(f"{path}:{number}:") for number in (3, 7, 18, 26, 27)]
    assert places == sorted(places)


@pytest.mark.parametrize("turns", ["all", "last"])
def test_chats_rendered_together_are_rendered_alone(turns):
    """With ones among them that a template refuses, or that begin with an answer."""
    refusing = chats.QWEN.replace("{%- for", "{%- if messages[0].content == 'no' %}{{ raise_exception('never') }}"
                                             "{%- endif %}{%- for", 1)
    assert refusing != chats.QWEN
    answer, no = {"role": "assistant", "content": "Hm."}, chats.ask("no", "de")
    plain = [*chats.conversations(5), chats.ask("a", "b") + chats.ask("c", "d")]
    for template in (chats.QWEN, refusing):
        encoder = chat.Encoder(chats.tokenizer(template), turns)
        for some in (plain, [*plain[:2], no, *plain[2:]], [plain[0], [answer], *plain[1:]]):
            together, alone = encoder.encode(some), [encoder.encode([messages])[0] for messages in some]
            assert list(map(repr, together)) == list(map(repr, alone))
            assert all(isinstance(result, tuple) for result, messages in zip(together, some) if messages in plain)


def test_a_chat_takes_no_memory(tmp_path, monkeypatch):
    path = tmp_path / "train.jsonl"
    path.write_text(chat_lines(500))
    tokenizer = chats.tokenizer()
    made = chat_table.encode_chunk(list(next(chat.read_chunks(path, 10_000))[0]), path,
                                   chat_table.Reading(chat.Encoder(tokenizer), 100), [])
    chunks = itertools.count()          # each with ids of its own
    monkeypatch.setattr(chat_table, "encode_chunk", lambda *_: made | {"keys": made["keys"] + 10_000 * next(chunks)})
    path.write_text("\n" * 1024 * 100)

    def measure():
        tracemalloc.start()
        found = chat_table.write_table(tmp_path / "table", [path], chat_table.Reading(
            chat.Encoder(tokenizer), 100))
        return found, tracemalloc.get_traced_memory()[1]
    found, peak = in_a_fork(measure)
    assert found["samples"] == [50_000] and peak < 4 * 2**20


# ---------------------------------------------------------------------------------------------------------------------
# JSON lists


LISTS = ['[]', ' [ ] \n', '[{"a": [1, 2, "]"]}]', '[1, 23.5e3, "x,y]", null, true, {"b": {}}, [[]]]\n', '\ufeff[1,\n2]',
         '["\\ud83d\\ude00", -Infinity]',
         '[1, 2', '[1, 2,', '[1 2]', '[1, 2]]', '[1,\n 2}\n]', '["a\nb"]', '[tru', '[,1]',
         '[1, "abc', '[1,\n\n  {"a" 1}, 3]', '[1] x', '[{"a": 1,}]', '[', '[123456, nul]']


@pytest.mark.parametrize("text", LISTS)
def test_a_list_is_read_and_its_errors_stand_where_they_are(text, tmp_path):
    path = tmp_path / "data.json"
    path.write_text(text, encoding="utf-8")
    try:
        expected = list(enumerate(json.loads(text.removeprefix("\ufeff"))))
        assert list(json_files.read_entries(path)[1](lambda number: True)) == expected
    except json.JSONDecodeError as error:
        with pytest.raises(UserError, match=f"line {error.lineno} column {error.colno}:"):
            json_files.read_entries(path)


def test_lines_are_never_whole_in_memory(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n\n".join([json.dumps({"text": "x" * 1000})] * 20_000))
    tracemalloc.start()
    unit, read = json_files.read_entries(path)
    assert [number for number, _ in read(lambda number: number < 4)] == list(range(0, 40_000, 2)) and unit == "line"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2
