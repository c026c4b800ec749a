"""Train block diffusion: BD3-LM (question -> answer), HDP (question -> plan -> execution), chats.

    python diffusion/train_bd3lm.py --train_data_file train.jsonl --tokenizer gpt2 --output_dir out
    python diffusion/train_bd3lm.py --system hdp --train_data_file train_hdp.json ...
    python diffusion/train_bd3lm.py --demo --model_size nano --max_steps 300 ...    # offline
    torchrun --nproc_per_node=8 diffusion/train_bd3lm.py ... --init_from Qwen/Qwen3-0.6B --bf16

The loss is a bound on the negative log-likelihood (blocks.py), averaged over all targets of the
optimizer step on all ranks and micro-steps. The noise is also drawn for the whole step, so any
split of it trains the same model. Validation and early stopping use the averaged weights.

On SIGTERM, SIGUSR1 or a file OUTPUT_DIR/stop the run finishes the step, saves a checkpoint, writes
OUTPUT_DIR/requeue for the launcher and exits with status 0. Rerun the same command to resume.
"""
import dataclasses
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is next to this folder

from core import cli
from core.cli import BELOW_1, COUNT
from diffusion import choices

# ---- Flags
p = cli.Parser("Train block diffusion on questions and answers, or on chats.")
flag, switch = p.flag, p.switch
cli.trainer_flags(p, choices.CHECKS)   # of every trainer: --config, --use_lora, --seed, ...
p.set_defaults(lora_rank=32, lr_scheduler="constant", weight_decay=0.0, logging_steps=50,
               num_workers=16, per_device_eval_batch_size=32, compile=False)
# data
flag("--system", "gsm8k", "gsm8k: question, answer; chat: the answers of chats; hdp: question, "
     "plan, execution", choices=("gsm8k", "chat", "hdp"))
flag("--train_data_file", None, "JSONL, JSON, dataset folder (its train split) or hub name")
flag("--validation_split", 0.05, "share of problems held out, 0 = none", BELOW_1)
flag("--tokenizer", None, "tokenizer.json, folder, or hub name (default: --init_from's, gpt2)")
switch("--chat", "gsm8k: use the tokenizer's chat template, with its end of turn")
flag("--end_token", "", "end of an answer (default: <|endoftext|>; chats: the tokenizer's)")
flag("--demo", None, "train on this many arithmetic problems (2000), made in OUTPUT_DIR/demo",
     COUNT, nargs="?", type=int, const=2000, metavar="PROBLEMS")
flag("--block_size", 16, "block size; 1: autoregressive (default: --init_from's, or 16)", COUNT)
flag("--plan_block_size", 0, "hdp: tokens per plan block, 0 = --block_size")
flag("--execution_block_size", 0, "hdp: tokens per execution block, 0 = --block_size")
flag("--max_length", 512, "gsm8k, chat: most tokens of a problem", COUNT)
flag("--question_budget", 128, "hdp: most tokens of a question", COUNT)
flag("--plan_budget", 128, "hdp: most tokens of a plan, with its markers", COUNT)
flag("--execution_budget", 256, "hdp: most tokens of an execution, with its answer", COUNT)
switch("--strip_calculator", "remove GSM8K's <<48/2=24>> marks")
switch("--loss_on_question", "noise and train the question, too")
switch("--pack", "several problems a row instead of padding; same loss; --no-pack", default=True)
flag("--row_length", 0, "clean tokens per row, 0 = the longest allowed problem")
# model and noise
flag("--model_size", "small", "nano is for demos", choices=("nano", "tiny", "small", "medium"))
flag("--init_from", None, "folder or hub name: BD3-LM, MDLM, a language model, or this trainer's")
flag("--dropout", 0.1, "dropout on the outputs of attention and MLP, 0 to 1", BELOW_1)
flag("--t_range", None, "trained noise levels, and limits for the masked share of a block "
     "(default: all; 1 for single tokens)", type=float, nargs=2, metavar=("LOW", "HIGH"))
flag("--clip_search_widths", (), "train on the range of one of these widths with least variance",
     ("lie between 0 and 1", lambda v: 0 < v < 1), type=float, nargs="*", metavar="WIDTH")
