"""Lengths, packing, memory and disk of a plan: the arithmetic and what is refused."""
import numpy as np
import pytest

from common import plan
from common.distributed import UserError
from common.memory import GIB
from common.packing import PackOrder

# ---------------------------------------------------------------------------------------------------------------------
# Histogram, packing, disk


def test_histogram_counts_everything_once():
    for lengths in ([5], [7, 7, 7], [1, 1000], range(190, 317), np.random.default_rng(0).lognormal(5, 1, 999)):
        lines = plan.histogram(np.array(lengths).astype(np.int64))
        assert 1 <= len(lines) <= 10
        low, high = (int(line.split()[at].replace(",", "")) for line, at in ((lines[0], 0), (lines[-1], 2)))
        assert low <= int(min(lengths)) and high >= int(max(lengths))
        assert sum(int(line.split()[3].replace(",", "")) for line in lines) == len(lengths)
        assert len({line.index(" - ") for line in lines}) == 1 and max(line.count("#") for line in lines) == 40


def test_packing_report():
    even = plan.packing_report(np.array([100, 100, 100, 100]), 2)
    assert even == {"useful": 1.0, "balance": 1.0}
    uneven = plan.packing_report(np.array([100, 50, 80]), 2)        # the fourth pack is an empty one of one slot
    assert uneven["useful"] == 230 / 231 and uneven["balance"] == pytest.approx((0.75 + 81 / 160) / 2)
    padded = plan.packing_report(np.array([100, 50, 80]), 2, budget=128)
    assert padded == {"useful": 230 / 512, "balance": 1.0}
    assert plan.packing_report(np.array([100, 50, 80]), 2, 3, budget=128)["useful"] == 230 / (6 * 128)


def test_pack_sums():
    order = PackOrder(np.arange(1, 8), samples_per_pack=3, seed=1)
    epoch = order.epoch(0)
    sums = [sum(epoch.pack(p) + 1) for p in range(3)]
    assert plan.pack_sums(epoch, np.arange(1, 8)).tolist() == sums
    assert plan.epoch_sums(order, [0, 0], np.arange(1, 8)).tolist() == [*sums, *sums]


# ---------------------------------------------------------------------------------------------------------------------
# Memory and disk


def test_a_margin_of_the_gpu_stays_free():
    plan.check_memory(75.9 * GIB, 80 * GIB, {})
    with pytest.raises(UserError, match="about 76.10 GiB needed on each GPU, which has 80.00 GiB, 5 % of it left"):
        plan.check_memory(76.1 * GIB, 80 * GIB, {})


def test_checkpoints_at_once():
    """The newest, the best and the one being written; no more than there will be."""
    assert plan.checkpoints_at_once(100, 10, None, 3) == 4 and plan.checkpoints_at_once(100, 10, 20, 3) == 5
    assert plan.checkpoints_at_once(100, 10, None, 0) == 11 and plan.checkpoints_at_once(100, 10, 50, 0) == 13
    assert plan.checkpoints_at_once(100, 50, None, 3, timed=True) == 4      # more may come than by steps
    assert plan.checkpoints_at_once(10, 0, 0, 3) == 1 and plan.checkpoints_at_once(10, 10, 0, 3) == 2


def test_host_memory_that_there_is(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemFree:  100 kB\nMemAvailable:    4194304 kB\n")
    for given, said in (({}, 4), ({"SLURM_MEM_PER_NODE": "2048"}, 2), ({"SLURM_MEM_PER_NODE": "8192"}, 4),
                        ({"SLURM_MEM_PER_NODE": "0"}, 4)):
        monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert plan.host_memory(tmp_path / "meminfo") == said * GIB
    assert plan.host_memory() > 0
