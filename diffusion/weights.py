"""Weights of block diffusion: their exponential moving average, loading a checkpoint, what a run may start from."""
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from common import checkpoint, json_files, parallel, tensor_files
from common.parallel import UserError
from diffusion import dit, official
from diffusion.choices import SIZES
from diffusion.problems import load_tokenizer


def local(tensor):
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Average:
    """Exponential moving average of a model's weights: decay min(decay, (1 + n) / (10 + n)) at update n = 1, 2, ..."""

    def __init__(self, model, decay):
        """Make it when the weights are in place and sharded, if they will be."""
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.shadow = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.updates = torch.zeros((), device=local(next(iter(self.shadow.values()))).device)

    def _pair(self):
        return ([local(t.detach()) for t in tensors.values()] for tensors in (self.parameters, self.shadow))

    @torch.no_grad()
    def update(self, skip=0.0):
        """Move towards the weights, unless skip (number or 0-d tensor on the device) is 1; no host sync."""
        self.updates += 1 - skip
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        weights, shadow = self._pair()
        difference = torch._foreach_sub(weights, shadow)
        torch._foreach_mul_(difference, (1 - decay) * (1 - skip))
        torch._foreach_add_(shadow, difference)

    @torch.no_grad()
    def swap(self):
        """Exchange the model's weights and the averaged ones, in place; again to undo. FSDP2: reshard before."""
        for weight, shadow in zip(*self._pair()):
            kept = weight.clone()
            weight.copy_(shadow)
            shadow.copy_(kept)


