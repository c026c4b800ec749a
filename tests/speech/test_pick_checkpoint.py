"""pick_checkpoint.py judges the speech of checkpoints, links OUT/best and stops a run that gets no better."""
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers.progress import wait_until
from tests.helpers.runs import rows
from tests.helpers.trainer import Run, run_script, speech_main, trainer_arguments

# transcripts of "one two three four" by the base and by each checkpoint; each judgement first tries a silent clip
HEARD = ["one two x x", "x x x x", "one two three x", "one two three x"]
LONG_S = 1500       # for the whole test


def hear(folder):
    """A command whose answers are those of HEARD in turn."""
    (folder / "hear.py").write_text(f"""import pathlib, sys
count = pathlib.Path({str(folder / 'count')!r})
number = len(count.read_text()) if count.exists() else 0
count.write_text("." * (number + 1))
print({HEARD!r}[number // 2 - 1] if number and number % 2 == 0 else "")
""")
    return f"{sys.executable} {folder / 'hear.py'}"


def pick_with(python, *argv):
    """Run the script with this interpreter for its child processes and short waits."""
    sleep, sys.executable = time.sleep, python
    time.sleep = lambda seconds: sleep(min(seconds, 0.2))
    run_script("speech/pick_checkpoint.py", argv)


def train_slowly(argv):
    """Run the trainer slowly, so that the judge gets CPU time."""
    backward = torch.Tensor.backward
    torch.Tensor.backward = lambda *args, **options: (time.sleep(0.1), backward(*args, **options))[1]
    speech_main(argv)


@pytest.mark.slow
@pytest.mark.race
def test_the_best_understood_is_linked_and_a_run_that_gets_no_better_is_stopped(tiny, pool, quick_python, tmp_path):
    """--follow during a long run. The earlier of two equal checkpoints wins; no checkpoint speaks twice."""
    (tmp_path / "prompts.txt").write_text("one two three four\n")
    out = tmp_path / "out"
    words = [out, "--prompts", tmp_path / "prompts.txt", "--max_seconds", 0.2, "--asr_command", hear(tmp_path)]

    def pick(*words):
        statuses, output = pool.run(1, f"{__name__}.pick_with", quick_python, *map(str, words), timeout=LONG_S)
        assert statuses == [0], output
        return output
    flags = trainer_arguments(tiny, out, "--use_lora", "--max_steps", 50_000, "--save_steps", 5, "--eval_steps", 5,
                              "--save_total_limit", 0, "--validation_split", 0.05, "--num_workers", 0)
    with ThreadPoolExecutor(1) as during:
        run = during.submit(pool.run, 1, f"{__name__}.train_slowly", flags, timeout=LONG_S)
        try:
            wait_until((out / "checkpoint-5" / "manifest.json").exists, "first checkpoint", lambda: not run.done())
            done = pick(*words, "--follow", "--patience", 1)
        except BaseException:
            (out / "stop").touch()
            raise
    (status,), output = run.result()
    assert status == 0 and "stopped    " in output and "stop       nothing better in 1 checkpoint:" in done, output
    assert [line.split()[-1] for line in done.splitlines()[:4]] == ["50.0%", "100.0%", "25.0%", "25.0%"]
    assert f"best       checkpoint-10 by word errors: 25.0%; the base 50.0%; {out / 'best'}\n" in done
    assert os.readlink(out / "best") == "checkpoint-10" and (out / "best" / "adapter_model.safetensors").exists()
    for folder in out.glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > 15:
            shutil.rmtree(folder)
    again = pick(*words)
    assert again.splitlines() == [line for line in done.splitlines() if not line.startswith("stop ")]
    assert len((tmp_path / "count").read_text()) == 10      # silent clips and evaluations
    losses = {row["step"]: row["eval/loss"] for row in rows(Run(0, "", out)) if "eval/loss" in row}
    lowest = min((losses[step], step) for step in (5, 10, 15))[1]
    assert f"checkpoint-{lowest}" in pick(out, "--by", "loss") and os.readlink(out / "best") == f"checkpoint-{lowest}"
