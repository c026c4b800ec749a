"""Each mistake a user can make ends the trainer with status 1 and one clear message: file, sample, remedy."""
import json
import os
import re
import shutil

import numpy as np
import pytest
import soundfile

from core import checkpoint
from core.cli import UserError
from speech.rows import read_samples
from tests.helpers.trainer import Run, script_flags, train_forked, trainer_arguments


@pytest.fixture
def run(forked):
    """run(*flags, name="out") trains for a step in a fork, without loaders; never fails by itself."""
    def start(*flags, evaluate=False, **options):
        return forked("--max_steps", 1, "--num_workers", 0, "--preprocess_num_proc", 0,
                      *([] if evaluate else ["--disable_eval"]), *flags, ok=False, **options)
    return start


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    """A folder with the speech of the tiny dataset beside which data files are written."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(tiny.root / "speech", folder / "speech")
    return folder


def target_item(sample):
    return sample["messages"][-1]["content"][1]


def written(folder, samples, name="train.json"):
    path = folder / name
    path.write_text(json.dumps(samples))
    return path


def complains(done, *parts, errors=1):
    """Status 1, one error message that holds all parts, no traceback; returns the message's lines."""
    assert done.status == 1, done.output
    assert "Traceback" not in done.output, done.output
    lines = done.output.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("error:")]
    assert len(starts) == errors, done.output
    message = lines[starts[0]:]
    for part in parts:
        assert str(part) in "\n".join(message), (part, done.output)
    return message


# -- The data file -----------------------------------------------------------------------------------------------------

FILES = {
    "not there": (None, "there is no such file or folder"),
    "empty": (b"", "is empty"),
    "blank": (b" \n\n ", "is empty"),
    "a string": (b'"hello"', "holds a JSON str, not a list of samples"),
    "a number": (b"17", "holds a JSON int, not a list"),
    "an object": (b'{\n "data": []\n}', "holds a JSON dict, not a list"),
    "cut after a sample": (b'[{"messages": []},', "line 1 column", "truncated"),
    "cut inside a text": (b'[{"messages":\n [{"role": "us', "line 2 column", "truncated"),
    "cut inside a word": (b'[{"messages": nu', "truncated"),
    "cut inside a key": (b'[{"messages": [], "star', "truncated"),
    "wrong comma": (b'[{"messages": []},\n\n ,{"messages": []}]', "line 3 column 2", "Expecting value"),
    "cut JSONL": (b'{"messages": []}\n{"messages": [', "line 2 column", "truncated"),
    "Latin-1": (b'["x",\n' * 5000 + "für".encode("latin-1"), "is not UTF-8 text", "line 5001"),
    "a wave file": (b"RIFF\xff\xfe\x00\x00WAVEfmt ", "is an audio file; give the folder with the texts"),
}


@pytest.mark.parametrize("content, parts", [(c, p) for c, *p in FILES.values()], ids=FILES)
def test_data_file(tmp_path, content, parts):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(read_samples(path, []))
    assert all(str(part) in str(error.value) for part in (path, *parts)) and "\n" not in str(error.value)


def test_data_folder(run, tmp_path):
    assert complains(run("--train_data_dir", tmp_path / "gone", "--train_data_file", ""), tmp_path / "gone", "there is no such file or folder")
    (tmp_path / "folder").mkdir()
    flags = ("--train_data_dir", tmp_path / "folder", "--train_data_file", "")
    assert complains(run(*flags), tmp_path / "folder", "has neither a list nor audio files")
    (tmp_path / "folder" / "metadata.json").write_text('{"samples": 3}')
    assert complains(run(*flags), "metadata.json: has no list 'samples'")
    (tmp_path / "folder" / "metadata.json").write_text('{"samples": [{"id": "s1", "audio_file": "a.wav"}]}')
    assert complains(run(*flags), "metadata.json sample 1 (s1): has no 'transcript_file'")
    (tmp_path / "folder" / "metadata.json").write_text('{"samples": [')
    assert complains(run(*flags), "metadata.json: not valid JSON", "truncated")


