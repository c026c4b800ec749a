"""Frozen models that teach a student: a teacher, the base of --keep, or a vLLM server.

A frozen model is not part of the module that DDP or FSDP2 wraps, so it has no gradients and is not
saved; FSDP2 shards it as well. A server (vllm serve NAME --max-logprobs 64) gets the ids of a whole
conversation. For each position it returns the log-probability of the token that was sent and of the
K likeliest tokens (--distill_topk). The others count as one token, as for a local teacher.
"""
import math
import os
import shutil
import time
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from core import checkpoint, dist, json_files, tensor_io
from core.cli import require
from core.packing import PackOrder
from distill import causal_lm, packed_lm
from distill.chat_data import collate
from distill.divergence import FLOOR, teacher_sums
from distill.generation import Draw, generate
from distill.losses import chunked_loss
from distill.teachers import NEUTRAL, Server

ROUNDING = 1e-3         # a server's rounding may put a log-probability this far above 0
KEPT = (1.0, "forward", 0.5, 0)     # --keep: KL(base, student) and nothing else

# ---- Batches that a teacher reads as well


def collate_prompted(samples, **_):
    """PackedChats of a prompted table's samples, with the teacher's version."""
    batch = collate([(i, ids[:own], trained[:own]) for i, ids, trained, own in samples])
    other = collate([(i, ids[own:], trained[own:]) for i, ids, trained, own in samples])
    assert torch.equal(batch.targets, other.targets), "student and teacher have other answers"
    return replace(batch, teacher=other)


def collate_kept(samples):
    """PackedChats of --keep's samples: student and base read the same tokens."""
    batch = collate(samples)
    return replace(batch, teacher=batch, kept=True)


# ---- Models


class Student(packed_lm.PackedLM):
    """PackedLM that frozen["teacher"] teaches, or this model without adapters; in batches that are
    `kept`, frozen["base"]. frozen: {name: PackedLM or Scorer}. prompted: (weight in the loss, kind,
    beta, k) for divergence.py; None: there is only --keep."""

    def __init__(self, net, recompute=None, prompted=None):
        super().__init__(net, recompute)
        self.prompted, self.sums = prompted, 5 if prompted else 3

    def forward(self, batch):
        """PackedLM's sums, and with a teacher (cross-entropy, divergence)."""
        prompted = KEPT if batch.kept else self.prompted
        if not prompted:
            return super().forward(batch)
        teacher, teacher_head = self.teacher_rows(batch)
        (rows,), head = self.rows(batch)
        loss, right, *parts = chunked_loss(rows, head, batch.targets, self.chunk, teacher_sums(
            prompted, *(teacher_head or head)), teacher)
        return loss, right, torch.full_like(right, len(batch.targets)), *parts

    @torch.no_grad()
    def teacher_rows(self, batch):
        """(the teacher's rows of the same tokens, without dropout; its head, None: this one)."""
        if other := self.frozen.get("base" if batch.kept else "teacher"):
            return other.rows(batch.teacher)
        from core import adapters
        training = self.net.training
        self.net.eval()
        with adapters.disable(self.net):
            rows, _ = self.rows(batch.teacher)
        self.net.train(training)
        return rows, None


def build_empty(folder, dtype):
    """Frozen PackedLM of a model folder, on the meta device, in eval mode, without dropout."""
    packed, packed.parts = packed_lm.build_empty(folder, dtype)
    return packed.requires_grad_(False).eval()


def student(args, net, recompute):
    """Student with the frozen models that the flags need. A base under adapters needs no copy."""
    prompted = (args.distill_weight, args.divergence, args.js_beta, args.distill_topk)
    model = Student(net, recompute, args.teacher_path and prompted)
    base, dtype = causal_lm.find_model(args.model_path), causal_lm.half_dtype(args) or torch.float32
    teacher = causal_lm.find_model(args.teacher_path or args.model_path, "--teacher_path")
    same = teacher.resolve() == base.resolve()
    if args.teacher_url:
        model.frozen["teacher"] = Scorer(args, model.native.config.vocab_size)
    elif args.teacher_path and not (args.use_lora and same):
        model.frozen["teacher"] = build_empty(teacher, dtype)
    if args.keep and not args.use_lora:
        shared = same and args.teacher_path and not args.teacher_url
        model.frozen["base"] = model.frozen["teacher"] if shared else build_empty(base, dtype)
    return model


