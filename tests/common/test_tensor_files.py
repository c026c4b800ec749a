"""tensor_files.whole on real ranks."""
import pytest
import torch
from torch import nn

from common import distributed, tensor_files

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks, size", [(1, 0), (2, 0), (3, 0), (4, 0), (4, 2)])     # 4, 2: two copies, two shards
def test_whole_is_what_was_shared_out(pool, ranks, size):
    statuses, output = pool.run(ranks, f"{__name__}.gather", size)
    assert not any(statuses), output
    assert output.count("gathered 10") == ranks and "FutureWarning" not in output


def gather(size):
    world = distributed.init(60, 60, alone_too=True)
    torch.manual_seed(1)
    layers = [nn.Linear(7, rows) for rows in (1, 2, 3, 5, 8)]       # rows that the ranks share evenly or not
    expected = [tensor.detach().clone() for layer in layers for tensor in layer.parameters()]
    distributed.shard(nn.Sequential(*layers), layers, world, size=size)
    found = [tensor_files.whole(tensor) for layer in layers for tensor in layer.parameters()]
    for one, other in zip(found, expected, strict=True):
        assert type(one) is torch.Tensor and not one.requires_grad and torch.equal(one, other)
    print(f"gathered {len(found)}")
    distributed.finish()
