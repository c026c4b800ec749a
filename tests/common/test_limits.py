"""What the machine lacks is one line that names it: full disks, a full /dev/shm, too few open files, read-only folders.

The trainers run for real, in ranks of the pool; disks and folders are changed in a mount namespace of such a rank.
"""
import ctypes
import errno
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from common import checkpoint, distributed, tensor_files
from core import watchdog
from tests.helpers import chats
from tests.helpers.system_calls import refuse
from tests.helpers.students import run_trainer
from tests.helpers.trainer import speech_main, trainer_arguments

NO_NAMESPACE = 77       # exit status of a rank that may not have one
CLONE_NEWNS = 0x20000   # sched.h


def own_mounts():
    """From now on what this process mounts is seen by nobody else."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        print(f"no mount namespace: {os.strerror(ctypes.get_errno())}", flush=True)
        os._exit(NO_NAMESPACE)
    mount("--make-rprivate", "/")


def mount(*words):
    done = subprocess.run(["mount", *words], text=True, capture_output=True)
    if done.returncode:
        print(f"no mount in a namespace: {' '.join(done.stderr.split())}", flush=True)
        os._exit(NO_NAMESPACE)


def with_a_disk(size, folder, main, *argv):
    """size: KiB."""
    own_mounts()
    mount("-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder)
    call(main, argv)


def with_read_only(folder, main, *argv):
    """The folder becomes read-only when there is something in it and one more file is about to be written there."""
    files = []

    def change(event, words):
        if event == "open" and str(words[0]).startswith(folder) and words[2] & (os.O_WRONLY | os.O_RDWR):
            files.append(words[0])
            if len(files) == 2:
                mount("--bind", folder, folder)
                mount("-o", "remount,bind,ro", folder)
    own_mounts()
    sys.addaudithook(change)
    call(main, argv)


def with_temporary_files_in(folder, main, *argv):
    tempfile.tempdir = folder
    call(main, argv)


def with_a_bad_disk(error, main, *argv):
    """Nothing can be made sure to be on disk."""
    try:
        refuse("fsync", error)
    except OSError as why:
        print(f"no filter of system calls: {why}", flush=True)
        os._exit(NO_NAMESPACE)
    call(main, argv)


def save_on_a_full_disk(folder, name):
    """One of a checkpoint's files, of 4 MB."""
    own_mounts()
    mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", folder)
    state = torch.zeros(10**6)
    write = checkpoint.pickled(state) if name == "rng.pt" else lambda path: tensor_files.save({"state": state}, path)
    with distributed.one_clear_error():
        checkpoint.write_files(Path(folder), {name: write})


def call_main(main, *argv):
    call(main, argv)


def call(main, argv):
    if main == "distill.train_sft":
        return run_trainer(list(argv))
    if main == "train_v2_ddp":
        return speech_main(list(argv))
    importlib.import_module(main).main(list(argv))


def error_of(pool, function, *args, ranks=1):
    """The one line that a trainer ends with; nobody else prints an error, and no traceback is shown."""
    statuses, output = pool.run(ranks, f"{__name__}.{function}", *args)
    if NO_NAMESPACE in statuses:
        pytest.skip(re.search("^no .*", output, re.M)[0])
    assert set(statuses) == {1} and "Traceback" not in output, output
    line, = re.findall("^error: .*", output, re.M)
    return line


@pytest.fixture(scope="module")
def command(tiny, tmp_path_factory):
    """command(trainer, loader processes) -> its arguments. A batch takes about a MiB."""
    root = tmp_path_factory.mktemp("limits")
    kinds = {
        "train_v2_ddp": trainer_arguments(tiny, root / "speech", "--use_lora", "--max_tokens_per_batch", 32768),
        "distill.train_sft": [
            "--model_path", chats.student(root / "student"), "--train_data_file",
            chats.write(root / "chats.jsonl", chats.conversations(24)), "--output_dir", root / "chats",
            "--max_tokens_per_batch", 65536],
        "diffusion.train_bd3lm": ["--demo", 300, "--model_size", "nano", "--output_dir", root / "blocks",
                                  "--per_device_train_batch_size", 32]}
    more = ("--report_to", "none", "--logging_dir", root / "logs", "--num_workers")
    return lambda trainer, workers: [str(word) for word in (*kinds[trainer], *more, workers)]


