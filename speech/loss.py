"""Common to Higgs-Audio V2 and Higgs TTS 3: forward, loss, its sums, and logged values."""
import numpy as np
import torch
import torch.nn.functional as F

from core import kernels
from core.metrics import duration
from speech.codes import FRAME_RATE
from speech.labels import IGNORE

SUMS = 8        # of batch_sums() besides the codebooks'


class Wrapped(torch.nn.Module):
    """Module that DDP wraps: forward(batch) -> sums, not means, so any split of a step adds up.

    net: the native model, or the PeftModel around it. recompute: of flags.MODES, or None. v2.py and
    v3.py have layers(native), hidden_states(batch) and audio_logits(hidden, batch).
    """

    def __init__(self, net, recompute=None):
        super().__init__()
        self.net = net
        # in a list, where torch does not look for modules: else parameters would be there twice
        self._base = [net.get_base_model() if hasattr(net, "get_base_model") else net]
        kernels.use(self.base_model)
        if recompute:
            kernels.set_mode(self, self.layers(self.base_model), recompute)

    @property
    def base_model(self):
        """The native model, adapters inside."""
        return self._base[0]

    def text_loss(self, hidden, batch):
        """() fp32 cross-entropy of the text targets: none are trained."""
        return torch.zeros((), device=hidden.device)

    def forward(self, batch, keep=False):
        """(audio (K,), text (), ends (5,)) of a labels.PackedBatch: fp32 sums over its targets.

        audio: cross-entropy per codebook; text: cross-entropy. ends (detached): of the
        end-of-stream targets cross-entropy, correct argmax and number; of codebook 0 alone, whose
        first one ends speech, how many of those are right, and how many codes are taken for one.
        keep: divergence() instead.
        """
        if keep:
            return divergence(self, batch)
        config = self.base_model.config
        hidden = self.hidden_states(batch)
        logits = self.audio_logits(hidden, batch).flatten(0, 1)     # (R * K, C)
        targets = batch.audio_targets.view(-1)
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
        text = self.text_loss(hidden, batch)
        with torch.no_grad():
            eos, shape = config.audio_stream_eos_id, batch.audio_targets.shape
            is_eos, says_eos = targets == eos, logits.argmax(-1) == eos
            by_book, says = is_eos.view(shape), says_eos.view(shape)[:, 0]
            first = by_book[:, 0] & ~by_book[:, 1:2].any(1)
            false = says & ~by_book[:, 0] & (batch.audio_targets[:, 0] != IGNORE)
            ends = torch.stack([(losses.detach() * is_eos).sum(), (says_eos & is_eos).sum(),
                                is_eos.sum(), (first & says).sum(), false.sum()]).float()
        return losses.view(shape).sum(0), text, ends


def batch_sums(audio, text, ends, batch):
    """(K + SUMS,) float64: what Wrapped returns, and its targets of audio (all codebooks) and text.
    Waits for no device.
    """
    losses = torch.cat([audio.detach(), text.detach()[None], ends]).double()
    counts = [torch.full((1,), batch.counts[name], dtype=torch.float64, device=losses.device)
              for name in ("audio_targets", "text_targets")]
    return torch.cat([losses, *counts])


def loss_report(sums, text_weight, prefix, ends_of):
    """Numbers of batch_sums(), summed over all ranks -> {"prefix/name": float}; NaN where no target
    was counted, since every step was skipped.

    ends_of: how many end-of-stream targets a clip has in each codebook. stop_recall: right ends of
    codebook 0 per clip; false_stop_rate: its false ends per code.
    """
    *audio, text, ends_loss, ends_right, ends, stops, false_stops, n_audio, n_text = sums
    books, clips = len(audio), ends / sum(ends_of)
    codes, audio_loss = (n_audio - ends) / books, sum(audio) / max(1, n_audio)
    total = total_loss(audio, n_audio, text, n_text, text_weight) if n_text else audio_loss
    values = {"loss": total, "audio_loss": audio_loss, "text_loss": text / max(1, n_text),
              "eos_loss": ends_loss / max(1, ends), "eos_accuracy": ends_right / max(1, ends),
              "stop_recall": stops / max(1, clips), "false_stop_rate": false_stops / max(1, codes)}
    values |= {f"audio_loss_codebook_{k}": loss / max(1, codes + clips * ends_of[k])
               for k, loss in enumerate(audio)}
    if n_audio + n_text == 0:
        values = dict.fromkeys(values, float("nan"))
    return {f"{prefix}/{name}": value for name, value in values.items()}


def total_loss(audio, n_audio, text, n_text, text_weight):
    """The training loss from sums over targets and their global numbers: K of audio, one a
    codebook, and one of text (tensors or floats).
    """
    return sum(audio) * (1 / max(1, n_audio)) + text * (text_weight / max(1, n_text))


def divergence(model, batch):
    """(K,) fp32: KL(base || model) of each codebook in nats, summed over the batch's trained cells.

    For --keep. model: a Wrapped with adapters; switched off they leave the base, which gets
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


def decays(name, parameter):
    """Weight decay shrinks matrices, not norms, nor embeddings: a batch has few of their rows."""
    return parameter.ndim > 1 and "embed" not in name


def flops_per_pack(config, tokens, audio_targets, text_targets, pairs, lora):
    """Model FLOPs of forward and backward on one pack; each row runs one of V2's two FFNs.

    A matrix with N weights costs 2N per row forward, 2N for the input gradient and, when it is
    trained, 2N for its gradient: 4N per row under LoRA, 6N in full. pairs: sum over samples of
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
            "{train/text_loss:6.3f} | stop {train/stop_recall:6.1%} | lr {train/learning_rate:.2e} "
            "| grad_norm {train/grad_norm:7.3f} | {train/audio_seconds_per_second:>7,.1f} "
            "audio-s/s{} | eta {}".format(step, total_steps, mfu, left, **values))


def eval_line(step, values):
    """One aligned line of a validation, with units."""
    return ("eval   step {:>6} | loss {eval/loss:7.4f} | audio {eval/audio_loss:6.3f} | text "
            "{eval/text_loss:6.3f} | eos {eval/eos_loss:6.3f} stop {eval/stop_recall:6.1%}"
            .format(step, **values))
