"""LoRA adapters in any model, plain or sharded: add, compute, fill, save, load, in PEFT's files."""
import contextlib
import math
import os
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from core import dist, json_files, tensor_io
from core.cli import UserError, require

# PEFT calls transformers in a deprecated way
warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
MAGNITUDE = "lora_magnitude_vector"     # PEFT's name of DoRA's magnitudes
# Fields of PEFT's LoraConfig that this code supports, or that only matter in training. An adapter
# that sets another one (modules_to_save, bias, a field of a newer PEFT) would be computed wrongly.
FIELDS = set("""r lora_alpha target_modules exclude_modules use_rslora use_dora rank_pattern
    alpha_pattern layers_to_transform layers_pattern lora_dropout task_type auto_mapping
    peft_version base_model_name_or_path revision inference_mode runtime_config""".split())


class AddingLinear(Linear):
    """PEFT's LoRA linear layer without its passes over memory as wide as the output: eager, its
    product is accumulated into the base's output; compiled, the sum is fused into what follows."""

    def forward(self, x, *args, **kwargs):
        if args or kwargs or self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        rows, scale = x.flatten(0, -2), self.scaling["default"]
        out = self.base_layer(rows)
        low = self.lora_A["default"](self.lora_dropout["default"](rows)).to(out.dtype)
        up = self.lora_B["default"].weight.to(out.dtype).t()
        if torch.compiler.is_compiling():
            out = out + (low @ up) * scale
        else:       # rows are flat, as in-place addition to a view would copy gradients
            out.addmm_(low, up, alpha=scale)
        return out.unflatten(0, x.shape[:-1])


# ---- Adding adapters to a model


def add_lora(model, layers, rank, alpha, dropout, targets, base_name, rslora=False, dora=False,
             task_type="CAUSAL_LM", **settings):
    """Wrap linear modules of a model's decoder layers in fp32 adapters; the base is frozen.

    targets: "all-linear" or comma-separated endings of module names; UserError if one matches none.
    base_name, rslora, dora, settings: PEFT's; task_type None: the model is not transformers'."""
    linear = {name for layer in layers for name, module in layer.named_modules()
              if isinstance(module, torch.nn.Linear)}
    endings = sorted({name.rpartition(".")[2] for name in linear})
    names = endings if targets == "all-linear" else [name.strip() for name in targets.split(",")]
    for name in names:
        require(any(f".{other}".endswith(f".{name}") for other in linear),
                f"--lora_target_modules {name!r} matches no linear layer; use all-linear or out "
                f"of: {', '.join(endings)}")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names,
                        use_rslora=rslora, use_dora=dora, task_type=task_type, **settings)
    wrapped = get_peft_model(model, config)     # which overwrites the base's name
    config.inference_mode = True        # in the saved file, as PEFT writes it
    is_folder = os.path.isdir(base_name)
    config.base_model_name_or_path = os.path.abspath(base_name) if is_folder else base_name
    for module in wrapped.modules():
        if type(module) is Linear and not dora:     # DoRA layers keep PEFT's forward
            module.__class__ = AddingLinear
    return wrapped


def add_saved_lora(model, folder, whole=()):
    """Wrap a model in the adapters of a PEFT folder, without loading weights; PEFT's own forward
    computes them. whole: modules that modules_to_save may name. UserError for other settings."""
    path = Path(folder).absolute() / "adapter_config.json"
    require(path.is_file(), f"--adapter {folder}: no such folder, or no {path.name} in it")
    saved, usual = json_files.read_object(path), LoraConfig(modules_to_save=list(whole))
    unsupported = [f"{name} {value!r}" for name, value in saved.items()
                   if name not in FIELDS and value and value != getattr(usual, name, None)]
    require(not unsupported, f"{path}: the adapter has {', '.join(unsupported)}, which is not "
            "supported; merge it into its base with PEFT")
    try:
        config = LoraConfig.from_pretrained(folder)
        config.base_model_name_or_path = None   # else PEFT warns if this base has another name
        return get_peft_model(model, config)
    except Exception as error:      # PEFT's checks raise a dozen types
        raise UserError(f"{path}: is not a LoRA configuration for this model ({error!r:.200})")


@contextlib.contextmanager
def disable(model):
    """Compute as the base in this context. PEFT's disable_adapter() also changes requires_grad."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# ---- Weights


def adapter_weights(model):
    """{name in adapter_model.safetensors: parameter}."""
    parameters = dict(model.named_parameters())
    return get_peft_model_state_dict(model, parameters, save_embedding_layers=False)


@torch.no_grad()
def init_adapters(model, seed):
    """Fill new adapters, the same for any sharding: A as PEFT does (Kaiming uniform), B with zeros,
    DoRA's magnitudes and modules_to_save from the base's weights, which must be loaded."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_weights(model).items():
        parameter.zero_()
        if ".lora_A." in name:
            whole = torch.empty(parameter.shape)
            torch.nn.init.kaiming_uniform_(whole, math.sqrt(5), generator=generator)
            tensor_io.fill(parameter, whole, name)
    for module in model.get_base_model().modules():
        for whole in getattr(module, "modules_to_save", {}).values():
            whole.load_state_dict(module.original_module.state_dict())
        for magnitude in getattr(module, MAGNITUDE, {}).values():
            rows, _ = tensor_io.local_rows(module.base_layer.weight)    # shards have the same rows
            tensor_io.local_rows(magnitude.weight)[0].copy_(torch.linalg.norm(rows.float(), dim=1))


def load_adapters(model, folder):
    """Load a saved adapter into a wrapped model, sharded or not. UserError for other settings."""
    saved, config = LoraConfig.from_pretrained(folder), model.peft_config["default"]
    for key in ("r", "lora_alpha", "target_modules", "modules_to_save", "use_rslora", "use_dora"):
        value, stored = getattr(config, key), getattr(saved, key)
        require(stored == value, f"{folder}: adapter has {key} {stored}, this run {value}; give "
                "the same LoRA flags or another --output_dir")
    tensor_io.load(dist.World(), folder, "adapter_model", adapter_weights(model))
