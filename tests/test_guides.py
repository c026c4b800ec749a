"""The commands of README and the guides run page by page, in order, with tiny models, on one rank.

Tiny models replace the names of the Hub. A run takes two steps. A launcher only prints its command. A command that
needs a missing package is only parsed. Other files test the demos.
"""
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
from collections import namedtuple
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile

from diffusion import make_problems
from speech import make_tiny
from tests.helpers import chats, tiny_teacher
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT, script_flags
from tests.launch.test_launchers import environment
from tests.test_docs import TEXTS, fences

LABELS = ("en", "fr", "de")
SPEECH = "python train_v2_ddp.py --model_path BASE --audio_tokenizer_path CODEC --train_data_file train.json"
SPEAK = "python speech/generate_tts.py --model_path BASE --audio_tokenizer_path CODEC --prompts lines.txt"
BLOCK = "python diffusion/train_bd3lm.py --tokenizer . --model_size nano --problems_per_batch 4 --max_length 96"
BEFORE = {      # {page: commands that make the files it names}
    "docs/speaking.md": [f"{SPEECH} --use_lora --output_dir out", f"{SPEECH} --output_dir full",
                         f"{SPEAK} --output_dir samples",
                         *(f"cp -r samples samples_{name}" for name in ("base", "trained"))],
    "docs/reliability.md": [f"{SPEECH} --output_dir out", "cp -r out out_a", "cp -r out out_b"],
    "docs/diffusion.md": [
        f"{BLOCK} --train_data_file train.jsonl --output_dir outputs/gsm8k_h200",
        "python diffusion/train_bd3lm.py --system chat --init_from STUDENT --train_data_file held_out.jsonl "
        "--problems_per_batch 2 --block_size 4 --output_dir outputs/chat_h200"]}
CHATS = "python distill/train_sft.py --model_path STUDENT --train_data_file labels.jsonl --output_dir out"
FIRST = {"--labels": CHATS}     # {flag: command that runs before a command with the flag}
SWAPS = {"bosonai/higgs-audio-v2-generation-3B-base": "BASE", "bosonai/higgs-audio-v2-tokenizer": "CODEC",
         "bosonai/higgs-tts-3-4b": "TTS3", "Qwen/Qwen3-4B-Instruct-2507": "STUDENT",
         "takes/best.jsonl": "train.json",      # no take of an untrained voice is good
         "Qwen/Qwen3-30B-A3B-Instruct-2507": "LARGER", "openai/whisper-small": "pocketsphinx", "NAME": "teacher",
         "8192": "1024"}        # tokens of a pack
SHORT = {       # {script: flags that are added to a command}
    "train_v2_ddp.py": "--max_steps 2 --num_workers 0 --report_to none",
    "distill/train_sft.py": "--max_steps 2 --num_workers 0 --report_to none --validation_split 0.2 --group_size 1",
    "diffusion/train_bd3lm.py": "--max_steps 2 --num_workers 0 --report_to none --eval_repeats 1",
    "speech/generate_tts.py": "--max_seconds 0.2", "speech/pick_checkpoint.py": "--max_seconds 0.2",
    "diffusion/sample_bd3lm.py": "--limit 2"}
GATES = {"--check_fell", "--min_closed"}        # exit status 1: after two steps nothing is learnt
# {flag or value: package that it needs, or files that only the Hub has}
ABSENT = {"--tasks": "lm_eval", "--mos": "speechmos", "--max_model_len": "vllm", "--speaker_model": "a_listener",
          "--asr_model": "pocketsphinx", "sdar": "a_tokenizer_of_Qwen3"}

REST = "--model_path BASE --audio_tokenizer_path CODEC --train_data_file train.json --output_dir fresh"  # for "..."
DEMOS = {"demo", "distill_demo", "setup", "test", "slurm"}      # other files test these launchers
Command = namedtuple("Command", "page settings words text")     # words: without the settings {NAME: value} before them


