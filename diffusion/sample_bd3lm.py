"""Answer problems with a block-diffusion model: texts, exact match, network passes (NFE), speed.

    python diffusion/sample_bd3lm.py --checkpoint out --test_file test.jsonl
    python diffusion/sample_bd3lm.py --checkpoint out --question "Ben has 3 boxes of 6 pens. ..."

An hdp model first writes the plan, then the execution with <|answer|>. An answer is right (strict)
if the number after #### (hdp: <|answer|>) is the same text, as in openai/grade-school-math.

Blocks are unmasked in order, with cached keys and values of the clean tokens before them, for many
problems at a time. Problems that reach their end token leave the batch.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is next to this folder

from core import cli
from core.cli import UserError, one_line, problem_text, require
from diffusion import choices


def build_parser():
    p = cli.Parser("Answer problems with a block-diffusion model.")
    choices.answers(p, "first_hitting")
    one = p.add_mutually_exclusive_group(required=True)
    one.add_argument("--test_file", help="problems or chats: file, dataset folder, hub name")
    one.add_argument("--question", help="questions to answer", nargs="+", metavar="TEXT")
    p.flag("--temperature", 0.0, "0 = greedy, 1 = the model's distribution")
    p.flag("--min_accuracy", 0.0, "exit status 1 below this share of right answers")
    return p


# parsed before torch is imported: --help and wrong flags answer at once
ARGS = cli.parse(build_parser(), choices.check_answers) if __name__ == "__main__" else None

import math
import re
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from core import checkpoint, dist, kernels, metrics
from core.problems import settle
from diffusion.blocks import pieces, prompt_ids, read_any
from diffusion.choices import EXECUTION, PLAN, QUESTION, Layout
from diffusion.problems import Problem, load_tokenizer


class Generated(NamedTuple):
    """The blocks written for one problem."""
    ids: list           # whole blocks, pinned ids first, up to the block of the end token
    forwards: int       # network passes (NFE), without those that fill the cache
    ended: bool         # True if the end token was generated


class Sampling(NamedTuple):
    """Settings of the sampler."""
    order: str = "first_hitting"    # a pass fills a random token; "confidence": all above threshold
    threshold: float = 0.9          # confidence: least probability, except for the most probable
    temperature: float = 1.0        # 0: greedy


class Solver(NamedTuple):
    """A model and its sampling settings."""
    model: nn.Module
    tokens: object              # problems.Tokens
    layout: Layout
    how: Sampling
    bf16: bool = False


def prefill(model, tokens, position, block, known):
    """[(keys, values)] of clean context. tokens, position, block: (B, P) ints; known: bool."""
    config = model.config
    empty = torch.zeros(len(tokens), config.kv_heads, 0, config.head_size, device=tokens.device,
                        dtype=kernels.stream_dtype(model.embed.weight))
    past = [(empty, empty)] * config.layers
    if not tokens.shape[1]:
        return past
    seen = (block[:, :, None] >= block[:, None, :]) & known[:, None, :]
    seen |= torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
    return model.extend(tokens, position, seen[:, None], past)[1]


def pick(logits, temperature, generator):
    """Sample one token from each row of logits (n, V) -> (ids (n,), their probabilities (n,))."""
    logits = logits.double()
    ids = logits.argmax(-1, keepdim=True)
    if temperature:
        ids = (logits / temperature).softmax(-1).multinomial(1, generator=generator)
    return ids[:, 0], logits.softmax(-1).gather(-1, ids)[:, 0]


def unmask(model, hidden, tokens, masked, how, generator):
    """Write some of the masked tokens (B, T) in place, at least one per row. hidden (B, T, H)."""
    if how.order == "first_hitting":
        chance = torch.rand(tokens.shape, generator=generator, device=tokens.device)
        chance.masked_fill_(~masked, -1)
        chosen = masked & (chance == chance.amax(1, keepdim=True))
        tokens[chosen] = pick(model.logits(hidden[chosen]), how.temperature, generator)[0]
    else:
        proposed, sure = tokens.clone(), torch.full_like(tokens, -1, dtype=torch.float64)
        found = pick(model.logits(hidden[masked]), how.temperature, generator)
        proposed[masked], sure[masked] = found
        rank = sure.argsort(1, descending=True).argsort(1)
        chosen = masked & ((rank < 1) | (sure >= how.threshold))
        tokens[chosen] = proposed[chosen]
    masked &= ~chosen


def keep(rows, known, past):
    """(known, past [(keys, values)]) of only these rows of the batch (list of numbers)."""
    rows = torch.tensor(rows, dtype=torch.int64, device=known.device)
    return known[rows], [(k[rows], v[rows]) for k, v in past]


@torch.no_grad()
def generate(model, states, rooms, block_size, end, how=Sampling(), generator=None):
    """[Generated] of every problem: blocks until the `end` token or its limit of blocks.

    model: in eval mode. states: (context, (pinned, first)) of each problem. context: (3, n) ints,
    ids, positions and block numbers of clean tokens. pinned: first ids of the first block, fewer
    than block_size; first: its position. rooms: most blocks of each problem.
    """
    contexts, pinned = zip(*states)
    device, mask = model.embed.weight.device, model.config.mask_id
    tokens, position, block, known = pad_sequence(
        [torch.from_numpy(np.vstack([c, np.ones_like(c[:1])])).T for c in contexts],
        batch_first=True).to(device).unbind(-1)
    starts = torch.tensor([first for _, first in pinned], device=device)
    active = [i for i, blocks in enumerate(rooms) if blocks > 0]
    written, forwards, ended = [[] for _ in contexts], [0] * len(contexts), [False] * len(contexts)
    known, past = keep(active, known > 0, prefill(model, tokens, position, block, known > 0))
    done = 0
    while active:
        new = torch.full((len(active), block_size), mask, device=device)
        for row, i in enumerate(active if done == 0 else ()):
            given = pinned[i][0]
            new[row, :len(given)] = torch.tensor(given, dtype=torch.int64, device=device)
        masked = new == mask
        given = ~masked
        at = starts[active, None] + done * block_size + torch.arange(block_size, device=device)
        seen = torch.cat([known, torch.ones_like(masked)], 1)
        seen = seen[:, None, None].expand(-1, -1, block_size, -1)
        while masked.any():
            for row, waits in enumerate(masked.any(1).tolist()):
                forwards[active[row]] += waits
            unmask(model, model.extend(new, at, seen, past)[0], new, masked, how, generator)
        done += 1
        stop = ((new == end) & ~given).any(1).tolist()
        for row, i in enumerate(active):
            written[i] += new[row].tolist()
            ended[i] = stop[row]
        left = [row for row, i in enumerate(active) if not stop[row] and done < rooms[i]]
        # run the finished, clean block again for its keys and values
        if left:
            new_past = model.extend(new, at, seen, past)[1]
            past = [(torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))
                    for (k, v), (new_k, new_v) in zip(past, new_past)]
        known, past = keep(left, torch.cat([known, torch.ones_like(given)], 1), past)
        active = [active[row] for row in left]
    return [Generated(*parts) for parts in zip(written, forwards, ended)]


def question_state(problem, tokens, layout):
    """State before the first generated region of a problem, for generate: (context, (pinned ids,
    position of the first generated block)). UserError if the question is too long.
    """
    if problem.ids:
        return ids_state(problem.name, problem.ids[:problem.given], layout)
    token = tokens.find_control_token(problem.question)
    require(not token, f"{problem.name}: its text holds the special token {token}; remove it")
    ids = tokens.encode(pieces(problem, layout)[0])
    if layout.system != "hdp":
        return ids_state(problem.name, prompt_ids(ids, tokens, layout), layout)
    require(len(ids) <= layout.question_budget,
            f"{problem.name}: its question has {len(ids)} tokens, more than --question_budget "
            f"{layout.question_budget}")
    at = np.arange(len(ids))
    return np.stack([ids, at, 0 * at]), ([tokens.plan], layout.start(PLAN))


def ids_state(name, ids, layout):
    """State after all ids before an answer. UserError without room."""
    require(len(ids) < layout.max_length, f"{name}: its question has {len(ids)} tokens, no room in "
                                          f"--max_length {layout.max_length}")
    whole = len(ids) - len(ids) % layout.block_size
    at = np.arange(whole)
    return np.stack([np.array(ids)[:whole], at, at // layout.block_size]), (ids[whole:], whole)


def execution_state(context, plan, tokens, layout):
    """State before the second region: the context and the finished plan's ids."""
    at = np.arange(len(plan))
    block = context[2].max(initial=-1) + 1 + at // layout.regions[PLAN][2]
    return (np.concatenate([context, [plan, layout.start(PLAN) + at, block]], axis=1),
            ([tokens.execution], layout.start(EXECUTION)))


