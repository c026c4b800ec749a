"""Another model as the teacher: packed scores equal loops over whole logits; whole runs, the student's draws."""
import json
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core import chat, dist
from core.cli import UserError
from distill import frozen, packed_lm, teaching
from distill.chat_data import ChatTable, write_table
from distill.teachers import Prompt
from tests.helpers import chats, students
from tests.helpers.lora_server import draw_answer

PROMPT = "Name the language. the quick brown fox\n"
WORLD = dist.World(device=torch.device("cpu"))
# fp32 logarithms of these vocabularies are between 4 and 8, so each model rounds a row's by half of this
STEP = 2**-21
# the teacher's template: it puts other tokens before an answer than the student's
SPOKEN = chats.QWEN.replace("'<|im_start|>' + m.role + '\\n'", "'<|im_start|>' + m.role + ' of'").replace(
    "'<|im_start|>assistant\\n'", "'<|im_start|>assistant of'")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folder with a student, a larger teacher with another template, chats and a prompt."""
    folder = tmp_path_factory.mktemp("larger")
    chats.student(folder / "student", max_position_embeddings=512)
    chats.student(folder / "teacher", "llama", vocab_size=416, hidden_size=48, num_hidden_layers=3, head_dim=12)
    chats.tokenizer(SPOKEN).save_pretrained(folder / "teacher")
    talks = [[m for m in messages if m["role"] != "system"] for messages in chats.conversations(12)]
    records = [{"messages": talk} for talk in talks]
    for record in records[:4]:      # the teacher reads two examples first
        record["messages"] = record["messages"][-2:]
        record["teacher_messages"] = [*chats.ask("das ist", "de"), *chats.ask("est la", "fr"), record["messages"][-2]]
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "few.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:4]))
    (folder / "system.txt").write_text(PROMPT)
    return folder


@pytest.mark.parametrize("prompt, kind, k", [(Prompt("system", PROMPT.strip()), "forward", 0),
                                             (Prompt("none", ""), "reverse", 5)])
def test_scores_and_gradients_are_those_of_whole_logits(inputs, tmp_path, prompt, kind, k):
    """The teacher's larger vocabulary is padding. All weights of the student are trained, none of the teacher's."""
    own, other = (chat.load_tokenizer(inputs / name) for name in ("student", "teacher"))
    encoders = [chat.Encoder(tokenizer) for tokenizer in (own, other)]
    write_table(tmp_path, [inputs / "chats.jsonl"], teaching.PairEncoder(*encoders, prompt), 512)
    table, chosen = ChatTable(tmp_path), [0, 3, 5, 7]
    model, parts = packed_lm.build_empty(inputs / "student", torch.float32, wrap=partial(
        frozen.Student, prompted=(1.0, kind, 0.5, k)))
    model.frozen["teacher"] = frozen.build_empty(inputs / "teacher", torch.float32)
    packed_lm.load(model, parts, WORLD)
    frozen.load_all(model, WORLD, None)
    model.train()
    model.chunk = 7
    loss, _, n, _, total = model(frozen.collate_prompted([table[i] for i in chosen]))
    loss.backward()

    student, teacher = (AutoModelForCausalLM.from_pretrained(inputs / name) for name in ("student", "teacher"))
    records, wanted = [json.loads(line) for line in open(inputs / "chats.jsonl")], []
    for record in (records[i] for i in chosen):
        messages = record["messages"]
        for i in [i for i, m in enumerate(messages) if m["role"] == "assistant"]:
            before = record.get("teacher_messages") or messages[:i]
            before = ([{"role": "system", "content": PROMPT.strip()}] if prompt.role == "system" else []) + before
            with torch.no_grad():
                teacher_rows, same = students.answer_rows(teacher, other, before, messages[i])
            rows, ids = students.answer_rows(student, own, messages[:i], messages[i])
            assert same == ids
            wanted += [students.apart(*pair, kind, k=k) for pair in zip(rows, teacher_rows, strict=True)]
    sum(wanted).backward()
    assert n == len(wanted)
    assert loss.item() == total.item() == pytest.approx(sum(wanted).item(), abs=len(wanted) * STEP)
    weights = dict(model.native.named_parameters())
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(weights[name].grad, parameter.grad, rtol=1e-4, atol=1e-5 * float(
            parameter.grad.abs().max() + 1))
    assert not any("frozen" in name or "packed" in name for name, _ in model.named_parameters())
    assert all(p.grad is None and not p.requires_grad for p in model.frozen["teacher"].parameters())
    assert not any(module.training for module in model.frozen["teacher"].modules()), "no dropout"


def test_vocabularies_are_compared_by_tokens(inputs):
    own, other = chats.tokenizer(), chats.tokenizer(SPOKEN)
    teaching.check_same(own, other, 401, "x")
    other.add_tokens(["<more>"])           # an id that the student's model does not have
    teaching.check_same(own, other, len(own), "x")
    with pytest.raises(UserError, match=r"^--teacher_path x: has another vocabulary than --model_path \(1 ids differ\)"
                                        ", .*distill/create_data.py"):
        teaching.check_same(own, other, 401, "x")
    core = json.loads(own.backend_tokenizer.to_str())      # the same names, one pair of ids swapped
    words = core["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    swapped = chats.tokenizer()
    swapped._tokenizer = type(own.backend_tokenizer).from_str(json.dumps(core))
    with pytest.raises(UserError, match=r"\(2 ids differ\)"):
        teaching.check_same(own, swapped, 401, "x")


def test_contexts_for_the_teacher(inputs):
    encoder = chat.Encoder(chat.load_tokenizer(inputs / "student"))
    talk = chats.ask("the dog", "en")

    def context_of(**record):
        pair = teaching.PairEncoder(encoder, encoder, Prompt("none", ""))
        return chats.encode(pair, **{"messages": talk} | record)
    ids, mask, own = context_of(teacher_messages=[{"role": "system", "content": "fox"}, talk[0]])
    assert ids[own:] != ids[:own] and [t for t, m in zip(ids[own:], mask[own:]) if m] == [
        t for t, m in zip(ids[:own], mask[:own]) if m]
    error = context_of(teacher_messages=[{"role": "user"}])
    assert str(error).startswith('its "teacher_messages": message 1 has no text')
    assert 'its "teacher_messages": has no list' in str(context_of(teacher_messages=[]))
    assert '"teacher_messages" end with a message of the assistant' in str(context_of(teacher_messages=talk))
    two = [*talk, *chats.ask("fox", "fr")]
    assert "give --train_turns last" in str(context_of(messages=two, teacher_messages=two[2:3]))


def own_loss(inputs, student, step):
    """Mean KL(teacher, student) over the student's draws at a step, by plain loops without packing."""
    own, other = (AutoTokenizer.from_pretrained(inputs / name) for name in ("student", "teacher"))
    teacher, divergences = AutoModelForCausalLM.from_pretrained(inputs / "teacher"), []
    for number, record in enumerate(json.loads(line) for line in open(inputs / "few.jsonl")):
        before = [{"role": "system", "content": PROMPT.strip()}, *record["teacher_messages"]]
        prompt = own.apply_chat_template(record["messages"][:-1], add_generation_prompt=True, return_dict=False)
        context = other.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
        seed = int(frozen.generator_of(5, step, number).integers(2**31))
        answer = draw_answer(student, prompt, seed, 6, [own.convert_tokens_to_ids("<|im_end|>")])
        with torch.no_grad():
            rows = student(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1]
            teacher_rows = teacher(torch.tensor([context + answer])).logits[0, len(context) - 1:-1]
        divergences += [students.apart(*pair, "forward") for pair in zip(rows, teacher_rows, strict=True)]
    return (sum(divergences) / len(divergences)).item()


