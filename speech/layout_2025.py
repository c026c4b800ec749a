"""V2's checkpoint layout of 2025, which boson-ai's code serves, and a native checkpoint's files.

NAMES and CONFIG map the layout's names to those of transformers' native one. A base in that layout
has no native files besides its weights, so a checkpoint gets new ones.
"""
import json
import re
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig

from core import checkpoint, json_files, tensor_io
from core.cli import require

# weight names: (2025 layout, native)
NAMES = (("audio_codebook_embeddings.", "model.embed_audio_tokens.embed_audio_tokens."),
         ("embed_tokens.", "model.embed_tokens."), ("layers.", "model.layers."),
         ("norm.", "model.norm."), ("audio_decoder_proj.", ""))     # "" begins every name: last
DROPPED = ("audio_codebook_weights", "inv_freq")        # 2025 tensors without a native one
SPLIT = re.compile(r"\.(?:embedding|linear)_(?:frozen|trainable)(\.weight)$")
# config.json keys: in both layouts, {2025: native}, and in the native layout only
TEXT_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act",
             "max_position_embeddings")
CONFIG = {"audio_num_codebooks": "num_codebooks", "audio_out_token_idx": "audio_token_id",
          "audio_out_bos_token_id": "audio_bos_token_id", "pad_token_id": "pad_token_id",
          "audio_stream_bos_id": "audio_stream_bos_id",
          "audio_stream_eos_id": "audio_stream_eos_id"}
EXTRA_IDS = ("audio_delay_token_id", "bos_token_id", "eos_token_id")
# all other keys of the 2025 layout, as released
RELEASED = {
    "model_type": "higgs_audio", "architectures": ["HiggsAudioModel"],
    "audio_adapter_type": "dual_ffn_fast_forward", "audio_decoder_proj_num_layers": 0,
    "audio_embed_avg": False, "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>", "audio_in_token": "<|AUDIO|>",
    "audio_out_bos_token": "<|audio_out_bos|>", "audio_out_token": "<|AUDIO_OUT|>",
    "skip_audio_tower": True, "use_delay_pattern": True, "encode_audio_in_tokens": True,
    "encode_whisper_embed": False, "use_audio_out_embed_projector": False,
    "use_audio_out_self_attention": False, "use_rq_transformer": False}
RELEASED_TEXT = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 131072,     # a server may refuse more than native's 2048
    # the native rope parameters under Llama 3.2's names
    "rope_theta": 500000.0, "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
        "original_max_position_embeddings": 8192}}


HUB_CODEC = "bosonai/higgs-audio-v2-tokenizer"  # a processor's codec if the base names none
EXTRA_FILES = ("processor_config.json", "preprocessor_config.json", "chat_template.jinja")


def native_settings(config):
    """Arguments of HiggsAudioV2Config for a config.json dict of 2025. UserError."""
    # a variant that the native class computes differently
    require(not config.get("audio_embed_avg"), "config.json: audio_embed_avg is not supported")
    text = config.get("text_config", {})
    return {**{key: text[key] for key in TEXT_KEYS if key in text},
            **{native_key: config[key] for key, native_key in CONFIG.items() if key in config},
            **{key: config[key] for key in EXTRA_IDS if key in config},
            "codebook_size": config.get("audio_codebook_size", 1024) + 2}


class Joined:
    """Slices of safetensors files as one slice: joined along dimension 0."""

    def __init__(self, pieces):
        self.pieces = pieces

    def get_shape(self):
        return [sum(piece.get_shape()[0] for piece in self.pieces), *self.pieces[0].get_shape()[1:]]

    def get_dtype(self):
        kinds = {piece.get_dtype() for piece in self.pieces}
        return min(kinds - tensor_io.FLOATS or kinds)

    def __getitem__(self, rows):
        start, stop, _ = rows.indices(self.get_shape()[0])
        tensors = []
        for piece in self.pieces:
            tensors.append(piece[max(0, start):max(0, stop)])
            start, stop = (row - piece.get_shape()[0] for row in (start, stop))
        return torch.cat(tensors)


def native_parts(slices):
    """{native name: slice} of {2025 name: slice}. Some tensors are split in two; those of a name
    are joined along dimension 0. Follows transformers' convert_higgs_audio_v2_to_hf.py."""
    parts = {}
    for original in sorted(slices):     # "..._frozen" is sorted before "..._trainable"
        if not any(dropped in original for dropped in DROPPED):
            name = SPLIT.sub(r"\1", original)
            old, new = next((pair for pair in NAMES if name.startswith(pair[0])), ("", ""))
            parts.setdefault(new + name.removeprefix(old), []).append(slices[original])
    return {name: pieces[0] if len(pieces) == 1 else Joined(pieces)
            for name, pieces in parts.items()}


