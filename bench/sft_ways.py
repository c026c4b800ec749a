"""The ways to fine-tune that sft.py measures: our step, transformers' Trainer, TRL's SFTTrainer; a process each.

All load the same random checkpoint and the same samples of random tokens, take two steps on four samples so that losses
and gradient norms can be compared, warm up, and then train one set of samples at a time, the same for all, when the
parent says so.
"""
import functools
import gc
import itertools
import logging
import math
import os
import statistics
import sys
import time
import traceback
import types
import warnings
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AttentionInterface,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import is_flash_attn_2_available

from bench import measure
from common import adapters, distributed, loading, optim
from common.packing import PackOrder
from distill import packed_lm, weights
from distill.dataset import ChatSamples, ChatTable, make_loader

try:
    import datasets
    import trl
except ImportError:
    trl = None
LIGER = find_spec("liger_kernel") is not None

SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size")
SHAPES = {      # of Qwen3
    "tiny": (64, 2, 128, 4, 2, 16, 512),
    "small": (384, 12, 1152, 6, 3, 64, 32768),
    "qwen3-4b": (2560, 36, 9728, 32, 8, 128, 151936)}
LR, RANK, ALPHA = 1e-4, 16, 32
LARGEST_PACK = 6144         # tokens
WARM_UP = {"cpu": 1, "cuda": 3}     # optimizer steps before the clock starts, beside the two that are checked
ANSWER_S = 900              # longest that a process may be silent


@dataclass(frozen=True)
class Mix:
    """Lengths of samples in tokens, trained tokens of them, and how many make a micro-step and a step."""
    mean: float
    sigma: float
    shortest: int
    longest: int
    share: float        # of a sample that is trained, at its end; 0: 2 or 3 tokens
    samples: int
    accumulation: int
    turn: int = 2       # optimizer steps of a turn

    @property
    def step_samples(self):
        return self.samples * self.accumulation

    @property
    def step_tokens(self):
        """On average."""
        return self.mean * self.step_samples


MIXES = {"cpu": {"short": Mix(47, 0.607, 8, 180, 0, 8, 2), "long": Mix(200, 0.8, 24, 820, 0.5, 4, 1)},
         "cuda": {"short": Mix(47, 0.607, 8, 180, 0, 16, 8, 8), "long": Mix(500, 0.8, 24, 2048, 0.5, 2, 16, 8)}}
