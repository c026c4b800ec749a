"""Inputs by --init_from, chats and lm-eval; exports. Weights, rows, mask and blocks equal the source's."""
import json
import math
import multiprocessing
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from core.cli import UserError
from diffusion import choices, evaluate, published
from tests.diffusion.test_sample_bd3lm import solver_of
from tests.helpers.block_runs import short_run
from tests.helpers.chats import ask, write
from tests.helpers.runs import newest


@pytest.fixture
def qwen(demo, tmp_path):
    """Folder of a tiny Qwen3 with a chat template and one spare row."""
    folder = shutil.copytree(demo / "chat", tmp_path / "qwen")
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=core.get_vocab_size() + 1, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=256,
        eos_token_id=core.token_to_id("<|im_end|>"))).save_pretrained(folder)
    return folder


@pytest.fixture
def train(demo, qwen, tmp_path):
    """train(name, *flags) -> layout in the checkpoint of a one-step run from the folder, in tmp_path / name."""
    def start(name, *flags):
        short_run(tmp_path / name, f"--init_from {qwen} --train_data_file {demo}/train.jsonl", *flags)
        return json.loads((newest(tmp_path / name) / "config.json").read_text())["layout"]
    return start


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_tied_folder_with_another_head_is_refused(qwen, train):
    tensors = load_file(qwen / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, qwen / "model.safetensors")
    train("same")         # an equal head is accepted
    tensors["lm_head.weight"][3, 3] += 0.1
    save_file(tensors, qwen / "model.safetensors")
    with pytest.raises(UserError, match="tie_word_embeddings true, but lm_head.weight is not the embedding"):
        train("out")


def test_more_tokens_than_rows_are_refused(qwen, train):
    tensors = load_file(qwen / "model.safetensors")
    rows = len(tensors["model.embed_tokens.weight"]) - 2
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:rows].clone()
    save_file(tensors, qwen / "model.safetensors")
    change_config(qwen, vocab_size=rows)
    with pytest.raises(UserError, match=f"tokenizer and model disagree: {rows + 1} tokens and {rows} rows"):
        train("out")


def test_mask_and_block_size_come_from_the_source(qwen, train):
    """SDAR's config.json has both."""
    wrapped = PreTrainedTokenizerFast.from_pretrained(qwen)
    wrapped.add_special_tokens({"mask_token": "<|MASK|>"})
    wrapped.save_pretrained(qwen)
    change_config(qwen, model_type="sdar", block_size=4, mask_token_id=wrapped.mask_token_id)
    assert train("out")["block_size"] == 4 and train("other", "--block_size 8")["block_size"] == 8
    for wrong in (5, wrapped.eos_token_id):
        change_config(qwen, mask_token_id=wrong)
        with pytest.raises(UserError, match=f"mask_token_id {wrong}, .* at {wrapped.mask_token_id}"):
            train("wrong")


def export_and_die(words):
    shutil.copyfile = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    published.main(words)


def test_exports_stop_where_answers_end_and_appear_whole(qwen, train, tmp_path):
    """Answers in the "Question: ... Answer:" form end with <|endoftext|>, not with the chat template's token."""
    train("out")
    end = Tokenizer.from_file(str(qwen / "tokenizer.json")).token_to_id("<|endoftext|>")
    words = ["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "exported")]
    killed = multiprocessing.get_context("fork").Process(target=export_and_die, args=(words,))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and not (tmp_path / "exported").exists()
    published.main(words)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "exported" / name).read_text())["eos_token_id"] == end
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").generation_config.eos_token_id == end
    assert len(list(tmp_path.glob("exported*"))) == 2        # the killed one has another name
    with pytest.raises(UserError, match="not empty"):
        published.main(words)


def test_chats_without_a_usable_row_are_named(train, tmp_path):
    """Training and evaluation name them."""
    good, bad = (write(tmp_path / name, [ask(f"Which is {i}?", f"It is {i}.") for i in range(12)])
                 for name in ("good.jsonl", "bad.jsonl"))
    bad.write_text('{"messages": [{"role": "user", "content": "no answer"}]}\n')
    train("out", f"--system chat --train_data_file {good}")
    for start in (lambda: train("bad", f"--system chat --train_data_file {bad}"),
                  lambda: train("bad", f"--system chat --train_data_file {bad} --drop_bad invalid"),
                  lambda: evaluate.main(["--checkpoint", f"{tmp_path}/out", "--bound", str(bad), "--device", "cpu"])):
        with pytest.raises(UserError, match="bad.jsonl(.|\n)*has no message of the assistant"):
            start()


def test_requests_without_room_do_not_end_an_evaluation(demo):
    """lm-eval sends a context that is too long: its start is cut, and it is counted."""
    solver = solver_of(demo, choices.Layout(block_size=4, max_length=64))
    model, fits = evaluate.harness_model(object, solver, 2, 4), solver.tokens.decode(range(60, 100))
    results = model.loglikelihood([SimpleNamespace(args=pair) for pair in (
        ("1", " 2"), (fits * 4, " 2"), ("1", fits * 4))])
    assert [math.isfinite(value) for value, _ in results] == [True, True, False] and model.too_long == 2
