"""launch/voice and its judge: the base speaks, the committed adapter has another voice, and faults are heard."""
import json
import shutil

import pytest
import torch

import lora
from common.checkpoint import sha256_file
from speech import generate_tts, judge_demo, speak, weights
from speech.encode import load_codec
from speech.labels import token_ids
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
    samples = speak.read_prompts(VOICE / "held.json", normalize=True)[::4][:SENTENCES]
    prompts = speak.prepare(samples, tokenizer, ids, codec, bandwidth, 1000)

    def run(model=VOICE / "model", adapter=None, **changed):
        folder, config_dict = weights.find_model(model)
        native = generate_tts.load_to_speak(folder, config_dict, adapter, torch.float32, torch.device("cpu"))
        settings = speak.sampling(config, 5.0, temperature=0.3, ras_window=0)
        for name, value in changed.items():
            setattr(settings, name, value)
        spoken = speak.generate(native, prompts, ids, settings, 0, torch.device("cpu"))
        texts, waves = [p.text.strip(". ") for p in prompts], [speak.decode(codec, codes) for codes, _ in spoken]
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


def test_recordings_are_understood(voices):
    for of in voices:
        assert judge_demo.word_error_rate(list(of), list(of.values())) <= 0.04


def test_the_adapter_has_the_new_voice_and_the_base_the_old_one(say):
    assert passes(say(adapter=VOICE / "adapter"))
    base = say()
    assert base["likeness"] <= 0.1 and base["stop_rate"] == 1 and base["wer"] <= 0.4


@pytest.mark.parametrize("factor", [0.25, 4])
def test_a_wrong_scale_of_the_adapter_is_heard(say, tmp_path, factor):
    wrong = shutil.copytree(VOICE / "adapter", tmp_path / "adapter")
    config = json.loads((wrong / "adapter_config.json").read_text())
    config["lora_alpha"] *= factor
    (wrong / "adapter_config.json").write_text(json.dumps(config))
    assert not passes(say(adapter=wrong))


def test_speech_without_an_end_is_heard(say):
    assert say(adapter=VOICE / "adapter", eos_token_id=None)["stop_rate"] == 0


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """The base with the committed adapter folded in, and a fifth of the new voice's clips."""
    root = tmp_path_factory.mktemp("learnt")
    lora.merge(VOICE / "model", VOICE / "adapter", root / "model")
    samples = json.loads((VOICE / "train.json").read_text())[::5]
    for sample in samples:
        clip = sample["messages"][-1]["content"]
        clip["audio_url"] = str(VOICE / clip["audio_url"])
    (root / "train.json").write_text(json.dumps(samples))
    return root


@pytest.mark.parametrize("fault", ["nothing", "no_delay", "no_shift", "no_end"])
def test_a_trainer_with_a_fault_unteaches_speech(pool, learnt, tmp_path, say, fault):
    statuses, output = pool.run(1, f"tests.helpers.planted.{fault}", [
        "--model_path", str(learnt / "model"), "--audio_tokenizer_path", str(VOICE / "codec"), "--train_data_file",
        str(learnt / "train.json"), "--code_cache", str(learnt / "codes"), "--output_dir", str(tmp_path / "out"),
        "--report_to", "none", "--disable_eval", "--max_steps", "30", "--per_device_train_batch_size", "8",
        "--learning_rate", "1e-3", "--warmup_steps", "3", "--text_loss_weight", "0", "--num_workers", "0",
        "--preprocess_num_proc", "0"])
    assert not any(statuses), output[-3000:]
    assert passes(say(model=tmp_path / "out" / "checkpoint-30")) == (fault == "nothing")
