"""Checkpoints: whole or not there, written while training goes on, and with everything that exact resume needs.

output_dir/checkpoint-<step>/ holds what people use (adapter or model files) beside trainer_state/ (optimizer, random
states of every rank, position) and manifest.json, written last, with the size and SHA-256 of every file. The folder is
built under a .tmp name, synced to disk and renamed, so a kill at any instant leaves the last whole one untouched. Ranks
that have a share write it from copies on the CPU and tell rank 0, which completes the folder.
"""
import contextlib
import errno
import hashlib
import io
import json
import os
import random
import re
import shutil
import stat
import tempfile
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from common import distributed, json_files, run_lock, tensor_files
from common.distributed import UserError, World, naming
from common.text import NAME, printable

MANIFEST = "manifest.json"
STATE_DIR = "trainer_state"
ALONE = World()


def fsync_path(path):
    """Flush a file or folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# Whole names of what a killed process may leave, as this code makes them. Nothing else is deleted.
TEMPORARY = r"\..+\.tmp-[0-9a-f]{32}"       # write_atomically's files
UNFINISHED = r"checkpoint-\d+\.tmp-([0-9a-f]{8}|deleted-\d+)"     # Writer.building, delete
TABLE = r"table-[0-9a-f]{8}"                # new_table


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
    """Path in `folder` for the table of a data set, which is made anew at each start; earlier ones: remove_named."""
    return Path(folder) / f"table-{uuid.uuid4().hex[:8]}"


def write_atomically(path, write):
    """write(temporary_path), sync, rename onto path: readers see the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")
    try:
        with naming(path):
            write(temporary)
            # or a crash of the machine may leave the new name with nothing behind it
            fsync_path(temporary)
            os.replace(temporary, path)
            fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def pickled(value):
    """write(path) of a value that torch.load reads; as it is now.

    Torch's own writer of files says "iostream error" for every reason that a disk may have.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return lambda path: path.write_bytes(buffer.getbuffer())


@contextlib.contextmanager
def new_folder(output_dir, size=0, flag="--output_dir"):
    """A folder to fill; it gets the name output_dir once all is on disk. size: bytes it will take, about.

    Raises UserError: for a folder that is there and not empty, or that another process is making, or for a full disk.
    """
    final = Path(os.path.abspath(output_dir))
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"{flag} {output_dir}: is there already and not empty; give another name or move it away")
    building = final.with_name(f".{final.name}.new-{uuid.uuid4().hex}")
    try:
        for earlier in final.parent.iterdir() if final.parent.exists() else ():
            if re.fullmatch(rf"\.{re.escape(final.name)}\.new-[0-9a-f]{{32}}", earlier.name) and earlier.is_dir():
                with contextlib.suppress(FileNotFoundError), run_lock.acquire(earlier, flag):
                    shutil.rmtree(earlier)
                    print(f"removed {earlier}, which a killed process has left", flush=True)
        building.mkdir(parents=True)
        with run_lock.acquire(building, flag) as lock:
            free = shutil.disk_usage(building).free
            if free < size:
                raise UserError(f"{flag} {output_dir}: {size / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are "
                                "free there")
            yield building
            for path in [*building.iterdir(), building]:
                fsync_path(path)
            os.rename(building, final)      # still locked: nobody may take it for what a kill has left
        (final / lock.path.name).unlink()
        fsync_path(final.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{flag} {output_dir}: cannot be written ({error})")
    finally:
        shutil.rmtree(building, ignore_errors=True)


def sha256_file(path):
    """Hex SHA-256 of a file's bytes."""
    with naming(path), open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def prepare_output(output_dir, flag="--output_dir"):
    """Make a folder and prove that it can be written; raises UserError naming the flag that gave it."""
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
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
        if gone := remove_named(output_dir, TEMPORARY, UNFINISHED):
            print(f"removed what a killed run has left in {output_dir}: {', '.join(gone)}",
                  flush=True)
    except OSError as error:
        raise UserError(f"--output_dir {output_dir}: cannot be written ({error.strerror})")


def move_aside(path, why, what="damaged"):
    """Rename a file or folder, NAME.what-<time>, and tell the user why; nothing is deleted that may be good."""
    aside = path.with_name(f"{path.name}.{what}-{time.time_ns()}")
    os.rename(path, aside)
    print(f"{path} {why}; it is kept as {aside.name}", flush=True)


