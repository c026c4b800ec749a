"""--base_dtype nf4: layers against bitsandbytes' own, real training of both trainers, resume, and what is refused.

Needs bitsandbytes: installed, or in the folder that BITSANDBYTES names.
"""
import gc
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, HiggsAudioV2Config, LlamaConfig, Qwen3Config

if os.environ.get("BITSANDBYTES"):
    sys.path.append(os.environ["BITSANDBYTES"])

import lora
from common import plan, step_memory
from common.distributed import UserError, World
from common.flags import parse
from common.step_memory import Setup, step_bytes
from core import adapters, document_attention
from distill import causal_lm, packed_lm
from tests.helpers.merging import merge
from tests.helpers.students import train_sft
from distill import plan as chat_plan
from speech import plan as speech_plan
from speech.speak import load_model
from speech import v2, v3
from tests.common.test_float8 import speech, student
from tests.distill.test_plan import batch_of, built
from tests.helpers import chats
from tests.helpers.live_bytes import by_lengths, real_peak
from tests.helpers.small_speech import pack_of, small_model
from tests.helpers.trainer import ROOT, Run, speech_main, speech_trainer, train_forked
from tests.speech.test_plan import REAL
from tests.speech.test_train_v2_ddp import assert_same_bits, rows

ALONE = World(device=torch.device("cpu"))
needs_it = pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"),
                              reason="needs the package bitsandbytes, or its folder in BITSANDBYTES")
FLAGS = ("--use_lora", "--lora_rank", 4, "--lora_alpha", 8, "--bf16", "--lora_target_modules", "all-linear",
         "--base_dtype", "nf4")


# ---------------------------------------------------------------------------------------------------------------------
# A layer, a model


def rounded(weight, dtype):
    """A weight as the library rounds it, and makes it again in a dtype."""
    from bitsandbytes import functional
    packed, state = functional.quantize_4bit(weight.float(), blocksize=64, compress_statistics=True, quant_type="nf4")
    state.dtype = dtype
    return functional.dequantize_4bit(packed, state)


def converted(layers):
    """NF4Linear of all frozen linear layers, with the weights that they had."""
    from core import nf4
    linear = [module for layer in layers for module in layer.modules() if type(module) is torch.nn.Linear
              and not module.weight.requires_grad]
    before = [module.weight.detach().clone() for module in linear]
    nf4.convert(layers)
    for module, weight in zip(linear, before):
        module.weight.copy_(nf4.pack(weight.float()))
    return before


