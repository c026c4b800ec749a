"""Fine-tune a causal language model on chats, loss on the answers only: full or LoRA, FSDP2 or DDP, packed.

    torchrun --nproc_per_node=8 distill/train_sft.py --model_path Qwen/Qwen3-4B-Instruct-2507 \
        --train_data_file labels.jsonl --output_dir ./out --bf16
    torchrun --nproc_per_node=8 distill/train_sft.py ... --bf16 --use_lora --max_tokens_per_batch 4096 --compile
    python distill/train_sft.py --model_path ./tiny --train_data_file chats.jsonl --output_dir ./out    # needs no GPU

Loss: cross-entropy of the trained tokens, averaged over all of them in the whole optimizer step (all ranks and
micro-steps). The counts come from the plan that all ranks share, so no rank has to ask another. Which tokens are
trained is proven against the tokenizer's chat template (chat.py); a template where that fails is refused.

SIGTERM or SIGUSR1: the step is finished, a checkpoint saved, OUTPUT_DIR/requeue left for the launcher; exit status 0.

Files to copy with it: chat.py table.py topk.py sft_model.py sft_plan.py packed_lm.py weights.py (its own),
adapters.py indexing.py loading.py packing.py parallel.py optim.py checkpoint.py tensor_files.py watchdog.py
metrics.py memory.py plan.py recomputation.py float8.py (shared).
"""
import argparse
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import checkpoint, float8, loading, metrics, optim, parallel, recomputation, watchdog
from common.packing import PackOrder, rank_packs
from common.parallel import UserError
from distill import chat, packed_lm, sft_model, sft_plan, weights
from distill import table as chat_table

# LoRA takes about ten times the rate of full fine-tuning (thinking-machines-lab/tinker-cookbook's rule).
LORA_RATE, FULL_RATE = 2e-4, 2e-5
GLOBAL_BATCH = 128      # samples an optimizer step, unless flags say otherwise
DISTILL_WEIGHT = 0.5

# ---------------------------------------------------------------------------------------------------------------------
# Flags


