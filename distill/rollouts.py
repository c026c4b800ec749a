"""The student's own answers, to be learned from: drawn from its softmax, scored by its teacher.

Each draw has a seed of (run, step, sample), so a resumed run draws the same answers from the same weights. Generation
is transformers' own, each rank for itself: under FSDP2 the weights are gathered for that time.
"""
import numpy as np
import torch

from common import distributed, run
from common.gathered import gathered
from distill.chat_data import ChatSamples, collate
from distill.generate import Draw, generate


def draw_of(seed, step, number):
    """numpy's generator of one sample at one step."""
    return np.random.default_rng((seed, step, number, 3))


def last_answer(trained):
    """Place of the first token of the last trained turn. trained (n,) bool."""
    places = np.flatnonzero(trained)
    gaps = np.flatnonzero(np.diff(places) > 1)
    return int(places[gaps[-1] + 1] if len(gaps) else places[0])


def own_answers(args, world, model, table, batches, ends, step, sampler=None):
    """(PackedChats of the same samples with the student's answers in a share of them, targets of all ranks).

    args: its on_policy, the chance of a sample, max_new_tokens of an answer (one that is cut off there is trained as
    far as it goes), seed, bf16 and fp16. batches: this rank's of the step. ends: ids that end an answer. sampler:
    served.Sampler of a server that draws, or None. On every rank at once.
    """
    samples, made = ChatSamples(table), []
    rows = [[samples[i] for i in batch.samples] for batch in batches]
    chosen = [(b, r) for b, found in enumerate(rows) for r, sample in enumerate(found)
              if draw_of(args.seed, step, sample[0]).random() < args.on_policy]
    prompts = []        # of student and teacher
    for b, r in chosen:
        _, ids, trained, own = rows[b][r]
        prompts.append((ids[:own][:last_answer(trained[:own])], ids[own:][:last_answer(trained[own:])]))
    nets = [net for net in (model, *model.frozen.values()) if hasattr(net, "native")]
    limit = min(getattr(net.native.config, "max_position_embeddings", None) or 1 << 30 for net in nets)
    tokens = args.max_new_tokens
    seeds = [int(draw_of(args.seed, step, rows[b][r][0]).integers(2**31)) for b, r in chosen]
    if sampler:
        sampler.refresh(model, step)
        room = [min(tokens, limit - max(map(len, pair))) for pair in prompts]
        made = sampler.draw([own for own, _ in prompts], seeds, room, ends)
    else:
        together = max(1, *map(len, rows))
        with gathered(model):
            for start in range(0, len(chosen), together):
                part = slice(start, start + together)
                room = limit - max(len(ids) for pair in prompts[part] for ids in pair)
                made += draw(model.native, [own for own, _ in prompts[part]], seeds[part], min(tokens, room),
                             ends, args)
    for (b, r), (own, behind), answer in zip(chosen, prompts, made):
        ids = np.concatenate([own, answer, behind, answer])
        trained = np.zeros(len(ids), bool)
        trained[len(own):len(own) + len(answer)] = trained[len(ids) - len(answer):] = True
        rows[b][r] = rows[b][r][0], ids, trained, len(own) + len(answer)
    found = [collate(part, prompted=True).to(world.device) for part in rows]
    targets = torch.tensor(float(sum(batch.counts["targets"] for batch in found)), device=world.device)
    return found, distributed.all_sum(world, targets).item()


def draw(model, prompts, seeds, tokens, ends, args):
    """[ids (n,) of an answer], the token that ends it included, drawn at temperature 1 from the ids of each prompt."""
    training, attention = model.training, model.config._attn_implementation
    device = model.get_input_embeddings().weight.device
    model.eval()
    model.config._attn_implementation = "sdpa"      # the packed one has no cache
    try:
        with run.autocast(args, device):
            answers, _ = generate(model, prompts, tokens, ends, [Draw(seeds)])
    finally:
        model.config._attn_implementation = attention
        model.train(training)
    return [np.array(ids) for ids in answers]
