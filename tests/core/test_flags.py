"""Command lines of existing users: flags, defaults, error messages."""
import argparse
import json
import re
import signal
import subprocess
import sys

import pytest
import torch

from core import cli, run
from tests.helpers.trainer import ROOT, script_flags

REQUIRED = ["--train_data_file", "train.json", "--model_path", "model", "--audio_tokenizer_path", "codec"]

# defaults of the older trainer whose command lines must still work, without those that now follow the run's length
DEFAULTS = {
    "validation_split": None, "task_type": "single_speaker_smart_voice", "num_train_epochs": 3, "logging_steps": 10,
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 1, "learning_rate": 5e-5, "bf16": False,
    "output_dir": "./output", "logging_dir": "./logs", "use_lora": False, "lora_rank": 16, "lora_alpha": 32, "seed": 42,
    "report_to": ["tensorboard"], "freeze_llm": False, "compile": "auto"}


def parse(*words):
    return cli.parse(script_flags()[0], None, [*REQUIRED, *words])


def test_defaults():
    assert DEFAULTS.items() <= vars(parse()).items()


@pytest.mark.parametrize("words, message", [
    (["--learn", "1e-4"], "unrecognized arguments: --learn 1e-4"),
    (["--gradient_checkpointing", "selective"], "--gradient_checkpointing: invalid choice: 'selective'"),
    (["--use_lora", "maybe"], "--use_lora: invalid choice: 'maybe'"),
    (["--config"], "--config: expected one argument"), (["--learning_rate=-1e-5"], "--learning_rate is -1e-05")])
def test_refused_flags_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and not printed.out
    assert printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1


def test_names_that_hugging_face_users_know():
    args = parse(*"--model_name_or_path other --lora_r 8 --lr_scheduler_type constant_with_warmup --disable_evaluation "
                 "--bf16 false --tf32 True --resume_from_checkpoint true".split())
    assert (args.model_path, args.lora_rank, args.lr_scheduler, args.disable_eval) == ("other", 8, "constant", True)
    assert (args.bf16, args.tf32, args.resume) == (False, True, "auto")
    assert parse("--resume_from_checkpoint", "out/checkpoint-5").resume == "out/checkpoint-5"


@pytest.mark.parametrize("words, message", [
    (["--train_data_dir", "folder"], "give --train_data_file or --train_data_dir"),
    (["--keep", "x"], "--keep needs --use_lora"),
    (["--global_batch_size", "8", "--gradient_accumulation_steps", "2"], "give one of --global_batch_size and"),
    (["--deepspeed", "zero2"], "--parallel zero2: there are ddp, fsdp, hsdp"),
    (["--parallel", "hsdp:3"], "1 rank cannot be cut into groups of 3"),
    (["--parallel", "hsdp:0"], "--parallel hsdp:0: there are ddp, fsdp, hsdp"),
    (["--bf16", "--fp16"], "give --bf16 or --fp16, not both"),
    (["--fp16", "--parallel", "fsdp"], "--fp16 needs --parallel ddp"),
    (["--float8", "--bf16", "--compile"], "--float8 needs --compile, --use_lora, --bf16 and --parallel ddp")])
def test_conflicting_flags_are_refused(words, message):
    with pytest.raises(cli.UserError, match=re.escape(message)):
        script_flags()[1](parse(*words), world_size=1)


def configured(tmp_path, text, *words):
    (tmp_path := tmp_path / "lr=3e-4").mkdir(exist_ok=True)     # "=" may be in a path
    (tmp_path / "run.yaml").write_text(text)
    return cli.parse(*script_flags(), ["--config", str(tmp_path / "run.yaml"), *words])


def test_the_command_line_overrides_the_file_of_flags(tmp_path):
    args = configured(tmp_path, """
        model_path: model       # a remark
        audio_tokenizer_path: "co dec"
        train_data_file: 007
        learning_rate: 5e-5
        bf16: true
        reshard_after_forward: false
        parallel: fsdp
        normalize_text: on
        report_to: [tensorboard, none]
        drop_bad: []
        output_dir: -odd
        code_cache: null
        """, "--learning_rate", "1e-3", "--report_to", "none")
    assert (args.model_path, args.audio_tokenizer_path, args.train_data_file) == ("model", "co dec", ["007"])
    assert args.learning_rate == 1e-3 and args.bf16 and not args.reshard_after_forward and args.output_dir == "-odd"
    assert args.normalize_text == "on" and args.report_to == [] and "invalid" in args.drop_bad
    assert args.code_cache is None


@pytest.mark.parametrize("text, message", [
    ("bf16: on\nlerning_rate: 1", "run.yaml: lerning_rate: no such flag"), ("seed: [", "cannot be read as YAML"),
    ("seed: 1\nseed: 2", "seed is there twice"), ("- seed", "must be lines of flag: value"),
    ("seed: {a: 1}", "seed takes a value or a list")])
