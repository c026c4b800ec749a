"""What the columns of a table of speech mean, by their names, and which files are audio or text, by their endings."""

AUDIO_FILES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".oga", ".aiff", ".aif", ".au", ".caf", ".w64", ".rf64")
OTHER_AUDIO = (".m4a", ".aac", ".mp4", ".webm", ".wma", ".amr")     # libsndfile does not read them
TEXTS = (".txt", ".normalized.txt", ".lab")                         # beside an audio file
COLUMNS = {     # what a column of a manifest means, by its name in lower case; the first name that is there counts
    "audio": ("audio", "audio_file", "audio_path", "audio_filepath", "audio_filename", "audio_url", "wav", "wav_path",
              "file_name", "filename", "path", "file"),
    "text": ("text", "transcript", "transcription", "sentence", "normalized_text", "text_normalized", "target_text"),
    "id": ("id", "_id", "utt", "utt_id", "sentence_id", "sid", "key"),
    "speaker": ("speaker", "speaker_id", "speaker_name", "spk", "spk_id", "client_id"),
    "language": ("language", "lang", "locale"), "scene": ("scene",),
    "duration": ("duration", "seconds"), "offset": ("offset", "start", "start_time"), "end": ("end", "end_time"),
    "ref_audio": ("ref_audio", "ref_audio_file", "ref_audio_path", "reference_audio", "prompt_audio"),
    "ref_text": ("ref_text", "ref_transcript", "reference_text", "prompt_text"),
    "voice_prompts": ("voice_prompts",), "voices": ("voices",)}


def find_columns(names):
    """{meaning: column name} of a table's column names."""
    lower = {}
    for name in names:
        lower.setdefault(str(name).strip().lower(), name)
    return {meaning: lower[spelling] for meaning, spellings in COLUMNS.items()
            for spelling in [next((s for s in spellings if s in lower), None)] if spelling}
