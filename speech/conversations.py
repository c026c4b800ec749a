"""Flags of speech data, and a ChatML sample of any known shape -> one canonical conversation.

The canonical form is the one Higgs-Audio's own inference builds (boson-ai/higgs-audio
examples/generation.py): a system turn, a user turn with each reference's transcript answered by an
assistant turn with its clip, then the target text answered by the target clip. Text is never cut.
The text to speak is normalised if the caller asks for it; a reference's transcript never is.
Imports no torch.
"""
import os
import re
import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from core.cli import SHARE, one_line, require
from core.json_files import HALF_CHARACTER

DEFAULT_SYSTEM = "Generate audio following instruction."
MULTISPEAKER_SYSTEM = (     # boson-ai/higgs-audio examples/generation.py, for texts of several
    "You are an AI assistant designed to convert text into speech.\n"
    "If the user's message includes a [SPEAKER*] tag, do not read out the tag and generate speech "
    "for the following text, using the specified voice.\n"
    "If no speaker tag is present, select a suitable voice on your own.")
TAG = re.compile(r"\[(SPEAKER\d+)\]")
TASK_TYPES = ("zero_shot_voice_cloning", "single_speaker_smart_voice", "multi_speaker_smart_voice",
              "multi_speaker_voice_cloning")
CHATML = (".json", ".jsonl")        # files whose prompts name their voice themselves
# checks of samples, for --drop_bad
CHECKS = ("invalid", "empty_text", "control_token", "audio", "too_long")
FRAME_RATE = 25         # codec frames per second: 24 kHz / hop 960
LONGEST_CLIP_S = 600    # the codec encodes a clip at once, and a second takes 25 positions
CACHE_SIZE = 100_000         # audio files that are remembered: references come again
SETTINGS = "text_settings.json"     # in a checkpoint: --normalize_text and --base_dtype of its run

# boson-ai/higgs-audio examples/generation.py (f04f5df), lines 44-80 and 701-728
MARKS = str.maketrans({
    "，": ", ", "。": ".", "：": ":", "；": ";", "？": "?", "！": "!", "（": "(", "）": ")",
    "【": "[", "】": "]",
    "《": "<", "》": ">", "“": '"', "”": '"', "‘": "'", "’": "'", "、": ",", "—": "-", "…": "...",
    "·": ".", "「": '"', "」": '"', "『": '"', "』": '"'})
SOUNDS = {"[laugh]": "<SE>[Laughter]</SE>", "[humming start]": "<SE_s>[Humming]</SE_s>",
          "[humming end]": "<SE_e>[Humming]</SE_e>", "[music start]": "<SE_s>[Music]</SE_s>",
          "[music end]": "<SE_e>[Music]</SE_e>", "[music]": "<SE>[Music]</SE>",
          "[sing start]": "<SE_s>[Singing]</SE_s>", "[sing end]": "<SE_e>[Singing]</SE_e>",
          "[applause]": "<SE>[Applause]</SE>", "[cheering]": "<SE>[Cheering]</SE>",
          "[cough]": "<SE>[Cough]</SE>"}
ENDINGS = (".", "!", "?", ",", ";", '"', "'", "</SE_e>", "</SE>")

# the instruction the community form puts before the target text; only this prefix is removed, never
# text after a colon
INSTRUCTION = re.compile(r"^\s*please generate speech\b[^:]*:\s*", re.IGNORECASE)
SHORTENED = "have a request with words before the text that is spoken: these words are left out"


class BadSample(Exception):
    """Why one sample cannot be used. check: of CHECKS."""

    def __init__(self, why, check="invalid"):
        super().__init__(why)
        self.check = check


@dataclass(frozen=True, slots=True)
class Clip:
    """Part of an audio file. filled: zeros pad it to codes.MIN_REFERENCE_S seconds."""
    path: str
    offset: float | None = None         # seconds from the start; None = the whole file
    duration: float | None = None       # seconds from offset; None = to the end
    filled: bool = False


@dataclass
class Turn:
    """One message: role and its parts (text or Clip) in order; source = index of its message.
    shortened: whether words before the text to speak were left out."""
    role: str
    parts: list
    source: int | None
    trained: bool = False
    shortened: bool = False

    @property
    def clips(self):
        return [piece for piece in self.parts if isinstance(piece, Clip)]

    @property
    def text(self):
        return "".join([piece for piece in self.parts if isinstance(piece, str)])


