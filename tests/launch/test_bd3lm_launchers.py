"""The block-diffusion launchers without Slurm: what they would run, what they refuse, signals, requeueing, the demo."""
import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from core import cli
from diffusion import evaluate, sample_bd3lm
from tests.helpers.block_runs import train_bd3lm
from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import alive, environment

LAUNCHERS = {"gsm8k": "train_gsm8k_bd3lm_h200.sh", "hdp": "train_hdp_diffusion_h200.sh"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
ODD = ["--output_dir", "a folder", "--wandb_project", "it's \"here\" $HOME *", "--resume", ""]



@pytest.fixture(autouse=True)
def many_cpus(monkeypatch):
    """The trainer gives loaders no more CPUs than there are."""
    monkeypatch.setattr(cli, "usable_cpus", lambda: 64)


def launch(launcher, *args, cwd=None, **settings):
    """Run a launcher to its end; returns the finished process with stdout and stderr."""
    return subprocess.run(["bash", str(ROOT / "launch" / launcher), *map(str, args)], text=True, capture_output=True,
                          cwd=cwd, timeout=PATIENCE_S, env=environment(**settings))


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
    done = launch(LAUNCHERS["hdp"], "--block_size", "8", "--max_steps", "7", *ODD, DRY_RUN="1", MIN_GPUS="0",
                  SIZE="tiny", TRAIN_DATA=str(data), TOKENIZER="tok", BLOCK_SIZE="32", WORKERS="3", SWITCHES="",
                  GPUS="2", HDP_LAYOUT="hierarchical", TEST_DATA="e.json", SAMPLE_FLAGS="--limit 5")
    words, args, sample = printed(done)
    train_bd3lm.check_flags(args, 1)
    layout = train_bd3lm.layout_of(args)
    assert words[-len(ODD):] == ODD and "--nproc-per-node=2" in words
    assert (args.train_data_file, args.tokenizer, args.model_size, args.num_workers) == (str(data), "tok", "tiny", 3)
    assert (layout.block_size, args.max_steps, args.bf16) == (8, 7, False)
    gone = launch(LAUNCHERS["hdp"], DRY_RUN="1", MIN_GPUS="0", HDP_LAYOUT="flat")
    assert gone.returncode and "HDP_LAYOUT=flat is gone" in gone.stderr
    assert (sample.checkpoint, sample.limit, sample.bf16) == ("a folder", 5, False)


def test_chats_take_the_same_launcher(tmp_path):
    """No data of the hub; the test chats' likelihood is bounded; the demo answers its problems."""
    there = {"DRY_RUN": "1", "MIN_GPUS": "0", "SYSTEM": "chat"}
    data = tmp_path / "a.jsonl"
    data.touch()
    _, args, sample = printed(launch(LAUNCHERS["gsm8k"], TRAIN_DATA=str(data), TEST_DATA="b.jsonl", **there))
    train_bd3lm.check_flags(args, 1)
    assert args.system == "chat" and (sample.bound, sample.tasks) == ("b.jsonl", None)
    assert "TRAIN_DATA is not set" in launch(LAUNCHERS["gsm8k"], **there).stderr
    _, args, sample = printed(launch(LAUNCHERS["gsm8k"], "--demo", **there))
    train_bd3lm.check_flags(args, 1)
    assert sample.test_file == "outputs/chat_demo/demo/test.jsonl" and not args.strip_calculator


@pytest.mark.parametrize("words, wanted", [
    (["--init_from", "JetLM/SDAR-1.7B-Chat"], ("sdar", 64, 4)),
    (["--init_from", "SDAR", "--batch_preset=source"], ("source", 256, 16))])
def test_arguments_choose_the_preset_as_settings_do(words, wanted):
    args = printed(launch(LAUNCHERS["gsm8k"], *words, DRY_RUN="1", MIN_GPUS="0"))[1]
    assert (args.batch_preset, args.global_batch_size, args.block_size) == wanted


# -- what is refused --------------------------------------------------------------------------------------------------


# -- signals, status, requeueing --------------------------------------------------------------------------------------

TRAINER = """
import os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
def save(*_):
    (out / "requeue").write_text("asked to stop by SIGUSR1 at step 3\\n")
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
print("trainer said", flush=True)
(out / "listens").touch()
time.sleep(1000)
"""


SRUN = f"""#!{sys.executable}
import signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    del words[0]
task = None
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: task and task.send_signal(number))
task = subprocess.Popen(words)
sys.exit(task.wait() % 256)
"""


@pytest.fixture
def stand_ins(tmp_path, light):
    """A PATH whose torchrun is light, and which has Slurm's commands, of which scontrol says RUNNING and leaves the
    file queued-JOB; real ones are in test_slurm.py."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {
            "scontrol": f'#!/bin/bash\n[ "$1" != requeue ] || touch "{tmp_path}/queued-$2"\n'
                        'echo "   JobState=${STATE:-RUNNING} Reason=None"\n',
            "squeue": "#!/bin/bash\n", "srun": SRUN}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}:{light}"


@pytest.fixture
def started(tmp_path, script, stand_ins):
    """started(**settings): the gsm8k launcher, when its trainer, which waits for SIGUSR1, listens."""
    running, numbers = [], itertools.count()

    def run(**settings):
        log, mark = tmp_path / f"log-{next(numbers)}", uuid.uuid4().hex
        process = subprocess.Popen(["bash", str(ROOT / "launch" / LAUNCHERS["gsm8k"])], cwd=tmp_path, process_group=0,
                                   stdout=log.open("w"), stderr=subprocess.STDOUT,
                                   env=environment(TRAINER=script(TRAINER), MIN_GPUS="0", OUTPUT_DIR="out",
                                                   MARK=mark, PATH=stand_ins,
                                                   TEST_DATA="none.jsonl", **settings))
        process.log, process.mark = log, mark
        running.append(process)
        listens = tmp_path / "out" / "listens"
        wait_until(lambda: listens.exists() or process.poll() is not None, "trainer")
        assert process.poll() is None, log.read_text()
        listens.unlink()
        return process
    yield run
    for process in running:
        for pid in {*alive(process.mark), process.pid} if process.poll() is None else alive(process.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.race
@pytest.mark.parametrize("state, restarts, queued, said", [
    ("RUNNING", 0, True, "at step 3; requeueing the job"),
    ("RUNNING", 2, False, r"at step 3; not requeued, this was start 3 (MAX_REQUEUES)"),
])
def test_a_job_asked_to_stop_is_queued_again(started, tmp_path, state, restarts, queued, said):
    process = started(**JOB, STATE=state, SLURM_RESTART_COUNT=str(restarts), MAX_REQUEUES="2")
    process.send_signal(signal.SIGUSR1)     # as Slurm does before the time limit: to the batch shell alone
    assert process.wait(timeout=PATIENCE_S) == (1 if restarts else 0), process.log.read_text()
    assert (tmp_path / "queued-7").exists() == queued
    assert said in process.log.read_text()
    assert list((tmp_path / "out" / "node_logs").glob("7-*.log"))


# -- the whole thing --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demo_trains_and_answers(tmp_path, quick):
    done = launch(LAUNCHERS["hdp"], "--demo", 60, "--max_steps", 12, "--eval_steps", 6, "--warmup_steps", 2,
                  "--logging_steps", 2, "--output_dir", "out", cwd=tmp_path, **quick)
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
