"""The CUDA path of each trainer's step, on a GPU that is not there (bench/rehearsal.py): two layers of full width.

What each case may launch, move and keep stands in counts.json, by version of torch; WRITE_COUNTS=1 pytest tests/gpu
writes what is found. Fewer is better: a number there only goes up with a reason.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import fake_cuda
from tests.helpers.trainer import ROOT

COUNTS = Path(__file__).parent / "counts.json"
VERSION = torch.__version__.partition("+")[0]
ALLOWED = "synchronize at core/optim.py"      # StepFlags.pop, one step late
KEPT = ("launches", "elementwise_gb", "peak_gib", "planned_gib")
PLAN = 0.1              # of the memory that --dry_run says

pytestmark = pytest.mark.skipif(bool(fake_cuda.why_not()), reason=fake_cuda.why_not() or "-")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{case, fault or kind of staging: what cases.py found}"""
    env = fake_cuda.environment(tmp_path_factory.mktemp("device"))
    done = subprocess.run([sys.executable, ROOT / "tests" / "gpu" / "cases.py"], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env=os.environ | env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if os.environ.get("WRITE_COUNTS"):
        known = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
        known[VERSION] = {line["case"]: {key: line[key] for key in KEPT}
                          for line in lines if "case" in line and "fault" not in line}
        cases = re.compile(r"{[^{}]*}")         # each on one line
        COUNTS.write_text(cases.sub(lambda found: " ".join(found[0].split()), json.dumps(known, indent=1)) + "\n")
    return {line.get("fault") or line.get("staging") or line["case"]: line for line in lines}


def known(case):
    counts = json.loads(COUNTS.read_text())
    if VERSION not in counts:
        pytest.skip(f"counts.json has no counts of torch {VERSION}")
    return counts[VERSION][case]


def worse(got, limit):
    """What is more than it may be, by name."""
    return [name for name, room in (("launches", 1), ("elementwise_gb", 1.001), ("peak_gib", 1.005))
            if got[name] > limit[name] * room]


CASES = json.loads(COUNTS.read_text())["2.13.0"] if COUNTS.exists() else {}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_step_waits_for_the_gpu(found, case):
    assert all(where.startswith(ALLOWED) for where in found[case]["waits"]), found[case]["waits"]
    assert len(found[case]["waits"]) == 1       # the ledger does see that one


@pytest.mark.parametrize("case", CASES)
def test_no_kernel_no_pass_over_memory_and_no_activation_is_added(found, case):
    assert not worse(found[case], known(case)), (found[case], known(case))


@pytest.mark.parametrize("case", CASES)
def test_every_product_has_its_operations(found, case):
    """addmm_ had none until 2026-11-26, so that bounds with adapters came out too high."""
    assert found[case]["no_flops"] == []


@pytest.mark.parametrize("case", CASES)
def test_peak_memory_is_what_the_dry_run_says(found, case):
    assert found[case]["peak_gib"] == pytest.approx(found[case]["planned_gib"], rel=PLAN), found[case]


@pytest.mark.parametrize("case", CASES)
def test_a_save_copies_all_and_makes_nobody_wait(found, case):
    save = found[case]["save"]
    assert not save["waits"] and not save["hazards"], save
    share = save["bytes"] / save["planned"]     # of rank 0, which alone has adapters; beside shards, what is not cut
    assert share == pytest.approx(1, rel=1e-4) if save["ranks"] == 1 else 1 / save["ranks"] <= share < 0.5, share


def test_copies_of_a_checkpoint_in_a_wrong_order_are_seen(found):
    assert found["as it is"] == {"staging": "as it is", "waits": {}, "hazards": {}, "saved": 40_004}
    for name, hazard in (("copies begin at once", "what is copied may not be there yet"),
                         ("training goes on at once", "what is being copied may change"),
                         ("files are written at once", "a copy is read before it is there")):
        assert [what for what in found[name]["hazards"] if what.startswith(hazard)], found[name]
    for name, wait in (("copies go to other memory", "unpinned copy from the GPU"),
                       ("copies are made by .cpu()", "blocking copy from the GPU")):
        assert [what for what in found[name]["waits"] if what.startswith(wait)] and not found[name]["saved"]


def test_faults_are_seen(found):
    """What no CPU test sees: each of these trains as before there."""
    waits = found["a value is read in each step"]["waits"]
    assert [where for where in waits if where.startswith("item at tests/gpu/cases.py")], waits
    assert "device" in found["a mask stays on the CPU"]["error"]
    for fault, what in (("gradients are added layer by layer", {"elementwise_gb"}),
                        ("an activation is kept twice", {"peak_gib"})):
        assert what <= set(worse(found[fault], known(found[fault]["case"]))), found[fault]
