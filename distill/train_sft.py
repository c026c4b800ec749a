"""Fine-tune a causal language model on chats, loss on the answers only: full or LoRA, FSDP2 or DDP, packed.

    torchrun --nproc_per_node=8 distill/train_sft.py --model_path Qwen/Qwen3-4B-Instruct-2507 \
        --train_data_file labels.jsonl --output_dir ./out --bf16
    torchrun --nproc_per_node=8 distill/train_sft.py ... --bf16 --use_lora --max_tokens_per_batch 4096 --compile
    torchrun --nproc_per_node=8 distill/train_sft.py ... --use_lora --prompt_file system.txt --prompt_role system
    torchrun --nproc_per_node=8 distill/train_sft.py ... --teacher_path Qwen/Qwen3-30B-A3B-Instruct-2507 --on_policy 1
    python distill/train_sft.py --model_path ./tiny --train_data_file chats.jsonl --output_dir ./out    # needs no GPU

Loss: cross-entropy of the trained tokens, averaged over all of them in the whole optimizer step (all ranks and
micro-steps). The counts come from the plan that all ranks share, so no rank has to ask another. Which tokens are
trained is proven against the tokenizer's chat template (chat.py); a template where that fails is refused.

With --teacher_path a second, frozen model scores each token of the answers, and the student learns its distribution
(losses.py); with --prompt_file it reads them behind that prompt, which the student does not have. The teacher may
be the student's own base. The answers are those of the data, or with --on_policy the student's own.

SIGTERM or SIGUSR1: the step is finished, a checkpoint saved, OUTPUT_DIR/requeue left for the launcher; exit status 0.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags
from common.flags import need
from common.text import counted
from core import run_lock
from distill.choices import CHECKS, DISTILLING, DIVERGENCES, THINKING, TOO_LONG

# LoRA takes about ten times the rate of full fine-tuning (thinking-machines-lab/tinker-cookbook's rule).
LORA_RATE, FULL_RATE = 2e-4, 2e-5
GLOBAL_BATCH = 128      # samples an optimizer step, unless flags say otherwise

# ---------------------------------------------------------------------------------------------------------------------
# Flags


def build_parser():
    p = flags.Parser("Fine-tune a causal language model on chats.",
                     usual="prompt_file prompt_role distill_topk")
    flags.before_the_run(p)
    g = p.add_argument_group("model")
    g.add_argument("--model_path", required=True,
                   help="folder or hub name of a transformers causal LM, safetensors")
    flags.lora(g, rank=32, alpha=32, dropout=0.0, targets="all-linear",
               targets_help="all-linear (of the layers), or comma-separated module name endings such as q_proj,v_proj")

    g = p.add_argument_group("data")
    g.add_argument("--train_data_file", required=True,
                   help='JSONL, a line {"messages": [{"role": ..., "content": ...}, ...]}, or ShareGPT; or .parquet of '
                        'such rows; or a folder, a pattern or a data set on the hub, OWNER/NAME@REVISION/FILES, of '
                        'them; with an integer "id", groups go by it')
    g.add_argument("--eval_data_file", help="validation data; without it --validation_split is held out")
    g.add_argument("--validation_split", type=float, default=0.0, help="share of groups held out, by seeded shuffle")
    g.add_argument("--group_size", type=int, default=1,
                   help="neighbouring lines (or ids) that are held out or trained together, as translations should be")
    g.add_argument("--chat_template", metavar="FILE", help="Jinja file to use and save instead of the model's template")
    g.add_argument("--enable_thinking", choices=tuple(THINKING), default="template",
                   help="what the template gets under this name; generate with the same. template: nothing")
    g.add_argument("--train_turns", choices=("all", "last"), default="all",
                   help="assistant turns that are trained; with a prompt around the user's text always the last")
    g.add_argument("--preprocess_num_proc", type=int, default=min(8, flags.usable_cpus()),
                   help="processes that read and tokenise large files, 0 = in the trainer")
    g.add_argument("--max_length", type=int, default=0,
                   help="tokens a sample may have, 0 = the model's positions; with --prompt_file those of student and "
                        "teacher together")
    g.add_argument("--too_long", choices=TOO_LONG, default="stop",
                   help="longer samples: stop and name them, drop and count them, or cut tokens off their left or "
                        "right end")
    flags.bad_samples(g, CHECKS)
    flags.loading(g, num_workers=2)

    g = p.add_argument_group("distillation")
    g.add_argument("--teacher_path", help="folder or hub name of a model with the same vocabulary that teaches all "
                                          "answers; with --prompt_file the default is --model_path, without adapters")
    g.add_argument("--teacher_url", help="of vLLM's server of that model, which then scores: --teacher_path needs its "
                                         "config and tokenizer alone, in a folder; key in OPENAI_API_KEY; see distill/scored.py")
    g.add_argument("--teacher_name", help="the server's name for it (default: --teacher_path)")
    g.add_argument("--prompt_file", help="text that the teacher reads and the student does not")
    g.add_argument("--prompt_role", choices=("user", "system"), default="user",
                   help="where the prompt goes: around the last user message, or in a system message of its own")
    g.add_argument("--divergence", choices=DIVERGENCES, default="forward",
                   help="from the teacher: KL(teacher, student), KL(student, teacher), or Jensen-Shannon")
    g.add_argument("--js_beta", type=float, default=0.5, help="the teacher's share in js's mixture, between 0 and 1")
    g.add_argument("--on_policy", type=float, default=0.0,
                   help="with a teacher, share of the samples whose answer the student draws anew at each step")
    g.add_argument("--max_new_tokens", type=int, default=128, help="tokens an answer drawn for --on_policy may have")
    g.add_argument("--base_url", help="of vLLM's server, e.g. http://localhost:8000/v1, which then draws the answers "
                                      "of --on_policy (see distill/on_policy.py); key in OPENAI_API_KEY")
    g.add_argument("--refresh_steps", type=int, default=1,
                   help="with --base_url, optimizer steps after which the server gets the adapters anew")
    g.add_argument("--request_timeout", type=float, default=240.0, help="seconds that one request may take in all")
    g.add_argument("--distill_topk", type=int, default=0, metavar="K",
                   help="compare the teacher's K likeliest tokens and the sum of all others; 0 = the whole vocabulary")
    g.add_argument("--distill_weight", type=float,
                   help="share of the divergence in the loss of a token that has a teacher, above 0, up to 1 (default: "
                        "1)")
    g.add_argument("--keep", metavar="FILE", help="chats whose answers are to stay as likely as the base makes them")
    g.add_argument("--keep_weight", type=float, default=1.0, help="of KL(base, student) a token, in the loss")
    g.add_argument("--keep_every", type=int, default=4, help="steps from one batch of them to the next")

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

    g = flags.optimisation(p, learning_rate=None, learning_rate_help=f"peak learning rate (default: {LORA_RATE:g} with "
                           f"--use_lora, else {FULL_RATE:g})", lr_scheduler="cosine", min_lr_ratio=0.1,
                           weight_decay=0.01, adam_beta2=0.95)
    g.add_argument("--warmup_ratio", type=float, default=0.1, help="share of the run that is linear warm-up")

    g = flags.speed(p, parallel=None, bf16_help="bfloat16 compute; a frozen base is stored in bfloat16")
    flags.sharding(g)

    flags.logging(p, logging_steps=10, save_total_limit=2)
    return flags.accept_old(p)


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later; fill in what derives."""
    if args.parallel is None:       # one GPU has nothing to shard with
        sharded = world_size > 1 and not (args.fp16 or args.float8 or args.base_dtype == "nf4")
        args.parallel = "fsdp" if sharded or args.cpu_offload or not args.reshard_after_forward else "ddp"
    if args.learning_rate is None:
        args.learning_rate = LORA_RATE if args.use_lora else FULL_RATE
    flags.check_shared(args)
    flags.check_bad_samples(args, CHECKS)
    if args.dry_run is None:        # long before the imports are done
        run_lock.check_free(args.output_dir)
    need(args.too_long in ("stop", "drop") or not args.drop_too_long,
         f"--drop_too_long and --too_long {args.too_long} exclude each other")
    if "too_long" in args.drop_bad and args.too_long == "stop":
        args.too_long = "drop"
    flags.check_parallel(args, world_size)
    flags.check_sharding(args)
    flags.check_lora(args, build_parser())
    flags.check_loading(args, build_parser())
    flags.at_least_one(args, "group_size")
    flags.zero_or_more(args, "gradient_accumulation_steps", "distill_topk")
    if args.teacher_path or args.prompt_file or any(getattr(args, flag) != build_parser().get_default(flag) for flag in DISTILLING):
        from distill import teaching
        teaching.check_flags(args, build_parser(), world_size)
    if args.teacher_path and args.distill_weight is None:
        args.distill_weight = 1.0
    need(not (args.eval_data_file and args.validation_split),
         "give one of --eval_data_file and --validation_split, not both")
    need(not (args.global_batch_size and args.gradient_accumulation_steps),
         "give one of --global_batch_size and --gradient_accumulation_steps")
    if args.auto and not flags.counts_samples(args):
        args.global_batch_size = args.global_batch_size or GLOBAL_BATCH * (not args.gradient_accumulation_steps)
        args.gradient_accumulation_steps = args.gradient_accumulation_steps or 1
    need(args.auto or not (args.global_batch_size and args.max_tokens_per_batch),
         "--global_batch_size counts samples: with --max_tokens_per_batch it needs --auto")
    if not args.gradient_accumulation_steps:
        samples, per_micro_step = args.global_batch_size or GLOBAL_BATCH, args.per_device_train_batch_size * world_size
        need(args.max_tokens_per_batch or samples % per_micro_step == 0,
             f"--global_batch_size {samples} is not a multiple of {per_micro_step} (--per_device_train_batch_size "
             f"{args.per_device_train_batch_size} x {counted(world_size, 'rank')}); or give --gradient_accumulation_steps")
        args.gradient_accumulation_steps = 1 if args.max_tokens_per_batch else samples // per_micro_step


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

