"""README and docs: every command in them parses, every flag and file they name exists, every link leads somewhere.

The flags of a Python command go through its script's own parser; launchers print what they would run, which is parsed
as well. The demos have tests of their own. A command that no rule covers is a failure.
"""
import argparse
import functools
import json
import os
import re
import shlex
import string
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT, script_flags

PAGES = [ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}

# Launchers that print what they would run with DRY_RUN=1, and which of our scripts are in it.
LAUNCHERS = {
    "launch/train_tts.sh": ["train_v2_ddp.py"], "launch/train_tts_h200x8.sh": ["train_v2_ddp.py"],
    "launch/train_sft_h100x8.sh": ["distill/train_sft.py"], "launch/create_data_h100x8.sh": ["distill/create_data.py"],
    "launch/train_gsm8k_bd3lm_h200.sh": ["diffusion/train_bd3lm.py", "diffusion/sample_bd3lm.py"],
    "launch/train_hdp_diffusion_h200.sh": ["diffusion/train_bd3lm.py", "diffusion/sample_bd3lm.py"]}
# Whole jobs: these tests run them, demo.sh the last one here. test.sh is run with pytest's --version.
ELSEWHERE = {"launch/distill_demo.sh": "tests/launch/test_distill_demo.py", "launch/demo.sh": "tests/test_docs.py"}


REST = "--model_path BASE --audio_tokenizer_path CODEC --train_data_file train.json --output_dir fresh"  # for "..."
# Flags of other programs that the documents speak about.
FOREIGN = {"--container-image", "--container-mounts", "--nproc_per_node", "--max-restarts", "--nodes", "--time", "--signal", "--batch", "--logdir", "--help",
           "--no-deps", "--omni", "--dllm-algorithm-config", "--model-path", "--trust-remote-code", "--enable-lora",
           "--max-lora-rank", "--max-logprobs", "--extra", "--word_timestamps", "--output_format", "--model",
           "--partition", "--account", "--repo-type", "--local-dir"}


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


# What the scripts say


@functools.cache
def parser_of(script):
    """The ArgumentParser of a script."""
    return script_flags(script)[0]


def parse(script, words):
    """Parse a command's flags as its script does."""
    try:
        return parser_of(script).parse_args(words)
    except SystemExit as left:
        raise AssertionError(f"{script} refuses {shlex.join(words)}") from left


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
             for path in (ROOT / folder).glob("*.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    flags = {flag for text in texts.values() for flag in re.findall(r"""["'](--[a-z]\w*)["']""", text)}
    parsers = [parser_of(name) for name, text in texts.items()
               if "cli.parse(" in text and name != "core/cli.py"]
    while parsers:
        parser = parsers.pop()
        parser.format_help()
        flags |= set(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return flags


# Where commands run


@pytest.fixture
def workshop(tmp_path):
    """A folder where the repository's files lie under their own names, and files that commands name."""
    for source in (*(ROOT / name for name in ("launch", "speech", "diffusion", "distill", "core")), *ROOT.glob("*.py")):
        os.symlink(source, tmp_path / source.name)
    for name in ("train.json", "labels.jsonl", "lines.txt"):
        (tmp_path / name).write_text("[]\n")
    (tmp_path / "recordings").mkdir()
    return tmp_path


def filled(flags):
    """A command's flags, with what "..." leaves out."""
    return [word for flag in flags for word in (REST.split() if flag == "..." else [flag])]


def environment(**settings):
    """This process's environment without what a launcher reads, then settings."""
    kept = {name: value for name, value in os.environ.items()
            if not re.match(r"SLURM_|RANK$|WORLD_SIZE$|LOCAL_|MASTER_|VENV$|PYTHONPATH$", name)}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VENV": "", "MIN_GPUS": "0",
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | settings


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
    done = subprocess.run(["bash", launcher, *filled(arguments)], cwd=workshop, text=True, capture_output=True,
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


# Tests

BLOCKS = block_commands()
KINDS = {}      # one for each script, flags and settings: the same with other values is not run again
for command in BLOCKS:
    names = {word.partition("=")[0] for word in command.words if word.startswith("--")}
    key = *(script_of(command.words) or launcher_of(command.words) or [command.text])[:1], *sorted(
        {*names, *command.settings})
    KINDS.setdefault(key, command)


@pytest.mark.slow
@pytest.mark.parametrize("command", KINDS.values(), ids=str)
def test_command_of_a_block(command, request, tmp_path):
    if found := script_of(command.words):
        script, flags, _ = found
        if "--help" not in flags:
            parse(script, filled(flags))
    elif launcher_of(command.words):
        check_launcher(command, request.getfixturevalue("workshop"))
    elif command.words[0] == "whisper":     # of another package
        assert "--output_dir" in command.words
    elif command.words[:2] == ["mkdir", "-p"]:
        subprocess.run(["bash", "-ec", command.text], cwd=ROOT, env=os.environ | {"HOME": str(tmp_path)}, check=True)
        folder = Path(command.words[2].replace("~", str(tmp_path)))
        assert (folder / "core" / "optim.py").exists() and len(list(folder.iterdir())) >= 2
    else:
        pytest.fail(f"{command}: no rule covers {command.text}")


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
PLACES = {"end-of-stream label": r"labels\[.*\] = eos", "resume position": r"epoch, first_pack = \(state\.get",
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
