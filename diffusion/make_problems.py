r"""Plans for GSM8K's problems, made by rule or by a teacher.

    python diffusion/make_problems.py plans --input train.jsonl --output train_hdp.json

`plans` turns GSM8K into the HDP form {id, question, plan, execution, answer, plan_source: "rule"}. Its plans come from
the operators of the calculator marks and the words behind each result, not from a language model: they say which
operations follow one another and what each one finds, never a number. Expect less of them than of a teacher's plans.
Those (plan_source: "teacher") take three steps:

    python diffusion/make_problems.py lines --input train.jsonl --output lines.txt
    python distill/create_data.py --input_file lines.txt --prompt_file prompts/gsm8k_plan.txt --parser whole \
        --temperature 0.6 --top_p 0.9 --output_file plans.jsonl --model_name TEACHER
    python diffusion/make_problems.py plans --input train.jsonl --teacher plans.jsonl --output train_hdp.json
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags


def build_parser():
    p = flags.Parser("Plans for the problems of GSM8K.")
    p.usage = "%(prog)s {lines,plans} [--flag value ...]"
    commands = p.add_subparsers(dest="command", required=True, prog=p.prog)
    lines = commands.add_parser("lines", help="GSM8K -> one line a problem for create_data.py, to get plans")
    plans = commands.add_parser("plans", help="GSM8K -> HDP JSON with plans by rule, or those of a teacher")
    for command, what in ((lines, "text file to write"), (plans, "JSON file to write")):
        command.add_argument("--input", required=True, help="GSM8K JSONL, dataset folder or hub name")
        command.add_argument("--split", default="train", help="split of a dataset folder or hub name")
        command.add_argument("--output", required=True, help=what)
    plans.add_argument("--teacher", help="chat JSONL that create_data.py made of `lines`; default: plans by rule")
    return p


# parsed before anything else is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser()) if __name__ == "__main__" else None

import re

from common import checkpoint, distributed
from common.distributed import UserError
from core import json_files
from diffusion.problems import CALCULATOR, read_problems

# ---------------------------------------------------------------------------------------------------------------------
# Plans by rule

VERBS = (("/", "divide"), ("*", "multiply"), ("-", "subtract"), ("+", "add"))     # the first one found names a step
STEP = re.compile(r"<<([^<>=]*)=[^<>]*>>\s*\$?[\d,.]*%?([^.;,!?<\n]*)")      # calculator mark, words behind the result
LINKS = re.compile(r"^(?:(?:so|then|thus|therefore|hence|next|now|and|but|also|finally|first|second|third|lastly|if|"
                   r"since|because|as|(?:that|this|which) means(?: that)?|we know(?: that)?)\b[ ,:]*)+", re.IGNORECASE)
COPULA = re.compile(r"\b(?:is|are|was|were|be|been|equals?|totals?|will be|would be|comes? (?:out )?to|adds? up to)$",
                    re.IGNORECASE)
# words that begin a sentence and are no names
OPENERS = set("A All An After At Before By During Each Every For From He Her His In It Its My On One Our She That The "
              "Their There These They This Those To Together We When With You Your".split())
BEHIND = set("about after at by each for from if in left less more on over per than to with worth".split())
SEARCH = re.compile(r"^(?:to )?(?:find|calculate|compute|determine|figure out|work out)(?: out)?\b", re.IGNORECASE)
NUMBERS = set("one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty hundred "
              "thousand half twice double triple".split())
WORDS = 10          # of a goal


def words_of(text):
    """Words of a text, numbers left out, in figures or in letters."""
    words = re.sub(r"[^A-Za-z' -]", " ", text.replace("\u2019", "'")).split()
    return [word for word in words if word.strip("'-") and word.lower().strip("'-") not in NUMBERS]


def said_before(text):
    """(words of what a step finds, whether they are a thing) from the text before its expression.

    A thing: "the price of the juice" of "The price of the juice was"; else a clause: "Betty has".
    """
    clause = re.split(r"[.;!?](?=\s|$)|\n|>>", text.replace("\u2019", "'"))[-1]
    clause = re.sub(r"(?<=\d)\s*[xX]\s*(?=[\d$])", "*", clause)
    clause = re.sub(r"[^A-Za-z]+$", "", clause)         # without the expression
    if re.search("[*/+=]", clause):                     # it has words inside: 6 tubs * 2 tubes per tub
        clause = re.split(r"[\d$(*/+=]", clause)[0].strip(" ,:-")
    parts = [part for part in re.split(r",|\b(?:so|then|because)\b", clause) if part.strip()] or [""]
    clause = LINKS.sub("", parts[-1].strip())
    is_thing = bool(COPULA.search(clause) or SEARCH.search(clause))
    words = words_of(SEARCH.sub("", COPULA.sub("", clause)))
    if words and words[0] in OPENERS:
        words[0] = words[0].lower()
    if not words or words[0] == "there" or words[-1] == "there" or words[-1] in ("the", "a", "an", "that"):
        return [], False
    return words[-WORDS:], is_thing


def rule_plan(solution):
    """GSM8K's worked answer with calculator marks -> a plan in words, without digits.

    What a step finds is named by the words behind its result and by those before its expression.
    """
    found, last = [], 0
    for step in STEP.finditer(solution):
        expression, rest = step.groups()
        verb = next((verb for sign, verb in VERBS if sign in expression.lstrip("-")), "work out the amount")
        after = words_of(rest)[:WORDS]
        before, is_thing = said_before(solution[last:step.start()])
        if is_thing and before:
            goal = before
        elif before and after and after[0].lower() in BEHIND:
            goal = ["what", *before, *after]
        elif before and after:
            goal = [*after, "that" if len(before) > 1 else "of", *before]
        else:
            goal = after or (["what", *before] if before else ["the", "next", "amount"])
        last = step.end(1)
        sentence = verb, "to find " + " ".join(goal)
        if not found or found[-1] != sentence:
            found.append(sentence)
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
    for number, text in enumerate(json_files.read_text(path, "--teacher ").removesuffix("\n").split("\n"), 1):
        try:
            record = json_files.loads(text)
            asked, said = (message["content"] for message in record["messages"])
            line = record.get("line", record["id"])
            known = 0 <= line < len(problems) and asked == teacher_line(problems[line])
            plans[line] = " ".join(said.split())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"--teacher {path} line {number}: is not a record of create_data.py ({error})")
        if not known:
            raise UserError(f"--teacher {path} line {number}: was not made from the lines of these problems")
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


def quality(entries):
    """{what: number} of plans, by rule or a teacher's alike: sentences, and shares of plans that have a fault."""
    def share(wrong):
        return sum(map(wrong, entries)) / len(entries)

    def sentences(entry):
        return [part for part in re.split(r"[.!?]+(?:\s|$)", entry["plan"]) if part.strip()]

    def letters(entry):
        return NUMBERS & set(re.findall("[a-z]+", entry["plan"].lower()))
    return {"sentences": sum(len(sentences(e)) for e in entries) / len(entries),
            "with figures": share(lambda e: bool(re.search(r"\d", e["plan"]))),
            "with numbers in letters": share(lambda e: bool(letters(e))),
            "with the answer": share(lambda e: e["answer"] in re.findall(r"-?[\d.,]*\d", e["plan"])),
            "naming nothing but the next amount": share(lambda e: "the next amount" in e["plan"]),
            "of one sentence": share(lambda e: len(sentences(e)) == 1),
            "longer than the solution": share(lambda e: len(e["plan"].split()) > len(e["execution"].split()))}


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), None, argv)
    with distributed.one_clear_error():
        if args.command == "lines":
            texts = [teacher_line(problem) for problem in read_problems(args.input, args.split, "gsm8k")]
            checkpoint.prepare_output(Path(args.output).resolve().parent, "--output")
            checkpoint.write_text(args.output, "".join(text + "\n" for text in texts))
            print(f"{args.output}: {len(texts)} lines for create_data.py")
        else:
            entries = make_plans(args.input, args.split, args.teacher)
            checkpoint.prepare_output(Path(args.output).resolve().parent, "--output")
            checkpoint.write_json(args.output, entries)
            print(f"{args.output}: {len(entries)} problems with plans by {'a teacher' if args.teacher else 'rule'}")
            found = quality(entries)
            print(f"plans      {found.pop('sentences'):.1f} sentences each; "
                  + ", ".join(f"{value:.1%} {what}" for what, value in found.items()))


if __name__ == "__main__":
    main()
