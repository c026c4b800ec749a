"""What an ordinary run of the trainer has to read: an option that is off imports nothing."""
import subprocess
import sys
from pathlib import Path

from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT, trainer_command

LINES = 9_500           # of all files together
# LoRA on ChatML whose audio is in the cache: no other format, no TTS 3, no judge, no plan of memory
FILES = {"train_v2_ddp.py", "data.py", "lora.py"} | {f"speech/{name}.py" for name in (
    "__init__", "choices", "data_flags", "data/__init__", "data/code_cache", "data/codes", "data/conversations",
    "data/dataset", "data/rows", "data/text_normalization", "model/__init__", "model/labels", "model/loss", "model/v2",
    "model/versions", "model/weights")} | {f"common/{name}.py" for name in (
        "__init__", "adapters", "checkpoint", "distributed", "flags", "fused", "hub", "indexing", "json_files",
        "lifetime", "loading", "memory", "metrics", "optim", "packing", "plan", "problems", "recomputation", "run",
        "run_lock", "tensor_files", "text", "verdict", "watchdog")}
WATCH = """
import atexit, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, {root!r})
atexit.register(lambda: print("loaded", *sorted({{
    file for module in list(sys.modules.values())
    if (file := getattr(module, "__file__", None) or "").startswith({root!r}) and file.endswith(".py")}}), sep="\\n"))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_ordinary_run_loads_what_it_needs(tiny, tmp_path):
    command = trainer_command(tiny, tmp_path / "out", "--use_lora", "--max_steps", 2)
    if not tiny.codes.exists():     # no test before this one has encoded the clips
        assert subprocess.run(trainer_command(tiny, tmp_path / "first", "--max_steps", 1)).returncode == 0
    done = subprocess.run([sys.executable, "-c", WATCH.format(root=f"{ROOT}/"), *command[1:]], cwd=tmp_path, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S)
    assert done.returncode == 0 and "done       step 2" in done.stdout, done.stdout[-4000:]
    paths = map(Path, done.stdout.partition("loaded\n")[2].split())
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths
             if not path.is_relative_to(Path(sys.prefix))}
    assert "train_v2_ddp.py" in lines and not lines.keys() - FILES, f"too many: {sorted(lines.keys() - FILES)}"
    assert sum(lines.values()) <= LINES, f"{sum(lines.values())} lines; largest: {sorted(lines, key=lines.get)[-10:]}"
