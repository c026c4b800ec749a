"""A GPU that is not there: what a CUDA run would launch, move, keep and wait for, counted without one.

Under FakeTensorMode tensors have shapes, dtypes and a device, but no values; fake_cuda.cpp gives a CPU build of torch
the device that autograd asks for. So the code that runs is the one for CUDA, and a Ledger above it counts each operator
as kernels, bytes and FLOPs, follows the memory of every tensor, and notes each place where the host would wait for the
GPU. A value that is read is 0. What this cannot show: numbers, times, and what torch.compile makes of a function.

start() compiles the device with g++ and starts the script anew with it; until patch() torch.cuda does not show it.
"""
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
import weakref
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.cpp_extension import include_paths
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).resolve().parent.parent
LOADED = "FAKE_CUDA"        # environment: this process has the device
H200 = {"name": "NVIDIA H200", "major": 9, "minor": 0, "total_memory": 143771 * 2**20, "multi_processor_count": 132,
        "warp_size": 32, "L2_cache_size": 60 * 2**20}

MATMUL = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_mm"}
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "resize_",
             "set_", "record_stream", "_local_scalar_dense", "detach", "lift_fresh", "_pin_memory", "is_same_size"}
GATHERS = {"embedding", "index_select", "gather", "index"}      # read what they write, of however large a table
WRITES_ONLY = {"copy_", "zero_", "fill_"}       # their first argument is not read
WAITS = {"nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal", "bincount"}   # sizes of results
CHUNK, BLOCKS, TENSORS = 65536, 320, 30     # of a kernel over lists: values a block, blocks and tensors a launch


# ---------------------------------------------------------------------------------------------------------------------
# The device


def why_not():
    """Why nothing can be rehearsed here, or ""."""
    if torch.version.cuda or torch.version.hip:
        return "this torch has CUDA itself; the rehearsal needs a CPU build"
    return "" if shutil.which("g++") else "there is no C++ compiler (g++)"


def environment(folder):
    """Compile the device into a folder -> {variable: value} for a process that has it."""
    library, at = f"{folder}/fake_cuda.so", Path(torch.__file__).parent / "lib"
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-std=c++20", *(f"-I{path}" for path in include_paths()),
                    str(Path(__file__).with_suffix(".cpp")), "-o", library, f"-L{at}", "-ltorch_cpu", "-lc10",
                    f"-Wl,-rpath,{at}"], check=True)
    return {"LD_PRELOAD": library, LOADED: "1"}


def start():
    """Go on as a process with the device: the first call starts this script anew. Call before the long imports."""
    if os.environ.pop(LOADED, None):
        return os.environ.pop("LD_PRELOAD")        # not for the processes that this one starts
    with tempfile.TemporaryDirectory() as folder:
        there = environment(folder)
        sys.stdout.flush()
        sys.exit(subprocess.run([sys.executable, *sys.orig_argv[1:]], env=os.environ | there).returncode)


class Stream:
    """torch.cuda.Stream. Nothing runs: `given` counts what it was asked to run, and `known` how much of each other
    stream is done before what comes next. The host is one, too.
    """
    device, device_index, device_type, stream_id, cuda_stream = torch.device("cuda", 0), 0, 1, 0, 0

    def __init__(self, *_, **__):
        self.given, self.known = 0, Counter()

    def learn(self, mark):
        self.known |= mark

    def mark(self):
        """What is done as soon as all that the stream was given so far is."""
        return self.known | Counter({self: self.given})

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.learn(event.mark)

    def wait_stream(self, other):
        self.learn(other.mark())

    def query(self):
        return True

    def synchronize(self):
        waits("synchronize")
        HOST.learn(self.mark())


class Event:
    """torch.cuda.Event: a Stream.mark."""

    def __init__(self, *_, **__):
        self.mark = Counter()

    def record(self, stream=None):
        self.mark = (stream or current[0]).mark()

    def wait(self, stream=None):
        (stream or current[0]).wait_event(self)

    def query(self):
        return True

    def synchronize(self):
        waits("synchronize")
        HOST.learn(self.mark)


HOST, MAIN = Stream(), Stream()
current = [MAIN]            # the stream that runs what comes


@contextlib.contextmanager
def on_stream(stream):
    """torch.cuda.stream."""
    before, current[0] = current[0], stream or current[0]
    try:
        yield
    finally:
        current[0] = before


