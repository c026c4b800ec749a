"""Answers compared: overlap against all subsequences written out, and judges of known bias behind a real server."""
import itertools

import pytest

from distill import judge
from distill.teacher import Sampling, open_server
from tests.helpers.judge_server import judging

QUESTIONS = ["What is rain?", "Why {text}?", "Où?", "And {first}?"]
LONG, SHORT = ["a long answer {second}", "one more long one", "très long, ça", "long"], ["a", "b {question}", "ç", "lo"]


@pytest.mark.parametrize("text, reference, wanted", [
    ("Rain: water that falls.", "Rain: water that falls.", 1), ("rain  WATER", "Rain water", 1), ("", "", 1),
    ("", "x", 0), ("a b", "c d", 0), ("a b c d", "b d", 2 * 2 / 6), ("the cat sat", "sat the cat", 2 * 2 / 6)])
def test_overlap_of_known_texts(text, reference, wanted):
    assert judge.overlap(text, reference) == judge.overlap(reference, text) == pytest.approx(wanted)


def test_overlap_is_that_of_the_longest_common_subsequence():
    def parts(words):
        return {part for n in range(len(words) + 1) for part in itertools.combinations(words, n)}
    texts = ["a b a c", "b a c a b", "c c a", "b"]
    for one, other in itertools.product(texts, texts):
        common = max(map(len, parts(one.split()) & parts(other.split())))
        assert judge.overlap(one, other) == pytest.approx(2 * common / len(one.split() + other.split()))


@pytest.mark.parametrize("says, outcome, score", [
    (lambda first, second: "Verdict: first", "inconsistent", 0.5),
    (lambda first, second: "Both.\n\n**Verdict: second**", "inconsistent", 0.5),
    (lambda first, second: "Verdict: tie.", "tied", 0.5),
    (lambda first, second: f"verdict: {'first' if len(first) > len(second) else 'second'}", "won", 1),
    (lambda first, second: f"Verdict: {'second' if len(first) > len(second) else 'first'}", "lost", 0),
    (lambda first, second: "Verdict: first" if len(first) > len(second) else "Verdict: tie", "inconsistent", 0.5),
    (lambda first, second: "<think>Verdict: first</think>I like both.", "unread", None),
    (lambda first, second: "Verdict: first or second", "unread", None)],
    ids=["first", "second", "tie", "longer", "shorter", "half", "thought", "both"])
def test_a_judge_of_known_bias(says, outcome, score):
    with judging(says) as (url, asked_of_it):
        found = judge.compare(open_server("judge", Sampling(16), url, 3, patience=5), "Be brief {first}.", QUESTIONS,
                              LONG, SHORT)
    assert found == [outcome] * 4 and judge.score(found) == score
    for question, mine, other in zip(QUESTIONS, LONG, SHORT):       # both orders, the texts as they are
        for first, second in ((mine, other), (other, mine)):
            assert sum("Be brief {first}." in asked and f"question:\n{question}\n" in asked and
                       f"first answer:\n{first}\n\nThe second answer:\n{second}\n" in asked
                       for asked in asked_of_it) == 1


def test_scores_leave_out_what_was_not_read():
    assert judge.score(["won", "unread", "lost", "won", "inconsistent"]) == 2.5 / 4
