"""What a T4 (sm_75) would run of ours, as JSON lines for test_small_cards.py.

    python tests/gpu/small_cards.py         # in a process with bench/fake_cuda.py's device preloaded
"""
import contextlib
import functools
import io
import json
import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench import fake_cuda, sm90

fake_cuda.H200 |= {"name": "Tesla T4", "major": 7, "minor": 5, "total_memory": 15 * 2**30, "multi_processor_count": 40}
sm90.LIMITS |= {"max_threads_per_multi_processor": 1024, "shared_memory_per_block_optin": 65536,
                "shared_memory_per_multiprocessor": 65536}
sm90.Driver.get_current_target = lambda _: GPUTarget("cuda", 75, 32)
sm90.assembled = functools.partial(sm90.assembled, arch=75)
from core import document_attention, fp16
from speech.model import v2
from tests.gpu import compiled  # which patches torch

torch.cuda.get_device_capability = lambda *_: (7, 5)
torch.cuda.is_bf16_supported = lambda *_, **__: False


def attention(name, look):
    """Which function computes the packed attentions of speech and chats, with and without --fp16's look at the GPU;
    what was said. SDPA itself has no fake.
    """
    said, ends, taken = io.StringIO(), torch.tensor([0, 40, 64]), []
    for module, plain in ((v2, "_attention_by_sample"), (document_attention, "_attention_by_document")):
        for kind in (plain, "varlen_attn"):
            setattr(module, kind, lambda q, *_, kind=kind, **__: taken.append(kind) or torch.empty_like(q))
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), sm90.fake():
        with contextlib.suppress(NotImplementedError):      # its numbers have no place here
            if look:
                fp16.Scaler(torch.device("cuda"))
        q, k, v = (compiled.tensor(64, heads, 64) for heads in (8, 2, 2))
        v2.packed_attention(q, k, v, ends, 40, ends)
        document_attention.packed_attention(None, *(t.transpose(0, 1)[None] for t in (q, k, v)), None,
                                            cu_seq_lens_q=ends, max_length_q=40)
    print(json.dumps({"case": name, "taken": taken, "said": said.getvalue()}), flush=True)


def main():
    compiled.tensor.__kwdefaults__["dtype"] = torch.float16
    attention("attention, nobody looks", False)     # the planted fault
    attention("attention", True)
    compiled.ROWS = compiled.ROWS[:1]
    compiled.functions(compiled.FUNCTIONS)


if __name__ == "__main__":
    main()
