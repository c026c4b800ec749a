"""The layout of 2025 of a Higgs-Audio V2 checkpoint, which boson-ai's own code serves, both ways.

Names of tensors and config.json, from that layout to transformers' native one and back.
"""
import json

from core.cli import UserError

NAMES = (("audio_codebook_embeddings.", "model.embed_audio_tokens.embed_audio_tokens."),
         ("embed_tokens.", "model.embed_tokens."), ("layers.", "model.layers."),
         ("norm.", "model.norm."),
         ("audio_decoder_proj.", ""))       # last: every native name begins with ""
EXTRA_IDS = ("audio_delay_token_id", "bos_token_id", "eos_token_id")    # config.json lacks them
DROPPED = ("audio_codebook_weights", "inv_freq")
SPLIT = {f".{kind}_{part}.weight": (".weight", order) for kind in ("embedding", "linear")
         for order, part in enumerate(("frozen", "trainable"))}     # to be joined in this order
TEXT_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act",
             "max_position_embeddings")


def native_settings(config):
    """Keywords of HiggsAudioV2Config for a 2025 config.json dict. UserError for other variants."""
    text = config.get("text_config", {})
    layers = list(range(text.get("num_hidden_layers", 28)))
    released = {"audio_adapter_type": ["dual_ffn", "dual_ffn_fast_forward"],
                "audio_dual_ffn_layers": [layers], "use_audio_out_self_attention": [False, None],
                "use_audio_out_embed_projector": [False, None], "audio_embed_avg": [False, None],
                "skip_audio_tower": [True]}
    wrong = [key for key, values in released.items() if config.get(key) not in values]
    if wrong:
        raise UserError("this 2025-format model has parts the native class lacks: "
                        + ", ".join(f"{key}={config.get(key)!r}" for key in wrong))
    return {**{key: text[key] for key in TEXT_KEYS if key in text},
            "num_codebooks": config.get("audio_num_codebooks", 8),
            "codebook_size": config.get("audio_codebook_size", 1024) + 2,
            "audio_token_id": config["audio_out_token_idx"],
            "audio_bos_token_id": config["audio_out_bos_token_id"],
            "pad_token_id": config.get("pad_token_id", 128001),
            **{key: config[key] for key in EXTRA_IDS if key in config},
            "audio_stream_bos_id": config.get("audio_stream_bos_id", 1024),
            "audio_stream_eos_id": config.get("audio_stream_eos_id", 1025)}


def native_names(names):
    """{native name: [2025 names to join along dimension 0]}; some are split in two there.

    Names: transformers' convert_higgs_audio_v2_to_hf.py. Raises UserError.
    """
    parts = {}
    for original in names:
        if any(drop in original for drop in DROPPED):
            continue
        name, order = original, 0
        for suffix, (plain, place) in SPLIT.items():
            if name.endswith(suffix):
                name, order = name.removesuffix(suffix) + plain, place
        name = next((new + name.removeprefix(old) for old, new in NAMES if name.startswith(old)),
                    name)
        if order in parts.setdefault(name, {}):
            raise UserError(f"two tensors of the checkpoint map to {name}")
        parts[name][order] = original
    return {name: [found[i] for i in sorted(found)] for name, found in parts.items()}


def original_names(names):
    """{native name: 2025 name}: the inverse of native_names; split tensors stay joined."""
    return {name: next(old + name.removeprefix(new) for old, new in NAMES if name.startswith(new))
            for name in names}


def original_config(native, tokenizer, dtype):
    """config.json dict of the 2025 layout for a native config, key by key as released.

    The rope parameters are Llama 3.2's spelling, numerically the native ones. Ids that the layout
    has no place for are added where they differ from the released model's; boson's config class
    keeps keys it does not know.
    """
    def token(name):
        return tokenizer.convert_tokens_to_ids(name)
    text = {key: getattr(native, key) for key in (
        *TEXT_KEYS, "initializer_range", "attention_bias", "attention_dropout", "mlp_bias")}
    text |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": dtype,
             "bos_token_id": token("<|begin_of_text|>"), "eos_token_id": token("<|end_of_text|>"),
             "max_position_embeddings": 131072,     # a server may refuse more than native's 2048
             "rope_theta": 500000.0, "rope_scaling": {
                 "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                 "rope_type": "llama3", "original_max_position_embeddings": 8192}}
    usual = type(native)()
    extra = {key: getattr(native, key) for key in EXTRA_IDS
             if getattr(native, key) != getattr(usual, key)}
    return extra | {
        "model_type": "higgs_audio", "architectures": ["HiggsAudioModel"], "text_config": text,
        "torch_dtype": dtype, "hidden_size": native.hidden_size,
        "audio_adapter_type": "dual_ffn_fast_forward", "audio_decoder_proj_num_layers": 0,
        "audio_dual_ffn_layers": list(range(native.num_hidden_layers)), "audio_embed_avg": False,
        "audio_ffn_hidden_size": native.hidden_size,
        "audio_ffn_intermediate_size": native.intermediate_size,
        "audio_num_codebooks": native.num_codebooks,
        "audio_codebook_size": native.codebook_size - 2,
        "audio_stream_bos_id": native.audio_stream_bos_id,
        "audio_stream_eos_id": native.audio_stream_eos_id,
        "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
        "audio_in_token": "<|AUDIO|>", "audio_out_bos_token": "<|audio_out_bos|>",
        "audio_out_token": "<|AUDIO_OUT|>", "audio_eos_token_id": token("<|audio_eos|>"),
        "audio_in_token_idx": token("<|AUDIO|>"),
        "audio_out_bos_token_id": native.audio_bos_token_id,
        "audio_out_token_idx": native.audio_token_id, "pad_token_id": native.pad_token_id,
        "skip_audio_tower": True, "use_delay_pattern": True, "encode_audio_in_tokens": True,
        "encode_whisper_embed": False, "use_audio_out_embed_projector": False,
        "use_audio_out_self_attention": False, "use_rq_transformer": False}


def save_original_config(native, tokenizer, folder, config):
    """The files of a 2025 checkpoint beside its weights; config: config.json of the source.

    boson-ai's code runs on transformers 4.46, which does not know the tokenizer class name that
    newer ones write.
    """
    def write(name, values, **options):
        (folder / name).write_text(json.dumps(values, indent=2, **options) + "\n")
    dtype = str(native.dtype).removeprefix("torch.")
    original = config | {"torch_dtype": dtype} if config["model_type"] == "higgs_audio" else \
        original_config(native, tokenizer, dtype)
    write("config.json", original, sort_keys=True)
    write("generation_config.json", {
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
    write("tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
