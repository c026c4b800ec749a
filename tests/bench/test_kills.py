"""Six kills of bench/kills.py, who covers all trainers: who dies differs, and in which phase; no bit is lost."""
import os
import random
import time

import pytest

from bench import kills

SEED = int(os.environ.get("TEST_SEED", time.time_ns() % 10**6))     # printed by the test
HITS = [("encoding", "decoder"), ("reading", "rank"), ("saving", "rank"), ("import", "rank"), ("training", "loader"),
        ("validation", "rank")]


@pytest.mark.race
def test_a_run_killed_six_times_ends_as_one_never_killed(tmp_path):
    print(f"TEST_SEED={SEED}")
    draw = random.Random(SEED)
    chain = kills.Chain("six", "speech", "python", [
        kills.Kill(phase, victim, 1, draw.uniform(0, 0.95), draw.random()) for phase, victim in HITS])
    found = kills.run_chain(chain, kills.make_data(tmp_path / "data"), tmp_path / "run", tmp_path)
    assert found["ok"], found
    assert len(found["kills"]) == len(HITS) and found["refused"] == 0
