"""Tensors in safetensors files, read and written the same way whether a tensor is plain or sharded over the ranks.

Reading: every rank takes just its rows of each tensor from the files, so a model never stands whole in any process.
Writing: every sharded tensor is gathered once, the rank that owns it keeps a copy on the CPU, and each of those ranks
writes the file of the tensors it owns. Files hold whole tensors under their own names, so any number of ranks, DDP,
FSDP2 or HSDP, and any other program can read them. A save moves each tensor over the network once, under HSDP inside
one node: about what a training step does.
"""
import hashlib
import json
import math
import os
import stat
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from common import distributed
from common.distributed import UserError, naming
from core import json_files

WINDOW = 256 * 2**20        # bytes a rank gathers for itself before it copies them to the CPU
WRITERS = 16                # ranks that write a checkpoint; rank 0 waits for each of them
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor     # its name since torch 2.13
FLOATS = ("F64", "F32", "F16", "BF16")      # what weights are; integers and float8 would need scales that no file has


def save(tensors, path, about=None, write=save_file):
    """Write a safetensors file with the mode of any new file there; the library's is its owner's.
    about: {str: str} for its header. write: safetensors' function for the kind of tensors.
    """
    open(path, "wb").close()
    # what umask and folder leave; to ask for the umask is to change it for a moment
    mode = os.stat(path).st_mode
    try:
        write(tensors, path, about or {"format": "pt"})
    except SafetensorError as error:        # of a full disk, too, without the name of the file
        raise OSError(f"{Path(path).name}: {error}")
    os.chmod(path, stat.S_IMODE(mode))


def allow_others(folder):
    """Give the safetensors files that save_pretrained wrote into a folder the mode of its config.json."""
    for path in Path(folder).glob("*.safetensors"):
        os.chmod(path, stat.S_IMODE(os.stat(Path(folder) / "config.json").st_mode))


def find_folder(name, flag, more=()):
    """Local folder of a checkpoint given as a path or hub name, which is downloaded. Raises UserError.

    more: patterns of files to download beside configuration, tokenizer and safetensors.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"{flag} {name}: no such folder (nor a hub name of the form owner/name)")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", *more]))
    except Exception as error:      # a dozen kinds: no network, no such name, not allowed
        raise UserError(f"{flag} {name}: neither a folder here nor to be had from the hub "
                        f"({type(error).__name__}: {str(error).splitlines()[0]})")


def found_again(name):
    """A model's name that any working directory finds: of the hub, or a folder's whole path."""
    return os.path.abspath(name) if name and os.path.isdir(name) else name


def fingerprint_weights(folder, form="{} {}"):
    """Short hash of a checkpoint folder's config and of both ends of each weight file: which model is this?"""
    return fingerprint_files(sorted(Path(folder).glob("*.safetensors")) + [Path(folder) / "config.json"], form)


def fingerprint_files(paths, form="{} {}"):
    """Short hash of the names, the sizes and both ends of files. form: of name and size in what is hashed."""
    digest = hashlib.sha256()
    for path in paths:
        with naming(path), open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(form.format(path.name, size).encode())
            for at in (0, max(0, size - 2**20)):
                file.seek(at)
                digest.update(file.read(2**20))
    return digest.hexdigest()[:16]


class Slice:
    """A tensor in a safetensors file, to be read by rows: get_shape(), get_dtype(), [rows]."""

    def __init__(self, path, name, handle):
        self.path, self.name = path, name
        self.handle, self.get_shape, self.get_dtype = handle, handle.get_shape, handle.get_dtype

    def __getitem__(self, rows):
        """The rows; UserError where they hold NaN or infinity, which training would only spread."""
        values = self.handle[rows]
        if not is_finite(values):
            raise UserError(f"{self.path}: {self.name} holds NaN or infinity; these weights cannot be used")
        return values


def open_tensors(paths):
    """{tensor name: Slice} over safetensors files; reads only their headers.

    Raises UserError for a file that is no safetensors file, or a name that stands in two of them.
    """
    found = {}
    for path in paths:
        json_files.open_file(path).close()      # safe_open would wait for ever at a pipe
        try:
            open(path, "rb").close()        # safe_open calls every reason "No such file or directory"
            file = safe_open(path, "pt")
            names = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")
        if twice := found.keys() & set(names):
            raise UserError(f"{path}: {min(twice)} stands in another file beside it, too")
        found |= {name: Slice(path, name, file.get_slice(name)) for name in names}
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
    odd = [f"{name} {kind}" for name in wanted.keys() & found.keys() for part in found[name]
           if (kind := part.get_dtype()) not in FLOATS]
    return "; ".join(some("missing keys", wanted.keys() - found.keys()) +
                     some("unexpected keys", found.keys() - wanted.keys()) + some("mismatched keys", wrong) +
                     some(f"tensors are none of {', '.join(FLOATS)}", odd))


