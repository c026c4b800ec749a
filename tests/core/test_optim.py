"""AdamW's groups, learning rates, clipping, and skipped steps with bad gradients."""
import math

import pytest
import torch

from core import optim
from core.cli import UserError
from core.dist import World


def parameters(*values):
    """Parameters of one number each, with gradients 3, 4, ..."""
    tensors = [torch.nn.Parameter(torch.tensor([[value]])) for value in values]
    for number, parameter in enumerate(tensors):
        parameter.grad = torch.tensor([[3.0 + number]])
    return tensors


def test_decay_applies_to_matrices_only():
    """Also to an untied head, but not to norms and embeddings."""
    names = "q_proj.weight", "lm_head.weight", "embed_tokens.weight", "wte.weight", "norm.weight"
    values = parameters(*[1.0] * 4) + [torch.nn.Parameter(torch.ones(1))]
    for parameter in values:
        parameter.grad = torch.zeros_like(parameter)
    optim.build_adamw(zip(names, values), 0.1, 0.5, 0.999).step()
    assert [value.item() for value in values] == [pytest.approx(1 - 0.1 * 0.5)] * 2 + [1.0] * 3


@pytest.mark.parametrize("step, scheduler, wanted", [
    (0, "cosine", 0.25), (3, "cosine", 1.0), (4, "cosine", 1.0), (12, "cosine", 0.1), (20, "linear", 0.1),
    (8, "linear", 0.1 + 0.9 * 0.5), (8, "cosine", 0.1 + 0.9 * 0.5), (12, "constant", 1.0),
    (6, "cosine", 0.1 + 0.45 * (1 + math.cos(math.pi / 4)))])
def test_learning_rates(step, scheduler, wanted):
    """The LR warms up over 4 steps, then falls to a tenth at step 12 and stays there."""
    assert optim.lr_factor(step, 12, 4, scheduler, 0.1) == pytest.approx(wanted)


@pytest.mark.parametrize("most, left", [(0, (3, 4)), (0.5, (0.3, 0.4)), (10, (3, 4))])
def test_clipping_is_by_the_norm_of_all(most, left):
    tensors = parameters(1.0, 1.0)
    assert optim.clip_gradients(tensors, most).item() == pytest.approx(5)
    assert [p.grad.item() for p in tensors] == pytest.approx(left, rel=1e-5)


def test_a_bad_step_changes_nothing():
    a, = parameters(1.0)
    optimizer = optim.build_adamw([("a", a)], 0.1, 0.0, 0.999)
    optim.take_step(optimizer, 0.1, torch.tensor(3.0))
    good, state = a.item(), {key: value.clone() for key, value in optimizer.state[a].items()}
    assert good == pytest.approx(0.9)
    a.grad = torch.full_like(a, math.nan)
    assert optim.take_step(optimizer, 0.1, torch.tensor(math.nan)).item() == 1
    assert a.item() == good
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state[a].items())


def new_monitor(most=2, **options):
    return optim.StepMonitor(World(device=torch.device("cpu")), "row {}".format, most, **options)


def push(monitor, step, norm, stop=False, loss=1.0, **more):
    monitor.poll()
    monitor.watch(torch.tensor(loss), [step])
    monitor.push(step, torch.tensor(norm), stop, **more)


def test_steps_that_are_not_finite_are_named_one_step_late(capsys):
    """A finite step resets the count; the second non-finite one in a row ends the run."""
    monitor = new_monitor()
    push(monitor, 1, math.nan, loss=math.inf)
    assert not capsys.readouterr().out
    push(monitor, 2, 1.0)
    assert ("step 1: gradient norm is not finite, step skipped (1 so far); samples with a non-finite loss: row 1"
            in capsys.readouterr().out)
    push(monitor, 3, math.inf)
    assert (monitor.skipped, monitor.in_a_row, monitor.stop) == (1, 0, False)
    push(monitor, 4, math.nan, stop=True)
    assert "every loss was finite" in capsys.readouterr().out
    with pytest.raises(UserError, match="2 steps in a row had a non-finite gradient"):
        monitor.poll()
    assert monitor.stop and monitor.skipped == 3


def test_overflows_of_a_scaled_loss_do_not_end_a_run_but_nan_losses_do():
    monitor = new_monitor(scaler=optim.loss_scaler(torch.device("cpu"), True))
    for step in range(5):
        push(monitor, step, math.inf)
    monitor.poll()
    assert (monitor.skipped, monitor.in_a_row) == (5, 0)
    push(monitor, 6, math.nan, loss=math.nan)
    push(monitor, 7, math.nan, loss=math.nan)
    with pytest.raises(UserError, match="2 steps in a row had a non-finite gradient"):
        monitor.poll()


def test_a_gradient_of_exactly_zero_ends_a_run_that_trains():
    monitor = new_monitor()
    push(monitor, 1, 0.0, trains=False)       # nothing to learn in this step
    push(monitor, 2, 1e-30)
    push(monitor, 3, 0.0)
    with pytest.raises(UserError, match="step 3: the gradient norm is exactly 0, so nothing is learnt"):
        monitor.poll()
