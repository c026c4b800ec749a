"""Self-distillation: divergences, packed student and teacher, whole runs, runs on the student's answers."""
import json
import math
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from core import adapters, chat, dist
from core.cli import UserError
from distill import causal_lm, evaluate, frozen, packed_lm
from distill.chat_data import ChatTable, write_table
from distill.divergence import divergence, teacher_sums
from distill.losses import chunked_loss
from distill.teachers import read_prompt, add_prompt
from distill.teaching import PairEncoder
from tests.helpers import chats, scripts, students
from tests.helpers.lora_server import LoraServer
from tests.helpers.students import column

PROMPT = "Name the language. the quick brown fox jumps over the lazy dog and again\n"
WORLD = dist.World(device=torch.device("cpu"))
SMOLLM2 = {"vocab_size": 401, "hidden_size": 36, "intermediate_size": 96, "num_hidden_layers": 3,       # 135M's shape,
           "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4, "tie_word_embeddings": True,  # made small
           "max_position_embeddings": 512, "initializer_range": 0.3, "rms_norm_eps": 1e-5,
           "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}


@pytest.mark.parametrize("kind, beta, k", [("forward", 0.5, 0), ("reverse", 0.5, 0), ("js", 0.5, 0), ("js", 0.1, 0),
                                           ("forward", 0.5, 4), ("reverse", 0.5, 4), ("js", 0.8, 4)])
def test_values_and_gradients_are_the_dense_ones(kind, beta, k):
    """The head runs whole and in pieces; a share of the loss is cross-entropy; the teacher gets no gradient."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((11, 5), (23, 5), (23,))]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    teacher_hidden, targets = torch.randn(11, 5, requires_grad=True), torch.randint(0, 23, (11,))
    rows = exact[0] @ exact[1].T + exact[2]
    with torch.no_grad():
        teacher = teacher_hidden.double() @ exact[1].T + exact[2]
    wanted = [students.apart(row, other, kind, beta, k) for row, other in zip(rows, teacher)]
    ce = -rows.log_softmax(-1)[range(11), targets]
    (2 * (0.3 * ce.sum() + 0.7 * sum(wanted))).backward()
    for chunk in (100, 4):
        for t in tensors:
            t.grad = None
        loss, right, all_ce, all_apart = chunked_loss(tensors[0], tensors[1:], targets, chunk, teacher_sums(
            (0.7, kind, beta, k), *tensors[1:]), (teacher_hidden,))
        (2 * loss).backward()
        assert (all_ce.item(), all_apart.item()) == pytest.approx((ce.sum().item(), sum(wanted).item()), rel=1e-5)
        assert loss.item() == pytest.approx(0.3 * ce.sum().item() + 0.7 * sum(wanted).item(), rel=1e-5)
        assert right == (rows.argmax(-1) == targets).sum() and teacher_hidden.grad is None
        for a, b in zip(tensors, exact):
            torch.testing.assert_close(a.grad, b.grad.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_ruled_out_tokens_are_no_nan(kind):
    """Both or one have logits of -inf: 0 log 0 is 0, and the divergence stays finite."""
    student = torch.tensor([[0.0, 1.0, -math.inf], [0.0, -math.inf, 2.0]], requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0, -math.inf], [0.0, 1.0, -math.inf]])
    values = divergence(student, teacher, kind)
    values.sum().backward()
    assert torch.isfinite(values).all() and torch.isfinite(student.grad).all()
    assert values[0].item() == pytest.approx(students.apart(student[0, :2], teacher[0, :2], kind).item(), rel=1e-5)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folder with two students, conversations and a prompt for each role."""
    folder = tmp_path_factory.mktemp("self")
    chats.student(folder / "qwen", max_position_embeddings=512)
    chats.student(folder / "smollm2", "llama", **SMOLLM2, attention_bias=False)
    talks = [[message for message in messages if message["role"] != "system"] for messages in chats.conversations(24)]
    chats.write(folder / "chats.jsonl", talks)
    (folder / "system.txt").write_text(PROMPT)
    (folder / "user.txt").write_text(PROMPT + "{text}\nthe language is")
    return folder


def prompted_table(inputs, folder, student, role, turns="all"):
    encoder = chat.Encoder(chat.load_tokenizer(inputs / student), turns)
    prompt = read_prompt(inputs / f"{role}.txt", role)
    write_table(folder, [inputs / "chats.jsonl"], PairEncoder(encoder, encoder, prompt), 512)
    return ChatTable(folder)


def adapted(inputs, folder, student, prompted, recompute=None):
    """A PackedLM with an adapter whose B is not zero, saved to the folder."""
    lora = (5, 5, 0.0, "all-linear", str(inputs / student))
    model, parts = packed_lm.build_empty(inputs / student, torch.float32, lora, recompute,
                                         wrap=partial(frozen.Student, prompted=prompted))
    packed_lm.load(model, parts, WORLD)
    adapters.init_adapters(model.net, 3)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapters.adapter_weights(model.net).items():
        if ".lora_B." in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    model.net.peft_config["default"].save_pretrained(folder)
    save_file({n: p.detach().clone() for n, p in adapters.adapter_weights(model.net).items()},
              folder / "adapter_model.safetensors")
    return model


def alone(model, base, tokenizer, messages, role, inputs, turns="all"):
    """[(student's logits, target, teacher's logits)] of every trained token of one conversation."""
    rows, prompt = [], read_prompt(inputs / f"{role}.txt", role)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i in answers if turns == "all" else answers[-1:]:
        with torch.no_grad():
            teacher_rows, _ = students.answer_rows(base, tokenizer, [*add_prompt(prompt, messages[:i])], messages[i])
        rows += zip(*students.answer_rows(model, tokenizer, messages[:i], messages[i]), teacher_rows, strict=True)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("student, role, kind, recompute", [
    ("qwen", "system", ("forward", 0.5, 0), None), ("smollm2", "user", ("js", 0.3, 6), "all")])
def test_packed_self_distillation_is_the_dense_one(inputs, tmp_path, student, role, kind, recompute):
    """Losses and all adapters' gradients equal those of transformers and PEFT on each conversation alone."""
    turns = "last" if role == "user" else "all"
    table = prompted_table(inputs, tmp_path / "table", student, role, turns)
    model = adapted(inputs, tmp_path, student, (0.7, *kind), recompute).train()
    model.chunk = 7
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    chosen = [3, 0, 7, 11]
    state = torch.get_rng_state()
    batch = frozen.collate_prompted([table[n] for n in chosen])
    passes = []
    causal_lm.decoder_layers(model.native)[0].register_forward_pre_hook(
        lambda layer, _: passes.append((layer.training, torch.is_grad_enabled())))
    loss, right, n, ce, apart = model(batch)
    assert passes == [(False, False), (True, True)], "the teacher has no dropout and keeps nothing"
    loss.backward()
    assert torch.equal(state, torch.get_rng_state()) and model.net.training
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}

    tokenizer = AutoTokenizer.from_pretrained(inputs / student)
    base = AutoModelForCausalLM.from_pretrained(inputs / student)
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(inputs / student), tmp_path,
                                       is_trainable=True)
    talks = [json.loads(line)["messages"] for line in open(inputs / "chats.jsonl")]
    rows = [row for number in chosen for row in alone(reference, base, tokenizer, talks[number], role, inputs, turns)]
    wanted_ce = sum(-s.log_softmax(-1)[target] for s, target, _ in rows)
    wanted = sum(students.apart(s, t, *kind) for s, _, t in rows)
    total = 0.3 * wanted_ce + 0.7 * wanted
    total.backward()
    assert n == len(rows) == int(table.targets[chosen].sum())
    assert (loss.item(), ce.item(), apart.item()) == pytest.approx((total.item(), wanted_ce.item(), wanted.item()),
                                                                   rel=1e-4)
    assert wanted.item() > 0.01 * n.item(), "prompt and adapter matter"
    grads = {name.replace(".default", ""): p.grad for name, p in reference.named_parameters() if ".lora_" in name}
    weights = adapters.adapter_weights(model.net)
    assert grads.keys() == weights.keys()
    for name, grad in grads.items():
        # float32 sums in another order: 1e-5 of the largest was seen
        torch.testing.assert_close(weights[name].grad, grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max() + 1))


