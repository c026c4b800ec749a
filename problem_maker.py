"""Problems and plans without a download: arithmetic word problems with their own tokenizer, and plans made by rule.

    python problem_maker.py demo FOLDER [--problems 2000] [--test 200]     # train and test files, tokenizer.json
    python problem_maker.py plans --input train.jsonl --output train_hdp.json

`plans` turns GSM8K into the HDP form {id, question, plan, execution, answer, plan_source: "rule"}. Its plans come from
the operators of the calculator marks and the words behind each result, not from a language model: they say which
operations follow one another and what each one finds, never a number. Expect less of them than of a teacher's plans.

Files to copy with it: problems.py checkpoint.py tensor_files.py parallel.py.
"""
import argparse
import json
import random
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import checkpoint
import parallel
from parallel import UserError
from problems import CALCULATOR, END, load_tokenizer, read_problems

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo")
THINGS = ("apples", "books", "coins", "marbles", "pens", "shells", "stamps", "stickers")
VOCAB_SIZE = 512        # of the demo's tokenizer, <|endoftext|> included

# (question, [solution step], [plan sentence]); a and b are drawn, c and d follow
KINDS = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
     ["{name} has {a}+{b} = <<{a}+{b}={plus}>>{plus} {things}."],
     ["Add the new {things} to the first ones."], "plus"),
    ("{name} has {big} {things} and gives away {b}. How many {things} does {name} have left?",
     ["{name} has {big}-{b} = <<{big}-{b}={a}>>{a} {things} left."],
     ["Subtract the {things} given away from all {things}."], "a"),
    ("{name} has {a} boxes with {b} {things} each. How many {things} does {name} have?",
     ["{name} has {a}*{b} = <<{a}*{b}={times}>>{times} {things}."],
     ["Multiply the boxes by the {things} in a box."], "times"),
    ("{name} has {a} {things}, gets {b} more and gives away {c}. How many {things} does {name} have left?",
     ["{name} has {a}+{b} = <<{a}+{b}={plus}>>{plus} {things}.",
      "Then {plus}-{c} = <<{plus}-{c}={rest}>>{rest} are left."],
     ["Add the new {things} to the first ones.", "Subtract the {things} given away."], "rest"),
)


# ---------------------------------------------------------------------------------------------------------------------
# Demo problems


def demo_problems(n, seed=0):
    """n different problems as dicts {id, question, plan, execution, answer, solution}; given numbers from 2 to 6.

    solution is GSM8K's form of the answer, marks and #### included. Raises UserError when there are not so many.
    """
    rng, found, repeats = random.Random(seed), {}, 0
    while len(found) < n:
        question, steps, plan, result = rng.choice(KINDS)
        a, b = rng.randint(2, 6), rng.randint(2, 6)
        values = {"name": rng.choice(NAMES), "things": rng.choice(THINGS), "a": a, "b": b, "plus": a + b, "big": a + b,
                  "times": a * b, "c": (c := rng.randint(2, a + b - 1)), "rest": a + b - c}
        steps = [step.format(**values) for step in steps]
        question, answer = question.format(**values), str(values[result])
        repeats = repeats + 1 if question in found else 0
        if repeats > 1000:
            raise UserError(f"there are not {n} different demo problems; ask for fewer")
        if not repeats:
            found[question] = {"id": f"demo_{len(found)}", "question": question,
                               "plan": " ".join(sentence.format(**values) for sentence in plan),
                               "execution": CALCULATOR.sub("", " ".join(steps)), "answer": answer,
                               "solution": "\n".join(steps) + f"\n#### {answer}"}
    return list(found.values())


