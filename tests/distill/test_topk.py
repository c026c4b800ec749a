"""Learning from a teacher's likeliest tokens: tokens, loss, bad input, from teacher to student. Runs: test_train_sft.py."""
import json
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from common.distributed import UserError
from core import chat
from distill import create_data, packed_lm, topk
from distill.dataset import ChatTable, Reading, make_loader, write_table
from tests.helpers import chats, tiny_teacher
from tests.helpers.chats import LLAMA, QWEN, ask


@pytest.fixture(scope="module")
def made():
    return chats.tokenizer()


def record(answer, texts, rows, question="Der Hund"):
    return {"messages": ask(question, answer), "label_tokens": texts, "logprobs": rows}


def table_of(folder, tokenizer, records, k, template=QWEN, limit=256, policy="stop"):
    """(ChatTable, its Alternatives) of records."""
    tokenizer.chat_template = template
    folder.mkdir(exist_ok=True)
    (folder / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    teacher = topk.Alternatives(tokenizer, k)
    write_table(folder / "table", [folder / "chats.jsonl"], Reading(chat.Encoder(tokenizer), limit, policy, teacher))
    return ChatTable(folder / "table"), teacher


def taught(table, tokenizer):
    """[[(trained token, {alternative: probability})] of each sample] as texts, through the loader's own batches."""
    found = []
    for batch in make_loader(table, [[i] for i in range(len(table))], num_workers=0, prefetch_factor=2,
                                        pad_to=200, pad_id=1):
        rows = []
        for target, ids, logprobs in zip(batch.targets, batch.teacher_ids, batch.teacher_logprobs):
            there = torch.isfinite(logprobs)
            assert there[0] or not there.any(), "what is known stands first"
            assert (ids[~there] == (ids[0] if there[0] else target)).all(), "padding repeats"
            rows.append((tokenizer.decode([target]), {tokenizer.decode([i]): round(p.exp().item(), 4)
                                                      for i, p, known in zip(ids, logprobs, there) if known}))
        found.append(rows)
    return found


def logs(**probabilities):
    return [[text, math.log(p)] for text, p in probabilities.items()]


# -- Texts -> student tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template, end", [(QWEN, "<|im_end|>"), (LLAMA, "<|eot_id|>")])
def test_alternatives_are_student_tokens(made, tmp_path, template, end):
    """The k best, as far as each is one token; the end of the turn and samples without them have none."""
    records = [record("en", ["en"], [logs(en=0.5, the=0.2, zz=0.1, x=0.1)]),
               record("de", ["d", "e"], [logs(d=0.6, en=0.3), [[" fr", math.log(0.25)], ["e", math.log(0.5)]]]),
               {"messages": ask("x", "en")}, record("de", ["de"], [logs(de=0.9)]),
               record("ru", ["ru"], [[["zz", -0.1], ["ru", -3.0]]], "no token")]
    table, teacher = table_of(tmp_path, made, records, 3 - 1, template)
    assert taught(table, made) == [
        [("en", {"en": 0.5, "the": 0.2}), (end, {})], [("d", {"d": 0.6, "en": 0.3}), ("e", {"e": 0.5, " fr": 0.25}),
                                                       (end, {})],
        [("en", {}), (end, {})], [("d", {}), ("e", {}), (end, {})], [("ru", {"ru": round(math.exp(-3), 4)}), (end, {})]]
    everything_else = (0.3 + 0.1 + 0.25 + 1 - math.exp(-3)) / 4
    assert teacher.about() == (
        f"teacher    3 of 5 samples have alternatives, for 4 tokens; {100 * everything_else:.2f}% of the probability "
        f"is on everything else; 1 have none; 1 are split otherwise by the student, first {tmp_path}/chats.jsonl:4; "
        "those train on the label alone")
    assert isinstance(table.teacher_ids, np.memmap) and table.topk == 2
    other, _ = table_of(tmp_path / "other", made,
                        [*records[:4], records[4] | {"logprobs": [[["zz", -0.1], ["ru", -2.9]]]}], 2, template)
    assert table.teacher_fingerprint(range(4)) == other.teacher_fingerprint(range(4))
    assert table.teacher_fingerprint(range(5)) != other.teacher_fingerprint(range(5))


def test_only_the_last_answer_is_taught(made, tmp_path):
    messages = [*ask("one", "en"), *ask("two", "en")]
    table, _ = table_of(tmp_path, made, [{"messages": messages, "label_tokens": ["en"], "logprobs": [logs(en=0.7)]}], 1)
    assert taught(table, made) == [[("en", {}), ("<|im_end|>", {}), ("en", {"en": 0.7}), ("<|im_end|>", {})]]


def test_cut_samples_keep_what_is_left(made, tmp_path):
    """Left: places move, and the first token is not trained. Right: what is cut off is not taught."""
    rows = [logs(d=0.6), logs(e=0.7)]
    n = len(table_of(tmp_path / "whole", made, [record("de", ["d", "e"], rows)], 1)[0].tokens)
    for limit, policy, wanted in ((n - 4, "cut_left", [("d", {"d": 0.6}), ("e", {"e": 0.7}), ("<|im_end|>", {})]),
                                  (4, "cut_left", [("e", {"e": 0.7}), ("<|im_end|>", {})]),
                                  (n - 3, "cut_right", [("d", {"d": 0.6})])):
        # the line feed behind the end is not trained
        table, _ = table_of(tmp_path / f"{policy}{limit}", made, [record("de", ["d", "e"], rows)], 1, policy=policy,
                            limit=limit)
        assert taught(table, made) == [wanted]
    records = [record("de", ["d", "e"], [rows[0], logs(zz=0.9)]), record("en", ["en"], [logs(en=0.7)])]
    table, _ = table_of(tmp_path / "first", made, records, 1, policy="cut_left", limit=4)       # from "d" on
    assert taught(table, made) == [[("e", {}), ("<|im_end|>", {})], [("en", {"en": 0.7}), ("<|im_end|>", {})]]


def test_a_student_whose_first_token_has_a_space(tmp_path):
    """In the manner of SentencePiece: what follows a control token begins with a space that nobody wrote."""
    words = ["<s>", "</s>", "<unk>", "\u2581en", "en", "\u2581de", "de", "\u2581ask", "\n", "\u2581"]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>",
                                ignore_merges=True))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    core.add_special_tokens(["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    template = "{% for m in messages %}{% if m.role == 'user' %}<s>{{ m.content }}<s>{% else %}{{ m.content }}</s>" \
               "{% endif %}{% endfor %}"
    table, _ = table_of(tmp_path, tokenizer, [record("en", ["en"], [logs(en=0.6, de=0.3)], "ask")], 2, template)
    assert table.tokens.tolist() == [0, 7, 0, 3, 1]
    assert table.teacher_ids.tolist() == [[3, 5]] and table.teacher_places.tolist() == [3]


@pytest.mark.parametrize("spoil, part", [
    ({"logprobs": None}, "are not one list for each of the 1 label tokens"),
    ({"logprobs": []}, "are not one list for each of the 1 label tokens"),
    ({"logprobs": [[["en", "x"]]]}, "logprobs of label token 1 are no list of [text, finite log-probability]"),
    ({"logprobs": [[["en", math.nan]]]}, "no list of [text, finite log-probability]"),
    ({"logprobs": [{"en": -1.0}]}, "no list of [text, finite log-probability]"),
    ({"logprobs": [[["en", 0.5]]]}, "'en' has 0.5; the logarithm of a probability is at most 0"),
    ({"logprobs": [[["en", -0.1], ["de", -0.2]]]}, "the probabilities add up to 1.724, more than 1"),
    ({"logprobs": [[["en", -1.0], ["en", -2.0]]]}, "have a text twice"),
    ({"label_tokens": ["e"]}, 'its "label_tokens" do not make up the last answer'),
    ({"label_tokens": None}, 'its "label_tokens" do not make up the last answer'),
])
def test_bad_alternatives_are_named(made, tmp_path, spoil, part):
    good = record("en", ["en"], [logs(en=0.5, de=0.4)])
    with pytest.raises(UserError) as wrong:
        table_of(tmp_path, made, [good, good | spoil], 2)
    assert str(wrong.value).startswith(f"{tmp_path}/chats.jsonl:2: ") and part in str(wrong.value)
    assert "\n" not in str(wrong.value) and "create_data.py --logprobs" in str(wrong.value)


@pytest.mark.parametrize("records, part", [
    ([{"messages": ask("x", "en")}], "has no log-probabilities; make it with create_data.py --logprobs 2, or drop"),
    ([record("en", ["en"], [logs(en=0.5)])], "--distill_topk 2: {path} has at most 1 log-probabilities a token; give "),
    ([record("de", ["de"], [logs(de=0.5, en=0.1)])], "of {path} nothing can be taught: the student splits 1 labels"),
    ([record("en", ["en"], [logs(zz=0.5, zzz=0.1)])], "nothing can be taught: the student splits 0 labels"),
])
def test_files_that_cannot_teach(made, tmp_path, records, part):
    with pytest.raises(UserError) as wrong:
        table_of(tmp_path, made, records, 2)
    assert part.format(path=tmp_path / "chats.jsonl") in str(wrong.value)


def test_rounding_above_one_is_no_error(made, tmp_path):
    table, _ = table_of(tmp_path, made, [record("en", ["en"], [[["en", 0.0], ["de", -9.0]]])], 2)
    assert np.exp(table.teacher_logprobs.astype(float)).sum() == pytest.approx(1, abs=1e-7)


# -- Loss --------------------------------------------------------------------------------------------------------------


def whole(n=11, vocabulary=23, k=4):
    """(logits, targets, ids, logprobs) of n rows, the teacher's whole distribution (n, V); rows 3 and 4 know less."""
    torch.manual_seed(n)
    logits, p = torch.randn(n, vocabulary) * 2, torch.softmax(torch.randn(n, vocabulary) * 2, -1)
    logprobs, ids = p.log().topk(k)
    targets = torch.randint(0, vocabulary, (n,))
    logprobs[3], ids[3] = -math.inf, targets[3]
    logprobs[4, 2:], ids[4, 2:] = -math.inf, ids[4, 0].item()
    return logits, targets, ids, logprobs, p


def test_a_sure_student_and_a_sure_teacher():
    """No difference of nearly equal numbers, no infinity, no nan: the rest is 1e-20 of a student's probability."""
    logits = torch.full((2, 9), -46.0).index_fill(1, torch.tensor([4]), 0.0).requires_grad_()
    ids = torch.tensor([[4, 1], [4, 1]])
    logprobs = torch.tensor([[0.5, 0.25], [1.0, 0.0]]).log()
    kl = topk.divergence(logits, ids, logprobs)
    wanted = 0.5 * math.log(0.5) + 0.25 * (math.log(0.25) + 46) + 0.25 * (math.log(0.25) + 46 - math.log(7))
    assert kl.tolist() == pytest.approx([wanted, 0.0], rel=1e-6)
    kl.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 4].item() == pytest.approx(0.5) and logits.grad[0, 1].item() == pytest.approx(-0.25)


@pytest.mark.parametrize("chunk", [100, 4, 1])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_mixed_loss_and_gradients_are_the_dense_ones(chunk, share):
    """Through the head, whole or in pieces, against whole distributions in double precision."""
    logits, targets, ids, logprobs, _ = whole()
    torch.manual_seed(1)
    ours = [torch.randn(shape, requires_grad=True) for shape in ((11, 5), (23, 5), (23,))]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    loss, right, ce, kl, n = packed_lm.chunked_loss(*ours, targets, chunk, (ids, logprobs), share)
    (2 * loss).backward()
    q = (theirs[0] @ theirs[1].T + theirs[2]).softmax(-1)
    all_ce = all_kl = total = 0
    for i in range(11):
        one, p = -q[i, targets[i]].log(), logprobs[i].double().exp()
        all_ce = all_ce + one.item()
        if p[0] == 0:
            total = total + one
            continue
        known = p > 0
        p, mine = torch.cat([p[known], 1 - p.sum()[None]]), q[i, ids[i][known]]
        divergence = (p * (p.log() - torch.cat([mine, 1 - mine.sum()[None]]).log())).sum()
        total, all_kl = total + (1 - share) * one + share * divergence, all_kl + divergence.item()
    (2 * total).backward()
    assert (loss.item(), ce.item(), kl.item(), n) == pytest.approx((total.item(), all_ce, all_kl, 10), rel=1e-5)
    assert right == (q.argmax(-1) == targets).sum()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad.float(), rtol=1e-4, atol=1e-5)


