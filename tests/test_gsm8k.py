"""Problems, tokenizers, documents, rows, batches, prompts and scores of the block-diffusion data."""
import json
import re
from dataclasses import replace

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

import gsm8k
import problem_maker
import problems
from gsm8k import EXECUTION, FILL, PLAN, QUESTION, Layout
from packing import PackOrder, rank_packs
from parallel import UserError
from problems import load_tokenizer, read_problems

SMALL = {"question_budget": 48, "plan_budget": 32, "execution_budget": 48, "max_length": 96}
LAYOUTS = {
    "gsm8k": Layout("gsm8k", block_size=8, **SMALL),
    "gsm8k-1": Layout("gsm8k", block_size=1, **SMALL),
    "gsm8k-whole": Layout("gsm8k", block_size=96, **SMALL),
    "gsm8k-question": Layout("gsm8k", block_size=8, loss_on_question=True, strip_calculator=True, **SMALL),
    "hdp": Layout("hdp", block_size=8, **SMALL),
    "hdp-sizes": Layout("hdp", block_size=8, plan_block_size=32, execution_block_size=4, **SMALL),
    "hdp-question": Layout("hdp", block_size=16, loss_on_question=True, **SMALL),
    "flat": Layout("hdp", "flat", block_size=8, **SMALL),
    "flat-wide": Layout("hdp", "flat", block_size=64, **SMALL),
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Folder of demo files: 60 training and 20 test problems of both systems, tokenizer.json."""
    folder = tmp_path_factory.mktemp("demo")
    problem_maker.main(["demo", str(folder), "--problems", "60", "--test", "20"])
    return folder


def load(demo, layout):
    """(problems, Tokens, Documents) of the demo's training file."""
    file = demo / ("train.jsonl" if layout.system == "gsm8k" else "train_hdp.json")
    found = read_problems(file, "train", layout.system, layout.strip_calculator)
    tokens = load_tokenizer(demo, layout.system)
    return found, tokens, gsm8k.make_documents(found, tokens, layout)


# -- tokenizers -------------------------------------------------------------------------------------------------------


def test_special_tokens_come_behind_the_vocabulary_in_the_sources_order(demo):
    size = load_tokenizer(demo, "gsm8k").vocab_size - 1
    base = load_tokenizer(demo, "gsm8k")
    assert (base.mask, base.bos, base.end, base.pad, base.plan) == (size, size - 1, size - 1, size - 1, -1)
    hdp = load_tokenizer(demo, "hdp")
    assert (hdp.pad, hdp.plan, hdp.execution, hdp.answer, hdp.mask) == tuple(range(size, size + 5))
    assert (hdp.vocab_size, hdp.end, hdp.bos) == (size + 5, size, -1)
    assert hdp.encode("<|plan|> a<|pad|>")[0] == hdp.plan and hdp.encode("<|plan|> a<|pad|>")[-1] == hdp.pad
    text = "Anna's 3 pëns\n cost <<3*2=6>>$6 — \u2028 cheap\t#### 6"
    assert base.decode(base.encode(text)) == text


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_gpt2s_two_files_give_the_same_tokens_as_tokenizer_json(demo, tmp_path, names):
    model = json.loads((demo / "tokenizer.json").read_text())
    vocabulary = model["model"]["vocab"] | {t["content"]: t["id"] for t in model["added_tokens"]}
    (tmp_path / names[0]).write_text(json.dumps(vocabulary))
    merges = [" ".join(pair) for pair in model["model"]["merges"]]
    (tmp_path / names[1]).write_text("\n".join(["#version: 0.2", *merges, ""]))
    text = "Question: Ben has 4 boxes with 7 books each.\nAnswer: <<4*7=28>>28 bööks <|endoftext|>"
    for system in problems.SYSTEMS:
        ours, whole = load_tokenizer(tmp_path, system), load_tokenizer(demo, system)
        assert ours.encode(text) == whole.encode(text) and ours.vocab_size == whole.vocab_size
        assert ours.encode(text)[-1] == ours.tokenizer.token_to_id("<|endoftext|>")


def test_a_saved_tokenizer_is_read_back_the_same(demo, tmp_path):
    tokens = load_tokenizer(demo, "hdp")
    tokens.save(tmp_path)
    for again in (load_tokenizer(tmp_path, "hdp"), load_tokenizer(tmp_path / "tokenizer.json", "hdp")):
        assert replace(again, tokenizer=None) == replace(tokens, tokenizer=None)
        assert again.encode("Grace has 12 pens <|answer|>") == tokens.encode("Grace has 12 pens <|answer|>")


@pytest.mark.parametrize("name, message", [
    ("/no/such/folder", r"--tokenizer /no/such/folder: no such file or folder; give a folder with tokenizer.json"),
    ("no.json", r"--tokenizer no.json: no such file or folder; give"),
    ("no/such-model", r"--tokenizer no/such-model: no such file or folder, and nothing that could be .* \(\w+\)"),
    ("{tmp}", r"has neither tokenizer.json nor encoder.json with vocab.bpe nor vocab.json with merges.txt"),
    ("{tmp}/bad.json", r"bad.json: is not a tokenizer \(.+\); give"),
    ("{tmp}/gaps.json", r"gaps.json: its \d+ tokens have ids up to 5000, with gaps; give"),
    ("{tmp}/other.json", r"other.json: has no token <\|endoftext\|>; take GPT-2's"),
])
def test_unknown_tokenizers_are_one_clear_line(tmp_path, monkeypatch, demo, name, message):
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "other.json").write_text((demo / "tokenizer.json").read_text().replace("endoftext", "eos"))
    gaps = json.loads((demo / "tokenizer.json").read_text())
    gaps["model"]["vocab"][max(gaps["model"]["vocab"], key=gaps["model"]["vocab"].get)] = 5000
    (tmp_path / "gaps.json").write_text(json.dumps(gaps))
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(name.format(tmp=tmp_path), "gsm8k")
    assert "\n" not in str(caught.value)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_files_folders_and_forms_give_the_same_problems(demo, tmp_path):
    ours = read_problems(demo / "train.jsonl", "any", "gsm8k")
    in_folder = read_problems(demo, "train", "gsm8k")
    entries = [json.loads(line) for line in (demo / "train.jsonl").read_text().splitlines()]
    (tmp_path / "train.json").write_text("\ufeff" + json.dumps(entries))
    as_json = read_problems(tmp_path, "train", "gsm8k")
    (tmp_path / "train.jsonl").write_text("\n\n".join(json.dumps(e, ensure_ascii=False) for e in entries))
    assert [replace(p, name="") for p in ours] == [replace(p, name="") for p in as_json]
    assert ours == in_folder and len(ours) == 60
    assert [p.name for p in read_problems(tmp_path, "train", "gsm8k")[:2]] == [f"{tmp_path}/train.jsonl line 1",
                                                                             f"{tmp_path}/train.jsonl line 3"]
    assert as_json[2].name == f"{tmp_path}/train.json sample 2"
    hdp = read_problems(demo / "train_hdp.json", "any", "hdp")
    assert hdp[3].name.endswith("train_hdp.json sample 3 (demo_3)")
    assert [(p.question, p.answer) for p in hdp] == [(p.question, p.answer) for p in ours]
    assert all(p.plan and "<<" not in p.solution for p in hdp)


