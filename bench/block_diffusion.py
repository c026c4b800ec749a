"""How fast does block diffusion train, next to a straightforward step of the paper, and what does each choice give?

    python bench/block_diffusion.py             # one H200: less than 9 minutes; two CPU cores: less than 5
    python bench/block_diffusion.py --size nano --length 64 --problems 8 --repeats 1    # anywhere: shows that it works

Ours and the straightforward step (plain_block_diffusion.py) train the same problems with the same noise, weights,
precision and kind of optimizer. Loss and gradient norm of one step must agree, else nothing is measured. Then whole
optimizer steps take turns: noise, network, loss, clipping, AdamW, averaged weights; rows wait ready-made, as from
loader processes. On a CPU both take a step in as many micro-steps; on a GPU the straightforward one, whose logits take
more memory, in twice as many: the largest micro-batch that we expect to fit. On a CPU each choice of ours is then
changed alone, in turns, too. On a GPU (or with --batches) a sweep follows: micro-batch, attention, compile, packing,
with real loaders; first flex and sdpa, compiled and not, must agree in loss and gradient norm.

Problems are random tokens of GSM8K's lengths: log-normal, mean 157 tokens, sigma 0.34 (99th percentile 325; GSM8K's
lies between 321 and 328), clipped to 40..440, 60 % of each its answer; in proportion with --length. Padded and packed
steps hold the same problems. Tokens are clean tokens of text: no padding, no noisy copies, no fill.

Writes bench/results/block_diffusion-DEVICE.json after every round and part; a step that runs out of memory is recorded.
"""
import argparse
import contextlib
import functools
import gc
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure
from bench.block_steps import (
    ANSWER,
    SIGMA,
    TOKENS,
    autocast,
    build,
    head_on_all,
    make_documents,
    make_packs,
    one_attention,
    our_step,
    plain_step,
    stir,
)
from common import distributed, loading, metrics, optim
from diffusion import blocks, dit, noise

ACCUMULATION = 4                # micro-steps of an optimizer step, as in all the guide's presets
STEPS = 2                       # optimizer steps between two clock readings: the host prepares ahead, as in training
GUIDE = {"steps": 50_000, "problems_per_step": 512, "hours": [12, 18]}
TOLERANCES = 5e-4, 1e-2         # relative, of loss and norm; bf16 moved them by 4e-5 and 2e-3 against float32 on a CPU
EXACT = 1e-5, 1e-4              # the same of float32
SETTING_COLUMNS = ["setting", "seconds a step", "clean tokens/s", "problems/s", "of matmul rate", "peak GiB",
                   "hours for 50,000 x 512"]
SETTING_KEYS = ("step_seconds", "tokens_per_second", "problems_per_second", "of_matmul_rate", "memory_gib",
                "projected_hours")


# ---------------------------------------------------------------------------------------------------------------------
# Steps


def backward(world, wrapped, batch, draws, divisor):
    """One micro-step as in train_bd3lm.py -> its share of the step's loss, a 0-d tensor."""
    inputs = noise.diffuse(batch, draws, TOKENS.mask).to(world.device)
    with autocast(world.device):
        losses = wrapped(inputs)
    loss = (losses * inputs.weights).sum() / divisor
    loss.backward()
    return loss.detach()


def measure_setting(world, args, documents, micro_batch, backend, compiled, pack):
    """Median of timed optimizer steps of one setting -> {name: number}."""
    device, cuda = world.device, world.device.type == "cuda"
    micro_steps = ACCUMULATION * STEPS
    rows, packs, batch_rows = make_packs(documents, micro_batch, pack, micro_steps, args.seed)
    work = {name: int(values.sum()) for name, values in blocks.row_table(rows).items()}
    targets = [rows.n_targets[np.concatenate(packs[a:a + ACCUMULATION]).astype(int)].sum()
               for a in range(0, micro_steps, ACCUMULATION)]
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    began = time.monotonic()
    model, wrapped, average = build(world, args, backend, compiled)
    parameters = list(model.parameters())
    optimizer = optim.build_adamw(model.named_parameters(), 5e-4, 0.0, (0.9, 0.999), dit.decays)
    flags, seconds = optim.StepFlags(device), []
    batches = loading.ahead(blocks.make_loader(rows, packs * (args.repeats + 1), batch_rows, rows.noisy_length,
                                               num_workers=2 if cuda else 0, prefetch_factor=4))
    for repeat in range(args.repeats + 1):          # the first one compiles and warms up
        measure.synchronize(device)
        start = time.perf_counter()
        for step in range(STEPS):
            for micro in range(ACCUMULATION):
                batch = next(batches)
                draws = noise.draw(args.seed, "train", (repeat, step, micro), batch.n_groups, batch_rows, rows.length)
                loss = backward(world, wrapped, batch, draws, targets[step])
            norm = optim.clip_gradients(parameters, 1.0)
            bad = 1 - torch.isfinite(norm).float()
            optim.guarded_step(optimizer, bad)
            optimizer.zero_grad(set_to_none=True)
            average.update(bad)
            flags.pop()
            flags.push(bad, distributed.any_rank(world, False), None)
        measure.synchronize(device)
        seconds.append(time.perf_counter() - start)
        if not repeat:
            first = time.monotonic() - began
    flags.pop()
    if flags.bad_total:
        raise SystemExit(f"{flags.bad_total} steps had a non-finite gradient; last loss {float(loss):g}")

    median, spent = statistics.median(seconds[1:]) / STEPS, seconds[1:]
    masked = work["targets"] * sum(noise.FULL) / 2          # t is uniform and the masked share
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


