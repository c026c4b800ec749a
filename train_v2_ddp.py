"""Fine-tune Higgs-Audio V2 or Higgs TTS 3 (text to speech), LoRA or full: one process, DDP, FSDP2.

    torchrun --nproc_per_node=8 train_v2_ddp.py --model_path bosonai/higgs-audio-v2-generation-3B-base \
        --audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer --train_data_file train.json --output_dir ./out \
        --per_device_train_batch_size 2 --learning_rate 5e-5 --bf16 --use_lora
    bash launch/demo.sh     # the same in small; needs no GPU and no model of yours

Loss: cross-entropy of the next row of codes, averaged over every trained code of the whole
optimizer step (all ranks, all micro-steps, all 8 codebooks), plus --text_loss_weight times the same
average over text targets. The counts come from the plan that all ranks share, so no rank has to ask
another.

SIGTERM or SIGUSR1: the step is finished, a checkpoint saved, OUTPUT_DIR/requeue left for the
launcher; exit status 0.
"""
import os
import sys

from common import flags
from common.flags import need
from common.text import counted
from core import run_lock
from speech import choices
from speech.choices import CHECKS, LORA_TARGETS

# --------------------------------------------------------------------------------------------------
# Flags


def build_parser():
    p = flags.Parser("Fine-tune Higgs-Audio V2 or Higgs TTS 3.",
                     usual="audio_tokenizer_path train_data_dir disable_eval sample_prompts")
    flags.before_the_run(p)
    g = p.add_argument_group("model")
    g.add_argument("--model_path", required=True,
                   help="folder or hub name: Higgs-Audio V2 (native or 2025 format) or Higgs TTS 3")
    choices.codec(g)
    flags.lora(g, rank=16, alpha=32, dropout=0.0, targets=None,
               targets_help=f"{', '.join(LORA_TARGETS)}, or comma-separated module name endings (default: attention; "
                            "Higgs TTS 3: all-linear)")
    flags.switch(g, "--train_audio_table", help="beside the adapters, the audio embedding of Higgs TTS 3, which is its "
                                                "head as well")
    flags.switch(g, "--freeze_llm", help="full fine-tuning of the audio embedding and head only")

    g = p.add_argument_group("data")
    choices.data(g)
    g.add_argument("--validation_split", type=float, help="share of samples held out, by seeded shuffle "
                   "(default: 0.005, but of few samples 5 %%, up to 16)")
    g.add_argument("--code_cache", help="folder of encoded audio, shareable between runs (default: OUTPUT_DIR/codes)")
    g.add_argument("--preprocess_num_proc", type=int, default=min(8, flags.usable_cpus()),
                   help="processes that read and tokenise, or decode audio, per node; 0 = in the trainer")
    g.add_argument("--max_length", type=int, default=0, help="tokens a sample may have, 0 = the model's positions")
    flags.bad_samples(g, CHECKS)
    flags.loading(g, num_workers=2)

    g = p.add_argument_group("batch and length of the run")
    g.add_argument("--per_device_train_batch_size", type=int, default=4, help="samples per micro-step and rank")
    g.add_argument("--max_tokens_per_batch", type=int, default=0,
                   help="pack whole samples up to this many tokens instead, static shape; 0 = off")
    g.add_argument("--per_device_eval_batch_size", type=int, default=1, help="samples per validation batch")
    g.add_argument("--gradient_accumulation_steps", type=int, default=1, help="micro-steps per optimizer step")
    g.add_argument("--global_batch_size", type=int, default=0, help="samples per optimizer step; derives accumulation")
    flags.switch(g, "--group_by_length", help="put samples of similar length side by side")
    g.add_argument("--num_train_epochs", type=int, default=3, help="passes over the training samples")
    g.add_argument("--max_steps", type=int, default=0, help="stop after this many optimizer steps, 0 = by epochs")

    g = flags.optimisation(p, learning_rate=5e-5, learning_rate_help="peak learning rate", lr_scheduler="cosine",
                           min_lr_ratio=0.0, weight_decay=0.01, adam_beta2=0.999)
    g.add_argument("--warmup_steps", type=int,
                   help="optimizer steps of linear warm-up (default: 5 %% of the run, at most 100)")
    g.add_argument("--scale_lr_from_batch", type=int, default=0, metavar="N",
                   help="multiply the rate by sqrt(samples per optimizer step / N), 0 = off")
    g.add_argument("--audio_loss_reduction", choices=("mean", "sum"), default="mean",
                   help="over the codebooks: mean, or sum as transformers does (8 times larger)")
    g.add_argument("--text_loss_weight", type=float, default=1.0, help="weight of the text loss, 0 = audio only")
    choices.keep(g)

    g = flags.speed(p, parallel="ddp", bf16_help="bfloat16 compute; a frozen base is stored in bfloat16")
    flags.sharding(g)

    g = flags.logging(p, logging_steps=10, save_total_limit=3)
    flags.switch(g, "--enable_strategic_logging", help="now and then print one sample as trained")
    g.add_argument("--strategic_logging_steps", type=int, default=100, help="optimizer steps between printed samples")
    flags.switch(g, "--disable_eval", help="no validation, no hold-out")
    g.add_argument("--sample_prompts", metavar="FILE",
                   help="prompts spoken at every validation: one text a line, or ChatML .json/.jsonl")
    g.add_argument("--sample_seconds", type=float, default=10.0, help="seconds of speech a sample prompt may give")
    g.add_argument("--sample_time_limit", type=float, default=120.0,
                   help="seconds that generating all of them may take at one validation")
    choices.judges(p.add_argument_group("what judges the sample prompts, on rank 0"))
    choices.best(p.add_argument_group("which checkpoint is the best"))
    return flags.accept_old(p)


