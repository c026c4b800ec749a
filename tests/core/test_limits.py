"""A full /dev/shm is one line that names it, in a mount namespace of a rank that trains for real."""
import ctypes
import os
import re
import subprocess

import pytest

from tests.helpers.trainer import speech_main, trainer_arguments

NO_NAMESPACE = 77       # exit status of a rank that may not have one
CLONE_NEWNS = 0x20000   # sched.h


def with_a_disk(size, *argv):
    """A run whose /dev/shm, which nobody else sees, has `size` KiB."""
    made = not ctypes.CDLL(None).unshare(CLONE_NEWNS)
    for words in ("--make-rprivate /", f"-t tmpfs -o size={size}k tmpfs /dev/shm"):
        made = made and not subprocess.run(["mount", *words.split()]).returncode
    if not made:
        os._exit(NO_NAMESPACE)
    speech_main(list(argv))


def test_a_full_dev_shm(pool, tiny, tmp_path):
    """4 KiB have no room for a semaphore; a batch of about a MiB needs none there."""
    argv = trainer_arguments(tiny, tmp_path / "out", "--use_lora", "--max_tokens_per_batch", 32768, "--max_steps", 1)
    statuses, output = pool.run(1, f"{__name__}.with_a_disk", 4, *argv)
    if NO_NAMESPACE in statuses:
        pytest.skip("no mount namespace here")
    assert set(statuses) == {1} and "Traceback" not in output, output
    line, = re.findall("^error: .*", output, re.M)
    assert line.startswith("error: /dev/shm is full; ") and "--shm-size" in line and "--num_workers 0" in line
    assert pool.run(1, f"{__name__}.with_a_disk", 256, *argv)[0] == [0]
