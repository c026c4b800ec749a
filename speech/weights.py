"""Checkpoints: choose V2 or TTS 3, find, check, load into any sharding.

A model starts empty on torch's meta device and reads its weights row by row, so no process holds
more than its shard. V2 has two layouts: transformers' native one, and the 2025 layout that
boson-ai's code serves; NAMES and CONFIG map the names of one to the other. Higgs TTS 3 has one
layout, with the codec and both copies of the tied tables, for sglang-omni and vllm-omni. Missing,
unexpected or misshapen weights stop the run.
"""
import json
import re
import shutil
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, HiggsAudioV2Config, logging
from transformers import HiggsAudioV2ForConditionalGeneration as HiggsAudioV2

from core import checkpoint, dist, json_files, tensor_io
from core.cli import UserError, first_line, require

logging.disable_progress_bar()      # for weights: one bar per rank would fill the log

HUB_CODEC = "bosonai/higgs-audio-v2-tokenizer"  # a processor's codec if the base names none
KINDS = {"--model_path": ("higgs_audio_v2", "higgs_audio", "higgs_multimodal_qwen3"),
         "--audio_tokenizer_path": ("higgs_audio_v2_tokenizer",)}       # {flag: model_types}
EXTRA_FILES = ("processor_config.json", "preprocessor_config.json", "chat_template.jinja")
BUFFERS = {"rotary_emb.inv_freq", "rotary_emb.original_inv_freq",
           "embed_audio_tokens.audio_tokens_offsets"}
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


# ---- Higgs-Audio V2 or Higgs TTS 3: chosen once; only the chosen module is imported


def is_tts3(model_type):
    """True if a model_type, from config.json or read_config, is that of Higgs TTS 3."""
    return model_type in ("higgs_multimodal_qwen3", "qwen3")


def module(config):
    """speech.v3 or speech.v2. config: config.json as a dict, or the result of read_config."""
    kind = config["model_type"] if isinstance(config, dict) else config.model_type
    return import_module("speech.v3" if is_tts3(kind) else "speech.v2")    # both import this file


def find_files(world, model_path, codec_path):
    """(model folder, its config.json as a dict, codec folder). Raises UserError. Collective."""
    require(codec_path, "give --audio_tokenizer_path, such as bosonai/higgs-audio-v2-tokenizer")
    for find, path in ((find_model, model_path), (find_codec, codec_path)):
        dist.rank0(world, find, path)       # rank 0 downloads hub names before the others look
    folder, config = find_model(model_path)
    if world.is_main and module(config).LICENCE:
        print(f"licence    {module(config).LICENCE}", flush=True)
    return folder, config, find_codec(codec_path)[0]


# ---- Folders and configuration


def find_checkpoint(name, flag):
    """(folder, config.json as a dict) of a folder or hub name given by a flag. Raises UserError."""
    folder = tensor_io.find_folder(name, flag)
    try:
        config = json_files.read_object(folder / "config.json")
    except UserError as error:
        require(not (folder / "adapter_config.json").is_file(), f"{flag} {name}: is an adapter; "
                "give the base as --model_path and this as --adapter, or merge both: lora.py merge")
        inside = [f"; give {path}" for _, path in checkpoint.list_checkpoints(folder)[-1:]]
        raise UserError(f"{flag} {name}: has no readable config.json ({error}){''.join(inside)}")
    kind = config.get("model_type")
    swapped = kind in sum(KINDS.values(), ())
    require(kind in KINDS[flag], f"{flag} {name}: is a {kind!r} checkpoint, not "
            f"{' or '.join(map(repr, KINDS[flag]))}"
            + "; --model_path and --audio_tokenizer_path are swapped" * swapped)
    return folder, config


find_model = partial(find_checkpoint, flag="--model_path")
find_codec = partial(find_checkpoint, flag="--audio_tokenizer_path")


