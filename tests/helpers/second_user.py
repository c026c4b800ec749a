"""A second user: a process becomes one that has no rights but everybody's, as under setpriv. Only root can do that."""
import contextlib
import importlib
import os
import pickle
import tempfile
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to become a second user needs root")


@contextlib.contextmanager
def open_folder():
    """A temporary folder that a second user can read; pytest keeps those that it makes to their owner."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def become(umask=0o022):
    """This process is nobody's from here on."""
    for encoding in ("ascii", "latin_1", "utf_8_sig"):      # imported late, which others may not where root's home
        importlib.import_module(f"encodings.{encoding}")    # holds Python
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.umask(umask)
    os.environ["HOME"] = "/nonexistent"


def run(main, umask, argv):
    """Call "module.main" with a command line as nobody; for Pool.run."""
    module, name = main.rsplit(".", 1)
    function = getattr(importlib.import_module(module), name)
    become(umask)
    function(argv)


def ask(function, *args):
    """What function(*args) returns, or the error that it raises, in a fork of this process that is nobody's."""
    out, back = os.pipe()
    if (child := os.fork()) == 0:
        try:
            become()
            answer = function(*args)
        except BaseException as error:
            answer = error
        os.write(back, pickle.dumps(answer))
        os._exit(0)
    os.close(back)
    with open(out, "rb") as file:
        answer = pickle.load(file)
    os.waitpid(child, 0)
    return answer
