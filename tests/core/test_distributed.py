"""core.dist: cases that the tests of the trainers do not reach."""
import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from core import dist
from tests.helpers.trainer import ROOT


def test_a_rank_that_crashes_prints_its_traceback_and_ends():
    """A thread still waits. If the hook failed, the process would not end."""
    program = """
import threading
from core import dist
dist.dist.init_process_group("gloo", store=dist.dist.HashStore(), rank=0, world_size=1)
sys.excepthook = dist.report_error
threading.Thread(target=threading.Event().wait).start()
raise ValueError("bad")
"""
    done = subprocess.run([sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{program}"],
                          text=True, capture_output=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("rank 0 failed:\n  Traceback"), done.stderr
    assert "\n  ValueError: bad\n" in done.stderr and "excepthook" not in done.stderr


def test_meshes_keep_the_time_limit_and_compiled_layers_stay_whole_under_ddp():
    """torch's defaults differ: groups of a mesh wait 10 minutes, and DDP's buckets split compiled layers."""
    pieces = []

    def backend(graph, _):
        pieces.append(graph)
        return graph.forward

    class Layer(nn.Sequential):
        def forward(self, x):       # torch.compile skips the frame of torch's own forward
            return super().forward(x)

    def model_of_one_layer():
        return nn.Sequential(Layer(*(nn.Linear(600, 600) for _ in range(4))))     # 1.4 MB each
    limit = timedelta(seconds=77)
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = model_of_one_layer()
        dist.compile_layers([ddp[0]], backend=backend)
        DistributedDataParallel(ddp, bucket_cap_mb=1)(torch.ones(2, 600)).sum().backward()
        assert len(pieces) == 1
        sharded = model_of_one_layer()
        world = dist.World(device=torch.device("cpu"), limit=limit)
        dist.shard(sharded, [sharded[0]], world, shard_size=1)
        mesh = next(sharded.parameters()).device_mesh
        for group in mesh.get_all_groups():
            assert group._get_backend(torch.device("cpu")).options._timeout == limit
    finally:
        torch_dist.destroy_process_group()


def test_nodes_that_counted_other_restarts_join():
    """torchrun counts a restart only on the node whose rank died. Its store keeps the keys of the first start."""
    store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = "from core import dist; assert dist.all_gather(dist.init(5), 0) == [0, 0]; dist.finish()"
    for restarts in ("00", "01"):
        nodes = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": restarts[rank], "RANK": str(rank),
            "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}) for rank in range(2)]
        assert [node.wait(120) for node in nodes] == [0, 0]
