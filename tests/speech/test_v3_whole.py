"""Higgs TTS 3 by the scripts alone, on two clips: the loss falls, the run resumes, and each training text ends by itself."""
import json
import subprocess

import pytest

from tests.helpers.trainer import ROOT


@pytest.fixture
def run(quick_python):
    """run(script, *flags) -> what it prints, as a process of its own."""
    def start(*words):
        done = subprocess.run([quick_python, *map(str, words)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout
    return start


@pytest.mark.slow
def test_it_learns_its_clips_and_stops_by_itself(run, tmp_path):
    tiny, out = tmp_path / "tiny", tmp_path / "out"
    run("speech/make_tiny.py", tiny, "--clips", 2, "--speakers", 1, "--higgs3")
    model = ["--audio_tokenizer_path", tiny / "codec", "--model_path"]
    for steps in (16, 32):
        said = run("train_v2_ddp.py", *model, tiny / "model", "--train_data_file", tiny / "train.json", "--output_dir",
                   out, "--code_cache", tmp_path / "codes", "--disable_eval", "--max_steps", steps, "--learning_rate",
                   3e-3, "--lr_scheduler", "constant", "--warmup_steps", 10, "--per_device_train_batch_size", 4,
                   "--save_steps", 8, "--logging_steps", 8, "--num_workers", 0, "--report_to", "none")
    assert "start      step 16, resumed from" in said
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < 0.5 * losses[0]
    run("speech/generate_tts.py", *model, out / "checkpoint-32", "--prompts", tiny / "train.json", "--max_seconds", 15,
        "--batch_size", 2, "--output_dir", out / "spoken")
    about = [json.loads(path.read_text()) for path in (out / "spoken").glob("*.json")]
    assert [sample.get("ended_by") for sample in about if "ended_by" in sample] == ["eos", "eos"]
