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
from collections import deque
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from operator import itemgetter

import numpy as np
import torch

from core import cli

# --group_by_length: the packs of a step have similar lengths, but steps come in random order. So
# blocks of sorted packs are shuffled: of the largest of SIZES that gives BLOCKS of them.
SIZES, BLOCKS = (512, 256, 128, 64, 32, 16, 8), 64
JITTER = 0.01       # relative noise on lengths before sorting, so that neighbours change by epoch


def best_fit(lengths, order, budget):
    """Yield packs, lists of sample indices of at most `budget` tokens. lengths: (n,) tokens.
    order: (n,) sample indices, packed in windows of 4096. ValueError if a sample is longer."""
    for start in range(0, len(order), 4096):
        window = order[start:start + 4096]
        # longest first, so that short samples fill the gaps
        window = window[np.argsort(-lengths[window], kind="stable")]
        bins, free = [], []     # free: (remaining tokens, pack), ascending by tokens
        for i, n in zip(window.tolist(), lengths[window].tolist()):
            if n > budget:
                raise ValueError(f"sample {i} has {n} tokens, more than the {budget} of a pack")
            # the fullest pack that still has room, or a new one
            position = bisect.bisect_left(free, n, key=itemgetter(0))
            room, pack = free.pop(position) if position < len(free) else (budget, [])
            if not pack:
                bins.append(pack)
            pack.append(i)
            bisect.insort_left(free, (room - n, pack), key=itemgetter(0))
        yield from bins


class PackOrder:
    """Deterministic packs of every epoch. lengths: (n,) tokens per sample. numbers: (n,) numbers of
    these samples in a larger table, which window() returns. With tokens_per_pack the seed fixes
    which samples share a pack, and each epoch shuffles the packs. Otherwise each epoch draws the
    samples of a pack, with group_by_length of similar lengths."""

    def __init__(self, lengths, numbers=None, *, samples_per_pack=0, tokens_per_pack=0, seed=0,
                 group_by_length=False):
        self.lengths, self.size, self.seed = np.asarray(lengths), samples_per_pack, seed
        self.grouped = group_by_length
        # keeps two plans, as the loader reads ahead into the next epoch
        self.epoch = functools.lru_cache(2)(self._plan)
        n = len(self.lengths)
        self.numbers = np.arange(n) if numbers is None else numbers
        if tokens_per_pack:     # by the seed alone, as packing is too slow to repeat in every epoch
            order = np.random.default_rng((seed, 0)).permutation(n)
            packs = list(best_fit(self.lengths, order, tokens_per_pack))
            self.packed = np.concatenate([order[:0], *packs])
            self.bounds = np.cumsum([0, *map(len, packs)])
        else:
            self.packed, self.bounds = None, np.append(np.arange(0, n, samples_per_pack), n)
        self.packs_per_epoch = len(self.bounds) - 1

    def _plan(self, epoch):
        """(packs, samples (n,)) of an epoch: its p-th pack k = packs[p] has the sample indices
        samples[bounds[k]:bounds[k + 1]]. No plan depends on another."""
        rng = np.random.default_rng((self.seed, epoch, 1))
        n, packs = len(self.lengths), np.arange(self.packs_per_epoch)
        if self.packed is not None:
            return rng.permutation(packs), self.packed
        samples = rng.permutation(n)
        if self.grouped:
            window = np.arange(n) // (self.size * BLOCKS * SIZES[0])    # samples sorted together
            # without noise the same samples would share a pack in every epoch
            keys = -self.lengths * rng.uniform(1, 1 + JITTER, n)
            samples = samples[np.lexsort((keys[samples], window))]
            size = next((size for size in SIZES if size * BLOCKS <= len(packs)), SIZES[-1])
            whole = len(packs) // size * size       # a shorter last block stays last
            packs[:whole] = rng.permutation(packs[:whole].reshape(-1, size)).ravel()
        return packs, samples

    def window(self, epoch, first, count=1):
        """Sample numbers (n,) of `count` packs from `first` on, such as a step of all ranks. Packs
        after the last one, which fill the last step, are empty."""
        packs, samples = self.epoch(epoch)
        parts = [samples[self.bounds[k]:self.bounds[k + 1]] for k in packs[first:first + count]]
        return self.numbers[np.concatenate([samples[:0], *parts])]

    def sums(self, values, epochs=20):
        """Sums (packs, ...) int64 of values (samples, ...) over each pack; of the first `epochs`,
        if each draws other packs."""
        plans = map(self.epoch, range(epochs if self.packed is None else 1))
        return np.concatenate([np.add.reduceat(values[samples].astype(np.int64), self.bounds[:-1])[
            packs] for packs, samples in plans])