def check_flags(args, world_size):
    """Raise UserError for flags that would fail, or do nothing, later; fill in what derives."""
    flags.check_shared(args)
    flags.check_bad_samples(args, CHECKS)
    if args.dry_run is None:        # long before the imports are done
        run_lock.check_free(args.output_dir)
    flags.check_parallel(args, world_size)
    flags.check_sharding(args)
    choices.check_data(args)
    for path, _ in choices.sources(args)[0] if args.code_cache else ():
        need(not os.path.exists(os.path.join(path, "prepared.json")),
             f"--code_cache: {path} has its codes already; drop the flag")
    need(not (args.disable_eval and (args.eval_data_file or args.eval_data_dir)),
         "--disable_eval and validation data exclude each other")
    flags.at_least_one(args, "gradient_accumulation_steps", "strategic_logging_steps")
    flags.zero_or_more(args, "text_loss_weight")
    for flag, usual in {"sample_seconds": 10, "sample_time_limit": 120}.items():
        flags.above_zero(args, flag)
        need(args.sample_prompts or getattr(args, flag) == usual,
             f"--{flag} needs --sample_prompts")
    choices.check_judges(args, bool(args.sample_prompts))
    choices.check_keep(args)
    choices.check_best(args)
    need(not args.sample_prompts or args.sample_time_limit < args.wait_timeout,
         f"--sample_time_limit {args.sample_time_limit:g} must be below --wait_timeout {args.wait_timeout}")
    flags.check_lora(args, build_parser())
    flags.check_loading(args, build_parser())
    need(args.use_lora or not args.train_audio_table, "--train_audio_table needs --use_lora; without it all is trained")
    need(not (args.use_lora and args.freeze_llm), "--use_lora freezes the whole base already: drop --freeze_llm")
    if not flags.counts_samples(args):
        need(not args.group_by_length, "--group_by_length does nothing with packs of tokens: they are equal")
        need(args.auto or not args.global_batch_size, "--global_batch_size counts samples: with packs of tokens it "
             "needs --auto")
        need(not args.global_batch_size or "gradient_accumulation_steps" not in flags.named(args),
             "give one of --global_batch_size and --gradient_accumulation_steps")
        need(not args.scale_lr_from_batch, "--scale_lr_from_batch counts samples: not with packs of tokens")
    if args.global_batch_size and flags.counts_samples(args):
        per_micro_step = args.per_device_train_batch_size * world_size
        need(args.gradient_accumulation_steps == 1, "give one of --global_batch_size and --gradient_accumulation_steps")
        need(args.global_batch_size % per_micro_step == 0,
             f"--global_batch_size {args.global_batch_size} is not a multiple of {per_micro_step} "
             f"(--per_device_train_batch_size {args.per_device_train_batch_size} x {counted(world_size, 'rank')})")
        args.gradient_accumulation_steps = args.global_batch_size // per_micro_step


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import math
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import lora  # first: it explains a torchaudio that breaks every transformers import
from common import checkpoint, distributed, run, tensor_files
from common.distributed import UserError
from common.problems import collect
from core import adapters, loading, metrics, optim
from core.json_files import read_object
from core.packing import PackOrder, rank_packs, run_length
from core.watchdog import stop_requested
from data import collate, make_loader, prepare_table
from speech.data import text_normalization
from speech.data.code_cache import FRAME_RATE
from speech.data.dataset import Encoding, data_facts, samples_line, split_samples, usable_samples
from speech.data.rows import Reading, Sources
from speech.model import versions, weights
from speech.model.loss import Sums, decays, flops_per_pack, total_loss

