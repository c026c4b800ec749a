"""What runs and tests of students share: the seed, the share held out, the loss by transformers' own forward;
train_sft.py, a script of module-level code, in this process."""
import gc
import json
import runpy
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

from tests.helpers import trainer
from tests.helpers.trainer import ROOT

HELD_OUT, SEED = 0.15, 42
SCRIPT = str(ROOT / "distill" / "train_sft.py")
MAIN = "tests.helpers.students.run_trainer"     # of pool.run


def run_trainer(argv):
    """train_sft.py on a command line, in this process."""
    sys.argv = [SCRIPT, *map(str, argv)]
    with mock.patch("faulthandler.enable"):     # pytest and the pool have their own
        runpy.run_path(SCRIPT, run_name="__main__")


def script_flags():
    """(parser, check_flags) of train_sft.py; nothing else of it runs."""
    return trainer.script_flags("distill/train_sft.py")


def plan_run(argv, gpus=2):
    """A dry run of train_sft.py in this process; UserError for what is wrong."""
    parser, check = script_flags()
    words = [*map(str, argv), "--dry_run", str(gpus)]
    check(parser.parse_args(words), gpus)
    hook = sys.excepthook
    try:
        with mock.patch.object(sys, "argv", []):
            run_trainer(words)
    except SystemExit as ended:
        assert not ended.code
    finally:
        gc.enable()
        sys.excepthook = hook


# what tests of flags ask of a trainer that has a main()
train_sft = SimpleNamespace(
    __name__="distill.train_sft", main=run_trainer, build_parser=lambda: script_flags()[0],
    check_flags=lambda args, world_size: script_flags()[1](args, world_size))


def sample_loss(model, table, number):
    """(sum of cross-entropies of trained tokens, how many were right) of one sample by transformers' own forward."""
    part = slice(table.offsets[number], table.offsets[number + 1])
    ids = torch.from_numpy(table.tokens[part].astype(np.int64))
    labels = torch.where(torch.from_numpy(table.trained[part].copy()), ids, -100)
    logits = model(input_ids=ids[None]).logits[0, :-1]
    return (F.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100),
            (logits.argmax(-1) == labels[1:]).sum())


def train(pool, ranks, output_dir, *flags, fails=""):
    """{step: {metric: value}} of a run of train_sft.py; None of one that ends with the words of `fails`."""
    statuses, output = pool.run(ranks, MAIN, [str(flag) for flag in (
        "--output_dir", output_dir, "--num_workers", 0, "--report_to", "none", "--logging_steps", 1, *flags)])
    assert any(statuses) == bool(fails) and fails in output, output
    if fails:
        return None
    found = {}
    for line in map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines()):
        found.setdefault(line["step"], {}).update(line)
    return found
