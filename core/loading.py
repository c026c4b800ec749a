"""Batches on their way from a loader process to the device: each in one piece of memory, ahead of
its use.

A tensor that changes processes is a file of shared memory with its connection, so a batch of many
tensors takes the trainer milliseconds. Here the tensors of a batch lie one after the other in one
buffer: one file, one pinned piece of memory, one copy to the GPU. A batch is a dataclass or a
NamedTuple whose fields are CPU tensors or plain values. The classes use it so:

    __reduce__ = loading.reduce     # how pickle, and with it a loader process, hands a batch over
    to = loading.to

For autograd the tensors of a batch are one: changing one in place would spoil what was saved of the
others.
"""
import itertools
import math
import os
import signal
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from core.cli import UserError
from core.dist import error_names_file
from core.watchdog import fork_loaders, init_loader

ALIGNMENT = 64      # bytes; kernels may expect 16, views of other types 8
DEPTH = 2           # batches that are read ahead
# a process that is killed closes its connections first; it is dead within this time
DEATH_S = 10


def values_of(batch):
    """{field: value} of a dataclass or NamedTuple."""
    return batch._asdict() if isinstance(batch, tuple) else dict(vars(batch))


def tensors_of(batch):
    """{field: tensor} of those fields that are tensors."""
    return {name: value for name, value in values_of(batch).items()
            if isinstance(value, torch.Tensor)}


