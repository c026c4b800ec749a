"""Checkpoints: atomic, written in the background, with everything that exact resume needs.

OUTPUT_DIR/checkpoint-STEP/ holds the adapter or model, trainer_state/ and manifest.json, which is
written last and has the SHA-256 of every file. The folder is built under a .tmp name, synced and
renamed, so a kill at any instant leaves all older checkpoints intact.
"""
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from core import dist, json_files, optim, tensor_io
from core.cli import UserError, error_names_file, one_line, require

MANIFEST = "manifest.json"
STATE = "trainer_state"     # a folder that from_pretrained and PEFT do not read
# whole names of folders that a killed process leaves; no others are deleted
UNFINISHED = r"checkpoint-\d+\.tmp-([0-9a-f]{8}|deleted-\d+)"

# ---- Files and folders


def fsync(path):
    """Flush a file or folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def sha256(path):
    with error_names_file(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path, write):
    """write(temporary_path), sync, rename onto path: readers see the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    with error_names_file(path):
        temporary.unlink(missing_ok=True)       # of a killed process, or a link to another file
        write(temporary)
        # before the rename: else a crash of the machine may leave an empty file of that name; some
        # disks report only here that they are full
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)


def write_text(path, text):
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path, value):
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def remove_named(folder, pattern):
    """Delete entries whose whole name matches a pattern. A link is removed, not its target."""
    for path in list(Path(folder).glob("*")):
        if re.fullmatch(pattern, path.name, re.ASCII):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def prepare_folder(folder, flag):
    """Make a folder and try to write into it; UserError that names its flag."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{flag} {folder}: cannot be written ({error.strerror})")


@contextlib.contextmanager
def new_folder(output_dir, flag="--output_dir"):
    """Yields a folder to fill, which is renamed to output_dir once all its files are there.
    UserError if output_dir has files, or the disk is full. A kill leaves NAME.unfinished-..."""
    final = Path(os.path.abspath(output_dir))
    require(not final.exists() or not os.listdir(final), f"{final}: is there already, not empty")
    # in the same folder, so on the same disk: it can be renamed
    building = final.with_name(f"{final.name}.unfinished-{uuid.uuid4().hex[:8]}")
    try:
        building.mkdir(parents=True)
        yield building
        for path in [*building.iterdir(), building]:
            fsync(path)
        building.rename(final)
    except OSError as error:
        raise UserError(f"{flag} {output_dir}: cannot be written ({error})")
    finally:
        shutil.rmtree(building, ignore_errors=True)


# ---- Locks. The owner of a folder holds an flock on FOLDER/NAME.lock, which the kernel releases at
# the end of the process. The file names the owner and is never deleted.

# a restarted run waits for ranks of the last one that are about to end, a requeued one for a file
# server, which keeps a lost node's locks for 90 s
WAIT_S = 3 if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else 120

_held = {}      # {path of a lock: its open file} of this process
# else a lock would be held until the last child ends
os.register_at_fork(after_in_child=lambda: [lock.close() for lock in _held.values()])


def lock_folder(folder, flag="--output_dir", name="run", wait_s=WAIT_S, give_up=lambda: False):
    """Make and lock a folder until the returned file is closed, or the process ends. UserError if
    another process still holds the lock after wait_s seconds. None if give_up() is true before."""
    prepare_folder(folder, flag)
    path, end = Path(folder) / f"{name}.lock", time.monotonic() + wait_s
    # opening a pipe could hang
    require(path.is_file() and not path.is_symlink() or not os.path.lexists(path),
            f"{path}: is not a file; move it away, a run locks a file of this name")
    while True:
        lock = _held[path] = open(path, "a+", errors="replace")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                break
        except (BlockingIOError, FileNotFoundError):    # locked, or deleted since it was opened
            pass
        except OSError as error:        # some network file systems have no locks
            print(f"notice     {path}: cannot be locked ({error.strerror}): start no second run")
            break
        lock.seek(0)
        used = f"{folder}: another run is using it ({one_line(lock.read().strip())})"
        require(time.monotonic() < end, f"{flag} {used}; end it, or give another folder")
        if wait_s > 3:
            print(f"waiting    {used}")
            wait_s = 0      # it is announced once
        if give_up():
            return None
        time.sleep(0.2)
    with error_names_file(path):
        lock.truncate(0)
        print(f"host {socket.gethostname()}, process {os.getpid()}, started "
              f"{time.strftime('%F %T UTC', time.gmtime())}", file=lock, flush=True)
    with contextlib.suppress(PermissionError):      # another user's file
        os.fchmod(lock.fileno(), os.stat(folder).st_mode & 0o666)   # who may use the folder
    return lock


# ---- The checkpoints of a run

# the exit waits for this thread
_writer = ThreadPoolExecutor(1)
_writing = []       # Future of the checkpoint that it writes


def wait(only_if_done=False):
    """Wait for the checkpoint that is being written. Call on every rank. UserError if it failed.
    only_if_done: asked in each step, so that ranks notice a failure at once."""
    if _writing and (_writing[0].done() or not only_if_done):
        _writing.pop().result()


def save(world, args, step, model, optimizer, tensors, save_config, state, split=None):
    """Copy everything off the device and start to write OUTPUT_DIR/checkpoint-STEP. Collective.
    Older checkpoints are deleted once it is complete. UserError on all ranks if the last failed.

    tensors: {stem: {name: tensor}} for STEM.safetensors, taken after dist.reshard(model).
    save_config(folder): writes the small files, on rank 0. state: JSON-able, with "best_step".
    split: as in tensor_io.stage."""
    wait()      # one at a time: two would hold twice the copies in host memory
    rng = {"torch": torch.get_rng_state()}      # training uses no other generator
    if world.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(world.device)
    names, states = zip(*dist.all_gather(world, (uuid.uuid4().hex[:8], rng)))
    final = Path(args.output_dir) / f"checkpoint-{step}"
    # a new name: ranks of an earlier run that still run never write into this folder
    building, share = final.with_name(f"{final.name}.tmp-{names[0]}"), {}

    def fail(error):
        shutil.rmtree(building, ignore_errors=True)     # frees disk space for the next one
        raise UserError(f"{final.name} could not be written to {final.parent} ({error}); earlier "
                        "checkpoints are intact")

    if world.is_main:
        try:
            (building / STATE).mkdir(parents=True)
            save_config(building)
            torch.save(states, building / STATE / "rng.pt")
            (building / STATE / "state.json").write_text(json.dumps(state, indent=1))
        except Exception as error:      # tokenizers raise a bare Exception for a full disk
            fail(error)
        # written, and renamed to be synced
        share = {str(path.relative_to(building)): partial(os.rename, path)
                 for path in building.rglob("*") if path.is_file()}
    moments = optim.state_tensors(optimizer, model)
    for stem, named in {f"{STATE}/optimizer": moments, **tensors}.items():
        share |= tensor_io.stage(world, stem, named, split)

    def write():
        try:
            for name, write_file in share.items():
                write_atomically(building / name, write_file)
            report = [(name, file_record(building / name)) for name in share], ""
        except Exception as error:
            report = [], f"rank {world.rank}: {error}"
        records, errors = zip(*dist.all_gather(world, report, world.save_group))
        if any(errors):
            fail("; ".join(filter(None, errors)))
        if world.is_main:
            # last: it proves that all other files are complete
            write_json(building / MANIFEST, {"step": step, "files": dict(sum(records, []))})
            if final.exists():      # passed over when resuming; now this step is reached again
                os.rename(final, f"{final}.passed-over-{time.time_ns()}")
            os.rename(building, final)
            fsync(final.parent)
            # only now that a newer checkpoint is complete
            rotate(final.parent, step, args.save_total_limit, state["best_step"])

    _writing.append(_writer.submit(write))


def restore(world, path, model, optimizer):
    """Load the optimizer and this rank's random state, if the run had this rank. Collective."""
    tensor_io.load(world, path / STATE, "optimizer", optim.state_tensors(optimizer, model))
    # weights_only: a checkpoint from somebody else must not run code
    states = torch.load(path / STATE / "rng.pt", weights_only=True)
    if world.rank < len(states):
        rng = states[world.rank]
        torch.set_rng_state(rng["torch"])
        if "cuda" in rng and world.device.type == "cuda":      # else it resumes without
            torch.cuda.set_rng_state(rng["cuda"], world.device)


