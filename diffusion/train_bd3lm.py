"""Block diffusion: BD3-LM (question -> answer) and HDP (question -> plan -> execution).

    python diffusion/train_bd3lm.py --train_data_file train.jsonl --tokenizer gpt2 --output_dir out
    python diffusion/train_bd3lm.py --system hdp --train_data_file train_hdp.json ...
    python diffusion/train_bd3lm.py --demo --model_size nano --max_steps 300 ...    # offline

Loss: a bound on the negative log-likelihood (noise.py), averaged over every target of the whole
optimizer step, all ranks and micro-steps. The counts come from the plan that all ranks share, and
so does the noise, which is drawn for the whole step: any split of a step over ranks and
micro-steps trains the same model (dropout aside).

Validation, early stopping and samples use the averaged weights. 50,000 steps of 512 problems are
3,400 passes over GSM8K's 7,473, and of 512 packed rows, three problems each, 10,000: such a run
memorises, so watch eval/nll and keep --early_stop_patience on.

SIGTERM or SIGUSR1: the step is finished, a checkpoint saved, OUTPUT_DIR/requeue left for the
launcher; exit status 0.
"""
import argparse
import dataclasses
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # of common/ and core/

from common import flags
from common.flags import need
from common.text import counted
from core import run_lock

# --------------------------------------------------------------------------------------------------
# Flags


OFTEN = {"eval_steps": 500, "save_steps": 2000}     # steps between them, by default
CHECKS = ("invalid", "control_token", "too_long")   # of problems, for --drop_bad
# problems per micro-step, micro-steps (on one GPU), learning rate, warm-up, steps. Rates of 256,
# 512 and 1024 problems are from ngocbao220/hdp-diffusion's H200 guide, that of 768 follows the
# square root; source is what its scripts run; finetune and convert are ours, for --init_from: for
# DiT weights a third of the rate at which BD3-LM is fine-tuned, for a language model twice that of
# SDAR and E2D2 and 10 passes over GSM8K; sdar, for SDAR's models, has the rate of SDAR.
PRESETS = {"conservative": (64, 4, 4e-4, 5000, 50_000),
           "recommended": (128, 4, 5e-4, 5000, 50_000),
           "aggressive": (192, 4, 6e-4, 5000, 50_000), "extreme": (256, 4, 7e-4, 10_000, 50_000),
           "source": (16, 16, 1e-3, 1000, 10_000), "finetune": (64, 2, 1e-4, 100, 3000),
           "convert": (64, 1, 2e-5, 35, 1170), "sdar": (64, 1, 1e-5, 35, 1170)}


