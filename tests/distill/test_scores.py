"""Scores of labels: by hand, by brute force, by the definition of the interval; the picture of a confusion matrix."""
import itertools
import random

import numpy as np
import pytest

from distill import scores


def test_scores_of_a_table_done_by_hand():
    labels = ("a", "b", "c")
    wanted = ["a", "a", "a", "a", "b", "b", "b", "a"]
    given = ["a", "a", "b", None, "b", "b", "a", "b"]
    found = scores.score(wanted, given, labels)
    assert found["confusion"] == [[2, 2, 0, 1], [1, 2, 0, 0], [0, 0, 0, 0]]
    assert (found["right"], found["n"], found["share"]) == (4, 8, 0.5)
    assert found["labels"]["a"] == {"precision": 2 / 3, "recall": 2 / 5, "f1": 1 / 2, "support": 5, "given": 3}
    assert found["labels"]["b"] == {"precision": 2 / 4, "recall": 2 / 3, "f1": 4 / 7, "support": 3, "given": 4}
    assert found["labels"]["c"] == {"precision": None, "recall": None, "f1": None, "support": 0, "given": 0}
    assert found["macro_f1"] == pytest.approx((1 / 2 + 4 / 7) / 2)
    matrix = np.array(found["confusion"])
    text = scores.confusion_lines(matrix, labels, "truth")
    assert [line.split() for line in text] == [["truth", "a", "b", "c", "none"], ["a", "2", "2", ".", "1"],
                                               ["b", "1", "2", ".", "."], ["c", ".", ".", ".", "."]]
    assert [line.split()[0] for line in scores.label_lines(found["labels"])] == ["label", "a", "b"]
    with pytest.raises(KeyError):
        scores.confusion(["z"], ["a"], labels)


def test_scores_by_brute_force():
    draw, labels = random.Random(3), ("none", "x", "y", "z")
    wanted = [draw.choice(labels[:3]) for _ in range(200)]
    given = [draw.choice([w, w, *labels, None]) for w in wanted]
    found, pairs = scores.score(wanted, given, labels), list(zip(wanted, given))
    assert found["right"] == sum(w == g for w, g in pairs)
    assert scores.none_name(labels) == "no label"
    f1s = []
    for label in labels:
        true = sum(w == g == label for w, g in pairs)
        precision, recall = true / given.count(label), true / wanted.count(label) if label in wanted else None
        assert found["labels"][label]["precision"] == pytest.approx(precision)
        assert found["labels"][label]["recall"] == (recall and pytest.approx(recall))
        if recall is not None:
            f1s.append(2 * precision * recall / (precision + recall))
            assert found["labels"][label]["f1"] == pytest.approx(f1s[-1])
    assert found["macro_f1"] == pytest.approx(sum(f1s) / 3)


@pytest.mark.parametrize("right, n", [(0, 10), (10, 10), (1, 3), (57, 60), (1999, 2095)])
def test_interval_is_all_shares_that_the_count_does_not_contradict(right, n):
    """Its definition: |count - n p| <= z sqrt(n p (1 - p)), searched on a grid."""
    shares = np.linspace(0, 1, 400001)
    inside = shares[np.abs(right - n * shares) <= 1.96 * np.sqrt(n * shares * (1 - shares)) + 1e-9]
    low, high = scores.wilson(right, n)
    assert (low, high) == pytest.approx((inside.min(), inside.max()), abs=1e-5)


def test_no_lines_have_no_share():
    assert scores.wilson(0, 150)[0] == 0 and scores.wilson(150, 150)[1] == 1      # no rounding left over
    assert scores.proportion(0, 0) == {"right": 0, "n": 0, "share": None, "low": None, "high": None}
    assert scores.cell(scores.proportion(0, 0)) == "-" and scores.cell(None) == "-"


@pytest.mark.parametrize("text, reference, wanted", [
    ("Rain: water that falls.", "Rain: water that falls.", 1), ("rain  WATER", "Rain water", 1), ("", "", 1),
    ("", "x", 0), ("a b", "c d", 0), ("a b c d", "b d", 2 * 2 / 6), ("the cat sat", "sat the cat", 2 * 2 / 6)])
def test_overlap_of_known_texts(text, reference, wanted):
    assert scores.overlap(text, reference) == scores.overlap(reference, text) == pytest.approx(wanted)


def test_overlap_is_that_of_the_longest_common_subsequence():
    def parts(words):
        return {part for n in range(len(words) + 1) for part in itertools.combinations(words, n)}
    texts = ["a b a c", "b a c a b", "c c a", "b"]
    for one, other in itertools.product(texts, texts):
        common = max(map(len, parts(one.split()) & parts(other.split())))
        assert scores.overlap(one, other) == pytest.approx(2 * common / len(one.split() + other.split()))
