"""What only a GPU can say, each fact in seconds: rates, and whether the kernels that the trainers count on work here.

    python bench/gpu_facts.py                       # one GPU, less than a minute
    python bench/gpu_facts.py --only attention      # those whose name contains this
    python bench/gpu_facts.py --shape tiny          # to try it; a CPU lacks some of them

Rates of products (a layer's, the thin ones of adapters, float8), of copies and of pinned memory;
flash attention of packed documents with and without repeated keys and values; FlexAttention against
a dense mask, for tiles of two sizes; each function of core/fused.py compiled, against the same
lines run plainly. Writes bench/results/gpu_facts-DEVICE.json after every fact; one that fails is
recorded, the others go on, and the exit status is 1.
"""
import argparse
import functools
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure
from core import fused
from diffusion import dit

HEADS, KV_HEADS, D = 24, 8, 128     # of a speech model of 3B
TINY = []               # with --shape tiny, by what sizes are divided
CLOSE = 0.02            # largest relative difference in bf16


def size(true):
    """A size as it is, or of --shape tiny."""
    return max(16, true // TINY[0]) if TINY else true


def milliseconds(device, function, *inputs):
    """Of function(*inputs): median of 10 calls behind 3 others."""
    ways = {"it": functools.partial(function, *inputs)}
    return 1e3 * statistics.median(measure.alternate(ways, 10, device, warm_up=3)["it"])


def apart(ours, theirs):
    """Largest relative difference of two lists of tensors, each by its norm."""
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(ours, theirs, strict=True))


def with_gradients(function, *inputs):
    """[result, gradients of inputs] of one forward and backward pass."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out) / 7 + out.detach())]


def random(device, *shape):
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# Facts: functions of the device -> {what: number or word}


def matmul(device):
    return {"TFLOP/s, bf16, 8192 wide": measure.matmul_rate(device) / 1e12}


def copy(device):
    x = random(device, size(2**29))
    return {"TB/s, read and written": 4 * x.numel() / milliseconds(device, x.clone) / 1e9}


def products(device):
    """Products of a layer of the 3B speech model on a pack, and the thin ones of adapters of rank 16."""
    found = {}
    for name, inner, outer in (("q|k|v", 3072, 5120), ("gate|up", 3072, 16384), ("down", 8192, 3072),
                               ("adapter A", 3072, 16), ("adapter B", 16, 3072)):
        tokens, n, m = size(8192), size(inner), size(outer)
        spent = milliseconds(device, F.linear, random(device, tokens, n), random(device, m, n))
        found[f"{name}, {inner} x {outer}: TFLOP/s"] = 2 * tokens * n * m / spent / 1e9
    return found


def pinning(device):
    """A checkpoint's copies: making 1 GiB of pinned memory, and copying to it and to other memory."""
    x = torch.zeros(size(2**30), dtype=torch.uint8, device=device)
    gib, start = len(x) / 2**30, time.perf_counter()
    pinned = torch.empty(len(x), dtype=torch.uint8, pin_memory=device.type == "cuda")
    found = {"GiB/s, pinned": gib / (time.perf_counter() - start)}
    for name, host in (("pinned", pinned), ("other", torch.zeros(len(x), dtype=torch.uint8))):
        found[f"GiB/s, copied to {name} memory"] = 1e3 * gib / milliseconds(device, host.copy_, x)
    return found


def float8(device):
    n = size(8192)
    a, b = (random(device, n, n).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    spent = milliseconds(device, lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16))
    return {"TFLOP/s, float8, 8192 wide": 2 * n**3 / spent / 1e9}


