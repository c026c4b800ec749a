"""bench/gloo_names.py: gathers as the trainers make them live; the others may."""
import json
import subprocess

import pytest

from bench import gloo_names


@pytest.mark.slow
def test_the_command_leaves_its_numbers(tmp_path):
    gloo_names.main(["--seconds", "2", "--runs", "1", "--results_dir", str(tmp_path)])
    table = json.loads((tmp_path / "gloo_names-cpu.json").read_text())["tables"]["ends"]
    (ours, gathers, end), (theirs, others, their_end) = table["rows"]
    assert (ours, theirs, end) == ("ALLGATHER", "ALLGATHER_COALESCED", "status 0") and gathers > 0
    assert others > 0 or their_end.startswith("SIG")        # it may die at once


def test_a_process_that_a_signal_ends_is_told(monkeypatch):
    monkeypatch.setattr(gloo_names, "GATHERS", "import os\nprint(200, flush=True)\nos.abort()")
    assert gloo_names.run("ALLGATHER", 1) == ["ALLGATHER", 200, "SIGABRT"]


def test_a_process_that_fails_otherwise_is_no_evidence(monkeypatch):
    monkeypatch.setattr(gloo_names, "GATHERS", "torch.ops.none")
    with pytest.raises(subprocess.CalledProcessError):
        gloo_names.run("ALLGATHER", 1)
