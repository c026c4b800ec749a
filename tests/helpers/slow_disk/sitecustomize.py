"""A disk that takes SLOW_DISK_S seconds to sync each file of a checkpoint that is being written; only
that of SLOW_RANK where that is set.

Python imports this file at its start when its folder is on PYTHONPATH; a process that is forked later runs it.
"""
import os
import time

PAUSE_S, sync = float(os.environ["SLOW_DISK_S"]), os.fsync


def slow_sync(fd):
    path = os.readlink(f"/proc/self/fd/{fd}")
    if "/checkpoint-" in path and ".tmp" in path and os.path.isfile(path):
        time.sleep(PAUSE_S)
    sync(fd)


if os.environ.get("SLOW_RANK") in (None, os.environ.get("RANK")):
    os.fsync = slow_sync
