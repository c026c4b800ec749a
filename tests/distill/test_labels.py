"""What counts as a label in an answer, and which of its tokens are the label."""

import pytest

from distill.labels import Found, make_parser, read_label


@pytest.mark.parametrize("text, reason, expected", [
    ("Final Answer: fr", "stop", "fr"),
    ("It is French.\n\n**Final Answer:** FR\n", "stop", "fr"),
    ("Final Answer: xx\nis the form.\nFinal Answer: de", "stop", "de"),
    ("Final Answer: de\nNo, wait.\nFinal Answer: es", "stop", "es"),            # the last one
    ("<think>Final Answer: hi</think>\nFinal Answer: ot", "stop", "ot"),
    ("Thai is\nFinal Answer: hi\n</think>\n\nFinal Answer: ot", "stop", "ot"),  # the prompt opened the thoughts
    ("a</think>Final Answer: hi\n</think>\nFinal Answer: ot", "stop", "ot"),    # behind the last closing tag
    ("<thinking>\nFinal Answer: hi\n</thinking>\nFinal Answer: ot", "stop", "ot"),
    ("Final Answer: fr", "length", None),
    ("Final Answer: fr", "abort", None),
    ("<think>\nFinal Answer: hi\nbut", "stop", None),                           # thoughts without an end
    ("done</think>\n<think>again\nFinal Answer: hi", "stop", None),
    ("Final Answer: hi\n</think>\nI do not know", "stop", None),
    ("The form is \"Final Answer: fr\".", "stop", None),
    ("> Final Answer: fr", "stop", None),
    ("Final Answer: fr or es", "stop", None),
    ("Final Answer: fr, es", "stop", None),
    ("Final Answer: fr\nFinal Answer: xx", "stop", None),                       # not the one before instead
    ("Final Answer: sw", "stop", None),
    ("Final Answer: french", "stop", None),
    ("fr", "stop", None), ("", "stop", None), ("th -> hi", "stop", None),
])
def test_what_counts_as_a_label(text, reason, expected):
    found = read_label(make_parser("language"), text, reason)
    assert found.label == expected
    assert bool(found.why) == (expected is None)
    if expected:
        assert text[found.start:found.end].lower() == expected


def test_must_think():
    parser = make_parser("language")
    assert read_label(parser, "Final Answer: fr", "stop", must_think=True).label is None
    assert read_label(parser, "x</think>\nFinal Answer: fr", "stop", must_think=True).label == "fr"


def test_other_parsers():
    regex = make_parser("regex", r"Sentiment = (\w+)", ("good", "bad"))
    assert read_label(regex, "Sentiment = bad\nSentiment = good", "stop").label == "good"
    assert read_label(regex, "so Sentiment = good", "stop").label is None
    assert read_label(regex, "Sentiment = fair", "stop").label is None
    whole = make_parser("whole")
    assert read_label(whole, "<think>x</think>\n a\nb \n", "stop") == Found("a\nb", 18, 21)
    assert read_label(whole, "<think>x</think>\n", "stop").label is None