def build_parser():
    p = flags.Parser("Train block diffusion on GSM8K.",
                     usual="system tokenizer demo block_size model_size init_from batch_preset "
                           "eval_accuracy warmup_steps")
    flags.before_the_run(p)
    g = p.add_argument_group("data")
    add = g.add_argument
    add("--system", choices=("gsm8k", "chat", "hdp"), default="gsm8k",
        help="gsm8k: question, answer; chat: the answers of chats; hdp: question, plan, execution")
    add("--train_data_file",
        help="JSONL or JSON file, dataset folder (its train split) or hub name")
    add("--eval_data_file",
        help="the same (test split) for validation; else --validation_split is held out")
    add("--validation_split", type=float, default=0.05,
        help="share of problems held out, 0 = no validation")
    add("--tokenizer",
        help="tokenizer.json, folder with it or with GPT-2's files, hub name (default: that of "
             "--init_from where it has one, the demo's own with --demo, else gpt2)")
    flags.switch(g, "--chat",
                 help="gsm8k: questions in the tokenizer's chat template, answers end as its turns")
    add("--end_token", default="", metavar="TOKEN",
        help="token that ends an answer; gsm8k: <|endoftext|>, chat: the tokenizer's end token")
    add("--demo", nargs="?", type=int, const=2000, metavar="PROBLEMS",
        help="make so many arithmetic problems and a small tokenizer in OUTPUT_DIR/demo "
             "and train on them; the flag alone: 2000")
    add("--block_size", type=int, default=16,
        help="tokens of a block; 1 is autoregressive (default: that of --init_from, else 16)")
    add("--plan_block_size", type=int, default=0,
        help="hdp: tokens of a plan block, 0 = --block_size")
    add("--execution_block_size", type=int, default=0,
        help="hdp: of an execution block, 0 = --block_size")
    add("--max_length", type=int, default=512, help="gsm8k: tokens a problem may have")
    add("--question_budget", type=int, default=128, help="hdp: tokens a question may have")
    add("--plan_budget", type=int, default=128,
        help="hdp: tokens a plan may have, markers included")
    add("--execution_budget", type=int, default=256,
        help="hdp: tokens an execution may have, with answer")
    flags.bad_samples(g, CHECKS)
    flags.switch(g, "--strip_calculator", help="remove GSM8K's <<48/2=24>> marks")
    flags.switch(g, "--loss_on_question", help="noise and train the question, too")
    add("--pack", action=argparse.BooleanOptionalAction, default=True,
        help="several problems in a row instead of padding; same loss")
    add("--row_length", type=int, default=0,
        help="clean tokens of a row, 0 = the longest problem allowed")
    share = flags.usable_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))     # of this rank
    flags.loading(g, num_workers=min(16, max(1, share)))

    g = p.add_argument_group("model and noise")
    add = g.add_argument
    add("--model_size", choices=("nano", "tiny", "small", "medium"), default="small",
        help="nano is for demos and tests")
    add("--init_from", metavar="WEIGHTS",
        help="start from published BD3-LM or MDLM weights (hub name "
             "kuleshov-group/bd3lm-owt-block_size16, or a folder), a checkpoint or "
             "export of ours, whatever its block size, whose prompt form is kept, or a causal "
             "language model shaped like Llama or Qwen3 (folder, hub name Qwen/Qwen3-0.6B)")
    add("--init_ema", action=argparse.BooleanOptionalAction, default=True,
        help="of --init_from take the averaged weights; no-: the last ones")
    add("--dropout", type=float, default=0.1, help="on the output of attention and MLP, 0 to 1")
    add("--t_range", type=float, nargs=2, metavar=("LOW", "HIGH"),
        help="noise levels trained on; a clipped range also clips the masked share of every block "
             "(default: 0.001 to 1; 1 where all blocks are single tokens: "
             "autoregressive)")
    add("--clip_search_widths", type=float, nargs="*", default=(), metavar="WIDTH",
        help="after each validation train on the range of such a width whose loss varies least")
    add("--clip_search_batches", type=int, default=4, help="validation batches that search may use")
    add("--loss_weighting", choices=("elbo", "ce"), default="elbo",
        help="the bound's weights, or all 1")
    add("--ema_decay", type=float, default=0.9999,
        help="of the averaged weights, after its warm-up")
    flags.lora(g, rank=32, alpha=32, dropout=0.0, targets="all-linear",
               targets_help="all-linear or name endings; the mask's row is trained as well")

    add = p.add_argument_group("batch and length of the run").add_argument
    add("--batch_preset", choices=tuple(PRESETS),
        help="defaults of the next two, and of rate, warm-up and steps (default: "
             "recommended; finetune with --init_from): "
        + "; ".join(f"{name} {problems} x {steps}, {lr:g}"
                    for name, (problems, steps, lr, _, _) in PRESETS.items()))
    add("--per_device_train_batch_size", type=int,
        help="rows per micro-step and rank (default: as many as hold "
             "--problems_per_batch on average)")
    add("--problems_per_batch", type=int,
        help="problems per micro-step and rank (default: preset's)")
    add("--gradient_accumulation_steps", type=int,
        help="micro-steps per optimizer step (default: preset's)")
    add("--global_batch_size", type=int, default=0,
        help="problems per optimizer step, of all ranks: what is not given of the two above "
             "follows (default with --auto: the preset's)")
    add("--per_device_eval_batch_size", type=int, default=32, help="rows per validation batch")
    add("--max_steps", type=int, help="optimizer steps (default: preset's)")

    add = flags.optimisation(
        p, learning_rate=None, lr_scheduler="constant", min_lr_ratio=0.0, weight_decay=0.0,
        learning_rate_help="peak learning rate (default: preset's; 10 times that with --use_lora)",
        adam_beta2=0.999, decayed="matrices, not of the embedding").add_argument
    add("--warmup_steps", type=int, help="optimizer steps of linear warm-up (default: preset's)")
    add("--scale_lr_from_batch", type=int, default=0, metavar="N",
        help="multiply the rate by sqrt(problems per optimizer step / N), 0 = off")

    add = flags.speed(p, parallel="ddp", bf16_help="bfloat16 compute, float32 weights").add_argument
    add("--attn_backend", choices=("flex", "sdpa"),
        help="block-sparse or dense masks (default: flex on CUDA, sdpa on a CPU); flex "
             "is dense in rows of fewer than 128 noisy copies")

    add = flags.logging(p, logging_steps=50, save_total_limit=3, **OFTEN).add_argument
    add("--eval_repeats", type=int, default=4,
        help="draws of the noise in a validation, for its error bar")
    add("--eval_accuracy", type=int, default=0, metavar="PROBLEMS",
        help="answer so many held-out problems in every validation, 0 = none")
    add("--best_by", choices=("bound", "accuracy"), default="bound",
        help="what makes a checkpoint the best one; accuracy: strict, of "
             "--eval_accuracy, the better bound of equal ones")
    add("--early_stop_patience", type=int, default=10,
        help="stop after so many validations without a better bound or accuracy, 0 = never")
    return flags.accept_old(p)


