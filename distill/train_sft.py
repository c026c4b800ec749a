"""Fine-tune a causal language model on chats, loss on the answers only: full or LoRA, FSDP2 or DDP, packed.

    torchrun --nproc_per_node=8 distill/train_sft.py --model_path Qwen/Qwen3-4B-Instruct-2507 \
        --train_data_file labels.jsonl --output_dir ./out --bf16
    torchrun --nproc_per_node=8 distill/train_sft.py ... --bf16 --use_lora --max_tokens_per_batch 4096 --compile
    torchrun --nproc_per_node=8 distill/train_sft.py ... --use_lora --prompt_file system.txt --prompt_role system
    torchrun --nproc_per_node=8 distill/train_sft.py ... --teacher_path Qwen/Qwen3-30B-A3B-Instruct-2507 --on_policy 1
    python distill/train_sft.py --model_path ./tiny --train_data_file chats.jsonl --output_dir ./out    # needs no GPU

The script reads top to bottom: flags, ranks, data, model, resume, order of the data, validation and saving, then the
loop. Its loss is the cross-entropy of the trained tokens, averaged over all of them in an optimizer step (all ranks
and micro-steps). Which tokens are trained is proven against the tokenizer's chat template (core/chat.py).

With --teacher_path a second, frozen model scores each token of the answers, and the student learns its distribution
(losses.py); with --prompt_file it reads them behind that prompt, which the student does not have. The teacher may be
the student's own base. The answers are those of the data, or with --on_policy the student's own.

SIGTERM, SIGUSR1 or a file OUTPUT_DIR/stop: the step is finished, a checkpoint saved, and OUTPUT_DIR/requeue left for
the launcher; exit status 0. Rerun the same command to resume.
"""
import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ stands beside this folder

from core import cli, precision, run_lock
from core.cli import require
from distill.choices import CHECKS, DISTILLING, DIVERGENCES, THINKING, TOO_LONG

# LoRA takes about ten times the rate of full fine-tuning (thinking-machines-lab/tinker-cookbook's rule).
LORA_RATE, FULL_RATE = 2e-4, 2e-5
GLOBAL_BATCH = 128      # samples an optimizer step, unless flags say otherwise

# --------------------------------------------------------------------------------------------------
# Flags

p = cli.Parser("Fine-tune a causal language model on chats.")
add = p.add_argument
# before the run
add("--config", metavar="FILE", help="YAML file of lines `flag: value`; the command line overrides it. "
    "Every run leaves the file that repeats it, OUTPUT_DIR/run.yaml")
add("--dry_run", nargs="?", type=int, const=0, metavar="GPUS", help="check everything, print the plan, "
    "stop; needs no GPU. GPUS: plan for this number (default: this launch's)")
# model
add("--model_path", required=True, help="folder or hub name of a transformers causal LM, safetensors")
cli.switch(p, "--use_lora", help="train adapters on a frozen base instead of all weights")
add("--lora_rank", type=int, default=32, help="adapter rank")
add("--lora_alpha", type=int, default=32, help="updates are multiplied by alpha / rank")
add("--lora_dropout", type=float, default=0.0, help="dropout on adapter inputs, 0 to 1")
add("--lora_target_modules", type=cli.alias(all="all-linear"), default="all-linear",
    help="all-linear (of the layers), or comma-separated module name endings such as q_proj,v_proj")
cli.switch(p, "--use_rslora", help="PEFT's rsLoRA: multiply updates by alpha / sqrt(rank) instead")
cli.switch(p, "--use_dora", help="PEFT's DoRA: train the length of each weight row apart; slower")
add("--base_dtype", choices=("bf16", "nf4"), help="lora: nf4 keeps frozen layers in four bits")
# data
add("--train_data_file", required=True, help='JSONL, a line {"messages": [{"role": ..., "content": ...}, ...]}, or '
    'ShareGPT; or .parquet of such rows; or a folder, a pattern or a data set on the hub, OWNER/NAME@REVISION/FILES, of '
    'them; with an integer "id", groups go by it')
add("--eval_data_file", help="validation data; without it --validation_split is held out")
add("--validation_split", type=float, default=0.0, help="share of groups held out, by seeded shuffle")
add("--group_size", type=int, default=1, help="neighbouring lines (or ids) that are held out or trained together, as "
    "translations should be")
add("--chat_template", metavar="FILE", help="Jinja file to use and save instead of the model's template")
add("--enable_thinking", choices=tuple(THINKING), default="template",
    help="what the template gets under this name; generate with the same. template: nothing")
add("--train_turns", choices=("all", "last"), default="all",
    help="assistant turns that are trained; with a prompt around the user's text always the last")
