"""Weights of block diffusion: their exponential moving average, and loading them from a checkpoint."""
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from common import json_files, tensor_files
from common.parallel import UserError
from diffusion import dit


def local(tensor):
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Average:
    """Exponential moving average of a model's weights: decay min(decay, (1 + n) / (10 + n)) at update n = 1, 2, ..."""

    def __init__(self, model, decay):
        """Make it when the weights are in place and sharded, if they will be."""
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.shadow = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.updates = torch.zeros((), device=local(next(iter(self.shadow.values()))).device)

    def _pair(self):
        return ([local(t.detach()) for t in tensors.values()] for tensors in (self.parameters, self.shadow))

    @torch.no_grad()
    def update(self, skip=0.0):
        """Move towards the weights, unless skip (number or 0-d tensor on the device) is 1; no host sync."""
        self.updates += 1 - skip
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        weights, shadow = self._pair()
        difference = torch._foreach_sub(weights, shadow)
        torch._foreach_mul_(difference, (1 - decay) * (1 - skip))
        torch._foreach_add_(shadow, difference)

    @torch.no_grad()
    def swap(self):
        """Exchange the model's weights and the averaged ones, in place; again to undo. FSDP2: reshard before."""
        for weight, shadow in zip(*self._pair()):
            kept = weight.clone()
            weight.copy_(shadow)
            shadow.copy_(kept)


def load_checkpoint(folder, ema=True, backend="sdpa"):
    """(DiT on the CPU in eval mode, config.json as a dict) of a checkpoint folder; ema: the averaged weights.

    Raises UserError when the folder holds no such model.
    """
    folder = Path(folder)
    try:
        config = json_files.read_object(folder / "config.json")
        model = dit.DiT(dit.Config(**config["model"]), backend)
    except (UserError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: no checkpoint of train_bd3lm.py (config.json: {error})")
    load_weights(dict(model.named_parameters()), folder, "ema" if ema else "model")
    tensor_files.check_finite(dict(model.named_parameters()), folder)
    return model.eval(), config


def load_weights(tensors, folder, stem):
    """Fill {name: tensor}, plain or sharded, from <stem>.safetensors (one file or several) of a checkpoint folder."""
    parts = {name: [part] for name, part in
             tensor_files.open_tensors(tensor_files.files_in(folder, stem)).items()}
    if problem := tensor_files.compare({name: t.shape or (1,) for name, t in tensors.items()}, parts):
        raise UserError(f"{folder}: its {stem} weights do not fit this model: {problem}")
    for name, tensor in tensors.items():
        tensor_files.read_into(tensor.detach(), parts[name])
