"""--best_by and --early_stop_patience: the checkpoint that a recogniser understands best is kept, and named with why."""
import json
import subprocess
import sys

import pytest

from common.run import TrainState
from speech.voice import best
from tests.helpers.progress import wait_until
from tests.helpers.trainer import trainer_command

# what is heard of "one two three four": of the base, and behind each step
HEARD = ["one two x x", "x x x x", "one two three x", "one x three four", "x x x x", "x x x x", "one two three four"]
TRIED = ""      # the silence that each start lets it hear first


class State:
    """Where a run stands, with TrainState's own comparison."""
    best_loss, best_step, best_tie, step = None, None, 0.0, 0
    better = TrainState.better


def judged(by, rows, **first):
    """(best step, validations since) of [(step, values)]."""
    state, stale, betters = State(), 0, []
    for state.step, values in rows:
        better, stale = best.judge(state, values, by, stale)
        betters.append(better)
    return state.best_step, stale, betters


def test_word_errors_decide_and_of_equal_ones_the_lower_loss():
    rows = [(step, {"eval/wer": wer, "eval/loss": loss}) for step, wer, loss in (
        (1, 0.5, 1.0), (2, 0.25, 9.0), (3, 0.25, 8.0), (4, 0.25, 8.5), (5, 0.5, 0.1))]
    assert judged("wer", rows) == (3, 2, [True, True, True, False, False])
    assert judged("loss", rows)[0] == 5


def test_more_likeness_is_better():
    rows = [(step, {"eval/speaker_similarity": like, "eval/loss": 1.0}) for step, like in ((1, 0.5), (2, 0.75), (3, 0.6))]
    assert judged("sim", rows) == (2, 1, [True, True, False])


def test_word_errors_of_some_prompts_alone_count_neither_way():
    rows = [(1, {"eval/wer": 0.5}), (2, {"eval/wer": 0.0, "eval/spoken": 0.5}), (3, {"eval/wer": 0.4})]
    assert judged("wer", rows) == (3, 0, [True, False, True])


def test_what_was_not_measured_and_the_base_count_neither_way():
    rows = [(0, {"eval/wer": 0.0}), (1, {"eval/wer": 0.5}), (2, {"eval/loss": 0.1}), (3, {"eval/wer": float("nan")}),
            (4, {"eval/wer": 0.5})]
    assert judged("wer", rows) == (1, 2, [False, True, False, False, False])


@pytest.mark.parametrize("wers, said", [
    ({0: 0.3, 1: 0.2, 2: 0.25}, "checkpoint-1 is the best by word errors: 20.0%; the base 30.0%, at the end 25.0%"),
    ({0: 0.2, 1: 0.2, 2: 0.25}, "NO CHECKPOINT IS BETTER THAN THE BASE by word errors: 20.0% at best, at step 1; the base 20.0%"),
    ({}, "no checkpoint is the best by word errors: none was measured")])
def test_the_verdict_names_the_checkpoint_and_the_base(wers, said):
    rows = [{"step": step, "eval/wer": wer} for step, wer in wers.items()]
    assert best.clause(rows, "wer", 1 if wers else None) == said


@pytest.mark.slow
def test_a_run_keeps_the_best_understood_checkpoint_and_stops(forked, tiny, tmp_path):
    """Resumed once: patience goes on where it was."""
    (tmp_path / "prompts.txt").write_text("one two three four\n")
    (tmp_path / "hear.py").write_text(f"""import pathlib
count = pathlib.Path({str(tmp_path / 'count')!r})
number = len(count.read_text()) if count.exists() else 0
count.write_text("." * (number + 1))
print({[TRIED, *HEARD[:5], TRIED, *HEARD[5:]]!r}[number])
""")
    flags = ("--use_lora", "--validation_split", 0.2, "--eval_steps", 1, "--sample_prompts", tmp_path / "prompts.txt",
             "--sample_seconds", 0.2, "--asr_command", f"{sys.executable} {tmp_path / 'hear.py'}", "--best_by", "wer",
             "--early_stop_patience", 2, "--save_total_limit", 1, "--num_workers", 0, "--normalize_text", "off")
    first = forked(*flags, "--max_steps", 4)
    losses = first.metrics("eval/loss")
    assert losses[3] < losses[2]        # of 25 % twice the second is the better one
    assert "checkpoint-3 is the best by word errors: 25.0%; the base 50.0%, at the end 100.0%" in first.output
    assert first.metrics("eval/wer") == {0: 0.5, 1: 1.0, 2: 0.25, 3: 0.25, 4: 1.0}
    run = forked(*flags, "--max_steps", 6)      # one more without a better one is enough
    assert "done       step 5 (nothing better in 2 validations)" in run.output
    assert "; best word errors 25.0% at step 3" in run.output
    assert (run.output_dir / "checkpoint-3").is_dir() and (run.output_dir / "checkpoint-5").is_dir()


@pytest.mark.slow
def test_an_odd_recogniser_is_tried_before_the_first_step(forked, tmp_path):
    """One that is not there ends the run at once; one that prints a byte that is not UTF-8 does not."""
    (tmp_path / "prompts.txt").write_text("one two\n")
    flags = ("--use_lora", "--max_steps", 1, "--sample_prompts", tmp_path / "prompts.txt", "--sample_seconds", 0.2)
    run = forked(*flags, "--asr_command", "no-such-program", ok=False)
    assert run.status == 1 and not (run.output_dir / "metrics.jsonl").exists()
    assert "error: --asr_command no-such-program: cannot be started" in run.output and "Traceback" not in run.output
    (tmp_path / "hear.sh").write_text("printf 'one \\377\\n'\n")
    run = forked(*flags, "--asr_command", f"sh {tmp_path / 'hear.sh'}")
    assert run.metrics("eval/wer") == {1: 0.5}


@pytest.mark.slow
def test_a_kill_before_the_first_checkpoint_leaves_one_validation_of_the_base(train, tiny, tmp_path):
    out = tmp_path / "out"
    flags = ("--use_lora", "--validation_split", 0.2, "--early_stop_patience", 3)
    log = open(tmp_path / "log.txt", "w")
    job = subprocess.Popen(trainer_command(tiny, out, *flags, "--num_train_epochs", 1000, "--eval_steps", 1000), stdout=log,
                           stderr=log, cwd=tmp_path)
    rows = out / "metrics.jsonl"
    wait_until(lambda: rows.exists() and rows.read_text().count("\n") > 2, "steps", lambda: job.poll() is None)
    job.kill()
    job.wait()
    run = train(*flags, "--max_steps", 2)
    losses = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["step"] for row in losses if "eval/loss" in row] == [0, 2] and "done       step 2" in run.output