def layout_of(args):
    """The problems.Layout that the flags name."""
    from diffusion.problems import Layout
    return Layout(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Layout)
                     if hasattr(args, field.name)})


def share_step(args, ranks):
    """Split --global_batch_size: what is open of the other two flags follows the preset."""
    share, problems = args.global_batch_size // ranks, args.problems_per_batch
    steps = args.gradient_accumulation_steps
    if not problems:
        problems = share // steps if steps else min(share, PRESETS[args.batch_preset][0])
    steps = steps or share // max(1, problems)
    need(problems * steps * ranks == args.global_batch_size,
         f"--global_batch_size {args.global_batch_size}: cannot be shared out; {problems} problems "
         f"x {steps} micro-steps x {ranks} ranks = {problems * steps * ranks}")
    args.problems_per_batch, args.gradient_accumulation_steps = problems, steps
    args.named = flags.named(args) | {"problems_per_batch", "gradient_accumulation_steps"}


def check_flags(args, world_size):
    """Raise UserError for values that would fail, or do nothing, later; fill in what derives."""
    need(not (args.per_device_train_batch_size and args.problems_per_batch),
         "give one of --per_device_train_batch_size, rows, and --problems_per_batch")
    names = ("problems_per_batch", "gradient_accumulation_steps", "learning_rate", "warmup_steps",
             "max_steps")
    need(not (args.per_device_train_batch_size and args.global_batch_size),
         "give one of --global_batch_size and --per_device_train_batch_size")
    args.batch_preset = args.batch_preset or ("finetune" if args.init_from else "recommended")
    if args.global_batch_size and (not args.auto or args.problems_per_batch
                                   or args.gradient_accumulation_steps):
        share_step(args, world_size)
    # problems become rows when the data is known
    for flag, value in zip(names, PRESETS[args.batch_preset]):
        if getattr(args, flag) is None:
            setattr(args, flag, value * 10 if flag == "learning_rate" and args.use_lora else value)
    if not args.global_batch_size:
        args.global_batch_size = args.problems_per_batch * args.gradient_accumulation_steps
    flags.check_shared(args)
    flags.check_bad_samples(args, CHECKS)
    flags.check_loading(args, build_parser())
    flags.check_parallel(args, world_size)
    if args.dry_run is None:        # long before the imports are done
        run_lock.check_free(args.output_dir)
    need((args.demo is not None) != bool(args.train_data_file),
         "give one of --train_data_file and --demo")
    need(args.init_ema or args.init_from, "--no-init_ema needs --init_from")
    flags.check_lora(args, build_parser())
    need(not args.use_lora or (args.init_from and args.system != "hdp"),
         "--use_lora needs --init_from of a language model, and no --system hdp")
    need(not args.chat or args.system == "gsm8k",
         "--chat needs --system gsm8k: plans have a form of their own, chats are in their template")
    for flag in ("eval_accuracy", "strip_calculator", "loss_on_question"):
        need(args.system != "chat" or not getattr(args, flag), f"--system chat has no --{flag}")
    need(not args.end_token or not (args.system == "hdp" or args.chat),
         "--end_token needs --system gsm8k, and no --chat, or --system chat")
    need(args.demo is None or not args.eval_data_file,
         "--demo makes its own validation problems: drop --eval_data_file")
    flags.at_least_one(args, *names[:2], "max_steps", "eval_repeats", "clip_search_batches", "demo")
    flags.zero_or_more(args, "row_length", "early_stop_patience", "eval_accuracy")
    need(args.best_by == "bound" or args.eval_accuracy, "--best_by accuracy needs --eval_accuracy")
    for flag in ("eval_accuracy", "clip_search_widths"):
        need(not getattr(args, flag) or args.eval_data_file or args.demo or args.validation_split,
             f"--{flag} needs validation data")
    flags.below_one(args, "ema_decay")
    need(all(0 < width < 1 for width in args.clip_search_widths),
         f"--clip_search_widths {args.clip_search_widths}: widths must lie between 0 and 1")
    from diffusion import problems  # last: it imports torch
    layout = layout_of(args)
    layout.check()
    args.t_range = tuple(args.t_range or problems.bound_range(layout))
    problems.check_range(args.t_range, layout)
    args.row_length = args.row_length or layout.longest


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import json

