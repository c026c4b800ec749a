"""Fine-tune Higgs-Audio V2 or Higgs TTS 3 (text to speech), LoRA or full: one process, DDP, FSDP2.

    torchrun --nproc_per_node=8 train_v2_ddp.py --train_data_file train.json --output_dir ./out \
        --model_path bosonai/higgs-audio-v2-generation-3B-base --bf16 --use_lora \
        --audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer --learning_rate 5e-5
    bash launch/demo.sh     # the same on a small scale; needs no GPU and downloads no model

The loss is the cross-entropy of the next row of codes, averaged over every trained code of an
optimizer step (all ranks, micro-steps and codebooks), plus --text_loss_weight times the same
average over text targets. So 1 rank, N ranks, DDP and FSDP2 give the same update.

On SIGTERM, SIGUSR1 or a file OUTPUT_DIR/stop the run finishes the step, saves a checkpoint, writes
OUTPUT_DIR/requeue for the launcher and exits with status 0. Rerun the same command to resume.
"""
import os
import sys

from core import cli
from core.cli import ABOVE_0, BELOW_1, COUNT, SUPPRESS, require
from speech.conversations import CHECKS, SETTINGS, check_data, data_flags, source_paths

# ---- Flags: name, default, help
p = cli.Parser("Fine-tune Higgs-Audio V2 or Higgs TTS 3. Flags of speech/prepare_tts.py work too.")
flag, switch = p.flag, p.switch
cli.trainer_flags(p, CHECKS)    # of every trainer: --config, --use_lora, --output_dir, ...
cli.packing_flags(p)    # of speech and chats: --max_tokens_per_batch, --eval_steps, --compile, ...
# model
flag("--lora_target_modules", None, "attention, attention+audio_mlp, all-linear, or module name "
     "endings (default: attention; TTS 3: all-linear)", type=cli.alias(all="all-linear"))
switch("--train_audio_table", "train the audio embedding of TTS 3; needs --use_lora")
switch("--freeze_llm", "train only the audio embedding and head, without adapters")
# data
data_flags(p)
flag("--validation_split", None, "share held out (default: 0.5 to 5 %%)", BELOW_1, type=float)
switch("--disable_eval", SUPPRESS)         # --validation_split 0
# batch and optimization
switch("--group_by_length", "put samples of similar length into the same micro-step")
flag("--warmup_steps", None, "linear warm-up (default: 5 %% of the run, at most 100)", type=int)
flag("--text_loss_weight", 1.0, "weight of the text loss, 0 = audio only")
flag("--keep", None, "texts that the base speaks once; a KL loss keeps the adapter close to them")
flag("--keep_weight", 1.0, "weight of --keep, added once in --keep_every 10 steps", ABOVE_0)
flag("--keep_every", 10, SUPPRESS, COUNT)
flag("--sample_prompts", None, "texts, or ChatML, spoken at every validation", metavar="FILE")
flag("--sample_seconds", 10.0, "most seconds of speech per prompt", ABOVE_0)
# flags of prepare_tts.py, and older names
for name in ("columns", "task_type", "reference", "reference_share", "train_data_dir",
             "eval_data_dir"):
    p._option_string_actions[f"--{name}"].help = SUPPRESS


def check_flags(args, world_size):
    """Raise UserError for flags that would fail later or have no effect; set derived values."""
    cli.check_packing(args, world_size, p, CHECKS)
    check_data(args)
    for path, *_ in source_paths(args) if args.code_cache else ():
        require(not os.path.exists(os.path.join(path, "prepared.json")),
                f"--code_cache: {path} has its codes already; drop the flag")
    require(not (args.use_lora and args.freeze_llm), "--use_lora freezes all: drop --freeze_llm")
    require(args.use_lora or not args.keep, "--keep needs --use_lora")
    require(not (args.keep and args.train_audio_table), "--keep excludes --train_audio_table")


# parsed before torch is imported, so --help and wrong flags are answered at once
args = cli.parse(p, check_flags)
dry = args.dry_run is not None      # one process plans for all ranks

import math
from functools import partial

import torch

from core import (adapters, checkpoint, dist, json_files, metrics, optim, packing, run,
                  tensor_io)
from data import collate, make_loader, make_table, split_samples, usable_samples
from speech import weights
from speech.dataset import read_flags
from speech.labels import N_EXTRA, batch_sums, step_work, total_loss

if args.float8 or args.base_dtype == "nf4":
    from core import quantized