add("--preprocess_num_proc", type=int, default=min(8, cli.usable_cpus()),
    help="processes that read and tokenise large files, 0 = in the trainer")
add("--max_length", type=int, default=0, help="tokens a sample may have, 0 = the model's positions; with --prompt_file "
    "those of student and teacher together")
add("--too_long", choices=TOO_LONG, default="stop", help="longer samples: stop and name them, drop and count them, or "
    "cut tokens off their left or right end")
add("--drop_bad", nargs="*", metavar="CHECK", help="drop bad samples instead of stopping; all, or found by "
    f"{', '.join(CHECKS)}; OUTPUT_DIR/problems.jsonl lists them")
cli.switch(p, "--drop_too_long", help=argparse.SUPPRESS)        # the same as --drop_bad too_long
add("--num_workers", type=int, default=2, help="loader processes per rank, 0 = in the trainer")
# distillation
add("--teacher_path", help="folder or hub name of a model with the same vocabulary that teaches all answers; with "
    "--prompt_file the default is --model_path, without adapters")
add("--teacher_url", help="of vLLM's server of that model, which then scores: --teacher_path needs its config and "
    "tokenizer alone, in a folder; key in OPENAI_API_KEY")
add("--teacher_name", help="the server's name for it (default: --teacher_path)")
add("--prompt_file", help="text that the teacher reads and the student does not")
add("--prompt_role", choices=("user", "system"), default="user",
    help="where the prompt goes: around the last user message, or in a system message")
add("--divergence", choices=DIVERGENCES, default="forward",
    help="from the teacher: KL(teacher, student), KL(student, teacher), or Jensen-Shannon")
add("--js_beta", type=float, default=0.5, help="the teacher's share in js's mixture, between 0 and 1")
add("--on_policy", type=float, default=0.0,
    help="with a teacher, share of the samples whose answer the student draws at each step")
add("--max_new_tokens", type=int, default=128, help="tokens an answer drawn for --on_policy may have")
add("--base_url", help="of vLLM's server, e.g. http://localhost:8000/v1, which then draws the answers of --on_policy "
    "(on_policy.py); key in OPENAI_API_KEY")
add("--refresh_steps", type=int, default=1, help="with --base_url, optimizer steps between refreshes of its adapters")
add("--request_timeout", type=float, default=240.0, help="seconds that one request may take in all")
add("--distill_topk", type=int, default=0, metavar="K",
    help="compare the teacher's K likeliest tokens and the sum of all others; 0 = the whole vocabulary")
add("--distill_weight", type=float, help="share of the divergence in the loss, above 0, up to 1 (default: 1)")
add("--keep", metavar="FILE", help="chats whose answers are to stay as likely as the base makes them")
add("--keep_weight", type=float, default=1.0, help="weight of KL(base, student) a token in the loss")
add("--keep_every", type=int, default=4, help="steps from one batch of them to the next")
# batch and length of the run
add("--per_device_train_batch_size", type=int, default=16, help="samples per micro-step and rank")
add("--max_tokens_per_batch", type=int, default=0,
    help="pack whole samples up to this many tokens instead, static shapes; 0 = off")
add("--per_device_eval_batch_size", type=int, default=16, help="samples per validation batch")
add("--gradient_accumulation_steps", type=int, default=0,
    help="micro-steps per optimizer step; 0 = from --global_batch_size, or 1 with a token budget")
add("--global_batch_size", type=int, default=0,
    help=f"samples per optimizer step; derives accumulation; 0 = {GLOBAL_BATCH} unless that is given")
add("--num_train_epochs", type=int, default=4, help="passes over the training samples")
add("--max_steps", type=int, default=0, help="stop after this many optimizer steps, 0 = by epochs")
# optimization
add("--learning_rate", type=float, help=f"peak learning rate (default: {LORA_RATE:g} with --use_lora, else {FULL_RATE:g})")
add("--lr_scheduler", type=cli.alias(constant_with_warmup="constant"), default="cosine",
    choices=("cosine", "linear", "constant"), help="after warm-up")
add("--min_lr_ratio", type=float, default=0.1, help="final learning rate as a share of the peak")
add("--warmup_ratio", type=float, default=0.1, help="share of the run that is linear warm-up")
add("--weight_decay", type=float, default=0.01, help="AdamW decay of matrices, not embeddings")
add("--adam_beta2", type=float, default=0.95, help="AdamW decay of the variance")
add("--max_grad_norm", type=float, default=1.0, help="clip the global gradient norm, 0 = off")
add("--max_bad_steps", type=int, default=5, help="stop after this many non-finite steps in a row")
add("--seed", type=int, default=42, help="of weights, data order, hold-out and dropout")
# speed and memory
cli.switch(p, "--auto", help="choose what no flag names by the memory plan, and print why: batches, "
           "--gradient_checkpointing, --parallel; a resumed run keeps its choice")