@dataclass
class Sample:
    """A canonical conversation. name: its place in the user's files; speaker, language: the data's
    labels. notes: [(check, text)] of oddities that stop no run."""
    name: str
    turns: list
    speaker: str = ""
    language: str = ""
    notes: list = field(default_factory=list)


# ---- Flags


@dataclass(frozen=True)
class Reading:
    """Settings by which data become conversations: the flags of these names."""
    task_type: str = "single_speaker_smart_voice"
    columns: str = ""
    reference: str = "given"
    reference_share: float = 1.0
    seed: int = 42
    normalize: bool = False         # the texts to speak
    lone_reference: bool = False    # whether the model takes a clip without its words


def data_flags(p):
    flag = p.flag
    flag("--train_data_file", None, "data in any format of docs/data.md, mixed; the weight is the "
         "number of passes per epoch (default: 1)", nargs="+", metavar="PATH[:WEIGHT]")
    flag("--train_data_dir", None, "the same for folders: of prepare_tts.py, with metadata.json, "
         "or audio with texts next to it", nargs="+", metavar="PATH[:WEIGHT]")
    flag("--eval_data_dir", None, "validation folder, like --train_data_dir")
    flag("--model_path", None, "folder or hub name of Higgs-Audio V2 or TTS 3", required=True)
    flag("--audio_tokenizer_path", None, "native audio tokenizer, folder or hub name")
    flag("--code_cache", None, "encoded audio, shared by runs (default: OUTPUT_DIR/codes)")
    flag("--columns", "", "columns of a table, as in docs/data.md", metavar="MEANING=NAME,...")
    flag("--task_type", TASK_TYPES[1], "prompt form; not for ChatML", choices=TASK_TYPES)
    flag("--normalize_text", None, "normalise punctuation and sound tags as boson-ai's inference "
         "does (default: on for Higgs-Audio V2, off for Higgs TTS 3)", choices=("on", "off"))
    flag("--reference", "given", "clip before the text, to clone; not for ChatML",
         choices=("given", "same_speaker", "none"))
    flag("--reference_share", 1.0, "share that keeps its reference, drawn by --seed", SHARE)


def check_data(args):
    """Check the flags of data_flags(). UserError."""
    for name in ("train_data_file", "train_data_dir"):
        setattr(args, name, [word for word in getattr(args, name) or [] if word])
    require(bool(args.train_data_file) != bool(args.train_data_dir),
            "give --train_data_file or --train_data_dir")
    require(not (args.eval_data_file and args.eval_data_dir),
            "give one of --eval_data_file and --eval_data_dir, not both")
    if args.columns:
        from speech import convert
        convert.check_columns(args.columns)
    require(args.reference != "none" or args.reference_share == 1,
            "--reference none: drop --reference_share")
    for path, weight, _ in source_paths(args):
        require(0 < weight <= 1000, f"{path}:{weight:g}: a weight is above 0 and at most 1000")


def source_paths(args):
    """[(file or folder, weight, True for validation data)]."""
    paths = []
    for word in args.train_data_file or args.train_data_dir:
        match = re.fullmatch(r"(.+):(\d+\.?\d*|\.\d+)", word)
        weighted = match and not os.path.exists(word)
        path, weight = (match[1], float(match[2])) if weighted else (word, 1.0)
        paths.append((path, weight, False))
    held_out = args.eval_data_file or args.eval_data_dir
    return [*paths, (held_out, 1.0, True)] if held_out else paths


# ---- Audio files by name


class Paths:
    """Finds audio files relative to the data file's folder, its parent, its grandparent and the
    current folder. inside: subfolders of the first to search. endings: that a name may omit."""

    def __init__(self, base, inside=(), endings=()):
        folders = [base, *(base / name for name in inside), *base.parents[:2], Path.cwd()]
        self.base, self.folders = base, list(dict.fromkeys(map(str, folders)))
        self.endings = ("", *endings)
        self.look_up = lru_cache(CACHE_SIZE)(self.look_up)

    def find(self, name):
        """Absolute path of an audio file; BadSample with every place that was tried."""
        if path := self.look_up(name):
            return path
        tried = ", ".join(dict.fromkeys(os.path.join(folder, name) for folder in self.folders))
        raise BadSample(f"audio file {name!r} not found; tried {tried}")

    def look_up(self, name):
        """Absolute path of a file, as Windows or macOS may spell it, too; "" if there is none."""
        spellings = dict.fromkeys([name, name.replace("\\", "/"), *(
            unicodedata.normalize(form, name) for form in ("NFC", "NFD"))])
        paths = dict.fromkeys(os.path.join(folder, spelling) for spelling in spellings
                              for folder in self.folders)       # an absolute path stays one
        for path in (path + ending for path in paths for ending in self.endings):
            if os.path.isfile(path):
                return os.path.abspath(path)
        return ""


