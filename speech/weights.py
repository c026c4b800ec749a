"""Checkpoints: choose V2 or TTS 3, find, check, load into any sharding, save as transformers reads.

A model starts empty on torch's meta device and reads its weights row by row, so no process holds
more than it trains. V2 is read in its native and 2025 formats; missing, unexpected or misshapen
weights stop the run.
"""
import json
import shutil
from importlib import import_module
from pathlib import Path

import torch

from core import checkpoint, cli, dist, json_files, tensor_io
from core.cli import UserError, require

try:
    import torchaudio  # noqa: F401  (transformers imports it if it finds it, and dies with it)
except (ImportError, OSError, RuntimeError) as broken:
    if not isinstance(broken, ModuleNotFoundError):     # absent is fine, broken is not
        cli.fail(f"torchaudio does not fit torch {torch.__version__} "
                 f"({str(broken).splitlines()[0]}), and every transformers import fails with it. "
                 "Run launch/setup.sh, or: pip uninstall torchaudio (training from a filled "
                 "--code_cache needs none)")

from transformers import AutoTokenizer, GenerationConfig, HiggsAudioV2Config, logging
from transformers import HiggsAudioV2ForConditionalGeneration as HiggsAudioV2

logging.disable_progress_bar()      # of weights: one per rank would fill the log

HUB_CODEC = "bosonai/higgs-audio-v2-tokenizer"  # what a processor names if the base names no codec
EXTRA_FILES = ("processor_config.json", "preprocessor_config.json", "chat_template.jinja")
SWAPPED = "--model_path and --audio_tokenizer_path are swapped"
BUFFERS = {"rotary_emb.inv_freq", "rotary_emb.original_inv_freq",
           "embed_audio_tokens.audio_tokens_offsets"}
# of the layout of 2025: its names, ours
NAMES = (("audio_codebook_embeddings.", "model.embed_audio_tokens.embed_audio_tokens."),
         ("embed_tokens.", "model.embed_tokens."), ("layers.", "model.layers."),
         ("norm.", "model.norm."),
         ("audio_decoder_proj.", ""))       # last: every native name begins with ""
EXTRA_IDS = ("audio_delay_token_id", "bos_token_id", "eos_token_id")    # not in config.json
DROPPED = ("audio_codebook_weights", "inv_freq")
SPLIT = {f".{kind}_{part}.weight": (".weight", order) for kind in ("embedding", "linear")
         for order, part in enumerate(("frozen", "trainable"))}     # to be joined in this order
TEXT_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act",
             "max_position_embeddings")


# ---- Higgs-Audio V2 or Higgs TTS 3: chosen once, and only the chosen one is imported


def is_third(model_type):
    """True if a model_type of config.json or read_config is that of Higgs TTS 3."""
    return model_type in ("higgs_multimodal_qwen3", "qwen3")


def module(config):
    """speech.v3 or v2, which have the same functions and constants. config: config.json as a dict,
    or the result of read_config."""
    kind = config["model_type"] if isinstance(config, dict) else config.model_type
    return import_module("speech.v3" if is_third(kind) else "speech.v2")    # both import this file


def find_files(world, model_path, codec_path):
    """(model folder, its config.json as a dict, codec folder). Raises UserError. Collective."""
    require(codec_path, "give --audio_tokenizer_path, such as bosonai/higgs-audio-v2-tokenizer")
    for find, path in ((find_model, model_path), (find_codec, codec_path)):
        dist.rank0(world, find, path)       # hub names are downloaded before the others look
    folder, config = find_model(model_path)
    if world.is_main and module(config).LICENCE:
        print(f"licence    {module(config).LICENCE}", flush=True)
    return folder, config, find_codec(codec_path)[0]


# ---- Folders and configuration


def find_checkpoint(name, flag, model_types, advice):
    """(local folder, its config.json as a dict) of a folder or hub name. Raises UserError.
    advice: {model_type of another checkpoint: advice to the user who gave it}."""
    folder = tensor_io.find_folder(name, flag)
    try:
        config = json_files.read_object(folder / "config.json")
    except UserError as error:
        if (folder / "adapter_config.json").is_file():
            raise UserError(f"{flag} {name}: is an adapter; give the base as --model_path and this "
                            "folder as --adapter (generate_tts.py, lora.py), or merge both "
                            "(lora.py merge)")
        inside = checkpoint.list_checkpoints(folder)
        hint = f"; give one of those in it, such as {inside[-1][1]}" if inside else ""
        raise UserError(f"{flag} {name}: has no readable config.json ({error}){hint}")
    kind = config.get("model_type")
    require(kind in model_types, f"{flag} {name}: is a {kind!r} checkpoint, not "
            f"{' or '.join(map(repr, model_types))}" + f"; {advice.get(kind)}" * (kind in advice))
    return folder, config


def find_model(name, flag="--model_path"):
    """find_checkpoint for the model: V2 in its native or 2025 format, or Higgs TTS 3."""
    return find_checkpoint(name, flag, ("higgs_audio_v2", "higgs_audio", "higgs_multimodal_qwen3"),
                           {"higgs_audio_v2_tokenizer": SWAPPED})


def find_codec(name, flag="--audio_tokenizer_path"):
    """find_checkpoint for the native audio tokenizer."""
    return find_checkpoint(name, flag, ("higgs_audio_v2_tokenizer",), {
        "higgs_audio_v2": SWAPPED, "higgs_audio": SWAPPED,
        None: "the 2025 codec format is not read, use the native one"})


