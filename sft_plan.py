"""Order and number of steps of a fine-tuning run, and --dry_run: what it will be and take, checked before it is one.

Copy with it: chat.py, chat_table.py, sft_model.py, packing.py, preflight.py and what those name.
"""
import tempfile
from pathlib import Path

import numpy as np
import torch

import causal_lm
import chat
import chat_table
import checkpoint
import distill
import preflight
import sft_model
from packing import PackOrder
from parallel import UserError


def encoder_of(args, tokenizer):
    """chat.Encoder as the flags want it."""
    thinking = {"template": None, "true": True, "false": False}[args.enable_thinking]
    return chat.Encoder(tokenizer, args.train_turns, thinking)


def teacher_of(args, tokenizer):
    """A fresh distill.Alternatives as the flags want it, or None."""
    return distill.Alternatives(tokenizer, args.distill_topk) if args.distill_topk else None


def pack_order(args, lengths):
    """PackOrder of the training samples. lengths: (n,) tokens."""
    return PackOrder(lengths, seed=args.seed, tokens_per_pack=args.max_tokens_per_batch,
                     samples_per_pack=0 if args.max_tokens_per_batch else args.per_device_train_batch_size)


def run_length(args, order, per_step, position):
    """(optimizer steps an epoch, of the whole run). per_step: packs a step; position: to start from."""
    steps_per_epoch = -(-order.packs_per_epoch // per_step)
    left = -(-max(0, order.packs_per_epoch - position["first"]) // per_step)
    left += (args.num_train_epochs - position["epoch"] - 1) * steps_per_epoch
    return steps_per_epoch, args.max_steps or position["step"] + max(0, left)


def samples_line(table, train_ids, eval_ids):
    """How many samples, how long, how much of them is trained."""
    lengths, targets = table.lengths[train_ids], table.targets[train_ids]
    return (f"samples    {len(train_ids)} to train, {len(eval_ids)} to validate; tokens mean {lengths.mean():.1f} "
            f"max {lengths.max()}; {targets.mean():.1f} of them trained")


# ---------------------------------------------------------------------------------------------------------------------
# The dry run


def checkpoint_bytes(args, native):
    """(weights, optimizer) of one checkpoint. native: the empty model as trained, adapters inside."""
    trained = [parameter for parameter in native.parameters() if parameter.requires_grad]
    weights = sum(parameter.nbytes for parameter in (trained if args.use_lora else native.parameters()))
    return weights, 8 * sum(parameter.numel() for parameter in trained)


def unit_sizes(native):
    """[(values, stored bytes, trained values)] of everything outside the layers first, then of each layer."""
    def size(parameters):
        sizes = [(p.numel(), p.nbytes, p.numel() * p.requires_grad) for p in parameters]
        return [sum(column) for column in zip(*sizes)]
    layers = [size(layer.parameters()) for layer in causal_lm.decoder_layers(native)]
    return [[whole - sum(part) for whole, part in zip(size(native.parameters()), zip(*layers))], *layers]


def print_plan(args, ranks, model, native, table, train_ids, eval_ids, resume, meta, problems):
    """Print all that a run with these flags comes to; what will not fit on the disk goes to the list `problems`."""
    lengths, accumulation = table.lengths[train_ids], args.gradient_accumulation_steps
    order, per_step = pack_order(args, lengths), ranks * accumulation
    position = {key: meta[key] for key in ("step", "epoch", "first")} if meta else {"step": 0, "epoch": 0, "first": 0}
    steps_per_epoch, total_steps = run_length(args, order, per_step, position)
    tokens = preflight.pack_sums(order.epoch(0), lengths)
    report = preflight.packing_report(tokens, ranks, accumulation, args.max_tokens_per_batch)
    units, fsdp = unit_sizes(native), args.parallel == "fsdp"
    values, _, trained = (sum(column) for column in zip(*units))
    casts = 0 if fsdp or not args.bf16 else 2 * sum(p.numel() for p in native.parameters()
                                                    if p.dtype == torch.float32 and p.ndim > 1)
    parts = preflight.memory_parts(units, world=ranks, sharded=fsdp, offload=args.cpu_offload,
                                   reshard=args.reshard_after_forward, compute=2 if args.bf16 else 4, casts=casts,
                                   whole=fsdp and accumulation > 1)
    rows = int(preflight.pack_sums(order.epoch(0), table.targets[train_ids]).max())
    parts["logits"] = 3 * 4 * min(rows, model.chunk) * native.config.vocab_size     # fp32, log-softmax, gradient
    names = ("weights", "gradients", "optimizer", "copies", "logits", "fixed")
    notes = {"weights": "a shard" if fsdp else "whole", "gradients": "fp32", "optimizer": "two fp32 moments",
             "copies": "gathered or cast for computing", "logits": "of one piece of the worst pack",
             "fixed": "CUDA context and libraries: a guess"}
    size = sum(checkpoint_bytes(args, native))
    left = max(0, total_steps - position["step"])
    saves = 1 + sum(left // every for every in (args.save_steps, args.eval_steps * bool(len(eval_ids))) if every)
    most = min(saves, args.save_total_limit + 1 + bool(len(eval_ids))) if args.save_total_limit else saves
    have = sum(preflight.folder_bytes(path) for _, path in checkpoint.checkpoints(args.output_dir))
    print(f"plan       {ranks} GPUs, {args.parallel}, {'bf16' if args.bf16 else 'fp32'}\n"
          f"model      {values / 1e6:,.1f} M parameters, {trained / 1e6:,.3f} M trainable "
          f"({'LoRA' if args.use_lora else 'full'}); the weight files have them all\n"
          f"{samples_line(table, train_ids, eval_ids)}\n"
          f"lengths    {lengths.sum():,} tokens an epoch; tokens a sample and how many samples have them:")
    for line in preflight.histogram(np.asarray(lengths)):
        print(f"           {line}")
    print(f"packs      {order.packs_per_epoch:,} an epoch, {len(train_ids) / order.packs_per_epoch:.1f} samples and "
          f"{tokens.mean():,.0f} tokens each on average\n"
          f"           {report['useful'] * 100:.1f}% of slots hold tokens; balance of the ranks (mean over max of "
          f"their slots) {report['balance'] * 100:.0f}%\n"
          f"steps      {total_steps} ({steps_per_epoch} an epoch), {per_step} packs a step = {ranks} ranks x "
          f"{accumulation} micro-steps; peak lr {args.learning_rate:.2e}\n"
          f"start      step {position['step']}, {f'resuming from {resume}' if resume else 'base model'}\n"
          f"memory     of one GPU without activations, which are not estimated")
    for line in preflight.memory_table([*((name, parts[name], notes[name]) for name in names),
                                        ("sum", sum(parts[name] for name in names), "")]):
        print(f"           {line}")
    print(f"disk       {preflight.size(size)} a checkpoint, at most {most} at once: {preflight.size(size * most)}; "
          f"{preflight.size(preflight.free_disk(args.output_dir))} free for --output_dir")
    preflight.attempt(problems, preflight.check_disk, args.output_dir, size * most - have, f"{most} checkpoints")


def dry_run(args, ranks, check_flags):
    """Print what this run would be and take on `ranks` GPUs; raise UserError with all that would stop it.

    Of weights only headers are read; a checkpoint to resume from is read whole, for its checksums. Writes nothing but a
    temporary table. check_flags(args, ranks) is the script's own, and fills in what flags derive.
    """
    problems = []

    def check(work, *given):        # None where it fails, or where what it needs is None already
        return preflight.attempt(problems, work, *given) if all(value is not None for value in given) else None

    check(check_flags, args, ranks)
    flags_fit = not problems or None        # else model and data are not tried with them
    check(preflight.check_writable, args.output_dir, "--output_dir")
    check(preflight.check_writable, args.logging_dir if args.report_to == "tensorboard" else None, "--logging_dir")
    check(sft_model.check_device, args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    folder = check(causal_lm.find_model, args.model_path)
    config = check(causal_lm.load_config, folder)
    tokenizer = check(lambda folder: chat.load_tokenizer(folder, args.chat_template), folder)
    check(sft_model.check_vocabulary, tokenizer, config)
    limit = check(sft_model.length_limit, flags_fit and args, config)
    model, native, _ = check(sft_model.empty_trained_model, flags_fit and args, config and folder) or [None] * 3
    with tempfile.TemporaryDirectory() as scratch:
        encoder = check(encoder_of, flags_fit and args, tokenizer)
        found = check(lambda *given: chat_table.build_table(*given, teacher_of(args, tokenizer)),
                      flags_fit and args, encoder, limit, Path(scratch))
        if not problems:
            n_train, about, _ = found
            table = chat_table.ChatTable(scratch)
            train_ids, eval_ids = check(chat_table.split_samples, args, table, n_train) or [None] * 2
        if not problems:
            resume, meta = check(checkpoint.find_resume, args.output_dir, args.resume,
                                 sft_model.run_identity(args, folder, table, train_ids)) or [None] * 2
            check(sft_model.check_resume, args, model, native, resume)
        if not problems:
            print(about)
            print_plan(args, ranks, model, native, table, train_ids, eval_ids, resume, meta, problems)
    if problems:
        raise UserError(preflight.all_problems(problems))
    print("dry run ok")
