"""checkpoint.damage: what is no whole checkpoint, whatever its files hold. Kills and resumes: test_recovery.py."""
import hashlib
import json

import pytest

from common import checkpoint

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
    assert checkpoint.damage(make(tmp_path / "checkpoint-4")) == ""


@pytest.mark.parametrize("manifest, why", [
    (b"[]", "unreadable"), (b"{}", "unreadable"), (b'{"files": []}', "unreadable"), (b"\xff", "unreadable"),
    (b"[" * 100_000, "unreadable"), (b'{"files": {"model.safetensors": {"bytes": 7}}}', "unreadable"),
    (b'{"files": {"model.safetensors": 7}}', "unreadable"), (b'{"files": {}}', "does not list"),
    (b'{"files": {"model.safetensors": {"bytes": "7", "sha256": "x"}}}', "unreadable"),
])
def test_manifests_that_prove_nothing(tmp_path, manifest, why):
    assert why in checkpoint.damage(make(tmp_path / "checkpoint-4", manifest=manifest))


@pytest.mark.parametrize("state", [b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"step": "4"}',
                                   json.dumps(STATE | {"step": True}).encode(),
                                   json.dumps({k: v for k, v in STATE.items() if k != "identity"}).encode()])
def test_states_without_a_position(tmp_path, state, capsys):
    """Checksums right: somebody wrote them so. The checkpoint before is taken, with one line and no traceback."""
    make(tmp_path / "checkpoint-2")
    make(tmp_path / "checkpoint-4", state=state)
    path, meta = checkpoint.find_resume(tmp_path, "auto", {})
    assert path.name == "checkpoint-2" and meta["first"] == 8
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "checkpoint-4 is damaged" in said and "does not say where the run stood" in said
