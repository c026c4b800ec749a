"""Checkpoints: whole or not there, written beside training, with all that exact resume needs.

output_dir/checkpoint-<step>/ holds what people use (adapter or model files) beside trainer_state/
(optimizer, random states of every rank, position) and manifest.json, written last, with the size
and SHA-256 of every file. The folder is built under a .tmp name, synced to disk and renamed, so a
kill at any instant leaves the last whole one untouched. Ranks that have a share write it from
copies on the CPU and tell rank 0, which completes the folder.
"""
import hashlib
import io
import json
import os
import random
import re
import shutil
import tempfile
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import torch

from common import distributed, tensor_files
from common.distributed import UserError, World, naming
from core import json_files, run_lock

MANIFEST = "manifest.json"         # proves by sizes and checksums that all is there
STATE_DIR = "trainer_state"        # apart, so that from_pretrained and PEFT see only their own
ALONE = World()                    # for scripts of one process

# Whole names of what a killed process may leave, as this code makes them. Nothing else is deleted:
# checkpoint-500.tmp, say, is somebody's copy.
TEMPORARY = r"\..+\.tmp-[0-9a-f]{32}"       # write_atomically's files
UNFINISHED = r"checkpoint-\d+\.tmp-([0-9a-f]{8}|deleted-\d+)"     # Writer.building, delete
TABLE = r"table-[0-9a-f]{8}"                # new_table

# --------------------------------------------------------------------------------------------------
# Files and folders


def fsync_path(path):
    """Flush a file or folder to disk."""
    fd = os.open(path, os.O_RDONLY)     # enough for both; a folder cannot be opened for writing
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_file(path):
    """Hex SHA-256 of a file's bytes."""
    with naming(path), open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def remove_named(folder, *patterns, keep=None):
    """Delete the files and folders in `folder` whose whole names match a pattern; [names gone].

    keep: a name that stays. What cannot be deleted stays, too: NFS keeps folders with files that
    somebody has open.
    """
    gone = []
    for path in sorted(Path(folder).iterdir()) if os.path.isdir(folder) else ():
        ours = any(re.fullmatch(pattern, path.name, re.ASCII) for pattern in patterns)
        if path.name == keep or not ours:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:       # of a link only the link: what it leads to is not ours
            path.unlink(missing_ok=True)
        if not path.exists():
            gone.append(path.name)
    return gone


def new_table(folder):
    """Path in `folder` for the table of a data set, which is made anew at each start.

    A running job keeps the one that it has mapped; earlier ones go by remove_named.
    """
    return Path(folder) / f"table-{uuid.uuid4().hex[:8]}"


def move_aside(path, why, what="damaged"):
    """Rename a file or folder, NAME.what-<time>, and tell the user why."""
    # it may be good, or be needed to find out what happened: nothing of the kind is deleted
    aside = path.with_name(f"{path.name}.{what}-{time.time_ns()}")
    os.rename(path, aside)
    print(f"{path} {why}; it is kept as {aside.name}", flush=True)


def write_atomically(path, write):
    """write(temporary_path), sync, rename onto path: readers see the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")
    try:
        with naming(path):
            write(temporary)
            # before the renaming, or a crash of the machine may leave the name with nothing in it
            fsync_path(temporary)
            os.replace(temporary, path)
            fsync_path(path.parent)     # the renaming itself
    finally:
        temporary.unlink(missing_ok=True)       # of a write that failed


def write_text(path, text):
    """Write a text in UTF-8, atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path, value, **options):
    """Write a value as indented JSON, atomically. options: of json.dumps."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, **options) + "\n")


def pickled(value):
    """write(path) of a value that torch.load reads; as it is now."""
    # torch's own writer of files says "iostream error" for every reason that a disk may have
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return lambda path: path.write_bytes(buffer.getbuffer())


def prepare_output(output_dir, flag="--output_dir"):
    """Make a folder and prove that it can be written; UserError naming the flag that gave it."""
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)     # a run that resumes has one
        # rights and quotas show only when something is written
        with tempfile.TemporaryFile(dir=output_dir) as file:
            file.write(b"ok")
            file.flush()
    except OSError as error:
        raise UserError(f"{flag} {output_dir}: cannot be written ({error.strerror})")


def own_output(output_dir):
    """prepare_output, and no other run's from here on: see run_lock."""
    prepare_output(output_dir)
    try:
        run_lock.acquire(output_dir)
        # only its owner may tell what is unfinished there from what is being written
        if gone := remove_named(output_dir, TEMPORARY, UNFINISHED):
            print(f"removed what a killed run has left in {output_dir}: {', '.join(gone)}",
                  flush=True)
    except OSError as error:
        raise UserError(f"--output_dir {output_dir}: cannot be written ({error.strerror})")