def models(model):
    """The frozen PackedLMs of a PackedLM, each once."""
    return [other for other in dict.fromkeys(model.frozen.values())
            if not isinstance(other, Scorer)]


def load_all(model, world, sharding):
    """Load the frozen models of a PackedLM. sharding: the student's, or None."""
    if sharding:
        sharding = sharding | {"reshard_after_forward": True}     # there is no backward pass
    for other in models(model):
        packed_lm.load(other, other.parts, world, sharding=sharding)
        if sharding:        # gathers weights for this method as for forward()
            register_fsdp_forward_method(other, "rows")


def fingerprint(args, table):
    """Text that identifies the teacher's weights and the ChatTable of --keep; None without both."""
    teacher = kept = ""
    if args.teacher_path and args.teacher_path != args.model_path:
        teacher = causal_lm.fingerprint_weights(causal_lm.find_model(args.teacher_path))
    if table:
        data = table.fingerprint(np.arange(len(table)))
        kept = f"keep {args.keep_weight:g} / {args.keep_every}: {data}"
    return ", ".join(filter(None, (teacher, args.teacher_name, kept))) or None


# ---- vLLM's server


def known_tokens(logprobs, k, token):
    """[(id, log-probability)] of the k likeliest tokens in one position's prompt_logprobs."""
    ranked = sorted((value["rank"], int(name), value["logprob"])
                    for name, value in logprobs.items())
    require(str(token) in logprobs, f"has no log-probability of token {token}, which was sent")
    best = [(name, logprob) for rank, name, logprob in ranked if rank <= k][:k]
    require(len(best) == k, f"gave {len(best)} tokens of the {k} likeliest: --max-logprobs {k}")
    # nan fails this comparison as well
    require(all(logprob <= ROUNDING for _, _, logprob in ranked), "gave log-probabilities above 0")
    return best


class Scorer:
    """Teacher on a vLLM server. It takes the place of a PackedLM: rows(batch) returns ((ids (R, K),
    log-probabilities (R, K + 1), the last for all other tokens), None). The calls for a batch take
    at most twice --request_timeout. args: of train_sft.py. size: rows of the student's head."""

    def __init__(self, args, size):
        self.server = Server(args.teacher_url, args.request_timeout, "--teacher_url")
        self.name, self.k = args.teacher_name or args.teacher_path, args.distill_topk
        self.size = size

    async def ask(self, ids, end=math.inf):
        """[known_tokens] of each position of a conversation except the first. end: a deadline."""
        def read(data):
            _, *positions = json_files.loads(data)["choices"][0]["prompt_logprobs"]
            return [known_tokens(logprobs, self.k, token)
                    for logprobs, token in zip(positions, ids[1:], strict=True)]
        return await self.server.call("/completions", {
            **NEUTRAL, "model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": self.k}, read, end, f"; it needs --max-logprobs {self.k}")

    def rows(self, batch):
        ids, bounds = batch.input_ids.tolist(), batch.cu_seqlens.tolist()
        places = (batch.rows + 1).tolist()      # positions of the predicted tokens
        chats = [(start, stop) for start, stop in zip(bounds, bounds[1:])
                 if any(start < i < stop for i in places)]
        deadline = time.monotonic() + 2 * self.server.timeout       # for all calls: ranks wait

        def ask(chat):
            return self.ask(ids[slice(*chat)], deadline)
        known = {start + i: tokens for (start, _), positions in self.server.run_all(ask, chats)
                 for i, tokens in enumerate(positions, 1)}
        known = torch.tensor([known[i] for i in places], dtype=torch.float64)
        known = known.reshape(-1, self.k, 2)    # ids below 2**53 are exact
        tokens, logprobs = known[..., 0].long(), known[..., 1]
        require((tokens < self.size).all(), f"--teacher_url: names a token above the student's "
                f"{self.size:,}: serve a model of the same size")
        rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=0).log()
        logprobs = torch.cat([logprobs, rest], 1).clamp(min=FLOOR)
        return (tokens.to(batch.input_ids.device), logprobs.to(batch.input_ids.device)), None