def rng_state(device):
    """Random states of this process (python, numpy, torch CPU, this GPU) as bytes."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, torch.from_numpy(keys.copy()), *rest),
             "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    buffer = io.BytesIO()
    torch.save(state, buffer)       # bytes: they travel to rank 0, which writes those of all ranks
    return buffer.getvalue()


def set_rng_state(data, device):
    """Put back what rng_state returned (bytes)."""
    state = torch.load(io.BytesIO(data), weights_only=True)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


class Writer:
    """Writes checkpoints in a background thread of every rank, one at a time, while training goes on."""

    def __init__(self, world, output_dir, keep=0, limit_s=6 * 3600):
        """On every rank. keep: how many of the newest stay, beside the best (0 = all). limit_s: how long a rank waits
        for another.
        """
        self.world, self.output_dir, self.keep, self.limit_s = world, Path(output_dir), keep, limit_s
        self.thread, self.error, self.saves = None, None, 0
        self.run = distributed.rank0_first(world, lambda: uuid.uuid4().hex[:8])    # no other run's ranks write there

    def begin(self, step):
        """Before the files of checkpoint-<step> are put together: end the last write, make the folder. On every rank.

        A collective has to follow before save(), so that the folder is there for all.
        """
        self.wait()
        if self.world.is_main:
            try:
                remove_named(self.output_dir, UNFINISHED)
                (self.building(step) / STATE_DIR).mkdir(parents=True)
            except OSError as error:
                raise self.failed(step, error)

    def save(self, step, files, meta=None):
        """Start writing checkpoint-<step>, whole or not at all. On every rank.

        files: {relative path: write(path)}, this rank's share; under "*" write(folder) that writes several. They must
        not touch tensors that training goes on to change. meta (rank 0): JSON-able dict for
        trainer_state/state.json; meta["best_step"] names the checkpoint that rotation must keep.
        """
        self.saves += 1
        self.thread = threading.Thread(target=self._write, args=(step, files, meta))
        self.thread.start()

    def building(self, step):
        """Where checkpoint-<step> grows."""
        return self.output_dir / f"checkpoint-{step}.tmp-{self.run}"

    def check(self):
        """Raise UserError when the last write failed; rank 0 hears of every rank's failure. Cheap."""
        if self.error:
            raise self.error

    def wait(self):
        """Wait for the write under way, if any; check(). Rank 0 returns when the checkpoint is complete."""
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
        except Exception as error:
            written, why = {}, str(error)
        try:
            if store is not None and (files or rank in tensor_files.writers(self.world.size)):
                store.set(f"checkpoint/{self.saves}/{rank}", json.dumps([written, why]))
            if self.world.is_main:
                self._complete(step, self._reports() if store is not None else [(written, why)], meta)
        except Exception as error:
            self.error = self.failed(step, error)

    def _reports(self):
        """[(files, error)] of the ranks that write, as they come in; polled, since a blocking call would hold the
        store.
        """
        reports, store, end = [], self.world.store, time.monotonic() + self.limit_s
        for rank in tensor_files.writers(self.world.size):
            key = f"checkpoint/{self.saves}/{rank}"
            while not store.check([key]):
                if time.monotonic() > end:      # a silent rank is named by the watchdog before
                    raise TimeoutError(f"rank {rank} did not write its share within {self.limit_s} s")
                time.sleep(0.02)
            reports.append(json.loads(store.get(key)))
        return reports

    def _complete(self, step, reports, meta):
        """Every share is on disk: state, manifest, the real name, rotation."""
        building, final = self.building(step), self.output_dir / f"checkpoint-{step}"
        try:
            ranks = tensor_files.writers(self.world.size)
            if errors := [f"rank {rank}: {why}" for rank, (_, why) in zip(ranks, reports) if why]:
                raise OSError("; ".join(dict.fromkeys(errors)))
            state = f"{STATE_DIR}/state.json"
            written = write_files(building, {state: lambda path: path.write_text(json.dumps(meta, indent=1))})
            for files, _ in reports:
                written |= files
            manifest = json.dumps({"step": step, "files": dict(sorted(written.items()))}, indent=1)
            write_files(building, {MANIFEST: lambda path: path.write_text(manifest)})
            for folder in [p for p in building.rglob("*") if p.is_dir()] + [building]:
                fsync_path(folder)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        if final.exists():      # passed over when resuming; now this step is reached again
            move_aside(final, "was passed over when the run resumed", "passed-over")
        os.rename(building, final)
        fsync_path(final.parent)
        rotate(self.output_dir, step, self.keep, meta.get("best_step"))


def write_files(folder, files):
    """Call each write(path), sync to disk; {relative path: {"bytes", "sha256"}} of what is there.

    Raises OSError, which names the file.
    """
    written = {}
    for name, write in files.items():
        with naming(folder / name):
            names = write_several(folder, write) if name == "*" else [name]
            if name != "*":
                write(folder / name)
            for done in names:
                fsync_path(folder / done)
                size = (folder / done).stat().st_size
                written[done] = {"bytes": size, "sha256": sha256_file(folder / done)}
    return written


