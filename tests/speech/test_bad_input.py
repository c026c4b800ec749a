"""A mistake of a user ends the trainer with status 1 and one clear message: file, sample, remedy."""
import json
import re
import shutil

import numpy as np
import pytest

from speech.speak import read_samples
from tests.helpers.trainer import train_forked


@pytest.fixture
def run(forked):
    """run(*flags, name="out") trains for one step in a fork, without loaders; the test checks the status."""
    def start(*flags, evaluate=False, **options):
        return forked("--max_steps", 1, "--num_workers", 0, "--preprocess_num_proc", 0,
                      *([] if evaluate else ["--disable_eval"]), *flags, ok=False, **options)
    return start


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    """A folder with the clips of the tiny data set; tests write data files there."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(tiny.root / "speech", folder / "speech")
    return folder


def write_samples(folder, samples, name="train.json"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(samples))
    return path


def assert_refused(done, *words):
    """The run ended with status 1 and one error message that holds all words, without a traceback."""
    _, *messages = re.split("^error:", done.output, flags=re.MULTILINE)
    assert done.status == 1 and len(messages) == 1 and "Traceback" not in done.output, done.output
    for word in words:
        assert str(word) in messages[0], (word, done.output)


def sample(*messages, **more):
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


CLIP = {"type": "audio", "audio_url": "clip.wav"}
SPEECH = ("user", "Well."), ("assistant", CLIP)
SAMPLES = [
    ({"speaker": "x"}, "has no list 'messages'"), (sample(SPEECH[0]), "has no target audio"),
    (sample(("narrator", "x"), *SPEECH), "unknown role 'narrator'; known: system, scene, user, assistant"),
    (sample(("user", [{"type": "image", "url": "x"}]), *SPEECH), "type 'image' of role 'user'; known: text, audio"),
    (sample(SPEECH[0], ("assistant", {"type": "audio", "raw_audio": "UklGRg=="})), "'; inline audio is not read"),
    (sample(SPEECH[0], ("assistant", {**CLIP, "offset": "1.5"})), "'offset' of 'clip.wav' is '1.5', not seconds"),
    (sample(("user", [CLIP, {"type": "text", "text": "W."}]), SPEECH[1]), "before it (nor misc.ref_transcript)"),
    (sample(("user", "bad \ud83d"), SPEECH[1]), "holds half a character"),
    (sample(*SPEECH, start_index=7), "start_index 7 of 2 messages"),
    (sample(*SPEECH, start_index=-1), "start_index is -1")]


def test_samples(tmp_path):
    """Bad samples between good ones: the list of problems has each once, with its number and name."""
    (tmp_path / "clip.wav").write_bytes(b"audio")
    samples = [{**entry, "misc": {"sample_id": "s1"}} for bad, _ in SAMPLES for entry in (sample(*SPEECH), bad)]
    path, problems = write_samples(tmp_path, samples), []
    assert len(list(read_samples(path, problems))) == len(SAMPLES) == len(problems)
    for number, (problem, (_, message)) in enumerate(zip(map(str, problems), SAMPLES), 1):
        assert problem.startswith(f"{path} sample {2 * number} (s1): ") and message in problem


def test_model_and_tokenizer_paths(run, tiny, tmp_path):
    def copy_of(folder, name, without):
        return shutil.copytree(folder, tmp_path / name, ignore=shutil.ignore_patterns(without))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for flags, *words in (
            (("--model_path", tiny.codec, "--audio_tokenizer_path", tiny.model), tiny.codec,
             "is a 'higgs_audio_v2_tokenizer' checkpoint, not 'higgs_audio_v2'"),
            (("--model_path", "owner/gone"), "--model_path owner/gone: neither a local folder nor available"),
            (("--model_path", tmp_path), "is a 'bert' checkpoint, not 'higgs_audio_v2'"),
            (("--model_path", copy_of(tiny.model, "a", "*.safetensors")), tmp_path / "a",
             "holds no model.safetensors, nor its parts"),
            (("--model_path", copy_of(tiny.model, "b", "tokenizer*")), tmp_path / "b", "tokenizer"),
            (("--audio_tokenizer_path", copy_of(tiny.codec, "c", "*.safetensors")), tmp_path / "c",
             "holds no *.safetensors weights")):
        assert_refused(run(*flags), *words)


def test_files_of_options_are_read_before_audio_is_encoded(run, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for words, *flags in (("no prompts", "--sample_prompts", "empty.txt"), ("none: ", "--keep", "none", "--use_lora")):
        assert_refused(run("--code_cache", tmp_path / "codes", *flags), words)
        assert not list(tmp_path.glob("codes/**/*.safetensors"))


def test_folders_that_cannot_be_used(run, tmp_path):
    """A file is there instead of the folder: permissions do not stop a test that runs as root."""
    (taken := tmp_path / "taken").write_text("a file")
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "prepared.json").write_text("{}")
    assert_refused(run(name="taken"), f"--output_dir {taken}: cannot be written")
    assert_refused(run("--code_cache", taken), f"--code_cache {taken}/", "cannot be written (Not a directory)")
    assert_refused(run("--train_data_file", tmp_path / "prepared", "--code_cache", tmp_path / "codes"),
              "prepared has its codes already; drop the flag")


def test_bad_samples_are_listed_and_dropped(run, tiny, data, tmp_path):
    """One bad sample of each kind: --drop_bad drops the named kinds, and problems.jsonl lists all."""
    samples = json.loads(json.dumps(tiny.samples()[:8]))
    samples[1]["messages"][1]["role"] = "nobody"
    samples[3]["messages"][1]["content"][0]["text"] = "He cried <|eot_id|> and left."
    samples[5]["messages"][1]["content"][-1]["text"] = "And so on and on it went. " * 80
    path = write_samples(data, samples, "mixed.json")
    flags = ("--train_data_file", path, "--max_length", 600)

    def read_problems(name):
        rows = [json.loads(line) for line in (tmp_path / name / "problems.jsonl").read_text().splitlines()]
        assert {row["file"] for row in rows} == {str(path)}
        return [(int(row["entry"].split()[1]) - 1, row["check"]) for row in rows]
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "problems.jsonl").write_text("of an earlier run\n")
    assert_refused(run(*flags, name="one"), "2 problems:", "sample 2", "role 'nobody'", "sample 4", "control token")
    assert read_problems("one") == [(1, "invalid"), (3, "control_token")]
    (data / "gone.csv").write_text("audio,text\nspeech/0000_speaker0.wav,Hi.\ngone.csv,Ho.\ngone.wav,Ha.\n")
    dry = "--dry_run", "--use_lora", "--report_to", "tensorboard", "--logging_dir", data / "gone.csv" / "logs"
    assert_refused(run("--train_data_file", data / "gone.csv", *dry), "2 problems:", "line 3", "gone.wav")
    assert_refused(run(*dry), "--logging_dir", "cannot be written")
    assert_refused(run(*flags, "--drop_bad", "invalid,control_token", name="one"), f"{path} sample 6 ",
              "more than --max_length 600", "--drop_too_long")
    done = run(*flags, "--drop_bad", name="two")
    assert done.status == 0, done.output
    assert "data       dropped: 1 control_token, 1 invalid; see" in done.output
    assert "samples    5 to train" in done.output
    assert "data       dropped: 1 too_long" in done.output
    assert read_problems("two") == [(1, "invalid"), (3, "control_token"), (5, "too_long")]


LORA = ("--use_lora", "--lora_rank", 4, "--lora_alpha", 8)


@pytest.fixture(scope="module")
def used(pool, tiny, tmp_path_factory):
    """A LoRA checkpoint."""
    output_dir = tmp_path_factory.mktemp("used") / "out"
    train_forked(pool, tiny, output_dir, "--disable_eval", "--max_steps", 1, "--num_workers", 0, *LORA)
    return output_dir / "checkpoint-1"


@pytest.fixture
def used_copy(used, tmp_path):
    """A copy of that checkpoint in this test's output folder."""
    return shutil.copytree(used, tmp_path / "out" / "checkpoint-1")


