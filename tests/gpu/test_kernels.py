"""What torch.compile makes of the trainers' functions and layers for sm_90, on no GPU (compiled.py).

Needs triton, whose compiler needs no GPU: installed, or in the folder that TRITON names.
"""
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from bench import fake_cuda, measure
from tests.helpers.trainer import ROOT

# bytes that the fused kernels of one layer move, forward and backward, in GB: never more than this
LAYER_GB = {"speech": 2.75, "speech, float8": 3.34, "chat": 2.65, "blocks": 3.95}
DYNAMIC = ", every size symbolic"       # the planted fault


def why_not():
    if not (importlib.util.find_spec("triton") or os.environ.get("TRITON")):
        return "needs the package triton, or its folder in TRITON"
    return fake_cuda.why_not()


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


def cases_of(script, folder):
    """{case: what a script beside this file found}, in a process of its own with a fake device."""
    env = os.environ | fake_cuda.environment(folder) | measure.MALLOC | {
        "TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "TRITON_DISABLE_LINE_INFO": "1",
        "PYTHONPATH": os.environ.get("TRITON", "")}
    done = subprocess.run([sys.executable, ROOT / "tests" / "gpu" / script], env=env, cwd=ROOT,
                          text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of one process, where cases share what they compile."""
    return cases_of("compiled.py", tmp_path_factory.mktemp("compiled"))


def narrow(case):
    """[(kernel, its accesses of 2 bytes, its divisions)] of those that have any."""
    return [(kernel["name"], kernel["accesses"].get("b16", 0), kernel["divisions"])
            for kernel in case["kernels"] if kernel["accesses"].get("b16") or kernel["divisions"]]


def test_functions_read_16_bytes_at_a_time_and_spill_nothing(found):
    """On packs of three lengths: one graph for the first, one for all others."""
    functions = {name: case for name, case in found.items() if name.endswith("_kernel")}
    assert len(functions) == 8
    for name, case in functions.items():
        assert case["graphs"] <= 2 and not case["breaks"], name
        assert not [kernel for kernel in case["kernels"] if kernel["spilled"]], name
        assert not [kernel for kernel in case["kernels"] if kernel["divisions"]], name
        if "cross_entropies" not in name:       # those read one number a row besides
            assert not narrow(case), name
            assert all("v4.b32" in kernel["accesses"] for kernel in case["kernels"]), name


def test_symbolic_sizes_are_seen(found):
    """The planted fault: torch.compile(dynamic=True), as it stood here until November 2026."""
    for name in ("swiglu_kernel", "rotate_kernel"):
        assert narrow(found[name + DYNAMIC]), name


def test_attention_of_blocks_spills_nothing(found):
    """With the planted fault beside it: four warps, as torch has them by default."""
    case, planted = found["block attention"], found["block attention, 4 warps"]
    assert case["graphs"] == 2 and not case["breaks"]
    assert not [kernel["name"] for kernel in case["kernels"] if kernel["spilled"]]
    assert [kernel["name"] for kernel in planted["kernels"] if kernel["spilled"]]


def test_compiled_layers_stay_whole(found):
    """A layer of each trainer, those of LoRA with adapters on all linear layers, speech in float8 too:
    no break, no new graph. The planted fault asks the GPU for a number in the middle of a layer.
    """
    planted = found["speech, .item()"]
    assert planted["breaks"], planted
    for name, most in LAYER_GB.items():
        case = found[name]
        assert not case["error"] and not case["breaks"], (name, case["error"])
        # forward and backward, for one length and for all; rows of blocks have one length
        assert case["graphs"] == (2 if name == "blocks" else 4), name
        assert not [kernel["name"] for kernel in case["kernels"] if kernel["spilled"]], name
        assert 0 < case["gb_a_layer"] <= most, name
        assert not case["mixed"], name


def test_reductions_of_mixed_order_are_seen(found):
    """The planted fault: with torch's default the DiT's modulations get gradients that were never
    written (pytorch issue 193061), as an H200 showed.
    """
    assert found["blocks, mixed orders"]["mixed"]
