"""The pool of ranks: an answer belongs to the job that asked, whatever happened to the job before."""
import json
import os
import signal
import time

import pytest

from tests.helpers.pool import Pool

pytestmark = [pytest.mark.race, pytest.mark.slow]


class Interrupted(BaseException):
    """As pytest-timeout's, raised by a signal handler wherever the main thread is."""


def interrupt(pid, then):
    """Body of a rank: rank 0 interrupts the main thread of `pid`, which waits for the answers in select."""
    if os.environ["RANK"] == "0":
        os.kill(pid, signal.SIGUSR2)
    if then == "hang":
        time.sleep(10_000)


@pytest.fixture
def ranks(tmp_path):
    pool = Pool(2, tmp_path, "json")
    yield pool
    pool.close()


@pytest.mark.parametrize("then", ["end", "hang"])
def test_an_interrupted_job_leaves_its_status_to_no_other(ranks, then):
    def raise_it(number, frame):
        raise Interrupted

    assert ranks.run(1, "sys.exit", 0)[0] == [0]
    signal.signal(signal.SIGUSR2, raise_it)
    with pytest.raises(Interrupted):
        ranks.run(2, f"{__name__}.interrupt", os.getpid(), then)
    assert ranks.run(1, "sys.exit", 3)[0] == [3]
    assert ranks.run(2, "sys.exit", 4)[0] == [4, 4]


def test_answers_to_a_job_that_nobody_waits_for_are_passed_over(ranks):
    ranks.run(1, "sys.exit", 0)
    job = [0, 1, 0, 60, os.devnull, str(ranks.folder), {}, "sys.exit", [0]]
    ranks.server.stdin.write(json.dumps(job).encode() + b"\n")
    assert ranks.run(1, "sys.exit", 3)[0] == [3]


def test_a_job_that_hangs_ends_with_its_limit(ranks):
    with pytest.raises(AssertionError, match=r"ranks \[0\] did not end in 2 s"):
        ranks.run(1, "time.sleep", 10_000, timeout=2)
    assert ranks.run(1, "sys.exit", 3)[0] == [3]