# ---------------------------------------------------------------------------------------------------------------------
# Ours and the straightforward step in turns, and ours with one choice changed


def in_turns(makes, args, device, tell=None):
    """{name: [seconds of each round]} of {name: function that makes a step}; step 0 is warm-up (and compiles).

    One that runs out of memory has no seconds. tell: called with what is known after every round.
    """
    steps, failed, counts = {}, set(), dict.fromkeys(makes, 0)

    def attempt(name, function, *args):
        """What the function returns; a name that has run out of memory is left out from then on."""
        try:
            return None if name in failed else function(*args)
        except torch.OutOfMemoryError:
            failed.add(name)
        steps.pop(name, None)
        free(device)

    def once(name):
        attempt(name, lambda: steps[name](counts[name]))
        counts[name] += 1
    for name, make in makes.items():        # all before the first one compiles: each resets the compiler
        steps[name] = attempt(name, make)

    def known(seconds):
        return {name: [] if name in failed else spent for name, spent in seconds.items()}
    after = (lambda seconds: tell(known(seconds))) if tell else None
    return known(measure.alternate({name: functools.partial(once, name) for name in makes}, args.repeats, device,
                                   after=after))


def median_and_ratio(spent, ours):
    """(median, times ours) of two lists of seconds; words where one is empty."""
    return (statistics.median(spent), measure.ratio(ours, spent)) if spent and ours else (None, "out of memory")


def compare(world, args, documents, numbers, report):
    """Ours beside the straightforward step: first that they agree, then the table "steps"."""
    backend = "flex" if world.device.type == "cuda" else "sdpa"
    found = {}
    for name, make in ("plain", plain_step), ("ours", functools.partial(our_step, backend=backend)):
        step = make(world, args, documents, numbers, stirred=True)
        found[name] = tuple(map(float, step(0)))
    check_agreement(found, TOLERANCES if world.device.type == "cuda" else EXACT)
    report["plain_agreement"] = {way: {"loss": a, "grad_norm": b} for way, (a, b) in found.items()}
    for way, (loss, norm) in found.items():
        print(f"check      {way:<16} loss {loss:.6f} | gradient norm {norm:.6f}", flush=True)
    del step

    cuda, tokens = world.device.type == "cuda", int(documents.tokens[numbers].sum())
    own = "ours, as on a GPU: flex, compiled" if cuda else "ours"
    makes = {own: functools.partial(our_step, world, args, documents, numbers, backend, compiled=cuda),
             "straightforward": functools.partial(plain_step, world, args, documents, numbers),
             "the same, no logits of the clean half": functools.partial(plain_step, world, args, documents, numbers,
                                                                        True)}

    def tell(seconds):
        table = report["tables"]["steps"] = {"columns": [
            "step", "seconds", "least", "most", "clean tokens/s", "problems/s", "ours is faster by"], "rows": []}
        for name, spent in seconds.items():
            median, times = median_and_ratio(spent, seconds[own])
            table["rows"].append([name, *[None] * 5, times] if median is None else [
                name, median, min(spent), max(spent), tokens / median, len(numbers) / median, times])
        measure.write_report("block_diffusion", report, args.results_dir)
    in_turns(makes, args, world.device, tell)
    show("steps", report["tables"]["steps"])


def levers(world, args, documents, numbers, report):
    """Ours with one choice changed at a time -> the table "levers"."""
    changes = {"ours": {}, "one problem a row, padded": {"pack": False},
               "logits of every noisy copy": {"forward": head_on_all},
               "one attention, dense mask": {"forward": one_attention}, "layers compiled": {"compiled": True},
               "AdamW not fused": {"fused": False}, "no averaged weights": {"averaged": False}}
    makes = {name: functools.partial(our_step, world, args, documents, numbers, "sdpa", **change)
             for name, change in changes.items()}
    seconds = in_turns(makes, args, world.device)
    table = {"columns": ["changed", "seconds a step", "times ours"], "rows": [
        [name, *median_and_ratio(spent, seconds["ours"])] for name, spent in seconds.items()]}
    report["tables"]["levers"] = table
    show("levers", table)
    measure.write_report("block_diffusion", report, args.results_dir)


