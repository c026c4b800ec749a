"""The original 2025 layout of a Higgs-Audio V2 checkpoint, which boson-ai's own code serves: both directions.

Names of tensors and config.json, from that layout to transformers' native one and back.
"""
import json
from pathlib import Path

from common.distributed import UserError

NAMES = (("audio_codebook_embeddings.", "model.embed_audio_tokens.embed_audio_tokens."),
         ("embed_tokens.", "model.embed_tokens."), ("layers.", "model.layers."), ("norm.", "model.norm."),
         ("audio_decoder_proj.", ""))       # last: every native name begins with ""
EXTRA_IDS = ("audio_delay_token_id", "bos_token_id", "eos_token_id")     # the 2025 config.json has no place for them
DROPPED = ("audio_codebook_weights", "inv_freq")
SPLIT = {".embedding_frozen.weight": (".weight", 0), ".embedding_trainable.weight": (".weight", 1),
         ".linear_frozen.weight": (".weight", 0), ".linear_trainable.weight": (".weight", 1)}


def native_settings(config):
    """Keywords of HiggsAudioV2Config for a 2025-format config.json dict. Raises UserError for unreleased variants."""
    text = config.get("text_config", {})
    layers = list(range(text.get("num_hidden_layers", 28)))
    released = {"audio_adapter_type": ["dual_ffn", "dual_ffn_fast_forward"], "audio_dual_ffn_layers": [layers],
                "use_audio_out_self_attention": [False, None], "use_audio_out_embed_projector": [False, None],
                "audio_embed_avg": [False, None], "skip_audio_tower": [True]}
    wrong = [key for key, values in released.items() if config.get(key) not in values]
    if wrong:
        raise UserError("this 2025-format model has parts the native class lacks: "
                        + ", ".join(f"{key}={config.get(key)!r}" for key in wrong))
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings")
    return {**{key: text[key] for key in keep if key in text}, "num_codebooks": config.get("audio_num_codebooks", 8),
            "codebook_size": config.get("audio_codebook_size", 1024) + 2,
            "audio_token_id": config["audio_out_token_idx"], "audio_bos_token_id": config["audio_out_bos_token_id"],
            "pad_token_id": config.get("pad_token_id", 128001),
            **{key: config[key] for key in EXTRA_IDS if key in config},
            "audio_stream_bos_id": config.get("audio_stream_bos_id", 1024),
            "audio_stream_eos_id": config.get("audio_stream_eos_id", 1025)}


def native_names(names):
    """{native name: [names of the parts to join along dimension 0]} for 2025-format tensor names. Raises UserError.

    There some tensors are split into a frozen and a trainable part.
    Key map: transformers' convert_higgs_audio_v2_to_hf.py.
    """
    parts = {}
    for original in names:
        if any(drop in original for drop in DROPPED):
            continue
        name, order = original, 0
        for suffix, (plain, place) in SPLIT.items():
            if name.endswith(suffix):
                name, order = name.removesuffix(suffix) + plain, place
        name = next((new + name.removeprefix(old) for old, new in NAMES if name.startswith(old)), name)
        if order in parts.setdefault(name, {}):
            raise UserError(f"two tensors of the checkpoint map to {name}")
        parts[name][order] = original
    return {name: [p[i] for i in sorted(p)] for name, p in parts.items()}


def original_names(names):
    """{native name: 2025-format name}: the inverse of native_names, whose split tensors stay joined."""
    return {name: next(old + name.removeprefix(new) for old, new in NAMES if name.startswith(new))
            for name in names}


