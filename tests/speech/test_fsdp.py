"""FSDP2 and HSDP train what DDP and one process train, in every logged number, weights and moments.

The model has odd sizes: most tensors do not divide by the number of ranks, and of some a rank has no row at all. A run
is named by what it trains, how, "ranks x samples x micro-steps", and further flags.
"""
import json
import os
import re
from pathlib import Path

import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, HiggsAudioV2ForConditionalGeneration

import lora
from core import adapters, dist, tensor_io
from speech import make_tiny, v2, weights
from speech.weights import find_model
from tests.helpers import spoken as speech
from tests.helpers.checkpoints import (
    config_of,
    original_config,
    original_state,
    split_rows,
    write_checkpoint,
)
from tests.helpers.runs import CLOCK, CUTS, moments, newest, rows, tensors
from tests.helpers.trainer import (
    Run,
    Tiny,
    script_flags,
    speech_main,
    train_forked,
    trainer_arguments,
)

LR = 2e-4
# 19 of 24 samples are trained, 12 a step: an epoch's second step has 7, so some ranks get empty packs
COMMON = ("--learning_rate", LR, "--validation_split", 0.2, "--eval_steps", 2, "--save_total_limit", 1,
          "--num_train_epochs", 2, "--num_workers", 0)
METHODS = {
    "full": (), "lora": ("--use_lora", "--lora_dropout", 0, "--lora_rank", 5),
    "dropout": ("--use_lora", "--lora_dropout", 0.2, "--lora_rank", 5), "frozen": ("--freeze_llm",),
    "dora": ("--use_lora", "--lora_dropout", 0, "--lora_rank", 5, "--use_dora", "--use_rslora"),
    "audio": ("--text_loss_weight", 0), "packs": ("--max_tokens_per_batch", 400, "--max_steps", 4),
}
EVERY = "--save_steps 1 --save_total_limit 0"
HSDP = "hsdp 4x3x1 --shard_size 2"      # two copies, each in two shards


def flags_of(name):
    """(ranks, flags) of a run's name."""
    method, mode, split, *more = name.split()
    ranks, samples, micro_steps = map(int, split.split("x"))
    return ranks, (*COMMON, *METHODS[method], "--parallel", mode, "--per_device_train_batch_size", samples,
                   "--gradient_accumulation_steps", micro_steps, *more)