# ---- Raw samples


def content_items(entry):
    """All content items of a raw sample's messages, of any type."""
    messages = entry["messages"] if isinstance(entry.get("messages"), list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return [item for content in contents
            for item in (content if isinstance(content, list) else [content])]


def is_chatml(entry):
    """True if a JSON entry has messages that hold its audio, or no other key names audio."""
    if not isinstance(entry, dict) or not isinstance(entry.get("messages"), list):
        return False
    spoken = any(isinstance(item, dict) and item.get("type") == "audio"
                 for item in content_items(entry))
    return spoken or "audios" not in entry and "audio" not in entry


def sample_name(location, entry):
    """Name of a row or sample in messages: location, and its id or the file of its last clip."""
    if not isinstance(entry, dict):
        return location
    misc = entry.get("misc") if isinstance(entry.get("misc"), dict) else {}
    clips = [item.get("audio_url") for item in content_items(entry) if isinstance(item, dict)]
    clips = [clip for clip in (*clips, entry.get("audio")) if isinstance(clip, str) and clip]
    label = misc.get("sample_id") or entry.get("id") or os.path.basename((clips or [""])[-1])
    return f"{location} ({one_line(label, 80)})" if label else location


def sample_text(sample):
    """One line that shows how a sample was read: texts and clips in order, and the labels."""
    parts = [piece if isinstance(piece, str) else piece.path
             for turn in sample.turns if turn.role != "system" for piece in turn.parts]
    return f"{parts}, speaker {sample.speaker or None}, language {sample.language or None}"


def message_parts(message, paths):
    """(role, parts) of one raw message; parts are str or Clip. Raises BadSample."""
    if not isinstance(message, dict):
        raise BadSample(f"a message is a {type(message).__name__}, not an object")
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "scene", "user", "assistant"):
        raise BadSample(f"unknown role {role!r}; known: system, scene, user, assistant")
    parts = []
    for item in content if isinstance(content, list) else [content]:
        item = {"type": "text", "text": item} if isinstance(item, str) else item
        kind = item.get("type") if isinstance(item, dict) else None
        if kind not in ("text", "audio"):
            raise BadSample(f"unknown content type {kind!r} of role {role!r}; known: text, audio")
        piece = parse_clip(item, paths) if kind == "audio" else item.get("text")
        if not isinstance(piece, (str, Clip)):
            raise BadSample(f"a text item of role {role!r} has no string 'text'")
        if isinstance(piece, str) and HALF_CHARACTER.search(piece):
            raise BadSample(f"a text of role {role!r} holds half a character: {piece!r}")
        if isinstance(piece, Clip) or piece.strip():
            parts.append(piece)
    return role, parts


def parse_clip(item, paths):
    name = item.get("audio_url") or item.get("url") or item.get("path")
    if not name:
        raise BadSample("an audio item has no 'audio_url'; inline audio is not read")
    offset, duration = item.get("offset"), item.get("duration")
    for key, value in (("offset", offset), ("duration", duration)):
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < 1e7):
            raise BadSample(f"'{key}' of {name!r} is {value!r}, not seconds")
    if offset is not None and duration == 0:
        raise BadSample(f"{name!r} lasts 0 s from offset {offset} s on")
    # duration alone is the dataset's note on the clip's length; only an offset makes it a cut
    return Clip(paths.find(str(name)), offset, duration if offset is not None else None)


def system_parts(text, scene="", voices=None, references=False):
    """(what a system turn says, scene description or "") for a text, as boson-ai's generation.py.
    With several [SPEAKER*] and no references, the scene describes their voices. voices: {tag:
    description}; voices without one alternate between feminine and masculine."""
    tags = sorted(set(TAG.findall(text)))
    if references or len(tags) < 2:
        return DEFAULT_SYSTEM, scene
    voice_lines = [f"{tag}: {(voices or {}).get(tag) or ('feminine', 'masculine')[i % 2]}"
                   for i, tag in enumerate(tags)]
    return MULTISPEAKER_SYSTEM, "\n\n".join(filter(None, [scene, "\n".join(voice_lines)]))


