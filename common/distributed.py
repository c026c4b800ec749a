"""Process group, ranks, DDP and FSDP2 wrapping, and failing together with one clear line.

Global rank decides samplers, logs, validation and saves; local rank picks the GPU and nothing else. Without torchrun
everything here works for one process; it then has a process group only where FSDP2 needs one. Two groups exist: the
default one (NCCL on GPUs) for gradients, and a gloo group on the CPU with a long time limit for waits that may honestly
take hours (encoding audio, validation on rank 0), where an NCCL watchdog would fire.
"""
import contextlib
import errno
import gc
import inspect
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from common.flags import UserError
from core.cli import problem_text  # noqa: F401
from core.lifetime import stop_requested
from common.text import counted, error_text, print_error, printable

GRACE_S = 5     # seconds between a rank's error message and the end of the other ranks
# How a run fails: a rank says why, notes in the store that it has failed, and ends; torchrun ends the
# other ranks of its node. Ranks that only lost the failed one wait for that, and say nothing when
# the store has the note. Their watchdogs end them where torchrun cannot: a main thread that waits in
# a collective takes no signal.
COLLECTIVE_ERRORS = ("gloo", "NCCL", "ProcessGroup", "onnection closed", "onnection reset", "Broken pipe", "TCPStore")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
SHARED = "/dev/shm"     # where processes of a node share memory
LATER_S = 30    # a collective may outlive its time limit by this, so that the watchdog can name who hangs
FAILED = "ranks that have failed"       # key in the store: a counter

_world = None   # this process's World, for the error message


@dataclass
class World:
    """Who this process is. store and slow_group are None in a single process."""
    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    device: object = "cpu"          # torch.device
    store: object = None            # key-value store of the run: progress counters and claims without collectives
    slow_group: object = None       # gloo, CPU, long time limit
    limit: timedelta = timedelta(seconds=600 + LATER_S)     # of a gradient collective

    @property
    def is_main(self):
        return self.rank == 0


def init(timeout_s=600, slow_timeout_s=6 * 3600, alone_too=False, cpu_too=False, device=None):
    """Join the process group that torchrun describes; returns World.

    timeout_s: limit of one gradient collective. slow_timeout_s: limit of a wait on the slow group. device: "cpu" or
    "cuda", default CUDA when there is one. alone_too: a process group for a single process as well, which FSDP2 needs.
    cpu_too: collectives on CPU tensors beside the GPU's, which CPU offload needs. Raises UserError when more processes
    than GPUs were started on this node, or torchrun restarted workers on a used store.
    """
    global _world
    env = os.environ
    size, rank = int(env.get("WORLD_SIZE", 1)), int(env.get("RANK", 0))
    local_rank, local_size = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
    use_cuda = torch.cuda.is_available() if device is None else device == "cuda"
    if use_cuda:
        if local_size > torch.cuda.device_count():
            raise UserError(f"{local_size} processes on this node but {counted(torch.cuda.device_count(), 'GPU')}: "
                            f"start torchrun with --nproc_per_node={torch.cuda.device_count()}")
        torch.cuda.set_device(local_rank)
    where = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    limit = timedelta(seconds=timeout_s + LATER_S)
    _world = world = World(rank, local_rank, size, local_size, where, limit=limit)
    if env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError("torchrun --max-restarts: the workers that died left their keys in torchrun's store; "
                        "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    if size > 1:
        world.store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s)))
    if size > 1 or alone_too:
        backend = "nccl" if use_cuda else "gloo"
        if use_cuda and cpu_too:
            backend = "cpu:gloo,cuda:nccl"
        store = dist.PrefixStore("trainer", world.store) if world.store is not None else dist.HashStore()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                                timeout=limit, device_id=where if use_cuda else None)
    if size > 1:        # new_group ignores the default group's limit, so it is given again
        world.slow_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=slow_timeout_s + LATER_S))
    return world


def check_bf16(device, wanted):
    """Raise UserError when bfloat16 is wanted and this GPU has none."""
    if wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(f"--bf16: {torch.cuda.get_device_name(device)} has no bfloat16; give --fp16, or drop "
                        "the flag")


def finish():
    """Leave the process group; harmless when there is none."""
    if dist.is_initialized():
        time.sleep(0.1)     # a gloo thread still dropping its last work needs the GIL, which the next line never yields
        dist.destroy_process_group()


