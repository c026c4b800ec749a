"""parallel.py: what the trainers' own tests do not reach."""
import os
import subprocess
import sys

import pytest

from tests.helpers.trainer import ROOT

COMPILED = """
import torch

from common import parallel

class Layer(torch.nn.Module):
    def forward(self, x):
        return x.exp() + 1


layer, x = Layer(), torch.linspace(-1, 1, 64)
expected = layer(x)
parallel.compile_layers([layer])
torch.testing.assert_close(layer(x), expected)
print(torch.backends.cpu.get_cpu_capability(), torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_compiled_layers_of_another_vector_width_are_not_taken_from_the_cache(tmp_path):
    """Two kinds of machines, which ATEN_CPU_CAPABILITY stands for, share torch's folder of compiled graphs."""
    (tmp_path / "compiled.py").write_text(COMPILED)
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"} | {
        "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def run(**setting):
        done = subprocess.run([sys.executable, tmp_path / "compiled.py"], env=environment | setting, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout.splitlines()[-1].split()     # vector instructions, graphs found in the cache
    own, found = run()
    if own == "DEFAULT":
        pytest.skip("needs a processor with AVX2 or AVX-512")
    assert found == "0" and run() == [own, "1"]         # so it is the width that keeps the next one from it
    assert run(ATEN_CPU_CAPABILITY="default") == ["DEFAULT", "0"]