# ---- The canonical form


def canonical_sample(name, entry, paths, normalize=False):
    """One raw sample (a dict with 'messages') -> Sample. Raises BadSample.

    Trained are the assistant turns from message start_index on, as in the official collator;
    without start_index, or with 0 in the community form, the last assistant turn with audio.
    normalize: normalise the texts that these turns speak."""
    turns, rewritten = canonical_turns(entry, paths)
    mark_trained(turns, entry.get("start_index"), rewritten, len(entry["messages"]))
    for before, turn in zip(turns, turns[1:]):
        if turn.trained and not turn.text and not (before.role == "user" and before.text.strip()):
            raise BadSample("the trained clip has no text before it")
    if normalize:
        normalise_requests(turns)
    *references, target = [clip for turn in turns for clip in turn.clips]
    notes = [("own_reference", "its reference is the clip itself")] * (target in references)
    return Sample(name, [trim_turn(turn) for turn in turns], str(entry.get("speaker") or ""),
                  str(entry.get("language") or ""), notes)


def normalise_requests(turns):
    for before, turn in zip(turns, turns[1:]):
        if turn.trained and turn.clips and before.role == "user" and before.text.strip():
            before.parts = [normalise(before.text)]


def canonical_turns(entry, paths):
    """(canonical turns, whether a user's reference audio got turns)."""
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not messages:
        raise BadSample("has no list 'messages'")
    misc = entry.get("misc") if isinstance(entry.get("misc"), dict) else {}
    ref_words, target_words = (misc[key].strip() if isinstance(misc.get(key), str) else ""
                               for key in ("ref_transcript", "target_transcript"))
    parsed = [message_parts(message, paths) for message in messages]
    turns, scenes, rewritten = [], [], False
    for index, (role, parts) in enumerate(parsed):
        turn = Turn(role, parts, index)
        if role == "scene":
            scenes.append(parts)
        elif role == "user" and turn.clips:
            answers = [Turn(r, p, 0).text for r, p in parsed[index + 1:] if r == "assistant"]
            answer = "".join(answers[:1]).strip() or target_words
            turns += reference_turns(turn, answer, ref_words)
            rewritten = True
        elif role == "assistant":
            if turn.text.strip() and turn.clips and turns and turns[-1].role == "user":
                # drop an answer's text that repeats the request, and words before it in the request
                target, how = target_text(turns[-1].text, turn.text)
                if how:
                    turns[-1].parts, turn.parts = [target], turn.clips
                    turn.shortened = how == "shortened"
            turns.append(turn)
        elif parts:
            turns.append(turn)
    if not turns or turns[0].role != "system":
        asked = [i for i, turn in enumerate(turns) if turn.role == "user"]
        # clips before the last request are references; the one after it, if any, is the target
        earlier = turns[:asked[-1]] if asked else []
        heard = any(turn.clips for turn in earlier if turn.role == "assistant")
        system, voices = system_parts("\n".join(turns[i].text for i in asked), references=heard)
        turns.insert(0, Turn("system", [system], None))
        scenes += [[voices]] if voices else []
    if isinstance(entry.get("scene"), str) and entry["scene"].strip():
        scenes.append([entry["scene"]])
    if scenes and "<|scene_desc_start|>" not in turns[0].text:
        # a line for each text, as the native chat template does
        turns[0].parts.append("\n\n<|scene_desc_start|>")
        for parts in scenes:
            for number, piece in enumerate(parts):
                new = "\n" if number == 0 or isinstance(piece, str) else ""
                turns[0].parts += [new + piece.strip()] if isinstance(piece, str) else [new, piece]
        turns[0].parts.append("\n<|scene_desc_end|>")
    return turns, rewritten


