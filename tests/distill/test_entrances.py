"""What must stop a run at its entrance: each case trained on something else in silence, or ended in a traceback."""
import gzip
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import chats, students
from tests.helpers.lora_server import LoraServer
from tests.helpers.score_server import ScoreServer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("entrances")
    chats.student(folder / "student", max_position_embeddings=512)
    chats.student(folder / "teacher", hidden_size=48, max_position_embeddings=512)
    chats.write(folder / "chats.jsonl", [chats.ask("the dog", "en"), chats.ask("das ist", "de")])
    (folder / "system.txt").write_text("Name the language.\n")
    return folder


@pytest.fixture
def refused(pool, made, tmp_path):
    """refused(words, *flags): train_sft.py ends with them on one line; a flag may replace one that is given."""
    def run(words, *flags):
        given = ["--model_path", made / "student", "--train_data_file", made / "chats.jsonl", "--max_steps", 1,
                 "--parallel", "ddp", "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 1]
        statuses, output = pool.run(1, "tests.helpers.students.run_trainer", [str(flag) for flag in (
            "--output_dir", tmp_path / "out", "--num_workers", 0, "--report_to", "none", *given, *flags)])
        assert any(statuses) and "Traceback" not in output, output
        assert any(words in line for line in output.splitlines()), output
        return output
    return run


def test_an_untied_head_of_a_model_that_ties_it(made, tmp_path, refused):
    shutil.copytree(made / "student", tmp_path / "tied")
    path = tmp_path / "tied" / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"] + 0.1
    save_file(tensors | {"lm_head.weight": head}, path, {"format": "pt"})
    assert refused("other values for lm_head.weight than for model.embed_tokens.weight", "--model_path", tmp_path / "tied")


@pytest.mark.parametrize("change", [{"num_attention_heads": 0}, {"hidden_size": 10**9}])
def test_a_config_of_no_model(made, tmp_path, refused, change):
    shutil.copytree(made / "student", tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | change))
    assert refused(f"{tmp_path / 'odd'}: ", "--model_path", tmp_path / "odd")


def test_a_line_of_megabytes_is_refused_by_its_beginning(tmp_path, refused):
    """To tokenise all of it would take a minute and gigabytes."""
    chats.write(tmp_path / "long.jsonl", [chats.ask("a", "en"), chats.ask("the dog " * 2**20, "en")])
    assert refused("long.jsonl:2: 8,388,608 characters, more than 512 tokens", "--train_data_file", tmp_path / "long.jsonl")


def test_a_teacher_that_would_read_the_answer(made, tmp_path, refused):
    talk = chats.ask("the dog", "en")
    (tmp_path / "leak.jsonl").write_text(json.dumps({"messages": talk, "teacher_messages": talk}) + "\n")
    assert refused('its "teacher_messages" end with a message of the assistant', "--train_data_file", tmp_path / "leak.jsonl",
            "--teacher_path", made / "teacher")


def test_a_teacher_that_is_the_student_and_reads_the_same(made, refused):
    assert refused("so there is nothing to learn", "--teacher_path", made / "student")


def test_more_alternatives_than_tokens(made, refused):
    assert refused("--distill_topk 401: the models have 401 tokens", "--teacher_path", made / "teacher", "--distill_topk", 401)


@pytest.mark.parametrize("flag", ["--teacher_url", "--base_url"])
def test_a_key_in_an_address_is_never_shown(made, refused, flag):
    more = ["--teacher_path", made / "teacher", "--distill_topk", 3, "--divergence", "js", "--on_policy", 1, "--use_lora"]
    output = refused(f"{flag}: holds a name and password (@), ?... or #...", *more, flag, "http://127.0.0.1:9/v1?api_key=SECRET")
    assert "SECRET" not in output


def shifted(rows):
    return [None, *rows[2:], rows[-1]]


def respelled(rows):
    return [None, *({f" {token}" if i == 0 else token: value for i, (token, value) in enumerate(row.items())}
                    for row in rows[1:])]


def negative(rows):
    return [None, *({**row, "-7": {"logprob": -9.0, "rank": 1}} for row in rows[1:])]


def above_zero(rows):
    return [None, *({token: value | {"logprob": value["logprob"] + 9} for token, value in row.items()}
                    for row in rows[1:])]


def without_own(rows):
    return [None, *({str(token): {"logprob": math.log(0.1), "rank": i + 1} for i, token in enumerate((0, 1, 2))}
                    for _ in rows[1:])]


@pytest.mark.parametrize("wrong, words", [
    (shifted, "which was sent: it is of another place"), (without_own, "which was sent"),
    (respelled, "which is not an id"), (negative, "names a token ['-7'], which is not an id"),
    (above_zero, "gave log-probabilities that are none")])
def test_a_server_is_believed_where_it_gives_the_token_sent(made, refused, wrong, words):
    with ScoreServer(made / "teacher", "big") as server:
        score = server.score
        server.score = lambda ids, k: wrong(score(ids, k))
        assert refused(words, "--teacher_path", made / "teacher", "--distill_topk", 3, "--teacher_url", server.url,
                "--teacher_name", "big")


def test_an_answer_that_would_fill_the_memory(made, refused):
    """gzip in gzip: 4 KiB of it become 4 GiB."""
    with LoraServer(None) as server:
        bomb = gzip.compress(gzip.compress(bytes(2**26)))
        server.answer = lambda path, body: (200, bomb.decode("latin-1"), ("Content-Encoding", "gzip, gzip"))
        assert refused("its answer is gzip, gzip, and was asked for as it is", "--teacher_path", made / "teacher",
                "--distill_topk", 3, "--teacher_url", server.url)


def test_nobody_listens(made, refused):
    """What a server would need is told when there is one."""
    output = refused("/completions: All connection attempts failed", "--teacher_path", made / "teacher", "--distill_topk", 3, "--teacher_url",
                     "http://127.0.0.1:9/v1", "--request_timeout", 0.3)
    assert "max-logprobs" not in output


def test_a_system_message_is_joined_to_the_prompt(pool, made, tmp_path):
    """The same run as with one prompt of both, where the student has its own one too."""
    talk = [{"role": "system", "content": "Be brief."}, *chats.ask("the dog", "en")]
    both = [{"role": "system", "content": "Name the language.\n\nBe brief."}, *talk[1:-1]]
    (tmp_path / "own.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (tmp_path / "told.jsonl").write_text(json.dumps({"messages": talk, "teacher_messages": both}) + "\n")

    def loss(data, *flags):
        found = students.train(pool, 1, tmp_path / data, "--model_path", made / "student", "--train_data_file",
                               tmp_path / f"{data}.jsonl", "--parallel", "ddp", "--max_steps", 1,
                               "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 1, *flags)
        return found[1]["train/loss"]
    joined = loss("own", "--prompt_file", made / "system.txt", "--prompt_role", "system")
    assert joined == loss("told", "--teacher_path", made / "student") != pytest.approx(0, abs=1e-6)
    assert torch.isfinite(torch.tensor(joined))
