"""A real training rank in a mount namespace with a small /dev/shm."""
import ctypes
import os
import subprocess

import pytest

from tests.helpers.trainer import speech_main, trainer_arguments

NO_NAMESPACE = 77       # exit status of a rank without permission for a namespace
CLONE_NEWNS = 0x20000   # sched.h


def with_a_small_disk(*argv):
    """Train with a private /dev/shm of 256 KiB."""
    mounted = not ctypes.CDLL(None).unshare(CLONE_NEWNS)
    for words in ("--make-rprivate /", "-t tmpfs -o size=256k tmpfs /dev/shm"):
        mounted = mounted and not subprocess.run(["mount", *words.split()]).returncode
    if not mounted:
        os._exit(NO_NAMESPACE)
    speech_main(list(argv))


def test_batches_need_no_shared_memory(pool, tiny, tmp_path):
    """A batch has about 1 MiB; the semaphores of data preparation need a few KiB."""
    argv = trainer_arguments(tiny, tmp_path / "out", "--use_lora", "--max_tokens_per_batch", 32768, "--max_steps", 1)
    statuses, output = pool.run(1, f"{__name__}.with_a_small_disk", *argv)
    if NO_NAMESPACE in statuses:
        pytest.skip("no mount namespace here")
    assert statuses == [0], output
