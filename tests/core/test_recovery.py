"""Faults of a cluster in real runs of two ranks: processes are killed, signalled and stopped; disks fill up. A kill
costs at most the steps since the last checkpoint and changes no bit of the final weights.
"""
import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from core import checkpoint, metrics
from tests.helpers.pool import free_port
from tests.helpers.progress import PATIENCE_S, in_sessions, wait_until
from tests.helpers.runs import assert_same_bits, steps_of
from tests.helpers.trainer import ROOT, brief, speech_main, trainer_arguments

pytestmark = [pytest.mark.race, pytest.mark.slow]

SEED = int(os.environ.get("TEST_SEED", time.time_ns() % 10**6))     # printed by the test that draws from it
COMMON = ("--learning_rate", 2e-4, "--per_device_train_batch_size", 1, "--num_train_epochs", 1000)
LORA = (*COMMON, "--use_lora", "--disable_eval")
FULL = (*COMMON, "--parallel", "fsdp", "--max_steps", 16)
FSDP = (*FULL, "--disable_eval")
LIMIT_S = 6         # a step takes less, also on a busy machine
LIMIT = ("--collective_timeout", LIMIT_S)


def forked(argv, env, log, cwd):
    os.setsid()
    os.chdir(cwd)
    os.environ.update(env)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if env["RANK"] in env.get("SLOW_RANKS", "01"):
        slow_down({name: float(value) for name, value in env.items() if re.fullmatch("SLOW_.*_S", name)})
    speech_main(argv)


