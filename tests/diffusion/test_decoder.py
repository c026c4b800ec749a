"""Block diffusion with the shapes of Llama and Qwen matches transformers' classes."""
import json
import re
import shutil
import subprocess
import types
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config,
                          Qwen3Config)

from core import dist, tensor_io
from core.cli import UserError
from diffusion import choices, decoder, dit, elbo, make_problems, problems, published, sample_bd3lm
from diffusion.problems import load_tokenizer, read_problems
from diffusion.sample_bd3lm import question_state
from tests.helpers.block_problems import documents_of
from tests.helpers.block_rows import MIXED, make_blocks, noised, sampled_hidden
from tests.helpers.block_runs import SCRIPT, as_checkpoint, short_run
from tests.helpers.progress import PATIENCE_S
from tests.helpers.runs import newest
from tests.helpers.trainer import RUN_SCRIPT, Run

SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "rms_norm_eps": 1e-5}
ROWS, SPARE = 452, 8        # tokens of the demo's tokenizer before <|endoftext|>; rows that no token uses
SDAR_MASK, SDAR_ROWS = 500, 520     # small values for SDAR's mask id 151,669 and its 151,936 rows
ASK = ["How many apples has Anna, who had 5 and got 2 more?", "1"]
KINDS = {"llama": LlamaConfig(tie_word_embeddings=True, rope_theta=500.0, vocab_size=ROWS + 1, **SHAPE),
         "qwen3": Qwen3Config(head_dim=16, tie_word_embeddings=False, vocab_size=ROWS + 1 + SPARE, **SHAPE),
         "qwen2": Qwen2Config(tie_word_embeddings=True, vocab_size=ROWS + 1, **SHAPE)}


@pytest.fixture(scope="module")
def models(demo, tmp_path_factory):
    """{kind: folder of a tiny model with random weights and the demo's tokenizer}."""
    folders = {}
    for kind, config in KINDS.items():
        torch.manual_seed(0)
        folder = folders[kind] = tmp_path_factory.mktemp(kind)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:     # norms and biases that matter
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        Tokenizer.from_file(str(demo / "tokenizer.json")).save(str(folder / "tokenizer.json"))
    folders["chat"] = shutil.copytree(demo / "chat", tmp_path_factory.mktemp("chat") / "model")
    config = Qwen3Config(head_dim=16, tie_word_embeddings=True, vocab_size=ROWS + 3, **SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folders["chat"])
    return folders


def read(folder, end_token="", tokenizer=None):
    """(Tokens, Config, result of published.read) of a model's folder."""
    tokens, origin = load_tokenizer(tokenizer or folder, "gsm8k", end_token), published.find(folder)
    config = decoder.config_of(origin, tokens, 0.0)
    return tokens, config, published.read(origin, config, tokens)


def opened(folder):
    """(our network with the folder's weights, its Tokens, transformers' model)."""
    tokens, config, loaded = read(folder)
    model = decoder.Decoder(config).eval()
    model.load_state_dict(loaded[0], strict=False)       # a tied head has no weights
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    if len(reference.get_input_embeddings().weight) < config.vocab_size:
        reference.resize_token_embeddings(config.vocab_size, mean_resizing=False)
    mask = config.mask_id
    reference.get_input_embeddings().weight.data[mask] = model.embed.weight[mask]
    return model, tokens, reference