add("--gpu_memory", type=float, metavar="GIB", help="--dry_run, --auto: of one GPU (default: of the GPU here, else 80)")
add("--host_memory", type=float, metavar="GIB", help="--dry_run: free memory of a node (default: what is free here)")
add("--parallel", type=cli.sharding, choices=("ddp", "fsdp", "hsdp"), help="a model on every GPU; sharded over all GPUs "
    "(FSDP2), or over a node's, with a copy a node (HSDP) (default: ddp on one GPU, else fsdp)")
add("--shard_size", type=int, default=0, help="hsdp: GPUs that weights are sharded over, 0 = a node's")
add("--reshard_after_forward", action=argparse.BooleanOptionalAction, default=True, help="fsdp, hsdp: free gathered "
    "weights until the backward pass; no-: faster, more memory")
add("--reduce_dtype", choices=("fp32", "bf16"), default="fp32", help="in which FSDP sums gradients")
cli.switch(p, "--cpu_offload", help="fsdp, hsdp: shards and optimizer in host memory (slow)")
cli.switch(p, "--bf16", help="bfloat16 compute; a frozen base is stored in bfloat16")
cli.switch(p, "--fp16", help="float16 compute with a scaled loss, for GPUs without bfloat16")
cli.switch(p, "--float8", help="lora with --compile: products with frozen weights in float8")
cli.switch(p, "--tf32", help="TF32 for float32 matrix products on CUDA")
cli.compile_flag(p)
add("--gradient_checkpointing", nargs="?", const="all", type=cli.recomputation, metavar="all|selective",
    help="recompute layers in the backward pass: all of them, or all but attention and matrix products; the flag alone "
    "means all")
add("--collective_timeout", type=int, default=600, help="abort after this many seconds without progress, naming the rank")
add("--wait_timeout", type=int, default=21600, help="the same for data preparation, validation, saving")
# logging, validation, checkpoints
add("--output_dir", default="./output", help="everything written goes here; shared by all nodes")
add("--logging_dir", default="./logs", help="TensorBoard files go to a folder in here")
add("--logging_steps", type=int, default=10, help="optimizer steps between log lines")
add("--report_to", nargs="+", default=["tensorboard"], metavar="NAME",
    help=f"beside metrics.jsonl: one or more of {', '.join(cli.TRACKERS)}, or none")
add("--wandb_project", default="flat-trainers", help="project at W&B and trackio")
add("--eval_steps", type=int, help="steps between validations, 0 = at the end (default: 1/5 of the run)")
add("--save_steps", type=int, help="steps between checkpoints, 0 = at the end (default: 1/10 of it)")
add("--save_total_limit", type=int, default=2, help="newest checkpoints kept beside the best, 0 = all")
add("--resume", type=cli.alias(true="auto", false="none"), default="auto",
    help="auto (newest whole checkpoint in OUTPUT_DIR), none, or a folder")


def check_flags(args, world_size):
    """Raise UserError for flags that would fail, or do nothing, later; fill in what derives."""
    if args.parallel is None:       # one GPU has nothing to shard with
        sharded = world_size > 1 and not (args.fp16 or args.float8 or args.base_dtype == "nf4")
        args.parallel = "fsdp" if sharded or args.cpu_offload or not args.reshard_after_forward else "ddp"
    if args.learning_rate is None:
        args.learning_rate = LORA_RATE if args.use_lora else FULL_RATE
    accumulation, args.gradient_accumulation_steps = args.gradient_accumulation_steps, 1    # 0 is derived below
    cli.check_trainer(args, world_size, p)
    args.gradient_accumulation_steps = accumulation
    precision.check(args)
    cli.at_least_one(args, "group_size")
    cli.zero_or_more(args, "gradient_accumulation_steps distill_topk")
    cli.above_zero(args, "gpu_memory host_memory")
    if args.dry_run is None:        # long before the imports are done
        run_lock.check_free(args.output_dir)
        require(args.auto or not args.gpu_memory, "--gpu_memory needs --dry_run")
        require(not args.host_memory, "--host_memory needs --dry_run")
    names = [name for value in args.drop_bad or () for name in value.split(",") if name]
    for name in names:
        require(name in CHECKS, f"--drop_bad {name}: no such check; there are {', '.join(CHECKS)}")
    dropped = {*(CHECKS if args.drop_bad == [] else names), *(["too_long"] if args.drop_too_long else [])}
    args.drop_bad = tuple(name for name in CHECKS if name in dropped)
    require(args.too_long in ("stop", "drop") or not args.drop_too_long,
            f"--drop_too_long and --too_long {args.too_long} exclude each other")
    if "too_long" in args.drop_bad and args.too_long == "stop":
        args.too_long = "drop"
    if args.teacher_path or args.prompt_file or any(getattr(args, flag) != p.get_default(flag) for flag in DISTILLING):
        from distill import teaching
        teaching.check_flags(args, p, world_size)
    if args.teacher_path and args.distill_weight is None:
        args.distill_weight = 1.0
    require(not (args.eval_data_file and args.validation_split),
            "give one of --eval_data_file and --validation_split, not both")
    require(not (args.global_batch_size and accumulation),
            "give one of --global_batch_size and --gradient_accumulation_steps")
    open_batch = args.auto and not args.max_tokens_per_batch and "per_device_train_batch_size" not in getattr(args, "named", ())
    if args.auto and (args.max_tokens_per_batch or open_batch):
        args.global_batch_size = args.global_batch_size or GLOBAL_BATCH * (not accumulation)
        args.gradient_accumulation_steps = accumulation or 1
    require(args.auto or not (args.global_batch_size and args.max_tokens_per_batch),
            "--global_batch_size counts samples: with --max_tokens_per_batch it needs --auto")
    if not args.gradient_accumulation_steps:
        samples, per_micro_step = args.global_batch_size or GLOBAL_BATCH, args.per_device_train_batch_size * world_size
        require(args.max_tokens_per_batch or samples % per_micro_step == 0,
                f"--global_batch_size {samples} is not a multiple of {per_micro_step} (--per_device_train_batch_size "
                f"{args.per_device_train_batch_size} x {cli.counted(world_size, 'rank')}); or give "
                "--gradient_accumulation_steps")
        args.gradient_accumulation_steps = 1 if args.max_tokens_per_batch else samples // per_micro_step


