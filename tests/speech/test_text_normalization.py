"""Text normalisation against a second implementation of boson-ai's rules, and the setting of a checkpoint."""
import json
import random

import pytest

from speech import conversations, judges, speak

# replacements of boson-ai/higgs-audio examples/generation.py (f04f5df), in its order
STEPS = [(mark, plain) for marks, plain in (
    ("，", ", "), ("。", "."), ("：", ":"), ("；", ";"), ("？", "?"), ("！", "!"), ("（", "("), ("）", ")"),
    ("【", "["), ("】", "]"), ("《", "<"), ("》", ">"), ("“”", '"'), ("‘’", "'"), ("、", ","), ("—", "-"),
    ("…", "..."), ("·", "."), ("「」『』", '"')) for mark in marks] + [
    ("(", " "), (")", " "), ("°F", " degrees Fahrenheit"), ("°C", " degrees Celsius"),
    ("[laugh]", "<SE>[Laughter]</SE>"), ("[humming start]", "<SE_s>[Humming]</SE_s>"),
    ("[humming end]", "<SE_e>[Humming]</SE_e>"), ("[music start]", "<SE_s>[Music]</SE_s>"),
    ("[music end]", "<SE_e>[Music]</SE_e>"), ("[music]", "<SE>[Music]</SE>"),
    ("[sing start]", "<SE_s>[Singing]</SE_s>"), ("[sing end]", "<SE_e>[Singing]</SE_e>"),
    ("[applause]", "<SE>[Applause]</SE>"), ("[cheering]", "<SE>[Cheering]</SE>"), ("[cough]", "<SE>[Cough]</SE>")]


def reference(text):
    """Make the replacements in order, strip lines, drop empty ones and add a final stop."""
    for old, new in STEPS:
        text = new.join(text.split(old))
    lines = [" ".join(line.split()) for line in text.split("\n")]
    text = "\n".join(line for line in lines if line).strip()
    return text if text[-1:] in list(".!?,;\"'") or text.endswith(("</SE_e>", "</SE>")) else text + "."


def test_random_texts_are_normalised_like_the_reference():
    draw, words = random.Random(0), ["laugh", "music", "[SPEAKER0]", "</SE_s>"]
    pieces = [old for old, _ in STEPS] + list("ab°CF[]().,;!?:'\" \t\n\r\u2028") + words
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.randrange(12)))
        assert conversations.normalise(text) == reference(text), text


@pytest.mark.parametrize("text, heard", [
    ("《三体》[laugh] 好", "三体 好."), ("[SPEAKER0] Hi [music start] la [music end]", "Hi la"),
    ("20°F", "20 degrees Fahrenheit.")])
def test_audible_text_has_no_marks(text, heard):
    assert " ".join(judges.audible_text(text).split()) == heard


def test_speech_follows_the_checkpoint(tmp_path):
    """A flag decides, else the setting of the adapter, else that of the model; a base has none: on."""
    base, on, off = (tmp_path / name for name in ("base", "on", "off"))
    for folder in (base, on, off):
        folder.mkdir()
    for folder, setting in ((on, "on"), (off, "off")):
        (folder / conversations.SETTINGS).write_text(json.dumps({"normalize_text": setting}))
    expected = {
        (None, base, None): (True, f"{base} is not a checkpoint of"), (None, base, on): (True, f"{on} was trained"),
        (None, base, off): (False, f"{off} was trained"), (None, off, None): (False, f"{off} was trained"),
        ("off", base, on): (False, f"off; {on} was trained with on"), ("on", base, off): (True, "trained with off"),
        ("off", base, off): (False, "--normalize_text off")}
    for (flag, model, adapter), (normalize, words) in expected.items():
        setting, line = speak.setting_to_speak(flag, model, adapter)
        assert setting is normalize and words in line and f"--normalize_text {'on' if setting else 'off'}" in line
    (on / conversations.SETTINGS).write_text("half of i")
    assert speak.saved_setting(on) is None
