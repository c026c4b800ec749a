"""The two ways to train speech that tts.py measures: our step and transformers' Trainer, a process each.

Both get the same random weights, the same samples (log-normal clips of 2 to 20 s, each with another clip as its
reference, random codes) and the same labels.
"""
import contextlib
import json
import signal
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Subset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.models.higgs_audio_v2.modeling_higgs_audio_v2 import apply_rotary_pos_emb
from transformers.utils import is_flash_attn_2_available

import lora
from bench import measure
from common import distributed, float8, loading, optim
from common.packing import PackOrder, rank_packs
from data import SpeechSamples, collate, make_loader
from speech import choices
from speech.data.builder import TableBuilder
from speech.data.code_cache import FRAME_RATE
from speech.data.conversations import Clip, Sample, Turn
from speech.data.dataset import Table
from speech.demo import make_tiny
from speech.model import v2, weights
from speech.model.labels import IGNORE, token_ids

SHAPES = {"tiny": {},
          "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8,
                    "num_key_value_heads": 4, "head_dim": 32},
          "3b": {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                 "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}}
SECONDS = {"median": 6.0, "sigma": 0.6, "least": 2.0, "most": 20.0}     # of a clip: log-normal, clipped
CHARACTERS = 14                 # of text a second of speech
RANK, ALPHA, DROPOUT, RATE = 16, 32, 0.1, 1e-5
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
    return weights.native_config(json.loads((folder / "model" / "config.json").read_text()) | SHAPES[shape])


def ids_of(folder):
    return token_ids(weights.load_tokenizer(folder / "model"), config_of(folder, "tiny"))


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
    model = weights.empty_model(config_of(folder, way["shape"]), torch.bfloat16 if half else torch.float32)
    model.to_empty(device=device)
    weights.reset_buffers(model, device)
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
                                               target_modules=choices.LORA_TARGETS["all-linear"]))
    else:
        net = lora.add_lora(model, RANK, ALPHA, dropout, "all-linear", "random")
    with torch.no_grad():       # B too: from zero, A would have no gradient to compare
        for name, parameter in net.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.02, generator=generator)
    return net


class MaskedLayer(v2.PackedDecoderLayer):
    """Our layer with both modalities gathered and scattered by boolean masks, as the native class does."""

    def forward(self, hidden_states, *args, packed=None, **kwargs):
        n_text, order, seq_index, cos, sin, cu_seqlens, longest, seqlens = packed
        attn, audio = self.self_attn, torch.arange(len(hidden_states), device=hidden_states.device) >= n_text
        normed = hidden_states.masked_scatter(audio[:, None], self.audio_input_layernorm(hidden_states[audio]))
        normed = normed.masked_scatter(~audio[:, None], self.input_layernorm(hidden_states[~audio]))
        normed = v2.Permute.apply(normed, seq_index, order)
        q, k, v = (project(normed).view(len(normed), -1, attn.head_dim)
                   for project in (attn.q_proj, attn.k_proj, attn.v_proj))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = v2.packed_attention(q.to(v.dtype), k.to(v.dtype), v, cu_seqlens, longest, seqlens)
        out = v2.Permute.apply(attn.o_proj(out.reshape(len(normed), -1)), order, seq_index)
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
        self.steps = self.slots = self.passes = 0       # steps of this pass; tokens with padding, of all passes so far
        self.held = 0.0 if device.type == "cuda" else measure.peak_memory_gib(device)
        pipe.send({})

    def wait(self):
        """True when there shall be another pass; "keep": its memory need not be given back for the other sides."""
        word, self.steps = self.pipe.recv(), 0
        self.keep = word == "keep"
        return word != "stop"

    def step(self):
        """To be called after every step."""
        self.steps += 1
        if self.counting is None:
            self.counting = contextlib.ExitStack()
            self.found = self.counting.enter_context(count_syncs(self.device))

    def done(self, loss=None, graphs=None):
        """Tell what the pass was: its steps, passes and their slots so far, host syncs a step, most memory held.

        loss: 0-d tensor, mean of the pass's audio loss. graphs: number that torch.compile has made after each pass.
        """
        measure.synchronize(self.device)
        if self.syncs is None:
            self.counting.close()
            self.syncs = self.found[0] / max(1, self.steps - 1)
        said = {"steps": self.steps, "passes": self.passes + 1, "slots": self.slots, "syncs": self.syncs,
                "memory_gib": measure.peak_memory_gib(self.device) - self.held,
                "loss": None if loss is None else loss.item(), "graphs": graphs or [0]}
        self.passes += 1
        if self.device.type == "cuda":
            said["reserved"] = torch.cuda.max_memory_reserved(self.device)
            if not self.keep:
                torch.cuda.empty_cache()
        self.pipe.send(said)


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


