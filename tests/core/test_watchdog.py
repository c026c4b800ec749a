"""core.watchdog without time: two ranks, whose clocks are their beats. Real ones that hang or freeze: test_recovery.py."""
import os
import re
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from core import watchdog
from core.dist import World


class Ended(BaseException):
    """The watchdog has ended its process."""


class Watchdog(watchdog.Watchdog):
    """Whose main thread moves on to a step as soon as somebody has read for the `moves`-th time where it is."""
    moves = 0

    @property
    def state(self):
        found = self.found
        self.moves -= 1
        if self.moves == 0:
            self.report_progress("a step")
        return found

    @state.setter
    def state(self, value):
        self.found = value


@pytest.fixture
def beats(monkeypatch):
    """beats(script) -> number of rank 0's beats until it ended its process, or 0. script(rank 0's watchdog, rank 1's)
    is a generator that goes on between two of them. A step may take 10."""
    def run(script):
        dogs = [Watchdog(World(rank=rank, local_rank=rank, size=2, local_size=2), 10) for rank in range(2)]
        assert dogs[0].beat_s == 1
        dogs[0].store = dogs[1].store = HashStore()
        steps = script(*dogs)

        def wait(seconds):      # rank 1's beats are part of the script
            return not steps.gi_running and next(steps, "end")
        monkeypatch.setattr(watchdog, "_disarmed", SimpleNamespace(wait=wait, is_set=lambda: False))
        with pytest.raises((Ended, SystemExit)) as caught:
            dogs[0]._watch()
        return caught.type is Ended and dogs[0].beats

    def end(status):
        raise Ended
    monkeypatch.setattr(os, "_exit", end)
    return run


def test_a_pause_of_the_machine_is_no_waiting(beats, monkeypatch):
    """An hour passes whenever a clock is read."""
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


def test_a_rank_that_moves_on_while_it_is_read_does_not_hang(beats):
    """From a long validation, which takes longer than a step may, to a step."""
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
def test_the_rank_for_which_the_others_wait_is_named(beats, capsys, frozen, words):
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
