"""Packs of samples in the same order for every world size, their loaders, and columns on disk.

The order of packs is a function of (seed, epoch) alone. Micro-step m of an optimizer step on rank r
takes pack `first + m * world_size + r`, where `first` is the position stored in a checkpoint. So a
run can stop on 16 GPUs, resume on 8 with twice the accumulation, and see the same data. An epoch's
last step is filled with empty packs of zero weight, so every rank runs the same number of steps.
"""
import bisect
import functools
import itertools
import os
import signal
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from core.cli import UserError, first_line, require
from core.dist import error_names_file
from core.run import BLOCKED_SIGNALS, init_loader

# --group_by_length: the packs of a step have similar lengths, but steps come in random order. So
# blocks of sorted packs are shuffled: of the largest of SIZES that gives BLOCKS of them.
SIZES, BLOCKS = (512, 256, 128, 64, 32, 16, 8), 64
JITTER = 0.01       # relative noise on lengths before sorting, so that neighbours change by epoch


@dataclass
class EpochPlan:
    """Packs of one epoch. Pack p holds samples[offsets[q]:offsets[q + 1]], where q = packs[p]."""
    samples: np.ndarray     # (n_samples,) int64
    offsets: np.ndarray     # (n_packs + 1,) int64
    packs: np.ndarray       # (n_packs,) int64

    def __len__(self):
        return len(self.packs)

    def pack(self, p):
        """Sample indices (n,) of pack p; none for packs that fill the last step."""
        if p >= len(self):
            return self.samples[:0]
        return self.samples[slice(*self.offsets[self.packs[p]:self.packs[p] + 2])]


def best_fit(lengths, order, budget):
    """Yield packs, lists of sample indices of at most `budget` tokens. lengths: (n,) tokens.
    order: (n,) sample indices, packed in windows of 4096. ValueError if a sample is longer."""
    for start in range(0, len(order), 4096):
        window = order[start:start + 4096]
        # longest first, so that short samples fill the gaps
        window = window[np.argsort(-lengths[window], kind="stable")]
        bins, free = [], []     # free: (remaining tokens, number of the pack), ascending by tokens
        for i, n in zip(window.tolist(), lengths[window].tolist()):
            if n > budget:
                raise ValueError(f"sample {i} has {n} tokens, more than the {budget} of a pack")
            # the fullest pack that still has room, or a new one
            position = bisect.bisect_left(free, n, key=itemgetter(0))
            if position < len(free):
                room, b = free.pop(position)
                bins[b].append(i)
            else:
                room, b = budget, len(bins)
                bins.append([i])
            bisect.insort_left(free, (room - n, b), key=itemgetter(0))
        yield from bins


