"""What clusters do to a run: processes killed, signalled, stopped, disks filled, files damaged. Real processes over gloo.

A kill must cost at most the steps since the last checkpoint, and never a bit of the final weights. To afford many
starts, most jobs are forked from a server that has done the imports already (multiprocessing's forkserver); they are
separate processes with sessions of their own. Jobs with torchrun start from nothing.
"""
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
import wave
from pathlib import Path

import pytest
import torch
from conftest import ROOT, trainer_command
from safetensors.torch import load_file

import checkpoint
import metrics
import parallel

pytestmark = pytest.mark.timeout(400)

SEED = int(os.environ.get("TEST_SEED", time.time_ns() % 10**6))     # printed by the tests that draw from it
CLOCK = {"train/throughput", "train/audio_seconds_per_second", "train/samples_per_second", "train/step_seconds",
         "train/data_wait_seconds", "train/memory_gib", "system/gpu_memory_allocated", "train/mfu"}
COMMON = ("--learning_rate", 2e-4, "--per_device_train_batch_size", 1, "--num_train_epochs", 1000)
LORA = (*COMMON, "--use_lora", "--lora_dropout", 0.1, "--disable_eval")       # dropout makes the random state matter
KINDS = {       # ranks, flags
    "lora": (1, (*LORA, "--max_steps", 40)),
    "ddp": (2, (*LORA, "--max_steps", 30)),
    "fsdp": (2, (*COMMON, "--parallel", "fsdp", "--disable_eval", "--max_steps", 30)),
}


# ---------------------------------------------------------------------------------------------------------------------
# Jobs


def forked(argv, env, log, cwd):
    """Body of a rank that the fork server starts."""
    os.setsid()
    os.chdir(cwd)
    os.environ.update(env)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    import train_v2_ddp
    train_v2_ddp.main(argv)