# parsed before torch is imported: --help and a mistake in a flag answer at once
args = cli.parse(p, check_flags)
dry = args.dry_run is not None
if dry and os.environ.get("RANK", "0") != "0":
    sys.exit(0)     # one process plans for all

import math
import tempfile

import torch

from core import chat, checkpoint, dist, loading, metrics, optim, watchdog
from core.packing import PackOrder, rank_packs, run_length
from distill import causal_lm, packed_lm
from distill.chat_data import Reading, make_loader, prepare_table, samples_line, split_samples, write_held_out
from distill.packed_lm import Sums

if args.use_lora:
    from core import adapters

# --------------------------------------------------------------------------------------------------
# Ranks. A dry run joins no other process and writes nothing.

output_dir, work_dir = Path(args.output_dir), args.output_dir
if dry:
    from core import memory
    world = dist.World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    sys.excepthook = dist.report_error
    memory.check_writable(args.output_dir, "--output_dir")
    scratch = tempfile.TemporaryDirectory()
    work_dir = scratch.name
else:
    world = dist.init(args.collective_timeout, args.wait_timeout, args.auto or args.parallel != "ddp",
                      args.auto or args.cpu_offload)
    dist.rank0(world, checkpoint.claim_output, args.output_dir)
    dist.rank0(world, watchdog.clear_marker, args.output_dir)
    if "tensorboard" in args.report_to:
        dist.rank0(world, checkpoint.prepare_folder, args.logging_dir, "--logging_dir")
watch = watchdog.Watchdog(world, args.collective_timeout)       # names a rank that hangs
watch.report_progress("data preparation", args.wait_timeout)
watchdog.exit_if_asked(world, args.output_dir)      # by a signal during the imports
ranks = args.dry_run or int(os.environ.get("WORLD_SIZE", "1"))
main_rank, device = world.is_main, world.device
dist.check_bf16(device, args.bf16)
if args.float8:
    from core import float8
    float8.check_device(device, True)
if args.tf32:
    torch.set_float32_matmul_precision("high")
dtype = causal_lm.half_dtype(args)


def print0(*lines):
    if main_rank:
        print(*lines, sep="\n", flush=True)


# --------------------------------------------------------------------------------------------------
# Data: rank 0 tokenises, all ranks map the same table and know the whole order. So ranks never
# have to ask each other which samples a step has, or how many targets.

for flag in ("model_path", "teacher_path"):     # one rank downloads for all
    if name := getattr(args, flag):
        dist.rank0(world, causal_lm.find_model, name, f"--{flag}")
folder = causal_lm.find_model(args.model_path)
config = causal_lm.load_config(folder)
tokenizer = chat.load_tokenizer(folder, template=args.chat_template)
causal_lm.check_vocabulary(tokenizer, config)
encoder = chat.Encoder(tokenizer, args.train_turns, thinking=THINKING[args.enable_thinking])
prompt = behind = kept = None
if args.teacher_path:
    from distill import frozen, teaching
    prompt, behind, config = teaching.open_side(args, config, tokenizer)
