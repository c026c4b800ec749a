"""Answer GSM8K, HDP or chat problems with a block-diffusion model: texts, exact match, network
passes, tokens per second.

    python diffusion/sample_bd3lm.py --checkpoint out --test_file test.jsonl
    python diffusion/sample_bd3lm.py --checkpoint out/checkpoint-5000 --test_file test.jsonl \
        --order confidence --threshold 0.9
    python diffusion/sample_bd3lm.py --checkpoint out --question "Ben has 3 boxes of 6 pens. ..."
    python diffusion/sample_bd3lm.py --checkpoint out --chat chats.jsonl      # {"messages": ...}

Everything is conditioned on the question. gsm8k: the answer block by block until <|endoftext|>.
hdp: first the plan until its end token, then the execution with <|answer|>. Strict exact match
takes the number after #### (hdp: after <|answer|>) and compares texts as openai/grade-school-math
does; flexible takes the last number in the text and compares values. NFE is the mean number of
network passes a problem needed.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is next to this folder

from core import cli
from core.cli import require

# --------------------------------------------------------------------------------------------------
# Flags


def build_parser():
    p = cli.Parser("Answer problems with a block-diffusion model.")
    add = p.add_argument
    add("--checkpoint", required=True, help="checkpoint folder, or the trainer's OUTPUT_DIR")
    add("--pick", choices=("best", "newest"), default="best",
        help="of an OUTPUT_DIR: the best checkpoint by --best_by, or the newest one")
    add("--ema", action=argparse.BooleanOptionalAction, default=True,
        help="take the averaged weights")
    add("--test_file", help="problems of the trained form: JSONL, JSON, dataset folder or hub name")
    add("--question", nargs="+", metavar="TEXT", help="questions to answer")
    add("--question_file", help='questions: a text file of lines, or JSON objects with "question"')
    add("--chat", metavar="FILE",
        help='answer chats, by the chat template: JSONL or JSON of {"messages": ...}')
    add("--split", default="test", help="split of a dataset folder or hub name")
    add("--limit", type=int, default=0, help="answer only the first so many problems, 0 = all")
    cli.switch(p, "--drop_too_long", help="count problems whose question does not fit as wrong "
        "instead of stopping")
    add("--order", choices=("first_hitting", "top_k", "confidence"), default="first_hitting",
        help="which masked tokens a pass fills: one at random, the surest ones, or all that are "
             "sure enough")
    add("--tokens_per_step", type=int, default=1, help="top_k: tokens a pass")
    add("--threshold", type=float, default=0.9,
        help="confidence: probability a token must have, 0 to 1")
    add("--temperature", type=float, default=0.0,
        help="0 = the likeliest token, 1 = as the model says")
    add("--top_p", type=float, default=1.0,
        help="nucleus: draw from the likeliest tokens up to this share")
    add("--use_cache", action=argparse.BooleanOptionalAction, default=True, help="keep keys and "
        "values of finished blocks; no-: compute them again in every pass")
    add("--batch_size", type=int, default=64, help="problems answered side by side")
    cli.switch(p, "--bf16", help="bfloat16 compute")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--seed", type=int, default=0, help="of order and temperature")
    add("--min_accuracy", type=float, default=0.0, metavar="SHARE", help="exit status 1 "
        "unless this share of the problems is answered right, strictly; 0 to 1")
    add("--show", type=int, default=3, help="answers to print")
    add("--output", help="JSON file for all answers of a file (default: beside the checkpoint)")
    return p


def check_flags(args, world_size):
    """Raise UserError for values that make no sense, or would do nothing."""
    cli.at_least_one(args, "batch_size tokens_per_step")
    cli.zero_or_more(args, "limit show seed temperature")
    cli.share(args, "min_accuracy")
    require(not args.min_accuracy or args.test_file,
         "--min_accuracy needs --test_file, problems with answers")
    for flag in ("top_p", "threshold"):
        require(0 < getattr(args, flag) <= 1,
             f"--{flag} is {getattr(args, flag)}; it must be above 0, up to 1")
    require(args.top_p == 1 or args.temperature > 0,
         "--top_p does nothing at --temperature 0; set --temperature 1")
    require(args.tokens_per_step == 1 or args.order == "top_k",
         "--tokens_per_step needs --order top_k")
    require(args.threshold == 0.9 or args.order == "confidence",
         "--threshold needs --order confidence")
    require(sum(map(bool, [args.test_file, args.question, args.question_file, args.chat])) == 1,
         "give one of --test_file, --question, --question_file and --chat")
    require(not args.output or not args.question,
         "--output needs --test_file, --question_file or --chat")
    require(not args.output or not Path(args.output).is_dir(),
         f"--output {args.output} is a folder; give a file")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = cli.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import math
import time

import numpy as np

from core import checkpoint, dist, json_files, metrics
from core.cli import UserError, printable, problem_text
from core.problems import problem as bad_problem
from core.problems import settle
from diffusion.problems import Problem, read_chat_prompts, read_entries, read_problems
from diffusion.sampler import Sampling, answer_batch, load_solver, question_state, score

# --------------------------------------------------------------------------------------------------
# Answers


def read_questions(path):
    """Problems without answers: JSONL or JSON objects with "question", or a text of lines."""
    text, found, wrong = json_files.read_text(Path(path)), [], []
    if text.lstrip()[:1] in ("{", "["):
        entries = [(name, entry.get("question") if isinstance(entry, dict) else None)
                   for name, entry in read_entries(path, "")]
    else:
        entries = [(f"{path} line {n}", line) for n, line in enumerate(text.split("\n"), 1)
                   if line.strip()]
    for name, question in entries:
        good = isinstance(question, str) and question.strip()
        if good and not json_files.HALF_CHARACTER.search(question):
            found.append(Problem(name, question.strip(), "", ""))
        else:
            wrong.append(bad_problem(name, "invalid",
                                     "has no 'question' (a text that is not empty)", path))
    settle(wrong)
    require(found, f"{path}: holds no questions")
    return found


def usable_states(problems, solver, drop_too_long):
    """[question_state] of all problems, None where a question is too long and that is allowed."""
    states, wrong = [], []
    for problem in problems:
        try:
            states.append(question_state(problem, solver.tokens, solver.layout))
        except UserError as error:
            states.append(None)
            wrong.append(str(error))
    if wrong and not drop_too_long:
        raise UserError(problem_text(wrong) +
                        "\nfix: shorten them, or --drop_too_long counts them as wrong")
    return states


def answer_all(solver, problems, args):
    """([dict] of the problems, in order; seconds the model took). args: the script's flags."""
    states = usable_states(problems, solver, args.drop_too_long)
    empty = {"text": "", "forwards": 0, "tokens": 0, "ended": False}
    answers = [{"name": p.name, "question": p.question, "answer": p.answer, **empty}
               for p in problems]
    todo = [i for i, state in enumerate(states) if state is not None]
    todo.sort(key=lambda i: states[i][0].shape[1])      # of like length side by side: less padding
    starts = range(0, len(todo), args.batch_size)
    seconds, batches = 0.0, [todo[a:a + args.batch_size] for a in starts]
    for number, batch in enumerate(batches, 1):
        began = time.monotonic()
        written = answer_batch(solver, [states[i] for i in batch], args.seed + 1_000_003 * number)
        seconds += time.monotonic() - began     # ids are on the host by now, so the device is done
        for i, answer in zip(batch, written):
            answers[i] |= answer
        done = [answers[i] for part in batches[:number] for i in part]
        print(f"batch  {number:>4}/{len(batches)} | problems {len(done):>5} | "
              f"{sum(a['tokens'] for a in done) / seconds:>8,.1f} tok/s | "
              f"NFE {np.mean([a['forwards'] for a in done]):6.1f}")
    for problem, answer in zip(problems, answers):
        if problem.answer:
            answer["strict"], answer["flexible"] = score(answer["text"], problem.answer)
    return answers, seconds