@pytest.fixture(scope="module")
def train(pool, inputs):
    """train(ranks, output_dir, *flags) -> {step: {metric: value}} of a run of train_sft.py."""
    def run(ranks, output_dir, *more, fails=""):
        return students.train(
            pool, ranks, output_dir, "--model_path", inputs / "smollm2", "--train_data_file", inputs / "chats.jsonl",
            "--prompt_file", inputs / "system.txt", "--prompt_role", "system", "--validation_split", 0.2, "--seed", 5,
            "--use_lora", "--lora_rank", 4, "--learning_rate", 5e-3, "--eval_steps", 3, *more, fails=fails)
    return run


def weights_of(output_dir):
    return load_file(output_dir / "checkpoint-5" / "adapter_model.safetensors")


ALONE = ("--parallel", "ddp", "--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2)
SPLIT = ("--parallel", "fsdp", "--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 1)
DRAWN = ("--on_policy", 0.6, "--max_new_tokens", 6, "--max_steps", 5, "--save_steps", 2, "--save_total_limit", 0)


@pytest.mark.slow
def test_runs_on_drawn_answers_are_the_same(train, inputs, tmp_path):
    """A run resumed at step 2 and one on two ranks, where a server draws with the adapters of each step, are equal."""
    folder = tmp_path / "one"
    whole = train(1, folder, *ALONE, *DRAWN)
    assert whole[1]["train/loss"] == pytest.approx(whole[1]["train/kl_loss"]), "nothing but the divergence is learned"
    shutil.copytree(folder, tmp_path / "again", ignore=shutil.ignore_patterns("checkpoint-[45]"))
    again = train(1, tmp_path / "again", *ALONE, *DRAWN)
    assert again[2] == whole[2], "with its clock: steps 1 and 2 were not done again"
    assert column(again) == column(whole)
    for name, tensor in weights_of(folder).items():
        assert torch.equal(tensor, weights_of(tmp_path / "again")[name])
    with LoraServer(inputs / "smollm2") as server:
        server.fails = {"/v1/completions": 503}
        served = train(2, tmp_path / "served", *SPLIT, *DRAWN, "--base_url", server.url)
        assert column(served) == pytest.approx(column(whole), rel=1e-4)
        for name, tensor in weights_of(folder).items():     # Adam turns rounding into parts of a step of 5e-3
            torch.testing.assert_close(tensor, weights_of(tmp_path / "served")[name], rtol=1e-3, atol=5e-4)
        loads = [path for path, _ in server.calls if "lora" in path]
        assert loads == ["/v1/load_lora_adapter", *["/v1/load_lora_adapter", "/v1/unload_lora_adapter"] * 4]
        server.fails = {"/v1/load_lora_adapter": 400}
        train(1, tmp_path / "refused", *ALONE, *DRAWN, "--base_url", server.url,
              fails='HTTP 400 {"error": {"message": "no"}}; it needs --enable-lora')


def test_draws_depend_on_run_step_and_sample_alone(inputs, tmp_path):
    """The student samples answers after its prompt, with its adapters."""
    table = prompted_table(inputs, tmp_path / "table", "smollm2", "system")
    model, ends = adapted(inputs, tmp_path, "smollm2", (1.0, "forward", 0.5, 0)), [2]
    batches = [frozen.collate_prompted([table[n] for n in numbers]) for numbers in ((0, 1, 2, 3), (4, 5))]

    def replace_answers(batches, share, step):
        args = SimpleNamespace(on_policy=share, max_new_tokens=5, seed=1, bf16=False)
        return frozen.replace_answers(args, WORLD, model, table, batches, ends, step)
    (first, second), targets = replace_answers(batches, 1.0, 7)
    assert targets == len(first.targets) + len(second.targets) and first.samples == (0, 1, 2, 3)
    same, _ = replace_answers(batches[1:], 1.0, 7)
    assert torch.equal(same[0].input_ids, second.input_ids)
    other, _ = replace_answers(batches[1:], 1.0, 8)
    assert not torch.equal(other[0].input_ids, second.input_ids)
    kept, n = replace_answers(batches, 0.0, 7)
    assert torch.equal(kept[0].input_ids, batches[0].input_ids) and n == table.targets[:6].sum()
    assert model.native.config._attn_implementation != "sdpa"


@pytest.mark.slow
def test_the_evaluation_of_a_prompt(inputs, train, tmp_path, capsys):
    """The student's divergence and likelihood equal the run's validation; the base's equal plain forward passes."""
    logged = train(1, tmp_path / "run", *ALONE, "--max_steps", 6, "--save_steps", 0)
    command = ["--checkpoint", str(tmp_path / "run" / "checkpoint-6"), "--output_dir", str(tmp_path / "judged"),
             "--follows", "e", "--max_new_tokens", "4", "--batch_size", "3"]
    scripts.run(evaluate, command)
    report = json.loads((tmp_path / "judged" / "evaluation.json").read_text())
    metrics, shown = report["metrics"], capsys.readouterr().out
    assert metrics["student: kl"] == pytest.approx(logged[6]["eval/kl_loss"], rel=1e-4)
    assert metrics["student: nll"] == pytest.approx(logged[6]["eval/ce_loss"], rel=1e-4)
    assert 0 < metrics["student: kl"] < metrics["base: kl"] and metrics["base + prompt: kl"] == 0
    assert metrics["closed: kl"] == pytest.approx(1 - metrics["student: kl"] / metrics["base: kl"])

    tokenizer = AutoTokenizer.from_pretrained(inputs / "smollm2")
    base = AutoModelForCausalLM.from_pretrained(inputs / "smollm2")
    talks = [json.loads(line)["messages"] for line in open(inputs / "chats.jsonl")]
    rows = [row for sample in report["samples"] for row in alone(base, base, tokenizer, talks[sample["id"]], "system",
                                                                 inputs)]
    kl = sum(students.apart(s, t, "forward") for s, _, t in rows).item() / len(rows)
    assert metrics["base: kl"] == pytest.approx(kl, rel=1e-4)
    teacher = sum(-t.log_softmax(-1)[target] for _, target, t in rows).item() / len(rows)
    assert metrics["base + prompt: nll"] == pytest.approx(teacher, rel=1e-4)
    assert metrics["base + prompt: exact"] == 1 and "; the student went " in shown
    prompt = tokenizer.apply_chat_template([{"role": "system", "content": PROMPT.strip()}], return_dict=False)
    assert metrics["tokens saved"] == pytest.approx(len(prompt) - 1, abs=1)
    with pytest.raises(SystemExit):
        scripts.run(evaluate, [*command[:3], str(tmp_path / "again"), *command[6:], "--min_closed", "1"])
    assert "less than --min_closed 1.0" in capsys.readouterr().err


def test_a_rule_that_names_a_word_of_the_question():
    def rule(topic, *texts):
        return evaluate.follows_rule(SimpleNamespace(follows="^{topic}", topic=topic), *texts)
    good, bad = [("Is C++ it?", "C++ is")], [("Is C++ it?", "Java is"), ("Is Java it?", "C++ is")]
    assert [rule(r"Is (\S+)", *texts) for texts in good + bad] == [True, False, False]
    with pytest.raises(UserError, match="--topic .* is not in the question 'Is it'"):
        rule("What (.)", "Is it", "x")
