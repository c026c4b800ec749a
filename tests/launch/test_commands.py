"""Commands from the notes of users, word for word, with tiny paths or DRY_RUN=1."""
import json
import os
import re
import shlex
import subprocess

import pytest

from core import cli
from distill import create_data
from tests.helpers.block_runs import train_bd3lm
from tests.helpers.progress import PATIENCE_S
from tests.helpers.students import train_sft
from tests.helpers.trainer import ROOT, script_flags
from tests.launch.test_launchers import environment, launch, printed_command, shell

TRAIN_V2 = """torchrun --nproc_per_node=8 trainer/train_v2_ddp.py --model_path bosonai/higgs-audio-v2-generation-3B-base
--audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer
--train_data_file ../../higgs-audio/training_data/chatml/train_chatml_samples.json --output_dir ./output_expmt_v1
--save_steps 5000 --disable_evaluation --per_device_train_batch_size 2 --learning_rate 5e-5 --num_train_epochs 3
--logging_steps 50 --warmup_steps 500 --bf16 --use_lora"""
MS_SWIFT = """--deepspeed default-zero3 --bf16 true --gradient_checkpointing true --optim adamw_torch_fused
--dataloader_num_workers 32 --dataloader_pin_memory true --preprocess_num_proc 32 --lora_target_modules ALL
--lora_rank 16 --lora_alpha 64 --report_to tensorboard --logging_steps 5"""
TTS_DATA = "../../higgs-audio/training_data/chatml/train_chatml_samples.json"
NCCL = """export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb=128,expandable_segments=True
export CUDA_DEVICE_MAX_CONNECTIONS=1"""


@pytest.fixture
def tree(tmp_path):
    """Working folder of the speech commands: trainer links to the repository, data lies two folders up."""
    folder, data = tmp_path / "work" / "here", tmp_path / "higgs-audio" / "training_data" / "chatml"
    folder.mkdir(parents=True)
    data.mkdir(parents=True)
    (folder / "trainer").symlink_to(ROOT)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "train").symlink_to(ROOT / "launch")
    (data / "train_chatml_samples.json").write_text("[]")
    return folder


@pytest.mark.slow
@pytest.mark.race
def test_the_trainers_launch_line(tiny, tree, quick):
    """Line 1 with tiny models, on 2 ranks."""
    entries = tiny.samples()[:4]
    for entry in entries:
        for message in entry["messages"]:
            for item in message["content"] if isinstance(message["content"], list) else ():
                if item["type"] == "audio":
                    item["audio_url"] = str(tiny.root / item["audio_url"])
    (tree / "../../higgs-audio/training_data/chatml/train_chatml_samples.json").write_text(json.dumps(entries))
    line = TRAIN_V2.replace("=8", "=2").replace("bosonai/higgs-audio-v2-generation-3B-base", str(tiny.model)).replace(
        "bosonai/higgs-audio-v2-tokenizer", str(tiny.codec))
    words = ["torchrun", "--standalone", *shlex.split(line)[1:]]
    done = subprocess.run([*words, "--code_cache", str(tiny.codes)], cwd=tree, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=PATIENCE_S, env=environment(**quick))
    assert done.returncode == 0, done.stdout[-3000:]
    assert "done       step 3; " in done.stdout and (tree / "output_expmt_v1" / "checkpoint-3").is_dir()
    assert "learning_rate: 5e-05\n" in (tree / "output_expmt_v1" / "run.yaml").read_text()


def flags_except(line, *names):
    """[parsed flags of TRAIN_V2, parsed flags of a printed command], without the named flags."""
    parsed = [vars(script_flags()[0].parse_args(words)) for words in (shlex.split(TRAIN_V2)[3:], line)]
    return [{name: value for name, value in args.items() if name not in names} for args in parsed]


def test_train_tts_with_its_data_alone(tree, script="trainer/launch/train_tts.sh"):
    """Line 2: the settings of the launch line; the trainer chooses batch, saving, logging, validation and warm-up."""
    def run(*flags, **settings):
        return printed_command(subprocess.run(["bash", script, *flags], cwd=tree, text=True, capture_output=True,
                                              env=environment(DRY_RUN="1", **settings)))
    words, line = run(TRAIN_DATA=TTS_DATA)
    expected, actual = flags_except(line, "per_device_train_batch_size", "save_steps", "disable_eval", "warmup_steps",
                                    "logging_steps", "auto")
    assert actual == expected and str(ROOT / "train_v2_ddp.py") in words
    assert "--save_steps" not in line and "--warmup_steps" not in line
    flags = shlex.split(TRAIN_V2)[3:]           # the launcher passes on all flags of the launch line
    _, line = run(*flags)
    expected, actual = flags_except(line, "auto")
    assert actual == expected and line[-len(flags):] == flags