@pytest.mark.parametrize("for_gpus", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_hidden_states_are_those_of_transformers_under_the_same_mask(models, kind, for_gpus, monkeypatch):
    """Packed documents with ragged blocks. The sampler's states of a block equal training's of its noisy copies."""
    monkeypatch.setattr(dit, "on_gpu", lambda x: for_gpus)
    model, tokens, reference = opened(models[kind])
    batch = make_blocks(MIXED, 26, 24)
    inputs = noised(batch)
    changed = inputs.tokens.masked_fill(inputs.tokens == 20, tokens.mask)
    inputs = replace(inputs, tokens=changed)
    rule = dit.attends(inputs.doc, inputs.block, inputs.n_noisy)
    places = torch.arange(inputs.tokens.shape[1])
    seen = rule(torch.arange(len(inputs.doc))[:, None, None], 0, places[:, None], places)
    seen[:, inputs.n_noisy:, :inputs.n_noisy] = False       # clean tokens never see noisy ones
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
    wanted = reference(input_ids=inputs.tokens, position_ids=inputs.position, attention_mask=bias,
                    use_cache=False).logits[:, :inputs.n_noisy]
    hidden, live = model.hidden_states(inputs), batch.doc[:, :batch.n_noisy] >= 0
    logits = model.logits(hidden)
    keep = [i for i in range(logits.shape[-1]) if i != tokens.mask]
    torch.testing.assert_close(logits[live][:, keep], wanted[live][:, keep], rtol=1e-4, atol=1e-4)
    losses = model(inputs)
    flat = wanted.flatten(0, 1)[inputs.rows].float()
    flat[:, tokens.mask] = -torch.inf
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(flat, inputs.labels, reduction="none"),
                               rtol=1e-4, atol=1e-4)
    for row, doc, number in [(0, 0, 1), (0, 1, 1), (0, 1, 3), (1, 0, 0), (1, 0, 4)]:
        sampled, copies = sampled_hidden(model, batch, inputs, row, doc, number)
        torch.testing.assert_close(sampled, hidden[row, copies], rtol=1e-4, atol=1e-4)


def test_work_is_counted_like_a_plain_sum():
    source = Qwen3Config(**SHAPE | {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
                                    "intermediate_size": 12}, head_dim=4).to_dict()
    with torch.device("meta"):
        model = decoder.Decoder(decoder.Config(20, 19, source))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name)
    products = 2 * 10 * matrices + 2 * 3 * 8 * 20 + 4 * 7 * 16 * 2      # of tokens, of the head's rows, of pairs
    assert model.flops(tokens=10, rows=3, pairs=7) == 3 * products


def test_the_mask_takes_a_spare_row_or_a_new_one(models):
    for kind, rows in (("llama", ROWS + 2), ("qwen3", ROWS + 1 + SPARE)):
        tokens, config, loaded = read(models[kind])
        table = load_file(models[kind] / "model.safetensors")["model.embed_tokens.weight"]
        assert tokens.mask == ROWS + 1 == config.mask_id and config.vocab_size == rows
        assert torch.equal(loaded[0]["model.embed_tokens.weight"][:ROWS + 1], table[:ROWS + 1])
        row = loaded[0]["model.embed_tokens.weight"][tokens.mask]
        assert (row - table[:ROWS + 1].mean(0)).abs().max() < 0.1 * table.std()
        assert ("lm_head.weight" in loaded[0]) == (kind == "qwen3")


@pytest.mark.parametrize("change, words", [
    ({"model_type": "gpt2"}, "model_type gpt2"), ({"rope_parameters": {"rope_type": "dynamic"}}, "rope dynamic"),
    ({"use_sliding_window": True}, "a sliding window")])
def test_shapes_that_are_not_this_network_are_refused(models, tmp_path, change, words):
    config = json.loads((models["qwen3"] / "config.json").read_text()) | change
    with pytest.raises(UserError, match=re.escape(words)):
        decoder.config_of(published.Origin(tmp_path, "causal", config, config), None, 0.0)


def test_folders_of_slow_tokenizers_are_read_as_transformers_reads_them(models, tmp_path):
    """Older folders of Qwen and SDAR have no tokenizer.json; vocabulary and merges alone would split text as GPT-2."""
    parts = json.loads(Tokenizer.from_file(str(models["chat"] / "tokenizer.json")).to_str())
    words = {word: i for word, i in parts["model"]["vocab"].items() if i < ROWS}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, parts["model"]["merges"])]) + "\n")
    added = {str(token["id"]): {"content": token["content"], "special": True} for token in parts["added_tokens"]}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
             "added_tokens_decoder": added, "chat_template": make_problems.CHAT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sdar"}))
    tokens = load_tokenizer(tmp_path, "gsm8k", "<|im_end|>")
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("12345 pens\n\n  and a half.", "Ben's<|im_end|>"):
        assert tokens.encode(text) == reference(text)["input_ids"]
    assert tokens.end == reference.eos_token_id == ROWS + 2 and tokens.mask == len(reference) == ROWS + 3
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))     # as GPT-2's
    with pytest.raises(UserError, match="has no tokenizer.json"):
        problems.read_tokenizer(tmp_path)


