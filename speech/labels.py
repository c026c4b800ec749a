"""Model inputs and labels of a conversation, and the loss.

The rules follow boson-ai/higgs-audio's collator. A clip of T frames takes T + 9 rows; codebook k
is delayed by k rows. Its T codes and one end-of-stream are trained; begin-of-stream and the fill
after the end are not. In a trained assistant turn the text, <|audio_out_bos|>, <|audio_eos|> and
<|eot_id|> are text targets.
"""
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from core import kernels
from core.cli import require
from speech.conversations import FRAME_RATE, Clip

N_EXTRA = 8                # number of batch_sums() besides one per codebook
IGNORE = -100           # a label that is not trained: torch's cross_entropy leaves it out
CONTROL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                  "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|audio_bos|>",
                  "<|audio_eos|>", "<|audio_out_bos|>", "<|AUDIO|>", "<|AUDIO_OUT|>")


class Layout:
    """Turns tokens and clips into rows and labels. TokenIds (V2) and v3.Ids (TTS 3) set what
    differs. frames, trained: ints or arrays."""

    def rows(self, frames, trained):
        """Rows that a clip of this many frames takes."""
        # first = 1 (TTS 3) omits both end rows and, if trained, the next to last: just a label
        return frames + self.num_codebooks + 1 - self.first * (2 + trained)

    def predictions(self, frames):
        """Number of rows that predict a trained clip of this many frames."""
        return frames + self.num_codebooks - self.first

    def targets(self, frames):
        """Trained codes and end-of-streams of a clip of this many frames."""
        ends = sum(range(self.num_codebooks)) if self.all_ends else self.num_codebooks
        return self.num_codebooks * frames + ends

    def assemble(self, tokens, labelled, codes):
        """One sample as the model sees it: each placeholder becomes its clip's delayed rows.

        tokens (t,) int64, labelled (t,) bool, codes: one (T, 8) array per clip. Returns a dict of
        input_ids (n,), is_audio (n,), text_labels (n,) and audio_ids (a, 8); audio_at (R,), the
        positions that predict a row, and audio_targets (R, 8), that row, IGNORE where untrained."""
        is_clip, repeats = tokens == self.audio_placeholder_id, np.ones(len(tokens), np.int64)
        repeats[is_clip] = [self.rows(*clip) for clip in zip(map(len, codes), labelled[is_clip])]
        starts, is_audio = np.cumsum(repeats) - repeats, np.repeat(is_clip, repeats)
        input_ids = np.repeat(tokens, repeats)
        # audio rows have code labels and no text labels
        text_labels = np.where(np.repeat(labelled, repeats) & ~is_audio, input_ids, IGNORE)
        none = np.empty((0, self.num_codebooks), np.int64)      # a sample may have no clip
        rows, positions, targets = [none], [none[:, 0]], [none]
        for position, clip in zip(np.flatnonzero(is_clip), codes):
            start, n = starts[position], repeats[position]
            input_ids[start:start + n] = self.placeholders(n)
            bos, eos = self.stream_bos, self.stream_eos
            rows.append(delay_rows(clip, bos, eos, eos)[self.first:][:n])
            if labelled[position]:      # a reference is an input without labels
                predictions = self.predictions(len(clip))
                labels = delay_rows(clip, IGNORE, eos, eos if self.all_ends else IGNORE)
                # shifted by one: each row predicts the next, and row 0 is never a label
                targets.append(labels[1:][:predictions])
                positions.append(start - self.first + np.arange(predictions))
        return {"input_ids": input_ids, "is_audio": is_audio, "text_labels": text_labels,
                "audio_ids": np.concatenate(rows), "audio_at": np.concatenate(positions),
                "audio_targets": np.concatenate(targets)}


@dataclass
class TokenIds(Layout):
    """Ids from the tokenizer and the model's config, and their layout."""
    audio: int              # <|AUDIO_OUT|>, one for each row of codes
    delay: int              # marks the last num_codebooks - 1 rows of a clip
    pad: int
    num_codebooks: int
    stream_bos: int
    stream_eos: int
    first = 0               # the first row of delay_rows that is used
    all_ends = False        # True if all of the fill after the end is trained
    min_frames = 1          # the fewest codec frames of a trained clip
    lone_reference = False  # True if a reference may come without its text

    @property
    def audio_placeholder_id(self):
        """The token that represents a whole clip in a table."""
        return self.audio

    def known_tags(self, tokenizer):
        """Marks between <| and |> that are tokens of this model; all others are text."""
        return frozenset(tokenizer.get_added_vocab())

    def forbidden_tokens(self, tokenizer):
        """Tokens that no text may contain."""
        return [*CONTROL_TOKENS, tokenizer.convert_ids_to_tokens(self.delay)]

    def streams(self, sample):
        """[(name, conversation_pieces)] of a Sample, and a list of omissions: [] here."""
        return [(sample.name, conversation_pieces(sample))], []

    def placeholders(self, rows):
        """Ids at a clip's rows; the native processor marks the tail of the delay pattern."""
        tail = self.num_codebooks - 1
        return [self.audio] * (rows - tail) + [self.delay] * tail


