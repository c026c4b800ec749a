"""transformers' causal language models: find, build empty, load into any sharding.

A model starts empty on the meta device. Each process reads only the rows of its shard from the
safetensors files. Missing, unexpected or misshapen weights stop the run. For a mixture of experts
the files hold a matrix per expert; transformers holds one tensor (experts, rows, columns).
"""
import copy
import math
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import (AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel,
                          logging)
from transformers.modeling_layers import GradientCheckpointingLayer

from core import tensor_io
from core.cli import UserError, require

logging.disable_progress_bar()      # for loading weights: each rank would show one

EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}   # in the files
IGNORED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")   # in old files, now computed

# ---- Folders


def half_dtype(args):
    """The compute dtype of --bf16 or --fp16; None for float32."""
    return torch.float16 if getattr(args, "fp16", False) else torch.bfloat16 if args.bf16 else None


def find_model(name, flag="--model_path"):
    """Local folder of a model given as a path or hub name; downloads the latter. UserError."""
    folder = tensor_io.find_folder(name, flag)
    require((folder / "config.json").is_file(),
            f"{flag} {name}: has no config.json; give the folder of a whole model")
    return folder


def positions(config):
    """Most tokens that a model reads; infinite if its config names no number."""
    return getattr(config, "max_position_embeddings", None) or math.inf


def length_limit(config, max_length=0, pack_tokens=0):
    """Most tokens of a sample: the least of positions and both limits. UserError."""
    require(max_length <= positions(config), f"--max_length {max_length} is more than the model's "
                                             f"{positions(config)} positions")
    limit = min(max_length or math.inf, pack_tokens or math.inf, positions(config))
    require(limit < math.inf, "this model names no longest text; say it with --max_length")
    return limit


def check_vocabulary(tokenizer, config):
    """Raise UserError if the tokenizer has more tokens than the model has rows."""
    require(len(tokenizer) <= config.vocab_size, f"tokenizer and model disagree: {len(tokenizer)} "
                                                 f"tokens and {config.vocab_size} rows")


def load_config(folder):
    """transformers config of a folder; UserError unless it is a plain causal language model."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:          # ValueError, KeyError, validation errors
        raise UserError(f"{folder}: its config.json cannot be used ({repr(error).splitlines()[0]})")
    require(type(config) in AutoModelForCausalLM._model_mapping, f"{folder}: is a "
            f"{config.model_type!r} checkpoint, not a causal language model of transformers")
    require(not getattr(config, "quantization_config", None),
            f"{folder}: is quantised; give the unquantised model")
    return config


def fingerprint_weights(folder):
    """Short hash of a model folder's config and weight files, as stored in chat checkpoints."""
    paths = [*sorted(Path(folder).glob("*.safetensors")), Path(folder) / "config.json"]
    return tensor_io.fingerprint_files(paths, '["{}", {}]')


# ---- Empty models


def empty_model(config, dtype, folder=None, attention=None):
    """Causal LM whose parameters are on the meta device, its buffers computed, on the CPU.

    folder: may hold a generation_config.json. attention: of transformers' functions. UserError."""
    try:
        with init_empty_weights(include_buffers=False):     # files have no buffers
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation=attention,
                trust_remote_code=False)
        model.tie_weights()
    except Exception as error:      # another attention, sizes that no model has, ...
        raise UserError(f"{folder or config.model_type}: no model can be built as its config.json "
                        f"says ({repr(error).splitlines()[0]}); it is not supported")
    # for the checkpoint's config.json
    model.config.architectures, model.config.dtype = [type(model).__name__], dtype
    if folder and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def give_memory(model, device, buffer_device=None):
    """model.to_empty(device), but keep ties and buffers (on buffer_device). Sharded or not."""
    buffers = [(module, name, buffer.to(buffer_device or device, copy=True))
               for module in model.modules()
               for name, buffer in module.named_buffers(recurse=False)]
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.tie_weights()
    for module, name, buffer in buffers:
        module._buffers[name] = buffer


def decoder_layers(model):
    """The model's decoder layers in order; UserError if none are found."""
    layers = [module for module in model.modules()
              if isinstance(module, GradientCheckpointingLayer)]
    require(layers, f"{type(model).__name__} has no known decoder layers: it is not supported")
    return layers


# ---- Weights


def weight_parts(folder, model):
    """{name: slice} of a folder's weights; tied weights appear once. UserError."""
    tensors = tensor_io.open_tensors(tensor_io.files_of(folder, "model"))
    known, parts = {}, {}
    names = {name: known.setdefault(id(parameter), name)    # each to the first of its parameter
             for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, tensor in tensors.items():
        first = names.get(name, name)
        require(name == first or first not in tensors or torch.equal(tensor[:], tensors[first][:]),
                f"{folder}: its files hold other values for {name} than for {first}, and its "
                "config.json ties the two: set tie_word_embeddings to false there")
        if not name.endswith(IGNORED):
            parts[first] = tensor
    return parts


def split_experts(name, tensor, first=0):
    """{name in the files: tensor} of a parameter. For a tensor (experts, rows, columns) from expert
    `first` on, these are views of each expert's matrices."""
    module_name, _, leaf = name.rpartition(".")
    if tensor.ndim != 3 or leaf not in EXPERTS:
        return {name: tensor}
    return {f"{module_name}.{i}.{matrix}.weight": rows for i, whole in enumerate(tensor, first)
            for matrix, rows in zip(EXPERTS[leaf], whole.chunk(len(EXPERTS[leaf])))}


def check_weights(model, parts, folder):
    """Raise UserError unless the files hold exactly the weights of a bare, unsharded model."""
    wanted = {}
    for name, parameter in model.named_parameters():
        views = {name: parameter} if name in parts else split_experts(name, parameter.detach())
        wanted |= {stored: tensor.shape for stored, tensor in views.items()}
    tensor_io.check_names(wanted, parts, f"{folder}: not the weights of {type(model).__name__}")


# ---- Ends of answers


def stop_at(model, ends=()):
    """Add `ends` to the tokens that stop generate; returns all of these, [id]."""
    known = model.generation_config.eos_token_id
    known = known if isinstance(known, list) else [] if known is None else [known]
    if new := [int(token) for token in ends if token not in known]:
        known = model.generation_config.eos_token_id = [*known, *new]
    return known
