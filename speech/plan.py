"""--dry_run: what a run will be and take, printed and checked before it is one; no weights loaded, nothing encoded.

A table without encoding (the counterpart of data.prepare_table and encode.ensure_codes: clips' frames come from
their headers), the report, and all that would stop the run, as one list. Writes nothing but a temporary table.
"""
import functools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, memory, plan, recomputation
from common.packing import PackOrder, pack_order, run_length
from common.parallel import UserError
from speech import higgs, sample_prompts, weights
from speech.codes import FRAME_RATE, SAMPLE_RATE, CacheIndex, codec_fingerprint
from speech.encode import check_encoder, check_length, codec_config
from speech.labels import PackedBatch, token_ids
from speech.table import Table, read_all, samples_line, split_samples, usable_samples

# ---------------------------------------------------------------------------------------------------------------------
# Frames and table without encoding


def wave_samples(frames, rate):
    """Samples at 24 kHz that soxr makes of `frames` samples at `rate` Hz: the exact length, rounded half up."""
    return (2 * frames * SAMPLE_RATE + rate) // (2 * rate)


def codec_frames(samples, config):
    """Codec frames of a waveform of `samples` at 24 kHz; config: of codec_config.

    The semantic branch decides and the acoustic one is padded to fit: 24 -> 16 kHz, 160 zeros at both ends, HuBERT's
    unpadded convolutions, then every semantic_downsample_factor-th vector (transformers' encode).
    """
    n = -(-samples * config.semantic_sample_rate // config.sample_rate) + 2 * 160
    for kernel, stride in zip(config.semantic_model_config.conv_kernel, config.semantic_model_config.conv_stride):
        n = (n - kernel) // stride + 1
    return -(-n // config.semantic_downsample_factor)


def header_frames(path, cuts, config):
    """Codec frames of each cut of a file, from its header alone -> [int]; the counterpart of decode_audio.

    Raises ValueError with the reason. A file damaged behind its header is only found when it is decoded.
    """
    import soundfile
    try:
        if not os.path.getsize(path):
            raise ValueError("is an empty file")
        info = soundfile.info(path)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})")
    except soundfile.SoundFileError as error:
        why = str(error).rpartition(": ")[2].strip().rstrip(".")
        raise ValueError(f"is not readable audio ({why}); wav, flac, mp3 and ogg are read")
    found = []
    for offset, length in cuts:
        start = round((offset or 0) * info.samplerate)
        stop = min(info.frames, start + round(length * info.samplerate)) if length else info.frames
        samples = wave_samples(max(0, stop - start), info.samplerate)
        check_length(samples, offset)
        found.append(codec_frames(samples, config))
    return found


def plan_codes(clips, codec_dir, cache_dir, num_codebooks, problems, processes=0):
    """What ensure_codes would give for clips, without encoding, writing or locking -> (folder, (n, 3) int64).

    The (n, 3) holds -1, -1, frames for a clip that is not cached yet. What cannot be used goes to the list `problems`,
    and has 0 frames.
    """
    config, _ = codec_config(codec_dir, num_codebooks)
    folder = Path(cache_dir) / codec_fingerprint(codec_dir)
    where, unknown = CacheIndex(folder).find_clips(clips, processes)
    files = {}
    for i in unknown[:, 0].tolist():
        files.setdefault(clips[i].path, []).append(i)

    def frames(path):
        try:
            return header_frames(path, [(clips[i].offset, clips[i].duration) for i in files[path]], config)
        except ValueError as error:
            problems.append(f"{path}: {error}")
            return 0

    with ThreadPoolExecutor(16) as pool:        # waits for the file system, not for the processor
        for numbers, values in zip(files.values(), pool.map(frames, files)):
            where[numbers, 2] = values
    return folder, where


@dataclass
class Planned:
    """The data of a run, none of it encoded for it."""
    table: Table
    ids: object                 # data.TokenIds
    train: np.ndarray           # (n,) numbers of the training samples
    held_out: np.ndarray        # (n,) of the validation samples
    new_clips: int              # clips still to be encoded, and their frames
    new_frames: int


