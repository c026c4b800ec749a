"""README and docs: every command in them works, every flag and file they name exists, every link leads somewhere.

A command in a bash block is run, in a folder where the names that the documents use stand for tiny things: with
--dry_run or DRY_RUN=1 where it would need a GPU or hours, else as it is. Where a model of its own would have to be
trained first, its flags go through the script's parser, as those of commands inside sentences do. A command that no
rule covers is a failure.
"""
import argparse
import functools
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import string
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import soundfile
import torch

from speech import convert
from speech.codes import load_codec
from tests.helpers import chats
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT, script_flags, train_forked

PAGES = [ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
COPY_OUT = """\
mkdir -p ~/mine/higgs   && cp -r train_v2_ddp.py data.py lora.py speech core  ~/mine/higgs/
mkdir -p ~/mine/blocks  && cp -r diffusion core                               ~/mine/blocks/
mkdir -p ~/mine/distill && cp -r distill core                                 ~/mine/distill/
"""

# How each script's commands are tested: "dry" = run with --dry_run, "run" = run, "parse" = flags only, because a
# trained model, a GPU or minutes would be needed. Then flags that make it quick.
SCRIPTS = {
    "train_v2_ddp.py": ("dry",), "distill/train_sft.py": ("dry",), "distill/create_data.py": ("dry",),
    "speech/generate_tts.py": ("run", "--max_seconds", "0.2"), "speech/evaluate_tts.py": ("run",), "lora.py": ("run",),
    "diffusion/make_problems.py": ("run",), "core/report.py": ("run",), "speech/prepare_tts.py": ("run",),
    "speech/convert.py": ("run",), "speech/pick_checkpoint.py": ("parse",),
    "diffusion/train_bd3lm.py": ("parse",), "diffusion/sample_bd3lm.py": ("parse",),
    "diffusion/published.py": ("parse",), "diffusion/evaluate.py": ("parse",),
    "distill/evaluate.py": ("parse",),
    "bench/speed.py": ("parse",)}
# Launchers that print what they would run with DRY_RUN=1, and which of our scripts are in it.
LAUNCHERS = {
    "launch/train_tts.sh": ["train_v2_ddp.py"], "launch/train_tts_h200x8.sh": ["train_v2_ddp.py"],
    "launch/train_sft_h100x8.sh": ["distill/train_sft.py"], "launch/create_data_h100x8.sh": ["distill/create_data.py"],
    "launch/train_gsm8k_bd3lm_h200.sh": ["diffusion/train_bd3lm.py", "diffusion/sample_bd3lm.py"],
    "launch/train_hdp_diffusion_h200.sh": ["diffusion/train_bd3lm.py", "diffusion/sample_bd3lm.py"]}
# Whole jobs: these tests run them, demo.sh the last one here. test.sh is run with pytest's --version.
ELSEWHERE = {"launch/distill_demo.sh": "tests/launch/test_distill_demo.py", "launch/demo.sh": "tests/test_docs.py"}
# What stands for models of the hub; whatever else the documents name lies in the workshop under that very name.
HUB = {"bosonai/higgs-audio-v2-generation-3B-base": "BASE", "bosonai/higgs-audio-v2-tokenizer": "CODEC",
       "bosonai/higgs-tts-3-4b": "BASE3", "Qwen/Qwen3-4B-Instruct-2507": "STUDENT",
       "Qwen/Qwen3-30B-A3B-Instruct-2507": "STUDENT"}
REST = "--model_path BASE --audio_tokenizer_path CODEC --train_data_file train.json --output_dir fresh"  # for "..."
# Outputs that lie on the shelf already, where other commands read them.
TAKEN = {("--output_dir", "out"), ("--output_dir", "./out"), ("--output_dir", "prepared"),
         ("--output_file", "labels.jsonl"), ("--output_file", "answers.jsonl"), ("--output_file", "plans.jsonl")}
# Flags of other programs that the documents speak about.
FOREIGN = {"--container-image", "--container-mounts", "--nproc_per_node", "--max-restarts", "--nodes", "--time", "--signal", "--batch", "--logdir", "--help",
           "--no-deps", "--omni", "--dllm-algorithm-config", "--model-path", "--trust-remote-code", "--enable-lora",
           "--max-lora-rank", "--max-logprobs", "--extra", "--word_timestamps", "--output_format", "--model",
           "--partition", "--account", "--repo-type", "--local-dir"}
NOTES = "## Commands from older notes\n"        # of other places and programs; tests/launch/test_commands.py runs them


# ---------------------------------------------------------------------------------------------------------------------
# What the documents say


@dataclass
class Command:
    """One command of a document. words: without the settings (NAME=value) before it."""
    page: str
    line: int
    settings: dict
    words: list
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def split_command(text):
    """A command line -> ({setting: value}, words), comments left out."""
    words, settings = shlex.split(text, comments=True), {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        name, _, settings[name] = words.pop(0).partition("=")
    return settings, words


def fences(text):
    """(language, number of its first line, lines) of each fenced block."""
    opened = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            if opened is None:
                opened = (line[3:].strip(), number + 1, [])
            else:
                yield opened
                opened = None
        elif opened:
            opened[2].append(line)
    assert opened is None, f"line {opened[1]}: a block that is not closed"


def without_blocks(text):
    """A page with its fenced blocks emptied; lines keep their numbers."""
    return re.sub(r"^```.*?^```$", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


def block_commands():
    """The commands of all bash blocks, and those behind a $ in other blocks; variables set in a block are filled in."""
    found = []
    for page, text in TEXTS.items():
        for language, first, lines in fences(text):
            if language != "bash":
                lines = [line[2:] if line.startswith("$ ") else "" for line in lines]
            number, variables = first, {}
            for command in re.split(r"(?<!\\)\n", "\n".join(lines)):
                filled = string.Template(command.replace("\\\n", " ")).safe_substitute(variables)
                settings, words = split_command(filled)
                if words:
                    found.append(Command(page, number, settings, words, filled))
                else:
                    variables |= settings
                number += command.count("\n") + 1
    return found


def sentence_commands():
    """Commands inside sentences and under tables: `python ...`, `bash ...`, with settings before them or without."""
    found = []
    for page, text in TEXTS.items():
        bare = without_blocks(text)
        notes = bare.find(NOTES)
        for span in re.finditer(r"`([^`]+)`", bare):
            if 0 <= notes < span.start() < bare.find("\n## ", notes + 1):
                continue
            try:
                settings, words = split_command(span[1].replace("\n", " "))
            except ValueError:
                continue        # half a quotation
            if len(words) > 1 and words[0] in ("python", "bash", "torchrun", "sbatch"):
                found.append(Command(page, bare[:span.start()].count("\n") + 1, settings, words, span[1]))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What the scripts say


class Parser(Exception):
    """Carries the parser out of a main() that was about to use it."""


@functools.cache
def parser_of(script):
    """The ArgumentParser of a script, whose main() runs up to the line that parses its flags."""
    def carry(parser, *_, **__):
        raise Parser(parser)
    if not script.startswith("bench/") and script != "diffusion/generate.py":      # those use argparse alone
        return script_flags(script)[0]
    with mock.patch.object(sys, "path", [str(ROOT), *sys.path]), mock.patch.object(sys, "argv", [script]):
        main = runpy.run_path(str(ROOT / script), run_name=f"flags of {script}")["main"]
        with mock.patch.object(argparse.ArgumentParser, "parse_args", carry):
            try:
                main()
            except Parser as carried:
                return carried.args[0]
    raise LookupError(f"{script}: main() parses no flags")


def parse(script, words, partial=False):
    """Parse a command's flags as its script does; partial: required ones may be missing."""
    parser = parser_of(script)
    required = {action: action.required for action in parser._actions}
    try:
        for action in required if partial else ():
            action.required = False
        return parser.parse_args(words)
    except SystemExit as left:
        raise AssertionError(f"{script} refuses {shlex.join(words)}") from left
    finally:
        for action, value in required.items():
            action.required = value


def script_of(words):
    """(script, its flags, processes) of a command that starts one of our Python files, else None."""
    if words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
        return words[1], words[2:], 1
    if words[0] == "torchrun":
        at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        if at is None:
            return None
        ranks = [int(word.partition("=")[2]) for word in words[1:at] if word.startswith("--nproc_per_node=")]
        return words[at], words[at + 1:], ranks[0]
    return None


def launcher_of(words):
    """(launcher, its arguments) of `bash X.sh ...` or `sbatch [options] X.sh ...`, else None."""
    if words[0] in ("bash", "sbatch"):
        at = next((i for i, word in enumerate(words) if word.endswith(".sh")), None)
        if at and (words[0] == "sbatch" or at == 1):
            return words[at], words[at + 1:]
    return None


def all_flags():
    """Every flag of every script, those of the measurements included; each prints its --help."""
    paths = [path for folder in (".", "speech", "diffusion", "distill", "core", "bench")
             for path in (ROOT / folder).glob("*.py")
             if '\nif __name__ == "__main__":' in path.read_text() or path.name in ("train_v2_ddp.py", "train_sft.py", "train_bd3lm.py")]
    flags, parsers = set(), [parser_of(path.relative_to(ROOT).as_posix()) for path in paths]
    while parsers:
        parser = parsers.pop()
        parser.format_help()
        flags |= set(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return flags


# ---------------------------------------------------------------------------------------------------------------------
# Where commands run


@pytest.fixture(scope="module")
def shelf(tiny, pool, tmp_path_factory):
    """Folder with everything that the documents' commands name, tiny."""
    root = tmp_path_factory.mktemp("shelf")
    (root / "BASE").symlink_to(tiny.model)
    (root / "CODEC").symlink_to(tiny.codec)
    from speech import make_tiny
    make_tiny.make_model3(root / "tiny3", load_codec(tiny.codec, torch.device("cpu"), 8)[0]).rename(root / "BASE3")
    (root / "clips").mkdir()
    text = tiny.train_json.read_text().replace('"audio_url": "', f'"audio_url": "{tiny.root}/')
    (root / "train.json").write_text(text)
    (root / "prompts.json").write_text(json.dumps(json.loads(text)[:1]))
    (root / "lines.txt").write_text("Good day.\nThank you.\n")
    train_forked(pool, tiny, root / "out", "--use_lora", "--max_steps", 8, "--learning_rate", 1e-2,
                 "--validation_split", 0)
    (root / "out" / "checkpoint-8").rename(root / "out" / "checkpoint-N")
    for name in ("out_a", "out_b"):
        (root / name).mkdir()
        for file in ("metrics.jsonl", "starts.jsonl"):
            shutil.copy(root / "out" / file, root / name)
    (root / "recordings").mkdir()
    write_speech(root / "recordings" / "talk.wav", 200, seconds=8)
    (root / "recordings" / "talk.srt").write_text("".join(
        f"{i + 1}\n00:00:0{i},000 --> 00:00:0{i + 1},000\nGood day number {i}.\n\n" for i in range(8)))
    assert pool.run(1, "tests.helpers.trainer.prepare_main", [
        "--model_path", "BASE", "--audio_tokenizer_path", "CODEC", "--train_data_dir", "recordings",
        "--output_dir", "prepared"], cwd=root)[0] == [0]
    (root / "train.csv").write_text("audio,offset,end,text,speaker\n" + "".join(
        f"recordings/talk.wav,{i},{i + 1},Good day number {i}.,anna\n" for i in range(8)))
    (root / "full").mkdir()
    (root / "full" / "checkpoint-N").symlink_to(tiny.model)
    write_speech(root / "me.wav", 220)
    for number, name in enumerate(("samples", "samples_base", "samples_trained", "clips", "spoken")):
        (root / name).mkdir(exist_ok=True)
        write_speech(root / name / "0000.wav", 200 + 20 * number)
        if name != "clips":
            (root / name / "0000.json").write_text(json.dumps({"text": "Good day.", "ended_by": "eos"}))
    (root / "takes").mkdir()        # of generate_tts.py --max_cer
    for i in range(8):
        np.save(root / "takes" / f"{i:04d}.npy", np.full((12 + i, 8), i, np.int16))
    (root / "takes" / "best.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"Good day number {i}."},
        {"role": "assistant", "content": {"type": "audio", "audio_url": f"{i:04d}.npy"}}]}) + "\n" for i in range(8)))
    (root / "judged").mkdir()
    (root / "judged" / "evaluation.json").write_text(json.dumps(
        {"name": "samples", "metrics": {"mcd": 5.0}, "samples": [], "settings": {}}))
    chats.student(root / "STUDENT")
    (root / "TEACHER").symlink_to(root / "STUDENT")
    chats.write(root / "labels.jsonl", chats.conversations(24))
    for name in ("chats.jsonl", "answers.jsonl"):
        chats.write(root / name, [chats.ask(f"What is {i}?", "a number") for i in range(24)])
    (root / "system.txt").write_text("You are a teacher.")
    from diffusion import make_problems
    make_problems.write_demo(root / "problems", n_train=40, n_test=4)
    for file in ("train.jsonl", "test.jsonl", "train_hdp.json", "test_hdp.json"):
        shutil.copy(root / "problems" / file, root)
    make_problems.main(["lines", "--input", str(root / "train.jsonl"), "--output", str(root / "lines_gsm8k.txt")])
    lines = (root / "lines_gsm8k.txt").read_text().splitlines()
    (root / "plans.jsonl").write_text("".join(json.dumps(
        {"id": i, "messages": chats.ask(line, "First find the number, then add.")}) + "\n"
        for i, line in enumerate(lines)))
    return root