limit = causal_lm.length_limit(config, args.max_length, args.max_tokens_per_batch)
reading = Reading(encoder, limit, args.too_long, prompt, args.drop_bad, args.preprocess_num_proc, behind)
paths = [path for path in (args.train_data_file, args.eval_data_file) if path]
table, n_train, ends = prepare_table(world, work_dir, paths, reading, list_in=None if dry else args.output_dir)
if args.keep:
    from distill import frozen, keep
    kept = keep.read(args, world, work_dir, reading)
train_ids, eval_ids = split_samples(table, n_train, args.group_size, args.validation_split, args.seed)
if args.teacher_path:
    teaching.check_lesson(args, table, train_ids)

# --------------------------------------------------------------------------------------------------
# Model: on the meta device, where it takes no memory


def empty_model(folder):
    """(PackedLM on the meta device, parts) of packed_lm.build_empty, as the flags want it.

    A frozen base is stored in the dtype of --bf16 or --fp16, what is trained in fp32.
    """
    lora = prompted = None
    if args.use_lora:
        lora = (args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_target_modules, args.model_path,
                args.use_rslora, args.use_dora)
    if args.teacher_path:
        prompted = (args.distill_weight, args.divergence, args.js_beta, args.distill_topk)
    model, parts = packed_lm.build_empty(folder, args.use_lora and dtype or torch.float32, lora,
                                         args.gradient_checkpointing, prompted, args.base_dtype == "nf4")
    if prompted or args.keep:
        frozen.add(model, args)
    return model, parts


model, parts = empty_model(folder)
if args.auto or dry:
    from distill import plan
    if args.auto and plan.choose(args, world, ranks, model, table.lengths[train_ids], table.targets[train_ids], kept):
        model, parts = empty_model(folder)
args.compile = dist.choose_compile(
    world, args.compile, "shapes change with --keep and a teacher" if args.keep or args.teacher_path
    else "selective recomputation" if args.gradient_checkpointing == "selective"
    else "a base in nf4" if args.base_dtype == "nf4" else "")

# --------------------------------------------------------------------------------------------------
# Resume

identity = None     # what a checkpoint must share with the run that resumes it
if main_rank:
    identity = {"base model": causal_lm.fingerprint_weights(folder),
                "set of trained weights": ("full", "lora", "lora on nf4")[args.use_lora + (args.base_dtype == "nf4")],
                "seed": args.seed, "training data": table.fingerprint(train_ids),
                "teacher": frozen.fingerprint(args, kept) if prompt or kept else None,
                "pack": f"{args.max_tokens_per_batch} tokens" if args.max_tokens_per_batch else
                        f"{args.per_device_train_batch_size} samples"}
validation = table.fingerprint(eval_ids)        # losses on other data do not compare
checkpoints = checkpoint.CheckpointManager(world, output_dir, args.save_total_limit, args.wait_timeout)
resume, state = checkpoints.latest(args.resume)
if resume:
    dist.rank0(world, checkpoint.check_identity, resume, state, identity)
step, epoch, first_pack = (state.get(key, 0) for key in ("step", "epoch", "first"))
best_loss, best_step = math.inf, None
if state.get("best_step") is not None and state["validation"] == validation:
    best_loss, best_step = state["best_loss"], state["best_step"]

# --------------------------------------------------------------------------------------------------
# Order of the packs: a function of (seed, epoch) alone, so another number of ranks continues it

accumulation = args.gradient_accumulation_steps
per_step = ranks * accumulation
order = PackOrder(table.lengths[train_ids], tokens_per_pack=args.max_tokens_per_batch,
                  samples_per_pack=args.per_device_train_batch_size, seed=args.seed)
pad_to = 0 if args.teacher_path else args.max_tokens_per_batch      # static shapes, unless each sample is there twice
steps_per_epoch, total_steps = run_length(
    order.packs_per_epoch, per_step, args.num_train_epochs, args.max_steps,
    {"step": step, "epoch": epoch, "first": first_pack})
warmup_steps, validates = round(args.warmup_ratio * total_steps), bool(len(eval_ids))
intervals = cli.set_intervals(args, total_steps, state.get("args", {}), validates)
lines = [f"steps      {total_steps} ({steps_per_epoch} an epoch), {cli.counted(per_step, 'pack')} a step = "
         f"{cli.counted(ranks, 'rank')} x {cli.counted(accumulation, 'micro-step')}; peak lr {args.learning_rate:.2e}, "
         f"warm-up {warmup_steps}", intervals,
         f"start      step {step}, {f'resumed from {resume}' if resume else 'base model'}"]
