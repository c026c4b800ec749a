"""Tiny students and their training conversations."""
import pytest

from core import chat
from distill.chat_data import ChatTable, split_samples, write_table
from tests.helpers import chats, tiny_teacher
from tests.helpers.students import HELD_OUT, SEED


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folder with the inputs of runs: students and conversations."""
    folder = tmp_path_factory.mktemp("students")
    chats.student(folder / "qwen")
    chats.student(folder / "llama", "llama")
    chats.student(folder / "moe", "moe")
    chats.student(folder / "window", use_sliding_window=True, sliding_window=6, max_window_layers=1)
    chats.write(folder / "chats.jsonl", chats.conversations(24))
    return folder


@pytest.fixture(scope="module")
def data(inputs, tmp_path_factory):
    """data(student) -> (ChatTable, sample numbers to train, sample numbers held out), as in the runs."""
    def table(student):
        folder = tmp_path_factory.mktemp("table")
        encoder = chat.Encoder(chat.load_tokenizer(inputs / student))
        write_table(folder, [inputs / "chats.jsonl"], encoder, 256)
        table = ChatTable(folder)
        return table, *split_samples(table, 24, 1, HELD_OUT, SEED)
    return table


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory):
    """(folder, model, tokenizer) of a random chat model."""
    folder = tmp_path_factory.mktemp("chat")
    return folder, *tiny_teacher.save(folder)