import numpy as np
import torch
from tqdm import tqdm

from common import checkpoint, distributed, run, tensor_files
from common.distributed import UserError
from core.problems import collect
from common.text import size as gib
from core import loading, metrics, optim
from core.packing import PackOrder, rank_packs
from diffusion import blocks, dit, elbo, noise, problems

# --------------------------------------------------------------------------------------------------
# Data, vocabulary, start


def prepare(args, world):
    """(Layout, Tokens, (training Rows, validation Rows or None), Config, published.Start or None,
    {name: bytes} that a checkpoint keeps beside tokenizer.json, the network's name for people).

    Raises UserError; a dry run's names all mistakes.
    """
    layout, path, dry = layout_of(args), None, args.dry_run is not None
    files, tokenizer = {}, "gpt2"
    if args.demo is not None:
        from diffusion import make_problems
        folder = Path(run.work_folder(args)) / "demo"
        args.train_data_file, args.eval_data_file, tokenizer = distributed.rank0_first(
            world, make_problems.prepare_demo, folder, args.system, args.demo)
    templated = args.chat or args.system == "chat"
    if args.init_from or templated:
        from diffusion import published
    if args.init_from:          # on rank 0 first: one download for all
        path = distributed.rank0_first(world, published.find, args.init_from)
        if published.is_causal(path) or (path / "tokenizer.json").is_file():
            tokenizer = path
    tokenizer = args.tokenizer or tokenizer
    if templated:
        args.tokenizer = str(tokenizer)     # whose template chats are read by
        layout = published.with_chat(layout, tokenizer)
    elif path:
        layout = published.with_form(layout, path)
    if path and "block_size" not in flags.named(args):
        before, size = problems.bound_range(layout), published.trained_form(path).get("block_size")
        layout = dataclasses.replace(layout, block_size=size or layout.block_size)
        layout.check()
        if args.t_range == before:
            args.t_range = problems.bound_range(layout)
        problems.check_range(args.t_range, layout)
    if path or templated:
        files = published.chat_files(tokenizer)
    tokens = distributed.rank0_first(world, problems.load_tokenizer, tokenizer, args.system,
                                     layout.end_token)
    config, name = dit.config_of(args.model_size, tokens.vocab_size, tokens.mask, args.dropout), ""
    if path:
        config = published.config_for(path, args.model_size, tokens, args.dropout)
        name = path.name if published.is_causal(path) else ""
    *_, rows, given = collect(
        dry, lambda: run.check_folders(args),
        lambda: distributed.check_bf16(world.device, args.bf16),
        lambda: blocks.prepare_rows(world, layout, tokens, args, None if dry else args.output_dir),
        lambda: path and published.read(path, config, tokens, args.init_ema, args.seed))
    if args.use_lora:
        config = published.with_lora(config, path, args.bf16, args.init_from, adapters_of(args))
    return layout, tokens, rows, config, given, files, name or args.model_size


def adapters_of(args):
    """Arguments of decoder.add_adapters that the flags name; {}: no adapters."""
    if not args.use_lora:
        return {}
    return {"rank": args.lora_rank, "alpha": args.lora_alpha, "dropout": args.lora_dropout,
            "targets": args.lora_target_modules, "rslora": args.use_rslora, "dora": args.use_dora}


