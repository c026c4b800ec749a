"""What a run starts from (--init_from): published DiT weights, a checkpoint of ours, or a causal language model.

Every kind becomes tensors under our names whose rows are those of the run's vocabulary: markers that the source knows
keep their rows, new ones get the mean row of the tokenizer's own tokens and a little noise.
"""
import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from common import checkpoint, json_files, tensor_files
from common.distributed import UserError
from diffusion import decoder, dit, official, weights
from diffusion.choices import SIZES
from diffusion.problems import MARKERS, load_tokenizer

ROWS = ("embed.weight", "head.weight", "head.bias", "model.embed_tokens.weight", "lm_head.weight")      # one a token


class Start(NamedTuple):
    """Weights that a run starts from, fit for its vocabulary."""
    tensors: dict       # {our name: CPU tensor}
    identity: str       # hash of the files they come from
    words: str          # what they are
    source: dict        # config.json of the language model that they come from; {}: of none


def find(name):
    """The file or folder of --init_from, a checkpoint of ours found in an OUTPUT_DIR, or downloaded. UserError."""
    path = Path(name)
    if path.is_file():
        return path
    path = tensor_files.find_folder(name, "--init_from", more=["*.bin"])
    ours = checkpoint.checkpoints(path) or (path / checkpoint.MANIFEST).exists()
    return weights.find_checkpoint(path, "best", "--init_from") if ours else path


def is_causal(path):
    """Whether a path of find() is a language model that predicts the next token."""
    if not path or path.is_file() or (path / checkpoint.MANIFEST).exists():
        return False
    return json_files.read_object(path / "config.json").get("model_type") not in ("bd3lm", "mdlm", None)


def config_for(path, model_size, tokens, dropout):
    """Config of a run's network. path: of find(), or None for new weights; model_size: of a DiT. Raises UserError."""
    if is_causal(path):
        return decoder.config_of(path, tokens.vocab_size, tokens.mask, dropout)
    if path and (path / checkpoint.MANIFEST).exists():
        about = json_files.read_object(path / "config.json")["model"]
        if "kv_heads" in about:
            size = max(tokens.vocab_size, about["vocab_size"])
            return decoder.Config(**about | {"vocab_size": size, "mask_id": tokens.mask, "dropout": dropout,
                                             "lora": None})
    return dit.config_of(model_size, tokens.vocab_size, tokens.mask, dropout)


def with_chat(layout, folder):
    """A Layout with questions in the chat template of a tokenizer folder and answers that end as its turns do.

    Thinking, where a template knows it, is off. Raises UserError when there is no template.
    """
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "{question}"}], tokenize=False,
                                               add_generation_prompt=True, enable_thinking=False)
    except Exception as error:      # a dozen kinds: no files, no template, a template that fails
        raise UserError(f"--chat: {folder} has no chat template that can be used ({str(error).splitlines()[0]:.120})")
    if prompt.count("{question}") != 1:
        raise UserError(f"--chat: the chat template of {folder} does not write the question once")
    return dataclasses.replace(layout, prompt=prompt, end_token=tokenizer.eos_token)


def read(path, config, tokens, ema=True, seed=0):
    """Start of a path of find(): published, a checkpoint of ours whatever its blocks and system, or a language model.

    Raises UserError when it does not fit. config: of config_for. tokens: problems.Tokens. ema: the averaged weights,
    of those that have them. seed: of rows without a source.
    """
    which, note, source = "averaged" if ema else "last", "", {}
    if (path / checkpoint.MANIFEST).exists():
        model, about = weights.load_checkpoint(path, ema)
        its_tokens = load_tokenizer(path, about["layout"]["system"], about["layout"].get("end_token", ""))
        if plain(its_tokens) != plain(tokens):
            raise UserError(f"--init_from {path}: was trained with another tokenizer; give --tokenizer {path}")
        tensors, markers, source = dict(model.named_parameters()), its_tokens.markers, about.get("source", {})
        head_size = model.config.head_size
    elif is_causal(path):
        which, tensors, head_size = "causal", decoder.read_folder(path, config), config.head_size
        source, markers = json_files.read_object(path / "config.json"), its_markers(path)
    else:
        tensors, head_size, note = official.read(path, ema)
        markers = {"<|mask|>": len(tensors["embed.weight"]) - 1}        # GPT-2 has none, so they add it behind
        if markers["<|mask|>"] != len(plain(tokens)):
            raise UserError(f"--init_from {path}: has rows of {markers['<|mask|>']} tokens and a mask, --tokenizer has "
                            f"{len(plain(tokens))} tokens; give the one it was trained with")
    check_size(path, tensors, head_size, config)
    tensor_files.check_finite(tensors, path)
    tensors, new = fit_vocabulary(tensors, markers, tokens, config.vocab_size, seed)
    files = [path] if path.is_file() else [f for f in sorted(path.iterdir()) if f.suffix in (".safetensors", ".bin")]
    words = "; ".join(filter(None, (f"{which} weights of {path}", note, new and f"new rows for {', '.join(new)}")))
    return Start(tensors, tensor_files.fingerprint_files(files), words, source)


