"""A second model beside the student, never trained: a teacher, or the base as it was (full
fine-tuning).

It stands outside of the module that DDP or FSDP2 wraps, so it has no gradients, no optimizer and no
place in a checkpoint. Under FSDP2 it is sharded over the same ranks; its layers are gathered one by
one.
"""
import numpy as np
import torch
from torch import nn

from distill import packed_lm, causal_lm


class Frozen(nn.Module):
    """forward(batch) -> ((rows (R, H),), (weight, bias) of its head), as chunked_loss takes them.

    packed, parts: of packed_lm.build_empty. Without dropout: eval mode is never left.
    """
    lora = False        # for packed_lm.load

    def __init__(self, packed, parts):
        super().__init__()
        self.packed, self.parts = packed.requires_grad_(False).eval(), parts

    @property
    def native(self):
        return self.packed.native

    @torch.no_grad()
    def forward(self, batch):
        rows = self.packed.hidden(
            batch.prompted_ids, batch.prompted_positions, batch.prompted_cu_seqlens,
            batch.prompted_longest, batch.prompted_rows)
        head = self.native.get_output_embeddings()
        return (rows,), (head.weight, head.bias)


def empty(folder, dtype):
    """Frozen of a model folder, on the meta device. Raises UserError."""
    return Frozen(*packed_lm.build_empty(folder, dtype))


def add(model, args):
    """Give an empty PackedLM its frozen models; a base with adapters to switch off needs none."""
    base, dtype = causal_lm.find_model(args.model_path), causal_lm.half_dtype(args) or torch.float32
    teacher = causal_lm.find_model(args.teacher_path, "--teacher_path") if args.teacher_path else base
    if args.teacher_url:
        from distill.scored import Scorer
        model.frozen["teacher"] = Scorer(
            args.teacher_url, args.teacher_name or args.teacher_path, args.distill_topk,
            args.request_timeout, model.native.config.vocab_size)
    elif args.teacher_path and not (args.use_lora and teacher.resolve() == base.resolve()):
        model.frozen["teacher"] = empty(teacher, dtype)
    if args.keep and not args.use_lora:
        other = model.frozen.get("teacher")
        same = isinstance(other, Frozen) and teacher.resolve() == base.resolve()
        model.frozen["base"] = other if same else empty(base, dtype)


def fingerprint(args, kept):
    """Text for what teaches: another model's weights, --keep's table; None."""
    found = []
    if args.teacher_path and args.teacher_path != args.model_path:
        teacher = causal_lm.find_model(args.teacher_path, "--teacher_path")
        found.append(causal_lm.fingerprint_weights(teacher))
    if args.teacher_name:
        found.append(args.teacher_name)
    if kept:
        data = kept.fingerprint(np.arange(len(kept)))
        found.append(f"keep {args.keep_weight:g} / {args.keep_every}: {data}")
    return ", ".join(found) or None


def models(model):
    """The different Frozen ones of a PackedLM: [(name, Frozen)]."""
    return list({id(other): (name, other) for name, other in model.frozen.items()
                 if isinstance(other, Frozen)}.values())


def text(model):
    """[line about each frozen model]."""
    return [f"{name:<10} {sum(p.numel() for p in other.parameters()) / 1e6:,.1f} M parameters, "
            f"frozen, in {str(next(other.parameters()).dtype).removeprefix('torch.')}"
            for name, other in models(model)]


def load_all(model, world, sharding):
    """Load the frozen models of a PackedLM. sharding: the student's, or None."""
    if sharding:
        sharding = sharding | {"reshard_after_forward": True}     # no backward needs them
    if world.is_main and model.frozen:
        print(*text(model), sep="\n")
    for _, other in models(model):
        packed_lm.load(other, other.parts, world, sharding=sharding)
