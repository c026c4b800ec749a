"""Read and write safetensors files of plain or sharded parameters.

Every rank reads only its rows of each tensor, and writes a separate file, so no host needs memory
for the full model. Files hold whole tensors under the names of transformers and PEFT, so any number
of ranks can read them.
"""
import hashlib
import json
import math
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import distributed as c10d
from torch.distributed.tensor import DTensor

from core import dist
from core.cli import UserError, error_names_file, first_line, require

WINDOW = 256 * 2**20        # bytes that a rank gathers before it copies them to the host
FLOATS = {"F64", "F32", "F16", "BF16"}      # integers and float8 would need scales
# renamed in torch 2.13
gather_rows = getattr(c10d, "all_gather_single", None) or c10d.all_gather_into_tensor


def local_rows(tensor):
    """(this rank's plain tensor, the number of its first row); a 0-d tensor becomes (1,)."""
    if not isinstance(tensor, DTensor):
        return tensor.view(tensor.shape or (1,)), 0
    mesh = tensor.device_mesh       # whose last dimension shards
    rows = -(-tensor.shape[0] // mesh.size(mesh.ndim - 1))
    return tensor.to_local(), rows * mesh.get_local_rank(mesh.ndim - 1)


def full_tensor(tensor):
    """The whole tensor of a sharded one. Collective among the ranks that hold a shard. Not
    DTensor.full_tensor(): gloo sometimes frees its collective's long name twice (torch 2.13)."""
    local, mesh = tensor.to_local(), tensor.device_mesh
    shards = mesh.size(mesh.ndim - 1)       # under HSDP the dimension before it replicates
    rows = -(-tensor.shape[0] // shards)        # shards at the end may have fewer: they are padded
    padded = torch.cat([local, local.new_zeros(rows - len(local), *local.shape[1:])])
    whole = local.new_empty(shards * rows, *local.shape[1:])
    gather_rows(whole, padded, group=mesh.get_group(mesh.ndim - 1))
    return whole[:tensor.shape[0]]


# ---- Reading


def find_folder(name, flag):
    """Folder of a model, a hub name's downloaded. UserError."""
    from huggingface_hub import snapshot_download
    kinds = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(name if Path(name).is_dir() else snapshot_download(name, allow_patterns=kinds))
    except Exception as error:      # a dozen types: no hub name, no network, no permission
        raise UserError(f"{flag} {name}: neither a local folder nor available on the Hub "
                        f"({type(error).__name__}: {first_line(error)})")


def fingerprint_files(paths, form="{} {}"):
    """Short hash of files: their names and sizes, formatted by `form`, and both their ends."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        with error_names_file(path), open(path, "rb") as file:
            digest.update(form.format(path.name, size).encode() + file.read(2**20))
            file.seek(max(0, size - 2**20))
            digest.update(file.read(2**20))
    return digest.hexdigest()[:16]


def open_tensors(paths):
    """{tensor name: its slice} of safetensors files: get_shape(), get_dtype(), [rows]. Only headers
    are read. UserError."""
    slices = {}
    for path in paths:
        try:
            file = safe_open(path, "pt")
            names = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error})")
        twice = sorted(slices.keys() & set(names))
        require(not twice, f"{path}: {twice[:1]} is in another file of the folder, too")
        slices |= {name: file.get_slice(name) for name in names}
    return slices


def files_of(folder, stem):
    """STEM.safetensors of a folder, or its parts STEM-00001-of-00008.safetensors. UserError."""
    names = f"{stem}.safetensors", f"{stem}-*-of-*.safetensors"
    whole, parts = (sorted(Path(folder).glob(name)) for name in names)
    require(whole or parts, f"{folder}: holds no {names[0]}, nor its parts")
    return whole or parts


def check_names(wanted, slices, where):
    """UserError, which begins with `where`, if {name: slice} differ from the wanted {name: shape},
    or are no floats."""
    shapes = {name: tuple(rows.get_shape()) for name, rows in slices.items()}
    faults = {"missing keys": wanted.keys() - shapes.keys(),
              "unexpected keys": shapes.keys() - wanted.keys(),
              "mismatched keys": [f"{name} {shape} instead of {tuple(wanted[name])}" for name, shape
                                  in shapes.items() if shape != wanted.get(name, shape)],
              "tensors that are not floats": [name for name, rows in slices.items()
                                              if rows.get_dtype() not in FLOATS]}
    for fault, names in faults.items():
        require(not names, f"{where}: {len(names)} {fault}, first {', '.join(sorted(names)[:20])}")


def is_finite(tensor):
    """True if a tensor holds neither NaN nor infinity, in one pass over it."""
    # aminmax propagates NaN, and is 20 times as fast as torch.isfinite(tensor).all()
    return not tensor.numel() or all(map(math.isfinite, map(float, torch.aminmax(tensor.detach()))))


def fill(tensor, whole, name):
    """Copy this rank's rows of a slice of a file, or of a whole tensor, into a plain or sharded
    tensor, in its dtype. UserError for NaN or infinity."""
    local, first = local_rows(tensor.detach())
    rows = whole[first:first + len(local)]
    require(is_finite(rows), f"{name} holds NaN or infinity: these weights are damaged")
    local.copy_(rows)


def load_base(model, parts, world=None, split=None):
    """Fill a model, or the base under its adapters, from {name: slice}; NF4 layers quantize.
    split(name, rows, first row): {name in `parts`: rows}. Collective with a world. UserError."""
    layers = {module.weight: module for module in model.modules() if hasattr(module, "nf4")}
    for name, weight in model.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name:     # of an adapter, in PEFT's names
            continue
        name = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        layer, read = layers.get(weight), weight
        if layer:
            read = torch.empty(layer.out_features, layer.in_features, device=weight.device)
        views = {name: read} if name in parts else split(name, *local_rows(read.detach()))
        for stored, rows in views.items():
            fill(rows, parts[stored], stored)
        if layer:
            layer.fill(read)
    dist.all_gather(world or dist.World(), None)    # a slow disk may take long


def load(world, folder, stem, tensors):
    """Fill {name: tensor}, plain or sharded, from STEM.safetensors. Collective. UserError."""
    slices = open_tensors(files_of(folder, stem))
    # a 0-d tensor, such as Adam's step, was written as one row
    check_names({name: tensor.shape or (1,) for name, tensor in tensors.items()}, slices,
                f"{folder}: its {stem} tensors do not fit this run")
    for name, tensor in tensors.items():
        fill(tensor, slices[name], f"{folder}: {name}")
    dist.all_gather(world, None)    # a slow disk may take longer than a gradient collective may


# ---- Writing


def stage(world, stem, named, split=None):
    """Copy {name: tensor} off the device -> {file name: write(path)} of the files this rank writes.
    Collective, with the same names on every rank. Rank 0 writes plain tensors and adapters; sharded
    ones are distributed over all ranks, one file each. split(name, tensor): {name: tensor} as files
    hold it."""
    share, numels = {}, [0] * world.size        # {name: tensor on the host}, what each rank writes
    waiting, gathered = {}, 0       # tensors to copy, and bytes gathered since the last copy
    for number, (name, tensor) in enumerate(named.items(), 1):
        owner, tensor = 0, tensor.detach()
        if isinstance(tensor, DTensor):
            if stem != "adapter_model":     # PEFT reads one file
                owner = numels.index(min(numels))       # the rank with the least to write
                numels[owner] += tensor.numel()
            tensor = full_tensor(tensor.to(world.device))       # shards may be on the host
            gathered += tensor.nbytes
        assert tensor.untyped_storage().nbytes() or not tensor.numel(), (
            f"{name} is a gathered weight that FSDP2 has freed: call dist.reshard(model) first")
        if owner == world.rank:
            tensor = tensor.reshape(tensor.shape or (1,)).contiguous()
            waiting |= split(name, tensor) if split else {name: tensor}
        if gathered > WINDOW * world.size or number == len(named):  # all ranks copy simultaneously
            share |= {key: piece.to("cpu", copy=True) for key, piece in waiting.items()}
            waiting, gathered = {}, 0

    def write(path):
        bad = sorted(name for name, tensor in share.items() if not is_finite(tensor))
        # else rotation could delete the last usable checkpoint
        require(not bad, f"{stem}.safetensors: {len(bad)} of its tensors hold NaN or infinity, "
                         f"first {', '.join(bad[:5])}")
        save(share, path)

    held = [names for names in dist.all_gather(world, list(share)) if names]
    form = stem + "-{:05}-of-{:05}.safetensors" if len(held) > 1 else stem + ".safetensors"
    files = {name: form.format(number, len(held))
             for number, names in enumerate(held, 1) for name in names}
    writes = {files[name]: write for name in share}     # one file, or none
    if len(held) > 1 and world.is_main:     # the index that transformers reads
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in named.values())},
                 "weight_map": {name: Path(file).name for name, file in files.items()}}
        writes[f"{stem}.safetensors.index.json"] = lambda path: path.write_text(
            json.dumps(index, indent=1, sort_keys=True) + "\n")
    return writes


def save(tensors, path, metadata=None, write=save_file):
    """Write a safetensors file with the permissions of any new file; safetensors' own are 0600."""
    open(path, "wb").close()
    mode = os.stat(path).st_mode        # from umask and folder
    try:
        write(tensors, path, metadata or {"format": "pt"})
    except SafetensorError as error:    # also of a full disk
        raise OSError(f"{Path(path).name}: {error}")
    os.chmod(path, mode & 0o777)
