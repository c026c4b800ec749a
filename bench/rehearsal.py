"""A trainer's own train() on the GPU of fake_cuda.py: three optimizer steps at a given shape, the last one counted.

Models, tokenizers, recordings and chats are written to a folder first: real files, whose weights are holes. All samples
of a set are alike, so every pack is, and the counted step is the one that --dry_run plans for. What train() reads and
prepares is real; from the loading of the model on all tensors are fake. Not run: loader processes, other ranks (a fake
process group answers at once), FlexAttention's kernel (a stand-in of the same shapes), the files of a checkpoint: the
first step is saved, as far as to copies on the host.
"""
import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import library
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data
import train_v2_ddp
from bench import fake_cuda, shapes
from common import checkpoint, distributed, flags, plan, run, step_memory, tensor_files
from core import fused, loading, watchdog
from diffusion import choices, dit, noise, train_bd3lm
from tests.helpers.students import train_sft
from speech import choices as speech_choices
from speech.data.dataset import Encoding
from speech.data.rows import Reading, Sources
from speech.model import versions

STEPS = 3
TRAINERS = {"speech": train_v2_ddp, "speech3": train_v2_ddp, "chat": train_sft, "blocks": train_bd3lm}
LAYERS = {"speech": 28, "speech3": 36, "chat": 36, "blocks": 12}
SAMPLES = 256          # of a set, all alike


# ---------------------------------------------------------------------------------------------------------------------
# Files


def speech_files(folder, layers, make=shapes.speech_files):
    """Flags that name a model and samples of 12 s of reference and 6 s of target, some 600 tokens each."""
    return [*make(folder, [(12, 6)] * SAMPLES, layers), "--code_cache", folder / "codes", "--disable_eval"]


def speech3_files(folder, layers):
    return speech_files(folder, layers, shapes.speech3_files)


def chat_files(folder, layers):
    """Flags that name a model and chats of some 500 tokens, half of them trained."""
    return shapes.chat_files(folder, [472] * SAMPLES, layers)


def block_files(folder, layers):
    """Flags that name problems of about GSM8K's mean length, whose rows are as docs/diffusion.md counts them there."""
    choices.SIZES["small"] = (768, layers, 12, 128)
    return [*shapes.block_files(folder, [150] * SAMPLES), "--model_size", "small", "--validation_split", 0]


FILES = {"speech": speech_files, "speech3": speech3_files, "chat": chat_files, "blocks": block_files}


def prepare(folder):
    """Call once, with an empty folder: fill the code cache of speech_files on the CPU, then have a GPU."""
    for words in (speech_files(folder, 2), speech3_files(folder, 2)):
        args = flags.parse(train_v2_ddp.build_parser(), train_v2_ddp.check_flags, [
            *map(str, words), "--output_dir", str(folder / "out")])
        config = json.loads((words[1] / "config.json").read_text())
        module = versions.module(config)
        tokenizer = module.load_tokenizer(words[1])
        ids = module.token_ids(tokenizer, module.read_config(config))
        sources = Sources(*speech_choices.sources(args), Reading(**speech_choices.reading(args)))
        encoding = Encoding(folder / "codec", folder / "codes", ids.num_codebooks, wait_limit_s=60)
        data.prepare_table(distributed.World(device=torch.device("cpu")), tokenizer, ids, sources,
                           encoding, folder / words[1].name)
    fake_cuda.patch()


# ---------------------------------------------------------------------------------------------------------------------
# One run


class Finished(Exception):
    """Enough steps have run."""


@dataclass
class Step:
    """What the last of STEPS optimizer steps on one of `ranks` GPUs came to."""
    ledger: fake_cuda.Ledger
    peak: int           # bytes of all tensors
    planned: int        # the same as --dry_run has it
    work: dict          # Run.count's, of all ranks: tokens, flops, ...
    saved: int          # bytes of this rank's share of a checkpoint in pinned memory
    checkpoint: int     # bytes of all of a checkpoint, as --dry_run has them
    waits: dict         # as ledger.syncs, from where a save begins until training goes on
    pairs: float        # (query, key) that a layer's attention computes, of all micro-steps of this rank


@library.custom_op("rehearsal::flex_attention", mutates_args={})
def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for FlexAttention's kernel, which is compiled on a GPU."""
    raise NotImplementedError