def test_questions_in_the_chat_template(models, demo):
    """The ids equal the template's. A question with an end token is refused."""
    folder = models["chat"]
    layout = published.add_chat_form(choices.Layout("gsm8k", block_size=8, max_length=96), folder)
    assert layout.end_token == "<|im_end|>" and "{question}" in layout.prompt
    tokens = load_tokenizer(folder, "gsm8k", layout.end_token)
    problem = read_problems(demo / "test.jsonl", "", "gsm8k")[0]
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    head = reference.apply_chat_template([{"role": "user", "content": problem.question}], add_generation_prompt=True,
                                      return_dict=False)
    context, (pinned, first) = question_state(problem, tokens, layout)
    assert [*context[0], *pinned] == head and first == len(head) - len(head) % 8
    problem.question = "Now<|im_end|>"
    with pytest.raises(UserError, match=re.escape("its text holds the special token <|im_end|>")):
        question_state(problem, tokens, layout)


def test_a_foreign_tokenizer_is_refused(models, tmp_path):
    """A tokenizer of the same size with other ids would train on wrong words."""
    stored = json.loads((models["llama"] / "tokenizer.json").read_text())
    numbers = stored["model"]["vocab"]
    first, second = list(numbers)[:2]
    numbers[first], numbers[second] = numbers[second], numbers[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="its tokenizer is not that of --tokenizer.*drop --tokenizer"):
        read(models["llama"], tokenizer=tmp_path)


def test_checkpoints_of_the_chat_trainer_are_language_models(models, tmp_path):
    """--init_from takes a chat trainer's checkpoint, and refuses an adapter alone."""
    saved, adapter = tmp_path / "sft" / "checkpoint-3", tmp_path / "lora" / "checkpoint-3"
    shutil.copytree(models["chat"], saved)
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    for folder in (saved, adapter):
        as_checkpoint(folder, {"step": 3, "best_step": None})
    origin = published.find(saved.parent)
    assert origin.path == saved == published.find(saved).path and origin.kind == "causal"
    assert published.add_lora(read(saved)[1], origin, False, str(saved.parent), {}).lora["base"] == str(saved)
    for folder in (adapter, adapter.parent):
        with pytest.raises(UserError, match="is an adapter; merge it into its base"):
            published.find(folder)


