"""--dry_run shows the numbers of the real run, and its memory is the peak of a real step."""
import re

import numpy as np
import pytest
import soundfile
import torch

from core import kernels
from data import split_validation
from speech import plan as speech_plan
from speech.codes import codec_frames, encode_clip, header_frames, load_codec
from speech.conversations import Clip
from tests.helpers.live_bytes import by_lengths, check_plan, run_flags
from tests.helpers.small_speech import pack_of, small_model
from tests.helpers.spoken import decode_audio
from tests.helpers.trainer import brief
from tests.speech import test_bad_input


@pytest.mark.slow
@pytest.mark.parametrize("targets, recompute, sharded", [("", "all", False), ("attention", None, True)])
def test_planned_memory_is_the_peak_of_a_real_step(targets, recompute, sharded, monkeypatch):
    """FSDP2 computes on weights in bfloat16."""
    monkeypatch.setattr(kernels, "_attention_by_document", by_lengths([130] * 4))
    dtype = torch.bfloat16 if targets else torch.float32
    empty, model = (small_model(targets, dtype, recompute)[1] for _ in range(2))
    model, batch = model.to(torch.bfloat16) if sharded else model, pack_of(4, 40, 90, 30)
    args = run_flags(1, "fsdp" if sharded else "ddp", True, recompute)
    pack = len(batch.text_pos), len(batch.audio_pos), len(batch.audio_rows), len(batch.text_rows)
    check_plan(empty, speech_plan.loss, args, pack, model, batch, lambda net, b: sum(each.sum() for each in net(b)[:2]))
    if targets:
        check_plan(empty, speech_plan.loss, args, (*pack, True), model, batch, lambda net, b: net(b, keep=True).sum())


@pytest.fixture(scope="module")
def tiny(tiny, tmp_path_factory):
    return brief(tiny, tmp_path_factory.mktemp("brief"))


@pytest.fixture(scope="module")
def codec(tiny):
    return load_codec(tiny.codec, torch.device("cpu"), 8)


@pytest.mark.slow
@pytest.mark.parametrize("extension, rate", [("wav", 16000), ("flac", 44100), ("ogg", 22050), ("mp3", 44100)])
def test_frames_from_the_header_are_those_of_the_codec(tiny, codec, tmp_path, extension, rate):
    rng = np.random.default_rng(rate)
    for seconds in (0.05, *rng.uniform(0.2, 2.0, 3)):
        path = tmp_path / f"{seconds}.{extension}"
        soundfile.write(path, 0.1 * rng.standard_normal((round(seconds * rate), 2)), rate)
        cuts = [(None, None), (0.0, 0.043)]
        cuts += [(seconds / 3, None), (0.007, seconds / 2), (0.0, seconds + 0.2)] if seconds > 0.1 else []
        waves = decode_audio(path, cuts)
        encoded = [len(encode_clip(codec[0], wave, codec[1], 8)) for wave in waves]
        assert [header_frames(Clip(str(path), *cut)) for cut in cuts] == encoded


def test_frames_of_every_length_around_the_codec_steps(tiny, codec):
    """The number of frames changes every 960 samples: lengths around such steps."""
    rng = np.random.default_rng(0)
    for samples in [*range(960, 4000, 53), *(960 * k + d for k in (1, 2, 7, 20) for d in (-1, 0, 1, 159, 160, 161))]:
        if samples >= 960:
            wave = 0.1 * rng.standard_normal(samples, np.float32)
            assert codec_frames(samples) == len(encode_clip(codec[0], wave, codec[1], 8))


def line_of(output, start):
    """The only line of an output with this start."""
    lines = [line for line in output.splitlines() if line.startswith(start)]
    assert len(lines) == 1, output
    return lines[0]


def number(pattern, text):
    """The number that a pattern's group finds."""
    return float(re.search(pattern, text)[1].replace(",", ""))


@pytest.mark.slow
def test_a_dry_run_has_the_numbers_of_the_real_run(forked, real_run, tiny, tmp_path):
    """Two ranks, an empty code cache."""
    flags = ("--use_lora", "--lora_rank", 64, "--code_cache", tmp_path / "codes", "--num_train_epochs", 2,
             "--max_tokens_per_batch", 700, "--gradient_accumulation_steps", 2, "--logging_steps", 99,
             "--validation_split", 0.1, "--save_steps", 3)
    plan = forked(*flags, "--dry_run", ranks=2).output
    assert not (tmp_path / "out").exists() and not (tmp_path / "codes").exists()
    assert re.fullmatch(r"FITS 2\.\d of 80\.0 GiB · \d+ steps · at least 0:00:00 on an H200", line_of(plan, "FITS"))
    assert plan.count("dry run ok") == 1
    clips = int(number(r"(\d+) distinct clips", plan))
    assert f"{clips} still to be encoded" in plan
    # one process that plans for two GPUs prints the same, except for the free disk space
    alone = real_run(*flags, "--max_steps", 0, "--dry_run", 2, evaluate=True).output
    assert plan[plan.index("FITS"):plan.index("dry run ok")] in alone
    done = forked(*flags, ranks=2)
    assert line_of(done.output, "samples") == line_of(plan, "samples")
    assert line_of(plan, "steps").startswith(line_of(done.output, "steps").partition(";")[0])
    lengths = np.load(next((tmp_path / "out").glob("table-*")) / "lengths.npy")
    train_ids, _ = split_validation(24, 0.1, 42)
    assert number(r"samples +(\d+)", plan) == len(train_ids) == 22
    assert f"max {lengths[train_ids].max()};" in line_of(plan, "samples")
    (step,) = done.metrics("train/loss")
    assert step == number(r"steps +(\d+)", plan)
    newest = tmp_path / "out" / f"checkpoint-{step}"
    assert number(r"disk +([\d.]+) MiB", plan) == pytest.approx(sum(
        path.stat().st_size for path in newest.rglob("*") if path.is_file()) / 2**20, abs=0.1)


data, real_run = test_bad_input.data, test_bad_input.run
