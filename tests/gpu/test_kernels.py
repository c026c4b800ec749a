"""torch.compile's code of our kernels for sm_90, compiled without a GPU (compiled.py).

This needs triton: installed, or in the folder TRITON.
"""
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from core import dist
from tests.helpers.trainer import ROOT

HAVE_TRITON = bool(importlib.util.find_spec("triton") or os.environ.get("TRITON"))


def test_no_kernel_reduces_rows_and_columns_at_once():
    """With torch's default, an H200 left gradients of the DiT's modulations unwritten: norms of 1,333 instead of 14."""
    dist.compile_layers([])
    assert torch._inductor.config.triton.mix_order_reduction is False


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_TRITON, reason="needs the package triton, or its folder in TRITON")
def test_kernels_read_16_bytes_at_a_time_and_spill_nothing(tmp_path):
    """Cross-entropy reads 8, and 2 of the label's logit. The planted fault is dynamic=True, which reads 2 at a time."""
    env = os.environ | {"TRITON_CACHE_DIR": f"{tmp_path}/triton", "TRITON_DISABLE_LINE_INFO": "1",
                        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/inductor", "PYTHONPATH": os.environ.get("TRITON", "")}
    done = subprocess.run([sys.executable, "tests/gpu/compiled.py"], env=env, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    cases = {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert len(cases) == 2
    for name, case in cases.items():
        narrow = [kernel["accesses"].get("b16", 0) for kernel in case["kernels"]]
        if "symbolic" in name:
            assert any(narrow) or any(kernel["divisions"] for kernel in case["kernels"]), name
            continue
        assert case["graphs"] == len(case["kernels"]) == 4 and not case["breaks"], name
        for kernel in case["kernels"]:
            assert not kernel["spilled"] and not kernel["divisions"], (name, kernel)
        assert narrow == [1, 0, 1, 0] and all("v2.b32" in kernel["accesses"] for kernel in case["kernels"]), name
