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


def answer_flags(p):
    """Add the flags of a script that generates answers."""
    p.flag("--checkpoint", None, "checkpoint, or OUTPUT_DIR with its best one", required=True)
    p.flag("--limit", 0, "use only the first N texts, 0 = all")
    p.switch("--drop_too_long", "leave out texts that are too long, and count them")
    p.flag("--order", "first_hitting", "a pass fills one random token, or all above --threshold",
           choices=("first_hitting", "confidence"))
    p.flag("--threshold", 0.9, "confidence: least probability of a token, 0 to 1", cli.PROBABILITY)
    p.flag("--batch_size", 64, "texts per batch", cli.COUNT)
    p.flag("--seed", 0, "seed of the sampling")
    p.switch("--bf16", "bfloat16 compute")
    p.flag("--device", None, "default: cuda if there is one", choices=("cpu", "cuda"))
    p.flag("--output", None, "JSON file for the results (default: next to the checkpoint)")


def build_parser():
    p = cli.Parser("Answer problems with a block-diffusion model.")
    answer_flags(p)
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--test_file", help="problems or chats: file, dataset folder, hub name")
    source.add_argument("--question", help="questions to answer", nargs="+", metavar="TEXT")
    p.flag("--temperature", 0.0, "0 = greedy, 1 = the model's distribution")
    p.flag("--min_accuracy", 0.0, "exit status 1 below this share of right answers", cli.SHARE)
    return p


def check_flags(args, world_size):
    """Raise UserError for values of these or evaluate.py's flags that are invalid or unused."""
    require(args.threshold == 0.9 or args.order == "confidence",
            "--threshold needs --order confidence")
    require(not getattr(args, "min_accuracy", 0) or args.test_file,
            "--min_accuracy needs --test_file, problems with answers")
    require(not (args.output and Path(args.output).is_dir()), f"--output {args.output} is a folder")


# parsed before torch is imported: --help and wrong flags answer at once
ARGS = cli.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import math
import re
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from core import checkpoint, dist, kernels, metrics
from core.json_files import Problems
from diffusion.blocks import prompt_ids, read_data
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


class Past:
    """Keys and values of the clean tokens before a block, for a Layer or transformers' attention.

    pairs: [(keys, values)] of every layer, (B, heads, P, D). new: those of the block."""

    def __init__(self, pairs):
        self.pairs, self.new = pairs, []

    def update(self, keys, values, layer, *_, **__):
        self.new.append((keys, values))
        return tuple(torch.cat(pair, dim=2) for pair in zip(self.pairs[layer], (keys, values)))


def extend(model, tokens, position, mask, past):
    """Hidden states (B, T, H) of one more block after cached ones, and its [(keys, values)].

    tokens, position (B, T). past: Past.pairs. mask (B, 1, T, P + T) bool: attention of the
    block's tokens, cached keys first."""
    past = Past(past)
    return model.run(tokens, position, [(tokens.shape[1], mask, None)] * 2, past), past.new


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
    return extend(model, tokens, position, seen[:, None], past)[1]


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
        proposed, confidence = tokens.clone(), torch.full_like(tokens, -1, dtype=torch.float64)
        proposed[masked], confidence[masked] = pick(model.logits(hidden[masked]), how.temperature,
                                                    generator)
        rank = confidence.argsort(1, descending=True).argsort(1)
        chosen = masked & ((rank < 1) | (confidence >= how.threshold))
        tokens[chosen] = proposed[chosen]
    masked &= ~chosen


