"""A colleague's cache, checkpoints and output folder, seen by a second user: used, or refused for the right reason."""
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from core import checkpoint
from core.dist import World
from tests.common.test_checkpoint import make
from tests.helpers import second_user
from tests.helpers.trainer import ROOT, Run, Tiny, trainer_arguments

pytestmark = second_user.needs_root


@pytest.fixture
def open_to_all():
    with second_user.open_folder() as folder:
        yield folder


def latest(folder):
    """The checkpoint that a run in this folder would resume from."""
    return checkpoint.CheckpointManager(World(device=torch.device("cpu")), folder).latest()[0]


def files(folder):
    return {path: (path.stat().st_mode, path.stat().st_size) for path in Path(folder).rglob("*")}


@pytest.mark.slow
def test_a_run_on_a_colleagues_cache_model_and_checkpoint(open_to_all, tiny, pool):
    """It writes nothing there; all that it writes has the mode that its umask leaves."""
    if isinstance(second_user.ask(os.listdir, ROOT / "core"), OSError):
        pytest.skip("a second user may not read this repository")
    theirs, mine = open_to_all / "theirs", open_to_all / "mine"
    tiny = Tiny(shutil.copytree(tiny.root, open_to_all / "tiny"))
    tiny.root.chmod(0o755)
    flags = ("--use_lora", "--disable_eval", "--learning_rate", 1e-3, "--num_workers", 0)
    mine.mkdir()
    os.chown(mine, second_user.NOBODY, second_user.NOBODY)

    def run(output_dir, steps, *more):
        argv = trainer_arguments(tiny, output_dir, *flags, "--max_steps", steps, *more)
        (status,), output = pool.run(1, "tests.helpers.second_user.run", "tests.helpers.trainer.speech_main", 0o027, argv,
                                     cwd=open_to_all)
        return Run(status, output, output_dir)

    statuses, output = pool.run(1, "tests.helpers.trainer.speech_main", trainer_arguments(tiny, theirs, *flags, "--max_steps", 2))
    assert statuses == [0], output
    before = files(tiny.root), files(theirs)
    done = run(mine / "out", 3, "--resume", theirs / "checkpoint-2")
    assert done.status == 0, done.output
    assert f"resumed from {theirs}/checkpoint-2" in done.output and "damaged" not in done.output
    assert (files(tiny.root), files(theirs)) == before
    for path, (mode, _) in files(mine / "out").items():
        assert stat.S_IMODE(mode) == (0o750 if path.is_dir() else 0o640), path
    refused = run(theirs, 3)
    assert refused.status == 1 and f"error: --output_dir {theirs}: cannot be written (Permission denied)" in \
        refused.output.splitlines()
    (theirs / "checkpoint-2" / "adapter_model.safetensors").chmod(0o600)
    refused = run(mine / "other", 3, "--resume", theirs / "checkpoint-2")
    said, = [line for line in refused.output.splitlines() if line.startswith("error: ")]
    assert refused.status == 1 and "Permission denied: this user may not" in said, refused.output
    assert "adapter_model.safetensors" in said and "damaged" not in refused.output and "Traceback" not in refused.output


def test_checkpoints_that_may_not_be_read_are_not_called_damaged(open_to_all, capfd):
    for step in (2, 4):
        make(open_to_all / f"checkpoint-{step}")
    newest = open_to_all / "checkpoint-4"
    assert second_user.ask(latest, open_to_all) == newest
    for closed, mode in ((newest / "manifest.json", 0o600), (newest / "trainer_state" / "state.json", 0o600),
                         (newest, 0o700), (open_to_all, 0o711)):
        before = stat.S_IMODE(closed.stat().st_mode)
        closed.chmod(mode)
        answer = second_user.ask(latest, open_to_all)
        assert isinstance(answer, PermissionError) and str(closed) in answer.filename, answer
        closed.chmod(before)
    assert "damaged" not in capfd.readouterr().out