# ---- --on_policy: the student samples answers. Seeds depend on (run, step, sample), so a resumed
# run samples the same answers. Each rank samples with its model, or with --base_url on a server,
# which loads each step's adapters under a new name, as it caches them by name. Prompts and answers
# are ids, since a text may have several tokenisations.
#     VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --max-lora-rank 32


def generator_of(seed, step, number):
    """numpy generator for one sample at one step."""
    return np.random.default_rng((seed, step, number, 3))


def question_ids(ids, trained):
    """The ids (n,) before the last trained turn. trained (n,) bool."""
    starts = np.flatnonzero(trained[1:] & ~trained[:-1])
    return ids[:starts[-1] + 1]


def replace_answers(args, world, model, table, batches, ends, step, sampler=None):
    """Let the student answer a share of the samples. Returns ([PackedChats], number of targets on
    all ranks). Collective. An answer that is cut off at --max_new_tokens is trained without an end.

    batches: those of this rank and step. ends: ids that end an answer. sampler: Sampler or None."""
    samples = {i: table[i] for batch in batches for i in batch.samples}
    chosen = [i for i in samples if generator_of(args.seed, step, i).random() < args.on_policy]
    prompts, seeds = [], []     # prompts: (ids of the student's, of the teacher's)
    for i in chosen:
        _, ids, trained, own = samples[i]
        prompts.append((question_ids(ids[:own], trained[:own]),
                        question_ids(ids[own:], trained[own:])))
        seeds.append(int(generator_of(args.seed, step, i).integers(2**31)))
    positions = min(causal_lm.positions(net.native.config)
                    for net in (model, *model.frozen.values()) if hasattr(net, "native"))
    limits = [min(args.max_new_tokens, positions - max(map(len, pair))) for pair in prompts]
    questions, answers = [student_ids for student_ids, _ in prompts], []
    if sampler:
        sampler.refresh(model, step)
        answers = sampler.draw(questions, seeds, limits, ends)
    else:
        size = max(1, *(len(batch.samples) for batch in batches))
        with dist.gather_weights(model):
            for start in range(0, len(chosen), size):
                chunk = slice(start, start + size)
                answers += draw(model.native, questions[chunk], seeds[chunk], min(limits[chunk]),
                                ends, args)
    for i, (student_ids, teacher_ids), answer in zip(chosen, prompts, answers):
        ids = np.concatenate([student_ids, answer, teacher_ids, answer])
        trained, own = np.zeros(len(ids), bool), len(student_ids) + len(answer)
        trained[len(student_ids):own] = trained[len(ids) - len(answer):] = True
        samples[i] = i, ids, trained, own
    batches = [collate_prompted([samples[i] for i in batch.samples]).to(world.device)
               for batch in batches]
    targets = torch.tensor(float(sum(len(batch.targets) for batch in batches)), device=world.device)
    return batches, dist.all_reduce(world, targets).item()


def draw(model, prompts, seeds, tokens, ends, args):
    """[ids (n,)] of answers sampled at temperature 1, including end tokens."""
    training, attention = model.training, model.config._attn_implementation
    device = model.get_input_embeddings().weight.device
    model.eval()
    model.config._attn_implementation = "sdpa"      # packed attention has no KV cache
    try:
        with dist.autocast(device, causal_lm.half_dtype(args)):
            answers = generate(model, prompts, tokens, ends, [Draw(seeds)])
    finally:
        model.config._attn_implementation = attention
        model.train(training)
    return [np.array(ids) for ids in answers]