@torch.no_grad()
def generate(model, states, limits, block_size, end, how=Sampling(), generator=None):
    """[Generated] of every problem: blocks until the `end` token or its limit of blocks.

    model: in eval mode. states: (context, (pinned, first)) of each problem. context: (3, n) ints,
    the ids, positions and block numbers of clean tokens. pinned: given ids at the start of the
    first block, fewer than block_size. first: its position. limits: most blocks, at least 1."""
    contexts, first_blocks = zip(*states)
    device, mask = model.embed.weight.device, model.config.mask_id
    tokens, position, block, known = pad_sequence(
        [torch.from_numpy(np.vstack([c, np.ones_like(c[:1])])).T for c in contexts],
        batch_first=True).to(device).unbind(-1)
    starts = torch.tensor([first for _, first in first_blocks], device=device)
    active, done = list(range(len(contexts))), 0
    written, forwards, ended = [[] for _ in active], [0] * len(active), [False] * len(active)
    known = known > 0
    past = prefill(model, tokens, position, block, known)
    while active:
        new = torch.full((len(active), block_size), mask, device=device)
        for row, (ids, _) in enumerate(first_blocks if done == 0 else ()):
            new[row, :len(ids)] = torch.tensor(ids, dtype=torch.int64, device=device)
        masked = new == mask
        is_pinned = ~masked
        first = starts[active, None] + done * block_size
        position = first + torch.arange(block_size, device=device)
        seen = torch.cat([known, torch.ones_like(masked)], 1)
        seen = seen[:, None, None].expand(-1, -1, block_size, -1)
        while masked.any():
            for row, is_unfinished in enumerate(masked.any(1).tolist()):
                forwards[active[row]] += is_unfinished
            hidden, _ = extend(model, new, position, seen, past)
            unmask(model, hidden, new, masked, how, generator)
        done += 1
        stop = ((new == end) & ~is_pinned).any(1).tolist()
        for row, i in enumerate(active):
            written[i] += new[row].tolist()
            ended[i] = stop[row]
        left = [row for row, i in enumerate(active) if not stop[row] and done < limits[i]]
        active = [active[row] for row in left]
        if left:    # run the finished, clean block again for its keys and values
            _, new_past = extend(model, new, position, seen, past)
            rows = torch.tensor(left, device=device)
            past = [(torch.cat([k, new_k], 2)[rows], torch.cat([v, new_v], 2)[rows])
                    for (k, v), (new_k, new_v) in zip(past, new_past)]
            known = torch.cat([known, torch.ones_like(is_pinned)], 1)[rows]
    return [Generated(*parts) for parts in zip(written, forwards, ended)]


def question_state(problem, tokens, layout):
    """State before the first generated region of a problem, for generate: (context, (pinned ids,
    position of the first generated block)). UserError if the question is too long."""
    if problem.ids:
        return ids_state(problem.name, problem.ids[:problem.prompt_length], layout)
    token = tokens.find_control_token(problem.question)
    require(not token, f"{problem.name}: its text holds the special token {token}; remove it")
    ids = prompt_ids(problem.question, tokens, layout)
    if layout.system != "hdp":
        return ids_state(problem.name, ids, layout)
    require(len(ids) <= layout.question_budget,
            f"{problem.name}: its question has {len(ids)} tokens, more than --question_budget "
            f"{layout.question_budget}")
    position = np.arange(len(ids))
    return np.stack([ids, position, 0 * position]), ([tokens.plan], layout.start(PLAN))


