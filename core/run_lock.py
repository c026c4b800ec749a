"""One process at a time owns a folder: an output folder, a code cache in the making, a journal.

The owner holds an exclusive flock on FOLDER/NAME.lock, which the kernel drops when the process
ends, whatever ends it. The file says who that is, and stays. Standard library only.
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

NAME = "run"            # of an output folder's lock
WAIT_S = 3              # a run that is restarted at once waits for ranks that are about to end
LEASE_S = 120           # a file server keeps the locks of a node that is gone for about 90 s
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

_held = {}              # {path of a lock: file descriptor} of this process


class RunLock:
    """This process's hold on a folder. Ends with release(), a `with`, or the process."""

    def __init__(self, path):
        self.path = path

    def release(self):
        """The folder is free from here on."""
        if self.path in _held:
            os.close(_held.pop(self.path))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.release()


def acquire(folder, flag="--output_dir", name=NAME, wait_s=None, waiting=None):
    """Own a folder from now on -> RunLock. Raises UserError while another process owns it, after
    wait_s seconds (default: patience()), and OSError when the folder cannot be written.

    flag: that gave the folder, for the message. name: of the lock, where parts of a folder have
    owners. waiting: called again and again meanwhile, and may raise.
    """
    path, told = Path(folder) / f"{name}.lock", False
    RunLock(path).release()         # of an earlier run of this process
    end = time.monotonic() + (patience() if wait_s is None else wait_s)
    while (fd := try_lock(path)) is None:
        if time.monotonic() >= end:
            raise in_use(path, flag)
        if not told and end - time.monotonic() > WAIT_S:
            print(f"waiting    another run is using {folder} ({owner_of(path)})", flush=True)
            told = True
        if waiting:
            waiting()
        time.sleep(0.2)
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    words = f"host {socket.gethostname()}, process {os.getpid()}, started {now}\n".encode()
    with contextlib.suppress(OSError):      # another user's file: may be locked, but not written
        os.fchmod(fd, os.stat(path.parent).st_mode & 0o666)     # who may use the folder may lock it
        os.ftruncate(fd, os.pwrite(fd, words, 0))
    _held[path] = fd
    return RunLock(path)


def check_free(folder, flag="--output_dir", name=NAME):
    """Raise UserError while another process owns a folder, after patience(). Makes no file."""
    path, end = Path(folder) / f"{name}.lock", time.monotonic() + patience()
    while path not in _held:
        try:
            fd = try_lock(path, make=False)
        except OSError:         # there is none, or acquire will say what is wrong
            return
        if fd is not None:
            os.close(fd)
            return
        if time.monotonic() >= end:
            raise in_use(path, flag)
        time.sleep(0.2)


def patience():
    """Seconds to wait for an owner that is about to end.

    A job that Slurm has queued again may have lost its node, whose locks the file server keeps.
    """
    return LEASE_S if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else WAIT_S


def try_lock(path, make=True):
    """Descriptor of a locked file, or None while another process has the lock. See open_lock.

    make: make the file if need be, and lock it for this process alone; else it is only looked
    whether that could be done.
    """
    fd = open_lock(path, make)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if make else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):        # removed since it was opened
        pass
    except OSError as error:
        if error.errno in NO_LOCKS:
            if make:
                notice(f"{path}: this file system has no locks: start no second run in that folder")
            return fd
        os.close(fd)
        raise
    os.close(fd)
    return None


def open_lock(path, make=False):
    """Descriptor of a lock's file. Raises OSError, and UserError where its name is not a file's."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW        # to open a pipe could hang
    wrong = UserError(f"{path}: is not a file; move it away, a run locks a file of this name")
    try:
        fd = os.open(path, flags | (os.O_RDWR | os.O_CREAT if make else os.O_RDONLY), 0o666)
    except PermissionError:     # another user's, who may own the folder now and then, too
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


def in_use(path, flag):
    """The UserError of a folder that has an owner. path: of its lock."""
    return UserError(f"{flag} {path.parent}: another run is using it ({owner_of(path)}); "
                     f"end that one, or give another {flag}")


def _forget():
    for fd in _held.values():
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget)     # else the lock would last as long as any child
