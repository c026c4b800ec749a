"""core.dist: what the trainers' own tests do not reach."""
import os
import subprocess
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from core import dist
from tests.helpers.trainer import ROOT

FAILS = """
import os, time
from core import dist
from core.cli import UserError
world = dist.init(60, 60)
if world.rank == 1:
    raise UserError("train.json: cannot be read")
time.sleep(600)
"""


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
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = Outer()
        dist.compile_layers([ddp.layer], backend=backend)
        DistributedDataParallel(ddp, bucket_cap_mb=1)(torch.ones(2, 600)).sum().backward()
        assert len(pieces) == 1
        sharded = Outer()
        world = dist.World(device=torch.device("cpu"), limit=limit)
        dist.shard(sharded, [sharded.layer], world, shard_size=1)
        mesh = next(sharded.parameters()).device_mesh
        for group in mesh.get_all_groups():
            assert group._get_backend(torch.device("cpu")).options._timeout == limit
    finally:
        torch_dist.destroy_process_group()
