"""One process at a time owns a folder, and a dead one owns nothing: output folders, the code cache, label journals.

FOLDER/owner-<n> names host, process and start of owner n. It is made with O_EXCL, the highest n counts, and no n is
used twice, so of several newcomers one wins. Its modification time is the heartbeat, set every BEAT_S; 1970 says that
the owner has ended. The owner also holds a flock on it, which no child inherits. An owner that finds a higher n was
taken for dead, and has lost the folder. Why this holds on NFS: docs/reliability.md. Standard library only.
"""
import atexit
import contextlib
import fcntl
import json
import os
import re
import socket
import tempfile
import threading
import time
from pathlib import Path

from common.flags import UserError

BEAT_S = 10             # between two heartbeats
YOUNG_S = 2 * BEAT_S    # a heartbeat as young as this shows a living owner
DEAD_S = 60             # an owner on another host without a heartbeat for so long is dead,
WATCH_S = 15            # if none comes meanwhile either: the clocks of two hosts may differ
LAST_S = 3              # a run that is restarted at once waits so long for ranks that are about to end

KINDS = {"host": str, "boot": str, "namespace": str, "pid": int, "start": int, "started": str, "slurm_job": str,
         "slurm_restart": int, "locked": bool}      # of an owner's file

_held = []              # Owners that this process is


def start_of(pid):
    """When a process was started, in clock ticks since boot; 0: it is gone, None: it is there, but /proc hides it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if stat[0] in "ZX" else int(stat[19])
    except (OSError, IndexError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return 0
        except (OSError, OverflowError):
            pass
        return None


def this_process():
    """What tells this process from every other, as it stands in an owner's file."""
    def read(what, path):
        try:
            return what(path).strip()
        except OSError:
            return ""
    env, now = os.environ, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    job, restart = env.get("SLURM_JOB_ID", ""), env.get("SLURM_RESTART_COUNT", "0")
    return {"host": socket.gethostname(), "boot": read(Path.read_text, Path("/proc/sys/kernel/random/boot_id")),
            "namespace": read(os.readlink, "/proc/self/ns/pid"), "pid": os.getpid(),
            "start": start_of(os.getpid()) or 0, "started": now,
            "slurm_job": job and f"{env.get('SLURM_CLUSTER_NAME', '')}/{job}",
            "slurm_restart": int(restart) if restart.isdigit() else 0, "locked": False}


# ---------------------------------------------------------------------------------------------------------------------
# What can be seen of an owner


def numbers(folder, name):
    """Every n of which there is an owner's file. Raises OSError."""
    found = (re.fullmatch(rf"{re.escape(name)}-(\d+)", entry) for entry in os.listdir(folder))
    return [int(match[1]) for match in found if match]


def newest(folder, name):
    """(n, path) of the owner that counts; (0, None) where there was never one. Raises OSError."""
    number = max(numbers(folder, name), default=0)
    return (number, Path(folder) / f"{name}-{number}") if number else (0, None)


def read(path):
    """(what an owner's file says or {}, its heartbeat in s). Raises OSError when it cannot be looked at."""
    try:
        with open(path) as file:        # opening it asks an NFS server for its date
            text, beat = file.read(), os.fstat(file.fileno()).st_mtime
        about = json.loads(text)
    except PermissionError:             # another user's
        return {}, os.stat(path).st_mtime
    except ValueError:                  # made by a process that was killed at once
        return {}, beat
    whole = isinstance(about, dict) and all(type(about.get(key)) is kind for key, kind in KINDS.items())
    return (about if whole else {}), beat


def lives(about, path):
    """Whether an owner lives: True or False where Slurm or this host's kernel knows, else None."""
    me = this_process()
    if not about:
        return None
    if me["slurm_job"] and me["slurm_job"] == about["slurm_job"] and me["slurm_restart"] > about["slurm_restart"]:
        return False
    if not me["boot"] or me["boot"] != about["boot"]:
        return None
    if me["host"] == about["host"] and me["namespace"] == about["namespace"]:
        start = start_of(about["pid"])
        if about["start"] and start is not None:
            return start == about["start"]
    return is_locked(path) if about["locked"] else None     # another container, or a hidden process


def is_locked(path):
    """Whether a process holds the flock of an owner's file; None where that cannot be asked."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None


def storage_time(folder):
    """Now, in seconds, by the clock that dates the files of a folder: on NFS that of the server."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime


class Sight:
    """What a newcomer has seen of an owner since its first look."""

    def __init__(self, path):
        self.path, self.beat, self.since = path, None, time.monotonic()

    def look(self):
        """True: the owner lives. False: it is dead or has ended. None: not known yet, look again."""
        about, beat = read(self.path)
        if beat == 0:
            return False
        if (known := lives(about, self.path)) is not None:
            return known
        if beat != self.beat:
            changed = self.beat is not None
            self.beat, self.since = beat, time.monotonic()
            if changed:
                return True
        age, watched = storage_time(self.path.parent) - beat, time.monotonic() - self.since
        if about and -BEAT_S < age < YOUNG_S:       # named by now; a date in the future would stay young
            return True
        return False if watched > DEAD_S or age > DEAD_S and watched > WATCH_S else None


def describe(path):
    """Host, process and start of an owner, in words."""
    try:
        about, _ = read(path)
    except OSError:
        about = {}
    return f"host {about['host']}, process {about['pid']}, started {about['started']}" if about else \
        f"a process that {path} does not name"