def summarise(answers, seconds):
    """{name: number} over all answers; shares from 0 to 1."""
    n, written = len(answers), sum(a["tokens"] for a in answers)
    total = {"problems": n, "too_long": sum(a["forwards"] == 0 for a in answers)}
    scores = [rule for rule in ("strict", "flexible") if rule in answers[0]]
    for rule in (*scores, "ended"):
        total[rule] = sum(a[rule] for a in answers) / n
    for rule in scores:
        total[f"{rule}_stderr"] = math.sqrt(total[rule] * (1 - total[rule]) / n)
    passes = sum(a["forwards"] for a in answers)
    return total | {"nfe": passes / n, "tokens": written, "seconds": seconds,
                    "tokens_per_forward": written / max(1, passes),
                    "tokens_per_second": written / max(seconds, 1e-9)}


def print_answer(answer):
    scored = ""
    if "strict" in answer:
        word = "right by the last number" if answer["flexible"] else "wrong"
        word = "right" if answer["strict"] else word
        scored = f": {word}, the answer is {answer['answer']}"
    print(f"-- {answer['name']}{scored}\n   question  {printable(answer['question'], 2000)}")
    for part in ("plan", "text"):
        if part in answer:
            print(f"   {part:<9} {answer[part]!r}")


def print_summary(total, output, least=0.0):
    """The last lines. total: of summarise; output: file of the answers; least: share of right."""
    if total["too_long"]:
        print(f"too long   {total['too_long']} questions do not fit and count as wrong")
    found = []
    if "strict" in total:       # the problems came with answers
        rates = [f"{rule} {total[rule]:.2%} +- {total[f'{rule}_stderr']:.2%}"
                 for rule in ("strict", "flexible")]
        print(f"accuracy   {', '.join(rates)} of {total['problems']} problems; "
              f"{total['ended']:.1%} ended by themselves")
        if total["strict"] < least:
            found = [f"FAILED: not {metrics.percent(least)} of the answers are right"]
        found.append(f"{metrics.percent(total['strict'])} of {total['problems']} problems were "
                     "answered right")
    print(f"speed      NFE {total['nfe']:.1f}, {total['tokens_per_forward']:.2f} tokens a pass, "
          f"{total['tokens_per_second']:,.1f} tok/s, {total['seconds']:.1f} s\nanswers    {output}")
    found.append(f"{metrics.percent(total['ended'])} of the answers ended by themselves")
    print(metrics.verdict_line(found))


