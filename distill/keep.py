"""Chats whose answers are to stay as the untouched base makes them: --keep FILE of train_sft.py.

Every --keep_every steps all ranks take packs of them besides, as many as a step has, and the loss
is that step's plus --keep_weight x KL(base, student), averaged over the tokens of those answers.
Their order is a function of seed and step, so it is the same on any number of ranks and after a
stop. The base reads what the student reads.
"""
from dataclasses import replace
from pathlib import Path

import torch

from core import dist
from core.packing import PackOrder
from distill.causal_lm import half_dtype
from distill.chat_data import ChatSamples, collate, prepare_table


def read(args, world, work_dir, reading):
    """ChatTable of --keep. reading: of the training data. Raises UserError."""
    own = reading._replace(prompt=None, behind=None)
    return prepare_table(world, Path(work_dir) / "keep", [args.keep], own)[0]


def kept(samples):
    """PackedChats of samples that student and untouched base read alike."""
    batch = collate(samples)
    return replace(batch, kept=True, prompted_ids=batch.input_ids,
                   prompted_positions=batch.position_ids, prompted_cu_seqlens=batch.cu_seqlens,
                   prompted_rows=batch.rows, prompted_longest=batch.longest)


class Keeper:
    """table: of read. model: what training calls."""

    def __init__(self, args, world, table, model):
        self.args, self.world, self.model, self.table = args, world, model, table
        self.samples = ChatSamples(table)
        self.order = PackOrder(table.lengths, tokens_per_pack=args.max_tokens_per_batch,
                               samples_per_pack=args.per_device_train_batch_size, seed=args.seed)

    def learn(self, step, scale):
        """Add gradients to a step's, if it is time -> {name: value} to log, or {}. Collective."""
        if step % self.args.keep_every:
            return {}
        accumulation, size = self.args.gradient_accumulation_steps, self.world.size
        per_step = accumulation * size
        an_epoch = -(-self.order.packs_per_epoch // per_step)
        epoch, turn = divmod(step // self.args.keep_every, an_epoch)
        window = self.order.window(epoch, turn * per_step, per_step)
        targets = int(self.table.targets[window].sum())
        plan, total = self.order.epoch(epoch), torch.zeros((), device=self.world.device)
        for micro in range(accumulation):
            pack = plan.pack(turn * per_step + micro * size + self.world.rank)
            batch = kept([self.samples[int(i)] for i in pack]).to(self.world.device)
            # the step's own are summed already: an average leaves what all ranks have alike
            with dist.gradient_sync(self.model, micro == accumulation - 1):
                with dist.autocast(self.world.device, half_dtype(self.args)):
                    loss = self.model(batch).loss
                (loss * (size * self.args.keep_weight / targets * scale)).backward()
            total += loss.detach()
        return {"train/keep_kl": dist.all_reduce(self.world, total).item() / targets}
