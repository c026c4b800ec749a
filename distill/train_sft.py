"""Fine-tune a causal language model on chats, loss on the answers only: full or LoRA, FSDP2 or DDP.

    torchrun --nproc_per_node=8 distill/train_sft.py --model_path Qwen/Qwen3-4B-Instruct-2507 \
        --train_data_file labels.jsonl --output_dir ./out --bf16
    torchrun ... --use_lora --prompt_file system.txt --prompt_role system

The loss is the cross-entropy of the trained tokens (found by core/chat.py), averaged over all of
them in an optimizer step, on all ranks. With --teacher_path a frozen model scores each token of the
answers (the data's, or the student's with --on_policy); the student learns its distribution.

On SIGTERM, SIGUSR1 or a file OUTPUT_DIR/stop the run finishes the step, saves a checkpoint, writes
OUTPUT_DIR/requeue for the launcher and exits with status 0. Rerun the same command to resume.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # the folder of core/

from core import cli
from core.cli import ABOVE_0, BELOW_1, COUNT, PROBABILITY, SHARE, SUPPRESS, require

LORA_RATE, FULL_RATE = 2e-4, 2e-5       # LoRA takes about ten times the rate (tinker-cookbook)
GLOBAL_BATCH = 128      # samples an optimizer step, unless flags say otherwise
CHECKS = ("invalid", "template", "too_long")    # of --drop_bad

# ---- Flags: name, default, help
p = cli.Parser("Fine-tune a causal language model on chats.")
flag, switch = p.flag, p.switch
# of every trainer: --config, --dry_run, --use_lora, --seed, --auto, --bf16, --output_dir, ...
cli.trainer_flags(p, CHECKS)
cli.packing_flags(p)    # of speech and chats: --max_tokens_per_batch, --eval_steps, --compile, ...
p.set_defaults(lora_rank=32, adam_beta2=0.95, parallel=None, save_total_limit=2, learning_rate=None,
               gradient_accumulation_steps=None,
               num_train_epochs=4, per_device_train_batch_size=16, per_device_eval_batch_size=16)
# model
flag("--model_path", None, "folder or hub name of a transformers causal LM", required=True)
flag("--lora_target_modules", "all-linear", "or name endings", type=cli.alias(all="all-linear"))
# data
flag("--train_data_file", None, "chats: JSONL or .parquet, or a pattern of files", required=True)
flag("--validation_split", 0.0, "share of groups held out, by a seeded shuffle", BELOW_1)
flag("--group_size", 1, 'number of neighbours by "id" or line held out together', COUNT)
flag("--chat_template", None, "Jinja file to use and save instead of the model's template")
flag("--enable_thinking", "template", "template setting", choices=("template", "true", "false"))
flag("--train_turns", "all", "answers to train, rendered at their turns", choices=("all", "last"))
# distillation
known = len(p._actions)
flag("--teacher_path", None, "model that scores the answers (default with a prompt: the base)")
flag("--teacher_url", None, "vLLM server that scores; --teacher_path: its config and tokenizer")
flag("--teacher_name", None, "the teacher's name on the server (default: --teacher_path)")
flag("--prompt_file", None, "prompt that only the teacher reads")
flag("--prompt_role", "user", "message that gets the prompt", choices=("user", "system"))
flag("--divergence", "forward", "KL or Jensen-Shannon", choices=("forward", "reverse", "js"))
flag("--js_beta", 0.5, "js: the teacher's share", ("be above 0 and below 1", lambda v: 0 < v < 1))
flag("--on_policy", 0.0, "share of samples whose answer the student generates", SHARE)
flag("--max_new_tokens", 128, "most tokens of an answer generated for --on_policy", COUNT)
flag("--base_url", None, "vLLM server that generates --on_policy answers")
flag("--request_timeout", 240.0, "seconds per request; a step retries for twice as long")
flag("--distill_topk", 0, "compare the teacher's K likeliest tokens; the rest as one", metavar="K")
flag("--distill_weight", 1.0, "weight of the divergence; the rest is cross-entropy", PROBABILITY)
flag("--keep", None, "chats on which the loss keeps the student close to the base")
flag("--keep_weight", 1.0, "weight of its divergence, added every 4 steps (--keep_every)", ABOVE_0)
flag("--keep_every", 4, SUPPRESS, COUNT)
DISTILLING = [action.dest for action in p._actions[known:]]
# learning rate
flag("--min_lr_ratio", 0.1, "final learning rate as a share of the peak", SHARE)
flag("--warmup_ratio", 0.1, "share of the run that is linear warm-up", SHARE)


def check_flags(args, world_size):
    """Raise UserError for flags that would fail later or have no effect; set derived values."""
    if args.parallel is None:       # one GPU does not shard
        alone = world_size == 1 or args.fp16 or args.float8 or args.base_dtype == "nf4"
        asked = args.cpu_offload or not args.reshard_after_forward
        args.parallel = "fsdp" if asked or not alone else "ddp"
    if args.learning_rate is None:
        args.learning_rate = LORA_RATE if args.use_lora else FULL_RATE
    cli.check_packing(args, world_size, p, CHECKS, GLOBAL_BATCH)
    if any(getattr(args, name) != p.get_default(name) for name in DISTILLING):
        from distill import teaching
        teaching.check_flags(args, p)
    require(not (args.eval_data_file and args.validation_split),
            "give one of --eval_data_file and --validation_split, not both")


# parsed before torch is imported, so --help and wrong flags are answered at once
args = cli.parse(p, check_flags)
dry = args.dry_run is not None      # one process plans for all ranks

import math
from functools import partial

import torch

from core import chat, checkpoint, dist, metrics, optim, packing, run
from core.packing import PackOrder, rank_packs, run_length
from distill import causal_lm, chat_data, packed_lm

if args.use_lora:
    from core import adapters

# ---- Ranks. A dry run joins no other process and writes nothing.
world, watch, work_dir = run.start(args)
main_rank, device, ranks = world.is_main, world.device, args.ranks
dtype = causal_lm.half_dtype(args)
print0 = partial(print, sep="\n") if main_rank else lambda *lines: None

# ---- Data. Rank 0 tokenises and all ranks map the same table, so each knows the samples and
# targets of every step without communication.
for path in filter(None, (args.train_data_file, args.eval_data_file, args.keep)):
    dist.rank0(world, chat.files_of, path)      # do the files exist?
dist.rank0(world, causal_lm.find_model, args.model_path)        # one rank downloads for all
folder = causal_lm.find_model(args.model_path)
config = causal_lm.load_config(folder)
tokenizer = chat.load_tokenizer(folder, template=args.chat_template)
causal_lm.check_vocabulary(tokenizer, config)
encoder = chat.Encoder(tokenizer, args.train_turns, chat.THINKING[args.enable_thinking],
                       split=not args.teacher_path)
prompt = kept = None
both, collate, wrap = encoder, chat_data.collate, packed_lm.PackedLM
if args.teacher_path or args.keep:
    from distill import frozen, teaching
    wrap = partial(frozen.student, args)
if args.teacher_path:
    both, config = teaching.open_teacher_inputs(args, world, config, encoder)
    prompt, collate = both.prompt, frozen.collate_prompted
limit = causal_lm.length_limit(config, args.max_length, args.max_tokens_per_batch)
settings = limit, args.drop_bad, args.preprocess_num_proc
table, n_train = chat_data.prepare_table(
    world, work_dir, list(filter(None, (args.train_data_file, args.eval_data_file))), both,
    *settings, None if dry else args.output_dir)
if args.keep:
    kept, _ = chat_data.prepare_table(world, Path(work_dir) / "keep", [args.keep], encoder,
                                      *settings)
train_ids, eval_ids = chat_data.split_samples(table, n_train, args.group_size,
                                              args.validation_split, args.seed)
if args.teacher_path:
    teaching.check_teacher_differs(args, table, train_ids)


# ---- Model: on the meta device, where it takes no memory
def empty_model(folder):
    """(PackedLM, parts) of packed_lm.build_empty: a frozen base in half precision, else fp32."""
    lora = (args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_target_modules,
            args.model_path, args.use_rslora, args.use_dora) if args.use_lora else None
    return packed_lm.build_empty(folder, lora and dtype or torch.float32, lora,
                                 args.gradient_checkpointing, args.base_dtype == "nf4", wrap)


model, parts = empty_model(folder)
if args.auto or dry:
    from core import memory
    from distill import plan
    memory_of = partial(plan.memory, model, table, train_ids, kept)
    if args.auto:
        memory.choose(args, world, memory.pack_ways(
            args, table.lengths[train_ids], kept.lengths.max() if args.keep else 0), memory_of)
        model, parts = empty_model(folder)      # with the chosen recomputation
dist.set_compute(world, args)

# ---- Resume
identity = None     # must be equal in a checkpoint and the run that resumes it
if main_rank:
    trained = "full" if not args.use_lora else "lora on nf4" if args.base_dtype == "nf4" else "lora"
    identity = {"base model": causal_lm.fingerprint_weights(folder), "seed": args.seed,
                "set of trained weights": trained, "training data": table.fingerprint(train_ids),
                "teacher": frozen.fingerprint(args, kept) if prompt or kept else None,
                "pack": f"{args.max_tokens_per_batch} tokens" if args.max_tokens_per_batch
                else f"{args.per_device_train_batch_size} samples"}
validation = table.fingerprint(eval_ids)        # losses on other data are not comparable
resume, state = dist.rank0(
    world, checkpoint.find_newest, args.output_dir, args.resume, identity)
if resume and not args.use_lora:        # a full checkpoint replaces the base
    model, parts = empty_model(resume)
step, epoch, first_pack = (state.get(key, 0) for key in ("step", "epoch", "first"))
best_loss, best_step = math.inf, None
if state.get("best_step") is not None and state["validation"] == validation:
    best_loss, best_step = state["best_loss"], state["best_step"]

# ---- Order of the packs: a function of (seed, epoch) alone, so any number of ranks continues it
accumulation = args.gradient_accumulation_steps
per_step = ranks * accumulation
order = PackOrder(table.lengths[train_ids], train_ids, tokens_per_pack=args.max_tokens_per_batch,
                  samples_per_pack=args.per_device_train_batch_size, seed=args.seed)
pad_to = 0 if args.teacher_path else args.max_tokens_per_batch      # static shapes
steps_per_epoch, total_steps = run_length(
    order.packs_per_epoch, per_step, args.num_train_epochs, args.max_steps,
    {"step": step, "epoch": epoch, "first": first_pack})
args.warmup_steps, validates = round(args.warmup_ratio * total_steps), bool(len(eval_ids))
lines = run.schedule_lines(args, model, total_steps, steps_per_epoch, step, resume, state,
                           validates)
lines.insert(1, chat_data.samples_line(table, train_ids, eval_ids))
if dry:
    if resume and args.use_lora:
        adapters.load_adapters(model.net, resume)       # on the meta device this copies nothing
    memory.end_dry_run(args, memory_of(args, order), model.native, lines, total_steps - step)
held_out = dist.rank0(world, chat_data.write_held_out, args.output_dir, table, train_ids, eval_ids,
                      prompt)

# ---- Model: sharded on the meta device, then loaded; no process holds more than its shard
watch.report_progress("loading the model", args.wait_timeout)
sharding = None if args.parallel == "ddp" else {
    "bf16": args.bf16, "reshard_after_forward": args.reshard_after_forward,
    "cpu_offload": args.cpu_offload, "shard_size": args.shard_size}
packed_lm.load(model, parts, world, sharding=sharding, compiled=args.compile)
if model.frozen:
    frozen.load_all(model, world, sharding)
if args.use_lora:
    adapters.load_adapters(model.net, resume) if resume else adapters.init_adapters(
        model.net, args.seed)
if args.float8:
    from core import quantized
    quantized.to_float8(causal_lm.decoder_layers(model.native))
model.train()
wrapped = model if sharding else dist.wrap_ddp(model, world)
causal_lm.stop_at(model.native, table.ends)     # a base model may not name them
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = optim.build_adamw(model.named_parameters(), args.learning_rate, args.weight_decay,
                              args.adam_beta2)
scaler = optim.loss_scaler(device, args.fp16, state.get("scaler"))
torch.manual_seed(args.seed + world.rank)       # different dropout on every rank
if resume:
    checkpoint.restore(world, resume, model, optimizer)
keeper = frozen.Keeper(args, world, kept, wrapped) if args.keep else None
sampler = frozen.Sampler(args, world) if args.base_url else None        # generates on a server


# ---- Validation and checkpoints
@torch.no_grad()
def validate():
    """Validate and log; True if the loss is the best so far, None if asked to stop."""
    global best_loss, best_step
    watch.report_progress(f"validation at step {step}", args.wait_timeout)
    packs = packing.packs_in_order(
        eval_ids, args.per_device_eval_batch_size, world.rank, world.size)
    loader = packing.run_ahead(
        lambda pack: collate([table[i] for i in pack]), packs, min(1, args.num_workers))
    total = torch.zeros(model.sums, dtype=torch.float64, device=device)
    model.eval()        # no dropout
    for i, batch in enumerate(loader):
        # often enough for a prompt stop, rarely enough to cost nothing
        if i % 16 == 0 and any(dist.all_gather(world, run.stop_asked(args.output_dir))):
            return None
        with dist.autocast(device, dtype):
            total += torch.stack(model(batch.to(device))).double()
    model.train()
    values = packed_lm.loss_report(dist.all_reduce(world, total).tolist(), "eval")
    print0("eval   step {:>6} | loss {eval/loss:7.4f} acc {eval/accuracy:6.1%}".format(
        step, **values))
    log.write(step, values)
    if not values["eval/loss"] < best_loss:     # a non-finite loss is never best
        return False
    best_loss, best_step = values["eval/loss"], step
    return True


def save():
    """Copy the state to the host; a thread writes it during the next steps. Call on every rank."""
    watch.report_progress(f"saving at step {step}", args.wait_timeout)
    unlogged = dist.all_reduce(world, sums.clone()).tolist()    # sums since the last log line
    dist.reshard(model)     # FSDP2's parameters stay gathered after a validation
    stem, named = "model", dict(model.native.named_parameters())
    if args.use_lora:
        stem, named = "adapter_model", adapters.adapter_weights(model.net)

    def save_config(path):
        tokenizer.save_pretrained(path)     # includes the chat template
        if args.use_lora:
            return model.net.peft_config["default"].save_pretrained(path)
        model.native.config.save_pretrained(path)
        model.native.generation_config.save_pretrained(path)

    checkpoint.save(world, args, step, model, optimizer, {stem: named}, save_config, {
        "step": step, "epoch": epoch, "first": first_pack, "identity": identity,
        "validation": validation, "best_step": best_step, "eval_due": eval_due,
        "best_loss": None if best_step is None else best_loss, "held_out": held_out,
        "skipped": monitor.skipped, "scaler": scaler.state_dict(), "unlogged": unlogged,
        "args": cli.remove_secrets(vars(args))}, split=causal_lm.split_experts)


# ---- Loop
sums = torch.tensor(state["unlogged"] if resume and main_rank else [0.0] * model.sums,
                    dtype=torch.float64, device=device)
monitor = optim.StepMonitor(world, table.name, args.max_bad_steps, state.get("skipped", 0), scaler)
epochs = sys.maxsize if args.max_steps else args.num_train_epochs
packs = rank_packs(order, world.rank, world.size, accumulation, epochs, epoch, first_pack)
batches = packing.run_ahead(lambda pack: collate(
    [table[i] for i in pack], pad_to=pad_to, pad_id=table.ends[0]), packs, args.num_workers)
eval_due = bool(state.get("eval_due") and validates)    # if a stop interrupted a validation
log = run.open_log(args, world, step, eval_due)
print0(*lines)
eval_due = stopping = eval_due and validate() is None
start_step, timer = step, metrics.StepTimer()


def next_batch():
    """This rank's next batch, on the device."""
    watch.report_progress(f"loading data for step {step + 1}")
    with timer.timed("waited"):
        batch = next(batches).to(device)
    compiling = args.compile and step == start_step     # takes minutes
    watch.report_progress(f"step {step + 1}", args.wait_timeout if compiling else None)
    return batch


