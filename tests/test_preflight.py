"""--dry_run: its numbers are the real run's, its memory formulas a real step's, and it finds what would fail later."""
import weakref

import numpy as np
import pytest
import soundfile
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import code_cache
import higgs
import higgs_io
import lora
import preflight
import speech_plan
from data import IGNORE, TokenIds, collate
from packing import PackOrder

GIB = 2**30


# ---------------------------------------------------------------------------------------------------------------------
# Activations: the formula against what a real step leaves alive


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations made inside this context: now, and at most. `known` tensors do not count."""

    def __init__(self, known):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known | self.sizes.keys():
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata)
        return out

    def gone(self, key):
        self.now -= self.sizes.pop(key)


def small_model(targets, dtype, recompute, dropout=0.1):
    """(config, PackedHiggs) on the CPU, wide enough that rows and not weights take the memory."""
    config = higgs_io.HiggsAudioV2Config(
        vocab_size=600, hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, codebook_size=1026, num_codebooks=8, audio_token_id=516,
        audio_bos_token_id=513, audio_delay_token_id=514, pad_token_id=501, eos_token_id=509, bos_token_id=1)
    native = higgs_io.HiggsAudioV2ForConditionalGeneration(config, use_text_head=True).to(dtype)
    net = lora.add_lora(native, 8, 16, dropout, targets, "base") if targets else native
    return config, higgs.PackedHiggs(net, recompute).train()


def pack_of(samples, text, audio, targets):
    """PackedBatch of samples of `text` text and `audio` audio rows, `targets` of each predicting something."""
    rng = np.random.default_rng(0)
    ids = TokenIds(audio=516, delay=514, pad=501, num_codebooks=8, stream_bos=1024, stream_eos=1025)
    is_audio = np.arange(text + audio) >= text
    label = np.full(text + audio, IGNORE)
    label[1:1 + targets] = 7
    codes = np.full((audio, 8), IGNORE)
    codes[1:1 + targets] = 5
    return collate([{"number": i, "input_ids": np.where(is_audio, ids.audio, rng.integers(0, 500, text + audio)),
                     "is_audio": is_audio, "text_labels": label, "audio_ids": rng.integers(0, 1024, (audio, 8)),
                     "audio_labels": codes} for i in range(samples)], ids)


def measured_step(model, batch, bf16):
    """(bytes alive at the end of the forward pass, peak bytes of forward and backward) beside weights and batch."""
    known = [*model.parameters(), *model.buffers(), *(v for v in vars(batch).values() if isinstance(v, torch.Tensor))]
    with LiveBytes(known) as memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            audio, text, _ = model(batch)
            kept = memory.now
        (audio.sum() + text).backward()
    return kept, memory.peak


STEPS = [(targets, bf16, recompute) for targets in ("", "attention", "attention+audio_mlp", "all-linear")
         for bf16 in (False, True) for recompute in (False, True)]


@pytest.mark.parametrize("targets, bf16, recompute", STEPS)
def test_activation_bytes_are_what_a_step_keeps(targets, bf16, recompute):
    config, model = small_model(targets, torch.bfloat16 if targets and bf16 else torch.float32, recompute)
    batch = pack_of(4, 40, 90, 30)
    kept, peak = measured_step(model, batch, bf16)
    layers, one = higgs.activation_bytes(model.base_model, len(batch.text_pos), len(batch.audio_pos), bf16, recompute,
                                         cuda=False)
    logits, logit_peak = higgs.logit_bytes(config, len(batch.audio_rows), len(batch.text_rows))
    casts = higgs.cast_bytes(model) if bf16 else 0
    assert layers == pytest.approx(kept - logits - casts, rel=0.08)
    assert layers + logits + casts == pytest.approx(kept, rel=0.04)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    # the whole step, in the stages that peak_stages adds up; gradients come while activations go
    work = preflight.BACKWARD * one if recompute else (preflight.BACKWARD - 1) * one
    estimate = layers + casts + max(logit_peak, work)
    assert estimate * 0.9 < peak < (estimate + gradients) * 1.03


@pytest.mark.parametrize("recompute", [False, True])
def test_activation_bytes_of_weights_in_bf16(recompute):
    """What FSDP2 computes on: all weights in bf16, the residual stream with them, and nothing for autocast to cast."""
    config, model = small_model("", torch.float32, recompute)
    rows = 4 * 40, 4 * 90
    expected = higgs.activation_bytes(model.base_model, *rows, True, recompute, stream=2, cuda=False)
    kept, _ = measured_step(model.to(torch.bfloat16), pack_of(4, 40, 90, 30), True)
    assert expected[0] == pytest.approx(kept - higgs.logit_bytes(config, 120, 120)[0], rel=0.08)


def test_without_dropout_adapters_share_their_input():
    batch = pack_of(4, 40, 90, 5)
    config, model = small_model("all-linear", torch.bfloat16, False, dropout=0.0)
    kept, _ = measured_step(model, batch, True)
    layers, _ = higgs.activation_bytes(model.base_model, 160, 360, True, False, cuda=False)
    assert layers == pytest.approx(kept - higgs.logit_bytes(config, 20, 20)[0] - higgs.cast_bytes(model), rel=0.05)


def test_logit_bytes_are_the_peak_of_many_targets():
    config, model = small_model("attention", torch.float32, True)
    for targets in (30, 89):
        batch = pack_of(2, 90, 90, targets)
        _, peak = measured_step(model, batch, False)
        kept, _ = higgs.activation_bytes(model.base_model, 180, 180, False, True, cuda=False)
        assert kept + higgs.logit_bytes(config, len(batch.audio_rows), len(batch.text_rows))[1] == \
            pytest.approx(peak, rel=0.03)


# ---------------------------------------------------------------------------------------------------------------------
# The 3B model, without one


REAL = {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 2048,
        "num_codebooks": 8, "codebook_size": 1026, "audio_token_id": 128016, "audio_bos_token_id": 128013,
        "audio_delay_token_id": 128014, "pad_token_id": 128001, "eos_token_id": 128009, "bos_token_id": 1}


@pytest.fixture(scope="module")
def real():
    """The 3B model with its text head, empty: full fine-tuning, fp32."""
    return higgs_io.empty_model(higgs_io.HiggsAudioV2Config(**REAL), torch.float32)


def test_sizes_of_the_real_model(real):
    units = higgs.unit_sizes(real)
    assert len(units) == 29 and [sum(column) for column in zip(*units)][0] == sum(p.numel() for p in real.parameters())
    # 394.0 M text embedding and as much text head, 25.2 M audio embedding and head each, in the root
    assert units[0][0] == 2 * 128256 * 3072 + 2 * 8208 * 3072 + 3072
    assert sum(unit[0] for unit in units) / 1e9 == pytest.approx(5.771, abs=0.001)
    assert all(stored == 4 * values and trained == values for values, stored, trained in units)


def test_full_fine_tuning_of_3b_fits_eight_gpus(real):
    """16 bytes a value (fp32 weights, gradients, two moments) over 8 GPUs; packs of 8192 tokens, checkpointing."""
    parts = preflight.memory_parts(higgs.unit_sizes(real), world=8, sharded=True, compute=2)
    state = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert state == pytest.approx(16 * 5.771e9 / 8, rel=1e-3) and state / GIB == pytest.approx(10.75, abs=0.01)
    root, layer = 2 * 128256 * 3072 + 2 * 8208 * 3072 + 3072, 176_173_056
    assert parts["copies"] == 2 * (root + 3 * layer)
    assert parts["reduction"] == 6 * layer + 2 * root and parts["last reduction"] == 6 * root
    assert parts["host"] == 0
    tokens = 8192
    kept, one = higgs.activation_bytes(real, 2048, tokens - 2048, True, True, stream=2)
    # a row: 28 times a layer's bf16 input; at the end the norm's fp32 input, 1 / rms and normalised row; cos and sin
    assert kept == tokens * (28 * 2 * 3072 + 4 * 3072 + 4 + 2 * 3072 + 2 * 2 * 128)
    logits = higgs.logit_bytes(real.config, tokens - 2048, 512)[1]
    stages = preflight.peak_stages(parts, kept, one, logits, True)
    assert 12 * GIB < max(stages.values()) < 30e9                       # room in 80 GB
    # gradients of a whole window of micro-steps unsharded: 4 bytes a value more on every GPU, still inside
    more = preflight.memory_parts(higgs.unit_sizes(real), world=8, sharded=True, compute=2, whole=True)
    assert more["gradients"] - parts["gradients"] == pytest.approx(4 * 5.771e9, rel=1e-3)
    assert max(preflight.peak_stages(more, kept, one, logits, True).values()) < 60e9
    # in DDP every GPU has it all: 16 bytes a value are 86 GiB, too much
    alone = preflight.memory_parts(higgs.unit_sizes(real), world=8, casts=higgs.cast_bytes(real))
    assert alone["weights"] + alone["gradients"] + alone["optimizer"] == pytest.approx(16 * 5.771e9, rel=1e-3)
    assert alone["reduction"] == 0 and alone["copies"] == 2 * sum(
        p.numel() for n, p in real.named_parameters() if p.ndim == 2 and "embed" not in n)


def test_offload_moves_state_to_the_host_and_reshard_frees_layers(real):
    units = higgs.unit_sizes(real)
    kept = preflight.memory_parts(units, world=8, sharded=True, compute=2, reshard=False)
    assert kept["copies"] == 2 * sum(unit[0] for unit in units)
    away = preflight.memory_parts(units, world=8, sharded=True, compute=2, offload=True)
    assert away["weights"] == away["gradients"] == away["optimizer"] == 0
    assert away["host"] == 2 * sum(unit[0] for unit in units)           # 16 bytes over 8 GPUs


# ---------------------------------------------------------------------------------------------------------------------
# Lengths from headers


@pytest.fixture(scope="module")
def codec(tiny):
    return code_cache.load_codec(tiny.codec, torch.device("cpu"), 8)


@pytest.mark.parametrize("extension", ["wav", "flac", "ogg", "mp3"])
@pytest.mark.parametrize("rate", [16000, 22050, 24000, 44100, 48000])
def test_frames_from_the_header_are_those_of_the_codec(tiny, codec, tmp_path, extension, rate):
    config, _ = code_cache.codec_config(tiny.codec, 8)
    rng = np.random.default_rng(rate)
    for seconds in (0.05, *rng.uniform(0.2, 2.0, 3)):
        path = tmp_path / f"{seconds}.{extension}"
        soundfile.write(path, 0.1 * rng.standard_normal((round(seconds * rate), 2)), rate)
        cuts = [(None, None), (0.0, 0.043)]
        cuts += [(seconds / 3, None), (0.007, seconds / 2), (0.0, 99.0)] if seconds > 0.1 else []
        _, waves = code_cache.decode_audio(path, cuts)
        encoded = [len(code_cache.encode_clip(codec[0], wave, codec[1], 8)) for wave in waves]
        assert speech_plan.header_frames(path, cuts, config) == encoded


def test_frames_of_every_length_around_the_codec_steps(tiny, codec):
    """The rule changes within a frame of 960 samples: walk through a few of them."""
    config, _ = code_cache.codec_config(tiny.codec, 8)
    rng = np.random.default_rng(0)
    for samples in [*range(960, 4000, 53), *(960 * k + d for k in (1, 2, 7, 20) for d in (-1, 0, 1, 159, 160, 161))]:
        if samples >= 960:
            wave = 0.1 * rng.standard_normal(samples, np.float32)
            assert speech_plan.codec_frames(samples, config) == len(code_cache.encode_clip(codec[0], wave, codec[1], 8))


# ---------------------------------------------------------------------------------------------------------------------
# Histogram, packing, disk


def test_histogram_counts_everything_once():
    for lengths in ([5], [7, 7, 7], [1, 1000], range(190, 317), np.random.default_rng(0).lognormal(5, 1, 999)):
        lines = preflight.histogram(np.array(lengths).astype(np.int64))
        assert 1 <= len(lines) <= 10
        low, high = (int(line.split()[at].replace(",", "")) for line, at in ((lines[0], 0), (lines[-1], 2)))
        assert low <= int(min(lengths)) and high >= int(max(lengths))
        assert sum(int(line.split()[3].replace(",", "")) for line in lines) == len(lengths)
        assert len({line.index(" - ") for line in lines}) == 1 and max(line.count("#") for line in lines) == 40


def test_packing_report():
    even = preflight.packing_report(np.array([100, 100, 100, 100]), 2)
    assert even == {"useful": 1.0, "balance": 1.0}
    uneven = preflight.packing_report(np.array([100, 50, 80]), 2)        # the fourth pack is an empty one of one slot
    assert uneven["useful"] == 230 / 231 and uneven["balance"] == pytest.approx((0.75 + 81 / 160) / 2)
    padded = preflight.packing_report(np.array([100, 50, 80]), 2, budget=128)
    assert padded == {"useful": 230 / 512, "balance": 1.0}
    assert preflight.packing_report(np.array([100, 50, 80]), 2, 3, budget=128)["useful"] == 230 / (6 * 128)


def test_pack_sums():
    order = PackOrder(np.arange(1, 8), samples_per_pack=3, seed=1)
    plan = order.epoch(0)
    assert preflight.pack_sums(plan, np.arange(1, 8)).tolist() == [sum(plan.pack(p) + 1) for p in range(3)]
