"""launch/voice and its judge: the adapter passes, the base with the code of the voice does not."""
import json

import numpy as np
import pytest
import torch

from core.checkpoint import sha256
from launch import judge_demo
from launch.judge_demo import FEWER
from speech import speak, weights
from speech.codes import load_codec
from speech.labels import token_ids
from tests.helpers.trainer import ROOT

VOICE = ROOT / "launch" / "voice"
SENTENCES = 16
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def spoken():
    """{"base", "adapter": a result like that of judge_demo.read_spoken} for new random sentences."""
    folder, config_dict = weights.find_model(VOICE / "model")
    config, tokenizer = weights.read_config(config_dict), weights.load_tokenizer(folder)
    ids, cpu = token_ids(tokenizer, config), torch.device("cpu")
    codec, bandwidth = load_codec(VOICE / "codec", cpu, ids.num_codebooks)
    texts = judge_demo.draw(SENTENCES, 0)
    samples = speak.text_prompts([(text, text) for text in texts], True)
    prompts = speak.prepare(samples, tokenizer, ids, codec, bandwidth, 1000)
    settings = speak.sampling(config, 6.0, temperature=0.3, ras_window=0)

    def say(adapter):
        native = speak.load_model(folder, config_dict, adapter, torch.float32, cpu)
        codes, ends = zip(*speak.generate(native, prompts, ids, settings, 0, cpu))
        return texts, [speak.decode(codec, clip) for clip in codes], list(codes), list(ends)
    return {"base": say(None), "adapter": say(VOICE / "adapter")}


def failed(judged, after, texts):
    """The criteria that the judgement `after` fails when it replaces that of the adapter."""
    criteria = judge_demo.criteria(after, judge_demo.gain_of(texts, judged[1], after))
    return {name for name, passed in criteria.items() if not passed}


def test_committed_files_have_their_checksums():
    facts = json.loads((VOICE / "about.json").read_text())
    assert {name: sha256(VOICE / name) for name in facts["sha256"]} == facts["sha256"]
    assert sum(path.stat().st_size for path in VOICE.rglob("*") if path.is_file()) < 12_000_000
    assert "Permission is hereby granted" in (VOICE / "LICENSE.flite").read_text()
    config = json.loads((VOICE / "model" / "config.json").read_text())
    codec = json.loads((VOICE / "codec" / "config.json").read_text())
    assert (config["codebook_size"], config["num_codebooks"], codec["codebook_size"]) == (1026, 8, 1024)


@pytest.mark.slow
def test_the_adapter_passes_and_the_base_with_the_code_of_the_new_voice_does_not(spoken, monkeypatch):
    """That base has the new voice, but makes no fewer word errors."""
    monkeypatch.setattr(judge_demo, "MAX_WER", 0.25)        # for fewer sentences than in the demo
    judged = judge_demo.judge_all(spoken["base"], spoken["adapter"])        # base, base in the new voice, adapter
    texts = spoken["base"][0]
    assert failed(judged, judged[2], texts) <= {FEWER}       # few sentences make a wide interval
    assert failed(judged, judged[1], texts) == {FEWER}
    assert "at least 90% of frames with the new voice's code" in failed(judged, judged[0], texts)


@pytest.mark.parametrize("saved, passes", [
    ([1] * 30, True), ([3] * 4 + [0] * 26, True), ([2, -1] * 4 + [0] * 22, False)])
def test_the_gain_counts_if_its_whole_interval_is_above_zero(saved, passes):
    """saved: errors that the adapter avoids in each sentence."""
    texts, errors = ["one two three four"] * 30, np.array([3] * 30)

    def of(errors):
        return {"wer": sum(errors) / 120, "errors": errors, "voice": 1.0, "stop_rate": 1.0}
    assert (FEWER not in failed([of(errors), of(errors), None], of(errors - saved), texts)) == passes
