"""Fine-tune Higgs-Audio V2 (text to speech): LoRA or full, one process or many GPUs under DDP or FSDP2.

    torchrun --nproc_per_node=8 train_v2_ddp.py --model_path bosonai/higgs-audio-v2-generation-3B-base \
        --audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer --train_data_file train.json --output_dir ./out \
        --per_device_train_batch_size 2 --learning_rate 5e-5 --bf16 --use_lora
    python train_v2_ddp.py --model_path tiny/model --audio_tokenizer_path tiny/codec --train_data_file tiny/train.json
    bash launch/demo.sh     # makes a tiny model and speech first; needs no GPU and no download

Loss: cross-entropy of the next row of codes, averaged over every trained code of the whole optimizer step (all ranks,
all micro-steps, all 8 codebooks), plus --text_loss_weight times the same average over text targets. The counts come
from the plan that all ranks share, so no rank has to ask another.

SIGTERM or SIGUSR1: the step is finished, a checkpoint saved, OUTPUT_DIR/requeue left for the launcher; exit status 0.

Files to copy with it: data.py conversations.py codes.py speech_model.py speech_plan.py plan.py higgs.py weights.py
export.py lora.py speak.py sample_prompts.py (its own), adapters.py indexing.py loading.py packing.py parallel.py
optim.py checkpoint.py tensor_files.py watchdog.py metrics.py memory.py plan.py recomputation.py float8.py (shared).
"""
import argparse
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import lora
from common import checkpoint, float8, loading, metrics, optim, parallel, recomputation, watchdog
from common.packing import PackOrder, rank_packs
from common.parallel import UserError
from data import make_loader, prepare_table, token_ids
from speech import higgs, sample_prompts, speech_model, speech_plan, weights
from speech import plan as dry_run
from speech.codes import FRAME_RATE
from speech.conversations import TASK_TYPES

# ---------------------------------------------------------------------------------------------------------------------
# Flags


