"""The student's own answers, to be learned from: drawn from its softmax, scored by its teacher.

Each draw has a seed of (run, step, sample), so a resumed run draws the same answers from the same
weights. They are drawn here, by transformers' generate, each rank for itself (under FSDP2 the
weights are gathered for that time); or with --base_url by vLLM's server, which gets the adapters of
the step under a name of their own, since what it has cached of a prompt belongs to a name:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --max-lora-rank 32

Prompts go there and answers come back as ids: a text has several, and only those that were drawn
have the student's probabilities.
"""
import contextlib
import os
import shutil
import time
import uuid
from pathlib import Path

import numpy as np
import torch

from core import checkpoint, dist, tensor_io
from core.cli import require
from core.dist import gathered
from distill.causal_lm import Draw, generate, half_dtype
from distill.chat_data import collate
from distill.server import MALFORMED, NOT_SET, Server


def draw_of(seed, step, number):
    """numpy's generator of one sample at one step."""
    return np.random.default_rng((seed, step, number, 3))


def last_answer(trained):
    """Place of the first token of the last trained turn. trained (n,) bool."""
    places = np.flatnonzero(trained)
    gaps = np.flatnonzero(np.diff(places) > 1)
    return int(places[gaps[-1] + 1] if len(gaps) else places[0])


def own_answers(args, world, model, table, batches, ends, step, sampler=None):
    """(PackedChats of the same samples with the student's answers in a share of them, targets of
    all ranks). Collective. An answer that is cut off at --max_new_tokens is trained as far as it
    goes. batches: this rank's of the step. ends: ids that end an answer. sampler: Sampler or None.
    """
    made, rows = [], [[table[i] for i in batch.samples] for batch in batches]
    chosen = [(b, r) for b, found in enumerate(rows) for r, sample in enumerate(found)
              if draw_of(args.seed, step, sample[0]).random() < args.on_policy]
    prompts = []        # of student and teacher
    for b, r in chosen:
        _, ids, trained, own = rows[b][r]
        prompts.append([side[:last_answer(mask)] for side, mask in (
            (ids[:own], trained[:own]), (ids[own:], trained[own:]))])
    limit = min(getattr(net.native.config, "max_position_embeddings", None) or 1 << 30
                for net in (model, *model.frozen.values()) if hasattr(net, "native"))
    room = [min(args.max_new_tokens, limit - max(map(len, pair))) for pair in prompts]
    seeds = [int(draw_of(args.seed, step, rows[b][r][0]).integers(2**31)) for b, r in chosen]
    if sampler:
        sampler.refresh(model, step)
        made = sampler.draw([own for own, _ in prompts], seeds, room, ends)
    else:
        together = max(1, *map(len, rows))
        with gathered(model):
            for start in range(0, len(chosen), together):
                part = slice(start, start + together)
                made += draw(model.native, [own for own, _ in prompts[part]], seeds[part],
                             min(room[part]), ends, args)
    for (b, r), (own, behind), answer in zip(chosen, prompts, made):
        ids = np.concatenate([own, answer, behind, answer])
        trained = np.zeros(len(ids), bool)
        trained[len(own):len(own) + len(answer)] = trained[len(ids) - len(answer):] = True
        rows[b][r] = rows[b][r][0], ids, trained, len(own) + len(answer)
    found = [collate(part, prompted=True).to(world.device) for part in rows]
    targets = sum(batch.counts["targets"] for batch in found)
    return found, dist.all_reduce(world, torch.tensor(float(targets), device=world.device)).item()


def draw(model, prompts, seeds, tokens, ends, args):
    """[ids (n,) of an answer], the token that ends it included, drawn at temperature 1."""
    training, attention = model.training, model.config._attn_implementation
    device = model.get_input_embeddings().weight.device
    model.eval()
    model.config._attn_implementation = "sdpa"      # the packed one has no cache
    try:
        with dist.autocast(device, half_dtype(args)):
            answers = generate(model, prompts, tokens, ends, [Draw(seeds)])
    finally:
        model.config._attn_implementation = attention
        model.train(training)
    return [np.array(ids) for ids in answers]


# ---- vLLM's server


class Sampler:
    """draw(...) asks the server for answers by the adapters of the last refresh(...)."""

    def __init__(self, args, world):
        """Collective. args: base_url, output_dir, which the server reads, request_timeout."""
        self.world, self.server = world, Server(args.base_url, args.request_timeout)
        self.folder, self.name = Path(os.path.abspath(args.output_dir)) / "served", None

        def begin():        # the server answers; what an earlier run has left goes
            self.server.wait(self.server.insist("/models"))
            self.folder.mkdir(exist_ok=True)
            checkpoint.remove_named(self.folder, r"student-[0-9a-f]{8}-\d+")    # of refresh()
            return uuid.uuid4().hex[:8]
        self.run = dist.rank0(world, begin)

    def refresh(self, model, step):
        """Have the server answer by a PackedLM's adapters of now. Collective."""
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
            end = time.monotonic() + 2 * self.server.timeout        # of both: other ranks wait
            for call, body in (("load", {"lora_name": self.name, "lora_path": str(folder)}),
                               ("unload", {"lora_name": before}))[:2 if before else 1]:
                self.server.wait(self.server.insist(
                    f"/{call}_lora_adapter", body, bytes, "; it needs --enable-lora, "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, a --max-lora-rank of at least "
                    "--lora_rank, and to read --output_dir", end))
            if before:
                shutil.rmtree(self.folder / before, ignore_errors=True)
        dist.rank0(self.world, load)

    def draw(self, prompts, seeds, limits, ends):
        """[ids] of an answer to each prompt (ids), its end included, of at most limits[i]."""
        # the draw is from the softmax, whatever the model's generation_config says; `ends` alone
        # end an answer
        drawing = {**NOT_SET, "model": self.name, "temperature": 1.0, "top_p": 1.0,
                   "return_token_ids": True, "stop_token_ids": [int(token) for token in ends],
                   "ignore_eos": True, "skip_special_tokens": False}
        end = time.monotonic() + 2 * self.server.timeout        # of them all

        async def ask(i):
            found = await self.server.insist("/completions", {
                **drawing, "prompt": [int(token) for token in prompts[i]], "max_tokens": limits[i],
                "seed": seeds[i]}, end=end)
            ids = ()
            with contextlib.suppress(*MALFORMED):
                ids = found["choices"][0]["token_ids"]
            require(isinstance(ids, list) and all(type(token) is int for token in ids)
                    and 0 < len(ids) <= limits[i], f"--base_url {self.server.url}/completions: "
                    f"gave no token_ids of 1 to {limits[i]} tokens; vLLM's server does")
            return ids
        found = dict(self.server.each(ask, range(len(prompts))))
        return [found[i] for i in range(len(prompts))]
