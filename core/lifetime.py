"""Signals that ask a run to stop; a rank ends with its torchrun. Standard library only."""
import ctypes
import signal

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


def end_with_parent():
    """From now on the kernel kills this process when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
