"""A teacher on a server gives the losses of the same teacher in the process, also after lost calls."""
import json
import re
import threading
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

from core.cli import UserError
from distill import frozen
from tests.helpers import chats, students
from tests.helpers.lora_server import LoraServer, ScoreServer

GUESS = {"0": {"logprob": -1.0, "rank": 1}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    sizes = {"max_position_embeddings": 512, "initializer_range": 0.2}
    chats.student(folder / "student", **sizes)
    chats.student(folder / "teacher", hidden_size=48, num_hidden_layers=3, **sizes)
    talks = [[m for m in talk if m["role"] != "system"] for talk in chats.conversations(12)]
    chats.write(folder / "chats.jsonl", talks)
    (folder / "system.txt").write_text("Name the language. the quick brown fox\n")
    return folder


def scorer_of(server, k, timeout, rows):
    return frozen.Scorer(SimpleNamespace(teacher_url=server.url, teacher_name="big", teacher_path="", distill_topk=k,
                                         request_timeout=timeout), rows)


@pytest.mark.slow
def test_losses_are_those_of_the_model_itself(pool, inputs, tmp_path):
    """Two ranks score the student's draws. The first answers are lost; no file holds the API key."""
    def losses(name, *more):
        metrics = students.train(
            pool, 2, tmp_path / name, "--model_path", inputs / "student", "--train_data_file", inputs / "chats.jsonl",
            "--prompt_file", inputs / "system.txt", "--prompt_role", "system", "--divergence", "js", "--teacher_path",
            inputs / "teacher", "--distill_topk", 5, "--on_policy", 0.5, "--max_new_tokens", 5, "--learning_rate", 2e-3,
            "--max_steps", 3, "--save_steps", 0, "--eval_steps", 0, "--per_device_train_batch_size", 3,
            "--gradient_accumulation_steps", 2, "--parallel", "fsdp", *more, key="kept-key")
        return [metrics[step]["train/loss"] for step in (1, 2, 3)]
    with ScoreServer(inputs / "teacher", "big", fails=3) as server:
        served = losses("served", "--teacher_url", server.url, "--teacher_name", "big")
        asked = [tuple(body["prompt"]) for _, body in server.calls]
    assert served == pytest.approx(losses("here"), rel=1e-4, abs=1e-6)
    assert len(asked) == 3 * 12 + 3 and min(served) > 0.05
    stored = "".join(path.read_text(errors="replace") for path in (tmp_path / "served").rglob("*") if path.is_file())
    assert "kept-key" not in stored


def test_wrong_scores_are_refused(inputs):
    """Servers without prompt_logprobs or with too few tokens are refused. The probabilities sum to 1."""
    with ScoreServer(inputs / "teacher", "big") as server:
        scorer = scorer_of(server, 3, 5.0, 1 << 20)
        ids, logprobs = zip(*scorer.server.wait(scorer.ask([5, 6, 7]))[1])
        with torch.no_grad():
            scores = server.model(torch.tensor([[5, 6]])).logits[0, -1].log_softmax(-1)
        assert list(ids) == scores.topk(3).indices.tolist()
        assert logprobs == pytest.approx(scores.topk(3).values.tolist())
        (_, both), _ = scorer.rows(SimpleNamespace(input_ids=torch.tensor([5, 6, 7]), rows=torch.tensor([1]),
                                              cu_seqlens=torch.tensor([0, 3])))
        assert both.exp().sum().item() == pytest.approx(1)      # with the share of all other tokens
        score = server.score
        for wrong in (lambda ids, k: None, lambda ids, k: score(ids, k)[1:]):
            server.score = wrong
            with pytest.raises(UserError, match="does not have the form of OpenAI's API"):
                scorer.server.wait(scorer.ask([5, 6]))


@pytest.mark.parametrize("change, words", [
    ({"9": None}, "has no log-probability of token 9, which was sent"),
    ({"7": None}, "gave 1 tokens of the 2 likeliest"), ({"5": (8.5, 1)}, "gave log-probabilities above 0"),
    ({"5": (float("nan"), 1)}, "gave log-probabilities above 0")])
def test_scores_need_the_token_sent_and_the_likeliest_ones(change, words):
    row = {"5": (-0.5, 1), "7": (-1.5, 2), "9": (-9.0, 40)}

    def known(row):
        scores = {name: {"logprob": value[0], "rank": value[1]} for name, value in row.items() if value}
        return frozen.known_tokens(scores, 2, 9)
    assert known(row) == [(5, -0.5), (7, -1.5)]
    with pytest.raises(UserError, match=re.escape(words)):
        known(row | change)


def test_a_pack_of_many_calls_has_one_time_limit(monkeypatch):
    """Each of 300 calls takes less than --request_timeout; together they exceed it."""
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 256)
    with LoraServer(None) as server:
        def answer(path, body):
            server.calls.append(path)
            over.wait(0.7)
            return 200, json.dumps({"choices": [{"token_ids": [7], "prompt_logprobs": [None, GUESS, GUESS]}]})
        server.answer, over, n = answer, threading.Event(), 300
        with pytest.raises(UserError, match="/completions: no whole answer in "):
            scorer_of(server, 1, 1.0, 99).rows(SimpleNamespace(
                input_ids=torch.zeros(3 * n, dtype=int), cu_seqlens=torch.arange(0, 3 * n + 1, 3),
                rows=torch.arange(0, 3 * n, 3)))
        assert len(server.calls) < n
        over.set()
