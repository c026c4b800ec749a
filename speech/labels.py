"""The tokens and codes of a conversation that the model sees, and the trained ones: the
collator's rules.

They are those of boson-ai/higgs-audio's collator: a clip of T frames takes T + 9 rows, codebook k
is delayed by k rows, its T codes and one end-of-stream are trained, begin-of-stream and the fill
never. A trained assistant turn's text, <|audio_out_bos|>, <|audio_eos|> and <|eot_id|> are text
targets.
"""
from dataclasses import dataclass

import numpy as np
import torch

from core.cli import UserError
from core import packing
from speech.conversations import Clip

IGNORE = -100           # a label that is not trained: torch's cross_entropy leaves it out
CONTROL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                  "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|audio_bos|>",
                  "<|audio_eos|>", "<|audio_out_bos|>", "<|AUDIO|>", "<|AUDIO_OUT|>")


@dataclass
class TokenIds:
    """Ids from the tokenizer and the model's config, and their layout; as v3.Ids."""
    audio: int              # <|AUDIO_OUT|>, one for each row of codes
    delay: int              # marks the last num_codebooks - 1 rows of a clip
    pad: int
    num_codebooks: int
    stream_bos: int
    stream_eos: int
    min_frames = 1          # codec frames of a trained clip
    lone_reference = False  # the model has to know what a reference says

    @property
    def audio_placeholder_id(self):
        """The token of a whole clip in a table."""
        return self.audio

    def known_tags(self, tokenizer):
        """Marks between <| and |> that are tokens of this model; all others are text."""
        return frozenset(tokenizer.get_added_vocab())

    def forbidden(self, tokenizer):
        """Tokens that no text may spell."""
        return [*CONTROL_TOKENS, tokenizer.convert_ids_to_tokens(self.delay)]

    def streams(self, sample):
        """[(name, conversation_pieces)] of a Sample, and what had to be left out: [] here."""
        return [(sample.name, conversation_pieces(sample))], []

    def rows(self, frames, trained):
        """Rows that a clip of this many frames takes; ints or arrays."""
        return frames + self.num_codebooks + 1 + 0 * trained

    def targets(self, frames):
        """Trained codes of a clip of this many frames."""
        return self.num_codebooks * (frames + 1)

    def predicting(self, frames):
        """Rows that predict a trained clip of this many frames."""
        return frames + self.num_codebooks

    def assemble(self, tokens, labelled, codes):
        """One sample as the model sees it: each <|AUDIO_OUT|> becomes the delayed rows of its clip.

        tokens (t,) int64, labelled (t,) bool, codes: one (T, 8) array per clip. Returns a dict of
        input_ids (n,), is_audio (n,), text_labels (n,), audio_ids (a, 8), audio_labels (a, 8).
        """
        # in the table a clip is one token; here it takes a row for each of its codes
        places = np.flatnonzero(tokens == self.audio)
        repeats = np.ones(len(tokens), np.int64)
        rows, labels, placeholders = [], [], []
        for place, clip in zip(places, codes):
            rows.append(delay_rows(clip, self.stream_bos, self.stream_eos))
            # a reference is heard, but not trained
            labels.append(delay_labels(clip, self.stream_eos) if labelled[place]
                          else np.full_like(rows[-1], IGNORE))
            repeats[place] = len(rows[-1])
            placeholders.append(np.full(len(rows[-1]), self.audio))
            # the native processor's other placeholder, for rows that wait for the last codebooks
            placeholders[-1][-(self.num_codebooks - 1):] = self.delay
        is_audio = np.repeat(tokens == self.audio, repeats)
        input_ids = np.repeat(tokens, repeats)
        # audio rows are trained by their codes, and have no text
        text_labels = np.where(np.repeat(labelled, repeats) & ~is_audio, input_ids, IGNORE)
        empty = np.empty((0, self.num_codebooks), np.int64)     # a sample may have no clip
        if placeholders:
            input_ids[is_audio] = np.concatenate(placeholders)
        return {"input_ids": input_ids, "is_audio": is_audio, "text_labels": text_labels,
                "audio_ids": np.concatenate([empty, *rows]),
                "audio_labels": np.concatenate([empty, *labels])}


def token_ids(tokenizer, config):
    """TokenIds of a native Higgs config. UserError when tokenizer and model do not fit."""
    for name in CONTROL_TOKENS:
        if tokenizer.convert_tokens_to_ids(name) in (None, tokenizer.unk_token_id):
            raise UserError(f"--model_path: its tokenizer has no {name}: it is not Higgs-Audio's")
    audio = tokenizer.convert_tokens_to_ids("<|AUDIO_OUT|>")
    if audio != config.audio_token_id or len(tokenizer) > config.vocab_size:
        raise UserError("tokenizer and model disagree: "
                        f"<|AUDIO_OUT|> is {audio} and {config.audio_token_id}, "
                        f"{len(tokenizer)} tokens and {config.vocab_size}")
    return TokenIds(audio, config.audio_delay_token_id, config.pad_token_id, config.num_codebooks,
                    config.audio_stream_bos_id, config.audio_stream_eos_id)


