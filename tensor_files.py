"""Tensors in safetensors files, read and written the same way whether a tensor is plain or sharded over the ranks.

Reading: every rank takes just its rows of each tensor from the files, so a model never stands whole in any process.
Writing: every sharded tensor is gathered once, the rank that owns it keeps a copy on the CPU, and each rank writes the
file of the tensors it owns. Files hold whole tensors under their own names, so any number of ranks, DDP or FSDP2, and
any other program can read them. A save moves each tensor over the network once: about what a training step does.

Shared module: torch and safetensors; copy parallel.py (UserError) with it.
"""
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from parallel import UserError


def open_tensors(paths):
    """{tensor name: slice handle with get_shape() and [rows]} over safetensors files; reads only their headers.

    Raises UserError for a file that is no safetensors file, or a name that stands in two of them.
    """
    found = {}
    for path in paths:
        try:
            file = safe_open(path, "pt")
            names = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error})")
        if twice := found.keys() & set(names):
            raise UserError(f"{path}: {min(twice)} stands in another file beside it, too")
        found |= {name: file.get_slice(name) for name in names}
    return found


def shape_of(parts):
    """Shape of slice handles joined along their first dimension."""
    first, *rest = (p.get_shape() for p in parts)
    return (first[0] + sum(shape[0] for shape in rest), *first[1:]) if rest else tuple(first)


def compare(wanted, found):
    """Problems as text, or "". wanted: {name: shape}; found: {name: [slice handles]} joined along dimension 0."""
    def some(what, names):
        return [f"{len(names)} {what}, first {', '.join(sorted(names)[:20])}"] if names else []
    wrong = [f"{name} {shape_of(found[name])} instead of {tuple(shape)}" for name, shape in wanted.items()
             if name in found and shape_of(found[name]) != tuple(shape)]
    return "; ".join(some("missing keys", wanted.keys() - found.keys()) +
                     some("unexpected keys", found.keys() - wanted.keys()) + some("mismatched keys", wrong))


@torch.no_grad()
def read_into(tensor, parts):
    """Fill a tensor (plain, or sharded by rows) from slice handles joined along dimension 0, in the tensor's dtype."""
    local, first = tensor, 0
    if isinstance(tensor, DTensor):
        local, first = tensor.to_local(), first_row(tensor)
    local = local.reshape(1) if local.ndim == 0 else local      # files hold no 0-d tensors of ours
    at = 0                                                      # row of the joined tensor where this part begins
    for part in parts:
        rows = part.get_shape()[0]
        start, stop = max(first, at), min(first + len(local), at + rows)
        if start < stop:
            local[start - first:stop - first].copy_(part[start - at:stop - at])
        at += rows


def first_row(tensor):
    """Row of the whole tensor where this rank's shard begins; FSDP2 cuts dimension 0 as torch.chunk does."""
    rows, mesh = tensor.shape[0], tensor.device_mesh
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


@torch.no_grad()
def gather_share(world, named):
    """{name: whole tensor on the CPU} of those this rank has to write. Collective when any of them is sharded.

    named: {name: tensor}, the same names on every rank. Plain tensors are alike everywhere, so rank 0 owns them all.
    """
    share, load = {}, [0] * world.size
    for name, tensor in named.items():
        owner = 0
        if isinstance(tensor, DTensor):
            owner = load.index(min(load))
            load[owner] += tensor.numel()
            if tensor.device.type != world.device.type:     # offloaded: the gradients' network carries GPU tensors
                tensor = tensor.to(world.device)
            tensor = tensor.full_tensor()
        if owner == world.rank:
            share[name] = tensor.detach().reshape(tensor.shape or (1,)).to("cpu", copy=True).contiguous()
    return share


def file_name(stem, rank, files):
    """model.safetensors, or model-00002-of-00008.safetensors: the names that transformers looks for."""
    return f"{stem}.safetensors" if files == 1 else f"{stem}-{rank + 1:05d}-of-{files:05d}.safetensors"


def files_in(folder, stem):
    """The files of file_name in a folder, whatever their number."""
    return sorted(Path(folder).glob(f"{stem}.safetensors")) or sorted(Path(folder).glob(f"{stem}-*-of-*.safetensors"))
