"""Packs of samples in one order for every world size, the loader processes that make batches of
them, and columns of millions of samples on disk.

The order of packs is a function of (seed, epoch) alone. Micro-step m of an optimizer step on rank r
takes pack `first + m * world_size + r`, where `first` is the position stored in a checkpoint. So a
run can stop on 16 GPUs and resume on 8 (accumulation doubled) and see the same data. Empty packs,
which weigh nothing, fill an epoch's tail: every rank runs the same number of steps.

A batch is a dataclass or a NamedTuple of CPU tensors and plain values. Its class has
`__reduce__ = packing.reduce` and `to = packing.to`.
"""
import bisect
import functools
import itertools
import os
import signal
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from core.cli import UserError, first_line
from core.dist import error_names_file
from core.watchdog import HELD, init_loader

# Packs grouped by length run side by side with equally long ones: blocks of up to 512 that follow
# each other are shuffled, at least 64 an epoch, and within each blocks of a node's 8.
LARGE, SMALL, LEAST = 512, 8, 64
JITTER = 0.01       # of its length a sample may be sorted wrongly: other neighbours in each epoch
HERE = 4            # parts made in this process before others are started: small files need none


@dataclass
class EpochPlan:
    """Packs of one epoch: for q = packs[p], pack p holds samples[offsets[q]:offsets[q + 1]]."""
    samples: np.ndarray     # (n_samples,) int64
    offsets: np.ndarray     # (n_packs + 1,) int64
    packs: np.ndarray       # (n_packs,) int64

    def __len__(self):
        return len(self.packs)

    def pack(self, p):
        """Sample indices (n,) of pack p; empty for the zero-weight packs after the last one."""
        if p >= len(self):
            return self.samples[:0]
        return self.samples[slice(*self.offsets[self.packs[p]:self.packs[p] + 2])]


def best_fit(lengths, order, budget):
    """Yield packs, lists of sample indices of at most `budget` tokens.

    lengths (n,) tokens; order (n,) sample indices to pack, in each window of 4096 longest first.
    ValueError: a sample is longer than the budget.
    """
    for start in range(0, len(order), 4096):
        window = order[start:start + 4096]
        # long samples first: short ones then fill what those leave
        window = window[np.argsort(-lengths[window], kind="stable")]
        # the last two: remaining tokens, ascending, and whose they are
        bins, free, open_bins = [], [], []
        for i, n in zip(window.tolist(), lengths[window].tolist()):
            if n > budget:
                raise ValueError(f"sample {i} has {n} tokens, more than the {budget} of a pack")
            # the fullest pack that still has room, or a new one
            at = bisect.bisect_left(free, n)
            if at < len(free):
                room, b = free.pop(at) - n, open_bins.pop(at)
                bins[b].append(i)
            else:
                room, b = budget - n, len(bins)
                bins.append([i])
            # back among the others, so that `free` stays sorted
            at = bisect.bisect_left(free, room)
            free.insert(at, room)
            open_bins.insert(at, b)
        yield from bins


def _shuffled(packs, size, rng):
    """Packs (n,) in blocks of `size` that are shuffled; a short last block stays last."""
    full = len(packs) // size
    blocks = packs[:full * size].reshape(full, size)[rng.permutation(full)]
    return np.concatenate([blocks.ravel(), packs[full * size:]])