def change(path, value):
    """A change of a sample: messages[1]["content"][2] = value is change((1, "content", 2), value)."""
    def apply(sample):
        at = sample["messages"]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        return sample
    return apply


AUDIO = {"type": "audio", "audio_url": "speech/gone.wav"}
SAMPLES = {
    "no messages": (lambda s: {"speaker": "x"}, "has no list 'messages'"),
    "empty messages": (lambda s: {"messages": []}, "has no list 'messages'"),
    "messages an object": (lambda s: {"messages": {"role": "user"}}, "has no list 'messages'"),
    "not an object": (lambda s: "sample", "has no list 'messages'"),
    "no sample": (lambda s: None, "has no list 'messages'"),
    "message a string": (change((1,), "hello"), "a message is a str, not an object"),
    "no target audio": (lambda s: {**s, "messages": s["messages"][:-1]}, "has no target audio"),
    "text only": (change((-1, "content"), "words"), "has no target audio"),
    "unknown role": (change((1, "role"), "narrator"), "unknown role 'narrator'; known: system, scene, user, assistant"),
    "no role": (change((1, "role"), None), "unknown role None"),
    "unknown type": (change((1, "content", 1), {"type": "image", "url": "x"}),
                     "unknown content type 'image' in a message of role 'user'; known: text, audio"),
    "no type": (change((1, "content", 1), {"audio_url": "x"}), "unknown content type None"),
    "no content": (change((1, "content"), None), "unknown content type None"),
    "text a number": (change((1, "content", 0, "text"), 5), "a text item of role 'user' has no string 'text'"),
    "half a character": (change((1, "content", 0, "text"), "bad \ud83d"), "holds half a character"),
    "inline audio": (change((1, "content", 1), {"type": "audio", "audio_url": "", "raw_audio": "UklGRg=="}),
                     "inline 'raw_audio' is not supported; write it to a file and set 'audio_url'"),
    "no audio_url": (change((1, "content", 1), {"type": "audio"}), "an audio item has no 'audio_url'"),
    "a recipient": (change((2, "recipient"), "tool"), "'recipient' is not supported"),
    "offset a text": (change((1, "content", 1, "offset"), "1.5"), "'offset'", "is '1.5', not seconds"),
    "offset negative": (change((1, "content", 1, "offset"), -1), "is -1, not seconds"),
    "offset infinite": (change((1, "content", 1, "offset"), float("inf")), "is inf, not seconds"),
    "no reference text": (change((1, "content"), [{"type": "audio", "audio_url": "speech/{0}"}]),
                          "has no transcript before it (nor misc.ref_transcript)"),
    "no text at all": (lambda s: {"messages": s["messages"][-1:][:0] + [{"role": "assistant", "content": target_item(
        s)}]}, "the trained clip has no text"),
    "control token": (change((2, "content", 0, "text"), "Well <|eot_id|> then"),
                      "text contains the control token <|eot_id|>; remove it"),
    "start_index beyond": (lambda s: {**s, "start_index": 7}, "start_index 7 of 3 messages"),
}


@pytest.fixture(scope="module")
def two_good(tiny, data):
    """Two good samples; the first one's audio names for the {0} above."""
    samples = tiny.samples()[:2]
    return samples, os.path.basename(target_item(samples[0])["audio_url"])


@pytest.mark.slow
def test_samples(run, data, two_good):
    """Each stands between good ones; all are told of in one list, each once, with its place and name."""
    good, audio_name = two_good
    samples = [good[0]]
    for spoil, *_ in SAMPLES.values():
        bad = spoil(json.loads(json.dumps(good[0])))
        if isinstance(bad, dict):
            text = json.dumps({**bad, "misc": {"sample_id": "odd"}})
            bad = json.loads(text.replace("{0}", audio_name))
        samples += [bad, good[1]]
    path = written(data, samples, "odd.json")
    done = run("--train_data_file", path)
    complains(done, f"error: {len(SAMPLES)} problems:", f"{path} sample 2 (odd): has no list")
    lines = (done.output_dir / "problems.jsonl").read_text().splitlines()
    found = {row["entry"]: row["problem"] for row in map(json.loads, lines)}
    assert len(found) == len(lines) == len(SAMPLES)
    for at, (_, *parts) in zip(range(2, len(samples) + 1, 2), SAMPLES.values()):
        name = " (odd)" if isinstance(samples[at - 1], dict) else ""
        said = found[f"sample {at}{name}"]
        assert all(part in said for part in parts), said


