"""What a run starts from (--init_from): published DiT weights, a checkpoint of ours, or a causal
language model.

Every kind becomes tensors under our names whose rows are those of the run's vocabulary: markers
that the source knows keep their rows, new ones get the mean row of the tokenizer's own tokens and a
little noise. A source that was trained on a prompt form and an end token of its own passes them on.
"""
import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch

from common import checkpoint, tensor_files
from common.distributed import UserError
from core import json_files
from diffusion import decoder, dit, official, weights
from diffusion.choices import SIZES
from diffusion.folders import auto_tokenizer
from diffusion.problems import MARKERS, SDAR_MASK, load_tokenizer, tokenizer_from_folder

# parameters with a row for each token
ROWS = ("embed.weight", "head.weight", "head.bias", "model.embed_tokens.weight", "lm_head.weight")
# files beside tokenizer.json that transformers reads: with them a chat template stays usable
CHAT_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Start(NamedTuple):
    """Weights that a run starts from, fit for its vocabulary."""
    tensors: dict       # {our name: CPU tensor}
    identity: str       # hash of the files they come from
    words: str          # what they are
    source: dict        # config.json of the language model that they come from; {}: of none


def find(name):
    """File or folder of --init_from, found in an OUTPUT_DIR of ours, or downloaded. UserError."""
    if Path(name).is_file():
        return Path(name)
    path = tensor_files.find_folder(name, "--init_from", more=["*.bin"])
    if checkpoint.checkpoints(path) or (path / checkpoint.MANIFEST).exists():
        path = weights.find_checkpoint(path, "best", "--init_from")
    if (path / "adapter_config.json").is_file():
        raise UserError(f"--init_from {path}: is an adapter; merge it into its base with PEFT")
    return path


def is_ours(path):
    """Whether a path of find() is a checkpoint of this trainer, not of train_sft.py."""
    return (path / checkpoint.MANIFEST).exists() and "model" in json_files.read_object(path / "config.json")


def is_causal(path):
    """Whether a path of find() is a language model that predicts the next token."""
    if path.is_file() or is_ours(path):
        return False
    kind = json_files.read_object(path / "config.json").get("model_type")
    return kind not in ("bd3lm", "mdlm", None)


def own_tokenizer(path):
    """A path of find() where it has a tokenizer of its own, else None."""
    return path if is_causal(path) or (path / "tokenizer.json").is_file() else None


def config_for(path, model_size, tokens, dropout):
    """Config of a run's network. path: of find(); model_size: of a DiT. Raises UserError."""
    if is_causal(path):
        return decoder.config_of(path, tokens.vocab_size, tokens.mask, dropout)
    if is_ours(path):
        about = json_files.read_object(path / "config.json")["model"]
        if "kv_heads" in about:
            size = max(tokens.vocab_size, about["vocab_size"])
            ours = {"vocab_size": size, "mask_id": tokens.mask, "dropout": dropout, "lora": None}
            return decoder.Config(**about | ours)
    return dit.config_of(model_size, tokens.vocab_size, tokens.mask, dropout)


def with_chat(layout, folder):
    """A Layout with questions in the chat template of a tokenizer folder and answers that end as
    its turns do.

    Thinking, where a template knows it, is off. Raises UserError when there is no template.
    """
    try:
        tokenizer = auto_tokenizer(folder)
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "{question}"}],
                                               tokenize=False,
                                               add_generation_prompt=True, enable_thinking=False)
    except Exception as error:      # a dozen kinds: no files, no template, a template that fails
        raise UserError(f"--chat: {folder} has no chat template that can be used "
                        f"({str(error).splitlines()[0]:.120})")
    if prompt.count("{question}") != 1:
        raise UserError(f"--chat: the chat template of {folder} does not write the question once")
    return dataclasses.replace(layout, prompt=prompt,
                               end_token=layout.end_token or tokenizer.eos_token)


def with_form(layout, path):
    """A Layout, not hdp's, with the prompt form and the end token that a path of find() was trained
    on; layout.end_token, where it is given, stays.
    """
    if layout.system == "hdp" or path.is_file():
        return layout
    about = json_files.read_object(path / "config.json")
    form = about.get("layout") or about.get("block_diffusion") or {}
    return dataclasses.replace(layout, prompt=form.get("prompt", ""),
                               end_token=layout.end_token or form.get("end_token", ""))


def chat_files(folder):
    """{name: bytes} of the CHAT_FILES that a tokenizer folder has."""
    return {name: (Path(folder) / name).read_bytes() for name in CHAT_FILES
            if (Path(folder) / name).is_file()}