def native_config(config):
    """HiggsAudioV2Config of a config.json dict in the native or the 2025 layout. UserError."""
    if config["model_type"] == "higgs_audio_v2":
        native = HiggsAudioV2Config.from_dict(config)
    else:
        # a variant that the native class computes differently
        require(not config.get("audio_embed_avg"), "config.json: audio_embed_avg is not supported")
        text = config.get("text_config", {})
        native = HiggsAudioV2Config(
            **{key: text[key] for key in TEXT_KEYS if key in text},
            **{native_key: config[key] for key, native_key in CONFIG.items() if key in config},
            **{key: config[key] for key in EXTRA_IDS if key in config},
            codebook_size=config.get("audio_codebook_size", 1024) + 2)
    end = native.audio_stream_eos_id
    require(native.codebook_size > end, f"config.json has codebook_size {native.codebook_size}, "
            f"but end-of-stream is code {end}: it must be {end + 1}")
    return native


def load_tokenizer(path, load=partial(AutoTokenizer.from_pretrained, trust_remote_code=False)):
    """Tokenizer of a model folder. Raises UserError."""
    try:
        return load(path)
    except Exception as error:
        raise UserError(f"{path}: no tokenizer can be loaded from it ({first_line(error)})")


# ---- The model and its weights


def empty_model(config_dict, dtype, folder=None):
    """Native model with its text head on the meta device, of a config.json dict. folder: its
    generation_config.json is used if native: of the 2025 one, speech never emits the end token."""
    config = native_config(config_dict)
    with torch.device("meta"):
        model = HiggsAudioV2(config, use_text_head=True).to(dtype)
    config.architectures, config.dtype = [type(model).__name__], dtype
    stored = Path(folder or "") / "generation_config.json"
    if folder and stored.is_file() and "ras_win_len" in json_files.read_object(stored):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    else:
        model.generation_config = generation_config(config)
    return model


def generation_config(config):
    """The released settings, with the ids of a HiggsAudioV2Config."""
    return GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id, do_sample=True, temperature=1.0, top_k=50, top_p=0.95,
        ras_win_len=7, ras_win_max_num_repeat=2, use_text_head=True)


def weight_parts(folder, config):
    """{native name: [slice, ...]} of a folder in the native or 2025 layout. config: config.json.

    Some 2025 tensors are split in two; those of a name are joined along dimension 0. Follows
    transformers' convert_higgs_audio_v2_to_hf.py."""
    slices, parts = tensor_io.open_tensors(tensor_io.files_of(folder, "model")), {}
    if config["model_type"] == "higgs_audio_v2":
        return {name: [tensor] for name, tensor in slices.items()}
    for original in sorted(slices):     # "..._frozen" is sorted before "..._trainable"
        if not any(dropped in original for dropped in DROPPED):
            name = SPLIT.sub(r"\1", original)
            old, new = next((pair for pair in NAMES if name.startswith(pair[0])), ("", ""))
            parts.setdefault(new + name.removeprefix(old), []).append(slices[original])
    return parts


def check_weights(model, parts, folder):
    """Raise UserError unless the files hold exactly the weights of a model without adapters."""
    problem = tensor_io.mismatch({n: p.shape for n, p in model.named_parameters()}, parts)
    require(not problem, f"{folder}: {problem}")


def load_weights(weights, parts, world=None):
    """Fill {native name: plain or sharded tensor} from weight_parts. Collective with a world."""
    for name, tensor in weights.items():
        tensor_io.read_rows(name, tensor.detach(), parts[name])
    dist.barrier(world or dist.World())     # a slow disk may take long


def reset_buffers(model, device):
    """Compute the buffers that no file contains, which to_empty leaves unset."""
    inner, config = model.model, model.config
    inner.rotary_emb = type(inner.rotary_emb)(config).to(device)
    books = torch.arange(config.num_codebooks, device=device)
    inner.embed_audio_tokens.audio_tokens_offsets = books * config.codebook_size
    check_buffers(inner, BUFFERS)


def check_buffers(model, known):
    unknown = {name for name, _ in model.named_buffers()} - known
    require(not unknown, f"this version of transformers has unknown buffers: {sorted(unknown)}")


# ---- Files besides the weights


def save_config(model, tokenizer, folder, source, codec=None):
    """Write a native checkpoint's files except its weights. codec: folder or hub name for the
    processor; None: the codec of source, else HUB_CODEC."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    folder, source = Path(folder), Path(source)
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


def feature_extractor():
    """Feature extractor of the released codec: (n,) mono float32 at 24 kHz, padded to frames."""
    from transformers import DacFeatureExtractor
    return DacFeatureExtractor(feature_size=1, sampling_rate=24000, hop_length=960)
