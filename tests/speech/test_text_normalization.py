"""Text normalised as boson-ai's generation.py does, against its rules written once more; a checkpoint's setting."""
import random

import pytest

from speech import conversations

# boson-ai/higgs-audio examples/generation.py (f04f5df), one replacement after the other, in its order
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
    """The rules as the facts tell them: replacements in order, lines tidied and empty ones dropped, a last stop."""
    for old, new in STEPS:
        text = new.join(text.split(old))
    lines = [" ".join(line.split()) for line in text.split("\n")]
    text = "\n".join(line for line in lines if line).strip()
    return text if text[-1:] in list(".!?,;\"'") or text.endswith(("</SE_e>", "</SE>")) else text + "."


def test_normalised_as_boson_does_whatever_the_text():
    draw, pieces = random.Random(0), [old for old, _ in STEPS] + list("ab°CF[]().,;!?:'\" \t\n\r\u2028") + ["laugh", "music", "[SPEAKER0]", "</SE_s>"]
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.randrange(12)))
        assert conversations.normalise(text) == reference(text), text


@pytest.mark.parametrize("text, heard", [("《三体》[laugh] 好", "三体 好."), ("[SPEAKER0] Hi [music start] la [music end]",
                                                                      "Hi la"), ("20°F", "20 degrees " "Fahrenheit.")])
def test_what_can_be_heard_of_a_text(text, heard):
    assert " ".join(conversations.audible_text(text).split()) == heard


def test_speech_follows_the_checkpoint(tmp_path):
    """On or off as the adapter, else the model says; a base: on; a flag beats all."""
    base, on, off = (tmp_path / name for name in ("base", "on", "off"))
    for folder in (base, on, off):
        folder.mkdir()
    conversations.save_setting(on / conversations.SETTINGS, "on")
    conversations.save_setting(off / conversations.SETTINGS, "off")
    told = {
        (None, base, None): (True, f"{base} is not a checkpoint of this"), (None, base, on): (True, f"{on} was trained"),
        (None, base, off): (False, f"{off} was trained"), (None, off, None): (False, f"{off} was trained"),
        ("off", base, on): (False, f"off; {on} was trained with on"), ("on", base, off): (True, "trained with off"),
        ("off", base, off): (False, "--normalize_text off")}
    for (wanted, model, adapter), (normalize, said) in told.items():
        found, line = conversations.setting_to_speak(wanted, model, adapter)
        assert found is normalize and said in line and f"--normalize_text {'on' if found else 'off'}" in line
    (on / conversations.SETTINGS).write_text("half of i")
    assert conversations.saved_setting(on) is None
