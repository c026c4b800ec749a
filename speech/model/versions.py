"""Higgs-Audio V2 or Higgs TTS 3: what the scripts ask of either, chosen by the model_type in config.json."""
import shutil
from pathlib import Path

from common import distributed
from common.distributed import UserError
from speech.model import labels, labels_v3, v2, v3, weights


def is_third(config_dict):
    """Whether a config.json dict is that of Higgs TTS 3."""
    return config_dict["model_type"] == v3.MODEL_TYPE


def find_files(world, model_path, codec_path, output_dir):
    """(model folder, its config.json as a dict, codec folder). Raises UserError. Collective.

    codec_path None: the codec inside the checkpoint, unpacked in output_dir.
    """
    for find, path in ((weights.find_model, model_path), (weights.find_codec, codec_path)):
        if path:
            distributed.rank0_first(world, find, path)      # hub names are downloaded before the others look
    folder, config = weights.find_model(model_path)
    if is_third(config) and world.is_main:
        print(f"licence    {v3.LICENCE}", flush=True)
    if codec_path:
        return folder, config, weights.find_codec(codec_path)[0]
    return folder, config, distributed.rank0_first(world, own_codec, folder, config, output_dir)


def read_config(config_dict):
    """Config of a config.json dict: hidden_size, num_codebooks, codebook_size, ... Raises UserError."""
    return v3.read_config(config_dict) if is_third(config_dict) else weights.native_config(config_dict)


def text_setting(config_dict, wanted):
    """--normalize_text as "on" or "off". wanted "": on for V2, off for Higgs TTS 3, as its servers have it.

    Raises UserError for what its servers would not do.
    """
    if is_third(config_dict) and wanted == "on":
        raise UserError("--normalize_text on: Higgs TTS 3 is served texts as they are; leave it off")
    return wanted or ("off" if is_third(config_dict) else "on")


def lora_targets(config_dict, wanted):
    """--lora_target_modules; wanted "": the attention's four layers for V2, all seven of a layer for Higgs TTS 3."""
    return wanted or ("all-linear" if is_third(config_dict) else "attention")


def load_tokenizer(folder, config_dict):
    """Tokenizer of a model folder. Raises UserError."""
    return v3.load_tokenizer(folder) if is_third(config_dict) else weights.load_tokenizer(folder)


def token_ids(tokenizer, config):
    """labels.TokenIds or labels3.Ids, which know the layout of sequences. Raises UserError. config: of read_config."""
    third = config.model_type == "qwen3"
    return v3.token_ids(tokenizer, config) if third else labels.token_ids(tokenizer, config)


def own_codec(folder, config_dict, output_dir):
    """The codec inside a Higgs TTS 3 folder, unpacked in output_dir -> its folder there. Raises UserError."""
    if not is_third(config_dict):
        raise UserError("give --audio_tokenizer_path: a Higgs-Audio V2 checkpoint holds no codec")
    return v3.unpack_codec(folder, config_dict, Path(output_dir) / "codec")


def empty_model(config_dict, dtype, folder):
    """The model on the meta device: names, shapes and dtypes, no memory. Raises UserError."""
    if is_third(config_dict):
        return v3.empty_model(v3.read_config(config_dict), dtype)
    return weights.empty_model(weights.native_config(config_dict), dtype, folder)


def weight_parts(folder, config_dict):
    """{our name: [slice handles]} of a folder's weights. Raises UserError."""
    return v3.weight_parts(folder) if is_third(config_dict) else weights.weight_parts(folder, config_dict)


def reset_buffers(native, device):
    """Compute the buffers that no file holds on `device`."""
    (v3 if isinstance(native, v3.Higgs3) else weights).reset_buffers(native, device)


def whole_modules(native):
    """Modules that an adapter may hold as a whole: the audio table of Higgs TTS 3."""
    return (v3.TABLE,) if isinstance(native, v3.Higgs3) else ()


def tied_heads(native):
    """Embeddings that are heads as well."""
    if not isinstance(native, v3.Higgs3):
        return []
    return [*getattr(native.audio_embedding, "modules_to_save", {}).values()] or [native.audio_embedding]


def layers(native):
    """The decoder layers."""
    return native.body.layers if isinstance(native, v3.Higgs3) else native.model.layers


def packed(net, recompute=None):
    """What DDP wraps around a model, or the PeftModel around it: PackedHiggs or PackedHiggs3."""
    base = net.get_base_model() if hasattr(net, "get_base_model") else net
    return (v3.PackedHiggs3 if isinstance(base, v3.Higgs3) else v2.PackedHiggs)(net, recompute)


def freeze_unreachable(native, text_loss_weight):
    """v2.freeze_unreachable; in Higgs TTS 3 the audio loss reaches every weight."""
    if not isinstance(native, v3.Higgs3):
        v2.freeze_unreachable(native, text_loss_weight)


def loss_report(ids, sums, reduction, text_weight, prefix):
    """{metric name: float} of v2.loss_report or v3.loss_report."""
    if isinstance(ids, labels_v3.Ids):
        return v3.loss_report(sums, reduction, prefix)
    return v2.loss_report(sums, reduction, text_weight, prefix)


def weight_names(native):
    """{name in a checkpoint's files: parameter} of a full model."""
    named = dict(native.named_parameters())
    return v3.published(named) if isinstance(native, v3.Higgs3) else named


def save_config(native, tokenizer, folder, source):
    """The files of a checkpoint beside its weights -> {file that source did not have: what was made of it}.

    source: the folder of the model that was trained from.
    """
    if not isinstance(native, v3.Higgs3):
        return weights.save_config(native, tokenizer, folder, source)
    for path in Path(source).iterdir():
        if path.name in v3.OWN_FILES:
            shutil.copyfile(path, Path(folder) / path.name)
    return {}
