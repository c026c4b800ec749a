"""The table of chats that several processes write is the table of one process."""
import json
import os

import pytest

from core import chat, packing
from core.packing import parallel_map_ordered
from distill import chat_data as chat_table
from tests.helpers import chats


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
    assert len(elsewhere) == min(processes, max(0, n - packing.FIRST_PARTS))


# Chats


def chat_lines(n):
    """JSONL text of conversations of all kinds that can be used, empty lines among them."""
    lines = [json.dumps({"id": 3 * i, "messages": chats.ask(f"Satz {i}, {'so ' * (i % 9)}", "de"[:1 + i % 2]) + (
        chats.ask("Und nun?", "fr") if i % 4 == 0 else [])}) + "\n" * (1 + (i % 13 == 0)) for i in range(n)]
    return "\n".join(lines)


def chat_table_of(paths, folder, processes):
    encoder = chat.Encoder(chats.tokenizer())
    found = chat_table.write_table(folder, paths, chat_table.Reading(
        encoder, 60, drop=("too_long",), processes=processes))
    return {path.name: path.read_bytes() for path in folder.iterdir()}, found, encoder.ends


def test_several_processes_make_the_chats_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_table, "CHUNK", 4)
    monkeypatch.setattr(packing, "FIRST_PARTS", 1)
    paths = [tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"]
    for path, n in zip(paths, (50, 21)):
        path.write_text(chat_lines(n))
    one, found, ends = chat_table_of(paths, tmp_path / "table", 0)
    samples, dropped = found
    assert dropped == f"{71 - sum(samples)} too_long" and len(one) == 10
    assert ends == {chats.tokenizer().convert_tokens_to_ids("<|im_end|>"): 71 + 13 + 6}     # all answers
    for processes in (1, 2):
        many, again, its_ends = chat_table_of(paths, tmp_path / f"table{processes}", processes)
        assert (again, its_ends) == (found, ends)
        assert {name: many[name] == one[name] for name in one} == dict.fromkeys(many, True)
    table, encoder = chat_table.ChatTable(tmp_path / "table"), chat.Encoder(chats.tokenizer())
    every = [(source, line, chat.group_key(record), *map(list, encoder.encode([record["messages"]])[0]))
             for source, path in enumerate(paths) for line, record in chat.read_records(path, [])]
    parts = [slice(a, b) for a, b in zip(table.offsets, table.offsets[1:])]
    assert [row for row in every if len(row[3]) <= 60] == [
        (*found, table.tokens[part].tolist(), table.trained[part].tolist()) for *found, part in zip(
            table.sources.tolist(), table.lines.tolist(), table.keys.tolist(), parts)]