class Sampler:
    """Gets answers from a server with the adapters of the last refresh()."""

    def __init__(self, args, world):
        """Collective. args: base_url, request_timeout, output_dir, which the server reads too."""
        self.world, self.server = world, Server(args.base_url, args.request_timeout)
        self.folder, self.name = Path(os.path.abspath(args.output_dir)) / "served", None

        def prepare():      # test the server; delete files of an earlier run
            self.server.wait(self.server.call("/models"))
            self.folder.mkdir(exist_ok=True)
            checkpoint.remove_named(self.folder, r"student-[0-9a-f]{8}-\d+")    # of refresh()
            return uuid.uuid4().hex[:8]
        self.run = dist.rank0(world, prepare)

    def refresh(self, model, step):
        """Make the server use the current adapters of a PackedLM. Collective."""
        from core import adapters
        dist.reshard(model)
        weights = adapters.adapter_weights(model.net)
        files = tensor_io.stage(self.world, "adapter_model", weights)
        previous, self.name = self.name, f"student-{self.run}-{step}"

        def load():
            folder = self.folder / self.name
            folder.mkdir()
            model.net.peft_config["default"].save_pretrained(folder)
            for file, write in files.items():
                write(folder / file)
            deadline = time.monotonic() + 2 * self.server.timeout       # for both calls

            def call(path, body):
                self.server.wait(self.server.call(
                    path, body, bytes, deadline,
                    "; it needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"))
            call("/load_lora_adapter", {"lora_name": self.name, "lora_path": str(folder)})
            if previous:
                call("/unload_lora_adapter", {"lora_name": previous})
                shutil.rmtree(self.folder / previous, ignore_errors=True)
        dist.rank0(self.world, load)

    def draw(self, prompts, seeds, limits, ends):
        """[ids] of an answer to each prompt (ids), including its end; at most limits[i] tokens."""
        # the plain softmax, whatever the model's generation_config says; only `ends` end an answer
        settings = {**NEUTRAL, "model": self.name, "temperature": 1.0, "top_p": 1.0,
                    "return_token_ids": True, "stop_token_ids": [int(token) for token in ends],
                    "ignore_eos": True, "skip_special_tokens": False}
        deadline = time.monotonic() + 2 * self.server.timeout       # for all calls

        async def ask(i):
            def read(data):
                ids = json_files.loads(data)["choices"][0]["token_ids"]
                require(0 < len(ids) <= limits[i] and all(type(token) is int for token in ids),
                        f"gave no token_ids of 1 to {limits[i]} tokens")
                return ids
            return await self.server.call("/completions", {
                **settings, "prompt": [int(token) for token in prompts[i]],
                "max_tokens": limits[i], "seed": seeds[i]}, read, deadline)
        return [ids for _, ids in sorted(self.server.run_all(ask, range(len(prompts))))]


# ---- --keep: chats on which the student must stay close to the base


class Keeper:
    """Every --keep_every steps, all ranks also take one step's packs of --keep. These add
    --keep_weight x KL(base, student), averaged over the tokens of their answers, to the loss. Base
    and student read the same tokens. The order is a function of seed and step."""

    def __init__(self, args, world, table, model):
        self.args, self.world, self.model, self.table = args, world, model, table
        self.order = PackOrder(table.lengths, tokens_per_pack=args.max_tokens_per_batch,
                               samples_per_pack=args.per_device_train_batch_size, seed=args.seed)

    def backward(self, step, scale, log):
        """Add gradients to those of step + 1, if due, and log the loss. Collective."""
        if step % self.args.keep_every:
            return
        accumulation, size = self.args.gradient_accumulation_steps, self.world.size
        per_step = accumulation * size
        turns_per_epoch = -(-self.order.packs_per_epoch // per_step)
        epoch, turn = divmod(step // self.args.keep_every, turns_per_epoch)
        window = self.order.window(epoch, turn * per_step, per_step)
        targets = int(self.table.targets[window].sum())
        total = torch.zeros((), device=self.world.device)
        for micro in range(accumulation):
            pack = self.order.window(epoch, turn * per_step + micro * size + self.world.rank)
            batch = collate_kept([self.table[int(i)] for i in pack]).to(self.world.device)
            # the step's gradients are reduced already; averaging equal values changes nothing
            with dist.gradient_sync(self.model, micro == accumulation - 1):
                with dist.autocast(self.world.device, causal_lm.half_dtype(self.args)):
                    loss, *_ = self.model(batch)
                scale(loss * (size * self.args.keep_weight / targets)).backward()
            total += loss.detach()
        total = dist.all_reduce(self.world, total).item()
        log.write(step + 1, {"train/keep_kl": total / targets})
