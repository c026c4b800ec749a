"""Ranks, device, collectives, DDP and FSDP2 wrapping.

One process without torchrun is rank 0 of 1. The default group (NCCL on GPUs) is for gradients;
waits may take hours (encoding audio, slow disks), and NCCL's watchdog would fire.
"""
import contextlib
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
from torch import distributed as dist
from torch.distributed import fsdp as fsdp2
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from core import cli, kernels
from core.cli import plural, require

GRACE_S = 5     # seconds between a rank's error message and the end of the other ranks
MARGIN_S = 30    # added to the limit of a collective, so that the watchdog names the rank first
FAILED = "ranks that have failed"       # key of a counter in the store of a run
# Words of errors that only mean that another rank has ended
COLLECTIVE_ERRORS = ("gloo", "NCCL", "ProcessGroup", "onnection closed", "onnection reset",
                     "Broken pipe", "TCPStore")

_store = None   # that of this process's run, for report_error
disarmed = threading.Event()    # set at the end of a run: from then on no rank waits for another


@dataclass
class World:
    """Rank, device, groups of this process, by default of one that joins no other process. store
    and gloo groups are None in a single process."""
    rank: int = 0           # rank 0 decides, logs and saves
    local_rank: int = 0     # only picks the GPU
    size: int = 1
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device(
        "cuda" if torch.cuda.is_available() else "cpu"))
    store: object = None            # key-value store of the run, used outside of collectives
    slow_group: object = None       # gloo on the CPU, with a long time limit
    save_group: object = None       # the same, for the thread that writes checkpoints
    limit: timedelta = timedelta(seconds=600 + MARGIN_S)     # of gradient collectives

    @property
    def is_main(self):
        return self.rank == 0