def write_speech(path, pitch, seconds=1):
    """Seconds of a voice-like tone."""
    t = np.arange(24000 * seconds) / 24000
    wave = sum(np.sin(2 * np.pi * pitch * k * t) / k for k in range(1, 20)) * (0.1 + 0.05 * np.sin(2 * np.pi * 3 * t))
    soundfile.write(path, wave.astype(np.float32), 24000)


@pytest.fixture
def workshop(shelf, tmp_path):
    """A fresh folder where the repository's files and the shelf's lie under their own names; new files stay in it."""
    for source in (*(ROOT / name for name in ("launch", "speech", "diffusion", "distill", "core", "tests")),
                   *shelf.iterdir(), *ROOT.glob("*.py"), ROOT / "README.md"):
        if source.is_dir() and source.parent == shelf:
            shutil.copytree(source, tmp_path / source.name, copy_function=os.symlink,
                            ignore=shutil.ignore_patterns("run.lock"))      # a lock that is a link is refused
        else:
            os.symlink(source, tmp_path / source.name)
    return tmp_path


def tame(flags):
    """A command's flags with tiny models for the hub's, and the flags that "..." leaves out."""
    flags = [word for flag in flags for word in (REST.split() if flag == "..." else [HUB.get(flag, flag)])]
    for at, flag in enumerate(flags[:-1]):
        if (flag, flags[at + 1]) in TAKEN:
            flags[at + 1] = "fresh"
    return flags