# --------------------------------------------------------------------------------------------------
# Random states


def rng_state(device):
    """Random states of this process (python, numpy, torch CPU, this GPU) as bytes."""
    # numpy's keys as a tensor: torch.load with weights_only reads no arrays
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, torch.from_numpy(keys.copy()), *rest),
             "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    # bytes, since they travel to rank 0, which writes those of all ranks
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


# --------------------------------------------------------------------------------------------------
# Writing


class Writer:
    """Writes checkpoints in a background thread of every rank, one at a time, beside training."""

    def __init__(self, world, output_dir, keep=0, limit_s=6 * 3600):
        """On every rank. keep: how many of the newest stay, beside the best (0 = all). limit_s: how
        long a rank waits for another.
        """
        self.world, self.output_dir = world, Path(output_dir)
        self.keep, self.limit_s = keep, limit_s
        self.thread, self.error = None, None        # of the write under way, or the last one
        self.shared = threading.Event()     # this rank's share is written, or has failed
        # counts on every rank alike: part of the keys by which the ranks report in the store
        self.saves = 0
        # in the folder's name: ranks of an earlier run that still live never write into ours
        self.run = distributed.rank0_first(world, lambda: uuid.uuid4().hex[:8])

    def begin(self, step):
        """End the last write, make the folder of checkpoint-<step>. On every rank.

        Before its files are put together. A collective has to follow before save(), so that the
        folder is there for all.
        """
        # one at a time: two would hold twice the copies in host memory
        self.finish()
        if self.world.is_main:
            try:
                # what could not be deleted before, on NFS, or another save that failed
                remove_named(self.output_dir, UNFINISHED)
                (self.building(step) / STATE_DIR).mkdir(parents=True)
            except OSError as error:
                raise self.failed(step, error)
        distributed.meet(self.world)        # a slow disk may take longer than the gather's limit

    def save(self, step, files, meta=None):
        """Start writing checkpoint-<step>, whole or not at all. On every rank.

        files: {relative path: write(path)}, this rank's share; under "*" write(folder) that writes
        several. They must not touch tensors that training goes on to change. meta (rank 0):
        JSON-able dict for trainer_state/state.json; meta["best_step"] names the checkpoint that
        rotation must keep.
        """
        self.saves += 1
        self.shared.clear()
        # not a daemon: the interpreter's end waits for a checkpoint under way
        self.thread = threading.Thread(target=self._write, args=(step, files, meta))
        self.thread.start()

    def building(self, step):
        """Where checkpoint-<step> grows."""
        return self.output_dir / f"checkpoint-{step}.tmp-{self.run}"

    def check(self):
        """Raise UserError when the last write failed; rank 0 hears of every rank's. Cheap."""
        if self.error:
            raise self.error

    def finish(self):
        """Wait for the write under way; check(). On every rank. The checkpoint is complete then."""
        if self.thread is not None:
            self.shared.wait()
            # breaks when a rank has died before its share was written; the thread would wait on
            distributed.meet(self.world)
        distributed.rank0_first(self.world, self._join)

    def _join(self):
        if self.thread is not None:
            self.thread.join()
        self.check()

    def failed(self, step, why):
        """The UserError of a checkpoint that could not be written."""
        return UserError(f"checkpoint-{step} could not be written to {self.output_dir} ({why}); "
                         "earlier checkpoints are intact")

    def _write(self, step, files, meta):
        rank, store = self.world.rank, self.world.store
        try:
            written, why = write_files(self.building(step), files), None
        except Exception as error:      # told to rank 0, which would wait for this share otherwise
            written, why = {}, str(error)
        try:
            try:    # through the store: a collective of this thread would mix with training's
                if store is not None and (files or rank in tensor_files.writers(self.world.size)):
                    store.set(f"checkpoint/{self.saves}/{rank}", json.dumps([written, why]))
            finally:
                self.shared.set()
            if self.world.is_main:
                reports = self._reports() if store is not None else [(written, why)]
                self._complete(step, reports, meta)
        except Exception as error:      # raised by the main thread, when it comes to check()
            self.error = self.failed(step, error)

    def _reports(self):
        """[(files, error)] of the ranks that write, as they come in."""
        reports, store, end = [], self.world.store, time.monotonic() + self.limit_s
        for rank in tensor_files.writers(self.world.size):
            key = f"checkpoint/{self.saves}/{rank}"
            # polled: a call that waits would hold the store for this process's other threads
            while not store.check([key]):
                if time.monotonic() > end:      # a silent rank is named by the watchdog before
                    raise TimeoutError(f"rank {rank} did not write its share within "
                                       f"{self.limit_s} s")
                time.sleep(0.02)        # a share takes seconds
            reports.append(json.loads(store.get(key)))
        return reports

    def _complete(self, step, reports, meta):
        """Every share is on disk: state, manifest, the real name, rotation."""
        building, final = self.building(step), self.output_dir / f"checkpoint-{step}"
        try:
            ranks = tensor_files.writers(self.world.size)
            errors = [f"rank {rank}: {why}" for rank, (_, why) in zip(ranks, reports) if why]
            if errors:
                raise OSError("; ".join(errors))        # of all: disks of nodes differ
            state = json.dumps(meta, indent=1)
            written = write_files(building, {
                f"{STATE_DIR}/state.json": lambda path: path.write_text(state)})
            for files, _ in reports:
                written |= files
            # last: it is the proof that all others are there
            manifest = json.dumps({"step": step, "files": dict(sorted(written.items()))}, indent=1)
            write_files(building, {MANIFEST: lambda path: path.write_text(manifest)})
            # names of files are on disk when their folder is
            for folder in [path for path in building.rglob("*") if path.is_dir()] + [building]:
                fsync_path(folder)
        except BaseException:       # half of it would take the room that the next one needs
            shutil.rmtree(building, ignore_errors=True)
            raise
        if final.exists():      # passed over when resuming; now this step is reached again
            move_aside(final, "was passed over when the run resumed", "passed-over")
        os.rename(building, final)
        fsync_path(final.parent)
        # only now: the last whole one goes when a newer whole one has its name
        rotate(self.output_dir, step, self.keep, meta.get("best_step"))


