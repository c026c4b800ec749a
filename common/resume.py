"""What a run goes on from: checkpoints proven whole, their state put back.

Imported where there is a checkpoint. Damaged ones are passed over; none is changed.
"""
import errno
import io
import os
import random
import stat
from functools import partial
from pathlib import Path

import numpy as np
import torch

from common import distributed, tensor_files
from common.checkpoint import ALONE, MANIFEST, STATE_DIR, checkpoints, load_meta, sha256_file
from common.distributed import UserError
from common.text import NAME, printable
from core import json_files

# of state.json. A checksum says nothing of what was written by hand, so types are checked, too
STATE = {"step": int, "epoch": int, "first": int, "identity": dict, "skipped": int, "args": dict,
         "unlogged": list, "validation": object, "best_step": (int, type(None)),
         "best_loss": (float, int, type(None))}


# --------------------------------------------------------------------------------------------------
# Damage


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


def read_json(path, kinds):
    """A JSON object from a file, or None where it is not one, or lacks a key of {key: type} kinds,
    or has something else or a negative count there.
    """
    try:
        found = json_files.loads(path.read_bytes())
    except ValueError:      # is not JSON
        return None
    if not isinstance(found, dict) or not kinds.keys() <= found.keys():
        return None
    for key, kind in kinds.items():
        value = found[key]
        # to Python true is an int
        if isinstance(value, bool) or not isinstance(value, kind):
            return None
        if isinstance(value, int) and value < 0:
            return None
    return found


def damage(path, world=ALONE):
    """What is wrong with a checkpoint folder, in words, or "" when every file has its size and
    checksum.

    The manifest must list state.json, and that one must say where the run stood. Raises OSError
    where that cannot be known: what this user may not read, say, is not damaged. world: collective;
    each rank reads a share of the files.
    """
    path = Path(path)
    wrong, files = distributed.rank0_first(world, told, listed, path)
    if not wrong:
        # by size, so that the ranks have about the same to read
        ordered = sorted(files, key=lambda name: (-files[name]["bytes"], name))
        share = {name: files[name] for name in ordered[world.rank::world.size]}
        found = distributed.gather_objects(world, told(compare, path, share))
        wrong = next((why for why, _ in found if why), "")
    return wrong or distributed.rank0_first(world, told, check_state, path)[0]


def told(look, path, *more):
    """(what is wrong with a checkpoint, or "", what look(path, *more) returns). Raises OSError."""
    try:
        return "", look(path, *more)
    except Damaged as why:
        return str(why), None
    except OSError as error:
        # a disk that fails has damaged the file; any other reason says nothing about what is in it
        if error.errno != errno.EIO:
            raise
        return f"{error.filename or path} cannot be read ({error.strerror})", None


def listed(path):
    """{name: {"bytes", "sha256"}} of a checkpoint's manifest. Raises Damaged."""
    if not is_file(path / MANIFEST):
        raise Damaged(f"no {MANIFEST}")     # a folder that somebody has made or copied in part
    files = (read_json(path / MANIFEST, {"files": dict}) or {}).get("files")
    facts = {"bytes": int, "sha256": str}
    if files is None:
        raise Damaged(f"unreadable {MANIFEST}")
    for entry in files.values():
        if not isinstance(entry, dict) or any(
                type(entry.get(key)) is not kind for key, kind in facts.items()):
            raise Damaged(f"unreadable {MANIFEST}")
    # an empty list would prove any folder whole
    if f"{STATE_DIR}/state.json" not in files:
        raise Damaged(f"{MANIFEST} does not list {STATE_DIR}/state.json")
    return files


def compare(path, files):
    """Raise Damaged unless these files of a manifest are there with their sizes and checksums."""
    for name, facts in files.items():
        file, name = path / name, printable(name, NAME)
        if not is_file(file):
            raise Damaged(f"{name} is missing")
        # first, as it costs nothing
        size = file.stat().st_size
        if size != facts["bytes"]:
            raise Damaged(f"{name} has {size} bytes instead of {facts['bytes']}")
        if sha256_file(file) != facts["sha256"]:
            raise Damaged(f"{name} has another checksum than when it was written")


def check_state(path):
    """Raise Damaged unless a checkpoint's state.json says where the run stood."""
    # its checksum was right, but a program of another version may have written it
    state = read_json(path / STATE_DIR / "state.json", STATE)
    if state is None or not all(isinstance(value, (int, float)) for value in state["unlogged"]):
        raise Damaged(f"{STATE_DIR}/state.json does not say where the run stood")


