"""AdamW groups, learning-rate schedules, gradient clipping, and steps that a bad gradient cannot
poison.
"""
import math

import torch
from torch.distributed.tensor import DTensor

from core import cli, fused
from core.cli import require
from core.dist import all_gather, all_max

# of --fp16; steps without an overflow after which it doubles
FIRST_SCALE, GROW = 65536.0, 2000


def build_adamw(named_parameters, lr, weight_decay, betas, decays):
    """Fused AdamW over the trainable parameters in two groups; fused, because guarded_step needs
    it.

    named_parameters: iterable of (name, parameter). decays(name, parameter) -> bool says what
    weight decay may shrink.
    """
    decay, keep = [], []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (decay if decays(name, parameter) else keep).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay},
              {"params": keep, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=1e-8,
                             fused=True)


def state_tensors(optimizer, named_parameters):
    """{"parameter name.exp_avg" and so on: tensor} of all that AdamW remembers, to be saved or
    filled in place.

    Parameters that had no step yet get the zeros that their first step would give them.
    """
    tensors, known = {}, {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            assert id(parameter) in known, f"{name} is not updated: gathered weights were not freed"
            state = optimizer.state[parameter]
            if not state:
                state |= {"step": torch.zeros((), device=parameter.device),
                          "exp_avg": torch.zeros_like(parameter),
                          "exp_avg_sq": torch.zeros_like(parameter)}
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return tensors


def lr_factor(step, total_steps, warmup_steps, scheduler="cosine", min_ratio=0.0):
    """Multiplier of the learning rate for optimizer step `step` (0-based): linear warm-up, then
    cosine or linear decay.

    Reaches min_ratio at total_steps. The first step already moves: its factor is 1 / warmup_steps.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if scheduler == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if scheduler == "cosine" else 1 - progress
    return min_ratio + (1 - min_ratio) * fall


def clip_gradients(parameters, max_norm):
    """Global L2 norm of the gradients, a 0-d tensor on their device; scales them to max_norm when
    max_norm > 0.

    Collective when the gradients are sharded: the norm is over all shards.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def guarded_step(optimizer, bad):
    """optimizer.step() that does nothing where `bad` (0-d float tensor on the device) is 1: no host
    sync to decide.

    Uses the hook that torch's GradScaler uses on fused optimizers; step counters do not advance
    either.
    """
    optimizer.grad_scale, optimizer.found_inf = None, bad
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def take_step(optimizer, lr, norm):
    """Step with this learning rate, unless the gradient norm (0-d) is not finite; then clear the
    gradients. Returns 1.0 where the step was skipped, 0.0 where not, 0-d like norm. No host sync.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    bad = 1 - torch.isfinite(norm).float()
    guarded_step(optimizer, bad)
    optimizer.zero_grad(set_to_none=True)
    return bad


class Scaler:
    """--fp16: the loss is scaled, or gradients would vanish; steps that overflow are skipped.

    As torch.amp.GradScaler does it: half the scale after an overflow, twice the scale after GROW
    steps without. But whether a step overflowed is asked of the global gradient norm, the same on
    every rank, and no step waits for the answer. scale, and steps since it changed, are 0-d tensors
    on the device; both are saved.
    """

    def __init__(self, device, saved=None):
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            fused.FLASH = ()
            cli.notice("no flash attention (sm_{}{}): SDPA, sample by sample".format(
                *torch.cuda.get_device_capability(device)))
        self.scale, self.steps = torch.tensor(saved or [FIRST_SCALE, 0.0], device=device)

    def unscale(self, parameters):
        """Make the scaled gradients true ones, in place."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(grads, 1 / self.scale)

    def update(self, bad):
        """After a step; bad: 0-d, 1 where it was skipped."""
        steps = torch.where(bad > 0, 0.0, self.steps + 1)
        grown = torch.where(steps >= GROW, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(bad > 0, (self.scale / 2).clamp(min=1.0), grown))
        self.steps.copy_(torch.where(steps >= GROW, 0.0, steps))

    def saved(self):
        """[scale, steps] as python numbers."""
        return [self.scale.item(), self.steps.item()]


class StepMonitor:
    """What the host must know of each step, fetched one step late so that the device never waits:
    was its gradient not finite, or exactly 0; did any rank ask to stop.

    skipped: steps that were not taken, of the run. stop: whether a rank asked to stop.
    """

    def __init__(self, world, sample_name, max_bad_steps=5, skipped=0, scaler=None,
                 before_error=lambda: None):
        """sample_name(i): the file and row of sample i. scaler: Scaler or None. before_error:
        called on every rank before the run is given up, to complete the checkpoint under way.
        """
        self.before_error = before_error
        self.world, self.sample_name, self.max_bad_steps = world, sample_name, max_bad_steps
        self.skipped, self.in_a_row, self.stop, self.scaler = skipped, 0, False, scaler
        cuda = world.device.type == "cuda"
        self.host = torch.zeros(3, pin_memory=cuda)
        self.event = torch.cuda.Event() if cuda else None
        self.losses, self.pending = [], None

    def watch(self, loss, samples):
        """Remember whether a micro-step's loss is finite, without a host sync: its samples are
        named if the step is skipped. samples: their numbers.
        """
        self.losses.append((torch.isfinite(loss.detach()), list(samples)))

    def push(self, step, norm, stop, trains=True):
        """Start fetching the flags of the step just queued. Collective.

        norm: its gradient norm, 0-d. stop: whether this rank was asked to stop. trains: whether
        the step has anything to learn, so that a gradient of exactly 0 is a fault.
        """
        norm = norm.to(self.world.device)       # with CPU offload gradients are elsewhere
        zero = (norm == 0).float() * trains
        found = torch.stack([1 - torch.isfinite(norm).float(), zero, all_max(self.world, stop)])
        self.host.copy_(found, non_blocking=True)
        if self.event:
            self.event.record()
        self.pending, self.losses = (step, self.losses), []

    def poll(self):
        """Take the flags of the step pushed last; call it before the next push, on every rank.

        Names the samples of a skipped step. Raises UserError, on all ranks, after max_bad_steps of
        them in a row, and for a gradient norm of exactly 0.
        """
        if self.pending is None:
            return
        if self.event:
            self.event.synchronize()
        (step, losses), self.pending = self.pending, None
        bad, zero, stop = (bool(flag) for flag in self.host.tolist())
        self.stop |= stop
        if zero:
            self.before_error()
        require(not zero,
                f"step {step}: the gradient norm is exactly 0, so nothing is learnt; look "
                "at the trained modules (--lora_target_modules, --freeze_llm), at the weight of "
                "the loss, and whether the run learns without --compile")
        if not bad:
            self.in_a_row = 0
            return
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        mine = [self.sample_name(i) for finite, samples in losses if not finite.item()
                for i in samples]
        names = sorted({name for found in all_gather(self.world, mine) for name in found})
        what = "every loss was finite"
        if names:
            what = f"samples with a non-finite loss: {'; '.join(names[:20])}"
        elif self.scaler and self.scaler.scale > 1:     # it may take many steps to find the scale
            self.in_a_row = 0
        text = (f"step {step}: gradient norm is not finite, step skipped ({self.skipped} so far); "
                f"{what}")
        if self.world.is_main:
            print(text, flush=True)
        if self.in_a_row >= self.max_bad_steps:
            self.before_error()
        require(self.in_a_row < self.max_bad_steps,
                f"{self.in_a_row} steps in a row had a non-finite gradient; {text}")
