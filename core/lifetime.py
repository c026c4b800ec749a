"""Child processes die with their parent, even on SIGKILL.

A rank ends with its torchrun, even before torch is imported; a loader process ends with its
trainer. A rank polls its parent's process id: when a process ends, the kernel gives its children
another parent. Standard library only.
"""
import contextlib
import ctypes
import os
import signal
import threading
import time

POLL_S = 0.5        # seconds between two looks at the parent
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)      # save and stop
PR_SET_PDEATHSIG = 1        # prctl(2): send a signal when the thread that forked us ends

_requested = []     # names of received SIGNALS


def catch_signals():
    """From now on SIGNALS are recorded and do not end the process."""
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _requested.append(signal.Signals(number).name))


def stop_requested():
    """Name of the first signal that asked this process to stop, or None."""
    return _requested[0] if _requested else None


def end_with_torchrun():
    """End this process when its torchrun ends. Every script calls this first."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")       # no stack traces of a lost store
    parent = os.getppid()

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