def test_base_models_end_answers_with_another_token(models, demo, tmp_path):
    """Llama has no <|endoftext|>. Its tokenizer adds a first token to every text."""
    backend = Tokenizer.from_str((demo / "tokenizer.json").read_text().replace("<|endoftext|>", "</s>"))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"has no token <\|endoftext\|> to end answers with; give --end_token"):
        load_tokenizer(tmp_path, "gsm8k")
    with pytest.raises(UserError, match="has no token <end> to end"):
        load_tokenizer(tmp_path, "gsm8k", "<end>")
    tokens = load_tokenizer(tmp_path, "gsm8k", "</s>")
    assert (tokens.bos, tokens.end) == (backend.token_to_id("<s>"), backend.token_to_id("</s>"))
    layout = choices.Layout("gsm8k", block_size=8, max_length=96, end_token="</s>")
    ids = documents_of(read_problems(demo / "test.jsonl", "", "gsm8k")[:1], tokens, layout).ids
    assert ids[0] == tokens.bos and ids[-1] == tokens.end
    assert load_tokenizer(tmp_path, "hdp").mask == backend.get_vocab_size() + 4         # plans end with <|pad|>


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "lora"])
def test_a_converted_model_trains_resumes_and_answers(pool, demo, models, tmp_path, capsys, kind):
    """A run in chat format: DDP equals resumed FSDP2 on 2 ranks, and the checkpoint answers."""
    flags = (f"--init_from {models['chat']} --chat --train_data_file {demo}/train.jsonl --block_size 4 --max_length 96 "
             "--dropout 0 --eval_steps 2 --save_steps 0 --eval_repeats 1 --num_workers 1 --warmup_steps 0 --ema_decay "
             "0.5 --gradient_accumulation_steps 1 --validation_split 0.2 --eval_accuracy 1 --report_to none ")
    flags += "--learning_rate 1e-2" if kind == "all" else (
        "--use_lora --lora_rank 4 --lora_alpha 16 --learning_rate 3e-2")
    runs = {}
    for mode, ranks, stops in (("ddp", 1, (4,)), ("fsdp", 2, (2, 4))):
        for steps in stops:
            statuses, output = pool.run(ranks, RUN_SCRIPT, SCRIPT, [
                *flags.split(), "--parallel", mode, "--max_steps", str(steps), "--output_dir", str(tmp_path / mode),
                "--per_device_train_batch_size", str(4 // ranks)])
            assert not any(statuses), output
        runs[mode] = Run(0, output, tmp_path / mode)
    bounds = [run.metrics("eval/nll") for run in runs.values()]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-3) and sorted(bounds[0]) == [0, 2, 4]
    assert bounds[0][4] < bounds[0][0] - (0.5 if kind == "all" else 0.1)
    assert "resumed from" in runs["fsdp"].output and "language model" not in runs["fsdp"].output
    folder = newest(tmp_path / "fsdp")
    model, config = published.load_checkpoint(folder)
    assert isinstance(model, decoder.Decoder) and model.lm_head.weight is model.embed.weight
    if kind == "lora":
        check_adapters(folder, model, config, models["chat"])
    assert config["layout"]["end_token"] == "<|im_end|>"
    sample_bd3lm.main(["--checkpoint", str(folder), "--test_file", str(demo / "test.jsonl"), "--limit", "2",
                       "--device", "cpu", "--order", "confidence", "--output", str(tmp_path / "answers.json")])
    check_export(folder, model, tmp_path / "exported")
    for start in (tmp_path / "fsdp", tmp_path / "exported"):
        check_continuation(start, config["layout"], demo, tmp_path / "on", capsys)


def check_continuation(start, layout, demo, output_dir, capsys):
    """A run from a checkpoint or an export keeps prompt form, end token, tokenizer and chat template."""
    origin = published.find(start)
    common = choices.Layout("gsm8k", block_size=4, max_length=96)
    kept = published.add_form(common, origin.form)
    assert (kept.prompt, kept.end_token) == (layout["prompt"], layout["end_token"]) and "<|im_start|>" in kept.prompt
    assert kept == published.add_chat_form(common, origin.path)
    capsys.readouterr()
    short_run(output_dir, f"--init_from {start} --train_data_file {demo}/train.jsonl --dry_run")
    output = capsys.readouterr().out
    assert output.endswith("dry run ok\n") and "new rows" not in output


@torch.no_grad()
def check_adapters(folder, merged, config, base):
    """The checkpoint holds trained adapters and the mask's row; the merged model computes the same."""
    saved, averaged = ({name: tensor for path in tensor_io.files_of(folder, stem) for name, tensor in load_file(
        path).items()} for stem in ("model", "ema"))
    mask, table = config["model"]["mask_id"], load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    assert saved.keys() == averaged.keys() and len(saved) == 1 + 3 * 7 * 2      # 3 layers of 7 matrices
    assert all(".lora_" in name or name == "mask_row" for name in saved)
    assert all(tensor.any() for name, tensor in averaged.items() if "lora_B" in name)
    assert (averaged["mask_row"] - table[:mask].mean(0)).norm() > 0.1
    adapted = decoder.Decoder(decoder.Config(**config["model"])).eval()
    tensor_io.load(dist.World(), folder, "ema", elbo.trained_parameters(adapted))
    for name, parameter in published.base_weights(adapted).items():
        rows = load_file(base / "model.safetensors")[name]
        parameter[:len(rows)] = rows
    assert torch.equal(adapted.embed.weight[:mask], table[:mask])
    assert torch.equal(merged.embed.weight[:mask], table[:mask])
    inputs = noised(make_blocks(MIXED, 26, 24))
    inputs = replace(inputs, tokens=inputs.tokens.masked_fill(inputs.tokens == 20, mask))
    torch.testing.assert_close(merged(inputs), adapted(inputs), rtol=1e-4, atol=1e-4)
    adapted.mask_row.zero_()
    assert not torch.allclose(merged(inputs), adapted(inputs), rtol=1e-2)
    stored = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(stored[:-1] + b"\0")
    with pytest.raises(UserError, match="its weights are not those that these adapters were trained on"):
        published.load_checkpoint(folder)
    (base / "model.safetensors").write_bytes(stored)


@torch.no_grad()
def check_export(folder, model, exported):
    """transformers and --init_from read the export with every bit of the weights."""
    published.main(["--checkpoint", str(folder), "--output_dir", str(exported)])
    reloaded = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    expected = dict(model.named_parameters())
    actual = dict(reloaded.named_parameters())
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)
    tokens, _, (state, _) = read(exported, "<|im_end|>")
    assert tokens.mask == model.config.mask_id
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def sdar(demo, tmp_path_factory):
    """(output folder of a run from a Qwen3 with SDAR_MASK tokens, its export as SDAR)."""
    assert published.SDAR_MASK_ID == 151669      # servers look for it
    patch = pytest.MonkeyPatch()
    patch.setattr(published, "SDAR_MASK_ID", SDAR_MASK)
    base, out = tmp_path_factory.mktemp("qwen3"), tmp_path_factory.mktemp("sdar")
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([f"<{i}>" for i in range(SDAR_MASK - tokenizer.get_vocab_size())])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>",
                            chat_template=make_problems.CHAT).save_pretrained(base)
    shape = SHAPE | {"hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.5}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(head_dim=8, tie_word_embeddings=True, vocab_size=SDAR_ROWS,
                                                 **shape)).save_pretrained(base)
    short_run(out / "run", f"--init_from {base} --chat --train_data_file {demo}/train.jsonl --eval_steps 0",
              "--block_size 4")
    published.main(["--checkpoint", str(out / "run"), "--output_dir", str(out / "sdar"), "--format", "sdar"])
    yield out / "run", out / "sdar"
    patch.undo()


