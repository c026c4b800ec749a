"""Each file of minimal/ specifies a big trainer: on the same data both have equal losses, norms and weights."""
import json
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import chats
from tests.helpers.trainer import ROOT, RUN_SCRIPT, Run, brief

STEPS = 6
SHARED = ["--max_steps", STEPS, "--gradient_accumulation_steps", 2, "--learning_rate", 1e-3,
          "--logging_steps", 1, "--save_steps", STEPS // 2]
BIG = ["--num_workers", 0, "--report_to", "none"]
SPEECH = [*BIG, "--normalize_text", "off", "--eval_steps", STEPS // 2]


@pytest.fixture
def run(pool):
    """run(script, flags, out, ranks=1) -> its output."""
    def start(script, flags, out, ranks=1):
        words = list(map(str, [*SHARED, *flags, "--output_dir", out]))
        statuses, output = pool.run(ranks, RUN_SCRIPT, script, words, cwd=out.parent)
        assert not any(statuses), output[-4000:]
        return output
    return start


def metrics(out, name):
    """{step: value} of metrics.jsonl."""
    return Run(0, "", out).metrics(name)


def assert_equal(small, big, base=None, validates=True, rel=1e-5):
    """The losses, the first gradient norm, validation losses and, if a base is given, the trained weights agree."""
    losses = metrics(small, "train/loss")
    assert losses.keys() == set(range(1, STEPS + 1)) and losses == pytest.approx(metrics(big, "train/loss"), rel=rel)
    first = metrics(big, "train/grad_norm")[1]
    assert metrics(small, "train/grad_norm")[1] == pytest.approx(first, rel=rel)
    if validates:
        assert metrics(small, "eval/loss") == pytest.approx(metrics(big, "eval/loss"), rel=1e-5)
    if base:
        folders = small / f"checkpoint-{STEPS}", big / f"checkpoint-{STEPS}", base
        assert_same_weights(*(load_file(folder / "model.safetensors") for folder in folders))


def assert_same_weights(small, big, start):
    """The updates of every tensor over all steps agree to 0.1 %."""
    for name, initial in start.items():
        update = (big[name] - initial).norm()
        assert (small[name] - big[name]).norm() <= 1e-3 * update + 1e-9, name


@pytest.fixture(scope="module")
def speech(tiny, tmp_path_factory):
    """Flags of both trainers."""
    short = brief(tiny, tmp_path_factory.mktemp("speech"))
    return ["--model_path", short.model, "--audio_tokenizer_path", short.codec, "--train_data_file", short.train_json,
            "--validation_split", 0.25, "--per_device_train_batch_size", 2, "--warmup_steps", 2]


def test_higgs(run, tiny, speech, tmp_path):
    small, big = tmp_path / "mine", tmp_path / "big"
    run("minimal/train_higgs.py", speech, small)
    run("train_v2_ddp.py", [*speech, *SPEECH], big)
    assert_equal(small, big, tiny.model)


@pytest.mark.slow
def test_higgs_on_two_ranks_with_adapters(run, speech, tmp_path):
    """Equals the big trainer on one rank with twice the micro-steps; a resumed run ends with the same bits."""
    small, again, big = (tmp_path / name for name in ("mine", "again", "big"))
    flags = [*speech, "--use_lora"]
    run("minimal/train_higgs.py", flags, small, ranks=2)
    run("train_v2_ddp.py", [*flags, *SPEECH, "--gradient_accumulation_steps", 4], big)
    assert_equal(small, big)
    again.mkdir()
    (small / f"checkpoint-{STEPS // 2}").rename(again / f"checkpoint-{STEPS // 2}")
    run("minimal/train_higgs.py", flags, again, ranks=2)
    assert metrics(again, "train/loss").keys() == set(range(STEPS // 2 + 1, STEPS + 1))
    files = [out / f"checkpoint-{STEPS}" / "adapter_model.safetensors" for out in (small, again)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_higgs_sharded_on_two_ranks(run, tiny, speech, tmp_path):
    """FSDP2 equals DDP; a sharded run resumes what DDP saved. 7 samples are held out, an odd number."""
    flags = [*speech, "--validation_split", 0.3]
    both = [tmp_path / "ddp", tmp_path / "fsdp"]
    run("minimal/train_higgs.py", flags, both[0], ranks=2)
    first = both[0] / f"checkpoint-{STEPS // 2}"
    run("minimal/train_higgs.py", [*flags, "--parallel", "fsdp"], both[1], ranks=2)
    assert_equal(*both, tiny.model)
    again = tmp_path / "again"
    again.mkdir()
    first.rename(again / first.name)
    run("minimal/train_higgs.py", [*flags, "--parallel", "fsdp"], again, ranks=2)
    losses = metrics(again, "train/loss")
    assert losses == pytest.approx({step: metrics(both[0], "train/loss")[step] for step in losses}, rel=1e-5)


@pytest.mark.parametrize("script", ["train_higgs.py", "distill.py"])
def test_no_code_of_a_model_folder_runs(quick_python, tiny, tmp_path, script):
    """transformers would offer on the terminal to run it."""
    folder = shutil.copytree(tiny.model, tmp_path / "model")
    (folder / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Custom: pass\n")
    for name, auto in (("config.json", {"AutoConfig": "custom.Custom"}),
                       ("tokenizer_config.json", {"AutoTokenizer": ["custom.Custom", None]})):
        settings = json.loads((folder / name).read_text()) | {"auto_map": auto, "tokenizer_class": "Custom"}
        if script == "distill.py":
            settings["model_type"] = "custom"
        (folder / name).write_text(json.dumps(settings))
    (tmp_path / "words.txt").write_text("One\n" * 20)
    more = ["--prompt_file", "words.txt", "--questions_file", "words.txt"] if script == "distill.py" else [
        "--audio_tokenizer_path", tiny.codec, "--train_data_file", tiny.train_json]
    words = [quick_python, ROOT / "minimal" / script, "--model_path", folder, "--output_dir", "out", *more]
    done = subprocess.run(list(map(str, words)), text=True, input="y\n" * 9, cwd=tmp_path, capture_output=True)
    assert done.returncode and "[y/N]" not in done.stdout + done.stderr and not (tmp_path / "ran").exists()


def test_bd3lm(run, tmp_path):
    from diffusion import make_problems
    make_problems.write_demo(data := tmp_path / "data", 60, 12)
    flags = ["--train_data_file", data / "train.jsonl", "--eval_data_file", data / "test.jsonl", "--tokenizer",
             data / "tokenizer.json", "--dropout", 0, "--block_size", 8, "--max_length", 96,
             "--per_device_train_batch_size", 4, "--warmup_steps", 2]
    small, big = tmp_path / "mine", tmp_path / "big"
    shape = ["--hidden_size", 64, "--layers", 2, "--heads", 4, "--cond_size", 16]
    shown = run("minimal/train_bd3lm.py", [*flags, *shape], small)
    run("diffusion/train_bd3lm.py", [*flags, *BIG, "--model_size", "nano", "--no-pack", "--eval_steps", 3], big)
    assert_equal(small, big)
    state = torch.load(small / "checkpoint.pt", weights_only=True)
    for kind, file in (("model", "model.safetensors"), ("average", "ema.safetensors")):
        weights = load_file(big / f"checkpoint-{STEPS}" / file)
        assert_same_weights(state[kind], weights, dict.fromkeys(weights, torch.zeros(())))
    assert shown.count("\nsample: ") == 2


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_distill(run, tmp_path, loss):
    """Both trainers train on the same answers; with kl, both also read the prompt."""
    student = chats.student(tmp_path / "student")
    small, big, prompt = (tmp_path / name for name in ("mine", "big", "prompt.txt"))
    small.mkdir()
    talks = [messages[-2:] for messages in chats.conversations(48)]
    chats.write(small / "answers.jsonl", talks[8:])
    chats.write(small / "held_out.jsonl", talks[:8])
    prompt.write_text("Name the language.")
    (tmp_path / "questions.txt").write_text("the quick\n" * 10)
    flags = ["--model_path", student, "--per_device_train_batch_size", 4]
    run("minimal/distill.py", [*flags, "--prompt_file", prompt, "--questions_file", tmp_path / "questions.txt",
                               "--loss", loss, "--warmup_steps", 2, "--max_new_tokens", 4], small)
    prompt_flags = ["--prompt_file", prompt, "--prompt_role", "system"] if loss == "kl" else []
    run("distill/train_sft.py", [*flags, *BIG, *prompt_flags, "--train_data_file", small / "answers.jsonl",
                                 "--warmup_ratio", 2 / STEPS], big)
    # a divergence is a small difference of logarithms, so its relative error is larger
    assert_equal(small, big, student, validates=False, rel=1e-5 if loss == "ce" else 1e-4)
    assert json.loads((small / "judged.json").read_text()).keys() == {"base", "base + prompt", "student"}
