"""Questions to answers: what the sampler is given, the regions it writes, their text, scores."""
import re
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from common.distributed import UserError
from diffusion import sampler, weights
from diffusion.blocks import head_of, pieces
from diffusion.choices import EXECUTION, PLAN, Layout
from diffusion.problems import load_tokenizer

# in a text; -$5 is one, the minus of 5-$3 no sign
NUMBER = re.compile(r"(?:(?<![\d)$%])-\$?)?\d[\d,]*(?:\.\d+)?")


def question_state(problem, tokens, layout):
    """What is given before the first generated region: (context, (pinned ids, their first
    position)).

    context: (3, n) int64 ids, position, block of clean tokens. Raises UserError when the question
    is too long.
    """
    if problem.ids:
        return ids_state(problem.name, problem.ids[:problem.given], layout)
    if token := tokens.smuggled(problem.question):
        raise UserError(f"{problem.name}: its text holds the special token {token}; remove it")
    text = pieces(problem, layout)[0]
    if layout.system != "hdp":
        return text_state(problem.name, text, tokens, layout)
    ids = tokens.encode(text)
    if len(ids) > layout.question_budget:
        raise UserError(f"{problem.name}: its question has {len(ids)} tokens, more than "
                        f"--question_budget {layout.question_budget}")
    at = np.arange(len(ids))
    block = at // layout.block_size if layout.flat else np.zeros(len(at), np.int64)
    return np.stack([ids, at, block]), ([tokens.plan], layout.start(PLAN))


def text_state(name, text, tokens, layout):
    """question_state of a gsm8k prompt as it stands. UserError, with `name`, without room."""
    return ids_state(name, head_of(tokens.encode(text), tokens, layout), layout)


def ids_state(name, ids, layout):
    """question_state of all the ids that stand before an answer. UserError without room."""
    head = np.array(ids)
    if len(head) >= layout.max_length:
        raise UserError(f"{name}: its question has {len(head)} tokens, no room in --max_length "
                        f"{layout.max_length}")
    whole = len(head) - len(head) % layout.block_size
    at = np.arange(whole)
    return np.stack([head[:whole], at, at // layout.block_size]), (head[whole:].tolist(), whole)


def room(first_position, region, layout):
    """Blocks that may be generated in a region whose first block starts at first_position."""
    if layout.system != "hdp":
        return (layout.max_length - first_position) // layout.block_size
    budget = {PLAN: layout.plan_budget, EXECUTION: layout.execution_budget}[region]
    return budget // layout.region_block(region)


def finish_region(ids, pinned, end):
    """Generated ids -> (the same, only end tokens behind the first end token, was there one)."""
    for i in range(pinned, len(ids)):
        if ids[i] == end:
            return [*ids[:i], *[end] * (len(ids) - i)], True
    return list(ids), False


def execution_state(context, plan, tokens, layout):
    """question_state of the second region: the context with the finished plan's ids behind it."""
    at = np.arange(len(plan))
    block = context[2].max(initial=-1) + 1 + at // layout.region_block(PLAN)
    return (np.concatenate([context, [plan, layout.start(PLAN) + at, block]], axis=1),
            ([tokens.execution], layout.start(EXECUTION)))


def region_text(ids, pinned, tokens):
    """A region's text up to its end, without pinned ids; hdp's <|answer|> becomes GSM8K's ####."""
    body = list(ids[pinned:])
    if tokens.end in body:
        body = body[:body.index(tokens.end)]
    if tokens.answer in body:
        at = body.index(tokens.answer)
        return f"{tokens.decode(body[:at]).strip()}\n#### {tokens.decode(body[at + 1:]).strip()}"
    return tokens.decode(body).strip()


class Solver(NamedTuple):
    """A model that answers, and how it samples."""
    model: nn.Module
    tokens: object              # problems.Tokens
    layout: Layout
    how: sampler.Sampling
    bf16: bool = False


def load_solver(args, how):
    """(checkpoint folder, Solver) of flags of model_flags. how: Sampling. Raises UserError."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here")
    folder = weights.find_checkpoint(args.checkpoint, args.pick)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, about = weights.load_checkpoint(folder, args.ema)
    layout = Layout(**about["layout"])
    tokens = load_tokenizer(folder, layout.system, layout.end_token)
    return folder, Solver(model.to(device), tokens, layout, how, args.bf16)


def answer_batch(solver, states, seed, show=None):
    """A Solver's answers to problems with these question_state states -> list of dicts. seed: of
    what is drawn.

    show(number, "plan" or "text", the text so far): called behind every block. The dicts hold text,
    hdp's also plan; forwards, the network passes; tokens, generated ones up to and with the end
    token; ended, whether the end token came in every region.
    """
    tokens, layout, device = solver.tokens, solver.layout, solver.model.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    answers = [{"forwards": 0, "tokens": 0, "ended": True} for _ in states]
    for region in (PLAN, EXECUTION) if layout.system == "hdp" else (PLAN,):
        name = "plan" if layout.system == "hdp" and region == PLAN else "text"
        skip = [len(ids) for _, (ids, _) in states]
        rooms = [room(first, region, layout) for _, (_, first) in states]

        def progress(i, ids, name=name, skip=skip):
            if show:
                show(i, name, region_text(ids, skip[i], tokens))
        with torch.autocast(device.type, torch.bfloat16, enabled=solver.bf16):
            written = sampler.generate(solver.model, states, rooms, layout.region_block(region),
                                       tokens.end,
                                       solver.how, generator, progress)
        finished = [finish_region(w.ids, given, tokens.end)[0] for w, given in zip(written, skip)]
        for answer, w, ids, given in zip(answers, written, finished, skip):
            body = ids[given:]
            answer[name] = region_text(ids, given, tokens)
            answer["forwards"] += w.forwards
            answer["tokens"] += body.index(tokens.end) + 1 if w.ended else len(body)
            answer["ended"] &= w.ended
        if name == "plan":
            states = [execution_state(context, ids, tokens, layout)
                      for (context, _), ids in zip(states, finished)]
    return answers


def score(text, answer):
    """(strict, flexible) of a generated text against the final number.

    strict is openai/grade-school-math's rule: the number right behind `#### `, commas removed, must
    be the same text. flexible: the last number anywhere has the same value.
    """
    gold = answer.replace(",", "")
    marked = re.search(r"#### (-?[0-9.,]+)", text)
    strict = marked is not None and marked[1].replace(",", "") == gold
    numbers = NUMBER.findall(text)
    return strict, bool(numbers) and float(re.sub("[,$]", "", numbers[-1])) == float(gold)
