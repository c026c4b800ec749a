"""Trainers and a torchrun that cost nothing, for tests of the launchers around them."""
import os

import pytest


@pytest.fixture
def script(tmp_path):
    """script(text) -> path of a small trainer."""
    def write(text):
        path = tmp_path / "trainer.py"
        path.write_text(text)
        return str(path)
    return write


@pytest.fixture
def light(tmp_path):
    """A PATH whose torchrun starts one trainer without importing torch."""
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "torchrun").write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\npython "$@"\n')
    (tmp_path / "light" / "torchrun").chmod(0o755)
    return f"{tmp_path}/light:{os.environ['PATH']}"
