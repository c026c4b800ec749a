"""Higgs-Audio V2 or Higgs TTS 3: chosen once, by the model_type in config.json; only the chosen one
is imported.

v2.py and v3.py have the same functions: read_config, load_tokenizer, token_ids, text_setting,
unpack_codec, empty_model, weight_parts, reset_buffers, layers, packed, freeze_unreachable,
loss_report, weight_names, save_config; and the constants LICENCE, LORA_TARGETS, WHOLE_MODULES,
DRAWS.
"""
from pathlib import Path

from core import dist
from speech import weights


def is_third(model_type):
    """Whether a model_type, of config.json or of read_config, is that of Higgs TTS 3."""
    return model_type in ("higgs_multimodal_qwen3", "qwen3")


def module(config):
    """speech.v3 or v2. config: config.json as a dict, or what read_config made of it."""
    if is_third(config["model_type"] if isinstance(config, dict) else config.model_type):
        from speech import v3
        return v3
    from speech import v2
    return v2


def find_files(world, model_path, codec_path, output_dir):
    """(model folder, its config.json as a dict, codec folder). Raises UserError. Collective.
    codec_path None: the codec inside the checkpoint, unpacked in output_dir.
    """
    for find, path in ((weights.find_model, model_path), (weights.find_codec, codec_path)):
        if path:        # hub names are downloaded before the others look
            dist.rank0(world, find, path)
    folder, config = weights.find_model(model_path)
    if world.is_main and module(config).LICENCE:
        print(f"licence    {module(config).LICENCE}", flush=True)
    if codec_path:
        return folder, config, weights.find_codec(codec_path)[0]
    unpack, into = module(config).unpack_codec, Path(output_dir) / "codec"
    return folder, config, dist.rank0(world, unpack, folder, config, into)