from typing import NamedTuple

import torch
from tqdm import tqdm

from common import checkpoint, distributed, run, tensor_files
from common.problems import collect
from core import chat, loading, metrics, optim, watchdog
from core.packing import PackOrder, rank_packs, run_length
from distill import packed_lm, causal_lm
from distill.chat_data import (
    Reading,
    make_loader,
    prepare_table,
    samples_line,
    split_samples,
    write_held_out,
)
from distill.packed_lm import Sums

# ---------------------------------------------------------------------------------------------------------------------
# Model: empty, loaded, saved


def empty_model(folder, args):
    """(PackedLM on the meta device, parts) of packed_lm.build_empty, as the flags want it.

    A frozen base is stored in the dtype of --bf16 or --fp16, what is trained in fp32.
    """
    lora = None
    if args.use_lora:
        lora = (args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_target_modules, args.model_path,
                args.use_rslora, args.use_dora)
    dtype = args.use_lora and run.half(args) or torch.float32
    prompted = None
    if args.teacher_path:
        prompted = (args.distill_weight, args.divergence, args.js_beta, args.distill_topk)
    model, parts = packed_lm.build_empty(folder, dtype, lora, args.gradient_checkpointing, prompted,
                                         args.base_dtype == "nf4")
    if prompted or args.keep:
        from distill import frozen
        frozen.add(model, args)
    return model, parts