def room(first_position, region, layout):
    """Most blocks of a region whose first generated block starts at first_position."""
    _, most, size = layout.regions[region]
    return (layout.start(region) + most - first_position) // size


def finish_region(ids, pinned, end):
    """Generated ids, with end tokens in place of everything after the first one."""
    first = ids.index(end, pinned) if end in ids[pinned:] else len(ids)
    return [*ids[:first], *[end] * (len(ids) - first)]


def region_text(ids, pinned, tokens):
    """A region's text up to its end, without pinned ids; hdp's <|answer|> becomes GSM8K's ####."""
    body = list(ids[pinned:])
    if tokens.end in body:
        body = body[:body.index(tokens.end)]
    if tokens.answer in body:
        at = body.index(tokens.answer)
        steps, answer = tokens.decode(body[:at]), tokens.decode(body[at + 1:])
        return f"{steps.strip()}\n#### {answer.strip()}"
    return tokens.decode(body).strip()


def load_solver(args, how):
    """(checkpoint folder, Solver with sampling `how`) for a script's flags. Raises UserError."""
    from diffusion import published
    folder = published.find_checkpoint(args.checkpoint)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, about = published.load_checkpoint(folder)
    layout = Layout(**about["layout"])
    tokens = load_tokenizer(folder, layout.system, layout.end_token)
    return folder, Solver(model.to(device), tokens, layout, how, args.bf16)


