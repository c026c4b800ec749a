"""How fast does our SFT step train, beside transformers' Trainer and TRL's SFTTrainer on the same model and samples?

    python bench/sft.py                         # CPU, a small model: meant for 2 cores and less than 8 minutes
    python bench/sft.py --shape qwen3-4b --methods full,lora    # one GPU of 141 GB
    python bench/sft.py --parts steps64         # only: how long are 64 steps of 128 label samples?

Each way is a process of its own that loads the same random weights and the same tokenised samples and then trains
whole optimizer steps: loading, collating, forward, backward, clipping, fused AdamW. Trainer and SFTTrainer run their
own train(). The ways take turns, and in the same turn all train the same set of samples, in the same order where their
way of batching has none of its own; on a GPU, where their memory does not fit side by side, a process lives for one
turn. Before that each takes two steps on the same four samples: losses and gradient norms must agree.

Samples are random tokens. short: the label task's lengths, log-normal, mean 47 tokens, 95th percentile 106, of which 2
or 3 are trained. long: chats, log-normal, mean 500, sigma 0.8, at most 2,048, the last half trained; on a CPU 0.4 of
that. Each set has lengths of the whole distribution (stratified). tokens_per_second counts tokens of samples, no
padding. Matrix FLOPs are those that the samples need: padding and logits that no loss asks for are not work done.

Writes bench/results/sft-DEVICE.json after every round; other shapes and parts write files of their own names. A way
that fails is recorded, the others go on, and if it was not for time or memory the exit status is 1.
"""
import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transformers

from bench import measure
from bench.sft_ways import ANSWER_S, LIGER, MIXES, SHAPES, SIZES, STEPS64, make_data, make_model, trl, work
from distill import packed_lm

LOSS_TOLERANCE, NORM_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-2}, {"cpu": 1e-4, "cuda": 5e-2}       # relative

LIMITS = ("not run: out of time", "out of memory", "not installed")     # other errors are bugs

COMPARE = {     # what to call it: who trains, how; in this order, as time may run out
    "ours": ("ours", {}),
    "Trainer": ("trainer", {}),
    "ours, packed": ("ours", {"packed": True}),
    "Trainer, by length": ("trainer", {"sorted": True}),
    "Trainer, no padding": ("trainer", {"flat": True}),
    "SFTTrainer": ("trl", {}),
    "SFTTrainer, padding_free": ("trl", {"flat": True})}
FOR_GPUS = {"Trainer, compiled": ("trainer", {"compile": True}), "Trainer, liger": ("trainer", {"liger": True})}
LEVERS = {      # what is changed in "ours" or in "ours, packed"
    "DDP instead of FSDP2": ("ours", {"parallel": "ddp"}),
    "logits of all positions": ("ours", {"all_logits": True}),
    "dense mask instead of documents": ("ours", {"dense": True}),
    "foreach AdamW instead of fused": ("ours", {"foreach": True}),
    "gradient checkpointing": ("ours", {"recompute": "all"}),
    "selective checkpointing": ("ours", {"recompute": "selective"}),
    "layers compiled": ("ours", {"packed": True, "compile": True})}
LEVER_WAYS = {name: COMPARE[name] for name in ("ours", "ours, packed")} | LEVERS
STEPS64_WAYS = {"ours": ("ours", {}), "ours, packed to 4,096": ("ours", {"packed": 4096}), "Trainer": ("trainer", {})}


# ---------------------------------------------------------------------------------------------------------------------
# One process a way, in turn


def start_process(function, *args):
    """(process, pipe) of function(pipe, *args)."""
    # forked, it has all imports already; but CUDA does not survive a fork
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args))
    process.start()
    theirs.close()
    return process, ours


