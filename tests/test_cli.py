"""Command lines that people already have, what --help says, and which files a script needs beside it."""
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import train_v2_ddp
from tests.helpers.trainer import ROOT

LAUNCH = """torchrun --nproc_per_node=8 train_v2_ddp.py --model_path bosonai/higgs-audio-v2-generation-3B-base
--audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer --train_data_file train.json --output_dir ./out
--save_steps 5000 --disable_evaluation --per_device_train_batch_size 2 --learning_rate 5e-5 --num_train_epochs 3
--logging_steps 50 --warmup_steps 500 --bf16 --use_lora"""
REQUIRED = ["--model_path", "model", "--audio_tokenizer_path", "codec", "--train_data_file", "train.json"]

# flags and defaults of the trainer whose launch lines must go on working
DEFAULTS = {
    "validation_split": 0.005, "task_type": "single_speaker_smart_voice", "ref_audio_in_system_message": False,
    "train_data_dir": None, "eval_data_dir": None, "eval_data_file": None, "num_train_epochs": 3,
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 1, "learning_rate": 5e-5, "warmup_steps": 100,
    "logging_steps": 10, "save_steps": 7000, "eval_steps": 5000, "bf16": False, "disable_eval": False,
    "enable_strategic_logging": False, "strategic_logging_steps": 100, "output_dir": "./output",
    "logging_dir": "./logs", "use_lora": False, "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.1, "seed": 42,
    "report_to": "tensorboard", "freeze_audio_tower": False, "freeze_audio_encoder_proj": False, "freeze_llm": False,
}
TASKS = ("zero_shot_voice_cloning", "single_speaker_smart_voice", "multi_speaker_smart_voice",
         "multi_speaker_voice_cloning")
SCRIPT_NAMES = re.compile(r"(train|make|generate|sample|create|evaluate)_\w+")     # what people start
SHARED = {"packing", "parallel", "optim", "checkpoint", "tensor_files", "watchdog", "metrics",
          "memory", "plan", "recomputation", "float8"}       # what all trainers share


def parse(*flags):
    return train_v2_ddp.build_parser().parse_args([*REQUIRED, *flags])


def test_known_launch_line_parses():
    words = shlex.split(LAUNCH)
    flags = words[words.index("train_v2_ddp.py") + 1:]
    expected = {
        **DEFAULTS, "model_path": "bosonai/higgs-audio-v2-generation-3B-base",
        "audio_tokenizer_path": "bosonai/higgs-audio-v2-tokenizer", "train_data_file": "train.json",
        "output_dir": "./out", "save_steps": 5000, "disable_eval": True, "per_device_train_batch_size": 2,
        "learning_rate": 5e-5, "num_train_epochs": 3, "logging_steps": 50, "warmup_steps": 500, "bf16": True,
        "use_lora": True}
    for spelling in ("--disable_evaluation", "--disable_eval"):
        line = [spelling if word == "--disable_evaluation" else word for word in flags]
        args = train_v2_ddp.build_parser().parse_args(line)
        assert {name: getattr(args, name) for name in expected} == expected
        train_v2_ddp.check_flags(args, world_size=8)        # no combination in it is refused


def test_defaults_of_known_flags():
    args = parse()
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS
    for task in TASKS:
        assert parse("--task_type", task).task_type == task
    for target in ("tensorboard", "wandb", "none"):
        assert parse("--report_to", target).report_to == target
    assert parse("--wandb_project", "voices").wandb_project == "voices"


@pytest.mark.parametrize("flags", [["--fp16"], ["--learn", "1e-4"], ["--save_step", "5"], ["--use_lora", "False"],
                                   ["--task_type", "singing"], ["--lr_scheduler", "step"]])
def test_refused_flags(flags, capsys):
    """Half precision without loss scaling, abbreviations (they change meaning with each new flag), unknown values."""
    with pytest.raises(SystemExit) as stopped:
        parse(*flags)
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err or flags[-1] == "False"


@pytest.mark.parametrize("flags, part", [
    (["--train_data_dir", "folder"], "give one of --train_data_file and --train_data_dir"),
    (["--global_batch_size", "12", "--per_device_train_batch_size", "8"], "is not a multiple of 8"),
    (["--global_batch_size", "8", "--gradient_accumulation_steps", "2"], "give one of --global_batch_size and"),
    (["--max_tokens_per_batch", "100", "--group_by_length"], "--group_by_length does nothing"),
    (["--disable_eval", "--eval_data_file", "x.json"], "exclude each other"),
    (["--logging_steps", "0"], "--logging_steps is 0"),
    (["--learning_rate", "-1"], "--learning_rate is -1"),
    (["--lora_dropout", "1.5"], "at least 0 and below 1"),
    (["--use_lora", "--freeze_llm"], "drop --freeze_llm"),
    (["--gradient_checkpointing", "selective", "--compile"], "selective does not go with --compile"),
])
def test_combinations_that_make_no_sense(flags, part):
    with pytest.raises(train_v2_ddp.UserError, match=re.escape(part)):
        train_v2_ddp.check_flags(parse(*flags), world_size=1)


def test_global_batch_size_counts_ranks():
    args = parse("--global_batch_size", "64", "--per_device_train_batch_size", "2")
    train_v2_ddp.check_flags(args, world_size=8)
    assert args.gradient_accumulation_steps == 4


def test_every_flag_is_explained():
    for action in train_v2_ddp.build_parser()._actions:
        assert action.help and len(action.help) > 8, f"{action.option_strings} has no help text"


# ---------------------------------------------------------------------------------------------------------------------
# Which file needs which

FILES = {path.stem: ast.parse(path.read_text()) for path in ROOT.glob("*.py")}


def local_imports(name):
    """Names of our files that a file imports itself, wherever in it."""
    found = set()
    for node in ast.walk(FILES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found & FILES.keys() - {name}


def named_files(name):
    """Names of our files in a file's docstring, from the words on that say what to copy with it."""
    text = ast.get_docstring(FILES[name])
    start = re.search(r"copy", text, re.IGNORECASE)
    return set(re.findall(r"\b(\w+)\.py\b", text[start.start():])) - {name} if start else set()


def closure(name, step):
    """All names that lead on from a name by `step`, itself excluded."""
    found, todo = set(), [name]
    while todo:
        new = step(todo.pop()) - found
        found |= new
        todo += new
    return found - {name}


def test_docstring_of_the_script_names_what_to_copy():
    assert named_files("train_v2_ddp") == closure("train_v2_ddp", local_imports)


@pytest.mark.parametrize("name", sorted(FILES))
def test_docstring_names_what_to_copy(name):
    """Directly, or through the files it names; a module may name one that its callers get along with it."""
    assert closure(name, named_files) >= closure(name, local_imports)


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_run_one_way(name):
    imports = local_imports(name)
    assert not [other for other in imports if SCRIPT_NAMES.fullmatch(other)], "no file imports a script"
    if name in SHARED:
        assert imports <= SHARED, "a shared module imports shared modules only"


@pytest.mark.timeout(120)
def test_copied_files_work_alone(tmp_path):
    """Exactly the files that the docstring names, in an empty folder: --help imports every one of them."""
    for name in {"train_v2_ddp", *named_files("train_v2_ddp")}:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "train_v2_ddp.py", "--help"], cwd=tmp_path, text=True, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    shown = set(re.findall(r"--[\w-]+", done.stdout))
    assert shown >= {option for action in train_v2_ddp.build_parser()._actions for option in action.option_strings
                     if option.startswith("--")}
    assert "Fine-tune Higgs-Audio V2" in done.stdout and not done.stderr
