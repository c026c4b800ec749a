"""What block diffusion's attention and head compute for nothing on a GPU, by count: parts of tiles, rows of padding.

    python bench/flex_tiles.py          # a minute on a CPU; writes bench/results/flex_tiles-cpu.json

tiles: share of pairs that attend in the tiles that FlexAttention visits, for orders of a row's tokens and sizes of a
tile; every order computes the same. masked: how many sizes the head's logits take in --steps steps when masked tokens
are filled up to a multiple, and how many rows that adds. Problems are those of bench/block_diffusion.py, packed.
"""
import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import block_diffusion, measure
from common.packing import PackOrder
from diffusion import blocks, dit, noise

TILES = ((128, 128), (128, 64), (64, 128), (64, 64))        # queries, keys
MULTIPLES = (1, 64, dit.ROW_STEP, 256, 512)
ROWS, BATCH = 100, 43       # rows whose tiles are counted; rows of a batch, about 128 problems
# {name: keys to sort a row's tokens by, from their document, block and half}
ORDERS = {"noisy copies, then clean tokens (as it is)": lambda doc, block, clean: (clean,),
          "by problem, noisy copies first": lambda doc, block, clean: (clean, doc),
          "by problem, clean tokens first": lambda doc, block, clean: (~clean, doc),
          "by problem and block": lambda doc, block, clean: (~clean, block, doc)}


def pairs_of(row, rows):
    """(doc, block, (S, S) bool of pairs that attend) of a row of blocks.Rows with its noisy copies."""
    batch = blocks.collate([row], 1, rows.length, rows.noisy_length, rows.documents.pad)
    at = batch.noisy.clamp(min=0)
    doc = torch.cat([batch.doc.gather(1, at).masked_fill(batch.noisy < 0, -1), batch.doc], 1)
    block = torch.cat([batch.block.gather(1, at), batch.block], 1)
    i = torch.arange(doc.shape[1])
    return doc[0].numpy(), block[0].numpy(), dit.attends(doc, block, rows.noisy_length)(0, 0, i[:, None], i).numpy()


def area(pairs, tile):
    """Pairs in the tiles that hold one that attends."""
    counts = np.add.reduceat(pairs, np.arange(0, len(pairs), tile[0]), axis=0, dtype=np.int64)
    return int((np.add.reduceat(counts, np.arange(0, len(pairs), tile[1]), axis=1) > 0).sum()) * tile[0] * tile[1]


def tiles(rows):
    """Rows of [order, percent of the visited pairs that attend for each of TILES]."""
    visited, attending, best = {name: np.zeros(len(TILES)) for name in ORDERS}, 0, np.zeros(len(TILES))
    for r in np.linspace(0, len(rows) - 1, ROWS).astype(int):
        doc, block, pairs = pairs_of(rows[r], rows)
        clean, doc = np.arange(len(doc)) >= rows.noisy_length, np.where(doc < 0, len(doc), doc)
        for name, keys in ORDERS.items():
            order = np.lexsort(keys(doc, block, clean))
            visited[name] += [area(pairs[np.ix_(order, order)], tile) for tile in TILES]
        attending += int(pairs.sum())
        members, areas = rows.members[r], []
        for order in itertools.islice(itertools.permutations(members), 24):
            rows.members[r] = list(order)
            pairs = pairs_of(rows[r], rows)[2]
            areas.append([area(pairs, tile) for tile in TILES])
        rows.members[r] = members
        best += np.min(areas, axis=0)
    visited["as it is, problems of a row in their best order"] = best
    return [[name, *(float(100 * attending / n) for n in areas)] for name, areas in visited.items()]


def masked(rows, steps, seed):
    """Rows of [multiple, sizes that come up, percent of rows added] of `steps` batches of training."""
    order, counts, epoch = PackOrder(np.ones(len(rows)), samples_per_pack=BATCH, seed=seed), [], 0
    while len(counts) < steps:
        for pack in range(min(order.packs_per_epoch - 1, steps - len(counts))):     # the last one may not be full
            batch = blocks.collate([rows[r] for r in order.window(epoch, pack, 1)], BATCH, rows.length,
                                   rows.noisy_length, rows.documents.pad)
            draws = noise.draw(seed, "train", len(counts), batch.n_groups, *batch.doc.shape)
            counts.append(len(noise.diffuse(batch, draws, block_diffusion.TOKENS.mask).rows))
        epoch += 1
    counts, found = np.array(counts), []
    for multiple in MULTIPLES:
        filled = -(-counts // multiple) * multiple
        found.append([multiple, len(set(filled.tolist())), float(100 * (filled.sum() / counts.sum() - 1))])
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=2048, help="to make rows of 512 tokens of")
    parser.add_argument("--steps", type=int, default=400, help="whose masked tokens are counted")
    parser.add_argument("--seed", type=int, default=42, help="of problems and noise")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    report = measure.new_report("what block diffusion computes for nothing on a GPU, by count", torch.device("cpu"),
                                measure.command("flex_tiles", argv))
    rows = blocks.make_rows(block_diffusion.make_documents(args.problems, 512, args.seed), range(args.problems), 512,
                            True, args.seed)
    report["tables"]["tiles"] = {"columns": ["order of a row's tokens", *(f"{q} x {k} (%)" for q, k in TILES)],
                                 "rows": tiles(rows)}
    report["tables"]["masked"] = {"columns": ["filled up to a multiple of", "sizes", "rows added (%)"],
                                  "rows": masked(rows, args.steps, args.seed)}
    for table in report["tables"].values():
        for row in table["rows"]:
            print(" | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row))
    print(f"wrote {measure.write_report('flex_tiles', report, args.results_dir)}")


if __name__ == "__main__":
    main()
