"""Validation by answers: some held-out problems are answered by the averaged weights; a few are
kept block by block.

Each rank answers its share on its own, so that ranks which wait for nobody may take as many passes
as they need. The time is bounded by the number of problems and their longest answer. Sampling is
certain (temperature 0, all tokens of probability 0.9 and more in a pass), so that numbers of
different steps compare.
"""
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from common import checkpoint, distributed, tensor_files
from diffusion import weights
from diffusion.answers import Solver, answer_batch, question_state, score
from diffusion.sampler import Sampling

SHOWN = 4           # problems whose answers are kept, block by block
FOLDER = "answers"  # in OUTPUT_DIR


def choose(rows, n, tokens, seed):
    """[(Problem, its question_state)] of n held-out problems of blocks.Rows, by the seed."""
    documents = rows.documents
    numbers = sorted(number for members in rows.members for number in members)
    chosen = np.random.default_rng((seed, 4)).permutation(numbers)[:n]
    return [(problem, question_state(problem, tokens, documents.layout))
            for problem in (documents.problems[number] for number in chosen)]


def accuracy(world, model, how, asked, tokens):
    """({"eval/accuracy": strict, ...}, answers to the first SHOWN with their text behind every
    block). Collective.

    model: the network, sharded or not, in eval mode, with the weights to judge. how: elbo.Eval.
    asked: of choose.
    """
    began, answers = time.monotonic(), []
    whole = whole_model(model)
    solver = Solver(whole, tokens, how.rows.documents.layout,
                    Sampling("confidence", temperature=0.0), how.bf16)
    mine = asked[world.rank::world.size]
    for first in range(0, len(mine), how.batch_rows):
        batch, growth = mine[first:first + how.batch_rows], {}

        def show(number, part, text, growth=growth):
            growth.setdefault(number, []).append([part, text])
        # lengths change with every block: compiled layers would be compiled again for each
        with torch.compiler.set_stance("force_eager"):
            written = answer_batch(solver, [state for _, state in batch], how.seed, show)
        for number, ((problem, _), answer) in enumerate(zip(batch, written)):
            strict, flexible = score(answer["text"], problem.answer)
            answers.append(answer | {"name": problem.name, "question": problem.question,
                                     "answer": problem.answer,
                                     "strict": strict, "flexible": flexible,
                                     "growth": growth.get(number, [])})
    del whole, solver
    of_ranks = distributed.gather_objects(world, answers)
    answers = [of_ranks[i % world.size][i // world.size] for i in range(len(asked))]
    means = {name: float(np.mean([answer[name] for answer in answers]))
             for name in ("strict", "flexible", "ended",
                                                                                    "forwards")}
    right = means["strict"]
    return {"eval/accuracy": right, "eval/accuracy_flexible": means["flexible"],
            "eval/accuracy_stderr": math.sqrt(right * (1 - right) / len(answers)),
            "eval/ended": means["ended"], "eval/nfe": means["forwards"],
            "eval/accuracy_seconds": time.monotonic() - began}, answers[:SHOWN]


@torch.no_grad()
def whole_model(model):
    """The model itself, or a copy that is not sharded, whose passes need no other rank."""
    distributed.reshard(model)
    parameters = dict(model.named_parameters())
    if not any(isinstance(p, DTensor) for p in parameters.values()):
        return model
    device = weights.local(next(model.parameters())).device
    with torch.device("meta"):
        copy = weights.module_of(model.config).Model(model.config)
    copy = copy.to_empty(device=device).eval()
    copy.tie()
    for name, parameter in copy.named_parameters():
        parameter.copy_(tensor_files.whole(parameters[name]))
    return copy


def write(output_dir, step, answers):
    """OUTPUT_DIR/answers/step-N.json for the report, of answers of accuracy()."""
    folder = Path(output_dir) / FOLDER
    checkpoint.prepare_output(folder)
    checkpoint.write_json(folder / f"step-{step}.json", {"step": step, "answers": answers})