def build_network(args, world, ranks, config, given, resume):
    """(network on this rank's device, what to call in training, elbo.Average). Raises UserError.

    given: published.Start or None. resume: folder of a checkpoint, or None: new.
    """
    device = world.device
    backend = args.attn_backend or ("flex" if device.type == "cuda" else "sdpa")
    if backend == "flex" and device.type == "cpu":
        raise UserError("--attn_backend flex trains on CUDA only: torch has no backward for it on "
                        "a CPU; drop the flag")
    distributed.seed_everything(args.seed)      # equal weights on all ranks
    model = config.network(config, backend, args.gradient_checkpointing).to(device)
    if args.compile:        # FlexAttention of unknown lengths is slow
        distributed.compile_layers(model.layers, dynamic=False)
    if sharding := run.sharding(args, ranks):
        distributed.shard(model, model.layers, world, **sharding)
    if given:
        from diffusion import published
        published.fill(model, given, args.seed, bool(resume))
    if resume:
        from common.resume import load_tensors
        load_tensors(resume, "model", elbo.trained(model), world)
    average = elbo.Average(model, args.ema_decay)
    if resume:
        load_tensors(resume, "ema", average.shadow, world)
    model.train()
    return model, model if sharding else distributed.wrap_ddp(model, world), average


# --------------------------------------------------------------------------------------------------
# Words


