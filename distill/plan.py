"""--dry_run and --auto of the chat trainer, for core/memory.py."""
import copy

import numpy as np
import torch

from core import memory as plans
from distill import causal_lm
from distill.chat_data import PackedChats
from distill.packed_lm import PackedLM


def loss(model, tokens, targets, kept=False):
    """Loss of a PackedLM on a pack of given sizes. kept: True for --keep."""
    places, rows = (torch.zeros(n, dtype=torch.int64) for n in (tokens, targets))
    teacher = None
    if model.prompted or kept:  # only the head's rows stay from the teacher's forward: two tokens
        two = places[:2]
        teacher = PackedChats(two, two, two.int(), rows, rows, 2, ())
    return model(PackedChats(places, places, places[:2].int(), rows, rows, tokens, (), teacher,
                             kept))[0]


def alone(model):
    """A PackedLM without its frozen models, and slices of files, which cannot be copied."""
    model = copy.copy(model)
    model.frozen, model.parts = {}, None
    return model


def memory(model, table, train, kept, args, order):
    """{part: bytes} with the largest pack of an order. model: the empty PackedLM as trained.
    table, kept: ChatTables, the second or None. train: (n,) numbers of the trained samples."""
    rows = np.stack([table.lengths, table.targets], 1)[train]
    pack = plans.largest_pack(order, rows, args.max_tokens_per_batch)
    packs = [pack] if kept is None else [pack, (*pack, model.lora)]     # --keep's are filled alike
    # frozen models add their shards, and one forward each with the weights gathered for it
    others = [other for other in dict.fromkeys(model.frozen.values())
              if isinstance(other, PackedLM)]       # not a server
    parts = plans.estimate(alone(model), loss, args, packs, others)
    for other in others:
        work = plans.step_bytes(alone(other), loss, args, pack)
        if args.parallel != "ddp":
            width = 2 if args.bf16 else 4
            layers = list(map(plans.count_values, causal_lm.decoder_layers(other.native)))
            parts["teacher"] += width * (plans.count_values(other) - sum(layers))
            work += 2 * width * max(layers)
        parts["activations"] = max(parts["activations"], work)
    return parts
