"""The block-diffusion launchers without Slurm: what they would run, and the demo."""
import json
import re
import shlex
from pathlib import Path

import pytest

from core import cli
from diffusion import sample_bd3lm
from tests.helpers.block_runs import train_bd3lm
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import launch

HDP = "train_hdp_diffusion_h200.sh"
ODD = ["--output_dir", "a folder", "--wandb_project", "it's \"here\" $HOME *", "--resume", ""]


def test_settings_and_arguments_reach_the_trainer_and_the_last_word_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "usable_cpus", lambda: 64)     # loaders get no more
    data = tmp_path / "my data.json"
    data.touch()
    done = launch(HDP, "--block_size", "8", "--max_steps", "7", *ODD, DRY_RUN="1", MIN_GPUS="0",
                  SIZE="tiny", TRAIN_DATA=str(data), TOKENIZER="tok", BLOCK_SIZE="32", WORKERS="3", SWITCHES="",
                  GPUS="2", TEST_DATA="e.json", SAMPLE_FLAGS="--limit 5 --output $HOME")
    assert done.returncode == 0, done.stderr
    words, sampler = map(shlex.split, done.stdout.splitlines())
    args = train_bd3lm.build_parser().parse_args(words[words.index(f"{ROOT}/diffusion/train_bd3lm.py") + 1:])
    train_bd3lm.check_flags(args, 1)
    layout = train_bd3lm.layout_of(args)
    assert words[-len(ODD):] == ODD and "--nproc-per-node=2" in words
    assert (args.train_data_file, args.tokenizer, args.model_size, args.num_workers) == (str(data), "tok", "tiny", 3)
    assert (layout.block_size, args.max_steps, args.bf16) == (8, 7, False)
    assert sampler[:2] == ["python", sample_bd3lm.__file__]
    sample = sample_bd3lm.build_parser().parse_args(sampler[2:])
    assert (sample.checkpoint, sample.limit, sample.bf16) == ("a folder", 5, False)


@pytest.mark.slow
def test_the_demo_trains_and_answers(tmp_path, quick):
    done = launch(HDP, "--demo", "60", "--max_steps", "12", "--eval_steps", "6", "--warmup_steps", "2",
                  "--logging_steps", "2", "--output_dir", "out", cwd=tmp_path, **quick)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]      # too short to learn it, and it says so
    assert re.search(r"^verdict    FAILED: not 80 % of the answers are right; .* of 8 problems were answered right; ",
                     done.stdout, re.M)
    bounds = [float(b) for b in re.findall(r"^eval .*? nll <= ([\d.]+)", done.stdout, re.M)]
    assert len(bounds) == 2 and bounds[1] < bounds[0]
    assert re.search(r"^train/loss .* fell$", done.stdout, re.M)
    assert re.search(r"^accuracy   strict \d+\.\d+% .* of 8 problems", done.stdout, re.M)
    answers = json.loads((tmp_path / "out" / "answers-checkpoint-12.json").read_text())
    assert len(answers["answers"]) == 8 and all("plan" in a for a in answers["answers"])
    assert Path(tmp_path / "out" / "node_logs" / "local-after.log").read_text().count("accuracy ") == 1
