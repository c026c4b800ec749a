"""The Python commands of README and the guides, run page by page in their order, on tiny models; on one rank.

A page's files lie under their names. Names of the Hub stand for tiny models, a run takes two steps, and a command
of a package that is not here is parsed alone. Launchers: test_docs.py.
"""
import json
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from diffusion import make_problems
from speech import make_tiny
from tests.helpers import chats, tiny_teacher
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT
from tests.test_docs import (     # noqa: F401 (a fixture)
    BLOCKS, TEXTS, parse, script_of, split_command, workshop, write_speech)

LABELS = ("en", "fr", "de")
SPEECH = "python train_v2_ddp.py --model_path BASE --audio_tokenizer_path CODEC --train_data_file train.json"
SPEAK = "python speech/generate_tts.py --model_path BASE --audio_tokenizer_path CODEC --prompts lines.txt"
BLOCK = "python diffusion/train_bd3lm.py --tokenizer . --model_size tiny --problems_per_batch 4 --max_length 96"
BEFORE = {      # {page: commands whose results it names}
    "docs/speaking.md": [f"{SPEECH} --use_lora --output_dir out", f"{SPEECH} --output_dir full",
                         *(f"{SPEAK} --output_dir {name}" for name in ("samples", "samples_base", "samples_trained"))],
    "docs/reliability.md": [f"{SPEECH} --output_dir {name}" for name in ("out", "out_a", "out_b")],
    "docs/diffusion.md": [
        f"{BLOCK} --train_data_file train.jsonl --output_dir outputs/gsm8k_h200",
        "python diffusion/train_bd3lm.py --system chat --init_from STUDENT --train_data_file held_out.jsonl "
        "--problems_per_batch 2 --block_size 4 --output_dir outputs/chat_h200"]}
CHATS = "python distill/train_sft.py --model_path STUDENT --train_data_file labels.jsonl --output_dir out"
FIRST = {"--labels": CHATS}     # {flag: a command before the one that has it}
SWAPS = {"bosonai/higgs-audio-v2-generation-3B-base": "BASE", "bosonai/higgs-audio-v2-tokenizer": "CODEC",
         "bosonai/higgs-tts-3-4b": "TTS3", "Qwen/Qwen3-4B-Instruct-2507": "STUDENT",
         "takes/best.jsonl": "train.json",      # no take of an untrained voice is good
         "Qwen/Qwen3-30B-A3B-Instruct-2507": "LARGER", "openai/whisper-small": "pocketsphinx", "NAME": "teacher"}
SHORT = {       # {script: flags that follow a command's own}
    "train_v2_ddp.py": "--max_steps 2 --num_workers 0 --report_to none",
    "distill/train_sft.py": "--max_steps 2 --num_workers 0 --report_to none --validation_split 0.2 --group_size 1",
    "diffusion/train_bd3lm.py": "--max_steps 2 --num_workers 0 --report_to none",
    "speech/generate_tts.py": "--max_seconds 1", "diffusion/sample_bd3lm.py": "--limit 2"}
GATES = {"--check_fell", "--min_closed"}        # exit status 1: after two steps nothing is learnt
# a flag or value that needs a package, or files that only the Hub has
ABSENT = {"--tasks": "lm_eval", "--mos": "speechmos", "--max_model_len": "vllm", "--speaker_model": "a_listener",
          "--asr_model": "pocketsphinx", "sdar": "a_tokenizer_of_Qwen3"}