def test_missing_audio_lists_the_places_tried(run, data, two_good, tmp_path):
    good, _ = two_good
    bad = json.loads(json.dumps(good[0]))
    target_item(bad)["audio_url"] = "clips/gone.wav"
    path = written(data, [bad], "odd.json")
    places = [data, data.parent, data.parent.parent, tmp_path]         # the last one: where the trainer was started
    complains(run("--train_data_file", path), "audio file 'clips/gone.wav' not found; tried ",
              *[place / "clips/gone.wav" for place in places])
    target_item(bad)["audio_url"] = "/gone.wav"
    message = complains(run("--train_data_file", written(data, [bad], "odd.json")), "not found; tried /gone.wav")
    assert message[0].count("gone.wav") == 2


def test_twenty_five_bad_samples_are_one_message(run, tiny, data):
    samples = [json.loads(json.dumps(tiny.samples()[0])) for _ in range(25)]
    for number, sample in enumerate(samples):
        target_item(sample)["audio_url"] = f"speech/gone{number}.wav"
        sample["misc"]["sample_id"] = f"s{number}"
    done = run("--train_data_file", written(data, samples, "odd.json"))
    message = complains(done, "and 5 more")
    assert message[0] == "error: 25 problems:" and len(message) == 22
    for number, line in enumerate(message[1:21]):
        assert f"sample {number + 1} (s{number})" in line and f"gone{number}.wav" in line
    path = done.output_dir / "problems.jsonl"      # a dry run writes none
    assert message[21].strip() == "... and 5 more" + f"; all are in {path}" * path.exists()
    assert not path.exists() or len(path.read_text().splitlines()) == 25


def test_problems_of_training_and_validation_data_come_together(run, data, two_good):
    good, _ = two_good
    train = written(data, [{"messages": []}, *good], "train.json")
    held_out = written(data, [*good, {}], "eval.json")
    done = run("--train_data_file", train, "--eval_data_file", held_out, evaluate=True)
    message = complains(done, "error: 2 problems:", f"{train} sample 1: has no", f"{held_out} sample 3: has no")
    assert len(message) == 3
    (data / "eval.json").write_text("[]")
    train = written(data, good, "train.json")
    complains(run("--train_data_file", train, "--eval_data_file", held_out, evaluate=True), f"{held_out}: holds no")


# -- Audio -------------------------------------------------------------------------------------------------------------


def spoilt_audio(folder):
    """{file name: what is said of it}; writes the files."""
    folder.mkdir(exist_ok=True)
    tone = 0.3 * np.sin(np.arange(24000) * 0.1)
    (folder / "empty.wav").write_bytes(b"")
    (folder / "text.wav").write_text("this is not audio")
    (folder / "noise.mp3").write_bytes(b"ID3" + np.random.default_rng(0).bytes(2000))
    soundfile.write(folder / "short.wav", tone[:480], 24000)
    soundfile.write(folder / "nothing.wav", tone[:0], 24000)
    soundfile.write(folder / "nan.wav", np.where(np.arange(24000) == 12345, np.nan, tone), 24000, subtype="FLOAT")
    soundfile.write(folder / "silent.wav", 0 * tone, 24000)
    soundfile.write(folder / "loud.wav", 3e38 * tone, 24000, subtype="FLOAT")
    return {"empty.wav": "is an empty file",
            "text.wav": "is not readable audio (Format not recognised); wav, flac, mp3 and ogg are read",
            "noise.mp3": "is not readable audio",
            "short.wav": "is too short: 0.020 s; a clip needs 0.04 s", "nothing.wav": "is too short: 0.000 s",
            "nan.wav": "contains samples that are not finite numbers", "silent.wav": "is silent: every sample is 0",
            "loud.wav": "peaks at 9e+37; full scale is 1, so its samples have another scale"}


