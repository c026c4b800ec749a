"""How fast does block diffusion train on this GPU, and how many hours are the guide's 50,000 steps of 512 problems?

    python bench/block_diffusion.py             # on a GPU machine; meant for one H200 and less than 8 minutes
    python bench/block_diffusion.py --size nano --length 64 --batches 2,4 --repeats 2   # anywhere: shows that it works

Times whole optimizer steps of 4 micro-steps with the trainer's own parts: loader, noise, network, clipping, guarded
AdamW, averaged weights. First flex and sdpa, compiled and not, must agree in loss and gradient norm on the GPU. Then
one setting is measured in full and each of its choices changed alone: micro-batch, attention, compile, packing.

Problems are random tokens of GSM8K's lengths: log-normal, mean 157 tokens, sigma 0.34 (99th percentile 325; GSM8K's
lies between 321 and 328), clipped to 40..440, 60 % of each its answer; in proportion with --length. Padded and packed
steps hold the same problems. tokens_per_second counts clean tokens of text: no padding, no noisy copies, no fill.

Writes bench/results/block_diffusion-DEVICE.json after every setting; a setting that runs out of memory is recorded.
"""
import argparse
import contextlib
import datetime
import gc
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bd3lm  # noqa: E402
import block_setup  # noqa: E402
import dit  # noqa: E402
import gsm8k  # noqa: E402
import metrics  # noqa: E402
import optim  # noqa: E402
import parallel  # noqa: E402
from problems import Problem, Tokens  # noqa: E402

MEAN, SIGMA, SHORTEST, LONGEST, ANSWER = 157, 0.3375, 40, 440, 0.6      # GSM8K in GPT-2's tokens, for rows of 512
ACCUMULATION = 4                # micro-steps of an optimizer step, as in all the guide's presets
STEPS = 2                       # optimizer steps between two clock readings: the host prepares ahead, as in training
GUIDE = {"steps": 50_000, "problems_per_step": 512, "hours": [12, 18]}
LOSS_TOLERANCE, NORM_TOLERANCE = 5e-4, 1e-2     # relative; bf16 moved them by 4e-5 and 2e-3 against float32 on a CPU
TOKENS = Tokens(None, 50258, 50256, 50256, 50256, -1, -1, -1, 50257)    # GPT-2's vocabulary and the mask


# ---------------------------------------------------------------------------------------------------------------------
# Data


def make_documents(n, length, seed):
    """gsm8k.Documents of n random problems for rows of `length` tokens."""
    rng, scale, layout = np.random.default_rng((seed, 1)), length / 512, gsm8k.Layout(max_length=length)
    sizes = np.exp(np.log(MEAN) - SIGMA ** 2 / 2 + SIGMA * rng.standard_normal(n)).clip(SHORTEST, LONGEST) * scale
    parts = []
    for size in sizes.round().astype(int):
        question = round((1 - ANSWER) * size)       # its first token and the answer's last one are <|endoftext|>
        ids = [rng.integers(0, TOKENS.bos, k - 1).tolist() for k in (question, size - question)]
        parts.append(gsm8k.make_document(gsm8k.regions_of(ids, TOKENS, layout), TOKENS, layout))
    ids, position, block, target, region, live = np.concatenate(parts, axis=1)
    offsets = np.cumsum([0] + [part.shape[1] for part in parts])
    group = gsm8k.number_groups(block, target, live, offsets)
    problems = [Problem(f"problem {i}", "", "", "") for i in range(n)]
    return gsm8k.Documents(layout, ids, position, block, target > 0, region, live > 0, group, offsets, problems,
                           TOKENS.pad, 0)


def make_packs(documents, micro_batch, pack, micro_steps, seed):
    """(gsm8k.Rows, packs, rows of the largest pack): `micro_batch` problems a micro-step, on average when packed.

    Rows of both kinds hold the same problems, micro_batch * micro_steps of them.
    """
    rows = gsm8k.make_rows(documents, np.arange(micro_batch * micro_steps), documents.layout.longest, pack, seed)
    order = np.random.default_rng((seed, 2)).permutation(len(rows))
    packs = [part.tolist() for part in np.array_split(order, micro_steps)]
    return rows, packs, len(packs[0])


