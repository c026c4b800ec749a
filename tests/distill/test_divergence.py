"""The model as its own teacher: divergences, packed student and teacher, whole runs, runs on their own answers."""
import json
import math

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from core import adapters, chat, dist
from distill import causal_lm, packed_lm
from distill.chat_data import ChatSamples, ChatTable, Reading, collate, write_table
from distill.losses import chunked_loss, divergence
from distill.teachers import read_prompt, with_prompt
from tests.helpers import chats

PROMPT = "Name the language. the quick brown fox jumps over the lazy dog and again\n"
SMOLLM2 = {"vocab_size": 401, "hidden_size": 36, "intermediate_size": 96, "num_hidden_layers": 3,       # 135M's shape,
           "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4, "tie_word_embeddings": True,  # made small
           "max_position_embeddings": 512, "initializer_range": 0.3, "rms_norm_eps": 1e-5,
           "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}


# -- The divergence ----------------------------------------------------------------------------------------------------


def dense(student, teacher, kind, beta, k):
    """divergence of one row by loops over plain probabilities."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    if k:
        kept = sorted(range(len(p)), key=lambda i: -p[i].item())[:k]
        p, q = (torch.stack([*(d[i] for i in kept), sum(d[i] for i in range(len(d)) if i not in kept)]) for d in (p, q))

    def kl(a, b):
        return sum(x * torch.log(x / y) for x, y in zip(a, b))
    m = beta * p + (1 - beta) * q
    return {"forward": kl(p, q), "reverse": kl(q, p), "js": beta * kl(p, m) + (1 - beta) * kl(q, m)}[kind]


@pytest.mark.parametrize("kind, beta, k", [("forward", 0.5, 0), ("reverse", 0.5, 0), ("js", 0.5, 0), ("js", 0.1, 0),
                                           ("forward", 0.5, 4), ("reverse", 0.5, 4), ("js", 0.8, 4)])
def test_values_and_gradients_are_the_dense_ones(kind, beta, k):
    """Through the head, whole and in pieces, with a share of cross-entropy; the teacher gets no gradient."""
    torch.manual_seed(0)
    ours = [torch.randn(shape, requires_grad=True) for shape in ((11, 5), (23, 5), (23,))]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    taught, targets = torch.randn(11, 5, requires_grad=True), torch.randint(0, 23, (11,))
    rows = theirs[0] @ theirs[1].T + theirs[2]
    with torch.no_grad():
        teacher = taught.double() @ theirs[1].T + theirs[2]
    apart = [dense(row, other, kind, beta, k) for row, other in zip(rows, teacher)]
    ce = -rows.log_softmax(-1)[range(11), targets]
    (2 * (0.3 * ce.sum() + 0.7 * sum(apart))).backward()
    for chunk in (100, 4):
        for t in ours:
            t.grad = None
        loss, right, all_ce, all_apart = chunked_loss(ours[0], ours[1:], targets, chunk, (taught,),
                                                      (0.7, kind, beta, k))
        (2 * loss).backward()
        assert (all_ce.item(), all_apart.item()) == pytest.approx((ce.sum().item(), sum(apart).item()), rel=1e-5)
        assert loss.item() == pytest.approx(0.3 * ce.sum().item() + 0.7 * sum(apart).item(), rel=1e-5)
        assert right == (rows.argmax(-1) == targets).sum() and taught.grad is None
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a.grad, b.grad.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_ruled_out_tokens_are_no_nan(kind):
    """Logits of -inf in both, or in one: 0 log 0 is 0, and what cannot be is only a large number."""
    student = torch.tensor([[0.0, 1.0, -math.inf], [0.0, -math.inf, 2.0]], requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0, -math.inf], [0.0, 1.0, -math.inf]])
    found = divergence(student, teacher, kind)
    found.sum().backward()
    assert torch.isfinite(found).all() and torch.isfinite(student.grad).all()
    assert found[0].item() == pytest.approx(dense(student[0, :2], teacher[0, :2], kind, 0.5, 0).item(), rel=1e-5)
    with pytest.raises(ValueError, match="no divergence 'kl'"):
        divergence(student, teacher, "kl")


# -- Student and teacher in one model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder with two students, conversations, a prompt for each role."""
    folder = tmp_path_factory.mktemp("self")
    chats.student(folder / "qwen", max_position_embeddings=512)
    chats.student(folder / "smollm2", "llama", **SMOLLM2, attention_bias=False)
    talks = [[message for message in messages if message["role"] != "system"] for messages in chats.conversations(24)]
    chats.write(folder / "chats.jsonl", talks)
    (folder / "system.txt").write_text(PROMPT)
    (folder / "user.txt").write_text(PROMPT + "{text}\nthe language is")
    return folder


def prompted_table(made, folder, student, role, turns="all"):
    encoder = chat.Encoder(chat.load_tokenizer(made / student), turns)
    write_table(folder, [made / "chats.jsonl"], Reading(encoder, 512, prompt=read_prompt(made / f"{role}.txt", role)))
    return ChatTable(folder)


def random_adapter(folder, model, seed=3):
    """Write an adapter that does something: B is not zero."""
    adapters.init_adapters(model.net, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapters.adapter_weights(model.net).items():
        if ".lora_B." in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    adapters.save_config(model.net, folder)
    save_file({n: p.detach().clone() for n, p in adapters.adapter_weights(model.net).items()},
              folder / "adapter_model.safetensors")


def alone(model, base, tokenizer, messages, role, made, turns="all"):
    """[(student's logits, teacher's logits, target)] of every trained token, each conversation without any other."""
    found, prompt = [], read_prompt(made / f"{role}.txt", role)
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i in places if turns == "all" else places[-1:]:
        logits = []
        for asked in (messages[:i], [*with_prompt(prompt, messages[:i])]):
            start = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
            ids = tokenizer.apply_chat_template([*asked, messages[i]], return_dict=False)
            while tokenizer.decode(ids[-1:]).isspace():
                ids = ids[:-1]
            with torch.set_grad_enabled(not logits):
                net = base if logits else model
                logits.append(net(torch.tensor([ids])).logits[0, len(start) - 1:-1])
            answer = ids[len(start):]
        found += zip(*logits, answer, strict=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("student, role, kind, recompute", [
    ("qwen", "system", ("forward", 0.5, 0), None), ("smollm2", "user", ("js", 0.3, 6), "all"),
    ("smollm2", "system", ("reverse", 0.5, 0), None)])
def test_packed_self_distillation_is_the_dense_one(made, tmp_path, student, role, kind, recompute):
    """Losses and the gradient of every adapter, from transformers' and PEFT's forward of each conversation alone."""
    turns = "last" if role == "user" else "all"
    table = prompted_table(made, tmp_path / "table", student, role, turns)
    lora = (5, 5, 0.0, "all-linear", str(made / student))
    model, parts = packed_lm.build_empty(made / student, torch.float32, lora, recompute, prompted=(0.7, *kind))
    packed_lm.load(model, parts, dist.World(device=torch.device("cpu")))
    random_adapter(tmp_path, model)
    model.train()
    model.chunk = 7
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    chosen = [3, 0, 7, 11]
    state = torch.get_rng_state()
    batch = collate([ChatSamples(table)[n] for n in chosen], prompted=True)
    passes = []
    causal_lm.decoder_layers(model.native)[0].register_forward_pre_hook(
        lambda layer, _: passes.append((layer.training, torch.is_grad_enabled())))
    loss, right, n, ce, apart = model(batch)
    assert passes == [(False, False), (True, True)], "the teacher has no dropout and keeps nothing"
    loss.backward()
    assert torch.equal(state, torch.get_rng_state()) and model.net.training
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}

    tokenizer = AutoTokenizer.from_pretrained(made / student)
    base = AutoModelForCausalLM.from_pretrained(made / student)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made / student), tmp_path,
                                       is_trainable=True)
    talks = [json.loads(line)["messages"] for line in open(made / "chats.jsonl")]
    rows = [row for number in chosen for row in alone(theirs, base, tokenizer, talks[number], role, made, turns)]
    wanted_ce = sum(-s.log_softmax(-1)[target] for s, _, target in rows)
    wanted = sum(dense(s.double(), t.double(), *kind) for s, t, _ in rows)
    total = 0.3 * wanted_ce + 0.7 * wanted
    total.backward()
    assert n == len(rows) == int(table.targets[chosen].sum())
    assert (loss.item(), ce.item(), apart.item()) == pytest.approx((total.item(), wanted_ce.item(), wanted.item()),
                                                                   rel=1e-4)
    assert wanted.item() > 0.01 * n.item(), "prompt and adapter matter"
    grads = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if ".lora_" in name}
    ours = adapters.adapter_weights(model.net)
    assert grads.keys() == ours.keys()
    for name, grad in grads.items():
        # sums in float32 of other orders: 1e-5 of the largest was seen
        torch.testing.assert_close(ours[name].grad, grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max() + 1))
