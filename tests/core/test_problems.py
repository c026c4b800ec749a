"""Bad samples are shown, dropped and listed."""
import json

import pytest

from core import cli
from core.cli import UserError
from core.json_files import LIST, Problem, Problems

CHECKS = ("invalid", "too_long")
BAD = [Problem(f"a.jsonl:{i}", "too_long" if i % 2 else "invalid", f"is bad {i}", "a.jsonl") for i in range(1, 31)]


def settle(problems, drop=(), folder=None, hint=""):
    return Problems(drop, folder).add(problems).settle(hint)


def listed(folder):
    return [json.loads(line) for line in (folder / LIST).read_text().splitlines()]


def test_all_are_listed_and_twenty_shown(tmp_path):
    with pytest.raises(UserError) as stopped:
        settle(BAD, (), tmp_path, "\nfix: it")
    lines = str(stopped.value).splitlines()
    assert lines[0] == "30 problems:" and lines[1] == "  a.jsonl:1: is bad 1" and len(lines) == 23
    assert lines[-2:] == [f"  ... and 10 more; see {tmp_path / LIST}", "fix: it"]
    assert len(listed(tmp_path)) == 30
    assert listed(tmp_path)[0] == {"file": "a.jsonl", "entry": "1", "check": "too_long", "problem": "is bad 1"}


def test_checks_that_are_named_drop_and_others_stop(tmp_path):
    with pytest.raises(UserError, match="15 problems:\n  a.jsonl:2: is bad 2\n"):
        settle(BAD, ("too_long",), tmp_path)
    (tmp_path / LIST).unlink()
    assert settle(BAD, CHECKS, tmp_path) == f"15 invalid, 15 too_long; see {tmp_path / LIST}"
    assert settle(BAD[:1], CHECKS, tmp_path).startswith("1 too_long") and len(listed(tmp_path)) == 31
    (tmp_path / LIST).unlink()
    assert settle([], (), tmp_path) == ""
    assert settle(BAD, CHECKS) == "15 invalid, 15 too_long" and not list(tmp_path.iterdir())


def test_the_flag():
    parser = cli.Parser("test")
    cli.trainer_flags(parser, CHECKS)
    for words, dropped in (("", ()), ("--drop_too_long", CHECKS[1:]), ("--drop_bad invalid --drop_too_long", CHECKS)):
        args = parser.parse_args(words.split())
        cli.check_trainer(args, 1, parser, CHECKS)
        assert args.drop_bad == dropped
    with pytest.raises(UserError, match="--drop_bad: there are the checks invalid, too_long"):
        cli.check_trainer(parser.parse_args(["--drop_bad", "long"]), 1, parser, CHECKS)
