"""Whole weights of a sharded module on every rank, for what one rank does alone: speech, answers of a student."""
import contextlib

import torch
from torch.distributed.fsdp import FSDPModule

from core.cli import UserError
from core.dist import reshard


@contextlib.contextmanager
def gathered(module):
    """Within this context every rank holds a sharded module's whole weights, and its forward needs no other rank.

    For work on one rank. FSDP2's hooks are off meanwhile: they would note forwards that the other ranks did not run,
    and the next backward would prefetch layers on this rank alone and hang. Changes nothing for other modules.
    """
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    hooks = [(table, dict(table)) for unit in units for table in (unit._forward_pre_hooks, unit._forward_hooks)]
    for unit in units:
        try:
            unit.unshard()
        except torch.OutOfMemoryError:
            raise UserError("the GPU's memory is too small to gather the whole model for work on one rank, as sample "
                            "prompts need; drop them, or take more GPUs")
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, before in hooks:
            table.update(before)
        reshard(module)