def load_model(args, world, model, parts, resume, sharding):
    """Load empty_model's model -> what to call in training: itself under FSDP2, or DDP around it.

    resume: checkpoint folder, or None: then adapters are drawn by the seed. sharding: of packed_lm.load.
    """
    packed_lm.load(model, parts, world, sharding=sharding, compiled=args.compile)
    if model.frozen:
        from distill import frozen
        frozen.load_all(model, world, sharding)
    if model.lora:
        from core import adapters
        if resume:
            adapters.load_adapters(model.net, resume)
        else:
            adapters.init_adapters(model.net, args.seed)
    if args.float8:
        from core import float8
        float8.convert(causal_lm.decoder_layers(model.native))
    model.train()
    return model if sharding else distributed.wrap_ddp(model, world)


def run_identity(args, inputs, data):
    """What a checkpoint must share with the run that resumes it, {name: value}; JSON-able.

    inputs: Inputs. data: fingerprint of the samples trained.
    """
    teacher = None
    if inputs.prompt or inputs.kept:
        from distill import frozen
        teacher = frozen.fingerprint(args, inputs.kept)
    samples, tokens = args.per_device_train_batch_size, args.max_tokens_per_batch
    pack = f"{tokens} tokens" if tokens else f"{samples} samples"
    trained = "lora on nf4" if args.base_dtype == "nf4" else "lora"
    return {"base model": causal_lm.fingerprint_weights(inputs.folder),
            "set of trained weights": trained if args.use_lora else "full",
            "seed": args.seed, "training data": data, "teacher": teacher, "pack": pack}


