"""--best_of keeps the best take, --split_text joins parts of a text, --max_cer selects takes for training."""
import json
import os
import subprocess

import numpy as np
import pytest
import soundfile
import torch

from core.dist import World
from core.json_files import read_object
from speech import judges, speak, v2, v3
from speech.codes import load_codec, plan_codes
from speech.conversations import Clip, Turn
from speech.dataset import CodeReader, Encoding, TableBuilder, ensure_codes, tokenise
from speech.labels import delay_rows
from speech.speak import load_model, read_samples
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT

VOICE = ROOT / "launch" / "voice"
CPU = torch.device("cpu")
WORLD = World(device=CPU)
TEXTS = ["five nine three seven four.", "one one eight zero.", "six two four nine."]


@pytest.fixture(scope="module")
def voice():
    """(native model that speaks digits, TokenIds, codec, settings, prepare(samples))."""
    config = read_object(VOICE / "model" / "config.json")
    native = load_model(VOICE / "model", config, None, torch.float32, CPU)
    tokenizer = v2.load_tokenizer(VOICE / "model")
    ids = v2.token_ids(tokenizer, native.config)
    codec, bandwidth = load_codec(VOICE / "codec", CPU, 8)

    def prepare(samples, known=()):
        return speak.prepare(samples, tokenizer, ids, codec, bandwidth, 1000, known)
    return native, ids, codec, speak.sampling(native.config, 4.0, temperature=1.0, ras_window=0), prepare


def test_speech_that_does_not_end_is_spoken_again(voice, monkeypatch):
    """Without a judge, until it ends or no take is left."""
    native, ids, codec, settings, prepare = voice
    prompts, asked = prepare(speak.text_prompts([(text, text) for text in TEXTS], False)), []
    ends = {TEXTS[0]: ["eos"], TEXTS[1]: ["length", "length", "eos"], TEXTS[2]: ["length"] * 4}

    def scripted(native, some, ids, settings, seed, device):
        asked.append(([prompt.text for prompt in some], seed))
        return [(np.zeros((9, 8), int), ends[prompt.text].pop(0)) for prompt in some]
    monkeypatch.setattr(speak, "generate", scripted)
    results = speak.speak(native, codec, ids, settings, prompts, 7, 4, judges.load_judges())
    assert [(how, facts["take"]) for _, how, _, facts in results] == [("eos", 0), ("eos", 2), ("length", 0)]
    assert asked == [(TEXTS, 7), (TEXTS[1:], 7 + speak.STRIDE), (TEXTS[1:], 7 + 2 * speak.STRIDE),
                     (TEXTS[2:], 7 + 3 * speak.STRIDE)]


def test_the_best_understood_of_the_ended_takes_is_kept(voice, monkeypatch):
    """Similarity decides between equal ones. Without it, a take without errors ends the search."""
    native, ids, codec, settings, prepare = voice
    prompts = prepare(speak.text_prompts([(text, text) for text in TEXTS[:1]], False))
    heard, likes = ["one", TEXTS[0], TEXTS[0], "two two two two"], [0.9, 0.2, 0.7, 1.0]
    for embed, best in ((None, 1), (True, 2)):
        number, takes = iter(range(9)), []
        monkeypatch.setattr(speak, "generate", lambda *_, number=number: [(np.full((9, 8), next(number)), "eos")])
        monkeypatch.setattr(speak, "decode", lambda codec, codes, takes=takes: takes.append(int(codes[0, 0])))
        monkeypatch.setattr(judges, "measure", lambda *_, takes=takes: [
            judges.word_rates([TEXTS[0]], [heard[takes[-1]]]) | {"speaker_similarity": likes[takes[-1]]}])
        judge = judges.Judges(None, embed, None)
        (codes, *_, facts), = speak.speak(native, codec, ids, settings, prompts, 0, 4, judge)
        assert facts["take"] == codes[0, 0] == best and len(takes) == (4 if embed else 2)


