"""Exports: a checkpoint, maybe with an adapter folded in, for other code; and V2's layout of 2025.

boson-ai's code serves the 2025 layout. Here it is written and read: NAMES and CONFIG map its names
to those of transformers' native layout. Higgs TTS 3 has one layout, with the codec and both copies
of the tied tables, for sglang-omni and vllm-omni.
"""
import json
import math
import re
from functools import partial
from pathlib import Path

import torch

from core import adapters, checkpoint, tensor_io
from core.cli import require
from speech import conversations, weights

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


# ---- Reading the 2025 layout


def native_settings(config):
    """Arguments of HiggsAudioV2Config for a config.json dict of 2025. UserError."""
    # a variant that the native class computes differently
    require(not config.get("audio_embed_avg"), "config.json: audio_embed_avg is not supported")
    text = config.get("text_config", {})
    return {**{key: text[key] for key in TEXT_KEYS if key in text},
            **{native_key: config[key] for key, native_key in CONFIG.items() if key in config},
            **{key: config[key] for key in EXTRA_IDS if key in config},
            "codebook_size": config.get("audio_codebook_size", 1024) + 2}


def native_parts(slices):
    """{native name: [slice, ...]} of {2025 name: slice}. Some tensors are split in two; those of a
    name are joined along dimension 0. Follows transformers' convert_higgs_audio_v2_to_hf.py."""
    parts = {}
    for original in sorted(slices):     # "..._frozen" is sorted before "..._trainable"
        if not any(dropped in original for dropped in DROPPED):
            name = SPLIT.sub(r"\1", original)
            old, new = next((pair for pair in NAMES if name.startswith(pair[0])), ("", ""))
            parts.setdefault(new + name.removeprefix(old), []).append(slices[original])
    return parts


# ---- Export. Memory holds at most one output file and the largest tensor in fp32. The folder
# appears only when it is complete.


def export(source, output_dir, layout="native", dtype=None, shard_bytes=5 * 10**9, adapter=None,
           codec=None, base_dtype=None):
    """Write the checkpoint `source` (folder or hub name, either layout) and return lines to print.

    layout: native or 2025. dtype: a name. None keeps the dtypes of the files, but writes float32
    where an adapter is folded in, since bf16 rounds most of a small update away. codec: see
    weights.save_config. base_dtype nf4: round the base as in the adapter's run. UserError."""
    from huggingface_hub import split_state_dict_into_shards_factory
    folder, config = weights.find_model(source)
    version, tts3 = weights.module(config), weights.is_tts3(config["model_type"])
    original = layout == "2025" and not tts3
    require(not (codec and original),
            "--audio_tokenizer_path: the 2025 layout names no codec; drop it")
    tokenizer, parts = version.load_tokenizer(folder), version.weight_parts(folder, config)
    model = version.empty_model(config, torch.float32, folder)
    weights.check_weights(model, parts, folder)
    folds = find_folds(version.empty_model(config, torch.float32), adapter) if adapter else {}
    updated = len(folds)
    if base_dtype == "nf4":
        from core import quantized
        folds |= {name: quantized.rounded_nf4(folds.get(name))
                  for name, weight in model.named_parameters()
                  if ".layers." in name and weight.ndim == 2}
    if folds and not tts3:
        dtype = dtype or "float32"
    # {name: (slices to join, dtype to write, function that adds the adapter's update)}
    tensors = {name: (parts[name], getattr(torch, dtype) if dtype else parts[name][0][:1].dtype,
                      folds.get(name)) for name, _ in model.named_parameters()}
    if tts3:
        tensors = version.whole_files(tensors, folder, codec)
    else:
        model.config.dtype = tensors["model.embed_tokens.weight"][1]
    if original:        # the inverse of weight_parts; split tensors stay joined
        tensors = {next(old + name.removeprefix(new) for old, new in NAMES
                        if name.startswith(new)): entry for name, entry in tensors.items()}
    sizes = {name: math.prod(tensor_io.shape_of(slices)) * kind.itemsize
             for name, (slices, kind, _) in tensors.items()}
    plan = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes)
    with checkpoint.new_folder(output_dir) as building:
        for file, names in plan.filename_to_tensors.items():
            written = {}
            for name in names:
                slices, kind, fold = tensors[name]
                pieces = [piece[:] for piece in slices]
                tensor = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
                tensor = fold(tensor.float()) if fold else tensor
                written[name] = tensor.to(kind).contiguous()
                # an update may overflow
                require(tensor_io.is_finite(written[name]), f"{name} holds NaN or infinity, in "
                        f"{source} or with its adapter")
            tensor_io.save(written, building / file)
        if plan.is_sharded:
            checkpoint.write_json(building / "model.safetensors.index.json", {
                "metadata": plan.metadata,
                "weight_map": dict(sorted(plan.tensor_to_filename.items()))})
        if original:
            save_original_config(model.config, tokenizer, building, config)
        else:
            version.save_config(model, tokenizer, building, folder, codec)
        if setting := conversations.saved_setting(adapter or folder):
            conversations.save_setting(building / conversations.SETTINGS, setting)
        (building / "README.md").write_text(        # a model card, which the hub requires
            "---\nlicense: other\npipeline_tag: text-to-speech\n---\n\n"
            f"# {Path(output_dir).name}\n\nFine-tuned from `{Path(source).name}` with "
            f"`train_v2_ddp.py`.\n\n{version.TERMS}\n", encoding="utf-8")
    return [f"{len(tensors)} tensors, {updated} of them with an adapter's update, "
            f"{sum(sizes.values()) / 1e9:.3f} GB", *filter(None, [version.LICENCE]),
            f"to publish: hf upload OWNER/NAME {output_dir}"]


def find_folds(model, adapter):
    """{weight name: function that adds the adapter's update to that weight in fp32}. The model is
    on the meta device and gets the adapter's layers. UserError unless the adapter's files match it
    exactly: PeftModel.from_pretrained would only warn about missing weights."""
    whole = weights.module(model.config).WHOLE_MODULES
    net = adapters.add_saved_lora(model, adapter, whole=whole)
    # on the meta device this compares names and shapes and copies nothing
    adapters.load_adapters(net, adapter)
    stored = tensor_io.open_tensors([Path(adapter) / "adapter_model.safetensors"])

    def fold(name, scaling, weight):
        a, b = (stored[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        weight = torch.addmm(weight, b[:].float(), a[:].float(), alpha=scaling)
        magnitude = stored.get(f"base_model.model.{name}.{adapters.MAGNITUDE}")
        if magnitude:       # DoRA (Liu et al. 2024, eq. 5): times the direction of the rows
            weight *= (magnitude[:].float() / torch.linalg.norm(weight, dim=1))[:, None]
        return weight

    folds = {f"{name}.weight": partial(fold, name, layer.scaling["default"])
             for name, layer in net.get_base_model().named_modules() if hasattr(layer, "lora_A")}
    for name in whole:      # trained in full: the table replaces the base's
        if table := stored.get(f"base_model.model.{name}.weight"):
            folds[f"{name}.weight"] = lambda weight, table=table: table[:].float().clone()
    return folds


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