def environment(**settings):
    """This process's environment without what a launcher reads, then settings."""
    kept = {name: value for name, value in os.environ.items()
            if not re.match(r"SLURM_|RANK$|WORLD_SIZE$|LOCAL_|MASTER_|VENV$|PYTHONPATH$", name)}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VENV": "", "MIN_GPUS": "0",
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | settings


def check_python(command, pool, workshop):
    """Run or parse a command that starts a Python script."""
    script, flags, ranks = script_of(command.words)
    assert script in SCRIPTS, f"{command}: no rule for {script}; add one to SCRIPTS"
    how, *quick = SCRIPTS[script]
    if "--asr_model" in flags or how == "parse":        # a model of the hub, or a trained one
        parse(script, flags)
        return
    flags = tame(flags)
    if "--help" in flags:
        quick, how = [], "run"
    if how == "dry" and "--dry_run" not in flags:
        quick = ["--dry_run", str(ranks)] if script != "distill/create_data.py" else ["--dry_run"]
    main = script.removesuffix(".py").replace("/", ".") + ".main"
    if script == "train_v2_ddp.py":
        main = "tests.helpers.trainer.speech_main"
    if script == "distill/train_sft.py":
        main = "tests.helpers.students.run_trainer"
    statuses, output = pool.run(min(ranks, 2) if how == "run" else 1, main, [*flags, *quick], cwd=workshop)
    assert not any(statuses), f"{command}: {command.text}\n{output[-3000:]}"
    if how == "dry":
        assert "dry run ok" in output or script == "distill/create_data.py", output


