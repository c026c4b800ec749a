"""bench/gloo_kills.py: a rank hears of its peer's death, from gloo or from its own limit."""
import json
import os
import random
import time

import pytest

from bench import gloo_kills


def rank_that_says(words):
    """In place of gloo_kills.train: rank 0 prints words and ends, rank 1 waits for its end."""
    def train(rank, port, limit_s, file, ready):
        ready.set()
        time.sleep(1 if rank == 0 else 600)
        os.write(file, words)
    return train


@pytest.mark.slow
def test_the_command_leaves_its_numbers(tmp_path):
    gloo_kills.main(["--kills", "1", "--limit", "5", "--results_dir", str(tmp_path)])
    runs, stands_still = json.loads((tmp_path / "gloo_kills-cpu.json").read_text())["tables"]["heard"]["rows"]
    assert runs[:2] == ["runs", 1] and stands_still[:2] == ["stands still", 1]
    assert sum(runs[2:]) == sum(stands_still[2:]) == 1      # whoever told it


@pytest.mark.parametrize("words, who", [(b"rank 0 failed:\nClosed", "gloo"),
                                        (b"error: no answer from rank 1 (host)", "limit")])
def test_who_told_it_is_read_from_what_rank_0_says(monkeypatch, words, who):
    monkeypatch.setattr(gloo_kills, "train", rank_that_says(words))
    assert gloo_kills.kill(False, 5, random.Random(0)) == who


def test_a_rank_that_ends_otherwise_is_no_evidence(monkeypatch):
    monkeypatch.setattr(gloo_kills, "train", rank_that_says(b"ended"))
    with pytest.raises(RuntimeError, match="does not say what ended it: ended"):
        gloo_kills.kill(True, 5, random.Random(0))
