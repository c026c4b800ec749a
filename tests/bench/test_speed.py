"""bench/speed.py: ways whose first losses differ are no comparison."""
import pytest
import torch

from bench import speed


def test_other_losses_stop_it():
    def found(loss):
        return {way: [{"rows": [{"train/loss": value}]}] for way, value in (("ours", 2.0), ("minimal", loss))}
    speed.check_first_loss(found(2.0001), ("ours", "minimal"), torch.device("cpu"))
    for loss in 2.001, float("nan"):
        with pytest.raises(SystemExit, match="DISAGREE"):
            speed.check_first_loss(found(loss), ("ours", "minimal"), torch.device("cpu"))