def test_no_rows_weigh_nothing():
    hidden, weight = torch.randn(0, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    none = torch.zeros(0, 2, dtype=torch.int64)
    sums = packed_lm.chunked_loss(hidden, weight, None, none[:, 0], 4, (none, none.float()), 0.5)
    sums[0].backward()
    assert [value.item() for value in sums] == [0] * 5 and not weight.grad.any()


# -- From the teacher to the student -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(pool, tmp_path):
    """create_data.py with a real model, then train_sft.py: the divergence falls, well below a run without the flag."""
    teacher, tokenizer = tiny_teacher.save(tmp_path / "teacher")
    with torch.no_grad():       # parts of characters, which have no text, become rare
        for i, row in enumerate(teacher.lm_head.weight):
            row *= 0 if "\ufffd" in tokenizer.decode([i]) else 2
    teacher.save_pretrained(tmp_path / "teacher")
    torch.manual_seed(1)
    student = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64,
                                           num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                                           head_dim=16, max_position_embeddings=256))
    student.generation_config.eos_token_id = tokenizer.eos_token_id
    student.save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    (tmp_path / "lines.txt").write_text("".join(f"{word}\n" for word in ("one", "two", "three", "four", "five") * 8))
    (tmp_path / "prompt.txt").write_text("Answer: {text}")
    create_data.main([str(part) for part in (
        "--input_file", tmp_path / "lines.txt", "--output_file", tmp_path / "labels.jsonl", "--prompt_file",
        tmp_path / "prompt.txt", "--model_name", tmp_path / "teacher", "--engine", "transformers", "--parser", "whole",
        "--max_tokens", 12, "--temperature", 1, "--logprobs", 5)])
    lines = (tmp_path / "labels.jsonl").read_text().splitlines()
    lines = [line for line in lines if "<|" not in json.loads(line)["messages"][1]["content"]]     # it draws anything
    (tmp_path / "labels.jsonl").write_text("".join(f"{line}\n" for line in lines))
    records = list(map(json.loads, lines))
    known = [record for record in records if "logprobs" in record]
    assert len(known) > 8 and all("".join(r["label_tokens"]) == r["messages"][1]["content"] for r in known)
    found = {}
    for weight in (1.0, 1e-6):
        statuses, output = pool.run(1, "distill.train_sft.main", [str(part) for part in (
            "--model_path", tmp_path / "student", "--train_data_file", tmp_path / "labels.jsonl", "--output_dir",
            tmp_path / f"out-{weight}", "--report_to", "none", "--distill_topk", 5, "--distill_weight", weight,
            "--per_device_train_batch_size", len(records), "--gradient_accumulation_steps", 1, "--num_workers", 0,
            "--learning_rate", 0.02, "--max_steps", 25, "--logging_steps", 1, "--save_steps", 0)])
        assert statuses == [0], output
        assert f"{len(known)} of {len(records)} samples have alternatives" in output and "otherwise" not in output
        lines = map(json.loads, (tmp_path / f"out-{weight}" / "metrics.jsonl").read_text().splitlines())
        found[weight] = [line["train/kl_loss"] for line in lines if "train/kl_loss" in line]
    assert found[1.0][0] == pytest.approx(found[1e-6][0], rel=1e-5)
    assert found[1.0][-1] < 0.3 * found[1.0][0] and found[1.0][-1] < 0.5 * found[1e-6][-1]
