"""Frozen models for a student: a teacher, the base, or vLLM's server, to score and sample answers.

A frozen model is not part of the module that DDP or FSDP2 wraps, so it has no gradients and no
place in a checkpoint; FSDP2 shards it too. The server (vllm serve NAME --max-logprobs 64) gets the
ids of answers and returns for each token its log-probability and those of the K likeliest
(--distill_topk); all others form one bucket, as with --teacher_path and the same K.
"""
import math
import os
import re
import shutil
import time
import uuid
from pathlib import Path

import numpy as np
import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from core import checkpoint, dist, tensor_io
from core.cli import UserError, one_line, require
from core.packing import PackOrder
from distill import causal_lm, packed_lm
from distill.chat_data import collate, kept
from distill.losses import FLOOR
from distill.teachers import MALFORMED, NOT_SET, Server

ROUNDING = 1e-3         # by which the sum of rounded probabilities may exceed 1

# ---- Models


def build_empty(folder, dtype):
    """Frozen PackedLM of a model folder, on the meta device, in eval mode, without dropout."""
    packed, packed.parts = packed_lm.build_empty(folder, dtype)
    return packed.requires_grad_(False).eval()


def add(model, args):
    """Add frozen models to an empty PackedLM; a base under adapters needs no copy."""
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


def models(model):
    """[(name, frozen PackedLM)] of a PackedLM, without duplicates."""
    return list({id(other): (name, other) for name, other in model.frozen.items()
                 if not isinstance(other, Scorer)}.values())


def load_all(model, world, sharding):
    """Load the frozen models of a PackedLM. sharding: the student's, or None."""
    if sharding:
        sharding = sharding | {"reshard_after_forward": True}     # there is no backward pass
    for name, other in models(model):
        packed_lm.load(other, other.parts, world, sharding=sharding)
        if sharding:        # gathers weights for this method as for forward()
            register_fsdp_forward_method(other, "rows")
        if world.is_main:
            print(f"{name:<10} {sum(p.numel() for p in other.parameters()) / 1e6:,.1f} M "
                  f"parameters, frozen, in {str(next(other.parameters()).dtype)[6:]}")


def fingerprint(args, table):
    """Text that identifies the teacher's weights and the ChatTable of --keep; or None."""
    teacher = kept = ""
    if args.teacher_path and args.teacher_path != args.model_path:
        teacher = causal_lm.fingerprint_weights(causal_lm.find_model(args.teacher_path))
    if table:
        data = table.fingerprint(np.arange(len(table)))
        kept = f"keep {args.keep_weight:g} / {args.keep_every}: {data}"
    return ", ".join(filter(None, (teacher, args.teacher_name, kept))) or None


# ---- vLLM's server


def known_tokens(found, k, token):
    """[(id, log-probability)] of the k likeliest in one position's prompt_logprobs. token: the one
    sent for this position, which must be in them. Raises UserError, MALFORMED.
    """
    ranked = sorted((value["rank"], name, value["logprob"]) for name, value in found.items())
    odd = [name for _, name, _ in ranked if not re.fullmatch(r"0|[1-9]\d{0,9}", name)]
    require(not odd, f"names a token {odd[:1]}, which is not an id")
    require(str(token) in found, f"has no log-probability of token {token}, which was sent")
    best = [(int(name), logprob) for rank, name, logprob in ranked if rank <= k][:k]
    require(len(best) == k, f"gave {len(best)} tokens of the {k} likeliest: --max-logprobs {k}")
    total = sum(math.exp(min(value, 1)) for _, value in best)
    require(all(value <= ROUNDING for _, _, value in ranked) and total <= 1 + ROUNDING,
            "gave log-probabilities that are none: above 0, nan, or of more than 1 together")
    return best


