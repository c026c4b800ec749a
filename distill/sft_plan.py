"""Order and number of steps of a fine-tuning run, and --dry_run: what it will be and take, checked before it is one.

Copy with it: chat.py, table.py, sft_model.py, packing.py, preflight.py, recomputation.py and what those
name.
"""
import contextlib
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from common import checkpoint, preflight, recomputation
from common.packing import PackOrder
from common.parallel import UserError
from distill import chat, packed_lm, topk
from distill import table as chat_table
from distill import weights as causal_lm


def pack_order(args, lengths):
    """PackOrder of the training samples. lengths: (n,) tokens."""
    return PackOrder(lengths, seed=args.seed, tokens_per_pack=args.max_tokens_per_batch,
                     samples_per_pack=0 if args.max_tokens_per_batch else args.per_device_train_batch_size)


def run_length(args, order, per_step, position):
    """(optimizer steps an epoch, of the whole run). per_step: packs a step; position: to start from."""
    steps_per_epoch = -(-order.packs_per_epoch // per_step)
    left = -(-max(0, order.packs_per_epoch - position["first"]) // per_step)
    left += (args.num_train_epochs - position["epoch"] - 1) * steps_per_epoch
    return steps_per_epoch, args.max_steps or position["step"] + max(0, left)


def samples_line(table, train_ids, eval_ids):
    """How many samples, how long, how much of them is trained."""
    lengths, targets = table.lengths[train_ids], table.targets[train_ids]
    return (f"samples    {len(train_ids)} to train, {len(eval_ids)} to validate; tokens mean {lengths.mean():.1f} "
            f"max {lengths.max()}; {targets.mean():.1f} of them trained")


# ---------------------------------------------------------------------------------------------------------------------
# What a step keeps in memory

LOGIT_COPIES = {False: 3, True: 5}      # fp32: log-softmax and two gradients; with a teacher also its bucket's two
TRIAL = 1009        # tokens; a prime, so that what has a row for each token is known by its size


class _KeptByAttention(torch.autograd.Function):
    """What variable-length flash attention keeps for its backward pass, without its work."""

    @staticmethod
    def forward(ctx, q, k, v):
        """q (S, heads, D), k and v (S, kv_heads, D) -> like q."""
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))      # the last: log-sum-exp
        return out


@contextlib.contextmanager
def _attention_without_work(cuda, select):
    """Layers called within get an attention that only keeps what packed_lm's would; cuda=False: as its CPU path.

    select: is called with attention's output; its small log-sum-exp is left out.
    """
    def keep(module, query, key, value, *_, **__):
        q, k, v = (t[0].transpose(0, 1).to(value.dtype) for t in (query, key, value))
        if not (cuda and packed_lm.VARLEN_GQA):
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out = _KeptByAttention.apply(q, k, v)
        select(out)
        return (out if cuda else torch.cat([out[:1], out[1:]]))[None], None     # documents are put together

    AttentionInterface.register(packed_lm.ATTENTION, keep)
    try:
        yield
    finally:
        AttentionInterface.register(packed_lm.ATTENTION, packed_lm.packed_attention)


class _Selected(TorchDispatchMode):
    """Calls select with what selective checkpointing keeps of the operators' outputs, attention aside."""

    def __init__(self, select):
        super().__init__()
        self.select = select

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if recomputation.keeps(op, args):
            self.select(out)
        return out