def generation_config(config):
    """The released settings, with the ids of a HiggsAudioV2Config."""
    return GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id, do_sample=True, temperature=1.0, top_k=50, top_p=0.95,
        ras_win_len=7, ras_win_max_num_repeat=2, use_text_head=True)


def feature_extractor():
    """Feature extractor of the released codec: (n,) mono float32 at 24 kHz, padded to frames."""
    from transformers import DacFeatureExtractor
    return DacFeatureExtractor(feature_size=1, sampling_rate=24000, hop_length=960)


def save_config(model, tokenizer, folder, source, codec=None):
    """Write a native checkpoint's files except its weights: those of the base's folder `source`,
    else new ones. codec: folder or hub name for the processor; None: that of source, else
    HUB_CODEC."""
    folder, source = Path(folder), Path(source)
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings, stored = generation_config(model.config), source / "generation_config.json"
    # with the settings of 2025, speech never emits the end token
    if stored.is_file() and "ras_win_len" in json_files.read_object(stored):
        settings = GenerationConfig.from_pretrained(source)
    settings.save_pretrained(folder)
    path = folder / "processor_config.json"
    if (source / path.name).is_file():
        for name in EXTRA_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    else:
        from transformers import HiggsAudioV2Processor
        template = Path(__file__).with_name("chat_template.jinja").read_text()
        feature_extractor().save_pretrained(folder)
        HiggsAudioV2Processor(feature_extractor(), tokenizer, audio_tokenizer=None,
                              chat_template=template).save_pretrained(folder)
        codec = codec or HUB_CODEC
    if codec:   # by hand: a processor accepts only a loaded codec, and loading one needs torchaudio
        config = json.loads(path.read_text()) | {"audio_tokenizer": {
            "audio_tokenizer_class": "HiggsAudioV2TokenizerModel",
            "audio_tokenizer_name_or_path": codec}}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def original_config(native, tokenizer, dtype):
    """config.json dict of the 2025 layout for a native config. Of EXTRA_IDS, which that
    layout has no keys for, it has those that differ from the released model's."""
    def token(name):
        return tokenizer.convert_tokens_to_ids(name)
    text = {key: getattr(native, key) for key in (
        *TEXT_KEYS, "initializer_range", "attention_bias", "attention_dropout", "mlp_bias")}
    text |= RELEASED_TEXT | {
        "torch_dtype": dtype, "bos_token_id": token("<|begin_of_text|>"),
        "eos_token_id": token("<|end_of_text|>")}
    extra = {key: getattr(native, key) for key in EXTRA_IDS
             if getattr(native, key) != getattr(type(native)(), key)}
    return extra | RELEASED | {
        **{key: getattr(native, native_key) for key, native_key in CONFIG.items()},
        "text_config": text, "torch_dtype": dtype, "hidden_size": native.hidden_size,
        "audio_dual_ffn_layers": list(range(native.num_hidden_layers)),
        "audio_ffn_hidden_size": native.hidden_size,
        "audio_ffn_intermediate_size": native.intermediate_size,
        "audio_codebook_size": native.codebook_size - 2,
        "audio_eos_token_id": token("<|audio_eos|>"), "audio_in_token_idx": token("<|AUDIO|>")}


def save_original_config(native, tokenizer, folder, config):
    """Write a 2025 checkpoint's files except its weights, for transformers 4.46, which boson's
    code needs. config: config.json of the source."""
    dtype = str(native.dtype).removeprefix("torch.")
    if config["model_type"] != "higgs_audio":
        config = original_config(native, tokenizer, dtype)
    checkpoint.write_json(folder / "config.json", config | {"torch_dtype": dtype})
    checkpoint.write_json(folder / "generation_config.json", {
        "_from_model_config": True, "pad_token_id": native.pad_token_id,
        "transformers_version": "4.46.3",
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|begin_of_text|>"),
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|end_of_text|>")})
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)    # the native processor's
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for key in ("backend", "processor_class", "is_local"):
        settings.pop(key, None)
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    checkpoint.write_json(folder / "tokenizer_config.json", settings)
