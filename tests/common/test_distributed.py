"""distributed.py: what the trainers' own tests do not reach."""
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import checkpoint, distributed, tensor_files
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

FAILS = """
import os
from common import distributed
with distributed.one_clear_error():
    if os.environ["RANK"] == "1":
        raise distributed.UserError("train.json: cannot be read")
    distributed._give_way(600)
"""

def behind_a_slow_disk(folder):
    """A rank that reads a base and writes checkpoints, rank 0 for longer than a collective may take."""
    world = distributed.init(1, 60)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), None)
    tensor = torch.zeros(3)

    def read():
        time.sleep(1.5)
        tensor.fill_(7)

    def write(path):
        time.sleep(1.5 if world.is_main else 0)
        path.write_text("x")

    tensor_files.read_once(world, tensor, read)
    assert tensor.tolist() == [7, 7, 7]
    writer = checkpoint.Writer(world, folder)
    for step in (1, 2):
        writer.begin(step)
        dist.all_reduce(torch.ones(1))
        writer.save(step, {f"{world.rank}.txt": write}, {})
    writer.finish()
    print("saved")


@pytest.mark.slow
def test_a_slow_disk_of_one_rank_is_waited_for(pool, tmp_path):
    statuses, output = pool.run(2, f"{__name__}.behind_a_slow_disk", str(tmp_path))
    assert statuses == [0, 0] and output.count("saved") == 2, output[-4000:]


@pytest.mark.slow
def test_the_last_lines_of_torchrun_say_why(quick_python, tmp_path):
    """Of one rank; what all find at once is in test_bad_input.py. The line stands there once more, by itself."""
    (tmp_path / "fails.py").write_text(FAILS)
    done = subprocess.run([quick_python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                           tmp_path / "fails.py"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHON_EXEC": quick_python})
    line = "error: train.json: cannot be read"
    assert done.returncode == 1 and done.stdout.splitlines().count(line) == 1, done.stdout
    assert any(last.split() == ["traceback", ":", *line.split()] for last in done.stdout.splitlines()[-5:]), done.stdout


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
        "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_VEC_ISA_OK": "1"}        # no trial of each kind of instructions, which takes seconds

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


def test_meshes_keep_the_time_limit_and_compiled_layers_stay_whole_under_ddp():
    """What torch does otherwise: groups of a mesh wait 10 minutes, DDP's buckets cut compiled layers."""
    pieces = []

    def backend(graph, _):
        pieces.append(graph)
        return graph.forward

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(600, 600) for _ in range(4)])     # 1.4 MB each

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            return self.layer(x)

    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = Outer()
        distributed.compile_layers([ddp.layer], backend=backend)
        DistributedDataParallel(ddp, bucket_cap_mb=1)(torch.ones(2, 600)).sum().backward()
        assert len(pieces) == 1
        sharded = Outer()
        world = distributed.World(device=torch.device("cpu"), limit=limit)
        distributed.shard(sharded, [sharded.layer], world, size=1)
        mesh = next(sharded.parameters()).device_mesh
        for group in mesh.get_all_groups():
            assert group._get_backend(torch.device("cpu")).options._timeout == limit
    finally:
        dist.destroy_process_group()
