"""AdamW's groups, learning rates, clipping, and steps that a bad gradient cannot poison."""
import math

import pytest
import torch

from core import optim


def parameters(*values):
    """Parameters of one number each, with gradients 3, 4, ..."""
    found = [torch.nn.Parameter(torch.tensor([[value]])) for value in values]
    for number, parameter in enumerate(found):
        parameter.grad = torch.tensor([[3.0 + number]])
    return found


def test_decay_shrinks_what_it_shall():
    a, b = parameters(1.0, 1.0)
    optimizer = optim.build_adamw([("matrix", a), ("norm", b)], 0.1, 0.5, (0.9, 0.999),
                                  lambda name, _: name == "matrix")
    for parameter in (a, b):
        parameter.grad.zero_()
    optimizer.step()
    assert (a.item(), b.item()) == (pytest.approx(1 - 0.1 * 0.5), 1.0)


@pytest.mark.parametrize("step, scheduler, wanted", [
    (0, "cosine", 0.25), (3, "cosine", 1.0), (4, "cosine", 1.0), (12, "cosine", 0.1), (20, "linear", 0.1),
    (8, "linear", 0.1 + 0.9 * 0.5), (8, "cosine", 0.1 + 0.9 * 0.5), (6, "cosine", 0.1 + 0.45 * (1 + math.cos(math.pi / 4))),
    (12, "constant", 1.0)])
def test_learning_rates(step, scheduler, wanted):
    """4 steps of warm-up, then down to a tenth at step 12, and no further."""
    assert optim.lr_factor(step, 12, 4, scheduler, 0.1) == pytest.approx(wanted)


def test_rate_of_a_larger_batch():
    assert optim.sqrt_lr(1e-3, 400, 100) == pytest.approx(2e-3)


@pytest.mark.parametrize("most, left", [(0, (3, 4)), (0.5, (0.3, 0.4)), (10, (3, 4))])
def test_clipping_is_by_the_norm_of_all(most, left):
    found = parameters(1.0, 1.0)
    assert optim.clip_gradients(found, most).item() == pytest.approx(5)
    assert [p.grad.item() for p in found] == pytest.approx(left, rel=1e-5)


def test_a_bad_step_changes_nothing():
    a, = parameters(1.0)
    optimizer = optim.build_adamw([("a", a)], 0.1, 0.0, (0.9, 0.999), lambda *_: True)
    optim.guarded_step(optimizer, torch.tensor(0.0))
    good, state = a.item(), {key: value.clone() for key, value in optimizer.state[a].items()}
    assert good == pytest.approx(0.9)
    a.grad.fill_(math.nan)
    optim.guarded_step(optimizer, torch.tensor(1.0))
    assert a.item() == good
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state[a].items())


def test_flags_are_told_one_step_late():
    flags = optim.StepFlags(torch.device("cpu"), bad_total=2)

    def push(bad, asked, about):
        flags.push(torch.tensor(float(bad)), torch.tensor(float(asked)), about)
    assert flags.pop() is None
    push(1, 0, "first")
    assert flags.pop() == "first" and (flags.bad_in_a_row, flags.bad_total) == (1, 3)
    push(1, optim.SAVE, "second")
    assert flags.pop() == "second" and (flags.bad_in_a_row, flags.save, flags.stop) == (2, True, False)
    push(0, optim.STOP, "third")
    assert flags.pop() is None and (flags.bad_in_a_row, flags.bad_total) == (0, 4)
    assert flags.save and flags.stop