def plan_table(args, tokenizer, ids, codec_dir, scratch, problems):
    """prepare_table without encoding -> Planned.

    args: the trainer's flags. scratch: an empty folder for the table's arrays. Bad samples raise UserError, clips that
    cannot be used go to the list `problems`.
    """
    builder, n_train = read_all(args.train_data_file or args.train_data_dir, args.eval_data_file or args.eval_data_dir,
                                tokenizer, ids, args.task_type, args.ref_audio_in_system_message, scratch,
                                args.preprocess_num_proc)
    folder, where = plan_codes(builder.clips, codec_dir, args.code_cache or Path(args.output_dir) / "codes",
                               ids.num_codebooks, problems, args.preprocess_num_proc)
    builder.write(scratch, folder, [], where)
    new = where[:, 0] < 0
    train, held_out = split_samples(n_train, len(builder), 0 if args.disable_eval else args.validation_split, args.seed)
    return Planned(Table(scratch), ids, train, held_out, int(new.sum()), int(where[new, 2].sum()))


def rows_by_kind(table, ids):
    """Rows of each sample -> {"text", "audio", "audio_rows", "text_rows"}: (n,) int64 each, named as in PackedBatch.

    text and audio are all rows of either kind; audio_rows and text_rows those that predict something.
    """
    n = len(table)
    holes = table.tokens == ids.audio
    sample = np.repeat(np.arange(n), np.diff(table.token_offsets))
    trained_clips = np.bincount(sample[holes & table.labelled], minlength=n)
    audio = table.frames + (ids.num_codebooks + 1) * np.diff(table.clip_offsets)
    # codebook k of a clip with T frames is trained on rows k + 1 to k + 1 + T
    audio_rows = table.audio_targets // ids.num_codebooks + (ids.num_codebooks - 1) * trained_clips
    return {"text": table.lengths - audio, "audio": audio, "audio_rows": audio_rows, "text_rows": table.text_targets}


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def row_bytes(model, bf16, sharded, gpu=True):
    """memory.row_bytes of (a text row, an audio row) of a PackedHiggs; bf16, sharded, gpu as there."""
    books = model.base_model.config.num_codebooks

    def inputs(text, audio):
        def numbers(*shape):
            return torch.zeros(shape, dtype=torch.int64)
        rows = text + audio
        return (PackedBatch(input_ids=numbers(rows), position_ids=numbers(rows), cu_seqlens=numbers(2).int(),
                            audio_ids=numbers(audio, books), audio_pos=numbers(audio), text_pos=numbers(text),
                            seq_index=numbers(rows), audio_rows=numbers(0), audio_targets=numbers(0, books),
                            text_rows=numbers(0), text_targets=numbers(0), longest=rows, seqlens=(rows,), samples=(),
                            counts={}),), {}
    return memory.row_bytes(model, model.base_model.model.layers, inputs, 2, bf16=bf16, sharded=sharded, gpu=gpu,
                            plain=[(model, "call", recomputation.caller(None))],
                            kernel=memory.Kernel(higgs, "_attention_by_sample", higgs.VARLEN_GQA, True))


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


