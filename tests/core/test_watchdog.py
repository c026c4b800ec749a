"""The watchdog on simulated time: the beats of two ranks are the clock. Real hangs: test_recovery.py."""
import os
import re
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, TCPStore

from core import dist, watchdog
from core.cli import UserError
from core.dist import World


def test_a_rank_whose_store_has_ended_leaves_the_message_to_its_host():
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", host.port, is_master=False)
    assert dist.is_cause(UserError("the same mistake"), store)
    del host
    assert not dist.is_cause(UserError("the same mistake"), store)


class Ended(BaseException):
    """The watchdog has ended its process."""


class Watchdog(watchdog.Watchdog):
    """The main thread moves on to a step at the `moves`-th read of its state."""
    moves = 0

    @property
    def state(self):
        state = self.current
        self.moves -= 1
        if self.moves == 0:
            self.report_progress("a step")
        return state

    @state.setter
    def state(self, value):
        self.current = value


@pytest.fixture
def beats(monkeypatch):
    """beats(script) -> rank 0's beats until it ended its process, or 0. The generator script(watchdog of rank 0, of
    rank 1) runs between two beats. A step may take 10."""
    def simulate(script):
        store = SimpleNamespace(clone=lambda: None)
        dogs = [Watchdog(World(rank=rank, local_rank=rank, size=2, local_size=2, store=store), 10) for rank in range(2)]
        assert dogs[0].beat_s == 1
        dogs[0].store = dogs[1].store = HashStore()
        steps = script(*dogs)

        def wait(seconds):      # rank 1's beats are part of the script
            return not steps.gi_running and next(steps, "end")
        monkeypatch.setattr(watchdog, "disarmed", SimpleNamespace(wait=wait, is_set=lambda: False))
        with pytest.raises((Ended, SystemExit)) as caught:
            dogs[0]._watch()
        return caught.type is Ended and dogs[0].beats

    def end(status):
        raise Ended
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(watchdog.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    return simulate


def test_a_pause_of_the_machine_is_no_hang(beats, monkeypatch):
    """Each read of a clock advances it by an hour."""
    for clock in ("monotonic", "time", "perf_counter"):
        hours = iter(range(0, 10**9, 3600))
        monkeypatch.setattr(time, clock, lambda hours=hours: next(hours))

    def train(*dogs):
        for step in range(20):
            for dog in dogs:
                dog.report_progress(f"step {step}")
            for _ in range(8):
                dogs[1]._beat()
                yield
    assert not beats(train)


def test_a_rank_that_moves_on_during_a_read_does_not_hang(beats):
    """A validation lasts longer than a step may; then a step begins."""
    def validate(*dogs):
        for reads in range(1, 7):
            for dog in dogs:
                dog.report_progress("validation", 1000)
            for beat in range(58):
                if beat == 50:
                    dogs[0].moves = dogs[1].moves = reads
                dogs[1]._beat()
                yield
    assert not beats(validate)


@pytest.mark.parametrize("frozen, words", [(False, r"hangs: rank 1 \(.*\) in: loading data; "),
                                           (True, r"no answer from rank 1 \(.*\) in: loading data; ")])
def test_the_rank_that_holds_up_the_others_is_named(beats, capsys, frozen, words):
    def hang(*dogs):
        for dog in dogs:
            dog.report_progress("loading data")
        dogs[1]._beat()
        yield
        dogs[0].report_progress("step 1")
        while True:
            if not frozen:
                dogs[1]._beat()
            yield
    assert 10 + watchdog.GRACE_S < beats(hang) < 30
    assert re.match(f"error: {words}", capsys.readouterr().err)