@pytest.mark.slow
def test_draws_come_from_the_current_student(pool, inputs, tmp_path):
    """A checkpoint holds the student before each step. A student one step older draws and scores otherwise."""
    def train(ranks, output_dir, *more, fails=""):
        return students.train(
            pool, ranks, output_dir, "--model_path", inputs / "student", "--train_data_file", inputs / "few.jsonl",
            "--seed", 5, "--learning_rate", 2e-3, "--train_turns", "last", "--max_steps", 4, "--save_steps", 1,
            "--save_total_limit", 0, "--per_device_train_batch_size", 4 // ranks, "--gradient_accumulation_steps", 1,
            *more, fails=fails)
    flags = ("--teacher_path", inputs / "teacher", "--prompt_file", inputs / "system.txt", "--prompt_role", "system",
             "--on_policy", 1, "--max_new_tokens", 6)
    losses = students.column(train(1, tmp_path / "one", "--parallel", "ddp", *flags))
    names = [inputs / "student", *(tmp_path / "one" / f"checkpoint-{step}" for step in (1, 2, 3))]
    nets = [AutoModelForCausalLM.from_pretrained(name) for name in names]
    assert losses == pytest.approx({step + 1: own_loss(inputs, net, step) for step, net in enumerate(nets)}, abs=STEP)
    for step in (1, 2, 3):
        assert losses[step + 1] != pytest.approx(own_loss(inputs, nets[step - 1], step), rel=1e-3), "stale"
    two_ranks = train(2, tmp_path / "two", "--parallel", "fsdp", *flags)
    assert students.column(two_ranks) == pytest.approx(losses, rel=1e-5)
    train(1, tmp_path / "one", "--parallel", "ddp", *flags[2:], fails="teacher")        # another teacher: another run
