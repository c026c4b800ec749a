"""Plans for GSM8K's problems, by rule or by a teacher; and the arithmetic problems of the demos.

    python diffusion/make_problems.py plans --input train.jsonl --output train_hdp.json

`plans` turns GSM8K into the HDP form {id, question, plan, execution, answer, plan_source: "rule"}.
A plan by rule has the operation of each calculator mark and the words after its result, without
numbers. Plans of a teacher (plan_source: "teacher") are better and take three steps:

    python diffusion/make_problems.py lines --input train.jsonl --output lines.txt
    python distill/create_data.py --input_file lines.txt --prompt_file prompts/gsm8k_plan.txt ...
    python diffusion/make_problems.py plans --input train.jsonl --teacher plans.jsonl ...
"""
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is next to this folder

from core import cli
from core.cli import UserError, require


def build_parser():
    p = cli.Parser("Write plans for the problems of GSM8K.")
    p.add_argument("command", choices=("plans", "lines"), help="plans: GSM8K -> HDP JSON with plans"
                   " by rule or a teacher's; lines: a line for each problem, for create_data.py")
    p.flag("--input", None, "GSM8K JSONL, dataset folder, hub name: its train split", required=True)
    p.flag("--output", None, "file to write", required=True)
    p.flag("--teacher", None, "plans: chat JSONL that create_data.py made of `lines`")
    return p


# parsed before other imports: --help and wrong flags answer at once
ARGS = cli.parse(build_parser()) if __name__ == "__main__" else None

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from core import checkpoint
from diffusion.problems import CALCULATOR, END, read_problems, read_rows

# the first operator found names a step
VERBS = (("/", "Divide"), ("*", "Multiply"), ("-", "Subtract"), ("+", "Add"))
# calculator mark, words after its result
STEP = re.compile(r"<<([^<>=]*)=[^<>]*>>\s*\$?[\d,.]*%?([^.;,!?<\n]*)")


def rule_plan(solution):
    """GSM8K's worked answer with calculator marks -> a plan in words, without numbers."""
    sentences = []
    for expression, rest in STEP.findall(solution):
        verb = next((verb for sign, verb in VERBS if sign in expression.lstrip("-")), "Work on")
        words = re.sub(r"[^A-Za-z' -]", " ", rest).split()[:10]
        sentences.append(f"{verb} to find {' '.join(words) or 'the next amount'}.")
    return " ".join(dict.fromkeys(sentences)) or "Work out the answer from the given amounts."


def teacher_line(problem):
    """One line of text from which a teacher can plan a problem (problems.Problem)."""
    solution = CALCULATOR.sub("", problem.solution.rpartition("####")[0])
    return " ".join(f"Problem: {problem.question} Worked answer: {solution}".split())


def read_teacher(path, problems):
    """Plans of these problems from the chat JSONL of create_data.py. UserError."""
    asked, plans = list(map(teacher_line, problems)), {}
    for name, record in read_rows(path, "train"):
        try:
            question, plan = (m["content"] for m in record["messages"])
            plans[question] = " ".join(plan.split())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"--teacher {name}: is not a record of create_data.py ({error})")
    without = [p.name for p, line in zip(problems, asked) if line not in plans]
    require(not without, f"--teacher {path}: {len(without)} of {len(problems)} problems have no "
                         f"plan, first {''.join(without[:1])}; ask again with more --max_retries")
    return [plans[line] for line in asked]


# the demo's problems, with plans and a small tokenizer: training without a download
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo")
THINGS = ("apples", "books", "coins", "marbles", "pens", "shells", "stamps", "stickers")
CHAT = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# (question, [solution step], plan, answer); a, b and c are random, the others derived
KINDS = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
     ["{name} has {a}+{b} = <<{a}+{b}={plus}>>{plus} {things}."],
     "Add the new {things} to the first ones.", "plus"),
    ("{name} has {plus} {things} and gives away {b}. How many {things} does {name} have left?",
     ["{name} has {plus}-{b} = <<{plus}-{b}={a}>>{a} {things} left."],
     "Subtract the {things} given away from all {things}.", "a"),
    ("{name} has {a} boxes with {b} {things} each. How many {things} does {name} have?",
     ["{name} has {a}*{b} = <<{a}*{b}={times}>>{times} {things}."],
     "Multiply the boxes by the {things} in a box.", "times"),
    ("{name} has {a} {things}, gets {b} more and gives away {c}. How many {things} does {name} "
     "have left?",
     ["{name} has {a}+{b} = <<{a}+{b}={plus}>>{plus} {things}.",
      "Then {plus}-{c} = <<{plus}-{c}={rest}>>{rest} are left."],
     "Add the new {things} to the first ones. Subtract the {things} given away.", "rest"),
)


