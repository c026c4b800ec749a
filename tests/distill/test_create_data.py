"""Teacher labels: whole runs with a server and a real model; kills, signals, the launcher."""
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from core.cli import UserError
from core import chat
from distill import chat_data, create_data
from distill.chat_data import IDS_PER_FILE
from tests.helpers import chats, scripts
from tests.helpers.label_server import answer_to
from tests.helpers.progress import PATIENCE_S, wait_until
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import alive, launches

PROMPT = 'Rules: {"a": {}} {0}\nLast line: Final Answer: xx\nText:\n{text}\n'
TRUE = ("de", "en", "fr", "el", "ot", "zh")
LAUNCHER = ROOT / "launch" / "create_data_h100x8.sh"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A running label_server with .url; .asked() returns the bodies of all requests so far."""
    log = tmp_path_factory.mktemp("server") / "log.jsonl"
    process = subprocess.Popen([sys.executable, str(ROOT / "tests" / "helpers" / "label_server.py"), str(log)],
                               stdout=subprocess.PIPE, text=True)
    process.url = f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
    process.asked = lambda: [       # the last line is empty or half written
        json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def make_lines(n, extra=lambda i: ""):
    return [f"{TRUE[i % len(TRUE)]} number {i}{extra(i)}" for i in range(n)]


def files(folder, lines, prompt=PROMPT):
    (folder / "lines.txt").write_text("".join(line + "\n" for line in lines))
    (folder / "prompt.txt").write_text(prompt)


def flags(folder, server=None, *more, output="labels.jsonl"):
    words = ["--input_file", folder / "lines.txt", "--output_file", folder / output, "--prompt_file",
             folder / "prompt.txt"]
    if server is not None:
        words += ["--base_url", server.url, "--model_name", "teacher", "--concurrency", "8"]
    return [str(word) for word in [*words, *more]]


def run(argv, log):
    """create_data's main in a fork of this process, which has done the imports."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # as a shell starts background processes
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (open(fd, "w", 1, closefd=False) for fd in (1, 2))
    scripts.run(create_data, argv)


def start(argv, log):
    child = multiprocessing.get_context("fork").Process(target=run, args=(argv, log), daemon=True)
    child.start()
    return child


def label(folder, *argv, ok=True):
    """Run create_data to its end; returns what it printed."""
    log = folder / f"log-{uuid.uuid4().hex}.txt"
    child = start(list(argv), log)
    child.join(PATIENCE_S)
    assert child.exitcode is not None and (child.exitcode == 0) == ok, log.read_text()
    return log.read_text()


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().split("\n") if line]


def results(folder, output="labels.jsonl"):
    """Bytes of both result files."""
    path = folder / output
    return path.read_bytes(), path.with_suffix(".rejected.jsonl").read_bytes()


def labelled(folder, output="labels.jsonl"):
    """Number of lines in all journals."""
    return sum(b'{"id"' in line for path in folder.glob(f"{output}.work/shard-*") for line in
               path.read_bytes().split(b"\n"))


@pytest.mark.slow
def test_every_line_is_in_one_of_the_files(server, tmp_path):
    trouble = {3: " flaky", 5: " drop", 8: " garbage", 12: " never", 17: " never", 20: " long"}
    lines = make_lines(40, lambda i: trouble.get(i, ""))
    lines[30] = lines[0]                                    # the same text twice
    lines[31] = "ot a\u2028b {text} {0} %s"                 # \u2028 ends no line; {text} stays as it is
    files(tmp_path, lines)
    label(tmp_path, *flags(tmp_path, server, "--max_retries", "6", "--seed", "5"))
    chats, rejected = rows(tmp_path / "labels.jsonl"), rows(tmp_path / "labels.rejected.jsonl")
    assert all(row["id"] % IDS_PER_FILE == row["line"] for row in chats + rejected)
    assert sorted(row["line"] for row in chats + rejected) == list(range(40))
    assert [row["line"] for row in chats] == sorted(row["line"] for row in chats)
    for row in chats:
        line = lines[row["line"]]
        assert row["messages"] == [{"role": "user", "content": line}, {"role": "assistant", "content": line[:2]}]
    by_line = {row["line"]: row for row in rejected}
    assert {12, 17, 20} <= by_line.keys() and len(rejected) < 6
    assert "leaves no room" in by_line[20]["why"] and len(by_line[20]["answers"]) == 1
    assert [(a["text"], a["finish_reason"]) for a in by_line[12]["answers"]] == \
        [answer_to(lines[12], create_data.draw_seed(5, 12, attempt)) for attempt in range(7)]

    asked = [body for body in server.asked() if body["seed"] in
             {create_data.draw_seed(5, number, attempt) for number in range(40) for attempt in range(7)}]
    assert {body["messages"][0]["content"] for body in asked} == \
        {PROMPT.replace("{text}", line).rstrip("\n") for line in lines}
    assert all(len(body["messages"]) == 1 and body["temperature"] == 0.15 and body["max_tokens"] == 1024
               for body in asked)
    again = label(tmp_path, *flags(tmp_path, server, "--max_retries", "6", "--seed", "5"))
    assert "40 of them finished, 0 to do" in again


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """(lines, results) of one undisturbed process; 60 slow lines, some never labelled."""
    folder = tmp_path_factory.mktemp("whole")
    lines = make_lines(60, lambda i: " slow never" if i % 13 == 5 else " slow")
    files(folder, lines)
    label(folder, *flags(folder, server))
    return lines, results(folder)