def pack(tensors, pinned=False):
    """{name: tensor} -> (uint8 buffer on the CPU, layout [(name, dtype, shape, first byte)])."""
    layout, size = [], 0
    for name, tensor in tensors.items():
        start = -(-size // ALIGNMENT) * ALIGNMENT
        layout.append((name, tensor.dtype, tuple(tensor.shape), start))
        size = start + tensor.nbytes
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    for name, view in views(buffer, layout).items():
        view.copy_(tensors[name])
    return buffer, layout


def views(buffer, layout):
    """{name: tensor} that lie in a buffer, on whatever device it is."""
    return {name: buffer[start:start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, dtype, shape, start in layout}


def unpack(kind, buffer, layout, values):
    """The batch, a `kind` with these other values, whose tensors are views of one buffer."""
    # out of shared memory: unmapping that takes longer, and whoever drops the batch does it
    buffer = buffer.clone()
    return kind(**values, **views(buffer, layout))


def reduce(batch):
    """__reduce__ of a batch: one tensor and a few plain values."""
    tensors, values = tensors_of(batch), values_of(batch)
    return unpack, (type(batch), *pack(tensors),
                    {name: values[name] for name in values if name not in tensors})


def to(batch, device):
    """The batch on another device, in one copy. To a GPU it goes from pinned memory, and the host
    does not wait.
    """
    device, tensors = torch.device(device), tensors_of(batch)
    if all(tensor.device == device for tensor in tensors.values()):
        return batch
    buffer, layout = pack(tensors, pinned=device.type == "cuda")
    return type(batch)(**values_of(batch) | views(buffer.to(device, non_blocking=True), layout))


def over_packs(samples, packs, collate, num_workers, prefetch_factor):
    """DataLoader of collate([samples[i] of a pack]) over `packs`, lists of numbers."""
    more = {}
    if num_workers:     # forked: they share the mapped files
        more = {"prefetch_factor": prefetch_factor, "persistent_workers": True,
                "multiprocessing_context": "fork"}
    # a generator: else each loader would draw from that of the dropout
    return DataLoader(samples, batch_sampler=packs, collate_fn=collate, num_workers=num_workers,
                      worker_init_fn=init_loader, generator=torch.Generator(), **more)


def named(error, batches):
    """An error of next(batches), or the one that names the signal which ended a loader process of
    that iterator.

    Torch names it only where its SIGCHLD handler comes first. A next() in another thread may find
    the process gone before ("exited unexpectedly"), or its connection broken off; the exit status
    says the same in every order.
    """
    if isinstance(error, UserError):        # a loader process's has that one's traceback before it
        return UserError(str(error).rpartition("UserError: ")[2].strip())
    broken = isinstance(error, (ConnectionError, EOFError))
    if not broken and not str(error).startswith("DataLoader worker"):
        return error
    end = time.monotonic() + DEATH_S * broken
    while True:
        for process in getattr(batches, "_workers", ()):
            if (process.exitcode or 0) < 0:
                return RuntimeError(f"DataLoader worker (pid {process.pid}) is killed by signal: "
                                    f"{signal.strsignal(-process.exitcode)}.")
        if time.monotonic() >= end:
            return error
        time.sleep(0.01)


def each(loader):
    """Iterator over a DataLoader's batches as they are asked for, with its errors as named() gives
    them.
    """
    batches = fork_loaders(loader)
    try:
        yield from batches
    except Exception as error:
        raise named(error, batches)


def ahead(loader, device=None):
    """Iterator over the batches of a DataLoader, on the device, if one is given; the next two come
    while one is used.

    A thread takes them over from the loader processes and, for a GPU, copies them on another
    stream. What goes wrong in it is raised here. Without loader processes a batch is made by the
    caller's thread when it is asked for.
    """
    # here, and not in the generator: processes are forked before there is a thread
    batches = fork_loaders(loader)
    if loader.num_workers:
        return _ahead(batches, device)
    return (batch.to(device) if device else batch for batch in batches)


def _ahead(batches, device):
    cuda = device is not None and device.type == "cuda"
    stream = torch.cuda.Stream(device) if cuda else None

    def fetch():
        batch = next(batches, None)
        if not cuda or batch is None:
            return batch, None
        with torch.cuda.stream(stream):
            return batch.to(device), stream.record_event()
    # set_device: else the thread would make a context on GPU 0
    reader = ThreadPoolExecutor(1, "batches", torch.cuda.set_device if cuda else None,
                                (device,) if cuda else ())
    coming = deque(reader.submit(fetch) for _ in range(DEPTH))
    try:
        while True:
            try:
                batch, copied = coming.popleft().result()
            except Exception as error:
                raise named(error, batches)
            if batch is None:
                return
            coming.append(reader.submit(fetch))
            if cuda:
                using = torch.cuda.current_stream(device)
                using.wait_event(copied)
                # memory of the other stream, which must not write
                for tensor in tensors_of(batch).values():
                    # there again before this one is done with it
                    tensor.record_stream(using)
            yield batch
    finally:        # also when the trainer needs no more batches
        reader.shutdown(wait=False, cancel_futures=True)


# ---- Millions of samples: columns on disk, parts made in order, fast tokenising

HERE = 4            # parts made in this process before others are started: small files need none


class Column:
    """Numbers appended to a .npy file, so that they are never in memory whole. width: of rows, None
    for numbers.
    """

    def __init__(self, path, dtype, width=None):
        self.path, self.dtype = Path(path), np.dtype(dtype)
        self.width, self.length, self._mapped = width, 0, None
        self.file = open(path, "w+b", buffering=2**18)      # never used by a forked child
        self._write_header()

    def __len__(self):
        return self.length

    def _write_header(self):
        shape = (self.length,) if self.width is None else (self.length, self.width)
        self.file.seek(0)       # numpy leaves room in it for a length to grow into
        np.lib.format.write_array_header_1_0(self.file, {
            "descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False,
            "shape": shape})
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
            # nothing cannot be mapped
            self._mapped = np.load(self.path, mmap_mode="r" if self.length else None)
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
    """Parts of one of several processes; a UserError travels as a value in its part's place."""

    def __init__(self, share, worker, workers):
        self.share, self.worker, self.workers = share, worker, workers

    def __iter__(self):
        try:
            yield from self.share(self.worker + get_worker_info().id, self.workers)
        except UserError as error:
            yield error


def parallel_map_ordered(share, processes, take):
    """take(part) for every part of share(0, 1) in order, most of them made by other processes; 0:
    all are made here.

    share(first, step): an iterator over parts first, first + step, ... of a sequence; what it
    yields must be picklable, and numpy rather than tensors, which would travel through /dev/shm.
    Few parts are on their way at a time. Raises what `share` and `take` raise, and UserError when a
    process is killed.
    """
    others, made, parts = None, 0, share(0, 1)
    for part in itertools.islice(parts, HERE if processes else None):
        take(part)
        made += 1
    if not processes or made < HERE:
        return
    parts.close()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")    # its threads do not survive a fork
    try:
        others = fork_loaders(DataLoader(
            _Share(share, HERE, processes), batch_size=None, num_workers=processes,
            collate_fn=lambda part: part, multiprocessing_context="fork",
            worker_init_fn=init_loader))
        for part in others:
            if isinstance(part, UserError):
                raise part
            take(part)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        why = str(named(error, others)).splitlines()[0]
        raise UserError(f"a process that reads the data has ended early ({why}); if memory was "
                        "short, give a smaller --preprocess_num_proc, 0 = in the trainer") from None
    finally:
        if others is not None:  # an error's traceback would keep them alive, the exit would wait
            others._shutdown_workers()


def token_lists(tokenizer):
    """Function of texts -> their ids, no special tokens added: tokenizer(texts), but faster."""
    def plain(texts):
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    backend, way = getattr(tokenizer, "backend_tokenizer", None), []

    def direct(texts):
        return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def lists(texts):
        if not texts:
            return []
        if way:
            return way[0](texts)
        # chosen by the first texts; plain() also switches off truncation, which may be on
        ids = plain(texts)
        way.append(direct if backend is not None and direct(texts) == ids else plain)
        return ids
    return lists
