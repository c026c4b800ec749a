"""Likelihoods of a block-diffusion model: a bound for the texts of a file, and lm-eval-harness.

    python diffusion/evaluate.py --checkpoint out --bound test.jsonl      # nats and bits per token
    python diffusion/evaluate.py --checkpoint out --tasks gsm8k           # pip install lm_eval

-log p(text) is at most the mean of the bound's draws, within its standard error. With blocks of one
token it is equal, and one draw is enough. Generation tasks (generate_until) get greedy answers; of
the harness's settings only `until` is used. Likelihood tasks (loglikelihood) get the bound of each
text. A model trained with --chat gets a task's text as the user's turn.
"""
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is next to this folder

import numpy as np
import torch

from core import checkpoint, cli, dist
from core.cli import UserError, require
from core.json_files import Problems
from diffusion import blocks, choices, elbo
from diffusion.problems import Problem
from diffusion.sample_bd3lm import (Sampling, answer, answer_flags, check_flags, ids_state,
                                    load_solver)


def build_parser():
    p = cli.Parser("Bound likelihoods, or run tasks of lm-eval-harness.")
    answer_flags(p)
    p.set_defaults(order="confidence")
    task = p.add_mutually_exclusive_group(required=True)
    task.add_argument("--bound", help="bound the likelihood of a file's answers", metavar="FILE")
    task.add_argument("--tasks", help="names of lm-eval's tasks, or YAML files of tasks", nargs="+")
    p.flag("--draws", 16, "of the noise for a bound", ("be at least 2", lambda v: v >= 2))
    p.flag("--num_fewshot", 0, "solved examples before each question")
    return p


def continuations(solver, pairs):
    """Documents of (name, ids of a context, ids after it); only the latter count. Positions after
    the text in its last block stay masked. Raises UserError."""
    problems = [Problem(name, "", "", "", ids=[*context, *ids], prompt_length=len(context))
                for name, context, ids in pairs]
    documents = blocks.make_documents(problems, solver.tokens, solver.layout, bad := [])
    Problems().add(bad).settle()
    rest = documents.region == choices.FILL
    documents.ids[rest] = solver.tokens.mask
    # --loss_on_question also trains the context, which is given here
    documents.target[rest | (documents.region == choices.QUESTION)] = False
    return documents


@torch.no_grad()
def draw_bounds(solver, documents, draws, batch_rows, seed):
    """(n, draws) float64: nats of each document's targets in every draw of the noise."""
    device, t_range = solver.model.embed.weight.device, choices.bound_range(solver.layout)
    how = elbo.Eval(None, solver.tokens, batch_rows, draws, seed, solver.bf16)
    lengths = documents.counts["clean"]
    nats, order = np.zeros((len(documents), draws)), lengths.argsort(kind="stable")
    for first in range(0, len(order), batch_rows):
        numbers = order[first:first + batch_rows]
        rows = blocks.make_rows(documents, numbers, int(lengths[numbers].max()), False)
        batch = blocks.collate(rows.members, len(rows), rows)
        groups = documents.counts["groups"][numbers]
        for draw in range(draws):
            losses = elbo.losses_of_draw(
                solver.model, how, batch, "validation", (first, draw), t_range, device)
            nats[numbers, draw] = np.add.reduceat(
                losses.cpu().numpy(), groups.cumsum() - groups)
    return nats


def bound_file(args, folder, solver):
    """Print the bound of a file's answers, as in a validation -> (file name, results)."""
    layout, tokens, device = solver.layout, solver.tokens, solver.model.embed.weight.device
    problems, bad = blocks.read_data(args.bound, "test", layout, folder, tokens)
    documents = blocks.make_documents(
        problems[:args.limit or len(problems)], tokens, layout, bad, args.bound)
    if dropped := Problems(("too_long",) * args.drop_too_long).add(bad).settle():
        print(f"data       dropped: {dropped}")
    n, longest = len(documents), int(documents.counts["clean"].max())
    rows = blocks.make_rows(documents, np.arange(n), longest, True)
    values = elbo.bound(dist.World(device=device), solver.model, elbo.Eval(
        rows, tokens, args.batch_size, args.draws, args.seed, args.bf16), int)
    values |= {"texts": n, "tokens": int(rows.table["text"].sum())}
    print(f"bound      nll {'<=' if args.draws > 1 else '='} {values['eval/nll']:.4f} +- "
          f"{values.get('eval/stderr', 0):.4f} nats/token, {values['eval/bits_per_token']:.4f} "
          f"bits/token; {values['tokens']} tokens in {n} texts, {args.draws} draws")
    return f"bound-{folder.name}-{Path(args.bound).stem}.json", {"summary": values}


