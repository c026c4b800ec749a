"""The fastest that each trainer's step could be on an H200, by count: no GPU is needed, and none is measured.

    python bench/roofline.py                        # all steps at their true shapes, about 5 minutes
    python bench/roofline.py --steps 'chat, LoRA'   # one of them
    python bench/roofline.py --layers 2             # how a change to the layers shows, within seconds

The real train() runs on fake tensors (rehearsal.py), every kernel of one optimizer step is counted, and given the time
that it cannot be faster than: matrix products their FLOPs, all others the bytes that they read and write, and none less
than --kernel_us. Kernels do not overlap; the host launches one every --host_us. So the numbers are bounds: a real step
is slower, by what kernels stay below those rates. Communication between GPUs and data loading are left out. Rows of
COMPILED have a second one for --compile: what a layer's kernels move between its products is then what Inductor's code
for sm_90 moves (tests/gpu/test_kernels.py), and the rest is as it was.
"""
import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import fake_cuda

LORA = ("--use_lora", "--max_tokens_per_batch", 8192)
ALL = ("--lora_target_modules", "all-linear", "--lora_dropout", 0)
# {name: (trainer, GPUs, flags)}
STEPS = {
    "speech 3B, LoRA on attention, 8k tokens": ("speech", 1, (*LORA, "--lora_dropout", 0.1)),
    "speech 3B, LoRA on all, no dropout, 8k tokens": ("speech", 1, (*LORA, *ALL)),
    "speech 3B, full, FSDP2 on 8, 8k tokens": ("speech", 8, ("--max_tokens_per_batch", 8192, "--parallel", "fsdp")),
    "speech 3B, LoRA on all, 4 samples, recomputed": ("speech", 1, (
        "--use_lora", *ALL, "--per_device_train_batch_size", 4, "--gradient_checkpointing")),
    "Higgs TTS 3 4B, LoRA on all, no dropout, 8k tokens": ("speech3", 1, (*LORA, *ALL)),
    "chat 4B, LoRA, DDP, 8k tokens": ("chat", 1, (*LORA, "--parallel", "ddp")),
    "chat 4B, full, DDP, 8k tokens": ("chat", 1, ("--max_tokens_per_batch", 8192, "--parallel", "ddp")),
    "chat 4B, full, FSDP2 on 8, 8k tokens": ("chat", 8, ("--max_tokens_per_batch", 8192, "--parallel", "fsdp")),
    "block diffusion 170M, 128 problems": ("blocks", 1, ("--problems_per_batch", 128, "--gradient_accumulation_steps",
                                                         1)),
}
# {step: GB that a compiled layer moves}
COMPILED = {"speech 3B, LoRA on all, no dropout, 8k tokens": 2.74, "chat 4B, LoRA, DDP, 8k tokens": 2.64,
            "block diffusion 170M, 128 problems": 3.80}
WIDTHS = {"speech": 24 * 128, "speech3": 32 * 128, "chat": 32 * 128, "blocks": 768}     # heads times their size
KINDS = ("matmul", "attention", "elementwise", "optimizer")
TOP = 6


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", default="", help="only those whose name contains this")
    parser.add_argument("--layers", type=int, default=0, help="of each model, 0 = as many as it has; then nothing is "
                        "written")
    parser.add_argument("--matmul_tflops", type=float, default=790, help="of large bf16 products, TFLOP/s")
    parser.add_argument("--attention_tflops", type=float, default=250, help="of flash attention, both ways, TFLOP/s")
    parser.add_argument("--memory_tbs", type=float, default=3.65, help="of copies in the GPU's memory, TB/s")
    parser.add_argument("--kernel_us", type=float, default=2.5, help="shortest kernel, microseconds")
    parser.add_argument("--host_us", type=float, default=5, help="host time of a launch, microseconds")
    parser.add_argument("--results_dir", type=Path, default=None, help="where the JSON goes (default: bench/results)")
    return parser