def write_several(folder, write):
    """write(a folder of its own), whose files move up; [their names].

    Apart first, or the files of other ranks in the folder would look like this one's.
    """
    part = folder / f".part-{os.getpid()}"
    part.mkdir()
    write(part)
    names = sorted(os.listdir(part))
    for name in names:
        os.rename(part / name, folder / name)
    part.rmdir()
    return names


def checkpoints(output_dir):
    """[(step, path)] of the renamed, thus complete, checkpoint folders, oldest first. PermissionError as it comes."""
    found = []
    for path in Path(output_dir).iterdir() if os.path.exists(output_dir) else ():
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found)


def rotate(output_dir, newest, keep, best_step=None):
    """Delete the oldest checkpoints beyond `keep` (0 = keep all), never the best one.

    newest: the step just saved. Later ones, which a resume passed over as damaged, do not count: with them a new one
    would be deleted as the oldest.
    """
    if keep > 0:
        for step, path in [found for found in checkpoints(output_dir) if found[0] <= newest][:-keep]:
            if step != best_step:
                delete(path)


def delete(path):
    """Delete a checkpoint folder; it loses its name first, so that a kill leaves no half of one under it.

    What cannot be deleted (NFS keeps files that somebody has open) is left to the next save.
    """
    doomed = path.with_name(f"{path.name}.tmp-deleted-{time.time_ns()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


STATE = {"step": int, "epoch": int, "first": int, "identity": dict, "skipped": int, "unlogged": list, "args": dict,
         "validation": object, "best_step": (int, type(None)), "best_loss": (float, int, type(None))}


def read_json(path, kinds):
    """A JSON object from a file, or None where it is not one, or lacks a key of {key: type} `kinds`,
    or has something else or a negative count there.
    """
    try:
        found = json_files.loads(path.read_bytes())
    except ValueError:
        return None
    whole = isinstance(found, dict) and all(
        key in found and isinstance(found[key], kind) and not isinstance(found[key], bool)
        and (type(found[key]) is not int or found[key] >= 0) for key, kind in kinds.items())
    return found if whole else None


def is_file(path):
    """Path.is_file, but PermissionError where this user may not know."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except PermissionError:
        raise
    except (OSError, ValueError):       # gone, or no name at all
        return False


class Damaged(Exception):
    """A checkpoint is not as it was written; str() says how."""


def damage(path, world=ALONE):
    """What is wrong with a checkpoint folder, in words, or "" when every file has its size and checksum.

    The manifest must list state.json, and that one must say where the run stood. Raises OSError where that cannot be
    known: what this user may not read, say, is not damaged. world: collective; each rank reads a share of the files.
    """
    path = Path(path)
    wrong, files = distributed.rank0_first(world, told, listed, path)
    if not wrong:
        largest_first = sorted(files, key=lambda name: (-files[name]["bytes"], name))
        share = {name: files[name] for name in largest_first[world.rank::world.size]}
        wrong = next((why for why, _ in distributed.gather_objects(world, told(compare, path, share)) if why), "")
    return wrong or distributed.rank0_first(world, told, check_state, path)[0]


def told(look, path, *more):
    """(what is wrong with a checkpoint, or "", what look(path, *more) returns). Raises OSError, but for a bad disk."""
    try:
        return "", look(path, *more)
    except Damaged as why:
        return str(why), None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"{error.filename or path} cannot be read ({error.strerror})", None


def listed(path):
    """{name: {"bytes", "sha256"}} of a checkpoint's manifest. Raises Damaged."""
    if not is_file(path / MANIFEST):
        raise Damaged(f"no {MANIFEST}")
    files = (read_json(path / MANIFEST, {"files": dict}) or {}).get("files")
    facts = {"bytes": int, "sha256": str}
    if files is None or not all(isinstance(entry, dict) and all(type(entry.get(key)) is kind for key, kind in
                                                                facts.items()) for entry in files.values()):
        raise Damaged(f"unreadable {MANIFEST}")
    if f"{STATE_DIR}/state.json" not in files:
        raise Damaged(f"{MANIFEST} does not list {STATE_DIR}/state.json")
    return files


def compare(path, files):
    """Raise Damaged unless a checkpoint has these files of its manifest, each with its size and checksum."""
    for name, facts in files.items():
        file, name = path / name, printable(name, NAME)
        if not is_file(file):
            raise Damaged(f"{name} is missing")
        if file.stat().st_size != facts["bytes"]:
            raise Damaged(f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}")
        if sha256_file(file) != facts["sha256"]:
            raise Damaged(f"{name} has another checksum than when it was written")


def check_state(path):
    """Raise Damaged unless a checkpoint's state.json says where the run stood."""
    state = read_json(path / STATE_DIR / "state.json", STATE)
    if state is None or not all(isinstance(value, (int, float)) for value in state["unlogged"]):
        raise Damaged(f"{STATE_DIR}/state.json does not say where the run stood")


def newest_whole(output_dir, report=print):
    """Path of the newest undamaged checkpoint, or None; damaged ones are reported and passed over."""
    for _, path in reversed(checkpoints(output_dir)):
        wrong = damage(path)
        if not wrong:
            return path
        report(f"checkpoint {path} is damaged ({wrong}); trying the one before")
    return None


def last_args(output_dir, resume):
    """Flags of the run that --resume goes on with, as its newest checkpoint has them, or None; find_resume proves it.

    Nothing is hashed: all checkpoints of a run have the flags that matter in common.
    """
    folders = [path for _, path in reversed(checkpoints(output_dir))] if resume == "auto" else [Path(resume)]
    for file in (folder / STATE_DIR / "state.json" for folder in folders):
        if is_file(file) and (state := read_json(file, STATE)):
            return state["args"]
    return None


def load_meta(path):
    """state.json of a checkpoint folder as a dict."""
    return json_files.read_object(Path(path) / STATE_DIR / "state.json")


def load_optimizer(path, tensors, world=None):
    """Fill tensors (optim.state_tensors, plain or sharded) from a checkpoint folder; UserError if they differ.

    world: as in tensor_files.read_once.
    """
    files = tensor_files.files_in(Path(path) / STATE_DIR, "optimizer")
    found = {name: [part] for name, part in tensor_files.open_tensors(files).items()}
    if problem := tensor_files.compare({name: t.shape or (1,) for name, t in tensors.items()}, found):
        raise UserError(f"{path}: its optimizer state does not fit this run: {problem}")
    for name, tensor in tensors.items():
        tensor_files.read_once(world, tensor, partial(tensor_files.read_into, tensor, found[name]))


def load_rng(path, rank, device):
    """Put back the random states of this rank; a rank that the saved run did not have keeps its own."""
    states = torch.load(Path(path) / STATE_DIR / "rng.pt", weights_only=True)
    if rank < len(states):
        set_rng_state(states[rank], device)


def find_resume(output_dir, resume, identity, world=ALONE):
    """(checkpoint folder or None, its meta or None) for --resume auto | none | FOLDER. Collective.

    identity: {name: value} that the checkpoint's meta must share, on rank 0. Raises UserError when nothing usable is
    there, or it is another run's.
    """
    folders = distributed.rank0_first(world, to_try, output_dir, resume)
    for path in folders:
        if not (wrong := damage(path, world)):
            return path, distributed.rank0_first(world, fitting_meta, path, output_dir, resume, identity)
        if resume != "auto":
            raise UserError(f"--resume {path}: {wrong}")
        if world.is_main:
            print(f"checkpoint {path} is damaged ({wrong}); trying the one before")
    if folders:
        raise UserError(f"{output_dir}: every checkpoint is damaged; to start anew, give another --output_dir or move "
                        "them away")
    return None, None


def to_try(output_dir, resume):
    """Folders of find_resume, in this order. Raises UserError."""
    found = [path for _, path in reversed(checkpoints(output_dir))]
    if resume == "none" and found:
        raise UserError(f"--resume none, but {output_dir} holds checkpoints: give another --output_dir, move them "
                        "away, or use --resume auto")
    if resume not in ("auto", "none") and not Path(resume).exists():
        raise UserError(f"--resume {resume}: no such folder")
    return found if resume in ("auto", "none") else [Path(resume)]


def fitting_meta(path, output_dir, resume, identity):
    """state.json of a whole checkpoint that find_resume has found. Raises UserError where it does not fit the run."""
    meta = load_meta(path)
    later = [str(p) for step, p in checkpoints(output_dir) if step > meta["step"]]
    if later and resume != "auto":      # or the next --resume auto would take up the abandoned ones
        raise UserError(f"--resume {path}: later checkpoints stand in --output_dir ({', '.join(later)}); move them "
                        "away or give another --output_dir")
    for name, value in identity.items():
        if meta["identity"].get(name) != value:
            raise UserError(f"{path}: was made with another {name} ({meta['identity'].get(name)}, this run {value}); "
                            "give the same flags or another --output_dir")
    return meta
