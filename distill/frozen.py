"""What scores answers for the student: another model, the untouched base, vLLM's server; --keep.

A frozen model is no part of the module that DDP or FSDP2 wraps, so it has no gradients, no
optimizer and no place in a checkpoint; under FSDP2 it is sharded, too. The server scores by
prompt_logprobs (vllm serve NAME --max-logprobs 64): what is scored goes there as ids. For each
token come the K likeliest (--distill_topk) and the token itself; all others are one bucket, as with
--teacher_path and the same K.
"""
import contextlib
import math
import re
import time

import numpy as np
import torch
from torch import nn

from core import dist
from core.cli import UserError, printable, require
from core.packing import PackOrder
from distill import causal_lm, packed_lm
from distill.chat_data import kept
from distill.losses import FLOOR
from distill.server import MALFORMED, NOT_SET, Server

ROUNDING = 1e-3         # by which rounded probabilities may be above 1

# ---- Models


class Frozen(nn.Module):
    """forward(batch of the teacher's side): PackedLM.rows, without dropout: always in eval mode.
    packed, parts: of packed_lm.build_empty.
    """
    lora = False        # for packed_lm.load

    def __init__(self, packed, parts):
        super().__init__()
        self.packed, self.parts = packed.requires_grad_(False).eval(), parts

    @property
    def native(self):
        return self.packed.native

    @torch.no_grad()
    def forward(self, batch):
        return self.packed.rows(batch)


def add(model, args):
    """Give an empty PackedLM its frozen models; a base with adapters to switch off needs none."""
    base, dtype = causal_lm.find_model(args.model_path), causal_lm.half_dtype(args) or torch.float32
    teacher = causal_lm.find_model(args.teacher_path or args.model_path, "--teacher_path")
    same = teacher.resolve() == base.resolve()
    if args.teacher_url:
        model.frozen["teacher"] = Scorer(args, model.native.config.vocab_size)
    elif args.teacher_path and not (args.use_lora and same):
        model.frozen["teacher"] = Frozen(*packed_lm.build_empty(teacher, dtype))
    if args.keep and not args.use_lora:
        other = model.frozen.get("teacher")
        model.frozen["base"] = other if isinstance(other, Frozen) and same else Frozen(
            *packed_lm.build_empty(base, dtype))


def models(model):
    """The different Frozen ones of a PackedLM: [(name, Frozen)]."""
    return list({id(other): (name, other) for name, other in model.frozen.items()
                 if isinstance(other, Frozen)}.values())


def load_all(model, world, sharding):
    """Load the frozen models of a PackedLM. sharding: the student's, or None."""
    if sharding:
        sharding = sharding | {"reshard_after_forward": True}     # no backward needs them
    for name, other in models(model):
        packed_lm.load(other, other.parts, world, sharding=sharding)
        if world.is_main:
            print(f"{name:<10} {sum(p.numel() for p in other.parameters()) / 1e6:,.1f} M "
                  "parameters, frozen, in "
                  f"{str(next(other.parameters()).dtype).removeprefix('torch.')}")


def fingerprint(args, table):
    """Text for what teaches: another model's weights, the ChatTable of --keep; None."""
    found = [args.teacher_name] if args.teacher_name else []
    if args.teacher_path and args.teacher_path != args.model_path:
        teacher = causal_lm.find_model(args.teacher_path, "--teacher_path")
        found.insert(0, causal_lm.fingerprint_weights(teacher))
    if table:
        data = table.fingerprint(np.arange(len(table)))
        found.append(f"keep {args.keep_weight:g} / {args.keep_every}: {data}")
    return ", ".join(found) or None


# ---- vLLM's server


def known_tokens(found, k, token):
    """([ids], [log-probabilities]) of the k likeliest of a place's prompt_logprobs. UserError.
    token: that was sent for this place; a row without it is another place's.
    """
    try:
        ranked = sorted((value["rank"], name, float(value["logprob"]))
                        for name, value in found.items())
    except MALFORMED:
        raise UserError(f"gave no prompt_logprobs of the {k} likeliest; vLLM's server does")
    odd = [name for _, name, _ in ranked if not re.fullmatch(r"0|[1-9]\d{0,9}", name)]
    require(not odd, f"names a token {printable(' '.join(odd[:1]), 20)}, which is not an id")
    require(str(token) in found, f"gave log-probabilities without that of token {token}, which was "
            "sent: they are of another place")
    best = [(int(name), logprob) for rank, name, logprob in ranked if rank <= k][:k]
    require(len(best) == k, f"gave {len(best)} tokens of the {k} likeliest; it needs "
            f"--max-logprobs {k}")
    total = sum(math.exp(min(value, 1)) for _, value in best)
    require(all(value <= ROUNDING for _, _, value in ranked) and total <= 1 + ROUNDING,
            "gave log-probabilities that are none: above 0, nan, or of more than 1 together")
    return best


