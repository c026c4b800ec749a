"""The launchers on a real Slurm cluster of two nodes on this machine (tests/helpers/slurm/cluster.sh): a lost node, the
time limit, an error and scancel. A requeued run ends with the bits of an undisturbed one.
"""
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.progress import wait_until
from tests.helpers.trainer import ROOT, train_forked, trainer_command
from tests.launch import test_launchers

pytestmark = [pytest.mark.slow, pytest.mark.race]

CLUSTER = str(ROOT / "tests" / "helpers" / "slurm" / "cluster.sh")
LAUNCHER = str(ROOT / "launch" / "train_tts.sh")
STEPS = 50
FLAGS = ("--use_lora", "--lora_dropout", 0.1, "--learning_rate", 2e-4, "--lr_scheduler", "constant", "--disable_eval",
         "--per_device_train_batch_size", 2, "--num_train_epochs", 1000, "--max_steps", STEPS, "--save_steps", 10,
         "--save_total_limit", 0)
light = test_launchers.light
MISSING = next((tool for tool in ("slurmctld", "slurmd", "munged", "ip") if not shutil.which(tool)), None)

if MISSING or os.geteuid() != 0:
    why = f"{MISSING} is not installed (apt-get install slurm-wlm munge iproute2)" if MISSING else "Slurm needs root"
    pytestmark.append(pytest.mark.skip(reason=why))