def reference_turns(turn, answer, ref_transcript):
    """A user message with reference audio -> [user transcript, assistant clip] for each clip, then
    the user's target. answer: the target text that is repeated, "" if none.

    The text before a clip is its transcript. With two texts and one clip, the first text is the
    transcript wherever the clip comes, as in community trainers."""
    def is_target(words):
        return target_text(words, answer)[1] is not None

    texts = [piece.strip() for piece in turn.parts if isinstance(piece, str)]
    if len(texts) == 1 and answer and is_same_text(texts[0], ref_transcript):
        texts.append(answer)
    elif len(texts) == 1 and is_target(texts[0]):
        texts.insert(0, ref_transcript)
    elif len(texts) == 2 and not is_target(texts[1]) and (is_target(texts[0]) or (
            INSTRUCTION.match(texts[0]) and not INSTRUCTION.match(texts[1]))):
        texts.reverse()                     # the instruction precedes the transcript
    if len(turn.clips) == 1 and len(texts) == 2:
        pairs, target = [(texts[0], turn.clips[0])], texts[1]
    else:
        pairs, target = [], ""
        for piece in turn.parts:
            if isinstance(piece, Clip):
                pairs.append((target.strip() or (ref_transcript if not pairs else ""), piece))
                target = ""
            else:
                target += piece
    target, how = target_text(target, answer)
    target = target or answer
    if not target:
        raise BadSample("no target text: neither the user nor the assistant says it")
    turns = []
    for transcript, clip in pairs:
        if not transcript:
            raise BadSample(f"{clip.path!r} has no transcript before it (nor misc.ref_transcript)")
        turns += [Turn("user", [transcript], turn.source), Turn("assistant", [clip], None)]
    return [*turns, Turn("user", [target], turn.source, shortened=how == "shortened")]


def mark_trained(turns, start_index, rewritten, n_messages):
    """Set which turns are trained; of canonical_sample. Raises BadSample."""
    if start_index is not None and not (isinstance(start_index, int) and start_index >= 0):
        raise BadSample(f"start_index is {start_index!r}, not a message number")
    answers = [turn for turn in turns if turn.role == "assistant" and turn.source is not None]
    speaking = [turn for turn in answers if turn.clips]
    if not speaking:
        raise BadSample("has no target audio: no assistant message with an audio item")
    last_alone = start_index is None or rewritten and start_index == 0
    for turn in answers:
        turn.trained = turn is speaking[-1] if last_alone else turn.source >= start_index
    if not any(turn.trained for turn in speaking):
        raise BadSample(f"start_index {start_index} of {n_messages} messages trains nothing")


def trim_turn(turn):
    """Trim the outer ends of a turn's text, as the native chat template does."""
    if turn.parts and isinstance(turn.parts[0], str):
        turn.parts[0] = turn.parts[0].lstrip()
    if turn.parts and isinstance(turn.parts[-1], str):
        turn.parts[-1] = turn.parts[-1].rstrip()
    turn.parts = [piece for piece in turn.parts if piece]
    return turn


# ---- Text as the model was trained to read it


def normalise(text):
    """Text as boson-ai's own inference gives it to the model: ASCII punctuation, sound tags, tidy
    lines, a last stop. Spaces at both ends go, line breaks between lines stay."""
    text = text.translate(MARKS).replace("(", " ").replace(")", " ")
    text = text.replace("°F", " degrees Fahrenheit").replace("°C", " degrees Celsius")
    for tag, sound in SOUNDS.items():
        text = text.replace(tag, sound)
    text = "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip()).strip()
    return text if text.endswith(ENDINGS) else text + "."


# ---- The text in a request that also says what to do


def letters(text):
    """A text's letters, digits and symbols as one lower case string, without punctuation."""
    return "".join(c for c in text.casefold() if unicodedata.category(c)[0] not in "PZC")


def is_same_text(a, b):
    """True if two texts differ at most in punctuation, white space and letter case."""
    return a == b or letters(a) == letters(b) != ""


def target_text(asked, answer):
    """(text to speak in the request `asked`, how it was recognised).

    answer: transcript of the target audio, "" if the sample has none. Recognised: "same" if the
    request is the answer, with or without an INSTRUCTION before it; "shortened" if other words come
    before it; None if the request is another text. The text is whole, colons included."""
    asked, answer = asked.strip(), answer.strip()
    bare, need = INSTRUCTION.sub("", asked, count=1).strip(), letters(answer)
    for words in (asked, bare):         # a text may begin like an instruction
        if answer and is_same_text(words, answer):
            return words, "same"
    ends = need and letters(asked).endswith(need)
    if ends and any(letters(asked[i:]) == need for i in range(1, len(asked))
                    if not letters(asked[i - 1])):      # not inside a word
        return answer, "shortened"
    return bare, None
