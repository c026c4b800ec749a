"""--replay_every: a wrong bit on one rank ends the run and names that rank; without one nothing changes."""
import json
import os
import runpy

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.trainer import ROOT, speech_main, train_forked

SLOW_DISK = ROOT / "tests" / "helpers" / "slow_disk" / "sitecustomize.py"
FLAGS = ("--learning_rate", 2e-4, "--disable_eval", "--per_device_train_batch_size", 1, "--max_steps", 4,
         "--gradient_accumulation_steps", 2)
KINDS = {"ddp": ("--use_lora", "--lora_dropout", 0.1), "ddp full": (), "fsdp": ("--parallel", "fsdp")}
TIME = ("second", "throughput", "memory")


def main_with_a_wrong_bit(argv):
    """train_v2_ddp.main, but on rank 1 one bit of one number is flipped in the 4th forward of the
    text embedding: in what it returns, or (BACKWARD) in its gradient.

    Two micro-steps make step 1, so step 2 begins with the 3rd forward, and is replayed.
    """
    if "SLOW_DISK_S" in os.environ:
        runpy.run_path(str(SLOW_DISK))
    embed, calls = torch.nn.Embedding.forward, []

    def flip(tensor):
        tensor = tensor.clone()
        tensor.view(torch.int32).flatten()[7] ^= 1 << 20
        return tensor

    def faulty(self, ids):
        found = embed(self, ids)
        if self.num_embeddings != int(os.environ["TEXT_TOKENS"]) or os.environ["RANK"] != "1":
            return found
        calls.append(1)
        if len(calls) == 4 and "BACKWARD" in os.environ:
            found.register_hook(flip)
        elif len(calls) == 4:
            return flip(found)
        return found
    torch.nn.Embedding.forward = faulty
    speech_main(argv)


@pytest.mark.slow
@pytest.mark.parametrize("kind, where", [("ddp", "forward"), ("fsdp", "forward"), ("ddp full", "backward")])
def test_a_wrong_bit_ends_the_run_and_names_its_rank(pool, tiny, tmp_path, kind, where):
    """Under "ddp" the save of the step before takes longer than a step may, and is waited for."""
    slow = {"SLOW_DISK_S": "1.5"} if kind == "ddp" else {}
    size = json.loads((tiny.model / "config.json").read_text())["vocab_size"]
    run = train_forked(pool, tiny, tmp_path / "out", *FLAGS, *KINDS[kind], "--replay_every", 2, "--save_steps", 1,
                       "--collective_timeout", 6 if slow else 600, ranks=2, ok=False, main=f"{__name__}.main_with_a_wrong_bit",
                       env={"TEXT_TOKENS": str(size)} | slow | ({"BACKWARD": "1"} if where == "backward" else {}))
    assert run.status == 3, run.output
    errors = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: step 2 computed twice is not the same on rank 1 ("), errors
    assert "rank 0" not in errors[0] and ("loss" in errors[0]) == (where == "forward"), errors
    assert [path.name for path in tmp_path.glob("out/checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_is_the_same_with_it(pool, tiny, tmp_path, kind):
    found = []
    for every in (0, 2):
        out = tmp_path / str(every)
        run = train_forked(pool, tiny, out, *FLAGS, *KINDS[kind], "--replay_every", every, ranks=2)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        logged = [{key: value for key, value in row.items() if not any(word in key for word in TIME)} for row in rows]
        weights = {path.name: load_file(path) for path in sorted((out / "checkpoint-4").glob("*.safetensors"))}
        found.append((logged, weights))
        assert run.status == 0 and len(rows) >= 4
    assert found[0][0] == found[1][0]
    for name, tensors in found[0][1].items():
        assert all(torch.equal(tensor, found[1][1][name][key]) for key, tensor in tensors.items()), name
