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


def kept_rows(keeper):
    """rows_by_kind of the --keep prompts with the longest speech that they may get."""
    most = keeper.settings.max_new_tokens
    return np.array([[sum(~p.is_audio), sum(p.is_audio) + most, most, 0] for p in keeper.prompts])


def loss(model, text, audio, audio_rows, text_rows, keep=False):
    """Loss of a packed model on a pack of given sizes. keep: of the divergence of --keep."""
    def numbers(*shape):
        return torch.zeros(shape, dtype=torch.int64)
    rows, codebooks = text + audio, model.base_model.config.num_codebooks
    batch = PackedBatch(
        input_ids=numbers(rows), position_ids=numbers(rows), cu_seqlens=numbers(2).int(),
        audio_ids=numbers(audio, codebooks), audio_pos=numbers(audio), text_pos=numbers(text),
        seq_index=numbers(rows), audio_rows=numbers(audio_rows),
        audio_targets=numbers(audio_rows, codebooks), text_rows=numbers(text_rows),
        text_targets=numbers(text_rows), longest=rows, seqlens=(rows,), samples=(), counts={})
    if keep:
        return model(batch, keep=True).sum()
    return sum(losses.sum() for losses in model(batch)[:2])     # of audio and text


def layers_of(model):
    return weights.module(model.base_model.config).layers(model.base_model)


def step_of(model):
    return plans.Step(model, layers_of, loss, ((v2, "_attention_by_sample", plans.varlen),))


def speaking_bytes(native, setup, speaker):
    """Bytes to speak a batch of prompts: keys, values, and whole weights in the compute dtype."""
    from speech.speak import BATCH
    config, width = native.config, 2 if setup.bf16 else 4
    tokens = max(len(prompt.tokens) for prompt in speaker.prompts) + speaker.settings.max_new_tokens
    cache = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * width
    # FSDP2 gathers all weights; under DDP autocast copies those in fp32
    weights = sum(p.numel() for p in native.parameters()
                  if setup.fsdp or p.dtype == torch.float32 and setup.bf16) * width
    return min(len(speaker.prompts), BATCH) * tokens * cache + weights


def memory(args, model, setup, data, order, epochs=range(1)):
    """Memory of the pack with the highest peak in these epochs. model: empty, as trained."""
    rows, held_out = rows_by_kind(data.table, data.ids), None
    if len(data.held_out):
        held_out_order = PackOrder(data.table.lengths[data.held_out], shuffle=False,
                                   samples_per_pack=args.per_device_eval_batch_size)
        held_out = plans.largest_pack(held_out_order, [0], rows[data.held_out], columns=2)
    packs = [plans.largest_pack(order, epochs, rows[data.train], setup.budget, columns=2)]
    if data.keeper:
        kept = kept_rows(data.keeper)
        kept_order = PackOrder(kept[:, :2].sum(1), tokens_per_pack=setup.budget,
                               samples_per_pack=setup.batch_size, seed=args.seed)
        packs.append((*plans.largest_pack(kept_order, range(20), kept, setup.budget, 2), True))
    needed = max((plans.estimate(step_of(model), setup, pack, held_out) for pack in packs),
                 key=lambda needed: needed.peak)
    if speakers := [speaker for speaker in (data.prompts, data.keeper) if speaker]:
        state = sum(needed.parts[name] for name in ("weights", "gradients", "optimizer", "fixed"))
        needed.stages["speaking samples"] = state + max(
            speaking_bytes(model.base_model, setup, speaker) for speaker in speakers)
    return needed


def choose(args, world, ranks, model, data):
    """--auto: set the flags that the user did not give; True if the model must be rebuilt."""
    longest = int(kept_rows(data.keeper)[:, :2].sum(1).max()) if data.keeper else 0
    return plans.choose_packs(
        args, world, ranks, data.table.lengths[data.train],
        lambda setup, order: memory(args, model, setup, data, order), longest)


def print_all(args, ranks, model, data, order, step, total_steps, steps_per_epoch, lines):
    """Print the plan of a run; UserError if it exceeds the memory or a disk.

    model: empty, as trained. order: PackOrder. step: the first one. lines: about steps, intervals,
    start."""
    setup, table, left = plans.setup_of(args, ranks), data.table, total_steps - step
    needed = memory(args, model, setup, data, order, range(min(20, args.num_train_epochs)))
    new = table.where[:, 0] < 0     # clips that are not encoded
    new_frames = int(table.where[new, 2].sum())
    flops = 0
    if not args.float8:
        epoch = step_work(model.base_model.config, table, data.train, args.use_lora)["flops"]
        flops = epoch * left / steps_per_epoch / ranks / SHARE[args.use_lora or args.freeze_llm]
    steps, intervals, start = lines
    plans.print_plan(args, setup, needed, f"{sum(needed.pack[:2]):,} tokens", model.base_model, [
        *plans.data_lines(args, setup, model.base_model, order, table.lengths[data.train]),
        samples_line(table, data.train, data.held_out),
        f"audio      {len(table.where):,} distinct clips, {new.sum():,} still to be encoded "
        f"({new_frames / FRAME_RATE / 3600:.2f} h)",
        f"{steps}warm-up {args.warmup_steps} steps", intervals, start], left, flops)
    plans.check_disk(args.code_cache or Path(args.output_dir) / "codes",
                     new_frames * 2 * data.ids.num_codebooks, "codes of new clips")
