"""Processes that end with the one that started them, however that one ends; kill -9 included.

A rank ends with its torchrun, from before torch is imported on; a loader process ends with its trainer. A thread asks
for the parent's number: when a process ends, the kernel gives its children another parent. It needs no pipe, whose ends
every fork would inherit, and a parent's threads may come and go. Standard library only.
"""
import multiprocessing
import os
import socket
import sys
import threading
import time
from pathlib import Path

POLL_S = 0.5        # seconds between two looks at the parent

_name = []          # the socket of first_on_node
_asking = threading.Lock()


def end_with(parent, words=""):
    """From now on this process ends, with status 1, when `parent` is not its parent process any more.

    parent: process number. words: what one of the node's ranks prints then.
    """
    def watch():
        while os.getppid() == parent:
            time.sleep(POLL_S)
        if words and first_on_node():       # until its end, by when the other ranks have looked as well
            threading.Timer(2 * POLL_S, os._exit, [1]).start()      # not behind the line: nobody may read the pipe
            print(f"\n{words}", file=sys.stderr, flush=True)        # there may be a progress bar on the line
        else:
            os._exit(1)
    threading.Thread(target=watch, daemon=True, name="lifetime").start()


def end_with_trainer():
    """To be called by a loader process."""
    end_with(multiprocessing.parent_process().pid)      # noted before the fork: the parent may have ended since


def end_with_torchrun():
    """To be called by every script, first of all. Does nothing in a process that torchrun has not started.

    Torchrun itself may have lost its parent, as under nohup.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        end_with(None if is_adopted(parent) else parent, "error: torchrun has ended; its ranks end with it")


def is_adopted(parent):
    """True when torchrun ended before this rank could ask: `parent` is neither Python nor a script between the two."""
    try:
        program, env = os.readlink(f"/proc/{parent}/exe"), Path(f"/proc/{parent}/environ").read_bytes()
    except OSError:     # another user's
        return parent == 1
    return "python" not in os.path.basename(program) and b"TORCHELASTIC_RUN_ID=" not in env


def first_on_node():
    """True in the first of a run's ranks on this node that asks, as long as it lives. It needs no other process."""
    with _asking:
        if not _name:
            name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:        # a name without a file, which Linux gives to one process at a time
                name.bind("\0flat-trainers {MASTER_ADDR} {MASTER_PORT}".format(**os.environ))
            except OSError:
                return False
            _name.append(name)
        return True
