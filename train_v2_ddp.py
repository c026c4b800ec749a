"""Fine-tune Higgs-Audio V2 or Higgs TTS 3 (text to speech): LoRA or full, on one process or under DDP or FSDP2.

    torchrun --nproc_per_node=8 train_v2_ddp.py --model_path bosonai/higgs-audio-v2-generation-3B-base \
        --audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer --train_data_file train.json --output_dir ./out \
        --per_device_train_batch_size 2 --learning_rate 5e-5 --bf16 --use_lora
    python train_v2_ddp.py --model_path tiny/model --audio_tokenizer_path tiny/codec --train_data_file tiny/train.json
    bash launch/demo.sh     # makes a tiny model and speech first; needs no GPU and no download

Loss: cross-entropy of the next row of codes, averaged over every trained code of the whole optimizer step (all ranks,
all micro-steps, all 8 codebooks), plus --text_loss_weight times the same average over text targets. The counts come
from the plan that all ranks share, so no rank has to ask another.

SIGTERM or SIGUSR1: the step is finished, a checkpoint saved, OUTPUT_DIR/requeue left for the launcher; exit status 0.
"""
import os
import sys

from common import flags, run_lock
from common.flags import need
from speech import data_flags
from speech.choices import CHECKS, LORA_TARGETS, check_judges, judges

# ---------------------------------------------------------------------------------------------------------------------
# Flags