flag("--loss_weighting", "elbo", "elbo: weights of the bound; ce: 1", choices=("elbo", "ce"))
flag("--ema_decay", 0.9999, "decay of the averaged weights, after its warm-up", BELOW_1)
flag("--lora_target_modules", "all-linear", "or name endings", type=cli.alias(all="all-linear"))
# batch and length of the run
flag("--batch_preset", None, "sets the next two, rate, warm-up and steps (default: recommended; "
     "finetune with --init_from)", choices=tuple(choices.PRESETS))
flag("--problems_per_batch", None, "problems per micro-step (default: preset's)", COUNT, type=int)
flag("--gradient_accumulation_steps", None, "micro-steps (default: preset's)", COUNT, type=int)
flag("--per_device_train_batch_size", None, "rows, not --problems_per_batch", COUNT, type=int)
flag("--global_batch_size", 0, "problems per step on all ranks; sets the unset one of these two")
flag("--max_steps", None, "optimizer steps (default: preset's)", COUNT, type=int)
# optimization
flag("--learning_rate", None, "peak (default: preset's; 10 times that with --use_lora)", type=float)
flag("--warmup_steps", None, "optimizer steps of linear warm-up (default: preset's)", type=int)
flag("--scale_lr_from_batch", 0, "multiply the rate by sqrt(problems / N), 0 = off", metavar="N")
# speed and memory
flag("--attn_backend", None, "masks (default: flex on CUDA, else sdpa)", choices=("flex", "sdpa"))
# logging, validation, checkpoints
flag("--eval_steps", None, "steps between validations, 0 = at the end (default: 500)", type=int)
flag("--eval_repeats", 4, "draws of the noise in a validation, for its error bar", COUNT)
flag("--eval_accuracy", 0, "held-out problems to answer in every validation", metavar="PROBLEMS")
flag("--best_by", "bound", "metric of the best checkpoint; ties of accuracy go by the bound",
     choices=("bound", "accuracy"))
flag("--early_stop_patience", 10, "validations without a better bound or accuracy, 0 = never stop")
flag("--save_steps", None, "steps between checkpoints, 0 = at the end (default: 2000)", type=int)

# parsed before torch is imported, so --help and wrong flags are answered at once
args = cli.parse(p, lambda args, ranks: choices.check_flags(args, ranks, p))
dry = args.dry_run is not None      # one process plans for all ranks

import json
import math

import numpy as np
import torch

from core import checkpoint, dist, metrics, optim, packing, run, tensor_io
from diffusion import blocks, dit, elbo, problems

# ---- Ranks. A dry run joins no other process and writes nothing.
world, watch, work_dir = run.start(args)
main_rank, device, ranks = world.is_main, world.device, args.ranks
print0 = partial(print, sep="\n") if main_rank else lambda *lines: None
dist.set_compute(world, args)
backend = args.attn_backend or ("flex" if device.type == "cuda" else "sdpa")
cli.require(dry or backend == "sdpa" or device.type == "cuda", "--attn_backend flex trains on CUDA "
            "only: torch has no backward for it on a CPU; drop the flag")

# ---- Data: problems -> documents of numbered blocks -> rows. Every rank holds all of them, so each
# knows the rows and targets of every step without communication.
layout, origin, tokenizer = choices.layout_of(args), None, args.tokenizer or "gpt2"
if args.demo is not None:
    from diffusion import make_problems
    args.train_data_file, args.eval_data_file, demo_tokenizer = dist.rank0(
        world, make_problems.prepare_demo, Path(work_dir) / "demo", args.system, args.demo)
    tokenizer = args.tokenizer or demo_tokenizer
templated = args.chat or args.system == "chat"
if args.init_from or templated:
    from diffusion import published
    layout, origin, tokenizer = published.open_start(world, args, layout, tokenizer)
t_range = args.t_range = tuple(args.t_range or choices.bound_range(layout))
choices.check_range(t_range, layout)
tokens = dist.rank0(world, problems.load_tokenizer, tokenizer, args.system, layout.end_token)
config = dit.config_of(args.model_size, tokens.vocab_size, tokens.mask, args.dropout)
if origin and origin.source:
    from diffusion import decoder
    config = decoder.config_of(origin, tokens, args.dropout)
rows, eval_rows = blocks.prepare_rows(world, layout, tokens, args, None if dry else args.output_dir)
weights, weights_hash = published.read(origin, config, tokens, args.seed) if origin else ({}, "")
lora = {}
if args.use_lora:
    lora = {"rank": args.lora_rank, "alpha": args.lora_alpha, "dropout": args.lora_dropout,
            "targets": args.lora_target_modules, "rslora": args.use_rslora, "dora": args.use_dora}
    config = published.add_lora(config, origin, args.bf16, args.init_from, lora)