@pytest.fixture
def place(workshop, tiny):      # noqa: F811
    """The workshop with everything that a guide names."""
    make_tiny.main([str(workshop / "higgs3"), "--clips", "2", "--speakers", "1", "--higgs3"])
    tiny.codes.mkdir(exist_ok=True)
    (workshop / "codes").symlink_to(tiny.codes)
    (workshop / "TTS3").symlink_to(workshop / "higgs3" / "model")
    make_problems.write_demo(workshop, 12, 4)
    write_speech(workshop / "me.wav", 200, seconds=2)
    (workshop / "train.csv").write_text("audio,text\n" + "".join(
        f"{tiny.root}/{sample['messages'][-1]['content'][-1]['audio_url']},Good day number {number}.\n"
        for number, sample in enumerate(tiny.samples()[:8])))
    (workshop / "prompts.json").write_text(json.dumps(json.loads((workshop / "train.json").read_text())[:2]))
    (workshop / "lines.txt").write_text("en Good day.\nfr Bonjour.\n")
    for name, layers in (("STUDENT", 2), ("LARGER", 3)):        # for long prompts
        chats.student(workshop / name, num_hidden_layers=layers, max_position_embeddings=8192)
    tiny_teacher.save(workshop / "TEACHER")
    config = json.loads((workshop / "TEACHER" / "config.json").read_text())     # for a long prompt
    (workshop / "TEACHER" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    (workshop / "system.txt").write_text("Speak like a pirate.")
    questions = [[{"role": "user", "content": f"{label} {i}"}] for i in range(12) for label in LABELS]
    chats.write(workshop / "chats.jsonl", questions)
    chats.write(workshop / "unseen.jsonl", chats.conversations(5))
    (workshop / "truth.jsonl").write_text("".join(f'{{"id": {i}, "label": "en"}}\n' for i in range(len(questions))))
    chats.write(workshop / "held_out.jsonl", chats.conversations(12))
    return workshop


def start_server(place):
    """(process, url) of a server of labels."""
    server = subprocess.Popen([sys.executable, ROOT / "tests/helpers/label_server.py", place / "requests.jsonl"],
                              stdout=subprocess.PIPE, text=True)
    return server, f"http://localhost:{int(server.stdout.readline())}/v1"


def filled(words, place, url):
    """A command's flags on tiny models: (script, flags)."""
    script, flags, _ = script_of(words)
    flags = [SWAPS.get(flag, flag).replace("http://localhost:8000/v1", url) for flag in flags]
    flags = [str(newest(place / flag)) if "checkpoint-" in flag else flag for flag in flags]
    flags += SHORT.get(script, "").split()
    if script == "train_v2_ddp.py" and "prepared" not in flags:
        flags += ["--code_cache", "codes"]      # clips are encoded once
    if script == "distill/create_data.py" and "--base_url" not in flags:
        flags += ["--engine", "transformers", "--max_tokens", "40"]
    return script, flags


def newest(path):
    return max(path.parent.glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))


PAGES = [page for page in TEXTS if any(script_of(command.words) for command in BLOCKS if command.page == page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(page, place, quick_python):
    server, url = start_server(place)
    try:
        texts = [text for command in BLOCKS if command.page == page
                 for text in (*(more for flag, more in FIRST.items() if flag in command.words), command.text)]
        for words in (split_command(text)[1] for text in (*BEFORE.get(page, ()), *texts)):
            if not script_of(words):
                continue
            if any(flag in words and not find_spec(package) for flag, package in ABSENT.items()):
                parse(*script_of(words)[:2])
                continue
            script, flags = filled(words, place, url)
            for flag, target in zip(flags, flags[1:]):      # each command is an example of its own
                if flag in ("--output_dir", "--output_file", "--output") and (place / target).exists():
                    shutil.rmtree(place / target) if (place / target).is_dir() else (place / target).unlink()
            done = subprocess.run([quick_python, script, *flags], cwd=place, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, timeout=PATIENCE_S)
            print(done.returncode, shlex.join([script, *flags]))
            assert done.returncode in ((0, 1) if GATES & {*flags} else (0,)) and "Traceback" not in done.stdout, (
                f"{shlex.join([script, *flags])}\n{done.stdout[-3000:]}")
            if script == "speech/prepare_tts.py":
                assert "x real time" in done.stdout, done.stdout
            if "train" in script and "--dry_run" not in flags:
                assert done.stdout.startswith("device     1 x "), done.stdout
    finally:
        server.kill()
        server.wait()
