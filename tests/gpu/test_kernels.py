"""torch.compile's code of our kernels for sm_90, compiled without a GPU (compiled.py).

This needs triton: installed, or in the folder TRITON.
"""
import functools
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from core import dist, kernels
from tests.helpers.trainer import ROOT

HAVE_TRITON = bool(importlib.util.find_spec("triton") or os.environ.get("TRITON"))


def test_no_kernel_reduces_rows_and_columns_at_once():
    """With torch's default, an H200 left gradients of the DiT's modulations unwritten: norms of 1,333 instead of 14."""
    dist.compile_layers([])
    assert torch._inductor.config.triton.mix_order_reduction is False


@pytest.mark.parametrize("trial, message", [(0.0, "is used"), (1.0, "fails"), (None, "fails (no kernel here)")])
def test_flash_attention_3_is_tried_once_and_dropped_if_wrong(trial, message, monkeypatch, capsys):
    """trial: the error of its results; None: it raises."""
    state = []

    def results():
        if state and trial is None:
            raise RuntimeError("no kernel here")
        return torch.ones(3) + (trial if state else 0),
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name == "flash_attn_interface")
    monkeypatch.setattr(kernels.attention, "activate_flash_attention_impl", state.append)
    monkeypatch.setattr(kernels.attention, "restore_flash_attention_impl", state.clear)
    monkeypatch.setattr(kernels, "grouped_attention", results)
    monkeypatch.setattr(kernels, "use_flash3", functools.cache(kernels.use_flash3.__wrapped__))
    for _ in range(2):
        kernels.use_flash3()
    output = capsys.readouterr().out
    assert output.count("notice") == 1 and message in output and state == ["FA3"] * (trial == 0)


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
