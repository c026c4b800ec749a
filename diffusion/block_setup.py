"""The data, the DiT and the checkpoints of a block diffusion run as the trainer's flags want them.

Own module of train_bd3lm.py. Copy with it: dit.py noise.py blocks.py problems.py make_problems.py tensor_files.py
parallel.py optim.py checkpoint.py and what those name.
"""
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, optim, parallel, tensor_files
from common.parallel import UserError
from diffusion import blocks, dit, make_problems, noise
from diffusion.problems import load_tokenizer, read_problems


def prepare_data(world, args, layout):
    """(problems.Tokens, training gsm8k.Rows, validation Rows or None)."""
    if args.demo is not None:
        folder = Path(args.output_dir) / "demo"
        parallel.rank0_first(world, make_problems.write_demo, folder, args.demo, max(8, args.demo // 10))
        ending = ".jsonl" if args.system == "gsm8k" else "_hdp.json"
        args.train_data, args.eval_data, args.tokenizer = folder / f"train{ending}", folder / f"test{ending}", folder
    tokens = parallel.rank0_first(world, load_tokenizer, args.tokenizer, args.system)   # one download for all

    def documents(path, split):
        problems = parallel.rank0_first(world, read_problems, path, split, args.system, layout.strip_calculator)
        return blocks.make_documents(problems, tokens, layout, args.drop_too_long)

    train = evaluation = documents(args.train_data, "train")
    numbers, held_out = np.arange(len(train)), []
    if args.eval_data:
        evaluation = documents(args.eval_data, "test")
        held_out = np.arange(len(evaluation))
    elif args.validation_split:
        numbers, held_out = blocks.split_validation(len(train), args.validation_split, args.seed)
    rows = blocks.make_rows(train, numbers, args.row_length, args.pack, args.seed)
    eval_rows = blocks.make_rows(evaluation, held_out, args.row_length, args.pack, args.seed) if len(held_out) else None
    return tokens, rows, eval_rows


def row_table(rows):
    """What rows hold, {name: (n_rows,) ints}: targets of each region, blocks with targets, text, copies, pairs."""
    documents = rows.documents
    table = {f"targets_{region}": rows.per_row(documents.per_document(documents.target & (documents.region == region)))
             for region in range(4)}
    pairs = [noise.attended_pairs(blocks.collate([rows[r]], 1, rows.length, rows.noisy_length, documents.pad))
             for r in range(len(rows))]
    return table | {"targets": rows.n_targets, "groups": rows.per_row(documents.n_groups), "tokens": rows.tokens,
                    "noisy": rows.per_row(documents.noisy_lengths),
                    "clean": rows.per_row(documents.per_document(documents.live)),
                    "samples": np.array([len(m) for m in rows.members]), "pairs": np.array(pairs)}


def build_model(world, args, tokens, resume):
    """(DiT, what to call in training, bd3lm.Average) on this rank's device, started anew or from a checkpoint."""
    device, fsdp = world.device, args.parallel == "fsdp"
    backend = args.attn_backend or ("flex" if device.type == "cuda" else "sdpa")
    if backend == "flex" and device.type == "cpu":
        raise UserError("--attn_backend flex trains on CUDA only: torch has no backward for it on a CPU; drop the flag")
    parallel.seed_everything(args.seed)         # equal weights on all ranks
    config = dit.config_of(args.model_size, tokens.vocab_size, tokens.mask, args.dropout)
    model = dit.DiT(config, backend, args.gradient_checkpointing).to(device)
    if args.compile:
        parallel.compile_layers(model.layers, dynamic=False)        # FlexAttention of unknown lengths is slow
    if fsdp:
        parallel.shard(model, model.layers, world, args.bf16)
    if resume:
        noise.load_weights(dict(model.named_parameters()), resume, "model")
    average = noise.Average(model, args.ema_decay)
    if resume:
        noise.load_weights(average.shadow, resume, "ema")
    model.train()
    return model, model if fsdp else parallel.wrap_ddp(model, world), average


def save_checkpoint(world, writer, args, layout, model, average, tokens, optimizer, meta):
    """Copy all of checkpoint-<meta["step"]> off the device and start writing it. On every rank."""
    writer.begin(meta["step"])
    parallel.reshard(model)
    states = parallel.gather_objects(world, checkpoint.rng_state(world.device))
    moments = optim.state_tensors(optimizer, model.named_parameters())
    files = tensor_files.stage(world, "model", dict(model.named_parameters()))
    files |= tensor_files.stage(world, "ema", average.shadow)
    files |= tensor_files.stage(world, f"{checkpoint.STATE_DIR}/optimizer", moments)
    if world.is_main:
        config = json.dumps({"model": dataclasses.asdict(model.config), "layout": dataclasses.asdict(layout),
                             "step": meta["step"]}, indent=1)
        files[f"{checkpoint.STATE_DIR}/rng.pt"] = lambda path: torch.save(states, path)
        files["config.json"] = lambda path: path.write_text(config)
        files["tokenizer.json"] = lambda path: tokens.tokenizer.save(str(path))
    writer.save(meta["step"], files, meta)


def decays(name, parameter):
    """Weight decay shrinks matrices, not norms and biases, and not the embedding: rows a batch lacks would shrink."""
    return parameter.ndim > 1 and name != "embed.weight"