def save_checkpoint(world, writer, model, tokenizer, optimizer, meta):
    """Copy all of checkpoint-<meta["step"]> off the device and start writing it. On every rank."""
    writer.begin(meta["step"])
    distributed.reshard(model)
    states = distributed.gather_on_main(world, checkpoint.rng_state(world.device))
    if model.lora:
        from core import adapters
        files = tensor_files.stage(world, "adapter_model", adapters.adapter_weights(model.net), spread=False)
    else:
        files = tensor_files.stage(world, "model", dict(model.native.named_parameters()), parts=causal_lm.published)
    moments = optim.state_tensors(optimizer, model.named_parameters())
    files |= tensor_files.stage(world, f"{checkpoint.STATE_DIR}/optimizer", moments)
    if world.is_main:
        files[f"{checkpoint.STATE_DIR}/rng.pt"] = checkpoint.pickled(states)
        files["*"] = lambda path: save_config(model, tokenizer, path)
    writer.save(meta["step"], files, meta)


def save_config(model, tokenizer, folder):
    """What from_pretrained needs beside the weights; with an adapter the tokenizer, which holds the chat template."""
    if model.lora:
        from core import adapters
        adapters.save_config(model.net, folder)
        tokenizer.save_pretrained(folder)
    else:
        causal_lm.save_config(model.native, tokenizer, folder)


# ---------------------------------------------------------------------------------------------------------------------
# Validation, reports


@torch.no_grad()
def evaluate(args, world, model, table, eval_ids, check):
    """Exact token-weighted validation loss and accuracy {eval/...: float}; all ranks take a share.

    Now and then calls check(), which may raise, and looks for a request to stop: then it returns None, on all ranks.
    """
    order = PackOrder(table.lengths[eval_ids], samples_per_pack=args.per_device_eval_batch_size,
                      shuffle=False)
    packs = [[int(eval_ids[i]) for i in pack]
             for pack in rank_packs(order, world.rank, world.size, 1, epochs=1)]
    sums = torch.zeros(model.sums, dtype=torch.float64, device=world.device)
    model.eval()
    loader = make_loader(table, packs, num_workers=min(1, args.num_workers), prefetch_factor=2)
    for i, batch in enumerate(loading.each(loader)):
        if i % 16 == 0:
            check()
            if distributed.largest(world, bool(watchdog.stop_requested())).item():
                model.train()
                return None
        with run.autocast(args, world.device):
            sums += model(batch.to(world.device)).stacked().double()
    model.train()
    sums = Sums(*distributed.all_sum(world, sums).tolist())
    return packed_lm.loss_report(sums, "eval")