def with_audio(tiny, names):
    """One sample for each file name as its target."""
    samples = [json.loads(json.dumps(tiny.samples()[0])) for _ in names]
    for sample, name in zip(samples, names):
        target_item(sample)["audio_url"] = name
    return samples


def test_bad_audio_is_listed_together(run, tiny, data):
    said = spoilt_audio(data / "spoilt")
    path = written(data, with_audio(tiny, [f"spoilt/{name}" for name in said]) + tiny.samples()[:2], "odd.json")
    message = complains(run("--train_data_file", path, "--code_cache", data / "codes"))
    assert message[0] == "error: 8 problems:" and len(message) == 9
    for number, (name, why) in enumerate(said.items()):
        line, = (line for line in message if f"its audio {data / 'spoilt' / name}: {why}" in line)
        assert line.startswith(f"  {path} sample {number + 1} (")


def test_an_offset_behind_the_end(run, tiny, data):
    sample = tiny.samples()[0]
    target_item(sample).update(offset=99.5, duration=1.0)
    path = written(data, [sample], "odd.json")
    assert complains(run("--train_data_file", path), "is too short: 0.000 s from offset 99.5 s",
                     data / target_item(sample)["audio_url"])


# -- Model, codec, output ----------------------------------------------------------------------------------------------


def test_model_and_tokenizer_paths(run, tiny, tmp_path):
    complains(run("--model_path", tiny.codec, "--audio_tokenizer_path", tiny.model),
              "--model_path", tiny.codec, "--model_path and --audio_tokenizer_path are swapped")
    complains(run("--audio_tokenizer_path", tiny.model), f"--audio_tokenizer_path {tiny.model}", "swapped")
    complains(run("--model_path", tiny.codec), f"--model_path {tiny.codec}", "swapped")
    for name in (tmp_path / "gone", "./gone", "gone"):
        complains(run("--model_path", name), f"--model_path {name}: no such folder")
        complains(run("--audio_tokenizer_path", name), f"--audio_tokenizer_path {name}: no such folder")
    complains(run("--model_path", "owner/gone"), "--model_path owner/gone: neither a folder here nor to be had")
    complains(run("--model_path", tiny.root), f"--model_path {tiny.root}", "config.json")
    complains(run("--model_path", tiny.train_json), "no such folder")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    complains(run("--model_path", tmp_path / "bert"), "is a 'bert' checkpoint, not 'higgs_audio_v2'")
    (tmp_path / "bert" / "config.json").write_text('{"model_type"')
    complains(run("--model_path", tmp_path / "bert"), "has no readable config.json")


def copy_of(folder, to, without):
    shutil.copytree(folder, to)
    for path in to.glob(without):
        path.unlink()
    return to


def test_incomplete_model_and_codec_folders(run, tiny, tmp_path):
    assert complains(run("--model_path", copy_of(tiny.model, tmp_path / "a", "*.safetensors")), tmp_path / "a", "weights")
    assert complains(run("--model_path", copy_of(tiny.model, tmp_path / "b", "tokenizer*")), tmp_path / "b", "tokenizer")
    codec = copy_of(tiny.codec, tmp_path / "c", "*.safetensors")
    assert complains(run("--audio_tokenizer_path", codec), codec, "holds no *.safetensors weights")


def test_output_that_cannot_be_written(run, tiny, tmp_path):
    """A file stands where the folder should be; permissions would not stop a test that runs as root."""
    (tmp_path / "taken").write_text("a file")
    assert complains(run(name="taken"), f"--output_dir {tmp_path / 'taken'}: cannot be written")
    assert complains(run(name="taken/below"), f"--output_dir {tmp_path / 'taken/below'}: cannot be written")
    assert complains(run("--code_cache", tmp_path / "taken"), f"--code_cache {tmp_path / 'taken'}: ",
                     "cannot be written (Not a directory)")


