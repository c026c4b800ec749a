"""core.dist: what the trainers' own tests do not reach."""
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from core import dist


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