def build_parser():
    p = argparse.ArgumentParser(description="Fine-tune Higgs-Audio V2.", allow_abbrev=False,
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    g = p.add_argument_group("before the run")
    g.add_argument("--dry_run", nargs="?", type=int, const=0, metavar="GPUS",
                   help="check everything, print what the run will be and take, and stop; needs no GPU. GPUS: plan for "
                        "so many (default: the processes of this launch)")
    g.add_argument("--gpu_memory", type=float, metavar="GIB",
                   help="dry run: memory of one GPU (default: of the GPU here, else 80)")
    g.add_argument("--host_memory", type=float, metavar="GIB",
                   help="dry run: free memory of a node (default: what is free here, or the Slurm job's share)")
    g = p.add_argument_group("model")
    g.add_argument("--model_path", required=True, help="Higgs-Audio V2 folder or hub name, native or 2025 format")
    g.add_argument("--audio_tokenizer_path", required=True, help="native audio tokenizer, folder or hub name")
    g.add_argument("--use_lora", action="store_true", help="train adapters on a frozen base instead of all weights")
    g.add_argument("--lora_rank", type=int, default=16, help="adapter rank")
    g.add_argument("--lora_alpha", type=int, default=32, help="adapter scale: the update is multiplied by alpha / rank")
    g.add_argument("--lora_dropout", type=float, default=0.1, help="dropout on adapter inputs, 0 to 1")
    g.add_argument("--lora_target_modules", default="attention",
                   help=f"{', '.join(lora.TARGETS)}, or comma-separated module name endings")
    g.add_argument("--freeze_llm", action="store_true", help="full fine-tuning of the audio embedding and head only")
    g.add_argument("--freeze_audio_tower", action="store_true", help="accepted for old launch lines: there is no tower")
    g.add_argument("--freeze_audio_encoder_proj", action="store_true", help="accepted for old launch lines, as above")

    g = p.add_argument_group("data")
    g.add_argument("--train_data_file", help="ChatML JSON list or JSONL")
    g.add_argument("--train_data_dir", help="folder with metadata.json, or audio files with .txt beside them")
    g.add_argument("--eval_data_file", help="validation data; without it --validation_split is held out")
    g.add_argument("--eval_data_dir", help="validation folder, as --train_data_dir")
    g.add_argument("--validation_split", type=float, default=0.005, help="share of samples held out, by seeded shuffle")
    g.add_argument("--task_type", choices=TASK_TYPES, default="single_speaker_smart_voice",
                   help="folder format: prompt shape of samples that name none themselves")
    g.add_argument("--ref_audio_in_system_message", action="store_true",
                   help="folder format: put reference clips into the scene description")
    g.add_argument("--code_cache", help="folder of encoded audio, shareable between runs (default: OUTPUT_DIR/codes)")
    g.add_argument("--preprocess_num_proc", type=int, default=min(8, parallel.usable_cpus()),
                   help="processes that read and tokenise, or decode audio, per node; 0 = in the trainer")
    g.add_argument("--max_length", type=int, default=0, help="tokens a sample may have, 0 = the model's positions")
    g.add_argument("--drop_too_long", action="store_true", help="drop and count longer samples instead of stopping")
    g.add_argument("--num_workers", type=int, default=2, help="loader processes per rank, 0 = in the trainer")
    g.add_argument("--prefetch_factor", type=int, default=4, help="batches each loader process prepares ahead")

    g = p.add_argument_group("batch and length of the run")
    g.add_argument("--per_device_train_batch_size", type=int, default=4, help="samples per micro-step and rank")
    g.add_argument("--max_tokens_per_batch", type=int, default=0,
                   help="pack whole samples up to this many tokens instead, static shape; 0 = off")
    g.add_argument("--per_device_eval_batch_size", type=int, default=1, help="samples per validation batch")
    g.add_argument("--gradient_accumulation_steps", type=int, default=1, help="micro-steps per optimizer step")
    g.add_argument("--global_batch_size", type=int, default=0, help="samples per optimizer step; derives accumulation")
    g.add_argument("--group_by_length", action="store_true", help="put samples of similar length side by side")
    g.add_argument("--num_train_epochs", type=int, default=3, help="passes over the training samples")
    g.add_argument("--max_steps", type=int, default=0, help="stop after this many optimizer steps, 0 = by epochs")

    g = p.add_argument_group("optimisation")
    g.add_argument("--learning_rate", type=float, default=5e-5, help="peak learning rate")
    g.add_argument("--scale_lr_from_batch", type=int, default=0, metavar="N",
                   help="multiply the rate by sqrt(samples per optimizer step / N), 0 = off")
    g.add_argument("--lr_scheduler", choices=("cosine", "linear", "constant"), default="cosine", help="after warm-up")
    g.add_argument("--warmup_steps", type=int, default=100, help="optimizer steps of linear warm-up")
    g.add_argument("--min_lr_ratio", type=float, default=0.0, help="final rate as a share of the peak")
    g.add_argument("--weight_decay", type=float, default=0.01, help="AdamW decay of matrices, not embeddings")
    g.add_argument("--adam_beta1", type=float, default=0.9, help="AdamW decay of the mean")
    g.add_argument("--adam_beta2", type=float, default=0.999, help="AdamW decay of the variance")
    g.add_argument("--max_grad_norm", type=float, default=1.0, help="clip the global gradient norm, 0 = off")
    g.add_argument("--max_bad_steps", type=int, default=5, help="stop after this many non-finite steps in a row")
    g.add_argument("--audio_loss_reduction", choices=("mean", "sum"), default="mean",
                   help="over the codebooks: mean, or sum as transformers does (8 times larger)")
    g.add_argument("--text_loss_weight", type=float, default=1.0, help="weight of the text loss, 0 = audio only")
    g.add_argument("--seed", type=int, default=42, help="of data order, adapters and dropout")

    g = p.add_argument_group("speed and memory")
    g.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp",
                   help="a whole model on every GPU, or weights, gradients and optimizer sharded (FSDP2)")
    g.add_argument("--reshard_after_forward", action=argparse.BooleanOptionalAction, default=True,
                   help="fsdp: free each layer's gathered weights until the backward pass; no-: faster, more memory")
    g.add_argument("--cpu_offload", action="store_true", help="fsdp: keep shards and optimizer in host memory (slow)")
    g.add_argument("--bf16", action="store_true", help="bfloat16 compute; a frozen base is stored in bfloat16")
    g.add_argument("--tf32", action="store_true", help="TF32 for float32 matrix products on CUDA")
    g.add_argument("--gradient_checkpointing", nargs="?", const="all", choices=recomputation.MODES,
                   help=recomputation.HELP)
    g.add_argument("--float8", action="store_true", help="lora: products with frozen weights in float8 (on a CPU slow, "
                   "to try it)")
    g.add_argument("--compile", action="store_true", help="torch.compile each decoder layer")
    g.add_argument("--collective_timeout", type=int, default=600,
                   help="seconds a step may take before the rank that hangs is named and all stop")
    g.add_argument("--wait_timeout", type=int, default=21600, help="seconds to wait for encoding, validation, saving")

    g = p.add_argument_group("logging, validation, checkpoints")
    g.add_argument("--output_dir", default="./output", help="everything written goes here; shared by all nodes")
    g.add_argument("--logging_dir", default="./logs", help="TensorBoard files go to a folder in here")
    g.add_argument("--logging_steps", type=int, default=10, help="optimizer steps between log lines")
    g.add_argument("--report_to", choices=("tensorboard", "wandb", "none"), default="tensorboard",
                   help="beside metrics.jsonl")
    g.add_argument("--wandb_project", default="flat-trainers", help="W&B project")
    g.add_argument("--enable_strategic_logging", action="store_true", help="now and then print one sample as trained")
    g.add_argument("--strategic_logging_steps", type=int, default=100, help="optimizer steps between printed samples")
    g.add_argument("--eval_steps", type=int, default=5000, help="optimizer steps between validations, 0 = at the end")
    g.add_argument("--disable_eval", "--disable_evaluation", action="store_true", help="no validation, no hold-out")
    g.add_argument("--eval_ranks", choices=("rank0", "all"),
                   help="who validates: rank 0 while the others wait, or all ranks a share; same number (default: "
                        "rank0, with --parallel fsdp all)")
    g.add_argument("--sample_prompts", metavar="FILE",
                   help="prompts spoken at every validation: one text a line, or ChatML .json/.jsonl")
    g.add_argument("--sample_seconds", type=float, default=10.0, help="seconds of speech a sample prompt may give")
    g.add_argument("--sample_time_limit", type=float, default=120.0,
                   help="seconds that generating all of them may take at one validation")
    g.add_argument("--save_steps", type=int, default=7000, help="optimizer steps between checkpoints, 0 = at the end")
    g.add_argument("--save_total_limit", type=int, default=3, help="newest checkpoints kept besides the best, 0 = all")
    g.add_argument("--resume", default="auto", help="auto (newest whole checkpoint in OUTPUT_DIR), none, or a folder")
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later."""
    def need(good, message):
        if not good:
            raise UserError(message)

    need(bool(args.train_data_file) != bool(args.train_data_dir), "give one of --train_data_file and --train_data_dir")
    need(not (args.eval_data_file and args.eval_data_dir), "give one of --eval_data_file and --eval_data_dir, not both")
    need(not (args.disable_eval and (args.eval_data_file or args.eval_data_dir)),
         "--disable_eval and validation data exclude each other")
    for flag in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
                 "num_train_epochs", "logging_steps", "strategic_logging_steps", "max_bad_steps", "lora_rank",
                 "lora_alpha", "prefetch_factor", "collective_timeout", "wait_timeout"):
        need(getattr(args, flag) >= 1, f"--{flag} is {getattr(args, flag)}; it must be at least 1")
    for flag in ("max_tokens_per_batch", "global_batch_size", "max_steps", "warmup_steps", "eval_steps", "save_steps",
                 "save_total_limit", "num_workers", "preprocess_num_proc", "max_length", "scale_lr_from_batch",
                 "weight_decay", "max_grad_norm", "text_loss_weight", "learning_rate", "seed"):
        need(0 <= getattr(args, flag) < math.inf, f"--{flag} is {getattr(args, flag)}; it must be 0 or more and finite")
    for flag in ("lora_dropout", "validation_split", "adam_beta1", "adam_beta2"):
        need(0 <= getattr(args, flag) < 1, f"--{flag} is {getattr(args, flag)}; it must be at least 0 and below 1")
    need(args.dry_run is None or args.dry_run >= 0, f"--dry_run is {args.dry_run}; it must be 0 or more")
    for flag in ("gpu_memory", "host_memory"):
        value = getattr(args, flag)
        need(value is None or value > 0, f"--{flag} is {value}; it must be more than 0")
        need(value is None or args.dry_run is not None, f"--{flag} needs --dry_run")
    need(0 <= args.min_lr_ratio <= 1, f"--min_lr_ratio is {args.min_lr_ratio}; it must lie between 0 and 1")
    for flag in ("sample_seconds", "sample_time_limit"):
        need(0 < getattr(args, flag) < math.inf, f"--{flag} is {getattr(args, flag)}; it must be above 0 and finite")
        need(args.sample_prompts or getattr(args, flag) == {"sample_seconds": 10, "sample_time_limit": 120}[flag],
             f"--{flag} needs --sample_prompts")
    need(args.sample_time_limit < args.wait_timeout, f"--sample_time_limit {args.sample_time_limit:g} must be below "
         f"--wait_timeout {args.wait_timeout}")
    need(args.seed < 2**62, f"--seed is {args.seed}; it must be below 2**62")
    need(args.use_lora or args.lora_target_modules == "attention", "--lora_target_modules needs --use_lora")
    need(not (args.use_lora and args.freeze_llm), "--use_lora freezes the whole base already: drop --freeze_llm")
    need(args.parallel == "ddp" or args.eval_ranks != "rank0",
         "--eval_ranks rank0 does not go with --parallel fsdp: every forward there needs all ranks; drop it")
    need(args.parallel == "fsdp" or (args.reshard_after_forward and not args.cpu_offload),
         "--no-reshard_after_forward and --cpu_offload need --parallel fsdp")
    float8.check_flags(args, need)
    need(not (args.compile and args.gradient_checkpointing == "selective"), recomputation.NOT_COMPILED)
    args.eval_ranks = args.eval_ranks or ("rank0" if args.parallel == "ddp" else "all")
    if args.max_tokens_per_batch:
        need(not args.group_by_length, "--group_by_length does nothing with --max_tokens_per_batch: packs are equal")
        need(not args.global_batch_size and not args.scale_lr_from_batch,
             "--global_batch_size and --scale_lr_from_batch count samples: not with --max_tokens_per_batch")
    if args.global_batch_size:
        per_micro_step = args.per_device_train_batch_size * world_size
        need(args.gradient_accumulation_steps == 1, "give one of --global_batch_size and --gradient_accumulation_steps")
        need(args.global_batch_size % per_micro_step == 0,
             f"--global_batch_size {args.global_batch_size} is not a multiple of {per_micro_step} "
             f"(--per_device_train_batch_size {args.per_device_train_batch_size} x {world_size} ranks)")
        args.gradient_accumulation_steps = args.global_batch_size // per_micro_step
    if args.report_to != "none":
        try:
            __import__(args.report_to)
        except ImportError:
            raise UserError(f"--report_to {args.report_to}: pip install {args.report_to}, or --report_to none")


# ---------------------------------------------------------------------------------------------------------------------
# Validation, saving, reports


def autocast(args, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)


@torch.no_grad()
def evaluate(world, args, model, table, ids, held_out, check):
    """Exact target-weighted validation losses {eval/...: float}, the same for --eval_ranks rank0 and all.

    Now and then calls check(), which may raise, and looks for a request to stop: then it returns None, on all ranks.
    """
    order = PackOrder(table.lengths[held_out], samples_per_pack=args.per_device_eval_batch_size, shuffle=False)
    codebooks = ids.num_codebooks

    def share(rank, size):
        packs = [[int(held_out[i]) for i in pack] for pack in rank_packs(order, rank, size, 1, epochs=1)]
        sums = torch.zeros(codebooks + 6, dtype=torch.float64, device=world.device)
        loader = make_loader(table, ids, packs, num_workers=min(1, args.num_workers), prefetch_factor=2)
        for i, batch in enumerate(loader):
            if i % 16 == 0:
                check()
                stop = bool(watchdog.stop_requested())
                if stop if size == 1 else parallel.any_rank(world, stop).item():
                    return None
            with autocast(args, world.device):
                audio, text, eos = model(batch.to(world.device))
            sums += torch.cat([audio, text[None], eos]).double()
        return sums.tolist()

    model.eval()
    if args.eval_ranks == "rank0":
        sums = parallel.rank0_first(world, share, 0, 1)
    elif (sums := share(world.rank, world.size)) is not None:
        sums = parallel.all_sum(world, torch.tensor(sums, dtype=torch.float64, device=world.device)).tolist()
    model.train()
    if sums is None:
        return None
    counts = [int(table.audio_targets[held_out].sum()), int(table.text_targets[held_out].sum())]
    return higgs.loss_report([*sums, *counts], args.audio_loss_reduction, args.text_loss_weight, "eval")


def bad_step_report(world, table, step, flags, skipped):
    """Print and return what a skipped step was about: the samples whose loss was not finite, from all ranks."""
    local = [table.name(i) for finite, numbers in flags if not finite.item() for i in numbers]
    names = sorted({name for rank_names in parallel.gather_objects(world, local) for name in rank_names})
    what = f"samples with a non-finite loss: {'; '.join(names[:20])}" if names else "every loss was finite"
    text = f"step {step}: gradient norm is not finite, step skipped ({skipped} so far); {what}"
    if world.is_main:
        tqdm.write(text)
    return text


def console_line(step, total_steps, v, codebooks):
    """One aligned line of the numbers in metrics.jsonl, with units."""
    books = "/".join(f"{v[f'train/audio_loss_codebook_{k}']:.2f}" for k in range(codebooks))
    mfu = f" | mfu {v['train/mfu'] * 100:4.1f}%" if "train/mfu" in v else ""
    eta = metrics.duration((total_steps - step) * v["train/step_seconds"])
    return (f"step {step:>6}/{total_steps} | epoch {v['train/epoch']:6.2f} | loss {v['train/loss']:7.4f} | "
            f"audio {v['train/audio_loss']:6.3f} ({books}) | text {v['train/text_loss']:6.3f} | "
            f"eos {v['train/eos_loss']:6.3f} stop {v['train/stop_recall'] * 100:5.1f}% | "
            f"lr {v['train/learning_rate']:.2e} | grad_norm {v['train/grad_norm']:7.3f} | "
            f"{v['train/throughput']:>8,.0f} tok/s {v['train/audio_seconds_per_second']:>7,.1f} audio-s/s "
            f"{v['train/samples_per_second']:>6,.1f} samples/s | pad {v['train/padding'] * 100:4.1f}% | "
            f"wait {v['train/data_wait_seconds']:5.2f} s | mem {v['train/memory_gib']:5.2f} GiB{mfu} | "
            f"eta {eta}")


def pack_totals(config, table, window, args):
    """Totals over the samples of one optimizer step, from the plan: useful work of all ranks, python numbers."""
    lengths = table.lengths[window].astype(np.int64)
    n_audio, n_text = int(table.audio_targets[window].sum()), int(table.text_targets[window].sum())
    flops = higgs.flops_per_pack(config, int(lengths.sum()), n_audio, n_text,
                                 int((lengths * (lengths + 1) // 2).sum()), args.use_lora)
    return {"audio_targets": n_audio, "text_targets": n_text, "tokens": int(lengths.sum()), "samples": len(window),
            "frames": int(table.frames[window].sum()), "flops": flops}


def print_start(world, args, model, table, train_ids, eval_ids, plan):
    """What is about to run, before the first step."""
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    n, n_trained = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (True, False))
    print(f"device     {world.size} x {where}, torch {torch.__version__}, {'bf16 autocast' if args.bf16 else 'fp32'}\n"
          f"model      {n / 1e6:,.1f} M parameters, {n_trained / 1e6:,.3f} M trainable "
          f"({'LoRA' if args.use_lora else 'full'})\n"
          f"{speech_plan.samples_line(table, train_ids, eval_ids)}\n{plan}")


def print_sample(table, tokenizer, ids, batch):
    """--enable_strategic_logging: show the first sample of a batch the way the model sees it."""
    if not batch.samples:
        return
    tokens = batch.input_ids[:batch.seqlens[0]].cpu()
    text = tokenizer.decode(tokens[(tokens != ids.audio) & (tokens != ids.delay)])
    tqdm.write(f"sample     {table.name(batch.samples[0])}: {batch.seqlens[0]} tokens; batch trains "
               f"{batch.counts['audio_targets']} codes and {batch.counts['text_targets']} text tokens; text {text!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Main


def main(argv=None):
    args = build_parser().parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")      # a log file shows each line at once
    with parallel.one_clear_error():
        try:
            if args.dry_run is None:
                train(args)
            elif os.environ.get("RANK", "0") == "0":
                dry_run.run(args, args.dry_run or int(os.environ.get("WORLD_SIZE", "1")), check_flags)
        except watchdog.Stopped as why:
            if os.environ.get("RANK", "0") == "0":
                watchdog.leave_marker(args.output_dir, str(why))
                print(f"stopped    {why}")
        watchdog.rest()
    parallel.finish()


def train(args):
    # -- ranks, paths, data -------------------------------------------------------------------------------------------
    check_flags(args, int(os.environ.get("WORLD_SIZE", "1")))
    watchdog.catch_signals()
    fsdp = args.parallel == "fsdp"
    world = parallel.init(args.collective_timeout, args.wait_timeout, alone_too=fsdp, cpu_too=args.cpu_offload)
    device, main_rank = world.device, world.is_main
    watch = watchdog.Watchdog(world, args.collective_timeout)
    watch.moved("data preparation", args.wait_timeout)
    speech_model.check_device(args, device)
    parallel.rank0_first(world, checkpoint.prepare_output, args.output_dir)
    parallel.rank0_first(world, watchdog.clear_marker, args.output_dir)
    if args.report_to == "tensorboard":
        parallel.rank0_first(world, checkpoint.prepare_output, args.logging_dir, "--logging_dir")
    parallel.rank0_first(world, speech_model.find_checkpoints, args)    # downloads hub names before the others look
    (folder, config_dict), codec_dir = speech_model.find_checkpoints(args)
    config = weights.native_config(config_dict)
    tokenizer = weights.load_tokenizer(folder)
    ids = token_ids(tokenizer, config)
    books = ids.num_codebooks
    table, all_train, all_eval = prepare_table(world, args, tokenizer, ids, codec_dir)
    train_ids, eval_ids = speech_plan.usable_samples(args, config, table, all_train, all_eval, main_rank)
    prompts, settings = [], None
    if args.sample_prompts:
        prompts, settings = parallel.rank0_first(world, sample_prompts.load, args, tokenizer, ids, config, codec_dir,
                                                 device)
    if args.tf32:       # only now: codes in the cache must not depend on it
        torch.set_float32_matmul_precision("high")
    identity = speech_model.run_identity(args, folder, table, train_ids) if main_rank else None
    validation = [table.fingerprint(eval_ids), args.audio_loss_reduction, args.text_loss_weight]
    resume, meta = parallel.rank0_first(world, checkpoint.find_resume, args.output_dir, args.resume, identity)

    # -- order, steps -------------------------------------------------------------------------------------------------
    accumulation = args.gradient_accumulation_steps
    order = speech_plan.pack_order(args, table.lengths[train_ids])
    per_step = world.size * accumulation
    at = {key: meta[key] for key in ("step", "epoch", "first")} if meta else {"step": 0, "epoch": 0, "first": 0}
    steps_per_epoch, total_steps = speech_plan.run_length(args, order, per_step, at)
    epochs = sys.maxsize if args.max_steps else args.num_train_epochs
    peak_lr = args.learning_rate
    if args.scale_lr_from_batch:
        peak_lr = optim.sqrt_lr(peak_lr, per_step * args.per_device_train_batch_size, args.scale_lr_from_batch)

    # -- model, optimizer, resume -------------------------------------------------------------------------------------
    watch.moved("loading the model", args.wait_timeout)
    model, wrapped, native = speech_model.build_model(world, args, folder, config_dict, resume)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.build_adamw(model.named_parameters(), peak_lr, args.weight_decay,
                                  (args.adam_beta1, args.adam_beta2), higgs.decays)
    parallel.seed_everything(args.seed, world.rank)     # other dropout on every rank
    best_loss, best_step = None, None
    if meta:
        checkpoint.load_optimizer(resume, optim.state_tensors(optimizer, model.named_parameters()))
        checkpoint.load_rng(resume, world.rank, device)
        if meta["validation"] == validation:        # losses on other data, or by another formula, do not compare
            best_loss, best_step = meta["best_loss"], meta["best_step"]
    packs = ([int(train_ids[i]) for i in pack] for pack in
             rank_packs(order, world.rank, world.size, accumulation, epochs, at["epoch"], at["first"]))
    loader = make_loader(table, ids, packs, num_workers=args.num_workers, prefetch_factor=args.prefetch_factor,
                         pad_to=args.max_tokens_per_batch)
    batches = loading.ahead(loader, device)

    log = None
    if main_rank:
        sample_prompts.forget_later(args.output_dir, at["step"])
        board = Path(args.logging_dir) / Path(args.output_dir).resolve().name
        log = metrics.MetricsLog(args.output_dir, board, args.report_to, vars(args), at["step"], args.wandb_project)
        print_start(world, args, model, table, train_ids, eval_ids,
                    f"steps      {total_steps} ({steps_per_epoch} an epoch), {per_step} packs a step = {world.size} "
                    f"ranks x {accumulation} micro-steps; peak lr {peak_lr:.2e}, warm-up {args.warmup_steps}\n"
                    f"start      step {at['step']}, {f'resumed from {resume}' if resume else 'base model'}")

    # -- loop ---------------------------------------------------------------------------------------------------------
    writer = checkpoint.Writer(world, args.output_dir, args.save_total_limit, args.wait_timeout)
    flags = optim.StepFlags(device, meta["skipped"] if meta else 0)
    sums = torch.zeros(books + 8, dtype=torch.float64, device=device)   # losses, eos; audio and text targets on rank 0
    if meta and main_rank and len(meta["unlogged"]) == len(sums):       # an older checkpoint's has other numbers
        sums += torch.tensor(meta["unlogged"], dtype=torch.float64, device=device)
    totals, steps, slots, waited = Counter(), 0, 0, 0.0     # since the last log line
    since, start_step, saved_step = time.monotonic(), at["step"], at["step"] if resume else None
    bar = tqdm(total=total_steps, initial=at["step"], unit="step", disable=None if main_rank else True)

    def save():
        nonlocal saved_step
        meta = {**at, "identity": identity, "validation": validation, "best_step": best_step, "best_loss": best_loss,
                "skipped": flags.bad_total, "unlogged": parallel.all_sum(world, sums.clone()).tolist(),
                "args": vars(args)}
        watch.moved(f"saving at step {at['step']}", args.wait_timeout)
        speech_model.save_checkpoint(world, writer, args, model, native, tokenizer, folder, optimizer, meta)
        saved_step = at["step"]

    def validate():
        nonlocal best_loss, best_step
        watch.moved(f"validation at step {at['step']}", args.wait_timeout)
        values = evaluate(world, args, model, table, ids, eval_ids, writer.check) if len(eval_ids) else {}
        if values is None:
            return False
        if values and main_rank:
            tqdm.write(f"eval   step {at['step']:>6} | loss {values['eval/loss']:7.4f} | "
                       f"audio {values['eval/audio_loss']:6.3f} | text {values['eval/text_loss']:6.3f} | "
                       f"eos {values['eval/eos_loss']:6.3f} stop {values['eval/stop_recall'] * 100:5.1f}%")
        if prompts:
            watch.moved(f"sample prompts at step {at['step']}", args.wait_timeout)
            model.eval()
            with parallel.gathered(model), autocast(args, device):
                values |= parallel.rank0_first(world, lambda: sample_prompts.speak_all(
                    args, native, prompts, settings, ids, codec_dir, device, at["step"], log, watchdog.stop_requested))
            model.train()
        if values and main_rank:
            log.write(at["step"], values)
        loss = values.get("eval/loss", math.nan)
        if math.isfinite(loss) and (best_loss is None or loss < best_loss):
            best_loss, best_step = loss, at["step"]
            save()
        return True

    def report_bad(about):
        if about:
            text = bad_step_report(world, table, *about, flags.bad_total)
            if flags.bad_in_a_row >= args.max_bad_steps:
                watch.moved("waiting for the checkpoint under way", args.wait_timeout)
                parallel.rank0_first(world, writer.wait)
                raise UserError(f"{flags.bad_in_a_row} steps in a row had a non-finite gradient; {text}")

    def every(steps):
        return steps > 0 and at["step"] % steps == 0

    while at["step"] < total_steps:
        if at["first"] >= order.packs_per_epoch:
            at["epoch"], at["first"] = at["epoch"] + 1, 0
        window = train_ids[order.window(at["epoch"], at["first"], per_step)]
        work = pack_totals(config, table, window, args)
        n_audio, n_text = work["audio_targets"], work["text_targets"]
        step_sums, finite = torch.zeros_like(sums), []
        for micro in range(accumulation):
            asked = time.monotonic()
            watch.moved(f"loading data for step {at['step'] + 1}")
            batch = next(batches)
            compiling = args.compile and at["step"] == start_step
            watch.moved(f"step {at['step'] + 1}", args.wait_timeout if compiling else None)
            waited += time.monotonic() - asked
            mine = list(batch.samples)
            assert batch.counts["audio_targets"] == table.audio_targets[mine].sum(), "loader and plan disagree"
            assert args.max_tokens_per_batch in (0, len(batch.input_ids)), "the pack is not filled to its budget"
            if main_rank and args.enable_strategic_logging and micro == 0 \
                    and at["step"] % args.strategic_logging_steps == 0:
                print_sample(table, tokenizer, ids, batch)
            with parallel.gradient_sync(wrapped, micro == accumulation - 1):
                with autocast(args, device):
                    audio, text, eos = wrapped(batch)
                loss = higgs.total_loss(audio, n_audio, text, n_text, args.audio_loss_reduction, args.text_loss_weight)
                (loss * world.size).backward()          # gradients are averaged over ranks, the loss is a global mean
            step_sums[:books + 6] += torch.cat([audio.detach(), text.detach()[None], eos])
            finite.append((torch.isfinite(loss.detach()), mine))
        norm = optim.clip_gradients(trainable, args.max_grad_norm)
        bad = 1 - torch.isfinite(norm).float()          # the same on every rank; a bad loss makes its gradient bad
        stop = parallel.any_rank(world, watchdog.stop_requested())
        factor = optim.lr_factor(at["step"], total_steps, args.warmup_steps, args.lr_scheduler, args.min_lr_ratio)
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * factor
        optim.guarded_step(optimizer, bad)
        optimizer.zero_grad(set_to_none=True)
        if main_rank:
            step_sums[-2] += n_audio
            step_sums[-1] += n_text
        bad = bad.to(device)                            # with --cpu_offload gradients are elsewhere
        sums += torch.where(bad > 0, 0.0, step_sums)
        at["step"], at["first"] = at["step"] + 1, at["first"] + per_step

        report_bad(flags.pop())                         # of the step before: this one is still being computed
        flags.push(bad, stop, (at["step"], finite))
        last = at["step"] == total_steps
        evaluating = (len(eval_ids) or prompts) and (last or every(args.eval_steps))
        saving = last or every(args.save_steps)
        if evaluating or saving or flags.stop:          # these wait for this step anyway
            report_bad(flags.pop())
        stopping = flags.stop and not last

        # -- log ------------------------------------------------------------------------------------------------------
        totals.update(work)
        steps += 1
        # an empty pack is one token of padding
        slots += per_step * args.max_tokens_per_batch or work["tokens"] + max(0, at["first"] - order.packs_per_epoch)
        if at["step"] % args.logging_steps == 0 or last:
            values = higgs.loss_report(parallel.all_sum(world, sums).tolist(), args.audio_loss_reduction,
                                       args.text_loss_weight, "train")
            if main_rank:
                now = time.monotonic()
                values |= {"train/learning_rate": peak_lr * factor, "train/grad_norm": float(norm),
                           "train/epoch": at["epoch"] + min(1.0, at["first"] / order.packs_per_epoch),
                           "train/audio_seconds_per_second": totals["frames"] / FRAME_RATE / (now - since),
                           "train/bad_steps": flags.bad_total,
                           **metrics.speed_report(totals, now - since, steps, slots, waited, device, world.size)}
                log.write(at["step"], values)
                tqdm.write(console_line(at["step"], total_steps, values, books))
                since = now
            sums.zero_()
            totals, steps, slots, waited = Counter(), 0, 0, 0.0
        bar.update(1)

        # -- validate, save -------------------------------------------------------------------------------------------
        paused = time.monotonic()
        writer.check()
        if evaluating and not stopping:
            stopping = not validate() and not last
        if (saving or stopping) and saved_step != at["step"]:
            save()
        since += time.monotonic() - paused      # throughput is about training steps
        if stopping:
            break

    watch.moved("waiting for the last checkpoint", args.wait_timeout)
    parallel.rank0_first(world, writer.wait)
    bar.close()
    if main_rank:
        log.close()
        if at["step"] < total_steps:
            why = f"asked to stop by {watchdog.stop_requested() or 'a signal to another rank'} at step {at['step']}"
            watchdog.leave_marker(args.output_dir, why)
            print(f"stopped    {why} of {total_steps}; saved; the same command goes on")
            return
        final = Path(args.output_dir) / f"checkpoint-{at['step']}"
        print(f"done       step {at['step']}; {flags.bad_total} steps skipped; final checkpoint {final}"
              + (f"; best validation loss {best_loss:.4f} at step {best_step}" if best_step is not None else ""))


if __name__ == "__main__":
    main()