@torch.no_grad()
def is_finite(tensor):
    """Whether a tensor holds neither NaN nor infinity: one pass, 20 times as fast as torch.isfinite(tensor).all()."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(value) for value in torch.stack(torch.aminmax(tensor)).tolist())     # NaN carries through


def check_finite(tensors, where):
    """Raise UserError when one of {name: tensor} holds NaN or infinity. where: their folder or file."""
    if bad := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
        raise UserError(f"{where}: {len(bad)} of its tensors hold NaN or infinity, first {', '.join(sorted(bad)[:5])}")


def local_rows(tensor):
    """(plain tensor, its first row in the whole one); FSDP2 cuts dimension 0 as torch.chunk does. 0-d becomes (1,)."""
    if not isinstance(tensor, DTensor):
        return tensor.view(tensor.shape or (1,)), 0
    rows, mesh = tensor.shape[0], tensor.device_mesh        # its last dimension shards; one before it has copies
    return tensor.to_local(), min(mesh.get_local_rank(mesh.ndim - 1) * -(-rows // mesh.size(mesh.ndim - 1)), rows)


def holders(tensor):
    """Ranks that together hold a sharded tensor, this one among them: all of them, or under HSDP those of a group."""
    mesh = tensor.device_mesh
    return mesh.mesh.tolist() if mesh.ndim == 1 else mesh.mesh[mesh.get_coordinate()[0]].tolist()


def writers(ranks):
    """Which of so many ranks write sharded tensors: at most WRITERS, spread over the nodes."""
    return range(0, ranks, -(-ranks // WRITERS))


@torch.no_grad()
def fill(tensor, whole):
    """Copy a whole tensor, the same on every rank, into a plain tensor or into the shards of one."""
    local, first = local_rows(tensor)
    local.copy_(whole[first:first + len(local)])


@torch.no_grad()
def read_into(tensor, parts):
    """Fill a tensor, plain or sharded, from slice handles joined along dimension 0; the dtype stays the tensor's."""
    local, first = local_rows(tensor)
    at = 0                              # row of the joined tensor where this part begins
    for part in parts:
        rows = part.get_shape()[0]
        start, stop = max(first, at), min(first + len(local), at + rows)
        if start < stop:
            local[start - first:stop - first].copy_(part[start - at:stop - at])
        at += rows


@torch.no_grad()
def read_once(world, tensor, read):
    """read() a tensor's data from files where its first copy is, and send it from there to the other copies.

    Collective. read: fills this rank's part of it. Plain tensors are read by rank 0; of sharded ones every rank reads
    its rows, under HSDP the ranks of the first group. So no file is read twice in a run. world: None, or offloaded
    tensors: every rank reads for itself.
    """
    local, group, first = tensor, None, 0
    if isinstance(tensor, DTensor):
        local, mesh, first = tensor.to_local(), tensor.device_mesh, None
        if mesh.ndim > 1:
            group, first = mesh.get_group(0), int(mesh.mesh[0, mesh.get_coordinate()[1]])
    alone = world is None or world.size == 1 or first is None or local.device.type != world.device.type
    if alone or world.rank == first:
        read()
    if not alone:
        distributed.meet(world)     # a slow disk may take longer than a broadcast's limit
    if not alone and local.numel():
        assert local.is_contiguous(), "a copy would be filled instead"
        dist.broadcast(local.flatten().view(torch.uint8), first, group=group)


