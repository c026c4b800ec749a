"""Shared pieces of the tests: one tiny real-architecture model and dataset a session, and real trainer processes."""
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")      # two busy cores: more threads make a tiny step 40 times slower
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")     # threads that load a model may break torch's pool in a fork

import pytest
import torch
from pool import Pool
from progress import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)

LONGEST = ("recovery", "fsdp", "training", "slurm", "launchers", "preflight", "code_cache", "generate_tts",
           "train_bd3lm", "bad_input")


def pytest_configure(config):
    config.option.loadscopereorder = False      # xdist would begin with the files of most tests, not of the longest


def pytest_collection_modifyitems(items):
    """Files that take minutes first: begun last, one would run alone at the end."""
    place = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCHLD)


def default_signals():
    """Ignore no signal the project handles: children would ignore it as well, and bash can not even trap it then.

    A shell starts its background jobs with Ctrl-C ignored, and a trainer that ends ignores what comes too late.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)


default_signals()


@pytest.fixture(autouse=True)
def as_a_fresh_process():
    """A script's main run in this process leaves its last word said and signals ignored; the next test starts anew."""
    default_signals()
    yield
    if "parallel" in sys.modules:
        sys.modules["parallel"]._claimed.clear()
    if "watchdog" in sys.modules:
        sys.modules["watchdog"]._requested.clear()
        sys.modules["watchdog"]._at_rest.clear()


@dataclass
class Tiny:
    """A tiny native model, codec, speech and train.json, with the audio already encoded in a code cache."""
    root: Path

    @property
    def model(self):
        return self.root / "model"

    @property
    def codec(self):
        return self.root / "codec"

    @property
    def train_json(self):
        return self.root / "train.json"

    @property
    def codes(self):
        return self.root / "codes"

    def samples(self):
        return json.loads(self.train_json.read_text())


@dataclass
class Run:
    """A finished trainer process: exit status, what it printed, and the metrics it left."""
    status: int
    output: str
    output_dir: Path

    def metrics(self, name):
        """{step: value} of one name in metrics.jsonl."""
        rows = [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row[name] for row in rows if name in row}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    import make_tiny
    root = tmp_path_factory.mktemp("tiny")
    make_tiny.main([str(root), "--clips", "24", "--speakers", "3", "--voice", "numpy"])
    return Tiny(root)


def trainer_arguments(tiny, output_dir, *flags):
    """What follows the script's name to train the tiny model; flags override the defaults given here."""
    return ["--model_path", str(tiny.model), "--audio_tokenizer_path", str(tiny.codec), "--train_data_file",
            str(tiny.train_json), "--code_cache", str(tiny.codes), "--output_dir", str(output_dir), "--logging_dir",
            str(output_dir) + "-logs", "--report_to", "none", "--logging_steps", "1", "--warmup_steps", "2",
            "--num_workers", "1", "--preprocess_num_proc", "1", *map(str, flags)]


def trainer_command(tiny, output_dir, *flags, ranks=1):
    """A trainer's whole command line, as a user types it."""
    launcher = [sys.executable] if ranks == 1 else \
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, str(ROOT / "train_v2_ddp.py"), *trainer_arguments(tiny, output_dir, *flags)]


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Ranks of the trainer without its start-up time."""
    ranks = Pool(4, tmp_path_factory.mktemp("pool"))
    yield ranks
    ranks.close()


@pytest.fixture
def train(tiny, tmp_path):
    """train(*flags, ranks=1, name="out", env=None, ok=True) runs train_v2_ddp.py for real and returns a Run.

    It starts like a user's, with seconds of imports; see `forked`.
    """
    def run(*flags, ranks=1, name="out", env=None, ok=True, timeout=PATIENCE_S):
        output_dir = tmp_path / name
        done = subprocess.run(trainer_command(tiny, output_dir, *flags, ranks=ranks), cwd=tmp_path, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout,
                              env={**os.environ, **(env or {})})
        assert not ok or done.returncode == 0, done.stdout[-4000:]
        return Run(done.returncode, done.stdout, output_dir)
    return run


def train_forked(pool, tiny, output_dir, *flags, ranks=1, ok=True, main="train_v2_ddp.main", cwd=None, env=None):
    """The trainer's real main() on a real command line in ranks of the pool, each a process; returns the Run."""
    statuses, output = pool.run(ranks, main, trainer_arguments(tiny, output_dir, *flags),
                                cwd=cwd or output_dir.parent, env=env)
    assert not ok or not any(statuses), output[-4000:]
    return Run(max(statuses, key=abs), output, output_dir)


@pytest.fixture
def forked(pool, tiny, tmp_path):
    """As `train`, but its ranks are forked from a process that has done the imports."""
    def run(*flags, name="out", **options):
        return train_forked(pool, tiny, tmp_path / name, *flags, cwd=tmp_path, **options)
    return run