def test_line_separators_inside_a_text_do_not_cut_it(tmp_path):
    entry = {"question": "one\u2028two\x85three", "answer": "x\n#### 1,234"}
    (tmp_path / "p.jsonl").write_text(json.dumps(entry, ensure_ascii=False) + "\r\n", encoding="utf-8")
    (found,) = read_problems(tmp_path / "p.jsonl", "train", "gsm8k")
    assert found.question == entry["question"] and found.answer == "1,234"


def test_parquet_and_arrow_folders(demo, tmp_path):
    entries = [json.loads(line) for line in (demo / "test.jsonl").read_text().splitlines()]
    table = pyarrow.Table.from_pylist(entries)
    (tmp_path / "hub" / "main").mkdir(parents=True)
    parquet.write_table(table, tmp_path / "hub" / "main" / "test-00000-of-00001.parquet")
    (tmp_path / "disk" / "test").mkdir(parents=True)
    with pyarrow.OSFile(str(tmp_path / "disk" / "test" / "data-00000-of-00001.arrow"), "wb") as sink, \
            pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    for kind in ("hub", "disk"):
        found = read_problems(tmp_path / kind, "test", "gsm8k")
        assert [(p.question, p.solution) for p in found] == [(e["question"], e["answer"]) for e in entries]


GOOD = {"question": "q", "answer": "a #### 3"}


