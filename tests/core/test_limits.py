"""A full /dev/shm is one line that names it, in a mount namespace of a rank that trains for real."""
import ctypes
import os
import re
import subprocess

import pytest

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
