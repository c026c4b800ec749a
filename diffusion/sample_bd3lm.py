"""Answer problems with a block-diffusion model: texts, exact match, network passes, speed.

    python diffusion/sample_bd3lm.py --checkpoint out --test_file test.jsonl
    python diffusion/sample_bd3lm.py --checkpoint out/checkpoint-5000 --test_file test.jsonl \
        --order confidence --threshold 0.9
    python diffusion/sample_bd3lm.py --checkpoint out --question "Ben has 3 boxes of 6 pens. ..."
    python diffusion/sample_bd3lm.py --checkpoint out --chat chats.jsonl      # {"messages": ...}

hdp writes first the plan, then the execution with <|answer|>. Strict exact match takes the number
after #### (hdp: after <|answer|>) and compares texts as openai/grade-school-math does; flexible
takes the last number in the text and compares values. NFE: network passes a problem needed.
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
import time

import numpy as np

from core import checkpoint, dist, metrics
from core.cli import UserError, printable, problem_text
from diffusion.problems import Problem, read_chat_prompts, read_problems
from diffusion.sampler import Sampling, answer_batch, load_solver, question_state, score


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


def print_answer(answer):
    scored = ""
    if "strict" in answer:
        word = "right by the last number" if answer["flexible"] else "wrong"
        scored = f": {'right' if answer['strict'] else word}, the answer is {answer['answer']}"
    print(f"-- {answer['name']}{scored}\n   question  {printable(answer['question'], 2000)}")
    for part in ("plan", "text"):
        if part in answer:
            print(f"   {part:<9} {answer[part]!r}")


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
        found.append(f"{percent(total['strict'])} of {total['problems']} problems were answered right")
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
        print_answer(answer)
    print_summary(total, output or "above", args.min_accuracy)
    if args.min_accuracy and total["strict"] < args.min_accuracy:
        sys.exit(1)


if __name__ == "__main__":
    dist.single_process()       # from here on an error is one line
    main()
