"""--dry_run and --auto of the speech trainer: no weights are loaded and nothing is encoded."""
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common import plan, step_memory
from core.problems import collect
from core.packing import PackOrder
from speech.codes import FRAME_RATE
from speech.dataset import samples_line
from speech import v2, versions
from speech.labels import PackedBatch
from speech.loss import step_work

# {with adapters: the most of plan.RATES that a step reaches by count}; docs/speed.md has the steps
SHARES = {True: (0.70, 0.90), False: (0.72, 0.88)}


class Data(NamedTuple):
    """What is trained, validated and spoken."""
    table: object           # dataset.SampleTable, whose new clips are not encoded
    ids: object             # labels.TokenIds
    train: np.ndarray       # numbers of samples
    held_out: np.ndarray
    speakers: list          # sample_prompts.Speaker and keep.Keeper, where there are such
    keeper: object = None   # the latter


def rows_by_kind(table, ids):
    """(n, 4) int64 rows of each sample: text, audio, and those of audio and text that predict."""
    n = len(table)
    places = table.tokens == ids.audio_placeholder_id
    trained = table.labelled[places]            # of each clip, in the order of table.clips
    sample = np.repeat(np.arange(n), np.diff(table.clip_offsets))
    frames = table.where[table.clips, 2]
    rows, predicting = ids.rows(frames, trained), np.where(trained, ids.predicting(frames), 0)
    audio, audio_rows = (np.bincount(sample, found, minlength=n) for found in (rows, predicting))
    kinds = table.lengths - audio, audio, audio_rows, table.text_targets
    return np.stack(kinds, axis=1).astype(np.int64)


def packs_of(order, epochs, rows, budget=0):
    """(packs, 4) rows of some epochs' packs, padded with text up to the budget."""
    packs = np.stack([plan.epoch_sums(order, epochs, kind) for kind in rows.T], axis=1)
    packs[:, 0] = np.maximum(packs[:, 0], budget - packs[:, 1])
    return packs


def worst(packs):
    """(text, audio, audio rows, text rows) of the largest pack, with the most to predict."""
    text, audio, *_ = packs[packs[:, :2].sum(1).argmax()].tolist()
    return text, audio, *packs[:, 2:].max(0).tolist()


def kept_rows(keeper):
    """rows_by_kind of --keep, each as long as its speech may be."""
    most = keeper.settings.max_new_tokens
    return np.array([[sum(~p.is_audio), sum(p.is_audio) + most, most, 0] for p in keeper.prompts])


def loss(model, text, audio, audio_rows, text_rows, keep=False):
    """A versions.packed's loss of a pack of so many rows. keep: of --keep."""
    def numbers(*shape):
        return torch.zeros(shape, dtype=torch.int64)
    rows, books = text + audio, model.base_model.config.num_codebooks
    batch = PackedBatch(
        input_ids=numbers(rows), position_ids=numbers(rows), cu_seqlens=numbers(2).int(),
        audio_ids=numbers(audio, books), audio_pos=numbers(audio), text_pos=numbers(text),
        seq_index=numbers(rows), audio_rows=numbers(audio_rows),
        audio_targets=numbers(audio_rows, books), text_rows=numbers(text_rows),
        text_targets=numbers(text_rows), longest=rows, seqlens=(rows,), samples=(), counts={})
    if keep:
        return model(batch, keep=True).sum()
    of_audio, of_text, _ = model(batch)
    return of_audio.sum() + of_text


def layers_of(model):
    """The decoder layers of a versions.packed."""
    native = model.base_model
    return versions.module(native.config).layers(native)


def step_of(model):
    """step_memory.Step of a versions.packed; equal for one model, so that its validation is run once."""
    return step_memory.Step(model, layers_of, loss, ((v2, "_attention_by_sample", step_memory.varlen),))


def speaking_bytes(native, setup, speaker):
    """What a batch of sample prompts takes: keys, values, and whole weights to compute on."""
    from speech.sample_prompts import BATCH
    config, value = native.config, 2 if setup.bf16 else 4
    rows = max(len(prompt.tokens) for prompt in speaker.prompts) + speaker.settings.max_new_tokens
    row = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * value
    # whoever has shards of them; under DDP autocast's copies of those in fp32
    whole = sum(p.numel() for p in native.parameters()
                if setup.fsdp or p.dtype == torch.float32 and setup.bf16) * value
    return min(len(speaker.prompts), BATCH) * rows * row + whole