def seconds_of(step, width, layers, args):
    """({kind: seconds}, {operator: (seconds, kernels)}) of a rehearsal.Step on the GPU."""
    kinds, operators, calls = Counter(), {}, Counter()
    for row in step.ledger.rows:
        spent = max(row.flops / args.matmul_tflops / 1e12, row.size / args.memory_tbs / 1e12,
                    args.kernel_us * 1e-6 * row.launches)
        if row.kind == "attention":
            calls["backward" in row.name] += row.launches
        elif row.kind in KINDS:
            kinds[row.kind] += spent
            before, n = operators.get(row.name, (0, 0))
            operators[row.name] = before + spent, n + row.launches
    forward = 4 * width * step.pairs * layers / args.attention_tflops / 1e12
    kinds["attention"] = forward * (calls[False] / calls[True] + 2.5)       # backward: five products instead of two
    return kinds, operators


def compiled(name, kinds, one_layer, layers, args):
    """{kind: seconds} of a step whose layers are compiled. kinds: eager; one_layer: with one layer."""
    a_layer = (kinds["elementwise"] - one_layer["elementwise"]) / (layers - 1)
    moved = COMPILED[name] / args.memory_tbs / 1e3
    return kinds | {"elementwise": kinds["elementwise"] + layers * (moved - a_layer)}


def main(argv=None):
    args = build_parser().parse_args(argv)
    if why := fake_cuda.why_not():
        raise SystemExit(f"error: {why}")
    fake_cuda.start()
    from bench import measure, rehearsal
    from common.text import GIB
    report = measure.new_report("the fastest that a step could be on an H200, by count of its kernels",
                                torch.device("cpu"), measure.command("roofline", argv))
    report["assumed"] = {name: getattr(args, name) for name in ("matmul_tflops", "attention_tflops", "memory_tbs",
                                                                "kernel_us", "host_us")}
    bounds = {"columns": ["step", "kernels", *(f"{kind} (ms)" for kind in KINDS), "host (ms)", "bound (%)", "tokens/s",
                          "peak (GiB)", "dry run (GiB)"], "rows": []}
    operators = {"columns": ["step", "operator", "kernels", "ms"], "rows": []}
    report["tables"] = {"bounds": bounds, "operators": operators}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        rehearsal.prepare(folder)
        for name, (trainer, gpus, words) in STEPS.items():
            if args.steps not in name:
                continue
            layers = args.layers or rehearsal.LAYERS[trainer]
            step = rehearsal.rehearse(trainer, folder, words, layers, gpus)
            kinds, spent = seconds_of(step, WIDTHS[trainer], layers, args)
            kernels = sum(row.launches for row in step.ledger.rows)

            def add_row(name, kinds, kernels, step=step, gpus=gpus):
                seconds = max(sum(kinds.values()), host := args.host_us * 1e-6 * kernels)
                bounds["rows"].append([
                    name, kernels or "-", *(1e3 * kinds[kind] for kind in KINDS), 1e3 * host,
                    100 * step.work["flops"] / gpus / args.matmul_tflops / 1e12 / seconds,
                    step.work["tokens"] / gpus / seconds, step.peak / GIB, step.planned / GIB])
                print(" | ".join(f"{value:,.1f}" if isinstance(value, float) else str(value)
                                 for value in bounds["rows"][-1]), flush=True)

            add_row(name, kinds, kernels)
            if name in COMPILED and layers > 1:
                one = rehearsal.rehearse(trainer, folder, words, 1, gpus)
                one_layer = seconds_of(one, WIDTHS[trainer], 1, args)[0]
                # launches are not counted: the host has time while products run
                add_row(f"{name}, compiled", compiled(name, kinds, one_layer, layers, args), 0)
            for operator, (own, n) in sorted(spent.items(), key=lambda item: -item[1][0])[:TOP]:
                operators["rows"].append([name, operator, n, 1e3 * own])
                print(f"    {1e3 * own:8.1f} ms {n:6d} {operator}", flush=True)
    if not args.layers and not args.steps:
        print(f"wrote {measure.write_report('roofline', report, args.results_dir or measure.RESULTS)}")


if __name__ == "__main__":
    main()
