"""What many ranks cost, without starting them: how even packs are side by side, and messages of a save and of watching.

    python bench/scale.py           # 20 s on a CPU; writes bench/results/scale-cpu.json

balance: mean over max of the tokens of packs that run side by side, averaged over the micro-steps of an epoch, of the
trainer's own packing of speech-like lengths. messages: what the functions that send them say for so many ranks.
"""
import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from bench import measure
from common import parallel, plan, tensor_files, watchdog
from common.packing import PackOrder

RANKS = (2, 8, 64, 512)
NODE = 8        # ranks of a node
LIMIT_S = 600   # --collective_timeout's default


def lengths_of(samples):
    """Tokens of clips of 1 to 30 s, 25 frames a second and text: lognormal, as speech data is."""
    seconds = np.clip(np.random.default_rng(0).lognormal(1.6, 0.6, samples), 1, 30)
    return (25 * seconds + 40).astype(np.int64)


def balance(samples):
    """Rows of [how packs are made, samples, percent on each of RANKS]."""
    lengths, rows = lengths_of(samples), []
    ways = {"4 samples": {"samples_per_pack": 4}, "4 samples, --group_by_length": {"samples_per_pack": 4,
            "group_by_length": True}, "1 sample, --group_by_length": {"samples_per_pack": 1, "group_by_length": True},
            "8,192 tokens": {"tokens_per_pack": 8192}}
    for name, how in ways.items():
        tokens = plan.epoch_sums(PackOrder(lengths, seed=0, **how), [0], lengths)
        tokens = tokens[:len(tokens) // RANKS[-1] * RANKS[-1]]          # the last step has empty packs
        budget = how.get("tokens_per_pack", 0)
        rows.append([name, samples, *(100 * plan.packing_report(tokens, ranks, budget=budget)["balance"]
                                      for ranks in RANKS)])
    return rows


def gathered(ranks):
    """Percent of a checkpoint that a rank gathers at a save under HSDP, at most: what writers of its node own."""
    writers = tensor_files.writers(ranks)
    return 100 * max(sum(rank // NODE == node for rank in writers) for node in range(-(-ranks // NODE))) / len(writers)


def depth(ranks):
    """How many messages lie one behind the other between the furthest rank and rank 0."""
    def up(rank):
        parent, _ = parallel.tree(rank, ranks)
        return 0 if parent is None else 1 + up(parent)
    return max(map(up, range(ranks)))


def messages():
    """Rows of [what, number on each of RANKS]."""
    counts = {
        "a save: random states that a rank takes in, at most":
            lambda n: max(len(parallel.tree(rank, n)[1]) for rank in range(n)),
        "the same, one behind the other": depth,
        "a save: ranks that write, and report to rank 0": lambda n: len(tensor_files.writers(n)),
        "a save, HSDP: percent of the checkpoint that a rank gathers": gathered,
        "watching: requests to the store, per second": lambda n: 4 * n / watchdog.beat_seconds(n, LIMIT_S),
        "a hang: requests of each rank to the store": lambda n: 4}
    return [[what, *map(count, RANKS)] for what, count in counts.items()]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[40_000, 400_000], help="clips to pack")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    began = time.monotonic()
    report = measure.new_report("what many ranks cost, counted", torch.device("cpu"), measure.command("scale", argv))
    columns = [f"{ranks} ranks" for ranks in RANKS]
    report["tables"] = {
        "balance": {"columns": ["packs of", "samples", *columns], "rows": sum(map(balance, args.samples), [])},
        "messages": {"columns": ["what", *columns], "rows": messages()}}
    for table in report["tables"].values():
        for what, *values in table["rows"]:
            print(f"{what:<62}", *(f"{value:>9,.4g}" for value in values))
    report["seconds"] = time.monotonic() - began
    print(f"wrote {measure.write_report('scale', report, args.results_dir)} after {report['seconds']:.0f} s")


if __name__ == "__main__":
    main()
