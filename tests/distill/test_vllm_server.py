"""vLLM itself: its server and its engine under create_data.py, and a checkpoint of train_sft.py that it answers from.

    bash tests/helpers/vllm_cpu.sh && python -m pytest tests/distill/test_vllm_server.py

Skipped where there is no Python with vLLM: VLLM_PYTHON, or the one in .venv-vllm of tests/helpers/vllm_cpu.sh. The
model is a tiny Qwen3 that has learnt its answers by heart, so that they can be read; transformers is the reference.
"""
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill import frozen
from tests.helpers import chats
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT

PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
MISSING = f"no vLLM: {PYTHON} is not there; tests/helpers/vllm_cpu.sh makes it, VLLM_PYTHON names another"
pytestmark = [pytest.mark.skipif(not PYTHON.is_file(), reason=MISSING)]
ENVIRONMENT = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LINES = ["the quick brown fox", "jumps over the dog", "Das ist ein Satz", "der etwas ist", "Où est la", "la porte ?"]
LABELS = ["en", "en", "de", "de", "fr", "fr"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder that train_sft.py has saved: a Qwen3 that answers LINES."""
    folder = tmp_path_factory.mktemp("student")
    chats.student(folder / "base", hidden_size=64, intermediate_size=128, head_dim=32, num_attention_heads=2,
                  num_key_value_heads=1)
    chats.write(folder / "chats.jsonl", [chats.ask(line, f"Final Answer: {label}")
                                         for line, label in zip(LINES, LABELS)])
    run(sys.executable, "distill/train_sft.py", "--model_path", folder / "base",
        "--train_data_file", folder / "chats.jsonl", "--output_dir", folder / "out", "--report_to", "none",
        "--per_device_train_batch_size", len(LINES), "--gradient_accumulation_steps", 1, "--num_workers", 0,
        "--learning_rate", 5e-3, "--max_steps", 60, "--save_steps", 0)
    return folder / "out" / "checkpoint-60"


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """The /v1 address of vLLM's own server on the checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    process = subprocess.Popen(
        [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--served-model-name", "teacher",
         "--max-model-len", "128", "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)],
        stdout=log.open("w"), stderr=subprocess.STDOUT, env=ENVIRONMENT, start_new_session=True)
    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def run(*words):
    """What a command of the project prints; it must succeed."""
    done = subprocess.run([str(word) for word in words], cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def label(folder, name, *flags, python=sys.executable, lines=LINES):
    """Records that create_data.py writes about lines."""
    (folder / "lines.txt").write_text("".join(line + "\n" for line in lines))
    (folder / "prompt.txt").write_text("{text}")
    run(python, "distill/create_data.py", "--input_file", folder / "lines.txt", "--prompt_file", folder / "prompt.txt",
        "--output_file", folder / f"{name}.jsonl", *flags)
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def assert_same_labels(ours, theirs):
    """Labels, their tokens, and the probabilities of the alternatives; the smallest may be others by rounding."""
    assert [(r["id"], r["messages"], r["label_tokens"]) for r in ours] == \
        [(r["id"], r["messages"], r["label_tokens"]) for r in theirs]
    for one, other in zip(ours, theirs):
        for row, reference in zip(one["logprobs"], other["logprobs"], strict=True):
            mine, wanted = ({text: math.exp(value) for text, value in r} for r in (row, reference))
            assert row[0][0] == reference[0][0]
            assert all(mine.get(text, 0) == pytest.approx(p, abs=2e-3) for text, p in wanted.items())


GREEDY = ("--max_tokens", 16, "--temperature", 0, "--max_retries", 0, "--logprobs", 3)


@pytest.fixture(scope="module")
def reference(checkpoint, tmp_path_factory):
    """The labels by transformers."""
    found = label(tmp_path_factory.mktemp("reference"), "labels", "--model_name", checkpoint, "--engine",
                  "transformers", *GREEDY)
    assert [r["messages"][1]["content"] for r in found] == LABELS, "it has learnt them by heart"
    return found


def test_labels_of_the_server(server, reference, tmp_path):
    assert_same_labels(label(tmp_path, "labels", "--base_url", server, "--model_name", "teacher", *GREEDY), reference)
    stats = json.loads((tmp_path / "labels.stats.json").read_text())
    assert stats["labelled"] == len(LINES) and stats["without_logprobs"] == 0 and stats["parse_rate"] == 1


def test_answers_token_by_token(server, checkpoint):
    """What the server says greedily, known lines or not, is what transformers' generate says, up to its length."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    for line in [*LINES, "something else", "ein Fuchs ~ 12"]:
        body = {"model": "teacher", "messages": [{"role": "user", "content": line}], "temperature": 0, "max_tokens": 12,
                "return_token_ids": True}
        request = urllib.request.Request(f"{server}/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        answer = json.loads(urllib.request.urlopen(request, timeout=PATIENCE_S).read())
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_tensors="pt",
                                               return_dict=True)
        with torch.no_grad():
            ids = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1]:]
        assert answer["prompt_token_ids"] == prompt["input_ids"][0].tolist()
        assert answer["choices"][0]["token_ids"] == ids.tolist()


def test_scores_of_an_answer(server, checkpoint):
    """prompt_logprobs of ids, as distill/frozen.py asks for them."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer.apply_chat_template(chats.ask(LINES[0], "Final Answer: de"), return_dict=False)
    rows = frozen.Scorer(server, "teacher", 5, 60.0, 1 << 20).ask(ids)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for place in range(1, len(ids)):
        tokens, logprobs = rows[place]
        torch.testing.assert_close(torch.tensor(logprobs), wanted[place - 1, list(tokens)], rtol=0, atol=1e-3)
        torch.testing.assert_close(torch.tensor(logprobs), wanted[place - 1].topk(5).values, rtol=0, atol=1e-3)


def test_labels_of_the_engine(checkpoint, reference, tmp_path):
    found = label(tmp_path, "labels", "--model_name", checkpoint, "--engine", "vllm", "--enforce_eager",
                  "--max_model_len", 128, *GREEDY, python=PYTHON)
    assert_same_labels(found, reference)
