"""What the machine lacks is one line that names it: full disks, a disk that does not answer, read-only folders.

The trainers run for real, in ranks of the pool; disks and folders are changed in a mount namespace of such a rank.
"""
import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from core import checkpoint, dist, tensor_io
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


def with_a_disk(size, folder, *argv):
    """size: KiB."""
    own_mounts()
    mount("-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder)
    speech_main(list(argv))


def save_on_a_full_disk(folder, name):
    """One of a checkpoint's files, of 4 MB."""
    own_mounts()
    mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", folder)
    dist.single_process()
    state = torch.zeros(10**6)
    data = checkpoint.pickled(state)
    write = (lambda path: path.write_bytes(data)) if name == "rng.pt" else next(iter(
        tensor_io.stage(dist.World(device=torch.device("cpu")), "model", {"state": torch.nn.Parameter(state)}).values()))
    checkpoint.write_files(Path(folder), {name: write})


def error_of(pool, function, *args, ranks=1):
    """The one line that a trainer ends with; nobody else prints an error, and no traceback is shown."""
    statuses, output = pool.run(ranks, f"{__name__}.{function}", *args)
    if NO_NAMESPACE in statuses:
        pytest.skip(re.search("^no .*", output, re.M)[0])
    assert set(statuses) == {1} and "Traceback" not in output, output
    line, = re.findall("^error: .*", output, re.M)
    return line


def test_a_full_dev_shm(pool, tiny, tmp_path):
    """4 KiB have no room for a semaphore; a batch of about a MiB needs none there."""
    argv = trainer_arguments(tiny, tmp_path / "out", "--use_lora", "--max_tokens_per_batch", 32768, "--max_steps", 1)
    line = error_of(pool, "with_a_disk", 4, "/dev/shm", *argv)
    assert (pool.run(1, f"{__name__}.with_a_disk", 256, "/dev/shm", *argv)[0]) == [0]
    assert line.startswith("error: /dev/shm is full; ") and "--shm-size" in line and "--num_workers 0" in line


@pytest.mark.parametrize("name", ["rng.pt", "model.safetensors"])
def test_a_full_disk_names_the_file_of_a_checkpoint(pool, tmp_path, name):
    line = error_of(pool, "save_on_a_full_disk", str(tmp_path), name)
    assert f"{tmp_path}/{name}" in line and "No space left on device" in line
