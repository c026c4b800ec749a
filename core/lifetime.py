"""Processes that end with the one that started them, however that one ends; kill -9 included.

A rank ends with its torchrun, from before torch is imported on; a loader process ends with its
trainer, and a command with the process that start()ed it. A thread asks for the parent's number:
when a process ends, the kernel gives its children another parent. It needs no pipe, whose ends
every fork would inherit, and a parent's threads may come and go. A process that is stopped runs no
thread: the kernel sends it a signal when the thread that started it ends. Standard library only.
"""
import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
import time

POLL_S = 0.5        # seconds between two looks at the parent
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)      # save and stop
PR_SET_PDEATHSIG = 1        # of prctl(2)
LIBC = ctypes.CDLL(None)

_requested = []     # names of SIGNALS that came


def catch_signals():
    """From now on SIGNALS are noted instead of killing; more of them are harmless."""
    for number in SIGNALS:
        signal.signal(number, lambda came, frame: _requested.append(signal.Signals(came).name))


def stop_requested():
    """Name of the first signal that asked this process to stop, or None."""
    return _requested[0] if _requested else None


def _ask_kernel(number):
    """This process gets signal `number` when the thread that started it ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)


def start(command, **options):
    """subprocess.Popen of a command (list) that ends with this process. options: of Popen."""
    return subprocess.Popen(command, process_group=0,
                            preexec_fn=lambda: _ask_kernel(signal.SIGKILL), **options)


def end(process):
    """End what start() has started, with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_with_trainer():
    """To be called by a loader process, which the trainer's main thread has forked."""
    _ask_kernel(signal.SIGKILL)
    if os.getppid() != multiprocessing.parent_process().pid:    # it has ended since the fork
        os._exit(1)


def end_with_torchrun():
    """To be called by every script, first of all; for a process that torchrun has started."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # no stacks of a store that is gone
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        _ask_kernel(signal.SIGCONT)     # a process that is stopped goes on, to its end
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="lifetime").start()


def _watch(parent):
    while os.getppid() == parent:
        time.sleep(POLL_S)
    _end_rank()


def _end_rank():
    """Say so, as the last line: without what torch's threads say of a store that is gone."""
    if os.environ.get("LOCAL_RANK", "0") == "0":        # one a node
        terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        time.sleep(2 * POLL_S)      # the node's other ranks have looked and ended by then
        threading.Timer(POLL_S, os._exit, [1]).start()      # nobody may read the pipe
        with contextlib.suppress(OSError):      # a progress bar may stand on the line
            os.write(terminal, b"\nerror: torchrun has ended; its ranks end with it\n")
    os._exit(1)