# ---- Ranks. A dry run joins no other process and writes nothing.
world, watch, work_dir = run.start(args)
main_rank, device, ranks = world.is_main, world.device, args.ranks
# dtype of the computation; trained weights stay in fp32
dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else None
autocast = partial(dist.autocast, device, dtype)
print0 = partial(print, sep="\n") if main_rank else lambda *lines: None

# ---- Model on the meta device, where it takes no memory, and data. Rank 0 tokenises and all ranks
# map the same table, so each knows the samples and targets of every step without communication.
folder, config_dict, codec_dir = weights.find_files(
    world, args.model_path, args.audio_tokenizer_path)
module = weights.module(config_dict)        # speech/v2.py or v3.py, chosen once
args.normalize_text = module.text_setting(args.normalize_text or "")
if args.use_lora:
    args.lora_target_modules = args.lora_target_modules or module.LORA_TARGETS
config, tokenizer = module.read_config(config_dict), module.load_tokenizer(folder)
ids = module.token_ids(tokenizer, config)


def empty_model(source, config_dict):
    """(model on the meta device, {weight name: its slice in a file of folder `source`}). Only
    trained weights require gradients. UserError if the folder has other weights than the model."""
    base_dtype = dtype if args.use_lora and dtype else torch.float32    # frozen: half is enough
    native = net = module.empty_model(config_dict, base_dtype)
    parts = module.weight_parts(source, config_dict)
    weights.check_weights(native, parts, source)
    if args.use_lora:
        net = weights.add_lora(native, args.lora_rank, args.lora_alpha, args.lora_dropout,
                               args.lora_target_modules, args.model_path, args.train_audio_table,
                               rslora=args.use_rslora, dora=args.use_dora)
    elif args.freeze_llm:
        for name, parameter in native.named_parameters():
            parameter.requires_grad_(any(stem in name for stem in (
                "embed_audio_tokens", "audio_lm_head", "audio_embedding")))
    # DDP would wait for the gradients of weights that no loss depends on
    module.freeze_unreachable(native, args.text_loss_weight)
    if args.base_dtype == "nf4":
        quantized.to_nf4(module.layers(native))
    model = module.packed(net, args.gradient_checkpointing)
    require(any(parameter.requires_grad for parameter in model.parameters()),
            "these flags leave no weight to train")
    return model, parts


model, parts = empty_model(folder, config_dict)
setting = args, tokenizer, ids, config, codec_dir, world
prompts = keep_loss = None
if args.sample_prompts:     # an option that is off imports nothing
    from speech import speak
    prompts = speak.Speaker(*setting)
if args.keep:
    from speech import keep
    keep_loss = keep.Keeper(*setting)
# last, as it takes hours
table = make_table(world, tokenizer, ids, *read_flags(args, ids, codec_dir), work_dir, dry)
train_ids, eval_ids = usable_samples(
    table, *split_samples(table, 0 if args.disable_eval else args.validation_split, args.seed),
    max_length=args.max_length or config.max_position_embeddings, say=print0,
    max_tokens=args.max_tokens_per_batch, drop="too_long" in args.drop_bad,
    output_dir=None if dry or not main_rank else args.output_dir)
if args.auto or dry:
    from core import memory
    from speech import plan
    memory_of = partial(plan.memory, model, table, ids, train_ids, keep_loss)
    if args.auto:
        memory.choose(args, world, memory.pack_ways(
            args, table.lengths[train_ids], keep_loss.longest() if keep_loss else 0), memory_of)
        model, parts = empty_model(folder, config_dict)     # with the chosen recomputation
# after --auto, which may exclude --compile; codes in the cache must not depend on --tf32
dist.set_compute(world, args)

# ---- Resume from the newest intact checkpoint, on any number of ranks
identity = None     # on rank 0: a run resumes only a checkpoint with the same values
if main_rank:
    base = tensor_io.fingerprint_files(
        [*sorted(folder.glob("*.safetensors")), folder / "config.json"])
    if keep_loss:
        keep_loss.fingerprint += base
    trained = "audio embedding and head" if args.freeze_llm else "full"
    if args.use_lora:
        trained = "lora and audio table" if args.train_audio_table else "lora"
        trained += " on nf4" * (args.base_dtype == "nf4")
    trained += "" if args.text_loss_weight else " without text"
    pack = f"{args.max_tokens_per_batch} tokens" if args.max_tokens_per_batch else (
        f"{args.per_device_train_batch_size} samples")
    pack += " by length, in blocks" * args.group_by_length
    identity = {"base model": base, "codec": table.reader.folder.name,
                "set of trained weights": trained,
                "--normalize_text": args.normalize_text, "seed": args.seed,
                "training data": table.fingerprint(train_ids), "pack": pack,
                "--keep": keep_loss.fingerprint if keep_loss else None}