def check_launcher(command, workshop):
    """Let a launcher print what it would run, and parse that."""
    launcher, arguments = launcher_of(command.words)
    if launcher == "launch/test.sh":
        arguments += ["--version"]
        settings = {"VENV": "none"}
    elif launcher in ELSEWHERE:
        subprocess.run(["bash", "-n", ROOT / launcher], check=True)
        assert Path(launcher).name in (ROOT / ELSEWHERE[launcher]).read_text()
        return
    else:
        assert launcher in LAUNCHERS, f"{command}: no rule for {launcher}; add one to LAUNCHERS"
        settings = {"DRY_RUN": "1"}
        if launcher == "launch/create_data_h100x8.sh":
            settings["GPUS"] = "8"
            arguments = ["fresh" if word == "labels.jsonl" else word for word in arguments]
    done = subprocess.run(["bash", launcher, *tame(arguments)], cwd=workshop, text=True, capture_output=True,
                          env=environment(**command.settings | settings), timeout=PATIENCE_S)
    assert done.returncode == 0, f"{command}: {command.text}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    for script in LAUNCHERS.get(launcher, ()):
        if command.settings.get("SYSTEM") == "chat" and "--demo" not in arguments:  # bounds a likelihood instead of answering
            script = script.replace("sample_bd3lm", "evaluate")
        starts = [(line, at) for line in lines for at, word in enumerate(line) if word.endswith(f"/{script}")]
        assert starts, f"{command}: {launcher} does not start {script}\n{done.stdout}"
        for line, at in starts:
            parse(script, line[at + 1:])


