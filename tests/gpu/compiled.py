"""What torch.compile makes of our functions and layers for sm_90, as JSON lines for test_kernels.py.

    python tests/gpu/compiled.py         # in a process with bench/fake_cuda.py's device preloaded
"""
import functools
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench import sm90

sm90.patch()

from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask

import lora as lora_script
from common import distributed, fused
from common import float8 as float8_layers
from diffusion import dit
from speech.model import v2, weights

fused.compiles = lambda kind: True      # nothing can run on this device, as a trial would
BF16 = torch.bfloat16
ROWS = (8192, 8064, 5120)       # tokens of three packs
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
            code = sm90.assembled(kernel, source)
            kernels.append({"name": kernel, "direction": graph.direction, **code._asdict()})
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


PACKS = ((2501, 900), (2377, 850), (2600, 1000))        # text tokens, longest document; 8192 tokens each


def layers(name, packs, float8=False):
    """A decoder layer of Higgs-Audio V2 with adapters, at full width, both ways, on these packs."""
    torch._dynamo.reset()
    counters.clear()
    sm90.GRAPHS.clear()
    settings = json.loads((sm90.fake_cuda.ROOT / "launch/voice/model/config.json").read_text())
    settings |= {"vocab_size": 4096, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 1,
                 "num_attention_heads": HEADS, "num_key_value_heads": 8, "head_dim": HEAD}
    native = weights.empty_model(weights.native_config(settings), BF16)
    model = v2.PackedHiggs(lora_script.add_lora(native, 16, 32, 0.0, "all-linear", "x"))
    error = ""
    with sm90.fake():
        model.to_empty(device="cuda")
        found = model.base_model.model.layers
        if float8:
            float8_layers.convert(found)
        distributed.compile_layers(found)
        for n_text, longest in packs:
            order, cos = tensor(8192, dtype=torch.int64), tensor(8192, HEAD)
            packed = v2.Packed(n_text, order, torch.empty_like(order), cos, torch.empty_like(cos),
                               tensor(14, dtype=torch.int32), longest, None)
            hidden = tensor(8192, 3072).requires_grad_()
            try:
                with torch.autocast("cuda", BF16):
                    out = hidden
                    for layer in found:
                        out = layer(out, packed=packed)
                out.backward(torch.empty_like(out))
            except Exception as failed:
                error = f"{type(failed).__name__}: {failed}"[:300]
                break
    moved = sum(graph.moved for graph in sm90.GRAPHS[:2]) / 1e9
    # of several packs the second two are those of all other lengths
    report(name, sm90.GRAPHS, 2 if len(packs) > 1 else 0, breaks=sum(counters["graph_break"].values()), error=error,
           gb_a_layer=round(moved, 3))


def block_attention(name):
    """FlexAttention of block diffusion's rows, forward and backward."""
    torch._dynamo.reset()
    counters.clear()
    sm90.GRAPHS.clear()
    rows, heads, width, noisy, length = 8, 12, 64, 1024, 2048
    tiles = length // dit.TILE
    with sm90.fake():
        doc, block = (tensor(rows, length, dtype=torch.int32) for _ in range(2))
        counts, places = (tensor(rows, 1, tiles, *more, dtype=torch.int32) for more in ((), (tiles,)))
        mask = BlockMask.from_kv_blocks(
            counts, places, counts, places, BLOCK_SIZE=dit.TILE, seq_lengths=(length, length),
            mask_mod=dit.attends(doc, block, noisy))
        q, k, v = (tensor(rows, heads, length, width).requires_grad_() for _ in range(3))
        out = dit.sparse_attention(q, k, v, mask)
        out.backward(torch.empty_like(out))
    report(name, sm90.GRAPHS, breaks=sum(counters["graph_break"].values()))


def main():
    if sys.argv[1:] == ["layers"]:
        layers("lora", PACKS)
        layers("lora, float8", PACKS[:1], float8=True)
        return
    functions(FUNCTIONS)
    fused._compiled = functools.cache(functools.partial(torch.compile, dynamic=True))
    functions([fused.swiglu_kernel, fused.rotate_kernel], ", every size symbolic")
    block_attention("block attention")
    dit.KERNEL = None
    dit.compiled_flex.cache_clear()
    block_attention("block attention, 4 warps")


if __name__ == "__main__":
    main()
