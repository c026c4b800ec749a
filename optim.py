"""AdamW groups, learning-rate schedules, gradient clipping, and steps that a bad gradient cannot poison.

Shared module: torch only, imports nothing of ours.
"""
import math

import torch


def build_adamw(named_parameters, lr, weight_decay, betas, decays):
    """Fused AdamW over the trainable parameters in two groups; fused, because guarded_step needs it.

    named_parameters: iterable of (name, parameter). decays(name, parameter) -> bool says what weight decay may shrink.
    """
    decay, keep = [], []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (decay if decays(name, parameter) else keep).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=1e-8, fused=True)


def load_optimizer(optimizer, state):
    """Moments and step counters of a saved optimizer; weight decay and betas stay as this run's flags say."""
    ours = [{key: group[key] for key in ("weight_decay", "betas")} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, ours):
        group.update(values)


def lr_factor(step, total_steps, warmup_steps, scheduler="cosine", min_ratio=0.0):
    """Multiplier of the learning rate for optimizer step `step` (0-based): linear warm-up, then cosine or linear decay.

    Reaches min_ratio at total_steps. The first step already moves: its factor is 1 / warmup_steps.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if scheduler == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if scheduler == "cosine" else 1 - progress
    return min_ratio + (1 - min_ratio) * fall


def sqrt_lr(lr, batch, base_batch):
    """Square-root rule: lr * sqrt(batch / base_batch) keeps Adam's update noise constant as the batch grows."""
    return lr * math.sqrt(batch / base_batch)


def clip_gradients(parameters, max_norm):
    """Global L2 norm of the gradients, a 0-d tensor on their device; scales them to max_norm when max_norm > 0."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def guarded_step(optimizer, bad):
    """optimizer.step() that does nothing where `bad` (0-d float tensor on the device) is 1: no host sync to decide.

    Uses the hook that torch's GradScaler uses on fused optimizers; step counters do not advance either.
    """
    optimizer.grad_scale, optimizer.found_inf = None, bad
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


class BadSteps:
    """Counts optimizer steps whose gradient was not finite, one step late so that the device is never waited for."""

    def __init__(self, device, total=0):
        cuda = device.type == "cuda"
        self.host = torch.zeros((), pin_memory=cuda)
        self.event = torch.cuda.Event() if cuda else None
        self.pending = None         # what the caller wants back about the step whose flag is on its way
        self.in_a_row, self.total = 0, total

    def push(self, bad, about):
        """Start fetching the flag of the step just queued; `about` comes back from pop when it was bad."""
        self.host.copy_(bad, non_blocking=True)
        if self.event:
            self.event.record()
        self.pending = (about,)

    def pop(self):
        """`about` of the step pushed last when it was bad, else None. Call before the next push."""
        if self.pending is None:
            return None
        if self.event:
            self.event.synchronize()
        (about,), self.pending = self.pending, None
        bad = bool(self.host.item())
        self.in_a_row = self.in_a_row + 1 if bad else 0
        self.total += bad
        return about if bad else None