@pytest.mark.parametrize("system, text, message", [
    ("gsm8k", "", r"p.jsonl: is empty"),
    ("gsm8k", " \n ", r"p.jsonl: is empty"),
    ("gsm8k", "[]", r"p.jsonl: holds no problems"),
    ("gsm8k", json.dumps(GOOD) + '\n{"question": "q", \n', r"p.jsonl: not valid JSON at line 2 column \d+"),
    ("gsm8k", '[{"question": 1},\n]', r"p.jsonl: not valid JSON at line 2 column 1"),
    ("gsm8k", json.dumps({"question": "q"}), r"p.jsonl line 1: has no 'answer' \(a text that is not empty\)"),
    ("gsm8k", json.dumps({"question": 3, "answer": "#### 3"}), r"line 1: has no 'question'"),
    ("gsm8k", json.dumps({"question": " ", "answer": "#### 3"}), r"line 1: has no 'question'"),
    ("gsm8k", json.dumps({"question": "q", "answer": "it is 3"}), r"line 1: its 'answer' has no '#### N' line; add"),
    ("gsm8k", json.dumps({"question": "q", "answer": "#### three"}), r"its final answer 'three' is not a number"),
    ("gsm8k", json.dumps(GOOD) + '\n{"question": "\\ud83d", "answer": "#### 3"}', r"line 2: its 'question' holds half"),
    ("hdp", json.dumps([{"id": "\ud83d", "question": "q", "plan": "\udc00"}]), r"0 \(\?\): its 'plan' holds half"),
    ("gsm8k", "[" * 100_000, r"p.jsonl: JSON that cannot be read, from line 1 on: .*recursion"),
    ("gsm8k", json.dumps(GOOD) + "\n" + '{"a":' * 100_000, r"JSON that cannot be read, from line 2 on: .*recursion"),
    ("gsm8k", "7" * 5000, r"p.jsonl: JSON that cannot be read, from line 1 on: .*digits"),
    ("gsm8k", "[3]", r"p.jsonl sample 0: is a int, not an object with 'question'"),
    ("hdp", json.dumps([GOOD | {"id": "x7"}]), r"sample 0 \(x7\): has no 'plan' .*; make plans with problem_maker.py"),
    ("hdp", json.dumps([{"question": "q", "plan": "p", "answer": "3"}]), r"sample 0: has no 'execution'"),
    ("hdp", json.dumps([{"question": "q", "plan": "p", "execution": "e"}]), r"sample 0: has no 'answer'"),
    ("hdp", json.dumps([{"question": "q", "plan": "p", "execution": "e", "answer": "3 ducks"}]), r"'3 ducks' is not a"),
])
def test_bad_files_are_one_line_naming_file_and_sample(tmp_path, system, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_problems(tmp_path / "p.jsonl", "train", system)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_all_bad_samples_are_listed_at_once(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n".join([json.dumps({"question": "q"}), json.dumps(GOOD), "7"]))
    with pytest.raises(UserError, match=r"2 problems:\n.*line 1: has no 'answer'.*\n.*line 3: is a int"):
        read_problems(tmp_path / "p.jsonl", "train", "gsm8k")


def test_what_is_not_there_is_said(tmp_path, monkeypatch):
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for path, message in [("none.jsonl", "^none.jsonl: no such file or folder$"),
                          (tmp_path, r"has no test.jsonl, test.json, test-\*.parquet"),
                          ("no/dataset", r"^no/dataset: no such file or folder, and no dataset that could be downl")]:
        with pytest.raises(UserError, match=message):
            read_problems(path, "test", "gsm8k")
    (tmp_path / "test.jsonl").write_bytes(b'{"question": "\xff"}')
    with pytest.raises(UserError, match="cannot be read .*; give a JSONL or JSON file in UTF-8"):
        read_problems(tmp_path, "test", "gsm8k")


def test_calculator_marks_are_kept_or_stripped(demo):
    kept, stripped = (read_problems(demo / "train.jsonl", "train", "gsm8k", strip) for strip in (False, True))
    assert any("<<" in p.solution for p in kept)
    for with_marks, without in zip(kept, stripped):
        assert without.solution == re.sub(r"<<.*?>>", "", with_marks.solution) and without.answer == with_marks.answer


# -- documents --------------------------------------------------------------------------------------------------------


def slow_document(problem, tokens, layout):
    """One document as a list of (id, position, block, target, region, live), written down rule by rule."""
    t, out = tokens, []
    if layout.system == "gsm8k":
        head = [t.bos, *t.encode(f"Question: {problem.question}\nAnswer:")]
        body = t.encode(f" {problem.solution}") + [t.end]
        n = len(head) + len(body)
        while n % layout.block_size:
            n += 1
        for i in range(n):
            if i < len(head):
                out.append((head[i], i, i // layout.block_size, layout.loss_on_question and i > 0, QUESTION, True))
            elif i < len(head) + len(body):
                out.append((body[i - len(head)], i, i // layout.block_size, True, PLAN, True))
            else:
                out.append((t.end, i, i // layout.block_size, True, FILL, True))
        return out
    question = t.encode(problem.question)
    plan = t.encode(f"<|plan|> {problem.plan}<|pad|>")
    execution = t.encode(f"<|execution|> {problem.solution} <|answer|> {problem.answer}<|pad|>")
    start = block = 0
    for region, ids, budget, own in ((QUESTION, question, layout.question_budget, 0),
                                     (PLAN, plan, layout.plan_budget, layout.plan_block_size),
                                     (EXECUTION, execution, layout.execution_budget, layout.execution_block_size)):
        size, filling, last = own or layout.block_size, region != QUESTION, None
        for i in range(budget):
            number = (start + i) // layout.block_size if layout.flat else block + i // size if region else 0
            if i >= len(ids):       # nothing is filled beyond the block of the end token
                filling &= number == last
                if not filling and not layout.flat:
                    break
            last = number
            live = i < len(ids) or filling
            trained = live and (i > 0 if region else layout.loss_on_question)
            what = FILL if filling and i >= len(ids) else region
            out.append((ids[i] if i < len(ids) else t.pad, start + i, number, trained, what, live))
        start, block = start + budget, last + 1
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_equal_a_construction_rule_by_rule(demo, name):
    layout = LAYOUTS[name]
    layout.check()
    found, tokens, documents = load(demo, layout)
    assert len(documents) == 60 and documents.dropped == 0
    for d, problem in enumerate(found):
        part = slice(*documents.offsets[d:d + 2])
        ours = list(zip(*(getattr(documents, field)[part].tolist()
                          for field in ("ids", "position", "block", "target", "region", "live"))))
        theirs = [tuple(x) for x in slow_document(problem, tokens, layout)]
        assert ours == theirs
        trained = sorted({row[2] for row in theirs if row[3]})
        groups = [trained.index(row[2]) if row[2] in trained and row[5] else -1 for row in theirs]
        assert documents.group[part].tolist() == groups
        assert documents.n_groups[d] == len(trained) and documents.lengths[d] == len(theirs)
        assert documents.n_targets[d] == sum(row[3] for row in theirs)
        assert documents.noisy_lengths[d] == sum(g >= 0 for g in groups)
        assert documents.tokens[d] == sum(row[5] and row[4] != FILL for row in theirs)


@pytest.mark.parametrize("name", ["gsm8k", "hdp", "hdp-sizes", "flat"])
def test_every_generated_block_is_whole_and_ends_with_a_trained_end_token(demo, name):
    layout = LAYOUTS[name]
    _, tokens, documents = load(demo, layout)
    for d in range(len(documents)):
        part = slice(*documents.offsets[d:d + 2])
        ids, block, group = documents.ids[part], documents.block[part], documents.group[part]
        for region in (PLAN, EXECUTION)[:2 if layout.system == "hdp" else 1]:
            own = documents.region[part] == region
            last = np.flatnonzero(own & documents.live[part])[-1]
            assert ids[last] == tokens.end and documents.target[part][last]
            size = layout.region_block(region)
            assert all((block == b).sum() == size for b in np.unique(block[own & (group >= 0)]))
            assert (ids[last:][block[last:] == block[last]] == tokens.end).all()


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k-1", "gsm8k-whole", "hdp", "hdp-sizes", "flat"])
def test_a_sampler_that_writes_the_truth_sees_what_training_saw(demo, name):
    layout = LAYOUTS[name]
    found, tokens, documents = load(demo, layout)
    for d, problem in enumerate(found[:20]):
        part = slice(*documents.offsets[d:d + 2])
        live = documents.live[part]
        truth = np.stack([documents.ids[part], documents.position[part], documents.block[part]])[:, live]
        region = documents.region[part][live]
        context, (pinned, first) = gsm8k.question_state(problem, tokens, layout)
        for own in (PLAN, EXECUTION)[:2 if layout.system == "hdp" else 1]:
            start = truth.shape[1] - (truth[1] >= first).sum()
            assert (context[0] == truth[0][:start]).all() and (context[1] == truth[1][:start]).all()
            order = np.unique(truth[2], return_inverse=True)[1]     # flat numbers leave gaps for padding blocks
            assert (np.unique(context[2], return_inverse=True)[1] == order[:start]).all()
            stop = layout.start(EXECUTION) if own == PLAN and layout.system == "hdp" else 10**9
            body = truth[:, (truth[1] >= first) & (truth[1] < stop)]
            assert body[0][:len(pinned)].tolist() == pinned
            size = layout.region_block(own)
            assert body.shape[1] % size == 0 and body.shape[1] // size <= gsm8k.room(first, own, layout)
            finished, ended = gsm8k.finish_region(body[0].tolist(), len(pinned), tokens.end)
            assert ended and finished == body[0].tolist()
            text = gsm8k.region_text(finished, len(pinned), tokens)
            if own == PLAN and layout.system == "hdp":
                assert text == problem.plan
                context, (pinned, first) = gsm8k.execution_state(context, finished, tokens, layout)
        expected = problem.solution if layout.system == "gsm8k" else f"{problem.solution}\n#### {problem.answer}"
        assert text == expected and gsm8k.score(text, problem.answer) == (True, True)
        assert set(region) <= {QUESTION, PLAN, EXECUTION, FILL}


def test_too_long_is_refused_naming_each_or_dropped_and_counted(demo):
    found, tokens, documents = load(demo, LAYOUTS["gsm8k"])
    limit = int(np.median(documents.tokens))
    layout = replace(LAYOUTS["gsm8k"], max_length=limit, block_size=1)
    long = [i for i in range(60) if documents.tokens[i] > limit]
    with pytest.raises(UserError) as caught:
        gsm8k.make_documents(found, tokens, layout)
    text = str(caught.value)
    assert f"{found[long[0]].name}: it has {documents.tokens[long[0]]} tokens" in text
    assert f"more than --max_length {limit}" in text and "pass --drop_too_long" in text
    assert text.count("line ") == min(20, len(long))
    kept = gsm8k.make_documents(found, tokens, layout, drop_too_long=True)
    assert kept.dropped == len(long) and len(kept) == 60 - len(long)
    assert [p.name for p in kept.problems] == [p.name for i, p in enumerate(found) if i not in long]
    with pytest.raises(UserError, match="all 60 problems are too long, the first one being"):
        gsm8k.make_documents(found, tokens, replace(layout, max_length=4), drop_too_long=True)
    for flag, what in [("question_budget", "question"), ("plan_budget", "plan"), ("execution_budget", "execution")]:
        found, tokens, _ = load(demo, LAYOUTS["hdp"])
        with pytest.raises(UserError, match=rf"sample 0 \(demo_0\): its {what} has \d+ tokens.* more than --{flag} 8"):
            gsm8k.make_documents(found, tokens, replace(LAYOUTS["hdp"], **{flag: 8}))


def test_a_region_may_fill_its_budget_exactly(demo):
    found, tokens, documents = load(demo, LAYOUTS["hdp"])
    text = f"<|execution|> {found[0].solution} <|answer|> {found[0].answer}<|pad|>"
    exact = len(tokens.encode(text))
    layout = replace(LAYOUTS["hdp"], execution_budget=exact, execution_block_size=exact)
    assert len(gsm8k.make_documents(found[:1], tokens, layout)) == 1
    with pytest.raises(UserError, match=f"execution has {exact} tokens"):
        gsm8k.make_documents(found[:1], tokens, replace(layout, execution_budget=exact - 1,
                                                        execution_block_size=exact - 1))


@pytest.mark.parametrize("token", ["<|mask|>", "<|endoftext|>", "<|plan|>"])
def test_special_tokens_in_a_text_are_refused(demo, token):
    found, tokens, _ = load(demo, LAYOUTS["hdp"])
    found[5] = replace(found[5], solution=f"then {token} follows")
    with pytest.raises(UserError, match=re.escape(f"{found[5].name}: its text holds the special token {token};")):
        gsm8k.make_documents(found, tokens, LAYOUTS["hdp"])


@pytest.mark.parametrize("change, message", [
    ({"block_size": 0}, "--block_size is 0; it must be at least 1"),
    ({"block_size": 7}, "--max_length 96 is not a multiple of --block_size 7"),
    ({"plan_block_size": 8}, "--plan_block_size needs --system hdp and --hdp_layout hierarchical"),
    ({"system": "hdp", "plan_block_size": 12}, "--plan_budget 32 is not a multiple of --plan_block_size 12"),
    ({"system": "hdp", "execution_block_size": -1}, "--execution_block_size is -1; it must be 0 or more"),
    ({"system": "hdp", "block_size": 32}, "--execution_budget 48 is not a multiple of --execution_block_size 32"),
    ({"system": "hdp", "hdp_layout": "flat", "block_size": 12}, "execution_budget 128 is not a multiple of --bl"),
    ({"system": "hdp", "hdp_layout": "flat", "execution_block_size": 8}, "--execution_block_size needs --system hdp"),
])
def test_layouts_that_do_not_come_out_even_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(LAYOUTS["gsm8k"], **change).check()


def test_a_flat_block_over_two_regions_cannot_be_sampled(demo):
    found, tokens, _ = load(demo, LAYOUTS["flat-wide"])
    with pytest.raises(UserError, match="--hdp_layout flat with --block_size 64: a block reaches over a region's end"):
        gsm8k.question_state(found[0], tokens, LAYOUTS["flat-wide"])
    with pytest.raises(UserError, match=r"demo_0\): its question has \d+ tokens, more than --question_budget 8"):
        gsm8k.question_state(found[0], tokens, replace(LAYOUTS["hdp"], question_budget=8))
    with pytest.raises(UserError, match=r"its question has \d+ tokens, no room in --max_length 16"):
        gsm8k.question_state(found[0], load_tokenizer(demo, "gsm8k"), replace(LAYOUTS["gsm8k"], max_length=16))


def test_fingerprint_tells_documents_apart(demo):
    found, tokens, documents = load(demo, LAYOUTS["gsm8k"])
    assert documents.fingerprint() == load(demo, LAYOUTS["gsm8k"])[2].fingerprint()
    others = [load(demo, LAYOUTS[name])[2] for name in ("gsm8k-1", "gsm8k-question")]
    others.append(gsm8k.make_documents(found[:-1], tokens, LAYOUTS["gsm8k"]))
    assert len({documents.fingerprint(), documents.fingerprint([1, 2]), documents.fingerprint([2, 1]),
                *(o.fingerprint() for o in others)}) == 6


# -- rows and batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("pack", [False, True])
def test_batches_hold_every_document_once_and_whole(demo, name, pack):
    layout = LAYOUTS[name]
    _, tokens, documents = load(demo, layout)
    length = layout.longest * (3 if pack else 1)
    train, _ = gsm8k.split_validation(60, 0.1, seed=5)
    rows = gsm8k.make_rows(documents, train, length, pack, seed=5)
    assert sorted(d for row in rows.members for d in row) == train.tolist()
    assert all(len(m) == 1 for m in rows.members) or pack
    order = PackOrder(rows.tokens, samples_per_pack=4, seed=5)
    packs = list(rank_packs(order, 0, 1, 1, epochs=1)) + [[]]
    loader = gsm8k.make_loader(rows, packs, 4, rows.noisy_length, num_workers=0, prefetch_factor=None)
    fields = ("ids", "position", "block", "target", "region")
    seen, counted = [], np.zeros(3, int)
    for batch, numbers in zip(loader, packs, strict=True):
        assert batch.input_ids.shape == (4, length) and batch.noisy.shape == (4, rows.noisy_length)
        assert batch.group.dtype == batch.noisy.dtype == torch.int64 and batch.target.dtype == torch.bool
        groups = []
        for r in range(4):
            doc, block, group = batch.doc[r].numpy(), batch.block[r].numpy(), batch.group[r].numpy()
            copies = batch.noisy[r][batch.noisy[r] >= 0].tolist()
            assert copies == np.flatnonzero(group >= 0).tolist() and (batch.noisy[r][len(copies):] == -1).all()
            for number in range(doc.max() + 1):
                at = doc == number
                parts = [getattr(batch, "input_ids" if f == "ids" else f)[r].numpy()[at].tolist() for f in fields]
                seen.append(tuple(map(tuple, parts)))
                trained = np.unique(block[at & batch.target[r].numpy()])
                for b in trained:
                    inside = at & (block == b)
                    assert len(set(group[inside].tolist())) == 1 and (group[inside] >= 0).all()
                    groups.append(int(group[inside][0]))
                assert (group[at & ~np.isin(block, trained)] == -1).all()
            assert (group[doc < 0] == -1).all() and not batch.target[r][doc < 0].any()
            assert (batch.input_ids[r][doc < 0] == tokens.pad).all()
        assert sorted(groups) == list(range(batch.n_groups))
        assert batch.n_targets == batch.target.sum() == rows.n_targets[numbers].sum()
        assert batch.tokens == rows.tokens[numbers].sum()
        assert batch.documents == sum(len(rows.members[n]) for n in numbers)
        counted += [batch.n_targets, batch.tokens, batch.documents]
    wanted = []
    for d in train:
        part = slice(*documents.offsets[d:d + 2])
        keep = documents.live[part]
        wanted.append(tuple(tuple(getattr(documents, f)[part][keep].tolist()) for f in fields))
    assert sorted(seen) == sorted(wanted)
    assert counted.tolist() == [documents.n_targets[train].sum(), documents.tokens[train].sum(), len(train)]


def test_loader_processes_change_nothing(demo):
    _, _, documents = load(demo, LAYOUTS["hdp"])
    rows = gsm8k.make_rows(documents, np.arange(60), 256, True, seed=5)
    packs = [[0, 1, 2], [3], [], [4, 5]]
    here, there = (list(gsm8k.make_loader(rows, packs, 3, rows.noisy_length, num_workers=n, prefetch_factor=ahead))
                   for n, ahead in ((0, None), (2, 2)))
    for a, b in zip(here, there, strict=True):
        assert all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))
    assert [batch.n_targets > 0 for batch in here] == [True, True, False, True]


def test_packing_fills_rows_and_depends_on_the_seed_alone(demo):
    _, _, documents = load(demo, LAYOUTS["hdp"])
    every = np.arange(60)
    rows = [gsm8k.make_rows(documents, every, 512, True, seed) for seed in (1, 1, 2)]
    assert rows[0].members == rows[1].members != rows[2].members
    assert len(rows[0]) < 60 / 5
    assert rows[0].noisy_length % 128 == 0 and rows[0].noisy_length < 512
    assert rows[0].per_row(documents.noisy_lengths).max() <= rows[0].noisy_length
    assert rows[0].per_row(documents.lengths).max() <= 512
    assert gsm8k.make_rows(documents, every, 128, False).noisy_length == 16 * -(-documents.noisy_lengths.max() // 16)


def test_packing_takes_the_cheapest_room_for_noisy_copies(demo):
    _, _, documents = load(demo, LAYOUTS["gsm8k"])
    rows = gsm8k.make_rows(documents, np.arange(60), 256, True, seed=3)
    cost = len(rows) * (256 + rows.noisy_length)
    naive = gsm8k.best_fit(documents.lengths, np.random.default_rng((3, 0)).permutation(60), 256)
    assert cost < 0.9 * len(naive) * 512


def test_the_flat_layout_keeps_its_sources_1024_token_shape(demo):
    layout = Layout("hdp", "flat", block_size=16)
    _, _, documents = load(demo, layout)
    rows = gsm8k.make_rows(documents, np.arange(60), layout.longest, False)
    assert (rows.length, rows.noisy_length) == (512, 512) and (documents.lengths == 512).all()


def test_a_row_too_short_for_a_document_is_refused(demo):
    _, _, documents = load(demo, LAYOUTS["gsm8k"])
    longest = documents.lengths.max()
    name = documents.name(documents.lengths.argmax())
    with pytest.raises(UserError, match=re.escape(f"--row_length 16: {name} takes {longest} slots; raise it to")):
        gsm8k.make_rows(documents, np.arange(60), 16, True)


def test_validation_is_a_seeded_share():
    train, held_out = gsm8k.split_validation(100, 0.1, 3)
    assert len(held_out) == 10 and sorted([*train, *held_out]) == list(range(100))
    assert held_out.tolist() == gsm8k.split_validation(100, 0.1, 3)[1].tolist() != list(range(90, 100))
    assert len(gsm8k.split_validation(100, 0, 3)[1]) == 0
    assert [len(part) for part in gsm8k.split_validation(2, 0.001, 3)] == [1, 1]


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, gold, strict, flexible", [
    ("so 6*3 = 18\n#### 18", "18", True, True),
    ("#### 1,234", "1234", True, True),
    ("#### 1234", "1,234", True, True),
    ("#### -5", "-5", True, True),
    ("#### 5", "-5", False, False),
    ("#### 18.0", "18", False, True),
    ("#### 18.", "18", False, True),
    ("####18", "18", False, True),
    ("#### $18", "18", False, True),
    ("the answer is 18", "18", False, True),
    ("16-3-4=9 eggs, 9-2 is 7 or 7-18", "18", False, True),
    ("(3)-18", "18", False, True),
    ("#### 18 and not 19", "18", True, False),
    ("18 then 19", "18", False, False),
    ("#### x", "18", False, False),
    ("", "0", False, False),
    ("half is .5 or 0.5", "0.5", False, True),
])
def test_scores(text, gold, strict, flexible):
    assert gsm8k.score(text, gold) == (strict, flexible)


def test_text_ends_at_the_first_end_token(demo):
    tokens = load_tokenizer(demo, "hdp")
    ids = [tokens.execution, *tokens.encode(" 3+4 = 7 <|answer|> 7<|pad|> 9<|pad|>")]
    finished, ended = gsm8k.finish_region(ids, 1, tokens.end)
    stop = ids.index(tokens.pad)
    assert ended and finished == ids[:stop] + [tokens.pad] * (len(ids) - stop)
    assert gsm8k.region_text(finished, 1, tokens) == gsm8k.region_text(ids, 1, tokens) == "3+4 = 7\n#### 7"
    assert gsm8k.finish_region([tokens.end, 5, 6], 1, tokens.end) == ([tokens.end, 5, 6], False)


# -- demo problems and plans by rule ----------------------------------------------------------------------------------


def test_demo_problems_are_distinct_and_right(monkeypatch):
    found = problem_maker.demo_problems(500, seed=1)
    assert len({p["question"] for p in found}) == 500 and found == problem_maker.demo_problems(500, seed=1)
    kinds = set()
    for p in found:
        marks = re.findall(r"<<(.*?)=(.*?)>>", p["solution"])
        assert all(eval(left) == int(right) for left, right in marks)
        assert p["solution"].endswith(f"#### {marks[-1][1]}") and p["answer"] == marks[-1][1]
        numbers = re.findall(r"\d+", p["question"])
        assert numbers == [n for i, (left, _) in enumerate(marks) for n in re.findall(r"\d+", left)[i > 0:]]
        assert not re.search(r"\d", p["plan"]) and "<<" not in p["execution"] and int(p["answer"]) > 0
        kinds.add(tuple(sorted(re.sub(r"\d", "", left) for left, _ in marks)))
    assert kinds == {("+",), ("-",), ("*",), ("+", "-")}
    monkeypatch.setattr(problem_maker, "NAMES", ("Anna",))
    monkeypatch.setattr(problem_maker, "THINGS", ("pens",))
    with pytest.raises(UserError, match="there are not 2000 different demo problems"):
        problem_maker.demo_problems(2000)


def test_demo_files_share_no_question_and_repeat_exactly(demo, tmp_path):
    train, test = (read_problems(demo, split, "gsm8k") for split in ("train", "test"))
    assert (len(train), len(test)) == (60, 20) and not {p.question for p in train} & {p.question for p in test}
    problem_maker.write_demo(tmp_path, 60, 20)
    for file in ("train.jsonl", "test.jsonl", "train_hdp.json", "test_hdp.json", "tokenizer.json"):
        assert (tmp_path / file).read_bytes() == (demo / file).read_bytes()


def test_rule_plans_follow_the_steps_and_never_hold_a_number():
    solution = ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nThen -3*2 = <<-3*2=-6>>6 were lost, 7 of 9.\n"
                "She has $<<24-6=18>>18.50 left over 2 days.\n")
    assert problem_maker.rule_plan(solution) == ("First divide to find clips in May. Then multiply to find were lost. "
                                              "Finally subtract to find left over days.")
    assert problem_maker.rule_plan("<<1+1=2>>2") == "Simply add to find the next amount."
    assert problem_maker.rule_plan("no marks at all") == "Work out the answer from the given amounts."


def test_plans_by_rule_are_hdp_problems_labelled_as_such(demo, tmp_path, capsys):
    out = tmp_path / "new" / "plans.json"
    problem_maker.main(["plans", "--input", str(demo), "--split", "test", "--output", str(out)])
    assert f"{out}: 20 problems with plans by rule" in capsys.readouterr().out
    entries = json.loads(out.read_text())
    assert all(e["plan_source"] == "rule" and not re.search(r"\d", e["plan"]) for e in entries)
    source, plans = read_problems(demo, "test", "gsm8k"), read_problems(out, "test", "hdp")
    for before, after in zip(source, plans, strict=True):
        assert (after.question, after.answer) == (before.question, before.answer)
        assert after.solution == " ".join(re.sub("<<.*?>>", "", before.solution.split("####")[0]).split())


def test_plans_need_steps(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps(GOOD | {"answer": "#### 3"}))
    with pytest.raises(UserError, match=r"p.jsonl line 1: its answer has no steps before ####; a plan needs some"):
        problem_maker.make_plans(tmp_path / "p.jsonl")
