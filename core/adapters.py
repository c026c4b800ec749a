"""LoRA adapters in any model, plain or sharded: add, fill, save, load; the files are PEFT's own
format.
"""
import contextlib
import copy
import math
import os
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from core import checkpoint, json_files, low_rank, tensor_io
from core.cli import UserError

WHOLE = ".modules_to_save."             # in the names of modules that are trained as a whole
MAGNITUDE = "lora_magnitude_vector"     # PEFT's name of DoRA's lengths
# Fields of PEFT's LoraConfig that its layers compute with, or that matter in training alone. An
# adapter that sets any other one (modules_to_save, bias, what a newer PEFT adds) would be computed
# wrongly here, or in part.
FIELDS = {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "use_dora",
          "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
          "init_lora_weights", "lora_dropout", "eva_config", "peft_type", "task_type",
          "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
          "qalora_group_size", "megatron_core", "runtime_config"}
# of adapters alone; others change the base as well
INITS = (True, False, None, "gaussian", "eva", "orthogonal")


class AddingLinear(Linear):
    """PEFT's LoRA linear layer whose update is added by the matrix product that makes it.

    PEFT's own forward writes the update, scales it and adds it: three more passes over memory as
    wide as the output, which at rank 16 take longer than the products. Same numbers but for
    rounding, same names and files.
    """
    # False copies the base's output first: recomputation may have kept it
    adds_in_place = True

    def forward(self, x, *args, **kwargs):
        """x (..., in) -> (..., out)."""
        if args or kwargs or not low_rank.joins(self):
            return super().forward(x, *args, **kwargs)
        return low_rank.outputs(x, self)[0]


def add_lora(model, layers, rank, alpha, dropout, targets, base_name, rslora=False, dora=False,
             **settings):
    """Wrap a model in fp32 adapters; the base is frozen. rslora, dora, settings: of PEFT's
    LoraConfig; task_type None: not a transformers model.

    layers: its decoder layers; only linear modules in them get adapters. targets: "all-linear" or
    comma-separated module name endings. base_name: written into the adapter's config. Raises
    UserError when a target matches nothing.
    """
    linear = {name for layer in layers for name, module in layer.named_modules()
              if isinstance(module, torch.nn.Linear)}
    if targets == "all-linear":
        names = sorted({name.rpartition(".")[2] for name in linear})
    else:
        names = [target.strip() for target in targets.split(",") if target.strip()]
    for name in names or [targets]:     # commas alone match nothing
        if not any(other == name or other.endswith("." + name) for other in linear):
            endings = ", ".join(sorted({other.rpartition(".")[2] for other in linear}))
            raise UserError(f"--lora_target_modules {name!r} matches no linear layer; use "
                            "all-linear or out of: "
                            f"{endings or 'none, this model has no linear layers'}")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names,
                        bias="none", use_rslora=rslora, use_dora=dora,
                        **{"task_type": "CAUSAL_LM", **settings})
    return attach(model, config, base_name)


def attach(model, config, base_name=None, autocast=True):
    """Wrap a model as a peft LoraConfig says; adapters in fp32, the base frozen.

    autocast: it will run under that, or all in fp32; else PEFT casts the inputs itself.
    """
    # peft asks transformers in a way that newer transformers finds old
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = get_peft_model(model, config)
    # now: get_peft_model overwrites it
    local = base_name and os.path.isdir(base_name)
    config.base_model_name_or_path = os.path.abspath(base_name) if local else base_name
    for module in wrapped.modules():
        # DoRA's own forward is PEFT's
        if autocast and type(module) is Linear and not config.use_dora:
            module.cast_input_dtype_enabled = False     # PEFT need not cast inputs to fp32 first
            module.__class__ = AddingLinear
    return wrapped


def check_config(folder, refused=(), whole=()):
    """Raise UserError unless a folder has the configuration of a LoRA adapter of which nothing but
    FIELDS is set.

    refused: those of FIELDS that must not be set either. whole: modules that may be saved with the
    adapters.
    """
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        inside = checkpoint.list_checkpoints(folder)
        hint = f"; give one of those in it, such as {inside[-1][1]}" if inside else ""
        raise UserError(f"--adapter {folder}: no such folder, or no adapter_config.json in "
                        f"it{hint}")
    saved, usual = json_files.read_object(path), LoraConfig()
    if saved.get("peft_type") != "LORA":
        raise UserError(f"{path}: is a {saved.get('peft_type')!r} adapter; only those of peft_type "
                        "'LORA' are read")
    missing = [key for key in ("r", "lora_alpha", "target_modules") if key not in saved]
    if missing:
        raise UserError(f"{path}: has no {' and no '.join(missing)}")
    odd = [name for name, value in saved.items() if (name not in FIELDS or name in refused)
           and value and value != getattr(usual, name, None)
           and not (name == "modules_to_save" and isinstance(value, list)
                    and set(map(str, value)) <= set(whole))]
    if saved.get("init_lora_weights") not in INITS:
        odd.append(f"init_lora_weights {saved['init_lora_weights']!r}")
    if odd:
        raise UserError(f"{path}: the adapter has {odd[0]}, which is not supported; merge it into "
                        "its base with PEFT")


