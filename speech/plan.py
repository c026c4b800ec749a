"""--dry_run and --auto of the speech trainer, for core/memory.py. Nothing is loaded or encoded."""
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from core import memory as plans
from core import metrics
from speech.conversations import FRAME_RATE
from speech.dataset import sums
from speech.labels import step_work

SHARE = 0.7     # of the matrix rate that a step reaches by count


def loss(model, text, audio, audio_rows, text_rows, keep=False):
    """Loss of a packed model on a pack of given sizes. keep: of the divergence of --keep."""
    def numbers(*shape):
        return torch.zeros(shape, dtype=torch.int64)
    rows, codebooks = text + audio, model.base_model.config.num_codebooks
    batch = SimpleNamespace(        # what a model reads of a data.PackedBatch
        input_ids=numbers(rows), position_ids=numbers(rows), cu_seqlens=numbers(2).int(),
        audio_ids=numbers(audio, codebooks), audio_pos=numbers(audio), text_pos=numbers(text),
        seq_index=numbers(rows), audio_rows=numbers(audio_rows),
        audio_targets=numbers(audio_rows, codebooks), text_rows=numbers(text_rows),
        text_targets=numbers(text_rows), longest=rows, seqlens=(rows,))
    losses = [model(batch, keep=True)] if keep else model(batch)[:2]    # of audio and text
    return sum(sums.sum() for sums in losses)


def memory(model, table, ids, train, keeper, args, order):
    """{part: bytes} with the largest pack of an order. model: empty, as trained. table: a
    data.Table, whose new clips are not encoded; ids: labels.TokenIds; train: numbers (n,) of the
    trained samples; keeper: a keep.Keeper or None."""
    trained = table.labelled[table.tokens == ids.audio_placeholder_id]      # of each clip
    predicting = np.where(trained, ids.predictions(table.where[table.clips, 2]), 0)
    text = np.diff(table.token_offsets) - np.diff(table.clip_offsets)
    # text, audio, audio that predicts, text that predicts
    kinds = text, table.lengths - text, sums(predicting, table.clip_offsets), table.text_targets
    rows = np.stack(kinds, axis=1).astype(np.int64)[train]
    pack = plans.largest_pack(order, rows, args.max_tokens_per_batch, columns=2)
    packs = [pack, (*pack, True)] if keeper else [pack]     # --keep's are filled alike
    return plans.estimate(model, loss, args, packs)


def end_dry_run(args, ranks, needed, model, table, ids, train, lines, left, steps_per_epoch):
    """Print the plan of the steps left and exit; UserError if GPU or disks are too small. needed,
    model, table, ids, train: of memory()."""
    new = table.where[:, 0] < 0     # clips that are not encoded
    frames = table.where[new, 2].sum()
    epoch = step_work(model.base_model.config, table, train, args.use_lora)["flops"]
    flops = 0 if args.float8 else epoch * left / steps_per_epoch / ranks / SHARE
    # FLOP/s of large bf16 products, docs/speed.md
    small = plans.gpu_memory(args) <= 24.5 * plans.GIB
    gpu, rate = ("an RTX 3090", 71e12) if small else ("an H200", 790e12)
    time = f" · at least {metrics.duration(flops / rate)} on {gpu}" if flops else ""
    codes = args.code_cache or Path(args.output_dir) / "codes"
    plans.check_disk(codes, 2 * frames * ids.num_codebooks, "codes of new clips")
    if "tensorboard" in args.report_to:
        plans.check_disk(args.logging_dir, 0, "--logging_dir")
    plans.end_dry_run(args, needed, model.base_model, [
        *lines, f"audio      {len(new):,} distinct clips, {new.sum():,} still to be encoded "
        f"({frames / FRAME_RATE / 3600:.2f} h)"], left, time)