# validation losses are comparable only if these are equal
validation = [table.fingerprint(eval_ids), args.text_loss_weight]
resume, state = dist.rank0(
    world, checkpoint.find_newest, args.output_dir, args.resume, identity)
if resume and not args.use_lora:        # a full checkpoint replaces the base
    config_dict = json_files.read_object(resume / "config.json")
    model, parts = empty_model(resume, config_dict)
# resume position: optimizer steps taken, epoch, next pack of that epoch
step, epoch, first_pack = (state.get(key, 0) for key in ("step", "epoch", "first"))
best_loss, best_step = math.inf, None       # best validation so far
if state.get("best_step") is not None and state["validation"] == validation:
    best_loss, best_step = state["best_loss"], state["best_step"]

# ---- Order of the packs: a function of (seed, epoch) alone, so any number of ranks continues it
accumulation = args.gradient_accumulation_steps
per_step = ranks * accumulation     # packs; micro-step m of rank r takes pack first + m * ranks + r
order = packing.PackOrder(
    table.lengths[train_ids], train_ids, tokens_per_pack=args.max_tokens_per_batch, seed=args.seed,
    samples_per_pack=args.per_device_train_batch_size, group_by_length=args.group_by_length)
steps_per_epoch, total_steps = packing.run_length(
    order.packs_per_epoch, per_step, args.num_train_epochs, args.max_steps,
    {"step": step, "epoch": epoch, "first": first_pack})
validates = bool(len(eval_ids) or prompts)
lines = run.schedule_lines(args, model, total_steps, steps_per_epoch, step, resume, state,
                           validates)
if dry:
    if resume and args.use_lora:
        adapters.load_adapters(model.net, resume)       # on the meta device this copies nothing
    plan.end_dry_run(args, ranks, memory_of(args, order), model, table, ids, train_ids, lines,
                     total_steps - step, steps_per_epoch)

# ---- Model: sharded on the meta device, then loaded; no process holds more than its shard
watch.report_progress("loading the model", args.wait_timeout)
native, net = model.base_model, model.net
if args.compile:        # before sharding, which hooks into each layer's call
    dist.compile_layers(module.layers(native))
if args.parallel != "ddp":
    dist.shard(model, module.layers(native), world, args.bf16, args.reshard_after_forward,
               args.cpu_offload, args.shard_size)
model.to_empty(device="cpu" if args.cpu_offload else device)
module.reset_buffers(native, device)        # to_empty leaves them unset
tensor_io.load_base(native, parts, world)
if args.use_lora:
    adapters.load_adapters(net, resume) if resume else adapters.init_adapters(net, args.seed)
if args.float8:
    quantized.to_float8(module.layers(native))
model.train()
# FSDP2 changes the model in place; DDP wraps it in a module
wrapped = dist.wrap_ddp(model, world) if args.parallel == "ddp" else model
trainable = [p for p in model.parameters() if p.requires_grad]     # sharding replaced them
optimizer = optim.build_adamw(model.named_parameters(), args.learning_rate, args.weight_decay,
                              args.adam_beta2)
scaler = optim.loss_scaler(device, args.fp16, state.get("scaler"))
if keep_loss:
    watch.report_progress("the base speaks --keep", args.wait_timeout)
    lines.append(keep_loss.speak(world, model, autocast))
n_sums = ids.num_codebooks + N_EXTRA       # length of batch_sums()
eval_packs = packing.packs_in_order(
    eval_ids, args.per_device_eval_batch_size, world.rank, world.size)


def forward_backward(batch, n_audio, n_text, sync):
    """Add the gradients of one micro-step; return (loss, sums for the log). No host sync.

    The model returns sums over the batch's targets. They are divided by the targets of the whole
    step on all ranks, so any split over ranks and micro-steps adds up to the same loss."""
    with dist.gradient_sync(wrapped, sync):     # ranks exchange them in the last micro-step
        with autocast():
            audio, text, ends = wrapped(batch)
        loss = total_loss(audio, n_audio, text, n_text, args.text_loss_weight)
        # DDP and FSDP2 average gradients over ranks, the loss is a mean over all of them
        scaler.scale(loss * world.size).backward()
    return loss, batch_sums(audio, text, ends, batch)