def slow_down(seconds):
    """Delay each sync of a file of an unfinished checkpoint, each encoded clip and each batch."""
    import data
    from speech import codes
    sync, encode, make_loader = os.fsync, codes.encode_clip, data.make_loader

    def slow_sync(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/checkpoint-" in path and ".tmp" in path and os.path.isfile(path):
            time.sleep(seconds["SLOW_DISK_S"])
        sync(fd)

    def slow_loader(table, ids, packs, threads, *pad_to):
        name = "SLOW_LOADING_S" if pad_to else "SLOW_VALIDATION_S"
        print(name, flush=True)
        for batch in make_loader(table, ids, packs, threads, *pad_to):
            time.sleep(seconds.get(name, 0))
            yield batch
    if "SLOW_DISK_S" in seconds:
        os.fsync = slow_sync
    if "SLOW_CODEC_S" in seconds:
        codes.encode_clip = lambda *args: (
            print("a clip", flush=True) or time.sleep(seconds["SLOW_CODEC_S"]) or encode(*args))
    data.make_loader = slow_loader


@pytest.fixture(scope="module")
def tiny(tiny, tmp_path_factory):
    return brief(tiny, tmp_path_factory.mktemp("brief"))


@pytest.fixture(scope="module")
def server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.imports"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    return context


class Job:
    def __init__(self, server, tiny, output_dir, flags, **env):
        self.output_dir, self.log = output_dir, output_dir.parent / f"log-{uuid.uuid4().hex[:8]}.txt"
        self.processes, argv, log = [], trainer_arguments(tiny, output_dir, *flags), str(self.log)
        env |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for rank in range(2):
            own = {name: str(value) for name, value in (env | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            self.processes.append(server.Process(target=forked, args=(argv, own, log, str(output_dir.parent))))
            self.processes[-1].start()
        self.ranks = [process.pid for process in self.processes]

    def pids(self):
        return in_sessions(*self.ranks)

    def signal(self, number, *pids):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):       # ended by itself meanwhile
                os.kill(pid, number)

    def statuses(self):
        return [process.exitcode for process in self.processes]

    def wait_for(self, ready):
        """Wait until ready() is true and return its value. The job must make progress and must not end before."""
        return wait_until(ready, "such a moment", lambda: self.statuses() == [None, None], self.text)

    def end(self, *statuses):
        """Wait for it to end with these statuses of the ranks; no process may be left."""
        wait_until(lambda: None not in self.statuses() and not self.pids(), "end of every process",
                   progress=lambda: (self.statuses(), self.pids(), self.text()))
        assert self.statuses() == list(statuses), self.text()
        return self

    @contextlib.contextmanager
    def paused(self):
        """Stop the ranks inside the context, so that nothing depends on how long the test takes there."""
        self.signal(signal.SIGSTOP, *self.ranks)
        try:
            wait_until(lambda: all(map(is_stopped, self.ranks)), "stop")     # an earlier signal may still arrive
            yield
        finally:
            self.signal(signal.SIGCONT, *self.ranks)

    def kill_all(self):
        while pids := self.pids():
            self.signal(signal.SIGKILL, *pids)
            time.sleep(0.02)
        for process in self.processes:
            process.join()

    def text(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def seen(self, step):
        return last_step(self.output_dir) >= step

    def assert_error(self, words, most=1):
        """The output has one to `most` error lines and no traceback; the first line matches the pattern `words`."""
        assert "Traceback" not in self.text() and not re.search(r"^rank \d failed", self.text(), re.M), self.text()
        errors = re.findall("^error: (.*)", self.text(), re.M)
        assert 0 < len(errors) <= most and re.fullmatch(words, errors[0]), self.text()


def is_stopped(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    with contextlib.suppress(OSError):      # of a thread that has just ended
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


@pytest.fixture
def launch(server, tiny):
    """launch(output_dir, *flags, **env) -> Job; whatever still runs after the test is killed."""
    jobs = []

    def start(output_dir, *flags, **env):
        jobs.append(Job(server, tiny, output_dir, flags, **env))
        return jobs[-1]
    yield start
    for job in jobs:
        job.kill_all()


@pytest.fixture(scope="module")
def whole(server, tiny, tmp_path_factory):
    """Output folder of FSDP that nothing interrupted. Look, do not touch."""
    return Job(server, tiny, tmp_path_factory.mktemp("whole") / "out", (*FSDP, "--save_steps", 0)).end(0, 0).output_dir


def newest(output_dir):
    return max(steps_of(output_dir), default=0)


def growing(output_dir):
    return max((int(path.name[11:].split(".")[0]) for path in output_dir.glob("checkpoint-*.tmp-*")
                if "deleted" not in path.name), default=0)


def last_step(output_dir):
    rows = metrics.read_metrics(output_dir / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def marker(output_dir):
    path = output_dir / "requeue"
    return path.read_text() if path.exists() else None


def assert_all_whole(output_dir):
    for _, path in checkpoint.list_checkpoints(output_dir):
        assert not checkpoint.find_damage(path), f"{path}: {checkpoint.find_damage(path)}"
        listed = set(json.loads((path / "manifest.json").read_text())["files"]) | {"manifest.json"}
        assert listed == {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


def finish(launch, output_dir, whole):
    """Rerun the command undisturbed: weights, moments and log equal those of the run that was never stopped."""
    before = newest(output_dir)
    job = launch(output_dir, *FSDP).end(0, 0)
    assert f"start      step {before}," in job.text() and marker(output_dir) is None
    assert_same_end(output_dir, whole)


def assert_same_end(output_dir, whole):
    assert newest(output_dir) == newest(whole)
    assert_same_bits(*(SimpleNamespace(output_dir=folder) for folder in (output_dir, whole)))


def test_kills_while_a_checkpoint_is_written_cost_no_bit(launch, whole, tmp_path):
    """One rank is killed, then both, at random moments before the rename. Then the newest checkpoint is damaged."""
    print(f"TEST_SEED={SEED}")
    draw, out, pause = random.Random(SEED), tmp_path / "out", 0.12      # times 9 files is the window
    for whom in ("rank 1", "all"):
        before = newest(out)
        for left in out.glob("checkpoint-*.tmp-*"):       # growing() shall not take it for new
            shutil.rmtree(left)
        job = launch(out, *FSDP, "--save_steps", 1, "--save_total_limit", 2, SLOW_DISK_S=pause)
        target, hit = before + draw.randint(3, 4), False
        while not hit:
            job.wait_for(lambda: growing(out) >= target)        # noqa: B023  (asked at once)
            time.sleep(draw.uniform(0, 6 * pause))
            with job.paused():
                if hit := growing(out) > newest(out):       # else the next checkpoint's turn
                    job.signal(signal.SIGKILL, *job.ranks[whom == "rank 1":])
            target = newest(out) + 1
        job.end(*[-signal.SIGKILL] * 2 if whom == "all" else [1, -signal.SIGKILL])    # rank 0 ends by itself
        assert f"start      step {before}," in job.text() and newest(out) >= before
        assert_all_whole(out)
    before, damaged = steps_of(out)[-2:]
    os.truncate(out / f"checkpoint-{damaged}" / "manifest.json", 100)
    job = launch(out, *FSDP).end(0, 0)
    assert f"checkpoint-{damaged} is damaged (unreadable manifest.json); trying the one before" in job.text()
    assert f"start      step {before}," in job.text()
    assert_same_end(out, whole)
    assert not list(out.glob("*.tmp*")), "unfinished checkpoints of the kills are left"


def test_signal_saves_within_a_step_and_asks_for_requeue(launch, whole, tmp_path):
    out = tmp_path / "out"
    job = launch(out, *FSDP, "--save_steps", 0)
    job.wait_for(lambda: job.seen(3))
    with job.paused():
        seen = last_step(out)
        job.signal(signal.SIGUSR1, job.ranks[1])
    job.end(0, 0)
    # the step that runs may be two after the logged one, and one more is allowed
    assert steps_of(out) == [newest(out)] and seen < newest(out) <= seen + 3
    why = f"asked to stop by a signal to another rank at step {newest(out)}"
    assert marker(out) == f"{why}\n" and "Traceback" not in job.text()
    assert f"\nstopped    {why} of 16; checkpoint saved; rerun the same command to resume\n" in job.text()
    finish(launch, out, whole)


@pytest.fixture(scope="module")
def speech(tiny, tmp_path_factory):
    """(train.json, number of clips): three copies of tiny's clips with different content, none encoded yet."""
    root, samples = tmp_path_factory.mktemp("speech"), []
    for copy in range(1, 4):
        (root / str(copy)).mkdir()
        for wave in (tiny.root / "speech").glob("*.wav"):
            (root / str(copy) / wave.name).write_bytes(wave.read_bytes() + bytes(copy))       # after the samples
        samples += json.loads(tiny.train_json.read_text().replace('"speech/', f'"{copy}/'))
    (root / "train.json").write_text(json.dumps(samples))
    return root / "train.json", len(list(root.rglob("*.wav")))


def encoded(job):
    return max(int(total) for total in re.findall(r"encoding audio:.*?/(\d+) \[", job.text()))


def test_signal_while_audio_is_encoded(launch, speech, tmp_path):
    """One of two ranks gets the signal: both stop, encoded clips are kept, and the rerun encodes only the rest."""
    out, (data, clips) = tmp_path / "out", speech
    flags = (*LORA, "--max_steps", 2, "--train_data_file", data, "--code_cache", tmp_path / "codes")
    job = launch(out, *flags, SLOW_CODEC_S=0.5)        # a share takes 20 s
    job.wait_for(lambda: job.text().count("a clip") > 2)
    with job.paused():       # the faster one must not end its share before the other one has the signal
        job.signal(signal.SIGTERM, job.ranks[1])
    job.end(0, 0)
    assert "asked to stop while audio was being encoded" in marker(out) and "Traceback" not in job.text()
    assert not steps_of(out) and encoded(job) == clips
    shares = [len(load_file(path)["lengths"]) for path in (tmp_path / "codes").rglob("*.safetensors")]
    assert sum(shares) and max(shares) < clips // 2 - 4, "a rank went on to the end of its share"
    assert encoded(launch(out, *flags).end(0, 0)) == clips - sum(shares)
    assert steps_of(out) == [2] and marker(out) is None


def test_signal_breaks_validation_off(launch, speech, tmp_path):
    """The signal arrives in the middle of a validation of ten seconds. The next start validates instead."""
    out = tmp_path / "out"
    flags = (*FULL, "--eval_data_file", speech[0], "--eval_steps", 3)
    job = launch(out, *flags, SLOW_VALIDATION_S=0.3)
    job.wait_for(lambda: job.seen(3) and job.text().count("SLOW_VALIDATION_S") == 2)
    job.signal(signal.SIGUSR1, job.ranks[1])
    job.end(0, 0)
    assert steps_of(out) == [3] and marker(out).endswith("at step 3\n") and "eval   step" not in job.text()
    launch(out, *flags, "--max_steps", 4, "--per_device_eval_batch_size", 12).end(0, 0)
    assert [row["step"] for row in metrics.read_metrics(out / "metrics.jsonl") if "eval/loss" in row] == [3, 4]


@pytest.mark.parametrize("rank, words", [
    (0, r"no answer from rank 0 for \d+ s: its process, torchrun, or its node is frozen"),
    (1, r"no answer from rank 1 \(\S+, process \d+\) in: .*; the others have waited for \d+ s")])
def test_rank_that_does_not_answer_is_named(launch, tmp_path, rank, words):
    out = tmp_path / "out"
    job = launch(out, *FSDP, "--save_steps", 1, "--max_steps", 10_000, *LIMIT, SLOW_DISK_S=1)
    job.wait_for(lambda: growing(out) == 1 and job.seen(2))
    start, other = time.monotonic(), job.processes[1 - rank]
    job.signal(signal.SIGSTOP, job.ranks[rank])
    other.join(PATIENCE_S)
    assert other.exitcode == 1 and time.monotonic() - start > LIMIT_S
    job.signal(signal.SIGCONT, job.ranks[rank])
    job.end(1, 1)
    job.assert_error(words, most=2 - rank)      # a frozen store does not know of the first error


def test_rank_whose_loader_hangs_is_named(launch, tmp_path):
    job = launch(tmp_path / "out", *LORA, *LIMIT, SLOW_RANKS="1", SLOW_LOADING_S=1000)
    job.end(1, 1)
    job.assert_error(rf"hangs: rank 1 \(\S+, process {job.ranks[1]}\) in: loading data for step \d+; "
                     r"the others have waited for \d+ s")
    assert re.findall(r"^rank \d hangs here:", job.text(), re.M) == ["rank 1 hangs here:"]
    assert "batch = next(batches)" in job.text()


def test_slow_encoding_and_validation_are_no_hang(launch, tiny, speech, tmp_path):
    """Rank 1 encodes and validates for longer than a step may take, while rank 0 waits."""
    job = launch(tmp_path / "out", *COMMON, "--use_lora", "--max_steps", 2, "--eval_steps", 2, "--eval_data_file",
                 tiny.train_json, "--train_data_file", speech[0], "--code_cache", tmp_path / "codes", *LIMIT,
                 SLOW_RANKS="1", SLOW_CODEC_S=1.3 * LIMIT_S / 30, SLOW_VALIDATION_S=1.3 * LIMIT_S / 12).end(0, 0)
    assert "error" not in job.text() and "best at step 2 (" in job.text()
    assert job.text().count("a clip") >= 30


@pytest.fixture
def disk(tmp_path):
    """A new file system of 200 MiB, which uses memory only for written data."""
    (out := tmp_path / "out").mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", out], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    yield out
    subprocess.run(["umount", "-l", out], capture_output=True)


def test_full_disk_stops_the_run_and_costs_nothing(launch, whole, disk):
    job = launch(out := disk, *FSDP, "--save_steps", 2)
    job.wait_for(lambda: newest(out) >= 2)
    with job.paused():     # before rotation makes room for each new checkpoint
        space = os.statvfs(out)
        with open(out / "filler", "wb") as filler:      # enough for the log is left
            os.posix_fallocate(filler.fileno(), 0, space.f_bavail * space.f_frsize - 100_000)
    job.end(1, 1)
    job.assert_error(rf"checkpoint-\d+ could not be written to {out} .*No space left on device.*; "
                     "earlier checkpoints are intact")
    assert_all_whole(out)
    assert not list(out.glob("*.tmp*")), "half a checkpoint still takes space"
    (out / "filler").unlink()
    finish(launch, out, whole)
