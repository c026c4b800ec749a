"""Speech of a trained model: prompts, generation, files; a model speaks memorised clips code by code."""
import copy
import io
import json

import numpy as np
import pytest
import soundfile
import torch
from transformers import AutoProcessor, AutoTokenizer

from data import Table
from speech import conversations, speak
from speech.codes import load_codec
from speech.labels import delay_rows, token_ids
from tests.helpers import spoken as speech
from tests.helpers.runs import CLOCK, rows
from tests.helpers.trainer import RUN_SCRIPT, run_script, train_forked, unheard

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def voice(tiny):
    """(native model, tokenizer, TokenIds, codec, bandwidth) of the tiny model."""
    native, tokenizer = speech.native(tiny.model), AutoTokenizer.from_pretrained(tiny.model)
    return native, tokenizer, token_ids(tokenizer, native.config), *load_codec(tiny.codec, "cpu", 8)


def written(path, entries):
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture(scope="module")
def short(tiny, tmp_path_factory):
    """File of three samples of about half a second, two with a voice to clone; its folder has unheard.json."""
    entries = copy.deepcopy(tiny.samples()[:3])
    for number, entry in enumerate(entries):
        for message in entry["messages"][1:]:
            for item in message["content"]:
                if item["type"] == "audio":
                    item |= {"audio_url": str(tiny.root / item["audio_url"]), "offset": 0.3,
                             "duration": 0.4 + 0.13 * number}
    entries[2]["messages"][1]["content"] = entries[2]["misc"]["target_transcript"] = "Quiet，please（now）"
    entries[2]["messages"][2]["content"][0]["text"] = "Quiet please, now"
    folder = tmp_path_factory.mktemp("short")
    written(folder / "unheard.json", unheard(entries))
    return written(folder / "short.json", entries)


def prompts_of(voice, path, room=2000):
    _, tokenizer, ids, codec, bandwidth = voice
    return speak.prepare(speak.read_prompts(path, False), tokenizer, ids, codec, bandwidth, room)


def test_batch_equals_that_of_the_processor(tiny, voice, tmp_path):
    """transformers' processor makes the same padded tensors of conversations with one voice and with two."""
    clip = tiny.root / "speech" / "0000_speaker0.wav"
    waves = [speech.decode_audio(clip, [(0.2, frames / 25)])[0] for frames in (9, 14)]
    clips = [str(tmp_path / f"{len(wave)}.wav") for wave in waves]      # whole frames, since the processor pads
    for clip, wave in zip(clips, waves):
        soundfile.write(clip, wave, 24000, subtype="FLOAT")

    def turns(*pairs, ask):
        messages = [{"role": "system", "content": "Generate audio following instruction."}]
        for text, clip in pairs:
            messages += [{"role": "user", "content": text},
                     {"role": "assistant", "content": [{"type": "audio", "audio_url": clip}]}]
        return [*messages, {"role": "user", "content": ask}]
    talks = [turns(("This is my voice.", clips[0]), ask="Good night."),
             turns(("[SPEAKER0] One.", clips[0]), ("[SPEAKER1] Two, longer.", clips[1]), ask="The map?")]
    path = written(tmp_path / "talks.json", [{"messages": talk} for talk in talks])
    batch = speak.prompt_batch(prompts_of(voice, path), voice[2])
    processor = AutoProcessor.from_pretrained(tiny.model)
    texts = [processor.apply_chat_template(talk, add_generation_prompt=True, tokenize=False) for talk in talks]
    expected = processor(text=texts, audio=[waves[0], waves[0], waves[1]], return_tensors="pt", padding=True,
                       padding_side="left", sampling_rate=24000, add_special_tokens=False)
    assert batch.keys() == expected.keys()
    for name in batch:
        assert torch.equal(batch[name], expected[name].to(batch[name].dtype)), name
    assert batch["attention_mask"].sum(1).unique().numel() == 2      # the batch is ragged


