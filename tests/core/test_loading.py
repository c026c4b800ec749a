"""Results arrive unchanged and in order; errors and killed processes show at once."""
import multiprocessing
import os
import pickle
import signal
import time
from dataclasses import dataclass

import pytest
import torch

from core import packing
from core.cli import UserError, require
from tests.helpers.progress import wait_until


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
            assert x.dtype == y.dtype and torch.equal(x, y)
        else:
            assert x == y


def test_a_batch_arrives_as_it_was():
    for batch in (flat(), flat(0), Named(torch.ones(3, dtype=torch.int8), 4, torch.rand(2, 0, 5))):
        loaded = next(packing.run_ahead(lambda _: batch, [0], 1))       # noqa: B023
        for copy in (pickle.loads(pickle.dumps(batch)), loaded, batch.to("cpu")):
            check_same(batch, copy)


@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize("workers, n", [(0, 40), (1, 0), (3, 2), (3, 40)])
def test_every_result_once_in_order(workers, n, fork):
    assert list(packing.run_ahead(lambda i: [i] * i, iter(range(n)), workers, fork)) == [[i] * i for i in range(n)]
    assert not multiprocessing.active_children()


def test_threads_read_ahead_but_not_without_end():
    started = []
    batches = packing.run_ahead(started.append, range(1000), 2)
    for number in range(3):
        next(batches)
        wait_until(lambda: len(started) == number + 9, "eight batches ahead")       # noqa: B023
    batches.close()
    assert len(started) == 11


@pytest.mark.parametrize("workers, fork", [(0, False), (3, False), (3, True)])
def test_a_bad_sample_is_named_in_its_place(workers, fork):
    def bad_at_3(i):
        require(i != 3, f"row {i}: is bad")
        return i
    results = packing.run_ahead(bad_at_3, range(9), workers, fork)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match="^row 3: is bad$"):
        next(results)
    assert not multiprocessing.active_children()


@pytest.mark.race
def test_a_killed_process_ends_the_run():
    def killed_at_3(i):
        return os.kill(os.getpid(), signal.SIGKILL) if i == 3 else b"x" * 10**6
    with pytest.raises(UserError, match="a process that prepares data was killed"):
        list(packing.run_ahead(killed_at_3, range(9), 3, fork=True))
    with pytest.raises(UserError, match="a process that prepares data was killed"):
        list(packing.run_ahead(killed_at_3, [3], 3, fork=True))
    assert not multiprocessing.active_children()


@pytest.mark.race
def test_an_early_end_waits_for_no_process():
    results, start = packing.run_ahead(lambda i: time.sleep(20 * (i > 0)), range(9), 2, fork=True), time.monotonic()
    next(results)
    results.close()
    assert not multiprocessing.active_children() and time.monotonic() - start < 15


@pytest.mark.race
@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_processes_ignore_signals(number):
    def signalled(i):
        os.kill(os.getpid(), getattr(signal, number))
        return i
    assert list(packing.run_ahead(signalled, range(9), 2, fork=True)) == list(range(9))


def test_a_file_that_breaks_leaves_no_process():
    def lines():
        yield from "abc"
        raise UserError("the file breaks here")
    with pytest.raises(UserError, match="the file breaks here"):
        list(packing.map_chunks(len, lines(), 1, 2))
    assert not multiprocessing.active_children()
