"""Compiled adapters get gradients, and a gradient of exactly 0 ends a run (torch 2.11 on an H200 trained nothing)."""
import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import chats
from tests.helpers.trainer import ROOT, run_script, trainer_arguments

LORA = ["--use_lora", "--lora_target_modules", "all-linear", "--lora_dropout", "0.1"]
SHORT = ["--max_steps", "2", "--learning_rate", "1e-2", "--lr_scheduler", "constant", "--resume", "none",
         "--report_to", "none", "--gradient_accumulation_steps", "1", "--eval_steps", "0", "--save_steps", "0",
         "--logging_steps", "1", "--num_workers", "0"]


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    chats.student(folder / "qwen", num_hidden_layers=1)
    chats.write(folder / "chats.jsonl", chats.conversations(24))
    return folder


def words_of(trainer, tiny, student, out):
    if trainer == "train_v2_ddp.py":
        return [*trainer_arguments(tiny, out), "--warmup_steps", "0", "--max_tokens_per_batch", "512", "--disable_eval"]
    chat = ["--train_data_file", student / "chats.jsonl", "--output_dir", out]
    if trainer == "distill/train_sft.py":
        return ["--model_path", student / "qwen", *chat, "--max_tokens_per_batch", "256", "--parallel", "ddp"]
    return ["--init_from", student / "qwen", "--system", "chat", *chat, "--validation_split", "0",
            "--block_size", "4", "--dropout", "0", "--warmup_steps", "0", "--problems_per_batch", "4"]


def run(pool, trainer, words, *compiled):
    statuses, output = pool.run(1, f"{__name__}.train", trainer, [*map(str, words)], *compiled, cwd=ROOT, timeout=1500)
    return statuses[0], output


def train(trainer, argv, compiled=False):
    """Run a trainer; compiled: --compile traces the layers as on a GPU but builds no kernels."""
    if compiled:
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    run_script(trainer, argv)


TRAINERS = ["train_v2_ddp.py", "distill/train_sft.py", "diffusion/train_bd3lm.py"]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_compiled_adapters_train(pool, trainer, tiny, student, tmp_path):
    """Their gradient norm is that of eager adapters. With torch 2.11 it was 0 where an output is changed in place."""
    norms = {}
    for way, *compiled in (("eager",), ("compiled", True)):
        out = tmp_path / way
        argv = [*words_of(trainer, tiny, student, out), *LORA, *SHORT, "--max_steps", 1, *["--compile"] * len(compiled)]
        status, output = run(pool, trainer, argv, *compiled)
        assert status == 0, output[-3000:]
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        norms[way] = [row["train/grad_norm"] for row in rows if "train/grad_norm" in row]
    assert len(norms["eager"]) == 1 and norms["eager"][0] > 0
    assert norms["compiled"] == pytest.approx(norms["eager"], rel=1e-4)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_gradient_of_exactly_zero_ends_the_run(pool, trainer, tiny, student, tmp_path):
    """A head of zeros passes no gradient to the adapters."""
    model = tiny.model if trainer == "train_v2_ddp.py" else student / "qwen"
    zeros = tmp_path / "zeros"
    zeros.mkdir()
    for path in model.iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            heads = [name for name in tensors if "lm_head" in name] or [
                name for name in tensors if "embed_tokens" in name]
            save_file({name: tensor * (name not in heads) for name, tensor in tensors.items()},
                      zeros / path.name, {"format": "pt"})
        elif path.is_file():
            (zeros / path.name).write_bytes(path.read_bytes())
    flag = "--init_from" if "bd3lm" in trainer else "--model_path"
    words = [*words_of(trainer, tiny, student, tmp_path / "out"), *LORA, *SHORT, flag, zeros]
    status, output = run(pool, trainer, words)
    assert status and "step 1: the gradient norm is exactly 0" in output and "Traceback" not in output, output[-3000:]
    assert not list((tmp_path / "out").glob("checkpoint-*"))
