"""Weights of block diffusion: their exponential moving average, finding and loading a checkpoint."""
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from common import checkpoint
from common.distributed import UserError
from core import json_files
from diffusion import dit


def local(tensor):
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(model):
    """{name: parameter} of those that training changes: all, or adapters and the mask's row."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class Average:
    """Exponential moving average of a model's weights: decay min(decay, (1 + n) / (10 + n)) at update n = 1, 2, ..."""

    def __init__(self, model, decay):
        """Make it when the weights are in place and sharded, if they will be; of those that are trained."""
        self.decay = decay
        self.parameters = trained(model)
        self.shadow = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.updates = torch.zeros((), device=local(next(iter(self.shadow.values()))).device)

    def _pair(self):
        return ([local(t.detach()) for t in tensors.values()] for tensors in (self.parameters, self.shadow))

    @torch.no_grad()
    def update(self, skip=0.0):
        """Move towards the weights, unless skip (number or 0-d tensor on the device) is 1; no host sync."""
        self.updates += 1 - skip
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        share = (1 - decay) * (1 - skip)
        for weight, shadow in zip(*self._pair()):       # one pass; _foreach_lerp_ takes no 0-d tensor
            shadow.lerp_(weight, share)

    @torch.no_grad()
    def swap(self):
        """Exchange the model's weights and the averaged ones, in place; again to undo. FSDP2: reshard before."""
        for weight, shadow in zip(*self._pair()):
            kept = weight.clone()
            weight.copy_(shadow)
            shadow.copy_(kept)


def module_of(config):
    """The module of a network's Config, dit or decoder: both have Model, decays and flops."""
    return sys.modules[type(config).__module__]


def load_checkpoint(folder, ema=True, backend="sdpa"):
    """(network on the CPU in eval mode, config.json as a dict) of a checkpoint folder. UserError.

    ema: the averaged weights. Adapters are merged into their language model, which is read from
    where it was in training.
    """
    from common import resume
    folder = Path(folder)
    try:
        config = json_files.read_object(folder / "config.json")
        settings, kind = dict(config["model"]), dit
        if "kv_heads" in settings:
            from diffusion import decoder as kind
        if settings.get("lora"):
            settings["lora"] = settings["lora"] | {"dtype": "float32"}
        model = kind.Model(kind.Config(**settings), backend)
    except (UserError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: no checkpoint of train_bd3lm.py (config.json: {error})")
    resume.load_tensors(folder, "ema" if ema else "model", trained(model))
    if settings.get("lora"):
        kind.read_base(model)
        model = kind.merged(model)
    return model.eval(), config


def find_checkpoint(name, pick, flag="--checkpoint"):
    """The checkpoint folder that a flag's value and `pick`, "best" or "newest", mean. UserError."""
    from common import resume
    folder = Path(name)
    if not folder.is_dir():
        raise UserError(f"{flag} {name}: no such folder")
    if checkpoint.checkpoints(folder):
        folder = resume.newest_whole(folder)
        if folder is None:
            raise UserError(f"{flag} {name}: every checkpoint in it is damaged")
        number = checkpoint.load_meta(folder)["best_step"]
        best = folder.with_name(f"checkpoint-{number}")
        if pick == "best" and number is not None and not resume.damage(best):
            folder = best
    elif wrong := resume.damage(folder):
        raise UserError(f"{flag} {name}: is not a checkpoint, and holds none ({wrong})")
    return folder
