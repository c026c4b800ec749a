"""Several processes write the same table of chats as one process."""
import json
import os

import pytest

from core import chat, packing
from distill import chat_data
from tests.helpers import chats


@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("n", [0, 3, 4, 5, 23])
def test_results_come_in_order(n, processes):
    results = [result for chunk in packing.map_chunks(
        lambda chunk: [(i, os.getpid()) for i in chunk], range(n), 1, processes) for result in chunk]
    assert [i for i, _ in results] == list(range(n))
    assert processes == 0 or os.getpid() not in {pid for _, pid in results}


def chat_lines(n):
    """JSONL text of n usable conversations of all kinds, with empty lines between some."""
    lines = [json.dumps({"id": 3 * i, "messages": chats.ask(f"Satz {i}, {'so ' * (i % 9)}", "de"[:1 + i % 2]) + (
        chats.ask("Und nun?", "fr") if i % 4 == 0 else [])}) + "\n" * (1 + (i % 13 == 0)) for i in range(n)]
    return "\n".join(lines)


def test_several_processes_make_the_chats_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_data, "CHUNK", 4)
    paths = [tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"]
    for path, n in zip(paths, (50, 21)):
        path.write_text(chat_lines(n))
    tables = []
    for processes in (0, 1, 2):
        encoder, folder = chat.Encoder(chats.tokenizer()), tmp_path / f"table{processes}"
        counts = chat_data.write_table(folder, paths, encoder, 60, ("too_long",), processes)
        tables.append(({path.name: path.read_bytes() for path in folder.iterdir()}, counts,
                       chat_data.ChatTable(folder).ends))
    files, (samples, dropped), ends = tables[0]
    assert dropped == f"{71 - sum(samples)} too_long" and len(files) == 11
    assert ends == [chats.tokenizer().convert_tokens_to_ids("<|im_end|>")]
    assert tables[1] == tables[0] == tables[2]
