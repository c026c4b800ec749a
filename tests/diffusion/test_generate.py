"""generate.py of an exported folder: without this repository, the tokens of our sample_bd3lm."""
import json
import shutil
import subprocess
import sys
import types

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Qwen3Config

from diffusion import published, sample_bd3lm
from diffusion.choices import Layout
from diffusion.problems import Problem
from diffusion.sample_bd3lm import load_solver, question_state, room
from tests.diffusion.test_decoder import ROWS, SHAPE
from tests.helpers.block_runs import train_bd3lm
from tests.helpers.progress import PATIENCE_S

ASK = ["Ben has 3 pens.", "How many apples has Anna, who had 5 and got 2 more?", "1", "Two shells and 12 stamps?"]
THEIRS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import generate
model, tokenizer, form = generate.load(sys.argv[1])
asked = json.loads(sys.argv[2])
print(json.dumps([generate.generate(model, generate.prompt(tokenizer, form, question), form, threshold)
                  for threshold in (0.9, 0.02) for question in asked]))
model, tokenizer, form = generate.load(sys.argv[3])
print(json.dumps(generate.generate(model, generate.prompt(tokenizer, form, asked[1]), form)))
assert not any(name.partition(".")[0] in ("diffusion", "common", "core") for name in sys.modules)
"""


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


def our_answers(run, asked, threshold):
    """Ids up to the end token that sample_bd3lm.py's functions write, one question at a time."""
    args = types.SimpleNamespace(checkpoint=run, device="cpu", bf16=False)
    _, solver = load_solver(args, sample_bd3lm.Sampling("confidence", threshold, 0.0))
    tokens, layout, found = solver.tokens, solver.layout, []
    for question in asked:
        state = question_state(Problem("", question, "", ""), tokens, layout)
        pinned, first = state[1]
        made, = sample_bd3lm.generate(solver.model, [state], [room(first, 1, layout)], layout.block_size, tokens.end,
                                      solver.how)
        ids = made.ids[len(pinned):]
        found.append(ids[:ids.index(tokens.end)] if tokens.end in ids else ids)
    return found


@pytest.mark.slow
def test_the_file_beside_an_export_writes_our_tokens(exported, tmp_path, monkeypatch):
    """Also where config.json is SDAR's."""
    run, folder = exported
    sdar = shutil.copytree(folder, tmp_path / "sdar")
    model, about = published.load_checkpoint(published.find_checkpoint(run))
    config = json.loads((folder / "config.json").read_text())
    monkeypatch.setattr(published, "SDAR_MASK_ID", model.config.mask_id)
    (sdar / "config.json").write_text(json.dumps(published.sdar_config(
        config, model.config, Layout(**about["layout"]))))
    theirs, of_sdar = map(json.loads, python("-c", THEIRS, folder, json.dumps(ASK), sdar).splitlines())
    ours = [ids for threshold in (0.9, 0.02) for ids in our_answers(run, ASK, threshold)]
    assert theirs == ours and of_sdar == ours[1] and len({str(ids) for ids in ours}) >= 5
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert python(folder / "generate.py", ASK[0], ASK[0]) == (
        f"{tokens.decode(ours[0], skip_special_tokens=False).strip()}\n" * 2)