def test_a_bad_file_of_flags_is_one_line(tmp_path, text, message, capsys):
    with pytest.raises(SystemExit) as end:
        configured(tmp_path, text, *REQUIRED)
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and err.startswith("error: ") and err.count("\n") == 1


def test_only_a_dry_run_ends_at_once_on_other_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    parser = cli.Parser("Labels.")
    parser.switch("--dry_run", "of a labelling script")
    assert cli.parse(parser, None, []).dry_run is False
    with pytest.raises(SystemExit):
        cli.parse(*script_flags(), [*REQUIRED, "--dry_run"])


def test_the_file_that_a_run_leaves_repeats_it(tmp_path):
    """The file has no derived values: they would conflict with the flags that they come from."""
    words = ["--drop_bad", "too_long", "--gradient_checkpointing", "all", "--resume", "none", "--parallel",
             "fsdp", "--no-reshard_after_forward", "--global_batch_size", "8", "--logging_dir", "a: #b 'c' \"d\" ö"]
    args = cli.parse(*script_flags(), [*REQUIRED, *words])
    again = configured(tmp_path, cli.config_text(args, "train_v2_ddp.py"))
    assert json.loads(json.dumps(vars(again) | {"config": None})) == json.loads(json.dumps(vars(args)))     # lists


def set_intervals(total, before=None, validates=True, **flags):
    args = argparse.Namespace(**dict.fromkeys(("save_steps", "eval_steps", "warmup_steps")) | flags, ranks=1, use_lora=False,
                              gradient_accumulation_steps=1, learning_rate=1.0)
    lines = run.schedule_lines(args, torch.nn.Linear(1, 1), total, 1, 0, None, {"args": before or {}}, validates)
    return args, [line for line in lines if line.startswith("intervals")]


@pytest.mark.parametrize("total, wanted", [(525, (52, 105, 26)), (1, (1, 1, 0))])
def test_a_run_saves_and_validates_by_its_length(total, wanted):
    args, lines = set_intervals(total)
    assert (args.save_steps, args.eval_steps, args.warmup_steps) == wanted
    saves, evals = (cli.plural(steps, "step") for steps in wanted[:2])
    assert lines == [f"intervals  checkpoints every {saves}; validation every {evals}"]
    again, _ = set_intervals(2 * total, vars(args), eval_steps=7)     # a resumed run keeps the first run's intervals
    assert (again.save_steps, again.eval_steps, again.warmup_steps) == (wanted[0], 7, wanted[2])


TRAINERS = ("train_v2_ddp.py", "distill/train_sft.py", "diffusion/train_bd3lm.py")
# speak.py runs alone; convert.py is a module first; diffusion/evaluate.py shares the flags of the sampler
MODULES = "core/cli.py", "speech/speak.py", "speech/convert.py", "diffusion/evaluate.py"
SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.py"), *ROOT.glob("[cds]*/*.py")]
                 if str(path.relative_to(ROOT)) not in MODULES and "cli.parse(" in path.read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_mistakes_come_before_torch(script):
    """--help says no default twice, and like a mistake imports neither torch nor transformers."""
    watch = ("import runpy, sys\nscript, *asked = sys.argv[1:]\nsys.path[0] = '.'\nfor words in asked, ['--learn']:\n"
             "    sys.argv = [script, *words]\n    try:\n        runpy.run_path(script, run_name='__main__')\n"
             "    except SystemExit as left:\n"
             "        print(left.code or 0, sorted({'torch', 'transformers'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", watch, script, "--help", *["all"] * (script in TRAINERS)], cwd=ROOT,
                          text=True, capture_output=True)
    assert done.stdout.endswith("\n0 []\n2 []\n"), done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done
    text = " ".join(done.stdout.split())
    assert not re.search(r"\(default: (None|\[|[^)]*\) \(default)", text)


def test_ctrl_c_is_one_line():
    """Ctrl-C works during the imports after the flags, and later."""
    code = ("import time\nfrom core import cli\ncli.parse(cli.Parser('x'))\n"
            "print('here', flush=True)\ntime.sleep(99)")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as script:
        assert script.stdout.readline() == "here\n"
        script.send_signal(signal.SIGINT)
        assert script.stderr.read() == "interrupted\n" and script.wait() == -signal.SIGINT


def test_packages_that_record_the_command_line_see_no_password(monkeypatch):
    parser = cli.Parser("x")
    parser.add_argument("--base_url")
    monkeypatch.setattr(sys, "argv", ["x", "--base_url", "http://anna:secret@h/v1"])
    assert cli.parse(parser).base_url == "http://anna:secret@h/v1"
    assert sys.argv == ["x", "--base_url", "http://***@h/v1"]