def native_config(config):
    """HiggsAudioV2Config of a config.json dict, native or 2025 format. Raises UserError."""
    if config["model_type"] == "higgs_audio_v2":
        native = HiggsAudioV2Config.from_dict(config)
    else:
        native = HiggsAudioV2Config(**native_settings(config))
    end = native.audio_stream_eos_id
    require(native.codebook_size > end, f"config.json has codebook_size {native.codebook_size}, "
            f"but end-of-stream is code {end}: it must be {end + 1}")
    return native


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
        raise UserError("this 2025-format model has parts unknown to the native class: "
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
    """{native name: [2025 names to join along dimension 0]}; some are split in two there. As in
    transformers' convert_higgs_audio_v2_to_hf.py. Raises UserError."""
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


def load_tokenizer(folder):
    """Tokenizer of a model folder. Raises UserError."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{folder}: no tokenizer can be loaded from it "
                        f"({str(error).splitlines()[0]})")


# ---- The model and its weights


def empty_model(config, dtype, folder=None):
    """Native model with its text head on the meta device: names, shapes and dtypes, no memory.

    config: HiggsAudioV2Config. folder: its generation_config.json is used if it is a native one.
    The 2025 format's ends at a token that speech never reaches: generate would run to its limit.
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
    """GenerationConfig with the released settings and this config's ids."""
    return GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id, do_sample=True, temperature=1.0, top_k=50, top_p=0.95,
        ras_win_len=7, ras_win_max_num_repeat=2, use_text_head=True)


def open_model(folder):
    """{name in the files: Slice} of a folder's model weights. Raises UserError."""
    files = tensor_io.files_of(folder, "model")
    require(files, f"{folder}: holds no weights (model.safetensors, or model-*-of-*.safetensors)")
    return tensor_io.open_tensors(files)


def weight_parts(folder, config):
    """{native name: [Slice, ...]} of a native or 2025-format folder; config: of config.json."""
    found = open_model(folder)
    if config["model_type"] == "higgs_audio_v2":
        return {name: [part] for name, part in found.items()}
    return {name: [found[part] for part in parts] for name, parts in native_names(found).items()}


def check_weights(model, parts, folder):
    """Raise UserError unless the files hold exactly the weights of a model without adapters."""
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    if problem := tensor_io.mismatch(wanted, parts):
        no_head = wanted.keys() - parts.keys() == {"text_lm_head.weight"}
        raise UserError(f"{folder}: {problem}" + no_head * (
            " (saved by a trainer that dropped the text head; copy it from the base model)"))


def check_finite(tensors, where):
    """Raise UserError when one of {name: tensor} holds NaN or infinity. where: their folder."""
    if bad := [name for name, tensor in tensors.items() if not tensor_io.is_finite(tensor)]:
        raise UserError(f"{where}: {len(bad)} of its tensors hold NaN or infinity, first "
                        f"{', '.join(sorted(bad)[:5])}")


def load_weights(weights, parts, world=None):
    """Fill {native name: tensor, plain or a shard} from weight_parts. Collective with a world."""
    for name, tensor in weights.items():
        tensor_io.read_rows(tensor.detach(), parts[name])
    dist.barrier(world or dist.World())     # a slow disk may take long


def reset_buffers(model, device):
    """Compute the buffers that no file holds: to_empty leaves them unset."""
    inner, config = model.model, model.config
    inner.rotary_emb = type(inner.rotary_emb)(config).to(device)
    books = torch.arange(config.num_codebooks, device=device)
    inner.embed_audio_tokens.audio_tokens_offsets = books * config.codebook_size
    if unknown := {name for name, _ in inner.named_buffers()} - BUFFERS:
        raise UserError("this version of transformers has buffers that weights.py does not know: "
                        f"{sorted(unknown)}")


# ---- Files besides the weights


def save_config(model, tokenizer, folder, source, codec=None):
    """The files of a native checkpoint besides its weights -> {file: why it had to be made}. codec:
    folder or hub name that the processor names; None: what source names, else the hub's."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    folder, source, made = Path(folder), Path(source), {}
    for name in EXTRA_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    path = folder / "processor_config.json"
    if not (source / path.name).is_file():
        from transformers import HiggsAudioV2Processor
        template = Path(__file__).with_name("chat_template.jinja").read_text()
        feature_extractor().save_pretrained(folder)
        HiggsAudioV2Processor(feature_extractor(), tokenizer, audio_tokenizer=None,
                              chat_template=template).save_pretrained(folder)
        made = dict.fromkeys(EXTRA_FILES, f"{source} has none; made for the released codec "
                             f"(24 kHz, 960 samples a frame), named {codec or HUB_CODEC}")
    if codec or made:
        # by hand: a processor can only name a codec that is loaded, and loading takes torchaudio
        config = json.loads(path.read_text()) | {"audio_tokenizer": {
            "audio_tokenizer_class": "HiggsAudioV2TokenizerModel",
            "audio_tokenizer_name_or_path": codec or HUB_CODEC}}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return made


def feature_extractor():
    """That of the released codec: takes (n,) mono float32 at 24 kHz, by default pads to frames."""
    from transformers import DacFeatureExtractor
    return DacFeatureExtractor(feature_size=1, sampling_rate=24000, hop_length=960)