held_out = int(eval_rows.table["samples"].sum()) if eval_rows else 0
asked = min(args.eval_accuracy, held_out)       # problems to answer in a validation
task = elbo.Eval(eval_rows, tokens, args.per_device_eval_batch_size, args.eval_repeats, args.seed,
                args.bf16, args.clip_search_widths, args.loss_weighting, asked)
table, per_row = rows.table, rows.table["samples"].mean()
args.per_device_train_batch_size = args.per_device_train_batch_size or max(
    1, round(args.problems_per_batch / per_row))        # problems become rows
if args.auto:
    from diffusion import plan
    plan.plan_memory(args, world, config, rows)

# ---- Resume
batch_rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
# must be equal in a checkpoint and the run that resumes it; then the same for validation losses
identity = {**dataclasses.asdict(layout), "seed": args.seed,
            "model": [args.model_size, tokens.vocab_size], "adapters": lora,
            "batch": [batch_rows, rows.length], "training data": rows.fingerprint(),
            "start": weights_hash}
validation = eval_rows and [eval_rows.fingerprint(), args.eval_repeats,
                            args.per_device_eval_batch_size,
                            *([asked, args.best_by] if asked else [])]
resume, state = dist.rank0(
    world, checkpoint.find_newest, args.output_dir, args.resume, identity)
step, epoch, first_pack = (state.get(key, 0) for key in ("step", "epoch", "first"))
if resume and args.clip_search_widths:
    t_range = tuple(state["t_range"])
# best: lowest bound and error rate, and the best checkpoint's score; stale: validations since one
# of the first two improved
best, stale, best_step = {}, 0, None
if resume and state["validation"] == validation:
    best, stale, best_step = state["best"], state["stale"], state["best_step"]
# validate first if the weights are imported, or if a signal interrupted a validation
eval_due = bool(validation) and bool(state.get("eval_due", origin))

# ---- Order of the rows: a function of (seed, epoch) alone, so any number of ranks continues it
order = packing.PackOrder(np.ones(len(rows)), samples_per_pack=batch_rows, seed=args.seed)
per_step, total_steps = ranks * accumulation, args.max_steps
step_rows = per_step * batch_rows
step_problems = step_rows * per_row
# keeps the noise scale of Adam's updates for larger batches
args.learning_rate *= math.sqrt(step_problems / (args.scale_lr_from_batch or step_problems))
with torch.device("meta"):
    lines = run.schedule_lines(
        args, config.network(config), total_steps, f"{order.packs_per_epoch / per_step:,.1f}", step,
        resume, state, bool(validation), f"weights of {origin.path}" if origin else "new weights",
        eval_steps=500, save_steps=2000)
print0(f"problems   {table['samples'].sum()} to train, {held_out} to validate; {len(rows)} rows of "
       f"{rows.length} clean and {rows.noisy_length} noisy tokens; a step is {step_problems:,.0f} "
       f"problems in {step_rows} rows", *lines)
if dry:
    from diffusion import plan
    plan.plan_memory(args, world, config, rows, order, total_steps - step)

# ---- Model
watch.report_progress("loading the model", args.wait_timeout)
torch.manual_seed(args.seed)        # same weights on all ranks
model = config.network(config, backend, args.gradient_checkpointing).to(device)
if args.compile:        # FlexAttention of unknown lengths is slow
    dist.compile_layers(model.layers, dynamic=False)
if args.parallel != "ddp":
    dist.shard(model, model.layers, world, args.bf16, shard_size=args.shard_size)
if origin:
    published.fill(model, weights, args.seed, bool(resume))
average = elbo.Average(model, args.ema_decay)
if resume:
    tensor_io.load(world, resume, "model", elbo.trained_parameters(model))
    tensor_io.load(world, resume, "ema", average.shadow)
    average.updates.fill_(state["averaged"])
model.train()
wrapped = dist.wrap_ddp(model, world) if args.parallel == "ddp" else model
parameters = list(model.parameters())
optimizer = optim.build_adamw(model.named_parameters(), args.learning_rate, args.weight_decay,
                              args.adam_beta2)
torch.manual_seed(args.seed + world.rank)       # different dropout on every rank
if resume:
    checkpoint.restore(world, resume, model, optimizer)