# -- Model, data, ranks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd(tiny, tmp_path_factory):
    """A Tiny whose model has odd sizes and norms that differ, with clips of half a second."""
    root = tmp_path_factory.mktemp("odd")
    # on 4 ranks the 6 rows of k_proj are shared out 2, 2, 2, 0
    make_tiny.make_model(root, AutoTokenizer.from_pretrained(tiny.model), hidden_size=38, intermediate_size=53,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=6)
    weights, generator = load_file(root / "model" / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in weights:
        if "norm" in name:
            weights[name] += 0.3 * torch.randn(weights[name].shape, generator=generator)
    save_file(weights, root / "model" / "model.safetensors", {"format": "pt"})
    (root / "codec").symlink_to(tiny.codec)
    samples = []
    for number, sample in enumerate(tiny.samples()):
        wave, rate = soundfile.read(tiny.root / sample["messages"][-1]["content"][-1]["audio_url"])
        soundfile.write(root / f"{number}.wav", wave[rate:int(rate * (1.3 + 0.02 * number))], rate)
        text = " ".join(sample["misc"]["target_transcript"].split()[:2 + number % 4])
        spoken = {"type": "audio", "audio_url": f"{number}.wav"}
        turns = {"system": "Generate audio.", "user": text, "assistant": spoken}
        samples.append({"messages": [{"role": role, "content": content} for role, content in turns.items()]})
    (root / "train.json").write_text(json.dumps(samples))
    return Tiny(root)


def complete(pool, tiny, output_dir, name, *more, **options):
    """Train to the end; the Run."""
    ranks, flags = flags_of(name)
    return train_forked(pool, tiny, output_dir, *flags, *more, ranks=ranks, **options)


def in_ranks(pool, ranks, function, *args):
    """Run a function of this file on so many ranks; their output."""
    statuses, output = pool.run(ranks, f"{__name__}.{function}", *args)
    assert not any(statuses), output
    return output


@pytest.fixture(scope="module")
def shared(pool, odd, tmp_path_factory):
    """shared(name) -> the Run, trained when first asked for. Look, do not touch."""
    root, done = tmp_path_factory.mktemp("shared"), {}

    def get(name):
        if name not in done:
            done[name] = complete(pool, odd, root / re.sub(r"\W+", "-", name), name)
        return done[name]
    return get


def assert_same_bits(run, other, after=0):
    """Equal in all that was logged after a step, and in every bit of weights and moments."""
    assert rows(run, after) == rows(other, after)
    for ours, theirs in ((tensors(run), tensors(other)), (moments(run), moments(other))):
        assert ours.keys() == theirs.keys() and ours
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_close(run, other, after=0):
    """Equal up to the order of float32 sums: all that was logged after a step, final weights, moments."""
    ours, theirs = (rows(r, after, CLOCK | CUTS) for r in (run, other))
    assert [line.keys() for line in ours] == [line.keys() for line in theirs] and ours
    for mine, yours in zip(ours, theirs):
        assert mine == pytest.approx(yours, abs=1e-5, rel=1e-5)
    worst = apart(tensors(run), tensors(other))
    assert max(worst.values()) < LR / 100, f"weights: {worst}"
    worst = apart(moments(run), moments(other), relative=True)
    assert max(worst.values()) < 1e-5, f"moments: {worst}"


def apart(ours, theirs, relative=False):
    """{name: largest difference}; relative: as a share of the largest value."""
    assert ours.keys() == theirs.keys() and ours
    scale = {name: theirs[name].abs().max().clamp_min(1e-12) if relative else 1 for name in ours}
    return {name: ((ours[name] - theirs[name]).abs().max() / scale[name]).item() for name in ours}


# -- The same training, however it is shared out -----------------------------------------------------------------------

# each kind of training, each way to share it out and each mode at least once
SAME = [
    "full ddp 2x2x3", f"full fsdp 4x3x1 {EVERY}",
    "lora fsdp 2x2x3 --gradient_checkpointing selective", f"full {HSDP} {EVERY}",
    "packs ddp 2x1x1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_ranks_accumulation_and_sharding_change_nothing(shared, name):
    method = name.split()[0]
    one = shared(f"{method} ddp 1x1x2" if method == "packs" else f"{method} ddp 1x12x1")
    assert_close(shared(name), one)


def test_equal_runs_really_trained(shared, odd):
    """The comparison above would hold for runs that do nothing, too."""
    base = load_file(odd.model / "model.safetensors")
    full, adapter = tensors(shared("full ddp 1x12x1")), tensors(shared("lora ddp 1x12x1"))
    assert full.keys() == base.keys()
    assert all((full[name] - base[name]).abs().max() > LR for name in base)
    assert all(tensor.abs().max() > LR for name, tensor in adapter.items() if "lora_B" in name)
    for method in ("full", "lora"):
        run = shared(f"{method} ddp 1x12x1")
        assert sorted(run.metrics("train/loss")) == [1, 2, 3, 4] and sorted(run.metrics("eval/loss")) == [2, 4]
        assert min(run.metrics("train/grad_norm").values()) > 1.5        # clipped, so a wrong norm shows in the moments


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--cpu_offload"])
def test_memory_flags_change_no_bit(shared, flag):
    assert_same_bits(shared(f"full fsdp 2x2x3 {flag}"), shared("full fsdp 2x2x3"))


@pytest.mark.slow
def test_compiled_layers_train_the_same(pool, odd, shared, tmp_path):
    """With FSDP2's hooks, for one step, as each shape takes much g++; test_v2.py has layers meet several shapes."""
    name = "full fsdp 2x6x1 --disable_eval --max_steps 1"
    ranks, flags = flags_of(f"{name} --compile")
    output = in_ranks(pool, ranks, "train_compiled", trainer_arguments(odd, tmp_path / "out", *flags))
    assert_close(Run(0, output, tmp_path / "out"), shared(name))


def train_compiled(argv):
    speech_main(argv)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full"])
def test_bf16_is_close_to_ddp_and_the_trained_weights_stay_fp32(shared, method):
    exact = shared(f"{method} ddp 1x12x1")
    ddp, fsdp = (shared(f"{method} {mode} 2x2x3 --bf16") for mode in ("ddp", "fsdp"))
    for name in ("train/loss", "train/audio_loss", "train/text_loss", "eval/loss"):
        assert fsdp.metrics(name) == pytest.approx(ddp.metrics(name), rel=3e-3)
        assert fsdp.metrics(name) == pytest.approx(exact.metrics(name), rel=3e-3)
        assert fsdp.metrics(name) != pytest.approx(exact.metrics(name), rel=1e-6)      # not computed in fp32
    assert fsdp.metrics("train/grad_norm") == pytest.approx(ddp.metrics("train/grad_norm"), rel=2e-2)
    for part in (tensors, moments):
        ours, theirs = part(fsdp), part(ddp)
        assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
        for name in ours:       # gradients that bf16 hardly resolves may go either way
            mine, yours = ours[name].double().flatten(), theirs[name].double().flatten()
            alike = mine @ yours / (mine.norm() * yours.norm())
            assert alike > 0.9, f"{name} {alike}"
        assert all((tensor.bfloat16() != tensor).any() for name, tensor in ours.items()
                   if not name.endswith("step"))        # not rounded anywhere
    assert any(weight.abs().max() > LR for weight in tensors(fsdp).values())


@pytest.mark.slow
def test_gradients_are_reduced_once_a_step(pool, odd, tmp_path):
    """Counted in the run: three micro-steps cost the reductions of one, a layer each and one for the rest."""
    ranks, flags = flags_of("full fsdp 2x2x3")
    argv = trainer_arguments(odd, tmp_path / "out", *flags, "--disable_eval", "--max_steps", 1)
    in_ranks(pool, ranks, "count_collectives", argv, str(tmp_path / "counts.json"))
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert sum(number for name, number in counts.items() if "reduce_scatter" in name) == 2 + 1, counts


def count_collectives(argv, path):
    """Rank 0's, by their names: the others run the same ones."""
    if os.environ["RANK"] != "0":
        speech_main(argv)
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        speech_main(argv)
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("c10d::")}
    Path(path).write_text(json.dumps(counts))


# -- Batches that lack a modality --------------------------------------------------------------------------------------


def start(argv):
    """What the trainer does before its first step: (World, flags, model, what it calls, native model)."""
    args = script_flags()[0].parse_args(argv)
    script_flags()[1](args, int(os.environ["WORLD_SIZE"]))
    world = dist.init(60, 60, args.parallel != "ddp")
    folder, config = find_model(args.model_path)
    args.lora_target_modules = args.lora_target_modules or "attention"
    half = torch.bfloat16 if args.bf16 and args.use_lora else torch.float32
    native = net = v2.empty_model(config, half, folder)
    parts = v2.weight_parts(folder, config)
    if args.use_lora:
        net = lora.add_lora(native, args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_target_modules,
                            args.model_path, use_rslora=args.use_rslora, use_dora=args.use_dora)
    v2.freeze_unreachable(native, args.text_loss_weight)
    model = v2.packed(net, args.gradient_checkpointing)
    if args.parallel != "ddp":
        dist.shard(model, v2.layers(native), world, args.bf16, args.reshard_after_forward, args.cpu_offload,
                   args.shard_size)
    model.to_empty(device="cpu")
    v2.reset_buffers(native, world.device)
    weights.load_weights(adapters.base_weights(net) if args.use_lora else dict(native.named_parameters()), parts, world)
    if args.use_lora:
        adapters.init_adapters(net, args.seed)
    model.train()
    return world, args, model, model if args.parallel != "ddp" else dist.wrap_ddp(model, world), native


# -- Start: empty, then straight into shards ---------------------------------------------------------------------------


def write_shards(argv, folder):
    """Each rank leaves its shards and buffers in rank<rank>.pt, as they are right after the start."""
    world, _, model, _, native = start(argv)
    shards = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    kinds = {type(p) for p in model.parameters()}
    torch.save({"shards": {name: shard.detach() for name, shard in shards.items()}, "buffers":
                dict(native.named_buffers()), "sharded": all(issubclass(k, DTensor) for k in kinds)},
               Path(folder) / f"rank{world.rank}.pt")
    dist.finish()


def started(pool, odd, folder, ranks, *flags):
    """What each rank wrote."""
    folder.mkdir(exist_ok=True)
    argv = trainer_arguments(odd, folder / "out", "--parallel", "fsdp", *flags)
    in_ranks(pool, ranks, "write_shards", argv, str(folder))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


def assert_rows(parts, name, expected):
    """The ranks' shards are the rows of a tensor, cut as torch.chunk does; ranks beyond have none."""
    cut = [*expected.chunk(len(parts)), *[expected[:0]] * len(parts)]
    for rank, part in enumerate(parts):
        assert part["shards"][name].dtype == expected.dtype
        assert torch.equal(part["shards"][name], cut[rank]), f"{name} of rank {rank}"


def original_split(folder, odd):
    """The odd model in the 2025 format in three files, three tensors of it split in two; the folder."""
    state = original_state(odd.model)
    split_rows(state, "embed_tokens", ("embedding_frozen", "embedding_trainable"), 571)
    for head, at in (("audio_lm_head", 4103), ("text_lm_head", 1)):
        split_rows(state, f"audio_decoder_proj.{head}", ("linear_frozen", "linear_trainable"), at)
    return write_checkpoint(folder, original_config(config_of(odd.model)), state, 3)


@pytest.mark.parametrize("form, ranks", [("native", 4), ("2025", 3)])
def test_every_shard_is_rows_of_the_file(pool, odd, tmp_path, form, ranks):
    source = odd.model if form == "native" else original_split(tmp_path / "model", odd)
    parts = started(pool, odd, tmp_path, ranks, "--model_path", source)
    base = load_file(odd.model / "model.safetensors")
    assert all(part["sharded"] for part in parts)
    assert {name.removeprefix("net.") for name in parts[0]["shards"]} == base.keys()
    for name, expected in base.items():
        assert_rows(parts, f"net.{name}", expected)
    if ranks == 4:
        assert not len(parts[3]["shards"]["net.model.layers.0.self_attn.k_proj.weight"])        # 6 rows: 2, 2, 2, 0
    buffers = dict(HiggsAudioV2ForConditionalGeneration.from_pretrained(odd.model, use_text_head=True).named_buffers())
    assert len(buffers) == 3
    for part in parts:
        assert part["buffers"].keys() == buffers.keys()
        assert all(torch.equal(part["buffers"][name], value) for name, value in buffers.items())


@pytest.mark.parametrize("ranks, flags, reading", [(2, ("--parallel", "ddp"), [0]), (4, (
    "--parallel", "hsdp", "--shard_size", 2), [0, 1])])
def test_the_first_copy_is_read_and_sent_to_the_others(pool, odd, tmp_path, ranks, flags, reading):
    """Ranks that do not read have what the file holds, under HSDP the rows of their shard."""
    argv = trainer_arguments(odd, tmp_path / "out", *flags)
    in_ranks(pool, ranks, "write_shards_and_reads", argv, str(tmp_path))
    parts = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(ranks)]
    reads = [int((tmp_path / f"reads{rank}").read_text()) for rank in range(ranks)]
    base = load_file(odd.model / "model.safetensors")
    assert reads == [len(base) * (rank in reading) for rank in range(ranks)]
    for name, expected in base.items():
        assert_rows(parts[:2], f"net.{name}", expected) if ranks == 4 else None
        for rank in range(2, 4) if ranks == 4 else range(ranks):
            same = parts[rank - 2]["shards"][f"net.{name}"] if ranks == 4 else expected
            assert torch.equal(parts[rank]["shards"][f"net.{name}"], same)