STEPS64 = Mix(47, 0.607, 8, 180, 0, 16, 8, 64)
CHECK = Mix(47, 0.607, 8, 180, 0.5, 2, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Model and samples


def make_model(folder, shape, seed):
    """Write a random Qwen3 checkpoint of the shape, bf16 values; returns how many weights its layers' matrices have."""
    config = Qwen3Config(**dict(zip(SIZES, SHAPES[shape])), tie_word_embeddings=True,
                                      max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=1)
    model = weights.empty_model(config, torch.bfloat16)
    model.config.save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {name: torch.ones(p.shape, dtype=torch.bfloat16) if "norm" in name else
               (0.02 * torch.randn(p.shape, device=device, generator=generator)).bfloat16().cpu()
               for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return packed_lm.layer_weights(model)


def pad_tokenizer():
    """A tokenizer that knows how to pad and nothing else."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<end>": 1})),
                                                pad_token="<pad>", eos_token="<end>", unk_token="<end>")


def make_table(folder, mix, sizes, vocab_size, seed):
    """Write a ChatTable of random samples: sets of so many, each with lengths of the whole distribution."""
    rng, normal = np.random.default_rng((seed, *sizes)), statistics.NormalDist()
    ranks = np.concatenate([(rng.permutation(n) + rng.random(n)) / n for n in sizes])      # stratified
    drawn = np.vectorize(normal.inv_cdf)(ranks.clip(1e-6, 1 - 1e-6))
    wanted = np.exp(math.log(mix.mean) - mix.sigma ** 2 / 2 + mix.sigma * drawn)
    lengths = wanted.clip(mix.shortest, mix.longest).round().astype(np.int64)
    n = len(lengths)
    targets = (mix.share * lengths).round().astype(np.int64) if mix.share else rng.integers(2, 4, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    trained = place >= np.repeat(lengths - targets, lengths)
    folder.mkdir(parents=True)
    for name, values in {"tokens": rng.integers(2, vocab_size, offsets[-1]).astype(np.int32), "trained": trained,
                         "offsets": offsets, "lengths": lengths, "targets": targets, "lines": np.arange(1, n + 1),
                         "keys": np.full(n, -1), "sources": np.zeros(n, np.int64)}.items():
        np.save(folder / f"{name}.npy", values)
    (folder / "sources.json").write_text('["random"]')


def set_sizes(mix, sets, device):
    """Samples of the warm-up and of each set."""
    return [WARM_UP[device.type] * mix.step_samples] + [mix.turn * mix.step_samples] * sets


def numbers_of(sizes):
    """Sample numbers of each set."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def make_data(job, vocab_size, device):
    """The samples to measure with, and the four that all ways must agree on; same order in every process."""
    make_table(job.data / "samples", job.mix, set_sizes(job.mix, job.sets, device), vocab_size, job.seed)
    make_table(job.data / "check", CHECK, [CHECK.step_samples], vocab_size, job.seed)


def make_examples(table, numbers):
    """The same samples as Trainer takes them: [{"input_ids", "labels", "attention_mask"}], lists."""
    examples = []
    for _, ids, trained in map(ChatSamples(table).__getitem__, numbers):
        examples.append({"input_ids": ids.tolist(), "labels": np.where(trained, ids, -100).tolist(),
                         "attention_mask": [1] * len(ids)})
    return examples


# ---------------------------------------------------------------------------------------------------------------------
# A process that trains


class Turns:
    """Lets a training loop go on for one set of samples after the other, and tells the parent what each took.

    plan: optimizer steps of the warm-up and of each set, of whoever trains; counts: work done since the last word,
    numbers or 0-d tensors, added to by whoever trains.
    """

    def __init__(self, pipe, device):
        self.pipe, self.device, self.checked, self.counts, self.caught = pipe, device, None, Counter(), None
        self.plan, self.steps, self.ended, self.goal, self.start, self.parent = [], 0, 0, None, None, os.getppid()

    def step_done(self):
        """Call at the end of each optimizer step; False: end the training."""
        self.steps += 1
        if self.steps < (self.goal or self.plan[0]):
            return True
        self.ended += 1
        measure.synchronize(self.device)
        said = {"seconds": self.start and time.perf_counter() - self.start, "steps": self.steps,
                "cpu_seconds": self.start and time.process_time() - self.cpu_start,
                "checked": self.checked, "host_syncs": self.syncs() / self.steps,
                "counts": {name: float(value) for name, value in self.counts.items()},
                "memory_gib": measure.peak_memory_gib(self.device)}
        self.pipe.send(said)
        while not self.pipe.poll(10):       # the others' turns may be long
            if os.getppid() != self.parent:
                return False
        try:
            watch = self.pipe.recv()
        except EOFError:
            return False
        self.goal = 1 if watch else self.plan[self.ended]
        self.counts.clear()
        self.steps = 0
        gc.collect()
        if self.start is None and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)     # of training, not of loading and checking
        if watch:
            self.watch_syncs()
        self.start, self.cpu_start = time.perf_counter(), time.process_time()
        return True

    def watch_syncs(self):
        """From now on torch warns each time the host waits for the GPU."""
        self.catch = warnings.catch_warnings(record=True)
        self.caught = self.catch.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def syncs(self):
        """Waits since watch_syncs; no more watching."""
        if self.caught is None:
            return 0
        torch.cuda.set_sync_debug_mode("default")
        self.catch.__exit__(None, None, None)
        found, self.caught = sum("synchronizing" in str(warning.message) for warning in self.caught), None
        return found


def all_logits(self, batch):
    """PackedLM.forward with the logits of every position, as model(input_ids, labels) has them."""
    hidden = self.native.base_model(
        input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False,
        cu_seq_lens_q=batch.cu_seqlens, cu_seq_lens_k=batch.cu_seqlens, max_length_q=batch.longest,
        max_length_k=batch.longest).last_hidden_state[0]
    labels = torch.full_like(batch.input_ids, -100).index_copy(0, batch.rows, batch.targets)
    logits = self.native.get_output_embeddings()(hidden).float()
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), torch.zeros((), device=hidden.device)


@functools.lru_cache(1)     # the same tensor in all layers of a batch
def dense_mask(cu_seqlens, n):
    place = torch.arange(n, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, place, right=True)
    return (document[:, None] == document) & (place[:, None] >= place)


def dense_attention(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **_):
    """document_attention.packed_attention with one (S, S) mask for all documents."""
    out = F.scaled_dot_product_attention(query.to(value.dtype), key.to(value.dtype), value, scale=scaling,
                                         attn_mask=dense_mask(cu_seq_lens_q, query.shape[2]), enable_gqa=True)
    return out.transpose(1, 2), None


