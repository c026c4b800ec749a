"""The training loss and its sums: what Higgs-Audio V2 and Higgs TTS 3 have in common."""
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from core.metrics import duration
from speech.codes import FRAME_RATE
from speech.labels import IGNORE


class Ends(NamedTuple):
    """Sums over the end-of-stream targets: cross-entropy, how many argmax gets right, how many
    there are.

    stops, false_stops: of codebook 0 alone, which ends speech: ends that argmax gets right, and
    codes that argmax takes for an end.
    """
    loss: float
    correct: float
    targets: float
    stops: float
    false_stops: float


class Sums(NamedTuple):
    """Sums over the targets of batches: tensors on the device, or floats in a report."""
    audio: torch.Tensor     # (K,) cross-entropy of each codebook
    text: torch.Tensor      # () cross-entropy
    ends: Ends              # (5,)
    audio_targets: int      # trained codes, of all codebooks
    text_targets: int

    @staticmethod
    def of_batch(audio, text, ends, batch):
        """(K + 8,) float64 of what the model returns for a batch; waits for no device."""
        losses = torch.cat([audio.detach(), text.detach()[None], ends]).double()
        counts = [torch.full((1,), batch.counts[name], dtype=torch.float64, device=losses.device)
                  for name in ("audio_targets", "text_targets")]
        return torch.cat([losses, *counts])

    @classmethod
    def size(cls, codebooks):
        """How many numbers of_batch() has."""
        return codebooks + 3 + len(Ends._fields)

    @classmethod
    def of(cls, numbers):
        """The Sums, as floats, of the list of of_batch()'s numbers."""
        books = len(numbers) - cls.size(0)
        text, *ends = numbers[books:-2]
        return cls(numbers[:books], text, Ends(*ends), *numbers[-2:])


def total_loss(audio, n_audio, text, n_text, text_weight):
    """The training loss from sums over targets and their global numbers: K of audio, one a codebook,
    and one of text (tensors or floats).
    """
    return sum(audio) * (1 / max(1, n_audio)) + text * (text_weight / max(1, n_text))


def divergence(model, batch):
    """(K,) fp32: KL(base || model) of each codebook in nats, summed over the batch's trained cells.

    For --keep. model: a versions.packed with adapters; switched off they leave the base, which gets
    no gradient and no dropout. Where the model knows what the base knows, it is 0.
    """
    from core import adapters
    training = model.training
    model.eval()
    with torch.no_grad(), adapters.switched_off(model.net):
        base = model.audio_logits(model.hidden_states(batch), batch).log_softmax(-1)
    model.train(training)
    ours = model.audio_logits(model.hidden_states(batch), batch).log_softmax(-1)
    apart = F.kl_div(ours, base, log_target=True, reduction="none").sum(-1)
    return (apart * (batch.audio_targets != IGNORE)).sum(0)


def named(values, sums, prefix):
    """{"prefix/name": value} of a report; NaN where no target was counted, since every step was
    skipped.
    """
    if sums.audio_targets + sums.text_targets == 0:
        values = dict.fromkeys(values, float("nan"))
    return {f"{prefix}/{name}": value for name, value in values.items()}


def decays(name, parameter):
    """Weight decay shrinks matrices, not norms, nor embeddings: a batch has few of their rows."""
    return parameter.ndim > 1 and "embed" not in name


def flops_per_pack(config, tokens, audio_targets, text_targets, pairs, lora):
    """Model FLOPs of forward and backward on one pack; each row runs one of V2's two FFNs.

    A matrix with N weights costs 2N per row forward, 2N for the input gradient and, when it is
    trained, 2N for its own gradient: 4N per row under LoRA, 6N in full. pairs: sum over samples of
    n (n + 1) / 2 attended (query, key) pairs, each 4 * heads * head_dim forward and twice that
    backward. Recomputation and adapters are not counted.
    """
    h, d = config.hidden_size, config.head_dim
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    layer = h * d * (2 * heads + 2 * kv) + 3 * h * config.intermediate_size
    rows = tokens * layer * config.num_hidden_layers
    rows += audio_targets * h * config.codebook_size + text_targets * h * config.vocab_size
    return (4 if lora else 6) * rows + 3 * 4 * heads * d * pairs * config.num_hidden_layers


def step_work(config, table, samples, lora):
    """Totals over the samples of an optimizer step, all ranks, from the table; python numbers."""
    lengths = table.lengths[samples].astype(np.int64)
    n_audio, n_text = (int(n[samples].sum()) for n in (table.audio_targets, table.text_targets))
    pairs = int((lengths * (lengths + 1) // 2).sum())       # of causal attention
    flops = flops_per_pack(config, int(lengths.sum()), n_audio, n_text, pairs, lora)
    return {"audio_targets": n_audio, "text_targets": n_text, "tokens": int(lengths.sum()),
            "samples": len(samples), "audio_seconds": int(table.frames[samples].sum()) / FRAME_RATE,
            "flops": flops}


def train_line(step, total_steps, values):
    """One aligned line of at most 160 characters, with units; metrics.jsonl has all numbers."""
    left = duration((total_steps - step) * values["train/step_seconds"])
    mfu = f" | mfu {values['train/mfu']:6.1%}" if "train/mfu" in values else ""
    return ("step {:>6}/{} | loss {train/loss:7.4f} | audio {train/audio_loss:6.3f} text "
            "{train/text_loss:6.3f} | stop {train/stop_recall:6.1%} | lr {train/learning_rate:.2e} | "
            "grad_norm {train/grad_norm:7.3f} | {train/audio_seconds_per_second:>7,.1f} "
            "audio-s/s{} | eta {}".format(step, total_steps, mfu, left, **values))


def eval_line(step, values):
    """One aligned line of a validation, with units."""
    return ("eval   step {:>6} | loss {eval/loss:7.4f} | audio {eval/audio_loss:6.3f} | text "
            "{eval/text_loss:6.3f} | eos {eval/eos_loss:6.3f} stop {eval/stop_recall:6.1%}"
            .format(step, **values))
