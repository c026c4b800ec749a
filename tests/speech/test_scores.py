"""Word errors, text normalisation and external commands of speech recognition."""
import sys

import numpy as np
import pytest

from core.cli import UserError
from speech import judges

RATE = 24000


@pytest.mark.parametrize("text, heard, words, characters", [
    ("the cat sat", "The bat sat.", (1, 3), (1, 9)), ("the cat sat", "the the cat", (2, 3), (4, 9)),
    ("the cat sat", "", (3, 3), (9, 9)), ("one", "one two three", (2, 1), (8, 3)), ("", "noise", (1, 0), (5, 0)),
    ("notebook", "note book", (2, 1), (0, 8))])
def test_error_counts_by_hand(text, heard, words, characters):
    assert judges.word_errors([text], [heard]) == words
    assert judges.word_errors([text], [heard], split=lambda text: text.replace(" ", "")) == characters
    again = judges.word_errors([text, "a b"], [heard, "a c"])       # summed, not averaged
    assert again == (words[0] + 1, words[1] + 2)


@pytest.mark.parametrize("language, text, expected", [
    (None, "[laughter] Straße, one 3.5 <SE>", "straße one 3 5"), ("zh", "你好，世界。", "你 好 世 界"),
    ("en", "Mr. Smith's uh twenty-one cats", "mister smith is 21 cats")])
def test_text_is_normalised_by_the_rules_of_whisper(language, text, expected):
    assert judges.normaliser(language)(text).split() == expected.split()


def test_a_command_hears_every_wave_in_order(tmp_path):
    script = tmp_path / "asr.py"
    script.write_text("import sys, soundfile\n"
                      "for path in sys.argv[2:]: print(sys.argv[1], soundfile.info(path).frames)")
    waves = [np.zeros(n, np.float32) for n in (30, 10, 20)]
    command = f"{sys.executable} {script} 'a b'"
    assert judges.recognise_command(waves, RATE, command=command) == ["a b 30", "a b 10", "a b 20"]
    for command, message in (("false", "status 1, 0 lines for 3 files"), ("no-such-program", "No such file or directory: 'no-such-program'"),
                             ("echo", "status 0, 1 lines for 3 files")):
        with pytest.raises(UserError, match=message):
            judges.recognise_command(waves, RATE, command=command)
    assert judges.recognise_command(waves[:1], RATE, command=r"""sh -c 'printf "a\377b"'""") == ["a\ufffdb"]


def test_a_command_that_does_not_answer_is_ended():
    with pytest.raises(UserError, match="timed out after 0.2 seconds"):
        judges.recognise_command([np.zeros(RATE, np.float32)], RATE, command="tail -f", time_limit=0.2)
