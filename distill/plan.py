"""--dry_run and --auto of the chat trainer."""
import copy
from dataclasses import replace

import numpy as np
import torch

from common import plan, step_memory
from core.packing import PackOrder
from distill import causal_lm
from distill.chat_data import PackedChats, samples_line
from distill.packed_lm import mixture_text


def loss(model, tokens, targets, kept=False):
    """A PackedLM's loss of a pack of so many tokens, of which some are trained. kept: of --keep."""
    def numbers(*shape):
        return torch.zeros(shape, dtype=torch.int64)
    places, rows = numbers(tokens), numbers(targets)
    teacher = ()
    if model.prompted or kept:  # the teacher's forward keeps only what the head reads: two tokens
        teacher = (places[:2], places[:2], places[:2].int(), rows, 2)
    batch = PackedChats(places, places, places[:2].int(), rows, rows, tokens, (), {}, *teacher)
    return model(replace(batch, kept=kept)).loss


def layers_of(model):
    return causal_lm.decoder_layers(model.native)


def step_of(model):
    """step_memory.Step of a PackedLM, equal for one model without frozen ones beside it, so that it
    is run once; those are counted by with_frozen.
    """
    if model.frozen:
        model = copy.copy(model)
        model.frozen = {}
    return step_memory.Step(model, layers_of, loss)


def memory(model, setup, lengths, targets, order, epochs=range(1), kept=None):
    """(step_memory.Memory, tokens of its pack, the worst one) of some epochs.

    model: the empty PackedLM as trained. lengths, targets: (n,) tokens of samples, trained ones.
    kept: ChatTable of --keep, or None.
    """
    tokens = int(np.maximum(plan.epoch_sums(order, epochs, lengths), setup.budget).max())
    trained = int(plan.epoch_sums(order, epochs, targets).max())
    found = step_memory.estimate(step_of(model), setup, (tokens, trained))
    pack = tokens, trained
    if kept is not None:
        theirs = PackOrder(kept.lengths, tokens_per_pack=setup.budget,
                           samples_per_pack=setup.batch_size, seed=order.seed)
        theirs = [int(plan.epoch_sums(theirs, range(20), of).max())
                  for of in (kept.lengths, kept.targets)]
        other = step_memory.estimate(step_of(model), setup, (*theirs, model.lora))
        if other.peak > found.peak:
            found, tokens = other, theirs[0]
        pack = tuple(map(max, pack, theirs))
    if model.frozen:
        found = with_frozen(found, model, setup, pack)
    return found, tokens


def with_frozen(found, model, setup, pack):
    """step_memory.Memory with a PackedLM's frozen models: shards and gathered roots, always, and their forward as a stage."""
    from distill import frozen
    value, whole, stages = 2 if setup.bf16 else 4, 0, {}
    standing = sum(found.parts.get(name, 0) for name in ("weights", "optimizer", "average", "fixed"))
    standing += found.parts["gradients"] * (not setup.fresh)
    host = found.host
    for name, other in frozen.models(model):
        layers = [sum(p.numel() for p in layer.parameters()) for layer in causal_lm.decoder_layers(other.native)]
        stored, root = sum(p.nbytes for p in other.parameters()), 0
        if setup.fsdp:
            root = value * (sum(p.numel() for p in other.parameters()) - sum(layers))
        host += stored / setup.shards * bool(setup.offload)
        whole += root + stored / setup.shards * (not setup.offload)
        alone = replace(setup, recompute=None, accumulation=1)
        work = max(step_memory.step_bytes(step_of(other.packed), alone, pack, train=False).values())
        stages[f"the {name}'s forward"] = standing + work + (2 * value * max(layers) if setup.fsdp else 0)
    stages |= found.stages
    return step_memory.Memory(found.parts | {"teacher": whole}, {name: of + whole for name, of in stages.items()}, host)


def choose(args, world, ranks, model, lengths, targets, kept=None):
    """--auto: set the flags that are open; returns whether the model has to be built anew."""
    return plan.choose_packs(args, world, ranks, lengths,
                             lambda setup, order: memory(model, setup, lengths, targets, order, kept=kept)[0],
                             0 if kept is None else int(kept.lengths.max()))


def print_plan(args, ranks, model, table, split, order, lines, left, kept=None):
    """Print what a run comes to; UserError with all that it will not fit into.

    model: the empty PackedLM as trained. split: (numbers of samples to train, to validate). order:
    PackOrder. lines: on steps, intervals, start. left: steps to go.
    """
    setup = plan.setup_of(args, ranks)
    lengths, targets = table.lengths[split[0]], table.targets[split[0]]
    epochs = range(min(20, args.num_train_epochs))
    found, tokens = memory(model, setup, lengths, targets, order, epochs, kept)
    average = (f"{len(lengths) / order.packs_per_epoch:.1f} samples and "
               f"{lengths.sum() / order.packs_per_epoch:,.0f} tokens each on average")
    beside = []
    if model.frozen:
        from distill import frozen
        beside = frozen.text(model)
    print(plan.head_text(setup, model.native), *mixture_text(model), *beside, samples_line(table, *split),
          plan.packs_text(setup, order, lengths, average), *lines, sep="\n")
    saved = plan.checkpoint_bytes(model.native, setup.adapters)
    plan.print_room(args, setup, found, f"{tokens:,} tokens", saved, left, len(split[1]) > 0)
