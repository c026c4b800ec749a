"""Values and flags that the speech scripts share. Does not import torch: flags are parsed first."""
import os
import re

from core import cli
from core.cli import require

TASK_TYPES = ("zero_shot_voice_cloning", "single_speaker_smart_voice", "multi_speaker_smart_voice",
              "multi_speaker_voice_cloning")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA_TARGETS = {        # endings of module names
    "attention": ATTENTION,
    "attention+audio_mlp": [*ATTENTION, "audio_mlp.gate_proj", "audio_mlp.up_proj",
                            "audio_mlp.down_proj"],
    # both FFNs, no head, no embedding
    "all-linear": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}
AUDIO_WEIGHTS = ("embed_audio_tokens", "audio_lm_head", "audio_embedding")  # for --freeze_llm
ON_OFF = ("on", "off")
# checks of samples, for --drop_bad
CHECKS = ("invalid", "empty_text", "control_token", "audio", "too_long")
SOUND_ERRORS = ("too_short", "silence")     # found by prepare_tts.py too
# checks whose samples are still used
WARNINGS = ("clipping", "dc_offset", "no_words", "duplicate_audio", "duplicate_text",
            "in_validation", "text_rate", "no_second_clip", "no_reference_text", "unused_reference",
            "own_reference")
COLUMNS = {     # {meaning: column names in lower case}; the first that exists counts
    "audio": "audio audio_file audio_path audio_filepath audio_filename audio_url wav wav_path "
             "file_name filename path file",
    "text": "text transcript transcription sentence normalized_text text_normalized target_text",
    "id": "id _id utt utt_id sentence_id sid key",
    "speaker": "speaker speaker_id speaker_name spk spk_id client_id",
    "language": "language lang locale", "scene": "scene", "split": "split",
    "duration": "duration seconds", "offset": "offset start start_time", "end": "end end_time",
    "ref_audio": "ref_audio ref_audio_file ref_audio_path reference_audio prompt_audio",
    "ref_text": "ref_text ref_transcript reference_text prompt_text",
    "voice_prompts": "voice_prompts", "voices": "voices", "normalize_text": "normalize_text"}
REFERENCES = ("given", "same_speaker", "none")      # which clip comes before a text
LONGEST_CLIP_S = 600    # the codec encodes a clip at once, and a second takes 25 positions
CHATML = (".json", ".jsonl")        # files whose prompts name their voice themselves

# ---- The trainer


def check_trainer(args):
    """Check the trainer's flags and set derived values. Raises UserError."""
    check_data(args)
    cli.check_drop_bad(args, CHECKS)
    for path, _ in sources(args)[0] if args.code_cache else ():
        require(not os.path.exists(os.path.join(path, "prepared.json")),
                f"--code_cache: {path} has its codes already; drop the flag")
    cli.above_zero(args, "sample_seconds keep_weight")
    cli.at_least_one(args, "keep_every")
    for wrong, why in (
            (args.train_audio_table and not args.use_lora, "--train_audio_table needs --use_lora"),
            (args.use_lora and args.freeze_llm, "--use_lora freezes the base: drop --freeze_llm"),
            (args.keep and not args.use_lora, "--keep needs --use_lora; in a full fine-tuning mix "
             "old data in: --train_data_file new.json old.json:0.25"),
            (args.keep and args.train_audio_table, "--keep excludes --train_audio_table"),
            (args.group_by_length and cli.packs_tokens(args),
             "--group_by_length counts samples: not with packs of tokens")):
        require(not wrong, why)


def trained_weights(args):
    """Name of the weights that a run trains, as its checkpoints have it."""
    weights = "audio embedding and head" if args.freeze_llm else "full"
    if args.use_lora:
        weights = "lora and audio table" if args.train_audio_table else "lora"
        weights += " on nf4" * (args.base_dtype == "nf4")
    return weights + ("" if args.text_loss_weight else " without text")


def pack_text(args):
    size = f"{args.max_tokens_per_batch} tokens" if args.max_tokens_per_batch else (
        f"{args.per_device_train_batch_size} samples")
    return f"{size} by length, in blocks" if args.group_by_length else size