def ids_state(name, ids, layout):
    """State after all ids before an answer. UserError if they leave no room."""
    require(len(ids) < layout.max_length, f"{name}: its question has {len(ids)} tokens, no room in "
                                          f"--max_length {layout.max_length}")
    whole = len(ids) - len(ids) % layout.block_size
    position = np.arange(whole)
    context = np.stack([np.array(ids)[:whole], position, position // layout.block_size])
    return context, (ids[whole:], whole)


def execution_state(context, plan, tokens, layout):
    """State before the second region: the context and the finished plan's ids."""
    offset = np.arange(len(plan))
    block = context[2].max(initial=-1) + 1 + offset // layout.regions[PLAN][2]
    context = np.concatenate([context, [plan, layout.start(PLAN) + offset, block]], axis=1)
    return context, ([tokens.execution], layout.start(EXECUTION))


def blocks_left(first_position, region, layout):
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
        marker = body.index(tokens.answer)
        steps, answer = tokens.decode(body[:marker]), tokens.decode(body[marker + 1:])
        return f"{steps.strip()}\n#### {answer.strip()}"
    return tokens.decode(body).strip()


def load_solver(args, how):
    """(checkpoint folder, Solver with sampling `how`) for a script's flags. Raises UserError."""
    from diffusion import published
    folder = published.find_checkpoint(args.checkpoint)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, config = published.load_checkpoint(folder)
    layout = Layout(**config["layout"])
    tokens = load_tokenizer(folder, layout.system, layout.end_token)
    return folder, Solver(model.to(device), tokens, layout, how, args.bf16)


def answer(solver, states, batch_size, seed=0):
    """A Solver's answers to problems with these states: [{"text", "plan" (hdp), "forwards": passes,
    "tokens": generated ones with the end token, "ended": each region has its end token}]."""
    tokens, layout, device = solver.tokens, solver.layout, solver.model.embed.weight.device
    answers = [{"forwards": 0, "tokens": 0, "ended": True} for _ in states]
    # batches of similar lengths need less padding
    order = sorted(range(len(states)), key=lambda i: states[i][0].shape[1])
    for first in range(0, len(order), batch_size):
        batch = order[first:first + batch_size]
        generator = torch.Generator(device)
        generator.manual_seed(seed + 1_000_003 * (first // batch_size + 1))
        batch_states = [states[i] for i in batch]
        for region in sorted(layout.regions.keys() - {QUESTION}):
            name = "plan" if layout.system == "hdp" and region == PLAN else "text"
            limits = [blocks_left(start, region, layout) for _, (_, start) in batch_states]
            with torch.autocast(device.type, torch.bfloat16, enabled=solver.bf16):
                results = generate(solver.model, batch_states, limits, layout.regions[region][2],
                                   tokens.end, solver.how, generator)
            for row, (result, (context, (pinned, _))) in enumerate(zip(results, batch_states)):
                ids = finish_region(result.ids, len(pinned), tokens.end)
                body, record = ids[len(pinned):], answers[batch[row]]
                record[name] = region_text(ids, len(pinned), tokens)
                record["forwards"] += result.forwards
                record["tokens"] += body.index(tokens.end) + 1 if result.ended else len(body)
                record["ended"] &= result.ended
                if name == "plan":
                    batch_states[row] = execution_state(context, ids, tokens, layout)
    return answers


def score(text, answer):
    """True if the number after `#### ` in a text equals the final number, both without commas."""
    marked = re.search(r"#### (-?[0-9.,]+)", text)
    return marked is not None and marked[1].replace(",", "") == answer.replace(",", "")


def choose_problems(rows, n, tokens, seed):
    """[(Problem, its question_state)] for n held-out problems of Rows, by seed."""
    numbers = sorted(number for members in rows.members for number in members)
    chosen = np.random.default_rng((seed, 4)).permutation(numbers)[:n]
    problems = [rows.documents.problems[number] for number in chosen]
    return [(p, question_state(p, tokens, rows.documents.layout)) for p in problems]


def accuracy(world, model, task):
    """{"eval/accuracy": strict, "eval/nfe": passes} of a model in eval mode, without randomness.
    task: elbo.Eval. Collective. Under FSDP2 with --bf16 the weights are bf16; DDP computes in bf16
    from fp32."""
    how = Sampling("confidence", temperature=0.0)
    solver = Solver(model, task.tokens, task.rows.documents.layout, how, task.bf16)
    problems, states = zip(*choose_problems(task.rows, task.asked, task.tokens, task.seed))
    mine = slice(world.rank, None, world.size)
    # lengths change with every block, which would recompile compiled layers
    with dist.gather_weights(model), torch.compiler.set_stance("force_eager"):
        answers = answer(solver, states[mine], task.batch_rows)
    scores = [(score(record["text"], problem.answer), record["forwards"])
              for problem, record in zip(problems[mine], answers)]
    scores = [pair for of_rank in dist.all_gather(world, scores) for pair in of_rank]
    right, forwards = np.mean(scores, axis=0, dtype=float).tolist()
    return {"eval/accuracy": right, "eval/nfe": forwards}


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), check_flags, argv)
    folder, solver = load_solver(args, Sampling(args.order, args.threshold, args.temperature))
    layout, tokens, output = solver.layout, solver.tokens, args.output
    print(f"model      {folder}, {layout.system}, on {solver.model.embed.weight.device}")
    problems = [Problem(f"question {n}", text, "", "")
                for n, text in enumerate(args.question or (), 1)]
    if args.test_file:
        problems, bad = read_data(args.test_file, "test", layout, folder, tokens)
        Problems().add(bad).settle()
        require(not args.min_accuracy or all(problem.answer for problem in problems),
                f"--min_accuracy needs answers to compare with, and {args.test_file} has chats")
        output = output or folder.parent / f"answers-{folder.name}.json"
    if output:
        checkpoint.prepare_folder(Path(output).parent, "--output")
    records, states, too_long = [], {}, []
    for p in problems[:args.limit or len(problems)]:
        try:
            states[len(records)] = question_state(p, tokens, layout)
        except UserError as error:
            too_long.append(str(error))
        records.append({"name": p.name, "question": p.question, "answer": p.answer, "text": "",
                        "forwards": 0, "tokens": 0, "ended": False})
    require(args.drop_too_long or not too_long, problem_text(too_long)
            + "\n  fix: shorten them, or --drop_too_long counts them as wrong")

    start = time.monotonic()
    written = answer(solver, list(states.values()), args.batch_size, args.seed)
    seconds = time.monotonic() - start      # ids are on the host, so the device is done
    for i, record in zip(states, written):
        records[i] |= record
    for record in records:
        if record["answer"]:
            record["strict"] = score(record["text"], record["answer"])

    n = len(records)
    summary = {name: sum(record[name] for record in records) / n
               for name in ("forwards", "tokens", "ended", "strict") if name in records[0]}
    summary |= {"problems": n, "too_long": len(too_long), "seconds": seconds,
                "tokens_per_second": summary["tokens"] * n / max(seconds, 1e-9)}
    if output:
        settings = cli.remove_secrets(vars(args))
        checkpoint.write_json(output, {"checkpoint": str(folder), "settings": settings,
                                       "summary": summary, "answers": records})
    for record in records[:3] if args.test_file else records:
        print(f"-- {record['name']}\n   question  {one_line(record['question'], 2000)}")
        print("".join(f"   {name:<9} {record[name]!r}\n" for name in ("plan", "text", "answer")
                      if record.get(name)), end="")
    right, ended = summary.get("strict", 0), metrics.percent(summary["ended"])
    clauses = [f"{ended} of the answers ended by themselves"]
    if "strict" in summary:     # the problems came with answers
        print(f"accuracy   strict {right:.2%} +- {math.sqrt(right * (1 - right) / n):.2%} of {n} "
              f"problems, {len(too_long)} of them too long")
        clauses.insert(0, f"{metrics.percent(right)} of {n} problems were answered right")
    if right < args.min_accuracy:
        least = metrics.percent(args.min_accuracy)
        clauses.insert(0, f"FAILED: not {least} of the answers are right")
    print(f"speed      NFE {summary['forwards']:.1f}, {summary['tokens_per_second']:,.1f} tok/s, "
          f"{seconds:.1f} s" + f"\nanswers    {output}" * bool(output))
    print("verdict   ", "; ".join(clauses))
    if right < args.min_accuracy:
        sys.exit(1)


if __name__ == "__main__":
    main()