def add_saved(model, folder, refused=(), whole=()):
    """Wrap a model in the adapters of a PEFT folder, their weights not yet loaded. Raises
    UserError.

    They are computed by PEFT's own forward: plain LoRA, rsLoRA, DoRA, ranks and scales by layer.
    refused, whole: of check_config.
    """
    check_config(folder, refused, whole)
    try:
        config = LoraConfig.from_pretrained(folder)
        # peft would warn that this base has another name
        config.base_model_name_or_path = None
        config.init_lora_weights = True             # the weights come from the file
        return attach(model, config, autocast=False)
    except Exception as error:      # PEFT's checks raise a dozen kinds
        raise UserError(f"{Path(folder) / 'adapter_config.json'}: is not a LoRA configuration for "
                        f"this model ({repr(error)[:200]})")


def base_weights(model):
    """{the base's own name: parameter} of the base inside a PeftModel."""
    named = model.get_base_model().named_parameters()
    return {name.replace(".base_layer.", ".").replace(".original_module.", "."): parameter
            for name, parameter in named if ".lora_" not in name and WHOLE not in name}


def adapter_weights(model):
    """{name in adapter_model.safetensors: parameter}."""
    trained = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name
               or WHOLE in name}
    return get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False)


def init_adapters(model, seed):
    """Fill new adapters: A as PEFT does (Kaiming uniform), B with zeros, DoRA's magnitudes with the
    lengths of the base's rows, whole modules with the base's; that must be there already. The same
    for any sharding of the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_weights(model).items():
        if MAGNITUDE in name or ".lora_" not in name:
            continue
        whole = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        tensor_io.fill(parameter, whole)
    for module in model.get_base_model().modules():
        for whole in getattr(module, "modules_to_save", {}).values():
            for ours, base in zip(whole.parameters(), module.original_module.parameters()):
                ours, base = (getattr(tensor, "_local_tensor", tensor).detach()
                              for tensor in (ours, base))
                ours.copy_(base)
        for magnitude in getattr(module, MAGNITUDE, {}).values():
            rows, lengths = (getattr(tensor, "_local_tensor", tensor).detach() for tensor in (
                # of a shard: both have the same rows
                module.base_layer.weight, magnitude.weight))
            lengths.copy_(torch.linalg.norm(rows.float(), dim=1))


@contextlib.contextmanager
def switched_off(model):
    """Within this context the model computes as its base. For a forward without gradients.

    PEFT's own disable_adapter also changes requires_grad, which FSDP2 copies when it gathers a
    layer.
    """
    layers = [(module, module._disable_adapters) for module in model.modules()
              if isinstance(module, BaseTunerLayer)]
    for layer, _ in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, before in layers:
            layer._disable_adapters = before


def save_config(model, folder):
    """adapter_config.json; with adapter_weights in adapter_model.safetensors
    PeftModel.from_pretrained loads it.
    """
    config = copy.copy(model.peft_config["default"])
    config.inference_mode = True
    config.save_pretrained(folder)


def load_adapters(model, folder):
    """Copy a saved adapter into a freshly wrapped model, sharded or not; raises UserError when it
    does not fit.
    """
    saved = json_files.read_object(Path(folder) / "adapter_config.json")
    ours = model.peft_config["default"]
    for key in ("r", "lora_alpha", "target_modules", "modules_to_save", "use_rslora", "use_dora"):
        value, stored = getattr(ours, key), saved.get(key, False)
        if key.endswith(("modules", "save")):
            value, stored = set(value or ()), set(stored or ())
        if stored != value:
            raise UserError(f"{folder}: adapter has {key} {stored}, this run {value}; give the "
                            "same LoRA flags or another --output_dir")
    weights = adapter_weights(model)
    found = tensor_io.open_tensors([Path(folder) / "adapter_model.safetensors"])
    found = {name: [part] for name, part in found.items()}
    if problem := tensor_io.mismatch({name: p.shape for name, p in weights.items()}, found):
        raise UserError(f"{folder}: the adapter does not fit this model: {problem}")
    for name, parameter in weights.items():
        tensor_io.read_rows(parameter.detach(), found[name])
