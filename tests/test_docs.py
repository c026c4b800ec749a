"""README and docs: every command in them parses, every flag and file they name exists, every link leads somewhere.

test_guides.py runs the Python commands; launchers print what they would run, which is parsed. The demos have tests of
their own. A command that no rule covers is a failure.
"""
import argparse
import functools
import json
import os
import re
import shlex
import string
import subprocess
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speech import convert
from speech.dataset import read_samples
from tests.helpers import chats
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT, script_flags
from tests.launch.test_launchers import environment

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
NOTES = "## Commands from older notes\n"        # of other places and programs; tests/launch/test_commands.py runs them


# ---------------------------------------------------------------------------------------------------------------------
# What the documents say


class Command(namedtuple("Command", "page line settings words text")):
    """One command of a document. words: without the settings {NAME: value} before it."""

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


@functools.cache
def parser_of(script):
    """The ArgumentParser of a script."""
    return script_flags(script)[0]


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
             for path in (ROOT / folder).glob("*.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    flags = {flag for text in texts.values() for flag in re.findall(r"""["'](--[a-z]\w*)["']""", text)}
    parsers = [parser_of(name) for name, text in texts.items() if "cli.parse(" in text and name != "core/cli.py"]
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


@pytest.fixture
def workshop(tiny, tmp_path):
    """A folder where the repository's files lie under their own names, and tiny things that README's commands name."""
    for source in (*(ROOT / name for name in ("launch", "speech", "diffusion", "distill", "core")), *ROOT.glob("*.py")):
        if source.exists():
            os.symlink(source, tmp_path / source.name)
    (tmp_path / "BASE").symlink_to(tiny.model)
    (tmp_path / "CODEC").symlink_to(tiny.codec)
    text = tiny.train_json.read_text().replace('"audio_url": "', f'"audio_url": "{tiny.root}/')
    (tmp_path / "train.json").write_text(text)
    (tmp_path / "recordings").mkdir()
    write_speech(tmp_path / "recordings" / "talk.wav", 200, seconds=8)
    (tmp_path / "recordings" / "talk.srt").write_text("".join(
        f"{i + 1}\n00:00:0{i},000 --> 00:00:0{i + 1},000\nGood day number {i}.\n\n" for i in range(8)))
    chats.student(tmp_path / "STUDENT")
    chats.write(tmp_path / "labels.jsonl", chats.conversations(24))
    (tmp_path / "lines.txt").write_text("Good day.\n")
    return tmp_path


def write_speech(path, pitch, seconds=1):
    """Seconds of a voice-like tone."""
    t = np.arange(24000 * seconds) / 24000
    wave = sum(np.sin(2 * np.pi * pitch * k * t) / k for k in range(1, 20)) * (0.1 + 0.05 * np.sin(2 * np.pi * 3 * t))
    soundfile.write(path, wave.astype(np.float32), 24000)


def filled(flags):
    """A command's flags, with what "..." leaves out."""
    return [word for flag in flags for word in (REST.split() if flag == "..." else [flag])]


def check_launcher(command, workshop):
    """Let a launcher print what it would run, and parse that."""
    launcher, arguments = launcher_of(command.words)
    if launcher == "launch/test.sh":
        arguments, settings = [*arguments, "--version"], {}
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
                          env=environment(HF_HUB_OFFLINE="1", **command.settings | settings), timeout=PATIENCE_S)
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
KINDS = {}      # one for each launcher, flags and settings: the same with other values is not run again
for command in BLOCKS:
    names = {word.partition("=")[0] for word in command.words if word.startswith("--")}
    if not script_of(command.words):        # test_guides.py runs those
        name = (launcher_of(command.words) or [command.text])[0]
        KINDS.setdefault((name, *sorted({*names, *command.settings})), command)


@pytest.mark.slow
@pytest.mark.parametrize("command", KINDS.values(), ids=str)
def test_command_of_a_block(command, request, tmp_path):
    if launcher_of(command.words):
        check_launcher(command, request.getfixturevalue("workshop"))
    elif command.words[0] == "whisper":     # of another package
        assert "--output_dir" in command.words
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


@pytest.mark.parametrize("heading, number", EXAMPLES)
def test_example_of_data_is_read(heading, number, tmp_path):
    name, audio, texts = EXAMPLES[heading, number]
    part = TEXTS["docs/data.md"].partition(f"### {heading}\n")[2].partition("\n##")[0]
    text = "\n".join(list(fences(part))[number][2]) + "\n"
    files = {name: text} | texts if name else dict(re.findall(r"^(\S+): +(.*\n)", text, re.MULTILINE))
    for file, content in (files | dict.fromkeys(audio, "audio")).items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    source, problems = tmp_path if name in ("", "NAME.srt", "metadata.json") else tmp_path / name, []
    assert list(read_samples(source, problems)) and not problems


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
    assert len(given) > 20 and len(BLOCKS) > 40 and len(SENTENCES) > 10


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


GUIDES = {f"docs/{name}.md" for name in (
    "first_voice", "speech", "data", "speaking", "distillation", "diffusion", "slurm", "reliability", "speed",
    "troubleshooting", "architecture", "adapting", "dropped")}


def test_readme_is_short_and_has_what_it_must():
    readme = TEXTS["README.md"]
    assert len(readme.splitlines()) <= 110
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


def test_speed_on_a_gpu_is_what_was_measured():
    """Rows of README and docs/speed.md against bench/results/h200.jsonl: by milliseconds, which no two rows share."""
    lines = (ROOT / "bench" / "results" / "h200.jsonl").read_text().splitlines()
    measured = {tuple(f"{row[key]:{form}}" for key, form in (("tokens_s", ",.0f"), ("mfu_989", ".1f"))): row
                for row in map(json.loads, lines) if "mfu_989" in row}
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
    assert len(done.stdout.splitlines()) <= 55      # 60 with the step lines of the whole demo
    page, = tmp_path.glob("run-*/report.html")
    assert re.search(r"<li>After: speech is [a-z ]*understood \(word errors \d", page.read_text())
    # the picture is of a whole demo's page, by a browser; its words are these parts
    parts = ", ".join(re.findall("<h2>([^<]+)</h2>", page.read_text()))
    assert f"![The demo's report: {parts}](docs/report.png)" in " ".join(TEXTS["README.md"].split()), parts
