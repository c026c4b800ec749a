"""The text of a request, the same in training and in speaking: normalised as boson-ai does, nothing
but what to say.

    normalise("多い，少ない（はい）")      # '多い, 少ない はい.'

Scripts call it through --normalize_text on|off. A checkpoint has its run's setting in
text_settings.json, and speech follows that. Imports nothing outside the standard library.
"""
import json
import re
import unicodedata
from pathlib import Path

from core.cli import UserError
from core.json_files import read_object

FILE = "text_settings.json"     # in a checkpoint

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
# 《》 are <> by then
NOT_HEARD = re.compile(r"<(SE(?:_[se])?)>\[\w+\]</\1>|\[SPEAKER\d+\]|[<>]")

# the instruction the community form puts before the target text; only this prefix is removed, never
# text after a colon
INSTRUCTION = re.compile(r"^\s*please generate speech\b[^:]*:\s*", re.IGNORECASE)
# of samples, by what target_text recognised in them
RECOGNISED = {"punctuation": "repeat their request in other punctuation: the request's is used",
              "instruction": "have other words before the text that their answer repeats: these "
                             "are left out"}


def normalise(text):
    """Text as boson-ai's own inference gives it to the model: ASCII punctuation, sound tags, tidy
    lines, a last stop.

    Spaces at both ends go, line breaks between lines stay.
    """
    text = text.translate(MARKS).replace("(", " ").replace(")", " ")
    text = text.replace("°F", " degrees Fahrenheit").replace("°C", " degrees Celsius")
    for tag, sound in SOUNDS.items():
        text = text.replace(tag, sound)
    text = "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip()).strip()
    return text if text.endswith(ENDINGS) else text + "."


def heard(text):
    """What of a text can be heard: normalised, without sound tags and [SPEAKER0]."""
    return NOT_HEARD.sub(" ", normalise(text))


# ---- The text in a request that also says what to do


class _Letters(dict):
    """Translation table that deletes punctuation, spaces and control characters."""

    def __missing__(self, code):
        self[code] = None if unicodedata.category(chr(code))[0] in "PZC" else code
        return self[code]


_LETTERS = _Letters()


def letters(text):
    """A text's letters, digits and symbols as one lower case string; texts that differ in
    punctuation have the same.
    """
    return text.casefold().translate(_LETTERS)


def same(a, b):
    """Whether two texts differ at most in white space and letter case."""
    return a == b or " ".join(a.split()).casefold() == " ".join(b.split()).casefold()


def same_words(a, b):
    """Whether two texts differ at most in punctuation, white space and letter case."""
    return same(a, b) or bool(letters(a)) and letters(a) == letters(b)


def target_text(asked, answer):
    """(text to speak in the request `asked`, how it was recognised).

    answer: the text that the sample says is heard, "" if it says none. Recognised: "same" as the
    answer, after an INSTRUCTION or not; "punctuation" where only that differs; "instruction" where
    other words precede the answer's own; None where the request is another text. The text is whole,
    colons included.
    """
    asked, answer = asked.strip(), answer.strip()
    if answer and same(asked, answer):
        return asked, "same"
    bare = INSTRUCTION.sub("", asked, count=1).strip()
    if not answer:
        return bare, None
    if same(bare, answer):
        return bare, "same"
    if same_words(asked, answer):       # it may begin as an instruction does
        return asked, "punctuation"
    if same_words(bare, answer):
        return bare, "punctuation"
    return (answer, "instruction") if words_before(asked, answer) else (bare, None)


def words_before(asked, answer):
    """The words of a request before the answer's words with which it ends; "" where it does not end
    so.
    """
    need, start = len(letters(answer)), len(asked)
    if not need or not letters(asked).endswith(letters(answer)):
        return ""
    while need > 0:
        start -= 1
        need -= len(letters(asked[start]))
    return asked[:start].rstrip() if not need and not letters(asked[start - 1:start]) else ""


# ---- The setting of a checkpoint


def save_setting(path, value, base_dtype=None):
    """Write a checkpoint's file FILE: "on" if its run normalised its texts, else "off"; and "nf4"
    as base_dtype if its adapter was trained on such a base.
    """
    about = {"normalize_text": value} | ({"base_dtype": "nf4"} if base_dtype == "nf4" else {})
    Path(path).write_text(json.dumps(about) + "\n")


def saved_setting(folder, name="normalize_text", known=("on", "off")):
    """A setting of a checkpoint folder, None where it does not say."""
    try:
        value = read_object(Path(folder) / FILE)[name]
    except (UserError, KeyError):
        return None
    return value if value in known else None


def setting_to_speak(wanted, model, adapter=None):
    """(True to normalise spoken text, a line that says so and why).

    wanted: --normalize_text, or None for what the checkpoint was trained with. model, adapter:
    folders.
    """
    folder = adapter or model
    saved = saved_setting(folder)
    if wanted:
        other = f"; {folder} was trained with {saved}" if saved and saved != wanted else ""
        return wanted == "on", f"--normalize_text {wanted}{other}"
    if saved:
        return saved == "on", f"--normalize_text {saved}, as {folder} was trained"
    return True, ("--normalize_text on, as in boson-ai's inference: "
                  f"{folder} is not a checkpoint of this trainer")