@pytest.mark.slow
@pytest.mark.race
def test_kills_at_any_point_do_not_change_the_results(server, whole, tmp_path):
    files(tmp_path, whole[0])
    kills, rng, work = 0, random.Random(1), tmp_path / "labels.jsonl.work"
    for _ in range(6):
        child = start(flags(tmp_path, server, "--concurrency", "2"), tmp_path / "log.txt")
        child.join(rng.uniform(0.05, 0.6))
        if kills == 2:
            wait_until(lambda: labelled(tmp_path), "first lines")
        if child.exitcode is not None:
            break
        child.kill()
        child.join()
        kills += 1
        if kills == 3:          # in the middle of a write
            with (work / "shard-0-of-1.jsonl").open("ab") as file:
                file.write(b'{"id": 59, "label": "fr", "answ')
    whole_lines = (work / "shard-0-of-1.jsonl").read_text().split("\n")[:-1]      # the half line may still be last
    done = {row["id"] for row in map(json.loads, whole_lines) if "id" in row}
    before = len(server.asked())
    label(tmp_path, *flags(tmp_path, server))
    assert results(tmp_path) == whole[1] and kills >= 3 and done
    texts = {body["messages"][0]["content"].split("\n")[-1] for body in server.asked()[before:]}
    assert texts == {line for number, line in enumerate(whole[0]) if number not in done}        # nothing asked again
    ids = [row["id"] for path in work.glob("*.jsonl") for row in rows(path) if "id" in row]
    assert sorted(ids) == list(range(60))


def test_no_result_before_all_shards_are_finished(server, tmp_path):
    """Two shards continue the work of one of three shards."""
    files(tmp_path, make_lines(6))
    assert "4 of other shards are not finished" in label(tmp_path, *flags(tmp_path, server, "--shard", "1/3"))
    assert not (tmp_path / "labels.jsonl").exists()
    both = [start(flags(tmp_path, server, "--shard", f"{i}/2"), tmp_path / f"log{i}.txt") for i in range(2)]
    for i, child in enumerate(both):
        child.join(PATIENCE_S)
        assert child.exitcode == 0, (tmp_path / f"log{i}.txt").read_text()
    assert len(rows(tmp_path / "labels.jsonl")) + len(rows(tmp_path / "labels.rejected.jsonl")) == 6
    ids = [row["id"] for path in (tmp_path / "labels.jsonl.work").glob("*.jsonl") for row in rows(path) if "id" in row]
    assert sorted(ids) == list(range(6))        # none was asked twice


def test_other_settings_are_refused(server, tmp_path):
    files(tmp_path, make_lines(4))
    label(tmp_path, *flags(tmp_path, server, "--shard", "0/2"))
    printed = label(tmp_path, *flags(tmp_path, server, "--parser", "whole"), ok=False)
    assert "parser was 'language', is 'whole'" in printed
    files(tmp_path, [*make_lines(4)[:3], "fr another"], PROMPT.replace("Rules", "Laws"))
    printed = label(tmp_path, *flags(tmp_path, server, "--model_name", "other"), ok=False)
    assert all(name in printed for name in ("prompt_file was", "input_file was '4 lines", "model_name was 'teacher'"))