def build_parser():
    p = argparse.ArgumentParser(description="Fine-tune a causal language model on chats.", allow_abbrev=False,
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
    g.add_argument("--model_path", required=True, help="folder or hub name of a transformers causal LM, safetensors")
    g.add_argument("--use_lora", action="store_true", help="train adapters on a frozen base instead of all weights")
    g.add_argument("--lora_rank", type=int, default=32, help="adapter rank")
    g.add_argument("--lora_alpha", type=int, default=32, help="adapter scale: the update is multiplied by alpha / rank")
    g.add_argument("--lora_dropout", type=float, default=0.0, help="dropout on adapter inputs, 0 to 1")
    g.add_argument("--lora_target_modules", default="all-linear",
                   help="all-linear (of the layers), or comma-separated module name endings such as q_proj,v_proj")

    g = p.add_argument_group("data")
    g.add_argument("--train_data_file", required=True,
                   help='JSONL, a line {"messages": [{"role": ..., "content": ...}, ...]}; with an integer "id", '
                        "groups go by it")
    g.add_argument("--eval_data_file", help="validation data; without it --validation_split is held out")
    g.add_argument("--validation_split", type=float, default=0.0, help="share of groups held out, by seeded shuffle")
    g.add_argument("--group_size", type=int, default=1,
                   help="neighbouring lines (or ids) that are held out or trained together, as translations should be")
    g.add_argument("--chat_template", metavar="FILE", help="Jinja file to use and save instead of the model's template")
    g.add_argument("--enable_thinking", choices=("template", "true", "false"), default="template",
                   help="what the template gets under this name; generate with the same. template: nothing")
    g.add_argument("--train_turns", choices=("all", "last"), default="all", help="assistant turns that are trained")
    g.add_argument("--distill_topk", type=int, default=0, metavar="K",
                   help="learn the teacher's K likeliest tokens, as create_data.py --logprobs stored them; 0 = off")
    g.add_argument("--distill_weight", type=float, default=DISTILL_WEIGHT,
                   help="share of the divergence from them in a label token's loss, above 0, up to 1")
    g.add_argument("--preprocess_num_proc", type=int, default=min(8, parallel.usable_cpus()),
                   help="processes that read and tokenise large files, 0 = in the trainer; always so with "
                        "--distill_topk")
    g.add_argument("--max_length", type=int, default=0, help="tokens a sample may have, 0 = the model's positions")
    g.add_argument("--too_long", choices=chat.TOO_LONG, default="stop",
                   help="longer samples: stop and name them, drop and count them, or cut tokens off their left or "
                        "right end")
    g.add_argument("--num_workers", type=int, default=2, help="loader processes per rank, 0 = in the trainer")
    g.add_argument("--prefetch_factor", type=int, default=4, help="batches each loader process prepares ahead")

    g = p.add_argument_group("batch and length of the run")
    g.add_argument("--per_device_train_batch_size", type=int, default=16, help="samples per micro-step and rank")
    g.add_argument("--max_tokens_per_batch", type=int, default=0,
                   help="pack whole samples up to this many tokens instead, static shape; 0 = off")
    g.add_argument("--per_device_eval_batch_size", type=int, default=16, help="samples per validation batch")
    g.add_argument("--gradient_accumulation_steps", type=int, default=0,
                   help="micro-steps per optimizer step; 0 = from --global_batch_size, or 1 with a token budget")
    g.add_argument("--global_batch_size", type=int, default=0,
                   help=f"samples per optimizer step; derives accumulation; 0 = {GLOBAL_BATCH} unless that is given")
    g.add_argument("--num_train_epochs", type=int, default=4, help="passes over the training samples")
    g.add_argument("--max_steps", type=int, default=0, help="stop after this many optimizer steps, 0 = by epochs")

    g = p.add_argument_group("optimisation")
    g.add_argument("--learning_rate", type=float, help=f"peak learning rate (default: {LORA_RATE:g} with --use_lora, "
                                                       f"else {FULL_RATE:g})")
    g.add_argument("--lr_scheduler", choices=("cosine", "linear", "constant"), default="cosine", help="after warm-up")
    g.add_argument("--warmup_ratio", type=float, default=0.1, help="share of the run that is linear warm-up")
    g.add_argument("--min_lr_ratio", type=float, default=0.1, help="final rate as a share of the peak")
    g.add_argument("--weight_decay", type=float, default=0.01, help="AdamW decay of matrices, not embeddings")
    g.add_argument("--adam_beta1", type=float, default=0.9, help="AdamW decay of the mean")
    g.add_argument("--adam_beta2", type=float, default=0.95, help="AdamW decay of the variance")
    g.add_argument("--max_grad_norm", type=float, default=1.0, help="clip the global gradient norm, 0 = off")
    g.add_argument("--max_bad_steps", type=int, default=5, help="stop after this many non-finite steps in a row")
    g.add_argument("--seed", type=int, default=42, help="of data order, hold-out, adapters and dropout")

    g = p.add_argument_group("speed and memory")
    g.add_argument("--parallel", choices=("fsdp", "ddp"), default="fsdp",
                   help="weights, gradients and optimizer sharded (FSDP2), or a whole model on every GPU")
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
    g.add_argument("--wait_timeout", type=int, default=21600, help="seconds to wait for tokenising, validation, saving")

    g = p.add_argument_group("logging, validation, checkpoints")
    g.add_argument("--output_dir", default="./output", help="everything written goes here; shared by all nodes")
    g.add_argument("--logging_dir", default="./logs", help="TensorBoard files go to a folder in here")
    g.add_argument("--logging_steps", type=int, default=10, help="optimizer steps between log lines")
    g.add_argument("--report_to", choices=("tensorboard", "wandb", "none"), default="tensorboard",
                   help="beside metrics.jsonl")
    g.add_argument("--wandb_project", default="flat-trainers", help="W&B project")
    g.add_argument("--eval_steps", type=int, default=0, help="optimizer steps between validations, 0 = at the end")
    g.add_argument("--save_steps", type=int, default=500, help="optimizer steps between checkpoints, 0 = at the end")
    g.add_argument("--save_total_limit", type=int, default=2, help="newest checkpoints kept besides the best, 0 = all")
    g.add_argument("--resume", default="auto", help="auto (newest whole checkpoint in OUTPUT_DIR), none, or a folder")
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later; fill in what derives."""
    def need(good, message):
        if not good:
            raise UserError(message)

    for flag in ("per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "logging_steps",
                 "max_bad_steps", "lora_rank", "lora_alpha", "prefetch_factor", "group_size", "collective_timeout",
                 "wait_timeout"):
        need(getattr(args, flag) >= 1, f"--{flag} is {getattr(args, flag)}; it must be at least 1")
    if args.learning_rate is None:
        args.learning_rate = LORA_RATE if args.use_lora else FULL_RATE
    for flag in ("max_tokens_per_batch", "global_batch_size", "gradient_accumulation_steps", "max_steps", "eval_steps",
                 "save_steps", "save_total_limit", "num_workers", "preprocess_num_proc", "max_length", "distill_topk",
                 "weight_decay", "max_grad_norm", "learning_rate", "seed"):
        need(0 <= getattr(args, flag) < math.inf, f"--{flag} is {getattr(args, flag)}; it must be 0 or more and finite")
    for flag in ("lora_dropout", "validation_split", "adam_beta1", "adam_beta2"):
        need(0 <= getattr(args, flag) < 1, f"--{flag} is {getattr(args, flag)}; it must be at least 0 and below 1")
    for flag in ("min_lr_ratio", "warmup_ratio"):
        need(0 <= getattr(args, flag) <= 1, f"--{flag} is {getattr(args, flag)}; it must lie between 0 and 1")
    need(args.dry_run is None or args.dry_run >= 0, f"--dry_run is {args.dry_run}; it must be 0 or more")
    for flag in ("gpu_memory", "host_memory"):
        value = getattr(args, flag)
        need(value is None or value > 0, f"--{flag} is {value}; it must be more than 0")
        need(value is None or args.dry_run is not None, f"--{flag} needs --dry_run")
    need(0 < args.distill_weight <= 1, f"--distill_weight is {args.distill_weight}; it must be above 0, at most 1")
    need(args.distill_topk or args.distill_weight == DISTILL_WEIGHT, "--distill_weight needs --distill_topk")
    for flag in ("rank", "alpha", "dropout", "target_modules"):
        default = build_parser().get_default(f"lora_{flag}")
        need(args.use_lora or getattr(args, f"lora_{flag}") == default, f"--lora_{flag} needs --use_lora")
    need(not (args.eval_data_file and args.validation_split),
         "give one of --eval_data_file and --validation_split, not both")
    need(args.parallel == "fsdp" or (args.reshard_after_forward and not args.cpu_offload),
         "--no-reshard_after_forward and --cpu_offload need --parallel fsdp")
    float8.check_flags(args, need)
    need(not (args.compile and args.gradient_checkpointing == "selective"), recomputation.NOT_COMPILED)
    need(not (args.global_batch_size and args.gradient_accumulation_steps),
         "give one of --global_batch_size and --gradient_accumulation_steps")
    need(not (args.global_batch_size and args.max_tokens_per_batch),
         "--global_batch_size counts samples: not with --max_tokens_per_batch")
    if not args.gradient_accumulation_steps:
        samples, per_micro_step = args.global_batch_size or GLOBAL_BATCH, args.per_device_train_batch_size * world_size
        need(args.max_tokens_per_batch or samples % per_micro_step == 0,
             f"--global_batch_size {samples} is not a multiple of {per_micro_step} (--per_device_train_batch_size "
             f"{args.per_device_train_batch_size} x {world_size} ranks); or give --gradient_accumulation_steps")
        args.gradient_accumulation_steps = 1 if args.max_tokens_per_batch else samples // per_micro_step
    if args.report_to != "none":
        try:
            __import__(args.report_to)
        except ImportError:
            raise UserError(f"--report_to {args.report_to}: pip install {args.report_to}, or --report_to none")


# ---------------------------------------------------------------------------------------------------------------------
# Validation, reports


def autocast(args, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)


@torch.no_grad()
def evaluate(world, args, model, table, held_out, check):
    """Exact token-weighted validation loss and accuracy {eval/...: float}; all ranks take a share.

    Now and then calls check(), which may raise, and looks for a request to stop: then it returns None, on all ranks.
    """
    order = PackOrder(table.lengths[held_out], samples_per_pack=args.per_device_eval_batch_size, shuffle=False)
    packs = [[int(held_out[i]) for i in pack] for pack in rank_packs(order, world.rank, world.size, 1, epochs=1)]
    sums = torch.zeros(model.sums, dtype=torch.float64, device=world.device)
    model.eval()
    for i, batch in enumerate(chat_table.make_loader(table, packs, num_workers=min(1, args.num_workers),
                                                     prefetch_factor=2)):
        if i % 16 == 0:
            check()
            if parallel.any_rank(world, watchdog.stop_requested()).item():
                model.train()
                return None
        with autocast(args, world.device):
            sums += torch.stack(model(batch.to(world.device))).double()
    model.train()
    return packed_lm.loss_report(parallel.all_sum(world, sums).tolist(), int(table.targets[held_out].sum()), "eval")


def bad_step_report(world, table, step, flags, skipped):
    """Print and return what a skipped step was about: the samples whose loss was not finite, from all ranks."""
    local = [table.name(i) for finite, numbers in flags if not finite.item() for i in numbers]
    names = sorted({name for rank_names in parallel.gather_objects(world, local) for name in rank_names})
    what = f"batches with a non-finite loss: {'; '.join(names[:20])}" if names else "every loss was finite"
    text = f"step {step}: gradient norm is not finite, step skipped ({skipped} so far); {what}"
    if world.is_main:
        tqdm.write(text)
    return text


def console_line(step, total_steps, v):
    """One aligned line of the numbers in metrics.jsonl, with units."""
    mfu = f" | mfu {v['train/mfu'] * 100:4.1f}%" if "train/mfu" in v else ""
    parts = f"ce {v['train/ce_loss']:7.4f} kl {v['train/kl_loss']:7.4f} " if "train/kl_loss" in v else ""
    return (f"step {step:>6}/{total_steps} | epoch {v['train/epoch']:6.2f} | loss {v['train/loss']:7.4f} "
            f"{parts}acc {v['train/accuracy'] * 100:5.1f}% | lr {v['train/learning_rate']:.2e} | "
            f"grad_norm {v['train/grad_norm']:7.3f} | {v['train/throughput']:>8,.0f} tok/s "
            f"{v['train/samples_per_second']:>6,.1f} samples/s | pad {v['train/padding'] * 100:4.1f}% | "
            f"wait {v['train/data_wait_seconds']:5.2f} s | mem {v['train/memory_gib']:5.2f} GiB{mfu} | "
            f"eta {metrics.duration((total_steps - step) * v['train/step_seconds'])}")


def print_start(world, args, model, table, train_ids, eval_ids, plan):
    """What is about to run, before the first step."""
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    n, n_trained = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (True, False))
    print(f"device     {world.size} x {where}, torch {torch.__version__}, {args.parallel}, "
          f"{'bf16' if args.bf16 else 'fp32'}\n"
          f"model      {n / 1e6:,.1f} M parameters, {n_trained / 1e6:,.3f} M trainable "
          f"({'LoRA' if args.use_lora else 'full'})\n"
          f"{sft_plan.samples_line(table, train_ids, eval_ids)}\n{plan}")


# ---------------------------------------------------------------------------------------------------------------------
# Main


def main(argv=None):
    args = build_parser().parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")      # a log file shows each line at once
    with parallel.one_clear_error():
        if args.dry_run is None:
            train(args)
        elif os.environ.get("RANK", "0") == "0":
            sft_plan.dry_run(args, args.dry_run or int(os.environ.get("WORLD_SIZE", "1")), check_flags)
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
    sft_model.check_device(args, device)
    parallel.rank0_first(world, checkpoint.prepare_output, args.output_dir)
    parallel.rank0_first(world, watchdog.clear_marker, args.output_dir)
    if args.report_to == "tensorboard":
        parallel.rank0_first(world, checkpoint.prepare_output, args.logging_dir, "--logging_dir")
    parallel.rank0_first(world, weights.find_model, args.model_path)      # downloads before the others look
    folder = weights.find_model(args.model_path)
    config, tokenizer = weights.load_config(folder), chat.load_tokenizer(folder, args.chat_template)
    sft_model.check_vocabulary(tokenizer, config)
    encoder = sft_plan.encoder_of(args, tokenizer)
    table, train_ids, eval_ids, ends = chat_table.prepare_table(world, args, encoder,
                                                                sft_model.length_limit(args, config),
                                                                sft_plan.teacher_of(args, tokenizer))
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    identity = sft_model.run_identity(args, folder, table, train_ids) if main_rank else None
    validation = table.fingerprint(eval_ids)
    resume, meta = parallel.rank0_first(world, checkpoint.find_resume, args.output_dir, args.resume, identity)

    # -- order, steps -------------------------------------------------------------------------------------------------
    accumulation = args.gradient_accumulation_steps
    order = sft_plan.pack_order(args, table.lengths[train_ids])
    per_step = world.size * accumulation
    at = {key: meta[key] for key in ("step", "epoch", "first")} if meta else {"step": 0, "epoch": 0, "first": 0}
    steps_per_epoch, total_steps = sft_plan.run_length(args, order, per_step, at)
    epochs = sys.maxsize if args.max_steps else args.num_train_epochs
    peak_lr, warmup = args.learning_rate, round(args.warmup_ratio * total_steps)

    # -- model, optimizer, resume -------------------------------------------------------------------------------------
    watch.moved("loading the model", args.wait_timeout)
    model, wrapped, native = sft_model.build_model(world, args, folder, resume)
    unknown_ends = weights.stop_at(native, ends)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.build_adamw(model.named_parameters(), peak_lr, args.weight_decay,
                                  (args.adam_beta1, args.adam_beta2), packed_lm.decays)
    parallel.seed_everything(args.seed, world.rank)     # other dropout on every rank
    best_loss, best_step = None, None
    if meta:
        checkpoint.load_optimizer(resume, optim.state_tensors(optimizer, model.named_parameters()))
        checkpoint.load_rng(resume, world.rank, device)
        if meta["validation"] == validation:        # losses on other data do not compare
            best_loss, best_step = meta["best_loss"], meta["best_step"]
    packs = ([int(train_ids[i]) for i in pack] for pack in
             rank_packs(order, world.rank, world.size, accumulation, epochs, at["epoch"], at["first"]))
    loader = chat_table.make_loader(table, packs, num_workers=args.num_workers, prefetch_factor=args.prefetch_factor,
                                    pad_to=args.max_tokens_per_batch, pad_id=ends[0])
    batches = loading.ahead(loader, device)
    matrix_weights = packed_lm.layer_weights(native)

    log = None
    if main_rank:
        board = Path(args.logging_dir) / Path(args.output_dir).resolve().name
        log = metrics.MetricsLog(args.output_dir, board, args.report_to, vars(args), at["step"], args.wandb_project)
        print_start(world, args, model, table, train_ids, eval_ids,
                    f"steps      {total_steps} ({steps_per_epoch} an epoch), {per_step} packs a step = {world.size} "
                    f"ranks x {accumulation} micro-steps; peak lr {peak_lr:.2e}, warm-up {warmup}\n"
                    f"start      step {at['step']}, {f'resumed from {resume}' if resume else 'base model'}")
        if unknown_ends:
            names = ", ".join(tokenizer.convert_ids_to_tokens(unknown_ends))
            print(f"note       answers end with {names}, at which the base model's generation_config does not stop"
                  + ("; pass it to generate with this adapter" if args.use_lora else "; the saved one will"))

    # -- loop ---------------------------------------------------------------------------------------------------------
    writer = checkpoint.Writer(world, args.output_dir, args.save_total_limit, args.wait_timeout)
    flags = optim.StepFlags(device, meta["skipped"] if meta else 0)
    sums = torch.zeros(model.sums + 1, dtype=torch.float64, device=device)      # of the model; targets on rank 0
    if meta and main_rank:
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
        sft_model.save_checkpoint(world, writer, args, model, native, tokenizer, optimizer, meta)
        saved_step = at["step"]

    def validate():
        nonlocal best_loss, best_step
        watch.moved(f"validation at step {at['step']}", args.wait_timeout)
        values = evaluate(world, args, model, table, eval_ids, writer.check)
        if values is None:
            return False
        if main_rank:
            tqdm.write(f"eval   step {at['step']:>6} | loss {values['eval/loss']:7.4f} "
                       f"acc {values['eval/accuracy'] * 100:5.1f}%")
            log.write(at["step"], values)
        if math.isfinite(values["eval/loss"]) and (best_loss is None or values["eval/loss"] < best_loss):
            best_loss, best_step = values["eval/loss"], at["step"]
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
        window = train_ids[order.window(at["epoch"], at["first"], per_step)]        # samples of this step, all ranks
        lengths, n_targets = table.lengths[window], int(table.targets[window].sum())
        step_sums, finite = torch.zeros_like(sums), []
        for micro in range(accumulation):
            asked = time.monotonic()
            watch.moved(f"loading data for step {at['step'] + 1}")
            batch = next(batches)
            compiling = args.compile and at["step"] == start_step
            watch.moved(f"step {at['step'] + 1}", args.wait_timeout if compiling else None)
            waited += time.monotonic() - asked
            mine = list(batch.samples)
            assert batch.counts["targets"] == table.targets[mine].sum(), "loader and plan disagree"
            assert args.max_tokens_per_batch in (0, len(batch.input_ids)), "the pack is not filled to its budget"
            with parallel.gradient_sync(wrapped, micro == accumulation - 1):
                with autocast(args, device):
                    loss, *others = wrapped(batch)
                (loss * (world.size / n_targets)).backward()    # gradients are averaged over ranks, the loss is global
            step_sums[:-1] += torch.stack([loss.detach(), *others])
            finite.append((torch.isfinite(loss.detach()), mine))
        norm = optim.clip_gradients(trainable, args.max_grad_norm)
        bad = 1 - torch.isfinite(norm).float()          # the same on every rank; a bad loss makes its gradient bad
        stop = parallel.any_rank(world, watchdog.stop_requested())
        factor = optim.lr_factor(at["step"], total_steps, warmup, args.lr_scheduler, args.min_lr_ratio)
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * factor
        optim.guarded_step(optimizer, bad)
        optimizer.zero_grad(set_to_none=True)
        if main_rank:
            step_sums[-1] += n_targets
        bad = bad.to(device)                            # with --cpu_offload gradients are elsewhere
        sums += torch.where(bad > 0, 0.0, step_sums)
        at["step"], at["first"] = at["step"] + 1, at["first"] + per_step

        report_bad(flags.pop())                         # of the step before: this one is still being computed
        flags.push(bad, stop, (at["step"], finite))
        last = at["step"] == total_steps
        evaluating, saving = len(eval_ids) and (last or every(args.eval_steps)), last or every(args.save_steps)
        if evaluating or saving or flags.stop:          # these wait for this step anyway
            report_bad(flags.pop())
        stopping = flags.stop and not last

        # -- log ------------------------------------------------------------------------------------------------------
        n_tokens, pairs = int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum())
        totals.update(tokens=n_tokens, samples=len(window), flops=packed_lm.flops(
            matrix_weights, native.config, n_tokens, n_targets, pairs, args.use_lora))
        steps += 1
        # an empty pack is one token of padding
        slots += per_step * args.max_tokens_per_batch or n_tokens + max(0, at["first"] - order.packs_per_epoch)
        if at["step"] % args.logging_steps == 0 or last:
            *model_sums, all_targets = parallel.all_sum(world, sums).tolist()
            values = packed_lm.loss_report(model_sums, all_targets, "train")
            if main_rank:
                now = time.monotonic()
                values |= {"train/learning_rate": peak_lr * factor, "train/grad_norm": float(norm),
                           "train/epoch": at["epoch"] + min(1.0, at["first"] / order.packs_per_epoch),
                           "train/bad_steps": flags.bad_total,
                           **metrics.speed_report(totals, now - since, steps, slots, waited, device, world.size)}
                log.write(at["step"], values)
                tqdm.write(console_line(at["step"], total_steps, values))
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