def write_shards_and_reads(argv, folder):
    reads, read_rows = [], tensor_io.read_rows
    tensor_io.read_rows = lambda *args: (reads.append(args), read_rows(*args))
    write_shards(argv, folder)
    (Path(folder) / f"reads{os.environ['RANK']}").write_text(str(len(reads)))


# -- Resume: other ranks, other mode, no difference --------------------------------------------------------------------


def resumed(pool, odd, folder, source, step, name):
    """The run `name` from step `step` of the run `source`."""
    return complete(pool, odd, folder / "out", name, "--resume", source.output_dir / f"checkpoint-{step}")


# an epoch has two steps: 1 and 3 lie in an epoch, 2 between two
@pytest.mark.slow
@pytest.mark.parametrize("source, step, name", [
    (f"full fsdp 4x3x1 {EVERY}", 3, "full ddp 2x3x2"),
    (f"full {HSDP} {EVERY}", 3, "full fsdp 2x3x2")])
def test_resume_onto_other_ranks_or_mode_goes_on_the_same(pool, odd, shared, tmp_path, source, step, name):
    run = resumed(pool, odd, tmp_path, shared(source), step, name)
    assert rows(run)[0]["step"] == step + 1
    assert_close(run, shared(source), after=step)


@pytest.mark.slow
@pytest.mark.parametrize("name, step", [(f"dropout fsdp 2x3x2 {EVERY}", 3)])
def test_resume_on_the_same_ranks_is_exact(pool, odd, shared, tmp_path, name, step):
    run = resumed(pool, odd, tmp_path, shared(name), step, name)
    assert rows(run)[0]["step"] == step + 1
    assert_same_bits(run, shared(name), after=step)