def train_tokenizer(texts):
    """A byte-level BPE of VOCAB_SIZE ids at most, <|endoftext|> last, trained on the texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    bpe.add_special_tokens([END])
    return bpe


def write_demo(folder, n_train=2000, n_test=200, seed=0):
    """Write train.jsonl, test.jsonl (GSM8K's form), train_hdp.json, test_hdp.json and tokenizer.json to a folder."""
    folder = Path(folder)
    checkpoint.prepare_output(folder, "demo folder")
    problems = demo_problems(n_train + n_test, seed)
    parts = {"train": problems[:n_train], "test": problems[n_train:]}
    for split, part in parts.items():
        gsm8k = [{"question": p["question"], "answer": p["solution"]} for p in part]
        hdp = [{key: p[key] for key in ("id", "question", "plan", "execution", "answer")} for p in part]
        write_text(folder / f"{split}.jsonl", "".join(json.dumps(entry) + "\n" for entry in gsm8k))
        write_text(folder / f"{split}_hdp.json", json.dumps(hdp, indent=1) + "\n")
    texts = [text for p in parts["train"] for text in (f"Question: {p['question']}\nAnswer: {p['solution']}",
                                                       f" {p['plan']}", f" {p['execution']} ")]
    train_tokenizer(texts).save(str(folder / "tokenizer.json"))


def write_text(path, text):
    checkpoint.write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------------------
# Plans by rule


VERBS = (("/", "divide"), ("*", "multiply"), ("-", "subtract"), ("+", "add"))     # the first one found names a step
STEP = re.compile(r"<<([^<>=]*)=[^<>]*>>\s*\$?[\d,.]*%?([^.;,!?<\n]*)")


def rule_plan(solution):
    """GSM8K's worked answer with calculator marks -> a plan in words, without digits."""
    found = []
    for expression, rest in STEP.findall(solution):
        verb = next((verb for sign, verb in VERBS if sign in expression.lstrip("-")), "work out the amount")
        words = [w for w in re.sub(r"[^A-Za-z' -]", " ", rest).split() if w.strip("'-")][:8]
        goal = "to find " + " ".join(words) if words else "to find the next amount"
        if len(found) == 0 or found[-1] != (verb, goal):
            found.append((verb, goal))
    if not found:
        return "Work out the answer from the given amounts."
    lead = ["First", *["Then"] * (len(found) - 2), "Finally"] if len(found) > 1 else ["Simply"]
    return " ".join(f"{first} {verb} {goal}." for first, (verb, goal) in zip(lead, found))


def make_plans(path, split="train"):
    """GSM8K file, dataset folder or hub name -> list of dicts {id, question, plan, execution, answer, plan_source}."""
    entries = []
    for number, problem in enumerate(read_problems(path, split, "gsm8k")):
        worked = problem.solution.rpartition("####")[0]
        execution = " ".join(CALCULATOR.sub("", worked).split())
        if not execution:
            raise UserError(f"{problem.name}: its answer has no steps before ####; a plan needs some")
        entries.append({"id": f"gsm8k_{number}", "question": problem.question, "plan": rule_plan(worked),
                        "execution": execution, "answer": problem.answer, "plan_source": "rule"})
    return entries


# ---------------------------------------------------------------------------------------------------------------------


def main(argv=None):
    p = argparse.ArgumentParser(description="Demo problems and rule-based plans for block diffusion.",
                                allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="write arithmetic word problems for both systems and a tokenizer")
    demo.add_argument("folder", help="where the five files go")
    demo.add_argument("--problems", type=int, default=2000, help="training problems")
    demo.add_argument("--test", type=int, default=200, help="test problems")
    demo.add_argument("--seed", type=int, default=0, help="of the problems")
    plans = commands.add_parser("plans", help="GSM8K -> HDP JSON with plans made by rule, not by a language model")
    plans.add_argument("--input", required=True, help="GSM8K JSONL, dataset folder or hub name")
    plans.add_argument("--split", default="train", help="split of a dataset folder or hub name")
    plans.add_argument("--output", required=True, help="JSON file to write")
    args = p.parse_args(argv)
    with parallel.one_clear_error():
        if args.command == "demo":
            write_demo(args.folder, args.problems, args.test, args.seed)
            tokens = load_tokenizer(args.folder, "gsm8k")
            print(f"{args.folder}: {args.problems} training and {args.test} test problems, "
                  f"{tokens.vocab_size - 1} token ids")
        else:
            entries = make_plans(args.input, args.split)
            checkpoint.prepare_output(Path(args.output).resolve().parent, "--output")
            write_text(Path(args.output), json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
            print(f"{args.output}: {len(entries)} problems with plans by rule")


if __name__ == "__main__":
    main()