# ---- From a conversation to rows


def conversation_pieces(sample):
    """[(text or Clip, labelled)] of the token stream: the official template, turn by turn."""
    # written out, not by the tokenizer's template: the pieces show which tokens are trained
    pieces = [("<|begin_of_text|>", False)]
    for number, turn in enumerate(sample.turns):
        pieces.append((f"<|start_header_id|>{turn.role}<|end_header_id|>\n\n", False))
        text = ""
        for part in turn.parts:
            if isinstance(part, Clip):
                # the native template writes a space before a scene's clip
                text += " " if turn.role == "system" else ""
                if text:
                    pieces.append((text, turn.trained))
                text = ""
                # all three are targets: the model has to begin and to end speech by itself
                for piece in ("<|audio_out_bos|>", part, "<|audio_eos|>"):
                    pieces.append((piece, turn.trained))
            else:
                text += part
        if text:
            pieces.append((text, turn.trained))
        # a speaker who goes on ends with <|eom_id|>, end of message; all others end their turn
        followed = number + 1 < len(sample.turns) and sample.turns[number + 1].role == "assistant"
        goes_on = turn.role == "assistant" and followed
        pieces.append(("<|eom_id|>" if goes_on else "<|eot_id|>", turn.trained))
    return pieces


def delay_rows(codes, bos, eos):
    """(T, K) codes -> (T + K + 1, K) inputs: [BOS, codes, EOS], codebook k k rows down."""
    frames, books = codes.shape
    # filled with end-of-stream, so what follows a codebook's last code needs no writing
    rows = np.full((frames + books + 1, books), eos, np.int64)
    for k in range(books):
        # codebook k starts k rows later: it is predicted from the codes of those before it
        rows[:k + 1, k] = bos
        rows[k + 1:k + 1 + frames, k] = codes[:, k]
    return rows


def delay_labels(codes, eos):
    """(T, K) codes -> (T + K + 1, K) labels of delay_rows: T codes and an EOS a book, else -100."""
    frames, books = codes.shape
    labels = np.full((frames + books + 1, books), IGNORE, np.int64)
    for k in range(books):
        # one row below the begin-of-stream rows, which nobody predicts; one end-of-stream, since
        # generation fills in the rest itself
        labels[k + 1:k + 1 + frames, k] = codes[:, k]
        labels[k + 1 + frames, k] = eos
    return labels


def audio_targets(sample):
    """(R,) positions in a sample that predict a row of codes, (R, 8) that row, IGNORE where not
    trained. sample: of assemble, whose labels are in the rows they belong to, or of v3's.
    """
    if "audio_at" in sample:
        return sample["audio_at"], sample["audio_targets"]
    # a row predicts the one after it; row 0 of a clip is never a label, so none reaches into the
    # next clip
    following = sample["audio_labels"][1:]
    trained = np.flatnonzero((following != IGNORE).any(axis=1))
    return np.flatnonzero(sample["is_audio"])[trained], following[trained]


@dataclass
class PackedBatch:
    """B samples of S tokens in all, A of them audio rows, on one flat axis. All tensors int64
    unless noted.

    The model keeps hidden states in modality order (text rows first, then audio rows), so that each
    FFN works on one contiguous slice; attention permutes to sequence order and back.
    """
    input_ids: torch.Tensor         # (S,) sequence order; audio rows hold native placeholders
    position_ids: torch.Tensor      # (S,) position within its sample
    cu_seqlens: torch.Tensor        # (B + 1,) int32 sample boundaries
    audio_ids: torch.Tensor         # (A, 8) delayed codes
    audio_pos: torch.Tensor         # (A,) sequence positions of audio rows
    text_pos: torch.Tensor          # (S - A,) sequence positions of text rows
    seq_index: torch.Tensor         # (S,) modality-order row of each sequence position
    audio_rows: torch.Tensor        # (R,) modality-order rows that predict audio
    audio_targets: torch.Tensor     # (R, 8) next row's codes, -100 where not trained
    text_rows: torch.Tensor         # (Q,) modality-order rows that predict text
    text_targets: torch.Tensor      # (Q,)
    longest: int                    # longest sample, up to a multiple of 128
    seqlens: tuple                  # B python ints: sample lengths, for attention sample by sample
    samples: tuple                  # sample numbers in the table, for naming them in errors
    counts: dict                    # ints: tokens, samples, padding, audio_targets, text_targets

    __reduce__ = packing.reduce
    to = packing.to
