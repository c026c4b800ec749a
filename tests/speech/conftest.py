"""Tokenizer and ids of the tiny model, a table of conversations of every kind, a tiny Higgs TTS 3."""
import json
from types import SimpleNamespace

import pytest

from speech.labels import token_ids
from tests.helpers import dialogues


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(tiny.model)


@pytest.fixture(scope="module")
def ids(tiny, tokenizer):
    config = json.loads((tiny.model / "config.json").read_text())
    return token_ids(tokenizer, SimpleNamespace(**config))


@pytest.fixture(scope="module")
def table(tokenizer, ids, tmp_path_factory):
    return dialogues.table_of(dialogues.CONVERSATIONS, tokenizer, ids, tmp_path_factory.mktemp("labels"))


@pytest.fixture(scope="session")
def model3(tmp_path_factory):
    """Folder of a tiny Higgs TTS 3, with its codec in the same parent folder; read only."""
    from speech import make_tiny
    pytest.importorskip("torchaudio")
    out = tmp_path_factory.mktemp("tiny3")
    return make_tiny.make_model3(out, make_tiny.make_codec(out))