# ---------------------------------------------------------------------------------------------------------------------
# Tests

BLOCKS, SENTENCES = block_commands(), sentence_commands()
KINDS = {}      # one for each script, flags and settings: the same with other values is not run again
for command in BLOCKS:
    names = {word.partition("=")[0] for word in command.words if word.startswith("--")}
    key = *(script_of(command.words) or launcher_of(command.words) or [command.text])[:1], *sorted(
        {*names, *command.settings})
    KINDS.setdefault(key, command)


@pytest.mark.slow
@pytest.mark.parametrize("command", KINDS.values(), ids=str)
def test_command_of_a_block(command, request, tmp_path):
    if script_of(command.words):
        check_python(command, request.getfixturevalue("pool"), request.getfixturevalue("workshop"))
    elif launcher_of(command.words):
        check_launcher(command, request.getfixturevalue("workshop"))
    elif command.words[0] == "whisper":     # its weights are not here: what it leaves lies on the shelf
        folder = request.getfixturevalue("shelf") / command.words[command.words.index("--output_dir") + 1]
        assert len(list(folder.glob("*.srt"))) == len(list(folder.glob("*.wav"))) == 1
    elif command.words[:2] == ["mkdir", "-p"]:
        subprocess.run(["bash", "-ec", command.text], cwd=ROOT, env=os.environ | {"HOME": str(tmp_path)}, check=True)
        folder = Path(command.words[2].replace("~", str(tmp_path)))
        assert (folder / "core" / "optim.py").exists() and len(list(folder.iterdir())) >= 2
    else:
        pytest.fail(f"{command}: no rule covers {command.text}")