@pytest.mark.parametrize("text, most, expected", [
    ("One. Two! Three?", 9, ["One. Two!", "Three?"]),
    ("One two, three four five.", 12, ["One two,", "three four", "five."]),
    ("Nodecimals 3.5 cut.", 15, ["Nodecimals 3.5", "cut."]), ("你好。再见。谢谢。", 7, ["你好。再见。", "谢谢。"])])
def test_texts_are_cut_after_sentences_else_between_words(text, most, expected):
    assert [chunk for _, chunk in speak.split_text(text, most)] == expected


def test_the_prompt_of_each_part_has_the_codes_of_the_part_before(voice):
    """These are the generated codes, not codes of the decoded sound."""
    native, ids, codec, settings, prepare = voice
    seen = []

    def noted(samples, known):
        seen.append(prepare(samples, known))
        return seen[-1]
    def say(prompts, turn):
        return speak.speak(native, codec, ids, settings, prompts, turn, 1, judges.load_judges())
    samples = speak.text_prompts([("a", "one two. three."), ("b", "four.")], False)
    first, second = speak.speak_chunks(samples, 9, noted, say, judges.load_judges())
    assert [len(prompts) for prompts in seen] == [2, 1] and not len(seen[0][0].row(ids)["audio_ids"])
    codes, ended_by, wave, _ = first
    audio_ids = seen[1][0].row(ids)["audio_ids"]
    heard = len(audio_ids) - 9       # frames of the first part
    assert np.array_equal(audio_ids, delay_rows(codes[:heard], ids.stream_bos, ids.stream_eos, ids.stream_eos))
    assert 8 <= heard < len(codes) and ended_by == "eos"
    assert len(wave) == 960 * len(codes) + round(speak.PAUSE_S * 24000) and len(second[0])
    assert seen[1][0].voice is None


@pytest.mark.parametrize("text, expected", [
    ("[SPEAKER0] One two. Three. [SPEAKER1] Four five.",
     ["[SPEAKER0] One two.", "[SPEAKER0] Three.", "[SPEAKER1] Four five."]),
    ("<|emotion:elation|><|prosody:pitch_low|>One <|prosody:pause|>two. Three. <|emotion:fear|>Four five.",
     ["<|emotion:elation|><|prosody:pitch_low|>One", "<|emotion:elation|><|prosody:pitch_low|><|prosody:pause|>two.",
      "<|emotion:elation|><|prosody:pitch_low|>Three.", "<|emotion:fear|><|prosody:pitch_low|>Four five."]),
    ("<|prosody:pitch_low|><|prosody:speed_fast|>One two. Three.",
     ["<|prosody:pitch_low|><|prosody:speed_fast|>One two.", "<|prosody:pitch_low|><|prosody:speed_fast|>Three."])])
def test_marks_are_repeated_in_all_parts_that_they_apply_to(text, expected):
    """A pause is not repeated."""
    speakers = [chunk[:10] if chunk[0] == "[" else "" for chunk in expected]
    assert speak.split_text(text, 12) == list(zip(speakers, expected)) and speak.split_text(text, 200) == [("", text)]


def test_a_part_continues_the_last_part_of_its_speaker():
    asked = []

    def say(prompts, turn):
        return [(np.full((9, 8), turn), "eos", np.zeros(9 * 960, np.float32), {})]
    def noted(samples, known):
        asked.extend([int(known[clip.path][0, 0]) for turn in sample.turns for clip in turn.clips[:1] if clip.path]
                     for sample in samples)
    text = "[SPEAKER0] One. [SPEAKER1] Two. [SPEAKER0] Three. [SPEAKER1] Four."
    speak.speak_chunks(speak.text_prompts([("a", text)], False), 9, noted, say, judges.load_judges())
    assert asked == [[], [], [0], [1]]