def prepare(pipe, command, folder, shape, seed):
    """Describe the machine and make the model, in a process of its own: a parent that has computed cannot be forked."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    report = measure.new_report("training speed of SFT, random weights and tokens", device, command)
    weights = make_model(folder / "model", shape, seed)
    pipe.send(report | {"matmul_flops_per_second": measure.matmul_rate(device), "layer_weights": weights})


class Trainer:
    """One way to train, in a process of its own, as its parent sees it."""

    def __init__(self, job, who, options):
        self.process, self.pipe = start_process(work, job, who, options)

    def answer(self):
        """What the process says next; {"error"} when it failed, died or says nothing."""
        try:
            return self.pipe.recv() if self.pipe.poll(ANSWER_S) else {"error": f"no answer in {ANSWER_S} s"}
        except (EOFError, ConnectionError):
            return {"error": "the process died"}

    def turn(self, watch=False):
        """Train a set, or a step to watch -> {"seconds", "counts", "memory_gib", ...} or {"error"}."""
        try:
            self.pipe.send(watch)
        except ConnectionError:
            return {"error": "the process died"}
        return self.answer()

    def end(self):
        self.process.kill()
        self.process.join()


def check_agreement(found, device):
    """SystemExit unless all {way: [(loss, gradient norm, trained tokens) of each step]} agree with the first one."""
    first, wanted = next(iter(found.items()))
    for name, steps in found.items():
        for (loss, norm, targets), (loss0, norm0, targets0) in zip(steps, wanted, strict=True):
            if not (abs(loss - loss0) <= LOSS_TOLERANCE[device] * abs(loss0) and targets == targets0
                    and abs(norm - norm0) <= NORM_TOLERANCE[device] * norm0):
                raise SystemExit("error: the ways DISAGREE in (loss, gradient norm, trained tokens) of two steps; "
                                 f"nothing more is measured\n{first}: {wanted}\n{name}: {steps}")


def run(ways, job, cuda, rounds, end, tell):
    """Measure ways in turn -> {way: {"checked", "turns", "memory_gib", "host_syncs"}, {"error"} where it failed}.

    tell: called with what is known so far after every way's turn.
    """
    alive, found = {}, {name: {"turns": [], "host_syncs": None} for name in ways}

    def step(name, turn):
        """Start a process where there is none, and let it train; its error, or None."""
        who, options = ways[name]
        if name not in alive:
            if who == "trl" and trl is None or options.get("liger") and not LIGER:
                return "not installed"
            if time.monotonic() > end:
                return "not run: out of time"
            alive[name] = Trainer(job, who, options)
            said = alive[name].answer()         # it has checked itself and warmed up
            if "error" in said:
                return said["error"]
            found[name]["checked"] = said["checked"]
            check_agreement({n: r["checked"] for n, r in found.items() if "checked" in r}, "cuda" if cuda else "cpu")
        if turn < 0:
            return None
        said = alive[name].turn()
        if "error" in said:
            return said["error"]
        found[name]["turns"].append({key: said[key] for key in ("seconds", "cpu_seconds", "steps")} | said["counts"])
        found[name]["memory_gib"] = said["memory_gib"]
        if cuda:
            found[name]["host_syncs"] = alive[name].turn(watch=True).get("host_syncs")
            alive.pop(name).end()
        return None

    try:
        for turn in range(0 if cuda else -1, rounds):       # on a CPU all are ready and agree before the clock starts
            for name in ways if turn % 2 == 0 else reversed(ways):
                if "error" not in found[name] and (error := step(name, turn)):
                    print(f"{name}: {error}", file=sys.stderr)
                    found[name]["error"] = error.strip().splitlines()[-1][:100]
                    if name in alive:
                        alive.pop(name).end()
                if turn >= 0:
                    tell(found)
    finally:
        for trainer in alive.values():
            trainer.end()
    return found


def summary(turns, config, weights, lora, matmul):
    """One way's turns as numbers -> {name: number}."""
    sums = Counter()
    for turn in turns:
        sums.update(turn)
    seconds, steps = sums["seconds"], sums["steps"]
    flops = packed_lm.flops(weights, config, sums["tokens"], sums["targets"], sums["pairs"], lora)
    return {"tokens_per_second": sums["tokens"] / seconds, "samples_per_second": sums["samples"] / seconds,
            "padding": 1 - sums["tokens"] / sums["slots"], "step_seconds": seconds / steps,
            "trained_per_step": sums["targets"] / steps, "of_matmul": flops / seconds / matmul}


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def times_as_fast(way, other):
    """Median over rounds of useful tokens a second of one way by those of another; None where one was not measured."""
    way, other = ([turn["seconds"] / turn["tokens"] for turn in r["turns"]] for r in (way, other))
    return measure.ratio(way, other) if way and other else None


def compare_table(found, cuda):
    """Every way beside ours."""
    rows = []
    for name, r in found.items():
        rows.append([name, *[None] * (7 + cuda), r.get("error", "no turn yet")] if not r["turns"] else [
            name, r["tokens_per_second"], r["samples_per_second"], r["trained_per_step"], 100 * r["padding"],
            r["step_seconds"], r["memory_gib"], 100 * r["of_matmul"], *[r["host_syncs"]] * cuda,
            times_as_fast(found["ours"], r)])
    return {"columns": ["", "tokens/s", "samples/s", "trained tokens/step", "padding %", "s/step", "peak GiB",
                        "% of matmul rate", *["host syncs/step"] * cuda, "ours is faster by"], "rows": rows}


def lever_table(found):
    """What each change alone does to ours."""
    rows = []
    for name, (_, options) in LEVERS.items():
        r, base = found[name], "ours, packed" if options.get("packed") else "ours"
        rows.append([name, base, *[None] * 2, r.get("error", "no turn yet")] if not r["turns"] else [
            name, base, r["tokens_per_second"], r["memory_gib"], times_as_fast(r, found[base])])
    return {"columns": ["changed alone", "in", "tokens/s", "peak GiB", "times as fast"], "rows": rows}