# Example of docs/data.md: (heading, number of its block): the file it becomes, the audio it names, {file: text} beside it
EXAMPLES = {
    ("ChatML", 0): ("train.json", ["clips/reference.wav", "clips/target.wav"], {}),
    ("A table with a header", 0): ("train.csv", ["clips/0001.wav", "clips/0002.wav"], {}),
    ("A table with a header", 1): ("train.csv", ["talk.flac"], {}),
    ("Long recordings with subtitles", 0): ("NAME.srt", ["NAME.wav"], {}),
    ("LJSpeech and other tables without a header", 0): ("metadata.csv", ["wavs/LJ001-0001.wav"], {}),
    ("GPT-SoVITS and Bert-VITS2", 0): ("train.list", ["wavs/0001.wav"], {}),
    ("Kaldi", 0): ("", ["wavs/0001.wav"], {}),
    ("ms-swift", 0): ("train.jsonl", ["0001.wav"], {}),
    ("VibeVoice", 0): ("train.jsonl", ["1.wav", "a.wav", "b.wav"], {}),
    ("metadata.json of Higgs trainers", 0): ("metadata.json", ["0001.wav"], {"0001.txt": "Good morning."})}


@pytest.mark.slow
@pytest.mark.parametrize("heading, number", EXAMPLES)
def test_example_of_data_is_read(heading, number, pool, workshop):
    name, audio, texts = EXAMPLES[heading, number]
    part = TEXTS["docs/data.md"].partition(f"### {heading}\n")[2].partition("\n##")[0]
    text = "\n".join(list(fences(part))[number][2]) + "\n"
    files = {name: text} | texts if name else dict(re.findall(r"^(\S+): +(.*\n)", text, re.MULTILINE))
    for file, content in files.items():
        (workshop / "data" / file).parent.mkdir(parents=True, exist_ok=True)
        (workshop / "data" / file).write_text(content)
    for file in audio:
        (workshop / "data" / file).parent.mkdir(exist_ok=True)
        write_speech(workshop / "data" / file, 200, seconds=25 if name == "NAME.srt" or file == "talk.flac" else 1)
    folder = name in ("", "NAME.srt", "metadata.json")
    source = ["--train_data_dir", "data"] if folder else ["--train_data_file", f"data/{name}"]
    statuses, output = pool.run(1, "tests.helpers.trainer.speech_main", [
        "--model_path", "BASE", "--audio_tokenizer_path", "CODEC", "--output_dir", "fresh", "--disable_eval",
        *source, "--dry_run"], cwd=workshop)
    assert statuses == [0] and "dry run ok" in output, output[-2000:]


@pytest.mark.parametrize("command", SENTENCES, ids=str)
def test_command_of_a_sentence(command):
    if found := script_of(command.words):
        script, flags, _ = found
        parse(script, [flag for flag in flags if flag not in ("...", "--help")], partial=True)
    elif found := launcher_of(command.words):
        assert (ROOT / found[0]).is_file()
    else:
        assert command.words[0] == "torchrun" and set(word.partition("=")[0] for word in command.words[1:]) <= FOREIGN


def started_by(path, found=()):
    """A launcher, and the scripts of launch/ that it sources or starts: their paths."""
    found = [*found, path]
    for name in re.findall(r'^[^#\n]*\b(?:source|bash) .*?/(\w+\.sh)"', (ROOT / path).read_text(), re.M):
        if f"launch/{name}" not in found:
            found = started_by(f"launch/{name}", found)
    return found


def test_settings_before_commands_are_read_by_what_they_start():
    """As $NAME or ${NAME...}, or as a setting of env.sh's; TEST_DEVICE by the tests."""
    given = [(command, name) for command in [*BLOCKS, *SENTENCES] for name in command.settings if name != "TEST_DEVICE"]
    for command, name in given:
        read = "".join((ROOT / path).read_text() for path in started_by(launcher_of(command.words)[0]))
        assert re.search(rf"\$\{{?!?{name}\b|^setting {name}\b", read, re.M), f"{command}: nothing reads {name}"
    assert len(given) > 20


def test_there_are_commands_at_all():
    assert len(BLOCKS) > 40 and len(SENTENCES) > 10
    assert {command.page for command in BLOCKS} >= {"README.md", "docs/speech.md", "docs/diffusion.md", "docs/slurm.md",
                                                    "docs/distillation.md", "docs/reliability.md"}


def test_every_flag_that_is_named_exists():
    known = all_flags() | FOREIGN
    for page, text in TEXTS.items():
        spans = re.findall(r"`[^`]+`", without_blocks(text))
        for code in [*spans, *("\n".join(lines) for _, _, lines in fences(text))]:
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code):
                assert flag in known, f"{page}: no script has {flag}"


