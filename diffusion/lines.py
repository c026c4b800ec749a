"""What a block diffusion run says of itself: its start, a line of training or of validation."""
import math
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from common.text import size as gib
from core import metrics
from diffusion import weights


class StepSums(NamedTuple):
    """What optimizer steps add up for the log: views of one tensor of float64 numbers."""
    losses: torch.Tensor            # (4,) weighted losses, of each region
    targets: torch.Tensor           # (4,) tokens in the loss, of each region
    cross_entropy: torch.Tensor     # (1,) plain losses of masked tokens
    masked: torch.Tensor            # (1,) how many were masked


WIDTHS = StepSums(4, 4, 1, 1)


def step_sums(numbers):
    """StepSums of a tensor (sum(WIDTHS),), which share its memory."""
    return StepSums(*numbers.split(WIDTHS))


def loss_report(numbers, regions):
    """Numbers of step_sums, of all ranks -> {name: value}."""
    parts = [part.tolist() for part in step_sums(numbers.cpu())]
    losses, targets, (cross_entropy,), (masked,) = parts
    if not sum(targets):        # every step was skipped: no loss to claim
        return {"train/loss": math.nan, "train/masked_loss": math.nan, "train/masked": math.nan}
    values = {"train/loss": sum(losses) / sum(targets),
              "train/masked_loss": cross_entropy / max(1, masked),
              "train/masked": masked / sum(targets)}
    return values | {f"train/loss_{name}": loss / n
                     for name, loss, n in zip(regions, losses, targets) if n}


def console_line(step, total_steps, v):
    """One aligned line of at most 160 characters; metrics.jsonl has all numbers."""
    mfu = f" | mfu {v['train/mfu'] * 100:4.1f}%" if "train/mfu" in v else ""
    return (f"step {step:>6}/{total_steps} | loss {v['train/loss']:7.4f} | masked "
            f"{v['train/masked'] * 100:4.1f}% ce {v['train/masked_loss']:7.4f} | lr "
            f"{v['train/learning_rate']:.2e} | grad_norm {v['train/grad_norm']:7.3f} | "
            f"{v['train/throughput']:>9,.0f} tok/s | wait {v['train/data_wait_seconds']:4.1f} "
            f"s{mfu} | eta {metrics.duration((total_steps - step) * v['train/step_seconds'])}")


def eval_line(step, v, regions):
    """The bound of a validation in one line."""
    error = f" +- {v['eval/stderr']:.4f}" if "eval/stderr" in v else ""
    parts = " ".join(f"{name} {v[f'eval/nll_{name}']:.4f}" for name in regions
                     if f"eval/nll_{name}" in v)
    if "eval/accuracy" in v:
        parts += (f" | right {v['eval/accuracy']:.1%}, by the last number "
                  f"{v['eval/accuracy_flexible']:.1%}")
    return (f"eval   step {step:>6} | nll <= {v['eval/nll']:.4f}{error} nats/token | "
            f"{v['eval/bits_per_token']:.4f} bits/token | perplexity <= "
            f"{v['eval/perplexity']:,.2f} | loss {v['eval/loss']:.4f} | {parts}")


def log_validation(args, state, values, answers, regions):
    """Log and print a validation, on rank 0; answers go to a file for the report."""
    state.log.write(state.step, values)
    if answers:
        from diffusion import accuracy
        accuracy.write(args.output_dir, state.step, answers)
    tqdm.write(eval_line(state.step, values, regions))


def print_start(args, job, device, ranks, shards):
    """What is about to run. job: the trainer's Job. shards: GPUs that the state is sharded over."""
    rows, eval_rows, table = job.rows, job.eval_rows, job.table
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    with torch.device("meta"):
        model = weights.module_of(job.config).Model(job.config)
    size, trained = (sum(p.numel() for p in found)
                     for found in (model.parameters(), weights.trained(model).values()))
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    kind = f", {trained:,} of them trained" if base else ""
    held_out = sum(len(m) for m in eval_rows.members) if eval_rows else 0
    dropped = f", {rows.documents.dropped} dropped" if rows.documents.dropped else ""
    state = (20 * trained + base) / shards        # fp32 weights, gradients, two moments, average
    filled = table["clean"].sum() / (len(rows) * rows.length)
    lengths = np.concatenate([rows.documents.tokens[m] for m in rows.members])
    print(f"device     {ranks} x {where}, torch {torch.__version__}, "
          f"{'bf16 autocast' if args.bf16 else 'fp32'}\n"
          f"model      {job.name}, {size:,} parameters{kind}; weights, gradients, optimizer and "
          f"average {gib(state)} a GPU\n"
          f"problems   {table['samples'].sum()} to train, {held_out} to validate{dropped}; tokens "
          f"mean {lengths.mean():.0f} max {lengths.max()}\n"
          f"rows       {len(rows)} of {rows.length} clean and {rows.noisy_length} noisy tokens, "
          f"{filled * 100:.1f}% of the clean ones filled, {table['samples'].mean():.2f} problems "
          "each")
