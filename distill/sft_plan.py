"""--dry_run of the chat trainer: what a run will be and take, checked before it is one.
"""
import tempfile
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, memory, plan
from common.packing import pack_order, run_length
from common.parallel import UserError
from distill import chat, packed_lm, topk
from distill import table as chat_table
from distill import weights as causal_lm


def samples_line(table, train_ids, eval_ids):
    """How many samples, how long, how much of them is trained."""
    lengths, targets = table.lengths[train_ids], table.targets[train_ids]
    return (f"samples    {len(train_ids)} to train, {len(eval_ids)} to validate; tokens mean {lengths.mean():.1f} "
            f"max {lengths.max()}; {targets.mean():.1f} of them trained")


# ---------------------------------------------------------------------------------------------------------------------
# Memory

LOGIT_COPIES = {False: 3, True: 5}      # fp32: log-softmax and two gradients; with a teacher also its bucket's two


def row_bytes(model, bf16, sharded, gpu=True):
    """memory.row_bytes of a token of a PackedLM; bf16, sharded, gpu as there."""
    layers = causal_lm.decoder_layers(model.native)

    def inputs(tokens):
        places, none = torch.zeros(tokens, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        teacher = (torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1)) if model.share else ()
        return (chat_table.PackedChats(places, places, places[:2].int(), none, none, tokens, (), {}, *teacher),), {}
    return memory.row_bytes(model, layers, inputs, bf16=bf16, sharded=sharded, gpu=gpu,
                            plain=[(layer, "gradient_checkpointing", False) for layer in layers],
                            kernel=memory.Kernel(packed_lm, "_attention_by_document", packed_lm.VARLEN_GQA, True))


def memory_stages(args, ranks, model, native, tokens, rows):
    """(parts, stages, number of the worst pack): bytes of one GPU, as memory has them, at the worst pack.

    native: the empty model as trained. tokens, rows: (packs,) of each pack, padding included, and trained ones.
    """
    fsdp, recompute, layers = args.parallel == "fsdp", args.gradient_checkpointing, causal_lm.decoder_layers(native)
    casts = (0, 0) if fsdp or not args.bf16 else memory.cast_bytes(native, layers, recompute)
    parts = memory.memory_parts(memory.unit_sizes(native, layers), world=ranks, sharded=fsdp, offload=args.cpu_offload,
                                reshard=args.reshard_after_forward, compute=2 if args.bf16 else 4,
                                casts=casts,
                                accumulation=args.gradient_accumulation_steps)
    kept, layer = memory.kept_bytes(row_bytes(model, args.bf16, fsdp), len(layers), recompute)
    activations = tokens * kept + rows * native.config.hidden_size * (2 if fsdp and args.bf16 else 4)     # of the head
    logits = LOGIT_COPIES[bool(args.distill_topk)] * 4 * np.minimum(rows, model.chunk) * native.config.vocab_size
    worst, parts, stages = memory.worst_pack(parts, activations, tokens * layer, logits, recompute)
    return parts, stages, worst


# ---------------------------------------------------------------------------------------------------------------------
# The dry run


