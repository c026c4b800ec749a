"""Whole training runs: resumable, logged once, hard to poison. That all splits train the same: test_fsdp.py."""
import ctypes
import functools
import json
import math
import os
import re
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core import checkpoint, json_files
from core.dist import World
from core import recomputation
from core.optim import lr_factor
from speech.dataset import Table
from speech.loss import train_line
from tests.helpers.progress import PATIENCE_S
from tests.helpers.runs import rows, tensors
from tests.helpers.trainer import (
    Run,
    Tiny,
    bad_token,
    speech_main,
    train_forked,
    trainer_command,
    unheard,
)

LR = 2e-4               # a wrong gradient moves weights far beyond the tolerances below, Adam's rounding does not
TRAINED, STEPS = 19, 10     # of 24 samples, 0.2 held out; 2 epochs of ceil(19 / 4) steps

COMMON = ("--learning_rate", LR, "--validation_split", 0.2, "--eval_steps", 4, "--num_train_epochs", 2)
LORA = (*COMMON, "--use_lora", "--lora_dropout", 0, "--per_device_train_batch_size", 2)
# dropout makes the random state matter; a constant rate does not depend on where a run was told to stop
DROPOUT = ("--use_lora", "--lora_dropout", 0.1, "--learning_rate", LR, "--lr_scheduler", "constant", "--disable_eval",
           "--save_steps", 0, "--num_train_epochs", 2)
SHARED = {
    "lora 2x2": (2, LORA),
    "full 1x4": (1, (*COMMON, "--per_device_train_batch_size", 4)),
    "packs 2": (2, (*LORA, "--max_tokens_per_batch", 700, "--max_steps", 6)),
    "dropout": (1, DROPOUT),
}


def launched(tiny, output_dir, *flags, ranks=1, env=None):
    """Start the trainer as a user does and run it to its end; returns the Run."""
    done = subprocess.run(trainer_command(tiny, output_dir, *flags, ranks=ranks), cwd=output_dir.parent, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S,
                          env={**os.environ, **(env or {})})
    assert done.returncode == 0, done.stdout[-4000:]
    return Run(done.returncode, done.stdout, output_dir)


@pytest.fixture(scope="module")
def complete(pool, tiny):
    """complete(output_dir, *flags, ranks=1) -> Run of a forked trainer."""
    return functools.partial(train_forked, pool, tiny)


@pytest.fixture(scope="module")
def shared(complete, tiny, tmp_path_factory):
    """shared(name) -> Run of SHARED[name], trained when first asked for. Look, do not touch."""
    root, done = tmp_path_factory.mktemp("shared"), {}

    def get(name):
        if name not in done:
            ranks, flags = SHARED[name]
            done[name] = complete(root / name.replace(" ", "-"), *flags, ranks=ranks)
        return done[name]
    return get


def state_of(path):
    return json_files.read_object(path / "trainer_state" / "state.json")


def steps_of(output_dir):
    """Steps of the checkpoints there."""
    return [step for step, _ in checkpoint.list_checkpoints(output_dir)]


def base_weights(tiny):
    return load_file(tiny.model / "model.safetensors")


def assert_same_bits(run, other):
    """Equal in every number that the clock does not decide, and in every bit of the final weights."""
    assert rows(run) == rows(other)
    ours, theirs = tensors(run), tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def train_counted(argv):
    """The trainer, which then says for how many calls of a layer it kept only the input."""
    real, calls = recomputation.checkpoint, []
    recomputation.checkpoint = lambda *given, **more: (calls.append(1), real(*given, **more))[1]
    speech_main(argv)
    print(f"recomputed {len(calls)}")


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing(shared, forked):
    """With dropout: the recomputed layers must draw the same masks again."""
    recomputed = forked(*DROPOUT, "--gradient_checkpointing", main=f"{__name__}.train_counted")
    steps = len(recomputed.metrics("train/loss"))
    assert int(re.search(r"^recomputed (\d+)", recomputed.output, re.M)[1]) >= 2 * steps      # of two layers
    ours, theirs = shared("dropout").metrics("train/loss"), recomputed.metrics("train/loss")
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert tensors(recomputed).keys() == tensors(shared("dropout")).keys()