def test_tts_3_continues_codes_too(model3):
    """Its references are padded if they are sound."""
    samples, codes = speak.text_prompts([("a", "Two.")], False), np.arange(80).reshape(10, 8)
    reference = [Turn("user", ["One."], None), Turn("assistant", [Clip("0-0.npy")], None)]
    samples[0].turns[1:1] = reference
    tokenizer = v3.load_tokenizer(model3)
    ids = v3.token_ids(tokenizer, v3.read_config(read_object(model3 / "config.json")))
    prompt, = speak.prepare(samples, tokenizer, ids, None, None, 1000, {"0-0.npy": codes})
    assert np.array_equal(prompt.codes, [codes])


@pytest.mark.slow
def test_a_pipe_is_written_while_it_is_read(tmp_path, quick_python):
    """It holds a WAV file without a length. A missing reader, or one that ends early, gives one line."""
    pipe, copy = tmp_path / "now.wav", tmp_path / "copy.wav"
    os.mkfifo(pipe)
    words = [quick_python, ROOT / "speech" / "generate_tts.py", "--model_path", VOICE / "model", "--output_dir",
             tmp_path / "out", "--audio_tokenizer_path", VOICE / "codec", "--stream", pipe, "--text",
             "one two. three four.", "--split_text", 9, "--ras_window", 0, "--max_seconds", 2, "--overwrite"]

    def generate():
        return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=PATIENCE_S)
    alone = generate()
    assert alone.returncode == 1 and f"error: --stream {pipe}: No such device" in alone.stderr
    with open(copy, "wb") as out, subprocess.Popen(["cat", pipe], stdout=out):
        assert generate().returncode == 0
    samples = np.frombuffer(copy.read_bytes()[44:], "<i2")
    assert copy.read_bytes()[:4] == b"RIFF" and soundfile.info(copy).samplerate == 24000 and samples.any()
    assert np.array_equal(samples, soundfile.read(tmp_path / "out" / "0000.wav", dtype="int16")[0])
    with subprocess.Popen(["head", "-c", "9", pipe], stdout=subprocess.DEVNULL):
        left = generate()
    assert left.returncode == 1 and left.stderr.count("error: ") == 1 and "Traceback" not in left.stderr
    assert f"{pipe} cannot be read or written (Broken pipe)" in left.stderr


@pytest.mark.parametrize("array, why", [
    (np.zeros((5, 8)), "whole numbers"), (np.full((5, 8), 1024, np.int16), "0 to 1023"),
    (np.zeros((0, 8), np.int16), "cannot be read"), (b"\x93NUMPY\x01\x00\x0a\x00{'shape': (", "cannot be read")])
def test_other_arrays_are_not_codes(tmp_path, array, why):
    """Both in training data and in a dry run."""
    if isinstance(array, bytes):
        (tmp_path / "a.npy").write_bytes(array)
    else:
        np.save(tmp_path / "a.npy", array)
    clips, encoding = [Clip(str(tmp_path / "a.npy"))], Encoding(VOICE / "codec", tmp_path / "cache", 8)
    planned, bad = plan_codes(clips, encoding)[-1], ensure_codes(WORLD, clips, encoding)[-1]
    assert list(bad) == [0] and why in bad[0] and "a.npy" in bad[0] and planned == bad


def make_prompts(tmp_path):
    """Samples of read_prompts: TEXTS[1] has a reference, the others have none."""
    system = {"role": "system", "content": "Speak."}
    np.save(tmp_path / "voice.npy", np.arange(80).reshape(10, 8).astype(np.int16))
    voice = [{"role": "user", "content": "one two."},
             {"role": "assistant", "content": {"type": "audio", "audio_url": "voice.npy"}}]
    rows = [{"messages": [system, *(voice if text == TEXTS[1] else ()), {"role": "user", "content": text}]}
            for text in TEXTS]
    (tmp_path / "prompts.json").write_text(json.dumps(rows))
    return speak.read_prompts(tmp_path / "prompts.json", True)