@needs_it
@pytest.mark.parametrize("shape", [(48, 64), (40, 10), (1024, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_is_dequantise_then_multiply_bit_for_bit(shape, dtype):
    """Output and input gradient, with blocks that are not full; 4.2 bits a value where there are many."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(shape[1], shape[0], bias=False).requires_grad_(False)
    weight, = converted([torch.nn.Sequential(layer)])
    weight = rounded(weight, dtype)
    x, grad = torch.randn(10, shape[1], dtype=dtype).requires_grad_(), torch.randn(10, shape[0], dtype=dtype)
    out = layer(x.unflatten(0, (5, 2)))
    assert torch.equal(out, (x @ weight.t()).unflatten(0, (5, 2)))
    assert torch.equal(torch.autograd.grad(out, [x], grad.view_as(out))[0], grad @ weight)
    if shape[0] > 1000:
        assert layer.weight.nbytes * 8 < 4.4 * weight.numel()


@needs_it
def test_a_card_of_8_gb_speaks_on_the_base_that_was_trained_on():
    """launch/voice's model and adapter: the same logits bit for bit as with rounded weights, in a third of the bytes."""
    folder = ROOT / "launch" / "voice" / "model"
    config, stored, found = json.loads((folder / "config.json").read_text()), [], []
    for four_bits in (False, True):
        native = load_model(folder, config, folder.parent / "adapter", torch.float32, torch.device("cpu"), four_bits)
        base = [module for name, module in native.model.layers.named_modules()
                if isinstance(module, torch.nn.Linear) and "lora_" not in name and not hasattr(module, "base_layer")]
        for module in () if four_bits else base:
            module.weight.data = rounded(module.weight, torch.float32)
        stored.append(sum(module.weight.nbytes for module in base))
        with torch.no_grad():
            found.append(native(input_ids=torch.arange(1, 30)[None]).logits)
    assert torch.equal(*found) and stored[1] < stored[0] / 3


@pytest.mark.slow
def test_an_adapter_says_that_its_base_was_in_four_bits(tmp_path):
    """generate_tts.py and merge do as the run did, unless told otherwise; what a run saves is seen below."""
    voice = ROOT / "launch" / "voice"
    adapter = shutil.copytree(voice / "adapter", tmp_path / "adapter")
    (adapter / "text_settings.json").write_text('{"normalize_text": "on", "base_dtype": "nf4"}')
    env = {**os.environ, "PYTHONPATH": os.environ.get("BITSANDBYTES", "")}
    model = ["--model_path", voice / "model", "--adapter", adapter, "--output_dir"]
    speak = [ROOT / "speech" / "generate_tts.py", *model, tmp_path / "said", "--audio_tokenizer_path", voice / "codec",
             "--text", "one.", "--max_seconds", 0.4, "--overwrite"]

    def run(*words):
        return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, env=env)
    merge = run(ROOT / "lora.py", "merge", *model, tmp_path / "merged")
    for done in (run(*speak), merge):
        if not importlib.util.find_spec("bitsandbytes"):
            assert done.returncode == 1 and "error: --base_dtype nf4: the package bitsandbytes is missing" in done.stderr
    if importlib.util.find_spec("bitsandbytes"):
        assert json.loads((tmp_path / "said" / "0000.json").read_text())["base_dtype"] == "nf4"
        run(ROOT / "lora.py", "merge", *model, tmp_path / "other", "--base_dtype", "bf16")
        weights = [load_file(tmp_path / name / "model.safetensors") for name in ("merged", "other")]
        name = next(name for name in weights[0] if "q_proj" in name)
        assert not torch.equal(weights[0][name], weights[1][name])
    done = run(*speak, "--base_dtype", "bf16")
    assert done.returncode == 0 and json.loads((tmp_path / "said" / "0000.json").read_text())["base_dtype"] is None


def test_dora_does_not_speak_on_four_bits(tmp_path):
    voice = ROOT / "launch" / "voice"
    about = json.loads((voice / "adapter" / "adapter_config.json").read_text()) | {"use_dora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="--base_dtype nf4: .* is DoRA"):
        load_model(voice / "model", json.loads((voice / "model" / "config.json").read_text()), tmp_path, torch.float32,
                      torch.device("cpu"), True)


@needs_it
@pytest.mark.parametrize("make", [speech, student])
def test_a_model_trains_as_one_of_the_rounded_weights(make):
    """Bit for bit the loss and gradients of a bf16 model that holds them, joint products and dropout included; with
    and without recomputation; and no weight is kept whole for the backward pass.
    """
    found = {}
    for name, mode in (("bf16", None), ("nf4", None), ("all", "all"), ("selective", "selective")):
        torch.manual_seed(0)
        model, layers, loss_of = make(mode)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:      # from zero, A would have no gradient
                torch.nn.init.normal_(parameter, 0, 0.05)
        frozen = [module for layer in layers for module in layer.modules() if type(module) is torch.nn.Linear
                  and not module.weight.requires_grad]
        shapes = {module.weight.shape for module in frozen} | {module.weight.t().shape for module in frozen}
        kept = []
        if name == "bf16":
            for module in frozen:
                module.weight.data = rounded(module.weight, torch.bfloat16)
        else:
            converted(layers)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(
                lambda t: (kept.append(t), t)[1], lambda t: t):
            loss = loss_of()
        loss.backward()
        found[name] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        whole = [t for t in kept if t.shape in shapes and not t.requires_grad and t.is_floating_point()]
        assert bool(whole) == (name == "bf16"), "a weight is kept"
    for name in ("nf4", "all", "selective"):
        assert found[name][0] == found["bf16"][0] and torch.equal(found[name][1], found["bf16"][1]), name


@needs_it
def test_one_weight_at_a_time_is_whole():
    from core import nf4
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4))).requires_grad_(False)
    files = {name: torch.randn(64, 64) for name, _ in model.named_parameters()}
    nf4.convert([model])
    alive = []

    def load(weights, parts, world):
        assert not any(ref() is not None for ref in alive), "two at once"
        (name, tensor), = weights.items()
        tensor.copy_(parts[name])
        alive.append(weakref.ref(tensor))
    gc.disable()        # the references alone free it
    nf4.load_weights(model, load, dict(model.named_parameters()), files, None)
    gc.enable()
    assert len(alive) == 4
    for name, module in zip(files, model):
        assert torch.equal(nf4.whole(module.weight, (64, 64), torch.float32), rounded(files[name], torch.float32))


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


