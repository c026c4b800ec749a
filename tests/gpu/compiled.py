"""What torch.compile makes of our functions and layers for sm_90, as JSON lines for test_kernels.py.

    python tests/gpu/compiled.py         # in a process with bench/fake_cuda.py's device preloaded
"""
import functools
import gc
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench import sm90

sm90.patch()
gc.disable()        # looks through all that dynamo keeps, again and again

import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoModelForCausalLM, Qwen3Config

import lora as lora_script
from common import distributed
from core import adapters, fused
from core import float8 as float8_layers
from core.document_attention import ATTENTION
from diffusion import dit
from distill import packed_lm
from speech.model import v2, weights

fused.compiles = lambda kind: True      # nothing can run on this device, as a trial would
BF16 = torch.bfloat16
ROWS = (8192, 8064, 5120)       # tokens of three packs
PACKS = (2501, 900), (2377, 850), (2600, 1000)      # rows of text, longest sample
WIDTH, HEADS, HEAD = 8192, 24, 128


def tensor(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def rotated(rows):
    """x, cos, sin as fused.rotate gets them, at Higgs' shape."""
    return tensor(rows, HEADS, HEAD), tensor(rows, 1, HEAD), tensor(rows, 1, HEAD)


def rotated_blocks(rows):
    """q, k, cos, sin of the DiT."""
    q, cos = tensor(rows // 1024, 1024, 12, 64), tensor(rows // 1024, 1024, 1, 32, dtype=torch.float32)
    return q, torch.empty_like(q), cos, torch.empty_like(cos)


CODES = {}      # {Triton source: sm90.Code}

# {kernel of fused.py: its arguments by number of rows}
FUNCTIONS = {
    fused.swiglu_kernel: lambda rows: [tensor(rows, WIDTH) for _ in range(2)],
    fused.swiglu_gradient_kernel: lambda rows: [tensor(rows, WIDTH) for _ in range(3)],
    fused.rotate_kernel: rotated,
    fused.rotate_gradient_kernel: rotated,
    fused.rotate_qk_kernel: rotated_blocks,
    fused.rotate_qkv_gradient_kernel: lambda rows: [
        *(tensor(rows // 1024, 1024, 12, 64) for _ in range(3)),
        *(tensor(rows // 1024, 1024, 1, 32, dtype=torch.float32) for _ in range(2))],
    fused.cross_entropies_kernel: lambda rows: [
        tensor(rows, 50304), tensor(rows, dtype=torch.int64)],
    fused.cross_entropies_gradient_kernel: lambda rows: [
        tensor(rows, dtype=torch.float32), tensor(rows, 50304), tensor(rows, dtype=torch.int64),
        tensor(rows, dtype=torch.float32)],
}


def report(name, graphs, first=0, **more):
    """Print a case. first: of the graphs whose kernels are assembled, which takes a second each."""
    kernels = []
    for graph in graphs[first:]:
        for kernel, source in graph.kernels():
            same = source.replace(kernel, "kernel")     # layers share kernels, under other names
            if same not in CODES:
                CODES[same] = sm90.assembled(kernel, source)
            kernels.append({"name": kernel, "direction": graph.direction, **CODES[same]._asdict()})
    print(json.dumps({"case": name, "graphs": len(graphs), "kernels": kernels, **more}), flush=True)


def functions(names, suffix=""):
    """Functions of fused.py on packs of three lengths."""
    for function in names:
        arguments = FUNCTIONS[function]
        torch._dynamo.reset()
        counters.clear()
        sm90.GRAPHS.clear()
        with sm90.fake():
            for rows in ROWS:
                fused.kernel(function, *arguments(rows))
        report(function.__name__ + suffix, sm90.GRAPHS, breaks=sum(counters["graph_break"].values()))


def three_packs(name, found, call, width, packs=PACKS):
    """Compiled layers both ways, on packs of 8192 tokens. call(layer, hidden, pack): runs one."""
    torch._dynamo.reset()
    counters.clear()
    sm90.GRAPHS.clear()
    distributed.compile_layers(found)
    error = ""
    for pack in packs:
        hidden = tensor(8192, width).requires_grad_()
        try:
            with torch.autocast("cuda", BF16):
                out = hidden
                for layer in found:
                    out = call(layer, out, *pack)
            out.backward(torch.empty_like(out))
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"[:300]
            break
    moved = sum(graph.moved for graph in sm90.GRAPHS[:2]) / 1e9
    # the first two are those of one length, the others of all
    report(name, sm90.GRAPHS, 2 if len(packs) > 1 else 99, breaks=sum(counters["graph_break"].values()), error=error,
           gb_a_layer=round(moved, 3))


def speech(name, float8=False, ask=False):
    """A decoder layer of Higgs-Audio V2 under LoRA. ask: the planted fault, it waits for the GPU."""
    settings = json.loads((sm90.fake_cuda.ROOT / "launch/voice/model/config.json").read_text())
    settings |= {"vocab_size": 4096, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 1,
                 "num_attention_heads": HEADS, "num_key_value_heads": 8, "head_dim": HEAD}
    native = weights.empty_model(weights.native_config(settings), BF16)
    model = v2.PackedHiggs(lora_script.add_lora(native, 16, 32, 0.0, "all-linear", "x"))

    def call(layer, hidden, n_text, longest):
        order, cos = tensor(8192, dtype=torch.int64), tensor(8192, HEAD)
        packed = v2.Packed(n_text, order, torch.empty_like(order), cos, torch.empty_like(cos),
                           tensor(14, dtype=torch.int32), longest, None)
        return layer(hidden, packed=packed)

    with sm90.fake():
        model.to_empty(device="cuda")
        found = model.base_model.model.layers
        if float8:
            float8_layers.convert(found)
        if ask:
            found[0].mlp.act_fn.forward = lambda x: F.silu(x) * x.sum().item()
        three_packs(name, found, call, 3072, PACKS[:1] if ask else PACKS)


def chat(name):
    """A decoder layer of Qwen3 4B under LoRA, as distill/train_sft.py calls it."""
    config = Qwen3Config(vocab_size=4096, hidden_size=2560, intermediate_size=9728, num_hidden_layers=1,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=HEAD)
    with torch.device("meta"):
        native = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=BF16)
    how = (16, 32, 0.0, "all-linear", "x")
    model = packed_lm.PackedLM(adapters.add_lora(native, native.model.layers, *how))

    def call(layer, hidden, _, longest):
        ends, cos = tensor(14, dtype=torch.int32), tensor(1, 8192, HEAD)
        found = layer(hidden[None], position_embeddings=(cos, torch.empty_like(cos)), use_cache=False,
                      cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest)
        return found[0]

    with sm90.fake():
        model.to_empty(device="cuda")
        three_packs(name, model.native.model.layers, call, 2560)


def block_mask(rows, noisy, length):
    """Mask of block diffusion's rows, whose values nobody knows."""
    tiles = length // dit.TILE
    doc, block = (tensor(rows, length, dtype=torch.int32) for _ in range(2))
    counts, places = (tensor(rows, 1, tiles, *more, dtype=torch.int32) for more in ((), (tiles,)))
    return BlockMask.from_kv_blocks(
        counts, places, counts, places, BLOCK_SIZE=dit.TILE, seq_lengths=(length, length),
        mask_mod=dit.attends(doc, block, noisy))


def block_attention(name):
    """FlexAttention of block diffusion's rows, forward and backward."""
    torch._dynamo.reset()
    counters.clear()
    sm90.GRAPHS.clear()
    with sm90.fake():
        mask = block_mask(8, 1024, 2048)
        q, k, v = (tensor(8, 12, 2048, 64).requires_grad_() for _ in range(3))
        out = dit.sparse_attention(q, k, v, mask)
        out.backward(torch.empty_like(out))
    report(name, sm90.GRAPHS, breaks=sum(counters["graph_break"].values()))


def blocks(name):
    """A layer of the 170M DiT, as diffusion/train_bd3lm.py compiles it: rows have one length."""
    torch._dynamo.reset()
    counters.clear()
    sm90.GRAPHS.clear()
    layer, rows, length, noisy = dit.Layer(dit.config_of("small", 50304, 50303)), 43, 896, 384    # of 128 problems
    with sm90.fake():
        layer.to_empty(device="cuda")
        distributed.compile_layers([layer], dynamic=False)
        cos = tensor(rows, length, 1, 32, dtype=torch.float32)
        x = tensor(rows, length, 768).requires_grad_()
        condition = tensor(layer.modulation.in_features, dtype=torch.float32)
        with torch.autocast("cuda", BF16):
            out = layer(x, condition, cos, torch.empty_like(cos), length, block_mask(rows, noisy, length))
        out.backward(torch.empty_like(out))
    report(name, sm90.GRAPHS, breaks=sum(counters["graph_break"].values()), error="",
           gb_a_layer=round(sum(graph.moved for graph in sm90.GRAPHS) / 1e9, 3))


def main():
    functions(FUNCTIONS)
    block_attention("block attention")
    blocks("blocks")
    speech("speech")
    speech("speech, float8", float8=True)
    chat("chat")
    # the planted faults
    speech("speech, .item()", ask=True)
    fused._compiled = functools.cache(functools.partial(torch.compile, dynamic=True))
    functions([fused.swiglu_kernel, fused.rotate_kernel], ", every size symbolic")
    dit.KERNEL = None
    dit.compiled_flex.cache_clear()
    block_attention("block attention, 4 warps")


if __name__ == "__main__":
    main()