@pytest.mark.slow
def test_an_sdar_export_has_the_files_that_servers_read(sdar, demo, tmp_path, capsys, monkeypatch):
    run, folder = sdar
    config = json.loads((folder / "config.json").read_text())
    wanted = {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "block_size": 4, "mask_token_id": SDAR_MASK,
              "tie_word_embeddings": False, "vocab_size": SDAR_ROWS}
    assert wanted.items() <= config.items()
    # SDAR's class and SGLang's read the theta here, and take 10,000 where it is missing
    theta = published.load_checkpoint(newest(run))[0].config.native.rope_parameters["rope_theta"]
    assert config["rope_theta"] == theta and "rope_parameters" not in config
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids("<|MASK|>") == SDAR_MASK == tokenizer.mask_token_id
    assert "<|im_start|>" in tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    start = f"--init_from {folder} --train_data_file {demo}/train.jsonl"
    short_run(tmp_path / "on", start, "--batch_preset convert --dry_run")
    output = capsys.readouterr().out
    assert "memory" in output and output.endswith("dry run ok\n") and f"weights of {folder}\n" in output
    # a run from SDAR exports SDAR by default: config.json must not name missing files
    short_run(tmp_path / "on", start, "--problems_per_batch 1 --validation_split 0 --learning_rate 0")
    published.main(["--checkpoint", str(tmp_path / "on"), "--output_dir", str(tmp_path / "again")])
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config
    tables = [load_file(path / "model.safetensors")["model.embed_tokens.weight"] for path in (folder, tmp_path / "again")]
    assert torch.equal(*tables)     # with the mask's row
    state, again = (load_file(export / "model.safetensors") for export in (folder, tmp_path / "again"))
    assert state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)
    monkeypatch.setattr(published, "SDAR_MASK_ID", 5)
    with pytest.raises(UserError, match=f"that the mask has id 5, not {SDAR_MASK}"):
        published.export(newest(run), tmp_path / "other", "sdar")


@pytest.mark.slow
def test_generate_py_of_an_export_writes_our_texts(sdar, quick_python, tmp_path):
    """generate.py runs without this repository on the path, with SDAR's config.json and with ours."""
    (run, folder), texts = sdar, []
    published.export(newest(run), tmp_path / "usual")
    for threshold, export in ((0.9, folder), (0.02, tmp_path / "usual")):
        args = types.SimpleNamespace(checkpoint=run, device="cpu", bf16=False)
        _, solver = sample_bd3lm.load_solver(args, sample_bd3lm.Sampling("confidence", threshold, 0.0))
        states = [question_state(problems.Problem("", text, "", ""), solver.tokens, solver.layout) for text in ASK]
        texts.append("".join(f"{answer['text']}\n" for answer in sample_bd3lm.answer(solver, states, 1)))
        done = subprocess.run([quick_python, export / "generate.py", *ASK, "--threshold", str(threshold)], cwd="/",
                              text=True, capture_output=True, timeout=PATIENCE_S)
        assert done.returncode == 0 and done.stdout == texts[-1], done.stderr[-3000:]
    assert texts[0] != texts[1]
