"""bench/: gpu.py runs tiny shapes on the CPU; the tables in the documents match the result files."""
import json
import os
import subprocess
import sys

import pytest

from tests.helpers.trainer import ROOT


@pytest.mark.slow
def test_a_wrong_run_is_found(quick_python, tmp_path):
    """The first gradient norm is 1 % off the reference: fp32 fails, bf16 passes."""
    code = f"import torch, runpy, sys\nsys.executable = {quick_python!r}\n" \
           "runpy.run_path('bench/gpu.py', run_name='__main__')"        # its children have the same Python

    def gpu(*words):
        done = subprocess.run([quick_python, "-c", code, *map(str, words)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, env=os.environ | {"SHAPES": "tiny"})
        return done.returncode, done.stdout
    status, output = gpu("refs", tmp_path, "--only", "chats lora")
    assert status == 0, output
    refs = json.loads((tmp_path / "refs.json").read_text())
    refs["chats lora"][0][1] *= 1.01
    (tmp_path / "refs.json").write_text(json.dumps(refs))
    status, output = gpu("right", tmp_path, "--only", "(fp32|bf16)$")
    assert status == 1 and output.rstrip().endswith("error: failed: chats lora fp32"), output
    assert output.count("| yes |") == output.count("| NO |") == 1


def test_readme_and_docs_show_the_result_files():
    assert (ROOT / "docs" / "speed.md").read_text().count("<!-- table ") > 1
    subprocess.run([sys.executable, ROOT / "bench" / "table.py", "--check"], check=True)
