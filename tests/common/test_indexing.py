"""Indices of millions of samples: what several processes make is what one makes, and little of it is in memory."""
import json
import multiprocessing
import os
import signal

import numpy as np
import pytest
from transformers import AutoTokenizer

from core import chat, indexing, json_files
from core.cli import UserError
from core.indexing import Column, parallel_map_ordered, token_lists
from distill import chat_data as chat_table
from tests.helpers import chats

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
    assert sum(found["long"]) and sum(found["samples"]) + sum(found["dropped"]) == 71 and len(one) == 10
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


# ---------------------------------------------------------------------------------------------------------------------
# JSON lists


LISTS = ['[{"a": [1, 2, "]"]}]', '[1, 23.5e3, "x,y]", null, true, {"b": {}}, [[]]]\n', '\ufeff[1,\n2]',
    '["\\ud83d\\ude00", -Infinity]', '[1, 2', '[1 2]', '[1,\n 2}\n]', '["a\nb"]', '[1, "abc', '[']


@pytest.mark.parametrize("text", LISTS)
def test_a_list_is_read_and_its_errors_stand_where_they_are(text, tmp_path, monkeypatch):
    path = tmp_path / "data.json"
    path.write_text(text, encoding="utf-8")
    try:
        expected = list(enumerate(json.loads(text.removeprefix("\ufeff"))))
        assert list(json_files.read_entries(path)[1](lambda number: True)) == expected
    except json.JSONDecodeError as error:
        with pytest.raises(UserError, match=f"line {error.lineno} column {error.colno}:"):
            json_files.read_entries(path)
    monkeypatch.setattr(json_files, "LONGEST_LIST", 0)
    with pytest.raises(UserError, match="of which 0 are read; write one sample a line"):
        json_files.read_entries(path)
