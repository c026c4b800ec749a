"""Printed and saved texts of users have no passwords, no control characters and a bounded length."""
import json

import pytest

from core import cli


def test_passwords_and_keys_of_addresses_are_not_kept():
    good = {"a": "user@host", "b": "http://h/v1"}
    cleaned = cli.remove_secrets(good | {"c": "http://anna:pass@h/v1?api_key=abc&x=1#y", "d": ["s3://k:v@b", 3, None]})
    assert cleaned == good | {"c": "http://***@h/v1?***&x=1#y", "d": ["s3://***@b", 3, None]}


@pytest.mark.parametrize("text, shown", [
    ("http://anna:pass@h/v1", "http://***@h/v1"), ("a\nb\x1b[31m", "a\\nb\\x1b[31m"), ("\u202egnp", "\\u202egnp"),
    ("x" * 30, "x" * 5 + "[... 20 characters ...]" + "x" * 5), ("http://" + "p" * 30 + "@h", "http://***@h")])
def test_printed_texts(text, shown):
    assert cli.one_line(text, 20 if "@" in text else 10) == shown


def test_torchrun_repeats_the_last_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{tmp_path}/error.json")
    cli.print_error("first\nlast")
    report = json.loads((tmp_path / "error.json").read_text())["message"]
    assert report["message"] == "last" and report["extraInfo"]["timestamp"] > 0
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/full")
    cli.print_error("a full disk must not add a traceback")