# what --freeze_llm trains
AUDIO_WEIGHTS = ("embed_audio_tokens", "audio_lm_head", "audio_embedding")

# ------------------------------------------------------------------------------------------------
# Model: empty, loaded, saved. module: of versions.module, speech/model/v2.py or v3.py


def empty_trained_model(module, folder, config, args):
    """(module.packed on the meta device, {weight name: handles of that weight in the files}).

    folder, config: of the model to train, and its config.json dict. With --use_lora the native
    model inside has the adapters. Only weights that are trained require gradients. Raises UserError
    when the folder does not hold exactly the model's weights, or nothing is left to train.
    """
    dtype = args.use_lora and run.half(args) or torch.float32
    native = net = module.empty_model(config, dtype, folder)
    parts = module.weight_parts(folder, config)
    weights.check_weights(native, parts, folder)
    if args.use_lora:
        net = lora.add_lora(native, args.lora_rank, args.lora_alpha, args.lora_dropout,
                            args.lora_target_modules, args.model_path, args.train_audio_table,
                            use_rslora=args.use_rslora, use_dora=args.use_dora)
    elif args.freeze_llm:
        for name, parameter in native.named_parameters():
            parameter.requires_grad_(any(part in name for part in AUDIO_WEIGHTS))
    module.freeze_unreachable(native, args.text_loss_weight)
    if args.base_dtype == "nf4":
        from core import nf4
        nf4.convert(module.layers(native))
    model = module.packed(net, args.gradient_checkpointing)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("these flags leave no weight to train")
    return model, parts


def load_model(module, world, model, parts, resume, args):
    """Load empty_trained_model's model on this rank's device -> what to call: it, or DDP around it.
    resume: checkpoint folder, or None: then adapters are drawn by the seed.
    """
    native, net, sharding = model.base_model, model.net, run.sharding(args, world.size)
    if args.compile:
        distributed.compile_layers(module.layers(native))
    if sharding:
        distributed.shard(model, module.layers(native), world, **sharding)
    on_host = sharding and sharding["cpu_offload"]
    # from here on there is memory, still unset
    model.to_empty(device="cpu" if on_host else world.device)
    module.reset_buffers(native, world.device)
    base = adapters.base_weights(net) if args.use_lora else dict(native.named_parameters())
    if args.base_dtype == "nf4":
        from core import nf4
        nf4.load_weights(native, weights.load_weights, base, parts, world)
    else:
        weights.load_weights(base, parts, world)
    if args.use_lora and resume:
        adapters.load_adapters(net, resume)
    elif args.use_lora:
        adapters.init_adapters(net, args.seed)
    if args.float8:
        from core import float8
        float8.convert(module.layers(native))
    model.train()
    return model if sharding else distributed.wrap_ddp(model, world)


def check_resume(module, model, resume):
    """Raise UserError when a checkpoint does not fit this (empty) model. resume: folder or None."""
    if not resume:
        return
    if model.has_adapters:
        adapters.load_adapters(model.net, resume)       # onto the meta device nothing is copied
    else:
        config = read_object(Path(resume) / "config.json")
        weights.check_weights(model.base_model, module.weight_parts(resume, config), resume)