def build_parser():
    p = flags.Parser("Fine-tune Higgs-Audio V2.")
    flags.before_the_run(p)
    g = p.add_argument_group("model")
    g.add_argument("--model_path", "--model_name_or_path", required=True,
                   help="folder or hub name: Higgs-Audio V2 (native or 2025 format) or Higgs TTS 3")
    g.add_argument("--audio_tokenizer_path", help="native audio tokenizer, folder or hub name (default: the codec "
                   "inside a Higgs TTS 3 checkpoint)")
    flags.lora(g, rank=16, alpha=32, dropout=0.0, targets=None,
               targets_help=f"{', '.join(LORA_TARGETS)}, or comma-separated module name endings (default: attention; "
                            "Higgs TTS 3: all-linear)")
    flags.switch(g, "--train_audio_table", help="beside the adapters, the audio embedding of Higgs TTS 3, which is its "
                                                "head as well")
    flags.switch(g, "--freeze_llm", help="full fine-tuning of the audio embedding and head only")
    flags.switch(g, "--freeze_audio_tower", help="accepted for old launch lines: there is no tower")
    flags.switch(g, "--freeze_audio_encoder_proj", help="accepted for old launch lines, as above")

    g = p.add_argument_group("data")
    data_flags.add(g)
    g.add_argument("--validation_split", type=float, default=0.005, help="share of samples held out, by seeded shuffle")
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

    g = flags.speed(p, parallel="ddp", bf16_help="bfloat16 compute; a frozen base is stored in bfloat16")
    flags.sharding(g)

    g = flags.logging(p, logging_steps=10, save_total_limit=3)
    flags.switch(g, "--enable_strategic_logging", help="now and then print one sample as trained")
    g.add_argument("--strategic_logging_steps", type=int, default=100, help="optimizer steps between printed samples")
    flags.switch(g, "--disable_eval", "--disable_evaluation", help="no validation, no hold-out")
    g.add_argument("--eval_ranks", choices=("rank0", "all"),
                   help="who validates: rank 0 while the others wait, or all ranks a share; same number (default: "
                        "rank0, with --parallel fsdp and hsdp all)")
    g.add_argument("--sample_prompts", metavar="FILE",
                   help="prompts spoken at every validation: one text a line, or ChatML .json/.jsonl")
    g.add_argument("--sample_seconds", type=float, default=10.0, help="seconds of speech a sample prompt may give")
    g.add_argument("--sample_time_limit", type=float, default=120.0,
                   help="seconds that generating all of them may take at one validation")
    judges(p.add_argument_group("what judges the sample prompts, on rank 0"))
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later; fill in what derives."""
    flags.check_shared(args)
    flags.check_bad_samples(args, CHECKS)
    if args.dry_run is None:        # long before the imports are done
        run_lock.look(args.output_dir)
    flags.check_parallel(args, world_size)
    flags.check_sharding(args)
    data_flags.check(args)
    for path, _ in data_flags.sources(args)[0] if args.code_cache else ():
        need(not os.path.exists(os.path.join(path, "prepared.json")),
             f"--code_cache: {path} has its codes already; drop the flag")
    need(not (args.disable_eval and (args.eval_data_file or args.eval_data_dir)),
         "--disable_eval and validation data exclude each other")
    flags.at_least_one(args, "gradient_accumulation_steps", "strategic_logging_steps")
    flags.zero_or_more(args, "text_loss_weight")
    flags.above_zero(args, "sample_seconds", "sample_time_limit")
    for flag in ("sample_seconds", "sample_time_limit"):
        need(args.sample_prompts or getattr(args, flag) == {"sample_seconds": 10, "sample_time_limit": 120}[flag],
             f"--{flag} needs --sample_prompts")
    check_judges(args, bool(args.sample_prompts))
    need(args.sample_time_limit < args.wait_timeout, f"--sample_time_limit {args.sample_time_limit:g} must be below "
         f"--wait_timeout {args.wait_timeout}")
    flags.check_lora(args, build_parser())
    flags.check_loading(args, build_parser())
    need(args.use_lora or not args.train_audio_table, "--train_audio_table needs --use_lora; without it all is trained")
    need(not (args.use_lora and args.freeze_llm), "--use_lora freezes the whole base already: drop --freeze_llm")
    need(args.parallel == "ddp" or args.eval_ranks != "rank0",
         f"--eval_ranks rank0 with --parallel {args.parallel}: every forward there needs all ranks; drop it")
    need(not (args.auto and args.eval_ranks == "rank0") or "parallel" in flags.named(args),
         "--eval_ranks rank0 with --auto needs --parallel ddp: every forward of fsdp needs all ranks")
    args.eval_ranks = args.eval_ranks or ("rank0" if args.parallel == "ddp" and not args.auto else "all")
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
             f"(--per_device_train_batch_size {args.per_device_train_batch_size} x {world_size} ranks)")
        args.gradient_accumulation_steps = args.global_batch_size // per_micro_step


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import math
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import lora  # first: it explains a torchaudio that breaks every transformers import
from common import adapters, checkpoint, distributed, float8, loading, metrics, optim, run, tensor_files, watchdog
from common.distributed import UserError
from common.json_files import read_object
from common.packing import PackOrder, pack_order, rank_packs, run_length
from common.problems import collect
from data import make_loader, prepare_table
from speech.data import text_normalization
from speech.data.code_cache import FRAME_RATE
from speech.data.dataset import data_facts, samples_line, split_samples, usable_samples
from speech.data.rows import Reading
from speech.model import v2, versions, weights
from speech.voice import sample_prompts

AUDIO_WEIGHTS = ("embed_audio_tokens", "audio_lm_head", "audio_embedding")     # what --freeze_llm trains, by name

# ---------------------------------------------------------------------------------------------------------------------
# Model: empty, loaded, saved


def empty_trained_model(folder, config, *, adapter, bf16, freeze_llm, text_loss_weight, recompute):
    """(models.packed on the meta device, the native model in it, handles of that one's weights in the files).

    folder, config: of the model to train, and its config.json dict. adapter: lora.add_lora's arguments behind the
    model, or None; the native model then has the adapters inside. freeze_llm: train the audio embedding and head only.
    recompute: of flags.MODES, or None. Only the weights that shall be trained require gradients. Raises UserError when
    the folder does not hold exactly the model's weights, or nothing is left to train.
    """
    dtype = torch.bfloat16 if bf16 and adapter else torch.float32
    native = net = versions.empty_model(config, dtype, folder)
    parts = versions.weight_parts(folder, config)
    weights.check_weights(native, parts, folder)
    if adapter:
        net = lora.add_lora(native, *adapter)
    elif freeze_llm:
        for name, parameter in native.named_parameters():
            parameter.requires_grad_(any(part in name for part in AUDIO_WEIGHTS))
    versions.freeze_unreachable(native, text_loss_weight)
    model = versions.packed(net, recompute)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("these flags leave no weight to train")
    return model, native, parts


def load_model(world, model, native, parts, resume, *, seed, fp8, sharding, compiled):
    """Load empty_trained_model's model on this rank's device -> what to call: itself under FSDP2, or DDP around it.

    resume: checkpoint folder, or None: then adapters are drawn by the seed. fp8: the layers' products in float8.
    sharding: of run.sharding. compiled: torch.compile each layer.
    """
    net = model.net
    if compiled:
        distributed.compile_layers(versions.layers(native))
    if sharding:
        distributed.shard(model, versions.layers(native), world, **sharding)
    on_host = sharding and sharding["cpu_offload"]
    model.to_empty(device="cpu" if on_host else world.device)       # from here on there is memory, still unset
    versions.reset_buffers(native, world.device)
    base = adapters.base_weights(net) if model.has_adapters else dict(native.named_parameters())
    weights.load_weights(base, parts, world)
    if model.has_adapters and resume:
        adapters.load_adapters(net, resume)
    elif model.has_adapters:
        adapters.init_adapters(net, seed)
    if fp8:
        float8.convert(versions.layers(native))
    model.train()
    return model if sharding else distributed.wrap_ddp(model, world)


def check_resume(model, native, resume):
    """Raise UserError when the checkpoint folder `resume` does not fit this (empty) model. None: there is none."""
    if not resume:
        return
    if model.has_adapters:
        adapters.load_adapters(model.net, resume)       # onto the meta device nothing is copied
    else:
        config = read_object(Path(resume) / "config.json")
        weights.check_weights(native, versions.weight_parts(resume, config), resume)


def run_identity(folder, table, train, *, normalize_text, adapters_only, audio_table, freeze_llm, text_loss_weight,
                 tokens_per_pack, samples_per_pack, by_length, seed):
    """What a checkpoint must share with the run that resumes it, {name: value}; JSON-able.

    folder: the base model's. train: numbers of the samples trained.
    """
    batch = (f"{tokens_per_pack} tokens" if tokens_per_pack else f"{samples_per_pack} samples") \
        + (" by length, in blocks" if by_length else "")
    adapted = "lora and audio table" if audio_table else "lora"
    trained = adapted if adapters_only else "audio embedding and head" if freeze_llm else "full"
    return {"--normalize_text": "on" if normalize_text == "on" else None,     # older checkpoints do not know it
            "set of trained weights": trained if text_loss_weight else f"{trained} without text",
            "base model": tensor_files.fingerprint_weights(folder), "codec": Path(table.reader.folder).name,
            "training data": table.fingerprint(train), "pack": batch, "seed": seed}


def save_checkpoint(world, writer, model, tokenizer, source, optimizer, meta):
    """Copy all of checkpoint-<meta["step"]> off the device and start writing it. On every rank.

    source: folder of the model that was trained from, whose processor files a full checkpoint takes over.
    """
    writer.begin(meta["step"])
    distributed.reshard(model)
    states = distributed.gather_on_main(world, checkpoint.rng_state(world.device))
    if model.has_adapters:
        files = tensor_files.stage(world, "adapter_model", adapters.adapter_weights(model.net), spread=False)
    else:
        files = tensor_files.stage(world, "model", versions.weight_names(model.base_model))
    moments = optim.state_tensors(optimizer, model.named_parameters())
    files |= tensor_files.stage(world, f"{checkpoint.STATE_DIR}/optimizer", moments)
    if world.is_main:
        files[f"{checkpoint.STATE_DIR}/rng.pt"] = lambda path: torch.save(states, path)
        files[text_normalization.FILE] = lambda path: text_normalization.save_setting(path, meta["args"]["normalize_text"])
        files["*"] = (lambda path: adapters.save_config(model.net, path)) if model.has_adapters else \
            (lambda path: versions.save_config(model.base_model, tokenizer, path, source))
    writer.save(meta["step"], files, meta)


# ---------------------------------------------------------------------------------------------------------------------
# Validation, reports


def autocast(bf16, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


@torch.no_grad()
def evaluate(world, model, table, ids, held_out, check, *, on_rank0, batch_size, num_workers, bf16, reduction,
             text_weight):
    """Exact target-weighted validation losses {eval/...: float}, the same whether rank 0 alone validates or all do.

    Now and then calls check(), which may raise, and looks for a request to stop: then it returns None, on all ranks.
    """
    order = PackOrder(table.lengths[held_out], samples_per_pack=batch_size, shuffle=False)
    codebooks = ids.num_codebooks

    def share(rank, size):
        packs = [[int(held_out[i]) for i in pack] for pack in rank_packs(order, rank, size, 1, epochs=1)]
        sums = torch.zeros(codebooks + 6, dtype=torch.float64, device=world.device)
        loader = make_loader(table, ids, packs, num_workers=min(1, num_workers), prefetch_factor=2)
        for i, batch in enumerate(loading.each(loader)):
            if i % 16 == 0:
                check()
                stop = bool(watchdog.stop_requested())
                if stop if size == 1 else distributed.any_rank(world, stop).item():
                    return None
            with autocast(bf16, world.device):
                audio, text, eos = model(batch.to(world.device))
            sums += torch.cat([audio, text[None], eos]).double()
        return sums.tolist()

    model.eval()
    if on_rank0:
        sums = distributed.rank0_first(world, share, 0, 1)
    elif (sums := share(world.rank, world.size)) is not None:
        sums = distributed.all_sum(world, torch.tensor(sums, dtype=torch.float64, device=world.device)).tolist()
    model.train()
    if sums is None:
        return None
    counts = [int(table.audio_targets[held_out].sum()), int(table.text_targets[held_out].sum())]
    return versions.loss_report(ids, [*sums, *counts], reduction, text_weight, "eval")


def console_line(step, total_steps, v):
    """One aligned line of at most 160 characters, with units; metrics.jsonl has all numbers."""
    mfu = f" | mfu {v['train/mfu'] * 100:4.1f}%" if "train/mfu" in v else ""
    return (f"step {step:>6}/{total_steps} | loss {v['train/loss']:7.4f} | audio {v['train/audio_loss']:6.3f} "
            f"text {v['train/text_loss']:6.3f} | stop {v['train/stop_recall'] * 100:5.1f}% | "
            f"lr {v['train/learning_rate']:.2e} | grad_norm {v['train/grad_norm']:7.3f} | "
            f"{v['train/audio_seconds_per_second']:>7,.1f} audio-s/s{mfu} | "
            f"eta {metrics.duration((total_steps - step) * v['train/step_seconds'])}")


def eval_line(step, v):
    """One aligned line of a validation, with units."""
    return (f"eval   step {step:>6} | loss {v['eval/loss']:7.4f} | audio {v['eval/audio_loss']:6.3f} | "
            f"text {v['eval/text_loss']:6.3f} | eos {v['eval/eos_loss']:6.3f} stop {v['eval/stop_recall'] * 100:5.1f}%")


def step_work(config, table, window, use_lora):
    """Totals over the samples of one optimizer step, from the plan: useful work of all ranks, python numbers."""
    lengths = table.lengths[window].astype(np.int64)
    n_audio, n_text = int(table.audio_targets[window].sum()), int(table.text_targets[window].sum())
    flops = v2.flops_per_pack(config, int(lengths.sum()), n_audio, n_text,
                                 int((lengths * (lengths + 1) // 2).sum()), use_lora)
    return {"audio_targets": n_audio, "text_targets": n_text, "tokens": int(lengths.sum()), "samples": len(window),
            "frames": int(table.frames[window].sum()), "flops": flops}


def print_start(world, model, table, train_ids, eval_ids, bf16, *more):
    """What is about to run, before the first step."""
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    n, n_trained = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (True, False))
    print(f"device     {world.size} x {where}, torch {torch.__version__}, {'bf16 autocast' if bf16 else 'fp32'}\n"
          f"model      {n / 1e6:,.1f} M parameters, {n_trained / 1e6:,.3f} M trainable "
          f"({'LoRA' if model.has_adapters else 'full'})\n"
          f"{samples_line(table, train_ids, eval_ids)}", *more, sep="\n")


def print_sample(table, tokenizer, batch):
    """--enable_strategic_logging: show the first sample of a batch the way the model sees it."""
    if not batch.samples:
        return
    places = batch.text_pos[batch.text_pos < batch.seqlens[0]]
    text = tokenizer.decode(batch.input_ids[places].cpu())
    tqdm.write(f"sample     {table.name(batch.samples[0])}: {batch.seqlens[0]} tokens; batch trains "
               f"{batch.counts['audio_targets']} codes and {batch.counts['text_targets']} text tokens; text {text!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Flags as what functions take


def for_model(args):
    """What empty_trained_model takes of the flags, by name."""
    adapter = (args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_target_modules, args.model_path,
               args.use_rslora, args.use_dora, args.train_audio_table)
    return {"adapter": adapter if args.use_lora else None, "bf16": args.bf16, "freeze_llm": args.freeze_llm,
            "text_loss_weight": args.text_loss_weight, "recompute": args.gradient_checkpointing}


def for_loading(args, ranks):
    """What load_model takes of the flags, by name. ranks: how many processes train."""
    return {"seed": args.seed, "fp8": args.float8, "sharding": run.sharding(args, ranks), "compiled": args.compile}


def for_identity(args):
    """What run_identity takes of the flags, by name."""
    return {"adapters_only": args.use_lora, "audio_table": args.train_audio_table, "freeze_llm": args.freeze_llm,
            "text_loss_weight": args.text_loss_weight,
            "tokens_per_pack": args.max_tokens_per_batch, "samples_per_pack": args.per_device_train_batch_size,
            "by_length": args.group_by_length, "seed": args.seed, "normalize_text": args.normalize_text}


def for_table(args, work_dir):
    """What prepare_table takes of the flags, by name. A dry run encodes nothing. work_dir: of run.work_folder."""
    dry = args.dry_run is not None
    train, held_out = data_flags.sources(args)
    return {"train": train, "held_out": held_out, "output_dir": work_dir, "encode": not dry,
            "cache_dir": code_cache(args), "reading": Reading(**data_flags.reading(args)),
            "processes": args.preprocess_num_proc, "wait_limit_s": args.wait_timeout, "drop": args.drop_bad,
            "list_in": None if dry else args.output_dir}


def for_judges(args):
    """What scores.load_judges takes of the flags, by name."""
    return {"asr_model": args.asr_model, "asr_command": args.asr_command, "speaker_model": args.speaker_model,
            "mos": args.mos, "language": args.language, "asr_time_limit": args.asr_time_limit}


def for_prompts(args):
    """What sample_prompts.load takes of the flags, first."""
    return args.sample_prompts, args.normalize_text == "on", args.sample_seconds, for_judges(args)


def code_cache(args):
    """Folder of encoded audio."""
    return args.code_cache or Path(args.output_dir) / "codes"


# ---------------------------------------------------------------------------------------------------------------------
# Main


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    run.main(args, train)


def train(args):
    # -- ranks, data, empty model -----------------------------------------------------------------------------------
    ranks, dry, work_dir = run.ranks(args), args.dry_run is not None, run.work_folder(args)
    world, watch = run.start(args, cpu_too=args.cpu_offload or args.auto)
    device, main_rank = world.device, world.is_main
    folder, config_dict, codec_dir = versions.find_files(world, args.model_path, args.audio_tokenizer_path, work_dir)
    args.normalize_text = versions.text_setting(config_dict, args.normalize_text or "")
    if args.use_lora:
        args.lora_target_modules = versions.lora_targets(config_dict, args.lora_target_modules or "")
    config, tokenizer = versions.read_config(config_dict), versions.load_tokenizer(folder, config_dict)
    ids = versions.token_ids(tokenizer, config)
    # a run ends at the first mistake, a dry run names them all
    *_, (model, native, parts), table, (prompts, settings) = collect(
        dry, lambda: run.check_folders(args), lambda: distributed.check_bf16(device, args.bf16),
        lambda: float8.check_device(device, args.float8),
        lambda: empty_trained_model(folder, config_dict, **for_model(args)),
        lambda: prepare_table(world, tokenizer, ids, codec_dir, **for_table(args, work_dir)),
        lambda: distributed.rank0_first(world, sample_prompts.load, for_prompts(args), tokenizer, ids, config,
                                        codec_dir, device))
    all_train, all_eval = split_samples(table, 0 if args.disable_eval else args.validation_split, args.seed)
    train_ids, eval_ids = usable_samples(
        table, all_train, all_eval, max_length=args.max_length or config.max_position_embeddings,
        max_tokens=args.max_tokens_per_batch, drop="too_long" in args.drop_bad, say=main_rank,
        output_dir=args.output_dir if main_rank and not dry else None)
    if args.tf32:       # only now: codes in the cache must not depend on it
        torch.set_float32_matmul_precision("high")
    if args.auto or dry:
        from speech import plan
        data = plan.Data(table, ids, train_ids, eval_ids, prompts, settings)
    if args.auto and plan.choose(args, world, ranks, model, data):
        model, native, parts = empty_trained_model(folder, config_dict, **for_model(args))
    identity = run_identity(folder, table, train_ids, **for_identity(args)) if main_rank else None
    validation = [table.fingerprint(eval_ids), args.audio_loss_reduction, args.text_loss_weight]
    resume, meta = checkpoint.find_resume(args.output_dir, args.resume, identity, world)

    # -- order, number of steps: known to every rank without asking, so all make the same number of collectives -------
    accumulation, at = args.gradient_accumulation_steps, run.position(meta)
    order = pack_order(table.lengths[train_ids], tokens_per_pack=args.max_tokens_per_batch,
                       samples_per_pack=args.per_device_train_batch_size, seed=args.seed,
                       group_by_length=args.group_by_length)
    per_step = ranks * accumulation
    steps_per_epoch, total_steps = run_length(order.packs_per_epoch, per_step, args.num_train_epochs, args.max_steps,
                                              at)
    often = run.intervals(args, total_steps, meta, bool(len(eval_ids) or prompts))
    peak_lr = args.learning_rate if not args.scale_lr_from_batch else optim.sqrt_lr(
        args.learning_rate, per_step * args.per_device_train_batch_size, args.scale_lr_from_batch)

    if dry:
        check_resume(model, native, resume)
        warmup = f"warm-up {args.warmup_steps} steps, {args.warmup_steps / max(1, total_steps) * 100:.0f}% of the run"
        lines = [run.steps_text(total_steps, steps_per_epoch, ranks, accumulation, warmup), often,
                 run.start_text(at["step"], resume)]
        plan.print_plan(args, ranks, model, data, order, lines, total_steps - at["step"], code_cache(args))
        return print("dry run ok")

    # -- model, optimizer, resume -------------------------------------------------------------------------------------
    watch.moved("loading the model", args.wait_timeout)
    if resume and not args.use_lora:        # a full checkpoint replaces the base; adapters are loaded on top of it
        config_dict = read_object(Path(resume) / "config.json")
        model, native, parts = empty_trained_model(resume, config_dict, **for_model(args))
    wrapped = load_model(world, model, native, parts, resume, **for_loading(args, ranks))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.build_adamw(model.named_parameters(), peak_lr, args.weight_decay,
                                  (args.adam_beta1, args.adam_beta2), v2.decays)
    distributed.seed_everything(args.seed, world.rank)     # other dropout on every rank
    # a step's log values: loss sums by codebook, text loss, 5 of the stream's end; targets of both kinds, on rank 0
    state = run.TrainState(world, watch, args, order, total_steps, ids.num_codebooks + 8, resume, meta, validation, table.name)
    state.restore(model, optimizer)
    epochs = sys.maxsize if args.max_steps else args.num_train_epochs
    packs = ([int(train_ids[i]) for i in pack] for pack in
             rank_packs(order, world.rank, world.size, accumulation, epochs, at["epoch"], at["first"]))
    batches = loading.ahead(make_loader(table, ids, packs, num_workers=args.num_workers,
                                        prefetch_factor=args.prefetch_factor, pad_to=args.max_tokens_per_batch), device)
    if main_rank:
        sample_prompts.forget_later(args.output_dir, state.step)
        print_start(world, model, table, train_ids, eval_ids, args.bf16, run.steps_text(
            total_steps, steps_per_epoch, ranks, accumulation, f"peak lr {peak_lr:.2e}, warm-up {args.warmup_steps}"),
            often, run.start_text(state.step, resume))

    # -- loop ---------------------------------------------------------------------------------------------------------
    stopping = False
    while state.step < total_steps and not stopping:
        window = train_ids[state.window()]        # samples of this step, all ranks: the loss divides by their targets
        work = step_work(config, table, window, args.use_lora)
        n_audio, n_text = work["audio_targets"], work["text_targets"]
        sums = torch.zeros_like(state.sums)
        for micro in range(accumulation):
            batch = state.next(batches)
            mine = list(batch.samples)
            # a batch that differs from the plan would divide the loss by another count than the other ranks'
            assert batch.counts["audio_targets"] == table.audio_targets[mine].sum(), "loader and plan disagree"
            assert args.max_tokens_per_batch in (0, len(batch.input_ids)), "the pack is not filled to its budget"
            if args.enable_strategic_logging and main_rank and micro == state.step % args.strategic_logging_steps == 0:
                print_sample(table, tokenizer, batch)
            with distributed.gradient_sync(wrapped, micro == accumulation - 1):    # ranks exchange gradients once a step
                with autocast(args.bf16, device):
                    audio, text, eos = wrapped(batch)       # sums over this batch's targets
                loss = v2.total_loss(audio, n_audio, text, n_text, args.audio_loss_reduction, args.text_loss_weight)
                (loss * world.size).backward()          # gradients are averaged over ranks, the loss is a global mean
            sums[:ids.num_codebooks + 6] += torch.cat([audio.detach(), text.detach()[None], eos])
            state.note_loss(loss, mine)
        if main_rank:       # python numbers: a tensor made of them would wait for the GPU
            sums[-2] += n_audio
            sums[-1] += n_text
        factor = optim.lr_factor(state.step, total_steps, args.warmup_steps, args.lr_scheduler, args.min_lr_ratio)
        state.update(optimizer, trainable, peak_lr * factor, sums)

        # what comes now is the same on every rank; a request to stop counts one step late, so no step waits for it
        evaluating, saving = (len(eval_ids) or prompts) and state.due(args.eval_steps), state.save_due()
        stopping = state.stop_asked(evaluating or saving) and not state.last

        # -- log ------------------------------------------------------------------------------------------------------
        empty = max(0, state.at["first"] - order.packs_per_epoch)         # packs of one token of padding
        state.count(per_step * args.max_tokens_per_batch or work["tokens"] + empty, work)
        if state.due(args.logging_steps):
            values = versions.loss_report(ids, distributed.all_sum(world, state.sums).tolist(), args.audio_loss_reduction,
                                       args.text_loss_weight, "train")
            if main_rank:
                state.log_step(values, lambda v: console_line(state.step, total_steps, v),
                         audio_seconds_per_second=state.sums_since["frames"] / FRAME_RATE)
            state.sums.zero_()
            state.begin_line()

        # -- validate, save -------------------------------------------------------------------------------------------
        with state.pause():
            better = False
            if evaluating and not stopping:
                watch.moved(f"validation at step {state.step}", args.wait_timeout)
                values = evaluate(
                    world, model, table, ids, eval_ids, state.writer.check, on_rank0=args.eval_ranks == "rank0",
                    batch_size=args.per_device_eval_batch_size, num_workers=args.num_workers, bf16=args.bf16,
                    reduction=args.audio_loss_reduction, text_weight=args.text_loss_weight) if len(eval_ids) else {}
                if values is None:              # asked to stop meanwhile
                    stopping = not state.last
                else:
                    if values and main_rank:
                        tqdm.write(eval_line(state.step, values))
                    if prompts:                 # rank 0 speaks while the others wait
                        watch.moved(f"sample prompts at step {state.step}", args.wait_timeout)
                        model.eval()
                        with distributed.gathered(model), autocast(args.bf16, device):
                            values |= distributed.rank0_first(world, lambda: sample_prompts.speak_all(
                                native, prompts, settings, ids, codec_dir, device, seed=args.seed,
                                time_limit=args.sample_time_limit, output_dir=args.output_dir, step=state.step,
                                log=state.log, asked=watchdog.stop_requested, judging=for_judges(args)))
                        model.train()
                    if values and main_rank:
                        state.log.write(state.step, values)
                    better = state.better(values.get("eval/loss", math.nan))
            if (better or saving or stopping) and state.saved_step != state.step:
                save_checkpoint(world, state.writer, model, tokenizer, folder, optimizer,
                                state.to_save(identity, data=data_facts(table, train_ids)))
    state.finish(stopping)


if __name__ == "__main__":
    main()
