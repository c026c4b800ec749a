"""Does LoRA training with --float8 learn as it does in bf16? Two runs from the same weights, on the same packs.

    python bench/float8_curve.py                    # this machine's CPU, a tiny model, some minutes
    python bench/float8_curve.py                    # the same on a GPU: the 3B shape, with step time and memory
    python bench/float8_curve.py --steps 4 --windows 2 --clips 2        # to try the script

Higgs-Audio V2 with random weights, adapters of rank 16 on all linear layers, random speech codes: what there is to
learn is the samples themselves. Dropout draws the same in both. The loss is the one trained, the mean over a window of
steps. On a CPU the float8 products are computed in float32 from the same rounded values that a GPU multiplies.

Writes bench/results/float8-DEVICE.json.
"""
import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure, tts_ways
from common import distributed, float8, loading, optim
from common.packing import PackOrder, rank_packs
from data import make_loader
from speech.data.dataset import Table
from speech.model import v2

WAYS = {"bf16": False, "float8": True}


def train(folder, args, device, in_float8):
    """One run -> (loss of each step, seconds of each step, most GPU memory held in GiB or None)."""
    ids, table = tts_ways.ids_of(folder), Table(folder / "table")
    way = {"shape": args.shape, "bf16": True, "method": "lora", "side": "ours"}
    model = v2.PackedHiggs(tts_ways.build(way, folder, device))
    layers, cuda = model.base_model.model.layers, device.type == "cuda"
    if in_float8:
        float8.convert(layers)
    if args.compile:
        distributed.compile_layers(layers)
    model.train()
    torch.manual_seed(args.seed)
    gc.collect()
    if cuda:        # the bf16 weights are gone by now
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    optimizer = optim.build_adamw(model.named_parameters(), args.learning_rate, 0.01, (0.9, 0.999), v2.decays)
    trained = [p for p in model.parameters() if p.requires_grad]
    budget = tts_ways.token_budget(table.lengths, args.batch)
    packs = rank_packs(PackOrder(table.lengths, tokens_per_pack=budget, seed=args.seed), 0, 1, 1, sys.maxsize)
    batches = loading.ahead(make_loader(table, ids, packs, num_workers=0, prefetch_factor=4, pad_to=budget), device)
    losses, seconds = [], []
    for _ in range(args.steps):
        batch = next(batches)
        counts = batch.counts
        measure.synchronize(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            audio, text, _ = model(batch)
        loss = v2.total_loss(audio, counts["audio_targets"], text, counts["text_targets"], "mean", 1.0)
        loss.backward()
        optim.clip_gradients(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        measure.synchronize(device)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return losses, seconds, measure.peak_memory_gib(device) if cuda else None


def curve_table(losses, windows):
    """{"columns", "rows"} of {way: loss of each step}, means over `windows` equal parts of the run."""
    n, rows = len(losses["bf16"]) // windows, []
    for first in range(0, n * windows, n):
        bf16, rounded = (statistics.mean(values[first:first + n]) for values in losses.values())
        rows.append([f"{first + 1} to {first + n}", bf16, rounded, 100 * (rounded / bf16 - 1)])
    return {"columns": ["steps", "loss, bf16", "loss, float8", "apart (%)"], "rows": rows}


def main(argv=None):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of a run")
    parser.add_argument("--windows", type=int, default=8, help="parts of a run whose mean loss is told")
    parser.add_argument("--shape", choices=tts_ways.SHAPES, default="3b" if cuda else "tiny", help="size of the model")
    parser.add_argument("--clips", type=int, default=64 if cuda else 4, help="samples, seen again and again")
    parser.add_argument("--batch", type=int, default=8 if cuda else 1, help="samples a step, on average")
    parser.add_argument("--learning_rate", type=float, default=2e-4 if cuda else 2e-3, help="constant, of AdamW")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda,
                        help="torch.compile each layer")
    parser.add_argument("--seed", type=int, default=42, help="of lengths, texts, codes, order and dropout")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    if not 0 < args.windows <= args.steps:
        parser.error("--windows must be at least 1 and at most --steps")
    measure.keep_freed_memory(argv)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    report = measure.new_report("LoRA training with frozen weights in float8, beside bf16", device,
                                measure.command("float8_curve", argv))
    losses, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        tts_ways.write_samples(Path(folder), args.clips, args.seed)
        for name, in_float8 in WAYS.items():
            losses[name], seconds, memory = train(Path(folder), args, device, in_float8)
            rows.append([name, 1e3 * statistics.median(seconds[args.steps // 4:]), memory])     # compiled by then
            print(f"{name:<7} loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f} | step {rows[-1][1]:,.1f} ms",
                  flush=True)
    report |= {name: value for name, value in vars(args).items() if name != "results_dir"} | {"losses": losses}
    report["tables"]["curve"] = curve_table(losses, args.windows)
    if cuda:        # a CPU has no float8 products: its times say nothing
        report["tables"]["step"] = {"columns": ["frozen weights", "step (ms)", "memory (GiB)"], "rows": rows}
    for row in report["tables"]["curve"]["rows"]:
        print(f"steps {row[0]:>9} | bf16 {row[1]:8.4f} | float8 {row[2]:8.4f} | apart {row[3]:6.2f} %")
    print(f"wrote {measure.write_report('float8', report, args.results_dir)}")


if __name__ == "__main__":
    main()
