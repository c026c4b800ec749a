"""resume.damage: what is no whole checkpoint, whatever its files hold; a kill before every change that a save makes
to the disk. Kills and resumes of whole runs: test_recovery.py.
"""
import hashlib
import json
import os
import re
import shutil
import signal
import sys

import pytest

from common import checkpoint, resume, run
from common.distributed import UserError, World
from core.new_folder import new_folder

STATE = {"step": 4, "epoch": 0, "first": 8, "identity": {}, "validation": None, "best_step": None, "best_loss": None,
         "skipped": 0, "unlogged": [], "args": {}}


def make(folder, state=None, manifest=None):
    """A checkpoint of one weight file; state, manifest: bytes instead of the right ones."""
    files = {"model.safetensors": b"weights", "trainer_state/state.json":
             json.dumps(STATE).encode() if state is None else state}
    (folder / "trainer_state").mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    (folder / "manifest.json").write_bytes(
        json.dumps({"step": 4, "files": listed}).encode() if manifest is None else manifest)
    return folder


def test_a_whole_one(tmp_path):
    assert resume.damage(make(tmp_path / "checkpoint-4")) == ""


@pytest.mark.parametrize("data, why", [(b"weighty", "checksum"), (b"weight", "bytes")])
def test_a_file_that_is_another(tmp_path, data, why):
    folder = make(tmp_path / "checkpoint-4")
    (folder / "model.safetensors").write_bytes(data)
    assert re.search(f"model.safetensors .*{why}", resume.damage(folder))


def test_rotation_spares_the_best_the_newest_and_later_ones(tmp_path):
    """By number, not by name; 200 is of an earlier run and was passed over."""
    for step in (9, 10, 100, 200):
        (tmp_path / f"checkpoint-{step}").mkdir()
    checkpoint.rotate(tmp_path, 100, 0)
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [9, 10, 100, 200]
    checkpoint.rotate(tmp_path, 100, 1, best_step=9)
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [9, 100, 200]
    assert [path.name for path in checkpoint.to_try(tmp_path, "auto")] == [
        "checkpoint-200", "checkpoint-100", "checkpoint-9"]
    with pytest.raises(UserError, match="--resume none, but .* holds checkpoints"):
        checkpoint.to_try(tmp_path, "none")
    assert checkpoint.to_try(tmp_path / "new", "none") == []


def test_of_a_link_the_link_alone_is_deleted(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "weights").write_text("x")
    (tmp_path / LEFT[0]).symlink_to(tmp_path / "theirs")
    assert checkpoint.remove_named(tmp_path, checkpoint.UNFINISHED) == [LEFT[0]]
    assert (tmp_path / "theirs" / "weights").exists() and not os.path.lexists(tmp_path / LEFT[0])


def test_a_step_that_is_reached_again_keeps_what_was_there(tmp_path):
    for _ in range(2):
        save(tmp_path, 4)
        assert resume.damage(tmp_path / "checkpoint-4") == ""
    aside, = tmp_path.glob("checkpoint-4.passed-over-*")
    assert resume.damage(aside) == ""


def test_all_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """In the order of the calls: each file, each folder, the new name, the folder of the name."""
    calls = []

    def noted(name, real, path):
        def call(*args):
            calls.append((name, path(*args)))
            return real(*args)
        monkeypatch.setattr(os, name, call)
    noted("fsync", os.fsync, lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    for name in ("rename", "replace"):
        noted(name, getattr(os, name), lambda old, new: str(new))
    save(tmp_path, 4)
    final = tmp_path / "checkpoint-4"
    named = calls.index(("rename", str(final)))
    before = {re.sub(r"\.tmp-\w+", "", path) for name, path in calls[:named] if name == "fsync"}
    assert before >= {str(path) for path in [final, *final.rglob("*")]}
    assert ("fsync", str(tmp_path)) in calls[named:]
    calls.clear()
    checkpoint.write_text(tmp_path / "run.yaml", "a: 1\n")
    assert [name for name, _ in calls] == ["fsync", "replace", "fsync"] and calls[2][1] == str(tmp_path)


LEFT = ["checkpoint-6.tmp-0123abcd", "checkpoint-4.tmp-deleted-1764000000000", "table-0123abcd",
        f".run.yaml.tmp-{'a' * 32}"]
THEIRS = ["checkpoint-500.tmp", "checkpoint-500.tmp-keep", "checkpoint-best.tmp-0123abcd", "checkpoint-6.tmp-0123abcd.bak",
          "checkpoint-٣.tmp-0123abcd", "table-of-contents", ".notes.tmp-mine", "checkpoint-500"]


def test_only_what_this_code_has_named_is_deleted(tmp_path, capsys):
    for name in LEFT + THEIRS:
        if name.startswith("."):
            (tmp_path / name).write_text("x")
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").write_text("weights")
    checkpoint.own_output(tmp_path)
    said = capsys.readouterr().out
    assert all(name in said for name in LEFT if "table" not in name) and not any(f"{name}," in said for name in THEIRS)
    checkpoint.remove_named(tmp_path, checkpoint.TABLE)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "run.lock") == sorted(THEIRS)
    assert all((tmp_path / name / "model.safetensors").exists() for name in THEIRS if name[0] != ".")
    assert checkpoint.new_table(tmp_path).name != checkpoint.new_table(tmp_path).name
    assert re.fullmatch(checkpoint.TABLE, checkpoint.new_table(tmp_path).name)