# -- Length ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_samples_that_are_too_long(run, tiny, data):
    samples = tiny.samples()[:6]
    long = json.loads(json.dumps(samples[0]))
    long["messages"][2]["content"][0]["text"] = "And so on and on it went. " * 80
    long["misc"]["sample_id"] = "epic"
    long["messages"][1]["content"][2]["text"] = long["messages"][2]["content"][0]["text"]
    path = written(data, [*samples[:3], long, *samples[3:]], "odd.json")
    flags = ("--train_data_file", path, "--max_length", 600)
    message = complains(run(*flags), f"{path} sample 4 (epic): ", "tokens", "more than --max_length 600", "fix: ",
                        "--drop_too_long")
    assert len(message) == 2 and "s of audio" in message[0]
    done = run(*flags, "--drop_too_long")
    assert done.status == 0, done.output
    assert "dropped as too long: 1 of 7 training" in done.output and "samples    6 to train" in done.output
    complains(run("--train_data_file", path, "--max_tokens_per_batch", 600), "(epic)",
              "more than --max_tokens_per_batch 600")
    message = complains(run("--train_data_file", path, "--max_length", 50, name="other"), "7 problems:")
    assert len(message) == 9
    complains(run("--train_data_file", path, "--max_length", 50, "--drop_too_long", name="other"),
              "no training samples are left")


def test_bad_samples_are_listed_and_dropped(run, tiny, data, tmp_path):
    """One of each kind: only those checks that are named drop, and problems.jsonl lists all."""
    samples = json.loads(json.dumps(tiny.samples()[:8]))
    samples[1]["messages"][1]["role"] = "nobody"
    samples[3]["messages"][1]["content"][0]["text"] = "He said <|eot_id|> and left."
    samples[5]["messages"][1]["content"][-1]["text"] = "And so on and on it went. " * 80
    path = written(data, samples, "mixed.json")
    flags = ("--train_data_file", path, "--max_length", 600)

    def listed(name):
        rows = [json.loads(line) for line in (tmp_path / name / "problems.jsonl").read_text().splitlines()]
        assert {row["file"] for row in rows} == {str(path)}
        return [(int(row["entry"].split()[1]) - 1, row["check"]) for row in rows]

    complains(run(*flags, name="one"), "2 problems:", "sample 2", "unknown role 'nobody'", "sample 4", "control token")
    assert listed("one") == [(1, "invalid"), (3, "control_token")]
    complains(run(*flags, "--drop_bad", "invalid,too_long", name="one"), f"{path} sample 4 ", "control token")
    done = run(*flags, "--drop_bad", name="two")
    assert done.status == 0, done.output
    assert "data       dropped: 1 control_token, 1 invalid; see" in done.output
    assert "samples    5 to train" in done.output
    assert "dropped as too long: 1 of 6 training" in done.output
    assert listed("two") == [(1, "invalid"), (3, "control_token"), (5, "too_long")]


# -- Resume ------------------------------------------------------------------------------------------------------------

LORA = ("--use_lora", "--lora_rank", 4, "--lora_alpha", 8)


@pytest.fixture(scope="module")
def used(pool, tiny, tmp_path_factory):
    """An output folder with one LoRA checkpoint."""
    output_dir = tmp_path_factory.mktemp("used") / "out"
    train_forked(pool, tiny, output_dir, "--disable_eval", "--max_steps", 1, "--num_workers", 0, *LORA)
    return output_dir / "checkpoint-1"


@pytest.fixture
def used_copy(used, tmp_path):
    """A copy of that checkpoint in this test's output folder."""
    return shutil.copytree(used, tmp_path / "out" / "checkpoint-1")


def test_sample_names_that_are_not_unicode(run, tiny, data):
    """Half a surrogate pair in a sample id must not end a run after hours of encoding."""
    odd = written(data, [{**tiny.samples()[0], "misc": {"sample_id": "odd\ud800"}}], "odd.json")
    done = run(*LORA, "--train_data_file", odd, "--max_length", 9)
    assert done.status == 1 and "odd\\ud800" in done.output, done.output


def test_resume_goes_on_when_all_is_well(run, used_copy):
    done = run(*LORA, "--max_steps", 2)
    assert done.status == 0 and "resumed from" in done.output and max(done.metrics("train/loss")) == 2


