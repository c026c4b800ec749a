"""--dry_run of the speech trainer: what a run will be and take, no weights loaded and nothing encoded."""
import functools

import numpy as np
import torch

from common import document_attention, memory, plan, recomputation
from common.packing import PackOrder
from speech.data.code_cache import FRAME_RATE
from speech.data.dataset import samples_line
from speech.model import v2, v3, versions
from speech.model.labels import PackedBatch
from speech.voice import sample_prompts

# ---------------------------------------------------------------------------------------------------------------------
# Rows


def rows_by_kind(table, ids):
    """Rows of each sample -> {"text", "audio", "audio_rows", "text_rows"}: (n,) int64 each, named as in PackedBatch.

    text and audio are all rows of either kind; audio_rows and text_rows those that predict something.
    """
    n = len(table)
    places = table.tokens == ids.audio_placeholder_id
    trained = table.labelled[places]                                     # of each clip, in the order of table.clips
    sample = np.repeat(np.arange(n), np.diff(table.clip_offsets))
    frames = table.where[table.clips, 2]
    rows, predicting = ids.rows(frames, trained), np.where(trained, ids.predicting(frames), 0)
    audio, audio_rows = (np.bincount(sample, values, minlength=n).astype(np.int64) for values in (rows, predicting))
    return {"text": table.lengths - audio, "audio": audio, "audio_rows": audio_rows, "text_rows": table.text_targets}


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def row_bytes(model, bf16, sharded, gpu=True):
    """memory.row_bytes of (a text row, an audio row) of a models.packed; bf16, sharded, gpu as there."""
    books, layers = model.base_model.config.num_codebooks, versions.layers(model.base_model)

    def inputs(text, audio):
        def numbers(*shape):
            return torch.zeros(shape, dtype=torch.int64)
        rows = text + audio
        return (PackedBatch(input_ids=numbers(rows), position_ids=numbers(rows), cu_seqlens=numbers(2).int(),
                            audio_ids=numbers(audio, books), audio_pos=numbers(audio), text_pos=numbers(text),
                            seq_index=numbers(rows), audio_rows=numbers(0), audio_targets=numbers(0, books),
                            text_rows=numbers(0), text_targets=numbers(0), longest=rows, seqlens=(rows,), samples=(),
                            counts={}),), {}
    if isinstance(model, v3.PackedHiggs3):
        plain = [(layer, "gradient_checkpointing", False) for layer in layers]
        kernel = memory.Kernel(document_attention, "_attention_by_document", document_attention.VARLEN_GQA, True)
    else:
        plain = [(model, "call", recomputation.caller(None))]
        kernel = memory.Kernel(v2, "_attention_by_sample", v2.VARLEN_GQA, True)
    return memory.row_bytes(model, layers, inputs, 2, bf16=bf16, sharded=sharded, gpu=gpu, plain=plain, kernel=kernel)


def logit_bytes(config, audio_rows, text_rows):
    """Bytes of both heads' logits -> (kept from forward to backward, peak). rows: supervised ones, ints or int arrays.

    A head's logits (rows x num_codebooks x codebook_size, or rows x vocab_size) stand in fp32, 4 bytes each, beside
    their log-softmax, which is kept; the backward adds two gradients of that size, the text head's first.
    """
    audio = 4 * audio_rows * config.num_codebooks * config.codebook_size
    text = 4 * text_rows * config.vocab_size
    return audio + text, np.maximum(2 * (audio + text), np.maximum(audio + 3 * text, 3 * audio))


def packs_of(order, epochs, rows, budget):
    """Rows of every pack of the given epochs -> rows_by_kind's dict with (packs,) arrays; budget: padded up to it."""
    packs = {kind: plan.epoch_sums(order, epochs, n) for kind, n in rows.items()}
    packs["text"] = np.maximum(packs["text"], budget - packs["audio"])      # padding is text
    return packs


def memory_stages(setup, model, packs, eval_packs, speaks, row=None):
    """(parts, stages, tokens of the worst pack): bytes of one GPU, as memory has them, at the worst pack.

    setup: plan.Setup. model: the empty models.packed as trained. packs, eval_packs: of packs_of. speaks: whether sample
    prompts are spoken. row: of row_bytes, if it is known. parts holds activations and logits as well.
    """
    native, layers = model.base_model, versions.layers(model.base_model)
    fsdp, recompute, compute = setup.fsdp, setup.recompute, 2 if setup.bf16 else 4
    units = memory.unit_sizes(native, layers)
    casts = (0, 0) if fsdp or not setup.bf16 else memory.cast_bytes(native, layers, recompute,
                                                                    versions.tied_heads(native))
    parts = memory.memory_parts(units, world=setup.shards, sharded=fsdp, offload=setup.offload, reshard=setup.reshard,
                                compute=compute, casts=casts, accumulation=setup.accumulation,
                                **memory.table_of(native))
    row = row or row_bytes(model, setup.bf16, fsdp)
    rows, (kept, layer) = np.stack([packs["text"], packs["audio"]], axis=-1), memory.kept_bytes(
        row, len(layers), recompute)
    logits = logit_bytes(native.config, packs["audio_rows"], packs["text_rows"])[1]
    worst, parts, stages = memory.worst_pack(parts, rows @ kept, rows @ layer, logits, recompute)
    if len(eval_packs["text"]):     # no gradients: one layer's work, and logits beside their log-softmax
        one = np.stack([eval_packs["text"], eval_packs["audio"]], axis=-1) @ row["layer"]
        kept = logit_bytes(native.config, eval_packs["audio_rows"], eval_packs["text_rows"])[0]
        stages["validation"] = stages["the heads"] - parts["activations"] - parts["logits"] + (one + 2 * kept).max()
    if speaks:      # whole weights, whoever has shards of them, and the cache of a batch of prompts
        config = native.config
        cache = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * compute
        whole = compute * sum(values for values, _, _ in units) if fsdp else 0
        stages["speaking samples"] = parts["weights"] + parts["optimizer"] + parts["fixed"] + parts["copies"] * (
            not fsdp) + whole + sample_prompts.BATCH * config.max_position_embeddings * cache
    return parts, stages, int(rows[worst].sum())