@library.custom_op("rehearsal::flex_attention_backward", mutates_args={})
def flex_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                  log_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError


@library.custom_op("rehearsal::rms_norm", mutates_args={})
def norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for F.rms_norm's kernel, which a CPU build does not have."""
    raise NotImplementedError


@library.custom_op("rehearsal::rms_norm_backward", mutates_args={})
def norm_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, quotient: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


@library.custom_op("rehearsal::rms_norm_weight_backward", mutates_args={})
def norm_weight(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, quotient: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


def norm_gradients(ctx, grad, _):
    saved = ctx.saved_tensors       # asked for once: then recomputation frees them
    return tuple(gradient(grad, *saved) if wanted else None for gradient, wanted in
                 zip((norm_backward, norm_weight), ctx.needs_input_grad))


norm.register_fake(lambda x, weight: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)))
norm_backward.register_fake(lambda grad, x, weight, quotient: torch.empty_like(x))
norm_weight.register_fake(lambda grad, x, weight, quotient: torch.empty_like(weight))
norm.register_autograd(norm_gradients, setup_context=lambda ctx, inputs, output: (
    ctx.set_materialize_grads(False), ctx.save_for_backward(*inputs, output[1])))
flex.register_fake(lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)))
flex_backward.register_fake(lambda grad, q, k, v, out, log_sum: tuple(map(torch.empty_like, (q, k, v))))
flex.register_autograd(lambda ctx, grad, _: flex_backward(grad, *ctx.saved_tensors),
                       setup_context=lambda ctx, inputs, output: (
                           ctx.set_materialize_grads(False), ctx.save_for_backward(*inputs, *output)))


def one_kernel(function, *args):
    """fused.kernel, whose functions torch.compile makes one kernel of."""
    if not fake_cuda.LEDGER:
        return function(*args)
    return fake_cuda.LEDGER.one_kernel(function.__name__, function, *args)


def rms_norm(x, weight, eps):
    """fused.rms_norm with the stand-in."""
    return norm(x, weight.to(x.dtype))[0] if fake_cuda.LEDGER else plain_norm(x, weight, eps)