def seed_everything(seed, rank=0):
    """Seed python, numpy and torch. The same seed on all ranks builds equal weights; add the rank before dropout."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


@contextlib.contextmanager
def one_clear_error():
    """Run a trainer's main: UserError becomes its text and status 1; anything else one traceback
    that names the rank. Ranks whose collectives break because of another one print nothing.
    """
    if not gc.isenabled():      # since flags.parse
        gc.freeze()     # what was imported stays: no collection looks at it, forks share its pages
        gc.enable()
    rank = int(os.environ.get("RANK", "0"))
    try:
        yield
    except UserError as error:
        stop(error)
    except KeyboardInterrupt:
        if first_to_fail(_world and _world.store):      # the others need not say that this one is gone
            print_error("interrupted")
        leave(130)
    except Exception as error:
        _ignore_loaders()
        if lacking := what_is_lacking(error):
            stop(lacking)
        broken = isinstance(error, dist.DistError) or any(
            word in str(error) for word in COLLECTIVE_ERRORS)
        if broken:      # a peer is gone: its own message, torchrun's or the watchdog's says more
            if stop_requested():        # torchrun has asked already
                leave(1)
            _give_way(2 * GRACE_S)
        if first_to_fail(_world and _world.store, store_gone=not broken):
            print_error(error_text(f"rank {rank} failed:\n{traceback.format_exc()}", 400),
                        f"rank {rank} failed: {type(error).__name__}: {printable(error)}")
        leave(1)


def what_is_lacking(error):
    """One line that names the disk, memory, limit, file or right that an error is due to, or None.
    An error in a loader process comes with its text, but without its number.
    """
    text, number = str(error), getattr(error, "errno", None)
    words = ("Too many open files", "ancillary data")
    if number in (errno.EMFILE, errno.ENFILE) or any(part in text for part in words):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (f"too many open files: a process may have {limit} here (ulimit -n); raise that, as "
                "with ulimit -n 4096, or give fewer --num_workers")
    # a semaphore; torch < 2.13 names an older error behind what it cannot allocate
    nameless = number == errno.ENOSPC and error.filename is None and not (
        os.path.isdir(SHARED) and shutil.disk_usage(SHARED).free)
    full = "unable to allocate shared memory" in text
    if nameless or full or "shared memory" in text and "No space left" in text:
        return (f"{SHARED} is full: processes that load data hand it over there; make it larger, as "
                "with docker run --shm-size=8g, or do without them (--num_workers 0, "
                "--preprocess_num_proc 0)")
    if "AF_UNIX path too long" in text:         # which holds 107 letters
        return (f"{tempfile.gettempdir()}: too long a path for the sockets of processes; set TMPDIR "
                "to a shorter one")
    # of a renaming, the second name is the one that people know
    name = getattr(error, "filename2", None) or getattr(error, "filename", None)
    file = name or "a file of this run"
    if number in FULL:
        return f"{file} cannot be written ({error.strerror})"
    if isinstance(error, PermissionError):      # says nothing about what is in the file
        return (f"{file}: {error.strerror}: this user may not read or write it; its owner can allow "
                "it (chmod)")
    if isinstance(error, IsADirectoryError):
        return f"{file} is a folder, not a file; move it away"
    if number and name or number in (errno.EIO, errno.ESTALE):      # the disk does not answer
        return f"{file} cannot be read or written ({error.strerror})"
    return None


@contextlib.contextmanager
def naming(path):
    """An OSError in this context is about `path`. Most come without a name, that of a full disk,
    say; others have that of a temporary file.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:     # numpy's: so many requested, so many written
            raise UserError(f"{path} cannot be written ({error})")
        error.filename, error.filename2 = str(path), None
        raise


def first_to_fail(store, store_gone=False):
    """Note in the store (World.store) that this rank has failed; True when it is the first, and so
    has to say why. store_gone: the answer where the store has ended with its host, which says why.
    """
    if store is None:
        return True
    try:
        return store.add(FAILED, 1) == 1
    except Exception:       # its host is gone
        return store_gone


def stop(message):
    """End this process with one line. Mostly all ranks come here alike: rank 0 prints it."""
    _ignore_loaders()
    if int(os.environ.get("RANK", "0")) != 0:
        _give_way()
    if first_to_fail(_world and _world.store):
        print_error(error_text(f"error: {message}"))
    leave(getattr(message, "status", 1))


def leave(status):
    """End the process at once: a clean interpreter exit could wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        os._exit(status)
    if children := multiprocessing.active_children():       # loaders: the exit would wait for them, who ignore SIGTERM
        _ignore_loaders()
        for child in children:
            child.kill()
    sys.exit(status)


def _ignore_loaders():
    """The end of a loader process raises nothing any more: torch's SIGCHLD handler would, amid an ending.

    Nor is anything printed of loaders that could not be made whole, which cannot be deleted.
    """
    sys.unraisablehook = lambda found: None
    for _ in range(2):      # the first call may raise what has come already
        with contextlib.suppress(Exception):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def leave_silently():
    """End a process that another one's error stops, after giving that one the time to say why."""
    _give_way()
    leave(1)


def _give_way(seconds=GRACE_S):
    """Wait for torchrun, which ends this rank by SIGTERM when another one has failed."""
    with contextlib.suppress(ValueError):       # only a main thread may
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(Exception):        # of torch, when a loader process ends meanwhile
            time.sleep(left)


def rank0_first(world, work, *args):
    """Rank 0 runs work(*args); every rank gets its (picklable) result. A failure on rank 0 ends all ranks.

    The others wait on the slow group, so the work may take as long as that group's time limit.
    """
    result, error = None, None
    if world.is_main:
        try:
            result = work(*args)
        except Exception as caught:     # handed on, not swallowed: re-raised below once every rank knows
            error = caught
    if world.size > 1:
        box = [(result, error is not None)]
        dist.broadcast_object_list(box, src=0, group=world.slow_group)
        result, failed = box[0]
        if failed and not world.is_main:
            leave_silently()
    if error is not None:
        raise error
    return result