def host_costs(args, device, report, problems=128):
    """Milliseconds of what a packed micro-step needs besides the network -> the table "preparation"."""
    documents = make_documents(4 * problems, args.length, args.seed)
    rows, packs, batch_rows = make_packs(documents, problems, True, 4, args.seed)
    some = [rows[r] for r in packs[0]]

    def collate():
        return blocks.collate(some, batch_rows, rows.length, rows.noisy_length, TOKENS.pad)

    def noised():
        draws = noise.draw(args.seed, "train", 0, batch.n_groups, batch_rows, rows.length)
        return noise.diffuse(batch, draws, TOKENS.mask)
    batch = collate()
    inputs = noised()
    on_host, inputs = inputs, inputs.to(device)
    doc, block, n, both = inputs.doc, inputs.block, inputs.n_noisy, inputs.doc.shape[1]

    def created():
        rule, clean = dit.attends(doc, block, n), dit.attends(doc[:, n:], block[:, n:], 0)
        create_block_mask(rule, len(doc), None, n, both, device=device)
        create_block_mask(clean, len(doc), None, both - n, both - n, device=device)
    ways = {"batch from rows, in a loader process": collate,
            "of it, tiles of flex attention": lambda: dit.tile_states(on_host.doc.numpy(), on_host.block.numpy(), n),
            "noise": noised, "flex masks from tiles": lambda: dit.attention_masks(
                doc, block, n, inputs.tiles),
            "flex masks by create_block_mask, before": created,
            "dense masks of sdpa": lambda: dit.attention_masks(doc, block, n)}
    seconds = measure.alternate(ways, args.repeats, device)
    table = {"columns": [f"of {problems} problems in {batch_rows} rows", "milliseconds"],
             "rows": [[name, 1e3 * statistics.median(spent)] for name, spent in seconds.items()]}
    report["tables"]["preparation"] = table
    show("preparation", table)