def our_steps(world, options, table, mix, plan, parts, optimizer):
    """Optimizer steps as train_sft.py takes them, over the packs of a plan again and again.

    Yields (loss (), gradient norm (), counts).
    """
    model, wrapped = parts
    cuda, (budget, accumulation, packs) = world.device.type == "cuda", plan
    batches = loading.ahead(make_loader(
        table, itertools.cycle(packs), num_workers=2 if cuda else 0, prefetch_factor=4, pad_to=budget, pad_id=0),
        world.device)
    trainable, flags = [p for p in model.parameters() if p.requires_grad], optim.StepFlags(world.device)
    for first in itertools.cycle(range(0, len(packs), accumulation)):
        window = [number for pack in packs[first:first + accumulation] for number in pack]
        n_targets, counts = int(table.targets[window].sum()), Counter(pairs=pairs_of(table.lengths[window]))
        total = torch.zeros((), device=world.device)
        for micro in range(accumulation):
            batch = next(batches)
            counts.update(batch.counts, slots=len(batch.input_ids))
            with distributed.gradient_sync(wrapped, micro == accumulation - 1):
                with torch.autocast(world.device.type, torch.bfloat16, enabled=cuda):
                    loss, *_ = wrapped(batch)
                (loss / n_targets).backward()
            total += loss.detach()
        norm = optim.clip_gradients(trainable, 1.0)
        bad = 1 - torch.isfinite(norm).float()
        if options.get("foreach"):
            optimizer.step()
        else:
            optim.guarded_step(optimizer, bad)
        optimizer.zero_grad(set_to_none=True)
        flags.pop()
        flags.push(bad, distributed.any_rank(world, False), None)
        yield total / n_targets, norm, counts


