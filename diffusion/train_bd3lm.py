"""Block diffusion on GSM8K: BD3-LM (question -> answer) and HDP (question -> plan -> execution), DDP or FSDP2.

    python diffusion/train_bd3lm.py --train_data_file train.jsonl --tokenizer gpt2 --output_dir ./out --bf16 --compile
    python diffusion/train_bd3lm.py --system hdp --train_data_file train_hdp.json --tokenizer gpt2 --output_dir ./out
    python diffusion/train_bd3lm.py --demo --model_size nano --max_steps 300 ...   # offline: small problems of its own

Loss: a bound on the negative log-likelihood (noise.py), averaged over every target of the whole optimizer step, all
ranks and micro-steps. The counts come from the plan that all ranks share, and so does the noise, which is drawn for
the whole step: any split of a step over ranks and micro-steps trains the same model (dropout aside).

Validation, early stopping and samples use the averaged weights. 50,000 steps of 512 problems are 3,400 passes over
GSM8K's 7,473, and of 512 packed rows, three problems each, 10,000: such a run memorises, so watch eval/nll and keep
--early_stop_patience on.

SIGTERM or SIGUSR1: the step is finished, a checkpoint saved, OUTPUT_DIR/requeue left for the launcher; exit status 0.
"""
import argparse
import dataclasses
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags, run_lock
from common.flags import need
from diffusion.choices import (
    CHECKS,
    EXECUTION,
    FULL,
    PLAN,
    PRESETS,
    SCHEDULES,
    SIZES,
    SYSTEMS,
    Layout,
    bound_range,
    check_range,
)

# ---------------------------------------------------------------------------------------------------------------------
# Flags


