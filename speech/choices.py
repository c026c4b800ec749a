"""Values and defaults of the speech scripts' flags. Imports no torch: flags are parsed before it is."""
from common import flags
from common.flags import need

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
            "no_second_clip", "no_reference_text", "unused_reference", "own_reference",
            "transcript")       # of samples that are used all the same
FORMATS = ("chatml", "ms_swift", "manifest", "vibevoice", "metadata_json", "sidecar", "ljspeech", "piper", "list",
           "kaldi", "parquet", "arrow", "tar", "vctk", "aishell3", "mls", "wenetspeech4tts", "gigaspeech",
           "emilia_pipe")       # of data (speech/data/formats.py, speech/data/corpora.py)
MEANINGS = ("audio", "text", "id", "speaker", "language", "scene", "duration", "offset", "end", "ref_audio", "ref_text",
            "voice_prompts", "voices")       # of columns (speech/data/columns.py)
REFERENCES = ("given", "same_speaker", "none")      # which clip stands before a text

LONGEST_CLIP_S = 600        # seconds of one clip: the codec sees it whole, and positions are 25 a second

LAYOUTS = ("native", "2025")            # of a checkpoint
DTYPES = ("float32", "bfloat16")        # of its weights
HUB_CODEC = "bosonai/higgs-audio-v2-tokenizer"      # what a processor names as its codec when the base names none
CHATML = (".json", ".jsonl", ".lst")     # files whose prompts say themselves which voice is wanted; .lst: Seed-TTS-eval
DEFAULT_SYSTEM = "Generate audio following instruction."


def recognisers(group):
    """Flags of what understands speech (scores.py)."""
    group.add_argument("--asr_model", help="recogniser that gives word errors: folder or hub name of a transformers "
                                           "model, or pocketsphinx")
    group.add_argument("--asr_command", help="the same by a command that gets paths of wav files behind its own words "
                                             "and prints a line of text for each")
    group.add_argument("--asr_time_limit", type=float, default=3600.0, help="seconds that one start of --asr_command "
                                                                            "may take; then the run ends")
    group.add_argument("--language", help="language code, for Whisper and for the rules by which texts are compared; "
                                          "en unifies numbers and contractions (default: Whisper finds out, plain "
                                          "rules)")


def judges(group):
    """Flags of what judges generated speech (scores.py)."""
    recognisers(group)
    group.add_argument("--speaker_model", help="encoder that gives the likeness of voices: resemblyzer, or folder or "
                                               "hub name of a transformers x-vector model, such as WavLM's")
    flags.switch(group, "--mos", help="estimate naturalness by DNSMOS, of the package speechmos")


def check_recognisers(args):
    """The flags of recognisers()."""
    need(not (args.asr_model and args.asr_command), "give one of --asr_model and --asr_command")
    need(args.asr_time_limit == 3600 or args.asr_command, "--asr_time_limit is for --asr_command")
    flags.above_zero(args, "asr_time_limit")
    need(not args.language or args.asr_model or args.asr_command,
         "--language: only --asr_model and --asr_command make use of it")


def check_judges(args, speaks=True):
    """The flags of judges(). speaks: whether there will be anything to judge."""
    check_recognisers(args)
    for name in ("asr_model", "asr_command", "speaker_model", "mos"):
        need(speaks or not getattr(args, name), f"--{name} needs --sample_prompts")