def token_bytes(model, bf16, sharded, cuda=True):
    """Bytes that autograd keeps of one token from forward to backward -> {"layers", "inputs", "selected",
    "ends", "layer"}.

    layers: of all decoder layers; inputs: of what they are called with, which is all that recomputation keeps;
    selected: what the selective kind keeps beside it; ends: of what stands outside them, without the head; layer: of
    the largest alone. model: PackedLM as trained, on any device, meta as well. sharded: FSDP2, which computes on
    weights in bfloat16 where autocast only casts them. cuda=False: what the CPU's kernels keep instead. Not counted:
    casts of weights (preflight.memory_parts has them).

    Not a formula: the model's own forward runs once on tensors that have shapes but no memory, and every tensor that
    autograd saves is noted, each storage once.
    """
    body, layers = model.native.base_model, causal_lm.decoder_layers(model.native)
    saved, inputs, selected, bounds = {}, {}, {}, []

    def note(tensor, where=saved):
        storage = tensor.untyped_storage()
        if storage.nbytes() % TRIAL == 0 and tensor.dim():
            where.setdefault(storage._cdata, (storage.nbytes(), tensor))        # kept, so that its place is not reused
        return tensor

    def select(tensor):
        note(tensor, selected)

    def enter(_, args, kwargs):
        bounds.append(sum(size for size, _ in saved.values()))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                note(tensor, inputs)

    def leave(*_):
        bounds.append(sum(size for size, _ in saved.values()))

    handles = [handle for layer in layers for handle in (layer.register_forward_pre_hook(enter, with_kwargs=True),
                                                         layer.register_forward_hook(leave))]
    recomputed = [getattr(layer, "gradient_checkpointing", False) for layer in layers]
    try:
        for layer in layers:
            layer.gradient_checkpointing = False
        with FakeTensorMode(allow_non_fake_inputs=True), _attention_without_work(cuda, select), \
                torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), \
                torch.autocast("cpu", torch.bfloat16, enabled=bf16), _Selected(select):
            weights = {name: torch.empty(p.shape, dtype=torch.bfloat16 if bf16 and sharded else p.dtype,
                                         requires_grad=p.requires_grad) for name, p in body.named_parameters()}
            places = torch.zeros(1, TRIAL, dtype=torch.int64)
            torch.func.functional_call(body, weights, (), {"input_ids": places, "position_ids": places,
                                                           "use_cache": False})
    finally:
        for handle in handles:
            handle.remove()
        for layer, value in zip(layers, recomputed):
            layer.gradient_checkpointing = value
    of_layers = [after - before for before, after in zip(bounds[::2], bounds[1::2])]
    total = sum(size for size, _ in saved.values())
    return {"layers": sum(of_layers) / TRIAL, "inputs": sum(size for size, _ in inputs.values()) / TRIAL,
            "selected": sum(size for size, _ in selected.values()) / TRIAL,
            "ends": (total - sum(of_layers)) / TRIAL, "layer": max(of_layers) / TRIAL}


def kept_bytes(one, layers, recompute):
    """Of token_bytes' dict -> bytes a token (kept from forward to backward, that a layer at work adds to them).

    layers: how many. recompute: of recomputation.MODES, or None.
    """
    selected = one["selected"] if recompute == "selective" else 0
    kept = one["inputs"] + selected if recompute else one["layers"]
    return kept + one["ends"], one["layer"] - selected / layers     # a layer computed again takes over what it had kept


def memory_stages(args, ranks, model, native, tokens, rows):
    """(parts, stages, number of the worst pack): bytes of one GPU, as preflight has them, at the worst pack.

    native: the empty model as trained. tokens, rows: (packs,) of each pack, padding included, and trained ones.
    """
    fsdp, recompute = args.parallel == "fsdp", args.gradient_checkpointing
    # recomputing frees the copy of an adapter's B, which its layer makes itself
    cast = [p for name, p in native.named_parameters() if p.dtype == torch.float32 and p.ndim > 1
            and not (recompute and ".lora_B." in name)]
    casts = 0 if fsdp or not args.bf16 else 2 * sum(p.numel() for p in cast)
    parts = preflight.memory_parts(unit_sizes(native), world=ranks, sharded=fsdp, offload=args.cpu_offload,
                                   reshard=args.reshard_after_forward, compute=2 if args.bf16 else 4, casts=casts,
                                   whole=fsdp and args.gradient_accumulation_steps > 1)
    one = token_bytes(model, args.bf16, fsdp)
    kept, layer = kept_bytes(one, len(causal_lm.decoder_layers(native)), recompute)
    activations = tokens * kept + rows * native.config.hidden_size * (2 if fsdp and args.bf16 else 4)     # of the head
    logits = LOGIT_COPIES[bool(args.distill_topk)] * 4 * np.minimum(rows, model.chunk) * native.config.vocab_size
    stages = preflight.peak_stages(parts, activations, tokens * layer, logits, recompute)
    worst = int(np.max([stages["the heads"], stages["a layer's backward"]], axis=0).argmax())
    parts |= {"activations": activations[worst], "logits": logits[worst]}
    return parts, {name: values[worst] for name, values in stages.items()}, worst