def find_newest(output_dir, resume, identity=None):
    """(path, state) of the newest intact checkpoint or (None, {}). resume: auto | none | FOLDER.
    UserError unless the checkpoint was made with the same `identity`, a dict."""
    named = resume not in ("auto", "none")
    listed = list_checkpoints(output_dir)
    # else new checkpoints would mix with old ones, and --resume auto would be ambiguous
    require(resume != "none" or not listed,
            f"--resume none, but {output_dir} holds checkpoints: give another --output_dir")
    for path in [Path(resume)] if named else [path for _, path in reversed(listed)]:
        if problem := find_damage(path):
            require(not named, f"--resume {path}: {problem}")
            print(f"checkpoint {path} is damaged ({problem}); trying the one before", flush=True)
            continue
        state = json_files.read_object(path / STATE / "state.json")
        later = ", ".join(str(step) for step, _ in listed if step > state["step"])
        # else the next --resume auto would continue from the abandoned later ones
        require(not named or not later, f"--resume {path}: later checkpoints are in --output_dir "
                f"(step {later}); move them away or give another one")
        for name, value in (identity or {}).items():
            before = state["identity"].get(name)
            # a dry run, which encodes no audio, knows only the first part of the data's fingerprint
            require(before == value or str(before).startswith(f"{value} audio "),
                    f"{path}: was made with another {name} ({before}, this run {value}); give the "
                    "same flags and files, or another --output_dir")
        return path, state
    # starting over could overwrite checkpoints that can still be repaired
    require(not listed, f"{output_dir}: every checkpoint is damaged; give another --output_dir")
    return None, {}


