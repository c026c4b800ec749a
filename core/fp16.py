"""--fp16: the loss is scaled, so that gradients do not vanish in float16; steps that overflow are skipped.

As torch.amp.GradScaler does it: half the scale after an overflow, twice the scale after this many
steps without. But whether a step overflowed is asked of the global gradient norm, which is the same
on every rank, and no step waits for the answer.
"""
import torch

from core import cli, fused

START, LONG = 65536.0, 2000     # first scale; steps without an overflow after which it doubles


class Scaler:
    """scale, and steps since it changed, as 0-d tensors on the device; both are saved."""

    def __init__(self, device, saved=None):
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            fused.FLASH = ()
            cli.notice("no flash attention (sm_{}{}): SDPA, sample by sample".format(
                *torch.cuda.get_device_capability(device)))
        self.scale, self.steps = torch.tensor(saved or [START, 0.0], device=device)

    def unscale(self, parameters):
        """Make the scaled gradients true ones, in place."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(grads, 1 / self.scale)

    def update(self, bad):
        """After a step; bad: 0-d, 1 where it was skipped."""
        steps = torch.where(bad > 0, 0.0, self.steps + 1)
        grown = torch.where(steps >= LONG, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(bad > 0, (self.scale / 2).clamp(min=1.0), grown))
        self.steps.copy_(torch.where(steps >= LONG, 0.0, steps))

    def saved(self):
        """[scale, steps] as python numbers."""
        return [self.scale.item(), self.steps.item()]
