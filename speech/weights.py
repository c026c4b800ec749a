"""Checkpoints: choose V2 or TTS 3, find, check, load into any sharding.

A model starts empty on torch's meta device and reads its weights row by row, so no process holds
more than its shard. Missing, unexpected or misshapen weights stop the run. V2 has two layouts:
transformers' native one, and that of 2025, of speech/layout_2025.py.
"""
from functools import partial
from importlib import import_module

import torch
from transformers import AutoTokenizer, HiggsAudioV2Config, logging
from transformers import HiggsAudioV2ForConditionalGeneration as HiggsAudioV2

from core import adapters, dist, json_files, tensor_io
from core.cli import UserError, first_line, require

logging.disable_progress_bar()      # for weights: one bar per rank would fill the log

CODEC_FLAG = "--audio_tokenizer_path"
KINDS = {"--model_path": ("higgs_audio_v2", "higgs_audio", "higgs_multimodal_qwen3"),
         CODEC_FLAG: ("higgs_audio_v2_tokenizer",)}     # {flag: model_types}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA_TARGETS = {        # endings of module names
    "attention": ATTENTION,
    "attention+audio_mlp": [*ATTENTION, "audio_mlp.gate_proj", "audio_mlp.up_proj",
                            "audio_mlp.down_proj"],
    # both FFNs, no head, no embedding
    "all-linear": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}
BUFFERS = {"rotary_emb.inv_freq", "rotary_emb.original_inv_freq",
           "embed_audio_tokens.audio_tokens_offsets"}


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
    for path, flag in ((model_path, "--model_path"), (codec_path, CODEC_FLAG)):
        dist.rank0(world, find_model, path, flag)   # downloads hub names before other ranks look
    folder, config = find_model(model_path)
    if world.is_main and module(config).LICENCE:
        print(f"licence    {module(config).LICENCE}", flush=True)
    return folder, config, find_model(codec_path, CODEC_FLAG)[0]


# ---- Folders and configuration


def find_model(name, flag="--model_path"):
    """(folder, config.json as a dict) of a folder or hub name given by a flag. Raises UserError."""
    folder = tensor_io.find_folder(name, flag)
    path = folder / "config.json"
    require(path.is_file() or not (folder / "adapter_config.json").is_file(), f"{flag} {name}: is "
            "an adapter; give its base as --model_path and this as --adapter")
    config = json_files.read_object(path)
    kind = config.get("model_type")
    require(kind in KINDS[flag], f"{flag} {name}: is a {kind!r} checkpoint, not "
            f"{' or '.join(map(repr, KINDS[flag]))}")
    return folder, config


def read_config(config):
    """HiggsAudioV2Config of a config.json dict in the native or the 2025 layout. UserError."""
    if config["model_type"] == "higgs_audio_v2":
        native = HiggsAudioV2Config.from_dict(config)
    else:
        from speech import layout_2025
        native = HiggsAudioV2Config(**layout_2025.native_settings(config))
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


def empty_model(config_dict, dtype):
    """Native model with its text head on the meta device, of a config.json dict."""
    config = read_config(config_dict)
    with torch.device("meta"):
        model = HiggsAudioV2(config, use_text_head=True).to(dtype)
    config.architectures, config.dtype = [type(model).__name__], dtype
    return model


def weight_parts(folder, config):
    """{native name: slice} of a folder in the native or 2025 layout. config: config.json."""
    slices = tensor_io.open_tensors(tensor_io.files_of(folder, "model"))
    if config["model_type"] == "higgs_audio_v2":
        return slices
    from speech import layout_2025
    return layout_2025.native_parts(slices)


def check_weights(model, parts, folder):
    """Raise UserError unless the files hold exactly the weights of a model without adapters."""
    tensor_io.check_names({n: p.shape for n, p in model.named_parameters()}, parts, folder)


def add_lora(model, rank, alpha, dropout, targets, base_name, table=False, **kinds):
    """adapters.add_lora for a native model; with `table`, TTS 3's audio table is trained in full.

    targets: a name in LORA_TARGETS, or comma-separated module name endings. kinds: rslora, dora."""
    whole = module(model.config).WHOLE_MODULES
    require(whole or not table, "--train_audio_table is for Higgs TTS 3; V2 has --freeze_llm")
    names = ",".join(LORA_TARGETS.get(targets, [targets]))
    net = adapters.add_lora(model, [model], rank, alpha, dropout, names, base_name, task_type=None,
                            modules_to_save=list(whole) if table else None, **kinds)
    if table:       # trained, so in fp32; this one copy is both embedding and head
        model.audio_embedding.modules_to_save.float()
    return net


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