def split_command(text):
    words, settings = shlex.split(text, comments=True), {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        name, _, settings[name] = words.pop(0).partition("=")
    return settings, words


def block_commands():
    """Commands of all bash blocks, and commands after a $ in other blocks, with the block's variables filled in."""
    commands = []
    for page, text in TEXTS.items():
        for language, _, lines in fences(text):
            if language != "bash":
                lines = [line[2:] if line.startswith("$ ") else "" for line in lines]
            variables = {}
            for command in re.split(r"(?<!\\)\n", "\n".join(lines)):
                filled = string.Template(command.replace("\\\n", " ")).safe_substitute(variables)
                settings, words = split_command(filled)
                if words:
                    commands.append(Command(page, settings, words, filled))
                else:
                    variables |= settings
    return commands


def script_of(words):
    index = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    starts = index and (words[0] == "torchrun" or words[0] == "python" and index == 1)
    return (words[index], words[index + 1:]) if starts else None


def parse(script, flags):
    try:
        script_flags(script)[0].parse_args(flags)
    except SystemExit as left:
        raise AssertionError(f"{script} refuses {shlex.join(flags)}") from left


def check_launcher(command, workspace):
    """A launcher reads each setting, and the scripts of its printed command accept their flags."""
    launcher = next(word for word in command.words if word.endswith(".sh"))
    read = "".join(path.read_text() for path in (ROOT / "launch").glob("*.sh"))
    for name in command.settings:
        assert re.search(rf"\$\{{?!?{name}\b|\bsetting {name}\b", read), f"{command.text}: nothing reads {name}"
    if Path(launcher).stem in DEMOS:
        return
    arguments = command.words[command.words.index(launcher) + 1:]
    arguments = [new for word in arguments for new in (REST.split() if word == "..." else [
        "fresh" if word == "labels.jsonl" and "create" in launcher else word])]
    more = {"HF_HUB_OFFLINE": "1", "DRY_RUN": "1"} | ({"GPUS": "8"} if "create" in launcher else {})
    done = subprocess.run(["bash", launcher, *arguments], cwd=workspace, text=True, capture_output=True,
                          timeout=PATIENCE_S, env=environment(**command.settings | more))
    assert done.returncode == 0, f"{command.text}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
    starts = [(words, index) for words in map(shlex.split, done.stdout.splitlines())
              for index, word in enumerate(words) if word.startswith(f"{ROOT}/") and word.endswith(".py")]
    assert starts, f"{command.text} starts no script of this repository\n{done.stdout}"
    for words, index in starts:
        parse(str(Path(words[index]).relative_to(ROOT)), words[index + 1:])


def write_speech(path, pitch, seconds=1):
    t = np.arange(24000 * seconds) / 24000
    wave = sum(np.sin(2 * np.pi * pitch * k * t) / k for k in range(1, 20)) * (0.1 + 0.05 * np.sin(2 * np.pi * 3 * t))
    soundfile.write(path, wave.astype(np.float32), 24000)


@pytest.fixture(scope="module")
def files(tiny, tmp_path_factory):
    """A folder with links to the repository's files, and tiny versions of all files that the guides name."""
    tmp_path = tmp_path_factory.mktemp("files")
    for source in (*(ROOT / name for name in ("launch", "speech", "diffusion", "distill", "core")), *ROOT.glob("*.py")):
        (tmp_path / source.name).symlink_to(source)
    tiny.codes.mkdir(exist_ok=True)
    for name, target in (("BASE", tiny.model), ("CODEC", tiny.codec), ("codes", tiny.codes)):
        (tmp_path / name).symlink_to(target)
    text = tiny.train_json.read_text().replace('"audio_url": "', f'"audio_url": "{tiny.root}/')
    (tmp_path / "train.json").write_text(text)
    (tmp_path / "recordings").mkdir()
    write_speech(tmp_path / "recordings" / "talk.wav", 200, seconds=8)
    (tmp_path / "recordings" / "talk.srt").write_text("".join(
        f"{i + 1}\n00:00:0{i},000 --> 00:00:0{i + 1},000\nGood day number {i}.\n\n" for i in range(8)))
    chats.write(tmp_path / "labels.jsonl", chats.conversations(24))
    make_tiny.main([str(tmp_path / "higgs3"), "--clips", "2", "--speakers", "1", "--higgs3"])
    (tmp_path / "TTS3").symlink_to(tmp_path / "higgs3" / "model")
    make_problems.write_demo(tmp_path, 12, 4)
    write_speech(tmp_path / "me.wav", 200, seconds=2)
    (tmp_path / "train.csv").write_text("audio,text\n" + "".join(
        f"{tiny.root}/{sample['messages'][-1]['content'][-1]['audio_url']},Good day number {number}.\n"
        for number, sample in enumerate(tiny.samples()[:8])))
    (tmp_path / "prompts.json").write_text(json.dumps(json.loads((tmp_path / "train.json").read_text())[:2]))
    (tmp_path / "lines.txt").write_text("en Good day.\nfr Bonjour.\n")
    for name, layers in (("STUDENT", 2), ("LARGER", 3)):        # for long prompts
        chats.student(tmp_path / name, num_hidden_layers=layers, max_position_embeddings=8192)
    tiny_teacher.save(tmp_path / "TEACHER")
    config = json.loads((tmp_path / "TEACHER" / "config.json").read_text())     # for a long prompt
    (tmp_path / "TEACHER" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    (tmp_path / "system.txt").write_text("Speak like a pirate.")
    questions = [[{"role": "user", "content": f"{label} {i}"}] for i in range(12) for label in LABELS]
    chats.write(tmp_path / "chats.jsonl", questions)
    chats.write(tmp_path / "unseen.jsonl", chats.conversations(5))
    (tmp_path / "truth.jsonl").write_text("".join(f'{{"id": {i}, "label": "en"}}\n' for i in range(len(questions))))
    chats.write(tmp_path / "held_out.jsonl", chats.conversations(12))
    return tmp_path


@pytest.fixture
def workspace(files, tmp_path):
    return shutil.copytree(files, tmp_path, symlinks=True, dirs_exist_ok=True)


def filled(words, workspace, url):
    script, flags = script_of(words)
    flags = [SWAPS.get(flag, flag).replace("http://localhost:8000/v1", url) for flag in flags]
    flags = [str(max((workspace / flag).parent.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2])))
             if "checkpoint-" in flag else flag for flag in flags]
    flags += SHORT.get(script, "").split() + ["--sample_seconds", "0.2"] * ("--sample_prompts" in flags)
    flags += ["--best_of", "2"] * ("--best_of" in flags)
    if script == "train_v2_ddp.py" and "prepared" not in flags:
        flags += ["--code_cache", "codes"]      # clips are encoded once
    if script == "distill/create_data.py" and "--base_url" not in flags:
        flags += ["--engine", "transformers", "--max_tokens", "40"]
    return script, flags


