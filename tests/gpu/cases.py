"""The steps that test_rehearsal.py looks at, each as a JSON line; runs with bench/fake_cuda.py's device preloaded.

    python tests/gpu/cases.py
"""
import contextlib
import gc
import io
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench import fake_cuda, rehearsal
from common import distributed, step_memory, tensor_files
from core import low_rank
from diffusion import dit
from speech.model import v2

LORA, FULL, AGAIN = ("--use_lora",), (), ("--gradient_checkpointing",)
DROPOUT = ("--lora_dropout", 0.1)
TOKENS = ("--max_tokens_per_batch", 8192)
ROWS = ("--problems_per_batch", 64, "--gradient_accumulation_steps", 1)
# {name: (trainer, ranks, flags)}; each pair of {LoRA, full}, {ddp, fsdp}, {plain, recomputed} is in one of speech
CASES = {
    "speech, lora, ddp": ("speech", 1, (*TOKENS, *LORA, *DROPOUT)),
    "speech, lora, fsdp of 8, recomputed": ("speech", 8, (*TOKENS, *LORA, *DROPOUT, "--parallel", "fsdp", *AGAIN)),
    "speech, full, ddp, recomputed": ("speech", 1, (*TOKENS, *AGAIN)),
    "speech, full, fsdp of 8": ("speech", 8, (*TOKENS, "--parallel", "fsdp")),
    "speech 3, lora, ddp": ("speech3", 1, (*TOKENS, *LORA)),
    "chat, lora, ddp, recomputed": ("chat", 1, (*TOKENS, *LORA, "--parallel", "ddp", *AGAIN)),
    "chat, full, fsdp of 8, recomputed": ("chat", 8, (*TOKENS, "--parallel", "fsdp", *AGAIN)),
    "blocks, ddp": ("blocks", 1, ROWS),
    "blocks, fsdp of 8, recomputed": ("blocks", 8, (*ROWS, "--parallel", "fsdp", *AGAIN)),
}


def item(audio, n_audio, text, *rest):
    text.item()
    return total_loss(audio, n_audio, text, *rest)


def mask(doc, block, *rest):
    return attention_masks(doc, torch.zeros_like(block, device="cpu"), *rest)


def keep(ctx, rows, index, inverse):
    ctx.rows = rows.clone()
    return permute(ctx, rows, index, inverse)


total_loss, attention_masks, permute = v2.total_loss, dit.attention_masks, v2.Permute.forward
# {name: (case, (owner, attribute, faulty value))}
FAULTS = {
    "a value is read in each step": ("speech, lora, ddp", (rehearsal.train_v2_ddp, "total_loss", item)),
    "a mask stays on the CPU": ("blocks, ddp", (dit, "attention_masks", mask)),
    "gradients are added layer by layer": ("speech, lora, ddp", (low_rank, "joins", lambda layer: False)),
    "an activation is kept twice": ("speech, lora, ddp", (v2.Permute, "forward", staticmethod(keep))),
}


def waits_only(main):
    """Stream.wait_stream of MAIN alone, or of the other streams alone."""
    return lambda stream, other: wait_stream(stream, other) if (stream is fake_cuda.MAIN) == main else None


def at_once(tensors, stream):
    return {name: tensor.cpu() for name, tensor in tensors.items()}


wait_stream = fake_cuda.Stream.wait_stream
# {name: (owner, attribute, faulty value)} of the copies of a checkpoint
STAGING = {
    "as it is": (tensor_files, "to_host", tensor_files.to_host),
    "copies begin at once": (fake_cuda.Stream, "wait_stream", waits_only(True)),
    "training goes on at once": (fake_cuda.Stream, "wait_stream", waits_only(False)),
    "files are written at once": (fake_cuda.Event, "synchronize", lambda event: None),
    "copies go to other memory": (tensor_files, "pinned_like", lambda tensor: torch.empty_like(tensor, device="cpu")),
    "copies are made by .cpu()": (tensor_files, "to_host", at_once),
}


def staged(change):
    """What is found wrong with tensor_files.stage of two tensors that training changes before and after."""
    device = torch.device("cuda", 0)
    with step_memory.swapped(change), fake_cuda.rehearsal() as ledger:
        ledger.begin()
        named = {"weight": torch.zeros(1000, 10, device=device), "step": torch.zeros((), device=device)}
        files = tensor_files.stage(distributed.World(device=device), "model", named)
        waits = dict(ledger.syncs)
        named["weight"].add_(1)
        return {"waits": waits, "saved": rehearsal.written(ledger, files), "hazards": dict(ledger.hazards)}


def counts(case, folder, planned=True):
    """What the test compares, JSON-able."""
    trainer, ranks, words = CASES[case]
    step = rehearsal.rehearse(trainer, folder, words, ranks=ranks, planned=planned)
    rows = step.ledger.rows
    return {"launches": sum(row.launches for row in rows),
            "elementwise_gb": round(sum(row.size for row in rows if row.kind == "elementwise") / 1e9, 3),
            "peak_gib": round(step.peak / step_memory.GIB, 3), "planned_gib": round(step.planned / step_memory.GIB, 3),
            "no_flops": [row.name for row in rows if row.kind == "matmul" and not row.flops],
            "waits": dict(step.ledger.syncs), "save": {
                "waits": step.waits, "hazards": dict(step.ledger.hazards), "bytes": step.saved, "ranks": ranks,
                "planned": step.checkpoint}}


def main():
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(folder)
        rehearsal.prepare(folder)
        gc.freeze()         # what torch and transformers keep; it would be looked through again and again
        for name, change in STAGING.items():
            print(json.dumps({"staging": name, **staged(change)}), file=sys.__stdout__, flush=True)
        for case in CASES:
            print(json.dumps({"case": case, **counts(case, folder)}), file=sys.__stdout__, flush=True)
        for fault, (case, change) in FAULTS.items():
            with step_memory.swapped(change):
                try:
                    found = counts(case, folder, planned=False)
                except Exception as error:
                    found = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps({"fault": fault, "case": case, **found}), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
