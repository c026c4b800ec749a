"""How fast is a step of the speech trainer beside transformers' Trainer on the native Higgs-Audio V2 model?

    python bench/tts.py                         # this machine's CPU: meant for 2 cores and less than 10 minutes
    python bench/tts.py --fast                  # on a GPU: 3B LoRA against Trainer alone, less than 3 minutes
    python bench/tts.py --shapes tiny --rounds 2 --clips 8      # to try the script

Both sides get the same random weights, samples and labels, each in a process of its own (tts_ways.py). A round is one
pass over all samples, its data loading included; the sides take turns. Trainer pads a batch to its longest sample, in
random order as people use it and with batches of similar lengths. Ours takes as many samples a step as Trainer, without
padding (train_v2_ddp.py's default), or fills packs up to a token budget (--max_tokens_per_batch: shapes are static, so
layers can be compiled). On a GPU "ours" is packed to a budget, on a CPU not.

First one step of both has to give the same loss and gradients. Trainer divides the audio loss by the number of text
labels, ours by the number of codes: for that one step our sums are put together by its formula.

Then the levers, each against ours alone. Writes bench/results/tts-DEVICE.json after every round; a side that fails is
recorded, the others go on, and the exit status is 1.
"""
import argparse
import contextlib
import gc
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure
from bench.tts_ways import (
    SHAPES,
    config_of,
    ids_of,
    our_loss,
    run_side,
    token_budget,
    trainer_attention,
    trainer_loss,
    write_samples,
)
from data import SpeechSamples
from speech.data.code_cache import FRAME_RATE
from speech.data.dataset import Table
from speech.model import v2

TRAINER = {"Trainer": {"side": "trainer"}, "Trainer, by length": {"side": "trainer", "sorted": True}}
SIDES = {"cpu": TRAINER | {"ours": {"side": "ours"}, "ours, packed to a budget": {"side": "ours", "packed": True}},
         "cuda": TRAINER | {"Trainer, compiled": {"side": "trainer", "compile": True},
                            "ours": {"side": "ours", "packed": True},
                            "ours, compiled": {"side": "ours", "packed": True, "compile": True}}}
LIMIT_S = 600                   # of a pass, compiling included
# What "ours" can be measured without or with, each alone: words, settings, where (everywhere by default)
LEVERS = [("packed to a token budget", {"packed": True}, "cpu"),
          ("packs of a fixed number of samples", {"packed": False}, "cuda"),
          ("packed to a token budget, layers compiled", {"packed": True, "compile": True}),
          ("dual FFN by boolean masks", {"masks": True}),
          ("heads on all rows", {"all_rows": True}),
          ("AdamW foreach", {"foreach": True}),
          ("gradient checkpointing", {"recompute": "all"}),
          ("selective checkpointing", {"recompute": "selective"}),
          ("frozen weights in float32", {"float32": True}, "cuda"),
          ("frozen weights in float8", {"float8": True}, "cuda"),
          ("frozen weights in float8, layers compiled", {"float8": True, "compile": True}, "cuda"),
          ("FSDP2", {"fsdp": "reshard"}, "cuda"),
          ("FSDP2, layers kept", {"fsdp": "keep"}, "cuda")]
TOLERANCE = {False: (1e-5, 1e-4), True: (5e-3, 0.1)}       # loss and gradients, relative, in float32 and in bf16
COLUMNS = ["model", "weights trained", "side", "step (ms)", "useful tokens/s", "audio s/s", "of the matmul rate",
           "padding", "host syncs a step", "memory (GiB)", "ours is faster by"]
LEVER_COLUMNS = ["lever", "step (ms)", "useful tokens/s", "memory (GiB)", "time against the default"]


# ---------------------------------------------------------------------------------------------------------------------
# A side's process, as its parent sees it


class Side:
    """One way to train, in a process of its own; `error` says why it does not train any more."""

    def __init__(self, name, way, folder, device):
        self.name, self.last, self.error, self.word = name, {}, None, "go"
        # with the imports done once; but CUDA does not survive a fork
        context = multiprocessing.get_context("spawn" if device.type == "cuda" else "forkserver")
        if device.type == "cpu":
            context.set_forkserver_preload(["bench.tts_ways"])      # found from the repository's root
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=run_side, args=(theirs, way, folder, device, torch.get_num_threads()),
                                       daemon=True)
        self.process.start()
        theirs.close()

    def ask(self):
        """One pass of that side, which tells about it; nothing when it has failed."""
        if self.error is None:
            with contextlib.suppress(OSError):      # receive() says why
                self.pipe.send(self.word)
            self.receive()

    def receive(self):
        try:
            said = self.pipe.recv() if self.pipe.poll(LIMIT_S) else {"error": f"no word for {LIMIT_S} s"}
        except (EOFError, ConnectionError):
            self.process.join(10)
            said = {"error": f"its process ended with status {self.process.exitcode}"}
        graphs = said.get("graphs", [0])
        if graphs[0] != graphs[-1]:
            said = {"error": f"compiled again after the warm-up: {graphs} graphs"}
        if "error" in said:
            print(f"{self.name}: {said['error']}", file=sys.stderr)
            self.error = said["error"].strip().splitlines()[-1][:100]
            self.process.kill()
        else:
            self.last = said

    def stop(self):
        with contextlib.suppress(OSError):
            self.pipe.send("stop")
        self.process.join(60)
        self.process.kill()