def memory(args, model, setup, data, order, epochs=range(1)):
    """(step_memory.Memory, (packs, 4) rows, tokens of the worst) of some epochs. model: empty."""
    rows, held_out = rows_by_kind(data.table, data.ids), None
    packs = packs_of(order, epochs, rows[data.train], setup.budget)
    if len(data.held_out):
        order = PackOrder(data.table.lengths[data.held_out], shuffle=False,
                          samples_per_pack=args.per_device_eval_batch_size)
        held_out = worst(packs_of(order, [0], rows[data.held_out]))
    tokens = packs[:, :2].sum(1).max()
    found = step_memory.estimate(step_of(model), setup, worst(packs), held_out)
    if data.keeper:
        rows = kept_rows(data.keeper)
        order = PackOrder(rows[:, :2].sum(1), tokens_per_pack=setup.budget,
                          samples_per_pack=setup.batch_size, seed=args.seed)
        kept = (*worst(packs_of(order, range(20), rows, setup.budget)), True)
        other = step_memory.estimate(step_of(model), setup, kept, held_out)
        if other.peak > found.peak:
            found, tokens = other, sum(kept[:2])
    if data.speakers:
        state = sum(found.parts[name] for name in ("weights", "gradients", "optimizer", "fixed"))
        speaking = max(speaking_bytes(model.base_model, setup, one) for one in data.speakers)
        found.stages["speaking samples"] = state + speaking
    return found, packs, tokens


def choose(args, world, ranks, model, data):
    """--auto: set the flags that are open; returns whether the model has to be built anew."""
    longest = int(kept_rows(data.keeper)[:, :2].sum(1).max()) if data.keeper else 0
    return plan.choose_packs(
        args, world, ranks, data.table.lengths[data.train],
        lambda setup, order: memory(args, model, setup, data, order)[0], longest)


def time_text(flops, adapters):
    """The least time of steps of so many FLOPs on each GPU."""
    return plan.time_text(flops, SHARES[adapters])


def print_plan(args, ranks, model, data, order, lines, left, code_cache):
    """Print what a run comes to; UserError with all that it will not fit into.

    model: the empty versions.packed as trained. order: PackOrder. lines: on steps, intervals,
    start. left: steps to go. code_cache: folder of encoded audio.
    """
    setup, table = plan.setup_of(args, ranks), data.table
    lengths, new = table.lengths[data.train], table.where[:, 0] < 0
    new_frames = int(table.where[new, 2].sum())
    epochs = range(min(20, args.num_train_epochs))
    found, packs, tokens = memory(args, model, setup, data, order, epochs)
    per_step = ranks * setup.accumulation
    steps = -(-order.packs_per_epoch // per_step)
    per_pack = len(lengths) / order.packs_per_epoch
    samples = per_step * (per_pack if setup.budget else setup.batch_size)
    seconds = table.frames[data.train].sum() / FRAME_RATE
    average = (f"a pack has on average {per_pack:.1f} samples, {packs[:, 0].mean():,.0f} text and "
               f"{packs[:, 1].mean():,.0f} audio rows")
    print(plan.head_text(setup, model.base_model), samples_line(table, data.train, data.held_out),
          f"audio      {len(table.where):,} distinct clips, {new.sum():,} still to be encoded "
          f"({new_frames / FRAME_RATE / 3600:.2f} h)",
          plan.packs_text(setup, order, lengths, average), *lines[:-1],
          f"batch      {samples:,.1f} samples a step, about {lengths.sum() / steps:,.0f} tokens, "
          f"{seconds / steps:,.0f} s of audio", lines[-1], sep="\n")
    pack, validates = f"{tokens:,} tokens", len(data.held_out) > 0
    saved = plan.checkpoint_bytes(model.base_model, setup.adapters)
    codes = new_frames * 2 * data.ids.num_codebooks
    collect(True, lambda: plan.print_room(args, setup, found, pack, saved, left, validates),
            lambda: plan.check_disk(code_cache, codes, "codes of new clips"))


def print_all(args, ranks, model, data, order, step, total_steps, steps_per_epoch, lines):
    """print_plan of a dry run. step: that it begins with. lines: on steps, intervals, start."""
    steps, intervals, start = lines
    share, left = args.warmup_steps / max(1, total_steps), total_steps - step
    lines = [f"{steps}warm-up {args.warmup_steps} steps, {share * 100:.0f}% of the run", intervals, start]
    if not args.float8:     # faster than the rates that the bound is of
        work = step_work(model.base_model.config, data.table, data.train, args.use_lora)
        flops = work["flops"] * left / steps_per_epoch / ranks
        lines.insert(2, time_text(flops, args.use_lora or args.freeze_llm))
    print_plan(args, ranks, model, data, order, lines, left, args.code_cache or Path(args.output_dir) / "codes")