def memory_stages(args, model, ranks, packs, eval_packs):
    """(parts, stages, tokens of the worst pack): bytes of one GPU, as memory has them, at the worst pack.

    model: the empty PackedHiggs as trained. packs, eval_packs: of packs_of. parts holds activations and logits as well.
    """
    native, layers = model.base_model, model.base_model.model.layers
    fsdp, recompute, compute = args.parallel == "fsdp", args.gradient_checkpointing, 2 if args.bf16 else 4
    units = memory.unit_sizes(native, layers)
    casts = (0, 0) if fsdp or not args.bf16 else memory.cast_bytes(native, layers, recompute)
    parts = memory.memory_parts(units, world=ranks, sharded=fsdp, offload=args.cpu_offload, compute=compute,
                                reshard=args.reshard_after_forward,
                                casts=casts,
                                accumulation=args.gradient_accumulation_steps)
    row = row_bytes(model, args.bf16, fsdp)
    rows, (kept, layer) = np.stack([packs["text"], packs["audio"]], axis=-1), memory.kept_bytes(
        row, len(layers), recompute)
    logits = logit_bytes(native.config, packs["audio_rows"], packs["text_rows"])[1]
    worst, parts, stages = memory.worst_pack(parts, rows @ kept, rows @ layer, logits, recompute)
    if len(eval_packs["text"]):     # no gradients: one layer's work, and logits beside their log-softmax
        one = np.stack([eval_packs["text"], eval_packs["audio"]], axis=-1) @ row["layer"]
        kept = logit_bytes(native.config, eval_packs["audio_rows"], eval_packs["text_rows"])[0]
        stages["validation"] = stages["the heads"] - parts["activations"] - parts["logits"] + (one + 2 * kept).max()
    if args.sample_prompts:         # whole weights, whoever has shards of them, and the cache of a batch of prompts
        config = native.config
        cache = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * compute
        whole = compute * sum(values for values, _, _ in units) if fsdp else 0
        stages["speaking samples"] = parts["weights"] + parts["optimizer"] + parts["fixed"] + parts["copies"] * (
            not fsdp) + whole + sample_prompts.BATCH * config.max_position_embeddings * cache
    return parts, stages, int(rows[worst].sum())


# ---------------------------------------------------------------------------------------------------------------------
# The report of a dry run