def sparse_attention(q, k, v, mask):
    """dit.sparse_attention with the stand-in; the mask's tiles must be on the GPU and cover queries and keys."""
    tiles = tuple(-(-n // dit.TILE) for n in (q.shape[2], k.shape[2]))
    assert mask.kv_indices.shape == (len(q), 1, *tiles) and mask.kv_num_blocks.shape == (len(q), 1, tiles[0])
    assert all(t.is_cuda for t in (mask.kv_indices, mask.kv_num_blocks, mask.full_kv_indices, mask.full_kv_num_blocks))
    with fake_cuda.LEDGER.aside():
        at = torch.zeros(1, dtype=torch.int64, device=q.device)
        assert mask.mask_mod(at, at, at, at).is_cuda
    return flex(q, k, v)[0]


DiT, plain_norm = dit.DiT, fused.rms_norm


def on_gpu(*args):
    """A DiT that is built on the GPU: modules of fake tensors do not move."""
    if not fake_cuda.LEDGER:
        return DiT(*args)
    with torch.device("cuda", 0):
        model = DiT(*args)
    model.to = lambda device: model
    return model


def pairs_of(batch):
    """(query, key) pairs that attention computes of a batch, mean of its layers: FlexAttention's tiles are whole."""
    if isinstance(batch, noise.Blocks):
        last, layers = batch.tiles[:, :batch.noisy.shape[1] // dit.TILE], choices.SIZES["small"][1]
        return dit.TILE ** 2 * float(((layers - 1) * (batch.tiles > 0).sum() + (last > 0).sum()) / layers)
    lengths = np.diff(batch.cu_seqlens.numpy()).astype(np.int64)
    return int((lengths * (lengths + 1) // 2).sum())


def written(ledger, files):
    """Write the files of tensor_files.stage, as far as to reading the copies -> their bytes in pinned memory."""
    read = []
    with step_memory.swapped((tensor_files, "save", lambda tensors, path: read.extend(map(ledger.read, tensors.values())))):
        for name, write in files.items():
            if name.endswith(".safetensors"):
                write(Path(name))
    return sum(read)


def rehearse(trainer, folder, words, layers=2, ranks=1, planned=True):
    """Step of train() of a trainer (of TRAINERS) at so many layers, as one of `ranks` ranks.

    folder: of prepare(). words: its flags, but for model and data. planned: run its --dry_run first.
    """
    script, seen = TRAINERS[trainer], {"pairs": 0, "planned": 0, "checkpoint": 0}
    out = Path(tempfile.mkdtemp(dir=folder))
    words = [*FILES[trainer](folder, layers), "--output_dir", out / "run", "--logging_dir", out / "logs", "--bf16",
             "--logging_steps", 1000, "--save_steps", 1000, "--eval_steps", 0, "--max_steps", 1000, "--report_to",
             "none", "--num_workers", 0, *words]
    words = [str(word) for word in words if word is not None]

    def parse(*more):
        return flags.parse(script.build_parser(), script.check_flags, [*words, *more])

    def print_room(args, setup, found, pack, saved, *_):
        seen["planned"], seen["checkpoint"] = found.peak - found.parts["fixed"], sum(saved)

    def init(*_, **__):
        return distributed.World(size=ranks, device=device)

    def ahead(loader, device=None):
        batches = iter(loader)
        while True:
            with fake_cuda.outside():
                batch = next(batches)
                seen["pairs"] += pairs_of(batch) * seen["ledger"].counting
            yield batch.to(device) if device else batch

    def really(function):
        def called(*args, **options):
            with fake_cuda.outside():
                return function(*args, **options)
        return called

    def window(now):
        if now.step == STEPS - 1:
            seen["ledger"].begin()
        if now.step == STEPS:
            raise Finished
        return real_window(now)

    def begin(writer, step):
        seen["ledger"].begin()

    def save(writer, step, files, meta):
        seen["ledger"].counting, seen["waits"] = False, dict(seen["ledger"].syncs)
        seen["saved"] = written(seen["ledger"], files)

    def count(now, slots, work):
        seen["work"] = work
        real_count(now, slots, work)

    def moved(watch, where, limit_s=None):
        if where == "loading the model":        # from here on tensors are fake
            seen["ledger"] = stack.enter_context(fake_cuda.rehearsal())

    def load_model(first, world, model, *rest, **options):
        for module in model.modules():      # computed ones are real so far
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
        return real_load(first, world, model, *rest, **options)
    real_window, real_count, real_load = run.TrainState.window, run.TrainState.count, getattr(script, "load_model", None)
    device = torch.device("cuda", 0)
    changes = [
        (watchdog.Watchdog, "moved", moved), (run.TrainState, "window", window), (run.TrainState, "count", count),
        (run.TrainState, "save_due", lambda now: now.step == 1),
        (plan, "print_room", print_room), (loading, "ahead", ahead), (tensor_files, "read_into", lambda *_: None),
        (distributed, "init", init), (distributed, "rank0_first", lambda world, work, *args: work(*args)),
        (distributed, "init_device_mesh", really(distributed.init_device_mesh)), (noise, "diffuse", really(noise.diffuse)),
        (checkpoint.Writer, "begin", begin), (checkpoint.Writer, "save", save),
        (checkpoint, "rng_state", lambda *_: b""), (distributed, "gather_on_main", lambda world, value: [value]),
        (fused, "compiles", lambda kind: True), (fused, "kernel", one_kernel), (fused, "rms_norm", rms_norm),
        (dit, "Model", on_gpu), (dit, "sparse_attention", sparse_attention)]
    if real_load:
        changes.append((script, "load_model", load_model))
    with step_memory.swapped(*changes), contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        if planned:
            script.train(parse("--dry_run", str(ranks)))
        args = parse()
        if args.parallel == "fsdp":
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        os.environ["WORLD_SIZE"] = str(ranks)
        try:
            script.train(args)
        except Finished:
            pass
        finally:
            os.environ.pop("WORLD_SIZE")
            if args.parallel == "fsdp":
                torch.distributed.destroy_process_group()
    ledger = seen["ledger"]
    return Step(ledger, ledger.peak, seen["planned"], seen["work"], seen["saved"], seen["checkpoint"], seen["waits"],
                seen["pairs"])
