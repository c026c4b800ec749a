"""What the columns of a table of speech mean, by their names, and which files are audio or text, by their endings."""
from common.distributed import UserError

AUDIO_FILES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".oga", ".aiff", ".aif", ".au", ".caf", ".w64", ".rf64")
OTHER_AUDIO = (".m4a", ".aac", ".mp4", ".webm", ".wma", ".amr")     # libsndfile does not read them
TEXTS = (".txt", ".normalized.txt", ".lab")                         # beside an audio file
CUES = (".srt", ".vtt")                                             # texts with times: cuts of a recording
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
    "voice_prompts": ("voice_prompts",), "voices": ("voices",),
    "normalize_text": ("normalize_text",)}


def find_columns(names, given=""):
    """{meaning: column name} of a table's column names. given: what --columns says, "audio=clip,text=caption"."""
    lower = {}
    for name in names:
        lower.setdefault(str(name).strip().lower(), name)
    chosen = dict(pair.split("=", 1) for pair in given.split(",") if pair)
    found = {}
    for meaning, spellings in COLUMNS.items():
        spellings = (chosen[meaning].lower(),) if meaning in chosen else spellings
        if spelling := next((s for s in spellings if s in lower), None):
            found[meaning] = lower[spelling]
    return found


def check_given(path, names, given):
    """Raise UserError where --columns says a column that a table with these does not have."""
    there = {str(name).strip().lower() for name in names}
    if wrong := [pair for pair in given.split(",") if pair and pair.split("=", 1)[1].lower() not in there]:
        raise UserError(f"{path}: has no column as --columns {','.join(wrong)} says; its columns are {_listed(names)}")


def _listed(names):
    return ", ".join(str(name)[:40] for name in list(names)[:20])


def unknown_columns(path, names, found, given):
    """UserError of a table without a known column of audio, of text, or of both. found, given: of find_columns."""
    check_given(path, names, given)
    missing = [meaning for meaning in ("audio", "text") if meaning not in found]
    known = "; ".join(f"of {meaning} are {', '.join(COLUMNS[meaning])}" for meaning in missing)
    return UserError(f"{path}: has no column of {' and none of '.join(missing)}; its columns are "
                     f"{_listed(names)}; known names {known}; name yours: --columns "
                     + ",".join(f"{meaning}=NAME" for meaning in missing))
