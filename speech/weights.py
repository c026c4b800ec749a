"""Higgs-Audio V2 checkpoints: finding, checking, loading into any sharding, saving what from_pretrained reads.

A model starts empty on torch's meta device and takes its weights from the files row by row, so no process ever holds
more than it trains. Native checkpoints and the original 2025 format are read; missing, unexpected or misshapen weights
stop the run.
"""
import shutil
from functools import partial
from pathlib import Path

import torch

from common import checkpoint, distributed, tensor_files
from common.distributed import UserError
from core import json_files
from speech.choices import HUB_CODEC

try:
    import torchaudio  # noqa: F401  (transformers imports it whenever it finds it, and dies with it)
except (ImportError, OSError, RuntimeError) as broken:
    if not isinstance(broken, ModuleNotFoundError):     # absent is fine, broken is not
        distributed.stop(f"torchaudio does not fit torch {torch.__version__} ({str(broken).splitlines()[0]}), and every "
                      "transformers import fails with it. Run launch/setup.sh, or: pip uninstall torchaudio (training "
                      "from a filled --code_cache needs none)")

from transformers import AutoTokenizer, GenerationConfig, HiggsAudioV2Config, logging
from transformers import HiggsAudioV2ForConditionalGeneration as HiggsAudioV2

logging.disable_progress_bar()      # of weights: one per rank would fill the log

EXTRA_FILES = ("processor_config.json", "preprocessor_config.json", "chat_template.jinja")
SWAPPED = "--model_path and --audio_tokenizer_path are swapped"


class Wrapped(torch.nn.Module):
    """A native model, or the PeftModel around it, as net; forward is the version's."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        # in a list, where torch does not look for modules: else parameters would be there twice
        self._base = [net.get_base_model() if hasattr(net, "get_base_model") else net]

    @property
    def base_model(self):
        """The native model, adapters inside."""
        return self._base[0]

    @property
    def has_adapters(self):
        """Whether LoRA adapters are trained on a frozen base."""
        return self.net is not self.base_model


def find_checkpoint(name, flag, model_types, advice):
    """(local folder, its config.json as a dict) of a checkpoint given as a path or hub name. Raises UserError.

    advice: {model_type of some other checkpoint: what to tell the user who gave it}.
    """
    folder = tensor_files.find_folder(name, flag)
    try:
        config = json_files.read_object(folder / "config.json")
    except UserError as error:
        if (folder / "adapter_config.json").is_file():
            raise UserError(f"{flag} {name}: is an adapter; give the base as --model_path and this folder as --adapter "
                            "(generate_tts.py, lora.py), or what lora.py merge makes of both")
        raise UserError(f"{flag} {name}: has no readable config.json ({error}){checkpoint.hint(folder)}")
    kind = config.get("model_type")
    if kind not in model_types:
        raise UserError(f"{flag} {name}: is a {kind!r} checkpoint, not {' or '.join(map(repr, model_types))}"
                        + (f"; {advice[kind]}" if kind in advice else ""))
    return folder, config


def find_model(name, flag="--model_path"):
    """find_checkpoint for the language model: V2 in its native or 2025 format, or Higgs TTS 3."""
    return find_checkpoint(name, flag, ("higgs_audio_v2", "higgs_audio", "higgs_multimodal_qwen3"),
                           {"higgs_audio_v2_tokenizer": SWAPPED})


def find_codec(name, flag="--audio_tokenizer_path"):
    """find_checkpoint for the native audio tokenizer."""
    advice = {"higgs_audio_v2": SWAPPED, "higgs_audio": SWAPPED,
              None: "the 2025 codec format is not read, use the native one"}
    return find_checkpoint(name, flag, ("higgs_audio_v2_tokenizer",), advice)


def native_config(config):
    """HiggsAudioV2Config of a config.json dict, native or 2025 format. Raises UserError for variants never released."""
    if config["model_type"] == "higgs_audio_v2":
        native = HiggsAudioV2Config.from_dict(config)
    else:
        from speech import layout_2025
        native = HiggsAudioV2Config(**layout_2025.native_settings(config))
    if native.codebook_size <= native.audio_stream_eos_id:
        raise UserError(f"config.json has codebook_size {native.codebook_size}, but end-of-stream is code "
                        f"{native.audio_stream_eos_id}: it must be {native.audio_stream_eos_id + 1}")
    return native


def empty_model(config, dtype, folder=None):
    """Native model with its text head on the meta device: names, shapes and dtypes, no memory.

    config: HiggsAudioV2Config. folder: takes over the generation_config.json there if it is a native one. The 2025
    format's ends at a token that speech never reaches and has no repetition guard: generate would run to its limit.
    """
    with torch.device("meta"):
        model = HiggsAudioV2(config, use_text_head=True).to(dtype)
    config.architectures, config.dtype = [type(model).__name__], dtype
    stored = Path(folder or "") / "generation_config.json"
    if folder and stored.is_file() and "ras_win_len" in json_files.read_object(stored):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    else:
        model.generation_config = released_generation(config)
    return model


def released_generation(config):
    """GenerationConfig with the released model's settings and this config's ids: sampling, repetition guard, ending."""
    return GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
                            pad_token_id=config.pad_token_id, do_sample=True, temperature=1.0, top_k=50, top_p=0.95,
                            ras_win_len=7, ras_win_max_num_repeat=2, use_text_head=True)


def open_model(folder):
    """{name in the files: slice handle} of a folder's model weights. Raises UserError."""
    return tensor_files.open_tensors(tensor_files.model_files(folder))


