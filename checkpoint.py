"""Checkpoints that are either whole or not there, rotation, and everything exact resume needs.

output_dir/checkpoint-<step>/ holds what people use (adapter or model files) beside trainer_state/ (optimizer, random
states of every rank, position) and manifest.json, written last, with the size and SHA-256 of every file. The folder is
built under a .tmp name, synced to disk and renamed, so a kill at any instant leaves the last whole one untouched.

Shared module: torch and numpy; copy parallel.py (UserError) with it.
"""
import hashlib
import io
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import torch

from parallel import UserError

MANIFEST = "manifest.json"
STATE_DIR = "trainer_state"


def fsync_path(path):
    """Flush a file or folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path, write):
    """write(temporary_path), sync, rename onto path: readers see the old file or the new one, never half of one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        write(temporary)
        fsync_path(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def sha256_file(path):
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def prepare_output(output_dir, flag="--output_dir"):
    """Make a folder and prove that it can be written; raises UserError naming the flag that gave it."""
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(output_dir) / ".writable", lambda path: path.write_text("ok"))
        (Path(output_dir) / ".writable").unlink()
    except OSError as error:
        raise UserError(f"{flag} {output_dir}: cannot be written ({error.strerror})")


def rng_state(device):
    """Random states of this process (python, numpy, torch CPU, this GPU) as bytes."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, torch.from_numpy(keys.copy()), *rest),
             "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    buffer = io.BytesIO()
    torch.save(state, buffer)
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


def save(output_dir, step, write_model, trainer_state, meta, keep=0):
    """Write output_dir/checkpoint-<step> whole or not at all; returns its path. Call on one rank.

    write_model(folder) writes the files people use. trainer_state: {file stem: object for torch.save}. meta: JSON-able
    dict for trainer_state/state.json; meta["best_step"] names the checkpoint that rotation must keep. keep: how many of
    the newest stay (0 = all). An error leaves earlier checkpoints as they were.
    """
    final = Path(output_dir) / f"checkpoint-{step}"
    building = final.with_name(final.name + ".tmp")
    for stale in Path(output_dir).glob("checkpoint-*.tmp*"):        # left by a kill
        shutil.rmtree(stale)
    try:
        (building / STATE_DIR).mkdir(parents=True)
        write_model(building)
        for stem, value in trainer_state.items():
            torch.save(value, building / STATE_DIR / f"{stem}.pt")
        (building / STATE_DIR / "state.json").write_text(json.dumps(meta, indent=1))
        files = sorted(p for p in building.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(building)): {"bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in files}
        (building / MANIFEST).write_text(json.dumps({"step": step, "files": manifest}, indent=1))
        for path in [*files, building / MANIFEST, *[p for p in building.rglob("*") if p.is_dir()], building]:
            fsync_path(path)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    if final.exists():      # damaged, so passed over when resuming; now this step is reached again
        delete(final)
    os.rename(building, final)
    fsync_path(final.parent)
    rotate(output_dir, step, keep, meta.get("best_step"))
    return final


def checkpoints(output_dir):
    """[(step, path)] of the renamed, thus complete, checkpoint folders, oldest first."""
    found = []
    for path in Path(output_dir).glob("checkpoint-*"):
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
    """Delete a checkpoint folder; it loses its name first, so that a kill leaves no half of one under it."""
    doomed = path.with_name(path.name + ".tmp-deleted")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def damage(path):
    """What is wrong with a checkpoint folder, in words, or "" when every file has its size and checksum."""
    path = Path(path)
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"no {MANIFEST}"
    except (ValueError, KeyError, TypeError):
        return f"unreadable {MANIFEST}"
    for name, facts in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
        if sha256_file(file) != facts["sha256"]:
            return f"{name} has another checksum than when it was written"
    return ""


def newest_whole(output_dir, report=print):
    """Path of the newest undamaged checkpoint, or None; damaged ones are reported and passed over."""
    for _, path in reversed(checkpoints(output_dir)):
        wrong = damage(path)
        if not wrong:
            return path
        report(f"checkpoint {path} is damaged ({wrong}); trying the one before")
    return None


def load_meta(path):
    """state.json of a checkpoint folder as a dict."""
    return json.loads((Path(path) / STATE_DIR / "state.json").read_text())


def load_state(path, stem):
    """Object saved as trainer_state/<stem>.pt, on the CPU; tensors stay mapped to the file until they are used."""
    return torch.load(Path(path) / STATE_DIR / f"{stem}.pt", map_location="cpu", weights_only=True, mmap=True)


def find_resume(output_dir, resume, identity):
    """(checkpoint folder or None, its meta or None) for --resume auto | none | FOLDER.

    identity: {name: value} that the checkpoint's meta must share. Raises UserError when nothing usable is there, or it
    is another run's.
    """
    path = Path(resume)
    if resume == "none":
        if checkpoints(output_dir):
            raise UserError(f"--resume none, but {output_dir} holds checkpoints: give another --output_dir, delete "
                            "them, or use --resume auto")
        return None, None
    if resume == "auto":
        path = newest_whole(output_dir)
        if path is None:
            if checkpoints(output_dir):
                raise UserError(f"{output_dir}: every checkpoint is damaged; delete them to start anew")
            return None, None
    elif wrong := damage(path) if path.is_dir() else "no such folder":
        raise UserError(f"--resume {path}: {wrong}")
    meta = load_meta(path)
    later = [str(p) for step, p in checkpoints(output_dir) if step > meta["step"]]
    if later and resume != "auto":      # or the next --resume auto would take up the abandoned ones
        raise UserError(f"--resume {path}: later checkpoints stand in --output_dir ({', '.join(later)}); delete them "
                        "or give another --output_dir")
    for name, value in identity.items():
        if meta["identity"].get(name) != value:
            raise UserError(f"{path}: was made with another {name} ({meta['identity'].get(name)}, this run {value}); "
                            "give the same flags or another --output_dir")
    return path, meta