@pytest.mark.parametrize("break_it, more, message", [
    (lambda f: (f / "lines.txt").write_text("a\n\nb\n"), [], "line 2 is empty; delete it"),
    (lambda f: (f / "prompt.txt").write_text("no place"), [], "has {text} 0 times; write it once, where"),
    (lambda f: (f / "labels.jsonl").write_text("x"), [], "exists already, but not labels.jsonl.work"),
    (None, ["--model_name", "nobody"], "--model_name nobody: the server has teacher"),
])
def test_bad_input_is_one_clear_line(break_it, more, message, server, tmp_path):
    files(tmp_path, make_lines(3))
    if break_it:
        break_it(tmp_path)
    printed = label(tmp_path, *flags(tmp_path, server, *more), ok=False)
    last = printed.splitlines()[-1]
    assert last.startswith("error: ") and message in last and "Traceback" not in printed
    assert labelled(tmp_path) == 0


def test_a_refused_line_does_not_stop_the_run(server, tmp_path, monkeypatch):
    """If none of many lines in a row is answered, it stops; before the first answer, nothing is recorded."""
    monkeypatch.setattr(create_data, "REFUSED_IN_A_ROW", 5)
    refused = [f"de refused {i}" for i in range(20)]
    files(tmp_path, [*make_lines(8), "de refused", "en full", *(f"de long {i}" for i in range(60)), *refused[:6]])
    label(tmp_path, *flags(tmp_path, server, "--request_timeout", "1.5", "--max_retries", "9"))
    rejected = {row["line"]: row for row in rows(tmp_path / "labels.rejected.jsonl")}
    assert len(rows(tmp_path / "labels.jsonl")) + len(rejected) == 76       # on a busy machine others may be late, too
    assert rejected[8]["why"] == 'HTTP 403 {"error": {"message": "not allowed"}}'
    assert rejected[9]["why"].startswith("no answer in 3 s: HTTP 429 ") and rejected[9]["answers"][0]["text"]
    assert all(rejected[line]["why"] == "the prompt leaves no room for an answer" for line in range(10, 70))
    files(tmp_path, [*make_lines(2), *refused])
    printed = label(tmp_path, *flags(tmp_path, server, output="b.jsonl"), ok=False)
    assert "error: the server answered none of 5 lines in a row (HTTP 403 " in printed
    files(tmp_path, refused[:3])
    for more in ((), ("--max_tokens", "9")):
        printed = label(tmp_path, *flags(tmp_path, server, *more, output="c.jsonl"), ok=False)
        assert "error: the server answered none of 3 lines in a row (HTTP 403 " in printed
    assert not (tmp_path / "c.jsonl.work" / "shard-0-of-1.jsonl").read_text()


@pytest.mark.slow
def test_servers_of_other_kinds(server, tmp_path):
    """The servers refuse some fields, send null usage or a byte now and then."""
    files(tmp_path, ["de seedless", "en limitless", "fr bare", "el drip", "zh plain 1"])
    before = len(server.asked())
    command = flags(tmp_path, server, "--max_retries", "20", "--request_timeout", "2")
    printed = label(tmp_path, *command)
    labels = rows(tmp_path / "labels.jsonl")
    assert [row["messages"][1]["content"] for row in labels] == ["de", "en", "fr", "el", "zh"], printed
    assert "no whole answer in 2 s" in printed
    asked = server.asked()[before:]
    assert {"max_tokens", "max_completion_tokens"} <= {name for body in asked for name in body}
    assert any("seed" not in body for body in asked)
    # without these fields a server would use the model's generation_config
    for name, value in {"top_k": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0}.items():
        assert asked[0][name] == value