def weight_parts(folder, config):
    """{native name: [slice handles]} of a native or 2025-format folder; config: its config.json dict. UserError."""
    found = open_model(folder)
    if config["model_type"] == "higgs_audio_v2":
        return {name: [part] for name, part in found.items()}
    from speech import layout_2025
    return {name: [found[part] for part in parts] for name, parts in layout_2025.native_names(found).items()}


def check_weights(model, parts, folder):
    """Raise UserError unless the files hold exactly the model's weights. model: a native model, bare of adapters."""
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    if problem := tensor_files.compare(wanted, parts):
        hint = " (saved by a trainer that dropped the text head; copy it from the base model)" \
            if wanted.keys() - parts.keys() == {"text_lm_head.weight"} else ""
        raise UserError(f"{folder}: {problem}{hint}")


def load_weights(weights, parts, world=None):
    """Fill {native name: tensor, plain or a shard} from weight_parts. world: as in tensor_files.read_once."""
    for name, tensor in weights.items():
        tensor_files.read_once(world, tensor.detach(), partial(tensor_files.read_into, tensor.detach(), parts[name]))


def reset_buffers(model, device):
    """Compute the buffers that no file holds on `device`: memory given to a model from the meta device is unset."""
    inner, config = model.model, model.config
    inner.rotary_emb = type(inner.rotary_emb)(config).to(device)
    inner.embed_audio_tokens.audio_tokens_offsets = torch.arange(config.num_codebooks, device=device) \
        * config.codebook_size
    known = {"rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "embed_audio_tokens.audio_tokens_offsets"}
    if unknown := {name for name, _ in inner.named_buffers()} - known:
        raise UserError(f"this version of transformers has buffers that weights.py does not know: {sorted(unknown)}")


def load_tokenizer(folder):
    """Tokenizer of a model folder; raises UserError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{folder}: no tokenizer can be loaded from it ({str(error).splitlines()[0]})")


def save_config(model, tokenizer, folder, source, codec=None):
    """The files of a native checkpoint beside its weights. -> {file that source did not have: what
    was made of it}.

    codec: folder or hub name that the processor shall name as its codec; None: what source names,
    else the hub's.
    """
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    folder, source, made = Path(folder), Path(source), {}
    for name in EXTRA_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if not (source / "processor_config.json").is_file():
        from speech import layout_2025
        layout_2025.save_processor(folder, tokenizer)
        made = dict.fromkeys(EXTRA_FILES, f"{source} has none; made for the released codec "
                             f"(24 kHz, 960 samples a frame), named {codec or HUB_CODEC}")
    if codec or made:
        from speech import layout_2025
        layout_2025.name_codec(folder, codec or HUB_CODEC)
    return made