def compare(ways, folder, device, rounds, tell):
    """tell({name: {"seconds" of each round, "steps" of a round, "padding", "syncs" a step, "memory_gib", "loss"} or
    {"error"}}) after every round of the sides {name: settings}; each has a process, one of which works at a time.
    """
    tokens, cpu = int(Table(folder / "table").lengths.sum()), torch.device("cpu")

    def found(seconds):
        results = {}
        for name, side in sides.items():
            last = side.last
            results[name] = {"error": side.error} if side.error else {
                "seconds": list(seconds[name]), "padding": 1 - tokens * last["passes"] / last["slots"],
                **{key: last[key] for key in ("steps", "syncs", "memory_gib", "loss")}}
        tell(results)

    with contextlib.ExitStack() as stack:
        sides = {}
        for name, way in ways.items():
            sides[name] = Side(name, way, folder, device)
            stack.callback(sides[name].stop)
        for side in sides.values():
            side.receive()
        asks = {name: side.ask for name, side in sides.items()}
        if device.type == "cuda":       # who gives memory back after a pass must ask for it again in the next one
            measure.alternate(asks, 0, cpu)
            if sum(side.last.get("reserved", 0) for side in sides.values()) < 0.9 * torch.cuda.mem_get_info()[1]:
                for side in sides.values():
                    side.word = "keep"
        measure.alternate(asks, rounds, cpu, after=found)


# ---------------------------------------------------------------------------------------------------------------------
# The check that comes first