# -- Resume ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(complete, tmp_path_factory):
    """Folder of the "dropout" run stopped at steps 3 (in an epoch), 6 (exactly after one: 24 samples) and 8."""
    output_dir = tmp_path_factory.mktemp("stopped") / "out"
    for step, before in ((3, None), (6, 3), (8, 6)):
        part = complete(output_dir, *DROPOUT, "--max_steps", step)
        where = f"resumed from {output_dir}/checkpoint-{before}" if before else "base model"
        assert f"start      step {before or 0}, {where}" in part.output
    return output_dir


@pytest.mark.slow
def test_resumed_run_equals_uninterrupted(shared, stopped, complete, tmp_path):
    """Stopped in the middle of an epoch, exactly at its end, and in the second one."""
    output_dir = shutil.copytree(stopped, tmp_path / "out")
    assert [state_of(path)["epoch"] for _, path in checkpoint.list_checkpoints(output_dir)] == [0, 0, 1]
    resumed = complete(output_dir, *DROPOUT)
    assert [row["step"] for row in rows(resumed)] == list(range(1, 13))     # no step twice, none left out
    assert_same_bits(shared("dropout"), resumed)

    before = tensors(resumed)
    again = complete(output_dir, *DROPOUT)                                  # a finished run has nothing left to do
    assert_same_bits(shared("dropout"), again)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(again).items())
    assert steps_of(output_dir) == [6, 8, 12]


@pytest.mark.slow
def test_resume_onto_fewer_packs_a_step_finishes_every_epoch(complete, tmp_path):
    """An epoch ends between the packs of a step. Resumed with smaller steps, the next epochs are still whole."""
    flags = ("--use_lora", "--disable_eval", "--per_device_train_batch_size", 8)        # 3 packs an epoch
    complete(tmp_path / "out", *flags, "--gradient_accumulation_steps", 4, "--max_steps", 1)
    resumed = complete(tmp_path / "out", *flags, "--num_train_epochs", 2)
    assert sorted(resumed.metrics("train/epoch")) == [1, 2, 3, 4]
    assert resumed.metrics("train/epoch")[4] == 2


# -- Jobs that are watched from outside --------------------------------------------------------------------------------


class Opens:
    """Counts opens of the files in a folder by any process and in any language: the kernel's own notice (inotify)."""

    def __init__(self, folder):
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_NONBLOCK)
        # reads and closes are asked for as well, because the kernel merges equal notices that follow each other
        in_access, in_close, in_open = 0x1, 0x18, 0x20
        assert libc.inotify_add_watch(self.fd, str(folder).encode(), in_access | in_close | in_open) > 0
        self.in_open = in_open

    def count(self):
        """Counter of file names opened since the last call."""
        names = Counter()
        while True:
            try:
                data, at = os.read(self.fd, 1 << 20), 0
            except BlockingIOError:
                return names
            while at < len(data):
                _, mask, _, length = struct.unpack_from("iIII", data, at)
                name = data[at + 16:at + 16 + length].rstrip(b"\0").decode()
                if mask & self.in_open and name:
                    names[name] += 1
                at += 16 + length


