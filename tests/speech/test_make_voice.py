"""make_voice.py, much shortened, on launch/voice's own clips in flite's place: what it makes fits together."""
import json
import shutil

import numpy as np
import pytest
import soundfile
import torch

from speech.demo import judge_demo, make_voice, voice_codec
from tests.helpers.trainer import ROOT

VOICE = ROOT / "launch" / "voice"
CLIPS = 12          # of either voice


@pytest.fixture(scope="module")
def made(pool, tmp_path_factory):
    """OUT_DIR of a run of a few steps."""
    out = tmp_path_factory.mktemp("made")
    texts = {}
    for voice, name in ((make_voice.BASE, "held_base"), (make_voice.NEW, "held")):
        found = {"".join(str(make_voice.WORDS.index(word)) for word in text.split()): wave
                 for text, wave in judge_demo.read_originals(VOICE / f"{name}.json").items()}
        (out / "clips" / voice).mkdir(parents=True)
        for text, wave in list(found.items())[:CLIPS + 4]:
            soundfile.write(out / "clips" / voice / f"{text}.wav", wave, 24000, subtype="PCM_16")
        texts[voice] = list(found)[4:CLIPS + 4]
    for voice in make_voice.OTHERS:     # the new voice's clips, two of each
        (out / "clips" / voice).mkdir()
        texts[voice] = texts[make_voice.NEW][:2]
        for text in texts[voice]:
            shutil.copy(out / "clips" / make_voice.NEW / f"{text}.wav", out / "clips" / voice)
    (out / "texts.json").write_text(json.dumps({"held_out": list(found)[:4], **texts}))
    command = [out, "--flite", "/nowhere/flite", "--texts", CLIPS, "--clips",
               CLIPS, "--other_texts", 2, "--held_out", 4, "--encoder_steps", 2, "--decoder_steps", 2,
               "--base_steps", 2, "--ranks", 1]
    statuses, output = pool.run(1, "speech.demo.make_voice.main", [str(word) for word in command])
    assert not any(statuses), output[-3000:]
    return out


@pytest.mark.slow
def test_the_pieces_fit(made, pool):
    """The codec gives the codes that the base was trained on; model, codec and clips work in generate_tts.py."""
    codec, known = voice_codec.load_codec(made / "voice" / "codec"), torch.load(made / "latents.pt")
    text, wave = next(iter(judge_demo.read_originals(made / "voice" / "held.json").items()))
    frames = voice_codec.latents(torch.from_numpy(wave), make_voice.NEW, known)
    codes = voice_codec.encode(codec, frames)
    assert codes.shape == (len(wave) // 960, 8)
    assert all(len(codes[:, book].unique()) > 1 and codes[:, book].equal(codes[:, book + 1]) for book in (4, 6))
    missed = (voice_codec.decode(codec, codes) - frames)[:, :voice_codec.ENVELOPE]
    assert missed.square().sum() < 0.5 * frames[:, :voice_codec.ENVELOPE].square().sum()
    with torch.no_grad():
        coded = codec.encode(torch.from_numpy(wave)[None, None]).audio_codes
        spoken = codec.decode(coded).audio_values
    assert coded.shape == (1, 8, len(codes)) and spoken.shape[-1] == len(wave)
    statuses, output = pool.run(1, "speech.generate_tts.main", [
        "--model_path", str(made / "voice" / "model"), "--audio_tokenizer_path", str(made / "voice" / "codec"),
        "--text", text, "--max_seconds", "0.4", "--output_dir", str(made / "spoken")])
    assert not any(statuses), output[-3000:]
    assert soundfile.info(made / "spoken" / "0000.wav").samplerate == 24000


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