class Scorer:
    """rows(batch) -> ((ids (R, K), log-probabilities (R, K + 1), last: all others), None).

    args: --teacher_url, ... of train_sft.py. The calls for a batch take at most twice
    --request_timeout. size: rows of the student's head.
    """

    def __init__(self, args, size):
        self.server = Server(args.teacher_url, args.request_timeout, "--teacher_url")
        self.name, self.k = args.teacher_name or args.teacher_path, args.distill_topk
        self.size = size

    async def ask(self, ids, end=math.inf):
        """[known_tokens] of each position of a conversation except the first. end: a deadline."""
        found = await self.server.call("/completions", {
            **NOT_SET, "model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": self.k}, end=end, hint=f"; it needs --max-logprobs {self.k}")
        try:
            _, *rows = found["choices"][0]["prompt_logprobs"]
            return [known_tokens(row, self.k, token)
                    for row, token in zip(rows, ids[1:], strict=True)]
        except (UserError, *MALFORMED) as error:
            raise UserError(f"{self.server.name}/completions: its prompt_logprobs are not those of "
                            f"vLLM's server: {one_line(error)}")

    def rows(self, batch):
        ids, bounds = batch.input_ids.tolist(), batch.cu_seqlens.tolist()
        places = (batch.rows + 1).tolist()      # positions of the predicted tokens
        wanted = [(a, b) for a, b in zip(bounds, bounds[1:])
                  if any(a < place < b for place in places)]
        end = time.monotonic() + 2 * self.server.timeout        # for all calls, as other ranks wait
        at = {a + i: row for (a, _), rows in self.server.each(
            lambda part: self.ask(ids[slice(*part)], end), wanted) for i, row in enumerate(rows, 1)}
        known = torch.tensor([at[place] for place in places], dtype=torch.float64)
        known = known.reshape(-1, self.k, 2)    # ids below 2**53 are exact
        tokens, logprobs = known[..., 0].long(), known[..., 1]
        require((tokens < self.size).all(), f"--teacher_url: names a token above the student's "
                f"{self.size:,}: serve a model of the same size")
        rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=0).log()
        both, device = torch.cat([logprobs, rest], 1).clamp(min=FLOOR), batch.input_ids.device
        return (tokens.to(device), both.to(device)), None


# ---- --on_policy: the student samples answers. Seeds depend on (run, step, sample), so a resumed
# run samples the same ones. Each rank samples locally, or with --base_url on a server, which loads
# each step's adapters under a new name, as its cache is by name. Prompts and answers are sent as
# ids, as a text may have several tokenisations, of which the student sampled one.
#     VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --max-lora-rank 32


def draw_of(seed, step, number):
    """numpy generator for one sample at one step."""
    return np.random.default_rng((seed, step, number, 3))


def question_of(ids, trained):
    """The ids (n,) before the last trained turn. trained (n,) bool."""
    starts = np.flatnonzero(trained[1:] & ~trained[:-1])
    return ids[:starts[-1] + 1]


def own_answers(args, world, model, table, batches, ends, step, sampler=None):
    """(PackedChats in which a share of the samples has the student's answers, number of targets on
    all ranks). Collective. An answer cut off at --max_new_tokens is trained without an end.
    batches: this rank's in this step. ends: ids that end an answer. sampler: Sampler or None.
    """
    made, rows = [], [[table[i] for i in batch.samples] for batch in batches]
    chosen = [(b, r) for b, found in enumerate(rows) for r, sample in enumerate(found)
              if draw_of(args.seed, step, sample[0]).random() < args.on_policy]
    prompts = [[question_of(ids[part], trained[part]) for part in (slice(own), slice(own, None))]
               for _, ids, trained, own in (rows[b][r] for b, r in chosen)]    # student, teacher
    limit = min(causal_lm.positions(net.native.config)
                for net in (model, *model.frozen.values()) if hasattr(net, "native"))
    room = [min(args.max_new_tokens, limit - max(map(len, pair))) for pair in prompts]
    seeds = [int(draw_of(args.seed, step, rows[b][r][0]).integers(2**31)) for b, r in chosen]
    if sampler:
        sampler.refresh(model, step)
        made = sampler.draw([own for own, _ in prompts], seeds, room, ends)
    else:
        together = max(1, *map(len, rows))
        with dist.gather_weights(model):
            for start in range(0, len(chosen), together):
                part = slice(start, start + together)
                made += draw(model.native, [own for own, _ in prompts[part]], seeds[part],
                             min(room[part]), ends, args)
    for (b, r), (own, theirs), answer in zip(chosen, prompts, made):
        ids = np.concatenate([own, answer, theirs, answer])
        trained = np.zeros(len(ids), bool)
        trained[len(own):len(own) + len(answer)] = trained[len(ids) - len(answer):] = True
        rows[b][r] = rows[b][r][0], ids, trained, len(own) + len(answer)
    found = [collate(part, prompted=True).to(world.device) for part in rows]
    targets = sum(len(batch.targets) for batch in found)
    return found, dist.all_reduce(world, torch.tensor(float(targets), device=world.device)).item()


def draw(model, prompts, seeds, tokens, ends, args):
    """[ids (n,)] of answers sampled at temperature 1, including end tokens."""
    training, attention = model.training, model.config._attn_implementation
    device = model.get_input_embeddings().weight.device
    model.eval()
    model.config._attn_implementation = "sdpa"      # packed attention has no KV cache
    try:
        with dist.autocast(device, causal_lm.half_dtype(args)):
            answers = causal_lm.generate(model, prompts, tokens, ends, [causal_lm.Draw(seeds)])
    finally:
        model.config._attn_implementation = attention
        model.train(training)
    return [np.array(ids) for ids in answers]


