"""A run in words: what is said of its losses and of its speech follows from its numbers."""
import json
import subprocess
import sys

import pytest

from core import metrics
from tests.helpers.trainer import ROOT


def rows(validation, training=None, name="eval/loss", **more):
    """Lines of a metrics.jsonl with a value every 10 steps; more: {metric: values}."""
    curves = {name: validation, "train/loss": training or validation, **more}
    return [{"step": 10 * (i + 1), metric: value} for metric, values in curves.items()
            for i, value in enumerate(values)]


FELL = [5.0, 4.0, 3.0, 2.0]


@pytest.mark.parametrize("validation, training, expected", [
    ([5.0, 4.0, 3.5, 3.2], FELL, "validation loss was best at the end (3.2000 at step 40, 5.0000 at step 10): it still "
                                 "fell"),
    ([5.0, 4.999], FELL, "validation loss was best at the end (4.9990 at step 20, 5.0000 at step 10): it hardly moved"),
    ([5.0, 4.0, 4.2, 4.4], FELL, "validation loss was best at step 20 (4.0000) and 10.0 % higher at step 40 while the "
                                 "training loss fell: overfitting, take checkpoint-20"),
    ([5.0, 4.0, 6.0, 8.0], [5.0, 4.0, 6.0, 8.0], "validation loss was best at step 20 (4.0000) and 100.0 % higher at "
                           "step 40: the run diverged, take checkpoint-20 and a lower rate"),
    ([5.0, 4.0, 4.01], FELL, "validation loss was best at step 20 (4.0000) and is as good at step 30 (4.0100)"),
    ([5.0, None, 4.0], FELL, "validation loss was best at the end (4.0000 at step 30, 5.0000 at step 10): it still "
                             "fell"),
    ([4.0], FELL, "validation loss 4.0000, validated once, at step 10"),
    ([], FELL, "nothing was validated; training loss 5.0000 -> 2.0000"), ([], [], "nothing was logged")])
def test_what_is_said_of_the_loss(validation, training, expected):
    assert metrics.verdict(rows(validation, training)) == [expected]


def test_a_bound_comes_before_a_loss():
    found = metrics.verdict(rows([3.0, 2.0], name="eval/nll") + rows([1.0, 9.0]))
    assert found[0].startswith("the validation bound was best at the end (2.0000")


@pytest.mark.parametrize("values, expected", [
    ({"stop_rate": [0.2, 1.0]}, ["100 % of the sample prompts ended by themselves",
                                 "whether they are understood was not measured (evaluate_tts.py)"])])
def test_what_is_said_of_speech(values, expected):
    assert metrics.verdict(rows(FELL, **{f"eval/{name}": found for name, found in values.items()}))[1:] == expected


def test_what_an_evaluation_heard_is_said_beside_the_sample_prompts():
    judged = [{"name": "run/after", "metrics": {"wer": 0.062}}, {"name": "before", "metrics": {"wer": 0.181}},
              {"name": "unheard", "metrics": {"wer": None}}]
    assert metrics.verdict(rows(FELL, **{"eval/stop_rate": [1.0]}), judged)[1:] == [
        "100 % of the sample prompts ended by themselves", "after: speech is understood (word errors 6.2 %)",
        "before: speech is partly understood (word errors 18.1 %)"]


@pytest.mark.parametrize("share, text", [(0, "0 %"), (1, "100 %"), (0.925, "92.5 %"), (0.3, "30 %"), (1.2, "120 %"),
                                         (0.9999, "more than 99.9 %"), (1e-4, "less than 0.1 %"), (1.0001, "100 %")])
def test_shares_are_not_rounded_to_all_or_nothing(share, text):
    assert metrics.percent(share) == text


def test_skipped_steps_are_said_and_the_line_has_all():
    found = metrics.verdict(rows(FELL, **{"train/bad_steps": [0, 2]}))
    assert found[-1] == "steps skipped because their gradients were not finite: 2"
    assert metrics.verdict_line(found) == f"verdict    {found[0]}; {found[1]}"


@pytest.mark.parametrize("training, said", [
    ([2.0, 1.5, 1.0], "while the training loss fell: overfitting, take the base model"),
    ([2.0, 2.5, 3.0], "the run diverged, take the base model and a lower rate")])
def test_a_base_that_stays_the_best_has_no_checkpoint(tmp_path, training, said):
    """Validated before the first step. By report.py, as a user runs it."""
    found = [{"step": 0, "eval/loss": 2.0}]
    for step, loss in enumerate(training, 1):
        found += [{"step": step, "train/loss": loss}, {"step": step, "eval/loss": 2.0 + step / 10}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    subprocess.run([sys.executable, ROOT / "core" / "report.py", tmp_path], check=True)
    page = (tmp_path / "report.html").read_text()
    assert said in page and "checkpoint-0" not in page