def print_plan(args, ranks, model, data, resume, meta, problems):
    """Print all that a run with these flags comes to; what it will not fit into goes to the list `problems`.

    model: the empty PackedHiggs as trained. data: Planned. resume, meta: of checkpoint.find_resume.
    """
    table, train_ids, eval_ids, native = data.table, data.train, data.held_out, model.base_model
    lengths, accumulation = table.lengths[train_ids], args.gradient_accumulation_steps
    order = pack_order(lengths, tokens_per_pack=args.max_tokens_per_batch, seed=args.seed,
                       samples_per_pack=args.per_device_train_batch_size, group_by_length=args.group_by_length)
    budget, per_step = args.max_tokens_per_batch, ranks * accumulation
    position = {key: meta[key] for key in ("step", "epoch", "first")} if meta else {"step": 0, "epoch": 0, "first": 0}
    steps_per_epoch, total_steps = run_length(order.packs_per_epoch, per_step, args.num_train_epochs, args.max_steps,
                                              position)
    left = max(0, total_steps - position["step"])
    epochs = range(position["epoch"], position["epoch"] + min(20, -(-max(1, left) // steps_per_epoch)))
    rows = rows_by_kind(table, data.ids)
    eval_order = PackOrder(table.lengths[eval_ids], samples_per_pack=args.per_device_eval_batch_size, shuffle=False)
    packs = packs_of(order, epochs, {k: v[train_ids] for k, v in rows.items()}, budget)
    eval_packs = packs_of(eval_order, [0], {k: v[eval_ids] for k, v in rows.items()}, 0)
    parts, stages, tokens = memory_stages(args, model, ranks, packs, eval_packs)
    per_pack = len(train_ids) / order.packs_per_epoch
    samples = per_step * (per_pack if budget else args.per_device_train_batch_size)
    seconds = table.frames[train_ids].sum() / FRAME_RATE / steps_per_epoch
    average = (f"a pack has on average {per_pack:.1f} samples, {packs['text'].mean():,.0f} text and "
               f"{packs['audio'].mean():,.0f} audio rows")
    warmup = f"warm-up {args.warmup_steps} steps, {args.warmup_steps / max(1, total_steps) * 100:.0f}% of the run"
    units = memory.unit_sizes(native, native.model.layers)
    print("\n".join([
        plan.head_text(args.parallel, args.bf16, ranks, units, args.use_lora), samples_line(table, train_ids, eval_ids),
        f"audio      {len(table.where):,} distinct clips, {data.new_clips:,} still to be encoded "
        f"({data.new_frames / FRAME_RATE / 3600:.2f} h)", plan.lengths_text(lengths),
        plan.packs_text(order, lengths, ranks, accumulation, budget, average),
        plan.steps_text(total_steps, steps_per_epoch, ranks, accumulation, warmup),
        f"batch      {samples:,.1f} samples a step, about {lengths.sum() / steps_per_epoch:,.0f} tokens, "
        f"{seconds:,.0f} s of audio", plan.start_text(position["step"], resume)]))
    text = plan.memory_text(parts, stages, f"{tokens:,} tokens", args.parallel, args.bf16, args.gradient_checkpointing,
                            accumulation)
    plan.print_room(problems, args.output_dir, args.parallel, ranks, text, parts, stages,
                    memory.checkpoint_bytes(native, args.use_lora),
                    plan.checkpoints_at_once(left, args.save_steps, args.eval_steps if len(eval_ids) else None,
                                             args.save_total_limit),
                    args.gpu_memory, args.host_memory, plan.helps(args), args.cpu_offload, args.use_lora)
    plan.attempt(problems, plan.check_disk, args.code_cache or Path(args.output_dir) / "codes",
                 data.new_frames * 2 * data.ids.num_codebooks, "codes of new clips")


# ---------------------------------------------------------------------------------------------------------------------
# The dry run


def run(args, ranks, script):
    """Print what this run would be and take on `ranks` GPUs; raise UserError with all that would stop it.

    Of weights and new audio only headers are read; a checkpoint to resume from is read whole, for its checksums. Writes
    nothing but a temporary table. script: the trainer's module, for its model.
    """
    problems = []

    def check(work, *given):        # None where it fails, or where what it needs is None already
        return plan.attempt(problems, work, *given) if all(value is not None for value in given) else None

    cache = args.code_cache or Path(args.output_dir) / "codes"
    check(plan.check_writable, args.output_dir, "--output_dir")
    check(plan.check_writable, cache, "--code_cache")
    check(plan.check_writable, args.logging_dir if args.report_to == "tensorboard" else None, "--logging_dir")
    check(script.check_device, args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    folder, config_dict = check(weights.find_model, args.model_path) or (None, None)
    codec_dir = (check(weights.find_codec, args.audio_tokenizer_path) or [None])[0]
    config, tokenizer = check(weights.native_config, config_dict), check(weights.load_tokenizer, folder)
    ids = check(token_ids, tokenizer, config)
    if args.sample_prompts:     # the whole of it, codec included: a bad prompt would be found at the first validation
        check(sample_prompts.load, args.sample_prompts, args.sample_seconds, tokenizer, ids, config,
              codec_dir, torch.device("cpu"))
    model, native, _ = check(script.empty_trained_model, args, folder, config_dict) or [None] * 3
    with tempfile.TemporaryDirectory() as scratch:
        data = check(plan_table, args, tokenizer, ids, codec_dir, scratch, problems)
        if data and data.new_clips:
            check(check_encoder)
        if not problems:
            data.train, data.held_out = check(functools.partial(
                usable_samples, data.table, data.train, data.held_out, drop=args.drop_too_long,
                max_length=args.max_length or config.max_position_embeddings,
                max_tokens=args.max_tokens_per_batch)) or [None] * 2
        if not problems:
            resume, meta = check(checkpoint.find_resume, args.output_dir, args.resume,
                                 script.run_identity(args, folder, data.table, data.train)) or [None] * 2
            check(script.check_resume, args, model, native, resume)
        if not problems:
            print_plan(args, ranks, model, data, resume, meta, problems)
    if problems:
        raise UserError(plan.all_problems(problems))
    print("dry run ok")