def token_ids(tokenizer, config):
    """TokenIds of a native Higgs config. UserError when tokenizer and model do not fit."""
    for name in CONTROL_TOKENS:
        require(tokenizer.convert_tokens_to_ids(name) not in (None, tokenizer.unk_token_id),
                f"--model_path: its tokenizer has no {name}: it is not Higgs-Audio's")
    audio = tokenizer.convert_tokens_to_ids("<|AUDIO_OUT|>")
    require(audio == config.audio_token_id and len(tokenizer) <= config.vocab_size,
            f"tokenizer and model disagree: <|AUDIO_OUT|> is {audio} and {config.audio_token_id}, "
            f"{len(tokenizer)} tokens and {config.vocab_size}")
    return TokenIds(audio, config.audio_delay_token_id, config.pad_token_id, config.num_codebooks,
                    config.audio_stream_bos_id, config.audio_stream_eos_id)


# ---- From a conversation to rows


def conversation_pieces(sample):
    """[(text or Clip, labelled)] of the token stream: the official template, turn by turn."""
    # not by the tokenizer's template, which does not show which tokens are trained
    pieces = [("<|begin_of_text|>", False)]
    for turn, following in zip(sample.turns, [*sample.turns[1:], None]):
        pieces.append((f"<|start_header_id|>{turn.role}<|end_header_id|>\n\n", False))
        text = ""
        for content in turn.parts:      # texts and clips
            if not isinstance(content, Clip):
                text += content
                continue
            # the native template writes a space before a scene's clip
            text += " " if turn.role == "system" else ""
            # all four are targets: the model must also learn to begin and to end speech
            pieces += [(piece, turn.trained)
                       for piece in (text, "<|audio_out_bos|>", content, "<|audio_eos|>") if piece]
            text = ""
        if text:
            pieces.append((text, turn.trained))
        # <|eom_id|> (end of message) if the assistant continues, else <|eot_id|> (end of turn)
        goes_on = turn.role == "assistant" and following and following.role == "assistant"
        pieces.append(("<|eom_id|>" if goes_on else "<|eot_id|>", turn.trained))
    return pieces


def delay_rows(codes, bos, eos, fill):
    """(T, K) codes -> (T + K + 1, K) rows: [BOS, codes, EOS, fill], codebook k shifted by k rows.
    Inputs are filled with EOS. Labels have IGNORE as BOS, which is never predicted, and as fill,
    unless it is trained."""
    frames, books = codes.shape
    rows = np.full((frames + books + 1, books), fill, np.int64)
    for k in range(books):
        # codebook k starts k rows later: it is predicted from the codes of those before it
        rows[:k + 1, k] = bos
        rows[k + 1:k + 1 + frames, k] = codes[:, k]
        rows[k + 1 + frames, k] = eos
    return rows


# ---- Loss, the same for V2 and TTS 3


class PackedBase(torch.nn.Module):
    """Base class of the module that DDP wraps. forward(batch) returns sums, not means, so the parts
    of a step add up however it is split. v2.py and v3.py define layers(native),
    hidden_states(batch) and audio_logits(hidden, batch). net: native model or PeftModel.
    recompute: as --gradient_checkpointing."""

    def __init__(self, net, recompute=None):
        super().__init__()
        self.net = net
        kernels.recompute(self.layers(self.base_model), recompute)

    @property
    def base_model(self):
        """The native model, adapters inside."""
        return self.net.get_base_model() if hasattr(self.net, "get_base_model") else self.net

    def text_loss(self, hidden, batch):
        """() fp32 cross-entropy of the text targets; zero here, as TTS 3 trains none."""
        return torch.zeros((), device=hidden.device)

    def forward(self, batch, keep=False):
        """(audio (K,), text (), ends (5,)) of a data.PackedBatch: fp32 sums over its targets.

        audio: cross-entropy per codebook; text: cross-entropy. ends (detached): of all
        end-of-stream targets the cross-entropy, the number predicted and the number; then, of
        codebook 0, whose first end-of-stream ends speech, the number of first ones predicted and
        the number of codes mistaken for one. keep: return keep.divergence() instead."""
        if keep:
            from speech.keep import divergence
            return divergence(self, batch)
        config = self.base_model.config
        hidden = self.hidden_states(batch)
        logits = self.audio_logits(hidden, batch).flatten(0, 1)     # (R * K, C)
        targets = batch.audio_targets.view(-1)
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
        text = self.text_loss(hidden, batch)
        with torch.no_grad():
            eos, shape = config.audio_stream_eos_id, batch.audio_targets.shape
            is_eos, predicts_eos = targets == eos, logits.argmax(-1) == eos
            eos_of_book, predicts_stop = is_eos.view(shape), predicts_eos.view(shape)[:, 0]
            is_stop = eos_of_book[:, 0] & ~eos_of_book[:, 1:2].any(1)
            is_code = (batch.audio_targets[:, 0] != IGNORE) & ~eos_of_book[:, 0]
            ends = torch.stack([
                (losses.detach() * is_eos).sum(), (predicts_eos & is_eos).sum(), is_eos.sum(),
                (predicts_stop & is_stop).sum(), (predicts_stop & is_code).sum()]).float()
        return losses.view(shape).sum(0), text, ends


