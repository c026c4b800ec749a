"""The clips of the bench on references: each stands behind another one of its voice, none says a held-out text."""
import json

from bench import make_voice, voice_reference


def test_each_clip_has_another_clip_of_its_voice_before_it(tmp_path):
    texts = json.loads((voice_reference.VOICE / "texts.json").read_text())
    for voice in ("slt", "rms", "kal16", "awb"):        # all there, so flite is not called
        (tmp_path / voice).mkdir()
        for text in [*texts[voice], *texts["held_out"]]:
            (tmp_path / voice / f"{text}.wav").touch()
    samples = voice_reference.make_samples(tmp_path, "/nowhere/flite")
    held, voices = {make_voice.spoken(text) for text in texts["held_out"]}, []
    for sample in samples:
        _, said, reference, text, clip = (message["content"] for message in sample["messages"])
        paths = [tmp_path / item["audio_url"].removeprefix(f"{tmp_path}/") for item in (reference, clip)]
        assert [make_voice.spoken(path.stem) for path in paths] == [said, text] and said != text
        assert paths[0].parent == paths[1].parent and not held & {said, text}
        voices.append(paths[1].parent.name)
    assert [voices.count(voice) for voice in ("slt", "rms")] == [voice_reference.CLIPS] * 2