def load_checkpoint(folder, ema=True, backend="sdpa"):
    """(DiT on the CPU in eval mode, config.json as a dict) of a checkpoint folder; ema: the averaged weights.

    Raises UserError when the folder holds no such model.
    """
    folder = Path(folder)
    try:
        config = json_files.read_object(folder / "config.json")
        model = dit.DiT(dit.Config(**config["model"]), backend)
    except (UserError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: no checkpoint of train_bd3lm.py (config.json: {error})")
    load_weights(dict(model.named_parameters()), folder, "ema" if ema else "model")
    tensor_files.check_finite(dict(model.named_parameters()), folder)
    return model.eval(), config


def empty_like(model):
    """A DiT like this one, whole, in eval mode and on the same device; its weights are unset."""
    with torch.device("meta"):
        copy = dit.DiT(model.config)
    return copy.to_empty(device=local(next(model.parameters())).device).eval()


def load_weights(tensors, folder, stem):
    """Fill {name: tensor}, plain or sharded, from <stem>.safetensors (one file or several) of a checkpoint folder."""
    parts = {name: [part] for name, part in
             tensor_files.open_tensors(tensor_files.files_in(folder, stem)).items()}
    if problem := tensor_files.compare({name: t.shape or (1,) for name, t in tensors.items()}, parts):
        raise UserError(f"{folder}: its {stem} weights do not fit this model: {problem}")
    for name, tensor in tensors.items():
        tensor_files.read_into(tensor.detach(), parts[name])


def find_checkpoint(name, pick, flag="--checkpoint"):
    """The checkpoint folder that a flag's value and `pick`, "best" or "newest", mean; UserError when none is whole."""
    folder = Path(name)
    if not folder.is_dir():
        raise UserError(f"{flag} {name}: no such folder")
    if checkpoint.checkpoints(folder):
        folder = checkpoint.newest_whole(folder)
        if folder is None:
            raise UserError(f"{flag} {name}: every checkpoint in it is damaged")
        best = checkpoint.load_meta(folder)["best_step"]
        if pick == "best" and best is not None and not checkpoint.damage(folder.parent / f"checkpoint-{best}"):
            folder = folder.parent / f"checkpoint-{best}"
    elif wrong := checkpoint.damage(folder):
        raise UserError(f"{flag} {name}: is no checkpoint, and holds none ({wrong})")
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# What a run starts from


class Start(NamedTuple):
    """Weights that a run starts from, fit for its vocabulary."""
    tensors: dict       # {our name: CPU tensor}
    identity: str       # hash of the files they come from
    words: str          # what they are


def find_start(name):
    """The file or folder of --init_from, a checkpoint of ours found in an OUTPUT_DIR, or downloaded. UserError."""
    path = Path(name)
    if path.is_file():
        return path
    path = tensor_files.find_folder(name, "--init_from", more=["*.bin"])
    ours = checkpoint.checkpoints(path) or (path / checkpoint.MANIFEST).exists()
    return find_checkpoint(path, "best", "--init_from") if ours else path


def read_start(world, name, config, tokens, ema=True, seed=0):
    """Start of --init_from: a checkpoint of ours, whatever its blocks and its system, a published folder or hub name,
    or a Lightning .ckpt. Raises UserError when it does not fit. Collective: rank 0 downloads.

    config: dit.Config of the run. tokens: problems.Tokens. ema: the averaged weights. seed: of rows without a source.
    """
    path = parallel.rank0_first(world, find_start, name)
    if (path / checkpoint.MANIFEST).exists():
        model, about = load_checkpoint(path, ema)
        its_tokens = load_tokenizer(path, about["layout"]["system"])
        if plain(its_tokens) != plain(tokens):
            raise UserError(f"--init_from {path}: was trained with another tokenizer; give --tokenizer {path}")
        tensors, markers = model.state_dict(), its_tokens.markers
        head_size = model.config.hidden_size // model.config.heads
        words = f"{'averaged' if ema else 'last'} weights of {path}"
    else:
        found = official.read(path, ema)
        tensors, head_size = found.tensors, found.head_size
        markers = {"<|mask|>": len(tensors["embed.weight"]) - 1}        # GPT-2 has none, so they add it behind
        if markers["<|mask|>"] != len(plain(tokens)):
            raise UserError(f"--init_from {path}: has rows of {markers['<|mask|>']} tokens and a mask, --tokenizer has "
                            f"{len(plain(tokens))} tokens; give the one it was trained with")
        words = f"{'averaged' if ema else 'last'} weights of {path}" + (found.note and f"; {found.note}")
    check_size(path, tensors, head_size, config)
    tensor_files.check_finite(tensors, path)
    tensors, new = fit_vocabulary(tensors, markers, tokens, seed)
    files = [path] if path.is_file() else [f for f in sorted(path.iterdir()) if f.suffix in (".safetensors", ".bin")]
    words += f"; new rows for {', '.join(new)}" if new else ""
    return Start(tensors, tensor_files.fingerprint_files(files), words)


def plain(tokens):
    """{text: id} of a tokenizer's own tokens, without the markers behind them."""
    return {text: number for text, number in tokens.tokenizer.get_vocab().items() if text not in tokens.markers}


def check_size(path, tensors, head_size, config):
    """Raise UserError when weights are those of another size than config's, naming the --model_size that they have."""
    hidden, cond = tensors["embed.weight"].shape[1], len(tensors["condition_in.bias"])
    layers = dit.count_layers(tensors)
    heads = hidden // head_size if head_size else config.heads
    if (hidden, layers, heads, cond) != (config.hidden_size, config.layers, config.heads, config.cond_size):
        fits = [name for name, size in SIZES.items() if size == (hidden, layers, heads, cond)]
        raise UserError(f"--init_from {path}: has {layers} layers of {hidden}, {heads} heads, {cond} of conditioning; "
                        + (f"give --model_size {fits[0]}" if fits else "no --model_size is like that"))
    with torch.device("meta"):
        wanted = dit.DiT(config).state_dict()
    rows = {"embed.weight", "head.weight", "head.bias"}
    if wrong := [name for name, tensor in wanted.items() if name not in rows and tensors[name].shape != tensor.shape]:
        raise UserError(f"--init_from {path}: {wrong[0]} is {tuple(tensors[wrong[0]].shape)} instead of "
                        f"{tuple(wanted[wrong[0]].shape)}")


def fit_vocabulary(tensors, markers, tokens, seed):
    """(tensors whose rows are those of `tokens`, names of markers that are new). markers: {name: row} of the tensors.

    A marker keeps its row; a new one gets the mean row of the tokenizer's own tokens and a little noise.
    """
    count, generator = len(plain(tokens)), torch.Generator().manual_seed(seed)
    new = [name for name in tokens.markers if name not in markers]

    def fit(rows):
        own = rows[:count].float()
        fitted = torch.empty(tokens.vocab_size, *rows.shape[1:], dtype=rows.dtype)
        fitted[:count] = rows[:count]
        for name, number in tokens.markers.items():
            if name in markers:
                fitted[number] = rows[markers[name]]
            else:
                fitted[number] = own.mean(0) + (
                    0.02 * own.std(0) * torch.randn(rows.shape[1:], generator=generator) if rows.ndim > 1 else 0)
        return fitted
    return {name: fit(tensor) if name in ("embed.weight", "head.weight", "head.bias") else tensor
            for name, tensor in tensors.items()}, new
