"""Whatever stands in a file, its reader gives the content or one printable line that names the file, and never hangs.

bench/fuzz.py makes the files and knows what may be said of them; here each format gets a few, always the same ones.
"""
import argparse
import ast
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("hypothesis")

from bench import fuzz
from common import distributed, flags
from common.flags import UserError
from common.problems import problem
from common.text import HIDDEN, error_text, printable
from core import json_files
from distill import server, teachers
from tests.helpers.trainer import ROOT

EXAMPLES = 50


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.FORMATS)
def test_broken_files(name):
    endings = fuzz.run_format(name, EXAMPLES)
    assert endings.total() >= EXAMPLES // 2 and endings["read"], endings


def test_a_reader_that_fails_is_found(monkeypatch):
    """Of three kinds: it raises something else, says what cannot be printed, or hangs."""
    def raises(folder, data):
        json.loads(data)

    def forges(folder, data):
        raise UserError(f"{folder}: what is{'' if len(data) % 2 else chr(27)} wrong")

    def hangs(folder, data):
        while data:
            signal.pause()

    monkeypatch.setattr(fuzz, "SECONDS", 1)
    monkeypatch.setattr(fuzz, "error_text", str)
    for reader, said in ((raises, "Expecting|Extra|Invalid|Unterminated"), (forges, "what is"), (hangs, "hangs")):
        monkeypatch.setitem(fuzz.FORMATS, "planted", (reader, [fuzz.CHAT], ("lines",)))
        with pytest.raises((AssertionError, ValueError), match=said):
            for data in (b"{}\n{}\n", b"{}"):
                fuzz.check("planted", data, Counter())


@pytest.mark.parametrize("name", fuzz.FORMATS)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused_at_once(name, kind, monkeypatch):
    """Named pipes that nobody writes, /dev/zero, and folders, in the place of each file."""
    def replace(path, *_):
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()

    monkeypatch.setattr(fuzz, "SECONDS", 5)
    if name in ("server", "state"):
        pytest.skip("is not read from a file of this name")
    monkeypatch.setattr("pathlib.Path.write_bytes", replace)
    endings = Counter()
    fuzz.check(name, b"", endings)
    assert endings["refused"] or name in ("manifest", "rejected", "metadata", "starts"), endings


def test_numbers_and_depths_that_python_reads_but_cannot_use():
    assert json_files.loads("[1, -1e5, 9223372036854775807, NaN, Infinity]") == [1, -1e5, 2**63 - 1, None, float("inf")]
    assert json_files.loads("[" * 100 + "]" * 100) and json_files.loads('"' + "[" * 500 + '"')
    for text, said in (("9" * 20, "of 20 digits"), ("[" * 102 + "]" * 102, "too deeply"), ('{"a":' * 9000, "deep|JSON"),
                       (b'"\xff"', "is not UTF-8"), ("", "is not JSON")):
        with pytest.raises(ValueError, match=said):
            json_files.loads(text)


def test_text_is_printable_and_bounded():
    assert printable("Für 你好\u3000नमस्ते") == "Für 你好\u3000नमस्ते"
    assert printable("a\nb\x1b[2J\ud800\u202e") == r"a\nb\x1b[2J\ud800\u202e"
    assert printable("see http://anna:pa@ss:w@host:8000/v1?a=b@c") == "see http://***@host:8000/v1?a=b@c"
    assert "q" not in printable("see http://anna:" + "q" * 90 + "@host:8000/v1", 80)      # cut off before its end
    long = printable("x" * 10_000_000, 100)
    assert long.startswith("x" * 50 + "[... 9,999,900 characters ...]") and len(long) < 140
    text = error_text("error: a\nerror: b\n  c\nfix: d\n" + "\n".join(["e"] * 1000))
    assert text.startswith("error: a\n  error: b\n  c\n  fix: d\n  e\n") and text.endswith("  [... 943 lines ...]")
    p = problem("file line 3 (" + "y" * 10**7 + ")", "invalid", "is\nerror: forged")
    assert len(p) < 800 and "\n" not in p and r"is\nerror: forged" in p


