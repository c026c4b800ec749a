"""pick_checkpoint.py: checkpoints speak and are judged, OUT/best leads to the best, a run without a better one is ended."""
import json
import os
import subprocess
import sys

import pytest

from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT, trainer_command

# what is heard of "one two three four": of the base, and of each checkpoint; a silent clip is tried before each
HEARD = ["one two x x", "x x x x", "one two three x", "one two three x", "one x x x"]


def hear(folder):
    """A command that hears HEARD one after another."""
    (folder / "hear.py").write_text(f"""import pathlib, sys
count = pathlib.Path({str(folder / 'count')!r})
number = len(count.read_text()) if count.exists() else 0
count.write_text("." * (number + 1))
print({HEARD!r}[number // 2 - 1] if number and number % 2 == 0 else "")
""")
    return f"{sys.executable} {folder / 'hear.py'}"


@pytest.fixture
def pick(tmp_path):
    def run(out, *flags):
        words = [sys.executable, ROOT / "speech" / "pick_checkpoint.py", out, *flags]
        return subprocess.run(list(map(str, words)), capture_output=True, text=True)
    return run


@pytest.mark.slow
def test_the_best_understood_checkpoint_is_linked(forked, pick, tmp_path):
    """Of equal ones the earlier; what was judged is not spoken again; one by loss needs no prompts."""
    (tmp_path / "prompts.txt").write_text("one two three four\n")
    run = forked("--use_lora", "--max_steps", 3, "--save_steps", 1, "--eval_steps", 1, "--validation_split", 0.2,
                 "--save_total_limit", 0, "--num_workers", 0)
    out, flags = run.output_dir, ("--prompts", tmp_path / "prompts.txt", "--max_seconds", 0.2, "--asr_command", hear(tmp_path))
    done = pick(out, *flags)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()[:4]] == ["50.0%", "100.0%", "25.0%", "25.0%"]
    assert f"best       checkpoint-2 by word errors: 25.0%; the base 50.0%; {out / 'best'}\n" in done.stdout
    assert os.readlink(out / "best") == "checkpoint-2" and (out / "best" / "adapter_model.safetensors").exists()
    again = pick(out, *flags)
    assert again.stdout == done.stdout and len((tmp_path / "count").read_text()) == 10     # silence first, twice by us and once an evaluation
    losses = {row["step"]: row["eval/loss"] for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
              if "eval/loss" in row}
    lowest = min((loss, step) for step, loss in losses.items() if step)[1]
    assert f"checkpoint-{lowest}" in pick(out, "--by", "loss").stdout and os.readlink(out / "best") == f"checkpoint-{lowest}"


@pytest.mark.parametrize("flags, said", [
    (("--prompts", "x", "--asr_command", "/nowhere/hear"), "--asr_command /nowhere/hear: cannot be started"),
    (("--by", "loss"), "holds no checkpoint")])
def test_mistakes_are_one_line(pick, tmp_path, flags, said):
    done = pick(tmp_path, *flags)
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.race
def test_a_run_that_gets_no_better_is_ended(tiny, pick, tmp_path):
    """--follow beside a run of far too many steps: its checkpoints are judged as they come, and OUT/stop ends it."""
    (tmp_path / "prompts.txt").write_text("one two three four\n")
    command = trainer_command(tiny, tmp_path / "out", "--use_lora", "--max_steps", 5000, "--save_steps", 40,
                              "--save_total_limit", 0, "--num_workers", 0, "--disable_eval")
    with open(tmp_path / "run.txt", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as run:
        wait_until(lambda: (tmp_path / "out" / "checkpoint-40" / "manifest.json").exists() or run.poll() is not None,
                   "first checkpoint")
        done = pick(tmp_path / "out", "--prompts", tmp_path / "prompts.txt", "--max_seconds", 0.2, "--follow",
                    "--patience", 1, "--asr_command", f"{sys.executable} -c \"print('one two three four')\"")
        assert done.returncode == 0 and "stop       nothing better in 1 checkpoints" in done.stdout, done.stderr
        assert run.wait(timeout=PATIENCE_S) == 0
    assert "stopped    " in (tmp_path / "run.txt").read_text() and os.readlink(tmp_path / "out" / "best") == "checkpoint-40"
