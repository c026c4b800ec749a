"""Answer problems with a block-diffusion model: texts, exact match, network passes, speed.

    python diffusion/sample_bd3lm.py --checkpoint out --test_file test.jsonl
    python diffusion/sample_bd3lm.py --checkpoint out --question "Ben has 3 boxes of 6 pens. ..."

hdp writes first the plan, then the execution with <|answer|>. Strict exact match takes the number
after #### (hdp: after <|answer|>) and compares texts as openai/grade-school-math does; flexible
takes the last number in the text and compares values. NFE: network passes a problem needed.

Blocks are unmasked one after the other, given cached keys and values of the clean tokens before
them; many problems at a time, each with its own context. Those that reach their end token leave the
batch.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is next to this folder

from core import cli
from core.cli import require
from diffusion import choices


def build_parser():
    p = cli.Parser("Answer problems with a block-diffusion model.")
    choices.answers(p, "first_hitting")
    flag = p.flag
    flag("--test_file", None, "problems of the trained form: JSONL, JSON, dataset folder, hub name")
    flag("--question", None, "questions to answer", nargs="+", metavar="TEXT")
    flag("--chat", None, 'chats to answer: lines of {"messages": ...}', metavar="FILE")
    flag("--temperature", 0.0, "0 = the likeliest token, 1 = as the model says")
    flag("--top_p", 1.0, "nucleus: draw from the likeliest tokens up to this share")
    flag("--min_accuracy", 0.0, "exit status 1 below this share of right answers", metavar="SHARE")
    flag("--show", 3, "answers to print")
    return p


def check_flags(args, world_size):
    """Raise UserError for values that make no sense, or would do nothing."""
    cli.at_least_one(args, "batch_size")
    cli.zero_or_more(args, "limit show seed temperature")
    cli.share(args, "min_accuracy")
    require(not args.min_accuracy or args.test_file,
            "--min_accuracy needs --test_file, problems with answers")
    cli.check_values(args, "top_p threshold", lambda v: 0 < v <= 1, "be above 0, up to 1")
    require(args.top_p == 1 or args.temperature > 0,
            "--top_p does nothing at --temperature 0; set --temperature 1")
    require(args.threshold == 0.9 or args.order == "confidence",
            "--threshold needs --order confidence")
    require(sum(map(bool, [args.test_file, args.question, args.chat])) == 1,
            "give one of --test_file, --question and --chat")
    require(not args.output or not Path(args.output).is_dir(),
            f"--output {args.output} is a folder; give a file")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = cli.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import math
import re
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from core import checkpoint, dist, metrics
from core.cli import UserError, printable, problem_text
from diffusion.blocks import pieces, prompt_ids
from diffusion.choices import EXECUTION, PLAN, QUESTION, Layout, read_layout
from diffusion.problems import Problem, load_tokenizer, read_chat_prompts, read_problems

# in a text; -$5 is one, the minus of 5-$3 no sign
NUMBER = re.compile(r"(?:(?<![\d)$%])-\$?)?\d[\d,]*(?:\.\d+)?")


class Generated(NamedTuple):
    """What generate wrote for one problem."""
    ids: list           # whole blocks, pinned ids first, up to that of the end token
    forwards: int       # network passes (NFE), those that fill the cache aside
    ended: bool         # whether the end token came


class Sampling(NamedTuple):
    """How blocks are filled."""
    order: str = "first_hitting"    # a pass fills a random token; "confidence": all sure ones
    threshold: float = 0.9          # confidence: probability a token must have, but the surest
    temperature: float = 1.0        # 0: the likeliest token
    top_p: float = 1.0              # draw from the fewest likeliest tokens that reach this share


def prefill(model, tokens, position, block, known):
    """[(keys, values)] of clean context. tokens, position, block: (B, P) ints; known: bool."""
    device, config = tokens.device, model.config
    dtype = model.embed.weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    size = len(tokens), config.kv_heads, 0, config.head_size
    empty = torch.zeros(size, device=device, dtype=dtype)
    past = [(empty, empty)] * config.layers
    if not tokens.shape[1]:
        return past
    seen = (block[:, :, None] >= block[:, None, :]) & known[:, None, :]
    seen |= torch.eye(tokens.shape[1], dtype=torch.bool, device=device)
    return model.extend(tokens, position, seen[:, None], past)[1]


def pick(logits, how, generator):
    """Draw one token from each row of logits (n, V) -> (ids (n,), their probabilities (n,))."""
    logits = logits.double()
    plain = logits.softmax(-1)
    if how.temperature == 0:
        ids = logits.argmax(-1)
    else:
        probabilities = (logits / how.temperature).softmax(-1)
        if how.top_p < 1:
            ordered, index = probabilities.sort(-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered >= how.top_p] = 0
            probabilities = torch.zeros_like(probabilities).scatter(-1, index, ordered)
        ids = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return ids, plain.gather(-1, ids[:, None])[:, 0]


def unmask(model, hidden, tokens, masked, how, generator):
    """Write some of the masked tokens (B, T), in place; hidden (B, T, H). At least one a row."""
    if how.order == "first_hitting":
        chance = torch.rand(tokens.shape, generator=generator, device=tokens.device)
        chance.masked_fill_(~masked, -1)
        chosen = masked & (chance == chance.amax(1, keepdim=True))
        tokens[chosen] = pick(model.logits(hidden[chosen]), how, generator)[0]
    else:
        proposed, sure = tokens.clone(), torch.full_like(tokens, -1, dtype=torch.float64)
        proposed[masked], sure[masked] = pick(model.logits(hidden[masked]), how, generator)
        rank = sure.argsort(1, descending=True).argsort(1)
        chosen = masked & ((rank < 1) | (sure >= how.threshold))
        tokens[chosen] = proposed[chosen]
    masked &= ~chosen


def keep(rows, known, past):
    """(known, past [(keys, values)]) with these rows of the batch alone, a list of numbers."""
    rows = torch.tensor(rows, dtype=torch.int64, device=known.device)
    return known[rows], [(k[rows], v[rows]) for k, v in past]


@torch.no_grad()
def generate(model, states, rooms, block_size, end, how=Sampling(), generator=None):
    """[Generated] of every problem: blocks until `end` comes or its room is used up.

    model: DiT in eval mode. states: (context, (pinned, first)) of each problem. context: (3, n)
    ints, ids, positions and block numbers of clean tokens. pinned: ids that the first block begins
    with, fewer than block_size; first: its position. rooms: blocks each may have. generator: on the
    model's device.
    """
    contexts, pinned = zip(*states)
    device, config = model.embed.weight.device, model.config
    number, width = len(contexts), max((c.shape[1] for c in contexts), default=0)
    padded = np.zeros((4, number, width), np.int64)         # ids, position, block, known
    for row, context in enumerate(contexts):
        padded[:3, row, :context.shape[1]], padded[3, row, :context.shape[1]] = context, 1
    tokens, position, block, known = torch.from_numpy(padded).to(device)
    known = known.bool()
    starts = torch.tensor([first for _, first in pinned], device=device)
    active = [i for i in range(number) if rooms[i] > 0]
    written, forwards, ended = [[] for _ in contexts], [0] * number, [False] * number
    past = prefill(model, tokens, position, block, known)
    known, past = keep(active, known, past)
    done = 0
    while active:
        rows = torch.tensor(active, device=device)
        new = torch.full((len(active), block_size), config.mask_id, device=device)
        for row, i in enumerate(active if done == 0 else ()):
            given = pinned[i][0]
            new[row, :len(given)] = torch.tensor(given, dtype=torch.int64, device=device)
        masked = new == config.mask_id
        given = ~masked
        at = starts[rows, None] + done * block_size + torch.arange(block_size, device=device)
        seen = torch.cat([known, torch.ones_like(masked)], 1)
        seen = seen[:, None, None].expand(-1, -1, block_size, -1)
        while masked.any():
            for row, waits in enumerate(masked.any(1).tolist()):
                forwards[active[row]] += waits
            hidden, _ = model.extend(new, at, seen, past)
            unmask(model, hidden, new, masked, how, generator)
        done += 1
        stop = ((new == end) & ~given).any(1).tolist()
        left = []
        for row, i in enumerate(active):
            written[i] += new[row].tolist()
            ended[i] = stop[row]
            if not stop[row] and done < rooms[i]:
                left.append(row)
        # the finished block once more, now clean, for its keys and values
        if left:
            own = model.extend(new, at, seen, past)[1]
            past = [(torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))
                    for (k, v), (new_k, new_v) in zip(past, own)]
        known, past = keep(left, torch.cat([known, torch.ones_like(given)], 1), past)
        active = [active[row] for row in left]
    return [Generated(*parts) for parts in zip(written, forwards, ended)]


# ---- Questions in


def question_state(problem, tokens, layout):
    """What is given before the first generated region: (context, (pinned ids, first's position)).

    context: (3, n) int64 ids, position, block of clean tokens. UserError for a question too long.
    """
    if problem.ids:
        return ids_state(problem.name, problem.ids[:problem.given], layout)
    if token := tokens.find_control_token(problem.question):
        raise UserError(f"{problem.name}: its text holds the special token {token}; remove it")
    ids = tokens.encode(pieces(problem, layout)[0])
    if layout.system != "hdp":
        return ids_state(problem.name, prompt_ids(ids, tokens, layout), layout)
    if len(ids) > layout.question_budget:
        raise UserError(f"{problem.name}: its question has {len(ids)} tokens, more than "
                        f"--question_budget {layout.question_budget}")
    at = np.arange(len(ids))
    return np.stack([ids, at, np.zeros_like(at)]), ([tokens.plan], layout.start(PLAN))


def ids_state(name, ids, layout):
    """question_state of all the ids that come before an answer. UserError without room."""
    if len(ids) >= layout.max_length:
        raise UserError(f"{name}: its question has {len(ids)} tokens, no room in --max_length "
                        f"{layout.max_length}")
    whole = len(ids) - len(ids) % layout.block_size
    at = np.arange(whole)
    return np.stack([np.array(ids)[:whole], at, at // layout.block_size]), (ids[whole:], whole)


def room(first_position, region, layout):
    """Blocks that may be generated in a region whose first block starts at first_position."""
    _, most, size = layout.regions[region]
    return (layout.start(region) + most - first_position) // size


def execution_state(context, plan, tokens, layout):
    """question_state of the second region: the context and then the finished plan's ids."""
    at = np.arange(len(plan))
    block = context[2].max(initial=-1) + 1 + at // layout.regions[PLAN][2]
    return (np.concatenate([context, [plan, layout.start(PLAN) + at, block]], axis=1),
            ([tokens.execution], layout.start(EXECUTION)))


# ---- Answers out


def finish_region(ids, pinned, end):
    """Generated ids with only end tokens after the first end token."""
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


class Solver(NamedTuple):
    """A model that answers, and how it samples."""
    model: nn.Module
    tokens: object              # problems.Tokens
    layout: Layout
    how: Sampling
    bf16: bool = False


def load_solver(args, how):
    """(checkpoint folder, Solver that samples like `how`) of a script's flags. Raises UserError."""
    from diffusion import published
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here")
    folder = published.find_checkpoint(args.checkpoint, args.pick)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, about = published.load_checkpoint(folder, args.ema)
    layout = read_layout(about["layout"])
    tokens = load_tokenizer(folder, layout.system, layout.end_token)
    return folder, Solver(model.to(device), tokens, layout, how, args.bf16)


def answer_batch(solver, states, seed):
    """A Solver's answers to problems with these question_state states -> list of dicts: text, hdp's
    also plan; forwards, the network passes; tokens, generated ones up to and with the end token;
    ended, whether it came in every region.
    """
    tokens, layout, device = solver.tokens, solver.layout, solver.model.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    answers = [{"forwards": 0, "tokens": 0, "ended": True} for _ in states]
    for region in sorted(layout.regions.keys() - {QUESTION}):
        name = "plan" if layout.system == "hdp" and region == PLAN else "text"
        rooms = [room(first, region, layout) for _, (_, first) in states]
        with torch.autocast(device.type, torch.bfloat16, enabled=solver.bf16):
            written = generate(solver.model, states, rooms, layout.regions[region][2],
                               tokens.end, solver.how, generator)
        following = []
        for answer, made, (context, (given, _)) in zip(answers, written, states):
            ids = finish_region(made.ids, len(given), tokens.end)
            body = ids[len(given):]
            answer[name] = region_text(ids, len(given), tokens)
            answer["forwards"] += made.forwards
            answer["tokens"] += body.index(tokens.end) + 1 if made.ended else len(body)
            answer["ended"] &= made.ended
            if name == "plan":
                following.append(execution_state(context, ids, tokens, layout))
        states = following
    return answers


def score(text, answer):
    """(strict, flexible) of a generated text against the final number: the one after `#### ` is
    the same text, commas removed (openai/grade-school-math); the last one has the same value.
    """
    gold = answer.replace(",", "")
    marked = re.search(r"#### (-?[0-9.,]+)", text)
    strict = marked is not None and marked[1].replace(",", "") == gold
    numbers = NUMBER.findall(text)
    return strict, bool(numbers) and float(re.sub("[,$]", "", numbers[-1])) == float(gold)


# ---- The script


def answer_all(solver, problems, args):
    """([dict] of the problems, in order; seconds the model took). args: the script's flags."""
    states, wrong = {}, []
    for i, problem in enumerate(problems):
        try:
            states[i] = question_state(problem, solver.tokens, solver.layout)
        except UserError as error:
            wrong.append(str(error))
    require(args.drop_too_long or not wrong, wrong and problem_text(wrong) +
            "\n  fix: shorten them, or --drop_too_long counts them as wrong")
    answers = [{"name": p.name, "question": p.question, "answer": p.answer, "text": "",
                "forwards": 0, "tokens": 0, "ended": False} for p in problems]
    # of like length side by side: less padding
    todo, done, seconds = sorted(states, key=lambda i: states[i][0].shape[1]), [], 0.0
    for first in range(0, len(todo), args.batch_size):
        batch, began = todo[first:first + args.batch_size], time.monotonic()
        seed = args.seed + 1_000_003 * (first // args.batch_size + 1)
        written = answer_batch(solver, [states[i] for i in batch], seed)
        seconds += time.monotonic() - began     # ids are on the host by now, so the device is done
        for i, answer in zip(batch, written):
            answers[i] |= answer
            done.append(answers[i])
        print(f"problems {len(done):>5}/{len(todo)} | "
              f"{sum(a['tokens'] for a in done) / seconds:>8,.1f} tok/s | "
              f"NFE {np.mean([a['forwards'] for a in done]):6.1f}")
    for problem, answer in zip(problems, answers):
        if problem.answer:
            answer["strict"], answer["flexible"] = score(answer["text"], problem.answer)
    return answers, seconds


def summarise(answers, seconds):
    """{name: number} over all answers; shares from 0 to 1."""
    n, written, passes = len(answers), *(sum(a[k] for a in answers) for k in ("tokens", "forwards"))
    total = {"problems": n, "too_long": sum(a["forwards"] == 0 for a in answers)}
    for rule in ("strict", "flexible", "ended"):
        if rule in answers[0]:
            total[rule] = share = sum(a[rule] for a in answers) / n
            total[f"{rule}_stderr"] = math.sqrt(share * (1 - share) / n)
    return total | {"nfe": passes / n, "tokens": written, "seconds": seconds, "tokens_per_forward":
                    written / max(1, passes), "tokens_per_second": written / max(seconds, 1e-9)}


def print_summary(total, output, least):
    """The last lines. total: of summarise; output: file of the answers; least: share of right."""
    if total["too_long"]:
        print(f"too long   {total['too_long']} questions do not fit and count as wrong")
    found, percent = [], metrics.percent
    if "strict" in total:       # the problems came with answers
        rates = [f"{rule} {total[rule]:.2%} +- {total[f'{rule}_stderr']:.2%}"
                 for rule in ("strict", "flexible")]
        print(f"accuracy   {', '.join(rates)} of {total['problems']} problems; "
              f"{total['ended']:.1%} ended by themselves")
        if total["strict"] < least:
            found.append(f"FAILED: not {percent(least)} of the answers are right")
        found.append(f"{percent(total['strict'])} of {total['problems']} problems were answered "
                     "right")
    print(f"speed      NFE {total['nfe']:.1f}, {total['tokens_per_forward']:.2f} tokens a pass, "
          f"{total['tokens_per_second']:,.1f} tok/s, {total['seconds']:.1f} s\nanswers    {output}")
    print(metrics.verdict_line(
        [*found, f"{percent(total['ended'])} of the answers ended by themselves"]))


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), check_flags, argv)
    folder, solver = load_solver(
        args, Sampling(args.order, args.threshold, args.temperature, args.top_p))
    layout, source = solver.layout, args.test_file or args.chat
    print(f"model      {folder}, {'averaged' if args.ema else 'last'} weights, {layout.system}, on "
          f"{solver.model.embed.weight.device}\nsampling   {solver.how}")
    if args.question:
        problems = [Problem(f"question {n}", text, "", "")
                    for n, text in enumerate(args.question, 1)]
    elif args.test_file:
        problems = read_problems(source, args.split, layout.system, layout.strip_calculator)
    else:
        require(layout.prompt,
                f"--chat: {folder} was trained without a chat template (--system chat)")
        problems = read_chat_prompts(source, folder, solver.tokens)
    problems, output = problems[:args.limit or len(problems)], args.output
    if source and not output:
        ending = "" if args.test_file else f"-{Path(source).stem}"
        output = folder.parent / f"answers-{folder.name}{ending}.json"
    if output:
        checkpoint.prepare_folder(Path(output).parent, "--output")
    print(f"problems   {len(problems)} from {source or 'the command line'}")
    answers, seconds = answer_all(solver, problems, args)
    total = summarise(answers, seconds)
    if output:
        checkpoint.write_json(output, {"checkpoint": str(folder), "settings": cli.stored(args),
                                       "summary": total, "answers": answers})
    for answer in answers[:args.show] if source else answers:
        scored = ""
        if "strict" in answer:
            word = "right by the last number" if answer["flexible"] else "wrong"
            scored = f": {'right' if answer['strict'] else word}, the answer is {answer['answer']}"
        print(f"-- {answer['name']}{scored}\n   question  {printable(answer['question'], 2000)}")
        for part in [part for part in ("plan", "text") if part in answer]:
            print(f"   {part:<9} {answer[part]!r}")
    print_summary(total, output or "above", args.min_accuracy)
    if args.min_accuracy and total["strict"] < args.min_accuracy:
        sys.exit(1)


if __name__ == "__main__":
    dist.single_process()       # from here on an error is one line
    main()