# put into every Python process of a run; O_APPEND keeps lines of several processes whole
AUDIT = """
import os, sys
log = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
        what = "write" if args[2] & (os.O_WRONLY | os.O_RDWR) else "read"
    elif event == "os.rename":
        what = "rename"
    else:
        return
    path = os.fsdecode(args[1 if what == "rename" else 0])
    os.write(log, f"{os.environ.get('RANK', '-')} {what} {path}\\n".encode())
sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def watched(pool, tiny, tmp_path_factory):
    """[(Run, opens by the kernel's count, [(rank, what, path)], shards)] of two runs on an own copy of the speech."""
    root = tmp_path_factory.mktemp("watched")
    shutil.copytree(tiny.root / "speech", root / "speech")
    samples = tiny.samples()
    # the same content under another name, and a sample that uses it
    first = samples[0]["messages"][-1]["content"][1]["audio_url"]
    shutil.copyfile(root / first, root / "speech" / "again.wav")
    twin = json.loads(json.dumps(samples[0]))
    twin["messages"][-1]["content"][1]["audio_url"] = "speech/again.wav"
    (root / "train.json").write_text(json.dumps([*samples, twin]))
    for name in ("model", "codec"):
        (root / name).symlink_to(tiny.root / name)
    (root / "hook").mkdir()
    (root / "hook" / "sitecustomize.py").write_text(AUDIT)
    results, audited = [], functools.partial(train_forked, pool, main=f"{__name__}.train_audited")
    for name, start in (("first", launched), ("second", audited)):
        opens = Opens(root / "speech")
        run = start(Tiny(root), root / name, *COMMON, "--per_device_train_batch_size", 2, "--report_to",
                    "tensorboard", "--save_steps", 2, "--save_total_limit", 2, "--preprocess_num_proc", 2, ranks=2,
                    env={"PYTHONPATH": str(root / "hook"), "AUDIT_LOG": str(root / f"{name}.audit")})
        audit = [line.split(" ", 2) for line in (root / f"{name}.audit").read_text().splitlines()]
        shards = sorted((path.name, path.stat().st_mtime_ns) for path in (root / "codes").rglob("*.safetensors"))
        results.append((run, opens.count(), audit, shards))
    return results


def train_audited(argv):
    """In a fork, which started without sitecustomize."""
    exec(AUDIT, {})
    speech_main(argv)


@pytest.mark.slow
def test_audio_is_opened_and_encoded_once_ever(watched, tiny):
    (_, opens, audit, shards), (second, later_opens, later_audit, later_shards) = watched
    root = second.output_dir.parent
    names = {path.name for path in (root / "speech").iterdir()}
    assert len(names) == 25
    # two witnesses: Python's own report, and the kernel's, which sees C libraries as well
    assert opens == dict.fromkeys(names, 1)
    assert Counter(Path(path).name for _, what, path in audit if path.endswith(".wav")) == dict.fromkeys(names, 1)
    assert not later_opens
    assert not [path for _, _, path in later_audit if path.endswith(".wav")]
    assert {rank for rank, _, _ in later_audit} >= {"0", "1"}       # it did report

    contents = {(root / "speech" / name).read_bytes() for name in names}
    assert len(contents) == 24
    tables = [load_file(path) for path in (root / "codes").rglob("*.safetensors")]
    assert sum(len(table["lengths"]) for table in tables) == len(contents)
    assert sum(len(table["files"]) for table in tables) == len(names)
    assert later_shards == shards and shards


def test_only_rank_0_logs_and_saves(watched):
    """And the forked ranks of the second run train what torchrun's trained."""
    run, _, audit, _ = watched[0]
    assert_same_bits(run, watched[1][0])
    out = run.output_dir
    steps = [row["step"] for row in rows(run)]
    train_steps = [row["step"] for row in rows(run) if "train/loss" in row]
    assert train_steps == list(range(1, STEPS + 1))
    assert steps == sorted([*train_steps, 4, 8, 10])
    for step in train_steps:                                    # one console line each
        assert len(re.findall(rf"^step +{step}/{STEPS} ", run.output, re.M)) == 1
    assert re.findall(r"^eval   step +(\d+) ", run.output, re.M) == ["4", "8", "10"]
    assert len(re.findall(r"^done ", run.output, re.M)) == 1
    assert run.output.count("notice     --compile auto: ") == 1

    boards = [path for path in Path(f"{out}-logs").rglob("*") if path.is_file()]
    assert len(boards) == 1 and "tfevents" in boards[0].name
    assert steps_of(out) == [8, 10]
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-10"}
    renamed = Counter(Path(path).name for _, what, path in audit
                      if what == "rename" and re.search(r"/checkpoint-\d+$", path))
    assert renamed == {f"checkpoint-{step}": 1 for step in (2, 4, 6, 8, 10)}
    writers = {rank for rank, what, path in audit if what in ("write", "rename")
               and re.search(r"/first/(checkpoint|metrics|table)|tfevents", path)}
    assert writers == {"0"}
    assert {rank for rank, _, _ in audit} >= {"0", "1"}         # the hook was in both ranks


def test_tensorboard_has_the_same_numbers(watched):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run = watched[0][0]
    board = EventAccumulator(str(next(Path(f"{run.output_dir}-logs").rglob("*tfevents*")).parent)).Reload()
    for name in ("train/loss", "train/throughput", "train/grad_norm", "eval/loss"):
        points = {event.step: event.value for event in board.Scalars(name)}
        assert points == pytest.approx(run.metrics(name), rel=1e-5)


# -- Checkpoints that stay ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rotation_keeps_the_newest_and_the_best(forked):
    """A rate far too high that rises: the best checkpoint is the first (losses of 10.6, then 26 to 76)."""
    flags = ("--learning_rate", 1, "--lr_scheduler", "constant", "--warmup_steps", 7, "--validation_split", 0.2,
             "--eval_steps", 1, "--save_steps", 2, "--save_total_limit", 2)
    run = forked(*flags, "--max_steps", 7)
    losses = run.metrics("eval/loss")
    best = min(losses, key=losses.get)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6, 7] and best == 1
    assert steps_of(run.output_dir) == [best, 6, 7]             # 7 is no multiple of 2: the final one is always saved
    assert f"best validation loss {losses[best]:.4f} at step {best}" in run.output
    meta = state_of(run.output_dir / "checkpoint-7")
    assert (meta["best_step"], meta["best_loss"]) == (best, losses[best])


def test_rotation_spares_the_new_checkpoint_beside_a_damaged_newer_one(tmp_path):
    """After a fall back to an older checkpoint the damaged one is still the newest by number."""
    manager = checkpoint.CheckpointManager(World(device=torch.device("cpu")), tmp_path, keep=1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def save(step):
        manager.save(step, model, optimizer, "weights", dict(model.named_parameters()), lambda folder: None,
                     {"step": step})
        manager.wait()
    save(8)
    (tmp_path / "checkpoint-8" / "weights.safetensors").write_text("?")
    save(4)
    assert manager.latest("auto")[0] == tmp_path / "checkpoint-4"
    save(6)
    assert steps_of(tmp_path) == [6, 8]
    save(8)
    assert steps_of(tmp_path) == [8]
    assert not checkpoint.damage(tmp_path / "checkpoint-8")


# -- What the optimizer may touch --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_that_no_loss_reaches_stay_as_they_were(forked, tiny):
    run = forked("--text_loss_weight", 0, "--weight_decay", 0.1, "--learning_rate", LR, "--disable_eval",
                 "--max_steps", 3, "--per_device_train_batch_size", 8)
    base, trained = base_weights(tiny), tensors(run)
    table = Table(next(run.output_dir.glob("table-*")))
    last = "model.layers.1."
    frozen = {name for name in base if name == "text_lm_head.weight" or name.startswith(f"{last}mlp.")
              or name == f"{last}post_attention_layernorm.weight"}
    assert len(frozen) == 5
    tables = {"model.embed_tokens.weight": np.unique(table.tokens),
              "model.embed_audio_tokens.embed_audio_tokens.weight": used_codes(table)}
    for name in base:
        same = (trained[name] == base[name]).reshape(len(base[name]), -1).all(dim=1)
        if name in frozen:
            assert same.all(), f"{name} moved"
        elif name in tables:        # rows that the data never uses: no gradient, no weight decay
            unused = np.setdiff1d(np.arange(len(same)), tables[name])
            assert len(unused) > 100 and same[unused].all(), f"unused rows of {name} moved"
            assert (~same).sum() > 0.9 * (len(tables[name]) - 1), f"{name} was not trained"
        else:
            assert not same.all(), f"{name} was not trained"


def used_codes(table):
    """Rows of the audio embedding that some clip uses: code + 1026 * codebook, and both stream ends of each."""
    codes = [table.reader.codes(*where.tolist()) for where in table.where]
    books = np.arange(8) * 1026
    return np.unique(np.concatenate([*(c + books for c in codes), 1024 + books[None], 1025 + books[None]]))


def test_frozen_llm_trains_audio_embedding_and_head_only(shared, forked, tiny):
    run = forked(*COMMON, "--freeze_llm", "--max_steps", 3, "--num_workers", 0,
                 "--enable_strategic_logging", "--strategic_logging_steps", 2, "--text_loss_weight", 0.5)      # accepted
    base, trained = base_weights(tiny), tensors(run)
    assert {name for name in base if not torch.equal(base[name], trained[name])} == {
        "model.embed_audio_tokens.embed_audio_tokens.weight", "audio_lm_head.weight"}

    # step 1 saw the same weights and samples as "full 1x4"
    mean = {name: shared("full 1x4").metrics(f"train/{name}")[1] for name in ("audio_loss", "text_loss")}
    assert run.metrics("train/loss")[1] == pytest.approx(mean["audio_loss"] + 0.5 * mean["text_loss"], rel=1e-6)


# -- Numbers of the log ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full 1x4", "packs 2"])
def test_losses_in_the_log_add_up(shared, name):
    lines = [row for row in rows(shared(name)) if "train/loss" in row]
    for row in lines:
        books = [row[f"train/audio_loss_codebook_{k}"] for k in range(8)]
        assert "train/audio_loss_codebook_8" not in row
        assert row["train/audio_loss"] == pytest.approx(np.mean(books), rel=1e-9)
        assert row["train/loss"] == pytest.approx(row["train/audio_loss"] + row["train/text_loss"], rel=1e-9)
        assert 0 < row["train/eos_loss"] and 0 <= row["train/eos_accuracy"] <= 1
        assert 0 <= row["train/stop_recall"] <= 1 and 0 <= row["train/false_stop_rate"] <= 1
    shown = [f"{100 * row['train/stop_recall']:.1f}" for row in lines]
    assert re.findall(r"^step .* \| stop +(\S+)% \|", shared(name).output, re.M) == shown
    assert name != "packs 2" or max(row["train/epoch"] for row in lines) > 1      # the topped-up tail was among them
    assert lines[0]["train/audio_loss"] == pytest.approx(math.log(1026), abs=0.5)      # a random model guesses


@pytest.mark.parametrize("name", ["full 1x4", "packs 2"])
def test_throughput_counts_useful_tokens(shared, name):
    """Over the first epoch the counted tokens are the training samples' own, whatever was padded around them."""
    run = shared(name)
    table = Table(next(run.output_dir.glob("table-*")))
    frames = [int(table.where[clips, 2].sum()) for clips in np.split(table.clips, table.clip_offsets[1:-1])]
    texts = np.diff(table.token_offsets) - np.diff(table.clip_offsets)
    lengths = texts + np.array(frames) + 9 * np.diff(table.clip_offsets)        # a clip of T frames takes T + 9 rows
    lines = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    epoch = [row for row in lines if "train/loss" in row and row["train/epoch"] <= 1]

    def counted(rate):
        return sum(row[f"train/{rate}"] * row["train/step_seconds"] for row in epoch)

    assert round(counted("samples_per_second")) == TRAINED
    held_out = int(re.search(r"samples +19 to train, (\d+) to validate", run.output)[1])
    assert TRAINED + held_out == len(lengths) == 24
    tokens, seconds = counted("throughput"), counted("audio_seconds_per_second")
    trained = trained_samples(lengths, held_out)
    assert tokens == pytest.approx(lengths[trained].sum(), rel=1e-6)
    assert seconds == pytest.approx(np.array(frames)[trained].sum() / 25, rel=1e-6)
    slots = sum(row["train/throughput"] * row["train/step_seconds"] / (1 - row["train/padding"]) for row in epoch)
    packs = len(epoch) * 2
    assert slots == pytest.approx(packs * 700 if name == "packs 2" else tokens, rel=1e-6)


def trained_samples(lengths, held_out):
    """Numbers of the training samples: a seeded shuffle decides, and its first ones validate."""
    return np.sort(np.random.default_rng((42, 2)).permutation(len(lengths))[held_out:])


def test_log_names_and_console_line(shared):
    run = shared("full 1x4")
    names = set().union(*(json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()))
    assert names >= {"step", "train/loss", "train/audio_loss", "train/text_loss", "train/grad_norm", "train/throughput",
                     "train/learning_rate", "train/epoch", "train/padding", "train/data_wait_seconds",
                     "train/samples_per_second", "train/audio_seconds_per_second", "eval/loss", "eval/audio_loss",
                     *(f"train/audio_loss_codebook_{k}" for k in range(8))}
    assert ("system/gpu_memory_allocated" in names) == torch.cuda.is_available()
    line = re.search(rf"^step +2/{STEPS} .*$", run.output, re.M)[0]
    number = r"\d+\.\d+"
    assert re.fullmatch(
        rf"step +2/{STEPS} \| loss +{number} \| audio +{number} text +{number} \| stop +{number}% \| "
        rf"lr {number}e-\d+ \| grad_norm +{number} \| +[\d,.]+ audio-s/s( \| mfu +{number}%)? \| eta \d+:\d\d:\d\d",
        line), line


def test_a_log_line_fits_a_terminal():
    """With numbers as wide as they get."""
    values = {"train/mfu": 0.612, "train/loss": 61.9012, "train/audio_loss": 55.512, "train/text_loss": 12.34,
              "train/stop_recall": 1.0, "train/learning_rate": 5e-5, "train/grad_norm": 1234.567,
              "train/audio_seconds_per_second": 99_999.9, "train/step_seconds": 10.0}
    assert len(train_line(50_000, 500_000, values)) <= 160


@pytest.mark.slow
def test_batch_derived_flags_and_schedule(forked):
    """--global_batch_size makes the accumulation; the schedule ends one step above 0."""
    run = forked("--use_lora", "--per_device_train_batch_size", 2, "--global_batch_size", 8,
                 "--learning_rate", 2e-4, "--lr_scheduler", "linear", "--warmup_steps", 2,
                 "--disable_eval", "--num_train_epochs", 4, "--group_by_length")
    assert "4 packs a step = 1 rank x 4 micro-steps; peak lr 2.00e-04" in run.output
    rate = run.metrics("train/learning_rate")
    assert sorted(rate) == list(range(1, 13))                   # 24 samples, 8 a step, 4 epochs
    assert rate == pytest.approx({step: 2e-4 * lr_factor(step - 1, 12, 2, "linear") for step in rate})
    assert rate[1] == pytest.approx(1e-4) and rate[2] == rate[3] == pytest.approx(2e-4)
    assert rate[12] == pytest.approx(2e-4 / 10)


# -- Losses that are not numbers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(tiny, tmp_path_factory):
    """(flags for six samples of which number 4 says "~", options for a run whose embedding of "~" is NaN)."""
    root = tmp_path_factory.mktemp("poisoned")
    samples = tiny.samples()[:6]
    for sample in samples:
        for part in (part for turn in sample["messages"] if turn["role"] != "system" for part in turn["content"]):
            if part["type"] == "audio":
                part["audio_url"] = str(tiny.root / part["audio_url"])
    samples[4]["messages"][-1]["content"][0]["text"] += " ~"
    samples[4]["messages"][1]["content"][-1]["text"] += " ~"
    (root / "train.json").write_text(json.dumps(samples))
    return ("--train_data_file", root / "train.json", "--disable_eval", "--per_device_train_batch_size", 1,
            "--num_train_epochs", 2), bad_token(tiny.model)


def test_bad_step_is_skipped_and_the_sample_named(poisoned, forked):
    flags, options = poisoned
    run = forked(*flags, **options)
    skipped = re.findall(r"^step (\d+): gradient norm is not finite, step skipped .*?with a non-finite loss: (.*)$",
                         run.output, re.M)
    assert len(skipped) == 2                                    # once an epoch
    names = [name for _, name in skipped]
    assert names[0] == names[1] and ";" not in names[0]
    assert names[0].endswith("train.json sample 5 (sample_00000004)"), names[0]      # people count from 1
    assert "2 steps skipped" in run.output
    assert run.metrics("train/bad_steps")[12] == 2
    state = load_file(run.output_dir / "checkpoint-12" / "trainer_state" / "optimizer.safetensors")
    assert {int(tensor) for name, tensor in state.items() if name.endswith(".step")} == {10}
    trained = tensors(run)
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
    for line in (run.output_dir / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=not_json)
    good = [step for step in range(1, 13) if str(step) not in dict(skipped)]
    losses = run.metrics("train/loss")
    assert all(0 < losses[step] < 100 for step in good)
    # a step without a loss claims none: 0 would pull means and pictures down
    assert all(value is None or value > 1 for value in losses.values())


def test_validation_without_a_number_is_never_the_best(poisoned, forked, tmp_path):
    """A NaN that became the best loss would stay it for ever: nothing is smaller."""
    flags, options = poisoned
    held_out = tmp_path / "eval.json"
    held_out.write_text(json.dumps(unheard(json.loads(flags[1].read_text()))))
    run = forked("--eval_data_file", held_out, "--use_lora", "--max_steps", 2, "--eval_steps", 1, "--save_steps", 1,
                 **options)
    assert list(run.metrics("eval/loss").values()) == [None, None]
    state = json.loads((run.output_dir / "checkpoint-2" / "trainer_state" / "state.json").read_text())
    assert state["best_step"] is None and state["best_loss"] is None


def not_json(name):
    raise AssertionError(f"metrics.jsonl has a {name}, which is not JSON")


@pytest.mark.slow
def test_too_many_bad_steps_end_the_run(poisoned, forked):
    """Both ranks, by themselves."""
    run = forked(*poisoned[0], "--max_bad_steps", 1, ranks=2, ok=False, **poisoned[1])
    assert run.status == 1
    errors = re.findall(r"^error: .*$", run.output, re.M)
    assert len(errors) == 1 and "1 steps in a row" in errors[0] and "train.json" in errors[0]
    assert "Traceback" not in run.output
    assert not checkpoint.list_checkpoints(run.output_dir)


@pytest.mark.slow
def test_weights_without_a_number_are_never_saved(forked):
    """The gradient is finite, the update is not: the run ends, and what was saved before stays the newest."""
    flags = ("--use_lora", "--save_steps", 1, "--save_total_limit", 2, "--warmup_steps", 2)
    good = forked(*flags, "--max_steps", 1)
    assert good.status == 0 and steps_of(good.output_dir) == [1]
    run = forked(*flags, "--max_steps", 6, "--learning_rate", 1e38, ok=False)
    assert run.status != 0 and steps_of(run.output_dir) == [1], run.output
    errors = re.findall("^error: .*", run.output, re.M)
    assert len(errors) == 1 and re.search(r"checkpoint-\d could not be written .*adapter_model.safetensors: \d+ of its "
                                          r"tensors hold NaN or infinity, first base_model", errors[0]), run.output


def test_a_base_without_a_number_is_refused(forked, tiny, tmp_path):
    model = shutil.copytree(tiny.model, tmp_path / "model")
    state = load_file(model / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    state[name][1, 1] = math.nan
    save_file(state, model / "model.safetensors", {"format": "pt"})
    run = forked("--model_path", model, "--max_steps", 1, ok=False)
    assert run.status != 0 and not steps_of(run.output_dir)
    assert f"error: {model}/model.safetensors: {name} holds NaN or infinity; these weights cannot" in run.output


@pytest.mark.slow
def test_folders_may_be_relative(pool, tiny, tmp_path):
    """As in README's commands: --output_dir ./out, and the codes in it."""
    run = train_forked(pool, tiny, Path("out"), "--code_cache", "out/codes", "--max_steps", 1, cwd=tmp_path)
    assert run.status == 0 and (tmp_path / "out" / "checkpoint-1").is_dir()