def file_record(path):
    """{"bytes", "sha256"} of a file, read back from disk; None if it is missing."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)} if path.is_file() else None


def list_checkpoints(output_dir):
    """[(step, path)] of the folders named checkpoint-STEP, oldest first."""
    paths = Path(output_dir).iterdir() if os.path.isdir(output_dir) else ()     # glob hides errors
    return sorted((int(path.name[11:]), path) for path in paths if path.is_dir()
                  and re.fullmatch(r"checkpoint-\d+", path.name, re.ASCII))


def find_damage(path):
    """Damage to a checkpoint; "" if all checksums match. UserError: unreadable file."""
    try:
        listed = dict(json_files.read_object(path / MANIFEST)["files"])
        listed[f"{STATE}/state.json"]       # an empty list would match any folder
    except (UserError, ValueError, KeyError, TypeError):
        # without one the folder was made by hand, or copied in part
        return f"{'unreadable' if (path / MANIFEST).is_file() else 'no'} {MANIFEST}"
    with ThreadPoolExecutor(16) as pool:        # hashing releases the GIL
        for name, present in zip(listed, pool.map(lambda name: file_record(path / name), listed)):
            if present != listed[name]:
                return f"{name} {'has changed since it was written' if present else 'is missing'}"
    return ""


def rotate(output_dir, newest, keep, best_step=None):
    """Delete complete checkpoints up to step `newest`, except the last `keep` and the best one."""
    complete = [(step, path) for step, path in list_checkpoints(output_dir)
                if step <= newest and (path / MANIFEST).is_file()]
    for step, path in complete[:-keep] if keep else ():     # 0 keeps all
        if step != best_step:
            # renamed first: a kill leaves no partial checkpoint under this name
            os.rename(path, f"{path}.tmp-deleted-{time.time_ns()}")
    remove_named(output_dir, UNFINISHED)