def newest_whole(output_dir, report=print):
    """Path of the newest undamaged checkpoint, or None; damaged ones are reported, passed over."""
    for _, path in reversed(checkpoints(output_dir)):
        wrong = damage(path)
        if not wrong:
            return path
        report(f"checkpoint {path} is damaged ({wrong}); trying the one before")
    return None


# --------------------------------------------------------------------------------------------------
# Going on


def whole_one(folders, output_dir, resume, identity, world):
    """run.find_resume among folders, in this order, at least one."""
    for path in folders:
        wrong = damage(path, world)
        if not wrong:
            meta = distributed.rank0_first(world, fitting_meta, path, output_dir, resume, identity)
            return path, meta
        # one that was named is not replaced by another in silence
        if resume != "auto":
            raise UserError(f"--resume {path}: {wrong}")
        if world.is_main:
            print(f"checkpoint {path} is damaged ({wrong}); trying the one before")
    # to begin anew would throw away what may still be mended
    raise UserError(f"{output_dir}: every checkpoint is damaged; to start anew, give another "
                    "--output_dir or move them away")


def fitting_meta(path, output_dir, resume, identity):
    """state.json of a whole checkpoint of find_resume. UserError where it does not fit the run."""
    meta = load_meta(path)
    later = [str(p) for step, p in checkpoints(output_dir) if step > meta["step"]]
    # or the next --resume auto would take up the abandoned ones
    if later and resume != "auto":
        raise UserError(f"--resume {path}: later checkpoints stand in --output_dir "
                        f"({', '.join(later)}); move them away or give another --output_dir")
    # what decides the order of the data, or which weights there are; other flags may change
    for name, value in identity.items():
        before = meta["identity"].get(name)
        same, remedy = before == value, "give the same flags"
        if name == "training data":
            same, remedy = same_data(before, value), "give the same flags and files"
            if same_data(str(before).partition(" audio ")[0], value):       # the texts are the same
                remedy = ("its codes of audio are others: give the recordings as they were, and the "
                          "--code_cache or prepared folder of that run (codes that are made anew on "
                          "another kind of device differ in a few)")
        if not same:
            raise UserError(f"{path}: was made with another {name} ({before}, this run {value}); "
                            f"{remedy}, or another --output_dir")
    return meta


def same_data(before, now):
    """Whether two fingerprints of data agree, in what follows " audio " where both have that: a
    checkpoint of before 2026-11-26, and a dry run, know the texts alone.
    """
    texts, _, audio = str(before).partition(" audio ")
    texts_now, _, audio_now = str(now).partition(" audio ")
    return texts == texts_now and (audio == audio_now or not (audio and audio_now))


def last_args(output_dir, resume):
    """Flags of the run that --resume goes on with, as its newest checkpoint has them, or None.
    find_resume proves it later.
    """
    folders = [Path(resume)]
    if resume == "auto":        # the newest that can be read
        folders = [path for _, path in reversed(checkpoints(output_dir))]
    # nothing is hashed: all checkpoints of a run have the flags that matter in common
    for file in (folder / STATE_DIR / "state.json" for folder in folders):
        if is_file(file) and (state := read_json(file, STATE)):
            return state["args"]
    return None


def load_tensors(folder, stem, tensors, world=None):
    """Fill {name: tensor}, plain or sharded, from <stem>.safetensors (one file or several) of a
    folder; UserError where they differ. world: as in tensor_files.read_once.
    """
    files = tensor_files.files_in(folder, stem)
    found = {name: [part] for name, part in tensor_files.open_tensors(files).items()}
    # a step count is 0-d, which was written as one row
    wanted = {name: tensor.shape or (1,) for name, tensor in tensors.items()}
    if problem := tensor_files.compare(wanted, found):
        raise UserError(f"{folder}: its {stem} tensors do not fit this run: {problem}")
    for name, tensor in tensors.items():        # one by one: together they fill the memory again
        tensor = tensor.detach()
        read = partial(tensor_files.read_into, tensor, found[name])
        tensor_files.read_once(world, tensor, read)


def load_rng(path, rank, device):
    """Put back this rank's random states; a rank that the saved run did not have keeps its own."""
    # weights_only: a checkpoint from somebody else must not run code
    states = torch.load(Path(path) / STATE_DIR / "rng.pt", weights_only=True)
    if rank < len(states):
        set_rng_state(states[rank], device)


def set_rng_state(data, device):
    """Put back what rng_state returned (bytes)."""
    state = torch.load(io.BytesIO(data), weights_only=True)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    # a run may go on without the GPU that it was saved with, and the other way round
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
