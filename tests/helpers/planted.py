"""The speech trainer with one fault planted, as ranks of the pool run it: what a broken trainer teaches."""
import dataclasses

import numpy as np

import data
import train_v2_ddp
from speech import labels


def nothing(argv):
    train_v2_ddp.main(argv)


def no_delay(argv):
    """All codebooks in one row, in inputs and labels."""
    def rows(codes, bos, eos):
        made = np.full((len(codes) + codes.shape[1] + 1, codes.shape[1]), eos, np.int64)
        made[0], made[1:1 + len(codes)] = bos, codes
        return made

    def targets(codes, eos):
        made = np.full((len(codes) + codes.shape[1] + 1, codes.shape[1]), labels.IGNORE, np.int64)
        made[1:1 + len(codes)], made[1 + len(codes)] = codes, eos
        return made
    labels.delay_rows, labels.delay_labels = rows, targets
    train_v2_ddp.main(argv)


def no_shift(argv):
    """A row is trained on its own codes, not on the next row's: the model learns to repeat its input."""
    right = data.collate

    def collate(*args):
        batch = right(*args)
        return dataclasses.replace(batch, audio_rows=batch.audio_rows + 1)
    data.collate = collate
    train_v2_ddp.main(argv)


def no_end(argv):
    """Where end-of-stream belongs, the last code is trained once more: the model learns never to stop."""
    right = labels.delay_labels

    def targets(codes, eos):
        made = right(codes, eos)
        return np.where(made == eos, codes[-1], made)
    labels.delay_labels = targets
    train_v2_ddp.main(argv)
