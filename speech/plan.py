"""--dry_run and --auto of the speech trainer, for core/memory.py. Nothing is loaded or encoded."""
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from core import memory as plans
from core.packing import PackOrder
from speech import v2, weights
from speech.codes import FRAME_RATE
from speech.dataset import samples_line
from speech.labels import PackedBatch, step_work

SHARE = {True: 0.70, False: 0.72}   # {LoRA: share of the matrix rate that a step reaches by count}


class Data(NamedTuple):
    """Trained, validated and spoken samples."""
    table: object           # dataset.SampleTable, whose new clips are not encoded
    ids: object             # labels.TokenIds
    train: np.ndarray       # numbers of samples
    held_out: np.ndarray
    prompts: object = None  # speak.Speaker
    keeper: object = None   # keep.Keeper


def rows_by_kind(table, ids):
    """(n, 4) int64 rows of each sample: text, audio, audio that predicts, text that predicts."""
    places = table.tokens == ids.audio_placeholder_id
    trained = table.labelled[places]            # of each clip, in the order of table.clips
    sample = np.repeat(np.arange(len(table)), np.diff(table.clip_offsets))
    frames = table.where[table.clips, 2]
    counts = ids.rows(frames, trained), np.where(trained, ids.predictions(frames), 0)
    audio, predicting = (np.bincount(sample, count, minlength=len(table)) for count in counts)
    kinds = table.lengths - audio, audio, predicting, table.text_targets
    return np.stack(kinds, axis=1).astype(np.int64)


def worst(order, epochs, rows, budget=0):
    """(text, audio, audio rows, text rows) of the largest pack, padded with text up to the budget,
    with the most of any pack to predict."""
    packs = np.stack([plans.pack_sums(order, epochs, kind) for kind in rows.T], axis=1)
    packs[:, 0] = np.maximum(packs[:, 0], budget - packs[:, 1])
    text, audio, *_ = packs[packs[:, :2].sum(1).argmax()].tolist()
    return text, audio, *packs[:, 2:].max(0).tolist()


def kept_rows(keeper):
    """rows_by_kind of --keep, each as long as its speech may be."""
    most = keeper.settings.max_new_tokens
    return np.array([[sum(~p.is_audio), sum(p.is_audio) + most, most, 0] for p in keeper.prompts])


def loss(model, text, audio, audio_rows, text_rows, keep=False):
    """Loss of a weights.packed on a pack of this many rows. keep: of --keep."""
    def numbers(*shape):
        return torch.zeros(shape, dtype=torch.int64)
    rows, books = text + audio, model.base_model.config.num_codebooks
    batch = PackedBatch(
        input_ids=numbers(rows), position_ids=numbers(rows), cu_seqlens=numbers(2).int(),
        audio_ids=numbers(audio, books), audio_pos=numbers(audio), text_pos=numbers(text),
        seq_index=numbers(rows), audio_rows=numbers(audio_rows),
        audio_targets=numbers(audio_rows, books), text_rows=numbers(text_rows),
        text_targets=numbers(text_rows), longest=rows, seqlens=(rows,), samples=(), counts={})
    return model(batch, keep=True).sum() if keep else sum(part.sum() for part in model(batch)[:2])


def layers_of(model):
    return weights.module(model.base_model.config).layers(model.base_model)


def step_of(model):
    return plans.Step(model, layers_of, loss, ((v2, "_attention_by_sample", plans.varlen),))


def speaking_bytes(native, setup, speaker):
    """Bytes of a batch of sample prompts: keys, values, and whole weights to compute on."""
    from speech.speak import BATCH
    config, value = native.config, 2 if setup.bf16 else 4
    rows = max(len(prompt.tokens) for prompt in speaker.prompts) + speaker.settings.max_new_tokens
    row = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * value
    # gathered shards; under DDP autocast's copies of weights in fp32
    whole = sum(p.numel() for p in native.parameters()
                if setup.fsdp or p.dtype == torch.float32 and setup.bf16) * value
    return min(len(speaker.prompts), BATCH) * rows * row + whole


def memory(args, model, setup, data, order, epochs=range(1)):
    """(memory.Memory, tokens of the worst pack) of some epochs. model: empty."""
    rows, held_out = rows_by_kind(data.table, data.ids), None
    if len(data.held_out):
        held_out = worst(PackOrder(data.table.lengths[data.held_out], shuffle=False,
                                   samples_per_pack=args.per_device_eval_batch_size), [0],
                         rows[data.held_out])
    packs = [worst(order, epochs, rows[data.train], setup.budget)]
    if data.keeper:
        kept = kept_rows(data.keeper)
        order = PackOrder(kept[:, :2].sum(1), tokens_per_pack=setup.budget,
                          samples_per_pack=setup.batch_size, seed=args.seed)
        packs.append((*worst(order, range(20), kept, setup.budget), True))
    found, pack = max(((plans.estimate(step_of(model), setup, pack, held_out), pack)
                       for pack in packs), key=lambda one: one[0].peak)
    if speakers := [speaker for speaker in (data.prompts, data.keeper) if speaker]:
        state = sum(found.parts[name] for name in ("weights", "gradients", "optimizer", "fixed"))
        found.stages["speaking samples"] = state + max(
            speaking_bytes(model.base_model, setup, speaker) for speaker in speakers)
    return found, pack[0] + pack[1]


def choose(args, world, ranks, model, data):
    """--auto: set the open flags; returns whether the model has to be built again."""
    longest = int(kept_rows(data.keeper)[:, :2].sum(1).max()) if data.keeper else 0
    return plans.choose_packs(
        args, world, ranks, data.table.lengths[data.train],
        lambda setup, order: memory(args, model, setup, data, order)[0], longest)


def print_all(args, ranks, model, data, order, step, total_steps, steps_per_epoch, lines):
    """Print the plan of a dry run. step: first one. lines: on steps, intervals, start."""
    setup, table, left = plans.setup_of(args, ranks), data.table, total_steps - step
    found, tokens = memory(args, model, setup, data, order, range(min(20, args.num_train_epochs)))
    lengths, new = table.lengths[data.train], table.where[:, 0] < 0
    new_frames = int(table.where[new, 2].sum())
    share, epoch_steps = args.warmup_steps / max(1, total_steps), -(
        -order.packs_per_epoch // (ranks * setup.accumulation))
    work = step_work(model.base_model.config, table, data.train, args.use_lora)
    flops = work["flops"] * left / steps_per_epoch / ranks / SHARE[args.use_lora or args.freeze_llm]
    steps, intervals, start = lines
    plans.print_plan(args, setup, found, f"{tokens:,} tokens", model.base_model, [
        *plans.data_lines(args, setup, model.base_model, order, lengths),
        samples_line(table, data.train, data.held_out),
        f"audio      {len(table.where):,} distinct clips, {new.sum():,} still to be encoded "
        f"({new_frames / FRAME_RATE / 3600:.2f} h)",
        f"{steps}warm-up {args.warmup_steps} steps, {share * 100:.0f}% of the run", intervals,
        f"batch      {len(lengths) / epoch_steps:,.1f} samples a step, about "
        f"{lengths.sum() / epoch_steps:,.0f} tokens, "
        f"{table.frames[data.train].sum() / FRAME_RATE / epoch_steps:,.0f} s of audio", start],
        left, 0 if args.float8 else flops,
        [lambda: plans.check_disk(args.code_cache or Path(args.output_dir) / "codes",
                                  new_frames * 2 * data.ids.num_codebooks, "codes of new clips")])
