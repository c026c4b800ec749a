"""A card without bfloat16 and flash attention (sm_75: a T4), on no GPU: our kernels in float16, and what takes their place.

Needs triton, as test_kernels.py does.
"""
import pytest

from tests.gpu.test_kernels import cases_of, narrow, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return cases_of("small_cards.py", tmp_path_factory.mktemp("small"))


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