def write_best(folder, samples, takes):
    """Write best.jsonl; return its path."""
    path = folder / "best.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in speak.good_rows(samples, takes, 0.0, 1)))
    return path


def records(*scores):
    """Records of takes, as in their JSON files. scores: (character error rate, ended_by) of each take."""
    return [{"name": f"{i:04d}", "cer": cer, "ended_by": how, "frames": 9, "normalize_text": "on"}
            for i, (cer, how) in enumerate(scores)]


def test_takes_that_are_understood_and_ended_are_trained(tmp_path):
    samples = make_prompts(tmp_path)

    def kept(takes):
        return [row["messages"][-1]["content"][-1]["audio_url"] for row in speak.good_rows(samples, takes, 0.1, 9)]
    takes = records((0.1, "eos"), (0.11, "eos"), (0.0, "eos"))
    assert kept(takes) == ["0000.npy", "0002.npy"]
    assert kept(records((0.0, "length"), (None, "eos"), (0.05, "eos"))) == ["0002.npy"]
    assert not speak.good_rows(samples, takes, 0.1, 10)         # too short to train on


def test_the_trainer_reads_a_take_as_it_was_spoken(voice, tmp_path):
    """The same prompt, with its reference, and the same codes."""
    samples, draw = make_prompts(tmp_path), np.random.default_rng(3)
    spoken = [draw.integers(0, 256, (9 + i, 8)) for i in range(3)]
    for i, codes in enumerate(spoken):
        speak.save_codes(tmp_path / f"{i:04d}.npy", codes)
    best = write_best(tmp_path, samples, records(*[(0.0, "eos")] * 3))
    problems, prompts = [], voice[-1](samples)
    samples = list(read_samples(best, problems, normalize=True))
    builder = TableBuilder(v2.load_tokenizer(VOICE / "model"), voice[1], tmp_path / "table")
    chunk = tokenise(samples, builder.tokenizer, builder.ids)
    builder.append(chunk)
    clips = list(builder.clips)
    numbers, streams = (np.split(builder.array(name), builder.array(offsets)[1:-1])
                        for name, offsets in (("clips", "clip_offsets"), ("tokens", "token_offsets")))
    how = Encoding(VOICE / "codec", tmp_path / "cache", 8)
    assert not problems + chunk["refused"] and [*map(len, numbers)] == [1, 2, 1]
    assert plan_codes(clips, how)[2][:, 2].tolist() == [9, 10, 10, 11]
    folder, shards, where, *_ = ensure_codes(WORLD, clips, how)
    reader = CodeReader(folder, shards)
    for i, prompt in enumerate(prompts):
        *_, answer = codes = [reader.codes(*where[clip].tolist()) for clip in numbers[i]]
        assert np.array_equal(answer, spoken[i])
        tokens = streams[i].astype(np.int64)
        tokens = tokens[:np.flatnonzero(tokens == voice[1].audio_placeholder_id)[-1]]
        row = voice[1].assemble(tokens, np.zeros(len(tokens), bool), codes[:-1])
        assert all(np.array_equal(row[key], prompt.row(voice[1])[key]) for key in ("input_ids", "audio_ids"))


def test_training_normalises_a_take_only_if_speaking_did(tmp_path):
    """The setting is in a row of best.jsonl, or in the JSON file of the sound."""
    text = speak.text_prompts([("", "Wait (please)")], False)
    for setting, wanted in (("off", "Wait (please)"), ("on", "Wait please.")):
        best = write_best(tmp_path, text, [records((0.0, "eos"))[0] | {"normalize_text": setting}])
        (tmp_path / "0000.npy").touch(), (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "0000.wav").touch()
        (tmp_path / "b" / "0000.json").write_text(json.dumps({"text": "Wait (please)", "normalize_text": setting}))
        for source in (best, tmp_path / "b"):
            (sample,), problems = (list(read_samples(source, problems := [], normalize=True)), problems)
            assert sample.turns[-2].text == wanted and not problems
