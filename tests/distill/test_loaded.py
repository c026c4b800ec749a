"""An option that is off loads nothing: what an ordinary run of a trainer imports of this repository."""
import json
import subprocess
import sys

import pytest

from tests.helpers import chats
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT

LIMITS = {"distill/train_sft.py": (31, 7250)}       # files and their lines
COUNT = """import json, runpy, sys
from pathlib import Path
root, script, *flags = sys.argv[1:]
sys.argv, sys.path[0] = [f"{root}/{script}", *flags], str(Path(root, script).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
files = {m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
files = {Path(f).relative_to(root): len(Path(f).read_text().splitlines())
         for f in files if f.endswith(".py") and Path(f).is_relative_to(root)}
print(json.dumps({str(f): n for f, n in files.items()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", LIMITS)
def test_a_plain_run_loads_no_more_than_it_uses(tmp_path, script):
    chats.student(tmp_path / "model")
    chats.write(tmp_path / "chats.jsonl", chats.conversations(24))
    words = ["--model_path", tmp_path / "model", "--train_data_file", tmp_path / "chats.jsonl", "--output_dir",
             tmp_path / "out", "--max_steps", 1, "--report_to", "none", "--num_workers", 0,
             "--validation_split", 0.2]
    done = subprocess.run([sys.executable, "-c", COUNT, ROOT, script, *map(str, words)], text=True,
                          capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    files, lines = LIMITS[script]
    assert len(loaded) <= files and sum(loaded.values()) <= lines, sorted(loaded.items(), key=lambda f: f[1])