def show(name, table):
    """Print a table in aligned columns."""
    print(f"{name:<10} " + " | ".join(table["columns"]))
    for first, *values in table["rows"]:
        print(f"{'':<10} {first:<40} " + " | ".join(
            f"{v:>10,.3f}" if isinstance(v, float) else f"{v or '':>10}" for v in values), flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# What comes before the sweep


def loss_and_norm(world, args, documents, backend, compiled):
    """(loss, gradient norm) of one packed batch without dropout, by a model in which attention matters."""
    rows, packs, batch_rows = make_packs(documents, 16, True, 1, args.seed)
    model, wrapped, _ = build(world, args, backend, compiled, dropout=0.0)
    stir(model, args.seed)
    batch = blocks.collate([rows[r] for r in packs[0]], batch_rows, rows.length, rows.noisy_length, TOKENS.pad)
    draws = noise.draw(args.seed, "train", 0, batch.n_groups, batch_rows, rows.length)
    loss = backward(world, wrapped, batch, draws, batch.n_targets)
    return float(loss), float(optim.clip_gradients(list(model.parameters()), 0))


def check_agreement(found, tolerances=TOLERANCES):
    """SystemExit unless all {name: (loss, gradient norm)} agree with the first one, and are finite."""
    (first, (loss, norm)), *others = found.items()
    wrong = [] if np.isfinite([loss, norm]).all() else [f"{first}: loss {loss}, gradient norm {norm}"]
    wrong += [f"{name}: loss {a}, gradient norm {b}; {first}: {loss}, {norm}" for name, (a, b) in others
              if not (abs(a - loss) <= tolerances[0] * abs(loss) and abs(b - norm) <= tolerances[1] * abs(norm))]
    if wrong:
        raise SystemExit("error: two ways to compute one step DISAGREE, nothing was measured\n" + "\n".join(wrong))


def settings(batches, cuda):
    """[(micro_batch, backend, compiled, pack)], the most telling first; not a full cross product."""
    middle = 128 if 128 in batches else batches[0]
    if not cuda:
        return [(batch, "sdpa", False, True) for batch in batches] + [(middle, "sdpa", False, False)]
    return [(middle, "flex", True, True), (middle, "flex", False, True), (middle, "flex", True, False),
            (middle, "sdpa", False, True), (middle, "sdpa", True, True), (middle, "sdpa", False, False),
            *((batch, "flex", True, True) for batch in batches if batch != middle)]


# ---------------------------------------------------------------------------------------------------------------------


def sweep(world, args, documents, report, began):
    """Check the ways to attend, then measure settings one after another -> report["results"], written as they come."""
    cuda = world.device.type == "cuda"
    ways = [(backend, compiled) for compiled in (False, True) for backend in ("sdpa", "flex")] if cuda else \
        [("sdpa", False)]
    found = {f"{backend}{', compiled' * compiled}": loss_and_norm(world, args, documents, backend, compiled)
             for backend, compiled in ways}
    check_agreement(found)
    report["agreement"] = {way: {"loss": a, "grad_norm": b} for way, (a, b) in found.items()}
    for way, (loss, norm) in found.items():
        print(f"check      {way:<16} loss {loss:.5f} | gradient norm {norm:.5f}", flush=True)
    for micro_batch, backend, compiled, pack in settings(args.batches, cuda):
        result = {"micro_batch": micro_batch, "attention": backend, "compile": compiled, "packed": pack}
        error = "not run: out of time" if time.monotonic() - began > args.minutes * 60 else "out of memory"
        if error == "out of memory":
            with contextlib.suppress(torch.OutOfMemoryError):
                result |= measure_setting(world, args, documents, micro_batch, backend, compiled, pack)
                result["of_matmul_rate"] = result["flops_per_second"] / report["matmul_flops_per_second"]
        if "step_seconds" not in result:
            result["error"] = error
        free(world.device)
        report["results"].append(result)
        report["tables"]["settings"] = {"columns": SETTING_COLUMNS, "rows": [
            [f"{r['micro_batch']} problems, {r['attention']}, {'compiled' if r['compile'] else 'eager'}, "
             f"{'packed' if r['packed'] else 'padded'}", *(r.get(key, r.get("error")) for key in SETTING_KEYS)]
            for r in report["results"]]}
        measure.write_report("block_diffusion", report, args.results_dir)
        print(line(result), flush=True)


def free(device):
    """Give back the memory of models no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(argv=None):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", choices=tuple(dit.SIZES), default="small" if cuda else "tiny", help="of the model")
    parser.add_argument("--length", type=int, default=512, help="clean tokens of a row; a multiple of 16")
    parser.add_argument("--problems", type=int, default=512 if cuda else 8, help="of an optimizer step")
    parser.add_argument("--micro_steps", type=int, default=4 if cuda else 1, help="of our step")
    parser.add_argument("--plain_micro_steps", type=int, default=8 if cuda else 1,
                        help="of the straightforward step, whose logits take more memory (on 2 cores 9 GiB in all)")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",") if n],
                        default="64,128,192,256" if cuda else "",
                        help="sweep: problems of a micro-step, comma-separated")
    parser.add_argument("--repeats", type=int, default=5 if cuda else 3, help="rounds; the median counts")
    parser.add_argument("--minutes", type=float, default=7.5, help="no setting of the sweep begins later")
    parser.add_argument("--seed", type=int, default=42, help="of problems, weights, noise and dropout")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    began, device = time.monotonic(), torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.set_float32_matmul_precision("high")      # --tf32, as the launchers pass it
    world = distributed.World(device=device)
    report = measure.new_report("training speed of block diffusion, random weights and tokens", device,
                                measure.command("block_diffusion", argv))
    documents = make_documents(max(16, args.problems, ACCUMULATION * STEPS * max(args.batches, default=0)),
                               args.length, args.seed)
    lengths, numbers = documents.tokens, list(range(args.problems))
    report |= {"settings": {"size": args.size, "length": args.length, "block_size": documents.layout.block_size,
                            "vocab_size": TOKENS.vocab_size, "dropout": 0.1, "seed": args.seed,
                            "precision": "bf16, tf32" if cuda else "float32", "problems": args.problems,
                            "micro_steps": args.micro_steps, "plain_micro_steps": args.plain_micro_steps,
                            "repeats": args.repeats, "sweep": {"micro_steps": ACCUMULATION, "steps_per_repeat": STEPS}},
               "problem_tokens": {"distribution": "log-normal, clipped", "sigma": SIGMA, "answer_share": ANSWER,
                                  "mean": float(lengths.mean()), "p99": float(np.percentile(lengths, 99)),
                                  "least": int(lengths.min()), "most": int(lengths.max())},
               "guide": GUIDE, "matmul_flops_per_second": measure.matmul_rate(device),
               "peak_flops_per_second": metrics.peak_flops(device), "results": []}
    print(f"matmul     {report['matmul_flops_per_second'] / 1e12:,.3f} TFLOP/s measured", flush=True)
    compare(world, args, documents, numbers, report)
    free(device)
    if not cuda:
        levers(world, args, documents, numbers, report)
        free(device)
    host_costs(args, device, report)
    measure.write_report("block_diffusion", report, args.results_dir)
    if args.batches:
        sweep(world, args, documents, report, began)
    report["seconds"] = time.monotonic() - began
    out = measure.write_report("block_diffusion", report, args.results_dir)
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
