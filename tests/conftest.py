"""Fixtures of all tests: one tiny model and data set a session, a pool of ranks, and trainers in processes."""
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")      # two busy cores: more threads make a tiny step 40 times slower
os.environ |= {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "536870912"}   # fewer page faults
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")     # threads that load a model may break torch's pool in a fork

import pytest
import torch

from tests.helpers.fork_server import ForkServer
from tests.helpers.pool import Pool
from tests.helpers.trainer import Tiny, train_forked

torch.set_num_threads(1)
gc.disable()    # until all tests are collected
SHARED_PYTHON = "SHARED_FORK_SERVER_PYTHON"     # set by xdist's controller for its workers

LONGEST = ("slurm", "recovery", "guides", "fsdp", "reproducible", "learns", "decoder", "train_sft", "minimal", "docs",
           "kernels", "plan", "train_bd3lm", "launchers", "pick_checkpoint", "generate_tts", "keep", "quantized",
           "judge_demo", "versions", "divergence", "loaded", "first_voice")      # test files by total time


def pytest_configure(config):
    config.option.loadscopereorder = False      # xdist would start files with many tests, not slow ones
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        # All workers share one fork server: a server for each worker would import torch again.
        config.fork_server = ForkServer(Path(tempfile.mkdtemp()))
        os.environ[SHARED_PYTHON] = str(config.fork_server.python)


def pytest_unconfigure(config):
    if hasattr(config, "fork_server"):
        config.fork_server.close()
        shutil.rmtree(config.fork_server.python.parent)


def pytest_collection_modifyitems(items):
    """Run the longest files first: started last, one of them would run alone at the end."""
    order = {f"test_{name}.py": position for position, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish():
    gc.freeze()     # as the scripts do: collections skip imported objects, and forked ranks share memory pages
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Count the skipped tests by reason, at the end of the output."""
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    for reason, count in Counter(skipped).most_common():
        terminalreporter.write_line(f"skipped {count}: {reason.removeprefix('Skipped: ')}")


HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCHLD)


def default_signals():
    """Restore the default handlers: a shell ignores SIGINT in background jobs, a finished trainer ignores late signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)


default_signals()


@pytest.fixture(autouse=True)
def as_a_fresh_process():
    """Undo side effects of a script that ran in this process: ignored signals, hooks, stop requests."""
    default_signals()
    unraisable = sys.unraisablehook
    yield
    sys.unraisablehook = unraisable
    if "core.cli" in sys.modules:
        sys.modules["core.cli"]._requested.clear()
    if "core.dist" in sys.modules:
        sys.modules["core.dist"].disarmed.clear()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    from speech import make_tiny
    root = tmp_path_factory.mktemp("tiny")
    make_tiny.main([str(root), "--clips", "24", "--speakers", "3"])
    return Tiny(root)


@pytest.fixture(scope="session")
def pool(quick_python, tmp_path_factory):
    """Pool that starts ranks of any trainer with their imports done."""
    return Pool(quick_python, tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="session")
def quick_python(tmp_path_factory):
    """Path of an interpreter that starts our scripts with their imports done (fork_server.py)."""
    if SHARED_PYTHON in os.environ:
        yield os.environ[SHARED_PYTHON]
        return
    server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    yield str(server.python)
    server.close()


@pytest.fixture(scope="session")
def quick(quick_python):
    """Environment variables with which bash and torchrun start that interpreter."""
    folders = Path(quick_python).parent, Path(sys.executable).parent
    return {"PATH": ":".join([*map(str, folders), os.environ["PATH"]]), "PYTHON_EXEC": quick_python}


@pytest.fixture
def forked(pool, tiny, tmp_path):
    """forked(*flags, ranks=1, name="out", env=None, ok=True) trains without the time of imports; returns a Run."""
    def run(*flags, name="out", **options):
        return train_forked(pool, tiny, tmp_path / name, *flags, cwd=tmp_path, **options)
    return run
