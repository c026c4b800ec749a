"""Write a checkpoint again, an adapter folded in or not: native, or the layout that servers read.

Higgs-Audio V2 has two layouts: transformers' native one, and that of 2025, which boson-ai's own
code serves. Higgs TTS 3 has one, with its codec and both copies of the tied tables inside, for
sglang-omni and vllm-omni. No more than one output file (and the largest tensor in fp32) is ever in
memory. The folder appears whole or not at all.
"""
import json
import math
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from core import adapters, tensor_io
from core.cli import UserError, require
from core.checkpoint import new_folder
from speech import conversations, weights


def export(source, output_dir, layout="native", dtype=None, shard_bytes=5 * 10**9, adapter=None,
           codec=None, base_dtype=None):
    """Write the checkpoint `source` (folder or hub name, either layout) -> lines to print.

    layout: native or 2025. dtype: a name, or None: as the files have it, but float32 where an
    adapter is folded in, since bf16 rounds most of a small update away. shard_bytes: limit of a
    file. codec: see weights.save_config. base_dtype nf4: the base is rounded as the adapter's run
    has seen it. Raises UserError, also when output_dir holds something.
    """
    folder, config = weights.find_model(source)
    version, third = weights.module(config), weights.is_third(config["model_type"])
    original = layout == "2025" and not third
    require(not (codec and original),
            "--audio_tokenizer_path: the 2025 layout names no codec; drop it")
    tokenizer, parts = version.load_tokenizer(folder), version.weight_parts(folder, config)
    model = version.empty_model(config, torch.float32, folder)
    weights.check_weights(model, parts, folder)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    layers = {module for layer in version.layers(model) for module in layer.modules()}
    in_layers = [f"{name}.weight" for name, module in model.named_modules()
                 if module in layers and type(module) is torch.nn.Linear]
    folds = find_folds(model, adapter) if adapter else {}
    updated = len(folds)
    if base_dtype == "nf4":
        from core import quantized
        folds |= {name: quantized.rounded_nf4(folds.get(name)) for name in in_layers}
    wanted = "float32" if dtype is None and folds and not third else dtype
    dtypes = {name: getattr(torch, wanted) if wanted else parts[name][0][:1].dtype
              for name in shapes}
    # name in the files: (Slices to join, dtype, what an adapter adds)
    names = {name: name for name in shapes}
    if original:        # the inverse of weights.native_names; split tensors stay joined
        names = {name: next(old + name.removeprefix(new) for old, new in weights.NAMES
                            if name.startswith(new)) for name in shapes}
    tensors = {names[name]: (parts[name], dtypes[name], folds.get(name)) for name in shapes}
    if third:
        tensors = version.whole_files(tensors, folder, codec)
    sizes = {name: math.prod(tensor_io.shape_of(found)) * kind.itemsize
             for name, (found, kind, _) in tensors.items()}
    plan = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes)
    files, total, made = plan.filename_to_tensors, sum(sizes.values()), {}
    with new_folder(output_dir, total) as building:
        for file, inside in files.items():
            written = {name: read(*tensors[name]) for name in inside}
            weights.check_finite(written, f"{source}, with its adapter," if folds else source)
            tensor_io.save(written, building / file)
        if len(files) > 1:
            index = {"metadata": plan.metadata,
                     "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
            (building / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        if not third:
            model.config.dtype = dtypes["model.embed_tokens.weight"]
        if original:
            save_original_config(model.config, tokenizer, building, config)
        else:
            made = version.save_config(model, tokenizer, building, folder, codec)
        if setting := conversations.saved_setting(adapter or folder):
            conversations.save_setting(building / conversations.SETTINGS, setting)
        if not (building / "README.md").exists():
            (building / "README.md").write_text(card(source, output_dir, version), encoding="utf-8")
    kinds = sorted({str(kind).removeprefix("torch.") for kind in dtypes.values()})
    lines = [f"{len(tensors)} tensors, {updated} of them with an adapter's update, "
             f"{total / 1e9:.3f} GB of {' and '.join(kinds)} in {len(files)} "
             f"file{'s'[:len(files) > 1]}"]
    return [*lines, *[version.LICENCE] * bool(version.LICENCE),
            *(f"{name}: {what}" for name, what in made.items()),
            f"to publish: hf upload OWNER/NAME {output_dir}"]


def card(source, output_dir, version):
    """The model card README.md of an export: what the hub asks for, and the licence."""
    on_hub = str(source).count("/") == 1 and not Path(source).exists()
    base = f"base_model: {source}\n" if on_hub else ""
    return (f"---\nlicense: other\n{base}pipeline_tag: text-to-speech\n---\n\n"
            f"# {Path(output_dir).name}\n\nFine-tuned from `{Path(source).name}` with "
            f"`train_v2_ddp.py`.\n\n{version.TERMS}\n")


def find_folds(model, adapter):
    """{weight name: function that adds the adapter's update to that weight in fp32}.

    model: on the meta device. Raises UserError when the adapter's files and the model do not fit
    together exactly: PeftModel.from_pretrained would only warn about weights that are missing.
    """
    whole = weights.module(model.config).WHOLE_MODULES
    net = adapters.add_saved(model, adapter, whole=whole)
    stored = tensor_io.open_tensors([Path(adapter) / "adapter_model.safetensors"])
    tables = {f"{name}.weight": f"base_model.model.{name}.weight" for name in whole}
    known = (".lora_A.weight", ".lora_B.weight", f".{adapters.MAGNITUDE}", *tables.values())
    if other := [name for name in stored if not name.endswith(known)]:
        raise UserError(f"--adapter {adapter}: only LoRA, rsLoRA and DoRA can be folded in, this "
                        f"has {min(other)}")
    # onto the meta device nothing is copied: names and shapes are compared
    adapters.load_adapters(net, adapter)
    weights.check_finite({name: part[:] for name, part in stored.items()}, f"--adapter {adapter}")

    def fold(name, scaling):
        a, b = (stored[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        length = stored.get(f"base_model.model.{name}.{adapters.MAGNITUDE}")

        def update(weight):
            weight = torch.addmm(weight, b[:].float(), a[:].float(), alpha=scaling)
            # DoRA (Liu et al. 2024, eq. 5): the rows' direction, times a trained length
            if length is not None:
                weight *= (length[:].float() / torch.linalg.norm(weight, dim=1))[:, None]
            return weight
        return update
    found = {name: lambda weight, table=table: stored[table][:].float().clone()
             for name, table in tables.items() if table in stored}
    return found | {f"{name}.weight": fold(name, module.scaling["default"])
                    for name, module in net.get_base_model().named_modules()
                    if hasattr(module, "lora_A")}


def read(parts, dtype, fold):
    """A whole tensor from its Slices, in `dtype`; fold works on it in fp32."""
    tensor = torch.cat([part[:] for part in parts]) if len(parts) > 1 else parts[0][:]
    return (fold(tensor.float()) if fold else tensor).to(dtype).contiguous()


# ---- The layout of 2025


def original_config(native, tokenizer, dtype):
    """config.json dict of the 2025 layout for a native config, key by key as released.

    The rope parameters are Llama 3.2's spelling, numerically the native ones. Ids that the layout
    has no place for are added where they differ from the released model's; boson's config class
    keeps keys it does not know.
    """
    def token(name):
        return tokenizer.convert_tokens_to_ids(name)
    text = {key: getattr(native, key) for key in (
        *weights.TEXT_KEYS, "initializer_range", "attention_bias", "attention_dropout", "mlp_bias")}
    text |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": dtype,
             "bos_token_id": token("<|begin_of_text|>"), "eos_token_id": token("<|end_of_text|>"),
             "max_position_embeddings": 131072,     # a server may refuse more than native's 2048
             "rope_theta": 500000.0, "rope_scaling": {
                 "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                 "rope_type": "llama3", "original_max_position_embeddings": 8192}}
    usual = type(native)()
    extra = {key: getattr(native, key) for key in weights.EXTRA_IDS
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
    """The files of a 2025 checkpoint except its weights; config: config.json of the source.

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