def print_start(args, config, name, rows, eval_rows, table, device, ranks, shards):
    """What is about to run. shards: GPUs that the state is sharded over."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    with torch.device("meta"):
        model = config.network(config)
    size = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in elbo.trained(model).values())
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    state = (20 * trained + base) / shards        # fp32 weights, gradients, two moments, average
    held_out = sum(len(m) for m in eval_rows.members) if eval_rows else 0
    dropped = f", {rows.documents.dropped} dropped" if rows.documents.dropped else ""
    filled = table["clean"].sum() / (len(rows) * rows.length)
    lengths = np.concatenate([rows.documents.tokens[m] for m in rows.members])
    print(f"device     {ranks} x {where}, torch {torch.__version__}, "
          f"{'bf16 autocast' if args.bf16 else 'fp32'}\n"
          f"model      {name}, {size:,} parameters"
          f"{f', {trained:,} of them trained' if base else ''}; weights, gradients, optimizer and "
          f"average {gib(state)} a GPU\n"
          f"problems   {table['samples'].sum()} to train, {held_out} to validate{dropped}; tokens "
          f"mean {lengths.mean():.0f} max {lengths.max()}\n"
          f"rows       {len(rows)} of {rows.length} clean and {rows.noisy_length} noisy tokens, "
          f"{filled * 100:.1f}% of the clean ones filled, {table['samples'].mean():.2f} problems "
          "each")


def loss_report(sums, regions):
    """Sums (10,) of all ranks since the last line -> {name: value}.

    Weighted losses and targets of each region, plain losses of masked tokens, how many these are.
    """
    losses, targets = sums[:4].tolist(), sums[4:8].tolist()
    cross_entropy, masked = sums[8:].tolist()
    if not sum(targets):        # every step was skipped: no loss to claim
        return dict.fromkeys(("train/loss", "train/masked_loss", "train/masked"), float("nan"))
    values = {"train/loss": sum(losses) / sum(targets),
              "train/masked_loss": cross_entropy / max(1, masked),
              "train/masked": masked / sum(targets)}
    return values | {f"train/loss_{name}": loss / n
                     for name, loss, n in zip(regions, losses, targets) if n}


def console_line(step, total_steps, v):
    """One aligned line of at most 160 characters; metrics.jsonl has all numbers."""
    mfu = f" | mfu {v['train/mfu'] * 100:4.1f}%" if "train/mfu" in v else ""
    return (f"step {step:>6}/{total_steps} | loss {v['train/loss']:7.4f} | masked "
            f"{v['train/masked'] * 100:4.1f}% ce {v['train/masked_loss']:7.4f} | lr "
            f"{v['train/learning_rate']:.2e} | grad_norm {v['train/grad_norm']:7.3f} | "
            f"{v['train/throughput']:>9,.0f} tok/s | wait {v['train/data_wait_seconds']:4.1f} "
            f"s{mfu} | eta {metrics.duration((total_steps - step) * v['train/step_seconds'])}")


def eval_line(step, v, regions):
    """The bound of a validation in one line."""
    error = f" +- {v['eval/stderr']:.4f}" if "eval/stderr" in v else ""
    parts = " ".join(f"{name} {v[f'eval/nll_{name}']:.4f}" for name in regions
                     if f"eval/nll_{name}" in v)
    if "eval/accuracy" in v:
        parts += (f" | right {v['eval/accuracy']:.1%}, by the last number "
                  f"{v['eval/accuracy_flexible']:.1%}")
    return (f"eval   step {step:>6} | nll <= {v['eval/nll']:.4f}{error} nats/token | "
            f"{v['eval/bits_per_token']:.4f} bits/token | perplexity <= "
            f"{v['eval/perplexity']:,.2f} | loss {v['eval/loss']:.4f} | {parts}")


# --------------------------------------------------------------------------------------------------
# Main


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    run.main(args, train)


def train(args):
    # -- ranks, data -------------------------------------------------------------------------------
    ranks, dry = run.ranks(args), args.dry_run is not None
    world, watch = run.start(args)
    layout, tokens, (rows, eval_rows), config, given, files, name = prepare(args, world)
    table, regions = blocks.row_table(rows), elbo.REGIONS[args.system]
    chosen = []         # problems that a validation answers
    if args.eval_accuracy and eval_rows:
        chosen = elbo.choose_problems(eval_rows, args.eval_accuracy, tokens, args.seed)
    if not args.per_device_train_batch_size:        # problems become rows
        per_row = table["samples"].mean()
        args.per_device_train_batch_size = max(1, round(args.problems_per_batch / per_row))
    if args.auto or dry:
        from diffusion import plan
    if args.auto:
        plan.choose(args, world, ranks, config, rows, eval_rows, table)
    batch_rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    # what a checkpoint must share with the run that goes on from it, by name
    identity = {**dataclasses.asdict(layout), "seed": args.seed,
                "model": [args.model_size, tokens.vocab_size], "adapters": adapters_of(args),
                "batch": [batch_rows, rows.length], "training data": rows.fingerprint(),
                "start": given.identity if given else ""}
    # what losses of validations must share to compare
    validation = eval_rows and [
        eval_rows.fingerprint(), args.eval_repeats, args.per_device_eval_batch_size,
        *([len(chosen), args.best_by] if chosen else [])]
    resume, meta = run.find_resume(args.output_dir, args.resume, identity, world)

    # -- order, number of steps: known to every rank without asking, so that collectives match -----
    order = PackOrder(np.ones(len(rows)), samples_per_pack=batch_rows, seed=args.seed)
    at, per_step, total_steps = run.position(meta), ranks * accumulation, args.max_steps
    step_rows = per_step * batch_rows
    step_problems = step_rows * table["samples"].mean()
    peak_lr = optim.sqrt_lr(args.learning_rate, step_problems,
                            args.scale_lr_from_batch or step_problems)
    schedule = run.intervals(args, total_steps, meta, bool(eval_rows), **OFTEN)
    if world.is_main:
        epochs = total_steps * per_step / order.packs_per_epoch
        node = args.shard_size or flags.local_ranks(ranks)
        shards = {"ddp": 1, "fsdp": ranks, "hsdp": node}[args.parallel]
        print_start(args, config, name, rows, eval_rows, table, world.device, ranks, shards)
        print(f"steps      {total_steps} = {epochs:,.1f} epochs; a step is {step_rows} rows "
              f"({step_problems:,.0f} problems) = {counted(ranks, 'rank')} x {accumulation} "
              f"micro-steps x {batch_rows}; peak lr {peak_lr:.2e}, warm-up {args.warmup_steps}\n"
              f"{schedule}")
        print(run.start_text(at["step"], resume, given.words if given else "new weights"))
    if dry:
        plan.print_plan(args, ranks, config, rows, eval_rows, table, order,
                        total_steps - at["step"])
        return print("dry run ok")

    # -- model, optimizer, resume ------------------------------------------------------------------
    watch.moved("loading the model", args.wait_timeout)
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    model, wrapped, average = build_network(args, world, ranks, config, given, resume)
    parameters = list(model.parameters())
    optimizer = optim.build_adamw(model.named_parameters(), peak_lr, args.weight_decay,
                                  (0.9, args.adam_beta2), model.decays)
    distributed.seed_everything(args.seed, world.rank)     # other dropout on every rank
    state = run.TrainState(world, watch, args, order, total_steps, (resume, meta),
                           run.Facts(10, validation, rows.documents.name))
    # range of noise, validations since the best one, best values so far, whether one is due:
    # weights that were given are validated first
    t_range, stale, best = args.t_range, 0, {}
    state.eval_due = bool(given and validation)     # then what was logged of it is dropped
    if meta:
        if missing := {"t_range", "stale", "best", "averaged"} - meta.keys():
            raise UserError(f"--output_dir {args.output_dir}: the state.json of its checkpoint has "
                            f"no {', '.join(sorted(missing))}; it is not of this trainer")
        if args.clip_search_widths:
            t_range = tuple(meta["t_range"])
        if meta["validation"] == validation:
            stale, best = meta["stale"], meta["best"]
        state.eval_due = bool(validation) and meta["eval_due"]
        average.updates.fill_(meta["averaged"])
    state.restore(model, optimizer)
    packs = rank_packs(order, world.rank, world.size, accumulation, sys.maxsize, at["epoch"],
                       at["first"])
    batches = loading.ahead(blocks.make_loader(
        rows, packs, batch_rows, rows.noisy_length, num_workers=args.num_workers,
        prefetch_factor=4))

    def validate():
        """(values, noise range to train on from here, answers to show); None: asked to stop."""
        how = elbo.Eval(eval_rows, tokens.mask, args.per_device_eval_batch_size, args.eval_repeats,
                        args.seed, args.bf16)
        distributed.reshard(model)
        average.swap()
        model.eval()
        searched, answers = t_range, []
        values = elbo.bound(world, model, how, state.writer.check)
        if values is not None and args.clip_search_widths:
            searched = elbo.search_range(world, model, how, state.writer.check, args)
        if values is not None and chosen:
            counted, answers = elbo.accuracy(world, model, how, chosen, tokens)
            values |= counted
        model.train()
        distributed.reshard(model)     # the forward passes left the averaged weights gathered
        average.swap()
        return None if values is None or searched is None else (values, searched, answers)

    def save():
        """Copy all of a checkpoint off the device and start writing it. On every rank."""
        meta = state.to_save(identity, stale=stale, best=best, t_range=t_range,
                             averaged=float(average.updates))
        state.writer.begin(meta["step"])
        distributed.reshard(model)
        rng = distributed.gather_on_main(world, checkpoint.rng_state(world.device))
        moments = optim.state_tensors(optimizer, model.named_parameters())
        written = tensor_files.stage(world, "model", elbo.trained(model))
        written |= tensor_files.stage(world, "ema", average.shadow)
        written |= tensor_files.stage(world, f"{checkpoint.STATE_DIR}/optimizer", moments)
        if world.is_main:
            about = {"model": dataclasses.asdict(config), "step": meta["step"],
                     "layout": dataclasses.asdict(layout), "source": given.source if given else {}}
            written[f"{checkpoint.STATE_DIR}/rng.pt"] = checkpoint.pickled(rng)
            written["config.json"] = lambda path: path.write_text(json.dumps(about, indent=1))
            written["tokenizer.json"] = lambda path: tokens.tokenizer.save(str(path))
            for file, content in files.items():
                written[file] = lambda path, content=content: path.write_bytes(content)
        state.writer.save(meta["step"], written, meta)

    # -- loop: validation and checkpoint of the steps so far, then the next step -------------------
    stopping, saving = False, state.eval_due    # saved again, so that it is not validated twice
    while True:
        # validate: by the averaged weights, on every rank
        better = False
        with state.pause():
            if state.eval_due and not stopping:
                watch.moved(f"validation at step {state.step}", args.wait_timeout)
                found = validate()
                stopping = found is None    # asked to stop: the next start validates first
            if state.eval_due and not stopping:
                values, t_range, answers = found
                state.eval_due, state.saved_step = False, None
                nll, wrong = values["eval/nll"], 1 - values.get("eval/accuracy", 1)
                # of equally many right answers, none at first, the better bound decides
                better = state.better(nll) if args.best_by == "bound" else state.better(wrong, nll)
                stale = 0 if elbo.improved(best, values) else stale + 1
                if world.is_main:
                    state.log.write(state.step, values)
                    tqdm.write(eval_line(state.step, values, regions))
                    if answers:
                        elbo.write_answers(args.output_dir, state.step, answers)
            enough = bool(args.early_stop_patience) and stale >= args.early_stop_patience

            # save: a better one, one that is due, or the last; not what is saved already
            if (better or saving or stopping or enough) and state.saved_step != state.step:
                save()
        if state.step >= total_steps or stopping or enough:
            break

        # rows of the step, of all ranks: the loss divides by their targets, however they are split
        window = state.window()
        work = {name: int(values[window].sum()) for name, values in table.items()}
        masked_share = sum(t_range) / 2
        work["flops"] = model.flops(work["noisy"] + work["clean"], work["targets"] * masked_share,
                                    work["pairs"])
        # noise is drawn for the whole step and then cut: it is the same on any number of ranks
        draws = noise.draw(args.seed, "train", state.step, work["groups"], step_rows, rows.length)
        first_groups = np.concatenate([[0], np.cumsum(table["groups"][window])])
        sums = torch.zeros_like(state.sums)     # as loss_report reads them
        for micro in range(accumulation):
            batch = state.next(batches)
            # rows that this rank has in this micro-step; an epoch's last step may have fewer
            first = (micro * world.size + world.rank) * batch_rows
            mine = window[first:first + batch_rows]
            # else this rank's loss would be divided by another count than the others'
            assert batch.n_targets == table["targets"][mine].sum(), "loader and plan disagree"
            part = draws.part(first, batch_rows, first_groups[min(first, len(window))],
                              batch.n_groups)
            inputs = noise.diffuse(batch, part, tokens.mask, t_range, args.loss_weighting)
            region = noise.send(batch.region.flatten()[inputs.places], world.device)
            inputs = inputs.to(world.device)

            # ranks exchange gradients once a step: in the last micro-step, when they are complete
            with distributed.gradient_sync(wrapped, micro == accumulation - 1):
                # forward: cross-entropy of each masked token
                with torch.autocast(world.device.type, torch.bfloat16, enabled=args.bf16):
                    losses = wrapped(inputs)
                # loss: weighted so that it bounds the likelihood; a part of the step's mean
                weighted = losses * inputs.weights
                loss = weighted.sum() / work["targets"]
                # backward: gradients are averaged over ranks, the loss is a mean over them all
                (loss * world.size).backward()
            documents = [document for row in mine for document in rows.members[row]]
            state.note_loss(loss, documents)
            # for the log, without waiting for the device
            sums[:4].index_add_(0, region, weighted.detach().double())
            sums[8].add_(losses.detach().double().sum())
            sums[9].add_(len(inputs.rows))
        if world.is_main:               # the plan knows those of all ranks
            for i in range(4):          # one by one: a tensor made of them would wait for the GPU
                sums[4 + i] += work[f"targets_{i}"]

        # step: clip, AdamW, average; a step whose gradient is not finite changes nothing
        factor = optim.lr_factor(state.step, total_steps, args.warmup_steps, args.lr_scheduler,
                                 args.min_lr_ratio)
        skipped = state.update(optimizer, parameters, peak_lr * factor, sums)
        average.update(skipped)

        # the same on every rank; a request to stop counts one step late, so no step waits for it
        state.eval_due = bool(eval_rows) and state.due(args.eval_steps)
        saving = state.save_due()
        stopping = state.stop_asked(state.eval_due or saving) and (state.eval_due or not state.last)

        # log: sums of all ranks and steps since the last line
        state.count(step_rows * rows.length, work)
        if state.due(args.logging_steps):
            values = loss_report(distributed.all_sum(world, state.sums).cpu(), regions)
            if world.is_main:
                state.log_step(values | {"train/t_low": t_range[0], "train/t_high": t_range[1]},
                               lambda v: console_line(state.step, total_steps, v))
            state.sums.zero_()
            state.begin_line()
    early = ""
    if enough and state.step < total_steps:
        early = f" (no better bound{' or accuracy' if chosen else ''} in {stale} validations)"
    best_words = {"bound": "bound {:.4f} nats/token", "accuracy": "{:.2%} wrong"}[args.best_by]
    state.finish(stopping, early, best_words)


if __name__ == "__main__":
    main()
