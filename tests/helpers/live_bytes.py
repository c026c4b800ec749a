"""What a real step leaves in memory, for comparison with what a plan says."""
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations made inside this context: now, and at most. `known` tensors do not count."""

    def __init__(self, known):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known | self.sizes.keys():
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata)
        return out

    def gone(self, key):
        self.now -= self.sizes.pop(key)