while step < total_steps and not stopping:
    # next batch: each rank knows from the order which samples all ranks take in this step
    if first_pack >= order.packs_per_epoch:
        epoch, first_pack = epoch + 1, 0
    work = packed_lm.step_work(table, order.window(epoch, first_pack, per_step),
                               model.weights, model.native.config, args.use_lora)
    step_batches = (next_batch() for _ in range(accumulation))
    if args.on_policy:      # before the first loss, which is divided by the tokens of all answers
        step_batches, work["targets"] = frozen.replace_answers(
            args, world, model, table, list(step_batches), table.ends, step, sampler)
    step_sums = torch.zeros_like(sums)      # stays on the device; nothing here waits for it
    for micro, batch in enumerate(step_batches):
        mine = list(batch.samples)
        # if a batch differed from the plan, ranks would divide by different counts
        assert args.on_policy or len(batch.targets) == table.targets[mine].sum()
        assert pad_to in (0, len(batch.input_ids)), "the pack is not filled to its budget"

        # forward, loss, backward; ranks exchange gradients once a step, when they are complete
        with dist.gradient_sync(wrapped, micro == accumulation - 1):
            with dist.autocast(device, dtype):
                loss, *others = wrapped(batch)      # sums over this batch's targets
            # gradients are averaged over ranks, the loss is a mean over all ranks' targets
            scaler.scale(loss * (world.size / work["targets"])).backward()
        monitor.watch(loss, mine)
        step_sums += torch.stack([loss.detach(), *others])
    if keeper:
        keeper.backward(step, scaler.scale, log)

    # clip
    scaler.unscale_(optimizer)
    norm = optim.clip_gradients(trainable, args.max_grad_norm)

    # step: all ranks skip it if the gradient is not finite; the host does not wait for that
    lr = args.learning_rate * optim.lr_factor(step, total_steps, args.warmup_steps,
                                              args.lr_scheduler, args.min_lr_ratio)
    bad = optim.take_step(optimizer, lr, norm).to(device)
    scaler.update()
    sums += torch.where(bad > 0, 0.0, step_sums)
    step, first_pack = step + 1, first_pack + per_step
    # evaluates the previous step, as this one is still running
    monitor.push(step, norm, bool(run.stop_asked(args.output_dir)),
                 trains=bool(work["targets"]))

    # log: the host waits for the device here
    last = step == total_steps
    # the last step of an epoch is filled with packs of one padding token
    empty = max(0, first_pack - order.packs_per_epoch)
    timer.sums.update(work, steps=1, slots=per_step * pad_to or work["tokens"] + empty)
    if last or step % args.logging_steps == 0:
        values = packed_lm.loss_report(dist.all_reduce(world, sums).tolist(), "train")
        sums.zero_()
        values |= {"train/learning_rate": lr, "train/grad_norm": norm.item(),
                   "train/epoch": epoch + min(1.0, first_pack / order.packs_per_epoch),
                   "train/bad_steps": monitor.skipped, **timer.report(world)}
        if args.fp16:
            values["train/loss_scale"] = scaler.get_scale()
        log.write(step, values)
        left = metrics.duration((total_steps - step) * values["train/step_seconds"])
        print0(("step {:>6}/{} | loss {train/loss:7.4f} acc {train/accuracy:6.1%} | lr "
                "{train/learning_rate:.2e} | grad_norm {train/grad_norm:7.3f} | "
                "{train/throughput:>9,.0f} tok/s | wait {train/data_wait_seconds:4.1f} s | "
                "eta {}").format(step, total_steps, left, **values))

    # validate; a stop request takes effect one step late, so no step waits for the device
    eval_due = validates and (last or args.eval_steps > 0 and step % args.eval_steps == 0)
    saving = last or args.save_steps > 0 and step % args.save_steps == 0
    if eval_due or saving:      # the host waits anyway
        monitor.poll()
    stopping, improved = monitor.stop and (eval_due or not last), False
    with timer.timed("paused"):
        checkpoint.wait(only_if_done=True)
        if eval_due and not stopping:
            improved = validate()
            eval_due = stopping = improved is None      # asked to stop: the next start validates

        # save: every --save_steps, before a stop, and at each best validation
        if saving or stopping or improved:
            save()

best = f"; best validation loss {best_loss:.4f} at step {best_step}" * (best_step is not None)
run.end(args, world, step, total_steps, stopping,
        f"{cli.plural(monitor.skipped, 'step')} skipped{best}")
