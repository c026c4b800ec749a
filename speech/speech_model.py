"""The Higgs-Audio V2 model as the trainer's flags want it: checked, empty, with adapters, sharded, loaded, saved.
"""
import json
from pathlib import Path

import torch

import lora
from common import checkpoint, float8, optim, parallel, tensor_files
from common.parallel import UserError
from speech import higgs, weights

from common import adapters  # isort: skip      # after weights, which explains a broken torchaudio


def check_device(args, device):
    """Raise UserError when this GPU cannot do what the flags ask for."""
    if args.bf16 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(f"--bf16: {torch.cuda.get_device_name(device)} has no bfloat16; drop the flag")
    float8.check_device(args, device)


def find_checkpoints(args):
    """((model folder, its config.json), codec folder)."""
    return weights.find_model(args.model_path), weights.find_codec(args.audio_tokenizer_path)[0]


def empty_trained_model(args, folder, config):
    """(PackedHiggs on the meta device, its native model, its weights' slice handles by name), adapters inside.

    config: the folder's config.json dict. The weights that shall be trained require gradients, no others. Raises
    UserError when the folder does not hold exactly the model's weights, or the flags leave none to train.
    """
    dtype = torch.bfloat16 if args.bf16 and args.use_lora else torch.float32
    native = net = weights.empty_model(weights.native_config(config), dtype, folder)
    parts = weights.weight_parts(folder, config)
    weights.check_weights(native, parts, folder)
    if args.use_lora:
        net = lora.add_lora(native, args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_target_modules,
                            args.model_path)
    elif args.freeze_llm:
        for name, parameter in native.named_parameters():
            parameter.requires_grad_("embed_audio_tokens" in name or "audio_lm_head" in name)
    higgs.freeze_unreachable(native, args.text_loss_weight)
    model = higgs.PackedHiggs(net, args.gradient_checkpointing)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("these flags leave no weight to train")
    return model, native, parts


def load_model(world, args, model, native, parts, resume):
    """Load empty_trained_model's model on this rank's device, sharded or not -> what to call in training."""
    net = model.net
    if args.compile:
        parallel.compile_layers(native.model.layers)
    if args.parallel == "fsdp":
        parallel.shard(model, native.model.layers, world, args.bf16, args.reshard_after_forward, args.cpu_offload)
    model.to_empty(device="cpu" if args.cpu_offload else world.device)      # from here on there is memory, still unset
    weights.reset_buffers(native, world.device)
    weights.load_weights(adapters.base_weights(net) if args.use_lora else dict(native.named_parameters()), parts)
    if args.use_lora and resume:
        adapters.load_adapters(net, resume)
    elif args.use_lora:
        adapters.init_adapters(net, args.seed)
    if args.float8:
        float8.convert(native.model.layers)
    model.train()
    return model if args.parallel == "fsdp" else parallel.wrap_ddp(model, world)


def load_to_speak(folder, config, adapter, dtype, device):
    """Native model for generate on the device, in eval mode; an adapter stays beside its frozen base, in fp32.

    config: the folder's config.json dict. adapter: PEFT folder or None. Raises UserError.
    """
    native = net = weights.empty_model(weights.native_config(config), dtype, folder)
    parts = weights.weight_parts(folder, config)
    weights.check_weights(native, parts, folder)
    if adapter:
        net = adapters.add_saved(native, adapter)
    net.to_empty(device=device)
    weights.reset_buffers(native, device)
    weights.load_weights(adapters.base_weights(net) if adapter else dict(native.named_parameters()), parts)
    if adapter:
        adapters.load_adapters(net, adapter)
    return native.eval()


def check_resume(args, model, native, resume):
    """Raise UserError when the checkpoint folder `resume` does not fit this (empty) model."""
    if args.use_lora:
        adapters.load_adapters(model.net, resume)       # onto the meta device nothing is copied
    else:
        config = json.loads((Path(resume) / "config.json").read_text())
        weights.check_weights(native, weights.weight_parts(resume, config), resume)


def run_identity(args, folder, table, train):
    """What a checkpoint must share with the run that resumes it, {name: value}; JSON-able."""
    batch = (f"{args.max_tokens_per_batch} tokens" if args.max_tokens_per_batch else
             f"{args.per_device_train_batch_size} samples") + (" by length" if args.group_by_length else "")
    trained = "lora" if args.use_lora else "audio embedding and head" if args.freeze_llm else "full"
    return {"set of trained weights": trained if args.text_loss_weight else f"{trained} without text",
            "base model": tensor_files.fingerprint_weights(folder), "codec": Path(table.reader.folder).name,
            "training data": table.fingerprint(train), "pack": batch, "seed": args.seed}


def save_checkpoint(world, writer, args, model, native, tokenizer, folder, optimizer, meta):
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
        files["*"] = (lambda path: adapters.save_config(model.net, path)) if args.use_lora else \
            (lambda path: weights.save_config(native, tokenizer, path, folder))
    writer.save(meta["step"], files, meta)
