"""Waiting for other processes: limits are about progress, so that a busy machine does not turn a test red."""
import contextlib
import time
from pathlib import Path

PATIENCE_S = 600    # without any sign of progress; a working process makes progress even at load 20


def wait_until(ready, event, alive=None, progress=None, seconds=PATIENCE_S, every=0.02):
    """Wait until ready() is true; returns its value. event: for the message. alive: False if ready() cannot come true.
    progress: its value must change within `seconds`; without it, ready() must be true within them."""
    seen, end, began = None, time.monotonic() + seconds, time.process_time()
    while not (value := ready()):
        if progress is not None and (now := progress()) != seen:
            seen, end = now, time.monotonic() + seconds
        assert alive is None or alive() or ready(), f"no {event}, and the process has ended\n{str(seen)[-4000:]}"
        assert time.monotonic() < end, f"no {event}, and no progress in {seconds} s\n{str(seen)[-4000:]}"
        time.sleep(max(every, 9 * (time.process_time() - began)))      # a look takes no CPU from what it waits for
        began = time.process_time()
    return value


def in_sessions(*leaders):
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):          # gone, or another user's
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if {int(session), int(folder.name)} & set(leaders) and state != "Z":
                pids.append(int(folder.name))
    return pids


def children(pid):
    pids = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):      # the thread has ended
            pids |= set(map(int, (task / "children").read_text().split()))
    return pids