def batch_sums(audio, text, ends, batch):
    """(K + N_EXTRA,) float64: the outputs of PackedBase, then the numbers of audio targets (all
    codebooks) and text targets. No host sync."""
    losses = torch.cat([audio.detach(), text.detach()[None], ends]).double()
    # filled on the device: a tensor made from Python numbers would be copied, with a host sync
    return torch.cat([losses, *(losses.new_full((1,), batch.counts[name])
                                for name in ("audio_targets", "text_targets"))])


def loss_report(sums, text_weight, prefix, all_ends=False):
    """Sums of batch_sums() over all ranks -> {"prefix/name": float}. All are NaN if every step was
    skipped, as no target was counted. all_ends: as in Layout. stop_recall: correct ends of
    codebook 0 per clip. false_stop_rate: false ends of codebook 0 per code."""
    *audio, text, ends_loss, ends_right, ends, stops, false_stops, n_audio, n_text = sums
    books = len(audio)
    ends_of_book = [books - 1 - book if all_ends else 1 for book in range(books)]     # of a clip
    clips, codes = ends / sum(ends_of_book), (n_audio - ends) / books
    audio_loss = sum(audio) / max(1, n_audio)
    total = total_loss(audio, n_audio, text, n_text, text_weight) if n_text else audio_loss
    values = {"loss": total, "audio_loss": audio_loss, "text_loss": text / max(1, n_text),
              "eos_loss": ends_loss / max(1, ends), "eos_accuracy": ends_right / max(1, ends),
              "stop_recall": stops / max(1, clips), "false_stop_rate": false_stops / max(1, codes)}
    values |= {f"audio_loss_codebook_{k}": loss / max(1, codes + clips * ends_of_book[k])
               for k, loss in enumerate(audio)}
    return {f"{prefix}/{name}": value if n_audio + n_text else float("nan")
            for name, value in values.items()}


def total_loss(audio, n_audio, text, n_text, text_weight):
    """The training loss from K audio sums and a text sum over targets, and their global numbers."""
    return sum(audio) * (1 / max(1, n_audio)) + text * (text_weight / max(1, n_text))


def step_work(config, table, samples, lora):
    """Totals over the samples of an optimizer step on all ranks, from the table; Python numbers.

    flops: the model's, forward and backward; each row runs one of V2's two FFNs. A matrix of N
    weights costs 2N per row forward, 2N for the input's gradient and, when trained, 2N for the
    weights'. An attended (query, key) pair costs 4 * heads * head_dim forward and twice that
    backward. Recomputation and adapters are not counted."""
    lengths = table.lengths[samples].astype(np.int64)
    pairs = lengths * (lengths + 1) // 2        # of causal attention
    tokens, n_audio, n_text, pairs, frames = (int(values.sum()) for values in (
        lengths, table.audio_targets[samples], table.text_targets[samples], pairs,
        table.frames[samples]))
    h, d = config.hidden_size, config.head_dim
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    layer = h * d * (2 * heads + 2 * kv) + 3 * h * config.intermediate_size
    rows = tokens * layer * config.num_hidden_layers
    rows += n_audio * h * config.codebook_size + n_text * h * config.vocab_size
    flops = (4 if lora else 6) * rows + 3 * 4 * heads * d * pairs * config.num_hidden_layers
    return {"audio_targets": n_audio, "text_targets": n_text, "tokens": tokens, "flops": flops,
            "samples": len(samples), "audio_seconds": frames / FRAME_RATE}
