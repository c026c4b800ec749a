"""Samples, their order and the number of steps of a run: the same for the trainer and for its dry run.

Copy with it: data.py, codes.py, packing.py, parallel.py and what those name.
"""
import sys

from common.packing import PackOrder
from common.parallel import UserError
from data import within_length
from speech.codes import FRAME_RATE


def usable_samples(args, config, table, train, held_out, say=True):
    """(training, validation) sample numbers within the length limits; say: tell how many others were dropped."""
    limits = {"--max_length": args.max_length or config.max_position_embeddings,
              "--max_tokens_per_batch": args.max_tokens_per_batch or sys.maxsize}
    train_ids, eval_ids = (within_length(table, n, limits, args.drop_too_long) for n in (train, held_out))
    if say and len(train_ids) + len(eval_ids) < len(train) + len(held_out):
        print(f"data       dropped as too long: {len(train) - len(train_ids)} of {len(train)} training and "
              f"{len(held_out) - len(eval_ids)} of {len(held_out)} validation samples")
    if not len(train_ids):
        raise UserError("no training samples are left after the length limit")
    return train_ids, eval_ids


def pack_order(args, lengths):
    """PackOrder of the training samples. lengths: (n,) tokens."""
    return PackOrder(lengths, seed=args.seed, group_by_length=args.group_by_length,
                     tokens_per_pack=args.max_tokens_per_batch,
                     samples_per_pack=0 if args.max_tokens_per_batch else args.per_device_train_batch_size)


def run_length(args, order, per_step, position):
    """(optimizer steps an epoch, of the whole run). per_step: packs a step; position: to start from."""
    steps_per_epoch = -(-order.packs_per_epoch // per_step)
    left = -(-max(0, order.packs_per_epoch - position["first"]) // per_step)
    left += (args.num_train_epochs - position["epoch"] - 1) * steps_per_epoch
    return steps_per_epoch, args.max_steps or position["step"] + max(0, left)


def samples_line(table, train_ids, eval_ids):
    """How many samples, how long."""
    lengths, hours = table.lengths[train_ids], table.frames[train_ids].sum() / FRAME_RATE / 3600
    return (f"samples    {len(train_ids)} to train, {len(eval_ids)} to validate; tokens mean {lengths.mean():.0f} "
            f"max {lengths.max()}; {hours:.2f} h of audio")