def test_train_tts_settings(tmp_path):
    (tmp_path / "clips").mkdir()
    _, line = printed_command(launch("train_tts.sh", cwd=tmp_path, DRY_RUN="1", TRAIN_DATA="clips", LORA="0", LR="1e-4",
                                     BATCH_SIZE="3", GRAD_ACCUM="2", WARMUP_STEPS="7", SAVE_STEPS="9", MODEL="m",
                                     SWITCHES="", OUTPUT_DIR="a b"))
    args = script_flags()[0].parse_args(line)
    assert (args.train_data_dir, args.parallel, args.use_lora, args.bf16) == (["clips"], "fsdp", False, False)
    assert (args.learning_rate, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (1e-4, 3, 2)
    assert (args.warmup_steps, args.save_steps, args.model_path, args.output_dir) == (7, 9, "m", "a b")


@pytest.mark.parametrize("settings, args, message", [
    ({"BATCHSIZE": "3"}, [], "BATCHSIZE is not a setting of this launcher; it has .*BATCH_SIZE"),
    ({"LR": "1"}, ["--learning_rate=2"], "LR is set and --learning_rate is given: leave one of them out"),
    ({"LORA": "yes"}, [], "LORA=yes: 1 or 0")])
def test_wrong_settings_of_a_launcher_are_refused(settings, args, message):
    done = launch("train_tts_h200x8.sh", *args, DRY_RUN="1", MIN_GPUS="0", **settings)
    assert done.returncode == 1 and re.search(f"^train_tts_h200x8: error: {message}", done.stderr.splitlines()[-1])


def test_the_flags_of_ms_swift(monkeypatch):
    """Line 3: train_tts_h200x8.sh takes these flags; BATCH_SIZE=4 keeps 256 samples a step: 4 x 8 GPUs x 8."""
    done = launch("train_tts_h200x8.sh", *shlex.split(MS_SWIFT), DRY_RUN="1", MIN_GPUS="0", NPROC_PER_NODE="8",
                  SLURM_CPUS_PER_TASK="128", TRAIN_DATA=__file__, BATCH_SIZE="4")
    monkeypatch.setattr(cli, "CPUS", 128)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    args = cli.parse(script_flags()[0], lambda args, _: script_flags()[1](args, world_size=8), printed_command(done)[1])
    assert args.named >= {"parallel", "gradient_checkpointing"} and args.auto       # --auto does not change named flags
    assert (args.parallel, args.bf16, args.gradient_checkpointing, args.optim) == ("fsdp", True, "all",
                                                                                   "adamw_torch_fused")
    assert (args.num_workers, args.preprocess_num_proc) == (32, 32)
    assert (args.use_lora, args.lora_target_modules, args.lora_rank, args.lora_alpha) == (True, "all-linear", 16, 64)
    assert (args.report_to, args.logging_steps, args.gradient_accumulation_steps) == (["tensorboard"], 5, 8)
    done = launch("train_tts_h200x8.sh", "--gradient_accumulation_steps", "4", DRY_RUN="1", MIN_GPUS="0",
                  TRAIN_DATA=__file__)
    assert "--global_batch_size" not in printed_command(done)[1]


def test_settings_of_the_shell_win(monkeypatch):
    """Line 4: settings of the shell stay; torch's allocator needs a colon where the note has an equals sign."""
    text = f'{NCCL}\nsource "{ROOT}/launch/env.sh"\necho "$TORCH_NCCL_ASYNC_ERROR_HANDLING ' \
           '$CUDA_DEVICE_MAX_CONNECTIONS ${PYTORCH_ALLOC_CONF-none} $PYTORCH_CUDA_ALLOC_CONF"'
    done = subprocess.run(["bash", "-euc", text], text=True, capture_output=True, env=environment())
    assert done.stdout == "1 1 none max_split_size_mb=128,expandable_segments=True\n"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb=128,expandable_segments=True")
    cli.parse(cli.Parser(""), None, [])
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128,expandable_segments:True"


BD3LM = "train_gsm8k_bd3lm_h200.sh"


def bd3lm(*args, launcher=BD3LM, **settings):
    """(parsed flags of the trainer, messages) of a dry run of a block diffusion launcher."""
    done = launch(launcher, *args, DRY_RUN="1", MIN_GPUS="0", TEST_DATA="", **settings)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    return cli.parse(train_bd3lm.build_parser(),
                       lambda args, _: train_bd3lm.check_flags(args, int(settings.get("GPUS", 1))),
                       words[words.index(str(ROOT / "diffusion" / "train_bd3lm.py")) + 1:]), done.stderr


def test_block_diffusion_from_the_folder_in_the_notes(tree):
    """Line 5."""
    for launcher in (BD3LM, "train_hdp_diffusion_h200.sh"):
        done = subprocess.run(["bash", f"scripts/train/{launcher}"], cwd=tree, text=True, capture_output=True,
                              env=environment(DRY_RUN="1", MIN_GPUS="0", TRAIN_DATA=__file__))
        assert f" {ROOT}/diffusion/train_bd3lm.py --system " in done.stdout, done.stderr


@pytest.mark.parametrize("settings, wanted", [
    ({"PRESET": "aggressive"}, (192, 4, 6e-4, 0, 5000)),
    ({"INIT_FROM": "weights"}, (64, 2, 1e-4, 0, 100)), ({"INIT_FROM": "JetLM/SDAR-1.7B-Chat"}, (64, 1, 1e-5, 0, 35)),
    ({"BATCH_SIZE": "64", "GRAD_ACCUM": "8"}, (64, 8, 5e-4, 512, 5000)),
    ({"GLOBAL_BATCH_SIZE": "768", "LR": "1e-4"}, (128, 6, 1e-4, 0, 5000))], ids=str)
def test_batch_settings_of_block_diffusion(settings, wanted):
    """Line 6. --auto splits a step by memory; it changes nothing if BATCH_SIZE or GRAD_ACCUM is set."""
    auto = " --auto" if {"BATCH_SIZE", "GRAD_ACCUM"} & settings.keys() else ""
    args, _ = bd3lm(SWITCHES=f"--bf16{auto}", **settings)
    assert (args.problems_per_batch, args.gradient_accumulation_steps, args.learning_rate, args.scale_lr_from_batch,
            args.warmup_steps) == wanted
    assert {"problems_per_batch", "gradient_accumulation_steps"} <= args.named


def test_auto_leaves_the_split_of_a_step_to_the_trainer():
    for settings, problems, scaled in (({"GPUS": "3"}, 512, 0), ({"GLOBAL_BATCH_SIZE": "1024"}, 1024, 512)):
        args, _ = bd3lm(**settings)
        assert args.auto and args.per_device_train_batch_size is None
        assert (args.global_batch_size, args.scale_lr_from_batch) == (problems, scaled)


def test_overrides_of_block_diffusion(monkeypatch):
    """Line 7."""
    monkeypatch.setattr(cli, "CPUS", 64)
    args, messages = bd3lm("model.attn_backend=flash_attn", "trainer.precision=bf16-mixed",
                       "+model.gradient_checkpointing=true", "+trainer.compile=true", "loader.num_workers=16",
                       "--dropout", "0.2", SWITCHES="", SLURM_CPUS_PER_TASK="4")
    assert (args.attn_backend, args.bf16, args.gradient_checkpointing, args.compile) == ("flex", True, "all", True)
    assert args.num_workers == 16 and args.dropout == 0.2 and "attention has no block masks; using flex" in messages
    for precision, warns in (("16-mixed", True), ("bf16", False)):
        args, messages = bd3lm(f"trainer.precision={precision}", SWITCHES="")
        assert args.bf16 and ("16-mixed: float16 would need its losses scaled; using bfloat16" in messages) is warns


def test_student_trains_on_the_labels_of_the_teacher(tmp_path):
    """Lines 8 and 11: the default label file is the default training file; overrides with names of verl work."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prompt_distillation_lang.jsonl").write_text("{}")
    done = launch("train_sft_h100x8.sh", "./models/prompt_distillation", "data.micro_batch_size_per_gpu=8",
                  "model.fsdp_config.model_dtype=bf16", "+optim.lr=1e-5", cwd=tmp_path, DRY_RUN="1", NPROC_PER_NODE="8",
                  SWITCHES="")
    words = shlex.split(done.stdout)
    args = cli.parse(train_sft.build_parser(), lambda args, _: train_sft.check_flags(args, 8),
                       words[words.index(str(ROOT / "distill" / "train_sft.py")) + 1:])
    assert args.train_data_file == "./data/prompt_distillation_lang.jsonl"
    assert (args.output_dir, args.bf16, args.learning_rate) == ("./models/prompt_distillation", True, 1e-5)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 2)
    done = launch("train_sft_h100x8.sh", "out", "algorithm.x=1", cwd=tmp_path, DRY_RUN="1")
    assert done.returncode == 1 and "algorithm.x=1: not a known override" in done.stderr
    done = launch("create_data_h100x8.sh", cwd=tmp_path, DRY_RUN="1", GPUS="8")
    assert done.returncode == 1 and "INPUT is not set" in done.stderr


@pytest.mark.parametrize("more, settings, gpus", [
    ("", {}, ["0,1,2,3", "4,5,6,7"]),
    ("./data/prompt_distillation_lang.jsonl 8 --seed 3", {}, ["0,1,2,3,4,5,6,7"]),
    ("./data/prompt_distillation_lang.jsonl 2", {"PP": "2"}, ["0,1,2,3", "4,5,6,7"]),
    ("./data/prompt_distillation_lang.jsonl 2", {"GPUS": "2", "CUDA_VISIBLE_DEVICES": "5,7"}, ["5,7"])])
def test_teacher_labels_of_the_launcher(tmp_path, more, settings, gpus):
    """Line 8: the same files, N GPUs for each instance; a stub replaces python."""
    words = f"../tinker-cookbook/example-data/multilingual.txt {more}"
    (tmp_path / "here").mkdir()
    (tmp_path / "tinker-cookbook" / "example-data").mkdir(parents=True)
    (tmp_path / "tinker-cookbook" / "example-data" / "multilingual.txt").write_text("x\n")
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/checked\n')
    (tmp_path / "python").chmod(0o755)
    done = launch("create_data_h100x8.sh", *words.split(), cwd=tmp_path / "here", **{
        "DRY_RUN": "1", "GPUS": "8", "PATH": f"{tmp_path}:{os.environ['PATH']}", **settings})
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [line[0] for line in commands] == [f"CUDA_VISIBLE_DEVICES={numbers}" for numbers in gpus], done.stderr
    for i, line in enumerate(commands):
        args = create_data.build_parser().parse_args(line[3:])
        assert (args.input_file, args.output_file, args.shard) == (
            "../tinker-cookbook/example-data/multilingual.txt", "./data/prompt_distillation_lang.jsonl",
            f"{i}/{len(gpus)}")
        assert args.tensor_parallel_size * args.pipeline_parallel_size == len(gpus[i].split(","))
        assert (args.engine, args.model_name, args.seed) == (
            "vllm", "Qwen/Qwen3-30B-A3B-Instruct-2507", 3 if "seed" in more else 0)
    assert (tmp_path / "checked").read_text().endswith(" --dry_run\n")


def test_the_teacher_without_its_launcher(monkeypatch, tmp_path, capsys):
    """Lines 9 and 10, with vLLM (an empty package of that name) and without it."""
    def parsed(*words):
        return cli.parse(create_data.build_parser(), create_data.check_flags, list(words))
    line = "--tensor_parallel_size 4 --pipeline_parallel_size 2".split()
    with pytest.raises(SystemExit):
        parsed(*line)
    assert "--tensor_parallel_size is for the engine vllm, not transformers: there is no vLLM here, see launch/" in (
        capsys.readouterr().err)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    args = parsed(*line)
    assert (args.input_file, args.output_file, args.model_name, args.max_model_len) == (
        "../tinker-cookbook/example-data/multilingual.txt", "./data/prompt_distillation_lang.jsonl",
        "Qwen/Qwen3-30B-A3B-Instruct-2507", 0)
    args = parsed(*"--input_file part1.txt --output_file data/part1.jsonl --tensor_parallel_size 2".split())
    assert (args.input_file, args.tensor_parallel_size, args.model_name[:4]) == ("part1.txt", 2, "Qwen")
    with pytest.raises(SystemExit):
        parsed("--base_url", "http://localhost:1/v1")
    assert "--base_url needs --model_name" in capsys.readouterr().err


def test_a_config_file_replaces_the_defaults_of_a_launcher(tmp_path):
    """The launcher reads the output folder and the data from --config and adds no defaults."""
    (tmp_path / "d.json").write_text("[]")
    (tmp_path / "run.yaml").write_text('output_dir: "o u t"   # here\ntrain_data_file: d.json\n'
                                       "model_path: m\naudio_tokenizer_path: c\n")
    for launcher in ("train_tts.sh", "train_tts_h200x8.sh"):
        done = launch(launcher, "--config", "run.yaml", cwd=tmp_path, DRY_RUN="1", MIN_GPUS="0")
        assert printed_command(done)[1] == ["--config", "run.yaml"]
    done = launch("train_tts.sh", "--config=run.yaml", cwd=tmp_path, DRY_RUN="1", LR="1e-4")
    assert printed_command(done)[1] == ["--learning_rate", "1e-4", "--config=run.yaml"]
    text = 'flag_value --output_dir none --config run.yaml; flag_value --seed none --config run.yaml'
    assert shell(f'cd "{tmp_path}"; {text}').stdout == "o u t\nnone\n"