def patch():
    """Give torch.cuda's Python side the device: one H200."""
    import torch._dynamo  # noqa: F401  (keeps a table of torch.cuda's functions, and would not find these in it)

    cuda, gpu = torch.cuda, types.SimpleNamespace(**H200)

    def nothing(*_, **__):
        pass
    found = {"is_available": True, "is_initialized": True, "_is_in_bad_fork": False, "device_count": 1,
             "current_device": 0, "get_device_name": gpu.name, "get_device_capability": (9, 0),
             "get_device_properties": gpu, "mem_get_info": (gpu.total_memory, gpu.total_memory),
             "is_bf16_supported": True, "is_current_stream_capturing": False, "default_stream": MAIN,
             "max_memory_allocated": 0}
    for name, value in found.items():
        setattr(cuda, name, lambda *_, value=value, **__: value)
    for name in ("set_device", "reset_peak_memory_stats", "empty_cache", "manual_seed", "manual_seed_all",
                 "set_rng_state", "_lazy_init"):
        setattr(cuda, name, nothing)
    cuda.synchronize = lambda *_: waits("torch.cuda.synchronize")
    cuda.Stream, cuda.Event, cuda.stream, cuda.current_stream = Stream, Event, on_stream, lambda *_: current[0]
    cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.Tensor.record_stream = nothing
    fake_tensor.init_gpu_context = nothing
    _foreach_supported_types.append(fake_tensor.FakeTensor)     # else torch.nn.utils goes tensor by tensor

    resize, to_list, pin = torch.UntypedStorage.resize_, torch.Tensor.tolist, torch.Tensor.pin_memory

    def resized(storage, size):
        resize(storage, size)
        if LEDGER:
            LEDGER.measure(storage)
        return storage

    def listed(tensor):
        if not isinstance(tensor, fake_tensor.FakeTensor):
            return to_list(tensor)
        if tensor.is_cuda:
            waits("tolist")
        return torch._C._TensorBase.tolist(real_zeros(tensor))

    def pinned(tensor, *_):
        if not LEDGER:
            return pin(tensor)
        copy = tensor.clone()
        LEDGER.pinned.add(copy.untyped_storage()._cdata)
        return copy
    torch.UntypedStorage.resize_, torch.Tensor.tolist, torch.Tensor.pin_memory = resized, listed, pinned


def real_zeros(tensor):
    """A tensor of the same shape with values, all 0."""
    with outside():
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)


def outside():
    """Context in which tensors on the CPU are real: for what reads files and makes batches."""
    return torch.utils._python_dispatch._disable_current_modes()


# ---------------------------------------------------------------------------------------------------------------------
# What is counted

LEDGER = None       # of the rehearsal that runs


def waits(what):
    """Note that the host waits for the GPU here."""
    if LEDGER and LEDGER.counting:
        LEDGER.syncs[f"{what} at {place()}"] += 1


def place():
    """file:line of the project's code that runs now."""
    own = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT))
           and not any(word in frame.filename for word in ("/bench/", "/site-packages/"))]     # .venv is in ROOT, too
    return f"{Path(own[-1].filename).relative_to(ROOT)}:{own[-1].lineno} {own[-1].name}" if own else "?"


