"""BD3-LM's and MDLM's weights as their authors publish them (kuleshov-group/bd3lm-owt-*, mdlm-owt): read and written.

Forms: a Hugging Face folder (config.json with model.safetensors or pytorch_model.bin; averaged weights) and a Lightning
.ckpt (last weights by name, averaged ones as a list without names). Read in kuleshov-group/bd3lms 1c3e8f4: models/hf,
models/dit.py, models/ema.py, push_to_hf.py, diffusion.py. Names, types and shapes: tests/diffusion/bd3lm_owt.json.

Block size is no weight: any published file starts a model of any block size. Nor is the length.
"""
import json
import pickle
import re
import types
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from common import tensor_files
from common.distributed import UserError
from core import json_files
from diffusion import dit

HUB_CODE = "kuleshov-group/bd3lm-owt-block_size16"      # where transformers finds the classes of an exported folder


class Published(NamedTuple):
    """What a published file or folder holds."""
    tensors: dict       # {our name: CPU tensor}
    head_size: int      # of attention, 0 where the file does not say
    note: str           # what was left out, in words, or ""


# ---------------------------------------------------------------------------------------------------------------------
# Names

PREFIX = re.compile(r"^(?:module\.|backbone\.|_orig_mod\.)+|_orig_mod\.")      # of DDP, a wrapper, torch.compile
BUFFERS = ("rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max")
# the same parameter in the official code (models/dit.py) and here, in the order of its named_parameters()
FIRST = (("vocab_embed.embedding", "embed.weight"),
         ("sigma_map.mlp.0.weight", "condition_in.weight"), ("sigma_map.mlp.0.bias", "condition_in.bias"),
         ("sigma_map.mlp.2.weight", "condition_out.weight"), ("sigma_map.mlp.2.bias", "condition_out.bias"))
LAYER = (("norm1.weight", "norm_attention.weight"), ("attn_qkv.weight", "qkv.weight"),
         ("attn_out.weight", "out.weight"), ("norm2.weight", "norm_mlp.weight"),
         ("mlp.0.weight", "up.weight"), ("mlp.0.bias", "up.bias"),
         ("mlp.2.weight", "down.weight"), ("mlp.2.bias", "down.bias"),
         ("adaLN_modulation.weight", "modulation.weight"), ("adaLN_modulation.bias", "modulation.bias"))
LAST = (("output_layer.norm_final.weight", "norm.weight"),
        ("output_layer.linear.weight", "head.weight"), ("output_layer.linear.bias", "head.bias"),
        ("output_layer.adaLN_modulation.weight", "modulation.weight"),
        ("output_layer.adaLN_modulation.bias", "modulation.bias"))


