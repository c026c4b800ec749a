"""What a run loads of this repository: an option that is off imports nothing."""
import re
import subprocess
import sys

import pytest

from tests.helpers.trainer import ROOT

# after the run: files of ours in sys.modules, with their lines
COUNT = """
import pathlib, runpy, sys
root, script = pathlib.Path(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
files = {pathlib.Path(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
for path in sorted(files | {pathlib.Path(script)}):
    if path.is_relative_to(root) and path.suffix == ".py":
        print("LOADED", path.relative_to(root), len(path.read_text().splitlines()))
"""
# script: most files, most lines, flags, files (regular expression) that only other flags need
ROWS = {"diffusion/train_bd3lm.py": (
    32, 7_450, "--demo 100 --model_size nano --max_steps 1 --report_to none --num_workers 0 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 1 --eval_repeats 1",
    "diffusion/(decoder|official|init_from|export_bd3lm|sampler|answers|accuracy|clip_search|plan).py|common/(auto|"
    "hub|report|adapters|export).py")}


@pytest.mark.slow
@pytest.mark.parametrize("script", ROWS)
def test_a_plain_run_loads_what_it_uses(script, tmp_path):
    most_files, most_lines, flags, others = ROWS[script]
    done = subprocess.run([sys.executable, "-c", COUNT, ROOT, ROOT / script, *flags.split(), "--output_dir",
                           tmp_path / "out"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = {name: int(n) for name, n in re.findall(r"^LOADED (\S+) (\d+)$", done.stdout, re.MULTILINE)}
    assert script in loaded
    assert not [name for name in loaded if re.fullmatch(others, name)], "only flags that are off need these"
    largest = "; ".join(f"{name} {n}" for name, n in sorted(loaded.items(), key=lambda item: -item[1]))
    assert len(loaded) <= most_files, largest
    assert sum(loaded.values()) <= most_lines, largest
