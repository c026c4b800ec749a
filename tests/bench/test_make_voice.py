"""make_voice.py's texts, and the pitch that its codec is taught."""
import numpy as np
import pytest
import torch

from bench import make_voice, voice_codec


def test_texts_are_apart():
    texts = make_voice.choose_texts(0, 2000, 100, 40, 300)
    assert [len(texts[name]) for name in ("slt", "rms", "held_out")] == [2000, 100, 40]
    assert all(len(set(of)) == len(of) for of in texts.values())
    held = set(texts["held_out"])
    assert sum(map(len, held)) == 160 and not held & {*texts["slt"], *texts["rms"]}
    assert make_voice.choose_texts(1, 2000, 100, 40, 300)["slt"] != texts["slt"]


@pytest.mark.parametrize("hertz", [100, 175, 240])
def test_pitch_of_a_tone(hertz):
    """A pulse train; and silence has none."""
    wave = np.zeros(24000, np.float32)
    wave[::24000 // hertz] = 0.5
    log_f0, voiced = voice_codec.pitch(torch.from_numpy(wave))
    assert voiced[3:-3].all() and torch.allclose(log_f0[3:-3].exp(), torch.tensor(float(hertz)), rtol=0.02)
    assert not voice_codec.pitch(torch.zeros(24000))[1].any()
