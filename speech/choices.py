"""Values and defaults of the speech scripts' flags. Imports nothing: flags are parsed before torch is imported."""
TASK_TYPES = ("zero_shot_voice_cloning", "single_speaker_smart_voice", "multi_speaker_smart_voice",
              "multi_speaker_voice_cloning")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA_TARGETS = {        # endings of module names
    "attention": ATTENTION,
    "attention+audio_mlp": [*ATTENTION, "audio_mlp.gate_proj", "audio_mlp.up_proj", "audio_mlp.down_proj"],
    "all-linear": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],        # both FFNs, no head, no embedding
}

ON_OFF = ("on", "off")

CHECKS = ("invalid", "empty_text", "control_token", "audio", "too_long")       # of samples, for --drop_bad
SOUND_ERRORS = ("too_short", "silence")                  # that prepare_tts.py finds beside them
WARNINGS = ("clipping", "dc_offset", "no_words", "duplicate_audio", "duplicate_text", "in_validation", "text_rate",
            "no_second_clip", "no_reference_text", "unused_reference")      # of samples that are used all the same
FORMATS = ("chatml", "ms_swift", "manifest", "vibevoice", "metadata_json", "sidecar", "ljspeech", "piper", "list",
           "kaldi", "parquet", "arrow", "tar")        # of data (speech/formats.py)
REFERENCES = ("given", "same_speaker", "none")      # which clip stands before a text

LAYOUTS = ("native", "2025")            # of a checkpoint
DTYPES = ("float32", "bfloat16")        # of its weights
HUB_CODEC = "bosonai/higgs-audio-v2-tokenizer"      # what a processor names as its codec when the base names none
DEFAULT_SYSTEM = "Generate audio following instruction."