# ---------------------------------------------------------------------------------------------------------------------
# The dry run


def checkpoint_bytes(args, native):
    """(weights, optimizer) of one checkpoint. native: the empty model as trained, adapters inside."""
    trained = [parameter for parameter in native.parameters() if parameter.requires_grad]
    weights = sum(parameter.nbytes for parameter in (trained if args.use_lora else native.parameters()))
    return weights, 8 * sum(parameter.numel() for parameter in trained)


def unit_sizes(native):
    """[(values, stored bytes, trained values)] of everything outside the layers first, then of each layer."""
    def size(parameters):
        sizes = [(p.numel(), p.nbytes, p.numel() * p.requires_grad) for p in parameters]
        return [sum(column) for column in zip(*sizes)]
    layers = [size(layer.parameters()) for layer in causal_lm.decoder_layers(native)]
    return [[whole - sum(part) for whole, part in zip(size(native.parameters()), zip(*layers))], *layers]


def print_plan(args, ranks, model, native, table, train_ids, eval_ids, resume, meta, problems):
    """Print all that a run with these flags comes to; what it will not fit into goes to the list
    `problems`."""
    lengths, accumulation = table.lengths[train_ids], args.gradient_accumulation_steps
    order, per_step = pack_order(args, lengths), ranks * accumulation
    position = {key: meta[key] for key in ("step", "epoch", "first")} if meta else {"step": 0, "epoch": 0, "first": 0}
    steps_per_epoch, total_steps = run_length(args, order, per_step, position)
    tokens = preflight.pack_sums(order.epoch(0), lengths)
    report = preflight.packing_report(tokens, ranks, accumulation, args.max_tokens_per_batch)
    values, _, trained = (sum(column) for column in zip(*unit_sizes(native)))
    plans = [order.epoch(epoch) for epoch in range(min(20, args.num_train_epochs))]
    pack_tokens, rows = (np.concatenate([preflight.pack_sums(plan, n[train_ids]) for plan in plans])
                         for n in (table.lengths, table.targets))
    pack_tokens = np.maximum(pack_tokens, args.max_tokens_per_batch)
    parts, stages, worst = memory_stages(args, ranks, model, native, pack_tokens, rows)
    parts["reduction"] = max(parts["reduction"], parts["last reduction"])
    notes = {"weights": "a shard" if args.parallel == "fsdp" else "whole", "gradients": "fp32",
             "optimizer": "two fp32 moments", "copies": "gathered or cast for computing",
             "reduction": "gradients being summed over the GPUs",
             "activations": f"worst pack, {pack_tokens[worst]:,} tokens"
                            + recomputation.NOTES[args.gradient_checkpointing],
             "logits": f"one piece of its {rows[worst]:,} trained tokens, at their peak",
             "fixed": "CUDA context and libraries: a guess"}
    limit, (weights, moments) = preflight.gpu_memory(args), checkpoint_bytes(args, native)
    offloaded, staged, local = preflight.host_parts(args, ranks, parts["host"], weights, moments)
    host_limit = args.host_memory * preflight.GIB if args.host_memory else preflight.host_memory()
    size = weights + moments
    left = max(0, total_steps - position["step"])
    saves = 1 + sum(left // every for every in (args.save_steps, args.eval_steps * bool(len(eval_ids))) if every)
    most = min(saves, args.save_total_limit + 1 + bool(len(eval_ids))) if args.save_total_limit else saves
    have = sum(preflight.folder_bytes(path) for _, path in checkpoint.checkpoints(args.output_dir))
    print(f"plan       {ranks} GPUs, {args.parallel}, {'bf16' if args.bf16 else 'fp32'}\n"
          f"model      {values / 1e6:,.1f} M parameters, {trained / 1e6:,.3f} M trainable "
          f"({'LoRA' if args.use_lora else 'full'}); the weight files have them all\n"
          f"{samples_line(table, train_ids, eval_ids)}\n"
          f"lengths    {lengths.sum():,} tokens an epoch; tokens a sample and how many samples have them:")
    for line in preflight.histogram(np.asarray(lengths)):
        print(f"           {line}")
    print(f"packs      {order.packs_per_epoch:,} an epoch, {len(train_ids) / order.packs_per_epoch:.1f} samples and "
          f"{tokens.mean():,.0f} tokens each on average\n"
          f"           {report['useful'] * 100:.1f}% of slots hold tokens; balance of the ranks (mean over max of "
          f"their slots) {report['balance'] * 100:.0f}%\n"
          f"steps      {total_steps} ({steps_per_epoch} an epoch), {per_step} packs a step = {ranks} ranks x "
          f"{accumulation} micro-steps; peak lr {args.learning_rate:.2e}\n"
          f"start      step {position['step']}, {f'resuming from {resume}' if resume else 'base model'}\n"
          f"memory     estimate for one GPU; it has {preflight.size(limit)}, {preflight.MARGIN}")
    table_rows = [(name, parts[name], note) for name, note in notes.items() if parts[name]]
    peak = max(stages, key=stages.get)
    for line in preflight.memory_table([*table_rows, ("peak estimate", stages[peak],
                                                      f"reached in {peak}; parts come and go")]):
        print(f"           {line}")
    print(f"host       {preflight.size(offloaded + staged)} for the {local} ranks of a node: "
          f"{preflight.size(offloaded)} offloaded, {preflight.size(staged)} copied by a save; it has "
          f"{preflight.size(host_limit)}")
    print(f"disk       {preflight.size(size)} a checkpoint, at most {most} at once: {preflight.size(size * most)}; "
          f"{preflight.size(preflight.free_disk(args.output_dir))} free for --output_dir")
    preflight.attempt(problems, preflight.check_memory, args, stages[peak], limit)
    preflight.attempt(problems, preflight.check_host, args, offloaded + staged, host_limit, local)
    preflight.attempt(problems, preflight.check_disk, args.output_dir, size * most - have, f"{most} checkpoints")


def dry_run(args, ranks, trainer):
    """Print what this run would be and take on `ranks` GPUs; raise UserError with all that would stop it.

    Of weights only headers are read; a checkpoint to resume from is read whole, for its checksums. Writes nothing but a
    temporary table. trainer: the script, whose check_flags fills in what flags derive.
    """
    problems = []

    def check(work, *given):        # None where it fails, or where what it needs is None already
        return preflight.attempt(problems, work, *given) if all(value is not None for value in given) else None

    check(trainer.check_flags, args, ranks)
    flags_fit = not problems or None        # else model and data are not tried with them
    check(preflight.check_writable, args.output_dir, "--output_dir")
    check(preflight.check_writable, args.logging_dir if args.report_to == "tensorboard" else None, "--logging_dir")
    check(trainer.check_device, args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    folder = check(causal_lm.find_model, args.model_path)
    config = check(causal_lm.load_config, folder)
    tokenizer = check(lambda folder: chat.load_tokenizer(folder, args.chat_template), folder)
    check(causal_lm.check_vocabulary, tokenizer, config)
    limit = check(causal_lm.length_limit, config, args.max_length, args.max_tokens_per_batch) if flags_fit else None
    model, _ = check(trainer.empty_model, flags_fit and args, config and folder) or [None] * 2
    with tempfile.TemporaryDirectory() as scratch:
        encoder = tokenizer and chat.Encoder(tokenizer, args.train_turns, chat.THINKING[args.enable_thinking])
        paths = [path for path in (args.train_data_file, args.eval_data_file) if path]
        found = check(lambda *given: chat_table.build_table(
            *given, args.too_long, topk.Alternatives(tokenizer, args.distill_topk) if args.distill_topk else None,
            args.preprocess_num_proc), flags_fit and Path(scratch), paths, encoder, limit)
        if not problems:
            n_train, about, _ = found
            table = chat_table.ChatTable(scratch)
            train_ids, eval_ids = check(chat_table.split_samples, table, n_train, args.group_size,
                                        args.validation_split, args.seed) or [None] * 2
        if not problems:
            resume, meta = check(checkpoint.find_resume, args.output_dir, args.resume,
                                 trainer.run_identity(args, folder, table, train_ids)) or [None] * 2
            check(packed_lm.check_resume, model, resume)
        if not problems:
            print(about)
            print_plan(args, ranks, model, model.native, table, train_ids, eval_ids, resume, meta, problems)
    if problems:
        raise UserError(preflight.all_problems(problems))
    print("dry run ok")
