"""Likelihood of given texts by a block-diffusion model: a bound, from draws of the noise.

-log p(text) is at most what these numbers are the mean of (noise.py); in blocks of one token it is equal, and one draw
is enough. Each has the standard error of its draws.
"""
import math
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, flags
from common.distributed import UserError
from common.problems import settle
from diffusion import blocks, elbo, noise
from diffusion.choices import FILL, QUESTION, bound_range
from diffusion.problems import Problem, read_problems


@torch.no_grad()
def draws_of(solver, documents, draws, batch_rows, seed):
    """(n, draws) float64: nats of each document's targets in every draw of the noise. solver: answers.Solver."""
    layout, device = solver.layout, solver.model.embed.weight.device
    reach = bound_range(layout)
    draws = 1 if reach[0] == reach[1] else draws        # always all masked: every draw is the same
    found, order = np.zeros((len(documents), draws)), documents.lengths.argsort(kind="stable")
    for first in range(0, len(order), batch_rows):
        numbers = order[first:first + batch_rows]
        rows = blocks.make_rows(documents, numbers, int(documents.lengths[numbers].max()), pack=False)
        batch = blocks.collate([rows[r] for r in range(len(rows))], len(rows), rows.length, rows.noisy_length,
                               documents.pad)
        for draw in range(draws):
            numbers_drawn = noise.draw(seed, "validation", (first, draw), batch.n_groups, *batch.doc.shape)
            inputs = noise.diffuse(batch, numbers_drawn, solver.tokens.mask, reach)
            losses = elbo.weighted_losses(solver.model, inputs, device, solver.bf16).cpu()
            sums = torch.zeros(len(rows), dtype=torch.float64).index_add_(0, inputs.places // rows.length, losses)
            found[numbers, draw] = sums.numpy()
    return found


def errors(found):
    """(n,) standard errors of the means of draws_of; 0 where one draw is exact."""
    return found.std(1, ddof=1) / math.sqrt(found.shape[1]) if found.shape[1] > 1 else np.zeros(len(found))


def continuations(solver, pairs):
    """Documents of (name, ids of a context, ids behind it), of which only those behind it count. UserError.

    Places behind the text in its last block stay masked: nothing is said of them.
    """
    problems = [Problem(name, "", "", "", ids=[*context, *ids], given=len(context)) for name, context, ids in pairs]
    documents = blocks.make_documents(problems, solver.tokens, solver.layout)
    rest = documents.region == FILL
    documents.ids[rest] = solver.tokens.mask
    # --loss_on_question trains the context, too; here it is given
    documents.target[rest | (documents.region == QUESTION)] = False
    return documents


def report(args, folder, solver):
    """Print the bound of a file in the form that the model was trained on, and write those of its texts."""
    layout, tokens, bad = solver.layout, solver.tokens, []
    if layout.system == "chat":
        from diffusion import chats
        problems = chats.read(args.bound, folder, tokens, bad)
    else:
        problems = read_problems(args.bound, args.split, layout.system, layout.strip_calculator, bad)
    documents = blocks.make_documents(problems[:args.limit or len(problems)], tokens, layout, bad, args.bound)
    if said := settle(bad, ("too_long",) if args.drop_too_long else (), hint=blocks.hint(bad)):
        print(f"data       dropped: {said}")
    found = draws_of(solver, documents, args.draws, args.batch_size, args.seed)
    counts, error = documents.per_document(documents.target & (documents.region != FILL)), errors(found)
    total, spread = found.mean(1).sum() / counts.sum(), math.sqrt((error ** 2).sum()) / counts.sum()
    exact = found.shape[1] == 1 and bound_range(layout)[0] == 1
    summary = {"texts": len(found), "tokens": int(counts.sum()), "exact": exact, "nats_per_token": float(total),
               "nats_stderr": float(spread), "bits_per_token": float(total) / math.log(2),
               "bits_stderr": float(spread) / math.log(2)}
    texts = [{"name": p.name, "nats": float(nats), "stderr": float(e), "tokens": int(n)}
             for p, nats, e, n in zip(documents.problems, found.mean(1), error, counts)]
    output = Path(args.output or folder.parent / f"bound-{folder.name}-{Path(args.bound).stem}.json")
    checkpoint.prepare_output(output.parent, "--output")
    checkpoint.write_json(output, {"checkpoint": str(folder), "settings": flags.stored(args),
                                   "summary": summary, "texts": texts})
    print(f"bound      {'nll =' if exact else 'nll <='} {total:.4f} +- {spread:.4f} nats/token, "
          f"{summary['bits_per_token']:.4f} +- {summary['bits_stderr']:.4f} bits/token; {summary['tokens']} tokens in "
          f"{len(found)} texts, {found.shape[1]} draws of the noise\ntexts      {output}")


def request_bounds(solver, requests, draws, batch_rows, seed):
    """([(minus the bound of -log p(continuation | context), False)] of lm-eval's requests, how many are too long).

    False: whether greedy decoding would write it is not looked at. A context that is too long loses its first tokens, as
    in the harness's own models; a continuation that has no room by itself gets minus infinity. UserError for an empty
    one.
    """
    pairs, numbers, most, cut = [], [], solver.layout.max_length, 0
    bounds = [-math.inf] * len(requests)
    for number, request in enumerate(requests):
        context, text = request.args[:2]
        if solver.layout.prompt:
            context = solver.layout.prompt.replace("{question}", context)
        ids = solver.tokens.encode(text)
        if not ids:
            raise UserError(f"request {number}: its continuation is empty")
        head = blocks.head_of(solver.tokens.encode(context), solver.tokens, solver.layout)
        cut += len(head) + len(ids) > most
        if len(ids) < most:
            numbers.append(number)
            pairs.append((f"request {number}", head[-(most - len(ids)):], ids))
    if pairs:
        found = draws_of(solver, continuations(solver, pairs), draws, batch_rows, seed).mean(1)
        for number, nats in zip(numbers, found):
            bounds[number] = -float(nats)
    return [(value, False) for value in bounds], cut