def step_work(table, window, sizes, use_lora):
    """Totals over the samples `window` of one optimizer step, from the plan: useful work of all ranks, python numbers.

    sizes: (packed_lm.layer_weights, config) of student and teacher.
    """
    lengths, targets = table.lengths[window], int(table.targets[window].sum())
    own = table.own[window] if table.prompted else lengths

    def flops(lengths, forward_only):
        return packed_lm.flops(*sizes[forward_only], int(lengths.sum()), targets,
                               int((lengths * (lengths + 1) // 2).sum()), use_lora, forward_only)
    work = flops(own, False) + (flops(lengths - own, True) if table.prompted else 0)
    return {"tokens": int(lengths.sum()), "targets": targets, "samples": len(window), "flops": work}


def console_line(step, total_steps, v):
    """One aligned line of at most 160 characters, with units; metrics.jsonl has all numbers."""
    mfu = f" | mfu {v['train/mfu'] * 100:4.1f}%" if "train/mfu" in v else ""
    parts = f"ce {v['train/ce_loss']:7.4f} kl {v['train/kl_loss']:7.4f} " if "train/kl_loss" in v else ""
    return (f"step {step:>6}/{total_steps} | loss {v['train/loss']:7.4f} {parts}"
            f"acc {v['train/accuracy'] * 100:5.1f}% | lr {v['train/learning_rate']:.2e} | "
            f"grad_norm {v['train/grad_norm']:7.3f} | {v['train/throughput']:>9,.0f} tok/s | "
            f"wait {v['train/data_wait_seconds']:4.1f} s{mfu} | "
            f"eta {metrics.duration((total_steps - step) * v['train/step_seconds'])}")


def print_start(args, world, model, lines):
    """What is about to run, before the first step. lines: more of it."""
    where = "CPU"
    if world.device.type == "cuda":
        where = torch.cuda.get_device_name(world.device)
    print(f"device     {world.size} x {where}, torch {torch.__version__}, {args.parallel}, "
          f"{'bf16' if args.bf16 else 'fp16' if args.fp16 else 'fp32'}\n"
          f"{metrics.model_text(model, model.lora)}", *packed_lm.mixture_text(model), *lines, sep="\n")


def note_ends(args, tokenizer, ends):
    """Say at which ids answers end although the base model's generation_config does not stop there."""
    if ends:
        names = ", ".join(tokenizer.convert_ids_to_tokens(ends))
        remedy = "pass it to generate with this adapter" if args.use_lora else "the saved one will"
        print(f"note       answers end with {names}, at which the base model's generation_config does not stop; "
              f"{remedy}")


# ---------------------------------------------------------------------------------------------------------------------
# Set-up


class Inputs(NamedTuple):
    """What a run starts from."""
    folder: Path            # of the base model
    tokenizer: object
    model: object           # of empty_model
    parts: dict
    table: object           # dataset.ChatTable
    ends: list              # ids that answers end with
    train_ids: object       # sample numbers of the table, int64
    eval_ids: object
    prompt: tuple           # teacher.Prompt or None
    kept: object            # ChatTable of --keep or None


def read_inputs(args, world):
    """Inputs of the run. Raises UserError; a dry run's names all mistakes."""
    dry, work_dir = args.dry_run is not None, run.work_folder(args)
    for flag in ("model_path", "teacher_path"):     # one downloads for all
        if name := getattr(args, flag):
            distributed.rank0_first(world, causal_lm.find_model, name, f"--{flag}")
    folder = causal_lm.find_model(args.model_path)
    config = causal_lm.load_config(folder)
    tokenizer = chat.load_tokenizer(folder, template=args.chat_template)
    causal_lm.check_vocabulary(tokenizer, config)
    encoder = chat.Encoder(tokenizer, args.train_turns, thinking=THINKING[args.enable_thinking])
    prompt = behind = None
    if args.teacher_path:
        from distill import teaching
        prompt, behind, config = teaching.open_side(args, config, tokenizer)
    limit = causal_lm.length_limit(config, args.max_length, args.max_tokens_per_batch)
    reading = Reading(encoder, limit, args.too_long, prompt, args.drop_bad,
                      args.preprocess_num_proc, behind)
    paths = [path for path in (args.train_data_file, args.eval_data_file) if path]

    def read_data():
        # rank 0 tokenises into a table on disk that all ranks map
        table, n_train, ends = prepare_table(world, work_dir, paths, reading,
                                             list_in=None if dry else args.output_dir)
        kept = None
        if args.keep:
            from distill import keep
            kept = keep.read(args, world, work_dir, reading)
        train_ids, eval_ids = split_samples(table, n_train, args.group_size, args.validation_split,
                                            args.seed)
        if args.teacher_path:
            teaching.check_lesson(args, table, train_ids)
        return table, ends, kept, train_ids, eval_ids

    *_, (model, parts), (table, ends, kept, train_ids, eval_ids) = collect(
        dry, lambda: run.check_folders(args),
        lambda: distributed.check_bf16(world.device, args.bf16),
        lambda: run.check_float8(args, world.device), lambda: empty_model(folder, args), read_data)
    return Inputs(folder, tokenizer, model, parts, table, ends, train_ids, eval_ids, prompt, kept)


def open_sampler(args, world):
    """What draws the answers of --on_policy instead of this process, or None."""
    if not args.base_url:
        return None
    from distill import on_policy
    return on_policy.open_sampler(world, args.base_url, args.output_dir, args.refresh_steps, args.request_timeout)


# ---------------------------------------------------------------------------------------------------------------------
# Main


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    run.main(args, train)


def train(args):
    # -- data, empty model -------------------------------------------------------------------------
    ranks, dry = run.ranks(args), args.dry_run is not None
    world, watch = run.start(args, cpu_too=args.cpu_offload or args.auto)
    device = world.device
    inputs = read_inputs(args, world)
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    model, parts, table = inputs.model, inputs.parts, inputs.table
    train_ids, eval_ids = inputs.train_ids, inputs.eval_ids
    if args.auto or dry:
        from distill import plan
    if args.auto and plan.choose(args, world, ranks, model, table.lengths[train_ids],
                                 table.targets[train_ids], inputs.kept):
        model, parts = empty_model(inputs.folder, args)
    # a checkpoint of a run with another identity is refused; only rank 0 reads the files for it
    identity = world.is_main and run_identity(args, inputs, table.fingerprint(train_ids))
    validation = table.fingerprint(eval_ids)        # losses on other data do not compare
    resume, meta = run.find_resume(args.output_dir, args.resume, identity, world)

    # -- order, number of steps: known to every rank, so all make the same number of collectives ---
    accumulation, at = args.gradient_accumulation_steps, run.position(meta)
    order = PackOrder(table.lengths[train_ids], tokens_per_pack=args.max_tokens_per_batch,
                      samples_per_pack=args.per_device_train_batch_size, seed=args.seed)
    packs_per_step = ranks * accumulation
    # static shapes, unless each sample stands there twice
    pad_to = 0 if args.teacher_path else args.max_tokens_per_batch
    steps_per_epoch, total_steps = run_length(
        order.packs_per_epoch, packs_per_step, args.num_train_epochs, args.max_steps, at)
    warmup = round(args.warmup_ratio * total_steps)
    often = run.intervals(args, total_steps, meta, len(eval_ids) > 0)
    if dry:
        if resume:
            packed_lm.check_resume(model, resume)
        about = f"peak lr {args.learning_rate:.2e}"
        lines = [run.steps_text(total_steps, steps_per_epoch, ranks, accumulation, about), often,
                 run.start_text(at["step"], resume)]
        plan.print_plan(args, ranks, model, table, (train_ids, eval_ids), order, lines,
                        total_steps - at["step"], inputs.kept)
        return print("dry run ok")
    held_out = distributed.rank0_first(world, write_held_out, args.output_dir, table, train_ids,
                                       eval_ids, inputs.prompt)

    # -- model, optimizer, resume ------------------------------------------------------------------
    watch.moved("loading the model", args.wait_timeout)
    if resume and not args.use_lora:
        # a full checkpoint replaces the base; adapters are loaded on top of it
        model, parts = empty_model(resume, args)
    wrapped = load_model(args, world, model, parts, resume, run.sharding(args, ranks))
    # generate stops where trained answers end
    new_ends = causal_lm.stop_at(model.native, inputs.ends)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.build_adamw(model.named_parameters(), args.learning_rate, args.weight_decay,
                                  (0.9, args.adam_beta2), packed_lm.decays)
    distributed.seed_everything(args.seed, world.rank)      # other dropout on every rank
    state = run.TrainState(world, watch, args, order, total_steps, (resume, meta),
                           run.Facts(model.sums, validation, table.name))
    state.restore(model, optimizer)
    epochs = sys.maxsize if args.max_steps else args.num_train_epochs
    packs = ([int(train_ids[i]) for i in pack] for pack in
             rank_packs(order, world.rank, world.size, accumulation, epochs, at["epoch"],
                        at["first"]))
    loader = make_loader(table, packs, num_workers=args.num_workers, pad_id=inputs.ends[0],
                         prefetch_factor=4, pad_to=pad_to)
    batches = loading.ahead(loader, device)
    sampler, keeper = open_sampler(args, world), None
    if args.keep:
        from distill.keep import Keeper
        keeper = Keeper(args, world, inputs.kept, wrapped)
    sizes = [(packed_lm.layer_weights(net), net.config) for net in
             (model.native, getattr(model.frozen.get("teacher"), "native", model.native))]
    if world.is_main:
        peak = f"peak lr {args.learning_rate:.2e}, warm-up {warmup}"
        print_start(args, world, model, [
            samples_line(table, train_ids, eval_ids),
            run.steps_text(total_steps, steps_per_epoch, ranks, accumulation, peak), often,
            run.start_text(state.step, resume)])
        note_ends(args, inputs.tokenizer, new_ends)

    # -- loop: validate and save what the steps so far have made, then take the next step ----------
    stopping, saving = False, False
    state.eval_due = state.eval_due and bool(len(eval_ids))     # one that a signal has broken off
    while True:
        with state.pause():         # throughput is about training steps
            better = False
            if state.eval_due and not stopping:
                watch.moved(f"validation at step {state.step}", args.wait_timeout)
                values = evaluate(args, world, model, table, eval_ids, state.writer.check)
                if values is None:      # asked to stop meanwhile: the next start validates first
                    stopping = True
                else:
                    state.eval_due = False
                    if world.is_main:
                        tqdm.write(f"eval   step {state.step:>6} | loss {values['eval/loss']:7.4f} "
                                   f"acc {values['eval/accuracy'] * 100:5.1f}%")
                        state.log.write(state.step, values)
                    better = state.better(values["eval/loss"])
            # the best one is kept whatever --save_steps says; no step is saved twice
            if (better or saving or stopping) and state.saved_step != state.step:
                meta = state.to_save(identity, held_out=held_out)
                save_checkpoint(world, state.writer, model, inputs.tokenizer, optimizer, meta)
        if state.step >= total_steps or stopping:
            break

        # samples of this step on all ranks, from the order that every rank knows: nobody has to ask
        # how many targets the loss is divided by
        window = train_ids[state.window()]
        work = step_work(table, window, sizes, args.use_lora)
        drawn = None
        if args.on_policy:
            from distill import on_policy
            # before the first loss: all are divided by the tokens of all answers of the step
            given = [state.next(batches) for _ in range(accumulation)]
            drawn, work["targets"] = on_policy.own_answers(args, world, model, table, given,
                                                          inputs.ends, state.step, sampler)

        # -- forward, loss, backward ---------------------------------------------------------------
        sums = torch.zeros_like(state.sums)
        for micro in range(accumulation):
            batch = drawn[micro] if drawn else state.next(batches)
            mine = list(batch.samples)
            # else the loss would be divided by another count than the other ranks'
            assert drawn or batch.counts["targets"] == table.targets[mine].sum(), "not the plan's"
            assert pad_to in (0, len(batch.input_ids)), "the pack is not filled to its budget"
            # one pass, whose gradients ranks sum in the last micro-step; more by --replay_every
            for summed in state.passes(wrapped, trainable, micro):
                with distributed.gradient_sync(wrapped, summed):
                    with run.autocast(args, device):
                        found = wrapped(batch)          # Sums over this batch's targets, not means
                    # DDP and FSDP2 average gradients over ranks: world.size makes a sum of the
                    # average; the loss is a mean over the targets of all ranks and micro-steps
                    (found.loss * (world.size / work["targets"] * state.scale)).backward()
                # without a host sync: a loss that is not finite is named when the flags of this
                # step have arrived
                state.note_loss(found.loss, mine)
            sums += found.stacked()

        more = keeper.learn(state.step, state.scale) if keeper else {}

        # -- step: clipped, skipped on every rank where the gradient is not finite -----------------
        factor = optim.lr_factor(state.step, total_steps, warmup, args.lr_scheduler,
                                 args.min_lr_ratio)
        state.update(optimizer, trainable, args.learning_rate * factor, sums)
        # what comes now is the same on every rank; a request to stop counts one step late, so no
        # step waits
        state.eval_due = bool(len(eval_ids) and state.due(args.eval_steps))
        saving = state.save_due()
        stopping = state.stop_asked(state.eval_due or saving) and (state.eval_due or not state.last)

        # -- log -----------------------------------------------------------------------------------
        if more and world.is_main:
            state.log.write(state.step, more)
        empty = max(0, state.at["first"] - order.packs_per_epoch)   # packs of one token of padding
        state.count(packs_per_step * pad_to or work["tokens"] + empty, work)
        if state.due(args.logging_steps):
            # the only sums over ranks that logging needs: every rank calls it, rank 0 writes
            total = Sums(*distributed.all_sum(world, state.sums).tolist())
            if world.is_main:
                state.log_step(packed_lm.loss_report(total, "train"),
                               lambda values: console_line(state.step, total_steps, values))
            state.sums.zero_()
            state.begin_line()
    state.finish(stopping)


if __name__ == "__main__":
    main()