class PackOrder:
    """Deterministic packs of every epoch. lengths: (n,) tokens per sample. numbers: (n,) numbers of
    these samples in a larger table, which rank_packs and window() return. With tokens_per_pack the
    seed fixes which samples share a pack, and each epoch shuffles the packs. Otherwise each epoch
    draws the samples of a pack: of similar lengths with group_by_length, in the table's order
    without shuffle."""

    def __init__(self, lengths, numbers=None, *, samples_per_pack=0, tokens_per_pack=0, seed=0,
                 group_by_length=False, shuffle=True):
        assert shuffle or not (tokens_per_pack or group_by_length)      # their order is random
        self.lengths, self.size, self.seed = np.asarray(lengths), samples_per_pack, seed
        self.shuffle, self.group_by_length = shuffle, group_by_length
        # keeps two plans, as the loader reads ahead into the next epoch
        self.epoch = functools.lru_cache(2)(self._plan)
        self._bins, n = None, len(self.lengths)
        self.numbers = np.arange(n) if numbers is None else numbers
        if tokens_per_pack:     # by the seed alone, as packing is too slow to repeat in every epoch
            order = np.random.default_rng((seed, 0)).permutation(n)
            packs = list(best_fit(self.lengths, order, tokens_per_pack))
            samples = np.fromiter(itertools.chain.from_iterable(packs), np.int64)
            self._bins = samples, np.cumsum([0, *map(len, packs)])
        self.packs_per_epoch = len(packs) if tokens_per_pack else -(-n // samples_per_pack)

    def _plan(self, epoch):
        """EpochPlan of an epoch; it does not depend on which epochs were planned before."""
        rng = np.random.default_rng((self.seed, epoch, 1))
        n, packs = len(self.lengths), np.arange(self.packs_per_epoch)
        if self._bins:
            return EpochPlan(*self._bins, rng.permutation(packs))
        order = rng.permutation(n) if self.shuffle else np.arange(n)
        if self.group_by_length:
            window = np.arange(n) // (self.size * BLOCKS * SIZES[0])    # samples sorted together
            # without noise the same samples would share a pack in every epoch
            keys = -self.lengths * rng.uniform(1, 1 + JITTER, n)
            order = order[np.lexsort((keys[order], window))]
            size = next((size for size in SIZES if size * BLOCKS <= len(packs)), SIZES[-1])
            whole = len(packs) // size * size       # a shorter last block stays last
            packs[:whole] = rng.permutation(packs[:whole].reshape(-1, size)).ravel()
        return EpochPlan(order, np.minimum(np.arange(len(packs) + 1) * self.size, n), packs)

    def sums(self, values):
        """Sums (packs, ...) int64 of values (samples, ...) over each pack; of 20 epochs where each
        draws different packs."""
        plans = map(self.epoch, range(1 if self._bins else 20))
        return np.concatenate([np.add.reduceat(
            values[plan.samples].astype(np.int64), plan.offsets[:-1]) for plan in plans])

    def largest_pack(self):
        """Sample numbers (n,) of the pack with the most tokens."""
        plan = self.epoch(0)
        sizes = np.add.reduceat(self.lengths[plan.samples], plan.offsets[:-1])
        return self.numbers[plan.samples[slice(*plan.offsets[sizes.argmax():][:2])]]

    def window(self, epoch, first, count):
        """Sample numbers (n,) of `count` packs from `first` on, such as a step of all ranks."""
        plan = self.epoch(epoch)
        return self.numbers[np.concatenate([plan.pack(p) for p in range(first, first + count)])]


def rank_packs(order, rank, world_size, accumulation, epochs, epoch=0, first=0):
    """Yield this rank's packs, lists of sample numbers, from (epoch, first) on. Every rank gets the
    same number of packs."""
    per_step = world_size * accumulation
    while epoch < epochs:
        plan = order.epoch(epoch)
        for step in range(first, len(plan), per_step):
            for micro in range(accumulation):
                yield order.numbers[plan.pack(step + micro * world_size + rank)].tolist()
        epoch, first = epoch + 1, 0         # only the first epoch may start in the middle


def run_length(packs_per_epoch, per_step, epochs, max_steps, position):
    """(optimizer steps per epoch, optimizer step at which the run ends). per_step: packs of all
    ranks. max_steps: replaces `epochs` if above 0. position: {"step", "epoch", "first"} now."""
    steps_per_epoch = -(-packs_per_epoch // per_step)
    # the rest of the current epoch, then whole ones
    left = -(-max(0, packs_per_epoch - position["first"]) // per_step)
    left += (epochs - position["epoch"] - 1) * steps_per_epoch
    return steps_per_epoch, max_steps or position["step"] + max(0, left)


# ---- Batches from loader processes


class Batch:
    """Base of dataclasses of CPU tensors and plain values."""

    def __getstate__(self):     # tensors as arrays, so that they do not need /dev/shm
        return {name: value.numpy() if torch.is_tensor(value) else value
                for name, value in vars(self).items()}

    def __setstate__(self, values):
        vars(self).update({name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                           for name, value in values.items()})

    def to(self, device):
        """This batch on a device. Copies to a GPU use pinned memory, so the host does not wait."""
        values, cuda = dict(vars(self)), torch.device(device).type == "cuda"
        for name, value in values.items():
            if torch.is_tensor(value):
                value = value.pin_memory() if cuda and value.device.type == "cpu" else value
                values[name] = value.to(device, non_blocking=True)
        return type(self)(**values)


def pack_loader(samples, packs, collate, num_workers, prefetch_factor):
    """DataLoader of collate([samples[i] for i in pack]) over `packs`, lists of sample numbers."""
    # fork shares the mapped files; without a generator the loader would use the one of dropout
    return DataLoader(samples, batch_sampler=packs, collate_fn=collate, num_workers=num_workers,
                      worker_init_fn=init_loader, generator=torch.Generator(),
                      prefetch_factor=prefetch_factor if num_workers else None,
                      persistent_workers=num_workers > 0,
                      multiprocessing_context="fork" if num_workers else None)


def iterate(loader):
    """Iterator over a DataLoader's batches. Its processes are forked now and end with it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)  # until loaders ignore them
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def iterate_batches():
        try:
            yield from batches
        except UserError as error:
            raise UserError(str(error).rpartition("core.cli.UserError: ")[2].strip()) from None
        except RuntimeError as error:       # only the cause names a signal
            reason = str(error.__cause__ or error)
            require(not reason.startswith("DataLoader worker"), f"{first_line(reason)}; if memory "
                    "was short, give a smaller --num_workers or --preprocess_num_proc")
            raise
        finally:        # else an error's traceback keeps the processes, and the exit waits for them
            if loader.num_workers:
                batches._shutdown_workers()
    return iterate_batches()


# ---- Tables of millions of samples


class Column:
    """A .npy file to which numbers are appended, so that memory never holds all of them."""

    def __init__(self, path, dtype):
        self.path, self.dtype, self.length = Path(path), np.dtype(dtype), 0
        self.file = open(path, "w+b", buffering=2**18)      # forked processes do not use it
        self._flush()

    def __len__(self):
        return self.length

    def _flush(self):       # rewrites the header, which has room for a longer shape
        with error_names_file(self.path):
            self.file.seek(0)
            np.lib.format.write_array_header_1_0(self.file, {
                "descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False,
                "shape": (self.length,)})
            self.file.seek(0, os.SEEK_END)
            self.file.flush()

    def append(self, values):
        with error_names_file(self.path):
            self.file.write(np.ascontiguousarray(values, self.dtype).tobytes())
        self.length += len(values)

    def array(self):
        """Memory-mapped array of all numbers so far."""
        self._flush()
        return np.load(self.path, mmap_mode="r" if self.length else None)  # else there is no map

    def close(self):
        self._flush()
        self.file.close()


class _Share(IterableDataset):      # the parts that one loader process makes
    def __init__(self, share):
        self.share = share

    def __iter__(self):
        worker = get_worker_info()
        return self.share(worker.id, worker.num_workers)


def parallel_map_ordered(share, processes, take):
    """Call take(part) for each part of a sequence, in order; `processes` make them. share(first,
    step): generator of the parts first, first + step, ... without tensors (they need /dev/shm)."""
    parts = share(0, 1)
    if processes:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")    # its threads die in a fork
        parts = iterate(DataLoader(
            _Share(share), batch_size=None, num_workers=processes, worker_init_fn=init_loader,
            collate_fn=lambda chunk: chunk, multiprocessing_context="fork"))
    for chunk in parts:
        take(chunk)


def token_lists(tokenizer):
    """Function that turns a list of texts into lists of token ids, without special tokens."""
    return lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)[
        "input_ids"] if texts else []
