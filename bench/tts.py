"""How fast is a step of the speech trainer beside transformers' Trainer on the native Higgs-Audio V2 model?

    python bench/tts.py                         # this machine's CPU, less than 6 minutes
    python bench/tts.py --fast                  # on a GPU: 3B LoRA against Trainer alone, less than 3 minutes
    python bench/tts.py --shapes tiny --rounds 2 --clips 8      # to try the script

Both sides get the same random weights, the same samples (log-normal clips of 2 to 20 s, each with another clip as its
reference, random codes) and the same labels, each in a process of its own. A round is one pass over all samples, its
data loading included; the sides take turns. Trainer pads a batch to its longest sample, in random order as people use
it and with batches of similar lengths; ours fills packs up to a token budget. First one step of both has to give the
same loss and gradients. Trainer divides the audio loss by the number of text labels, ours by the number of codes: for
that one step our sums are put together by its formula.

Then the levers, each against the default alone. Writes bench/results/tts-DEVICE.json.
"""
import argparse
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import measure
import numpy as np
import torch
from torch.utils.data import Subset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import higgs  # noqa: E402
import higgs_io  # noqa: E402
import lora  # noqa: E402
import make_tiny  # noqa: E402
import optim  # noqa: E402
import parallel  # noqa: E402
from chatml import Clip, Sample, Turn  # noqa: E402
from code_cache import FRAME_RATE  # noqa: E402
from data import IGNORE, SpeechSamples, Table, TableBuilder, collate, make_loader, token_ids  # noqa: E402
from packing import PackOrder, rank_packs  # noqa: E402

# after higgs_io, which explains a broken torchaudio
from peft import LoraConfig, get_peft_model  # noqa: E402  isort: skip
from safetensors.numpy import save_file  # noqa: E402  isort: skip
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments  # noqa: E402  isort: skip
from transformers.models.higgs_audio_v2.modeling_higgs_audio_v2 import apply_rotary_pos_emb  # noqa: E402  isort: skip