def test_resume_of_a_checkpoint_that_summed_up_fewer_numbers(run, used_copy):
    state, manifest = used_copy / "trainer_state" / "state.json", used_copy / "manifest.json"
    meta, listed = json.loads(state.read_text()), json.loads(manifest.read_text())
    meta["unlogged"] = meta["unlogged"][:14]
    state.write_text(json.dumps(meta))
    listed["files"]["trainer_state/state.json"] = {"bytes": state.stat().st_size,
                                                   "sha256": checkpoint.sha256(state)}
    manifest.write_text(json.dumps(listed))
    done = run(*LORA, "--max_steps", 2)
    assert done.status == 0 and "resumed from" in done.output and max(done.metrics("train/stop_recall")) == 2


@pytest.fixture(scope="module")
def other_model(tiny, tmp_path_factory):
    """The same architecture and tokenizer with other weights."""
    from transformers import AutoTokenizer

    from speech import make_tiny
    folder = tmp_path_factory.mktemp("other")
    make_tiny.make_model(folder, AutoTokenizer.from_pretrained(tiny.model), seed=1)
    for path in tiny.model.glob("tokenizer*"):
        shutil.copy(path, folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def other_codec(tmp_path_factory):
    from speech import make_tiny
    folder = tmp_path_factory.mktemp("other-codec")
    make_tiny.make_codec(folder, seed=1)
    return folder / "codec"


@pytest.mark.slow
def test_resume_of_another_run_is_refused(run, tiny, data, used, used_copy, other_model, other_codec):
    for resume in ((), ("--resume", used)):
        complains(run(*LORA, "--model_path", other_model, *resume), "checkpoint-1", "made with another base model",
                  "another --output_dir")
        fewer = written(data, tiny.samples()[:5], "fewer.json")
        complains(run(*LORA, "--train_data_file", fewer, *resume), "checkpoint-1", "another training data")
        complains(run(*resume), "checkpoint-1", "another set of trained weights (lora, this run full)")
        complains(run(*LORA, "--text_loss_weight", 0, *resume), "another set of trained weights")
        complains(run(*LORA, "--audio_tokenizer_path", other_codec, *resume), "another codec")
        complains(run(*LORA, "--per_device_train_batch_size", 2, *resume), "another pack", "4 samples", "2 samples")
        # which makes other training data as well, where samples are held out
        complains(run(*LORA, "--seed", 1, "--train_data_file", fewer, *resume), "another seed (42, this run 1)")
    assert sorted(p.name for p in used_copy.parent.glob("checkpoint-*")) == ["checkpoint-1"]


def test_resume_may_change_validation_data(run, tiny, data, used_copy):
    """As long as it speaks nothing that is trained: that would be left out of training."""
    soundfile.write(data / "other.wav", np.sin(np.arange(24000) / 9), 24000)
    held_out = written(data, with_audio(tiny, ["other.wav"]), "held_out.json")
    done = run(*LORA, "--max_steps", 2, "--eval_data_file", held_out, evaluate=True)
    assert done.status == 0 and "resumed from" in done.output and done.metrics("eval/loss").keys() == {2}


def test_resume_with_other_adapters_is_refused(run, used_copy):
    complains(run("--use_lora", "--lora_rank", 8, "--lora_alpha", 8), "checkpoint-1", "adapter has r 4, this run 8",
              "the same LoRA flags")
    complains(run("--use_lora", "--lora_rank", 4, "--lora_alpha", 16), "lora_alpha 8, this run 16")
    complains(run(*LORA, "--lora_target_modules", "all-linear"), "target_modules")


@pytest.mark.slow
def test_resume_of_what_is_not_there_or_damaged(run, used_copy, tmp_path):
    out = used_copy.parent
    complains(run(*LORA, "--resume", "none"), f"--resume none, but {out} holds checkpoints", "--resume auto")
    complains(run(*LORA, "--resume", tmp_path / "gone"), f"--resume {tmp_path / 'gone'}: no such folder")
    complains(run(*LORA, "--resume", out), f"--resume {out}: no manifest.json")
    weights = used_copy / "adapter_model.safetensors"
    data = weights.read_bytes()
    for spoilt, said in ((data[:-1], "bytes instead of"), (data[:-1] + bytes([data[-1] ^ 1]), "another checksum")):
        weights.write_bytes(spoilt)
        complains(run(*LORA, "--resume", used_copy), f"--resume {used_copy}: adapter_model.safetensors", said)
        done = run(*LORA)
        complains(done, f"{out}: every checkpoint is damaged; to start anew, give another")
        assert f"{used_copy} is damaged (adapter_model.safetensors" in done.output
    weights.unlink()
    complains(run(*LORA, "--resume", used_copy), "adapter_model.safetensors is missing")
    (used_copy / "manifest.json").write_text("{")
    complains(run(*LORA, "--resume", used_copy), "unreadable manifest.json")


# -- Flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, said", [
    (("--train_data_dir", "x"), "give one of --train_data_file and --train_data_dir"),
    (("--train_data_file", ""), "give one of --train_data_file and --train_data_dir"),
    (("--eval_data_file", "x"), "--disable_eval and validation data exclude each other"),
    (("--eval_data_file", "x", "--eval_data_dir", "y"), "give one of --eval_data_file and --eval_data_dir"),
    (("--per_device_train_batch_size", 0), "--per_device_train_batch_size is 0; it must be at least 1"),
    (("--gradient_accumulation_steps", -1), "--gradient_accumulation_steps is -1"),
    (("--num_train_epochs", 0), "--num_train_epochs is 0"), (("--logging_steps", 0), "--logging_steps is 0"),
    (("--lora_rank", 0), "--lora_rank is 0"),
    (("--max_steps", -1), "--max_steps is -1; it must be 0 or more and finite"),
    (("--learning_rate", "nan"), "--learning_rate is nan"), (("--learning_rate=-1e-5",), "--learning_rate is -1e-05"),
    (("--max_grad_norm", -1), "--max_grad_norm is -1.0"),
    (("--lora_dropout", 1.5), "--lora_dropout is 1.5; it must be at least 0 and below 1"),
    (("--validation_split", 2), "--validation_split is 2.0"), (("--adam_beta2", "nan"), "--adam_beta2 is nan"),
    (("--learning_rate", "inf"), "--learning_rate is inf; it must be 0 or more and finite"),
    (("--lora_target_modules", "all-linear"), "--lora_target_modules needs --use_lora"),
    (("--use_lora", "--freeze_llm"), "drop --freeze_llm"),
    (("--max_tokens_per_batch", 999, "--group_by_length"), "--group_by_length counts samples: not with packs of tokens"),
    (("--max_tokens_per_batch", 999, "--global_batch_size", 8), "--global_batch_size counts samples: not with packs of tokens"),
    (("--global_batch_size", 6), "--global_batch_size 6 is not a multiple of 4 (--per_device_train_batch_size 4 x 1"),
    (("--global_batch_size", 8, "--gradient_accumulation_steps", 2), "give one of --global_batch_size and"),
    (("--keep", "x"), "--keep needs --use_lora"), (("--keep_every", 2), "--keep_weight and --keep_every need --keep"),
    (("--cpu_offload",), "need --parallel fsdp"), (("--shard_size", 2), "needs --parallel hsdp"),
    (("--no-reshard_after_forward",), "need --parallel fsdp"),
    (("--parallel", "hsdp:3"), "1 rank cannot be cut into groups"),
    (("--gpu_memory", 80), "--gpu_memory needs --dry_run"), (("--host_memory", 80), "--host_memory needs --dry_run"),
    (("--dry_run", 2, "--gpu_memory", 0), "--gpu_memory is 0.0; it must be above 0"),
    (("--dry_run", -1), "--dry_run is -1"),
    (("--dry_run", 2, "--host_memory", 0), "--host_memory is 0.0; it must be above 0"),
    (("--report_to", "wandb"), "--report_to wandb: the package wandb is missing: pip install wandb"),
])
def test_flags(tiny, flags, said):
    if "wandb" in flags and shutil.which("wandb"):
        pytest.skip("wandb is installed here")
    words = trainer_arguments(tiny, "out", "--max_steps", 1, "--disable_eval", *flags)
    with pytest.raises(UserError, match=re.escape(said)):
        script_flags()[1](script_flags()[0].parse_args(words), 1)


