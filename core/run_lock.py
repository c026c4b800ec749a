"""One process at a time owns a folder: an output folder, a code cache in the making, a journal.

The owner holds an exclusive flock on FOLDER/NAME.lock, which the kernel drops when the process
ends, whatever ends it. The file names the owner, and stays. Standard library only.
"""
import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from core.cli import UserError, notice, printable

WAIT_S = 3              # a run that is restarted at once waits for ranks that are about to end
LEASE_S = 120           # a file server keeps the locks of a node that is gone for about 90 s
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

_held = {}              # {path of a lock: file descriptor} of this process


class RunLock(contextlib.AbstractContextManager):
    """This process's hold on a folder. Ends with release(), a `with`, or the process."""

    def __init__(self, path):
        self.path = path

    def release(self):
        if self.path in _held:
            os.close(_held.pop(self.path))

    def __exit__(self, *error):
        self.release()


def acquire(folder, flag="--output_dir", name="run", wait_s=None, waiting=None):
    """Own a folder from now on -> RunLock. UserError when another process still owns it after
    wait_s seconds, OSError when it cannot be written. flag: names it in the message. waiting:
    called again and again meanwhile; it may raise.
    """
    path = Path(folder) / f"{name}.lock"
    RunLock(path).release()         # of an earlier run of this process
    fd = wait_for(lambda: try_lock(path), path, flag, wait_s, waiting)
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    words = f"host {socket.gethostname()}, process {os.getpid()}, started {now}\n".encode()
    with contextlib.suppress(OSError):      # another user's file: may be locked, but not written
        os.fchmod(fd, os.stat(path.parent).st_mode & 0o666)     # who may use the folder may lock it
        os.ftruncate(fd, os.pwrite(fd, words, 0))
    _held[path] = fd
    return RunLock(path)


def check_free(folder, flag="--output_dir", name="run"):
    """UserError when another process owns a folder, and keeps it. Makes no file."""
    path = Path(folder) / f"{name}.lock"
    if path not in _held:
        with contextlib.suppress(OSError):      # no such file, or acquire names the error
            os.close(wait_for(lambda: try_lock(path, make=False), path, flag))


def wait_for(attempt, path, flag, wait_s=None, waiting=None):
    """What attempt() returns once it is not None. UserError when that takes too long: wait_s, or
    WAIT_S, or LEASE_S in a job that Slurm has queued again, which may have lost its node.
    """
    if wait_s is None:
        wait_s = WAIT_S if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else LEASE_S
    notified, end = False, time.monotonic() + wait_s
    while (fd := attempt()) is None:
        if time.monotonic() >= end:
            raise UserError(f"{flag} {path.parent}: another run is using it ({owner_of(path)}); "
                            f"end that one, or give another {flag}")
        if not notified and end - time.monotonic() > WAIT_S:
            print(f"waiting    another run is using {path.parent} ({owner_of(path)})", flush=True)
            notified = True
        if waiting:
            waiting()
        time.sleep(0.2)
    return fd


def try_lock(path, make=True):
    """Descriptor of the locked file, or None while another process has the lock. make: make the
    file and lock it for this process alone; else only see whether that would work.
    """
    fd = open_lock(path, make)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if make else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):        # the latter: removed since it was opened
        pass
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        if make:
            notice(f"{path}: this file system has no locks: start no second run in that folder")
        return fd
    os.close(fd)
    return None


def open_lock(path, make=False):
    """Descriptor of a lock's file. Raises OSError, and UserError where its name is not a file's."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW        # to open a pipe could hang
    wrong = UserError(f"{path}: is not a file; move it away, a run locks a file of this name")
    try:
        fd = os.open(path, flags | (os.O_RDWR | os.O_CREAT if make else os.O_RDONLY), 0o666)
    except PermissionError:     # another user's file, which may be locked all the same
        if not os.path.lexists(path):
            raise
        fd = os.open(path, flags | os.O_RDONLY)
    except OSError as error:
        raise wrong if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO) else error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise wrong
    return fd


def owner_of(path):
    """Host, process and start of a lock's owner, in words."""
    with contextlib.suppress(OSError), open(open_lock(path), "rb") as file:
        if words := file.read(500).strip():
            return printable(words.decode(errors="replace"))
    return f"a process that {path} does not name"


def _forget():
    for fd in _held.values():
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget)     # else the lock would last as long as any child