def rank_packs(order, rank, world_size, accumulation, epochs, epoch=0, first=0):
    """Yield this rank's packs, lists of sample numbers, from (epoch, first) on. Every rank gets the
    same number of packs."""
    while epoch < epochs:
        for step in range(first, order.packs_per_epoch, world_size * accumulation):
            for micro in range(accumulation):
                yield order.window(epoch, step + micro * world_size + rank).tolist()
        epoch, first = epoch + 1, 0         # only the first epoch may start in the middle


def packs_in_order(numbers, size, rank, world_size):
    """This rank's packs of `size` of these sample numbers, to validate. Every rank gets the same
    number of packs, so the last ones may be empty."""
    return [numbers[start + rank * size:][:size].tolist()
            for start in range(0, len(numbers), size * world_size)]


def run_length(packs_per_epoch, per_step, epochs, max_steps, position):
    """(optimizer steps per epoch, optimizer step at which the run ends). per_step: packs of all
    ranks. max_steps: replaces `epochs` if above 0. position: {"step", "epoch", "first"} now."""
    steps_per_epoch = -(-packs_per_epoch // per_step)
    # the rest of the current epoch, then whole ones
    left = -(-max(0, packs_per_epoch - position["first"]) // per_step)
    left += (epochs - position["epoch"] - 1) * steps_per_epoch
    return steps_per_epoch, max_steps or position["step"] + max(0, left)


# ---- Batches, and work ahead of the trainer


class Batch:
    """Base of dataclasses of tensors, other Batches and plain values."""

    def to(self, device):
        """This batch on a device. Copies to a GPU use pinned memory, so the host does not wait."""
        pin, moved = torch.device(device).type == "cuda", {}
        for name, value in vars(self).items():
            if isinstance(value, Batch):
                moved[name] = value.to(device)
            elif torch.is_tensor(value):
                value = value.pin_memory() if pin and value.device.type == "cpu" else value
                moved[name] = value.to(device, non_blocking=True)
        return replace(self, **moved)


def map_chunks(function, items, size, processes):
    """Iterator over function(list of `size` items), in order; `processes` call it."""
    items = iter(items)
    chunks = iter(lambda: list(itertools.islice(items, size)), [])
    return run_ahead(function, chunks, processes, fork=True)


def run_ahead(function, items, workers, fork=False):
    """Iterator over function(item), in order. Threads, which suffice for numpy's work, or forked
    processes compute the next results. UserError if such a process is killed."""
    if not workers:
        yield from map(function, items)
        return
    if fork:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")    # its threads die in a fork
        pool = ProcessPoolExecutor(workers, get_context("fork"), init_process, (function,))
    else:
        pool = ThreadPoolExecutor(workers)
    results = deque()
    try:
        for item in items:
            results.append(pool.submit(call_inherited if fork else function, item))
            if len(results) > workers * (2 if fork else 4):
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    except BrokenExecutor:
        raise cli.UserError("a process that prepares data was killed; if memory was short, give a "
                            "smaller --preprocess_num_proc")
    finally:
        if fork:        # the processes ignore SIGTERM, by which a broken pool ends them
            for process in list(pool._processes.values()):
                process.kill()
        pool.shutdown(cancel_futures=True)


def init_process(function):
    """In a forked process: inherit any function, ignore signals, end with the trainer."""
    global _function
    _function = function
    cli.end_with_parent()
    for number in (*cli.SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def call_inherited(item):
    return _function(item)


# ---- Tables of millions of samples


class Column:
    """A .npy file to which numbers are appended, so that memory never holds all of them. array: all
    numbers so far, memory-mapped."""

    def __init__(self, path, dtype):
        self.path, self.array = path, np.empty(0, dtype)
        np.save(path, self.array)

    def append(self, values):
        values = np.ascontiguousarray(values, self.array.dtype)
        header = np.lib.format.header_data_from_array_1_0(self.array)
        header["shape"] = (len(self.array) + len(values),)
        with cli.error_names_file(self.path), open(self.path, "r+b") as file:
            np.lib.format.write_array_header_1_0(file, header)      # has room for a longer shape
            file.seek(0, os.SEEK_END)
            file.write(values.tobytes())
        self.array = np.load(self.path, mmap_mode="r")


def token_lists(tokenizer, texts):
    """Lists of the token ids of each text, without special tokens."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