class Job:
    def __init__(self, folder, *args, launcher=LAUNCHER, sbatch=(), **settings):
        folder.mkdir()
        self.out, self.log_file = folder / "out", folder / "job.log"
        environment = {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", "VENV": "none", "MIN_GPUS": "0", **settings}
        if launcher == LAUNCHER:        # FLAGS choose adapters in fp32
            environment |= {"SWITCHES": "", "LORA": ""}
        environment.setdefault("PATH", f"{Path(shutil.which('python')).parent}:{os.environ['PATH']}")
        done = subprocess.run(["sbatch", "--parsable", f"--output={self.log_file}", *sbatch, launcher, *map(str, args)],
                              cwd=folder, text=True, capture_output=True, env={**os.environ, **environment})
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    @property
    def log(self):
        return self.log_file.read_text() if self.log_file.exists() else ""

    def show(self, name):
        text = subprocess.run(["scontrol", "show", "job", self.id], text=True, capture_output=True).stdout
        match = re.search(rf"\b{name}=(\S*)", text)
        return match[1] if match else ""

    def limit(self, minutes):
        subprocess.run(["scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}"], check=True)

    def processes(self):
        environments = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                values = (folder / "environ").read_bytes().split(b"\0")
                if f"SLURM_JOB_ID={self.id}".encode() in values:
                    environments[int(folder.name)] = dict(v.decode().split("=", 1) for v in values if b"=" in v)
        return environments

    def trainers(self):
        return {pid: environment for pid, environment in self.processes().items() if "LOCAL_RANK" in environment}

    def signal_trainers(self, number):
        for pid in self.trainers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze_after(self, step):
        """Stop every trainer, so that the test does not depend on the speed of the machine."""
        wait_until(lambda: (self.out / f"checkpoint-{step}").exists() or "done  " in self.log, f"checkpoint {step}")
        self.signal_trainers(signal.SIGSTOP)
        assert "done  " not in self.log, "the run ended before the test disturbed it: raise STEPS"

    def end(self):
        """Wait through requeues for the end; returns (state, restarts)."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        state = wait_until(lambda: (now := self.show("JobState")) in ended and now, f"end of job {self.id}",
                           progress=lambda: self.log, every=0.5)
        return state, int(wait_until(lambda: self.show("Restarts"), "answer of scontrol", every=0.5))


@pytest.fixture(scope="module")
def cluster():
    """A running cluster; cluster("kill", "n2") and cluster("up", "n2") stop and restart a node."""
    folder = Path("/tmp/flat-slurm")         # short, for Unix sockets; names and ports are fixed, so one at a time
    monkeypatch = pytest.MonkeyPatch()

    def call(command, *node):
        subprocess.run(["bash", CLUSTER, command, str(folder), *node], check=True)
    with open("/tmp/flat-slurm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            call("stop")                    # a killed test run may have left one
            shutil.rmtree(folder)
            call("start")
            monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
            yield call
        finally:
            call("stop")
            shutil.rmtree(folder)
            monkeypatch.undo()


@pytest.fixture
def submit(cluster, tiny, tmp_path):
    """submit(*flags, sbatch=(), **settings) -> Job of a two-node training run; cancelled at the end of the test."""
    jobs = []

    def run(*flags, **options):
        folder = tmp_path / f"job-{len(jobs)}"
        args = trainer_command(tiny, folder / "out", *FLAGS, *flags)[2:]
        jobs.append(Job(folder, *args, **options))
        return jobs[-1]
    yield run
    for job in jobs:
        subprocess.run(["scancel", job.id], capture_output=True)
    wait_until(lambda: not any(job.processes() for job in jobs), "end of the jobs' processes", every=0.2)


def resumed_at(job):
    return [int(step) for step in re.findall(r"^start +step (\d+)", job.log, re.M)]


def test_time_limit_saves_and_requeues_and_then_a_node_is_lost(submit, cluster, pool, tiny, tmp_path):
    """The node is back before Slurm notices: srun gives up after --wait, and the launcher requeues the job."""
    # gloo may not end a stopped rank whose peer died (docs/dropped.md): then --collective_timeout ends it
    job = submit("--collective_timeout", 180, SRUN_WAIT="10", sbatch=["--time=60", "--signal=B:USR1@590"])  # min, s

    def ranks_seen():
        ranks = {(e["SLURMD_NODENAME"], e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"]) for e in job.trainers().values()}
        return len(ranks) >= 2 and ranks
    ranks = wait_until(ranks_seen, "two trainers", every=0.2)
    assert {rank[0] for rank in ranks} == {"n1", "n2"} and {rank[1] for rank in ranks} == {"0", "1"}
    assert {rank[2:] for rank in ranks} == {("0", "2")} and len(ranks) == 2
    job.freeze_after(10)
    job.limit(10)       # minutes; Slurm looks at time limits every 30 s, and warns
    whole = train_forked(pool, tiny, tmp_path / "whole", *FLAGS, ranks=2)       # meanwhile, without Slurm
    wait_until(lambda: "USR1: asking what runs to save and stop" in job.log, "Slurm's warning")
    job.limit(60)
    job.signal_trainers(signal.SIGCONT)
    wait_until(lambda: len(resumed_at(job)) > 1, "second start", progress=lambda: job.log, every=0.2)
    saved = [int(step) for step in re.findall(r"asked to stop by SIGUSR1 at step (\d+); requeueing", job.log)]
    assert len(saved) == 1 and resumed_at(job) == [0, *saved]       # it resumes at the step of the save
    last = saved[0] // 10 * 10 + 10
    job.freeze_after(last)
    cluster("kill", "n2")
    cluster("up", "n2")     # torchrun noticed a lost node after 5 s
    job.signal_trainers(signal.SIGCONT)
    # Slurm may kill a minute late: it may hit the new start, which causes one more start, or a start whose training has
    # just ended, and then the job has failed
    state, restarts = job.end()
    done, _, after = job.log.rpartition("done       step")
    late = done and "n2: TERM: asking what runs" in after
    assert (state == "COMPLETED" or late) and restarts >= 2, job.log
    starts = resumed_at(job)
    assert len(starts) == 1 + restarts and last <= starts[2] < STEPS and starts[2] % 10 == 0
    assert "train_tts: a node was lost; requeueing the job" in job.log
    assert f"job {job.id}, start 1, on n[1-2]: 2 x 1 trainers" in job.log
    assert job.log.count("done       step") == 1
    logs = [(job.out / "node_logs" / f"{job.id}-{node}.log").read_text() for node in ("n1", "n2")]
    assert sum("done       step" in text for text in logs) == 1         # in the log of the node with rank 0
    assert not (job.out / "requeue").exists()
    weights, expected = (load_file(out / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
                         for out in (job.out, whole.output_dir))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)      # also changed by a wrong data shard


def test_cancelled_and_failed_jobs_leave_no_process_and_are_not_requeued(submit, tmp_path, light):
    """Three jobs at once: one is cancelled, one has a wrong flag, one may fail twice."""
    trainer = tmp_path / "fails.py"
    trainer.write_text("raise SystemExit(3)")
    cancelled, wrong = submit("--max_steps", 1000000), submit("--no_such_flag")
    fails = submit(TRAINER=str(trainer), PATH=light, REQUEUE_ON_FAILURE="any", MAX_REQUEUES="1")
    wait_until(lambda: (cancelled.out / "checkpoint-10").exists(), "first checkpoint")
    subprocess.run(["scancel", cancelled.id], check=True)
    wait_until(lambda: not cancelled.processes(), "end of the job's processes", every=0.2)
    assert cancelled.end() == ("CANCELLED", 0)
    assert "requeueing" not in cancelled.log
    assert wrong.end() == ("FAILED", 0), wrong.log
    message = "error: unrecognized arguments: --no_such_flag"
    assert wrong.log.count(f"\n{message}") == 1, wrong.log         # rank 0 prints it once
    assert wrong.log.count(f"traceback : {message}") == 1, wrong.log       # and torchrun repeats it once
    assert wrong.show("ExitCode") != "0:0"
    assert fails.end() == ("FAILED", 1), fails.log
    assert "not requeued, this was start 2 (MAX_REQUEUES)" in fails.log


STOPS = """
import pathlib, signal, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
starts = len(list(out.glob("start-*")))
def save(*_):
    (out / "requeue").write_text("asked to stop by SIGUSR1 at step 3\\n")
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
(out / f"start-{starts}").touch()
if not starts:
    time.sleep(1000)
"""
ANSWERS = """
import pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--checkpoint") + 1])
print("answering", *sys.argv[1:], flush=True)
if not (out / "answering").exists():
    (out / "answering").touch()
    time.sleep(1000)
"""


def test_block_diffusion_is_requeued_while_training_and_while_answering(cluster, tmp_path, light):
    """The trainer waits for USR1 and ends at once when it is restarted; so does the script of the answers."""
    for name, text in (("train.py", STOPS), ("answer.py", ANSWERS)):
        (tmp_path / name).write_text(text)
    folder = tmp_path / "job"
    job = Job(folder, "--output_dir", folder / "out", launcher=str(ROOT / "launch" / "train_hdp_diffusion_h200.sh"),
              TRAINER=str(tmp_path / "train.py"), SAMPLER=str(tmp_path / "answer.py"), MIN_GPUS="0", PATH=light,
              TRAIN_DATA=str(tmp_path / "train.py"), TEST_DATA="e.json", SAMPLE_FLAGS="--order confidence")
    try:
        for sign in ("start-0", "answering"):
            wait_until((job.out / sign).exists, sign)
            subprocess.run(["scancel", "--signal=USR1", "--batch", job.id], check=True)     # as Slurm does
        assert job.end() == ("COMPLETED", 2), job.log
    finally:
        subprocess.run(["scancel", job.id], capture_output=True)
    for words in ("at step 3; requeueing the job", "after training; requeueing the job"):
        assert job.log.count(f"train_hdp_diffusion_h200: asked to stop by SIGUSR1 {words}") == 1, job.log
    answering = f"answering --checkpoint {job.out} --test_file e.json --order confidence\n"
    assert (job.out / "node_logs" / f"{job.id}-after.log").read_text() == 2 * answering
    assert job.log.count(answering) == 2 and len(list(job.out.glob("start-*"))) == 3
    wait_until(lambda: not job.processes(), "end of the job's processes", every=0.2)


def test_a_launcher_finds_the_repository_from_slurms_copy(cluster, tmp_path):
    job = Job(tmp_path / "job", launcher=LAUNCHER.replace("tts", "tts_h200x8"), sbatch=["--chdir=/tmp"], DRY_RUN="1",
              NPROC_PER_NODE="8", OMP_NUM_THREADS="", TRAIN_DATA=__file__)
    assert job.end() == ("COMPLETED", 0), job.log
    assert f"{ROOT}/train_v2_ddp.py --model_path" in job.log and "OMP_NUM_THREADS=8 srun --nodes=1" in job.log, job.log

