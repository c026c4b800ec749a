"""evaluate_tts.py: metrics against known values, and random models against plain transformers."""
import json

import numpy as np
import pytest
import soundfile
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (GenerationConfig, PreTrainedTokenizerFast, Wav2Vec2FeatureExtractor, WavLMConfig,
                          WavLMForXVector, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration)

from core.cli import UserError
from speech import judges, make_tiny, speak
from speech.conversations import Clip
from tests.helpers.trainer import run_script

RATE = 24000


WORDS = list(dict.fromkeys("the river is wider than it looks keep your gloves dry".split()))
TEXTS = ["The river.", "It looks wider!", "Keep your gloves dry.", "The river is wider.", "Dry gloves."]


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    """A random Whisper that hears up to 3 seconds."""
    folder = tmp_path_factory.mktemp("whisper")
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>"]
    names = [*special, *WORDS, "<|notimestamps|>"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*special, "<|notimestamps|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>",
                            bos_token="<|endoftext|>").save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=20, chunk_length=3).save_pretrained(folder)
    torch.manual_seed(5)        # with this seed it hears different words in different clips
    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=len(names), num_mel_bins=20, d_model=16, encoder_layers=1, decoder_layers=1, init_std=1.0,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_source_positions=150, max_target_positions=16, decoder_start_token_id=1, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, suppress_tokens=[], begin_suppress_tokens=[]))
    model.generation_config = GenerationConfig(
        max_length=8, decoder_start_token_id=1, bos_token_id=0, eos_token_id=0, pad_token_id=0, is_multilingual=True,
        lang_to_id={"<|en|>": 2}, task_to_id={"transcribe": 3}, no_timestamps_token_id=len(names) - 1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A random WavLM x-vector model."""
    folder = tmp_path_factory.mktemp("wavlm")
    torch.manual_seed(0)
    WavLMForXVector(WavLMConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8,) * 7,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, tdnn_dim=(8, 8, 8, 8, 16), num_labels=4,
        xvector_output_dim=8, initializer_range=0.3)).save_pretrained(folder)
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


def write(folder, waves, **facts):
    """Write a folder like generate_tts.py. facts: {key: a value for each sample; None leaves the key out}."""
    folder.mkdir(parents=True)
    for i, wave in enumerate(waves):
        soundfile.write(folder / f"{i:04d}.wav", wave, RATE, subtype="FLOAT")
        facts_of = {"text": TEXTS[i], "seed": 0, "frames": len(wave) // 960, "seconds": len(wave) / RATE,
                    "real_time_factor": 1.0, "ended_by": "eos"} | {k: v[i] for k, v in facts.items()}
        known = {key: value for key, value in facts_of.items() if value is not None}
        (folder / f"{i:04d}.json").write_text(json.dumps(known))
    return folder


@pytest.fixture(scope="module")
def waves():
    return [make_tiny.synthesise(f"{text} {text} {text}", speaker, RATE, np.random.default_rng(1))
            for speaker, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def targets(waves, tmp_path_factory):
    """A folder of recordings with the names of the samples."""
    return write(tmp_path_factory.mktemp("clips") / "targets", waves)


def run(*args):
    """Run the script; return evaluation.json of the first folder."""
    run_script("speech/evaluate_tts.py", [str(a) for a in args])
    return json.loads((args[0] / "evaluation.json").read_text())


def values(report, key):
    return [row[key] for row in report["samples"]]


@torch.no_grad()
def embed(folder, wave):
    """The embedding of plain transformers."""
    wave = judges.resample(np.asarray(wave, np.float32), RATE, 16000)
    inputs = Wav2Vec2FeatureExtractor.from_pretrained(folder)(wave, sampling_rate=16000, return_tensors="pt")
    return WavLMForXVector.from_pretrained(folder).eval()(**inputs).embeddings[0].numpy()


def test_similarity_is_the_cosine_to_the_voice_that_was_cloned(waves, targets, speaker, tmp_path):
    paths = [str(targets / f"{i:04d}.wav") for i in range(5)]
    voices = [paths[1], paths[1], None, None, paths[0]]
    report = run(write(tmp_path / "a", waves, target_audio=[*paths[:3], None, None], reference_audio=voices),
                "--speaker_model", speaker)
    for i, j in ((0, 1), (4, 0)):
        a, b = embed(speaker, waves[i]), embed(speaker, waves[j])
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert report["samples"][i]["speaker_similarity"] == pytest.approx(cosine, abs=1e-4) and abs(cosine) < 0.9999
    assert report["samples"][1]["speaker_similarity"] == pytest.approx(1)
    assert report["samples"][2]["speaker_similarity"] == pytest.approx(1)     # without a reference: the target
    assert report["samples"][3]["speaker_similarity"] is None and report["samples"][3]["length_ratio"] is None


def test_the_output_of_generate_tts_is_read(waves, targets, speaker, tmp_path):
    """The target may be a cut of a longer file."""
    folder, long = tmp_path / "a", tmp_path / "long.wav"
    soundfile.write(long, np.concatenate([waves[1], waves[0], waves[2]]), RATE, subtype="FLOAT")
    offset, seconds = len(waves[1]) / RATE, len(waves[0]) / RATE
    for i, target in enumerate((Clip(str(long), offset, seconds), Clip(str(targets / "0001.wav"), None, 9.9), None)):
        prompt = speak.Prompt(TEXTS[i], None, None, Clip(str(long), offset + seconds) if i == 2 else None,
                              target)
        speak.write_sample(folder, i, prompt, np.zeros((25, 8)), "eos" if i else "length", waves[i])
    report = run(folder, "--speaker_model", speaker)
    assert values(report, "length_ratio") == [1, 1, None]
    assert values(report, "stop_rate") == [0, 1, 1]
    assert values(report, "speaker_similarity") == pytest.approx([1, 1, 1], abs=1e-4)


def test_speech_beyond_full_scale_is_clipped_and_nan_is_refused(tmp_path):
    prompt = speak.Prompt("a", None, None, None, None)
    speak.write_sample(tmp_path, 0, prompt, [], "eos", np.float32([0.5, 1.5, -2, 1, -1]))
    assert np.abs(soundfile.read(tmp_path / "0000.wav")[0] - [0.5, 1, -1, 1, -1]).max() < 1e-4
    with pytest.raises(UserError, match="0001.wav: the codec has made samples that are not finite"):
        speak.write_sample(tmp_path, 1, prompt, [], "eos", np.float32([0, np.nan]))
    assert not list(tmp_path.glob("0001*"))


@torch.no_grad()
def hear(folder, wave, **options):
    """The transcript of plain transformers, one clip at a time."""
    wave = judges.resample(np.asarray(wave, np.float32), RATE, 16000)
    features = WhisperFeatureExtractor.from_pretrained(folder)(wave, sampling_rate=16000, return_tensors="pt")
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    ids = model.generate(features.input_features, do_sample=False, **options)
    return PreTrainedTokenizerFast.from_pretrained(folder).batch_decode(ids, skip_special_tokens=True)[0]


def test_word_errors_are_counted_in_the_transcripts_of_the_model(waves, listener, tmp_path):
    waves = [wave[:5 * RATE // 2] for wave in waves]
    heard = [hear(listener, wave) for wave in waves]
    assert len(set(heard)) > 1 and all(heard)
    truth = run(write(tmp_path / "a", waves, text=[text.upper() + "!" for text in heard]), "--asr_model", listener,
                "--batch_size", 3)
    assert list(truth["heard"].values()) == heard
    assert truth["metrics"]["wer"] == truth["metrics"]["cer"] == 0 and set(values(truth, "wer")) == {0}
    texts = [heard[0] + " fox", "", *heard[2:4], heard[4] + " " + heard[4]]
    words = [len(text.split()) for text in heard]
    report = run(write(tmp_path / "b", waves, text=texts), "--asr_model", listener)
    assert values(report, "wer") == pytest.approx([1 / (words[0] + 1), None, 0, 0, 0.5])
    errors, total = 1 + words[1] + words[4], words[0] + 1 + words[2] + words[3] + 2 * words[4]
    assert report["metrics"]["wer"] == pytest.approx(errors / total)         # over all words, not the mean of shares
    assert report["metrics"]["wer_mean"] == pytest.approx((1 / (words[0] + 1) + 0.5) / 4)       # mean of shares
    letters = [len(text.replace(" ", "")) for text in heard]
    assert report["metrics"]["cer"] == pytest.approx((3 + letters[1] + letters[4]) / (
        letters[0] + 3 + letters[2] + letters[3] + 2 * letters[4]))