def run_identity(folder, table, train, args):
    """What a checkpoint must share with the run that resumes it, {name: value}; JSON-able.

    folder: the base model's. train: numbers of the samples trained.
    """
    trained = "full"
    if args.use_lora:
        trained = "lora and audio table" if args.train_audio_table else "lora"
        trained += " on nf4" * (args.base_dtype == "nf4")
    elif args.freeze_llm:
        trained = "audio embedding and head"
    samples, tokens = args.per_device_train_batch_size, args.max_tokens_per_batch
    batch = f"{tokens} tokens" if tokens else f"{samples} samples"
    # in this order they are compared: another base, text or seed makes other training data as well
    return {"base model": tensor_files.fingerprint_weights(folder),
            "codec": Path(table.reader.folder).name,
            "set of trained weights": trained + ("" if args.text_loss_weight else " without text"),
            "--normalize_text": args.normalize_text, "seed": args.seed,
            "training data": table.fingerprint(train),
            "pack": f"{batch} by length, in blocks" if args.group_by_length else batch}


def save_checkpoint(module, world, writer, model, tokenizer, source, optimizer, meta):
    """Copy all of checkpoint-<meta["step"]> off the device and start writing it. On every rank.

    source: folder of the base model, whose processor files a full checkpoint takes over.
    """
    writer.begin(meta["step"])
    distributed.reshard(model)
    states = distributed.gather_on_main(world, checkpoint.rng_state(world.device))
    if model.has_adapters:
        named = adapters.adapter_weights(model.net)
        files = tensor_files.stage(world, "adapter_model", named, spread=False)
    else:
        files = tensor_files.stage(world, "model", module.weight_names(model.base_model))
    moments = optim.state_tensors(optimizer, model.named_parameters())
    files |= tensor_files.stage(world, f"{checkpoint.STATE_DIR}/optimizer", moments)

    def save_config(path):
        if model.has_adapters:
            return adapters.save_config(model.net, path)
        return module.save_config(model.base_model, tokenizer, path, source)

    if world.is_main:
        setting = meta["args"]["normalize_text"]
        files[f"{checkpoint.STATE_DIR}/rng.pt"] = checkpoint.pickled(states)
        files[text_normalization.FILE] = lambda path: text_normalization.save_setting(path, setting)
        files["*"] = save_config
    writer.save(meta["step"], files, meta)


# ------------------------------------------------------------------------------------------------
# Validation


@torch.no_grad()
def evaluate(module, world, model, table, ids, held_out, writer, args):
    """Exact target-weighted validation losses {eval/...: float}; each rank takes a share.

    Now and then calls writer.check(), which may raise, and looks for a request to stop: then it
    returns None, on all ranks.
    """
    order = PackOrder(table.lengths[held_out], samples_per_pack=args.per_device_eval_batch_size,
                      shuffle=False)
    mine = rank_packs(order, world.rank, world.size, 1, epochs=1)
    packs = [[int(held_out[i]) for i in pack] for pack in mine]
    loader = make_loader(table, ids, packs, num_workers=min(1, args.num_workers), prefetch_factor=2)
    sums = torch.zeros(Sums.size(ids.num_codebooks), dtype=torch.float64, device=world.device)
    model.eval()
    for i, batch in enumerate(loading.each(loader)):
        if i % 16 == 0:     # often enough for a prompt stop, seldom enough to cost nothing
            writer.check()
            if distributed.largest(world, bool(stop_requested())).item():
                model.train()
                return None
        with run.autocast(args, world.device):
            losses = model(batch.to(world.device))
        sums += sums_of(losses, batch).flat()
    model.train()
    sums = distributed.all_sum(world, sums).tolist()
    return module.loss_report(sums, args.audio_loss_reduction, args.text_loss_weight, "eval")


def sums_of(losses, batch):
    """Sums of a batch. losses: what the packed model returned for it."""
    return Sums(*losses, batch.counts["audio_targets"], batch.counts["text_targets"])