def read(path, config, tokens, ema=True, seed=0):
    """Start of a path of find(): published, a checkpoint of ours whatever its blocks and system, or
    a language model.

    Raises UserError when it does not fit. config: of config_for. tokens: problems.Tokens. ema: the
    averaged weights, of those that have them. seed: of rows without a source.
    """
    which, note, source = "averaged" if ema else "last", "", {}
    if is_ours(path):
        model, about = weights.load_checkpoint(path, ema)
        its_tokens = load_tokenizer(path, about["layout"]["system"], about["layout"]["end_token"])
        own, markers, source = plain(its_tokens), its_tokens.markers, about["source"]
        tensors, head_size = dict(model.named_parameters()), model.config.head_size
    elif is_causal(path):
        which, tensors, head_size = "causal", decoder.read_folder(path, config), config.head_size
        source, own = json_files.read_object(path / "config.json"), vocabulary(path)
        markers = {name: own.pop(name) for name in (*MARKERS["hdp"], SDAR_MASK) if name in own}
        size = (source.get("block_diffusion") or source).get("block_size")
        note = f"trained in blocks of {size}" if size else ""
    else:
        tensors, head_size, note = official.read(path, ema)
        # behind GPT-2's own tokens
        own, markers = {}, {"<|mask|>": len(tensors["embed.weight"]) - 1}
        if markers["<|mask|>"] != len(plain(tokens)):
            raise UserError(f"--init_from {path}: has rows of {markers['<|mask|>']} tokens and a "
                            f"mask, --tokenizer has {len(plain(tokens))} tokens; give the one it "
                            f"was trained with")
    if own and own != plain(tokens):
        raise UserError(f"--init_from {path}: its tokenizer is not that of --tokenizer, so ids "
                        f"would mean other words; drop --tokenizer")
    check_size(path, tensors, head_size, config)
    tensor_files.check_finite(tensors, path)
    tensors, new = fit_vocabulary(tensors, markers, tokens, config.vocab_size, seed)
    files = [path] if path.is_file() else [f for f in sorted(path.iterdir())
                                           if f.suffix in (".safetensors", ".bin")]
    words = "; ".join(filter(None,
                             (f"{which} weights of {path}", note,
                              new and f"new rows for {', '.join(new)}")))
    return Start(tensors, tensor_files.fingerprint_files(files), words, source)


def vocabulary(folder):
    """{text: id} of a language model's tokenizer; {}: its folder has none."""
    try:
        return tokenizer_from_folder(folder).get_vocab()
    except UserError:
        return {}


def with_lora(config, path, bf16, name, adapters):
    """A Config whose network has adapters, frozen weights in bfloat16 with bf16. Raises UserError.

    path: of find(), name: as the user gave it. adapters: other arguments of decoder.adapt, by name.
    """
    if not is_causal(path):
        raise UserError("--use_lora needs --init_from of a language model; other weights are "
                        "trained whole")
    files = tensor_files.model_files(path)
    base = {"base": tensor_files.found_again(path if Path(name).is_dir() else name),
            "identity": tensor_files.fingerprint_files(files)}
    return dataclasses.replace(config,
                               lora=adapters | base | {"dtype": "bfloat16" if bf16 else "float32"})


def fill(model, given, seed, resumed):
    """Put a Start's weights into a network and begin its adapters. resumed: a checkpoint follows,
    which has all that is trained; of adapters that is not the language model below them.
    """
    lora = getattr(model.config, "lora", None)
    if lora or not resumed:
        for name, parameter in decoder.base_weights(model).items():
            tensor_files.fill(parameter, given.tensors[name])
    if lora and not resumed:
        decoder.begin_adapters(model, given.tensors, seed)


def plain(tokens):
    """{text: id} of a tokenizer's own tokens, without the markers behind them."""
    return {text: number for text, number in tokens.tokenizer.get_vocab().items()
            if text not in tokens.markers}


def check_size(path, tensors, head_size, config):
    """Raise UserError when weights are not those of a network of this Config, rows aside."""
    network = weights.module_of(config)
    if network is dit and "condition_in.bias" in tensors:
        hidden, layers = tensors["embed.weight"].shape[1], official.count_layers(tensors)
        cond = len(tensors["condition_in.bias"])
        heads = hidden // head_size if head_size else config.heads
        if (hidden, layers, heads, cond) != (config.hidden_size, config.layers, config.heads,
                                             config.cond_size):
            fits = [name for name, size in SIZES.items() if size == (hidden, layers, heads, cond)]
            raise UserError(f"--init_from {path}: has {layers} layers of {hidden}, {heads} heads, "
                            f"{cond} of conditioning; "
                            + (f"give --model_size {fits[0]}" if fits else "no --model_size is so"))
    with torch.device("meta"):
        wanted = dict(network.Model(config).named_parameters())
    if wrong := sorted(wanted.keys() ^ tensors.keys()):
        raise UserError(f"--init_from {path}: {len(wrong)} names are missing or unknown, first "
                        f"{', '.join(wrong[:5])}")
    if wrong := [name for name, tensor in wanted.items()
                 if tensors[name].shape[name in ROWS:] != tensor.shape[name in ROWS:]]:
        raise UserError(f"--init_from {path}: {wrong[0]} is {tuple(tensors[wrong[0]].shape)} "
                        f"instead of {tuple(wanted[wrong[0]].shape)}")


def fit_vocabulary(tensors, markers, tokens, size, seed):
    """(tensors of `size` rows for `tokens`, names of new markers). markers: {name: row there}."""
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
                noise = 0       # a bias is one number a token
                if rows.ndim > 1:
                    noise = 0.02 * own.std(0) * torch.randn(rows.shape[1:], generator=generator)
                fitted[number] = own.mean(0) + noise
        return fitted
    return {name: fit(tensor.detach()) if name in ROWS else tensor.detach()
            for name, tensor in tensors.items()}, new
