"""generate.py of an exported folder: without this repository, the tokens of our sample_bd3lm."""
import json
import shutil
import subprocess
import sys
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from diffusion import published, sample_bd3lm
from diffusion.problems import Problem
from diffusion.sample_bd3lm import load_solver, question_state
from tests.diffusion.test_decoder import ROWS, SHAPE
from tests.helpers.block_runs import train_bd3lm
from tests.helpers.progress import PATIENCE_S

ASK = ["Ben has 3 pens.", "How many apples has Anna, who had 5 and got 2 more?", "1", "Two shells and 12 stamps?"]


@pytest.fixture(scope="module")
def exported(demo, tmp_path_factory):
    """(OUTPUT_DIR of a run from a tiny Qwen3, its export)."""
    out = tmp_path_factory.mktemp("run")
    base = shutil.copytree(demo / "chat", out / "base")
    torch.manual_seed(0)
    shape = SHAPE | {"initializer_range": 0.4}
    AutoModelForCausalLM.from_config(Qwen3Config(head_dim=16, vocab_size=ROWS + 3, rope_theta=300.0,
                                                 **shape)).save_pretrained(base)
    train_bd3lm.main(["--init_from", str(base), "--chat", "--train_data_file", str(demo / "train.jsonl"),
                      "--block_size", "4", "--max_length", "96", "--max_steps", "1", "--num_workers", "0",
                      "--problems_per_batch", "4", "--output_dir", str(out / "run"), "--report_to", "none",
                      "--eval_steps", "0", "--logging_dir", str(out / "logs"), "--validation_split", "0"])
    published.main(["--checkpoint", str(out / "run"), "--output_dir", str(out / "exported")])
    return out / "run", out / "exported"


def python(*words):
    """Output of an interpreter that knows nothing of this repository."""
    done = subprocess.run([sys.executable, "-I", *map(str, words)], cwd="/", text=True, capture_output=True,
                          timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_file_beside_an_export_writes_our_texts(exported, tmp_path, monkeypatch):
    """Also where config.json is SDAR's."""
    run, folder = exported
    form, sdar, written = json.loads((folder / "config.json").read_text())["block_diffusion"], tmp_path / "sdar", set()
    monkeypatch.setattr(published, "SDAR_MASK_ID", form["mask_token_id"])
    published.export(published.find_checkpoint(run), sdar, "sdar")
    for threshold in (0.9, 0.02):
        args = types.SimpleNamespace(checkpoint=run, device="cpu", bf16=False)
        _, solver = load_solver(args, sample_bd3lm.Sampling("confidence", threshold, 0.0))
        states = [question_state(Problem("", question, "", ""), solver.tokens, solver.layout) for question in ASK]
        ours = "".join(f"{found['text']}\n" for found in sample_bd3lm.answer(solver, states, 1))
        for place in (folder, sdar):
            assert python(place / "generate.py", *ASK, "--threshold", threshold) == ours
        written.add(ours)
    assert len(written) == 2