def test_a_wrong_flag_is_one_line(run):
    unknown = "--use_lora", "--lora_target_modules", "q_proj,gone_proj"
    for flags, said in ((("--lora_rank", 0), "--lora_rank is 0"),
                        (unknown, "'gone_proj' matches no linear")):
        assert len(complains(run(*flags), said)) == 1


@pytest.mark.parametrize("flags, said", [
    (("--warmup", 3), "--warmup: no such flag; the nearest one is --warmup_steps"),
    (("--lr_scheduler", "step"), "invalid choice: 'step'"),
    (("--num_train_epochs", "many"), "invalid int value: 'many'")])
def test_flags_that_do_not_parse(run, flags, said):
    """No abbreviations: --warmup would silently become another flag one day."""
    done = run(*flags)
    assert done.status == 2 and said in done.output and "Traceback" not in done.output


# -- Two ranks, and started as users start it --------------------------------------------------------------------------


@pytest.mark.slow
def test_dropped_audio_is_the_same_on_any_number_of_ranks(forked, tiny, data, tmp_path):
    """Samples whose target, or whose reference, cannot be used are left out, counted, listed; the run goes on."""
    said, good = spoilt_audio(data / "spoilt"), tiny.samples()[:6]
    mixed = [sample for pair in zip(with_audio(tiny, [f"spoilt/{name}" for name in said]), good) for sample in pair]
    mixed[1]["messages"][1]["content"][1]["audio_url"] = "spoilt/silent.wav"      # a reference
    path, losses, lists = written(data, mixed, "mixed.json"), [], []
    for ranks in (1, 2):
        done = forked("--train_data_file", path, "--code_cache", tmp_path / "codes", "--disable_eval", "--use_lora",
                      "--per_device_train_batch_size", 2 // ranks, "--max_steps", 2, "--drop_bad", "audio",
                      "--lora_dropout", 0, ranks=ranks, name=f"out{ranks}")
        listed = [json.loads(line) for line in (done.output_dir / "problems.jsonl").read_text().splitlines()]
        assert f"data       dropped: 7 audio; see {done.output_dir}" in done.output, done.output
        assert "samples    5 to train" in done.output
        losses.append(list(done.metrics("train/loss").values()))
        lists.append(listed)
    assert lists[0] == lists[1] and [row["check"] for row in listed] == ["audio"] * 7
    assert [row["entry"].split()[1] for row in listed] == ["1", "2", "3", "5", "7", "9", "11"]
    assert f"its audio {data / 'spoilt' / 'silent.wav'}: is silent" in listed[1]["problem"]
    assert np.allclose(losses[0], losses[1], rtol=1e-5) and np.isfinite(losses).all() and len(losses[0]) == 2


