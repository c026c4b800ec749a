"""What runs and tests of students share: the seed, the share held out, the loss by transformers' own forward."""
import json

import numpy as np
import torch
import torch.nn.functional as F

HELD_OUT, SEED = 0.15, 42


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
    statuses, output = pool.run(ranks, "distill.train_sft.main", [str(flag) for flag in (
        "--output_dir", output_dir, "--num_workers", 0, "--report_to", "none", "--logging_steps", 1, *flags)])
    assert any(statuses) == bool(fails) and fails in output, output
    if fails:
        return None
    found = {}
    for line in map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines()):
        found.setdefault(line["step"], {}).update(line)
    return found