# --------------------------------------------------------------------------------------------------
# Main


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), check_flags, argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    sampling = Sampling(args.order, args.tokens_per_step, args.threshold, args.temperature,
                        args.top_p, args.use_cache)
    folder, solver = load_solver(args, sampling)
    layout = solver.layout
    how = {"first_hitting": "one random token a pass",
           "top_k": f"the {args.tokens_per_step} surest tokens a pass",
           "confidence": f"all tokens from probability {args.threshold:g} on"}[args.order]
    print(f"model      {folder}, {'averaged' if args.ema else 'last'} weights, "
          f"{layout.system}, on {solver.model.embed.weight.device}\n"
          f"sampling   {how}; temperature {args.temperature:g}, top_p {args.top_p:g}")
    source = args.test_file or args.question_file or args.chat or "the command line"
    if args.chat:
        require(layout.prompt, f"--chat: {folder} was trained without a chat template "
                            "(--system chat)")
        problems = read_chat_prompts(source, folder, solver.tokens)
    elif args.test_file:
        problems = read_problems(source, args.split, layout.system, layout.strip_calculator)
    elif args.question_file:
        problems = read_questions(source)
    else:
        problems = [Problem(f"question {n}", text, "", "")
                    for n, text in enumerate(args.question, 1)]
    problems = problems[:args.limit or len(problems)]
    ending = f"-{Path(source).stem}" if args.question_file or args.chat else ""
    output = Path(args.output or folder.parent / f"answers-{folder.name}{ending}.json")
    if args.question:
        output = "above"        # a few lines: no file
    else:
        checkpoint.prepare_folder(output.parent, "--output")
    print(f"problems   {len(problems)} from {source}")
    answers, seconds = answer_all(solver, problems, args)
    total = summarise(answers, seconds)
    if not args.question:
        checkpoint.write_json(output, {
            "checkpoint": str(folder), "settings": cli.stored(args), "summary": total,
            "answers": answers})
    for answer in answers if args.question else answers[:args.show]:
        print_answer(answer)
    print_summary(total, output, args.min_accuracy)
    if args.min_accuracy and total["strict"] < args.min_accuracy:
        sys.exit(1)


if __name__ == "__main__":
    dist.single_process()       # from here on an error is one line
    main()