# ---- Flags of several scripts


def base_dtype(p, help):
    p.flag("--base_dtype", None, f"{help} (default: as in the adapter's run)",
           choices=("bf16", "nf4"))


def check_base_dtype(args):
    """Make args.base_dtype "nf4" or None."""
    from speech.conversations import saved_setting
    saved = args.adapter and saved_setting(args.adapter, "base_dtype", ["nf4"])
    args.base_dtype = "nf4" if (args.base_dtype or saved) == "nf4" else None
    if args.base_dtype:
        cli.require_package("bitsandbytes", "--base_dtype nf4")


def judges(p):
    p.flag("--asr_model", None, "recogniser: pocketsphinx, or folder or hub name for transformers")
    p.flag("--asr_command", None, "recogniser as a command: it gets paths of wav files as last "
           "arguments and prints a line of text for each")
    p.flag("--language", None, "language code, for Whisper and for comparing texts; en unifies "
           "numbers and contractions (default: Whisper detects it, plain rules)")
    p.flag("--speaker_model", None, "x-vector model for speaker similarity: folder or hub name")


def check_judges(args):
    require(not (args.asr_model and args.asr_command), "give one of --asr_model and --asr_command")
    require(not args.language or args.asr_model or args.asr_command,
            "--language: only --asr_model and --asr_command make use of it")


# ---- Data


def data(p):
    flag = p.flag
    flag("--train_data_file", None, "data in any format of docs/data.md, mixed; the weight is the "
         "number of passes per epoch (default: 1)", nargs="+", metavar="PATH[:WEIGHT]")
    flag("--train_data_dir", None, "the same for folders: of prepare_tts.py, with metadata.json, "
         "or audio with texts next to it", nargs="+", metavar="PATH[:WEIGHT]")
    flag("--eval_data_file", None, "validation data; without it --validation_split is held out")
    flag("--eval_data_dir", None, "validation folder, like --train_data_dir")
    flag("--columns", "", "columns of a table by name, or by number without a header: audio=clip,"
         "text=caption; others are in docs/data.md", metavar="MEANING=NAME,...")
    flag("--task_type", "single_speaker_smart_voice", "prompt form for samples that name none; "
         "not for ChatML, which has prompts", choices=TASK_TYPES)
    flag("--normalize_text", None, "normalise punctuation and sound tags as boson-ai's inference "
         "does (default: on for Higgs-Audio V2, off for Higgs TTS 3)", choices=ON_OFF)
    flag("--reference", "given", "clip before the text, to clone: given by the data, another clip "
         "of the same speaker, or none; not for ChatML", choices=REFERENCES)
    flag("--reference_share", 1.0,
         "share of samples that keep their reference, 0 to 1, drawn by --seed")


def check_columns(columns):
    for pair in filter(None, columns.split(",")):
        require(re.fullmatch(r"\w+=.+", pair) and pair.split("=")[0] in COLUMNS,
                f"--columns {pair}: is not MEANING=NAME; meanings are {', '.join(COLUMNS)}")


def check_data(args):
    for name in ("train_data_file", "train_data_dir"):
        setattr(args, name, [word for word in getattr(args, name) or [] if word])
    require(bool(args.train_data_file) != bool(args.train_data_dir),
            "give --train_data_file or --train_data_dir")
    require(not (args.eval_data_file and args.eval_data_dir),
            "give one of --eval_data_file and --eval_data_dir, not both")
    check_columns(args.columns)
    cli.share(args, "reference_share")
    require(args.reference != "none" or args.reference_share == 1,
            "--reference none: drop --reference_share")
    for path, weight in sources(args)[0]:
        require(0 < weight <= 1000, f"{path}:{weight:g}: a weight is above 0 and at most 1000")


def sources(args):
    """([(training file or folder, weight)], validation file or folder or None)."""
    paths = []
    for word in args.train_data_file or args.train_data_dir:
        match = re.fullmatch(r"(.+):(\d+\.?\d*|\.\d+)", word)
        weighted = match and not os.path.exists(word)
        paths.append((match[1], float(match[2])) if weighted else (word, 1.0))
    return paths, args.eval_data_file or args.eval_data_dir