def main_here(argv):
    """In a rank that has not imported this file, and so does not know the package's folder."""
    speech_main(argv)


def chat_main(argv):
    train_sft.main(argv)


@needs_it
@pytest.mark.slow
def test_resume_is_exact_and_two_ranks_learn_the_same(pool, tiny, tmp_path):
    """And what is saved is PEFT's; a run on another base dtype does not go on from it."""
    def run(name, *flags, ranks=1, **options):
        return train_forked(pool, tiny, tmp_path / name, *FLAGS, "--max_steps", 4,
                            "--save_steps", 2, *flags, ranks=ranks, main=f"{__name__}.main_here", **options)
    one = run("one", "--gradient_accumulation_steps", 2)
    shutil.copytree(one.output_dir, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-4")
    again = run("again", "--gradient_accumulation_steps", 2)
    assert "resumed from" in again.output and len(rows(again)) == len(rows(one))
    assert_same_bits(one, again)
    names = load_file(one.output_dir / "checkpoint-4" / "adapter_model.safetensors")
    assert all(".lora_" in name and tensor.dtype == torch.float32 for name, tensor in names.items())
    two = run("two", ranks=2)
    assert two.metrics("train/loss") == pytest.approx(one.metrics("train/loss"), rel=2e-3)
    learnt = one.output_dir / "checkpoint-4"
    assert json.loads((learnt / "text_settings.json").read_text())["base_dtype"] == "nf4"
    for name, dtype in (("as trained", "nf4"), ("on the base", None)):
        merge(str(tiny.model), str(learnt), tmp_path / name, codec=str(tiny.codec), base_dtype=dtype)
        whole = load_file(tmp_path / name / "model.safetensors")
        base = load_file(tiny.model / "model.safetensors")
        place = "model.layers.0.self_attn.q_proj"
        up, down = (names[f"base_model.model.{place}.lora_{half}.weight"] for half in "BA")
        frozen = base[f"{place}.weight"].float()
        expected = (rounded(frozen, torch.float32) if dtype else frozen) + 2 * up @ down
        torch.testing.assert_close(whole[f"{place}.weight"], expected)
        assert torch.equal(whole["model.embed_tokens.weight"], base["model.embed_tokens.weight"].float())
    other = train_forked(pool, tiny, one.output_dir, *FLAGS[:-2], "--max_steps", 5, ok=False)
    assert other.status and "lora on nf4" in other.output, other.output


@needs_it
@pytest.mark.slow
def test_chats_resume_exactly(pool, tmp_path):
    """QLoRA of train_sft.py; with a prompt, the teacher computes on the same four bits. Values are counted, not bytes.
    """
    made = chats.student(tmp_path / "student"), chats.write(tmp_path / "chats.jsonl", chats.conversations(24))
    (tmp_path / "prompt.txt").write_text("Answer briefly: {text}")

    def run(name, *flags):
        line = ["--model_path", made[0], "--train_data_file", made[1], *FLAGS, "--max_steps", 4, "--save_steps", 2,
                "--logging_steps", 1, "--lora_dropout", 0.1, "--num_workers", 0, "--report_to", "none", "--output_dir", tmp_path / name,
                "--per_device_train_batch_size", 2, "--prompt_file", tmp_path / "prompt.txt", *flags]
        statuses, output = pool.run(1, f"{__name__}.chat_main", [str(word) for word in line])
        assert not any(statuses), output[-4000:]
        return Run(0, output, tmp_path / name)
    one = run("one", "--gradient_accumulation_steps", 2, "--gradient_checkpointing")
    shutil.copytree(one.output_dir, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-4")
    assert_same_bits(one, run("again", "--gradient_accumulation_steps", 2))
    whole = AutoModelForCausalLM.from_pretrained(made[0])
    number = sum(p.numel() for p in whole.parameters()) + sum(
        t.numel() for t in load_file(one.output_dir / "checkpoint-4" / "adapter_model.safetensors").values())
    assert f"model      {number / 1e6:,.1f} M parameters" in one.output


# ---------------------------------------------------------------------------------------------------------------------
# The plan


@needs_it
@pytest.mark.parametrize("kind, recompute", [("speech", "all"), ("chats", None)])
def test_what_is_counted_is_what_a_real_step_has_alive(kind, recompute, monkeypatch):
    """The plan's peak, of a model still in bf16 that it is asked to round, is that of a real CPU step within 3 %."""
    setup = Setup(1, recompute=recompute, base_dtype="nf4")
    if kind == "speech":
        empty, model = (small_model("attention", torch.bfloat16, recompute)[1] for _ in range(2))
        monkeypatch.setattr(v2, "_attention_by_sample", by_lengths([130] * 4))
        step, layers, batch = speech_plan.step_of(empty), model.base_model.model.layers, pack_of(4, 40, 90, 30)
        pack = len(batch.text_pos), len(batch.audio_pos), len(batch.audio_rows), len(batch.text_rows)
    else:
        monkeypatch.setattr(document_attention, "_attention_by_document", by_lengths([150] * 4))
        empty, model = built("qwen", True, True, False, recompute, dropout=0.1)
        step, layers, batch = chat_plan.step_of(empty), causal_lm.decoder_layers(model.native), batch_of(4, 150, 120)
        pack = 600, len(batch.rows)
    converted(layers)

    def loss(model, batch):
        return sum(part.sum() for part in model(batch)[:2]) if kind == "speech" else model(batch)[0]
    stored = sum(p.nbytes for p in model.parameters())
    assert step_memory.estimate(step, setup, pack).parts["weights"] == stored < 0.8 * sum(p.nbytes for p in empty.parameters())
    found = step_bytes(step_memory.in_four_bits(step), setup, pack, gpu=False)
    assert max(found.values()) == pytest.approx(real_peak(model, batch, loss, True), rel=0.03)


CARDS = (8, 12, 16, 24)
CLIPS, CHATS = np.full(240, 222), np.random.default_rng(0).integers(200, 1000, 100)     # tokens of 20 minutes; of chats


def released(name):
    """An empty model of a released one's shape, with adapters as the trainer's defaults have them; its trainer."""
    kind, *shape = SHAPES[name]
    shape = dict(zip(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                      "num_key_value_heads", "head_dim"), shape))
    if kind == "v2":
        native = v2.empty_model(HiggsAudioV2Config(**REAL).to_dict(), torch.bfloat16, None)
        return v2.PackedHiggs(lora.add_lora(native, 16, 32, 0.0, v2.LORA_TARGETS, "base")), speech_trainer
    if kind == "v3":
        audio = {"encoder_type": "discrete", "use_delay_pattern": True, "tie_word_embeddings": True,
                 "num_codebooks": 8, "vocab_size": 1026}
        native = v3.empty_model({"model_type": v3.MODEL_TYPE, "audio_encoder_config": audio,
                                 "text_config": shape | {"tie_word_embeddings": True}}, torch.bfloat16, None)
        return v3.PackedHiggs3(lora.add_lora(native, 16, 32, 0.0, v3.LORA_TARGETS, "base")), speech_trainer
    config = {"llama": LlamaConfig, "qwen": Qwen3Config}[kind](**shape, tie_word_embeddings=True)
    native = causal_lm.empty_model(config, torch.bfloat16, attention=document_attention.ATTENTION)
    net = adapters.add_lora(native, causal_lm.decoder_layers(native), 32, 32, 0.0, "all-linear", "base")
    return packed_lm.PackedLM(net), train_sft


SHAPES = {"Higgs-Audio V2": ("v2",), "Higgs TTS 3": ("v3", 151936, 2560, 9728, 36, 32, 8, 128),
          "SmolLM2-135M": ("llama", 49152, 576, 1536, 30, 9, 3, 64),
          "Qwen3-4B": ("qwen", 151936, 2560, 9728, 36, 32, 8, 128)}


def planned(name, capsys, tmp_path):
    """A row of the table in docs/speech.md: what a dry run with --auto takes on each card."""
    model, trainer = released(name)
    cells = []
    for gib in CARDS:
        args = parse(trainer.build_parser(), trainer.check_flags, [
            "--model_path", "m", "--train_data_file", "d", "--output_dir", str(tmp_path), "--bf16", "--use_lora",
            "--auto", "--dry_run", "1", "--gpu_memory", str(gib), "--report_to", "none",
            *(["--global_batch_size", "8"] if trainer is train_sft else [])])
        if trainer is train_sft:
            chat_plan.choose(args, ALONE, 1, model, CHATS, CHATS // 2)
        else:
            def memory_of(setup, order):
                text = max(setup.budget * 4 // 10, 1)
                return step_memory.estimate(speech_plan.step_of(model), setup, (text, setup.budget - text, setup.budget - text,
                                                                       text // 4))
            plan.choose_packs(args, ALONE, 1, CLIPS, memory_of)
        how = {None: "", "selective": "S ", "all": "R "}[args.gradient_checkpointing]
        said = capsys.readouterr().out
        peak = re.findall(r"([\d.]+) GiB  taken", said)
        rounded_too = ["NF4" in line for line in re.findall(r".* GiB  t.*", said)]
        assert rounded_too == sorted(rounded_too), "what changes nothing but time comes first"
        costs = {None: "", "selective": "cheap parts", "all": "50 % more products"}[args.gradient_checkpointing]
        cost = re.search(r"cost: (.*)", said)[1]
        assert costs in cost and ("four bits" in cost) == rounded_too[-1]
        assert args.max_tokens_per_batch == 4096 and not args.cpu_offload
        cells.append(f"{'NF4 ' if args.base_dtype else ''}{how}{peak[0]}" if peak else "too small")
    return f"| {name} | {' | '.join(cells)} |"


@needs_it
@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_cards_is_what_dry_runs_say(name, capsys, tmp_path):
    row = planned(name, capsys, tmp_path)
    assert row in (ROOT / "docs" / "speech.md").read_text().splitlines(), row


@pytest.mark.parametrize("flags, reason", [
    ("--bf16", "needs --use_lora"), ("--use_lora", "needs --bf16"),
    ("--use_lora --bf16 --parallel fsdp", "needs --parallel ddp"),
    ("--use_lora --bf16 --use_dora", "does not go with --use_dora"),
    ("--use_lora --bf16 --compile", "does not go with --compile"),
    ("--use_lora --bf16", "the package bitsandbytes is missing: pip install bitsandbytes")])
def test_what_nf4_needs(flags, reason, monkeypatch):
    if "missing" in reason:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    for trainer, more in ((speech_trainer, ["--audio_tokenizer_path", "c"]),
                          (train_sft, ["--gradient_accumulation_steps", "1"])):
        args = trainer.build_parser().parse_args(
            ["--model_path", "m", "--train_data_file", "d", "--report_to", "none", "--base_dtype", "nf4",
             *flags.split(), *more])
        with pytest.raises(UserError, match=f"--base_dtype nf4.*{reason}"):
            trainer.check_flags(args, 1)
