"""--keep equals plain loops, on any number of ranks and resumed; the evaluation of forgetting."""
import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill import evaluate
from tests.helpers import chats, scripts, students
from tests.helpers.students import column

PROMPT = "Name the language. the quick brown fox\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folder with a student, chats to learn and chats to keep."""
    folder = tmp_path_factory.mktemp("forgotten")
    chats.student(folder / "student", max_position_embeddings=512)
    talks = [[m for m in messages if m["role"] != "system"][-2:] for messages in chats.conversations(40)]
    chats.write(folder / "chats.jsonl", talks[:12])
    chats.write(folder / "keep.jsonl", talks[20:24])
    chats.write(folder / "unrelated.jsonl", talks[30:34])
    (folder / "system.txt").write_text(PROMPT)
    return folder


def kept_kl(inputs, student, file="keep.jsonl"):
    """KL(base, student) per token of the answers of a file, by a plain forward pass of each chat."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "student")
    base, total, count = AutoModelForCausalLM.from_pretrained(inputs / "student"), 0.0, 0
    for messages in (json.loads(line)["messages"] for line in open(inputs / file)):
        with torch.no_grad():
            p, q = (students.answer_rows(net, tokenizer, messages[:-1], messages[-1])[0] for net in (base, student))
        total, count = total + sum(students.apart(*pair, "forward").item() for pair in zip(q, p)), count + len(p)
    return total / count


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_kept_answers_are_scored_by_the_untouched_base(pool, inputs, tmp_path, capsys, weights):
    """Every second step scores them, on one rank and on two. An evaluation on other chats leaves out the kept ones."""
    def train(ranks, output_dir, *more, fails=""):
        return students.train(
            pool, ranks, output_dir, "--model_path", inputs / "student", "--train_data_file", inputs / "chats.jsonl",
            "--prompt_file", inputs / "system.txt", "--prompt_role", "system", "--validation_split", 0.2, "--seed", 5,
            "--learning_rate", 5e-3, "--max_steps", 5, "--save_steps", 1, "--save_total_limit", 0, "--eval_steps", 0,
            "--per_device_train_batch_size", 4 // ranks, "--gradient_accumulation_steps", 1, *more, fails=fails)
    lora = ["--use_lora", "--lora_rank", 4] if weights == "lora" else []
    flags = [*lora, "--keep", inputs / "keep.jsonl", "--keep_every", 2]
    one_rank = train(1, tmp_path / "one", "--parallel", "ddp", *flags)
    keep_kl = column(one_rank, "train/keep_kl")
    assert list(keep_kl) == [1, 3, 5] and keep_kl[1] == pytest.approx(0, abs=1e-6)
    folder = tmp_path / "one" / "checkpoint-4"
    student = AutoModelForCausalLM.from_pretrained(inputs / "student" if lora else folder)
    student = PeftModel.from_pretrained(student, folder) if lora else student
    wanted = kept_kl(inputs, student)
    assert keep_kl[5] == pytest.approx(wanted, rel=1e-4) and wanted > 1e-4
    two_ranks = train(2, tmp_path / "two", "--parallel", "ddp" if lora else "fsdp", *flags)
    assert column(two_ranks, "train/loss") == pytest.approx(column(one_rank, "train/loss"), rel=1e-4)
    assert column(two_ranks, "train/keep_kl") == pytest.approx(keep_kl, rel=1e-3, abs=1e-6)
    if weights == "full":
        shutil.copytree(tmp_path / "one", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-[345]"))
        again = train(1, tmp_path / "again", "--parallel", "ddp", *flags)
        for name in ("train/loss", "train/keep_kl"):
            assert column(again, name) == column(one_rank, name)
        first, second = (load_file(tmp_path / run / "checkpoint-5" / "model.safetensors") for run in ("one", "again"))
        assert all(torch.equal(first[key], second[key]) for key in first)
        train(1, tmp_path / "again", "--parallel", "ddp", *flags, "--keep_weight", 3, fails="teacher")
        return
    command = ["--checkpoint", str(folder), "--output_dir", str(tmp_path / "judged"), "--max_new_tokens", "2"]
    mixed, kept = tmp_path / "mixed.jsonl", (inputs / "keep.jsonl").read_text()
    mixed.write_text((inputs / "unrelated.jsonl").read_text() + kept)
    scripts.run(evaluate, [*command, "--unrelated", str(mixed)])
    report = json.loads((tmp_path / "judged" / "evaluation.json").read_text())
    metrics, left_out = report["metrics"], report["data"]["unrelated_lines_left_out"]
    assert left_out == kept.count("\n") and f"{left_out} lines of --unrelated left out" in capsys.readouterr().out
    wanted = kept_kl(inputs, student, "unrelated.jsonl")
    assert metrics["student: unrelated kl"] == pytest.approx(wanted, rel=1e-4) and wanted > 1e-4
    with pytest.raises(SystemExit):
        scripts.run(evaluate, [*command, "--unrelated", str(inputs / "keep.jsonl")])
    assert "keep.jsonl: --keep trained each of its questions" in capsys.readouterr().err

    hard = train(1, tmp_path / "hard", "--parallel", "ddp", *flags[:-1], 1, "--keep_weight", 50)
    loose = train(1, tmp_path / "loose", "--parallel", "ddp", *flags[:-1], 1, "--keep_weight", 1e-9)
    assert hard[5]["train/keep_kl"] < 0.5 * loose[5]["train/keep_kl"]