def default_workers():
    """Loader processes of this rank: its share of the CPUs it may use, 1 to 16."""
    return min(16, max(1, flags.usable_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


OFTEN = {"eval_steps": 500, "save_steps": 2000}      # steps between validations and checkpoints, by default


def build_parser():
    p = flags.Parser("Train block diffusion on GSM8K.")
    flags.before_the_run(p)
    g = p.add_argument_group("data")
    g.add_argument("--system", choices=SYSTEMS, default="gsm8k",
                   help="gsm8k: question, answer; hdp: question, plan, execution")
    g.add_argument("--train_data_file", "--train_data",
                   help="JSONL or JSON file, dataset folder (its train split) or hub name")
    g.add_argument("--eval_data_file", "--eval_data",
                   help="the same (test split) for validation; else --validation_split is held out")
    g.add_argument("--validation_split", type=float, default=0.05, help="share of problems held out, 0 = no validation")
    g.add_argument("--tokenizer",
                   help="tokenizer.json, folder with it or with GPT-2's files, hub name (default: that of --init_from "
                        "where it is a language model, the demo's own with --demo, else gpt2)")
    flags.switch(g, "--chat", help="gsm8k: questions in the tokenizer's chat template, answers end as its turns do")
    g.add_argument("--demo", nargs="?", type=int, const=2000, metavar="PROBLEMS",
                   help="make so many arithmetic problems and a small tokenizer in OUTPUT_DIR/demo and train on them; "
                        "the flag alone: 2000")
    g.add_argument("--hdp_layout", choices=("hierarchical", "flat"), default="hierarchical",
                   help="hdp: flat is the source's padded form, for comparison")
    g.add_argument("--block_size", type=int, default=16, help="tokens of a block; 1 is autoregressive")
    g.add_argument("--plan_block_size", type=int, default=0, help="hdp: tokens of a plan block, 0 = --block_size")
    g.add_argument("--execution_block_size", type=int, default=0, help="hdp: of an execution block, 0 = --block_size")
    g.add_argument("--max_length", type=int, default=512, help="gsm8k: tokens a problem may have")
    g.add_argument("--question_budget", type=int, default=128, help="hdp: tokens a question may have")
    g.add_argument("--plan_budget", type=int, default=128, help="hdp: tokens a plan may have, markers included")
    g.add_argument("--execution_budget", type=int, default=256, help="hdp: tokens an execution may have, with answer")
    flags.bad_samples(g, CHECKS)
    flags.switch(g, "--strip_calculator", help="remove GSM8K's <<48/2=24>> marks")
    flags.switch(g, "--loss_on_question", help="noise and train the question, too")
    g.add_argument("--pack", action=argparse.BooleanOptionalAction, default=True,
                   help="several problems in a row instead of padding; same loss")
    g.add_argument("--row_length", type=int, default=0, help="clean tokens of a row, 0 = the longest problem allowed")
    flags.loading(g, num_workers=default_workers())

    g = p.add_argument_group("model and noise")
    g.add_argument("--model_size", choices=tuple(SIZES), default="small", help="nano is for demos and tests")
    g.add_argument("--init_from", metavar="WEIGHTS",
                   help="start from published BD3-LM or MDLM weights (hub name kuleshov-group/bd3lm-owt-block_size16, "
                        "folder, Lightning .ckpt), a checkpoint of this trainer, whatever its block size, or a causal "
                        "language model shaped like Llama or Qwen3 (folder, hub name Qwen/Qwen3-0.6B)")
    g.add_argument("--init_ema", action=argparse.BooleanOptionalAction, default=True,
                   help="of --init_from take the averaged weights; no-: the last ones")
    g.add_argument("--dropout", type=float, default=0.1, help="on the output of attention and MLP, 0 to 1")
    g.add_argument("--noise_schedule", choices=SCHEDULES, default="loglinear", help="masked share as t grows")
    g.add_argument("--t_range", type=float, nargs=2, metavar=("LOW", "HIGH"),
                   help="noise levels trained on; a clipped range also clips the masked share of every block (default: "
                        f"{FULL[0]:g} to 1; 1 where all blocks are single tokens: autoregressive)")
    g.add_argument("--clip_search_widths", type=float, nargs="*", default=(), metavar="WIDTH",
                   help="after each validation train on the range of such a width whose loss varies least")
    g.add_argument("--clip_search_batches", type=int, default=4, help="validation batches that search may use")
    g.add_argument("--loss_weighting", choices=("elbo", "ce"), default="elbo", help="the bound's weights, or all 1")
    flags.switch(g, "--official_t_order", help="strata of t in order of blocks, not permuted")
    g.add_argument("--ema_decay", type=float, default=0.9999, help="of the averaged weights, after its warm-up")
    flags.lora(g, rank=32, alpha=32, dropout=0.0, targets="all-linear",
               targets_help="all-linear or name endings; the mask's row is trained as well")

    g = p.add_argument_group("batch and length of the run")
    g.add_argument("--batch_preset", choices=tuple(PRESETS),
                   help="defaults of the next two, and of rate, warm-up and steps (default: recommended; finetune with "
                        "--init_from): "
                   + "; ".join(f"{name} {b} x {a}, {lr:g}" for name, (b, a, lr, _, _) in PRESETS.items()))
    g.add_argument("--per_device_train_batch_size", type=int,
                   help="rows per micro-step and rank (default: as many as hold --problems_per_batch on average)")
    g.add_argument("--problems_per_batch", type=int, help="problems per micro-step and rank (default: preset's)")
    g.add_argument("--gradient_accumulation_steps", type=int, help="micro-steps per optimizer step (default: preset's)")
    g.add_argument("--global_batch_size", type=int, default=0, help="with --auto: problems per optimizer step, of all "
                   "ranks (default: the two numbers of the preset multiplied)")
    g.add_argument("--per_device_eval_batch_size", type=int, default=32, help="rows per validation batch")
    g.add_argument("--max_steps", type=int, help="optimizer steps (default: preset's)")

    g = flags.optimisation(p, learning_rate=None,
                           learning_rate_help="peak learning rate (default: preset's; 10 times that with --use_lora)",
                           lr_scheduler="constant", min_lr_ratio=0.0, weight_decay=0.0, adam_beta2=0.999,
                           decayed="matrices, not of the embedding")
    g.add_argument("--warmup_steps", type=int, help="optimizer steps of linear warm-up (default: preset's)")
    g.add_argument("--scale_lr_from_batch", type=int, default=0, metavar="N",
                   help="multiply the rate by sqrt(problems per optimizer step / N), 0 = off")

    g = flags.speed(p, parallel="ddp", bf16_help="bfloat16 compute, float32 weights")
    g.add_argument("--attn_backend", choices=("flex", "sdpa"),
                   help="block-sparse or dense masks (default: flex on CUDA, sdpa on a CPU); flex is dense in "
                        "rows of fewer than 128 noisy copies")

    g = flags.logging(p, logging_steps=50, save_total_limit=3, **OFTEN)
    g.add_argument("--eval_repeats", type=int, default=4, help="draws of the noise in a validation, for its error bar")
    g.add_argument("--eval_accuracy", type=int, default=0, metavar="PROBLEMS",
                   help="answer so many held-out problems in every validation, 0 = none")
    g.add_argument("--best_by", choices=("bound", "accuracy"), default="bound",
                   help="what makes a checkpoint the best one; accuracy: strict, of --eval_accuracy")
    g.add_argument("--early_stop_patience", type=int, default=10,
                   help="stop after this many validations without a better bound or accuracy, 0 = never")
    return p


def layout_of(args):
    """The Layout that the flags name."""
    return Layout(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Layout) if hasattr(args, f.name)})


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later; fill in what derives."""
    need(not (args.per_device_train_batch_size and args.problems_per_batch),
         "give one of --per_device_train_batch_size, rows, and --problems_per_batch")
    names = ("problems_per_batch", "gradient_accumulation_steps", "learning_rate", "warmup_steps", "max_steps")
    args.batch_preset = args.batch_preset or ("finetune" if args.init_from else "recommended")
    for flag, value in zip(names, PRESETS[args.batch_preset]):      # problems become rows when the data is known
        if getattr(args, flag) is None:
            setattr(args, flag, value * 10 if flag == "learning_rate" and args.use_lora else value)
    need(args.auto or not args.global_batch_size, "--global_batch_size needs --auto; or give --problems_per_batch")
    for flag in ("problems_per_batch", "per_device_train_batch_size", "gradient_accumulation_steps"):
        need(not args.global_batch_size or flag not in flags.named(args),
             f"give one of --global_batch_size and --{flag}")
    args.global_batch_size = args.global_batch_size or args.problems_per_batch * args.gradient_accumulation_steps
    flags.check_shared(args)
    flags.check_bad_samples(args, CHECKS)
    flags.check_loading(args, build_parser())
    flags.check_parallel(args, world_size)
    if args.dry_run is None:        # long before the imports are done
        run_lock.look(args.output_dir)
    need((args.demo is not None) != bool(args.train_data_file), "give one of --train_data_file and --demo")
    need(args.init_ema or args.init_from, "--no-init_ema needs --init_from")
    flags.check_lora(args, build_parser())
    need(not args.use_lora or (args.init_from and args.system == "gsm8k"),
         "--use_lora needs --init_from of a language model, and --system gsm8k: of new tokens it learns the mask only")
    need(not args.chat or args.system == "gsm8k", "--chat needs --system gsm8k: plans have a form of their own")
    need(args.demo is None or not args.eval_data_file,
         "--demo makes its own validation problems: drop --eval_data_file")
    flags.at_least_one(args, *names[:2], "max_steps", "eval_repeats", "clip_search_batches", "demo")
    flags.zero_or_more(args, "row_length", "early_stop_patience", "eval_accuracy")
    need(args.best_by == "bound" or args.eval_accuracy, "--best_by accuracy needs --eval_accuracy")
    need(not args.eval_accuracy or args.eval_data_file or args.demo or args.validation_split,
         "--eval_accuracy needs validation data")
    flags.below_one(args, "ema_decay")
    need(all(0 < width < 1 for width in args.clip_search_widths),
         f"--clip_search_widths {args.clip_search_widths}: widths must lie between 0 and 1")
    need(not args.clip_search_widths or args.eval_data_file or args.demo or args.validation_split,
         "--clip_search_widths needs validation data")
    need(args.hdp_layout == "hierarchical" or args.system == "hdp", "--hdp_layout flat needs --system hdp")
    need(args.hdp_layout == "hierarchical" or not args.pack, "--hdp_layout flat pads each problem: add --no-pack")
    layout = layout_of(args)
    layout.check()
    args.t_range = tuple(args.t_range or bound_range(layout))
    args.row_length = args.row_length or layout.longest
    for size in {layout.region_block(PLAN), layout.region_block(EXECUTION)}:
        check_range(args.t_range, size)


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import json

import numpy as np
import torch
from tqdm import tqdm

from common import checkpoint, distributed, loading, optim, run, tensor_files
from common.distributed import UserError
from common.packing import PackOrder, rank_packs
from common.problems import collect
from diffusion import accuracy, blocks, decoder, demo_problems, elbo, init_from, lines, noise, weights
from diffusion.problems import load_tokenizer

# ---------------------------------------------------------------------------------------------------------------------
# Model and checkpoints


def build_model(world, config, resume, given, *, sharding, backend, compiled, recompute, ema_decay, seed):
    """(network, what to call in training, weights.Average) on this rank's device, new or from the checkpoint `resume`.

    given: start.Start of a new one, or None. sharding: of run.sharding. backend: --attn_backend, None for what is best
    on the device. UserError when it cannot train there.
    """
    device = world.device
    backend = backend or ("flex" if device.type == "cuda" else "sdpa")
    if backend == "flex" and device.type == "cpu":
        raise UserError("--attn_backend flex trains on CUDA only: torch has no backward for it on a CPU; drop the flag")
    distributed.seed_everything(seed)          # equal weights on all ranks
    model = weights.module_of(config).Model(config, backend, recompute).to(device)
    if compiled:
        distributed.compile_layers(model.layers, dynamic=False)    # FlexAttention of unknown lengths is slow
    if sharding:
        distributed.shard(model, model.layers, world, **sharding)
    lora = getattr(config, "lora", None)
    if given and (lora or not resume):
        for name, parameter in decoder.base_weights(model).items():
            tensor_files.fill(parameter, given.tensors[name])
    if resume:
        weights.load_weights(weights.trained(model), resume, "model", world)
    elif lora:
        decoder.begin_adapters(model, given.tensors, seed)
    average = weights.Average(model, ema_decay)
    if resume:
        weights.load_weights(average.shadow, resume, "ema", world)
    model.train()
    return model, model if sharding else distributed.wrap_ddp(model, world), average


def save_checkpoint(world, writer, model, average, optimizer, layout, tokens, given, meta):
    """Copy all of checkpoint-<meta["step"]> off the device and start writing it. On every rank. given: of build_model.
    """
    writer.begin(meta["step"])
    distributed.reshard(model)
    states = distributed.gather_on_main(world, checkpoint.rng_state(world.device))
    moments = optim.state_tensors(optimizer, model.named_parameters())
    files = tensor_files.stage(world, "model", weights.trained(model))
    files |= tensor_files.stage(world, "ema", average.shadow)
    files |= tensor_files.stage(world, f"{checkpoint.STATE_DIR}/optimizer", moments)
    if world.is_main:
        config = json.dumps({"model": dataclasses.asdict(model.config), "layout": dataclasses.asdict(layout),
                             "step": meta["step"], "source": given.source if given else {}}, indent=1)
        files[f"{checkpoint.STATE_DIR}/rng.pt"] = lambda path: torch.save(states, path)
        files["config.json"] = lambda path: path.write_text(config)
        files["tokenizer.json"] = lambda path: tokens.tokenizer.save(str(path))
    writer.save(meta["step"], files, meta)


# ---------------------------------------------------------------------------------------------------------------------
# Validation and work of a step


def validate(world, model, average, rows, tokens, check, t_range, asked, *, repeats, widths, batches, schedule,
             weighting, **how):
    """(values, noise range to train on from here, answers to show), by the averaged weights; None: asked to stop.

    values: of bound.bound, and of accuracy.accuracy for the problems `asked`. t_range: the range so far, which stays
    where no widths are searched. how: batch_rows, seed, bf16.
    """
    distributed.reshard(model)
    average.swap()
    model.eval()
    answers = []
    values = elbo.bound(world, model, rows, tokens.mask, check, repeats=repeats, **how)
    if values is not None and widths:
        t_range = elbo.search_range(world, model, rows, tokens.mask, check, widths=widths, batches=batches,
                                     schedule=schedule, weighting=weighting, **how)
    if values is not None and asked:
        counted, answers = accuracy.accuracy(world, model, asked, tokens, rows.documents.layout, **how)
        values |= counted
    model.train()
    distributed.reshard(model)     # the forward passes left the averaged weights gathered
    average.swap()
    return None if values is None or t_range is None else (values, t_range, answers)


def identity_of(layout, rows, given, **more):
    """What a checkpoint must share with the run that goes on from it, by name."""
    newer = {"prompt", "end_token", "start", "adapters"}        # older checkpoints do not have them
    found = more | dataclasses.asdict(layout) | {"training data": rows.fingerprint(),
                                                 "start": given.identity if given else ""}
    return {name: value for name, value in found.items() if value or name not in newer}


def resume_validation(meta, validation, t_range, widths, given):
    """(noise range, validations since the best one, best values so far, whether a validation comes first) of a run.

    meta: of the checkpoint, or None; validation: what it is on, None without; given: whether weights were given, which
    are validated first. Bounds on other data or by other noise do not compare.
    """
    if not meta:
        return t_range, 0, {}, given and bool(validation)
    same = meta["validation"] == validation
    return (tuple(meta["t_range"]) if widths else t_range, meta["stale"] if same else 0,
            meta.get("best", {}) if same else {}, bool(validation) and meta.get("eval_due", False))


def lora_of(args):
    """What start.with_lora needs of the flags, by name; {}: no adapters."""
    return {} if not args.use_lora else {"rank": args.lora_rank, "alpha": args.lora_alpha, "dropout": args.lora_dropout,
            "targets": args.lora_target_modules, "rslora": args.use_rslora, "dora": args.use_dora}


def for_validation(args):
    """What validate needs of the flags, by name."""
    return {"repeats": args.eval_repeats, "widths": args.clip_search_widths, "batches": args.clip_search_batches,
            "schedule": args.noise_schedule, "weighting": args.loss_weighting,
            "batch_rows": args.per_device_eval_batch_size, "seed": args.seed, "bf16": args.bf16}


def step_work(config, table, window, masked_share):
    """Totals over the rows of one optimizer step, from the plan: useful work of all ranks, python numbers.

    table: blocks.row_table. masked_share: of the targets, on average; only masked ones reach the head.
    """
    work = {name: int(values[window].sum()) for name, values in table.items()}
    return work | {"flops": weights.module_of(config).flops(
        config, work["noisy"] + work["clean"], work["targets"] * masked_share, work["pairs"])}


# ---------------------------------------------------------------------------------------------------------------------
# Main


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    run.main(args, train)


def train(args):
    # -- ranks, data --------------------------------------------------------------------------------------------------
    layout, ranks, dry = layout_of(args), run.ranks(args), args.dry_run is not None
    work_dir = run.work_folder(args)
    world, watch = run.start(args)
    device, main_rank = world.device, world.is_main
    if args.demo is not None:
        args.train_data_file, args.eval_data_file, made = distributed.rank0_first(
            world, demo_problems.prepare, Path(work_dir) / "demo", args.system, args.demo)
    # one download for all
    path = args.init_from and distributed.rank0_first(world, init_from.find, args.init_from)
    tokenizer = args.tokenizer or (path if init_from.is_causal(path) else "gpt2" if args.demo is None else made)
    if args.chat:
        layout = init_from.with_chat(layout, tokenizer)
    tokens = distributed.rank0_first(world, load_tokenizer, tokenizer, args.system, layout.end_token)
    config = init_from.config_for(path, args.model_size, tokens, args.dropout)
    # a run ends at the first mistake, a dry run names them all
    *_, (rows, eval_rows), given = collect(
        dry, lambda: run.check_folders(args), lambda: distributed.check_bf16(device, args.bf16),
        lambda: blocks.prepare_rows(
            world, layout, tokens, args.train_data_file, eval_data=args.eval_data_file,
            validation_split=args.validation_split, row_length=args.row_length, pack=args.pack,
            drop=args.drop_bad, output_dir=None if dry else args.output_dir, seed=args.seed),
        lambda: path and init_from.read(path, config, tokens, args.init_ema, args.seed))
    config = init_from.with_lora(config, path, args.bf16, args.init_from, lora_of(args))
    table, regions = blocks.row_table(rows), elbo.REGIONS[args.system]
    if not args.per_device_train_batch_size:        # problems become rows
        args.per_device_train_batch_size = max(1, round(args.problems_per_batch / table["samples"].mean()))
    if args.auto or dry:
        from diffusion import plan
    if args.auto:
        plan.choose(args, world, ranks, config, rows, eval_rows, table)
    batch_rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    identity = identity_of(layout, rows, given, seed=args.seed, model=[args.model_size, tokens.vocab_size],
                           batch=[batch_rows, rows.length], adapters=lora_of(args))
    asked = accuracy.choose(eval_rows, args.eval_accuracy, tokens, args.seed)
    validation = eval_rows and [eval_rows.fingerprint(), args.eval_repeats, args.per_device_eval_batch_size,
                                *([len(asked), args.best_by] if asked else [])]
    resume, meta = checkpoint.find_resume(args.output_dir, args.resume, identity, world)

    # -- order, number of steps: known to every rank without asking, so all make the same number of collectives -------
    order, at = PackOrder(np.ones(len(rows)), samples_per_pack=batch_rows, seed=args.seed), run.position(meta)
    per_step, total_steps = ranks * accumulation, args.max_steps
    step_rows = per_step * batch_rows
    step_problems, epochs = step_rows * table["samples"].mean(), total_steps * per_step / order.packs_per_epoch
    peak_lr = optim.sqrt_lr(args.learning_rate, step_problems, args.scale_lr_from_batch or step_problems)
    often = run.intervals(args, total_steps, meta, bool(eval_rows), **OFTEN)
    shards = {"ddp": 1, "fsdp": ranks, "hsdp": args.shard_size or flags.local_ranks(ranks)}[args.parallel]
    if main_rank:
        lines.print_start(device, ranks, config, rows, eval_rows, table,
                    f"steps      {total_steps} = {epochs:,.1f} epochs; a step is {step_rows} rows "
                    f"({step_problems:,.0f} problems) = {ranks} ranks x {accumulation} micro-steps x "
                    f"{batch_rows}; peak lr {peak_lr:.2e}, warm-up {args.warmup_steps}\n{often}\n"
                    f"{run.start_text(at['step'], resume, given.words if given else 'new weights')}",
                    size_name=path.name if init_from.is_causal(path) else args.model_size,
                    shards=shards, bf16=args.bf16)
    if dry:
        plan.print_plan(args, ranks, config, rows, eval_rows, table, order, total_steps - at["step"])
        return print("dry run ok")

    # -- model, optimizer, resume -------------------------------------------------------------------------------------
    watch.moved("loading the model", args.wait_timeout)
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    model, wrapped, average = build_model(
        world, config, resume, given, sharding=run.sharding(args, ranks), backend=args.attn_backend,
        compiled=args.compile, recompute=args.gradient_checkpointing, ema_decay=args.ema_decay, seed=args.seed)
    parameters = list(model.parameters())
    optimizer = optim.build_adamw(model.named_parameters(), peak_lr, args.weight_decay,
                                  (args.adam_beta1, args.adam_beta2), weights.module_of(config).decays)
    distributed.seed_everything(args.seed, world.rank)     # other dropout on every rank
    # a step's log values: weighted losses of 4 regions, their targets (on rank 0), plain losses, masked tokens
    state = run.TrainState(world, watch, args, order, total_steps, 10, resume, meta, validation, rows.documents.name)
    state.restore(model, optimizer)
    if meta:
        average.updates.fill_(meta["averaged"])
    t_range, stale, best, eval_due = resume_validation(meta, validation, args.t_range, args.clip_search_widths, bool(given))
    packs = rank_packs(order, world.rank, world.size, accumulation, sys.maxsize, at["epoch"], at["first"])
    batches = loading.ahead(blocks.make_loader(rows, packs, batch_rows, rows.noisy_length, num_workers=args.num_workers,
                                               prefetch_factor=args.prefetch_factor))

    # -- loop: validation and checkpoint of the steps so far, then the next step --------------------------------------
    stopping, saving = False, eval_due          # saved again, so that the validation is not done twice
    while True:
        with state.pause():
            better = False
            if eval_due and not stopping:
                watch.moved(f"validation at step {state.step}", args.wait_timeout)
                found = validate(world, model, average, eval_rows, tokens, state.writer.check, t_range, asked,
                                 **for_validation(args))
                if found is None:               # asked to stop meanwhile: the next start validates first
                    stopping = True
                else:
                    (values, t_range, answers), eval_due, state.saved_step = found, False, None
                    better = state.better(values["eval/nll"] if args.best_by == "bound" else 1 - values["eval/accuracy"])
                    stale = 0 if accuracy.improved(best, values) else stale + 1
                    if main_rank:
                        state.log.write(state.step, values)
                        if asked:
                            accuracy.write(args.output_dir, state.step, answers)
                        tqdm.write(lines.eval_line(state.step, values, regions))
            enough = bool(args.early_stop_patience) and stale >= args.early_stop_patience
            if (better or saving or stopping or enough) and state.saved_step != state.step:
                meta = state.to_save(identity, eval_due=eval_due, stale=stale, best=best, t_range=t_range,
                                 averaged=float(average.updates))
                save_checkpoint(world, state.writer, model, average, optimizer, layout, tokens, given, meta)
        if state.step >= total_steps or stopping or enough:
            break

        window = state.window()                   # rows of this step, all ranks: the loss divides by their targets
        work = step_work(config, table, window, noise.mean_rate(t_range, args.noise_schedule))
        # noise is drawn for the whole step and then cut, so that it does not depend on ranks and micro-steps
        draws = noise.draw(args.seed, "train", state.step, work["groups"], step_rows, rows.length,
                           not args.official_t_order)
        first_groups = np.concatenate([[0], np.cumsum(table["groups"][window])])
        sums = torch.zeros_like(state.sums)
        for micro in range(accumulation):
            batch = state.next(batches)
            first = (micro * world.size + world.rank) * batch_rows
            mine = window[first:first + batch_rows]
            # a batch that differs from the plan would divide the loss by another count than the other ranks'
            assert batch.n_targets == table["targets"][mine].sum(), "loader and plan disagree"
            part = draws.part(first, batch_rows, first_groups[min(first, len(window))], batch.n_groups)
            inputs = noise.diffuse(batch, part, tokens.mask, t_range, args.noise_schedule, args.loss_weighting)
            region = noise.send(batch.region.flatten()[inputs.places], device)
            inputs = inputs.to(device)
            with distributed.gradient_sync(wrapped, micro == accumulation - 1):    # ranks exchange gradients once a step
                with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                    losses = wrapped(inputs)            # cross-entropy of each masked token
                weighted = losses * inputs.weights      # so that their sum bounds the likelihood
                loss = weighted.sum() / work["targets"]
                (loss * world.size).backward()          # gradients are averaged over ranks, the loss is a global mean
            sums[:4].index_add_(0, region, weighted.detach().double())
            sums[8] += losses.detach().double().sum()
            sums[9] += len(inputs.rows)
            state.note_loss(loss, [document for row in mine for document in rows.members[row]])
        if main_rank:
            for i in range(4):      # python numbers: a tensor made of them would wait for the GPU
                sums[4 + i] += work[f"targets_{i}"]
        factor = optim.lr_factor(state.step, total_steps, args.warmup_steps, args.lr_scheduler, args.min_lr_ratio)
        average.update(state.update(optimizer, parameters, peak_lr * factor, sums))       # not by a skipped step

        # what comes now is the same on every rank; a request to stop counts one step late, so no step waits for it
        eval_due, saving = bool(eval_rows) and state.due(args.eval_steps), state.save_due()
        stopping = state.stop_asked(eval_due or saving) and (eval_due or not state.last)
        state.count(step_rows * rows.length, work)
        if state.due(args.logging_steps):
            values = lines.loss_report(distributed.all_sum(world, state.sums).tolist(), regions)
            if main_rank:
                state.log_step(values | {"train/t_low": t_range[0], "train/t_high": t_range[1]},
                         lambda v: lines.console_line(state.step, total_steps, v))
            state.sums.zero_()
            state.begin_line()
    what = "bound or accuracy" if asked else "bound"
    early = f" (no better {what} in {stale} validations)" if enough and state.step < total_steps else ""
    state.finish(stopping, early, {"bound": "bound {:.4f} nats/token", "accuracy": "{:.2%} wrong"}[args.best_by])


if __name__ == "__main__":
    main()