def its_markers(folder):
    """{name: row} of our markers that a language model's tokenizer knows: one that export_bd3lm.py wrote does."""
    path = folder / "tokenizer.json"
    known = Tokenizer.from_file(str(path)).get_vocab() if path.is_file() else {}
    return {name: known[name] for name in MARKERS["hdp"] if name in known}


def with_lora(config, path, bf16, name, adapters):
    """A Config whose network has adapters, frozen weights in bfloat16 with bf16; without adapters the same.

    path: of find(), name: as the user gave it. adapters: other arguments of decoder.adapt, by name. Raises UserError.
    """
    if not adapters:
        return config
    if not is_causal(path):
        raise UserError("--use_lora needs --init_from of a language model; other weights are trained whole")
    base = {"base": name, "identity": tensor_files.fingerprint_files(decoder.weight_files(path))}
    return dataclasses.replace(config, lora=adapters | base | {"dtype": "bfloat16" if bf16 else "float32"})


def plain(tokens):
    """{text: id} of a tokenizer's own tokens, without the markers behind them."""
    return {text: number for text, number in tokens.tokenizer.get_vocab().items() if text not in tokens.markers}


def check_size(path, tensors, head_size, config):
    """Raise UserError when weights are not those of a network of this Config, rows aside."""
    network = weights.module_of(config)
    if network is dit and "condition_in.bias" in tensors:
        hidden, cond, layers = tensors["embed.weight"].shape[1], len(tensors["condition_in.bias"]), dit.count_layers(
            tensors)
        heads = hidden // head_size if head_size else config.heads
        if (hidden, layers, heads, cond) != (config.hidden_size, config.layers, config.heads, config.cond_size):
            fits = [name for name, size in SIZES.items() if size == (hidden, layers, heads, cond)]
            raise UserError(f"--init_from {path}: has {layers} layers of {hidden}, {heads} heads, {cond} of "
                            "conditioning; " + (f"give --model_size {fits[0]}" if fits else "no --model_size is so"))
    with torch.device("meta"):
        wanted = dict(network.Model(config).named_parameters())
    if wrong := sorted(wanted.keys() ^ tensors.keys()):
        raise UserError(f"--init_from {path}: {len(wrong)} names are missing or unknown, first {', '.join(wrong[:5])}")
    if wrong := [name for name, tensor in wanted.items()
                 if tensors[name].shape[name in ROWS:] != tensor.shape[name in ROWS:]]:
        raise UserError(f"--init_from {path}: {wrong[0]} is {tuple(tensors[wrong[0]].shape)} instead of "
                        f"{tuple(wanted[wrong[0]].shape)}")


def fit_vocabulary(tensors, markers, tokens, size, seed):
    """(tensors of `size` rows for `tokens`, names of markers that are new). markers: {name: row} of the tensors."""
    count, generator = len(plain(tokens)), torch.Generator().manual_seed(seed)
    new = [name for name in tokens.markers if name not in markers]

    def fit(rows):
        own, fitted = rows[:count].float(), torch.zeros(size, *rows.shape[1:], dtype=rows.dtype)
        kept = min(len(rows), size)
        fitted[:kept] = rows[:kept]
        for name, number in tokens.markers.items():
            if name in markers:
                fitted[number] = rows[markers[name]]
            else:
                noise = 0.02 * own.std(0) * torch.randn(rows.shape[1:], generator=generator) if rows.ndim > 1 else 0
                fitted[number] = own.mean(0) + noise
        return fitted
    return {name: fit(tensor.detach()) if name in ROWS else tensor.detach() for name, tensor in tensors.items()}, new
