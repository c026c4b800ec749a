"""--dry_run and --auto of the chat trainer."""
import numpy as np
import torch

from common import plan
from distill import weights
from distill.dataset import PackedChats, samples_line
from distill.packed_lm import mixture_text


def loss(model, tokens, targets):
    """A PackedLM's loss of a pack of so many tokens, of which some are trained."""
    def numbers(*shape):
        return torch.zeros(shape, dtype=torch.int64)
    places, rows = numbers(tokens), numbers(targets)
    teacher = ()
    if model.prompted:          # the teacher's forward keeps only what the head reads: two tokens
        teacher = (None, None, places[:2], places[:2], places[:2].int(), rows, 2)
    elif model.share:
        teacher = (numbers(targets, 1), torch.zeros(targets, 1))
    batch = PackedChats(places, places, places[:2].int(), rows, rows, tokens, (), {}, *teacher)
    return model(batch).loss


def step_of(model):
    """plan.Step of a PackedLM."""
    return plan.Step(model, lambda model: weights.decoder_layers(model.native), loss)


def memory(model, setup, lengths, targets, order, epochs=range(1)):
    """(plan.Memory, tokens of the largest pack) of some epochs.

    model: the empty PackedLM as trained. lengths, targets: (n,) tokens of samples, trained ones.
    """
    tokens = int(np.maximum(plan.epoch_sums(order, epochs, lengths), setup.budget).max())
    trained = int(plan.epoch_sums(order, epochs, targets).max())
    return plan.memory(step_of(model), setup, (tokens, trained)), tokens


def choose(args, world, ranks, model, lengths, targets):
    """--auto: set the flags that are open; returns whether the model has to be built anew."""
    return plan.choose_packs(args, world, ranks, lengths,
                             lambda setup, order: memory(model, setup, lengths, targets, order)[0])


def print_plan(args, ranks, model, table, split, order, lines, left):
    """Print what a run comes to; UserError with all that it will not fit into.

    model: the empty PackedLM as trained. split: (numbers of samples to train, to validate). order:
    PackOrder. lines: on steps, intervals, start. left: steps to go.
    """
    setup = plan.setup_of(args, ranks)
    lengths, targets = table.lengths[split[0]], table.targets[split[0]]
    epochs = range(min(20, args.num_train_epochs))
    found, tokens = memory(model, setup, lengths, targets, order, epochs)
    average = (f"{len(lengths) / order.packs_per_epoch:.1f} samples and "
               f"{lengths.sum() / order.packs_per_epoch:,.0f} tokens each on average")
    print(plan.head_text(setup, model.native), *mixture_text(model), samples_line(table, *split),
          plan.packs_text(setup, order, lengths, average), *lines, sep="\n")
    saved = plan.checkpoint_bytes(model.native, setup.adapters)
    plan.print_room(args, setup, found, f"{tokens:,} tokens", saved, left, len(split[1]) > 0)
