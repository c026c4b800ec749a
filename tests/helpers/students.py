"""What runs and tests of students share: the seed, the share held out, the loss by transformers' own forward."""
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
