"""Processes that end with the one that started them, however that one ends; kill -9 included.

A rank ends with its torchrun, from before torch is imported on; a loader process ends with its trainer. A thread asks
for the parent's number: when a process ends, the kernel gives its children another parent. It needs no pipe, whose ends
every fork would inherit, and a parent's threads may come and go. Standard library only.
"""
import contextlib
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
        if words and first_on_node():
            with contextlib.suppress(OSError):
                _last_line(words)
        os._exit(1)
    threading.Thread(target=watch, daemon=True, name="lifetime").start()


def _last_line(words):
    """Print a line of its own, behind which nothing comes: not what torch's threads say of a store that is gone."""
    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    time.sleep(2 * POLL_S)      # the node's other ranks have looked and ended by then; this one must live until they have
    threading.Timer(POLL_S, os._exit, [1]).start()      # nobody may read the pipe
    os.write(terminal, f"\n{words}\n".encode())         # in one piece; there may be a progress bar on the line


def end_with_trainer():
    """To be called by a loader process."""
    end_with(multiprocessing.parent_process().pid)      # noted before the fork: the parent may have ended since


def end_with_torchrun():
    """To be called by every script, first of all. Does nothing in a process that torchrun has not started.

    Torchrun itself may have lost its parent, as under nohup.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")       # no stacks of a store that is gone
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