def count_layers(names, stem="layers"):
    """Layers of a DiT, from the names of its parameters, ours or official ones (stem blocks)."""
    found = (re.match(rf"{stem}\.(\d+)\.", name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def official_names(layers):
    """[(official name without prefixes, our name)] of a DiT of so many layers, in the order of its parameters."""
    between = [(f"blocks.{i}.{theirs}", f"layers.{i}.{ours}") for i in range(layers) for theirs, ours in LAYER]
    return [*FIRST, *between, *LAST]


def from_official(state):
    """({our name: tensor}, size of an attention head or 0) of a state dict with the official names.

    Prefixes are stripped; buffers, which some files have, are checked and left out. Raises KeyError, naming what is
    missing, unknown or not ours.
    """
    plain = {PREFIX.sub("", name): tensor for name, tensor in state.items()}
    pairs = official_names(count_layers(plain, "blocks"))
    if wrong := sorted({theirs for theirs, _ in pairs} ^ (plain.keys() - set(BUFFERS))):
        raise KeyError(f"{len(wrong)} names are missing or unknown, first {', '.join(wrong[:5])}")
    if odd := [name for name, tensor in plain.items() if not isinstance(tensor, torch.Tensor)]:
        raise KeyError(f"{min(odd)} is not a tensor")
    frequency = plain.get("rotary_emb.inv_freq", torch.empty(0))
    ours = dit.THETA ** (-torch.arange(len(frequency), dtype=torch.float64) / max(1, len(frequency)))
    if not torch.allclose(frequency.double(), ours, rtol=1e-5):
        raise KeyError(f"rotary_emb.inv_freq is not that of base {dit.THETA:g}")
    return {ours: plain[theirs] for theirs, ours in pairs}, 2 * len(frequency)


def load_official_state_dict(model, state):
    """Load a state dict with the official names, with or without prefixes, into a DiT. Raises KeyError naming what is
    missing, unknown, or of another shape.
    """
    tensors, own = from_official(state)[0], model.state_dict()
    if wrong := sorted(tensors.keys() ^ own.keys()) or [name for name in own if tensors[name].shape != own[name].shape]:
        raise KeyError(f"missing, unknown or of another shape: {wrong}")
    model.load_state_dict(tensors)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read(path, ema=True):
    """Published of a folder, or of a .ckpt or .bin file; ema: the averaged weights. Raises UserError.

    A folder's are averaged, so ema=False needs a Lightning file.
    """
    path, config = Path(path), {}
    if path.is_dir():
        config = json_files.read_object(path / "config.json")
        if wrong := [f"{key} {config[key]}" for key, right in (("time_conditioning", False), ("causal", False),
                                                               ("adaln", True)) if config.get(key, right) != right]:
            raise UserError(f"{path}: its config.json says {', '.join(wrong)}; such models are not supported")
    if files := tensor_files.files_in(path, "model"):
        tensor_files.open_tensors(files)        # names what cannot be read
        held, note = {name: tensor for file in files for name, tensor in load_file(file).items()}, ""
    else:
        held, note = read_pickle(path / "pytorch_model.bin" if path.is_dir() else path)
    try:
        tensors, head_size = from_official(held.get("state_dict", held))
    except KeyError as error:
        raise UserError(f"{path}: is not a DiT of BD3-LM or MDLM: {error.args[0]}")
    if "state_dict" not in held and not ema:
        raise UserError(f"{path}: holds one set of weights, the averaged ones; drop --no-init_ema")
    if "state_dict" in held and ema:
        shadow, pairs = (held.get("ema") or {}).get("shadow_params"), official_names(count_layers(tensors))
        if not shadow:
            raise UserError(f"{path}: holds no averaged weights; --no-init_ema takes the last ones")
        if [tuple(tensor.shape) for tensor in shadow] != [tuple(tensors[ours].shape) for _, ours in pairs]:
            raise UserError(f"{path}: its averaged weights do not fit its last ones, in number or in shape")
        tensors = {ours: tensor for (_, ours), tensor in zip(pairs, shadow)}
    if config.get("n_heads") and not head_size:
        head_size = config["hidden_dim"] // config["n_heads"]
    return Published(tensors, head_size, note)


# ---------------------------------------------------------------------------------------------------------------------
# Pickles that run nothing

ALLOWED = {("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"),
           ("torch._utils", "_rebuild_parameter")}


class Nothing:
    """What a pickle's object of a class that is not ALLOWED becomes: it takes everything and does nothing."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return self

    def __setstate__(self, state):
        pass

    def __setitem__(self, key, value):
        pass

    def __hash__(self):
        return id(self)

    append = extend = add = update = __call__


def restricted(left_out):
    """A stand-in for the pickle module that imports nothing: other objects than tensors and plain values are Nothing.

    left_out: a set that takes their classes' names.
    """
    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if (module, name) in ALLOWED:
                return super().find_class(module, name)
            left_out.add(f"{module}.{name}")
            return Nothing
    return types.SimpleNamespace(__name__="restricted", Unpickler=Unpickler, load=None)


def read_pickle(path):
    """(dict of a file that torch.save wrote, words about what was left out of it). Runs no code of the file.

    torch's weights_only first; where the file holds more than that takes, as Lightning's do, objects of all other
    classes are left out. Raises UserError.
    """
    json_files.open_file(path, "--init_from ").close()
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("no file that torch.save wrote since version 1.6")
        left_out, how = set(), {"map_location": "cpu", "mmap": True}
        try:
            state = torch.load(path, weights_only=True, **how)
        except pickle.UnpicklingError:
            state = torch.load(path, weights_only=False, pickle_module=restricted(left_out), **how)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})")
    except Exception as error:      # whatever a damaged or hostile pickle brings about
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {str(error).splitlines()[0]:.120})")
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not weights by name")
    packages = sorted({name.split(".")[0] for name in left_out})
    return state, f"objects of {len(left_out)} classes ({', '.join(packages)}) in it were left out" if left_out else ""


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def state_dict(tensors, heads, t_range):
    """{official name: tensor} of their class for Hugging Face. tensors: {our name: tensor}; t_range: trained on."""
    size = tensors["embed.weight"].shape[1] // heads
    frequency = 1.0 / (10_000 ** (torch.arange(0, size, 2).float() / size))      # as they write it, to the last bit
    state = {f"backbone.{theirs}": tensors[ours] for theirs, ours in official_names(count_layers(tensors))}
    state |= {"backbone.rotary_emb.inv_freq": frequency}
    return state | {f"sampling_eps_{end}": torch.tensor(float(t)) for end, t in zip(("min", "max"), t_range)}


def config_json(config, block_size, length, t_range):
    """Text of config.json of a folder with such a state_dict; config: dit.Config, length: of texts, in tokens."""
    fields = {"architectures": ["BD3LM"], "model_type": "bd3lm", "torch_dtype": "float32", "return_dict": False,
              "auto_map": {"AutoConfig": f"{HUB_CODE}--configuration_bd3lm.BD3LMConfig",
                           "AutoModelForMaskedLM": f"{HUB_CODE}--modeling_bd3lm.BD3LM"},
              "block_size": block_size, "vocab_size": config.vocab_size, "model_length": length, "cross_attn": True,
              "adaln": True, "attn_backend": "sdpa", "causal": False, "hidden_dim": config.hidden_size,
              "cond_dim": config.cond_size, "n_blocks": config.layers, "n_heads": config.heads,
              "dropout": config.dropout, "time_conditioning": False, "var_min": True,
              "sampling_eps_min": t_range[0], "sampling_eps_max": t_range[1]}
    return json.dumps(fields, indent=2) + "\n"
