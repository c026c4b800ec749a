"""What clusters do to a run: processes killed, signalled, stopped; disks filled, files damaged. Real runs over gloo.

A kill must cost at most the steps since the last checkpoint, and never a bit of the final weights. To afford many
starts, ranks are forked from a server that has done the imports already (multiprocessing's forkserver); they are
separate processes with sessions of their own. Jobs with torchrun: test_signals.py, tests/launch, tests/slurm.
"""
import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from core import checkpoint, metrics
from tests.helpers import runs
from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT, speech_main, trainer_command

pytestmark = [pytest.mark.race, pytest.mark.slow]

SEED = int(os.environ.get("TEST_SEED", time.time_ns() % 10**6))     # printed by the tests that draw from it
COMMON = ("--learning_rate", 2e-4, "--per_device_train_batch_size", 1, "--num_train_epochs", 1000)
LORA = (*COMMON, "--use_lora", "--lora_dropout", 0.1, "--disable_eval")       # dropout makes the random state matter
KINDS = {       # ranks, flags
    "lora": (1, (*LORA, "--max_steps", 36)),
    "ddp": (2, (*LORA, "--max_steps", 24)),
    "fsdp": (2, (*COMMON, "--parallel", "fsdp", "--disable_eval", "--max_steps", 24)),
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
    if "SLOW_DISK_S" in env:        # that a sync of each file of a growing checkpoint takes longer
        sync = os.fsync

        def slow_sync(fd):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if "/checkpoint-" in path and ".tmp" in path and os.path.isfile(path):
                time.sleep(float(env["SLOW_DISK_S"]))
            sync(fd)
        os.fsync = slow_sync
    if "SLOW_CODEC_S" in env:       # seconds that each clip takes longer
        from speech import codes as encode
        encode_clip = encode.encode_clip
        encode.encode_clip = lambda *args: time.sleep(float(env["SLOW_CODEC_S"])) or encode_clip(*args)
    speech_main(argv)


@pytest.fixture(scope="module")
def server():
    """multiprocessing context whose processes are forks of one that has imported the trainer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.imports"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    return context


class Job:
    """A trainer running in the background, one forked process a rank; rank 0 hosts the store."""

    def __init__(self, server, tiny, output_dir, flags, ranks=1, env=None):
        self.output_dir, self.log = output_dir, output_dir.parent / f"log-{uuid.uuid4().hex[:8]}.txt"
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        self.ranks, argv, port = [], trainer_command(tiny, output_dir, *flags)[2:], free_port()
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
            self.ranks.append(server.Process(target=forked, args=(
                argv, {**(env or {}), **{k: str(v) for k, v in place.items()}}, str(self.log), str(output_dir.parent))))
            self.ranks[-1].start()

    def pids(self):
        """Every living process of the job: ranks, loaders."""
        sessions, found = {rank.pid for rank in self.ranks}, []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):          # gone, or another user's
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if {int(session), int(folder.name)} & sessions and state != "Z":
                    found.append(int(folder.name))
        return found

    def rank(self, rank):
        """Pid of a rank."""
        return self.ranks[rank].pid

    def signal(self, number, pids):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):       # ended by itself meanwhile
                os.kill(pid, number)

    def running(self):
        return all(rank.exitcode is None for rank in self.ranks)

    def wait_for(self, ready):
        """Until ready() is true; its value. The job must not end before, and must get on."""
        return wait_until(ready, "such a moment", self.running, self.text)

    def statuses(self):
        """Exit statuses of the ranks when all have ended."""
        def now():
            return [rank.exitcode for rank in self.ranks]
        wait_until(lambda: None not in now(), "end of all ranks", progress=lambda: (now(), self.text()))
        return now()

    def wait(self):
        """statuses(); no process may be left behind."""
        statuses = self.statuses()
        wait_until(lambda: not self.pids(), "end of every process", progress=self.pids)
        return statuses

    def stand_still(self, ranks):
        """Context: these ranks are stopped within it, so that nothing depends on how long the test takes there."""
        return standing_still([self.rank(rank) for rank in ranks])

    def kill_all(self):
        """SIGKILL until nothing is left."""
        while pids := self.pids():
            random.shuffle(pids)
            self.signal(signal.SIGKILL, pids)
            time.sleep(0.02)
        for rank in self.ranks:
            rank.join()

    def text(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def seen(self, step):
        """True once metrics.jsonl has this step or a later one."""
        return last_step(self.output_dir) >= step


@contextlib.contextmanager
def standing_still(pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: all(map(is_stopped, pids)), "stop")      # what is sent before may be taken before
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def cpu_seconds(pid):
    """What a process has computed so far: how far it is, whatever else the machine does."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def is_stopped(pid):
    """True once no thread of a process runs any more."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    with contextlib.suppress(OSError):      # of a thread that has just ended
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def free_port():
    """Below those that the kernel hands out by itself, so it is still free when the run listens to it."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
            return s.getsockname()[1]


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:         # the thread has ended
            continue
    return found


@pytest.fixture
def launch(server, tiny):
    """launch(output_dir, *flags, ranks=, env=) -> Job; whatever still runs after the test is killed."""
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
    return [step for step, _ in checkpoint.list_checkpoints(output_dir)]


def newest(output_dir):
    return max(steps_of(output_dir), default=0)


UNFINISHED = set()      # temporary folders of checkpoints that kills have left


def growing(output_dir):
    """Newest step whose checkpoint is being written, or was when everything died; 0 if none."""
    return max((int(path.name[11:].split(".")[0]) for path in output_dir.glob("checkpoint-*.tmp-*")
                if "deleted" not in path.name and path not in UNFINISHED), default=0)


def mark_unfinished(output_dir):
    """Before a restart: growing() shall not take what the last kill left for new, nor while the restart removes it."""
    UNFINISHED.update(output_dir.glob("checkpoint-*.tmp-*"))


def last_step(output_dir):
    path = output_dir / "metrics.jsonl"
    rows = metrics.read_metrics(path) if path.exists() else []
    return rows[-1]["step"] if rows else 0


def marker(output_dir):
    path = output_dir / "requeue"
    return path.read_text() if path.exists() else None


def assert_same_end(output_dir, reference):
    """The last checkpoints agree in every bit of weights and moments, the logs in all that no clock decides."""
    assert newest(output_dir) == newest(reference)
    runs.assert_same_bits(*(SimpleNamespace(output_dir=folder) for folder in (output_dir, reference)))


def assert_all_whole(output_dir):
    """Every folder that bears a checkpoint's name has every file as its manifest says, and a manifest of all files."""
    for _, path in checkpoint.list_checkpoints(output_dir):
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


def test_kills_while_a_checkpoint_is_written_cost_no_bit(launch, whole, tmp_path):
    """Of a rank, then of both, at random moments between the making of a checkpoint's folder and its renaming.

    test_checkpoint.py has one before each change that a save makes to the disk.
    """
    print(f"TEST_SEED={SEED}")
    draw, out, kind = random.Random(SEED), tmp_path / "out", "fsdp"
    ranks, flags = KINDS[kind]
    pause = 0.12        # times 9 files is the window
    waiting = ["rank 1", "all"]
    for _ in range(2 * len(waiting)):
        if not waiting:
            break
        who, before = waiting[0], newest(out)
        mark_unfinished(out)
        job = launch(out, *flags, "--save_steps", 1, "--save_total_limit", 2, ranks=ranks,
                     env={"SLOW_DISK_S": str(pause)})
        target = before + draw.randint(1, 2)
        job.wait_for(lambda: growing(out) >= target)        # noqa: B023  (asked at once)
        time.sleep(draw.uniform(0, 6 * pause))
        if who == "all":
            job.kill_all()
        else:
            job.signal(signal.SIGKILL, [job.rank(1)])
        hit = growing(out) > newest(out)
        statuses = job.wait()                           # those that live must end by themselves
        assert all(statuses), statuses
        assert f"start      step {before}," in job.text()
        assert newest(out) >= before
        assert_all_whole(out)
        if hit:
            waiting.pop(0)
    assert not waiting, "too many kills missed the window"
    finish(launch, out, kind)
    assert_same_end(out, whole(kind))
    assert not list(out.glob("*.tmp*")), "what the kills left is not cleaned up"


# ---------------------------------------------------------------------------------------------------------------------
# SIGTERM, SIGUSR1


@pytest.mark.parametrize("kind, rank, number", [("ddp", 0, signal.SIGTERM), ("fsdp", 1, signal.SIGUSR1)])
def test_signal_saves_within_a_step_and_asks_for_requeue(launch, whole, tmp_path, kind, rank, number):
    out, (ranks, flags) = tmp_path / "out", KINDS[kind]
    job = launch(out, *flags, "--save_steps", 0, ranks=ranks)
    job.wait_for(lambda: job.seen(3))
    with job.stand_still(range(ranks)):
        seen = last_step(out)
        job.signal(number, [job.rank(rank)])
    assert job.wait() == [0] * ranks, job.text()
    # the step under way may be two further than the log, and one more is allowed
    assert steps_of(out) == [newest(out)] and seen < newest(out) <= seen + 3
    assert re.findall("^stopped .*", job.text(), re.M) == [
        f"stopped    {marker(out).strip()} of {flags[flags.index('--max_steps') + 1]}; checkpoint saved; rerun the same command to resume"]
    who = "a signal to another rank" if rank else number.name
    assert marker(out) == f"asked to stop by {who} at step {newest(out)}\n"
    assert "Traceback" not in job.text()
    finish(launch, out, kind)
    assert_same_end(out, whole(kind))


@pytest.fixture(scope="module")
def speech(tiny, tmp_path_factory):
    """train.json with three times the clips of tiny, all of different content, none encoded yet: (file, clips)."""
    root, samples = tmp_path_factory.mktemp("speech"), []
    for copy in range(1, 4):
        for sample in json.loads(tiny.train_json.read_text()):
            for part in (part for turn in sample["messages"] if turn["role"] != "system" for part in turn["content"]):
                if part["type"] == "audio":
                    source = tiny.root / part["audio_url"]
                    part["audio_url"] = f"{copy}-{source.name}"
                    (root / part["audio_url"]).write_bytes(source.read_bytes() + bytes(copy))   # behind the samples
            samples.append(sample)
    (root / "train.json").write_text(json.dumps(samples))
    return root / "train.json", len(list(root.glob("*.wav")))


def encoded(job):
    """How many clips this run had to encode, by its progress bar."""
    return max(int(total) for total in re.findall(r"encoding audio:.*?/(\d+) \[", job.text()))


def test_signal_while_audio_is_encoded(launch, speech, tmp_path):
    """To one of two ranks: both stop, what is encoded stays encoded, and the rerun does the rest."""
    out, (data, clips) = tmp_path / "out", speech
    flags = (*LORA, "--max_steps", 2, "--train_data_file", data, "--code_cache", tmp_path / "codes")
    job = launch(out, *flags, ranks=2, env={"SLOW_CODEC_S": "0.5"})        # a share takes 20 s
    job.wait_for(lambda: children(job.rank(0)) and children(job.rank(1)))      # both read audio
    before = [cpu_seconds(job.rank(rank)) for rank in (0, 1)]       # a clip takes about 0.03
    job.wait_for(lambda: any(cpu_seconds(job.rank(rank)) > before[rank] + 0.1 for rank in (0, 1)))
    with job.stand_still([0, 1]):       # the faster one must not end its share before the other one has the signal
        job.signal(signal.SIGTERM, [job.rank(1)])
    assert job.wait() == [0, 0], job.text()
    assert "asked to stop while audio was being encoded" in marker(out) and "Traceback" not in job.text()
    assert not steps_of(out) and encoded(job) == clips
    shares = [len(load_file(path)["lengths"]) for path in (tmp_path / "codes").rglob("*.safetensors")]
    done = sum(shares)
    assert done and max(shares) < clips // 2 - 4, "a rank went on to the end of its share"
    again = launch(out, *flags, ranks=2)
    assert again.wait() == [0, 0], again.text()
    assert encoded(again) == clips - done and steps_of(out) == [2] and marker(out) is None


@pytest.mark.parametrize("kind, rank", [("fsdp", 1)])
def test_signal_breaks_validation_off(launch, speech, tmp_path, kind, rank):
    """Its loader stands still while the signal comes, so that it comes in the middle. The next start makes up for it."""
    out, data = tmp_path / "out", speech[0].with_name("thrice.json")
    data.write_text(json.dumps(3 * json.loads(speech[0].read_text())))
    flags = [flag for flag in KINDS[kind][1] if flag != "--disable_eval"]
    job = launch(out, *flags, "--eval_data_file", data, "--eval_steps", 3, "--save_steps", 0, ranks=2)
    before = job.wait_for(lambda: job.seen(1) and children(job.rank(0)))
    loaders = job.wait_for(lambda: job.seen(3) and sorted(set(children(job.rank(0))) - set(before)))
    job.signal(signal.SIGSTOP, loaders)
    job.signal(signal.SIGUSR1, [job.rank(rank)])
    time.sleep(0.5)
    job.signal(signal.SIGCONT, loaders)
    assert job.wait() == [0, 0], job.text()
    assert steps_of(out) == [3] and marker(out).endswith("at step 3\n"), job.text()
    assert "eval   step" not in job.text()
    again = launch(out, *flags, "--eval_data_file", data, "--eval_steps", 3, "--max_steps", 4,
                   "--per_device_eval_batch_size", 12, ranks=2)
    assert again.wait() == [0, 0], again.text()
    assert [row["step"] for row in metrics.read_metrics(out / "metrics.jsonl") if "eval/loss" in row] == [3, 4]


# ---------------------------------------------------------------------------------------------------------------------
# One rank fails or hangs


LIMIT_S = 6         # a step takes less, also on a busy machine
LIMIT = ("--collective_timeout", LIMIT_S)


def errors_in(job):
    """Its lines that say why it failed: one failure has one, whoever notices it second, and in whatever order."""
    assert "Traceback" not in job.text() and not re.search(r"^rank \d failed", job.text(), re.M), job.text()
    return re.findall("^error: .*", job.text(), re.M)


def test_rank_that_does_not_answer_is_named(launch, tmp_path):
    """By the other one of two, while rank 0 waits for shares of the save before, in no collective; when it goes on it
    finds that one, and the store with it, gone.
    """
    out = tmp_path / "out"
    job = launch(out, *KINDS["fsdp"][1], "--save_steps", 1, "--max_steps", 10_000, *LIMIT, ranks=2,
                 env={"SLOW_DISK_S": "1"})
    job.wait_for(lambda: growing(out) == 1 and job.seen(2))
    stopped, start = job.rank(1), time.monotonic()
    job.signal(signal.SIGSTOP, [stopped])
    job.ranks[0].join(PATIENCE_S)
    took, status = time.monotonic() - start, job.ranks[0].exitcode
    job.signal(signal.SIGCONT, [stopped])
    assert status == 1, job.text()
    assert job.wait() == [1, 1], job.text()
    errors = errors_in(job)
    assert len(errors) == 1 and re.match(rf"error: no answer from rank 1 \(\S+, process {stopped}\) in: .*; "
                                         r"the other ranks have waited for \d+ s", errors[0]), job.text()
    assert took > LIMIT_S


def test_rank_whose_loader_hangs_is_named(launch, tmp_path):
    job = launch(tmp_path / "out", *KINDS["ddp"][1], "--max_steps", 10_000, *LIMIT, ranks=2)
    job.wait_for(lambda: job.seen(2))
    rank, loaders = job.rank(1), children(job.rank(1))
    job.signal(signal.SIGSTOP, loaders)
    assert job.statuses() == [1, 1], job.text()
    job.signal(signal.SIGKILL, loaders)
    job.wait()
    errors = re.findall("^error: .*", job.text(), re.M)
    assert len(errors) == 1 and re.match(rf"error: hangs: rank 1 \(\S+, process {rank}\) in: loading data for step "
                                         r"\d+; the other ranks have waited for \d+ s", errors[0])
    assert re.findall(r"^rank \d hangs here:", job.text(), re.M) == ["rank 1 hangs here:"]
    assert "batch = next(batches)" in job.text() and "Traceback" not in job.text()


def test_slow_encoding_and_validation_are_no_hang(launch, tiny, speech, tmp_path):
    """Each takes longer than a step may, because its loader process stands still."""
    out, (data, _) = tmp_path / "out", speech
    job = launch(out, *COMMON, "--use_lora", "--max_steps", 3, "--eval_steps", 2, "--eval_data_file", tiny.train_json,
                 "--train_data_file", data, "--code_cache", tmp_path / "codes", *LIMIT, ranks=2)

    def stand_still(ready):
        loaders = job.wait_for(ready)
        job.signal(signal.SIGSTOP, loaders)
        time.sleep(1.3 * LIMIT_S)
        job.signal(signal.SIGCONT, loaders)
    stand_still(lambda: children(job.rank(1)))          # first loader: reads audio
    before = job.wait_for(lambda: job.seen(1) and children(job.rank(0)))
    stand_still(lambda: job.seen(2) and sorted(set(children(job.rank(0))) - set(before)))
    assert job.wait() == [0, 0], job.text()
    assert "error" not in job.text()


# ---------------------------------------------------------------------------------------------------------------------
# Writing beside training


def test_training_goes_on_while_a_checkpoint_is_written(launch, whole, tmp_path):
    out = tmp_path / "out"
    job = launch(out, *KINDS["lora"][1], "--save_steps", 15, env={"SLOW_DISK_S": "1"})
    job.wait_for(lambda: growing(out) == 15)
    most = 15
    while growing(out) == 15:
        most = max(most, last_step(out))
        assert len(list(out.glob("*.tmp-*"))) <= 1        # none: renamed since the line before
        time.sleep(0.005)
    assert 15 < most <= 30          # not held up by the write, but the next save waits for it
    job.wait_for(lambda: growing(out) == 30)
    assert 15 in steps_of(out)
    job.kill_all()
    assert steps_of(out) == [15]
    finish(launch, out, "lora")     # what stands in it is step 15, although training went on meanwhile
    assert_same_end(out, whole("lora"))


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_checkpoints_are_reported_and_passed_over(launch, whole, tmp_path):
    """Four kinds of damage on 12, 10, 8 and 6; the run goes on from 4, and keeps one checkpoint."""
    out, (ranks, flags) = tmp_path / "out", KINDS["fsdp"]
    job = launch(out, *flags, "--save_steps", 2, "--save_total_limit", 0, ranks=ranks)
    job.wait_for(lambda: newest(out) >= 12)
    job.kill_all()
    for step in steps_of(out):
        if step > 12:
            shutil.rmtree(out / f"checkpoint-{step}")
    manifest = out / "checkpoint-12" / "manifest.json"
    os.truncate(manifest, manifest.stat().st_size // 2)
    (out / "checkpoint-10" / "trainer_state" / "rng.pt").unlink()
    shard = out / "checkpoint-8" / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 4096)
    flip_byte(out / "checkpoint-6" / "trainer_state" / "optimizer-00002-of-00002.safetensors")
    job = launch(out, *flags, "--save_steps", 20, "--save_total_limit", 1, ranks=ranks)
    assert job.wait() == [0, 0], job.text()
    assert "start      step 4, resumed from" in job.text()
    reports = re.findall(r"^checkpoint \S+-(\d+) is damaged \((.*)\); trying the one before", job.text(), re.M)
    assert [int(step) for step, _ in reports] == [12, 10, 8, 6]
    for (_, why), words in zip(reports, ("unreadable manifest.json", "trainer_state/rng.pt is missing",
                                         "model-00002-of-00002.safetensors has ", "has another checksum")):
        assert words in why
    assert_same_end(out, whole("fsdp"))
    assert steps_of(out) == [24]


# ---------------------------------------------------------------------------------------------------------------------
# Disks


def fill(folder, leave):
    """A file that takes all space of a disk but `leave` bytes."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as f:
        try:
            while True:
                f.write(bytes(2**20))
        except OSError:
            f.truncate(max(0, f.tell() - leave))
    return filler


def assert_clean_stop(job, output_dir, *words):
    """All ranks ended with status 1 after one line that names the checkpoint; the newest one there is whole."""
    assert set(job.wait()) == {1}, job.text()
    errors = re.findall("^error: .*", job.text(), re.M)
    assert len(errors) == 1 and "Traceback" not in job.text(), job.text()
    assert re.match(rf"error: checkpoint-\d+ could not be written to {output_dir} ", errors[0]), errors[0]
    assert errors[0].endswith("earlier checkpoints are intact") and all(word in errors[0] for word in words), errors[0]
    assert newest(output_dir)
    assert_all_whole(output_dir)


@pytest.mark.parametrize("kind, size", [("fsdp", 200)])
def test_full_disk_stops_the_run_and_costs_nothing(launch, whole, disk, kind, size):
    out, (ranks, flags) = disk(size), KINDS[kind]
    job = launch(out, *flags, "--save_steps", 2, ranks=ranks)
    job.wait_for(lambda: newest(out) >= 2)
    with job.stand_still(range(ranks)):     # before rotation makes room for each new checkpoint
        filler = fill(out, leave=100_000)   # enough for the log
    assert_clean_stop(job, out, "No space left on device")
    assert not list(out.glob("*.tmp*")), "half a checkpoint still takes space"
    filler.unlink()
    finish(launch, out, kind)
    assert_same_end(out, whole(kind))