BLOCKS = block_commands()
PAGES = [page for page in TEXTS if any(command.page == page for command in BLOCKS)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(page, workspace, quick_python):
    server = subprocess.Popen([sys.executable, ROOT / "tests/helpers/label_server.py", workspace / "requests.jsonl"],
                              stdout=subprocess.PIPE, text=True)
    url = f"http://localhost:{int(server.stdout.readline())}/v1"
    try:
        texts = [text for command in BLOCKS if command.page == page
                 for text in (*(more for flag, more in FIRST.items() if flag in command.words), command.text)]
        for settings, words in (split_command(text) for text in (*BEFORE.get(page, ()), *texts)):
            if words[0] in ("bash", "sbatch"):
                check_launcher(Command(page, settings, words, shlex.join(words)), workspace)
                continue
            if words[0] in ("whisper", "mkdir"):        # whisper is another package; test_house.py makes the copies
                continue
            if words[0] == "cp":
                shutil.copytree(workspace / words[2], workspace / words[3], symlinks=True)
                continue
            assert script_of(words), f"{page}: no rule covers {words}"
            if any(flag in words and not find_spec(package) for flag, package in ABSENT.items()):
                parse(*script_of(words))
                continue
            script, flags = filled(words, workspace, url)
            for flag, target in zip(flags, flags[1:]):      # no command continues the output of another
                if flag in ("--output_dir", "--output_file", "--output") and (path := workspace / target).exists():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            done = subprocess.run([quick_python, script, *flags], cwd=workspace, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, timeout=PATIENCE_S,
                                  env={**os.environ, "PYTHON_EXEC": quick_python})     # for child processes
            print(done.returncode, shlex.join([script, *flags]))
            assert done.returncode in ((0, 1) if GATES & {*flags} else (0,)) and "Traceback" not in done.stdout, (
                f"{shlex.join([script, *flags])}\n{done.stdout[-3000:]}")
            if script == "speech/prepare_tts.py":
                assert "encoding audio" in done.stdout, done.stdout
            if "train" in script and "--dry_run" not in flags:
                assert done.stdout.startswith("device     1 x "), done.stdout
    finally:
        server.kill()
        server.wait()
