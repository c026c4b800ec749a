"""Batches come from loader processes; columns of millions of samples are on disk.

A batch is a dataclass or a NamedTuple whose fields are CPU tensors or plain values. Its class has

    __reduce__ = loading.reduce     # how pickle, and with it a loader process, hands a batch over
    to = loading.to
"""
import itertools
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from core.cli import UserError
from core.dist import error_names_file
from core.watchdog import fork_loaders, init_loader


def values_of(batch):
    """{field: value} of a dataclass or NamedTuple."""
    return batch._asdict() if isinstance(batch, tuple) else vars(batch)


def reduce(batch):
    """__reduce__ of a batch. Its tensors travel as arrays, in the bytes of the message: torch would
    make a file in /dev/shm of each, which takes longer, and containers have little room there.
    """
    return rebuild, (type(batch), {name: value.numpy() if torch.is_tensor(value) else value
                                   for name, value in values_of(batch).items()})


def rebuild(kind, values):
    """The batch that reduce() took apart."""
    return kind(**{name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                   for name, value in values.items()})


def to(batch, device):
    """The batch on another device. To a GPU it goes from pinned memory: the host does not wait."""
    cuda = torch.device(device).type == "cuda"
    return type(batch)(**{
        name: (value.pin_memory() if cuda and value.device.type == "cpu" else value).to(
            device, non_blocking=True) if torch.is_tensor(value) else value
        for name, value in values_of(batch).items()})


def over_packs(samples, packs, collate, num_workers, prefetch_factor):
    """DataLoader of collate([samples[i] of a pack]) over `packs`, lists of numbers."""
    more = {}
    if num_workers:     # forked: they share the mapped files
        more = {"prefetch_factor": prefetch_factor, "persistent_workers": True,
                "multiprocessing_context": "fork"}
    # a generator: else each loader would draw from that of the dropout
    return DataLoader(samples, batch_sampler=packs, collate_fn=collate, num_workers=num_workers,
                      worker_init_fn=init_loader, generator=torch.Generator(), **more)


def iterate(loader):
    """Iterator over a DataLoader's batches. Its processes are forked now, and end with it.

    A UserError of such a process is raised without the traceback that torch puts before its text.
    """
    batches = fork_loaders(loader)

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

HERE = 4            # parts made in this process before others are started: small files need none


class Column:
    """Numbers appended to a .npy file, so that they are never in memory whole."""

    def __init__(self, path, dtype):
        self.path, self.dtype, self.length, self._mapped = Path(path), np.dtype(dtype), 0, None
        self.file = open(path, "w+b", buffering=2**18)      # never used by a forked child
        self._write_header()

    def __len__(self):
        return self.length

    def _write_header(self):
        self.file.seek(0)       # numpy leaves room in it for a length to grow into
        np.lib.format.write_array_header_1_0(self.file, {
            "descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False,
            "shape": (self.length,)})
        self.file.seek(0, os.SEEK_END)

    def append(self, values):
        """Add an array, or a list of numbers."""
        values = np.ascontiguousarray(values, self.dtype)
        with error_names_file(self.path):
            self.file.write(values.tobytes())
        self.length, self._mapped = self.length + len(values), None

    def array(self):
        """All that is in it, mapped."""
        if self._mapped is None:
            with error_names_file(self.path):
                self._write_header()
                self.file.flush()
            self._mapped = np.load(self.path, mmap_mode="r" if self.length else None)  # not empty
        return self._mapped

    def close(self):
        """The file is whole from here on."""
        with error_names_file(self.path):
            self._write_header()
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
        """List i as an array; IndexError after the last one."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        offsets = self.offsets.array()
        return np.array(self.values.array()[offsets[i]:offsets[i + 1]])


class _Share(IterableDataset):
    """Parts that one of several processes makes."""

    def __init__(self, share, workers):
        self.share, self.workers = share, workers

    def __iter__(self):
        return self.share(HERE + get_worker_info().id, self.workers)


def parallel_map_ordered(share, processes, take):
    """take(part) for every part of share(0, 1) in order, most of them made by other processes; 0:
    all are made here.

    share(first, step): an iterator over parts first, first + step, ... of a sequence; what it
    yields must be picklable, and numpy rather than tensors, which would travel through /dev/shm.
    Few parts are on their way at a time. Raises what `share` and `take` raise, and UserError when a
    process is killed.
    """
    made, parts = 0, share(0, 1)
    for part in itertools.islice(parts, HERE if processes else None):
        take(part)
        made += 1
    if not processes or made < HERE:
        return
    parts.close()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")    # its threads do not survive a fork
    loader = DataLoader(_Share(share, processes), batch_size=None, num_workers=processes,
                        collate_fn=lambda part: part, multiprocessing_context="fork",
                        worker_init_fn=init_loader)
    try:
        for part in iterate(loader):
            take(part)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise UserError("a process that reads the data has ended early "
                        f"({str(error).splitlines()[0]}); if memory was short, give a smaller "
                        "--preprocess_num_proc, 0 = in the trainer") from None


def token_lists(tokenizer):
    """Function of texts -> their ids, no special tokens added."""
    return lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)[
        "input_ids"] if texts else []
