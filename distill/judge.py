"""Free-form answers compared: how much of the wording is the same, and which of two a judge finds better.

The judge is a language model behind a server, asked through teacher.open_server. It sees the instruction, the question
and two answers, twice, the second time in the other order. A judge that prefers the answer in the first place,
whichever it is, contradicts itself: such a pair is inconsistent, and counts as a tie. What it says is read as a label
(labels.py), never guessed.
"""
import re

from distill import labels, teacher

WORD = re.compile(r"\w+|[^\w\s]")
PLACES = ("first", "second", "tie")
FORM = labels.make_parser("regex", r"[*_`\s]*(?i:verdict)[*_`]*\s*:[*_`\s]*(first|second|tie)[*_`\s.]*", PLACES)
OUTCOMES = ("won", "tied", "lost", "inconsistent", "unread")
PROMPT = """Compare two answers to the same question.

The instruction that both should follow:
{instruction}

The question:
{question}

The first answer:
{first}

The second answer:
{second}

Which answer follows the instruction better and is more helpful and correct? Neither length nor place counts.
End with one line of this form, the last word being first, second or tie:
Verdict: tie"""


def overlap(text, reference):
    """ROUGE-L of two texts, 0 to 1: F1 of their longest common subsequence of words, case and white space aside.

    C.-Y. Lin, ROUGE: a package for automatic evaluation of summaries (2004). Two empty texts have 1.
    """
    ours, theirs = (WORD.findall(each.lower()) for each in (text, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    row = [0] * (len(theirs) + 1)
    for word in ours:
        above = row
        row = [0]
        for place, other in enumerate(theirs):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[-1]))
    return 2 * row[-1] / (len(ours) + len(theirs))


def outcome(straight, swapped):
    """Of OUTCOMES, for the answer that stood first in `straight` and second in `swapped`.

    straight, swapped: of PLACES, or None where the judge gave no verdict.
    """
    if straight is None or swapped is None:
        return "unread"
    if straight == swapped == "tie":
        return "tied"
    return {("first", "second"): "won", ("second", "first"): "lost"}.get((straight, swapped), "inconsistent")


def compare(answers, instruction, questions, ours, theirs):
    """[outcome] of our answer to each question against theirs, each pair judged in both orders.

    answers: of teacher.open_server. The others: texts, as many of each as there are questions.
    """
    chats = []
    for question, mine, other in zip(questions, ours, theirs, strict=True):
        for first, second in ((mine, other), (other, mine)):
            parts = {"instruction": instruction, "question": question, "first": first, "second": second}
            text = re.sub(r"\{(\w+)\}", lambda match, parts=parts: parts[match[1]], PROMPT)     # texts may have braces
            chats.append([{"role": "user", "content": text}])
    said = [labels.read_label(FORM, answer.text, answer.finish_reason).label
            for answer in teacher.ask(answers, chats)]
    return list(map(outcome, said[::2], said[1::2]))


def score(outcomes):
    """Share of wins, everything undecided counting half; None without any verdict that was read."""
    read = [each for each in outcomes if each != "unread"]
    return sum({"won": 1.0, "lost": 0.0}.get(each, 0.5) for each in read) / len(read) if read else None