if device.type == "cuda":       # try the largest pack now, or it may fail hours into the run
    largest = order.window(0, order.sums(order.lengths, 1).argmax())
    batch, = make_loader(table, ids, [largest], 0, args.max_tokens_per_batch)
    try:
        forward_backward(batch.to(device), 1, 1, True)
    except torch.OutOfMemoryError:
        raise cli.UserError("the largest pack exceeds GPU memory; try --auto or --parallel fsdp")
    model.zero_grad(set_to_none=True)       # discard the trial's gradients
torch.manual_seed(args.seed + world.rank)       # different dropout on every rank
if resume:
    checkpoint.restore(world, resume, model, optimizer)


# ---- Validation and checkpoints; they read sums, log, monitor and eval_due of the loop below
@torch.no_grad()
def validate():
    """Validate, speak prompts, log; True if the loss is the best so far, None if asked to stop."""
    global best_loss, best_step
    watch.report_progress(f"validation at step {step}", args.wait_timeout)
    values, total = {}, torch.zeros(n_sums, dtype=torch.float64, device=device)
    model.eval()        # no dropout
    loader = make_loader(table, ids, eval_packs, min(1, args.num_workers))
    for i, batch in enumerate(loader):
        # often enough for a prompt stop, rarely enough to cost nothing
        if i % 16 == 0 and any(dist.all_gather(world, run.stop_asked(args.output_dir))):
            return None
        with autocast():
            losses = model(batch.to(device))
        total += batch_sums(*losses, batch)
    model.train()
    if len(eval_ids):       # all targets of all ranks count alike
        values = module.loss_report(dist.all_reduce(world, total).tolist(), args.text_loss_weight,
                                    "eval")
        print0("eval   step {:>6} | loss {eval/loss:7.4f} | audio {eval/audio_loss:6.3f} | text "
               "{eval/text_loss:6.3f} | eos {eval/eos_loss:6.3f} stop {eval/stop_recall:6.1%}"
               .format(step, **values))
    if prompts:
        watch.report_progress(f"sample prompts at step {step}", args.wait_timeout)
        values |= prompts.speak(world, model, step, log, autocast)
    if values:
        log.write(step, values)
    if not values.get("eval/loss", math.nan) < best_loss:       # nan, or not validated: not best
        return False
    best_loss, best_step = values["eval/loss"], step
    return True


def save():
    """Copy the state to the host; a thread writes it during the next steps. Call on every rank."""
    watch.report_progress(f"saving at step {step}", args.wait_timeout)
    unlogged = dist.all_reduce(world, sums.clone()).tolist()    # sums since the last log line
    dist.reshard(model)     # FSDP2's parameters stay gathered after a validation
    stem, named = ("adapter_model", adapters.adapter_weights(net)) if args.use_lora else (
        "model", module.weight_names(native))       # under PEFT's or transformers' names

    def save_config(path):
        # speech from this checkpoint must normalise texts as training did
        checkpoint.write_json(path / SETTINGS, {"normalize_text": args.normalize_text,
                                                "base_dtype": args.base_dtype})
        if args.use_lora:
            net.peft_config["default"].save_pretrained(path)
        else:
            module.save_config(native, tokenizer, path, folder)

    checkpoint.save(world, args, step, model, optimizer, {stem: named}, save_config, {
        "step": step, "epoch": epoch, "first": first_pack, "identity": identity,
        "validation": validation, "best_step": best_step, "eval_due": eval_due,
        "best_loss": None if best_step is None else best_loss, "skipped": monitor.skipped,
        "scaler": scaler.state_dict(), "unlogged": unlogged,
        "args": cli.remove_secrets(vars(args))})


# ---- Loop
# losses since the last log line, on the device; the host fetches them at log lines only
# (the last two: of keep_loss); the sums in a checkpoint are of all ranks
unlogged = state["unlogged"] if resume and main_rank else [0.0] * (n_sums + 2)
sums = torch.tensor(unlogged, dtype=torch.float64, device=device)
monitor = optim.StepMonitor(world, table.name, args.max_bad_steps, state.get("skipped", 0), scaler)
epochs = sys.maxsize if args.max_steps else args.num_train_epochs
packs = packing.rank_packs(order, world.rank, world.size, accumulation, epochs, epoch, first_pack)
# threads read ahead
batches = make_loader(table, ids, packs, args.num_workers, args.max_tokens_per_batch)
eval_due = bool(state.get("eval_due") and validates)    # if a stop interrupted a validation
log = run.open_log(args, world, step, eval_due)
print0(*lines)
eval_due = stopping = eval_due and validate() is None
start_step, timer = step, metrics.StepTimer()

