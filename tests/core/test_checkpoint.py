"""core.checkpoint finds damage and deletes safely. A save is killed before each of its changes to the disk."""
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from core import checkpoint, optim, tensor_io
from core.cli import UserError
from core.dist import World
from tests.helpers.runs import steps_of

STATE = {"step": 4, "epoch": 0, "first": 4, "identity": {"seed": 1}, "validation": None, "best_step": None,
         "best_loss": None}
LEFTOVERS = ["checkpoint-6.tmp-0123abcd", "checkpoint-4.tmp-deleted-1764000000000"]
FOREIGN = ["checkpoint-500.tmp", "checkpoint-500.tmp-keep", "checkpoint-best.tmp-0123abcd", "checkpoint-500",
           "checkpoint-6.tmp-0123abcd.bak", "checkpoint-٣.tmp-0123abcd", ".notes.tmp"]


def test_weights_that_are_not_numbers_are_named(tmp_path):
    save_file({"a.weight": torch.tensor([[0.0, torch.nan]])}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="a.weight holds NaN or infinity"):
        tensor_io.load(World(), tmp_path, "model", {"a.weight": torch.zeros(1, 2)})


def make(folder):
    files = {"model.safetensors": b"weights", "trainer_state/state.json": json.dumps(STATE).encode()}
    (folder / "trainer_state").mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    (folder / "manifest.json").write_text(json.dumps({"step": 4, "files": listed}))
    return folder


def save(out, step, begun=lambda model: None):
    """Save as a trainer does; only the best and the last checkpoint stay. begun(model) runs during the write."""
    checkpoint.lock_folder(out)
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, step)
    optimizer = torch.optim.AdamW(model.parameters())
    args = SimpleNamespace(output_dir=out, save_total_limit=1)
    checkpoint.save(World(device=torch.device("cpu")), args, step, model, optimizer, {
        "model": dict(model.named_parameters())}, lambda folder: (
        folder / "config.json").write_text("{}"), STATE | {"step": step, "best_step": 1})
    begun(model)
    checkpoint.wait()


@pytest.mark.parametrize("name, data, why", [
    ("model.safetensors", b"weights", ""), ("model.safetensors", b"weighty", "model.safetensors has changed"),
    ("model.safetensors", None, "model.safetensors is missing"), ("manifest.json", None, "no manifest.json"),
    ("manifest.json", b"[]", "unreadable"), ("manifest.json", b"\xff", "unreadable"),
    ("manifest.json", b'{"files": {}}', "unreadable"), ("manifest.json", (
        b'{"files": {"model.safetensors": {"bytes": 7}, "trainer_state/state.json": 1}}'), "model.* has changed")])
def test_damage_is_found(tmp_path, name, data, why):
    make(tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    if data is not None:
        (tmp_path / "out" / name).write_bytes(data)
    assert re.match(why or "$", checkpoint.find_damage(tmp_path / "out"))


def test_rotation_keeps_the_best_the_newest_later_and_unfinished_checkpoints(tmp_path):
    """Order is by number, not by name. An earlier run left 200, and resume ignored it; 8 has no manifest."""
    for step in (8, 9, 10, 100, 200):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step != 8:
            (tmp_path / f"checkpoint-{step}" / "manifest.json").touch()
    checkpoint.rotate(tmp_path, 100, 0)
    assert steps_of(tmp_path) == [8, 9, 10, 100, 200]
    checkpoint.rotate(tmp_path, 100, 1, best_step=9)
    assert steps_of(tmp_path) == [8, 9, 100, 200]
    with pytest.raises(UserError, match="--resume none, but .* holds checkpoints"):
        checkpoint.find_newest(tmp_path, "none")


def test_auto_resume_skips_damaged_checkpoints_and_an_explicit_one_is_refused(tmp_path, capsys):
    assert checkpoint.find_newest(tmp_path, "auto") == checkpoint.find_newest(tmp_path, "none") == (None, {})
    make(tmp_path / "checkpoint-4")
    bad = make(tmp_path / "checkpoint-6")
    (bad / "manifest.json").write_bytes(b"")
    path, state = checkpoint.find_newest(tmp_path, "auto")
    assert path.name == "checkpoint-4" and state == STATE
    assert f"checkpoint {bad} is damaged (unreadable manifest.json)" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"--resume {bad}: unreadable manifest"):
        checkpoint.find_newest(tmp_path, str(bad))
    with pytest.raises(UserError, match="later checkpoints are in --output_dir .step 6"):
        checkpoint.find_newest(tmp_path, str(tmp_path / "checkpoint-4"))
    (tmp_path / "checkpoint-4" / "manifest.json").unlink()
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        checkpoint.find_newest(tmp_path, "auto")