@pytest.mark.slow
def test_resume_of_another_run_is_refused(run, tiny, data, used, used_copy):
    fewer = write_samples(data, tiny.samples()[:5], "fewer.json")
    assert_refused(run(*LORA, "--train_data_file", fewer, "--resume", used), "checkpoint-1", "another training data")
    assert_refused(run(), "checkpoint-1", "another set of trained weights (lora, this run full)")
    assert_refused(run(*LORA, "--per_device_train_batch_size", 2), "another pack", "4 samples", "2 samples")
    assert sorted(p.name for p in used_copy.parent.glob("checkpoint-*")) == ["checkpoint-1"]


def test_resume_with_other_adapters_is_refused(run, used_copy):
    assert_refused(run(*LORA, "--lora_rank", 8), "checkpoint-1", "adapter has r 4, this run 8", "the same LoRA flags")
    assert_refused(run(*LORA, "--lora_target_modules", "all-linear"), "target_modules")


def test_fewer_samples_than_ranks_trains(forked, tiny, data):
    path = write_samples(data, tiny.samples()[:1], "one.json")
    done = forked("--train_data_file", path, "--num_train_epochs", 2, "--use_lora", ranks=2)
    losses = done.metrics("train/loss")
    assert sorted(losses) == [1, 2] and all(np.isfinite(list(losses.values())))
    assert "samples    1 to train, 0 to validate" in done.output
