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
    (repository / "launch" / "requirements.lock").write_text("torchaudio==2.11.0\n")
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
    assert "torch with CUDA: 3 GB to download" in done.stdout and "TORCH_CPU=1 takes one without" in done.stdout
    assert "removed torchaudio's CUDA extension" in done.stdout
    again = new_machine()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    (new_machine.repository / "requirements.txt").write_text("torch>=2.11\n")
    make_wheel(new_machine.folder / "wheels", "torchaudio", "2.12.0")
    done = new_machine()
    assert done.returncode == 0 and "installing" in done.stdout and "GB" not in done.stdout     # torch is there
    pip = [venv / "bin" / "pip", "list", "--format", "freeze"]
    assert "torchaudio==2.11.0\n" in subprocess.run(pip, text=True, capture_output=True).stdout     # locked


def test_the_lock_has_every_package():
    """launch/requirements.lock names what an environment of the suite has, at one version for each Python."""
    names = [re.match("[a-z0-9-]+(?===)", line)[0] for line in (ROOT / "launch" / "requirements.lock").read_text().splitlines()
             if not line.startswith("#")]
    direct = [re.match("[a-z0-9-]+", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines()
              if not line.startswith("#")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    direct += [re.match("[a-z0-9-]+", line)[0] for lines in extras.values() for line in lines]
    assert set(direct) - set(names) == {"torch", "flat-trainers", "bitsandbytes", "vllm", "speechmos", "onnxruntime"}
    assert not [name for name in names if name.startswith(("torch-", "nvidia", "triton"))]
