"""Batches arrive unchanged and in order; errors and early ends of loader processes show at once."""
import gc
import multiprocessing
import os
import pickle
import signal
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader

from core import packing
from core.cli import UserError, require
from core.run import init_loader


@pytest.fixture(autouse=True)
def nothing_left_over():
    """A traceback keeps its loader alive; processes that later tests fork would tear it down."""
    yield
    for process in multiprocessing.active_children():
        process.kill()
    gc.collect()


@dataclass
class Flat(packing.Batch):
    ids: torch.Tensor
    mask: torch.Tensor
    name: str
    weights: torch.Tensor
    number: torch.Tensor
    maybe: torch.Tensor = None


@dataclass
class Named(packing.Batch):
    first: torch.Tensor
    count: int
    second: torch.Tensor


def flat(n=7):
    return Flat(torch.arange(n), torch.arange(n) % 3 == 0, "seven", torch.rand(3, n).t(),
                torch.tensor(2.5, dtype=torch.float64))


def check_same(a, b):
    assert type(a) is type(b)
    for x, y in zip(vars(a).values(), vars(b).values(), strict=True):
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and torch.equal(x, y) and not y.is_shared()       # needs no shared memory
        else:
            assert x == y


def loader(batches, make, workers=2, **options):
    """DataLoader of make(number) for each number in `batches`."""
    return DataLoader(range(10**9), batch_sampler=([i] for i in batches), num_workers=workers,
                      collate_fn=lambda numbers: make(*numbers), multiprocessing_context="fork" if workers else None,
                      worker_init_fn=init_loader, **options)


def test_a_batch_arrives_as_it_was():
    for batch in (flat(), flat(0), Named(torch.ones(3, dtype=torch.int8), 4, torch.rand(2, 0, 5))):
        loaded = next(iter(loader([0], lambda _: batch)))       # noqa: B023
        for copy in (pickle.loads(pickle.dumps(batch)), loaded, batch.to("cpu")):
            check_same(batch, copy)


@pytest.mark.parametrize("workers, n", [(0, 40), (1, 0), (3, 2), (3, 40)])
def test_every_batch_once_in_order(workers, n):
    batches = packing.iterate(loader(range(n), lambda i: Named(torch.full((i + 1,), i), i, torch.zeros(0)), workers))
    for i in range(n):
        batch = next(batches)
        assert batch.count == i and batch.first.tolist() == [i] * (i + 1)
    assert next(batches, None) is None
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 3])
def test_a_bad_sample_is_named_in_its_place(workers):
    def bad_at_3(i):
        require(i != 3, f"row {i}: is bad")
        return flat(i)
    batches = packing.iterate(loader(range(9), bad_at_3, workers))
    assert [len(next(batches).ids) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match="^row 3: is bad$"):
        next(batches)
    assert not multiprocessing.active_children()


@pytest.mark.race
def test_a_killed_loader_process_ends_the_run(monkeypatch):
    """The batch before is larger than a pipe, so part of it may be lost."""
    def killed_at_3(i):
        return os.kill(os.getpid(), signal.SIGKILL) if i == 3 else flat(10**6)
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", False)    # as at a start
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(packing.iterate(loader(range(9), killed_at_3, 3)))


def test_a_file_that_breaks_while_loaders_start_leaves_no_process():
    def lines():
        yield from "abc"
        raise UserError("the file breaks here")
    with pytest.raises(UserError, match="the file breaks here") as caught:
        list(packing.map_chunks(len, lines(), 1, 2))
    for process in multiprocessing.active_children():
        process.join(10)
    assert not multiprocessing.active_children() and caught.tb       # the traceback keeps the loader
