"""launch/setup.sh: the real script, venv and pip; torch and the rest are wheels of one line."""
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import environment


def make_wheel(folder, name, version, files=()):
    """A wheel of a package with __init__.py and these files {path: text}."""
    package, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    texts = {f"{package}/__init__.py": f"version = '{version}'\n", **dict(files),
             f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
             f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in texts.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*texts, f"{info}/RECORD"]))


@pytest.fixture
def new_machine(tmp_path):
    """new_machine(*command, **settings) runs setup.sh, or a command, in a repository that nothing is installed for.

    pip finds two builds of torch, a torchaudio whose import fails while it has its extension, and nothing else. Python
    is the one below the virtual environment that the tests run in.
    """
    wheels, repository = tmp_path / "wheels", tmp_path / "repo"
    wheels.mkdir()
    make_wheel(wheels, "torch", "2.13.0+cpu")
    (tmp_path / "cuda").mkdir()
    make_wheel(tmp_path / "cuda", "torch", "2.13.0")
    make_wheel(wheels, "torchaudio", "2.11.0", {
        "torchaudio/__init__.py": "import pathlib\nif (pathlib.Path(__file__).parent / 'lib' / '_x.so').exists():\n"
                                  "    raise OSError('libcudart.so.13: cannot open shared object file')\n",
        "torchaudio/lib/_x.so": ""})
    shutil.copytree(ROOT / "launch", repository / "launch")
    (repository / "requirements.txt").write_text("torch>=2.11\ntorchaudio==2.11.0     # reason\n")
    (repository / "requirements.lock").write_text("torchaudio==2.11.0\n")
    (repository / "pyproject.toml").write_text("[project.optional-dependencies]\ndemo = []\nall = ['x[demo]']\n")
    (tmp_path / "pip.conf").write_text("[global]\nno-index = true\n")
    python = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")

    def run(*command, links=("wheels",), **settings):
        kept = {name: value for name, value in environment().items()
                if not name.startswith(("PIP_", "TORCH_", "PYTHON", "VIRTUAL_ENV", "VERSIONS"))}
        return subprocess.run(command or ["bash", str(repository / "launch" / "setup.sh")], text=True,
                              capture_output=True, timeout=PATIENCE_S, cwd=tmp_path, env={
                                  **kept, "PYTHON": python, "VENV": "", "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
                                  "PIP_FIND_LINKS": " ".join(str(tmp_path / name) for name in links), **settings})
    run.folder, run.repository, run.python = tmp_path, repository, python
    return run


@pytest.mark.slow
def test_set_up_installs_once_and_mends_torchaudio(new_machine):
    done = new_machine()
    assert done.returncode == 0, done.stderr
    venv = new_machine.repository / ".venv"
    assert f"installing torch 2.13.0 and requirements.txt (locked) into {venv}" in done.stdout
    assert "CUDA with it: about 3 GB to download" in done.stdout and "TORCH_CPU=1 takes one without" in done.stdout
    assert "removed torchaudio's CUDA extension" in done.stdout
    again = new_machine()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert "there is no nowhere or no " in new_machine(CC="nowhere").stdout      # a GPU's kernels need it
    (new_machine.repository / "requirements.txt").write_text("torch>=2.11\n")
    make_wheel(new_machine.folder / "wheels", "torchaudio", "2.12.0")
    done = new_machine()
    assert done.returncode == 0 and "installing" in done.stdout and "GB" not in done.stdout     # torch is there
    pip = [venv / "bin" / "pip", "list", "--format", "freeze"]
    assert "torchaudio==2.11.0\n" in subprocess.run(pip, text=True, capture_output=True).stdout     # locked


