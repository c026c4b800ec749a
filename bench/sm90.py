"""What torch.compile makes for an H100 or H200, seen without one: Triton kernels, PTX, registers.

On fake CUDA tensors (fake_cuda.py) dynamo and AOTAutograd trace what a GPU would be given, Inductor
writes Triton, and Triton's compiler turns it into code for sm_90, which needs no driver. Left out:
constant folding and the pattern matcher (both allocate on the GPU), autotuning (one configuration a
kernel), and everything about time.

    patch()                             # in a process that has the device, before the imports of ours
    with fake(): function(*fake_tensors)
    for graph in GRAPHS: ...            # what torch.compile was given since, and made of it
"""
import contextlib
import copy
import os
import re
import types
from collections import Counter
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import fake_cuda

LIMITS = {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048,
          "max_threads_per_block": 1024, "shared_memory_per_block_optin": 232448,
          "shared_memory_per_multiprocessor": 233472, "gcnArchName": "", "is_integrated": 0}
GRAPHS = []     # Graph of each compilation
MODE = []       # the FakeTensorMode that is on


class Graph(NamedTuple):
    """One graph of Inductor."""
    direction: str      # "forward" or "backward"
    source: str         # Python with Triton kernels in it
    moved: int          # bytes that its fused kernels read and write, by Inductor's own count

    def kernels(self):
        """[(name, Triton source)]"""
        return re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)",
                          self.source, re.S)


class Code(NamedTuple):
    """One kernel as a GPU would run it."""
    accesses: Counter   # of global memory by width: {"v4.b32": 3, "b16": 24}; v4.b32 is 16 bytes
    divisions: int      # of integers, at run time
    registers: int
    spilled: int        # bytes a thread


def why_not():
    """Why nothing can be compiled here, or ""."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "needs the package triton, whose compiler needs no GPU (pip install triton)"
    return fake_cuda.why_not()


class Driver:
    """What Triton asks of a GPU's driver when it compiles."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_current_device(self):
        return 0

    def get_current_stream(self, *_):
        return 0

    def get_device_interface(self):
        return torch.cuda

    def get_benchmarker(self):
        return lambda *_, **__: 0.0

    @staticmethod
    def is_active():
        return True


def patch():
    """Make torch.compile take the fake device for an H200, and only note what it would run there."""
    fake_cuda.patch()
    os.environ.pop("LD_PRELOAD", None)      # of the device: half a second for each start of ptxas
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.post_grad as post_grad
    import torch._inductor.runtime.triton_helpers as triton_helpers
    import torch.utils._triton
    import triton
    from torch._dynamo.device_interface import CudaInterface
    gpu = types.SimpleNamespace(**fake_cuda.H200, **LIMITS)
    for owner in (CudaInterface, CudaInterface.Worker):
        owner.get_device_properties = staticmethod(lambda *_: gpu)
        owner.current_device = staticmethod(lambda: 0)
    torch.cuda.get_device_properties = lambda *_: gpu
    CudaInterface.device_count = staticmethod(lambda: 1)
    for name in ("exchange_device", "maybe_exchange_device"):
        setattr(CudaInterface, name, staticmethod(lambda *_: 0))
        setattr(torch.cuda, f"_{name}", lambda *_: 0)
    torch.utils._triton.has_triton = lambda: True
    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    joint_graph.lazy_init = post_grad.lazy_init = lambda *_, **__: None
    torch._inductor.config.joint_graph_constant_folding = False
    whole = compile_fx.compile_fx

    def noted(graph, inputs, **more):
        return whole(graph, inputs, **more | {"inner_compile": inner_compile})
    compile_fx.compile_fx = noted


@contextlib.contextmanager
def fake():
    """Tensors made in here have no values; device "cuda" is the fake one."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        MODE.append(mode)
        yield
        MODE.pop()


def inner_compile(module, inputs, **about):
    """Inductor's own steps to code; what comes back runs the graph on fake tensors."""
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    traced = copy.deepcopy(module)
    backward, inference = about.get("is_backward", False), about.get("is_inference", False)
    compile_fx.view_to_reshape(module)
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(module, inputs)
    compile_fx._recursive_record_original_output_strides(module)
    with V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(module, is_inference=inference)
    graph = GraphLowering(module, example_inputs=inputs, shape_env=mode.shape_env,
                          is_backward=backward, is_inference=inference)
    with V.set_fake_mode(mode), V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
        graph.run(*inputs)
        source = graph.codegen()[0]
        moved = sum(node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes
                    if not node.is_extern() and not node.is_template())     # FlexAttention is one
    direction = "backward" if backward else "forward"
    GRAPHS.append(Graph(direction, getattr(source, "value", str(source)), int(moved)))

    def run(*given):
        if len(given) == 1 and isinstance(given[0], (list, tuple)):
            given = given[0]
        with torch._guards.detect_fake_mode(given) or MODE[-1]:
            return traced(*given)
    return run


def assembled(name, source, arch=90):
    """Code of a Triton kernel for sm_90 or another, in its first configuration."""
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel = getattr(PyCodeCache.load(source), name)
    config, meta, arguments = kernel.configs[0], kernel.triton_meta, kernel.fn.arg_names
    kinds = {argument: meta["signature"].get(argument, "constexpr") for argument in arguments}
    kinds |= dict.fromkeys(config.kwargs, "constexpr")
    constants = {key if isinstance(key, tuple) else (arguments.index(key),): value
                 for key, value in (meta["constants"] | config.kwargs).items()}
    given = ASTSource(fn=kernel.fn, signature=kinds, constexprs=constants, attrs=meta["configs"][0])
    made = triton.compile(given, target=GPUTarget("cuda", arch, 32), options={
        "num_warps": config.num_warps, "num_stages": config.num_stages})
    ptx = made.asm["ptx"]
    widths = re.findall(r"(?:ld|st)\.global(?:\.L1::evict\w+)*(?:\.L2::\w+)*\.([.\w]+)", ptx)
    divisions = len(re.findall(r"\b(?:div|rem)\.[su](?:32|64)", ptx))
    registers, spilled = resources(made.asm["cubin"])
    return Code(Counter(widths), divisions, registers, spilled)


def resources(cubin):
    """(registers, bytes of stack a thread) of a kernel's binary: REGCOUNT and FRAME_SIZE.

    Both are attributes in its .nv.info: format 4, the attribute's number, its size of 8 as 16 bits,
    then the kernel's number and the value as 32 bits each. cuobjdump says the same in half a second.
    """
    found = (re.search(rb"\x04" + attribute + rb"\x08\0.{4}(.{4})", cubin, re.S)
             for attribute in (b"\x2f", b"\x11"))
    return tuple(int.from_bytes(value[1], "little") for value in found)