def test_a_checkpoint_of_other_flags_is_refused(tmp_path):
    path = make(tmp_path / "checkpoint-4")
    assert checkpoint.find_newest(tmp_path, "auto", {"seed": 1}) == (path, STATE)
    with pytest.raises(UserError, match="was made with another seed .1, this run 2.*or another --output_dir"):
        checkpoint.find_newest(tmp_path, "auto", {"seed": 2})


def test_a_second_save_of_a_step_keeps_the_first(tmp_path):
    for _ in range(2):
        save(tmp_path, 4)
        assert checkpoint.find_damage(tmp_path / "checkpoint-4") == ""
    aside, = tmp_path.glob("checkpoint-4.passed-over-*")
    assert checkpoint.find_damage(aside) == ""


def test_training_during_a_save_does_not_change_the_checkpoint(tmp_path, monkeypatch):
    trained, write_atomically = threading.Event(), checkpoint.write_atomically

    def train(model):
        torch.nn.init.zeros_(model.weight)
        trained.set()
    monkeypatch.setattr(checkpoint, "write_atomically", lambda *args: trained.wait(60) and write_atomically(*args))
    save(tmp_path, 4, train)
    assert load_file(tmp_path / "checkpoint-4" / "model.safetensors")["weight"].unique().tolist() == [4]


def test_a_failed_write_is_noticed_at_the_next_step(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write_atomically", lambda *args: 1 / 0)

    def next_steps(model):
        with pytest.raises(UserError, match="checkpoint-4 could not be written .* earlier checkpoints are intact"):
            for _ in range(100):
                checkpoint.wait(only_if_done=True)
                time.sleep(0.05)
    save(tmp_path, 4, next_steps)


def test_a_run_that_fails_completes_its_checkpoint_first(tmp_path, monkeypatch):
    write_atomically = checkpoint.write_atomically
    monkeypatch.setattr(checkpoint, "write_atomically", lambda *args: time.sleep(0.5) or write_atomically(*args))
    monitor = optim.StepMonitor(World(device=torch.device("cpu")), str)
    monitor.push(5, torch.zeros(()), False)

    def fail(model):
        with pytest.raises(UserError, match="step 5: the gradient norm is exactly 0"):
            monitor.poll()
        assert (tmp_path / "checkpoint-4").exists()
    save(tmp_path, 4, fail)


def test_files_are_synced_before_the_rename(tmp_path, monkeypatch):
    """The calls come in this order: each file, each folder, the rename, the parent folder."""
    calls = []

    def record(name, real, path):
        def call(*args):
            calls.append((name, path(*args)))
            return real(*args)
        monkeypatch.setattr(os, name, call)
    record("fsync", os.fsync, lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    for name in ("rename", "replace"):
        record(name, getattr(os, name), lambda old, new: str(new))
    save(tmp_path, 4)
    final = tmp_path / "checkpoint-4"
    renamed = calls.index(("rename", str(final)))
    before = {re.sub(r"\.tmp-\w+", "", path) for _, path in calls[:renamed]}    # the manifest is replaced, see below
    assert before >= {str(path) for path in [final, *final.rglob("*")]}
    assert ("fsync", str(tmp_path)) in calls[renamed:]
    calls.clear()
    (tmp_path / ".run.yaml.tmp").symlink_to(tmp_path / "a file of somebody else")
    checkpoint.write_text(tmp_path / "run.yaml", "a: 1\n")
    assert not (tmp_path / "a file of somebody else").exists()
    assert [name for name, _ in calls] == ["fsync", "replace", "fsync"] and calls[2][1] == str(tmp_path)


def test_cleanup_deletes_only_leftovers_of_this_code(tmp_path):
    for name in LEFTOVERS + FOREIGN:
        if name.startswith("."):
            (tmp_path / name).write_text("x")
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").write_text("weights")
    (tmp_path / "checkpoint-7.tmp-0123abcd").symlink_to(tmp_path / "checkpoint-500")    # only the link goes
    checkpoint.remove_named(tmp_path, checkpoint.UNFINISHED)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FOREIGN)
    assert all((tmp_path / name / "model.safetensors").exists() for name in FOREIGN if name[0] != ".")


def test_a_new_folder_is_whole_or_absent_and_deletes_nothing(tmp_path):
    """Of two folders that are made at the same time, the first stays."""
    with pytest.raises(KeyError), checkpoint.new_folder(tmp_path / "out") as building:
        (building / "half").touch()
        raise KeyError
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="out: cannot be written .*not empty"), checkpoint.new_folder(tmp_path / "out"):
        with checkpoint.new_folder(tmp_path / "out") as first:
            (first / "whole").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(UserError, match="is there already"), checkpoint.new_folder(tmp_path / "out"):
        pass


CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "open"}     # events of sys.addaudithook


def killed(out, step, change):
    """Run save() in a process that is killed right before its change number `change` to the disk; True if it was."""
    child = os.fork()
    if not child:
        left = [change]

        def hook(event, args):
            writes = event != "open" or isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            in_output = event in CHANGES and (str(out) in str(args[0]) or not str(args[0]).startswith("/"))
            if in_output and writes:         # rmtree gives names relative to an open folder
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        status = 1
        try:
            checkpoint._writer = ThreadPoolExecutor(1)      # a fork has no threads
            sys.addaudithook(hook)
            save(out, step)
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.parametrize("again", [False, True], ids=["new", "passed over"])
def test_a_kill_before_any_change_of_the_disk_costs_nothing(tmp_path, again):
    """1 is the best, 3 is new; after the kill, 2 or 3 is whole. again: a damaged 3 was already there."""
    first = tmp_path / "first"
    save(first, 1)
    save(first, 2)
    if again:
        shutil.copytree(first / "checkpoint-2", first / "checkpoint-3")
        (first / "checkpoint-3" / "model.safetensors").write_bytes(b"damaged")
    seen, changes = set(), 0
    for changes in range(200):
        out = tmp_path / f"out{changes}"
        shutil.copytree(first, out, ignore=shutil.ignore_patterns("run.lock"))
        came = killed(out, 3, changes)
        whole, _ = checkpoint.find_newest(out, "auto")
        seen.add(whole.name)
        assert whole.name in ("checkpoint-2", "checkpoint-3") and not checkpoint.find_damage(out / "checkpoint-1")
        save(out, 4)
        names = {path.name for path in out.iterdir() if path.name != "run.lock"}
        kept = {name for name in names if ".passed-over-" in name}
        assert names - kept == {"checkpoint-1", "checkpoint-4"}
        assert all((out / name / "model.safetensors").read_bytes() == b"damaged" for name in kept)
        assert len(kept) == again or came       # a complete save moves it aside and keeps its files
        shutil.rmtree(out)
        if not came:
            break
    assert not came and changes > 15 and seen == {"checkpoint-2", "checkpoint-3"}


def test_no_run_starts_over_in_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, mock.Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        checkpoint.list_checkpoints(tmp_path)