# ---------------------------------------------------------------------------------------------------------------------
# Steps


def build(world, args, backend, compiled, dropout=0.1):
    """(DiT, what to call, bd3lm.Average), as the trainer makes them."""
    torch._dynamo.reset()       # after 8 shapes of one function dynamo would give up compiling it
    flags = argparse.Namespace(parallel="ddp", attn_backend=backend, compile=compiled, seed=args.seed, dropout=dropout,
                               model_size=args.size, gradient_checkpointing=False, ema_decay=0.9999)
    return block_setup.build_model(world, flags, TOKENS, None)


def backward(world, wrapped, batch, draws, divisor):
    """One micro-step as in train_bd3lm.py -> its share of the step's loss, a 0-d tensor."""
    inputs = bd3lm.diffuse(batch, draws, TOKENS.mask).to(world.device)
    with torch.autocast(world.device.type, torch.bfloat16, enabled=world.device.type == "cuda"):
        losses = wrapped(inputs)
    loss = (losses * inputs.weights).sum() / divisor
    loss.backward()
    return loss.detach()


def measure(world, args, documents, micro_batch, backend, compiled, pack):
    """Median of timed optimizer steps of one setting -> {name: number}."""
    device, cuda = world.device, world.device.type == "cuda"
    micro_steps = ACCUMULATION * STEPS
    rows, packs, batch_rows = make_packs(documents, micro_batch, pack, micro_steps, args.seed)
    work = {name: int(values.sum()) for name, values in block_setup.row_table(rows).items()}
    targets = [rows.n_targets[np.concatenate(packs[a:a + ACCUMULATION]).astype(int)].sum()
               for a in range(0, micro_steps, ACCUMULATION)]
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    began = time.monotonic()
    model, wrapped, average = build(world, args, backend, compiled)
    parameters = list(model.parameters())
    optimizer = optim.build_adamw(model.named_parameters(), 5e-4, 0.0, (0.9, 0.999), block_setup.decays)
    flags, seconds = optim.StepFlags(device), []
    batches = iter(gsm8k.make_loader(rows, packs * (args.repeats + 1), batch_rows, rows.noisy_length,
                                     num_workers=2 if cuda else 0, prefetch_factor=4, pin_memory=False))
    for repeat in range(args.repeats + 1):          # the first one compiles and warms up
        synchronize(device)
        start = time.perf_counter()
        for step in range(STEPS):
            for micro in range(ACCUMULATION):
                batch = next(batches)
                draws = bd3lm.draw(args.seed, "train", (repeat, step, micro), batch.n_groups, batch_rows, rows.length)
                loss = backward(world, wrapped, batch, draws, targets[step])
            norm = optim.clip_gradients(parameters, 1.0)
            bad = 1 - torch.isfinite(norm).float()
            optim.guarded_step(optimizer, bad)
            optimizer.zero_grad(set_to_none=True)
            average.update(bad)
            flags.pop()
            flags.push(bad, parallel.any_rank(world, False), None)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        if not repeat:
            first = time.monotonic() - began
    flags.pop()
    if flags.bad_total:
        raise SystemExit(f"{flags.bad_total} steps had a non-finite gradient; last loss {float(loss):g}")

    median, spent = statistics.median(seconds[1:]) / STEPS, seconds[1:]
    masked = work["targets"] * sum(bd3lm.FULL) / 2          # t is uniform and the masked share
    flops = dit.flops(model.config, work["noisy"] + work["clean"], masked, work["pairs"]) / STEPS
    problems, peak = work["samples"] / STEPS, metrics.peak_flops(device)
    return {"step_seconds": median, "step_seconds_range": [min(spent) / STEPS, max(spent) / STEPS],
            "problems_per_step": problems, "tokens_per_step": work["tokens"] / STEPS,
            "tokens_per_second": work["tokens"] / STEPS / median, "problems_per_second": problems / median,
            "rows_per_micro_step": batch_rows, "slots_per_row": rows.length + rows.noisy_length,
            "padding": 1 - work["tokens"] / (len(rows) * rows.length), "flops_per_step": flops,
            "flops_per_second": flops / median, "mfu": peak and flops / median / peak,
            "memory_gib": metrics.peak_memory(device), "seconds_to_first_result": first,
            "projected_hours": GUIDE["steps"] * GUIDE["problems_per_step"] / (problems / median) / 3600}


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------------------------------------
# What comes before the measurements


