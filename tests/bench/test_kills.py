"""Two of six kinds of kills by bench/kills.py, which has 100 of all trainers: no bit lost."""
import os
import random
import time

import pytest

from bench import kills

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("TEST_SEED", time.time_ns() % 10**6))     # printed by the test
HITS = [("encoding", "decoder"), ("reading", "rank"), ("saving", "rank"), ("import", "rank"), ("training", "loader"),
        ("validation", "rank")]


@pytest.mark.race
def test_a_run_killed_twice_ends_as_one_never_killed(tmp_path, monkeypatch):
    print(f"TEST_SEED={SEED}")
    monkeypatch.setattr(kills, "STEPS", 12)
    draw = random.Random(SEED)
    hits = sorted(draw.sample(HITS, 2), key=HITS.index)     # encoding is over once
    chain = kills.Chain("two", "speech", "python", [
        kills.Kill(phase, victim, 1, draw.uniform(0, 0.95), draw.random()) for phase, victim in hits])
    found = kills.run_chain(chain, kills.make_data(tmp_path / "data"), tmp_path / "run", tmp_path)
    assert found["ok"], found
    assert len(found["kills"]) == len(hits) and found["refused"] == 0
