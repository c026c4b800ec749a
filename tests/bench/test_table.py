"""The documents' tables are what the result files say, and nothing else."""
import importlib.util

from tests.helpers.trainer import ROOT


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table = load("table")


def test_readme_and_docs_show_what_the_result_files_say():
    table.main(["--check"])
    speed = (ROOT / "docs" / "speed.md").read_text()
    assert len(table.BEGIN.findall(speed)) > 1, "docs/speed.md lost its tables"
