"""--dry_run and --auto of the chat trainer, for core/memory.py."""
import copy
from functools import partial

import numpy as np
import torch

from core import memory as plans
from core import metrics
from distill import causal_lm
from distill.chat_data import PackedChats, samples_line


def loss(model, tokens, targets, kept=False):
    """Loss of a PackedLM on a pack of given sizes. kept: True for --keep."""
    places, rows = (torch.zeros(n, dtype=torch.int64) for n in (tokens, targets))
    teacher = None
    if model.prompted or kept:  # only the head's rows stay from the teacher's forward: two tokens
        two = places[:2]
        teacher = PackedChats(two, two, two.int(), rows, rows, 2, ())
    return model(PackedChats(places, places, places[:2].int(), rows, rows, tokens, (), teacher,
                             kept))[0]


def step_of(model):
    """memory.Step of a PackedLM without its frozen models."""
    model = copy.copy(model)
    model.frozen, model.parts = {}, None    # slices of files cannot be copied
    return plans.Step(model, lambda model: causal_lm.decoder_layers(model.native), loss)


def memory(model, lengths, targets, kept, setup, order):
    """{part: bytes} with the largest pack of an order. model: the empty PackedLM as trained.
    lengths, targets: (n,) tokens and trained tokens of each sample. kept: ChatTable or None."""
    rows = np.stack([lengths, targets], 1)
    pack = plans.largest_pack(order, rows, setup.max_tokens_per_batch)
    packs = [pack] if kept is None else [pack, (*pack, model.lora)]     # --keep's are filled alike
    parts = plans.estimate(step_of(model), setup, packs)
    if not model.frozen:
        return parts
    # frozen models add their shards, and one forward each with the weights gathered for it
    from distill import frozen
    width, parts["teacher"] = 2 if setup.bf16 else 4, 0
    for other in frozen.models(model):
        gathered = 0
        if not setup.cpu_offload:
            parts["teacher"] += sum(p.nbytes for p in other.parameters()) / setup.shards
        if setup.fsdp:
            layers = list(map(plans.count_values, causal_lm.decoder_layers(other.native)))
            parts["teacher"] += width * (plans.count_values(other) - sum(layers))
            gathered = 2 * width * max(layers)
        work = plans.step_bytes(step_of(other), setup._replace(gradient_checkpointing=None), pack)
        parts["activations"] = max(parts["activations"], work + gathered)
    return parts


def choose(args, world, ranks, model, lengths, targets, kept=None):
    """--auto: set the flags that the user did not give."""
    longest = 0 if kept is None else int(kept.lengths.max())
    plans.choose(args, world, ranks, plans.pack_setups(args, ranks, lengths, longest),
                 partial(memory, model, lengths, targets, kept))


def print_plan(args, ranks, model, table, split, order, lines, left, kept=None):
    """Print the plan of a run; UserError if GPU or disk are too small. split: numbers of samples to
    train and to validate. lines: about steps, intervals, start. left: remaining steps."""
    needed = memory(model, table.lengths[split[0]], table.targets[split[0]], kept,
                    plans.setup_of(args, ranks), order)
    plans.print_plan(args, needed, model.native, [
        metrics.model_text(model, args.use_lora), samples_line(table, *split), *lines], left)
