"""AdamW, learning rates, gradient clipping, and steps that skip gradients that are not finite."""
import math

import torch
from torch.distributed.tensor import DTensor

from core import kernels
from core.cli import UserError
from core.dist import all_gather, all_reduce


def build_adamw(named_parameters, lr, weight_decay, beta2):
    """Fused AdamW for take_step. Only matrices decay, but no embeddings (wte, wpe: GPT-2's)."""
    groups = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            is_embedding = any(word in name for word in ("embed", "wte", "wpe"))
            decays = parameter.ndim > 1 and not is_embedding
            groups[0 if decays else 1]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), eps=1e-8, fused=True)


def state_tensors(optimizer, model):
    """{"NAME.exp_avg", "NAME.exp_avg_sq", "NAME.step": tensor} of AdamW; zeros before a step."""
    tensors, known = {}, {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert id(parameter) in known, f"{name} is not updated: gathered weights were not freed"
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return tensors


def lr_factor(step, total_steps, warmup_steps, scheduler="cosine", min_ratio=0.0):
    """Multiplier of the peak learning rate at a step, counted from 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if scheduler == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if scheduler == "cosine" else 1 - progress
    return min_ratio + (1 - min_ratio) * fall


def clip_gradients(parameters, max_norm):
    """Global L2 norm of the gradients, 0-d. Clips them if max_norm is above 0. Collective."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def take_step(optimizer, lr, norm):
    """Step and clear the gradients; skip the step if their norm is not finite. Returns 0-d 1.0 for
    a skipped step, else 0.0. No host sync."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    bad = 1 - torch.isfinite(norm).float()
    # GradScaler's attribute, by which a fused optimizer skips a step without counting it
    optimizer.found_inf = bad
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return bad


def loss_scaler(device, enabled, saved=None):
    """torch's GradScaler of --fp16. saved: its state_dict() in a checkpoint."""
    scaler = torch.amp.GradScaler(device.type, enabled=enabled)
    if enabled and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        kernels.FLASH = ()      # SDPA, sample by sample
    if isinstance(saved, list):     # of older checkpoints: scale, steps since it changed
        saved = scaler.state_dict() | {"scale": saved[0], "_growth_tracker": int(saved[1])}
    if saved:
        scaler.load_state_dict(saved)
    return scaler


class StepMonitor:
    """Reports to the host if a step's gradient was not finite or exactly 0, and if a rank was asked
    to stop. It fetches both numbers one step late, so that the device never waits."""

    def __init__(self, world, sample_name, max_bad_steps=5, skipped=0, scaler=None):
        """sample_name(i): file and row of a sample. skipped: steps skipped before a resume."""
        self.world, self.sample_name = world, sample_name
        self.skipped, self.max_bad_steps, self.scaler = skipped, max_bad_steps, scaler
        self.in_a_row, self.stop, self.losses, self.pending = 0, False, [], None

    def watch(self, loss, samples):
        """Note if a micro-step's loss is finite, and its sample numbers. No host sync."""
        self.losses.append((torch.isfinite(loss.detach()), list(samples)))

    def push(self, step, norm, stop, trains=True):
        """Evaluate the numbers of the previous step, start to fetch those of the step just queued.
        norm: of its gradient, 0-d. stop: this rank was asked to stop. trains: False if a norm of
        exactly 0 is correct. Collective. UserError as poll()."""
        self.poll()
        asked = all_reduce(self.world, torch.full((), float(stop), device=self.world.device))
        # with CPU offload the norm is on the host
        numbers = torch.stack([norm.to(self.world.device), asked])
        # into pinned memory, which the host may read after the event
        host = numbers.to("cpu", non_blocking=True)
        fetched = torch.cuda.current_stream().record_event() if numbers.is_cuda else None
        self.pending, self.losses = (step, trains, self.losses, host, fetched), []

    def poll(self):
        """Evaluate the numbers of the last push. Collective. UserError after max_bad_steps skipped
        steps in a row, or for a norm of exactly 0."""
        if self.pending is None:
            return
        (step, trains, losses, host, fetched), self.pending = self.pending, None
        if fetched:
            fetched.synchronize()
        norm, stop = host.tolist()
        self.stop |= bool(stop)
        fault = ""
        if norm == 0 and trains:
            fault = (f"step {step}: the gradient norm is exactly 0, so nothing is learnt; look at "
                     "the flags that choose the trained modules")
        if math.isfinite(norm):
            self.in_a_row = 0
        else:
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            mine = {self.sample_name(i) for finite, batch in losses if not finite for i in batch}
            names = sorted(set().union(*all_gather(self.world, mine)))
            if not names and self.scaler and self.scaler.get_scale() > 1:   # it is still too large
                self.in_a_row = 0
            why = f"samples with a non-finite loss: {'; '.join(names[:20])}"
            text = (f"step {step}: gradient norm is not finite, step skipped ({self.skipped} so "
                    f"far); {why if names else 'every loss was finite'}")
            if self.world.is_main:
                print(text, flush=True)
            if self.in_a_row >= self.max_bad_steps:
                fault = f"{self.in_a_row} steps in a row had a non-finite gradient; {text}"
        if fault:
            from core import checkpoint  # which imports this file
            checkpoint.wait()       # until the checkpoint being written is complete
            raise UserError(fault)
