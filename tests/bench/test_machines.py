"""bench/machines.sh in a repository of small tests: each file under each setting once, races several times."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.trainer import ROOT

TESTS = {"tests/test_settings.py": """
import os, pytest
def test_settings():
    with open(os.environ["SEEN"], "a") as f:
        f.write(os.environ.get("ATEN_CPU_CAPABILITY", "as it is") + "\\n")
@pytest.mark.skip(reason="no such thing here")
def test_skipped():
    pass
""", "tests/more/test_race.py": """
import os, pytest
@pytest.mark.RACE
def test_race():
    assert not os.environ.get("BROKEN")
def test_other():
    pass
""".replace("RACE", "race")}       # machines.sh looks for the words in this file, too


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with machines.sh, these tests, and nothing to set up."""
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    root = tmp_path / "repository"
    (root / "bench").mkdir(parents=True)
    for name in ("__init__.py", "machines.sh", "machines.py", "measure.py"):
        shutil.copy(ROOT / "bench" / name, root / "bench" / name)
    others = {"launch/setup.sh": "", ".gitignore": "__pycache__", "pytest.ini": "[pytest]\nmarkers = race\n"}
    for name, text in {**TESTS, **others}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    commit(root)
    return root


def commit(root):
    for words in ("add .", "-c user.name=a -c user.email=a@b commit -qm tests"):
        subprocess.run(["git", *words.split()], cwd=root, check=True)


def machines(repository, settings, **environment):
    """(exit status, what it said, the report) of a run."""
    work = repository.parent
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "bench/machines.sh"], cwd=repository, text=True, capture_output=True, env={
        **os.environ, "PATH": path, "VENV": "none", "PYTHON312": "none", "SETTINGS": settings, "REPEATS": "2",
        "COMMIT": "HEAD", "WORK_DIR": str(work / "work"), "RESULTS": str(work / "results"), "SEEN": str(work / "seen"),
        **environment})
    report = work / "results" / "machines-cpu.json"
    return done.returncode, done.stderr, json.loads(report.read_text()) if report.exists() else None


def test_parts_are_run_once_and_counted(repository):
    status, said, report = machines(repository, "as-is avx2 oldest", BROKEN="1")
    rows = {row[0]: row[2:6] for row in report["tables"]["settings"]["rows"]}
    found = [2, 2, 1, 1]
    assert status == 1 and rows == {"as is": found, "AVX2": found, "the oldest packages": [0, 0, 0, 0]}, said
    assert (repository.parent / "seen").read_text().split("\n") == ["as it is", "avx2", ""]
    assert report["settings"]["as-is"]["skips"] == {"no such thing here": 1}
    assert report["settings"]["oldest"]["why"] == "no Python 3.12 (PYTHON312)"
    assert said.count("FAILED") == 2 and "machines: as-is tests/more/test_race.py: FAILED" in said
    status, said, report = machines(repository, "as-is races", AGAIN="1")       # what failed, and the races
    rows = {row[0]: row[2:6] for row in report["tables"]["settings"]["rows"]}
    assert rows["as is"] == [2, 3, 0, 1] and rows["AVX2"] == found and rows["every race 20 times"] == [1, 2, 0, 0]
    assert status == 1 and said.count("passed") == 3 and "settings" not in said
    assert (repository.parent / "seen").read_text().split("\n") == ["as it is", "avx2", ""]


def test_parts_of_an_earlier_commit_count_where_nothing_has_changed(repository):
    for name, text in {"tests/helpers/chain.py": "import link", "tests/helpers/link.py": "",
                       "tests/more/test_chain.py": "'chain'\ndef test_this(): pass",
                       "tests/helpers/deep/tool.sh": "", "tests/more/test_deep.py": "'deep'\ndef test_this(): pass",
                       "tests/more/test_imports.py": "from test_race import test_other  # noqa"}.items():
        (repository / name).parent.mkdir(exist_ok=True, parents=True)
        (repository / name).write_text(text)
    commit(repository)
    machines(repository, "as-is")
    changed = repository / "tests/more/test_race.py"
    changed.write_text(changed.read_text().replace("def test_other():", "def test_new(): pass\ndef test_other():"))
    for name in ("link.py", "deep/tool.sh"):
        (repository / "tests/helpers" / name).write_text("# changed")
    commit(repository)
    status, said, report = machines(repository, "as-is", SINCE="HEAD~")
    assert status == 0 and list(report["settings"]["as-is"]["since"].values()) == [1], said
    assert all(f"test_{name}.py: passed" in said for name in ("race", "imports", "chain", "deep"))
    assert "settings" not in said
    assert [row[2:6] for row in report["tables"]["settings"]["rows"]] == [[5, 7, 0, 1]]
    (repository / "launch/setup.sh").write_text("# changed")
    commit(repository)
    shutil.rmtree(repository.parent / "results")
    status, said, report = machines(repository, "as-is", SINCE="HEAD~")
    assert status == 1 and report is None and "error: SINCE: launch/setup.sh has changed since" in said
