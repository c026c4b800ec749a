"""--best_of and --split_text: the take that is understood best is kept, and parts are spoken behind one another."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from speech.data.conversations import Clip
from speech.data.encode import load_codec
from speech.demo import judge_demo
from speech.generate_tts import load_to_speak
from speech.model import v2
from speech.model.labels import delay_rows
from speech.voice import generate, scores, takes
from tests.helpers.checkpoints import config_of
from tests.helpers.trainer import ROOT

VOICE = ROOT / "launch" / "voice"
CPU = torch.device("cpu")
TEXTS = ["five nine three seven four.", "one one eight zero.", "six two four nine."]


@pytest.fixture(scope="module")
def voice():
    """(native model that speaks digits, TokenIds, codec, settings, prepare(samples, numbers))."""
    config = config_of(VOICE / "model")
    native = load_to_speak(VOICE / "model", config, None, torch.float32, CPU)
    tokenizer = v2.load_tokenizer(VOICE / "model")
    ids = v2.token_ids(tokenizer, native.config)
    codec, bandwidth = load_codec(VOICE / "codec", CPU, 8)

    def prepare(samples, numbers):
        return generate.prepare(samples, tokenizer, ids, codec, bandwidth, 1000, numbers)
    return native, ids, codec, generate.sampling(native.config, 4.0, temperature=1.0, ras_window=0), prepare


def judges():
    """pocketsphinx with digits; a voice that is always the same, so that no take is taken for faultless."""
    def hear(waves, rate, names, notes):
        return scores.recognise_pocketsphinx(waves, rate, judge_demo.GRAMMAR)
    return scores.Judges(hear, lambda wave: np.ones(1), False, None, [])


def by_hand(voice, prompts, count):
    """[(codes, characters mistaken per character)] of the best take of each prompt, take by take, clip by clip."""
    native, ids, codec, settings, _ = voice
    best = [None] * len(prompts)
    for take in range(count):
        for i, (codes, _) in enumerate(generate.generate(native, prompts, ids, settings, 5 + take * takes.STRIDE, CPU)):
            said = scores.recognise_pocketsphinx([generate.decode(codec, codes)], generate.SAMPLE_RATE, judge_demo.GRAMMAR)
            errors, length = scores.character_errors([prompts[i].text], said)
            if best[i] is None or errors / length < best[i][1]:
                best[i] = codes, errors / length
    return best


@pytest.mark.slow
def test_the_take_that_is_understood_best_is_kept(voice, monkeypatch):
    """Red when a take is given what was heard of its neighbour."""
    pytest.importorskip("pocketsphinx")
    native, ids, codec, settings, prepare = voice
    prompts = prepare(generate.text_prompts([(text, text) for text in TEXTS], False), None)
    expected = by_hand(voice, prompts, 2)

    def found():
        return takes.speak(native, codec, ids, settings, prompts, 5, 2, judges())
    for (codes, ended_by, wave, facts), (theirs, errors) in zip(found(), expected):
        assert np.array_equal(codes, theirs) and facts["cer"] == pytest.approx(errors) and ended_by == "eos"
        assert np.array_equal(wave, generate.decode(codec, codes))
    right = takes.judge

    def of_the_next_clip(some, waves, *rest):
        facts, values = right(some, waves, *rest)
        return facts[1:] + facts[:1], values
    monkeypatch.setattr(takes, "judge", of_the_next_clip)
    assert not all(np.array_equal(codes, theirs) for (codes, *_), (theirs, _) in zip(found(), expected))


def test_what_does_not_end_is_spoken_again(voice, monkeypatch):
    """Without any judge: until it ends, or the takes are used up; what has ended is left alone."""
    native, ids, codec, settings, prepare = voice
    prompts, asked = prepare(generate.text_prompts([(text, text) for text in TEXTS], False), None), []
    ends = {TEXTS[0]: ["eos"], TEXTS[1]: ["length", "length", "eos"], TEXTS[2]: ["length"] * 4}

    def scripted(native, some, ids, settings, seed, device):
        asked.append(([prompt.text for prompt in some], seed))
        return [(np.zeros((9, 8), int), ends[prompt.text].pop(0)) for prompt in some]
    monkeypatch.setattr(generate, "generate", scripted)
    found = takes.speak(native, codec, ids, settings, prompts, 7, 4, scores.load_judges())
    assert [(how, facts["take"]) for _, how, _, facts in found] == [("eos", 0), ("eos", 2), ("length", 0)]
    assert asked == [(TEXTS, 7), (TEXTS[1:], 7 + takes.STRIDE), (TEXTS[1:], 7 + 2 * takes.STRIDE),
                     (TEXTS[2:], 7 + 3 * takes.STRIDE)]


@pytest.mark.parametrize("text, most, expected", [
    ("One. Two! Three?", 100, ["One. Two! Three?"]), ("One. Two! Three?", 9, ["One. Two!", "Three?"]),
    ("One two, three four five.", 12, ["One two,", "three four", "five."]), ("Nodecimals 3.5 cut.", 15, ["Nodecimals 3.5", "cut."]),
    ("unbreakable", 3, ["unbreakable"]), ("你好。再见。谢谢。", 7, ["你好。再见。", "谢谢。"])])
def test_texts_are_cut_behind_sentences_else_between_words(text, most, expected):
    assert takes.parts(text, most) == expected


def test_joints_are_silent_and_do_not_click():
    rate, loud = 24000, np.full(2400, 0.5, np.float32)
    whole = takes.join([loud, loud, np.zeros(0, np.float32)], rate)
    assert len(whole) == 4800 + 2 * round(takes.PAUSE_S * rate) and whole.dtype == np.float32
    assert not whole[2400:2400 + round(takes.PAUSE_S * rate)].any() and whole[1200] == 0.5
    assert np.abs(np.diff(whole)).max() < 0.5 / 100 and (loud == 0.5).all()


def test_each_part_is_spoken_behind_the_codes_of_the_one_before(voice):
    """Through codes, not through sound: the prompt's rows are those of the part before, bit by bit."""
    native, ids, codec, settings, prepare = voice
    seen = []

    def behind(asked):
        samples = [generate.text_prompts([(part, part)], False, *(reference or ()))[0] for _, part, reference in asked]
        seen.append(prepare(samples, [number for number, *_ in asked]))
        return seen[-1]

    def speak(prompts, turn):
        return takes.speak(native, codec, ids, settings, prompts, turn, 1, scores.load_judges())
    texts = [["one two.", "three."], ["four."]]
    first, second = takes.speak_parts(texts, [None, None], behind, speak, scores.load_judges())
    assert [len(prompts) for prompts in seen] == [2, 1] and not len(seen[0][0].audio_ids)
    prompt, codes, ended_by, wave, _ = first
    heard = len(seen[1][0].audio_ids) - 9       # frames of the first part
    assert np.array_equal(seen[1][0].audio_ids, delay_rows(codes[:heard], ids.stream_bos, ids.stream_eos))
    assert 8 <= heard < len(codes) and ended_by == "eos" and prompt.text == "one two. three."
    assert len(wave) == 960 * len(codes) + round(takes.PAUSE_S * 24000) and second[0].text == "four."
    assert "one two." in first[0].text and seen[1][0].references == []


@pytest.mark.parametrize("array, offset, why", [
    (np.zeros((5, 8)), None, "whole numbers"), (np.zeros(5, np.int16), None, "whole numbers"),
    (np.full((5, 8), 1024, np.int16), None, "from 0 to 1023"), (np.zeros((5, 8), np.int16), 1.0, "drop offset")])
def test_other_arrays_are_no_codes(tmp_path, array, offset, why):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=why):
        generate.saved_codes(Clip(str(tmp_path / "a.npy"), offset), SimpleNamespace(num_codebooks=8, stream_bos=1024))