def pinned_like(tensor):
    """Page-locked memory for a GPU's tensor, for whose copy the host need not wait; plain where none is left."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def to_host(tensors, stream=None):
    """{name: CPU copy} of {name: tensor}. stream: of a GPU; copies go over it and are there when it has come so far.

    What the current stream does next, such as to change the tensors, waits for that; the host does not.
    """
    if stream is None:
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    here = torch.cuda.current_stream(stream.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        copies = {name: pinned_like(tensor).copy_(tensor, non_blocking=True) for name, tensor in tensors.items()}
    here.wait_stream(stream)
    return copies


@torch.no_grad()
def whole(tensor):
    """A sharded tensor, whole, on every rank that holds a part of it. Collective among holders(tensor).

    DTensor.full_tensor() would end a process now and then: gloo's name of its gather is ALLGATHER_COALESCED. The two
    threads of a gloo group store the name of the collective that each has ended in one std::string, without a lock
    (seen in torch 2.11 and 2.13, ProcessGroupGloo::runLoop), and both may free a name of more than 15 letters, which
    lies on the heap. docs/dropped.md has it. This gather is called ALLGATHER.
    """
    local, mesh = tensor.to_local(), tensor.device_mesh
    parts = mesh.size(mesh.ndim - 1)
    if parts == 1:
        return local
    rows = -(-tensor.shape[0] // parts)     # of every part but the last ones, which are filled up
    part = local.contiguous()
    if len(part) < rows:
        part = local.new_zeros(rows, *local.shape[1:])
        part[:len(local)] = local
    found = local.new_empty(parts * rows, *local.shape[1:])
    all_gather(found, part, group=mesh.get_group(mesh.ndim - 1))
    return found[:tensor.shape[0]]


@torch.no_grad()
def gather_share(world, named, spread=True):
    """(share, owners, stream): whole tensors on the CPU of those this rank has to write, {name: rank that writes it},
    and on a GPU the stream that they come over, which is to be waited for before they are read.

    Collective when tensors are sharded. named: {name: tensor}, the same names on every rank. spread: share sharded
    tensors out evenly over writers(), else rank 0 owns them; plain ones, alike everywhere, are always rank 0's. Of
    several groups that hold a tensor, only the one of its owner gathers it.
    """
    share, owners, load = {}, {}, dict.fromkeys(writers(world.size), 0)
    waiting, gathered = {}, 0
    group = set(next((holders(tensor) for tensor in named.values() if isinstance(tensor, DTensor)), ()))
    stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None

    def fetch():
        share.update(to_host(waiting, stream))
        waiting.clear()
    for name, tensor in named.items():
        owners[name] = 0
        if isinstance(tensor, DTensor):
            if spread:
                owners[name] = min(load, key=load.get)
                load[owners[name]] += tensor.numel()
            if owners[name] not in group:
                continue
            if tensor.device.type != world.device.type:     # offloaded: gathered on the GPU, as gradients are
                tensor = tensor.to(world.device)
            tensor = whole(tensor)
            gathered += tensor.numel() * tensor.element_size()
        if owners[name] == world.rank:
            waiting[name] = tensor.detach().reshape(tensor.shape or (1,)).contiguous()
        if gathered > WINDOW * world.size:      # now all ranks copy their own at the same time, not one after another
            fetch()
            gathered = 0
    fetch()
    return share, owners, stream


def stage(world, stem, named, spread=True, parts=lambda name, tensor: {name: tensor}):
    """Copy tensors off the device: {file name: write(path)} of this rank's files, which training cannot change.

    One file for each rank that owns tensors, with the index that transformers reads when there are several.
    parts: what a file holds of a tensor, {name: tensor}.
    """
    whole, owners, stream = gather_share(world, named, spread)
    copied = stream and stream.record_event()
    share = {name: part for stored, tensor in whole.items() for name, part in parts(stored, tensor).items()}
    used = sorted(set(owners.values()))
    files, writes = {rank: file_name(stem, number, len(used)) for number, rank in enumerate(used)}, {}

    def write(path):
        if copied:      # in a thread of its own, which would wait on GPU 0, and make a context there
            torch.cuda.set_device(world.device)
            copied.synchronize()
        check_finite(share, path.name)      # or rotation would leave nothing but checkpoints that nobody can use
        save(share, path)
    if share:
        writes[files[world.rank]] = write
    if len(files) > 1 and world.is_main:
        size = sum(tensor.numel() * tensor.element_size() for tensor in named.values())
        places = {name: Path(files[owner]).name for stored, owner in owners.items()
                  for name in parts(stored, torch.empty(named[stored].shape, device="meta"))}
        writes[f"{stem}.safetensors.index.json"] = lambda path: write_index(path, places, size)
    return writes


def write_index(path, places, size):
    """The index of several weight files that from_pretrained reads. places: {tensor: file name}."""
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    path.write_text(json.dumps(index, indent=1) + "\n")


def file_name(stem, number, files):
    """model.safetensors, or model-00002-of-00008.safetensors: the names that transformers looks for."""
    return f"{stem}.safetensors" if files == 1 else f"{stem}-{number + 1:05d}-of-{files:05d}.safetensors"


def model_files(folder, flag=""):
    """The weight files of a model's folder. UserError, which begins with flag, without any."""
    if files := files_in(folder, "model"):
        return files
    raise UserError(f"{flag}{folder}: holds no weights (model.safetensors, or "
                    "model-*-of-*.safetensors)")


def files_in(folder, stem):
    """The files of file_name in a folder, whatever their number."""
    return sorted(Path(folder).glob(f"{stem}.safetensors")) or sorted(Path(folder).glob(f"{stem}-*-of-*.safetensors"))