def pack_plan(lengths, mix, sizes, options):
    """((tokens of a pack or 0, packs of a step, packs as lists of sample numbers), optimizer steps of each set).

    options["packed"]: tokens of a pack, or True for the least with which each set takes no more steps than otherwise.
    """
    def pack(budget):
        """Packs of each set, for whole steps."""
        found = []
        for numbers in numbers_of(sizes):
            order = PackOrder(lengths[numbers], tokens_per_pack=budget, samples_per_pack=0 if budget else mix.samples,
                              shuffle=False)
            found.append([numbers[order.epoch(0).pack(p)].tolist() for p in range(order.packs_per_epoch)])
            found[-1] += [[]] * (-len(found[-1]) % accumulation)
        return found

    budget, accumulation = int(options.get("packed", 0)), mix.accumulation
    if budget > 1:
        accumulation = 1
    elif budget:
        accumulation = math.ceil(mix.step_tokens / LARGEST_PACK)
        budget = 128 * math.ceil(max(mix.step_tokens / accumulation, mix.longest) / 128)
        while any(len(packs) > accumulation * size // mix.step_samples for packs, size in zip(pack(budget), sizes)):
            budget += 128
    sets = pack(budget)
    return (budget, accumulation, sum(sets, [])), [len(packs) // accumulation for packs in sets]


def pairs_of(lengths):
    """Attended pairs of tokens of documents so long."""
    return int((lengths * (lengths + 1) // 2).sum())


def train_ours(turns, job, options):
    """Train with the parts of train_sft.py, in default settings but for what the options say."""
    mode = options.get("parallel", "fsdp")
    world = distributed.init(alone_too=mode == "fsdp")
    cuda, lora = turns.device.type == "cuda", job.method == "lora"
    model, files = packed_lm.build_empty(job.folder / "model", torch.bfloat16 if cuda and lora else torch.float32,
                                         (RANK, ALPHA, 0.0, "all-linear", str(job.folder)) if lora else None,
                                         options.get("recompute"))
    packed_lm.load(model, files, world, sharding={"bf16": cuda} if mode == "fsdp" else None,
                   compiled=options.get("compile", False))
    if lora:
        adapters.init_adapters(model.net, job.seed)
    parts = model, model.train() if mode == "fsdp" else distributed.wrap_ddp(model.train(), world)
    if options.get("all_logits"):
        model.forward = types.MethodType(all_logits, model)
    if options.get("dense"):
        AttentionInterface.register("dense_documents", dense_attention)
        model.native.config._attn_implementation = "dense_documents"
    optimizer = optim.build_adamw(model.named_parameters(), LR, 0.0, (0.9, 0.95), packed_lm.decays)
    if options.get("foreach"):
        groups = [{key: group[key] for key in ("params", "weight_decay")} for group in optimizer.param_groups]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, foreach=True)
    check, table = (ChatTable(job.data / name) for name in ("check", "samples"))
    whole = {"packed": CHECK.step_samples * CHECK.longest} if "packed" in options else {}     # all in one pack
    plan, _ = pack_plan(check.lengths, CHECK, [CHECK.step_samples], whole)
    steps = our_steps(world, options, check, CHECK, plan, parts, optimizer)
    turns.checked = [(float(loss), float(norm), counts["targets"]) for (loss, norm, counts), _ in zip(steps, range(2))]
    plan, turns.plan = pack_plan(table.lengths, job.mix, set_sizes(job.mix, job.sets, turns.device), options)
    for _, _, counts in our_steps(world, options, table, job.mix, plan, parts, optimizer):
        turns.counts.update(counts)
        if not turns.step_done():
            return


class AtStepEnd(TrainerCallback):
    """Ends the training when the turns do."""

    def __init__(self, turns):
        self.turns = turns

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = not self.turns.step_done()


def train_theirs(turns, job, options, sft=False):
    """Train with transformers' Trainer or, for sft, TRL's SFTTrainer; the options say how samples become batches."""
    cuda, lora = turns.device.type == "cuda", job.method == "lora"
    attention = "flash_attention_2" if cuda and is_flash_attn_2_available() else "sdpa"
    tokenizer = pad_tokenizer()
    model = Qwen3ForCausalLM.from_pretrained(
        job.folder / "model", dtype=torch.bfloat16 if cuda and lora else torch.float32, attn_implementation=attention)
    if lora:
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear",
                                                 task_type="CAUSAL_LM"))
        adapters.init_adapters(model, job.seed)
    counts = turns.counts

    def count(module, args, given):         # a mask where there is padding, else one row of documents
        mask, labels, ids = given.get("attention_mask"), given["labels"], given["input_ids"]
        lengths = mask.sum(1) if mask is not None else given["position_ids"]
        counts["tokens"] += lengths.sum() if mask is not None else ids.numel()
        counts["samples"] += len(ids) if mask is not None else (lengths == 0).sum()
        counts["pairs"] += (lengths * (lengths + 1) // 2).sum() if mask is not None else (lengths + 1).sum()
        counts["targets"] += (labels[:, 1:] != -100).sum()
        counts["slots"] += ids.numel()
    model.register_forward_pre_hook(count, with_kwargs=True)

    def make_trainer(name, mix, sizes, *callbacks, **more):
        common = dict(
            output_dir=str(job.folder / "out"), per_device_train_batch_size=mix.samples,
            gradient_accumulation_steps=mix.accumulation, learning_rate=LR, lr_scheduler_type="constant",
            weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, optim="adamw_torch_fused",
            train_sampling_strategy="sequential", gradient_checkpointing=False, bf16=cuda,
            torch_compile=options.get("compile", False), use_liger_kernel=options.get("liger", False),
            use_cpu=not cuda, dataloader_num_workers=2 if cuda else 0, save_strategy="no", report_to="none",
            disable_tqdm=True, seed=job.seed, **more)
        table = ChatTable(job.data / name)
        numbers = np.concatenate([numbers[np.argsort(-table.lengths[numbers], kind="stable")] if options.get("sorted")
                                  else numbers for numbers in numbers_of(sizes)])
        examples = make_examples(table, numbers)
        if sft:
            settings = trl.SFTConfig(**common, max_length=None, padding_free=options.get("flat", False),
                                     dataset_kwargs={"skip_prepare_dataset": True})
            trainer = trl.SFTTrainer(model, args=settings, train_dataset=datasets.Dataset.from_list(examples),
                                     processing_class=tokenizer, callbacks=list(callbacks))
        else:
            collate = DataCollatorWithFlattening() if options.get("flat") else DataCollatorForSeq2Seq(tokenizer)
            trainer = Trainer(model, TrainingArguments(**common), train_dataset=examples, data_collator=collate,
                              processing_class=tokenizer, callbacks=list(callbacks))
        trainer.remove_callback(PrinterCallback)
        return trainer

    trainer = make_trainer("check", CHECK, [CHECK.step_samples], max_steps=2, logging_steps=1)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "grad_norm" in row]
    turns.checked = [(row["loss"], row["grad_norm"], int(counts["targets"]) // 2) for row in rows]
    counts.clear()
    del trainer
    gc.collect()
    sizes = set_sizes(job.mix, job.sets, turns.device)
    turns.plan = [size // job.mix.step_samples for size in sizes]
    make_trainer("samples", job.mix, sizes, AtStepEnd(turns), max_steps=10**6, logging_strategy="no").train()


def work(pipe, job, who, options):
    """What a process does from its start to its end."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"        # loading by threads may break torch's thread pool in a fork
    cuda = torch.cuda.is_available()
    try:
        turns = Turns(pipe, torch.device("cuda", 0) if cuda else torch.device("cpu"))
        if cuda:
            torch.set_float32_matmul_precision("high")
        if who == "ours":
            train_ours(turns, job, options)
        else:
            train_theirs(turns, job, options, sft=who == "trl")
    except torch.OutOfMemoryError:
        pipe.send({"error": "out of memory"})
    except Exception:
        pipe.send({"error": traceback.format_exc()})
    finally:
        pipe.close()
        sys.stdout.flush()
        os._exit(0)     # process groups, loaders and compilers of a tree that has nothing more to say