def trainer_attention(way, device):
    """The fastest attention that Trainer's model has here, "flash_attention_2" or "sdpa"."""
    return "flash_attention_2" if device.type == "cuda" and way["bf16"] and is_flash_attn_2_available() else "sdpa"


def make_trainer(way, model, folder, device, dataset, collator, callback, **more):
    """transformers' Trainer as its users set it up, for the measurement and for the check."""
    (model.get_base_model() if way["method"] == "lora" else model).set_attn_implementation(
        trainer_attention(way, device))
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.01,
        bf16=way["bf16"], torch_compile=way["side"] == "trainer" and way.get("compile", False),
        use_cpu=device.type == "cpu", save_strategy="no", report_to="none", disable_tqdm=True,
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
    """The loop of train_v2_ddp.py, less logging and saving, until the parent says stop.

    Packs hold as many samples as Trainer's batch, without padding, or are filled up to a token budget.
    """
    ids, table = ids_of(folder), Table(folder / "table")
    alone = distributed.World(device=device)
    net = build(way, folder, device)
    model = v2.PackedHiggs(net, way.get("recompute"))
    native, config = model.base_model, model.base_model.config
    if way.get("masks"):
        for layer in native.model.layers:
            layer.__class__ = MaskedLayer
    if way.get("float8"):
        float8.convert(native.model.layers)
    if way.get("compile"):
        distributed.compile_layers(native.model.layers)
    if way.get("fsdp"):
        distributed.shard(model, native.model.layers, distributed.init(600, 600, alone_too=True), way["bf16"],
                       way["fsdp"] == "reshard", False)
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.build_adamw(model.named_parameters(), RATE, 0.01, (0.9, 0.999), v2.decays)
    if way.get("foreach"):
        optimizer = torch.optim.AdamW([dict(group, fused=False, foreach=True) for group in optimizer.param_groups])
    budget = token_budget(table.lengths, way["batch"]) if way.get("packed") else 0
    order = PackOrder(table.lengths, samples_per_pack=0 if budget else way["batch"], tokens_per_pack=budget)
    loader = make_loader(table, ids, rank_packs(order, 0, 1, 1, sys.maxsize), num_workers=0, prefetch_factor=4,
                         pad_to=budget)
    batches = loading.ahead(loader, device)
    flags, sums, graphs = optim.StepFlags(device), torch.zeros(config.num_codebooks + 8, device=device), []
    while rounds.wait():
        sums.zero_()
        for _ in range(order.packs_per_epoch):
            batch = next(batches)
            rounds.slots += len(batch.input_ids)
            n_audio, n_text = batch.counts["audio_targets"], batch.counts["text_targets"]
            batch = on_all_rows(batch) if way.get("all_rows") else batch
            with torch.autocast(device.type, torch.bfloat16, enabled=way["bf16"]):
                audio, text, eos = model(batch)
            loss = v2.total_loss(audio, n_audio, text, n_text, "mean", 1.0)
            loss.backward()
            norm = optim.clip_gradients(trainable, 1.0)
            bad = 1 - torch.isfinite(norm).float()
            optimizer.step() if way.get("foreach") else optim.guarded_step(optimizer, bad)
            optimizer.zero_grad(set_to_none=True)
            sums[:config.num_codebooks + 6] += torch.cat([audio.detach(), text.detach()[None], eos])
            flags.pop()
            flags.push(bad, distributed.any_rank(alone, False), None)
            rounds.step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        rounds.done(sums[:config.num_codebooks].sum() / int(table.audio_targets.sum()), graphs)
    flags.pop()


def run_side(pipe, way, folder, device, threads):
    """What a side's process does; what is wrong goes to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is the parent's
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    try:
        torch.manual_seed(0)
        rounds = Rounds(pipe, device)
        (train_trainer if way["side"] == "trainer" else train_ours)(way, folder, device, rounds)
    except (EOFError, BrokenPipeError):
        return      # the parent is gone
    except torch.OutOfMemoryError:
        pipe.send({"error": "out of memory"})
    except Exception:
        pipe.send({"error": traceback.format_exc()})


# ---------------------------------------------------------------------------------------------------------------------
# One step of each, to be compared


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
        audio, text, _ = v2.PackedHiggs(net).train()(batch)
    loss = (audio.sum() + text) / batch.counts["text_targets"]      # it counts text labels only, for both
    loss.backward()
    return loss.item(), {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