def test_undelay_when_the_end_comes_askew(voice):
    """Codebook 0 ends at frame 6 and the others one row late, as transformers forces a missed end."""
    ids, codes = voice[2], np.random.default_rng(0).integers(0, 1024, (7, 8))
    rows = delay_rows(codes, ids.stream_bos, *[ids.stream_eos] * 2)
    rows[7, 0] = ids.stream_eos
    rows[5, 5] = ids.stream_bos                 # and a special id inside the speech
    rows[9, 5] = ids.stream_eos
    got, ended = speak.undelay(rows, ids)
    expected = codes[:6].copy()
    expected[3, 5] = 1023
    assert ended == "eos" and np.array_equal(got, expected)
    none, ended = speak.undelay(delay_rows(codes[:0], ids.stream_bos, *[ids.stream_eos] * 2), ids)
    assert none.shape == (0, 8) and ended == "eos" and len(speak.decode(voice[3], none)) == 0


def test_waveform_equals_that_of_the_processor(tiny, voice):
    native, _, ids, codec, _ = voice
    processor = AutoProcessor.from_pretrained(tiny.model)
    codes = np.random.default_rng(0).integers(0, 1024, (12, 8))
    rows = delay_rows(codes, ids.stream_bos, *[ids.stream_eos] * 2)
    expected = processor.batch_decode(torch.from_numpy(rows)[None])[0]
    wave = speak.decode(codec, speak.undelay(rows, ids)[0])
    assert wave.shape == (12 * 960,) and np.abs(wave).max() > 0
    assert np.allclose(wave, expected.numpy(), atol=1e-6)


def settings_of(voice, seconds=0.4, **more):
    return speak.sampling(voice[0].config, seconds, **more)