class Scorer:
    """scorer(batch) -> ((ids (R, K), log-probabilities (R, K + 1), the last of all others), None).

    args: --teacher_url, ... of train_sft.py; its calls for a batch take twice --request_timeout at
    most. rows: of the student's head.
    """

    def __init__(self, args, rows):
        self.server = Server(args.teacher_url, args.request_timeout, "--teacher_url")
        self.name, self.k = args.teacher_name or args.teacher_path, args.distill_topk
        self.rows = rows

    async def ask(self, ids, end=math.inf):
        """[known_tokens] of each place of a conversation but the first. end: of insist."""
        found = await self.server.insist("/completions", {
            **NOT_SET, "model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": self.k}, hint=f"; it needs --max-logprobs {self.k}", end=end)
        rows = ()
        with contextlib.suppress(*MALFORMED):
            _, *rows = found["choices"][0]["prompt_logprobs"]
        try:
            require(len(rows) == len(ids) - 1, f"gave prompt_logprobs of {len(rows)} places for "
                    f"{len(ids) - 1}; vLLM's server gives each")
            return [known_tokens(row, self.k, token) for row, token in zip(rows, ids[1:])]
        except UserError as error:
            raise UserError(f"--teacher_url {self.server.url}/completions: {error}")

    def __call__(self, batch):
        ids, bounds = batch.input_ids.tolist(), batch.cu_seqlens.tolist()
        places = (batch.rows + 1).tolist()      # of the tokens that are predicted
        wanted = [(a, b) for a, b in zip(bounds, bounds[1:])
                  if any(a < place < b for place in places)]
        end = time.monotonic() + 2 * self.server.timeout        # of them all: other ranks wait
        at = {a + i: row for (a, _), rows in self.server.each(
            lambda part: self.ask(ids[slice(*part)], end), wanted)
            for i, row in enumerate(rows, 1)}
        known = torch.tensor([at[place] for place in places], dtype=torch.float64)
        known = known.reshape(-1, self.k, 2)    # ids below 2**53 are exact
        tokens, logprobs = known[..., 0].long(), known[..., 1]
        require((tokens < self.rows).all(), f"--teacher_url: names a token above the student's "
                f"{self.rows:,}: serve a model of as many rows")
        rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=0).log()
        both, device = torch.cat([logprobs, rest], 1).clamp(min=FLOOR), batch.input_ids.device
        return (tokens.to(device), both.to(device)), None


# ---- --keep: chats whose answers are to stay as the untouched base makes them


class Keeper:
    """Every --keep_every steps all ranks take packs of --keep besides, the number that a step has,
    and the loss is that step's plus --keep_weight x KL(base, student), averaged over the tokens of
    those answers. Their order is a function of seed and step. The base reads what the student does.
    """

    def __init__(self, args, world, table, model):
        """table: ChatTable. model: what training calls."""
        self.args, self.world, self.model, self.table = args, world, model, table
        self.order = PackOrder(table.lengths, tokens_per_pack=args.max_tokens_per_batch,
                               samples_per_pack=args.per_device_train_batch_size, seed=args.seed)

    def learn(self, step, scale, log):
        """Add gradients to those of step + 1, if it is time, and log the loss. Collective."""
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
            # the step's own are summed already: an average leaves what all ranks have alike
            with dist.gradient_sync(self.model, micro == accumulation - 1):
                with dist.autocast(self.world.device, causal_lm.half_dtype(self.args)):
                    loss = self.model(batch).loss
                (loss * (size * self.args.keep_weight / targets * scale)).backward()
            total += loss.detach()
        total = dist.all_reduce(self.world, total).item()
        if log:
            log.write(step + 1, {"train/keep_kl": total / targets})