SHAPES = {"tiny": {},
          "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8,
                    "num_key_value_heads": 4, "head_dim": 32},
          "3b": {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                 "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}}
SECONDS = {"median": 6.0, "sigma": 0.6, "least": 2.0, "most": 20.0}     # of a clip: log-normal, clipped
CHARACTERS = 14                 # of text a second of speech
RANK, ALPHA, DROPOUT, RATE = 16, 32, 0.1, 1e-5
SIDES = {"Trainer": {"side": "trainer"}, "Trainer, by length": {"side": "trainer", "sorted": True},
         "ours": {"side": "ours"}}
COMPILED = {"ours, compiled": {"side": "ours", "compile": True}}        # beside the others on a GPU
LIMIT_S = 600                   # of a pass, compiling included
# What ours can be measured without or with, each alone: words, settings, only on a GPU
LEVERS = [("packs of a fixed number of samples", {"samples": True}, False),
          ("compiled layers", {"compile": True}, False),
          ("dual FFN by boolean masks", {"masks": True}, False),
          ("heads on all rows", {"all_rows": True}, False),
          ("AdamW foreach", {"foreach": True}, False),
          ("gradient checkpointing", {"recompute": True}, False),
          ("frozen weights in float32", {"float32": True}, True),
          ("FSDP2", {"fsdp": "reshard"}, True),
          ("FSDP2, layers kept", {"fsdp": "keep"}, True)]
TOLERANCE = {False: (1e-5, 1e-4), True: (5e-3, 0.1)}       # loss and gradients, relative, in float32 and in bf16
SYNCS = ("aten::nonzero", "aten::_local_scalar_dense")      # what waits for a GPU, as a CPU profile sees it


# ---------------------------------------------------------------------------------------------------------------------
# Data


def write_samples(folder, clips, seed):
    """A sample table and codes of `clips` voice-cloning samples in `folder`, with the tiny tokenizer."""
    rng = np.random.default_rng(seed)
    (folder / "model").mkdir(parents=True)
    tokenizer = make_tiny.make_tokenizer(folder)
    make_tiny.make_model(folder, tokenizer)
    words = make_tiny.STORY.split() * 20
    seconds = np.exp(np.log(SECONDS["median"]) + SECONDS["sigma"] * rng.standard_normal((clips, 2)))
    seconds = seconds.clip(SECONDS["least"], SECONDS["most"])

    def speak(name, duration, trained):
        text = " ".join(words[rng.integers(len(words) // 2):])[:round(duration * CHARACTERS)]
        return [Turn("user", [text], None), Turn("assistant", [Clip(name, 0.0, duration)], None, trained)]

    system = Turn("system", ["Generate audio following instruction."], None)
    samples = [Sample(f"sample {i}", [system, *speak(f"reference {i}", float(reference), False),
                                      *speak(f"target {i}", float(target), True)])
               for i, (reference, target) in enumerate(seconds)]
    builder, problems = TableBuilder(tokenizer, ids_of(folder)), []
    builder.add(samples, problems)
    assert not problems, problems
    frames = np.array([round(clip.duration * FRAME_RATE) for clip in builder.clips], np.int64)
    save_file({"codes": rng.integers(0, 1024, (frames.sum(), 8), np.int16)}, folder / "codes.safetensors")
    where = np.stack([np.zeros_like(frames), np.cumsum(frames) - frames, frames], axis=1)
    builder.write(folder / "table", folder, ["codes.safetensors"], where)


def config_of(folder, shape):
    """Native config of a shape."""
    return higgs_io.native_config(json.loads((folder / "model" / "config.json").read_text()) | SHAPES[shape])


def ids_of(folder):
    return token_ids(higgs_io.load_tokenizer(folder / "model"), config_of(folder, "tiny"))


def padded_batch(samples, ids):
    """Sample dicts -> what transformers' forward takes, padded on the right, with our labels."""
    length, rows = (max(len(s[key]) for s in samples) for key in ("input_ids", "audio_ids"))

    def padded(key, fill, size):
        out = np.full((len(samples), size, *samples[0][key].shape[1:]), fill, np.int64)
        for row, sample in zip(out, samples):
            row[:len(sample[key])] = sample[key]
        return torch.from_numpy(out)

    def present(key, size):
        return torch.from_numpy(np.stack([np.arange(size) < len(s[key]) for s in samples]))

    return {"input_ids": padded("input_ids", ids.pad, length), "labels": padded("text_labels", IGNORE, length),
            "attention_mask": present("input_ids", length).long(),
            "audio_input_ids": padded("audio_ids", ids.stream_eos, rows),
            "audio_labels": padded("audio_labels", IGNORE, rows), "audio_input_ids_mask": present("audio_ids", rows)}


def token_budget(lengths, batch):
    """Smallest budget in whole 128s whose packs hold `batch` samples on average, which of many samples it always is."""
    budget = -(-int(lengths.max()) // 128) * 128
    while PackOrder(lengths, tokens_per_pack=budget).packs_per_epoch > max(1, round(len(lengths) / batch)):
        budget += 128
    return budget


# ---------------------------------------------------------------------------------------------------------------------
# Models


def build(way, folder, device, dropout=DROPOUT):
    """Native model or PeftModel with random weights, made on the device, the same for the same shape and seed."""
    half = way["bf16"] and way["method"] == "lora" and not way.get("float32")
    model = higgs_io.empty_model(config_of(folder, way["shape"]), torch.bfloat16 if half else torch.float32)
    model.to_empty(device=device)
    higgs_io.reset_buffers(model, device)
    model.config.use_cache = False          # Trainer would leave it on: a copy of all keys and values for nothing
    generator = torch.Generator(device).manual_seed(0)
    std = 0.02 if way["shape"] == "3b" else 0.06
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, std, generator=generator)
    if way["method"] == "full":
        return model
    if way["side"] == "trainer":
        net = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=dropout,
                                               target_modules=lora.TARGETS["all-linear"]))
    else:
        net = lora.add_lora(model, RANK, ALPHA, dropout, "all-linear", "random")
    with torch.no_grad():       # B too: from zero, A would have no gradient to compare
        for name, parameter in net.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.02, generator=generator)
    return net


class MaskedLayer(higgs.PackedDecoderLayer):
    """Our layer with both modalities gathered and scattered by boolean masks, as the native class does."""

    def forward(self, hidden_states, *args, packed=None, **kwargs):
        n_text, order, seq_index, cos, sin, cu_seqlens, longest, seqlens = packed
        attn, audio = self.self_attn, torch.arange(len(hidden_states), device=hidden_states.device) >= n_text
        normed = hidden_states.masked_scatter(audio[:, None], self.audio_input_layernorm(hidden_states[audio]))
        normed = normed.masked_scatter(~audio[:, None], self.input_layernorm(hidden_states[~audio]))
        q, k, v = (higgs.Permute.apply(project(normed), seq_index, order).view(len(normed), -1, attn.head_dim)
                   for project in (attn.q_proj, attn.k_proj, attn.v_proj))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = higgs.packed_attention(q.to(v.dtype), k.to(v.dtype), v, cu_seqlens, longest, seqlens)
        out = attn.o_proj(higgs.Permute.apply(out.reshape(len(normed), -1), order, seq_index))
        hidden_states = hidden_states + out
        text_rows = self.post_attention_layernorm(hidden_states[~audio])
        audio_rows = self.audio_post_attention_layernorm(hidden_states[audio])
        hidden_states[~audio] += self.mlp(text_rows)
        hidden_states[audio] += self.audio_mlp(audio_rows)
        return hidden_states


def on_all_rows(batch):
    """The batch with both heads on every row; rows without a target are ignored in the loss."""
    rows = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
    audio = batch.audio_targets.new_full((len(rows), batch.audio_targets.shape[1]), IGNORE)
    text = batch.text_targets.new_full((len(rows),), IGNORE)
    audio[batch.audio_rows], text[batch.text_rows] = batch.audio_targets, batch.text_targets
    batch.audio_rows, batch.audio_targets, batch.text_rows, batch.text_targets = rows, audio, rows, text
    return batch


# ---------------------------------------------------------------------------------------------------------------------
# One side, in a process of its own


class Rounds:
    """A side's end of the pipe: waits for the parent's word before each pass, and tells when the pass is done.

    Host syncs are counted in the first pass, which warms up, from its second step on.
    """

    def __init__(self, pipe, device):
        self.pipe, self.device, self.counting, self.syncs = pipe, device, None, None
        self.steps = self.slots = 0         # of this pass; tokens with padding, of all passes so far
        self.held = 0.0 if device.type == "cuda" else measure.peak_memory_gib(device)
        pipe.send({})

    def wait(self):
        """True when there shall be another pass."""
        self.steps = 0
        return self.pipe.recv() != "stop"

    def step(self):
        """To be called after every step."""
        self.steps += 1
        if self.counting is None:
            self.counting = contextlib.ExitStack()
            self.found = self.counting.enter_context(count_syncs(self.device))

    def done(self, loss=None, graphs=None):
        """Tell what the pass was: its steps, the slots of all passes so far, host syncs a step, most memory held.

        loss: 0-d tensor, mean of the pass's audio loss. graphs: number that torch.compile has made after each pass.
        """
        measure.synchronize(self.device)
        if self.syncs is None:
            self.counting.close()
            self.syncs = self.found[0] / max(1, self.steps - 1)
        memory = measure.peak_memory_gib(self.device) - self.held
        if self.device.type == "cuda":      # room for the other sides on the same GPU
            torch.cuda.empty_cache()
        self.pipe.send({"steps": self.steps, "slots": self.slots, "syncs": self.syncs, "memory_gib": memory,
                        "loss": None if loss is None else loss.item(), "graphs": graphs or [0]})


@contextlib.contextmanager
def count_syncs(device):
    """Yields a list that holds the number of host syncs when the context ends.

    On a GPU what torch warns of; on a CPU the operators that would wait for one, but for those inside fused AdamW:
    there its step counters lie on the CPU, on a GPU they do not.
    """
    found = []
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
        torch.cuda.set_sync_debug_mode("default")
        found.append(sum("synchroniz" in str(w.message) for w in caught))
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield found
    inside = [event for event in profile.events() if event.name in SYNCS]
    for event in list(inside):
        parent = event.cpu_parent
        while parent is not None and parent.name != "aten::_fused_adamw_":
            parent = parent.cpu_parent
        if parent is not None:
            inside.remove(event)
    found.append(len(inside))


class TellRounds(TrainerCallback):
    """Trainer's epochs are the passes."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_train_begin(self, args, state, control, **kwargs):
        control.should_training_stop = not self.rounds.wait()

    def on_step_end(self, args, state, control, **kwargs):
        self.rounds.step()

    def on_epoch_end(self, args, state, control, **kwargs):
        self.rounds.done()
        control.should_training_stop = not self.rounds.wait()


def make_trainer(way, model, folder, device, dataset, collator, callback, **more):
    """transformers' Trainer as its users set it up, for the measurement and for the check."""
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.01,
        bf16=way["bf16"], use_cpu=device.type == "cpu", save_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False, **more)
    trainer = Trainer(model, arguments, data_collator=collator, train_dataset=dataset, callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    return trainer


def train_trainer(way, folder, device, rounds):
    """transformers' Trainer until the parent says stop."""
    ids, table = ids_of(folder), Table(folder / "table")
    dataset, sampling = SpeechSamples(table, ids), "random"
    if way.get("sorted"):       # the best that group_by_length can come to, which needs more samples than there are
        dataset, sampling = Subset(dataset, np.argsort(-table.lengths).tolist()), "sequential"

    def collator(samples):
        batch = padded_batch(samples, ids)
        rounds.slots += batch["input_ids"].numel()
        return batch

    make_trainer(way, build(way, folder, device), folder, device, dataset, collator, TellRounds(rounds),
                 per_device_train_batch_size=way["batch"], num_train_epochs=10**6, logging_strategy="no",
                 train_sampling_strategy=sampling).train()


def train_ours(way, folder, device, rounds):
    """The loop of train_v2_ddp.py, less logging and saving, until the parent says stop."""
    ids, table = ids_of(folder), Table(folder / "table")
    alone = parallel.World(device=device)
    net = build(way, folder, device)
    model = higgs.PackedHiggs(net, bool(way.get("recompute")))
    native, config = model.base_model, model.base_model.config
    if way.get("masks"):
        for layer in native.model.layers:
            layer.__class__ = MaskedLayer
    if way.get("compile"):
        for layer in native.model.layers:
            layer.compile()
    if way.get("fsdp"):
        parallel.shard(model, native.model.layers, parallel.init(600, 600, alone_too=True), way["bf16"],
                       way["fsdp"] == "reshard", False)
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.build_adamw(model.named_parameters(), RATE, 0.01, (0.9, 0.999), higgs.decays)
    if way.get("foreach"):
        optimizer = torch.optim.AdamW([dict(group, fused=False, foreach=True) for group in optimizer.param_groups])
    budget = 0 if way.get("samples") else token_budget(table.lengths, way["batch"])
    order = PackOrder(table.lengths, samples_per_pack=way["batch"] if way.get("samples") else 0, tokens_per_pack=budget)
    batches = iter(make_loader(table, ids, rank_packs(order, 0, 1, 1, sys.maxsize), num_workers=0, prefetch_factor=4,
                               pin_memory=device.type == "cuda", pad_to=budget))
    flags, sums, graphs = optim.StepFlags(device), torch.zeros(config.num_codebooks + 8, device=device), []
    while rounds.wait():
        sums.zero_()
        for _ in range(order.packs_per_epoch):
            batch = next(batches)
            rounds.slots += len(batch.input_ids)
            n_audio, n_text = batch.counts["audio_targets"], batch.counts["text_targets"]
            batch = batch.to(device, non_blocking=True)
            batch = on_all_rows(batch) if way.get("all_rows") else batch
            with torch.autocast(device.type, torch.bfloat16, enabled=way["bf16"]):
                audio, text, eos = model(batch)
            loss = higgs.total_loss(audio, n_audio, text, n_text, "mean", 1.0)
            loss.backward()
            norm = optim.clip_gradients(trainable, 1.0)
            bad = 1 - torch.isfinite(norm).float()
            optimizer.step() if way.get("foreach") else optim.guarded_step(optimizer, bad)
            optimizer.zero_grad(set_to_none=True)
            sums[:config.num_codebooks + 6] += torch.cat([audio.detach(), text.detach()[None], eos])
            flags.pop()
            flags.push(bad, parallel.any_rank(alone, False), None)
            rounds.step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        rounds.done(sums[:config.num_codebooks].sum() / int(table.audio_targets.sum()), graphs)
    flags.pop()


def run_side(pipe, way, folder, device, threads):
    """What a side's process does; an exception's text goes to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is the parent's
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    try:
        torch.manual_seed(0)
        rounds = Rounds(pipe, device)
        (train_trainer if way["side"] == "trainer" else train_ours)(way, folder, device, rounds)
    except Exception:
        pipe.send({"error": traceback.format_exc()})


class Side:
    """The parent's handle on a side's process."""

    def __init__(self, name, way, folder, device):
        self.name, self.last = name, {}
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=run_side, args=(theirs, way, folder, device, torch.get_num_threads()),
                                       daemon=True)
        self.process.start()
        theirs.close()

    def ask(self):
        """One pass of that side; keeps what it tells."""
        self.pipe.send("go")
        self.receive()

    def receive(self):
        try:
            self.last = self.pipe.recv() if self.pipe.poll(LIMIT_S) else {"error": f"no word for {LIMIT_S} s"}
        except EOFError:
            self.last = {"error": f"its process ended with status {self.process.exitcode}"}
        if "error" in self.last:
            raise SystemExit(f"error: {self.name}: {self.last['error']}")

    def stop(self):
        with contextlib.suppress(OSError):
            self.pipe.send("stop")
        self.process.join(60)
        self.process.kill()


def compare(ways, folder, device, rounds):
    """{name: {"seconds" of each round, "steps" of a round, "padding", "syncs" a step, "memory_gib", "loss"}}.

    ways: {name: settings}; each gets a process of its own, one of which works at a time.
    """
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, way in ways.items():
            sides[name] = Side(name, way, folder, device)
            stack.callback(sides[name].stop)
        for side in sides.values():
            side.receive()
        seconds = measure.alternate({name: side.ask for name, side in sides.items()}, rounds, torch.device("cpu"))
        tokens = int(Table(folder / "table").lengths.sum())
        results = {}
        for name, side in sides.items():
            last = side.last
            results[name] = {"seconds": seconds[name], "padding": 1 - tokens * (rounds + 1) / last["slots"],
                             **{key: last[key] for key in ("steps", "syncs", "memory_gib", "loss")}}
            if last["graphs"][0] != last["graphs"][-1]:
                raise SystemExit(f"error: {name}: compiled again after the warm-up: {last['graphs']} graphs")
        return results


# ---------------------------------------------------------------------------------------------------------------------
# The check that comes first


class KeepGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def trainer_loss(way, samples, ids, folder, device):
    """(loss that Trainer logs, {name: gradient}) of one real Trainer step on one batch of the samples."""
    keep = KeepGradients()
    model = build(way | {"side": "trainer"}, folder, device, dropout=0.0)
    trainer = make_trainer(way, model, folder, device, samples, lambda picked: padded_batch(picked, ids), keep,
                           max_steps=1, max_grad_norm=0.0, per_device_train_batch_size=len(samples), logging_steps=1)
    trainer.train()
    return trainer.state.log_history[0]["loss"], keep.gradients


def our_loss(way, samples, ids, folder, device):
    """(loss by Trainer's formula, {name: gradient}) of our packed forward on the same samples."""
    net = build(way | {"side": "ours"}, folder, device, dropout=0.0)
    batch = collate(samples, ids).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=way["bf16"]):
        audio, text, _ = higgs.PackedHiggs(net).train()(batch)
    loss = (audio.sum() + text) / batch.counts["text_targets"]      # it counts text labels only, for both
    loss.backward()
    return loss.item(), {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def check_agreement(way, folder, device):
    """(loss, largest relative difference of a gradient); SystemExit unless Trainer's step and ours are the same."""
    ids, data = ids_of(folder), SpeechSamples(Table(folder / "table"), ids_of(folder))
    samples = [data[i] for i in range(min(way["batch"], len(data)))]
    (theirs, expected), (ours, found) = (side(way, samples, ids, folder, device) for side in (trainer_loss, our_loss))
    loss_tolerance, tolerance = TOLERANCE[way["bf16"]]
    assert expected.keys() == found.keys() and len(found) > 20, "the two sides train different weights"
    apart = {name: ((found[name] - g).norm() / g.norm()).item() for name, g in expected.items()}
    worst = max(apart, key=apart.get)
    if not (abs(ours - theirs) <= loss_tolerance * abs(theirs) and apart[worst] <= tolerance):
        raise SystemExit(f"error: ours and Trainer DISAGREE, nothing was measured: loss {ours} and {theirs}, gradient "
                         f"of {worst} differs by {apart[worst]:.2g} of its length")
    return ours, apart[worst]


# ---------------------------------------------------------------------------------------------------------------------


def work_of(folder, shape, method):
    """What one pass over the samples is: {"tokens", "audio_seconds", "flops"}; only useful work, the same for all."""
    table = Table(folder / "table")
    lengths = table.lengths.astype(np.int64)
    return {"tokens": int(lengths.sum()), "audio_seconds": int(table.frames.sum()) / FRAME_RATE,
            "flops": higgs.flops_per_pack(config_of(folder, shape), int(lengths.sum()), int(table.audio_targets.sum()),
                                          int(table.text_targets.sum()), int((lengths * (lengths + 1) // 2).sum()),
                                          method == "lora")}


def row_of(result, work, rate):
    """[step ms, tokens/s, audio s/s, share of the matmul rate, padding, syncs a step, GiB] of one side."""
    spent = measure.median(result["seconds"])["median"]
    return [round(spent / result["steps"] * 1000, 1), round(work["tokens"] / spent),
            round(work["audio_seconds"] / spent, 1), round(work["flops"] / spent / rate, 3),
            round(result["padding"], 3), round(result["syncs"], 1), round(result["memory_gib"], 2)]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=lambda text: text.split(","), help="sizes of the model, comma-separated, of "
                        f"{', '.join(SHAPES)} (default: tiny,small, on a GPU 3b)")
    parser.add_argument("--methods", type=lambda text: text.split(","), help="lora, full or both, comma-separated "
                        "(default: both, on a GPU lora)")
    parser.add_argument("--clips", type=int, help="samples of a round (default: 12, on a GPU 64)")
    parser.add_argument("--batch", type=int, help="samples of Trainer's batch; our packs hold as many on average "
                        "(default: 4, on a GPU 8)")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes over the samples; the median counts")
    parser.add_argument("--fast", action="store_true", help="no levers, and Trainer in random order only")
    parser.add_argument("--levers", type=lambda text: [int(n) for n in text.split(",") if n], help="numbers of the "
                        "levers to measure, from 0, comma-separated (default: all that this machine can show)")
    parser.add_argument("--seed", type=int, default=42, help="of lengths, texts and codes")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")      # with more, Trainer would spread a batch over them
    began, cuda = time.monotonic(), torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    shapes, methods = args.shapes or (["3b"] if cuda else ["tiny", "small"]), \
        args.methods or (["lora"] if cuda else ["lora", "full"])
    clips, batch = args.clips or (64 if cuda else 12), args.batch or (8 if cuda else 4)
    sides = {name: way for name, way in (SIDES | COMPILED if cuda else SIDES).items()
             if not (args.fast and way.get("sorted"))}
    chosen = [] if args.fast else [lever for i, lever in enumerate(LEVERS) if (cuda or not lever[2])
                                   and (args.levers is None or i in args.levers)]
    report = measure.new_report("a training step of Higgs-Audio V2: ours beside transformers' Trainer", device,
                                measure.command("tts", argv))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_samples(folder, clips, args.seed)
        table = Table(folder / "table")
        report |= {"clips": clips, "rounds": args.rounds, "seed": args.seed, "batch": batch,
                   "tokens_of_a_sample": {"least": int(table.lengths.min()), "most": int(table.lengths.max()),
                                          "mean": float(table.lengths.mean())},
                   "budget": token_budget(table.lengths, batch), "bf16": cuda, "checks": [], "results": []}
        setups = [{"side": "ours", "shape": shape, "method": method, "bf16": cuda, "batch": batch}
                  for shape, method in itertools.product(shapes, methods)]
        exact = [{**way, "shape": "tiny", "bf16": False} for way in setups[:len(methods)]] if cuda else []
        for way in exact + setups:
            loss, apart = check_agreement(way, folder, device)
            report["checks"].append({**way, "loss": loss, "gradients_apart": apart})
            print(f"check      {way['shape']:<5} {way['method']} {'bf16' if way['bf16'] else 'float32':<7} | loss "
                  f"{loss:.4f} | gradients {apart:.1e} apart", flush=True)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
        rate = report["matmul_flops_per_second"] = measure.matmul_rate(device)
        print(f"matmul     {rate / 1e12:,.3f} TFLOP/s measured", flush=True)
        columns = ["model", "weights trained", "side", "step (ms)", "useful tokens/s", "audio s/s",
                   "of the matmul rate", "padding", "host syncs a step", "memory (GiB)", "ours is faster by"]
        main_table = report["tables"]["step"] = {"columns": columns, "rows": []}
        for way in setups:
            found = compare({name: way | more for name, more in sides.items()}, folder, device, args.rounds)
            work = work_of(folder, way["shape"], way["method"])
            for name, result in found.items():
                times = measure.ratio(found["ours"]["seconds"], result["seconds"])
                row = [way["shape"], way["method"], name, *row_of(result, work, rate), round(times, 2)]
                main_table["rows"].append(row)
                report["results"].append({**way, **sides[name], "name": name, **result, **work})
                print(line(row), flush=True)
        if chosen:
            way = {**setups[-1], "method": "lora" if cuda else "full"}
            work = work_of(folder, way["shape"], way["method"])
            lever_table = report["tables"]["levers"] = {"columns": [
                "lever", "step (ms)", "useful tokens/s", "memory (GiB)", "time against the default"], "rows": []}
            ways = {"default": way, **{name: way | more for name, more, _ in chosen}}
            found = compare(ways, folder, device, args.rounds)
            for name, result in found.items():
                numbers = row_of(result, work, rate)
                times = 1 / measure.ratio(result["seconds"], found["default"]["seconds"])
                lever_table["rows"].append([name, numbers[0], numbers[1], numbers[-1], round(times, 2)])
                report["results"].append({**ways[name], "name": name, "lever": True, **result, **work})
                print(f"lever      {name:<34} | {numbers[0]:>8,.1f} ms | {numbers[1]:>8,} tok/s | "
                      f"{numbers[-1]:6.2f} GiB | {times:5.2f}x the time", flush=True)
    report["seconds"] = time.monotonic() - began
    print(f"wrote {measure.write_report('tts', report, args.results_dir)} after {report['seconds']:.0f} s")


def line(row):
    """One aligned line of the main table."""
    shape, method, side, step, tokens, audio, share, padding, syncs, memory, times = row
    return (f"{shape:<5} {method} {side:<18} | {step:>8,.1f} ms | {tokens:>8,} tok/s | {audio:>7,.1f} audio-s/s | "
            f"{share * 100:4.1f}% of matmul | pad {padding * 100:4.1f}% | {syncs:>5,.1f} syncs | {memory:6.2f} GiB | "
            f"ours {times:.2f}x")


if __name__ == "__main__":
    main()