def answer(solver, states, batch_size, seed=0):
    """A Solver's answers to problems with these states -> list of dicts: text (hdp: also plan);
    forwards: network passes; tokens: number of generated tokens including the end token; ended:
    True if every region has its end token.
    """
    tokens, layout, device = solver.tokens, solver.layout, solver.model.embed.weight.device
    answers = [{"forwards": 0, "tokens": 0, "ended": True} for _ in states]
    # batches of similar lengths need less padding
    order = sorted(range(len(states)), key=lambda i: states[i][0].shape[1])
    for first in range(0, len(order), batch_size):
        batch = order[first:first + batch_size]
        generator = torch.Generator(device)
        generator.manual_seed(seed + 1_000_003 * (first // batch_size + 1))
        given = [states[i] for i in batch]
        for region in sorted(layout.regions.keys() - {QUESTION}):
            name = "plan" if layout.system == "hdp" and region == PLAN else "text"
            rooms = [room(start, region, layout) for _, (_, start) in given]
            with torch.autocast(device.type, torch.bfloat16, enabled=solver.bf16):
                written = generate(solver.model, given, rooms, layout.regions[region][2],
                                   tokens.end, solver.how, generator)
            for row, (made, (context, (pinned, _))) in enumerate(zip(written, given)):
                ids, found = finish_region(made.ids, len(pinned), tokens.end), answers[batch[row]]
                body = ids[len(pinned):]
                found[name] = region_text(ids, len(pinned), tokens)
                found["forwards"] += made.forwards
                found["tokens"] += body.index(tokens.end) + 1 if made.ended else len(body)
                found["ended"] &= made.ended
                if name == "plan":
                    given[row] = execution_state(context, ids, tokens, layout)
    return answers


def score(text, answer):
    """True if the number after `#### ` in a generated text equals the final number as text, without
    commas (openai/grade-school-math).
    """
    marked = re.search(r"#### (-?[0-9.,]+)", text)
    return marked is not None and marked[1].replace(",", "") == answer.replace(",", "")


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), choices.check_answers, argv)
    folder, solver = load_solver(args, Sampling(args.order, args.threshold, args.temperature))
    layout, tokens, output = solver.layout, solver.tokens, args.output
    print(f"model      {folder}, {layout.system}, on {solver.model.embed.weight.device}\n"
          f"sampling   {solver.how}")
    problems = [Problem(f"question {n}", text, "", "")
                for n, text in enumerate(args.question or (), 1)]
    if args.test_file:
        problems, bad = read_any(args.test_file, "test", layout, folder, tokens)
        settle(bad)
        output = output or folder.parent / f"answers-{folder.name}.json"
    problems, states, wrong = problems[:args.limit or len(problems)], {}, []
    require(not args.min_accuracy or problems[0].answer, f"--min_accuracy: {args.test_file} holds "
            "chats, of which no answer is right or wrong")
    if output:
        checkpoint.prepare_folder(Path(output).parent, "--output")
    for i, problem in enumerate(problems):
        try:
            states[i] = question_state(problem, tokens, layout)
        except UserError as error:
            wrong.append(str(error))
    require(args.drop_too_long or not wrong, wrong and problem_text(wrong) +
            "\n  fix: shorten them, or --drop_too_long counts them as wrong")
    answers = [{"name": p.name, "question": p.question, "answer": p.answer, "text": "",
                "forwards": 0, "tokens": 0, "ended": False} for p in problems]
    began = time.monotonic()
    for i, made in zip(states, answer(solver, list(states.values()), args.batch_size, args.seed)):
        answers[i] |= made
    seconds = time.monotonic() - began      # ids are on the host, so the device is done
    for problem, found in zip(problems, answers):
        if problem.answer:
            found["strict"] = score(found["text"], problem.answer)
    n, percent, clauses = len(answers), metrics.percent, []
    total = {name: sum(found[name] for found in answers) / n for name in answers[0]
             if name in ("strict", "ended", "forwards", "tokens")}
    total |= {"problems": n, "too_long": len(wrong), "seconds": seconds,
              "tokens_per_second": total["tokens"] * n / max(seconds, 1e-9)}
    if output:
        checkpoint.write_json(output, {"checkpoint": str(folder), "settings": cli.safe_flags(args),
                                       "summary": total, "answers": answers})
    for found in answers[:3] if args.test_file else answers:
        print(f"-- {found['name']}\n   question  {one_line(found['question'], 2000)}")
        print("".join(f"   {part:<9} {found[part]!r}\n" for part in ("plan", "text", "answer")
                      if found.get(part)), end="")
    if "strict" in total:       # the problems came with answers
        error = math.sqrt(total["strict"] * (1 - total["strict"]) / n)
        print(f"accuracy   strict {total['strict']:.2%} +- {error:.2%} of {n} problems, "
              f"{len(wrong)} of them too long")
        if total["strict"] < args.min_accuracy:
            clauses.append(f"FAILED: not {percent(args.min_accuracy)} of the answers are right")
        clauses.append(f"{percent(total['strict'])} of {n} problems were answered right")
    print(f"speed      NFE {total['forwards']:.1f}, {total['tokens_per_second']:,.1f} tok/s, "
          f"{seconds:.1f} s" + f"\nanswers    {output}" * bool(output))
    clauses.append(f"{percent(total['ended'])} of the answers ended by themselves")
    print(metrics.verdict_line(clauses))
    if clauses[0].startswith("FAILED"):
        sys.exit(1)


if __name__ == "__main__":
    dist.single_process()       # from here on an error is one line
    main()