@pytest.mark.slow
def test_torch_cpu_asks_its_own_index_for_torch_alone(new_machine):
    """pip's own indexes have all but torch; the other one has torch and a torchaudio that must not be taken. Where that
    one is not to be found, no build with CUDA is taken either.
    """
    index, none = new_machine.folder / "index", f"file://{new_machine.folder}/none"
    done = new_machine(TORCH_CPU="1", TORCH_INDEX=none, links=("cuda",))
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        f"setup: error: no torch==2.13.0+cpu where pip looks, nor at TORCH_INDEX={none}; "
        "TORCH_CPU=0 takes one with CUDA")
    assert not (new_machine.repository / ".venv" / "installed").exists()
    for name, version in (("torch", "2.13.0+cpu"), ("torchaudio", "2.11.0+cpu")):
        (index / name).mkdir(parents=True)
        make_wheel(index / name, name, version)
        wheel = next((index / name).glob("*.whl"))
        (index / name / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')
    (new_machine.folder / "pip.conf").write_text("")
    (new_machine.folder / "wheels" / "torch-2.13.0+cpu-py3-none-any.whl").unlink()
    done = new_machine(TORCH_CPU="1", TORCH_INDEX=f"file://{index}", PIP_INDEX_URL=f"file://{new_machine.folder}/empty")
    assert done.returncode == 0, done.stderr
    assert "torch without CUDA, so about 0.4 GB" in done.stdout and "about 3 GB" not in done.stdout
    python = new_machine.repository / ".venv" / "bin" / "python"
    said = subprocess.run([python, "-m", "pip", "list", "--format", "freeze"], text=True, capture_output=True).stdout
    assert "torch==2.13.0+cpu\n" in said and "torchaudio==2.11.0\n" in said


@pytest.mark.slow
def test_which_versions_are_installed(new_machine):
    """Of three that pip finds; an extra comes along, and another choice in the same environment is made true."""
    for version in ("1.0", "1.1", "1.2", "2.0"):
        make_wheel(new_machine.folder / "wheels", "tqdm", version)
        make_wheel(new_machine.folder / "wheels", "pytest", version)
    make_wheel(new_machine.folder / "wheels", "torch", "2.11.0")
    folder = new_machine.repository
    (folder / "requirements.txt").write_text("torch>=2.11,<2.15\ntqdm>=1.0,<2     # 2 breaks\n")
    (folder / "pyproject.toml").write_text("[project.optional-dependencies]\ntest = ['pytest<2']\n")
    (folder / "requirements.lock").write_text("tqdm==1.1\npytest==1.1\nabsent==7\n")
    listing = [new_machine.folder / "mine" / "bin" / "pip", "list", "--format", "freeze"]
    for versions, torch, package, extra in (("newest", "2.13.0+cpu", "1.2", "1.2"),
                                            ("oldest", "2.11.0", "1.0", "1.2")):    # extras have no oldest
        done = new_machine(VERSIONS=versions, VENV="mine")
        assert done.returncode == 0, done.stderr
        said = subprocess.run(listing, text=True, capture_output=True).stdout.split()
        assert {f"torch=={torch}", f"tqdm=={package}", f"pytest=={extra}"} <= set(said), versions


def test_a_wrong_choice_of_versions(new_machine):
    done = new_machine(VERSIONS="new")
    assert (done.returncode, done.stdout, done.stderr) == (
        1, "", "setup: error: VERSIONS=new: locked, newest or oldest\n")


def test_the_lock_has_every_package():
    """requirements.lock names what an environment of the suite has, at one version for each Python."""
    names = [re.match("[a-z0-9-]+(?===)", line)[0] for line in (ROOT / "requirements.lock").read_text().splitlines()
             if not line.startswith("#")]
    direct = [re.match("[a-z0-9-]+", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines()
              if not line.startswith("#")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    direct += [re.match("[a-z0-9-]+", line)[0] for lines in extras.values() for line in lines]
    assert set(direct) - set(names) == {"torch", "flat-trainers"}
    assert not [name for name in names if name.startswith(("torch-", "nvidia", "triton"))]


def debian_python(new_machine):
    """A python without ensurepip, as Debian and Ubuntu have it; returns its PYTHON."""
    (new_machine.folder / "no" / "ensurepip").mkdir(parents=True)
    (new_machine.folder / "no" / "ensurepip" / "__init__.py").write_text("raise ImportError\n")
    path = new_machine.folder / "python3"
    path.write_text(f'#!/bin/bash\nPYTHONPATH="{new_machine.folder}/no" exec "{new_machine.python}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_python_without_venv_is_one_line(new_machine):
    done = new_machine(PYTHON=debian_python(new_machine))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "cannot make a venv: sudo apt-get install python3-venv, or set PYTHON" in done.stderr


def test_a_missing_python_is_one_line(new_machine):
    done = new_machine(PYTHON="/nowhere/python3")
    assert (done.returncode, done.stdout, done.stderr) == (
        1, "", "setup: error: /nowhere/python3 is missing or older than 3.11; set PYTHON=python3.11\n")


@pytest.mark.slow
def test_venv_none_installs_nothing(new_machine):
    done = new_machine(VENV="none")         # the environment that the tests run in
    assert done.returncode == 0 and "installing" not in done.stdout, done.stderr
    assert not (new_machine.repository / ".venv").exists() and not (new_machine.repository / "none").exists()