def write_files(folder, files):
    """Call each write(path), sync to disk; {relative path: {"bytes", "sha256"}} of what is there.

    Raises OSError, which names the file.
    """
    written = {}
    for name, write in files.items():
        names = [name]
        with naming(folder / name):
            if name == "*":
                names = write_several(folder, write)
            else:
                write(folder / name)
        for done in names:
            with naming(folder / done):     # some disks say only now that they are full
                fsync_path(folder / done)
                size = (folder / done).stat().st_size
            # of what can be read back, not of what was in memory
            written[done] = {"bytes": size, "sha256": sha256_file(folder / done)}
    return written


def write_several(folder, write):
    """write(a folder of its own), whose files move up to `folder`; [their names]."""
    # apart first, or the files of other ranks there would look like this one's
    part = folder / f".part-{os.getpid()}"
    part.mkdir()
    write(part)
    names = sorted(os.listdir(part))        # as the library calls them, which may change
    for name in names:
        os.rename(part / name, folder / name)
    part.rmdir()
    return names


def checkpoints(output_dir):
    """[(step, path)] of the checkpoint folders that are complete, oldest first. PermissionError."""
    found = []
    for path in Path(output_dir).iterdir() if os.path.exists(output_dir) else ():
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found)        # by number: as text 10 comes before 9


def hint(folder):
    """What to say behind the refusal of a folder: which checkpoint in it to give instead."""
    inside = checkpoints(folder) if os.path.isdir(folder) else ()
    return f"; give one of those in it, such as {inside[-1][1]}" if inside else ""


def rotate(output_dir, newest, keep, best_step=None):
    """Delete the oldest checkpoints up to step `newest` beyond `keep` (0 = all), never the best."""
    if keep > 0:
        # later ones, passed over as damaged, do not count: with them a new one would be the oldest
        found = [found for found in checkpoints(output_dir) if found[0] <= newest]
        for step, path in found[:-keep]:
            if step != best_step:
                delete(path)


def delete(path):
    """Delete a checkpoint folder; what is open somewhere on NFS goes with a later save."""
    # it loses its name first, so that a kill leaves no half of one under it
    doomed = path.with_name(f"{path.name}.tmp-deleted-{time.time_ns()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# Resuming


def load_meta(path):
    """state.json of a checkpoint folder as a dict."""
    return json_files.read_object(Path(path) / STATE_DIR / "state.json")


def to_try(output_dir, resume):
    """Checkpoints of --resume auto | none | FOLDER, in the order to be tried. Raises UserError."""
    found = [path for _, path in reversed(checkpoints(output_dir))]
    # a new run's checkpoints among old ones: nobody could tell which --resume auto takes
    if resume == "none" and found:
        raise UserError(f"--resume none, but {output_dir} holds checkpoints: give another "
                        "--output_dir, move them away, or use --resume auto")
    if resume in ("auto", "none"):
        return found
    if not Path(resume).exists():
        raise UserError(f"--resume {resume}: no such folder")
    return [Path(resume)]