def size_of(tensor):
    """Bytes that reading it once moves; what is expanded is there once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def kind_of(name, space="aten"):
    """matmul, attention, optimizer, communication or elementwise."""
    if space in ("c10d", "_c10d_functional"):
        return "communication"
    if name in MATMUL:
        return "matmul"
    if "attention" in name or "attn" in name:
        return "attention"
    return "optimizer" if name.startswith(("_foreach", "_fused_adam")) else "elementwise"


class Row(NamedTuple):
    """One call of an operator on the GPU."""
    kind: str           # of kind_of
    name: str
    launches: int       # kernels
    size: int           # bytes read and written
    flops: int          # of matrix products
    shapes: tuple       # of the first tensors


class Ledger(TorchDispatchMode):
    """Counts what goes to the GPU while `counting`; follows memory all the time."""

    def __init__(self):
        super().__init__()
        self.counting, self.hidden = False, False
        self.rows = []          # of Row
        self.syncs, self.pinned = Counter(), set()
        self.hazards = Counter()        # copies to the host that nothing keeps in order
        self.leaving, self.copies = Counter(), {}       # Stream.mark of all of them, and {storage: of its last one}
        self.held, self.live, self.peak = {}, 0, 0      # {storage: its bytes}

    def begin(self):
        """Count from here on."""
        self.rows, self.syncs, self.peak, self.counting = [], Counter(), self.live, True

    def hold(self, tensor):
        """Follow the memory of a tensor on the GPU."""
        if tensor.is_cuda and not isinstance(tensor, DTensor):
            self.measure(tensor.untyped_storage(), new=True)

    def measure(self, storage, new=False):
        key = storage._cdata
        if new == (key in self.held):       # known already, or not on the GPU
            return
        if new:
            weakref.finalize(storage, self.free, key)
        size = -(-storage.nbytes() // 512) * 512        # as torch's allocator rounds
        self.live += size - self.held.get(key, 0)
        self.held[key], self.peak = size, max(self.peak, self.live)

    def free(self, key):
        self.live -= self.held.pop(key, 0)

    def one_kernel(self, name, function, *args):
        """function(*args) as if it were compiled to a single kernel that keeps nothing in between."""
        with self.aside():
            out = function(*args)
        for tensor in tree_iter(out):
            self.hold(tensor)
        tensors = [t for t in tree_iter((args, out)) if isinstance(t, torch.Tensor)]
        self.note("elementwise", name, 1, sum(map(size_of, tensors)), 0, tensors[:3])
        return out

    @contextlib.contextmanager
    def aside(self):
        self.hidden, before = True, self.hidden
        yield
        self.hidden = before

    def note(self, kind, name, launches, size, flops, tensors):
        if self.counting and not self.hidden:
            self.rows.append(Row(kind, name, launches, size, flops, tuple(tuple(t.shape) for t in tensors)))

    def __torch_dispatch__(self, op, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        space, _, name = op.name().partition("::")
        name = name.partition(".")[0]
        ins = list({id(t): t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}.values())
        on_gpu = any(t.is_cuda for t in ins)
        if op is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], fake_tensor.FakeTensor):
            if on_gpu:
                waits("item")
            return {torch.bool: False}.get(args[0].dtype, 0.0 if args[0].is_floating_point() else 0)
        if on_gpu and (name in WAITS or name in ("index", "index_put_") and any(
                t.dtype in (torch.bool, torch.uint8) for t in ins[1:])):
            waits(name)
        if on_gpu:
            self.given(args[0] if name == "copy_" and not args[0].is_cuda else None)
        out = op(*args, **kwargs)
        outs = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
        if kwargs.get("pin_memory"):
            self.pinned.add(out.untyped_storage()._cdata)
        if not on_gpu and not any(t.is_cuda for t in outs):
            return out
        if not self.hidden:
            for tensor in outs:
                self.hold(tensor)
        if name in ("_to_copy", "copy_"):
            self.copied(name, args, kwargs, out)
        if not self.counting or self.hidden or name in NO_KERNEL or space == "prim":
            return out
        arguments = list(zip(op._schema.arguments, args))
        # not those of FSDP2's copies, which belong to communication
        arguments += [(about, kwargs[about.name]) for about in op._schema.arguments
                      if about.name in kwargs and space != "fsdp"]
        written = [t for about, value in arguments if about.alias_info and about.alias_info.is_write
                   for t in tree_iter(value) if isinstance(t, torch.Tensor)]
        if not written and any(about.alias_info for about in op._schema.arguments):     # a view
            return out
        new = [t for t in outs if not any(t is other for other in written)]
        read = [t for t in ins if t is not kwargs.get("out")][name in WRITES_ONLY:]
        read = new if name in GATHERS else read[-1:] if name == "index_copy_" else read
        written = read if name == "index_copy_" else written        # so many rows of it
        size = sum(size_of(t) for t in (*read, *written, *new) if t.is_cuda)
        launches, flops = 1, 0
        if name.startswith(("_foreach", "_fused_adam")):
            tensors = [t for t in tree_iter(args[0])]
            launches = max(1, -(-len(tensors) // TENSORS), -(-sum(t.numel() for t in tensors) // (CHUNK * BLOCKS)))
        if name in MATMUL:      # torch knows no formula of addmm_, which is that of addmm
            packet = torch.ops.aten.addmm if name == "addmm_" else op._overloadpacket
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
        self.note(kind_of(name, space), name, launches, size, flops, ins[:3])
        return out

    def given(self, host):
        """Note what the current stream is given: a copy to a tensor `host`, or anything else. What it breaks, too."""
        stream = current[0]
        stream.given += 1
        if stream is MAIN:
            if not self.leaving <= MAIN.known:
                self.hazards[f"what is being copied may change, at {place()}"] += 1
        elif host is not None:
            if stream.known[MAIN] < MAIN.given:
                self.hazards[f"what is copied may not be there yet, at {place()}"] += 1
            self.copies[host.untyped_storage()._cdata] = mark = Counter({stream: stream.given})
            self.leaving |= mark

    def read(self, tensor):
        """The host reads a tensor that came over a stream -> its bytes in pinned memory."""
        key = tensor.untyped_storage()._cdata
        if not self.copies.get(key, self.leaving) <= HOST.known:
            self.hazards["a copy is read before it is there"] += 1
        return (key in self.pinned) * tensor.numel() * tensor.element_size()

    def copied(self, name, args, kwargs, out):
        """Note a copy between host and GPU that the host waits for."""
        to, source = (args[0], args[1]) if name == "copy_" else (out, args[0])
        if to.device.type == source.device.type:
            return
        late = kwargs.get("non_blocking") or name == "copy_" and len(args) > 2 and args[2]
        host = source if to.is_cuda else to
        if not late or host.untyped_storage()._cdata not in self.pinned:
            waits(f"{'blocking' if not late else 'unpinned'} copy {'to' if to.is_cuda else 'from'} the GPU")


@contextlib.contextmanager
def rehearsal():
    """Context in which all tensors are fake -> Ledger."""
    global LEDGER
    ledger = LEDGER = Ledger()
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), ledger:
            yield ledger
    finally:
        LEDGER = None
