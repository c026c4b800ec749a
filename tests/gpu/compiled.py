"""What torch.compile makes of kernels and layers for an H100, as JSON lines for test_kernels.py.

Dynamo traces fake tensors, Inductor writes Triton, and Triton's compiler, which needs no driver,
turns that into code for sm_90. Gradients of CUDA tensors need a CUDA build, so layers are traced on
the CPU, with the GPU's attention, and the graphs are moved. Left out: constant folding, autotuning,
anything about time.
"""
import copy
import json
import re
import sys
import types
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.fx_passes.post_grad as post_grad
import torch._inductor.runtime.triton_helpers as triton_helpers
import torch._inductor.scheduler as scheduler
import torch.nn.attention.flex_attention as flex
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

from core import kernels

GPU = torch.device("cuda", 0)
SM90 = GPUTarget("cuda", 90, 32)
H100 = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132,
    warp_size=32, L2_cache_size=50 * 2**20, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, is_integrated=0)
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
SOURCES = []    # Python with Triton kernels in it, of each graph that was compiled
HEADS_OF = []   # [query heads, key heads, value heads] of each attention in packs
ROWS = (8192, 8064, 5120)       # tokens of three packs
WIDTH, HEADS, HEAD = 8192, 24, 128


# A compiler for a GPU that is not there


class Driver:
    """What Triton asks of a GPU's driver when it compiles."""
    is_active = staticmethod(lambda: True)
    get_current_target = staticmethod(lambda: SM90)
    get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda *_: 0)
    get_device_interface = staticmethod(lambda: torch.cuda)


def on_gpu(found, mode):
    """A tensor or device of a traced graph, on the GPU."""
    if isinstance(found, torch.Tensor):
        with mode:
            return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=GPU)
    return GPU if isinstance(found, torch.device) else found


def inner_compile(module, inputs, **_):
    """Inductor's steps as far as to code; what comes back runs the graph on fake tensors."""
    traced = copy.deepcopy(module)
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(module, inputs)
    compile_fx._recursive_record_original_output_strides(module)
    with V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(module, is_inference=True)
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.args, node.kwargs, node.meta["val"] = torch.utils._pytree.tree_map(
                lambda x: on_gpu(x, mode), (node.args, node.kwargs, node.meta.get("val")))
    inputs = [on_gpu(x, mode) for x in inputs]
    graph = GraphLowering(module, example_inputs=inputs, shape_env=mode.shape_env)
    with V.set_fake_mode(mode), V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
        graph.run(*inputs)
        source = graph.codegen()[0]
    HEADS_OF.extend([given.meta["val"].shape[1] for given in node.args[:3]] for node in module.graph.nodes
                    if node.target is torch.ops.torch_attn._varlen_attn.default)
    SOURCES.append(getattr(source, "value", str(source)))

    def run(*args):
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = args[0]
        with torch._guards.detect_fake_mode(args) or FAKE:
            return traced(*args)
    return run


def patch():
    """Make torch.compile take an H100 for granted, and keep the code that it writes for it."""
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
    for module in (torch.utils._triton, scheduler, kernels):
        module.has_triton = lambda: True
    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    joint_graph.lazy_init = post_grad.lazy_init = lambda *_, **__: None
    torch._inductor.config.joint_graph_constant_folding = False
    kernels.compiles = lambda kind: True
    whole = compile_fx.compile_fx
    compile_fx.compile_fx = lambda graph, inputs, **more: whole(
        graph, inputs, **more | {"inner_compile": inner_compile})


def assemble(name, source):
    """Code of a Triton kernel for sm_90, in its first configuration -> what its PTX and binary say."""
    kernel = getattr(PyCodeCache.load(source), name)
    config, meta, arguments = kernel.configs[0], kernel.triton_meta, kernel.fn.arg_names
    signature = {argument: meta["signature"].get(argument, "constexpr") for argument in arguments}
    constants = {key if isinstance(key, tuple) else (arguments.index(key),): value
                 for key, value in (meta["constants"] | config.kwargs).items()}
    signature |= dict.fromkeys(config.kwargs, "constexpr")
    made = triton.compile(ASTSource(kernel.fn, signature, constants, meta["configs"][0]), target=SM90,
                          options={"num_warps": config.num_warps, "num_stages": config.num_stages})
    ptx = made.asm["ptx"]
    widths = re.findall(r"(?:ld|st)\.global(?:\.L1::evict\w+)*(?:\.L2::\w+)*\.([.\w]+)", ptx)
    # FRAME_SIZE in .nv.info: format 4, attribute 0x11, size 8, the kernel's number, bytes of stack
    frame = re.search(rb"\x04\x11\x08\0.{4}(.{4})", made.asm["cubin"], re.S)
    return {"name": name, "accesses": Counter(widths),      # {"v4.b32": 3}, 16 bytes each
            "divisions": len(re.findall(r"\b(?:div|rem)\.[su](?:32|64)", ptx)),     # of integers
            "spilled": int.from_bytes(frame[1], "little")}      # bytes a thread


# Our kernels


def empty(*shape, dtype=torch.bfloat16, **more):
    return torch.empty(shape, dtype=dtype, **more)


def rotated(rows):
    """x, cos, sin as kernels.rotate gets them, at Higgs' shape."""
    return [empty(rows, heads, HEAD, device=GPU) for heads in (HEADS, 1, 1)]


