"""Memory of a real step, to compare with a plan."""
import contextlib
import weakref
from argparse import Namespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import memory


class LiveBytes(TorchDispatchMode):
    """Current and peak bytes of tensors that operations make in this context, without those of a model and a batch."""

    def __init__(self, model, batch):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0
        fields = batch if isinstance(batch, tuple) else vars(batch).values()
        known = [*model.parameters(), *model.buffers(), *(v for v in fields if isinstance(v, torch.Tensor))]
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


def by_lengths(lengths):
    """Attention of packed documents of known lengths, for tensors with and without memory."""
    def attention(q, k, v, *_):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        documents = zip(*(t.transpose(0, 1)[None].split(lengths, dim=2) for t in (q, k, v)))
        out = [F.scaled_dot_product_attention(*document, is_causal=True) for document in documents]
        return torch.cat(out, dim=2)[0].transpose(0, 1)
    return attention


def run_flags(ranks=1, parallel="ddp", bf16=True, gradient_checkpointing=None, **more):
    """Flags of a dry run that change its memory."""
    return Namespace(ranks=ranks, parallel=parallel, bf16=bf16, gradient_checkpointing=gradient_checkpointing,
                     **{"gradient_accumulation_steps": 1, "compile": False, "shard_size": 0} | more)


def check_plan(empty, planned_loss, args, pack, model, batch, loss):
    """Check that a planned step with CPU kernels is within 3 % of a real step's peak, without weights and batch."""
    with mock.patch.object(memory, "gpu_kernels", lambda *_: contextlib.nullcontext()):
        planned = memory.step_bytes(empty, planned_loss, args, pack)
    with LiveBytes(model, batch) as real:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            value = loss(model, batch)
        value.backward()
    assert planned == pytest.approx(real.peak, rel=0.03)