# -- What is exported, what is refused ---------------------------------------------------------------------------------


def logits_of(model, odd, folder):
    """(audio logits, text logits) of transformers' own forward."""
    folder.mkdir()
    ids, samples = speech.samples_of(odd.model, model.config, [speech.CLONING], folder)
    inputs = {k: v for k, v in speech.native_batch(samples, ids).items() if "labels" not in k}
    with torch.no_grad():
        hidden = model.eval().model(**inputs).last_hidden_state
        return model.audio_lm_head(hidden), model.text_lm_head(hidden)


def test_full_checkpoint_is_a_transformers_model(shared, odd, tmp_path):
    run = shared(f"full fsdp 4x3x1 {EVERY}")
    for same in (run, shared(f"full {HSDP} {EVERY}")):      # each of the four has written its share
        assert len(list(newest(same).glob("model-*-of-00004.safetensors"))) == 4
    model, info = HiggsAudioV2ForConditionalGeneration.from_pretrained(newest(run), use_text_head=True,
                                                                       output_loading_info=True)
    assert not any(info.values()), info
    ours = tensors(run)
    assert ours.keys() == model.state_dict().keys()
    assert all(torch.equal(ours[name], value) for name, value in model.state_dict().items())
    ddp = HiggsAudioV2ForConditionalGeneration.from_pretrained(newest(shared("full ddp 2x2x3")), use_text_head=True)
    torch.testing.assert_close(logits_of(model, odd, tmp_path / "fsdp"), logits_of(ddp, odd, tmp_path / "ddp"))