class PackOrder:
    """Deterministic packs of every epoch. lengths: (n,) tokens per sample. numbers: (n,) numbers of
    these samples in a larger table, which rank_packs and window() return (default: 0 to n - 1).

    tokens_per_pack: whole samples up to a token budget; the seed fixes which share a pack, epochs
    shuffle the packs. Or samples_per_pack: a fixed count, with group_by_length of similar lengths.
    shuffle=False keeps the file's order, for validation.
    """

    def __init__(self, lengths, numbers=None, *, samples_per_pack=0, tokens_per_pack=0, seed=0,
                 group_by_length=False, shuffle=True):
        if max(samples_per_pack, tokens_per_pack) <= 0:
            raise ValueError("give samples_per_pack or tokens_per_pack")
        self.lengths, self.size = np.asarray(lengths), samples_per_pack
        self.seed, self.shuffle, self.group_by_length = seed, shuffle, group_by_length
        # the last two: the loader reads ahead into the next epoch
        self.epoch = functools.lru_cache(2)(self._plan)
        self._bins, n = None, len(self.lengths)
        self.numbers = np.arange(n) if numbers is None else numbers
        self.packs_per_epoch = -(-n // samples_per_pack) if samples_per_pack else 0
        if tokens_per_pack:
            order = np.arange(n)
            if shuffle:     # once, by the seed alone: packing is slow, each epoch shuffles packs
                order = np.random.default_rng((seed, 0)).permutation(order)
            samples, offsets = array("q"), array("q", [0])
            for pack in best_fit(self.lengths, order, tokens_per_pack):
                samples.extend(pack)
                offsets.append(len(samples))
            self._bins = np.asarray(samples), np.asarray(offsets)
            self.packs_per_epoch = len(offsets) - 1

    def _plan(self, epoch):
        """EpochPlan of an epoch, whatever other epochs were asked for before."""
        rng = np.random.default_rng((self.seed, epoch, 1))
        n, packs = len(self.lengths), np.arange(self.packs_per_epoch)
        if self._bins:
            return EpochPlan(*self._bins, rng.permutation(packs) if self.shuffle else packs)
        order = rng.permutation(n) if self.shuffle else np.arange(n)
        if self.group_by_length:
            window = self.size * LEAST * LARGE      # sorted together
            # lengths are varied a little, or the same samples would share a pack in every epoch
            keys = -self.lengths * rng.uniform(1, 1 + JITTER * self.shuffle, n)
            parts = (order[a:a + window] for a in range(0, n, window))
            order = np.concatenate([part[np.argsort(keys[part], kind="stable")] for part in parts])
        if self.group_by_length and self.shuffle:
            large = LARGE
            while large > SMALL and len(packs) < LEAST * large:
                large //= 2
            # blocks, and blocks within blocks: ranks that run side by side keep equal lengths
            packs = _shuffled(packs, large, rng)
            packs = np.concatenate([_shuffled(packs[a:a + large], SMALL, rng)
                                    for a in range(0, len(packs), large)])
        return EpochPlan(order, np.minimum(np.arange(len(packs) + 1) * self.size, n), packs)

    def largest(self):
        """Sample numbers (n,) of the pack with the most tokens."""
        plan = self.epoch(0)
        packs = map(plan.pack, range(len(plan)))
        return self.numbers[max(packs, key=lambda pack: self.lengths[pack].sum())]

    def window(self, epoch, first, count):
        """Sample numbers (n,) of the packs first, first + 1, ...: a step of all ranks."""
        plan = self.epoch(epoch)
        return self.numbers[np.concatenate([plan.pack(p) for p in range(first, first + count)])]


def rank_packs(order, rank, world_size, accumulation, epochs, epoch=0, first=0):
    """Yield this rank's packs, lists of sample numbers, from (epoch, first) on. Every rank gets the
    same number of packs.
    """
    per_step = world_size * accumulation
    while epoch < epochs:
        plan = order.epoch(epoch)
        for step in range(first, len(plan), per_step):
            # first over ranks, then over micro-steps: N ranks x M micro-steps take the same packs
            # as any other split of N * M
            for micro in range(accumulation):
                yield order.numbers[plan.pack(step + micro * world_size + rank)].tolist()
        epoch, first = epoch + 1, 0         # only the first epoch may begin in its middle


def run_length(packs_per_epoch, per_step, epochs, max_steps, position):
    """(optimizer steps per epoch, optimizer steps when the run ends).

    per_step: packs of all ranks. max_steps: ends the run instead of `epochs` where above 0.
    position: {"step", "epoch", "first"} to start from, as a checkpoint has them.
    """
    steps_per_epoch = -(-packs_per_epoch // per_step)
    # the epoch that was left in its middle, then whole ones
    left = -(-max(0, packs_per_epoch - position["first"]) // per_step)
    left += (epochs - position["epoch"] - 1) * steps_per_epoch
    return steps_per_epoch, max_steps or position["step"] + max(0, left)


# ---- Batches, made by loader processes


def values_of(batch):
    """{field: value} of a dataclass or NamedTuple."""
    return batch._asdict() if isinstance(batch, tuple) else vars(batch)


def reduce(batch):
    """__reduce__ of a batch: its tensors travel as arrays, not as files in /dev/shm."""
    return _rebuild, (type(batch), {name: value.numpy() if torch.is_tensor(value) else value
                                    for name, value in values_of(batch).items()})


def _rebuild(kind, values):
    return kind(**{name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                   for name, value in values.items()})


def to(batch, device):
    """The batch on another device. To a GPU it goes from pinned memory: the host does not wait."""
    values, cuda = values_of(batch), torch.device(device).type == "cuda"
    for name, value in values.items():
        if torch.is_tensor(value):
            value = value.pin_memory() if cuda and value.device.type == "cpu" else value
            values = values | {name: value.to(device, non_blocking=True)}
    return type(batch)(**values)


def over_packs(samples, packs, collate, num_workers, prefetch_factor):
    """DataLoader of collate([samples[i] of a pack]) over `packs`, lists of numbers."""
    # forked: they share the mapped files; a generator: else it would draw from that of the dropout
    return DataLoader(samples, batch_sampler=packs, collate_fn=collate, num_workers=num_workers,
                      worker_init_fn=init_loader, generator=torch.Generator(),
                      prefetch_factor=prefetch_factor if num_workers else None,
                      persistent_workers=num_workers > 0,
                      multiprocessing_context="fork" if num_workers else None)


def iterate(loader):
    """Iterator over a DataLoader's batches; its processes are forked now, and end with it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)     # torch's handlers end a worker
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def each():
        try:
            yield from batches
        except UserError as error:
            raise UserError(str(error).rpartition("core.cli.UserError: ")[2].strip()) from None
        except RuntimeError as error:   # of a killed process; only the cause may name the signal
            raise error.__cause__ if isinstance(error.__cause__, RuntimeError) else error
        finally:        # an error's traceback would keep the processes, and the exit wait for them
            if loader.num_workers:
                batches._shutdown_workers()
    return each()


# ---- Millions of samples: columns on disk, parts made in order


class Column:
    """Numbers appended to a .npy file, so that they are never in memory whole."""

    def __init__(self, path, dtype):
        self.path, self.dtype, self.length, self._mapped = Path(path), np.dtype(dtype), 0, None
        self.file = open(path, "w+b", buffering=2**18)      # never used by a forked child
        self._flush()

    def __len__(self):
        return self.length

    def _flush(self):       # the header has room for a length to grow into
        with error_names_file(self.path):
            self.file.seek(0)
            np.lib.format.write_array_header_1_0(self.file, {
                "descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False,
                "shape": (self.length,)})
            self.file.seek(0, os.SEEK_END)
            self.file.flush()

    def append(self, values):
        """Add an array, or a list of numbers."""
        with error_names_file(self.path):
            self.file.write(np.ascontiguousarray(values, self.dtype).tobytes())
        self.length, self._mapped = self.length + len(values), None

    def array(self):
        """All that is in it, mapped."""
        if self._mapped is None:
            self._flush()
            self._mapped = np.load(self.path, mmap_mode="r" if self.length else None)  # not empty
        return self._mapped

    def close(self):
        """No more numbers."""
        self._flush()
        self.file.close()


class Lists:
    """Lists of numbers one after the other: columns NAME and OFFSETS of a folder."""

    def __init__(self, folder, name, offsets, dtype):
        self.values = Column(folder / f"{name}.npy", dtype)
        self.offsets = Column(folder / f"{offsets}.npy", np.int64)
        self.offsets.append([0])

    def append(self, values, counts):
        """Add len(counts) lists; values: theirs, one after the other."""
        self.offsets.append(len(self.values) + np.cumsum(counts, dtype=np.int64))
        self.values.append(values)

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, i):
        """List i from 0 on as an array; IndexError after the last one."""
        offsets = self.offsets.array()
        return np.array(self.values.array()[offsets[i]:offsets[i + 1]])


class _Share(IterableDataset):      # parts that one of several processes makes
    def __init__(self, share, processes):
        self.share, self.processes = share, processes

    def __iter__(self):
        return self.share(HERE + get_worker_info().id, self.processes)


def parallel_map_ordered(share, processes, take):
    """take(part) for every part of share(0, 1) in order, made by other processes (0: none).

    share(first, step): an iterator over parts first, first + step, ... of a sequence; no tensors,
    which would travel through /dev/shm. UserError when a process is killed.
    """
    made, parts = 0, share(0, 1)
    for part in itertools.islice(parts, HERE if processes else None):
        take(part)
        made += 1
    if not processes or made < HERE:
        return
    parts.close()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")    # its threads do not survive a fork
    try:
        for part in iterate(DataLoader(
                _Share(share, processes), batch_size=None, num_workers=processes,
                collate_fn=lambda part: part, multiprocessing_context="fork",
                worker_init_fn=init_loader)):
            take(part)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise UserError("a process that reads the data has ended early "
                        f"({first_line(error)}); if memory was short, give a smaller "
                        "--preprocess_num_proc") from None


def token_lists(tokenizer):
    """Function of texts -> their ids, no special tokens added."""
    return lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)[
        "input_ids"] if texts else []