def test_fewer_samples_than_ranks_trains(forked, tiny, data):
    path = written(data, tiny.samples()[:1], "one.json")
    done = forked("--train_data_file", path, "--num_train_epochs", 2, "--use_lora", ranks=2)
    losses = done.metrics("train/loss")
    assert sorted(losses) == [1, 2] and all(np.isfinite(list(losses.values())))
    assert "samples    1 to train, 0 to validate" in done.output


@pytest.mark.slow
def test_alone_the_message_is_all_there_is(train, data):
    path = data / "bad.json"
    path.write_text('{"a": 1')
    done = train("--train_data_file", path, ok=False)
    assert complains(done, path, "truncated") == done.output.strip().splitlines()


@pytest.mark.slow
def test_a_mistake_that_all_ranks_find_is_told_once(train, used_copy, quick_python):
    """torchrun adds a traceback of its own when a rank has failed, whose end repeats it."""
    done = train("--use_lora", "--lora_rank", 8, "--lora_alpha", 8, "--disable_eval", ranks=2, ok=False,
                 python=quick_python)
    ours = done.output.partition("torch/distributed/elastic")[0].partition("Traceback (most recent call last)")[0]
    assert ours.count("error:") == 1 and "rank 1 failed" not in done.output
    assert "error: " in done.output.splitlines()[-2]
    ours = "\n".join(line for line in ours.splitlines() if "elastic" not in line)
    complains(Run(done.status, ours, done.output_dir), "adapter has r 4, this run 8")
