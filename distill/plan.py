"""--dry_run and --auto of the chat trainer, for core/memory.py."""
import copy
from dataclasses import replace

import numpy as np
import torch

from core import memory as plans
from core.packing import PackOrder
from distill import causal_lm
from distill.chat_data import PackedChats, samples_line


def loss(model, tokens, targets, kept=False):
    """Loss of a PackedLM on this many tokens with this many targets. kept: True for --keep."""
    places, rows = (torch.zeros(n, dtype=torch.int64) for n in (tokens, targets))
    teacher = None
    if model.prompted or kept:  # the teacher's forward keeps only the head's rows: two tokens
        two = places[:2]
        teacher = PackedChats(two, two, two.int(), rows, rows, 2, ())
    return model(PackedChats(places, places, places[:2].int(), rows, rows, tokens, (), teacher,
                             kept)).loss


def step_of(model):
    """memory.Step of a PackedLM without its frozen models."""
    if model.frozen:
        model = copy.copy(model)
        model.frozen = {}
    return plans.Step(model, lambda model: causal_lm.decoder_layers(model.native), loss)


def memory(model, setup, lengths, targets, order, epochs=range(1), kept=None):
    """(memory.Memory, tokens) of the pack with the highest peak in some epochs.

    model: the empty PackedLM as trained. lengths, targets: (n,) tokens and trained tokens of each
    sample. kept: ChatTable of --keep, or None.
    """
    packs = [(int(np.maximum(plans.pack_sums(order, epochs, lengths), setup.budget).max()),
              int(plans.pack_sums(order, epochs, targets).max()))]
    if kept is not None:
        theirs = PackOrder(kept.lengths, tokens_per_pack=setup.budget,
                           samples_per_pack=setup.batch_size, seed=order.seed)
        packs.append((*(int(plans.pack_sums(theirs, range(20), of).max())
                        for of in (kept.lengths, kept.targets)), model.lora))
    found, tokens = max(((plans.estimate(step_of(model), setup, pack), pack[0]) for pack in packs),
                        key=lambda one: one[0].peak)
    if not model.frozen:
        return found, tokens
    # frozen models add their shards, gathered roots and one forward each
    from distill import frozen
    pack = tuple(max(pack[place] for pack in packs) for place in range(2))
    value, whole, stages = 2 if setup.bf16 else 4, 0, {}
    standing = sum(found.parts[name] for name in ("weights", "optimizer", "average", "fixed"))
    standing += found.parts["gradients"] * (not setup.fresh)
    for name, other in frozen.models(model):
        layers = list(map(plans.values_of, causal_lm.decoder_layers(other.native)))
        stored = sum(p.nbytes for p in other.parameters()) / setup.shards
        whole += stored * (not setup.offload)
        gathered = 0
        if setup.fsdp:
            whole += value * (plans.values_of(other) - sum(layers))
            gathered = 2 * value * max(layers)
        alone = replace(setup, recompute=None, accumulation=1)
        work = max(plans.step_bytes(step_of(other), alone, pack, train=False).values())
        stages[f"the {name}'s forward"] = standing + work + gathered
    stages |= found.stages
    return plans.Memory(found.parts | {"teacher": whole},
                        {name: of + whole for name, of in stages.items()}), tokens


def choose(args, world, ranks, model, lengths, targets, kept=None):
    """--auto: set the open flags; returns True if the model must be rebuilt."""
    return plans.choose_packs(
        args, world, ranks, lengths,
        lambda setup, order: memory(model, setup, lengths, targets, order, kept=kept)[0],
        0 if kept is None else int(kept.lengths.max()))


def print_plan(args, ranks, model, table, split, order, lines, left, kept=None):
    """Print the plan of a run; UserError lists every limit that it exceeds.

    model: the empty PackedLM as trained. split: (training, validation) sample numbers. order:
    PackOrder. lines: about steps, intervals, start. left: remaining steps.
    """
    setup = plans.setup_of(args, ranks)
    lengths, targets = table.lengths[split[0]], table.targets[split[0]]
    found, tokens = memory(model, setup, lengths, targets, order,
                           range(min(20, args.num_train_epochs)), kept)
    plans.print_plan(args, setup, found, f"{tokens:,} tokens", model.native, [
        *plans.data_lines(args, setup, model.native, order, lengths), samples_line(table, *split),
        *lines], left)