def harness_model(base, solver, batch_size, draws):
    """Object of a subclass of `base`, lm_eval's LM. draws: of the noise for each bound."""
    tokens, layout = solver.tokens, solver.layout

    def context_ids(text):
        if layout.prompt:
            return blocks.prompt_ids(text, tokens, layout)
        return [tokens.bos, *tokens.encode(text)]

    class BlockDiffusion(base):
        too_long = 0        # requests without room: answers are "", contexts lose first tokens

        def generate_until(self, requests, disable_tqdm=False):
            """Texts in the order of the requests; their args are (prompt, {"until": [text]})."""
            states, texts = {}, [""] * len(requests)
            for number, request in enumerate(requests):
                try:
                    states[number] = ids_state("", context_ids(request.args[0]), layout)
                except UserError:
                    self.too_long += 1
            for number, record in zip(states, answer(solver, list(states.values()), batch_size)):
                text, until = record["text"], requests[number].args[1].get("until") or []
                for stop in filter(None, [until] if isinstance(until, str) else until):
                    text = text.partition(stop)[0]
                texts[number] = text
            return texts

        def loglikelihood(self, requests, disable_tqdm=False):
            """[(minus the bound of -log p(continuation | context), False)] of the requests. Whether
            it is the greedy answer is not checked. A context that is too long loses its first
            tokens; a continuation that is too long gets minus infinity."""
            pairs, values = {}, [-math.inf] * len(requests)
            for number, request in enumerate(requests):
                ids, head = tokens.encode(request.args[1]), context_ids(request.args[0])
                require(ids, f"request {number}: its continuation is empty")
                left = layout.max_length - len(ids)
                self.too_long += len(head) > left
                if left > 0:
                    pairs[number] = f"request {number}", head[-left:], ids
            if pairs:
                documents = continuations(solver, pairs.values())
                nats = draw_bounds(solver, documents, draws, batch_size, seed=0)
                for number, mean in zip(pairs, nats.mean(1)):
                    values[number] = -float(mean)
            return [(value, False) for value in values]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            raise UserError("this task scores texts without a question: not trained on")
    return BlockDiffusion()


def run_tasks(args, folder, solver):
    """Run lm-eval's tasks, print their scores -> (file name, results)."""
    cli.require_package("lm_eval", "--tasks")
    import lm_eval
    from lm_eval.api.model import LM
    layout = solver.layout
    require(layout.system != "hdp", f"--checkpoint {folder}: an hdp model writes a plan first; "
                                    "give one of --system gsm8k or chat")
    model = harness_model(LM, solver, args.batch_size, args.draws)
    output = lm_eval.simple_evaluate(
        model=model, tasks=args.tasks, num_fewshot=args.num_fewshot, limit=args.limit or None,
        bootstrap_iters=0, log_samples=False)
    for task, scores in output["results"].items():
        print(task, scores)
    print(f"too long   {model.too_long} questions")
    return f"lm-eval-{folder.name}.json", {
        "lm_eval": lm_eval.__version__, "too_long": model.too_long,
        "results": json.loads(json.dumps(output["results"], default=str))}


def main(argv=None):
    args = cli.parse(build_parser(), check_flags, argv)
    folder, solver = load_solver(args, Sampling(args.order, args.threshold, temperature=0.0))
    if choices.bound_range(solver.layout) != choices.FULL:
        args.draws = 1      # all tokens are masked, so all draws are equal
    name, values = (bound_file if args.bound else run_tasks)(args, folder, solver)
    path = Path(args.output or folder.parent / name)
    checkpoint.prepare_folder(path.parent, "--output")
    checkpoint.write_json(path, {
        "checkpoint": str(folder), "settings": cli.remove_secrets(vars(args)), **values})
    print(f"results    {path}")


if __name__ == "__main__":
    main()
