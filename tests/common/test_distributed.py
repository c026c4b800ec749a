"""distributed.py: what the trainers' own tests do not reach."""
import os
import subprocess
import sys

import pytest

from common import distributed
from tests.helpers.trainer import ROOT

COMPILED = """
import sys

import torch

from common import distributed

class Layer(torch.nn.Module):
    def forward(self, x):
        return x.exp() + 1


layer, x = Layer(), torch.linspace(-1, 1, 64)
expected = layer(x)
for _ in sys.argv:
    torch._dynamo.reset()
    distributed.compile_layers([layer])
    torch.testing.assert_close(layer(x), expected)
print(torch.backends.cpu.get_cpu_capability(), torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64, 512])
def test_the_tree_brings_every_rank_to_rank_0(size):
    """As gather_on_main sends: leaves first, each rank what it has from its children and its own."""
    found = {rank: {rank} for rank in range(size)}
    for rank in reversed(range(size)):
        parent, children = distributed.tree(rank, size)
        assert all(distributed.tree(child, size)[0] == rank for child in children)
        assert len(children) <= (size - 1).bit_length()
        if rank:
            assert parent < rank
            found[parent] |= found[rank]
    assert found[0] == set(range(size)) and distributed.tree(0, size)[0] is None


@pytest.mark.slow
def test_compiled_layers_of_another_vector_width_are_not_taken_from_the_cache(tmp_path):
    """Two kinds of machines, which ATEN_CPU_CAPABILITY stands for, share torch's folder of compiled graphs."""
    (tmp_path / "compiled.py").write_text(COMPILED)
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"} | {
        "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def run(*again, **setting):
        done = subprocess.run([sys.executable, tmp_path / "compiled.py", *again], env=environment | setting, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout.splitlines()[-1].split()     # vector instructions, graphs found in the cache
    own, found = run("again")       # which is taken from there
    if own == "DEFAULT":
        pytest.skip("needs a processor with AVX2 or AVX-512")
    assert found == "1"         # so it is the width that keeps the next one from it
    assert run(ATEN_CPU_CAPABILITY="default") == ["DEFAULT", "0"]