# ---- Validation and checkpoints
def validate():
    """Validate the averaged weights, log; True if they are the best so far, None if stopped."""
    global t_range, stale, best_step
    watch.report_progress(f"validation at step {step}", args.wait_timeout)
    result = elbo.validate(world, model, average, task, t_range,
                           lambda: any(dist.all_gather(world, run.stop_asked(args.output_dir))))
    if result is None:
        return None
    values, t_range = result
    score = [values["eval/nll"]]
    if args.best_by == "accuracy":      # at equal accuracy (0 at first) the better bound decides
        score = [1 - values["eval/accuracy"], *score]
    # older checkpoints have no "score"
    least = best.get("score", [best.get("wrong" if len(score) > 1 else "nll", math.inf)])
    stale = 0 if elbo.update_best(best, values) else stale + 1
    print0(f"eval   step {step:>6} | " + " | ".join(
        f"{name.removeprefix('eval/')} {value:.4f}" for name, value in values.items()))
    log.write(step, values)
    is_best = math.isfinite(score[-1]) and score < least
    if is_best:
        best["score"], best_step = score, step
    return is_best


def save():
    """Copy the state to the host; a thread writes it during the next steps. Call on every rank."""
    watch.report_progress(f"saving at step {step}", args.wait_timeout)
    unlogged = dist.all_reduce(world, sums.clone()).tolist()    # sums since the last log line
    dist.reshard(model)     # FSDP2's parameters stay gathered after a validation

    def save_config(path):
        saved = {"model": dataclasses.asdict(config), "step": step,
                 "layout": dataclasses.asdict(layout), "source": origin.source if origin else {}}
        (path / "config.json").write_text(json.dumps(saved, indent=1))
        tokens.tokenizer.save(str(path / "tokenizer.json"))
        if origin or templated:     # these files keep a chat template usable
            published.copy_chat_files(tokenizer, path)

    tensors = {"model": elbo.trained_parameters(model), "ema": average.shadow}
    checkpoint.save(world, args, step, model, optimizer, tensors, save_config, {
        "step": step, "epoch": epoch, "first": first_pack, "identity": identity,
        "validation": validation, "best_step": best_step, "best": best, "stale": stale,
        "eval_due": eval_due, "t_range": t_range, "averaged": float(average.updates),
        "skipped": monitor.skipped, "unlogged": unlogged, "args": cli.remove_secrets(vars(args))})


# ---- Loop
# losses, targets, plain losses, masked tokens since the last log line
sums = torch.tensor(state["unlogged"] if resume and main_rank else [0.0] * 4,
                    dtype=torch.float64, device=device)
monitor = optim.StepMonitor(world, lambda number: rows.documents.problems[number].name,
                            args.max_bad_steps, state.get("skipped", 0))
packs = packing.rank_packs(
    order, world.rank, world.size, accumulation, sys.maxsize, epoch, first_pack)
batches = packing.run_ahead(lambda pack: blocks.collate(
    [rows.members[i] for i in pack], batch_rows, rows), packs, args.num_workers)
log = run.open_log(args, world, step, eval_due)
start_step, timer, stopping = step, metrics.StepTimer(), False
if eval_due:
    with timer.timed("paused"):
        eval_due = stopping = validate() is None
        if not (stopping and resume):
            save()      # again, to record the validation

