"""The documents' tables are what the result files say, and nothing else."""
import subprocess
import sys

from tests.helpers.trainer import ROOT


def test_readme_and_docs_show_what_the_result_files_say():
    assert (ROOT / "docs" / "speed.md").read_text().count("<!-- table ") > 1
    subprocess.run([sys.executable, ROOT / "bench" / "table.py", "--check"], check=True)