def peaks(model, table, ids, train_ids, eval_ids, *, eval_batch_size, speaks):
    """Function of (plan.Setup, PackOrder) -> bytes of one GPU at the peak of the worst pack of the first epoch.

    model, table, ids, ...: of print_plan.
    """
    rows, row_of = rows_by_kind(table, ids), functools.cache(lambda *how: row_bytes(model, *how))
    eval_packs = packs_of(validation_order(table, eval_ids, eval_batch_size), [0],
                          {k: v[eval_ids] for k, v in rows.items()}, 0)

    def peak(setup, order):
        packs = packs_of(order, [0], {k: v[train_ids] for k, v in rows.items()}, setup.budget)
        row = row_of(setup.bf16, setup.fsdp)
        return max(memory_stages(setup, model, packs, eval_packs, speaks, row)[1].values())
    return peak


def validation_order(table, eval_ids, batch_size):
    """PackOrder of the validation samples."""
    return PackOrder(table.lengths[eval_ids], samples_per_pack=batch_size, shuffle=False)


# ---------------------------------------------------------------------------------------------------------------------
# The report of a dry run


def print_plan(check, model, table, ids, train_ids, eval_ids, order, lengths_of_run, at, resume, *, setup, room,
               eval_batch_size, warmup_steps, often, speaks, code_cache):
    """Print all that a run comes to; what it will not fit into is a problem of `check`.

    model: the empty models.packed as trained. table: whose new clips are not encoded. order: PackOrder. lengths_of_run:
    of packing.run_length. at: run.position. setup, room: plan.Setup, plan.Limits. often: of run.intervals. speaks:
    whether sample prompts are spoken. code_cache: folder of encoded audio.
    """
    lengths, native = table.lengths[train_ids], model.base_model
    budget, (steps_per_epoch, total_steps) = setup.budget, lengths_of_run
    left, per_step = max(0, total_steps - at["step"]), setup.ranks * setup.accumulation
    epochs = range(at["epoch"], at["epoch"] + min(20, -(-max(1, left) // steps_per_epoch)))
    rows = rows_by_kind(table, ids)
    eval_order = validation_order(table, eval_ids, eval_batch_size)
    packs = packs_of(order, epochs, {k: v[train_ids] for k, v in rows.items()}, budget)
    eval_packs = packs_of(eval_order, [0], {k: v[eval_ids] for k, v in rows.items()}, 0)
    parts, stages, tokens = memory_stages(setup, model, packs, eval_packs, speaks)
    new = table.where[:, 0] < 0
    new_frames = int(table.where[new, 2].sum())
    per_pack = len(train_ids) / order.packs_per_epoch
    samples = per_step * (per_pack if budget else setup.batch_size)
    seconds = table.frames[train_ids].sum() / FRAME_RATE / steps_per_epoch
    average = (f"a pack has on average {per_pack:.1f} samples, {packs['text'].mean():,.0f} text and "
               f"{packs['audio'].mean():,.0f} audio rows")
    warmup = f"warm-up {warmup_steps} steps, {warmup_steps / max(1, total_steps) * 100:.0f}% of the run"
    units = memory.unit_sizes(native, versions.layers(native))
    print("\n".join([
        plan.head_text(setup, units), samples_line(table, train_ids, eval_ids),
        f"audio      {len(table.where):,} distinct clips, {new.sum():,} still to be encoded "
        f"({new_frames / FRAME_RATE / 3600:.2f} h)", plan.lengths_text(lengths),
        plan.packs_text(setup, order, lengths, average),
        plan.steps_text(total_steps, steps_per_epoch, setup.ranks, setup.accumulation, warmup), often,
        f"batch      {samples:,.1f} samples a step, about {lengths.sum() / steps_per_epoch:,.0f} tokens, "
        f"{seconds:,.0f} s of audio", plan.start_text(at["step"], resume)]))
    text = plan.memory_text(setup, parts, stages, f"{tokens:,} tokens")
    plan.print_room(check, setup, room, text, parts, stages, memory.checkpoint_bytes(native, setup.adapters), left,
                    len(eval_ids))
    check(plan.check_disk, code_cache, new_frames * 2 * ids.num_codebooks, "codes of new clips")
