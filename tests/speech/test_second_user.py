"""A colleague's cache, checkpoints and output folder, seen by a second user: used, or refused for the right reason."""
import stat

import pytest
import torch

from core import checkpoint
from core.dist import World
from tests.common.test_checkpoint import make
from tests.helpers import second_user

pytestmark = second_user.needs_root


@pytest.fixture
def open_to_all():
    with second_user.open_folder() as folder:
        yield folder


def latest(folder):
    """The checkpoint that a run in this folder would resume from."""
    return checkpoint.CheckpointManager(World(device=torch.device("cpu")), folder).latest()[0]


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