def load_prompts(args, tokenizer, ids, config, codec_dir, world):
    """(sample_prompts.Speaker or None, keep.Keeper or None) of the flags. Raises UserError."""
    speaker, keeper = None, None
    if args.sample_prompts:
        from speech.voice import sample_prompts
        speaker = sample_prompts.load(args, tokenizer, ids, config, codec_dir, world)
    if args.keep:
        from speech.voice import keep
        keeper = keep.load(args, tokenizer, ids, config, codec_dir, world)
    return speaker, keeper


# ------------------------------------------------------------------------------------------------
# Reports


def console_line(step, total_steps, v):
    """One aligned line of at most 160 characters, with units; metrics.jsonl has all numbers."""
    mfu = f" | mfu {v['train/mfu'] * 100:4.1f}%" if "train/mfu" in v else ""
    left = metrics.duration((total_steps - step) * v["train/step_seconds"])
    return (f"step {step:>6}/{total_steps} | loss {v['train/loss']:7.4f} | "
            f"audio {v['train/audio_loss']:6.3f} text {v['train/text_loss']:6.3f} | "
            f"stop {v['train/stop_recall'] * 100:5.1f}% | lr {v['train/learning_rate']:.2e} | "
            f"grad_norm {v['train/grad_norm']:7.3f} | "
            f"{v['train/audio_seconds_per_second']:>7,.1f} audio-s/s{mfu} | eta {left}")


def eval_line(step, v):
    """One aligned line of a validation, with units."""
    return (f"eval   step {step:>6} | loss {v['eval/loss']:7.4f} | "
            f"audio {v['eval/audio_loss']:6.3f} | text {v['eval/text_loss']:6.3f} | "
            f"eos {v['eval/eos_loss']:6.3f} stop {v['eval/stop_recall'] * 100:5.1f}%")