def steps64_table(found):
    """The label task's run."""
    samples, rows = STEPS64.turn * STEPS64.samples * STEPS64.accumulation, []
    for name, r in found.items():
        rows.append([name, *[None] * 6, r.get("error", "no turn yet")] if not r["turns"] else [
            name, r["turns"][0]["steps"], r["tokens_per_second"], r["samples_per_second"], 100 * r["padding"],
            100 * r["of_matmul"], r["memory_gib"], STEPS64.turn * STEPS64.step_tokens / r["tokens_per_second"]])
    return {"columns": ["", "steps timed", "tokens/s", "samples/s", "padding %", "% of matmul rate", "peak GiB",
                        f"s for {samples:,} samples of {STEPS64.mean} tokens"], "rows": rows}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, help="size of the model (default: qwen3-4b on a GPU, else small)")
    parser.add_argument("--methods", default="full", help="full or lora or both, comma-separated")
    parser.add_argument("--parts", help="short, long, levers, steps64, comma-separated (default: short,long and, on a "
                                        "GPU, steps64, else levers)")
    parser.add_argument("--ways", type=lambda text: [int(n) for n in text.split(",")], help="short, long: numbers of "
                        "the ways to compare, from 0, comma-separated; ours, 0, is always among them (default: all)")
    parser.add_argument("--rounds", type=int, help="turns of each way (default: 2 on a GPU, else 3)")
    parser.add_argument("--minutes", type=float, default=9, help="no process begins later; it is recorded as not run")
    parser.add_argument("--seed", type=int, default=42, help="of weights, samples and their order")
    parser.add_argument("--work_dir", help="where the model goes while this runs (default: a temporary folder)")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")      # with more, Trainer would spread a batch over them
    end, cuda = time.monotonic() + 60 * args.minutes, torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    usual = "qwen3-4b" if cuda else "small"
    shape, rounds = args.shape or usual, args.rounds or (2 if cuda else 3)
    mixes, parts = MIXES["cuda" if cuda else "cpu"], args.parts or f"short,long,{'steps64' if cuda else 'levers'}"
    file_name = "_".join(["sft", *([shape] if shape != usual else []), *(args.parts or "").split(",")]).rstrip("_")
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        folder = Path(folder)
        process, pipe = start_process(prepare, measure.command("sft", argv), folder, shape, args.seed)
        report = pipe.recv()
        process.join()
        matmul = report["matmul_flops_per_second"]
        config = transformers.AutoConfig.from_pretrained(folder / "model", trust_remote_code=False)
        report["settings"] = {"shape": shape, **dict(zip(SIZES, SHAPES[shape])), "rounds": rounds, "seed": args.seed,
                              "precision": "bf16 compute, float32 weights (bf16 where frozen)" if cuda else "float32",
                              "head_share": config.hidden_size * config.vocab_size / (
                                  config.hidden_size * config.vocab_size + report["layer_weights"])}
        report["runs"] = {}
        print(f"machine    {report['device']}, {report['threads']} threads, matmul {matmul / 1e12:,.3f} TFLOP/s")
        failed = []
        for method in args.methods.split(","):
            for part in parts.split(","):
                mix = STEPS64 if part == "steps64" else mixes.get(part, mixes["short"])
                ways = COMPARE | (FOR_GPUS if cuda else {})
                chosen = {way: how for i, (way, how) in enumerate(ways.items()) if i in (0, *(args.ways or [i]))}
                ways = {"levers": LEVER_WAYS, "steps64": STEPS64_WAYS}.get(part, chosen)
                turns, name = 1 if part == "steps64" else rounds, f"{method}, {part}"
                job = argparse.Namespace(folder=folder, data=folder / f"{method}-{part}", method=method, mix=mix,
                                         sets=1 if cuda else turns, seed=args.seed)
                make_data(job, config.vocab_size, device)

                def tell(found, name=name, part=part, mix=mix, lora=method == "lora"):
                    for result in found.values():
                        if result["turns"]:
                            result |= summary(result["turns"], config, report["layer_weights"], lora, matmul)
                    report["runs"][name] = {"mix": vars(mix), "ways": found}
                    report["tables"][name] = lever_table(found) if part == "levers" else steps64_table(found) \
                        if part == "steps64" else compare_table(found, cuda)
                    measure.write_report(file_name, report, args.results_dir)

                found = run(ways, job, cuda, turns, end, tell)
                print_table(name, report["tables"][name])
                failed += [f"{name}, {way}: {result['error']}" for way, result in found.items()
                           if result.get("error", LIMITS[0]) not in LIMITS]
    print(f"wrote {measure.write_report(file_name, report, args.results_dir)}")
    if failed:
        raise SystemExit(f"error: failed: {'; '.join(failed)}")


def print_table(name, table):
    """A table for the eye."""
    print(f"\n{name}: {' | '.join(column or 'way' for column in table['columns'])}")
    for name, *values in table["rows"]:
        words = [f"{v:10,.3f}" if isinstance(v, float) else f"{'' if v is None else v:>10}" for v in values]
        print(" | ".join([f"{name:<32}", *words]), flush=True)


if __name__ == "__main__":
    main()
