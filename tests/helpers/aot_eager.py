"""A script with torch.compile tracing as on a GPU, but building nothing: aot_eager.py SCRIPT [FLAG ...]"""
import functools
import runpy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
torch.compile = functools.partial(torch.compile, backend="aot_eager")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
