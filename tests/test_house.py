"""The layout: entries of the root, sizes, imports, and copies of each system that run in another repository."""
import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers import chats
from tests.helpers.trainer import ROOT

ENTRIES = {"README.md", "LICENSE", "AGENTS.md", "CITATION.cff", "requirements.txt", "pyproject.toml",
           "train_v2_ddp.py", "data.py", "lora.py", "minimal",
           "speech", "diffusion", "distill", "core", "launch", "notebooks", "tests", "bench", "docs"}
SHARED = {"core"}
MAY_IMPORT = {"core": SHARED, "speech": {"speech"} | SHARED, "diffusion": {"diffusion"} | SHARED,
              "distill": {"distill"} | SHARED, "data": {"speech"} | SHARED, "lora": {"speech"} | SHARED,
              "train_v2_ddp": {"data", "lora", "speech"} | SHARED}


def tracked(pattern="*"):
    """Paths of the repository's files, relative to its root."""
    done = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, text=True, capture_output=True, check=True)
    return [Path(name) for name in done.stdout.splitlines()]


def test_the_root_is_a_menu():
    assert {path.parts[0] for path in tracked() if not path.parts[0].startswith(".")} <= ENTRIES
    assert len({path.parts[0] for path in tracked()}) <= 22        # with .ci, .github, .gitignore


@pytest.mark.skipif(not find_spec("ruff"), reason="ruff is not installed")
def test_python_files_are_clean():
    """ruff applies the rules of pyproject.toml."""
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", "."],
                          cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


# Lines of a folder's files. Size is a cost: these numbers only fall; a change that needs more takes lines away elsewhere.
CEILINGS = {"*.py": 839, "core/*.py": 3_098, "speech/*.py": 5_319, "distill/*.py": 2_955, "diffusion/*.py": 3_045,
            "minimal/*.py": 941, "bench/*.py": 1_746, "launch/*.sh": 998, "tests/*.py": 14_804}


@pytest.mark.parametrize("pattern", CEILINGS)
def test_no_folder_grows(pattern):
    paths = [path for path in tracked(pattern) if "/" in pattern or len(path.parts) == 1]
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in paths}
    largest = sorted(lines, key=lines.get)[-9:]
    assert sum(lines.values()) <= CEILINGS[pattern], f"{sum(lines.values())} lines; largest: {largest}"


# Riddles that plain English does without, in code, tests, help, messages and guides, and their number: these only fall.
RIDDLES = {r"\bwhat is\b": 0, r"\b(its|their) own\b|\bof (ours|theirs)\b": 0, r"\bbehind\b": 1, r"\bbeside\b": 0,
           r"\b(stands?|stood)\b": 0, r"\b(so|as) (many|often)\b": 0, r"\b(told|said|tells?)\b": 0,
           r"\b(anew|mend(s|ed)?|lack(s|ing)?)\b": 0, r'"""(what|who|which|whether)\b': 0}


def test_riddles_only_fall():
    text = "\n".join((ROOT / path).read_text() for path in tracked() if path.suffix in (".py", ".sh", ".md")
                     and path.name != "test_house.py" and (ROOT / path).exists())
    counts = {pattern: len(re.findall(pattern, text, re.IGNORECASE)) for pattern in RIDDLES}
    assert not {pattern: count for pattern, count in counts.items() if count > RIDDLES[pattern]}


VAGUE = {"found", "about", "at", "part", "place", "one", "often", "told", "made", "given", "theirs", "ours", "odd", "what"}


