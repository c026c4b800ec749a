"""The block-diffusion launchers without Slurm: what they would run, what they refuse, signals, requeueing, the demo."""
import json
import re
import shlex
from pathlib import Path

import pytest

from core import cli
from diffusion import evaluate, sample_bd3lm
from tests.helpers.block_runs import train_bd3lm
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import launch

GSM8K, HDP = "train_gsm8k_bd3lm_h200.sh", "train_hdp_diffusion_h200.sh"
ODD = ["--output_dir", "a folder", "--wandb_project", "it's \"here\" $HOME *", "--resume", ""]

@pytest.fixture(autouse=True)
def many_cpus(monkeypatch):
    """The trainer gives loaders no more CPUs than there are."""
    monkeypatch.setattr(cli, "usable_cpus", lambda: 64)


def printed(done):
    """What DRY_RUN=1 printed: (words of the training command, the trainer's flags parsed, the sampler's or None)."""
    assert done.returncode == 0, done.stderr
    train, *sample = map(shlex.split, done.stdout.splitlines())
    flags = train[next(i for i, word in enumerate(train) if word.endswith("train_bd3lm.py")) + 1:]
    args = train_bd3lm.build_parser().parse_args(flags)
    if sample:                  # a demo's loss is looked at first
        script = sample_bd3lm if f"{ROOT}/diffusion/sample_bd3lm.py" in sample[-1] else evaluate
        assert sample[-1][:2] == ["python", script.__file__]
        check = ["python", f"{ROOT}/core/report.py", str(args.output_dir), "--check_fell"]
        assert sample[:-1] == [check] * (args.demo is not None)
        sample = script.build_parser().parse_args(sample[-1][2:])
        script.check_flags(sample, 1)
    return train, args, sample or None


# -- what would run ---------------------------------------------------------------------------------------------------


def test_settings_and_arguments_reach_the_trainer_and_the_last_word_is_the_users(tmp_path):
    data = tmp_path / "my data.json"
    data.touch()
    done = launch(HDP, "--block_size", "8", "--max_steps", "7", *ODD, DRY_RUN="1", MIN_GPUS="0",
                  SIZE="tiny", TRAIN_DATA=str(data), TOKENIZER="tok", BLOCK_SIZE="32", WORKERS="3", SWITCHES="",
                  GPUS="2", TEST_DATA="e.json", SAMPLE_FLAGS="--limit 5")
    words, args, sample = printed(done)
    train_bd3lm.check_flags(args, 1)
    layout = train_bd3lm.layout_of(args)
    assert words[-len(ODD):] == ODD and "--nproc-per-node=2" in words
    assert (args.train_data_file, args.tokenizer, args.model_size, args.num_workers) == (str(data), "tok", "tiny", 3)
    assert (layout.block_size, args.max_steps, args.bf16) == (8, 7, False)
    assert (sample.checkpoint, sample.limit, sample.bf16) == ("a folder", 5, False)


def test_chats_take_the_same_launcher(tmp_path):
    """No data of the hub; the test chats' likelihood is bounded; the demo answers its problems."""
    there = {"DRY_RUN": "1", "MIN_GPUS": "0", "SYSTEM": "chat"}
    data = tmp_path / "a.jsonl"
    data.touch()
    _, args, sample = printed(launch(GSM8K, TRAIN_DATA=str(data), TEST_DATA="b.jsonl", **there))
    train_bd3lm.check_flags(args, 1)
    assert args.system == "chat" and (sample.bound, sample.tasks) == ("b.jsonl", None)
    assert "TRAIN_DATA is not set" in launch(GSM8K, **there).stderr
    _, args, sample = printed(launch(GSM8K, "--demo", **there))
    train_bd3lm.check_flags(args, 1)
    assert sample.test_file == "outputs/chat_demo/demo/test.jsonl" and not args.strip_calculator


# -- the whole thing --------------------------------------------------------------------------------------------------


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