@pytest.mark.parametrize("name", ["x[1]", "*", "m2"])
def test_a_new_folder_deletes_none_of_other_names(tmp_path, name, capsys):
    theirs = [tmp_path / other for other in (".x1.new-mine", f".y.new-{'b' * 32}", ".m2.new-backup", ".x1.new")]
    left = tmp_path / f".{name}.new-{'c' * 32}"
    for folder in [*theirs, left]:
        folder.mkdir()
    with new_folder(tmp_path / name) as building:
        assert re.fullmatch(rf"\.{re.escape(name)}\.new-[0-9a-f]{{32}}", building.name)
    assert all(folder.exists() for folder in theirs) and not left.exists()
    assert f"removed {left}" in capsys.readouterr().out


@pytest.mark.parametrize("manifest, why", [
    (b"[]", "unreadable"), (b"{}", "unreadable"), (b'{"files": []}', "unreadable"), (b"\xff", "unreadable"),
    (b"[" * 100_000, "unreadable"), (b'{"files": {"model.safetensors": {"bytes": 7}}}', "unreadable"),
    (b'{"files": {"model.safetensors": 7}}', "unreadable"), (b'{"files": {}}', "does not list"),
    (b'{"files": {"model.safetensors": {"bytes": "7", "sha256": "x"}}}', "unreadable"),
])
def test_manifests_that_prove_nothing(tmp_path, manifest, why):
    assert why in resume.damage(make(tmp_path / "checkpoint-4", manifest=manifest))


@pytest.mark.parametrize("state", [b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"step": "4"}',
                                   json.dumps(STATE | {"step": True}).encode(),
                                   json.dumps(STATE | {"epoch": -1}).encode(),
                                   json.dumps(STATE | {"unlogged": ["1"]}).encode(),
                                   json.dumps(STATE | {"best_loss": "low"}).encode(),
                                   json.dumps({k: v for k, v in STATE.items() if k != "args"}).encode(),
                                   json.dumps({k: v for k, v in STATE.items() if k != "validation"}).encode(),
                                   json.dumps({k: v for k, v in STATE.items() if k != "identity"}).encode()])
def test_states_without_a_position(tmp_path, state, capsys):
    """Checksums right: somebody wrote them so. The checkpoint before is taken, with one line and no traceback."""
    make(tmp_path / "checkpoint-2")
    make(tmp_path / "checkpoint-4", state=state)
    path, meta = run.find_resume(tmp_path, "auto", {})
    assert path.name == "checkpoint-2" and meta["first"] == 8
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "checkpoint-4 is damaged" in said and "does not say where the run stood" in said


# ---------------------------------------------------------------------------------------------------------------------
# Kills

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "open"}     # events of sys.addaudithook


def save(out, step):
    """A checkpoint as a trainer saves it, in this process; of those before, only the best one and the last stay."""
    checkpoint.own_output(out)
    writer = checkpoint.Writer(World(), out, keep=1)
    writer.begin(step)
    files = {"model.safetensors": lambda path: path.write_bytes(bytes([step]) * 1000),
             "*": lambda folder: [(folder / name).write_text(name) for name in ("config.json", "tokenizer.json")]}
    writer.save(step, files, STATE | {"step": step, "best_step": 1})
    writer.finish()


def killed(out, step, change):
    """save() in a process of its own, killed right before its change of that number to the disk; whether it came to it.
    """
    child = os.fork()
    if not child:
        left = [change]

        def hook(event, args):
            writes = event != "open" or isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            ours = event in CHANGES and (str(out) in str(args[0]) or not str(args[0]).startswith("/"))
            if ours and writes:         # rmtree names what lies in an open folder
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        status = 1
        try:
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
    """Of checkpoints 1 (the best), 2 and the new 3 the newest is whole, and the next save leaves nothing behind.

    again: a damaged checkpoint 3 is there, which the resume has passed over.
    """
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
        whole = resume.newest_whole(out, report=lambda text: None)
        seen.add(whole.name)
        assert whole.name in ("checkpoint-2", "checkpoint-3") and not resume.damage(out / "checkpoint-1")
        save(out, 4)
        names = {path.name for path in out.iterdir() if path.name != "run.lock"}
        kept = {name for name in names if ".passed-over-" in name}
        assert names - kept == {"checkpoint-1", "checkpoint-4"}
        assert all((out / name / "model.safetensors").read_bytes() == b"damaged" for name in kept)
        assert len(kept) == again or came       # a save that nothing kills moves it aside, and deletes nothing of it
        shutil.rmtree(out)
        if not came:
            break
    assert not came and changes > 15 and seen == {"checkpoint-2", "checkpoint-3"}
