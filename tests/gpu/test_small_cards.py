"""A card without bfloat16 and flash attention (sm_75: a T4), on no GPU: our kernels in float16, and what takes their place.

Needs triton, as test_kernels.py does.
"""
import json
import os
import subprocess
import sys

import pytest

from bench import fake_cuda, measure
from tests.gpu.test_kernels import narrow, why_not
from tests.helpers.trainer import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{case: what small_cards.py found}."""
    folder = tmp_path_factory.mktemp("small")
    env = os.environ | fake_cuda.environment(folder) | measure.MALLOC | {
        "TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "TRITON_DISABLE_LINE_INFO": "1",
        "PYTHONPATH": os.environ.get("TRITON", "")}
    done = subprocess.run([sys.executable, ROOT / "tests/gpu/small_cards.py"], env=env, cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_functions_spill_nothing_on_sm_75(found):
    functions = {name: case for name, case in found.items() if name.endswith("_kernel")}
    assert len(functions) == 8
    for name, case in functions.items():
        assert case["kernels"] and not case["breaks"], name
        assert not [kernel["name"] for kernel in case["kernels"] if kernel["spilled"]], name
        assert "cross_entropies" in name or not narrow(case), name


def test_sdpa_takes_the_place_of_flash_attention_and_says_so_once(found):
    """And without the look at the GPU it would not: varlen_attn would fail there."""
    assert found["attention"]["taken"] == ["_attention_by_sample", "_attention_by_document"]
    assert found["attention"]["said"] == "notice     no flash attention (sm_75): SDPA, sample by sample\n"
    assert found["attention, nobody looks"]["taken"] == ["varlen_attn"] * 2
