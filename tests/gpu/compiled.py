"""Compile our kernels for an H100 without a GPU and print JSON lines for test_kernels.py.

Dynamo traces fake CUDA tensors, Inductor writes Triton, and Triton's compiler turns that into code for sm_90, without
a driver. Constant folding, autotuning and time are left out.
"""
import copy
import json
import re
import sys
import types
from collections import Counter
from pathlib import Path

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.fx_passes.post_grad as post_grad
import torch._inductor.runtime.triton_helpers as triton_helpers
import torch._inductor.scheduler as scheduler
import torch.utils._triton
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import counters
from torch._inductor.codecache import PyCodeCache
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from diffusion import dit

SM90 = GPUTarget("cuda", 90, 32)
H100 = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132,
    warp_size=32, L2_cache_size=50 * 2**20, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, is_integrated=0)
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
SOURCES = []    # Python with Triton kernels of each compiled graph
ROWS = (8192, 8064, 5120)       # tokens of three packs
WIDTH, WORDS = 8192, 50304


class Driver:
    """A GPU driver for Triton's compiler."""
    is_active = staticmethod(lambda: True)
    get_current_target = staticmethod(lambda: SM90)
    get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda *_: 0)
    get_device_interface = staticmethod(lambda: torch.cuda)


def inner_compile(module, inputs, **_):
    """Inductor's steps up to code generation for a GPU; the returned function runs the graph on fake CPU tensors,
    since a torch without CUDA has no autograd on others."""
    traced = copy.deepcopy(module)
    with torch._guards.detect_fake_mode(inputs):
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0")
                  if isinstance(x, torch.Tensor) else x for x in inputs]
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = node.kwargs | {"device": torch.device("cuda:0")}
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(module, inputs)
    compile_fx._recursive_record_original_output_strides(module)
    with V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(module, is_inference=True)
    graph = GraphLowering(module, example_inputs=inputs, shape_env=mode.shape_env)
    with V.set_fake_mode(mode), V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
        graph.run(*inputs)
        source = graph.codegen()[0]
    SOURCES.append(getattr(source, "value", str(source)))

    def run(*args):
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = args[0]
        with torch._guards.detect_fake_mode(args) or FAKE:
            return traced(*args)
    return run


def patch():
    """Make torch.compile assume an H100, and keep the code that it writes."""
    for owner in (CudaInterface, CudaInterface.Worker):
        owner.get_device_properties = staticmethod(lambda *_: H100)
        owner.current_device = staticmethod(lambda: 0)
    CudaInterface.device_count = staticmethod(lambda: 1)
    torch.cuda.get_device_properties = lambda *_: H100
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: 0
    for name in ("exchange_device", "maybe_exchange_device"):
        setattr(CudaInterface, name, staticmethod(lambda *_: 0))
        setattr(torch.cuda, f"_{name}", lambda *_: 0)
    for module in (torch.utils._triton, scheduler):
        module.has_triton = lambda: True
    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    joint_graph.lazy_init = post_grad.lazy_init = lambda *_, **__: None
    torch._inductor.config.joint_graph_constant_folding = False
    whole = compile_fx.compile_fx
    compile_fx.compile_fx = lambda graph, inputs, **more: whole(
        graph, inputs, **more | {"inner_compile": inner_compile})


def assemble(name, source):
    """Compile a Triton kernel for sm_90 in its first configuration; returns facts of its PTX and binary."""
    kernel = getattr(PyCodeCache.load(source), name)
    config, meta, arguments = kernel.configs[0], kernel.triton_meta, kernel.fn.arg_names
    signature = {argument: meta["signature"].get(argument, "constexpr") for argument in arguments}
    constants = {key if isinstance(key, tuple) else (arguments.index(key),): value
                 for key, value in (meta["constants"] | config.kwargs).items()}
    signature |= dict.fromkeys(config.kwargs, "constexpr")
    compiled = triton.compile(ASTSource(kernel.fn, signature, constants, meta["configs"][0]), target=SM90,
                          options={"num_warps": config.num_warps, "num_stages": config.num_stages})
    ptx = compiled.asm["ptx"]
    widths = re.findall(r"(?:ld|st)\.global(?:\.L1::evict\w+)*(?:\.L2::\w+)*\.([.\w]+)", ptx)
    # FRAME_SIZE in .nv.info: format 4, attribute 0x11, size 8, the kernel's number, bytes of stack
    frame = re.search(rb"\x04\x11\x08\0.{4}(.{4})", compiled.asm["cubin"], re.S)
    return {"name": name, "accesses": Counter(widths),      # {"v4.b32": 3}, 16 bytes each
            "divisions": len(re.findall(r"\b(?:div|rem)\.[su](?:32|64)", ptx)),     # of integers
            "spilled": int.from_bytes(frame[1], "little")}      # bytes a thread


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def report(case, compiled):
    """Compile cross-entropies for packs of three lengths and print the facts of their kernels."""
    torch._dynamo.reset()
    counters.clear()
    SOURCES.clear()
    with FAKE:
        for rows in ROWS:
            compiled(tensor(rows, WORDS), tensor(rows, dtype=torch.int64)).sum().backward()
    assembled = [assemble(name, source) for text in SOURCES for name, source in re.findall(
        r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", text, re.S)]
    print(json.dumps({"case": case, "graphs": len(SOURCES),
                      "breaks": sum(counters["graph_break"].values()), "kernels": assembled}))


if __name__ == "__main__":
    patch()
    report("cross_entropies", dit.compiled_losses())
    # the planted fault
    report("every size symbolic", torch.compile(dit.cross_entropies, dynamic=True))