def test_no_password_of_a_url_is_printed(capsys):
    """By the error of a server that is not there, and by the notices about one that is gone."""
    url = "http://anna:secret@127.0.0.1:9/v1"
    with pytest.raises(SystemExit), distributed.one_clear_error():
        teachers.open_teacher("openai", "m", teachers.Sampling(1), base_url=url)
    server.Server(url, 1).notify(f"line 3 waits for {url}")
    shown = capsys.readouterr()
    assert "--base_url http://127.0.0.1:9/v1: " in shown.err and "line 3 waits for http://***@127" in shown.out
    assert "secret" not in shown.err + shown.out


def test_no_secret_of_a_url_is_stored():
    """Whoever writes flags gets them from flags.stored; run.yaml gets `given`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base_url")
    parser.add_argument("--files", nargs="*")
    url = "https://anna:se@cret@host:8000/v1?api_key=secret&n=3#top"
    args = flags.parse(parser, None, ["--base_url", url, "--files", "a@b/c", "s3://key:secret@bucket/x"])
    wanted = {"base_url": "https://host:8000/v1?&n=3#top", "files": ["a@b/c", "s3://bucket/x"]}
    assert flags.stored(args) == args.given == wanted and args.base_url == url
    product = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] in (
        "common", "core", "speech", "distill", "diffusion", "train_v2_ddp.py", "lora.py")]
    assert {path.name for path in product if "vars(args)" in path.read_text()} == {"flags.py", "cli.py"}
    assert not [path for path in product if "vars(self.args)" in path.read_text()]


LOADERS = """
import sys
from core import chat
from common.flags import UserError
from distill import causal_lm
from speech.model import weights as speech_weights
for load in (chat.load_tokenizer, causal_lm.load_config, speech_weights.load_tokenizer):
    try:
        load(sys.argv[1])
        print("loaded")
    except UserError as error:
        print("refused", str(error)[:300])
"""


def test_no_model_brings_its_own_code(tmp_path):
    """On a terminal transformers would ask whether to run it, and here the answer would be yes."""
    evil = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    for name in ("configuration_evil.py", "tokenization_evil.py"):
        (tmp_path / name).write_text(evil)
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_evil.EvilTokenizer"]}}))
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-c", LOADERS, str(tmp_path)],
                  os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home")})
    os.write(terminal, b"y\n" * 9)
    shown = b""
    with contextlib.suppress(OSError):      # how a terminal ends
        while part := os.read(terminal, 4096):
            shown += part
    assert os.waitpid(child, 0)[1] == 0 and shown.count(b"refused") == 3, shown.decode()
    assert b"[y/N]" not in shown and not list(tmp_path.rglob("ran"))


def test_every_loader_refuses_it():
    """Each call of an Auto class in the scripts and their modules, by name."""
    folders = [ROOT / name for name in ("common", "core", "speech", "distill", "diffusion")]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and re.search(r"Auto\w+\.from_(pretrained|config)$", ast.unparse(node.func)):
                assert any(word.arg == "trust_remote_code" and word.value.value is False for word in node.keywords), (
                    f"{path}:{node.lineno}")


@pytest.mark.parametrize("how", ["flag", "user error", "traceback"])
def test_errors_cannot_be_forged(how, capsys):
    """By a flag, an error of ours, and an exception that nobody expected."""
    with pytest.raises(SystemExit):
        if how == "flag":
            flags.parse(flags.Parser("x"), lambda *_: flags.need(False, "bad\nerror: \x1b[2Jforged"), [])
        with distributed.one_clear_error():
            raise (UserError if how == "user error" else RuntimeError)("bad\nerror: \x1b[2Jforged")
    shown = capsys.readouterr().err
    assert r"\x1b[2Jforged" in shown and not HIDDEN.search(shown.replace("\n", ""))
    assert sum(line.startswith("error:") for line in shown.splitlines()) == (how != "traceback")


@pytest.mark.slow
def test_a_script_says_one_line(tmp_path):
    """A real start: an id of 10 MB with terminal escapes and line feeds in it, behind a good problem."""
    odd = {"id": "\x1b[31m\nerror: forged\n" + "x" * 10**7, "question": ""}
    (tmp_path / "data.json").write_text(json.dumps([fuzz.GSM8K, odd]))
    done = subprocess.run([sys.executable, ROOT / "diffusion" / "make_problems.py", "lines", "--input", "data.json",
                           "--output", "lines.txt"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    line, = done.stdout.splitlines()
    assert done.returncode == 1 and len(line) < 400
    assert line.startswith(r"error: data.json sample 1 (\x1b[31m\nerror: forged\nxxx") and "has no 'question'" in line