TRAINERS = ["train_v2_ddp", "distill.train_sft", "diffusion.train_bd3lm"]


@pytest.mark.parametrize("size, trainer", [(4, TRAINERS[0]), (256, TRAINERS[0]), (256, TRAINERS[1])])
def test_a_full_dev_shm(pool, command, size, trainer):
    """Of so many KiB: there is no room for a semaphore, or none for a batch."""
    line = error_of(pool, "with_a_disk", size, "/dev/shm", trainer, *command(trainer, 1))
    assert line.startswith("error: /dev/shm is full, ") and "--shm-size" in line and "--num_workers 0" in line


@pytest.mark.slow
def test_a_full_disk_of_tensorboard(pool, tiny, tmp_path):
    """Its own thread writes, and would print a traceback."""
    (tmp_path / "logs").mkdir()
    line = error_of(pool, "with_a_disk", 16, str(tmp_path / "logs"), "train_v2_ddp", *trainer_arguments(
        tiny, tmp_path / "out", "--use_lora", "--report_to", "tensorboard", "--logging_dir", tmp_path / "logs"))
    assert line == f"error: {tmp_path}/logs/out cannot be written (No space left on device)"


@pytest.mark.parametrize("name", ["rng.pt", "model.safetensors"])
def test_a_full_disk_names_the_file_of_a_checkpoint(pool, tmp_path, name):
    line = error_of(pool, "save_on_a_full_disk", str(tmp_path), name)
    assert line.startswith(f"error: {tmp_path}/{name} cannot be written (") and "No space left on device" in line


@pytest.mark.parametrize("error", [errno.EIO, errno.ETIMEDOUT])
def test_a_disk_that_does_not_answer(pool, command, error):
    """While it writes; the error of fsync has no file's name."""
    line = error_of(pool, "with_a_bad_disk", error, "distill.train_sft", *command("distill.train_sft", 0))
    assert re.fullmatch(rf"error: /\S+/chats/run.yaml\b.* \(?{os.strerror(error)}\)?", line)


def test_a_list_that_cannot_be_read(pool, tiny, tmp_path):
    """/proc/self/mem is a file whose first bytes are an I/O error."""
    (tmp_path / "train.json").symlink_to("/proc/self/mem")
    line = error_of(pool, "call_main", "train_v2_ddp", *trainer_arguments(
        tiny, tmp_path / "out", "--use_lora", "--train_data_file", tmp_path / "train.json"))
    assert line.startswith("error: ") and f"{tmp_path}/train.json" in line and "Input/output error" in line


@pytest.mark.parametrize("name", ["run.yaml", "requeue"])
def test_a_folder_in_the_place_of_a_file(tmp_path, capsys, name):
    (tmp_path / name).mkdir()
    with pytest.raises(SystemExit), distributed.one_clear_error():
        if name == "requeue":
            watchdog.clear_marker(tmp_path)
        checkpoint.write_atomically(tmp_path / name, lambda path: path.write_text(""))
    assert capsys.readouterr().err == f"error: {tmp_path}/{name} is a folder, not a file; move it away\n"


def test_a_code_cache_that_becomes_read_only(pool, tiny, tmp_path):
    (tmp_path / "codes").mkdir()
    line = error_of(pool, "with_read_only", str(tmp_path / "codes"), "train_v2_ddp", *trainer_arguments(
        tiny, tmp_path / "out", "--use_lora", "--code_cache", tmp_path / "codes"))
    assert str(tmp_path / "codes") in line and "Read-only file system" in line


def test_a_long_path_of_temporary_files(pool, command, tmp_path):
    folder, trainer = tmp_path / ("long" * 20), TRAINERS[0]
    folder.mkdir()
    line = error_of(pool, "with_temporary_files_in", str(folder), trainer, *command(trainer, 1))
    assert line == f"error: {folder}: too long a path for the sockets of processes; set TMPDIR to a shorter one"