while step < total_steps and not stopping:
    # next batch: each rank knows from the order which samples all ranks take in this step
    if first_pack >= order.packs_per_epoch:
        epoch, first_pack = epoch + 1, 0
    work = step_work(config, table, order.window(epoch, first_pack, per_step), args.use_lora)
    n_audio, n_text = work["audio_targets"], work["text_targets"]
    step_sums = torch.zeros_like(sums)      # stays on the device; nothing here waits for it
    for micro in range(accumulation):
        watch.report_progress(f"loading data for step {step + 1}")
        with timer.timed("waited"):
            batch = next(batches).to(device)
        mine = list(batch.samples)
        # if a batch differed from the plan, ranks would divide by different counts
        assert batch.counts["audio_targets"] == table.audio_targets[mine].sum()
        # the first step may compile for minutes
        compiling = args.compile and step == start_step
        watch.report_progress(f"step {step + 1}", args.wait_timeout if compiling else None)

        # forward, loss, backward
        if keep_loss:       # first: the pass below sums these gradients over the ranks, too
            step_sums[n_sums:] += keep_loss.backward(
                wrapped, collate, world, step, micro, autocast, scaler.scale)
        loss, micro_sums = forward_backward(batch, n_audio, n_text, micro == accumulation - 1)
        monitor.watch(loss, mine)
        step_sums[:n_sums] += micro_sums

    # clip: the norm covers all ranks and stays on the device
    scaler.unscale_(optimizer)
    norm = optim.clip_gradients(trainable, args.max_grad_norm)

    # step: all ranks skip it if the gradient is not finite; the host does not wait for that
    lr = args.learning_rate * optim.lr_factor(step, total_steps, args.warmup_steps,
                                              args.lr_scheduler)
    bad = optim.take_step(optimizer, lr, norm).to(device)
    scaler.update()
    sums += torch.where(bad > 0, 0.0, step_sums)
    step, first_pack = step + 1, first_pack + per_step
    # evaluates the previous step, as this one is still running
    monitor.push(step, norm, bool(run.stop_asked(args.output_dir)),
                 trains=bool(n_audio or n_text and args.text_loss_weight))

    # log: the host waits for the device here
    last = step == total_steps
    timer.sums.update(work, steps=1, slots=per_step * args.max_tokens_per_batch or work["tokens"])
    if last or step % args.logging_steps == 0:
        numbers = dist.all_reduce(world, sums).tolist()
        sums.zero_()
        values = module.loss_report(numbers[:n_sums], args.text_loss_weight, "train")
        if numbers[-1]:
            values["train/keep_kl"] = numbers[-2] / numbers[-1]
        if args.fp16:
            values["train/loss_scale"] = scaler.get_scale()
        values |= {"train/learning_rate": lr, "train/grad_norm": norm.item(),
                   "train/epoch": epoch + min(1.0, first_pack / order.packs_per_epoch),
                   "train/bad_steps": monitor.skipped, **timer.report(world)}
        log.write(step, values)
        left = metrics.duration((total_steps - step) * values["train/step_seconds"])
        mfu = " | mfu {train/mfu:6.1%}" * ("train/mfu" in values)
        print0(("step {:>6}/{} | loss {train/loss:7.4f} | audio {train/audio_loss:6.3f} text "
                "{train/text_loss:6.3f} | stop {train/stop_recall:6.1%} | lr "
                "{train/learning_rate:.2e} | grad_norm {train/grad_norm:7.3f} | "
                "{train/audio_seconds_per_second:>7,.1f} audio-s/s" + mfu + " | eta {}")
               .format(step, total_steps, left, **values))

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
            # asked to stop during validation: the next start validates first
            eval_due = stopping = improved is None

        # save: every --save_steps, before a stop, and at each best validation
        if saving or stopping or improved:
            save()

best = f"; best validation loss {best_loss:.4f} at step {best_step}" * (best_step is not None)
run.end(args, world, step, total_steps, stopping,
        f"{cli.plural(monitor.skipped, 'step')} skipped{best}")
