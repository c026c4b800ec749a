"""--replay_every: a GPU that computes wrongly without saying so is found, and named.

Of every N-th step the first micro-step is computed twice before it is computed for good: from the
same random state, with the same batch. Loss, gradient norm and a checksum of every gradient must be
equal bit for bit. Nothing of the two passes stays: on a CPU a run is the same with them and without
(on a GPU cuBLAS is asked for one order of adding, which may choose other kernels).

Gradients are compared before ranks sum them, and the rank that differs is the one that is wrong.
FSDP2 has gradients only as sums over ranks: there the loss names the rank, and where only gradients
differ every rank whose shard differs is named, of which one or another is wrong.
"""
import contextlib
import socket

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from common import checkpoint, distributed, resume
from common.text import UserError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}     # by bytes an element


class WrongResult(UserError):
    """Two computations of the same step differ; the process ends with a status of its own."""
    status = 3


def passes(state, module, parameters):
    """Two passes over a micro-step, then their comparison. Yields whether ranks sum gradients.

    state: run.TrainState; its loss is that of the pass, 0-d. parameters: those that are trained.
    Raises WrongResult, on every rank, when any rank's passes differ. Collective.
    """
    world, found = state.world, []
    before = checkpoint.rng_state(world.device)
    with deterministic(world.device):
        for _ in range(2):
            resume.set_rng_state(before, world.device)
            yield isinstance(module, FSDPModule)
            found.append(results(state.loss, parameters))
            for parameter in parameters:
                parameter.grad = None
    resume.set_rng_state(before, world.device)
    wrong = distributed.gather_objects(world, difference(world, *found))
    if any(wrong):
        state.watch.moved("waiting for the checkpoint under way", state.args.wait_timeout)
        state.writer.finish()
        # a rank whose loss differs has spoilt the sums of the others
        named = [line for line in wrong if "loss" in line] or [line for line in wrong if line]
        raise WrongResult(f"step {state.step + 1} computed twice is not the same on "
                          f"{'; '.join(named)}. Nothing of this step is saved; the same command "
                          "goes on from the last checkpoint, without that machine")


def results(loss, parameters):
    """float64 and int64 tensors on the CPU: [loss, gradient norm], a checksum of each gradient."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norm = torch.nn.utils.get_total_norm(grads)         # of this rank's share
    # a sum of their bits as integers: one flipped bit changes it, and no order of adding does
    sums = [grad.contiguous().view(BITS[grad.element_size()]).sum(dtype=torch.int64)
            for grad in grads]
    return torch.stack([loss.double(), norm.to(loss.device).double()]).cpu(), torch.stack(sums).cpu()


def difference(world, first, second):
    """Words about what differs between two results() of this rank, or ""."""
    (numbers, sums), (numbers_2, sums_2) = first, second
    # as bits: not a number is equal to itself then
    same = numbers.view(torch.int64) == numbers_2.view(torch.int64)
    changed = int((sums != sums_2).sum())
    if same.all() and not changed:
        return ""
    where = f"rank {world.rank} ({socket.gethostname()}, {device_name(world)})"
    loss = "" if same[0] else f"loss {numbers[0]:.9g} and {numbers_2[0]:.9g}, "
    return (f"{where}: {loss}gradient norm {numbers[1]:.9g} and {numbers_2[1]:.9g}, "
            f"{changed} of {len(sums)} gradients differ")


def device_name(world):
    """The GPU as nvidia-smi calls it, or "CPU"."""
    if world.device.type != "cuda":
        return "CPU"
    return f"GPU {world.local_rank}, {torch.cuda.get_device_properties(world.device).uuid}"


@contextlib.contextmanager
def deterministic(device):
    """On a GPU only kernels that add in one order, as flash attention's backward else does not."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or device.type == "cuda", warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