def test_variables_say_what_they_hold():
    for path in tracked("*.py"):
        names = {getattr(node, "id", getattr(node, "arg", "")) for node in ast.walk(ast.parse((ROOT / path).read_text()))
                 if isinstance(node, ast.arg) or isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        assert not names & VAGUE, f"{path}: {names & VAGUE}"


# ---- Imports

BOTH = {"lora", "speech.convert", "speech.make_tiny", "speech.prepare_tts", "diffusion.published",
        "diffusion.sample_bd3lm", "diffusion.make_problems"}     # module and script

MODULES = {str(path.with_suffix("")).replace("/", "."): path for path in tracked("*.py")
           if path.parts[0].removesuffix(".py") in MAY_IMPORT}


def imports(path):
    """Dotted names of modules of this repository that a file imports anywhere."""
    modules = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {node.module} if node.module in MODULES else {f"{node.module}.{a.name}" for a in node.names}
    return {name for name in modules if name.split(".")[0] in MAY_IMPORT}


def is_script(name):
    return '\nif __name__ == "__main__":' in (ROOT / MODULES[name]).read_text()


def test_imports_run_one_way():
    """Folders import as MAY_IMPORT allows, and nothing imports a script, except those that are also modules."""
    for name, path in MODULES.items():
        imported = imports(path)
        assert imported <= MODULES.keys(), f"{path} imports missing modules: {imported - MODULES.keys()}"
        wrong = {other for other in imported if other.split(".")[0] not in MAY_IMPORT[name.split(".")[0]]}
        assert not wrong, f"{path} may not import {wrong}"
        scripts = {other for other in imported if is_script(other)} - BOTH
        assert not scripts, f"{path} imports scripts: {scripts}"


def test_minimal_stands_alone():
    """Each file has at most 380 lines and imports nothing of this repository."""
    for path in tracked("minimal/*.py"):
        assert not imports(path) and len((ROOT / path).read_text().splitlines()) <= 380
        assert (ROOT / path).read_text().startswith("# /// script\n")


# ---- Copies

COPIES = re.findall(r"^mkdir -p (~/\S+) +&& cp -r (.+?) +\1/$", (ROOT / "README.md").read_text(), re.M)
USER_FILES = {"data.py": "MINE = 1\n", "metrics.py": "MINE = 2\n", "core/__init__.py": "MINE = 3\n",
              "core/dist.py": "MINE = 4\n", "speech/__init__.py": "MINE = 5\n"}


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A user's repository with modules of the same names, and the copies that README's commands make."""
    home = tmp_path_factory.mktemp("home")
    for name, text in USER_FILES.items():
        path = home / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "raise SystemExit('the file of the user was imported')\n")
    for folder, files in COPIES:
        subprocess.run(["bash", "-c", f"mkdir -p {folder} && cp -r {files} {folder}/"], cwd=ROOT, check=True,
                       env=os.environ | {"HOME": str(home)})
    yield home / "mine"
    for name, text in USER_FILES.items():
        assert (home / "mine" / name).read_text().startswith(text)


def assert_trains(python, repository, script, flags):
    """A run in the user's root, which is on PYTHONPATH, writes a checkpoint."""
    copy = next(repository / name for name in ("higgs", "blocks", "distill") if (repository / name / script).exists())
    out = repository.parent / f"out-{copy.name}"
    done = subprocess.run([python, f"{copy.name}/{script}", *map(str, flags), "--output_dir", str(out), "--logging_dir",
                           f"{out}-logs", "--report_to", "none", "--logging_steps", "1", "--num_workers", "1",
                           "--save_steps", "2", "--max_steps", "2"], cwd=repository, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(repository)})
    assert done.returncode == 0, done.stdout[-4000:]
    assert (out / "checkpoint-2" / "manifest.json").exists()


@pytest.mark.slow
def test_a_copy_of_the_speech_trainer(quick_python, mine, tiny, tmp_path):
    """It trains all weights of a 2025 base without processor files and saves the chat template of the copy."""
    subprocess.run([quick_python, mine / "higgs" / "lora.py", "export", "--model_path", tiny.model, "--output_dir",
                    tmp_path / "base"], check=True, capture_output=True, cwd=mine)
    assert_trains(quick_python, mine, "train_v2_ddp.py", [
        "--model_path", tmp_path / "base", "--audio_tokenizer_path", tiny.codec, "--train_data_file", tiny.train_json,
        "--code_cache", tiny.codes])


@pytest.mark.slow
def test_a_copy_of_block_diffusion(quick_python, mine):
    assert_trains(quick_python, mine, "diffusion/train_bd3lm.py", [
        "--demo", "100", "--model_size", "nano", "--eval_repeats", "1", "--per_device_train_batch_size", "4",
        "--warmup_steps", "1"])


@pytest.mark.slow
def test_a_copy_of_the_chat_trainer(quick_python, mine, tmp_path):
    student = chats.student(tmp_path / "student")
    data = chats.write(tmp_path / "chats.jsonl", chats.conversations(24))
    assert_trains(quick_python, mine, "distill/train_sft.py", [
        "--model_path", student, "--train_data_file", data, "--per_device_train_batch_size", "2",
        "--gradient_accumulation_steps", "1"])
