"""--dry_run of the chat trainer: what a run will be and take."""
import functools

import numpy as np
import torch

from common import document_attention, memory, plan
from distill import weights
from distill.dataset import PackedChats, samples_line
from distill.packed_lm import mixture_text

# ---------------------------------------------------------------------------------------------------------------------
# Memory

# fp32: logits, log-softmax and two gradients; stored alternatives' bucket has one more; with a prompted teacher its
# logits and log-softmax, and the products of both distributions. Counted: what a step's tensors take at its peak
LOGIT_COPIES, PROMPTED_COPIES = {False: 4, True: 5}, {"forward": 8, "reverse": 8, "js": 12, "topk": 6}


def logit_copies(model):
    """How many times the logits of a piece of rows are there at the peak of a PackedLM's step."""
    if model.prompted:
        kind, _, k = model.prompted
        return PROMPTED_COPIES["topk" if k else kind]
    return LOGIT_COPIES[bool(model.share)]


def row_bytes(model, bf16, sharded, gpu=True):
    """memory.row_bytes of a token of a PackedLM; bf16, sharded, gpu as there."""
    layers = weights.decoder_layers(model.native)

    def inputs(tokens):
        places, none = torch.zeros(tokens, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        teacher = (torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1)) if model.share else ()
        if model.prompted:      # the teacher's forward keeps nothing: two tokens of it
            teacher = (None, None, places[:2], places[:2], places[:2].int(), none, 2)
        return (PackedChats(places, places, places[:2].int(), none, none, tokens, (), {}, *teacher),), {}
    return memory.row_bytes(model, layers, inputs, bf16=bf16, sharded=sharded, gpu=gpu,
                            plain=[(layer, "gradient_checkpointing", False) for layer in layers],
                            kernel=memory.Kernel(document_attention, "_attention_by_document",
                                                 document_attention.VARLEN_GQA, True))


def memory_stages(setup, model, tokens, rows, row=None):
    """(parts, stages, number of the worst pack): bytes of one GPU, as memory has them, at the worst pack.

    setup: plan.Setup. model: the empty PackedLM as trained. tokens, rows: (packs,) of each pack, padding included, and
    trained ones. row: of row_bytes, if it is known.
    """
    fsdp, recompute = setup.fsdp, setup.recompute
    native, layers = model.native, weights.decoder_layers(model.native)
    head = native.get_output_embeddings().weight
    casts, cast = (0, 0), 0
    if setup.bf16 and not fsdp:
        casts, cast = memory.cast_bytes(native, layers, recompute), 2 * head.numel() * (head.dtype == torch.float32)
        casts = casts[0] - cast, casts[1]       # the head's is gone when its pieces are done
    parts = memory.memory_parts(memory.unit_sizes(native, layers), world=setup.shards, sharded=fsdp,
                                offload=setup.offload, reshard=setup.reshard, compute=2 if setup.bf16 else 4,
                                casts=casts, accumulation=setup.accumulation, **memory.table_of(native))
    kept, layer = memory.kept_bytes(row or row_bytes(model, setup.bf16, fsdp), len(layers), recompute)
    activations = tokens * kept + rows * native.config.hidden_size * (2 if setup.bf16 else 4)     # of the head
    logits = logit_copies(model) * 4 * np.minimum(rows, model.chunk) * native.config.vocab_size
    if head.requires_grad:      # its gradient is summed over the pieces in fp32; what each adds is made when they go
        value = 2 if setup.bf16 else 0
        logits = np.maximum(logits, value * (head.numel() + np.minimum(rows, model.chunk) * native.config.vocab_size))
        logits = logits + 4 * head.numel()
    logits = logits + cast
    worst, parts, stages = memory.worst_pack(parts, activations, tokens * layer, logits, recompute)
    return parts, stages, worst


def peaks(model, lengths, targets):
    """Function of (plan.Setup, PackOrder) -> bytes of one GPU at the peak of the worst pack of the first epoch.

    model: the empty PackedLM as trained. lengths, targets: (n,) tokens of the samples, and trained ones.
    """
    row_of = functools.cache(lambda *how: row_bytes(model, *how))

    def peak(setup, order):
        tokens = np.maximum(plan.epoch_sums(order, [0], lengths), setup.budget)
        rows = plan.epoch_sums(order, [0], targets)
        return max(memory_stages(setup, model, tokens, rows, row_of(setup.bf16, setup.fsdp))[1].values())
    return peak


# ---------------------------------------------------------------------------------------------------------------------
# The dry run


def print_plan(check, model, table, train_ids, eval_ids, order, lengths_of_run, at, resume, *, setup, room, often,
               epochs, peak_lr):
    """Print all that a run comes to; what it will not fit into is a problem of `check`.

    model: the empty PackedLM as trained. order: PackOrder. lengths_of_run: of packing.run_length. at: run.position.
    setup, room: plan.Setup, plan.Limits. often: of run.intervals. epochs: how many, of which the first 20 are looked at.
    """
    lengths, (steps_per_epoch, total_steps) = table.lengths[train_ids], lengths_of_run
    epochs = range(min(20, epochs))
    tokens = np.maximum(plan.epoch_sums(order, epochs, lengths), setup.budget)
    rows = plan.epoch_sums(order, epochs, table.targets[train_ids])
    parts, stages, worst = memory_stages(setup, model, tokens, rows)
    average = (f"{len(train_ids) / order.packs_per_epoch:.1f} samples and "
               f"{lengths.sum() / order.packs_per_epoch:,.0f} tokens each on average")
    units = memory.unit_sizes(model.native, weights.decoder_layers(model.native))
    print("\n".join([
        plan.head_text(setup, units), *mixture_text(model), samples_line(table, train_ids, eval_ids),
        plan.lengths_text(lengths), plan.packs_text(setup, order, lengths, average),
        plan.steps_text(total_steps, steps_per_epoch, setup.ranks, setup.accumulation, f"peak lr {peak_lr:.2e}"), often,
        plan.start_text(at["step"], resume)]))
    text = plan.memory_text(setup, parts, stages, f"{tokens[worst]:,} tokens",
                            f"one piece of its {rows[worst]:,} trained tokens, at their peak")
    plan.print_room(check, setup, room, text, parts, stages, memory.checkpoint_bytes(model.native, setup.adapters),
                    total_steps - at["step"], len(eval_ids))