def check_agreement(way, folder, device):
    """(loss, largest relative difference of a gradient); SystemExit unless Trainer's step and ours are the same."""
    ids, data = ids_of(folder), SpeechSamples(Table(folder / "table"), ids_of(folder))
    samples = [data[i] for i in range(min(way["batch"], len(data)))]
    (theirs, expected), (ours, found) = (side(way, samples, ids, folder, device) for side in (trainer_loss, our_loss))
    loss_tolerance, tolerance = TOLERANCE[way["bf16"]]
    assert expected.keys() == found.keys() and len(found) > 20, "the two sides train different weights"
    apart = {name: ((found[name] - g).norm() / g.norm()).item() for name, g in expected.items()}
    worst = max(apart, key=apart.get)
    if not (abs(ours - theirs) <= loss_tolerance * abs(theirs) and apart[worst] <= tolerance):
        raise SystemExit(f"error: ours and Trainer DISAGREE, nothing was measured: loss {ours} and {theirs}, gradient "
                         f"of {worst} differs by {apart[worst]:.2g} of its length")
    return ours, apart[worst]


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def work_of(folder, shape, method):
    """What one pass over the samples is: {"tokens", "audio_seconds", "flops"}; only useful work, the same for all."""
    table = Table(folder / "table")
    lengths = table.lengths.astype(np.int64)
    return {"tokens": int(lengths.sum()), "audio_seconds": int(table.frames.sum()) / FRAME_RATE,
            "flops": v2.flops_per_pack(config_of(folder, shape), int(lengths.sum()), int(table.audio_targets.sum()),
                                          int(table.text_targets.sum()), int((lengths * (lengths + 1) // 2).sum()),
                                          method == "lora")}


def row_of(result, work, rate):
    """[step ms, tokens/s, audio s/s, share of the matmul rate, padding, syncs a step, GiB] of one side."""
    if "error" in result:
        return [None] * 7
    spent = measure.median(result["seconds"])["median"]
    return [round(spent / result["steps"] * 1000, 1), round(work["tokens"] / spent),
            round(work["audio_seconds"] / spent, 1), round(work["flops"] / spent / rate, 3),
            round(result["padding"], 3), round(result["syncs"], 1), round(result["memory_gib"], 2)]


def times(result, base):
    """Median over rounds of a result's seconds by the base's; its error, or None where the base failed."""
    if "error" in result or "error" in base:
        return result.get("error")
    return round(measure.ratio(base["seconds"], result["seconds"]), 2)


def step_row(name, way, result, base, work, rate):
    """One row of the table "step"."""
    return [way["shape"], way["method"], name, *row_of(result, work, rate), times(result, base)]


def lever_row(name, way, result, base, work, rate):
    """One row of the table "levers"."""
    step, tokens, *_, memory = row_of(result, work, rate)
    return [name, step, tokens, memory, times(result, base)]


TABLES = {"step": (COLUMNS, step_row, "ours"), "levers": (LEVER_COLUMNS, lever_row, "default")}     # whose base is what


def show(row, columns):
    """Print one row of a table, aligned, with its columns' names."""
    words = [f"{name} {value:,.3f}" if isinstance(value, float) else f"{name} {value}"
             for name, value in zip(columns[1:], row[1:]) if value is not None]
    print(" | ".join([f"{row[0]:<42}", *words]), flush=True)


def report_name(args):
    return "tts_kept" if args.keep_freed_memory else "tts"


def measure_ways(report, table, ways, folder, device, args):
    """Compare ways {name: settings} of one setup, and write the report after every round -> [what failed]."""
    columns, row, base = TABLES[table]
    way = ways[base]
    work, rate = work_of(folder, way["shape"], way["method"]), report["matmul_flops_per_second"]
    rows, results = report["tables"].get(table, {"rows": []})["rows"], report["results"]

    def tell(found):
        report["tables"][table] = {"columns": columns, "rows": rows + [
            row(name, way, result, found[base], work, rate) for name, result in found.items()]}
        report["results"] = results + [{**ways[name], "name": name, "table": table, **result, **work}
                                       for name, result in found.items()]
        measure.write_report(report_name(args), report, args.results_dir)

    compare(ways, folder, device, args.rounds, tell)
    for values in report["tables"][table]["rows"][len(rows):]:
        show(values, columns)
    return [f"{way['shape']}, {way['method']}, {result['name']}: {result['error']}"
            for result in report["results"][len(results):] if "error" in result]


# ---------------------------------------------------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=lambda text: text.split(","), help="sizes of the model, comma-separated, of "
                        f"{', '.join(SHAPES)} (default: tiny,small, on a GPU 3b)")
    parser.add_argument("--methods", type=lambda text: text.split(","), help="lora, full or both, comma-separated "
                        "(default: both, on a GPU lora)")
    parser.add_argument("--clips", type=int, help="samples of a round (default: 20, on a GPU 64)")
    parser.add_argument("--batch", type=int, help="samples of Trainer's batch; our packs hold as many, filled ones on "
                        "average (default: 4, on a GPU 8)")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes over the samples; the median counts")
    parser.add_argument("--fast", action="store_true", help="no levers, and Trainer in random order only (on a GPU "
                        "compiled, too)")
    parser.add_argument("--levers", type=lambda text: [int(n) for n in text.split(",") if n], help="numbers of the "
                        "levers to measure, from 0, comma-separated (default: all that this machine can show)")
    parser.add_argument("--seed", type=int, default=42, help="of lengths, texts and codes")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    parser.add_argument("--keep_freed_memory", action="store_true", help="CPU: all sides with an allocator that "
                        "keeps freed memory, as a GPU's does, not the system's default; the report is tts_kept")
    args = parser.parse_args(argv)
    if args.keep_freed_memory:
        measure.keep_freed_memory(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")      # with more, Trainer would spread a batch over them
    began, cuda = time.monotonic(), torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    shapes, methods = args.shapes or (["3b"] if cuda else ["tiny", "small"]), \
        args.methods or (["lora"] if cuda else ["lora", "full"])
    clips, batch = args.clips or (64 if cuda else 20), args.batch or (8 if cuda else 4)
    sides = {name: way for name, way in SIDES[device.type].items() if not (args.fast and way.get("sorted"))}
    chosen = {} if args.fast else {
        name: settings for i, (name, settings, *where) in enumerate(LEVERS)
        if device.type in (where or [device.type]) and (args.levers is None or i in args.levers)}
    setups = [{**sides["ours"], "shape": shape, "method": method, "bf16": cuda, "batch": batch}
              for shape, method in itertools.product(shapes, methods)]
    report = measure.new_report("a training step of Higgs-Audio V2: ours beside transformers' Trainer", device,
                                measure.command("tts", argv))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_samples(folder, clips, args.seed)
        table = Table(folder / "table")
        report |= {"clips": clips, "rounds": args.rounds, "seed": args.seed, "batch": batch,
                   "tokens_of_a_sample": {"least": int(table.lengths.min()), "most": int(table.lengths.max()),
                                          "mean": float(table.lengths.mean())},
                   "budget": token_budget(table.lengths, batch), "bf16": cuda,
                   "trainer_attention": trainer_attention(setups[0], device), "checks": [], "results": []}
        for way in [{**way, "shape": "tiny", "bf16": False} for way in setups[:len(methods)] if cuda] + setups:
            loss, apart = check_agreement(way, folder, device)
            report["checks"].append({**way, "loss": loss, "gradients_apart": apart})
            print(f"check      {way['shape']:<5} {way['method']} {'bf16' if way['bf16'] else 'float32':<7} | loss "
                  f"{loss:.4f} | gradients {apart:.1e} apart", flush=True)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
        rate = report["matmul_flops_per_second"] = measure.matmul_rate(device)
        print(f"matmul     {rate / 1e12:,.3f} TFLOP/s measured", flush=True)
        failed = []
        for way in setups:
            ways = {name: way | more for name, more in sides.items()}
            failed += measure_ways(report, "step", ways, folder, device, args)
        if chosen:
            way = {**setups[-1], "method": "lora" if cuda else "full"}
            ways = {"default": way} | {name: way | more for name, more in chosen.items()}
            failed += measure_ways(report, "levers", ways, folder, device, args)
    report["seconds"] = time.monotonic() - began
    print(f"wrote {measure.write_report(report_name(args), report, args.results_dir)} after {report['seconds']:.0f} s")
    if failed:
        raise SystemExit(f"error: failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
