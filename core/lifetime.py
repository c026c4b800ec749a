"""Child processes die with their parent, even on SIGKILL.

A rank ends with its torchrun, even before torch is imported; a loader process ends with its
trainer, and a command with the process that called start(). They poll the parent's process id: when
a process ends, the kernel gives its children another parent. A pipe would not work, since every
fork inherits both of its ends. Threads of the parent may end at any time. Standard library only.
"""
import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

POLL_S = 0.5        # seconds between two looks at the parent
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)      # save and stop
PR_SET_PDEATHSIG = 1        # prctl(2): send a signal when the thread that forked us ends
BETWEEN = "import runpy, sys; runpy.run_path(sys.argv[1])['between'](*sys.argv[2:])"

_requested = []     # names of received SIGNALS


def catch_signals():
    """From now on SIGNALS are recorded and do not end the process."""
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _requested.append(signal.Signals(number).name))


def stop_requested():
    """Name of the first signal that asked this process to stop, or None."""
    return _requested[0] if _requested else None


def start(command, **options):
    """subprocess.Popen of a command (list) that ends with this process, together with all processes
    of its group. options: of Popen. OSError if there is no such program."""
    if shutil.which(command[0]) is None:
        raise OSError(f"{command[0]}: no such program")
    first = [sys.executable, "-IS", "-c", BETWEEN, __file__, str(os.getpid())]
    return subprocess.Popen([*first, *command], process_group=0, **options)


def end(process):
    """Kill a process of start() and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def between(parent, *command):
    """Run the command of start() in a child process; kill both when the parent ends."""
    process = subprocess.Popen(command)
    while os.getppid() == int(parent):
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(POLL_S)
            sys.exit(status if status >= 0 else 128 - status)       # for a signal, like a shell
    os.killpg(0, signal.SIGKILL)


def end_with_trainer():
    """Call this in a loader process, which the trainer's main thread has forked."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != multiprocessing.parent_process().pid:    # the trainer has already ended
        os._exit(1)


def end_with_torchrun():
    """End this process when its torchrun ends. Every script calls this first."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")       # no stack traces of a lost store
    parent = os.getppid()
    if is_adopted(parent):
        parent = None

    def watch():
        while os.getppid() == parent:
            time.sleep(POLL_S)
        if os.environ.get("LOCAL_RANK", "0") == "0":        # one message per node, at the end
            time.sleep(2 * POLL_S)
            threading.Timer(POLL_S, os._exit, [1]).start()      # write() blocks on a full pipe
            with contextlib.suppress(OSError):
                os.write(2, b"\nerror: torchrun has ended; its ranks end with it\n")
        os._exit(1)

    # threads of a stopped process do not run: SIGCONT resumes it, so that it can end
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=watch, daemon=True).start()


def is_adopted(parent):
    """True if torchrun has already ended, so `parent` is another program: no Python script."""
    try:
        program = os.readlink(f"/proc/{parent}/exe")
        env = Path(f"/proc/{parent}/environ").read_bytes()
    except OSError:     # a process of another user
        return parent == 1
    return "python" not in os.path.basename(program) and b"TORCHELASTIC_RUN_ID=" not in env