def step_work(config, table, window, use_lora):
    """Totals over the samples of one optimizer step, all ranks, from the plan; python numbers."""
    lengths = table.lengths[window].astype(np.int64)
    n_audio, n_text = int(table.audio_targets[window].sum()), int(table.text_targets[window].sum())
    pairs = int((lengths * (lengths + 1) // 2).sum())
    flops = flops_per_pack(config, int(lengths.sum()), n_audio, n_text, pairs, use_lora)
    return {"audio_targets": n_audio, "text_targets": n_text, "tokens": int(lengths.sum()),
            "samples": len(window), "frames": int(table.frames[window].sum()), "flops": flops}


def print_start(world, model, table, train_ids, eval_ids, args, *more):
    """What is about to run, before the first step."""
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    precision = "bf16 autocast" if args.bf16 else "fp16 autocast" if args.fp16 else "fp32"
    print(f"device     {world.size} x {where}, torch {torch.__version__}, {precision}\n"
          f"{metrics.model_text(model, model.has_adapters)}\n"
          f"{samples_line(table, train_ids, eval_ids)}", *more, sep="\n")


def print_sample(table, tokenizer, batch):
    """--enable_strategic_logging: show the first sample of a batch the way the model sees it."""
    if not batch.samples:
        return
    places = batch.text_pos[batch.text_pos < batch.seqlens[0]]
    text = tokenizer.decode(batch.input_ids[places].cpu())
    n_audio, n_text = batch.counts["audio_targets"], batch.counts["text_targets"]
    tqdm.write(f"sample     {table.name(batch.samples[0])}: {batch.seqlens[0]} tokens; "
               f"batch trains {n_audio} codes and {n_text} text tokens; text {text!r}")


# ------------------------------------------------------------------------------------------------
# Data


def read_data(args, tokenizer, ids, codec_dir, work_dir, world):
    """The Table of the user's files, made in work_dir. A dry run encodes nothing."""
    sources = Sources(*choices.sources(args), Reading(
                      **choices.reading(args), lone_reference=ids.lone_reference),
                      args.preprocess_num_proc, args.drop_bad)
    encoding = Encoding(codec_dir, args.code_cache or Path(args.output_dir) / "codes",
                        ids.num_codebooks, args.preprocess_num_proc, args.wait_timeout)
    return prepare_table(world, tokenizer, ids, sources, encoding, work_dir,
                         dry=args.dry_run is not None)


# ------------------------------------------------------------------------------------------------
# Main


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    run.main(args, train)


def train(args):
    # -- ranks, data, empty model --------------------------------------------------------------
    ranks, dry, work_dir = run.ranks(args), args.dry_run is not None, run.work_folder(args)
    world, watch = run.start(args, cpu_too=args.cpu_offload or args.auto)
    device, main_rank = world.device, world.is_main
    folder, config_dict, codec_dir = versions.find_files(
        world, args.model_path, args.audio_tokenizer_path, work_dir)
    module = versions.module(config_dict)
    args.normalize_text = module.text_setting(args.normalize_text or "")
    if args.use_lora:
        args.lora_target_modules = args.lora_target_modules or module.LORA_TARGETS
    config, tokenizer = module.read_config(config_dict), module.load_tokenizer(folder)
    ids = module.token_ids(tokenizer, config)
    # a run ends at the first mistake, a dry run names them all
    *_, (model, parts), table, (speaker, keeper) = collect(
        dry, lambda: run.check_folders(args), lambda: distributed.check_bf16(device, args.bf16),
        lambda: run.check_float8(args, device),
        lambda: empty_trained_model(module, folder, config_dict, args),
        lambda: read_data(args, tokenizer, ids, codec_dir, work_dir, world),
        lambda: load_prompts(args, tokenizer, ids, config, codec_dir, world))
    held_out = 0 if args.disable_eval else args.validation_split
    all_train, all_eval = split_samples(table, held_out, args.seed)
    train_ids, eval_ids = usable_samples(
        table, all_train, all_eval, max_length=args.max_length or config.max_position_embeddings,
        max_tokens=args.max_tokens_per_batch, drop="too_long" in args.drop_bad, say=main_rank,
        output_dir=args.output_dir if main_rank and not dry else None)
    if args.tf32:       # only now: codes in the cache must not depend on it
        torch.set_float32_matmul_precision("high")
    if args.auto or dry:
        from speech import plan
        speakers = [one for one in (speaker, keeper) if one]
        data = plan.Data(table, ids, train_ids, eval_ids, speakers, keeper)
    if args.auto and plan.choose(args, world, ranks, model, data):
        model, parts = empty_trained_model(module, folder, config_dict, args)
    identity = run_identity(folder, table, train_ids, args) if main_rank else None
    if main_rank:
        identity["--keep"] = keeper.known_by(identity["base model"]) if keeper else None     # both ways
    validation = [table.fingerprint(eval_ids), args.audio_loss_reduction, args.text_loss_weight]
    if args.best_by != "loss":
        validation += [args.best_by, speaker.fingerprint()]
    resume, meta = run.find_resume(args.output_dir, args.resume, identity, world)
    if meta:        # the best of an older checkpoint still counts
        from common.resume import same_data
        if same_data(meta["validation"][0], validation[0]):
            validation[0] = meta["validation"][0]

    # -- order, number of steps: every rank knows them without asking; so all agree ---------------
    accumulation, at = args.gradient_accumulation_steps, run.position(meta)
    order = PackOrder(table.lengths[train_ids], tokens_per_pack=args.max_tokens_per_batch,
                      samples_per_pack=args.per_device_train_batch_size, seed=args.seed,
                      group_by_length=args.group_by_length)
    per_step = ranks * accumulation
    steps_per_epoch, total_steps = run_length(
        order.packs_per_epoch, per_step, args.num_train_epochs, args.max_steps, at)
    validates = bool(len(eval_ids) or speaker)
    need(len(eval_ids) or not args.early_stop_patience or args.best_by != "loss",
         "--early_stop_patience needs held-out samples: raise --validation_split or give --best_by")
    often = run.intervals(args, total_steps, meta, validates)
    peak_lr = args.learning_rate
    if args.scale_lr_from_batch:
        samples = per_step * args.per_device_train_batch_size
        peak_lr = optim.sqrt_lr(args.learning_rate, samples, args.scale_lr_from_batch)

    if dry:
        check_resume(module, model, resume)
        share = args.warmup_steps / max(1, total_steps)
        about = f"warm-up {args.warmup_steps} steps, {share * 100:.0f}% of the run"
        lines = [run.steps_text(total_steps, steps_per_epoch, ranks, accumulation, about), often,
                 run.start_text(at["step"], resume)]
        if not args.float8:     # faster than the rates that the bound is of
            frozen = args.use_lora or args.freeze_llm
            epoch = step_work(config, table, train_ids, frozen)["flops"]
            left = (total_steps - at["step"]) / steps_per_epoch
            lines.insert(2, plan.time_text(epoch * left / ranks, frozen))
        plan.print_plan(args, ranks, model, data, order, lines, total_steps - at["step"],
                        args.code_cache or Path(args.output_dir) / "codes")
        return print("dry run ok")

    # -- model, optimizer, resume ----------------------------------------------------------------
    watch.moved("loading the model", args.wait_timeout)
    if resume and not args.use_lora:
        # a full checkpoint replaces the base; adapters are loaded on top of it
        config_dict = read_object(Path(resume) / "config.json")
        model, parts = empty_trained_model(module, resume, config_dict, args)
    wrapped = load_model(module, world, model, parts, resume, args)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.build_adamw(model.named_parameters(), peak_lr, args.weight_decay,
                                  (0.9, args.adam_beta2), decays)
    if keeper:
        watch.moved("the base speaks --keep", args.wait_timeout)
        often += "\n" + keeper.speak(world, model)
    distributed.seed_everything(args.seed, world.rank)     # other dropout on every rank
    size = Sums.size(ids.num_codebooks)
    facts = run.Facts(size + 2 * bool(keeper), validation, table.name)
    state = run.TrainState(world, watch, args, order, total_steps, (resume, meta), facts)
    state.restore(model, optimizer)
    epochs = sys.maxsize if args.max_steps else args.num_train_epochs
    packs = ([int(train_ids[i]) for i in pack] for pack in rank_packs(
        order, world.rank, world.size, accumulation, epochs, at["epoch"], at["first"]))
    loader = make_loader(table, ids, packs, num_workers=args.num_workers, prefetch_factor=4,
                         pad_to=args.max_tokens_per_batch)
    batches = loading.ahead(loader, device)
    if main_rank:
        if (Path(args.output_dir) / "samples").is_dir():
            # speech of steps that this run will take once more
            from speech.voice import sample_prompts
            sample_prompts.forget_later(args.output_dir, state.step)
        about = f"peak lr {peak_lr:.2e}, warm-up {args.warmup_steps}"
        print_start(world, model, table, train_ids, eval_ids, args,
                    run.steps_text(total_steps, steps_per_epoch, ranks, accumulation, about),
                    often, run.start_text(state.step, resume))

    # -- loop: validation and checkpoint of the steps so far, then the next step -----------------
    stopping, saving = False, False
    compared = args.best_by != "loss" or args.early_stop_patience > 0
    # of a validation that a signal broke off; and what the base does, to compare with
    state.eval_due = bool((state.eval_due or compared and state.step == 0) and validates)
    stale = meta.get("stale", 0) if meta and meta["validation"] == validation else 0
    while True:
        # -- validate ----------------------------------------------------------------------------
        with state.pause():     # not training time
            better = False
            if state.eval_due and not stopping:
                values = {}
                if len(eval_ids):
                    watch.moved(f"validation at step {state.step}", args.wait_timeout)
                    values = evaluate(module, world, model, table, ids, eval_ids, state.writer,
                                      args)
                if values is None:
                    # asked to stop meanwhile: the next start validates first
                    stopping = True
                else:
                    state.eval_due = False
                    if values and main_rank:
                        tqdm.write(eval_line(state.step, values))
                    if speaker:
                        watch.moved(f"sample prompts at step {state.step}", args.wait_timeout)
                        values |= speaker.speak(world, model, state, args)
                    if values and main_rank:
                        state.log.write(state.step, values)
                    if compared:
                        from speech.voice import best
                        better, stale = best.judge(state, values, args.best_by, stale)
                    else:
                        better = state.better(values.get("eval/loss", math.nan))
            enough = bool(args.early_stop_patience) and stale >= args.early_stop_patience

            # -- save: every so often, before a stop, and whenever validation is best ------------
            if (better or saving or stopping or enough) and state.saved_step != state.step:
                about = state.to_save(identity, data=data_facts(table, train_ids), stale=stale)
                # copied off the device here, written behind the next steps
                save_checkpoint(module, world, state.writer, model, tokenizer, folder, optimizer,
                                about)
        if state.step >= total_steps or stopping or enough:
            break

        # every rank knows the samples of this step on all ranks, from the order alone: so it can
        # divide its loss by their global number of targets, and N ranks train as one does
        window = train_ids[state.window()]
        work = step_work(config, table, window, args.use_lora)
        n_audio, n_text = work["audio_targets"], work["text_targets"]
        sums = torch.zeros_like(state.sums)     # stays on the device; nothing here waits for it

        # -- forward, loss, backward: once for each micro-step -----------------------------------
        for micro in range(accumulation):
            batch = state.next(batches)
            mine = list(batch.samples)
            # a batch that differs from the plan would divide by another count than the other ranks'
            planned = table.audio_targets[mine].sum()
            assert batch.counts["audio_targets"] == planned, "loader and plan disagree"
            # full packs have one shape, so compiled layers and the allocator see no other
            filled = args.max_tokens_per_batch in (0, len(batch.input_ids))
            assert filled, "the pack is not filled to its budget"
            shown = micro == state.step % args.strategic_logging_steps == 0
            if args.enable_strategic_logging and main_rank and shown:
                print_sample(table, tokenizer, batch)
            if keeper:      # before that pass, which sums these gradients over the ranks as well
                sums[size:] += keeper.hold(wrapped, collate, world, state, micro)
            # one pass, whose gradients ranks sum in the last micro-step; more by --replay_every
            for summed in state.passes(wrapped, trainable, micro):
                with distributed.gradient_sync(wrapped, summed):
                    with run.autocast(args, device):
                        # sums over this batch's targets, not means: any split adds up to the same
                        losses = audio, text, ends = wrapped(batch)
                    loss = total_loss(audio, n_audio, text, n_text, args.audio_loss_reduction,
                                      args.text_loss_weight)
                    # DDP and FSDP2 average gradients over ranks, the loss is a mean over them all
                    (loss * (world.size * state.scale)).backward()
                # whether it is finite is asked a step later; then these samples can be named
                state.note_loss(loss, mine)
            sums[:size] += sums_of(losses, batch).flat()

        # -- step: clipped; skipped on all ranks alike where a gradient is not finite ------------
        factor = optim.lr_factor(state.step, total_steps, args.warmup_steps, args.lr_scheduler,
                                 args.min_lr_ratio)
        state.update(optimizer, trainable, peak_lr * factor, sums)

        # the same on every rank, so that all take part in what follows
        state.eval_due = bool(validates and state.due(args.eval_steps))
        saving = state.save_due()
        # a request to stop counts one step late, so that no step waits for the device
        stopping = state.stop_asked(state.eval_due or saving)
        stopping = stopping and (state.eval_due or not state.last)

        # -- log ---------------------------------------------------------------------------------
        # an epoch whose packs do not fill the last step ends with packs of one token of padding
        empty = max(0, state.at["first"] - order.packs_per_epoch)
        state.count(per_step * args.max_tokens_per_batch or work["tokens"] + empty, work)
        if state.due(args.logging_steps):
            # a collective: on every rank, though rank 0 alone prints
            sums = distributed.all_sum(world, state.sums).tolist()
            values = module.loss_report(sums[:size], args.audio_loss_reduction,
                                        args.text_loss_weight, "train")
            if keeper and sums[-1]:
                values["train/keep_kl"] = sums[-2] / sums[-1]
            if main_rank:
                state.log_step(values, lambda v: console_line(state.step, total_steps, v),
                               audio_seconds_per_second=state.sums_since["frames"] / FRAME_RATE)
            state.sums.zero_()
            state.begin_line()
    if not compared:
        return state.finish(stopping)
    from speech.voice import best
    early = f" (nothing better in {stale} validations)" if state.step < total_steps else ""
    state.finish(stopping, early, best.done(state, args.best_by),
                 lambda rows: [best.clause(rows, args.best_by, state.best_step)])


if __name__ == "__main__":
    main()
