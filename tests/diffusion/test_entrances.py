"""What comes in by --init_from, chats and lm-eval, and what goes out by an export: nothing trains on other weights, rows,
masks or blocks than the source has, and a kill leaves no half folder. Scripts run with arguments.
"""
import json
import math
import os
import shutil
import signal
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from tests.helpers.chats import ask, write
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT


@pytest.fixture(scope="module")
def run(quick_python):
    """run(script, *words, kill_at="") -> (status, output) of a script of diffusion/, started with arguments.

    kill_at: lines of Python before it, to be killed by.
    """
    def start(script, *words, kill_at=""):
        path, words = str(ROOT / "diffusion" / script), [str(word) for word in words]
        code = "import torch, runpy, sys\nsys.argv = sys.argv[1:]\n" \
               f"sys.path.insert(0, {str(ROOT)!r})\n{kill_at}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
        command = ["-c", code, path] if kill_at else [path]
        done = subprocess.run([quick_python, *command, *words], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=PATIENCE_S, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        return done.returncode, done.stdout
    return start


@pytest.fixture(scope="module")
def train(run, demo):
    """train(folder, output_dir, *flags) -> (status, output) of a run of one step from a model's folder."""
    def start(folder, out, *more):
        return run("train_bd3lm.py", "--init_from", folder, "--train_data_file", demo / "train.jsonl", "--max_length", 96,
                   "--max_steps", 1, "--num_workers", 0, "--problems_per_batch", 4, "--gradient_accumulation_steps", 1,
                   "--output_dir", out, "--report_to", "none", "--logging_dir", f"{out}-logs", "--warmup_steps", 0,
                   "--eval_repeats", 1, *more)
    return start


def refused(done, *words):
    """One line, status 1, that has the words."""
    status, output = done
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == 1 and len(errors) == 1 and "Traceback" not in output, output
    assert all(word in errors[0] for word in words), errors[0]
    return errors[0]


@pytest.fixture
def qwen(demo, tmp_path):
    """Folder of a tiny Qwen3 with rows for all its tokens and one to spare, and a chat template."""
    folder = shutil.copytree(demo / "chat", tmp_path / "qwen")
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=core.get_vocab_size() + 1, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=256,
        eos_token_id=core.token_to_id("<|im_end|>"))).save_pretrained(folder)
    return folder


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_tied_folder_with_a_head_of_its_own_is_refused(qwen, train, tmp_path):
    tensors = load_file(qwen / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, qwen / "model.safetensors")
    assert train(qwen, tmp_path / "same")[0] == 0         # the same twice changes nothing
    tensors["lm_head.weight"][3, 3] += 0.1
    save_file(tensors, qwen / "model.safetensors")
    assert refused(train(qwen, tmp_path / "out"), "tie_word_embeddings true, but lm_head.weight is not the embedding")


def test_more_tokens_than_rows_are_refused(qwen, train, tmp_path):
    tensors = load_file(qwen / "model.safetensors")
    rows = len(tensors["model.embed_tokens.weight"]) - 2
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:rows].clone()
    save_file(tensors, qwen / "model.safetensors")
    change_config(qwen, vocab_size=rows)
    assert refused(train(qwen, tmp_path / "out"), f"tokenizer and model disagree: {rows + 1} tokens and {rows} rows")


def test_the_mask_and_the_blocks_are_those_of_the_source(qwen, train, tmp_path):
    """As an SDAR folder has them in config.json."""
    wrapped = PreTrainedTokenizerFast.from_pretrained(qwen)
    wrapped.add_special_tokens({"mask_token": "<|MASK|>"})
    wrapped.save_pretrained(qwen)
    change_config(qwen, model_type="sdar", block_size=4, mask_token_id=wrapped.mask_token_id)
    status, output = train(qwen, tmp_path / "out")
    assert status == 0 and "trained in blocks of 4" in output, output
    made = max((tmp_path / "out").glob("checkpoint-*"))
    assert json.loads((made / "config.json").read_text())["layout"]["block_size"] == 4
    status, output = train(qwen, tmp_path / "told", "--block_size", 8)
    made = max((tmp_path / "told").glob("checkpoint-*"))
    assert status == 0 and json.loads((made / "config.json").read_text())["layout"]["block_size"] == 8
    for wrong in (5, wrapped.eos_token_id):
        change_config(qwen, mask_token_id=wrong)
        assert refused(train(qwen, tmp_path / "wrong"), f"mask_token_id {wrong}", f"at {wrapped.mask_token_id}")


def test_exports_stop_where_answers_end_and_appear_whole(qwen, train, run, tmp_path):
    """Question and Answer, not the chat template: its end token is not the source's."""
    status, output = train(qwen, tmp_path / "out")
    assert status == 0, output
    end = Tokenizer.from_file(str(qwen / "tokenizer.json")).token_to_id("<|endoftext|>")
    words = ["--checkpoint", tmp_path / "out", "--output_dir", tmp_path / "exported"]
    killed = run("published.py", *words, kill_at="import os, shutil, signal; shutil.copyfile = lambda *a: os.kill("
                                                    "os.getpid(), signal.SIGKILL)")
    assert killed[0] == -signal.SIGKILL and not (tmp_path / "exported").exists()
    status, output = run("published.py", *words)
    assert status == 0, output
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "exported" / name).read_text())["eos_token_id"] == end
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").generation_config.eos_token_id == end
    assert len(list(tmp_path.glob("exported*"))) == 2        # the killed one has another name
    assert refused(run("published.py", *words), "not empty")


def test_chats_without_a_usable_row_are_named(qwen, train, run, tmp_path):
    """In training and in a bound."""
    talks = [ask(f"What is {i}?", f"It is {i}.") for i in range(12)]
    good, bad = write(tmp_path / "good.jsonl", talks), tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "no answer"}]}\n')
    common = ["--system", "chat", "--train_data_file"]
    for words in ([], ["--drop_bad", "invalid"]):
        assert refused(train(qwen, tmp_path / "out", *common, bad, *words), "bad.jsonl", "ends with a message of the user")
    status, output = train(qwen, tmp_path / "out", *common, good)
    assert status == 0, output
    assert refused(run("evaluate.py", "--checkpoint", tmp_path / "out", "--bound", bad, "--device", "cpu"), "bad.jsonl",
            "ends with a message of the user")


def test_requests_without_room_do_not_end_an_evaluation(demo):
    """What lm-eval asks for: a context that is too long is cut in front, and counted."""
    from types import SimpleNamespace

    from diffusion import choices, evaluate
    from tests.diffusion.test_sample_bd3lm import solver_of
    solver = solver_of(demo, choices.Layout(block_size=4, max_length=64))
    ours = evaluate.harness_model(object, solver, 2, 4)
    most, fits = solver.layout.max_length, solver.tokens.decode(range(60, 100))
    found = ours.loglikelihood([SimpleNamespace(args=pair) for pair in (
        ("1", " 2"), (fits * 4, " 2"), ("1", fits * 4))])
    assert most == 64 and [math.isfinite(value) for value, _ in found] == [True, True, False] and ours.too_long == 2
