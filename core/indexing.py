"""What millions of samples need: columns on disk, parts made in order, fast tokenising."""
import itertools
import os
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from core.cli import UserError
from core.dist import error_names_file
from core.loading import named
from core.watchdog import fork_loaders, init_loader

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