def init(timeout_s=600, wait_timeout_s=6 * 3600, fsdp=False, cpu_offload=False):
    """Join the process group that torchrun describes -> World. timeout_s, wait_timeout_s: limits of
    the groups. fsdp: a single process also gets a process group. cpu_offload: collectives also
    take CPU tensors. UserError if ranks outnumber GPUs."""
    global _store
    sys.excepthook = report_error
    world = World(*(int(os.environ.get(name, default)) for name, default in (
        ("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))))
    world.limit = timedelta(seconds=timeout_s + MARGIN_S)
    cuda = world.device.type == "cuda"
    if cuda:
        gpus = torch.cuda.device_count()
        require(world.local_size <= gpus, f"{world.local_size} processes on this node but "
                f"{plural(gpus, 'GPU')}: start torchrun with --nproc_per_node={gpus}")
        world.device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(world.device)
    if world.size > 1:
        store, *_ = next(rendezvous("env://", timeout=world.limit))
        # after a restart torchrun's store still has the keys of the ranks that have died; only on
        # one node is torchrun's count of restarts the same for all ranks
        start = (os.environ.get("TORCHELASTIC_RESTART_COUNT") if world.local_size == world.size
                 else store.add(f"starts/{world.rank}", 1))
        world.store = _store = dist.PrefixStore(str(start), store)
    if world.size > 1 or fsdp:
        backend = "cpu:gloo,cuda:nccl" if cuda and cpu_offload else "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=world.store or dist.HashStore(), rank=world.rank,
                                world_size=world.size, timeout=world.limit,
                                device_id=world.device if cuda else None)
        # again: torch has wrapped it in a hook that prints nothing if ours ends the process
        sys.excepthook = report_error
    if world.size > 1:      # new_group ignores the default group's limit
        limit = timedelta(seconds=wait_timeout_s + MARGIN_S)
        world.slow_group = dist.new_group(backend="gloo", timeout=limit)
        world.save_group = dist.new_group(backend="gloo", timeout=limit)
    return world


def finish():
    """Leave the process group; the last call of a script."""
    if dist.is_initialized():
        time.sleep(0.1)     # a gloo thread that releases its last work needs the GIL once more
        dist.destroy_process_group()


# ---- Failing. The first rank that raises records this in the run's store and prints the error;
# torchrun then asks the other ranks of its node to stop, and the watchdog ends those that wait.


def report_error(kind, error, trace):
    """sys.excepthook: print the error, unless another rank has done so. With a process group it
    ends by os._exit, since a clean exit could wait for lost peers."""
    if not _store or is_cause(error, _store):
        cli.report_error(kind, error, trace)
    sys.stdout.flush()
    for child in multiprocessing.active_children():     # else the exit waits for its work
        child.kill()
    if dist.is_initialized():
        os._exit(130 if kind is KeyboardInterrupt else 1)


def is_cause(error, store):
    """False if this rank's error follows from another rank's, which has been printed."""
    lost_peer = isinstance(error, dist.DistError) or not isinstance(error, cli.UserError) and any(
        word in str(error) for word in COLLECTIVE_ERRORS)
    for _ in range(20 * GRACE_S * lost_peer):       # for 2 * GRACE_S: the other message is better
        if cli.stop_requested():       # by torchrun, which names a rank that was killed
            os._exit(1)
        time.sleep(0.1)
    try:
        return store.add(FAILED, 1) == 1
    except Exception:       # the process that hosts the store has printed its error and ended
        return False


# ---- Collectives. Every rank must call each of them, in the same order.


def rank0(world, function, *args):
    """Call function(*args) on rank 0 and return its (picklable) result on every rank. An error ends
    all ranks. The others wait on the slow group, for at most its limit."""
    result = [function(*args) if world.is_main else None]
    if world.size > 1:
        dist.broadcast_object_list(result, src=0, group=world.slow_group)
    return result[0]


def all_gather(world, value, group=None):
    """The (picklable) values of all ranks as a list in rank order, on every rank, which waits for
    all of them. group: one of gloo, by default the slow one."""
    values = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value, group=group or world.slow_group)
    return values


def all_reduce(world, tensor):
    """Sum a tensor over all ranks, in place; returns it. No host sync."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


# ---- Model


def autocast(device, dtype):
    """Context for a forward pass in a dtype (torch.bfloat16 or float16); None: in fp32."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def set_compute(world, args):
    """Apply --tf32, and make --compile True or False on all ranks. auto: on GPUs. Collective."""
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    wanted = args.compile is True or args.compile == "auto" and world.device.type == "cuda"
    args.compile = all(all_gather(world, wanted and kernels.compiles(world.device.type)))


def compile_layers(layers, **options):
    """torch.compile each layer in place; parameters keep their names. options: of torch.compile."""
    import torch._inductor.config
    # on by default since torch 2.10; with it, gradients of chunked modulations (the DiT's) contain
    # uninitialized memory (pytorch issue 193061; seen on an H200 with 2.11)
    torch._inductor.config.triton.mix_order_reduction = False
    # else graphs are split at DDP's buckets; single layers are too small to gain from that
    torch._dynamo.config.optimize_ddp = False
    # torch's cache key has no vector width: code for 16 floats at a time leaves half of its
    # results unwritten on a machine with 8 that shares the cache (torch 2.13)
    torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()
    for layer in layers:
        layer.compile(**options)


def shard(model, layers, world, bf16=False, reshard_after_forward=True, cpu_offload=False,
          shard_size=0):
    """FSDP2: each of `layers`, then the rest of `model`, becomes a sharded unit; names stay. Call
    it before weights are loaded and the optimizer is built. bf16: compute dtype; weights keep
    theirs. shard_size: under HSDP, the number of neighbouring ranks that share a copy."""
    shape = (world.size // shard_size, shard_size) if shard_size else (world.size,)
    mesh = dist.init_device_mesh(world.device.type, shape,
                                 mesh_dim_names=("replicate", "shard")[-len(shape):])
    for group in mesh.get_all_groups():     # new groups ignore the limit of the default group
        dist.distributed_c10d._set_pg_timeout(world.limit, group)
    offload = fsdp2.CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    unit = partial(fsdp2.fully_shard, mesh=mesh, mp_policy=fsdp2.MixedPrecisionPolicy(
        torch.bfloat16 if bf16 else None, torch.float32, cast_forward_inputs=False),
        offload_policy=offload if cpu_offload else fsdp2.OffloadPolicy())
    for layer in layers:
        unit(layer, reshard_after_forward=reshard_after_forward)
    # the backward pass needs the root again at once
    unit(model, reshard_after_forward=False)


def reshard(model):
    """Free gathered weights, as after a validation: named_parameters() are shards again."""
    model.apply(lambda unit: unit.reshard() if isinstance(unit, fsdp2.FSDPModule) else None)


@contextlib.contextmanager
def gather_weights(module):
    """In this context every rank holds the whole weights of a sharded module, so its forward needs
    no other rank. FSDP2's hooks are off: they would record forwards that the other ranks did not
    run, and the next backward would prefetch layers on this rank alone and hang."""
    with contextlib.ExitStack() as undo:
        undo.callback(reshard, module)
        for unit in module.modules():
            if isinstance(unit, fsdp2.FSDPModule):
                unit.unshard()
                for table in (unit._forward_pre_hooks, unit._forward_hooks):
                    undo.callback(table.update, dict(table))
                    table.clear()
        yield


def wrap_ddp(model, world):
    """DistributedDataParallel for several ranks, the model itself for one. Call only its forward.
    static_graph is off: it fails if the first backward runs under no_sync, as accumulation does."""
    if world.size == 1:
        return model
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp.broadcast_buffers = False       # set here, as the name of the argument has changed
    return ddp


def gradient_sync(model, enabled):
    """Context for a micro-step: gradients are reduced over the ranks only if enabled."""
    if isinstance(model, fsdp2.FSDPModule):
        model.set_requires_gradient_sync(enabled)
    elif isinstance(model, DistributedDataParallel) and not enabled:
        return model.no_sync()
    return contextlib.nullcontext()