if dry:
    if resume:
        packed_lm.check_resume(model, resume)
    plan.print_plan(args, ranks, model, table, (train_ids, eval_ids), order, lines, total_steps - step, kept)
    print("dry run ok")
    sys.exit(0)
held_out = dist.rank0(world, write_held_out, args.output_dir, table, train_ids, eval_ids, prompt)

# --------------------------------------------------------------------------------------------------
# Model: sharded while it takes no memory, then filled; no process ever holds more than its part

watch.report_progress("loading the model", args.wait_timeout)
if resume and not args.use_lora:        # a full checkpoint replaces the base
    model, parts = empty_model(resume)
sharding = None
if args.parallel != "ddp":
    sharding = {"bf16": args.bf16, "reshard_after_forward": args.reshard_after_forward, "cpu_offload": args.cpu_offload,
                "shard_size": args.shard_size, "reduce_dtype": args.reduce_dtype}
packed_lm.load(model, parts, world, sharding=sharding, compiled=args.compile)
if model.frozen:
    frozen.load_all(model, world, sharding)
if args.use_lora and resume:
    adapters.load_adapters(model.net, resume)
elif args.use_lora:
    adapters.init_adapters(model.net, args.seed)
if args.float8:
    float8.convert(causal_lm.decoder_layers(model.native))
model.train()
wrapped = model if sharding else dist.wrap_ddp(model, world)
new_ends = causal_lm.stop_at(model.native, ends)        # generate stops where trained answers end
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = optim.build_adamw(model.named_parameters(), args.learning_rate, args.weight_decay,
                              (0.9, args.adam_beta2), packed_lm.decays)
scaler = None
if args.fp16:
    from core.fp16 import Scaler
    scaler = Scaler(device, state.get("scaler"))
dist.seed_everything(args.seed, world.rank)     # other dropout on every rank
if resume:
    checkpoints.restore(resume, model, optimizer)
keeper = keep.Keeper(args, world, kept, wrapped) if args.keep else None
sampler = None
if args.on_policy:
    from distill import on_policy
    if args.base_url:       # draws the answers instead of this process
        sampler = on_policy.open_sampler(world, args.base_url, args.output_dir, args.refresh_steps, args.request_timeout)
nets = [model.native, getattr(model.frozen.get("teacher"), "native", model.native)]
sizes = [(packed_lm.layer_weights(net), net.config) for net in nets]


