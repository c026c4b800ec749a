"""What counts as a label in an answer, and which of its tokens are the label."""

import pytest

from distill.teachers import make_parser, read_label


@pytest.mark.parametrize("text, reason, expected", [
    ("Final Answer: fr", "stop", "fr"),
    ("Final Answer: xx\nis the form.\nFinal Answer: de", "stop", "de"),
    ("<think>Final Answer: hi</think>\nFinal Answer: ot", "stop", "ot"),
    ("a</think>Final Answer: hi\n</think>\nFinal Answer: ot", "stop", "ot"),
    ("Final Answer: fr", "length", None), ("<think>\nFinal Answer: hi\nbut", "stop", None),
    ("Final Answer: hi\n</think>\nI do not know", "stop", None),
    ("> Final Answer: fr", "stop", None), ("Final Answer: fr, es", "stop", None),
    ("Final Answer: sw", "stop", None), ("fr", "stop", None), ("th -> hi", "stop", None),
])
def test_what_counts_as_a_label(text, reason, expected):
    label, why = read_label(make_parser("language"), text, reason)
    assert label == expected and bool(why) == (expected is None)
