"""launch/voice and its judge: the base speaks, the committed adapter has another voice, and faults are heard."""
import json
import shutil

import pytest
import torch

from common.checkpoint import sha256_file
from speech import generate_tts
from speech.data.encode import load_codec
from speech.demo import judge_demo
from speech.model import weights
from speech.model.labels import token_ids
from speech.voice import generate
from tests.helpers.trainer import ROOT

VOICE = ROOT / "launch" / "voice"
SENTENCES = 10      # of the held-out ones
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def voices():
    """({text: wave} of the new voice, the same of the old one)."""
    return [judge_demo.read_originals(VOICE / f"{name}.json") for name in ("held", "held_base")]


@pytest.fixture(scope="module")
def say(voices):
    """say(model, adapter, **sampling) -> what judge_demo finds in the first held-out sentences, spoken by it."""
    folder, config_dict = weights.find_model(VOICE / "model")
    config, tokenizer = weights.native_config(config_dict), weights.load_tokenizer(folder)
    ids = token_ids(tokenizer, config)
    codec, bandwidth = load_codec(VOICE / "codec", torch.device("cpu"), ids.num_codebooks)
    samples = generate.read_prompts(VOICE / "held.json", normalize=True)[::4][:SENTENCES]
    prompts = generate.prepare(samples, tokenizer, ids, codec, bandwidth, 1000)

    def run(model=VOICE / "model", adapter=None, **changed):
        folder, config_dict = weights.find_model(model)
        native = generate_tts.load_to_speak(folder, config_dict, adapter, torch.float32, torch.device("cpu"))
        settings = generate.sampling(config, 5.0, temperature=0.3, ras_window=0)
        for name, value in changed.items():
            setattr(settings, name, value)
        spoken = generate.generate(native, prompts, ids, settings, 0, torch.device("cpu"))
        texts, waves = [p.text.strip(". ") for p in prompts], [generate.decode(codec, codes) for codes, _ in spoken]
        return judge_demo.judge(texts, waves, [end for _, end in spoken], *voices)
    return run


def passes(found):
    """The demo's gates, wider by what ten sentences scatter."""
    return (found["wer"] <= 0.3 and found["shuffled_wer"] >= 0.6 and found["likeness"] >= 0.9
            and found["stop_rate"] == 1)


def test_what_is_committed_is_what_was_made():
    about = json.loads((VOICE / "about.json").read_text())
    assert {name: sha256_file(VOICE / name) for name in about["sha256"]} == about["sha256"]
    assert sum(path.stat().st_size for path in VOICE.rglob("*") if path.is_file()) < 12_000_000
    assert "Permission is hereby granted" in (VOICE / "LICENSE.flite").read_text()
    config = json.loads((VOICE / "model" / "config.json").read_text())
    codec = json.loads((VOICE / "codec" / "config.json").read_text())
    assert (config["codebook_size"], config["num_codebooks"], codec["codebook_size"]) == (1026, 8, 1024)


def test_held_out_sentences_are_in_no_training_text():
    texts = json.loads((VOICE / "texts.json").read_text())
    held = set(texts.pop("held_out"))
    assert len(held) == 40 and sum(map(len, held)) >= 150
    assert not any(held & set(of) for of in texts.values())
    spoken = [sample["messages"][1]["content"] for sample in json.loads((VOICE / "held.json").read_text())]
    trained = {sample["messages"][1]["content"] for sample in json.loads((VOICE / "train.json").read_text())}
    assert len(spoken) == 40 and not trained & set(spoken)


@pytest.mark.slow
def test_recordings_are_understood(voices):
    for of in voices:
        own, shuffled = judge_demo.word_error_rates(list(of), list(of.values()))
        assert own <= 0.04 and shuffled > 0.7


@pytest.mark.slow
def test_the_adapter_has_the_new_voice_and_the_base_the_old_one(say):
    assert passes(say(adapter=VOICE / "adapter"))
    base = say()
    assert base["likeness"] <= 0.1 and base["stop_rate"] == 1 and base["wer"] <= 0.4


@pytest.mark.slow
def test_a_wrong_scale_of_the_adapter_is_heard(say, tmp_path):
    wrong = shutil.copytree(VOICE / "adapter", tmp_path / "adapter")
    config = json.loads((wrong / "adapter_config.json").read_text())
    config["lora_alpha"] *= 3
    (wrong / "adapter_config.json").write_text(json.dumps(config))
    assert not passes(say(adapter=wrong))
