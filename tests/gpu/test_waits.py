"""No step reads a number from the device: on a GPU the host would wait for all queued work.

A profiler on a CPU counts the operators of three steps between log lines; there AdamW reads the step of each parameter.
"""
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.helpers.trainer import ROOT

WAITS = {"aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::masked_select"}
FIRST, LAST = 2, 5          # steps


def count_waits(script, argv, path):
    """In a rank: run a trainer's script, count operators from step FIRST to step LAST, exit."""
    steps, profiler = 0, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def step_done(optimizer, *_):
        nonlocal steps
        steps += 1
        if steps == FIRST:
            profiler.start()
        elif steps == LAST:
            profiler.stop()
            counts = {event.key: event.count for event in profiler.key_averages()}
            counts["parameters"] = sum(len(group["params"]) for group in optimizer.param_groups)
            Path(path).write_text(json.dumps(counts))
            sys.stdout.flush()
            os._exit(0)
    register_optimizer_step_post_hook(step_done)
    sys.argv = [script, *argv]
    runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.slow
def test_steps_do_not_wait_for_the_device(pool, tiny, tmp_path):
    flags = ["--model_path", tiny.model, "--audio_tokenizer_path", tiny.codec, "--train_data_file", tiny.train_json,
             "--code_cache", tiny.codes, "--use_lora", "--disable_eval", "--max_tokens_per_batch", "700",
             "--output_dir", tmp_path / "out", "--report_to", "none", "--max_steps", "9", "--logging_steps", "99",
             "--num_workers", "0", "--save_steps", "0", "--gradient_accumulation_steps", "1", "--learning_rate", "1e-4"]
    statuses, output = pool.run(1, f"{__name__}.count_waits", "train_v2_ddp.py", list(map(str, flags)),
                                str(tmp_path / "counts.json"))
    assert not any(statuses), output[-3000:]
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["aten::mm"] >= 3
    assert {name: counts[name] for name in WAITS & counts.keys()} == {
        "aten::item": (LAST - FIRST) * counts["parameters"]}
