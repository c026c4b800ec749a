"""The student as the trainer's flags want it: checked, empty, with adapters, sharded, loaded, saved.

Copy with it: packed_lm.py, weights.py, adapters.py, tensor_files.py, parallel.py, optim.py, checkpoint.py,
float8.py and what those name.
"""
from pathlib import Path

import torch

from common import adapters, checkpoint, float8, optim, parallel, tensor_files
from common.parallel import UserError
from distill import packed_lm
from distill import weights as causal_lm


def check_device(args, device):
    """Raise UserError when this GPU cannot do what the flags ask for."""
    if args.bf16 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(f"--bf16: {torch.cuda.get_device_name(device)} has no bfloat16; drop the flag")
    float8.check_device(args, device)


def length_limit(args, config):
    """Tokens a sample may have, by flags and model; raises UserError for flags that the model does not allow."""
    positions = getattr(config, "max_position_embeddings", None)
    if not (positions or args.max_length or args.max_tokens_per_batch):
        raise UserError("this model names no longest text; say it with --max_length")
    if positions and args.max_length > positions:
        raise UserError(f"--max_length {args.max_length} is more than the model's {positions} positions")
    return min(n for n in (args.max_length, args.max_tokens_per_batch, positions) if n)


def check_vocabulary(tokenizer, config):
    """Raise UserError when tokenizer and model do not belong together."""
    if len(tokenizer) > config.vocab_size:
        raise UserError(f"tokenizer and model disagree: {len(tokenizer)} tokens and {config.vocab_size} rows")


def empty_trained_model(args, folder):
    """(PackedLM on the meta device, transformers' model, its weights' slice handles by name), adapters inside.

    The weights that shall be trained require gradients, no others. Raises UserError when the folder does not hold
    exactly the model's weights, or the architecture cannot be packed.
    """
    dtype = torch.bfloat16 if args.bf16 and args.use_lora else torch.float32
    native = net = causal_lm.empty_model(causal_lm.load_config(folder), dtype, folder, packed_lm.ATTENTION)
    packed_lm.check_model(native)
    layers = causal_lm.decoder_layers(native)
    parts = causal_lm.weight_parts(folder, native)
    causal_lm.check_weights(native, parts, folder)
    if args.use_lora:
        net = adapters.add_lora(native, layers, args.lora_rank, args.lora_alpha, args.lora_dropout,
                                args.lora_target_modules, args.model_path)
    share = args.distill_weight if args.distill_topk else 0.0
    return packed_lm.PackedLM(net, args.gradient_checkpointing, share=share), native, parts


def build_model(world, args, folder, resume):
    """(PackedLM, what to call in training, transformers' model) on this rank's device, loaded, sharded or not."""
    if resume and not args.use_lora:
        folder = resume
    model, native, parts = empty_trained_model(args, folder)
    layers = causal_lm.decoder_layers(native)
    if args.compile:
        parallel.compile_layers(layers)
    if args.parallel == "fsdp":
        parallel.shard(model, layers, world, args.bf16, args.reshard_after_forward, args.cpu_offload)
    causal_lm.give_memory(model, "cpu" if args.cpu_offload else world.device, world.device)     # still unset
    weights = adapters.base_weights(model.net) if args.use_lora else dict(native.named_parameters())
    causal_lm.load_weights(weights, parts)
    if args.use_lora and resume:
        adapters.load_adapters(model.net, resume)
    elif args.use_lora:
        adapters.init_adapters(model.net, args.seed)
    if args.float8:
        float8.convert(layers)
    model.train()
    return model, model if args.parallel == "fsdp" else parallel.wrap_ddp(model, world), native


def check_resume(args, model, native, resume):
    """Raise UserError when the checkpoint folder `resume` does not fit this (empty) model."""
    if args.use_lora:
        adapters.load_adapters(model.net, resume)       # onto the meta device: nothing but the comparison is left of it
    else:
        causal_lm.check_weights(native, causal_lm.weight_parts(resume, native), resume)


def run_identity(args, folder, table, train):
    """What a checkpoint must share with the run that resumes it, {name: value}; JSON-able."""
    batch = f"{args.max_tokens_per_batch} tokens" if args.max_tokens_per_batch else \
        f"{args.per_device_train_batch_size} samples"
    return {"set of trained weights": "lora" if args.use_lora else "full",
            "base model": causal_lm.fingerprint_weights(folder), "training data": table.fingerprint(train),
            "teacher": table.teacher_fingerprint(train), "pack": batch, "seed": args.seed}


def save_checkpoint(world, writer, args, model, native, tokenizer, optimizer, meta):
    """Copy all of checkpoint-<meta["step"]> off the device and start writing it. On every rank."""
    writer.begin(meta["step"])
    parallel.reshard(model)
    states = parallel.gather_objects(world, checkpoint.rng_state(world.device))
    if args.use_lora:
        files = tensor_files.stage(world, "adapter_model", adapters.adapter_weights(model.net), spread=False)
    else:
        files = tensor_files.stage(world, "model", dict(native.named_parameters()))
    moments = optim.state_tensors(optimizer, model.named_parameters())
    files |= tensor_files.stage(world, f"{checkpoint.STATE_DIR}/optimizer", moments)
    if world.is_main:
        files[f"{checkpoint.STATE_DIR}/rng.pt"] = lambda path: torch.save(states, path)
        files["*"] = lambda path: save_config(args, model, native, tokenizer, path)
    writer.save(meta["step"], files, meta)


def save_config(args, model, native, tokenizer, folder):
    """What from_pretrained needs beside the weights; with an adapter the tokenizer, so the chat template goes along."""
    if args.use_lora:
        adapters.save_config(model.net, folder)
        tokenizer.save_pretrained(folder)
    else:
        causal_lm.save_config(native, tokenizer, Path(folder))