def test_draws_depend_on_the_seed_alone_and_leave_no_trace(voice, short):
    native, _, ids, _, _ = voice
    prompts, settings = prompts_of(voice, short), settings_of(voice)
    own = copy.deepcopy(native.generation_config)

    def say(seed):
        return [codes for codes, _ in speak.generate(native, prompts, ids, settings, seed, CPU)]
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = say(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(8)
    assert all(map(np.array_equal, first, say(1)))
    assert not any(map(np.array_equal, first, say(2)))
    assert native.generation_config.to_dict() == own.to_dict()


def test_a_batch_speaks_like_each_prompt_alone(voice, short):
    native, _, ids, _, _ = voice
    prompts, greedy = prompts_of(voice, short), settings_of(voice, temperature=0)
    together = speak.generate(native, prompts, ids, greedy, 0, CPU)
    for prompt, (codes, ended) in zip(prompts, together):
        alone, why = speak.generate(native, [prompt], ids, greedy, 5, CPU)[0]     # greedy: the seed has no effect
        assert np.array_equal(codes, alone) and ended == why == "length"
        assert codes.shape == (10, 8)           # 0.4 s, not a frame more
    assert len({codes.tobytes() for codes, _ in together}) == 3


def test_repetition_aware_sampling_breaks_a_loop(voice, short):
    """The head prefers one code; RAS draws again after two repeats in seven rows."""
    looping, ids, bias = copy.deepcopy(voice[0]), voice[2], torch.zeros(8, 1026)
    bias[:, 77] = 6.0           # 28 % of the distribution; with top_p 0.2 the only candidate
    looping.audio_lm_head.weight.data *= 0.01
    looping.audio_lm_head.register_forward_hook(lambda module, inputs, logits: logits + bias.view(-1))
    with_ras, without = (speak.generate(
        looping, prompts_of(voice, short)[:1], ids, settings_of(voice, 2.0, top_p=0.2, **off), 3, CPU)[0][0]
        for off in ({}, {"ras_window": 0}))
    assert (without == 77).all() and 0.2 < (with_ras == 77).mean() < 0.8


def train(pool, tiny, data, output_dir, *flags, ranks=1, **options):
    return train_forked(pool, tiny, output_dir, "--train_data_file", data, "--num_workers", 0,
                        "--code_cache", output_dir.parent / "codes", *flags, ranks=ranks, **options)


def say(pool, tiny, output_dir, *flags, model=None, ranks=1):
    command = ["--model_path", model or tiny.model, "--audio_tokenizer_path", tiny.codec, "--output_dir", output_dir,
               "--save_codes", *flags]
    statuses, output = pool.run(ranks, RUN_SCRIPT, "speech/generate_tts.py", [str(word) for word in command])
    assert not any(statuses), output
    records = [json.loads(path.read_text()) for path in sorted(output_dir.glob("*.json"))]
    return records, output


def true_codes(output_dir):
    """Codes of the targets in the code cache, in the order of the file."""
    table = Table(next(output_dir.glob("table-*")))
    last = [table.clips[stop - 1] for stop in table.clip_offsets[1:]]
    return [table.reader.codes(*table.where[clip].tolist()) for clip in last]


@pytest.fixture(scope="module")
def learnt(pool, tiny, short, tmp_path_factory):
    """(folder of a run that memorised the short file and spoke it at two validations, its output)."""
    folder = tmp_path_factory.mktemp("learnt") / "out"
    flags = ("--max_steps", 100, "--learning_rate", 3e-3, "--adam_beta2", 0.95, "--weight_decay", 0, "--logging_steps",
             10, "--eval_data_file", short.with_name("unheard.json"), "--eval_steps", 50, "--save_steps", 0,
             "--report_to", "tensorboard", "--per_device_train_batch_size", 3, "--sample_prompts", short,
             "--sample_seconds", 2)
    return folder, train(pool, tiny, short, folder, *flags).output


@pytest.mark.slow
def test_a_model_that_memorised_clips_speaks_their_codes(pool, tiny, short, learnt, voice, tmp_path):
    folder, _ = learnt
    out = tmp_path / "spoken"
    records, output = say(pool, tiny, out, "--prompts", short, "--temperature", 0, "--max_seconds", 3,
                          model=folder / "checkpoint-100")
    for record, true, entry in zip(records, true_codes(folder), json.loads(short.read_text())):
        assert np.array_equal(np.load(out / f"{record['name']}.npy"), true), record["name"]
        assert record["ended_by"] == "eos" and record["frames"] == len(true) and record["seconds"] == len(true) / 25
        assert record["text"] == conversations.normalise(entry["misc"]["target_transcript"])
        assert record["target_seconds"] == entry["messages"][2]["content"][1]["duration"]
        wave, rate = soundfile.read(out / f"{record['name']}.wav", dtype="float32")
        assert rate == 24000 and np.allclose(wave, speak.decode(voice[3], true).clip(-1, 1), atol=1e-4)
    assert len(records) == 3 and "3 ended by themselves" in output and "notice" not in output
    assert records[2]["text"] == "Quiet, please now." and f"on; {folder / 'checkpoint-100'} was trained" in output
    assert records[2]["normalize_text"] == "on"


def test_validation_speaks_the_prompts(learnt):
    """The log has the stop rate, and TensorBoard the sound of the WAV files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    folder, output = learnt
    rows = {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            if "eval/stop_rate" in row}
    assert rows.keys() == {50, 100} and rows[100]["eval/stop_rate"] == 1.0
    assert "speech step    100 | 3 prompts" in output
    board = EventAccumulator(f"{folder}-logs/out", size_guidance={"audio": 0}).Reload()
    assert {"samples/0000", "samples/0002"} <= set(board.Tags()["audio"])
    events = board.Audio("samples/0001")
    assert [event.step for event in events] == [50, 100] and events[0].sample_rate == 24000
    wave = soundfile.read(folder / "samples" / "step-100" / "0001.wav")[0]
    assert np.allclose(soundfile.read(io.BytesIO(events[1].encoded_audio_string))[0], wave, atol=2e-4)
    record = json.loads((folder / "samples" / "step-100" / "0001.json").read_text())
    assert record["step"] == 100 and record["frames"] * 960 == len(wave)


SMALL = ("--max_steps", 3, "--eval_steps", 2, "--save_steps", 2, "--save_total_limit", 0, "--learning_rate", 1e-3,
         "--per_device_train_batch_size", 1, "--per_device_eval_batch_size", 1)
SPOKEN = {"eval/stop_rate"}


@pytest.mark.slow
def test_samples_of_a_run_on_two_ranks(pool, tiny, short, tmp_path):
    """They do not change the training and equal the speech of generate_tts.py from the same checkpoint."""
    data = ("--eval_data_file", short.with_name("unheard.json"))
    speaking = ("--sample_prompts", short, "--sample_seconds", 0.5)
    mute, loud = (train(pool, tiny, short, tmp_path / name, *data, *SMALL, "--use_lora", *flags, ranks=2)
                  for name, flags in (("mute", ()), ("loud", speaking)))
    assert rows(mute, without=CLOCK | SPOKEN) == rows(loud, without=CLOCK | SPOKEN) and len(rows(mute)) == 5
    records, _ = say(pool, tiny, tmp_path / "spoken", "--prompts", short, "--max_seconds", 0.5, "--batch_size", 8,
                     "--adapter", tmp_path / "loud" / "checkpoint-2")
    for name in (f"{record['name']}.wav" for record in records):
        step_2, step_3 = ((tmp_path / "loud" / "samples" / f"step-{step}" / name).read_bytes() for step in (2, 3))
        assert step_2 == (tmp_path / "spoken" / name).read_bytes() and step_2 != step_3, name


@pytest.fixture
def refuse(tiny, tmp_path, capsys):
    """refuse(*flags) -> the only line of generate_tts.py, which must end with status 1."""
    def run(*flags):
        command = ["--model_path", tiny.model, "--audio_tokenizer_path", tiny.codec, "--output_dir", tmp_path / "out",
                   *flags]
        with pytest.raises(SystemExit) as end:
            run_script("speech/generate_tts.py", [str(word) for word in command])
        error = capsys.readouterr().err.strip()
        assert end.value.code == 1 and error.startswith("error: ") and "Traceback" not in error
        return error
    return run


def test_mistakes_in_files(refuse, tiny, short, tmp_path):
    entries = json.loads(short.read_text())
    entries[1]["messages"] = [entries[1]["messages"][0]]
    entries[0]["messages"][1]["content"][1]["audio_url"] = "nope.wav"
    error = refuse("--prompts", written(tmp_path / "bad.json", entries))
    assert "2 problems" in error and "sample 1 (sample_00000000): audio file 'nope.wav' not found" in error
    assert "sample 2 (sample_00000001): has no text to speak" in error
    (tmp_path / "noise.wav").write_bytes(b"RIFF????")
    voice = "--reference_audio", tmp_path / "noise.wav", "--reference_text"
    assert "noise.wav: is not readable audio" in refuse("--text", "a", *voice, "b")
    assert "--reference_audio and --reference_text go together" in refuse("--text", "a", *voice, "  ")
    assert "texts.csv: is a table" in refuse("--prompts", written(tmp_path / "texts.csv", ["a"]))
    np.save(tmp_path / "bad.npy", np.full((9, 8), 1024))        # also when a second prompt reads them again
    codes = {"role": "assistant", "content": {"type": "audio", "audio_url": "bad.npy"}}
    rows = [{"messages": [{"role": "user", "content": "b"}, codes, {"role": "user", "content": "a"}]}] * 2
    error = refuse("--prompts", written(tmp_path / "codes.json", rows))
    assert "2 problems" in error and error.count("bad.npy: ") == 2


def test_overwriting_spares_what_is_read(refuse, tmp_path):
    """A take whose voice the next one is to have; a list of prompts, and clips in it, as --max_cer leaves them."""
    out = tmp_path / "out"
    out.mkdir()
    soundfile.write(out / "0000.wav", 0.1 * np.random.default_rng(0).standard_normal(24000), 24000)
    clip = {"role": "assistant", "content": {"type": "audio", "audio_url": str(out / "0000.wav")}}
    rows = [{"messages": [{"role": "user", "content": "b"}, clip, {"role": "user", "content": "a"}]}]
    voice = "--text", "a", "--reference_text", "b", "--reference_audio", out / "0000.wav"
    listed = "--prompts", written(tmp_path / "prompts.json", rows)
    best = "--prompts", written(out / "best.jsonl", rows[0])
    for flags in (voice, listed, best):
        assert f"--overwrite would delete {out / '0000.wav'}, which is read" in refuse(*flags, "--overwrite")
        assert (out / "0000.wav").exists()


@pytest.mark.slow
def test_overwriting_deletes_results_and_nothing_else(pool, tiny, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("0007.wav", "0007.json", "notes.json", "mine.wav"):
        (tmp_path / "out" / name).write_text("0")
    say(pool, tiny, tmp_path / "out", "--text", "Yes.", "--max_seconds", 0.2, "--overwrite")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "notes.json", "mine.wav", "0000.wav", "0000.json", "0000.npy", "run.lock"}