def print_plan(args, ranks, model, native, table, train_ids, eval_ids, resume, meta, problems):
    """Print all that a run with these flags comes to; what it will not fit into goes to the list `problems`."""
    lengths, accumulation = table.lengths[train_ids], args.gradient_accumulation_steps
    budget = args.max_tokens_per_batch
    order = pack_order(lengths, tokens_per_pack=budget, samples_per_pack=args.per_device_train_batch_size,
                       seed=args.seed)
    per_step = ranks * accumulation
    position = {key: meta[key] for key in ("step", "epoch", "first")} if meta else {"step": 0, "epoch": 0, "first": 0}
    steps_per_epoch, total_steps = run_length(order.packs_per_epoch, per_step, args.num_train_epochs, args.max_steps,
                                              position)
    left, epochs = max(0, total_steps - position["step"]), range(min(20, args.num_train_epochs))
    tokens = np.maximum(plan.epoch_sums(order, epochs, lengths), budget)
    rows = plan.epoch_sums(order, epochs, table.targets[train_ids])
    parts, stages, worst = memory_stages(args, ranks, model, native, tokens, rows)
    average = (f"{len(train_ids) / order.packs_per_epoch:.1f} samples and "
               f"{lengths.sum() / order.packs_per_epoch:,.0f} tokens each on average")
    units = memory.unit_sizes(native, causal_lm.decoder_layers(native))
    print("\n".join([
        plan.head_text(args.parallel, args.bf16, ranks, units, args.use_lora), samples_line(table, train_ids, eval_ids),
        plan.lengths_text(lengths), plan.packs_text(order, lengths, ranks, accumulation, budget, average),
        plan.steps_text(total_steps, steps_per_epoch, ranks, accumulation, f"peak lr {args.learning_rate:.2e}"),
        plan.start_text(position["step"], resume)]))
    text = plan.memory_text(parts, stages, f"{tokens[worst]:,} tokens", args.parallel, args.bf16,
                            args.gradient_checkpointing, accumulation,
                            f"one piece of its {rows[worst]:,} trained tokens, at their peak")
    plan.print_room(problems, args.output_dir, args.parallel, ranks, text, parts, stages,
                    memory.checkpoint_bytes(native, args.use_lora),
                    plan.checkpoints_at_once(left, args.save_steps, args.eval_steps if len(eval_ids) else None,
                                             args.save_total_limit),
                    args.gpu_memory, args.host_memory, plan.helps(args), args.cpu_offload, args.use_lora)


def dry_run(args, ranks, trainer):
    """Print what this run would be and take on `ranks` GPUs; raise UserError with all that would stop it.

    Of weights only headers are read; a checkpoint to resume from is read whole, for its checksums. Writes nothing but a
    temporary table. trainer: the script, whose check_flags fills in what flags derive.
    """
    problems = []

    def check(work, *given):        # None where it fails, or where what it needs is None already
        return plan.attempt(problems, work, *given) if all(value is not None for value in given) else None

    check(trainer.check_flags, args, ranks)
    flags_fit = not problems or None        # else model and data are not tried with them
    check(plan.check_writable, args.output_dir, "--output_dir")
    check(plan.check_writable, args.logging_dir if args.report_to == "tensorboard" else None, "--logging_dir")
    check(trainer.check_device, args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    folder = check(causal_lm.find_model, args.model_path)
    config = check(causal_lm.load_config, folder)
    tokenizer = check(lambda folder: chat.load_tokenizer(folder, args.chat_template), folder)
    check(causal_lm.check_vocabulary, tokenizer, config)
    limit = check(causal_lm.length_limit, config, args.max_length, args.max_tokens_per_batch) if flags_fit else None
    model, _ = check(trainer.empty_model, flags_fit and args, config and folder) or [None] * 2
    with tempfile.TemporaryDirectory() as scratch:
        encoder = tokenizer and chat.Encoder(tokenizer, args.train_turns, chat.THINKING[args.enable_thinking])
        paths = [path for path in (args.train_data_file, args.eval_data_file) if path]
        found = check(lambda *given: chat_table.build_table(
            *given, args.too_long, topk.Alternatives(tokenizer, args.distill_topk) if args.distill_topk else None,
            args.preprocess_num_proc), flags_fit and Path(scratch), paths, encoder, limit)
        if not problems:
            n_train, about, _ = found
            table = chat_table.ChatTable(scratch)
            train_ids, eval_ids = check(chat_table.split_samples, table, n_train, args.group_size,
                                        args.validation_split, args.seed) or [None] * 2
        if not problems:
            resume, meta = check(checkpoint.find_resume, args.output_dir, args.resume,
                                 trainer.run_identity(args, folder, table, train_ids)) or [None] * 2
            check(packed_lm.check_resume, model, resume)
        if not problems:
            print(about)
            print_plan(args, ranks, model, model.native, table, train_ids, eval_ids, resume, meta, problems)
    if problems:
        raise UserError(plan.all_problems(problems))
    print("dry run ok")