def loss_and_norm(world, args, documents, backend, compiled):
    """(loss, gradient norm) of one packed batch without dropout, by a model in which attention matters."""
    rows, packs, batch_rows = make_packs(documents, 16, True, 1, args.seed)
    model, wrapped, _ = build(world, args, backend, compiled, dropout=0.0)
    generator = torch.Generator().manual_seed(args.seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "modulation" in name or "head" in name:      # zero at the start: every layer would be the identity
                std = 1.0 if "modulation" in name and p.ndim == 1 else 0.02
                p.copy_(torch.randn(p.shape, generator=generator) * std)
            elif "qkv" in name:                             # else every token would look at all others alike
                p.mul_(3)
    batch = gsm8k.collate([rows[r] for r in packs[0]], batch_rows, rows.length, rows.noisy_length, TOKENS.pad)
    draws = bd3lm.draw(args.seed, "train", 0, batch.n_groups, batch_rows, rows.length)
    loss = backward(world, wrapped, batch, draws, batch.n_targets)
    return float(loss), float(optim.clip_gradients(list(model.parameters()), 0))


def check_agreement(found):
    """SystemExit unless all {name: (loss, gradient norm)} agree with the first one, and are finite."""
    (first, (loss, norm)), *others = found.items()
    wrong = [] if np.isfinite([loss, norm]).all() else [f"{first}: loss {loss}, gradient norm {norm}"]
    wrong += [f"{name}: loss {a}, gradient norm {b}; {first}: {loss}, {norm}" for name, (a, b) in others
              if not (abs(a - loss) <= LOSS_TOLERANCE * abs(loss) and abs(b - norm) <= NORM_TOLERANCE * abs(norm))]
    if wrong:
        raise SystemExit("error: the ways to compute attention DISAGREE, nothing was measured\n" + "\n".join(wrong))


def matmul_rate(device, repeats=10):
    """FLOP/s of a large matrix product: bf16 on a GPU, float32 on a CPU."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    seconds = []
    for _ in range(repeats + 3):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        synchronize(device)
        seconds.append((time.perf_counter() - start) / 10)
    return 2 * n ** 3 / statistics.median(seconds[3:])


def settings(batches, cuda):
    """[(micro_batch, backend, compiled, pack)], the most telling first; not a full cross product."""
    middle = 128 if 128 in batches else batches[0]
    if not cuda:
        return [(batch, "sdpa", False, True) for batch in batches] + [(middle, "sdpa", False, False)]
    return [(middle, "flex", True, True), (middle, "flex", False, True), (middle, "flex", True, False),
            (middle, "sdpa", False, True), (middle, "sdpa", True, True), (middle, "sdpa", False, False),
            *((batch, "flex", True, True) for batch in batches if batch != middle)]


# ---------------------------------------------------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=tuple(dit.SIZES), default="small", help="size of the model")
    parser.add_argument("--length", type=int, default=512, help="clean tokens of a row; a multiple of 16")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default="64,128,192,256",
                        help="problems of a micro-step, comma-separated")
    parser.add_argument("--repeats", type=int, default=5, help=f"timings of {STEPS} optimizer steps; the median counts")
    parser.add_argument("--minutes", type=float, default=6.5, help="no setting begins later; it is recorded as not run")
    parser.add_argument("--seed", type=int, default=42, help="of problems, weights, noise and dropout")
    parser.add_argument("--results_dir", type=Path, default=ROOT / "bench" / "results", help="where the JSON goes")
    args = parser.parse_args(argv)
    began, cuda = time.monotonic(), torch.cuda.is_available()
    if not cuda and (args.size != "nano" or args.length > 128):
        raise SystemExit("error: no GPU here; to try the script: --size nano --length 64 --batches 2,4 --repeats 2")
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.set_float32_matmul_precision("high")      # --tf32, as the launchers pass it
    world, name = parallel.World(device=device), torch.cuda.get_device_name(0) if cuda else "CPU"
    documents = make_documents(max(16, ACCUMULATION * STEPS * max(args.batches)), args.length, args.seed)

    ways = [(backend, compiled) for compiled in (False, True) for backend in ("sdpa", "flex")] if cuda else \
        [("sdpa", False)]
    found = {f"{backend}{', compiled' * compiled}": loss_and_norm(world, args, documents, backend, compiled)
             for backend, compiled in ways}
    check_agreement(found)
    for way, (loss, norm) in found.items():
        print(f"check      {way:<16} loss {loss:.5f} | gradient norm {norm:.5f}", flush=True)
    rate = matmul_rate(device)
    print(f"matmul     {rate / 1e12:,.3f} TFLOP/s measured", flush=True)

    lengths = documents.tokens
    report = {"question": "training speed of block diffusion, random weights and tokens", "device": name,
              "date": datetime.date.today().isoformat(),
              "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
              "settings": {"size": args.size, "length": args.length, "block_size": documents.layout.block_size,
                           "vocab_size": TOKENS.vocab_size, "dropout": 0.1, "seed": args.seed,
                           "precision": "bf16, tf32" if cuda else "float32", "micro_steps": ACCUMULATION,
                           "repeats": args.repeats, "steps_per_repeat": STEPS},
              "problem_tokens": {"distribution": "log-normal, clipped", "sigma": SIGMA, "answer_share": ANSWER,
                                 "mean": float(lengths.mean()), "p99": float(np.percentile(lengths, 99)),
                                 "least": int(lengths.min()), "most": int(lengths.max())},
              "guide": GUIDE, "agreement": {way: {"loss": a, "grad_norm": b} for way, (a, b) in found.items()},
              "matmul_flops_per_second": rate, "peak_flops_per_second": metrics.peak_flops(device), "results": []}
    out = args.results_dir / f"block_diffusion-{'-'.join(name.lower().split())}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    for micro_batch, backend, compiled, pack in settings(args.batches, cuda):
        result = {"micro_batch": micro_batch, "attention": backend, "compile": compiled, "packed": pack}
        error = "not run: out of time" if time.monotonic() - began > args.minutes * 60 else "out of memory"
        if error == "out of memory":
            with contextlib.suppress(torch.OutOfMemoryError):
                result |= measure(world, args, documents, micro_batch, backend, compiled, pack)
                result["of_matmul_rate"] = result["flops_per_second"] / rate
        if "step_seconds" not in result:
            result["error"] = error
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        report["results"].append(result)
        report["seconds"] = time.monotonic() - began
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(line(result), flush=True)
    print(f"wrote {out} after {metrics.duration(report['seconds'])}")


def line(r):
    """One aligned line of a result."""
    what = (f"{r['micro_batch']:>4} problems | {r['attention']} | {'compiled' if r['compile'] else 'eager':<8} | "
            f"{'packed' if r['packed'] else 'padded'}")
    if "error" in r:
        return f"{what} | {r['error']}"
    mfu = f"mfu {r['mfu'] * 100:4.1f}% | " if r["mfu"] else ""
    return (f"{what} | {r['tokens_per_second']:>9,.0f} tok/s | {r['problems_per_second']:>8,.1f} problems/s | {mfu}"
            f"{r['of_matmul_rate'] * 100:4.1f}% of matmul | {r['memory_gib']:6.2f} GiB | "
            f"{r['projected_hours']:,.1f} h for {GUIDE['steps']:,} x {GUIDE['problems_per_step']} "
            f"(guide: {GUIDE['hours'][0]}-{GUIDE['hours'][1]})")


if __name__ == "__main__":
    main()