class Sampler:
    """draw(...) gets answers from the server with the adapters of the last refresh(...)."""

    def __init__(self, args, world):
        """Collective. args: base_url, output_dir, which the server reads, request_timeout."""
        self.world, self.server = world, Server(args.base_url, args.request_timeout)
        self.folder, self.name = Path(os.path.abspath(args.output_dir)) / "served", None

        def begin():        # test the server; delete files of an earlier run
            self.server.wait(self.server.call("/models"))
            self.folder.mkdir(exist_ok=True)
            checkpoint.remove_named(self.folder, r"student-[0-9a-f]{8}-\d+")    # of refresh()
            return uuid.uuid4().hex[:8]
        self.run = dist.rank0(world, begin)

    def refresh(self, model, step):
        """Make the server use the current adapters of a PackedLM. Collective."""
        from core import adapters
        dist.reshard(model)
        weights = adapters.adapter_weights(model.net)
        files = tensor_io.stage(self.world, "adapter_model", weights, spread=False)
        before, self.name = self.name, f"student-{self.run}-{step}"

        def load():
            folder = self.folder / self.name
            folder.mkdir()
            adapters.save_config(model.net, folder)
            for file, write in files.items():
                write(folder / file)
            end = time.monotonic() + 2 * self.server.timeout        # for both, as ranks wait
            for call, body in (("load", {"lora_name": self.name, "lora_path": str(folder)}),
                               ("unload", {"lora_name": before}))[:2 if before else 1]:
                self.server.wait(self.server.call(
                    f"/{call}_lora_adapter", body, bytes, end, "; it needs --enable-lora, "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, a --max-lora-rank of at least "
                    "--lora_rank, and to read --output_dir"))
            if before:
                shutil.rmtree(self.folder / before, ignore_errors=True)
        dist.rank0(self.world, load)

    def draw(self, prompts, seeds, limits, ends):
        """[ids] of an answer to each prompt (ids), including its end; at most limits[i] tokens."""
        # sample from the plain softmax, ignoring the model's generation_config; only `ends` end an
        # answer
        drawing = {**NOT_SET, "model": self.name, "temperature": 1.0, "top_p": 1.0,
                   "return_token_ids": True, "stop_token_ids": [int(token) for token in ends],
                   "ignore_eos": True, "skip_special_tokens": False}
        end = time.monotonic() + 2 * self.server.timeout        # for all calls

        async def ask(i):
            found = await self.server.call("/completions", {
                **drawing, "prompt": [int(token) for token in prompts[i]], "max_tokens": limits[i],
                "seed": seeds[i]}, end=end)
            try:
                ids = found["choices"][0]["token_ids"]
                assert 0 < len(ids) <= limits[i] and all(type(token) is int for token in ids)
            except (AssertionError, *MALFORMED):
                raise UserError(f"{self.server.name}/completions: gave no token_ids of 1 to "
                                f"{limits[i]} tokens; vLLM's server does")
            return ids
        found = dict(self.server.each(ask, range(len(prompts))))
        return [found[i] for i in range(len(prompts))]


# ---- --keep: chats on which the student must stay close to the base


class Keeper:
    """Every --keep_every steps all ranks also take a step's number of packs of --keep. The loss
    adds --keep_weight x KL(base, student), averaged over the tokens of those answers. The order is
    a function of seed and step. Base and student read the same tokens.
    """

    def __init__(self, args, world, table, model):
        """table: ChatTable. model: the wrapped module."""
        self.args, self.world, self.model, self.table = args, world, model, table
        self.order = PackOrder(table.lengths, tokens_per_pack=args.max_tokens_per_batch,
                               samples_per_pack=args.per_device_train_batch_size, seed=args.seed)

    def learn(self, step, scale, log):
        """Add gradients to those of step + 1, if due, and log the loss. Collective."""
        if step % self.args.keep_every:
            return
        accumulation, size = self.args.gradient_accumulation_steps, self.world.size
        per_step = accumulation * size
        an_epoch = -(-self.order.packs_per_epoch // per_step)
        epoch, turn = divmod(step // self.args.keep_every, an_epoch)
        window = self.order.window(epoch, turn * per_step, per_step)
        targets = int(self.table.targets[window].sum())
        plan, total = self.order.epoch(epoch), torch.zeros((), device=self.world.device)
        for micro in range(accumulation):
            pack = plan.pack(turn * per_step + micro * size + self.world.rank)
            batch = kept([self.table[int(i)] for i in pack]).to(self.world.device)
            # the step's gradients are reduced already; averaging equal values changes nothing
            with dist.gradient_sync(self.model, micro == accumulation - 1):
                with dist.autocast(self.world.device, causal_lm.half_dtype(self.args)):
                    loss = self.model(batch).loss
                (loss * (size * self.args.keep_weight / targets * scale)).backward()
            total += loss.detach()
        total = dist.all_reduce(self.world, total).item()
        if log:
            log.write(step + 1, {"train/keep_kl": total / targets})