def test_conversations(server, tmp_path):
    """History, several lines and system messages reach the teacher, and the labels."""
    files(tmp_path, [])
    question = {"role": "user", "content": "first line\nde number 1"}
    turns = [{"role": "system", "content": "Be brief."}, *chats.ask("a", "b"), question]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    called = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "", "tool_calls": [call]},
              {"role": "tool", "content": "nothing"}, {"role": "user", "content": "el number 3"}]
    history = [*chats.ask("q", "r"), {"role": "user", "content": "two\nfr lines"}]
    records = [{"messages": turns}, {"messages": history, "id": 7},
               {"messages": [*turns[1:], {"role": "assistant", "content": "x"}]}, {"messages": called, "tools": tools}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [word.replace("lines.txt", "chats.jsonl") for word in flags(tmp_path, server, "--max_retries", "20")]
    label(tmp_path, *command)
    labels = rows(tmp_path / "labels.jsonl")
    assert [row["messages"][:-1] for row in labels] == [turns, history, turns[1:], called]
    assert [row["messages"][-1]["content"] for row in labels] == "de fr de el".split() and labels[3]["tools"] == tools
    sent, = {json.dumps([body["tools"], body["messages"][1]["tool_calls"][0]["function"]]) for body in server.asked()
             if "tools" in body}        # in OpenAI's API, arguments are a text
    assert json.loads(sent) == [tools, {"name": "look", "arguments": '{"at": "it"}'}]
    asked = [body["messages"] for body in server.asked() if len(body["messages"]) > 1]
    wanted = PROMPT.replace("{text}", question["content"]).rstrip("\n")
    assert [*turns[:-1], {"role": "user", "content": wanted}] in asked

    (tmp_path / "prompt.txt").write_text("You name languages.")
    more = ["--prompt_role", "system", "--parser", "regex", "--pattern", "Final Answer: (.*)"]
    command = [word.replace("labels", "b") for word in command]
    label(tmp_path, *command, *more)
    joined = {"role": "system", "content": f"You name languages.\n\n{turns[0]['content']}"}
    assert [joined, *turns[1:]] in [body["messages"] for body in server.asked()]


def test_two_files_join_without_duplicates(server, tmp_path):
    """Two label files are joined by cat. The same file twice is refused by name."""
    for name, lines in (("part1", make_lines(4)), ("part2", make_lines(9)[4:])):
        files(tmp_path, lines)
        label(tmp_path, *flags(tmp_path, server, "--max_retries", "20", output=f"{name}.jsonl"))
    texts = [(tmp_path / f"part{i}.jsonl").read_text() for i in (1, 2)]
    (tmp_path / "both.jsonl").write_text("".join(texts))
    ids = [row["id"] for row in rows(tmp_path / "both.jsonl")]
    assert len(set(ids)) == 9 and max(ids) < 2**53
    (tmp_path / "twice.jsonl").write_text(texts[0] * 2)
    encoder = chat.Encoder(chats.tokenizer())
    assert chat_data.write_table(tmp_path / "table", [tmp_path / "both.jsonl"], encoder, 256)[0] == [9]
    with pytest.raises(UserError, match=f"twice.jsonl:5: has the same id {ids[0]} as .*twice.jsonl:1"):
        chat_data.write_table(tmp_path / "again", [tmp_path / "twice.jsonl"], encoder, 256)
    table, held_out = chat_data.ChatTable(tmp_path / "table"), set()
    assert table.keys.tolist() == ids
    for seed in range(40):      # neighbours by id of one file are held out together
        _, out = chat_data.split_samples(table, 9, 2, 0.2, seed)
        held_out.add(tuple(out))
    assert held_out == {(0, 1), (2, 3), (4, 5), (6, 7), (8,)}


def test_damaged_journal_is_named(server, tmp_path):
    files(tmp_path, make_lines(4))
    label(tmp_path, *flags(tmp_path, server, "--shard", "0/2"))
    work = tmp_path / "labels.jsonl.work"
    journal = work / "shard-0-of-2.jsonl"
    first, second, third, end = journal.read_text().split("\n")
    header = json.loads(first)["header"]
    assert len(create_data.read_journals(work, header)) == 2
    for number, damaged in ((3, [first, second, third[:9]]), (3, [first, second, '{"x": 1}']), (1, [second, third])):
        journal.write_text("\n".join([*damaged, end]))
        with pytest.raises(UserError, match=rf"shard-0-of-2.jsonl: line {number} cannot be read \(.*\); repair it, or"):
            create_data.read_journals(work, header)


def test_transformers_run(tiny_chat, tmp_path):
    folder = tiny_chat[0]
    files(tmp_path, [*make_lines(9), "de " + "long " * 120], "{text}")
    command = flags(tmp_path, None, "--model_name", folder, "--engine", "transformers", "--parser", "whole",
                  "--max_tokens", "24", "--temperature", "1", "--batch_size", "4", "--chunk_size", "3")
    label(tmp_path, *command)
    chats, rejected = rows(tmp_path / "labels.jsonl"), rows(tmp_path / "labels.rejected.jsonl")
    assert len(chats) >= 6 and sorted(row["line"] for row in chats + rejected) == list(range(10))
    assert "leaves no room" in rejected[-1]["why"] and rejected[-1]["line"] == 9
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert "model was " in label(tmp_path, *command, ok=False)        # other weights under the same name are refused


@pytest.fixture
def launch(server, tmp_path):
    """launch(*flags, **settings) starts the launcher on two fake GPUs."""
    with launches(tmp_path) as run:
        env = os.environ | {"VENV": "none", "ENGINE": "openai", "MODEL": "teacher", "GPUS": "2", "MAX_MODEL_LEN": "0",
                            "RESTART_S": "0", "CUDA_VISIBLE_DEVICES": ""}
        words = ["lines.txt", "labels.jsonl", "1", "--prompt_file", "prompt.txt", "--concurrency", "4", "--base_url"]
        yield lambda *more, **settings: run(["bash", LAUNCHER, *words, server.url, *more], env | settings)


def stand_in(folder, lines):
    """A PATH whose python passes the launcher's slow check at once, and otherwise runs these lines of sh."""
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(f'#!/bin/sh\ncase "$*" in *--dry_run) exit ;; esac\n{lines}\n')
    (folder / "bin" / "python").chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def command_line(pid):
    """The command line of a process, as words; one empty word after its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def instance(process, number):
    """Pid of an instance of a launch, or None."""
    for pid in alive(process.mark):
        words = command_line(pid)
        if words[0].endswith(b"python") and f"{number}/2".encode() in words:
            return pid
    return None


@pytest.mark.slow
@pytest.mark.race
def test_launcher_restarts_an_instance_leaves_no_process_and_merges(server, whole, launch, quick_python, tmp_path):
    """An instance is killed, then the launcher; the next launch gets Ctrl-C; the third has the undisturbed results."""
    files(tmp_path, whole[0])
    path = stand_in(tmp_path, f'exec {quick_python} "$@"')

    def launched(more):
        """Launch with one request at a time; wait until it has finished `more` lines."""
        before, process = labelled(tmp_path), launch("--concurrency", "1", PATH=path)
        wait_until(lambda: labelled(tmp_path) >= before + more or process.poll() is not None, "first lines")
        return process
    killed = launched(2)
    os.kill(wait_until(lambda: instance(killed, 1), "an instance"), signal.SIGKILL)
    wait_until(lambda: "instance 1 starts again in 0 s (1 of 2)" in killed.log.read_text() and instance(killed, 1),
               "a second instance")
    killed.kill()
    # reap the killed launcher only after all its processes are gone
    wait_until(lambda: not alive(killed.mark), "end of every process")
    assert killed.wait(timeout=PATIENCE_S) == -9 and "status 137" in killed.log.read_text()
    process = launched(4)
    os.killpg(process.pid, signal.SIGINT)       # Ctrl-C comes to the whole foreground group
    assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGINT, process.log.read_text()
    wait_until(lambda: not alive(process.mark), "end of every process")
    # the instances get the signal later and may finish some lines
    assert 6 <= labelled(tmp_path) < 60 and not (tmp_path / "labels.jsonl").exists()
    process = launch(PATH=path)
    assert process.wait(timeout=PATIENCE_S) == 0, process.log.read_text()
    assert results(tmp_path) == whole[1] and "60 of them finished, 0 to do" in process.log.read_text()
    ids = [row["id"] for path in (tmp_path / "labels.jsonl.work").glob("*.jsonl") for row in rows(path) if "id" in row]
    assert sorted(ids) == list(range(60))


@pytest.mark.slow
@pytest.mark.race
def test_launcher_gives_up_on_an_instance_that_keeps_failing(launch, tmp_path):
    files(tmp_path, make_lines(2))
    lines = """case "$*" in *"--shard 0/2") sleep 1; touch finished ;;
               *"--shard 1/2") [ -e left ] && grep -q . "/proc/$(cat left)/environ" && touch overlap
                               env -i sleep 1000 & echo $! >bare     # as vLLM's, whose environment is empty
                               sleep 1000 & echo $! >left; echo "error: no luck"; exit 7 ;; *) touch merged ;; esac"""
    process = launch(PATH=stand_in(tmp_path, lines), MAX_RESTARTS="1", RESTART_S="1")
    assert process.wait(timeout=PATIENCE_S) == 1
    printed = process.log.read_text()
    assert printed.count("instance 1 ended with status 7: error: no luck") == 2
    assert "error: instances 1 failed; finished lines are kept" in printed
    assert (tmp_path / "finished").exists() and not (tmp_path / "merged").exists()      # the other instance finished
    wait_until(lambda: not alive(process.mark), "end of the processes of a failed instance")
    assert not (tmp_path / "overlap").exists()      # they ended before the restart
    bare = (tmp_path / "bare").read_text().strip()
    wait_until(lambda: b"sleep" not in command_line(bare), "end of a process without environment")