def slug(heading):
    """GitHub's anchor of a heading."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


def test_links_lead_somewhere():
    anchors = {page: {slug(line.lstrip("#")) for line in without_blocks(text).splitlines() if line.startswith("#")}
               for page, text in TEXTS.items()}
    number = 0
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), f"{page}: {target} leads nowhere"
            if anchor and not path.endswith(".py"):     # of lines: test_links_to_lines
                name = file.resolve().relative_to(ROOT).as_posix()
                assert anchor in anchors[name], f"{page}: {name} has no heading #{anchor}"
            number += 1
    assert number > 40


# {words of a link in README: what stands in the line of code that it leads to}
PLACES = {"end-of-stream label": r"labels\[.*\] = eos", "resume position": r"run\.position\(meta\)|first_pack = \(state\.get",
          "averaged over the ranks": r"\(loss \* \(?world\.size", "block is unmasked": r"^def unmask\(",
          "KL divergence": r"^def divergence\("}


@pytest.mark.parametrize("words", PLACES)
def test_links_to_lines(words):
    path, line = re.search(rf"\[[^]]*{words}[^]]*\]\(([\w/.]+)#L(\d+)\)", TEXTS["README.md"]).groups()
    lines = [number for number, text in enumerate((ROOT / path).read_text().splitlines(), 1)
             if re.search(PLACES[words], text)]
    assert lines == [int(line)], f"README.md: the link \"{words}\" to {path} should lead to one of the lines {lines}"


def test_files_that_are_named_exist():
    folders = "speech|diffusion|distill|core|launch|tests|bench|docs"
    named = re.compile(rf"(?<![\w/.~:-])((?:{folders})/[\w/.*-]+\.(?:py|sh|txt|md|json|jinja|png|html))\b")
    for page, text in TEXTS.items():
        for path in named.findall(text):
            assert list(ROOT.glob(path)), f"{page}: there is no {path}"
        for name, path in re.findall(r"`(\w+)` in `([\w/]+\.py)`", text):
            assert f"def {name}(" in (ROOT / path).read_text(), f"{page}: {path} has no {name}"
        for path in re.findall(r"`([\w]+\.py)`", text):
            assert (ROOT / path).is_file() or list(ROOT.glob(f"*/{path}")), f"{page}: there is no {path}"


def test_columns_and_errors_of_data_are_those_of_the_code():
    shown = set(re.findall(r"`(\w+)`", TEXTS["docs/data.md"].partition("## Columns")[2].partition("\n## ")[0]))
    assert shown >= {name for names in convert.COLUMNS.values() for name in names.split()}
    code = "".join(path.read_text() for folder in ("speech", "core", "distill", "diffusion")
                   for path in (ROOT / folder).glob("*.py"))
    code = re.sub(r"\"\n\s+f?\"", "", code)     # a text over two lines
    tables = TEXTS["docs/troubleshooting.md"].partition("## Errors of speech data")[2].partition("\n## FAQ")[0]
    said = [text for row in re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)]
    assert len(said) > 30
    for text in said:
        assert text in code, f"docs/troubleshooting.md: no message says {text!r}"


def test_public_functions_of_block_diffusion():
    names = re.findall(r"^\| `(diffusion\.\w+)\.(\w+)` \|", TEXTS["docs/diffusion.md"], re.MULTILINE)
    assert len(names) >= 3
    for module, function in names:
        assert callable(getattr(importlib.import_module(module), function))


GUIDES = {f"docs/{name}.md" for name in (
    "first_voice", "speech", "data", "speaking", "distillation", "diffusion", "slurm", "reliability", "speed",
    "troubleshooting", "architecture", "adapting", "dropped")}


def test_readme_is_short_and_has_what_it_must():
    readme = TEXTS["README.md"]
    assert len(readme.splitlines()) <= 110
    assert COPY_OUT in readme
    assert set(TEXTS) == {"README.md", ".github/CONTRIBUTING.md", *GUIDES}
    for page in set(TEXTS) - {"README.md"}:
        assert f"]({page}" in readme, f"README does not lead to {page}"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License") and "the flat-trainers authors" in (
        ROOT / "LICENSE").read_text()


def test_guides_are_short_and_plain():
    """Their words in all, lines of at most 100 columns, and no dates, seeds or commits."""
    assert sum(len(TEXTS[page].split()) for page in GUIDES) <= 14_000
    assert len(TEXTS["docs/dropped.md"].splitlines()) <= 100
    for page, text in TEXTS.items():
        text = re.sub(r"<!-- table .*?<!-- end table -->", "", text, flags=re.DOTALL)   # of bench/table.py
        long = [line for line in text.splitlines() if len(line) > 100]
        assert not long, f"{page}: more than 100 columns: {long}"
        if page != "docs/dropped.md":
            found = re.findall(r"\b20\d\d-\d\d-\d\d\b|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7}\b|\bseed \d+", text)
            assert not found, f"{page}: {found}"


# What must not come back, and how often it is there; these numbers only fall.
RIDDLES = {r"\bwhat is\b": 5, r"\bstands?\b": 1, r"\bbeside\b": 1, r"\bbehind\b": 9, r"\bits own\b|\bof ours\b": 0,
           r"\bso many\b|\bso often\b": 0, r"\banew\b|\bmends?\b|\blacks?\b": 1, r"\btold\b|\btells?\b": 1}


@pytest.mark.parametrize("pattern", RIDDLES)
def test_patterns_that_fall(pattern):
    found = [f"{page}: {line}" for page, text in TEXTS.items() for line in without_blocks(text).splitlines()
             if re.search(pattern, line, re.IGNORECASE)]
    assert len(found) <= RIDDLES[pattern], "\n".join(found)


def test_speed_on_a_gpu_is_what_was_measured():
    """Rows of README and docs/speed.md against bench/results/h200.jsonl: by milliseconds, which no two rows share."""
    lines = (ROOT / "bench" / "results" / "h200.jsonl").read_text().splitlines()
    measured = {tuple(f"{row[key]:{form}}" for key, form in (("tokens_s", ",.0f"), ("mfu_989", ".1f"))): row
                for row in map(json.loads, lines)}
    for page, least in (("README.md", 4), ("docs/speed.md", 6)):
        rows = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d,]+) \|(?: [\d.]+ % \|)? ([\d.]+) % \| ([\d.]+) \(([\d.]+)\) \|$",
                          TEXTS[page], re.MULTILINE)
        assert len(rows) >= least
        for ms, tokens, mfu, peak, planned in rows:
            row = measured[tokens, mfu]
            for shown, key in ((ms, "step_ms"), (peak, "peak_gib"), (planned, "planned_gib")):
                digits = len(shown.partition(".")[2])
                assert shown == f"{row[key]:.{digits}f}", f"{page}: {row['name']}: {key} is {row[key]}"


@pytest.mark.slow
def test_the_demo_of_the_readme(tmp_path, quick):
    """Few clips, steps and sentences: all its parts work, and its gates say that such a voice is not learnt."""
    assert "bash launch/demo.sh " in TEXTS["README.md"]
    voice, settings = ROOT / "launch" / "voice", {"VENV": "none", "OUT": str(tmp_path), "STEPS": "8", "RANKS": "1"}
    samples = json.loads((voice / "train.json").read_text())[:16]
    for sample in samples:
        clip = sample["messages"][-1]["content"]
        clip["audio_url"] = str(voice / clip["audio_url"])
    (tmp_path / "train.json").write_text(json.dumps(samples))
    settings |= {"DATA": str(tmp_path / "train.json"), "SENTENCES": "4", **quick}
    done = subprocess.run(["bash", ROOT / "launch" / "demo.sh"], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=environment(**settings))
    assert done.returncode == 1, done.stdout[-3000:]
    assert "verdict    FAILED: word errors" in done.stdout and "resumed from" in done.stdout, done.stdout[-3000:]
    page, = tmp_path.glob("run-*/report.html")
    assert re.search(r"<li>After: speech is [a-z ]*understood \(word errors \d", page.read_text())
