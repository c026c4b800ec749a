r"""Problems and plans without a download: arithmetic word problems with their own tokenizer, and plans made by rule.

    python diffusion/make_problems.py demo FOLDER [--problems 2000] [--test 200]  # train and test files, tokenizer.json
    python diffusion/make_problems.py plans --input train.jsonl --output train_hdp.json

`plans` turns GSM8K into the HDP form {id, question, plan, execution, answer, plan_source: "rule"}. Its plans come from
the operators of the calculator marks and the words behind each result, not from a language model: they say which
operations follow one another and what each one finds, never a number. Expect less of them than of a teacher's plans.
Those (plan_source: "teacher") take three steps:

    python diffusion/make_problems.py lines --input train.jsonl --output lines.txt
    python distill/create_data.py --input_file lines.txt --prompt_file prompts/gsm8k_plan.txt --parser whole \
        --temperature 0.6 --top_p 0.9 --output_file plans.jsonl --model_name TEACHER
    python diffusion/make_problems.py plans --input train.jsonl --teacher plans.jsonl --output train_hdp.json

Files to copy with it: problems.py checkpoint.py tensor_files.py parallel.py.
"""
import argparse
import json
import random
import re
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import checkpoint, parallel
from common.parallel import UserError
from diffusion.problems import CALCULATOR, END, load_tokenizer, read_problems

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


def teacher_line(problem):
    """One line of text with all that a teacher needs to plan a problem (problems.Problem)."""
    solution = CALCULATOR.sub("", problem.solution.rpartition("####")[0])
    return " ".join(f"Problem: {problem.question} Worked answer: {solution}".split())


def read_teacher(path, problems):
    """Plans of a chat JSONL that create_data.py made from the teacher_lines of these problems, in their order.

    Raises UserError when one has no plan, or the file was made from other problems.
    """
    plans = {}
    try:
        for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            record = json.loads(text)
            asked, said = (message["content"] for message in record["messages"])
            if not 0 <= record["id"] < len(problems) or asked != teacher_line(problems[record["id"]]):
                raise UserError(f"--teacher {path} line {number}: was not made from the lines of these problems")
            plans[record["id"]] = " ".join(said.split())
    except OSError as error:
        raise UserError(f"--teacher {path}: cannot be read ({error.strerror})")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--teacher {path} line {number}: is no record of create_data.py ({error})")
    if without := [problem.name for number, problem in enumerate(problems) if number not in plans]:
        raise UserError(f"--teacher {path}: {len(without)} of {len(problems)} problems have no plan, the first is "
                        f"{without[0]}; see .rejected.jsonl, and ask again with more --max_retries")
    return [plans[number] for number in range(len(problems))]


def make_plans(path, split="train", teacher=None):
    """GSM8K file, dataset folder or hub name -> list of dicts {id, question, plan, execution, answer, plan_source}.

    teacher: chat JSONL of create_data.py with the plans; None: plans by rule.
    """
    problems, entries = read_problems(path, split, "gsm8k"), []
    plans = read_teacher(teacher, problems) if teacher else None
    for number, problem in enumerate(problems):
        worked = problem.solution.rpartition("####")[0]
        execution = " ".join(CALCULATOR.sub("", worked).split())
        if not execution:
            raise UserError(f"{problem.name}: its answer has no steps before ####; a plan needs some")
        entries.append({"id": f"gsm8k_{number}", "question": problem.question,
                        "plan": plans[number] if teacher else rule_plan(worked), "execution": execution,
                        "answer": problem.answer, "plan_source": "teacher" if teacher else "rule"})
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
    lines = commands.add_parser("lines", help="GSM8K -> one line a problem for create_data.py, to get plans")
    plans = commands.add_parser("plans", help="GSM8K -> HDP JSON with plans by rule, or those of a teacher")
    for command, what in ((lines, "text file to write"), (plans, "JSON file to write")):
        command.add_argument("--input", required=True, help="GSM8K JSONL, dataset folder or hub name")
        command.add_argument("--split", default="train", help="split of a dataset folder or hub name")
        command.add_argument("--output", required=True, help=what)
    plans.add_argument("--teacher", help="chat JSONL that create_data.py made of `lines`; default: plans by rule")
    args = p.parse_args(argv)
    with parallel.one_clear_error():
        if args.command == "demo":
            write_demo(args.folder, args.problems, args.test, args.seed)
            tokens = load_tokenizer(args.folder, "gsm8k")
            print(f"{args.folder}: {args.problems} training and {args.test} test problems, "
                  f"{tokens.vocab_size - 1} token ids")
        elif args.command == "lines":
            texts = [teacher_line(problem) for problem in read_problems(args.input, args.split, "gsm8k")]
            checkpoint.prepare_output(Path(args.output).resolve().parent, "--output")
            write_text(Path(args.output), "".join(text + "\n" for text in texts))
            print(f"{args.output}: {len(texts)} lines for create_data.py")
        else:
            entries = make_plans(args.input, args.split, args.teacher)
            checkpoint.prepare_output(Path(args.output).resolve().parent, "--output")
            write_text(Path(args.output), json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
            print(f"{args.output}: {len(entries)} problems with plans by {'a teacher' if args.teacher else 'rule'}")


if __name__ == "__main__":
    main()