# ---------------------------------------------------------------------------------------------------------------------
# Owning


class Owner:
    """This process's hold on a folder; a thread sets the heartbeat. Ends with release(), a `with`, or the process."""

    def __init__(self, folder, name, number, file, about, lost):
        self.folder, self.name, self.number, self.file, self.about, self.lost = folder, name, number, file, about, lost
        self.path, self.lock, self.ended = folder / f"{name}-{number}", threading.Lock(), threading.Event()
        _held.append(self)
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def check(self):
        """Raise UserError when a newcomer has taken this owner for dead; OSError when the folder cannot be read."""
        number, path = newest(self.folder, self.name)
        if number > self.number:
            raise UserError(f"{self.folder}: taken over by another run ({describe(path)}), as this one had given no "
                            f"sign of life for {DEAD_S} s; it ends")

    def _beat(self):
        while not self.ended.wait(BEAT_S):
            try:
                self.check()
                with self.lock:
                    if not self.ended.is_set():
                        os.utime(self.path)
            except UserError as why:
                if self.lost:
                    self.lost(str(why))
                return
            except FileNotFoundError:       # somebody tidied up
                with self.lock, contextlib.suppress(OSError):
                    if not self.ended.is_set():
                        before, self.file = self.file, make(self.path, self.about)
                        os.close(before)
            except OSError:                 # the storage does not answer; it may at the next beat
                pass

    def release(self):
        """The folder is free from here on."""
        if self not in _held:       # released already, or this is a forked child, which owns nothing
            return
        _held.remove(self)
        with self.lock, contextlib.suppress(OSError):
            self.ended.set()
            os.utime(self.path, (0, 0))
        os.close(self.file)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.release()


def make(path, about):
    """Make an owner's file -> its descriptor, with a flock where there are such. FileExistsError where it is there."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(OSError):      # no locks on this file system
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = about | {"locked": True}
    try:
        os.write(file, (json.dumps(about) + "\n").encode())
        os.fsync(file)      # other hosts may read it from here on
    except OSError:
        os.unlink(path)
        os.close(file)
        raise
    return file


def claim(folder, flag="--output_dir", name="owner", wait_s=LAST_S, waiting=None, lost=None):
    """Own a folder from now on -> Owner. Raises UserError while another process that lives owns it, after wait_s, and
    OSError when the folder cannot be written.

    flag: that gave the folder, for the message. name: of the owner's files, where parts of a folder have owners.
    waiting: called again and again meanwhile, and may raise. lost: called with the reason by another thread when a
    newcomer has taken over.
    """
    folder, end, sight, told = Path(folder), time.monotonic() + wait_s, None, False
    for owner in [o for o in _held if (o.folder, o.name) == (folder, name)]:    # an earlier run of this process
        owner.release()
    while True:
        number, path = newest(folder, name)
        if path is not None and (sight is None or sight.path != path):
            sight = Sight(path)
        try:
            alive = path is not None and sight.look()
        except FileNotFoundError:       # removed by its successor
            continue
        if alive is False:
            if owner := take(folder, name, number + 1, lost):
                return owner
            continue
        if alive and time.monotonic() >= end:
            raise in_use(folder, flag, path)
        if not told and (alive is None or wait_s > LAST_S):
            print(f"waiting    another run {'is' if alive else 'was'} using {folder} ({describe(path)})", flush=True)
            told = True
        if waiting:
            waiting()
        time.sleep(0.2)


def take(folder, name, number, lost):
    """Become owner `number` of a folder -> Owner, or None where another newcomer came first."""
    path, about = folder / f"{name}-{number}", this_process()
    try:
        file = make(path, about)
    except FileExistsError:
        return None
    last, _ = newest(folder, name)
    if last > number:           # this process had read the folder long before it made the file
        os.unlink(path)
        os.close(file)
        return None
    for earlier in numbers(folder, name):
        if earlier < number:
            with contextlib.suppress(OSError):      # another user's, in a folder with the sticky bit
                os.unlink(folder / f"{name}-{earlier}")
    return Owner(folder, name, number, file, about, lost)


def look(folder, flag="--output_dir", name="owner", wait_s=LAST_S):
    """Raise UserError when a process of this host owns a folder, and still lives after wait_s. Writes nothing."""
    end = time.monotonic() + wait_s
    with contextlib.suppress(OSError):
        while (path := newest(folder, name)[1]) is not None:
            about, beat = read(path)
            if not beat or not about or about["pid"] == os.getpid() or not lives(about, path):
                return
            if time.monotonic() >= end:
                raise in_use(folder, flag, path)
            time.sleep(0.2)


def in_use(folder, flag, path):
    """The UserError of a folder that has an owner. path: of the owner's file."""
    return UserError(f"{flag} {folder}: another run is using it ({describe(path)}); end that one, or give another "
                     f"{flag}")


def check(folder):
    """Owner.check of what this process owns of a folder, if it does."""
    for owner in [owner for owner in _held if owner.folder == Path(folder)]:
        owner.check()


@atexit.register
def release_all():
    """This process owns nothing from here on."""
    for owner in list(_held):
        owner.release()


def _forget():
    for owner in _held:
        os.close(owner.file)
    _held.clear()


os.register_at_fork(after_in_child=_forget)     # else the flock would last as long as any child