def tree(rank, size):
    """(parent, children) of a rank in a binomial tree over all ranks; rank 0 has none above it, None.

    Nobody has more than log2(size) children, and no way to rank 0 is longer.
    """
    children = []
    while not rank >> len(children) & 1 and rank + (1 << len(children)) < size:
        children.append(rank + (1 << len(children)))
    return (rank & rank - 1 if rank else None), children


def gather_on_main(world, value):
    """Every rank's (picklable) value as a list in rank order on rank 0, None elsewhere; over the slow group, up the
    tree, so that no rank takes in a message of each other one.
    """
    found, box = {world.rank: value}, [None]
    parent, children = tree(world.rank, world.size)
    for child in children:
        dist.recv_object_list(box, child, group=world.slow_group)
        found |= box[0]
    if parent is not None:
        return dist.send_object_list([found], parent, group=world.slow_group)
    return [found[rank] for rank in range(world.size)]


def meet(world):
    """Wait for all ranks on the slow group, before a collective whose limit one rank's disk may exceed."""
    if world.slow_group is not None:
        dist.barrier(group=world.slow_group)


def gather_objects(world, value):
    """Every rank's (picklable) value as a list in rank order, on every rank; over the slow group."""
    box = [gather_on_main(world, value)]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0, group=world.slow_group)      # down a tree
    return box[0]


def all_ranks_ok(world, problems):
    """Collect each rank's list of problem lines. Any at all: rank 0 raises UserError with them, the others leave."""
    lines = list(dict.fromkeys(line for rank_lines in gather_objects(world, problems) for line in rank_lines))
    if lines:
        if not world.is_main:
            leave_silently()
        raise UserError(problem_text(lines))


def all_sum(world, tensor):
    """Sum a tensor over all ranks, in place; returns it."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def largest(world, number):
    """0-d float tensor on the device: the largest of all ranks' numbers. No host sync."""
    found = torch.full((), float(number), device=world.device)
    if world.size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


def compile_layers(layers, **options):
    """torch.compile each layer in place; parameters keep their names. options: of torch.compile.

    torch keeps compiled graphs in a folder and finds them again by a key that lacks the processor's vector width. What
    was generated for 16 floats at a time would be built for 8 and leave half of its results unwritten (torch 2.13,
    after a change of ATEN_CPU_CAPABILITY or in a folder that unlike machines share), so the key gets it here.
    """
    import torch._inductor.config
    # on by default since torch 2.10; gradients of chunked modulations (the DiT's) come back with
    # memory that nothing was written to (pytorch issue 193061; seen on an H200 with 2.11)
    torch._inductor.config.triton.mix_order_reduction = False
    # else each layer is cut where DDP's buckets end, which a layer is too small to gain from
    torch._dynamo.config.optimize_ddp = False
    tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    torch.compiler.config.cache_key_tag = f"{tag} {torch.backends.cpu.get_cpu_capability()}".strip()
    for layer in layers:
        layer.compile(**options)


def shard(module, layers, world, bf16=False, reshard_after_forward=True, cpu_offload=False, size=0, reduce="fp32"):
    """FSDP2: each of `layers`, then what is left of `module`, becomes one sharded unit; in place, names stay.

    Before weights are loaded and before an optimizer is built. bf16: computes in bfloat16; weights are kept as they are
    stored. reshard_after_forward: free each layer's weights between forward and backward. cpu_offload: shards,
    gradients and optimizer live in host memory. size: HSDP, so many neighbouring ranks share the shards of a model, and
    groups of them have copies, whose gradients are summed; 0: all ranks share one. reduce: fp32 or bf16, in which
    gradients are summed. Every rank must build `module` alike: nothing is broadcast.
    """
    shape, on_gpu = (world.size // size, size) if size else (world.size,), world.device.type == "cuda"
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape):])
    # groups inside a mesh have 10 minutes, whatever the default group has
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(world.limit, group)
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy()
    options = {"mesh": mesh, "offload_policy": offload, "mp_policy": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, cast_forward_inputs=False,
        reduce_dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[reduce])}
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(module, reshard_after_forward=False, **options)     # needed again at once, by the backward


def reshard(module):
    """Free gathered weights, so that named_parameters() are the shards that the optimizer updates.

    A forward pass without a backward, as in validation, leaves them gathered where reshard_after_forward is off.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def wrap_ddp(module, world):
    """DistributedDataParallel for several ranks, the module itself for one. Call its forward only, never the inside.

    No static_graph: it asserts when the first backward runs under no_sync, which gradient accumulation needs.
    """
    if world.size == 1:
        return module
    options = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"     # < 2.13
    return DistributedDataParallel(module, device_ids=[world.device.index] if world.device.type == "cuda" else None,
                                   gradient_as_bucket_view=True, **{sync_buffers: False})


def gradient_sync(module, on):
    """Context for one micro-step: gradients are summed over the ranks only when `on` (the last micro-step)."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(on)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if on or not isinstance(module, DistributedDataParallel) else module.no_sync()