def original_config(native, tokenizer, dtype):
    """config.json dict of the 2025 layout for a native config: key by key that of the released checkpoint.

    The rope parameters are Llama 3.2's spelling, numerically the native ones. Ids that the layout has no place for are
    added only where they differ from the released model's; boson's config class keeps keys it does not know.
    """
    def token(name):
        return tokenizer.convert_tokens_to_ids(name)
    text = {key: getattr(native, key) for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "num_key_value_heads", "rms_norm_eps", "hidden_act", "initializer_range", "attention_bias", "attention_dropout",
        "mlp_bias")}
    text |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": dtype,
             "bos_token_id": token("<|begin_of_text|>"), "eos_token_id": token("<|end_of_text|>"),
             "max_position_embeddings": 131072,     # the released one's: a server may refuse more than native's 2048
             "rope_theta": 500000.0, "rope_scaling": {
                 "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                 "original_max_position_embeddings": 8192}}
    usual = type(native)()
    return {key: getattr(native, key) for key in EXTRA_IDS if getattr(native, key) != getattr(usual, key)} | {
        "model_type": "higgs_audio", "architectures": ["HiggsAudioModel"], "text_config": text, "torch_dtype": dtype,
        "audio_adapter_type": "dual_ffn_fast_forward", "audio_decoder_proj_num_layers": 0, "audio_embed_avg": False,
        "audio_dual_ffn_layers": list(range(native.num_hidden_layers)), "hidden_size": native.hidden_size,
        "audio_ffn_hidden_size": native.hidden_size, "audio_ffn_intermediate_size": native.intermediate_size,
        "audio_num_codebooks": native.num_codebooks, "audio_codebook_size": native.codebook_size - 2,
        "audio_stream_bos_id": native.audio_stream_bos_id, "audio_stream_eos_id": native.audio_stream_eos_id,
        "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>", "audio_in_token": "<|AUDIO|>",
        "audio_out_bos_token": "<|audio_out_bos|>", "audio_out_token": "<|AUDIO_OUT|>",
        "audio_eos_token_id": token("<|audio_eos|>"), "audio_in_token_idx": token("<|AUDIO|>"),
        "audio_out_bos_token_id": native.audio_bos_token_id, "audio_out_token_idx": native.audio_token_id,
        "pad_token_id": native.pad_token_id, "skip_audio_tower": True, "use_delay_pattern": True,
        "encode_audio_in_tokens": True, "encode_whisper_embed": False, "use_audio_out_embed_projector": False,
        "use_audio_out_self_attention": False, "use_rq_transformer": False}


def save_original_config(native, tokenizer, folder, source, config):
    """The files of a 2025-layout checkpoint beside its weights; config: source's config.json dict. -> {file: what}.

    boson-ai's code runs on transformers 4.46, which does not know the tokenizer class name that newer ones write.
    """
    dtype = str(native.dtype).removeprefix("torch.")
    if config["model_type"] == "higgs_audio":
        config = config | {"torch_dtype": dtype}
    else:
        config = original_config(native, tokenizer, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {"_from_model_config": True, "pad_token_id": native.pad_token_id, "transformers_version": "4.46.3",
                  "bos_token_id": tokenizer.convert_tokens_to_ids("<|begin_of_text|>"),
                  "eos_token_id": tokenizer.convert_tokens_to_ids("<|end_of_text|>")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)        # the native processor's; nothing here reads it
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for key in ("backend", "processor_class", "is_local"):
        settings.pop(key, None)
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")
    return {}


# --------------------------------------------------------------------------------------------------
# Files of a native processor, which folders of that layout lack


def name_codec(folder, codec):
    """Write into a folder's processor files which codec is theirs: a folder or hub name."""
    # by hand: a processor can only name a codec that is loaded, and loading one takes torchaudio
    path = folder / "processor_config.json"
    config = json.loads(path.read_text()) | {"audio_tokenizer": {
        "audio_tokenizer_class": "HiggsAudioV2TokenizerModel",
        "audio_tokenizer_name_or_path": codec}}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_processor(folder, tokenizer):
    """Processor files for a base without any; the codec's name is still to be put in."""
    from transformers import HiggsAudioV2Processor
    extractor = feature_extractor()
    extractor.save_pretrained(folder)
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    processor = HiggsAudioV2Processor(extractor, tokenizer, audio_tokenizer=None,
                                      chat_template=template)
    processor.save_pretrained(folder)


def feature_extractor():
    """That of the released codec: takes (n,) mono float32 at 24 kHz, by default pads to frames."""
    from transformers import DacFeatureExtractor
    return DacFeatureExtractor(feature_size=1, sampling_rate=24000, hop_length=960)