ARGUMENTS = {       # {kernel of kernels.py: its arguments by number of rows}
    kernels.swiglu_kernel: lambda rows: [empty(rows, WIDTH, device=GPU) for _ in range(2)],
    kernels.swiglu_gradient_kernel: lambda rows: [empty(rows, WIDTH, device=GPU) for _ in range(3)],
    kernels.rotate_kernel: rotated,
    kernels.rotate_gradient_kernel: rotated}


def report(case, run, names=r"\w+"):
    """run() compiles; print what came out. names: of the kernels that are assembled."""
    torch._dynamo.reset()
    counters.clear()
    SOURCES.clear()
    HEADS_OF.clear()
    with FAKE:
        run()
    launched, made = [], []
    for text in SOURCES:
        calls = re.findall(r"(triton_\w+)\.run\(|extern_kernels\.(\w+)\(|torch\.ops\.([\w.]+)\(",
                           text[text.index("def call("):])
        launched.append(Counter(map("".join, calls)))
        made += [assemble(*found) for found in re.findall(
            rf"async_compile\.triton\('({names})', '''(.*?)''', device_str='cuda'\)", text, re.S)]
    print(json.dumps({"case": case, "graphs": len(SOURCES), "launched": launched, "kernels": made, "heads": HEADS_OF,
                      "breaks": sum(counters["graph_break"].values())}), flush=True)


def kernel(function):
    for rows in ROWS:
        kernels.kernel(function, *ARGUMENTS[function](rows))


# Layers of true shapes, under LoRA, in a pack of 8,192 rows: minutes of compiling


def prepared(model, layers):
    """The first of a model's layers, compiled as on a GPU, all parameters fake."""
    with FAKE:
        memory.give_shapes(model.train(), None)
    dist.compile_layers(layers)
    return layers[0]


def speech():
    """Run a layer of Higgs-Audio V2, both ways."""
    config = transformers.HiggsAudioV2Config(
        vocab_size=600, hidden_size=3072, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=8, head_dim=HEAD, codebook_size=1026, num_codebooks=8, audio_token_id=516,
        audio_bos_token_id=513, audio_delay_token_id=514, pad_token_id=501, eos_token_id=509, bos_token_id=1)
    net = lora.add_lora(weights.empty_model(config, torch.bfloat16), 16, 32, 0.05, "attention", "base")
    rows, layer = ROWS[0], prepared(v2.PackedHiggs(net), v2.layers(net.get_base_model()))

    def run():
        places, angles = empty(2, rows, dtype=torch.int64), empty(2, rows, HEAD)
        packed = v2.Packed(2501, *places, *angles, empty(14, dtype=torch.int32), 900, None)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(empty(rows, 3072, requires_grad=True), packed=packed)
        out.backward(torch.empty_like(out))
    return run


def chats():
    """Run a layer of Qwen3 4B, forward."""
    config = transformers.Qwen3Config(vocab_size=600, hidden_size=2560, intermediate_size=9728, num_hidden_layers=1,
                                      num_attention_heads=32, num_key_value_heads=8, head_dim=HEAD)
    native = causal_lm.empty_model(config, torch.bfloat16, attention=kernels.packed_documents())
    layers, rows = causal_lm.decoder_layers(native), ROWS[0]
    net = adapters.add_lora(native, layers, 16, 32, 0.05, "all-linear", "base")
    layer = prepared(packed_lm.PackedLM(net), layers)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            layer(empty(1, rows, 2560, requires_grad=True), attention_mask=None, max_length_q=900,
                  position_embeddings=empty(2, 1, rows, HEAD).unbind(), cu_seq_lens_q=empty(14, dtype=torch.int32))
    return run


def blocks():
    """Run the attention of block diffusion in 45 rows of 2,048 noisy and as many clean tokens, both ways."""
    def attend(q, k, v, doc, block, tiles):
        mask, _ = dit.attention_masks(doc, block, 2048, tiles)
        return flex.flex_attention(q, k, v, block_mask=mask, kernel_options=dit.KERNEL)

    def run():
        q, k, v = (empty(45, 12, n, 64, requires_grad=True) for n in (2048, 4096, 4096))
        out = torch.compile(attend, dynamic=False)(
            q, k, v, *empty(2, 45, 4096, dtype=torch.int32), empty(45, 32, 32, dtype=torch.int8))
        out.backward(torch.empty_like(out))
    return run


if __name__ == "__main__":
    patch()
    if sys.argv[1:] == ["layers"]:
        import transformers

        import lora
        from core import adapters, dist, memory
        from diffusion import dit
        from distill import causal_lm, packed_lm
        from speech import v2, weights
        # what a GPU runs in compiled layers
        kernels.replaced = lambda kind, forward, compiled_too=False: type(
            kind.__name__, (kind,), {"forward": forward} if compiled_too else {})
        v2._attention_by_sample = kernels._attention_by_document = memory.varlen
        flex._validate_device = lambda *_: None     # it refuses gradients on a CPU
        report("blocks", blocks(), r"triton_tem\w+")
        report("speech", speech(), "")
        report("chats", chats(), "")
        sys.exit()
    for function in ARGUMENTS:
        report(function.__name__, partial(kernel, function))
    kernels._compiled = lambda function: torch.compile(function, dynamic=True)      # the planted fault
    report("every size symbolic", partial(kernel, kernels.swiglu_kernel))
