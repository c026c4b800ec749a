"""bench/machines.sh in a repository of small tests: each file under each setting once, races several times."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.trainer import ROOT

pytestmark = pytest.mark.slow

TESTS = {"tests/test_settings.py": """
import os, pytest
def test_settings():
    with open(os.environ["SEEN"], "a") as f:
        f.write(os.environ.get("ATEN_CPU_CAPABILITY", "as it is") + "\\n")
@pytest.mark.skip(reason=f"no {os.getcwd()}/thing here")
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
    for name in ("__init__.py", "machines.sh", "machines.py", "measure.py", "reached.py"):
        shutil.copy(ROOT / "bench" / name, root / "bench" / name)
    others = {"launch/setup.sh": "", ".gitignore": "__pycache__", "pytest.ini": "[pytest]\nmarkers = race\n",
              "README.md": ""}
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


def rows_of(report):
    """{setting: [test files, runs, passed, failed, skipped]}"""
    return {row[0]: row[3:8] for row in report["tables"]["settings"]["rows"]}


def test_parts_are_run_once_and_counted(repository):
    status, said, report = machines(repository, "as-is avx2 oldest", BROKEN="1")
    rows = rows_of(report)
    found = [2, 2, 2, 1, 1]
    assert status == 1 and rows == {"as is": found, "AVX2": found, "the oldest packages": [0, 0, 0, 0, 0]}, said
    assert (repository.parent / "seen").read_text().split("\n") == ["as it is", "avx2", ""]
    assert report["settings"]["as-is"]["skips"] == {"no thing here": 1}
    assert report["settings"]["oldest"]["why"] == "no Python 3.12 (PYTHON312)"
    assert said.count("FAILED") == 2 and "machines: as-is tests/more/test_race.py: FAILED" in said
    status, said, report = machines(repository, "as-is races", AGAIN="1")       # what failed, and the races
    rows = rows_of(report)
    assert rows["as is"] == [2, 2, 3, 0, 1] and rows["AVX2"] == found and rows["every race 20 times"] == [1, 2, 2, 0, 0]
    assert status == 1 and said.count("passed") == 3 and "settings" not in said
    assert (repository.parent / "seen").read_text().split("\n") == ["as it is", "avx2", ""]


def test_parts_of_another_machine_count_where_nothing_has_changed(repository):
    """The report is all that is left of it. Of races, what is missing is run; what failed, when it is asked for."""
    machines(repository, "as-is races", REPEATS="3", BROKEN="1")
    lines = repository.parent / "results" / "machines-parts.jsonl"
    text = lines.read_text()
    assert len(text.splitlines()) == 3

    def go_on(settings, **more):        # with another processor
        shutil.rmtree(repository.parent / "work")
        lines.write_text(re.sub('"cpu": "[^"]*"', '"cpu": "another"', text))
        return machines(repository, settings, **more)
    status, said, report = go_on("as-is races", REPEATS="5")
    assert status == 1 and said.count("test_race.py") == said.count("passed") == 2, said
    assert rows_of(report)["every race 20 times"] == [1, 5, 2, 3, 0] and rows_of(report)["as is"] == [2, 2, 2, 1, 1]
    cpus = {row[0]: row[2].split("; ") for row in report["tables"]["settings"]["rows"]}
    assert cpus["as is"] == ["another"] and len(cpus["every race 20 times"]) == 2
    status, said, report = go_on("as-is races", REPEATS="3", AGAIN="1")
    assert status == 0 and said.count("test_race.py") == said.count("passed") == 4, said
    assert rows_of(report) == {"as is": [2, 2, 3, 0, 1], "every race 20 times": [1, 3, 3, 0, 0]}


def test_parts_of_an_earlier_commit_count_where_nothing_has_changed(repository):
    """What is run again is what a change can touch: by imports, by strings, by a conftest.py, through other files."""
    alone = "\ndef test_this(): pass"
    for name, text in {"lib/deep.py": '"""used.py uses it."""', "lib/used.py": "def f():\n    from lib import deep",
                       "lib/other.py": "x = 'run used.py instead'", "run.sh": "# used.py\npython lib/used.py",
                       "tests/helpers/link.py": "import lib.used", "tests/one/conftest.py": "import tests.helpers.link",
                       "tests/one/test_beside.py": alone,
                       "tests/more/test_started.py": "X = 'bash run.sh'" + alone,
                       "tests/more/test_named.py": "X = 'lib.used.f'" + alone,
                       "tests/more/test_imports.py": "from test_race import test_other  # noqa",
                       "tests/more/test_other.py": "'used.py'\nX = 'other.py, unused.py'  # used.py" + alone}.items():
        (repository / name).parent.mkdir(exist_ok=True, parents=True)
        (repository / name).write_text(text)
    commit(repository)
    machines(repository, "as-is")

    def again(*changed):
        for name in changed:
            (repository / name).write_text((repository / name).read_text() + "\n# changed\n")
        commit(repository)
        status, said, report = machines(repository, "as-is")
        assert status == 0 and rows_of(report)["as is"][:2] == [7, 7], said
        return set(re.findall(r"/test_(\w+)\.py: passed", said))
    assert again("tests/more/test_race.py") == {"race", "imports"}
    assert again("lib/deep.py") == {"settings", "beside", "started", "named"}
    assert again("README.md", "tests/one/conftest.py") == {"beside"}
    assert again("launch/setup.sh") == {"settings"}