patience = args.early_stop_patience or math.inf
while step < total_steps and not stopping and stale < patience:
    # next batch: each rank knows from the order which rows all ranks take in this step; the loss
    # is divided by their targets
    if first_pack >= order.packs_per_epoch:
        epoch, first_pack = epoch + 1, 0
    window = order.window(epoch, first_pack, per_step)
    work = {name: int(values[window].sum()) for name, values in table.items()}
    # noise is drawn for the whole step and then split: it is the same on any number of ranks
    draws = blocks.draw(args.seed, "train", step, work["groups"], step_rows, rows.length)
    first_groups = np.concatenate([[0], np.cumsum(table["groups"][window])])
    step_sums = torch.zeros_like(sums)      # stays on the device; nothing here waits for it
    for micro in range(accumulation):
        watch.report_progress(f"loading data for step {step + 1}")
        with timer.timed("waited"):
            batch = next(batches)
        # the first step may compile for minutes
        watch.report_progress(f"step {step + 1}", args.wait_timeout if step == start_step else None)
        # rows of this rank in this micro-step; fewer at the end of an epoch
        first = (micro * world.size + world.rank) * batch_rows
        mine = window[first:first + batch_rows]
        # else ranks would divide their losses by different counts
        assert batch.target.sum() == table["targets"][mine].sum(), "loader and plan disagree"
        noise = draws.part(first, batch_rows, first_groups[min(first, len(window))], batch.n_groups)
        inputs = blocks.diffuse(batch, noise, tokens.mask, t_range, args.loss_weighting).to(device)

        # forward, loss, backward; ranks exchange gradients once a step, when they are complete
        with dist.gradient_sync(wrapped, micro == accumulation - 1):
            with dist.autocast(device, torch.bfloat16 if args.bf16 else None):
                losses = wrapped(inputs)        # cross-entropy of each masked token
            weighted = losses * inputs.weights  # their sum bounds the likelihood
            loss = weighted.sum() / work["targets"]
            # undo DDP's and FSDP2's mean over ranks: work["targets"] counts those of all ranks
            (loss * world.size).backward()
        monitor.watch(loss, [document for row in mine for document in rows.members[row]])
        step_sums[0] += weighted.detach().double().sum()
        step_sums[2] += losses.detach().double().sum()
        step_sums[3] += len(inputs.rows)
    step_sums[1] += work["targets"] * main_rank     # the table has the counts of all ranks

    # clip
    norm = optim.clip_gradients(parameters, args.max_grad_norm)

    # step: all ranks skip it if the gradient is not finite; the host does not wait for that
    lr = args.learning_rate * optim.lr_factor(step, total_steps, args.warmup_steps,
                                              args.lr_scheduler)
    bad = optim.take_step(optimizer, lr, norm)
    average.update(bad)
    sums += torch.where(bad > 0, 0.0, step_sums)
    step, first_pack = step + 1, first_pack + per_step
    # evaluates the previous step, as this one is still running
    monitor.push(step, norm, bool(run.stop_asked(args.output_dir)))

    # log: the host waits for the device here
    last = step == total_steps
    timer.sums.update(steps=1, tokens=work["tokens"], samples=work["samples"], flops=model.flops(
        work["noisy"] + work["clean"], work["targets"] * sum(t_range) / 2, work["pairs"]),
        slots=step_rows * rows.length)
    if last or step % args.logging_steps == 0:
        loss_sum, targets, plain_sum, masked = dist.all_reduce(world, sums).tolist()
        sums.zero_()
        if not targets:     # every step was skipped
            loss_sum = targets = plain_sum = masked = math.nan
        values = {"train/loss": loss_sum / targets, "train/masked": masked / targets,
                  "train/masked_loss": plain_sum / max(1, masked),
                  "train/t_low": t_range[0], "train/t_high": t_range[1],
                  "train/learning_rate": lr, "train/grad_norm": norm.item(),
                  "train/epoch": epoch + min(1.0, first_pack / order.packs_per_epoch),
                  "train/bad_steps": monitor.skipped, **timer.report(world)}
        log.write(step, values)
        left = metrics.duration((total_steps - step) * values["train/step_seconds"])
        print0(("step {:>6}/{} | loss {train/loss:7.4f} | masked {train/masked:5.1%} ce "
                "{train/masked_loss:7.4f} | lr {train/learning_rate:.2e} | grad_norm "
                "{train/grad_norm:7.3f} | {train/throughput:>9,.0f} tok/s | eta {}").format(
                    step, total_steps, left, **values))

    # validate; a stop request takes effect one step late, so no step waits for the device
    eval_due = bool(validation) and (last or args.eval_steps > 0 and step % args.eval_steps == 0)
    saving = last or args.save_steps > 0 and step % args.save_steps == 0
    if eval_due or saving:      # the host waits anyway
        monitor.poll()
    stopping, improved = monitor.stop and (eval_due or not last), False
    with timer.timed("paused"):
        checkpoint.wait(only_if_done=True)
        if eval_due and not stopping:
            improved = validate()
            # asked to stop during validation: the next start validates first
            eval_due = stopping = improved is None

        # save: at intervals, before the end, and at each best validation
        if saving or stopping or improved or stale >= patience:
            save()

early = f"no better bound{' or accuracy' * bool(asked)} in {stale} validations; "
run.end(args, world, step, total_steps, stopping, early * (step < total_steps) +
        f"{cli.plural(monitor.skipped, 'step')} skipped; best at step {best_step}")