@pytest.fixture(scope="module")
def server():
    """multiprocessing context whose processes are forks of one that has imported the trainer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_v2_ddp"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{before or ''}"
    multiprocessing.forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    return context


class Job:
    """A trainer running in the background, with torchrun or as one forked process a rank."""

    def __init__(self, server, tiny, output_dir, flags, ranks=1, torchrun=False, env=None):
        self.output_dir, self.log = output_dir, output_dir.parent / f"log-{uuid.uuid4().hex[:8]}.txt"
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        env = {"TEST_JOB": uuid.uuid4().hex, **(env or {})}
        self.mark, self.launcher, self.ranks = f"TEST_JOB={env['TEST_JOB']}", None, []
        if torchrun:
            with open(self.log, "w") as log:
                self.launcher = subprocess.Popen(trainer_command(tiny, output_dir, *flags, ranks=ranks), stdout=log,
                                                 stderr=subprocess.STDOUT, env={**os.environ, **env},
                                                 cwd=output_dir.parent)
            return
        argv, port = trainer_command(tiny, output_dir, *flags)[2:], free_port()
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
            self.ranks.append(server.Process(target=forked, args=(
                argv, {**env, **{k: str(v) for k, v in place.items()}}, str(self.log), str(output_dir.parent))))
            self.ranks[-1].start()

    def pids(self):
        """Every living process of the job: launcher, ranks, loaders."""
        sessions, found = {rank.pid for rank in self.ranks}, []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                ours = {int(session), int(folder.name)} & sessions if self.ranks else \
                    self.mark in (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:         # gone, or another user's
                continue
            if ours and state != "Z":
                found.append(int(folder.name))
        return found

    def rank(self, rank):
        """Pid of a rank."""
        if self.ranks:
            return self.ranks[rank].pid
        for pid in children(self.launcher.pid):
            if f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"):
                return pid
        raise AssertionError(f"no rank {rank} is running\n{self.text()}")

    def signal(self, number, pids):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:      # ended by itself meanwhile
                pass

    def running(self):
        return self.launcher.poll() is None if self.launcher else all(r.exitcode is None for r in self.ranks)

    def wait_for(self, ready, limit_s=90):
        """Until ready() is true; its value. The job must not end before."""
        end = time.monotonic() + limit_s
        while not (value := ready()):
            assert self.running() and time.monotonic() < end, self.text()
            time.sleep(0.005)
        return value

    def wait(self, limit_s=120):
        """Exit statuses: the launcher's, or each rank's. No process may be left soon after."""
        end = time.monotonic() + limit_s
        if self.launcher:
            statuses = [self.launcher.wait(limit_s)]
        else:
            for rank in self.ranks:
                rank.join(max(0, end - time.monotonic()))
            statuses = [rank.exitcode for rank in self.ranks]
        assert None not in statuses, f"still running after {limit_s} s: {statuses}\n{self.text()}"
        end = time.monotonic() + 15         # loaders look every 5 s whether their trainer lives
        while left := self.pids():
            assert time.monotonic() < end, f"processes are left behind: {[command(pid) for pid in left]}"
            time.sleep(0.05)
        return statuses

    def kill_all(self):
        """SIGKILL until nothing is left."""
        while pids := self.pids():
            random.shuffle(pids)
            self.signal(signal.SIGKILL, pids)
            time.sleep(0.02)
        for rank in self.ranks:
            rank.join()
        if self.launcher:
            self.launcher.wait()

    def text(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def seen(self, step):
        """True once metrics.jsonl has this step or a later one."""
        return last_step(self.output_dir) >= step


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def children(pid):
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*")
            for child in (task / "children").read_text().split()]


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"


@pytest.fixture
def launch(server, tiny):
    """launch(output_dir, *flags, ranks=, torchrun=, env=) -> Job; whatever still runs after the test is killed."""
    jobs = []

    def start(output_dir, *flags, **options):
        jobs.append(Job(server, tiny, output_dir, flags, **options))
        return jobs[-1]
    yield start
    for job in jobs:
        job.kill_all()


@pytest.fixture(scope="module")
def whole(server, tiny, tmp_path_factory):
    """whole(kind) -> output folder of KINDS[kind] that nothing interrupted. Look, do not touch."""
    root, done = tmp_path_factory.mktemp("whole"), {}

    def get(kind):
        if kind not in done:
            ranks, flags = KINDS[kind]
            job = Job(server, tiny, root / kind, (*flags, "--save_steps", 0), ranks)
            assert job.wait() == [0] * ranks, job.text()
            done[kind] = job.output_dir
        return done[kind]
    return get


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves


def steps_of(output_dir):
    """Steps of the checkpoints there, oldest first."""
    return [step for step, _ in checkpoint.checkpoints(output_dir)]


def newest(output_dir):
    return max(steps_of(output_dir), default=0)


def growing(output_dir):
    """Newest step whose checkpoint is being written, or was when everything died; 0 if none."""
    return max((int(path.name[11:-4]) for path in output_dir.glob("checkpoint-*.tmp")
                if not (path / "of-an-earlier-run").exists()), default=0)


def mark_unfinished(output_dir):
    """Before a restart: growing() shall not take what the last kill left for new."""
    for path in output_dir.glob("checkpoint-*.tmp"):
        (path / "of-an-earlier-run").touch()


def last_step(output_dir):
    path = output_dir / "metrics.jsonl"
    rows = metrics.read_metrics(path) if path.exists() else []
    return rows[-1]["step"] if rows else 0


def marker(output_dir):
    path = output_dir / "requeue"
    return path.read_text() if path.exists() else None


def tensors(folder, pattern):
    return {f"{path.name}:{name}": tensor for path in sorted(folder.glob(pattern))
            for name, tensor in load_file(path).items()}


def assert_same_end(output_dir, reference):
    """The final checkpoints agree in every bit of weights and moments, the logs in all that the clock does not decide."""
    ours, theirs = (checkpoint.checkpoints(folder)[-1][1] for folder in (output_dir, reference))
    assert ours.name == theirs.name
    for pattern in ("*.safetensors", "trainer_state/*.safetensors"):
        a, b = tensors(ours, pattern), tensors(theirs, pattern)
        assert a.keys() == b.keys() and a
        different = [name for name in a if not torch.equal(a[name], b[name])]
        assert not different, f"{len(different)} of {len(a)} tensors differ, first {different[0]}"
    logs = [[{k: v for k, v in row.items() if k not in CLOCK} for row in metrics.read_metrics(folder / "metrics.jsonl")]
            for folder in (output_dir, reference)]
    assert logs[0] == logs[1]


def assert_all_whole(output_dir):
    """Every folder that bears a checkpoint's name has every file as its manifest says, and a manifest of all files."""
    for _, path in checkpoint.checkpoints(output_dir):
        assert not checkpoint.damage(path), f"{path}: {checkpoint.damage(path)}"
        listed = set(json.loads((path / "manifest.json").read_text())["files"]) | {"manifest.json"}
        assert listed == {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


def finish(launch, output_dir, kind, *flags):
    """Start the same command again, undisturbed, and let it end; returns the Job."""
    ranks, kind_flags = KINDS[kind]
    before = newest(output_dir)
    job = launch(output_dir, *kind_flags, *flags, ranks=ranks)
    assert job.wait() == [0] * ranks, job.text()
    assert f"start      step {before}," in job.text()
    assert marker(output_dir) is None
    return job


# ---------------------------------------------------------------------------------------------------------------------
# SIGKILL


# who dies, and whether torchrun has started it; "launcher" leaves the ranks without their torchrun
ONE = [("all", False)]
TWO = [("all", False), ("rank 0", False), ("all", False), ("rank 1", False), ("all", True), ("rank", True),
       ("launcher", True)]


@pytest.mark.parametrize("kind, victims", [("lora", ONE * 18), ("ddp", TWO), ("fsdp", TWO)])
def test_kills_while_a_checkpoint_is_written_cost_no_bit(launch, whole, tmp_path, kind, victims):
    """32 kills in all, each at a random moment between the making of a checkpoint's folder and its renaming."""
    print(f"TEST_SEED={SEED}")
    draw, out = random.Random(f"{SEED} {kind}"), tmp_path / "out"
    ranks, flags = KINDS[kind]
    pause = 0.08 if kind == "lora" else 0.12        # times 6 or 9 files is the window
    inside, waiting = 0, list(victims)
    for _ in range(2 * len(victims)):
        if not waiting:
            break
        who, torchrun = waiting[0]
        before = newest(out)
        mark_unfinished(out)
        job = launch(out, *flags, "--save_steps", 1, "--save_total_limit", 2, ranks=ranks, torchrun=torchrun,
                     env={"TEST_SLOW_WRITE": str(pause)})
        target = before + draw.randint(1, 2)
        job.wait_for(lambda: growing(out) >= target)    # noqa: B023
        time.sleep(draw.uniform(0, 6 * pause))
        if who == "all":
            job.kill_all()
        else:
            rank = draw.randrange(ranks) if who == "rank" else int(who.split()[1]) if who != "launcher" else None
            job.signal(signal.SIGKILL, [job.launcher.pid if who == "launcher" else job.rank(rank)])
        hit = growing(out) > newest(out)
        statuses = job.wait(60)                         # those that live must end by themselves
        assert all(statuses), statuses
        assert f"start      step {before}," in job.text()
        assert newest(out) >= before
        assert_all_whole(out)
        if hit:
            inside += 1
            waiting.pop(0)
    assert inside == len(victims), f"only {inside} kills hit the window"
    finish(launch, out, kind)
    assert_same_end(out, whole(kind))
    assert not list(out.glob("*.tmp*")), "what the kills left is not cleaned up"


def test_kills_at_any_moment_cost_no_bit(launch, whole, tmp_path):
    """From the first import on: while data is prepared, the log is cut back, the model loaded, a checkpoint deleted."""
    print(f"TEST_SEED={SEED}")
    draw, out = random.Random(f"{SEED} any"), tmp_path / "out"
    for _ in range(8):
        before = newest(out)
        job = launch(out, *KINDS["lora"][1], "--save_steps", 1, "--save_total_limit", 1)
        time.sleep(draw.uniform(0.1, 2.5))
        job.kill_all()
        assert newest(out) >= before
        assert_all_whole(out)
        if newest(out) > 30:
            break
    finish(launch, out, "lora")
    assert_same_end(out, whole("lora"))
