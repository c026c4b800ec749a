"""Model folders in both layouts, made from what is known of the released files and not from our map of names."""
import json

from safetensors.torch import load_file, save_file


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def original_name(name):
    """Native parameter name -> the name in the original checkpoint (facts of the released file, not of our map)."""
    if name == "model.embed_audio_tokens.embed_audio_tokens.weight":
        return "audio_codebook_embeddings.weight"
    if name.endswith("lm_head.weight"):
        return f"audio_decoder_proj.{name}"
    return name.removeprefix("model.")


def original_config(native):
    """config.json as boson-ai's HiggsAudioConfig writes it, text_config nested."""
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act")
    text = {key: native[key] for key in kept} | {
        "model_type": "llama", "rope_theta": 500000.0, "torch_dtype": "bfloat16",
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
    return {"model_type": "higgs_audio", "architectures": ["HiggsAudioModel"], "text_config": text,
            "audio_encoder_config": {"model_type": "higgs_audio_encoder"},
            "audio_adapter_type": "dual_ffn_fast_forward",
            "audio_dual_ffn_layers": list(range(native["num_hidden_layers"])), "audio_num_codebooks": 8,
            "audio_codebook_size": 1024, "audio_stream_bos_id": 1024, "audio_stream_eos_id": 1025,
            "audio_out_token_idx": native["audio_token_id"], "audio_out_bos_token_id": native["audio_bos_token_id"],
            "pad_token_id": native["pad_token_id"], "audio_embed_avg": False, "skip_audio_tower": True,
            "use_audio_out_embed_projector": False, "use_audio_out_self_attention": False, "use_delay_pattern": True,
            "encode_audio_in_tokens": True, "encode_whisper_embed": False, "torch_dtype": "bfloat16"}


def original_state(folder):
    return {original_name(n): t for n, t in load_file(folder / "model.safetensors").items()}


def write_checkpoint(folder, config, state, shards=1):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = list(state)
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        save_file({n: state[n].contiguous() for n in names[i::shards]}, folder / name)
    return folder


def split_rows(state, name, kinds, at):
    tensor = state.pop(f"{name}.weight")
    state |= {f"{name}.{kind}.weight": part for kind, part in zip(kinds, (tensor[:at], tensor[at:]))}