def draw_problems(n, seed=0):
    """n different problems as dicts {id, question, plan, execution, answer, solution}; UserError
    if there are fewer. Given numbers are 2 to 6; solution is the answer in GSM8K's form."""
    rng, problems, repeats = random.Random(seed), {}, 0
    while len(problems) < n:
        question, steps, plan, result = rng.choice(KINDS)
        a, b = rng.randint(2, 6), rng.randint(2, 6)
        name, things, c = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, a + b - 1)
        values = {"name": name, "things": things, "a": a, "b": b, "c": c, "plus": a + b,
                  "times": a * b, "rest": a + b - c}
        question, plan, *steps = (text.format(**values) for text in (question, plan, *steps))
        repeats = repeats + 1 if question in problems else 0
        require(repeats <= 1000, f"there are not {n} different demo problems; ask for fewer")
        problems.setdefault(question, {
            "id": f"demo_{len(problems)}", "question": question, "plan": plan,
            "execution": CALCULATOR.sub("", " ".join(steps)), "answer": str(values[result]),
            "solution": "\n".join(steps) + f"\n#### {values[result]}"})
    return list(problems.values())


def train_tokenizer(texts):
    """Train a byte-level BPE on the texts: at most 512 ids, <|endoftext|> last."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=511, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    bpe.add_special_tokens([END])
    return bpe


def write_demo(folder, n_train=2000, n_test=200):
    """Write train and test files of each system, tokenizer.json, and chat/ with a chat template."""
    folder = Path(folder)
    checkpoint.prepare_folder(folder / "chat", "demo folder")
    problems = draw_problems(n_train + n_test)
    train = problems[:n_train]
    for split, chosen in (("train", train), ("test", problems[n_train:])):
        checkpoint.write_json(folder / f"{split}_hdp.json", [
            {key: value for key, value in p.items() if key != "solution"} for p in chosen])
        lines = [{"question": p["question"], "answer": p["solution"]} for p in chosen]
        chats = [{"messages": [{"role": "user", "content": line["question"]},
                               {"role": "assistant", "content": CALCULATOR.sub("", line["answer"])}
                               ]} for line in lines]
        for form, entries in (("", lines), ("_chat", chats)):
            text = "".join(json.dumps(entry) + "\n" for entry in entries)
            checkpoint.write_text(folder / f"{split}{form}.jsonl", text)
    tokenizer = train_tokenizer([text for p in train for text in (
        f"Question: {p['question']}\nAnswer: {p['solution']}", f" {p['plan']}",
        f" {p['execution']} ")])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "chat" / "tokenizer.json"))
    checkpoint.write_json(folder / "chat" / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
        "chat_template": CHAT})


def prepare_demo(folder, system, n):
    """write_demo of n problems -> (training file, validation file, tokenizer folder)."""
    write_demo(folder, n, max(8, n // 10))
    ending = {"gsm8k": ".jsonl", "hdp": "_hdp.json", "chat": "_chat.jsonl"}[system]
    tokenizer = f"{folder}/chat" if system == "chat" else str(folder)
    return f"{folder}/train{ending}", f"{folder}/test{ending}", tokenizer


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), None, argv)
    checkpoint.prepare_folder(Path(args.output).resolve().parent, "--output")
    problems = read_problems(args.input, "train", "gsm8k")
    if args.command == "lines":
        require(not args.teacher, "--teacher is for `plans` only")
        checkpoint.write_text(args.output, "".join(teacher_line(p) + "\n" for p in problems))
    else:
        worked = [problem.solution.rpartition("####")[0] for problem in problems]
        plans = read_teacher(args.teacher, problems) if args.teacher else map(rule_plan, worked)
        entries = [{"id": f"gsm8k_{number}", "question": problem.question, "plan": plan,
                    "execution": " ".join(CALCULATOR.sub("", steps).split()),
                    "answer": problem.answer, "plan_source": "teacher" if args.teacher else "rule"}
                   for number, (problem, steps, plan) in enumerate(zip(problems, worked, plans))]
        bare = [p.name for p, entry in zip(problems, entries) if not entry["execution"]]
        require(not bare, f"{''.join(bare[:1])}: its answer needs steps before ####")
        checkpoint.write_json(args.output, entries)
    print(f"{args.output}: {args.command} of {len(problems)} problems")


if __name__ == "__main__":
    main()