def step_work(samples):
    """Totals over the samples of a step, all ranks, from the table; python numbers."""
    lengths, targets = table.lengths[samples], int(table.targets[samples].sum())
    own = table.own[samples] if table.prompted else lengths
    flops = [packed_lm.flops(*size, int(of.sum()), targets, int((of * (of + 1) // 2).sum()), args.use_lora, forward_only)
             for size, of, forward_only in zip(sizes, (own, lengths - own), (False, True))][:1 + table.prompted]
    return {"tokens": int(lengths.sum()), "targets": targets, "samples": len(samples), "flops": sum(flops)}


# --------------------------------------------------------------------------------------------------
# Validation and checkpoints


@torch.no_grad()
def evaluate():
    """Exact token-weighted validation loss and accuracy {eval/...: float}; each rank takes a share.

    None, on all ranks, when one was asked to stop meanwhile.
    """
    held_out = PackOrder(table.lengths[eval_ids], samples_per_pack=args.per_device_eval_batch_size, shuffle=False)
    packs = [[int(eval_ids[i]) for i in pack] for pack in rank_packs(held_out, world.rank, world.size, 1, epochs=1)]
    loader = make_loader(table, packs, num_workers=min(1, args.num_workers), prefetch_factor=2)
    total = torch.zeros(model.sums, dtype=torch.float64, device=device)
    model.eval()
    for i, batch in enumerate(loading.each(loader)):
        if i % 16 == 0:     # often enough for a prompt stop, seldom enough to cost nothing
            checkpoints.check()
            if dist.all_max(world, bool(watchdog.stop_asked(args.output_dir))).item():
                model.train()
                return None
        with dist.autocast(device, dtype):
            total += model(batch.to(device)).stacked().double()
    model.train()
    return packed_lm.loss_report(Sums(*dist.all_reduce(world, total).tolist()), "eval")


def validate():
    """Validate, log -> whether the loss is the best so far; None if stopped."""
    global best_loss, best_step
    watch.report_progress(f"validation at step {step}", args.wait_timeout)
    values = evaluate()
    if values is None:
        return None
    print0("eval   step {:>6} | loss {eval/loss:7.4f} acc {eval/accuracy:6.1%}".format(step, **values))
    if main_rank:
        log.write(step, values)
    if not values["eval/loss"] < best_loss:     # never one that is not finite
        return False
    best_loss, best_step = values["eval/loss"], step
    return True


def save():
    """Copy everything off the device; it is written while the next steps run. On every rank."""
    watch.report_progress(f"saving at step {step}", args.wait_timeout)
    unlogged = dist.all_reduce(world, sums.clone()).tolist()    # of steps since the last log line
    dist.reshard(model)     # after a validation FSDP2's parameters are the gathered ones
    stem, named = "model", dict(model.native.named_parameters())
    if args.use_lora:
        stem, named = "adapter_model", adapters.adapter_weights(model.net)

    def save_config(path):
        if args.use_lora:
            adapters.save_config(model.net, path)
            return tokenizer.save_pretrained(path)      # which holds the chat template
        return causal_lm.save_config(model.native, tokenizer, path)

    checkpoints.save(step, model, optimizer, stem, named, save_config, {
        "step": step, "epoch": epoch, "first": first_pack, "identity": identity, "validation": validation,
        "best_step": best_step, "best_loss": None if best_step is None else best_loss, "eval_due": eval_due,
        "held_out": held_out, "skipped": monitor.skipped, "scaler": scaler and scaler.saved(), "unlogged": unlogged,
        "args": cli.stored(args)}, best_step,
        split=(lambda name, tensor: {name: tensor}) if args.use_lora else causal_lm.published)


# --------------------------------------------------------------------------------------------------
# Loop

sums = torch.zeros(model.sums, dtype=torch.float64, device=device)
if main_rank and len(state.get("unlogged", ())) == len(sums):
    sums += torch.tensor(state["unlogged"], dtype=torch.float64, device=device)
monitor = optim.StepMonitor(world, table.name, args.max_bad_steps, state.get("skipped", 0), scaler,
                            before_error=checkpoints.wait)
epochs = sys.maxsize if args.max_steps else args.num_train_epochs
packs = ([int(train_ids[i]) for i in pack] for pack in rank_packs(
    order, world.rank, world.size, accumulation, epochs, epoch, first_pack))
loader = make_loader(table, packs, num_workers=args.num_workers, pad_id=ends[0], prefetch_factor=4, pad_to=pad_to)
batches = loading.ahead(loader, device)
eval_due = bool(state.get("eval_due") and validates)     # a signal broke that validation off
if main_rank:
    checkpoint.write_text(output_dir / cli.CONFIG, cli.config_text(args, sys.argv[0]))
    board = Path(args.logging_dir) / output_dir.resolve().name
    log = metrics.MetricsLog(output_dir, board, args.report_to, cli.stored(args), step, args.wandb_project, eval_due)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print0(f"device     {world.size} x {name}, torch {torch.__version__}, {args.parallel}, "
           f"{'bf16' if args.bf16 else 'fp16' if args.fp16 else 'fp32'}", metrics.model_text(model, model.lora),
           *packed_lm.mixture_text(model), samples_line(table, train_ids, eval_ids), *lines)
    if new_ends:
        print0(f"note       answers end with {', '.join(tokenizer.convert_ids_to_tokens(new_ends))}, at which the base "
               "model's generation_config does not stop; "
               + ("pass it to generate with this adapter" if args.use_lora else "the saved one will"))
start_step, saved_step, timer, stopping = step, step if resume else None, metrics.StepTimer(device), False
if eval_due:
    with timer.paused():
        improved = validate()
        eval_due = stopping = improved is None


def next_batch():
    """This rank's next batch, on the device."""
    watch.report_progress(f"loading data for step {step + 1}")
    with timer.waiting():
        batch = next(batches)
    # compiling takes minutes, in the first step
    watch.report_progress(
        f"step {step + 1}", args.wait_timeout if args.compile and step == start_step else None)
    return batch


while step < total_steps and not stopping:
    # next batch: of which samples the step consists on all ranks, each rank knows from the order
    if first_pack >= order.packs_per_epoch:
        epoch, first_pack = epoch + 1, 0
    work = step_work(train_ids[order.window(epoch, first_pack, per_step)])

    drawn = None
    if args.on_policy:      # before the first loss: all are divided by the tokens of all answers of the step
        given = [next_batch() for _ in range(accumulation)]
        drawn, work["targets"] = on_policy.own_answers(args, world, model, table, given, ends, step, sampler)
    step_sums = torch.zeros_like(sums)      # stays on the device; nothing here waits for it
    for micro in range(accumulation):
        batch = drawn[micro] if drawn else next_batch()
        mine = list(batch.samples)
        # else the loss would be divided by another count than the other ranks'
        assert drawn or batch.counts["targets"] == table.targets[mine].sum(), "loader and plan disagree"
        assert pad_to in (0, len(batch.input_ids)), "the pack is not filled to its budget"

        # forward, loss, backward; ranks exchange gradients once a step, when they are complete
        with dist.gradient_sync(wrapped, micro == accumulation - 1):
            with dist.autocast(device, dtype):
                found = wrapped(batch)          # Sums over this batch's targets, not means
            # DDP and FSDP2 average gradients over ranks, the loss is a mean over the targets of all of them
            scale = world.size / work["targets"] * (scaler.scale if scaler else 1.0)
            (found.loss * scale).backward()
        monitor.watch(found.loss, mine)
        step_sums += found.stacked()
    kept_values = keeper.learn(step, scaler.scale if scaler else 1.0) if keeper else {}

    # clip
    if scaler:
        scaler.unscale(trainable)
    norm = optim.clip_gradients(trainable, args.max_grad_norm)

    # step: skipped on all ranks alike where the gradient is not finite, which nobody waits for
    lr = args.learning_rate * optim.lr_factor(step, total_steps, warmup_steps, args.lr_scheduler, args.min_lr_ratio)
    for group in optimizer.param_groups:
        group["lr"] = lr
    bad = 1 - torch.isfinite(norm).float()
    optim.guarded_step(optimizer, bad)
    optimizer.zero_grad(set_to_none=True)
    bad = bad.to(device)        # with --cpu_offload gradients are on the host
    if scaler:
        scaler.update(bad)
    sums += torch.where(bad > 0, 0.0, step_sums)
    step, first_pack = step + 1, first_pack + per_step
    monitor.poll()      # of the step before: this one is still being computed
    monitor.push(step, norm, bool(watchdog.stop_asked(args.output_dir)), trains=bool(work["targets"]))

    # log; here the host waits for the device
    last = step == total_steps
    # an epoch whose packs do not fill the last step ends with packs of one token of padding
    empty = max(0, first_pack - order.packs_per_epoch)
    timer.count({name: work[name] for name in ("tokens", "samples", "flops")},
                per_step * pad_to or work["tokens"] + empty)
    if kept_values and main_rank:
        log.write(step, kept_values)
    if last or step % args.logging_steps == 0:
        values = packed_lm.loss_report(Sums(*dist.all_reduce(world, sums).tolist()), "train")
        sums.zero_()
        values |= {"train/learning_rate": lr, "train/grad_norm": norm.item(),
                   "train/epoch": epoch + min(1.0, first_pack / order.packs_per_epoch),
                   "train/bad_steps": monitor.skipped, **({"train/loss_scale": scaler.scale.item()} if scaler else {}),
                   **timer.report(world)}
        if main_rank:
            log.write(step, values)
        parts = "ce {train/ce_loss:7.4f} kl {train/kl_loss:7.4f} " if "train/kl_loss" in values else ""
        mfu = " | mfu {train/mfu:6.1%}" if "train/mfu" in values else ""
        print0(("step {:>6}/{} | loss {train/loss:7.4f} " + parts + "acc {train/accuracy:6.1%} | lr "
                "{train/learning_rate:.2e} | grad_norm {train/grad_norm:7.3f} | {train/throughput:>9,.0f} tok/s | wait "
                "{train/data_wait_seconds:4.1f} s" + mfu + " | eta {}").format(
            step, total_steps, metrics.duration((total_steps - step) * values["train/step_seconds"]), **values))

    # validate; a request to stop counts one step late, so that no step waits for the device
    eval_due = validates and (last or args.eval_steps > 0 and step % args.eval_steps == 0)
    saving = last or args.save_steps > 0 and step % args.save_steps == 0
    if eval_due or saving:      # the host waits anyway
        monitor.poll()
    stopping, improved = monitor.stop and (eval_due or not last), False
    with timer.paused():
        checkpoints.check()
        if eval_due and not stopping:
            improved = validate()
            # asked to stop meanwhile: the next start validates first
            eval_due = stopping = improved is None

        # save: every so often, before a stop, and whenever validation is best
        if saving or stopping or improved:
            save()

watch.report_progress("waiting for the last checkpoint", args.wait_timeout)
checkpoints.wait()
watchdog.disarm()       # no rank waits for another any more
if main_rank:
    log.close()
    if stopping:
        why = watchdog.stop_asked(args.output_dir) or "asked to stop by a signal to another rank"
        watchdog.leave_marker(args.output_dir, f"{why} at step {step}")
        print(f"stopped    {why} at step {step} of {total_steps}; checkpoint saved; rerun the same command to resume")
    else:
        best = f"; best validation loss {best_loss:.4f} at step {best_step}" * (best_step is not None)
        print(f"done       step {step}; {monitor.skipped} steps skipped; final checkpoint "
              f"{output_dir / f'checkpoint-{step}'}{best}")
        print(metrics.verdict_line(metrics.verdict(metrics.read_metrics(log.path))))
dist.finish()