def packed_attention(device):
    """Flash attention of packed documents: keys and values of 8 heads for 24, as they are and repeated."""
    tokens, document = size(8192), size(512)
    q, k, v = random(device, tokens, HEADS, D), *(random(device, tokens, KV_HEADS, D) for _ in range(2))
    ends = torch.arange(0, tokens + 1, document, device=device, dtype=torch.int32)

    def attend(q, k, v, **more):
        return varlen_attn(q, k, v, ends, ends, document, document, window_size=(-1, 0), **more)

    def repeated(q, k, v):
        return attend(q, *(t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v)))

    def dense(q, k, v):
        q, k, v = (t.unflatten(0, (-1, document)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
    wanted, found = with_gradients(dense, q, k, v), {}
    flops = 3.5 * 4 * HEADS * D * tokens * document / 2
    for name, function in {"repeated": repeated, "as they are": attend,
                           "as they are, enable_gqa": lambda *t: attend(*t, enable_gqa=True)}.items():
        try:
            found[f"{name}: apart"] = apart(with_gradients(function, q, k, v), wanted)
            found[f"{name}: TFLOP/s"] = flops / milliseconds(device, with_gradients, function, q, k, v) / 1e9
        except (TypeError, ValueError, RuntimeError) as error:      # what a torch has not or asks for
            found[name] = str(error).splitlines()[0][:100]
    return found


def flex(device):
    """FlexAttention of block-causal rows of 1024, both ways with 4 and 8 warps; forward alone for tiles of 64 and 128.

    On sm_90 torch 2.13 has one configuration of the backward pass, whose blocks of 128 no tile of 64 holds.
    """
    q, k, v = (random(device, *(1, 1) if TINY else (16, 12), 1024, 64) for _ in range(3))
    document, found = torch.arange(1024, device=device) // 170, {}

    def rule(b, h, i, j):
        return (document[i] == document[j]) & (i // 16 >= j // 16)

    def forward(function, *inputs):
        return [function(*inputs)]
    at = torch.arange(1024, device=device)
    both = with_gradients if q.is_cuda else forward     # a CPU has no backward
    wanted = with_gradients(lambda *t: F.scaled_dot_product_attention(*t, attn_mask=rule(0, 0, at[:, None], at)), q, k,
                            v)
    ways = {"tiles of 128": (128, {}, both), "tiles of 128, 8 warps": (128, dit.KERNEL, both),
            "tiles of 128, 8 warps, forward": (128, dit.KERNEL, forward),
            "tiles of 64, forward": (64, {"BLOCK_M": 64, "BLOCK_N": 64}, forward)}
    for name, (tile, options, run) in ways.items():
        mask = create_block_mask(rule, None, None, 1024, 1024, device=device, BLOCK_SIZE=tile)
        attend = functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask,
                                   kernel_options=options)
        given = run(attend, q, k, v)
        found[f"{name}: apart"] = apart(given, wanted[:len(given)])
        found[f"{name}: ms"] = milliseconds(device, run, attend, q, k, v)
    return found


def fused_functions(device):
    """Each function as kernels against its own lines in float32, run plainly; milliseconds of both in bf16."""
    tokens, wide, row = size(8192), size(3072), size(1024)
    x, y, qkv = *(random(device, tokens, size(8192)) for _ in range(2)), random(device, 8, row, 3, 12, 64)
    angle = torch.rand(8, row, 1, 32, device=device) * 6
    labels, weight = torch.arange(size(2048), device=device), random(device, wide)
    cases = {"swiglu": (fused.swiglu, (x, y)),
             "rotate": (lambda q: fused.rotate(q, angle.cos().repeat(1, 1, 1, 2), angle.sin().repeat(1, 1, 1, 2)),
                        (qkv[:, :, 0],)),
             "rotate_qkv": (lambda qkv: torch.stack(fused.rotate_qkv(qkv, angle.cos(), angle.sin())), (qkv,)),
             "rms_norm": (lambda x, w: fused.rms_norm(x, w, 1e-6), (random(device, tokens, wide), weight)),
             "layer_norm": (lambda x, w: fused.layer_norm(x, w, w, 1e-6), (random(device, tokens, wide), weight)),
             "cross_entropies": (lambda x: fused.cross_entropies(x, labels), (random(device, len(labels), size(50304)),))}
    found, kernel = {}, fused.kernel
    for name, (function, given) in cases.items():
        ours, spent = with_gradients(function, *given), milliseconds(device, with_gradients, function, *given)
        try:
            fused.kernel = lambda plain, *args: plain(*args)
            found[f"{name}: apart"] = apart(ours, with_gradients(function, *(t.float() for t in given)))
            found[f"{name}: ms, plain"] = milliseconds(device, with_gradients, function, *given)
        finally:
            fused.kernel = kernel
        found[f"{name}: ms"] = spent
    return found


FACTS = (matmul, copy, products, pinning, float8, packed_attention, flex, fused_functions)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only facts whose name contains this")
    parser.add_argument("--shape", choices=("tiny",), help="small sizes, to try it")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    cuda, failed = torch.cuda.is_available(), []
    if not cuda and not args.shape:
        raise SystemExit("error: gpu_facts.py: there is no GPU (torch.cuda.is_available())")
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    TINY[:] = [64] if args.shape else []
    report = measure.new_report("what only a GPU can say", device, measure.command("gpu_facts", argv))
    rows = []
    report["tables"]["facts"] = {"columns": ["fact", "what", "value"], "rows": rows}
    for fact in FACTS:
        if args.only not in fact.__name__:
            continue
        try:
            found = fact(device)
        except Exception as error:      # of a kernel that this GPU or this torch has not: a fact, too
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        for what, value in found.items():
            if what == "error" or what.endswith("apart") and not value < CLOSE:
                failed.append(f"{fact.__name__}: {what} {value}")
            rows.append([fact.__name__, what, value])
            print(f"{fact.__name__:<18} {what:<36} {value:,.4g}" if isinstance(value, float) else
                  f"{fact.__name__:<18} {what:<36} {value}", flush=True)
        if cuda:
            torch.cuda.empty_cache()
        path = measure.write_report("gpu_facts", report, args.results_dir)
    print(f"wrote {path}")
    if failed:
        raise SystemExit(f"error: failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
